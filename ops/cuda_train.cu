/* Kernels of a training step beside the norms: AdamW, the embedding's gradient, and the gradient of
 * the weights of rows.
 *
 * AdamW is bound by memory: of each element the master copy, both moments and the gradient are read
 * once, the first three written, and 1 byte for each plane: 12 + 12 + s + 1.
 */
#include "cuda_row_sums.cuh"
#include "cuda_train_arguments.h"

/* ---- AdamW -------------------------------------------------------------------------------- */

/* Four neighbours of any type, with one access where they can be moved so. */
__device__ __forceinline__ void load_four(float (&values)[4], int dtype, const void *from,
                                          int64_t at, int count, int vectors) {
    if (vectors && dtype == 0) {
        const float4 four = *(const float4 *)((const float *)from + at);
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
        return;
    }
    if (vectors) {
        const uint2 four = *(const uint2 *)((const unsigned short *)from + at);
        const uint32_t words[2] = {four.x, four.y};
#pragma unroll
        for (int v = 0; v < 4; v++)
            values[v] = dtype == 1 ? element<__nv_bfloat16>::value(words, v)
                                   : element<__half>::value(words, v);
        return;
    }
#pragma unroll
    for (int v = 0; v < 4; v++)
        values[v] = v < count ? load_as(dtype, from, at + v) : 0.0f;
}

__device__ __forceinline__ void store_four(const float (&values)[4], int dtype, void *to,
                                           int64_t at, int count, int vectors) {
    if (vectors && dtype == 0) {
        *(float4 *)((float *)to + at) =
            make_float4(canonical_of<float>(values[0]), canonical_of<float>(values[1]),
                        canonical_of<float>(values[2]), canonical_of<float>(values[3]));
        return;
    }
#pragma unroll
    for (int v = 0; v < 4; v++)
        if (v < count) store_as(dtype, to, at + v, values[v]);
}

/* Four neighbours of one row: all that there is of them is updated, and the new master copy left in
 * the words of the patch. */
__device__ __forceinline__ void update_four(const tn__cuda_adamw_arguments &a,
                                            const tn__adamw_factors &factors, int gradient_dtype,
                                            int64_t at, int count, uint32_t *words) {
    const int vectors = a.cast.src_vectors;
    float gradient[4], first[4], second[4], weight[4];
    load_four(first, 0, a.first, at, count, vectors);
    load_four(second, 0, a.second, at, count, vectors);
    load_four(weight, 0, a.cast.src, at, count, vectors);
    load_four(gradient, gradient_dtype, a.gradient, at, count, vectors); /* last: it is converted */
#pragma unroll
    for (int v = 0; v < 4; v++) {
        weight[v] = canonical_of<float>(
            tn__adamw_element(&factors, gradient[v], &first[v], &second[v], weight[v]));
        if (v >= count) weight[v] = 0.0f;
        words[v] = __float_as_uint(weight[v]);
    }
    store_four(first, 0, a.first, at, count, vectors);
    store_four(second, 0, a.second, at, count, vectors);
    store_four(weight, 0, (void *)a.cast.src, at, count, vectors);
    if (a.plain) store_four(weight, a.plain_dtype, a.plain, at, count, vectors);
}

template <__nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void adamw(const tn__cuda_adamw_arguments &a) {
    uint32_t words[PATCH][patch_words<float>::COUNT];
    if (is_skipped(a.cast.skip)) return;
    const tn__adamw_factors factors =
        tn__adamw_factors_of(a.constants, a.step, a.rate, a.gradient_scale);
    const patch_place at = patch_of_thread(a.cast.tiles_across);
    const int height = patch_rows_in(a.cast.rows, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int p = 0; p < patch_words<float>::PIECES; p++) {
            const int64_t col = at.tile_first_col + patch_column<float>(at.lane16, p * 4);
            const int64_t left = i < height ? a.cast.cols - col : 0;
#pragma unroll
            for (int v = 0; v < 4; v++)
                words[i][p * 4 + v] = 0;
            if (left > 0)
                update_four(a, factors, a.gradient_dtype, (at.row + i) * a.cast.cols + col,
                            (int)min(left, (int64_t)4), &words[i][p * 4]);
        }
    }
    if (!a.cast.row.data && !a.cast.col.data) return;
    if constexpr (IS_1D)
        quantize_patches_1d<float, F, true, true>(a.cast, at, words);
    else
        quantize_patches_2d<float, F, true, true>(a.cast, at, words);
}

