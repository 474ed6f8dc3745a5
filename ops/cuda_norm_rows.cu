/* Kernels of the norms that take whole rows: statistics, the value, and the 1D ROW plane, all from
 * one read of x.
 *
 * A block of 256 threads takes a row, or several short ones, and holds it in registers. Bytes that
 * must move for each element of s bytes: s to read x (with a residual 3 s: x, the residual, their
 * sum), s for the value and 1 for the plane. Column planes need 128 rows at once: cuda_norm.cu.
 */
#include "cuda_norm.cuh"

/* The 16 lanes of a half warp each hold the maxima of STEPS blocks; returns, on lane c, that of
 * block c / (16 / STEPS) over the 16 lanes. */
template <int STEPS>
__device__ __forceinline__ float half_warp_step_max(float (&max)[STEPS], int lane16) {
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
        const int kept = STEPS * apart / 16; /* steps that a lane is still concerned with */
#pragma unroll
        for (int s = 0; s < kept; s++) {
            const float keep = lane16 & apart ? max[s + kept] : max[s];
            const float give = lane16 & apart ? max[s] : max[s + kept];
            max[s] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, apart));
        }
        if (kept == 0) max[0] = fmaxf(max[0], __shfl_xor_sync(0xFFFFFFFFu, max[0], apart));
    }
    return max[0];
}

/* The scale of a block; the last row also writes the zeros behind its column of scales. */
__device__ __forceinline__ void row_scale_put(const tn__cuda_quantize_arguments &a, int64_t row,
                                              int64_t block, float scale) {
    float *to = a.row.scale + block * a.row.scale_stride;
    to[row] = inverse_scale(scale);
    if (row + 1 < a.rows) return;
    for (int64_t beyond = a.rows; beyond < a.row.scale_stride; beyond++)
        to[beyond] = 0.0f;
}

/* 8 codes, of which `left` are in the row. */
template <typename T>
__device__ __forceinline__ void store_codes(unsigned char *to, uint2 codes, int left, int vectors) {
    if (vectors) {
        if constexpr (sizeof(T) == 2) {
            if (left > 0) *(uint2 *)to = codes;
        } else {
            if (left > 0) *(uint32_t *)to = codes.x;
            if (left > 4) *(uint32_t *)(to + 4) = codes.y;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++)
        if (j < left) to[j] = (unsigned char)((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)));
}

/* Blocks of 1 x 128: a half warp holds one in each step. */
template <typename T, __nv_fp8_interpretation_t F, int STEPS>
__device__ __forceinline__ void
quantize_steps(const tn__cuda_quantize_arguments &a, const row_place &at, int64_t first,
               const uint32_t (&words)[STEPS][patch_words<T>::COUNT]) {
    const int lane16 = (int)threadIdx.x % 16, lanes_each = 16 / STEPS;
    const int left = columns_left(at, first);
    float max[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        max[s] = 0.0f;
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            max[s] = fmaxf(max[s], fabsf(element<T>::value(words[s], j)));
    }
    const float amax = half_warp_step_max<STEPS>(max, lane16);
    const float scale = block_scale<T, F>(amax, a.amax_epsilon, a.is_pow2);
    const int64_t block = first / TN__TILE + lane16 / lanes_each * (STEP_COLUMNS / TN__TILE) +
                          at.thread * LANE_COLUMNS / TN__TILE;
    if (lane16 % lanes_each == 0 && block * TN__TILE < at.cols)
        row_scale_put(a, at.row, block, scale);
    unsigned char *to = a.row.data + at.row * at.cols + first + at.thread * LANE_COLUMNS;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float of_step = __shfl_sync(0xFFFFFFFFu, scale, s * lanes_each, 16);
        float scaled[LANE_COLUMNS];
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            scaled[j] = __fmul_rn(element<T>::value(words[s], j), of_step);
        const uint2 codes = make_uint2(cast_four<F>(scaled[0], scaled[1], scaled[2], scaled[3]),
                                       cast_four<F>(scaled[4], scaled[5], scaled[6], scaled[7]));
        store_codes<T>(to + s * STEP_COLUMNS, codes, left - s * STEP_COLUMNS, a.row.vectors);
    }
}

/* What is made of the steps from column `first` on. */
template <typename T, __nv_fp8_interpretation_t F, int STEPS>
__device__ __forceinline__ void make_steps(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                           const tn__cuda_norm_arguments &a, const row_place &at,
                                           int64_t first, const row_statistics &of) {
    const int left = columns_left(at, first);
    const int64_t col = first + at.thread * LANE_COLUMNS;
    T *to = (T *)a.value + at.row * at.cols + col;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int in_step = left - s * STEP_COLUMNS;
        column_factors by;
        load_factors<LANE_COLUMNS>(by.gamma, by.beta, a, col + s * STEP_COLUMNS, in_step);
        normalize_words<T>(words[s], by, a.beta != nullptr, of);
        if (a.value) store_words<T>(to + s * STEP_COLUMNS, words[s], in_step, a.cast.src_vectors);
        row_stay_packed<T>(words[s]); /* one step after the other, or registers run out */
    }
    if (a.cast.row.data) quantize_steps<T, F, STEPS>(a.cast, at, first, words);
}

template <typename T, __nv_fp8_interpretation_t F, int STEPS>
__device__ __forceinline__ void norm_rows(const tn__cuda_norm_arguments &a) {
    uint32_t words[STEPS][patch_words<T>::COUNT];
    const int64_t cols = a.cast.cols, chunk = (int64_t)STEPS * STEP_COLUMNS;
    if (is_skipped(a.skip)) return;
    row_place at;
    at.row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / a.row_threads) + threadIdx.x / a.row_threads;
    at.cols = at.row < a.cast.rows ? cols : 0;
    at.thread = (int)threadIdx.x & (a.row_threads - 1);
    int turn = 0;
    const row_statistics of = statistics_of_row<T, STEPS>(words, a, at, turn);
    if (!a.value && !a.cast.row.data) return;
    for (int64_t first = 0; first < cols; first += chunk) {
        if (cols > chunk)
            load_steps<T, STEPS, false>(words, a.cast.src, at, first, a.cast.src_vectors);
        make_steps<T, F, STEPS>(words, a, at, first, of);
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

/* Registers for as many blocks on a multiprocessor as hold a row without spilling. */
#define KERNEL(name, T, F, steps, blocks)                                                          \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS, blocks)                         \
        name(const __grid_constant__ tn__cuda_norm_arguments a) {                                  \
        norm_rows<T, F, steps>(a);                                                                 \
    }
#define NORM(name, T, F, blocks_2, blocks_4, blocks_8)                                             \
    KERNEL(norm_rows_2_##name, T, F, 2, blocks_2)                                                  \
    KERNEL(norm_rows_4_##name, T, F, 4, blocks_4)                                                  \
    KERNEL(norm_rows_8_##name, T, F, 8, blocks_8)

NORM(fp32_e4m3, float, __NV_E4M3, 3, 2, 1)
NORM(fp32_e5m2, float, __NV_E5M2, 3, 2, 1)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3, 4, 4, 3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2, 4, 4, 3)
NORM(fp16_e4m3, __half, __NV_E4M3, 4, 4, 3)
NORM(fp16_e5m2, __half, __NV_E5M2, 4, 4, 3)
