/* Captures and graphs of CUDA devices in tests, as a program makes them; simulated ones, and a real
 * GPU where a test has one. */
#ifndef TENURE_TEST_GRAPHS_H
#define TENURE_TEST_GRAPHS_H

#include "tenure_pool.h"
#include "test_pools.h"

typedef enum test_capture_mode {
    TEST_CAPTURE_GLOBAL,
    TEST_CAPTURE_THREAD_LOCAL,
    TEST_CAPTURE_RELAXED
} test_capture_mode;

typedef struct test_graph {
    void *graph;
    void *exec;
} test_graph;

void test_capture_begin(tn_device *device, tn_stream stream, test_capture_mode mode);

/* Ends the stream's capture and instantiates the graph. */
test_graph test_capture_end(tn_device *device, tn_stream stream);

/* Ends a capture that is spoiled: no graph comes of it. */
void test_capture_end_invalid(tn_device *device, tn_stream stream);

/* Ends the stream's capture, whatever has become of it, and what comes of it. */
void test_capture_drop(tn_device *device, tn_stream stream);

/* Does what every capture forbids: the stream's capture is spoiled. */
void test_capture_spoil(tn_device *device, tn_stream stream);

void test_graph_launch(tn_device *device, const test_graph *graph, tn_stream stream);
void test_graph_destroy(tn_device *device, test_graph *graph);

/* 1 if the stream's capture is under way and not spoiled. */
int test_is_capturing(tn_device *device, tn_stream stream);

tn_pool *test_open_graph_pool(tn_device *device, tn_pool_backing backing);

#endif
