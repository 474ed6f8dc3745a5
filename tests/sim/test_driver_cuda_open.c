/* Opening and closing CUDA devices: which library is taken, what is said of a bad one, that nothing
 * is left after a failure, and what happens at unload, at exit and in a forked child.
 *
 * The last three need a process of their own: this program runs itself with a word that says which.
 */
#include "test_support.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "host_alloc.h"
#include "options.h"

#define MIB ((size_t)1 << 20)

static const char *own_path;

static tn_status open_with(tn_driver_kind driver, const char *library, int ordinal,
                           tn_device **out) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = driver;
    config.cuda_library = library;
    config.ordinal = ordinal;
    return tn_device_create(&config, out);
}

static tn_driver_kind kind_of(const tn_device *device) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    EXPECT_OK(tn_device_info_get(device, &info));
    return info.driver;
}

static void a_missing_library_is_unsupported_and_named(void **state) {
    (void)state;
    tn_device *device = NULL;
    EXPECT_STATUS(open_with(TN_DRIVER_CUDA, "/nowhere/libcuda.so.1", 0, &device), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("/nowhere/libcuda.so.1");
    EXPECT_ERROR_HAS("TENURE_DRIVER=host");
    /* AUTO takes the host only if nobody named a library. */
    EXPECT_STATUS(open_with(TN_DRIVER_AUTO, "/nowhere/libcuda.so.1", 0, &device), TN_UNSUPPORTED);
    assert_null(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void a_library_without_the_symbols_is_unsupported_and_one_is_named(void **state) {
    (void)state;
    tn_device *device = NULL;
    EXPECT_STATUS(open_with(TN_DRIVER_CUDA, "libm.so.6", 0, &device), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("libm.so.6");
    EXPECT_ERROR_HAS("lacks cuInit");
    assert_null(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void an_ordinal_beyond_the_devices_is_refused(void **state) {
    (void)state;
    tnsim_config sim_config = {.size = sizeof sim_config, .device_count = 2};
    tn_device *device = NULL;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    EXPECT_STATUS(open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 2, &device), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("device 2");
    EXPECT_ERROR_HAS("has 2");
    assert_null(device);
    EXPECT_OK(open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 1, &device));
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void devices_of_one_ordinal_share_its_memory_and_others_do_not(void **state) {
    (void)state;
    tnsim_config sim_config = {.size = sizeof sim_config, .device_count = 2};
    tn_device *devices[3];
    void *block;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    for (int i = 0; i < 3; i++)
        EXPECT_OK(open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, i == 2, &devices[i]));
    const tn__driver *driver = tn__device_driver(devices[0]);
    size_t free_bytes[3], total_bytes;
    EXPECT_OK(driver->mem_alloc(tn__device_state(devices[0]), 64 * MIB, &block));
    for (int i = 0; i < 3; i++) {
        tn__driver_device *state_of = tn__device_state(devices[i]);
        EXPECT_OK(driver->memory_info(state_of, &free_bytes[i], &total_bytes));
    }
    assert_int_equal(free_bytes[0], free_bytes[1]);
    assert_int_equal(free_bytes[2], free_bytes[0] + 64 * MIB);
    EXPECT_OK(driver->mem_free(tn__device_state(devices[1]), block));
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_device_destroy(devices[i]));
    char left[512] = "";
    if (test_sim_get()->leftovers(left, sizeof left)) fail_msg("left over: %s", left);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* The n-th driver call of opening fails, for every n; then every host allocation. */
static void a_failed_open_leaves_nothing_and_names_the_call(void **state) {
    (void)state;
    tnsim_config sim_config = {.size = sizeof sim_config};
    const test_sim *sim = test_sim_get();
    char left[512] = "";
    tn_status status;
    long nth = 0;
    do {
        tn_device *device = NULL;
        assert_int_equal(sim->configure(&sim_config), 0);
        sim->fault(NULL, ++nth, 0, 999);
        status = open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 0, &device);
        sim->fault(NULL, 0, 0, 0);
        if (status == TN_DRIVER_ERROR) {
            EXPECT_ERROR_HAS(") failed: CUDA_ERROR_UNKNOWN");
            assert_null(device);
        } else {
            EXPECT_OK(status);
            EXPECT_OK(tn_device_destroy(device));
        }
        if (sim->leftovers(left, sizeof left)) fail_msg("call %ld: left over: %s", nth, left);
        assert_int_equal(tn__host_live_blocks(), 0);
    } while (status == TN_DRIVER_ERROR);
    assert_true(nth > 10);
    nth = 0;
    do {
        tn_device *device = NULL;
        tn__host_alloc_fault(++nth, 0);
        status = open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 0, &device);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) EXPECT_OK(tn_device_destroy(device));
        if (sim->leftovers(left, sizeof left)) fail_msg("host %ld: left over: %s", nth, left);
        assert_int_equal(tn__host_live_blocks(), 0);
    } while (status == TN_OUT_OF_HOST_MEMORY);
    EXPECT_OK(status);
    assert_int_equal(nth, 5); /* device, library, its path, the driver's state; then none */
}

static void no_device_is_unsupported(void **state) {
    (void)state;
    tnsim_config sim_config = {.size = sizeof sim_config};
    tn_device *device = NULL;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    test_sim_get()->fault("cuInit", 1, 0, 100);
    EXPECT_STATUS(open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 0, &device), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("finds no CUDA device");
    assert_int_equal(tn_error_last_native(), 100);
    assert_null(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void the_environment_chooses_where_the_config_does_not(void **state) {
    (void)state;
    tnsim_config sim_config = {.size = sizeof sim_config};
    tn_device *device = NULL;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    setenv("TENURE_CUDA_LIBRARY", TENURE_SIM_LIBRARY, 1);
    tn__options_reload();
    EXPECT_OK(open_with(TN_DRIVER_AUTO, NULL, 0, &device));
    assert_int_equal(kind_of(device), TN_DRIVER_CUDA);
    EXPECT_OK(tn_device_destroy(device));
    EXPECT_OK(open_with(TN_DRIVER_HOST, NULL, 0, &device)); /* the config comes first */
    assert_int_equal(kind_of(device), TN_DRIVER_HOST);
    EXPECT_OK(tn_device_destroy(device));
    setenv("TENURE_DRIVER", "host", 1);
    tn__options_reload();
    EXPECT_OK(open_with(TN_DRIVER_AUTO, NULL, 0, &device));
    assert_int_equal(kind_of(device), TN_DRIVER_HOST);
    EXPECT_OK(tn_device_destroy(device));
    unsetenv("TENURE_DRIVER");
    unsetenv("TENURE_CUDA_LIBRARY");
    tn__options_reload();
    void *real = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!real) { /* no driver: AUTO is the host */
        EXPECT_OK(open_with(TN_DRIVER_AUTO, NULL, 0, &device));
        assert_int_equal(kind_of(device), TN_DRIVER_HOST);
        EXPECT_OK(tn_device_destroy(device));
    }
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* ---- in processes of their own ------------------------------------------------------------- */

static tn_device *open_sim_only_here(void) {
    tn_device *device = NULL;
    if (open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 0, &device) != TN_OK) exit(90);
    return device;
}

static int is_loaded(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    return library && dlclose(library) == 0;
}

/* The library is unloaded with its last device; TENURE_SIM_STRICT_UNLOAD then makes a leak 97. */
static int run_unload(int is_leaking) {
    tn_device *device = open_sim_only_here(), *second = open_sim_only_here();
    const tn__driver *driver = tn__device_driver(device);
    void *block = NULL;
    if (driver->mem_alloc(tn__device_state(device), 2 * MIB, &block) != TN_OK) return 91;
    if (!is_leaking && driver->mem_free(tn__device_state(device), block) != TN_OK) return 92;
    if (tn_device_destroy(device) != TN_OK) return 93;
    if (!is_loaded(TENURE_SIM_LIBRARY)) return 94;
    if (tn_device_destroy(second) != TN_OK) return 95;
    return is_loaded(TENURE_SIM_LIBRARY) ? 96 : 0;
}

static tn_device *device_at_exit;

static void use_after_exit_began(void) {
    size_t free_bytes, total_bytes;
    tn__driver_device *state = tn__device_state(device_at_exit);
    int is_refused =
        tn__driver_is_gone() &&
        tn__device_driver(device_at_exit)->memory_info(state, &free_bytes, &total_bytes) ==
            TN_DRIVER_ERROR &&
        strstr(tn_error_last(), "the process is ending") &&
        tn_device_destroy(device_at_exit) == TN_OK;
    _exit(is_refused ? 7 : 8);
}

static int run_exit(void) {
    atexit(use_after_exit_began); /* before the device opens, so it runs after the device's own */
    device_at_exit = open_sim_only_here();
    return 0;
}

static int run_fork(void) {
    tn_device *device = open_sim_only_here(), *another = NULL;
    int result = 0;
    pid_t child = fork();
    if (child == 0) {
        int is_refused =
            tn_device_synchronize(device) == TN_DRIVER_ERROR &&
            strstr(tn_error_last(), "forked child") &&
            open_with(TN_DRIVER_CUDA, TENURE_SIM_LIBRARY, 0, &another) == TN_DRIVER_ERROR &&
            tn_device_destroy(device) == TN_OK;
        _exit(is_refused ? 7 : 8);
    }
    if (waitpid(child, &result, 0) != child || !WIFEXITED(result)) return 1;
    if (tn_device_synchronize(device) != TN_OK || tn_device_destroy(device) != TN_OK) return 2;
    return WEXITSTATUS(result);
}

static int run_deinitialized(void) {
    int (*fault)(const char *, long, int, int) = NULL;
    tn_device *device = device_at_exit = open_sim_only_here(); /* a device left alone is kept */
    *(void **)&fault = dlsym(dlopen(TENURE_SIM_LIBRARY, RTLD_NOW | RTLD_NOLOAD), "tnsim_fault");
    if (!fault || fault("cuCtxSynchronize", 1, 0, 4) != 0) return 1;
    if (tn__driver_is_gone() || tn_device_synchronize(device) != TN_DRIVER_ERROR) return 2;
    if (!strstr(tn_error_last(), "has shut down") || !tn__driver_is_gone()) return 3;
    if (tn_device_synchronize(device) != TN_DRIVER_ERROR) return 4;
    return tn_device_destroy(device) == TN_OK ? 7 : 5;
}

static int run_as(const char *word) {
    if (!strcmp(word, "unload-clean")) return run_unload(0);
    if (!strcmp(word, "unload-leak")) return run_unload(1);
    if (!strcmp(word, "exit")) return run_exit();
    if (!strcmp(word, "fork")) return run_fork();
    return run_deinitialized();
}

static void expect_exit(const char *word, int expected) {
    int result = -1;
    pid_t child = fork();
    if (child == 0) {
        setenv("TENURE_SIM_STRICT_UNLOAD", "1", 1);
        execl(own_path, own_path, word, (char *)NULL);
        _exit(99);
    }
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), expected);
}

static void the_simulated_library_is_unloaded_with_its_last_device(void **state) {
    (void)state;
    expect_exit("unload-clean", 0);
}

static void what_a_device_leaves_behind_is_found_at_unload(void **state) {
    (void)state;
    expect_exit("unload-leak", 97);
}

static void no_call_is_made_once_exit_began(void **state) {
    (void)state;
    expect_exit("exit", 7);
}

static void a_forked_child_gets_a_status(void **state) {
    (void)state;
    expect_exit("fork", 7);
}

static void a_driver_that_shut_down_is_left_alone(void **state) {
    (void)state;
    expect_exit("deinitialized", 7);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_library_is_unsupported_and_named),
        cmocka_unit_test(a_library_without_the_symbols_is_unsupported_and_one_is_named),
        cmocka_unit_test(an_ordinal_beyond_the_devices_is_refused),
        cmocka_unit_test(devices_of_one_ordinal_share_its_memory_and_others_do_not),
        cmocka_unit_test(a_failed_open_leaves_nothing_and_names_the_call),
        cmocka_unit_test(no_device_is_unsupported),
        cmocka_unit_test(the_environment_chooses_where_the_config_does_not),
        cmocka_unit_test(the_simulated_library_is_unloaded_with_its_last_device),
        cmocka_unit_test(what_a_device_leaves_behind_is_found_at_unload),
        cmocka_unit_test(no_call_is_made_once_exit_began),
        cmocka_unit_test(a_forked_child_gets_a_status),
        cmocka_unit_test(a_driver_that_shut_down_is_left_alone),
    };
    if (argc > 1) return run_as(argv[1]);
    own_path = argv[0];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
