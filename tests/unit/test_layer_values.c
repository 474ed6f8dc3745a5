/* Each layer is, bit for bit, the public ops that it is made of, in whatever way it is told: what
 * is recomputed, delayed or fused changes no bit. */
#include "tenure_lifetime.h"
#include "test_layers.h"

#include <stdlib.h>
#include <string.h>

/* ---- a layer, op by op ----------------------------------------------------------------------- */

typedef struct reference {
    const test_layer *l; /* whose operands these are */
    tn_scope scope;
    tn_tensor normed, sum, mean, rstd, hidden, activated, y;
    tn_tensor dx, dgamma, dbeta, dweight[2], dbias[2];
    tn_tensor history; /* of amaxes, of delayed scaling */
} reference;

static tn_tensor like(const reference *r, tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    return test_plain(r->scope, info.dtype, info.rows, info.cols);
}

/* Of x, or of dy. */
static tn_tensor cast(const reference *r, int product, tn_tensor src, int is_gradient) {
    const tn_dtype gradient_dtype = r->l->config.gradient_dtype;
    const tn_dtype dtype = is_gradient && gradient_dtype ? gradient_dtype : TN_E4M3;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    const int is_blocks = r->l->config.format[product] == TN_FORMAT_FP8_BLOCK_2D;
    args.src = src;
    args.dst = test_fp8(r->scope, is_blocks ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_FP8_TENSOR, dtype,
                        info.rows, info.cols);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    if (test_layer_is_delayed(&r->l->config, product)) {
        args.scale = r->l->scale, args.amax_history = r->history;
        args.slot = test_layer_slot(product, is_gradient);
    }
    EXPECT_OK(tn_quantize(&args, r->l->ops.stream));
    return args.dst;
}

static tn_tensor dequantized(const reference *r, tn_tensor src) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    args.src = src, args.plane = TN_PLANE_ROW;
    args.dst = test_plain(r->scope, r->l->config.dtype, info.rows, info.cols);
    EXPECT_OK(tn_dequantize(&args, r->l->ops.stream));
    return args.dst;
}

static void multiply(const reference *r, tn_gemm_form form, tn_tensor a, tn_tensor b,
                     tn_tensor bias, tn_tensor d) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = form, args.a = a, args.b = b, args.d = d;
    args.bias = bias, args.scope = r->scope;
    EXPECT_OK(tn_gemm(&args, r->l->ops.stream));
}

static int is_plain(const reference *r, int product) {
    return r->l->config.format[product] == TN_FORMAT_PLAIN;
}

static tn_tensor forward_product(const reference *r, int product, tn_tensor x) {
    tn_tensor_info weight = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(r->l->weight[product], &weight));
    tn_tensor y = test_plain(r->scope, r->l->config.dtype, LAYER_M, weight.rows);
    multiply(r, TN_GEMM_FPROP, is_plain(r, product) ? x : cast(r, product, x, 0),
             r->l->weight[product], r->l->bias[product], y);
    return y;
}

/* dx of x's shape, dweight, dbias. */
static tn_tensor backward_product(reference *r, int product, tn_tensor dy, tn_tensor x) {
    const tn_backward_precision precision =
        is_plain(r, product) ? TN_BACKWARD_HIGH_PRECISION : r->l->config.precision;
    tn_bias_gradient_args bias = TN_BIAS_GRADIENT_ARGS_INIT;
    tn_tensor weight = is_plain(r, product) ? r->l->weight[product] : r->l->source[product];
    tn_tensor dx = like(r, x), operand = x;
    bias.dy = dy, bias.scope = r->scope;
    bias.dbias = r->dbias[product] = like(r, r->l->bias[product]);
    EXPECT_OK(tn_bias_gradient(&bias, r->l->ops.stream));
    if (precision == TN_BACKWARD_AS_FORWARD) {
        weight = r->l->weight[product];
        dy = cast(r, product, dy, 1), operand = cast(r, product, x, 0);
    } else if (precision == TN_BACKWARD_DEQUANTIZED) {
        weight = dequantized(r, r->l->weight[product]);
        operand = dequantized(r, cast(r, product, x, 0));
    }
    multiply(r, TN_GEMM_DGRAD, dy, weight, (tn_tensor){0}, dx);
    if (r->l->dweight[product].value == 0) return dx;
    r->dweight[product] = like(r, r->l->dweight[product]);
    multiply(r, TN_GEMM_WGRAD, dy, operand, (tn_tensor){0}, r->dweight[product]);
    return dx;
}

