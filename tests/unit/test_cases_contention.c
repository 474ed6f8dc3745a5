/* Faults of contention that users of other allocators met, as the reports had them: all are listed
 * in docs/cases.md. The driver's table is replaced by one whose mem_create stops at a gate. */
#include <pthread.h>
#include <semaphore.h>

#include "pool_internal.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { PAIRS = 100, THREADS = 4 };

static const tn__driver *real;
static sem_t entered;
static sem_t gate;

static int has_stopped; /* once is enough; under the pool's lock */

static tn_status stop_at_the_gate(tn__driver_device *device, size_t bytes, tn__handle *out) {
    if (!has_stopped) {
        has_stopped = 1;
        sem_post(&entered);
        sem_wait(&gate);
    }
    return real->mem_create(device, bytes, out);
}

typedef struct worker {
    pthread_t thread;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    size_t bytes;
    sem_t begin;
    void *made; /* one block that another thread frees */
    tn_status bad;
} worker;

/* ---- pytorch#108367: a lock held across cudaMalloc; pytorch#118550: one lock for pointers --- */

static void *take_slowly(void *argument) {
    worker *w = argument;
    w->bad = tn_alloc(w->pool, w->bytes, w->stream, NULL, &w->made);
    return NULL;
}

/* Has a block; while the other thread is inside the driver it frees it, takes it again, and so on:
 * what a thread frees it has again without the lock. */
static void *go_on_meanwhile(void *argument) {
    worker *w = argument;
    void *block = NULL;
    w->bad = tn_alloc(w->pool, w->bytes, w->stream, NULL, &block);
    sem_post(&entered);
    sem_wait(&w->begin);
    for (int i = 0; i < PAIRS && w->bad == TN_OK; i++) {
        w->bad = tn_free(block, w->stream);
        if (w->bad == TN_OK) w->bad = tn_alloc(w->pool, w->bytes, w->stream, NULL, &block);
    }
    w->made = block;
    return NULL;
}

static void open_worker(worker *w, tn_device *device, tn_pool *pool, size_t bytes) {
    *w = (worker){.device = device, .pool = pool, .bytes = bytes, .bad = TN_OK};
    w->stream = test_open_stream(device);
    assert_int_equal(sem_init(&w->begin, 0, 0), 0);
}

static void close_worker(worker *w) {
    EXPECT_STATUS(w->bad, TN_OK);
    EXPECT_OK(tn_stream_destroy(w->device, w->stream));
    sem_destroy(&w->begin);
}

static void other_threads_go_on_while_one_is_in_the_driver(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    tn__driver driver = *pool->driver;
    worker slow;
    worker quick;
    (void)state;
    real = pool->driver;
    assert_int_equal(sem_init(&entered, 0, 0), 0);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    open_worker(&slow, device, pool, 64 * MIB);
    open_worker(&quick, device, pool, 4096);
    assert_int_equal(pthread_create(&quick.thread, NULL, go_on_meanwhile, &quick), 0);
    sem_wait(&entered); /* it has its block */
    driver.mem_create = stop_at_the_gate;
    pool->driver = &driver;
    assert_int_equal(pthread_create(&slow.thread, NULL, take_slowly, &slow), 0);
    sem_wait(&entered); /* inside the driver, with the pool's lock */
    sem_post(&quick.begin);
    assert_int_equal(pthread_join(quick.thread, NULL), 0); /* before the gate opens */
    sem_post(&gate);
    assert_int_equal(pthread_join(slow.thread, NULL), 0);
    pool->driver = real;
    test_give(pool, slow.made, slow.stream);
    test_give(pool, quick.made, quick.stream);
    close_worker(&slow);
    close_worker(&quick);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
    sem_destroy(&entered);
    sem_destroy(&gate);
}

/* ---- rmm#1887, onnxruntime#8378: arenas of threads multiply memory --------------------------- */

static void *take_and_give(void *argument) {
    worker *w = argument;
    void *block = NULL;
    w->bad = tn_alloc(w->pool, w->bytes, w->stream, NULL, &block);
    if (w->bad == TN_OK) w->bad = tn_free(block, w->stream);
    sem_post(&entered);
    sem_wait(&w->begin); /* alive, with its cache */
    return NULL;
}

/* One thread after the other takes all that the pool may have, while the others live on. */
static void what_one_thread_has_cached_serves_the_others(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 64 * MIB);
    worker workers[THREADS];
    (void)state;
    assert_int_equal(sem_init(&entered, 0, 0), 0);
    for (int i = 0; i < THREADS; i++) {
        open_worker(&workers[i], device, pool, 64 * MIB);
        assert_int_equal(pthread_create(&workers[i].thread, NULL, take_and_give, &workers[i]), 0);
        sem_wait(&entered);
        EXPECT_STATUS(workers[i].bad, TN_OK);
    }
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 64 * MIB);
    for (int i = 0; i < THREADS; i++) {
        sem_post(&workers[i].begin);
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        close_worker(&workers[i]);
    }
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
    sem_destroy(&entered);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_threads_go_on_while_one_is_in_the_driver),
        cmocka_unit_test(what_one_thread_has_cached_serves_the_others),
    };
    return cmocka_run_group_tests_name("unit/cases_contention", tests, NULL, NULL);
}
