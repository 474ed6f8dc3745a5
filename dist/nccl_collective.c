/* Batches as NCCL's calls: one call alone, or a group of them.
 *
 *     all_gather_uneven       a broadcast of each segment from its rank; or ncclAllGather
 *     reduce_scatter_uneven   a reduction of each segment to its rank; or ncclReduceScatter
 *                             (in equal parts in the order of ranks)
 *     all_to_all              a send to and a receive from each rank, also of all_to_all_uneven
 *     barrier                 an all-reduce of one float
 */
#include "nccl_state.h"

static int type_of(tn_dtype dtype) {
    switch (dtype) {
    case TN_FP32: return TN__NCCL_FLOAT32;
    case TN_BF16: return TN__NCCL_BFLOAT16;
    default: return TN__NCCL_UINT8;
    }
}

static int reduction_of(tn_reduce reduce) {
    return reduce == TN_REDUCE_MAX ? TN__NCCL_MAX : TN__NCCL_SUM;
}

/* What the calls below share. */
typedef struct putting {
    tn__comm_state *state;
    const tn__nccl_calls *calls;
    const tn__batch *batch;
    tn_stream stream;
} putting;

/* ---- lists ---------------------------------------------------------------------------------- */

/* Rank r's one segment is the r-th of equal parts. All ranks have this list, and see the same. */
static int is_even(const putting *put, const tn__collective_call *call) {
    const tn_segment *segments = put->batch->segments + call->first_segment;
    if (call->segment_count != (size_t)put->state->rank_count) return 0;
    for (size_t i = 0; i < call->segment_count; i++) {
        if (segments[i].rank != (int)i || segments[i].count != segments[0].count) return 0;
        if (segments[i].offset != i * segments[0].count) return 0;
    }
    return 1;
}

/* ncclSuccess and ncclInProgress both go on. */
static int has_failed(int code) { return code != TN__NCCL_SUCCESS && code != TN__NCCL_IN_PROGRESS; }

static int gather_uneven(const putting *put, const tn__collective_call *call) {
    const tn_segment *segments = put->batch->segments + call->first_segment;
    const char *src = call->src;
    char *dst = call->dst;
    int is_in_place = src == dst, rank = put->state->rank, code = TN__NCCL_SUCCESS;
    if (is_even(put, call)) {
        const char *mine = is_in_place ? dst + segments[rank].offset : src;
        return put->calls->all_gather(mine, dst, segments[0].count, TN__NCCL_UINT8,
                                      put->state->comm, put->stream);
    }
    for (size_t i = 0; i < call->segment_count && !has_failed(code); i++) {
        char *place = dst + segments[i].offset;
        if (!segments[i].count) continue;
        int is_packed = segments[i].rank == rank && !is_in_place;
        code =
            put->calls->broadcast(is_packed ? src : place, place, segments[i].count, TN__NCCL_UINT8,
                                  segments[i].rank, put->state->comm, put->stream);
        if (is_packed) src += segments[i].count;
    }
    return code;
}

static int reduce_scatter_uneven(const putting *put, const tn__collective_call *call) {
    const tn_segment *segments = put->batch->segments + call->first_segment;
    const char *src = call->src;
    char *dst = call->dst;
    int is_in_place = src == dst, rank = put->state->rank, code = TN__NCCL_SUCCESS;
    int type = type_of(call->dtype), reduction = reduction_of(call->reduce);
    if (is_even(put, call)) {
        char *mine = is_in_place ? dst + segments[rank].offset * call->element_bytes : dst;
        return put->calls->reduce_scatter(src, mine, segments[0].count, type, reduction,
                                          put->state->comm, put->stream);
    }
    for (size_t i = 0; i < call->segment_count && !has_failed(code); i++) {
        const char *place = src + segments[i].offset * call->element_bytes;
        if (!segments[i].count) continue;
        /* Only the root's result is written; the others name what they may write: nothing. */
        char *result = segments[i].rank != rank ? NULL : is_in_place ? (char *)place : dst;
        code = put->calls->reduce(place, result, segments[i].count, type, reduction,
                                  segments[i].rank, put->state->comm, put->stream);
        if (segments[i].rank == rank && !is_in_place)
            dst += segments[i].count * call->element_bytes;
    }
    return code;
}

/* ---- from rank to rank ---------------------------------------------------------------------- */

static int send_to(const putting *put, const void *src, size_t bytes, int peer) {
    if (!bytes) return TN__NCCL_SUCCESS;
    return put->calls->send(src, bytes, TN__NCCL_UINT8, peer, put->state->comm, put->stream);
}

