/* Walks over the rounds of a plan: see flow_plan.h. */
#include <string.h>

#include "flow_plan.h"
#include "host_alloc.h"

/* ---- cursors -------------------------------------------------------------------------------- */

tn__flow_cursor tn__flow_begin(const tn__flow *flow) {
    return (tn__flow_cursor){.piece = flow->first, .bytes = flow->bytes};
}

size_t tn__flow_take(tn__flow_cursor *cursor, size_t bytes, char **address) {
    TN_ASSERT(cursor->bytes >= bytes);
    size_t left = cursor->piece->bytes - cursor->begun;
    size_t step = left < bytes ? left : bytes;
    *address = cursor->piece->address + cursor->begun;
    cursor->begun += step;
    cursor->bytes -= step;
    if (cursor->begun == cursor->piece->bytes) {
        cursor->piece = cursor->piece->next;
        cursor->begun = 0;
    }
    return step;
}

static void pass(tn__flow_cursor *cursor, size_t bytes) {
    char *address;
    while (bytes)
        bytes -= tn__flow_take(cursor, bytes, &address);
}

static tn_status visit_stretch(tn__flow_cursor cursor, size_t bytes, size_t at,
                               tn__flow_visit visit, void *context) {
    char *address;
    while (bytes) {
        size_t step = tn__flow_take(&cursor, bytes, &address);
        TN_TRY(visit(context, address, at, step));
        at += step;
        bytes -= step;
    }
    return TN_OK;
}

/* ---- rounds --------------------------------------------------------------------------------- */

tn_status tn__flow_rounds_make(const tn__flow_plan *plan, size_t row_bytes, tn__flow_rounds **out) {
    size_t ranks = (size_t)plan->rank_count;
    size_t rank_bytes = 2 * (sizeof(tn__flow_cursor) + sizeof(size_t));
    tn__flow_rounds *rounds = tn__host_alloc(1, sizeof *rounds + ranks * rank_bytes);
    if (!rounds) return TN_OUT_OF_HOST_MEMORY;
    rounds->plan = plan;
    rounds->row_bytes = row_bytes;
    rounds->sends = (void *)(rounds + 1);
    rounds->receives = rounds->sends + ranks;
    rounds->send_bytes = (void *)(rounds->receives + ranks);
    rounds->receive_bytes = rounds->send_bytes + ranks;
    *out = rounds;
    return TN_OK;
}

static size_t round_bytes(const tn__flow_rounds *rounds, const tn__flow_cursor *cursor) {
    return cursor->bytes < rounds->row_bytes ? cursor->bytes : rounds->row_bytes;
}

static void open_exchange(tn__flow_rounds *rounds, const tn__flow_exchange *exchange) {
    rounds->exchange = exchange;
    for (int rank = 0; rank < rounds->plan->rank_count; rank++) {
        rounds->sends[rank] = tn__flow_begin(&exchange->sends[rank]);
        rounds->receives[rank] = tn__flow_begin(&exchange->receives[rank]);
    }
}

static void pass_round(tn__flow_rounds *rounds) {
    for (int rank = 0; rank < rounds->plan->rank_count; rank++) {
        pass(&rounds->sends[rank], rounds->send_bytes[rank]);
        pass(&rounds->receives[rank], rounds->receive_bytes[rank]);
    }
}

/* Whether anything is left of the exchange for a round. */
static int plan_round(tn__flow_rounds *rounds) {
    int any = 0;
    for (int rank = 0; rank < rounds->plan->rank_count; rank++) {
        rounds->send_bytes[rank] = round_bytes(rounds, &rounds->sends[rank]);
        rounds->receive_bytes[rank] = round_bytes(rounds, &rounds->receives[rank]);
        any |= rounds->send_bytes[rank] || rounds->receive_bytes[rank];
    }
    return any;
}

int tn__flow_rounds_next(tn__flow_rounds *rounds) {
    const tn__flow_exchange *end = rounds->plan->exchanges + rounds->plan->exchange_count;
    if (!rounds->exchange)
        open_exchange(rounds, rounds->plan->exchanges);
    else
        pass_round(rounds);
    while (!plan_round(rounds)) {
        if (rounds->exchange + 1 == end) return 0;
        open_exchange(rounds, rounds->exchange + 1);
    }
    return 1;
}

/* ---- visits --------------------------------------------------------------------------------- */

tn_status tn__flow_round_in(const tn__flow_rounds *rounds, tn__flow_visit visit, void *context) {
    int is_one_row = rounds->exchange->kind == TN__FLOW_SPREAD;
    for (int rank = 0; rank < rounds->plan->rank_count; rank++) {
        size_t at = is_one_row ? 0 : (size_t)rank * rounds->row_bytes;
        TN_TRY(visit_stretch(rounds->sends[rank], rounds->send_bytes[rank], at, visit, context));
    }
    return TN_OK;
}

tn_status tn__flow_round_out(const tn__flow_rounds *rounds, tn__flow_visit visit, void *context) {
    for (int rank = 0; rank < rounds->plan->rank_count; rank++)
        TN_TRY(visit_stretch(rounds->receives[rank], rounds->receive_bytes[rank],
                             (size_t)rank * rounds->row_bytes, visit, context));
    return TN_OK;
}

static tn_status copy_flow(const tn__flow *sends, const tn__flow *receives, tn__flow_copy copy,
                           void *context) {
    tn__flow_cursor from = tn__flow_begin(sends), to = tn__flow_begin(receives);
    char *src, *dst;
    TN_ASSERT(from.bytes == to.bytes);
    while (from.bytes) {
        size_t step = from.piece->bytes - from.begun, room = to.piece->bytes - to.begun;
        step = tn__flow_take(&from, step < room ? step : room, &src);
        (void)tn__flow_take(&to, step, &dst);
        TN_TRY(copy(context, dst, src, step));
    }
    return TN_OK;
}

tn_status tn__flow_copy_own(const tn__flow_plan *plan, tn__flow_copy copy, void *context) {
    TN_TRY(copy_flow(&plan->own_sends[0], &plan->own_receives[0], copy, context));
    return copy_flow(&plan->own_sends[1], &plan->own_receives[1], copy, context);
}
