/* Measures the ops of gpu_bench_cast.h at each size, beside device copies of a bf16 matrix of that
 * size, which are measured again every few ops: their median is what all are a share of. */
#include "gpu_bench_cast.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text_table.h"

enum { SHAPES = 5, TABLES = 3, COPY_EVERY = 12, COPIES_MAX = 64 };

static const int64_t shapes[SHAPES][2] = {
    {4096, 4096}, {8192, 8192}, {16384, 7168}, {15872, 16384}, {65536, 7168}};
static const int64_t rehearsed_shape[2] = {128, 256};
static const double rotated_bytes = 512e6; /* of all sets: ten times the L2 of an H200 */

/* A kernel that is bound by memory ought to reach this share of the copy's rate from here on. */
static const double wanted_share = 0.90, wanted_from_bytes = 64.0 * 1048576.0;

typedef gpu_cast_table (*table_function)(void);
static const table_function tables[TABLES] = {gpu_bench_cast_formats, gpu_bench_cast_producers,
                                              gpu_bench_cast_rows};

/* ---- one measurement ------------------------------------------------------------------------ */

typedef struct cast_run {
    const gpu_cast *op;
    int count;
    gpu_cast_set sets[GPU_CAST_SETS_MAX];
} cast_run;

static void put_work(gpu_bench *bench, void *argument, int turn) {
    const cast_run *run = argument;
    run->op->family->work(bench, run->op, &run->sets[turn % run->count]);
}

static int sets_for(const gpu_bench *bench, const int64_t shape[2]) {
    double wanted = ceil(rotated_bytes / ((double)shape[0] * (double)shape[1] * 4.0));
    if (bench->is_rehearsal) return 2;
    return wanted > GPU_CAST_SETS_MAX ? GPU_CAST_SETS_MAX : (int)wanted;
}

/* An op that could not do its work has said so on the device. */
static void require_no_error(gpu_bench *bench, const cast_run *run) {
    for (int i = 0; i < run->count; i++) {
        uint32_t error = 0;
        if (!run->sets[i].error.value) continue;
        GPU_BENCH_TRY(tn_plane_read(run->sets[i].error, TN_PLANE_DATA, &error, sizeof error, NULL,
                                    0, bench->stream));
        GPU_BENCH_TRY(tn_stream_synchronize(bench->device, bench->stream));
        if (error == TN_GROUPED_OK) continue;
        fprintf(stderr, "tenure-bench-gpu: %s: error %u on the device\n", run->op->name, error);
        exit(EXIT_FAILURE);
    }
}

/* Everything that it needs is in a scope of its own, which ends with it. */
static gpu_cast_result measure(gpu_bench *bench, const gpu_cast *op, const int64_t shape[2]) {
    gpu_cast_result result = {.name = op->name, .rows = shape[0], .cols = shape[1]};
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope root = bench->scope;
    cast_run run = {.op = op, .count = sets_for(bench, shape)};
    config.parent = root;
    config.name = op->name;
    GPU_BENCH_TRY(tn_scope_create(&config, &bench->scope));
    for (int i = 0; i < run.count; i++) {
        run.sets[i].rows = shape[0], run.sets[i].cols = shape[1];
        op->family->prepare(bench, op, &run.sets[i]);
    }
    result.bytes = run.sets[0].bytes;
    result.seconds = gpu_bench_device_seconds(bench, put_work, &run);
    require_no_error(bench, &run);
    GPU_BENCH_TRY(tn_scope_close(bench->scope));
    bench->scope = root;
    return result;
}

/* ---- all of them ---------------------------------------------------------------------------- */

static int is_chosen(const gpu_cast_choice *choice, const char *name) {
    for (int i = 0; i < choice->word_count; i++)
        if (strstr(name, choice->words[i])) return 1;
    return choice->word_count == 0;
}

static int is_shape_chosen(const gpu_cast_choice *choice, const int64_t shape[2]) {
    return choice->rows == 0 || (choice->rows == shape[0] && choice->cols == shape[1]);
}

