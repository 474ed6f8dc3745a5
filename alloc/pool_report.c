/* tn_pool_report, and the report of a request that could not be served: see pool_report.h.
 *
 * One set of facts is gathered under the pool's mutex and then written either way, so text and JSON
 * can not tell different stories. Ratios are written by integer arithmetic: a program's locale must
 * not decide whether JSON is valid.
 */
#include <inttypes.h>

#include "pool_internal.h"

/* ---- fragmentation --------------------------------------------------------------------------- */

enum { HOLE_CLASSES = 64, FILL_CLASSES = 6 };

/* How free memory is cut up. A hole is a run: what one block could be cut from. */
typedef struct fragmentation {
    size_t free_bytes;
    size_t largest_bytes;
    size_t hole_count;
    size_t hole_counts[HOLE_CLASSES]; /* [i]: of 2^i to 2^(i+1) - 1 bytes */
    size_t hole_bytes[HOLE_CLASSES];
    size_t page_counts[FILL_CLASSES]; /* mapped pages by how much of them live blocks cover */
} fragmentation;

static const char *const fill_names[FILL_CLASSES] = {
    "empty", "to_25_percent", "to_50_percent", "to_75_percent", "below_full", "full"};

static void add_holes(tn__heap *heap, fragmentation *out) {
    for (int zone = 0; zone < TN__ZONE_ALL; zone++) {
        tn__tree_node *root = heap->zones[zone].runs;
        tn__tree_node *node = tn__tree_at_least(root, 0, 0);
        for (; node; node = tn__tree_next(root, node)) {
            const tn__piece *run = tn__piece_of(node);
            size_t bytes = tn__piece_end(run->run_other) - run->address;
            int class_index = 63 - __builtin_clzll(bytes);
            out->hole_count++;
            out->hole_counts[class_index]++;
            out->hole_bytes[class_index] += bytes;
            out->free_bytes += bytes;
            if (bytes > out->largest_bytes) out->largest_bytes = bytes;
        }
    }
}

static size_t fill_class(size_t covered, size_t page_bytes) {
    if (covered == 0) return 0;
    if (covered == page_bytes) return FILL_CLASSES - 1;
    return 1 + (covered - 1) / (page_bytes / 4);
}

/* The live bytes of [begin, end); *at moves on to the first piece that reaches beyond. */
static size_t covered_bytes(const tn__piece **at, uintptr_t begin, uintptr_t end) {
    size_t covered = 0;
    const tn__piece *piece = *at;
    while (piece && piece->address < end) {
        uintptr_t first = piece->address > begin ? piece->address : begin;
        uintptr_t last = tn__piece_end(piece) < end ? tn__piece_end(piece) : end;
        if (tn__piece_is_callers(piece) && last > first) covered += last - first;
        if (tn__piece_end(piece) > end) break;
        piece = piece->next;
    }
    *at = piece;
    return covered;
}

static void add_pages(const tn__region *region, fragmentation *out) {
    const tn__piece *at = region->first;
    for (size_t page = 0; page < region->page_count; page++) {
        uintptr_t begin = tn__page_address(region, page);
        size_t covered;
        if (!tn__page_bit(region->mapped, page)) continue;
        covered = covered_bytes(&at, begin, begin + region->page_bytes);
        out->page_counts[fill_class(covered, region->page_bytes)]++;
    }
}

static fragmentation measure_fragmentation(tn_pool *pool) {
    fragmentation out = {0};
    add_holes(&pool->heap, &out);
    for (const tn__region *region = pool->heap.regions; region; region = region->next)
        add_pages(region, &out);
    return out;
}

/* part / whole with six digits; 0 if there is no whole. */
static void add_ratio(tn__text *out, size_t part, size_t whole) {
    uint64_t millionths = whole ? (uint64_t)((double)part / (double)whole * 1e6 + 0.5) : 0;
    tn__text_add(out, "%" PRIu64 ".%06" PRIu64, millionths / 1000000, millionths % 1000000);
}

