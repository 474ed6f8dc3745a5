/* A history as parts of a page: see report_history.h. What needs no script is written as HTML; the
 * rest is drawn by report_script.js from what report_data.c writes. */
#include "report_history.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "history_owners.h"
#include "html_page.h"
#include "report_assets.h"
#include "report_data.h"
#include "text_table.h"

enum { OWNERS_SHOWN = 200, LEFT_SHOWN = 100, SHORTAGES_SHOWN = 100, SIZE_CLASSES = 64 };
enum { CHART_WIDTH = 1000, CHART_HEIGHT = 240 };

typedef struct page {
    FILE *stream;
    const memory_history *history;
    history_owners owners;
    report_curve curve;
} page;

/* ---- small parts ----------------------------------------------------------------------------- */

typedef struct moment_text {
    char text[96];
} moment_text;

/* "event 17, 3.250 ms", from a second on "event 17, 1.250 s" */
static moment_text moment(const memory_history *history, uint32_t event) {
    moment_text out;
    double us = history->events[event].time_us - history->events[0].time_us;
    uint64_t thousandths = (uint64_t)(us < 1e6 ? us : us / 1000.0);
    int used = snprintf(out.text, sizeof out.text, "event %s", text_count(event + 1).text);
    if (history->has_times)
        snprintf(out.text + used, sizeof out.text - (size_t)used, ", %" PRIu64 ".%03u %s",
                 thousandths / 1000, (unsigned)(thousandths % 1000), us < 1e6 ? "ms" : "s");
    return out;
}

static void write_tile(FILE *stream, const char *value, const char *label, int is_warning) {
    fprintf(stream, "<div class=\"tile%s\"><b>", is_warning ? " warn" : "");
    html_text(stream, value);
    fputs("</b><span>", stream);
    html_text(stream, label);
    fputs("</span></div>\n", stream);
}

static void write_tiles(page *self) {
    const memory_history *history = self->history;
    uint64_t alive = history_live_bytes(history);
    uint64_t reserved = history_reserved_bytes(history);
    fputs("<div class=\"tiles\">\n", self->stream);
    write_tile(self->stream, text_size(self->owners.peak_bytes).text, "live at the peak", 0);
    write_tile(self->stream, text_size(alive).text, "live at the end", 0);
    if (reserved) write_tile(self->stream, text_size(reserved).text, "reserved at the end", 0);
    write_tile(self->stream, text_count(history->block_count).text, "blocks", 0);
    write_tile(self->stream, text_count(history->event_count).text, "events", 0);
    if (history->has_shortages)
        write_tile(self->stream, text_count(history->shortage_count).text, "times out of memory",
                   history->shortage_count > 0);
    fputs("</div>\n", self->stream);
}

static void write_summary(page *self) {
    const memory_history *history = self->history;
    html_paragraph(
        self->stream, "Peak: %s bytes (%s) live after %s. Live at the end: %s bytes.%s",
        text_count(self->owners.peak_bytes).text, text_size(self->owners.peak_bytes).text,
        moment(history, self->owners.peak_event).text, text_count(history_live_bytes(history)).text,
        history->has_owners ? ""
                            : " The blocks have no owners: they are told apart by "
                              "size.");
    if (history->before_count)
        html_paragraph(self->stream, "%s block%s there before the recording began.",
                       text_count(history->before_count).text,
                       history->before_count == 1 ? " was" : "s were");
}

/* ---- the drawn parts ------------------------------------------------------------------------- */

/* For who has no script: the total alone. */
static void write_plain_curve(page *self) {
    const report_curve *curve = &self->curve;
    double across = curve->bucket_count > 1 ? (double)(curve->bucket_count - 1) : 1.0;
    double most = self->owners.peak_bytes ? (double)self->owners.peak_bytes : 1.0;
    fprintf(self->stream,
            "<noscript><svg viewBox=\"0 0 %d %d\" width=\"100%%\" role=\"img\"><polyline points=\"",
            CHART_WIDTH, CHART_HEIGHT + 10);
    for (uint32_t i = 0; i < curve->bucket_count; i++) {
        /* Tenths by integers: the page must not depend on the locale. */
        long x = (long)((double)i / across * CHART_WIDTH * 10.0);
        long y = (long)((1.0 - curve->most[i] / most) * CHART_HEIGHT * 10.0) + 50;
        fprintf(self->stream, "%ld.%ld,%ld.%ld ", x / 10, x % 10, y / 10, y % 10);
    }
    fputs("\"/></svg></noscript>\n", self->stream);
}

