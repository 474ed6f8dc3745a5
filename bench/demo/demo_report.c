/* The demo's claims, and its table: see demo_report.h. */
#include "demo_report.h"

#include <string.h>

#include "text_table.h"

/* What PyTorch 2.11 reserved for the same job, from its own peak of requested bytes and its
 * measured utilization: bench/traces/README.md. */
static const double pytorch_native_utilization = 0.704;
static const double pytorch_expandable_utilization = 0.963;

static size_t columnwise_total(const demo_report *report) {
    return (size_t)report->shape.layers * demo_model_columnwise_bytes_of_one(&report->shape);
}

static int losses_equal(const demo_report *report) {
    const size_t bytes = (size_t)report->steps * (size_t)report->shape.tokens * sizeof(float);
    return memcmp(report->keep.token_loss, report->release.token_loss, bytes) == 0;
}

static int gradients_equal(const demo_report *report) {
    const size_t count = report->keep.gradient_count;
    return count == report->release.gradient_count &&
           memcmp(report->keep.gradients, report->release.gradients,
                  (size_t)report->steps * count * sizeof(float)) == 0;
}

/* Both peaks are at a dgrad: with all planes kept, or with the one that it reads and the one that
 * is derived for the next layer meanwhile. */
static int peak_falls_by_all_but_two(const demo_report *report) {
    const size_t left = report->shape.layers < 2 ? 1 : 2;
    const size_t expected =
        columnwise_total(report) - left * demo_model_columnwise_bytes_of_one(&report->shape);
    return report->keep.peak_bytes - report->release.peak_bytes == expected;
}

static int learns(const demo_train_result *run, int steps) {
    return run->loss[steps - 1] < run->loss[0];
}

int demo_report_claims(const demo_report *report, demo_claim claims[DEMO_CLAIM_MAX]) {
    const demo_train_result *keep = &report->keep, *release = &report->release;
    const demo_claim all[] = {
        {"the trace replays without out-of-memory, race or leak",
         !report->replay.oom_count && !report->replay.races && !report->replay.leaked_bytes},
        {"columnwise bytes after backward are layers x (hidden^2 + scales) where kept",
         keep->columnwise_bytes == columnwise_total(report)},
        {"columnwise bytes after every backward are 0 where released",
         release->columnwise_after_backward_max == 0},
        {"resident bytes fall by exactly the columnwise planes",
         keep->resident_bytes - release->resident_bytes == columnwise_total(report)},
        {"peak bytes fall by exactly the columnwise planes less the two of a dgrad",
         peak_falls_by_all_but_two(report)},
        {"every token's loss in every step is bit-identical", losses_equal(report)},
        {"every gradient in every step is bit-identical", gradients_equal(report)},
        {"the loss falls", learns(keep, report->steps) && learns(release, report->steps)},
        {"the ledger balances after every step", keep->balanced && release->balanced},
        {"nothing is alive at the end",
         !keep->live_after_destroy_bytes && !release->live_after_destroy_bytes},
    };
    const int count = (int)(sizeof all / sizeof *all);
    memcpy(claims, all, sizeof all);
    return count;
}

/* ---- the table ------------------------------------------------------------------------------ */

static void size_row(text_table *table, const char *name, size_t keep, size_t release) {
    text_table_cell(table, "%s", name);
    text_table_cell(table, "%s", text_count(keep).text);
    text_table_cell(table, "%s", text_count(release).text);
    text_table_cell(table, "%s%s", keep < release ? "-" : "",
                    text_count(keep > release ? keep - release : release - keep).text);
}

static void head_row(text_table *table, const char *name) {
    text_table_cell(table, "%s", name);
    text_table_cell(table, "kept");
    text_table_cell(table, "released");
    text_table_cell(table, "saved");
    text_table_rule(table);
}

static void memory_rows(text_table *table, const demo_report *report) {
    const demo_train_result *keep = &report->keep, *release = &report->release;
    char name[64];
    for (int i = 0; i < DEMO_OWNER_COUNT; i++) {
        snprintf(name, sizeof name, "%s, resident", keep->owners[i].name);
        size_row(table, name, keep->owners[i].resident_bytes, release->owners[i].resident_bytes);
    }
    for (int i = 0; i < DEMO_OWNER_COUNT; i++) {
        snprintf(name, sizeof name, "%s, peak", keep->owners[i].name);
        size_row(table, name, keep->owners[i].peak_bytes, release->owners[i].peak_bytes);
    }
    size_row(table, "columnwise after backward", keep->columnwise_bytes, release->columnwise_bytes);
    size_row(table, "all, resident", keep->resident_bytes, release->resident_bytes);
    size_row(table, "all, peak", keep->peak_bytes, release->peak_bytes);
    size_row(table, "reserved from the device", keep->reserved_bytes, release->reserved_bytes);
}

