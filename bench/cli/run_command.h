/* `tenure run`. */
#ifndef TENURE_RUN_COMMAND_H
#define TENURE_RUN_COMMAND_H

/* argv[0] is the command's name. Becomes the program, or returns the exit status: 2 (bad usage, or
 * a file that can not be written), 127 (no such program), 126 (it can not be started); with --check
 * 0 or 1. */
int run_command(int argc, char **argv);

void run_command_print_help(void);

#endif
