/* `tenure report`: finds out what a file is, and makes a page of it. See report_command.h.
 *
 * The page is made whole in memory: what is refused leaves nothing behind, on standard output too.
 */
#include "report_command.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command_usage.h"
#include "history_read.h"
#include "html_page.h"
#include "output_file.h"
#include "pool_history.h"
#include "report_history.h"
#include "report_pages.h"

#define COMMAND "report"

enum { OPTION_OUTPUT = 256, OPTION_ORDINAL, OPTION_HELP };

typedef struct report_request {
    const char *input;
    const char *output;
    int ordinal;
    int wants_help;
} report_request;

static const char help_text[] =
    "Usage: tenure report FILE [options]\n"
    "Writes one self-contained HTML page about FILE: live bytes by owner over time, the map of\n"
    "addresses at any moment, owners, what is left at the end, and where memory ran out.\n"
    "\n"
    "FILE is an allocation trace (`tenure help replay`; - for standard input), a memory snapshot "
    "of\n"
    "PyTorch (torch.cuda.memory._dump_snapshot), a snapshot of a pool (tn_pool_snapshot_write), "
    "or\n"
    "a report of one as JSON (tn_pool_report).\n"
    "\n"
    "  -o, --output PAGE   write the page to this file; without it, to standard output\n"
    "  --ordinal N         the device, where a snapshot of PyTorch has several\n"
    "  -h, --help          print this\n"
    "\n"
    "Exit status: 0; 1 if memory is short; 2 if the file or an option is wrong, or the page can\n"
    "not be written: then a file of that name is as it was.\n";

void report_command_print_help(void) { fputs(help_text, stdout); }

/* ---- options --------------------------------------------------------------------------------- */

static int take_option(report_request *request, int option, char **argv) {
    switch (option) {
    case 'o':
    case OPTION_OUTPUT: request->output = optarg; return 0;
    case OPTION_ORDINAL: return command_ordinal(COMMAND, optarg, &request->ordinal);
    case 'h':
    case OPTION_HELP: request->wants_help = 1; return 0;
    default: return command_option_refused(COMMAND, option, OPTION_OUTPUT, argv);
    }
}

static int parse_request(int argc, char **argv, report_request *request) {
    static const struct option long_options[] = {
        {"output", required_argument, NULL, OPTION_OUTPUT},
        {"ordinal", required_argument, NULL, OPTION_ORDINAL},
        {"help", no_argument, NULL, OPTION_HELP},
        {NULL, 0, NULL, 0}};
    int option = 0;
    optind = 1;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":ho:", long_options, NULL)) != -1) {
        int status = take_option(request, option, argv);
        if (status != 0) return status;
    }
    if (request->wants_help) return 0;
    if (optind == argc) return command_misused(COMMAND, "no file");
    if (optind + 1 < argc)
        return command_misused(COMMAND, "unexpected argument %s", argv[optind + 1]);
    request->input = argv[optind];
    return 0;
}

/* ---- pages ----------------------------------------------------------------------------------- */

static int out_of_memory(void) {
    fprintf(stderr, "tenure report: out of host memory\n");
    return EXIT_FAILURE;
}

static int complain(const char *error, int status) {
    fprintf(stderr, "tenure report: %s\n", error);
    return status;
}

/* A snapshot has a history; a report has sums only. */
static int make_pool_page(const report_request *request, const cJSON *root, FILE *page) {
    char error[HISTORY_ERROR_BYTES] = "";
    memory_history *history = NULL;
    int is_out_of_memory = 0;
    int status = 0;
    if (cJSON_GetObjectItemCaseSensitive(root, "regions") &&
        !pool_history_read(request->input, root, &history, error, &is_out_of_memory)) {
        return complain(error, is_out_of_memory ? EXIT_FAILURE : EXIT_BAD_USAGE);
    }
    if (!report_pool_page(page, request->input, root, history, error)) {
        fprintf(stderr, "tenure report: %s: %s\n", request->input, error);
        status = EXIT_BAD_USAGE;
    }
    history_destroy(history);
    return status;
}

static int make_json_page(const report_request *request, FILE *page) {
    char error[HISTORY_ERROR_BYTES];
    int status = 0;
    size_t bytes = 0;
    char *text = history_read_file(request->input, &bytes, error, &status);
    cJSON *root = text ? cJSON_ParseWithLength(text, bytes) : NULL;
    free(text);
    if (status != 0) return complain(error, status);
    if (root) {
        status = make_pool_page(request, root, page);
    } else {
        fprintf(stderr, "tenure report: %s: it is no JSON object\n", request->input);
        status = EXIT_BAD_USAGE;
    }
    cJSON_Delete(root);
    return status;
}

static int make_history_page(const report_request *request, FILE *page) {
    char error[HISTORY_ERROR_BYTES];
    memory_history *history = NULL;
    history_source source = {"report", request->input, request->ordinal};
    int status = history_read(&source, &history, error);
    int is_trace;
    if (status != 0) return complain(error, status);
    is_trace = strcmp(history->source, "trace") == 0;
    html_page_begin(page, is_trace ? "Allocation trace" : "Memory snapshot of PyTorch");
    html_paragraph(page, "%s",
                   strcmp(request->input, "-") == 0 ? "standard input" : request->input);
    if (!report_history_write(page, history)) status = out_of_memory();
    html_page_end(page);
    history_destroy(history);
    return status;
}

static int write_page(const report_request *request, const char *text, size_t bytes) {
    output_file out;
    char error[OUTPUT_ERROR_BYTES];
    if (!output_begin(&out, request->output, error)) return complain(error, EXIT_BAD_USAGE);
    (void)fwrite(text, 1, bytes, out.stream);
    return output_end(&out, error) ? 0 : complain(error, EXIT_BAD_USAGE);
}

int report_command(int argc, char **argv) {
    report_request request = {.input = "-", .output = "-", .ordinal = ORDINAL_ANY};
    char *text = NULL;
    size_t bytes = 0;
    FILE *page;
    int status = parse_request(argc, argv, &request);
    if (status != 0) return status;
    if (request.wants_help) {
        report_command_print_help();
        return 0;
    }
    page = open_memstream(&text, &bytes);
    if (!page) return out_of_memory();
    status = history_file_kind(request.input) == FILE_JSON ? make_json_page(&request, page)
                                                           : make_history_page(&request, page);
    if (fclose(page) != 0 && status == 0) status = out_of_memory();
    if (status == 0) status = write_page(&request, text, bytes);
    free(text);
    return status;
}
