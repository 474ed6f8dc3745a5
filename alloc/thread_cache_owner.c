/* Whose a cache is: threads leave theirs behind when they end, and take over such ones.
 *
 * The list of a thread's caches is for its end, and for that of their pools: both change it, and
 * the slots in which threads find their caches, under the registry's lock.
 */
#include <pthread.h>
#include <string.h>

#include "host_alloc.h"
#include "thread_barrier.h"
#include "thread_cache.h"

typedef struct tn__cache_thread {
    tn__cache *caches;
} tn__cache_thread;

/* Not in static thread-local storage: a late dlopen has none to spare. */
static _Thread_local tn__cache_thread this_thread;

static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int has_key;

/* ---- threads that end ---------------------------------------------------------------------- */

/* A forked child's lock may be one that nobody lets go. */
static void on_thread_end(void *argument) {
    tn__cache_thread *thread = argument;
    if (tn__driver_is_gone()) return;
    pthread_mutex_lock(&registry_mutex);
    for (tn__cache *cache = thread->caches; cache; cache = cache->next_of_thread) {
        atomic_store(&cache->slot->thread, 0);
        atomic_store(&cache->thread, NULL);
    }
    thread->caches = NULL;
    pthread_mutex_unlock(&registry_mutex);
}

static void make_key(void) { has_key = pthread_key_create(&key, on_thread_end) == 0; }

/* dlclose: threads that end later must not call what is no longer there. */
__attribute__((destructor)) static void delete_key(void) {
    if (has_key) (void)pthread_key_delete(key);
    has_key = 0;
}

/* ---- caches of this thread ----------------------------------------------------------------- */

/* NULL if too many threads have their slots there. */
static tn__cache_slot *find_empty_slot(tn_pool *pool) {
    for (size_t probe = 0; probe < TN__CACHE_SLOT_PROBES; probe++) {
        size_t at = tn__cache_slot_at((uintptr_t)pthread_self(), probe);
        if (!atomic_load(&pool->cache_slots[at].thread)) return &pool->cache_slots[at];
    }
    return NULL;
}

static void enter_thread(tn__cache *cache, tn__cache_slot *slot) {
    pthread_mutex_lock(&registry_mutex);
    cache->next_of_thread = this_thread.caches;
    this_thread.caches = cache;
    atomic_store(&cache->thread, &this_thread);
    cache->slot = slot;
    atomic_store(&slot->cache, cache);
    atomic_store(&slot->thread, (uintptr_t)pthread_self());
    pthread_mutex_unlock(&registry_mutex);
}

static void leave_thread_locked(tn__cache *cache) {
    tn__cache_thread *thread = atomic_load(&cache->thread);
    tn__cache **at = thread ? &thread->caches : NULL;
    while (at && *at != cache)
        at = &(*at)->next_of_thread;
    if (at) *at = cache->next_of_thread;
}

/* One that a thread which has ended left behind. */
static tn__cache *take_over_cache(tn_pool *pool) {
    tn__cache *left = pool->caches;
    while (left && atomic_load(&left->thread))
        left = left->next;
    if (!left) return NULL;
    tn__caches_stop(pool);
    tn__cache_lane_end(left, TN__STREAM_PER_THREAD); /* another stream on this thread */
    tn__caches_go(pool);
    return left;
}

static tn__cache *make_cache(tn_pool *pool) {
    tn__cache *cache = tn__host_alloc_aligned(sizeof *cache, _Alignof(tn__cache));
    if (!cache) return NULL;
    cache->pool = pool;
    cache->is_asymmetric = tn__barrier_is_there();
    cache->next = pool->caches;
    pool->caches = cache;
    pool->cache_count++;
    return cache;
}

tn_status tn__cache_open(tn_pool *pool, tn__cache **out) {
    tn__cache *cache = tn__cache_mine(pool);
    tn__cache_slot *slot;
    *out = NULL;
    if (atomic_load(&pool->observers)) return TN_OK;
    if (!cache) {
        pthread_once(&key_once, make_key);
        slot = find_empty_slot(pool);
        if (!slot || !has_key || pthread_setspecific(key, &this_thread) != 0) return TN_OK;
        cache = take_over_cache(pool);
        if (!cache) cache = make_cache(pool);
        if (!cache) return TN_OUT_OF_HOST_MEMORY;
        enter_thread(cache, slot);
    }
    *out = cache;
    return TN_OK;
}

