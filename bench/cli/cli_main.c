/* The `tenure` command: finds the command and runs it.
 *
 * Exit status of every command: 0, 1 (the job failed), 2 (bad usage or input, or an output that can
 * not be written). Messages go to
 * standard error, results to standard output.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert_command.h"
#include "replay_command.h"
#include "report_command.h"
#include "run_command.h"
#include "simulate_command.h"
#include "tenure_alloc.h"

enum { EXIT_BAD_USAGE = 2 };

typedef struct command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv);
    void (*print_help)(void);
} command;

static int options_command(int argc, char **argv);
static void options_command_print_help(void);
static int help_command(int argc, char **argv);
static void print_help(void);

static const command commands[] = {
    {"replay", "play an allocation trace and report what it took", replay_command,
     replay_command_print_help},
    {"report", "make a page of a trace or a snapshot", report_command, report_command_print_help},
    {"convert", "write a trace or a snapshot as a file of another kind", convert_command,
     convert_command_print_help},
    {"run", "run a program with its CUDA memory from Tenure's pools", run_command,
     run_command_print_help},
    {"simulate", "run a training step of a described model on simulated ranks", simulate_command,
     simulate_command_print_help},
    {"options", "print every option of the library, its value and where that came from",
     options_command, options_command_print_help},
    {"help", "print this, or the help of a command", help_command, print_help},
};
enum { COMMAND_COUNT = sizeof(commands) / sizeof(commands[0]) };

static void print_help(void) {
    puts("Usage: tenure COMMAND [...]\n"
         "       tenure --version\n\nCommands:");
    for (int i = 0; i < COMMAND_COUNT; i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].summary);
    puts("\n"
         "  --version  print the version\n"
         "  -h, --help print this\n"
         "\n"
         "`tenure help COMMAND` says more.");
}

static const command *find_command(const char *name) {
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(name, commands[i].name) == 0) return &commands[i];
    }
    fprintf(stderr, "tenure: unknown %s %s; expected", *name == '-' ? "option" : "command", name);
    for (int i = 0; i < COMMAND_COUNT; i++)
        fprintf(stderr, "%s %s",
                i == 0                  ? ""
                : i + 1 < COMMAND_COUNT ? ","
                                        : " or",
                commands[i].name);
    fprintf(stderr, "; see `tenure help`\n");
    return NULL;
}

static int too_many(const char *name, const char *surplus) {
    fprintf(stderr, "tenure %s: unexpected argument %s; see `tenure help`\n", name, surplus);
    return EXIT_BAD_USAGE;
}

static int is_help(const char *argument) {
    return strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
}

static int help_command(int argc, char **argv) {
    if (argc > 2) return too_many("help", argv[2]);
    if (argc == 1 || is_help(argv[1])) {
        print_help();
        return 0;
    }
    const command *found = find_command(argv[1]);
    if (!found) return EXIT_BAD_USAGE;
    found->print_help();
    return 0;
}

static void options_command_print_help(void) {
    puts("Usage: tenure options\n"
         "Prints every option of the library: its environment variable, its value, where the\n"
         "value came from, and what it does.\n"
         "\n"
         "  -h, --help               print this");
}

static int options_command(int argc, char **argv) {
    if (argc == 2 && is_help(argv[1])) {
        options_command_print_help();
        return 0;
    }
    if (argc > 1) return too_many("options", argv[1]);
    size_t bytes = tn_options_describe(NULL, 0) + 1;
    char *text = malloc(bytes);
    if (!text) {
        fprintf(stderr, "tenure options: out of host memory\n");
        return EXIT_FAILURE;
    }
    (void)tn_options_describe(text, bytes);
    fputs(text, stdout);
    free(text);
    return 0;
}

static int run(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "tenure: no command; see `tenure help`\n");
        return EXIT_BAD_USAGE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        if (argc > 2) return too_many("--version", argv[2]);
        printf("tenure %s\n", tn_version());
        return 0;
    }
    if (is_help(argv[1])) return help_command(argc - 1, argv + 1);
    const command *found = find_command(argv[1]);
    return found ? found->run(argc - 1, argv + 1) : EXIT_BAD_USAGE;
}

int main(int argc, char **argv) {
    int status = run(argc, argv);
    /* A full disk shows only now. Where the output goes is the caller's, as the input is. */
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    fprintf(stderr, "tenure: cannot write to standard output: %s\n",
            errno ? strerror(errno) : "an earlier write has failed");
    return EXIT_BAD_USAGE;
}
