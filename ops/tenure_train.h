/* Tenure: what a training step needs beside casts and products: gradients of norms and embeddings,
 * and an optimizer.
 *
 *     tn_norm_backward_args back = TN_NORM_BACKWARD_ARGS_INIT;
 *     back.norm = TN_NORM_RMS;
 *     back.dy = dy, back.x = x, back.rstd = rstd, back.gamma = gamma;
 *     back.dx = dx, back.dgamma = dgamma, back.scope = op_scope;
 *     tn_norm_backward(&back, stream);
 *
 *     tn_adamw_advance(&advance, stream);              (once a step)
 *     tn_adamw(&adamw, stream);                        (for each weight)
 *
 *     tn_square_sums(&sums, stream);                   (for each gradient, before tn_adamw)
 *     tn_clip_factor(&clip, stream);                   (once: its factor is tn_adamw's)
 *
 * The rules of tenure_ops.h hold here too. All sums have a fixed order, which is written down here,
 * so that the host and every GPU give the same bits. A skip flag is that of tn_quantize.
 */
#ifndef TENURE_TRAIN_H
#define TENURE_TRAIN_H

#include "tenure_cast.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the gradient of a norm ------------------------------------------------------------------ */

/* Of tn_norm_forward, from the x that it normalized (with a residual: the sum) and the statistics
 * that it left. With n = (x - mean) * rstd, or x * rstd, in each row of K columns:
 *
 *     g      = dy * gamma
 *     shift  = (sum of g) / K, of LAYER only         tilt = (sum of g * n) / K
 *     dx     = ((g - shift) - n * tilt) * rstd + added
 *     dgamma = sum over the rows of dy * n           dbeta = sum over the rows of dy
 *
 * in fp32; `- n * tilt` and the products within sums are fused multiply-adds. dx is rounded once to
 * x's type, and that is what is quantized. `added` is the gradient that goes past the norm, of the
 * residual that x also went to. A sum over a row has the order of tn_norm_forward's (`sum of g * n`
 * that of its squares), one over the rows that of tn_bias_gradient's; `accumulate` adds the latter
 * to what dgamma and dbeta hold, in fp32, before their one rounding.
 *
 * Any output may be {0}, but not all. Bytes for each element of s bytes: 2 s for x and dy, s for
 * `added`, s for dx and 1 for each plane. x and dy are read twice in rows that can not be read 16
 * bytes at a time; with planes, of fp32 and of rows of too many columns (25344 on an H200); without
 * planes, of rows of more than 8192 columns (of more than 4096, if fp32 or not of whole 256) and in
 * matrices of few rows. */