/* Without a plane to make there are no tiles: a thread takes four neighbours, of which as many are
 * under way at one time as the memory needs. */
template <int GRADIENT_DTYPE>
__device__ __forceinline__ void adamw_flat(const tn__cuda_adamw_arguments &a) {
    uint32_t words[4];
    const int64_t at = ((int64_t)blockIdx.x * TN__FLAT_THREADS + threadIdx.x) * 4;
    const int64_t left = a.cast.rows * a.cast.cols - at;
    if (left <= 0 || is_skipped(a.cast.skip)) return;
    const tn__adamw_factors factors =
        tn__adamw_factors_of(a.constants, a.step, a.rate, a.gradient_scale);
    update_four(a, factors, GRADIENT_DTYPE, at, (int)min(left, (int64_t)4), words);
}

#define ADAMW(name, F, is_1d)                                                                      \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS)                                 \
        name(const __grid_constant__ tn__cuda_adamw_arguments a) {                                 \
        adamw<F, is_1d>(a);                                                                        \
    }
ADAMW(adamw_1d_e4m3, __NV_E4M3, true)
ADAMW(adamw_1d_e5m2, __NV_E5M2, true)
ADAMW(adamw_2d_e4m3, __NV_E4M3, false)
ADAMW(adamw_2d_e5m2, __NV_E5M2, false)

extern "C" __global__ void __launch_bounds__(32)
    adamw_advance(const __grid_constant__ tn__cuda_adamw_advance_arguments a) {
    if (threadIdx.x != 0 || is_skipped(a.skip)) return;
    tn__adamw_begin_step(a.step, a.beta1, a.beta2);
}

/* ---- the embedding's gradient ------------------------------------------------------------- */

/* One thread takes one column. The tokens go by in steps of a block's threads; those that are the
 * block's row are listed in their order, and the rows of dy that they name are added up. */
template <typename T>
__device__ __forceinline__ void embed_gradient(const tn__cuda_embed_gradient_arguments &a) {
    __shared__ int listed[TN__FLAT_THREADS];
    __shared__ uint32_t votes[TN__FLAT_THREADS / 32];
    const uint32_t table_row = blockIdx.x / a.blocks_across;
    const int64_t col =
        (int64_t)(blockIdx.x - table_row * a.blocks_across) * TN__FLAT_THREADS + threadIdx.x;
    const int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32);
    const T *dy = (const T *)a.dy;
    float sum = 0.0f;
    if (is_skipped(a.skip)) return;
    for (int64_t first = 0; first < a.token_count; first += TN__FLAT_THREADS) {
        const int64_t t = first + threadIdx.x;
        const bool is_one = t < a.token_count && a.tokens[t] == table_row;
        const uint32_t vote = __ballot_sync(0xFFFFFFFFu, is_one);
        if (lane == 0) votes[warp] = vote;
        __syncthreads();
        int before = __popc(vote & ((1u << lane) - 1)), count = 0;
#pragma unroll
        for (int w = 0; w < TN__FLAT_THREADS / 32; w++) {
            if (w == warp) before += count;
            count += __popc(votes[w]);
        }
        if (is_one) listed[before] = (int)threadIdx.x;
        __syncthreads();
        if (col < a.cols) {
#pragma unroll 4
            for (int i = 0; i < count; i++)
                sum = __fadd_rn(sum, element<T>::load(dy, (first + listed[i]) * a.cols + col));
        }
    }
    if (col >= a.cols) return;
    const int64_t at = table_row * a.cols + col;
    if (a.accumulate) sum = __fadd_rn(load_as(a.dtype, a.table, at), sum);
    store_as(a.dtype, a.table, at, sum);
}