static void write_fragmentation_text(tn__text *out, const fragmentation *facts,
                                     const tn_pool_stats *stats) {
    tn__text_add(out, "fragmentation\n  utilization (live of reserved)          ");
    add_ratio(out, stats->live_bytes, stats->reserved_bytes);
    tn__text_add(out, "\n  external (1 - largest hole / free)      ");
    add_ratio(out, facts->free_bytes - facts->largest_bytes, facts->free_bytes);
    tn__text_add(out, "\n  %zu bytes free in %zu hole%s, the largest of %zu bytes\n",
                 facts->free_bytes, facts->hole_count, facts->hole_count == 1 ? "" : "s",
                 facts->largest_bytes);
    for (size_t i = 0; i < HOLE_CLASSES; i++) {
        if (facts->hole_counts[i] == 0) continue;
        tn__text_add(out, "  holes of at least ");
        tn__text_add_size(out, (uint64_t)1 << i);
        tn__text_add(out, ": %zu with %zu bytes\n", facts->hole_counts[i], facts->hole_bytes[i]);
    }
    tn__text_add(out, "  pages by fill:");
    for (size_t i = 0; i < FILL_CLASSES; i++)
        tn__text_add(out, "%s %s %zu", i ? "," : "", fill_names[i], facts->page_counts[i]);
    tn__text_add(out, "\n");
}

static void write_fragmentation_json(tn__text *out, const fragmentation *facts,
                                     const tn_pool_stats *stats) {
    int is_first = 1;
    tn__text_add(out, "\"fragmentation\": {\n    \"utilization\": ");
    add_ratio(out, stats->live_bytes, stats->reserved_bytes);
    tn__text_add(out, ",\n    \"external_fragmentation\": ");
    add_ratio(out, facts->free_bytes - facts->largest_bytes, facts->free_bytes);
    tn__text_add(out,
                 ",\n    \"free_bytes\": %zu,\n    \"holes\": %zu,\n"
                 "    \"largest_hole_bytes\": %zu,\n    \"holes_by_size\": [",
                 facts->free_bytes, facts->hole_count, facts->largest_bytes);
    for (size_t i = 0; i < HOLE_CLASSES; i++) {
        if (facts->hole_counts[i] == 0) continue;
        tn__text_next_item(out, &is_first, "      ");
        tn__text_add(out, "{\"least_bytes\": %" PRIu64 ", \"holes\": %zu, \"bytes\": %zu}",
                     (uint64_t)1 << i, facts->hole_counts[i], facts->hole_bytes[i]);
    }
    tn__text_add(out, "],\n    \"pages_by_fill\": {");
    for (size_t i = 0; i < FILL_CLASSES; i++)
        tn__text_add(out, "%s\"%s\": %zu", i ? ", " : "", fill_names[i], facts->page_counts[i]);
    tn__text_add(out, "}\n  }");
}

/* ---- streams --------------------------------------------------------------------------------- */

static const char *stream_kind(const tn__pool_stream *stream) {
    if (!stream->handle) return "default";
    if (stream->handle == TN__STREAM_PER_THREAD) return "per thread";
    return stream->is_foreign ? "foreign" : "own";
}

static void write_stream_text(tn__text *out, const tn__pool_stream *stream) {
    tn__text_add(out,
                 "  stream %" PRIu64 " (%s, handle %#zx, id %" PRIu64 "): %" PRIu64
                 " epochs, %" PRIu64 " complete, %u event%s%s\n",
                 stream->number, stream_kind(stream), (size_t)stream->handle, stream->id,
                 stream->epoch, stream->complete, stream->closed_count,
                 stream->closed_count == 1 ? "" : "s", stream->is_used ? ", in use" : "");
}

static void write_stream_json(tn__text *out, const tn__pool_stream *stream) {
    tn__text_add(out,
                 "{\"number\": %" PRIu64 ", \"kind\": \"%s\", \"handle\": %zu, \"id\": %" PRIu64
                 ", \"epoch\": %" PRIu64 ", \"complete_epoch\": %" PRIu64
                 ", \"events\": %u, \"is_used\": %s}",
                 stream->number, stream_kind(stream), (size_t)stream->handle, stream->id,
                 stream->epoch, stream->complete, stream->closed_count,
                 stream->is_used ? "true" : "false");
}

static void write_streams_text(tn__text *out, const tn_pool *pool) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        const tn__pool_stream *stream = pool->order.buckets[bucket];
        for (; stream; stream = stream->next)
            write_stream_text(out, stream);
    }
}

void tn__streams_write_json(tn__text *out, const tn_pool *pool, const char *indent) {
    int is_first = 1;
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        const tn__pool_stream *stream = pool->order.buckets[bucket];
        for (; stream; stream = stream->next) {
            tn__text_next_item(out, &is_first, indent);
            write_stream_json(out, stream);
        }
    }
}

/* ---- shortage -------------------------------------------------------------------------------- */

