/* Kernels of stochastic rounding to FP8 blocks of 128, and the step of the generator.
 *
 * They are the casts of cuda_quantize.cuh with another rounding; those of TENSOR, MXFP8 and NVFP4
 * lie beside their own. One kernel serves any planes: of ROW and COL, the one that is not asked for
 * is NULL. A draw is 10 rounds of Philox for 8 elements, once for both.
 */
#include "cuda_quantize.cuh"

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_1d_stochastic(const tn__cuda_quantize_arguments &a) {
    if (is_skipped(a.skip)) return;
    quantize_1d<T, F, true, true, stochastically>(a, patch_of_thread(a.tiles_across));
}

template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_2d_stochastic(const tn__cuda_quantize_arguments &a) {
    if (is_skipped(a.skip)) return;
    quantize_2d<T, F, true, true, stochastically>(a, patch_of_thread(a.tiles_across));
}

/* After all blocks of the cast have drawn. */
extern "C" __global__ void random_advance(const __grid_constant__ tn__cuda_quantize_arguments a) {
    if (!is_skipped(a.skip)) a.random->offset++;
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define QUANTIZE(source, T, format, F)                                                             \
    TILE_KERNEL(quantize_1d_stochastic_##source##_##format, tn__cuda_quantize_arguments, T, 3,     \
                (quantize_1d_stochastic<T, F>))                                                    \
    TILE_KERNEL(quantize_2d_stochastic_##source##_##format, tn__cuda_quantize_arguments, T, 3,     \
                (quantize_2d_stochastic<T, F>))

QUANTIZE(fp32, float, e4m3, __NV_E4M3)
QUANTIZE(fp32, float, e5m2, __NV_E5M2)
QUANTIZE(bf16, __nv_bfloat16, e4m3, __NV_E4M3)
QUANTIZE(bf16, __nv_bfloat16, e5m2, __NV_E5M2)
QUANTIZE(fp16, __half, e4m3, __NV_E4M3)
QUANTIZE(fp16, __half, e5m2, __NV_E5M2)
