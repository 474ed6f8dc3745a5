/* A snapshot or a report of a pool as a page: see report_pages.h, and docs/formats.md for what the
 * files have. Members that are not known are passed over; those that a page needs are looked for
 * first, so that a page is never begun and then given up.
 */
#include <stdlib.h>
#include <string.h>

#include "html_page.h"
#include "report_history.h"
#include "report_pages.h"
#include "text_table.h"

enum { MAP_WIDTH = 1000, MAP_HEIGHT = 36, OWNERS_MAX = 4096, EVENTS_SHOWN = 500 };

/* ---- members --------------------------------------------------------------------------------- */

static const cJSON *member(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* 0 where there is none: files may be older or newer than this program. */
static double number(const cJSON *object, const char *name) {
    const cJSON *item = member(object, name);
    return cJSON_IsNumber(item) ? item->valuedouble : 0.0;
}

static uint64_t to_count(double value) { return value > 0 && value < 1.8e19 ? (uint64_t)value : 0; }

static uint64_t whole(const cJSON *object, const char *name) {
    return to_count(number(object, name));
}

static const char *string(const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(member(object, name));
    return text ? text : "";
}

static int begins_with(const char *text, const char *words) {
    return strncmp(text, words, strlen(words)) == 0;
}

/* ---- statistics ------------------------------------------------------------------------------ */

static void write_statistics(FILE *stream, const cJSON *root) {
    const cJSON *statistics = member(root, "statistics");
    double most = number(statistics, "reserved_bytes");
    const cJSON *item;
    html_card_begin(stream, "Statistics");
    html_table_begin(stream, "lrrl", "name", "value", "", "of what is reserved");
    cJSON_ArrayForEach(item, statistics) {
        const char *name = item->string ? item->string : "";
        size_t length = strlen(name);
        int is_bytes = length > 6 && strcmp(name + length - 6, "_bytes") == 0;
        uint64_t value = whole(statistics, name);
        html_row(stream);
        html_cell(stream, "%s", name);
        html_number(stream, "%s", text_count(value).text);
        html_number(stream, "%s", is_bytes ? text_size(value).text : "");
        if (is_bytes && (double)value <= most) html_bar(stream, (double)value, most, "live");
    }
    html_table_end(stream);
    html_card_end(stream);
}

static void write_fragmentation(FILE *stream, const cJSON *root) {
    const cJSON *facts = member(root, "fragmentation");
    const cJSON *item;
    if (!cJSON_IsObject(facts)) return;
    html_card_begin(stream, "Fragmentation");
    html_paragraph(stream,
                   "Utilization %.4f, external fragmentation %.4f; %s free in %s holes, the "
                   "largest of %s.",
                   number(facts, "utilization"), number(facts, "external_fragmentation"),
                   text_size(whole(facts, "free_bytes")).text,
                   text_count(whole(facts, "holes")).text,
                   text_size(whole(facts, "largest_hole_bytes")).text);
    html_table_begin(stream, "rrrl", "holes from", "count", "bytes", "of what is free");
    cJSON_ArrayForEach(item, member(facts, "holes_by_size")) {
        html_row(stream);
        html_number(stream, "%s", text_size(whole(item, "least_bytes")).text);
        html_number(stream, "%s", text_count(whole(item, "holes")).text);
        html_number(stream, "%s", text_count(whole(item, "bytes")).text);
        html_bar(stream, number(item, "bytes"), number(facts, "free_bytes"), "free");
    }
    html_table_end(stream);
    html_card_end(stream);
}

/* ---- owners ---------------------------------------------------------------------------------- */

typedef struct owner_row {
    const char *owner;
    const char *site;
    double bytes;
    double blocks;
} owner_row;

typedef struct owner_table {
    size_t count;
    owner_row rows[OWNERS_MAX]; /* the last is for all that there is no room for */
} owner_table;

static void add_owner(owner_table *table, const cJSON *item, double bytes, double blocks) {
    const char *owner = string(item, "owner");
    const char *site = string(item, "site");
    size_t i = 0;
    while (i < table->count &&
           (strcmp(table->rows[i].owner, owner) != 0 || strcmp(table->rows[i].site, site) != 0))
        i++;
    if (i == OWNERS_MAX) i = OWNERS_MAX - 1;
    if (i == table->count) {
        table->rows[i] = (owner_row){owner, site, 0, 0};
        table->count++;
        if (table->count == OWNERS_MAX) table->rows[i].owner = "others";
    }
    table->rows[i].bytes += bytes;
    table->rows[i].blocks += blocks;
}

static int compare_owners(const void *a, const void *b) {
    double left = ((const owner_row *)a)->bytes;
    double right = ((const owner_row *)b)->bytes;
    return left < right ? 1 : left > right ? -1 : 0;
}

/* A report has the sums, a snapshot the blocks. */
static void gather_owners(owner_table *table, const cJSON *root) {
    const cJSON *item;
    const cJSON *piece;
    cJSON_ArrayForEach(item, member(root, "owners"))
        add_owner(table, item, number(item, "bytes"), number(item, "blocks"));
    cJSON_ArrayForEach(item, member(root, "regions")) {
        cJSON_ArrayForEach(piece, member(item, "pieces")) {
            if (strcmp(string(piece, "kind"), "live") == 0)
                add_owner(table, piece, number(piece, "asked_bytes"), 1);
        }
    }
    qsort(table->rows, table->count, sizeof table->rows[0], compare_owners);
}

static void write_owners(FILE *stream, const cJSON *root, owner_table *table) {
    double most = number(member(root, "statistics"), "live_bytes");
    gather_owners(table, root);
    html_card_begin(stream, "Owners of live blocks");
    html_table_begin(stream, "llrrl", "owner", "site", "blocks", "bytes", "of what is live");
    for (size_t i = 0; i < table->count; i++) {
        const owner_row *row = &table->rows[i];
        html_row(stream);
        html_cell(stream, "%s", row->owner[0] ? row->owner : "unnamed");
        html_cell(stream, "%s", row->site);
        html_number(stream, "%s", text_count(to_count(row->blocks)).text);
        html_number(stream, "%s", text_count(to_count(row->bytes)).text);
        html_bar(stream, row->bytes, most, "live");
    }
    html_table_end(stream);
    html_card_end(stream);
}

/* ---- the map --------------------------------------------------------------------------------- */

static const char *style_of(const cJSON *piece) {
    static const char *const kinds[] = {"live", "void", "imported"};
    const char *kind = string(piece, "kind");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strcmp(kind, kinds[i]) == 0) return kinds[i];
    }
    return cJSON_IsTrue(member(piece, "is_pending")) ? "pending" : "free";
}

