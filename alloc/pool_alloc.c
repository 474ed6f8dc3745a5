/* Blocks: allocation, release, uses, and the procedure when memory is short.
 *
 * The warm path is find a run, cut a block from it: no driver call. Then, in this order, each
 * step only after the one before did not serve, and each followed by a new search:
 *
 *   1 place the block in a gap: pages that are idle elsewhere move there, new ones are made
 *   2 also idle memory that other streams may still use, behind waits on the device
 *   3 give idle segments back to the driver and ask it again (PLAIN); the other zone's holes
 *   4 wait on the host, bounded, for the uses of this pool's freed memory; 2 and 3 again
 *   5 take idle memory from the other pools of the device; 2 and 3 again
 *   6 fail with the report
 */
#include "pool_internal.h"

/* ---- finding room ---------------------------------------------------------------------------- */

static tn_status grow(tn_pool *pool, const tn__request *request, tn__effort effort,
                      tn__place *out) {
    return pool->backing == TN_BACKING_VMM ? tn__pages_grow(pool, request, effort, out)
                                           : tn__segments_grow(pool, request, effort, out);
}

static tn_status find_room(tn_pool *pool, const tn__request *request, tn__effort effort,
                           tn__place *out) {
    if (tn__heap_find_run(&pool->heap, request, out)) {
        return tn__heap_wait_place(&pool->order, request, out);
    }
    return grow(pool, request, effort, out);
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
        status = grow(pool, request, TN__EFFORT_ALL, out);
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

/* The simulated device is told of the take; it only watches, and counts the races that it sees. */
static tn_status take_place(tn_pool *pool, const tn__request *request, const tn__place *place,
                            tn__piece **out) {
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    TN_TRY(tn__heap_take(&pool->heap, place->first, place->address, request, out));
    if (pool->info.simulated && pool->driver->note_take) {
        (void)pool->driver->note_take(pool->state, (void *)place->address, request->bytes,
                                      request->stream->handle);
    }
    return TN_OK;
}

static tn_status allocate(tn_pool *pool, tn__request *request, tn__piece **out) {
    tn__place place;
    tn_status status;
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    if (tn__heap_find_run(&pool->heap, request, &place)) {
        TN_TRY(tn__heap_wait_place(&pool->order, request, &place));
        return take_place(pool, request, &place, out);
    }
    status = tn__order_check_capture(&pool->order, request->stream->handle, "grow");
    if (status == TN_OK) status = tn__pool_collect(pool);
    if (status == TN_OK) status = find_room(pool, request, TN__EFFORT_READY, &place);
    if (is_shortage(status)) status = find_room_at_last(pool, request, &place);
    if (status == TN_OK) status = take_place(pool, request, &place, out);
    return status;
}

/* ---- tn_alloc -------------------------------------------------------------------------------- */

static tn_status read_options(const tn_alloc_options *options, tn__request *request) {
    request->alignment = TN__BLOCK_ALIGN;
    if (!options) return TN_OK;
    TN_REQUIRE(options->size == sizeof *options,
               "tn_alloc_options.size is %zu, not %zu: begin with TN_ALLOC_OPTIONS_INIT",
               options->size, sizeof *options);
    TN_REQUIRE((options->alignment & (options->alignment - 1)) == 0 &&
                   options->alignment <= TN__MAP_PAGE_BYTES,
               "alignment %zu is not a power of two up to 2 MiB", options->alignment);
    if (options->alignment > TN__BLOCK_ALIGN) request->alignment = options->alignment;
    request->owner = options->owner;
    request->site = options->site;
    return TN_OK;
}

static void trace_alloc(tn_pool *pool, tn__piece *block) {
    if (!pool->trace) return;
    block->trace_id = tn__trace_alloc(pool->trace, block->asked_bytes, &block->stream->trace_number,
                                      pool->driver->now_us(pool->state));
}

static tn_status allocate_locked(tn_pool *pool, tn__request *request, tn_stream stream,
                                 tn__piece **out) {
    tn_status status;
    TN_TRY(tn__pool_find_stream(pool, stream, &request->stream));
    /* What no device can have is not worth the procedure. */
    status = request->bytes > pool->info.memory_bytes || request->bytes > pool->limit_bytes
                 ? TN_OUT_OF_DEVICE_MEMORY
                 : allocate(pool, request, out);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        pool->out_of_memory++;
        return tn__pool_report_shortage(pool, request->asked_bytes);
    }
    if (status != TN_OK) return status;
    pool->allocs++;
    tn__pool_note_peaks(pool);
    trace_alloc(pool, *out);
    return TN_OK;
}