int gpu_bench_casts_chosen(const gpu_cast_choice *choice) {
    int ops = 0, sizes = 0;
    for (int t = 0; t < TABLES; t++) {
        gpu_cast_table table = tables[t]();
        for (int i = 0; i < table.count; i++)
            ops += is_chosen(choice, table.ops[i].name);
    }
    for (int i = 0; i < SHAPES; i++)
        sizes += is_shape_chosen(choice, shapes[i]);
    return ops * sizes;
}

static void result_add(gpu_cast_report *report, gpu_cast_result result) {
    if (report->count % 64 == 0) {
        size_t more = ((size_t)report->count + 64) * sizeof *report->results;
        gpu_cast_result *results = realloc(report->results, more);
        if (!results) gpu_bench_out_of_memory();
        report->results = results;
    }
    report->results[report->count++] = result;
}

/* Rates of copies between the ops of one shape. */
typedef struct copy_rates {
    double values[COPIES_MAX];
    int count;
} copy_rates;

static void measure_copy(gpu_bench *bench, copy_rates *rates, const int64_t shape[2]) {
    if (rates->count == COPIES_MAX) return;
    gpu_cast_result copy = measure(bench, &gpu_bench_cast_formats().ops[0], shape);
    rates->values[rates->count++] = copy.bytes / copy.seconds;
}

static void measure_shape(gpu_bench *bench, const gpu_cast_choice *choice, const int64_t shape[2],
                          gpu_cast_report *report) {
    copy_rates copies = {.count = 0};
    int first = report->count;
    for (int t = 0; t < TABLES; t++) {
        gpu_cast_table table = tables[t]();
        for (int i = 0; i < table.count; i++) {
            if (!is_chosen(choice, table.ops[i].name)) continue;
            if ((report->count - first) % COPY_EVERY == 0) measure_copy(bench, &copies, shape);
            result_add(report, measure(bench, &table.ops[i], shape));
        }
    }
    if (report->count == first) return;
    measure_copy(bench, &copies, shape);
    double copy_rate = gpu_bench_median(copies.values, copies.count);
    for (int i = first; i < report->count; i++)
        report->results[i].copy_rate = copy_rate;
}

/* A line each, as soon as a shape is done, so that a run that is ended early leaves the others. */
static void write_csv(FILE *csv, const gpu_cast_report *report, int first) {
    if (!csv) return;
    if (first == 0)
        fputs("peer,op,rows,cols,bytes,microseconds,gb_per_s,copy_gb_per_s,copy_share,note\n", csv);
    for (int i = first; i < report->count; i++) {
        const gpu_cast_result *result = &report->results[i];
        double rate = result->bytes / result->seconds;
        fprintf(csv, "tenure,\"%s\",%lld,%lld,%.0f,%.2f,%.1f,%.1f,%.4f,%s\n", result->name,
                (long long)result->rows, (long long)result->cols, result->bytes,
                result->seconds * 1e6, rate * 1e-9, result->copy_rate * 1e-9,
                rate / result->copy_rate, gpu_cast_is_low(result) ? "low" : "");
    }
    fflush(csv);
}

void gpu_bench_casts(gpu_bench *bench, const gpu_cast_choice *choice, FILE *csv,
                     gpu_cast_report *report) {
    int count = bench->is_rehearsal ? 1 : SHAPES;
    for (int i = 0; i < count; i++) {
        const int64_t *shape = bench->is_rehearsal ? rehearsed_shape : shapes[i];
        int first = report->count;
        if (!bench->is_rehearsal && !is_shape_chosen(choice, shape)) continue;
        fprintf(stderr, "tenure-bench-gpu: casts of %lld x %lld\n", (long long)shape[0],
                (long long)shape[1]);
        measure_shape(bench, choice, shape, report);
        write_csv(csv, report, first);
    }
}

/* ---- results -------------------------------------------------------------------------------- */

