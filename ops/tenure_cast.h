/* Tenure: casts that do more than one tensor's plain cast, and ops that quantize what they make.
 *
 *     tn_quantized_out quantized = TN_QUANTIZED_OUT_INIT;
 *     quantized.tensor = saved_h;                      (FP8_BLOCK_1D)
 *     quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
 *
 *     tn_scale_update_args update = TN_SCALE_UPDATE_ARGS_INIT;      (delayed scaling, once a step)
 *     update.amax_history = history, update.scale = scales;
 *     tn_scale_update(&update, stream);
 *
 * The rules of tenure_ops.h hold here too. Of every op that makes a high-precision value and
 * quantizes it in the same pass: the planes are, to the bit, those that tn_quantize makes of that
 * value rounded to its own type.
 */
#ifndef TENURE_CAST_H
#define TENURE_CAST_H

#include "tenure_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what a producer quantizes to ----------------------------------------------------------- */

/* tensor {0}: nothing is quantized. planes and amax_epsilon are those of tn_quantize. */
typedef struct tn_quantized_out {
    tn_tensor tensor;
    unsigned planes;    /* TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both; 0 means ROW */
    float amax_epsilon; /* finite, at least 0 */
} tn_quantized_out;
#define TN_QUANTIZED_OUT_INIT                                                                      \
    { {0}, 0, 0.0f }

/* ---- delayed scaling ------------------------------------------------------------------------ */

/* After a step in which tn_quantize has collected amaxes in the first row of amax_history, for
 * each of its n tensors, as TransformerEngine's delayed_scaling recipe does (read at its
 * common/recipe/delayed_scaling.cu):
 *
 *     recent  = history[0];  amax = recent, or the largest of all H entries
 *     history = history[2], ... history[H - 1], recent moved to 1 ... H - 1; history[0] = 0
 *     scale   = max_of_dtype * 2^-margin / amax   if amax is finite and above 0,
 *               else what it was; if that is infinite, the largest finite fp32
 *
 * An amax of 0 (nothing was cast), infinite or NaN thus keeps the scale; entries that are NaN are
 * ignored among the largest. Both tensors PLAIN fp32: amax_history [H] or [H, n], scale of n
 * elements. Who begins fills them with 0 and 1. */
typedef enum tn_amax_choice { TN_AMAX_MOST = 0, TN_AMAX_MOST_RECENT } tn_amax_choice;

typedef struct tn_scale_update_args {
    size_t size;
    tn_tensor amax_history;
    tn_tensor scale;
    tn_dtype dtype; /* E4M3 or E5M2: of what is cast with these scales */
    tn_amax_choice amax;
    int margin;     /* -64 to 64 */
    tn_tensor skip; /* as that of tn_quantize: both stay as they are */
} tn_scale_update_args;
#define TN_SCALE_UPDATE_ARGS_INIT                                                                  \
    {                                                                                              \
        sizeof(tn_scale_update_args), {0}, {0}, TN_E4M3, TN_AMAX_MOST, 0, { 0 }                    \
    }

TN_API TN_MUST_USE tn_status tn_scale_update(const tn_scale_update_args *args, tn_stream stream);

/* ---- activations ---------------------------------------------------------------------------- */

/* Of an x in fp32; s(z) = 1 / (1 + exp(-z)). These are the functions of TransformerEngine's
 * common/util/math.h. On every device they come from the same IEEE operations (exact_math.h), so
 * their bits do not depend on it; s is within 2.5 units of the last place, 0 for z below -87. Of a
 * bf16 x below 2^-15 in size, s is that of 0, which is off by less than 2^-15 of it. */
typedef enum tn_activation {
    TN_ACTIVATION_GELU = 0,     /* tanh form: x s(2 sqrt(2/pi) (x + 0.044715 x^3)) */
    TN_ACTIVATION_QUICK_GELU,   /* x s(1.702 x) */
    TN_ACTIVATION_SILU,         /* x s(x) */
    TN_ACTIVATION_RELU,         /* max(x, 0); NaN stays NaN */
    TN_ACTIVATION_SQUARED_RELU, /* max(x, 0)^2 */
    TN_ACTIVATION_COUNT
} tn_activation;

TN_API const char *tn_activation_name(tn_activation activation);

/* y = act(x), or if gated (SwiGLU, GeGLU, ReGLU, ...)
 *
 *     y[m, n] = act(x[m, n]) * x[m, N + n]              x is [M, 2 N], y [M, N]
 *
 * and with weights times weights[m] as well, in fp32 from the left, rounded once to x's type: that
 * is y, and that is what is quantized. Either is left out if it is {0}. One read of x. */
