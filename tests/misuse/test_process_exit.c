/* Programs that end with blocks, pools and threads still alive, and free what they have after the
 * driver is gone: by exit handlers, static destructors, and thread-local destructors (rmm#2366,
 * rmm#1371, lbann#380, vllm#46050, vllm#23477). Each ends with the status that it gave itself. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "misuse_support.h"

#define s misuse_scene

/* ---- everything is left ---------------------------------------------------------------------- */

static void exit_with_all_alive(void) {
    misuse_open();
    exit(11);
}

static void return_with_threads_at_work(void) {
    misuse_open();
    misuse_start_busy_threads(3);
    exit(12);
}

static void *exit_here(void *argument) {
    (void)argument;
    exit(13);
}

static void exit_from_another_thread(void) {
    pthread_t thread;
    misuse_open();
    misuse_start_busy_threads(2);
    REQUIRE(pthread_create(&thread, NULL, exit_here, NULL) == 0);
    (void)pthread_join(thread, NULL);
}

static void quick_exit_with_all_alive(void) {
    misuse_open();
    misuse_start_busy_threads(2);
    quick_exit(14);
}

/* Work of which nobody hears the end. */
static void exit_with_work_under_way(void) {
    misuse_open();
    for (int i = 0; i < 100; i++)
        REQUIRE(tn_fill(s.device, s.block, (unsigned char)i, 3 << 20, s.stream) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    exit(15);
}

/* ---- freed too late -------------------------------------------------------------------------- */

static void free_everything(void) {
    REQUIRE(tn_record_use(s.block, s.stream) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    REQUIRE(tn_pool_destroy(s.pool) == TN_OK);
    REQUIRE(tn_stream_destroy(s.device, s.stream) == TN_OK);
    REQUIRE(tn_device_destroy(s.device) == TN_OK);
}

static void alloc_fails_in_words(void) {
    void *block = &s;
    REQUIRE(tn_alloc(s.pool, 100, s.stream, NULL, &block) == TN_INVALID_STATE);
    REQUIRE(block == &s);
    REQUIRE(strstr(tn_error_last(), "exits") != NULL);
}

static void handler_before_the_device(void) {
    free_everything();
    alloc_fails_in_words();
    _exit(21);
}

static void free_in_an_early_handler(void) {
    atexit(handler_before_the_device);
    misuse_open();
}

/* Registered after the device: it runs first, and all is still there. */
static void handler_after_the_device(void) {
    void *block = NULL;
    REQUIRE(tn_alloc(s.pool, 100, s.stream, NULL, &block) == TN_OK);
    REQUIRE(tn_free(block, s.stream) == TN_OK);
    free_everything();
    _exit(22);
}

static void free_in_a_late_handler(void) {
    misuse_open();
    atexit(handler_after_the_device);
}

static int has_static_owner;

/* What a C++ object with static storage does. */
__attribute__((destructor)) static void static_destructor(void) {
    if (!has_static_owner) return;
    free_everything();
    alloc_fails_in_words();
    _exit(23);
}

static void free_in_a_static_destructor(void) {
    has_static_owner = 1;
    misuse_open();
}

/* ---- thread-local owners --------------------------------------------------------------------- */

static void free_own(void *block) { REQUIRE(tn_free(block, s.stream) == TN_OK); }

static void *own_a_block(void *key) {
    void *block = NULL;
    REQUIRE(tn_alloc(s.pool, 5000, s.stream, NULL, &block) == TN_OK);
    REQUIRE(pthread_setspecific(*(pthread_key_t *)key, block) == 0);
    return NULL;
}

/* The block is freed by the thread's end, in whatever order destructors run. */
static void free_at_the_end_of_threads(void) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    pthread_key_t key;
    misuse_open();
    REQUIRE(pthread_key_create(&key, free_own) == 0);
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        REQUIRE(pthread_create(&thread, NULL, own_a_block, &key) == 0);
        REQUIRE(pthread_join(thread, NULL) == 0);
    }
    REQUIRE(tn_pool_stats_get(s.pool, &stats) == TN_OK);
    REQUIRE(stats.live_blocks == 1);
    free_everything();
    exit(31);
}

static pthread_barrier_t owned;

static void *own_and_wait(void *key) {
    own_a_block(key);
    (void)pthread_barrier_wait(&owned);
    while (pause() != 0)
        continue;
    return NULL;
}

