/* tenure-bench-gpu: what the kernels, GEMMs, pools and calls take on a real GPU.
 *
 * Exit status: 0, 1 if something failed, 2 for bad usage, 77 without a GPU.
 */
#include "gpu_bench.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "replay_output.h"
#include "text_table.h"

static const char program_name[] = "tenure-bench-gpu";

enum { SECTIONS = 4, CASTS = SECTIONS, EXIT_NO_GPU = 77, ORDINAL_MAX = 1023 };

static gpu_bench_section sections[SECTIONS] = {
    {.key = "gemms",
     .title = "GEMMs on random data, rows x columns x contracted, all in turns: TFLOP/s of the "
              "algorithm that is offered first, of the tuned choice, of the best, and how much of "
              "the best the choice reaches; fprop is 1x128 by 128x128 to bf16, wgrad 1x128 by "
              "1x128 added to fp32",
     .columns = {"shape", "fprop first", "fprop tuned", "fprop best", "fprop %", "wgrad first",
                 "wgrad tuned", "wgrad best", "wgrad %", "bf16 first", "bf16 tuned", "bf16 best",
                 "bf16 %"},
     .decimals = 1,
     .reference = -1},
    {.key = "attention",
     .title = "Attention of 4096 tokens in bf16, sequences of S, heads of so many elements: us and "
              "TFLOP/s",
     .columns = {"shape", "forward us", "TFLOP/s", "backward us", "TFLOP/s back"},
     .decimals = 1,
     .reference = -1},
    {.key = "pool",
     .title = "A warm alloc and free",
     .columns = {"block", "ns"},
     .decimals = 1,
     .reference = -1},
    {.key = "calls",
     .title = "The host's time in a call, tensors of 128 x 128",
     .columns = {"call", "us"},
     .decimals = 2,
     .reference = -1}};

static void (*const measures[SECTIONS])(gpu_bench *, gpu_bench_section *) = {
    gpu_bench_gemms, gpu_bench_attention, gpu_bench_pool, gpu_bench_calls};

static const char usage_text[] =
    "usage: tenure-bench-gpu [options] [WORD...]\n"
    "\n"
    "Measures casts, GEMMs, attention, the pool and the calls of ops on a GPU, each as the median\n"
    "of a few batches. Takes some minutes, most of them for the casts, and 16 GiB of the GPU's\n"
    "memory.\n"
    "With words, of the casts only those with one of the words in their name.\n"
    "\n"
    "  --only NAME     casts, gemms, attention, pool or calls (default: all)\n"
    "  --size MxK      casts at one of their sizes (4096x4096, 8192x8192, 16384x7168,\n"
    "                  15872x16384, 65536x7168)\n"
    "  --csv FILE      a line for each cast and size there, too\n"
    "  --device N      which GPU (0)\n"
    "  --json          the figures as JSON on standard output\n"
    "  --rehearse      each cast twice, small, on the host: that it can be done, no figures\n"
    "  --help          this text\n";

gpu_bench_row *gpu_bench_row_add(gpu_bench_section *section, const char *title) {
    gpu_bench_row *row = &section->rows[section->row_count++];
    snprintf(row->title, sizeof row->title, "%s", title);
    return row;
}

/* ---- output -------------------------------------------------------------------------------- */

static int figure_count(const gpu_bench_section *section) {
    int count = 0;
    while (count < GPU_BENCH_FIGURES && section->columns[count + 1])
        count++;
    return count;
}

static void put_figure(text_table *table, const gpu_bench_section *section,
                       const gpu_bench_row *row, int figure) {
    const double value = row->figures[figure];
    if (section->reference < 0 || section->reference == figure)
        text_table_cell(table, "%.*f", section->decimals, value);
    else
        text_table_cell(table, "%.*f  %3.0f %%", section->decimals, value,
                        100.0 * value / row->figures[section->reference]);
}

static int print_section(const gpu_bench_section *section) {
    const int figures = figure_count(section);
    char columns[GPU_BENCH_FIGURES + 2] = "<";
    memset(columns + 1, '>', (size_t)figures);
    text_table *table = text_table_create(columns);
    if (!table) return 0;
    for (int i = 0; i <= figures; i++)
        text_table_cell(table, "%s", section->columns[i]);
    text_table_rule(table);
    for (int r = 0; r < section->row_count; r++) {
        text_table_cell(table, "%s", section->rows[r].title);
        for (int i = 0; i < figures; i++)
            put_figure(table, section, &section->rows[r], i);
    }
    printf("\n%s\n\n", section->title);
    int is_printed = text_table_print(table, stdout);
    text_table_destroy(table);
    return is_printed;
}

static int print_tables(const gpu_bench *bench, const gpu_cast_report *casts) {
    int is_printed = printf("%s\n", bench->info.name) > 0 && gpu_cast_report_print(casts);
    for (int i = 0; i < SECTIONS && is_printed; i++)
        if (sections[i].row_count > 0) is_printed = print_section(&sections[i]);
    return is_printed;
}

/* {"title": {"column": figure, ...}, ...} */
static int add_section_json(cJSON *report, const gpu_bench_section *section) {
    cJSON *object = cJSON_AddObjectToObject(report, section->key);
    int is_whole = object != NULL;
    for (int r = 0; is_whole && r < section->row_count; r++) {
        cJSON *row = cJSON_AddObjectToObject(object, section->rows[r].title);
        is_whole = row != NULL;
        for (int i = 0; is_whole && i < figure_count(section); i++)
            is_whole = cJSON_AddNumberToObject(row, section->columns[i + 1],
                                               section->rows[r].figures[i]) != NULL;
    }
    return is_whole;
}

