/* Captures: which streams are in them, and what they forbid. See sim_capture.h.
 *
 * Modes: a thread may make unsafe calls unless it has begun a capture that goes on, in another mode
 * than relaxed; or any thread has one in global mode and this one is in global mode, which threads
 * are until they change it. A thread in relaxed mode always may.
 */
#include <string.h>

#include "sim_capture.h"
#include "sim_lifecycle.h"

static sim_capture *captures; /* those that go on */
static uint64_t last_id;

/* ---- threads --------------------------------------------------------------------------------- */

typedef struct capture_thread {
    uint64_t generation;
    uint64_t number;
    int mode;
} capture_thread;

static capture_thread *this_thread(void) {
    static _Thread_local capture_thread thread;
    static uint64_t last_number;
    if (!thread.number) thread.number = ++last_number;
    if (thread.generation != tn__sim.generation) {
        thread.generation = tn__sim.generation;
        thread.mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    }
    return &thread;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    SIM_ENTER(cuThreadExchangeStreamCaptureMode);
    capture_thread *thread = this_thread();
    int before = thread->mode;
    if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
        return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    thread->mode = *mode;
    *mode = before;
    return tn__sim_leave(CUDA_SUCCESS);
}

/* ---- what is forbidden ----------------------------------------------------------------------- */

void tn__sim_capture_invalidate(sim_capture *capture) { capture->is_invalid = 1; }

static int is_unsafe(sim_call call, int is_memory) {
    return is_memory || call == SIM_CALL_cuEventQuery || call == SIM_CALL_cuEventSynchronize;
}

