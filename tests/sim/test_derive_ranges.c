/* What a derivation touches on the simulated device: exactly the data and scales of both planes,
 * so that a reader or writer elsewhere without an order is a race, and one with an order is none.
 */
#include "test_ops.h"

#include "driver.h"

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_TENSOR};

/* Derives COL on the stream; then a kernel on another stream touches `bytes` at one part of a
 * plane. Races seen. */
static uint64_t races_with(tn_format format, tn_plane plane, int is_scale, int is_write,
                           int is_ordered) {
    const test_sim *sim = test_sim_get();
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_tensor tensor = test_fp8(ops.scope, format, TN_E4M3, 300, 500);
    tn_transpose_args transpose = TN_TRANSPOSE_ARGS_INIT;
    tn_stream other;
    tn_plane_view view;
    tn_lease lease;
    transpose.tensor = tensor;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    test_declare_valid(&ops, tensor, TN_PLANE_ROW);
    EXPECT_OK(tn_stream_synchronize(ops.device, ops.stream));
    EXPECT_OK(tn_transpose(&transpose, ops.stream));
    if (is_ordered) EXPECT_OK(tn_stream_wait(ops.device, other, ops.stream));
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, ops.stream, &lease, &view));
    tn__range range = {is_scale ? view.scale : view.data,
                       is_scale ? view.layout.scale_bytes : view.layout.data_bytes, is_write};
    EXPECT_OK(tn__device_driver(ops.device)
                  ->ghost_launch(tn__device_state(ops.device), "other", &range, 1, 5.0, other));
    EXPECT_OK(tn_lease_end(lease));
    uint64_t races = sim->race_count();
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    test_ops_close(&ops);
    EXPECT_OK(tn_device_destroy(ops.device)); /* test_close_sim would fail for the races */
    return races;
}

static void a_derivation_reads_the_source_and_writes_the_target(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++) {
        for (int is_scale = 0; is_scale < 2; is_scale++) {
            assert_true(races_with(formats[f], TN_PLANE_COL, is_scale, 0, 0) > 0);
            assert_true(races_with(formats[f], TN_PLANE_ROW, is_scale, 1, 0) > 0);
            assert_int_equal(races_with(formats[f], TN_PLANE_ROW, is_scale, 0, 0), 0);
            assert_int_equal(races_with(formats[f], TN_PLANE_COL, is_scale, 1, 1), 0);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_derivation_reads_the_source_and_writes_the_target),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
