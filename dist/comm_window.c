/* Windows are tried out before they are used: see tenure_registration.h.
 *
 *     side communicator -> (all ranks agree)
 *                       -> own memory, a window of it -> gathers, a reduction, contents
 *                       -> (all ranks agree) -> the caller's memory, registered and ended
 *                       -> (all ranks agree) -> ended
 *
 * The trial is on a communicator beside the one that is to have the window: what hangs there is
 * given up there, and the ranks then tell each other over the other one, which has no window yet.
 *
 * Invariant: ranks decide alike, since every decision follows an agreement.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm.h"
#include "host_alloc.h"
#include "tenure_registration.h"

enum {
    US_PER_S = 1000000,
    TRIAL_US = 20 * US_PER_S,
    SMALL_BYTES = 4096,            /* of a rank: NCCL chooses other kernels for other sizes */
    LARGE_BYTES = 1 << 20,         /* of a rank, but of many ranks together no more than */
    LARGE_BYTES_OF_ALL = 32 << 20, /* this */
    FLOAT_BYTE = 0x40,             /* four of them are a float that is the maximum of its like */
    PATTERNS = 250,
    STATUSES = 32
};

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * US_PER_S + (uint64_t)now.tv_nsec / 1000;
}

/* ---- agreement ------------------------------------------------------------------------------- */

/* Room for one call, which stays. */
static tn_status make_room_locked(tn_comm *comm) {
    const tn__collective_call none = {0};
    tn_status status = tn__batch_add(&comm->list, &none, NULL, 0);
    tn__batch_clear(&comm->list);
    return status;
}

static tn_status prepare_locked(tn_comm *comm) {
    /* It would be a part of the group, and not put. */
    TN_TRY(tn__comm_check_closed_locked(comm, "have its ranks agree"));
    if (comm->rank_count == 1) return TN_OK;
    TN_TRY(make_room_locked(comm));
    if (!comm->agreement_word)
        TN_TRY(comm->driver->mem_alloc(comm->on, sizeof(float), &comm->agreement_word));
    if (comm->agreement_stream) return TN_OK;
    return tn_stream_create(comm->device, &comm->agreement_stream);
}

