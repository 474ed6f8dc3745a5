/* The host's wait for memory that was freed while work still used it.
 *
 * Only for the uses that freed pieces have when the wait begins, so it ends also while other
 * threads go on using the pool, and within a bound also if the work does not. The pool's mutex is
 * free while the thread sleeps: others allocate and free meanwhile, streams may end and their
 * states be forgotten. So nothing of the pool is held over it; a target names its stream by number
 * and is looked up anew each time.
 */
#include <time.h>

#include "host_alloc.h"
#include "no_wait.h"
#include "thread_cache.h"

#define NAP_NS       50000
#define NEVER_NATIVE 702 /* the simulated device's answer when no work can go on */

/* ---- what to wait for ------------------------------------------------------------------------ */

/* Each stream's latest use of freed memory goes to wait_epoch. */
static void mark_uses(tn__uses *uses) {
    const tn__use *items = tn__uses_items(uses);
    for (uint32_t i = 0; i < uses->count; i++) {
        tn__pool_stream *stream = items[i].stream;
        if (items[i].epoch > stream->wait_epoch) stream->wait_epoch = items[i].epoch;
    }
}

static void clear_marks(tn__order *order) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = order->buckets[bucket];
        for (; stream; stream = stream->next)
            stream->wait_epoch = 0;
    }
}

/* Imported memory that has been closed goes when its uses are over, as what has been freed. */
static int is_given_up(const tn__piece *piece) {
    if (piece->kind == TN__PIECE_GUEST) return piece->region->guest->references == 0;
    return piece->kind != TN__PIECE_LIVE;
}

/* Gives the count of streams that may be waited for. */
static size_t mark_pieces(tn_pool *pool, int is_of_live) {
    size_t count = 0;
    clear_marks(&pool->order);
    mark_uses(&pool->given);
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            int is_live = piece->kind == TN__PIECE_LIVE;
            if (is_given_up(piece) || (is_of_live && is_live)) mark_uses(&piece->uses);
        }
    }
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        const tn__pool_stream *stream = pool->order.buckets[bucket];
        for (; stream; stream = stream->next)
            count += stream->wait_epoch > stream->complete;
    }
    return count;
}

/* An event must cover the use. A stream that captures takes none: what it closed before is all that
 * can be waited for. */
static tn_status add_target(tn__wait *wait, tn_pool *pool, tn__pool_stream *stream) {
    uint64_t epoch = stream->wait_epoch;
    if (epoch <= stream->complete) return TN_OK;
    if (epoch > tn__order_covered(stream)) {
        tn_status status = tn__order_close_epoch(&pool->order, stream);
        if (status == TN_INVALID_STATE) {
            wait->is_unfinished = 1;
            epoch = tn__order_covered(stream);
        } else if (status != TN_OK) {
            return status;
        }
    }
    if (epoch <= stream->complete) return TN_OK;
    wait->targets[wait->count++] = (tn__wait_target){stream->id, stream->number, epoch, 0};
    return TN_OK;
}

tn_status tn__wait_begin(tn__wait *wait, tn_pool *pool) {
    size_t count = mark_pieces(pool, wait->is_of_live);
    wait->count = 0;
    wait->is_unfinished = 0;
    wait->targets = wait->local;
    if (count > TN__WAIT_LOCAL) {
        wait->targets = tn__host_alloc(count, sizeof *wait->targets);
        if (!wait->targets) return TN_OUT_OF_HOST_MEMORY;
    }
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = pool->order.buckets[bucket];
        for (; stream; stream = stream->next)
            TN_TRY(add_target(wait, pool, stream));
    }
    return TN_OK;
}

