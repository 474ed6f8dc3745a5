/* Bytes between the ranks of a TCP communicator, all peers at once: see tcp_state.h. */
#include <string.h>

#include "tcp_state.h"
#include "text_sink.h"

enum { US_PER_S = 1000000, TEXT_BYTES = 256 };

/* ---- lanes ---------------------------------------------------------------------------------- */

tn__tcp_lane *tn__tcp_lane_to(tn__comm_state *state, int rank) {
    return &state->lanes[2 * (size_t)rank];
}

tn__tcp_lane *tn__tcp_lane_from(tn__comm_state *state, int rank) {
    return &state->lanes[2 * (size_t)rank + 1];
}

void tn__tcp_lanes_clear(tn__comm_state *state) {
    memset(state->lanes, 0, 2 * (size_t)state->rank_count * sizeof *state->lanes);
}

void tn__tcp_lane_block(tn__tcp_lane *lane, const void *bytes, size_t count) {
    lane->at = (char *)(uintptr_t)bytes;
    lane->left = count;
}

/* 1 if there is a piece to move. */
static int has_piece(tn__tcp_lane *lane) {
    if (!lane->left && lane->limit) {
        lane->left = tn__flow_take(&lane->flow, lane->limit, &lane->at);
        lane->limit -= lane->left;
    }
    return lane->left != 0;
}

static int is_empty(const tn__tcp_lane *lane) { return !lane->left && !lane->limit; }

/* ---- failure -------------------------------------------------------------------------------- */

static tn_status given_up(const tn__comm_state *state) {
    return TN_FAIL(TN_COMM_ERROR, "communicator %s, rank %d of %d: gave up %s", state->name,
                   state->rank, state->rank_count, state->what);
}

static tn_status told(const tn__comm_state *state, int rank, const tn__tcp_notice *notice) {
    tn_status status = notice->status == TN_COMM_TIMEOUT ? TN_COMM_TIMEOUT : TN_COMM_ERROR;
    return TN_FAIL(status, "communicator %s, rank %d of %d: %s: rank %d has given up: %s",
                   state->name, state->rank, state->rank_count, state->what, rank, notice->text);
}

/* Takes the rank's last word, which may be on its way. */
static void hear(tn__comm_state *state, int rank, tn__tcp_notice *out) {
    int has_word = tn__tcp_mesh_hear(state->mesh, rank, out);
    state->words[rank] = !has_word              ? TN__TCP_DIED
                         : out->status == TN_OK ? TN__TCP_LEFT
                                                : TN__TCP_GAVE_UP;
}

/* The rank's data connection has ended, and the batch is not done with it. */
static tn_status lost(tn__comm_state *state, int rank) {
    tn__tcp_notice notice = {.status = TN_COMM_ERROR};
    if (atomic_load(&state->is_aborted)) return given_up(state);
    if (state->words[rank] == TN__TCP_NOT_HEARD) hear(state, rank, &notice);
    if (state->words[rank] == TN__TCP_GAVE_UP) return told(state, rank, &notice);
    int has_left = state->words[rank] == TN__TCP_LEFT;
    return TN_FAIL(TN_COMM_ERROR, "communicator %s, rank %d of %d: %s: rank %d %s", state->name,
                   state->rank, state->rank_count, state->what, rank,
                   has_left ? "has destroyed its communicator" : "is gone: its process has ended");
}

/* "rank 1, rank 3": with whom the exchange is not done. */
static tn_status late(tn__comm_state *state) {
    char text[TEXT_BYTES];
    tn__text out = tn__text_begin(text, sizeof text);
    for (int rank = 0; rank < state->rank_count; rank++)
        if (!is_empty(tn__tcp_lane_from(state, rank)) || !is_empty(tn__tcp_lane_to(state, rank)))
            tn__text_add(&out, "%srank %d", out.used ? ", " : "", rank);
    return TN_FAIL(TN_COMM_TIMEOUT, "communicator %s, rank %d of %d: waited %g s for %s to %s",
                   state->name, state->rank, state->rank_count,
                   (double)state->timeout_us / US_PER_S, text, state->what);
}

/* ---- moving --------------------------------------------------------------------------------- */

