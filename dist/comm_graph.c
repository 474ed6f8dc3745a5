/* Collectives in captured graphs: see tenure_comm_graph.h.
 *
 *     capture   begin -> (call -> wait for the last of the capture -> engine -> mark) -> end
 *     launch    begin: wait for the communicator's last, watch -> the caller's -> end: mark as the
 *               last, watch, count
 *
 * A call that is captured runs with each launch, so that all which is about running (order among
 * the communicator's, deadline, counts, the flight recorder) is done for the launch as a whole, and
 * what is about calling (checks, the comparison of ranks) for the call.
 *
 * Invariants, under the communicator's lock: `captured` is an event of the open capture from its
 * first collective on (has_last), and of no other; what is counted in a graph is what is in it;
 * graph_count is of graphs that captures were closed to.
 */
#include "comm_watch.h"
#include "host_alloc.h"

struct tn_comm_graph {
    tn_comm *comm;
    tn_stream origin; /* of its capture */
    uint64_t capture_id;
    int has_last; /* a collective was captured: the mark is behind the last one */
    uint64_t last_stream_id;
    int is_half;            /* a call was captured in part: no graph comes of it */
    uint64_t calls_for_all; /* of the collectives: the same on all ranks, as messages need not be */
    uint64_t number;        /* of those that have one for all; 0: it is none */
    tn_comm_graph_info captured; /* without its size */
    int has_met;      /* its next launch has been compared already: the one before was cancelled */
    tn_stream stream; /* of the launch under way */
    uint64_t stream_id;
};

/* ---- what is refused ------------------------------------------------------------------------ */

tn_status tn__comm_check_closed_locked(const tn_comm *comm, const char *what) {
    const char *open = comm->is_grouping ? "a group is open: end or cancel it"
                       : comm->capture   ? "a capture is open: end or abort it"
                                         : "a graph is being launched: end that first";
    if (!comm->is_grouping && !comm->capture && !comm->launching) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "communicator %s can not %s while %s", comm->name, what, open);
}

tn_status tn__comm_check_no_graphs_locked(const tn_comm *comm, const char *what) {
    if (comm->capture) {
        return TN_FAIL(TN_IN_USE,
                       "communicator %s can not %s: a capture is open: tn_comm_capture_abort, or "
                       "end it and destroy the graph",
                       comm->name, what);
    }
    if (!comm->graph_count) return TN_OK;
    return TN_FAIL(TN_IN_USE,
                   "communicator %s can not %s: it is in %llu captured graphs: destroy the "
                   "program's, and then what it has of each (tn_comm_graph_destroy)",
                   comm->name, what, (unsigned long long)comm->graph_count);
}

tn_status tn__comm_ask_capture(tn_comm *comm, tn_stream stream, int *is_capturing) {
    if (comm->launching) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: a graph is being launched: end or cancel that first",
                       comm->name);
    }
    return comm->driver->stream_is_capturing(comm->on, stream, is_capturing);
}

tn_status tn__refuse_capture(tn_device *device, tn_stream stream, const char *call) {
    int is_capturing = 0;
    TN_TRY(tn__device_driver(device)->stream_is_capturing(tn__device_state(device), stream,
                                                          &is_capturing));
    if (!is_capturing) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: the stream captures a graph, and this waits on the host for what it puts "
                   "there: call it outside of the capture",
                   call);
}

static tn_status check_engine(const tn_comm *comm) {
    if (!comm->driver->stream_capture) {
        return TN_FAIL(TN_UNSUPPORTED, "communicator %s: the %s driver captures no graphs",
                       comm->name, comm->driver->name);
    }
    if (comm->engine->is_capturable) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "communicator %s: collectives of the engine %s can not be in a captured graph, "
                   "those of NCCL can: put them on the stream outside of the capture",
                   comm->name, comm->engine->name);
}

static tn_status ask_capture(const tn_comm *comm, tn_stream stream, tn__capture_status *status,
                             uint64_t *id) {
    TN_TRY(comm->driver->stream_capture(comm->on, stream, status, id));
    if (*status != TN__CAPTURE_INVALID) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "communicator %s: something forbidden has spoiled the capture of the stream: no "
                   "graph will come of it; tn_comm_capture_abort",
                   comm->name);
}

static tn_status fail_half(const tn_comm *comm) {
    return TN_FAIL(TN_INVALID_STATE,
                   "communicator %s: a call was captured in part when the driver failed: "
                   "tn_comm_capture_abort, and capture anew",
                   comm->name);
}

/* ---- calls that are captured ---------------------------------------------------------------- */

static tn_status check_put(const tn_comm *comm, tn_stream stream) {
    tn__capture_status status;
    uint64_t id = 0;
    TN_TRY(check_engine(comm));
    TN_TRY(ask_capture(comm, stream, &status, &id));
    if (status == TN__CAPTURE_NONE) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: the legacy default stream can not be used while a stream "
                       "captures that it would wait for",
                       comm->name);
    }
    if (!comm->capture || comm->capture->capture_id != id) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: the stream captures a graph, but %s capture is open here: "
                       "tn_comm_capture_begin, or put the call outside of the capture",
                       comm->name, comm->capture ? "another" : "no");
    }
    return comm->capture->is_half ? fail_half(comm) : TN_OK;
}

