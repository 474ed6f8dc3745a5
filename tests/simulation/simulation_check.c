/* What must hold after every step of a simulation. See simulation.h. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "simulation.h"

void world_fail(const world *w, const char *format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    w->counts->failed_step = w->step;
    fprintf(stderr, "seed %llu, step %llu, %s: %s", (unsigned long long)w->seed,
            (unsigned long long)w->step, w->doing, text);
    fprintf(stderr, "\nreplay: pool_simulation --seed %llu --steps %llu\n",
            (unsigned long long)w->seed, (unsigned long long)w->step + 1);
    fflush(NULL);
    _Exit(1);
}

void world_say(const world *w, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("%llu thread %d: %s\n", (unsigned long long)w->step, w->thread, text);
}

void world_expect_ok(const world *w, tn_status status, const char *what) {
    if (status == TN_OK) return;
    world_fail(w, "%s: %s: %s", what, tn_status_name(status), tn_error_last());
}

void world_check_races(const world *w) {
    if (world_sim()->race_count() == 0) return;
    world_fail(w, "%s", world_sim()->race_text(0));
}

/* ---- statistics ------------------------------------------------------------------------------ */

static void expect_count(const world *w, const char *name, uint64_t is, uint64_t must) {
    WORLD_EXPECT(w, is == must, "%s is %llu, and %llu by the oracle", name, (unsigned long long)is,
                 (unsigned long long)must);
}

void world_check_pool(world *w, int slot, tn_pool_stats *out) {
    const world_pool *pool = &w->pools[slot];
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    world_expect_ok(w, tn_pool_stats_get(pool->pool, &stats), "tn_pool_stats_get");
    expect_count(w, "live_bytes", stats.live_bytes, pool->live_bytes);
    expect_count(w, "live_blocks", stats.live_blocks, pool->live_blocks);
    expect_count(w, "allocs", stats.allocs, pool->allocs);
    expect_count(w, "frees", stats.frees, pool->frees);
    expect_count(w, "out_of_memory", stats.out_of_memory, pool->out_of_memory);
    expect_count(w, "the sum of the books",
                 stats.live_bytes + stats.cached_bytes + stats.pending_bytes + stats.partial_bytes +
                     stats.driver_held_bytes,
                 stats.reserved_bytes + stats.paused_bytes);
    WORLD_EXPECT(w, stats.peak_live_bytes >= stats.live_bytes, "the peak is below what is live");
    WORLD_EXPECT(w, stats.peak_reserved_bytes >= stats.reserved_bytes,
                 "the peak is below what is reserved");
    WORLD_EXPECT(w, !pool->limit_bytes || stats.reserved_bytes <= pool->limit_bytes,
                 "%zu bytes are reserved beyond the limit of %zu", stats.reserved_bytes,
                 pool->limit_bytes);
    *out = stats;
}

/* ---- the walk -------------------------------------------------------------------------------- */

typedef struct device_sum {
    size_t reserved;
    int is_unsure;
} device_sum;

/* What a driver's pool has reserved is asked after each call. If that question fails, the answer
 * before it stands till the next. */
static void walk_pool(world *w, int slot, device_sum *sums) {
    const world_pool *pool = &w->pools[slot];
    device_sum *sum = &sums[pool->device];
    tn_pool_stats stats;
    world_check_pool(w, slot, &stats);
    world_expect_ok(w, tn_pool_check(pool->pool), "tn_pool_check");
    if (!pool->is_host_memory) sum->reserved += stats.reserved_bytes;
    if (pool->backing == TN_BACKING_ASYNC && w->has_lost_count) sum->is_unsure = 1;
}

static void walk_blocks(world *w) {
    for (size_t i = 0; i < w->oracle.count; i++) {
        const oracle_block *block = &w->oracle.blocks[i];
        tn_pool *pool = NULL;
        size_t bytes = 0;
        world_expect_ok(w, tn_block_info((void *)block->address, &bytes, &pool), "tn_block_info");
        WORLD_EXPECT(w, bytes == block->bytes && pool == w->pools[block->pool].pool,
                     "tn_block_info tells of another block");
    }
}

void world_walk(world *w) {
    device_sum sums[WORLD_DEVICES] = {{0, 0}};
    tn_pool_stats graphs = TN_POOL_STATS_INIT;
    world_expect_ok(w, tn_pool_stats_get(w->graphs.pool, &graphs), "tn_pool_stats_get");
    sums[0].reserved = graphs.reserved_bytes;
    for (int slot = 0; slot < WORLD_POOLS; slot++) {
        if (w->pools[slot].pool) walk_pool(w, slot, sums);
    }
    for (int d = 0; d < w->device_count; d++) {
        if (sums[d].is_unsure) continue;
        expect_count(w, "what the pools reserve", sums[d].reserved, world_sim()->physical_bytes(d));
    }
    walk_blocks(w);
    world_check_races(w);
    w->counts->walks++;
}
