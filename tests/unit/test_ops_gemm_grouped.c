/* tn_grouped_gemm on the host device: PLAIN groups and biases, groups without rows, and what is
 * refused. That each FP8 group is the product of the group alone:
 * tests/emulation/test_emulated_gemm_grouped.c. */
#include "ops_planes_support.h"

#include <stdlib.h>
#include <string.h>

#include "tenure_grouped.h"

enum { GROUPS = 3, N = 20, K = 12, ROWS = 30 };

static const int64_t offsets[GROUPS + 1] = {0, 17, 17, ROWS};

static tn_tensor filled(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols, int byte) {
    size_t bytes = (size_t)(rows * cols) * tn_dtype_bytes(dtype);
    void *data = malloc(bytes + 1);
    memset(data, byte, bytes);
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_write(ops, tensor, data);
    free(data);
    return tensor;
}

/* Codes of 1, scales of 0x3F3F3F3F (0.747). */
static tn_grouped_plane plane_of(const test_ops *ops, tn_plane plane, int64_t cols) {
    int64_t floats = 0;
    EXPECT_OK(tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D, plane, GROUPS, ROWS, cols, &floats));
    tn_grouped_plane made = {filled(ops, TN_BYTE, ROWS, cols, 0x38),
                             filled(ops, TN_FP32, 1, floats, 0x3F)};
    return made;
}

typedef struct fixture {
    test_ops ops;
    tn_tensor d[GROUPS], weights[GROUPS];
    tn_grouped_gemm_args args;
} fixture;

static void make_wgrad(fixture *f) {
    f->ops = test_ops_open_host();
    f->args = (tn_grouped_gemm_args)TN_GROUPED_GEMM_ARGS_INIT;
    for (int e = 0; e < GROUPS; e++)
        f->d[e] = filled(&f->ops, TN_FP32, N, K, 0x40);
    f->args.form = TN_GEMM_WGRAD, f->args.groups = GROUPS, f->args.offsets = offsets;
    f->args.n = N, f->args.k = K, f->args.d = f->d, f->args.scope = f->ops.scope;
    f->args.a = plane_of(&f->ops, TN_PLANE_COL, N);
    f->args.b = plane_of(&f->ops, TN_PLANE_COL, K);
}

static void make_fprop(fixture *f) {
    make_wgrad(f);
    tn__matrix w = test_matrix_make(TN_BF16, N, K, 1);
    for (int e = 0; e < GROUPS; e++)
        f->weights[e] =
            test_quantized(&f->ops, f->ops.scope, &w, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW);
    test_matrix_free(&w);
    f->args.form = TN_GEMM_FPROP, f->args.weights = f->weights;
    f->args.a = plane_of(&f->ops, TN_PLANE_ROW, K);
    f->d[0] = filled(&f->ops, TN_FP32, ROWS + 2, N, 0x40);
}

/* All elements of d have these bits, or none has. */
static int all_bits_are(const test_ops *ops, tn_tensor d, uint32_t bits) {
    tn__matrix matrix = test_fetch_matrix(ops, d);
    int equal = 1;
    for (int64_t i = 0; i < matrix.rows * matrix.cols; i++)
        equal = equal && ((const uint32_t *)matrix.data)[i] == bits;
    test_matrix_free(&matrix);
    return equal;
}

static void a_group_without_rows_has_a_gradient_of_zeros_or_what_was_there(void **state) {
    fixture f;
    (void)state;
    make_wgrad(&f);
    f.args.accumulate = 1;
    EXPECT_OK(tn_grouped_gemm(&f.args, f.ops.stream));
    assert_true(all_bits_are(&f.ops, f.d[1], 0x40404040));
    assert_false(all_bits_are(&f.ops, f.d[0], 0x40404040));
    f.args.accumulate = 0;
    EXPECT_OK(tn_grouped_gemm(&f.args, f.ops.stream));
    assert_true(all_bits_are(&f.ops, f.d[1], 0));
    assert_false(all_bits_are(&f.ops, f.d[2], 0));
    test_ops_close_host(&f.ops);
}

