/* The TCP engine's table: joining, tasks on streams, failure, leaving. See tcp_state.h. */
#include <stdio.h>
#include <string.h>

#include "host_alloc.h"
#include "rendezvous.h"
#include "tcp_state.h"

enum { STAGING_BYTES = 1 << 20, ROW_BYTES_MIN = 64, LOOK_US = 1, KEY_BYTES = 64 };

typedef struct queued_task {
    tn__comm_state *state; /* a reference of its own */
    tn__flow_plan *plan;
} queued_task;

/* ---- the state ------------------------------------------------------------------------------ */

void tn__tcp_state_drop(tn__comm_state *state) {
    if (atomic_fetch_sub(&state->references, 1) > 1) return;
    tn__tcp_mesh_free(state->mesh);
    pthread_mutex_destroy(&state->lock);
    tn__host_free(state->cursors);
    tn__host_free(state->lanes);
    tn__host_free(state->polls);
    tn__host_free(state->words);
    tn__host_free(state->theirs);
    tn__host_free(state->rows);
    tn__host_free(state->split_words);
    tn__host_free(state->members);
    tn__host_free(state->name);
    tn__host_free(state);
}

static tn_status make_room(tn__comm_state *state, size_t ranks) {
    size_t row = STAGING_BYTES / ranks / ROW_BYTES_MIN * ROW_BYTES_MIN;
    state->row_bytes = row < ROW_BYTES_MIN ? ROW_BYTES_MIN : row;
    state->cursors = tn__host_alloc(ranks, sizeof *state->cursors);
    state->lanes = tn__host_alloc(2 * ranks, sizeof *state->lanes);
    state->polls = tn__host_alloc(2 * ranks, sizeof *state->polls);
    state->words = tn__host_alloc(ranks, sizeof *state->words);
    state->theirs = tn__host_alloc(ranks, sizeof *state->theirs);
    state->rows = tn__host_alloc(ranks + 1, state->row_bytes);
    state->split_words = tn__host_alloc(ranks, sizeof *state->split_words);
    state->members = tn__host_alloc(ranks, sizeof *state->members);
    int is_complete = state->name && state->cursors && state->lanes && state->polls &&
                      state->words && state->theirs && state->rows && state->split_words &&
                      state->members;
    return is_complete ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

tn_status tn__tcp_state_make(const tn__tcp_state_config *config, tn__comm_state **out) {
    tn__comm_state *state = tn__host_alloc(1, sizeof *state);
    if (!state) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&state->lock, NULL);
    atomic_init(&state->references, 1);
    atomic_init(&state->is_aborted, 0);
    state->driver = config->driver;
    state->on = config->on;
    state->timeout_us = config->timeout_us;
    state->name = tn__host_strdup(config->name);
    tn_status status = make_room(state, (size_t)config->capacity);
    if (status == TN_OK) status = tn__tcp_mesh_begin(config->capacity, &state->mesh);
    if (status != TN_OK) {
        tn__tcp_state_drop(state);
        return status;
    }
    *out = state;
    return TN_OK;
}

tn_status tn__tcp_state_meet(tn__comm_state *state, const char *what) {
    state->deadline_ns = tn__tcp_deadline_ns(state->timeout_us);
    snprintf(state->what, sizeof state->what, "%s", what);
    tn__tcp_lanes_clear(state);
    for (int rank = 0; rank < state->rank_count; rank++) {
        if (rank == state->rank) continue;
        tn__tcp_lane_block(tn__tcp_lane_to(state, rank), &state->split_words[state->rank],
                           sizeof *state->split_words);
        tn__tcp_lane_block(tn__tcp_lane_from(state, rank), &state->split_words[rank],
                           sizeof *state->split_words);
    }
    return tn__tcp_exchange(state);
}

tn_status tn__tcp_state_connect(tn__comm_state *state, int rank, int rank_count,
                                const tn__tcp_gather *by) {
    state->rank = rank;
    state->rank_count = rank_count;
    TN_TRY(tn__tcp_mesh_connect(state->mesh, rank, rank_count, by, state->timeout_us));
    return tn__tcp_state_meet(state, "connect");
}

/* ---- failure -------------------------------------------------------------------------------- */

void tn__tcp_give_up(tn__comm_state *state, tn_status status) {
    if (atomic_exchange(&state->is_aborted, 1) == 0)
        tn__tcp_mesh_say(state->mesh, status, tn_error_last());
}

static void tcp_abort(tn__comm_state *state) { tn__tcp_give_up(state, TN_COMM_ERROR); }

static tn_status tcp_check(tn__comm_state *state) {
    pthread_mutex_lock(&state->lock);
    tn_status status = state->failure;
    if (status != TN_OK) tn__error_restore(&state->failure_text);
    pthread_mutex_unlock(&state->lock);
    return status;
}

/* Remembers this thread's last error, for check. */
static void remember_failure(tn__comm_state *state, tn_status status) {
    pthread_mutex_lock(&state->lock);
    state->failure = status;
    tn__error_save(&state->failure_text);
    pthread_mutex_unlock(&state->lock);
    tn__tcp_give_up(state, status);
}

/* ---- joining and leaving -------------------------------------------------------------------- */

typedef struct joining {
    tn_rendezvous *ranks;
    uint64_t timeout_us;
    char key[KEY_BYTES]; /* of the words of a rank that can not connect */
} joining;