static void write_chart(page *self) {
    fputs("<div class=\"card\"><div class=\"bar-of-buttons\"><h2>Live bytes by owner</h2>\n"
          "<button id=\"zoom-in\" aria-label=\"zoom in\">+</button>\n"
          "<button id=\"zoom-out\" aria-label=\"zoom out\">&minus;</button>\n"
          "<button id=\"zoom-all\">all</button>\n"
          "<button id=\"to-peak\">peak</button>\n"
          "<button id=\"to-end\">end</button>\n",
          self->stream);
    if (self->history->has_times)
        fputs("<button id=\"by-time\" aria-pressed=\"true\">by time</button>\n", self->stream);
    fputs(
        "</div>\n<canvas id=\"chart\" tabindex=\"0\" role=\"img\" aria-label=\"live bytes by owner "
        "over time\"></canvas>\n<div class=\"legend\" id=\"legend\"></div>\n"
        "<p class=\"says\" id=\"chart-says\"></p>\n",
        self->stream);
    write_plain_curve(self);
    html_paragraph(self->stream,
                   "Turn the wheel or pinch to zoom, drag to move, click to choose a "
                   "moment.%s",
                   self->curve.reserved ? " The dashed line is what was reserved." : "");
    fputs("</div>\n", self->stream);
}

static void write_map(page *self) {
    fputs("<div class=\"card\"><div class=\"bar-of-buttons\"><h2>Addresses at the chosen "
          "moment</h2>\n",
          self->stream);
    if (self->history->has_addresses) {
        fputs("<button id=\"map-in\" aria-label=\"zoom in\">+</button>\n"
              "<button id=\"map-out\" aria-label=\"zoom out\">&minus;</button>\n"
              "<button id=\"map-all\">all</button></div>\n"
              "<canvas id=\"map\" role=\"img\" aria-label=\"map of addresses\"></canvas>\n"
              "<p class=\"says\" id=\"map-says\"></p></div>\n",
              self->stream);
        return;
    }
    fputs("</div>\n", self->stream);
    html_paragraph(self->stream, "This trace has no addresses. `tenure replay TRACE --trace FILE` "
                                 "makes one that has: where a pool of Tenure puts its blocks.");
    fputs("</div>\n", self->stream);
}

/* ---- tables ---------------------------------------------------------------------------------- */

typedef struct style_text {
    char text[16];
} style_text;

/* The colour of an owner's curve. */
static style_text track_style(uint32_t rank) {
    style_text out;
    snprintf(out.text, sizeof out.text, "s%u", rank < CURVE_TRACKS ? rank : CURVE_TRACKS);
    return out;
}

static void write_owner_name(page *self, uint32_t rank) {
    fprintf(self->stream, "<td><i class=\"swatch %s\"></i>", track_style(rank).text);
    html_text(self->stream, history_owner_name(self->history, self->owners.sums[rank].owner));
    fputc('\n', self->stream);
}

static void write_owners(page *self) {
    FILE *stream = self->stream;
    html_card_begin(stream, "Owners with most");
    fputs("<div class=\"owners\">\n", stream);
    html_table_begin(stream, "lrrrrrl", "owner", "most at once", "at the peak", "at the end",
                     "blocks", "bytes in all", "part of the peak");
    for (uint32_t i = 0; i < self->owners.count && i < OWNERS_SHOWN; i++) {
        const owner_sums *sums = &self->owners.sums[i];
        html_row(stream);
        write_owner_name(self, i);
        html_number(stream, "%s", text_size(sums->peak_bytes).text);
        html_number(stream, "%s", text_size(sums->bytes_at_peak).text);
        html_number(stream, "%s", text_size(sums->alive_bytes).text);
        html_number(stream, "%s", text_count(sums->blocks).text);
        html_number(stream, "%s", text_size(sums->bytes).text);
        html_bar(stream, (double)sums->bytes_at_peak, (double)self->owners.peak_bytes,
                 track_style(i).text);
    }
    html_table_end(stream);
    if (self->owners.count > OWNERS_SHOWN)
        html_paragraph(stream, "The first %d of %s owners.", OWNERS_SHOWN,
                       text_count(self->owners.count).text);
    fputs("</div>\n", stream);
    html_card_end(stream);
}

static int compare_alive(const void *a, const void *b) {
    const owner_sums *left = *(const owner_sums *const *)a;
    const owner_sums *right = *(const owner_sums *const *)b;
    if (left->grows != right->grows) return right->grows - left->grows;
    if (left->alive_bytes != right->alive_bytes)
        return left->alive_bytes > right->alive_bytes ? -1 : 1;
    return left->owner < right->owner ? -1 : 1;
}

static void write_left_row(page *self, const owner_sums *sums) {
    FILE *stream = self->stream;
    html_row(stream);
    write_owner_name(self, (uint32_t)(sums - self->owners.sums));
    html_number(stream, "%s", text_size(sums->alive_bytes).text);
    html_number(stream, "%s", text_count(sums->alive_blocks).text);
    if (sums->oldest < self->history->before_count) {
        html_cell(stream, "before the recording");
    } else {
        html_cell(stream, "%s", moment(self->history, sums->oldest).text);
    }
    fputs(sums->grows ? "<td><span class=\"grows\">grows</span>\n" : "<td>\n", stream);
}

