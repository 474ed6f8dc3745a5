/* The layers on the emulated device: the bytes of the closed form, and the host's bits. */
#include <stdio.h>
#include <string.h>

#include "emulated_driver.h"
#include "emulator.h"
#include "gpu_support.h"
#include "scripted_cublaslt.h"
#include "tenure_lifetime.h"
#include "test_layers.h"

static gpu_side device, host;

/* On a scope of its own, which it closes. */
static test_ops open_on(const gpu_side *side) {
    test_ops ops = {side->device, side->stream, side->pool, side->scope};
    ops.scope = test_ops_scope(&ops, TN_SCOPE_MODEL, "layer");
    return ops;
}

enum { OUTPUTS = 8 };
static const char *const names[OUTPUTS] = {"y",         "dx",        "dgamma",  "dbeta",
                                           "dweight 1", "dweight 2", "dbias 1", "dbias 2"};

typedef struct results {
    gpu_copy copies[OUTPUTS];
    int is_there[OUTPUTS];
} results;

static results step_on(gpu_side *side, const test_layer_config *config) {
    const test_ops ops = open_on(side);
    test_layer l = test_layer_open(&ops, config);
    const tn_tensor outputs[OUTPUTS] = {l.y,          l.dx,         l.dgamma,   l.dbeta,
                                        l.dweight[0], l.dweight[1], l.dbias[0], l.dbias[1]};
    results of;
    EXPECT_OK(test_layer_forward(&l, ops.stream));
    EXPECT_OK(test_layer_backward(&l, ops.stream));
    EXPECT_OK(test_layer_weight_gradients(&l, ops.stream));
    for (int i = 0; i < OUTPUTS; i++) {
        of.is_there[i] = outputs[i].value != 0;
        if (of.is_there[i]) of.copies[i] = gpu_download(side, outputs[i], TN_PLANE_DATA);
    }
    EXPECT_OK(tn_scope_close(ops.scope));
    return of;
}

static const tn_format blocks = TN_FORMAT_FP8_BLOCK_2D;

static void expect_equal(results *on_device, results *on_host) {
    for (int o = 0; o < OUTPUTS; o++) {
        if (!on_host->is_there[o]) continue;
        gpu_count(names[o], gpu_copies_equal(&on_device->copies[o], &on_host->copies[o], names[o]));
        gpu_copy_end(&on_device->copies[o]), gpu_copy_end(&on_host->copies[o]);
    }
}

static void expect_the_hosts_bits(const test_layer_config *config) {
    results on_device = step_on(&device, config), on_host = step_on(&host, config);
    expect_equal(&on_device, &on_host);
}

static void a_step_has_the_hosts_bits(void **state) {
    (void)state;
    for (int i = 0; i < 12; i++) {
        test_layer_config config = {.kind = (test_layer_kind)(i % 3),
                                    .format = {i % 4 ? blocks : TN_FORMAT_PLAIN, blocks},
                                    .dtype = TN_BF16,
                                    .norm = (tn_norm)(i / 3 % 2),
                                    .activation = TN_ACTIVATION_SILU,
                                    .gated = i / 6,
                                    .precision = (tn_backward_precision)(i / 4),
                                    .recompute = i / 3 % 2,
                                    .delay = i / 6,
                                    .policy = TN_POLICY_SCRATCH};
        expect_the_hosts_bits(&config);
        config.format[0] = config.format[1] = TN_FORMAT_FP8_TENSOR;
        config.has_scales = i % 4 > 0;
        expect_the_hosts_bits(&config);
    }
    gpu_count_report("layers");
}

static int our_products;

static void count_ours(const char *kernel) {
    our_products += strncmp(kernel, "product_", strlen("product_")) == 0;
}

static void the_variable_pins_the_products_of_layers(void **state) {
    test_layer_config config = {
        .kind = TEST_NORM_MLP, .format = {blocks, blocks}, .dtype = TN_FP32};
    (void)state;
    for (int kind = 0; kind < TEST_LAYER_KINDS; kind++) {
        config.kind = (test_layer_kind)kind;
        const int products = scripted.products;
        our_products = 0;
        test_pin_engine("wgmma");
        results ours = step_on(&device, &config);
        test_pin_engine(NULL);
        assert_int_equal(scripted.products, products);
        assert_int_equal(our_products, kind == TEST_NORM_MLP ? 6 : 3);
        results expected = step_on(&host, &config);
        expect_equal(&ours, &expected);
    }
    gpu_count_report("layers by our own product");
}