/* Those of threads that are still there when the process ends. */
static void exit_with_thread_local_owners(void) {
    pthread_key_t key;
    pthread_t thread;
    misuse_open();
    REQUIRE(pthread_key_create(&key, free_own) == 0);
    REQUIRE(pthread_barrier_init(&owned, NULL, 2) == 0);
    REQUIRE(pthread_create(&thread, NULL, own_and_wait, &key) == 0);
    own_a_block(&key);
    (void)pthread_barrier_wait(&owned);
    exit(32);
}

static atomic_int has_main_freed;

static void free_of_main(void *block) {
    free_own(block);
    atomic_store(&has_main_freed, 1);
}

static void *exit_after_main(void *argument) {
    (void)argument;
    while (!atomic_load(&has_main_freed))
        sched_yield();
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    exit(33);
}

/* The main thread ends first, with a block of its own. */
static void end_the_main_thread(void) {
    pthread_key_t key;
    pthread_t thread;
    misuse_open();
    REQUIRE(pthread_key_create(&key, free_of_main) == 0);
    own_a_block(&key);
    REQUIRE(pthread_create(&thread, NULL, exit_after_main, NULL) == 0);
    pthread_exit(NULL);
}

/* ---- in the wrong order ---------------------------------------------------------------------- */

static void destroy_the_pool_before_its_blocks(void) {
    int foreign = 0;
    misuse_open();
    REQUIRE(tn_pool_destroy(s.pool) == TN_LEAK);
    REQUIRE(tn_device_destroy(s.device) == TN_IN_USE);
    REQUIRE(tn_free(s.block, s.stream) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_INVALID_ARGUMENT);
    REQUIRE(tn_free(&foreign, s.stream) == TN_INVALID_ARGUMENT);
    REQUIRE(tn_pool_destroy(s.pool) == TN_OK);
    REQUIRE(tn_free(s.block, s.stream) == TN_INVALID_ARGUMENT);
    REQUIRE(tn_record_use(s.block, s.stream) == TN_INVALID_ARGUMENT);
    REQUIRE(tn_block_info(s.block, NULL, NULL) == TN_INVALID_ARGUMENT);
    REQUIRE(tn_stream_destroy(s.device, s.stream) == TN_OK);
    REQUIRE(tn_device_destroy(s.device) == TN_OK);
    exit(41);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static const part parts[] = {
    {"exit_with_all_alive", exit_with_all_alive},
    {"return_with_threads_at_work", return_with_threads_at_work},
    {"exit_from_another_thread", exit_from_another_thread},
    {"quick_exit_with_all_alive", quick_exit_with_all_alive},
    {"exit_with_work_under_way", exit_with_work_under_way},
    {"free_in_an_early_handler", free_in_an_early_handler},
    {"free_in_a_late_handler", free_in_a_late_handler},
    {"free_in_a_static_destructor", free_in_a_static_destructor},
    {"free_at_the_end_of_threads", free_at_the_end_of_threads},
    {"exit_with_thread_local_owners", exit_with_thread_local_owners},
    {"end_the_main_thread", end_the_main_thread},
    {"destroy_the_pool_before_its_blocks", destroy_the_pool_before_its_blocks},
};

static void a_process_may_end_with_all_alive(void **state) {
    (void)state;
    misuse_expect("exit_with_all_alive", 11);
    misuse_expect("exit_with_work_under_way", 15);
}

static void a_process_may_end_under_threads_at_work(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++) {
        misuse_expect("return_with_threads_at_work", 12);
        misuse_expect("exit_from_another_thread", 13);
    }
    misuse_expect("quick_exit_with_all_alive", 14);
}

static void frees_after_the_driver_is_gone_do_nothing(void **state) {
    (void)state;
    misuse_expect("free_in_an_early_handler", 21);
    misuse_expect("free_in_a_late_handler", 22);
    misuse_expect("free_in_a_static_destructor", 23);
}

static void thread_local_owners_free_in_any_order(void **state) {
    (void)state;
    misuse_expect("free_at_the_end_of_threads", 31);
    misuse_expect("exit_with_thread_local_owners", 32);
    misuse_expect("end_the_main_thread", 33);
}

static void a_pool_is_not_destroyed_under_its_blocks(void **state) {
    (void)state;
    misuse_expect("destroy_the_pool_before_its_blocks", 41);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_process_may_end_with_all_alive),
        cmocka_unit_test(a_process_may_end_under_threads_at_work),
        cmocka_unit_test(frees_after_the_driver_is_gone_do_nothing),
        cmocka_unit_test(thread_local_owners_free_in_any_order),
        cmocka_unit_test(a_pool_is_not_destroyed_under_its_blocks),
    };
    misuse_play(argc, argv, parts, sizeof parts / sizeof parts[0]);
    return cmocka_run_group_tests_name("misuse/process_exit", tests, NULL, NULL);
}
