/* What tenure's commands, and the programs beside it, say of a command line that is wrong; and
 * options that several have. */
#ifndef TENURE_COMMAND_USAGE_H
#define TENURE_COMMAND_USAGE_H

enum { EXIT_BAD_USAGE = 2 };

/* "tenure COMMAND: ...; see `tenure help COMMAND`" on standard error; returns EXIT_BAD_USAGE. */
__attribute__((format(printf, 2, 3))) int command_misused(const char *command, const char *format,
                                                          ...);

/* Of a program of its own: "PROGRAM: WHAT: VALUE (see --help)"; returns EXIT_BAD_USAGE. */
int program_misused(const char *program, const char *what, const char *value);

/* As command_misused, for what getopt_long gave ':' or '?' for. Long options have numbers from
 * `first_long` on, short ones are letters below. */
int command_option_refused(const char *command, int option, int first_long, char **argv);

/* --ordinal's value: 0, or EXIT_BAD_USAGE and *out stays. */
int command_ordinal(const char *command, const char *text, int *out);

#endif
