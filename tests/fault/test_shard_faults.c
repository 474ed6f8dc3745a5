/* The cast of a shard on the simulated device: each driver call fails in turn, once and from then
 * on, and the call leaves no lease, no adopted memory and no tensor; the next call goes through.
 * Without a failure, casts on alternating streams have no race, and take no memory from the pool
 * once the amaxes have theirs.
 */
#include "fault_loop_support.h"
#include "test_pools.h"
#include "test_shards.h"

enum { UNKNOWN_ERROR = 999, TENSORS_MAX = 4, ROUNDS = 6 };

typedef struct scene {
    test_ops ops;
    tn_shard_plan *plan;
    tn_tensor masters[TENSORS_MAX];
    tn_shard_cast_args args;
} scene;

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t count) {
    tn_tensor tensor = test_plain(ops->scope, dtype, 1, count);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

/* The last tensor is one that FLAT can not cut. Rank 1 of 3, its amaxes reduced by somebody. */
static void begin(scene *s, tn_shard_layout layout) {
    tn_shard_tensor tensors[TENSORS_MAX] = {shard_tensor_of(TN_FORMAT_FP8_BLOCK_2D, 400, 100),
                                            shard_tensor_of(TN_FORMAT_FP8_TENSOR, 300, 40),
                                            shard_tensor_of(TN_FORMAT_PLAIN, 300, 40),
                                            shard_tensor_of(TN_FORMAT_FP8_BLOCK_1D, 300, 40)};
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    size_t bytes;
    *s = (scene){.ops = test_ops_open(test_open_sim(0, 0))};
    config.tensors = tensors;
    config.tensor_count = layout == TN_SHARD_FLAT ? TENSORS_MAX - 1 : TENSORS_MAX;
    config.rank_count = 3, config.layout = layout;
    EXPECT_OK(tn_shard_plan_create(&config, &s->plan));
    EXPECT_OK(tn_shard_plan_info_get(s->plan, &info));
    EXPECT_OK(tn_shard_bytes(s->plan, 1, &bytes));
    for (int i = 0; i < config.tensor_count; i++) {
        tn_shard_piece piece = TN_SHARD_PIECE_INIT;
        EXPECT_OK(tn_shard_piece_get(s->plan, 1, i, &piece));
        if (piece.count) s->masters[i] = valid(&s->ops, TN_FP32, piece.count);
    }
    s->args = (tn_shard_cast_args)TN_SHARD_CAST_ARGS_INIT;
    s->args.plan = s->plan, s->args.rank = 1, s->args.with_frozen = 1;
    s->args.masters = s->masters;
    s->args.shard = test_plain(s->ops.scope, TN_BYTE, 1, (int64_t)bytes);
    if (info.amax_count) s->args.amax = test_plain(s->ops.scope, TN_FP32, 1, info.amax_count);
    s->args.scope = s->ops.scope;
    EXPECT_OK(tn_shard_cast_amax(&s->args, s->ops.stream));
}

static void end(scene *s) {
    tn_device *device = s->ops.device;
    test_ops_close(&s->ops);
    test_close_sim(device);
    tn_shard_plan_destroy(s->plan);
}

static int run_with_fault(const void *layout, fault_point *fault) {
    scene s;
    begin(&s, *(const tn_shard_layout *)layout);
    tn_ledger before = test_ledger(s.ops.scope);
    fault_begin(fault);
    tn_status status = tn_shard_cast(&s.args, s.ops.stream);
    fault_end(fault);
    tn_ledger after = test_ledger(s.ops.scope);
    assert_int_equal(after.leases, 0);
    assert_int_equal(after.tensors, before.tensors);
    assert_int_equal(after.foreign_bytes, 0);
    EXPECT_OK(tn_ledger_check(s.ops.pool));
    if (status != TN_OK) {
        assert_true(status == TN_DRIVER_ERROR || status == TN_OUT_OF_DEVICE_MEMORY);
        assert_int_not_equal(test_state(s.args.shard, TN_PLANE_DATA), TN_PLANE_VALID);
    }
    EXPECT_OK(tn_shard_cast(&s.args, s.ops.stream));
    assert_int_equal(test_state(s.args.shard, TN_PLANE_DATA), TN_PLANE_VALID);
    end(&s);
    return status != TN_OK;
}

/* What a shard has and is not to be cast there is no other copy of: it stays valid, and is not made
 * anew, also on another library's stream, whose uses are told to the driver at once. */
static int run_on_contents(const void *layout, fault_point *fault) {
    scene s;
    begin(&s, *(const tn_shard_layout *)layout);
    tn_stream foreign = test_open_foreign_stream(s.ops.device);
    EXPECT_OK(tn_shard_cast(&s.args, s.ops.stream));
    fault_begin(fault);
    tn_status status = tn_shard_cast(&s.args, foreign);
    fault_end(fault);
    assert_int_equal(test_ledger(s.ops.scope).leases, 0);
    assert_int_equal(test_state(s.args.shard, TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_OK(tn_shard_cast(&s.args, foreign));
    tn_device *device = s.ops.device;
    EXPECT_OK(tn_device_synchronize(device));
    test_ops_close(&s.ops);
    test_close_foreign_stream(device, foreign);
    test_close_sim(device);
    tn_shard_plan_destroy(s.plan);
    return status != TN_OK;
}

static void a_shard_with_contents_keeps_them(void **state) {
    (void)state;
    for (int i = TN_SHARD_TILES; i < TN_SHARD_LAYOUT_COUNT; i++) {
        tn_shard_layout layout = (tn_shard_layout)i;
        for (int and_after = 0; and_after < 2; and_after++) {
            fault_point fault = {.and_after = and_after, .code = UNKNOWN_ERROR};
            assert_true(fault_each(fault, run_on_contents, &layout) > 3);
        }
    }
}

static void a_driver_call_that_fails_leaves_nothing_open(void **state) {
    (void)state;
    for (int i = TN_SHARD_TILES; i < TN_SHARD_LAYOUT_COUNT; i++) {
        tn_shard_layout layout = (tn_shard_layout)i;
        for (int and_after = 0; and_after < 2; and_after++) {
            fault_point fault = {.and_after = and_after, .code = UNKNOWN_ERROR};
            assert_true(fault_each(fault, run_with_fault, &layout) > 3);
        }
    }
}

static void casts_on_alternating_streams_have_no_races(void **state) {
    const test_sim *sim = test_sim_get();
    (void)state;
    for (int i = TN_SHARD_TILES; i < TN_SHARD_LAYOUT_COUNT; i++) {
        scene s;
        begin(&s, (tn_shard_layout)i);
        tn_stream stream[2] = {s.ops.stream, test_open_stream(s.ops.device)};
        EXPECT_OK(tn_shard_cast(&s.args, stream[0]));
        uint64_t allocs = test_pool_stats(s.ops.pool).allocs;
        for (int round = 1; round < ROUNDS; round++)
            EXPECT_OK(tn_shard_cast(&s.args, stream[round % 2]));
        assert_int_equal(test_pool_stats(s.ops.pool).allocs, allocs);
        if (sim->race_count()) fail_msg("race: %s", sim->race_text(0));
        EXPECT_OK(tn_device_synchronize(s.ops.device));
        EXPECT_OK(tn_stream_destroy(s.ops.device, stream[1]));
        end(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_driver_call_that_fails_leaves_nothing_open),
        cmocka_unit_test(a_shard_with_contents_keeps_them),
        cmocka_unit_test(casts_on_alternating_streams_have_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
