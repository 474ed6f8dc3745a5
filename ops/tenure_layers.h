/* Tenure: layers, forward and backward, of the ops and with exact lifetimes.
 *
 *     tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
 *     tn_linear_forward_args forward = TN_LINEAR_FORWARD_ARGS_INIT;
 *     forward.x = x, forward.w.weight = weight, forward.w.bias = bias, forward.y = y;
 *     forward.common.scope = op_scope, forward.common.saved_scope = saved_scope;
 *     tn_linear_forward(&forward, &saved, stream);
 *
 *     tn_linear_backward_args backward = TN_LINEAR_BACKWARD_ARGS_INIT;
 *     backward.dy = dy, backward.w = forward.w, backward.dx = dx;
 *     backward.gradient.dweight = main_gradient, backward.gradient.accumulate = 1;
 *     backward.common = forward.common;
 *     tn_linear_backward(&backward, &saved, NULL, stream);
 *
 * Rules for all layers, beside those of tenure_ops.h:
 *
 * - The *recipe* follows from the weight's format. FP8_BLOCK_2D: x and dy are quantized to
 *   FP8_BLOCK_1D, FP8_TENSOR: to FP8_TENSOR with scales of their own amax; x as E4M3, both in the
 *   weight's scale mode. PLAIN: products of PLAIN operands, all of one type. Others are
 *   TN_UNSUPPORTED. The two weights of an MLP have a recipe each.
 * - Each value is, to the bit, that of the ops which the layer is made of, in the same order.
 * - What backward needs and the caller does not hold is *saved*: tensors that forward makes in
 *   common.saved_scope, whose handles it writes when all else is done. Backward frees each in the
 *   stream's order when it succeeds and sets its handle to {0}; closing the scope frees a set that
 *   no backward comes for. Nothing is saved that backward does not read. docs/layers.md lists it.
 * - Between two calls nothing of a layer is alive but what is saved, delayed, and planes of weights
 *   as their policies say. Scratch goes at its last use within a call.
 * - A call that fails has freed all that it made, planes that it derived included, and leaves
 *   `saved` as it was. Before it adds to any gradient, all memory that the call needs is there.
 *   As with ops, an output may not be valid any more if the driver refuses work half-way.
 * - A gradient that is {0} is not wanted; accumulate adds in fp32 and rounds once.
 */
#ifndef TENURE_LAYERS_H
#define TENURE_LAYERS_H

#include "tenure_train.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what layers have in common ------------------------------------------------------------- */

/* The parameters of one product. */
typedef struct tn_layer_weight {
    tn_tensor weight; /* [N, K]; frozen: no gradient of it is wanted, and nothing saved for one */
    tn_tensor bias;   /* PLAIN, N elements; {0}: none */
    /* PLAIN [N, K]: forward quantizes weight's ROW from it first, as tn_quantize does, `skip`
     * included; so over the micro-batches of a step the flag keeps the quantized weight. {0}: ROW
     * is there. Backward reads it for TN_BACKWARD_HIGH_PRECISION only. */
    tn_tensor source;
    tn_tensor skip; /* PLAIN fp32 of one element; {0}: never */
} tn_layer_weight;
#define TN_LAYER_WEIGHT_INIT                                                                       \
    {                                                                                              \
        {0}, {0}, {0}, { 0 }                                                                       \
    }

typedef struct tn_layer_gradient {
    tn_tensor dweight; /* PLAIN [N, K]; {0}, and always if the weight is frozen: not wanted */
    tn_tensor dbias;   /* PLAIN, N elements; {0}: not wanted */
    int accumulate;    /* both are added to */
    int delay;         /* 1: dweight is left to tn_weight_gradient */
} tn_layer_gradient;
#define TN_LAYER_GRADIENT_INIT                                                                     \
    { {0}, {0}, 0, 0 }

/* What backward multiplies. Forward must be told the same, as it decides what is saved. */
typedef enum tn_backward_precision {
    TN_BACKWARD_AS_FORWARD = 0,
    TN_BACKWARD_DEQUANTIZED,   /* dy with the values of forward's quantized operands, in its type */
    TN_BACKWARD_HIGH_PRECISION /* dy with x and w.source, all of one type */
} tn_backward_precision;

