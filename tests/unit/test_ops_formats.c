/* Casts to and from TENSOR, MXFP8 and NVFP4 on the host: numbers, blocks worked by hand, and whole
 * planes against the reference. */
#include "ops_formats_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host_number.h"

typedef struct casting {
    tn_format format;
    tn_dtype dtype;
} casting;

static const casting castings[] = {{TN_FORMAT_FP8_TENSOR, TN_E4M3},
                                   {TN_FORMAT_FP8_TENSOR, TN_E5M2},
                                   {TN_FORMAT_MXFP8, TN_E4M3},
                                   {TN_FORMAT_MXFP8, TN_E5M2},
                                   {TN_FORMAT_NVFP4, TN_E2M1}};
enum { CASTINGS = sizeof castings / sizeof *castings };
static const tn_dtype sources[] = {TN_FP32, TN_BF16, TN_FP16};

/* ---- numbers -------------------------------------------------------------------------------- */

static void every_code_of_e2m1_and_e8m0_has_its_value(void **state) {
    (void)state;
    for (unsigned code = 0; code < 16; code++) {
        double value = (double)tn__e2m1_to_float(code);
        assert_true(value == format_code_value(TN_E2M1, code));
        assert_int_equal(signbit(value) != 0, code >= 8);
        assert_int_equal(tn__float_to_e2m1((float)value), code);
    }
    for (unsigned code = 0; code < 255; code++) {
        float value = tn__e8m0_to_float((uint8_t)code);
        assert_true((double)value == format_code_value(TN_E8M0, code));
        assert_int_equal(tn__float_to_e8m0_up(value), code);
        assert_true((double)tn__e8m0_inverse((uint8_t)code) * (double)value == 1.0);
    }
    assert_true(isnan(tn__e8m0_to_float(255)) && isnan(tn__e8m0_inverse(255)));
}

/* Ties: each middle of two neighbours goes to the even code, and the floats beside it do not. */
static void e2m1_rounds_to_nearest_even_and_saturates(void **state) {
    (void)state;
    const float middles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const uint8_t even[] = {0, 2, 2, 4, 4, 6, 6};
    for (unsigned i = 0; i < 7; i++) {
        assert_int_equal(tn__float_to_e2m1(middles[i]), even[i]);
        assert_int_equal(tn__float_to_e2m1(nextafterf(middles[i], 0.0f)), i);
        assert_int_equal(tn__float_to_e2m1(nextafterf(middles[i], 9.0f)), i + 1);
        assert_int_equal(tn__float_to_e2m1(-middles[i]), even[i] + 8);
    }
    for (uint32_t bits = 0; bits < 0x7F800000u; bits += 0x1237) {
        float value = tn__float_of(bits);
        assert_int_equal(tn__float_to_e2m1(value), format_nearest_code(TN_E2M1, (double)value));
    }
    assert_int_equal(tn__float_to_e2m1(INFINITY), 7);
    assert_int_equal(tn__float_to_e2m1(-INFINITY), 15);
    assert_int_equal(tn__float_to_e2m1(NAN), 7);
    assert_int_equal(tn__float_to_e2m1(-NAN), 7);
    assert_int_equal(tn__float_to_e2m1(-0.0f), 8);
}

static void e8m0_rounds_up(void **state) {
    (void)state;
    for (unsigned code = 1; code < 254; code++) {
        float value = tn__e8m0_to_float((uint8_t)code);
        assert_int_equal(tn__float_to_e8m0_up(nextafterf(value, INFINITY)), code + 1);
        assert_int_equal(tn__float_to_e8m0_up(nextafterf(value, 0.0f)), code);
    }
    assert_int_equal(tn__float_to_e8m0_up(0.0f), 0);
    assert_int_equal(tn__float_to_e8m0_up(0x1p-149f), 0);
    assert_int_equal(tn__float_to_e8m0_up(nextafterf(0x1p-127f, 1.0f)), 1);
    assert_int_equal(tn__float_to_e8m0_up(nextafterf(0x1p127f, INFINITY)), 254);
    assert_int_equal(tn__float_to_e8m0_up(INFINITY), 254);
}

