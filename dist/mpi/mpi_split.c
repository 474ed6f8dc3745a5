/* Splitting a communicator of the MPI engine, with a deadline.
 *
 * The ranks tell each other color, key, the least family of tags that is free on each, and whether
 * they have failed. All of them then come to the same result by themselves: the new communicator
 * has the largest of those families, and its ranks count on from there.
 */
#include <stdio.h>

#include "host_alloc.h"
#include "mpi_state.h"

enum { TEXT_BYTES = 256 };

/* ---- the words of all ranks ----------------------------------------------------------------- */

static int post_words(tn__comm_state *state) {
    int code = MPI_SUCCESS;
    const tn__mpi_split_word *mine = &state->split_words[state->rank_count];
    for (int rank = 0; rank < state->rank_count && code == MPI_SUCCESS; rank++) {
        if (rank == state->rank) continue;
        tn__mpi_message message = {mine, sizeof *mine, &state->split_words[rank], sizeof *mine};
        code = tn__mpi_post(state, rank, TN__MPI_SPLIT_TAG, &message,
                            tn__mpi_requests_of(state->split_requests, rank));
    }
    return code;
}

static tn_status exchange_words(tn__comm_state *state, tn__mpi_split_word mine) {
    char missing[TEXT_BYTES], what[2 * TEXT_BYTES];
    uint64_t deadline_ns = tn__mpi_deadline_ns(state->timeout_us);
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    mine.family = state->base->next_family;
    state->split_words[state->rank] = state->split_words[state->rank_count] = mine;
    int code = post_words(state);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) {
        atomic_store(&state->has_pending, 1);
        return tn__mpi_fail(code, "a message of tn_comm_split");
    }
    if (tn__mpi_wait(state, state->split_requests, 2 * state->rank_count, deadline_ns, &code))
        return TN_OK;
    tn__mpi_missing_ranks(state, state->split_requests, missing, sizeof missing);
    snprintf(what, sizeof what, "%s to call tn_comm_split", *missing ? missing : "the other ranks");
    return tn__mpi_give_up(state, deadline_ns, code, what);
}

/* Takes the family for the new communicators: the same one on all ranks. */
static tn_status take_family(tn__comm_state *state, int *family) {
    tn__mpi_base *base = state->base;
    *family = 0;
    for (int rank = 0; rank < state->rank_count; rank++)
        if (state->split_words[rank].family > *family) *family = state->split_words[rank].family;
    if (*family >= base->family_count) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "communicator %s: MPI has tags for %d communicators that are split from "
                       "each other, and they are used up: make one with tn_comm_create",
                       state->name, base->family_count);
    }
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    base->next_family = *family + 1;
    tn__mpi_unlock();
    return TN_OK;
}

static tn_status check_words(const tn__comm_state *state) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        tn_status status = (tn_status)state->split_words[rank].status;
        if (status == TN_OK) continue;
        return TN_FAIL(status, "communicator %s was not split: rank %d failed with %s", state->name,
                       rank, tn_status_text(status));
    }
    return TN_OK;
}

/* ---- the new communicator ------------------------------------------------------------------- */

/* Whether rank a comes before rank b of the same color. */
static int is_before(const tn__mpi_split_word *words, int a, int b) {
    return words[a].key != words[b].key ? words[a].key < words[b].key : a < b;
}

/* Fills in who is in it: each rank's place is the count of those before it. */
static void take_members(const tn__comm_state *state, int color, tn__comm_state *made) {
    const tn__mpi_split_word *words = state->split_words;
    for (int rank = 0; rank < state->rank_count; rank++) {
        int place = 0;
        if (words[rank].color != color) continue;
        for (int other = 0; other < state->rank_count; other++)
            place += words[other].color == color && is_before(words, other, rank);
        made->peers[place] = state->peers[rank];
        if (rank == state->rank) made->rank = place;
        made->rank_count++;
    }
}

static tn_status make_member(const tn__comm_state *state, const char *name, tn__comm_state **out) {
    tn__comm_state *made;
    TN_TRY(tn__mpi_state_make(state->device, name, state->timeout_us, &made));
    tn_status status = tn__mpi_state_make_room(made, state->rank_count);
    if (status != TN_OK) {
        tn__mpi_state_drop(made);
        return status;
    }
    *out = made;
    return TN_OK;
}

static tn_status agree(tn__comm_state *state, int color, int key, tn_status so_far, int *family) {
    tn__mpi_split_word mine = {.color = color, .key = key, .status = (int32_t)so_far};
    tn__saved_error saved;
    tn__error_save(&saved);
    TN_TRY(exchange_words(state, mine));
    if (so_far != TN_OK) {
        tn__error_restore(&saved);
        return so_far;
    }
    TN_TRY(check_words(state));
    return take_family(state, family);
}

tn_status tn__mpi_split(tn__comm_state *state, int color, int key, const char *name,
                        tn_status so_far, int *rank, int *rank_count, tn__comm_state **out) {
    tn__comm_state *made = NULL;
    int family;
    if (so_far == TN_OK && color >= 0) so_far = make_member(state, name, &made);
    tn_status status = agree(state, color, key, so_far, &family);
    if (status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR) tn__mpi_abort(state, status);
    if (status != TN_OK || !made) {
        if (made) tn__mpi_state_drop(made);
        return status;
    }
    take_members(state, color, made);
    made->base = state->base;
    atomic_fetch_add(&made->base->references, 1);
    made->first_tag = family * TN__MPI_TAGS;
    *rank = made->rank;
    *rank_count = made->rank_count;
    *out = made;
    return TN_OK;
}
