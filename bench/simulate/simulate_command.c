/* `tenure simulate`: its options, and what it prints. See simulate_command.h. */
#include "simulate_command.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "option_values.h"
#include "options.h"
#include "output_file.h"
#include "simulate_job.h"
#include "simulate_report.h"

#define COMMAND "simulate"

/* Above every character; those of fields follow the last. */
enum {
    OPTION_MODEL = 256,
    OPTION_RANKS,
    OPTION_LIFETIMES,
    OPTION_DRIVER,
    OPTION_MEMORY,
    OPTION_NODE_RATE,
    OPTION_NETWORK_RATE,
    OPTION_TIMELINE,
    OPTION_JSON,
    OPTION_HELP,
    OPTION_FIELD
};

typedef struct simulate_request {
    simulate_job job;
    const char *model_name;
    const char *timeline_path;
    long ranks; /* 0: as the model says */
    int is_host;
    int as_json;
    int wants_help;
    int field_is_set[64];
    int64_t field_values[64];
} simulate_request;

static const char *const field_names[] = {
#define SIMULATE_FIELD_NAME(field, least, most, otherwise, meaning) #field,
    SIMULATE_FIELDS(SIMULATE_FIELD_NAME)
#undef SIMULATE_FIELD_NAME
};
enum { FIELD_COUNT = sizeof field_names / sizeof field_names[0], FIELD_NAME_BYTES = 32 };
_Static_assert(FIELD_COUNT <= 64, "a request has room for each field");

/* The options that a description's fields make: their underscores are hyphens. */
static char option_names[FIELD_COUNT][FIELD_NAME_BYTES];

static const char help_text[] =
    "Usage: tenure simulate [MODEL] [options]\n"
    "Runs a training step of a described model on simulated ranks: the real planner, ring, layers\n"
    "and casts, on simulated devices. Says what is alive by owner, and when what runs.\n"
    "\n"
    "MODEL is a description that comes with tenure (llama3-8b, llama3-70b, deepseek-v3, tiny), or\n"
    "the path of a file like them.\n"
    "\n"
    "  --model MODEL            the same\n"
    "  --ranks N                as many data-parallel ranks as make N in all\n"
    "  --lifetimes LIST         on (default), off, or each by itself, as L1=on,L3=off: what "
    "today's\n"
    "                           stacks keep alive is kept where it is off\n"
    "  --driver sim|host        simulated GPUs (default), or this one rank of MPI on the CPU\n"
    "  --device-memory SIZE     memory of each device, such as 80GiB (default: enough)\n"
    "  --node-rate SIZE         bytes a second between ranks of a node (default: 450e9)\n"
    "  --network-rate SIZE      bytes a second of each rank between nodes (default: 50e9)\n"
    "  --timeline FILE          write what ran when: FILE.json for chrome://tracing, FILE.html\n"
    "  --json                   print JSON\n"
    "  -h, --help               print this\n"
    "\n"
    "and, with a number each, in the place of what the description says:\n";

void simulate_command_print_help(void) {
    static const struct {
        const char *name, *meaning;
    } rows[] = {
#define SIMULATE_FIELD_HELP(field, least, most, otherwise, meaning) {#field, meaning},
        SIMULATE_FIELDS(SIMULATE_FIELD_HELP)
#undef SIMULATE_FIELD_HELP
    };
    fputs(help_text, stdout);
    for (int i = 0; i < FIELD_COUNT; i++) {
        char name[FIELD_NAME_BYTES];
        snprintf(name, sizeof name, "%s", rows[i].name);
        for (char *at = name; *at; at++)
            if (*at == '_') *at = '-';
        printf("  --%-22s %s\n", name, rows[i].meaning);
    }
    fputs("\nExit status: 0; 1 if the step failed (out of memory, for one) or a race was found; 2 "
          "if\nthe description or an option is wrong.\n",
          stdout);
}

/* ---- options --------------------------------------------------------------------------------- */

static int take_lifetime(simulate_lifetimes *lifetimes, const char *word, size_t length) {
    int *const each[] = {&lifetimes->frozen_columns, &lifetimes->planes_by_use,
                         &lifetimes->gathered_activations, &lifetimes->gather_rows_only};
    const char *value = word;
    int first = 0, last = 3;
    if (length > 3 && word[0] == 'L' && word[1] >= '1' && word[1] <= '4' && word[2] == '=') {
        first = last = word[1] - '1';
        value = word + 3;
    }
    const size_t value_length = length - (size_t)(value - word);
    const int is_on = value_length == 2 && strncmp(value, "on", 2) == 0;
    if (!is_on && !(value_length == 3 && strncmp(value, "off", 3) == 0)) return 0;
    for (int i = first; i <= last; i++)
        *each[i] = is_on;
    return 1;
}

