/* Captures and graphs in tests: see test_graphs.h. */
#include "test_graphs.h"

#include <dlfcn.h>

#include "driver.h"

typedef struct graph_calls {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*query)(void *stream);
    int (*instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, void *stream);
    int (*exec_destroy)(void *exec);
    int (*graph_destroy)(void *graph);
} graph_calls;

static void find(void *library, void *to, const char *name) {
    void *address = dlsym(library, name);
    if (!address) fail_msg("the CUDA driver lacks %s", name);
    *(void **)to = address;
}

static void *library_of(tn_device *device) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    EXPECT_OK(tn_device_info_get(device, &info));
    if (info.simulated) return test_sim_get()->library;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) fail_msg("%s", dlerror());
    return library;
}

/* The calls, with the device current. A program has devices of one kind. */
static const graph_calls *calls_on(tn_device *device) {
    static graph_calls calls;
    if (!calls.begin) {
        void *library = library_of(device);
        find(library, &calls.begin, "cuStreamBeginCapture_v2");
        find(library, &calls.end, "cuStreamEndCapture");
        find(library, &calls.query, "cuStreamQuery");
        find(library, &calls.instantiate, "cuGraphInstantiateWithFlags");
        find(library, &calls.launch, "cuGraphLaunch");
        find(library, &calls.exec_destroy, "cuGraphExecDestroy");
        find(library, &calls.graph_destroy, "cuGraphDestroy");
    }
    EXPECT_OK(tn__device_driver(device)->make_current(tn__device_state(device)));
    return &calls;
}

void test_capture_begin(tn_device *device, tn_stream stream, test_capture_mode mode) {
    assert_int_equal(calls_on(device)->begin(stream, (int)mode), 0);
}

test_graph test_capture_end(tn_device *device, tn_stream stream) {
    const graph_calls *calls = calls_on(device);
    test_graph graph = {NULL, NULL};
    assert_int_equal(calls->end(stream, &graph.graph), 0);
    assert_int_equal(calls->instantiate(&graph.exec, graph.graph, 0), 0);
    return graph;
}

void test_capture_end_invalid(tn_device *device, tn_stream stream) {
    void *graph = NULL;
    assert_int_equal(calls_on(device)->end(stream, &graph), 901);
    assert_null(graph);
}

void test_capture_drop(tn_device *device, tn_stream stream) {
    const graph_calls *calls = calls_on(device);
    void *graph = NULL;
    (void)calls->end(stream, &graph);
    if (graph) assert_int_equal(calls->graph_destroy(graph), 0);
}

void test_capture_spoil(tn_device *device, tn_stream stream) {
    assert_int_equal(calls_on(device)->query(stream), 900);
}

void test_graph_launch(tn_device *device, const test_graph *graph, tn_stream stream) {
    assert_int_equal(calls_on(device)->launch(graph->exec, stream), 0);
}

void test_graph_destroy(tn_device *device, test_graph *graph) {
    const graph_calls *calls = calls_on(device);
    assert_int_equal(calls->exec_destroy(graph->exec), 0);
    assert_int_equal(calls->graph_destroy(graph->graph), 0);
    *graph = (test_graph){NULL, NULL};
}

int test_is_capturing(tn_device *device, tn_stream stream) {
    tn__capture_status status;
    uint64_t id = 0;
    EXPECT_OK(
        tn__device_driver(device)->stream_capture(tn__device_state(device), stream, &status, &id));
    return status == TN__CAPTURE_ACTIVE;
}

tn_pool *test_open_graph_pool(tn_device *device, tn_pool_backing backing) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.backing = backing;
    config.name = "graphs";
    EXPECT_OK(tn_graph_pool_create(device, &config, &pool));
    return pool;
}
