/* The MPI engine's table: joining, tasks on streams, failure, leaving. See mpi_state.h. */
#include <string.h>

#include "host_alloc.h"
#include "mpi_state.h"

enum { STAGING_BYTES = 1 << 20, ROW_BYTES_MIN = 64, NS_PER_US = 1000, US_PER_S = 1000000 };

typedef struct queued_task {
    tn__comm_state *state; /* a reference of its own */
    tn__collective_call call;
} queued_task;

/* ---- the state ------------------------------------------------------------------------------ */

static void free_memory(void *argument) {
    tn__comm_state *state = argument;
    pthread_mutex_destroy(&state->lock);
    tn__host_free(state->name);
    tn__host_free(state->theirs);
    tn__host_free(state->requests);
    tn__host_free(state->send_bytes);
    tn__host_free(state->sent);
    tn__host_free(state->received);
    tn__host_free(state);
}

static void drop(tn__comm_state *state) {
    if (atomic_fetch_sub(&state->references, 1) > 1) return;
    if (state->has_pending) {
        tn__mpi_process_keep(free_memory, state);
        return;
    }
    if (state->comm != MPI_COMM_NULL && tn__mpi_lock()) {
        MPI_Comm_free(&state->comm);
        tn__mpi_unlock();
    }
    free_memory(state);
}

static tn_status make_state(const tn_comm_config *config, tn__comm_state **out) {
    tn__comm_state *state = tn__host_alloc(1, sizeof *state);
    if (!state) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&state->lock, NULL);
    atomic_init(&state->references, 1);
    atomic_init(&state->is_aborted, 0);
    state->driver = tn__device_driver(config->device);
    state->on = tn__device_state(config->device);
    state->timeout_us = config->timeout_us;
    state->comm = MPI_COMM_NULL;
    state->name = tn__host_strdup(config->name);
    if (!state->name) {
        drop(state);
        return TN_OUT_OF_HOST_MEMORY;
    }
    *out = state;
    return TN_OK;
}

static tn_status make_buffers(tn__comm_state *state) {
    size_t ranks = (size_t)state->rank_count;
    size_t row = STAGING_BYTES / ranks / ROW_BYTES_MIN * ROW_BYTES_MIN;
    state->row_bytes = row < ROW_BYTES_MIN ? ROW_BYTES_MIN : row;
    state->theirs = tn__host_alloc(ranks, sizeof *state->theirs);
    state->requests = tn__host_alloc(2 * ranks, sizeof *state->requests);
    state->send_bytes = tn__host_alloc(4 * ranks, sizeof *state->send_bytes);
    state->sent = tn__host_alloc(ranks, state->row_bytes);
    state->received = tn__host_alloc(ranks, state->row_bytes);
    if (!state->theirs || !state->requests || !state->send_bytes || !state->sent ||
        !state->received)
        return TN_OUT_OF_HOST_MEMORY;
    state->send_at = state->send_bytes + ranks;
    state->receive_bytes = state->send_at + ranks;
    state->receive_at = state->receive_bytes + ranks;
    for (size_t i = 0; i < 2 * ranks; i++)
        state->requests[i] = MPI_REQUEST_NULL;
    return TN_OK;
}

/* ---- failure -------------------------------------------------------------------------------- */

static void mpi_abort(tn__comm_state *state) {
    if (atomic_exchange(&state->is_aborted, 1) == 0)
        tn__mpi_process_note_failure(state->timeout_us);
}

static tn_status mpi_check(tn__comm_state *state) {
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
    mpi_abort(state);
}

int tn__mpi_wait(tn__comm_state *state, MPI_Request *requests, int count, int *code) {
    if (tn__mpi_poll(requests, count, state->deadline_ns, &state->is_aborted, code)) return 1;
    state->has_pending = 1;
    return 0;
}

tn_status tn__mpi_give_up(const tn__comm_state *state, int code, const char *what) {
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, what);
    if (tn__mpi_now_ns() >= state->deadline_ns) {
        return TN_FAIL(TN_COMM_TIMEOUT, "communicator %s, rank %d of %d: waited %g s for %s",
                       state->name, state->rank, state->rank_count,
                       (double)state->timeout_us / US_PER_S, what);
    }
    return TN_FAIL(TN_COMM_ERROR, "communicator %s, rank %d of %d: gave up waiting for %s",
                   state->name, state->rank, state->rank_count, what);
}

/* ---- joining and leaving -------------------------------------------------------------------- */

/* The ranks of MPI_COMM_WORLD, in a communicator whose messages nobody else sees. */
static tn_status join_world(tn__comm_state *state) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    int code = MPI_Comm_rank(MPI_COMM_WORLD, &state->rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(MPI_COMM_WORLD, &state->rank_count);
    if (code == MPI_SUCCESS) code = MPI_Comm_idup(MPI_COMM_WORLD, &state->comm, &request);
    tn__mpi_unlock();
    if (code != MPI_SUCCESS) return tn__mpi_fail(code, "MPI_Comm_idup");
    state->deadline_ns = tn__mpi_now_ns() + state->timeout_us * NS_PER_US;
    if (!tn__mpi_wait(state, &request, 1, &code))
        return tn__mpi_give_up(state, code, "all ranks to call tn_comm_create");
    if (!tn__mpi_lock()) return TN_FAIL(TN_INVALID_STATE, "MPI has been finalized");
    code = MPI_Comm_set_errhandler(state->comm, MPI_ERRORS_RETURN);
    tn__mpi_unlock();
    return code == MPI_SUCCESS ? TN_OK : tn__mpi_fail(code, "MPI_Comm_set_errhandler");
}

static tn_status mpi_join(const tn_comm_config *config, int *rank, int *rank_count,
                          tn__comm_state **out) {
    tn__comm_state *state;
    TN_TRY(tn__mpi_process_start());
    TN_TRY(make_state(config, &state));
    tn_status status = join_world(state);
    if (status == TN_OK) status = make_buffers(state);
    if (status != TN_OK) {
        mpi_abort(state);
        drop(state);
        return status;
    }
    *rank = state->rank;
    *rank_count = state->rank_count;
    *out = state;
    return TN_OK;
}

static void mpi_leave(tn__comm_state *state) { drop(state); }

/* ---- tasks ---------------------------------------------------------------------------------- */

static void run_task(void *argument) {
    queued_task *task = argument;
    tn__comm_state *state = task->state;
    if (!atomic_load(&state->is_aborted)) {
        tn_status status = tn__mpi_collective_run(state, &task->call);
        if (status != TN_OK) remember_failure(state, status);
    }
    tn__host_free(task);
    drop(state);
}

static tn_status mpi_start(tn__comm_state *state, const tn__collective_call *call,
                           tn_stream stream) {
    queued_task *task = tn__host_alloc(1, sizeof *task);
    if (!task) return TN_OUT_OF_HOST_MEMORY;
    task->state = state;
    task->call = *call;
    atomic_fetch_add(&state->references, 1);
    tn_status status = state->driver->host_task(state->on, run_task, task, stream);
    if (status != TN_OK) {
        atomic_fetch_sub(&state->references, 1);
        tn__host_free(task);
    }
    return status;
}

TN_API extern const tn__comm_engine tn__mpi_engine;
const tn__comm_engine tn__mpi_engine = {
    .abi = TN__COMM_ENGINE_ABI,
    .name = "MPI",
    .has_deadlines = 1,
    .join = mpi_join,
    .start = mpi_start,
    .check = mpi_check,
    .abort = mpi_abort,
    .leave = mpi_leave,
};