static void norm_forward(reference *r) {
    const test_layer *l = r->l;
    tn_norm_args args = TN_NORM_ARGS_INIT;
    args.norm = l->config.norm;
    args.x = l->x, args.gamma = l->gamma, args.beta = l->beta, args.gamma_from_one = 1;
    args.residual = l->residual, args.scope = r->scope;
    if (l->residual.value) args.sum = r->sum = like(r, l->x);
    args.y = r->normed = like(r, l->x);
    args.rstd = r->rstd = test_plain(r->scope, TN_FP32, 1, LAYER_M);
    if (args.norm == TN_NORM_LAYER) args.mean = r->mean = test_plain(r->scope, TN_FP32, 1, LAYER_M);
    EXPECT_OK(tn_norm_forward(&args, l->ops.stream));
}

static void norm_backward(reference *r, tn_tensor dn) {
    const test_layer *l = r->l;
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    if (l->config.has_no_dx) return;
    args.norm = l->config.norm;
    args.dy = dn, args.x = r->sum.value ? r->sum : l->x;
    args.mean = r->mean, args.rstd = r->rstd;
    args.gamma = l->gamma, args.gamma_from_one = 1, args.added = l->added;
    args.dx = r->dx = like(r, l->x), args.dgamma = r->dgamma = like(r, l->dgamma);
    if (l->dbeta.value) args.dbeta = r->dbeta = like(r, l->dbeta);
    args.scope = r->scope;
    EXPECT_OK(tn_norm_backward(&args, l->ops.stream));
}

static tn_tensor activation_backward(const reference *r, tn_tensor da) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.activation = r->l->config.activation, args.gated = r->l->config.gated;
    args.dy = da, args.x = r->hidden, args.dx = like(r, r->hidden), args.scope = r->scope;
    EXPECT_OK(tn_activation_backward(&args, r->l->ops.stream));
    return args.dx;
}

static void activation_forward(reference *r) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    args.activation = r->l->config.activation, args.gated = r->l->config.gated;
    args.x = r->hidden;
    args.y = r->activated = test_plain(r->scope, r->l->config.dtype, LAYER_M, LAYER_F);
    EXPECT_OK(tn_activation_forward(&args, r->l->ops.stream));
}

static void run_reference(reference *r) {
    const test_layer *l = r->l;
    if (l->config.kind == TEST_LINEAR) {
        r->y = forward_product(r, 0, l->x);
        r->dx = backward_product(r, 0, l->dy, l->x);
        return;
    }
    norm_forward(r);
    if (l->config.kind == TEST_NORM_LINEAR) {
        r->y = forward_product(r, 0, r->normed);
        norm_backward(r, backward_product(r, 0, l->dy, r->normed));
        return;
    }
    r->hidden = forward_product(r, 0, r->normed);
    activation_forward(r);
    r->y = forward_product(r, 1, r->activated);
    tn_tensor dh = activation_backward(r, backward_product(r, 1, l->dy, r->activated));
    norm_backward(r, backward_product(r, 0, dh, r->normed));
}

/* ---- the comparison -------------------------------------------------------------------------- */

static void expect_same(const reference *r, const char *what, tn_tensor actual,
                        tn_tensor expected) {
    tn_plane_layout layout;
    if (actual.value == 0) return;
    if (expected.value == 0) fail_msg("%s: there is no reference", what);
    EXPECT_OK(tn_plane_layout_get(actual, TN_PLANE_DATA, &layout));
    unsigned char *a = malloc(layout.data_bytes), *b = malloc(layout.data_bytes);
    assert_true(a && b);
    test_read(&r->l->ops, actual, a);
    test_read(&r->l->ops, expected, b);
    size_t differ = 0, zeros = 0;
    for (size_t i = 0; i < layout.data_bytes; i++)
        differ += a[i] != b[i], zeros += a[i] == 0;
    if (differ || zeros == layout.data_bytes)
        fail_msg("%s: %zu of %zu bytes differ, %zu are 0 (kind %d, formats %d %d, precision %d, "
                 "recompute %d, delay %d)",
                 what, differ, layout.data_bytes, zeros, (int)r->l->config.kind,
                 (int)r->l->config.format[0], (int)r->l->config.format[1],
                 (int)r->l->config.precision, r->l->config.recompute, r->l->config.delay);
    free(a), free(b);
}

