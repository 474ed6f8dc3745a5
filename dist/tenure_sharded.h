/* Tenure: a model whose weights, gradients and optimizer state are cut over the ranks.
 *
 *     tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
 *     config.scope = scope, config.comm = comm, config.stream = stream;
 *     tn_sharded_create(&config, &model);
 *     for each layer: tn_sharded_unit_add(model, &unit_config, &units[i]);
 *     tn_sharded_seal(model);                               (ring and buckets)
 *     for each step:
 *         for each micro-batch:
 *             for each unit:  tn_sharded_forward_begin(model, unit);
 *                             ... layers read tn_sharded_weight(model, unit, t) ...
 *                             tn_sharded_forward_end(model, unit);
 *             in reverse:     tn_sharded_backward_begin(model, unit);
 *                             ... layers write tn_sharded_gradient(model, unit, t), and add to it
 *                                 if tn_sharded_accumulates(model, unit) ...
 *                             tn_sharded_backward_end(model, unit);
 *         tn_sharded_update(model, &update);                (clip, AdamW, cast: nothing else)
 *     tn_sharded_destroy(model);
 *
 * A *unit* is the tensors that are gathered together, as those of a layer. What there is of it:
 *
 *     shard      on each rank its part of every tensor: FP8 rows with scales, or high precision.
 *                How it is cut tenure_shard.h says, and why by a collective all is gathered. It is
 *                kept, or made of the master copy for each gather (shards_from_masters)
 *     whole      ROW (PLAIN: DATA) of all tensors, in the ring (tenure_ring.h), from a begin to
 *                its end. COL is derived by each dgrad and released by it: the policy is SCRATCH,
 *                so that the largest weight is the most there ever is of it
 *     bucket     the unit's whole gradients, in one of a few buffers that units take in turn: from
 *                its backward_begin until they are reduced, and another reduction is next
 *     reduced    the rank's part of them, from their reduction to the update, in stream order
 *     state      fp32 master copy and moments, of the rank's part
 *
 * So between steps there are shards, states and the ring, and nothing of gradients; in forward no
 * more than what micro-batches before have left to add to. docs/parallel.md has the sum for every
 * moment. Of a frozen tensor there is a shard, and no bucket and no state. Handles of weights and
 * of gradients stay the same for the life of the model.
 *
 * Order on the device. Gathers and reductions run on comm_stream in the order of the calls, beside
 * the layers on `stream`. What comes behind what follows from leases: a bucket is written again by
 * the layers behind the reduction that read it, the ring's buffer behind its last use. No call but
 * unit_add, seal and destroy waits on the host, and when some steps have been alike, so that the
 * pool has found its places for their blocks, none asks the driver for memory.
 *
 * Ranks make the same calls in the same order. The order of begins in the first step is recorded:
 * from then on the unit that comes next is gathered ahead, behind the begin of the one before it,
 * or behind the update before the step; one whose backward comes next stays for it. A step in
 * another order works, gathers on demand from there on, and is counted.
 *
 * Sums. A gradient is the sum over ranks in rank order, in fp32, rounded once (MPI and TCP; NCCL
 * in its own order), of what each rank has; over micro-batches as tn_gradient_sum says.
 *
 * Failure changes nothing, and the call can be made again, also by one rank alone: it goes on
 * behind what it has put for all ranks, puts nothing twice, and the others wait for it meanwhile.
 * A rank that does not make it again says so by tn_comm_abort, and the communicator has failed on
 * all. Only what fails in unit_add behind the comparison of plans does that by itself. A
 * communicator that has failed stays so. After a failure that all ranks have met at the same place,
 * or with a failed communicator, tn_sharded_abandon gives up the step: the weights are those of the
 * last update. An update that fails when it has begun to change them can not be given up, only be
 * made again.
 *
 * Where `stream` or comm_stream captures a graph all that gathers, reduces or updates is
 * TN_UNSUPPORTED, and neither model nor capture has changed.
 *
 * Threads: one at a time.
 */
#ifndef TENURE_SHARDED_H
#define TENURE_SHARDED_H

#include "tenure_dist.h"
#include "tenure_ring.h"
#include "tenure_shard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tn_sharded_model tn_sharded_model;

