/* The adapters under threads: each with a stream of its own, all kinds of calls, and captures
 * beside them. Races of the threads are for TSan, those of the streams for the simulated device. */
#include "adapters_support.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

#include "driver.h"

enum { THREADS = 6, ROUNDS = 150, KEPT = 8 };

typedef struct worker {
    pthread_t thread;
    tn_device *device;
    tn_stream stream;
    tn_stream side;
    unsigned seed;
    unsigned faults;
} worker;

static void give(worker *w, void *block, int how) {
    if (how % 4 == 0) {
        tn__framework_free_unordered(0, block);
        return;
    }
    if (how % 4 == 1 && tn__framework_use(block, w->side) != TN_OK) w->faults++;
    if (tn__framework_free(0, block, w->stream) != TN_OK) w->faults++;
}

static void *work(void *argument) {
    worker *w = argument;
    void *kept[KEPT] = {NULL};
    for (int i = 0; i < ROUNDS; i++) {
        int at = rand_r(&w->seed) % KEPT;
        size_t bytes = (size_t)512 << rand_r(&w->seed) % 14;
        if (kept[at]) give(w, kept[at], rand_r(&w->seed));
        if (tn__framework_alloc(0, bytes, w->stream, "test", &kept[at]) != TN_OK) w->faults++;
        test_sim_write(w->device, w->stream, kept[at], bytes, 1);
        if (i % 50 == 0 && tn_adapters_trim() != TN_OK) w->faults++;
    }
    for (int i = 0; i < KEPT; i++) {
        if (kept[i]) give(w, kept[i], i);
    }
    return NULL;
}

/* One that captures again and again, as torch does in its own thread. */
static void *capture(void *argument) {
    worker *w = argument;
    for (int i = 0; i < ROUNDS / 5; i++) {
        adapters_filter filter = {w->stream, 0, 0};
        void *block = NULL;
        test_graph graph;
        adapters_begin(77, &filter);
        test_capture_begin(w->device, w->stream, TEST_CAPTURE_RELAXED);
        if (tn__framework_alloc(0, 1 << 20, w->stream, "test", &block) != TN_OK) w->faults++;
        test_sim_write(w->device, w->stream, block, 1 << 20, 1);
        if (tn__framework_free(0, block, w->stream) != TN_OK) w->faults++;
        graph = test_capture_end(w->device, w->stream);
        if (adapters_end(77) != TN_OK) w->faults++;
        test_graph_launch(w->device, &graph, w->stream);
        test_graph_destroy(w->device, &graph);
        if (adapters_release(77) != TN_OK) w->faults++;
    }
    return NULL;
}

static void threads_allocate_free_and_capture_at_once(void **state) {
    tn_device *device = adapters_open(1, (size_t)4 << 30);
    worker workers[THREADS];
    (void)state;
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.device = device, .seed = (unsigned)i + 1};
        workers[i].stream = test_open_foreign_stream(device);
        workers[i].side = test_open_foreign_stream(device);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(
            pthread_create(&workers[i].thread, NULL, i == 0 ? capture : work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        assert_int_equal(workers[i].faults, 0);
    }
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
    EXPECT_OK(tn_device_synchronize(device));
    for (int i = 0; i < THREADS; i++) {
        test_close_foreign_stream(device, workers[i].stream);
        test_close_foreign_stream(device, workers[i].side);
    }
    adapters_close(device);
}

/* ---- a capture that would begin while a device is waited for --------------------------------- */

typedef struct meeting {
    tn_device *device;
    tn_stream stream;
    adapters_filter filter;
    sem_t is_held;  /* the stream, by its host function */
    sem_t may_end;  /* the host function */
    sem_t is_begun; /* the capture */
} meeting;

static void hold(void *argument) {
    meeting *m = argument;
    sem_post(&m->is_held);
    sem_wait(&m->may_end);
}

/* The simulated driver runs the function in the thread that submits it. */
static void *submit(void *argument) {
    meeting *m = argument;
    int (*launch)(tn_stream, void (*)(void *), void *);
    *(void **)&launch = dlsym(test_sim_get()->library, "cuLaunchHostFunc");
    EXPECT_OK(tn__device_driver(m->device)->make_current(tn__device_state(m->device)));
    assert_int_equal(launch(m->stream, hold, m), 0);
    return NULL;
}

static void *trim(void *argument) {
    (void)argument;
    EXPECT_OK(tn_adapters_trim());
    return NULL;
}

static void *begin(void *argument) {
    meeting *m = argument;
    adapters_begin(77, &m->filter);
    sem_post(&m->is_begun);
    return NULL;
}

static int has_begun_within_50_ms(meeting *m) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(&m->is_begun, &until) == 0;
}

static void begin_waits_for_who_waits_for_the_device(void **state) {
    meeting m = {.device = adapters_open(1, (size_t)4 << 30)};
    pthread_t threads[3];
    uint64_t before;
    (void)state;
    m.stream = test_open_foreign_stream(m.device);
    assert_int_equal(sem_init(&m.is_held, 0, 0) | sem_init(&m.may_end, 0, 0), 0);
    assert_int_equal(sem_init(&m.is_begun, 0, 0), 0);
    tn__framework_free_unordered(0, adapters_take(MIB, m.stream));
    assert_int_equal(pthread_create(&threads[0], NULL, submit, &m), 0);
    sem_wait(&m.is_held);
    before = test_sim_get()->call_count("cuCtxSynchronize");
    assert_int_equal(pthread_create(&threads[1], NULL, trim, NULL), 0);
    while (test_sim_get()->call_count("cuCtxSynchronize") == before)
        sched_yield();
    assert_int_equal(pthread_create(&threads[2], NULL, begin, &m), 0);
    assert_false(has_begun_within_50_ms(&m));
    sem_post(&m.may_end);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(sem_trywait(&m.is_begun), 0);
    assert_int_equal(adapters_number("live_blocks"), 0);
    EXPECT_OK(adapters_end(77));
    EXPECT_OK(adapters_release(77));
    test_close_foreign_stream(m.device, m.stream);
    adapters_close(m.device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_allocate_free_and_capture_at_once),
        cmocka_unit_test(begin_waits_for_who_waits_for_the_device),
    };
    return cmocka_run_group_tests_name("adapters/adapters_threads", tests, NULL, NULL);
}