static void rows_behind_the_last_group_are_left_alone(void **state) {
    fixture f;
    (void)state;
    make_fprop(&f);
    EXPECT_OK(tn_grouped_gemm(&f.args, f.ops.stream));
    tn__matrix d = test_fetch_matrix(&f.ops, f.d[0]);
    const uint32_t *bits = d.data;
    for (int64_t i = ROWS * (int64_t)N; i < d.rows * d.cols; i++)
        assert_int_equal(bits[i], 0x40404040);
    assert_int_not_equal(bits[ROWS * N - 1], 0x40404040);
    test_matrix_free(&d);
    tn_ledger left = test_ledger(f.ops.scope);
    EXPECT_OK(tn_grouped_gemm(&f.args, f.ops.stream));
    tn_ledger again = test_ledger(f.ops.scope);
    assert_int_equal(left.total_bytes, again.total_bytes); /* no scratch is left */
    test_ops_close_host(&f.ops);
}

/* ---- PLAIN groups ---------------------------------------------------------------------------- */

/* Rows `first` on of a matrix, as one of its own. */
static tn__matrix rows_of(const tn__matrix *all, int64_t first, int64_t rows) {
    tn__matrix part = *all;
    size_t begins = (size_t)(first * all->cols) * tn_dtype_bytes(all->dtype);
    part.data = (unsigned char *)all->data + begins;
    part.rows = rows;
    return part;
}

/* Of one form: a, b (of WGRAD) and d of all groups, or d of each. */
typedef struct plain_case {
    tn_gemm_form form;
    tn_dtype dtype;
    int has_bias, accumulate;
    tn__matrix a, b, d, weights[GROUPS], biases[GROUPS];
} plain_case;

static plain_case make_plain(int way) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    plain_case c = {.form = (tn_gemm_form)(way % 3), .dtype = types[way / 3 % 3]};
    c.accumulate = way / 9;
    c.has_bias = c.form == TN_GEMM_FPROP;
    c.a = test_matrix_make(c.dtype, ROWS, c.form == TN_GEMM_FPROP ? K : N, 1);
    c.b = test_matrix_make(c.dtype, ROWS, K, 2);
    c.d = test_matrix_make(TN_FP32, c.form == TN_GEMM_WGRAD ? N * GROUPS : ROWS,
                           c.form == TN_GEMM_FPROP ? N : K, 3);
    for (int e = 0; e < GROUPS; e++) {
        c.weights[e] = test_matrix_make(c.dtype, N, K, 10 + (uint32_t)e);
        c.biases[e] = test_matrix_make(TN_FP32, 1, N, 20 + (uint32_t)e);
    }
    return c;
}

static void end_plain(plain_case *c) {
    test_matrix_free(&c->a), test_matrix_free(&c->b), test_matrix_free(&c->d);
    for (int e = 0; e < GROUPS; e++)
        test_matrix_free(&c->weights[e]), test_matrix_free(&c->biases[e]);
}

static tn__matrix d_of(const plain_case *c, int e) {
    if (c->form == TN_GEMM_WGRAD) return rows_of(&c->d, (int64_t)e * N, N);
    return rows_of(&c->d, offsets[e], offsets[e + 1] - offsets[e]);
}

/* tn_gemm of the group as tensors of its own; a bias only where something is multiplied. */
static tn__matrix alone(const test_ops *ops, const plain_case *c, int e) {
    int64_t rows = offsets[e + 1] - offsets[e];
    tn__matrix a = rows_of(&c->a, offsets[e], rows), b = rows_of(&c->b, offsets[e], rows);
    tn__matrix d = d_of(c, e);
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = c->form, args.accumulate = c->accumulate, args.scope = ops->scope;
    args.a = test_tensor_of(ops, ops->scope, &a);
    args.b = test_tensor_of(ops, ops->scope, c->form == TN_GEMM_WGRAD ? &b : &c->weights[e]);
    args.d = test_tensor_of(ops, ops->scope, &d);
    if (c->has_bias) args.bias = test_tensor_of(ops, ops->scope, &c->biases[e]);
    EXPECT_OK(tn_gemm(&args, ops->stream));
    return test_fetch_matrix(ops, args.d);
}

