/* Tenure: the linear layer of a mixture's experts, forward and backward.
 *
 *     tn_grouped_linear_forward_args forward = TN_GROUPED_LINEAR_FORWARD_ARGS_INIT;
 *     tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
 *     forward.experts.groups = 64, forward.experts.offsets = offsets;      (on the host)
 *     forward.experts.device_offsets = table, forward.experts.error = error;
 *     forward.experts.weights = weights;                                    (64 of [n, k])
 *     forward.x = tokens, forward.y = y;
 *     forward.scope = op_scope, forward.saved_scope = saved_scope;
 *     tn_grouped_linear_forward(&forward, &saved, stream);
 *     ...
 *     tn_grouped_linear_backward_args backward = TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT;
 *     backward.experts = forward.experts;
 *     backward.dy = dy, backward.dx = dx, backward.dweights = dweights;
 *     backward.scope = op_scope;
 *     tn_grouped_linear_backward(&backward, &saved, NULL, stream);          (saved ends)
 *
 * The rules of tenure_ops.h hold here too, and tenure_grouped.h says how tokens lie in groups.
 *
 * The weights say how it is computed. FP8_BLOCK_2D: x and dy are quantized to 1D, in the weights'
 * scale mode, x to E4M3. FP8_TENSOR: each group's rows of x, and of dy, are quantized to FP8_TENSOR
 * as tn_quantize does a tensor of its own, by their own amax or by delayed scaling: so no expert's
 * scale depends on another's tokens. PLAIN: the products are of PLAIN operands, all of the weights'
 * type. Other formats are TN_UNSUPPORTED. All weights of a call are alike but for their contents,
 * and each may be frozen or not. So a backward in high precision of a forward in FP8 is one that is
 * given PLAIN weights, the masters, and x.
 *
 * What is alive, in bytes, for R rows in all groups (F: exact count of scales of all groups, as
 * tenure_grouped.h has it; of FP8_TENSOR 4 for each group that has rows):
 *
 *     forward    scratch   FP8: x ROW, R k + 4 F
 *                saved     FP8, if a weight is trainable: x COL, R k + 4 F
 *     backward   scratch   FP8: dy ROW for dx, dy COL for dweights, R n + 4 F each; x COL again if
 *                          nothing was saved
 *                COL of one weight, where its policy has it released: from just before the product
 *                that reads it to just after it, before that of the next weight is made; with a
 *                side stream from just before the product ahead of it, so of two weights
 *     after it   nothing; delayed: x COL and dy COL
 *
 * and as scratch, too, what tn_grouped_gemm and tn_grouped_quantize say, and 4 n bytes for each 128
 * rows of the largest group for dbiases.
 */
#ifndef TENURE_EXPERTS_H
#define TENURE_EXPERTS_H

#include "tenure_grouped.h"
#include "tenure_layers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the calls are told alike. */
typedef struct tn_experts {
    int64_t groups;         /* 0 ... 4096 */
    const int64_t *offsets; /* groups + 1, the first 0; read during the call */
    /* FP8 blocks: the same numbers, as tn_grouped_quantize takes them. Others are never beyond
     * memory: they are told in this word, as there. Not looked at for other weights. */
    tn_tensor device_offsets;
    tn_tensor error;
    const tn_tensor *weights; /* [n, k], one for each group */
    /* Another one than the call's stream; NULL: none. On it backward has COL of a weight derived
     * while the product of the group before runs; which planes are made ahead, and what a capture
     * must hold, is as tenure_layers.h says of common.next_weight. */
    tn_stream side;
    /* Of another layer: its COL is derived while the last group's product runs, of a forward or of
     * a dx. It needs `side`; {0}, or PLAIN: nothing to derive. */
    tn_tensor next_weight;
    /* FP8_TENSOR: delayed scaling of x and of dy, as tenure_layers.h has it; group e has the slot
     * `slot` + e. Of a group without rows no amax is collected. */
    tn_layer_scale x_scale, dy_scale;
} tn_experts;
#define TN_EXPERTS_INIT                                                                            \
    { 0, NULL, {0}, {0}, NULL, NULL, {0}, TN_LAYER_SCALE_INIT, TN_LAYER_SCALE_INIT }

/* What backward needs of forward: {0} for what was not saved. The tensors are in the saved_scope
 * and end with it, or with the backward that succeeds. */
typedef struct tn_grouped_saved {
    tn_grouped_plane x; /* COL */
} tn_grouped_saved;
#define TN_GROUPED_SAVED_INIT                                                                      \
    {                                                                                              \
        {                                                                                          \
            {0}, { 0 }                                                                             \
        }                                                                                          \
    }

/* ---- forward --------------------------------------------------------------------------------- */

