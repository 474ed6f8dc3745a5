/* Kernels of the norms: the statistics of rows, and the values with their casts.
 *
 * A column of a tile is quantized with 128 rows, whose statistics must all be known before: so x is
 * read twice, by a warp for each row and then by tiles. Bytes that must move for each element of s
 * bytes: s for the statistics (with a residual 3 s: x, the residual, their sum), then s, s for the
 * value and 1 for each plane. LAYER reads a row again for what deviates from its mean, from the L1
 * cache where 8 rows fit into it.
 */
#include "cuda_produce.cuh"

enum { LANE_SUMS = TN__ROW_SUMS / 32 };

/* ---- statistics --------------------------------------------------------------------------- */

/* The total of 256 sums, 8 a lane, on every lane: halves are added to each other, first those 128
 * apart, which are 16 lanes apart. Both lanes of a pair add the same two numbers. */
__device__ __forceinline__ float total_of(float (&sum)[LANE_SUMS]) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++)
            sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(0xFFFFFFFFu, sum[j], apart));
    }
#pragma unroll
    for (int half = LANE_SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; j++)
            sum[j] = __fadd_rn(sum[j], sum[j + half]);
    }
    return sum[0];
}

/* The lane's 8 neighbours from column `col` of a row; what is beyond the row is 0. */
template <typename T>
__device__ __forceinline__ void load_eight(float (&values)[LANE_SUMS], const T *row, int64_t col,
                                           int64_t cols, int vectors) {
    if (vectors) { /* rows are whole pieces: a piece is in the row or beyond it */
#pragma unroll
        for (int p = 0; p < LANE_SUMS / element<T>::VECTOR; p++) {
            const int64_t at = col + p * element<T>::VECTOR;
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (at < cols) piece = *(const uint4 *)(row + at);
            const piece_values<T> of = unpack<T>(piece);
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++)
                values[p * element<T>::VECTOR + v] = of.at[v];
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
        values[j] = col + j < cols ? element<T>::load(row, col + j) : 0.0f;
}

/* Writes them rounded, and leaves in `values` what was written. */
template <typename T>
__device__ __forceinline__ void store_eight(float (&values)[LANE_SUMS], T *row, int64_t col,
                                            int64_t cols, int vectors) {
    uint32_t words[LANE_SUMS * sizeof(T) / 4];
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
        values[j] = canonical_of<T>(values[j]);
#pragma unroll
    for (int w = 0; w < (int)(LANE_SUMS * sizeof(T) / 4); w++)
        words[w] = element<T>::word(values, w);
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
        values[j] = element<T>::value(words, j);
    if (vectors) {
#pragma unroll
        for (int p = 0; p < LANE_SUMS / element<T>::VECTOR; p++) {
            const int64_t at = col + p * element<T>::VECTOR;
            if (at < cols)
                *(uint4 *)(row + at) =
                    make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
        if (col + j < cols) element<T>::store(row, col + j, values[j]);
}

/* The sum of the row's values, and x + residual written on the way. */
template <typename T>
__device__ __forceinline__ float sum_of_row(const tn__cuda_row_statistics_arguments &a, int64_t row,
                                            bool is_squared) {
    const T *x = (const T *)a.x + row * a.cols, *residual = (const T *)a.residual + row * a.cols;
    float sum[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 2
    for (int64_t col = threadIdx.x % 32 * LANE_SUMS; col < a.cols; col += TN__ROW_SUMS) {
        float values[LANE_SUMS];
        load_eight<T>(values, x, col, a.cols, a.vectors);
        if (a.sum) {
            float added[LANE_SUMS];
            load_eight<T>(added, residual, col, a.cols, a.vectors);
#pragma unroll
            for (int j = 0; j < LANE_SUMS; j++)
                values[j] = __fadd_rn(values[j], added[j]);
            store_eight<T>(values, (T *)a.sum + row * a.cols, col, a.cols, a.vectors);
        }
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++)
            sum[j] =
                is_squared ? __fmaf_rn(values[j], values[j], sum[j]) : __fadd_rn(sum[j], values[j]);
    }
    return total_of(sum);
}

/* The sum of the squares of what the row's values deviate from `center`. */
template <typename T>
__device__ __forceinline__ float squares_of_row(const tn__cuda_row_statistics_arguments &a,
                                                int64_t row, float center) {
    const T *values_of = (const T *)(a.sum ? a.sum : a.x) + row * a.cols;
    float sum[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 2
    for (int64_t col = threadIdx.x % 32 * LANE_SUMS; col < a.cols; col += TN__ROW_SUMS) {
        float values[LANE_SUMS];
        load_eight<T>(values, values_of, col, a.cols, a.vectors);
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++) {
            const float deviation = __fsub_rn(values[j], center);
            if (col + j < a.cols) sum[j] = __fmaf_rn(deviation, deviation, sum[j]);
        }
    }
    return total_of(sum);
}

template <typename T>
__device__ __forceinline__ void row_statistics(const tn__cuda_row_statistics_arguments &a) {
    const int64_t row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / 32) + threadIdx.x / 32;
    if (row >= a.rows || is_skipped(a.skip)) return;  /* whole warps */
    const float count = (float)(a.cols ? a.cols : 1); /* of nothing, the mean is 0 */
    float square = sum_of_row<T>(a, row, !a.mean);
    if (a.mean) {
        const float mean = __fdiv_rn(square, count);
        square = squares_of_row<T>(a, row, mean);
        if (threadIdx.x % 32 == 0) a.mean[row] = canonical_of<float>(mean);
    }
    const float variance = __fadd_rn(__fdiv_rn(square, count), a.epsilon);
    if (threadIdx.x % 32 == 0) a.rstd[row] = canonical_of<float>(tn__exact_rsqrt(variance));
}

/* ---- what is made ------------------------------------------------------------------------- */

__device__ __forceinline__ float load_as(int dtype, const void *from, int64_t at) {
    if (dtype == 0) return element<float>::load(from, at);
    if (dtype == 1) return element<__nv_bfloat16>::load(from, at);
    return element<__half>::load(from, at);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void normalize(const tn__cuda_produce_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    float gamma[PATCH], beta[PATCH];
    if (is_skipped(a.skip)) return;
    const patch_place at = patch_of_thread(a.cast.tiles_across);
    patch_load<T>(words, a.cast.src, a.cast.rows, a.cast.cols, a.cast.src_vectors, at);
    patch_stay_packed<T>(words);
    const int rows_in = patch_rows_in(a.cast.rows, at);
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
        const bool is_in = col < a.cast.cols;
        gamma[j] = is_in ? 1.0f : 0.0f, beta[j] = 0.0f;
        if (a.gamma && is_in) {
            gamma[j] = load_as(a.gamma_dtype, a.gamma, col);
            if (a.gamma_base != 0.0f) gamma[j] = __fadd_rn(gamma[j], a.gamma_base);
        }
        if (a.beta && is_in) beta[j] = load_as(a.beta_dtype, a.beta, col);
    }
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const bool is_row_in = i < rows_in;
        const float mean = is_row_in && a.mean ? __ldg(a.mean + at.row + i) : 0.0f;
        const float rstd = is_row_in ? __ldg(a.rstd + at.row + i) : 0.0f;
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            piece_values<T> made;
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++) {
                const int j = p * element<T>::VECTOR + v;
                const float x = element<T>::value(words[i], j);
                const float scaled = __fmul_rn(__fsub_rn(x, mean), rstd);
                const float value =
                    a.beta ? __fmaf_rn(scaled, gamma[j], beta[j]) : __fmul_rn(scaled, gamma[j]);
                made.at[v] = is_row_in ? value : 0.0f; /* and 0 or NaN beyond the columns */
            }
            pack<T>(words[i], p, made);
        }
        row_stay_packed<T>(words[i]); /* one row after the other, or registers run out */
    }
    store_produced<T, F, IS_1D>(a, at, words);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, T, F, is_1d)                                                                  \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, 2)                              \
        name(const __grid_constant__ tn__cuda_produce_arguments a) {                               \
        normalize<T, F, is_1d>(a);                                                                 \
    }
#define NORM(source, T)                                                                            \
    KERNEL(normalize_1d_##source##_e4m3, T, __NV_E4M3, true)                                       \
    KERNEL(normalize_1d_##source##_e5m2, T, __NV_E5M2, true)                                       \
    KERNEL(normalize_2d_##source##_e4m3, T, __NV_E4M3, false)                                      \
    KERNEL(normalize_2d_##source##_e5m2, T, __NV_E5M2, false)                                      \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        row_statistics_##source(const __grid_constant__ tn__cuda_row_statistics_arguments a) {     \
        row_statistics<T>(a);                                                                      \
    }

NORM(fp32, float)
NORM(bf16, __nv_bfloat16)
NORM(fp16, __half)