typedef struct tn_layer_common {
    tn_scope scope;          /* of scratch */
    tn_scope saved_scope;    /* of what is saved; {0}: no gradient of a weight will be asked for */
    tn_dtype gradient_dtype; /* TN_E5M2: dy is quantized to it; else to E4M3 */
    tn_backward_precision precision;
    /* 1: as little as possible is saved, and backward makes what is missing. Both are told. */
    int recompute;
    /* The weight whose dgrad comes next, of any size: its COL plane is derived on `side` while a
     * product runs, if it is not valid, for one plane more alive at a time. In a forward it is for
     * the last layer, whose dgrad comes first. Where the policy is SCRATCH the slot needs two
     * buffers. That there is no memory or no free buffer is no failure; the next call derives it
     * then. In a capture that call must come in the same one, or `side` is not joined again. */
    tn_tensor next_weight; /* FP8_BLOCK_2D or FP8_TENSOR; {0}, or PLAIN: nothing to derive */
    tn_stream side;        /* another one than the call's stream */
} tn_layer_common;
#define TN_LAYER_COMMON_INIT                                                                       \
    { {0}, {0}, TN_E4M3, TN_BACKWARD_AS_FORWARD, 0, {0}, NULL }

/* ---- delayed weight gradients --------------------------------------------------------------- */

/* What a backward with gradient.delay has left: dweight = dy^T x. */
typedef struct tn_delayed_gradient {
    tn_tensor dy;
    tn_tensor x;
    tn_tensor dweight; /* {0}: nothing is left to do */
    int accumulate;
    int is_callers_dy,
        is_callers_x; /* those that are not destroyed: the caller keeps them so long */
} tn_delayed_gradient;
#define TN_DELAYED_GRADIENT_INIT                                                                   \
    { {0}, {0}, {0}, 0, 0, 0 }

/* Does it, destroys what is the layer's, and sets all to {0}. TN_INVALID_STATE if nothing is left
 * to do. */
TN_API TN_MUST_USE tn_status tn_weight_gradient(tn_delayed_gradient *delayed, tn_scope scope,
                                                tn_stream stream);

/* ---- Linear --------------------------------------------------------------------------------- */

/* y = x w^T + bias. x [M, K] PLAIN, y [M, N] PLAIN of any float type. */
typedef struct tn_linear_forward_args {
    size_t size;
    tn_tensor x;
    tn_layer_weight w;
    tn_tensor y;
    tn_layer_common common;
} tn_linear_forward_args;
#define TN_LINEAR_FORWARD_ARGS_INIT                                                                \
    { sizeof(tn_linear_forward_args), {0}, TN_LAYER_WEIGHT_INIT, {0}, TN_LAYER_COMMON_INIT }

typedef struct tn_linear_saved {
    tn_tensor x; /* quantized; {0}: backward takes the caller's x, or needs none */
} tn_linear_saved;
#define TN_LINEAR_SAVED_INIT                                                                       \
    {                                                                                              \
        { 0 }                                                                                      \
    }

/* saved may be NULL if saved_scope is {0}. */
TN_API TN_MUST_USE tn_status tn_linear_forward(const tn_linear_forward_args *args,
                                               tn_linear_saved *saved, tn_stream stream);

/* dx = dy w, dweight = dy^T x, dbias = the sum of dy over its rows in tn_bias_gradient's order.
 * dgrad reads w's COL plane, deriving it if it is absent, and calls tn_plane_release on it directly
 * after, also on a layer that computes no dgrad. dy is read once for its planes and dbias. */
typedef struct tn_linear_backward_args {
    size_t size;
    tn_tensor dy; /* [M, N] PLAIN */
    tn_layer_weight w;
    /* forward's, where dweight is wanted and nothing was saved: the recipe is PLAIN, `recompute` is
     * set, or `precision` is HIGH_PRECISION; else it is not looked at. */
    tn_tensor x;
    tn_tensor dx; /* [M, K] PLAIN; {0}: not wanted */
    tn_layer_gradient gradient;
    tn_layer_common common;
} tn_linear_backward_args;
#define TN_LINEAR_BACKWARD_ARGS_INIT                                                               \
    {                                                                                              \
        sizeof(tn_linear_backward_args), {0}, TN_LAYER_WEIGHT_INIT, {0}, {0},                      \
            TN_LAYER_GRADIENT_INIT, TN_LAYER_COMMON_INIT                                           \
    }

/* saved may be NULL if nothing was saved, delayed if nothing is delayed. A saved x is freed, or
 * goes to `delayed`, also if no gradient of the weight is wanted. */
TN_API TN_MUST_USE tn_status tn_linear_backward(const tn_linear_backward_args *args,
                                                tn_linear_saved *saved,
                                                tn_delayed_gradient *delayed, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
