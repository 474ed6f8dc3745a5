/* VMM backing: physical pages, and how they come to lie under a block.
 *
 * A block that fits in no run is put into a gap, and the gap's missing pages are filled in:
 * first with idle pages from elsewhere in the pool, longest idle first, then with new ones.
 * A moved page is mapped at its new address before it is unmapped at the old one (both mappings
 * are valid, one is in use), so a failure at any call can be undone without a further mapping:
 *
 *   1 choose   the gap, its VOID pieces (targets), the pieces whose pages move (sources)
 *   2 make     the handles that are still lacking
 *   3 map      every target page, then access          <- a failure up to here is undone
 *   4 commit   targets become FREE, sources RETIRED; nothing fails any more
 *   5 unmap    sources whose last use is known complete become VOID; the others wait for that
 *
 * A source may still be in use when it moves, by work that the new block's stream comes after:
 * then the old mapping stays until the work has completed (tn__pool_collect).
 */
#include "host_alloc.h"
#include "pool_idle.h"

/* ---- one filling of a gap -------------------------------------------------------------------- */

typedef struct filling {
    tn_pool *pool;
    const tn__request *request;
    tn__place place;
    tn__page_span window;
    tn__piece **targets;
    size_t target_count;
    tn__piece **sources;
    size_t source_count;
    tn__handle *handles; /* for the missing pages in order; those of sources come first */
    size_t handle_count;
    size_t moved_count;  /* of handles: from sources */
    size_t spares_taken; /* of handles, after those: from the pool's spares */
    size_t mapped_count; /* of the missing pages */
    tn__uses uses;       /* of all sources */
} filling;

static size_t piece_pages(const tn_pool *pool, const tn__piece *piece) {
    return piece->bytes / pool->page_bytes;
}

static tn__page_span span_of(const tn__piece *piece) {
    return tn__pages_inside(piece->region, piece->address, tn__piece_end(piece));
}

static tn_status choose_targets(filling *fill) {
    tn__region *region = fill->place.region;
    tn__piece *piece = fill->place.first;
    uintptr_t end = tn__page_address(region, fill->window.end);
    while (piece && piece->address < end) {
        tn__page_span span = span_of(piece);
        tn__piece *target = NULL;
        if (piece->kind == TN__PIECE_VOID && span.end > fill->window.first) {
            if (span.first < fill->window.first) span.first = fill->window.first;
            if (span.end > fill->window.end) span.end = fill->window.end;
            TN_TRY(tn__idle_isolate(&fill->pool->heap, piece, span, &target));
            fill->targets[fill->target_count++] = target;
            piece = target;
        }
        piece = piece->next;
    }
    return TN_OK;
}

static tn_status add_source(filling *fill, tn__piece *piece, tn__page_span span) {
    tn__piece *source = NULL;
    TN_TRY(tn__uses_reserve(&fill->uses, fill->uses.count + piece->uses.count));
    TN_TRY(tn__idle_isolate(&fill->pool->heap, piece, span, &source));
    fill->sources[fill->source_count++] = source;
    for (uint32_t i = 0; i < source->uses.count; i++) {
        tn__use use = tn__uses_items(&source->uses)[i];
        tn__uses_add(&fill->uses, use.stream, use.epoch);
    }
    for (size_t page = span.first; page < span.end; page++) {
        fill->handles[fill->handle_count++] = source->region->handles[page];
    }
    fill->moved_count = fill->handle_count;
    return TN_OK;
}

static tn_status choose_sources(filling *fill, tn__effort effort) {
    tn__idle_filter filter = {.excluded = fill->place.region, .window = fill->window};
    tn__idle_pages *idle = NULL;
    size_t idle_count = 0;
    size_t wanted = fill->place.missing_pages;
    tn_status status;
    if (effort == TN__EFFORT_READY) filter.ready_for = fill->request->stream;
    status = tn__idle_list(fill->pool, &filter, &idle, &idle_count);
    for (size_t i = 0; i < idle_count && status == TN_OK && wanted > 0; i++) {
        tn__page_span span = idle[i].span;
        if (span.end - span.first > wanted) span.first = span.end - wanted;
        wanted -= span.end - span.first;
        status = add_source(fill, idle[i].piece, span);
    }
    tn__host_free(idle);
    return status;
}

