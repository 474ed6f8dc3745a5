/* The watch over communicators of an engine without deadlines: here a scripted one, whose
 * collectives end when the test says so. Each rank is a process. */
#include "test_processes.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_watch.h"
#include "driver_state.h"
#include "host_alloc.h"
#include "options.h"
#include "test_pools.h"

enum { SHORT_US = 200 * 1000, LONG_US = 60 * 1000 * 1000 };

/* ---- the engine ----------------------------------------------------------------------------- */

struct tn__comm_state {
    const tn__driver *driver;
    tn__driver_device *on;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int is_held; /* collectives do not end */
    int is_aborted;
    int aborts;
    int starts;
    int left;
};

static tn__comm_state script;
static int ranks_of_script[2]; /* rank and count */

static tn_status script_join(const tn_comm_config *config, int *rank, int *rank_count,
                             tn__comm_state **out) {
    script.driver = tn__device_driver(config->device);
    script.on = tn__device_state(config->device);
    script.is_aborted = script.aborts = script.starts = script.left = 0;
    *rank = ranks_of_script[0];
    *rank_count = ranks_of_script[1];
    *out = &script;
    return TN_OK;
}

static void end_when_told(void *argument) {
    tn__comm_state *state = argument;
    pthread_mutex_lock(&state->lock);
    while (state->is_held && !state->is_aborted)
        pthread_cond_wait(&state->changed, &state->lock);
    pthread_mutex_unlock(&state->lock);
}

static tn_status script_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    (void)batch;
    state->starts++;
    return state->driver->host_task(state->on, end_when_told, state, stream);
}

static tn_status script_check(tn__comm_state *state) { return (void)state, TN_OK; }

static void script_abort(tn__comm_state *state) {
    pthread_mutex_lock(&state->lock);
    state->is_aborted = 1;
    state->aborts++;
    pthread_cond_broadcast(&state->changed);
    pthread_mutex_unlock(&state->lock);
}

static void script_leave(tn__comm_state *state) { state->left++; }

static const tn__comm_engine scripted = {.abi = TN__COMM_ENGINE_ABI,
                                         .name = "scripted",
                                         .join = script_join,
                                         .start = script_start,
                                         .check = script_check,
                                         .abort = script_abort,
                                         .leave = script_leave};

static void hold(int is_held) {
    pthread_mutex_lock(&script.lock);
    script.is_held = is_held;
    pthread_cond_broadcast(&script.changed);
    pthread_mutex_unlock(&script.lock);
}

/* ---- a rank --------------------------------------------------------------------------------- */

typedef struct rank_state {
    tn_device *device;
    tn_stream stream;
    tn_rendezvous *ranks;
    tn_comm *comm;
} rank_state;

static rank_state open_rank(const test_meeting *meeting, uint64_t timeout_us) {
    rank_state r = {.device = test_open_host()};
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    r.stream = test_open_stream(r.device);
    config.device = r.device;
    config.name = "watched";
    config.timeout_us = timeout_us;
    ranks_of_script[0] = meeting->rank;
    ranks_of_script[1] = meeting->rank_count;
    how.rank = meeting->rank;
    how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1";
    how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    how.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&how, &r.ranks));
    config.rendezvous = r.ranks;
    EXPECT_OK(tn__comm_create(&config, &scripted, &r.comm));
    return r;
}

