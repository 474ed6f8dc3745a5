/* What the kernels of attention are made of: two products of tiles of 64 tokens, in fp32.
 *
 * 256 threads are 16 x 16. Thread (x, y) makes rows 4 y ... 4 y + 3 of a product; of 64 scores of a
 * row those x, x + 16, x + 32, x + 48; of a head's elements the four from 4 x on, and for heads of
 * more than 64 the four from 64 + 4 x on: 16 or 32 sums in registers. Operands go through shared
 * memory in fp32:
 *
 *     scores     rows . columns   chunks of 32 elements of both, rows of 36 floats
 *     weighted   weights . rows   64 x 64 weights, rows of 68 floats; then 4096 elements of rows
 *
 * so that 64 products take eight reads of 16 bytes, or less, of which a warp's go to different
 * banks or are of the same address: 12 cycles of a multiprocessor's shared memory to 16 of its
 * arithmetic.
 *
 * Each sum is made by one thread, in rising order of what it goes over; tenure_attention.h has it.
 */
#ifndef TENURE_CUDA_ATTENTION_CUH
#define TENURE_CUDA_ATTENTION_CUH

#include "cuda_attention_arguments.h"
#include "cuda_row_sums.cuh"

enum {
    TOKENS = TN__ATTENTION_TILE,
    ROWS = 4, /* of a thread; and its scores in each */
    CHUNK = 32,
    CHUNK_FOURS = CHUNK / 4 + 1,   /* of a row in shared memory; the last is not used, so that */
    WEIGHT_FOURS = TOKENS / 4 + 1, /* rows begin at different banks */
    OPERAND_FOURS = 2 * TOKENS * CHUNK_FOURS,
    WIDE_FLOATS = 4096 /* of rows that are weighted at once */
};

struct attention_memory {
    float4 weights[TOKENS * WEIGHT_FOURS];
    float4 operands[OPERAND_FOURS];
};

/* `count` tokens of one head. */
template <typename T> struct head_rows {
    const T *data;
    int64_t stride;
    int count;
};

/* Which of the contracted tokens a row takes. */
struct row_range {
    int first, end;
};

__device__ __forceinline__ int thread_x() { return (int)(threadIdx.x % 16); }
__device__ __forceinline__ int thread_row() { return (int)(threadIdx.x / 16) * ROWS; }

/* ---- where a block works ------------------------------------------------------------------- */

struct attention_place {
    int64_t first; /* token that the sequence begins with */
    int64_t token; /* of the sequence, that the block's tile begins with */
    int64_t head;
};

/* is_reversed: the last tile first, which has the most work if it is causal. */
__device__ __forceinline__ attention_place place_of_block(const tn__cuda_attention_arguments &a,
                                                          uint32_t heads, bool is_reversed) {
    const uint32_t tile = blockIdx.x / a.across, rest = blockIdx.x - tile * a.across;
    const uint32_t sequence = rest / heads;
    attention_place at;
    at.first = (int64_t)sequence * a.sequence;
    at.token = (int64_t)(is_reversed ? a.tiles - 1 - tile : tile) * TOKENS;
    at.head = rest - sequence * heads;
    return at;
}

__device__ __forceinline__ int tokens_from(const tn__cuda_attention_arguments &a, int64_t token) {
    return (int)min(a.sequence - token, (int64_t)TOKENS);
}

/* Of qkv: `head` counts those of queries, then of keys, then of values. */
template <typename T>
__device__ __forceinline__ head_rows<T> packed_rows(const tn__cuda_attention_arguments &a,
                                                    int64_t first, int64_t token, int64_t head) {
    head_rows<T> rows;
    rows.data = (const T *)a.qkv + (first + token) * a.packed_cols + head * a.head_dim;
    rows.stride = a.packed_cols;
    rows.count = tokens_from(a, token);
    return rows;
}