/* ---- products over rows ------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ void row_products(const tn__cuda_row_products_arguments &a) {
    const int64_t row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / 32) + threadIdx.x / 32;
    if (row >= a.rows || is_skipped(a.skip)) return; /* whole warps */
    const T *x_row = (const T *)a.x + row * (a.is_gated ? 2 * a.half_cols : a.half_cols);
    const T *dy_row = (const T *)a.dy + row * a.half_cols;
    float sum[LANE_SUMS] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t col = threadIdx.x % 32 * LANE_SUMS; col < a.half_cols; col += ROW_SUMS) {
        float x[LANE_SUMS], gate[LANE_SUMS], dy[LANE_SUMS];
        load_eight<T>(x, x_row, col, a.half_cols, a.vectors);
        if (a.is_gated) load_eight<T>(gate, x_row + a.half_cols, col, a.half_cols, a.vectors);
        load_eight<T>(dy, dy_row, col, a.half_cols, a.vectors);
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++) {
            float made = tn__curve_at(a.curve, x[j], is_bf16<T>::VALUE).value;
            if (a.is_gated) made = __fmul_rn(made, gate[j]);
            if (col + j < a.half_cols) sum[j] = __fmaf_rn(dy[j], made, sum[j]);
        }
    }
    const float total = total_of(sum);
    if (threadIdx.x % 32 == 0) a.sums[row] = canonical_of<float>(total);
}

/* ---- clipping ----------------------------------------------------------------------------- */

template <typename T> struct float_number_of {
    enum { VALUE = 0 };
};
template <> struct float_number_of<__nv_bfloat16> {
    enum { VALUE = 1 };
};
template <> struct float_number_of<__half> {
    enum { VALUE = 2 };
};

template <typename T>
__device__ __forceinline__ void square_sums(const tn__cuda_square_sums_arguments &a) {
    __shared__ float halves[TN__SQUARE_WIDTH / 2];
    const int dtype = float_number_of<T>::VALUE, first = (int)threadIdx.x * 4;
    float sum[4] = {0, 0, 0, 0};
    if (blockIdx.x == 0 && !a.accumulate && (int)threadIdx.x >= a.blocks)
        a.sums[threadIdx.x] = 0.0f;
    for (int64_t at = (int64_t)blockIdx.x * TN__SQUARE_WIDTH + first; at < a.count;
         at += (int64_t)TN__SQUARE_BLOCKS * TN__SQUARE_WIDTH) {
        float x[4];
        load_four(x, dtype, a.x, at, (int)min(a.count - at, (int64_t)4), a.vectors);
#pragma unroll
        for (int v = 0; v < 4; v++)
            sum[v] = __fmaf_rn(x[v], x[v], sum[v]);
    }
    for (int half = TN__SQUARE_WIDTH / 2; half >= 4; half /= 2) {
        __syncthreads();
        if (first >= half && first < 2 * half) {
#pragma unroll
            for (int v = 0; v < 4; v++)
                halves[first - half + v] = sum[v];
        }
        __syncthreads();
        if (first < half) {
#pragma unroll
            for (int v = 0; v < 4; v++)
                sum[v] = __fadd_rn(sum[v], halves[first + v]);
        }
    }
    if (threadIdx.x != 0) return;
    float total = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
    if (a.accumulate) total = __fadd_rn(a.sums[blockIdx.x], total);
    a.sums[blockIdx.x] = canonical_of<float>(total);
}

extern "C" __global__ void __launch_bounds__(32)
    clip_factor(const __grid_constant__ tn__cuda_clip_factor_arguments a) {
    if (threadIdx.x != 0) return;
    const tn__clip clip = tn__clip_of(a.sums, a.scale, a.max_norm);
    if (a.norm) *a.norm = canonical_of<float>(clip.norm);
    *a.factor = canonical_of<float>(clip.factor);
}

#define BY_TYPE(source, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        adamw_flat_##source(const __grid_constant__ tn__cuda_adamw_arguments a) {                  \
        adamw_flat<float_number_of<T>::VALUE>(a);                                                  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        embed_gradient_##source(const __grid_constant__ tn__cuda_embed_gradient_arguments a) {     \
        embed_gradient<T>(a);                                                                      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        row_products_##source(const __grid_constant__ tn__cuda_row_products_arguments a) {         \
        row_products<T>(a);                                                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        square_sums_##source(const __grid_constant__ tn__cuda_square_sums_arguments a) {           \
        square_sums<T>(a);                                                                         \
    }
BY_TYPE(fp32, float)
BY_TYPE(bf16, __nv_bfloat16)
BY_TYPE(fp16, __half)
