/* `tenure report`. */
#ifndef TENURE_REPORT_COMMAND_H
#define TENURE_REPORT_COMMAND_H

/* argv[0] is the command's name. Returns the exit status: 0, 1 (the job failed), 2 (bad usage or
 * input); with 2 nothing has been written to standard output. */
int report_command(int argc, char **argv);

void report_command_print_help(void);

#endif
