/* Registered memory over several ranks: windows are tried out before one is used, and what hangs,
 * is wrong or refused there is used by no rank, with a communicator that goes on; and ranks that
 * register or end other memory than the others are found out. Each rank is a process. */
#include "test_processes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_watch.h"
#include "host_alloc.h"
#include "options.h"
#include "registering_support.h"
#include "tenure_registration.h"
#include "test_pools.h"

enum { HANG_US = 1000 * 1000, LONG_US = 60 * 1000 * 1000, BYTES = 8192 };

typedef struct rank_state {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_rendezvous *ranks;
    tn_comm *comm;
    char *block;
    int rank, count;
} rank_state;

static rank_state open_rank(const test_meeting *meeting) {
    rank_state r = {.device = test_open_host(), .rank = meeting->rank};
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    r.count = meeting->rank_count;
    r.stream = test_open_stream(r.device);
    r.pool = test_open_pool(r.device, TN_BACKING_AUTO, 0);
    r.block = test_take(r.pool, BYTES, r.stream);
    how.rank = meeting->rank;
    how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1";
    how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    how.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&how, &r.ranks));
    config.device = r.device;
    config.name = "registered";
    config.timeout_us = LONG_US;
    config.rendezvous = r.ranks;
    EXPECT_OK(tn__comm_create(&config, registering_engine(tn__tcp_engine_get()), &r.comm));
    assert_int_equal(r.comm->windows.trial_us, LONG_US / 4);
    r.comm->windows.trial_us = LONG_US;
    return r;
}

