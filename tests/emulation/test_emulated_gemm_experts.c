/* The experts' layer on the emulated device: the bytes of the closed form, and the host's bits. */
#include <stdio.h>
#include <string.h>

#include "emulator.h"
#include "gpu_support.h"
#include "scripted_cublaslt.h"
#include "tenure_lifetime.h"
#include "test_experts.h"

static gpu_side device, host;

/* On a scope of its own, which it closes. */
static test_ops open_on(const gpu_side *side) {
    test_ops ops = {side->device, side->stream, side->pool, side->scope};
    ops.scope = test_ops_scope(&ops, TN_SCOPE_MODEL, "mixture");
    return ops;
}

enum { OUTPUTS = 2 + 2 * EXPERTS };
typedef struct results {
    gpu_copy copies[OUTPUTS];
} results;

/* 0: gradients are added to; 1: delayed; 2: x again, and another type of dy; 3: planes of weights
 * are derived on another stream. */
enum { WAYS = 4 };

static results step_on(gpu_side *side, const test_experts_config *config, int way) {
    test_ops ops = open_on(side);
    test_experts t = test_experts_open(&ops, config);
    tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
    tn_grouped_delayed delayed = TN_GROUPED_DELAYED_INIT;
    tn_grouped_linear_forward_args forward = test_experts_forward(&t, way != 2);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    results of;
    test_experts_fill(&ops, t.y, 7), test_experts_fill(&ops, t.dx, 8);
    for (int e = 0; e < EXPERTS; e++)
        test_experts_fill(&ops, t.dweights[e], 9), test_experts_fill(&ops, t.dbiases[e], 10);
    backward.accumulate = way != 1, backward.delay = way == 1, backward.saved_scope = t.saved;
    if (way == 2) backward.x = t.x, backward.gradient_dtype = TN_E5M2;
    if (way == 3) EXPECT_OK(tn_stream_create(ops.device, &backward.experts.side));
    EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, ops.stream));
    EXPECT_OK(tn_grouped_linear_backward(&backward, &saved, &delayed, ops.stream));
    if (way == 1)
        EXPECT_OK(tn_grouped_linear_weight_gradient(&backward, &saved, &delayed, ops.stream));
    of.copies[0] = gpu_download(side, t.y, TN_PLANE_DATA);
    of.copies[1] = gpu_download(side, t.dx, TN_PLANE_DATA);
    for (int e = 0; e < EXPERTS; e++) {
        of.copies[2 + e] = gpu_download(side, t.dweights[e], TN_PLANE_DATA);
        of.copies[2 + EXPERTS + e] = gpu_download(side, t.dbiases[e], TN_PLANE_DATA);
    }
    EXPECT_OK(tn_scope_close(ops.scope));
    if (way == 3) {
        EXPECT_OK(tn_device_synchronize(ops.device));
        EXPECT_OK(tn_stream_destroy(ops.device, backward.experts.side));
    }
    return of;
}

static void a_step_has_the_hosts_bits(void **state) {
    static const test_experts_config configs[] = {
        {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_FP8_BLOCK_2D, TN_FP32, TN_SCALE_FP32, 0, TN_POLICY_SCRATCH, 0},
        {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_FP8_TENSOR, TN_FP32, TN_SCALE_FP32, 0, TN_POLICY_SCRATCH, 0},
        {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 1},
        {TN_FORMAT_PLAIN, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0}};
    enum { CONFIGS = sizeof configs / sizeof *configs };
    (void)state;
    for (int i = 0; i < CONFIGS * WAYS; i++) {
        char what[64];
        results on_device = step_on(&device, &configs[i % CONFIGS], i / CONFIGS);
        results on_host = step_on(&host, &configs[i % CONFIGS], i / CONFIGS);
        for (int o = 0; o < OUTPUTS; o++) {
            snprintf(what, sizeof what, "config %d way %d output %d", i % CONFIGS, i / CONFIGS, o);
            gpu_count(o == 0            ? "y"
                      : o == 1          ? "dx"
                      : o < 2 + EXPERTS ? "dweights"
                                        : "dbiases",
                      gpu_copies_equal(&on_device.copies[o], &on_host.copies[o], what));
            gpu_copy_end(&on_device.copies[o]), gpu_copy_end(&on_host.copies[o]);
        }
    }
    gpu_count_report("experts");
}