static tn_status alloc_block(tn_pool *pool, size_t bytes, tn_stream stream,
                             const tn_alloc_options *options, int is_owned, void **out) {
    tn__request request = {.asked_bytes = bytes, .is_owned = is_owned};
    tn__piece *block = NULL;
    tn_status status;
    TN_REQUIRE(pool, "tn_alloc: pool is NULL");
    TN_REQUIRE(out, "tn_alloc: out is NULL");
    TN_TRY(read_options(options, &request));
    if (bytes == 0) {
        *out = NULL;
        return TN_OK;
    }
    if (tn__driver_is_gone()) {
        return TN_FAIL(TN_INVALID_STATE, "tn_alloc after the driver is gone: the process exits, or "
                                         "is a fork of the one that opened the device");
    }
    request.bytes = tn__round_up(bytes, TN__BLOCK_ALIGN);
    request.zone = bytes < TN__SMALL_BYTES ? TN__ZONE_SMALL : TN__ZONE_LARGE;
    pthread_mutex_lock(&pool->mutex);
    status = allocate_locked(pool, &request, stream, &block);
    if (status == TN_OK) {
        TN_ASSERT(block);
        *out = (void *)block->address;
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_status tn_alloc(tn_pool *pool, size_t bytes, tn_stream stream, const tn_alloc_options *options,
                   void **out) {
    return alloc_block(pool, bytes, stream, options, 0, out);
}

tn_status tn__alloc_owned(tn_pool *pool, size_t bytes, tn_stream stream,
                          const tn_alloc_options *options, void **out) {
    return alloc_block(pool, bytes, stream, options, 1, out);
}

/* ---- blocks by address ----------------------------------------------------------------------- */

/* Finds the live block and locks its pool; TN_INVALID_ARGUMENT, nothing locked, if there is none.
 */
static tn_status find_block(const void *address, const char *call, tn_pool **pool,
                            tn__piece **out) {
    tn__region *region = (tn__region *)(void *)tn__page_map_find(address);
    TN_REQUIRE(region, "%s: no pool gave out %p", call, address);
    *pool = region->pool;
    pthread_mutex_lock(&(*pool)->mutex);
    *out = tn__heap_find_block(&(*pool)->heap, (uintptr_t)address);
    if (*out) return TN_OK;
    pthread_mutex_unlock(&(*pool)->mutex);
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "%s: %p lies in pool %s but no live block begins there: it was freed before, or "
                   "it points into a block",
                   call, address, (*pool)->name);
}

/* Room for a use of the stream, and for the two that tn_free adds: to record a use on a stream that
 * has one already can not fail for want of memory. */
static tn_status reserve_uses(tn__piece *block, const tn__pool_stream *stream) {
    uint32_t added = tn__uses_has(&block->uses, stream) ? 2 : 3;
    return tn__uses_reserve(&block->uses, block->uses.count + added);
}

static void add_use_now(tn__piece *block, tn__pool_stream *stream) {
    tn__use use = tn__order_use_now(stream);
    tn__uses_add(&block->uses, use.stream, use.epoch);
}

/* The block may still be in use by the stream that it was made for, and by this one. */
static void give_block(tn_pool *pool, tn__piece *block, tn__pool_stream *stream) {
    if (block->stream) add_use_now(block, block->stream);
    add_use_now(block, stream);
    block->stream = stream;
    pool->frees++;
    if (pool->trace && block->trace_id) {
        tn__trace_free(pool->trace, block->trace_id, pool->driver->now_us(pool->state));
    }
    tn__heap_give(&pool->heap, block);
}

tn_status tn_free(void *block, tn_stream stream) {
    tn_pool *pool = NULL;
    tn__piece *piece = NULL;
    tn__pool_stream *state = NULL;
    tn_status status;
    if (!block || tn__driver_is_gone()) return TN_OK;
    TN_TRY(find_block(block, "tn_free", &pool, &piece));
    status = tn__pool_find_stream(pool, stream, &state);
    if (status == TN_OK) give_block(pool, piece, state);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_status tn_record_use(void *block, tn_stream stream) {
    tn_pool *pool = NULL;
    tn__piece *piece = NULL;
    tn__pool_stream *state = NULL;
    tn_status status;
    if (!block || tn__driver_is_gone()) return TN_OK;
    TN_TRY(find_block(block, "tn_record_use", &pool, &piece));
    status = tn__pool_find_stream(pool, stream, &state);
    if (status == TN_OK && state != piece->stream) {
        status = reserve_uses(piece, state);
        if (status == TN_OK) add_use_now(piece, state);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_status tn_block_info(const void *block, size_t *bytes, tn_pool **pool) {
    tn_pool *found = NULL;
    tn__piece *piece = NULL;
    TN_TRY(find_block(block, "tn_block_info", &found, &piece));
    if (bytes) *bytes = piece->asked_bytes;
    if (pool) *pool = found;
    pthread_mutex_unlock(&found->mutex);
    return TN_OK;
}
