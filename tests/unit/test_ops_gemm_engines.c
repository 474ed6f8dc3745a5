/* Which engine multiplies: the formats' own on each device, dequantizing where it is asked for. */
#include "ops_planes_support.h"

#include <stdlib.h>

#include "host_number.h"
#include "options.h"
#include "tenure_gemm.h"

enum { M = 37, N = 21, K = 150 };

static const struct form {
    tn_gemm_form form;
    int64_t a[2], b[2], d[2], contracted;
    int a_turned, b_turned;
} forms[] = {{TN_GEMM_FPROP, {M, K}, {N, K}, {M, N}, K, 0, 0},
             {TN_GEMM_DGRAD, {M, N}, {N, K}, {M, K}, N, 0, 1},
             {TN_GEMM_WGRAD, {M, N}, {M, K}, {N, K}, M, 1, 1}};

static tn_tensor quantized(const test_ops *ops, const tn__matrix *src, tn_format format,
                           tn_dtype dtype, unsigned planes) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = test_tensor_of(ops, ops->scope, src);
    args.dst = test_fp8(ops->scope, format, dtype, src->rows, src->cols);
    args.planes = planes;
    EXPECT_OK(tn_quantize(&args, ops->stream));
    return args.dst;
}

static unsigned planes_of(int is_turned) { return is_turned ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW; }

/* ---- one scale a tensor --------------------------------------------------------------------- */

static float code_value(const test_plane *plane, int64_t row, int64_t col) {
    int is_col = plane->view.plane == TN_PLANE_COL;
    float value;
    tn__load_floats(plane->view.dtype, plane->view.data,
                    is_col ? col * plane->m + row : row * plane->k + col, 1, &value);
    return value;
}

static void check_tensor_form(const test_ops *ops, const struct form *f, tn_dtype b_dtype) {
    tn__matrix a = test_matrix_make(TN_BF16, f->a[0], f->a[1], 1);
    tn__matrix b = test_matrix_make(TN_BF16, f->b[0], f->b[1], 2);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = f->form, args.scope = ops->scope;
    args.a = quantized(ops, &a, TN_FORMAT_FP8_TENSOR, TN_E4M3, planes_of(f->a_turned));
    args.b = quantized(ops, &b, TN_FORMAT_FP8_TENSOR, b_dtype, TN_QUANTIZE_ROW); /* derives COL */
    args.d = test_plain(ops->scope, TN_FP32, f->d[0], f->d[1]);
    EXPECT_OK(tn_gemm(&args, ops->stream));
    tn__matrix d = test_fetch_matrix(ops, args.d);
    test_plane of_a = test_fetch_plane(ops, args.a, f->a_turned ? TN_PLANE_COL : TN_PLANE_ROW);
    test_plane of_b = test_fetch_plane(ops, args.b, TN_PLANE_ROW);
    for (int64_t r = 0; r < d.rows; r++) {
        for (int64_t c = 0; c < d.cols; c++) {
            volatile float sum = 0.0f;
            for (int64_t k = 0; k < f->contracted; k++) {
                float x = f->a_turned ? code_value(&of_a, k, r) : code_value(&of_a, r, k);
                float y = f->b_turned ? code_value(&of_b, k, c) : code_value(&of_b, c, k);
                sum = sum + x * y;
            }
            volatile float once = sum * *(const float *)of_a.view.scale;
            assert_true(test_matrix_get(&d, r, c) == once * *(const float *)of_b.view.scale);
        }
    }
    test_plane_free(&of_a), test_plane_free(&of_b);
    test_matrix_free(&a), test_matrix_free(&b), test_matrix_free(&d);
}

static void one_scale_a_tensor_is_multiplied_after_the_sum(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 3; i++) {
        check_tensor_form(&ops, &forms[i], TN_E4M3);
        check_tensor_form(&ops, &forms[i], TN_E5M2);
    }
    test_ops_close_host(&ops);
}

/* ---- dequantizing --------------------------------------------------------------------------- */

static tn_tensor dequantized(const test_ops *ops, tn_tensor src, tn_plane plane, tn_dtype dtype,
                             const int64_t *shape) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = src, args.plane = plane;
    args.dst = test_plain(ops->scope, dtype, shape[0], shape[1]);
    EXPECT_OK(tn_dequantize(&args, ops->stream));
    return args.dst;
}

