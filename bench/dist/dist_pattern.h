/* Contents that a collective can not bring by chance, written to and checked in device memory. */
#ifndef TENURE_DIST_PATTERN_H
#define TENURE_DIST_PATTERN_H

#include "tenure_alloc.h"

typedef enum dist_pattern_kind {
    DIST_WORDS,   /* 64-bit words, each other by rank and place */
    DIST_NUMBERS, /* bf16 numbers 0 to 12 by rank and place, whose sums over 21 ranks are exact */
    DIST_SUMS     /* those sums, over rank_count ranks */
} dist_pattern_kind;

typedef struct dist_pattern {
    dist_pattern_kind kind;
    int rank;       /* WORDS, NUMBERS */
    int rank_count; /* SUMS */
    size_t first;   /* byte of the pattern that the memory begins with: a multiple of 8 */
} dist_pattern;

/* Pinned memory that patterns go through. */
typedef struct dist_stage {
    tn_device *device;
    tn_stream stream;
    tn_pool *pool;
    unsigned char *memory;
} dist_stage;

TN_MUST_USE tn_status dist_stage_open(dist_stage *stage, tn_device *device, tn_stream stream);
tn_status dist_stage_close(dist_stage *stage); /* also of one that failed to open */

/* bytes: a multiple of 8. Both wait for the stream. */
TN_MUST_USE tn_status dist_pattern_write(const dist_stage *stage, const dist_pattern *pattern,
                                         void *address, size_t bytes);
/* TN_CORRUPT_INPUT, and standard error has the first byte that differs. */
TN_MUST_USE tn_status dist_pattern_check(const dist_stage *stage, const dist_pattern *pattern,
                                         const void *address, size_t bytes);

#endif