static void a_pin_that_takes_no_such_products_is_refused(void **state) {
    static const tn_format formats[] = {TN_FORMAT_PLAIN, TN_FORMAT_FP8_TENSOR};
    (void)state;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const test_layer_config config = {
            .kind = TEST_LINEAR, .format = {formats[i], formats[i]}, .dtype = TN_BF16};
        const test_ops ops = open_on(&device);
        test_layer l = test_layer_open(&ops, &config);
        test_pin_engine("wgmma");
        EXPECT_STATUS(test_layer_forward(&l, ops.stream), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("TENURE_GEMM_ENGINE pins the engine wgmma, which does not take");
        test_pin_engine(NULL);
        EXPECT_OK(test_layer_forward(&l, ops.stream));
        EXPECT_OK(tn_scope_close(ops.scope));
    }
}

/* ---- what is refused is refused before anything is written ----------------------------------- */

/* A backward with gradients in bf16, which our own product can not add to. */
typedef struct backward_call {
    test_layer l;
    tn_linear_backward_args linear;
    tn_norm_linear_backward_args norm_linear;
    tn_norm_mlp_backward_args mlp;
} backward_call;

static backward_call open_backward(const test_layer_config *config, tn_dtype gradient) {
    const test_ops ops = open_on(&device);
    backward_call c = {.l = test_layer_open(&ops, config)};
    for (int i = 0; i < test_layer_products(&c.l); i++) {
        int64_t rows, cols;
        test_layer_shape(config, i, &rows, &cols);
        c.l.dweight[i] = test_plain(c.l.model, gradient, rows, cols);
        EXPECT_OK(tn_plane_fill(c.l.dweight[i], TN_PLANE_DATA, 0, ops.stream));
    }
    EXPECT_OK(tn_plane_fill(c.l.dx, TN_PLANE_DATA, 1, ops.stream));
    EXPECT_OK(test_layer_forward(&c.l, ops.stream));
    c.linear = test_linear_backward_args(&c.l);
    c.norm_linear = test_norm_linear_backward_args(&c.l);
    c.mlp = test_norm_mlp_backward_args(&c.l);
    return c;
}

static tn_status call_backward(backward_call *c) {
    test_layer_saved *saved = &c->l.saved;
    const tn_stream stream = c->l.ops.stream;
    if (c->l.config.kind == TEST_LINEAR)
        return tn_linear_backward(&c->linear, &saved->linear, NULL, stream);
    if (c->l.config.kind == TEST_NORM_LINEAR)
        return tn_norm_linear_backward(&c->norm_linear, &saved->norm_linear, NULL, stream);
    return tn_norm_mlp_backward(&c->mlp, &saved->mlp, NULL, stream);
}

static void expect_nothing_changed(const backward_call *c, const test_layer_saved *saved,
                                   const tn_ledger *before) {
    const tn_tensor outputs[] = {c->l.dx,       c->l.dweight[0], c->l.dweight[1], c->l.dbias[0],
                                 c->l.dbias[1], c->l.dgamma,     c->l.dbeta};
    const tn_ledger now = test_ledger(c->l.ops.scope);
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
        if (outputs[i].value == 0) continue;
        assert_int_equal(test_state(outputs[i], TN_PLANE_DATA), TN_PLANE_VALID);
        gpu_copy copy = gpu_download(&device, outputs[i], TN_PLANE_DATA);
        for (size_t b = 0; b < copy.layout.data_bytes; b++)
            assert_int_equal(copy.data[b], i == 0);
        gpu_copy_end(&copy);
    }
    test_expect_same_ledger(before, &now);
    assert_memory_equal(saved, &c->l.saved, sizeof *saved);
}

static void expect_refused(backward_call *c, tn_status status, const char *words) {
    const test_layer_saved saved = c->l.saved;
    const tn_ledger before = test_ledger(c->l.ops.scope);
    EXPECT_STATUS(call_backward(c), status);
    EXPECT_ERROR_HAS(words);
    expect_nothing_changed(c, &saved, &before);
}

static void a_pin_that_refuses_a_weights_gradient_changes_nothing(void **state) {
    (void)state;
    for (int i = 0; i < TEST_LAYER_KINDS * 2; i++) {
        const test_layer_config config = {.kind = (test_layer_kind)(i / 2),
                                          .format = {blocks, blocks},
                                          .dtype = TN_BF16,
                                          .policy = TN_POLICY_KEEP,
                                          .recompute = i % 2};
        backward_call c = open_backward(&config, TN_BF16);
        test_pin_engine("wgmma");
        expect_refused(&c, TN_UNSUPPORTED, "the engine wgmma is pinned, and does not take");
        test_pin_engine(NULL);
        EXPECT_OK(call_backward(&c));
        EXPECT_OK(tn_scope_close(c.l.ops.scope));
    }
}

/* A view from the second element on: it begins at no multiple of 16 bytes. */
static tn_tensor unaligned(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols,
                           unsigned char byte) {
    const int64_t shape[] = {rows, cols};
    const tn_tensor base = test_plain(ops->scope, dtype, rows * cols + 1, 1);
    tn_tensor elements, view;
    EXPECT_OK(tn_plane_fill(base, TN_PLANE_DATA, byte, ops->stream));
    EXPECT_OK(tn_tensor_view_rows(base, 1, rows * cols, ops->scope, &elements));
    EXPECT_OK(tn_tensor_view_shape(elements, 2, shape, ops->scope, &view));
    return view;
}

