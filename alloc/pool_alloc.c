/* Blocks: the public calls on them. Where their memory comes from: pool_pressure.c. */
#include "canary.h"
#include "event_ring.h"

/* ---- taking a place -------------------------------------------------------------------------- */

void tn__pool_note_take(tn_pool *pool, const tn__piece *block) {
    if (!pool->info.simulated || !pool->driver->note_take) return;
    tn__error_scope_begin();
    (void)pool->driver->note_take(block->stream->device->state, (void *)block->address,
                                  block->bytes, block->stream->handle);
    (void)tn__error_scope_end(TN_OK);
}

static tn_status take_place(tn_pool *pool, const tn__request *request, const tn__place *place,
                            tn__piece **out) {
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    TN_TRY(tn__heap_take(&pool->heap, place->first, place->address, request, out));
    tn__pool_note_take(pool, *out);
    return TN_OK;
}

static tn_status allocate(tn_pool *pool, tn__request *request, tn__piece **out) {
    tn__place place;
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    TN_TRY(pool->graph ? tn__graph_find_room(pool, request, &place)
                       : tn__pool_find_room(pool, request, &place));
    return take_place(pool, request, &place, out);
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
    TN_REQUIRE((int)options->lifetime >= TN_LIFETIME_AUTO &&
                   (int)options->lifetime <= TN_LIFETIME_OP,
               "%d is no tn_lifetime", (int)options->lifetime);
    if (options->alignment > TN__BLOCK_ALIGN) request->alignment = options->alignment;
    request->flags = options->flags;
    TN_REQUIRE((int)options->lifetime >= TN_LIFETIME_AUTO &&
                   (int)options->lifetime <= TN_LIFETIME_OP,
               "%d is no tn_lifetime", (int)options->lifetime);
    request->lifetime = options->lifetime;
    request->owner = options->owner;
    request->site = options->site;
    return TN_OK;
}

/* The stream that a caller names: for an alloc, where block is NULL, or for what it does with the
 * block. */
static tn_status find_stream(tn_pool *pool, tn_stream handle, tn__graph_call call,
                             const tn__piece *block, tn__pool_stream **out) {
    return pool->graph ? tn__graph_find_stream(pool, handle, call, block, out)
                       : tn__pool_find_stream(pool, handle, out);
}

void tn__pool_note_alloc(tn_pool *pool, tn__piece *block) {
    pool->allocs++;
    tn__pool_event(pool, TN_EVENT_ALLOC, block->address, block->asked_bytes, block->stream,
                   block->owner);
    if (!pool->trace) return;
    block->trace_id = tn__trace_alloc(pool->trace, block->asked_bytes, &block->stream->trace_number,
                                      pool->driver->now_us(pool->state));
}

static tn_status allocate_locked(tn_pool *pool, tn__request *request, tn_stream stream,
                                 tn__piece **out) {
    tn_status status;
    TN_TRY(find_stream(pool, stream, TN__GRAPH_ALLOC, NULL, &request->stream));
    request->zone = tn__heap_zone_for(&pool->heap, request);
    /* What no device can have is not worth the procedure. */
    status = request->bytes > pool->info.memory_bytes || request->bytes > pool->limit_bytes
                 ? TN_OUT_OF_DEVICE_MEMORY
                 : allocate(pool, request, out);
    /* Also on failure: what the driver then does not take back stays reserved. */
    tn__pool_note_peaks(pool);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        pool->out_of_memory++;
        tn__pool_event(pool, TN_EVENT_OUT_OF_MEMORY, 0, request->asked_bytes, request->stream,
                       request->owner);
        return tn__pool_report_shortage(pool, request->asked_bytes);
    }
    if (status != TN_OK) return status;
    tn__pool_note_alloc(pool, *out);
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
    if (request.flags) {
        TN_TRY(tn__dedicated_check(pool, &request));
        request.bytes = tn__dedicated_bytes(pool, bytes);
        request.zone = TN__ZONE_DEDICATED;
    }
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

/* Finds the live block, or imported one, and locks its pool; TN_INVALID_ARGUMENT, nothing locked,
 * if there is none. */
static tn_status find_block(const void *address, const char *call, tn_pool **pool,
                            tn__piece **out) {
    *pool = tn__page_map_find(address);
    TN_REQUIRE(*pool, "%s: no pool gave out %p", call, address);
    pthread_mutex_lock(&(*pool)->mutex);
    *out = tn__heap_find_block(&(*pool)->heap, (uintptr_t)address);
    if (!*out) *out = tn__guest_find(*pool, (uintptr_t)address);
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

void tn__pool_note_free(tn_pool *pool, const tn__piece *block) {
    pool->frees++;
    tn__pool_event(pool, TN_EVENT_FREE, block->address, block->asked_bytes, block->stream,
                   block->owner);
    if (pool->trace && block->trace_id) {
        tn__trace_free(pool->trace, block->trace_id, pool->driver->now_us(pool->state));
    }
}

/* The block may still be in use by the stream that it was made for, and by this one. */
static void give_block(tn_pool *pool, tn__piece *block, tn__pool_stream *stream) {
    if (block->stream) add_use_now(block, block->stream);
    add_use_now(block, stream);
    block->stream = stream;
    tn__pool_note_free(pool, block);
    tn__heap_give(&pool->heap, block);
}

/* A checker can say that freed memory is touched only once nothing uses it that may. What can not
 * be asked now is asked later. */
static void tell_free(tn_pool *pool) {
    if (!pool->heap.track.asks_at_free) return;
    tn__error_scope_begin();
    (void)tn__pool_collect(pool);
    (void)tn__error_scope_end(TN_OK);
}

tn_status tn_free(void *block, tn_stream stream) {
    tn_pool *pool = NULL;
    tn__piece *piece = NULL;
    tn__pool_stream *state = NULL;
    tn_status status;
    if (!block || tn__driver_is_gone()) return TN_OK;
    TN_TRY(find_block(block, "tn_free", &pool, &piece));
    if (piece->kind == TN__PIECE_GUEST) {
        status = TN_FAIL(TN_INVALID_ARGUMENT, "tn_free: %p is imported: tn_share_close it", block);
    } else {
        status = find_stream(pool, stream, TN__GRAPH_FREE, piece, &state);
    }
    if (status == TN_OK) {
        give_block(pool, piece, state);
        tell_free(pool);
    }
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
    status = find_stream(pool, stream, TN__GRAPH_USE, piece, &state);
    if (status == TN_OK && state != piece->stream) {
        status = reserve_uses(piece, state);
        if (status == TN_OK && !TN__CANARY(TN__CANARY_RECORDED_USE)) add_use_now(piece, state);
    }
    if (status == TN_OK) {
        tn__pool_event(pool, TN_EVENT_RECORD_USE, piece->address, piece->asked_bytes, state,
                       piece->owner);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_status tn_block_info(const void *block, size_t *bytes, tn_pool **pool) {
    tn_pool *found = NULL;
    tn__piece *piece = NULL;
    TN_TRY(tn__driver_refuse_fork("tn_block_info"));
    TN_TRY(find_block(block, "tn_block_info", &found, &piece));
    if (bytes) *bytes = piece->asked_bytes;
    if (pool) *pool = found;
    pthread_mutex_unlock(&found->mutex);
    return TN_OK;
}