/* Of all mantissas, fp32's product with the rounded 1 / 448 (1 / 57344 is of the same bits) gives
 * the power of two that exact arithmetic gives: 448 times it is not below amax, and half is. */
static void the_mxfp8_scale_is_the_least_without_saturation(void **state) {
    (void)state;
    for (uint32_t bits = 0x43800000u; bits < 0x44000000u; bits++) { /* 256 to 512 */
        float amax = tn__float_of(bits);
        uint8_t code = tn__float_to_e8m0_up(amax * (1.0f / 448.0f));
        if (code == (amax <= 448.0f ? 127 : 128)) continue;
        fail_msg("amax %a has scale code %u", (double)amax, code);
    }
}

/* ---- blocks by hand ------------------------------------------------------------------------- */

static tn__matrix matrix_of(tn_dtype dtype, int64_t rows, int64_t cols, const float *values,
                            int given) {
    tn__matrix matrix = {dtype, calloc((size_t)(rows * cols), 4), rows, cols};
    for (int i = 0; i < given; i++)
        test_matrix_set(&matrix, i / cols, i % cols, values[i]);
    return matrix;
}

/* A row of 40: a block of 32 whose amax is 7 (scale 2^-6: 448 / 7 = 64) and one of 8 zeros. */
static void an_mxfp8_row_worked_by_hand(void **state) {
    (void)state;
    const float values[] = {7.0f, -7.0f, 1.0f, 0.5f, -0.0f, 0x1p-16f, 6.75f};
    const uint8_t codes[] = {0x7E, 0xFE, 0x68, 0x60, 0x80, 0x00, 0x7E}; /* 6.75 * 64 = 432 */
    tn__matrix src = matrix_of(TN_BF16, 1, 40, values, 7);
    test_plane row = format_plane_make(TN_FORMAT_MXFP8, TN_PLANE_ROW, TN_E4M3, 1, 40);
    format_quantize(&src, &row, NULL, TN_SCALE_POW2, 0.0f);
    for (int i = 0; i < 7; i++)
        assert_int_equal(((uint8_t *)row.view.data)[i], codes[i]);
    assert_int_equal(((uint8_t *)row.view.scale)[0], 121);
    assert_int_equal(((uint8_t *)row.view.scale)[1], 0);
    assert_int_equal(row.view.layout.scale_bytes, 128 * 4);
    format_plane_expect_zero_padding(&row);
    format_plane_free(&row), test_matrix_free(&src);
}

/* A column of 33: 32 of amax 1 (scale 2^-8: 448 / 1 rounds down to 256) and one of amax 900. */
static void an_mxfp8_column_worked_by_hand(void **state) {
    (void)state;
    float values[66] = {0};
    values[0] = 1.0f, values[62] = -0.25f, values[64] = 900.0f;
    tn__matrix src = matrix_of(TN_FP32, 33, 2, values, 66);
    test_plane col = format_plane_make(TN_FORMAT_MXFP8, TN_PLANE_COL, TN_E4M3, 33, 2);
    format_quantize(&src, NULL, &col, TN_SCALE_POW2, 0.0f);
    const uint8_t *data = col.view.data, *scale = col.view.scale;
    assert_int_equal(scale[0], 119);   /* 2^-8 */
    assert_int_equal(scale[128], 129); /* 2^2: 900 / 4 = 225 */
    assert_int_equal(data[0], 0x78);   /* 256 */
    assert_int_equal(data[62], 0xE8);  /* -64 */
    assert_int_equal(data[64], 0x76);  /* 225 between 224 and 240 */
    format_plane_expect_zero_padding(&col);
    format_plane_free(&col), test_matrix_free(&src);
}

