/* The kernels of attention: a block takes 64 queries of a head, past which the keys and values go
 * in tiles of 64; nothing but y and log_sum is written (cuda_attention.cuh, tenure_attention.h).
 *
 * Bound by arithmetic in fp32: of S tokens 4 S D operations for each query. At 67 TFLOP/s, an
 * H200's, that is 0.26 ms for 4096 tokens of 16 heads of 64 with S = 1024. What is read for a tile
 * of keys, 2 x 64 x D elements and the queries again, comes from the L2 cache.
 */
#include "cuda_attention.cuh"

/* Scores become weights; what was summed before is brought to the same base. */
template <int FOURS>
__device__ __forceinline__ void weigh(float (&score)[ROWS][ROWS], const row_range (&range)[ROWS],
                                      float scale, float (&largest)[ROWS], float (&sum)[ROWS],
                                      float (&out)[ROWS][FOURS * 4]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float above = largest[r];
#pragma unroll
        for (int c = 0; c < ROWS; c++) {
            score[r][c] = __fmul_rn(scale, score[r][c]);
            if (is_in(range[r], thread_x() + 16 * c))
                above = tn__attention_larger(above, score[r][c]);
        }
        above = largest_of_row(above);
        const float base = tn__attention_base(above);
        const float factor = tn__attention_rescale(largest[r], base);
        largest[r] = above;
        sum[r] = __fmul_rn(sum[r], factor);
#pragma unroll
        for (int d = 0; d < FOURS * 4; d++)
            out[r][d] = __fmul_rn(out[r][d], factor);
#pragma unroll
        for (int c = 0; c < ROWS; c++) {
            const bool is_seen = is_in(range[r], thread_x() + 16 * c);
            score[r][c] = is_seen ? tn__attention_weight(score[r][c], base) : 0.0f;
            if (is_seen) sum[r] = __fadd_rn(sum[r], score[r][c]);
        }
    }
}

template <typename T, int FOURS>
__device__ __forceinline__ void
store_queries(const tn__cuda_attention_arguments &a, const attention_place &at,
              const float (&largest)[ROWS], const float (&sum)[ROWS],
              float (&out)[ROWS][FOURS * 4]) {
    const int count = tokens_from(a, at.token);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float total = total_of_row(sum[r]); /* by all threads */
        const int64_t token = at.first + at.token + thread_row() + r;
        if (thread_row() + r >= count) continue;
#pragma unroll
        for (int d = 0; d < FOURS * 4; d++)
            out[r][d] = __fdiv_rn(out[r][d], total);
        store_head<T, FOURS>((T *)a.y + (token * a.heads + at.head) * a.head_dim, out[r],
                             a.head_dim, a.vectors);
        if (a.log_sum && thread_x() == 0)
            a.log_sum[at.head * a.tokens + token] =
                canonical_of<float>(tn__attention_log_sum(tn__attention_base(largest[r]), total));
    }
}

template <typename T, int FOURS>
__device__ __forceinline__ void attention(const tn__cuda_attention_arguments &a) {
    __shared__ attention_memory memory;
    const attention_place at = place_of_block(a, a.heads, a.is_causal);
    const int64_t head_kv = at.head / (a.heads / a.heads_kv);
    const head_rows<T> queries = packed_rows<T>(a, at.first, at.token, at.head);
    const int64_t end = a.is_causal ? at.token + queries.count : a.sequence;
    float out[ROWS][FOURS * 4], sum[ROWS], largest[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sum[r] = 0.0f, largest[r] = -INFINITY;
#pragma unroll
        for (int d = 0; d < FOURS * 4; d++)
            out[r][d] = 0.0f;
    }
    for (int64_t key = 0; key < end; key += TOKENS) {
        const head_rows<T> keys = packed_rows<T>(a, at.first, key, a.heads + head_kv);
        const head_rows<T> values =
            packed_rows<T>(a, at.first, key, (int64_t)a.heads + a.heads_kv + head_kv);
        const bool is_diagonal = a.is_causal && key == at.token;
        row_range range[ROWS];
        float score[ROWS][ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            range[r].first = 0;
            range[r].end = is_diagonal ? min(keys.count, thread_row() + r + 1) : keys.count;
        }
        multiply_heads<T>(score, memory, queries, keys, a);
        weigh<FOURS>(score, range, a.scale, largest, sum, out);
        put_weights(memory, score);
        add_heads<T, FOURS>(out, memory, values, range, !is_diagonal && keys.count == TOKENS, a);
    }
    store_queries<T, FOURS>(a, at, largest, sum, out);
}

#define KERNEL(source, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(TN__ATTENTION_THREADS, 2)                         \
        attention_64_##source(const __grid_constant__ tn__cuda_attention_arguments a) {            \
        attention<T, 1>(a);                                                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TN__ATTENTION_THREADS, 2)                         \
        attention_128_##source(const __grid_constant__ tn__cuda_attention_arguments a) {           \
        attention<T, 2>(a);                                                                        \
    }
KERNEL(fp32, float)
KERNEL(bf16, __nv_bfloat16)
KERNEL(fp16, __half)
