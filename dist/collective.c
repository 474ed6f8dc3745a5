/* The collectives: one order of a communicator's over all streams, groups, bytes counted.
 *
 * Invariant: a batch reaches the engine whole, behind the last one, and counts in the statistics
 * if and only if it has been put on its stream.
 */
#include "comm_watch.h"

static const char *const names[TN_COLLECTIVE_COUNT] = {"all_gather",
                                                       "reduce_scatter",
                                                       "all_reduce",
                                                       "broadcast",
                                                       "barrier",
                                                       "all_gather_uneven",
                                                       "reduce_scatter_uneven",
                                                       "all_to_all",
                                                       "all_to_all_uneven",
                                                       "send",
                                                       "receive"};

const char *tn_collective_name(tn_collective collective) {
    unsigned at = (unsigned)collective;
    return at < TN_COLLECTIVE_COUNT ? names[at] : "unknown collective";
}

/* ---- bytes on the wire ---------------------------------------------------------------------- */

/* Elements of the first `count` segments that are of rank `mine`, or of all others. */
static uint64_t segment_elements(const tn__batch *batch, const tn__collective_call *call,
                                 size_t count, int mine, int is_of_others) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const tn_segment *segment = &batch->segments[call->first_segment + i];
        if ((segment->rank != mine) == is_of_others) sum += segment->count;
    }
    return sum;
}

static uint64_t wire_elements(const tn_comm *comm, const tn__collective_call *call) {
    const tn__batch *batch = &comm->list.batch;
    uint64_t others = (uint64_t)comm->rank_count - 1;
    uint64_t count = call->count;
    size_t all = call->segment_count;
    switch (call->kind) {
    case TN_ALL_GATHER:
    case TN_ALL_TO_ALL:
    case TN_REDUCE_SCATTER: return others * count;
    case TN_BROADCAST: return call->root == comm->rank ? others * count : 0;
    case TN_ALL_REDUCE: {
        uint64_t part = (count + others) / (others + 1);
        uint64_t before = part * (uint64_t)comm->rank;
        uint64_t mine = before >= count ? 0 : count - before < part ? count - before : part;
        return count - mine + others * mine;
    }
    case TN_ALL_GATHER_UNEVEN: return others * segment_elements(batch, call, all, comm->rank, 0);
    case TN_REDUCE_SCATTER_UNEVEN: return segment_elements(batch, call, all, comm->rank, 1);
    case TN_ALL_TO_ALL_UNEVEN: return segment_elements(batch, call, all / 2, comm->rank, 1);
    case TN_SEND: return call->root == comm->rank ? 0 : count;
    default: return 0;
    }
}

void tn__comm_count_list(const tn_comm *comm, tn_comm_stats *stats) {
    const tn__batch *batch = &comm->list.batch;
    for (size_t i = 0; i < batch->call_count; i++) {
        const tn__collective_call *call = &batch->calls[i];
        if (call->is_uncounted) continue;
        stats->calls[call->kind]++;
        stats->wire_bytes[call->kind] += wire_elements(comm, call) * call->element_bytes;
    }
    stats->groups += comm->is_grouping != 0;
}

/* ---- order ---------------------------------------------------------------------------------- */

tn_status tn__comm_wait_for_last(tn_comm *comm, tn_stream stream, uint64_t stream_id) {
    if (!comm->has_last || comm->last_stream_id == stream_id) return TN_OK;
    return comm->driver->stream_wait_event(comm->on, stream, comm->last);
}

/* Puts the list, which is not empty. */
static tn_status put_list_locked(tn_comm *comm, tn_stream stream) {
    uint64_t stream_id;
    int is_capturing = 0;
    TN_ASSERT(comm->list.batch.call_count > 0);
    TN_TRY(comm->driver->stream_id(comm->on, stream, &stream_id));
    TN_TRY(tn__comm_ask_capture(comm, stream, &is_capturing));
    if (is_capturing) return tn__comm_graph_put_locked(comm, stream, stream_id);
    TN_TRY(tn__comm_wait_for_last(comm, stream, stream_id));
    TN_TRY(tn__comm_watch_before(comm->watch, stream));
    tn_status status = tn__comm_watch_compare(comm->watch, &comm->list.batch, 0);
    if (status == TN_OK) status = comm->engine->start(comm->state, &comm->list.batch, stream);
    if (status != TN_OK) {
        (void)tn__comm_watch_after(comm->watch, 0, stream);
        /* Unless the engine fails for good, nothing was put: the call may be made again. */
        return tn__comm_settle_failure_locked(comm, status);
    }
    tn__flight_put(&comm->flight, &comm->list.batch, stream_id);
    status = comm->driver->event_record(comm->on, comm->last, stream);
    if (status == TN_OK) status = tn__comm_watch_after(comm->watch, comm->flight.put, stream);
    /* It is on the stream and nothing could be ordered behind it any more. */
    if (status != TN_OK) return tn__comm_fail_locked(comm, status);
    comm->has_last = 1;
    comm->last_stream_id = stream_id;
    tn__comm_count_list(comm, &comm->stats);
    return TN_OK;
}

