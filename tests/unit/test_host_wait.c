/* The bounded host wait for freed memory: others use the pool meanwhile, it ends when the memory
 * comes or its bound is reached, and it asks only for what was freed.
 *
 * On the host driver, whose work really runs. The driver's table is replaced by one that tells when
 * a wait has found work unfinished. */
#include <pthread.h>
#include <semaphore.h>

#include "pool_internal.h"
#include "test_pools.h"

#define MIB MIB_BYTES

static const tn__driver *real;
static sem_t gate;       /* opens the work */
static sem_t found_busy; /* posted when a question was answered with no */
static int is_told;      /* once is enough */

static tn_status event_is_done(tn__driver_device *device, tn__event event, int *out) {
    tn_status status = real->event_is_done(device, event, out);
    if (status == TN_OK && !*out && __atomic_exchange_n(&is_told, 1, __ATOMIC_SEQ_CST) == 0) {
        sem_post(&found_busy);
    }
    return status;
}

static void wait_for_the_gate(void *argument) {
    (void)argument;
    sem_wait(&gate);
}

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
    tn__driver driver;
} fixture;

static tn_device *open_small_host(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    config.driver = TN_DRIVER_HOST;
    config.memory_limit_bytes = 128 * MIB;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

static void open_fixture(fixture *f, uint64_t wait_us_max) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.backing = TN_BACKING_PLAIN;
    config.wait_us_max = wait_us_max;
    f->device = open_small_host();
    EXPECT_OK(tn_pool_create(f->device, &config, &f->pool));
    f->a = test_open_stream(f->device);
    f->b = test_open_stream(f->device);
    real = f->pool->driver;
    f->driver = *real;
    f->driver.event_is_done = event_is_done;
    f->pool->driver = &f->driver;
    f->pool->order.driver = &f->driver;
    is_told = 1;
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    assert_int_equal(sem_init(&found_busy, 0, 0), 0);
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    EXPECT_OK(tn_device_destroy(f->device));
    sem_destroy(&gate);
    sem_destroy(&found_busy);
}

/* Freed, but work behind the gate still uses it. */
static void free_in_use(fixture *f, size_t bytes) {
    void *x = test_take(f->pool, bytes, f->a);
    EXPECT_OK(real->host_task(f->pool->state, wait_for_the_gate, NULL, f->b));
    EXPECT_OK(tn_record_use(x, f->b));
    test_give(f->pool, x, f->a);
}

typedef struct waiter {
    fixture *f;
    pthread_t thread;
    size_t bytes;
    void *block;
    tn_status status;
} waiter;

static void *request_block(void *argument) {
    waiter *w = argument;
    w->status = tn_alloc(w->f->pool, w->bytes, w->f->a, NULL, &w->block);
    return NULL;
}

static void others_use_the_pool_during_the_wait(void **state) {
    fixture f;
    waiter w = {&f, 0, 100 * MIB, NULL, TN_LEAK};
    void *held;
    void *block;
    (void)state;
    open_fixture(&f, 600 * (uint64_t)1000000); /* the test would hang if nobody came in */
    held = test_take(f.pool, 1000, f.a);
    free_in_use(&f, 64 * MIB);
    is_told = 0;
    assert_int_equal(pthread_create(&w.thread, NULL, request_block, &w), 0);
    assert_int_equal(sem_wait(&found_busy), 0);
    block = test_take(f.pool, 5000, f.b);
    EXPECT_OK(tn_record_use(block, f.a));
    test_give(f.pool, block, f.b);
    test_give(f.pool, held, f.a);
    EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
    assert_int_equal(test_pool_stats(f.pool).out_of_memory, 0);
    sem_post(&gate);
    assert_int_equal(pthread_join(w.thread, NULL), 0);
    EXPECT_STATUS(w.status, TN_OK);
    test_give(f.pool, w.block, f.a);
    close_fixture(&f);
}

/* What another thread frees meanwhile is enough: the work need not end. */
static void memory_that_another_thread_frees_ends_the_wait(void **state) {
    fixture f;
    waiter w = {&f, 0, 60 * MIB, NULL, TN_LEAK};
    void *held;
    (void)state;
    open_fixture(&f, 600 * (uint64_t)1000000);
    held = test_take(f.pool, 64 * MIB, f.a);
    free_in_use(&f, 40 * MIB);
    is_told = 0;
    assert_int_equal(pthread_create(&w.thread, NULL, request_block, &w), 0);
    assert_int_equal(sem_wait(&found_busy), 0);
    test_give(f.pool, held, f.a);
    assert_int_equal(pthread_join(w.thread, NULL), 0);
    EXPECT_STATUS(w.status, TN_OK);
    sem_post(&gate);
    test_give(f.pool, w.block, f.a);
    close_fixture(&f);
}

/* A collective that another thread has yet to launch, say: the wait for it has the pool's bound. */
static void work_that_does_not_end_is_given_up_at_the_pools_bound(void **state) {
    fixture f;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 1000);
    free_in_use(&f, 64 * MIB);
    EXPECT_STATUS(tn_alloc(f.pool, 100 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("pending 67108864");
    EXPECT_ERROR_HAS("hint: ");
    EXPECT_STATUS(tn_pool_destroy(f.pool), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("did not end within 0.001 s");
    sem_post(&gate);
    EXPECT_OK(tn_stream_synchronize(f.device, f.b));
    none = test_take(f.pool, 100 * MIB, f.a);
    test_give(f.pool, none, f.a);
    close_fixture(&f);
}

/* Work on live blocks keeps nobody: with no bound to speak of, this would hang. */
static void uses_of_live_blocks_are_not_waited_for(void **state) {
    fixture f;
    void *held;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 600 * (uint64_t)1000000);
    held = test_take(f.pool, 64 * MIB, f.a);
    EXPECT_OK(real->host_task(f.pool->state, wait_for_the_gate, NULL, f.b));
    EXPECT_OK(tn_record_use(held, f.b));
    EXPECT_STATUS(tn_alloc(f.pool, 100 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    sem_post(&gate);
    EXPECT_OK(tn_free(held, f.a));
    close_fixture(&f);
}

/* A stream that the wait is for ends meanwhile: its uses have ended with it. */
static void a_stream_that_ends_during_the_wait_is_not_missed(void **state) {
    fixture f;
    waiter w = {&f, 0, 100 * MIB, NULL, TN_LEAK};
    (void)state;
    open_fixture(&f, 600 * (uint64_t)1000000);
    free_in_use(&f, 64 * MIB);
    is_told = 0;
    assert_int_equal(pthread_create(&w.thread, NULL, request_block, &w), 0);
    assert_int_equal(sem_wait(&found_busy), 0);
    sem_post(&gate);
    EXPECT_OK(tn_stream_destroy(f.device, f.b));
    assert_int_equal(pthread_join(w.thread, NULL), 0);
    EXPECT_STATUS(w.status, TN_OK);
    test_give(f.pool, w.block, f.a);
    f.b = test_open_stream(f.device);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(others_use_the_pool_during_the_wait),
        cmocka_unit_test(memory_that_another_thread_frees_ends_the_wait),
        cmocka_unit_test(work_that_does_not_end_is_given_up_at_the_pools_bound),
        cmocka_unit_test(uses_of_live_blocks_are_not_waited_for),
        cmocka_unit_test(a_stream_that_ends_during_the_wait_is_not_missed),
    };
    return cmocka_run_group_tests_name("unit/host_wait", tests, NULL, NULL);
}
