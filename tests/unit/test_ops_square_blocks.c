/* NVFP4 with scales of 16 x 16 elements on the host device: against a reference of its own, both
 * planes with the same numbers, and refused where there are no such blocks. */
#include "ops_formats_support.h"

#include <math.h>

static float square_amax(const tn__matrix *src, int64_t m, int64_t k) {
    const int64_t top = m / 16 * 16, left = k / 16 * 16;
    float amax = 0.0f;
    for (int64_t r = top; r < tn__least(top + 16, src->rows); r++)
        for (int64_t c = left; c < tn__least(left + 16, src->cols); c++)
            amax = fmaxf(amax, fabsf(test_matrix_get(src, r, c)));
    return amax;
}

static float tensor_amax(const tn__matrix *src) {
    float amax = 0.0f;
    for (int64_t m = 0; m < src->rows; m += 16)
        for (int64_t k = 0; k < src->cols; k += 16)
            amax = fmaxf(amax, square_amax(src, m, k));
    return amax;
}

/* As docs/formats.md has it, but for the block that `a` is the amax of. */
static void expect_squares(const test_plane *plane, const tn__matrix *src) {
    const float enlarge = 2688.0f / tensor_amax(src);
    const float global = 1.0f / enlarge;
    assert_true(*plane->view.global_scale == global);
    for (int64_t m = 0; m < src->rows; m++) {
        for (int64_t k = 0; k < src->cols; k++) {
            float wanted = square_amax(src, m, k) / 6.0f * enlarge;
            unsigned scale_code = format_nearest_code(TN_E4M3, (double)wanted);
            float scale = (float)format_code_value(TN_E4M3, scale_code);
            float stored = scale * global;
            float factor = stored == 0.0f ? 0x1.FFFFFEp127f : 1.0f / stored;
            float scaled = test_matrix_get(src, m, k) * factor;
            assert_true(format_plane_scale(plane, m, k) == (double)scale);
            assert_int_equal(format_plane_code(plane, m, k),
                             format_nearest_code(TN_E2M1, (double)scaled));
        }
    }
    format_plane_expect_zero_padding(plane);
}

static test_plane fetch(const test_ops *ops, tn_tensor tensor, tn_plane plane, int64_t rows,
                        int64_t cols) {
    test_plane made = format_plane_make(TN_FORMAT_NVFP4, plane, TN_E2M1, rows, cols);
    EXPECT_OK(tn_plane_read(tensor, plane, made.view.data, made.view.layout.data_bytes,
                            made.view.scale, made.view.layout.scale_bytes, ops->stream));
    test_ops_wait(ops);
    return made;
}

static void a_scale_is_of_a_square_in_both_planes(void **state) {
    static const int64_t shapes[][2] = {{1, 1}, {16, 16}, {17, 33}, {129, 150}, {40, 259}};
    static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};
    (void)state;
    for (unsigned i = 0; i < 15; i++) {
        const int64_t rows = shapes[i % 5][0], cols = shapes[i % 5][1];
        test_ops ops = test_ops_open_host();
        tn__matrix values = test_matrix_make(floats[i / 5], rows, cols, i);
        test_matrix_set(&values, 0, 0, 3.0f); /* or all of it may be 0 */
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        args.src = test_tensor_of(&ops, ops.scope, &values);
        args.square_blocks = 1;
        args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        args.dst = test_fp8(ops.scope, TN_FORMAT_NVFP4, TN_E2M1, rows, cols);
        EXPECT_OK(tn_quantize(&args, ops.stream));
        test_plane row = fetch(&ops, args.dst, TN_PLANE_ROW, rows, cols);
        test_plane col = fetch(&ops, args.dst, TN_PLANE_COL, rows, cols);
        expect_squares(&row, &values);
        expect_squares(&col, &values);
        args.planes = i % 2 ? TN_QUANTIZE_ROW : TN_QUANTIZE_COL; /* one plane alone: the same */
        args.dst = test_fp8(ops.scope, TN_FORMAT_NVFP4, TN_E2M1, rows, cols);
        EXPECT_OK(tn_quantize(&args, ops.stream));
        test_plane alone = fetch(&ops, args.dst, i % 2 ? TN_PLANE_ROW : TN_PLANE_COL, rows, cols);
        expect_squares(&alone, &values);
        format_plane_free(&row), format_plane_free(&col), format_plane_free(&alone);
        test_matrix_free(&values);
        test_ops_close_host(&ops);
    }
}

static void other_formats_and_numbers_are_refused(void **state) {
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D,
                                        TN_FORMAT_FP8_TENSOR, TN_FORMAT_MXFP8};
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix values = test_matrix_make(TN_FP32, 20, 20, 1);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = test_tensor_of(&ops, ops.scope, &values);
    args.square_blocks = 1;
    for (int f = 0; f < 4; f++) {
        args.dst = test_fp8(ops.scope, formats[f], TN_E4M3, 20, 20);
        EXPECT_STATUS(tn_quantize(&args, ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("expected nvfp4");
        assert_int_equal(test_state(args.dst, TN_PLANE_ROW), TN_PLANE_ABSENT);
    }
    args.dst = test_fp8(ops.scope, TN_FORMAT_NVFP4, TN_E2M1, 20, 20);
    args.square_blocks = 2;
    EXPECT_STATUS(tn_quantize(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("square_blocks is 2, expected 0 or 1");
    test_matrix_free(&values);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_scale_is_of_a_square_in_both_planes),
        cmocka_unit_test(other_formats_and_numbers_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
