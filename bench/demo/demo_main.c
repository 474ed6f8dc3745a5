/* tenure-demo: the project's main job, from a trace and a text to one table that must add up.
 *
 * Exit status: 0 if every claim of the report holds, 1 if one does not or the job failed, 2 for
 * bad usage.
 */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "demo_budget.h"
#include "demo_report.h"
#include "option_values.h"

static const char program_name[] = "tenure-demo";

/* In narrower models the head's 256 logits a token, not the stack's backward, make the peak that
 * the report compares. A single step shows no fall of the loss. */
enum { PATH_BYTES = 4096, TEXT_BYTES_MIN = 1024, HIDDEN_MIN = 640, STEPS_MIN = 2 };

typedef struct demo_options {
    int json;
    tn_driver_kind driver;
    long layers, hidden, tokens, steps;
    char text_path[PATH_BYTES];
    char trace_path[PATH_BYTES];
    int has_own_trace;  /* --trace was given */
    long budget_points; /* 0: the demo itself */
} demo_options;

static const char usage_text[] =
    "usage: tenure-demo [options]      (./run demo [options])\n"
    "\n"
    "Replays a recorded training job on the simulated device, then trains LoRA adapters on a "
    "stack\n"
    "of frozen FP8 layers twice, keeping and releasing the columnwise weight copies, a step of "
    "one\n"
    "and a step of the other in turn, and shows that memory adds up to the byte and that both "
    "runs\n"
    "are bit-identical.\n"
    "\n"
    "  --json              the report as JSON on standard output\n"
    "  --driver NAME       auto (default: a CUDA device if there is one), cuda or host\n"
    "  --layers N          frozen layers (16)\n"
    "  --hidden N          width of the layers, at least 640 (4096 on CUDA, 640 on the host)\n"
    "  --tokens N          tokens of a step (4096 on CUDA, 512 on the host)\n"
    "  --steps N           training steps of each run, at least 2 (12 on CUDA, 8 on the host)\n"
    "  --text FILE         the data: its bytes (the project's LICENSE)\n"
    "  --trace FILE        the allocation trace (the project's bench/traces/lora.csv.gz)\n"
    "  --budget-curve N    instead of all that: bytes of columnwise copies kept against step "
    "time,\n"
    "                      at N + 1 budgets from none to all, as CSV (or JSON)\n"
    "  --help              this text\n";

/* ---- options -------------------------------------------------------------------------------- */

static int parse_one(int option, const char *value, demo_options *options) {
    switch (option) {
    case 'j': options->json = 1; return 1;
    case 'd': return option_driver(value, &options->driver);
    case 'l': return option_count(value, 1, 1000, &options->layers);
    case 'h': return option_count(value, HIDDEN_MIN, 65536, &options->hidden);
    case 't': return option_count(value, 1, 1 << 20, &options->tokens);
    case 's': return option_count(value, STEPS_MIN, 10000, &options->steps);
    case 'b': return option_count(value, 1, DEMO_BUDGET_POINTS_MAX, &options->budget_points);
    case 'x': return snprintf(options->text_path, PATH_BYTES, "%s", value) < PATH_BYTES;
    default:
        options->has_own_trace = 1;
        return snprintf(options->trace_path, PATH_BYTES, "%s", value) < PATH_BYTES;
    }
}

/* 0 to go on, else the exit status less one. */
static int parse_options(int argc, char **argv, demo_options *options) {
    static const struct option known[] = {{"json", no_argument, NULL, 'j'},
                                          {"driver", required_argument, NULL, 'd'},
                                          {"layers", required_argument, NULL, 'l'},
                                          {"hidden", required_argument, NULL, 'h'},
                                          {"tokens", required_argument, NULL, 't'},
                                          {"steps", required_argument, NULL, 's'},
                                          {"text", required_argument, NULL, 'x'},
                                          {"trace", required_argument, NULL, 'r'},
                                          {"help", no_argument, NULL, '?' + 256},
                                          {"budget-curve", required_argument, NULL, 'b'},
                                          {NULL, 0, NULL, 0}};
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", known, &index)) != -1) {
        if (option == '?') return 1 + 2;
        if (option == '?' + 256) return fputs(usage_text, stdout) >= 0 ? 1 : 2;
        if (!parse_one(option, optarg, options)) {
            return 1 + program_misused(program_name, known[index].name, optarg);
        }
    }
    if (optind < argc)
        return 1 + program_misused(program_name, "unexpected argument", argv[optind]);
    return 0;
}

/* ---- the job -------------------------------------------------------------------------------- */

static int report_failure(const char *what, const char *why) {
    fprintf(stderr, "tenure-demo: %s: %s\n", what, why);
    return 1;
}

