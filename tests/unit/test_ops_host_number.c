/* Conversions between fp32 and narrower types against a slow search for the nearest value. */
#include "test_support.h"

#include <math.h>
#include <stdlib.h>

#include "host_number.h"

/* A narrow type, described by its fields, from which every value is worked out anew. */
typedef struct narrow_type {
    const char *name;
    int exponent_bits, mantissa_bits, bias;
    unsigned last_finite; /* code of the largest finite value */
    unsigned overflow;    /* what a finite number past it becomes */
    unsigned infinity;    /* what an infinity becomes */
    unsigned nan;
    int saturates;
    unsigned (*encode)(float value);
} narrow_type;

static unsigned encode_e4m3(float value) { return tn__float_to_e4m3(value); }
static unsigned encode_e5m2(float value) { return tn__float_to_e5m2(value); }
static unsigned encode_fp16(float value) { return tn__float_to_fp16(value); }
static unsigned encode_bf16(float value) { return tn__float_to_bf16(value); }

static const narrow_type types[] = {
    {"E4M3", 4, 3, 7, 0x7E, 0x7E, 0x7E, 0x7F, 1, encode_e4m3},
    {"E5M2", 5, 2, 15, 0x7B, 0x7B, 0x7B, 0x7F, 1, encode_e5m2},
    {"fp16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7C00, 0x7FFF, 0, encode_fp16},
    {"bf16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7F80, 0x7FFF, 0, encode_bf16},
};

static double value_of(const narrow_type *type, unsigned code) {
    int exponent = (int)(code >> type->mantissa_bits);
    int mantissa = (int)(code & ((1u << type->mantissa_bits) - 1));
    int one = 1 << type->mantissa_bits;
    if (exponent == 0) return ldexp(mantissa, 1 - type->bias - type->mantissa_bits);
    return ldexp(one + mantissa, exponent - type->bias - type->mantissa_bits);
}

/* The code whose value is nearest, by halving; of two as near, the even one. The first value past
 * the largest finite one takes part as what a number there would round to. */
static unsigned nearest(const narrow_type *type, double magnitude) {
    unsigned low = 0, high = type->last_finite + 1;
    if (magnitude >= value_of(type, high)) return type->overflow;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (value_of(type, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double below = magnitude - value_of(type, low), above = value_of(type, high) - magnitude;
    unsigned code = below < above || (below == above && low % 2 == 0) ? low : high;
    return code > type->last_finite ? type->overflow : code;
}

static unsigned expected_code(const narrow_type *type, float value) {
    unsigned sign = signbit(value) ? 1u << (type->exponent_bits + type->mantissa_bits) : 0;
    if (isnan(value)) return type->nan;
    if (isinf(value)) return sign | type->infinity;
    return sign | nearest(type, fabs((double)value));
}

static void expect_code(const narrow_type *type, float value) {
    unsigned actual = type->encode(value), expected = expected_code(type, value);
    if (actual == expected) return;
    fail_msg("%s of %a (0x%08X) is 0x%X, expected 0x%X", type->name, (double)value,
             tn__bits_of(value), actual, expected);
}

static void every_bf16_and_fp16_number_is_cast_to_its_nearest_fp8(void **state) {
    (void)state;
    for (unsigned bits = 0; bits < 65536; bits++) {
        for (int t = 0; t < 2; t++) {
            expect_code(&types[t], tn__bf16_to_float((uint16_t)bits));
            expect_code(&types[t], tn__fp16_to_float((uint16_t)bits));
        }
    }
}

/* Half way between neighbours lies the decision: there, and a few floats to either side. */
static void fp32_numbers_around_every_tie_are_cast_to_their_nearest(void **state) {
    (void)state;
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const narrow_type *type = &types[t];
        for (unsigned code = 0; code <= type->last_finite; code++) {
            float tie = (float)((value_of(type, code) + value_of(type, code + 1)) / 2);
            uint32_t bits = tn__bits_of(tie);
            for (int step = -3; step <= 3; step++) {
                uint32_t near = bits + (uint32_t)step;
                if (step < 0 && bits < 3) continue;
                expect_code(type, tn__float_of(near));
                expect_code(type, tn__float_of(near | 0x80000000u));
            }
        }
    }
}

static void fp32_numbers_of_all_sizes_are_cast_to_their_nearest(void **state) {
    (void)state;
    uint32_t random = 12345;
    for (int i = 0; i < 400000; i++) {
        random = random * 1664525u + 1013904223u;
        for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
            expect_code(&types[t], tn__float_of(random ^ (random >> 15)));
        }
    }
}

static void the_named_codes_are_what_the_standard_says(void **state) {
    (void)state;
    static const struct {
        float value;
        unsigned e4m3, e5m2;
    } rows[] = {
        {0.0f, 0x00, 0x00},      {-0.0f, 0x80, 0x80},
        {1.0f, 0x38, 0x3C},      {-1.0f, 0xB8, 0xBC},
        {448.0f, 0x7E, 0x5F},    {464.0f, 0x7E, 0x5F}, /* E4M3's tie with the absent 480 */
        {57344.0f, 0x7E, 0x7B},  {61440.0f, 0x7E, 0x7B},
        {INFINITY, 0x7E, 0x7B},  {-INFINITY, 0xFE, 0xFB},
        {0x1p-9f, 0x01, 0x18},   {0x1p-10f, 0x00, 0x14}, /* half of E4M3's smallest: to even */
        {0x1.8p-9f, 0x02, 0x1A}, {0x1p-16f, 0x00, 0x01},
        {0x1p-17f, 0x00, 0x00},  {0x1.000002p-17f, 0x00, 0x01},
        {0x1p-149f, 0x00, 0x00},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(tn__float_to_e4m3(rows[i].value), rows[i].e4m3);
        assert_int_equal(tn__float_to_e5m2(rows[i].value), rows[i].e5m2);
    }
}

/* CUDA's cvt gives one NaN without its sign; so do all types here. */
static void every_nan_becomes_the_canonical_one(void **state) {
    (void)state;
    static const uint32_t nans[] = {0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        float nan = tn__float_of(nans[i]);
        float stored = 0.0f;
        assert_int_equal(tn__float_to_e4m3(nan), 0x7F);
        assert_int_equal(tn__float_to_e5m2(nan), 0x7F);
        assert_int_equal(tn__float_to_bf16(nan), 0x7FFF);
        assert_int_equal(tn__float_to_fp16(nan), 0x7FFF);
        tn__store_floats(TN_FP32, &stored, 0, 1, &nan);
        assert_int_equal(tn__bits_of(stored), 0x7FFFFFFF);
    }
}

static void widening_is_exact_and_narrowing_takes_it_back(void **state) {
    (void)state;
    for (int t = 0; t < 2; t++) {
        const narrow_type *type = &types[t];
        const float *values = tn__fp8_values(t ? TN_E5M2 : TN_E4M3);
        for (unsigned code = 0; code < 256; code++) {
            unsigned magnitude = code & 0x7F;
            if (magnitude <= type->last_finite) {
                double sign = code & 0x80 ? -1.0 : 1.0;
                assert_true((double)values[code] == sign * value_of(type, magnitude));
                assert_int_equal(type->encode(values[code]), code);
            }
        }
        assert_true(isnan(values[0x7F]) && isnan(values[0xFF]));
    }
    assert_true(isinf(tn__fp8_values(TN_E5M2)[0x7C]) && isinf(tn__fp8_values(TN_E5M2)[0xFC]));
    for (unsigned bits = 0; bits < 65536; bits++) {
        float half = tn__fp16_to_float((uint16_t)bits), brain = tn__bf16_to_float((uint16_t)bits);
        if (!isnan(half)) assert_int_equal(tn__float_to_fp16(half), bits);
        if (!isnan(brain)) assert_int_equal(tn__float_to_bf16(brain), bits);
        if ((bits & 0x7FFF) < 0x7C00) {
            double sign = bits & 0x8000 ? -1.0 : 1.0;
            assert_true((double)half == sign * value_of(&types[2], bits & 0x7FFF));
        }
    }
}

/* ---- scales --------------------------------------------------------------------------------- */

static void expect_scale(float amax, float epsilon, tn_dtype fp8, tn_dtype source,
                         tn_scale_mode mode, uint32_t factor, uint32_t inverse) {
    tn__block_scale scale = tn__scale_of_amax(amax, epsilon, fp8, source, mode);
    assert_int_equal(tn__bits_of(scale.factor), factor);
    assert_int_equal(tn__bits_of(scale.inverse), inverse);
}

static void scales_follow_the_recipe_by_hand(void **state) {
    (void)state;
    const uint32_t one = 0x3F800000;
    /* nothing, or no finite largest: 1 */
    expect_scale(0.0f, 0.0f, TN_E4M3, TN_FP32, TN_SCALE_POW2, one, one);
    expect_scale(INFINITY, 0.0f, TN_E4M3, TN_FP32, TN_SCALE_FP32, one, one);
    /* 448 / 448 = 1; 448 / 449 = 0.99777 -> 0.5; 448 / 3 = 149.333 -> 128 */
    expect_scale(448.0f, 0.0f, TN_E4M3, TN_BF16, TN_SCALE_POW2, one, one);
    expect_scale(449.0f, 0.0f, TN_E4M3, TN_FP32, TN_SCALE_POW2, 0x3F000000, 0x40000000);
    expect_scale(3.0f, 0.0f, TN_E4M3, TN_BF16, TN_SCALE_POW2, 0x43000000, 0x3C000000);
    /* 448 / 3 = 149.33333 rounds to 0x43155555; 1 / that = 0.0066964287 = 0x3BDB6DB7 */
    expect_scale(3.0f, 0.0f, TN_E4M3, TN_BF16, TN_SCALE_FP32, 0x43155555, 0x3BDB6DB7);
    /* 57344 / 3 = 19114.667 -> 16384 = 2^14 */
    expect_scale(3.0f, 0.0f, TN_E5M2, TN_BF16, TN_SCALE_POW2, 0x46800000, 0x38800000);
    /* an epsilon above amax takes its place: 448 / 1 -> 256 */
    expect_scale(0.25f, 1.0f, TN_E4M3, TN_FP32, TN_SCALE_POW2, 0x43800000, 0x3B800000);
    expect_scale(0.0f, 1.0f, TN_E4M3, TN_FP32, TN_SCALE_FP32, 0x43E00000, 0x3B124925);
}

/* 448 / 1e-40 is infinite: the largest finite number of the source's type takes its place. */
static void tiny_blocks_have_a_finite_scale_and_a_denormal_inverse(void **state) {
    (void)state;
    expect_scale(1e-40f, 0.0f, TN_E4M3, TN_FP32, TN_SCALE_POW2, 0x7F000000, 0x00400000);
    expect_scale(1e-40f, 0.0f, TN_E4M3, TN_FP32, TN_SCALE_FP32, 0x7F7FFFFF, 0x00200000);
    expect_scale(tn__bf16_to_float(0x006D), 0.0f, TN_E4M3, TN_BF16, TN_SCALE_POW2, 0x7F000000,
                 0x00400000); /* 1e-38 in bf16 */
    /* 1 / 0x7F7F0000 = 2^-128 / 0.99609375 = 2^-128 + 2^-136 + 2^-144 + ..., in 2^-149 units:
     * 2097152 + 8192 + 32 + 0.125 -> 2105376 = 0x00202020 */
    expect_scale(1e-40f, 0.0f, TN_E4M3, TN_BF16, TN_SCALE_FP32, 0x7F7F0000, 0x00202020);
    /* epsilon alone can make it infinite for fp16: 65504, or 2^15 */
    expect_scale(0.0f, 1e-45f, TN_E5M2, TN_FP16, TN_SCALE_POW2, 0x47000000, 0x38000000);
    /* 2^-118 * 448 is the last whose scale is finite: 448 / (2^-118) = 1.75 * 2^126 */
    expect_scale(0x1p-118f, 0.0f, TN_E4M3, TN_FP32, TN_SCALE_POW2, 0x7E800000, 0x00800000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bf16_and_fp16_number_is_cast_to_its_nearest_fp8),
        cmocka_unit_test(fp32_numbers_around_every_tie_are_cast_to_their_nearest),
        cmocka_unit_test(fp32_numbers_of_all_sizes_are_cast_to_their_nearest),
        cmocka_unit_test(the_named_codes_are_what_the_standard_says),
        cmocka_unit_test(every_nan_becomes_the_canonical_one),
        cmocka_unit_test(widening_is_exact_and_narrowing_takes_it_back),
        cmocka_unit_test(scales_follow_the_recipe_by_hand),
        cmocka_unit_test(tiny_blocks_have_a_finite_scale_and_a_denormal_inverse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
