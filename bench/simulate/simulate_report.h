/* What a simulation has found, as a table, as JSON, and as a timeline. */
#ifndef TENURE_SIMULATE_REPORT_H
#define TENURE_SIMULATE_REPORT_H

#include <stdio.h>

#include "simulate_job.h"

/* Each is 1 on success, 0 if the stream has failed or there is no memory. */
int simulate_report_text(const simulate_result *result, FILE *stream);
int simulate_report_json(const simulate_result *result, FILE *stream);

/* By the end of its name: .json is a trace for chrome://tracing or ui.perfetto.dev, .html a page of
 * its own. */
int simulate_report_takes(const char *path);
int simulate_report_timeline(const simulate_result *result, const char *path, FILE *stream);

#endif
