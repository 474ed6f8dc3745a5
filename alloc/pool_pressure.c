/* Where memory for a block comes from, and the procedure when it is short.
 *
 * The first step is find a run: no driver call. Then, in this order, each step only after the
 * one before did not serve, freeing no more than is needed, and each followed by a new search:
 *
 *   0 a place that was built for such a block before and whose memory is idle elsewhere; in a pool
 *     that keeps streams apart, before that and before any run that needs a wait: what needs none
 *   1 place the block in a gap: pages that are idle elsewhere move there, new ones are made; above
 *     a soft limit what is idle is used up first: this pool's also behind waits on the device, then
 *     the other pools'
 *   2 also idle memory that other streams may still use, behind waits on the device
 *   3 give idle segments back to the driver and ask it again (PLAIN); the other zones' holes; where
 *     it is addresses that are short, reservations in which nothing lies
 *   4 wait on the host, bounded, for uses of this pool's freed memory; as each ends, 2 and 3 again
 *   5 take idle memory from the other pools, of the device or, at the process's limit, of all;
 *     2 and 3 again
 *   6 ask the user's callback to free something; from 2 on again, a bounded number of times
 *   7 fail; the caller makes the report
 *
 * Where a wait is not allowed, since this stream or the one to be waited for captures a graph, only
 * memory that is ready counts, and then new memory: no step waits, asks or gives back.
 *
 * Steps 4 to 6 let the pool's mutex go, and the pool may be another when they have it again. So
 * nothing of it is held over them but the request, whose stream is looked up anew.
 */
#include <stdio.h>

#include "thread_cache.h"

typedef struct ladder {
    tn_pool *pool;
    tn__request *request;
    tn_stream stream;
    double wait_us;       /* what may still be waited on the host for this request */
    const tn__place *run; /* what find_run has found, and nothing has changed since; or NULL */
    uint64_t given_back;  /* tn__process_given_back, when it was last searched for */
} ladder;

/* ---- limits ---------------------------------------------------------------------------------- */

tn_status tn__pool_claim(tn_pool *pool, size_t bytes) {
    if (bytes == 0) return TN_OK;
    if (bytes > tn__pool_headroom(pool)) {
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                       "%zu more bytes exceed the limit of pool %s, which has %zu reserved", bytes,
                       pool->name, tn__pool_reserved_bytes(pool));
    }
    return pool->backing->is_host_memory ? TN_OK : tn__process_claim(bytes, pool->growth);
}

static size_t growth_of(const tn_pool *pool, const tn__request *request) {
    return tn__round_up(request->bytes, pool->page_bytes);
}

/* ---- finding room ---------------------------------------------------------------------------- */

static int find_run(tn_pool *pool, const tn__request *request, tn__place *out) {
    if (request->zone == TN__ZONE_DEDICATED) return tn__dedicated_find(pool, request, out);
    return tn__heap_find_run(&pool->heap, request, out);
}

static tn_status find_room(tn_pool *pool, const tn__request *request, tn__effort effort,
                           tn__place *out) {
    if (find_run(pool, request, out)) return tn__heap_wait_place(&pool->order, request, out);
    if (request->zone == TN__ZONE_DEDICATED) {
        return tn__dedicated_grow(pool, request, effort, out);
    }
    return pool->backing->grow(pool, request, effort, out);
}

/* Without a driver call, where the backing can. */
static tn_status recall(tn_pool *pool, const tn__request *request, tn__place *out, int *is_found) {
    *is_found = 0;
    return pool->backing->recall ? pool->backing->recall(pool, request, out, is_found) : TN_OK;
}

static int is_shortage(tn_status status) {
    return status == TN_OUT_OF_DEVICE_MEMORY || status == TN_OUT_OF_ADDRESS_SPACE;
}

/* Idle blocks that had handles of their own can not move: they go back for others. */
static tn_status find_room_all(tn_pool *pool, const tn__request *request, tn__place *out) {
    for (;;) {
        tn__release release = {.least_bytes = request->bytes, .most_bytes = SIZE_MAX};
        tn_status status = find_room(pool, request, TN__EFFORT_ALL, out);
        if (status != TN_OUT_OF_DEVICE_MEMORY) return status;
        TN_TRY(tn__dedicated_release(pool, &release));
        if (release.released_bytes == 0) return status;
    }
}

