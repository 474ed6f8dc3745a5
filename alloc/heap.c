/* Pieces, runs and regions, and every change of them: see heap.h. */
#include "heap.h"

#include <string.h>

#include "host_alloc.h"

/* ---- spare pieces --------------------------------------------------------------------------- */

#define SLAB_PIECES 16

struct tn__piece_slab {
    tn__piece_slab *next;
    tn__piece pieces[SLAB_PIECES];
};

static void spare_piece(tn__heap *heap, tn__piece *piece) {
    tn__uses_clear(&piece->uses);
    piece->bytes = 0;
    piece->next = heap->spare_pieces;
    heap->spare_pieces = piece;
    heap->spare_count++;
}

tn_status tn__heap_reserve(tn__heap *heap, size_t count) {
    if (heap->track.is_on) TN_TRY(tn__track_reserve(&heap->track));
    while (heap->spare_count < count) {
        tn__piece_slab *slab = tn__host_alloc_aligned(sizeof *slab, _Alignof(tn__piece_slab));
        if (!slab) return TN_OUT_OF_HOST_MEMORY;
        slab->next = heap->slabs;
        heap->slabs = slab;
        for (size_t i = 0; i < SLAB_PIECES; i++)
            spare_piece(heap, &slab->pieces[i]);
    }
    return tn__block_table_reserve(&heap->blocks, count);
}

static tn__piece *new_piece(tn__heap *heap, tn__region *region, uintptr_t address, size_t bytes) {
    tn__piece *piece = heap->spare_pieces;
    TN_CHECK(piece != NULL);
    heap->spare_pieces = piece->next;
    heap->spare_count--;
    /* But for the tag: it is 0, and others may look at it. */
    memset((unsigned char *)piece + sizeof piece->tag, 0, sizeof *piece - sizeof piece->tag);
    piece->region = region;
    piece->address = address;
    piece->bytes = bytes;
    return piece;
}

/* ---- the list of pieces ---------------------------------------------------------------------- */

static size_t page_of(const tn__piece *piece) { return tn__page_at(piece->region, piece->address); }

/* The piece is new at its address, before any that is still there. */
static void enter_begins(tn__piece *piece) {
    tn__piece **begins = piece->region->begins;
    size_t page;
    if (!begins) return;
    page = page_of(piece);
    if (!begins[page] || piece->address <= begins[page]->address) begins[page] = piece;
}

/* The piece is about to go from its address. */
static void leave_begins(const tn__piece *piece) {
    tn__piece **begins = piece->region->begins;
    size_t page;
    if (!begins) return;
    page = page_of(piece);
    if (begins[page] != piece) return;
    begins[page] = piece->next && page_of(piece->next) == page ? piece->next : NULL;
}

static void link_before(tn__piece *piece, tn__piece *next) {
    piece->next = next;
    piece->previous = next->previous;
    next->previous = piece;
    if (piece->previous) {
        piece->previous->next = piece;
    } else {
        piece->region->first = piece;
    }
    enter_begins(piece);
}

static void link_after(tn__piece *piece, tn__piece *previous) {
    piece->previous = previous;
    piece->next = previous->next;
    previous->next = piece;
    if (piece->next) piece->next->previous = piece;
    enter_begins(piece);
}

static void unlink_piece(tn__heap *heap, tn__piece *piece) {
    leave_begins(piece);
    if (piece->previous) {
        piece->previous->next = piece->next;
    } else {
        piece->region->first = piece->next;
    }
    if (piece->next) piece->next->previous = piece->previous;
    spare_piece(heap, piece);
}

/* ---- runs ------------------------------------------------------------------------------------ */

static int is_run_first(const tn__piece *piece) {
    return !tn__piece_is(piece->previous, TN__PIECE_FREE);
}
static int is_run_last(const tn__piece *piece) {
    return !tn__piece_is(piece->next, TN__PIECE_FREE);
}

tn__piece *tn__run_first(tn__piece *piece) {
    TN_ASSERT(piece->kind == TN__PIECE_FREE);
    if (is_run_last(piece)) return piece->run_other;
    while (!is_run_first(piece))
        piece = piece->previous;
    return piece;
}

/* The whole pages of a run that is in the index. */
static tn__page_span idle_span(const tn__piece *first) {
    return tn__pages_inside(first->region, first->address, first->address + first->node.major);
}

