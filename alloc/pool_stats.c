/* The statistics of a pool: see pool_report.h. Their names, units and meaning are one table, in
 * tenure_alloc.h; a new statistic is a row there and a line in tn__pool_fill_stats.
 *
 * Invariant: the PARTs add up to the WHOLE, and in a paused pool to what it has given up besides.
 * It is asserted whenever statistics are filled and is part of tn_pool_check. Filling them walks
 * the free pieces: which of them are pending depends on what streams have done meanwhile.
 */
#include <inttypes.h>
#include <stdio.h>

#include "options.h"
#include "thread_cache.h"

typedef enum stat_unit { UNIT_BYTES, UNIT_COUNT } stat_unit;
typedef enum stat_role { ROLE_PART, ROLE_WHOLE, ROLE_LEVEL, ROLE_PEAK, ROLE_OTHER } stat_role;

typedef struct stat_row {
    const char *name;
    const char *meaning;
    size_t offset;
    stat_unit unit;
    stat_role role;
} stat_row;

#define AS_ROW(unit, role, name, meaning)                                                          \
    {#name, meaning, offsetof(tn_pool_stats, name), UNIT_##unit, ROLE_##role},
static const stat_row rows[] = {TN_POOL_STATS_TABLE(AS_ROW)};
enum { ROW_COUNT = sizeof rows / sizeof rows[0] };

static uint64_t value_of(const tn_pool_stats *stats, const stat_row *row) {
    const char *field = (const char *)stats + row->offset;
    return row->unit == UNIT_BYTES ? *(const tn_stat_BYTES *)(const void *)field
                                   : *(const tn_stat_COUNT *)(const void *)field;
}

/* ---- filling --------------------------------------------------------------------------------- */

void tn__pool_note_peaks(tn_pool *pool) {
    size_t reserved = tn__pool_reserved_bytes(pool);
    if (reserved > pool->peak_reserved_bytes) pool->peak_reserved_bytes = reserved;
    tn__caches_note_live(pool);
}

size_t tn__stats_parts(const tn_pool_stats *stats) {
    uint64_t sum = 0;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        if (rows[i].role == ROLE_PART) sum += value_of(stats, &rows[i]);
    }
    return (size_t)sum - stats->paused_bytes;
}

void tn__pool_fill_stats(tn_pool *pool, tn_pool_stats *out) {
    tn__heap_sums sums;
    tn__caches_stop(pool);
    tn__heap_sum(&pool->heap, &sums);
    out->live_bytes = pool->heap.live_bytes;
    out->cached_bytes = sums.cached_bytes;
    out->pending_bytes = sums.pending_bytes;
    out->partial_bytes = sums.partial_bytes;
    out->driver_held_bytes = tn__pool_held_bytes(pool);
    out->reserved_bytes = tn__pool_reserved_bytes(pool);
    out->paused_bytes = pool->paused_bytes;
    out->address_bytes = pool->heap.address_bytes;
    out->pinned_bytes = pool->backing->is_pinned ? out->reserved_bytes : 0;
    out->owned_bytes = pool->heap.owned_bytes;
    out->imported_bytes = pool->heap.guest_bytes;
    out->peak_live_bytes = pool->peak_live_bytes;
    out->peak_reserved_bytes = pool->peak_reserved_bytes;
    out->live_blocks = pool->allocs - pool->frees;
    out->allocs = pool->allocs;
    out->frees = pool->frees;
    out->stream_waits = pool->order.wait_count;
    out->out_of_memory = pool->out_of_memory;
    tn__caches_go(pool);
    TN_ASSERT(tn__stats_parts(out) == out->reserved_bytes);
}

tn_status tn_pool_stats_get(tn_pool *pool, tn_pool_stats *out) {
    TN_REQUIRE(pool, "tn_pool_stats_get: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_stats_get"));
    TN_REQUIRE(out && out->size == sizeof *out, "tn_pool_stats_get: begin with TN_POOL_STATS_INIT");
    pthread_mutex_lock(&pool->mutex);
    tn__pool_fill_stats(pool, out);
    pthread_mutex_unlock(&pool->mutex);
    return TN_OK;
}