static const char not_aligned[] = "is not aligned to 16 bytes";

/* The operands of the weight's gradient, which is launched behind all else. */
static void an_unaligned_operand_of_a_gradient_changes_nothing(void **state) {
    (void)state;
    for (int i = 0; i < TEST_LAYER_KINDS * 2; i++) {
        const int of_dweight = i % 2;
        const test_layer_config config = {.kind = (test_layer_kind)(i / 2),
                                          .format = {TN_FORMAT_PLAIN, TN_FORMAT_PLAIN},
                                          .has_normed = 1,
                                          .dtype = TN_BF16,
                                          .policy = TN_POLICY_KEEP};
        backward_call c = open_backward(&config, TN_BF16);
        const test_ops *ops = &c.l.ops;
        const tn_tensor right = c.l.dweight[0];
        int64_t rows, cols;
        test_layer_shape(&config, 0, &rows, &cols);
        if (of_dweight) {
            c.l.dweight[0] = unaligned(ops, TN_BF16, rows, cols, 0);
            c.linear.gradient.dweight = c.l.dweight[0];
            c.norm_linear.gradient.dweight = c.mlp.gradient1.dweight = c.l.dweight[0];
        } else {
            c.linear.x = unaligned(ops, TN_BF16, LAYER_M, LAYER_K, 2);
            c.norm_linear.norm.normed = c.mlp.norm.normed = c.linear.x;
        }
        expect_refused(&c, TN_INVALID_ARGUMENT, not_aligned);
        c.linear.x = c.l.x, c.norm_linear.norm.normed = c.mlp.norm.normed = c.l.normed;
        c.linear.gradient.dweight = c.norm_linear.gradient.dweight = right;
        c.mlp.gradient1.dweight = right;
        EXPECT_OK(call_backward(&c));
        EXPECT_OK(tn_scope_close(c.l.ops.scope));
    }
}

/* What the product reads and writes behind a norm that has outputs of its own. */
static void an_unaligned_operand_of_a_forward_changes_nothing(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        const test_layer_config config = {.kind = i < 3 ? TEST_NORM_LINEAR : TEST_NORM_MLP,
                                          .format = {TN_FORMAT_PLAIN, TN_FORMAT_PLAIN},
                                          .has_residual = 1,
                                          .has_normed = 1,
                                          .dtype = TN_BF16,
                                          .policy = TN_POLICY_KEEP};
        const test_ops ops = open_on(&device);
        test_layer l = test_layer_open(&ops, &config);
        const test_layer right = l;
        const int last = test_layer_products(&l) - 1;
        int64_t rows, cols;
        test_layer_shape(&config, last, &rows, &cols);
        EXPECT_OK(tn_plane_fill(l.sum, TN_PLANE_DATA, 1, ops.stream));
        EXPECT_OK(tn_plane_fill(l.normed, TN_PLANE_DATA, 1, ops.stream));
        if (i % 3 == 0) l.y = unaligned(&ops, TN_BF16, LAYER_M, LAYER_N, 0);
        if (i % 3 == 1) l.weight[last] = unaligned(&ops, TN_BF16, rows, cols, 0);
        if (i % 3 == 2) l.bias[last] = unaligned(&ops, TN_BF16, 1, LAYER_N, 0);
        EXPECT_STATUS(test_layer_forward(&l, ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS(not_aligned);
        assert_int_equal(test_state(l.sum, TN_PLANE_DATA), TN_PLANE_VALID);
        assert_int_equal(test_state(l.normed, TN_PLANE_DATA), TN_PLANE_VALID);
        l.y = right.y, l.weight[last] = right.weight[last], l.bias[last] = right.bias[last];
        EXPECT_OK(test_layer_forward(&l, ops.stream));
        EXPECT_OK(tn_scope_close(ops.scope));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_has_the_hosts_bits),
        cmocka_unit_test(the_variable_pins_the_products_of_layers),
        cmocka_unit_test(a_pin_that_takes_no_such_products_is_refused),
        cmocka_unit_test(a_pin_that_refuses_a_weights_gradient_changes_nothing),
        cmocka_unit_test(an_unaligned_operand_of_a_gradient_changes_nothing),
        cmocka_unit_test(an_unaligned_operand_of_a_forward_changes_nothing),
    };
    char fault[EMULATED_FAULT_BYTES];
    scripted_cublaslt_begin();
    emulated_ran = count_ours;
    emulated_has_products = 1;
    gpu_open(&device);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&device);
    gpu_close(&host);
    emulated_take_fault(fault);
    if (fault[0]) printf("%s\n", fault);
    return failures + (fault[0] != 0);
}