/* As much as goes: 0, or -1 if the connection has ended. */
static int push(tn__tcp_lane *lane, int file) {
    while (has_piece(lane)) {
        ptrdiff_t sent = tn__tcp_send_some(file, lane->at, lane->left);
        if (sent <= 0) return (int)sent;
        lane->at += (size_t)sent;
        lane->left -= (size_t)sent;
    }
    return 0;
}

static int pull(tn__tcp_lane *lane, int file) {
    while (has_piece(lane)) {
        ptrdiff_t received = tn__tcp_receive_some(file, lane->at, lane->left);
        if (received <= 0) return (int)received;
        lane->at += (size_t)received;
        lane->left -= (size_t)received;
    }
    return 0;
}

/* What the ranks have said before it was asked for is in `polls` after those of the data. */
static struct pollfd *notice_poll(tn__comm_state *state, int rank) {
    return &state->polls[state->rank_count + rank];
}

/* *is_done: nothing is left in any lane. */
static tn_status move_all(tn__comm_state *state, int *is_done) {
    *is_done = 1;
    for (int rank = 0; rank < state->rank_count; rank++) {
        tn__tcp_lane *to = tn__tcp_lane_to(state, rank), *from = tn__tcp_lane_from(state, rank);
        int file = state->mesh->peers[rank].data;
        /* What has come is taken even if the peer, done with us, hears nothing any more. */
        int sent = push(to, file), received = pull(from, file);
        if (received < 0 || (sent < 0 && !is_empty(to))) return lost(state, rank);
        short events = 0;
        if (!is_empty(to)) events |= POLLOUT;
        if (!is_empty(from)) events |= POLLIN;
        state->polls[rank] = (struct pollfd){.fd = events ? file : -1, .events = events};
        if (events) *is_done = 0;
        *notice_poll(state, rank) = (struct pollfd){
            .fd = state->words[rank] == TN__TCP_NOT_HEARD ? state->mesh->peers[rank].notice : -1,
            .events = POLLIN};
    }
    return TN_OK;
}

/* Somebody has said something, or has died: that matters here if it is bad, or if the batch is not
 * done with him. */
static tn_status listen_to(tn__comm_state *state, int rank) {
    tn__tcp_notice notice = {.status = TN_COMM_ERROR};
    hear(state, rank, &notice);
    if (state->words[rank] == TN__TCP_GAVE_UP) return told(state, rank, &notice);
    if (state->words[rank] == TN__TCP_LEFT) return TN_OK; /* his data ends when it is all here */
    int is_done =
        is_empty(tn__tcp_lane_to(state, rank)) && is_empty(tn__tcp_lane_from(state, rank));
    return is_done ? TN_OK : lost(state, rank);
}

static tn_status wait_for_some(tn__comm_state *state) {
    nfds_t count = 2 * (nfds_t)state->rank_count;
    int ready = poll(state->polls, count, tn__tcp_poll_ms(state->deadline_ns));
    if (atomic_load(&state->is_aborted)) return given_up(state);
    for (int rank = 0; ready > 0 && rank < state->rank_count; rank++)
        if (notice_poll(state, rank)->revents) TN_TRY(listen_to(state, rank));
    return tn__tcp_now_ns() < state->deadline_ns ? TN_OK : late(state);
}

tn_status tn__tcp_exchange(tn__comm_state *state) {
    for (;;) {
        int is_done;
        TN_TRY(move_all(state, &is_done));
        if (is_done) return TN_OK;
        TN_TRY(wait_for_some(state));
    }
}

tn_status tn__tcp_look_at(tn__comm_state *state, int rank) {
    tn__tcp_notice notice = {.status = TN_COMM_ERROR};
    struct pollfd one = {.fd = state->mesh->peers[rank].notice, .events = POLLIN};
    if (state->words[rank] != TN__TCP_NOT_HEARD || poll(&one, 1, 0) <= 0) return TN_OK;
    hear(state, rank, &notice);
    if (state->words[rank] == TN__TCP_LEFT) return TN_OK;
    return state->words[rank] == TN__TCP_GAVE_UP ? told(state, rank, &notice) : lost(state, rank);
}
