/* A trace as a page: how its live bytes go, and what sizes it asks for. See report_pages.h.
 *
 * The curve has at most CURVE_POINTS points: each is the most that was live in a stretch of events,
 * and when there are too many, every two become one. So the peak is exact whatever the length.
 */
#include <stdlib.h>
#include <string.h>

#include "html_page.h"
#include "report_pages.h"
#include "text_table.h"
#include "trace_reader.h"

enum { CURVE_POINTS = 2048, SIZE_CLASSES = 64, CHART_WIDTH = 1000, CHART_HEIGHT = 240 };

typedef struct size_class {
    uint64_t allocs;
    uint64_t bytes;
    uint64_t live_bytes;
    uint64_t peak_bytes;
} size_class;

struct report_trace {
    uint64_t events;
    uint64_t allocs;
    uint64_t live_bytes;
    uint64_t peak_bytes;
    uint64_t peak_event;
    uint64_t curve[CURVE_POINTS];
    size_t point_count;
    uint64_t stretch; /* events of one point */
    size_class classes[SIZE_CLASSES];
};

/* ---- reading --------------------------------------------------------------------------------- */

static void halve_curve(report_trace *trace) {
    for (size_t i = 0; i < CURVE_POINTS / 2; i++) {
        uint64_t left = trace->curve[2 * i];
        uint64_t right = trace->curve[2 * i + 1];
        trace->curve[i] = left > right ? left : right;
    }
    trace->point_count = CURVE_POINTS / 2;
    trace->stretch *= 2;
}

/* Event number n, counted from 0, is in point n / stretch. */
static void add_to_curve(report_trace *trace) {
    uint64_t *point;
    if (trace->events / trace->stretch == CURVE_POINTS) halve_curve(trace);
    if (trace->events / trace->stretch == trace->point_count) {
        trace->curve[trace->point_count++] = 0;
    }
    point = &trace->curve[trace->point_count - 1];
    if (trace->live_bytes > *point) *point = trace->live_bytes;
}

static void add_event(report_trace *trace, const trace_event *event) {
    size_class *class_of = &trace->classes[event->bytes ? 63 - __builtin_clzll(event->bytes) : 0];
    if (event->op == TRACE_ALLOC) {
        trace->allocs++;
        trace->live_bytes += event->bytes;
        class_of->allocs++;
        class_of->bytes += event->bytes;
        class_of->live_bytes += event->bytes;
        if (class_of->live_bytes > class_of->peak_bytes) {
            class_of->peak_bytes = class_of->live_bytes;
        }
    } else {
        trace->live_bytes -= event->bytes;
        class_of->live_bytes -= event->bytes;
    }
    if (trace->live_bytes > trace->peak_bytes) {
        trace->peak_bytes = trace->live_bytes;
        trace->peak_event = trace->events;
    }
    add_to_curve(trace);
    trace->events++;
}

static int exit_status(trace_result result) {
    if (result == TRACE_END) return 0;
    return result == TRACE_NO_MEMORY ? EXIT_FAILURE : 2;
}

int report_trace_read(const char *path, report_trace **out, char *error) {
    trace_reader *reader = NULL;
    trace_event event;
    trace_result result = trace_reader_open(path, &reader, error);
    report_trace *trace = NULL;
    if (result != TRACE_EVENT) return exit_status(result);
    trace = calloc(1, sizeof *trace);
    result = TRACE_NO_MEMORY;
    snprintf(error, TRACE_ERROR_BYTES, "out of host memory");
    if (trace) {
        trace->stretch = 1;
        while ((result = trace_reader_next(reader, &event)) == TRACE_EVENT)
            add_event(trace, &event);
        snprintf(error, TRACE_ERROR_BYTES, "%s", trace_reader_error(reader));
    }
    trace_reader_close(reader);
    if (result == TRACE_END) {
        *out = trace;
    } else {
        free(trace);
    }
    return exit_status(result);
}

void report_trace_free(report_trace *trace) { free(trace); }

/* ---- writing --------------------------------------------------------------------------------- */

static void write_curve(FILE *stream, const report_trace *trace) {
    double across = trace->point_count > 1 ? (double)(trace->point_count - 1) : 1.0;
    double most = trace->peak_bytes ? (double)trace->peak_bytes : 1.0;
    fprintf(stream, "<svg viewBox=\"0 0 %d %d\" width=\"100%%\" role=\"img\"><polyline points=\"",
            CHART_WIDTH, CHART_HEIGHT + 10);
    for (size_t i = 0; i < trace->point_count; i++) {
        /* Tenths by integers: the page must not depend on the locale. */
        long x = (long)((double)i / across * CHART_WIDTH * 10.0);
        long y = (long)((1.0 - (double)trace->curve[i] / most) * CHART_HEIGHT * 10.0) + 50;
        fprintf(stream, "%ld.%ld,%ld.%ld ", x / 10, x % 10, y / 10, y % 10);
    }
    fputs("\"/></svg>\n", stream);
}

static void write_classes(FILE *stream, const report_trace *trace) {
    html_table_begin(stream, "rrrrrl", "size from", "allocations", "bytes in all", "most live",
                     "live at the end", "most live of the peak");
    for (size_t i = 0; i < SIZE_CLASSES; i++) {
        const size_class *sums = &trace->classes[i];
        if (sums->allocs == 0) continue;
        html_row(stream);
        html_number(stream, "%s", text_size(i ? (uint64_t)1 << i : 0).text);
        html_number(stream, "%s", text_count(sums->allocs).text);
        html_number(stream, "%s", text_size(sums->bytes).text);
        html_number(stream, "%s", text_size(sums->peak_bytes).text);
        html_number(stream, "%s", text_size(sums->live_bytes).text);
        html_bar(stream, (double)sums->peak_bytes, (double)trace->peak_bytes, "live");
    }
    html_table_end(stream);
}

void report_trace_page(FILE *stream, const char *name, const report_trace *trace) {
    html_page_begin(stream, "Allocation trace");
    html_paragraph(stream, "%s", name);
    html_paragraph(stream, "%s events, %s of them allocations", text_count(trace->events).text,
                   text_count(trace->allocs).text);
    html_paragraph(stream, "Peak: %s bytes (%s) live after event %s. Live at the end: %s bytes.",
                   text_count(trace->peak_bytes).text, text_size(trace->peak_bytes).text,
                   text_count(trace->events ? trace->peak_event + 1 : 0).text,
                   text_count(trace->live_bytes).text);
    html_section(stream, "Live bytes by event");
    write_curve(stream, trace);
    html_section(stream, "Sizes, by powers of two");
    write_classes(stream, trace);
    html_page_end(stream);
}