static tn_status gather_at_rendezvous(void *context, const void *mine, size_t bytes, void *all) {
    const joining *join = context;
    return tn__rendezvous_gather(join->ranks, "tn_comm_create of a TCP communicator", mine, bytes,
                                 all, join->timeout_us);
}

/* TN_OK: nobody has put words under the key. */
static tn_status ask_for(const joining *join, const char *key) {
    char text[TN__STORE_VALUE_MAX + 1];
    size_t bytes = 0;
    tn__error_scope_begin();
    const tn_status status =
        tn__store_get(join->ranks->channel, key, LOOK_US, text, sizeof text - 1, &bytes);
    const int is_there = status == TN_OK, is_none = status == TN_COMM_TIMEOUT;
    (void)tn__error_scope_end(is_there || is_none ? TN_OK : status);
    if (!is_there) return is_none ? TN_OK : status;
    return TN_FAIL(TN_COMM_ERROR, "%.*s", (int)bytes, text);
}

/* A rank that dies or leaves behind the meeting, or gives up, connects to nobody any more. */
static tn_status look_for_lost(void *context) {
    const joining *join = context;
    if (!join->ranks->channel) return TN_OK;
    TN_TRY(ask_for(join, TN__LOST_KEY));
    return ask_for(join, join->key);
}

/* It may be another rank's failure that this one has met, and then that is what it says. Else
 * whoever waits for this rank's connections learns that there will be none. */
static tn_status give_up_joining(joining *join, tn_status status) {
    char text[TN__STORE_VALUE_MAX];
    tn__saved_error saved;
    if (!join->ranks->channel) return status;
    tn__error_save(&saved);
    TN_TRY(look_for_lost(join));
    snprintf(text, sizeof text, "rank %d has given up: %s", join->ranks->place.rank, saved.text);
    (void)tn__store_set(join->ranks->channel, join->key, text, strlen(text));
    tn__error_restore(&saved);
    return status;
}

static tn_status prepare(tn_rendezvous *ranks, const tn__tcp_state_config *config,
                         tn__comm_state **out) {
    if (ranks->store) TN_TRY(tn__rendezvous_open_channel(ranks));
    return tn__tcp_state_make(config, out);
}

static tn_status tcp_join(const tn_comm_config *config, int *rank, int *rank_count,
                          tn__comm_state **out) {
    tn_rendezvous *ranks = config->rendezvous;
    joining join = {.ranks = ranks, .timeout_us = config->timeout_us};
    tn__tcp_gather by = {
        .gather = gather_at_rendezvous, .context = &join, .connection = -1, .look = look_for_lost};
    tn__tcp_state_config state_config = {.driver = tn__device_driver(config->device),
                                         .on = tn__device_state(config->device),
                                         .name = config->name,
                                         .timeout_us = config->timeout_us,
                                         .capacity = ranks->place.rank_count};
    tn__comm_state *state = NULL;
    if (ranks->store) by.connection = tn__store_file(ranks->store);
    tn_status status = prepare(ranks, &state_config, &state);
    status = tn__rendezvous_share_status(ranks, status, config->timeout_us);
    if (!state) return status; /* not TN_OK: the other ranks have been told why */
    snprintf(join.key, sizeof join.key, "no connections behind meeting %llu",
             (unsigned long long)ranks->meetings);
    if (status == TN_OK) {
        status = tn__tcp_state_connect(state, ranks->place.rank, ranks->place.rank_count, &by);
        if (status != TN_OK) status = give_up_joining(&join, status);
    }
    if (status != TN_OK) {
        tn__tcp_state_drop(state);
        return status;
    }
    *rank = state->rank;
    *rank_count = state->rank_count;
    *out = state;
    return TN_OK;
}

static void tcp_leave(tn__comm_state *state) {
    if (atomic_exchange(&state->is_aborted, 1) == 0) tn__tcp_mesh_say(state->mesh, TN_OK, "");
    tn__tcp_state_drop(state);
}

/* ---- tasks ---------------------------------------------------------------------------------- */

static void run_task(void *argument) {
    queued_task *task = argument;
    tn__comm_state *state = task->state;
    if (!atomic_load(&state->is_aborted)) {
        tn_status status = tn__tcp_batch_run(state, task->plan);
        if (status != TN_OK) remember_failure(state, status);
    }
    tn__host_free(task->plan);
    tn__host_free(task);
    tn__tcp_state_drop(state);
}

static tn_status tcp_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    queued_task *task = tn__host_alloc(1, sizeof *task);
    if (!task) return TN_OUT_OF_HOST_MEMORY;
    task->state = state;
    tn_status status = tn__flow_plan_make(state->rank, state->rank_count, batch, &task->plan);
    if (status == TN_OK) {
        atomic_fetch_add(&state->references, 1);
        status = state->driver->host_task(state->on, run_task, task, stream);
        if (status != TN_OK) atomic_fetch_sub(&state->references, 1);
    }
    if (status != TN_OK) {
        tn__host_free(task->plan);
        tn__host_free(task);
    }
    return status;
}

static const tn__comm_engine engine = {
    .abi = TN__COMM_ENGINE_ABI,
    .name = "TCP",
    .has_deadlines = 1,
    .splits_when_idle = 1,
    .join = tcp_join,
    .split = tn__tcp_split,
    .shrink = tn__tcp_shrink,
    .start = tcp_start,
    .check = tcp_check,
    .abort = tcp_abort,
    .leave = tcp_leave,
};

const tn__comm_engine *tn__tcp_engine_get(void) { return &engine; }
