/* Batches made into flows: see flow_plan.h. */
#include "flow_plan.h"

#include <stdio.h>
#include <string.h>

#include "host_alloc.h"

enum { TEXT_BYTES = 256 };

typedef struct builder {
    tn__flow_plan *plan;
    const tn__batch *batch;
    tn__flow_exchange *spread;
    tn__flow_exchange *pairs;
    tn__flow_piece *free_pieces;
    tn__flow *free_flows;
} builder;

static char *writable(const void *address) { return (char *)(uintptr_t)address; }

/* ---- flows ---------------------------------------------------------------------------------- */

static void add_piece(builder *make, tn__flow *flow, char *address, size_t bytes) {
    if (!bytes) return;
    tn__flow_piece *piece = make->free_pieces++;
    *piece = (tn__flow_piece){.address = address, .bytes = bytes};
    if (flow->last)
        flow->last->next = piece;
    else
        flow->first = piece;
    flow->last = piece;
    flow->bytes += bytes;
}

static tn__flow_exchange *add_exchange(builder *make, tn__flow_kind kind) {
    tn__flow_exchange *exchange = &make->plan->exchanges[make->plan->exchange_count++];
    exchange->kind = kind;
    exchange->sends = make->free_flows;
    exchange->receives = exchange->sends + make->plan->rank_count;
    make->free_flows = exchange->receives + make->plan->rank_count;
    return exchange;
}

static void add_own(builder *make, char *src, char *dst, size_t bytes) {
    if (src == dst) return;
    add_piece(make, &make->plan->own_sends, src, bytes);
    add_piece(make, &make->plan->own_receives, dst, bytes);
}

/* ---- what all ranks get --------------------------------------------------------------------- */

/* `bytes` that rank `from` has at src reach every rank at dst. */
static void spread_piece(builder *make, int from, const void *src, char *dst, size_t bytes) {
    if (from != make->plan->rank) {
        add_piece(make, &make->spread->receives[from], dst, bytes);
        return;
    }
    if (make->plan->rank_count > 1)
        add_piece(make, &make->spread->sends[from], writable(src), bytes);
    add_own(make, writable(src), dst, bytes);
}

static void add_all_gather(builder *make, const tn__collective_call *call) {
    for (int from = 0; from < make->plan->rank_count; from++) {
        char *place = (char *)call->dst + (size_t)from * call->count;
        spread_piece(make, from, call->src, place, call->count);
    }
}

static void add_all_gather_uneven(builder *make, const tn__collective_call *call) {
    const tn_segment *segments = make->batch->segments + call->first_segment;
    const char *src = call->src;
    int is_in_place = src == call->dst;
    for (size_t i = 0; i < call->segment_count; i++) {
        char *place = (char *)call->dst + segments[i].offset;
        spread_piece(make, segments[i].rank, is_in_place ? place : src, place, segments[i].count);
        if (segments[i].rank == make->plan->rank) src += segments[i].count;
    }
}

/* ---- reductions ----------------------------------------------------------------------------- */

static tn__flow_exchange *add_reduction(builder *make, tn__flow_kind kind,
                                        const tn__collective_call *call) {
    tn__flow_exchange *reduction = add_exchange(make, kind);
    reduction->dtype = call->dtype;
    reduction->reduce = call->reduce;
    reduction->element_bytes = call->element_bytes;
    return reduction;
}

static void add_reduce_scatter(builder *make, const tn__collective_call *call) {
    tn__flow_exchange *reduction = add_reduction(make, TN__FLOW_REDUCE, call);
    size_t bytes = call->count * call->element_bytes;
    for (int to = 0; to < make->plan->rank_count; to++)
        add_piece(make, &reduction->sends[to], writable(call->src) + (size_t)to * bytes, bytes);
    add_piece(make, &reduction->receives[make->plan->rank], call->dst, bytes);
}

static void add_reduce_scatter_uneven(builder *make, const tn__collective_call *call) {
    const tn_segment *segments = make->batch->segments + call->first_segment;
    tn__flow_exchange *reduction = add_reduction(make, TN__FLOW_REDUCE, call);
    char *src = writable(call->src), *dst = call->dst;
    int is_in_place = src == dst, rank = make->plan->rank;
    for (size_t i = 0; i < call->segment_count; i++) {
        size_t bytes = segments[i].count * call->element_bytes;
        char *place = src + segments[i].offset * call->element_bytes;
        add_piece(make, &reduction->sends[segments[i].rank], place, bytes);
        if (segments[i].rank != rank) continue;
        add_piece(make, &reduction->receives[rank], is_in_place ? place : dst, bytes);
        dst += bytes;
    }
}

/* Each rank reduces a part of ceil(count / rank_count) elements, the last ones fewer. */
static void add_all_reduce(builder *make, const tn__collective_call *call) {
    tn__flow_exchange *reduction = add_reduction(make, TN__FLOW_ALL_REDUCE, call);
    size_t ranks = (size_t)make->plan->rank_count, part = (call->count + ranks - 1) / ranks;
    for (size_t to = 0; to < ranks; to++) {
        size_t begin = to * part < call->count ? to * part : call->count;
        size_t count = call->count - begin < part ? call->count - begin : part;
        size_t at = begin * call->element_bytes, bytes = count * call->element_bytes;
        add_piece(make, &reduction->sends[to], writable(call->src) + at, bytes);
        add_piece(make, &reduction->receives[to], (char *)call->dst + at, bytes);
    }
}