static tn_status check_group_stream(const tn_comm *comm, const char *call, tn_stream stream) {
    if (!comm->list.batch.call_count || comm->group_stream == stream) return TN_OK;
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "communicator %s: %s is on stream %p, and the group that it is in on %p: a "
                   "group is one collective, on one stream",
                   comm->name, call, stream, comm->group_stream);
}

static int is_to_itself(const tn_comm *comm, const tn__collective_call *call) {
    return (call->kind == TN_SEND || call->kind == TN_RECEIVE) && call->root == comm->rank;
}

/* The next message of a kind to the rank itself from call `*at` on; NULL if there is none. */
static const tn__collective_call *next_own(const tn_comm *comm, tn_collective kind, size_t *at) {
    const tn__batch *batch = &comm->list.batch;
    while (*at < batch->call_count) {
        const tn__collective_call *call = &batch->calls[(*at)++];
        if (call->kind == kind && is_to_itself(comm, call)) return call;
    }
    return NULL;
}

/* What a rank sends itself in a group it receives there. */
static tn_status check_own_messages(const tn_comm *comm) {
    size_t send_at = 0, receive_at = 0;
    for (;;) {
        const tn__collective_call *send = next_own(comm, TN_SEND, &send_at);
        const tn__collective_call *receive = next_own(comm, TN_RECEIVE, &receive_at);
        if (!send && !receive) return TN_OK;
        size_t sent = send ? send->count : 0, received = receive ? receive->count : 0;
        if (sent == received) continue;
        return TN_FAIL(TN_INVALID_ARGUMENT,
                       "communicator %s: in this group rank %d sends itself %zu bytes where it "
                       "receives %zu from itself",
                       comm->name, comm->rank, sent, received);
    }
}

static tn_status put_locked(tn_comm *comm, const tn__collective_call *call,
                            const tn_segment *segments, size_t segment_count, tn_stream stream) {
    TN_TRY(tn__comm_check_locked(comm));
    if (comm->is_grouping) {
        TN_TRY(check_group_stream(comm, tn_collective_name(call->kind), stream));
        TN_TRY(tn__batch_add(&comm->list, call, segments, segment_count));
        comm->group_stream = stream;
        return TN_OK;
    }
    if (is_to_itself(comm, call)) {
        return TN_FAIL(TN_INVALID_ARGUMENT,
                       "communicator %s: rank %d can %s to or from itself in a group only, which "
                       "has both ends",
                       comm->name, comm->rank, tn_collective_name(call->kind));
    }
    TN_TRY(tn__batch_add(&comm->list, call, segments, segment_count));
    tn_status status = put_list_locked(comm, stream);
    tn__batch_clear(&comm->list);
    return status;
}

tn_status tn__collective_put(tn_comm *comm, const tn__collective_call *call,
                             const tn_segment *segments, size_t segment_count, tn_stream stream) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = put_locked(comm, call, segments, segment_count, stream);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

tn_status tn__collective_put_nothing(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = tn__comm_check_locked(comm);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* ---- groups --------------------------------------------------------------------------------- */

static tn_status begin_locked(tn_comm *comm) {
    TN_TRY(tn__comm_check_locked(comm));
    if (comm->is_grouping) {
        return TN_FAIL(TN_INVALID_STATE,
                       "communicator %s: a group is open already; end or cancel it first",
                       comm->name);
    }
    comm->is_grouping = 1;
    return TN_OK;
}

tn_status tn_comm_group_begin(tn_comm *comm) {
    TN_REQUIRE(comm, "tn_comm_group_begin: comm is NULL");
    pthread_mutex_lock(&comm->lock);
    tn_status status = begin_locked(comm);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static tn_status end_locked(tn_comm *comm, tn_stream stream) {
    if (!comm->is_grouping) {
        return TN_FAIL(TN_INVALID_STATE, "communicator %s: no group is open: begin one first",
                       comm->name);
    }
    TN_TRY(tn__comm_check_locked(comm));
    TN_TRY(check_group_stream(comm, "tn_comm_group_end", stream));
    TN_TRY(check_own_messages(comm));
    if (comm->list.batch.call_count) TN_TRY(put_list_locked(comm, stream));
    tn__batch_clear(&comm->list);
    comm->is_grouping = 0;
    return TN_OK;
}

tn_status tn_comm_group_end(tn_comm *comm, tn_stream stream) {
    TN_REQUIRE(comm, "tn_comm_group_end: comm is NULL");
    pthread_mutex_lock(&comm->lock);
    tn_status status = end_locked(comm, stream);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

void tn_comm_group_cancel(tn_comm *comm) {
    if (!comm) return;
    pthread_mutex_lock(&comm->lock);
    tn__batch_clear(&comm->list);
    comm->is_grouping = 0;
    pthread_mutex_unlock(&comm->lock);
}
