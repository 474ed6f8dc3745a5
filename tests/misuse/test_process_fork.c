/* Forked children: they may free, ask and end as they like, also while other threads of the parent
 * are in the middle of anything (Paddle#78171, pytorch#17357). Nothing of it reaches the parent. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "misuse_support.h"

#define s misuse_scene

enum { CHILD_SECONDS_MAX = 300, FORKS = 30 };

/* ---- what a child may do --------------------------------------------------------------------- */

static void ask_everything(void) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_pool *pool = NULL;
    tn_device *device = NULL;
    tn_stream stream = NULL;
    char text[64];
    REQUIRE(tn_pool_stats_get(s.pool, &stats) == TN_INVALID_STATE);
    REQUIRE(strstr(tn_error_last(), "forked child") != NULL);
    REQUIRE(tn_pool_stats_reset_peaks(s.pool) == TN_INVALID_STATE);
    REQUIRE(tn_pool_check(s.pool) == TN_INVALID_STATE);
    REQUIRE(tn_pool_report(s.pool, TN_REPORT_TEXT, text, sizeof text) == 0);
    REQUIRE(tn_block_info(s.block, NULL, NULL) == TN_INVALID_STATE);
    REQUIRE(tn_pool_trace_begin(s.pool, "/dev/null") == TN_INVALID_STATE);
    REQUIRE(tn_pool_events_begin(s.pool, 8, 0) == TN_INVALID_STATE);
    REQUIRE(tn_pool_create(s.device, NULL, &pool) == TN_INVALID_STATE);
    REQUIRE(tn_stream_create(s.device, &stream) == TN_DRIVER_ERROR);
    REQUIRE(tn_stream_wait(s.device, s.stream, NULL) == TN_DRIVER_ERROR);
    REQUIRE(tn_device_synchronize(s.device) == TN_DRIVER_ERROR);
    REQUIRE(tn_device_create(&config, &device) == TN_DRIVER_ERROR);
    REQUIRE(strstr(tn_error_last(), "fork before the first") != NULL);
}

static void free_everything(void) {
    void *block = NULL;
    REQUIRE(tn_record_use(s.block, s.stream) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    REQUIRE(tn_alloc(s.pool, 100, s.stream, NULL, &block) == TN_INVALID_STATE);
    REQUIRE(tn_pool_trim(s.pool, 0, NULL) == TN_OK);
    REQUIRE(tn_share_close(s.block, s.stream) == TN_OK);
    REQUIRE(tn_pool_destroy(s.pool) == TN_OK);
    REQUIRE(tn_stream_destroy(s.device, s.stream) == TN_OK);
    REQUIRE(tn_device_destroy(s.device) == TN_OK);
}

/* A child that ends as programs do, with exit handlers and destructors. */
static int run_child(void) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS_MAX);
        ask_everything();
        free_everything();
        exit(51);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* ---- parts ----------------------------------------------------------------------------------- */

static void close_parent(void) {
    REQUIRE(tn_pool_check(s.pool) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    REQUIRE(tn_pool_destroy(s.pool) == TN_OK);
    REQUIRE(tn_stream_destroy(s.device, s.stream) == TN_OK);
    REQUIRE(tn_device_destroy(s.device) == TN_OK);
}

static void fork_once(void) {
    misuse_open();
    REQUIRE(run_child() == 51);
    close_parent();
    exit(61);
}

static void fork_under_threads_at_work(void) {
    misuse_open();
    misuse_start_busy_threads(3);
    for (int i = 0; i < FORKS; i++)
        REQUIRE(run_child() == 51);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    exit(62);
}

/* Children that were there before the first device have devices of their own. */
static void fork_before_the_first_device(void) {
    for (int i = 0; i < 2; i++) {
        int status = -1;
        pid_t child = fork();
        if (child == 0) {
            misuse_open();
            close_parent();
            exit(63);
        }
        REQUIRE(waitpid(child, &status, 0) == child);
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 63);
    }
    misuse_open();
    close_parent();
    exit(63);
}

/* A grandchild knows as much as a child. */
static void fork_in_a_child(void) {
    int status = -1;
    pid_t child;
    misuse_open();
    child = fork();
    if (child == 0) {
        REQUIRE(run_child() == 51);
        exit(64);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 64);
    close_parent();
    exit(64);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static const part parts[] = {
    {"fork_once", fork_once},
    {"fork_under_threads_at_work", fork_under_threads_at_work},
    {"fork_before_the_first_device", fork_before_the_first_device},
    {"fork_in_a_child", fork_in_a_child},
};

static void a_child_does_nothing_to_its_parent(void **state) {
    (void)state;
    misuse_expect("fork_once", 61);
    misuse_expect("fork_in_a_child", 64);
}

static void a_child_never_waits_for_a_thread_that_it_has_not(void **state) {
    (void)state;
    misuse_expect("fork_under_threads_at_work", 62);
}

static void before_the_first_device_fork_is_free(void **state) {
    (void)state;
    misuse_expect("fork_before_the_first_device", 63);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_child_does_nothing_to_its_parent),
        cmocka_unit_test(a_child_never_waits_for_a_thread_that_it_has_not),
        cmocka_unit_test(before_the_first_device_fork_is_free),
    };
    misuse_play(argc, argv, parts, sizeof parts / sizeof parts[0]);
    return cmocka_run_group_tests_name("misuse/process_fork", tests, NULL, NULL);
}
