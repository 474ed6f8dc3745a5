/* The map of a pool as JSON: every region, what memory is behind it, and every piece.
 *
 * The text is made under the pool's mutex, so it shows one moment, and is measured first: the pool
 * is not changed by the memory that the text takes. The file is written with no lock held, under
 * another name until it is complete, so that a reader never sees half of one and a failure leaves
 * an older file as it was.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "event_ring.h"
#include "host_alloc.h"

/* ---- pieces ---------------------------------------------------------------------------------- */

static void write_uses(tn__text *out, tn__piece *piece) {
    const tn__use *uses = tn__uses_items(&piece->uses);
    tn__text_add(out, ", \"uses\": [");
    for (uint32_t i = 0; i < piece->uses.count; i++) {
        tn__text_add(out,
                     "%s{\"stream\": %" PRIu64 ", \"epoch\": %" PRIu64 ", \"is_complete\": %s}",
                     i ? ", " : "", uses[i].stream->number, uses[i].epoch,
                     uses[i].epoch <= uses[i].stream->complete ? "true" : "false");
    }
    tn__text_add(out, "]");
}

static void write_stream_number(tn__text *out, const tn__pool_stream *stream) {
    if (stream) {
        tn__text_add(out, ", \"stream\": %" PRIu64, stream->number);
    } else {
        tn__text_add(out, ", \"stream\": null");
    }
}

static void write_live(tn__text *out, const tn_pool *pool, tn__piece *piece) {
    tn__text_add(out, ", \"asked_bytes\": %zu, \"owner\": ", piece->asked_bytes);
    tn__text_add_json(out, piece->owner);
    tn__text_add(out, ", \"site\": ");
    tn__text_add_json(out, piece->site);
    tn__text_add(out, ", \"is_owned\": %s, \"age_operations\": %" PRIu64,
                 piece->is_owned ? "true" : "false", pool->heap.operation - piece->age);
    write_stream_number(out, piece->stream);
    write_uses(out, piece);
}

static void write_free(tn__text *out, const tn_pool *pool, tn__piece *piece) {
    tn__text_add(out, ", \"is_pending\": %s, \"age_operations\": %" PRIu64,
                 tn__piece_is_pending(piece) ? "true" : "false", pool->heap.operation - piece->age);
    write_stream_number(out, piece->stream);
    write_uses(out, piece);
}

static void write_piece(tn__text *out, const tn_pool *pool, tn__piece *piece) {
    static const char *const kinds[] = {"live", "free", "void", "imported"};
    tn__text_add(out, "{\"kind\": \"%s\", \"offset\": %zu, \"bytes\": %zu",
                 tn__piece_is_cached(piece) ? "cached" : kinds[piece->kind],
                 (size_t)(piece->address - piece->region->map.begin), piece->bytes);
    if (tn__piece_is_callers(piece)) write_live(out, pool, piece);
    if (piece->kind == TN__PIECE_FREE || tn__piece_is_cached(piece)) write_free(out, pool, piece);
    if (piece->kind == TN__PIECE_VOID || piece->kind == TN__PIECE_GUEST) write_uses(out, piece);
    tn__text_add(out, "}");
}

/* ---- regions --------------------------------------------------------------------------------- */

/* [first page, number of pages] of each stretch with memory behind it. */
static void write_mapped(tn__text *out, const tn__region *region) {
    size_t page = 0;
    int is_first = 1;
    while (page < region->page_count) {
        size_t begin = tn__bits_find(region->mapped, page, region->page_count, 1);
        page = tn__bits_find(region->mapped, begin, region->page_count, 0);
        if (begin == page) continue;
        tn__text_add(out, "%s[%zu, %zu]", is_first ? "" : ", ", begin, page - begin);
        is_first = 0;
    }
}

static const char *zone_name(const tn_pool *pool, const tn__region *region) {
    if (region->guest) return "imported";
    return tn__zone_name((tn__zone_kind)(region->zone - pool->heap.zones));
}

static void write_region(tn__text *out, const tn_pool *pool, const tn__region *region) {
    int is_first = 1;
    tn__text_add(out,
                 "{\"address\": \"%#zx\", \"bytes\": %zu, \"page_bytes\": %zu, \"zone\": \"%s\",\n"
                 "      \"mapped_pages\": [",
                 (size_t)region->map.begin, (size_t)(region->map.end - region->map.begin),
                 region->page_bytes, zone_name(pool, region));
    write_mapped(out, region);
    tn__text_add(out, "],\n      \"pieces\": [");
    for (tn__piece *piece = region->first; piece; piece = piece->next) {
        tn__text_next_item(out, &is_first, "        ");
        write_piece(out, pool, piece);
    }
    tn__text_add(out, "]}");
}

