/* PLAIN backing: segments of the driver's ordinary memory, for devices without VMM.
 *
 * A segment is one region of one page: it comes and goes as a whole. Requests below
 * SHARED_BYTES share segments of that size, so that memory freed by small shapes can serve larger
 * ones; larger requests get a segment of their own size.
 */
#include "no_wait.h"
#include "pool_internal.h"

#define SHARED_BYTES ((size_t)32 << 20)

static size_t segment_bytes(const tn__region *region) {
    return region->map.end - region->map.begin;
}

static void tell_begin(tn_pool *pool, tn__region *region) {
    if (!pool->heap.track.is_on) return;
    tn__track_memory_begin(&pool->heap.track, region->map.begin, segment_bytes(region),
                           &region->tool_heap);
}

/* Checkers are told before the driver: it may use the memory itself, and give it to others. */
static void tell_end(tn_pool *pool, tn__region *region) {
    if (!pool->heap.track.is_on) return;
    tn__track_memory_end(&pool->heap.track, region->map.begin, segment_bytes(region),
                         region->tool_heap);
}

static tn_status add_segment(tn_pool *pool, const tn__request *request, size_t bytes,
                             tn__place *out) {
    const size_t align_mask = TN__BLOCK_ALIGN - 1;
    tn__region *region = NULL;
    void *address = NULL;
    tn_status status = TN_OK;
    TN_TRY(tn__pool_claim(pool, bytes, 0));
    status = pool->driver->mem_alloc(pool->state, bytes, &address);
    if (status == TN_OK && (uintptr_t)address & align_mask) {
        status = TN_FAIL(TN_DRIVER_ERROR, "the driver gave memory at %p, not aligned to %zu bytes",
                         address, TN__BLOCK_ALIGN);
    }
    if (status == TN_OK) {
        status = tn__heap_add_region(&pool->heap, pool, request->zone, address, bytes, bytes, 1,
                                     &region);
    }
    if (status != TN_OK) {
        tn__saved_error saved;
        tn__error_save(&saved);
        if (!address || pool->driver->mem_free(pool->state, address) == TN_OK) {
            tn__process_unclaim(bytes);
        }
        tn__error_restore(&saved);
        return status;
    }
    tell_begin(pool, region);
    out->region = region;
    out->first = region->first;
    out->address =
        (region->map.begin + request->alignment - 1) & ~(uintptr_t)(request->alignment - 1);
    out->missing_pages = 0;
    return TN_OK;
}

static tn_status try_segments(tn_pool *pool, const tn__request *request, tn__place *out) {
    size_t unit = tn__round_up(TN__MAP_PAGE_BYTES, pool->page_bytes);
    size_t slack = request->alignment > TN__BLOCK_ALIGN ? request->alignment : 0;
    size_t least = tn__round_up(request->bytes + slack, unit);
    tn_status status = TN_OUT_OF_DEVICE_MEMORY;
    if (least < SHARED_BYTES) status = add_segment(pool, request, SHARED_BYTES, out);
    if (status == TN_OUT_OF_DEVICE_MEMORY) status = add_segment(pool, request, least, out);
    return status;
}

tn_status tn__segments_grow(tn_pool *pool, const tn__request *request, tn__effort effort,
                            tn__place *out) {
    for (;;) {
        tn__release release = {.least_bytes = request->bytes, .most_bytes = SIZE_MAX};
        tn_status status = try_segments(pool, request, out);
        if (status != TN_OUT_OF_DEVICE_MEMORY || effort != TN__EFFORT_ALL) return status;
        TN_TRY(tn__segments_release(pool, &release));
        if (release.released_bytes == 0) return status;
    }
}

/* The segment of at most that size that has been idle for longest and that nothing may still
 * use; NULL: none. */
static tn__region *find_idle(tn_pool *pool, size_t most_bytes) {
    tn__region *oldest = NULL;
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        tn__piece *piece = region->first;
        if (piece->next || piece->kind != TN__PIECE_FREE || piece->uses.count) continue;
        if (segment_bytes(region) > most_bytes) continue;
        if (!oldest || piece->age < oldest->first->age) oldest = region;
    }
    return oldest;
}

static tn_status free_segment(tn_pool *pool, tn__region *region) {
    tn_status status;
    tell_end(pool, region);
    tn__page_map_remove(&region->map);
    status = pool->driver->mem_free(pool->state, (void *)region->map.begin);
    if (status != TN_OK) {
        tn__page_map_restore(&region->map);
        tell_begin(pool, region);
    }
    return status;
}

tn_status tn__segments_release(tn_pool *pool, tn__release *release) {
    TN_TRY(tn__pool_collect(pool));
    while (!tn__release_is_done(release) && !tn__graph_holds(pool->graph)) {
        tn__region *region = find_idle(pool, tn__release_room(release));
        tn_status status;
        size_t bytes;
        if (!region) break;
        bytes = segment_bytes(region);
        if (!tn__driver_wait_begin()) break;
        status = free_segment(pool, region);
        tn__driver_wait_end();
        if (status != TN_OK) return status;
        tn__process_unclaim(bytes);
        tn__heap_remove_region(&pool->heap, region);
        release->released_bytes += bytes;
    }
    return TN_OK;
}