/* Of y or dy. */
template <typename T>
__device__ __forceinline__ head_rows<T> query_rows(const tn__cuda_attention_arguments &a,
                                                   const void *data, int64_t first, int64_t token,
                                                   int64_t head) {
    head_rows<T> rows;
    rows.stride = (int64_t)a.heads * a.head_dim;
    rows.data = (const T *)data + (first + token) * rows.stride + head * a.head_dim;
    rows.count = tokens_from(a, token);
    return rows;
}

/* ---- scores -------------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ void load_chunk(float4 *to, const head_rows<T> &rows, int col,
                                           int head_dim, int vectors) {
    const int row = (int)(threadIdx.x / 4), piece = (int)(threadIdx.x % 4);
    float eight[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (row < rows.count)
        load_eight<T>(eight, rows.data + row * rows.stride, col + piece * 8, head_dim, vectors);
    to += row * CHUNK_FOURS + piece * 2;
    to[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
    to[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
}

__device__ __forceinline__ float add_four(float4 a, float4 b, float sum) {
    sum = __fmaf_rn(a.x, b.x, sum);
    sum = __fmaf_rn(a.y, b.y, sum);
    sum = __fmaf_rn(a.z, b.z, sum);
    return __fmaf_rn(a.w, b.w, sum);
}

/* Rows by columns, both tokens: sums over the elements of the head, from 0. */
template <typename T>
__device__ __forceinline__ void
multiply_heads(float (&sum)[ROWS][ROWS], attention_memory &memory, const head_rows<T> &rows,
               const head_rows<T> &columns, const tn__cuda_attention_arguments &a) {
    float4 *const of_rows = memory.operands, *const of_columns = of_rows + TOKENS * CHUNK_FOURS;
    const float4 *const row = of_rows + thread_row() * CHUNK_FOURS;
    const float4 *const column = of_columns + thread_x() * CHUNK_FOURS;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < ROWS; c++)
            sum[r][c] = 0.0f;
    for (int col = 0; col < a.head_dim; col += CHUNK) {
        __syncthreads();
        load_chunk<T>(of_rows, rows, col, a.head_dim, a.vectors);
        load_chunk<T>(of_columns, columns, col, a.head_dim, a.vectors);
        __syncthreads();
        const int fours = min(CHUNK, a.head_dim - col) / 4;
#pragma unroll 1
        for (int k = 0; k < fours; k++) {
            float4 of[ROWS], by[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                of[i] = row[i * CHUNK_FOURS + k];
                by[i] = column[16 * i * CHUNK_FOURS + k];
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < ROWS; c++)
                    sum[r][c] = add_four(of[r], by[c], sum[r][c]);
        }
    }
}

/* ---- weighted sums of rows ----------------------------------------------------------------- */

__device__ __forceinline__ void put_weights(attention_memory &memory,
                                            const float (&weight)[ROWS][ROWS]) {
    float *const to = (float *)memory.weights + thread_row() * WEIGHT_FOURS * 4 + thread_x();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < ROWS; c++)
            to[r * WEIGHT_FOURS * 4 + 16 * c] = weight[r][c];
}

