/* `tenure run`: a program as it is, with its CUDA memory from Tenure's pools. */
#include "run_command.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "options.h"
#include "run_check.h"
#include "run_program.h"

enum { BAD_USAGE = 2, PATH_BYTES = 4096 };

typedef struct run_options {
    const char *pool;
    const char *limit;
    const char *trace;
    const char *report;
    int free_waits;
    int check;
    int probe;
} run_options;

void run_command_print_help(void) {
    puts("Usage: tenure run [options] [--] PROGRAM [ARGUMENT...]\n"
         "       tenure run --check [options] [[--] PROGRAM [ARGUMENT...]]\n"
         "Runs a program with its CUDA memory (cudaMalloc, cudaMallocAsync, cuMemAlloc, ...) from\n"
         "Tenure's pools. The program is not changed, and its children run likewise.\n\n"
         "  --pool KIND     where the pools' memory comes from: plain (default), vmm or async; or\n"
         "                  none: nothing is taken over, and all is recorded\n"
         "  --limit SIZE    most that the pools of a process hold; what the program sees as the\n"
         "                  device's memory\n"
         "  --trace FILE    write every allocation and free to FILE: `tenure replay` plays it.\n"
         "                  Children of the program put their process number into the name\n"
         "  --report FILE   write figures to FILE at exit, likewise\n"
         "  --free-waits    cudaFree waits for the device, as without Tenure\n"
         "  --check         run it, say what was taken over, and end with status 0 if anything\n"
         "                  was; without a PROGRAM the drop-in checks itself on device 0\n"
         "  -h, --help      print this\n\n"
         "The exit status is the program's; 127 if there is none, 126 if it can not be started.\n"
         "TENURE_DISABLE=1 switches everything off, TENURE_VERBOSE=1 says when it is active.");
}

/* ---- the command line ------------------------------------------------------------------------ */

typedef struct value_row {
    const char *name;
    const char **value;
} value_row;

static int refuse(const char *option, const char *why) {
    fprintf(stderr, "tenure run: %s%s\n", option, why);
    return 0;
}

/* An option with a value, "--name VALUE" or "--name=VALUE". 1: it was one; 0: none of these; -1:
 * its value is missing. */
static int read_value(int argc, char **argv, int *at, const value_row *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(rows[i].name);
        if (strncmp(argv[*at], rows[i].name, length) != 0) continue;
        if (argv[*at][length] == '=') {
            *rows[i].value = argv[*at] + length + 1;
            return 1;
        }
        if (argv[*at][length]) continue;
        if (*at + 1 >= argc) {
            fprintf(stderr, "tenure run: option %s needs a value\n", rows[i].name);
            return -1;
        }
        *rows[i].value = argv[++*at];
        return 1;
    }
    return 0;
}

static int read_flag(const char *argument, run_options *out) {
    if (strcmp(argument, "--check") == 0) return out->check = 1;
    if (strcmp(argument, "--free-waits") == 0) return out->free_waits = 1;
    if (strcmp(argument, "--probe") == 0) return out->probe = 1;
    return 0;
}

/* The place of the program in argv; 0: what is wrong has been said. */
static int read_options(int argc, char **argv, run_options *out) {
    const value_row rows[] = {{"--pool", &out->pool},
                              {"--limit", &out->limit},
                              {"--trace", &out->trace},
                              {"--report", &out->report}};
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; at++) {
        int found;
        if (strcmp(argv[at], "--") == 0) return at + 1;
        if (read_flag(argv[at], out)) continue;
        found = read_value(argc, argv, &at, rows, sizeof rows / sizeof *rows);
        if (found < 0) return 0;
        if (!found) {
            fprintf(stderr, "tenure run: unknown option %s; see `tenure help run`\n", argv[at]);
            return 0;
        }
    }
    return at;
}

/* ---- the environment ------------------------------------------------------------------------- */

static int set_pool(const char *pool) {
    for (int i = 0; tn__run_pool_choices[i]; i++) {
        if (strcmp(pool, tn__run_pool_choices[i]) == 0) {
            return setenv("TENURE_RUN_POOL", pool, 1) == 0;
        }
    }
    fprintf(stderr, "tenure run: --pool %s: expected plain, vmm, async or none\n", pool);
    return 0;
}

static int set_limit(const char *limit) {
    size_t bytes = 0;
    if (tn__parse_size(limit, &bytes) && bytes > 0) return setenv("TENURE_LIMIT", limit, 1) == 0;
    fprintf(stderr, "tenure run: --limit %s: expected a size above 0, such as 20GiB\n", limit);
    return 0;
}

static int check_values(const run_options *options) {
    if (options->check && options->report) {
        return refuse("--check", ": makes reports of its own and takes no --report");
    }
    if (options->pool && !set_pool(options->pool)) return 0;
    if (options->limit && !set_limit(options->limit)) return 0;
    return !options->free_waits || setenv("TENURE_RUN_FREE_WAITS", "1", 1) == 0;
}

/* A file of an earlier run goes once nothing else can be refused: else it would look like this
 * one's if the program makes none. What is no file, such as /dev/null, stays. */
static int set_output(const char *option, const char *name, const char *variable) {
    char path[PATH_BYTES];
    if (!name) return 1;
    if (!run_program_check_output(option, name, path, sizeof path)) return 0;
    if (run_program_is_regular(path) && unlink(path) != 0 && errno != ENOENT && errno != EPERM &&
        errno != EBUSY) {
        fprintf(stderr, "tenure run: %s %s: %s\n", option, name, strerror(errno));
        return 0;
    }
    return setenv(variable, path, 1) == 0;
}

static int set_outputs(const run_options *options) {
    char path[PATH_BYTES];
    if (options->report &&
        !run_program_check_output("--report", options->report, path, sizeof path))
        return 0;
    return set_output("--trace", options->trace, "TENURE_RUN_TRACE") &&
           set_output("--report", options->report, "TENURE_RUN_REPORT");
}

static int start(const char *path, char **argv) {
    char process[32];
    int error;
    snprintf(process, sizeof process, "%ld", (long)getpid());
    if (setenv("TENURE_RUN_PROCESS", process, 1) != 0) return EXIT_FAILURE;
    execv(path, argv);
    error = errno;
    fprintf(stderr, "tenure run: %s: %s\n", path, strerror(error));
    return error == ENOENT ? RUN_NO_PROGRAM : RUN_NO_START;
}

int run_command(int argc, char **argv) {
    run_options options = {0};
    char drop_in[PATH_BYTES], path[PATH_BYTES];
    int first, status, has_program;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        run_command_print_help();
        return EXIT_SUCCESS;
    }
    first = read_options(argc, argv, &options);
    if (!first) return BAD_USAGE;
    if (options.probe) return run_probe();
    has_program = first < argc;
    if (!has_program && !options.check) {
        refuse("no PROGRAM", " was given; see `tenure help run`");
        return BAD_USAGE;
    }
    if (!check_values(&options)) return BAD_USAGE;
    status = has_program ? run_program_find(argv[first], path, sizeof path) : 0;
    if (status != 0) return status;
    if (!run_program_drop_in(drop_in, sizeof drop_in)) return EXIT_FAILURE;
    if (!set_outputs(&options)) return BAD_USAGE;
    if (!run_program_preload(drop_in)) return EXIT_FAILURE;
    if (options.check) return run_check(has_program ? path : NULL, argv + first);
    return start(path, argv + first);
}
