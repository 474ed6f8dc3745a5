/* The kernels of attention's gradient: a block of the first makes that of 64 queries of a head,
 * past which the keys and values go; a block of the second that of 64 keys and values, past which
 * the queries of all heads that read them go. Each makes the scores anew, so that every sum is one
 * block's (cuda_attention.cuh, tenure_attention.h).
 *
 * Bound by arithmetic in fp32: of S tokens 6 S D and 8 S D operations for each query.
 */
#include "cuda_attention.cuh"

/* Scores become weights, and products of dy and values become slopes. */
__device__ __forceinline__ void weigh(float (&score)[ROWS][ROWS], float (&slope)[ROWS][ROWS], int r,
                                      int c, float scale, float log_sum, float dot) {
    score[r][c] = tn__attention_weight(__fmul_rn(scale, score[r][c]), log_sum);
    slope[r][c] = tn__attention_slope(score[r][c], slope[r][c], dot);
}

template <int FOURS> __device__ __forceinline__ void clear(float (&out)[ROWS][FOURS * 4]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int d = 0; d < FOURS * 4; d++)
            out[r][d] = 0.0f;
}

/* The block's rows, for which `head` counts as in packed_rows. */
template <typename T, int FOURS, bool IS_SCALED>
__device__ __forceinline__ void store_rows_of(const tn__cuda_attention_arguments &a,
                                              const attention_place &at, int64_t head,
                                              float (&out)[ROWS][FOURS * 4]) {
    const int count = tokens_from(a, at.token);
    T *row = (T *)a.dqkv + (at.first + at.token + thread_row()) * a.packed_cols + head * a.head_dim;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (thread_row() + r >= count) return;
#pragma unroll
        for (int d = 0; d < FOURS * 4; d++)
            if (IS_SCALED) out[r][d] = __fmul_rn(a.scale, out[r][d]);
        store_head<T, FOURS>(row, out[r], a.head_dim, a.vectors);
        row += a.packed_cols;
    }
}

/* ---- of queries ---------------------------------------------------------------------------- */

/* Of one row, by its 16 threads. */
template <typename T>
__device__ __forceinline__ float dot_of_row(const T *dy, const T *y, bool is_there, int head_dim) {
    float sum = 0.0f;
    for (int d = thread_x(); is_there && d < head_dim; d += TN__ATTENTION_SUMS)
        sum = __fmaf_rn(element<T>::load(dy, d), element<T>::load(y, d), sum);
    return canonical_of<float>(total_of_row(sum));
}

template <typename T, int FOURS>
__device__ __forceinline__ void attention_dq(const tn__cuda_attention_arguments &a) {
    __shared__ attention_memory memory;
    const attention_place at = place_of_block(a, a.heads, a.is_causal);
    const int64_t head_kv = at.head / (a.heads / a.heads_kv);
    const head_rows<T> queries = packed_rows<T>(a, at.first, at.token, at.head);
    const head_rows<T> dy = query_rows<T>(a, a.dy, at.first, at.token, at.head);
    const head_rows<T> y = query_rows<T>(a, a.y, at.first, at.token, at.head);
    const int64_t end = a.is_causal ? at.token + queries.count : a.sequence;
    float out[ROWS][FOURS * 4], log_sum[ROWS], dot[ROWS];
    clear<FOURS>(out);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = thread_row() + r;
        const int64_t statistic = at.head * a.tokens + at.first + at.token + row;
        const bool is_there = row < queries.count;
        log_sum[r] = is_there ? a.log_sum[statistic] : 0.0f;
        dot[r] =
            dot_of_row<T>(dy.data + row * dy.stride, y.data + row * y.stride, is_there, a.head_dim);
        if (is_there && thread_x() == 0) a.dots[statistic] = dot[r];
    }
    for (int64_t key = 0; key < end; key += TOKENS) {
        const head_rows<T> keys = packed_rows<T>(a, at.first, key, a.heads + head_kv);
        const head_rows<T> values =
            packed_rows<T>(a, at.first, key, (int64_t)a.heads + a.heads_kv + head_kv);
        const bool is_diagonal = a.is_causal && key == at.token;
        row_range range[ROWS];
        float score[ROWS][ROWS], slope[ROWS][ROWS];
        multiply_heads<T>(score, memory, queries, keys, a);
        multiply_heads<T>(slope, memory, dy, values, a);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            range[r].first = 0;
            range[r].end = is_diagonal ? min(keys.count, thread_row() + r + 1) : keys.count;
#pragma unroll
            for (int c = 0; c < ROWS; c++)
                weigh(score, slope, r, c, a.scale, log_sum[r], dot[r]);
        }
        put_weights(memory, slope);
        add_heads<T, FOURS>(out, memory, keys, range, !is_diagonal && keys.count == TOKENS, a);
    }
    store_rows_of<T, FOURS, true>(a, at, at.head, out);
}