/* Each zone's holes, the request's own first. */
static tn_status find_room_anywhere(tn_pool *pool, tn__request *request, tn__place *out) {
    tn__zone_kind zone = request->zone;
    tn_status status = find_room_all(pool, request, out);
    if (!is_shortage(status) || zone == TN__ZONE_DEDICATED) return status;
    for (int other = 0; other < TN__ZONE_COUNT && is_shortage(status); other++) {
        if (other == (int)zone) continue;
        request->zone = (tn__zone_kind)other;
        if (tn__heap_find_run(&pool->heap, request, out)) {
            status = tn__heap_wait_place(&pool->order, request, out);
        } else if (status == TN_OUT_OF_ADDRESS_SPACE) {
            status = pool->backing->grow(pool, request, TN__EFFORT_ALL, out);
        }
    }
    request->zone = zone;
    return status;
}

/* Reservations in which nothing lies; if there are none, what is idle goes back first. */
static tn_status release_addresses(tn_pool *pool, int *any) {
    tn__release everything = {.least_bytes = SIZE_MAX, .most_bytes = SIZE_MAX};
    *any = 0;
    if (!pool->backing->release_addresses) return TN_OK;
    TN_TRY(pool->backing->release_addresses(pool, any));
    if (*any) return TN_OK;
    TN_TRY(tn__pool_release(pool, &everything));
    return pool->backing->release_addresses(pool, any);
}

/* All that can be had without waiting for the device or asking other pools. */
static tn_status find_room_hard(ladder *l, tn__place *out) {
    tn_status status;
    l->given_back = tn__process_given_back();
    status = find_room_anywhere(l->pool, l->request, out);
    while (status == TN_OUT_OF_ADDRESS_SPACE) {
        int any;
        TN_TRY(release_addresses(l->pool, &any));
        if (!any) break;
        status = find_room_anywhere(l->pool, l->request, out);
    }
    return status;
}

/* ---- the host wait --------------------------------------------------------------------------- */

/* While the mutex was free, the stream, if it is idle, may have been forgotten, and the pool may
 * have been paused. */
static tn_status find_stream_again(ladder *l) {
    TN_TRY(tn__pause_check(l->pool, "tn_alloc"));
    return tn__pool_find_stream(l->pool, l->stream, &l->request->stream);
}

static tn_status search_again(ladder *l, tn__place *out) {
    tn__heap_settle(&l->pool->heap);
    TN_TRY(tn__pool_collect(l->pool));
    TN_TRY(find_stream_again(l));
    return find_room_hard(l, out);
}

/* Searches whenever a use has ended. Work that does not end, or that is being captured, is gone
 * past: without its memory. */
static tn_status wait_and_find(ladder *l, tn_status shortage, tn__place *out) {
    tn__wait wait = {.budget_us = l->wait_us};
    tn_status status = tn__wait_begin(&wait, l->pool);
    int is_over = status != TN_OK;
    while (!is_over) {
        int any = 0;
        status = tn__wait_some(&wait, l->pool, &any);
        if (status == TN_OK) status = any ? search_again(l, out) : shortage;
        is_over = !any || !is_shortage(status);
    }
    l->wait_us = wait.budget_us;
    tn__wait_end(&wait);
    return status;
}

/* ---- other pools ----------------------------------------------------------------------------- */

/* How much of the request the process's limit keeps back. */
static size_t process_lack(const tn_pool *pool, const tn__request *request, tn__growth growth) {
    size_t wanted = growth_of(pool, request);
    size_t headroom = tn__process_headroom(growth);
    if (pool->backing->is_host_memory) return 0;
    return wanted > headroom ? wanted - headroom : 0;
}

/* Of the device's other pools, or of all. What its own limit keeps from this pool is of no use to
 * it. *any: something came, of these or, since the last search, of another thread's call: what that
 * has given back is in no pool any more. */
static tn_status take_from_others(ladder *l, int is_process_wide, size_t bytes, int *any) {
    tn_pool *pool = l->pool;
    size_t headroom = tn__pool_headroom(pool) / pool->page_bytes * pool->page_bytes;
    tn__release release = {.least_bytes = bytes, .most_bytes = SIZE_MAX};
    tn_status status;
    if (release.least_bytes > headroom) release.least_bytes = headroom;
    pthread_mutex_unlock(&pool->mutex);
    status = tn__pools_release_others(pool, is_process_wide, &release);
    pthread_mutex_lock(&pool->mutex);
    *any = release.released_bytes > 0 || tn__process_given_back() != l->given_back;
    return status == TN_OK ? find_stream_again(l) : status;
}