/* The tensor's amax is 2688, so that the global scale is 1. Block 0: scale 448. Block 1, of amax 3:
 * scale 0.5, elements doubled. An odd row: 19 elements take 10 bytes. */
static void an_nvfp4_row_worked_by_hand(void **state) {
    (void)state;
    float values[19] = {2688.0f, -448.0f, 224.0f, 112.0f, 336.0f};
    values[16] = 3.0f, values[17] = -0.125f, values[18] = 1.25f;
    tn__matrix src = matrix_of(TN_BF16, 1, 19, values, 19);
    test_plane row = format_plane_make(TN_FORMAT_NVFP4, TN_PLANE_ROW, TN_E2M1, 1, 19);
    format_quantize(&src, &row, NULL, TN_SCALE_POW2, 0.0f);
    const uint8_t *data = row.view.data, *scale = row.view.scale;
    assert_true(*row.view.global_scale == 1.0f);
    assert_int_equal(scale[0], 0x7E); /* 448 */
    assert_int_equal(scale[1], 0x30); /* 0.5 */
    assert_int_equal(data[0], 0xA7);  /* 6, -1 */
    assert_int_equal(data[1], 0x01);  /* 0.5, 0.25: a tie, to 0 */
    assert_int_equal(data[2], 0x02);  /* 0.75: a tie, to 1 */
    assert_int_equal(data[8], 0x87);  /* 6, -0.25: a tie, to -0 */
    assert_int_equal(data[9], 0x04);  /* 2.5: a tie, to 2; and half a byte of 0 */
    assert_int_equal(row.view.layout.row_bytes, 10);
    format_plane_expect_zero_padding(&row);
    format_plane_free(&row), test_matrix_free(&src);
}

static void a_tensor_scale_worked_by_hand(void **state) {
    (void)state;
    const float values[] = {7.0f, -3.5f, 0.0f, NAN, -0.0f, 1.0f};
    const uint8_t row_codes[] = {0x7E, 0xF6, 0x00, 0x7F, 0x80, 0x68};
    tn__matrix src = matrix_of(TN_BF16, 2, 3, values, 6);
    for (int mode = 0; mode < 2; mode++) { /* 448 / 7 is 64 in either */
        test_plane row = format_plane_make(TN_FORMAT_FP8_TENSOR, TN_PLANE_ROW, TN_E4M3, 2, 3);
        test_plane col = format_plane_make(TN_FORMAT_FP8_TENSOR, TN_PLANE_COL, TN_E4M3, 2, 3);
        format_quantize(&src, &row, &col, mode ? TN_SCALE_FP32 : TN_SCALE_POW2, 0.0f);
        for (int i = 0; i < 6; i++) {
            assert_int_equal(((uint8_t *)row.view.data)[i], row_codes[i]);
            assert_int_equal(((uint8_t *)col.view.data)[i % 3 * 2 + i / 3], row_codes[i]);
        }
        assert_true(*row.view.global_scale == 0x1p-6f && *col.view.global_scale == 0x1p-6f);
        format_plane_expect_zero_padding(&row), format_plane_expect_zero_padding(&col);
        format_plane_free(&row), format_plane_free(&col);
    }
    test_matrix_free(&src);
}

/* ---- special values ------------------------------------------------------------------------- */

static unsigned code_of_one(casting what, float value, float other, double *scale) {
    float values[] = {value, other};
    tn__matrix src = matrix_of(TN_FP32, 1, 2, values, 2);
    test_plane row = format_plane_make(what.format, TN_PLANE_ROW, what.dtype, 1, 2);
    format_quantize(&src, &row, NULL, TN_SCALE_POW2, 0.0f);
    unsigned code = format_plane_code(&row, 0, 0);
    *scale = format_plane_scale(&row, 0, 0);
    format_plane_free(&row), test_matrix_free(&src);
    return code;
}

