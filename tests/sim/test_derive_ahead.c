/* What it costs to let go of frozen weights' columnwise planes when the next one is derived on a
 * side stream: driver calls of a layer, and device time, which is that of keeping them all.
 *
 * Everything is a difference of two runs, one of which has a step, or a layer, more.
 */
#include <string.h>

#include "op_call.h"
#include "test_frozen.h"

enum { TOKENS = 4096, WIDTH = 4096, LAYERS = 5, STEPS = 3 };

typedef struct way {
    tn_plane_policy policy;
    int derives_ahead;
    int scratch_buffers;
} way;

static const way keep = {TN_POLICY_KEEP, 1, 0};

typedef struct cost {
    uint64_t calls[TN_CALL_COUNT];
    double us; /* of the device, from the first call to the end of all work */
} cost;

/* A device of the test's own: every run begins at the same time of its clock. */
static cost cost_of(const way *how, int layers, int steps) {
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    frozen_config config = {.layers = layers,
                            .steps = steps,
                            .tokens = TOKENS,
                            .width = WIDTH,
                            .policy = how->policy,
                            .derives_ahead = how->derives_ahead,
                            .scratch_buffers = how->scratch_buffers};
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    frozen_result result;
    cost out = {.us = 0};
    frozen_run(&ops, &config, &result);
    EXPECT_OK(tn_device_synchronize(ops.device));
    out.us = test_sim_get()->now_us();
    EXPECT_OK(tn_device_driver_stats(ops.device, &stats));
    memcpy(out.calls, stats.calls, sizeof out.calls);
    frozen_result_free(&result);
    test_ops_close(&ops);
    test_close_sim(ops.device); /* fails if there were races */
    return out;
}

static cost less(const cost *a, const cost *b) {
    cost out = {.us = a->us - b->us};
    for (int call = 0; call < TN_CALL_COUNT; call++)
        out.calls[call] = a->calls[call] - b->calls[call];
    return out;
}

/* Of one more step, when all memory has found its place. */
static cost warm_step(const way *how, int layers) {
    cost more = cost_of(how, layers, STEPS + 1), fewer = cost_of(how, layers, STEPS);
    return less(&more, &fewer);
}

/* Of one more layer in such a step. */
static cost warm_layer(const way *how) {
    cost more = warm_step(how, LAYERS + 1), fewer = warm_step(how, LAYERS);
    return less(&more, &fewer);
}

/* In forward a cast and a product, and in backward. */
enum { LAUNCHES = 4 };

static void expect_calls(const way *how, uint64_t derivations, uint64_t waits, uint64_t asks) {
    const cost layer = warm_layer(how);
    for (int call = 0; call < TN_CALL_COUNT; call++) {
        uint64_t expected = 0;
        if (call == TN_CALL_LAUNCH) expected = LAUNCHES + derivations;
        if (call == TN_CALL_EVENT_RECORD || call == TN_CALL_STREAM_WAIT) expected = waits;
        if (call == TN_CALL_STREAM) expected = asks;
        if (layer.calls[call] == expected) continue;
        fail_msg("policy %d: a layer more makes %llu calls of %s, not %llu", (int)how->policy,
                 (unsigned long long)layer.calls[call], tn_driver_call_name((tn_driver_call)call),
                 (unsigned long long)expected);
    }
}

/* The side stream waits for what dgrad waits for, dgrad of the next layer for the side stream: two
 * events. The pool adds none, since it is told of the first wait. A slot waits once more for its
 * buffer's last reader. The rest are questions whether a stream captures. */
static void a_layer_costs_two_events_and_one_derivation(void **state) {
    (void)state;
    expect_calls(&keep, 0, 0, 0);
    expect_calls(&(way){TN_POLICY_UNTIL_LAST_USE, 0, 0}, 1, 0, 0);
    expect_calls(&(way){TN_POLICY_UNTIL_LAST_USE, 1, 0}, 1, 2, 4);
    expect_calls(&(way){TN_POLICY_SCRATCH, 0, 1}, 1, 0, 1);
    expect_calls(&(way){TN_POLICY_SCRATCH, 1, 2}, 1, 3, 10);
}

static uint64_t waits_of(tn_device *device) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(device, &stats));
    return stats.calls[TN_CALL_STREAM_WAIT];
}

static tn_tensor weight_with_row(const test_ops *ops) {
    tn_tensor weight = {0};
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = config.shape[1] = WIDTH;
    config.policy = TN_POLICY_UNTIL_LAST_USE;
    EXPECT_OK(tn_tensor_create(ops->scope, &config, &weight));
    EXPECT_OK(tn_plane_fill(weight, TN_PLANE_ROW, 0, ops->stream));
    return weight;
}

/* So the wait is where it is asked for, and not where the plane is read. */
static void a_plane_is_waited_for_once_and_before_it_is_leased(void **state) {
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_tensor weight = weight_with_row(&ops);
    tn__op_call call = tn__op_begin("test", ops.stream);
    tn_plane_state plane = TN_PLANE_VALID;
    tn_stream side = NULL;
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    EXPECT_OK(tn_stream_create(ops.device, &side));
    EXPECT_OK(tn__op_await(&call, weight, TN_PLANE_COL));
    EXPECT_OK(tn_plane_state_get(weight, TN_PLANE_COL, &plane));
    assert_int_equal(plane, TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_require(weight, TN_PLANE_COL, side));
    const uint64_t before = waits_of(ops.device);
    EXPECT_OK(tn__op_await(&call, weight, TN_PLANE_COL));
    assert_int_equal(waits_of(ops.device), before + 1);
    EXPECT_OK(tn_lease_begin(weight, TN_PLANE_COL, TN_READ, ops.stream, &lease, &view));
    assert_int_equal(waits_of(ops.device), before + 1);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_tensor_destroy(weight, ops.stream));
    EXPECT_OK(tn_stream_destroy(ops.device, side));
    test_ops_close(&ops);
    test_close_sim(ops.device);
}

/* Each derivation runs beside a product: it starts when the product does, and nothing that comes
 * after waits for its end, which is earlier. So the step ends when it does with all planes kept;
 * without a side stream every layer's derivation is on the way. */
static void a_step_takes_as_long_as_with_all_planes_kept(void **state) {
    static const way ways[] = {{TN_POLICY_UNTIL_LAST_USE, 1, 0}, {TN_POLICY_SCRATCH, 1, 2}};
    const double nothing_us = 1e-6;
    const cost kept = warm_step(&keep, LAYERS);
    const cost inline_step = warm_step(&(way){TN_POLICY_UNTIL_LAST_USE, 0, 0}, LAYERS);
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const cost released = warm_step(&ways[i], LAYERS);
        if (released.us - kept.us < nothing_us && kept.us - released.us < nothing_us) continue;
        fail_msg("policy %d: a step takes %.3f us, and %.3f us with all planes kept",
                 (int)ways[i].policy, released.us, kept.us);
    }
    assert_true(inline_step.us > kept.us + LAYERS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layer_costs_two_events_and_one_derivation),
        cmocka_unit_test(a_plane_is_waited_for_once_and_before_it_is_leased),
        cmocka_unit_test(a_step_takes_as_long_as_with_all_planes_kept),
    };
    return cmocka_run_group_tests_name("sim/derive_ahead", tests, NULL, NULL);
}
