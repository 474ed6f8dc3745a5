/* The trainer's model: a byte-level transformer in public calls only, and its optimizer.
 *
 *     h      = table[bytes] + places[0 ... sequence - 1]
 *     for each layer
 *         h  = h + Wo attention(Wqkv norm(h))              causal, RMS norms without bias
 *         h  = h + Wdown swiglu(Wup norm(h))
 *     logits = Whead norm(h)                               256 of them, fp32
 *     loss   = mean of cross entropy with the next byte
 *
 * Every parameter has an fp32 master copy, an fp32 gradient and the two moments of AdamW. What the
 * layers read is its `value`: by recipe
 *
 *              weights of layers      tables, head     activations
 *     FP8      FP8_BLOCK_2D, E4M3     bf16             bf16, quantized 1D in the layers
 *     TENSOR   FP8_TENSOR, E4M3       bf16             bf16, quantized each by its own amax
 *     DELAYED  FP8_TENSOR, E4M3       bf16             bf16, quantized by amaxes of steps before
 *     BF16     bf16                   bf16             bf16
 *     FP32     fp32                   fp32             fp32
 *
 * and the gains of norms are fp32 always. Where that is fp32 the value is the master copy itself.
 * FP8 weights keep a ROW plane, which the optimizer writes (one with a scale of the tensor is
 * quantized behind it); COL is derived for each dgrad into a scratch slot, so that its address is
 * one that a captured graph may hold.
 *
 * Owners are scopes: what the trainer prints is read from their ledgers.
 */
#ifndef TENURE_TRAINER_MODEL_H
#define TENURE_TRAINER_MODEL_H

#include "tenure_ops.h"

/* Returns from the calling function with the status of `call` if that is not TN_OK. */
#define TRAINER_TRY(call)                                                                          \
    do {                                                                                           \
        tn_status trainer_try_status = (call);                                                     \
        if (trainer_try_status != TN_OK) return trainer_try_status;                                \
    } while (0)

typedef enum trainer_recipe {
    TRAINER_FP8 = 0,
    TRAINER_FP8_TENSOR,
    TRAINER_FP8_DELAYED,
    TRAINER_BF16,
    TRAINER_FP32,
    TRAINER_RECIPE_COUNT
} trainer_recipe;

const char *trainer_recipe_name(trainer_recipe recipe);

typedef struct trainer_shape {
    trainer_recipe recipe;
    int layers;
    int64_t hidden;
    int64_t heads;
    int64_t ffn; /* width between up and down */
    int64_t sequence;
    int64_t batch;     /* sequences of a micro-batch */
    int micro_batches; /* of a step: their gradients are added up */
    int recompute;     /* backward computes what forward would have to save */
    float learning_rate;
    float clip; /* largest norm of all gradients; INFINITY: they are not clipped */
    uint64_t seed;
} trainer_shape;

typedef struct trainer_parameter {
    tn_tensor value; /* what is read; the master copy itself where that is fp32 */
    tn_tensor master;
    tn_tensor gradient;
    tn_tensor first, second; /* moments */
    int decays;              /* 0: tables and gains have no weight decay */
    int slot;                /* of delayed scaling: its x, and behind that itself and dy */
} trainer_parameter;

enum { TRAINER_SLOT_X = 0, TRAINER_SLOT_WEIGHT, TRAINER_SLOT_DY, TRAINER_SLOTS };

/* Where parameters are in trainer_model.parameters. */
enum { TRAINER_TABLE = 0, TRAINER_PLACES, TRAINER_LAST_GAIN, TRAINER_HEAD, TRAINER_OUTER_COUNT };
typedef enum trainer_part {
    TRAINER_GAIN_1 = 0,
    TRAINER_QKV,
    TRAINER_PROJECTION,
    TRAINER_GAIN_2,
    TRAINER_UP,
    TRAINER_DOWN,
    TRAINER_PART_COUNT
} trainer_part;

/* One micro-batch: at fixed addresses, so that a graph can read and write them. */
typedef struct trainer_batch {
    tn_tensor tokens, targets; /* TN_BYTE, [batch * sequence] */
    tn_tensor loss;            /* fp32, of each token */
} trainer_batch;

typedef struct trainer_model {
    trainer_shape shape;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_scope root;
    tn_scope columns; /* the slot that COL planes are derived into, and below it: */
    tn_scope values;  /* parameters as they are read */
    tn_scope gradients;
    tn_scope optimizer; /* masters, moments, and what its calls read on the device */
    tn_scope data;      /* batches */
    trainer_parameter *parameters;
    trainer_batch *batches;        /* [micro_batches] */
    tn_tensor places;              /* 0 ... sequence - 1 for each sequence */
    tn_tensor steps;               /* of tn_adamw_advance */
    tn_tensor rate;                /* share of learning_rate that this step takes */
    tn_tensor scale, amax_history; /* of delayed scaling; else {0} */
    tn_tensor square_sums;         /* of all gradients */
    tn_tensor norm;                /* of all gradients, before they are clipped */
    tn_tensor gradient_scale;      /* what clipping makes of them: see tn_clip_factor */
} trainer_model;

/* Weights from the seed, moments 0. On failure nothing is left. */
TN_MUST_USE tn_status trainer_model_create(trainer_model *model, tn_device *device, tn_pool *pool,
                                           tn_stream stream, const trainer_shape *shape);

/* Frees everything; after a failure anywhere too. */
tn_status trainer_model_destroy(trainer_model *model);

/* AdamW with the gradients that are there, clipped by the norm of all of them. */
TN_MUST_USE tn_status trainer_model_update(const trainer_model *model);

int trainer_model_parameter_count(const trainer_shape *shape);
int64_t trainer_model_tokens(const trainer_shape *shape); /* of a micro-batch */
tn_dtype trainer_model_dtype(const trainer_shape *shape); /* of activations */
trainer_parameter *trainer_model_part(const trainer_model *model, int layer, trainer_part part);

/* A PLAIN tensor of rows x cols, or of rows elements if cols is 0. */
TN_MUST_USE tn_status trainer_make(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                                   const char *name, tn_tensor *out);
TN_MUST_USE tn_status trainer_open_scope(tn_scope parent, tn_pool *pool, tn_scope_kind kind,
                                         const char *name, tn_scope *out);

#endif
