/* Where memory for a block comes from, and the procedure when it is short.
 *
 * The first step is find a run: no driver call. Then, in this order, each step only after the
 * one before did not serve, and each followed by a new search:
 *
 *   1 place the block in a gap: pages that are idle elsewhere move there, new ones are made
 *   2 also idle memory that other streams may still use, behind waits on the device
 *   3 give idle segments back to the driver and ask it again (PLAIN); the other zone's holes
 *   4 wait on the host, bounded, for the uses of this pool's freed memory; 2 and 3 again
 *   5 take idle memory from the other pools of the device; 2 and 3 again
 *   6 fail; the caller makes the report
 */
#include "pool_internal.h"

/* ---- finding room ---------------------------------------------------------------------------- */

static tn_status find_room(tn_pool *pool, const tn__request *request, tn__effort effort,
                           tn__place *out) {
    if (tn__heap_find_run(&pool->heap, request, out)) {
        return tn__heap_wait_place(&pool->order, request, out);
    }
    return pool->backing->grow(pool, request, effort, out);
}

static int is_shortage(tn_status status) {
    return status == TN_OUT_OF_DEVICE_MEMORY || status == TN_OUT_OF_ADDRESS_SPACE;
}

/* All that can be had without waiting for the device or asking other pools. */
static tn_status find_room_hard(tn_pool *pool, tn__request *request, tn__place *out) {
    tn__zone_kind zone = request->zone;
    tn_status status = find_room(pool, request, TN__EFFORT_ALL, out);
    if (!is_shortage(status)) return status;
    request->zone = zone == TN__ZONE_SMALL ? TN__ZONE_LARGE : TN__ZONE_SMALL;
    if (tn__heap_find_run(&pool->heap, request, out)) {
        status = tn__heap_wait_place(&pool->order, request, out);
    } else if (status == TN_OUT_OF_ADDRESS_SPACE) {
        status = pool->backing->grow(pool, request, TN__EFFORT_ALL, out);
    }
    request->zone = zone;
    return status;
}

/* What its limit keeps from this pool is of no use to it. The pool's mutex is let go meanwhile: the
 * list of pools comes before it. So the stream, if it is idle, may be forgotten by then. */
static tn_status take_from_others(tn_pool *pool, tn__request *request, int *any) {
    tn_stream handle = request->stream->handle;
    size_t headroom = tn__pool_headroom(pool) / pool->page_bytes * pool->page_bytes;
    tn__release release = {.least_bytes = request->bytes, .most_bytes = SIZE_MAX};
    tn_status status;
    if (release.least_bytes > headroom) release.least_bytes = headroom;
    pthread_mutex_unlock(&pool->mutex);
    status = tn__pools_release_others(pool, &release);
    *any = release.released_bytes > 0;
    pthread_mutex_lock(&pool->mutex);
    return status == TN_OK ? tn__pool_find_stream(pool, handle, &request->stream) : status;
}

static tn_status find_room_at_last(tn_pool *pool, tn__request *request, tn__place *out) {
    int any_released = 0;
    tn_status status;
    TN_TRY(tn__pool_collect(pool));
    status = find_room_hard(pool, request, out);
    if (!is_shortage(status)) return status;
    if (tn__order_is_busy(&pool->order)) {
        status = tn__order_host_wait(&pool->order, pool->info.simulated);
        /* Work that does not end, or a stream that captures: go on without its memory. */
        if (status != TN_OK && status != TN_INVALID_STATE) return status;
        TN_TRY(tn__pool_collect(pool));
        tn__heap_settle(&pool->heap);
        status = find_room_hard(pool, request, out);
        if (!is_shortage(status)) return status;
    }
    TN_TRY(take_from_others(pool, request, &any_released));
    if (any_released) status = find_room_hard(pool, request, out);
    return status;
}

tn_status tn__pool_find_room(tn_pool *pool, tn__request *request, tn__place *out) {
    tn_status status;
    if (tn__heap_find_run(&pool->heap, request, out)) {
        return tn__heap_wait_place(&pool->order, request, out);
    }
    status = tn__order_check_capture(&pool->order, request->stream->handle, "grow");
    if (status == TN_OK) status = tn__pool_collect(pool);
    if (status == TN_OK) status = find_room(pool, request, TN__EFFORT_READY, out);
    if (is_shortage(status)) status = find_room_at_last(pool, request, out);
    return status;
}
