/* Statuses and errors in tests, and groups of them: see test_support.h. */
#include "test_support.h"

#include <string.h>

void test_expect_status(tn_status actual, tn_status expected, const char *call, const char *file,
                        int line) {
    if (actual == expected) return;
    print_error("%s:%d: %s gave %s, expected %s\n  %s\n", file, line, call, tn_status_name(actual),
                tn_status_name(expected), tn_error_last());
    _fail(file, line);
}

void test_expect_error_has(const char *words, const char *file, int line) {
    if (strstr(tn_error_last(), words)) return;
    print_error("%s:%d: the error does not say \"%s\":\n  %s\n", file, line, words,
                tn_error_last());
    _fail(file, line);
}

static struct {
    CMFixtureFunction close;
    int is_closed;
} group;

static int close_group(void **state) {
    const int result = group.close(state);
    group.is_closed = result == 0;
    return result;
}

int test_run_group(const struct CMUnitTest *tests, size_t count, CMFixtureFunction open,
                   CMFixtureFunction close) {
    group.close = close, group.is_closed = 0;
    const int failed = _cmocka_run_group_tests("tests", tests, count, open, close_group);
    return failed || group.is_closed ? failed : 1;
}
