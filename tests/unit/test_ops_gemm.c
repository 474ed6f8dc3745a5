/* tn_gemm on tensors of the host device: its three forms, FP8 and plain. */
#include "ops_planes_support.h"

#include "host_number.h"

#include <math.h>
#include <string.h>

static const int64_t sizes[][3] = {
    {1, 1, 1}, {5, 130, 129}, {129, 3, 260}, {131, 257, 1}, {64, 100, 128},
};

static tn__matrix turned(const tn__matrix *matrix) {
    tn__matrix result = test_matrix_make(matrix->dtype, matrix->cols, matrix->rows, 0);
    for (int64_t r = 0; r < matrix->rows; r++) {
        for (int64_t c = 0; c < matrix->cols; c++) {
            test_matrix_set(&result, c, r, test_matrix_get(matrix, r, c));
        }
    }
    return result;
}

static tn__matrix run_gemm(const test_ops *ops, tn_gemm_form form, tn_tensor a, tn_tensor b,
                           tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = form;
    args.a = a, args.b = b;
    args.d = test_plain(ops->scope, dtype, rows, cols);
    args.scope = test_ops_scope(ops, TN_SCOPE_OP, "gemm");
    EXPECT_OK(tn_gemm(&args, ops->stream));
    tn_ledger left = test_ledger(args.scope); /* the workspace is gone, in stream order */
    assert_int_equal(left.tensors, 0);
    assert_int_equal(left.total_bytes, 0);
    EXPECT_OK(tn_scope_close(args.scope));
    return test_fetch_matrix(ops, args.d);
}

/* ---- FP8 ----------------------------------------------------------------------------------- */

/* d against double of what the planes say, with the bound of its roundings. `get` are element
 * (row, k) of a and of b. */
static void expect_near_double(const tn__matrix *d, const test_plane *a, int a_turned,
                               const test_plane *b, int b_turned, int64_t contracted) {
    for (int64_t r = 0; r < d->rows; r++) {
        for (int64_t c = 0; c < d->cols; c++) {
            double sum = 0.0, magnitude = 0.0;
            for (int64_t k = 0; k < contracted; k++) {
                double x = a_turned ? test_plane_value(a, k, r) : test_plane_value(a, r, k);
                double w = b_turned ? test_plane_value(b, k, c) : test_plane_value(b, c, k);
                sum += x * w;
                magnitude += fabs(x * w);
            }
            double bound = (128.0 + 3.0 * (double)((contracted + 127) / 128)) * 0x1p-24;
            assert_true(fabs((double)test_matrix_get(d, r, c) - sum) <= bound * magnitude);
        }
    }
}

/* Each form equals FPROP of operands that were turned before they were quantized, to the bit. */
static void check_forms(const test_ops *ops, int64_t m, int64_t n, int64_t k) {
    const unsigned both = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    const tn_format vectors = TN_FORMAT_FP8_BLOCK_1D, tiles = TN_FORMAT_FP8_BLOCK_2D;
    tn__matrix x = test_matrix_make(TN_BF16, m, k, 1), w = test_matrix_make(TN_BF16, n, k, 2);
    tn__matrix dy = test_matrix_make(TN_BF16, m, n, 3);
    tn__matrix x_turned = turned(&x), w_turned = turned(&w), dy_turned = turned(&dy);
    tn_tensor x_q = test_quantized(ops, ops->scope, &x, vectors, both);
    tn_tensor w_q = test_quantized(ops, ops->scope, &w, tiles, TN_QUANTIZE_ROW);
    tn_tensor dy_q = test_quantized(ops, ops->scope, &dy, vectors, both);
    tn_tensor x_tq = test_quantized(ops, ops->scope, &x_turned, vectors, TN_QUANTIZE_ROW);
    tn_tensor w_tq = test_quantized(ops, ops->scope, &w_turned, tiles, TN_QUANTIZE_ROW);
    tn_tensor dy_tq = test_quantized(ops, ops->scope, &dy_turned, vectors, TN_QUANTIZE_ROW);

    tn__matrix y = run_gemm(ops, TN_GEMM_FPROP, x_q, w_q, TN_FP32, m, n);
    tn__matrix dx = run_gemm(ops, TN_GEMM_DGRAD, dy_q, w_q, TN_FP32, m, k);
    tn__matrix dw = run_gemm(ops, TN_GEMM_WGRAD, dy_q, x_q, TN_FP32, n, k);
    tn__matrix dx_turned = run_gemm(ops, TN_GEMM_FPROP, dy_q, w_tq, TN_FP32, m, k);
    tn__matrix dw_turned = run_gemm(ops, TN_GEMM_FPROP, dy_tq, x_tq, TN_FP32, n, k);
    test_expect_same_matrix(&dx, &dx_turned);
    test_expect_same_matrix(&dw, &dw_turned);
    assert_int_equal(test_state(w_q, TN_PLANE_COL), TN_PLANE_VALID); /* derived, and kept */

    test_plane planes[] = {
        test_fetch_plane(ops, x_q, TN_PLANE_ROW), test_fetch_plane(ops, w_q, TN_PLANE_ROW),
        test_fetch_plane(ops, dy_q, TN_PLANE_ROW), test_fetch_plane(ops, dy_q, TN_PLANE_COL),
        test_fetch_plane(ops, x_q, TN_PLANE_COL)};
    expect_near_double(&y, &planes[0], 0, &planes[1], 0, k);
    expect_near_double(&dx, &planes[2], 0, &planes[1], 1, n);
    expect_near_double(&dw, &planes[3], 1, &planes[4], 1, m);
    for (int i = 0; i < 5; i++)
        test_plane_free(&planes[i]);
    tn__matrix *all[] = {&x, &w,  &dy, &x_turned,  &w_turned, &dy_turned,
                         &y, &dx, &dw, &dx_turned, &dw_turned};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        test_matrix_free(all[i]);
}

