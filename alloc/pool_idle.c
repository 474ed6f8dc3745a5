/* VMM backing: idle pages, and how memory goes back to the driver.
 *
 * An idle page lies in a run as a whole; it can move elsewhere in the pool (pool_pages.c) or go
 * back to the driver once no work uses it. A handle is then unmapped and released; one that the
 * driver does not take back is kept as a spare: reserved, mapped nowhere, and the first to be used
 * again.
 */
#include "pool_idle.h"

#include <stdlib.h>

#include "canary.h"
#include "host_alloc.h"

/* ---- idle pages ------------------------------------------------------------------------------ */

static int is_wanted(const tn__idle_filter *filter, tn__piece *piece) {
    if (filter->only_complete) return piece->uses.count == 0;
    return !filter->ready_for || tn__order_is_ready(filter->ready_for, &piece->uses);
}

/* The whole pages of a piece outside the window: those after it, else those before it. */
static tn__page_span idle_span(const tn__idle_filter *filter, const tn__piece *piece) {
    tn__page_span span = tn__pages_inside(piece->region, piece->address, tn__piece_end(piece));
    if (piece->region != filter->excluded) return span;
    if (span.end <= filter->window.first || span.first >= filter->window.end) return span;
    if (span.end > filter->window.end) {
        span.first = filter->window.end;
    } else {
        span.end = span.first < filter->window.first ? filter->window.first : span.first;
    }
    return span;
}

/* Writes at most `capacity` of what there is; gives the count of all. */
static size_t gather_idle(tn_pool *pool, const tn__idle_filter *filter, tn__idle_pages *out,
                          size_t capacity) {
    size_t count = 0;
    for (int zone = 0; zone < TN__ZONE_COUNT; zone++) {
        tn__tree_node *root = pool->heap.zones[zone].runs;
        tn__tree_node *node = tn__tree_at_least(root, pool->page_bytes, 0);
        for (; node; node = tn__tree_next(root, node)) {
            tn__piece *piece = tn__run_of(node);
            for (; tn__piece_is(piece, TN__PIECE_FREE); piece = piece->next) {
                tn__page_span span = idle_span(filter, piece);
                if (span.first == span.end || !is_wanted(filter, piece)) continue;
                if (count < capacity) out[count] = (tn__idle_pages){piece, span};
                count++;
            }
        }
    }
    return count;
}

static int compare_age(const void *a, const void *b) {
    const tn__piece *left = ((const tn__idle_pages *)a)->piece;
    const tn__piece *right = ((const tn__idle_pages *)b)->piece;
    if (left->age != right->age) return left->age < right->age ? -1 : 1;
    return left->address < right->address ? -1 : left->address > right->address;
}

tn_status tn__idle_list(tn_pool *pool, const tn__idle_filter *filter, tn__idle_pages **out,
                        size_t *count) {
    *out = NULL;
    *count = tn__graph_holds(pool->graph) ? 0 : gather_idle(pool, filter, NULL, 0);
    if (*count == 0) return TN_OK;
    *out = tn__host_alloc(*count, sizeof **out);
    if (!*out) return TN_OUT_OF_HOST_MEMORY;
    gather_idle(pool, filter, *out, *count);
    qsort(*out, *count, sizeof **out, compare_age);
    return TN_OK;
}

tn_status tn__idle_isolate(tn__heap *heap, tn__piece *piece, tn__page_span span, tn__piece **out) {
    uintptr_t begin = tn__page_address(piece->region, span.first);
    uintptr_t end = tn__page_address(piece->region, span.end);
    TN_TRY(tn__heap_reserve(heap, 2));
    if (end < tn__piece_end(piece)) TN_TRY(tn__heap_split(heap, piece, end));
    if (piece->address < begin) {
        tn_status status = tn__heap_split(heap, piece, begin);
        if (status != TN_OK) {
            tn__heap_join(heap, piece);
            return status;
        }
        piece = piece->next;
    }
    *out = piece;
    return TN_OK;
}

/* ---- handles --------------------------------------------------------------------------------- */

tn_status tn__spare_handles_reserve(tn_pool *pool, size_t more) {
    size_t needed = pool->spare_handle_count + more;
    tn__handle *handles;
    if (needed <= pool->spare_handle_capacity) return TN_OK;
    needed = tn__round_up(needed, 64);
    handles =
        tn__host_realloc(pool->spare_handles, pool->spare_handle_capacity, needed, sizeof *handles);
    if (!handles) return TN_OUT_OF_HOST_MEMORY;
    pool->spare_handles = handles;
    pool->spare_handle_capacity = needed;
    return TN_OK;
}

tn_status tn__handle_release(tn_pool *pool, tn__handle handle) {
    tn_status status = pool->driver->mem_release(pool->state, handle, pool->page_bytes);
    if (status == TN_OK) {
        tn__process_unclaim(pool->page_bytes);
    } else {
        pool->spare_handles[pool->spare_handle_count++] = handle;
    }
    return status;
}