static tn_status take_and_find(ladder *l, tn_status shortage, tn__place *out) {
    size_t lack = process_lack(l->pool, l->request, TN__GROWTH_HARD);
    int any = 0;
    if (lack > 0) TN_TRY(take_from_others(l, 1, lack, &any));
    if (any) shortage = find_room_hard(l, out);
    if (!is_shortage(shortage)) return shortage;
    TN_TRY(take_from_others(l, 0, l->request->bytes, &any));
    return any ? find_room_hard(l, out) : shortage;
}

/* ---- the user's callback --------------------------------------------------------------------- */

static _Thread_local int is_in_callback;

/* The first of the limits that stands in the way. */
static tn_pressure_cause cause_of(const ladder *l, tn_status shortage) {
    size_t wanted = growth_of(l->pool, l->request);
    if (shortage == TN_OUT_OF_ADDRESS_SPACE) return TN_PRESSURE_ADDRESSES;
    if (tn__pool_headroom(l->pool) < wanted) return TN_PRESSURE_POOL_LIMIT;
    if (process_lack(l->pool, l->request, TN__GROWTH_HARD)) return TN_PRESSURE_PROCESS_LIMIT;
    return TN_PRESSURE_DEVICE;
}

static void fill_pressure(const ladder *l, tn_status shortage, int attempt, tn_pressure *out) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    size_t total_bytes = 0;
    tn__pool_fill_stats(l->pool, &stats);
    *out = (tn_pressure){.size = sizeof *out,
                         .pool = l->pool,
                         .stream = l->stream,
                         .requested_bytes = l->request->asked_bytes,
                         .cause = cause_of(l, shortage),
                         .attempt = attempt,
                         .live_bytes = stats.live_bytes,
                         .cached_bytes = stats.cached_bytes,
                         .pending_bytes = stats.pending_bytes,
                         .reserved_bytes = stats.reserved_bytes};
    tn__pool_memory_info(l->pool, &out->device_free_bytes, &total_bytes);
}

/* *is_worth_it: the callback says that it freed something. */
static tn_status call_back(ladder *l, tn_status shortage, int attempt, int *is_worth_it) {
    tn_pool *pool = l->pool;
    tn_pressure_callback callback = pool->callback;
    void *context = pool->callback_context;
    tn_pressure pressure;
    *is_worth_it = 0;
    if (!callback || is_in_callback) return TN_OK;
    fill_pressure(l, shortage, attempt, &pressure);
    pthread_mutex_unlock(&pool->mutex);
    is_in_callback = 1;
    *is_worth_it = callback(context, &pressure) != 0;
    is_in_callback = 0;
    pthread_mutex_lock(&pool->mutex);
    return find_stream_again(l);
}

tn_status tn_pool_pressure_callback_set(tn_pool *pool, tn_pressure_callback callback,
                                        void *context) {
    TN_REQUIRE(pool, "tn_pool_pressure_callback_set: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_pressure_callback_set"));
    pthread_mutex_lock(&pool->mutex);
    pool->callback = callback;
    pool->callback_context = callback ? context : NULL;
    pthread_mutex_unlock(&pool->mutex);
    return TN_OK;
}

/* ---- the procedure --------------------------------------------------------------------------- */

/* Steps 2 to 5. */
static tn_status find_room_at_last(ladder *l, tn__place *out) {
    tn_status status;
    (void)tn__caches_drain(l->pool);
    TN_TRY(tn__pool_collect(l->pool));
    status = find_room_hard(l, out);
    if (is_shortage(status)) status = wait_and_find(l, status, out);
    if (is_shortage(status)) status = take_and_find(l, status, out);
    return status;
}

static tn_status find_room_or_ask(ladder *l, tn__place *out) {
    tn_status status = find_room_at_last(l, out);
    for (int attempt = 1; is_shortage(status) && attempt <= TN_PRESSURE_ATTEMPTS_MAX; attempt++) {
        int is_worth_it;
        TN_TRY(call_back(l, status, attempt, &is_worth_it));
        if (!is_worth_it) break;
        status = find_room_at_last(l, out);
    }
    return status;
}

/* Step 1 above a soft limit: the pool grows up to the limit, and for the rest uses what is idle. */
static tn_status find_room_softly(ladder *l, tn__place *out) {
    tn_pool *pool = l->pool;
    size_t lack;
    int any = 0;
    tn_status status;
    pool->growth = TN__GROWTH_SOFT;
    status = find_room(pool, l->request, TN__EFFORT_READY, out);
    if (is_shortage(status)) status = find_room_hard(l, out);
    pool->growth = TN__GROWTH_HARD;
    if (!is_shortage(status)) return status;
    lack = process_lack(pool, l->request, TN__GROWTH_SOFT);
    if (lack > 0) TN_TRY(take_from_others(l, 1, lack, &any));
    return find_room(pool, l->request, TN__EFFORT_READY, out);
}