static void run_plain(const test_ops *ops, const plain_case *c, tn_tensor d[GROUPS]) {
    tn_tensor weights[GROUPS], biases[GROUPS];
    tn_grouped_gemm_args args = TN_GROUPED_GEMM_ARGS_INIT;
    args.form = c->form, args.groups = GROUPS, args.offsets = offsets;
    args.n = N, args.k = K, args.accumulate = c->accumulate, args.scope = ops->scope;
    args.a.data = test_tensor_of(ops, ops->scope, &c->a);
    if (c->form == TN_GEMM_WGRAD) args.b.data = test_tensor_of(ops, ops->scope, &c->b);
    for (int e = 0; e < GROUPS; e++) {
        tn__matrix part = d_of(c, e);
        weights[e] = test_tensor_of(ops, ops->scope, &c->weights[e]);
        biases[e] = test_tensor_of(ops, ops->scope, &c->biases[e]);
        if (c->form == TN_GEMM_WGRAD) d[e] = test_tensor_of(ops, ops->scope, &part);
    }
    if (c->form != TN_GEMM_WGRAD) d[0] = test_tensor_of(ops, ops->scope, &c->d);
    args.weights = weights, args.d = d;
    if (c->has_bias) args.biases = biases;
    EXPECT_OK(tn_grouped_gemm(&args, ops->stream));
}

