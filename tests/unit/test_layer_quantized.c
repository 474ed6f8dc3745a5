/* A Linear layer whose operands the caller has quantized: the bits are those of a layer that
 * quantizes them itself, what is the caller's stays, and what does not fit is refused by name. */
#include "ops_planes_support.h"

#include "tenure_layers.h"

enum { M = 70, N = 200, K = 300 };

typedef struct layer {
    test_ops ops;
    tn_scope op, saved;
    tn_tensor weight;
    tn__matrix x_values, weight_values, dy_values;
    tn_tensor x, dy;                     /* PLAIN */
    tn_tensor quantized_x, quantized_dy; /* both planes */
} layer;

static layer open_layer(void) {
    const unsigned both = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    layer l = {.ops = test_ops_open_host()};
    l.op = test_ops_scope(&l.ops, TN_SCOPE_OP, "op");
    l.saved = test_ops_scope(&l.ops, TN_SCOPE_SAVED, "saved");
    l.x_values = test_matrix_make(TN_BF16, M, K, 1);
    l.weight_values = test_matrix_make(TN_BF16, N, K, 2);
    l.dy_values = test_matrix_make(TN_BF16, M, N, 3);
    l.x = test_tensor_of(&l.ops, l.ops.scope, &l.x_values);
    l.dy = test_tensor_of(&l.ops, l.ops.scope, &l.dy_values);
    l.weight = test_quantized(&l.ops, l.ops.scope, &l.weight_values, TN_FORMAT_FP8_BLOCK_2D,
                              TN_QUANTIZE_ROW);
    l.quantized_x = test_quantized(&l.ops, l.ops.scope, &l.x_values, TN_FORMAT_FP8_BLOCK_1D, both);
    l.quantized_dy =
        test_quantized(&l.ops, l.ops.scope, &l.dy_values, TN_FORMAT_FP8_BLOCK_1D, both);
    return l;
}

static void close_layer(layer *l) {
    test_matrix_free(&l->x_values), test_matrix_free(&l->weight_values);
    test_matrix_free(&l->dy_values);
    test_ops_close_host(&l->ops);
}

static tn_linear_forward_args forward_args(const layer *l, tn_tensor x) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = x, args.w.weight = l->weight;
    args.y = test_plain(l->ops.scope, TN_BF16, M, N);
    args.common.scope = l->op, args.common.saved_scope = l->saved;
    return args;
}

static tn_linear_backward_args backward_args(const layer *l, tn_tensor dy, tn_tensor x) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dy, args.x = x, args.w.weight = l->weight;
    args.dx = test_plain(l->ops.scope, TN_BF16, M, K);
    args.gradient.dweight = test_plain(l->ops.scope, TN_FP32, N, K);
    args.common.scope = l->op, args.common.saved_scope = l->saved;
    return args;
}

static void expect_same(const layer *l, tn_tensor actual, tn_tensor expected) {
    tn__matrix a = test_fetch_matrix(&l->ops, actual), e = test_fetch_matrix(&l->ops, expected);
    test_expect_same_matrix(&a, &e);
    test_matrix_free(&a), test_matrix_free(&e);
}

static void expect_callers_operands(const layer *l) {
    const tn_tensor operands[] = {l->quantized_x, l->quantized_dy};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(test_state(operands[i], TN_PLANE_ROW), TN_PLANE_VALID);
        assert_int_equal(test_state(operands[i], TN_PLANE_COL), TN_PLANE_VALID);
    }
    assert_int_equal(test_ledger(l->op).tensors, 0);
    assert_int_equal(test_ledger(l->saved).tensors, 0);
    assert_int_equal(test_ledger(l->ops.scope).leases, 0);
}

static void quantized_operands_give_the_layers_own_bits(void **state) {
    (void)state;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    layer l = open_layer();
    const tn_linear_forward_args own = forward_args(&l, l.x),
                                 given = forward_args(&l, l.quantized_x);
    tn_linear_backward_args own_back = backward_args(&l, l.dy, (tn_tensor){0});
    tn_linear_backward_args given_back = backward_args(&l, l.quantized_dy, l.quantized_x);
    EXPECT_OK(tn_linear_forward(&own, &saved, l.ops.stream));
    EXPECT_OK(tn_linear_backward(&own_back, &saved, NULL, l.ops.stream));
    EXPECT_OK(tn_linear_forward(&given, &saved, l.ops.stream));
    assert_int_equal(saved.x.value, 0);
    EXPECT_OK(tn_linear_backward(&given_back, &saved, NULL, l.ops.stream));
    expect_same(&l, given.y, own.y);
    expect_same(&l, given_back.dx, own_back.dx);
    expect_same(&l, given_back.gradient.dweight, own_back.gradient.dweight);
    expect_callers_operands(&l);
    close_layer(&l);
}

static void a_delayed_gradient_leaves_the_callers_operands(void **state) {
    (void)state;
    tn_delayed_gradient delayed = TN_DELAYED_GRADIENT_INIT;
    layer l = open_layer();
    tn_linear_backward_args now = backward_args(&l, l.quantized_dy, l.quantized_x), later = now;
    later.gradient.dweight = test_plain(l.ops.scope, TN_FP32, N, K);
    later.gradient.delay = 1;
    EXPECT_OK(tn_linear_backward(&now, NULL, NULL, l.ops.stream));
    EXPECT_OK(tn_linear_backward(&later, NULL, &delayed, l.ops.stream));
    EXPECT_OK(tn_weight_gradient(&delayed, l.op, l.ops.stream));
    expect_same(&l, later.gradient.dweight, now.gradient.dweight);
    expect_callers_operands(&l);
    close_layer(&l);
}

static void what_does_not_fit_is_refused_by_name(void **state) {
    (void)state;
    layer l = open_layer();
    tn_tensor tiles =
        test_quantized(&l.ops, l.ops.scope, &l.x_values, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW);
    tn_tensor columns =
        test_quantized(&l.ops, l.ops.scope, &l.x_values, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_COL);
    tn_linear_forward_args forward = forward_args(&l, tiles);
    forward.common.saved_scope = (tn_scope){0};
    EXPECT_STATUS(tn_linear_forward(&forward, NULL, l.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("fp8_block_2d, expected plain, or what it is quantized to");
    forward.x = columns;
    EXPECT_STATUS(tn_linear_forward(&forward, NULL, l.ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("plane ROW is ABSENT");
    tn_linear_backward_args backward = backward_args(&l, l.quantized_dy, l.quantized_x);
    backward.gradient.dbias = test_plain(l.ops.scope, TN_FP32, 1, N);
    EXPECT_STATUS(tn_linear_backward(&backward, NULL, NULL, l.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("its sums are taken when it is cast");
    backward.gradient.dbias = (tn_tensor){0};
    backward.common.precision = TN_BACKWARD_DEQUANTIZED;
    EXPECT_STATUS(tn_linear_backward(&backward, NULL, NULL, l.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is quantized, but common.precision is not");
    expect_callers_operands(&l);
    close_layer(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantized_operands_give_the_layers_own_bits),
        cmocka_unit_test(a_delayed_gradient_leaves_the_callers_operands),
        cmocka_unit_test(what_does_not_fit_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
