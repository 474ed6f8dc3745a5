/* How fast gathers and reductions of a unit go, by where their buffers come from. */
#ifndef TENURE_DIST_WIRE_H
#define TENURE_DIST_WIRE_H

#include <stdio.h>

#include "dist_bench.h"
#include "dist_pattern.h"
#include "tenure_registration.h"

enum { DIST_WIRE_VARIANTS = 8, DIST_WIRE_WORDS = 256 };

/* One kind of buffer, made and named in dist_wire_buffers.c: a block of which the first half is the
 * whole unit, the second this rank's part. */
typedef struct dist_wire_buffer {
    const char *name;
    tn_comm *comm;
    int owns_comm;
    tn_pool *pool;
    char *whole, *part;
    size_t half_bytes;
    tn_registration *registration;
    uint64_t register_us; /* that registering took; 0: it is not registered */
    tn_status status;     /* TN_OK on all ranks, or why it is not to be had */
    char words[DIST_WIRE_WORDS];
} dist_wire_buffer;

typedef struct dist_wire_options {
    long rounds;
    int is_small;
    const char *only; /* names of buffers, between commas; NULL: all */
    FILE *csv;        /* NULL: none */
} dist_wire_options;

/* What is asked for of the list: names that there are not make it 0. */
int dist_wire_names_are_known(const char *only);
int dist_wire_is_wanted(const char *only, const char *name);

const char *dist_wire_buffer_name(int variant);

/* Makes buffer `variant` for halves of that size. Every rank calls, and a buffer that can not be
 * had says why. */
void dist_wire_buffer_open(dist_bench *bench, int variant, size_t half_bytes,
                           dist_wire_buffer *out);
tn_status dist_wire_buffer_close(dist_bench *bench, dist_wire_buffer *buffer);

/* The table of bandwidths, on rank 0, and its lines in the CSV file. */
TN_MUST_USE tn_status dist_wire_run(dist_bench *bench, const dist_wire_options *options);

/* A layer's FP8 weights, the rows alone against rows and columns (dist_planes.c). */
TN_MUST_USE tn_status dist_planes_run(dist_bench *bench, const dist_wire_options *options);

/* The head of the CSV file, and a line of it: us of `bytes`, or what stands in the way. */
void dist_wire_csv_head(FILE *csv);
void dist_wire_csv_line(dist_bench *bench, FILE *csv, const char *what, const char *buffers,
                        size_t bytes, const dist_bench_spread *us, double bus_bytes_per_us,
                        const char *status);

#endif