/* What is 0 in both is what no product has been delayed for. */
static void expect_same_history(const reference *r) {
    float a[LAYER_HISTORY * LAYER_SLOTS], b[LAYER_HISTORY * LAYER_SLOTS];
    if (r->history.value == 0) return;
    test_read(&r->l->ops, r->l->history, a);
    test_read(&r->l->ops, r->history, b);
    assert_memory_equal(a, b, sizeof a);
    for (int i = 0; i < test_layer_products(r->l); i++)
        if (test_layer_is_delayed(&r->l->config, i)) assert_true(a[test_layer_slot(i, 0)] > 0.0f);
}

static void expect_like_reference(const reference *r) {
    const test_layer *l = r->l;
    expect_same_history(r);
    expect_same(r, "y", l->y, r->y);
    expect_same(r, "normed", l->normed, r->normed);
    expect_same(r, "sum", l->sum, r->sum);
    for (int i = 0; i < test_layer_products(l); i++) {
        expect_same(r, i ? "dweight2" : "dweight1", l->dweight[i], r->dweight[i]);
        expect_same(r, i ? "dbias2" : "dbias1", l->dbias[i], r->dbias[i]);
    }
    if (l->config.has_no_dx) return;
    expect_same(r, "dx", l->dx, r->dx);
    expect_same(r, "dgamma", l->dgamma, r->dgamma);
    expect_same(r, "dbeta", l->dbeta, r->dbeta);
}

/* After forward; ends the layer. */
static void compare_backward(test_layer *l) {
    const test_ops *ops = &l->ops;
    reference r = {.l = l, .scope = test_ops_scope(ops, TN_SCOPE_OP, "reference")};
    EXPECT_OK(test_layer_backward(l, ops->stream));
    EXPECT_OK(test_layer_weight_gradients(l, ops->stream));
    if (l->history.value) {
        r.history = test_plain(r.scope, TN_FP32, LAYER_HISTORY, LAYER_SLOTS);
        EXPECT_OK(tn_plane_fill(r.history, TN_PLANE_DATA, 0, ops->stream));
    }
    run_reference(&r);
    expect_like_reference(&r);
    EXPECT_OK(tn_scope_close(r.scope));
    EXPECT_OK(tn_scope_close(l->op));
    EXPECT_OK(tn_scope_close(l->saved_scope));
    EXPECT_OK(tn_scope_close(l->io));
    EXPECT_OK(tn_scope_close(l->model));
}

static void compare(const test_ops *ops, const test_layer_config *config) {
    test_layer l = test_layer_open(ops, config);
    EXPECT_OK(test_layer_forward(&l, ops->stream));
    compare_backward(&l);
}

static const tn_format formats[] = {TN_FORMAT_PLAIN, TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_TENSOR};

/* Recomputed or not, delayed or not, in each precision, with a normed value of the caller's or
 * without, and the two weights' formats mixed. */
static void compare_all(test_layer_kind kind) {
    test_ops ops = test_ops_open_host();
    for (int f = 0; f < (kind == TEST_NORM_MLP ? 9 : 3); f++) {
        for (int variant = 0; variant < 24; variant++) {
            test_layer_config config = {.kind = kind,
                                        .format = {formats[f % 3], formats[f / 3]},
                                        .dtype = TN_BF16,
                                        .norm = (tn_norm)(variant % 2),
                                        .activation = TN_ACTIVATION_GELU,
                                        .precision = (tn_backward_precision)(variant % 3),
                                        .recompute = variant / 3 % 2,
                                        .delay = variant / 6 % 2,
                                        .has_residual = variant / 2 % 2,
                                        .has_normed = variant / 12,
                                        .policy = TN_POLICY_KEEP};
            config.gated = variant % 5 == 0;
            if (variant % 4 == 1) config.gradient_dtype = TN_E5M2;
            compare(&ops, &config);
            config.has_scales = 1;
            if (test_layer_is_delayed(&config, 0) ||
                (kind == TEST_NORM_MLP && test_layer_is_delayed(&config, 1)))
                compare(&ops, &config);
        }
    }
    test_ops_close_host(&ops);
}

