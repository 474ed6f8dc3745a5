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

/* ---- while a device is waited for ------------------------------------------------------------ */

typedef struct meeting {
    tn_device *device;
    tn_stream stream;
    pthread_t submits; /* what holds the stream */
    pthread_t trims;   /* waits for the device, with a block of the stream in its hands */
    sem_t is_held;     /* the stream, by its host function */
    sem_t may_end;     /* the host function */
    sem_t is_done;     /* what another thread does meanwhile */
    adapters_filter filter;
    tn_status status;
    void *block;
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

static void begin_wait(meeting *m, size_t memory_bytes, size_t block_bytes) {
    uint64_t before;
    m->device = adapters_open(1, memory_bytes);
    m->stream = test_open_foreign_stream(m->device);
    assert_int_equal(sem_init(&m->is_held, 0, 0) | sem_init(&m->may_end, 0, 0), 0);
    assert_int_equal(sem_init(&m->is_done, 0, 0), 0);
    tn__framework_free_unordered(0, adapters_take(block_bytes, m->stream));
    assert_int_equal(pthread_create(&m->submits, NULL, submit, m), 0);
    sem_wait(&m->is_held);
    before = test_sim_get()->call_count("cuCtxSynchronize");
    assert_int_equal(pthread_create(&m->trims, NULL, trim, NULL), 0);
    while (test_sim_get()->call_count("cuCtxSynchronize") == before)
        sched_yield();
}

static int is_done_within_50_ms(meeting *m) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 50000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(&m->is_done, &until) == 0;
}

/* What the thread does is done only when the wait has ended. */
static void run_in_wait(meeting *m, void *(*body)(void *)) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, body, m), 0);
    assert_false(is_done_within_50_ms(m));
    sem_post(&m->may_end);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(pthread_join(m->submits, NULL), 0);
    assert_int_equal(pthread_join(m->trims, NULL), 0);
    assert_int_equal(sem_trywait(&m->is_done), 0);
}

static void close_meeting(meeting *m) {
    sem_destroy(&m->is_held);
    sem_destroy(&m->may_end);
    sem_destroy(&m->is_done);
    test_close_foreign_stream(m->device, m->stream);
    adapters_close(m->device);
}

static void *begin_and_end(void *argument) {
    meeting *m = argument;
    adapters_begin(77, &m->filter);
    sem_post(&m->is_done);
    EXPECT_OK(adapters_end(77));
    return NULL;
}

static void begin_waits_for_who_waits_for_the_device(void **state) {
    meeting m = {0};
    (void)state;
    begin_wait(&m, (size_t)4 << 30, MIB);
    run_in_wait(&m, begin_and_end);
    assert_int_equal(adapters_number("live_blocks"), 0);
    EXPECT_OK(adapters_release(77));
    close_meeting(&m);
}

static void *take_most(void *argument) {
    meeting *m = argument;
    m->status = tn__framework_alloc(0, 100 * MIB, NULL, "test", &m->block);
    sem_post(&m->is_done);
    return NULL;
}

/* Of 128 MiB one thread has 60 in its hands, until the device is idle: who needs them waits. */
static void who_is_short_waits_for_another_threads_flush(void **state) {
    meeting m = {0};
    (void)state;
    begin_wait(&m, 128 * MIB, 60 * MIB);
    run_in_wait(&m, take_most);
    EXPECT_OK(m.status);
    adapters_give(m.block, NULL);
    close_meeting(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_allocate_free_and_capture_at_once),
        cmocka_unit_test(begin_waits_for_who_waits_for_the_device),
        cmocka_unit_test(who_is_short_waits_for_another_threads_flush),
    };
    return cmocka_run_group_tests_name("adapters/adapters_threads", tests, NULL, NULL);
}
