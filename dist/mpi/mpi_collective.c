/* One collective of the MPI engine: the ranks meet by their headers, then its chunks are done one
 * after the other. What a chunk is, mpi_chunks.c says. */
#include <stdio.h>
#include <string.h>

#include "mpi_state.h"

enum { HEADER_TAG = 0, NS_PER_US = 1000, TEXT_BYTES = 256 };

/* ---- headers -------------------------------------------------------------------------------- */

static int others_index(const tn__comm_state *state, int rank) {
    return rank < state->rank ? rank : rank - 1;
}

static int post_headers(tn__comm_state *state) {
    int code = MPI_SUCCESS, others = state->rank_count - 1;
    for (int rank = 0; rank < state->rank_count && code == MPI_SUCCESS; rank++) {
        if (rank == state->rank) continue;
        MPI_Request *at = state->requests + others_index(state, rank);
        code = MPI_Irecv(&state->theirs[rank], sizeof state->mine, MPI_BYTE, rank, HEADER_TAG,
                         state->comm, at);
        if (code == MPI_SUCCESS)
            code = MPI_Isend(&state->mine, sizeof state->mine, MPI_BYTE, rank, HEADER_TAG,
                             state->comm, at + others);
    }
    return code;
}

/* "rank 1, rank 3": whose headers have not come. */
static void missing_ranks(tn__comm_state *state, char *text, size_t text_bytes) {
    size_t used = 0;
    text[0] = 0;
    if (!tn__mpi_lock()) return;
    for (int rank = 0; rank < state->rank_count && used < text_bytes; rank++) {
        int has_come = 1;
        if (rank == state->rank) continue;
        MPI_Test(state->requests + others_index(state, rank), &has_come, MPI_STATUS_IGNORE);
        if (has_come) continue;
        int wrote = snprintf(text + used, text_bytes - used, "%srank %d", used ? ", " : "", rank);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    tn__mpi_unlock();
}

static void describe(const tn__mpi_header *header, char *text, size_t text_bytes) {
    tn_collective kind = (tn_collective)header->kind;
    int is_reduction = kind == TN_REDUCE_SCATTER || kind == TN_ALL_REDUCE;
    snprintf(text, text_bytes, "%s %llu of %llu %s%s, root %d", tn_collective_name(kind),
             (unsigned long long)header->sequence, (unsigned long long)header->count,
             tn_dtype_name((tn_dtype)header->dtype),
             !is_reduction                     ? ""
             : header->reduce == TN_REDUCE_MAX ? " max"
                                               : " sum",
             header->root);
}

static tn_status compare_headers(const tn__comm_state *state) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        char ours[TEXT_BYTES], other[TEXT_BYTES];
        if (rank == state->rank) continue;
        if (memcmp(&state->theirs[rank], &state->mine, sizeof state->mine) == 0) continue;
        describe(&state->mine, ours, sizeof ours);
        describe(&state->theirs[rank], other, sizeof other);
        return TN_FAIL(TN_COMM_ERROR,
                       "communicator %s: rank %d called %s, but rank %d called %s: all ranks make "
                       "the same calls in the same order",
                       state->name, state->rank, ours, rank, other);
    }
    return TN_OK;
}

tn_status tn__mpi_meet(tn__comm_state *state, const tn__collective_call *call) {
    char missing[TEXT_BYTES], what[2 * TEXT_BYTES];
    state->deadline_ns = tn__mpi_now_ns() + state->timeout_us * NS_PER_US;
    state->mine = (tn__mpi_header){.kind = (int32_t)call->kind,
                                   .dtype = (int32_t)call->dtype,
                                   .reduce = (int32_t)call->reduce,
                                   .root = (int32_t)call->root,
                                   .count = call->count,
                                   .sequence = state->mine.sequence + 1};
    if (!tn__mpi_lock()) return TN_FAIL(TN_COMM_ERROR, "the process is ending");
    int code = post_headers(state);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) {
        state->has_pending = 1;
        return tn__mpi_fail(code, "the header of a collective");
    }
    if (tn__mpi_wait(state, state->requests, 2 * (state->rank_count - 1), &code))
        return compare_headers(state);
    missing_ranks(state, missing, sizeof missing);
    snprintf(what, sizeof what, "%s to call %s %llu", *missing ? missing : "the other ranks",
             tn_collective_name(call->kind), (unsigned long long)state->mine.sequence);
    return tn__mpi_give_up(state, code, what);
}

/* ---- one collective -------------------------------------------------------------------------- */

static tn_status copy_in(void *context, char *address, size_t at, size_t bytes) {
    const tn__comm_state *state = context;
    memcpy(state->sent + at, address, bytes);
    return TN_OK;
}

static tn_status copy_out(void *context, char *address, size_t at, size_t bytes) {
    const unsigned char *rows = context;
    memcpy(address, rows + at, bytes);
    return TN_OK;
}

tn_status tn__mpi_collective_run(tn__comm_state *state, const tn__collective_call *call) {
    size_t count = tn__mpi_chunk_count(state, call);
    unsigned char *rows;
    TN_TRY(tn__mpi_meet(state, call));
    for (size_t i = 0; i < count; i++) {
        TN_TRY(tn__mpi_chunk_in(state, call, i, copy_in, state));
        TN_TRY(tn__mpi_chunk_exchange(state, call, i, &rows));
        TN_TRY(tn__mpi_chunk_out(state, call, i, copy_out, rows));
    }
    return TN_OK;
}
