/* Blocks: the public calls on them. First this thread's cache, without a lock (thread_cache.h);
 * then the heap under the pool's mutex. Where memory for it comes from: pool_pressure.c.
 */
#include "canary.h"
#include "event_ring.h"
#include "thread_cache.h"

/* ---- taking a place -------------------------------------------------------------------------- */

static void note_take(tn_pool *pool, tn__driver_device *state, const void *block, size_t bytes,
                      tn_stream stream) {
    if (!pool->info.simulated || !pool->driver->note_take) return;
    tn__error_scope_begin();
    (void)pool->driver->note_take(state, block, bytes, stream);
    (void)tn__error_scope_end(TN_OK);
}

void tn__pool_note_take(tn_pool *pool, const tn__piece *block) {
    note_take(pool, block->stream->device->state, (void *)block->address, block->bytes,
              block->stream->handle);
}

static tn_status take_place(tn_pool *pool, const tn__request *request, const tn__place *place,
                            tn__piece **out) {
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    TN_TRY(tn__heap_take(&pool->heap, place->first, place->address, request, out));
    tn__pool_note_take(pool, *out);
    return TN_OK;
}

/* A block that is as any other of its size. */
static int is_cacheable(const tn__request *request) {
    return request->alignment <= TN__BLOCK_ALIGN && !request->flags &&
           request->lifetime == TN_LIFETIME_AUTO;
}

/* The lane that the block will have: it is made before the block, since that can fail. */
static tn_status prepare_lane(tn_pool *pool, const tn__request *request) {
    tn__cache *cache = NULL;
    tn__cache_lane *lane;
    if (is_cacheable(request)) TN_TRY(tn__cache_open(pool, &cache));
    return cache ? tn__cache_lane_open(cache, request->stream, &lane) : TN_OK;
}

/* In a capture an adopted stream may be another one than outside of it, with the same handle. */
static tn__cache_lane *find_lane(tn_pool *pool, const tn__request *request) {
    tn__cache *cache = is_cacheable(request) ? tn__cache_mine(pool) : NULL;
    tn__cache_lane *lane = cache ? *tn__cache_lane_slot(cache, request->stream->handle) : NULL;
    return lane && lane->stream == request->stream ? lane : NULL;
}

/* Small blocks have none: which of them the threads keep for themselves differs each time. */
static int has_history(const tn_pool *pool, const tn__request *request) {
    return pool->backing->repeat && !pool->graph && request->zone < TN__ZONE_SMALL;
}

/* The place that the request had when the job was here last. The threads' caches are emptied where
 * they were then, so that the same requests come here. */
static tn_status find_past_room(tn_pool *pool, const tn__request *request, int *is_drained,
                                tn__place *out, int *is_found) {
    const tn__past *past = NULL;
    *is_found = 0;
    if (has_history(pool, request)) {
        past = tn__history_expect(&pool->heap.history, tn__heap_history_key(request));
    }
    if (!past) return TN_OK;
    if (past->is_drained) {
        (void)tn__caches_drain(pool);
        *is_drained = 1;
    }
    return pool->backing->repeat(pool, request, past, out, is_found);
}

/* What threads keep for themselves comes before anything is asked of the driver. But not for a
 * small block while the job repeats itself: large ones would miss what the threads had then.
 * *is_found: there is a run, and nothing is drained. */
static void drain_if_needed(tn_pool *pool, const tn__request *request, int *is_drained,
                            tn__place *run, int *is_found) {
    *is_found = 0;
    if (*is_drained) return;
    if (request->zone == TN__ZONE_SMALL && tn__history_is_trusted(&pool->heap.history)) return;
    *is_found = tn__heap_find_run(&pool->heap, request, run);
    if (*is_found) return;
    (void)tn__caches_drain(pool);
    *is_drained = 1;
}

static tn_status find_room(tn_pool *pool, tn__request *request, int *is_drained, tn__place *out) {
    tn__place run;
    int is_found;
    if (pool->graph) return tn__graph_find_room(pool, request, out);
    TN_TRY(find_past_room(pool, request, is_drained, out, &is_found));
    if (is_found) return TN_OK;
    drain_if_needed(pool, request, is_drained, &run, &is_found);
    return tn__pool_find_room(pool, request, is_found ? &run : NULL, out);
}

