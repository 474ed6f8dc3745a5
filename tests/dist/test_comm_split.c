/* Sub-groups of ranks: who is in which, as what; each with its own order, failure, statistics and
 * lifetime; and many of them at work at once. */
#include "rank_values_support.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"

static rank_fixture all;

static tn_comm *split(tn_comm *comm, int color, int key, const char *name) {
    tn_comm *made = NULL;
    EXPECT_OK(tn_comm_split(comm, color, key, name, &made));
    return made;
}

/* The sum over the ranks of a communicator of each rank's number in `all`. */
static float sum_on(tn_comm *comm, tn_stream stream) {
    float value = (float)all.rank, sum = -1.0f;
    float *block = test_take(all.pool, sizeof value, stream);
    EXPECT_OK(tn_copy(all.device, block, &value, sizeof value, stream));
    EXPECT_OK(tn_all_reduce(comm, block, block, 1, TN_FP32, TN_REDUCE_SUM, stream));
    EXPECT_OK(tn_copy(all.device, &sum, block, sizeof sum, stream));
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(tn_stream_synchronize(all.device, stream));
    test_give(all.pool, block, stream);
    return sum;
}

static float expected_sum(int first, int step, int end) {
    float sum = 0.0f;
    for (int rank = first; rank < end; rank += step)
        sum += (float)rank;
    return sum;
}

/* ---- who is in which ------------------------------------------------------------------------ */

static void ranks_of_a_color_are_together(void **state) {
    (void)state;
    tn_comm *part = split(all.comm, all.rank % 2, 0, "part");
    assert_int_equal(tn_comm_rank(part), all.rank / 2);
    assert_int_equal(tn_comm_size(part), (all.count + 1 - all.rank % 2) / 2);
    assert_string_equal(tn_comm_name(part), "part");
    assert_string_equal(tn_comm_engine_name(part), ranks_engine(&all));
    assert_true(sum_on(part, all.stream) == expected_sum(all.rank % 2, 2, all.count));
    EXPECT_OK(tn_comm_destroy(part));
}

static void keys_order_the_ranks_and_equal_keys_keep_their_order(void **state) {
    (void)state;
    tn_comm *reversed = split(all.comm, 7, -all.rank, NULL);
    assert_int_equal(tn_comm_rank(reversed), all.count - 1 - all.rank);
    assert_string_equal(tn_comm_name(reversed), "ranks");
    /* In the new order: rank 0 is the last of the old ones. */
    unsigned char mine = (unsigned char)all.rank, seen[16];
    unsigned char *part = ranks_take(&all, 1), *whole = ranks_take(&all, 16);
    ranks_put(&all, part, &mine, 1);
    EXPECT_OK(tn_all_gather(reversed, part, whole, 1, all.stream));
    ranks_get(&all, seen, whole, (size_t)all.count);
    for (int i = 0; i < all.count; i++)
        assert_int_equal(seen[i], all.count - 1 - i);
    EXPECT_OK(tn_comm_destroy(reversed));
    tn_comm *kept = split(all.comm, 7, 3, NULL);
    assert_int_equal(tn_comm_rank(kept), all.rank);
    EXPECT_OK(tn_comm_destroy(kept));
    ranks_give(&all, part);
    ranks_give(&all, whole);
}

static void a_rank_with_no_color_is_in_none(void **state) {
    (void)state;
    tn_comm *part = all.comm;
    int is_in = all.rank > 0;
    EXPECT_OK(tn_comm_split(all.comm, is_in ? 1 : -1, 0, "but the first", &part));
    if (!is_in) {
        assert_null(part);
        return;
    }
    assert_int_equal(tn_comm_size(part), all.count - 1);
    assert_true(sum_on(part, all.stream) == expected_sum(1, 1, all.count));
    EXPECT_OK(tn_comm_destroy(part));
}

/* ---- each on its own ------------------------------------------------------------------------ */

