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

/* What a block's elements are multiplied with, and what is stored. */
struct scale_pair {
    float scale, inverse;
};

/* block_scale and its inverse. The largest numbers of both formats are 1.75 times a power of two:
 * the power at or below their quotient with an amax is one less where that is more than 1.75 times
 * its own power, and takes no division, nor does its inverse; unless one of them is not normal. */
template <typename T, __nv_fp8_interpretation_t F>
__device__ __forceinline__ scale_pair block_scales(float amax, float amax_epsilon, int is_pow2) {
    enum { LEAST = 27, MOST = 227, FORMAT_POWER = F == __NV_E4M3 ? 8 : 15 };
    const uint32_t bits = __float_as_uint(fmaxf(amax, amax_epsilon));
    scale_pair made;
    if (is_pow2 && bits - ((uint32_t)LEAST << 23) < (uint32_t)(MOST - LEAST) << 23) {
        const uint32_t power = 254 + FORMAT_POWER - ((bits + 0x1FFFFFu) >> 23);
        made.scale = __uint_as_float(power << 23);
        made.inverse = __uint_as_float((254 - power) << 23);
    } else {
        made.scale = block_scale<T, F>(amax, amax_epsilon, is_pow2);
        made.inverse = inverse_scale(made.scale);
    }
    return made;
}

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
        : state(*a.random), cols(a.cols) {
        state.seed = of_all_lanes(state.seed);
    }

    /* The same number, of which the compiler now knows that all lanes have it: what follows from it
     * alone is computed once for a warp. */
    static __device__ uint64_t of_all_lanes(uint64_t number) {
        return __shfl_sync(0xFFFFFFFFu, (uint32_t)number, 0) |
               (uint64_t)__shfl_sync(0xFFFFFFFFu, (uint32_t)(number >> 32), 0) << 32;
    }

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
        float rounded[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            rounded[j] = F == __NV_E4M3
                             ? rounded_to<3, 7>(scaled[j], tn__random_number(random.words, j))
                             : rounded_to<2, 15>(scaled[j], tn__random_number(random.words, j));
        return cast_patch_row<F>(rounded);
    }

    /* A size with the number added to what is behind its KEPT bits of mantissa, as bits: above the
     * type's smallest normal number, and below it where that number has been added, so that the
     * same bits are behind. A NaN stays one. */
    template <int KEPT> static __device__ uint32_t drawn_sum(float size, uint32_t random) {
        const uint32_t part = (2 * random + 1) << (6 - KEPT);
#ifdef __CUDA_ARCH__
        return __viaddmin_u32(__float_as_uint(size), part, 0x7FFFFFFFu);
#else
        return min(__float_as_uint(size) + part, 0x7FFFFFFFu);
#endif
    }

    template <int BIAS> static __device__ float anchor_of(float size) {
        const float normal = __uint_as_float((uint32_t)(128 - BIAS) << 23);
        return size < normal ? normal : 0.0f;
    }

    /* As tn__round_stochastically, but the number itself, of the type or beyond its largest. */
    template <int KEPT, int BIAS> static __device__ float rounded_to(float value, uint32_t random) {
        const float size = fabsf(value), anchor = anchor_of<BIAS>(size);
        const uint32_t sum = drawn_sum<KEPT>(__fadd_rz(size, anchor), random);
        return copysignf(__fsub_rn(__uint_as_float(sum & 0xFFFFFFFFu << (23 - KEPT)), anchor),
                         value);
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
