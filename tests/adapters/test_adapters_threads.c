/* The adapters under threads: each with a stream of its own, all kinds of calls, and captures
 * beside them. Races of the threads are for TSan, those of the streams for the simulated device. */
#include "adapters_support.h"

#include <pthread.h>
#include <stdlib.h>

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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(threads_allocate_free_and_capture_at_once)};
    return cmocka_run_group_tests_name("adapters/adapters_threads", tests, NULL, NULL);
}
