/* Tables and whole-row forms of the conversions, and the scale of a block: see host_number.h. */
#include "host_number.h"

#include <math.h>
#include <pthread.h>

/* ---- FP8 to fp32 ---------------------------------------------------------------------------- */

static float e4m3_values[256];
static float e5m2_values[256];
static pthread_once_t values_once = PTHREAD_ONCE_INIT;

/* As in tn__fp16_to_float: the code's exponent and mantissa moved under fp32's, and the bias put
 * right by an exact multiplication that also turns denormals into normals. */
static float widen(unsigned code, unsigned mantissa_bits, float bias) {
    float magnitude = tn__float_of((code & 0x7F) << (23 - mantissa_bits)) * bias;
    return code & 0x80 ? -magnitude : magnitude;
}

static void fill_values(void) {
    float not_a_number = tn__float_of(TN__FP32_MAGNITUDE);
    for (unsigned code = 0; code < 256; code++) {
        unsigned magnitude = code & 0x7F;
        e4m3_values[code] = magnitude == 0x7F ? not_a_number : widen(code, 3, 0x1p120f);
        e5m2_values[code] = magnitude > 0x7C ? not_a_number : widen(code, 2, 0x1p112f);
        if (magnitude == 0x7C) e5m2_values[code] = code & 0x80 ? -INFINITY : INFINITY;
    }
}

const float *tn__fp8_values(tn_dtype dtype) {
    pthread_once(&values_once, fill_values);
    return dtype == TN_E4M3 ? e4m3_values : e5m2_values;
}

float tn__dtype_max(tn_dtype dtype) {
    switch (dtype) {
    case TN_FP32: return tn__float_of(0x7F7FFFFF);
    case TN_BF16: return tn__float_of(0x7F7F0000);
    case TN_FP16: return 65504.0f;
    case TN_E4M3: return 448.0f;
    case TN_E5M2: return 57344.0f;
    default: return 0.0f;
    }
}

/* ---- rows of elements ----------------------------------------------------------------------- */

static void load_halves(tn_dtype dtype, const uint16_t *in, int64_t count, float *out) {
    if (dtype == TN_BF16) {
        for (int64_t i = 0; i < count; i++)
            out[i] = tn__bf16_to_float(in[i]);
    } else {
        for (int64_t i = 0; i < count; i++)
            out[i] = tn__fp16_to_float(in[i]);
    }
}

static void load_bytes(tn_dtype dtype, const uint8_t *in, int64_t count, float *out) {
    const float *values = tn__fp8_values(dtype);
    for (int64_t i = 0; i < count; i++)
        out[i] = values[in[i]];
}

void tn__load_floats(tn_dtype dtype, const void *data, int64_t first, int64_t count, float *out) {
    switch (dtype) {
    case TN_FP32: memcpy(out, (const float *)data + first, (size_t)count * sizeof *out); break;
    case TN_BF16:
    case TN_FP16: load_halves(dtype, (const uint16_t *)data + first, count, out); break;
    default: load_bytes(dtype, (const uint8_t *)data + first, count, out); break;
    }
}

static void store_halves(tn_dtype dtype, uint16_t *out, int64_t count, const float *in) {
    if (dtype == TN_BF16) {
        for (int64_t i = 0; i < count; i++)
            out[i] = tn__float_to_bf16(in[i]);
    } else {
        for (int64_t i = 0; i < count; i++)
            out[i] = tn__float_to_fp16(in[i]);
    }
}

static void store_bytes(tn_dtype dtype, uint8_t *out, int64_t count, const float *in) {
    if (dtype == TN_E4M3) {
        for (int64_t i = 0; i < count; i++)
            out[i] = tn__float_to_e4m3(in[i]);
    } else {
        for (int64_t i = 0; i < count; i++)
            out[i] = tn__float_to_e5m2(in[i]);
    }
}

void tn__store_floats(tn_dtype dtype, void *data, int64_t first, int64_t count, const float *in) {
    float *floats = data;
    switch (dtype) {
    case TN_FP32:
        for (int64_t i = 0; i < count; i++)
            floats[first + i] = tn__canonical(in[i]);
        break;
    case TN_BF16:
    case TN_FP16: store_halves(dtype, (uint16_t *)data + first, count, in); break;
    default: store_bytes(dtype, (uint8_t *)data + first, count, in); break;
    }
}

/* ---- scales --------------------------------------------------------------------------------- */

tn__block_scale tn__scale_of_amax(float amax, float amax_epsilon, tn_dtype fp8, tn_dtype source,
                                  tn_scale_mode mode) {
    tn__block_scale scale = {1.0f, 1.0f};
    if (amax < amax_epsilon) amax = amax_epsilon;
    if (amax == 0.0f || isinf(amax)) return scale;
    scale.factor = tn__dtype_max(fp8) / amax;
    if (isinf(scale.factor)) scale.factor = tn__dtype_max(source);
    if (mode == TN_SCALE_POW2) {
        scale.factor = tn__float_of(tn__bits_of(scale.factor) & 0xFF800000u);
    }
    scale.inverse = 1.0f / scale.factor; /* 2^127 gives the denormal 2^-127, and must */
    return scale;
}
