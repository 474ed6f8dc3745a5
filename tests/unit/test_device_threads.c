/* Devices, streams and watchers of the host driver used by many threads at once. Meant for the tsan
 * preset too; what is asserted holds for every order of the threads.
 */
#include "test_support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

enum { THREADS = 4, ROUNDS = 100 };

typedef struct worker {
    tn_device *device;
    tn_stream shared; /* a stream that all threads put work on */
    int *counter;     /* of tasks on the shared stream: one at a time, so without a lock */
    int index;
    int failures;
    tn_status first_failure;
} worker;

static void check(worker *self, tn_status status) {
    if (status != TN_OK && !self->failures++) self->first_failure = status;
}

static void count_up(void *argument) { (*(int *)argument)++; }

/* A stream of its own, work on it and on the shared one, each waiting for the other. */
static void do_round(worker *self, unsigned char byte) {
    unsigned char mine[64] = {0}, copy[64] = {0};
    tn_stream stream = NULL;
    const tn__driver *driver = tn__device_driver(self->device);
    check(self, tn_stream_create(self->device, &stream));
    check(self, tn_fill(self->device, mine, byte, sizeof mine, stream));
    check(self, tn_stream_wait(self->device, self->shared, stream));
    check(self,
          driver->host_task(tn__device_state(self->device), count_up, self->counter, self->shared));
    check(self, tn_copy(self->device, copy, mine, sizeof mine, self->shared));
    check(self, tn_stream_wait(self->device, stream, self->shared));
    check(self, tn_stream_destroy(self->device, stream)); /* so the copy is done as well */
    for (size_t i = 0; i < sizeof copy; i++)
        self->failures += copy[i] != byte;
}

static void hear_end(void *argument, tn_stream stream, uint64_t id) {
    (void)stream;
    (void)id;
    atomic_fetch_add((atomic_int *)argument, 1);
}

static void *run_worker(void *argument) {
    worker *self = argument;
    atomic_int own_ends = 0;
    for (int i = 0; i < ROUNDS; i++) {
        check(self, tn__device_watch_streams(self->device, hear_end, &own_ends));
        do_round(self, (unsigned char)(self->index * 50 + i % 50 + 1));
        tn__device_unwatch_streams(self->device, &own_ends);
        if (atomic_load(&own_ends) < i + 1) self->failures++; /* at least its own stream's end */
    }
    check(self, tn_device_synchronize(self->device));
    return NULL;
}

static void threads_share_a_device_its_streams_and_its_watchers(void **state) {
    (void)state;
    int counter = 0;
    atomic_int ends = 0;
    pthread_t threads[THREADS];
    worker workers[THREADS];
    tn_stream shared;
    tn_device *device = test_open_host();
    EXPECT_OK(tn_stream_create(device, &shared));
    EXPECT_OK(tn__device_watch_streams(device, hear_end, &ends));
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){device, shared, &counter, i, 0, TN_OK};
        assert_int_equal(pthread_create(&threads[i], NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        EXPECT_OK(workers[i].first_failure);
        assert_int_equal(workers[i].failures, 0);
    }
    EXPECT_OK(tn_stream_destroy(device, shared));
    assert_int_equal(counter, THREADS * ROUNDS);
    assert_int_equal(atomic_load(&ends), THREADS * ROUNDS + 1);
    tn__device_unwatch_streams(device, &ends);
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* Memory of one device, taken and given by several threads: the books are exact at the end. */
static void *take_and_give(void *argument) {
    worker *self = argument;
    const tn__driver *driver = tn__device_driver(self->device);
    tn__driver_device *device = tn__device_state(self->device);
    for (int i = 0; i < ROUNDS; i++) {
        unsigned char *block = NULL;
        tn_status status = driver->mem_alloc(device, (size_t)(1 + i % 3) << 21, (void **)&block);
        if (status == TN_OUT_OF_DEVICE_MEMORY) continue; /* the others have it all */
        check(self, status);
        block[0] = block[(1 << 21) - 1] = (unsigned char)self->index;
        self->failures += block[0] != self->index || block[(1 << 21) - 1] != self->index;
        check(self, driver->mem_free(device, block));
    }
    return NULL;
}

static void threads_share_the_memory_of_a_device(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    worker workers[THREADS];
    size_t free_bytes = 0, total_bytes = 0;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device;
    config.driver = TN_DRIVER_HOST;
    config.memory_limit_bytes = (size_t)8 << 20; /* four granules for up to twelve */
    EXPECT_OK(tn_device_create(&config, &device));
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.device = device, .index = i};
        assert_int_equal(pthread_create(&threads[i], NULL, take_and_give, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        EXPECT_OK(workers[i].first_failure);
        assert_int_equal(workers[i].failures, 0);
    }
    EXPECT_OK(tn__device_driver(device)->memory_info(tn__device_state(device), &free_bytes,
                                                     &total_bytes));
    assert_int_equal(free_bytes, total_bytes);
    EXPECT_OK(tn_device_destroy(device));
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* The simulated driver, as the real one, gives the handle of an ended stream to the next: also to
 * another thread's, before the thread that ended it has come back. */
static void *make_and_end_streams(void *argument) {
    enum { STREAMS = 3000 };
    worker *self = argument;
    for (int i = 0; i < STREAMS; i++) {
        tn_stream stream = NULL;
        check(self, tn_stream_create(self->device, &stream));
        if (stream) check(self, tn_stream_destroy(self->device, stream));
    }
    return NULL;
}

static void a_stream_may_get_the_handle_of_one_that_is_just_ending(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    worker workers[THREADS];
    tn_device *device = test_open_sim(0, 0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.device = device, .index = i};
        assert_int_equal(pthread_create(&threads[i], NULL, make_and_end_streams, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        EXPECT_OK(workers[i].first_failure);
    }
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_share_a_device_its_streams_and_its_watchers),
        cmocka_unit_test(threads_share_the_memory_of_a_device),
        cmocka_unit_test(a_stream_may_get_the_handle_of_one_that_is_just_ending),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