static void statistics_and_failure_are_each_ones_own(void **state) {
    (void)state;
    tn_comm_stats before = ranks_stats(&all), stats = TN_COMM_STATS_INIT;
    tn_comm *part = split(all.comm, 0, 0, "part"), *doomed = split(all.comm, 0, 0, "doomed");
    EXPECT_OK(tn_barrier(part, all.stream));
    EXPECT_OK(tn_barrier(part, all.other));
    EXPECT_OK(tn_comm_wait(part));
    EXPECT_OK(tn_comm_stats_get(part, &stats));
    assert_int_equal(stats.calls[TN_BARRIER], 2);
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
    float *block = ranks_take(&all, 32);
    int differs = all.rank && all.engine != TN_COMM_NCCL; /* which would hang */
    EXPECT_OK(tn_fill(all.device, block, 0, 32, all.stream));
    EXPECT_OK(
        tn_all_reduce(doomed, block, block, differs ? 2 : 1, TN_FP32, TN_REDUCE_MAX, all.stream));
    tn_status expected = all.count > 1 && all.engine != TN_COMM_NCCL ? TN_COMM_ERROR : TN_OK;
    EXPECT_STATUS(tn_comm_wait(doomed), expected);
    if (expected != TN_OK) EXPECT_ERROR_HAS("communicator doomed: rank ");
    assert_true(sum_on(part, all.other) == expected_sum(0, 1, all.count));
    assert_true(sum_on(all.comm, all.stream) == expected_sum(0, 1, all.count));
    tn_comm *none = NULL;
    EXPECT_STATUS(tn_comm_split(doomed, 0, 0, NULL, &none), expected);
    EXPECT_OK(tn_comm_destroy(none));
    EXPECT_STATUS(tn_comm_destroy(doomed), expected);
    EXPECT_OK(tn_comm_destroy(part));
    ranks_give(&all, block);
}

static void parent_and_child_end_in_any_order(void **state) {
    (void)state;
    for (int parent_first = 0; parent_first < 2; parent_first++) {
        tn_comm *parent = ranks_comm(&all, "parent", 0);
        tn_comm *child = split(parent, 0, 0, "child");
        tn_comm *grandchild = split(child, all.rank % 2, 0, "grandchild");
        EXPECT_OK(tn_comm_destroy(parent_first ? parent : grandchild));
        assert_true(sum_on(child, all.stream) == expected_sum(0, 1, all.count));
        EXPECT_OK(tn_comm_destroy(child));
        tn_comm *last = parent_first ? grandchild : parent;
        float expected =
            parent_first ? expected_sum(all.rank % 2, 2, all.count) : expected_sum(0, 1, all.count);
        assert_true(sum_on(last, all.stream) == expected);
        EXPECT_OK(tn_comm_destroy(last));
    }
}

static void a_split_of_a_split_has_its_own_messages(void **state) {
    (void)state;
    tn_comm *half = split(all.comm, all.rank % 2, 0, "half");
    tn_comm *half_again = split(half, 0, 0, "half again");
    tn_comm *whole_again = split(all.comm, 0, 0, "whole again");
    for (int round = 0; round < 20; round++) {
        EXPECT_OK(tn_barrier(half, all.stream));
        EXPECT_OK(tn_barrier(half_again, all.other));
        EXPECT_OK(tn_barrier(whole_again, all.stream));
    }
    assert_true(sum_on(half_again, all.other) == expected_sum(all.rank % 2, 2, all.count));
    assert_true(sum_on(whole_again, all.stream) == expected_sum(0, 1, all.count));
    EXPECT_OK(tn_comm_destroy(half));
    EXPECT_OK(tn_comm_destroy(whole_again));
    EXPECT_OK(tn_comm_destroy(half_again));
}

/* ---- three communicators at once ------------------------------------------------------------ */

enum { ROUNDS = 60, STRESS_COUNT = 3000 };

/* Replicas x shards: a row of the grid shares weights, a column of it has the same shard. Each of
 * the three is on a stream of its own, and every rank's order of calls is another one in time. */