typedef struct tn_activation_args {
    size_t size;
    tn_activation activation;
    int gated;
    tn_tensor x;                /* PLAIN fp32, bf16 or fp16 */
    tn_tensor weights;          /* PLAIN fp32, M elements, as of a router; {0}: none */
    tn_tensor y;                /* of x's type */
    tn_quantized_out quantized; /* FP8_BLOCK_1D or FP8_BLOCK_2D, [M, N] */
    tn_tensor skip;             /* as that of tn_quantize */
} tn_activation_args;
#define TN_ACTIVATION_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(tn_activation_args), TN_ACTIVATION_GELU, 0, {0}, {0}, {0}, TN_QUANTIZED_OUT_INIT, { \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_activation_forward(const tn_activation_args *args,
                                                   tn_stream stream);

/* dx of the same x, with g = dy[m, n] * weights[m] (or dy alone):
 *
 *     dx[m, n]     = act'(x[m, n]) * g                  plain
 *     dx[m, n]     = act'(x[m, n]) * g * x[m, N + n]    gated
 *     dx[m, N + n] = act(x[m, n]) * g
 *
 * in fp32 from the left, rounded once to x's type. dbias is that of tn_bias_gradient, of dx.
 *
 *     dweights[m] = sum over n of dy[m, n] * act(x[m, n])               plain
 *     dweights[m] = sum over n of dy[m, n] * (act(x[m, n]) * x[m, N + n])
 *
 * each product with dy fused to its sum, in this order: 256 sums from 0, column n goes to sum n mod
 * 256 in rising order, then sums i and i + 128, i and i + 64, ..., i and i + 1 are added. */
typedef struct tn_activation_backward_args {
    size_t size;
    tn_activation activation;
    int gated;
    tn_tensor dy; /* [M, N] of x's type */
    tn_tensor x;
    tn_tensor weights;
    tn_tensor dx;               /* x's shape and type; {0}: not wanted */
    tn_quantized_out quantized; /* x's shape */
    tn_tensor dbias;            /* as many elements as x has columns; {0}: not wanted */
    tn_tensor skip;
    tn_scope scope;       /* scratch for dbias: 4 bytes for each 128 elements of x */
    tn_tensor dweights;   /* PLAIN fp32, M elements; {0}: not wanted */
    int accumulate_dbias; /* 1: it is added to what dbias holds, in fp32, and rounded once */
} tn_activation_backward_args;
#define TN_ACTIVATION_BACKWARD_ARGS_INIT                                                           \
    {                                                                                              \
        sizeof(tn_activation_backward_args), TN_ACTIVATION_GELU, 0, {0}, {0}, {0}, {0},            \
            TN_QUANTIZED_OUT_INIT, {0}, {0}, {0}, {0}, 0                                           \
    }
TN_API TN_MUST_USE tn_status tn_activation_backward(const tn_activation_backward_args *args,
                                                    tn_stream stream);

/* dbias[n] = sum over m of dy[m, n], and dy quantized, in one read of dy.
 *
 * The order of the sums is fixed, whatever runs them, in fp32: of each tile of 128 rows 16 groups
 * of 8 rows, each added up in rising order from 0; groups 2 w and 2 w + 1 together; those 8 in
 * rising order from 0; that is the tile's sum. Of the tiles, 8 sums from 0, where tile t goes to
 * sum t mod 8 in rising order; then sums i and i + 4, i and i + 2, i and i + 1. One rounding to
 * dbias' type. Without rows it is 0. */
typedef struct tn_bias_gradient_args {
    size_t size;
    tn_tensor dy;               /* PLAIN fp32, bf16 or fp16, [M, N] */
    tn_quantized_out quantized; /* dy's shape; {0}: not wanted */
    tn_tensor dbias;            /* PLAIN fp32, bf16 or fp16, N elements */
    tn_tensor skip;
    tn_scope scope; /* scratch: 4 bytes for each 128 elements of dy */
    int accumulate; /* 1: it is added to what dbias holds, in fp32, and rounded once */
} tn_bias_gradient_args;
#define TN_BIAS_GRADIENT_ARGS_INIT                                                                 \
    { sizeof(tn_bias_gradient_args), {0}, TN_QUANTIZED_OUT_INIT, {0}, {0}, {0}, 0 }
TN_API TN_MUST_USE tn_status tn_bias_gradient(const tn_bias_gradient_args *args, tn_stream stream);

/* ---- norms ---------------------------------------------------------------------------------- */

/*     LAYER  y = (x - mean) * rstd * gamma + beta   rstd = 1 / sqrt(mean of (x - mean)^2 + epsilon)
 *     RMS    y = x * rstd * gamma                   rstd = 1 / sqrt(mean of x^2 + epsilon)
 *
 * of each row, in fp32 from the left, the last product and sum of LAYER fused; rounded once to x's
 * type: that is y, and that is what is quantized. The sums behind the two means have a fixed order.
 * In each block of 128 columns (0 beyond the row) 32 times 4 neighbours are added up from the left,
 * squares by a fused multiply-add; then sums i and i + 1 of every 2nd i, and of these i and i + 16,
 * i + 8, i + 4, i + 2. Of the blocks' sums, b goes to sum b mod 32 of 32 from 0, in rising order;
 * then i and i + 16, i + 8, ..., i + 1 are added. LAYER's squares are of what deviates from the
 * block's own mean, its sum / n of n columns; before it goes to sum b mod 32, (n * d) * d is added
 * to it, fused, with d the block's mean - the row's. The mean of no columns is 0. */
