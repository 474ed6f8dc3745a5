/* The even collectives and the barrier: their arguments checked. See comm.h.
 *
 * Invariant: what reaches an engine has elements, addresses that are aligned and whose ranges
 * are apart or in place, and sizes whose product with the count of ranks does not overflow.
 */
#include "comm.h"

/* ---- arguments ------------------------------------------------------------------------------ */

tn_status tn__collective_check_size(const tn_comm *comm, const tn__collective_call *call) {
    size_t whole, bytes;
    if (__builtin_mul_overflow(call->count, (size_t)comm->rank_count, &whole) ||
        __builtin_mul_overflow(whole, call->element_bytes, &bytes) || bytes > SIZE_MAX / 2) {
        return TN_FAIL(TN_INVALID_ARGUMENT, "%s of %zu x %zu bytes on each of %d ranks: too large",
                       tn_collective_name(call->kind), call->count, call->element_bytes,
                       comm->rank_count);
    }
    return TN_OK;
}

tn_status tn__collective_check_addresses(const tn__collective_call *call) {
    TN_REQUIRE(call->src && call->dst, "%s of %zu elements from %p to %p: an address is NULL",
               tn_collective_name(call->kind), call->count, call->src, call->dst);
    TN_REQUIRE((uintptr_t)call->src % call->element_bytes == 0 &&
                   (uintptr_t)call->dst % call->element_bytes == 0,
               "%s from %p to %p: an address is not aligned to an element of %zu bytes",
               tn_collective_name(call->kind), call->src, call->dst, call->element_bytes);
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
                      : call->kind == TN_ALL_TO_ALL     ? 0
                                                        : src == dst;
    if (is_in_place || src + src_bytes <= dst || dst + dst_bytes <= src) return TN_OK;
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "%s from %p (%zu bytes) to %p (%zu bytes), rank %d of %d: the ranges overlap "
                   "and are not in place",
                   tn_collective_name(call->kind), call->src, src_bytes, call->dst, dst_bytes,
                   comm->rank, comm->rank_count);
}

tn_status tn__collective_check_reduction(const tn__collective_call *call) {
    TN_REQUIRE(call->dtype == TN_FP32 || call->dtype == TN_BF16,
               "%s of %s: reductions are of fp32 and bf16", tn_collective_name(call->kind),
               tn_dtype_name(call->dtype));
    TN_REQUIRE(call->reduce == TN_REDUCE_SUM || call->reduce == TN_REDUCE_MAX,
               "%s: %d is no reduction", tn_collective_name(call->kind), (int)call->reduce);
    return TN_OK;
}

/* ---- the calls ------------------------------------------------------------------------------ */

tn_status tn_all_gather(tn_comm *comm, const void *src, void *dst, size_t bytes, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_gather: comm is NULL");
    tn__collective_call call = {.kind = TN_ALL_GATHER, .src = src, .dst = dst, .count = bytes};
    call.element_bytes = 1, call.dtype = TN_BYTE;
    if (!bytes) return tn__collective_put_nothing(comm);
    TN_TRY(tn__collective_check_size(comm, &call));
    TN_TRY(tn__collective_check_addresses(&call));
    TN_TRY(check_overlap(comm, &call, bytes, bytes * (size_t)comm->rank_count));
    return tn__collective_put(comm, &call, NULL, 0, stream);
}

/* src has as many times the call's elements as parts. */
static tn_status reduce_parts(tn_comm *comm, tn__collective_call *call, size_t parts,
                              tn_stream stream) {
    TN_TRY(tn__collective_check_reduction(call));
    if (!call->count) return tn__collective_put_nothing(comm);
    call->element_bytes = tn_dtype_bytes(call->dtype);
    TN_TRY(tn__collective_check_size(comm, call));
    TN_TRY(tn__collective_check_addresses(call));
    const size_t bytes = call->count * call->element_bytes;
    TN_TRY(check_overlap(comm, call, bytes * parts, bytes));
    return tn__collective_put(comm, call, NULL, 0, stream);
}

