/* A pool is paused and resumed while other threads go on allocating and freeing: their calls work
 * or say that the pool is paused, and the books hold afterwards. */
#include <pthread.h>
#include <stdatomic.h>

#include "tenure_pool.h"
#include "test_pools.h"

#define MIB     MIB_BYTES
#define THREADS 3
#define PAUSES  40

typedef struct worker {
    pthread_t thread;
    tn_pool *pool;
    tn_stream stream;
    atomic_int *is_over;
    long pairs;
    long refused;
    long wrong;
} worker;

static void *work(void *argument) {
    worker *w = argument;
    uint64_t random = 88172645463325252u + (uint64_t)(uintptr_t)w->stream;
    while (!atomic_load(w->is_over) || w->pairs < 100) {
        void *block = NULL;
        size_t bytes = (size_t)(random % (3 * MIB)) + 1;
        tn_status status = tn_alloc(w->pool, bytes, w->stream, NULL, &block);
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if (status == TN_INVALID_STATE) {
            w->refused++;
            continue;
        }
        if (status != TN_OK || tn_free(block, w->stream) != TN_OK) w->wrong++;
        w->pairs++;
    }
    return NULL;
}

static void threads_go_on_over_pauses(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    tn_stream stream = test_open_stream(device);
    void *kept = test_take(pool, 5 * MIB, stream);
    worker workers[THREADS];
    atomic_int is_over = 0;
    int pauses = 0;
    (void)state;
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.pool = pool, .is_over = &is_over};
        workers[i].stream = test_open_stream(device);
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < PAUSES || pauses == 0; i++) { /* there may be frees each time */
        tn_status status = tn_pool_pause(pool, i % 2);
        if (status == TN_INVALID_STATE) continue; /* frees that did not stop */
        EXPECT_OK(status);
        pauses++;
        EXPECT_OK(tn_pool_check(pool));
        EXPECT_OK(tn_pool_resume(pool));
    }
    atomic_store(&is_over, 1);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        assert_int_equal(workers[i].wrong, 0);
        EXPECT_OK(tn_stream_destroy(device, workers[i].stream));
    }
    test_sim_write(device, stream, kept, 5 * MIB, 10);
    test_give(pool, kept, stream);
    assert_int_equal(test_pool_stats(pool).live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(device, stream));
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(threads_go_on_over_pauses)};
    return cmocka_run_group_tests_name("sim/pause_threads", tests, NULL, NULL);
}
