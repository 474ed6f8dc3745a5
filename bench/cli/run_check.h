/* `tenure run --check`: whether the drop-in is active in a program, shown by what it took over. */
#ifndef TENURE_RUN_CHECK_H
#define TENURE_RUN_CHECK_H

/* Runs the program (NULL: the probe below) under the environment that is set, and says for each of
 * its processes that used CUDA what was taken over. The exit status: 0 if anything was. */
int run_check(const char *path, char **argv);

/* What the check runs when it is given no program: finds the driver's calls in each way that
 * programs do, and allocates and frees by them. */
int run_probe(void);

#endif
