/* Pools: create, destroy, trim, and traces. */
#include <stdio.h>
#include <string.h>

#include "driver_state.h"
#include "event_ring.h"
#include "host_alloc.h"
#include "no_wait.h"
#include "nvtx_memory.h"
#include "options.h"
#include "thread_cache.h"
#include "track.h"

#define STREAMS_BEFORE_SWEEP 64
#define WAIT_US_MAX_DEFAULT  10e6

/* ---- streams that end ------------------------------------------------------------------------ */

/* Its work is done, so nothing uses memory on it any more; its id never comes back. */
static void forget_stream(tn_pool *pool, tn__pool_stream *stream) {
    tn__uses_forget(&pool->given, stream);
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            tn__uses_forget(&piece->uses, stream);
            if (piece->stream == stream && piece->kind == TN__PIECE_LIVE) piece->stream = NULL;
        }
    }
    stream->complete = stream->epoch;
}

/* Pieces that were freed on the stream are told apart from others by it until they settle. */
static void rename_stream(tn_pool *pool, tn__pool_stream *stream) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            if (piece->stream != stream) continue;
            piece->stream = piece->uses.count ? tn__uses_items(&piece->uses)[0].stream : NULL;
        }
    }
}

static void mark_uses(tn__uses *uses) {
    const tn__use *items = tn__uses_items(uses);
    for (uint32_t i = 0; i < uses->count; i++)
        items[i].stream->is_marked = 1;
}

static void mark_streams(tn__piece *piece) {
    if (piece->stream) piece->stream->is_marked = 1;
    mark_uses(&piece->uses);
}

/* Foreign streams come and go without a word: those that no piece speaks of are forgotten when
 * there are many. Streams that a caller holds a pointer to are not in danger: it comes later. */
static tn_status sweep_streams(tn_pool *pool) {
    TN_TRY(tn__pool_collect(pool));
    tn__order_unmark(&pool->order);
    tn__caches_mark_streams(pool);
    mark_uses(&pool->given);
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next)
            mark_streams(piece);
    }
    tn__order_sweep(&pool->order);
    pool->order.sweep_count = 2 * pool->order.stream_count + STREAMS_BEFORE_SWEEP;
    return TN_OK;
}

tn_status tn__pool_find_stream(tn_pool *pool, tn_stream handle, tn__pool_stream **out) {
    if (pool->order.stream_count > pool->order.sweep_count) {
        tn__error_scope_begin();
        TN_TRY(tn__error_scope_end(sweep_streams(pool)));
    }
    return tn__order_find(&pool->order, handle, out);
}

void tn__pool_on_stream_end(void *argument, tn_stream handle, uint64_t id) {
    tn_pool *pool = argument;
    tn__pool_stream *stream;
    (void)handle;
    tn__pool_lock_whole(pool);
    stream = tn__order_known(&pool->order, id);
    if (stream) {
        tn__caches_end_stream(pool, stream);
        forget_stream(pool, stream);
        rename_stream(pool, stream);
        tn__heap_settle(&pool->heap);
        tn__order_remove(&pool->order, stream);
    }
    tn__pool_unlock_whole(pool);
}

/* A pool that another thread is in learns nothing: the user's call is not to wait for it. */
void tn__pool_on_user_wait(void *argument, const tn__user_wait *wait) {
    tn_pool *pool = argument;
    if (pthread_mutex_trylock(&pool->mutex) != 0) return;
    tn__error_scope_begin();
    if (wait->is_put) {
        tn__order_wait_is_put(&pool->order, wait);
    } else {
        tn__order_wait_begins(&pool->order, wait);
    }
    (void)tn__error_scope_end(TN_OK);
    pthread_mutex_unlock(&pool->mutex);
}

void tn__pool_forget_device(tn_pool *pool, const tn__order_device *device) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = pool->order.buckets[bucket];
        for (; stream; stream = stream->next) {
            if (stream->device != device) continue;
            forget_stream(pool, stream);
            rename_stream(pool, stream);
        }
    }
    tn__heap_settle(&pool->heap);
}

/* ---- create ---------------------------------------------------------------------------------- */

