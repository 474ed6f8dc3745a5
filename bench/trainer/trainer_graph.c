/* Capturing a training step: see trainer_graph.h.
 *
 * Invariant: what is set in a trainer_graph exists, and close ends just that.
 */
#include "trainer_graph.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do what they like. */
enum { CAPTURE_MODE_THREAD_LOCAL = 1 };

/* Of the driver's own calls. */
static tn_status driver_status(trainer_graph *graph, const char *what, int code) {
    if (code == 0) return TN_OK;
    snprintf(graph->message, sizeof graph->message, "%s: CUDA error %d", what, code);
    return TN_DRIVER_ERROR;
}

static tn_status tenure_status(trainer_graph *graph, const char *what, tn_status status) {
    if (status == TN_OK) return TN_OK;
    snprintf(graph->message, sizeof graph->message, "%s: %s", what, tn_error_last());
    return status;
}

/* ---- the driver's calls --------------------------------------------------------------------- */

static tn_status open_library(trainer_graph *graph) {
    const char *path = getenv("TENURE_CUDA_LIBRARY");
    graph->library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (graph->library) return TN_OK;
    snprintf(graph->message, sizeof graph->message, "%s", dlerror());
    return TN_UNSUPPORTED;
}

static tn_status find_calls(trainer_graph *graph) {
    trainer_graph_calls *calls = &graph->calls;
    const struct {
        void *to;
        const char *name;
    } wanted[] = {{&calls->device_get, "cuDeviceGet"},
                  {&calls->context_retain, "cuDevicePrimaryCtxRetain"},
                  {&calls->context_release, "cuDevicePrimaryCtxRelease_v2"},
                  {&calls->context_set, "cuCtxSetCurrent"},
                  {&calls->capture_begin, "cuStreamBeginCapture_v2"},
                  {&calls->capture_end, "cuStreamEndCapture"},
                  {&calls->instantiate, "cuGraphInstantiateWithFlags"},
                  {&calls->launch, "cuGraphLaunch"},
                  {&calls->exec_destroy, "cuGraphExecDestroy"},
                  {&calls->graph_destroy, "cuGraphDestroy"}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *(void **)wanted[i].to = dlsym(graph->library, wanted[i].name);
        if (*(void **)wanted[i].to) continue;
        snprintf(graph->message, sizeof graph->message, "the driver lacks %s", wanted[i].name);
        return TN_UNSUPPORTED;
    }
    return TN_OK;
}

/* The primary context, which is the one that Tenure uses, is this thread's from now on. */
static tn_status enter_context(trainer_graph *graph) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    void *context = NULL;
    tn_status status = tenure_status(graph, "the device", tn_device_info_get(graph->device, &info));
    if (status != TN_OK) return status;
    int code = graph->calls.device_get(&graph->cuda_device, info.ordinal);
    if (!code) code = graph->calls.context_retain(&context, graph->cuda_device);
    graph->has_context = code == 0;
    if (!code) code = graph->calls.context_set(context);
    return driver_status(graph, "taking the device's context", code);
}

tn_status trainer_graph_open(trainer_graph *graph, tn_device *device, tn_stream stream) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    *graph = (trainer_graph){.device = device, .stream = stream};
    config.name = "captured steps";
    tn_status status = open_library(graph);
    if (status == TN_OK) status = find_calls(graph);
    if (status == TN_OK) status = enter_context(graph);
    if (status != TN_OK) return status;
    return tenure_status(graph, "the graph pool",
                         tn_graph_pool_create(device, &config, &graph->pool));
}

/* ---- a capture ------------------------------------------------------------------------------ */

tn_status trainer_graph_begin(trainer_graph *graph) {
    const int code = graph->calls.capture_begin(graph->stream, CAPTURE_MODE_THREAD_LOCAL);
    if (code) return driver_status(graph, "cuStreamBeginCapture", code);
    graph->is_capturing = 1;
    return tenure_status(graph, "opening the capture",
                         tn_graph_capture_begin(graph->pool, graph->stream));
}

void trainer_graph_abort(trainer_graph *graph) {
    if (!graph->is_capturing) return;
    const tn_status status = tn_graph_capture_abort(graph->pool);
    (void)status; /* TN_INVALID_STATE: it was not open yet */
    (void)graph->calls.capture_end(graph->stream, &graph->graph);
    graph->is_capturing = 0;
}

tn_status trainer_graph_end(trainer_graph *graph) {
    tn_status status = tenure_status(graph, "closing the capture",
                                     tn_graph_capture_end(graph->pool, &graph->memory));
    if (status != TN_OK) return status;
    graph->is_capturing = 0;
    graph->has_memory = 1;
    status = driver_status(graph, "cuStreamEndCapture",
                           graph->calls.capture_end(graph->stream, &graph->graph));
    if (status != TN_OK) return status;
    return driver_status(graph, "cuGraphInstantiate",
                         graph->calls.instantiate(&graph->exec, graph->graph, 0));
}

tn_status trainer_graph_launch(trainer_graph *graph) {
    return driver_status(graph, "cuGraphLaunch", graph->calls.launch(graph->exec, graph->stream));
}

static void note(tn_status *first, tn_status status) {
    if (*first == TN_OK) *first = status;
}

tn_status trainer_graph_close(trainer_graph *graph) {
    tn_status status = TN_OK;
    trainer_graph_abort(graph);
    if (graph->exec) {
        note(&status,
             driver_status(graph, "cuGraphExecDestroy", graph->calls.exec_destroy(graph->exec)));
    }
    if (graph->graph) {
        note(&status,
             driver_status(graph, "cuGraphDestroy", graph->calls.graph_destroy(graph->graph)));
    }
    if (graph->has_memory) {
        note(&status,
             tenure_status(graph, "releasing the graph's memory",
                           tn_graph_memory_release(graph->pool, graph->memory, graph->stream)));
    }
    note(&status, tenure_status(graph, "closing the graph pool", tn_pool_destroy(graph->pool)));
    if (graph->has_context) (void)graph->calls.context_release(graph->cuda_device);
    if (graph->library) dlclose(graph->library);
    graph->exec = graph->graph = NULL;
    graph->has_memory = graph->has_context = 0;
    graph->library = NULL, graph->pool = NULL;
    return status;
}