static void nan_infinity_and_zero_have_their_rules(void **state) {
    (void)state;
    double scale;
    for (int i = 0; i < CASTINGS; i++) {
        casting what = castings[i];
        int is_fp4 = what.format == TN_FORMAT_NVFP4, is_mx = what.format == TN_FORMAT_MXFP8;
        unsigned largest = is_fp4 ? 7 : what.dtype == TN_E4M3 ? 0x7E : 0x7B;
        double least = is_fp4 ? 0.0 : is_mx ? ldexp(1.0, -127) : 1.0;
        assert_int_equal(code_of_one(what, NAN, 1.0f, &scale), is_fp4 ? 7 : 0x7F);
        assert_true(scale < 1.0 || is_fp4); /* the other's: NaN does not count */
        assert_int_equal(code_of_one(what, NAN, NAN, &scale), is_fp4 ? 7 : 0x7F);
        assert_true(scale == least);
        assert_int_equal(code_of_one(what, INFINITY, 1.0f, &scale), largest);
        assert_true(scale == (is_mx ? ldexp(1.0, 127) : is_fp4 ? 448.0 : 1.0));
        assert_int_equal(code_of_one(what, 0.0f, 0.0f, &scale), 0);
        assert_true(scale == least);
        assert_int_equal(code_of_one(what, -0.0f, 1.0f, &scale), is_fp4 ? 8 : 0x80);
        assert_int_equal(code_of_one(what, 0x1.FFFFFEp127f, 1.0f, &scale), is_fp4 ? 7 : 0x78);
    }
}

/* fp32's smallest: scales stay finite, and what was not 0 is not lost where the type can say it. */
static void denormals_are_scaled_too(void **state) {
    (void)state;
    double scale;
    const casting tensor = castings[0], mxfp8 = castings[2];
    assert_int_equal(code_of_one(tensor, 0x1p-149f, 0x1p-149f, &scale), 0); /* 2^127 at most */
    assert_true(scale == ldexp(1.0, -127));
    assert_int_equal(code_of_one(tensor, 0x1p-127f, 0x1p-127f, &scale), 0x38); /* 1 */
    assert_int_equal(code_of_one(mxfp8, 0x1p-127f, 0x1p-149f, &scale), 0x38);
    assert_true(scale == ldexp(1.0, -127));
}

/* ---- whole planes --------------------------------------------------------------------------- */

static void expect_casting(casting what, tn_dtype source, int64_t rows, int64_t cols, unsigned i) {
    tn__matrix src = test_matrix_make(source, rows, cols, i);
    tn_scale_mode mode = i % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
    float epsilon = i % 5 ? 0.0f : 0.5f;
    unsigned planes = 1 + i % 3;
    test_plane row = format_plane_make(what.format, TN_PLANE_ROW, what.dtype, rows, cols);
    test_plane col = format_plane_make(what.format, TN_PLANE_COL, what.dtype, rows, cols);
    format_quantize(&src, planes & 1 ? &row : NULL, planes & 2 ? &col : NULL, mode, epsilon);
    if (planes & 1) format_plane_expect_quantized(&row, &src, mode, epsilon);
    if (planes & 2) format_plane_expect_quantized(&col, &src, mode, epsilon);
    format_plane_free(&row), format_plane_free(&col), test_matrix_free(&src);
}

static void every_casting_of_ragged_shapes_is_exact(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 65, 95, 127, 128, 129};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (unsigned i = 0; i < SIZES * SIZES; i += 2) {
        for (unsigned what = i % 2; what < CASTINGS; what++)
            expect_casting(castings[what], sources[(i + what) % 3], sizes[i / SIZES],
                           sizes[i % SIZES], i + what);
    }
}

