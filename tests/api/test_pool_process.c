/* Pools and the life of a process: calls after exit has begun, and in a forked child, make no
 * driver call and do no harm; a block in the parent is untouched by what the child does. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test_pools.h"

static const char *own_path;

/* ---- programs that this one runs ------------------------------------------------------------- */

static struct {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    void *block;
} late;

static void require(int holds) {
    if (!holds) _exit(3);
}

/* Runs after the library's own exit handler, which was registered later. */
static void use_after_exit_began(void) {
    void *block = &late;
    require(tn_record_use(late.block, late.stream) == TN_OK);
    require(tn_free(late.block, late.stream) == TN_OK);
    require(tn_free(late.block, late.stream) == TN_OK);
    require(tn_alloc(late.pool, 100, late.stream, NULL, &block) == TN_INVALID_STATE);
    require(block == &late);
    require(tn_pool_trim(late.pool, 0, NULL) == TN_OK);
    require(tn_pool_destroy(late.pool) == TN_OK);
    require(tn_device_destroy(late.device) == TN_OK);
    _exit(42);
}

static void open_late(const char *driver) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_HOST;
    if (strcmp(driver, "sim") == 0) {
        config.driver = TN_DRIVER_CUDA;
        config.cuda_library = TENURE_SIM_LIBRARY;
    }
    require(tn_device_create(&config, &late.device) == TN_OK);
    require(tn_pool_create(late.device, NULL, &late.pool) == TN_OK);
    require(tn_stream_create(late.device, &late.stream) == TN_OK);
    require(tn_alloc(late.pool, 3 << 20, late.stream, NULL, &late.block) == TN_OK);
}

static int run_late(const char *driver) {
    atexit(use_after_exit_began);
    open_late(driver);
    exit(0);
}

static int run_program(const char *mode, const char *driver) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        setenv("TENURE_SIM_STRICT_UNLOAD", "0", 1);
        execl(own_path, own_path, mode, driver, (char *)NULL);
        _exit(4);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void calls_after_exit_began_do_nothing(void **state) {
    (void)state;
    assert_int_equal(run_program("late", "host"), 42);
    assert_int_equal(run_program("late", "sim"), 42);
}

static void use_in_child(void) {
    void *block = NULL;
    require(tn_record_use(late.block, late.stream) == TN_OK);
    require(tn_free(late.block, late.stream) == TN_OK);
    require(tn_alloc(late.pool, 100, late.stream, NULL, &block) == TN_INVALID_STATE);
    require(tn_pool_destroy(late.pool) == TN_OK);
    require(tn_device_destroy(late.device) == TN_OK);
    _exit(42);
}

static int run_forking(const char *driver) {
    int status = -1;
    pid_t child;
    open_late(driver);
    child = fork();
    if (child == 0) use_in_child();
    require(waitpid(child, &status, 0) == child);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    /* Here it is live still, and can be freed once. */
    require(tn_pool_check(late.pool) == TN_OK);
    require(tn_free(late.block, late.stream) == TN_OK);
    require(tn_free(late.block, late.stream) == TN_INVALID_ARGUMENT);
    require(tn_pool_destroy(late.pool) == TN_OK);
    require(tn_stream_destroy(late.device, late.stream) == TN_OK);
    require(tn_device_destroy(late.device) == TN_OK);
    return 42;
}

static void a_forked_child_does_not_touch_the_parents_blocks(void **state) {
    (void)state;
    assert_int_equal(run_program("fork", "host"), 42);
    assert_int_equal(run_program("fork", "sim"), 42);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_after_exit_began_do_nothing),
        cmocka_unit_test(a_forked_child_does_not_touch_the_parents_blocks),
    };
    own_path = argv[0];
    if (argc == 3 && strcmp(argv[1], "late") == 0) return run_late(argv[2]);
    if (argc == 3 && strcmp(argv[1], "fork") == 0) return run_forking(argv[2]);
    return cmocka_run_group_tests_name("api/pool_process", tests, NULL, NULL);
}
