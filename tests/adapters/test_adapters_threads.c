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

static void open_meeting(meeting *m, size_t memory_bytes) {
    m->device = adapters_open(1, memory_bytes);
    m->stream = test_open_foreign_stream(m->device);
    assert_int_equal(sem_init(&m->is_held, 0, 0) | sem_init(&m->may_end, 0, 0), 0);
    assert_int_equal(sem_init(&m->is_done, 0, 0), 0);
}

static void hold_and_wait(meeting *m, void *(*waits)(void *)) {
    uint64_t before;
    assert_int_equal(pthread_create(&m->submits, NULL, submit, m), 0);
    sem_wait(&m->is_held);
    before = test_sim_get()->call_count("cuCtxSynchronize");
    assert_int_equal(pthread_create(&m->trims, NULL, waits, NULL), 0);
    while (test_sim_get()->call_count("cuCtxSynchronize") == before)
        sched_yield();
}

static void begin_wait(meeting *m, size_t memory_bytes, size_t block_bytes) {
    open_meeting(m, memory_bytes);
    tn__framework_free_unordered(0, adapters_take(block_bytes, m->stream));
    hold_and_wait(m, trim);
}

static int is_done_within_ms(meeting *m, int ms) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += ms / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(&m->is_done, &until) == 0;
}

/* What the thread does is done only when the wait has ended. */
static void run_in_wait(meeting *m, void *(*body)(void *)) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, body, m), 0);
    assert_false(is_done_within_ms(m, 50));
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

/* ---- the end of a graph's memory, beside other threads --------------------------------------- */

static void *release_graph(void *unused) {
    EXPECT_OK(adapters_release(77));
    return unused;
}

static void *take_and_give(void *argument) {
    meeting *m = argument;
    adapters_give(adapters_take(MIB, NULL), NULL);
    adapters_give(m->block, NULL);
    sem_post(&m->is_done);
    return NULL;
}

/* Another thread's body ends while the device does not. */
static void run_beside_wait(meeting *m, void *(*body)(void *)) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, body, m), 0);
    int is_done = is_done_within_ms(m, 60000);
    sem_post(&m->may_end);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(pthread_join(m->submits, NULL), 0);
    assert_int_equal(pthread_join(m->trims, NULL), 0);
    assert_true(is_done);
}

/* The device may be waiting for just the thread that frees. */
static void frees_go_on_while_a_graphs_memory_waits_to_end(void **state) {
    meeting m = {0};
    test_graph graph;
    (void)state;
    open_meeting(&m, (size_t)4 << 30);
    m.block = adapters_take(MIB, NULL);
    adapters_begin(77, &m.filter);
    test_capture_begin(m.device, m.stream, TEST_CAPTURE_RELAXED);
    adapters_give(adapters_take(MIB, m.stream), m.stream);
    graph = test_capture_end(m.device, m.stream);
    EXPECT_OK(adapters_end(77));
    test_graph_destroy(m.device, &graph);
    hold_and_wait(&m, release_graph);
    run_beside_wait(&m, take_and_give);
    assert_int_equal(adapters_number("live_blocks"), 0);
    close_meeting(&m);
}

static void frees_go_on_while_a_capture_waits_to_begin(void **state) {
    meeting m = {0};
    meeting begins = {0};
    pthread_t threads[2];
    (void)state;
    begin_wait(&m, (size_t)4 << 30, MIB);
    m.block = adapters_take(MIB, NULL);
    assert_int_equal(sem_init(&begins.is_done, 0, 0), 0);
    assert_int_equal(pthread_create(&threads[0], NULL, begin_and_end, &begins), 0);
    assert_false(is_done_within_ms(&begins, 50));
    assert_int_equal(pthread_create(&threads[1], NULL, take_and_give, &m), 0);
    int is_done = is_done_within_ms(&m, 60000);
    sem_post(&m.may_end);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(pthread_join(m.submits, NULL), 0);
    assert_int_equal(pthread_join(m.trims, NULL), 0);
    assert_true(is_done);
    EXPECT_OK(adapters_release(77));
    sem_destroy(&begins.is_done);
    close_meeting(&m);
}

static void *capture_and_take(void *argument) {
    meeting *m = argument;
    tn_stream stream = test_open_foreign_stream(m->device);
    test_graph graph;
    test_capture_begin(m->device, stream, TEST_CAPTURE_RELAXED);
    adapters_give(adapters_take(MIB, stream), stream);
    graph = test_capture_end(m->device, stream);
    test_graph_destroy(m->device, &graph);
    test_close_foreign_stream(m->device, stream);
    sem_post(&m->is_done);
    return NULL;
}

/* The thread that began it has emptied its caches, so that nobody is kept from waiting by it. The
 * capture is under way by now: to wait before its memory is given out would help nobody. */
static void a_doubted_capture_waits_for_nobody(void **state) {
    meeting m = {0};
    (void)state;
    open_meeting(&m, (size_t)4 << 30);
    adapters_begin(77, &m.filter);
    EXPECT_OK(tn_adapters_trim());
    tn__framework_free_unordered(0, adapters_take(MIB, m.stream));
    hold_and_wait(&m, trim);
    run_beside_wait(&m, capture_and_take);
    EXPECT_OK(adapters_end(77));
    EXPECT_OK(adapters_release(77));
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_blocks"), 0);
    close_meeting(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_allocate_free_and_capture_at_once),
        cmocka_unit_test(begin_waits_for_who_waits_for_the_device),
        cmocka_unit_test(who_is_short_waits_for_another_threads_flush),
        cmocka_unit_test(frees_go_on_while_a_graphs_memory_waits_to_end),
        cmocka_unit_test(frees_go_on_while_a_capture_waits_to_begin),
        cmocka_unit_test(a_doubted_capture_waits_for_nobody),
    };
    return cmocka_run_group_tests_name("adapters/adapters_threads", tests, NULL, NULL);
}
