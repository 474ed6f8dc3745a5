/* Epilogues of tn_gemm on the host device: the bits of the calls that they stand for. */
#include "ops_planes_support.h"

#include "tenure_cast.h"
#include "tenure_gemm.h"

enum { M = 133, N = 70, K = 150 };

static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};

static const struct form {
    tn_gemm_form form;
    int64_t a[2], b[2], d[2];
    int a_turned, b_turned;
} forms[] = {{TN_GEMM_FPROP, {M, K}, {N, K}, {M, N}, 0, 0},
             {TN_GEMM_DGRAD, {M, N}, {N, K}, {M, K}, 0, 1},
             {TN_GEMM_WGRAD, {M, N}, {M, K}, {N, K}, 1, 1}};

static tn_tensor filled(const test_ops *ops, tn_dtype dtype, const int64_t *shape, uint32_t seed) {
    tn__matrix matrix = test_matrix_make(dtype, shape[0], shape[1], seed);
    tn_tensor tensor = test_tensor_of(ops, ops->scope, &matrix);
    test_matrix_free(&matrix);
    return tensor;
}

static tn_tensor operand(const test_ops *ops, int is_plain, tn_dtype dtype, const int64_t *shape,
                         int is_turned, uint32_t seed) {
    if (is_plain) return filled(ops, dtype, shape, seed);
    tn__matrix matrix = test_matrix_make(TN_BF16, shape[0], shape[1], seed);
    tn_tensor tensor = test_quantized(ops, ops->scope, &matrix, TN_FORMAT_FP8_BLOCK_1D,
                                      is_turned ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW);
    test_matrix_free(&matrix);
    return tensor;
}

static tn_gemm_args product_of(const test_ops *ops, const struct form *f, int is_plain,
                               tn_dtype dtype) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = f->form;
    args.a = operand(ops, is_plain, dtype, f->a, f->a_turned, 1);
    args.b = operand(ops, is_plain, dtype, f->b, f->b_turned, 2);
    args.d = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    args.scope = test_ops_scope(ops, TN_SCOPE_OP, "gemm");
    return args;
}

static void expect_same(const test_ops *ops, tn_tensor x, tn_tensor y) {
    tn__matrix of_x = test_fetch_matrix(ops, x), of_y = test_fetch_matrix(ops, y);
    test_expect_same_matrix(&of_x, &of_y);
    test_matrix_free(&of_x), test_matrix_free(&of_y);
}

/* Runs it; scratch is gone then. */
static void run(const test_ops *ops, const tn_gemm_args *args) {
    EXPECT_OK(tn_gemm(args, ops->stream));
    tn_ledger left = test_ledger(args->scope);
    assert_int_equal(left.tensors, 0);
    assert_int_equal(left.total_bytes, 0);
}

static void every_form(void (*check)(const test_ops *, const struct form *, int, tn_dtype)) {
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 3 * 2 * 3; i++)
        check(&ops, &forms[i % 3], i / 3 % 2, types[i / 6]);
    test_ops_close_host(&ops);
}

/* ---- GELU ----------------------------------------------------------------------------------- */

static void check_gelu(const test_ops *ops, const struct form *f, int is_plain, tn_dtype dtype) {
    tn_gemm_args args = product_of(ops, f, is_plain, dtype), plain;
    tn_activation_args activation = TN_ACTIVATION_ARGS_INIT;
    args.bias = filled(ops, TN_BF16, (const int64_t[]){1, f->d[1]}, 4);
    plain = args;
    plain.d = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    run(ops, &plain);
    activation.activation = TN_ACTIVATION_GELU;
    activation.x = plain.d, activation.y = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    EXPECT_OK(tn_activation_forward(&activation, ops->stream));
    args.epilogue = TN_GEMM_EPILOGUE_GELU;
    run(ops, &args);
    expect_same(ops, args.d, activation.y);
    args.d = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    args.pre = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    run(ops, &args);
    expect_same(ops, args.d, activation.y);
    expect_same(ops, args.pre, plain.d);
    EXPECT_OK(tn_scope_close(args.scope));
}

static void gelu_is_that_of_the_product_as_it_is_stored(void **state) {
    (void)state;
    every_form(check_gelu);
}

/* ---- its gradient --------------------------------------------------------------------------- */