static void values_near_the_limits_of_fp32_are_exact(void **state) {
    (void)state;
    for (unsigned i = 0; i < 40; i++) {
        casting what = castings[i % CASTINGS];
        tn__matrix src = test_matrix_make(TN_FP32, 5, 37, i);
        float *values = src.data;
        for (int at = 0; at < 5 * 37; at++)
            values[at] = ldexpf(values[at], i % 2 ? 122 : -118);
        test_plane row = format_plane_make(what.format, TN_PLANE_ROW, what.dtype, 5, 37);
        format_quantize(&src, &row, NULL, TN_SCALE_FP32, 0.0f);
        format_plane_expect_quantized(&row, &src, TN_SCALE_FP32, 0.0f);
        format_plane_free(&row), test_matrix_free(&src);
    }
}

/* Any plane of any format, also with codes and scales that no cast makes. */
static void dequantizing_reads_every_plane_and_no_padding(void **state) {
    (void)state;
    const casting all[] = {{TN_FORMAT_FP8_BLOCK_1D, TN_E4M3}, {TN_FORMAT_FP8_BLOCK_2D, TN_E5M2},
                           {TN_FORMAT_FP8_TENSOR, TN_E4M3},   {TN_FORMAT_FP8_TENSOR, TN_E5M2},
                           {TN_FORMAT_MXFP8, TN_E4M3},        {TN_FORMAT_MXFP8, TN_E5M2},
                           {TN_FORMAT_NVFP4, TN_E2M1}};
    for (unsigned i = 0; i < 7 * 2 * 3; i++) {
        casting what = all[i % 7];
        int64_t rows = 33 + (int64_t)i % 3, cols = 131;
        tn__matrix src = test_matrix_make(TN_FP32, rows, cols, i);
        tn__matrix dst = test_matrix_make(sources[i / 14], rows, cols, 1);
        tn_plane side = i / 7 % 2 ? TN_PLANE_COL : TN_PLANE_ROW;
        test_plane plane = format_plane_make(what.format, side, what.dtype, rows, cols);
        format_quantize(&src, side == TN_PLANE_ROW ? &plane : NULL,
                        side == TN_PLANE_COL ? &plane : NULL, TN_SCALE_FP32, 0.0f);
        for (int64_t code = 0; code < 256; code++)
            ((uint8_t *)plane.view.data)[code * 8] = (uint8_t)code;
        if (what.format == TN_FORMAT_MXFP8) memset(plane.view.scale, 0xFF, 1); /* NaN */
        format_plane_poison(&plane);
        tn__dequantize_work work = {what.format, plane.view, dst, NULL};
        tn__host_dequantize(&work);
        for (int64_t at = 0; at < rows * cols; at++) {
            float value = format_plane_value(&plane, at / cols, at % cols);
            float got = test_matrix_get(&dst, at / cols, at % cols);
            uint16_t half = tn__float_to_fp16(value);
            float want = dst.dtype == TN_FP32   ? value
                         : dst.dtype == TN_BF16 ? tn__bf16_to_float(tn__float_to_bf16(value))
                                                : tn__fp16_to_float(half);
            assert_true(isnan(want) ? isnan(got) : want == got && !signbit(want) == !signbit(got));
        }
        format_plane_free(&plane), test_matrix_free(&src), test_matrix_free(&dst);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_of_e2m1_and_e8m0_has_its_value),
        cmocka_unit_test(e2m1_rounds_to_nearest_even_and_saturates),
        cmocka_unit_test(e8m0_rounds_up),
        cmocka_unit_test(the_mxfp8_scale_is_the_least_without_saturation),
        cmocka_unit_test(an_mxfp8_row_worked_by_hand),
        cmocka_unit_test(an_mxfp8_column_worked_by_hand),
        cmocka_unit_test(an_nvfp4_row_worked_by_hand),
        cmocka_unit_test(a_tensor_scale_worked_by_hand),
        cmocka_unit_test(nan_infinity_and_zero_have_their_rules),
        cmocka_unit_test(denormals_are_scaled_too),
        cmocka_unit_test(every_casting_of_ragged_shapes_is_exact),
        cmocka_unit_test(values_near_the_limits_of_fp32_are_exact),
        cmocka_unit_test(dequantizing_reads_every_plane_and_no_padding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