static void insert_run(tn__piece *first, tn__piece *last) {
    tn__region *region = first->region;
    tn__zone *zone = region->zone;
    tn__page_span idle;
    first->run_other = last;
    last->run_other = first;
    tn__tree_insert(&zone->runs, &first->node, tn__piece_end(last) - first->address,
                    first->address);
    zone->run_count++;
    idle = idle_span(first);
    if (idle.first == idle.end) return;
    tn__bits_set(region->idle, idle, 1);
    region->runs_at[idle.first] = first;
}

static void remove_run(tn__piece *first) {
    tn__zone *zone = first->region->zone;
    tn__bits_set(first->region->idle, idle_span(first), 0);
    tn__tree_remove(&zone->runs, &first->node);
    zone->run_count--;
}

/* A FREE piece that is in no run yet becomes one with its neighbours. */
static void enter_run(tn__piece *piece) {
    tn__piece *first = piece;
    tn__piece *last = piece;
    if (tn__piece_is(piece->previous, TN__PIECE_FREE)) {
        first = piece->previous->run_other;
        remove_run(first);
    }
    if (tn__piece_is(piece->next, TN__PIECE_FREE)) {
        last = piece->next->run_other;
        remove_run(piece->next);
    }
    insert_run(first, last);
}

/* A FREE piece leaves its run, which becomes what is left and right of it. */
static void leave_run(tn__piece *piece) {
    tn__piece *first = tn__run_first(piece);
    tn__piece *last = first->run_other;
    remove_run(first);
    if (first != piece) insert_run(first, piece->previous);
    if (last != piece) insert_run(piece->next, last);
}

/* ---- index of VOID ------------------------------------------------------------------------- */

/* Segments that are on their way back may be at one address: see pool_segments.c. */
static void enter_voids(tn__piece *piece) {
    tn__zone *zone = piece->region->zone;
    tn__tree_insert(&zone->voids, &piece->node, piece->address, piece->region->number);
    zone->void_count++;
}

static void leave_voids(tn__piece *piece) {
    tn__zone *zone = piece->region->zone;
    tn__tree_remove(&zone->voids, &piece->node);
    zone->void_count--;
}

/* ---- joining and cutting ------------------------------------------------------------------- */

static int is_alike(tn__piece *a, tn__piece *b) {
    if (!a || !b || a->kind != b->kind) return 0;
    if (a->kind == TN__PIECE_LIVE) return 0;
    return a->stream == b->stream && tn__uses_equal(&a->uses, &b->uses);
}

/* The piece takes over the one after it, which is alike. A run keeps its extent, and so its place
 * in the index. */
static void absorb_next(tn__heap *heap, tn__piece *piece) {
    tn__piece *next = piece->next;
    if (piece->kind == TN__PIECE_VOID) {
        leave_voids(next);
    } else if (is_run_last(next)) {
        tn__piece *first = next->run_other;
        first->run_other = piece;
        piece->run_other = first;
    }
    piece->bytes += next->bytes;
    if (piece->age < next->age) piece->age = next->age;
    unlink_piece(heap, next);
}

void tn__heap_join(tn__heap *heap, tn__piece *piece) {
    if (piece->bytes == 0) return;
    while (is_alike(piece, piece->next))
        absorb_next(heap, piece);
    while (is_alike(piece->previous, piece)) {
        piece = piece->previous;
        absorb_next(heap, piece);
    }
}

tn_status tn__heap_split(tn__heap *heap, tn__piece *piece, uintptr_t at) {
    tn__piece *right;
    tn__uses uses = {0};
    TN_ASSERT(piece->kind != TN__PIECE_LIVE);
    TN_ASSERT(piece->address < at && at < tn__piece_end(piece));
    TN_TRY(tn__uses_copy(&uses, &piece->uses));
    right = new_piece(heap, piece->region, at, tn__piece_end(piece) - at);
    right->kind = piece->kind;
    right->stream = piece->stream;
    right->age = piece->age;
    right->uses = uses;
    if (piece->kind == TN__PIECE_FREE && is_run_last(piece)) {
        tn__piece *first = piece->run_other;
        right->run_other = first;
        first->run_other = right;
    }
    piece->bytes = at - piece->address;
    link_after(right, piece);
    if (piece->kind == TN__PIECE_VOID) enter_voids(right);
    return TN_OK;
}