static void replicas_shards_and_all_work_at_once(void **state) {
    (void)state;
    int columns = all.count % 2 == 0 ? 2 : 1;
    tn_comm *comms[3] = {all.comm, split(all.comm, all.rank / columns, all.rank, "shards"),
                         split(all.comm, all.rank % columns, all.rank, "replicas")};
    tn_stream third = test_open_stream(all.device);
    tn_stream streams[3] = {all.stream, all.other, third};
    float one = 1.0f, *data = malloc(STRESS_COUNT * sizeof one), *blocks[3];
    for (int i = 0; i < STRESS_COUNT; i++)
        data[i] = one;
    for (int i = 0; i < 3; i++) {
        blocks[i] = test_take(all.pool, STRESS_COUNT * sizeof one, streams[i]);
        EXPECT_OK(tn_copy(all.device, blocks[i], data, STRESS_COUNT * sizeof one, streams[i]));
        EXPECT_OK(tn_stream_synchronize(all.device, streams[i])); /* data is written below */
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 3; i++) {
            EXPECT_OK(tn_all_reduce(comms[i], blocks[i], blocks[i], STRESS_COUNT, TN_FP32,
                                    round % 4 ? TN_REDUCE_MAX : TN_REDUCE_SUM, streams[i]));
        }
    }
    for (int i = 0; i < 3; i++) {
        float expected = 1.0f;
        for (int round = 0; round < ROUNDS; round += 4)
            expected *= (float)tn_comm_size(comms[i]);
        EXPECT_OK(tn_copy(all.device, data, blocks[i], STRESS_COUNT * sizeof one, streams[i]));
        EXPECT_OK(tn_comm_wait(comms[i]));
        EXPECT_OK(tn_stream_synchronize(all.device, streams[i]));
        for (int at = 0; at < STRESS_COUNT; at++)
            assert_true(data[at] == expected);
        test_give(all.pool, blocks[i], streams[i]);
    }
    EXPECT_OK(tn_comm_destroy(comms[1]));
    EXPECT_OK(tn_comm_destroy(comms[2]));
    EXPECT_OK(tn_stream_synchronize(all.device, third));
    EXPECT_OK(tn_stream_destroy(all.device, third));
    free(data);
}

/* ---- failure -------------------------------------------------------------------------------- */

/* The last rank's N-th allocation fails: no rank gets a communicator, and the old one stays. That
 * nothing is left behind is seen when the ranks are closed, and other threads have freed all. */
static void a_rank_without_memory_is_everyones_failure_and_nobodys_loss(void **state) {
    (void)state;
    int is_failing = all.rank == all.count - 1, failures = 0;
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    for (long nth = 1; status != TN_OK; nth++) {
        tn_comm *part = NULL;
        if (is_failing) tn__host_alloc_fault(nth, 0);
        status = tn_comm_split(all.comm, 0, 0, "part", &part);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) {
            EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
            if (!is_failing) EXPECT_ERROR_HAS("failed with out of host memory");
            assert_null(part);
            failures++;
        }
        EXPECT_OK(tn_barrier(all.comm, all.stream));
        ranks_wait(&all);
        EXPECT_OK(tn_comm_destroy(part));
    }
    assert_in_range(failures, 5, 100); /* the fewest that an engine allocates, and an end */
}

static void wrong_arguments_are_refused(void **state) {
    (void)state;
    tn_comm *none = NULL;
    EXPECT_STATUS(tn_comm_split(NULL, 0, 0, NULL, &none), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_comm_split(all.comm, 0, 0, NULL, NULL), TN_INVALID_ARGUMENT);
    assert_null(none);
}

/* Comm_shrink has what the other engines do. */
static void mpi_shrinks_none(void **state) {
    (void)state;
    tn_comm *none = NULL;
    if (all.engine != TN_COMM_MPI) return;
    EXPECT_STATUS(tn_comm_shrink(all.comm, NULL, 0, NULL, &none), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the engine MPI shrinks none, NCCL and TCP do");
    assert_null(none);
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    ranks_wait(&all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_of_a_color_are_together),
        cmocka_unit_test(keys_order_the_ranks_and_equal_keys_keep_their_order),
        cmocka_unit_test(a_rank_with_no_color_is_in_none),
        cmocka_unit_test(parent_and_child_end_in_any_order),
        cmocka_unit_test(a_split_of_a_split_has_its_own_messages),
        cmocka_unit_test(replicas_shards_and_all_work_at_once),
        cmocka_unit_test(a_rank_without_memory_is_everyones_failure_and_nobodys_loss),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(mpi_shrinks_none),
        cmocka_unit_test(statistics_and_failure_are_each_ones_own),
    };
    return RANKS_RUN(&all, tests);
}