static int forbids(const sim_capture *capture, const capture_thread *thread) {
    if (capture->thread == thread->number) return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
           thread->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult tn__sim_capture_admits(sim_call call, int is_memory) {
    CUresult result = CUDA_SUCCESS;
    const capture_thread *thread;
    if (!captures || !is_unsafe(call, is_memory)) return CUDA_SUCCESS;
    thread = this_thread();
    if (thread->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    for (sim_capture *capture = captures; capture; capture = capture->next) {
        if (!forbids(capture, thread)) continue;
        tn__sim_capture_invalidate(capture);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

CUresult tn__sim_capture_refuses(sim_stream *stream) {
    CUresult result = tn__sim_capture_gate(stream);
    if (result != CUDA_SUCCESS || !stream->capture) return result;
    tn__sim_capture_invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

typedef struct device_question {
    int device;
    int only_blocking;
    int invalidates;
    int is_capturing;
} device_question;

static void ask_stream(sim_stream *stream, void *argument) {
    device_question *question = argument;
    if (!stream->capture || stream->device != question->device) return;
    if (question->only_blocking && !stream->is_blocking) return;
    if (question->invalidates) tn__sim_capture_invalidate(stream->capture);
    question->is_capturing = 1;
}

CUresult tn__sim_capture_refuses_device(int device) {
    device_question question = {.device = device, .invalidates = 1};
    if (captures) tn__sim_streams_visit(ask_stream, &question);
    return question.is_capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* A stream that the legacy one comes after captures. */
static int is_implicit(const sim_stream *stream, int invalidates) {
    device_question question = {
        .device = stream->device, .only_blocking = 1, .invalidates = invalidates};
    if (!captures || stream->kind != SIM_STREAM_LEGACY) return 0;
    tn__sim_streams_visit(ask_stream, &question);
    return question.is_capturing;
}

CUresult tn__sim_capture_gate(const sim_stream *stream) {
    if (is_implicit(stream, 1)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture && stream->capture->is_invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    return CUDA_SUCCESS;
}

/* ---- begin, join, end ------------------------------------------------------------------------ */

static CUresult begin_capture(CUstream handle, int mode) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_capture *capture;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream->kind == SIM_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    capture = tn__sim_alloc(1, sizeof *capture);
    capture->id = ++last_id;
    capture->thread = this_thread()->number;
    capture->mode = mode;
    capture->origin = stream;
    capture->graph = tn__sim_graph_create();
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    SIM_ENTER(cuStreamBeginCapture_v2);
    return tn__sim_leave(begin_capture(stream, mode));
}

sim_capture *tn__sim_capture_find(uint64_t id) {
    sim_capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

CUresult tn__sim_capture_join(sim_stream *stream, sim_capture *capture, const sim_tips *tips) {
    if (stream->kind == SIM_STREAM_LEGACY) {
        tn__sim_capture_invalidate(capture);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture && stream->capture != capture) {
        tn__sim_capture_invalidate(capture);
        tn__sim_capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (capture->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture = capture;
    for (uint32_t i = 0; i < tips->count; i++)
        tn__sim_tips_add(&stream->tips, tips->nodes[i]);
    return CUDA_SUCCESS;
}

static void leave_capture(sim_stream *stream, void *capture) {
    if (stream->capture != capture) return;
    stream->capture = NULL;
    stream->tips.count = 0;
}

static void remove_capture(sim_capture *capture) {
    sim_capture **at = &captures;
    while (*at != capture)
        at = &(*at)->next;
    *at = capture->next;
    tn__sim_streams_visit(leave_capture, capture);
    tn__sim_free(capture);
}

/* What is wrong with the end of a capture ends it too. */
static CUresult end_capture(CUstream handle, CUgraph *out) {
    sim_stream *stream = tn__sim_stream_find(handle);
    sim_capture *capture;
    sim_graph *graph;
    CUresult result = CUDA_SUCCESS;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
        tn__sim_capture_invalidate(capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
        capture->thread != this_thread()->number) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    graph = capture->graph;
    if (capture->is_invalid) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (!tn__sim_graph_is_joined(graph, &stream->tips)) {
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    remove_capture(capture);
    graph->has_handle = result == CUDA_SUCCESS;
    if (!graph->has_handle) tn__sim_graph_release(graph);
    *out = result == CUDA_SUCCESS ? (CUgraph)graph : NULL;
    return result;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    SIM_ENTER(cuStreamEndCapture);
    return tn__sim_leave(end_capture(stream, graph));
}

/* ---- questions ------------------------------------------------------------------------------- */

/* The legacy stream can not be asked, but the question does no harm to the capture. */
static CUresult capture_info(CUstream handle, int *status, uint64_t *id) {
    const sim_stream *stream = tn__sim_stream_find(handle);
    const sim_capture *capture;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    if (is_implicit(stream, 0)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    capture = stream->capture;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!capture) return CUDA_SUCCESS;
    *status = capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                  : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id) *id = capture->id;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    SIM_ENTER(cuStreamIsCapturing);
    return tn__sim_leave(capture_info(stream, status, NULL));
}

static CUresult refuse_nodes(void) {
    return tn__sim_refuse("cuStreamGetCaptureInfo: the graph and its nodes are not shown");
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, size_t *dependency_count) {
    int is_more = graph || dependencies || dependency_count;
    SIM_ENTER(cuStreamGetCaptureInfo_v2);
    return tn__sim_leave(is_more ? refuse_nodes() : capture_info(stream, status, id));
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, const void **edges,
                                   size_t *dependency_count) {
    int is_more = graph || dependencies || edges || dependency_count;
    SIM_ENTER(cuStreamGetCaptureInfo_v3);
    return tn__sim_leave(is_more ? refuse_nodes() : capture_info(stream, status, id));
}

/* ---- reset, leftovers ------------------------------------------------------------------------ */

void tn__sim_captures_reset(void) {
    while (captures) {
        sim_graph *graph = captures->graph;
        remove_capture(captures);
        tn__sim_graph_release(graph);
    }
    tn__sim_graphs_reset();
}

int tn__sim_capture_leftovers(sim_report *report) {
    int count = 0;
    for (const sim_capture *capture = captures; capture; capture = capture->next)
        count++;
    if (count) tn__sim_report_line(report, "  captures under way: %d\n", count);
    return count + tn__sim_graph_leftovers(report);
}
