/* Kernels of the norms' gradients that read x and dy twice: the two means of each row, then dx with
 * its casts and what the columns of dgamma and dbeta add up to in each tile.
 *
 * A column of a tile is quantized with 128 rows, whose means must all be known before: rows are
 * read by a warp each and then by tiles. Bytes that must move for each element of s bytes: 2 s for
 * the means, then 2 s, s for what is added, s for dx and 1 for each plane. The sums of the columns
 * are made of what the second pass has in registers. Where no plane is wanted one read may do:
 * cuda_norm_gradient_rows.cu.
 */
#include "cuda_norm.cuh"
#include "cuda_norm_sums.cuh"
#include "cuda_train_arguments.h"

__device__ __forceinline__ float gamma_at(const tn__cuda_norm_gradient_arguments &a, int64_t col) {
    if (!a.gamma || col >= a.of.cast.cols) return 1.0f;
    const float gamma = load_as(a.gamma_dtype, a.gamma, col);
    return a.gamma_base != 0.0f ? __fadd_rn(gamma, a.gamma_base) : gamma; /* -0 + 0 is not -0 */
}

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

/* ---- the means of a row ------------------------------------------------------------------- */

/* A block of 128 columns, which a half warp has, 8 columns a lane. */
struct lane_block {
    int64_t first; /* column of the block */
    int lane16;
};

/* x and dy of a lane's columns, 0 beyond the row. */
template <typename T> struct lane_words {
    uint32_t x[patch_words<T>::COUNT], dy[patch_words<T>::COUNT];
};

template <typename T>
__device__ __forceinline__ void load_lane(uint32_t (&words)[patch_words<T>::COUNT], const T *row,
                                          const lane_block &at,
                                          const tn__cuda_quantize_arguments &of) {
    const int64_t left = of.cols - at.first;
    const T *from = row + at.first;
#pragma unroll
    for (int p = 0; p < patch_words<T>::PIECES; p++) {
        const int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
        const uint4 piece = piece_of_row<T>(from, column, left, of.src_vectors);
        words[4 * p] = piece.x, words[4 * p + 1] = piece.y;
        words[4 * p + 2] = piece.z, words[4 * p + 3] = piece.w;
    }
}

template <typename T>
__device__ __forceinline__ lane_words<T> load_lanes(const tn__cuda_norm_gradient_arguments &a,
                                                    int64_t row, const lane_block &at) {
    const tn__cuda_quantize_arguments &cast = a.of.cast;
    lane_words<T> words;
    load_lane<T>(words.x, (const T *)cast.src + row * cast.cols, at, cast);
    load_lane<T>(words.dy, (const T *)a.of.dy + row * cast.cols, at, cast);
    return words;
}

/* Of COUNT neighbours. */
template <int COUNT>
__device__ __forceinline__ void gammas_at(float *gamma, const tn__cuda_norm_gradient_arguments &a,
                                          int64_t col) {
    if (!a.gamma || !a.gamma_vectors) {
#pragma unroll
        for (int v = 0; v < COUNT; v++)
            gamma[v] = gamma_at(a, col + v);
        return;
    }
    load_floats<COUNT, true>(gamma, a.gamma_dtype, a.gamma, col, col < a.of.cast.cols ? COUNT : 0);
#pragma unroll
    for (int v = 0; v < COUNT; v++)
        if (a.gamma_base != 0.0f) gamma[v] = __fadd_rn(gamma[v], a.gamma_base);
}

/* What a block gives: on the lower 8 lanes of its half warp to the shift, on the others to the
 * tilt. */
template <typename T>
__device__ __forceinline__ float given_by_block(const lane_words<T> &words,
                                                const tn__cuda_norm_gradient_arguments &a,
                                                const row_statistics &of, const lane_block &at) {
    enum { VECTOR = element<T>::VECTOR };
    float x[PATCH], dy[PATCH], gamma[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j += VECTOR)
        gammas_at<VECTOR>(gamma + j, a, at.first + patch_column<T>(at.lane16, j));
    unpack_words<T>(x, words.x);
    unpack_words<T>(dy, words.dy);
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const bool is_in = at.first + patch_column<T>(at.lane16, j) < a.of.cast.cols;
        dy[j] = __fmul_rn(dy[j], gamma[j]);
        x[j] = __fmul_rn(__fsub_rn(x[j], of.mean), of.rstd);
        if (!a.of.cast.src_vectors && !is_in) dy[j] = x[j] = 0.0f;
    }
    const bool is_low_in = at.first + patch_column<T>(at.lane16, 0) < a.of.cast.cols;
    const bool is_high_in = at.first + patch_column<T>(at.lane16, 4) < a.of.cast.cols;
    float given[2] = {sum_of_lane<T>(dy), products_of_lane<T>(dy, x, is_low_in, is_high_in)};
    return sums_of_half_warp<T, 2>(given, at.lane16);
}

/* Block b goes to sum b mod 32, which is b / 2 mod 16 of a half warp's; each of its lanes has two
 * of them, 8 apart. The next blocks are on their way before these are summed. */
template <typename T>
__device__ __forceinline__ void norm_gradient_means(const tn__cuda_norm_gradient_arguments &a) {
    const tn__cuda_produce_arguments &of = a.of;
    const int64_t row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / 32) + threadIdx.x / 32;
    if (row >= of.cast.rows || is_skipped(of.skip)) return; /* whole warps */
    const int lane = (int)threadIdx.x % 32, half = lane / 16;
    const row_statistics statistics = {a.mean ? a.mean[row] : 0.0f, a.rstd[row]};
    float low = 0.0f, high = 0.0f;
    lane_block at = {half * TN__TILE, lane % 16};
    lane_words<T> words = load_lanes<T>(a, row, at);
    for (int step = 0; at.first - half * TN__TILE < of.cast.cols; step++) {
        const lane_block next = {at.first + 2 * TN__TILE, at.lane16};
        const lane_words<T> of_next = load_lanes<T>(a, row, next);
        const float given = given_by_block<T>(words, a, statistics, at);
        low = step % 16 == lane % 8 ? __fadd_rn(low, given) : low;
        high = step % 16 == lane % 8 + 8 ? __fadd_rn(high, given) : high;
        at = next;
        words = of_next;
    }
    float total = __fadd_rn(low, high);
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2)
        total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFFu, total, apart));
    total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFFu, total, 16));
    const float mean =
        canonical_of<float>(__fdiv_rn(total, (float)(of.cast.cols ? of.cast.cols : 1)));
    if (lane == 0 && a.shift) a.shift[row] = mean;
    if (lane == 8) a.tilt[row] = mean;
}

/* ---- dx ----------------------------------------------------------------------------------- */

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