static int is_for_all(const tn__batch *batch) {
    for (size_t i = 0; i < batch->call_count; i++) {
        const tn_collective kind = batch->calls[i].kind;
        if (kind != TN_SEND && kind != TN_RECEIVE) return 1;
    }
    return 0;
}

tn_status tn__comm_graph_put_locked(tn_comm *comm, tn_stream stream, uint64_t stream_id) {
    const tn__batch *batch = &comm->list.batch;
    TN_TRY(check_put(comm, stream));
    tn_comm_graph *graph = comm->capture;
    if (graph->has_last && graph->last_stream_id != stream_id)
        TN_TRY(comm->driver->stream_wait_event(comm->on, stream, comm->captured));
    TN_TRY(tn__comm_watch_compare(comm->watch, batch, 1));
    tn_status status = comm->engine->start(comm->state, batch, stream);
    if (status != TN_OK) return tn__comm_settle_failure_locked(comm, status);
    status = comm->driver->event_record(comm->on, comm->captured, stream);
    graph->is_half = status != TN_OK;
    if (status != TN_OK) return status;
    graph->has_last = 1;
    graph->last_stream_id = stream_id;
    graph->calls_for_all += is_for_all(batch) != 0;
    graph->captured.collectives++;
    tn__comm_count_list(comm, &graph->captured.counts);
    return TN_OK;
}

/* ---- captures ------------------------------------------------------------------------------- */

static tn_status check_begin_locked(tn_comm *comm, tn_stream stream, uint64_t *id) {
    tn__capture_status status;
    TN_TRY(tn__comm_check_locked(comm));
    TN_TRY(check_engine(comm));
    if (comm->capture) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: a capture is open already: end or abort it first",
                       comm->name);
    }
    TN_TRY(ask_capture(comm, stream, &status, id));
    if (status == TN__CAPTURE_ACTIVE) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "communicator %s: the stream does not capture: begin its capture first",
                   comm->name);
}

static tn_status begin_capture_locked(tn_comm *comm, tn_stream stream) {
    uint64_t id = 0;
    TN_TRY(check_begin_locked(comm, stream, &id));
    if (!comm->captured) TN_TRY(comm->driver->event_create(comm->on, &comm->captured));
    tn_comm_graph *graph = tn__host_alloc(1, sizeof *graph);
    if (!graph) return TN_OUT_OF_HOST_MEMORY;
    graph->comm = comm;
    graph->origin = stream;
    graph->capture_id = id;
    graph->captured = (tn_comm_graph_info)TN_COMM_GRAPH_INFO_INIT;
    if (comm->engine->keep) comm->engine->keep(comm->state, 0);
    comm->capture = graph;
    return TN_OK;
}

tn_status tn_comm_capture_begin(tn_comm *comm, tn_stream stream) {
    TN_REQUIRE(comm, "tn_comm_capture_begin: comm is NULL");
    pthread_mutex_lock(&comm->lock);
    tn_status status = begin_capture_locked(comm, stream);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* The stream may have left the capture already: only a spoiled one is refused. */
static tn_status end_capture_locked(tn_comm *comm, tn_comm_graph **out) {
    tn_comm_graph *graph = comm->capture;
    tn__capture_status status;
    uint64_t id = 0;
    if (!graph) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: no capture is open: tn_comm_capture_begin", comm->name);
    }
    TN_TRY(tn__comm_check_locked(comm));
    TN_TRY(ask_capture(comm, graph->origin, &status, &id));
    if (graph->is_half) return fail_half(comm);
    if (graph->calls_for_all) graph->number = ++comm->graph_number;
    comm->capture = NULL;
    comm->graph_count++;
    *out = graph;
    return TN_OK;
}

