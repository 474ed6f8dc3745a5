/* Those who need all caches of a pool: stopping them, the books, and the way back to the heap. */
#include <sched.h>

#include "driver_state.h"
#include "thread_barrier.h"
#include "thread_cache.h"

/* ---- back to the heap ---------------------------------------------------------------------- */

/* Its use is that of its stream at the free; if no event covers that epoch, there is a use now that
 * none does. */
static void return_block(tn_pool *pool, tn__piece *block) {
    tn__pool_stream *stream = block->lane->stream;
    TN_ASSERT(block->uses.count == 0);
    TN_ASSERT(block->stream == stream);
    if (block->freed_epoch > tn__order_covered(stream)) stream->is_used = 1;
    tn__uses_add(&block->uses, stream, block->freed_epoch);
    block->asked_bytes = 0;
    block->is_owned = 0;
    tn__heap_give(&pool->heap, block, block->age);
}

static int return_list(tn_pool *pool, tn__piece **list) {
    int any = *list != NULL;
    while (*list) {
        tn__piece *block = *list;
        *list = block->cache_next;
        return_block(pool, block);
    }
    return any;
}

void tn__cache_drop_large(tn__cache_lane *lane) {
    if (lane->large && return_list(lane->cache->pool, &lane->large->first)) lane->large->count = 0;
    lane->large = NULL;
}

int tn__cache_drain_lane(tn__cache_lane *lane) {
    tn_pool *pool = lane->cache->pool;
    int any = 0;
    for (size_t i = 0; i < TN__CACHE_BINS; i++) {
        tn__cache_bin *bin = &lane->bins[i];
        any |= return_list(pool, &bin->first);
        bin->count = 0;
    }
    lane->large = NULL;
    return any;
}

int tn__caches_drain(tn_pool *pool) {
    int any = 0;
    if (!pool->caches) return 0;
    tn__caches_stop(pool);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next) {
        for (tn__cache_lane *lane = cache->lanes; lane; lane = lane->next)
            any |= tn__cache_drain_lane(lane);
    }
    tn__caches_go(pool);
    return any;
}

/* ---- live bytes ---------------------------------------------------------------------------- */

static size_t most_live(const tn_pool *pool) { return pool->heap.live_bytes + pool->given_bytes; }

static void withdraw(tn_pool *pool, tn__cache *cache) {
    TN_ASSERT(cache->given == cache->credit);
    pool->given_bytes -= cache->given;
    cache->given = 0;
    cache->credit = 0;
}

void tn__caches_withdraw(tn_pool *pool) {
    TN_ASSERT(pool->stop_depth > 0);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next)
        withdraw(pool, cache);
    TN_ASSERT(pool->given_bytes == 0);
}

/* The books are made up: what is live may not pass the peak, nor may what the credits allow. */
static void make_room_below_peak(tn_pool *pool) {
    if (most_live(pool) <= pool->peak_live_bytes) return;
    tn__caches_withdraw(pool);
    if (pool->heap.live_bytes > pool->peak_live_bytes) {
        pool->peak_live_bytes = pool->heap.live_bytes;
    }
}

void tn__caches_note_live(tn_pool *pool) {
    if (most_live(pool) <= pool->peak_live_bytes) return;
    tn__caches_stop(pool);
    make_room_below_peak(pool); /* they may have been stopped before */
    tn__caches_go(pool);
}

/* Out of line: the warm path has registers to save for a call it hardly makes. */
tn__cache_result tn__cache_borrow(tn__cache *cache, size_t bytes) {
    if (atomic_load_explicit(&cache->handed, memory_order_relaxed)) tn__cache_collect(cache);
    if (cache->credit >= bytes) {
        cache->credit -= bytes;
        return TN__CACHE_DONE;
    }
    cache->debt += bytes - cache->credit;
    cache->credit = 0;
    return TN__CACHE_IN_DEBT;
}

/* Credit that is spent already. */
static void pay(tn__cache *cache) {
    cache->given += cache->debt;
    cache->pool->given_bytes += cache->debt;
    cache->debt = 0;
}

/* What the peak leaves is for all caches: each takes its part as it comes. Who stops the caches
 * settles for all. */
