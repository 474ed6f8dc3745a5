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

static int is_message(const tn__collective_call *call) {
    return call->kind == TN_SEND || call->kind == TN_RECEIVE;
}

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
    add_piece(make, &make->plan->own_sends[0], src, bytes);
    add_piece(make, &make->plan->own_receives[0], dst, bytes);
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

/* ---- from rank to rank ---------------------------------------------------------------------- */

static void add_all_to_all(builder *make, const tn__collective_call *call) {
    for (int other = 0; other < make->plan->rank_count; other++) {
        size_t at = (size_t)other * call->count;
        char *src = writable(call->src) + at, *dst = (char *)call->dst + at;
        if (other == make->plan->rank) {
            add_own(make, src, dst, call->count);
            continue;
        }
        add_piece(make, &make->pairs->sends[other], src, call->count);
        add_piece(make, &make->pairs->receives[other], dst, call->count);
    }
}

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 32);
}

/* What goes to or comes from another rank, of which the two have to agree. */
static void add_sent(builder *make, tn_collective kind, int other, char *address, size_t bytes) {
    tn__flow_header *header = &make->plan->headers[other];
    add_piece(make, &make->pairs->sends[other], address, bytes);
    header->sent_bytes += bytes;
    header->sent_hash = mix(header->sent_hash, mix((uint64_t)kind + 1, bytes));
}

static void add_expected(builder *make, tn_collective kind, int other, char *address,
                         size_t bytes) {
    tn__flow_header *header = &make->plan->headers[other];
    add_piece(make, &make->pairs->receives[other], address, bytes);
    header->expected_bytes += bytes;
    header->expected_hash = mix(header->expected_hash, mix((uint64_t)kind + 1, bytes));
}

static void add_all_to_all_uneven(builder *make, const tn__collective_call *call) {
    const tn_segment *sends = make->batch->segments + call->first_segment;
    const tn_segment *receives = sends + make->plan->rank_count;
    for (int other = 0; other < make->plan->rank_count; other++) {
        char *src = writable(call->src) + sends[other].offset;
        char *dst = (char *)call->dst + receives[other].offset;
        if (other == make->plan->rank) {
            add_own(make, src, dst, sends[other].count);
            continue;
        }
        add_sent(make, call->kind, other, src, sends[other].count);
        add_expected(make, call->kind, other, dst, receives[other].count);
    }
}

static void add_message(builder *make, const tn__collective_call *call) {
    int is_own = call->root == make->plan->rank;
    if (call->kind == TN_SEND) {
        char *src = writable(call->src);
        if (is_own)
            add_piece(make, &make->plan->own_sends[1], src, call->count);
        else
            add_sent(make, TN_SEND, call->root, src, call->count);
        return;
    }
    if (is_own)
        add_piece(make, &make->plan->own_receives[1], call->dst, call->count);
    else
        add_expected(make, TN_SEND, call->root, call->dst, call->count);
}

/* ---- headers -------------------------------------------------------------------------------- */

