/* What `tenure run` does with the program and the environment that it starts it in. */
#ifndef TENURE_RUN_PROGRAM_H
#define TENURE_RUN_PROGRAM_H

#include <stddef.h>

enum { RUN_NO_PROGRAM = 127, RUN_NO_START = 126 };

/* The file that the shell would start for `name`. 0, or RUN_NO_PROGRAM or RUN_NO_START with the
 * words on standard error. */
int run_program_find(const char *name, char *out, size_t bytes);

/* The drop-in, beside libtenure. 0 with the words if it is not there, or LD_PRELOAD can not have it
 * because there is a space or a colon in its path. */
int run_program_drop_in(char *out, size_t bytes);

/* Puts the drop-in behind what LD_PRELOAD has already. 0: out of memory. */
int run_program_preload(const char *drop_in);

/* An absolute path of a file that can be written: what is in it stays, and none is left that was
 * not there. 0 with the words. */
int run_program_check_output(const char *option, const char *name, char *out, size_t bytes);

/* Whether there is a file, which can be taken away and made anew: no device, pipe or folder. */
int run_program_is_regular(const char *path);

#endif