static void check_gradient(const test_ops *ops, const struct form *f, int is_plain,
                           tn_dtype dtype) {
    tn_gemm_args args = product_of(ops, f, is_plain, dtype), plain = args;
    tn_activation_backward_args backward = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    const int64_t vector[] = {1, f->d[1]};
    plain.d = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    run(ops, &plain);
    for (int accumulates = 0; accumulates < 2; accumulates++) {
        backward.activation = TN_ACTIVATION_GELU;
        backward.dy = plain.d, backward.x = filled(ops, dtype, f->d, 5);
        backward.dx = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
        backward.dbias = filled(ops, TN_FP32, vector, 6);
        backward.accumulate_dbias = accumulates;
        backward.scope = args.scope;
        EXPECT_OK(tn_activation_backward(&backward, ops->stream));
        args.epilogue = TN_GEMM_EPILOGUE_GELU_GRADIENT;
        args.d = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
        args.pre = backward.x, args.dbias = filled(ops, TN_FP32, vector, 6);
        args.accumulate_dbias = accumulates;
        run(ops, &args);
        expect_same(ops, args.d, backward.dx);
        expect_same(ops, args.dbias, backward.dbias);
        args.dbias = (tn_tensor){0}, args.accumulate_dbias = 0;
        run(ops, &args);
        expect_same(ops, args.d, backward.dx);
    }
    EXPECT_OK(tn_scope_close(args.scope));
}

static void the_gradient_of_gelu_is_that_of_the_product_as_it_is_stored(void **state) {
    (void)state;
    every_form(check_gradient);
}

/* ---- the gradient of a bias ----------------------------------------------------------------- */

static void check_dbias(const test_ops *ops, const struct form *f, tn_dtype dtype, int accumulate) {
    tn_gemm_args args = product_of(ops, f, 1, dtype), plain = args;
    tn_bias_gradient_args bias = TN_BIAS_GRADIENT_ARGS_INIT;
    const int64_t vector[] = {1, N};
    plain.d = test_plain(ops->scope, dtype, f->d[0], f->d[1]);
    run(ops, &plain);
    bias.dy = args.a, bias.scope = args.scope, bias.accumulate = accumulate;
    bias.dbias = filled(ops, TN_BF16, vector, 7);
    EXPECT_OK(tn_bias_gradient(&bias, ops->stream));
    args.dbias = filled(ops, TN_BF16, vector, 7), args.accumulate_dbias = accumulate;
    run(ops, &args);
    expect_same(ops, args.d, plain.d);
    expect_same(ops, args.dbias, bias.dbias);
    EXPECT_OK(tn_scope_close(args.scope));
}

static void the_gradient_of_a_bias_goes_with_either_gradient(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 2 * 3 * 2; i++)
        check_dbias(&ops, &forms[1 + i % 2], types[i / 2 % 3], i / 6);
    test_ops_close_host(&ops);
}

/* ---- nothing -------------------------------------------------------------------------------- */

static void nothing_to_contract_is_gelu_of_0(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_plain(ops.scope, TN_BF16, 5, 0), args.b = test_plain(ops.scope, TN_BF16, 7, 0);
    test_declare_valid(&ops, args.a, TN_PLANE_DATA),
        test_declare_valid(&ops, args.b, TN_PLANE_DATA);
    args.d = filled(&ops, TN_BF16, (const int64_t[]){5, 7}, 1);
    args.pre = filled(&ops, TN_BF16, (const int64_t[]){5, 7}, 2);
    args.epilogue = TN_GEMM_EPILOGUE_GELU;
    EXPECT_OK(tn_gemm(&args, ops.stream));
    tn__matrix d = test_fetch_matrix(&ops, args.d), pre = test_fetch_matrix(&ops, args.pre);
    for (int i = 0; i < 35; i++)
        assert_true(test_matrix_get(&d, i / 7, i % 7) == 0.0f &&
                    test_matrix_get(&pre, i / 7, i % 7) == 0.0f);
    test_matrix_free(&d), test_matrix_free(&pre);
    test_ops_close_host(&ops);
}

/* M is 0: dw is 0, or stays, and so is dbias. */
static void no_rows_give_no_gradient(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        tn_gemm_args args = TN_GEMM_ARGS_INIT;
        args.form = TN_GEMM_WGRAD;
        args.a = test_plain(ops.scope, TN_BF16, 0, 5),
        args.b = test_plain(ops.scope, TN_BF16, 0, 7);
        test_declare_valid(&ops, args.a, TN_PLANE_DATA);
        test_declare_valid(&ops, args.b, TN_PLANE_DATA);
        args.d = filled(&ops, TN_FP32, (const int64_t[]){5, 7}, 1);
        args.dbias = filled(&ops, TN_FP32, (const int64_t[]){1, 5}, 2);
        args.accumulate = args.accumulate_dbias = accumulate;
        args.scope = ops.scope;
        tn__matrix before = test_fetch_matrix(&ops, args.dbias);
        EXPECT_OK(tn_gemm(&args, ops.stream));
        tn__matrix dbias = test_fetch_matrix(&ops, args.dbias);
        for (int i = 0; i < 5; i++)
            assert_true(test_matrix_get(&dbias, 0, i) ==
                        (accumulate ? test_matrix_get(&before, 0, i) : 0.0f));
        test_matrix_free(&before), test_matrix_free(&dbias);
    }
    test_ops_close_host(&ops);
}

/* ---- what is refused ------------------------------------------------------------------------ */