/* Addresses without memory can be a thousand times as many as those with: they are drawn as if they
 * were a fiftieth of the rest, or what they are if that is less. */
static double drawn_bytes(const cJSON *piece, double mapped) {
    double bytes = (double)whole(piece, "bytes");
    double most = mapped > 0 ? mapped / 50 : bytes;
    return strcmp(string(piece, "kind"), "void") == 0 && bytes > most ? most : bytes;
}

static void write_piece(FILE *stream, const cJSON *piece, double from, double to) {
    /* Hundredths by integers: the page must not depend on the locale. */
    long x = (long)(from * 100);
    long width = (long)(to * 100) - x;
    fprintf(stream, "<rect class=\"%s\" x=\"%ld.%02ld\" width=\"%ld.%02ld\" height=\"%d\"><title>",
            style_of(piece), x / 100, x % 100, width / 100, width % 100, MAP_HEIGHT);
    html_text(stream, style_of(piece));
    fprintf(stream, ", %s bytes at +%s ", text_count(whole(piece, "bytes")).text,
            text_count(whole(piece, "offset")).text);
    html_text(stream, string(piece, "owner"));
    fputs("</title></rect>\n", stream);
}

static void write_region(FILE *stream, const cJSON *region) {
    double mapped = 0;
    double total = 0;
    double at = 0;
    const cJSON *pieces = member(region, "pieces");
    const cJSON *piece;
    cJSON_ArrayForEach(piece, pieces) {
        if (strcmp(string(piece, "kind"), "void") != 0) mapped += (double)whole(piece, "bytes");
    }
    cJSON_ArrayForEach(piece, pieces) total += drawn_bytes(piece, mapped);
    html_paragraph(stream, "%s: %s of addresses (%s), pages of %s, %s with memory, %d pieces",
                   string(region, "address"), text_size(whole(region, "bytes")).text,
                   string(region, "zone"), text_size(whole(region, "page_bytes")).text,
                   text_size(to_count(mapped)).text, cJSON_GetArraySize(pieces));
    fprintf(stream, "<svg viewBox=\"0 0 %d %d\" width=\"100%%\" role=\"img\">\n", MAP_WIDTH,
            MAP_HEIGHT);
    cJSON_ArrayForEach(piece, pieces) {
        double bytes = drawn_bytes(piece, mapped);
        if (total > 0)
            write_piece(stream, piece, at / total * MAP_WIDTH, (at + bytes) / total * MAP_WIDTH);
        at += bytes;
    }
    fputs("</svg>\n", stream);
}