void tn__cache_settle(tn__cache *cache) {
    tn_pool *pool = cache->pool;
    size_t share;
    if (cache->debt && most_live(pool) + cache->debt > pool->peak_live_bytes) {
        tn__caches_stop(pool);
        tn__caches_go(pool);
    }
    pay(cache);
    share = (pool->peak_live_bytes - most_live(pool)) / pool->cache_count;
    if (cache->credit >= share) return;
    share -= cache->credit;
    cache->credit += share;
    cache->given += share;
    pool->given_bytes += share;
}

/* ---- stopping ------------------------------------------------------------------------------ */

/* From here on the owner finds its cache closed, or we see that it is inside. In a forked child the
 * owner does not exist any more; while the process exits it still runs. */
static void wait_outside(tn__cache *cache) {
    while (atomic_load(&cache->is_inside) && !tn__driver_is_forked())
        sched_yield();
}

static void set_clock(tn_pool *pool, tn__cache *cache) {
    uint64_t passed = cache->allocs + cache->frees;
    if (pool->heap.operation < cache->clock + passed) {
        pool->heap.operation = cache->clock + passed;
    } else {
        cache->clock = pool->heap.operation - passed;
    }
}

void tn__cache_set_clock(tn_pool *pool) {
    tn__cache *cache = tn__cache_mine(pool);
    if (cache) set_clock(pool, cache);
}

static void make_up(tn_pool *pool, tn__cache *cache) {
    if (atomic_load_explicit(&cache->handed, memory_order_relaxed)) tn__cache_collect(cache);
    (void)return_list(pool, &cache->overflow);
    pool->heap.live_bytes += cache->given - cache->credit + cache->debt;
    pool->given_bytes += cache->credit - cache->given;
    cache->given = cache->credit;
    pool->heap.owned_bytes += cache->owned_bytes;
    set_clock(pool, cache);
    pool->allocs += cache->allocs;
    pool->frees += cache->frees;
    cache->debt = 0;
    cache->owned_bytes = 0;
    cache->allocs = 0;
    cache->frees = 0;
}

void tn__caches_stop(tn_pool *pool) {
    const tn__cache *mine = tn__cache_mine(pool);
    int has_others = 0;
    if (pool->stop_depth++ > 0) return;
    for (tn__cache *cache = pool->caches; cache; cache = cache->next) {
        atomic_fetch_or(&cache->closed, TN__CACHE_STOPPED);
        if (cache != mine && cache->is_asymmetric && atomic_load(&cache->thread)) has_others = 1;
    }
    if (has_others) tn__barrier_all_threads();
    for (tn__cache *cache = pool->caches; cache; cache = cache->next)
        wait_outside(cache);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next)
        make_up(pool, cache);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next)
        cache->clock = pool->heap.operation; /* of them all */
    make_room_below_peak(pool);
}

void tn__caches_go(tn_pool *pool) {
    TN_ASSERT(pool->stop_depth > 0);
    if (--pool->stop_depth > 0) return;
    for (tn__cache *cache = pool->caches; cache; cache = cache->next)
        atomic_fetch_and(&cache->closed, ~(unsigned)TN__CACHE_STOPPED);
}

void tn__pool_lock_whole(tn_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    tn__caches_stop(pool);
}

void tn__pool_unlock_whole(tn_pool *pool) {
    tn__caches_go(pool);
    pthread_mutex_unlock(&pool->mutex);
}

/* No owner gets in between the draining and the closing: what it put there would be seen by nobody,
 * and a pause would not wait for the work on it. */
void tn__pool_observe(tn_pool *pool, unsigned observer, int is_on) {
    unsigned before = atomic_load(&pool->observers);
    unsigned after = is_on ? before | observer : before & ~observer;
    atomic_store(&pool->observers, after);
    if (!before == !after) return;
    tn__caches_stop(pool);
    if (after) (void)tn__caches_drain(pool);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next) {
        if (after) {
            atomic_fetch_or(&cache->closed, TN__CACHE_OFF);
        } else {
            atomic_fetch_and(&cache->closed, ~(unsigned)TN__CACHE_OFF);
        }
    }
    tn__caches_go(pool);
}