static void expect_refused(const test_ops *ops, const tn_gemm_args *args, tn_status status,
                           const char *words) {
    tn_ledger before = test_ledger(ops->scope);
    EXPECT_STATUS(tn_gemm(args, ops->stream), status);
    EXPECT_ERROR_HAS(words);
    EXPECT_STATUS(tn_gemm_tune(args, ops->stream), status);
    tn_ledger after = test_ledger(ops->scope);
    test_expect_same_ledger(&before, &after);
}

static void what_does_not_go_together_is_refused_by_name(void **state) {
    enum { GELU = TN_GEMM_EPILOGUE_GELU, GRADIENT = TN_GEMM_EPILOGUE_GELU_GRADIENT };
    const tn_tensor none = {0};
    (void)state;
    test_ops ops = test_ops_open_host();
    const tn_gemm_args right = product_of(&ops, &forms[1], 1, TN_BF16);
    const tn_tensor same = filled(&ops, TN_BF16, forms[1].d, 3);
    const tn_tensor wide = filled(&ops, TN_FP32, forms[1].d, 3);
    const tn_tensor other = filled(&ops, TN_BF16, forms[1].a, 3);
    const tn_tensor bias = filled(&ops, TN_BF16, (const int64_t[]){1, K}, 3);
    const struct mistake {
        int epilogue;
        tn_tensor pre, bias, dbias;
        int accumulate, accumulate_dbias;
        const char *words;
    } mistakes[] = {
        {3, none, none, none, 0, 0, "epilogue is 3"},
        {-1, none, none, none, 0, 0, "epilogue is -1"},
        {0, same, none, none, 0, 0, "pre is given, and there is no epilogue"},
        {0, none, none, bias, 0, 0, "dbias (tensor"},
        {0, none, none, none, 0, 1, "accumulate_dbias is set, and dbias is {0}"},
        {GELU, same, none, none, 1, 0, "accumulate is set"},
        {GELU, none, none, bias, 0, 0, "has no gradient of a bias"},
        {GELU, wide, none, none, 0, 0, "pre (tensor"},
        {GELU, other, none, none, 0, 0, "d's shape"},
        {GELU, none, none, none, 0, 1, "accumulate_dbias"},
        {GRADIENT, none, none, none, 0, 0, "the gradient of GELU reads it"},
        {GRADIENT, same, bias, none, 0, 0, "the gradient of GELU has none"},
        {GRADIENT, same, none, none, 1, 0, "does not add to d"},
        {GRADIENT, same, none, other, 0, 0, "dbias (tensor"},
    };
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        const struct mistake *m = &mistakes[i];
        tn_gemm_args args = right;
        args.epilogue = (tn_gemm_epilogue)m->epilogue;
        args.pre = m->pre, args.bias = m->bias, args.dbias = m->dbias;
        args.accumulate = m->accumulate, args.accumulate_dbias = m->accumulate_dbias;
        expect_refused(&ops, &args, TN_INVALID_ARGUMENT, m->words);
    }
    test_ops_close_host(&ops);
}

static void states_and_formats_are_refused_by_name(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_gemm_args args = product_of(&ops, &forms[0], 1, TN_BF16);
    args.dbias = filled(&ops, TN_BF16, (const int64_t[]){1, K}, 3);
    expect_refused(&ops, &args, TN_INVALID_ARGUMENT, "it goes with DGRAD, WGRAD");
    args = product_of(&ops, &forms[1], 0, TN_BF16);
    args.dbias = filled(&ops, TN_BF16, (const int64_t[]){1, N}, 3);
    expect_refused(&ops, &args, TN_UNSUPPORTED, "by tn_bias_gradient as it is cast");
    args = product_of(&ops, &forms[0], 1, TN_BF16);
    args.epilogue = TN_GEMM_EPILOGUE_GELU;
    args.d = filled(&ops, TN_BF16, forms[0].d, 3);
    tn__matrix before = test_fetch_matrix(&ops, args.d);
    args.pre = args.d;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_IN_USE);
    args.epilogue = TN_GEMM_EPILOGUE_GELU_GRADIENT;
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_IN_USE);
    args.pre = test_plain(ops.scope, TN_BF16, M, N);
    EXPECT_STATUS(tn_gemm(&args, ops.stream), TN_INVALID_STATE); /* it has no values yet */
    tn__matrix after = test_fetch_matrix(&ops, args.d);
    test_expect_same_matrix(&after, &before);
    test_matrix_free(&before), test_matrix_free(&after);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gelu_is_that_of_the_product_as_it_is_stored),
        cmocka_unit_test(the_gradient_of_gelu_is_that_of_the_product_as_it_is_stored),
        cmocka_unit_test(the_gradient_of_a_bias_goes_with_either_gradient),
        cmocka_unit_test(nothing_to_contract_is_gelu_of_0),
        cmocka_unit_test(no_rows_give_no_gradient),
        cmocka_unit_test(what_does_not_go_together_is_refused_by_name),
        cmocka_unit_test(states_and_formats_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
