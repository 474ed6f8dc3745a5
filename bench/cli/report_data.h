/* What the script of a page draws, as JSON within the page.
 *
 * The curves have at most CURVE_BUCKETS stretches of events, each with what every owner had at the
 * moment when all together had most, and the least of all: so every extreme is exact, whatever the
 * length. The CURVE_TRACKS owners with most have a curve of their own. Of blocks the BLOCKS_MAX
 * largest are there one by one; numbers of 7 bits a byte, in base 64 (report_script.js reads them).
 */
#ifndef TENURE_REPORT_DATA_H
#define TENURE_REPORT_DATA_H

#include <stdio.h>

#include "history_owners.h"

#define CURVE_BUCKETS 4096
#define CURVE_TRACKS  11 /* and one for all others */
#define BLOCKS_MAX    (256 * 1024)
#define TIMES_MAX     (1024 * 1024) /* of longer histories every second event has one, or fewer */

typedef struct report_curve {
    uint32_t bucket_count;
    uint32_t stride; /* events of a bucket */
    uint32_t track_count;
    double *stacks; /* track_count of each bucket */
    double *most;
    double *least;
    double *reserved; /* the most in the bucket; NULL: not known */
} report_curve;

/* 0 if there is no memory. */
int report_curve_make(const memory_history *history, const history_owners *owners,
                      report_curve *out);
void report_curve_deinit(report_curve *curve);

/* 0 if there is no memory: then the stream has a part of it. */
int report_data_write(FILE *stream, const memory_history *history, const history_owners *owners,
                      const report_curve *curve);

#endif
