/* The work that tenure-bench-dist times: sharded stacks of weights, on any driver. */
#ifndef TENURE_DIST_BENCH_H
#define TENURE_DIST_BENCH_H

#include "tenure_ops.h"
#include "tenure_rendezvous.h"
#include "tenure_ring.h"

enum { DIST_BENCH_LAYERS = 8, DIST_BENCH_STACKS = 3, DIST_BENCH_ROUNDS_MAX = 99 };

/* Until a rank is given up: longer than any is held up on a busy machine. */
#define DIST_BENCH_TIMEOUT_US ((uint64_t)120 * 1000 * 1000)

/* Which rank this process is; rank_count 0: its environment says so. */
typedef struct dist_bench_place {
    int rank, rank_count;
    int port, listen_file;
} dist_bench_place;

/* Layers whose weights take turns in a ring. */
typedef struct dist_bench_stack {
    tn_ring *ring;
    tn_tensor weights[DIST_BENCH_LAYERS], shards[DIST_BENCH_LAYERS];
    int units[DIST_BENCH_LAYERS];
} dist_bench_stack;

typedef struct dist_bench {
    tn_rendezvous *ranks; /* NULL: the engine finds the others */
    tn_device *device;
    tn_pool *pool;
    tn_stream stream, side;
    tn_comm *comm;
    tn_scope scope;
    tn_shard_plan *plan;
    dist_bench_stack stacks[DIST_BENCH_STACKS]; /* their rings' buffers are registered otherwise */
    int stack_count;                            /* 1 where the engine registers nothing */
    dist_bench_stack *stack;                    /* that steps are of */
    int64_t width, tokens;
    tn_tensor x, y; /* x quantized */
    tn_tensor whole;
} dist_bench;

typedef struct dist_bench_config {
    tn_driver_kind driver;
    tn_comm_engine engine;
    dist_bench_place place;
    int shares_gpu; /* NCCL: all ranks have the first GPU */
    int is_small;
} dist_bench_config;

/* Device, communicator and operands. */
TN_MUST_USE tn_status dist_bench_open(dist_bench *bench, const dist_bench_config *config);
tn_status dist_bench_close(dist_bench *bench); /* also of one that failed to open */

/* Puts its work on the streams. */
typedef tn_status (*dist_bench_work)(dist_bench *bench, size_t argument);

/* The stacks of weights, which steps and products need. */
TN_MUST_USE tn_status dist_bench_make_stacks(dist_bench *bench);

/* How the buffer of the stack's ring is registered: "no", "buffer" or "window". */
const char *dist_bench_registered(const dist_bench_stack *stack);

/* Every layer in turn; argument 1: the next one is gathered meanwhile. */
TN_MUST_USE tn_status dist_bench_step(dist_bench *bench, size_t has_prefetch);
/* As many products, all of one layer's weight, which stays gathered. */
TN_MUST_USE tn_status dist_bench_products(dist_bench *bench, size_t ignored);
/* An all-gather of so many bytes a rank, up to the most that there is room for. */
TN_MUST_USE tn_status dist_bench_gather(dist_bench *bench, size_t bytes);
size_t dist_bench_gather_bytes(const dist_bench *bench);

/* ---- dist_bench_ranks.c ---------------------------------------------------------------------- */

/* Starts `count` processes of this program, one a rank. 1 in each of them, with its place; 0 in the
 * one that called, once all have ended, with the exit status for it. */
int dist_bench_start_ranks(int count, dist_bench_place *place, int *exit_status);

/* Meets the other ranks as the place or the environment says, for engines that need it. */
TN_MUST_USE tn_status dist_bench_meet(dist_bench *bench, const dist_bench_config *config);

/* All ranks are here, and their streams have done what was put on them. */
TN_MUST_USE tn_status dist_bench_line_up(dist_bench *bench);

/* The first status of any rank that is no success, by rank; this rank's own where there is no
 * rendezvous to ask the others by. */
tn_status dist_bench_worst(dist_bench *bench, tn_status mine);

double dist_bench_now_us(void);

/* Of count times, which are sorted. */
typedef struct dist_bench_spread {
    double median, least, most;
} dist_bench_spread;
dist_bench_spread dist_bench_spread_of(double *times, long count);

#endif