static void close_rank(rank_state *r, tn_status expected) {
    EXPECT_STATUS(tn_comm_destroy(r->comm), expected);
    test_give(r->pool, r->block, r->stream);
    EXPECT_OK(tn_stream_synchronize(r->device, r->stream));
    EXPECT_OK(tn_pool_destroy(r->pool));
    EXPECT_OK(tn_stream_destroy(r->device, r->stream));
    tn_rendezvous_destroy(r->ranks);
    EXPECT_OK(tn_device_destroy(r->device));
    assert_int_equal(registering.allocated, 0);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static tn_registration *enroll(rank_state *r, size_t bytes, tn_registration_kind kind) {
    tn_registration *made = NULL;
    EXPECT_OK(tn_comm_register(r->comm, r->block, bytes, kind, &made));
    return made;
}

static tn_window_info info_of(const rank_state *r) {
    tn_window_info info = TN_WINDOW_INFO_INIT;
    EXPECT_OK(tn_comm_window_info_get(r->comm, &info));
    return info;
}

/* The communicator still brings what it should. */
static void expect_gather(rank_state *r) {
    unsigned char seen[BYTES];
    const size_t part = BYTES / (size_t)r->count;
    char *mine = r->block + part * (size_t)r->rank;
    EXPECT_OK(tn_fill(r->device, mine, (unsigned char)(r->rank + 1), part, r->stream));
    EXPECT_OK(tn_all_gather(r->comm, mine, r->block, part, r->stream));
    EXPECT_OK(tn_comm_wait(r->comm));
    EXPECT_OK(tn_copy(r->device, seen, r->block, BYTES, r->stream));
    EXPECT_OK(tn_stream_synchronize(r->device, r->stream));
    for (size_t i = 0; i < part * (size_t)r->count; i++)
        assert_int_equal(seen[i], i / part + 1);
}

/* ---- windows that work ----------------------------------------------------------------------- */

static void use_windows(const test_meeting *meeting) {
    rank_state r = open_rank(meeting);
    char expected[REGISTERING_LOG_BYTES];
    assert_int_equal(info_of(&r).is_known, 0);
    tn_registration *first = enroll(&r, BYTES, TN_REGISTER_WINDOW);
    snprintf(expected, sizeof expected,
             "split window %d window %d end_window end_window window %d ",
             meeting->rank_count << 20, BYTES, BYTES);
    assert_string_equal(registering.log, expected);
    assert_int_equal(registering.registered, 1);
    assert_int_equal(registering.allocated, 0);
    assert_int_equal(info_of(&r).is_known, 1);
    EXPECT_OK(info_of(&r).status);
    assert_true(info_of(&r).check_us > 0);
    registering.log[0] = 0;
    tn_registration *second = enroll(&r, 100, TN_REGISTER_WINDOW);
    assert_string_equal(registering.log, "window 100 ");
    expect_gather(&r);
    EXPECT_OK(tn_comm_deregister(first));
    EXPECT_OK(tn_comm_deregister(second));
    assert_int_equal(registering.registered, 0);
    close_rank(&r, TN_OK);
}

static void windows_are_tried_out_once(void **state) {
    (void)state;
    test_ranks_run(1, use_windows, NULL);
    test_ranks_run(2, use_windows, NULL);
    test_ranks_run(3, use_windows, NULL);
}

static void a_trial_has_a_part_of_the_timeout(void **state) {
    (void)state;
    assert_int_equal(tn__comm_trial_us(3), 1);
    assert_int_equal(tn__comm_trial_us(LONG_US), LONG_US / 4);
    assert_int_equal(tn__comm_trial_us(10 * (uint64_t)LONG_US), LONG_US / 3);
}

/* ---- windows that do not --------------------------------------------------------------------- */

enum { ALL_RANKS = -1 };

/* What is planted, and on which rank. */
typedef struct planted {
    int rank;
    int hangs, corrupts, refused_window;
    const char *words; /* on that rank */
} planted;

static int is_planted(const test_meeting *meeting) {
    const planted *fault = meeting->argument;
    return fault->rank == ALL_RANKS || fault->rank == meeting->rank;
}

static void plant(const test_meeting *meeting, tn_comm *comm) {
    const planted *fault = meeting->argument;
    if (fault->hangs) comm->windows.trial_us = HANG_US; /* the ranks' agreement has its LONG_US */
    if (!is_planted(meeting)) return;
    registering.hangs = fault->hangs;
    registering.corrupts = fault->corrupts;
    registering.refused_window = fault->refused_window;
}

/* No rank uses windows, each says so at once when asked again, and all else goes on. */
static void do_without_windows(const test_meeting *meeting) {
    const planted *fault = meeting->argument;
    rank_state r = open_rank(meeting);
    tn_registration *none = NULL;
    char report[8192];
    plant(meeting, r.comm);
    EXPECT_STATUS(tn_comm_register(r.comm, r.block, BYTES, TN_REGISTER_WINDOW, &none),
                  TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("communicator registered, rank ");
    EXPECT_ERROR_HAS(is_planted(meeting) ? fault->words : "no window");
    assert_null(none);
    assert_int_equal(registering.registered, 0);
    assert_int_equal(info_of(&r).is_known, 1);
    EXPECT_STATUS(info_of(&r).status, TN_UNSUPPORTED);
    assert_non_null(strstr(info_of(&r).text, "no window"));
    assert_true(tn_comm_report(r.comm, TN_REPORT_TEXT, report, sizeof report) < sizeof report);
    assert_non_null(strstr(report, "windows: communicator registered, rank "));
    assert_true(tn_comm_report(r.comm, TN_REPORT_JSON, report, sizeof report) < sizeof report);
    assert_non_null(strstr(report, "\"windows\": \"communicator registered, rank "));
    registering.log[0] = 0;
    EXPECT_STATUS(tn_comm_register(r.comm, r.block, BYTES, TN_REGISTER_WINDOW, &none),
                  TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("no window");
    assert_string_equal(registering.log, "");
    tn_registration *buffer = enroll(&r, BYTES, TN_REGISTER_BUFFER);
    expect_gather(&r);
    EXPECT_OK(tn_comm_deregister(buffer));
    close_rank(&r, TN_OK);
}

static void a_gather_that_hangs_in_a_window_is_given_up(void **state) {
    (void)state;
    const planted all = {.rank = ALL_RANKS, .hangs = 1, .words = "not done 1 s after"};
    const planted one = {.rank = 1, .hangs = 1, .words = "no window"};
    test_ranks_run(2, do_without_windows, &all);
    test_ranks_run(3, do_without_windows, &one);
}

static void wrong_contents_of_a_window_are_seen(void **state) {
    (void)state;
    const planted one = {
        .rank = 1, .corrupts = 1, .words = "byte 4095 that rank 0 gave to a gather is 0, not 1"};
    test_ranks_run(2, do_without_windows, &one);
}

static void a_rank_that_can_make_no_window_speaks_for_all(void **state) {
    (void)state;
    const planted one = {.rank = 0, .refused_window = 1, .words = "the script refuses"};
    test_ranks_run(2, do_without_windows, &one);
}

/* Of memory that one rank can not register nothing is said of other memory. */
static void offer_other_memory(const test_meeting *meeting) {
    rank_state r = open_rank(meeting);
    tn_registration *none = NULL;
    plant(meeting, r.comm);
    EXPECT_STATUS(tn_comm_register(r.comm, r.block, BYTES, TN_REGISTER_WINDOW, &none),
                  TN_UNSUPPORTED);
    EXPECT_ERROR_HAS(meeting->rank == 1 ? "the script refuses" : "rank 1 has failed to use one");
    assert_null(none);
    assert_int_equal(registering.registered, 0);
    assert_int_equal(info_of(&r).is_known, 0);
    tn_registration *window = enroll(&r, BYTES, TN_REGISTER_WINDOW);
    expect_gather(&r);
    EXPECT_OK(tn_comm_deregister(window));
    close_rank(&r, TN_OK);
}

static void memory_that_one_rank_can_not_register_is_no_window(void **state) {
    (void)state;
    const planted second = {.rank = 1, .refused_window = 2};
    test_ranks_run(2, offer_other_memory, &second);
}

/* ---- ranks that differ ----------------------------------------------------------------------- */

static rank_state open_checked(const test_meeting *meeting) {
    setenv("TENURE_CHECK_COLLECTIVES", "1", 1);
    tn__options_reload();
    return open_rank(meeting);
}

/* The last rank does otherwise: the rank that is named, on the others, and by whom. */
static int differs(const test_meeting *meeting) { return meeting->rank == meeting->rank_count - 1; }

static void expect_named(const rank_state *r, const char *usual, const char *other) {
    char words[128];
    snprintf(words, sizeof words, "but rank %d called ",
             r->rank == r->count - 1 ? 0 : r->count - 1);
    EXPECT_ERROR_HAS(words);
    EXPECT_ERROR_HAS(usual);
    EXPECT_ERROR_HAS(other);
    EXPECT_ERROR_HAS("all ranks make the same calls in the same order");
}

static void register_other_sizes(const test_meeting *meeting) {
    rank_state r = open_checked(meeting);
    tn_registration *first = enroll(&r, 4096, TN_REGISTER_BUFFER), *none = NULL;
    const size_t bytes = differs(meeting) ? 100 : 200;
    EXPECT_STATUS(tn_comm_register(r.comm, r.block, bytes, TN_REGISTER_BUFFER, &none),
                  TN_COMM_ERROR);
    expect_named(&r, "registration 2 of memory 2, 200 bytes as a buffer",
                 "registration 2 of memory 2, 100 bytes as a buffer");
    assert_null(none);
    assert_string_equal(registering.log, "buffer 4096 ");
    EXPECT_OK(tn_comm_deregister(first)); /* it has gone with the communicator */
    close_rank(&r, TN_COMM_ERROR);
}

static void register_other_kinds(const test_meeting *meeting) {
    rank_state r = open_checked(meeting);
    tn_registration *none = NULL;
    EXPECT_STATUS(tn_comm_register(r.comm, r.block, 100,
                                   differs(meeting) ? TN_REGISTER_WINDOW : TN_REGISTER_BUFFER,
                                   &none),
                  TN_COMM_ERROR);
    expect_named(&r, "registration 1 of memory 1, 100 bytes as a buffer",
                 "registration 1 of memory 1, 100 bytes as a window");
    assert_string_equal(registering.log, "");
    close_rank(&r, TN_COMM_ERROR);
}

static void end_in_other_orders(const test_meeting *meeting) {
    rank_state r = open_checked(meeting);
    tn_registration *both[2];
    both[0] = enroll(&r, 4096, TN_REGISTER_BUFFER);
    both[1] = enroll(&r, 4096, TN_REGISTER_BUFFER);
    const int first = differs(meeting);
    EXPECT_STATUS(tn_comm_deregister(both[first]), TN_COMM_ERROR);
    expect_named(&r, "deregistration 3 of memory 1, 4096 bytes as a buffer",
                 "deregistration 3 of memory 2, 4096 bytes as a buffer");
    EXPECT_OK(tn_comm_deregister(both[!first]));
    close_rank(&r, TN_COMM_ERROR);
}

static void register_beside_a_collective(const test_meeting *meeting) {
    rank_state r = open_checked(meeting);
    tn_registration *none = NULL;
    EXPECT_OK(tn_barrier(r.comm, r.stream));
    const tn_status status =
        differs(meeting) ? tn_barrier(r.comm, r.stream)
                         : tn_comm_register(r.comm, r.block, 100, TN_REGISTER_BUFFER, &none);
    EXPECT_STATUS(status, TN_COMM_ERROR);
    expect_named(&r, "registration 2 of memory 1, 100 bytes as a buffer", "barrier 2 of 0 byte");
    close_rank(&r, TN_COMM_ERROR);
}

static void agree_in_all(const test_meeting *meeting) {
    rank_state r = open_checked(meeting);
    tn_registration *window = enroll(&r, BYTES, TN_REGISTER_WINDOW);
    tn_registration *buffer = enroll(&r, 100, TN_REGISTER_BUFFER);
    expect_gather(&r);
    EXPECT_OK(tn_comm_deregister(window));
    expect_gather(&r);
    EXPECT_OK(tn_comm_deregister(buffer));
    close_rank(&r, TN_OK);
}

static void ranks_that_register_otherwise_are_named(void **state) {
    (void)state;
    test_ranks_run(3, register_other_sizes, NULL);
    test_ranks_run(2, register_other_kinds, NULL);
    test_ranks_run(2, end_in_other_orders, NULL);
    test_ranks_run(2, register_beside_a_collective, NULL);
    test_ranks_run(3, agree_in_all, NULL);
}

/* ---- alone ----------------------------------------------------------------------------------- */

/* What the engine does not end stays registered, and can be ended again. */
static void end_twice(const test_meeting *meeting) {
    rank_state r = open_rank(meeting);
    tn_registration *buffer = enroll(&r, BYTES, TN_REGISTER_BUFFER), *none = NULL;
    registering.refused_end = 1;
    EXPECT_STATUS(tn_comm_deregister(buffer), TN_INVALID_ARGUMENT);
    assert_int_equal(registering.registered, 1);
    EXPECT_OK(tn_comm_deregister(buffer));
    EXPECT_OK(tn_comm_group_begin(r.comm));
    EXPECT_STATUS(tn_comm_register(r.comm, r.block, BYTES, TN_REGISTER_BUFFER, &none),
                  TN_INVALID_STATE);
    tn_comm_group_cancel(r.comm);
    tn_window_info info = {.size = 1};
    EXPECT_STATUS(tn_comm_window_info_get(r.comm, &info), TN_INVALID_ARGUMENT);
    close_rank(&r, TN_OK);
}

static void what_does_not_end_can_be_ended_again(void **state) {
    (void)state;
    test_ranks_run(1, end_twice, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_are_tried_out_once),
        cmocka_unit_test(a_trial_has_a_part_of_the_timeout),
        cmocka_unit_test(a_gather_that_hangs_in_a_window_is_given_up),
        cmocka_unit_test(wrong_contents_of_a_window_are_seen),
        cmocka_unit_test(a_rank_that_can_make_no_window_speaks_for_all),
        cmocka_unit_test(memory_that_one_rank_can_not_register_is_no_window),
        cmocka_unit_test(ranks_that_register_otherwise_are_named),
        cmocka_unit_test(what_does_not_end_can_be_ended_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