tn_status tn_pool_stats_reset_peaks(tn_pool *pool) {
    TN_REQUIRE(pool, "tn_pool_stats_reset_peaks: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_stats_reset_peaks"));
    tn__pool_lock_whole(pool);
    tn__caches_withdraw(pool);
    pool->peak_live_bytes = pool->heap.live_bytes;
    pool->peak_reserved_bytes = tn__pool_reserved_bytes(pool);
    tn__pool_unlock_whole(pool);
    return TN_OK;
}

/* ---- check ----------------------------------------------------------------------------------- */

static tn_status check_books(tn_pool *pool, size_t live_blocks) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn__pool_fill_stats(pool, &stats);
    if (tn__stats_parts(&stats) != stats.reserved_bytes) {
        return TN_FAIL(TN_INVALID_STATE, "pool check: the books of %s do not balance", pool->name);
    }
    if (stats.reserved_bytes > pool->limit_bytes) {
        return TN_FAIL(TN_INVALID_STATE, "pool check: %s holds %zu bytes, above its limit",
                       pool->name, stats.reserved_bytes);
    }
    if (stats.live_blocks != live_blocks || stats.live_bytes > stats.peak_live_bytes) {
        return TN_FAIL(TN_INVALID_STATE, "pool check: the counts of %s do not add up", pool->name);
    }
    return TN_OK;
}

tn_status tn_pool_check(tn_pool *pool) {
    size_t live_blocks = 0;
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_check: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_check"));
    tn__pool_lock_whole(pool);
    status = tn__heap_check(&pool->heap, &live_blocks);
    if (status == TN_OK) status = check_books(pool, live_blocks);
    tn__pool_unlock_whole(pool);
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

static void write_row(tn__text *out, const tn_pool_stats *stats, const stat_row *row) {
    uint64_t value = value_of(stats, row);
    char size[24] = "";
    if (row->unit == UNIT_BYTES) {
        tn__text words = tn__text_begin(size, sizeof size);
        tn__text_add_size(&words, value);
    }
    tn__text_add(out, "  %-20s%16" PRIu64 "  %10s  ", row->name, value, size);
}

void tn__stats_write_text(tn__text *out, const tn_pool_stats *stats) {
    for (size_t i = 0; i < ROW_COUNT; i++) {
        write_row(out, stats, &rows[i]);
        tn__text_add(out, "%s%s\n", rows[i].role == ROLE_PART ? "part: " : "", rows[i].meaning);
    }
}

static const char *verdict_on(const tn_pool_stats *stats, const stat_row *row) {
    if (row->role == ROLE_PEAK || row->role == ROLE_OTHER) return "";
    return value_of(stats, row) == 0 ? "ok" : "not all freed";
}

void tn__pool_print_end(tn_pool *pool, const char *when) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    char text[4096];
    tn__text out = tn__text_begin(text, sizeof text);
    if (!tn__options_get()->verbose) return;
    if (tn__driver_refuse_fork(when) != TN_OK) return; /* the parent tells of its pools */
    tn__pool_fill_stats(pool, &stats);
    for (size_t i = 0; i < ROW_COUNT; i++) {
        write_row(&out, &stats, &rows[i]);
        tn__text_add(&out, "%s\n", verdict_on(&stats, &rows[i]));
    }
    fprintf(stderr, "tenure pool %s at %s\n%s", pool->name, when, text);
}

void tn__stats_write_json(tn__text *out, const tn_pool_stats *stats, const char *indent) {
    int is_first = 1;
    for (size_t i = 0; i < ROW_COUNT; i++) {
        tn__text_next_item(out, &is_first, indent);
        tn__text_add(out, "\"%s\": %" PRIu64, rows[i].name, value_of(stats, &rows[i]));
    }
}
