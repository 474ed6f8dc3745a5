/* Conversions between fp32 and the narrower types: the definition for every implementation.
 *
 *     type   sign exponent mantissa   bias   largest   smallest normal   smallest
 *     bf16      1        8        7    127   3.39e38            2^-126      2^-133
 *     E8M0      0        8        0    127     2^127              2^-127      2^-127
 *
 * and the smaller ones of exact_rounding.h: fp16, E5M2, E4M3, E2M1.
 *
 * Narrowing rounds to nearest, ties to even, and keeps denormals and the sign of zero. bf16 and
 * fp16 overflow to infinity; E4M3 (which has none) and E5M2 saturate, infinities too. A NaN
 * becomes the type's canonical one with the sign cleared, which is what CUDA's cvt gives.
 * Widening is exact. The FP8 formats are OCP's "OFP8": E4M3 has no infinity, and 0x7F and 0xFF
 * are its only NaNs. E2M1 has neither infinity nor NaN: it saturates, and a NaN becomes +6, as
 * CUDA's cvt makes it. E8M0, a scale, has no zero; 0xFF is its NaN.
 *
 * The code relies on the default rounding mode and on denormals being on.
 */
#ifndef TENURE_HOST_NUMBER_H
#define TENURE_HOST_NUMBER_H

#include <stdint.h>
#include <string.h>

#include "exact_rounding.h"
#include "host_simd.h"
#include "tenure_tensor.h"

enum { TN__FP32_INFINITY = 0x7F800000, TN__FP32_MAGNITUDE = 0x7FFFFFFF };

static inline int tn__bits_are_nan(uint32_t bits) {
    return (bits & TN__FP32_MAGNITUDE) > TN__FP32_INFINITY;
}

/* Magnitudes compare as their bits do; NaN counts as 0, so that it is ignored. */
static inline uint32_t tn__magnitude_of(float value) {
    uint32_t magnitude = tn__bits_of(value) & TN__FP32_MAGNITUDE;
    return magnitude > TN__FP32_INFINITY ? 0 : magnitude;
}

/* fp32 as it is stored: any NaN is the canonical one. */
static inline float tn__canonical(float value) {
    return tn__bits_are_nan(tn__bits_of(value)) ? tn__float_of(TN__FP32_MAGNITUDE) : value;
}

static inline float tn__bf16_to_float(uint16_t bits) { return tn__float_of((uint32_t)bits << 16); }

static inline uint16_t tn__float_to_bf16(float value) {
    uint32_t bits = tn__bits_of(value);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(tn__bits_are_nan(bits) ? 0x7FFF : rounded);
}

static inline float tn__fp16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13;
    /* The exponent sits in the low bits of fp32's: 2^112 moves it, also for denormals. */
    uint32_t finite = tn__bits_of(tn__float_of(magnitude) * 0x1p112f);
    uint32_t special = magnitude | TN__FP32_INFINITY;
    return tn__float_of(sign | ((half & 0x7C00) == 0x7C00 ? special : finite));
}

static inline uint16_t tn__float_to_fp16(float value) {
    return (uint16_t)tn__round_to_nearest(tn__type_fp16(), value);
}

static inline uint8_t tn__float_to_e4m3(float value) {
    return (uint8_t)tn__round_to_nearest(tn__type_e4m3(), value);
}

static inline uint8_t tn__float_to_e5m2(float value) {
    return (uint8_t)tn__round_to_nearest(tn__type_e5m2(), value);
}

/* A code of four bits. */
static inline uint8_t tn__float_to_e2m1(float value) {
    return (uint8_t)tn__round_to_nearest(tn__type_e2m1(), value);
}

static inline float tn__e2m1_to_float(unsigned code) {
    static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float magnitude = values[code & 7];
    return code & 8 ? -magnitude : magnitude;
}

/* The smallest E8M0 that is not below `value`, which is not negative; infinity, and what exceeds
 * 2^127, gives 2^127. */
static inline uint8_t tn__float_to_e8m0_up(float value) {
    uint32_t bits = tn__bits_of(value);
    if (bits <= 0x00400000) return 0; /* 2^-127, a denormal */
    uint32_t up = (bits + 0x7FFFFF) >> 23;
    return (uint8_t)(up > 0xFE ? 0xFE : up);
}

static inline float tn__e8m0_to_float(uint8_t code) {
    if (code == 0) return tn__float_of(0x00400000);
    return tn__float_of(code == 0xFF ? TN__FP32_MAGNITUDE : (uint32_t)code << 23);
}

/* 1 over it: 2^(127 - code), exact; NaN for NaN. */
static inline float tn__e8m0_inverse(uint8_t code) {
    return tn__e8m0_to_float((uint8_t)(code == 0xFF ? 0xFF : 254 - code));
}

/* The 256 values of E4M3 or E5M2, by code. */
const float *tn__fp8_values(tn_dtype dtype);

/* The largest finite number of a type; 0 for TN_BYTE. */
float tn__dtype_max(tn_dtype dtype);

/* `count` elements of any floating type from element `first` on, as fp32, and back. */
void tn__load_floats(tn_dtype dtype, const void *data, int64_t first, int64_t count, float *out);
void tn__store_floats(tn_dtype dtype, void *data, int64_t first, int64_t count, const float *in);

/* The factor that a block is multiplied by before the cast, and its inverse, which is stored.
 * `amax` is the largest magnitude in the block, NaN ignored (0 if there is no other). */
typedef struct tn__block_scale {
    float factor;
    float inverse;
} tn__block_scale;
tn__block_scale tn__scale_of_amax(float amax, float amax_epsilon, tn_dtype fp8, tn_dtype source,
                                  tn_scale_mode mode);

#endif