/* 1 if the request would take the pool or the process above a soft limit. */
static int is_softly_limited(tn_pool *pool, const tn__request *request) {
    size_t headroom;
    pool->growth = TN__GROWTH_SOFT;
    headroom = tn__pool_headroom(pool);
    pool->growth = TN__GROWTH_HARD;
    return headroom < growth_of(pool, request) || process_lack(pool, request, TN__GROWTH_SOFT) > 0;
}

static tn_status climb(ladder *l, tn__place *out) {
    tn_pool *pool = l->pool;
    tn_status status = tn__order_check_capture(&pool->order, l->stream, "grow");
    if (status == TN_OK && !pool->backing->is_cheap_to_grow) status = tn__pool_collect(pool);
    if (status != TN_OK) return status;
    if (is_softly_limited(pool, l->request)) {
        status = find_room_softly(l, out);
    } else {
        status = find_room(pool, l->request, TN__EFFORT_READY, out);
    }
    if (status == TN_OUT_OF_ADDRESS_SPACE && tn__backing_fall_back(pool)) {
        status = find_room(pool, l->request, TN__EFFORT_READY, out);
    }
    return is_shortage(status) ? find_room_or_ask(l, out) : status;
}

/* Nothing can be waited for: a capture is in the way. */
static tn_status find_ready_room(ladder *l, tn__place *out) {
    tn_status status;
    TN_TRY(find_stream_again(l));
    l->request->only_ready = 1;
    status = find_room(l->pool, l->request, TN__EFFORT_READY, out);
    l->request->only_ready = 0;
    return status;
}

/* The text that is there may be of a step after the one that gave the status. */
static tn_status report_addresses(const tn_pool *pool, size_t bytes) {
    int is_limited = pool->address_limit_bytes != SIZE_MAX;
    char limit[48] = "none";
    if (is_limited) snprintf(limit, sizeof limit, "%zu", pool->address_limit_bytes);
    return TN_FAIL(TN_OUT_OF_ADDRESS_SPACE,
                   "no addresses are left for %zu bytes of pool %s: it has reserved %zu of them, "
                   "limit %s; hint: %s",
                   bytes, pool->name, pool->heap.address_bytes, limit,
                   is_limited ? "raise address_limit_bytes to some times the memory that it uses"
                              : "destroy pools that are idle, or give them an address_limit_bytes");
}

/* Steps before the first: what needs no wait for another stream, be it new. */
static tn_status find_room_apart(ladder *l, tn__place *out) {
    tn_pool *pool = l->pool;
    tn_status status;
    if (find_run(pool, l->request, out)) return TN_OK;
    status = tn__order_check_capture(&pool->order, l->stream, "grow");
    if (status == TN_OK) status = tn__pool_collect(pool);
    if (status != TN_OK) return status;
    if (is_softly_limited(pool, l->request)) return TN_OUT_OF_DEVICE_MEMORY;
    return find_room(pool, l->request, TN__EFFORT_READY, out);
}

static tn_status find_room_shared(ladder *l, tn__place *out) {
    tn_status status;
    int is_found = 0;
    if (l->run) {
        *out = *l->run;
        return tn__heap_wait_place(&l->pool->order, l->request, out);
    }
    if (find_run(l->pool, l->request, out)) {
        return tn__heap_wait_place(&l->pool->order, l->request, out);
    }
    status = recall(l->pool, l->request, out, &is_found);
    return status != TN_OK || is_found ? status : climb(l, out);
}

tn_status tn__pool_find_room(tn_pool *pool, tn__request *request, const tn__place *run,
                             tn__place *out) {
    ladder l = {pool, request, request->stream->handle, pool->wait_us_max, NULL, 0};
    tn_status status = TN_OUT_OF_DEVICE_MEMORY;
    tn__error_scope_begin();
    if (pool->keep_streams_apart) {
        request->only_ready = 1;
        status = find_room_apart(&l, out);
        request->only_ready = 0;
    } else if (request->zone != TN__ZONE_DEDICATED) {
        l.run = run;
    }
    if (is_shortage(status)) status = find_room_shared(&l, out);
    if (status == TN_INVALID_STATE) status = find_ready_room(&l, out);
    if (status == TN_OUT_OF_ADDRESS_SPACE) status = report_addresses(pool, request->asked_bytes);
    return tn__error_scope_end(status);
}
