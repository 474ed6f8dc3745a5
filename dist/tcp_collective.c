/* Batches of the TCP engine: headers, then data. See tcp_state.h and flow_plan.h.
 *
 * What reductions receive lies in rows, one for each rank, and is summed in the order of ranks as
 * everywhere (rank_reduce.h), a row's length at a time; all else goes from memory to memory.
 */
#include <stdio.h>
#include <string.h>

#include "rank_reduce.h"
#include "tcp_state.h"

/* ---- headers -------------------------------------------------------------------------------- */

static tn_status exchange_headers(tn__comm_state *state, const tn__flow_plan *plan) {
    tn__tcp_lanes_clear(state);
    for (int rank = 0; rank < state->rank_count; rank++) {
        if (!tn__flow_meets(plan, rank)) continue;
        tn__tcp_lane_block(tn__tcp_lane_to(state, rank), &plan->headers[rank],
                           sizeof *plan->headers);
        tn__tcp_lane_block(tn__tcp_lane_from(state, rank), &state->theirs[rank],
                           sizeof *state->theirs);
    }
    return tn__tcp_exchange(state);
}

static tn_status meet(tn__comm_state *state, tn__flow_plan *plan) {
    char name[sizeof state->what - 8];
    tn__flow_number(plan, &state->sequence);
    tn__flow_name(plan, name, sizeof name);
    snprintf(state->what, sizeof state->what, "call %s", name);
    TN_TRY(exchange_headers(state, plan));
    snprintf(state->what, sizeof state->what, "finish %s", name);
    for (int rank = 0; rank < state->rank_count; rank++)
        if (tn__flow_meets(plan, rank))
            TN_TRY(tn__flow_check_header(plan, state->name, rank, &state->theirs[rank]));
    return TN_OK;
}

/* ---- lanes ---------------------------------------------------------------------------------- */

static void lane_of_cursor(tn__tcp_lane *lane, const tn__flow_cursor *cursor, size_t bytes) {
    lane->flow = *cursor;
    lane->limit = bytes;
}

static void lane_of_flow(tn__tcp_lane *lane, const tn__flow *flow) {
    lane->flow = tn__flow_begin(flow);
    lane->limit = flow->bytes;
}

static size_t row_of(const tn__comm_state *state, const tn__flow_cursor *cursor) {
    return cursor->bytes < state->row_bytes ? cursor->bytes : state->row_bytes;
}

/* ---- reductions ----------------------------------------------------------------------------- */

static unsigned char *row(const tn__comm_state *state, int rank) {
    return state->rows + (size_t)rank * state->row_bytes;
}

/* Moves a row's length of every rank's part: *bytes is that of this rank's. */
static tn_status exchange_rows(tn__comm_state *state, size_t bytes) {
    tn__tcp_lanes_clear(state);
    for (int rank = 0; rank < state->rank_count; rank++) {
        const tn__flow_cursor *theirs = &state->cursors[rank];
        if (rank == state->rank) continue;
        lane_of_cursor(tn__tcp_lane_to(state, rank), theirs, row_of(state, theirs));
        tn__tcp_lane_block(tn__tcp_lane_from(state, rank), row(state, rank), bytes);
    }
    TN_TRY(tn__tcp_exchange(state));
    for (int rank = 0; rank < state->rank_count; rank++)
        if (rank != state->rank) state->cursors[rank] = tn__tcp_lane_to(state, rank)->flow;
    return TN_OK;
}

static void copy_out(tn__flow_cursor *from, unsigned char *bytes, size_t count) {
    while (count) {
        char *at;
        size_t step = tn__flow_take(from, count, &at);
        memcpy(bytes, at, step);
        bytes += step, count -= step;
    }
}

static void copy_in(tn__flow_cursor *to, const unsigned char *bytes, size_t count) {
    while (count) {
        char *at;
        size_t step = tn__flow_take(to, count, &at);
        memcpy(at, bytes, step);
        bytes += step, count -= step;
    }
}

static int is_left(const tn__comm_state *state) {
    for (int rank = 0; rank < state->rank_count; rank++)
        if (state->cursors[rank].bytes) return 1;
    return 0;
}

static tn_status reduce(tn__comm_state *state, const tn__flow_exchange *exchange) {
    tn__flow_cursor to = tn__flow_begin(&exchange->receives[state->rank]);
    unsigned char *result = row(state, state->rank_count);
    for (int rank = 0; rank < state->rank_count; rank++)
        state->cursors[rank] = tn__flow_begin(&exchange->sends[rank]);
    while (is_left(state)) {
        size_t bytes = row_of(state, &to);
        TN_TRY(exchange_rows(state, bytes));
        copy_out(&state->cursors[state->rank], row(state, state->rank), bytes);
        tn__reduce_rows(exchange->dtype, exchange->reduce, state->rows, state->row_bytes,
                        state->rank_count, bytes / exchange->element_bytes, result);
        copy_in(&to, result, bytes);
    }
    return TN_OK;
}

/* ---- moves ---------------------------------------------------------------------------------- */

/* Everybody gets `mine`. */
static tn_status spread(tn__comm_state *state, const tn__flow *mine, const tn__flow *receives) {
    tn__tcp_lanes_clear(state);
    for (int rank = 0; rank < state->rank_count; rank++) {
        if (rank == state->rank) continue;
        lane_of_flow(tn__tcp_lane_to(state, rank), mine);
        lane_of_flow(tn__tcp_lane_from(state, rank), &receives[rank]);
    }
    return tn__tcp_exchange(state);
}

static tn_status exchange_pairs(tn__comm_state *state, const tn__flow_exchange *exchange) {
    tn__tcp_lanes_clear(state);
    for (int rank = 0; rank < state->rank_count; rank++) {
        if (rank == state->rank) continue;
        lane_of_flow(tn__tcp_lane_to(state, rank), &exchange->sends[rank]);
        lane_of_flow(tn__tcp_lane_from(state, rank), &exchange->receives[rank]);
    }
    return tn__tcp_exchange(state);
}

static tn_status copy_own(void *context, char *dst, const char *src, size_t bytes) {
    (void)context;
    memmove(dst, src, bytes);
    return TN_OK;
}

/* ---- one batch ------------------------------------------------------------------------------ */

static tn_status run_exchange(tn__comm_state *state, const tn__flow_exchange *exchange) {
    switch (exchange->kind) {
    case TN__FLOW_REDUCE: return reduce(state, exchange);
    case TN__FLOW_ALL_REDUCE:
        TN_TRY(reduce(state, exchange));
        return spread(state, &exchange->receives[state->rank], exchange->receives);
    case TN__FLOW_SPREAD: return spread(state, &exchange->sends[state->rank], exchange->receives);
    default: return exchange_pairs(state, exchange);
    }
}

tn_status tn__tcp_batch_run(tn__comm_state *state, tn__flow_plan *plan) {
    state->deadline_ns = tn__tcp_deadline_ns(state->timeout_us);
    TN_TRY(meet(state, plan));
    TN_TRY(tn__flow_copy_own(plan, copy_own, NULL));
    for (size_t i = 0; i < plan->exchange_count; i++)
        TN_TRY(run_exchange(state, &plan->exchanges[i]));
    return TN_OK;
}
