/* The gradients of every layer against central differences, in fp32 on the host: of x, the weights
 * and biases, gamma and beta, for each norm and activation. */
#include "test_layers.h"

#include <math.h>
#include <stdlib.h>

/* A layer whose parameters are moved a little, and the sum of y * dy that its gradients are of. */
typedef struct probe {
    test_layer l;
    size_t y_count;
    float *y, *dy;
} probe;

static size_t count_of(tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    return (size_t)(info.rows * info.cols);
}

static float *fetch(const probe *p, tn_tensor tensor) {
    float *values = calloc(count_of(tensor), sizeof *values);
    assert_non_null(values);
    test_read(&p->l.ops, tensor, values);
    return values;
}

/* Nothing is saved: the forward of inference. */
static double objective(probe *p) {
    const tn_scope saved = p->l.saved_scope;
    double sum = 0.0;
    p->l.saved_scope = (tn_scope){0};
    EXPECT_OK(test_layer_forward(&p->l, p->l.ops.stream));
    p->l.saved_scope = saved;
    test_read(&p->l.ops, p->l.y, p->y);
    for (size_t i = 0; i < p->y_count; i++)
        sum += (double)p->y[i] * (double)p->dy[i];
    return sum;
}

/* A large step errs by the curvature and by kinks that it crosses, a small one by fp32's rounding,
 * which is some 1e-6 of a sum of some thousand terms of size 1: one of them must agree. */
static const float steps[] = {0x1p-7f, 0x1p-9f, 0x1p-11f};
enum { PROBED = 6, STEPS = sizeof steps / sizeof *steps };

static double difference(probe *p, tn_tensor parameter, float *values, size_t i, float step) {
    const float value = values[i];
    values[i] = value + step;
    test_write(&p->l.ops, parameter, values);
    double sum = objective(p);
    values[i] = value - step;
    test_write(&p->l.ops, parameter, values);
    sum -= objective(p);
    values[i] = value;
    return sum / (2.0 * (double)step);
}

static void expect_gradient(probe *p, const char *what, tn_tensor parameter, tn_tensor gradient) {
    if (parameter.value == 0 || gradient.value == 0) return;
    const size_t count = count_of(parameter);
    float *values = fetch(p, parameter), *actual = fetch(p, gradient);
    for (size_t n = 0; n < PROBED; n++) {
        const size_t i = n * (count - 1) / (PROBED - 1);
        double off = INFINITY, expected = 0.0;
        for (int s = 0; s < STEPS && off > 0.0; s++) {
            expected = difference(p, parameter, values, i, steps[s]);
            if (fabs((double)actual[i] - expected) <= 5e-2 + 1e-2 * fabs(expected)) off = 0.0;
        }
        if (off > 0.0)
            fail_msg("%s[%zu] of activation %d: %g, differences say %g", what, i,
                     (int)p->l.config.activation, (double)actual[i], expected);
    }
    test_write(&p->l.ops, parameter, values);
    free(values), free(actual);
}

static void check(const test_ops *ops, const test_layer_config *config) {
    probe p = {.l = test_layer_open(ops, config)};
    test_layer *l = &p.l;
    p.y_count = count_of(l->y);
    p.y = calloc(p.y_count, sizeof *p.y);
    p.dy = fetch(&p, l->dy);
    assert_non_null(p.y);
    EXPECT_OK(test_layer_forward(l, ops->stream));
    EXPECT_OK(test_layer_backward(l, ops->stream));
    const tn_tensor added = l->added; /* its part of dx is not of this layer */
    if (added.value) {
        tn_axpy_args take = TN_AXPY_ARGS_INIT;
        take.x = added, take.y = l->dx, take.alpha = -1.0f;
        EXPECT_OK(tn_axpy(&take, ops->stream));
    }
    expect_gradient(&p, "dx", l->x, l->dx);
    expect_gradient(&p, "residual's", l->residual, l->dx);
    expect_gradient(&p, "dgamma", l->gamma, l->dgamma);
    expect_gradient(&p, "dbeta", l->beta, l->dbeta);
    for (int i = 0; i < test_layer_products(l); i++) {
        expect_gradient(&p, i ? "dweight2" : "dweight1", l->weight[i], l->dweight[i]);
        expect_gradient(&p, i ? "dbias2" : "dbias1", l->bias[i], l->dbias[i]);
    }
    free(p.y), free(p.dy);
    EXPECT_OK(tn_scope_close(l->op));
    EXPECT_OK(tn_scope_close(l->saved_scope));
    EXPECT_OK(tn_scope_close(l->io));
    EXPECT_OK(tn_scope_close(l->model));
}

static void linear_has_the_gradients_of_differences(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    const test_layer_config config = {.kind = TEST_LINEAR};
    check(&ops, &config);
    test_ops_close_host(&ops);
}

static void norm_linear_has_the_gradients_of_differences(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 4; i++) {
        const test_layer_config config = {.kind = TEST_NORM_LINEAR,
                                          .norm = (tn_norm)(i % 2),
                                          .has_residual = i / 2,
                                          .recompute = i / 2};
        check(&ops, &config);
    }
    test_ops_close_host(&ops);
}

static void norm_mlp_has_the_gradients_of_differences(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 2 * TN_ACTIVATION_COUNT; i++) {
        const test_layer_config config = {.kind = TEST_NORM_MLP,
                                          .norm = (tn_norm)(i / 2 % 2),
                                          .activation = (tn_activation)(i / 2),
                                          .gated = i % 2,
                                          .recompute = i / 4 % 2};
        check(&ops, &config);
    }
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_has_the_gradients_of_differences),
        cmocka_unit_test(norm_linear_has_the_gradients_of_differences),
        cmocka_unit_test(norm_mlp_has_the_gradients_of_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