static void plain_groups_equal_products_of_their_own(void **state) {
    (void)state;
    for (int way = 0; way < 3 * 3 * 2; way++) {
        test_ops ops = test_ops_open_host();
        plain_case c = make_plain(way);
        tn_tensor d[GROUPS];
        run_plain(&ops, &c, d);
        tn__matrix all = test_fetch_matrix(&ops, d[0]);
        for (int e = 0; e < GROUPS; e++) {
            tn__matrix expected = alone(&ops, &c, e), actual = all;
            if (c.form == TN_GEMM_WGRAD) actual = test_fetch_matrix(&ops, d[e]);
            if (c.form != TN_GEMM_WGRAD)
                actual = rows_of(&all, offsets[e], offsets[e + 1] - offsets[e]);
            test_expect_same_matrix(&actual, &expected);
            if (c.form == TN_GEMM_WGRAD) test_matrix_free(&actual);
            test_matrix_free(&expected);
        }
        test_matrix_free(&all);
        end_plain(&c);
        test_ops_close_host(&ops);
    }
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void no_groups_are_success(void **state) {
    fixture f;
    (void)state;
    make_fprop(&f);
    f.args.groups = 0;
    EXPECT_OK(tn_grouped_gemm(&f.args, f.ops.stream));
    assert_true(all_bits_are(&f.ops, f.d[0], 0x40404040));
    test_ops_close_host(&f.ops);
}

static void expect(fixture *f, tn_status status, const char *text) {
    EXPECT_STATUS(tn_grouped_gemm(&f->args, f->ops.stream), status);
    EXPECT_ERROR_HAS(text);
    assert_int_equal(test_state(f->d[0], TN_PLANE_DATA), TN_PLANE_VALID);
}

static void what_does_not_fit_is_refused_by_name(void **state) {
    static const int64_t falling[] = {0, 17, 16, ROWS}, late[] = {1, 17, 17, ROWS};
    static const int64_t many[] = {0, 17, 17, ROWS + 1};
    fixture f;
    (void)state;
    make_fprop(&f);
    const tn_grouped_gemm_args good = f.args;
    f.args.offsets = NULL, expect(&f, TN_UNSUPPORTED, "on the host"), f.args = good;
    f.args.offsets = falling, expect(&f, TN_INVALID_ARGUMENT, "offsets[2] is 16"), f.args = good;
    f.args.offsets = late, expect(&f, TN_INVALID_ARGUMENT, "offsets[0] is 1"), f.args = good;
    f.args.offsets = many, expect(&f, TN_INVALID_ARGUMENT, "fewer than 31 rows"), f.args = good;
    f.args.groups = -1, expect(&f, TN_INVALID_ARGUMENT, "groups is -1"), f.args = good;
    f.args.groups = 4097, expect(&f, TN_INVALID_ARGUMENT, "groups is 4097"), f.args = good;
    f.args.k = -1, expect(&f, TN_INVALID_ARGUMENT, "k is -1"), f.args = good;
    f.args.biases = f.d, expect(&f, TN_INVALID_ARGUMENT, "bias (tensor"), f.args = good;
    f.args.a.scale.value = 0, expect(&f, TN_INVALID_ARGUMENT, "a (tensor"), f.args = good;
    f.args.a = (tn_grouped_plane){f.d[0], {0}}, expect(&f, TN_INVALID_ARGUMENT, "expected at"),
    f.args = good;
    f.args.n = N + 1, expect(&f, TN_INVALID_ARGUMENT, "weight (tensor"), f.args = good;
    f.args.weights = NULL, expect(&f, TN_INVALID_ARGUMENT, "array"), f.args = good;
    f.args.d = NULL, expect(&f, TN_INVALID_ARGUMENT, "array"), f.args = good;
    f.args.a_dtype = TN_BF16, expect(&f, TN_INVALID_ARGUMENT, "a is bf16"), f.args = good;
    f.args.a.scale = f.args.a.data, expect(&f, TN_INVALID_ARGUMENT, "a (tensor"), f.args = good;
    f.args.form = (tn_gemm_form)3, expect(&f, TN_INVALID_ARGUMENT, "form is 3"), f.args = good;
    f.args.scope = (tn_scope){0}, expect(&f, TN_INVALID_ARGUMENT, "name a scope"), f.args = good;
    f.args.size = 1, expect(&f, TN_INVALID_ARGUMENT, "args->size"), f.args = good;
    f.d[0] = f.weights[0];
    EXPECT_STATUS(tn_grouped_gemm(&f.args, f.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_grouped_gemm(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    test_ops_close_host(&f.ops);
    make_wgrad(&f);
    f.args.a_dtype = f.args.b_dtype = TN_E5M2, expect(&f, TN_UNSUPPORTED, "both E5M2");
    test_ops_close_host(&f.ops);
}

/* Sums of such numbers do not fit in 63 bits: refused before anything is counted (UBSan sees). */
static void numbers_near_the_end_of_int64_are_refused(void **state) {
    static const int64_t far[] = {0, 17, 17, INT64_MAX}, farther[] = {0, 0, INT64_MAX, INT64_MAX};
    static const int64_t none[] = {0, 0, 0, 0};
    fixture f;
    (void)state;
    for (int is_wgrad = 0; is_wgrad < 2; is_wgrad++) {
        if (is_wgrad)
            make_wgrad(&f);
        else
            make_fprop(&f);
        const tn_grouped_gemm_args good = f.args;
        f.args.offsets = far, expect(&f, TN_INVALID_ARGUMENT, "offsets[3] is 922337"),
        f.args = good;
        f.args.offsets = farther, expect(&f, TN_INVALID_ARGUMENT, "expected at most"),
        f.args = good;
        f.args.k = 0, f.args.n = 0, f.args.offsets = far;
        expect(&f, TN_INVALID_ARGUMENT, "expected at most"), f.args = good;
        f.args.n = INT64_MAX, expect(&f, TN_INVALID_ARGUMENT, "n is 922337"), f.args = good;
        f.args.k = INT64_MAX, f.args.offsets = none;
        expect(&f, TN_INVALID_ARGUMENT, "k is 922337"), f.args = good;
        f.args.groups = INT64_MAX, expect(&f, TN_INVALID_ARGUMENT, "groups is"), f.args = good;
        EXPECT_OK(tn_grouped_gemm(&f.args, f.ops.stream));
        test_ops_close_host(&f.ops);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_groups_equal_products_of_their_own),
        cmocka_unit_test(a_group_without_rows_has_a_gradient_of_zeros_or_what_was_there),
        cmocka_unit_test(rows_behind_the_last_group_are_left_alone),
        cmocka_unit_test(no_groups_are_success),
        cmocka_unit_test(what_does_not_fit_is_refused_by_name),
        cmocka_unit_test(numbers_near_the_end_of_int64_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
