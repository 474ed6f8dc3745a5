/* The scale of a block from its amax, and the cast of scaled values to FP8: to the bit what the
 * host does (tn_quantize in tenure_ops.h).
 *
 * Every operation is the IEEE one by name (__fdiv_rn, __fmul_rn), so that no compiler option can
 * contract or approximate it; denormal scales and products are kept.
 */
#ifndef TENURE_CUDA_SCALE_CUH
#define TENURE_CUDA_SCALE_CUH

#include "cuda_tile.cuh"

template <__nv_fp8_interpretation_t F> __device__ __forceinline__ float format_max() {
    return F == __NV_E4M3 ? 448.0f : 57344.0f;
}

/* amax is not NaN: it is a maximum of fmaxf that began at 0. */
template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ float block_scale(float amax, float amax_epsilon, int is_pow2) {
    amax = fmaxf(amax, amax_epsilon);
    if (amax == 0.0f || isinf(amax)) return 1.0f;
    float scale = __fdiv_rn(format_max<F>(), amax);
    if (isinf(scale)) scale = element<T>::max_finite();
    if (is_pow2) scale = __uint_as_float(__float_as_uint(scale) & 0xFF800000u);
    return scale;
}

__device__ __forceinline__ float inverse_scale(float scale) { return __fdiv_rn(1.0f, scale); }

/* Four bytes, the first in the lowest place. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ uint32_t cast_four(float a, float b, float c, float d) {
    uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, F);
    uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, F);
    return low | high << 16;
}

/* Two bytes, the first in the lowest place, as floats (exact). */
template <__nv_fp8_interpretation_t F> __device__ __forceinline__ float2 fp8_pair(uint32_t bytes) {
    return __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(bytes & 0xFFFFu), F)));
}

#endif
