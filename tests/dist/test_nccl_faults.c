/* Faults over NCCL: ranks that die, hang, call something else or give up, at moments that are
 * known. The others have a status that says why within bounded time, their streams end, their
 * memory is theirs, and they end well.
 *
 * Ranks are forked processes, TENURE_TEST_RANKS of them (3 if that is not set). With
 * TENURE_RANKS_ON=cuda a GPU for each, of its rank's number; else host devices and the stand-in for
 * NCCL, which TENURE_NCCL_LIBRARY names.
 */
#include "test_processes.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "host_alloc.h"
#include "options.h"
#include "tenure_rendezvous.h"
#include "test_pools.h"

/* What is known at once is known long before LONG_US; SOON_S is what that may take. */
enum { MICROSECONDS = 1000000, LONG_US = 120 * MICROSECONDS, SOON_S = 40, COUNT = 1 << 16 };

typedef struct survivor {
    int rank, rank_count, loses_rank_0, may_end_well;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_rendezvous *ranks;
    tn_comm *comm;
    float *block; /* COUNT for each rank, twice */
    struct timespec begin;
} survivor;

/* What is to happen in a round; the same for all ranks. */
typedef struct fault {
    int victim;
    int op;                 /* which collective it strikes at */
    int is_in_it;           /* the victim has put it, too, and the others only then */
    uint64_t timeout_us[2]; /* of the victim, of the others; 0: LONG_US */
} fault;

static const fault *fault_of(const test_meeting *meeting) { return meeting->argument; }

static int is_on_gpus(void) {
    const char *place = getenv("TENURE_RANKS_ON");
    return place && strcmp(place, "cuda") == 0;
}

/* A deadline that a test waits for, long enough to join by: NCCL's first communicator of a process
 * takes seconds on a GPU. */
static uint64_t short_us(void) { return (is_on_gpus() ? 15 : 5) * (uint64_t)MICROSECONDS; }
static const char *deadline_words(void) { return is_on_gpus() ? "15 s after" : "5 s after"; }

static int rank_count_of_test(void) {
    const char *text = getenv("TENURE_TEST_RANKS");
    return text ? atoi(text) : 3;
}

/* ---- a rank --------------------------------------------------------------------------------- */

static tn_device *open_device(int rank) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    if (!is_on_gpus()) return test_open_host();
    config.driver = TN_DRIVER_CUDA;
    config.ordinal = test_gpu_of_rank(rank);
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

static void meet(const survivor *s) { EXPECT_OK(tn_rendezvous_gather(s->ranks, NULL, 0, NULL)); }

static tn_rendezvous *join_ranks(const test_meeting *meeting) {
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    tn_rendezvous *ranks = NULL;
    how.rank = meeting->rank;
    how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1";
    how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    how.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&how, &ranks));
    return ranks;
}

static survivor open_rank(const test_meeting *meeting) {
    const fault *plan = fault_of(meeting);
    survivor s = {.rank = meeting->rank, .rank_count = meeting->rank_count};
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    size_t bytes = 2 * sizeof(float) * COUNT * (size_t)s.rank_count;
    uint64_t timeout_us = plan->timeout_us[meeting->rank != plan->victim];
    s.loses_rank_0 = plan->victim == 0;
    s.may_end_well = plan->is_in_it;
    s.device = open_device(s.rank);
    s.pool = test_open_pool(s.device, TN_BACKING_AUTO, 0);
    s.stream = test_open_stream(s.device);
    s.ranks = join_ranks(meeting);
    config.device = s.device;
    config.engine = TN_COMM_NCCL;
    config.name = "step";
    config.rendezvous = s.ranks;
    config.timeout_us = timeout_us ? timeout_us : LONG_US;
    EXPECT_OK(tn_comm_create(&config, &s.comm));
    s.block = test_take(s.pool, bytes, s.stream);
    EXPECT_OK(tn_fill(s.device, s.block, 0, bytes, s.stream));
    return s;
}

