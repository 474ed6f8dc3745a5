/* Attention on the simulated device: its memory to the byte, its order across streams, and the time
 * of its operations. */
#include "test_ops.h"

#include "tenure_attention.h"

enum { TOKENS = 4096, SEQUENCE = 1024, HEADS = 16, HEADS_KV = 4, HEAD_DIM = 64 };

typedef struct calls {
    tn_attention_forward_args forward;
    tn_attention_backward_args backward;
} calls;

static calls open_calls(const test_ops *ops, int64_t tokens, int64_t sequence, int is_causal) {
    const int64_t of_y = (int64_t)HEADS * HEAD_DIM, all = of_y + (int64_t)2 * HEADS_KV * HEAD_DIM;
    calls c = {TN_ATTENTION_FORWARD_ARGS_INIT, TN_ATTENTION_BACKWARD_ARGS_INIT};
    c.forward.qkv = c.backward.qkv = test_plain(ops->scope, TN_BF16, tokens, all);
    c.forward.y = c.backward.y = test_plain(ops->scope, TN_BF16, tokens, of_y);
    c.forward.log_sum = c.backward.log_sum = test_plain(ops->scope, TN_FP32, HEADS, tokens);
    c.backward.dy = test_plain(ops->scope, TN_BF16, tokens, of_y);
    c.backward.dqkv = test_plain(ops->scope, TN_BF16, tokens, all);
    c.backward.scope = ops->scope;
    c.forward.heads = c.backward.heads = HEADS;
    c.forward.heads_kv = c.backward.heads_kv = HEADS_KV;
    c.forward.sequence = c.backward.sequence = sequence;
    c.forward.is_causal = c.backward.is_causal = is_causal;
    test_declare_valid(ops, c.forward.qkv, TN_PLANE_DATA);
    test_declare_valid(ops, c.backward.dy, TN_PLANE_DATA);
    return c;
}

static void close_sim(test_ops *ops) {
    test_ops_close(ops);
    test_close_sim(ops->device);
}

/* Outputs alone are left; on the way there are 4 bytes for each head and token. */
static void both_directions_take_their_bytes_and_no_more(void **state) {
    (void)state;
    for (int64_t sequence = 1; sequence <= TOKENS; sequence *= 64) {
        test_ops ops = test_ops_open(test_open_sim(0, 0));
        const calls c = open_calls(&ops, TOKENS, sequence, 0);
        const size_t of_y = (size_t)TOKENS * HEADS * HEAD_DIM * 2,
                     floats = (size_t)TOKENS * HEADS * 4;
        const size_t before = test_ledger(ops.scope).total_bytes;
        EXPECT_OK(tn_attention_forward(&c.forward, ops.stream));
        tn_ledger after = test_ledger(ops.scope);
        assert_int_equal(after.total_bytes, before + of_y + floats);
        assert_int_equal(after.peak_total_bytes, before + of_y + floats);
        EXPECT_OK(tn_attention_backward(&c.backward, ops.stream));
        const size_t packed = (size_t)TOKENS * (HEADS + 2 * HEADS_KV) * HEAD_DIM * 2;
        after = test_ledger(ops.scope);
        assert_int_equal(after.total_bytes, before + of_y + floats + packed);
        assert_int_equal(after.peak_total_bytes, before + of_y + floats + packed + floats);
        assert_int_equal(after.leases, 0);
        close_sim(&ops);
    }
}

/* Sizes of which none is whole; each call on another stream than the one before. */
static void calls_on_streams_in_turn_have_no_races(void **state) {
    (void)state;
    const test_sim *sim = test_sim_get();
    test_ops ops = test_ops_open(test_open_sim(0, 0));
    calls c = open_calls(&ops, 201, 67, 1);
    tn_stream other;
    EXPECT_OK(tn_stream_create(ops.device, &other));
    for (int step = 0; step < 4; step++) {
        EXPECT_OK(tn_attention_forward(&c.forward, step % 2 ? other : ops.stream));
        EXPECT_OK(tn_attention_backward(&c.backward, step % 3 ? ops.stream : other));
    }
    c.forward.log_sum.value = 0;
    EXPECT_OK(tn_attention_forward(&c.forward, other));
    EXPECT_OK(tn_device_synchronize(ops.device));
    if (sim->race_count()) fail_msg("race: %s", sim->race_text(0));
    EXPECT_OK(tn_stream_destroy(ops.device, other));
    close_sim(&ops);
}

/* 4 and 14 operations for each query, key and element, half if causal, at 6e13 a second. */
static void both_directions_take_the_time_of_their_operations(void **state) {
    (void)state;
    const test_sim *sim = test_sim_get();
    for (int is_causal = 0; is_causal < 2; is_causal++) {
        test_ops ops = test_ops_open(test_open_sim(0, 0));
        const calls c = open_calls(&ops, TOKENS, SEQUENCE, is_causal);
        const double pairs = (double)TOKENS * SEQUENCE * HEADS * HEAD_DIM / (1 + is_causal);
        for (int backward = 0; backward < 2; backward++) {
            test_ops_wait(&ops);
            const double start = sim->now_us(), floor_us = (backward ? 14 : 4) * pairs / 6e7;
            if (backward)
                EXPECT_OK(tn_attention_backward(&c.backward, ops.stream));
            else
                EXPECT_OK(tn_attention_forward(&c.forward, ops.stream));
            test_ops_wait(&ops);
            const double actual_us = sim->now_us() - start;
            assert_true(actual_us >= floor_us + 2.0 && actual_us < floor_us + 1000.0);
        }
        close_sim(&ops);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_directions_take_their_bytes_and_no_more),
        cmocka_unit_test(calls_on_streams_in_turn_have_no_races),
        cmocka_unit_test(both_directions_take_the_time_of_their_operations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
