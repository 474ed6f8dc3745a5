/* Groups of tests: one that can not be opened, or closed, has failed. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test_support.h"

static void passes(void **state) { (void)state; }

static int works(void **state) {
    (void)state;
    return 0;
}

static int does_not(void **state) {
    (void)state;
    return 1;
}

static int finds_a_leak(void **state) {
    (void)state;
    assert_int_equal(1, 0);
    return 0;
}

/* The exit status of a program that is such a group, whose words go nowhere. */
static int status_of(CMFixtureFunction open, CMFixtureFunction close) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(passes)};
    int status = -1;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(99);
        _exit(TEST_RUN_GROUP(tests, open, close));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void a_group_that_does_not_close_has_failed(void **state) {
    (void)state;
    assert_int_equal(status_of(works, works), 0);
    assert_int_equal(status_of(works, finds_a_leak), 1);
    assert_int_equal(status_of(works, does_not), 1);
    assert_int_equal(status_of(does_not, works), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_group_that_does_not_close_has_failed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