static int take_lifetimes(simulate_request *request, const char *text) {
    const char *word = text;
    for (;;) {
        const size_t length = strcspn(word, ",");
        if (!take_lifetime(&request->job.lifetimes, word, length))
            return command_misused(
                COMMAND, "--lifetimes %s: expected on, off, or a list such as L1=on,L3=off", text);
        if (!word[length]) return 0;
        word += length + 1;
    }
}

static int take_size(const char *option, const char *text, size_t *out) {
    size_t bytes = 0;
    if (!tn__parse_size(text, &bytes) || bytes == 0)
        return command_misused(COMMAND, "%s %s: expected a size above 0 such as 512MiB or 40GiB",
                               option, text);
    *out = bytes;
    return 0;
}

static int take_rate(const char *option, const char *text, double *out) {
    size_t bytes = 0;
    int status = take_size(option, text, &bytes);
    *out = (double)bytes / 1e6;
    return status;
}

static int take_driver(simulate_request *request, const char *text) {
    request->is_host = strcmp(text, "host") == 0;
    if (request->is_host || strcmp(text, "sim") == 0) return 0;
    return command_misused(COMMAND, "--driver %s: expected sim or host", text);
}

static int take_ranks(simulate_request *request, const char *text) {
    if (option_count(text, 1, 1 << 16, &request->ranks)) return 0;
    return command_misused(COMMAND, "--ranks %s: expected a number from 1 to %d", text, 1 << 16);
}

static int take_model(simulate_request *request, const char *name) {
    if (request->model_name)
        return command_misused(COMMAND, "one model was expected, but there are %s and %s",
                               request->model_name, name);
    request->model_name = name;
    return 0;
}

static int take_field(simulate_request *request, int field, const char *text) {
    long value = 0;
    if (!option_count(text, 0, 1L << 40, &value))
        return command_misused(COMMAND, "--%s %s: expected a number", option_names[field], text);
    request->field_is_set[field] = 1;
    request->field_values[field] = value;
    return 0;
}

/* See replay_command.c for what getopt_long leaves behind. */
static int take_option(simulate_request *request, int option, char **argv) {
    tn_simulated_links *links = &request->job.links;
    if (option >= OPTION_FIELD) return take_field(request, option - OPTION_FIELD, optarg);
    switch (option) {
    case OPTION_MODEL: return take_model(request, optarg);
    case OPTION_RANKS: return take_ranks(request, optarg);
    case OPTION_LIFETIMES: return take_lifetimes(request, optarg);
    case OPTION_DRIVER: return take_driver(request, optarg);
    case OPTION_MEMORY: return take_size("--device-memory", optarg, &request->job.device_bytes);
    case OPTION_NODE_RATE: return take_rate("--node-rate", optarg, &links->node_bytes_per_us);
    case OPTION_NETWORK_RATE:
        return take_rate("--network-rate", optarg, &links->network_bytes_per_us);
    case OPTION_TIMELINE: request->timeline_path = optarg; return 0;
    case OPTION_JSON: request->as_json = 1; return 0;
    case 'h':
    case OPTION_HELP: request->wants_help = 1; return 0;
    default: return command_option_refused(COMMAND, option, OPTION_MODEL, argv);
    }
}

enum { OWN_OPTIONS = 10 };

static void name_options(struct option *options) {
    static const struct option own[OWN_OPTIONS] = {
        {"model", required_argument, NULL, OPTION_MODEL},
        {"ranks", required_argument, NULL, OPTION_RANKS},
        {"lifetimes", required_argument, NULL, OPTION_LIFETIMES},
        {"driver", required_argument, NULL, OPTION_DRIVER},
        {"device-memory", required_argument, NULL, OPTION_MEMORY},
        {"node-rate", required_argument, NULL, OPTION_NODE_RATE},
        {"network-rate", required_argument, NULL, OPTION_NETWORK_RATE},
        {"timeline", required_argument, NULL, OPTION_TIMELINE},
        {"json", no_argument, NULL, OPTION_JSON},
        {"help", no_argument, NULL, OPTION_HELP}};
    memcpy(options, own, sizeof own);
    for (int i = 0; i < FIELD_COUNT; i++) {
        snprintf(option_names[i], FIELD_NAME_BYTES, "%s", field_names[i]);
        for (char *at = option_names[i]; *at; at++)
            if (*at == '_') *at = '-';
        options[OWN_OPTIONS + i] =
            (struct option){option_names[i], required_argument, NULL, OPTION_FIELD + i};
    }
    options[OWN_OPTIONS + FIELD_COUNT] = (struct option){NULL, 0, NULL, 0};
}

