/* What a pool says of itself: statistics, the check, and the reports of failures in words. */
#include <stdio.h>
#include <string.h>

#include "pool_internal.h"

/* ---- statistics ------------------------------------------------------------------------------ */

void tn__pool_note_peaks(tn_pool *pool) {
    size_t reserved = tn__pool_reserved_bytes(pool);
    if (pool->heap.live_bytes > pool->peak_live_bytes) {
        pool->peak_live_bytes = pool->heap.live_bytes;
    }
    if (reserved > pool->peak_reserved_bytes) pool->peak_reserved_bytes = reserved;
}

void tn__pool_fill_stats(tn_pool *pool, tn_pool_stats *out) {
    tn__heap_sums sums;
    tn__heap_sum(&pool->heap, &sums);
    out->live_bytes = pool->heap.live_bytes;
    out->cached_bytes = sums.cached_bytes;
    out->pending_bytes = sums.pending_bytes;
    out->partial_bytes = sums.partial_bytes;
    out->driver_held_bytes = tn__pool_held_bytes(pool);
    out->reserved_bytes = tn__pool_reserved_bytes(pool);
    out->address_bytes = pool->heap.address_bytes;
    out->owned_bytes = pool->heap.owned_bytes;
    out->peak_live_bytes = pool->peak_live_bytes;
    out->peak_reserved_bytes = pool->peak_reserved_bytes;
    out->live_blocks = pool->heap.block_count;
    out->allocs = pool->allocs;
    out->frees = pool->frees;
    out->stream_waits = pool->order.wait_count;
    out->out_of_memory = pool->out_of_memory;
}

tn_status tn_pool_stats_get(tn_pool *pool, tn_pool_stats *out) {
    TN_REQUIRE(pool, "tn_pool_stats_get: pool is NULL");
    TN_REQUIRE(out && out->size == sizeof *out, "tn_pool_stats_get: begin with TN_POOL_STATS_INIT");
    pthread_mutex_lock(&pool->mutex);
    tn__pool_fill_stats(pool, out);
    pthread_mutex_unlock(&pool->mutex);
    return TN_OK;
}

tn_status tn_pool_stats_reset_peaks(tn_pool *pool) {
    TN_REQUIRE(pool, "tn_pool_stats_reset_peaks: pool is NULL");
    pthread_mutex_lock(&pool->mutex);
    pool->peak_live_bytes = pool->heap.live_bytes;
    pool->peak_reserved_bytes = tn__pool_reserved_bytes(pool);
    pthread_mutex_unlock(&pool->mutex);
    return TN_OK;
}

static tn_status check_books(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn__pool_fill_stats(pool, &stats);
    if (stats.live_bytes + stats.cached_bytes + stats.pending_bytes + stats.partial_bytes +
            stats.driver_held_bytes !=
        stats.reserved_bytes) {
        return TN_FAIL(TN_INVALID_STATE, "pool check: the books of %s do not balance", pool->name);
    }
    if (stats.reserved_bytes > pool->limit_bytes) {
        return TN_FAIL(TN_INVALID_STATE, "pool check: %s holds %zu bytes, above its limit",
                       pool->name, stats.reserved_bytes);
    }
    if (stats.allocs - stats.frees != stats.live_blocks ||
        stats.live_bytes > stats.peak_live_bytes) {
        return TN_FAIL(TN_INVALID_STATE, "pool check: the counts of %s do not add up", pool->name);
    }
    return TN_OK;
}

