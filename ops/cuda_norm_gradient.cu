/* Kernels of the norms' gradients: the two means of each row, then dx with its casts and what the
 * columns of dgamma and dbeta add up to in each tile.
 *
 * As in cuda_norm.cu, a column of a tile is quantized with 128 rows, whose means must all be known
 * before: x and dy are read twice, by a warp for each row and then by tiles. Bytes that must move
 * for each element of s bytes: 2 s for the means, then 2 s, s for what is added, s for dx and 1 for
 * each plane. The sums of the columns are made of what the second pass has in registers.
 */
#include "cuda_norm.cuh"
#include "cuda_row_sums.cuh"
#include "cuda_train_arguments.h"

__device__ __forceinline__ float gamma_at(const tn__cuda_norm_gradient_arguments &a, int64_t col) {
    if (!a.gamma || col >= a.of.cast.cols) return 1.0f;
    const float gamma = load_as(a.gamma_dtype, a.gamma, col);
    return a.gamma_base != 0.0f ? __fadd_rn(gamma, a.gamma_base) : gamma; /* -0 + 0 is not -0 */
}

/* Of 8 neighbours, of which the first is in the row. */
__device__ __forceinline__ void gammas_at(float (&gamma)[LANE_SUMS],
                                          const tn__cuda_norm_gradient_arguments &a, int64_t col) {
    if (!a.gamma || !a.gamma_vectors) {
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++)
            gamma[j] = gamma_at(a, col + j);
        return;
    }
    load_floats<LANE_SUMS, true>(gamma, a.gamma_dtype, a.gamma, col, LANE_SUMS);
    if (a.gamma_base == 0.0f) return; /* -0 + 0 is not -0 */
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
        gamma[j] = __fadd_rn(gamma[j], a.gamma_base);
}

/* ---- the means of a row ------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ void norm_gradient_means(const tn__cuda_norm_gradient_arguments &a) {
    const tn__cuda_produce_arguments &of = a.of;
    const int64_t cols = of.cast.cols;
    const int64_t row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / 32) + threadIdx.x / 32;
    if (row >= of.cast.rows || is_skipped(of.skip)) return; /* whole warps */
    const T *x_row = (const T *)of.cast.src + row * cols, *dy_row = (const T *)of.dy + row * cols;
    const float mean = a.mean ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float shift[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0}, tilt[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t col = threadIdx.x % 32 * LANE_SUMS; col < cols; col += ROW_SUMS) {
        float x[LANE_SUMS], dy[LANE_SUMS], gamma[LANE_SUMS];
        load_eight<T>(x, x_row, col, cols, of.cast.src_vectors);
        load_eight<T>(dy, dy_row, col, cols, of.cast.src_vectors);
        gammas_at(gamma, a, col);
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++) {
            const float g = __fmul_rn(dy[j], gamma[j]);
            const float normal = __fmul_rn(__fsub_rn(x[j], mean), rstd);
            if (col + j < cols) {
                shift[j] = __fadd_rn(shift[j], g);
                tilt[j] = __fmaf_rn(g, normal, tilt[j]);
            }
        }
    }
    const float count = (float)(cols ? cols : 1);
    if (a.shift) {
        const float total = total_of(shift);
        if (threadIdx.x % 32 == 0) a.shift[row] = canonical_of<float>(__fdiv_rn(total, count));
    }
    const float total = total_of(tilt);
    if (threadIdx.x % 32 == 0) a.tilt[row] = canonical_of<float>(__fdiv_rn(total, count));
}

/* ---- dx ----------------------------------------------------------------------------------- */

