/* Kernels of formats with a scale of the whole tensor: its amax, FP8 with one scale, and delayed
 * scaling's update.
 *
 *     current scaling   amax_start, amax_*, quantize_tensor_*, scale_finish_*
 *     delayed scaling   quantize_tensor_*, which also takes the amax: one read of the source
 *
 * Bytes that must move for N elements of s bytes: 2 s N in (delayed: s N), N out for each plane.
 * The amax of all is a maximum of bits: floats that are not negative compare as integers, and a
 * maximum does not depend on the order of its blocks.
 */
#include "cuda_quantize.cuh"

extern "C" __global__ void amax_start(const __grid_constant__ tn__cuda_quantize_arguments a) {
    if (!is_skipped(a.skip)) *a.total = 0;
}

template <typename T>
__device__ __forceinline__ void amax_of_tile(const tn__cuda_quantize_arguments &a) {
    __shared__ float warp_max[WARPS];
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];
    wait_for_the_kernel_ahead();
    let_the_kernel_behind_start();
    if (is_skipped(a.skip)) return;
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    const float amax = tile_max<T>(warp_max, words);
    if (threadIdx.x == 0) atomicMax(a.total, __float_as_int(amax));
}

__device__ __forceinline__ void scale_of_tensor_put(const tn__cuda_plane &plane, float inverse) {
    *(float4 *)plane.global_scale = make_float4(inverse, 0.0f, 0.0f, 0.0f);
}

/* A scale that is given is as good as finished: the first block writes its inverse. The amax of
 * the tile is wanted too, then. */
template <typename T>
__device__ __forceinline__ void
delayed_scale_put(const tn__cuda_quantize_arguments &a, float *warp_max, float factor,
                  const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    if (a.amax) {
        const float amax = tile_max<T>(warp_max, words);
        if (threadIdx.x == 0) atomicMax(a.amax, __float_as_int(amax));
    }
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const float inverse = canonical_of<float>(inverse_scale(factor)); /* whoever gave it */
    if (a.row.global_scale) scale_of_tensor_put(a.row, inverse);
    if (a.col.global_scale) scale_of_tensor_put(a.col, inverse);
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void quantize_tensor(const tn__cuda_quantize_arguments &a) {
    __shared__ uint4 transposed[TILE_PIECES]; /* not there at all without COL */
    __shared__ float warp_max[WARPS];
    const patch_place at =
        a.factor ? patch_of_thread(a.tiles_across) : patch_of_thread_backwards(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];

    /* With current scaling the kernel ahead is the one of the amax, which does not write src. */
    if (a.factor) wait_for_the_kernel_ahead();
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    if (!a.factor) wait_for_the_kernel_ahead();
    let_the_kernel_behind_start();
    if (is_skipped(a.skip)) return;
    float factor;
    if (a.factor) {
        factor = *a.factor;
        delayed_scale_put<T>(a, warp_max, factor, words);
    } else {
        factor = block_scale<float, F>(__int_as_float(*a.total), a.amax_epsilon, a.is_pow2);
    }
    patch_stay_packed<T>(words);
    store_tile_cast<T, F, R>(a, transposed, at, words, factor, ROW && a.row.data,
                             COL && a.col.data);
}

/* After all blocks of the cast have read the amax, which lies where a scale is to be. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void scale_finish(const tn__cuda_quantize_arguments &a) {
    wait_for_the_kernel_ahead();
    if (is_skipped(a.skip)) return;
    const int amax = *a.total;
    const float factor = block_scale<float, F>(__int_as_float(amax), a.amax_epsilon, a.is_pow2);
    if (a.row.global_scale) scale_of_tensor_put(a.row, inverse_scale(factor));
    if (a.col.global_scale) scale_of_tensor_put(a.col, inverse_scale(factor));
    if (a.amax) atomicMax(a.amax, amax);
}

/* ---- delayed scaling ---------------------------------------------------------------------- */

/* Rolls one tensor's history, a piece at a time: the entry behind a piece is read before the piece
 * is written. Returns this thread's part of the largest. */
__device__ __forceinline__ float roll(float *history, int64_t length, int64_t stride,
                                      float recent) {
    float most = 0.0f;
    for (int64_t first = 0; first < length; first += TN__FLAT_THREADS) {
        const int64_t i = first + threadIdx.x;
        float next = 0.0f;
        if (i < length) next = i + 1 < length ? history[(i + 1) * stride] : recent;
        most = fmaxf(most, next);
        __syncthreads();
        if (i < length) history[i * stride] = i > 0 ? next : 0.0f;
    }
    return most;
}

extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    scale_update(const __grid_constant__ tn__cuda_scale_update_arguments a) {
    __shared__ float part[TN__FLAT_THREADS];
    float *history = a.history + blockIdx.x;
    if (is_skipped(a.skip)) return;
    const float recent = *history;
    __syncthreads();
    part[threadIdx.x] = roll(history, a.length, a.count, recent);
    __syncthreads();
    if (threadIdx.x != 0) return;
    float amax = 0.0f;
    for (int t = 0; t < TN__FLAT_THREADS; t++)
        amax = fmaxf(amax, part[t]);
    if (a.is_most_recent) amax = recent;
    float scale = a.scale[blockIdx.x];
    if (isfinite(amax) && amax > 0.0f) scale = __fdiv_rn(a.target, amax);
    a.scale[blockIdx.x] = isinf(scale) ? element<float>::max_finite() : scale;
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define QUANTIZE(source, T, format, F)                                                             \
    TILE_KERNEL(quantize_tensor_row_##source##_##format, tn__cuda_quantize_arguments, T, 3,        \
                (quantize_tensor<T, F, true, false>))                                              \
    TILE_KERNEL(quantize_tensor_col_##source##_##format, tn__cuda_quantize_arguments, T, 4,        \
                (quantize_tensor<T, F, false, true>))                                              \
    TILE_KERNEL(quantize_tensor_both_##source##_##format, tn__cuda_quantize_arguments, T, 3,       \
                (quantize_tensor<T, F, true, true>))                                               \
    TILE_KERNEL(quantize_tensor_stochastic_##source##_##format, tn__cuda_quantize_arguments, T, 3, \
                (quantize_tensor<T, F, true, true, stochastically>))
#define SOURCE(source, T)                                                                          \
    TILE_KERNEL(amax_##source, tn__cuda_quantize_arguments, T, 3, amax_of_tile<T>)                 \
    QUANTIZE(source, T, e4m3, __NV_E4M3)                                                           \
    QUANTIZE(source, T, e5m2, __NV_E5M2)

SOURCE(fp32, float)
SOURCE(bf16, __nv_bfloat16)
SOURCE(fp16, __half)

extern "C" __global__ void
scale_finish_e4m3(const __grid_constant__ tn__cuda_quantize_arguments a) {
    scale_finish<__NV_E4M3>(a);
}

extern "C" __global__ void
scale_finish_e5m2(const __grid_constant__ tn__cuda_quantize_arguments a) {
    scale_finish<__NV_E5M2>(a);
}
