/* The uneven collectives: their lists checked. See comm.h.
 *
 * Invariant: segments that reach an engine are of ranks that exist and apart from each other, and
 * neither their ends nor the sum of their counts overflow in bytes.
 */
#include "comm.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"

/* A call's list as it was given, and what this rank has in it. */
typedef struct uneven_list {
    const tn_segment *segments;
    size_t count;
    size_t total; /* elements of all ranks */
    size_t mine;
} uneven_list;

/* ---- the list ------------------------------------------------------------------------------- */

static tn_status check_segment(const tn_comm *comm, const tn__collective_call *call,
                               const uneven_list *list, size_t index) {
    const tn_segment *segment = &list->segments[index];
    size_t end, bytes;
    TN_REQUIRE(segment->rank >= 0 && segment->rank < comm->rank_count,
               "%s: segment %zu is of rank %d, of %d ranks", tn_collective_name(call->kind), index,
               segment->rank, comm->rank_count);
    TN_REQUIRE(!__builtin_add_overflow(segment->offset, segment->count, &end) &&
                   !__builtin_mul_overflow(end, call->element_bytes, &bytes) &&
                   bytes <= SIZE_MAX / 2,
               "%s: segment %zu of %zu elements at %zu: too large", tn_collective_name(call->kind),
               index, segment->count, segment->offset);
    return TN_OK;
}

static int compare_offsets(const void *left, const void *right) {
    const tn_segment *a = left, *b = right;
    return (a->offset > b->offset) - (a->offset < b->offset);
}

/* The first of two segments that overlap in a list in the order of offsets; else count. */
static size_t find_overlap(const tn_segment *segments, size_t count) {
    size_t last = count, end = 0;
    for (size_t i = 0; i < count; i++) {
        if (!segments[i].count) continue;
        if (last < count && segments[i].offset < end) return last;
        last = i;
        end = segments[i].offset + segments[i].count;
    }
    return count;
}

static tn_status check_apart(const tn__collective_call *call, const uneven_list *list) {
    if (find_overlap(list->segments, list->count) == list->count) return TN_OK;
    tn_segment *sorted = tn__host_alloc(list->count, sizeof *sorted);
    if (!sorted) return TN_OUT_OF_HOST_MEMORY;
    memcpy(sorted, list->segments, list->count * sizeof *sorted);
    qsort(sorted, list->count, sizeof *sorted, compare_offsets);
    size_t at = find_overlap(sorted, list->count);
    tn_segment overlaps = at < list->count ? sorted[at] : (tn_segment){0};
    tn__host_free(sorted);
    if (at == list->count) return TN_OK;
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "%s: the segment of rank %d with %zu elements at %zu overlaps another one: each "
                   "byte belongs to one rank",
                   tn_collective_name(call->kind), overlaps.rank, overlaps.count, overlaps.offset);
}

static tn_status check_list(const tn_comm *comm, const tn__collective_call *call,
                            uneven_list *list) {
    TN_REQUIRE(list->segments || !list->count, "%s: segments is NULL, and their count %zu",
               tn_collective_name(call->kind), list->count);
    for (size_t i = 0; i < list->count; i++) {
        TN_TRY(check_segment(comm, call, list, i));
        /* They are apart, as is seen below, so that no sum is beyond the largest end. */
        list->total += list->segments[i].count;
        if (list->segments[i].rank == comm->rank) list->mine += list->segments[i].count;
    }
    return check_apart(call, list);
}

/* ---- addresses ------------------------------------------------------------------------------ */

/* `packed` holds this rank's segments one after the other and `whole` all of them: apart, or in
 * place, which is the same address. */
static tn_status check_overlap(const tn__collective_call *call, const uneven_list *list,
                               const void *packed, const void *whole) {
    uintptr_t begin = (uintptr_t)packed, end = begin + list->mine * call->element_bytes;
    if (packed == whole || !list->mine) return TN_OK;
    for (size_t i = 0; i < list->count; i++) {
        uintptr_t at = (uintptr_t)whole + list->segments[i].offset * call->element_bytes;
        uintptr_t at_end = at + list->segments[i].count * call->element_bytes;
        if (at >= end || at_end <= begin || at == at_end) continue;
        return TN_FAIL(TN_INVALID_ARGUMENT,
                       "%s from %p to %p: this rank's %zu elements, one after the other, overlap "
                       "segment %zu, and are not in place (one address for both)",
                       tn_collective_name(call->kind), call->src, call->dst, list->mine, i);
    }
    return TN_OK;
}

static tn_status check_uneven(const tn_comm *comm, tn__collective_call *call, uneven_list *list) {
    TN_TRY(check_list(comm, call, list));
    if (!list->total) return TN_OK;
    call->count = list->total;
    int gathers = call->kind == TN_ALL_GATHER_UNEVEN;
    const void *packed = gathers ? call->src : call->dst, *whole = gathers ? call->dst : call->src;
    tn__collective_call needed = *call;
    /* The side of a rank without elements may be NULL, and is not looked at. */
    if (!list->mine) needed.src = needed.dst = (void *)(uintptr_t)whole;
    TN_TRY(tn__collective_check_addresses(&needed));
    return check_overlap(call, list, packed, whole);
}

/* ---- the calls ------------------------------------------------------------------------------ */