static tn_status check_config(const tn_pool_config *config, const tn_device_info *info) {
    const tn__backing *backing;
    size_t page_bytes;
    TN_REQUIRE(config->size == sizeof *config,
               "tn_pool_config.size is %zu, not %zu: begin with TN_POOL_CONFIG_INIT", config->size,
               sizeof *config);
    backing = tn__backing_find(config->backing, info);
    page_bytes = config->page_bytes ? config->page_bytes : tn__options_get()->page_bytes;
    TN_REQUIRE(backing, "%d is no tn_pool_backing", (int)config->backing);
    TN_REQUIRE(!config->limit_bytes || config->soft_limit_bytes <= config->limit_bytes,
               "tn_pool_config: the soft limit %zu is above the hard limit %zu",
               config->soft_limit_bytes, config->limit_bytes);
    TN_REQUIRE(config->page_bytes % info->granularity_bytes == 0 &&
                   page_bytes <= info->memory_bytes,
               "page_bytes (or TENURE_PAGE_BYTES) %zu is not a multiple of %zu, or more than the "
               "device has",
               page_bytes, info->granularity_bytes);
    return backing->check_config(config, info);
}

static tn_status configure(tn_pool *pool, const tn_pool_config *config) {
    pool->is_backing_auto = config->backing == TN_BACKING_AUTO;
    pool->limit_bytes = config->limit_bytes ? config->limit_bytes : SIZE_MAX;
    pool->soft_limit_bytes =
        config->soft_limit_bytes ? config->soft_limit_bytes : pool->limit_bytes;
    pool->address_limit_bytes =
        config->address_limit_bytes ? config->address_limit_bytes : SIZE_MAX;
    pool->keep_streams_apart = config->keep_streams_apart != 0;
    pool->wait_us_max = config->wait_us_max ? (double)config->wait_us_max : WAIT_US_MAX_DEFAULT;
    pool->decay_us =
        config->decay_us ? (double)config->decay_us : (double)tn__options_get()->decay_ms * 1e3;
    pool->address_bytes = config->address_bytes ? config->address_bytes : pool->info.memory_bytes;
    pool->most_bytes = pool->info.memory_bytes;
    pool->segment_alignment = TN__MAP_PAGE_BYTES;
    return pool->backing->open(pool, config);
}

static tn_status make_pool(tn_device *device, const tn_pool_config *config, tn_pool **out) {
    tn_pool *pool = tn__host_alloc_aligned(sizeof *pool, _Alignof(tn_pool));
    if (!pool) return TN_OUT_OF_HOST_MEMORY;
    pool->name = tn__host_strdup(config->name ? config->name : "pool");
    if (!pool->name) {
        tn__host_free(pool);
        return TN_OUT_OF_HOST_MEMORY;
    }
    pool->device = device;
    pool->driver = tn__device_driver(device);
    pool->state = tn__device_state(device);
    pool->order.driver = pool->driver;
    pool->order.use_stamp = 1;
    pool->order.home.owner = device;
    pool->order.home.state = pool->state;
    pool->order.sweep_count = STREAMS_BEFORE_SWEEP;
    pthread_mutex_init(&pool->mutex, NULL);
    *out = pool;
    return TN_OK;
}

static void free_pool(tn_pool *pool) {
    tn__event_ring_end(pool);
    tn__caches_close(pool);
    tn__uses_clear(&pool->given);
    tn__heap_clear(&pool->heap);
    pthread_mutex_destroy(&pool->mutex);
    tn__frames_clear(pool);
    tn__host_free(pool->name);
    tn__host_free(pool);
}

/* TENURE_TRACE is for the first pool of the process; that it can not be written is no reason to
 * refuse the pool, unless options must be right. */
static tn_status begin_option_trace(tn_pool *pool) {
    const char *path = tn__options_get()->trace;
    int is_first = tn__pools_is_first();
    tn_status status;
    if (!is_first || !path || !path[0]) return TN_OK;
    tn__error_scope_begin();
    status = tn_pool_trace_begin(pool, path);
    if (status != TN_OK && !tn__options_get()->strict) {
        fprintf(stderr, "tenure: TENURE_TRACE: %s\n", tn_error_last());
        status = TN_OK;
    }
    return tn__error_scope_end(status);
}

