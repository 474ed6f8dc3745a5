/* The MPI engine's table: joining, tasks on streams, failure, leaving. See mpi_state.h. */
#include <stdio.h>

#include "host_alloc.h"
#include "mpi_stage.h"
#include "mpi_staged.h"

enum { STAGING_BYTES = 1 << 20, ROW_BYTES_MIN = 64, US_PER_S = 1000000, ON_ITS_WAY_US = 200000 };

typedef struct queued_task {
    tn__comm_state *state; /* a reference of its own */
    tn__flow_plan *plan;
    tn__flow_rounds *rounds;
} queued_task;

/* ---- the state ------------------------------------------------------------------------------ */

static void free_memory(void *argument) {
    tn__comm_state *state = argument;
    pthread_mutex_destroy(&state->lock);
    tn__host_free(state->name);
    tn__host_free(state->peers);
    tn__host_free(state->mine);
    tn__host_free(state->requests);
    tn__host_free(state->sent);
    tn__host_free(state->received);
    tn__host_free(state->split_words);
    tn__host_free(state);
}

static void drop_base(tn__mpi_base *base) {
    if (!base || atomic_fetch_sub(&base->references, 1) > 1) return;
    int is_free = base->comm == MPI_COMM_NULL || atomic_load(&base->has_pending);
    if (!is_free && tn__mpi_lock()) {
        MPI_Comm_free(&base->comm);
        tn__mpi_unlock();
    }
    tn__host_free(base);
}

void tn__mpi_state_drop(tn__comm_state *state) {
    if (atomic_fetch_sub(&state->references, 1) > 1) return;
    if (state->staged) tn__mpi_staged_end(state->staged);
    int has_pending = atomic_load(&state->has_pending);
    if (has_pending && state->base) atomic_store(&state->base->has_pending, 1);
    drop_base(state->base);
    if (has_pending)
        tn__mpi_process_keep(free_memory, state);
    else
        free_memory(state);
}

tn_status tn__mpi_state_make(tn_device *device, const char *name, uint64_t timeout_us,
                             tn__comm_state **out) {
    tn__comm_state *state = tn__host_alloc(1, sizeof *state);
    if (!state) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&state->lock, NULL);
    atomic_init(&state->references, 1);
    atomic_init(&state->is_aborted, 0);
    atomic_init(&state->has_pending, 0);
    state->device = device;
    state->driver = tn__device_driver(device);
    state->on = tn__device_state(device);
    state->timeout_us = timeout_us;
    state->name = tn__host_strdup(name);
    if (!state->name) {
        tn__mpi_state_drop(state);
        return TN_OUT_OF_HOST_MEMORY;
    }
    *out = state;
    return TN_OK;
}

tn_status tn__mpi_state_make_room(tn__comm_state *state, int rank_count) {
    int is_staged = state->driver != &tn__driver_host;
    size_t ranks = (size_t)rank_count;
    size_t bytes = is_staged ? TN__STAGE_SLOT_BYTES : STAGING_BYTES;
    size_t row = bytes / ranks / ROW_BYTES_MIN * ROW_BYTES_MIN;
    state->row_bytes = row < ROW_BYTES_MIN ? ROW_BYTES_MIN : row;
    state->peers = tn__host_alloc(ranks, sizeof *state->peers);
    for (int i = 0; state->peers && i < rank_count; i++)
        state->peers[i] = i;
    state->mine = tn__host_alloc(2 * ranks, sizeof *state->mine);
    state->requests = tn__host_alloc(4 * ranks, sizeof *state->requests);
    state->sent = tn__host_alloc(ranks, state->row_bytes);
    state->received = tn__host_alloc(ranks, state->row_bytes);
    state->split_words = tn__host_alloc(ranks + 1, sizeof *state->split_words);
    if (!state->peers || !state->mine || !state->requests || !state->sent || !state->received ||
        !state->split_words)
        return TN_OUT_OF_HOST_MEMORY;
    state->theirs = state->mine + ranks;
    state->split_requests = state->requests + 2 * ranks;
    for (size_t i = 0; i < 4 * ranks; i++)
        state->requests[i] = MPI_REQUEST_NULL;
    return is_staged ? tn__mpi_staged_make(state) : TN_OK;
}

/* ---- failure -------------------------------------------------------------------------------- */

void tn__mpi_abort(tn__comm_state *state, tn_status status) {
    if (atomic_exchange(&state->is_aborted, 1) != 0) return;
    tn__mpi_notice_say(state, status);
    tn__mpi_process_note_failure(state->timeout_us);
    if (state->staged) tn__mpi_staged_wake(state->staged);
}

