/* tenure-bench-layer: the products of a transformer layer, forward and backward with all casts, in
 * block-scaled FP8 against bf16 with cuBLASLt, and a breakdown.
 *
 * Exit status: 0, 1 if something failed, 2 for bad usage, 77 without a GPU.
 */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "layer_bench.h"

static const char program_name[] = "tenure-bench-layer";

enum { EXIT_NO_GPU = 77, ORDINAL_MAX = 1023, EXTENT_MAX = 1 << 20 };

typedef struct layer_options {
    layer_shape shape;
    int rounds, ordinal, json, rehearse;
} layer_options;

static const char usage_text[] =
    "usage: tenure-bench-layer [options]      (./run bench layer)\n"
    "\n"
    "Times the four products of a transformer layer (QKV, proj, FC1, FC2), forward and backward\n"
    "with all casts, in block-scaled FP8 and in bf16 in turn, with and without the norms and the\n"
    "GELU between them; and each step alone beside what it would take at its limit: its bytes at\n"
    "the rate of a copy, or the time of the best algorithm. Takes a minute or two, most of it to "
    "tune.\n"
    "\n"
    "  --tokens N               rows (15872)\n"
    "  --hidden N               width (4096)\n"
    "  --ffn N                  width between FC1 and FC2 (16384)\n"
    "  --main-gradient TYPE     what weight gradients are added to: fp32 (default) or bf16\n"
    "  --rounds N               of FP8 and bf16 in turn (9)\n"
    "  --device N               which GPU (0)\n"
    "  --json                   the figures as JSON on standard output\n"
    "  --rehearse               small, on the host: that it can be done, no figures\n"
    "  --help                   this text\n";

static int parse_count(const char *text, long least, long most, long *out) {
    char *end = NULL;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) return 0;
    *out = value;
    return 1;
}

static int parse_extent(const char *text, int64_t *out) {
    long value = 0;
    if (!parse_count(text, 1, EXTENT_MAX, &value)) return 0;
    *out = value;
    return 1;
}

static int parse_number(const char *text, long least, long most, int *out) {
    long value = 0;
    if (!parse_count(text, least, most, &value)) return 0;
    *out = (int)value;
    return 1;
}

static int parse_dtype(const char *text, tn_dtype *out) {
    *out = strcmp(text, "bf16") == 0 ? TN_BF16 : TN_FP32;
    return *out == TN_BF16 || strcmp(text, "fp32") == 0;
}

static int parse_one(int option, const char *value, layer_options *options) {
    switch (option) {
    case 't': return parse_extent(value, &options->shape.tokens);
    case 'h': return parse_extent(value, &options->shape.hidden);
    case 'f': return parse_extent(value, &options->shape.ffn);
    case 'm': return parse_dtype(value, &options->shape.main_gradient);
    case 'n': return parse_number(value, 1, LAYER_ROUNDS_MAX, &options->rounds);
    case 'd': return parse_number(value, 0, ORDINAL_MAX, &options->ordinal);
    case 'j': return options->json = 1;
    default: return options->rehearse = 1;
    }
}

/* -1 to go on, else the exit status. */
static int parse_options(int argc, char **argv, layer_options *options) {
    static const struct option known[] = {
        {"tokens", required_argument, NULL, 't'}, {"hidden", required_argument, NULL, 'h'},
        {"ffn", required_argument, NULL, 'f'},    {"main-gradient", required_argument, NULL, 'm'},
        {"rounds", required_argument, NULL, 'n'}, {"device", required_argument, NULL, 'd'},
        {"json", no_argument, NULL, 'j'},         {"rehearse", no_argument, NULL, 'r'},
        {"help", no_argument, NULL, 'u'},         {NULL, 0, NULL, 0}};
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", known, &index)) != -1) {
        if (option == '?') return EXIT_BAD_USAGE;
        if (option == 'u') return fputs(usage_text, stdout) >= 0 ? EXIT_SUCCESS : EXIT_FAILURE;
        if (!parse_one(option, optarg, options))
            return program_misused(program_name, known[index].name, optarg);
    }
    return optind < argc ? program_misused(program_name, "unexpected argument", argv[optind]) : -1;
}

/* What is not said is the layer, or for a rehearsal a small one. */
static layer_shape shape_of(const layer_options *options) {
    layer_shape shape = options->shape;
    if (shape.tokens == 0) shape.tokens = options->rehearse ? 256 : 15872;
    if (shape.hidden == 0) shape.hidden = options->rehearse ? 128 : 4096;
    if (shape.ffn == 0) shape.ffn = options->rehearse ? 512 : 16384;
    return shape;
}

static int run(gpu_bench *bench, const layer_options *options) {
    layer_report *report = calloc(1, sizeof *report);
    if (!report) gpu_bench_out_of_memory();
    report->shape = shape_of(options);
    report->rounds = options->rounds;
    GPU_BENCH_TRY(tn_stream_create(bench->device, &report->side));
    layer_sides_make(bench, report);
    layer_measure(bench, report);
    const char *device =
        options->rehearse ? "a rehearsal on the host: its times say nothing" : bench->info.name;
    const int is_printed = options->json ? layer_report_print_json(report, device, stdout)
                                         : layer_report_print(report, device, stdout);
    GPU_BENCH_TRY(tn_stream_synchronize(bench->device, report->side));
    GPU_BENCH_TRY(tn_stream_destroy(bench->device, report->side));
    free(report);
    if (is_printed && fflush(stdout) == 0) return EXIT_SUCCESS;
    fprintf(stderr, "tenure-bench-layer: cannot write to standard output\n");
    return EXIT_FAILURE;
}

int main(int argc, char **argv) {
    layer_options options = {.shape = {.main_gradient = TN_FP32}, .rounds = 9};
    gpu_bench bench;
    int status = parse_options(argc, argv, &options);
    if (status >= 0) return status;
    if (!gpu_bench_open(&bench, options.ordinal, options.rehearse)) return EXIT_NO_GPU;
    status = run(&bench, &options);
    gpu_bench_close(&bench);
    return status;
}
