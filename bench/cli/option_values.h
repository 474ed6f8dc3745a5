/* What the programs' command lines share: values that are checked as a whole, and where the
 * project's own files are.
 */
#ifndef TENURE_OPTION_VALUES_H
#define TENURE_OPTION_VALUES_H

#include <stddef.h>

#include "tenure_alloc.h"

/* A decimal number from `least` to `most` and nothing after it: 1, else 0 and *out stays. */
int option_count(const char *text, long least, long most, long *out);

/* "auto", "cuda" or "host", likewise. */
int option_driver(const char *text, tn_driver_kind *out);

/* The path of a file of the project, of which this program is two folders below (build/<preset>).
 * 0 if it does not fit in `bytes`. */
int option_project_path(const char *name, char *out, size_t bytes);

/* The last part of a path. */
const char *option_file_name(const char *path);

/* The bytes of a file, which the caller frees; NULL if it can not be read or has fewer than
 * `least`. */
unsigned char *option_read_file(const char *path, size_t least, size_t *bytes);

#endif