static size_t process_headroom(const tn__shortage *facts) {
    size_t limit = facts->process_limit_bytes;
    if (limit == SIZE_MAX) return SIZE_MAX;
    return limit > facts->process_reserved_bytes ? limit - facts->process_reserved_bytes : 0;
}

static const char *hint_for(const tn_pool *pool, const tn__shortage *facts) {
    const tn_pool_stats *stats = &facts->stats;
    size_t idle = stats->cached_bytes + stats->pending_bytes + stats->driver_held_bytes;
    if (facts->asked_bytes > facts->device_total_bytes) {
        return "the request is larger than the device's memory";
    }
    if (facts->asked_bytes > pool->limit_bytes)
        return "the request is larger than the pool's limit";
    if (tn__pool_headroom(pool) + idle < facts->asked_bytes) {
        return "free some of the largest owners, or raise the pool's limit";
    }
    if (process_headroom(facts) < SIZE_MAX && process_headroom(facts) + idle < facts->asked_bytes) {
        return "all pools together are at the process's limit: free memory of any, or raise it";
    }
    if (stats->pending_bytes > 0 && idle >= facts->asked_bytes) {
        return "work that does not end still uses freed memory: look at its streams";
    }
    if (idle + facts->device_free_bytes >= facts->asked_bytes) {
        return pool->backing->scattered_hint;
    }
    if (facts->device_total_bytes - facts->device_free_bytes > stats->reserved_bytes) {
        return "other pools or programs hold the rest of the device: free memory there, or some "
               "of the largest owners";
    }
    return "free some of the largest owners, or use a smaller batch";
}

static void write_limit(tn__text *out, size_t limit_bytes, const char *none) {
    if (limit_bytes == SIZE_MAX) {
        tn__text_add(out, "%s", none);
    } else {
        tn__text_add(out, "%zu", limit_bytes);
    }
}

/* Up to the owners: they are known only while it happens. */
static void write_shortage_text(tn__text *out, const tn_pool *pool, const tn__shortage *facts) {
    const tn_pool_stats *stats = &facts->stats;
    tn__text_add(out,
                 "pool %.200s has no %zu bytes: live %zu, cached %zu, pending %zu, partly used "
                 "%zu, held %zu, reserved %zu, largest hole %zu; device: free %zu of %zu; limit ",
                 pool->name, facts->asked_bytes, stats->live_bytes, stats->cached_bytes,
                 stats->pending_bytes, stats->partial_bytes, stats->driver_held_bytes,
                 stats->reserved_bytes, facts->largest_hole_bytes, facts->device_free_bytes,
                 facts->device_total_bytes);
    write_limit(out, pool->limit_bytes, "none");
    if (facts->process_limit_bytes == SIZE_MAX) return;
    tn__text_add(out, "; all pools: %zu of their limit %zu", facts->process_reserved_bytes,
                 facts->process_limit_bytes);
}

static void write_shortage_json(tn__text *out, const tn__shortage *facts) {
    if (facts->asked_bytes == 0) {
        tn__text_add(out, "null");
        return;
    }
    tn__text_add(out,
                 "{\n    \"asked_bytes\": %zu,\n    \"largest_hole_bytes\": %zu,\n"
                 "    \"device_free_bytes\": %zu,\n    \"device_total_bytes\": %zu,\n"
                 "    \"process_reserved_bytes\": %zu,\n    \"process_limit_bytes\": ",
                 facts->asked_bytes, facts->largest_hole_bytes, facts->device_free_bytes,
                 facts->device_total_bytes, facts->process_reserved_bytes);
    write_limit(out, facts->process_limit_bytes, "null");
    tn__text_add(out, ",\n    \"hint\": ");
    tn__text_add_json(out, facts->hint);
    tn__text_add(out, ",\n    \"statistics\": {");
    tn__stats_write_json(out, &facts->stats, "      ");
    tn__text_add(out, "\n    }\n  }");
}

