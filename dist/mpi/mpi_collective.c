/* Collectives of the MPI engine, chunk by chunk through the staging buffers.
 *
 *     all_gather       Iallgatherv
 *     reduce_scatter   Ialltoallv, then each rank reduces its part in the order of ranks
 *     all_reduce       both, on parts of ceil(count / rank_count) elements
 *     broadcast        Ibcast
 *
 * A chunk is the same piece [at, at + step) of every rank's part, so that the parts are those of
 * the whole call and the bytes sent do not depend on the size of the buffers.
 */
#include <stdio.h>
#include <string.h>

#include "rank_reduce.h"
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

static tn_status meet(tn__comm_state *state, const tn__collective_call *call) {
    char missing[TEXT_BYTES], what[2 * TEXT_BYTES];
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

/* Waits for requests[0]. */
static tn_status finish(tn__comm_state *state, const char *what) {
    int code;
    if (tn__mpi_wait(state, state->requests, 1, &code)) return TN_OK;
    return tn__mpi_give_up(state, code, what);
}

/* ---- chunks --------------------------------------------------------------------------------- */

/* The parts that a collective is made of, and one piece of each. */
typedef struct piece {
    const tn__collective_call *call;
    size_t part;  /* elements of a part; the last ones of an all_reduce may be shorter */
    size_t total; /* of all parts */
    size_t at;    /* first element within each part */
    size_t step;
} piece;

static size_t chunk_elements(const piece *chunk, int rank) {
    size_t begin = (size_t)rank * chunk->part + chunk->at;
    size_t end = ((size_t)rank + 1) * chunk->part;
    if (end > chunk->total) end = chunk->total;
    if (begin >= end) return 0;
    return end - begin < chunk->step ? end - begin : chunk->step;
}

static size_t chunk_bytes(const piece *chunk, int rank) {
    return chunk_elements(chunk, rank) * chunk->call->element_bytes;
}

/* Where the chunk of a rank's part is in a buffer of all parts. */
static size_t chunk_place(const piece *chunk, int rank) {
    return ((size_t)rank * chunk->part + chunk->at) * chunk->call->element_bytes;
}

/* Sends every rank the chunk of its part, and reduces what came for ours to the start of `sent`. */
static tn_status reduce_chunk(tn__comm_state *state, const piece *chunk) {
    const tn__collective_call *call = chunk->call;
    int mine = (int)chunk_bytes(chunk, state->rank);
    for (int rank = 0; rank < state->rank_count; rank++) {
        size_t row = (size_t)rank * state->row_bytes;
        state->send_bytes[rank] = (int)chunk_bytes(chunk, rank);
        state->send_at[rank] = state->receive_at[rank] = (int)row;
        state->receive_bytes[rank] = mine;
        memcpy(state->sent + row, (const char *)call->src + chunk_place(chunk, rank),
               chunk_bytes(chunk, rank));
    }
    if (!tn__mpi_lock()) return TN_FAIL(TN_COMM_ERROR, "the process is ending");
    int code = MPI_Ialltoallv(state->sent, state->send_bytes, state->send_at, MPI_BYTE,
                              state->received, state->receive_bytes, state->receive_at, MPI_BYTE,
                              state->comm, state->requests);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Ialltoallv");
    TN_TRY(finish(state, "the other ranks' data"));
    tn__reduce_rows(call->dtype, call->reduce, state->received, state->row_bytes, state->rank_count,
                    chunk_elements(chunk, state->rank), state->sent);
    return TN_OK;
}

/* Sends the start of `sent` to every rank, and puts what came where it belongs in dst. */
static tn_status gather_chunk(tn__comm_state *state, const piece *chunk) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        state->receive_bytes[rank] = (int)chunk_bytes(chunk, rank);
        state->receive_at[rank] = (int)((size_t)rank * state->row_bytes);
    }
    if (!tn__mpi_lock()) return TN_FAIL(TN_COMM_ERROR, "the process is ending");
    int code = MPI_Iallgatherv(state->sent, state->receive_bytes[state->rank], MPI_BYTE,
                               state->received, state->receive_bytes, state->receive_at, MPI_BYTE,
                               state->comm, state->requests);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Iallgatherv");
    TN_TRY(finish(state, "the other ranks' data"));
    for (int rank = 0; rank < state->rank_count; rank++) {
        memcpy((char *)chunk->call->dst + chunk_place(chunk, rank),
               state->received + state->receive_at[rank], chunk_bytes(chunk, rank));
    }
    return TN_OK;
}

static tn_status run_chunk(tn__comm_state *state, const piece *chunk) {
    const tn__collective_call *call = chunk->call;
    size_t at = chunk->at * call->element_bytes, mine = chunk_bytes(chunk, state->rank);
    if (call->kind == TN_ALL_GATHER) {
        memcpy(state->sent, (const char *)call->src + at, mine);
        return gather_chunk(state, chunk);
    }
    TN_TRY(reduce_chunk(state, chunk));
    if (call->kind == TN_ALL_REDUCE) return gather_chunk(state, chunk);
    memcpy((char *)call->dst + at, state->sent, mine);
    return TN_OK;
}

static tn_status run_parts(tn__comm_state *state, const tn__collective_call *call) {
    size_t ranks = (size_t)state->rank_count;
    piece chunk = {.call = call, .part = call->count, .total = call->count * ranks};
    if (call->kind == TN_ALL_REDUCE) {
        chunk.part = (call->count + ranks - 1) / ranks;
        chunk.total = call->count;
    }
    chunk.step = state->row_bytes / call->element_bytes;
    for (; chunk.at < chunk.part; chunk.at += chunk.step)
        TN_TRY(run_chunk(state, &chunk));
    return TN_OK;
}

static tn_status run_broadcast(tn__comm_state *state, const tn__collective_call *call) {
    size_t step = state->row_bytes * (size_t)state->rank_count;
    int is_root = call->root == state->rank;
    for (size_t at = 0; at < call->count; at += step) {
        size_t bytes = call->count - at < step ? call->count - at : step;
        if (is_root) memcpy(state->sent, (const char *)call->src + at, bytes);
        if (!tn__mpi_lock()) return TN_FAIL(TN_COMM_ERROR, "the process is ending");
        int code =
            MPI_Ibcast(state->sent, (int)bytes, MPI_BYTE, call->root, state->comm, state->requests);
        tn__mpi_unlock();
        if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Ibcast");
        TN_TRY(finish(state, "the root's data"));
        if (!is_root) memcpy((char *)call->dst + at, state->sent, bytes);
    }
    return TN_OK;
}

/* ---- one collective -------------------------------------------------------------------------- */

tn_status tn__mpi_collective_run(tn__comm_state *state, const tn__collective_call *call) {
    state->deadline_ns = tn__mpi_now_ns() + state->timeout_us * NS_PER_US;
    TN_TRY(meet(state, call));
    switch (call->kind) {
    case TN_BARRIER: return TN_OK;
    case TN_BROADCAST: return run_broadcast(state, call);
    default: return run_parts(state, call);
    }
}
