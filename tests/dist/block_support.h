/* A layer of a transformer, made of public calls, over weights that somebody else provides: norm,
 * queries, keys and values, attention, projection; norm, MLP. Its saved set is one scope. */
#ifndef TENURE_BLOCK_SUPPORT_H
#define TENURE_BLOCK_SUPPORT_H

#include "tenure_layers.h"

typedef struct block_shape {
    int64_t hidden, ffn, heads;
    int64_t sequence, tokens;
} block_shape;

enum {
    BLOCK_GAIN_1 = 0, /* [1, hidden] */
    BLOCK_QKV,        /* [3 hidden, hidden] */
    BLOCK_PROJECTION, /* [hidden, hidden] */
    BLOCK_GAIN_2,     /* [1, hidden] */
    BLOCK_UP,         /* [ffn, hidden] */
    BLOCK_DOWN,       /* [hidden, ffn] */
    BLOCK_PARTS
};

const char *block_part_name(int part);
int block_part_is_product(int part);
int64_t block_part_rows(const block_shape *shape, int part);
int64_t block_part_cols(const block_shape *shape, int part);

/* What a layer reads, and where its gradients go ({0}: frozen). */
typedef struct block_weights {
    tn_tensor weight[BLOCK_PARTS];
    tn_tensor source[BLOCK_PARTS]; /* {0}: weights are quantized already */
    tn_tensor gradient[BLOCK_PARTS];
    int accumulate;
} block_weights;

typedef struct block_run {
    const block_shape *shape;
    tn_scope scratch;
    tn_stream stream;
} block_run;

typedef struct block {
    tn_scope saved; /* x and all below */
    tn_tensor x, qkv, attended, log_sum, sum;
    tn_norm_linear_saved qkv_saved;
    tn_linear_saved projection_saved;
    tn_norm_mlp_saved mlp_saved;
} block;

/* PLAIN bf16 [tokens, cols]. */
tn_tensor block_tensor(const block_run *run, tn_scope scope, int64_t cols, const char *name);

/* x moves into `saved`, a new scope below `parent`; returns the layer's value, in scratch. */
tn_tensor block_forward(const block_run *run, const block_weights *weights, tn_scope parent,
                        tn_tensor x, block *out);

/* The half before the MLP by itself, of b->x and with what it saves in b->saved: the projection's
 * value, to which x is not added. Backward takes the gradient of the sum of both, which ends. */
tn_tensor block_attention_forward(const block_run *run, const block_weights *weights, block *b);
tn_tensor block_attention_backward(const block_run *run, const block_weights *weights,
                                   tn_tensor dsum, int wants_dx, block *b);

/* Frees what forward saved, but x; and makes it again. */
void block_drop(const block_run *run, block *b);
void block_recompute(const block_run *run, const block_weights *weights, block *b);

/* Bytes that forward leaves: in bf16 (is_fp8 0) or with FP8 products; frozen: bits of parts. */
size_t block_saved_bytes(const block_shape *shape, int is_fp8, unsigned frozen);

/* dy ends; returns dx in scratch, {0} if it is not wanted. The saved set ends. */
tn_tensor block_backward(const block_run *run, const block_weights *weights, tn_tensor dy,
                         int wants_dx, block *b);

#endif
