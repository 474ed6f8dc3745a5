/* What tenure-bench-sharded measures: a training step of a stack of transformer layers whose
 * weights, gradients and optimizer state are cut over the ranks (tenure_sharded.h).
 *
 *     h = x                                                        one fixed batch
 *     for each layer     h = h + Wo mix(Wqkv norm(h))              RMS norms, no bias
 *                        h = h + Wdown (silu(g) * u)               (g, u) = Wup norm(h)
 *     loss = sum of h * dy                                         dy fixed: backward begins so
 *
 * There is no embedding and no head. `mix` is causal attention of sequences, or what costs next to
 * nothing beside the products: silu(a) * b of both halves of Wqkv's value. So that either one reads
 * the same weights, there are half as many heads of keys and values as of queries: Wqkv has
 * heads * D + 2 (heads / 2) * D = 2 * hidden rows.
 *
 * A *place* is where a rank is: device, pool, stream, communicator. A *job* is a model there with
 * the data of one or more ranks, each a micro-batch.
 */
#ifndef TENURE_SHARDED_BENCH_H
#define TENURE_SHARDED_BENCH_H

#include "sim_library.h"
#include "tenure_layers.h"
#include "tenure_rendezvous.h"
#include "tenure_sharded.h"

/* Returns from the calling function with the status of `call` if that is not TN_OK. */
#define SHARDED_TRY(call)                                                                          \
    do {                                                                                           \
        tn_status sharded_try_status = (call);                                                     \
        if (sharded_try_status != TN_OK) return sharded_try_status;                                \
    } while (0)

enum { SHARDED_LAYERS_MAX = 64, SHARDED_RANKS_MAX = 8, SHARDED_ROUNDS_MAX = 99 };

typedef struct sharded_shape {
    int layers;
    int64_t hidden, heads, ffn;
    int64_t tokens;   /* of a rank */
    int64_t sequence; /* of attention; 0: mix is the gate */
    int is_fp8;       /* weights are FP8_BLOCK_2D; else bf16 */
    int has_prefetch; /* 0: the ring has one slot */
    tn_dtype gradient_dtype;
    tn_shard_layout layout;
    int shards_from_masters;
    int update_ahead; /* behind each reduction; 0: all units when the passes have ended */
} sharded_shape;

/* ---- places ---------------------------------------------------------------------------------- */

typedef struct sharded_place {
    tn_device *device;
    tn_device_info info;
    tn_pool *pool;
    tn_stream stream;
    tn_rendezvous *rendezvous; /* NULL: ranks are MPI's, or simulated */
    tn_comm *comm;
    sim_library sim; /* closed: a real device, or the host */
} sharded_place;

/* engine: TN_COMM_MPI, or TN_COMM_NCCL by a rendezvous; then, if they share it, all ranks have the
 * first GPU. After a failure, too, there is to be a close. */
TN_MUST_USE tn_status sharded_place_open(sharded_place *place, tn_driver_kind driver,
                                         tn_comm_engine engine, int shares_gpu);

/* One of the ranks on a simulated device: no data, and all bytes. */
TN_MUST_USE tn_status sharded_place_open_simulated(sharded_place *place, int rank, int rank_count);
tn_status sharded_place_close(sharded_place *place);

/* What is taken of the device's memory, by anybody; 0 where the driver has none. */
TN_MUST_USE tn_status sharded_place_driver_bytes(const sharded_place *place, size_t *out);

/* ---- jobs ------------------------------------------------------------------------------------ */

typedef enum sharded_part {
    SHARDED_GAIN_1 = 0,
    SHARDED_QKV,
    SHARDED_PROJECTION,
    SHARDED_GAIN_2,
    SHARDED_UP,
    SHARDED_DOWN,
    SHARDED_PARTS
} sharded_part;

/* What forward leaves for backward. */
typedef struct sharded_layer {
    tn_tensor sum_1, sum_2; /* what the norms read; sum_1 of the first layer is the input */
    tn_tensor qkv, mixed, log_sum;
    tn_norm_linear_saved qkv_saved;
    tn_linear_saved projection_saved;
    tn_norm_mlp_saved mlp_saved;
} sharded_layer;