tn_status tn_reduce_scatter(tn_comm *comm, const void *src, void *dst, size_t count, tn_dtype dtype,
                            tn_reduce reduce, tn_stream stream) {
    TN_REQUIRE(comm, "tn_reduce_scatter: comm is NULL");
    tn__collective_call call = {.kind = TN_REDUCE_SCATTER, .src = src, .dst = dst, .count = count};
    call.dtype = dtype, call.reduce = reduce;
    return reduce_parts(comm, &call, (size_t)comm->rank_count, stream);
}

tn_status tn_all_reduce(tn_comm *comm, const void *src, void *dst, size_t count, tn_dtype dtype,
                        tn_reduce reduce, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_reduce: comm is NULL");
    tn__collective_call call = {.kind = TN_ALL_REDUCE, .src = src, .dst = dst, .count = count};
    call.dtype = dtype, call.reduce = reduce;
    return reduce_parts(comm, &call, 1, stream);
}

tn_status tn_broadcast(tn_comm *comm, void *buffer, size_t bytes, int root, tn_stream stream) {
    TN_REQUIRE(comm, "tn_broadcast: comm is NULL");
    tn__collective_call call = {.kind = TN_BROADCAST, .src = buffer, .dst = buffer, .root = root};
    call.count = bytes, call.element_bytes = 1, call.dtype = TN_BYTE;
    TN_REQUIRE(root >= 0 && root < comm->rank_count, "tn_broadcast: root %d of %d ranks", root,
               comm->rank_count);
    if (!bytes) return tn__collective_put_nothing(comm);
    TN_TRY(tn__collective_check_size(comm, &call));
    TN_TRY(tn__collective_check_addresses(&call));
    return tn__collective_put(comm, &call, NULL, 0, stream);
}

tn_status tn_all_to_all(tn_comm *comm, const void *src, void *dst, size_t bytes, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_to_all: comm is NULL");
    tn__collective_call call = {.kind = TN_ALL_TO_ALL, .src = src, .dst = dst, .count = bytes};
    call.element_bytes = 1, call.dtype = TN_BYTE;
    if (!bytes) return tn__collective_put_nothing(comm);
    TN_TRY(tn__collective_check_size(comm, &call));
    TN_TRY(tn__collective_check_addresses(&call));
    size_t whole_bytes = bytes * (size_t)comm->rank_count;
    TN_TRY(check_overlap(comm, &call, whole_bytes, whole_bytes));
    return tn__collective_put(comm, &call, NULL, 0, stream);
}

/* Both addresses of the call are the one buffer. */
static tn_status put_message(tn_comm *comm, tn__collective_call *call, tn_stream stream) {
    call->element_bytes = 1, call->dtype = TN_BYTE;
    TN_REQUIRE(call->root >= 0 && call->root < comm->rank_count, "%s: peer %d of %d ranks",
               tn_collective_name(call->kind), call->root, comm->rank_count);
    if (!call->count) return tn__collective_put_nothing(comm);
    TN_TRY(tn__collective_check_size(comm, call));
    TN_TRY(tn__collective_check_addresses(call));
    return tn__collective_put(comm, call, NULL, 0, stream);
}

tn_status tn_send(tn_comm *comm, const void *src, size_t bytes, int peer, tn_stream stream) {
    TN_REQUIRE(comm, "tn_send: comm is NULL");
    tn__collective_call call = {.kind = TN_SEND, .src = src, .count = bytes, .root = peer};
    call.dst = (void *)(uintptr_t)src; /* never written: a message has one address */
    return put_message(comm, &call, stream);
}

tn_status tn_receive(tn_comm *comm, void *dst, size_t bytes, int peer, tn_stream stream) {
    TN_REQUIRE(comm, "tn_receive: comm is NULL");
    tn__collective_call call = {.kind = TN_RECEIVE, .dst = dst, .count = bytes, .root = peer};
    call.src = dst;
    return put_message(comm, &call, stream);
}

tn_status tn_barrier(tn_comm *comm, tn_stream stream) {
    TN_REQUIRE(comm, "tn_barrier: comm is NULL");
    tn__collective_call call = {.kind = TN_BARRIER, .element_bytes = 1, .dtype = TN_BYTE};
    return tn__collective_put(comm, &call, NULL, 0, stream);
}
