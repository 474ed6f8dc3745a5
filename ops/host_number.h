/* Conversions between fp32 and the narrower types: the definition for every implementation.
 *
 *     type   sign exponent mantissa   bias   largest   smallest normal   smallest
 *     bf16      1        8        7    127   3.39e38            2^-126      2^-133
 *     fp16      1        5       10     15     65504             2^-14       2^-24
 *     E5M2      1        5        2     15     57344             2^-14       2^-16
 *     E4M3      1        4        3      7       448              2^-6        2^-9
 *
 * Narrowing rounds to nearest, ties to even, and keeps denormals and the sign of zero. bf16 and
 * fp16 overflow to infinity; E4M3 (which has none) and E5M2 saturate, infinities too. A NaN
 * becomes the type's canonical one with the sign cleared, which is what CUDA's cvt gives.
 * Widening is exact. The FP8 formats are OCP's "OFP8": E4M3 has no infinity, and 0x7F and 0xFF
 * are its only NaNs.
 *
 * The code relies on the default rounding mode and on denormals being on.
 */
#ifndef TENURE_HOST_NUMBER_H
#define TENURE_HOST_NUMBER_H

#include <stdint.h>
#include <string.h>

#include "host_simd.h"
#include "tenure_tensor.h"

enum { TN__FP32_INFINITY = 0x7F800000, TN__FP32_MAGNITUDE = 0x7FFFFFFF };

static inline uint32_t tn__bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float tn__float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int tn__bits_are_nan(uint32_t bits) {
    return (bits & TN__FP32_MAGNITUDE) > TN__FP32_INFINITY;
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

/* A float whose last bit is worth as much as the smallest denormal of a type: adding it rounds a
 * smaller number to a whole count of those, ties to even, and the sum's low bits are the count. */
static inline uint32_t tn__count_denormals(uint32_t magnitude, float anchor) {
    return tn__bits_of(tn__float_of(magnitude) + anchor) - tn__bits_of(anchor);
}

/* Rounds a positive normal float to `kept` mantissa bits and changes the exponent's bias from
 * 127 to `bias`; a carry out of the mantissa goes to the exponent, as it should. */
static inline uint32_t tn__round_normal(uint32_t magnitude, unsigned kept, uint32_t bias) {
    unsigned dropped = 23 - kept;
    uint32_t half = (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
    return ((magnitude + half) >> dropped) - ((127 - bias) << kept);
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
    uint32_t bits = tn__bits_of(value);
    uint32_t magnitude = bits & TN__FP32_MAGNITUDE;
    uint32_t sign = (bits >> 16) & 0x8000;
    uint32_t normal = tn__round_normal(magnitude, 10, 15);
    uint32_t result = magnitude < 0x38800000 ? tn__count_denormals(magnitude, 0.5f) : normal;
    result = magnitude >= 0x477FF000 ? 0x7C00 : result; /* 65520, half way past 65504 */
    return (uint16_t)(magnitude > TN__FP32_INFINITY ? 0x7FFF : sign | result);
}

static inline uint8_t tn__float_to_e4m3(float value) {
    uint32_t bits = tn__bits_of(value);
    uint32_t magnitude = bits & TN__FP32_MAGNITUDE;
    uint32_t sign = (bits >> 24) & 0x80;
    uint32_t normal = tn__round_normal(magnitude, 3, 7);
    uint32_t result = magnitude < 0x3C800000 ? tn__count_denormals(magnitude, 0x1p14f) : normal;
    result = magnitude >= 0x43E00000 ? 0x7E : result; /* 448 */
    return (uint8_t)(magnitude > TN__FP32_INFINITY ? 0x7F : sign | result);
}

static inline uint8_t tn__float_to_e5m2(float value) {
    uint32_t bits = tn__bits_of(value);
    uint32_t magnitude = bits & TN__FP32_MAGNITUDE;
    uint32_t sign = (bits >> 24) & 0x80;
    uint32_t normal = tn__round_normal(magnitude, 2, 15);
    uint32_t result = magnitude < 0x38800000 ? tn__count_denormals(magnitude, 0x1p7f) : normal;
    result = magnitude >= 0x47600000 ? 0x7B : result; /* 57344 */
    return (uint8_t)(magnitude > TN__FP32_INFINITY ? 0x7F : sign | result);
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
