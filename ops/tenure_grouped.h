/* Tenure: casts of many tensors at once and of parts of one: groups whose sizes only the device
 * knows, lists, rows that move by maps, shards.
 *
 *     tn_grouped_quantize_args quantize = TN_GROUPED_QUANTIZE_ARGS_INIT;
 *     quantize.src = tokens, quantize.offsets = offsets, quantize.error = error;
 *     quantize.row = (tn_grouped_plane){data, scale};
 *     quantize.scope = op_scope;
 *     tn_grouped_quantize(&quantize, stream);          (every expert's tokens, in one launch)
 *
 * The rules of tenure_ops.h hold here too.
 */
#ifndef TENURE_GROUPED_H
#define TENURE_GROUPED_H

#include "tenure_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* ---- products of groups ---------------------------------------------------------------------- */

/* tn_gemm of each group: M-grouped (FPROP, DGRAD) and K-grouped (WGRAD). m are the group's rows.
 *
 *     form    D                            A                 B
 *     FPROP   rows of y, [m, n]            x  [m, k], ROW    weights[e] [n, k], 2D, ROW
 *     DGRAD   rows of dx, [m, k]           dy [m, n], ROW    weights[e] [n, k], 2D, COL
 *     WGRAD   d[e] = dw of group e [n, k]  dy [m, n], COL    x [m, k], COL
 *
 * a and b are grouped planes, 1D, as tn_grouped_quantize makes them; or, with scale {0}, data is a
 * PLAIN matrix of such rows, and the weights are PLAIN of its type. A group without rows has
 * nothing to read or write in FPROP and DGRAD; in WGRAD its d[e] is 0, or stays if `accumulate`.
 * Rows of y and dx from offsets[groups] on are left alone. Each group's result is that of tn_gemm
 * on it alone: to the bit on the host, on CUDA wherever cuBLASLt takes the same algorithm for both.
 *
 * offsets are on the host, as a loop over groups needs them: NULL is TN_UNSUPPORTED. On CUDA the
 * products follow each other; groups that begin at no multiple of 16 bytes are copied, and each new
 * m costs the lookup of an algorithm. Scratch is what the largest product wants. A COL plane of a
 * weight that is absent is derived and stays by the policy of its tensor. Errors as tn_gemm. */
typedef struct tn_grouped_gemm_args {
    size_t size;
    tn_gemm_form form;
    int64_t groups;         /* 0 ... 4096 */
    const int64_t *offsets; /* groups + 1, the first 0; read during the call */
    int64_t n, k;
    tn_grouped_plane a;
    tn_grouped_plane b;        /* of WGRAD */
    tn_dtype a_dtype, b_dtype; /* of grouped planes: E4M3 or E5M2 */
    const tn_tensor *weights;  /* of FPROP and DGRAD: one for each group */
    const tn_tensor *d;        /* PLAIN: of FPROP and DGRAD one, of WGRAD one for each group */
    int accumulate;
    tn_scope scope;
    const tn_tensor *biases; /* of FPROP: tn_gemm's, one for each group, {0}: none; NULL: none */
} tn_grouped_gemm_args;
#define TN_GROUPED_GEMM_ARGS_INIT                                                                  \
    {                                                                                              \
        sizeof(tn_grouped_gemm_args), TN_GEMM_FPROP, 0, NULL, 0, 0, {{0}, {0}}, {{0}, {0}},        \
            TN_E4M3, TN_E4M3, NULL, NULL, 0, {0}, NULL                                             \
    }
TN_API TN_MUST_USE tn_status tn_grouped_gemm(const tn_grouped_gemm_args *args, tn_stream stream);

/* ---- many tensors at once -------------------------------------------------------------------- */

/* tn_quantize of src[i] to dst[i] for each of `count` tensors, in one launch of the cast (and a
 * small one that tells the device which they are). All src have one type, all
 * dst one format (FP8_BLOCK_1D or 2D), type and scale mode. The arrays are read during the call.
 * The scope is for 170 bytes or so of scratch for each tensor. */
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
 * ignored, and 0 is written where it holds nothing. With `whole` it is one number, of all that src
 * holds, for formats with one scale (tn_quantize takes it as whole_amax). */
typedef struct tn_shard_amax_args {
    size_t size;
    tn_tensor src; /* PLAIN fp32, bf16 or fp16 */
    int64_t rows, cols;
    int64_t first;
    tn_tensor amax;
    int whole;
} tn_shard_amax_args;
#define TN_SHARD_AMAX_ARGS_INIT                                                                    \
    { sizeof(tn_shard_amax_args), {0}, 0, 0, 0, {0}, 0 }
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

#ifdef __cplusplus
}
#endif
#endif