tn_status tn__heap_unite(tn__heap *heap, tn__piece *piece) {
    tn__piece *next = piece->next;
    TN_ASSERT(piece->kind == TN__PIECE_FREE);
    TN_ASSERT(next->kind == TN__PIECE_FREE);
    TN_TRY(tn__uses_reserve(&piece->uses, piece->uses.count + next->uses.count));
    for (uint32_t i = 0; i < next->uses.count; i++) {
        tn__use use = tn__uses_items(&next->uses)[i];
        tn__uses_add(&piece->uses, use.stream, use.epoch);
    }
    if (!piece->stream) piece->stream = next->stream;
    absorb_next(heap, piece);
    return TN_OK;
}

void tn__heap_change(tn__heap *heap, tn__piece *piece, tn__piece_kind kind) {
    (void)heap;
    TN_ASSERT(piece->kind != TN__PIECE_LIVE);
    TN_ASSERT(kind != TN__PIECE_LIVE);
    if (piece->kind == TN__PIECE_FREE) {
        leave_run(piece);
    } else {
        leave_voids(piece);
    }
    piece->kind = kind;
    if (kind == TN__PIECE_FREE) {
        enter_run(piece);
    } else {
        enter_voids(piece);
    }
}

/* ---- blocks ---------------------------------------------------------------------------------- */

tn__piece *tn__heap_find_block(tn__heap *heap, uintptr_t address) {
    tn__piece *piece = tn__block_table_find(&heap->blocks, address);
    return piece && tn__block_state_of(piece) == TN__BLOCK_LIVE ? piece : NULL;
}

tn__piece *tn__heap_next_block(tn__heap *heap, tn__piece *block) {
    tn__region *region = block ? block->region : heap->regions;
    tn__piece *piece = block ? block->next : NULL;
    if (!block && region) piece = region->first;
    while (region) {
        for (; piece; piece = piece->next) {
            if (tn__piece_is_callers(piece)) return piece;
        }
        region = region->next;
        if (region) piece = region->first;
    }
    return NULL;
}

/* Removes [address, end) from the FREE pieces from `piece` on. */
static void consume(tn__heap *heap, tn__piece *piece, uintptr_t end) {
    while (piece && piece->address < end) {
        tn__piece *next = piece->next;
        if (tn__piece_end(piece) <= end) {
            unlink_piece(heap, piece);
        } else {
            leave_begins(piece);
            piece->bytes = tn__piece_end(piece) - end;
            piece->address = end;
            enter_begins(piece);
        }
        piece = next;
    }
}

static void fill_block(tn__heap *heap, tn__piece *block, const tn__request *request) {
    block->kind = TN__PIECE_LIVE;
    block->lifetime_slot = request->lifetime_slot;
    block->born = tn__lifetime_begin(&heap->lifetimes, request->lifetime_slot, request->bytes);
    block->is_owned = request->is_owned;
    block->asked_bytes = request->asked_bytes;
    block->owner = request->owner;
    block->site = request->site;
    block->stream = request->stream;
    block->lane = request->lane;
    atomic_store_explicit(&block->tag, tn__block_tag(block->address, TN__BLOCK_LIVE),
                          memory_order_release);
    tn__block_table_insert(&heap->blocks, block->address, block);
    heap->block_count++;
    block->age = ++heap->operation;
    heap->live_bytes += request->asked_bytes;
    if (heap->live_bytes > heap->peak_live_bytes) heap->peak_live_bytes = heap->live_bytes;
    if (request->is_owned) heap->owned_bytes += request->asked_bytes;
    if (heap->track.is_on) {
        tn__track_take(&heap->track, block->region->tool_heap, block->address, block->bytes,
                       block->asked_bytes, block->owner);
    }
}

tn_status tn__heap_take(tn__heap *heap, tn__piece *run, uintptr_t address,
                        const tn__request *request, tn__piece **out) {
    tn__piece *at = tn__piece_at(run, address);
    tn__piece *last;
    tn__piece *block;
    if (at->address < address) {
        TN_TRY(tn__heap_split(heap, at, address));
        at = at->next;
    }
    last = run->run_other;
    remove_run(run);
    block = new_piece(heap, run->region, address, request->bytes);
    link_before(block, at);
    consume(heap, at, address + request->bytes);
    if (tn__piece_is(block->previous, TN__PIECE_FREE)) insert_run(run, block->previous);
    if (tn__piece_is(block->next, TN__PIECE_FREE)) insert_run(block->next, last);
    fill_block(heap, block, request);
    *out = block;
    return TN_OK;
}

uint64_t tn__heap_history_key(const tn__request *request) {
    return request->bytes | (uint64_t)request->lifetime;
}

