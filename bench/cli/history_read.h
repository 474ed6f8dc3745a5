/* A file of any kind as a history: it is told by its first byte what it is. */
#ifndef TENURE_HISTORY_READ_H
#define TENURE_HISTORY_READ_H

#include "memory_history.h"
#include "torch_history.h"

typedef struct history_source {
    const char *command; /* for the progress line */
    const char *path;    /* "-": a trace on standard input */
    int ordinal; /* of the device, or ORDINAL_ANY; snapshots of PyTorch alone have several */
} history_source;

typedef enum file_kind { FILE_TRACE, FILE_PICKLE, FILE_JSON } file_kind;

/* What can not be opened is taken for a trace, whose reader says why; so is a pipe. */
file_kind history_file_kind(const char *path);

/* The whole file with a 0 behind it, which the caller frees; NULL with the reason in error, which
 * has HISTORY_ERROR_BYTES, and *status, the exit status. */
char *history_read_file(const char *path, size_t *bytes, char *error, int *status);

/* The exit status: 0 and the history; 1 or 2 with the reason in error, which has
 * HISTORY_ERROR_BYTES. */
int history_read(const history_source *source, memory_history **out, char *error);

#endif
