/* The experts' layer with every driver call and every host allocation failing in turn, once and
 * from then on, in each of its three calls. A call that fails leaves what was saved, and no byte of
 * its own; each output is what it was, or not valid if work may have touched it. With those filled
 * again, the same call and all that follow it give the bits of a step without a failure. With
 * weights of FP8_TENSOR scaling is delayed, and planes are derived ahead on another stream.
 */
#include "fault_loop_support.h"
#include "test_experts.h"

#include <stdlib.h>
#include <string.h>

enum { UNKNOWN_ERROR = 999, FORWARD = 0, BACKWARD, LATE, CALLS };
enum { OUTPUTS = 2 + 2 * EXPERTS };

typedef struct scenario {
    test_experts_config config;
    int is_sim;
    int which; /* call fails */
} scenario;

/* Everything of one step; outputs: y, dx, then dweights and dbiases. */
typedef struct step {
    test_ops ops;
    test_experts t;
    tn_grouped_linear_forward_args forward;
    tn_grouped_linear_backward_args backward;
    tn_grouped_saved saved;
    tn_grouped_delayed delayed;
    tn_tensor outputs[OUTPUTS];
} step;

static void fill_output(const step *s, int i) {
    test_experts_fill(&s->ops, s->outputs[i], 500 + (uint32_t)i);
}

/* dx is made by its call, all else is there before. */
static void begin(step *s, const scenario *of) {
    s->ops = of->is_sim ? test_ops_open(test_open_sim(0, 0)) : test_ops_open_host();
    s->t = test_experts_open(&s->ops, &of->config);
    s->forward = test_experts_forward(&s->t, 1);
    s->backward = test_experts_backward(&s->t);
    s->backward.accumulate = s->backward.delay = 1, s->backward.saved_scope = s->t.saved;
    if (of->config.format == TN_FORMAT_FP8_TENSOR)
        EXPECT_OK(tn_stream_create(s->ops.device, &s->backward.experts.side));
    s->outputs[0] = s->t.y, s->outputs[1] = s->t.dx;
    for (int e = 0; e < EXPERTS; e++)
        s->outputs[2 + e] = s->t.dweights[e], s->outputs[2 + EXPERTS + e] = s->t.dbiases[e];
    for (int i = 0; i < OUTPUTS; i++)
        if (i != 1) fill_output(s, i);
}

static void end(step *s, const scenario *of) {
    tn_device *device = s->ops.device;
    if (s->backward.experts.side) {
        EXPECT_OK(tn_device_synchronize(device));
        EXPECT_OK(tn_stream_destroy(device, s->backward.experts.side));
    }
    if (!of->is_sim) {
        test_ops_close_host(&s->ops);
        return;
    }
    test_ops_close(&s->ops);
    test_close_sim(device);
}

static tn_status call(step *s, int which) {
    switch (which) {
    case FORWARD: return tn_grouped_linear_forward(&s->forward, &s->saved, s->ops.stream);
    case BACKWARD:
        return tn_grouped_linear_backward(&s->backward, &s->saved, &s->delayed, s->ops.stream);
    default:
        return tn_grouped_linear_weight_gradient(&s->backward, &s->saved, &s->delayed,
                                                 s->ops.stream);
    }
}

/* ---- results --------------------------------------------------------------------------------- */

static size_t output_bytes(const step *s, int i) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(s->outputs[i], TN_PLANE_DATA, &layout));
    return layout.data_bytes;
}

/* Rows of y and dx that no expert has are not the step's: dx's were never written. */
static size_t result_bytes(const step *s, int i) {
    return i < 2 ? output_bytes(s, i) / (EXPERTS_ROWS + EXPERTS_SPARE) * EXPERTS_ROWS
                 : output_bytes(s, i);
}

static unsigned char *results[OUTPUTS]; /* of a step without a failure */

static void take_results(const scenario *of) {
    step s = {.saved = TN_GROUPED_SAVED_INIT};
    begin(&s, of);
    for (int which = 0; which < CALLS; which++)
        EXPECT_OK(call(&s, which));
    for (int i = 0; i < OUTPUTS; i++) {
        results[i] = malloc(output_bytes(&s, i));
        test_read(&s.ops, s.outputs[i], results[i]);
    }
    end(&s, of);
}

static void drop_results(void) {
    for (int i = 0; i < OUTPUTS; i++)
        free(results[i]);
}

static void expect_results(const step *s) {
    for (int i = 0; i < OUTPUTS; i++) {
        unsigned char *bytes = malloc(output_bytes(s, i));
        test_read(&s->ops, s->outputs[i], bytes);
        assert_memory_equal(bytes, results[i], result_bytes(s, i));
        free(bytes);
    }
}

/* ---- one failure ----------------------------------------------------------------------------- */

typedef struct moment {
    tn_ledger ledger;
    tn_grouped_saved saved;
    tn_grouped_delayed delayed;
    tn_plane_state states[OUTPUTS];
} moment;