/* Only what can be moved to its place again. */
void tn__heap_note_place(tn__heap *heap, uint64_t key, const tn__piece *block, int is_drained) {
    tn__past now = {.key = key, .address = block->address, .region = block->region};
    now.is_drained = is_drained;
    tn__history_note(&heap->history, &now);
}

/* Uses of an open epoch are not over: work that was put on a stream before the free may still touch
 * the memory, and memory checkers are told later. */
static void settle_piece(tn__heap *heap, tn__piece *piece) {
    tn__uses_settle(&piece->uses);
    if (piece->uses.count > 0 || !piece->stream) return;
    piece->stream = NULL;
    if (heap->track.is_on) tn__track_idle(&heap->track, piece->address, piece->bytes);
}

void tn__heap_give(tn__heap *heap, tn__piece *piece, uint64_t age) {
    TN_ASSERT(piece->kind == TN__PIECE_LIVE);
    tn__lifetime_end(&heap->lifetimes, piece->lifetime_slot, piece->born);
    tn__block_table_remove(&heap->blocks, piece->address);
    atomic_store_explicit(&piece->tag, 0, memory_order_release);
    heap->block_count--;
    heap->live_bytes -= piece->asked_bytes;
    if (piece->is_owned) heap->owned_bytes -= piece->asked_bytes;
    piece->kind = TN__PIECE_FREE;
    piece->lane = NULL;
    piece->asked_bytes = 0;
    piece->is_owned = 0;
    piece->owner = NULL;
    piece->site = NULL;
    piece->trace_id = 0;
    piece->age = age;
    settle_piece(heap, piece);
    enter_run(piece);
    tn__heap_join(heap, piece);
}

/* Settles the pieces of one run; those that become alike become one. */
static void settle_run(tn__heap *heap, tn__piece *first) {
    tn__piece *piece = first;
    for (; tn__piece_is(piece, TN__PIECE_FREE); piece = piece->next) {
        settle_piece(heap, piece);
        if (piece != first && is_alike(piece->previous, piece)) {
            piece = piece->previous;
            absorb_next(heap, piece);
        }
    }
}

/* Settles the VOID pieces of a zone; those that become alike become one. */
static void settle_voids(tn__heap *heap, const tn__zone *zone) {
    tn__tree_node *node = tn__tree_at_least(zone->voids, 0, 0);
    while (node) {
        tn__piece *piece = tn__piece_of(node);
        tn__uses_settle(&piece->uses);
        if (is_alike(piece->previous, piece)) {
            piece = piece->previous;
            absorb_next(heap, piece);
        }
        node = tn__tree_next(zone->voids, &piece->node);
    }
}

void tn__heap_settle(tn__heap *heap) {
    for (int zone = 0; zone < TN__ZONE_ALL; zone++) {
        tn__tree_node *root = heap->zones[zone].runs;
        tn__tree_node *node = tn__tree_at_least(root, 0, 0);
        for (; node; node = tn__tree_next(root, node))
            settle_run(heap, tn__piece_of(node));
        settle_voids(heap, &heap->zones[zone]);
    }
}

/* ---- regions --------------------------------------------------------------------------------- */

static void free_region(tn__region *region) {
    if (!region) return;
    tn__host_free(region->mapped);
    tn__host_free(region->idle);
    tn__host_free(region->runs_at);
    tn__host_free(region->begins);
    tn__host_free(region->views);
    tn__host_free(region);
}

static int fill_region(tn__region *region, size_t page_count, int has_views) {
    size_t words = page_count / 64 + 1;
    region->mapped = tn__host_alloc(words, sizeof *region->mapped);
    region->idle = tn__host_alloc(words, sizeof *region->idle);
    region->runs_at = tn__host_alloc(page_count, sizeof(tn__piece *));
    if (!region->mapped || !region->idle || !region->runs_at) return 0;
    if (!has_views) return 1;
    region->begins = tn__host_alloc(page_count, sizeof(tn__piece *));
    region->views = tn__host_alloc(page_count, sizeof *region->views);
    return region->begins && region->views;
}

static tn__region *make_region(size_t page_count, int has_views) {
    tn__region *region = tn__host_alloc(1, sizeof *region);
    if (!region) return NULL;
    if (fill_region(region, page_count, has_views)) return region;
    free_region(region);
    return NULL;
}

static void set_page_bytes(tn__region *region, size_t bytes) {
    region->page_bytes = bytes;
    region->page_shift = (bytes & (bytes - 1)) == 0 ? (unsigned)__builtin_ctzll(bytes) : 0;
}

