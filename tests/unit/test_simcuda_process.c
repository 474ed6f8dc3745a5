/* The simulated driver and the life of a process: leftovers, unload, exit, fork, environment.
 *
 * What happens at the end of a process is seen from outside: this program runs itself with the
 * name of a part to play, and looks at exit status and standard error.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simcuda_support.h"

static const simcuda_calls *cu;

/* ---- parts played in a process of their own -------------------------------------------------- */

static void leave_a_handle(void) {
    cu = simcuda_start(0, 0);
    simcuda_create(2 * MIB);
}

static void leave_nothing(void) {
    simcuda_block block;
    cu = simcuda_start(0, 0);
    block = simcuda_block_create(2 * MIB, 1);
    simcuda_block_destroy(&block);
}

static void leave_a_reservation_and_unload(void) {
    cu = simcuda_start(0, 0);
    simcuda_reserve(4 * MIB);
    dlclose(cu->library);
    _exit(0); /* not reached under TENURE_SIM_STRICT_UNLOAD */
}

/* Registered before the library is loaded, so run after it has shut down. */
static void call_at_exit(void) {
    _exit(cu->cuCtxSynchronize() == CUDA_ERROR_DEINITIALIZED ? 41 : 40);
}

static void call_while_exiting(void) {
    atexit(call_at_exit);
    cu = simcuda_start(0, 0);
}

static void fork_and_end(void) {
    int status;
    pid_t child;
    cu = simcuda_start(0, 0);
    simcuda_create(2 * MIB);
    child = fork();
    if (child == 0) exit(cu->cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED ? 31 : 30);
    waitpid(child, &status, 0);
    _exit(WEXITSTATUS(status));
}

/* Unloading takes everything of the library with it; loading again starts afresh. */
static void unload_fork_and_load_again(void) {
    int status, count = 0;
    void *library;
    pid_t child;
    CUresult (*get_count)(int *);
    cu = simcuda_start(0, 0);
    dlclose(cu->library);
    child = fork();
    if (child == 0) exit(21);
    waitpid(child, &status, 0);
    library = dlopen(TENURE_SIM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    *(void **)&get_count = dlsym(library, "cuDeviceGetCount");
    if (get_count(&count) != CUDA_ERROR_NOT_INITIALIZED) exit(20);
    exit(WEXITSTATUS(status));
}

static void show_environment(void) {
    size_t bytes = 0;
    int count = 0;
    cu = simcuda_load();
    cu->cuInit(0);
    cu->cuDeviceGetCount(&count);
    cu->cuDeviceTotalMem_v2(&bytes, 0);
    fprintf(stderr, "%d devices of %zu bytes\n", count, bytes);
}

static const struct {
    const char *name;
    void (*play)(void);
} parts[] = {
    {"leave_a_handle", leave_a_handle},
    {"leave_nothing", leave_nothing},
    {"leave_a_reservation_and_unload", leave_a_reservation_and_unload},
    {"call_while_exiting", call_while_exiting},
    {"fork_and_end", fork_and_end},
    {"unload_fork_and_load_again", unload_fork_and_load_again},
    {"show_environment", show_environment},
};

/* ---- running a part -------------------------------------------------------------------------- */

typedef struct outcome {
    int status;
    char text[2048];
} outcome;

/* `variable` is "NAME=value" or NULL. */
static outcome run(const char *part, const char *strict, const char *variable) {
    outcome result = {-1, ""};
    char path[] = "/proc/self/exe";
    int ends[2], status;
    size_t used = 0;
    ssize_t got;
    pid_t child;
    assert_int_equal(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        setenv("TENURE_SIM_STRICT_UNLOAD", strict, 1);
        if (variable) putenv((char *)(uintptr_t)variable);
        execl(path, "test_simcuda_process", part, (char *)NULL);
        _exit(126);
    }
    close(ends[1]);
    while (used < sizeof result.text - 1 &&
           (got = read(ends[0], result.text + used, sizeof result.text - 1 - used)) > 0) {
        used += (size_t)got;
    }
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    result.status = WEXITSTATUS(status);
    return result;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void leftovers_are_named(void **state) {
    char text[2048], expected[1024], part[16];
    simcuda_block block;
    CUdeviceptr plain;
    CUstream stream;
    CUevent event;
    (void)state;
    cu = simcuda_start(0, 0);
    assert_int_equal(cu->tnsim_leftovers(text, sizeof text), 0);
    assert_string_equal(text, "");
    block = simcuda_block_create(2 * MIB, 2);
    stream = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuEventCreate(&event, CU_EVENT_DEFAULT));
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&plain, 4096));
    EXPECT_CUDA_OK(simcuda_write(stream, plain, 4096));
    snprintf(expected, sizeof expected,
             "  handles: 2 (4194304 bytes)\n  mappings: 2\n  reservations: 1\n"
             "    reserved at 0x%llx, 4194304 bytes, 2 mapped in it\n"
             "  plain memory: 1 (4096 bytes)\n    allocated at 0x%llx, 4096 bytes\n"
             "  streams: 1\n  events: 1\n  unfinished work: on 1 streams\n",
             block.address, plain);
    /* 2 handles, 2 mappings, 1 reservation, 1 plain, 1 stream, 1 event, 1 unfinished */
    assert_int_equal(cu->tnsim_leftovers(text, sizeof text), 9);
    assert_string_equal(text, expected);
    assert_int_equal(cu->tnsim_leftovers(part, sizeof part), 9); /* cut, not overrun */
    assert_string_equal(part, "  handles: 2 (4");
    assert_int_equal(cu->tnsim_leftovers(NULL, 0), 9);
    EXPECT_CUDA_OK(cu->cuMemFree_v2(plain));
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(event));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    simcuda_block_destroy(&block);
    simcuda_end();
}