static const tn_gemm_engine engine_of[] = {TN_GEMM_ENGINE_DEQUANTIZE_BF16,
                                           TN_GEMM_ENGINE_DEQUANTIZE_FP32};
static const tn_dtype dtype_of[] = {TN_BF16, TN_FP32};

typedef struct pair {
    tn_format a, b;
    tn_dtype a_dtype, b_dtype;
} pair;

static void check_dequantize(const test_ops *ops, const struct form *f, const pair *p, int which) {
    tn__matrix a = test_matrix_make(TN_BF16, f->a[0], f->a[1], 1);
    tn__matrix b = test_matrix_make(TN_BF16, f->b[0], f->b[1], 2);
    tn_gemm_args args = TN_GEMM_ARGS_INIT, plain = TN_GEMM_ARGS_INIT;
    args.form = f->form, args.scope = ops->scope, args.engine = engine_of[which];
    args.a = quantized(ops, &a, p->a, p->a_dtype, planes_of(f->a_turned));
    args.b = quantized(ops, &b, p->b, p->b_dtype, planes_of(f->b_turned));
    args.d = test_plain(ops->scope, TN_FP32, f->d[0], f->d[1]);
    plain.form = f->form, plain.scope = ops->scope;
    plain.a =
        dequantized(ops, args.a, f->a_turned ? TN_PLANE_COL : TN_PLANE_ROW, dtype_of[which], f->a);
    plain.b =
        dequantized(ops, args.b, f->b_turned ? TN_PLANE_COL : TN_PLANE_ROW, dtype_of[which], f->b);
    plain.d = test_plain(ops->scope, TN_FP32, f->d[0], f->d[1]);
    size_t live = test_ledger(ops->scope).total_bytes;
    EXPECT_OK(tn_gemm(&args, ops->stream));
    EXPECT_OK(tn_gemm(&plain, ops->stream));
    size_t outputs = 2 * (size_t)(f->d[0] * f->d[1]) * sizeof(float);
    assert_int_equal(test_ledger(ops->scope).total_bytes, live + outputs); /* no copy is left */
    tn__matrix d = test_fetch_matrix(ops, args.d), expected = test_fetch_matrix(ops, plain.d);
    test_expect_same_matrix(&d, &expected);
    test_matrix_free(&a), test_matrix_free(&b), test_matrix_free(&d), test_matrix_free(&expected);
}

static void what_is_dequantized_is_multiplied_as_plain(void **state) {
    static const pair pairs[] = {{TN_FORMAT_MXFP8, TN_FORMAT_MXFP8, TN_E4M3, TN_E4M3},
                                 {TN_FORMAT_NVFP4, TN_FORMAT_NVFP4, TN_E2M1, TN_E2M1},
                                 {TN_FORMAT_MXFP8, TN_FORMAT_NVFP4, TN_E5M2, TN_E2M1},
                                 {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_1D, TN_E5M2, TN_E5M2},
                                 {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_E4M3},
                                 {TN_FORMAT_FP8_TENSOR, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_E5M2}};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (size_t i = 0; i < 6 * sizeof pairs / sizeof *pairs; i++)
        check_dequantize(&ops, &forms[i % 3], &pairs[i / 6], (int)(i / 3 % 2));
    test_ops_close_host(&ops);
}

/* One operand PLAIN in the engine's type, the other quantized. */
static void a_plain_operand_is_taken_in_the_type_of_the_other(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix a = test_matrix_make(TN_BF16, M, K, 1), b = test_matrix_make(TN_BF16, N, K, 2);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_tensor_of(&ops, ops.scope, &a);
    args.b = quantized(&ops, &b, TN_FORMAT_MXFP8, TN_E4M3, TN_QUANTIZE_ROW);
    args.d = test_plain(ops.scope, TN_BF16, M, N);
    args.scope = ops.scope;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_ARGUMENT);
    args.engine = TN_GEMM_ENGINE_DEQUANTIZE_BF16;
    EXPECT_OK(tn_gemm(&args, ops.stream));
    EXPECT_OK(tn_gemm_tune(&args, ops.stream));
    args.engine = TN_GEMM_ENGINE_DEQUANTIZE_FP32;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("dequantized to fp32");
    test_matrix_free(&a), test_matrix_free(&b);
    test_ops_close_host(&ops);
}