/* Where the gradients of several micro-batches are added up, with n ranks: */
typedef enum tn_gradient_sum {
    TN_GRADIENT_SUM_SHARDED = 0, /* each reduced at once, and the rank's part of it added up in
                                  * fp32: 4/n bytes for each element, and a reduction each */
    TN_GRADIENT_SUM_WHOLE        /* whole, in gradient_dtype, in a bucket of each unit's own, and
                                  * reduced with the last one: no communication before */
} tn_gradient_sum;

/* What crosses the wire. */
typedef enum tn_gradient_wire {
    TN_GRADIENT_WIRE_PLAIN = 0, /* gradient_dtype */
    TN_GRADIENT_WIRE_FP8        /* E4M3 with a scale for each 128 elements in a row of them, of each
                                 * rank's part of each tensor; summed in fp32 in rank order */
} tn_gradient_wire;

typedef struct tn_sharded_config {
    size_t size;
    tn_scope scope;        /* the model's own scope is in it */
    tn_comm *comm;         /* must outlive the model */
    tn_stream stream;      /* of the layers and the update */
    tn_stream comm_stream; /* NULL: one of the model's own */
    const char *name;      /* copied; NULL: "sharded" */
    size_t ring_bytes;     /* as budget_bytes and slots of tn_ring_config */
    int ring_slots;
    int gradient_slots;      /* buckets that units take in turn; 0: 2 */
    tn_dtype gradient_dtype; /* TN_FP32 or TN_BF16 */
    tn_gradient_sum gradient_sum;
    tn_gradient_wire gradient_wire;
    int micro_batches;       /* of a step; 0: 1 */
    int keep_after_forward;  /* 1: gathered from forward to backward, one gather a micro-batch */
    int keep_after_backward; /* 1: gathered until the step's last backward of it, one a step */
    tn_shard_costs costs;    /* that plans are chosen by */
    tn_tensor step;          /* PLAIN fp32 of 3, as tn_adamw_advance has left it: copied, for a
                              * model that was trained before; {0}: no step was made */
    tn_ring_register ring_registration; /* as registration of tn_ring_config */
    /* 1: a unit's shard is made of the rank's master copy for each gather, and not by the update:
     * to the same bits, in memory that all units share, for a cast more a step. So it is where all
     * tensors train and no scale depends on what other ranks have: of PLAIN weights, and FP8 that
     * is not FLAT. Other units keep theirs. From the first gather on a master is then written by
     * updates only, as what was gathered ahead is not gathered again for other writes: the unit's
     * begin, and an update with it, is TN_INVALID_STATE on the ranks that have a part of it. */
    int shards_from_masters;
} tn_sharded_config;
#define TN_SHARDED_CONFIG_INIT                                                                     \
    {                                                                                              \
        sizeof(tn_sharded_config), {0}, NULL, NULL, NULL, NULL, 0, 0, 0, TN_FP32,                  \
            TN_GRADIENT_SUM_SHARDED, TN_GRADIENT_WIRE_PLAIN, 0, 0, 0, {0, 0, 0, 0}, {0},           \
            TN_RING_REGISTER_AUTO, 0                                                               \
    }

TN_API TN_MUST_USE tn_status tn_sharded_create(const tn_sharded_config *config,
                                               tn_sharded_model **out);

/* Ends it, and all its tensors, also in the middle of a step: TN_IN_USE if one is leased, then
 * nothing has changed, or has views, then only the step is given up. Waits for its collectives,
 * whatever has become of them: the communicator's failure is what it returns when all has ended. If
 * the driver fails, or its ring can not end yet (TN_IN_USE: tn_ring_destroy), it takes no more
 * calls but this one again. NULL: a no-op. */
TN_API tn_status tn_sharded_destroy(tn_sharded_model *model);

/* ---- units ---------------------------------------------------------------------------------- */

/* A tensor of a unit. `initial` is read in the order of the model's stream and not kept: PLAIN,
 * fp32, bf16 or fp16, rows x cols, the same on all ranks (of a model that was trained before: its
 * master copy; first and second then are its moments, fp32). An element of an array: no size. */
typedef struct tn_sharded_tensor {
    const char *name;
    tn_format format; /* that the layers read: PLAIN, or FP8_BLOCK_2D */
    tn_dtype dtype;
    tn_scale_mode scale_mode;
    int64_t rows, cols;
    int frozen; /* 1: neither gradient nor state; never changes */
    /* FP8_BLOCK_2D, 1: shard and ring have it in bf16, tn_sharded_source, which the layers quantize
     * for each use (tn_layer_weight.source); what they made of it goes with the unit's end, and
     * backward_begin makes COL where it is read. 0: they have FP8. */
    int high_precision;
    tn_tensor initial;
    tn_tensor first, second; /* {0}: 0 */
} tn_sharded_tensor;