typedef struct tn_norm_backward_args {
    size_t size;
    tn_norm norm;
    tn_tensor dy;    /* of x's shape and type */
    tn_tensor x;     /* PLAIN fp32, bf16 or fp16, [M, K] */
    tn_tensor mean;  /* fp32, M elements; LAYER only */
    tn_tensor rstd;  /* fp32, M elements */
    tn_tensor gamma; /* as in tn_norm_forward, likewise gamma_from_one */
    int gamma_from_one;
    tn_tensor added; /* of x's shape and type; {0}: nothing */
    tn_tensor dx;    /* of x's shape and type */
    tn_quantized_out quantized;
    tn_tensor dgamma; /* PLAIN fp32, bf16 or fp16, K elements */
    tn_tensor dbeta;  /* likewise, LAYER only */
    int accumulate;   /* dgamma and dbeta */
    tn_tensor skip;
    tn_scope scope; /* scratch: 8 bytes for each row, 4 for each 128 elements of a sum, or up to 32
                       without planes where a GPU has few rows; with planes 4 (LAYER 8) for each
                       128 elements of x */
} tn_norm_backward_args;
#define TN_NORM_BACKWARD_ARGS_INIT                                                                 \
    {                                                                                              \
        sizeof(tn_norm_backward_args), TN_NORM_RMS, {0}, {0}, {0}, {0}, {0}, 0, {0}, {0},          \
            TN_QUANTIZED_OUT_INIT, {0}, {0}, 0, {0}, {                                             \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_norm_backward(const tn_norm_backward_args *args, tn_stream stream);

/* ---- the gradient of an embedding ------------------------------------------------------------ */

/* dtable[v, :] = sum of dy[t, :] over the t with tokens[t] == v, in rising t from 0, in fp32; added
 * to what is there if `accumulate`; rounded once. A row that no token names becomes 0, or keeps its
 * values. */
typedef struct tn_embed_backward_args {
    size_t size;
    tn_tensor tokens; /* TN_BYTE, T of them */
    tn_tensor dy;     /* PLAIN fp32, bf16 or fp16, [T, H] */
    tn_tensor dtable; /* PLAIN fp32, bf16 or fp16, [256, H] */
    int accumulate;
    tn_tensor skip;
} tn_embed_backward_args;
#define TN_EMBED_BACKWARD_ARGS_INIT                                                                \
    {                                                                                              \
        sizeof(tn_embed_backward_args), {0}, {0}, {0}, 0, { 0 }                                    \
    }
TN_API TN_MUST_USE tn_status tn_embed_backward(const tn_embed_backward_args *args,
                                               tn_stream stream);

/* ---- AdamW ----------------------------------------------------------------------------------- */

/* Where an optimizer's steps are counted: `step` is PLAIN fp32 of 3 elements in device memory, all
 * 0 before the first step. So a captured graph that holds these calls goes on by itself:
 *
 *     step[0] = step[0] + 1 = t
 *     step[1] = 1 / (1 - beta1^t)    step[2] = 1 / sqrt(1 - beta2^t)    in double, rounded once
 *
 * With the flag in `skip` set the step is not counted. */
typedef struct tn_adamw_advance_args {
    size_t size;
    tn_tensor step;
    float beta1, beta2; /* 0 or more, below 1 */
    tn_tensor skip;
} tn_adamw_advance_args;
#define TN_ADAMW_ADVANCE_ARGS_INIT                                                                 \
    {                                                                                              \
        sizeof(tn_adamw_advance_args), {0}, 0.9f, 0.999f, { 0 }                                    \
    }
TN_API TN_MUST_USE tn_status tn_adamw_advance(const tn_adamw_advance_args *args, tn_stream stream);

/* One step of one weight, with decoupled decay, all in fp32, element by element:
 *
 *     g      = gradient * gradient_scale
 *     first  = first + (1 - beta1) * (g - first)
 *     second = beta2 * second + ((1 - beta2) * g) * g
 *     master = master - (rate * decay) * master
 *     master = master - rate * ((first * step[1]) / (sqrt(second) * step[2] + epsilon))
 *
 * where each outer sum is one fused multiply-add, and rate is learning_rate times the element of
 * `rate`. Out of the new master copy, in the same pass: `plain` is it rounded to its type, and
 * `weight` has the ROW plane that tn_quantize would make of it. COL of `weight` is dropped: it was
 * of the old weights, and whoever reads it next has it derived again. A failure after that has
 * left COL absent. `weight` is no view.
 *
 * Bytes for each element, with a gradient of s bytes: 12 read, 12 written, s, and 1 for ROW. */
typedef struct tn_adamw_args {
    size_t size;
    tn_tensor master;   /* PLAIN fp32, [N, K] */
    tn_tensor gradient; /* PLAIN fp32, bf16 or fp16, as many elements; likewise below */
    tn_tensor first;    /* PLAIN fp32; 0 before the first step */
    tn_tensor second;
    tn_tensor step; /* of tn_adamw_advance, which was called before */
    float learning_rate;
    float beta1, beta2; /* those of tn_adamw_advance */
    float epsilon;      /* above 0 */
    float weight_decay;
    tn_tensor rate;           /* PLAIN fp32 of one element, as a schedule writes it; {0}: 1 */
    tn_tensor gradient_scale; /* likewise, as of clipping; {0}: 1 */
    tn_tensor weight;         /* FP8_BLOCK_1D or 2D of the master's shape; {0}: none */
    float amax_epsilon;       /* of the cast to weight */
    tn_tensor plain;          /* PLAIN fp32, bf16 or fp16; {0}: none */
    tn_tensor skip;
} tn_adamw_args;
#define TN_ADAMW_ARGS_INIT                                                                         \
    {                                                                                              \
        sizeof(tn_adamw_args), {0}, {0}, {0}, {0}, {0}, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, {0},    \
            {0}, {0}, 0.0f, {0}, {                                                                 \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_adamw(const tn_adamw_args *args, tn_stream stream);

/* ---- clipping by the norm of all gradients --------------------------------------------------- */

/* Sums of squares, in fp32, of any number of tensors and ranks: `sums` has 256 of them. Element k
 * of x goes to sum k mod 1024 of 1024 of block (k / 1024) mod 256, all from 0, in rising order and
 * by fused multiply-adds; then sums i and i + 512, i and i + 256, ..., i and i + 1 are added, and
 * sums[b] is what comes of block b: added to what is there if `accumulate`, and then left alone if
 * the block has no elements. An all-reduce of the 256 makes them the sums of all ranks. Bytes for
 * each element of s bytes: s. */
enum { TN_SQUARE_SUMS = 256 };

typedef struct tn_square_sums_args {
    size_t size;
    tn_tensor x;    /* PLAIN fp32, bf16 or fp16 */
    tn_tensor sums; /* PLAIN fp32 of 256 elements */
    int accumulate;
} tn_square_sums_args;
#define TN_SQUARE_SUMS_ARGS_INIT                                                                   \
    { sizeof(tn_square_sums_args), {0}, {0}, 0 }
TN_API TN_MUST_USE tn_status tn_square_sums(const tn_square_sums_args *args, tn_stream stream);

/* What gradients are multiplied with (gradient_scale of tn_adamw), so that their norm is at most
 * max_norm:
 *
 *     norm[0] = scale * sqrt(sum of the sums)     added in double in rising order, rounded, times
 *     factor  = norm[0] > max_norm ? scale * (max_norm / norm[0]) : scale
 *
 * A norm that is NaN clips nothing, an infinite one makes the factor 0. */
typedef struct tn_clip_factor_args {
    size_t size;
    tn_tensor sums;   /* of tn_square_sums */
    float scale;      /* of the gradients before they are clipped, as 1 / count of ranks */
    float max_norm;   /* above 0; INFINITY: never clips */
    tn_tensor norm;   /* PLAIN fp32 of one element; {0}: not wanted */
    tn_tensor factor; /* PLAIN fp32 of one element */
} tn_clip_factor_args;
#define TN_CLIP_FACTOR_ARGS_INIT                                                                   \
    {                                                                                              \
        sizeof(tn_clip_factor_args), {0}, 1.0f, 1.0f, {0}, { 0 }                                   \
    }
TN_API TN_MUST_USE tn_status tn_clip_factor(const tn_clip_factor_args *args, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
