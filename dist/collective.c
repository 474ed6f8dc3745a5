/* The collectives: their arguments checked, their order kept, their bytes counted.
 *
 * Invariant: what reaches an engine has elements, addresses that are aligned and whose ranges
 * are apart or in place, and sizes whose product with the count of ranks does not overflow.
 */
#include "comm.h"

static const char *const names[TN_COLLECTIVE_COUNT] = {"all_gather", "reduce_scatter", "all_reduce",
                                                       "broadcast", "barrier"};

const char *tn_collective_name(tn_collective collective) {
    unsigned at = (unsigned)collective;
    return at < TN_COLLECTIVE_COUNT ? names[at] : "unknown collective";
}

/* ---- bytes on the wire ---------------------------------------------------------------------- */

static uint64_t wire_bytes(const tn_comm *comm, const tn__collective_call *call) {
    uint64_t others = (uint64_t)comm->rank_count - 1;
    uint64_t count = call->count;
    switch (call->kind) {
    case TN_ALL_GATHER:
    case TN_REDUCE_SCATTER: return others * count * call->element_bytes;
    case TN_BROADCAST: return call->root == comm->rank ? others * count * call->element_bytes : 0;
    case TN_ALL_REDUCE: {
        uint64_t part = (count + others) / (others + 1);
        uint64_t before = part * (uint64_t)comm->rank;
        uint64_t mine = before >= count ? 0 : count - before < part ? count - before : part;
        return (count - mine + others * mine) * call->element_bytes;
    }
    default: return 0;
    }
}

/* ---- order ---------------------------------------------------------------------------------- */

static tn_status wait_for_last(tn_comm *comm, tn_stream stream, uint64_t stream_id) {
    if (!comm->has_last || comm->last_stream_id == stream_id) return TN_OK;
    return comm->driver->stream_wait_event(comm->on, stream, comm->last);
}

static tn_status refuse_capture(tn_comm *comm, tn_stream stream) {
    int is_capturing = 0;
    TN_TRY(comm->driver->stream_is_capturing(comm->on, stream, &is_capturing));
    if (!is_capturing) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "communicator %s: the stream captures a graph, and collectives can not be in "
                   "one: put them on the stream outside of the capture",
                   comm->name);
}

static tn_status put_locked(tn_comm *comm, const tn__collective_call *call, tn_stream stream) {
    uint64_t stream_id;
    TN_TRY(tn__comm_check_locked(comm));
    TN_TRY(comm->driver->stream_id(comm->on, stream, &stream_id));
    TN_TRY(refuse_capture(comm, stream));
    TN_TRY(wait_for_last(comm, stream, stream_id));
    tn_status status = comm->engine->start(comm->state, call, stream);
    if (status != TN_OK) {
        /* Unless the engine fails for good, nothing was put: the call may be made again. */
        tn__saved_error saved;
        tn__error_save(&saved);
        if (tn__comm_check_locked(comm) != TN_OK) return comm->failure;
        tn__error_restore(&saved);
        return status;
    }
    status = comm->driver->event_record(comm->on, comm->last, stream);
    /* It is on the stream and nothing could be ordered behind it any more. */
    if (status != TN_OK) return tn__comm_fail_locked(comm, status);
    comm->has_last = 1;
    comm->last_stream_id = stream_id;
    comm->stats.calls[call->kind]++;
    comm->stats.wire_bytes[call->kind] += wire_bytes(comm, call);
    return TN_OK;
}

static tn_status put(tn_comm *comm, const tn__collective_call *call, tn_stream stream) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = put_locked(comm, call, stream);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* Nothing to do, but a communicator that has failed says so. */
static tn_status put_nothing(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = tn__comm_check_locked(comm);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* ---- arguments ------------------------------------------------------------------------------ */

static tn_status check_size(const tn_comm *comm, const tn__collective_call *call) {
    size_t whole, bytes;
    if (__builtin_mul_overflow(call->count, (size_t)comm->rank_count, &whole) ||
        __builtin_mul_overflow(whole, call->element_bytes, &bytes) || bytes > SIZE_MAX / 2) {
        return TN_FAIL(TN_INVALID_ARGUMENT, "%s of %zu x %zu bytes on each of %d ranks: too large",
                       names[call->kind], call->count, call->element_bytes, comm->rank_count);
    }
    return TN_OK;
}

static tn_status check_addresses(const tn__collective_call *call) {
    TN_REQUIRE(call->src && call->dst, "%s of %zu elements from %p to %p: an address is NULL",
               names[call->kind], call->count, call->src, call->dst);
    TN_REQUIRE((uintptr_t)call->src % call->element_bytes == 0 &&
                   (uintptr_t)call->dst % call->element_bytes == 0,
               "%s from %p to %p: an address is not aligned to an element of %zu bytes",
               names[call->kind], call->src, call->dst, call->element_bytes);
    return TN_OK;
}

/* The ranges are apart, or dst is where in-place operation wants it: dst_bytes == src_bytes and
 * the same address, or one of them at the rank's part of the other. */
static tn_status check_overlap(const tn_comm *comm, const tn__collective_call *call,
                               size_t src_bytes, size_t dst_bytes) {
    uintptr_t src = (uintptr_t)call->src, dst = (uintptr_t)call->dst;
    size_t before = (size_t)comm->rank * call->count * call->element_bytes;
    int is_in_place = call->kind == TN_ALL_GATHER       ? src == dst + before
                      : call->kind == TN_REDUCE_SCATTER ? dst == src + before
                                                        : src == dst;
    if (is_in_place || src + src_bytes <= dst || dst + dst_bytes <= src) return TN_OK;
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "%s from %p (%zu bytes) to %p (%zu bytes), rank %d of %d: the ranges overlap "
                   "and are not in place",
                   names[call->kind], call->src, src_bytes, call->dst, dst_bytes, comm->rank,
                   comm->rank_count);
}