static void configuring_clears_everything(void **state) {
    (void)state;
    cu = simcuda_start(0, 0);
    simcuda_block_create(2 * MIB, 2);
    simcuda_stream();
    EXPECT_CUDA_OK(simcuda_write(NULL, simcuda_block_create(2 * MIB, 1).address, 64));
    cu = simcuda_start(0, 0);
    simcuda_end();
    assert_int_equal(cu->tnsim_physical_peak_bytes(0), 0);
    assert_true(cu->tnsim_now_us() == 0);
}

static void what_is_left_at_exit_is_told_and_may_be_fatal(void **state) {
    outcome told = run("leave_a_handle", "0", NULL);
    outcome fatal = run("leave_a_handle", "1", NULL);
    outcome clean = run("leave_nothing", "1", NULL);
    const char *expected = "tenure-simcuda: at unload 1 things are left\n"
                           "  handles: 1 (2097152 bytes)\n";
    (void)state;
    assert_string_equal(told.text, expected);
    assert_int_equal(told.status, 0);
    assert_string_equal(fatal.text, expected);
    assert_int_equal(fatal.status, 97);
    assert_string_equal(clean.text, "");
    assert_int_equal(clean.status, 0);
}

static void what_is_left_at_dlclose_is_told(void **state) {
    outcome fatal = run("leave_a_reservation_and_unload", "1", NULL);
    (void)state;
    assert_int_equal(fatal.status, 97);
    assert_non_null(strstr(fatal.text, "reservations: 1\n"));
}

static void calls_fail_once_exit_has_begun(void **state) {
    (void)state;
    assert_int_equal(run("call_while_exiting", "1", NULL).status, 41);
}

static void a_forked_child_has_no_driver(void **state) {
    outcome result = run("fork_and_end", "1", NULL);
    (void)state;
    assert_int_equal(result.status, 31);
    assert_string_equal(result.text, ""); /* the child does not report the parent's handle */
}

static void unloading_leaves_no_hook_behind(void **state) {
    (void)state;
    assert_int_equal(run("unload_fork_and_load_again", "1", NULL).status, 21);
}

static void the_environment_sets_defaults(void **state) {
    (void)state;
    assert_string_equal(run("show_environment", "1", NULL).text,
                        "1 devices of 149250113536 bytes\n");
    assert_string_equal(run("show_environment", "1", "TENURE_SIM_MEMORY=1.5GiB").text,
                        "1 devices of 1610612736 bytes\n");
    assert_string_equal(run("show_environment", "1", "TENURE_SIM_DEVICES=8").text,
                        "8 devices of 149250113536 bytes\n");
    assert_string_equal(run("show_environment", "1", "TENURE_SIM_MEMORY=lots").text,
                        "tenure-simcuda: TENURE_SIM_MEMORY=lots is ignored: "
                        "it takes a size such as 80GiB\n"
                        "1 devices of 149250113536 bytes\n");
}

int main(int argument_count, char **arguments) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leftovers_are_named),
        cmocka_unit_test(configuring_clears_everything),
        cmocka_unit_test(what_is_left_at_exit_is_told_and_may_be_fatal),
        cmocka_unit_test(what_is_left_at_dlclose_is_told),
        cmocka_unit_test(calls_fail_once_exit_has_begun),
        cmocka_unit_test(a_forked_child_has_no_driver),
        cmocka_unit_test(unloading_leaves_no_hook_behind),
        cmocka_unit_test(the_environment_sets_defaults),
    };
    for (size_t i = 0; argument_count == 2 && i < sizeof parts / sizeof parts[0]; i++) {
        if (strcmp(parts[i].name, arguments[1]) != 0) continue;
        parts[i].play();
        return 0;
    }
    return cmocka_run_group_tests_name("simcuda_process", tests, NULL, NULL);
}