typedef struct sharded_job {
    const sharded_place *place;
    const sharded_shape *shape;
    tn_comm *comm; /* that the model is cut over: the place's, or of this rank alone */
    int micro_batches;
    tn_scope root, data, saved, scratch;
    tn_tensor x[SHARDED_RANKS_MAX], dy[SHARDED_RANKS_MAX]; /* of each micro-batch */
    tn_sharded_model *model;
    int units[SHARDED_LAYERS_MAX];
    sharded_layer layers[SHARDED_LAYERS_MAX];
} sharded_job;

/* Micro-batch i has the data of rank first_rank + i. After a failure, too, there is to be a
 * close. */
TN_MUST_USE tn_status sharded_job_open(sharded_job *job, const sharded_place *place, tn_comm *comm,
                                       const sharded_shape *shape, int first_rank,
                                       int micro_batches);
tn_status sharded_job_close(sharded_job *job);

int64_t sharded_part_rows(const sharded_shape *shape, sharded_part part);
int64_t sharded_part_cols(const sharded_shape *shape, sharded_part part);

TN_MUST_USE tn_status sharded_make(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                                   const char *name, tn_tensor *out);
TN_MUST_USE tn_status sharded_drop(const sharded_job *job, tn_tensor *tensor);

/* bf16 of about normal values; on a simulated device nothing has any. */
TN_MUST_USE tn_status sharded_make_random(const sharded_place *place, tn_scope scope, int64_t rows,
                                          int64_t cols, float deviation, uint64_t seed,
                                          tn_tensor *out);

/* ---- passes ---------------------------------------------------------------------------------- */

/* A layer's work runs on the weights of `unit`. The value so far is x + residual. */
typedef struct sharded_pass {
    sharded_job *job;
    int micro_batch;
    tn_tensor x, residual; /* forward; x is the job's at first, and there is no residual */
    tn_tensor gradient;    /* backward; the job's dy at first */
} sharded_pass;

TN_MUST_USE tn_status sharded_layer_forward(sharded_pass *pass, int layer, int unit);
TN_MUST_USE tn_status sharded_layer_backward(sharded_pass *pass, int layer, int unit);

/* Puts forward and backward of all micro-batches on the streams. values, if not NULL, gets x of
 * the last layer of each of them, which are the caller's then, in scratch. */
TN_MUST_USE tn_status sharded_step_passes(sharded_job *job, tn_tensor *values);
TN_MUST_USE tn_status sharded_step_update(sharded_job *job);
TN_MUST_USE tn_status sharded_step(sharded_job *job); /* both */

/* ---- what is found --------------------------------------------------------------------------- */

typedef struct sharded_result {
    double step_us; /* medians */
    /* Without communication: all layers, on weights that are there; and the update by itself. */
    double layers_us, update_us;
    uint64_t live_bytes, peak_bytes, reserved_bytes; /* of the pool; live: between steps */
    uint64_t driver_bytes;
    uint64_t wire_bytes; /* that the rank sends in a step */
    uint64_t planned_live_bytes, planned_peak_bytes, planned_wire_bytes;
} sharded_result;

/* What the same job does on a simulated device. */
TN_MUST_USE tn_status sharded_plan(const sharded_shape *shape, int rank, int rank_count,
                                   sharded_result *result);

TN_MUST_USE tn_status sharded_measure(const sharded_place *place, const sharded_shape *shape,
                                      int rounds, sharded_result *result);

/* Times the products' algorithms, and keeps the fastest for the jobs that follow. */
TN_MUST_USE tn_status sharded_tune(const sharded_place *place, const sharded_shape *shape);

/* Some steps on all ranks, and on this rank alone with the data of all: *differences counts the
 * elements of this rank's masters, and of the stack's value for its data, whose bits are not the
 * same. None are with MPI, and with two ranks of NCCL, where there is only one way to add.
 * Gradients are fp32 here, whatever the shape says. */
TN_MUST_USE tn_status sharded_check(const sharded_place *place, const sharded_shape *shape,
                                    uint64_t *differences);

#endif