tn_status tn__heap_add_region(tn__heap *heap, struct tn_pool *pool, tn__zone_kind zone,
                              void *address, size_t bytes, size_t page_bytes, int is_mapped,
                              tn__region **out) {
    tn__region *region = NULL;
    tn__piece *piece;
    tn_status status;
    TN_TRY(tn__heap_reserve(heap, 3)); /* one here, two for the block that it is made for */
    region = make_region(bytes / page_bytes, !is_mapped);
    if (!region) return TN_OUT_OF_HOST_MEMORY;
    region->map.begin = (uintptr_t)address;
    region->map.end = (uintptr_t)address + bytes;
    region->map.pool = pool;
    region->number = heap->region_count++;
    region->zone = &heap->zones[zone];
    set_page_bytes(region, page_bytes);
    region->page_count = bytes / page_bytes;
    status = tn__page_map_add(&region->map);
    if (status != TN_OK) {
        free_region(region);
        return status;
    }
    piece = new_piece(heap, region, region->map.begin, bytes);
    piece->kind = is_mapped ? TN__PIECE_FREE : TN__PIECE_VOID;
    region->first = piece;
    enter_begins(piece);
    if (is_mapped) {
        tn__bits_set(region->mapped, (tn__page_span){0, region->page_count}, 1);
        heap->mapped_bytes += bytes;
        enter_run(piece);
    } else {
        enter_voids(piece);
    }
    region->next = heap->regions;
    heap->regions = region;
    heap->address_bytes += bytes;
    *out = region;
    return TN_OK;
}

tn_status tn__heap_add_guest(tn__heap *heap, struct tn_pool *pool, void *address, size_t bytes,
                             size_t asked_bytes, tn__region **out) {
    tn__region *region = NULL;
    tn_status status;
    TN_TRY(tn__heap_reserve(heap, 1));
    region = make_region(1, 0);
    if (!region) return TN_OUT_OF_HOST_MEMORY;
    region->map.begin = (uintptr_t)address;
    region->map.end = (uintptr_t)address + bytes;
    region->map.pool = pool;
    set_page_bytes(region, bytes);
    region->page_count = 1;
    status = tn__page_map_add(&region->map);
    if (status != TN_OK) {
        free_region(region);
        return status;
    }
    region->first = new_piece(heap, region, region->map.begin, bytes);
    region->first->kind = TN__PIECE_GUEST;
    region->first->asked_bytes = asked_bytes;
    region->next = heap->regions;
    heap->regions = region;
    heap->guest_bytes += asked_bytes;
    *out = region;
    return TN_OK;
}

void tn__heap_remove_region(tn__heap *heap, tn__region *region) {
    tn__region **at = &heap->regions;
    tn__piece *piece = region->first;
    size_t bytes = region->map.end - region->map.begin;
    TN_ASSERT(piece->next == NULL);
    TN_ASSERT(piece->kind != TN__PIECE_LIVE);
    while (*at != region)
        at = &(*at)->next;
    *at = region->next;
    if (piece->kind == TN__PIECE_GUEST) {
        heap->guest_bytes -= piece->asked_bytes;
        bytes = 0;
    } else if (piece->kind == TN__PIECE_FREE) {
        leave_run(piece);
        heap->mapped_bytes -= bytes;
    } else {
        leave_voids(piece);
    }
    heap->address_bytes -= bytes;
    if (region->zone) tn__windows_forget(&region->zone->windows, region);
    if (region->views) tn__history_forget(&heap->history, region);
    unlink_piece(heap, piece);
    tn__page_map_remove(&region->map);
    free_region(region);
}

void tn__heap_clear(tn__heap *heap) {
    tn__track_clear(&heap->track);
    while (heap->regions) {
        tn__region *region = heap->regions;
        heap->regions = region->next;
        while (region->first)
            unlink_piece(heap, region->first);
        tn__page_map_remove(&region->map);
        free_region(region);
    }
    for (int zone = 0; zone < TN__ZONE_COUNT; zone++)
        tn__windows_forget(&heap->zones[zone].windows, NULL);
    while (heap->slabs) {
        tn__piece_slab *slab = heap->slabs;
        heap->slabs = slab->next;
        tn__host_free(slab);
    }
    tn__block_table_clear(&heap->blocks);
    tn__history_clear(&heap->history);
    *heap = (tn__heap){0};
}
