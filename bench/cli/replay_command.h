/* `tenure replay`. */
#ifndef TENURE_REPLAY_COMMAND_H
#define TENURE_REPLAY_COMMAND_H

/* argv[0] is the command's name. Returns the exit status: 0, 1 (the job failed), 2 (bad usage or
 * input); with 2 nothing has been written to standard output. */
int replay_command(int argc, char **argv);

void replay_command_print_help(void);

#endif