/* Meanwhile the mutex may have been let go, and the lane with its stream have ended. */
static tn_status allocate(tn_pool *pool, tn__request *request, tn__piece **out) {
    tn__place place;
    int is_drained = 0;
    TN_TRY(prepare_lane(pool, request));
    TN_TRY(tn__heap_reserve(&pool->heap, 2));
    TN_TRY(find_room(pool, request, &is_drained, &place));
    request->lane = find_lane(pool, request);
    TN_TRY(take_place(pool, request, &place, out));
    if (has_history(pool, request)) {
        tn__heap_note_place(&pool->heap, tn__heap_history_key(request), *out, is_drained);
    }
    return TN_OK;
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
    if (call != TN__GRAPH_FREE) {
        TN_TRY(tn__pause_check(pool, call == TN__GRAPH_ALLOC ? "tn_alloc" : "tn_record_use"));
    }
    return pool->graph ? tn__graph_find_stream(pool, handle, call, block, out)
                       : tn__pool_find_stream(pool, handle, out);
}

void tn__pool_note_alloc(tn_pool *pool, tn__piece *block) {
    pool->allocs++;
    tn__pool_event(pool, TN_EVENT_ALLOC, block->address, block->asked_bytes, block->stream,
                   block->owner);
    if (!pool->trace) return;
    tn__trace_block traced = {block->asked_bytes, block->address, block->owner};
    block->trace_id = tn__trace_alloc(pool->trace, &traced, &block->stream->trace_number,
                                      pool->driver->now_us(pool->state));
}

static void note_shortage(tn_pool *pool, const tn__request *request) {
    tn__trace_block traced = {request->asked_bytes, 0, request->owner};
    tn__pool_event(pool, TN_EVENT_OUT_OF_MEMORY, 0, request->asked_bytes, request->stream,
                   request->owner);
    if (pool->trace) tn__trace_shortage(pool->trace, &traced, pool->driver->now_us(pool->state));
}

static tn_status allocate_from_heap(tn_pool *pool, tn__request *request, tn_stream stream,
                                    void **out) {
    tn__piece *block = NULL;
    tn_status status;
    TN_TRY(find_stream(pool, stream, TN__GRAPH_ALLOC, NULL, &request->stream));
    request->zone = tn__heap_zone_for(&pool->heap, request);
    /* What no device can have is not worth the procedure. */
    status = request->bytes > pool->most_bytes || request->bytes > pool->limit_bytes
                 ? TN_OUT_OF_DEVICE_MEMORY
                 : allocate(pool, request, &block);
    /* Also on failure: what the driver then does not take back stays reserved. */
    tn__pool_note_peaks(pool);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        pool->out_of_memory++;
        note_shortage(pool, request);
        return tn__pool_report_shortage(pool, request->asked_bytes);
    }
    if (status != TN_OK) return status;
    tn__pool_note_alloc(pool, block);
    *out = (void *)block->address;
    return TN_OK;
}

static tn__cache_want want_of(const tn__request *request, tn_stream stream) {
    return (tn__cache_want){request->asked_bytes, stream, request->is_owned, request->owner,
                            request->site};
}

/* A warm call that found its cache closed is served from it here. */
static int take_closed(tn_pool *pool, const tn__request *request, tn_stream stream, void **out) {
    tn__cache_want want = want_of(request, stream);
    tn__cache *cache = is_cacheable(request) ? tn__cache_mine(pool) : NULL;
    if (!cache || atomic_load(&cache->closed)) return 0;
    if (!tn__cache_take_locked(cache, &want, out)) return 0;
    note_take(pool, pool->state, *out, request->bytes, stream);
    return 1;
}

