/* Grouped ops on the simulated device: their scratch lives for the call alone, and leases put in
 * every wait between streams that their ranges need. */
#include "test_ops.h"

#include "tenure_grouped.h"

enum { ROWS = 1000, COLS = 512, GROUPS = 7 };

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static tn_grouped_plane plane(const test_ops *ops, tn_plane which) {
    int64_t floats;
    EXPECT_OK(tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D, which, GROUPS, ROWS, COLS, &floats));
    return (tn_grouped_plane){test_plain(ops->scope, TN_BYTE, ROWS, COLS),
                              test_plain(ops->scope, TN_FP32, 1, floats)};
}

static void expect_no_races(void) {
    const test_sim *sim = test_sim_get();
    if (sim->race_count()) fail_msg("race: %s", sim->race_text(0));
}

static void quantizing_on_alternating_streams_has_no_races(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    tn_stream other;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    args.src = valid(&ops, TN_BF16, ROWS, COLS);
    args.offsets = valid(&ops, TN_BYTE, GROUPS + 1, 8);
    args.error = valid(&ops, TN_BYTE, 1, 4);
    args.row = plane(&ops, TN_PLANE_ROW);
    args.col = plane(&ops, TN_PLANE_COL);
    args.scope = ops.scope;
    EXPECT_OK(tn_grouped_quantize(&args, ops.stream));
    tn_ledger before = test_ledger(ops.scope);
    for (int i = 0; i < 6; i++) {
        EXPECT_OK(tn_grouped_quantize(&args, i % 2 ? ops.stream : other));
        tn_ledger after = test_ledger(ops.scope);
        test_expect_same_ledger(&before, &after);
    }
    expect_no_races();
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    tn_device *device = ops.device;
    test_ops_close(&ops);
    test_close_sim(device);
}

/* Groups padded, tokens gathered and brought back, each step on another stream than the last. */
static void a_mixture_on_alternating_streams_has_no_races(void **state) {
    (void)state;
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    const int64_t room = ROWS + 127 * GROUPS;
    tn_pad_groups_args pad = TN_PAD_GROUPS_ARGS_INIT;
    tn_gather_rows_args gather = TN_GATHER_ROWS_ARGS_INIT;
    tn_combine_rows_args combine = TN_COMBINE_ROWS_ARGS_INIT;
    tn_stream other;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    pad.offsets = valid(&ops, TN_BYTE, GROUPS + 1, 8);
    pad.padded_offsets = test_plain(ops.scope, TN_BYTE, GROUPS + 1, 8);
    pad.map = test_plain(ops.scope, TN_BYTE, room, 8);
    pad.inverse = test_plain(ops.scope, TN_BYTE, ROWS, 8);
    pad.error = gather.error = combine.error = valid(&ops, TN_BYTE, 1, 4);
    pad.rows = ROWS, pad.scope = ops.scope;
    gather.src = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS);
    test_declare_valid(&ops, gather.src, TN_PLANE_ROW);
    gather.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, room, COLS);
    gather.map = pad.map;
    combine.src = valid(&ops, TN_BF16, room, COLS), combine.map = pad.inverse;
    combine.dst = test_plain(ops.scope, TN_FP32, ROWS, COLS);
    for (int i = 0; i < 4; i++) {
        EXPECT_OK(tn_pad_groups(&pad, i % 2 ? ops.stream : other));
        EXPECT_OK(tn_gather_rows(&gather, i % 2 ? other : ops.stream));
        EXPECT_OK(tn_combine_rows(&combine, i % 2 ? ops.stream : other));
    }
    expect_no_races();
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    tn_device *device = ops.device;
    test_ops_close(&ops);
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantizing_on_alternating_streams_has_no_races),
        cmocka_unit_test(a_mixture_on_alternating_streams_has_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
