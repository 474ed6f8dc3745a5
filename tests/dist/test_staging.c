/* Collectives of a CUDA device's memory by MPI: they hold the stream up and not the caller, their
 * rounds follow each other through the two slots of a stage, a driver call that fails leaves
 * nothing behind or ends the communicator, and stages go round. On the simulated driver unless
 * TENURE_RANKS_ON says cuda. */
#include "ranks_support.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

enum { ROUND_BYTES = 4 << 20, BYTES = ROUND_BYTES + 12345 };

static rank_fixture all;

/* Pinned, so that copies to it do not make the caller wait. */
static unsigned char *take_pinned(size_t bytes) {
    void *memory = NULL;
    EXPECT_OK(
        tn__device_driver(all.device)->host_alloc(tn__device_state(all.device), bytes, &memory));
    return memory;
}

static void give_pinned(void *memory) {
    EXPECT_OK(tn__device_driver(all.device)->host_free(tn__device_state(all.device), memory));
}

static unsigned char byte_of(int rank, size_t at) {
    return (unsigned char)(at * 131 + (at >> 13) * 7 + (size_t)rank * 59);
}

static uint64_t launches(void) { return test_calls(all.device, TN_CALL_LAUNCH); }

/* All of it is on the stream, behind the gate, and the caller is back. */
static void the_caller_does_not_wait(void **state) {
    (void)state;
    size_t whole_bytes = (size_t)BYTES * (size_t)all.count;
    unsigned char *data = take_pinned(BYTES), *seen = take_pinned(whole_bytes);
    unsigned char *part = test_take(all.pool, BYTES, all.stream);
    unsigned char *whole = test_take(all.pool, whole_bytes, all.stream);
    for (size_t i = 0; i < BYTES; i++)
        data[i] = byte_of(all.rank, i);
    memset(seen, 0xEE, whole_bytes);
    EXPECT_OK(tn_fill(all.device, part, 0, BYTES, all.stream));
    ranks_gate *gate = ranks_gate_put(&all, all.stream);
    EXPECT_OK(tn_copy(all.device, part, data, BYTES, all.stream));
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_all_gather(all.comm, part, whole, BYTES, all.stream));
    EXPECT_OK(tn_copy(all.device, seen, whole, whole_bytes, all.stream));
    assert_int_equal(seen[0], 0xEE);
    assert_int_equal(seen[whole_bytes - 1], 0xEE);
    ranks_gate_open(gate);
    ranks_wait(&all);
    ranks_gate_end(gate);
    for (int rank = 0; rank < all.count; rank++) {
        for (size_t i = 0; i < BYTES; i++)
            if (seen[(size_t)rank * BYTES + i] != byte_of(rank, i))
                fail_msg("byte %zu of rank %d", i, rank);
    }
    test_give(all.pool, part, all.stream);
    test_give(all.pool, whole, all.stream);
    give_pinned(data);
    give_pinned(seen);
}

/* Each round is a row of the slot of each rank: a copy in, a host function, a copy out of each. */
static void a_collective_is_as_many_launches_as_it_has_rounds(void **state) {
    (void)state;
    size_t row = (size_t)ROUND_BYTES / (size_t)all.count / 64 * 64;
    uint64_t ranks = (uint64_t)all.count, others = ranks - 1;
    unsigned char *part = test_take(all.pool, 2 * row, all.stream);
    unsigned char *whole = test_take(all.pool, 2 * row * (size_t)all.count, all.stream);
    EXPECT_OK(tn_fill(all.device, part, 1, 2 * row, all.stream));
    ranks_wait(&all);
    uint64_t before = launches(), waits = test_calls(all.device, TN_CALL_STREAM_WAIT);
    EXPECT_OK(tn_barrier(all.comm, all.stream));
    assert_int_equal(launches() - before, 1);
    assert_int_equal(test_calls(all.device, TN_CALL_STREAM_WAIT) - waits, 1);
    before = launches(), waits = test_calls(all.device, TN_CALL_STREAM_WAIT);
    EXPECT_OK(tn_all_gather(all.comm, part, whole, 2 * row, all.stream));
    uint64_t rounds = others ? 2 : 1;
    uint64_t copies = others ? rounds * (1 + others) + 1 : launches() - before - 1;
    assert_int_equal(launches() - before, rounds + copies);
    assert_int_equal(test_calls(all.device, TN_CALL_STREAM_WAIT) - waits, rounds);
    ranks_wait(&all);
    test_give(all.pool, part, all.stream);
    test_give(all.pool, whole, all.stream);
}