static void linear_is_its_ops(void **state) {
    (void)state;
    compare_all(TEST_LINEAR);
}

static void norm_linear_is_its_ops(void **state) {
    (void)state;
    compare_all(TEST_NORM_LINEAR);
}

static void norm_mlp_is_its_ops(void **state) {
    (void)state;
    compare_all(TEST_NORM_MLP);
}

/* Quantized from its source, by a factor that is given. */
static void a_weight_is_quantized_by_its_slot(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const test_layer_config config = {.kind = TEST_LINEAR,
                                      .format = {TN_FORMAT_FP8_TENSOR},
                                      .dtype = TN_BF16,
                                      .has_scales = 1,
                                      .policy = TN_POLICY_KEEP};
    test_layer l = test_layer_open(&ops, &config);
    tn_linear_forward_args forward = test_linear_forward_args(&l);
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    const tn_tensor history = test_plain(l.io, TN_FP32, LAYER_HISTORY, LAYER_SLOTS);
    float amaxes[2][LAYER_HISTORY * LAYER_SLOTS];
    forward.w.source = l.source[0];
    forward.w.weight_scale = (tn_layer_scale){l.scale, l.history, 3};
    EXPECT_OK(tn_linear_forward(&forward, &l.saved.linear, ops.stream));
    EXPECT_OK(tn_plane_fill(history, TN_PLANE_DATA, 0, ops.stream));
    quantize.src = l.source[0], quantize.scale = l.scale;
    quantize.amax_history = history, quantize.slot = 3;
    quantize.dst = test_fp8(l.io, TN_FORMAT_FP8_TENSOR, TN_E4M3, LAYER_N, LAYER_K);
    EXPECT_OK(tn_quantize(&quantize, ops.stream));
    quantize.src = l.x, quantize.slot = test_layer_slot(0, 0);
    quantize.dst = test_fp8(l.io, TN_FORMAT_FP8_TENSOR, TN_E4M3, LAYER_M, LAYER_K);
    EXPECT_OK(tn_quantize(&quantize, ops.stream));
    test_read(&ops, l.history, amaxes[0]), test_read(&ops, history, amaxes[1]);
    assert_memory_equal(amaxes[0], amaxes[1], sizeof amaxes[0]);
    assert_true(amaxes[0][3] > 0.0f && amaxes[0][0] > 0.0f && amaxes[0][1] == 0.0f);
    reference r = {.l = &l, .scope = l.io, .history = history};
    r.y = test_plain(l.io, TN_BF16, LAYER_M, LAYER_N);
    multiply(&r, TN_GEMM_FPROP, quantize.dst, l.weight[0], l.bias[0], r.y);
    expect_same(&r, "y", l.y, r.y);
    test_ops_close_host(&ops);
}

static void every_activation_is_its_op(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 2 * TN_ACTIVATION_COUNT; i++) {
        test_layer_config config = {.kind = TEST_NORM_MLP,
                                    .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
                                    .dtype = TN_BF16,
                                    .activation = (tn_activation)(i / 2),
                                    .gated = i % 2,
                                    .policy = TN_POLICY_KEEP};
        compare(&ops, &config);
    }
    test_ops_close_host(&ops);
}

/* Frozen weights, and nothing before the layer that wants a gradient. */
static void what_is_frozen_changes_no_other_gradient(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned i = 0; i < 24; i++) {
        const tn_format format = formats[i / 8];
        test_layer_config config = {.kind = i % 8 < 4 ? TEST_NORM_MLP : TEST_NORM_LINEAR,
                                    .format = {format, format},
                                    .dtype = TN_BF16,
                                    .frozen = i % 4,
                                    .has_no_dx = i % 4 == 1,
                                    .recompute = i % 8 == 2,
                                    .policy = TN_POLICY_UNTIL_LAST_USE};
        compare(&ops, &config);
    }
    test_ops_close_host(&ops);
}

