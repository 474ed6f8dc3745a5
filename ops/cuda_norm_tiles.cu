/* Kernels of the norms for what those of rows are not enough for: rows of any length at any
 * address, and tiles, for planes whose blocks are of 128 rows.
 *
 * norm_any_rows reads a row again for each of the mean, the squares and the values. norm_tiles is
 * launched behind it, or behind the kernels of rows, which have made the statistics then and
 * nothing else; it reads what is normalized once more, the last first, which the L2 cache may have.
 */
#include "cuda_norm.cuh"
#include "cuda_norm_sums.cuh"

/* ---- 8 columns of a lane -------------------------------------------------------------------- */

/* Of a block of 128 columns that a half warp has, laid out as a row of a tile. */
struct lane_block {
    int64_t row, first; /* column of the block */
    int lane16;
};

__device__ __forceinline__ int64_t columns_from(const tn__cuda_norm_arguments &a,
                                                const lane_block &at) {
    return a.cast.cols - at.first;
}

/* Beyond the row there are zeros. */
template <typename T>
__device__ __forceinline__ void load_lane(float (&value)[PATCH], const tn__cuda_norm_arguments &a,
                                          const void *src, const lane_block &at) {
    const T *from = (const T *)src + at.row * a.cast.cols + at.first;
    const int64_t left = columns_from(a, at);
#pragma unroll
    for (int j = 0; j < PATCH; j += element<T>::VECTOR) {
        const int column = patch_column<T>(at.lane16, j);
        if (a.cast.src_vectors) {
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (column < left) piece = *(const uint4 *)(from + column);
            const piece_values<T> of = unpack<T>(piece);
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++)
                value[j + v] = of.at[v];
        } else {
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++)
                value[j + v] = column + v < left ? element<T>::load(from, column + v) : 0.0f;
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_lane(void *dst, const tn__cuda_norm_arguments &a,
                                           const lane_block &at, const float (&value)[PATCH]) {
    T *to = (T *)dst + at.row * a.cast.cols + at.first;
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<T>(at.lane16, j);
        if (column < columns_from(a, at)) element<T>::store(to, column, canonical_of<T>(value[j]));
    }
}

/* What is normalized: x, or x + residual rounded, which is written on the way. */
template <typename T>
__device__ __forceinline__ void load_source(float (&value)[PATCH], const tn__cuda_norm_arguments &a,
                                            const lane_block &at) {
    load_lane<T>(value, a, a.x, at);
    if (!a.sum) return;
    float residual[PATCH];
    load_lane<T>(residual, a, a.residual, at);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        value[j] = __fadd_rn(value[j], residual[j]);
    store_lane<T>(a.sum, a, at, value);
    load_lane<T>(value, a, a.sum, at); /* rounded */
}

/* ---- rows of any length --------------------------------------------------------------------- */

/* The total of what the blocks of the thread's row give; all threads. Half warp h has blocks h,
 * h + 16, h + 32, ... `give(at)` is called by all lanes. */
template <typename Give>
__device__ __forceinline__ float total_of_row(const tn__cuda_norm_arguments &a, int64_t row,
                                              Give give) {
    enum { HALF_WARPS = TN__FLAT_THREADS / 16 };
    __shared__ float half_warp_sum[HALF_WARPS];
    const int half_warp = (int)threadIdx.x / 16;
    float part[ROW_PARTS / HALF_WARPS] = {0.0f, 0.0f}, sum[HALF_WARPS];
    lane_block at = {row, 0, (int)threadIdx.x % 16};
#pragma unroll 1
    for (int64_t first = 0; first < a.cast.tiles_across; first += ROW_PARTS) {
#pragma unroll
        for (int p = 0; p < ROW_PARTS / HALF_WARPS; p++) {
            const int64_t block = first + p * HALF_WARPS + half_warp;
            at.first = block * TN__TILE;
            const float given = give(at);
            if (block < a.cast.tiles_across) part[p] = __fadd_rn(part[p], given);
        }
    }
    __syncthreads(); /* the sums of the last call have been read */
    if (at.lane16 == 0) half_warp_sum[half_warp] = __fadd_rn(part[0], part[1]);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HALF_WARPS; h++)
        sum[h] = half_warp_sum[h];
