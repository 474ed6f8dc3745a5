/* The pages of `tenure report`, each made whole from what a file says or not at all. */
#ifndef TENURE_REPORT_PAGES_H
#define TENURE_REPORT_PAGES_H

#include <stdio.h>

#include <cjson/cJSON.h>

#include "memory_history.h"

#define REPORT_ERROR_BYTES 512

/* What a snapshot or a report of a pool says (docs/formats.md), and the history of a snapshot,
 * which may be NULL. 1 on success; 0 with the reason in error, which has REPORT_ERROR_BYTES, if the
 * file is neither, and then nothing has been written, or if there is no memory. */
int report_pool_page(FILE *stream, const char *name, const cJSON *root, memory_history *history,
                     char *error);

#endif
