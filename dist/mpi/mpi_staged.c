/* Batches that go through a stage: see mpi_staged.h. */
#include "mpi_staged.h"

#include <signal.h>
#include <string.h>

#include "host_alloc.h"
#include "mpi_stage.h"

/* A batch that is put on a stream. */
typedef struct staged_batch {
    struct staged_batch *next;
    atomic_int references; /* the calling thread's and the worker's */
    tn__flow_plan *plan;
    tn__flow_rounds *rounds; /* the worker's */
    uint64_t first_round;    /* of the stage */
} staged_batch;

struct tn__mpi_staged {
    tn__comm_state *state;
    tn__mpi_stage *stage;
    pthread_t worker;
    staged_batch *first; /* under the stage's lock, as what follows */
    staged_batch *last;
    int is_ending;
};

/* ---- batches -------------------------------------------------------------------------------- */

static void drop_batch(staged_batch *batch) {
    if (atomic_fetch_sub(&batch->references, 1) > 1) return;
    tn__host_free(batch->plan);
    tn__host_free(batch->rounds);
    tn__host_free(batch);
}

static tn_status make_batch(const tn__comm_state *state, const tn__batch *calls,
                            staged_batch **out) {
    staged_batch *batch = tn__host_alloc(1, sizeof *batch);
    if (!batch) return TN_OUT_OF_HOST_MEMORY;
    atomic_init(&batch->references, 1);
    tn_status status = tn__flow_plan_make(state->rank, state->rank_count, calls, &batch->plan);
    if (status == TN_OK)
        status = tn__flow_rounds_make(batch->plan, state->row_bytes, &batch->rounds);
    if (status != TN_OK) {
        drop_batch(batch);
        return status;
    }
    *out = batch;
    return TN_OK;
}

/* ---- the worker ------------------------------------------------------------------------------ */

/* A round's way between its slot and the buffers of MPI. */
typedef struct transfer {
    unsigned char *slot;
    unsigned char *rows;
} transfer;

static tn_status slot_to_rows(void *context, char *address, size_t at, size_t bytes) {
    const transfer *way = context;
    (void)address;
    memcpy(way->rows + at, way->slot + at, bytes);
    return TN_OK;
}

static tn_status rows_to_slot(void *context, char *address, size_t at, size_t bytes) {
    const transfer *way = context;
    (void)address;
    memcpy(way->slot + at, way->rows + at, bytes);
    return TN_OK;
}

static tn_status do_round(tn__comm_state *state, staged_batch *batch, unsigned char *slot) {
    transfer in = {slot, state->sent}, out = {slot, state->received};
    TN_TRY(tn__flow_round_in(batch->rounds, slot_to_rows, &in));
    TN_TRY(tn__mpi_round_exchange(state, batch->rounds));
    return tn__flow_round_out(batch->rounds, rows_to_slot, &out);
}

/* A batch without rounds, such as a barrier, has one on the stage all the same. */
static tn_status do_batch(tn__mpi_staged *staged, staged_batch *batch) {
    tn__comm_state *state = staged->state;
    tn__mpi_stage *stage = staged->stage;
    uint64_t round = batch->first_round;
    if (!tn__stage_await(stage, round, &state->is_aborted)) return TN_OK;
    TN_TRY(tn__mpi_meet(state, batch->plan));
    int has_round = tn__flow_rounds_next(batch->rounds);
    if (!has_round) tn__stage_publish(stage, round);
    for (; has_round; round++) {
        if (!tn__stage_await(stage, round, &state->is_aborted)) return TN_OK;
        TN_TRY(do_round(state, batch, tn__stage_slot(stage, round)));
        tn__stage_publish(stage, round);
        has_round = tn__flow_rounds_next(batch->rounds);
    }
    return TN_OK;
}

/* The oldest batch; NULL once the worker is to end. Opens the stage if the state was aborted. */
static staged_batch *next_batch(tn__mpi_staged *staged) {
    tn__mpi_stage *stage = staged->stage;
    pthread_mutex_lock(&stage->lock);
    for (;;) {
        if (atomic_load(&staged->state->is_aborted)) tn__stage_open(stage);
        if (staged->first || staged->is_ending) break;
        pthread_cond_wait(&stage->changed, &stage->lock);
    }
    staged_batch *batch = staged->first;
    if (batch) staged->first = batch->next;
    pthread_mutex_unlock(&stage->lock);
    return batch;
}

static void *run_worker(void *argument) {
    tn__mpi_staged *staged = argument;
    staged_batch *batch;
    while ((batch = next_batch(staged))) {
        tn_status status = do_batch(staged, batch);
        if (status != TN_OK) tn__mpi_remember_failure(staged->state, status);
        drop_batch(batch);
    }
    return NULL;
}

/* The program's signals are for its own threads. */
static tn_status start_worker(tn__mpi_staged *staged) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&staged->worker, NULL, run_worker, staged);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!code) return TN_OK;
    return TN_FAIL_NATIVE(TN_OUT_OF_HOST_MEMORY, code, "no thread for a communicator: %s",
                          strerror(code));
}

/* ---- putting on the stream ------------------------------------------------------------------- */

typedef struct putting {
    tn__mpi_staged *staged;
    staged_batch *batch;
    tn_stream stream;
    unsigned char *slot;
    int is_handed_over;
} putting;

