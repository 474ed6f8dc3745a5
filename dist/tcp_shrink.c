/* Shrinking a TCP communicator: see tn_comm_shrink.
 *
 * The ranks that stay know from the old mesh where each of them listens, and connect anew: nothing
 * of the old connections is needed, which ended when the communicator failed.
 */
#include "tcp_state.h"

/* The ranks that stay, in their order. */
static int find_kept(const tn__comm_state *state, const int *excluded, int excluded_count,
                     int *mine) {
    int count = 0;
    for (int rank = 0; rank < state->rank_count; rank++) {
        int is_out = 0;
        for (int i = 0; i < excluded_count; i++)
            is_out |= excluded[i] == rank;
        if (is_out) continue;
        if (rank == state->rank) *mine = count;
        state->members[count++] = rank;
    }
    return count;
}

static tn_status say_what(const tn__comm_state *state, int rank, int count, tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    return TN_FAIL_NATIVE(status, saved.native,
                          "communicator %s, rank %d of %d, was not shrunk to rank %d of %d, whose "
                          "ranks all list the same: %s",
                          state->name, state->rank, state->rank_count, rank, count, saved.text);
}

tn_status tn__tcp_shrink(tn__comm_state *state, const int *excluded, int excluded_count,
                         const char *name, int *rank, int *rank_count, tn__comm_state **out) {
    tn__tcp_state_config config = {.driver = state->driver,
                                   .on = state->on,
                                   .name = name,
                                   .timeout_us = state->timeout_us,
                                   .capacity = state->rank_count - excluded_count};
    tn__comm_state *made = NULL;
    int mine = 0, count = find_kept(state, excluded, excluded_count, &mine);
    TN_TRY(tn__tcp_state_make(&config, &made));
    made->rank = mine;
    made->rank_count = count;
    tn_status status = tn__tcp_mesh_connect_anew(made->mesh, state->mesh, state->members, mine,
                                                 count, state->timeout_us);
    if (status == TN_OK) status = tn__tcp_state_meet(made, "call tn_comm_shrink");
    if (status != TN_OK) {
        status = say_what(state, mine, count, status);
        tn__tcp_mesh_give_back(made->mesh, state->mesh); /* for the next attempt */
        tn__tcp_state_drop(made);
        return status;
    }
    *rank = mine;
    *rank_count = count;
    *out = made;
    return TN_OK;
}
