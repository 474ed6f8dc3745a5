/* Captures and graphs of a real GPU: see gpu_graphs_support.h. */
#include "gpu_graphs_support.h"

static int is_capturing; /* a test that fails leaves it to gpu_graph_end_what_is_left */

void gpu_graph_begin(const gpu_side *side, tn_pool *pool) {
    test_capture_begin(side->device, side->stream, TEST_CAPTURE_GLOBAL);
    is_capturing = 1;
    EXPECT_OK(tn_graph_capture_begin(pool, side->stream));
}

gpu_graph gpu_graph_end(const gpu_side *side, tn_pool *pool) {
    gpu_graph graph = {.memory = 0};
    EXPECT_OK(tn_graph_capture_end(pool, &graph.memory));
    is_capturing = 0;
    graph.graph = test_capture_end(side->device, side->stream);
    return graph;
}

void gpu_graph_end_what_is_left(const gpu_side *side) {
    if (is_capturing) test_capture_drop(side->device, side->stream);
    is_capturing = 0;
}

void gpu_graph_launch(const gpu_side *side, const gpu_graph *graph) {
    test_graph_launch(side->device, &graph->graph, side->stream);
}

void gpu_graph_drop(const gpu_side *side, tn_pool *pool, const gpu_graph *graph) {
    test_graph of = graph->graph;
    test_graph_destroy(side->device, &of);
    EXPECT_OK(tn_graph_memory_release(pool, graph->memory, side->stream));
}
