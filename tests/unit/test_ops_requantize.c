/* tn_requantize on the host device: new scales for values that are there, and the scaling-aware
 * transpose with its reference and its bound. */
#include "ops_formats_support.h"

#include <math.h>
#include <string.h>

#include "tenure_cast.h"

enum { ROWS = 261, COLS = 141 };

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
static const tn_dtype dtypes[] = {TN_E4M3, TN_E5M2};

static tn_tensor quantized_tensor(const test_ops *ops, tn_tensor src, tn_format format,
                                  tn_dtype dtype, unsigned planes) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = src, args.planes = planes;
    args.dst = test_fp8(ops->scope, format, dtype, ROWS, COLS);
    EXPECT_OK(tn_quantize(&args, ops->stream));
    return args.dst;
}

static test_plane fetch(const test_ops *ops, tn_tensor tensor, tn_plane plane) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    test_plane made = format_plane_make(info.format, plane, info.dtype, info.rows, info.cols);
    EXPECT_OK(tn_plane_read(tensor, plane, made.view.data, made.view.layout.data_bytes,
                            made.view.scale, made.view.layout.scale_bytes, ops->stream));
    test_ops_wait(ops);
    return made;
}

static void expect_same_plane(const test_ops *ops, tn_tensor a, tn_tensor b, tn_plane plane) {
    test_plane of_a = fetch(ops, a, plane), of_b = fetch(ops, b, plane);
    assert_memory_equal(of_a.view.data, of_b.view.data, of_a.view.layout.data_bytes);
    assert_memory_equal(of_a.view.scale, of_b.view.scale, of_a.view.layout.scale_bytes);
    format_plane_free(&of_a), format_plane_free(&of_b);
}

/* Any kind, plane and type to any other: as dequantizing to fp32 and quantizing that. */
static void new_scales_equal_the_sequence(void **state) {
    (void)state;
    for (unsigned i = 0; i < 32; i++) {
        test_ops ops = test_ops_open_host();
        tn__matrix values = test_matrix_make(TN_FP32, ROWS, COLS, i);
        tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
        tn_dequantize_args back = TN_DEQUANTIZE_ARGS_INIT;
        tn_tensor src = test_tensor_of(&ops, ops.scope, &values);
        args.src = quantized_tensor(&ops, src, formats[i % 2], dtypes[i / 2 % 2], 3);
        args.from = i / 4 % 2 ? TN_PLANE_COL : TN_PLANE_ROW;
        args.dst = test_fp8(ops.scope, formats[i / 8 % 2], dtypes[i / 16], ROWS, COLS);
        args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        EXPECT_OK(tn_requantize(&args, ops.stream));
        back.src = args.src, back.plane = args.from;
        back.dst = test_plain(ops.scope, TN_FP32, ROWS, COLS);
        EXPECT_OK(tn_dequantize(&back, ops.stream));
        tn_tensor expected =
            quantized_tensor(&ops, back.dst, formats[i / 8 % 2], dtypes[i / 16], 3);
        expect_same_plane(&ops, args.dst, expected, TN_PLANE_ROW);
        expect_same_plane(&ops, args.dst, expected, TN_PLANE_COL);
        test_matrix_free(&values);
        test_ops_close_host(&ops);
    }
}

/* ---- the scaling-aware transpose ------------------------------------------------------------ */

/* Of the rows (or columns) of the tile that hold a number other than 0; 1 if there are none. */
static double most_of_tile(const test_plane *from, int64_t m, int64_t k) {
    int64_t top = m / 128 * 128, left = k / 128 * 128;
    double most = 0.0;
    for (int64_t r = top; r < tn__least(top + 128, ROWS); r++) {
        for (int64_t c = left; c < tn__least(left + 128, COLS); c++) {
            double value = format_code_value(from->view.dtype, format_plane_code(from, r, c));
            if (fabs(value) > 0.0) most = fmax(most, format_plane_scale(from, r, c));
        }
    }
    return most == 0.0 ? 1.0 : most;
}

/* Each code by itself: its value over the tile's largest scale, to the nearest code. */
static void expect_shifted(const test_plane *from, const test_plane *to) {
    tn_dtype dtype = from->view.dtype;
    double half = dtype == TN_E4M3 ? 0x1p-10 : 0x1p-17;
    for (int64_t m = 0; m < ROWS; m++) {
        for (int64_t k = 0; k < COLS; k++) {
            double most = m % 128 == 0 || k % 128 == 0 || k == 0 ? most_of_tile(from, m, k)
                                                                 : format_plane_scale(to, m, k);
            unsigned code = format_plane_code(from, m, k);
            double value = format_code_value(dtype, code) * format_plane_scale(from, m, k);
            assert_true(format_plane_scale(to, m, k) == most);
            assert_int_equal(format_plane_code(to, m, k), format_nearest_code(dtype, value / most));
            double after = (double)format_plane_value(to, m, k);
            assert_true(isnan(value) ? isnan(after) : fabs(after - value) <= most * half);
        }
    }
    format_plane_expect_zero_padding(to);
}

