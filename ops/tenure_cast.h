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

/* ---- grouped: the experts of a mixture, one behind the other --------------------------------- */

/* Tokens of E experts ("groups") lie one behind the other in the rows of one tensor: those of group
 * e are rows offsets[e] ... offsets[e + 1] - 1. `offsets` is a TN_BYTE tensor of 8 (E + 1) bytes
 * that holds int64 numbers, the first of them 0; the host never reads it. Any count of tokens, and
 * none, is a group; rows from offsets[E] on belong to none and are left alone.
 *
 * `error` is a TN_BYTE tensor of 4 bytes, a uint32 in which a call that can not do its work leaves
 * the reason, one of those below; the first one stays. It must be valid: write 0 there once (with
 * tn_plane_write) and read it as rarely as you like. A call that has found an error writes nothing
 * else: the contents of its outputs are what was there before. */
enum {
    TN_GROUPED_OK = 0,
    TN_GROUPED_BAD_OFFSETS = 1,  /* the first is not 0, or one is less than the one before */
    TN_GROUPED_OVER_CAPACITY = 2 /* the last is beyond the rows, or an output is too small */
};

/* A plane of all groups: each group's block is what tn_quantize makes of the group alone, bit for
 * bit and with its padding, and the blocks follow each other without gaps. Group e of m rows has
 *
 *     data  ROW   [m, K] bytes at offsets[e] K         COL   [K, m] bytes at offsets[e] K
 *     scale 1D    ROW [ceil(K/128), up4(m)]            COL   [ceil(m/128), up4(K)]
 *           2D    ROW [ceil(m/128), up4(ceil(K/128))]  COL   [ceil(K/128), up4(ceil(m/128))]
 *
 * in data, TN_BYTE of at least as many elements as src, and scale, fp32 of at least as many as the
 * groups turn out to need: with tn_grouped_scale_floats it is never too small. */
typedef struct tn_grouped_plane {
    tn_tensor data;
    tn_tensor scale;
} tn_grouped_plane;

/* fp32 scales that a ROW or COL plane of `groups` groups with `rows` rows in all needs at most. */
TN_API TN_MUST_USE tn_status tn_grouped_scale_floats(tn_format format, tn_plane plane,
                                                     int64_t groups, int64_t rows, int64_t cols,
                                                     int64_t *out);

/* Quantizes every group of src as tn_quantize does a tensor. A plane that is {0} is not made. With
 * `skip`, an fp32 tensor of one element that is not 0 when the work runs, the planes stay as they
 * are; they must be valid then. The scope is for 200 bytes or so of scratch for each group. */