#pragma unroll
    for (int half = HALF_WARPS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int h = 0; h < half; h++)
            sum[h] = __fadd_rn(sum[h], sum[h + half]);
    }
    return sum[0];
}

template <typename T>
__device__ __forceinline__ float block_sum(const float (&value)[PATCH], int lane16) {
    float sum[1] = {sum_of_lane<T>(value)};
    return sums_of_half_warp<T, 1>(sum, lane16);
}

template <typename T>
__device__ __forceinline__ float block_squares(const float (&value)[PATCH], int lane16) {
    float squares[1] = {squares_of_lane<T>(value)};
    return sums_of_half_warp<T, 1>(squares, lane16);
}

/* The squares of what a block deviates from the row's mean. */
template <typename T>
__device__ __forceinline__ float block_deviation(const tn__cuda_norm_arguments &a,
                                                 const lane_block &at, float mean) {
    const int64_t left = columns_from(a, at);
    float value[PATCH];
    load_lane<T>(value, a, a.cast.src, at);
    const float sum = block_sum<T>(value, at.lane16);
    const float own_mean = mean_of_block(sum, left);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        value[j] = patch_column<T>(at.lane16, j) < left ? __fsub_rn(value[j], own_mean) : 0.0f;
    return squares_around(sum, block_squares<T>(value, at.lane16), mean, left);
}

template <typename T>
__device__ __forceinline__ row_statistics statistics_of_row(const tn__cuda_norm_arguments &a,
                                                            int64_t row) {
    const float count = (float)(a.cast.cols ? a.cast.cols : 1); /* of nothing, the mean is 0 */
    row_statistics of = {0.0f, 0.0f};
    float value[PATCH], total;
    if (a.mean) {
        total = total_of_row(a, row, [&](const lane_block &at) {
            load_source<T>(value, a, at);
            return block_sum<T>(value, at.lane16);
        });
        of.mean = __fdiv_rn(total, count);
        total = total_of_row(
            a, row, [&](const lane_block &at) { return block_deviation<T>(a, at, of.mean); });
    } else {
        total = total_of_row(a, row, [&](const lane_block &at) {
            load_source<T>(value, a, at);
            return block_squares<T>(value, at.lane16);
        });
    }
    of.rstd = tn__exact_rsqrt(__fadd_rn(__fdiv_rn(total, count), a.epsilon));
    return of;
}

/* ---- what is made of a row ------------------------------------------------------------------ */

template <typename T>
__device__ __forceinline__ void make_lane(float (&value)[PATCH], const tn__cuda_norm_arguments &a,
                                          const lane_block &at, const row_statistics &of) {
    load_lane<T>(value, a, a.cast.src, at);
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<T>(at.lane16, j);
        const int left = column < columns_from(a, at) ? 1 : 0;
        float gamma[1], beta[1];
        load_factors<1, false>(gamma, beta, a, at.first + column, left);
        value[j] = __fmul_rn(__fsub_rn(value[j], of.mean), of.rstd);
        value[j] = left ? __fmaf_rn(value[j], gamma[0], beta[0]) : 0.0f;
    }
}