static tn_status begin_option_events(tn_pool *pool) {
    size_t count = tn__options_get()->events;
    return count ? tn_pool_events_begin(pool, count, 0) : TN_OK;
}

/* Who is told of blocks stays the same for the life of a pool. */
static void begin_tracking(tn_pool *pool) {
    tn__heap_track *track = &pool->heap.track;
    int is_host = pool->info.driver == TN_DRIVER_HOST || pool->backing->is_host_memory;
    track->driver = pool->driver;
    track->device = pool->state;
    track->marks_memory = is_host && TN_TRACK_IS_ON();
    track->tells_tools =
        !is_host && pool->backing->kind == TN_BACKING_PLAIN && tn__nvtx_is_wanted();
    track->asks_at_free = track->tells_tools || (track->marks_memory && TN_TRACK_IS_OUTSIDE());
    track->is_on = track->marks_memory || track->tells_tools;
    if (track->marks_memory) tn__pool_observe(pool, TN__OBSERVE_TRACK, 1);
    if (track->tells_tools) tn__pool_observe(pool, TN__OBSERVE_NVTX, 1);
}

/* A pool whose backing is open and that has given nothing out. */
static void abandon_pool(tn_pool *pool) {
    tn__saved_error saved;
    tn__error_save(&saved);
    if (pool->trace) (void)tn__trace_close(pool->trace);
    (void)pool->backing->close(pool);
    tn__error_restore(&saved);
}

tn_status tn__pool_create(tn_device *device, const tn_pool_config *config, tn__graph *graph,
                          tn_pool **out) {
    static const tn_pool_config defaults = TN_POOL_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn_pool *pool = NULL;
    tn_status status;
    TN_REQUIRE(device, "tn_pool_create: device is NULL");
    TN_REQUIRE(out, "tn_pool_create: out is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_create"));
    if (!config) config = &defaults;
    TN_TRY(tn_device_info_get(device, &info));
    TN_TRY(check_config(config, &info));
    TN_TRY(make_pool(device, config, &pool));
    pool->info = info;
    pool->order.home.ordinal = info.ordinal;
    pool->backing = tn__backing_find(config->backing, &info);
    begin_tracking(pool);
    status = configure(pool, config);
    if (status == TN_OK) {
        status = begin_option_trace(pool);
        if (status == TN_OK) status = begin_option_events(pool);
        if (status == TN_OK) {
            status = tn__device_watch_streams(device, tn__pool_on_stream_end, pool);
        }
        if (status == TN_OK) {
            tn__device_watch_waits(device, tn__pool_on_user_wait, &pool->order.known_bits, pool);
        } else {
            abandon_pool(pool);
        }
    }
    if (status != TN_OK) {
        free_pool(pool);
        return status;
    }
    pool->graph = graph;
    if (graph) tn__pool_observe(pool, TN__OBSERVE_GRAPH, 1);
    tn__device_retain(device);
    tn__pools_enter(pool);
    *out = pool;
    return TN_OK;
}

tn_status tn_pool_create(tn_device *device, const tn_pool_config *config, tn_pool **out) {
    return tn__pool_create(device, config, NULL, out);
}

/* ---- destroy --------------------------------------------------------------------------------- */

/* The trace ends also on failure: a pool that it kept from being destroyed can be the next time. */
static tn_status end_trace_locked(tn_pool *pool) {
    tn__trace_writer *trace = pool->trace;
    pool->trace = NULL;
    tn__pool_observe(pool, TN__OBSERVE_TRACE, 0);
    return trace ? tn__trace_close(trace) : TN_OK;
}

void tn__pool_keep(tn_pool *pool) { atomic_fetch_add(&pool->keepers, 1); }

void tn__pool_let_go(tn_pool *pool) {
    unsigned before = atomic_fetch_sub(&pool->keepers, 1);
    TN_CHECK(before > 0);
}

static tn_status check_unkept(tn_pool *pool) {
    if (!atomic_load(&pool->keepers)) return TN_OK;
    return TN_FAIL(TN_IN_USE, "pool %s has scopes of tensors: close them first", pool->name);
}