static int parse_request(int argc, char **argv, simulate_request *request) {
    struct option options[OWN_OPTIONS + FIELD_COUNT + 1];
    int option = 0;
    name_options(options);
    optind = 1;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        int status = take_option(request, option, argv);
        if (status != 0) return status;
    }
    for (; optind < argc; optind++) {
        int status = take_model(request, argv[optind]);
        if (status != 0) return status;
    }
    if (request->wants_help || request->model_name) return 0;
    return command_misused(COMMAND, "no MODEL was given");
}

/* ---- the model ------------------------------------------------------------------------------- */

static int fail(int status, const char *words) {
    fprintf(stderr, "tenure simulate: %s\n", words);
    return status;
}

static int read_model(simulate_request *request) {
    simulate_model *model = &request->job.model;
    char error[SIMULATE_ERROR_BYTES];
    if (!simulate_model_read(request->model_name, model, error)) return fail(EXIT_BAD_USAGE, error);
    for (int i = 0; i < FIELD_COUNT; i++) {
        if (request->field_is_set[i] &&
            !simulate_model_set(model, field_names[i], request->field_values[i], error))
            return command_misused(COMMAND, "--%s: %s", option_names[i], error);
    }
    const int64_t shared = model->tp * model->pp;
    if (request->ranks && request->ranks % shared != 0)
        return command_misused(COMMAND, "--ranks %ld: no multiple of tp x pp, which is %lld",
                               request->ranks, (long long)shared);
    if (request->ranks && !simulate_model_set(model, "dp", request->ranks / shared, error))
        return command_misused(COMMAND, "--ranks %ld: dp would be %lld, and %s", request->ranks,
                               (long long)(request->ranks / shared), error);
    if (!simulate_model_check(model, error)) return fail(EXIT_BAD_USAGE, error);
    if (request->is_host && model->pp > 1)
        return command_misused(COMMAND, "--driver host: pp is %lld, and a real run is of one stage",
                               (long long)model->pp);
    request->job.links.ranks_per_node = (int)model->ranks_per_node;
    request->job.links.split_of = simulate_group_split;
    request->job.links.context = model;
    return 0;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int print_result(const simulate_request *request, const simulate_result *result) {
    if (request->as_json) return simulate_report_json(result, stdout);
    return simulate_report_text(result, stdout);
}

static int write_timeline(const simulate_request *request, const simulate_result *result) {
    char error[OUTPUT_ERROR_BYTES];
    output_file out;
    if (!output_begin(&out, request->timeline_path, error)) return fail(EXIT_BAD_USAGE, error);
    (void)simulate_report_timeline(result, request->timeline_path, out.stream);
    return output_end(&out, error) ? 0 : fail(EXIT_BAD_USAGE, error);
}

static uint64_t count_races(const simulate_result *result) {
    uint64_t races = 0;
    for (size_t i = 0; i < result->role_count; i++)
        races += result->roles[i].record.races;
    return races;
}

static int run(const simulate_request *request) {
    char error[SIMULATE_ERROR_BYTES];
    simulate_result result;
    if (!simulate_job_run(&request->job, request->is_host ? NULL : "simulate", &result, error))
        return fail(EXIT_FAILURE, error);
    int status = request->timeline_path ? write_timeline(request, &result) : 0;
    if (!print_result(request, &result))
        status = fail(EXIT_BAD_USAGE, "the result could not be written");
    if (count_races(&result)) status = fail(EXIT_FAILURE, "there were races");
    simulate_result_free(&result);
    return status;
}

static int run_simulated(simulate_request *request) {
    char error[SIM_LIBRARY_ERROR_BYTES];
    const char *chosen = getenv("TENURE_CUDA_LIBRARY");
    sim_library sim;
    if (!sim_library_open(&sim, error))
        return fail(chosen && *chosen ? EXIT_BAD_USAGE : EXIT_FAILURE, error);
    request->job.sim = &sim;
    int status = run(request);
    request->job.sim = NULL;
    sim_library_close(&sim);
    return status;
}

int simulate_command(int argc, char **argv) {
    simulate_request request = {.job = {.lifetimes = {1, 1, 1, 1}}};
    request.job.links = (tn_simulated_links)TN_SIMULATED_LINKS_INIT;
    int status = parse_request(argc, argv, &request);
    if (status != 0) return status;
    if (request.wants_help) {
        simulate_command_print_help();
        return 0;
    }
    if (request.timeline_path && !simulate_report_takes(request.timeline_path))
        return command_misused(COMMAND,
                               "--timeline %s: expected a name that ends in .json or .html",
                               request.timeline_path);
    status = read_model(&request);
    if (status != 0) return status;
    return request.is_host ? run(&request) : run_simulated(&request);
}
