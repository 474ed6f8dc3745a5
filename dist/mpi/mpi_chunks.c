/* What the chunks of each collective are: where their bytes come from, what is done with them,
 * and where they go.
 *
 *     all_gather       Iallgatherv
 *     reduce_scatter   Ialltoallv, then each rank reduces its part in the order of ranks
 *     all_reduce       both, on parts of ceil(count / rank_count) elements
 *     broadcast        Ibcast
 *
 * A chunk is the same piece [at, at + step) of every rank's part, so that the parts are those of
 * the whole call and the bytes sent do not depend on the size of the buffers. Every rank finds the
 * same chunks from the arguments alone.
 */
#include "mpi_state.h"
#include "rank_reduce.h"

/* ---- where the bytes are --------------------------------------------------------------------- */

/* The parts that a collective is made of, and one piece of each. */
typedef struct piece {
    const tn__collective_call *call;
    size_t part;  /* elements of a part; the last ones of an all_reduce may be shorter */
    size_t total; /* of all parts */
    size_t at;    /* first element within each part */
    size_t step;
} piece;

static piece piece_of(const tn__comm_state *state, const tn__collective_call *call, size_t index) {
    size_t ranks = (size_t)state->rank_count;
    piece chunk = {.call = call, .part = call->count, .total = call->count * ranks};
    chunk.step = state->row_bytes / call->element_bytes;
    if (call->kind == TN_ALL_REDUCE) {
        chunk.part = (call->count + ranks - 1) / ranks;
        chunk.total = call->count;
    } else if (call->kind == TN_BROADCAST) {
        chunk.total = call->count; /* one part */
        chunk.step = state->row_bytes * ranks;
    }
    chunk.at = index * chunk.step;
    return chunk;
}

size_t tn__mpi_chunk_count(const tn__comm_state *state, const tn__collective_call *call) {
    piece first = piece_of(state, call, 0);
    return (first.part + first.step - 1) / first.step;
}

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

/* ---- in and out ------------------------------------------------------------------------------ */

/* The chunks of all ranks' parts, each rank's in a row of its own. */
static tn_status visit_rows(const tn__comm_state *state, const piece *chunk, char *base,
                            tn__mpi_visit visit, void *context) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        size_t bytes = chunk_bytes(chunk, rank);
        if (!bytes) continue;
        TN_TRY(visit(context, base + chunk_place(chunk, rank), (size_t)rank * state->row_bytes,
                     bytes));
    }
    return TN_OK;
}

static tn_status visit_one(const piece *chunk, char *base, tn__mpi_visit visit, void *context) {
    size_t bytes = chunk_bytes(chunk, 0);
    return visit(context, base + chunk_place(chunk, 0), 0, bytes);
}

tn_status tn__mpi_chunk_in(const tn__comm_state *state, const tn__collective_call *call,
                           size_t index, tn__mpi_visit visit, void *context) {
    piece chunk = piece_of(state, call, index);
    char *src = (char *)(uintptr_t)call->src; /* read only: visit knows */
    switch (call->kind) {
    case TN_BROADCAST:
        return call->root == state->rank ? visit_one(&chunk, src, visit, context) : TN_OK;
    case TN_ALL_GATHER: return visit_one(&chunk, src, visit, context);
    default: return visit_rows(state, &chunk, src, visit, context);
    }
}

tn_status tn__mpi_chunk_out(const tn__comm_state *state, const tn__collective_call *call,
                            size_t index, tn__mpi_visit visit, void *context) {
    piece chunk = piece_of(state, call, index);
    char *dst = call->dst;
    switch (call->kind) {
    case TN_BROADCAST:
        return call->root != state->rank ? visit_one(&chunk, dst, visit, context) : TN_OK;
    case TN_REDUCE_SCATTER: return visit_one(&chunk, dst, visit, context);
    default: return visit_rows(state, &chunk, dst, visit, context);
    }
}

/* ---- between the ranks ----------------------------------------------------------------------- */

/* Waits for requests[0]. */
static tn_status finish(tn__comm_state *state, const char *what) {
    int code;
    if (tn__mpi_wait(state, state->requests, 1, &code)) return TN_OK;
    return tn__mpi_give_up(state, code, what);
}

/* Sends every rank the chunk of its part, and reduces what came for ours to the start of `sent`. */
static tn_status reduce_chunk(tn__comm_state *state, const piece *chunk) {
    int mine = (int)chunk_bytes(chunk, state->rank);
    for (int rank = 0; rank < state->rank_count; rank++) {
        state->send_bytes[rank] = (int)chunk_bytes(chunk, rank);
        state->send_at[rank] = state->receive_at[rank] = (int)((size_t)rank * state->row_bytes);
        state->receive_bytes[rank] = mine;
    }
    if (!tn__mpi_lock()) return TN_FAIL(TN_COMM_ERROR, "the process is ending");
    int code = MPI_Ialltoallv(state->sent, state->send_bytes, state->send_at, MPI_BYTE,
                              state->received, state->receive_bytes, state->receive_at, MPI_BYTE,
                              state->comm, state->requests);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Ialltoallv");
    TN_TRY(finish(state, "the other ranks' data"));
    tn__reduce_rows(chunk->call->dtype, chunk->call->reduce, state->received, state->row_bytes,
                    state->rank_count, chunk_elements(chunk, state->rank), state->sent);
    return TN_OK;
}

/* Sends the start of `sent` to every rank. */
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
    return finish(state, "the other ranks' data");
}

static tn_status broadcast_chunk(tn__comm_state *state, const piece *chunk) {
    int bytes = (int)chunk_bytes(chunk, 0), root = chunk->call->root;
    if (!tn__mpi_lock()) return TN_FAIL(TN_COMM_ERROR, "the process is ending");
    int code = MPI_Ibcast(state->sent, bytes, MPI_BYTE, root, state->comm, state->requests);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Ibcast");
    return finish(state, "the root's data");
}

tn_status tn__mpi_chunk_exchange(tn__comm_state *state, const tn__collective_call *call,
                                 size_t index, unsigned char **rows) {
    piece chunk = piece_of(state, call, index);
    *rows = state->sent;
    if (call->kind == TN_BROADCAST) return broadcast_chunk(state, &chunk);
    if (call->kind != TN_ALL_GATHER) TN_TRY(reduce_chunk(state, &chunk));
    if (call->kind == TN_REDUCE_SCATTER) return TN_OK;
    *rows = state->received;
    return gather_chunk(state, &chunk);
}
