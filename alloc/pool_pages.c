/* VMM backing: physical pages, and how they come to lie under a block.
 *
 * A block that fits in no run is put into a gap, and frames are made active at the gap's missing
 * pages: those that are mapped there already and idle elsewhere, then others that are idle, longest
 * idle first, then new ones. Memory moves by being mapped at its new address too; the old mapping
 * stays (heap_frames.h), so that a failure at any call can be undone without a further mapping, and
 * a shape that comes back needs no driver call. Which gap: pool_grow.c.
 *
 *   1 choose   the gap, its VOID pieces (targets), the frames, the pieces that they leave (sources)
 *   2 make     the frames that are still lacking
 *   3 map      other mappings in the way undone, frames mapped, then access
 *                                                       <- a failure up to here is undone
 *   4 commit   targets become FREE, sources VOID; nothing fails any more
 *
 * A source may still be in use when it moves, by work that the new block's stream comes after.
 */
#include <stdlib.h>

#include "event_ring.h"
#include "host_alloc.h"
#include "pool_idle.h"

/* ---- one filling of a gap -------------------------------------------------------------------- */

/* A missing page of the window, and the frame for it. */
typedef struct filling_page {
    size_t page;
    tn__frame *frame;
    int is_dormant; /* it is mapped there already */
    int is_mapped;  /* by this filling */
} filling_page;

typedef struct filling {
    tn_pool *pool;
    const tn__request *request;
    tn__place place;
    tn__page_span window;
    uint64_t claim;
    filling_page *pages; /* in order of address */
    size_t page_count;
    tn__piece **targets;
    tn__uses *target_uses; /* as they will be */
    size_t target_count;
    tn__view **moved; /* where the chosen frames are active */
    size_t moved_count;
    tn__piece **sources;
    size_t source_count;
    tn__frame **taken; /* that were active nowhere */
    size_t taken_count;
    tn__uses uses; /* of all sources */
} filling;

static tn__page_span span_of(const tn__piece *piece) {
    return tn__pages_inside(piece->region, piece->address, tn__piece_end(piece));
}

/* Cuts the VOID pieces of the gap at the edges of the window. */
static tn_status choose_targets(filling *fill) {
    tn__heap *heap = &fill->pool->heap;
    tn__region *region = fill->place.region;
    uintptr_t begin = tn__page_address(region, fill->window.first);
    uintptr_t end = tn__page_address(region, fill->window.end);
    tn__piece *piece = tn__piece_at(fill->place.first, begin);
    for (; piece && piece->address < end; piece = piece->next) {
        if (piece->kind != TN__PIECE_VOID) continue;
        TN_TRY(tn__heap_reserve(heap, 2));
        if (piece->address < begin) {
            TN_TRY(tn__heap_split(heap, piece, begin));
            piece = piece->next;
        }
        if (tn__piece_end(piece) > end) TN_TRY(tn__heap_split(heap, piece, end));
        fill->targets[fill->target_count++] = piece;
    }
    return TN_OK;
}

/* ---- frames ---------------------------------------------------------------------------------- */

static void use_frame(filling *fill, filling_page *page, tn__frame *frame) {
    frame->claim = fill->claim;
    page->frame = frame;
    if (frame->active) fill->moved[fill->moved_count++] = frame->active;
}

/* Frames that are mapped where they are wanted; gives the count of pages without. */
static tn_status choose_dormant(filling *fill, size_t *lacking) {
    tn__region *region = fill->place.region;
    for (size_t i = fill->window.first; i < fill->window.end; i++) {
        filling_page *page = &fill->pages[fill->page_count];
        tn__page_state state = tn__page_choose(fill->request, region, i, fill->window, fill->claim);
        if (state == TN__PAGE_ACTIVE) continue;
        if (state == TN__PAGE_BLOCKED) {
            return TN_FAIL(TN_OUT_OF_ADDRESS_SPACE, "work still uses what was mapped at the only "
                                                    "addresses for the block");
        }
        *page = (filling_page){.page = i, .is_dormant = state == TN__PAGE_DORMANT};
        if (page->is_dormant) {
            use_frame(fill, page, region->views[i].frame);
        } else {
            ++*lacking;
        }
        fill->page_count++;
    }
    return TN_OK;
}

/* The next page from `page` on that lacks a frame. */
static filling_page *next_lacking(filling *fill, filling_page *page) {
    while (page < fill->pages + fill->page_count && page->frame)
        page++;
    return page;
}

static tn_status choose_idle(filling *fill, size_t lacking) {
    tn__idle_filter filter = {
        .excluded = fill->place.region, .window = fill->window, .spared = fill->request->spared};
    filling_page *to = next_lacking(fill, fill->pages);
    tn__idle_pages *idle = NULL;
    size_t count = 0;
    if (lacking == 0) return TN_OK;
    if (fill->request->only_ready) filter.ready_for = fill->request;
    TN_TRY(tn__idle_list(fill->pool, &filter, &idle, &count));
    for (size_t i = 0; i < count && lacking > 0; i++) {
        for (size_t page = idle[i].span.end; page-- > idle[i].span.first && lacking > 0;) {
            tn__frame *frame = tn__region_frame(idle[i].region, page);
            if (frame->claim == fill->claim) continue;
            use_frame(fill, to, frame);
            to = next_lacking(fill, to);
            lacking--;
        }
    }
    tn__host_free(idle);
    return TN_OK;
}