/* ---- stages ---------------------------------------------------------------------------------- */

static void communicators_that_follow_each_other_share_a_stage(void **state) {
    (void)state;
    tn_comm *side = ranks_comm(&all, "side", 0);
    EXPECT_OK(tn_barrier(side, all.stream));
    EXPECT_OK(tn_comm_destroy(side));
    uint64_t allocations = test_calls(all.device, TN_CALL_MEM_ALLOC);
    for (int i = 0; i < 5; i++) {
        side = ranks_comm(&all, "side", 0);
        EXPECT_OK(tn_barrier(side, i % 2 ? all.stream : all.other));
        EXPECT_OK(tn_comm_destroy(side));
    }
    assert_int_equal(test_calls(all.device, TN_CALL_MEM_ALLOC), allocations);
    tn_comm *another = ranks_comm(&all, "another", 0);
    side = ranks_comm(&all, "side", 0);
    assert_true(test_calls(all.device, TN_CALL_MEM_ALLOC) > allocations);
    EXPECT_OK(tn_comm_destroy(another));
    EXPECT_OK(tn_comm_destroy(side));
}

/* The communicator is gone, its collectives are behind a gate; a new one must not take their
 * stage, and the stream ends by itself. */
static void what_a_given_up_communicator_left_goes_on_alone(void **state) {
    (void)state;
    enum { SHORT_US = 5 * 1000 * 1000 };
    tn_comm *doomed = ranks_comm(&all, "doomed", SHORT_US);
    float one = 1.0f, *sum = (float *)(void *)take_pinned(sizeof *sum);
    float *block = test_take(all.pool, BYTES, all.stream);
    float *fresh = test_take(all.pool, sizeof one, all.other);
    EXPECT_OK(tn_fill(all.device, block, 0, BYTES, all.stream));
    ranks_gate *gate = ranks_gate_put(&all, all.stream);
    EXPECT_OK(tn_all_reduce(doomed, block, block, BYTES / 4, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_free(block, all.stream));
    EXPECT_STATUS(tn_comm_destroy(doomed), TN_COMM_TIMEOUT);
    tn_comm *again = ranks_comm(&all, "again", 0);
    EXPECT_OK(tn_copy(all.device, fresh, &one, sizeof one, all.other));
    EXPECT_OK(tn_all_reduce(again, fresh, fresh, 1, TN_FP32, TN_REDUCE_SUM, all.other));
    EXPECT_OK(tn_copy(all.device, sum, fresh, sizeof *sum, all.other));
    EXPECT_OK(tn_stream_synchronize(all.device, all.other));
    assert_true(*sum == (float)all.count);
    ranks_gate_open(gate);
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    ranks_gate_end(gate);
    EXPECT_OK(tn_comm_destroy(again));
    test_give(all.pool, fresh, all.other);
    give_pinned(sum);
}

/* ---- calls that fail ------------------------------------------------------------------------- */

/* The nth call of a collective of one rank fails. Either nothing was put, and it can be made again,
 * or the communicator has failed, and the stream goes on. */
static void fail_the_nth(const char *call, long nth, long *refused, long *failed) {
    const test_sim *sim = test_sim_get();
    tn_comm *comm = ranks_comm(&all, "faulty", 0);
    unsigned char *src = test_take(all.pool, BYTES, all.stream);
    unsigned char *dst = test_take(all.pool, BYTES, all.stream);
    EXPECT_OK(tn_fill(all.device, src, 7, BYTES, all.stream));
    assert_int_equal(sim->fault(call, nth, 0, 999), 0);
    tn_status status = tn_all_reduce(comm, src, dst, BYTES / 4, TN_FP32, TN_REDUCE_MAX, all.stream);
    sim->fault(call, 0, 0, 0);
    if (status == TN_OK) {
        EXPECT_OK(tn_comm_destroy(comm));
    } else if (tn_barrier(comm, all.stream) == TN_OK) {
        ++*refused;
        EXPECT_OK(tn_comm_destroy(comm));
    } else {
        ++*failed;
        EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_ERROR);
        EXPECT_ERROR_HAS("TN_DRIVER_ERROR");
        EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_ERROR);
    }
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    test_give(all.pool, src, all.stream);
    test_give(all.pool, dst, all.stream);
}