static void write_map(FILE *stream, const cJSON *root) {
    static const char *const styles[] = {"live", "free", "pending", "void", "imported"};
    const cJSON *region;
    if (!cJSON_IsArray(member(root, "regions"))) return;
    html_card_begin(stream, "Map");
    fputs("<p>", stream);
    for (size_t i = 0; i < sizeof styles / sizeof styles[0]; i++)
        fprintf(stream, "<span class=\"key %s\"></span>%s &nbsp; ", styles[i], styles[i]);
    fputs("</p>\n", stream);
    cJSON_ArrayForEach(region, member(root, "regions")) write_region(stream, region);
    html_card_end(stream);
}

/* ---- the rest -------------------------------------------------------------------------------- */

static void write_shortage(FILE *stream, const cJSON *root) {
    const cJSON *shortage = member(root, "last_shortage");
    if (!cJSON_IsObject(shortage)) return;
    html_card_begin(stream, "Last shortage");
    html_paragraph(stream, "%s bytes were asked for; the largest hole had %s, the device %s free.",
                   text_count(whole(shortage, "asked_bytes")).text,
                   text_count(whole(shortage, "largest_hole_bytes")).text,
                   text_size(whole(shortage, "device_free_bytes")).text);
    html_paragraph(stream, "Hint: %s.", string(shortage, "hint"));
    html_card_end(stream);
}

static void write_events(FILE *stream, const cJSON *root) {
    const cJSON *events = member(root, "events");
    const cJSON *event;
    int count = cJSON_GetArraySize(events);
    int skipped = count > EVENTS_SHOWN ? count - EVENTS_SHOWN : 0;
    if (count == 0) return;
    html_card_begin(stream, "Last events");
    if (skipped) html_paragraph(stream, "The last %d of %d.", EVENTS_SHOWN, count);
    html_table_begin(stream, "rrlrlrrl", "number", "time (us)", "kind", "thread", "address",
                     "bytes", "stream id", "owner");
    cJSON_ArrayForEach(event, events) {
        if (skipped-- > 0) continue;
        html_row(stream);
        html_number(stream, "%s", text_count(whole(event, "number")).text);
        html_number(stream, "%s", text_count(whole(event, "time_us")).text);
        html_cell(stream, "%s", string(event, "kind"));
        html_number(stream, "%.0f", number(event, "thread"));
        html_cell(stream, "%s", string(event, "address"));
        html_number(stream, "%s", text_count(whole(event, "bytes")).text);
        html_number(stream, "%s", text_count(whole(event, "stream_id")).text);
        html_cell(stream, "%s", string(event, "owner"));
    }
    html_table_end(stream);
    html_card_end(stream);
}

static int write_page(FILE *stream, const char *name, const cJSON *root, memory_history *history) {
    owner_table *table = calloc(1, sizeof *table);
    char title[256];
    int is_written = 1;
    if (!table) return 0;
    snprintf(title, sizeof title, "Pool %.200s", string(root, "pool"));
    html_page_begin(stream, title);
    html_paragraph(stream, "%s: %s backing on %s (%s, ordinal %.0f)", name, string(root, "backing"),
                   string(root, "device"), string(root, "driver"), number(root, "ordinal"));
    write_shortage(stream, root);
    if (history) is_written = report_history_write(stream, history);
    write_statistics(stream, root);
    write_fragmentation(stream, root);
    write_map(stream, root);
    write_owners(stream, root, table);
    write_events(stream, root);
    html_page_end(stream);
    free(table);
    return is_written;
}

int report_pool_page(FILE *stream, const char *name, const cJSON *root, memory_history *history,
                     char *error) {
    const char *format = string(root, "format");
    if (!begins_with(format, "tenure pool snapshot ") &&
        !begins_with(format, "tenure pool report ")) {
        snprintf(error, REPORT_ERROR_BYTES,
                 "its format is \"%.100s\"; expected a snapshot or a report of a pool", format);
        return 0;
    }
    if (!cJSON_IsObject(member(root, "statistics"))) {
        snprintf(error, REPORT_ERROR_BYTES, "it has no statistics");
        return 0;
    }
    if (write_page(stream, name, root, history)) return 1;
    snprintf(error, REPORT_ERROR_BYTES, "out of host memory");
    return 0;
}