static tn_status take_frames(filling *fill) {
    filling_page *end = fill->pages + fill->page_count;
    filling_page *page = next_lacking(fill, fill->pages);
    for (; page < end; page = next_lacking(fill, page)) {
        tn__frame *frame = NULL;
        TN_TRY(tn__frame_take(fill->pool, &frame));
        fill->taken[fill->taken_count++] = frame;
        use_frame(fill, page, frame);
    }
    return TN_OK;
}

/* ---- sources --------------------------------------------------------------------------------- */

static int compare_places(const void *a, const void *b) {
    const tn__view *left = *(tn__view *const *)a;
    const tn__view *right = *(tn__view *const *)b;
    return left < right ? -1 : left > right;
}

static tn_status add_source(filling *fill, tn__region *region, tn__page_span span) {
    tn__piece *source = NULL;
    TN_TRY(tn__idle_isolate(&fill->pool->heap, region, span, &source));
    fill->sources[fill->source_count++] = source;
    TN_TRY(tn__uses_reserve(&fill->uses, fill->uses.count + source->uses.count));
    for (uint32_t i = 0; i < source->uses.count; i++) {
        tn__use use = tn__uses_items(&source->uses)[i];
        tn__uses_add(&fill->uses, use.stream, use.epoch);
    }
    return TN_OK;
}

/* The last page of those from `page` on that lie in the FREE piece that page begins in, or `page`.
 */
static size_t last_in_piece(const tn__region *region, size_t page) {
    tn__page_span inside = span_of(tn__page_idle_piece(region, page));
    return inside.end > page ? inside.end - 1 : page;
}

/* Cuts out the pages that the frames leave: neighbours of one piece together. */
static tn_status cut_sources(filling *fill) {
    if (fill->moved_count == 0) return TN_OK;
    qsort(fill->moved, fill->moved_count, sizeof(tn__view *), compare_places);
    for (size_t i = 0; i < fill->moved_count;) {
        tn__region *region = fill->moved[i]->region;
        size_t first = tn__view_page(fill->moved[i]);
        size_t last = last_in_piece(region, first);
        size_t end = first + 1;
        for (i++; i < fill->moved_count && fill->moved[i] == &region->views[end] && end <= last;
             i++)
            end++;
        TN_TRY(add_source(fill, region, (tn__page_span){first, end}));
    }
    return TN_OK;
}

/* ---- driver calls ---------------------------------------------------------------------------- */

static tn_status unmap_others(filling *fill) {
    tn__region *region = fill->place.region;
    for (size_t i = 0; i < fill->page_count; i++) {
        size_t page = fill->pages[i].page;
        if (fill->pages[i].is_dormant || !region->views[page].frame) continue;
        TN_TRY(tn__views_unmap(fill->pool, region, (tn__page_span){page, page + 1}));
    }
    return TN_OK;
}

static tn_status map_page(filling *fill, filling_page *page) {
    tn_pool *pool = fill->pool;
    tn__region *region = fill->place.region;
    TN_TRY(pool->driver->mem_map(pool->state, (void *)tn__page_address(region, page->page),
                                 pool->page_bytes, page->frame->handle));
    tn__frame_attach(&pool->heap, page->frame, region, page->page);
    page->is_mapped = 1;
    return TN_OK;
}

/* Access is set for neighbouring pages at once. */
static tn_status map_pages(filling *fill) {
    tn_pool *pool = fill->pool;
    filling_page *end = fill->pages + fill->page_count;
    for (filling_page *page = fill->pages; page < end;) {
        size_t first = page->page;
        size_t count = 0;
        if (page->is_dormant) {
            page++;
            continue;
        }
        for (; page < end && page->page == first + count && !page->is_dormant; page++, count++)
            TN_TRY(map_page(fill, page));
        TN_TRY(tn__pool_set_access(pool, (void *)tn__page_address(fill->place.region, first),
                                   count * pool->page_bytes));
    }
    return TN_OK;
}

/* ---- all or nothing -------------------------------------------------------------------------- */

static tn_status make_room(filling *fill) {
    size_t room = fill->window.end - fill->window.first;
    fill->pages = tn__host_alloc(room, sizeof *fill->pages);
    fill->targets = tn__host_alloc(room, sizeof(tn__piece *));
    fill->target_uses = tn__host_alloc(room, sizeof *fill->target_uses);
    fill->moved = tn__host_alloc(room, sizeof(tn__view *));
    fill->sources = tn__host_alloc(room, sizeof(tn__piece *));
    fill->taken = tn__host_alloc(room, sizeof(tn__frame *));
    if (!fill->pages || !fill->targets || !fill->target_uses) return TN_OUT_OF_HOST_MEMORY;
    if (!fill->moved || !fill->sources || !fill->taken) return TN_OUT_OF_HOST_MEMORY;
    return TN_OK;
}

