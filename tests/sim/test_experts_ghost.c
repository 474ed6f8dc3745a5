/* The experts' layer on the simulated device: the bytes of the closed form, as on the host, and
 * every wait between streams that its ranges need. */
#include "test_experts.h"

static void expect_no_races(void) {
    const test_sim *sim = test_sim_get();
    if (sim->race_count()) fail_msg("race: %s", sim->race_text(0));
}

static void bytes_are_those_of_the_closed_form(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_device *device = ops.device;
    test_experts_bytes(&ops);
    expect_no_races();
    test_ops_close(&ops);
    test_close_sim(device);
}

/* Forward, backward and the delayed gradients, each on another stream than the call before; planes
 * of weights come ahead on a third. */
static void alternate(const test_experts_config *config) {
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_device *device = ops.device;
    test_experts t = test_experts_open(&ops, config);
    tn_grouped_linear_forward_args forward = test_experts_forward(&t, 1);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    tn_stream streams[2] = {ops.stream}, side;
    EXPECT_OK(tn_stream_create(device, &streams[1]));
    EXPECT_OK(tn_stream_create(device, &side));
    backward.delay = 1, backward.saved_scope = t.saved, backward.experts.side = side;
    for (int i = 0; i < 5; i++) {
        tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
        tn_grouped_delayed delayed = TN_GROUPED_DELAYED_INIT;
        EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, streams[i % 2]));
        EXPECT_OK(tn_grouped_linear_backward(&backward, &saved, &delayed, streams[1 - i % 2]));
        EXPECT_OK(
            tn_grouped_linear_weight_gradient(&backward, &saved, &delayed, streams[i / 2 % 2]));
        assert_int_equal(test_ledger(t.saved).tensors, 0);
    }
    expect_no_races();
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_stream_destroy(device, streams[1]));
    EXPECT_OK(tn_stream_destroy(device, side));
    test_ops_close(&ops);
    test_close_sim(device);
}

static void steps_on_alternating_streams_have_no_races(void **state) {
    static const test_experts_config configs[] = {
        {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 1, TN_POLICY_SCRATCH, 0},
        {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0xF, TN_POLICY_UNTIL_LAST_USE, 0},
        {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 1, TN_POLICY_KEEP, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++)
        alternate(&configs[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_those_of_the_closed_form),
        cmocka_unit_test(steps_on_alternating_streams_have_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