static tn_status make_handles(filling *fill) {
    tn_pool *pool = fill->pool;
    size_t made = fill->place.missing_pages - fill->handle_count;
    TN_TRY(tn__spare_handles_reserve(pool, made));
    while (fill->handle_count < fill->place.missing_pages && pool->spare_handle_count > 0) {
        fill->handles[fill->handle_count++] = pool->spare_handles[--pool->spare_handle_count];
        fill->spares_taken++;
    }
    made = fill->place.missing_pages - fill->handle_count;
    /* The spares that were taken are reserved, too, though not counted while we hold them. */
    TN_TRY(tn__pool_claim(pool, made * pool->page_bytes, fill->spares_taken * pool->page_bytes));
    while (fill->handle_count < fill->place.missing_pages) {
        tn_status status = pool->driver->mem_create(pool->state, pool->page_bytes,
                                                    &fill->handles[fill->handle_count]);
        if (status != TN_OK) {
            made = fill->place.missing_pages - fill->handle_count;
            tn__process_unclaim(made * pool->page_bytes);
            return status;
        }
        fill->handle_count++;
    }
    return TN_OK;
}

static tn_status map_targets(filling *fill) {
    tn_pool *pool = fill->pool;
    for (size_t i = 0; i < fill->target_count; i++) {
        tn__piece *target = fill->targets[i];
        for (size_t offset = 0; offset < target->bytes; offset += pool->page_bytes) {
            TN_TRY(pool->driver->mem_map(pool->state, (void *)(target->address + offset),
                                         pool->page_bytes, fill->handles[fill->mapped_count]));
            fill->mapped_count++;
        }
        TN_TRY(tn__pool_set_access(pool, (void *)target->address, target->bytes));
    }
    return TN_OK;
}

/* Everything that can fail, in an order that undo_fill can undo. */
static tn_status prepare_fill(filling *fill, tn__effort effort) {
    tn_pool *pool = fill->pool;
    size_t room = fill->place.missing_pages + 1; /* none may be missing */
    fill->targets = tn__host_alloc(room, sizeof *fill->targets);
    fill->sources = tn__host_alloc(room, sizeof *fill->sources);
    fill->handles = tn__host_alloc(room, sizeof *fill->handles);
    if (!fill->targets || !fill->sources || !fill->handles) return TN_OUT_OF_HOST_MEMORY;
    TN_TRY(choose_targets(fill));
    TN_TRY(choose_sources(fill, effort));
    /* A cut for each target that may be stranded; and what taking the block needs afterwards. */
    TN_TRY(tn__heap_reserve(&pool->heap, fill->target_count + 2));
    for (size_t i = 0; i < fill->target_count; i++) {
        TN_TRY(tn__uses_copy(&fill->targets[i]->uses, &fill->uses));
    }
    TN_TRY(make_handles(fill));
    TN_TRY(tn__order_wait(&pool->order, fill->request->stream, &fill->uses));
    return map_targets(fill);
}

/* A target whose first pages can not be unmapped now: they are tried again later. */
static void strand_target(filling *fill, tn__piece *target, size_t pages) {
    uintptr_t end = target->address + pages * fill->pool->page_bytes;
    if (end < tn__piece_end(target)) {
        tn_status status = tn__heap_split(&fill->pool->heap, target, end);
        TN_CHECK(status == TN_OK);
    }
    tn__heap_change(&fill->pool->heap, target, TN__PIECE_RETIRED);
    if (tn__piece_is(target->next, TN__PIECE_VOID)) tn__heap_join(&fill->pool->heap, target->next);
}