/* ---- of keys and values -------------------------------------------------------------------- */

/* Adds what 64 queries of a head give. */
template <typename T, int FOURS>
__device__ __forceinline__ void
add_queries(const tn__cuda_attention_arguments &a, attention_memory &memory,
            const attention_place &at, const head_rows<T> &keys, const head_rows<T> &values,
            int64_t head, int64_t query, float (&of_key)[ROWS][FOURS * 4],
            float (&of_value)[ROWS][FOURS * 4]) {
    const head_rows<T> queries = packed_rows<T>(a, at.first, query, head);
    const head_rows<T> dy = query_rows<T>(a, a.dy, at.first, query, head);
    const bool is_diagonal = a.is_causal && query == at.token;
    const bool is_whole = !is_diagonal && queries.count == TOKENS;
    const int64_t statistics = head * a.tokens + at.first + query;
    row_range range[ROWS];
    float score[ROWS][ROWS], slope[ROWS][ROWS];
    multiply_heads<T>(score, memory, keys, queries, a);
    multiply_heads<T>(slope, memory, values, dy, a);
#pragma unroll
    for (int c = 0; c < ROWS; c++) {
        const int at_query = thread_x() + 16 * c;
        const bool is_there = at_query < queries.count;
        const float log_sum = is_there ? a.log_sum[statistics + at_query] : 0.0f;
        const float dot = is_there ? a.dots[statistics + at_query] : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            weigh(score, slope, r, c, a.scale, log_sum, dot);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        range[r].first = is_diagonal ? thread_row() + r : 0;
        range[r].end = queries.count;
    }
    put_weights(memory, score);
    add_heads<T, FOURS>(of_value, memory, dy, range, is_whole, a);
    __syncthreads(); /* all have read the weights */
    put_weights(memory, slope);
    add_heads<T, FOURS>(of_key, memory, queries, range, is_whole, a);
}

template <typename T, int FOURS>
__device__ __forceinline__ void attention_dkv(const tn__cuda_attention_arguments &a) {
    __shared__ attention_memory memory;
    const attention_place at = place_of_block(a, a.heads_kv, false);
    const int64_t key_head = a.heads + at.head, value_head = key_head + a.heads_kv;
    const head_rows<T> keys = packed_rows<T>(a, at.first, at.token, key_head);
    const head_rows<T> values = packed_rows<T>(a, at.first, at.token, value_head);
    const int64_t each = a.heads / a.heads_kv;
    float of_key[ROWS][FOURS * 4], of_value[ROWS][FOURS * 4];
    clear<FOURS>(of_key);
    clear<FOURS>(of_value);
    for (int64_t head = at.head * each; head < (at.head + 1) * each; head++)
        for (int64_t query = a.is_causal ? at.token : 0; query < a.sequence; query += TOKENS)
            add_queries<T, FOURS>(a, memory, at, keys, values, head, query, of_key, of_value);
    store_rows_of<T, FOURS, true>(a, at, key_head, of_key);
    store_rows_of<T, FOURS, false>(a, at, value_head, of_value);
}

#define KERNEL(name, body, T, fours, blocks)                                                       \
    extern "C" __global__ void __launch_bounds__(TN__ATTENTION_THREADS, blocks)                    \
        name(const __grid_constant__ tn__cuda_attention_arguments a) {                             \
        body<T, fours>(a);                                                                         \
    }
#define BY_TYPE(source, T)                                                                         \
    KERNEL(attention_dq_64_##source, attention_dq, T, 1, 2)                                        \
    KERNEL(attention_dq_128_##source, attention_dq, T, 2, 2)                                       \
    KERNEL(attention_dkv_64_##source, attention_dkv, T, 1, 2)                                      \
    KERNEL(attention_dkv_128_##source, attention_dkv, T, 2, 1)
BY_TYPE(fp32, float)
BY_TYPE(bf16, __nv_bfloat16)
BY_TYPE(fp16, __half)
