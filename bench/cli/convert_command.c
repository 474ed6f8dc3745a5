/* `tenure convert`: one kind of history into another. See convert_command.h. */
#include "convert_command.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "history_owners.h"
#include "history_read.h"
#include "history_write.h"
#include "output_file.h"

#define COMMAND "convert"

enum { OPTION_TO = 256, OPTION_ORDINAL, OPTION_HELP };

/* In the order in which a name is tried. */
typedef enum target { TO_NOTHING, TO_RMM, TO_TRACE, TO_PYTORCH, TO_CHROME } target;

typedef struct convert_request {
    target to;
    int ordinal;
    int wants_help;
    const char *input;
    const char *output;
} convert_request;

static const char help_text[] =
    "Usage: tenure convert INPUT OUTPUT [options]\n"
    "Writes the history of an allocator as a file of another kind.\n"
    "\n"
    "INPUT is an allocation trace (`tenure help replay`; - for standard input), a memory snapshot\n"
    "of PyTorch (torch.cuda.memory._dump_snapshot), or a snapshot of a pool\n"
    "(tn_pool_snapshot_write). OUTPUT is a file, or - for standard output; what it is to be is "
    "told\n"
    "by its name, or by --to:\n"
    "  trace     .csv .csv.gz     a trace for `tenure replay`\n"
    "  pytorch   .pickle .pkl     a memory snapshot for PyTorch's viewer (pytorch.org/memory_viz)\n"
    "                             and torch.cuda._memory_viz\n"
    "  rmm       .rmm.csv         a log of RMM, for its replay benchmark (or .rmm.csv.gz)\n"
    "  chrome    .json .json.gz   events for Perfetto (ui.perfetto.dev) and chrome://tracing\n"
    "\n"
    "  --to KIND       rmm, trace, pytorch or chrome, whatever the name\n"
    "  --ordinal N     the device, where a snapshot of PyTorch has several\n"
    "  -h, --help      print this\n"
    "\n"
    "Exit status: 0; 1 if memory is short; 2 if the input or an option is wrong, or the output "
    "can\n"
    "not be written: then a file of that name is as it was.\n";

void convert_command_print_help(void) { fputs(help_text, stdout); }

/* ---- options --------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    const char *endings[2];
} targets[] = {[TO_RMM] = {"rmm", {".rmm.csv", ".rmm.csv.gz"}},
               [TO_TRACE] = {"trace", {".csv", ".csv.gz"}},
               [TO_PYTORCH] = {"pytorch", {".pickle", ".pkl"}},
               [TO_CHROME] = {"chrome", {".json", ".json.gz"}}};

static int take_target(convert_request *request, const char *name) {
    for (int to = TO_RMM; to <= TO_CHROME; to++) {
        if (strcmp(name, targets[to].name) != 0) continue;
        request->to = (target)to;
        return 0;
    }
    return command_misused(COMMAND, "--to %s: expected rmm, trace, pytorch or chrome", name);
}

static int take_option(convert_request *request, int option, char **argv) {
    switch (option) {
    case OPTION_TO: return take_target(request, optarg);
    case OPTION_ORDINAL: return command_ordinal(COMMAND, optarg, &request->ordinal);
    case 'h':
    case OPTION_HELP: request->wants_help = 1; return 0;
    default: return command_option_refused(COMMAND, option, OPTION_TO, argv);
    }
}

static int ends_in(const char *text, const char *ending) {
    size_t length = strlen(text);
    size_t ending_length = strlen(ending);
    return length >= ending_length && strcmp(text + length - ending_length, ending) == 0;
}

static int take_files(convert_request *request, int argc, char **argv) {
    if (argc - optind < 2)
        return command_misused(COMMAND, "INPUT and OUTPUT were expected, but there %s",
                               argc == optind ? "is none" : "is only one file");
    if (argc - optind > 2)
        return command_misused(COMMAND, "INPUT and OUTPUT were expected, but there is also %s",
                               argv[optind + 2]);
    request->input = argv[optind];
    request->output = argv[optind + 1];
    for (int to = TO_RMM; to <= TO_CHROME && request->to == TO_NOTHING; to++) {
        for (int i = 0; i < 2; i++) {
            if (ends_in(request->output, targets[to].endings[i])) request->to = (target)to;
        }
    }
    if (request->to != TO_NOTHING) return 0;
    return command_misused(COMMAND, "the name %s does not tell what it is to be; name it with --to",
                           request->output);
}

static int parse_request(int argc, char **argv, convert_request *request) {
    static const struct option long_options[] = {
        {"to", required_argument, NULL, OPTION_TO},
        {"ordinal", required_argument, NULL, OPTION_ORDINAL},
        {"help", no_argument, NULL, OPTION_HELP},
        {NULL, 0, NULL, 0}};
    int option = 0;
    optind = 1;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        int status = take_option(request, option, argv);
        if (status != 0) return status;
    }
    return request->wants_help ? 0 : take_files(request, argc, argv);
}

/* ---- the work -------------------------------------------------------------------------------- */

static int write_history(const convert_request *request, memory_history *history, FILE *stream) {
    switch (request->to) {
    case TO_PYTORCH: return history_write_torch(stream, history);
    case TO_RMM: history_write_rmm(stream, history); return 1;
    case TO_CHROME: return history_name_by_size(history) && history_write_chrome(stream, history);
    default: history_write_trace(stream, history); return 1;
    }
}

static int write_output(const convert_request *request, memory_history *history) {
    output_file out;
    char error[OUTPUT_ERROR_BYTES];
    if (!output_begin(&out, request->output, error)) {
        fprintf(stderr, "tenure convert: %s\n", error);
        return EXIT_BAD_USAGE;
    }
    if (!write_history(request, history, out.stream)) {
        output_abandon(&out);
        fprintf(stderr, "tenure convert: out of host memory\n");
        return EXIT_FAILURE;
    }
    if (output_end(&out, error)) return 0;
    fprintf(stderr, "tenure convert: %s\n", error);
    return EXIT_BAD_USAGE;
}

int convert_command(int argc, char **argv) {
    convert_request request = {.ordinal = ORDINAL_ANY};
    memory_history *history = NULL;
    char error[HISTORY_ERROR_BYTES];
    int status = parse_request(argc, argv, &request);
    if (status != 0) return status;
    if (request.wants_help) {
        convert_command_print_help();
        return 0;
    }
    history_source source = {"convert", request.input, request.ordinal};
    status = history_read(&source, &history, error);
    if (status != 0) {
        fprintf(stderr, "tenure convert: %s\n", error);
        return status;
    }
    if (request.to == TO_PYTORCH && !history->has_addresses && history->block_count > 0) {
        fprintf(stderr,
                "tenure convert: %s has no addresses, which PyTorch's viewer needs; make a trace "
                "that has: `tenure replay %s --trace placed.csv.gz`\n",
                request.input, request.input);
        status = EXIT_BAD_USAGE;
    } else {
        status = write_output(&request, history);
    }
    history_destroy(history);
    return status;
}