/* With the first thing on the stream the batch is the worker's: it has to go on while the rest is
 * put, since a driver whose queue is full makes the caller wait. */
static void hand_over(putting *put) {
    tn__mpi_staged *staged = put->staged;
    if (put->is_handed_over) return;
    put->is_handed_over = 1;
    atomic_fetch_add(&put->batch->references, 1);
    pthread_mutex_lock(&staged->stage->lock);
    if (staged->first)
        staged->last->next = put->batch;
    else
        staged->first = put->batch;
    staged->last = put->batch;
    pthread_cond_broadcast(&staged->stage->changed);
    pthread_mutex_unlock(&staged->stage->lock);
}

static tn_status put_copy(putting *put, void *dst, const void *src, size_t bytes) {
    const tn__comm_state *state = put->staged->state;
    TN_TRY(state->driver->copy(state->on, dst, src, bytes, put->stream));
    hand_over(put);
    return TN_OK;
}

static tn_status put_own(void *context, char *dst, const char *src, size_t bytes) {
    return put_copy(context, dst, src, bytes);
}

static tn_status put_in(void *context, char *address, size_t at, size_t bytes) {
    putting *put = context;
    return put_copy(put, put->slot + at, address, bytes);
}

static tn_status put_out(void *context, char *address, size_t at, size_t bytes) {
    putting *put = context;
    return put_copy(put, address, put->slot + at, bytes);
}

static tn_status put_ready(putting *put) {
    TN_TRY(tn__stage_put_ready(put->staged->stage, put->stream));
    hand_over(put);
    return TN_OK;
}

static tn_status put_results(putting *put, tn__flow_rounds *outs, uint64_t round) {
    TN_TRY(tn__stage_put_wait(put->staged->stage, round, put->stream));
    if (!tn__flow_rounds_next(outs)) return TN_OK;
    put->slot = tn__stage_slot(put->staged->stage, round);
    return tn__flow_round_out(outs, put_out, put);
}

/* `ins` is a round ahead of `outs`. */
static tn_status put_rounds(putting *put, tn__flow_rounds *ins, tn__flow_rounds *outs) {
    tn__mpi_stage *stage = put->staged->stage;
    uint64_t done = stage->put;
    while (tn__flow_rounds_next(ins)) {
        put->slot = tn__stage_slot(stage, stage->put + 1);
        TN_TRY(tn__flow_round_in(ins, put_in, put));
        TN_TRY(put_ready(put));
        if (stage->put - done == TN__STAGE_SLOTS) TN_TRY(put_results(put, outs, ++done));
    }
    if (stage->put == done) TN_TRY(put_ready(put));
    while (done < stage->put)
        TN_TRY(put_results(put, outs, ++done));
    return TN_OK;
}

static tn_status put_batch(putting *put, tn__flow_rounds *ins, tn__flow_rounds *outs) {
    tn_status status = put_rounds(put, ins, outs);
    if (status == TN_OK) status = tn__flow_copy_own(put->batch->plan, put_own, put);
    tn__saved_error saved;
    tn__error_save(&saved);
    tn_status ended =
        put->is_handed_over ? tn__stage_put_end(put->staged->stage, put->stream) : TN_OK;
    if (status == TN_OK) return ended;
    tn__error_restore(&saved);
    return status;
}

tn_status tn__mpi_staged_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    putting put = {.staged = state->staged, .stream = stream};
    tn__flow_rounds *ins = NULL, *outs = NULL;
    TN_TRY(make_batch(state, batch, &put.batch));
    put.batch->first_round = state->staged->stage->put + 1;
    tn_status status = tn__flow_rounds_make(put.batch->plan, state->row_bytes, &ins);
    if (status == TN_OK) status = tn__flow_rounds_make(put.batch->plan, state->row_bytes, &outs);
    if (status == TN_OK) status = put_batch(&put, ins, outs);
    tn__host_free(ins);
    tn__host_free(outs);
    if (status != TN_OK && put.is_handed_over) tn__mpi_remember_failure(state, status);
    drop_batch(put.batch);
    return status;
}

/* ---- made and ended -------------------------------------------------------------------------- */

tn_status tn__mpi_staged_make(tn__comm_state *state) {
    TN_REQUIRE(state->row_bytes * (size_t)state->rank_count <= TN__STAGE_SLOT_BYTES,
               "communicator %s: %d ranks are too many for memory of a device", state->name,
               state->rank_count);
    tn__mpi_staged *staged = tn__host_alloc(1, sizeof *staged);
    if (!staged) return TN_OUT_OF_HOST_MEMORY;
    staged->state = state;
    tn_status status = tn__stage_take(state->device, &staged->stage);
    if (status == TN_OK) {
        status = start_worker(staged);
        if (status != TN_OK) tn__stage_give(staged->stage);
    }
    if (status != TN_OK) {
        tn__host_free(staged);
        return status;
    }
    state->staged = staged;
    return TN_OK;
}

void tn__mpi_staged_wake(tn__mpi_staged *staged) { tn__stage_wake(staged->stage); }

void tn__mpi_staged_end(tn__mpi_staged *staged) {
    pthread_mutex_lock(&staged->stage->lock);
    staged->is_ending = 1;
    pthread_cond_broadcast(&staged->stage->changed);
    pthread_mutex_unlock(&staged->stage->lock);
    pthread_join(staged->worker, NULL);
    tn__stage_give(staged->stage);
    tn__host_free(staged);
}
