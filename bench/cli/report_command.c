/* `tenure report`: finds out what a file is, and makes a page of it. See report_command.h. */
#include "report_command.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report_pages.h"
#include "trace_reader.h"

enum { EXIT_BAD_USAGE = 2 };

static const char help_text[] =
    "Usage: tenure report FILE\n"
    "Writes one self-contained HTML page about FILE to standard output.\n"
    "\n"
    "FILE is a snapshot of a pool (tn_pool_snapshot_write), a report of one as JSON\n"
    "(tn_pool_report), or an allocation trace (`tenure help replay`; - for standard input).\n"
    "\n"
    "Exit status: 0; 1 if memory is short; 2 if the file or an option is wrong.\n";

void report_command_print_help(void) { fputs(help_text, stdout); }

static int bad_usage(const char *what, const char *word) {
    fprintf(stderr, "tenure report: %s%s; see `tenure help report`\n", what, word);
    return EXIT_BAD_USAGE;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* 1 if the file begins as JSON objects do. What can not be read is left to who reads it. */
static int is_json(const char *path) {
    FILE *file = strcmp(path, "-") == 0 ? NULL : fopen(path, "re");
    int first = EOF;
    if (!file) return 0;
    do {
        first = fgetc(file);
    } while (first == ' ' || first == '\n' || first == '\t' || first == '\r');
    fclose(file);
    return first == '{';
}

/* The whole file with a 0 behind it. */
static char *read_whole(FILE *file, size_t *bytes) {
    size_t room = 1 << 16;
    char *text = malloc(room);
    *bytes = 0;
    while (text) {
        char *grown;
        *bytes += fread(text + *bytes, 1, room - 1 - *bytes, file);
        if (*bytes < room - 1) break;
        room *= 2;
        grown = realloc(text, room);
        if (!grown) free(text);
        text = grown;
    }
    if (text) text[*bytes] = 0;
    return text;
}

static int report_json(const char *path) {
    char error[REPORT_ERROR_BYTES] = "it is no JSON object";
    FILE *file = fopen(path, "re");
    size_t bytes = 0;
    char *text = file ? read_whole(file, &bytes) : NULL;
    int is_unread = !file || ferror(file);
    cJSON *root = NULL;
    int status = EXIT_BAD_USAGE;
    if (file) fclose(file);
    if (is_unread) {
        fprintf(stderr, "tenure report: %s: %s\n", path, strerror(errno));
    } else if (!text) {
        fprintf(stderr, "tenure report: out of host memory\n");
        status = EXIT_FAILURE;
    } else {
        root = cJSON_ParseWithLength(text, bytes);
        if (root && report_pool_page(stdout, path, root, error)) {
            status = 0;
        } else {
            fprintf(stderr, "tenure report: %s: %s\n", path, error);
        }
    }
    cJSON_Delete(root);
    free(text);
    return status;
}

static int report_trace_file(const char *path) {
    char error[TRACE_ERROR_BYTES];
    report_trace *trace = NULL;
    int status = report_trace_read(path, &trace, error);
    if (status == 0) {
        report_trace_page(stdout, strcmp(path, "-") == 0 ? "standard input" : path, trace);
    } else {
        fprintf(stderr, "tenure report: %s\n", error);
    }
    report_trace_free(trace);
    return status;
}

int report_command(int argc, char **argv) {
    const char *path;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        report_command_print_help();
        return 0;
    }
    if (argc < 2) return bad_usage("no file", "");
    path = argv[1];
    if (path[0] == '-' && path[1]) return bad_usage("unknown option ", path);
    if (argc > 2) return bad_usage("unexpected argument ", argv[2]);
    return is_json(path) ? report_json(path) : report_trace_file(path);
}
