/* One layer of the trainer's transformer, forward and backward: see trainer_model.h for formulas.
 *
 *     forward    x, residual   ->  x', residual'       the layer's input is x + residual, and so is
 *     backward   d             <-  d'                  its output: each sum is made where the next
 *                                                      norm reads it, and is saved once
 */
#ifndef TENURE_TRAINER_BLOCK_H
#define TENURE_TRAINER_BLOCK_H

#include "tenure_layers.h"
#include "trainer_trail.h"

typedef struct trainer_block {
    tn_tensor sum_1, sum_2; /* what the two norms normalized */
    tn_norm_linear_saved qkv_saved;
    tn_tensor qkv, attended, log_sum;
    tn_linear_saved projection_saved;
    tn_norm_mlp_saved mlp_saved;
} trainer_block;

/* A pass over one micro-batch. */
typedef struct trainer_pass {
    const trainer_model *model;
    tn_scope saved, scratch;
    trainer_trail *trail;  /* NULL: nobody keeps a list */
    trainer_block *blocks; /* [layers] */
    int is_training;       /* 0: nothing is saved */
    int accumulates;       /* gradients are added to what is there */
    tn_tensor x, residual; /* forward */
    int is_first_sum;      /* the residual is no sum that a norm has saved */
    tn_tensor gradient;    /* backward: of x and of the residual; {0} at first */
} trainer_pass;

TN_MUST_USE tn_status trainer_block_forward(trainer_pass *pass, int layer);
TN_MUST_USE tn_status trainer_block_backward(trainer_pass *pass, int layer);

/* y = weight norm(x + residual), and back: dy to weight's and gain's gradients and pass->gradient.
 * Of a layer's queries, keys and values, and of the head. */
TN_MUST_USE tn_status trainer_product_forward(trainer_pass *pass, const trainer_parameter *gain,
                                              const trainer_parameter *weight, tn_tensor y,
                                              tn_tensor *sum, tn_norm_linear_saved *saved);
TN_MUST_USE tn_status trainer_product_backward(trainer_pass *pass, const trainer_parameter *gain,
                                               const trainer_parameter *weight, tn_tensor dy,
                                               tn_tensor *sum, tn_norm_linear_saved *saved);

/* ---- what the parts of a pass share ---------------------------------------------------------- */

/* [tokens, cols] of the activations' type. */
TN_MUST_USE tn_status trainer_pass_make(const trainer_pass *pass, tn_scope scope, int64_t cols,
                                        const char *name, tn_tensor *out);

/* Frees it in stream order and forgets it. */
TN_MUST_USE tn_status trainer_pass_drop(const trainer_pass *pass, tn_tensor *tensor);

/* The sub-step of this name is over; layer -1: of no layer. */
TN_MUST_USE tn_status trainer_pass_note(const trainer_pass *pass, const char *name, int layer);

#endif
