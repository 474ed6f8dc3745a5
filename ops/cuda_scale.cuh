/* The scale of a block from its amax, and the cast of scaled values: to the bit what the host does
 * (tn_quantize in tenure_ops.h), to nearest or stochastically.
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

/* Eight bytes, likewise. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ uint2 cast_patch_row(const float (&scaled)[PATCH]) {
    return make_uint2(cast_four<F>(scaled[0], scaled[1], scaled[2], scaled[3]),
                      cast_four<F>(scaled[4], scaled[5], scaled[6], scaled[7]));
}

/* ---- roundings ---------------------------------------------------------------------------- */

/* A rounding is a type that a kernel is compiled for. It gives the random numbers of the 8 elements
 * that a lane holds of row i of its patch, and with these the codes of what they are scaled to, the
 * first in the lowest place. */
struct to_nearest {
    enum { IS_STOCHASTIC = 0 };
    struct numbers {};
    __device__ explicit to_nearest(const tn__cuda_quantize_arguments &) {}
    template <typename T> __device__ numbers of_row(const patch_place &, int) const {
        return numbers();
    }
    template <__nv_fp8_interpretation_t F>
    static __device__ uint2 codes(const float (&scaled)[PATCH], const numbers &) {
        return cast_patch_row<F>(scaled);
    }
};

struct stochastically {
    enum { IS_STOCHASTIC = 1 };
    struct numbers {
        uint32_t words[4];
    };
    tn__random state;
    int64_t cols;

    __device__ explicit stochastically(const tn__cuda_quantize_arguments &a)
        : state(*a.random), cols(a.cols) {}

    /* Of 16-bit elements a lane holds one group; of fp32 the same half of two. */
    template <typename T> __device__ numbers of_row(const patch_place &at, int i) const {
        numbers made;
        const int64_t row = at.row + i;
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, 0);
        tn__random_words(state, tn__random_group_of(row, col, cols), made.words);
        if constexpr (sizeof(T) == 4) {
            const int64_t other = at.tile_first_col + patch_column<T>(at.lane16, 4);
            const bool is_upper = at.lane16 % 2;
            uint32_t second[4];
            tn__random_words(state, tn__random_group_of(row, other, cols), second);
            made.words[0] = is_upper ? made.words[2] : made.words[0];
            made.words[1] = is_upper ? made.words[3] : made.words[1];
            made.words[2] = is_upper ? second[2] : second[0];
            made.words[3] = is_upper ? second[3] : second[1];
        }
        return made;
    }

    template <__nv_fp8_interpretation_t F>
    static __device__ uint2 codes(const float (&scaled)[PATCH], const numbers &random) {
        const tn__small_float type = F == __NV_E4M3 ? tn__type_e4m3() : tn__type_e5m2();
        uint32_t bytes[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            bytes[j / 4] |=
                tn__round_stochastically(type, scaled[j], tn__random_number(random.words, j))
                << (8 * (j % 4));
        return make_uint2(bytes[0], bytes[1]);
    }
};

/* ---- back --------------------------------------------------------------------------------- */

/* Two bytes, the first in the lowest place, as the bits of two halves (exact). */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ uint32_t fp8_halves(uint32_t bytes) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(bytes & 0xFFFFu), F);
    return pair.x | (uint32_t)pair.y << 16;
}

/* The same as floats (exact). */
template <__nv_fp8_interpretation_t F> __device__ __forceinline__ float2 fp8_pair(uint32_t bytes) {
    return __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(bytes & 0xFFFFu), F)));
}

#endif