static void mpi_abort(tn__comm_state *state) { tn__mpi_abort(state, TN_COMM_ERROR); }

static tn_status mpi_check(tn__comm_state *state) {
    pthread_mutex_lock(&state->lock);
    tn_status status = state->failure;
    if (status != TN_OK) tn__error_restore(&state->failure_text);
    pthread_mutex_unlock(&state->lock);
    return status;
}

void tn__mpi_remember_failure(tn__comm_state *state, tn_status status) {
    pthread_mutex_lock(&state->lock);
    state->failure = status;
    tn__error_save(&state->failure_text);
    pthread_mutex_unlock(&state->lock);
    tn__mpi_abort(state, status);
}

/* ---- messages ------------------------------------------------------------------------------- */

int tn__mpi_post(tn__comm_state *state, int rank, int tag, const tn__mpi_message *message,
                 MPI_Request *requests) {
    int code = MPI_SUCCESS, peer = state->peers[rank];
    MPI_Comm comm = state->base->comm;
    tag += state->first_tag;
    if (message->received_bytes)
        code = MPI_Irecv(message->received, message->received_bytes, MPI_BYTE, peer, tag, comm,
                         &requests[0]);
    if (message->sent_bytes && code == MPI_SUCCESS)
        code =
            MPI_Isend(message->sent, message->sent_bytes, MPI_BYTE, peer, tag, comm, &requests[1]);
    return code;
}

void tn__mpi_missing_ranks(tn__comm_state *state, MPI_Request *requests, char *text,
                           size_t text_bytes) {
    size_t used = 0;
    text[0] = 0;
    if (!tn__mpi_lock()) return;
    for (int rank = 0; rank < state->rank_count && used < text_bytes; rank++) {
        int has_come = 1;
        MPI_Test(tn__mpi_requests_of(requests, rank), &has_come, MPI_STATUS_IGNORE);
        if (has_come) continue;
        int wrote = snprintf(text + used, text_bytes - used, "%srank %d", used ? ", " : "", rank);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    tn__mpi_unlock();
}

static int is_aborted(void *context) {
    tn__comm_state *state = context;
    return atomic_load(&state->is_aborted);
}

static int is_over(void *context) {
    tn__comm_state *state = context;
    return is_aborted(state) || state->has_heard || tn__mpi_notice_look(state);
}

/* What is on its way comes though another rank has given up: then nothing is left to MPI. */
static int has_come_all_the_same(tn__comm_state *state, MPI_Request *requests, int count,
                                 uint64_t deadline_ns, int *code) {
    uint64_t soon_ns = tn__mpi_deadline_ns(ON_ITS_WAY_US);
    if (!state->has_heard || *code != MPI_SUCCESS) return 0;
    return tn__mpi_poll(requests, count, soon_ns < deadline_ns ? soon_ns : deadline_ns, is_aborted,
                        state, code);
}

int tn__mpi_wait(tn__comm_state *state, MPI_Request *requests, int count, uint64_t deadline_ns,
                 int *code) {
    if (tn__mpi_poll(requests, count, deadline_ns, is_over, state, code) ||
        has_come_all_the_same(state, requests, count, deadline_ns, code))
        return 1;
    atomic_store(&state->has_pending, 1);
    return 0;
}

tn_status tn__mpi_give_up(const tn__comm_state *state, uint64_t deadline_ns, int code,
                          const char *what) {
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, what);
    if (state->has_heard) return tn__mpi_notice_told(state, what);
    if (tn__mpi_now_ns() >= deadline_ns) {
        return TN_FAIL(TN_COMM_TIMEOUT, "communicator %s, rank %d of %d: waited %g s for %s",
                       state->name, state->rank, state->rank_count,
                       (double)state->timeout_us / US_PER_S, what);
    }
    return TN_FAIL(TN_COMM_ERROR, "communicator %s, rank %d of %d: gave up waiting for %s",
                   state->name, state->rank, state->rank_count, what);
}

/* ---- joining and leaving -------------------------------------------------------------------- */

static tn_status make_base(tn__comm_state *state) {
    tn__mpi_base *base = tn__host_alloc(1, sizeof *base);
    if (!base) return TN_OUT_OF_HOST_MEMORY;
    base->comm = MPI_COMM_NULL;
    atomic_init(&base->is_joined, 0);
    atomic_init(&base->references, 1);
    atomic_init(&base->has_pending, 0);
    base->next_family = 1;
    state->base = base;
    return TN_OK;
}