static void training_rows(text_table *table, const demo_report *report) {
    const demo_train_result *keep = &report->keep, *release = &report->release;
    const int last = report->steps - 1;
    text_table_rule(table);
    text_table_cell(table, "step time, median ms");
    text_table_cell(table, "%.3f", keep->step_us * 1e-3);
    text_table_cell(table, "%.3f", release->step_us * 1e-3);
    text_table_cell(table, "ratio %.4f", report->step_time_ratio);
    text_table_cell(table, "loss, first step");
    text_table_cell(table, "%.9g", keep->loss[0]);
    text_table_cell(table, "%.9g", release->loss[0]);
    text_table_cell(table, "%s", "");
    text_table_cell(table, "loss, step %d", report->steps);
    text_table_cell(table, "%.9g", keep->loss[last]);
    text_table_cell(table, "%.9g", release->loss[last]);
    text_table_cell(table, "%s", losses_equal(report) ? "bit-identical" : "DIFFERENT");
}

/* PyTorch's columns stand beside the trace that they were measured with, and no other. */
static void replay_rows(text_table *table, const demo_report *report, int columns) {
    const replay_result *replay = &report->replay;
    const double live = (double)replay->peak_live_bytes;
    const double utilization[3] = {replay->utilization, pytorch_native_utilization,
                                   pytorch_expandable_utilization};
    static const char *const heads[] = {"Tenure", "PyTorch native", "expandable segments"};
    text_table_cell(table, "peak of the job");
    for (int i = 0; i < columns; i++)
        text_table_cell(table, "%s", heads[i]);
    text_table_rule(table);
    text_table_cell(table, "live");
    for (int i = 0; i < columns; i++)
        text_table_cell(table, "%s", text_mebibytes(replay->peak_live_bytes).text);
    text_table_cell(table, "reserved");
    text_table_cell(table, "%s", text_mebibytes(replay->peak_reserved_bytes).text);
    for (int i = 1; i < columns; i++)
        text_table_cell(table, "%s", text_mebibytes((uint64_t)(live / utilization[i])).text);
    text_table_cell(table, "utilization");
    for (int i = 0; i < columns; i++)
        text_table_cell(table, "%.1f %%", utilization[i] * 100.0);
}

static int print_replay(const demo_report *report, FILE *stream) {
    text_table *table = text_table_create(report->is_shipped_trace ? "<>>>" : "<>");
    if (!table) return 0;
    fprintf(stream, "(a) %s, %s events%s on the simulated device\n\n", report->trace_name,
            text_count(report->replay.events).text,
            report->is_shipped_trace ? " of a real training job" : "");
    replay_rows(table, report, report->is_shipped_trace ? 3 : 1);
    const int printed = text_table_print(table, stream);
    text_table_destroy(table);
    return printed;
}

static int print_training(const demo_report *report, FILE *stream) {
    const demo_shape *shape = &report->shape;
    text_table *table = text_table_create("<>>>");
    if (!table) return 0;
    fprintf(stream,
            "\n(b) LoRA on %d frozen FP8 layers of %lld x %lld, %lld tokens, %d steps on the bytes "
            "of %s, on %s\n\n",
            shape->layers, (long long)shape->hidden, (long long)shape->hidden,
            (long long)shape->tokens, report->steps, report->text_name, report->device.name);
    head_row(table, "bytes; columnwise copies of frozen weights");
    memory_rows(table, report);
    training_rows(table, report);
    const int printed = text_table_print(table, stream);
    text_table_destroy(table);
    return printed;
}

int demo_report_print(const demo_report *report, FILE *stream) {
    demo_claim claims[DEMO_CLAIM_MAX];
    const int count = demo_report_claims(report, claims);
    int all_hold = 1;
    if (!print_replay(report, stream) || !print_training(report, stream)) return 0;
    fprintf(stream, "\n(c)\n");
    for (int i = 0; i < count; i++) {
        fprintf(stream, "  %s  %s\n", claims[i].holds ? "ok  " : "FAIL", claims[i].words);
        all_hold = all_hold && claims[i].holds;
    }
    fprintf(stream, "\n%s\n",
            all_hold ? "Both runs are bit-identical and the ledger is balanced."
                     : "NOT everything holds: see the lines with FAIL.");
    return fflush(stream) == 0 && !ferror(stream);
}
