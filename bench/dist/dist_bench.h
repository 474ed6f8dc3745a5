/* The work that tenure-bench-dist times: a sharded stack of weights, on any driver. */
#ifndef TENURE_DIST_BENCH_H
#define TENURE_DIST_BENCH_H

#include "tenure_ops.h"
#include "tenure_ring.h"

enum { DIST_BENCH_LAYERS = 8 };

typedef struct dist_bench {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream, side;
    tn_comm *comm;
    tn_scope scope;
    tn_shard_plan *plan;
    tn_ring *ring;
    int64_t width, tokens;
    tn_tensor weights[DIST_BENCH_LAYERS], shards[DIST_BENCH_LAYERS];
    int units[DIST_BENCH_LAYERS];
    tn_tensor x, y; /* x quantized */
    tn_tensor whole;
} dist_bench;

TN_MUST_USE tn_status dist_bench_open(dist_bench *bench, tn_driver_kind driver, int is_small);
tn_status dist_bench_close(dist_bench *bench); /* also of one that failed to open */

/* Puts its work on the streams. */
typedef tn_status (*dist_bench_work)(dist_bench *bench, size_t argument);

/* Every layer in turn; argument 1: the next one is gathered meanwhile. */
TN_MUST_USE tn_status dist_bench_step(dist_bench *bench, size_t has_prefetch);
/* As many products, all of one layer's weight, which stays gathered. */
TN_MUST_USE tn_status dist_bench_products(dist_bench *bench, size_t ignored);
/* An all-gather of so many bytes a rank, up to the most that there is room for. */
TN_MUST_USE tn_status dist_bench_gather(dist_bench *bench, size_t bytes);
size_t dist_bench_gather_bytes(const dist_bench *bench);

#endif
