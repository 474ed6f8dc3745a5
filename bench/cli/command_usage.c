/* Command lines that are wrong: see command_usage.h. */
#include "command_usage.h"

#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>

#include "option_values.h"

enum { ORDINAL_MAX = 1023 };

int command_misused(const char *command, const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "tenure %s: ", command);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "; see `tenure help %s`\n", command);
    return EXIT_BAD_USAGE;
}

int program_misused(const char *program, const char *what, const char *value) {
    fprintf(stderr, "%s: %s: %s (see --help)\n", program, what, value);
    return EXIT_BAD_USAGE;
}

/* getopt_long leaves optopt 0 for an unknown long option, the option's own value for one that was
 * given a value it does not take, and the letter for an unknown short option. */
int command_option_refused(const char *command, int option, int first_long, char **argv) {
    const char *word = argv[optind - 1];
    if (option == ':') return command_misused(command, "option %s needs a value", word);
    if (optopt == 0) return command_misused(command, "unknown option %s", word);
    if (optopt >= first_long) return command_misused(command, "%s: it takes no value", word);
    return command_misused(command, "unknown option -%c", optopt);
}

int command_ordinal(const char *command, const char *text, int *out) {
    long number = 0;
    if (!option_count(text, 0, ORDINAL_MAX, &number))
        return command_misused(command, "--ordinal %s: expected a number from 0 to %d", text,
                               ORDINAL_MAX);
    *out = (int)number;
    return 0;
}
