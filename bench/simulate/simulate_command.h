/* `tenure simulate`: runs a training step of a described model on simulated ranks. */
#ifndef TENURE_SIMULATE_COMMAND_H
#define TENURE_SIMULATE_COMMAND_H

/* The exit status of the command. */
int simulate_command(int argc, char **argv);
void simulate_command_print_help(void);

#endif
