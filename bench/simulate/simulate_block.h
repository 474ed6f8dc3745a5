/* A layer's passes over one micro-batch, and what forward leaves for backward.
 *
 *     h = h + projection(attention(queries, keys, values of norm(h)))
 *     h = h + mlp(norm(h))                      or, with experts: + experts(norm(h)) + shared(...)
 *
 * `pass` has what runs from layer to layer: in forward x and the residual that it is added to, in
 * backward the gradient. Between layers they are of this rank's tokens.
 */
#ifndef TENURE_SIMULATE_BLOCK_H
#define TENURE_SIMULATE_BLOCK_H

#include "simulate_rank.h"

typedef struct simulate_block {
    tn_tensor sum_1, sum_2;      /* what the norms read */
    tn_tensor normed_2, rstd_2;  /* with experts */
    tn_tensor query_low, kv_low; /* with kv_rank: what queries, keys and values come out of */
    tn_tensor qkv, attended, log_sum;
    tn_norm_linear_saved product_saved; /* of qkv */
    tn_linear_saved query_up_saved, kv_up_saved, projection_saved;
    tn_norm_mlp_saved mlp_saved;
    tn_tensor spread;        /* with bf16 experts: rows that they were given */
    tn_tensor expert_hidden; /* of them, gate and up */
    tn_grouped_saved up_saved, down_saved;
    tn_tensor shared_hidden;
    tn_linear_saved shared_up_saved, shared_down_saved;
} simulate_block;

typedef struct simulate_pass {
    simulate_rank *rank;
    tn_tensor x;         /* forward: to be added to the residual */
    tn_tensor residual;  /* {0} before the first layer of a model */
    tn_tensor gradient;  /* backward */
    simulate_unit *unit; /* whose gradients are written */
    int microbatch;
} simulate_pass;

/* `next` is the layer that the pass comes to after this one; NULL: none. */
TN_MUST_USE tn_status simulate_block_forward(simulate_pass *pass, simulate_layer *layer,
                                             simulate_layer *next, simulate_block *block);
TN_MUST_USE tn_status simulate_block_backward(simulate_pass *pass, simulate_layer *layer,
                                              simulate_layer *next, simulate_block *block);

/* ---- between the files of a block ------------------------------------------------------------ */

tn_layer_common simulate_common(const simulate_rank *rank);
tn_layer_weight simulate_layer_weight(const simulate_weight *weight);
/* Whether gradients of the pass's unit are added to. */
int simulate_accumulates(const simulate_pass *pass);
tn_layer_gradient simulate_layer_gradient(const simulate_pass *pass, const simulate_weight *weight);

/* Where x + residual goes that the norm reads: a saved tensor; of a model's first norm x. */
TN_MUST_USE tn_status simulate_make_sum(simulate_pass *pass, tn_tensor *sum);
/* The norm of x + residual, which `sum` holds from then on. */
tn_layer_norm simulate_norm(const simulate_pass *pass, const simulate_weight *gain, tn_tensor sum);
tn_layer_norm_gradient simulate_norm_gradient(const simulate_pass *pass,
                                              const simulate_weight *gain, tn_tensor sum,
                                              tn_tensor dx);

/* x and the residual have become `sum`. */
TN_MUST_USE tn_status simulate_advance(simulate_pass *pass, tn_tensor sum);
/* `sum` has been read for the last time, and dx is the gradient from now on. */
TN_MUST_USE tn_status simulate_retreat(simulate_pass *pass, tn_tensor *sum, tn_tensor dx);

TN_MUST_USE tn_status simulate_attention_forward(simulate_pass *pass, simulate_layer *layer,
                                                 simulate_block *block);
TN_MUST_USE tn_status simulate_attention_backward(simulate_pass *pass, simulate_layer *layer,
                                                  simulate_block *block);
TN_MUST_USE tn_status simulate_mlp_forward(simulate_pass *pass, simulate_layer *layer,
                                           simulate_block *block);
TN_MUST_USE tn_status simulate_mlp_backward(simulate_pass *pass, simulate_layer *layer,
                                            simulate_block *block);
TN_MUST_USE tn_status simulate_experts_forward(simulate_pass *pass, simulate_layer *layer,
                                               simulate_block *block);
TN_MUST_USE tn_status simulate_experts_backward(simulate_pass *pass, simulate_layer *layer,
                                                simulate_block *block);

#endif
