/* A simulation's timeline: as a trace that browsers draw, and as a page. See simulate_report.h.
 *
 * A trace has a process for each role: a thread for each stream with what ran there, a thread with
 * the pieces of the pipeline at their places in the step, and a counter of what is alive. What ran
 * on a stream is at the place that it had on its rank alone, before the stages were put together.
 */
#include "simulate_report.h"

#include <string.h>

#include "html_page.h"
#include "text_table.h"

enum { PIECES_THREAD = 1000, CHART_WIDTH = 1000, CHART_HEIGHT = 200, ROW_HEIGHT = 18 };

static int ends_in(const char *path, const char *end) {
    const size_t length = strlen(path), end_length = strlen(end);
    return length > end_length && strcmp(path + length - end_length, end) == 0;
}

int simulate_report_takes(const char *path) {
    return ends_in(path, ".json") || ends_in(path, ".html");
}

/* ---- trace ----------------------------------------------------------------------------------- */

/* Times go out as whole nanoseconds in microseconds: no locale, and the same bytes each time. */
static void put_us(FILE *stream, const char *key, double us) {
    long long ns = (long long)(us * 1e3 + 0.5);
    fprintf(stream, ",\"%s\":%lld.%03lld", key, ns / 1000, ns % 1000);
}

static void begin_event(FILE *stream, int *is_first, const char *name, const char *phase,
                        size_t process, int thread) {
    fprintf(stream, "%s{\"name\":\"%s\",\"ph\":\"%s\",\"pid\":%zu,\"tid\":%d",
            *is_first ? "\n" : ",\n", name, phase, process, thread);
    *is_first = 0;
}

static void put_name(FILE *stream, int *is_first, const char *what, size_t process, int thread,
                     const char *name) {
    begin_event(stream, is_first, what, "M", process, thread);
    fprintf(stream, ",\"args\":{\"name\":\"%s\"}}", name);
}

static void put_names(FILE *stream, int *is_first, size_t process, const simulate_role *role) {
    char name[96];
    snprintf(name, sizeof name, "rank %lld and %lld like it, stage %d", (long long)role->rank,
             (long long)role->rank_count - 1, role->stage);
    put_name(stream, is_first, "process_name", process, 0, name);
    for (int i = 0; i < role->record.stream_count; i++) {
        snprintf(name, sizeof name, "stream %d", i);
        put_name(stream, is_first, "thread_name", process, i, name);
    }
    put_name(stream, is_first, "thread_name", process, PIECES_THREAD, "pipeline");
}

static void put_intervals(FILE *stream, int *is_first, size_t process,
                          const simulate_record *record) {
    for (size_t i = 0; i < record->interval_count; i++) {
        const simulate_interval *interval = &record->intervals[i];
        begin_event(stream, is_first, interval->what, "X", process, interval->stream);
        put_us(stream, "ts", interval->begin_us);
        put_us(stream, "dur", interval->end_us - interval->begin_us);
        fputc('}', stream);
    }
}

static void put_pieces(FILE *stream, int *is_first, size_t process, const simulate_record *record) {
    for (size_t i = 0; i < record->piece_count; i++) {
        const simulate_piece *piece = &record->pieces[i];
        char name[64];
        snprintf(name, sizeof name, "%s of chunk %d, micro-batch %d",
                 piece->is_backward ? "backward" : "forward", piece->chunk, piece->microbatch);
        begin_event(stream, is_first, name, "X", process, PIECES_THREAD);
        put_us(stream, "ts", piece->start_us);
        put_us(stream, "dur", piece->own_us);
        fputc('}', stream);
    }
}

static void put_notes(FILE *stream, int *is_first, size_t process, const simulate_record *record) {
    for (size_t i = 0; i < record->note_count; i++) {
        const simulate_note *note = &record->notes[i];
        const char *comma = "";
        begin_event(stream, is_first, "alive", "C", process, 0);
        put_us(stream, "ts", note->time_us);
        fputs(",\"args\":{", stream);
        for (int owner = 0; owner < SIMULATE_OWNER_COUNT; owner++) {
            fprintf(stream, "%s\"%s\":%zu", comma, simulate_owner_name((simulate_owner)owner),
                    note->owner_bytes[owner]);
            comma = ",";
        }
        fputs("}}", stream);
    }
}

static void write_trace(const simulate_result *result, FILE *stream) {
    int is_first = 1;
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", stream);
    for (size_t i = 0; i < result->role_count; i++) {
        const simulate_record *record = &result->roles[i].record;
        put_names(stream, &is_first, i, &result->roles[i]);
        put_intervals(stream, &is_first, i, record);
        put_pieces(stream, &is_first, i, record);
        put_notes(stream, &is_first, i, record);
    }
    fputs("\n]}\n", stream);
}

/* ---- page ------------------------------------------------------------------------------------ */

/* Tenths by integers: the page must not depend on the locale. */
static long tenths(double value, double whole, double width) {
    return whole > 0.0 ? (long)(value / whole * width * 10.0) : 0;
}