/* VECTOR neighbours of a row from column `col` on; what is beyond the row is 0. */
template <typename T>
__device__ __forceinline__ uint4 piece_of_row(const T *row, int64_t col, int64_t cols,
                                              int vectors) {
    uint32_t words[4] = {0, 0, 0, 0};
    if (vectors) return col < cols ? __ldg((const uint4 *)(row + col)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int v = 0; v < element<T>::VECTOR; v++) {
        if (col + v < cols) {
            if constexpr (sizeof(T) == 4)
                words[v] = ((const uint32_t *)row)[col + v];
            else
                words[v / 2] |= (uint32_t)((const unsigned short *)row)[col + v] << (v % 2 * 16);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* What is known of one row, and what is loaded of it. */
struct row_inputs {
    uint4 x, dy, added;
    float mean, rstd, shift, tilt;
};

template <typename T>
__device__ __forceinline__ row_inputs inputs_of(const tn__cuda_norm_gradient_arguments &a,
                                                int64_t row, int64_t col) {
    const tn__cuda_produce_arguments &of = a.of;
    const int64_t cols = of.cast.cols, first = row * cols;
    const int vectors = of.cast.src_vectors;
    row_inputs in;
    in.x = piece_of_row<T>((const T *)of.cast.src + first, col, cols, vectors);
    in.dy = piece_of_row<T>((const T *)of.dy + first, col, cols, vectors);
    in.added = make_uint4(0, 0, 0, 0);
    if (a.added) in.added = piece_of_row<T>((const T *)a.added + first, col, cols, vectors);
    in.mean = a.mean ? __ldg(a.mean + row) : 0.0f;
    in.rstd = __ldg(a.rstd + row);
    in.shift = a.shift ? a.shift[row] : 0.0f;
    in.tilt = a.tilt[row];
    return in;
}

/* One piece of the patch, for all its rows; the sums of its columns on the way. */
template <typename T>
__device__ __forceinline__ void
make_gradient_piece(const tn__cuda_norm_gradient_arguments &a, const patch_place &at, int p,
                    uint32_t (&words)[PATCH][patch_words<T>::COUNT], float (&gamma_sum)[PATCH],
                    float (&beta_sum)[PATCH]) {
    enum { VECTOR = element<T>::VECTOR };
    const int64_t cols = a.of.cast.cols;
    const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, p * VECTOR);
    const int height = patch_rows_in(a.of.cast.rows, at);
    float gamma[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; v++)
        gamma[v] = gamma_at(a, col + v);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        piece_values<T> made;
#pragma unroll
        for (int v = 0; v < VECTOR; v++)
            made.at[v] = 0.0f;
        if (i < height) {
            const row_inputs in = inputs_of<T>(a, at.row + i, col);
            const piece_values<T> x = unpack<T>(in.x), dy = unpack<T>(in.dy);
            const piece_values<T> added = unpack<T>(in.added);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) {
                const int j = p * VECTOR + v;
                const float normal = __fmul_rn(__fsub_rn(x.at[v], in.mean), in.rstd);
                const float g = __fsub_rn(__fmul_rn(dy.at[v], gamma[v]), in.shift);
                const float dx = __fmul_rn(__fmaf_rn(-normal, in.tilt, g), in.rstd);
                if (col + v < cols) {
                    made.at[v] = a.added ? __fadd_rn(dx, added.at[v]) : dx;
                    gamma_sum[j] = __fmaf_rn(dy.at[v], normal, gamma_sum[j]);
                    beta_sum[j] = __fadd_rn(beta_sum[j], dy.at[v]);
                }
            }
        }
        pack<T>(words[i], p, made);
    }
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_gradient(const tn__cuda_norm_gradient_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    float gamma_sum[PATCH] = {0, 0, 0, 0, 0, 0, 0, 0}, beta_sum[PATCH] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (is_skipped(a.of.skip)) return;
    const patch_place at = patch_of_thread(a.of.cast.tiles_across);
#pragma unroll
    for (int p = 0; p < patch_words<T>::PIECES; p++)
        make_gradient_piece<T>(a, at, p, words, gamma_sum, beta_sum);
    if (a.gamma_sums) store_lane_sums<T>(a.gamma_sums, a.of.cast, at, gamma_sum);
    __syncthreads(); /* both sums go by the same shared memory */
    if (a.beta_sums) store_lane_sums<T>(a.beta_sums, a.of.cast, at, beta_sum);
    patch_stay_packed<T>(words);
    store_produced<T, F, IS_1D>(a.of, at, words);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, T, F, is_1d)                                                                  \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, 2)                              \
        name(const __grid_constant__ tn__cuda_norm_gradient_arguments a) {                         \
        norm_gradient<T, F, is_1d>(a);                                                             \
    }
#define NORM_GRADIENT(source, T)                                                                   \
    KERNEL(norm_gradient_1d_##source##_e4m3, T, __NV_E4M3, true)                                   \
    KERNEL(norm_gradient_1d_##source##_e5m2, T, __NV_E5M2, true)                                   \
    KERNEL(norm_gradient_2d_##source##_e4m3, T, __NV_E4M3, false)                                  \
    KERNEL(norm_gradient_2d_##source##_e5m2, T, __NV_E5M2, false)                                  \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        norm_gradient_means_##source(const __grid_constant__ tn__cuda_norm_gradient_arguments a) { \
        norm_gradient_means<T>(a);                                                                 \
    }

NORM_GRADIENT(fp32, float)
NORM_GRADIENT(bf16, __nv_bfloat16)
NORM_GRADIENT(fp16, __half)
