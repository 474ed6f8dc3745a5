/* Thread caches: freed blocks kept by the thread that allocated them, for its next allocation.
 *
 *   cache   of one thread in one pool
 *   lane    of a cache: for one stream whose end the pool hears of
 *   bin     of a lane: blocks of one exact size (rounded up to TN__BLOCK_ALIGN), last in first out
 *
 *      thread 1                     thread 2
 *      cache ---- lane: stream A    cache ---- lane: stream A
 *        |          512: o o o        |          512: o
 *        |          1 MiB: o          |
 *        |        lane: stream B      '-- handed: o o o   freed by other threads
 *        '-- handed: o
 *
 * For the heap a block in a cache stays a LIVE piece; its tag says CACHED (or HANDED), and for the
 * books it is free memory. It was freed on the stream of its lane and has no other uses, so work of
 * that stream may have it at once; the stream's epoch at the free is kept for the others.
 *
 * The owner is alone in its cache without a lock. It says that it is inside, looks whether the
 * cache is closed to it, and works; it pays for no atomic exchange and no fence. Whoever else
 * needs a cache holds the pool's mutex, closes all caches of the pool, makes every thread of the
 * process pass a barrier (membarrier), waits till no owner is inside, and has them all to itself
 * until it opens them: "stopped". Owners that find their cache closed go by the mutex. Where there
 * is no membarrier, and for the thread sanitizer, entering is an exchange instead.
 *
 * Live bytes are counted without a shared counter. Each cache has a credit: it may have so many
 * bytes more live without the pool's peak being passed. An allocation takes from it, a free
 * adds to it:
 *
 *      really live = heap.live_bytes + sum of (given - credit + debt)
 *
 *      heap.live_bytes + sum of given <= peak_live_bytes
 *
 * `given` is what the credit was when heap.live_bytes was last exact. Where credit is short, the
 * block is taken all the same, with the rest as a debt that the call settles before it returns: the
 * mutex, then credit from what the peak leaves; only when that is not enough, all caches are
 * stopped, which settles every debt, and the peak raised if what is live then passes it. So the
 * peak is of blocks that calls have, also of calls that overlap, and never of one that is refused.
 *
 * Lock order: a pool's mutex, then the registry's (thread_cache_owner.c). Owners inside take none.
 */
#ifndef TENURE_THREAD_CACHE_H
#define TENURE_THREAD_CACHE_H

#include "pool_internal.h"

#define TN__CACHE_BINS        256 /* of a lane */
#define TN__CACHE_BIN_PROBES  4
#define TN__CACHE_LARGE_BYTES ((size_t)2 << 20) /* of larger ones a lane keeps the last one only */
#define TN__CACHE_LANES_MAX   32
#define TN__CACHE_LANE_SLOTS  64
#define TN__CACHE_HANDED_MAX  256 /* blocks on the list of a cache; beyond, frees go to the heap */
#define TN__CACHE_LINE_BYTES  64

typedef struct tn__cache_bin {
    size_t bytes; /* of its blocks; 0: not used yet */
    tn__piece *first;
    uint32_t count;
    uint32_t most;
} tn__cache_bin;

typedef struct tn__cache_lane tn__cache_lane;
struct tn__cache_lane {
    tn_stream handle;
    tn__pool_stream *stream;
    tn__cache *cache;
    tn__cache_lane *next; /* of the same cache */
    tn__cache_bin *large; /* the bin that had the last block above TN__CACHE_LARGE_BYTES; or NULL */
    tn__cache_bin bins[TN__CACHE_BINS];
};

enum {
    TN__CACHE_STOPPED = 1, /* by a thread that holds the mutex */
    TN__CACHE_OFF = 2      /* the pool has observers */
};

struct tn__cache {
    /* The owner's, while it is inside; or of the one who has stopped the caches. */
    _Alignas(2 * TN__CACHE_LINE_BYTES) atomic_int is_inside;
    atomic_uint closed; /* 0, or the bits above: changed under the mutex */
    int is_asymmetric;  /* closing it takes a membarrier */
    size_t credit;
    size_t debt;     /* live beyond the credit, by a call that has not returned */
    uint64_t clock;  /* of heap.operation; with the next two added, the time of now */
    uint64_t allocs; /* since the books were last made up; like the next two */
    uint64_t frees;
    size_t owned_bytes;  /* more owned; wraps around below 0 */
    tn__piece *overflow; /* CACHED blocks that no bin has room for: to the heap soon */
    tn__cache_lane *lane_slots[TN__CACHE_LANE_SLOTS]; /* by a hash of the handle */

    /* Every thread's: blocks freed elsewhere, HANDED. */
    _Alignas(2 * TN__CACHE_LINE_BYTES) _Atomic(tn__piece *) handed;
    atomic_uint handed_count;

    /* Under the pool's mutex. */
    _Alignas(2 * TN__CACHE_LINE_BYTES) tn_pool *pool;
    tn__cache *next; /* of the pool */
    tn__cache_lane *lanes;
    size_t lane_count;
    size_t given;
    _Atomic(struct tn__cache_thread *) thread; /* NULL: it has ended. Under the registry's lock */
    tn__cache *next_of_thread;                 /* likewise */
    tn__cache_slot *slot;                      /* of that thread; likewise */
};

/* ---- thread_cache_owner.c: whose a cache is ------------------------------------------------ */

/* This thread's cache goes by the clock of the pool, or that by the cache's if it is ahead: so ages
 * of one thread's blocks are in order. Under the mutex. */
void tn__cache_set_clock(tn_pool *pool);

#define TN__CACHE_SLOT_PROBES 4
static inline size_t tn__cache_slot_at(uintptr_t thread, size_t probe) {
    return ((size_t)((uint64_t)thread * 0x9E3779B97F4A7C15u >> 58) + probe) % TN__CACHE_SLOTS;
}