/* act(h) is made again of the h that was saved, though nothing before h wants a gradient. */
static void an_activation_is_made_again_of_what_was_saved(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned i = 0; i < 18; i++) {
        test_layer_config config = {.kind = TEST_NORM_MLP,
                                    .format = {formats[i % 3], formats[i % 3]},
                                    .dtype = TN_BF16,
                                    .precision = (tn_backward_precision)(i / 3 % 3),
                                    .delay = i / 9,
                                    .frozen = 1,
                                    .has_no_dx = 1,
                                    .policy = TN_POLICY_KEEP};
        test_layer l = test_layer_open(&ops, &config);
        l.dbias[0] = (tn_tensor){0};
        EXPECT_OK(test_layer_forward(&l, ops.stream));
        EXPECT_OK(tn_tensor_destroy(l.saved.mlp.activated, ops.stream));
        l.saved.mlp.activated = (tn_tensor){0};
        l.config.recompute = 1;
        compare_backward(&l);
    }
    test_ops_close_host(&ops);
}

/* A backward with another stream, and the next weight's plane to derive there. */
static void back_with_side(test_layer *l, tn_tensor next, tn_stream side) {
    tn_linear_backward_args linear = test_linear_backward_args(l);
    tn_norm_linear_backward_args norm_linear = test_norm_linear_backward_args(l);
    tn_norm_mlp_backward_args mlp = test_norm_mlp_backward_args(l);
    const tn_stream stream = l->ops.stream;
    linear.common.next_weight = norm_linear.common.next_weight = mlp.common.next_weight = next;
    linear.common.side = norm_linear.common.side = mlp.common.side = side;
    if (l->config.kind == TEST_LINEAR)
        EXPECT_OK(tn_linear_backward(&linear, &l->saved.linear, NULL, stream));
    else if (l->config.kind == TEST_NORM_LINEAR)
        EXPECT_OK(tn_norm_linear_backward(&norm_linear, &l->saved.norm_linear, NULL, stream));
    else
        EXPECT_OK(tn_norm_mlp_backward(&mlp, &l->saved.mlp, NULL, stream));
}

/* Whose plane nobody reads has none: it would stay, and no stream would wait for it. */
static void a_plane_is_derived_only_where_a_product_reads_it(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_stream side;
    EXPECT_OK(tn_stream_create(ops.device, &side));
    for (int i = 0; i < 9; i++) {
        test_layer_config config = {.kind = (test_layer_kind)(i / 3),
                                    .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
                                    .dtype = TN_BF16,
                                    .activation = TN_ACTIVATION_GELU,
                                    .precision = (tn_backward_precision)(i % 3),
                                    .policy = TN_POLICY_KEEP};
        const int is_read = config.precision == TN_BACKWARD_AS_FORWARD;
        const tn_plane_state expected = is_read ? TN_PLANE_VALID : TN_PLANE_ABSENT;
        test_layer l = test_layer_open(&ops, &config), after = test_layer_open(&ops, &config);
        EXPECT_OK(test_layer_forward(&l, ops.stream));
        back_with_side(&l, after.weight[0], side);
        assert_int_equal(test_state(after.weight[0], TN_PLANE_COL), expected);
        for (int product = 0; product < test_layer_products(&l); product++)
            assert_int_equal(test_state(l.weight[product], TN_PLANE_COL), expected);
        EXPECT_OK(tn_device_synchronize(ops.device));
        EXPECT_OK(tn_scope_close(l.op));
        EXPECT_OK(tn_scope_close(l.saved_scope));
    }
    EXPECT_OK(tn_stream_destroy(ops.device, side));
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_is_its_ops),
        cmocka_unit_test(norm_linear_is_its_ops),
        cmocka_unit_test(norm_mlp_is_its_ops),
        cmocka_unit_test(a_weight_is_quantized_by_its_slot),
        cmocka_unit_test(every_activation_is_its_op),
        cmocka_unit_test(what_is_frozen_changes_no_other_gradient),
        cmocka_unit_test(an_activation_is_made_again_of_what_was_saved),
        cmocka_unit_test(a_plane_is_derived_only_where_a_product_reads_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