/* y[rows of e] = x[rows of e] weights[e]^T + biases[e]. Rows from offsets[groups] on are left
 * alone. Of a group without rows neither weight nor bias is read.
 *
 * saved_scope {0}: nothing is saved, for inference or for a backward that is given x. Otherwise
 * `saved` is overwritten when the call succeeds; it stays {0} where no weight gradient can come
 * (all weights frozen) and for PLAIN weights, whose backward takes the caller's x. */
typedef struct tn_grouped_linear_forward_args {
    size_t size;
    tn_experts experts;
    tn_tensor x;             /* PLAIN [R or more, k] */
    const tn_tensor *biases; /* PLAIN, n elements each, {0}: none; NULL: none at all */
    tn_tensor y;             /* PLAIN [R or more, n] */
    tn_scope scope;
    tn_scope saved_scope;
} tn_grouped_linear_forward_args;
#define TN_GROUPED_LINEAR_FORWARD_ARGS_INIT                                                        \
    {                                                                                              \
        sizeof(tn_grouped_linear_forward_args), TN_EXPERTS_INIT, {0}, NULL, {0}, {0}, { 0 }        \
    }
TN_API TN_MUST_USE tn_status tn_grouped_linear_forward(const tn_grouped_linear_forward_args *args,
                                                       tn_grouped_saved *saved, tn_stream stream);

/* ---- backward -------------------------------------------------------------------------------- */

/* dx[rows of e]   = dy[rows of e] weights[e]
 * dweights[e]     = dy[rows of e]^T x[rows of e]
 * dbiases[e]      = tn_bias_gradient's sums of dy[rows of e]
 *
 * Each is left out where it is {0} (or its array is NULL); a frozen weight has no gradient. No
 * dweight may be a weight.
 * dweights and dbiases of a group without rows are 0, or stay what they were if `accumulate`. A COL
 * plane of a weight that is absent is derived just before the product that reads it, and
 * tn_plane_release is called on it just after that, also without dx; none is derived for a group
 * without rows.
 *
 * x COL comes from `saved`, or where that is {0} or NULL from x. On success the tensors of `saved`
 * are destroyed in the stream's order and their handles are {0}; one that is under a lease of
 * someone else, or that the driver does not free, ends with its scope instead. After a failure they
 * are what they were, and the call can be made again: outputs that work has touched are not valid
 * then, all others are what they were. No dweight is touched before dx has been launched.
 *
 * With `delay` dweights are checked and left for tn_grouped_linear_weight_gradient: `saved` stays,
 * and dy COL goes to `delayed`, in saved_scope: it must be {0} before, or the gradient that is in
 * it would be lost. */
typedef struct tn_grouped_delayed {
    tn_grouped_plane dy; /* COL; {0} for PLAIN weights */
} tn_grouped_delayed;
#define TN_GROUPED_DELAYED_INIT                                                                    \
    {                                                                                              \
        {                                                                                          \
            {0}, { 0 }                                                                             \
        }                                                                                          \
    }

typedef struct tn_grouped_linear_backward_args {
    size_t size;
    tn_experts experts;
    tn_tensor dy;              /* PLAIN [R or more, n] */
    tn_tensor x;               /* forward's; {0}: it is in `saved`, or no dweight is wanted */
    tn_tensor dx;              /* PLAIN [R or more, k]; {0}: not wanted */
    const tn_tensor *dweights; /* PLAIN [n, k]: main gradients, fp32 or bf16 */
    const tn_tensor *dbiases;  /* PLAIN, n elements */
    int accumulate;            /* dweights and dbiases are added to, as tn_gemm's D is */
    int delay;
    tn_dtype gradient_dtype; /* TN_E5M2: dy is quantized to it; else to E4M3 */
    tn_scope scope;
    tn_scope saved_scope; /* of what is delayed */
} tn_grouped_linear_backward_args;
#define TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT                                                       \
    {                                                                                              \
        sizeof(tn_grouped_linear_backward_args), TN_EXPERTS_INIT, {0}, {0}, {0}, NULL, NULL, 0, 0, \
            TN_E4M3, {0}, {                                                                        \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_grouped_linear_backward(const tn_grouped_linear_backward_args *args,
                                                        tn_grouped_saved *saved,
                                                        tn_grouped_delayed *delayed,
                                                        tn_stream stream);

/* The dweights that backward delayed, from the same args; PLAIN weights need dy and x again, others
 * `saved` (or x) and `delayed`, both of which end on success. dx and dbiases are not looked at. */
TN_API TN_MUST_USE tn_status tn_grouped_linear_weight_gradient(
    const tn_grouped_linear_backward_args *args, tn_grouped_saved *saved,
    tn_grouped_delayed *delayed, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