typedef struct tn_sharded_unit_config {
    size_t size;
    const char *name; /* copied; NULL: "unit N" */
    const tn_sharded_tensor *tensors;
    int tensor_count;
    tn_shard_layout layout;
    int backward_reads_nothing; /* 1: its backward makes no dgrad and computes nothing again, as an
                                 * embedding's: it is not gathered for it */
} tn_sharded_unit_config;
#define TN_SHARDED_UNIT_CONFIG_INIT                                                                \
    { sizeof(tn_sharded_unit_config), NULL, NULL, 0, TN_SHARD_AUTO, 0 }

/* Cuts the tensors, and casts the rank's part of them; *out counts from 0. All ranks call, and
 * plans are compared, so that ranks that would cut in different ways are told before they do. What
 * this rank has no memory for shows before that, and the call can be made again. */
TN_API TN_MUST_USE tn_status tn_sharded_unit_add(tn_sharded_model *model,
                                                 const tn_sharded_unit_config *config, int *out);

/* No unit can be added any more: takes the ring. */
TN_API TN_MUST_USE tn_status tn_sharded_seal(tn_sharded_model *model);

/* Handles that stay: the weight that layers read; what it is quantized from (high_precision, else
 * {0}); its gradient, PLAIN of gradient_dtype, rows x cols ({0} if it is frozen). {0} for a unit or
 * tensor that is not there. */
TN_API tn_tensor tn_sharded_weight(const tn_sharded_model *model, int unit, int tensor);
TN_API tn_tensor tn_sharded_source(const tn_sharded_model *model, int unit, int tensor);
TN_API tn_tensor tn_sharded_gradient(const tn_sharded_model *model, int unit, int tensor);

/* The plan of a unit, and the rank's part of what it has: shard (TN_BYTE, of no elements if other
 * ranks have them; {0}: it is made for each gather), and master copy, moments and reduced gradient
 * of its trainable tensors as the plan packs them (tn_shard_piece), with zeros behind each and up
 * to whole rows of 128 ({0}: all are frozen, or other ranks have them). The gradient's plane is
 * there from its reduction to the update, which ends it: TN_IN_USE, if it is leased then. */
typedef struct tn_sharded_unit_info {
    size_t size;
    const char *name;
    const tn_shard_plan *plan;
    int tensor_count;
    tn_tensor shard;
    tn_tensor master, first, second;
    tn_tensor gradient;    /* reduced: fp32, or gradient_dtype if it is reduced once a step */
    size_t gradient_bytes; /* of its bucket */
    int micro_batches;     /* whose backward has ended in this step */
} tn_sharded_unit_info;
#define TN_SHARDED_UNIT_INFO_INIT                                                                  \
    { sizeof(tn_sharded_unit_info), NULL, NULL, 0, {0}, {0}, {0}, {0}, {0}, 0, 0 }
TN_API TN_MUST_USE tn_status tn_sharded_unit_info_get(const tn_sharded_model *model, int unit,
                                                      tn_sharded_unit_info *out);

/* ---- a step --------------------------------------------------------------------------------- */

/* From here the unit's weights can be leased, on any stream. TN_INVALID_STATE for a unit that has
 * begun and not ended. */
TN_API TN_MUST_USE tn_status tn_sharded_forward_begin(tn_sharded_model *model, int unit);
TN_API TN_MUST_USE tn_status tn_sharded_forward_end(tn_sharded_model *model, int unit);

/* The same, and the unit has a bucket: its gradients are to be written, all of them, or added to.
 * A forward of the unit may be computed again within. TN_IN_USE if more units are in backward than
 * there are gradient_slots. */
TN_API TN_MUST_USE tn_status tn_sharded_backward_begin(tn_sharded_model *model, int unit);
TN_API int tn_sharded_accumulates(const tn_sharded_model *model, int unit);

/* Puts the reduction on comm_stream, behind what wrote the gradients. TN_INVALID_STATE names a
 * gradient that was not written; under TN_GRADIENT_SUM_WHOLE in the first micro-batch only, as from
 * then on what was written before is there. */