static void unmap_targets(filling *fill) {
    tn_pool *pool = fill->pool;
    size_t mapped = fill->mapped_count;
    for (size_t i = 0; i < fill->target_count; i++) {
        tn__piece *target = fill->targets[i];
        size_t pages = piece_pages(pool, target);
        tn__uses_clear(&target->uses);
        if (pages > mapped) pages = mapped;
        mapped -= pages;
        if (pages == 0) continue;
        if (pool->driver->mem_unmap(pool->state, (void *)target->address,
                                    pages * pool->page_bytes) != TN_OK) {
            strand_target(fill, target, pages);
        }
    }
}

static void undo_fill(filling *fill) {
    tn_pool *pool = fill->pool;
    size_t first_made = fill->moved_count + fill->spares_taken;
    unmap_targets(fill);
    for (size_t i = fill->moved_count; i < fill->handle_count; i++) {
        if (i < first_made) {
            pool->spare_handles[pool->spare_handle_count++] = fill->handles[i];
        } else {
            (void)tn__handle_release(pool, fill->handles[i]);
        }
    }
    for (size_t i = 0; i < fill->target_count; i++) {
        if (fill->targets[i]->kind == TN__PIECE_VOID) tn__heap_join(&pool->heap, fill->targets[i]);
    }
    for (size_t i = 0; i < fill->source_count; i++) {
        tn__heap_join(&pool->heap, fill->sources[i]);
    }
}

static void commit_targets(filling *fill) {
    tn_pool *pool = fill->pool;
    const tn__handle *handle = fill->handles;
    for (size_t i = 0; i < fill->target_count; i++) {
        tn__piece *target = fill->targets[i];
        tn__page_span span = span_of(target);
        for (size_t page = span.first; page < span.end; page++) {
            target->region->handles[page] = *handle++;
        }
        tn__pages_set_mapped(target->region, span, 1);
        pool->heap.mapped_bytes += target->bytes;
        target->stream = target->uses.count ? fill->request->stream : NULL;
        target->age = pool->heap.operation;
        tn__heap_change(&pool->heap, target, TN__PIECE_FREE);
    }
}

static void commit_fill(filling *fill) {
    tn_pool *pool = fill->pool;
    for (size_t i = 0; i < fill->source_count; i++) {
        tn__piece *source = fill->sources[i];
        tn__page_span span = span_of(source);
        for (size_t page = span.first; page < span.end; page++) {
            (void)tn__page_remove(pool, source->region, page);
        }
        tn__heap_change(&pool->heap, source, TN__PIECE_RETIRED);
    }
    commit_targets(fill);
    for (size_t i = 0; i < fill->source_count; i++) {
        /* A failure is no matter here: the piece stays RETIRED and is tried again. */
        if (fill->sources[i]->uses.count == 0) (void)tn__retired_unmap(pool, fill->sources[i]);
    }
}

/* Fills the missing pages of a place in a gap; the place is in a run then. */
static tn_status fill_gap(tn_pool *pool, const tn__request *request, tn__effort effort,
                          tn__place *place) {
    filling fill = {.pool = pool, .request = request, .place = *place};
    const tn__piece *anchor = place->first->previous; /* stays; NULL: the gap begins the region */
    tn__saved_error saved;
    tn_status status;
    fill.window = tn__pages_touched(place->region, place->address, place->address + request->bytes);
    status = prepare_fill(&fill, effort);
    if (status == TN_OK) {
        commit_fill(&fill);
        place->first = anchor ? anchor->next : place->region->first;
        place->first = tn__run_first(tn__piece_at(place->first, place->address));
        place->missing_pages = 0;
    } else {
        tn__error_save(&saved);
        undo_fill(&fill);
        tn__error_restore(&saved);
    }
    tn__uses_clear(&fill.uses);
    tn__host_free(fill.targets);
    tn__host_free(fill.sources);
    tn__host_free(fill.handles);
    return status;
}

