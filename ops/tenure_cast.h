/* Tenure: casts that do more than one tensor's plain cast, and ops that quantize what they make.
 *
 *     tn_quantized_out quantized = TN_QUANTIZED_OUT_INIT;
 *     quantized.tensor = saved_h;                      (FP8_BLOCK_1D)
 *     quantized.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
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

#ifdef __cplusplus
}
#endif
#endif