/* `STEP` tokens from `token` on, whole rows of `WIDTH` elements. */
template <typename T, int WIDTH, int STEP>
__device__ __forceinline__ void load_rows(float4 *to, const head_rows<T> &rows, int token,
                                          int head_dim, int vectors) {
    enum { PIECES = WIDTH / 8 };
#pragma unroll
    for (int i = 0; i < STEP * PIECES / TN__ATTENTION_THREADS; i++) {
        const int piece = i * TN__ATTENTION_THREADS + (int)threadIdx.x, row = piece / PIECES;
        float eight[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (token + row < rows.count)
            load_eight<T>(eight, rows.data + (token + row) * rows.stride, piece % PIECES * 8,
                          head_dim, vectors);
        to[piece * 2] = make_float4(eight[0], eight[1], eight[2], eight[3]);
        to[piece * 2 + 1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    }
}

template <int FOURS>
__device__ __forceinline__ void add_weighted(float (&sum)[FOURS * 4], float weight,
                                             const float4 (&row)[FOURS]) {
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        sum[4 * f] = __fmaf_rn(weight, row[f].x, sum[4 * f]);
        sum[4 * f + 1] = __fmaf_rn(weight, row[f].y, sum[4 * f + 1]);
        sum[4 * f + 2] = __fmaf_rn(weight, row[f].z, sum[4 * f + 2]);
        sum[4 * f + 3] = __fmaf_rn(weight, row[f].w, sum[4 * f + 3]);
    }
}

__device__ __forceinline__ float part_of(const float4 &four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

/* Adds the sum of weights times rows to each row, over the tokens of its range; IS_WHOLE: all. */
template <typename T, int FOURS, bool IS_WHOLE>
__device__ __forceinline__ void
add_heads_of(float (&sum)[ROWS][FOURS * 4], attention_memory &memory, const head_rows<T> &rows,
             const row_range (&range)[ROWS], const tn__cuda_attention_arguments &a) {
    enum { WIDTH = 64 * FOURS, STEP = WIDE_FLOATS / WIDTH };
    const float4 *const weights = memory.weights + thread_row() * WEIGHT_FOURS;
    const float4 *const from = memory.operands + thread_x();
    for (int token = 0; token < rows.count; token += STEP) {
        __syncthreads();
        load_rows<T, WIDTH, STEP>(memory.operands, rows, token, a.head_dim, a.vectors);
        __syncthreads();
        const int count = IS_WHOLE ? (int)STEP : min((int)STEP, rows.count - token);
        for (int k = 0; k < count; k += 4) {
            float4 weight[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                weight[r] = weights[r * WEIGHT_FOURS + (token + k) / 4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float4 row[FOURS];
#pragma unroll
                for (int f = 0; f < FOURS; f++)
                    row[f] = from[(k + i) * (WIDTH / 4) + 16 * f];
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (IS_WHOLE ||
                        (token + k + i >= range[r].first && token + k + i < range[r].end))
                        add_weighted<FOURS>(sum[r], part_of(weight[r], i), row);
            }
        }
    }
}

template <typename T, int FOURS>
__device__ __forceinline__ void add_heads(float (&sum)[ROWS][FOURS * 4], attention_memory &memory,
                                          const head_rows<T> &rows, const row_range (&range)[ROWS],
                                          bool is_whole, const tn__cuda_attention_arguments &a) {
    if (is_whole)
        add_heads_of<T, FOURS, true>(sum, memory, rows, range, a);
    else
        add_heads_of<T, FOURS, false>(sum, memory, rows, range, a);
}

/* ---- rows ---------------------------------------------------------------------------------- */

__device__ __forceinline__ bool is_in(const row_range &range, int at) {
    return at >= range.first && at < range.end;
}

/* The 16 threads of a row hold one sum each; all get the total. */
__device__ __forceinline__ float total_of_row(float sum) {
#pragma unroll
    for (int apart = TN__ATTENTION_SUMS / 2; apart > 0; apart /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, apart));
    return sum;
}

__device__ __forceinline__ float largest_of_row(float largest) {
#pragma unroll
    for (int apart = TN__ATTENTION_SUMS / 2; apart > 0; apart /= 2)
        largest = tn__attention_larger(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, apart));
    return largest;
}

/* This thread's elements of a row of a head. */
template <typename T, int FOURS>
__device__ __forceinline__ void store_head(T *row, const float (&values)[FOURS * 4], int head_dim,
                                           int vectors) {
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        const int col = 64 * f + 4 * thread_x();
        const float *four = values + 4 * f;
        if (col >= head_dim) continue;
        if (!vectors) {
#pragma unroll
            for (int v = 0; v < 4; v++)
                element<T>::store(row, col + v, canonical_of<T>(four[v]));
        } else if constexpr (sizeof(T) == 4) {
            *(float4 *)(row + col) =
                make_float4(canonical_of<T>(four[0]), canonical_of<T>(four[1]),
                            canonical_of<T>(four[2]), canonical_of<T>(four[3]));
        } else {
            *(uint2 *)(row + col) =
                make_uint2(element<T>::word(four, 0), element<T>::word(four, 1));
        }
    }
}

#endif