tn_status tn_pool_check(tn_pool *pool) {
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_check: pool is NULL");
    pthread_mutex_lock(&pool->mutex);
    status = tn__heap_check(&pool->heap);
    if (status == TN_OK) status = check_books(pool);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- owners ---------------------------------------------------------------------------------- */

#define OWNERS_MAX   128 /* told apart; blocks of further ones are added up as "others" */
#define OWNERS_SHOWN 5

typedef struct owner_sum {
    const char *owner;
    const char *site;
    size_t bytes;
    size_t blocks;
} owner_sum;

static int is_same_text(const char *a, const char *b) {
    if (a == b) return 1;
    return a && b && strcmp(a, b) == 0;
}

static size_t sum_owners(tn_pool *pool, owner_sum *sums) {
    size_t count = 0;
    tn__piece *block = tn__heap_next_block(&pool->heap, NULL);
    for (; block; block = tn__heap_next_block(&pool->heap, block)) {
        size_t i = 0;
        while (i < count && !(is_same_text(sums[i].owner, block->owner) &&
                              is_same_text(sums[i].site, block->site))) {
            i++;
        }
        if (i == OWNERS_MAX) i = OWNERS_MAX - 1;
        if (i == count) {
            sums[count++] = (owner_sum){block->owner, block->site, 0, 0};
            if (count == OWNERS_MAX) sums[i] = (owner_sum){"others", NULL, 0, 0};
        }
        sums[i].bytes += block->asked_bytes;
        sums[i].blocks++;
    }
    return count;
}

void tn__pool_describe_owners(tn_pool *pool, char *text, size_t text_bytes) {
    owner_sum sums[OWNERS_MAX];
    size_t count = sum_owners(pool, sums);
    size_t used = 0;
    text[0] = 0;
    for (size_t shown = 0; shown < OWNERS_SHOWN && shown < count && used < text_bytes; shown++) {
        size_t largest = shown;
        owner_sum sum;
        for (size_t i = shown + 1; i < count; i++) {
            if (sums[i].bytes > sums[largest].bytes) largest = i;
        }
        sum = sums[largest];
        sums[largest] = sums[shown];
        used += (size_t)snprintf(
            text + used, text_bytes - used, "%s%s%s%s%s: %zu bytes in %zu %s", shown ? ", " : "",
            sum.owner ? sum.owner : "unnamed", sum.site ? " (" : "", sum.site ? sum.site : "",
            sum.site ? ")" : "", sum.bytes, sum.blocks, sum.blocks == 1 ? "block" : "blocks");
    }
}

/* ---- out of memory --------------------------------------------------------------------------- */

typedef struct shortage {
    size_t asked_bytes;
    size_t device_free;
    size_t device_total;
    size_t largest_run;
    tn_pool_stats stats;
} shortage;

/* One hint that is true of this failure. */
static const char *hint_for(const tn_pool *pool, const shortage *facts) {
    const tn_pool_stats *stats = &facts->stats;
    size_t idle = stats->cached_bytes + stats->pending_bytes + stats->driver_held_bytes;
    if (facts->asked_bytes > facts->device_total) {
        return "the request is larger than the device's memory";
    }
    if (facts->asked_bytes > pool->limit_bytes)
        return "the request is larger than the pool's limit";
    if (tn__pool_headroom(pool) + idle < facts->asked_bytes) {
        return "free some of the largest owners, or raise the pool's limit";
    }
    if (stats->pending_bytes > 0 && idle >= facts->asked_bytes) {
        return "work that does not end still uses freed memory: look at its streams";
    }
    if (idle + facts->device_free >= facts->asked_bytes) {
        return pool->backing->scattered_hint;
    }
    if (facts->device_total - facts->device_free > stats->reserved_bytes) {
        return "other pools or programs hold the rest of the device: free memory there, or some "
               "of the largest owners";
    }
    return "free some of the largest owners, or use a smaller batch";
}

tn_status tn__pool_report_shortage(tn_pool *pool, size_t asked_bytes) {
    shortage facts = {.asked_bytes = asked_bytes, .stats = TN_POOL_STATS_INIT};
    char owners[768];
    char limit[32] = "none";
    tn__pool_fill_stats(pool, &facts.stats);
    facts.largest_run = tn__heap_largest_run(&pool->heap);
    facts.device_total = pool->info.memory_bytes;
    (void)pool->driver->memory_info(pool->state, &facts.device_free, &facts.device_total);
    if (pool->limit_bytes != SIZE_MAX) snprintf(limit, sizeof limit, "%zu", pool->limit_bytes);
    tn__pool_describe_owners(pool, owners, sizeof owners);
    return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                   "pool %s has no %zu bytes: live %zu, cached %zu, pending %zu, partly used %zu, "
                   "held %zu, reserved %zu, largest hole %zu; device: free %zu of %zu; limit %s; "
                   "largest owners: %s; hint: %s",
                   pool->name, asked_bytes, facts.stats.live_bytes, facts.stats.cached_bytes,
                   facts.stats.pending_bytes, facts.stats.partial_bytes,
                   facts.stats.driver_held_bytes, facts.stats.reserved_bytes, facts.largest_run,
                   facts.device_free, facts.device_total, limit, owners[0] ? owners : "none",
                   hint_for(pool, &facts));
}
