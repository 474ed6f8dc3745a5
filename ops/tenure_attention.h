/* Tenure: attention, forward and backward, of sequences of one length.
 *
 *     tn_attention_forward_args attention = TN_ATTENTION_FORWARD_ARGS_INIT;
 *     attention.qkv = qkv;               [T, (heads + 2 heads_kv) * D], as one Linear makes it
 *     attention.y = y;                   [T, heads * D]
 *     attention.log_sum = log_sum;       fp32 [heads, T], for backward
 *     attention.heads = 16, attention.sequence = 1024, attention.is_causal = 1;
 *     tn_attention_forward(&attention, stream);
 *
 * The rules of tenure_ops.h hold here too. What a call needs beside its tensors does not grow with
 * the square of the sequence, and there are no atomics: all sums have a fixed order, which is
 * written down here, so that the host and every GPU give the same bits.
 *
 * Row t of qkv is a token: its queries of all heads, then its keys and then its values of all
 * heads_kv heads, D elements each. D, which follows from the columns of qkv, is a multiple of 8, at
 * most 128. Tokens n S ... n S + S - 1 are sequence n, of S = `sequence` tokens; T is a multiple of
 * S. Query head h reads head h / (heads / heads_kv) of the keys and values.
 */
#ifndef TENURE_ATTENTION_H
#define TENURE_ATTENTION_H

#include "tenure_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TN_ATTENTION_HEAD_DIM_MAX = 128 };

/* y = softmax(scale * q k^T) v, for each head of each sequence, with keys up to the query's own
 * token if `is_causal`. In fp32, for query i:
 *
 *     score_j = scale * (sum of q_d * k_jd, in rising d)
 *     keys go in blocks of 64 of the sequence, in rising order; in each block
 *         m'   = the largest score up to and with this block (0 if that is -infinity)
 *         c    = exp(m_before - m'), with which the sums so far are multiplied
 *         p_j  = exp(score_j - m')
 *         sum_b = sum_b + p_j, in rising j, 16 of them: j goes to b = j mod 16
 *         o_d  = o_d + p_j * v_jd, in rising j
 *     sum     = of sums b and b + 8, b and b + 4, b and b + 2, b and b + 1
 *     y_d     = o_d / sum, rounded once
 *     log_sum = m' + log(sum)
 *
 * Sums start from 0, products within them are fused multiply-adds, exp is exact_math's (at most 1
 * ulp; 0 below -87). A score of -infinity has a weight of 0; where one is NaN or +infinity, or all
 * are -infinity, the query's y and log_sum are NaN. Keys that a query does not see are not read for
 * it, whatever they hold.
 *
 * 4 S D operations (half if causal) for each query head and token. */
typedef struct tn_attention_forward_args {
    size_t size;
    tn_tensor qkv;     /* PLAIN fp32, bf16 or fp16, [T, (heads + 2 heads_kv) * D] */
    tn_tensor y;       /* of qkv's type, [T, heads * D] */
    tn_tensor log_sum; /* PLAIN fp32, [heads, T]; {0}: not wanted */
    int64_t heads;     /* of queries */
    int64_t heads_kv;  /* of keys and of values, a divisor of heads; 0: heads */
    int64_t sequence;  /* S */
    int is_causal;
    float scale; /* finite, above 0; 0: 1 / sqrt(D) */
} tn_attention_forward_args;
#define TN_ATTENTION_FORWARD_ARGS_INIT                                                             \
    { sizeof(tn_attention_forward_args), {0}, {0}, {0}, 0, 0, 0, 0, 0.0f }
TN_API TN_MUST_USE tn_status tn_attention_forward(const tn_attention_forward_args *args,
                                                  tn_stream stream);

/* dqkv from dy and what forward read and left. With score_ij as there, in fp32:
 *
 *     D_i   = sum of dy_id * y_id, in 16 sums: d goes to sum d mod 16, in rising d; added up as in
 *             forward
 *     p_ij  = exp(score_ij - log_sum_i), at most 1
 *     e_ij  = p_ij * ((sum of dy_id * v_jd, in rising d) - D_i)
 *     dq_id = scale * (sum of e_ij * k_jd, in rising j)
 *     dk_jd = scale * (sum of e_ij * q_id, over the query heads that read j's, and in rising i)
 *     dv_jd = sum of p_ij * dy_id, likewise
 *
 * each rounded once to dqkv's type. All of dqkv is written. Scores are made twice, once for dq and
 * once for dk and dv, so that nothing is added up across blocks of threads: 14 S D operations (half
 * if causal) for each query head and token, of which 10 are what the shape asks for. */
typedef struct tn_attention_backward_args {
    size_t size;
    tn_tensor dy;      /* of qkv's type, [T, heads * D] */
    tn_tensor qkv;     /* what forward read */
    tn_tensor y;       /* what forward made; likewise log_sum */
    tn_tensor log_sum; /* PLAIN fp32, [heads, T] */
    tn_tensor dqkv;    /* of qkv's shape and type */
    int64_t heads;     /* as in forward, and all below */
    int64_t heads_kv;
    int64_t sequence;
    int is_causal;
    float scale;
    tn_scope scope; /* scratch: 4 bytes for each query head and token */
} tn_attention_backward_args;
#define TN_ATTENTION_BACKWARD_ARGS_INIT                                                            \
    {                                                                                              \
        sizeof(tn_attention_backward_args), {0}, {0}, {0}, {0}, {0}, 0, 0, 0, 0, 0.0f, { 0 }       \
    }
TN_API TN_MUST_USE tn_status tn_attention_backward(const tn_attention_backward_args *args,
                                                   tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
