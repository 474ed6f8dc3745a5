/* `tenure convert`. */
#ifndef TENURE_CONVERT_COMMAND_H
#define TENURE_CONVERT_COMMAND_H

/* argv[0] is the command's name. Returns the exit status: 0, 1 (memory is short), 2 (bad usage or
 * input, or an output that can not be written); with 2 no file is half-written. */
int convert_command(int argc, char **argv);

void convert_command_print_help(void);

#endif