static tn_status check_reduction(const tn__collective_call *call) {
    TN_REQUIRE(call->dtype == TN_FP32 || call->dtype == TN_BF16,
               "%s of %s: reductions are of fp32 and bf16", names[call->kind],
               tn_dtype_name(call->dtype));
    TN_REQUIRE(call->reduce == TN_REDUCE_SUM || call->reduce == TN_REDUCE_MAX,
               "%s: %d is no reduction", names[call->kind], (int)call->reduce);
    return TN_OK;
}

/* ---- the calls ------------------------------------------------------------------------------ */

tn_status tn_all_gather(tn_comm *comm, const void *src, void *dst, size_t bytes, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_gather: comm is NULL");
    tn__collective_call call = {.kind = TN_ALL_GATHER, .src = src, .dst = dst, .count = bytes};
    call.element_bytes = 1, call.dtype = TN_BYTE;
    if (!bytes) return put_nothing(comm);
    TN_TRY(check_size(comm, &call));
    TN_TRY(check_addresses(&call));
    TN_TRY(check_overlap(comm, &call, bytes, bytes * (size_t)comm->rank_count));
    return put(comm, &call, stream);
}

tn_status tn_reduce_scatter(tn_comm *comm, const void *src, void *dst, size_t count, tn_dtype dtype,
                            tn_reduce reduce, tn_stream stream) {
    TN_REQUIRE(comm, "tn_reduce_scatter: comm is NULL");
    tn__collective_call call = {.kind = TN_REDUCE_SCATTER, .src = src, .dst = dst, .count = count};
    call.dtype = dtype, call.reduce = reduce;
    TN_TRY(check_reduction(&call));
    if (!count) return put_nothing(comm);
    call.element_bytes = tn_dtype_bytes(dtype);
    TN_TRY(check_size(comm, &call));
    TN_TRY(check_addresses(&call));
    size_t bytes = count * call.element_bytes;
    TN_TRY(check_overlap(comm, &call, bytes * (size_t)comm->rank_count, bytes));
    return put(comm, &call, stream);
}

tn_status tn_all_reduce(tn_comm *comm, const void *src, void *dst, size_t count, tn_dtype dtype,
                        tn_reduce reduce, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_reduce: comm is NULL");
    tn__collective_call call = {.kind = TN_ALL_REDUCE, .src = src, .dst = dst, .count = count};
    call.dtype = dtype, call.reduce = reduce;
    TN_TRY(check_reduction(&call));
    if (!count) return put_nothing(comm);
    call.element_bytes = tn_dtype_bytes(dtype);
    TN_TRY(check_size(comm, &call));
    TN_TRY(check_addresses(&call));
    size_t bytes = count * call.element_bytes;
    TN_TRY(check_overlap(comm, &call, bytes, bytes));
    return put(comm, &call, stream);
}

tn_status tn_broadcast(tn_comm *comm, void *buffer, size_t bytes, int root, tn_stream stream) {
    TN_REQUIRE(comm, "tn_broadcast: comm is NULL");
    tn__collective_call call = {.kind = TN_BROADCAST, .src = buffer, .dst = buffer, .root = root};
    call.count = bytes, call.element_bytes = 1, call.dtype = TN_BYTE;
    TN_REQUIRE(root >= 0 && root < comm->rank_count, "tn_broadcast: root %d of %d ranks", root,
               comm->rank_count);
    if (!bytes) return put_nothing(comm);
    TN_TRY(check_size(comm, &call));
    TN_TRY(check_addresses(&call));
    return put(comm, &call, stream);
}

tn_status tn_barrier(tn_comm *comm, tn_stream stream) {
    TN_REQUIRE(comm, "tn_barrier: comm is NULL");
    tn__collective_call call = {.kind = TN_BARRIER, .element_bytes = 1, .dtype = TN_BYTE};
    return put(comm, &call, stream);
}