/* Of a value rounded to its type: amax, scale and codes of the block's. */
template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_lane(const tn__cuda_quantize_arguments &a,
                                              const lane_block &at, const float (&value)[PATCH]) {
    const int64_t block = at.first / TN__TILE;
    float amax = 0.0f, scaled[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        amax = fmaxf(amax, fabsf(value[j]));
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, apart));
    if (at.first >= a.cols) return;
    const float scale = block_scale<T, F>(amax, a.amax_epsilon, a.is_pow2);
    if (at.lane16 == 0) row_scale_of_block_put(a, at.row, block, inverse_scale(scale));
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        scaled[j] = __fmul_rn(value[j], scale);
    unsigned char *to = a.row.data + at.row * a.cols + at.first;
    store_row_bytes<T>(to + patch_column<T>(at.lane16, 0), at.lane16,
                       (int)min(a.cols - at.first, (int64_t)TN__TILE), cast_patch_row<F>(scaled));
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void norm_any_row(const tn__cuda_norm_arguments &a, int64_t row) {
    const row_statistics of = statistics_of_row<T>(a, row);
    if (threadIdx.x == 0) {
        a.rstd[row] = canonical_of<float>(of.rstd);
        if (a.mean) a.mean[row] = canonical_of<float>(of.mean);
    }
    if (!a.value && !a.cast.row.data) return;
    lane_block at = {row, 0, (int)threadIdx.x % 16};
#pragma unroll 1
    for (int64_t first = 0; first < a.cast.cols; first += TN__FLAT_THREADS * PATCH) {
        float value[PATCH];
        uint32_t words[patch_words<T>::COUNT];
        at.first = first + threadIdx.x / 16 * TN__TILE;
        make_lane<T>(value, a, at, of);
        if (a.value) store_lane<T>(a.value, a, at, value);
        pack_words<T>(words, value);
        unpack_words<T>(value, words);
        if (a.cast.row.data) quantize_lane<T, F>(a.cast, at, value);
    }
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void norm_any_rows(const tn__cuda_norm_arguments &a) {
    if (is_skipped(a.skip)) return;
#pragma unroll 1
    for (int64_t row = blockIdx.x; row < a.cast.rows; row += gridDim.x)
        norm_any_row<T, F>(a, row);
}

/* ---- tiles ---------------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ column_factors factors_of_patch(const tn__cuda_norm_arguments &a,
                                                           const patch_place &at) {
    column_factors by;
#pragma unroll
    for (int j = 0; j < PATCH; j += element<T>::VECTOR) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
        const int left = (int)min(a.cast.cols - col, (int64_t)PATCH);
        if (a.cast.src_vectors)
            load_factors<element<T>::VECTOR, true>(by.gamma + j, by.beta + j, a, col, left);
        else
            load_factors<element<T>::VECTOR, false>(by.gamma + j, by.beta + j, a, col, left);
    }
    return by;
}

template <typename T>
__device__ __forceinline__ void normalize_patch(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                                const tn__cuda_norm_arguments &a,
                                                const patch_place &at) {
    const int rows_in = patch_rows_in(a.cast.rows, at);
    const column_factors by = factors_of_patch<T>(a, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        row_statistics of = {0.0f, 0.0f};
        if (i < rows_in) {
            of.rstd = a.rstd[at.row + i];
            if (a.mean) of.mean = a.mean[at.row + i];
            normalize_words<T, true>(words[i], by, of);
        }
        row_stay_packed<T>(words[i]); /* one row after the other, or registers run out */
    }
    clear_patch_beyond<T>(words, a.cast.rows, a.cast.cols, at);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_tile(const tn__cuda_norm_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    if (is_skipped(a.skip)) return;
    const patch_place at = patch_of_thread_backwards(a.cast.tiles_across);
    patch_load<T>(words, a.cast.src, a.cast.rows, a.cast.cols, a.cast.src_vectors, at);
    patch_stay_packed<T>(words);
    normalize_patch<T>(words, a, at);
    if (a.value) store_patch<T>(a.value, a.cast, at, words);
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, true, true>(a.cast, at, words);
    else
        quantize_patches_2d<T, F, true, true>(a.cast, at, words);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define NORM(name, T, F, blocks)                                                                   \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        norm_any_rows_##name(const __grid_constant__ tn__cuda_norm_arguments a) {                  \
        norm_any_rows<T, F>(a);                                                                    \
    }                                                                                              \
    TILE_KERNEL(norm_tiles_1d_##name, tn__cuda_norm_arguments, T, blocks, (norm_tile<T, F, true>)) \
    TILE_KERNEL(norm_tiles_2d_##name, tn__cuda_norm_arguments, T, blocks, (norm_tile<T, F, false>))

NORM(fp32_e4m3, float, __NV_E4M3, 2)
NORM(fp32_e5m2, float, __NV_E5M2, 2)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3, 3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2, 3)
NORM(fp16_e4m3, __half, __NV_E4M3, 2)
NORM(fp16_e5m2, __half, __NV_E5M2, 2)