/* Who grows is the first to be looked at, whatever it has. */
static int write_left(page *self) {
    const owner_sums **left = calloc((size_t)self->owners.count + 1, sizeof *left);
    FILE *stream = self->stream;
    uint32_t count = 0;
    if (!left) return 0;
    for (uint32_t i = 0; i < self->owners.count; i++) {
        if (self->owners.sums[i].alive_blocks) left[count++] = &self->owners.sums[i];
    }
    qsort(left, count, sizeof *left, compare_alive);
    html_card_begin(stream, "Left at the end");
    html_paragraph(stream,
                   "What nobody had freed when the recording ended. An owner grows if the least it "
                   "had is more in each quarter of the events than in the quarter before, "
                   "by a tenth of its most or more: that is what a leak looks like.");
    html_table_begin(stream, "lrrll", "owner", "bytes", "blocks", "the oldest is of", "");
    for (uint32_t i = 0; i < count && i < LEFT_SHOWN; i++)
        write_left_row(self, left[i]);
    html_table_end(stream);
    if (count == 0) html_paragraph(stream, "Nothing.");
    html_card_end(stream);
    free(left);
    return 1;
}

static void write_shortages(page *self) {
    const memory_history *history = self->history;
    FILE *stream = self->stream;
    if (history->shortage_count == 0) return;
    html_card_begin(stream, "Out of memory");
    html_table_begin(stream, "lrrrl", "when", "asked for", "live then", "free on the device",
                     "owner");
    for (uint32_t i = 0; i < history->shortage_count && i < SHORTAGES_SHOWN; i++) {
        const history_shortage *shortage = &history->shortages[i];
        uint64_t live = 0;
        for (uint32_t j = 0; j < history->block_count; j++) {
            const history_block *block = &history->blocks[j];
            if (block->begin < shortage->event && block->end > shortage->event)
                live += block->bytes;
        }
        html_row(stream);
        html_cell(stream, "%s", moment(history, shortage->event).text);
        html_number(stream, "%s", text_size(shortage->asked_bytes).text);
        html_number(stream, "%s", text_size(live).text);
        html_number(stream, "%s",
                    shortage->free_bytes ? text_size(shortage->free_bytes).text : "not known");
        html_cell(stream, "%s", history_owner_name(history, shortage->owner));
    }
    html_table_end(stream);
    html_card_end(stream);
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static void write_sizes(page *self) {
    uint64_t blocks[SIZE_CLASSES] = {0};
    uint64_t bytes[SIZE_CLASSES] = {0};
    uint64_t all = 0;
    FILE *stream = self->stream;
    for (uint32_t i = 0; i < self->history->block_count; i++) {
        uint64_t size = self->history->blocks[i].bytes;
        int class_of = size ? 63 - __builtin_clzll(size) : 0;
        blocks[class_of]++;
        bytes[class_of] += size;
        all += size;
    }
    fputs("<details class=\"card\"><summary>Sizes, by powers of two</summary><div "
          "class=\"scroll\">\n",
          stream);
    html_table_begin(stream, "rrrl", "size from", "blocks", "bytes in all", "part of all bytes");
    for (int i = 0; i < SIZE_CLASSES; i++) {
        if (blocks[i] == 0) continue;
        html_row(stream);
        html_number(stream, "%s", text_size(i ? (uint64_t)1 << i : 0).text);
        html_number(stream, "%s", text_count(blocks[i]).text);
        html_number(stream, "%s", text_size(bytes[i]).text);
        html_bar(stream, (double)bytes[i], (double)all, "live");
    }
    html_table_end(stream);
    fputs("</div></details>\n", stream);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int write_parts(page *self) {
    FILE *stream = self->stream;
    write_tiles(self);
    write_summary(self);
    write_chart(self);
    write_map(self);
    write_owners(self);
    if (!write_left(self)) return 0;
    write_shortages(self);
    write_sizes(self);
    fputs("<div id=\"tip\" role=\"status\"></div>\n<script type=\"application/json\" id=\"data\">",
          stream);
    if (!report_data_write(stream, self->history, &self->owners, &self->curve)) return 0;
    fprintf(stream, "</script>\n<script>\n%s</script>\n", report_script);
    return 1;
}

int report_history_write(FILE *stream, memory_history *history) {
    page self = {.stream = stream, .history = history};
    int is_written;
    if (history->event_count == 0) {
        html_paragraph(stream, "There are no events.");
        return 1;
    }
    if (!history_name_by_size(history) || !history_owners_gather(history, &self.owners)) return 0;
    is_written = report_curve_make(history, &self.owners, &self.curve) && write_parts(&self);
    report_curve_deinit(&self.curve);
    history_owners_deinit(&self.owners);
    return is_written;
}