/* ---- events ---------------------------------------------------------------------------------- */

static void write_event(tn__text *out, const tn_event *event) {
    tn__text_add(out,
                 "{\"number\": %" PRIu64 ", \"time_us\": %.0f, \"kind\": \"%s\", \"thread\": %d, "
                 "\"address\": \"%#zx\", \"bytes\": %zu, \"stream_id\": %" PRIu64 ", \"owner\": ",
                 event->number, event->time_us, tn_event_kind_name(event->kind), event->thread,
                 (size_t)event->address, event->bytes, event->stream_id);
    tn__text_add_json(out, event->owner);
    tn__text_add(out, ", \"frames\": [");
    for (uint32_t i = 0; i < event->frame_count; i++)
        tn__text_add(out, "%s\"%#zx\"", i ? ", " : "", (size_t)event->frames[i]);
    tn__text_add(out, "]}");
}

static void write_events(tn__text *out, const tn_pool *pool) {
    tn_event event;
    int is_first = 1;
    for (size_t i = 0; tn__event_ring_peek(pool, i, &event); i++) {
        tn__text_next_item(out, &is_first, "    ");
        write_event(out, &event);
    }
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void write_snapshot(tn__text *out, tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    int is_first = 1;
    tn__pool_fill_stats(pool, &stats);
    tn__pool_write_json_head(out, pool, "tenure pool snapshot 1");
    tn__text_add(out, ",\n  \"operations\": %" PRIu64 ",\n  \"statistics\": {",
                 pool->heap.operation);
    tn__stats_write_json(out, &stats, "    ");
    tn__text_add(out, "\n  },\n  \"regions\": [");
    for (const tn__region *region = pool->heap.regions; region; region = region->next) {
        tn__text_next_item(out, &is_first, "    ");
        write_region(out, pool, region);
    }
    tn__text_add(out, "],\n  \"streams\": [");
    tn__streams_write_json(out, pool, "    ");
    tn__text_add(out, "],\n  \"events\": [");
    write_events(out, pool);
    tn__text_add(out, "]\n}\n");
}

static tn_status make_text(tn_pool *pool, tn__text *out) {
    tn__text measured = tn__text_begin(NULL, 0);
    char *text;
    write_snapshot(&measured, pool);
    text = tn__host_alloc(measured.used + 1, 1);
    if (!text) return TN_OUT_OF_HOST_MEMORY;
    *out = tn__text_begin(text, measured.used + 1);
    write_snapshot(out, pool);
    TN_ASSERT(out->used == measured.used);
    return TN_OK;
}

static tn_status write_file(const char *part, const char *path, const tn__text *text) {
    FILE *file = fopen(part, "we");
    int error = file ? 0 : errno;
    if (file && fwrite(text->text, 1, text->used, file) != text->used) error = errno;
    if (file && fclose(file) != 0 && !error) error = errno;
    if (!error && rename(part, path) != 0) error = errno;
    if (!error) return TN_OK;
    if (file) (void)remove(part);
    return TN_FAIL(TN_IO, "the snapshot %s can not be written: %s", path, strerror(error));
}

tn_status tn_pool_snapshot_write(tn_pool *pool, const char *path) {
    tn__text text = {0};
    size_t part_bytes;
    char *part;
    tn_status status;
    TN_REQUIRE(pool, "tn_pool_snapshot_write: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_snapshot_write"));
    TN_REQUIRE(path && path[0], "tn_pool_snapshot_write: the path is empty");
    part_bytes = strlen(path) + sizeof ".part";
    part = tn__host_alloc(part_bytes, 1);
    if (!part) return TN_OUT_OF_HOST_MEMORY;
    snprintf(part, part_bytes, "%s.part", path);
    tn__pool_lock_whole(pool);
    status = make_text(pool, &text);
    tn__pool_unlock_whole(pool);
    if (status == TN_OK) status = write_file(part, path, &text);
    tn__host_free(text.text);
    tn__host_free(part);
    return status;
}