static int run_replay(const demo_options *options, demo_report *report) {
    replay_options replay = REPLAY_OPTIONS_INIT;
    replay.trace_path = options->trace_path;
    replay.progress_label = "replay";
    if (replay_run(&replay, &report->replay) == REPLAY_BAD_INPUT) {
        fprintf(stderr, "tenure-demo: %s\n", report->replay.message);
        return 2;
    }
    if (!report->replay.completed) return report_failure("replay", report->replay.message);
    return 0;
}

static void set_sizes(const demo_options *options, demo_report *report) {
    const int on_gpu = report->device.driver == TN_DRIVER_CUDA;
    report->shape.layers = options->layers ? (int)options->layers : 16;
    report->shape.hidden = options->hidden ? options->hidden : on_gpu ? 4096 : 640;
    report->shape.tokens = options->tokens ? options->tokens : on_gpu ? 4096 : 512;
    report->shape.rank = 16;
    report->steps = options->steps ? (int)options->steps : on_gpu ? 12 : 8;
}

static tn_status train_both(tn_device *device, demo_report *report, const unsigned char *text,
                            size_t text_bytes) {
    const demo_train_config config = {.shape = report->shape,
                                      .steps = report->steps,
                                      .learning_rate = 0.03f,
                                      .text = text,
                                      .text_bytes = text_bytes,
                                      .policy = TN_POLICY_UNTIL_LAST_USE};
    return demo_train(device, &config, "train", &report->keep, &report->release,
                      &report->step_time_ratio);
}

static tn_status train_curve(tn_device *device, const demo_options *options,
                             const demo_report *report, const unsigned char *text,
                             size_t text_bytes, int *holds) {
    demo_train_config config = {.shape = report->shape,
                                .steps = report->steps,
                                .learning_rate = 0.03f,
                                .text = text,
                                .text_bytes = text_bytes};
    return demo_budget_curve(device, &config, (int)options->budget_points, options->json, stdout,
                             holds);
}

static int run_training(const demo_options *options, demo_report *report) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    size_t text_bytes = 0;
    int holds = 1;
    unsigned char *text = option_read_file(options->text_path, TEXT_BYTES_MIN, &text_bytes);
    if (!text)
        return program_misused(program_name, "no file with at least 1024 bytes",
                               options->text_path);
    config.driver = options->driver;
    tn_status status = tn_device_create(&config, &device);
    if (status == TN_OK) status = tn_device_info_get(device, &report->device);
    if (status == TN_OK && report->device.simulated) {
        (void)tn_device_destroy(device);
        free(text);
        return program_misused(program_name, "training needs a device that computes, not",
                               report->device.name);
    }
    if (status == TN_OK) {
        set_sizes(options, report);
        status = options->budget_points
                     ? train_curve(device, options, report, text, text_bytes, &holds)
                     : train_both(device, report, text, text_bytes);
    }
    int failed = status == TN_OK ? !holds : report_failure("training", tn_error_last());
    if (tn_device_destroy(device) != TN_OK && !failed) {
        failed = report_failure("closing the device", tn_error_last());
    }
    free(text);
    return failed;
}

static int all_claims_hold(const demo_report *report) {
    demo_claim claims[DEMO_CLAIM_MAX];
    const int count = demo_report_claims(report, claims);
    for (int i = 0; i < count; i++) {
        if (!claims[i].holds) return 0;
    }
    return 1;
}

static int run_demo(const demo_options *options, demo_report *report) {
    if (options->budget_points) return run_training(options, report);
    int failed = run_replay(options, report);
    if (!failed) failed = run_training(options, report);
    if (failed) return failed;
    const int printed =
        options->json ? demo_report_print_json(report, stdout) : demo_report_print(report, stdout);
    if (!printed) return report_failure("output", "could not be written");
    return all_claims_hold(report) ? 0 : 1;
}

int main(int argc, char **argv) {
    demo_options options = {0};
    (void)option_project_path("LICENSE", options.text_path, PATH_BYTES);
    (void)option_project_path("bench/traces/lora.csv.gz", options.trace_path, PATH_BYTES);
    const int end = parse_options(argc, argv, &options);
    if (end) return end - 1;
    demo_report *report = calloc(1, sizeof *report);
    if (!report) return report_failure("start", "no memory");
    report->device = (tn_device_info)TN_DEVICE_INFO_INIT;
    report->text_name = option_file_name(options.text_path);
    report->trace_name = option_file_name(options.trace_path);
    report->is_shipped_trace = !options.has_own_trace;
    const int status = run_demo(&options, report);
    demo_train_result_free(&report->keep);
    demo_train_result_free(&report->release);
    free(report);
    return status;
}