typedef struct tn_grouped_quantize_args {
    size_t size;
    tn_tensor src; /* PLAIN fp32, bf16 or fp16, as many rows as the groups have at most */
    tn_tensor offsets;
    tn_tensor error;
    tn_format format; /* FP8_BLOCK_1D or FP8_BLOCK_2D */
    tn_dtype dtype;   /* E4M3 or E5M2 */
    tn_scale_mode scale_mode;
    float amax_epsilon;
    tn_grouped_plane row;
    tn_grouped_plane col;
    tn_tensor skip; /* {0}: never */
    tn_scope scope;
} tn_grouped_quantize_args;
#define TN_GROUPED_QUANTIZE_ARGS_INIT                                                              \
    {                                                                                              \
        sizeof(tn_grouped_quantize_args), {0}, {0}, {0}, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3,          \
            TN_SCALE_POW2, 0.0f, {{0}, {0}}, {{0}, {0}}, {0}, {                                    \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_grouped_quantize(const tn_grouped_quantize_args *args,
                                                 tn_stream stream);

/* ---- many tensors at once -------------------------------------------------------------------- */

/* tn_quantize of src[i] to dst[i] for each of `count` tensors, in one launch of the cast (and a
 * small one for each 24 tensors, that tells the device which they are). All src have one type, all
 * dst one format (FP8_BLOCK_1D or 2D), type and scale mode. The arrays are read during the call.
 * The scope is for 150 bytes or so of scratch for each tensor. */
enum { TN_QUANTIZE_LIST_MAX = 64 };

typedef struct tn_quantize_list_args {
    size_t size;
    const tn_tensor *src;
    const tn_tensor *dst;
    int count;          /* 0 ... TN_QUANTIZE_LIST_MAX */
    unsigned planes;    /* as in tn_quantize */
    float amax_epsilon; /* likewise */
    tn_tensor skip;     /* likewise */
    tn_scope scope;
} tn_quantize_list_args;
#define TN_QUANTIZE_LIST_ARGS_INIT                                                                 \
    {                                                                                              \
        sizeof(tn_quantize_list_args), NULL, NULL, 0, 0, 0.0f, {0}, { 0 }                          \
    }
TN_API TN_MUST_USE tn_status tn_quantize_list(const tn_quantize_list_args *args, tn_stream stream);

/* ---- rows: permute, pad, drop, bring back ---------------------------------------------------- */

/* A row map is a TN_BYTE tensor of int64 numbers, which row of a source each row of a result comes
 * from; a negative one means none. The host never reads it. A number that is not a row of the
 * source counts as none, and `error` says TN_GROUPED_BAD_MAP; nothing is read beyond the source. */
enum { TN_GROUPED_BAD_MAP = 3 };

/* Groups padded with rows that come from nowhere, so that each begins at a multiple of `multiple`.
 * Of `rows` rows in all, those of group e are offsets[e] ... offsets[e + 1] - 1. Made are
 *
 *     padded_offsets   8 (E + 1) bytes: where each group begins then
 *     map              8 bytes for each padded row that there is room for: the row that it is, or
 *                      the number at that place in `permutation`, if it is given; -1 where it is
 *                      padding, and behind the last group
 *     inverse          8 bytes for each of `rows` rows: its padded row; -1 if it is in no group
 *
 * so that tn_gather_rows pads with `map` (and permutes in the same pass) and takes the padding out
 * again with `inverse`. The groups need at most rows + (multiple - 1) min(E, rows) padded rows; if
 * there is room for less than they turn out to need, `error` says TN_GROUPED_OVER_CAPACITY and
 * nothing is written, as where the offsets are wrong. The scope is for 8 bytes of scratch. */
typedef struct tn_pad_groups_args {
    size_t size;
    tn_tensor offsets;
    tn_tensor permutation; /* TN_BYTE, 8 bytes for each row; {0}: rows stay in their order */
    tn_tensor padded_offsets;
    tn_tensor map;
    tn_tensor inverse; /* {0}: not made */
    tn_tensor error;
    int64_t rows;
    int64_t multiple; /* 1 ... 65536; 16 or 128 for GEMMs */
    tn_scope scope;
} tn_pad_groups_args;
#define TN_PAD_GROUPS_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(tn_pad_groups_args), {0}, {0}, {0}, {0}, {0}, {0}, 0, 128, { 0 }                    \
    }
TN_API TN_MUST_USE tn_status tn_pad_groups(const tn_pad_groups_args *args, tn_stream stream);

/* dst[r, :] = src[map[r], :]. Both PLAIN of one type, also TN_BYTE (a map itself is one of rows of
 * 8 bytes); or both FP8_BLOCK_1D of one type and scale mode: then the ROW plane with its scales, to
 * the bit what quantizing the gathered rows would make. A row from nowhere is made of the byte
 * `nothing`, which for FP8 is 0, with scale 1; in a map, 255 makes it -1 again. */
typedef struct tn_gather_rows_args {
    size_t size;
    tn_tensor src; /* [R, K] */
    tn_tensor map; /* TN_BYTE, 8 bytes for each row of dst */
    tn_tensor dst; /* [any rows, K] */
    tn_tensor error;
    int nothing; /* 0 ... 255 */
} tn_gather_rows_args;
#define TN_GATHER_ROWS_ARGS_INIT                                                                   \
    { sizeof(tn_gather_rows_args), {0}, {0}, {0}, {0}, 0 }
TN_API TN_MUST_USE tn_status tn_gather_rows(const tn_gather_rows_args *args, tn_stream stream);

/* dst[t, :] = the sum over j of weights[t, j] * src[map[t, j], :], in fp32, by fused multiply-adds
 * from 0 in rising j, rounded once; rows from nowhere add nothing. src and dst PLAIN fp32, bf16 or
 * fp16; map of J numbers for each row of dst, weights fp32 of as many ({0}: 1). */
typedef struct tn_combine_rows_args {
    size_t size;
    tn_tensor src; /* [R, K] */
    tn_tensor map;
    tn_tensor weights;
    tn_tensor dst; /* [T, K] */
    tn_tensor error;
} tn_combine_rows_args;
#define TN_COMBINE_ROWS_ARGS_INIT                                                                  \
    {                                                                                              \
        sizeof(tn_combine_rows_args), {0}, {0}, {0}, {0}, { 0 }                                    \
    }
TN_API TN_MUST_USE tn_status tn_combine_rows(const tn_combine_rows_args *args, tn_stream stream);

/* ---- sharded: the cast of a part of a weight ------------------------------------------------- */

/* A weight of rows x cols is cut anywhere into flat ranges of elements, one for a rank; a 128 x
 * 128 tile may be held by several. First each rank takes the amax of what it holds of each tile;
 * the ranks reduce these by maximum, which is exact in any order; then each casts its own elements.
 * The ranges put together are, to the bit, the ROW plane that tn_quantize makes of the whole weight
 * from numbers of that type (master copies in fp32, say), and the scales are its scales.
 *
 * src holds elements first ... first + n - 1 of the weight; n is how many it has, and may be 0. */

/* amax, fp32 of ceil(rows/128) x ceil(cols/128): of each tile, over what src holds of it; NaN is
 * ignored, and 0 is written where it holds nothing. */
typedef struct tn_shard_amax_args {
    size_t size;
    tn_tensor src; /* PLAIN fp32, bf16 or fp16 */
    int64_t rows, cols;
    int64_t first;
    tn_tensor amax;
} tn_shard_amax_args;
#define TN_SHARD_AMAX_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(tn_shard_amax_args), {0}, 0, 0, 0, { 0 }                                            \
    }
