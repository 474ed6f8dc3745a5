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
 *   FP8_BLOCK_1D, FP8_TENSOR: to FP8_TENSOR with scales of their own amax, or by delayed scaling; x
 *   as E4M3, both in the weight's scale mode. PLAIN: products of PLAIN operands, all of one type.
 *   Others are TN_UNSUPPORTED. The two weights of an MLP have a recipe each.
 * - Each value is, to the bit, that of the ops which the layer is made of, in the same order.
 * - What backward needs and the caller does not hold is *saved*: tensors that forward makes in
 *   common.saved_scope, whose handles it writes when all else is done. Backward frees each in the
 *   stream's order when it succeeds and sets its handle to {0}; one that someone else has under a
 *   lease then ends with its scope. Closing the scope frees a set that no backward comes for.
 *   Nothing is saved that backward does not read. docs/layers.md lists it.
 * - Between two calls nothing of a layer is alive but what is saved, delayed, and planes of weights
 *   as their policies say. Scratch goes at its last use within a call.
 * - A call that fails has freed all that it made, planes that it derived included, and leaves
 *   `saved` as it was. Before it adds to any gradient, all memory that the call needs is there.
 *   As with ops, an output may not be valid any more if the driver refuses work half-way.
 *   A weight that has a source keeps the ROW that was quantized from it, if the call came so far:
 *   its values are those that were asked for, and what they replaced is not kept.
 * - A gradient that is {0} is not wanted; accumulate adds as tn_gemm and tn_bias_gradient do.
 * - No output of a backward shares memory with a parameter (weight, source, bias, gamma, beta), nor
 *   an output of an MLP's forward with a source.
 */
#ifndef TENURE_LAYERS_H
#define TENURE_LAYERS_H

#include "tenure_train.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what layers have in common ------------------------------------------------------------- */

/* Delayed scaling of one operand, as tn_quantize takes it and tn_scale_update keeps it. */
typedef struct tn_layer_scale {
    tn_tensor scale;        /* the factor is the one at `slot`; {0}: it follows from the amax */
    tn_tensor amax_history; /* the amax is collected there, at `slot`; {0}: it is not */
    int64_t slot;
} tn_layer_scale;
#define TN_LAYER_SCALE_INIT                                                                        \
    { {0}, {0}, 0 }

/* The parameters of one product. */
typedef struct tn_layer_weight {
    tn_tensor weight; /* [N, K]; frozen: no gradient of it is wanted, and nothing saved for one */
    tn_tensor bias;   /* PLAIN, N elements; {0}: none */
    /* PLAIN [N, K]: forward quantizes weight's ROW from it first, as tn_quantize does, `skip`
     * included; so over the micro-batches of a step the flag keeps the quantized weight. {0}: ROW
     * is there. Backward reads it for TN_BACKWARD_HIGH_PRECISION only. */
    tn_tensor source;
    tn_tensor skip; /* PLAIN fp32 of one element; {0}: never */
    /* Of an FP8_TENSOR weight: delayed scaling of what is quantized to it from its source, of x and
     * of dy. With a factor that is given a cast reads its source once. A backward that computes x
     * again casts it by the factor that is there then: tn_scale_update comes after it. What the
     * caller has quantized is not cast. */
    tn_layer_scale weight_scale, x_scale, dy_scale;
} tn_layer_weight;
#define TN_LAYER_WEIGHT_INIT                                                                       \
    { {0}, {0}, {0}, {0}, TN_LAYER_SCALE_INIT, TN_LAYER_SCALE_INIT, TN_LAYER_SCALE_INIT }

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
    tn_scope saved_scope;    /* of what is saved; {0}: nothing is */
    tn_dtype gradient_dtype; /* TN_E5M2: dy is quantized to it; else to E4M3 */
    tn_backward_precision precision;
    /* 1: as little as possible is saved, and backward makes what is missing. Both are told. */
    int recompute;
    /* The weight whose dgrad comes next, of any size: its COL plane is derived on `side` while a
     * product runs, if it is not valid, for one plane more alive at a time. In a forward it is for
     * the last layer, whose dgrad comes first. Where the policy is SCRATCH the slot needs two
     * buffers. That there is no memory or no free buffer is no failure; the next call derives it
     * then. In a capture that call must come in the same one, or `side` is not joined again. What
     * that call's precision is nobody says here, so it is to be this one's: in another one than
     * TN_BACKWARD_AS_FORWARD no dgrad reads COL, and nothing is derived. */
    tn_tensor next_weight; /* FP8_BLOCK_2D or FP8_TENSOR; {0}, or PLAIN: nothing to derive */
    /* Another one than the call's stream, or TN_INVALID_ARGUMENT; NULL: none, which next_weight
     * does not go with unless it is PLAIN. */
    tn_stream side;
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

