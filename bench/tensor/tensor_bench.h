/* The measurements of tenure-bench-tensor: the host's time in leases and planes. */
#ifndef TENURE_TENSOR_BENCH_H
#define TENURE_TENSOR_BENCH_H

#include "tenure_tensor.h"
#include "text_table.h"

typedef struct tensor_bench {
    tn_device *device;
    tn_pool *pool;
    tn_scope scope;
    tn_stream home;   /* that planes are made on */
    tn_stream second; /* that has used them before */
    int batches;
    int pairs; /* in one batch */
    double
        mutex_ns; /* a lock and unlock of an uncontended mutex, measured in turns with the rest */
} tensor_bench;

/* Ends the program if the status is a failure. */
#define TENSOR_TRY(call) tensor_bench_require((call), #call)
void tensor_bench_require(tn_status status, const char *call);

/* tn_lease_begin and tn_lease_end of a warm plane, by access and stream; sets mutex_ns. */
void tensor_bench_leases(tensor_bench *bench, text_table *table);

/* tn_plane_require and tn_plane_drop of a plane whose memory is cached: ns, and driver calls. */
void tensor_bench_derive(const tensor_bench *bench, text_table *table);

#endif
