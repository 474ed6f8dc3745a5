/* The layers on the simulated device: bytes as on the host after each call, and no races. */
#include "test_layers.h"

static void the_ghost_keeps_the_same_bytes_alive(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    assert_int_equal(test_layer_bytes(&ops, 1, 0), 960);
    test_ops_close(&ops);
    test_close_sim(ops.device); /* fails if there were races */
}

/* Forward, backward and the update of scales, each on another stream than the call before: the
 * amaxes that one collects and the factors that the next one reads. */
static void delayed_scaling_on_alternating_streams_has_no_races(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    const test_layer_config config = {.kind = TEST_NORM_MLP,
                                      .format = {TN_FORMAT_FP8_TENSOR, TN_FORMAT_FP8_TENSOR},
                                      .dtype = TN_BF16,
                                      .policy = TN_POLICY_KEEP,
                                      .has_no_values = 1,
                                      .has_scales = 1};
    test_layer l = test_layer_open(&ops, &config);
    tn_scale_update_args update = TN_SCALE_UPDATE_ARGS_INIT;
    tn_stream streams[2] = {ops.stream};
    EXPECT_OK(tn_stream_create(ops.device, &streams[1]));
    update.amax_history = l.history, update.scale = l.scale;
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(test_layer_forward(&l, streams[i % 2]));
        assert_int_equal(test_ledger(l.saved_scope).total_bytes, test_layer_saved_bytes(&config));
        EXPECT_OK(test_layer_backward(&l, streams[1 - i % 2]));
        assert_int_equal(test_ledger(l.saved_scope).total_bytes, 0);
        EXPECT_OK(tn_scale_update(&update, streams[i % 2]));
    }
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_stream_destroy(ops.device, streams[1]));
    test_ops_close(&ops);
    test_close_sim(ops.device); /* fails if there were races */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ghost_keeps_the_same_bytes_alive),
        cmocka_unit_test(delayed_scaling_on_alternating_streams_has_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
