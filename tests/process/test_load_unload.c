/* A program that loads libtenure at run time, works with it, unloads it, and loads it again:
 * nothing of it stays in the process, no hook is called after it has gone, and each round works
 * like the first. */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenure_alloc.h"

enum { ROUNDS = 20, THREADS = 3, BLOCKS = 40 };

#define CALLS(X)                                                                                   \
    X(tn_device_create)                                                                            \
    X(tn_device_destroy)                                                                           \
    X(tn_pool_create)                                                                              \
    X(tn_pool_destroy)                                                                             \
    X(tn_pool_check)                                                                               \
    X(tn_stream_create)                                                                            \
    X(tn_stream_destroy)                                                                           \
    X(tn_alloc)                                                                                    \
    X(tn_free)                                                                                     \
    X(tn_error_last)

#define AS_MEMBER(name) __typeof__(name) *name;
static struct {
    void *library;
    CALLS(AS_MEMBER)
} tn;

static void load(void) {
    tn.library = dlopen(TENURE_BUILD_DIR "/libtenure.so", RTLD_NOW | RTLD_LOCAL);
    if (!tn.library) fail_msg("%s", dlerror());
#define LOAD(name)                                                                                 \
    *(void **)&tn.name = dlsym(tn.library, #name);                                                 \
    assert_non_null(tn.name);
    CALLS(LOAD)
}

static void expect(tn_status status, const char *call) {
    if (status != TN_OK) fail_msg("%s: %s", call, tn.tn_error_last());
}
#define EXPECT(call) expect((call), #call)

static int count_mappings(const char *name) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[1024];
    int count = 0;
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        count += strstr(line, name) != NULL;
    fclose(maps);
    return count;
}

static void unload(void) {
    assert_int_equal(dlclose(tn.library), 0);
    assert_int_equal(count_mappings("/libtenure.so"), 0);
    assert_int_equal(count_mappings("/libtenure-simcuda.so"), 0);
}

/* ---- work ------------------------------------------------------------------------------------ */

typedef struct round {
    tn_device *device;
    tn_pool *pool;
    pthread_barrier_t done; /* threads have freed what they had, and go on living */
    pthread_barrier_t leave;
} round_state;

static void *work(void *argument) {
    round_state *r = argument;
    tn_stream stream = NULL;
    void *blocks[BLOCKS];
    EXPECT(tn.tn_stream_create(r->device, &stream));
    for (size_t i = 0; i < BLOCKS; i++)
        EXPECT(tn.tn_alloc(r->pool, 512 + 70000 * i, stream, NULL, &blocks[i]));
    for (size_t i = 0; i < BLOCKS; i++)
        EXPECT(tn.tn_free(blocks[i], stream));
    EXPECT(tn.tn_stream_destroy(r->device, stream));
    (void)pthread_barrier_wait(&r->done);
    (void)pthread_barrier_wait(&r->leave);
    return NULL;
}

static void open_round(round_state *r, int is_simulated) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = is_simulated ? TN_DRIVER_CUDA : TN_DRIVER_HOST;
    if (is_simulated) config.cuda_library = TENURE_SIM_LIBRARY;
    load();
    EXPECT(tn.tn_device_create(&config, &r->device));
    EXPECT(tn.tn_pool_create(r->device, NULL, &r->pool));
}

static void close_round(round_state *r) {
    EXPECT(tn.tn_pool_check(r->pool));
    EXPECT(tn.tn_pool_destroy(r->pool));
    EXPECT(tn.tn_device_destroy(r->device));
    unload();
}

/* outlive: the threads end after the library has gone. */
static void play_round(int is_simulated, int outlive) {
    pthread_t threads[THREADS];
    round_state r;
    open_round(&r, is_simulated);
    assert_int_equal(pthread_barrier_init(&r.done, NULL, THREADS + 1), 0);
    assert_int_equal(pthread_barrier_init(&r.leave, NULL, THREADS + 1), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work, &r), 0);
    (void)pthread_barrier_wait(&r.done);
    if (outlive) close_round(&r);
    (void)pthread_barrier_wait(&r.leave);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    if (!outlive) close_round(&r);
    (void)pthread_barrier_destroy(&r.done);
    (void)pthread_barrier_destroy(&r.leave);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void each_round_works_like_the_first(void **state) {
    (void)state;
    for (int i = 0; i < ROUNDS; i++) {
        play_round(0, 0);
        play_round(1, 0);
    }
}

static void threads_may_outlive_the_library(void **state) {
    (void)state;
    for (int i = 0; i < ROUNDS; i++) {
        play_round(0, 1);
        play_round(1, 1);
    }
}

/* Its handlers of fork and exit go with it. */
static void fork_and_exit_after_it_has_gone(void **state) {
    int status = -1;
    pid_t child;
    (void)state;
    play_round(1, 0);
    child = fork();
    if (child == 0) {
        play_round(1, 0); /* it was not there when this process was forked */
        exit(71);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 71);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_round_works_like_the_first),
        cmocka_unit_test(threads_may_outlive_the_library),
        cmocka_unit_test(fork_and_exit_after_it_has_gone),
    };
    return cmocka_run_group_tests_name("process/load_unload", tests, NULL, NULL);
}