/* What is alive after each sub-step: steps of a line over the sub-steps. */
static void write_curve(FILE *stream, const simulate_record *record) {
    double most = 1.0;
    for (size_t i = 0; i < record->note_count; i++) {
        if ((double)record->notes[i].live_bytes > most) most = (double)record->notes[i].live_bytes;
    }
    fprintf(stream, "<svg viewBox=\"0 0 %d %d\" width=\"100%%\" role=\"img\"><polyline points=\"",
            CHART_WIDTH, CHART_HEIGHT + 10);
    for (size_t i = 0; i < record->note_count; i++) {
        const long x = tenths((double)i, (double)record->note_count, CHART_WIDTH);
        const long y = tenths(most - (double)record->notes[i].live_bytes, most, CHART_HEIGHT) + 50;
        fprintf(stream, "%ld.%ld,%ld.%ld ", x / 10, x % 10, y / 10, y % 10);
    }
    fputs("\"/></svg>\n", stream);
}

/* The pieces of all stages in the step: a row for each role. */
static void write_pipeline(FILE *stream, const simulate_result *result) {
    fprintf(stream, "<svg viewBox=\"0 0 %d %zu\" width=\"100%%\" role=\"img\">\n", CHART_WIDTH,
            result->role_count * ROW_HEIGHT);
    for (size_t i = 0; i < result->role_count; i++) {
        const simulate_record *record = &result->roles[i].record;
        for (size_t k = 0; k < record->piece_count; k++) {
            const simulate_piece *piece = &record->pieces[k];
            const long x = tenths(piece->start_us, result->step_us, CHART_WIDTH);
            const long width = tenths(piece->own_us, result->step_us, CHART_WIDTH);
            fprintf(
                stream,
                "<rect class=\"%s\" x=\"%ld.%ld\" y=\"%zu\" width=\"%ld.%ld\" height=\"%d\"/>\n",
                piece->is_backward ? "live" : "free", x / 10, x % 10, i * ROW_HEIGHT, width / 10,
                width % 10, ROW_HEIGHT - 2);
        }
    }
    fputs("</svg>\n", stream);
}

static void write_notes(FILE *stream, const simulate_record *record) {
    html_table_begin(stream, "lrrr", "after", "time", "alive", "bytes");
    for (size_t i = 0; i < record->note_count; i++) {
        const simulate_note *note = &record->notes[i];
        html_row(stream);
        html_cell(stream, "%s", note->name);
        html_number(stream, "%.3f ms", note->time_us / 1e3);
        html_number(stream, "%s", text_mebibytes(note->live_bytes).text);
        html_number(stream, "%s", text_count(note->live_bytes).text);
    }
    html_table_end(stream);
}

/* By owner, where most is alive between two sub-steps. */
static void write_owners(FILE *stream, const simulate_record *record) {
    const simulate_note *most = NULL;
    for (size_t i = 0; i < record->note_count; i++) {
        if (!most || record->notes[i].live_bytes > most->live_bytes) most = &record->notes[i];
    }
    if (!most) return;
    html_paragraph(stream, "Most is alive after \"%s\":", most->name);
    html_table_begin(stream, "lrrl", "owner", "alive", "bytes", "share");
    for (int i = 0; i < SIMULATE_OWNER_COUNT; i++) {
        html_row(stream);
        html_cell(stream, "%s", simulate_owner_name((simulate_owner)i));
        html_number(stream, "%s", text_mebibytes(most->owner_bytes[i]).text);
        html_number(stream, "%s", text_count(most->owner_bytes[i]).text);
        html_bar(stream, (double)most->owner_bytes[i], (double)most->live_bytes, "live");
    }
    html_table_end(stream);
}

static void write_role(FILE *stream, const simulate_role *role) {
    const simulate_record *record = &role->record;
    char title[96];
    snprintf(title, sizeof title, "Rank %lld (of %lld alike), stage %d", (long long)role->rank,
             (long long)role->rank_count, role->stage);
    html_card_begin(stream, title);
    html_paragraph(stream, "Peak %s bytes live, %s reserved; %s at rest.",
                   text_count(record->peak_live_bytes).text,
                   text_count(record->peak_reserved_bytes).text,
                   text_count(record->resting_bytes).text);
    html_paragraph(stream, "Computing %.3f ms, sending %.3f ms, of which exposed %.3f ms.",
                   record->compute_us / 1e3, record->communication_us / 1e3,
                   record->exposed_us / 1e3);
    write_owners(stream, record);
    write_curve(stream, record);
    write_notes(stream, record);
    html_card_end(stream);
}

static void write_page(const simulate_result *result, FILE *stream) {
    const simulate_model *model = &result->job->model;
    html_page_begin(stream, "Simulated training step");
    html_paragraph(stream, "%s. Figures: %s", model->name, model->source);
    html_paragraph(stream, "%lld ranks; step %.3f ms", (long long)simulate_model_ranks(model),
                   result->step_us / 1e3);
    html_card_begin(stream, "Pipeline");
    write_pipeline(stream, result);
    html_card_end(stream);
    for (size_t i = 0; i < result->role_count; i++)
        write_role(stream, &result->roles[i]);
    html_page_end(stream);
}

int simulate_report_timeline(const simulate_result *result, const char *path, FILE *stream) {
    if (ends_in(path, ".json"))
        write_trace(result, stream);
    else
        write_page(result, stream);
    return !ferror(stream);
}