int gpu_cast_is_low(const gpu_cast_result *result) {
    double share = result->bytes / result->seconds / result->copy_rate;
    return result->bytes >= wanted_from_bytes && share < wanted_share;
}

/* Results come shape by shape, each with the same ops. */
static int ops_of(const gpu_cast_report *report) {
    int ops = 0;
    while (ops < report->count && report->results[ops].rows == report->results[0].rows &&
           report->results[ops].cols == report->results[0].cols)
        ops++;
    return ops;
}

static void put_result(text_table *table, const gpu_cast_result *result) {
    double share = result->bytes / result->seconds / result->copy_rate;
    text_table_cell(table, "%.1f  %3.0f %%%s", result->seconds * 1e6, 100.0 * share,
                    gpu_cast_is_low(result) ? " <" : "  ");
}

static void put_rows(text_table *table, const gpu_cast_report *report, int ops) {
    for (int op = 0; op < ops; op++) {
        const gpu_cast_result *last = &report->results[report->count - ops + op];
        text_table_cell(table, "%s", last->name);
        text_table_cell(table, "%.3f", last->bytes / ((double)last->rows * (double)last->cols));
        for (int i = op; i < report->count; i += ops)
            put_result(table, &report->results[i]);
    }
}

static void put_titles(text_table *table, const gpu_cast_report *report, int ops) {
    text_table_cell(table, "op");
    text_table_cell(table, "B/element");
    for (int i = 0; i < report->count; i += ops)
        text_table_cell(table, "%lld x %lld: us", (long long)report->results[i].rows,
                        (long long)report->results[i].cols);
    text_table_rule(table);
    text_table_cell(table, "copies, GB/s");
    text_table_cell(table, "4.000");
    for (int i = 0; i < report->count; i += ops)
        text_table_cell(table, "%.0f         ", report->results[i].copy_rate * 1e-9);
}

int gpu_cast_report_print(const gpu_cast_report *report) {
    char columns[SHAPES + 3] = "<>";
    const int ops = ops_of(report);
    int low = 0, large = 0;
    if (ops == 0) return 1;
    memset(columns + 2, '>', (size_t)(report->count / ops));
    text_table *table = text_table_create(columns);
    if (!table) return 0;
    put_titles(table, report, ops);
    put_rows(table, report, ops);
    for (int i = 0; i < report->count; i++) {
        large += report->results[i].bytes >= wanted_from_bytes;
        low += gpu_cast_is_low(&report->results[i]);
    }
    printf("\nCasts: microseconds, and the rate of the bytes that must move as a share of a device "
           "copy's\n\n");
    int is_printed = text_table_print(table, stdout);
    text_table_destroy(table);
    printf("\nBytes that must move, for each element of rows x columns, are those of the last size."
           "\n%d of %d measurements of 64 MiB and more are below %.0f %% (marked <).\n",
           low, large, wanted_share * 100.0);
    return is_printed;
}

static int add_json(cJSON *array, const gpu_cast_result *result) {
    cJSON *object = cJSON_CreateObject();
    if (!object || !cJSON_AddItemToArray(array, object)) return 0;
    return cJSON_AddStringToObject(object, "op", result->name) &&
           cJSON_AddNumberToObject(object, "rows", (double)result->rows) &&
           cJSON_AddNumberToObject(object, "cols", (double)result->cols) &&
           cJSON_AddNumberToObject(object, "bytes", result->bytes) &&
           cJSON_AddNumberToObject(object, "us", result->seconds * 1e6) &&
           cJSON_AddNumberToObject(object, "copy_share",
                                   result->bytes / result->seconds / result->copy_rate);
}

int gpu_cast_report_to_json(const gpu_cast_report *report, cJSON *object) {
    cJSON *array = cJSON_AddArrayToObject(object, "casts");
    int is_whole = array != NULL;
    for (int i = 0; is_whole && i < report->count; i++)
        is_whole = add_json(array, &report->results[i]);
    return is_whole;
}