static void free_room(filling *fill) {
    for (size_t i = 0; fill->target_uses && i < fill->target_count; i++)
        tn__uses_clear(&fill->target_uses[i]);
    tn__uses_clear(&fill->uses);
    tn__host_free(fill->pages);
    tn__host_free(fill->targets);
    tn__host_free(fill->target_uses);
    tn__host_free(fill->moved);
    tn__host_free(fill->sources);
    tn__host_free(fill->taken);
}

/* Everything that can fail, in an order that undo_fill can undo. */
static tn_status prepare_fill(filling *fill) {
    tn_pool *pool = fill->pool;
    size_t lacking = 0;
    TN_TRY(make_room(fill));
    TN_TRY(choose_targets(fill));
    TN_TRY(choose_dormant(fill, &lacking));
    TN_TRY(choose_idle(fill, lacking));
    TN_TRY(cut_sources(fill));
    TN_TRY(tn__heap_reserve(&pool->heap, 2)); /* for taking the block afterwards */
    for (size_t i = 0; i < fill->target_count; i++)
        TN_TRY(tn__uses_copy(&fill->target_uses[i], &fill->uses));
    TN_TRY(take_frames(fill));
    TN_TRY(tn__order_wait(&pool->order, fill->request->stream, &fill->uses));
    TN_TRY(unmap_others(fill));
    return map_pages(fill);
}

/* What the driver does not unmap stays as a dormant view; if it has no access, as a useless one. */
static void undo_fill(filling *fill) {
    tn_pool *pool = fill->pool;
    tn__region *region = fill->place.region;
    for (size_t i = 0; i < fill->page_count; i++) {
        size_t page = fill->pages[i].page;
        if (!fill->pages[i].is_mapped) continue;
        region->views[page].is_unusable = 1;
        (void)tn__views_unmap(pool, region, (tn__page_span){page, page + 1});
    }
    for (size_t i = 0; i < fill->taken_count; i++)
        (void)tn__frame_release(pool, fill->taken[i]);
    for (size_t i = 0; i < fill->target_count; i++)
        tn__heap_join(&pool->heap, fill->targets[i]);
    for (size_t i = 0; i < fill->source_count; i++)
        tn__heap_join(&pool->heap, fill->sources[i]);
}

static void commit_targets(filling *fill) {
    tn_pool *pool = fill->pool;
    for (size_t i = 0; i < fill->target_count; i++) {
        tn__piece *target = fill->targets[i];
        tn__uses_clear(&target->uses);
        target->uses = fill->target_uses[i];
        fill->target_uses[i] = (tn__uses){0};
        target->stream = target->uses.count ? fill->request->stream : NULL;
        target->age = pool->heap.operation;
        tn__heap_change(&pool->heap, target, TN__PIECE_FREE);
    }
}

static void commit_fill(filling *fill) {
    tn_pool *pool = fill->pool;
    for (size_t i = 0; i < fill->page_count; i++) {
        tn__page_activate(&pool->heap, &fill->place.region->views[fill->pages[i].page]);
    }
    for (size_t i = 0; i < fill->source_count; i++) {
        tn__pool_event(pool, TN_EVENT_MOVE, fill->sources[i]->address, fill->sources[i]->bytes,
                       fill->request->stream, NULL);
        fill->sources[i]->stream = NULL;
        tn__heap_change(&pool->heap, fill->sources[i], TN__PIECE_VOID);
    }
    commit_targets(fill);
    for (size_t i = 0; i < fill->source_count; i++)
        tn__heap_join(&pool->heap, fill->sources[i]);
    for (size_t i = 0; i < fill->target_count; i++)
        tn__heap_join(&pool->heap, fill->targets[i]);
}

/* The run that the place is in, now that there is memory behind all of it. */
static tn__piece *filled_run(const filling *fill) {
    const tn__place *place = &fill->place;
    if (fill->page_count == 0) return tn__run_first(tn__piece_at(place->first, place->address));
    return tn__run_first(tn__page_idle_piece(place->region, fill->pages[0].page));
}

tn_status tn__gap_fill(tn_pool *pool, const tn__request *request, tn__place *place) {
    filling fill = {.pool = pool, .request = request, .place = *place};
    tn__saved_error saved;
    tn_status status;
    fill.window = tn__pages_touched(place->region, place->address, place->address + request->bytes);
    fill.claim = ++pool->heap.claim;
    status = prepare_fill(&fill);
    if (status == TN_OK) {
        commit_fill(&fill);
        place->first = filled_run(&fill);
        place->missing_pages = 0;
        tn__windows_add(&place->region->zone->windows, place->region, place->address,
                        request->bytes);
    } else {
        tn__error_save(&saved);
        undo_fill(&fill);
        tn__error_restore(&saved);
    }
    free_room(&fill);
    return status;
}
