/* `tenure replay`: its options, and what it prints. See replay_command.h. */
#include "replay_command.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "options.h"
#include "replay_engine.h"
#include "replay_output.h"

#define COMMAND "replay"

/* Above every character, so that getopt's optopt tells long options from short ones. */
enum {
    OPTION_DRIVER = 256,
    OPTION_MEMORY,
    OPTION_REPEAT,
    OPTION_TRACE,
    OPTION_SNAPSHOT,
    OPTION_JSON,
    OPTION_HELP
};

typedef struct replay_request {
    replay_options options;
    int as_json;
    int wants_help;
} replay_request;

static const char help_text[] =
    "Usage: tenure replay TRACE [options]\n"
    "Plays an allocation trace through a pool of Tenure and reports what it took.\n"
    "\n"
    "TRACE is a file, plain or gzip, or - for standard input. Its first line names the format:\n"
    "  op,id,bytes,stream[,time_us[,address,owner]]   a,1,4096,0 allocates; f,1,, frees\n"
    "  Thread,Time,Action,Pointer,Size,Stream         a log of RMM\n"
    "or a memory snapshot of PyTorch (torch.cuda.memory._dump_snapshot).\n"
    "\n"
    "  --driver sim|host|cuda   simulated GPU (default), CPU memory, or a real GPU\n"
    "  --device-memory SIZE     memory of the device, such as 40GiB (sim: 139GiB, host: 16GiB);\n"
    "                           with cuda, the most that the pool may take\n"
    "  --repeat N               play it N times (at most 64) through one pool; each pass's driver\n"
    "                           calls and times are in the JSON\n"
    "  --trace FILE             write the pool's own trace: what went where\n"
    "  --snapshot FILE          write a snapshot of the pool after the last event\n"
    "  --json                   print JSON\n"
    "  -h, --help               print this\n"
    "\n"
    "Driver time is that of the memory calls. In the JSON, driver_time_first_us is what making "
    "and\n"
    "mapping the handles of the peak once takes, which every job pays; driver_time_after_first_us\n"
    "is the rest.\n"
    "\n"
    "Exit status: 0; 1 if an allocation failed, memory leaked or a race was found, or the device\n"
    "failed; 2 if the trace or an option is wrong, or an output can not be written.\n";

void replay_command_print_help(void) { fputs(help_text, stdout); }

static int take_driver(replay_request *request, const char *name) {
    if (replay_driver_parse(name, &request->options.driver)) return 0;
    return command_misused(COMMAND, "--driver %s: expected sim, host or cuda", name);
}

static int take_memory(replay_request *request, const char *text) {
    size_t bytes = 0;
    if (!tn__parse_size(text, &bytes) || bytes == 0)
        return command_misused(
            COMMAND, "--device-memory %s: expected a size above 0 such as 512MiB or 40GiB", text);
    request->options.device_memory_bytes = bytes;
    return 0;
}

static int take_repeat(replay_request *request, const char *text) {
    char *end = NULL;
    long count = strtol(text, &end, 10);
    if (end == text || *end || count < 1 || count > REPLAY_PASSES_MAX)
        return command_misused(COMMAND, "--repeat %s: expected a number from 1 to %d", text,
                               REPLAY_PASSES_MAX);
    request->options.repeat_count = (uint32_t)count;
    return 0;
}

static int take_option(replay_request *request, int option, char **argv) {
    switch (option) {
    case OPTION_DRIVER: return take_driver(request, optarg);
    case OPTION_MEMORY: return take_memory(request, optarg);
    case OPTION_REPEAT: return take_repeat(request, optarg);
    case OPTION_TRACE: request->options.own_trace_path = optarg; return 0;
    case OPTION_SNAPSHOT: request->options.snapshot_path = optarg; return 0;
    case OPTION_JSON: request->as_json = 1; return 0;
    case 'h':
    case OPTION_HELP: request->wants_help = 1; return 0;
    default: return command_option_refused(COMMAND, option, OPTION_DRIVER, argv);
    }
}

static int take_trace(replay_request *request, int argc, char **argv) {
    if (optind == argc) return command_misused(COMMAND, "no TRACE was given");
    if (optind + 1 < argc)
        return command_misused(COMMAND, "one TRACE was expected, but there is also %s",
                               argv[optind + 1]);
    request->options.trace_path = argv[optind];
    return 0;
}

static int parse_request(int argc, char **argv, replay_request *request) {
    static const struct option long_options[] = {
        {"driver", required_argument, NULL, OPTION_DRIVER},
        {"device-memory", required_argument, NULL, OPTION_MEMORY},
        {"repeat", required_argument, NULL, OPTION_REPEAT},
        {"trace", required_argument, NULL, OPTION_TRACE},
        {"snapshot", required_argument, NULL, OPTION_SNAPSHOT},
        {"json", no_argument, NULL, OPTION_JSON},
        {"help", no_argument, NULL, OPTION_HELP},
        {NULL, 0, NULL, 0}};
    int option = 0;
    optind = 1;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        int status = take_option(request, option, argv);
        if (status != 0) return status;
    }
    return request->wants_help ? 0 : take_trace(request, argc, argv);
}

static int print_result(const replay_request *request, const replay_result *result) {
    if (!request->as_json) return replay_result_print(result, stdout);
    cJSON *json = replay_result_to_json(result);
    int printed = json && json_print(json, stdout);
    cJSON_Delete(json);
    return printed;
}

int replay_command(int argc, char **argv) {
    replay_request request = {.options = REPLAY_OPTIONS_INIT};
    replay_result result;
    int usage = parse_request(argc, argv, &request);
    if (usage != 0) return usage;
    if (request.wants_help) {
        replay_command_print_help();
        return 0;
    }
    request.options.progress_label = "replay";
    replay_status status = replay_run(&request.options, &result);
    if (result.completed && !print_result(&request, &result)) {
        fprintf(stderr, "tenure replay: the result could not be written\n");
        status = REPLAY_BAD_INPUT;
    }
    if (result.message[0]) fprintf(stderr, "tenure replay: %s\n", result.message);
    return (int)status;
}
