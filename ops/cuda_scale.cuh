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

/* Byte `which` of each of four words. */
__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                             uint32_t which) {
    const uint32_t pair = which | (which + 4) << 4;
    return __byte_perm(__byte_perm(a, b, pair), __byte_perm(c, d, pair), 0x5410);
}

/* The signs of 8 numbers, each the highest bit of a byte. */
__device__ __forceinline__ uint2 sign_bytes(const float (&of)[PATCH]) {
    uint32_t bytes[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        bytes[h] = 0x80808080u &
                   bytes_of(__float_as_uint(of[4 * h]), __float_as_uint(of[4 * h + 1]),
                            __float_as_uint(of[4 * h + 2]), __float_as_uint(of[4 * h + 3]), 3);
    return make_uint2(bytes[0], bytes[1]);
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
    uint64_t groups; /* of a row */

    __device__ explicit stochastically(const tn__cuda_quantize_arguments &a)
        : state(*a.random), cols(a.cols), groups(tn__random_group_of(1, 0, a.cols)) {
        state.seed = of_all_lanes(state.seed);
        state.offset = of_all_lanes(state.offset);
    }

    /* The same number, of which the compiler now knows that all lanes have it: what follows from it
     * alone is computed once for a warp. */
    static __device__ uint64_t of_all_lanes(uint64_t number) {
        return __reduce_or_sync(0xFFFFFFFFu, (uint32_t)number) |
               (uint64_t)__reduce_or_sync(0xFFFFFFFFu, (uint32_t)(number >> 32)) << 32;
    }

    /* Of 16-bit elements a lane holds one group; of fp32 the same half of two. */
    template <typename T> __device__ numbers of_row(const patch_place &at, int i) const {
        numbers made;
        draw<T>(made.words, first_group<T>(at, 0) + (uint64_t)i * groups);
        if constexpr (sizeof(T) == 4) {
            const bool is_upper = at.lane16 % 2;
            uint32_t second[4];
            draw<T>(second, first_group<T>(at, 4) + (uint64_t)i * groups);
            made.words[0] = is_upper ? made.words[2] : made.words[0];
            made.words[1] = is_upper ? made.words[3] : made.words[1];
            made.words[2] = is_upper ? second[2] : second[0];
            made.words[3] = is_upper ? second[3] : second[1];
        }
        return made;
    }

    /* As tn__random_words. All rounds lie one behind the other only where there are registers for
     * their keys, which are the same for all draws. */
    template <typename T> __device__ void draw(uint32_t (&words)[4], uint64_t group) const {
        constexpr int AT_ONCE = is_bf16<T>::VALUE ? TN__PHILOX_ROUNDS : TN__PHILOX_ROUNDS / 2;
        tn__random_begin(words, state, group);
#pragma unroll AT_ONCE
        for (uint32_t round = 0; round < TN__PHILOX_ROUNDS; round++)
            tn__philox_round(words, state.seed, round);
    }

    /* That of element j of the patch's first row. */
    template <typename T> __device__ uint64_t first_group(const patch_place &at, int j) const {
        return tn__random_group_of(at.row, at.tile_first_col + patch_column<T>(at.lane16, j), cols);
    }

    /* What is added behind the bits that element j keeps: 2^7 (2 r + 1), with r its number. */
    static __device__ uint32_t part_of(const numbers &random, int j) {
        return __byte_perm(random.words[j / 2], 0x80, j % 2 ? 0x5324 : 0x5104);
    }

    /* The code of a size, as tn__round_stochastically gives it, in the highest byte: of a size that
     * is no NaN and not beyond the type's largest. Multiplied so that the type's smallest normal
     * number becomes that of fp32, a size has the code and what is behind it as its bits, also
     * where it is denormal; what has no place there is cut off. */
    template <int KEPT, int BIAS> static __device__ uint32_t drawn(float size, uint32_t part) {
        const float moved = __fmul_rz(size, __uint_as_float((uint32_t)BIAS << 23));
        return (__float_as_uint(moved) << (KEPT + 1)) + part;
    }

    template <__nv_fp8_interpretation_t F>
    static __device__ uint32_t drawn_fp8(float size, uint32_t part) {
        return F == __NV_E4M3 ? drawn<3, 7>(size, part) : drawn<2, 15>(size, part);
    }

    /* The codes of sizes as drawn() takes them. */
    template <__nv_fp8_interpretation_t F>
    static __device__ uint2 size_codes(const float (&size)[PATCH], const numbers &random) {
        uint32_t code[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            code[j] = drawn_fp8<F>(fabsf(size[j]), part_of(random, j));
        return make_uint2(bytes_of(code[0], code[1], code[2], code[3], 3),
                          bytes_of(code[4], code[5], code[6], code[7], 3));
    }

    /* Any numbers as sizes: what is larger is the largest, and a NaN the number whose code would be
     * that of a NaN. */
    template <__nv_fp8_interpretation_t F>
    static __device__ uint2 codes(const float (&scaled)[PATCH], const numbers &random) {
        const float nan = F == __NV_E4M3 ? 480.0f : 114688.0f;
        float size[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            size[j] = isnan(scaled[j]) ? nan : fminf(fabsf(scaled[j]), format_max<F>());
        const uint2 codes = size_codes<F>(size, random), sign = sign_bytes(scaled);
        return make_uint2(codes.x | sign.x, codes.y | sign.y);
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
