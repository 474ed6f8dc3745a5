/* VMM backing: where a block goes that fits in no run, and what lies under it then (pool_pages.c).
 *
 *   repeat   where it went when the job was here last, if that takes no driver call
 *   recall   a window: a place that was built for such a block, if that takes none
 *   grow     the best gap, and pages for it: moved or new; more addresses if there is no gap
 *
 * A page of the gap may be mapped to a frame that is not to be had, and mapping another one in its
 * place undoes a window. While the job repeats itself that window is wanted again, so it stays, and
 * the block goes where nothing is mapped yet: addresses are cheap. So nothing is undone in a round
 * that was done in it, and the next round finds every place as it was.
 */
#include "pool_idle.h"

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

/* ---- growing --------------------------------------------------------------------------------- */

/* While the job repeats itself, large blocks leave small ones the pages that they have. Which small
 * blocks lie where is not the same in each round, since threads keep some of them. */
static const tn__zone *spared_zone(const tn_pool *pool, const tn__request *request) {
    const tn__heap *heap = &pool->heap;
    int is_small = request->zone == TN__ZONE_SMALL;
    return tn__history_is_trusted(&heap->history) && !is_small ? &heap->zones[TN__ZONE_SMALL]
                                                               : NULL;
}

/* A place where nothing is mapped yet instead; if there are no addresses for one, the same. */
static void find_unmapped(tn_pool *pool, const tn__request *request, tn__place *place,
                          tn__region **added) {
    if (tn__heap_find_unmapped(&pool->heap, request, place)) return;
    tn__error_scope_begin();
    if (reserve_region(pool, request, added) == TN_OK) {
        (void)tn__heap_find_unmapped(&pool->heap, request, place);
    }
    (void)tn__error_scope_end(TN_OK);
}

/* A place in a gap: as long as memory is plentiful one that needs no wait, if there is one. */
static int find_gap(tn_pool *pool, tn__request *request, tn__effort effort, tn__place *out) {
    request->only_ready = effort == TN__EFFORT_READY;
    return tn__heap_find_gap(&pool->heap, request, request->only_ready, out);
}

tn_status tn__pages_grow(tn_pool *pool, const tn__request *asked, tn__effort effort,
                         tn__place *out) {
    tn__request request = *asked;
    tn__place place;
    tn__region *added = NULL;
    tn_status status = TN_OK;
    if (effort == TN__EFFORT_READY) request.spared = spared_zone(pool, asked);
    request.is_pinned = tn__graph_holds(pool->graph);
    (void)tn__pages_decay(pool); /* what fails now is tried again */
    tn__views_limit(pool);
    if (!find_gap(pool, &request, effort, &place)) {
        TN_TRY(reserve_region(pool, &request, &added));
        if (!find_gap(pool, &request, effort, &place)) {
            status = TN_FAIL(TN_OUT_OF_ADDRESS_SPACE, "a new reservation does not hold the block");
        }
    }
    if (status == TN_OK && place.lost_views > 0 && request.only_ready &&
        tn__history_is_trusted(&pool->heap.history)) {
        find_unmapped(pool, &request, &place, &added);
    }
    if (status == TN_OK) status = tn__heap_wait_place(&pool->order, &request, &place);
    if (status == TN_OK) status = tn__gap_fill(pool, &request, &place);
    if (status == TN_OK) *out = place;
    if (status != TN_OK && added) undo_region(pool, added);
    return status;
}

tn_status tn__pages_repeat(tn_pool *pool, const tn__request *asked, const tn__past *past,
                           tn__place *out, int *is_found) {
    tn__request request = *asked;
    tn__place place;
    *is_found = 0;
    if (tn__graph_holds(pool->graph)) return TN_OK;
    request.only_ready = 1;
    request.spared = spared_zone(pool, asked);
    if (!tn__heap_find_past(&pool->heap, &request, past, &place)) return TN_OK;
    if (place.missing_pages > 0) TN_TRY(tn__gap_fill(pool, &request, &place));
    *out = place;
    *is_found = 1;
    return TN_OK;
}

tn_status tn__pages_recall(tn_pool *pool, const tn__request *asked, tn__place *out, int *is_found) {
    tn__request request = *asked;
    tn__place place;
    *is_found = 0;
    if (tn__graph_holds(pool->graph)) return TN_OK;
    request.only_ready = 1;
    request.spared = spared_zone(pool, asked);
    if (!tn__heap_find_window(&pool->heap, &request, 1, &place)) return TN_OK;
    if (place.cost > place.missing_pages) return TN_OK; /* some page is not DORMANT */
    TN_TRY(tn__gap_fill(pool, &request, &place));
    *out = place;
    *is_found = 1;
    return TN_OK;
}