/* ---- pins ----------------------------------------------------------------------------------- */

static tn_gemm_args mxfp8_product(const test_ops *ops) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_fp8(ops->scope, TN_FORMAT_MXFP8, TN_E4M3, M, K);
    args.b = test_fp8(ops->scope, TN_FORMAT_MXFP8, TN_E4M3, N, K);
    args.d = test_plain(ops->scope, TN_BF16, M, N);
    args.scope = ops->scope;
    return args;
}

static void nothing_is_dequantized_that_was_not_asked_for(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = mxfp8_product(&ops);
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("mxfp8 has no GEMM on the host");
    args.engine = TN_GEMM_ENGINE_DEQUANTIZE_BF16;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_STATE); /* and needs its planes */
    args.engine = TN_GEMM_ENGINE_CUBLASLT;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the engine cublaslt is pinned, but it is of CUDA only");
    args.engine = TN_GEMM_ENGINE_COUNT;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("engine is 6");
    args.a = test_plain(ops.scope, TN_BF16, M, K), args.b = test_plain(ops.scope, TN_BF16, N, K);
    args.engine = TN_GEMM_ENGINE_AUTO;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_REFERENCE);
    test_ops_close_host(&ops);
}

/* Where other numbers will do, the engine that was asked for in the test above is found. */
static void what_may_differ_is_dequantized_without_a_pin(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix a = test_matrix_make(TN_BF16, M, K, 1), b = test_matrix_make(TN_BF16, N, K, 2);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    tn__matrix d[2];
    args.a = quantized(&ops, &a, TN_FORMAT_MXFP8, TN_E4M3, TN_QUANTIZE_ROW);
    args.b = quantized(&ops, &b, TN_FORMAT_MXFP8, TN_E5M2, TN_QUANTIZE_ROW);
    args.scope = ops.scope, args.may_differ = 1;
    for (int i = 0; i < 2; i++) {
        if (i == 1) args.engine = TN_GEMM_ENGINE_DEQUANTIZE_BF16;
        args.d = test_plain(ops.scope, TN_FP32, M, N);
        EXPECT_OK(tn_gemm_choice_get(&args, &choice));
        assert_int_equal(choice.engine, TN_GEMM_ENGINE_DEQUANTIZE_BF16);
        EXPECT_OK(tn_gemm_tune(&args, ops.stream));
        EXPECT_OK(tn_gemm(&args, ops.stream));
        d[i] = test_fetch_matrix(&ops, args.d);
    }
    test_expect_same_matrix(&d[0], &d[1]);
    args.engine = TN_GEMM_ENGINE_REFERENCE; /* a pin is a pin */
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("mxfp8 has no GEMM on the host");
    test_matrix_free(&a), test_matrix_free(&b), test_matrix_free(&d[0]), test_matrix_free(&d[1]);
    test_ops_close_host(&ops);
}

static void the_variable_pins_what_no_call_does(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = mxfp8_product(&ops);
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    for (int engine = 0; engine < TN_GEMM_ENGINE_COUNT; engine++) {
        test_pin_engine(tn_gemm_engine_name((tn_gemm_engine)engine));
        assert_int_equal(tn__options_get()->gemm_engine, engine);
    }
    EXPECT_STATUS(tn_gemm_choice_get(&args, &choice), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the engine wgmma is pinned, but it is of CUDA only");
    test_pin_engine("dequantize-fp32");
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    assert_int_equal(choice.engine, TN_GEMM_ENGINE_DEQUANTIZE_FP32);
    args.engine = TN_GEMM_ENGINE_REFERENCE; /* a call's comes first */
    EXPECT_STATUS(tn_gemm_choice_get(&args, &choice), TN_UNSUPPORTED);
    test_pin_engine(NULL);
    assert_string_equal(tn_gemm_engine_name((tn_gemm_engine)-1), "unknown engine");
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_scale_a_tensor_is_multiplied_after_the_sum),
        cmocka_unit_test(what_is_dequantized_is_multiplied_as_plain),
        cmocka_unit_test(a_plain_operand_is_taken_in_the_type_of_the_other),
        cmocka_unit_test(nothing_is_dequantized_that_was_not_asked_for),
        cmocka_unit_test(what_may_differ_is_dequantized_without_a_pin),
        cmocka_unit_test(the_variable_pins_what_no_call_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
