/* The pages of `tenure report`, each made whole from what a file says or not at all. */
#ifndef TENURE_REPORT_PAGES_H
#define TENURE_REPORT_PAGES_H

#include <stdio.h>

#include <cjson/cJSON.h>

#define REPORT_ERROR_BYTES 512

/* What a snapshot or a report of a pool says (docs/formats.md). 1 on success; 0 with the reason in
 * error, which has REPORT_ERROR_BYTES, if it is neither: then nothing has been written. */
int report_pool_page(FILE *stream, const char *name, const cJSON *root, char *error);

/* How the live bytes of a trace go. */
typedef struct report_trace report_trace;

/* Reads the whole trace. The exit status of the command if that fails: 1 or 2, with the reason in
 * error; 0 on success. */
int report_trace_read(const char *path, report_trace **out, char *error);
void report_trace_page(FILE *stream, const char *name, const report_trace *trace);

/* NULL is a no-op. */
void report_trace_free(report_trace *trace);

#endif