tn_status tn_all_gather_uneven(tn_comm *comm, const void *src, void *dst,
                               const tn_segment *segments, size_t segment_count, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_gather_uneven: comm is NULL");
    tn__collective_call call = {.kind = TN_ALL_GATHER_UNEVEN, .src = src, .dst = dst};
    uneven_list list = {.segments = segments, .count = segment_count};
    call.element_bytes = 1, call.dtype = TN_BYTE;
    TN_TRY(check_uneven(comm, &call, &list));
    if (!list.total) return tn__collective_put_nothing(comm);
    return tn__collective_put(comm, &call, segments, segment_count, stream);
}

tn_status tn_reduce_scatter_uneven(tn_comm *comm, const void *src, void *dst,
                                   const tn_segment *segments, size_t segment_count, tn_dtype dtype,
                                   tn_reduce reduce, tn_stream stream) {
    TN_REQUIRE(comm, "tn_reduce_scatter_uneven: comm is NULL");
    tn__collective_call call = {.kind = TN_REDUCE_SCATTER_UNEVEN, .src = src, .dst = dst};
    uneven_list list = {.segments = segments, .count = segment_count};
    call.dtype = dtype, call.reduce = reduce;
    TN_TRY(tn__collective_check_reduction(&call));
    call.element_bytes = tn_dtype_bytes(dtype);
    TN_TRY(check_uneven(comm, &call, &list));
    if (!list.total) return tn__collective_put_nothing(comm);
    return tn__collective_put(comm, &call, segments, segment_count, stream);
}

/* ---- all to all ------------------------------------------------------------------------------ */

/* One side of an all_to_all_uneven: what goes to or comes from each rank. */
typedef struct parts {
    const char *what;
    const void *base;
    const size_t *bytes;
    const size_t *offsets; /* NULL: one after the other */
} parts;

/* Where the parts are, as segments, with their end in *end. */
static tn_status list_parts(const tn_comm *comm, const parts *side, tn_segment *out, size_t *end) {
    size_t next = 0;
    *end = 0;
    for (int rank = 0; rank < comm->rank_count; rank++) {
        size_t offset = side->offsets ? side->offsets[rank] : next, bytes = side->bytes[rank];
        TN_REQUIRE(!__builtin_add_overflow(offset, bytes, &next) && next <= SIZE_MAX / 2,
                   "all_to_all_uneven: %s_bytes[%d] is %zu at %zu: too large", side->what, rank,
                   bytes, offset);
        out[rank] = (tn_segment){rank, offset, bytes};
        if (bytes && next > *end) *end = next;
    }
    TN_REQUIRE(side->base || !*end, "all_to_all_uneven: %s is NULL, and it has %zu bytes",
               side->what[0] == 's' ? "src" : "dst", *end);
    return TN_OK;
}

static int do_overlap(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    uintptr_t a_at = (uintptr_t)a, b_at = (uintptr_t)b;
    return a_bytes && b_bytes && a_at < b_at + b_bytes && b_at < a_at + a_bytes;
}

static tn_status check_sides_apart(const tn__collective_call *call, const tn_segment *sends,
                                   const tn_segment *receives, int rank_count) {
    const char *src = call->src, *dst = call->dst;
    for (int to = 0; to < rank_count; to++) {
        for (int from = 0; from < rank_count; from++) {
            if (!do_overlap(src + sends[to].offset, sends[to].count, dst + receives[from].offset,
                            receives[from].count))
                continue;
            return TN_FAIL(TN_INVALID_ARGUMENT,
                           "all_to_all_uneven: what goes to rank %d overlaps what comes from rank "
                           "%d: src and dst are apart",
                           to, from);
        }
    }
    return TN_OK;
}

static tn_status check_parts(const tn_comm *comm, tn__collective_call *call, const parts sides[2],
                             tn_segment *segments) {
    size_t ranks = (size_t)comm->rank_count, src_end, dst_end;
    tn_segment *receives = segments + ranks;
    uneven_list received = {.segments = receives, .count = ranks};
    TN_TRY(list_parts(comm, &sides[0], segments, &src_end));
    TN_TRY(list_parts(comm, &sides[1], receives, &dst_end));
    TN_TRY(check_apart(call, &received));
    TN_REQUIRE(segments[comm->rank].count == receives[comm->rank].count,
               "all_to_all_uneven: rank %d sends itself %zu bytes and receives %zu from itself",
               comm->rank, segments[comm->rank].count, receives[comm->rank].count);
    for (size_t rank = 0; rank < ranks; rank++)
        call->count += segments[rank].count;
    if (!do_overlap(call->src, src_end, call->dst, dst_end)) return TN_OK;
    return check_sides_apart(call, segments, receives, comm->rank_count);
}

tn_status tn_all_to_all_uneven(tn_comm *comm, const void *src, const size_t *send_bytes,
                               const size_t *send_offsets, void *dst, const size_t *receive_bytes,
                               const size_t *receive_offsets, tn_stream stream) {
    TN_REQUIRE(comm, "tn_all_to_all_uneven: comm is NULL");
    TN_REQUIRE(send_bytes && receive_bytes,
               "tn_all_to_all_uneven: send_bytes and receive_bytes are needed, of each rank");
    const parts sides[2] = {{"send", src, send_bytes, send_offsets},
                            {"receive", dst, receive_bytes, receive_offsets}};
    tn__collective_call call = {.kind = TN_ALL_TO_ALL_UNEVEN, .src = src, .dst = dst};
    call.element_bytes = 1, call.dtype = TN_BYTE;
    size_t count = 2 * (size_t)comm->rank_count;
    tn_segment *segments = tn__host_alloc(count, sizeof *segments);
    if (!segments) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = check_parts(comm, &call, sides, segments);
    if (status == TN_OK) status = tn__collective_put(comm, &call, segments, count, stream);
    tn__host_free(segments);
    return status;
}
