/* Last words between ranks of the MPI engine.
 *
 * A rank that gives up sends every other rank of its communicator why; who waits for a message of
 * that communicator looks for such words, too, and gives up as told. MPI has no way to end a
 * message that nobody takes: so MPI's communicator under one that has given up is never freed, and
 * no later one can get its number, and with it the words.
 *
 * Words are MPI's until they have come to all ranks, which may outlast their communicator: they lie
 * in slots of the process. If none is free the others are not told, and have the deadline.
 *
 * Invariant: slots, and what a state has heard, are touched with MPI's lock held.
 */
#include <stdio.h>

#include "mpi_state.h"

enum { SLOTS = 32, WATCHED_RANKS = 64 };

typedef struct slot {
    tn__mpi_notice words;
    MPI_Request requests[WATCHED_RANKS];
    int request_count;
    int is_lost; /* more ranks than are watched: when MPI is through with it nobody knows */
} slot;

static slot slots[SLOTS];

static int is_free(slot *at) {
    int are_sent = 1;
    if (at->is_lost) return 0;
    if (at->request_count &&
        MPI_Testall(at->request_count, at->requests, &are_sent, MPI_STATUSES_IGNORE) != MPI_SUCCESS)
        return 0;
    return are_sent;
}

static slot *find_slot(void) {
    for (int i = 0; i < SLOTS; i++)
        if (is_free(&slots[i])) return &slots[i];
    return NULL;
}

static void send_words(tn__comm_state *state, int rank, slot *from) {
    const tn__mpi_message words = {.sent = &from->words, .sent_bytes = sizeof from->words};
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL}; /* none to receive */
    int code = tn__mpi_post(state, rank, TN__MPI_NOTICE_TAG, &words, requests);
    if (code != MPI_SUCCESS) return; /* there is nobody to tell */
    if (from->request_count < WATCHED_RANKS) {
        from->requests[from->request_count++] = requests[1];
        return;
    }
    from->is_lost = 1;
    MPI_Request_free(&requests[1]);
}

static void say_locked(tn__comm_state *state, tn_status status) {
    slot *from = find_slot();
    if (!from) return;
    from->request_count = 0;
    from->words.status = (int32_t)status;
    (void)snprintf(from->words.text, sizeof from->words.text, "%s", tn_error_last());
    for (int rank = 0; rank < state->rank_count; rank++)
        if (rank != state->rank) send_words(state, rank, from);
}

void tn__mpi_notice_say(tn__comm_state *state, tn_status status) {
    if (!state->base || !atomic_load(&state->base->is_joined) || !tn__mpi_lock()) return;
    say_locked(state, status);
    atomic_store(&state->base->has_pending, 1);
    tn__mpi_unlock();
}

/* The rank of a communicator that is `peer` in its base. */
static int rank_of(const tn__comm_state *state, int peer) {
    int rank = 0;
    while (rank < state->rank_count && state->peers[rank] != peer)
        rank++;
    return rank;
}

int tn__mpi_notice_look(tn__comm_state *state) {
    MPI_Status from;
    int has_come = 0, tag = state->first_tag + TN__MPI_NOTICE_TAG;
    MPI_Comm comm = state->base->comm;
    if (!atomic_load(&state->base->is_joined)) return 0;
    if (MPI_Iprobe(MPI_ANY_SOURCE, tag, comm, &has_come, &from) != MPI_SUCCESS || !has_come)
        return 0;
    int code = MPI_Recv(&state->heard, sizeof state->heard, MPI_BYTE, from.MPI_SOURCE, tag, comm,
                        MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return 0;
    state->heard.text[sizeof state->heard.text - 1] = 0;
    state->heard_from = rank_of(state, from.MPI_SOURCE);
    state->has_heard = 1;
    return 1;
}

tn_status tn__mpi_notice_told(const tn__comm_state *state, const char *what) {
    tn_status status = state->heard.status == TN_COMM_TIMEOUT ? TN_COMM_TIMEOUT : TN_COMM_ERROR;
    return TN_FAIL(status,
                   "communicator %s, rank %d of %d: while it waited for %s: rank %d has given up: "
                   "%s",
                   state->name, state->rank, state->rank_count, what, state->heard_from,
                   state->heard.text);
}