/* y = x w^T + bias. x [M, K] PLAIN, y [M, N] PLAIN of any float type. Or x is what the recipe makes
 * of it, E4M3 with ROW valid, as a gather or the op before has left it: then nothing is saved. */
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
 * after, also on a layer that computes no dgrad. To FP8 blocks dy is read once for its planes and
 * dbias; to FP8_TENSOR its amax, its planes and dbias are passes of their own. */
typedef struct tn_linear_backward_args {
    size_t size;
    /* [M, N] PLAIN; or what the recipe makes of it, of either type, with the planes valid that the
     * wanted gradients read: then dbias is not among them. */
    tn_tensor dy;
    tn_layer_weight w;
    /* forward's, where dweight is wanted and nothing was saved: the recipe is PLAIN, `recompute` is
     * set, `precision` is HIGH_PRECISION, or it is quantized, COL valid; else it is not looked
     * at. */
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

/* ---- what the other layers normalize first --------------------------------------------------- */

/* tn_norm_forward of x, or of x + residual. */
typedef struct tn_layer_norm {
    tn_norm norm;
    tn_tensor x;        /* PLAIN fp32, bf16 or fp16, [M, K] */
    tn_tensor residual; /* {0}: none */
    tn_tensor sum;      /* x + residual: there if residual is, and what backward takes as x */
    tn_tensor gamma;
    tn_tensor beta; /* of LAYER only */
    int gamma_from_one;
    float epsilon;
    tn_tensor
        normed; /* PLAIN output of x's type: what is multiplied or quantized; {0}: not wanted */
} tn_layer_norm;
#define TN_LAYER_NORM_INIT                                                                         \
    {                                                                                              \
        TN_NORM_RMS, {0}, {0}, {0}, {0}, {0}, 0, 1e-5f, { 0 }                                      \
    }

/* tn_norm_backward. x, gamma, beta, gamma_from_one and epsilon are forward's; beta and epsilon are
 * looked at only if common.recompute is set. */
typedef struct tn_layer_norm_gradient {
    tn_norm norm;
    tn_tensor x; /* what was normalized: with a residual, the sum */
    tn_tensor gamma;
    tn_tensor beta;
    int gamma_from_one;
    float epsilon;
    /* That of forward, if it had one: read where a PLAIN x is multiplied for the weight's gradient;
     * else not looked at. */
    tn_tensor normed;
    tn_tensor added; /* a gradient that goes past the layer, as of a residual; {0}: nothing */
    tn_tensor dx;    /* of x's shape and type; {0}: not wanted, likewise dgamma and dbeta */
    tn_tensor dgamma;
    tn_tensor dbeta;
    int accumulate; /* dgamma and dbeta */
} tn_layer_norm_gradient;
#define TN_LAYER_NORM_GRADIENT_INIT                                                                \
    { TN_NORM_RMS, {0}, {0}, {0}, 0, 1e-5f, {0}, {0}, {0}, {0}, {0}, 0 }

/* ---- LayerNormLinear ------------------------------------------------------------------------- */

/* y = norm(x) w^T + bias. */
typedef struct tn_norm_linear_forward_args {
    size_t size;
    tn_layer_norm norm;
    tn_layer_weight w;
    tn_tensor y; /* [M, N] PLAIN */
    tn_layer_common common;
} tn_norm_linear_forward_args;
#define TN_NORM_LINEAR_FORWARD_ARGS_INIT                                                           \
    {                                                                                              \
        sizeof(tn_norm_linear_forward_args), TN_LAYER_NORM_INIT, TN_LAYER_WEIGHT_INIT, {0},        \
            TN_LAYER_COMMON_INIT                                                                   \
    }

typedef struct tn_norm_linear_saved {
    tn_tensor mean; /* of LAYER */
    tn_tensor rstd;
    tn_tensor
        normed; /* as the weight's gradient reads it; {0}: nobody does, or it is the caller's */
} tn_norm_linear_saved;
#define TN_NORM_LINEAR_SAVED_INIT                                                                  \
    {                                                                                              \
        {0}, {0}, { 0 }                                                                            \
    }

TN_API TN_MUST_USE tn_status tn_norm_linear_forward(const tn_norm_linear_forward_args *args,
                                                    tn_norm_linear_saved *saved, tn_stream stream);

/* The gradient of the norm's value is there in scratch, in x's type. Without norm.dx, dgamma and
 * dbeta it is not made, and there is no dgrad. */
typedef struct tn_norm_linear_backward_args {
    size_t size;
    tn_tensor dy; /* [M, N] PLAIN */
    tn_layer_weight w;
    tn_layer_norm_gradient norm;
    tn_layer_gradient gradient;
    tn_layer_common common;
} tn_norm_linear_backward_args;
#define TN_NORM_LINEAR_BACKWARD_ARGS_INIT                                                          \
    {                                                                                              \
        sizeof(tn_norm_linear_backward_args), {0}, TN_LAYER_WEIGHT_INIT,                           \
            TN_LAYER_NORM_GRADIENT_INIT, TN_LAYER_GRADIENT_INIT, TN_LAYER_COMMON_INIT              \
    }

TN_API TN_MUST_USE tn_status tn_norm_linear_backward(const tn_norm_linear_backward_args *args,
                                                     tn_norm_linear_saved *saved,
                                                     tn_delayed_gradient *delayed,
                                                     tn_stream stream);

/* ---- LayerNormMLP ---------------------------------------------------------------------------- */

/* y = act(h) w2^T + bias2 with h = norm(x) w1^T + bias1, in x's type. Gated, h is [M, 2 F] and w1
 * [2 F, K], see tn_activation_forward; w2 is [N, F]. */
typedef struct tn_norm_mlp_forward_args {
    size_t size;
    tn_layer_norm norm;
    tn_layer_weight w1;
    tn_activation activation;
    int gated;
    tn_layer_weight w2;
    tn_tensor y; /* [M, N] PLAIN */
    tn_layer_common common;
} tn_norm_mlp_forward_args;
#define TN_NORM_MLP_FORWARD_ARGS_INIT                                                              \
    {                                                                                              \
        sizeof(tn_norm_mlp_forward_args), TN_LAYER_NORM_INIT, TN_LAYER_WEIGHT_INIT,                \
            TN_ACTIVATION_GELU, 0, TN_LAYER_WEIGHT_INIT, {0}, TN_LAYER_COMMON_INIT                 \
    }

typedef struct tn_norm_mlp_saved {
    tn_tensor mean; /* of LAYER */
    tn_tensor rstd;
    tn_tensor normed;    /* as w1's gradient reads it */
    tn_tensor hidden;    /* h, PLAIN of x's type */
    tn_tensor activated; /* act(h), as w2's gradient reads it */
} tn_norm_mlp_saved;
#define TN_NORM_MLP_SAVED_INIT                                                                     \
    {                                                                                              \
        {0}, {0}, {0}, {0}, { 0 }                                                                  \
    }

TN_API TN_MUST_USE tn_status tn_norm_mlp_forward(const tn_norm_mlp_forward_args *args,
                                                 tn_norm_mlp_saved *saved, tn_stream stream);

/* The COL plane of each weight lives around its own dgrad, by its own policy. If common.side is
 * given, w1's is derived there while w2's dgrad runs, if w1's dgrad reads it, and
 * common.next_weight's while w1's does.
 * `delayed` is of two, w1's and w2's; NULL if nothing is delayed. */
typedef struct tn_norm_mlp_backward_args {
    size_t size;
    tn_tensor dy; /* [M, N] PLAIN */
    tn_layer_weight w1;
    tn_activation activation;
    int gated;
    tn_layer_weight w2;
    tn_layer_norm_gradient norm;
    tn_layer_gradient gradient1, gradient2;
    tn_layer_common common;
} tn_norm_mlp_backward_args;
#define TN_NORM_MLP_BACKWARD_ARGS_INIT                                                             \
    {                                                                                              \
        sizeof(tn_norm_mlp_backward_args), {0}, TN_LAYER_WEIGHT_INIT, TN_ACTIVATION_GELU, 0,       \
            TN_LAYER_WEIGHT_INIT, TN_LAYER_NORM_GRADIENT_INIT, TN_LAYER_GRADIENT_INIT,             \
            TN_LAYER_GRADIENT_INIT, TN_LAYER_COMMON_INIT                                           \
    }

TN_API TN_MUST_USE tn_status tn_norm_mlp_backward(const tn_norm_mlp_backward_args *args,
                                                  tn_norm_mlp_saved *saved,
                                                  tn_delayed_gradient *delayed, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