typedef enum tn_norm { TN_NORM_RMS = 0, TN_NORM_LAYER, TN_NORM_COUNT } tn_norm;

/* With a residual, x + residual rounded to x's type takes the place of x. It is written to `sum`,
 * or over the residual if sum is {0}.
 *
 * Bytes for M x K elements of s bytes: s to read x, s for y, 1 for each plane; with a residual s to
 * read it and s to write the sum more. COL and 2D planes have x (or the sum) read again, but not
 * those that RMS makes beside y or a sum, of bf16 or fp16, in large matrices and with a scope. Rows
 * of more than 16384 columns, and such as can not be read 16 bytes at a time, are read again for
 * each of statistics and values. */
typedef struct tn_norm_args {
    size_t size;
    tn_norm norm;
    tn_tensor x;        /* PLAIN fp32, bf16 or fp16, [M, K] */
    tn_tensor residual; /* x's shape and type; {0}: none */
    tn_tensor sum;      /* likewise */
    tn_tensor gamma;    /* PLAIN fp32, bf16 or fp16, K elements; {0}: all are 1 */
    tn_tensor beta;     /* likewise, of LAYER only; {0}: all are 0 */
    int gamma_from_one; /* 1: 1 + gamma takes gamma's place */
    float epsilon;      /* finite, at least 0 */
    tn_tensor y;
    tn_quantized_out quantized; /* FP8_BLOCK_1D or FP8_BLOCK_2D, x's shape */
    tn_tensor mean;             /* fp32, M elements, of LAYER only; {0}: not wanted */
    tn_tensor rstd;             /* fp32, M elements; {0}: not wanted */
    tn_tensor skip;
    tn_scope scope; /* scratch: 4 bytes for each row and statistic that is not wanted; of RMS, for
                       COL or 2D planes beside y or a sum, 4 for each 128 elements of x */
} tn_norm_args;
#define TN_NORM_ARGS_INIT                                                                          \
    {                                                                                              \
        sizeof(tn_norm_args), TN_NORM_RMS, {0}, {0}, {0}, {0}, {0}, 0, 1e-5f, {0},                 \
            TN_QUANTIZED_OUT_INIT, {0}, {0}, {0}, {                                                \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_norm_forward(const tn_norm_args *args, tn_stream stream);

/* ---- re-quantize ---------------------------------------------------------------------------- */

/* Makes planes of dst from one plane of src, both FP8_BLOCK_1D or 2D of one shape, without a
 * high-precision source:
 *
 *     VALUES   what tn_quantize makes of the fp32 values that tn_dequantize gives of that plane: 1D
 *              to 2D and back, a 1D COL from a 1D ROW with amaxes of its own, other types or modes
 *     SHIFT    the scaling-aware transpose: src and dst 1D, of one type, POW2; dst's plane is the
 *              other one than `from`. In each tile of 128 x 128, E is the largest of the scales of
 *              `from` there, of blocks that are not all 0 or NaN (1 if all are); each code becomes
 *              cast(code * (its scale / E)), to nearest even, and E is the scale of all of the
 *              tile's blocks. No second amax, and no rounding but of codes that become denormal: a
 *              value changes by at most E * 2^-10 (E4M3) or E * 2^-17 (E5M2), which of what
 *              tn_quantize has made is less than 2^-17 of the tile's amax. */
typedef enum tn_requantize_mode {
    TN_REQUANTIZE_VALUES = 0,
    TN_REQUANTIZE_SHIFT
} tn_requantize_mode;

typedef struct tn_requantize_args {
    size_t size;
    tn_tensor src;
    tn_plane from;      /* TN_PLANE_ROW or TN_PLANE_COL; DATA (0) means ROW */
    tn_tensor dst;      /* another tensor than src */
    unsigned planes;    /* TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both; 0 means ROW, or SHIFT's */
    float amax_epsilon; /* as in tn_quantize; SHIFT: 0 */
    tn_requantize_mode mode;
    tn_tensor skip; /* as that of tn_quantize */
} tn_requantize_args;
#define TN_REQUANTIZE_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(tn_requantize_args), {0}, TN_PLANE_DATA, {0}, 0, 0.0f, TN_REQUANTIZE_VALUES, { 0 }  \
    }

TN_API TN_MUST_USE tn_status tn_requantize(const tn_requantize_args *args, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