static void shifting_brings_a_tile_to_its_largest_scale(void **state) {
    (void)state;
    for (unsigned i = 0; i < 8; i++) {
        test_ops ops = test_ops_open_host();
        tn__matrix values = test_matrix_make(TN_FP32, ROWS, COLS, i);
        tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
        for (int64_t at = 0; at < ROWS * COLS; at++) /* rows far apart, also by 2^40 */
            ((float *)values.data)[at] *=
                ldexpf(1.0f, (int)(at / COLS * 7 % 23) - (i > 3 ? 20 : 5));
        ((float *)values.data)[7] = NAN, ((float *)values.data)[8] = -0.0f;
        tn_tensor src = test_tensor_of(&ops, ops.scope, &values);
        args.mode = TN_REQUANTIZE_SHIFT;
        args.from = i / 2 % 2 ? TN_PLANE_COL : TN_PLANE_DATA;
        tn_plane from = i / 2 % 2 ? TN_PLANE_COL : TN_PLANE_ROW;
        tn_plane to = i / 2 % 2 ? TN_PLANE_ROW : TN_PLANE_COL;
        args.src = quantized_tensor(&ops, src, TN_FORMAT_FP8_BLOCK_1D, dtypes[i % 2], 3);
        args.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, dtypes[i % 2], ROWS, COLS);
        EXPECT_OK(tn_requantize(&args, ops.stream));
        assert_int_equal(test_state(args.dst, from), TN_PLANE_ABSENT);
        test_plane before = fetch(&ops, args.src, from), after = fetch(&ops, args.dst, to);
        expect_shifted(&before, &after);
        format_plane_free(&before), format_plane_free(&after), test_matrix_free(&values);
        test_ops_close_host(&ops);
    }
}

/* ---- refusals ------------------------------------------------------------------------------- */

static void what_can_not_be_requantized_is_refused(void **state) {
    (void)state;
    static const char *const words[] = {
        "dst is src",         "expected fp8_block_1d", "the shape of src",
        "mode is 2",          "planes is 0x4",         "from is 3",
        "amax_epsilon is -1", "is fp8_block_2d",       "elements of",
        "powers of two",      "planes is 0x1",         "takes no amax",
        "args->size"};
    test_ops ops = test_ops_open_host();
    tn__matrix values = test_matrix_make(TN_FP32, ROWS, COLS, 1);
    tn_tensor src = test_tensor_of(&ops, ops.scope, &values);
    tn_tensor vectors = quantized_tensor(&ops, src, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 3);
    for (int i = 0; i < 13; i++) {
        tn_requantize_args args = TN_REQUANTIZE_ARGS_INIT;
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        config.format = i == 7 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D;
        config.dtype = i == 8 ? TN_E5M2 : TN_E4M3;
        config.scale_mode = i == 9 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        config.rank = 2, config.shape[0] = i == 2 ? 1 : ROWS, config.shape[1] = COLS;
        EXPECT_OK(tn_tensor_create(ops.scope, &config, &args.dst));
        args.src = vectors;
        if (i >= 7) args.mode = TN_REQUANTIZE_SHIFT;
        if (i == 0) args.dst = vectors;
        if (i == 1) args.src = src;
        if (i == 3) args.mode = (tn_requantize_mode)2;
        if (i == 4) args.planes = 4;
        if (i == 5) args.from = TN_PLANE_COUNT;
        if (i == 6) args.amax_epsilon = -1.0f;
        if (i == 10) args.planes = TN_QUANTIZE_ROW;
        if (i == 11) args.amax_epsilon = 1.0f;
        if (i == 12) args.size++;
        EXPECT_STATUS(tn_requantize(&args, ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(words[i]);
        if (i > 0) assert_int_equal(test_state(args.dst, TN_PLANE_ROW), TN_PLANE_ABSENT);
        if (i > 0) assert_int_equal(test_state(args.dst, TN_PLANE_COL), TN_PLANE_ABSENT);
    }
    test_matrix_free(&values);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(new_scales_equal_the_sequence),
        cmocka_unit_test(shifting_brings_a_tile_to_its_largest_scale),
        cmocka_unit_test(what_can_not_be_requantized_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