/* This thread's cache of the pool, if it has one. No lock. */
static inline tn__cache *tn__cache_mine(tn_pool *pool) {
    uintptr_t thread = (uintptr_t)pthread_self();
    for (size_t probe = 0; probe < TN__CACHE_SLOT_PROBES; probe++) {
        tn__cache_slot *slot = &pool->cache_slots[tn__cache_slot_at(thread, probe)];
        if (atomic_load_explicit(&slot->thread, memory_order_relaxed) == thread) {
            return atomic_load_explicit(&slot->cache, memory_order_relaxed);
        }
    }
    return NULL;
}

/* The same, under the mutex: taken over from a thread that has ended, or made, if need be. NULL if
 * the pool has observers, or there can be none. */
tn_status tn__cache_open(tn_pool *pool, tn__cache **out);

/* The lane of a stream, made if need be. NULL if its end would not be heard of, or it is another
 * device's, or there are too many. Under the mutex. */
tn_status tn__cache_lane_open(tn__cache *cache, tn__pool_stream *stream, tn__cache_lane **out);

/* Where the lane of a handle is, or would go. By who has the cache to itself. */
static inline tn__cache_lane **tn__cache_lane_slot(tn__cache *cache, tn_stream handle) {
    size_t at = (size_t)(((uint64_t)(uintptr_t)handle >> 3) * 0x9E3779B97F4A7C15u >> 58);
    while (cache->lane_slots[at] && cache->lane_slots[at]->handle != handle)
        at = (at + 1) % TN__CACHE_LANE_SLOTS;
    return &cache->lane_slots[at];
}

/* Ends one lane, if there is one: its blocks go to the heap. The caches are stopped. */
void tn__cache_lane_end(tn__cache *cache, tn_stream handle);

/* Ends the lanes of a stream in all caches: their blocks go to the heap. The caches are stopped. */
void tn__caches_end_stream(tn_pool *pool, const tn__pool_stream *stream);

/* Ends all lanes: the states of all streams are about to end. Under the mutex. */
void tn__caches_end_lanes(tn_pool *pool);

/* Marks the streams that lanes speak of (tn__order_sweep). Under the mutex. */
void tn__caches_mark_streams(tn_pool *pool);

/* Frees the caches of a pool that nobody uses any more. */
void tn__caches_close(tn_pool *pool);

/* ---- thread_cache.c: the warm path --------------------------------------------------------- */

typedef enum tn__cache_result {
    TN__CACHE_DONE,
    TN__CACHE_MISS,   /* the heap has to serve */
    TN__CACHE_CLOSED, /* nothing was looked at */
    TN__CACHE_IN_DEBT /* done, once the cache has settled */
} tn__cache_result;

/* What is wanted of a cache: a block of at least asked_bytes, aligned to TN__BLOCK_ALIGN. */
typedef struct tn__cache_want {
    size_t asked_bytes;
    tn_stream stream;
    int is_owned;
    const char *owner;
    const char *site;
} tn__cache_want;

/* Takes a block out of this thread's cache. On TN__CACHE_IN_DEBT: tn__cache_settle comes next. */
tn__cache_result tn__cache_take(tn__cache *cache, const tn__cache_want *want, void **out);

/* The same by the owner that holds the mutex, and settles at once. 0 on a miss. */
int tn__cache_take_locked(tn__cache *cache, const tn__cache_want *want, void **out);

/* Frees a block into this thread's cache or hands it over to the one that it came from. On
 * TN__CACHE_MISS, *held is the block if it is one: its tag says HELD, and the caller goes on with
 * it; and NULL if no block in a caller's hands was seen there, or looked for. */
tn__cache_result tn__cache_give(tn__cache *cache, void *block, tn_stream stream, tn__piece **held);

/* Puts a block that is HELD into its lane by the owner that holds the mutex; 0 if it can not. */
int tn__cache_give_locked(tn__cache *cache, tn__piece *block, tn_stream stream);

/* The blocks that were handed over, into their bins; by who has the cache to itself. */
void tn__cache_collect(tn__cache *cache);

/* ---- thread_cache_books.c: those who need all caches --------------------------------------- */

/* With the pool's mutex held: has all caches to itself, and makes up the books: heap.live_bytes,
 * the peak, heap.owned_bytes, pool->allocs and pool->frees are exact, no block is HANDED, and those
 * that are CACHED are free memory. May be nested. */
void tn__caches_stop(tn_pool *pool);
void tn__caches_go(tn_pool *pool);

/* Gives all blocks of a lane to the heap; 1 if there were any. Under the mutex, by who has its
 * cache to itself. */
int tn__cache_drain_lane(tn__cache_lane *lane);

/* Gives the one block above TN__CACHE_LARGE_BYTES that the lane may have back to the heap. By its
 * owner, or who has the caches stopped; under the mutex. */
void tn__cache_drop_large(tn__cache_lane *lane);

/* Gives all blocks in caches to the heap; 1 if there were any. Under the mutex. */
int tn__caches_drain(tn_pool *pool);

/* heap.live_bytes has grown: raises the peak if it has to be. Under the mutex. */
void tn__caches_note_live(tn_pool *pool);

/* Spends more than the credit: first that of what was handed over; what it does not cover is owed
 * then (TN__CACHE_IN_DEBT). By who has the cache to itself. */
tn__cache_result tn__cache_borrow(tn__cache *cache, size_t bytes);

/* Nothing is owed any more, and there is credit if the peak leaves some. Under the mutex, by the
 * cache's owner. */
void tn__cache_settle(tn__cache *cache);

/* Takes all credits back: the pool's peak can be set anew. The caches are stopped. */
void tn__caches_withdraw(tn_pool *pool);

#endif