tn__handle tn__page_remove(tn_pool *pool, tn__region *region, size_t page) {
    tn__handle handle = region->handles[page];
    TN_ASSERT(handle != 0 || tn__pages_mapped(region, (tn__page_span){page, page + 1}) == 1);
    region->handles[page] = 0;
    tn__pages_set_mapped(region, (tn__page_span){page, page + 1}, 0);
    pool->heap.mapped_bytes -= pool->page_bytes;
    return handle;
}

/* ---- giving back ----------------------------------------------------------------------------- */

tn_status tn__retired_unmap(tn_pool *pool, tn__piece *piece) {
    TN_TRY(pool->driver->mem_unmap(pool->state, (void *)piece->address, piece->bytes));
    piece->stream = NULL;
    tn__heap_change(&pool->heap, piece, TN__PIECE_VOID);
    return TN_OK;
}

tn_status tn__region_free(tn_pool *pool, tn__region *region) {
    tn_status status;
    tn__page_map_remove(&region->map);
    status = pool->driver->address_free(pool->state, (void *)region->map.begin,
                                        region->map.end - region->map.begin);
    if (status == TN_OK) {
        tn__heap_remove_region(&pool->heap, region);
    } else {
        tn__page_map_restore(&region->map);
    }
    return status;
}

tn_status tn__pool_collect(tn_pool *pool) {
    int any = 0;
    tn_status status = tn__order_poll(&pool->order, &any);
    if (any) tn__heap_settle(&pool->heap);
    if (status != TN_OK) return status;
    for (int zone = 0; zone < TN__ZONE_COUNT; zone++) {
        tn__tree_node *node = tn__tree_at_least(pool->heap.zones[zone].retired, 0, 0);
        while (node) {
            tn__piece *piece = TN__TREE_ITEM(node, tn__piece, node);
            node = tn__tree_next(pool->heap.zones[zone].retired, node);
            if (piece->uses.count == 0 || TN__CANARY(TN__CANARY_UNMAP)) {
                TN_TRY(tn__retired_unmap(pool, piece));
            }
        }
    }
    tn__dedicated_collect(pool);
    return TN_OK;
}

static tn_status release_pages(tn_pool *pool, const tn__idle_pages *idle, tn__release *release) {
    tn__piece *piece = NULL;
    tn_status status = TN_OK;
    size_t pages = idle->span.end - idle->span.first;
    TN_TRY(tn__spare_handles_reserve(pool, pages));
    TN_TRY(tn__idle_isolate(&pool->heap, idle->piece, idle->span, &piece));
    status = pool->driver->mem_unmap(pool->state, (void *)piece->address, piece->bytes);
    if (status != TN_OK) {
        tn__heap_join(&pool->heap, piece);
        return status;
    }
    for (size_t page = idle->span.first; page < idle->span.end; page++) {
        tn_status now = tn__handle_release(pool, tn__page_remove(pool, piece->region, page));
        if (now == TN_OK) release->released_bytes += pool->page_bytes;
        if (status == TN_OK) status = now;
    }
    tn__heap_change(&pool->heap, piece, TN__PIECE_VOID);
    return status;
}

/* The pages that are still to be given back: up to the least, but not beyond the most. */
static size_t pages_to_release(const tn_pool *pool, const tn__release *release) {
    size_t most = tn__release_room(release) / pool->page_bytes;
    size_t least;
    if (tn__release_is_done(release)) return 0;
    least = (release->least_bytes - release->released_bytes - 1) / pool->page_bytes + 1;
    return least < most ? least : most;
}

tn_status tn__pages_release(tn_pool *pool, tn__release *release) {
    tn__idle_filter filter = {.only_complete = 1};
    tn__idle_pages *idle = NULL;
    size_t count = 0;
    size_t wanted;
    tn_status status;
    while (pool->spare_handle_count > 0 && pages_to_release(pool, release) > 0) {
        TN_TRY(tn__handle_release(pool, pool->spare_handles[--pool->spare_handle_count]));
        release->released_bytes += pool->page_bytes;
    }
    TN_TRY(tn__pool_collect(pool));
    status = tn__idle_list(pool, &filter, &idle, &count);
    for (size_t i = 0; i < count && status == TN_OK; i++) {
        tn__page_span *span = &idle[i].span;
        wanted = pages_to_release(pool, release);
        if (wanted == 0) break;
        if (span->end - span->first > wanted) span->first = span->end - wanted;
        status = release_pages(pool, &idle[i], release);
    }
    tn__host_free(idle);
    return status;
}

tn_status tn__pages_close(tn_pool *pool) {
    TN_TRY(tn__pool_collect(pool));
    while (pool->heap.regions) {
        TN_TRY(tn__region_free(pool, pool->heap.regions));
    }
    return TN_OK;
}