TN_API TN_MUST_USE tn_status tn_shard_amax(const tn_shard_amax_args *args, tn_stream stream);

/* Writes the n bytes from data_first on of `data`, and no byte beside them: where there are others,
 * data must be valid before. scale, if given, is fp32 of ceil(rows/128) x up4(ceil(cols/128)): all
 * scales of the weight, as every rank can make them. `skip` as in tn_grouped_quantize. */
typedef struct tn_shard_quantize_args {
    size_t size;
    tn_tensor src;
    int64_t rows, cols;
    int64_t first;
    tn_tensor amax;
    tn_dtype dtype; /* E4M3 or E5M2 */
    tn_scale_mode scale_mode;
    float amax_epsilon;
    tn_tensor data; /* TN_BYTE */
    int64_t data_first;
    tn_tensor scale; /* {0}: not made */
    tn_tensor skip;  /* {0}: never */
} tn_shard_quantize_args;
#define TN_SHARD_QUANTIZE_ARGS_INIT                                                                \
    {                                                                                              \
        sizeof(tn_shard_quantize_args), {0}, 0, 0, 0, {0}, TN_E4M3, TN_SCALE_POW2, 0.0f, {0}, 0,   \
            {0}, {                                                                                 \
            0                                                                                      \
        }                                                                                          \
    }
TN_API TN_MUST_USE tn_status tn_shard_quantize(const tn_shard_quantize_args *args,
                                               tn_stream stream);

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
    int margin; /* -64 to 64 */
} tn_scale_update_args;
#define TN_SCALE_UPDATE_ARGS_INIT                                                                  \
    { sizeof(tn_scale_update_args), {0}, {0}, TN_E4M3, TN_AMAX_MOST, 0 }

TN_API TN_MUST_USE tn_status tn_scale_update(const tn_scale_update_args *args, tn_stream stream);
/* ---- activations ---------------------------------------------------------------------------- */

/* Of an x in fp32; s(z) = 1 / (1 + exp(-z)). These are the functions of TransformerEngine's
 * common/util/math.h. On every device they come from the same IEEE operations (exact_math.h), so
 * their bits do not depend on it; s is within 2 units of the last place, 0 for z below -87. */
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
 * in fp32 from the left, rounded once to x's type. dbias is that of tn_bias_gradient, of dx. */
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
    tn_scope scope; /* scratch for dbias: 4 bytes for each 128 elements of x */
} tn_activation_backward_args;
#define TN_ACTIVATION_BACKWARD_ARGS_INIT                                                           \
    {                                                                                              \
        sizeof(tn_activation_backward_args), TN_ACTIVATION_GELU, 0, {0}, {0}, {0}, {0},            \
            TN_QUANTIZED_OUT_INIT, {0}, {0}, {                                                     \
            0                                                                                      \
        }                                                                                          \
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
} tn_bias_gradient_args;
#define TN_BIAS_GRADIENT_ARGS_INIT                                                                 \
    {                                                                                              \
        sizeof(tn_bias_gradient_args), {0}, TN_QUANTIZED_OUT_INIT, {0}, {0}, { 0 }                 \
    }
TN_API TN_MUST_USE tn_status tn_bias_gradient(const tn_bias_gradient_args *args, tn_stream stream);

/* ---- norms ---------------------------------------------------------------------------------- */

/*     LAYER  y = (x - mean) * rstd * gamma + beta   rstd = 1 / sqrt(mean of (x - mean)^2 + epsilon)
 *     RMS    y = x * rstd * gamma                   rstd = 1 / sqrt(mean of x^2 + epsilon)
 *
 * of each row, in fp32 from the left, the last product and sum of LAYER fused; rounded once to x's
 * type: that is y, and that is what is quantized. The sums behind the two means have a fixed order:
 * 256 sums from 0, column k goes to sum k mod 256 in rising order (squares by a fused
 * multiply-add), then sums i and i + 128, i and i + 64, ..., i and i + 1. The mean of no columns is
 * 0. */
typedef enum tn_norm { TN_NORM_RMS = 0, TN_NORM_LAYER, TN_NORM_COUNT } tn_norm;

/* With a residual, x + residual rounded to x's type takes the place of x. It is written to `sum`,
 * or over the residual if sum is {0}.
 *
 * Bytes for M x K elements of s bytes: x is read twice, once for the statistics: 2 s, 1 for each
 * plane, s for y; with a residual s to read it and s to write the sum more. */
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
    tn_scope scope; /* scratch, 4 bytes for each row and statistic that is not wanted */
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
} tn_requantize_args;
#define TN_REQUANTIZE_ARGS_INIT                                                                    \
    { sizeof(tn_requantize_args), {0}, TN_PLANE_DATA, {0}, 0, 0.0f, TN_REQUANTIZE_VALUES }

TN_API TN_MUST_USE tn_status tn_requantize(const tn_requantize_args *args, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