void tn__wait_end(tn__wait *wait) {
    if (wait->targets != wait->local) tn__host_free(wait->targets);
    wait->targets = wait->local;
    wait->count = 0;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* NULL: the stream has ended, and its uses with it. */
static tn__pool_stream *stream_of(tn_pool *pool, const tn__wait_target *target) {
    tn__pool_stream *stream = tn__order_known(&pool->order, target->stream_id);
    return stream && stream->number == target->stream_number ? stream : NULL;
}

/* Learns what has completed. *first: a target that has not, NULL if none is left. */
static tn_status poll_targets(tn__wait *wait, tn_pool *pool, tn__wait_target **first, int *any) {
    *first = NULL;
    for (size_t i = 0; i < wait->count; i++) {
        tn__wait_target *target = &wait->targets[i];
        tn__pool_stream *stream = stream_of(pool, target);
        if (target->is_over) continue;
        if (stream) TN_TRY(tn__order_poll_stream(&pool->order, stream));
        if (!stream || target->epoch <= stream->complete) {
            target->is_over = 1;
            *any = 1;
        } else if (!*first) {
            *first = target;
        }
    }
    return TN_OK;
}

static tn__event event_of(const tn__pool_stream *stream, const tn__wait_target *target) {
    for (uint32_t i = 0; i < stream->closed_count; i++) {
        if (stream->closed[i].epoch >= target->epoch) return stream->closed[i].event;
    }
    TN_CHECK(!"an incomplete use has an event that covers it");
    return NULL;
}

/* Simulated time passes for those who wait in a call and not for those who poll; the call itself
 * ends when nothing can happen. Another thread may record the event anew meanwhile: then the wait
 * is longer, and the next poll tells. */
static tn_status sleep_simulated(tn__wait *wait, tn_pool *pool, tn__wait_target *target) {
    const tn__pool_stream *stream = stream_of(pool, target);
    tn__driver_device *device = stream->device->state;
    tn__event event = event_of(stream, target);
    tn_status status;
    pthread_mutex_unlock(&pool->mutex);
    status = pool->driver->event_synchronize(device, event);
    pthread_mutex_lock(&pool->mutex);
    if (status == TN_OK || tn_error_last_native() != NEVER_NATIVE) return status;
    target->is_over = 1;
    wait->is_unfinished = 1;
    return TN_OK;
}

static void sleep_a_nap(tn_pool *pool) {
    const struct timespec nap = {0, NAP_NS};
    pthread_mutex_unlock(&pool->mutex);
    nanosleep(&nap, NULL);
    pthread_mutex_lock(&pool->mutex);
}

tn_status tn__wait_some(tn__wait *wait, tn_pool *pool, int *any) {
    double begin_us = pool->driver->now_us(pool->state);
    uint64_t frees = pool->frees;
    *any = 0;
    for (;;) {
        tn__wait_target *first;
        double waited_us;
        TN_TRY(poll_targets(wait, pool, &first, any));
        waited_us = pool->driver->now_us(pool->state) - begin_us;
        *any |= tn__caches_drain(pool) || pool->frees != frees;
        if (*any || !first) {
            wait->budget_us -= waited_us;
            return TN_OK;
        }
        if (waited_us >= wait->budget_us || !tn__may_wait()) {
            wait->budget_us = 0;
            wait->is_unfinished = 1;
            return TN_OK;
        }
        if (pool->info.simulated) {
            TN_TRY(sleep_simulated(wait, pool, first));
        } else {
            sleep_a_nap(pool);
        }
    }
}

static tn_status wait_for_all(tn_pool *pool, int is_of_live) {
    tn__wait wait = {.budget_us = pool->wait_us_max, .is_of_live = is_of_live};
    tn_status status = tn__wait_begin(&wait, pool);
    int any = 1;
    while (status == TN_OK && any)
        status = tn__wait_some(&wait, pool, &any);
    if (status == TN_OK && wait.is_unfinished) {
        status = TN_FAIL(TN_INVALID_STATE,
                         "work that uses %smemory of pool %s did not end within %.3f s, or is "
                         "being captured",
                         is_of_live ? "" : "freed ", pool->name, pool->wait_us_max / 1e6);
    }
    tn__wait_end(&wait);
    return status;
}

tn_status tn__pool_wait_freed(tn_pool *pool) { return wait_for_all(pool, 0); }

tn_status tn__pool_wait_uses(tn_pool *pool) { return wait_for_all(pool, 1); }