static int receive_from(const putting *put, void *dst, size_t bytes, int peer) {
    if (!bytes) return TN__NCCL_SUCCESS;
    return put->calls->receive(dst, bytes, TN__NCCL_UINT8, peer, put->state->comm, put->stream);
}

static int all_to_all(const putting *put, const tn__collective_call *call) {
    const tn_segment *sends = put->batch->segments + call->first_segment;
    const tn_segment *receives = sends + put->state->rank_count;
    int is_uneven = call->kind == TN_ALL_TO_ALL_UNEVEN, code = TN__NCCL_SUCCESS;
    for (int peer = 0; peer < put->state->rank_count && !has_failed(code); peer++) {
        size_t at = (size_t)peer * call->count, bytes = call->count;
        const char *src = (const char *)call->src + (is_uneven ? sends[peer].offset : at);
        char *dst = (char *)call->dst + (is_uneven ? receives[peer].offset : at);
        code = send_to(put, src, is_uneven ? sends[peer].count : bytes, peer);
        if (!has_failed(code))
            code = receive_from(put, dst, is_uneven ? receives[peer].count : bytes, peer);
    }
    return code;
}

/* ---- one call ------------------------------------------------------------------------------- */

static int put_call(const putting *put, const tn__collective_call *call) {
    int type = type_of(call->dtype), reduction = reduction_of(call->reduce);
    void *comm = put->state->comm, *word = put->state->barrier_word;
    switch (call->kind) {
    case TN_ALL_GATHER:
        return put->calls->all_gather(call->src, call->dst, call->count, type, comm, put->stream);
    case TN_REDUCE_SCATTER:
        return put->calls->reduce_scatter(call->src, call->dst, call->count, type, reduction, comm,
                                          put->stream);
    case TN_ALL_REDUCE:
        return put->calls->all_reduce(call->src, call->dst, call->count, type, reduction, comm,
                                      put->stream);
    case TN_BROADCAST:
        return put->calls->broadcast(call->src, call->dst, call->count, type, call->root, comm,
                                     put->stream);
    case TN_ALL_GATHER_UNEVEN: return gather_uneven(put, call);
    case TN_ALL_TO_ALL:
    case TN_ALL_TO_ALL_UNEVEN: return all_to_all(put, call);
    case TN_SEND: return send_to(put, call->src, call->count, call->root);
    case TN_RECEIVE: return receive_from(put, call->dst, call->count, call->root);
    case TN_REDUCE_SCATTER_UNEVEN: return reduce_scatter_uneven(put, call);
    default:
        return put->calls->all_reduce(word, word, 1, TN__NCCL_FLOAT32, TN__NCCL_MAX, comm,
                                      put->stream);
    }
}

/* The name of the one call of NCCL that a batch is; NULL if it is a group. */
static const char *name_alone(const tn__batch *batch) {
    static const char *const names[TN_COLLECTIVE_COUNT] = {
        [TN_ALL_GATHER] = "ncclAllGather",
        [TN_REDUCE_SCATTER] = "ncclReduceScatter",
        [TN_ALL_REDUCE] = "ncclAllReduce",
        [TN_BROADCAST] = "ncclBroadcast",
        [TN_BARRIER] = "ncclAllReduce of a barrier",
        [TN_SEND] = "ncclSend",
        [TN_RECEIVE] = "ncclRecv"};
    return batch->call_count == 1 ? names[batch->calls[0].kind] : NULL;
}

static int is_message(const tn__collective_call *call) {
    return call->kind == TN_SEND || call->kind == TN_RECEIVE;
}

static int put_group(const putting *put) {
    int code = put->calls->group_start();
    if (code != TN__NCCL_SUCCESS) return code;
    /* Messages after all others: what two ranks send each other must be in one order on both. */
    for (int messages = 0; messages < 2; messages++)
        for (size_t i = 0; i < put->batch->call_count && !has_failed(code); i++)
            if (is_message(&put->batch->calls[i]) == messages)
                code = put_call(put, &put->batch->calls[i]);
    /* After a failed call this ends the group without a launch. */
    int end = put->calls->group_end();
    return has_failed(code) ? code : end;
}

tn_status tn__nccl_batch_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    putting put = {.state = state, .calls = state->calls, .batch = batch, .stream = stream};
    TN_TRY(state->driver->make_current(state->on));
    const char *name = name_alone(batch);
    int code = name ? put_call(&put, &batch->calls[0]) : put_group(&put);
    return tn__nccl_finish(state, code, name ? name : "ncclGroupEnd");
}