static int print_json(const gpu_bench *bench, const gpu_cast_report *casts) {
    cJSON *report = cJSON_CreateObject();
    int is_printed = report && cJSON_AddStringToObject(report, "device", bench->info.name);
    is_printed = is_printed && gpu_cast_report_to_json(casts, report);
    for (int i = 0; i < SECTIONS && is_printed; i++)
        if (sections[i].row_count > 0) is_printed = add_section_json(report, &sections[i]);
    is_printed = is_printed && json_print(report, stdout);
    cJSON_Delete(report);
    return is_printed;
}

/* ---- options ------------------------------------------------------------------------------- */

typedef struct bench_options {
    int json;
    int ordinal;
    int only; /* a section, CASTS, or -1 */
    int rehearse;
    const char *csv;
    gpu_cast_choice casts;
} bench_options;

static int parse_section(const char *text, int *out) {
    for (int i = 0; i < SECTIONS; i++)
        if (strcmp(text, sections[i].key) == 0) return *out = i, 1;
    if (strcmp(text, "casts") == 0) return *out = CASTS, 1;
    return 0;
}

static int parse_ordinal(const char *text, int *out) {
    char *end = NULL;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < 0 || value > ORDINAL_MAX) return 0;
    *out = (int)value;
    return 1;
}

static int parse_size(const char *text, gpu_cast_choice *choice) {
    char *end = NULL;
    choice->rows = strtoll(text, &end, 10);
    if (end == text || *end != 'x' || choice->rows <= 0) return 0;
    text = end + 1;
    choice->cols = strtoll(text, &end, 10);
    return end != text && !*end && choice->cols > 0;
}

/* -1 to go on, else the exit status. */
static int parse_options(int argc, char **argv, bench_options *options) {
    static const struct option known[] = {
        {"only", required_argument, NULL, 'o'}, {"device", required_argument, NULL, 'd'},
        {"size", required_argument, NULL, 's'}, {"csv", required_argument, NULL, 'c'},
        {"json", no_argument, NULL, 'j'},       {"rehearse", no_argument, NULL, 'r'},
        {"help", no_argument, NULL, 'h'},       {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        if (option == 'h') return fputs(usage_text, stdout) >= 0 ? EXIT_SUCCESS : EXIT_FAILURE;
        if (option == '?') return EXIT_BAD_USAGE;
        if (option == 'j') options->json = 1;
        if (option == 'r') options->rehearse = 1;
        if (option == 'c') options->csv = optarg;
        if (option == 'o' && !parse_section(optarg, &options->only))
            return program_misused(program_name, "--only", optarg);
        if (option == 'd' && !parse_ordinal(optarg, &options->ordinal))
            return program_misused(program_name, "--device", optarg);
        if (option == 's' && !parse_size(optarg, &options->casts))
            return program_misused(program_name, "--size", optarg);
    }
    options->casts.words = argv + optind;
    options->casts.word_count = argc - optind;
    if (gpu_bench_casts_chosen(&options->casts) > 0) return -1;
    return program_misused(program_name, "no such cast or size",
                           argc > optind ? argv[optind] : "--size");
}

/* ---- running ------------------------------------------------------------------------------- */

static int is_wanted(const bench_options *options, int section) {
    if (options->rehearse) return section == CASTS;
    return options->only < 0 || options->only == section;
}

/* 1, or 0 with the words. */
static int measure_casts(gpu_bench *bench, const bench_options *options, gpu_cast_report *report) {
    FILE *csv = options->csv ? fopen(options->csv, "w") : NULL;
    if (options->csv && !csv) {
        fprintf(stderr, "tenure-bench-gpu: %s: cannot be written\n", options->csv);
        return 0;
    }
    gpu_bench_casts(bench, &options->casts, csv, report);
    int is_written = !csv || !ferror(csv);
    if (csv && fclose(csv) != 0) is_written = 0;
    if (!is_written) fprintf(stderr, "tenure-bench-gpu: %s: writing failed\n", options->csv);
    return is_written;
}

static int run(gpu_bench *bench, const bench_options *options) {
    gpu_cast_report casts = {NULL, 0};
    int is_done = !is_wanted(options, CASTS) || measure_casts(bench, options, &casts);
    for (int i = 0; i < SECTIONS && is_done; i++)
        if (is_wanted(options, i)) measures[i](bench, &sections[i]);
    if (is_done) {
        is_done = options->json ? print_json(bench, &casts) : print_tables(bench, &casts);
        if (!is_done || fflush(stdout) != 0) {
            fprintf(stderr, "tenure-bench-gpu: cannot write to standard output\n");
            is_done = 0;
        }
    }
    free(casts.results);
    return is_done ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv) {
    bench_options options = {.ordinal = 0, .only = -1};
    gpu_bench bench;
    int status = parse_options(argc, argv, &options);
    if (status >= 0) return status;
    if (!gpu_bench_open(&bench, options.ordinal, options.rehearse)) return EXIT_NO_GPU;
    status = run(&bench, &options);
    gpu_bench_close(&bench);
    return status;
}