tn_status tn__comm_prepare_agreement(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = prepare_locked(comm);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

void tn__comm_end_agreement(tn_comm *comm) {
    if (comm->agreement_word) (void)comm->driver->mem_free(comm->on, comm->agreement_word);
    if (comm->agreement_stream) (void)tn_stream_destroy(comm->device, comm->agreement_stream);
    comm->agreement_word = NULL;
    comm->agreement_stream = NULL;
}

static tn_status put_reduction(tn_comm *comm, float *value) {
    tn_stream stream = comm->agreement_stream;
    void *word = comm->agreement_word;
    const tn__collective_call call = {.kind = TN_ALL_REDUCE,
                                      .src = word,
                                      .dst = word,
                                      .count = 1,
                                      .element_bytes = sizeof *value,
                                      .dtype = TN_FP32,
                                      .reduce = TN_REDUCE_MAX,
                                      .is_uncounted = 1};
    TN_TRY(tn_copy(comm->device, word, value, sizeof *value, stream));
    TN_TRY(tn__collective_put(comm, &call, NULL, 0, stream));
    TN_TRY(tn_copy(comm->device, value, word, sizeof *value, stream));
    return tn_comm_wait(comm);
}

/* The maximum of what all ranks bring. The stream has done all when it returns. */
static tn_status reduce_value(tn_comm *comm, float *value) {
    tn__saved_error saved;
    tn_status status = put_reduction(comm, value);
    tn__error_save(&saved);
    tn_status ended = tn_stream_synchronize(comm->device, comm->agreement_stream);
    if (status == TN_OK) return ended;
    tn__error_restore(&saved);
    return status;
}

/* The least rank is the greatest number; counts of ranks, with a status each, are exact in a
 * float. */
tn_status tn__comm_agree(tn_comm *comm, tn_status mine, int *failed, tn_status *theirs) {
    _Static_assert((int)TN_STATUS_COUNT <= STATUSES, "a status is a digit");
    *failed = mine == TN_OK ? -1 : comm->rank;
    if (theirs) *theirs = mine;
    if (comm->rank_count == 1) return TN_OK;
    const int word = mine == TN_OK ? 0 : (comm->rank_count - comm->rank) * STATUSES + (int)mine;
    float value = (float)word;
    tn_status status = reduce_value(comm, &value);
    if (status != TN_OK) tn_comm_abort(comm, tn_error_last()); /* others may wait in it */
    TN_TRY(status);
    *failed = value > 0.0f ? comm->rank_count - (int)value / STATUSES : -1;
    if (theirs) *theirs = (tn_status)((int)value % STATUSES);
    return TN_OK;
}

/* This rank's own words if it has failed, else who has. */
static tn_status say(const tn_comm *comm, const tn__saved_error *own, tn_status mine, int failed) {
    if (mine != TN_OK) {
        return TN_FAIL(TN_UNSUPPORTED, "communicator %s, rank %d of %d: no window: %s", comm->name,
                       comm->rank, comm->rank_count, own->text);
    }
    return TN_FAIL(TN_UNSUPPORTED,
                   "communicator %s, rank %d of %d: no window, as rank %d has failed to use one",
                   comm->name, comm->rank, comm->rank_count, failed);
}

/* TN_OK if no rank has failed; TN_UNSUPPORTED if one has, or what the agreement itself met. */
static tn_status agree_on_trial(tn_comm *comm, tn_status mine) {
    tn__saved_error own;
    int failed = -1;
    tn__error_save(&own);
    TN_TRY(tn__comm_agree(comm, mine, &failed, NULL));
    return failed < 0 ? TN_OK : say(comm, &own, mine, failed);
}

/* ---- the trial ------------------------------------------------------------------------------- */

/* A trial's memory, of the engine's own kind, registered as a window of the side communicator. */
typedef struct window_trial {
    tn_comm *side;
    tn_stream stream;
    tn_memory_functions functions;
    char *memory;
    unsigned char *seen; /* a copy on the host */
    size_t bytes;
    size_t large_bytes; /* of a rank */
    tn_registration *window;
} window_trial;

static tn_status wait_for(const window_trial *trial) {
    TN_TRY(tn_comm_wait(trial->side));
    return tn_stream_synchronize(trial->side->device, trial->stream);
}

static unsigned char pattern_of(int rank) { return (unsigned char)(1 + rank % PATTERNS); }

static tn_status check_gathered(const window_trial *trial, size_t bytes) {
    for (size_t i = 0; i < bytes * (size_t)trial->side->rank_count; i++) {
        const int rank = (int)(i / bytes);
        if (trial->seen[i] == pattern_of(rank)) continue;
        return TN_FAIL(TN_COMM_ERROR, "byte %zu that rank %d gave to a gather is %u, not %u",
                       i % bytes, rank, trial->seen[i], pattern_of(rank));
    }
    return TN_OK;
}

static tn_status try_gather(const window_trial *trial, size_t bytes) {
    const tn_comm *side = trial->side;
    char *mine = trial->memory + bytes * (size_t)side->rank;
    size_t all = bytes * (size_t)side->rank_count;
    TN_TRY(tn_fill(side->device, trial->memory, 0, all, trial->stream));
    TN_TRY(tn_fill(side->device, mine, pattern_of(side->rank), bytes, trial->stream));
    TN_TRY(tn_all_gather(trial->side, mine, trial->memory, bytes, trial->stream));
    TN_TRY(wait_for(trial));
    TN_TRY(tn_copy(side->device, trial->seen, trial->memory, all, trial->stream));
    TN_TRY(tn_stream_synchronize(side->device, trial->stream));
    return check_gathered(trial, bytes);
}

static tn_status try_reduction(const window_trial *trial, size_t bytes) {
    const tn_comm *side = trial->side;
    char *mine = trial->memory + bytes * (size_t)side->rank;
    size_t all = bytes * (size_t)side->rank_count;
    TN_TRY(tn_fill(side->device, trial->memory, FLOAT_BYTE, all, trial->stream));
    TN_TRY(tn_reduce_scatter(trial->side, trial->memory, mine, bytes / sizeof(float), TN_FP32,
                             TN_REDUCE_MAX, trial->stream));
    TN_TRY(wait_for(trial));
    TN_TRY(tn_copy(side->device, trial->seen, mine, bytes, trial->stream));
    TN_TRY(tn_stream_synchronize(side->device, trial->stream));
    for (size_t i = 0; i < bytes; i++) {
        if (trial->seen[i] != FLOAT_BYTE)
            return TN_FAIL(TN_COMM_ERROR, "byte %zu of a reduction is %u, not %u", i,
                           trial->seen[i], FLOAT_BYTE);
    }
    return TN_OK;
}

static tn_status try_collectives(window_trial *trial) {
    void *memory = NULL;
    trial->seen = tn__host_alloc(trial->bytes, 1);
    if (!trial->seen) return TN_OUT_OF_HOST_MEMORY;
    TN_TRY(tn_stream_create(trial->side->device, &trial->stream));
    TN_TRY(tn_comm_memory_functions(trial->side, &trial->functions));
    TN_TRY(trial->functions.alloc(trial->functions.context, trial->bytes, &memory));
    trial->memory = memory;
    TN_TRY(tn_comm_register(trial->side, memory, trial->bytes, TN_REGISTER_WINDOW, &trial->window));
    TN_TRY(try_gather(trial, SMALL_BYTES));
    TN_TRY(try_gather(trial, trial->large_bytes));
    return try_reduction(trial, trial->large_bytes);
}

/* The others need not wait there for what does not come any more. */
static tn_status try_collectives_or_give_up(window_trial *trial) {
    const tn_status status = try_collectives(trial);
    if (status != TN_OK) tn_comm_abort(trial->side, tn_error_last());
    return status;
}

/* Of the caller's memory nothing is read or written. */
static tn_status try_memory(const window_trial *trial, void *address, size_t bytes) {
    tn_registration *window = NULL;
    TN_TRY(tn_comm_register(trial->side, address, bytes, TN_REGISTER_WINDOW, &window));
    return tn_comm_deregister(window);
}

/* Whatever there is of it; this thread's last error stays. */
static void end_trial(window_trial *trial) {
    tn__saved_error saved;
    tn__error_save(&saved);
    tn_device *device = trial->side->device;
    (void)tn_comm_deregister(trial->window);
    if (trial->stream) (void)tn_stream_destroy(device, trial->stream);
    (void)tn_comm_destroy(trial->side);
    if (trial->memory)
        (void)trial->functions.free(trial->functions.context, trial->memory, trial->bytes);
    tn__host_free(trial->seen);
    tn__error_restore(&saved);
}

uint64_t tn__comm_trial_us(uint64_t timeout_us) {
    if (timeout_us / 4 >= TRIAL_US) return TRIAL_US;
    return timeout_us / 4 ? timeout_us / 4 : 1;
}

static tn_status begin_trial(tn_comm *comm, window_trial *trial) {
    size_t share = LARGE_BYTES_OF_ALL / (size_t)comm->rank_count / SMALL_BYTES * SMALL_BYTES;
    trial->large_bytes = share < SMALL_BYTES   ? SMALL_BYTES
                         : share < LARGE_BYTES ? share
                                               : LARGE_BYTES;
    trial->bytes = trial->large_bytes * (size_t)comm->rank_count;
    TN_TRY(tn__comm_make_side(comm, "trial of windows", comm->windows.trial_us, &trial->side));
    trial->side->windows.is_known = 1; /* it is the one that finds out */
    return TN_OK;
}

/* *is_known: what it comes to holds for all memory. */
static tn_status try_windows(tn_comm *comm, void *address, size_t bytes, int *is_known) {
    window_trial trial = {.side = NULL};
    tn_status status = begin_trial(comm, &trial);
    if (status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR) return status; /* comm's failure */
    /* All have it, or nobody does: what is given up there is nobody's who is still joining. */
    status = agree_on_trial(comm, status);
    if (status == TN_OK) status = agree_on_trial(comm, try_collectives_or_give_up(&trial));
    *is_known = status == TN_OK || status == TN_UNSUPPORTED;
    if (status == TN_OK) {
        status = agree_on_trial(comm, try_memory(&trial, address, bytes));
        if (status != TN_OK) *is_known = 0;
    }
    if (trial.side) end_trial(&trial);
    return status;
}

/* What was found out before; 0: nothing. */
static int find_known(tn_comm *comm, tn_status *status) {
    pthread_mutex_lock(&comm->lock);
    int is_known = comm->windows.is_known;
    *status = comm->windows.status;
    if (is_known && *status != TN_OK) tn__error_restore(&comm->windows.text);
    pthread_mutex_unlock(&comm->lock);
    return is_known;
}

static void remember(tn_comm *comm, tn_status status, uint64_t check_us) {
    pthread_mutex_lock(&comm->lock);
    comm->windows.is_known = 1;
    comm->windows.status = status;
    comm->windows.check_us = check_us;
    if (status != TN_OK) tn__error_save(&comm->windows.text);
    pthread_mutex_unlock(&comm->lock);
}

tn_status tn__comm_check_window(tn_comm *comm, void *address, size_t bytes) {
    uint64_t start_us = now_us();
    tn_status status = TN_OK;
    int is_known = 0;
    if (find_known(comm, &status)) return status;
    status = try_windows(comm, address, bytes, &is_known);
    if (is_known) remember(comm, status, now_us() - start_us);
    return status;
}

/* ---- what is known --------------------------------------------------------------------------- */

tn_status tn_comm_window_info_get(tn_comm *comm, tn_window_info *out) {
    TN_REQUIRE(comm, "tn_comm_window_info_get: comm is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_comm_window_info_get: begin with TN_WINDOW_INFO_INIT");
    tn_window_info info = TN_WINDOW_INFO_INIT;
    pthread_mutex_lock(&comm->lock);
    info.is_known = comm->windows.is_known;
    info.status = comm->windows.status;
    info.check_us = comm->windows.check_us;
    if (info.status != TN_OK)
        (void)snprintf(info.text, sizeof info.text, "%.*s", (int)sizeof info.text - 1,
                       comm->windows.text.text);
    pthread_mutex_unlock(&comm->lock);
    *out = info;
    return TN_OK;
}