/* Gives everything back. What a failing call leaves can be closed again. */
static tn_status close_locked(tn_pool *pool) {
    tn__release everything = {.least_bytes = SIZE_MAX, .most_bytes = SIZE_MAX};
    (void)tn__caches_drain(pool);
    if (pool->heap.block_count > 0) return tn__pool_report_leak(pool);
    TN_TRY(check_unkept(pool));
    TN_TRY(tn__graph_check_released(pool));
    TN_TRY(tn__guests_check_closed(pool));
    TN_TRY(tn__pause_close(pool));
    TN_TRY(tn__pool_wait_freed(pool));
    tn__heap_settle(&pool->heap);
    TN_TRY(tn__pool_release(pool, &everything));
    TN_TRY(tn__dedicated_close(pool));
    tn__uses_clear(&pool->given);
    tn__caches_end_lanes(pool);
    return tn__order_close(&pool->order);
}

/* The backing last: whatever fails, a pool that is still there can be used. */
static tn_status close_unless_held(tn_pool *pool) {
    tn_status status;
    if (!tn__driver_wait_begin()) {
        return TN_FAIL(TN_INVALID_STATE,
                       "pool %s would wait for the device: not before tn_no_wait_end", pool->name);
    }
    tn__error_scope_begin();
    status = tn__error_scope_end(close_locked(pool));
    if (status == TN_OK) status = end_trace_locked(pool);
    if (status == TN_OK) status = pool->backing->close(pool);
    tn__driver_wait_end();
    return status;
}

tn_status tn_pool_destroy(tn_pool *pool) {
    tn_status status;
    if (!pool || tn__driver_is_gone()) return TN_OK;
    tn__pools_leave(pool);
    pthread_mutex_lock(&pool->mutex);
    status = close_unless_held(pool);
    tn__pool_print_end(pool, status == TN_OK ? "its end" : "a failed end");
    pthread_mutex_unlock(&pool->mutex);
    if (status != TN_OK) {
        tn__pools_enter(pool);
        return status;
    }
    tn__pool_end_peers(pool);
    tn__device_unwatch_streams(pool->device, pool);
    tn__device_release(pool->device);
    tn__graph_destroy(pool->graph);
    free_pool(pool);
    return TN_OK;
}

/* ---- the rest of the interface ------------------------------------------------------------- */

static tn_status trim_locked(tn_pool *pool, size_t keep_bytes, uint64_t freed_until,
                             size_t *released_bytes) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn__release release = {.freed_until = freed_until};
    (void)tn__caches_drain(pool);
    TN_TRY(tn__pool_collect(pool));
    if (pool->backing->kind == TN_BACKING_VMM) TN_TRY(tn__pages_decay(pool));
    tn__pool_fill_stats(pool, &stats);
    release.least_bytes = stats.cached_bytes + stats.driver_held_bytes;
    if (release.least_bytes <= keep_bytes) keep_bytes = release.least_bytes;
    release.least_bytes -= keep_bytes;
    release.most_bytes = release.least_bytes;
    TN_TRY(tn__pool_release(pool, &release));
    *released_bytes = release.released_bytes;
    return TN_OK;
}

void tn__pool_settle_set(tn_pool *pool, tn__settle settle) { pool->settle = settle; }

tn_status tn__pool_check_ordinary(const tn_pool *pool) {
    TN_REQUIRE(!pool->backing->is_host_memory, "pool %s is of host memory", pool->name);
    TN_REQUIRE(!pool->graph, "pool %s gives memory to captures alone: it is a graph pool",
               pool->name);
    return TN_OK;
}

/* The caches are drained for their clocks, too: no free is older than it is. */
static uint64_t free_time(tn_pool *pool) {
    uint64_t now;
    pthread_mutex_lock(&pool->mutex);
    (void)tn__caches_drain(pool);
    now = pool->heap.operation;
    pthread_mutex_unlock(&pool->mutex);
    return now > 0 ? now : 1;
}

int tn__pool_settle(tn_pool *pool, uint64_t *freed_until) {
    int is_settled;
    *freed_until = 0;
    if (!pool->settle) return 1;
    *freed_until = free_time(pool);
    if (!tn__driver_wait_begin()) return 0;
    is_settled = pool->settle();
    tn__driver_wait_end();
    return is_settled;
}