static tn_status allocate_slowly(tn_pool *pool, tn__request *request, tn_stream stream,
                                 int was_closed, void **out) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&pool->mutex);
    tn__cache_set_clock(pool);
    if (!was_closed || !take_closed(pool, request, stream, out)) {
        status = allocate_from_heap(pool, request, stream, out);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* 1 if any block of the size will do: plain options, and the arguments are good so far. */
static inline int is_plain(const tn_alloc_options *options) {
    if (!options) return 1;
    return options->size == sizeof *options && options->alignment <= TN__BLOCK_ALIGN &&
           (options->alignment & (options->alignment - 1)) == 0 && !options->flags &&
           options->lifetime == TN_LIFETIME_AUTO;
}

/* The warm path: what takes longer to ask is left to the slow one. */
static inline tn__cache_result take_warm(tn_pool *pool, size_t bytes, tn_stream stream,
                                         const tn_alloc_options *options, int is_owned,
                                         void **out) {
    tn__cache_want want = {bytes, stream, is_owned, NULL, NULL};
    tn__cache_result result;
    tn__cache *cache;
    if (!pool || !out || bytes == 0 || !is_plain(options) || tn__driver_is_gone()) {
        return TN__CACHE_MISS;
    }
    cache = tn__cache_mine(pool);
    if (!cache) return TN__CACHE_MISS;
    if (options) {
        want.owner = options->owner;
        want.site = options->site;
    }
    result = tn__cache_take(cache, &want, out);
    if ((result == TN__CACHE_DONE || result == TN__CACHE_IN_DEBT) && pool->info.simulated) {
        note_take(pool, pool->state, *out, tn__round_up(bytes, TN__BLOCK_ALIGN), stream);
    }
    return result;
}

static tn_status alloc_cold(tn_pool *pool, size_t bytes, tn_stream stream,
                            const tn_alloc_options *options, int is_owned, int was_closed,
                            void **out) {
    tn__request request = {.asked_bytes = bytes, .is_owned = is_owned};
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
    request.needs_complete = pool->backing->is_host_memory;
    request.bytes = tn__round_up(bytes, TN__BLOCK_ALIGN);
    if (request.flags) {
        TN_TRY(tn__dedicated_check(pool, &request));
        request.bytes = tn__dedicated_bytes(pool, bytes);
        request.zone = TN__ZONE_DEDICATED;
    }
    return allocate_slowly(pool, &request, stream, was_closed, out);
}

/* Threads that found their caches stopped have their blocks before they go on to settle: so one of
 * them settles for all, instead of each for itself. */
static void wait_until_open(tn_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

/* The block is the caller's already; the call returns once the peak knows of it. */
static void settle(tn_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    tn__cache_settle(tn__cache_mine(pool));
    pthread_mutex_unlock(&pool->mutex);
}

/* What the warm path could not do at once. Out of line: that has registers to save only here. */
static TN__SLOW tn_status alloc_rest(tn_pool *pool, size_t bytes, tn_stream stream,
                                     const tn_alloc_options *options, int is_owned,
                                     tn__cache_result result, void **out) {
    if (result == TN__CACHE_CLOSED && !atomic_load(&pool->observers)) {
        wait_until_open(pool);
        result = take_warm(pool, bytes, stream, options, is_owned, out);
    }
    if (result == TN__CACHE_IN_DEBT) settle(pool);
    if (result == TN__CACHE_DONE || result == TN__CACHE_IN_DEBT) return TN_OK;
    return alloc_cold(pool, bytes, stream, options, is_owned, result == TN__CACHE_CLOSED, out);
}

static inline tn_status alloc_block(tn_pool *pool, size_t bytes, tn_stream stream,
                                    const tn_alloc_options *options, int is_owned, void **out) {
    tn__cache_result result = take_warm(pool, bytes, stream, options, is_owned, out);
    if (result == TN__CACHE_DONE) return TN_OK;
    return alloc_rest(pool, bytes, stream, options, is_owned, result, out);
}

tn_status tn_alloc(tn_pool *pool, size_t bytes, tn_stream stream, const tn_alloc_options *options,
                   void **out) {
    return alloc_block(pool, bytes, stream, options, 0, out);
}

tn_status tn__alloc_owned(tn_pool *pool, size_t bytes, tn_stream stream,
                          const tn_alloc_options *options, void **out) {
    return alloc_block(pool, bytes, stream, options, 1, out);
}

const _Atomic uint64_t *tn__pool_use_stamp(const tn_pool *pool) { return &pool->order.use_stamp; }

/* ---- blocks by address ----------------------------------------------------------------------- */

static tn_status not_live(const tn_pool *pool, const void *address, const char *call) {
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "%s: %p lies in pool %s but no live block begins there: it was freed before, or "
                   "it points into a block",
                   call, address, pool->name);
}

static void set_state(tn__piece *block, tn__block_state state) {
    atomic_store_explicit(&block->tag, tn__block_tag(block->address, state), memory_order_release);
}

/* Takes the block out of reach of calls that other threads make on it: from there on it is ours.
 * Under the mutex. */
static tn__piece *hold_block(tn_pool *pool, const void *address) {
    uint64_t live = tn__block_tag((uintptr_t)address, TN__BLOCK_LIVE);
    uint64_t held = tn__block_tag((uintptr_t)address, TN__BLOCK_HELD);
    tn__piece *block = tn__heap_find_block(&pool->heap, (uintptr_t)address);
    return block && atomic_compare_exchange_strong(&block->tag, &live, held) ? block : NULL;
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

/* ---- tn_free --------------------------------------------------------------------------------- */

void tn__pool_note_free(tn_pool *pool, const tn__piece *block) {
    pool->frees++;
    tn__pool_event(pool, TN_EVENT_FREE, block->address, block->asked_bytes, block->stream,
                   block->owner);
    if (pool->trace && block->trace_id) {
        tn__trace_free(pool->trace, block->trace_id, pool->driver->now_us(pool->state));
    }
}

/* All uses by the stream that it was made for were told, each with a fence: see pool_owned.h. */
static int is_told(const tn__piece *block) {
    return block->is_owned && block->stream && tn__order_may_go(block->stream);
}

/* The block may still be in use by the stream that it was made for. */
static void add_own_use(tn_pool *pool, tn__piece *block, const tn__pool_stream *freed_on) {
    if (!block->stream || is_told(block)) return;
    add_use_now(block, block->stream);
    if (block->stream != freed_on) tn__order_fence(&pool->order, block->stream, 0);
}

/* freed_on NULL: no stream was named. */
static void give_to_heap(tn_pool *pool, tn__piece *block, tn__pool_stream *freed_on) {
    tn__region *region = block->region;
    tn__pool_note_free(pool, block);
    tn__heap_give(&pool->heap, block, ++pool->heap.operation);
    if (pool->backing->freed) pool->backing->freed(pool, region, freed_on);
}

/* The block may still be in use by this stream, too. */
static void give_block(tn_pool *pool, tn__piece *block, tn__pool_stream *stream) {
    add_own_use(pool, block, stream);
    add_use_now(block, stream);
    tn__order_drop_covered(stream, &block->uses);
    block->stream = stream;
    tn__order_fence(&pool->order, stream, 1);
    give_to_heap(pool, block, stream);
}

/* A checker can say that freed memory is touched only once nothing uses it that may: where one
 * watches, that is found out at once. What can not be asked now is asked later. */
static void tell_free(tn_pool *pool) {
    if (!pool->heap.track.asks_at_free) return;
    tn__error_scope_begin();
    (void)tn__pool_collect(pool);
    (void)tn__error_scope_end(TN_OK);
}

/* A thread that only frees has a cache, too: from inside it, it hands blocks over. That it can have
 * none is no failure. */
static void open_cache(tn_pool *pool) {
    tn__cache *cache;
    if (tn__cache_mine(pool)) return;
    tn__error_scope_begin();
    (void)tn__cache_open(pool, &cache);
    (void)tn__error_scope_end(TN_OK);
}

/* The block is HELD by this call. */
static tn_status free_held(tn_pool *pool, tn__piece *block, tn_stream stream) {
    tn__cache *cache = tn__cache_mine(pool);
    tn__pool_stream *state = NULL;
    tn_status status;
    if (cache && !atomic_load(&cache->closed) && tn__cache_give_locked(cache, block, stream)) {
        return TN_OK;
    }
    status = find_stream(pool, stream, TN__GRAPH_FREE, block, &state);
    if (status == TN_OK) {
        give_block(pool, block, state);
        tell_free(pool);
    } else {
        set_state(block, TN__BLOCK_LIVE);
    }
    return status;
}

static tn_status free_locked(tn_pool *pool, void *address, tn_stream stream, tn__piece *held) {
    if (!held) held = hold_block(pool, address);
    if (held) return free_held(pool, held, stream);
    TN_REQUIRE(!tn__guest_find(pool, (uintptr_t)address),
               "tn_free: %p is imported: tn_share_close it", address);
    return not_live(pool, address, "tn_free");
}

/* `held` is the block if it is in our hands already. */
static tn_status free_slowly(tn_pool *pool, void *address, tn_stream stream, tn__piece *held) {
    tn_status status;
    pthread_mutex_lock(&pool->mutex);
    open_cache(pool);
    tn__cache_set_clock(pool);
    status = free_locked(pool, address, stream, held);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_status tn_free(void *block, tn_stream stream) {
    tn_pool *pool;
    tn__cache *cache;
    tn__piece *held = NULL;
    if (!block || tn__driver_is_gone()) return TN_OK;
    pool = tn__page_map_find(block);
    TN_REQUIRE(pool, "tn_free: no pool gave out %p", block);
    cache = tn__cache_mine(pool);
    if (cache && tn__cache_give(cache, block, stream, &held) == TN__CACHE_DONE) return TN_OK;
    return free_slowly(pool, block, stream, held);
}

static tn_status free_told_locked(tn_pool *pool, void *address) {
    tn__piece *block = hold_block(pool, address);
    if (!block) return not_live(pool, address, "tn__free_told");
    if (!block->stream) return free_held(pool, block, NULL); /* its stream has ended */
    add_own_use(pool, block, block->stream);
    give_to_heap(pool, block, NULL);
    tell_free(pool);
    return TN_OK;
}

tn_status tn__free_told(void *block) {
    tn_pool *pool;
    tn_status status;
    if (!block || tn__driver_is_gone()) return TN_OK;
    pool = tn__page_map_find(block);
    TN_REQUIRE(pool, "tn__free_told: no pool gave out %p", block);
    pthread_mutex_lock(&pool->mutex);
    tn__cache_set_clock(pool);
    status = free_told_locked(pool, block);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- uses ---------------------------------------------------------------------------------- */

/* A block with uses on other streams is not for a cache: it goes to the heap when it is freed. */
static tn_status record_use(tn_pool *pool, tn__piece *block, tn_stream stream) {
    tn__pool_stream *state = NULL;
    TN_TRY(find_stream(pool, stream, TN__GRAPH_USE, block, &state));
    if (state != block->stream || is_told(block)) {
        TN_TRY(reserve_uses(block, state));
        if (!TN__CANARY(TN__CANARY_RECORDED_USE)) add_use_now(block, state);
        block->lane = NULL;
        tn__order_fence(&pool->order, state, 1);
    }
    tn__pool_event(pool, TN_EVENT_RECORD_USE, block->address, block->asked_bytes, state,
                   block->owner);
    return TN_OK;
}

static tn_status record_locked(tn_pool *pool, const void *address, tn_stream stream) {
    tn__piece *held = hold_block(pool, address);
    tn__piece *guest = held ? NULL : tn__guest_find(pool, (uintptr_t)address);
    tn_status status;
    if (!held && !guest) return not_live(pool, address, "tn_record_use");
    status = record_use(pool, held ? held : guest, stream);
    if (held) set_state(held, TN__BLOCK_LIVE);
    return status;
}

tn_status tn_record_use(void *block, tn_stream stream) {
    tn_pool *pool;
    tn_status status;
    if (!block || tn__driver_is_gone()) return TN_OK;
    pool = tn__page_map_find(block);
    TN_REQUIRE(pool, "tn_record_use: no pool gave out %p", block);
    pthread_mutex_lock(&pool->mutex);
    status = record_locked(pool, block, stream);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- fences ---------------------------------------------------------------------------------- */

/* The stream is there, and is the one that was meant. Another thread's per-thread stream has no
 * name here, but what is behind the work of the legacy stream is behind that of all such ones. */
static tn_status find_fenced(tn_pool *pool, tn_stream stream, uint64_t id, tn__pool_stream **out) {
    TN_TRY(tn__pool_find_stream(pool, stream, out));
    if ((*out)->id == id || ((*out)->id & TN__STREAM_ID_IN_CAPTURE)) return TN_OK;
    if (stream == TN__STREAM_PER_THREAD) return tn__pool_find_stream(pool, NULL, out);
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "stream %p was destroyed, and another one has its handle: what was used on it "
                   "can not be told of any more",
                   (void *)stream);
}

/* The blocks are HELD by this call, so that nobody frees them before they have the use. */
typedef struct told_blocks {
    tn__piece *held[TN__FENCED_BLOCKS_MAX];
    size_t count;
} told_blocks;

static void let_go(told_blocks *told) {
    for (size_t i = 0; i < told->count; i++)
        set_state(told->held[i], TN__BLOCK_LIVE);
}

/* With room for the use. */
static tn_status hold_told(tn_pool *pool, void *const *blocks, size_t count,
                           const tn__pool_stream *stream, told_blocks *told) {
    TN_CHECK(count <= TN__FENCED_BLOCKS_MAX);
    for (size_t i = 0; i < count; i++) {
        if (!blocks[i]) continue;
        tn__piece *block = hold_block(pool, blocks[i]);
        if (!block) return not_live(pool, blocks[i], "tn__pool_fence");
        told->held[told->count++] = block;
        TN_TRY(reserve_uses(block, stream));
    }
    return told->count ? tn__pause_check(pool, "the end of a use") : TN_OK;
}

static void tell_use(tn_pool *pool, tn__piece *block, tn__use use) {
    tn__uses_add(&block->uses, use.stream, use.epoch);
    block->lane = NULL;
    tn__pool_event(pool, TN_EVENT_RECORD_USE, block->address, block->asked_bytes, use.stream,
                   block->owner);
}

/* Room first, then the event: after it nothing can fail. */
static tn_status fence_locked(tn_pool *pool, void *const *blocks, size_t count, tn_stream stream,
                              uint64_t id, tn__fence *out) {
    told_blocks told = {.count = 0};
    tn__use use = {NULL, 0};
    TN_TRY(find_fenced(pool, stream, id, &use.stream));
    tn_status status = hold_told(pool, blocks, count, use.stream, &told);
    if (status == TN_OK) status = tn__order_fenced_use(&pool->order, use.stream, &use);
    for (size_t i = 0; i < told.count && status == TN_OK; i++)
        tell_use(pool, told.held[i], use);
    let_go(&told);
    if (status == TN_OK) *out = (tn__fence){use.stream->id, use.stream->number, use.epoch};
    return status;
}

static tn_status record_all(void *const *blocks, size_t count, tn_stream stream) {
    for (size_t i = 0; i < count; i++)
        TN_TRY(tn_record_use(blocks[i], stream));
    return TN_OK;
}

tn_status tn__pool_fence(tn_pool *pool, void *const *blocks, size_t count, tn_stream stream,
                         uint64_t stream_id, tn__fence *out) {
    int is_capturing = 0;
    tn_status status;
    if (tn__driver_is_gone()) return TN_OK;
    TN_TRY(pool->driver->stream_is_capturing(pool->state, stream, &is_capturing));
    if (is_capturing) {
        TN_TRY(record_all(blocks, count, stream));
        *out = (tn__fence){0, 0, 0};
        return TN_OK;
    }
    pthread_mutex_lock(&pool->mutex);
    status = fence_locked(pool, blocks, count, stream, stream_id & ~TN__STREAM_ID_MAY_GO, out);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* A stream that the pool has forgotten had nothing left to wait for. */
static tn_status wait_locked(tn_pool *pool, tn_stream stream, const tn__fence *fence) {
    tn__pool_stream *state = NULL;
    TN_TRY(tn__pool_find_stream(pool, stream, &state));
    tn__pool_stream *fenced = tn__order_known(&pool->order, fence->stream_id);
    if (!fenced || fenced->number != fence->stream_number) return TN_OK;
    return tn__order_wait_for(&pool->order, state, (tn__use){fenced, fence->epoch});
}

tn_status tn__pool_fence_wait(tn_pool *pool, tn_stream stream, const tn__fence *fence) {
    pthread_mutex_lock(&pool->mutex);
    tn_status status = wait_locked(pool, stream, fence);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- facts ----------------------------------------------------------------------------------- */

static tn_status read_bytes(tn_pool *pool, const void *address, size_t *out) {
    tn__piece *held = hold_block(pool, address);
    const tn__piece *guest = held ? NULL : tn__guest_find(pool, (uintptr_t)address);
    if (!held && !guest) return not_live(pool, address, "tn_block_info");
    *out = held ? held->asked_bytes : guest->asked_bytes;
    if (held) set_state(held, TN__BLOCK_LIVE);
    return TN_OK;
}

tn_status tn_block_info(const void *block, size_t *bytes, tn_pool **pool) {
    size_t found_bytes = 0;
    tn_pool *found;
    tn_status status;
    TN_TRY(tn__driver_refuse_fork("tn_block_info"));
    found = tn__page_map_find(block);
    TN_REQUIRE(found, "tn_block_info: no pool gave out %p", block);
    pthread_mutex_lock(&found->mutex);
    status = read_bytes(found, block, &found_bytes);
    pthread_mutex_unlock(&found->mutex);
    if (status != TN_OK) return status;
    if (bytes) *bytes = found_bytes;
    if (pool) *pool = found;
    return TN_OK;
}
