/* A rank that does not come to a collective, or comes much too late: the others get
 * TN_COMM_TIMEOUT that names it, their memory is theirs again, and a new communicator works. */
#include "ranks_support.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { DEADLINE_US = 5 * 1000 * 1000, BYTES = 100000, PATTERN = 0x5A };

static rank_fixture all; /* its communicator is for the test's own meetings */
static int is_missing;   /* the last rank */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void meet(void) {
    EXPECT_OK(tn_barrier(all.comm, all.other));
    EXPECT_OK(tn_comm_wait(all.comm));
}

static void expect_bytes(const unsigned char *block, size_t bytes, unsigned char value) {
    static unsigned char seen[BYTES * 4], expected[BYTES * 4];
    memset(expected, value, bytes);
    EXPECT_OK(tn_copy(all.device, seen, block, bytes, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    assert_memory_equal(seen, expected, bytes);
}

static void expect_timeout(tn_comm *comm, const char *call) {
    char name[64];
    snprintf(name, sizeof name, "for rank %d to call %s 1", all.count - 1, call);
    EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("communicator doomed, rank ");
    EXPECT_ERROR_HAS(name);
    EXPECT_STATUS(tn_barrier(comm, all.stream), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS(name);
}

static void the_others_time_out_and_their_memory_is_theirs(void **state) {
    (void)state;
    size_t whole_bytes = (size_t)BYTES * (size_t)all.count;
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US);
    unsigned char *part = test_take(all.pool, BYTES, all.stream);
    unsigned char *whole = test_take(all.pool, whole_bytes, all.stream);
    EXPECT_OK(tn_fill(all.device, part, 1, BYTES, all.stream));
    if (!is_missing) {
        double start = seconds();
        EXPECT_OK(tn_all_gather(comm, part, whole, BYTES, all.stream));
        EXPECT_OK(tn_all_gather(comm, part, whole, BYTES, all.stream));
        expect_timeout(comm, "all_gather");
        /* Or a rank that began to wait before this one has said so. */
        if (!strstr(tn_error_last(), "has given up"))
            assert_true((seconds() - start) * 1e6 >= DEADLINE_US);
    }
    /* The block goes on to another use, as it may: its stream has passed both collectives. */
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    test_give(all.pool, whole, all.stream);
    whole = test_take(all.pool, whole_bytes, all.stream);
    EXPECT_OK(tn_fill(all.device, whole, PATTERN, whole_bytes, all.stream));
    meet();
    if (is_missing) {
        /* Far too late: it finds what the others had said, waits for their data and times out. */
        EXPECT_OK(tn_all_gather(comm, part, whole, BYTES, all.stream));
        EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_TIMEOUT);
        /* A CUDA stream has its copies already: what it has in `whole` then is undefined. */
        if (all.place != RANKS_ON_HOST)
            EXPECT_OK(tn_fill(all.device, whole, PATTERN, whole_bytes, all.stream));
    }
    meet();
    expect_bytes(whole, whole_bytes, PATTERN);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_TIMEOUT);
    test_give(all.pool, part, all.stream);
    test_give(all.pool, whole, all.stream);
}

static void a_new_communicator_works(void **state) {
    (void)state;
    tn_comm *comm = ranks_comm(&all, "again", 0);
    float one = 1.0f, sum = 0.0f;
    float *block = test_take(all.pool, sizeof one, all.stream);
    EXPECT_OK(tn_copy(all.device, block, &one, sizeof one, all.stream));
    EXPECT_OK(tn_all_reduce(comm, block, block, 1, TN_FP32, TN_REDUCE_SUM, all.stream));
    EXPECT_OK(tn_copy(all.device, &sum, block, sizeof sum, all.stream));
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    assert_true(sum == (float)all.count);
    test_give(all.pool, block, all.stream);
}

static void a_timeout_may_be_endless(void **state) {
    (void)state;
    const uint64_t timeouts[] = {UINT64_MAX, UINT64_MAX / 2 + 1, UINT64_MAX / 1000};
    for (size_t i = 0; i < sizeof timeouts / sizeof *timeouts; i++) {
        tn_comm *comm = ranks_comm(&all, "patient", timeouts[i]), *part = NULL;
        EXPECT_OK(tn_barrier(comm, all.stream));
        EXPECT_OK(tn_comm_wait(comm));
        EXPECT_OK(tn_comm_split(comm, 0, 0, NULL, &part));
        EXPECT_OK(tn_comm_destroy(part));
        EXPECT_OK(tn_comm_destroy(comm));
    }
}

static void create_times_out_too(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    config.device = all.device;
    config.engine = TN_COMM_MPI;
    config.timeout_us = DEADLINE_US;
    if (!is_missing) {
        EXPECT_STATUS(tn_comm_create(&config, &comm), TN_COMM_TIMEOUT);
        EXPECT_ERROR_HAS("all ranks to call tn_comm_create");
        assert_null(comm);
    }
    meet();
}

static void split_times_out_too(void **state) {
    (void)state;
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US), *part = NULL;
    char name[64];
    snprintf(name, sizeof name, "for rank %d to call tn_comm_split", all.count - 1);
    if (!is_missing) {
        EXPECT_STATUS(tn_comm_split(comm, 0, 0, NULL, &part), TN_COMM_TIMEOUT);
        EXPECT_ERROR_HAS(name);
        assert_null(part);
        EXPECT_STATUS(tn_barrier(comm, all.stream), TN_COMM_TIMEOUT);
    }
    meet();
    EXPECT_STATUS(tn_comm_destroy(comm), is_missing ? TN_OK : TN_COMM_TIMEOUT);
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    is_missing = all.rank == all.count - 1;
    all.has_given_up = 1;
    return 0;
}

static int close_ranks(void **state) {
    (void)state;
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_timeout_may_be_endless),
        cmocka_unit_test(the_others_time_out_and_their_memory_is_theirs),
        cmocka_unit_test(a_new_communicator_works),
        cmocka_unit_test(split_times_out_too),
        cmocka_unit_test(create_times_out_too),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
