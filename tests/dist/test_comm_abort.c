/* A rank gives a communicator up: the others' collectives end at once, with its number and its
 * words and not by the deadline, whether they are in one or come to one later; nothing of it
 * reaches another communicator, and memory stays balanced. */
#include "ranks_support.h"

#include <stdio.h>

enum { DEADLINE_US = 120 * 1000 * 1000, BYTES = 5000, ROUNDS = 25 };

static rank_fixture all; /* its communicator is for the test's own meetings */
static int gives_up;     /* the last rank */

static void meet(void) {
    EXPECT_OK(tn_barrier(all.comm, all.other));
    EXPECT_OK(tn_comm_wait(all.comm));
}

/* All ranks have it. */
static tn_comm *doomed_comm(void) {
    tn_comm *comm = ranks_comm(&all, "doomed", DEADLINE_US);
    meet();
    return comm;
}

/* Not a timeout: nobody has waited for the deadline. */
static void expect_told(tn_comm *comm, const char *why) {
    char who[64];
    snprintf(who, sizeof who, "rank %d has given up", all.count - 1);
    EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_ERROR);
    EXPECT_ERROR_HAS(who);
    EXPECT_ERROR_HAS(why);
    EXPECT_STATUS(tn_barrier(comm, all.stream), TN_COMM_ERROR);
    EXPECT_ERROR_HAS(why);
}

static void expect_given_up(tn_comm *comm, const char *why) {
    EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("given up: ");
    EXPECT_ERROR_HAS(why);
    EXPECT_STATUS(tn_barrier(comm, all.stream), TN_COMM_ERROR);
}

static void end_failed(tn_comm *comm) {
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_ERROR);
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
}

static void who_is_in_a_collective_is_told_at_once(void **state) {
    (void)state;
    tn_comm *comm = doomed_comm();
    unsigned char *part = test_take(all.pool, BYTES, all.stream);
    unsigned char *whole = test_take(all.pool, (size_t)BYTES * (size_t)all.count, all.stream);
    if (gives_up) {
        tn_comm_abort(comm, "the test has no more of it");
        expect_given_up(comm, "the test has no more of it");
    } else {
        EXPECT_OK(tn_all_gather(comm, part, whole, BYTES, all.stream));
        expect_told(comm, "the test has no more of it");
    }
    end_failed(comm);
    test_give(all.pool, part, all.stream);
    test_give(all.pool, whole, all.stream);
    meet();
}

static void who_comes_later_is_told_then(void **state) {
    (void)state;
    tn_comm *comm = doomed_comm();
    if (gives_up) tn_comm_abort(comm, NULL);
    meet();
    if (!gives_up) {
        EXPECT_OK(tn_barrier(comm, all.stream));
        expect_told(comm, "tn_comm_abort was called");
    }
    meet();
    end_failed(comm);
}

static void who_splits_is_told_too(void **state) {
    (void)state;
    tn_comm *comm = doomed_comm(), *part = NULL;
    if (gives_up) {
        tn_comm_abort(comm, "it is not split");
    } else {
        EXPECT_STATUS(tn_comm_split(comm, 0, 0, NULL, &part), TN_COMM_ERROR);
        EXPECT_ERROR_HAS("it is not split");
        assert_null(part);
    }
    meet();
    end_failed(comm);
}

/* TCP has one way for both. MPI's have tags of their own, so that there it is the deadline. */
static void who_splits_where_others_gather_is_found_out(void **state) {
    (void)state;
    if (!all.rendezvous) return;
    tn_comm *comm = doomed_comm(), *part = NULL;
    if (gives_up) {
        EXPECT_STATUS(tn_comm_split(comm, 0, 0, NULL, &part), TN_COMM_ERROR);
    } else {
        EXPECT_OK(tn_barrier(comm, all.stream));
        EXPECT_STATUS(tn_comm_wait(comm), TN_COMM_ERROR);
    }
    EXPECT_ERROR_HAS("called tn_comm_split");
    meet();
    end_failed(comm);
}

/* Words that nobody has taken are no later communicator's, and none of a part's are the whole's. */
static void nothing_of_it_reaches_another_one(void **state) {
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        tn_comm *whole = ranks_comm(&all, "whole", DEADLINE_US), *part = NULL;
        EXPECT_OK(tn_comm_split(whole, 0, 0, "part", &part));
        EXPECT_OK(tn_barrier(whole, all.stream)); /* all have it */
        EXPECT_OK(tn_comm_wait(whole));
        if (gives_up) tn_comm_abort(part, "round by round");
        EXPECT_OK(tn_barrier(whole, all.stream));
        EXPECT_OK(tn_comm_wait(whole));
        tn_status status = tn_comm_destroy(part);
        if (gives_up) assert_int_equal(status, TN_COMM_ERROR);
        EXPECT_OK(tn_comm_destroy(whole));
    }
}

static void the_first_failure_stays_and_the_last_error_too(void **state) {
    (void)state;
    tn_comm *comm = doomed_comm();
    tn_comm_abort(NULL, "nothing");
    EXPECT_STATUS(tn_send(comm, NULL, 1, all.count, all.stream), TN_INVALID_ARGUMENT);
    char before[512], after[512];
    snprintf(before, sizeof before, "%s", tn_error_last());
    tn_comm_abort(comm, "first");
    tn_comm_abort(comm, "second");
    snprintf(after, sizeof after, "%s", tn_error_last());
    assert_string_equal(after, before);
    expect_given_up(comm, "first");
    end_failed(comm);
    meet();
}

static int open_ranks(void **state) {
    (void)state;
    all = ranks_open();
    gives_up = all.rank == all.count - 1;
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
        cmocka_unit_test(who_is_in_a_collective_is_told_at_once),
        cmocka_unit_test(who_comes_later_is_told_then),
        cmocka_unit_test(who_splits_is_told_too),
        cmocka_unit_test(who_splits_where_others_gather_is_found_out),
        cmocka_unit_test(nothing_of_it_reaches_another_one),
        cmocka_unit_test(the_first_failure_stays_and_the_last_error_too),
    };
    return TEST_RUN_GROUP(tests, open_ranks, close_ranks);
}
