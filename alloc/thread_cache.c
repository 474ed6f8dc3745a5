/* The warm path: blocks out of this thread's cache and into it (see thread_cache.h).
 *
 * No lock and no driver call. Every change of a block's state from LIVE is a compare and exchange
 * on its tag, so of two threads that free a block at once one succeeds. The rest is plain memory
 * that one thread at a time may touch: who has the block, or who is in the cache.
 */
#include "thread_cache.h"

#include "canary.h"

/* ---- entering ------------------------------------------------------------------------------ */

static inline void leave(tn__cache *cache) {
    atomic_store_explicit(&cache->is_inside, 0, memory_order_release);
}

/* The order of the store before the load is what a stopping thread relies on. It either sees that
 * the owner is inside, or its membarrier came first, and then the owner sees that it is closed. */
static inline int enter(tn__cache *cache) {
    unsigned closed;
    if (cache->is_asymmetric) {
        atomic_store_explicit(&cache->is_inside, 1, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
        closed = atomic_load_explicit(&cache->closed, memory_order_acquire);
    } else {
        (void)atomic_exchange(&cache->is_inside, 1);
        closed = atomic_load(&cache->closed);
    }
    if (!closed) return 1;
    leave(cache);
    return 0;
}

/* ---- lanes and bins ------------------------------------------------------------------------ */

static inline tn__cache_bin *bin_at(tn__cache_lane *lane, size_t bytes, size_t probe) {
    size_t first = (size_t)(((uint64_t)bytes / TN__BLOCK_ALIGN) * 0x9E3779B97F4A7C15u >> 56);
    return &lane->bins[(first + probe) % TN__CACHE_BINS];
}

static inline tn__cache_bin *find_bin(tn__cache_lane *lane, size_t bytes) {
    for (size_t probe = 0; probe < TN__CACHE_BIN_PROBES; probe++) {
        tn__cache_bin *bin = bin_at(lane, bytes, probe);
        if (bin->bytes == bytes) return bin;
    }
    return NULL;
}

/* Many of the small ones, few of the large ones: a lane's bin keeps 64 blocks or 8 MiB, and one
 * block in any case. */
static uint32_t most_blocks(size_t bytes) {
    size_t most = TN__CACHE_LARGE_BYTES / bytes;
    if (most > 64) most = 64;
    return most < 1 ? 1 : (uint32_t)most;
}

/* A bin of another size that is empty changes its size. */
static tn__cache_bin *make_bin(tn__cache_lane *lane, size_t bytes) {
    for (size_t probe = 0; probe < TN__CACHE_BIN_PROBES; probe++) {
        tn__cache_bin *bin = bin_at(lane, bytes, probe);
        if (bin->first) continue;
        if (lane->large == bin) lane->large = NULL;
        *bin = (tn__cache_bin){.bytes = bytes, .most = most_blocks(bytes)};
        return bin;
    }
    return NULL;
}

/* What a large block leaves behind is a hole that others need: a lane keeps one, and another takes
 * its place by way of the heap (tn__cache_give_locked). */
static inline int is_put(tn__cache_lane *lane, tn__piece *block, uint32_t more) {
    int is_large = block->bytes > TN__CACHE_LARGE_BYTES;
    tn__cache_bin *bin;
    if (is_large && lane->large && lane->large->first) return 0;
    bin = find_bin(lane, block->bytes);
    if (!bin) bin = make_bin(lane, block->bytes);
    if (!bin || bin->count >= bin->most + more) return 0;
    if (is_large) lane->large = bin;
    block->cache_next = bin->first;
    bin->first = block;
    bin->count++;
    return 1;
}

static inline void set_state(tn__piece *block, tn__block_state state) {
    uint64_t tag = atomic_load_explicit(&block->tag, memory_order_relaxed);
    tag = (tag & ~TN__TAG_STATE_MASK) | (uint64_t)state;
    atomic_store_explicit(&block->tag, tag, memory_order_release);
}

/* ---- taking -------------------------------------------------------------------------------- */

static inline size_t round_block(size_t asked_bytes) {
    return (asked_bytes + TN__BLOCK_ALIGN - 1) & ~(TN__BLOCK_ALIGN - 1); /* 0 if it overflows */
}

/* A bin with a block of that size; blocks handed over are looked through if there is none yet. */
static inline tn__cache_bin *find_filled_bin(tn__cache *cache, tn_stream stream, size_t bytes) {
    tn__cache_lane *lane = *tn__cache_lane_slot(cache, stream);
    tn__cache_bin *bin = lane ? find_bin(lane, bytes) : NULL;
    if (bin && bin->first) return bin;
    if (!lane || !atomic_load_explicit(&cache->handed, memory_order_relaxed)) return NULL;
    tn__cache_collect(cache);
    bin = find_bin(lane, bytes);
    return bin && bin->first ? bin : NULL;
}

static inline tn__cache_result spend(tn__cache *cache, size_t bytes) {
    if (cache->credit < bytes) return tn__cache_borrow(cache, bytes);
    cache->credit -= bytes;
    return TN__CACHE_DONE;
}

static inline tn__cache_result pop(tn__cache *cache, tn__cache_bin *bin, const tn__cache_want *want,
                                   void **out) {
    tn__piece *block = bin->first;
    bin->first = block->cache_next;
    bin->count--;
    cache->allocs++;
    if (want->is_owned) cache->owned_bytes += want->asked_bytes;
    block->asked_bytes = want->asked_bytes;
    block->age = cache->clock + cache->allocs + cache->frees;
    block->is_owned = want->is_owned;
    block->owner = want->owner;
    block->site = want->site;
    set_state(block, TN__BLOCK_LIVE);
    *out = (void *)block->address;
    return spend(cache, want->asked_bytes);
}

tn__cache_result tn__cache_take(tn__cache *cache, const tn__cache_want *want, void **out) {
    tn__cache_result result = TN__CACHE_MISS;
    tn__cache_bin *bin;
    if (!enter(cache)) return TN__CACHE_CLOSED;
    bin = find_filled_bin(cache, want->stream, round_block(want->asked_bytes));
    if (bin) result = pop(cache, bin, want, out);
    leave(cache);
    return result;
}

int tn__cache_take_locked(tn__cache *cache, const tn__cache_want *want, void **out) {
    tn__cache_bin *bin = find_filled_bin(cache, want->stream, round_block(want->asked_bytes));
    if (!bin) return 0;
    if (pop(cache, bin, want, out) == TN__CACHE_IN_DEBT) tn__cache_settle(cache);
    return 1;
}

/* ---- giving -------------------------------------------------------------------------------- */

static inline void note_free(tn__cache *cache, tn__piece *block) {
    cache->frees++;
    block->age = cache->clock + cache->allocs + cache->frees;
    if (block->is_owned) cache->owned_bytes -= block->asked_bytes;
}

/* The block is HELD, and CACHED afterwards; the stream's epoch is read after that exchange. */
static inline int is_kept(tn__cache *cache, tn__cache_lane *lane, tn__piece *block) {
    if (!is_put(lane, block, 0)) return 0;
    block->freed_epoch = atomic_load_explicit(&lane->stream->epoch, memory_order_relaxed);
    cache->credit += block->asked_bytes;
    note_free(cache, block);
    set_state(block, TN__BLOCK_CACHED);
    return 1;
}

/* To the cache that it came from. Its owner gets the credit when it looks at the list. */
static int is_handed_over(tn__cache *cache, tn__cache_lane *lane, tn__piece *block) {
    tn__cache *home = lane->cache;
    tn__piece *first;
    unsigned count = atomic_load_explicit(&home->handed_count, memory_order_relaxed);
    if (count >= TN__CACHE_HANDED_MAX) return 0;
    block->freed_epoch = atomic_load_explicit(&lane->stream->epoch, memory_order_relaxed);
    note_free(cache, block);
    set_state(block, TN__BLOCK_HANDED);
    atomic_fetch_add_explicit(&home->handed_count, 1, memory_order_relaxed);
    first = atomic_load_explicit(&home->handed, memory_order_relaxed);
    do {
        block->cache_next = first;
    } while (!atomic_compare_exchange_weak_explicit(&home->handed, &first, block,
                                                    memory_order_release, memory_order_relaxed));
    return 1;
}

/* On another thread, the handle of a per-thread stream means another stream. */
static inline int is_given(tn__cache *cache, tn__piece *block, tn_stream stream) {
    tn__cache_lane *lane = block->lane;
    if (!lane || (lane->handle != stream && !TN__CANARY(TN__CANARY_CACHE))) return 0;
    if (lane->cache == cache) return is_kept(cache, lane, block);
    return stream != TN__STREAM_PER_THREAD && is_handed_over(cache, lane, block);
}

static inline tn__piece *hold_block(tn_pool *pool, uintptr_t address) {
    uint64_t live = tn__block_tag(address, TN__BLOCK_LIVE);
    tn__piece *block = tn__block_table_find(&pool->heap.blocks, address);
    if (!block) return NULL;
    return atomic_compare_exchange_strong_explicit(&block->tag, &live,
                                                   tn__block_tag(address, TN__BLOCK_HELD),
                                                   memory_order_acquire, memory_order_relaxed)
               ? block
               : NULL;
}

tn__cache_result tn__cache_give(tn__cache *cache, void *block, tn_stream stream, tn__piece **held) {
    tn__cache_result result = TN__CACHE_MISS;
    tn__piece *piece;
    *held = NULL;
    if (!enter(cache)) return TN__CACHE_CLOSED;
    piece = hold_block(cache->pool, (uintptr_t)block);
    if (piece && is_given(cache, piece, stream)) {
        result = TN__CACHE_DONE;
    } else {
        *held = piece;
    }
    leave(cache);
    return result;
}

int tn__cache_give_locked(tn__cache *cache, tn__piece *block, tn_stream stream) {
    tn__cache_lane *lane = block->lane;
    if (lane && lane->cache == cache && block->bytes > TN__CACHE_LARGE_BYTES) {
        tn__cache_drop_large(lane);
    }
    return is_given(cache, block, stream);
}

/* ---- what was handed over ------------------------------------------------------------------ */

/* There may be many at once: all that was handed over is kept, since the owner wants some. */
void tn__cache_collect(tn__cache *cache) {
    tn__piece *block = atomic_exchange_explicit(&cache->handed, NULL, memory_order_acquire);
    unsigned count = 0;
    while (block) {
        tn__piece *next = block->cache_next;
        cache->credit += block->asked_bytes;
        set_state(block, TN__BLOCK_CACHED);
        if (!is_put(block->lane, block, TN__CACHE_HANDED_MAX)) {
            block->cache_next = cache->overflow;
            cache->overflow = block;
        }
        block = next;
        count++;
    }
    atomic_fetch_sub_explicit(&cache->handed_count, count, memory_order_relaxed);
}
