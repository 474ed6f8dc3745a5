/* The layers on the emulated device: the bytes of the closed form, and the host's bits. */
#include <stdio.h>
#include <string.h>

#include "emulated_driver.h"
#include "emulator.h"
#include "gpu_support.h"
#include "scripted_cublaslt.h"
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_has_the_hosts_bits),
        cmocka_unit_test(the_variable_pins_the_products_of_layers),
        cmocka_unit_test(a_pin_that_takes_no_such_products_is_refused),
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
