/* What TENURE_VERBOSE prints: once what the library is, at each pool's end what it leaves. Each
 * case is a child process, whose standard error is read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenure_pool.h"
#include "test_pools.h"

/* Runs the case in a child until exit, with TENURE_VERBOSE or without; gives its standard error. */
static void read_child(void (*run)(void), int is_verbose, char *text, size_t text_bytes) {
    int ends[2];
    int result = -1;
    size_t used = 0;
    ssize_t got;
    pid_t child;
    assert_int_equal(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        setenv("TENURE_VERBOSE", is_verbose ? "1" : "0", 1);
        run();
        exit(0);
    }
    assert_true(child > 0);
    close(ends[1]);
    while ((got = read(ends[0], text + used, text_bytes - 1 - used)) > 0)
        used += (size_t)got;
    text[used] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
}

static void expect_has(const char *text, const char *words) {
    if (!strstr(text, words)) fail_msg("no \"%s\" in:\n%s", words, text);
}

static size_t count_of(const char *text, const char *words) {
    size_t count = 0;
    for (; (text = strstr(text, words)); text++)
        count++;
    return count;
}

static tn_pool *open_named(tn_device *device, const char *name) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.name = name;
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    return pool;
}

static void free_everything(void) {
    tn_device *device = test_open_host();
    for (int i = 0; i < 2; i++) {
        tn_pool *pool = open_named(device, i ? "second" : "first");
        test_give(pool, test_take(pool, 3000, NULL), NULL);
        EXPECT_OK(tn_pool_destroy(pool));
    }
    EXPECT_OK(tn_device_destroy(device));
}

static void leave_a_block(void) {
    tn_device *device = test_open_host();
    tn_pool *pool = open_named(device, "leaky");
    void *block = test_take(pool, 3000, NULL);
    (void)block;
    EXPECT_STATUS(tn_pool_destroy(pool), TN_LEAK);
}

static void fork_with_a_pool(void) {
    tn_device *device = test_open_host();
    tn_pool *pool = open_named(device, "shared");
    void *block = test_take(pool, 3000, NULL);
    int result = -1;
    pid_t child = fork();
    if (child == 0) exit(0);
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_int_equal(result, 0);
    test_give(pool, block, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

static void a_forked_child_tells_nothing_of_its_parents_pools(void **state) {
    static char text[32768];
    (void)state;
    read_child(fork_with_a_pool, 1, text, sizeof text);
    assert_int_equal(count_of(text, "tenure pool shared at "), 1);
    expect_has(text, "tenure pool shared at its end\n");
    assert_int_equal(count_of(text, "not all freed"), 0);
}

static void a_pool_that_leaves_nothing_is_ok(void **state) {
    static char text[32768];
    (void)state;
    read_child(free_everything, 1, text, sizeof text);
    assert_int_equal(count_of(text, "tenure " TN_VERSION_STRING "\n"), 1);
    assert_int_equal(count_of(text, "tenure device: driver host"), 1);
    assert_int_equal(count_of(text, "TENURE_VERBOSE                   1              "
                                    "(TENURE_VERBOSE)"),
                     1);
    expect_has(text, "tenure pool first at its end\n");
    expect_has(text, "tenure pool second at its end\n");
    assert_int_equal(count_of(text, "  live_bytes                         0         0 B  ok\n"), 2);
    assert_int_equal(count_of(text, "  reserved_bytes                     0         0 B  ok\n"), 2);
    assert_int_equal(count_of(text, "  live_blocks                        0              ok\n"), 2);
    assert_int_equal(count_of(text, "  peak_live_bytes                 3000     2.9 KiB  \n"), 2);
    assert_int_equal(count_of(text, "  allocs                             1              \n"), 2);
    assert_int_equal(count_of(text, "not all freed"), 0);
}

static void what_is_left_is_told_at_a_failed_end_and_at_exit(void **state) {
    static char text[32768];
    const char *at_exit;
    (void)state;
    read_child(leave_a_block, 1, text, sizeof text);
    expect_has(text, "tenure pool leaky at a failed end\n");
    at_exit = strstr(text, "tenure pool leaky at the end of the process\n");
    assert_non_null(at_exit);
    assert_int_equal(count_of(text, "  live_bytes                      3000     2.9 KiB  "
                                    "not all freed\n"),
                     2);
    expect_has(at_exit, "  live_blocks                        1              not all freed\n");
    expect_has(at_exit, "  owned_bytes                        0         0 B  ok\n");
}

static void without_it_nothing_is_printed(void **state) {
    static char text[1024];
    (void)state;
    read_child(free_everything, 0, text, sizeof text);
    assert_string_equal(text, "");
    read_child(leave_a_block, 0, text, sizeof text);
    assert_string_equal(text, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pool_that_leaves_nothing_is_ok),
        cmocka_unit_test(what_is_left_is_told_at_a_failed_end_and_at_exit),
        cmocka_unit_test(a_forked_child_tells_nothing_of_its_parents_pools),
        cmocka_unit_test(without_it_nothing_is_printed),
    };
    return cmocka_run_group_tests_name("api/pool_verbose", tests, NULL, NULL);
}