static void the_three_forms_agree_with_turned_operands_and_with_double(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        check_forms(&ops, sizes[s][0], sizes[s][1], sizes[s][2]);
    }
    test_ops_close_host(&ops);
}

/* D = to_type(D + to_type(A B)), seen through a second product into a fresh matrix of the type. */
static void accumulating_rounds_the_product_and_then_the_sum(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    for (int i = 0; i < 3; i++) {
        tn__matrix x = test_matrix_make(TN_BF16, 33, 150, 1),
                   w = test_matrix_make(TN_BF16, 17, 150, 2);
        tn__matrix old = test_matrix_make(types[i], 33, 17, 3);
        tn_gemm_args args = TN_GEMM_ARGS_INIT;
        args.a = test_quantized(&ops, ops.scope, &x, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW);
        args.b = test_quantized(&ops, ops.scope, &w, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW);
        args.d = test_tensor_of(&ops, ops.scope, &old);
        args.scope = ops.scope;
        args.accumulate = 1;
        tn__matrix fresh = run_gemm(&ops, TN_GEMM_FPROP, args.a, args.b, types[i], 33, 17);
        EXPECT_OK(tn_gemm(&args, ops.stream));
        tn__matrix sum = test_fetch_matrix(&ops, args.d);
        tn__axpy_work add = {fresh, old, 1.0f}; /* old becomes the expectation */
        tn__host_axpy(&add);
        test_expect_same_matrix(&sum, &old);
        tn__matrix *all[] = {&x, &w, &old, &fresh, &sum};
        for (int f = 0; f < 5; f++)
            test_matrix_free(all[f]);
    }
    test_ops_close_host(&ops);
}

/* D = to_type(D + (A B + bias)), seen through a second product into a fresh fp32 matrix. */
static void a_bias_is_added_before_the_one_rounding(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    for (int i = 0; i < 9; i++) {
        tn__matrix x = test_matrix_make(TN_BF16, 33, 150, 1);
        tn__matrix w = test_matrix_make(TN_BF16, 140, 150, 2);
        tn__matrix bias = test_matrix_make(types[i % 3], 1, 140, 4);
        tn_gemm_args args = TN_GEMM_ARGS_INIT;
        args.a = test_quantized(&ops, ops.scope, &x, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW);
        args.b = test_quantized(&ops, ops.scope, &w, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW);
        args.bias = test_tensor_of(&ops, ops.scope, &bias);
        args.scope = ops.scope;
        args.d = test_plain(ops.scope, types[i / 3], 33, 140);
        tn__matrix fresh = run_gemm(&ops, TN_GEMM_FPROP, args.a, args.b, TN_FP32, 33, 140);
        tn__matrix expected = test_matrix_make(types[i / 3], 33, 140, 5);
        for (int64_t at = 0; at < expected.rows * expected.cols; at++) {
            float sum =
                test_matrix_get(&fresh, at / 140, at % 140) + test_matrix_get(&bias, 0, at % 140);
            tn__store_floats(expected.dtype, expected.data, at, 1, &sum);
        }
        EXPECT_OK(tn_gemm(&args, ops.stream));
        tn__matrix d = test_fetch_matrix(&ops, args.d);
        test_expect_same_matrix(&d, &expected);
        tn__matrix *all[] = {&x, &w, &bias, &fresh, &expected, &d};
        for (int f = 0; f < 6; f++)
            test_matrix_free(all[f]);
    }
    test_ops_close_host(&ops);
}

static void a_bias_that_does_not_fit_is_refused(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix x = test_matrix_make(TN_BF16, 3, 5, 1), w = test_matrix_make(TN_BF16, 7, 5, 2);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_tensor_of(&ops, ops.scope, &x), args.b = test_tensor_of(&ops, ops.scope, &w);
    args.d = test_plain(ops.scope, TN_BF16, 3, 7), args.scope = ops.scope;
    args.bias = test_plain(ops.scope, TN_BF16, 1, 6);
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("bias");
    args.bias = test_plain(ops.scope, TN_BF16, 1, 7);
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_STATE); /* it has no values yet */
    args.a = test_plain(ops.scope, TN_BF16, 3, 0), args.b = test_plain(ops.scope, TN_BF16, 7, 0);
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("nothing to contract");
    test_matrix_free(&x), test_matrix_free(&w);
    test_ops_close_host(&ops);
}