TN_API TN_MUST_USE tn_status tn_sharded_backward_end(tn_sharded_model *model, int unit);

typedef struct tn_sharded_update_args {
    size_t size;
    float learning_rate; /* and so on: as those of tn_adamw */
    float beta1, beta2;
    float epsilon;
    float weight_decay;
    float gradient_scale; /* 0: 1 / (ranks * micro-batches) */
    float max_norm;       /* of all gradients, scaled; 0: no clipping, and no norm is made */
    float amax_epsilon;   /* of the cast */
    tn_tensor rate;       /* as that of tn_adamw */
} tn_sharded_update_args;
#define TN_SHARDED_UPDATE_ARGS_INIT                                                                \
    {                                                                                              \
        sizeof(tn_sharded_update_args), 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.0f, 0.0f, 0.0f, { 0 } \
    }

/* Every trainable unit has had its micro-batches (else TN_INVALID_STATE names one that has not).
 * The norm is that of the shards' sums (tn_square_sums), reduced over ranks, so that its last bits
 * depend on how many there are; the factor stays on the device. If it fails in the middle, the next
 * call goes on from there: no unit is updated twice. Until one has succeeded begins and
 * tn_sharded_abandon are TN_INVALID_STATE. NULL for args after tn_sharded_update_ahead. Behind it
 * the unit that steps begin with is gathered for the next one. */
TN_API TN_MUST_USE tn_status tn_sharded_update(tn_sharded_model *model,
                                               const tn_sharded_update_args *args);

/* Before the last micro-batch's backward: each unit is updated where its backward ends then, on
 * comm_stream behind its reduction and beside the layers of the next one, and its reduced gradient
 * goes with its bucket. Bits are those of the update of all. `args` is copied; what it names stays
 * until the step is over. max_norm is 0, as a norm is of all gradients. The step ends with
 * tn_sharded_update(model, NULL); once a unit has begun to be updated it can not be given up
 * (tn_sharded_abandon). */
TN_API TN_MUST_USE tn_status tn_sharded_update_ahead(tn_sharded_model *model,
                                                     const tn_sharded_update_args *args);

/* PLAIN fp32 of one element: the norm that the last update with a max_norm found; 0 before. */
TN_API tn_tensor tn_sharded_norm(const tn_sharded_model *model);

/* Gives up what the step has done so far: units that have begun end, gradients count for nothing.
 * All ranks call, at the same place of the step: it is a collective, by which ranks that are at
 * others find out, and then the communicator has failed. TN_IN_USE if a weight or a gradient is
 * leased. If it fails in the middle nothing else of the step can be called until it has succeeded
 * (TN_INVALID_STATE): the others have given up. */
TN_API TN_MUST_USE tn_status tn_sharded_abandon(tn_sharded_model *model);

/* ---- what it takes -------------------------------------------------------------------------- */

/* Exact, on this rank, and known before the seal. */
typedef struct tn_sharded_report {
    size_t size;
    size_t shard_bytes;       /* that are kept */
    size_t made_shard_bytes;  /* the largest of those that are made for each gather */
    size_t state_bytes;       /* masters and moments */
    size_t gradient_bytes;    /* reduced gradients, when all are there */
    size_t bucket_bytes;      /* buckets at most, and what a reduction needs beside them */
    size_t sharded_sum_bytes; /* gradient_bytes + bucket_bytes under either way to add up */
    size_t whole_sum_bytes;
    size_t ring_bytes;      /* 0 before the seal */
    uint64_t gather_wire;   /* that this rank sends: one gather of every unit */
    uint64_t reduce_wire;   /* one reduction of every unit */
    uint64_t update_wire;   /* an update with a norm */
    uint64_t steps;         /* updates */
    uint64_t gathers_ahead; /* begins that found the unit gathered, or under way */
    uint64_t gathers_late;  /* that did not */
    uint64_t reductions;
    uint64_t strays; /* begins out of the recorded order */
} tn_sharded_report;
#define TN_SHARDED_REPORT_INIT                                                                     \
    { sizeof(tn_sharded_report), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
TN_API TN_MUST_USE tn_status tn_sharded_report_get(const tn_sharded_model *model,
                                                   tn_sharded_report *out);

#ifdef __cplusplus
}
#endif
#endif