static void a_driver_call_that_fails_leaves_nothing_or_ends_the_communicator(void **state) {
    (void)state;
    static const char *const calls[] = {"cuMemcpyAsync", "cuLaunchHostFunc",
                                        "cuStreamWaitValue32_v2", "cuEventRecord"};
    long refused = 0, failed = 0;
    if (all.count > 1 || all.place != RANKS_ON_SIM) return;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (long nth = 1; nth <= 5; nth++)
            fail_the_nth(calls[i], nth, &refused, &failed);
    }
    assert_true(refused >= 1);
    assert_true(failed >= 8);
    uint64_t allocations = test_calls(all.device, TN_CALL_MEM_ALLOC);
    fail_the_nth("cuMemcpyAsync", 0, &refused, &failed);
    assert_int_equal(test_calls(all.device, TN_CALL_MEM_ALLOC), allocations);
}

static void a_communicator_is_made_whole_or_not_at_all(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    const test_sim *sim = test_sim_get();
    if (all.count > 1 || all.place != RANKS_ON_SIM) return;
    config.device = all.device;
    /* One that has a stage, so that the next one makes another. */
    tn_comm *first = ranks_comm(&all, "first", 0), *comm = NULL;
    static const char *const calls[] = {"cuMemHostAlloc", "cuStreamWaitValue32_v2",
                                        "cuStreamCreate", "cuStreamSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tn_comm *held[8];
        int count = 0;
        /* Until there is no stage to spare. */
        uint64_t allocations = test_calls(all.device, TN_CALL_MEM_ALLOC);
        while (test_calls(all.device, TN_CALL_MEM_ALLOC) == allocations && count < 8)
            held[count++] = ranks_comm(&all, "held", 0);
        long blocks = tn__host_live_blocks();
        assert_int_equal(sim->fault(calls[i], 1, 0, 999), 0);
        EXPECT_STATUS(tn_comm_create(&config, &comm), TN_DRIVER_ERROR);
        sim->fault(calls[i], 0, 0, 0);
        assert_null(comm);
        assert_int_equal(tn__host_live_blocks(), blocks);
        while (count)
            EXPECT_OK(tn_comm_destroy(held[--count]));
    }
    long blocks = tn__host_live_blocks(), failures = 0;
    for (long nth = 1; status != TN_OK; nth++, failures++) {
        tn__host_alloc_fault(nth, 0);
        status = tn_comm_create(&config, &comm);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
        if (status != TN_OK) assert_int_equal(tn__host_live_blocks(), blocks);
    }
    assert_true(failures >= 9);
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_comm_destroy(first));
    assert_true(tn__host_live_blocks() < blocks);
}

static int open_ranks(void **state) {
    (void)state;
    if (!getenv("TENURE_RANKS_ON")) setenv("TENURE_RANKS_ON", "sim", 1);
    all = ranks_open();
    all.has_given_up = 1;
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
        cmocka_unit_test(the_caller_does_not_wait),
        cmocka_unit_test(a_collective_is_as_many_launches_as_it_has_rounds),
        cmocka_unit_test(communicators_that_follow_each_other_share_a_stage),
        cmocka_unit_test(what_a_given_up_communicator_left_goes_on_alone),
        cmocka_unit_test(a_driver_call_that_fails_leaves_nothing_or_ends_the_communicator),
        cmocka_unit_test(a_communicator_is_made_whole_or_not_at_all),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