/* How many communicators' tags MPI has. MPI's lock is held. */
static void count_families(tn__mpi_base *base) {
    int *tag_max = NULL, is_known = 0;
    int code = MPI_Comm_get_attr(base->comm, MPI_TAG_UB, (void *)&tag_max, &is_known);
    /* What the standard gives at least. */
    int tags = code == MPI_SUCCESS && is_known ? *tag_max : 32767;
    base->family_count = tags / TN__MPI_TAGS;
}

/* All of this rank's memory, so that a rank that has none can call again: the others wait. */
static tn_status prepare(tn__comm_state *state) {
    TN_TRY(make_base(state));
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    int code = MPI_Comm_rank(MPI_COMM_WORLD, &state->rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(MPI_COMM_WORLD, &state->rank_count);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Comm_size");
    return tn__mpi_state_make_room(state, state->rank_count);
}

/* The ranks of MPI_COMM_WORLD, in a communicator whose messages nobody else sees. */
static tn_status join_world(tn__comm_state *state) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &state->base->comm, &request);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Comm_idup");
    uint64_t deadline_ns = tn__mpi_deadline_ns(state->timeout_us);
    if (!tn__mpi_wait(state, &request, 1, deadline_ns, &code))
        return tn__mpi_give_up(state, deadline_ns, code, "all ranks to call tn_comm_create");
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    code = MPI_Comm_set_errhandler(state->base->comm, MPI_ERRORS_RETURN);
    count_families(state->base);
    tn__mpi_unlock();
    atomic_store(&state->base->is_joined, 1);
    return code == MPI_SUCCESS ? TN_OK : tn__mpi_fail(code, "MPI_Comm_set_errhandler");
}

static tn_status mpi_join(const tn_comm_config *config, int *rank, int *rank_count,
                          tn__comm_state **out) {
    tn__comm_state *state;
    TN_TRY(tn__mpi_process_start());
    TN_TRY(tn__mpi_state_make(config->device, config->name, config->timeout_us, &state));
    tn_status status = prepare(state);
    if (status == TN_OK) status = join_world(state);
    if (status != TN_OK) {
        tn__mpi_abort(state, status);
        tn__mpi_state_drop(state);
        return status;
    }
    *rank = state->rank;
    *rank_count = state->rank_count;
    *out = state;
    return TN_OK;
}

static void mpi_leave(tn__comm_state *state) { tn__mpi_state_drop(state); }

/* ---- tasks ---------------------------------------------------------------------------------- */

static void free_task(queued_task *task) {
    if (!task) return;
    tn__host_free(task->plan);
    tn__host_free(task->rounds);
    tn__host_free(task);
}

static void run_task(void *argument) {
    queued_task *task = argument;
    tn__comm_state *state = task->state;
    if (!atomic_load(&state->is_aborted)) {
        tn_status status = tn__mpi_batch_run(state, task->plan, task->rounds);
        if (status != TN_OK) tn__mpi_remember_failure(state, status);
    }
    free_task(task);
    tn__mpi_state_drop(state);
}

static tn_status make_task(tn__comm_state *state, const tn__batch *batch, queued_task **out) {
    queued_task *task = tn__host_alloc(1, sizeof *task);
    if (!task) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = tn__flow_plan_make(state->rank, state->rank_count, batch, &task->plan);
    if (status == TN_OK) status = tn__flow_rounds_make(task->plan, state->row_bytes, &task->rounds);
    if (status != TN_OK) {
        free_task(task);
        return status;
    }
    task->state = state;
    *out = task;
    return TN_OK;
}

static tn_status mpi_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    queued_task *task;
    if (state->staged) return tn__mpi_staged_start(state, batch, stream);
    TN_TRY(make_task(state, batch, &task));
    atomic_fetch_add(&state->references, 1);
    tn_status status = state->driver->host_task(state->on, run_task, task, stream);
    if (status != TN_OK) {
        atomic_fetch_sub(&state->references, 1);
        free_task(task);
    }
    return status;
}

TN_API extern const tn__comm_engine tn__mpi_engine;
const tn__comm_engine tn__mpi_engine = {
    .abi = TN__COMM_ENGINE_ABI,
    .name = "MPI",
    .has_deadlines = 1,
    .splits_when_idle = 0,
    .join = mpi_join,
    .split = tn__mpi_split,
    .start = mpi_start,
    .check = mpi_check,
    .abort = mpi_abort,
    .leave = mpi_leave,
};