/* Of what all ranks know alike; what is between two of an uneven all-to-all only they know. */
static uint64_t hash_call(const tn__batch *batch, const tn__collective_call *call, uint64_t hash) {
    hash = mix(hash, (uint64_t)call->kind);
    if (call->kind == TN_ALL_TO_ALL_UNEVEN) return hash;
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

static tn__flow_header describe_batch(const tn__batch *batch) {
    tn__flow_header header = {.kind = TN__FLOW_MESSAGES};
    uint64_t for_all = 0;
    for (size_t i = 0; i < batch->call_count; i++) {
        const tn__collective_call *call = &batch->calls[i];
        if (is_message(call)) continue;
        for_all++;
        header.hash = hash_call(batch, call, header.hash);
        header.kind = (int32_t)call->kind;
        header.dtype = (int32_t)call->dtype;
        header.reduce = (int32_t)call->reduce;
        header.root = (int32_t)call->root;
        header.count = call->kind == TN_ALL_TO_ALL_UNEVEN ? 0 : call->count;
    }
    if (for_all > 1)
        header = (tn__flow_header){.kind = TN__FLOW_GROUP, .count = for_all, .hash = header.hash};
    return header;
}

static void fill_headers(builder *make) {
    tn__flow_header header = describe_batch(make->batch);
    make->plan->is_for_all = header.kind != TN__FLOW_MESSAGES;
    for (int rank = 0; rank < make->plan->rank_count; rank++) {
        tn__flow_header *to = &make->plan->headers[rank];
        header.sent_bytes = to->sent_bytes, header.sent_hash = to->sent_hash;
        header.expected_bytes = to->expected_bytes, header.expected_hash = to->expected_hash;
        *to = header;
    }
}

int tn__flow_meets(const tn__flow_plan *plan, int other) {
    const tn__flow_header *header = &plan->headers[other];
    if (other == plan->rank) return 0;
    return plan->is_for_all || header->sent_bytes || header->expected_bytes;
}

void tn__flow_number(tn__flow_plan *plan, uint64_t *sequence) {
    *sequence += plan->is_for_all != 0;
    for (int rank = 0; rank < plan->rank_count; rank++)
        plan->headers[rank].sequence = *sequence;
}

/* ---- headers in words ----------------------------------------------------------------------- */

static const char *kind_name(int kind) {
    switch (kind) {
    case TN__FLOW_GROUP: return "group";
    case TN__FLOW_REGISTER: return "registration";
    case TN__FLOW_DEREGISTER: return "deregistration";
    case TN__FLOW_LAUNCH: return "launch";
    default: return tn_collective_name((tn_collective)kind);
    }
}

static void name_of(const tn__flow_header *header, char *text, size_t text_bytes) {
    const char *kind = kind_name(header->kind);
    if (header->kind == TN__FLOW_SPLIT)
        snprintf(text, text_bytes, "tn_comm_split");
    else if (header->kind == TN__FLOW_MESSAGES)
        snprintf(text, text_bytes, "send or receive after %llu",
                 (unsigned long long)header->sequence);
    else
        snprintf(text, text_bytes, "%s %llu", kind, (unsigned long long)header->sequence);
}

void tn__flow_name(const tn__flow_plan *plan, char *text, size_t text_bytes) {
    name_of(&plan->headers[0], text, text_bytes);
}

static const char *reduction_name(const tn__flow_header *header) {
    int kind = header->kind;
    if (kind != TN_REDUCE_SCATTER && kind != TN_REDUCE_SCATTER_UNEVEN && kind != TN_ALL_REDUCE)
        return "";
    return header->reduce == TN_REDUCE_MAX ? " max" : " sum";
}

static int is_registration(const tn__flow_header *header) {
    return header->kind == TN__FLOW_REGISTER || header->kind == TN__FLOW_DEREGISTER;
}

static void describe(const tn__flow_header *header, char *text, size_t text_bytes) {
    int is_group = header->kind == TN__FLOW_GROUP;
    char name[TEXT_BYTES / 2];
    name_of(header, name, sizeof name);
    if (is_registration(header)) {
        snprintf(text, text_bytes, "%s of memory %llu, %llu bytes as a %s", name,
                 (unsigned long long)header->hash, (unsigned long long)header->count,
                 header->root ? "window" : "buffer");
        return;
    }
    if (header->kind == TN__FLOW_SPLIT) {
        snprintf(text, text_bytes, "%s", name);
        return;
    }
    if (header->kind == TN__FLOW_LAUNCH) {
        snprintf(text, text_bytes, "%s of graph %llu with %llu calls", name,
                 (unsigned long long)header->hash, (unsigned long long)header->count);
        return;
    }
    snprintf(text, text_bytes, "%s%s of %llu %s%s, root %d, lists %08x",
             header->is_captured ? "captured " : "", name, (unsigned long long)header->count,
             is_group ? "calls" : tn_dtype_name((tn_dtype)header->dtype), reduction_name(header),
             header->root, (unsigned)header->hash);
}

/* What rank `from` says it sends rank `to`, and what that one expects. */
static tn_status check_pair(const char *comm_name, int from, const tn__flow_header *sender, int to,
                            const tn__flow_header *receiver) {
    if (sender->sent_hash == receiver->expected_hash) return TN_OK;
    return TN_FAIL(TN_COMM_ERROR,
                   "communicator %s: rank %d sends %llu bytes to rank %d, which expects %llu: two "
                   "ranks give the same sizes in the same order",
                   comm_name, from, (unsigned long long)sender->sent_bytes, to,
                   (unsigned long long)receiver->expected_bytes);
}

tn_status tn__flow_check_alike(const char *comm_name, int rank, const tn__flow_header *mine,
                               int other, const tn__flow_header *theirs) {
    char ours[TEXT_BYTES], others[TEXT_BYTES];
    if (memcmp(theirs, mine, offsetof(tn__flow_header, sent_bytes)) == 0) return TN_OK;
    describe(mine, ours, sizeof ours);
    describe(theirs, others, sizeof others);
    return TN_FAIL(TN_COMM_ERROR,
                   "communicator %s: rank %d called %s, but rank %d called %s: all ranks make the "
                   "same calls in the same order",
                   comm_name, rank, ours, other, others);
}

tn_status tn__flow_check_header(const tn__flow_plan *plan, const char *comm_name, int other,
                                const tn__flow_header *theirs) {
    const tn__flow_header *mine = &plan->headers[other];
    TN_TRY(tn__flow_check_alike(comm_name, plan->rank, mine, other, theirs));
    TN_TRY(check_pair(comm_name, plan->rank, mine, other, theirs));
    return check_pair(comm_name, other, theirs, plan->rank, mine);
}

tn_status tn__flow_fail_split(const char *comm_name, int other, const tn__flow_header *theirs) {
    char others[TEXT_BYTES];
    describe(theirs, others, sizeof others);
    return TN_FAIL(TN_COMM_ERROR,
                   "communicator %s: this rank called tn_comm_split, but rank %d called %s: all "
                   "ranks make the same calls in the same order",
                   comm_name, other, others);
}

/* ---- plans ---------------------------------------------------------------------------------- */

static void add_call(builder *make, const tn__collective_call *call) {
    switch (call->kind) {
    case TN_ALL_GATHER: add_all_gather(make, call); break;
    case TN_ALL_GATHER_UNEVEN: add_all_gather_uneven(make, call); break;
    case TN_REDUCE_SCATTER: add_reduce_scatter(make, call); break;
    case TN_REDUCE_SCATTER_UNEVEN: add_reduce_scatter_uneven(make, call); break;
    case TN_ALL_REDUCE: add_all_reduce(make, call); break;
    case TN_ALL_TO_ALL: add_all_to_all(make, call); break;
    case TN_ALL_TO_ALL_UNEVEN: add_all_to_all_uneven(make, call); break;
    case TN_SEND:
    case TN_RECEIVE: add_message(make, call); break;
    case TN_BROADCAST: spread_piece(make, call->root, call->src, call->dst, call->count); break;
    default: break;
    }
}

static int is_reduction(const tn__collective_call *call) {
    return call->kind == TN_REDUCE_SCATTER || call->kind == TN_REDUCE_SCATTER_UNEVEN ||
           call->kind == TN_ALL_REDUCE;
}

/* Reductions have their exchanges first, in the order of calls. Messages come last: between two
 * ranks their place among the calls for all ranks need not be the same. */
static void add_calls(builder *make) {
    const tn__batch *batch = make->batch;
    for (size_t i = 0; i < batch->call_count; i++)
        if (is_reduction(&batch->calls[i])) add_call(make, &batch->calls[i]);
    make->spread = add_exchange(make, TN__FLOW_SPREAD);
    make->pairs = add_exchange(make, TN__FLOW_PAIRS);
    for (size_t i = 0; i < batch->call_count; i++)
        if (!is_reduction(&batch->calls[i]) && !is_message(&batch->calls[i]))
            add_call(make, &batch->calls[i]);
    for (size_t i = 0; i < batch->call_count; i++)
        if (is_message(&batch->calls[i])) add_call(make, &batch->calls[i]);
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
    size_t header_bytes = (size_t)rank_count * sizeof(tn__flow_header);
    tn__flow_plan *plan =
        tn__host_alloc(1, sizeof *plan + exchange_bytes + flow_bytes + piece_bytes + header_bytes);
    if (!plan) return TN_OUT_OF_HOST_MEMORY;
    builder make = {.plan = plan, .batch = batch};
    char *at = (char *)(plan + 1);
    plan->rank = rank;
    plan->rank_count = rank_count;
    plan->exchanges = (void *)at;
    make.free_flows = (void *)(at + exchange_bytes);
    make.free_pieces = (void *)(at + exchange_bytes + flow_bytes);
    plan->headers = (void *)(at + exchange_bytes + flow_bytes + piece_bytes);
    add_calls(&make);
    fill_headers(&make);
    *out = plan;
    return TN_OK;
}
