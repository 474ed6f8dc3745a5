/* Captures and graphs of a real GPU: see gpu_graphs_support.h. */
#include "gpu_graphs_support.h"

#include <dlfcn.h>

#include "driver.h"

static gpu_graph_calls cu;
static int is_capturing; /* a test that fails leaves it to gpu_graph_end_what_is_left */

static void find(void *library, void *to, const char *name) {
    void *address = dlsym(library, name);
    if (!address) fail_msg("libcuda lacks %s", name);
    *(void **)to = address;
}

const gpu_graph_calls *gpu_graph_load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) fail_msg("%s", dlerror());
    find(library, &cu.begin, "cuStreamBeginCapture_v2");
    find(library, &cu.end, "cuStreamEndCapture");
    find(library, &cu.query, "cuStreamQuery");
    find(library, &cu.instantiate, "cuGraphInstantiateWithFlags");
    find(library, &cu.launch, "cuGraphLaunch");
    find(library, &cu.exec_destroy, "cuGraphExecDestroy");
    find(library, &cu.graph_destroy, "cuGraphDestroy");
    return &cu;
}

void gpu_graph_begin(const gpu_side *side, tn_pool *pool) {
    EXPECT_OK(tn__device_driver(side->device)->make_current(tn__device_state(side->device)));
    assert_int_equal(cu.begin(side->stream, 0), 0);
    is_capturing = 1;
    EXPECT_OK(tn_graph_capture_begin(pool, side->stream));
}

gpu_graph gpu_graph_end(const gpu_side *side, tn_pool *pool) {
    gpu_graph graph = {0};
    EXPECT_OK(tn_graph_capture_end(pool, &graph.memory));
    is_capturing = 0;
    assert_int_equal(cu.end(side->stream, &graph.graph), 0);
    assert_int_equal(cu.instantiate(&graph.exec, graph.graph, 0), 0);
    return graph;
}

void gpu_graph_end_what_is_left(const gpu_side *side) {
    void *graph = NULL;
    if (is_capturing) (void)cu.end(side->stream, &graph);
    is_capturing = 0;
}

void gpu_graph_launch(const gpu_side *side, const gpu_graph *graph) {
    assert_int_equal(cu.launch(graph->exec, side->stream), 0);
}

void gpu_graph_drop(const gpu_side *side, tn_pool *pool, const gpu_graph *graph) {
    assert_int_equal(cu.exec_destroy(graph->exec), 0);
    assert_int_equal(cu.graph_destroy(graph->graph), 0);
    EXPECT_OK(tn_graph_memory_release(pool, graph->memory, side->stream));
}