tn_status tn_comm_capture_end(tn_comm *comm, tn_comm_graph **out) {
    TN_REQUIRE(comm && out, "tn_comm_capture_end: comm and out are needed");
    pthread_mutex_lock(&comm->lock);
    tn_status status = end_capture_locked(comm, out);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

void tn_comm_capture_abort(tn_comm *comm) {
    if (!comm) return;
    pthread_mutex_lock(&comm->lock);
    tn_comm_graph *graph = comm->capture;
    comm->capture = NULL;
    pthread_mutex_unlock(&comm->lock);
    tn__host_free(graph);
}

/* ---- launches ------------------------------------------------------------------------------- */

static tn_status compare_launch(tn_comm_graph *graph) {
    const tn__flow_header header = {
        .kind = TN__FLOW_LAUNCH, .count = graph->calls_for_all, .hash = graph->number};
    if (!graph->calls_for_all || graph->has_met) return TN_OK;
    TN_TRY(tn__comm_watch_compare_header(graph->comm->watch, header));
    graph->has_met = 1;
    return TN_OK;
}

static tn_status begin_launch_locked(tn_comm_graph *graph, tn_stream stream) {
    tn_comm *comm = graph->comm;
    uint64_t stream_id;
    int is_capturing = 0;
    TN_TRY(tn__comm_check_locked(comm));
    TN_TRY(comm->driver->stream_id(comm->on, stream, &stream_id));
    TN_TRY(tn__comm_ask_capture(comm, stream, &is_capturing));
    if (is_capturing) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "communicator %s: a graph is launched on a stream that captures: graphs in "
                       "graphs are not supported",
                       comm->name);
    }
    TN_TRY(tn__comm_wait_for_last(comm, stream, stream_id));
    TN_TRY(tn__comm_watch_before(comm->watch, stream));
    tn_status status = compare_launch(graph); /* last: it is not to be repeated */
    if (status != TN_OK) {
        (void)tn__comm_watch_after(comm->watch, 0, stream);
        return status;
    }
    graph->stream = stream;
    graph->stream_id = stream_id;
    comm->launching = graph;
    return TN_OK;
}

tn_status tn_comm_graph_launch_begin(tn_comm_graph *graph, tn_stream stream) {
    TN_REQUIRE(graph, "tn_comm_graph_launch_begin: graph is NULL");
    pthread_mutex_lock(&graph->comm->lock);
    tn_status status = begin_launch_locked(graph, stream);
    pthread_mutex_unlock(&graph->comm->lock);
    return status;
}

static void count_launch(tn_comm_graph *graph) {
    tn_comm_stats *stats = &graph->comm->stats;
    const tn_comm_stats *counts = &graph->captured.counts;
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++) {
        stats->calls[kind] += counts->calls[kind];
        stats->wire_bytes[kind] += counts->wire_bytes[kind];
    }
    stats->groups += counts->groups;
    stats->graph_launches++;
    graph->captured.launches++;
}

static tn_status end_launch_locked(tn_comm_graph *graph) {
    tn_comm *comm = graph->comm;
    if (comm->launching != graph) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: no launch of this graph was begun: "
                       "tn_comm_graph_launch_begin",
                       comm->name);
    }
    comm->launching = NULL;
    graph->has_met = 0;
    tn_status status = tn__comm_check_locked(comm);
    if (status != TN_OK) {
        (void)tn__comm_watch_after(comm->watch, 0, graph->stream);
        return status;
    }
    tn__flight_put_graph(&comm->flight, graph->captured.collectives, graph->stream_id);
    status = comm->driver->event_record(comm->on, comm->last, graph->stream);
    if (status == TN_OK)
        status = tn__comm_watch_after(comm->watch, comm->flight.put, graph->stream);
    /* It is on the stream and nothing could be ordered behind it any more. */
    if (status != TN_OK) return tn__comm_fail_locked(comm, status);
    comm->has_last = 1;
    comm->last_stream_id = graph->stream_id;
    count_launch(graph);
    return TN_OK;
}

tn_status tn_comm_graph_launch_end(tn_comm_graph *graph) {
    TN_REQUIRE(graph, "tn_comm_graph_launch_end: graph is NULL");
    pthread_mutex_lock(&graph->comm->lock);
    tn_status status = end_launch_locked(graph);
    pthread_mutex_unlock(&graph->comm->lock);
    return status;
}

void tn_comm_graph_launch_cancel(tn_comm_graph *graph) {
    if (!graph) return;
    tn_comm *comm = graph->comm;
    pthread_mutex_lock(&comm->lock);
    if (comm->launching == graph) {
        (void)tn__comm_watch_after(comm->watch, 0, graph->stream);
        comm->launching = NULL;
    }
    pthread_mutex_unlock(&comm->lock);
}

/* ---- what is left --------------------------------------------------------------------------- */

tn_status tn_comm_graph_destroy(tn_comm_graph *graph) {
    if (!graph) return TN_OK;
    tn_comm *comm = graph->comm;
    pthread_mutex_lock(&comm->lock);
    int is_free = comm->launching != graph;
    comm->graph_count -= is_free != 0;
    pthread_mutex_unlock(&comm->lock);
    if (!is_free) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_comm_graph_destroy: communicator %s: the graph is being launched: end "
                       "or cancel that first",
                       tn_comm_name(comm));
    }
    tn__host_free(graph);
    return TN_OK;
}

tn_status tn_comm_graph_info_get(tn_comm_graph *graph, tn_comm_graph_info *out) {
    TN_REQUIRE(graph, "tn_comm_graph_info_get: graph is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_comm_graph_info_get: begin with TN_COMM_GRAPH_INFO_INIT");
    pthread_mutex_lock(&graph->comm->lock);
    *out = graph->captured;
    pthread_mutex_unlock(&graph->comm->lock);
    return TN_OK;
}