static moment now(const step *s) {
    moment m = {.ledger = test_ledger(s->ops.scope), .saved = s->saved, .delayed = s->delayed};
    for (int i = 0; i < OUTPUTS; i++)
        m.states[i] = test_state(s->outputs[i], TN_PLANE_DATA);
    return m;
}

/* An output that was valid and still is has the bytes that it had. */
static void expect_bytes_before(const step *s, const scenario *of, int i) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    if (of->is_sim || (i == 0 && of->which != FORWARD)) return;
    if (i >= 2 + EXPERTS && of->which == LATE) return;
    EXPECT_OK(tn_tensor_info_get(s->outputs[i], &info));
    float *values = malloc(output_bytes(s, i));
    test_read(&s->ops, s->outputs[i], values);
    for (int64_t at = 0; at < info.rows * info.cols; at++)
        assert_true(values[at] == test_experts_value(500 + (uint32_t)i, at));
    free(values);
}

static void expect_as_before(const step *s, const scenario *of, const moment *before) {
    moment after = now(s);
    test_expect_same_ledger(&before->ledger, &after.ledger);
    assert_memory_equal(&after.saved, &before->saved, sizeof after.saved);
    assert_memory_equal(&after.delayed, &before->delayed, sizeof after.delayed);
    assert_int_equal(test_ledger(s->t.op).tensors, 0);
    for (int i = 0; i < OUTPUTS; i++) {
        if (before->states[i] != TN_PLANE_VALID || after.states[i] != TN_PLANE_VALID) {
            assert_true(after.states[i] != TN_PLANE_VALID);
            continue;
        }
        if (i == 1 && of->which == LATE) continue; /* dx is the call's before */
        expect_bytes_before(s, of, i);
    }
}

/* Amaxes are collected again. Only a driver that refuses all from then on leaves them not valid. */
static void expect_amaxes(const step *s, const fault_point *fault) {
    static const float nothing[EXPERTS_HISTORY * EXPERTS_SLOTS];
    if (!s->t.config.has_scales || test_state(s->t.history, TN_PLANE_DATA) == TN_PLANE_VALID)
        return;
    assert_true(!fault->is_host && fault->and_after);
    test_write(&s->ops, s->t.history, nothing);
}

static void fill_again(const step *s, const moment *before) {
    for (int i = 0; i < OUTPUTS; i++)
        if (before->states[i] == TN_PLANE_VALID &&
            test_state(s->outputs[i], TN_PLANE_DATA) != TN_PLANE_VALID)
            fill_output(s, i);
}

static int run_with_fault(const void *argument, fault_point *fault) {
    const scenario *of = argument;
    step s = {.saved = TN_GROUPED_SAVED_INIT};
    begin(&s, of);
    for (int which = 0; which < of->which; which++)
        EXPECT_OK(call(&s, which));
    moment before = now(&s);
    fault_begin(fault);
    tn_status status = call(&s, of->which);
    fault_end(fault);
    if (status != TN_OK) {
        assert_int_equal(status, fault->is_host ? TN_OUT_OF_HOST_MEMORY : TN_DRIVER_ERROR);
        expect_as_before(&s, of, &before);
        expect_amaxes(&s, fault);
        fill_again(&s, &before);
    }
    assert_int_equal(test_ledger(s.ops.scope).leases, 0);
    EXPECT_OK(tn_ledger_check(s.ops.pool));
    for (int which = of->which + (status == TN_OK); which < CALLS; which++)
        EXPECT_OK(call(&s, which));
    if (!of->is_sim) expect_results(&s);
    assert_int_equal(test_ledger(s.t.saved).tensors, 0);
    end(&s, of);
    return status != TN_OK;
}

static int fail_each(fault_point fault, int is_sim) {
    static const test_experts_config configs[] = {
        {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
        {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 1},
        {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0}};
    int failed = 0;
    for (int i = 0; i < 3; i++) {
        scenario s = {configs[i], is_sim, 0};
        if (!is_sim) take_results(&s);
        for (s.which = FORWARD; s.which < CALLS; s.which++)
            for (fault.and_after = 0; fault.and_after < 2; fault.and_after++)
                failed += fault_each(fault, run_with_fault, &s);
        if (!is_sim) drop_results();
    }
    return failed;
}

static void every_host_allocation_on_the_host_device(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.is_host = 1}, 0) > 50);
}

static void every_host_allocation_on_the_simulated_device(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.is_host = 1}, 1) > 50);
}

static void every_driver_call(void **state) {
    (void)state;
    assert_true(fail_each((fault_point){.code = UNKNOWN_ERROR}, 1) > 200);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_host_allocation_on_the_host_device),
        cmocka_unit_test(every_host_allocation_on_the_simulated_device),
        cmocka_unit_test(every_driver_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