/* ---- addresses ------------------------------------------------------------------------------- */

static int is_shortage(tn_status status) {
    return status == TN_OUT_OF_ADDRESS_SPACE || status == TN_OUT_OF_DEVICE_MEMORY;
}

/* What the pool's limit leaves to reserve, in whole units. */
static size_t address_room(const tn_pool *pool, size_t unit) {
    size_t reserved = pool->heap.address_bytes;
    size_t room = pool->address_limit_bytes > reserved ? pool->address_limit_bytes - reserved : 0;
    return room / unit * unit;
}

/* As many addresses as the pool likes, within its limit; small blocks need fewer, and those for
 * large ones leave some to them. 0: the limit leaves too few. */
static size_t choose_reservation(const tn_pool *pool, tn__zone_kind zone, size_t least,
                                 size_t unit) {
    size_t room = address_room(pool, unit);
    size_t share = zone == TN__ZONE_SMALL ? room : tn__round_up(room - room / 16, unit);
    size_t bytes = pool->address_bytes / (zone == TN__ZONE_SMALL ? 16 : 1);
    if (least > room) return 0;
    bytes = tn__round_up(bytes, unit);
    if (bytes > share) bytes = share;
    return bytes > least ? bytes : least;
}

/* Reserves addresses for the request: half as many when the driver has not so many, down to what
 * the request needs. */
static tn_status reserve_region(tn_pool *pool, const tn__request *request, tn__region **out) {
    size_t unit = tn__round_up(TN__MAP_PAGE_BYTES, pool->page_bytes);
    size_t slack = request->alignment > pool->info.granularity_bytes ? request->alignment : 0;
    size_t least = tn__round_up(request->bytes + slack, unit);
    size_t bytes = choose_reservation(pool, request->zone, least, unit);
    void *address = NULL;
    tn_status status;
    if (bytes == 0) {
        return TN_FAIL(TN_OUT_OF_ADDRESS_SPACE,
                       "%zu more bytes of addresses exceed the pool's limit", least);
    }
    for (;;) {
        status = pool->driver->address_reserve(pool->state, bytes, &address);
        if (!is_shortage(status)) break;
        if (bytes == least) return TN_OUT_OF_ADDRESS_SPACE;
        bytes = tn__round_up(bytes / 2 > least ? bytes / 2 : least, unit);
    }
    if (status != TN_OK) return status;
    status = tn__heap_add_region(&pool->heap, pool, request->zone, address, bytes, pool->page_bytes,
                                 0, out);
    if (status != TN_OK) (void)pool->driver->address_free(pool->state, address, bytes);
    return status;
}

/* Takes a new reservation back after its first use failed, if it is as new. */
static void undo_region(tn_pool *pool, tn__region *region) {
    tn__saved_error saved;
    tn__error_save(&saved);
    if (!region->first->next && region->first->kind == TN__PIECE_VOID) {
        (void)tn__region_free(pool, region);
    }
    tn__error_restore(&saved);
}

tn_status tn__pages_grow(tn_pool *pool, const tn__request *request, tn__effort effort,
                         tn__place *out) {
    tn__place place;
    tn__region *added = NULL;
    tn_status status = TN_OK;
    if (!tn__heap_find_gap(&pool->heap, request, &place)) {
        TN_TRY(reserve_region(pool, request, &added));
        if (!tn__heap_find_gap(&pool->heap, request, &place)) {
            status = TN_FAIL(TN_OUT_OF_ADDRESS_SPACE, "a new reservation does not hold the block");
        }
    }
    if (status == TN_OK) status = tn__heap_wait_place(&pool->order, request, &place);
    if (status == TN_OK) status = fill_gap(pool, request, effort, &place);
    if (status == TN_OK) *out = place;
    if (status != TN_OK && added) undo_region(pool, added);
    return status;
}