/* However the communicator has ended, all else balances. */
static void close_rank(survivor *s, tn_status expected) {
    EXPECT_STATUS(tn_comm_destroy(s->comm), expected);
    EXPECT_OK(tn_stream_synchronize(s->device, s->stream));
    test_give(s->pool, s->block, s->stream);
    assert_int_equal(test_pool_stats(s->pool).live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_stream_destroy(s->device, s->stream));
    tn_rendezvous_destroy(s->ranks);
    EXPECT_OK(tn_device_destroy(s->device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* ---- collectives ---------------------------------------------------------------------------- */

enum { OPS = 7 };

static tn_status put_group(const survivor *s) {
    size_t last = (size_t)s->rank_count - 1;
    const tn_segment segments[] = {{0, 0, 1000}, {(int)last, 1000, 3000}, {0, 9000, 17}};
    tn_status status = tn_comm_group_begin(s->comm);
    if (status == TN_OK)
        status = tn_all_gather_uneven(s->comm, s->block, s->block, segments, 3, s->stream);
    if (status == TN_OK) status = tn_barrier(s->comm, s->stream);
    if (status == TN_OK) status = tn_comm_group_end(s->comm, s->stream);
    tn_comm_group_cancel(s->comm);
    return status;
}

static tn_status put(const survivor *s, int op) {
    float *whole = s->block, *part = s->block + (size_t)COUNT * (size_t)s->rank_count;
    switch (op) {
    case 0: return tn_all_reduce(s->comm, whole, whole, COUNT, TN_FP32, TN_REDUCE_SUM, s->stream);
    case 1: return tn_all_gather(s->comm, part, whole, COUNT * sizeof(float), s->stream);
    case 2:
        return tn_reduce_scatter(s->comm, whole, part, COUNT, TN_FP32, TN_REDUCE_SUM, s->stream);
    case 3: return tn_broadcast(s->comm, whole, COUNT, s->rank_count - 1, s->stream);
    case 4: return tn_all_to_all(s->comm, whole, part, COUNT / 64, s->stream);
    case 5: return put_group(s);
    default: return tn_barrier(s->comm, s->stream);
    }
}

/* All ranks do all of them: the connections that NCCL makes with the first of a kind are there. */
static void work_in_order(survivor *s) {
    for (int op = 0; op < OPS; op++)
        EXPECT_OK(put(s, op));
    EXPECT_OK(tn_comm_wait(s->comm));
    tn_status met = tn_rendezvous_gather(s->ranks, NULL, 0, NULL);
    /* Rank 0 may die when it has its answer, and before the others have theirs. */
    if (!s->loses_rank_0) EXPECT_OK(met);
    clock_gettime(CLOCK_MONOTONIC, &s->begin);
}

static void expect_soon(const survivor *s) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    assert_in_range(now.tv_sec - s->begin.tv_sec, 0, SOON_S);
}

/* NCCL may see itself that a connection has ended, before the news of whose. */
static void expect_words(const char *words) {
    if (strstr(words, "is gone") && strstr(tn_error_last(), "remote process exited")) return;
    EXPECT_ERROR_HAS(words);
}

/* The collective, wherever it shows that it fails: where it is put, or where it is waited for. */
static void expect_failure(const survivor *s, int op, tn_status expected, const char *words) {
    tn_status status = put(s, op);
    if (status == TN_OK) status = tn_comm_wait(s->comm);
    /* What the victim had still sent may have been enough. */
    if (status == TN_OK && s->may_end_well) status = put(s, OPS - 1);
    if (status == TN_OK) status = tn_comm_wait(s->comm);
    EXPECT_STATUS(status, expected);
    expect_words(words);
    EXPECT_STATUS(tn_barrier(s->comm, s->stream), expected);
    expect_words(words);
    expect_soon(s);
    EXPECT_OK(tn_stream_synchronize(s->device, s->stream));
    expect_soon(s);
}

/* ---- rounds --------------------------------------------------------------------------------- */

static void run_round(const fault *plan, int kills, test_rank_body body) {
    pid_t ranks[16];
    int count = rank_count_of_test();
    test_meeting meeting = test_meeting_open();
    meeting.argument = plan;
    cmocka_set_test_filter(NULL); /* which is this program's, and not the ranks' */
    for (int rank = 0; rank < count; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, count, body);
    test_meeting_close(&meeting);
    for (int rank = 0; rank < count; rank++)
        if (!kills || rank != plan->victim) test_rank_end(ranks[rank]);
    if (!kills) return;
    kill(ranks[plan->victim], SIGKILL); /* if it hangs */
    test_rank_end_killed(ranks[plan->victim]);
}

static int last_rank(void) { return rank_count_of_test() - 1; }

/* ---- a rank that dies ----------------------------------------------------------------------- */

/* Rank 0 had it: one that is left needs none, several need what the communicator was not made for.
 */
static void shrink_without_store(const survivor *s) {
    const int excluded[] = {0};
    tn_comm *shrunk = NULL;
    if (s->rank_count > 2) {
        EXPECT_STATUS(tn_comm_shrink(s->comm, excluded, 1, NULL, &shrunk), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("tn_comm_config.shrinkable");
        assert_null(shrunk);
        return;
    }
    EXPECT_OK(tn_comm_shrink(s->comm, excluded, 1, NULL, &shrunk));
    assert_int_equal(tn_comm_size(shrunk), 1);
    EXPECT_OK(tn_barrier(shrunk, s->stream));
    EXPECT_OK(tn_comm_destroy(shrunk));
}

static void die_or_notice(const test_meeting *meeting) {
    const fault *plan = fault_of(meeting);
    char words[64];
    survivor s = open_rank(meeting);
    work_in_order(&s);
    if (s.rank == plan->victim) {
        if (plan->is_in_it) EXPECT_OK(put(&s, plan->op));
        raise(SIGKILL);
    }
    snprintf(words, sizeof words, "rank %d is gone", plan->victim);
    expect_failure(&s, plan->op, TN_COMM_ERROR, words);
    if (s.loses_rank_0) shrink_without_store(&s);
    close_rank(&s, TN_COMM_ERROR);
}

static void a_death_before_each_collective_is_known_at_once(void **state) {
    (void)state;
    for (int op = 0; op < OPS; op++) {
        const fault plan = {.victim = last_rank(), .op = op};
        run_round(&plan, 1, die_or_notice);
    }
}

static void a_death_within_a_collective_is_known_at_once(void **state) {
    (void)state;
    for (int op = 0; op < OPS; op += 2) {
        const fault plan = {.victim = last_rank(), .op = op, .is_in_it = 1};
        run_round(&plan, 1, die_or_notice);
    }
}

static void the_death_of_rank_0_is_known_at_once(void **state) {
    (void)state;
    const fault plan = {.victim = 0};
    run_round(&plan, 1, die_or_notice);
}

/* The others have put theirs, and it runs, when the victim dies. */
static void die_under_others(const test_meeting *meeting) {
    const fault *plan = fault_of(meeting);
    char words[64];
    survivor s = open_rank(meeting);
    work_in_order(&s);
    if (s.rank != plan->victim) EXPECT_OK(put(&s, plan->op));
    meet(&s);
    if (s.rank == plan->victim) raise(SIGKILL);
    snprintf(words, sizeof words, "rank %d is gone", plan->victim);
    EXPECT_STATUS(tn_comm_wait(s.comm), TN_COMM_ERROR);
    expect_words(words);
    expect_soon(&s);
    EXPECT_OK(tn_stream_synchronize(s.device, s.stream));
    tn_comm *shrunk = NULL;
    EXPECT_OK(tn_comm_shrink(s.comm, &plan->victim, 1, NULL, &shrunk)); /* rank 0 has the store */
    assert_int_equal(tn_comm_size(shrunk), s.rank_count - 1);
    EXPECT_OK(tn_barrier(shrunk, s.stream));
    EXPECT_OK(tn_comm_destroy(shrunk));
    close_rank(&s, TN_COMM_ERROR);
    expect_soon(&s);
}

static void what_waits_for_a_rank_that_dies_ends(void **state) {
    (void)state;
    const fault plan = {.victim = last_rank(), .op = 1};
    run_round(&plan, 1, die_under_others);
}

/* ---- a rank that hangs, gives up or calls something else ------------------------------------ */

static void hang_or_notice(const test_meeting *meeting) {
    const fault *plan = fault_of(meeting);
    survivor s = open_rank(meeting);
    work_in_order(&s);
    for (; s.rank == plan->victim;)
        pause();
    tn_status status = put(&s, plan->op);
    if (status == TN_OK) status = tn_comm_wait(s.comm);
    /* Who is late says so, and may be the first to. */
    assert_true(status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR);
    EXPECT_ERROR_HAS(deadline_words());
    expect_soon(&s);
    EXPECT_OK(tn_stream_synchronize(s.device, s.stream));
    EXPECT_STATUS(tn_comm_destroy(s.comm), status);
    expect_soon(&s);
    fflush(stdout);
    _exit(0); /* rank 0 would wait for the one that hangs to leave */
}

static void a_hang_ends_by_the_deadline(void **state) {
    (void)state;
    const fault plan = {.victim = last_rank(), .timeout_us = {short_us(), short_us()}};
    run_round(&plan, 1, hang_or_notice);
}

/* One rank has a short deadline and nobody answers: all give up when it does. */
static void give_up_together(const test_meeting *meeting) {
    const fault *plan = fault_of(meeting);
    survivor s = open_rank(meeting);
    int is_alone = s.rank == plan->victim;
    work_in_order(&s);
    tn_status expected = is_alone ? TN_COMM_TIMEOUT : TN_COMM_ERROR;
    if (is_alone) expect_failure(&s, plan->op, expected, deadline_words());
    meet(&s);
    if (!is_alone) expect_failure(&s, plan->op, expected, deadline_words());
    EXPECT_OK(tn_stream_synchronize(s.device, s.stream));
    close_rank(&s, expected);
    expect_soon(&s);
}

static void a_rank_that_gives_up_takes_all_with_it(void **state) {
    (void)state;
    const fault plan = {.victim = last_rank(), .timeout_us = {short_us(), LONG_US}};
    run_round(&plan, 0, give_up_together);
}

static void differ(const test_meeting *meeting) {
    setenv("TENURE_CHECK_COLLECTIVES", "1", 1);
    tn__options_reload();
    survivor s = open_rank(meeting);
    work_in_order(&s);
    size_t count = s.rank == fault_of(meeting)->victim ? COUNT / 2 : COUNT;
    tn_comm_stats before = TN_COMM_STATS_INIT, after = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(s.comm, &before));
    EXPECT_STATUS(tn_all_reduce(s.comm, s.block, s.block, count, TN_FP32, TN_REDUCE_SUM, s.stream),
                  TN_COMM_ERROR);
    EXPECT_ERROR_HAS("of 65536 fp32 sum");
    EXPECT_ERROR_HAS("of 32768 fp32 sum");
    EXPECT_ERROR_HAS("all ranks make the same calls in the same order");
    EXPECT_OK(tn_comm_stats_get(s.comm, &after));
    assert_memory_equal(&before, &after, sizeof before);
    close_rank(&s, TN_COMM_ERROR);
    expect_soon(&s);
}

static void another_size_is_named_in_checked_mode(void **state) {
    (void)state;
    const fault plan = {.victim = last_rank()};
    run_round(&plan, 0, differ);
}

/* ---- the end -------------------------------------------------------------------------------- */

/* Nothing is on streams: to destroy it is well, or says that a rank has died, and takes no time. */
static void destroy_without_a_peer(const test_meeting *meeting) {
    survivor s = open_rank(meeting);
    work_in_order(&s);
    if (s.rank == fault_of(meeting)->victim) raise(SIGKILL);
    tn_status status = tn_comm_destroy(s.comm);
    assert_true(status == TN_OK || status == TN_COMM_ERROR);
    s.comm = NULL;
    close_rank(&s, TN_OK);
    expect_soon(&s);
}

static void a_communicator_is_destroyed_without_its_peer(void **state) {
    (void)state;
    for (int first = 0; first < 2; first++) {
        const fault plan = {.victim = first ? 0 : last_rank()};
        run_round(&plan, 1, destroy_without_a_peer);
    }
}

/* A rank that has left is no rank that has died. */
static void leave_first(const test_meeting *meeting) {
    survivor s = open_rank(meeting);
    tn_comm *alone = NULL;
    work_in_order(&s);
    EXPECT_OK(tn_comm_split(s.comm, s.rank, 0, "alone", &alone));
    EXPECT_OK(tn_comm_destroy(s.comm));
    s.comm = alone;
    if (s.rank != fault_of(meeting)->victim)
        for (int i = 0; i < 50; i++) {
            EXPECT_OK(tn_barrier(s.comm, s.stream));
            EXPECT_OK(tn_comm_wait(s.comm));
        }
    close_rank(&s, TN_OK);
}

static void who_leaves_in_order_is_no_fault(void **state) {
    (void)state;
    const fault plan = {.victim = 0};
    run_round(&plan, 0, leave_first);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_death_before_each_collective_is_known_at_once),
        cmocka_unit_test(a_death_within_a_collective_is_known_at_once),
        cmocka_unit_test(the_death_of_rank_0_is_known_at_once),
        cmocka_unit_test(what_waits_for_a_rank_that_dies_ends),
        cmocka_unit_test(a_hang_ends_by_the_deadline),
        cmocka_unit_test(a_rank_that_gives_up_takes_all_with_it),
        cmocka_unit_test(another_size_is_named_in_checked_mode),
        cmocka_unit_test(a_communicator_is_destroyed_without_its_peer),
        cmocka_unit_test(who_leaves_in_order_is_no_fault),
    };
    cmocka_set_test_filter(getenv("TENURE_TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
