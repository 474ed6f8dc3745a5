/* Splitting a TCP communicator: see tn_comm_split.
 *
 * All ranks exchange color and key over the connections that there are; each color then makes a
 * mesh of its own, whose addresses its members exchange in the same way.
 */
#include <stdio.h>
#include <string.h>

#include "tcp_state.h"

/* The ranks of one color: their ranks in the parent, in the order of the new ones. */
typedef struct members {
    tn__comm_state *parent;
    int *ranks;
    int count;
    int mine; /* the new rank of this one */
} members;

/* all = the `bytes` of `count` ranks of the parent, of which this is one. */
static tn_status gather_from(tn__comm_state *state, const int *ranks, int count, const void *mine,
                             size_t bytes, void *all) {
    tn__tcp_lanes_clear(state);
    for (int i = 0; i < count; i++) {
        int rank = ranks ? ranks[i] : i;
        char *place = (char *)all + (size_t)i * bytes;
        if (rank == state->rank) {
            memcpy(place, mine, bytes);
            continue;
        }
        tn__tcp_lane_block(tn__tcp_lane_to(state, rank), mine, bytes);
        tn__tcp_lane_block(tn__tcp_lane_from(state, rank), place, bytes);
    }
    return tn__tcp_exchange(state);
}

static tn_status gather_members(void *context, const void *mine, size_t bytes, void *all) {
    const members *of = context;
    return gather_from(of->parent, of->ranks, of->count, mine, bytes, all);
}

static tn_status look_at_members(void *context) {
    const members *of = context;
    for (int i = 0; i < of->count; i++)
        if (i != of->mine) TN_TRY(tn__tcp_look_at(of->parent, of->ranks[i]));
    return TN_OK;
}

static int is_before(const tn__tcp_split_word *words, int a, int b) {
    return words[a].key != words[b].key ? words[a].key < words[b].key : a < b;
}

static void find_members(members *of, const tn__tcp_split_word *words, int rank_count, int color) {
    for (int rank = 0; rank < rank_count; rank++) {
        int place = 0;
        if (words[rank].color != color) continue;
        for (int other = 0; other < rank_count; other++)
            place += words[other].color == color && is_before(words, other, rank);
        of->ranks[place] = rank;
        if (rank == of->parent->rank) of->mine = place;
        of->count++;
    }
}

/* A rank that is in a collective has sent its header. */
static tn_status check_kinds(const tn__comm_state *state, const tn__tcp_split_word *words) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        tn__flow_header theirs;
        if (words[rank].kind == TN__FLOW_SPLIT) continue;
        memcpy(&theirs, &words[rank], sizeof theirs);
        return tn__flow_fail_split(state->name, rank, &theirs);
    }
    return TN_OK;
}

static tn_status check_words(const tn__comm_state *state, const tn__tcp_split_word *words) {
    for (int rank = 0; rank < state->rank_count; rank++) {
        if (words[rank].status == TN_OK) continue;
        tn_status status = (tn_status)words[rank].status;
        return TN_FAIL(status, "communicator %s was not split: rank %d failed with %s", state->name,
                       rank, tn_status_text(status));
    }
    return TN_OK;
}

/* What this rank has failed with already the others are told; it gets that back. */
static tn_status agree(tn__comm_state *state, int color, int key, tn_status so_far) {
    tn__tcp_split_word mine = {
        .kind = TN__FLOW_SPLIT, .color = color, .key = key, .status = (int32_t)so_far};
    tn__saved_error saved;
    tn__error_save(&saved);
    state->deadline_ns = tn__tcp_deadline_ns(state->timeout_us);
    snprintf(state->what, sizeof state->what, "call tn_comm_split");
    TN_TRY(gather_from(state, NULL, state->rank_count, &mine, sizeof mine, state->split_words));
    TN_TRY(check_kinds(state, state->split_words));
    if (so_far == TN_OK) return check_words(state, state->split_words);
    tn__error_restore(&saved);
    return so_far;
}

static tn_status connect_members(members *of, tn__comm_state *made) {
    tn__tcp_gather by = {
        .gather = gather_members, .context = of, .connection = -1, .look = look_at_members};
    int other = of->count > 1 ? of->ranks[of->mine ? 0 : 1] : -1;
    if (other >= 0) by.connection = of->parent->mesh->peers[other].data;
    const tn_status status = tn__tcp_state_connect(made, of->mine, of->count, &by);
    if (status == TN_OK) return TN_OK;
    tn__saved_error saved;
    tn__error_save(&saved);
    TN_TRY(look_at_members(of)); /* what this rank has met may be another one's failure */
    tn__error_restore(&saved);
    return status;
}

tn_status tn__tcp_split(tn__comm_state *state, int color, int key, const char *name,
                        tn_status so_far, int *rank, int *rank_count, tn__comm_state **out) {
    members of = {.parent = state, .ranks = state->members};
    tn__tcp_state_config config = {.driver = state->driver,
                                   .on = state->on,
                                   .name = name,
                                   .timeout_us = state->timeout_us,
                                   .capacity = state->rank_count};
    tn__comm_state *made = NULL;
    if (so_far == TN_OK && color >= 0) so_far = tn__tcp_state_make(&config, &made);
    tn_status status = agree(state, color, key, so_far);
    if (status == TN_OK && made) {
        find_members(&of, state->split_words, state->rank_count, color);
        status = connect_members(&of, made);
    }
    if (status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR) tn__tcp_give_up(state, status);
    if (status != TN_OK || !made) {
        if (made) tn__tcp_state_drop(made);
        if (status == TN_OK) *out = NULL;
        return status;
    }
    *rank = of.mine;
    *rank_count = of.count;
    *out = made;
    return TN_OK;
}