void tn__caches_close(tn_pool *pool) {
    pthread_mutex_lock(&registry_mutex);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next)
        leave_thread_locked(cache);
    pthread_mutex_unlock(&registry_mutex);
    while (pool->caches) {
        tn__cache *cache = pool->caches;
        pool->caches = cache->next;
        while (cache->lanes) {
            tn__cache_lane *lane = cache->lanes;
            cache->lanes = lane->next;
            tn__host_free(lane);
        }
        tn__host_free(cache);
    }
    pool->cache_count = 0;
}

/* ---- lanes --------------------------------------------------------------------------------- */

static void enter_slots(tn__cache *cache, tn__cache_lane *lane) {
    tn__cache_lane **slot = tn__cache_lane_slot(cache, lane->handle);
    TN_ASSERT(!*slot);
    *slot = lane;
}

tn_status tn__cache_lane_open(tn__cache *cache, tn__pool_stream *stream, tn__cache_lane **out) {
    tn__cache_lane *lane;
    *out = NULL;
    if (stream->is_foreign || stream->device != &cache->pool->order.home) return TN_OK;
    lane = *tn__cache_lane_slot(cache, stream->handle);
    if (!lane && cache->lane_count == TN__CACHE_LANES_MAX) return TN_OK;
    if (!lane) {
        lane = tn__host_alloc(1, sizeof *lane);
        if (!lane) return TN_OUT_OF_HOST_MEMORY;
        lane->handle = stream->handle;
        lane->stream = stream;
        lane->cache = cache;
        lane->next = cache->lanes;
        cache->lanes = lane;
        cache->lane_count++;
        enter_slots(cache, lane);
    }
    TN_ASSERT(lane->stream == stream);
    *out = lane;
    return TN_OK;
}

/* Blocks in callers' hands that would come back to the lane go to the heap when they are freed. */
static void forget_lane(tn_pool *pool, const tn__cache_lane *lane) {
    tn__piece *block = tn__heap_next_block(&pool->heap, NULL);
    for (; block; block = tn__heap_next_block(&pool->heap, block)) {
        if (block->lane == lane) block->lane = NULL;
    }
}

void tn__cache_lane_end(tn__cache *cache, tn_stream handle) {
    tn__cache_lane *ended = *tn__cache_lane_slot(cache, handle);
    tn__cache_lane **at = &cache->lanes;
    if (!ended) return;
    tn__cache_drain_lane(ended);
    forget_lane(cache->pool, ended);
    while (*at != ended)
        at = &(*at)->next;
    *at = ended->next;
    cache->lane_count--;
    tn__host_free(ended);
    memset(cache->lane_slots, 0, sizeof cache->lane_slots);
    for (tn__cache_lane *lane = cache->lanes; lane; lane = lane->next)
        enter_slots(cache, lane);
}

void tn__caches_end_stream(tn_pool *pool, const tn__pool_stream *stream) {
    for (tn__cache *cache = pool->caches; cache; cache = cache->next) {
        const tn__cache_lane *lane = *tn__cache_lane_slot(cache, stream->handle);
        if (lane && lane->stream == stream) tn__cache_lane_end(cache, stream->handle);
    }
}

void tn__caches_end_lanes(tn_pool *pool) {
    tn__caches_stop(pool);
    for (tn__cache *cache = pool->caches; cache; cache = cache->next) {
        while (cache->lanes)
            tn__cache_lane_end(cache, cache->lanes->handle);
    }
    tn__caches_go(pool);
}

void tn__caches_mark_streams(tn_pool *pool) {
    for (tn__cache *cache = pool->caches; cache; cache = cache->next) {
        for (tn__cache_lane *lane = cache->lanes; lane; lane = lane->next)
            lane->stream->is_marked = 1;
    }
}