static void bytes_are_those_of_the_closed_form(void **state) {
    (void)state;
    test_ops ops = open_on(&device);
    test_experts_bytes(&ops);
    EXPECT_OK(tn_scope_close(ops.scope));
}

/* ---- what the device does not take ----------------------------------------------------------- */

/* Of fp32, from the second element of another on. */
static tn_tensor unaligned(const test_ops *ops, int64_t rows, int64_t cols, uint32_t seed) {
    const int64_t shape[] = {rows, cols};
    tn_tensor base = test_plain(ops->scope, TN_FP32, rows * cols + 1, 1), elements, view;
    test_experts_fill(ops, base, seed);
    EXPECT_OK(tn_tensor_view_rows(base, 1, rows * cols, ops->scope, &elements));
    EXPECT_OK(tn_tensor_view_shape(elements, 2, shape, ops->scope, &view));
    return view;
}

typedef enum place { AT_Y, AT_BACKWARD, AT_DX = AT_BACKWARD, AT_WEIGHT, AT_DWEIGHT, PLACES } place;

/* One operand of a mixture with PLAIN weights, which is not of the first group's. */
static void put_unaligned(const test_ops *ops, test_experts *t, place where) {
    const int64_t rows = EXPERTS_ROWS + EXPERTS_SPARE;
    if (where == AT_Y) t->y = unaligned(ops, rows, EXPERTS_N, 20);
    if (where == AT_DX) t->dx = unaligned(ops, rows, EXPERTS_K, 21);
    if (where == AT_WEIGHT) t->weights[4] = unaligned(ops, EXPERTS_N, EXPERTS_K, 22);
    if (where == AT_DWEIGHT) t->dweights[3] = unaligned(ops, EXPERTS_N, EXPERTS_K, 23);
}

static int outputs_of(const test_experts *t, tn_tensor outputs[OUTPUTS]) {
    outputs[0] = t->y, outputs[1] = t->dx;
    for (int e = 0; e < EXPERTS; e++)
        outputs[2 + e] = t->dweights[e], outputs[2 + EXPERTS + e] = t->dbiases[e];
    return OUTPUTS;
}

static void expect_untouched(place where, int accumulate) {
    static const test_experts_config plain = {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, 0,
                                              TN_POLICY_KEEP,  0};
    test_ops ops = open_on(&device);
    test_experts t = test_experts_open(&ops, &plain);
    tn_tensor outputs[OUTPUTS];
    gpu_copy before[OUTPUTS];
    put_unaligned(&ops, &t, where);
    const int count = outputs_of(&t, outputs);
    for (int i = 0; i < count; i++) {
        test_experts_fill(&ops, outputs[i], 30 + (uint32_t)i);
        before[i] = gpu_download(&device, outputs[i], TN_PLANE_DATA);
    }
    tn_grouped_linear_forward_args forward = test_experts_forward(&t, 0);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    backward.accumulate = accumulate;
    EXPECT_STATUS(where < AT_BACKWARD
                      ? tn_grouped_linear_forward(&forward, NULL, ops.stream)
                      : tn_grouped_linear_backward(&backward, NULL, NULL, ops.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("not aligned to 16 bytes");
    for (int i = 0; i < count; i++) {
        assert_int_equal(test_state(outputs[i], TN_PLANE_DATA), TN_PLANE_VALID);
        gpu_copy after = gpu_download(&device, outputs[i], TN_PLANE_DATA);
        assert_true(gpu_copies_equal(&after, &before[i], "an output"));
        gpu_copy_end(&after), gpu_copy_end(&before[i]);
    }
    EXPECT_OK(tn_scope_close(ops.scope));
}

/* Of whichever group: no output of any group, nor of an earlier step, is changed by then. */
static void an_unaligned_view_is_refused_before_anything_is_written(void **state) {
    (void)state;
    for (place where = AT_Y; where < PLACES; where++)
        for (int accumulate = 0; accumulate < 2; accumulate++)
            expect_untouched(where, accumulate);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_has_the_hosts_bits),
        cmocka_unit_test(bytes_are_those_of_the_closed_form),
        cmocka_unit_test(an_unaligned_view_is_refused_before_anything_is_written),
    };
    char fault[EMULATED_FAULT_BYTES];
    scripted_cublaslt_begin();
    gpu_open(&device);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&device);
    gpu_close(&host);
    emulated_take_fault(fault);
    if (fault[0]) printf("%s\n", fault);
    return failures + (fault[0] != 0);
}