static void close_rank(rank_state *r, tn_status expected) {
    EXPECT_STATUS(tn_comm_destroy(r->comm), expected);
    assert_int_equal(script.left, 1);
    EXPECT_OK(tn_stream_synchronize(r->device, r->stream));
    EXPECT_OK(tn_stream_destroy(r->device, r->stream));
    tn_rendezvous_destroy(r->ranks);
    EXPECT_OK(tn_device_destroy(r->device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* Until the communicator fails, whoever makes it: nobody calls it meanwhile. */
static tn_status wait_for_failure(tn_comm *comm) {
    tn_status status = TN_OK;
    while (status == TN_OK) {
        sched_yield();
        pthread_mutex_lock(&comm->lock);
        status = comm->failure;
        pthread_mutex_unlock(&comm->lock);
    }
    return status;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void end_in_order(const test_meeting *meeting) {
    rank_state r = open_rank(meeting, LONG_US);
    for (int i = 0; i < 200; i++)
        EXPECT_OK(tn_barrier(r.comm, r.stream));
    EXPECT_OK(tn_comm_wait(r.comm));
    assert_int_equal(script.starts, 200);
    assert_int_equal(script.aborts, 0);
    close_rank(&r, TN_OK);
}

static void collectives_that_end_are_no_matter(void **state) {
    (void)state;
    test_ranks_run(1, end_in_order, NULL);
}

/* More than are watched at a time, unless it fails before they are all put. */
static void hang(const test_meeting *meeting) {
    rank_state r = open_rank(meeting, SHORT_US);
    char text[16 * 1024];
    tn_status status = TN_OK;
    hold(1);
    for (int i = 0; i < 40 && status == TN_OK; i++)
        status = tn_barrier(r.comm, r.stream);
    assert_int_equal(wait_for_failure(r.comm), TN_COMM_TIMEOUT);
    assert_int_equal(script.aborts, 1);
    EXPECT_STATUS(tn_barrier(r.comm, r.stream), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("communicator watched, rank 0 of 1: barrier 1 has not ended 0.2 s after its "
                     "stream came to it");
    assert_true(tn_comm_report(r.comm, TN_REPORT_TEXT, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "communicator watched: scripted, rank 0 of 1, "));
    assert_non_null(strstr(text, "failed: communicator watched"));
    assert_non_null(strstr(text, "  1 barrier of 0 byte, root 0, stream "));
    assert_true(tn_comm_report(r.comm, TN_REPORT_JSON, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "\"status\": \"TN_COMM_TIMEOUT\""));
    assert_non_null(strstr(text, "{\"sequence\": 1, \"kind\": \"barrier\", \"calls\": 1, "));
    assert_int_equal(tn_comm_report(r.comm, (tn_report_format)7, text, sizeof text), 0);
    close_rank(&r, TN_COMM_TIMEOUT);
}

static void a_hang_fails_by_itself_and_names_the_first(void **state) {
    (void)state;
    test_ranks_run(1, hang, NULL);
}

/* The time of work before it on its stream does not count: only a wait for it gives up. */
static void begin_late(const test_meeting *meeting) {
    rank_state r = open_rank(meeting, SHORT_US);
    hold(1);
    EXPECT_OK(script.driver->host_task(script.on, end_when_told, &script, r.stream));
    EXPECT_OK(tn_barrier(r.comm, r.stream));
    uint64_t until = tn__flight_now_us() + 3 * SHORT_US;
    while (tn__flight_now_us() < until)
        sched_yield();
    pthread_mutex_lock(&r.comm->lock);
    assert_int_equal(r.comm->failure, TN_OK);
    pthread_mutex_unlock(&r.comm->lock);
    EXPECT_STATUS(tn_comm_wait(r.comm), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("its collectives were not done");
    close_rank(&r, TN_COMM_TIMEOUT);
}

static void a_collective_that_has_not_begun_is_not_late(void **state) {
    (void)state;
    test_ranks_run(1, begin_late, NULL);
}

/* Rank 0's collective is late; rank 1's, that has a long deadline, is aborted too. */
static void fail_together(const test_meeting *meeting) {
    rank_state r = open_rank(meeting, meeting->rank ? LONG_US : SHORT_US);
    hold(1);
    if (meeting->rank) EXPECT_OK(tn_barrier(r.comm, r.stream));
    EXPECT_OK(tn_rendezvous_gather(r.ranks, NULL, 0, NULL));
    if (!meeting->rank) EXPECT_OK(tn_barrier(r.comm, r.stream));
    tn_status expected = meeting->rank ? TN_COMM_ERROR : TN_COMM_TIMEOUT;
    assert_int_equal(wait_for_failure(r.comm), expected);
    assert_int_equal(script.aborts, 1);
    EXPECT_STATUS(tn_comm_wait(r.comm), expected);
    EXPECT_ERROR_HAS("rank 0 of 2: barrier 1 has not ended");
    if (meeting->rank) EXPECT_ERROR_HAS("rank 1 of 2: another one failed: ");
    EXPECT_OK(tn_rendezvous_gather(r.ranks, NULL, 0, NULL)); /* the store is there till then */
    close_rank(&r, expected);
}

static void all_ranks_abort_when_one_does(void **state) {
    (void)state;
    test_ranks_run(2, fail_together, NULL);
}

static void lose_a_rank(const test_meeting *meeting) {
    char none[1];
    size_t bytes = 0;
    rank_state r = open_rank(meeting, LONG_US);
    hold(1);
    EXPECT_OK(tn_barrier(r.comm, r.stream));
    EXPECT_OK(tn_rendezvous_gather(r.ranks, NULL, 0, NULL));
    if (meeting->rank == 1) raise(SIGKILL);
    assert_int_equal(wait_for_failure(r.comm), TN_COMM_ERROR);
    EXPECT_STATUS(tn_comm_wait(r.comm), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("another one failed: rank 1 is gone: its process has ended");
    if (meeting->rank == 2) EXPECT_OK(tn__store_set(r.ranks->store, "heard", NULL, 0));
    if (meeting->rank == 0)
        EXPECT_OK(tn__store_get(r.ranks->store, "heard", LONG_US, none, 0, &bytes));
    close_rank(&r, TN_COMM_ERROR);
}

static void the_death_of_a_rank_aborts_the_others(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    pid_t ranks[3];
    for (int rank = 0; rank < 3; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, 3, lose_a_rank);
    test_meeting_close(&meeting);
    test_rank_end_killed(ranks[1]);
    test_rank_end(ranks[0]);
    test_rank_end(ranks[2]);
}

/* Rank 0 takes the store with it: that the connection ends without a farewell is the news. */
static void lose_rank_0(const test_meeting *meeting) {
    char none[1];
    size_t bytes = 0;
    rank_state r = open_rank(meeting, LONG_US);
    hold(1);
    EXPECT_OK(tn_barrier(r.comm, r.stream));
    if (meeting->rank == 0) {
        EXPECT_OK(tn__store_get(r.ranks->store, "rank 1", LONG_US, none, 0, &bytes));
        EXPECT_OK(tn__store_get(r.ranks->store, "rank 2", LONG_US, none, 0, &bytes));
        raise(SIGKILL);
    }
    const char *mine = meeting->rank == 1 ? "rank 1" : "rank 2";
    tn_status set = tn__store_set(r.ranks->store, mine, NULL, 0);
    assert_true(set == TN_OK || set == TN_COMM_ERROR); /* it may not live to say that it is set */
    assert_int_equal(wait_for_failure(r.comm), TN_COMM_ERROR);
    EXPECT_STATUS(tn_comm_wait(r.comm), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("another one failed: rank 0 is gone: its process has ended");
    close_rank(&r, TN_COMM_ERROR);
}

static void the_death_of_rank_0_aborts_the_others(void **state) {
    (void)state;
    test_meeting meeting = test_meeting_open();
    pid_t ranks[3];
    for (int rank = 0; rank < 3; rank++)
        ranks[rank] = test_rank_begin(&meeting, rank, 3, lose_rank_0);
    test_meeting_close(&meeting);
    test_rank_end_killed(ranks[0]);
    test_rank_end(ranks[1]);
    test_rank_end(ranks[2]);
}

/* Rank 1's wait gives up, and it destroys what has failed at once. */
static void give_up_and_go(const test_meeting *meeting) {
    rank_state r = open_rank(meeting, meeting->rank ? SHORT_US : LONG_US);
    hold(1);
    if (!meeting->rank) EXPECT_OK(tn_barrier(r.comm, r.stream));
    EXPECT_OK(tn_rendezvous_gather(r.ranks, NULL, 0, NULL)); /* rank 0 has not failed yet */
    if (meeting->rank) EXPECT_OK(tn_barrier(r.comm, r.stream));
    tn_status expected = meeting->rank ? TN_COMM_TIMEOUT : TN_COMM_ERROR;
    EXPECT_STATUS(tn_comm_wait(r.comm), expected);
    EXPECT_ERROR_HAS("communicator watched, rank 1 of 2: ");
    close_rank(&r, expected);
}

static void who_gives_up_and_goes_is_heard(void **state) {
    (void)state;
    test_ranks_run(2, give_up_and_go, NULL);
}

#if defined(__SANITIZE_THREAD__)
/* A process that ends without goodbye has a watch's thread left. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "report_thread_leaks=0"; }
#endif

/* As at exit, from where on the driver answers nothing. */
static void end_without_goodbye(const test_meeting *meeting) {
    rank_state r = open_rank(meeting, LONG_US);
    hold(1);
    EXPECT_OK(tn_barrier(r.comm, r.stream));
    tn__driver_set_gone();
    /* Some looks of the watch: if it is slow nothing wrong is shown. */
    uint64_t until = tn__flight_now_us() + 3 * SHORT_US;
    while (tn__flight_now_us() < until)
        sched_yield();
    pthread_mutex_lock(&r.comm->lock);
    assert_int_equal(r.comm->failure, TN_OK);
    pthread_mutex_unlock(&r.comm->lock);
    assert_int_equal(script.aborts, 0);
}

static void a_process_that_ends_aborts_nothing(void **state) {
    (void)state;
    test_ranks_run(1, end_without_goodbye, NULL);
}

static void differ(const test_meeting *meeting) {
    setenv("TENURE_CHECK_COLLECTIVES", "1", 1);
    tn__options_reload();
    rank_state r = open_rank(meeting, LONG_US);
    float data[4] = {0};
    for (int i = 0; i < 20; i++)
        EXPECT_OK(tn_all_reduce(r.comm, data, data, 4, TN_FP32, TN_REDUCE_SUM, r.stream));
    size_t count = meeting->rank == 2 ? 3 : 4;
    EXPECT_STATUS(tn_all_reduce(r.comm, data, data, count, TN_FP32, TN_REDUCE_SUM, r.stream),
                  TN_COMM_ERROR);
    EXPECT_ERROR_HAS("all_reduce 21 of 4 fp32 sum");
    EXPECT_ERROR_HAS("all_reduce 21 of 3 fp32 sum");
    EXPECT_ERROR_HAS("all ranks make the same calls in the same order");
    assert_int_equal(script.starts, 20);
    close_rank(&r, TN_COMM_ERROR);
}

static void checked_collectives_that_differ_never_begin(void **state) {
    (void)state;
    test_ranks_run(3, differ, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_that_end_are_no_matter),
        cmocka_unit_test(a_hang_fails_by_itself_and_names_the_first),
        cmocka_unit_test(a_collective_that_has_not_begun_is_not_late),
        cmocka_unit_test(all_ranks_abort_when_one_does),
        cmocka_unit_test(the_death_of_a_rank_aborts_the_others),
        cmocka_unit_test(the_death_of_rank_0_aborts_the_others),
        cmocka_unit_test(who_gives_up_and_goes_is_heard),
        cmocka_unit_test(a_process_that_ends_aborts_nothing),
        cmocka_unit_test(checked_collectives_that_differ_never_begin),
    };
    pthread_mutex_init(&script.lock, NULL);
    pthread_cond_init(&script.changed, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