tn_status tn__pool_report_shortage(tn_pool *pool, size_t asked_bytes) {
    const size_t most_bytes = 1500; /* of the text up to the hint */
    tn__shortage facts = {.asked_bytes = asked_bytes, .stats = TN_POOL_STATS_INIT};
    char text[TN__ERROR_TEXT_BYTES];
    tn__text out = tn__text_begin(text, sizeof text);
    tn__owners owners;
    tn__pool_fill_stats(pool, &facts.stats);
    facts.largest_hole_bytes = tn__heap_largest_run(&pool->heap);
    tn__pool_memory_info(pool, &facts.device_free_bytes, &facts.device_total_bytes);
    facts.process_limit_bytes = tn__process_limit(TN__GROWTH_HARD);
    facts.process_reserved_bytes = tn__process_claimed();
    facts.hint = hint_for(pool, &facts);
    pool->shortage = facts;
    tn__owners_gather(pool, &owners);
    write_shortage_text(&out, pool, &facts);
    tn__text_add(&out, "; largest owners: ");
    tn__owners_write_line(&out, &owners, TN__OWNERS_SHOWN, most_bytes, 0);
    tn__text_add(&out, "; hint: %s", facts.hint);
    return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY, "%s", text);
}

/* ---- the report ------------------------------------------------------------------------------ */

static void write_text(tn__text *out, tn_pool *pool, const tn_pool_stats *stats,
                       const fragmentation *fragments, const tn__owners *owners) {
    tn__text_add(out, "pool %s: %s backing on %s (%s, ordinal %d), pages of %zu bytes, limit ",
                 pool->name, pool->backing->name, pool->info.name, pool->driver->name,
                 pool->info.ordinal, pool->page_bytes);
    write_limit(out, pool->limit_bytes, "none");
    tn__text_add(out, "\nstatistics\n");
    tn__stats_write_text(out, stats);
    write_fragmentation_text(out, fragments, stats);
    tn__text_add(out, "owners of live blocks\n");
    tn__owners_write_text(out, owners);
    tn__text_add(out, "streams\n");
    write_streams_text(out, pool);
    if (pool->shortage.asked_bytes == 0) return;
    tn__text_add(out, "last shortage\n  ");
    write_shortage_text(out, pool, &pool->shortage);
    tn__text_add(out, "; hint: %s\n", pool->shortage.hint);
}

void tn__pool_write_json_head(tn__text *out, const tn_pool *pool, const char *format) {
    tn__text_add(out, "{\n  \"format\": \"%s\",\n  \"pool\": ", format);
    tn__text_add_json(out, pool->name);
    tn__text_add(out, ",\n  \"driver\": ");
    tn__text_add_json(out, pool->driver->name);
    tn__text_add(out, ",\n  \"device\": ");
    tn__text_add_json(out, pool->info.name);
    tn__text_add(out,
                 ",\n  \"simulated\": %s,\n  \"ordinal\": %d,\n  \"backing\": \"%s\",\n"
                 "  \"page_bytes\": %zu,\n  \"limit_bytes\": ",
                 pool->info.simulated ? "true" : "false", pool->info.ordinal, pool->backing->name,
                 pool->page_bytes);
    write_limit(out, pool->limit_bytes, "null");
}

static void write_json(tn__text *out, tn_pool *pool, const tn_pool_stats *stats,
                       const fragmentation *fragments, const tn__owners *owners) {
    tn__pool_write_json_head(out, pool, "tenure pool report 1");
    tn__text_add(out, ",\n  \"statistics\": {");
    tn__stats_write_json(out, stats, "    ");
    tn__text_add(out, "\n  },\n  ");
    write_fragmentation_json(out, fragments, stats);
    tn__text_add(out, ",\n  \"owners\": [");
    tn__owners_write_json(out, owners, "    ");
    tn__text_add(out, "],\n  \"streams\": [");
    tn__streams_write_json(out, pool, "    ");
    tn__text_add(out, "],\n  \"last_shortage\": ");
    write_shortage_json(out, &pool->shortage);
    tn__text_add(out, "\n}\n");
}

size_t tn_pool_report(tn_pool *pool, tn_report_format format, char *text, size_t text_bytes) {
    tn__text out = tn__text_begin(text, text_bytes);
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    fragmentation fragments;
    tn__owners owners;
    if (!pool || (format != TN_REPORT_TEXT && format != TN_REPORT_JSON)) return 0;
    if (tn__driver_refuse_fork("tn_pool_report") != TN_OK) return 0;
    tn__pool_lock_whole(pool);
    tn__pool_fill_stats(pool, &stats);
    fragments = measure_fragmentation(pool);
    tn__owners_gather(pool, &owners);
    if (format == TN_REPORT_TEXT) {
        write_text(&out, pool, &stats, &fragments, &owners);
    } else {
        write_json(&out, pool, &stats, &fragments, &owners);
    }
    tn__pool_unlock_whole(pool);
    return out.used;
}
