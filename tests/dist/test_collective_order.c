/* Collectives in stream order: behind what is before them, before what is behind them, and one
 * communicator's one after the other over all streams. Gates, and no clock, say when. */
#include "ranks_support.h"

#include <stdlib.h>
#include <string.h>

enum { DEADLINE_US = 5 * 1000 * 1000 };

static rank_fixture all;

/* CUDA's copies of pageable memory wait on the host for what is before them: not behind a gate that
 * the host opens later. */
static int copies_wait(void) {
    if (all.place != RANKS_ON_CUDA) return 0;
    (void)ranks_leaves_out(&all, "copies of pageable memory behind a gate");
    return 1;
}

static void a_collective_runs_between_its_producer_and_its_consumer(void **state) {
    (void)state;
    if (copies_wait()) return;
    unsigned char mine = (unsigned char)(all.rank + 1), seen[16], before[16];
    size_t count = (size_t)all.count;
    unsigned char *part = test_take(all.pool, 1, all.stream);
    unsigned char *whole = test_take(all.pool, count, all.stream);
    memset(seen, 0xEE, sizeof seen);
    memset(before, 0xEE, sizeof before);
    EXPECT_OK(tn_fill(all.device, part, 0, 1, all.stream));
    ranks_gate *gate = ranks_gate_put(&all, all.stream);
    EXPECT_OK(tn_copy(all.device, part, &mine, 1, all.stream));
    EXPECT_OK(tn_all_gather(all.comm, part, whole, 1, all.stream));
    EXPECT_OK(tn_copy(all.device, seen, whole, count, all.stream));
    /* Freed in stream order while all of it is still to be done. */
    EXPECT_OK(tn_free(part, all.stream));
    EXPECT_OK(tn_free(whole, all.stream));
    assert_memory_equal(seen, before, sizeof seen);
    ranks_gate_open(gate);
    ranks_wait(&all);
    ranks_gate_end(gate);
    for (size_t rank = 0; rank < count; rank++)
        assert_int_equal(seen[rank], rank + 1);
}

static void collectives_on_two_streams_run_in_the_order_of_calls(void **state) {
    (void)state;
    enum { ROUNDS = 6 };
    float value = 1.0f, expected = 1.0f;
    float *block = test_take(all.pool, sizeof value, all.stream);
    EXPECT_OK(tn_copy(all.device, block, &value, sizeof value, all.stream));
    ranks_wait(&all);
    /* Each rank has another of its streams held up. */
    tn_stream held = all.rank % 2 ? all.stream : all.other;
    ranks_gate *gate = ranks_gate_put(&all, held);
    for (int round = 0; round < ROUNDS; round++) {
        tn_stream stream = round % 2 ? all.other : all.stream;
        EXPECT_OK(tn_all_reduce(all.comm, block, block, 1, TN_FP32, TN_REDUCE_SUM, stream));
        EXPECT_OK(tn_record_use(block, stream));
        expected *= (float)all.count;
    }
    ranks_gate_open(gate);
    ranks_wait(&all);
    ranks_gate_end(gate);
    EXPECT_OK(tn_copy(all.device, &value, block, sizeof value, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    assert_true(value == expected);
    test_give(all.pool, block, all.stream);
}

/* Rank 0's stream is held before its barrier until all others have looked. */
static void nothing_passes_a_barrier_before_the_last_stream_has_come(void **state) {
    (void)state;
    if (copies_wait()) return;
    tn_comm *side = ranks_comm(&all, "side", 0);
    unsigned char one = 1, passed = 0;
    ranks_gate *gate = all.rank == 0 ? ranks_gate_put(&all, all.stream) : NULL;
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    EXPECT_OK(tn_copy(all.device, &passed, &one, 1, all.stream));
    assert_int_equal(passed, 0);
    EXPECT_OK(tn_barrier(side, all.other));
    EXPECT_OK(tn_comm_wait(side));
    if (gate) ranks_gate_open(gate);
    ranks_wait(&all);
    if (gate) ranks_gate_end(gate);
    assert_int_equal(passed, 1);
    EXPECT_OK(tn_comm_destroy(side));
}

static void two_communicators_work_beside_each_other(void **state) {
    (void)state;
    enum { ROUNDS = 50 };
    tn_comm *side = ranks_comm(&all, "side", 0);
    float one = 1.0f, sums[2];
    float *first = test_take(all.pool, 4, all.stream), *second = test_take(all.pool, 4, all.other);
    EXPECT_OK(tn_copy(all.device, first, &one, 4, all.stream));
    EXPECT_OK(tn_copy(all.device, second, &one, 4, all.other));
    for (int round = 0; round < ROUNDS; round++) {
        EXPECT_OK(tn_all_reduce(all.comm, first, first, 1, TN_FP32, TN_REDUCE_MAX, all.stream));
        EXPECT_OK(tn_all_reduce(side, second, second, 1, TN_FP32, TN_REDUCE_MAX, all.other));
    }
    EXPECT_OK(tn_copy(all.device, &sums[0], first, 4, all.stream));
    EXPECT_OK(tn_copy(all.device, &sums[1], second, 4, all.other));
    EXPECT_OK(tn_comm_wait(side));
    ranks_wait(&all);
    assert_true(sums[0] == 1.0f && sums[1] == 1.0f);
    test_give(all.pool, first, all.stream);
    test_give(all.pool, second, all.other);
    EXPECT_OK(tn_comm_destroy(side));
}

/* The collective never gets its turn: destroying gives up on it, and it ends when it does. */
static void destroy_gives_up_on_a_stream_that_is_held_up(void **state) {
    (void)state;
    if (all.place == RANKS_ON_CUDA &&
        ranks_leaves_out(&all, "NCCL's abort may wait for a kernel that has not begun"))
        return;
    tn_comm *doomed = ranks_comm(&all, "doomed", DEADLINE_US);
    unsigned char data = 7;
    unsigned char *part = test_take(all.pool, 1, all.stream);
    unsigned char *whole = test_take(all.pool, (size_t)all.count, all.stream);
    EXPECT_OK(tn_fill(all.device, whole, 9, (size_t)all.count, all.stream));
    ranks_gate *gate = ranks_gate_put(&all, all.stream);
    EXPECT_OK(tn_all_gather(doomed, part, whole, 1, all.stream));
    EXPECT_STATUS(tn_comm_destroy(doomed), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("communicator doomed, rank ");
    ranks_gate_open(gate);
    EXPECT_OK(tn_copy(all.device, &data, whole, 1, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    ranks_gate_end(gate);
    /* The host's worker sees that it has been given up; a CUDA stream has its copies already. */
    if (all.place == RANKS_ON_HOST) assert_int_equal(data, 9);
    test_give(all.pool, part, all.stream);
    test_give(all.pool, whole, all.stream);
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    /* Ranks of a communicator that has failed end together. */
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_collective_runs_between_its_producer_and_its_consumer),
        cmocka_unit_test(collectives_on_two_streams_run_in_the_order_of_calls),
        cmocka_unit_test(nothing_passes_a_barrier_before_the_last_stream_has_come),
        cmocka_unit_test(two_communicators_work_beside_each_other),
        cmocka_unit_test(destroy_gives_up_on_a_stream_that_is_held_up),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