/* ---- headers -------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 32);
}

static uint64_t hash_call(const tn__batch *batch, const tn__collective_call *call, uint64_t hash) {
    hash = mix(hash, (uint64_t)call->kind);
    hash = mix(hash, (uint64_t)call->dtype << 32 | (uint64_t)call->reduce);
    hash = mix(hash, (uint64_t)call->root);
    hash = mix(hash, call->count);
    for (size_t i = 0; i < call->segment_count; i++) {
        const tn_segment *segment = &batch->segments[call->first_segment + i];
        hash = mix(hash, (uint64_t)segment->rank);
        hash = mix(hash, segment->offset);
        hash = mix(hash, segment->count);
    }
    return hash;
}

static void fill_header(builder *make) {
    const tn__batch *batch = make->batch;
    const tn__collective_call *first = &batch->calls[0];
    tn__flow_header *header = &make->plan->header;
    if (batch->call_count == 1) {
        header->kind = (int32_t)first->kind;
        header->dtype = (int32_t)first->dtype;
        header->reduce = (int32_t)first->reduce;
        header->root = (int32_t)first->root;
        header->count = first->count;
    } else {
        header->kind = TN__FLOW_GROUP;
        header->count = batch->call_count;
    }
    for (size_t i = 0; i < batch->call_count; i++)
        header->hash = hash_call(batch, &batch->calls[i], header->hash);
}

void tn__flow_name(const tn__flow_header *header, char *text, size_t text_bytes) {
    const char *kind =
        header->kind == TN__FLOW_GROUP ? "group" : tn_collective_name((tn_collective)header->kind);
    snprintf(text, text_bytes, "%s %llu", kind, (unsigned long long)header->sequence);
}

static const char *reduction_name(const tn__flow_header *header) {
    int kind = header->kind;
    if (kind != TN_REDUCE_SCATTER && kind != TN_REDUCE_SCATTER_UNEVEN && kind != TN_ALL_REDUCE)
        return "";
    return header->reduce == TN_REDUCE_MAX ? " max" : " sum";
}

static void describe(const tn__flow_header *header, char *text, size_t text_bytes) {
    int is_group = header->kind == TN__FLOW_GROUP;
    char name[TEXT_BYTES / 2];
    tn__flow_name(header, name, sizeof name);
    snprintf(text, text_bytes, "%s of %llu %s%s, root %d, lists %08x", name,
             (unsigned long long)header->count,
             is_group ? "calls" : tn_dtype_name((tn_dtype)header->dtype), reduction_name(header),
             header->root, (unsigned)header->hash);
}

tn_status tn__flow_check_header(const tn__flow_plan *plan, const char *comm_name, int other,
                                const tn__flow_header *theirs) {
    char ours[TEXT_BYTES], others[TEXT_BYTES];
    if (memcmp(theirs, &plan->header, sizeof *theirs) == 0) return TN_OK;
    describe(&plan->header, ours, sizeof ours);
    describe(theirs, others, sizeof others);
    return TN_FAIL(TN_COMM_ERROR,
                   "communicator %s: rank %d called %s, but rank %d called %s: all ranks make the "
                   "same calls in the same order",
                   comm_name, plan->rank, ours, other, others);
}

/* ---- plans ---------------------------------------------------------------------------------- */

static void add_call(builder *make, const tn__collective_call *call) {
    switch (call->kind) {
    case TN_ALL_GATHER: add_all_gather(make, call); break;
    case TN_ALL_GATHER_UNEVEN: add_all_gather_uneven(make, call); break;
    case TN_REDUCE_SCATTER: add_reduce_scatter(make, call); break;
    case TN_REDUCE_SCATTER_UNEVEN: add_reduce_scatter_uneven(make, call); break;
    case TN_ALL_REDUCE: add_all_reduce(make, call); break;
    case TN_BROADCAST: spread_piece(make, call->root, call->src, call->dst, call->count); break;
    default: break;
    }
}

static int is_reduction(const tn__collective_call *call) {
    return call->kind == TN_REDUCE_SCATTER || call->kind == TN_REDUCE_SCATTER_UNEVEN ||
           call->kind == TN_ALL_REDUCE;
}

/* Reductions have their exchanges first, in the order of calls. */
static void add_calls(builder *make) {
    const tn__batch *batch = make->batch;
    for (size_t i = 0; i < batch->call_count; i++)
        if (is_reduction(&batch->calls[i])) add_call(make, &batch->calls[i]);
    make->spread = add_exchange(make, TN__FLOW_SPREAD);
    make->pairs = add_exchange(make, TN__FLOW_PAIRS);
    for (size_t i = 0; i < batch->call_count; i++)
        if (!is_reduction(&batch->calls[i])) add_call(make, &batch->calls[i]);
}

/* A call has at most three pieces for each rank, and so has each segment. */
static size_t most_pieces(int rank_count, const tn__batch *batch) {
    return 3 * ((size_t)rank_count * batch->call_count + batch->segment_count);
}

tn_status tn__flow_plan_make(int rank, int rank_count, const tn__batch *batch,
                             tn__flow_plan **out) {
    size_t exchanges = batch->call_count + 2, flows = 2 * (size_t)rank_count * exchanges;
    size_t exchange_bytes = exchanges * sizeof(tn__flow_exchange);
    size_t flow_bytes = flows * sizeof(tn__flow);
    size_t piece_bytes = most_pieces(rank_count, batch) * sizeof(tn__flow_piece);
    tn__flow_plan *plan =
        tn__host_alloc(1, sizeof *plan + exchange_bytes + flow_bytes + piece_bytes);
    if (!plan) return TN_OUT_OF_HOST_MEMORY;
    builder make = {.plan = plan, .batch = batch};
    char *at = (char *)(plan + 1);
    plan->rank = rank;
    plan->rank_count = rank_count;
    plan->exchanges = (void *)at;
    make.free_flows = (void *)(at + exchange_bytes);
    make.free_pieces = (void *)(at + exchange_bytes + flow_bytes);
    add_calls(&make);
    fill_header(&make);
    *out = plan;
    return TN_OK;
}
