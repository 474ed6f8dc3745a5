/* A stack of frozen Linear layers on a GPU: columnwise weight copies that are released are gone,
 * to the byte, and the gradients have the same bits as with copies that are kept.
 */
#include "gpu_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 4, WIDTH = 512, TOKENS = 384, STEPS = 3 };

/* [WIDTH, WIDTH] bytes and one fp32 for each of its 4 x 4 tiles. */
static const size_t columnwise_bytes = (size_t)WIDTH * WIDTH + 4 * 4 * 4;

static gpu_side gpu;

typedef struct stack {
    tn_tensor weight[LAYERS];
    tn_tensor activation[LAYERS + 1]; /* x, and each layer's y */
    tn_tensor gradient[LAYERS + 1];   /* of each of those */
} stack;

static tn_tensor filled(int64_t rows, int64_t cols, uint64_t seed, float size) {
    float *values = malloc((size_t)(rows * cols) * sizeof *values);
    tn_tensor tensor = gpu_plain(&gpu, TN_FP32, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++)
        values[i] = size * gpu_normal(&seed);
    gpu_upload(&gpu, tensor, values);
    free(values);
    return tensor;
}

static tn_tensor make_weight(uint64_t seed, tn_plane_policy policy) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = filled(WIDTH, WIDTH, seed, 0.05f);
    args.dst = gpu_fp8(&gpu, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_SCALE_POW2, WIDTH, WIDTH);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    EXPECT_OK(tn_tensor_set_frozen(args.dst, 1));
    EXPECT_OK(tn_tensor_set_policy(args.dst, policy));
    gpu_destroy(&gpu, args.src);
    return args.dst;
}

static void open_stack(stack *of, tn_plane_policy policy) {
    for (int i = 0; i < LAYERS; i++)
        of->weight[i] = make_weight((uint64_t)i + 10, policy);
    of->activation[0] = filled(TOKENS, WIDTH, 1, 1.0f);
    of->gradient[LAYERS] = filled(TOKENS, WIDTH, 2, 1.0f);
    for (int i = 0; i < LAYERS; i++) {
        of->activation[i + 1] = gpu_plain(&gpu, TN_BF16, TOKENS, WIDTH);
        of->gradient[i] = gpu_plain(&gpu, TN_BF16, TOKENS, WIDTH);
    }
}

static void close_stack(stack *of) {
    for (int i = 0; i < LAYERS; i++)
        gpu_destroy(&gpu, of->weight[i]);
    for (int i = 0; i <= LAYERS; i++) {
        gpu_destroy(&gpu, of->activation[i]);
        gpu_destroy(&gpu, of->gradient[i]);
    }
}

static void forward(stack *of) {
    for (int i = 0; i < LAYERS; i++) {
        tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
        args.x = of->activation[i];
        args.weight = of->weight[i];
        args.y = of->activation[i + 1];
        args.scope = gpu.scope;
        EXPECT_OK(tn_linear_forward(&args, gpu.stream));
    }
}

static void backward(stack *of) {
    for (int i = LAYERS - 1; i >= 0; i--) {
        tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
        args.dy = of->gradient[i + 1];
        args.weight = of->weight[i];
        args.dx = of->gradient[i];
        args.scope = gpu.scope;
        EXPECT_OK(tn_linear_backward(&args, gpu.stream));
    }
}

static tn_ledger ledger(void) {
    tn_ledger of = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(gpu.scope, &of));
    EXPECT_OK(tn_ledger_check(gpu.pool));
    return of;
}

static size_t columnwise(const tn_ledger *of) {
    return of->data_bytes[TN_PLANE_COL] + of->scale_bytes[TN_PLANE_COL];
}

/* Columnwise bytes after forward, after backward, and their peak, are what is expected. */
static void run_steps(stack *of, size_t kept_bytes, size_t peak_bytes) {
    EXPECT_OK(tn_scope_ledger_reset_peaks(gpu.scope));
    for (int step = 0; step < STEPS; step++) {
        forward(of);
        tn_ledger after_forward = ledger();
        assert_int_equal(columnwise(&after_forward), step == 0 ? 0 : kept_bytes);
        backward(of);
        tn_ledger after_backward = ledger();
        assert_int_equal(columnwise(&after_backward), kept_bytes);
        assert_int_equal(after_backward.peak_plane_bytes[TN_PLANE_COL], peak_bytes);
        assert_int_equal(after_backward.leases, 0);
        printf("step %d: columnwise after backward %zu bytes, peak %zu\n", step,
               columnwise(&after_backward), after_backward.peak_plane_bytes[TN_PLANE_COL]);
    }
}

/* Not zero everywhere, and finite. */
static int is_a_gradient(const gpu_copy *copy) {
    double sum = 0.0;
    for (size_t i = 0; i < (size_t)TOKENS * WIDTH; i++)
        sum += fabs(gpu_value(TN_BF16, copy->data, i));
    return isfinite(sum) && sum > 0.0;
}

static void test_released_columnwise_copies_are_gone_and_change_no_bit(void **state) {
    stack kept, released;
    (void)state;
    open_stack(&kept, TN_POLICY_KEEP);
    run_steps(&kept, LAYERS * columnwise_bytes, LAYERS * columnwise_bytes);
    gpu_copy expected[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        expected[i] = gpu_download(&gpu, kept.gradient[i], TN_PLANE_DATA);
    close_stack(&kept);
    open_stack(&released, TN_POLICY_UNTIL_LAST_USE);
    run_steps(&released, 0, columnwise_bytes);
    for (int i = 0; i < LAYERS; i++) {
        gpu_copy actual = gpu_download(&gpu, released.gradient[i], TN_PLANE_DATA);
        gpu_count("gradient of a layer's input",
                  is_a_gradient(&actual) && gpu_copies_equal(&actual, &expected[i], "dx"));
        gpu_copy_end(&actual);
        gpu_copy_end(&expected[i]);
    }
    close_stack(&released);
    tn_ledger end = ledger();
    assert_int_equal(end.total_bytes, 0);
    gpu_count_report("4 frozen layers of 512 x 512");
}

/* The policy can change while the copies are there: the next backward lets go of them. */
static void test_a_policy_changed_later_takes_effect_in_the_next_backward(void **state) {
    stack of;
    (void)state;
    open_stack(&of, TN_POLICY_KEEP);
    forward(&of);
    backward(&of);
    tn_ledger before = ledger();
    assert_int_equal(columnwise(&before), LAYERS * columnwise_bytes);
    for (int i = 0; i < LAYERS; i++)
        EXPECT_OK(tn_tensor_set_policy(of.weight[i], TN_POLICY_UNTIL_LAST_USE));
    forward(&of);
    backward(&of);
    tn_ledger after = ledger();
    assert_int_equal(columnwise(&after), 0);
    assert_int_equal(before.total_bytes - after.total_bytes, LAYERS * columnwise_bytes);
    close_stack(&of);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_released_columnwise_copies_are_gone_and_change_no_bit),
        cmocka_unit_test(test_a_policy_changed_later_takes_effect_in_the_next_backward),
    };
    gpu_open(&gpu);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failures;
}