tn_status tn_pool_trim(tn_pool *pool, size_t keep_bytes, size_t *released_bytes) {
    size_t released = 0;
    uint64_t freed_until;
    tn_status status = TN_OK;
    TN_REQUIRE(pool, "tn_pool_trim: pool is NULL");
    if (!tn__driver_is_gone() && tn__pool_settle(pool, &freed_until)) {
        pthread_mutex_lock(&pool->mutex);
        tn__error_scope_begin();
        status = tn__error_scope_end(trim_locked(pool, keep_bytes, freed_until, &released));
        /* A driver's pool may have been found to hold more than was known. */
        tn__pool_note_peaks(pool);
        pthread_mutex_unlock(&pool->mutex);
    }
    if (status == TN_OK && released_bytes) *released_bytes = released;
    return status;
}

/* The soft limit stays below the hard one; where there was none, there is none. */
static tn_status set_limit_locked(tn_pool *pool, size_t limit, int is_settled,
                                  uint64_t freed_until) {
    size_t released = 0;
    size_t reserved = tn__pool_reserved_bytes(pool);
    if (reserved > limit && is_settled) TN_TRY(trim_locked(pool, 0, freed_until, &released));
    reserved = tn__pool_reserved_bytes(pool);
    if (reserved > limit) {
        return TN_FAIL(TN_IN_USE,
                       "tn_pool_limit_set: pool %s holds %zu bytes that are in use, more than %zu",
                       pool->name, reserved, limit);
    }
    if (pool->soft_limit_bytes == pool->limit_bytes || pool->soft_limit_bytes > limit) {
        pool->soft_limit_bytes = limit;
    }
    pool->limit_bytes = limit;
    return TN_OK;
}

tn_status tn_pool_limit_set(tn_pool *pool, size_t limit_bytes) {
    size_t limit = limit_bytes ? limit_bytes : SIZE_MAX;
    uint64_t freed_until = 0;
    tn_status status;
    int is_settled;
    TN_REQUIRE(pool, "tn_pool_limit_set: pool is NULL");
    TN_TRY(tn__driver_require_present("tn_pool_limit_set"));
    if (pool->backing->kind == TN_BACKING_ASYNC) {
        return TN_FAIL(TN_UNSUPPORTED, "tn_pool_limit_set: the driver keeps the limit of an ASYNC "
                                       "pool, and takes it once");
    }
    is_settled = limit == SIZE_MAX || tn__pool_settle(pool, &freed_until);
    pthread_mutex_lock(&pool->mutex);
    tn__error_scope_begin();
    status = tn__error_scope_end(set_limit_locked(pool, limit, is_settled, freed_until));
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_device *tn_pool_device(tn_pool *pool) { return pool ? pool->device : NULL; }

size_t tn_pool_page_bytes(const tn_pool *pool) { return pool ? pool->page_bytes : 0; }

const char *tn_pool_name(const tn_pool *pool) { return pool ? pool->name : ""; }

/* Blocks that are live already are not in the trace, and neither are their frees. */
static void forget_trace_marks(tn_pool *pool) {
    tn__piece *block = tn__heap_next_block(&pool->heap, NULL);
    for (; block; block = tn__heap_next_block(&pool->heap, block))
        block->trace_id = 0;
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = pool->order.buckets[bucket];
        for (; stream; stream = stream->next)
            stream->trace_number = -1;
    }
}

tn_status tn_pool_trace_begin(tn_pool *pool, const char *path) {
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_trace_begin: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_trace_begin"));
    TN_REQUIRE(path && path[0], "tn_pool_trace_begin: the path is empty");
    pthread_mutex_lock(&pool->mutex);
    if (pool->trace) {
        status =
            TN_FAIL(TN_INVALID_STATE, "pool %s writes a trace already: end it first", pool->name);
    } else {
        status = tn__trace_open(path, pool->driver->now_us(pool->state), &pool->trace);
        if (status == TN_OK) {
            tn__pool_observe(pool, TN__OBSERVE_TRACE, 1);
            forget_trace_marks(pool);
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

tn_status tn_pool_trace_end(tn_pool *pool) {
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_trace_end: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_trace_end"));
    pthread_mutex_lock(&pool->mutex);
    status = pool->trace ? end_trace_locked(pool)
                         : TN_FAIL(TN_INVALID_STATE, "pool %s writes no trace", pool->name);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}