/* ---- nothing to do, nothing to contract ---------------------------------------------------- */

static tn_tensor empty_operand(const test_ops *ops, tn_format format, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_fp8(ops->scope, format, TN_E4M3, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_ROW);
    return tensor;
}

static void contracting_nothing_gives_zeros_or_leaves_d(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix old = test_matrix_make(TN_BF16, 6, 10, 3);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = empty_operand(&ops, TN_FORMAT_FP8_BLOCK_1D, 6, 0);
    args.b = empty_operand(&ops, TN_FORMAT_FP8_BLOCK_2D, 10, 0);
    args.d = test_tensor_of(&ops, ops.scope, &old);
    args.accumulate = 1;
    EXPECT_OK(tn_gemm(&args, ops.stream)); /* needs no scratch, so no scope */
    tn__matrix kept = test_fetch_matrix(&ops, args.d);
    test_expect_same_matrix(&kept, &old);
    args.accumulate = 0;
    EXPECT_OK(tn_gemm(&args, ops.stream));
    tn__matrix zeros = test_fetch_matrix(&ops, args.d);
    for (int i = 0; i < 60; i++)
        assert_int_equal(((uint16_t *)zeros.data)[i], 0);
    test_matrix_free(&old), test_matrix_free(&kept), test_matrix_free(&zeros);
    test_ops_close_host(&ops);
}

static void an_empty_result_is_success_without_a_launch(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = empty_operand(&ops, TN_FORMAT_FP8_BLOCK_1D, 0, 32);
    args.b = empty_operand(&ops, TN_FORMAT_FP8_BLOCK_2D, 10, 32);
    args.d = test_plain(ops.scope, TN_BF16, 0, 10);
    EXPECT_OK(tn_device_driver_stats(ops.device, &before));
    EXPECT_OK(tn_gemm(&args, ops.stream));
    EXPECT_OK(tn_device_driver_stats(ops.device, &after));
    assert_int_equal(before.calls[TN_CALL_LAUNCH], after.calls[TN_CALL_LAUNCH]);
    assert_int_equal(test_state(args.d, TN_PLANE_DATA), TN_PLANE_VALID);
    test_ops_close_host(&ops);
}

/* ---- plain --------------------------------------------------------------------------------- */

static void check_plain_form(const test_ops *ops, tn_gemm_form form, tn_dtype dtype, int64_t m,
                             int64_t n, int64_t k) {
    int a_turned = form == TN_GEMM_WGRAD, b_turned = form != TN_GEMM_FPROP;
    tn__matrix a = test_matrix_make(dtype, m, form == TN_GEMM_FPROP ? k : n, 1);
    tn__matrix b = test_matrix_make(dtype, form == TN_GEMM_WGRAD ? m : n, k, 2);
    int64_t rows = a_turned ? a.cols : a.rows, cols = b_turned ? b.cols : b.rows;
    int64_t contracted = a_turned ? a.rows : a.cols;
    tn__matrix d = run_gemm(ops, form, test_tensor_of(ops, ops->scope, &a),
                            test_tensor_of(ops, ops->scope, &b), TN_FP32, rows, cols);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            volatile float sum = 0.0f;
            for (int64_t i = 0; i < contracted; i++) {
                float x = a_turned ? test_matrix_get(&a, i, r) : test_matrix_get(&a, r, i);
                float w = b_turned ? test_matrix_get(&b, i, c) : test_matrix_get(&b, c, i);
                volatile float product = x * w;
                sum = sum + product;
            }
            assert_true(test_matrix_get(&d, r, c) == sum);
        }
    }
    test_matrix_free(&a), test_matrix_free(&b), test_matrix_free(&d);
}

static void plain_operands_take_the_same_three_forms(void **state) {
    (void)state;
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    test_ops ops = test_ops_open_host();
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int i = 0; i < 9; i++) {
            check_plain_form(&ops, (tn_gemm_form)(i / 3), types[i % 3], sizes[s][0], sizes[s][1],
                             sizes[s][2]);
        }
    }
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_three_forms_agree_with_turned_operands_and_with_double),
        cmocka_unit_test(accumulating_rounds_the_product_and_then_the_sum),
        cmocka_unit_test(a_bias_is_added_before_the_one_rounding),
        cmocka_unit_test(a_bias_that_does_not_fit_is_refused),
        cmocka_unit_test(contracting_nothing_gives_zeros_or_leaves_d),
        cmocka_unit_test(an_empty_result_is_success_without_a_launch),
        cmocka_unit_test(plain_operands_take_the_same_three_forms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
