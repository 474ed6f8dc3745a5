/* One batch of the MPI engine: the ranks meet by their headers, then its rounds are done one after
 * the other. What a round is, flow_plan.h says.
 *
 * Invariant: MPI reads and writes the state's memory and nothing else: headers and staging.
 */
#include <stdio.h>
#include <string.h>

#include "mpi_state.h"
#include "rank_reduce.h"

enum { TEXT_BYTES = 256 };

static tn_status process_is_ending(void) { return TN_FAIL(TN_COMM_ERROR, "the process is ending"); }

/* ---- headers -------------------------------------------------------------------------------- */

static int post_headers(tn__comm_state *state, const tn__flow_plan *plan) {
    int code = MPI_SUCCESS;
    for (int rank = 0; rank < state->rank_count && code == MPI_SUCCESS; rank++) {
        if (!tn__flow_meets(plan, rank)) continue;
        state->mine[rank] = plan->headers[rank];
        tn__mpi_message message = {&state->mine[rank], sizeof *state->mine, &state->theirs[rank],
                                   sizeof *state->theirs};
        code = tn__mpi_post(state, rank, TN__MPI_HEADER_TAG, &message,
                            tn__mpi_requests_of(state->requests, rank));
    }
    return code;
}

static tn_status check_headers(const tn__comm_state *state, const tn__flow_plan *plan) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        if (!tn__flow_meets(plan, rank)) continue;
        TN_TRY(tn__flow_check_header(plan, state->name, rank, &state->theirs[rank]));
    }
    return TN_OK;
}

tn_status tn__mpi_meet(tn__comm_state *state, tn__flow_plan *plan) {
    char missing[TEXT_BYTES], name[TEXT_BYTES], what[3 * TEXT_BYTES];
    state->deadline_ns = tn__mpi_deadline_ns(state->timeout_us);
    tn__flow_number(plan, &state->sequence);
    if (!tn__mpi_lock()) return process_is_ending();
    int code = post_headers(state, plan);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) {
        atomic_store(&state->has_pending, 1);
        return tn__mpi_fail(code, "the header of a collective");
    }
    if (tn__mpi_wait(state, state->requests, 2 * state->rank_count, state->deadline_ns, &code))
        return check_headers(state, plan);
    tn__mpi_missing_ranks(state, state->requests, missing, sizeof missing);
    tn__flow_name(plan, name, sizeof name);
    snprintf(what, sizeof what, "%s to call %s", *missing ? missing : "the other ranks", name);
    return tn__mpi_give_up(state, state->deadline_ns, code, what);
}

/* ---- rounds --------------------------------------------------------------------------------- */

/* Of which bytes, by rank, the messages of a round are; NULL: the same `own` bytes for all. */
typedef struct messages {
    const unsigned char *sent;
    size_t sent_step; /* from one rank's row to the next's; 0: one row for all */
    const size_t *sent_bytes;
    const size_t *received_bytes;
    size_t own;
} messages;

static int post_messages(tn__comm_state *state, const messages *of) {
    int code = MPI_SUCCESS;
    for (int rank = 0; rank < state->rank_count && code == MPI_SUCCESS; rank++) {
        size_t at = (size_t)rank;
        if (rank == state->rank) continue;
        tn__mpi_message message = {of->sent + at * of->sent_step,
                                   (int)(of->sent_bytes ? of->sent_bytes[rank] : of->own),
                                   state->received + at * state->row_bytes,
                                   (int)(of->received_bytes ? of->received_bytes[rank] : of->own)};
        code = tn__mpi_post(state, rank, TN__MPI_DATA_TAG, &message,
                            tn__mpi_requests_of(state->requests, rank));
    }
    return code;
}

static tn_status exchange_messages(tn__comm_state *state, const messages *of) {
    if (!tn__mpi_lock()) return process_is_ending();
    int code = post_messages(state, of);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) {
        atomic_store(&state->has_pending, 1);
        return tn__mpi_fail(code, "a message of a collective");
    }
    if (tn__mpi_wait(state, state->requests, 2 * state->rank_count, state->deadline_ns, &code))
        return TN_OK;
    return tn__mpi_give_up(state, state->deadline_ns, code, "the other ranks' data");
}

/* Every rank sends what the others reduce; our result goes to our row of `received`, and stays at
 * the start of `sent`. */
static tn_status reduce_round(tn__comm_state *state, const tn__flow_rounds *rounds) {
    const tn__flow_exchange *reduction = rounds->exchange;
    size_t mine = rounds->send_bytes[state->rank];
    size_t own_row = (size_t)state->rank * state->row_bytes;
    const messages of = {.sent = state->sent,
                         .sent_step = state->row_bytes,
                         .sent_bytes = rounds->send_bytes,
                         .own = mine};
    TN_TRY(exchange_messages(state, &of));
    memcpy(state->received + own_row, state->sent + own_row, mine);
    tn__reduce_rows(reduction->dtype, reduction->reduce, state->received, state->row_bytes,
                    state->rank_count, mine / reduction->element_bytes, state->sent);
    memcpy(state->received + own_row, state->sent, mine);
    return TN_OK;
}

/* Every rank sends the start of `sent` to all others. */
static tn_status spread_round(tn__comm_state *state, const tn__flow_rounds *rounds) {
    const messages of = {.sent = state->sent,
                         .received_bytes = rounds->receive_bytes,
                         .own = rounds->send_bytes[state->rank]};
    return exchange_messages(state, &of);
}

static tn_status pairs_round(tn__comm_state *state, const tn__flow_rounds *rounds) {
    const messages of = {.sent = state->sent,
                         .sent_step = state->row_bytes,
                         .sent_bytes = rounds->send_bytes,
                         .received_bytes = rounds->receive_bytes};
    return exchange_messages(state, &of);
}

tn_status tn__mpi_round_exchange(tn__comm_state *state, const tn__flow_rounds *rounds) {
    switch (rounds->exchange->kind) {
    case TN__FLOW_REDUCE: return reduce_round(state, rounds);
    case TN__FLOW_ALL_REDUCE:
        TN_TRY(reduce_round(state, rounds));
        return spread_round(state, rounds);
    case TN__FLOW_SPREAD: return spread_round(state, rounds);
    default: return pairs_round(state, rounds);
    }
}

/* ---- one batch ------------------------------------------------------------------------------- */

static tn_status copy_in(void *context, char *address, size_t at, size_t bytes) {
    const tn__comm_state *state = context;
    memcpy(state->sent + at, address, bytes);
    return TN_OK;
}

static tn_status copy_out(void *context, char *address, size_t at, size_t bytes) {
    const tn__comm_state *state = context;
    memcpy(address, state->received + at, bytes);
    return TN_OK;
}

static tn_status copy_own(void *context, char *dst, const char *src, size_t bytes) {
    (void)context;
    memcpy(dst, src, bytes);
    return TN_OK;
}

tn_status tn__mpi_batch_run(tn__comm_state *state, tn__flow_plan *plan, tn__flow_rounds *rounds) {
    TN_TRY(tn__mpi_meet(state, plan));
    while (tn__flow_rounds_next(rounds)) {
        TN_TRY(tn__flow_round_in(rounds, copy_in, state));
        TN_TRY(tn__mpi_round_exchange(state, rounds));
        TN_TRY(tn__flow_round_out(rounds, copy_out, state));
    }
    return tn__flow_copy_own(plan, copy_own, NULL);
}
