/* The NCCL engine: communicators that never block the host for longer than their deadline.
 *
 * Our own communicators are non-blocking: a call that is not through at once says so
 * (ncclInProgress), and is polled until it is or the time is up; then the communicator is
 * aborted, which also ends its kernels. An adopted communicator is the caller's in every way: it
 * is neither aborted nor destroyed here, and if it is a blocking one its calls may block.
 */
#include <string.h>
#include <time.h>

#include "host_alloc.h"
#include "nccl_state.h"

enum { MICROSECONDS = 1000000, POLL_NS = 20000 };

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * MICROSECONDS + (uint64_t)now.tv_nsec / 1000;
}

/* ---- failure -------------------------------------------------------------------------------- */

static void end_comm(tn__comm_state *state) {
    if (state->comm && !state->is_adopted) {
        (void)state->driver->make_current(state->on);
        (void)state->calls->abort(state->comm);
    }
    state->comm = NULL;
}

static void nccl_abort(tn__comm_state *state) {
    state->is_marked = 1;
    if (!state->is_kept) end_comm(state);
}

static void nccl_keep(tn__comm_state *state, int is_to_be_shrunk) {
    if (state->is_adopted) return;
    state->is_kept = 1;
    state->is_to_be_shrunk |= is_to_be_shrunk;
}

/* Its kernels end at once, the call with the last graph that the communicator is in: whoever is to
 * destroy that must hear of the failure first. */
static void nccl_expire(tn__comm_state *state, pthread_mutex_t *lock) {
    void *ending = state->comm;
    state->is_kept = state->is_to_be_shrunk = 0;
    if (!state->is_marked || !ending || state->is_adopted) return;
    state->comm = NULL;
    pthread_mutex_unlock(lock);
    (void)state->driver->make_current(state->on);
    (void)state->calls->abort(ending);
    pthread_mutex_lock(lock);
}

/* Remembers this thread's last error, and aborts. */
static tn_status fail_for_good(tn__comm_state *state, tn_status status) {
    state->failure = status;
    tn__error_save(&state->failure_text);
    nccl_abort(state);
    tn__error_restore(&state->failure_text);
    return status;
}

static tn_status nccl_check(tn__comm_state *state) {
    int code = TN__NCCL_SUCCESS;
    if (state->failure != TN_OK) {
        tn__error_restore(&state->failure_text);
        return state->failure;
    }
    if (!state->comm) return TN_FAIL(TN_COMM_ERROR, "the NCCL communicator has been aborted");
    int result = state->calls->async_error(state->comm, &code);
    if (result != TN__NCCL_SUCCESS)
        return tn__nccl_fail(state->calls, state->comm, result, "ncclCommGetAsyncError");
    if (code == TN__NCCL_SUCCESS || code == TN__NCCL_IN_PROGRESS) return TN_OK;
    tn_status status = tn__nccl_fail(state->calls, state->comm, code, "an NCCL collective");
    return status == TN_INVALID_ARGUMENT ? TN_COMM_ERROR : status;
}

tn_status tn__nccl_finish(tn__comm_state *state, int code, const char *call) {
    uint64_t start_us = now_us();
    if (code == TN__NCCL_SUCCESS) code = TN__NCCL_IN_PROGRESS;
    while (code == TN__NCCL_IN_PROGRESS) {
        struct timespec pause = {0, POLL_NS};
        int result = state->calls->async_error(state->comm, &code);
        if (result != TN__NCCL_SUCCESS) code = result;
        if (code != TN__NCCL_IN_PROGRESS) break;
        if (now_us() - start_us >= state->timeout_us) {
            return fail_for_good(state,
                                 TN_FAIL(TN_COMM_TIMEOUT, "%s: not all ranks joined it within %g s",
                                         call, (double)state->timeout_us / MICROSECONDS));
        }
        nanosleep(&pause, NULL);
    }
    if (code == TN__NCCL_SUCCESS) return TN_OK;
    tn_status status = tn__nccl_fail(state->calls, state->comm, code, call);
    return status == TN_INVALID_ARGUMENT ? status : fail_for_good(state, status);
}

/* ---- joining and leaving -------------------------------------------------------------------- */

static const tn__nccl_config non_blocking = {sizeof(tn__nccl_config), TN__NCCL_CONFIG_MAGIC,
                                             TN__NCCL_CONFIG_VERSION, 0};

static tn_status join_by_id(tn__comm_state *state, const tn_comm_config *config) {
    tn__nccl_id id;
    tn__nccl_config nccl_config = non_blocking;
    memcpy(&id, config->id, sizeof id);
    int code = state->calls->join(&state->comm, config->rank_count, id, config->rank, &nccl_config);
    return tn__nccl_finish(state, code, "ncclCommInitRankConfig");
}

static tn_status adopt(tn__comm_state *state, const tn_comm_config *config) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    int ordinal = -1;
    TN_TRY(tn_device_info_get(config->device, &info));
    state->comm = config->nccl_comm;
    state->is_adopted = 1;
    int code = state->calls->device(state->comm, &ordinal);
    if (code != TN__NCCL_SUCCESS)
        return tn__nccl_fail(state->calls, state->comm, code, "ncclCommCuDevice");
    TN_REQUIRE(ordinal == info.ordinal,
               "the adopted NCCL communicator is of CUDA device %d, tn_comm_config.device is %d",
               ordinal, info.ordinal);
    return TN_OK;
}

static tn_status read_ranks(tn__comm_state *state) {
    int code = state->calls->rank(state->comm, &state->rank);
    if (code == TN__NCCL_SUCCESS) code = state->calls->count(state->comm, &state->rank_count);
    if (code == TN__NCCL_SUCCESS) return TN_OK;
    return tn__nccl_fail(state->calls, state->comm, code, "ncclCommUserRank");
}

static void nccl_leave(tn__comm_state *state) {
    (void)state->driver->make_current(state->on);
    if (state->is_marked) end_comm(state);
    if (state->comm && !state->is_adopted) {
        int code = state->calls->finalize(state->comm);
        if (tn__nccl_finish(state, code, "ncclCommFinalize") == TN_OK)
            (void)state->calls->destroy(state->comm);
        else
            end_comm(state);
    }
    if (state->barrier_word) (void)state->driver->mem_free(state->on, state->barrier_word);
    tn__host_free(state);
}

static tn_status make_barrier_word(tn__comm_state *state) {
    TN_TRY(state->driver->mem_alloc(state->on, sizeof(float), &state->barrier_word));
    TN_TRY(state->driver->fill(state->on, state->barrier_word, 0, sizeof(float), NULL));
    return state->driver->stream_synchronize(state->on, NULL);
}

/* Ends a state that did not come to be a communicator. */
static void drop_state(tn__comm_state *state) {
    tn__saved_error saved;
    tn__error_save(&saved);
    nccl_abort(state);
    nccl_leave(state);
    tn__error_restore(&saved);
}

static int put_host_task(void *device, void (*task)(void *), void *argument, void *stream) {
    return (int)tn__driver_host.host_task(device, task, argument, stream);
}

static tn_status make_state(const tn__driver *driver, tn__driver_device *on, uint64_t timeout_us,
                            tn__comm_state **out) {
    tn__comm_state *state = tn__host_alloc(1, sizeof *state);
    if (!state) return TN_OUT_OF_HOST_MEMORY;
    state->driver = driver;
    state->on = on;
    state->timeout_us = timeout_us;
    tn_status status = tn__nccl_load(&state->calls);
    if (status == TN_OK) status = driver->make_current(on);
    if (status == TN_OK && state->calls->host_tasks) state->calls->host_tasks(put_host_task, on);
    if (status == TN_OK) status = make_barrier_word(state);
    if (status != TN_OK) {
        drop_state(state);
        return status;
    }
    *out = state;
    return TN_OK;
}

static tn_status nccl_join(const tn_comm_config *config, int *rank, int *rank_count,
                           tn__comm_state **out) {
    tn__comm_state *state;
    TN_TRY(make_state(tn__device_driver(config->device), tn__device_state(config->device),
                      config->timeout_us, &state));
    tn_status status = config->id ? join_by_id(state, config) : adopt(state, config);
    if (status == TN_OK) status = read_ranks(state);
    if (status != TN_OK) {
        drop_state(state);
        return status;
    }
    *rank = state->rank;
    *rank_count = state->rank_count;
    *out = state;
    return TN_OK;
}

/* ---- splitting ------------------------------------------------------------------------------ */

/* NCCL has the new communicator only once the call on the old one is through. */
static tn_status split_into(tn__comm_state *state, int color, int key, tn__comm_state *made) {
    tn__nccl_config nccl_config = non_blocking;
    int nccl_color = color < 0 ? TN__NCCL_NO_COLOR : color;
    int code = state->calls->split(state->comm, nccl_color, key, &made->comm, &nccl_config);
    TN_TRY(tn__nccl_finish(state, code, "ncclCommSplit"));
    if (!made->comm) return TN_OK;
    TN_TRY(tn__nccl_finish(made, TN__NCCL_IN_PROGRESS, "ncclCommSplit"));
    TN_TRY(tn__nccl_finish(state, TN__NCCL_IN_PROGRESS, "ncclCommSplit"));
    return read_ranks(made);
}

static tn_status nccl_split_prepare(tn__comm_state *state, tn__comm_state **out) {
    if (!state->calls->split)
        return TN_FAIL(TN_UNSUPPORTED, "the loaded NCCL has no ncclCommSplit: it is of 2.18 and "
                                       "later; make the communicator from an id instead");
    return make_state(state->driver, state->on, state->timeout_us, out);
}

static tn_status nccl_split(tn__comm_state *state, int color, int key, const char *name,
                            tn_status so_far, int *rank, int *rank_count, tn__comm_state **out) {
    tn__comm_state *made = *out;
    (void)name;
    *out = NULL;
    if (so_far != TN_OK) return so_far;
    tn_status status = split_into(state, color, key, made);
    if (status != TN_OK || !made->comm) {
        drop_state(made);
        return status;
    }
    *rank = made->rank;
    *rank_count = made->rank_count;
    *out = made;
    return TN_OK;
}

/* ---- shrinking ------------------------------------------------------------------------------ */

static tn_status check_shrink(const tn__comm_state *state) {
    if (!state->calls->shrink)
        return TN_FAIL(TN_UNSUPPORTED, "the loaded NCCL has no ncclCommShrink: it is of 2.27 and "
                                       "later; make a communicator of the ranks that are left");
    if (state->comm && (!state->is_marked || state->is_to_be_shrunk)) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "the NCCL communicator ended with its failure: one that is to be shrunk then is "
                   "made with tn_comm_config.shrinkable, and shrunk within its timeout");
}

/* What a communicator has failed with it may go on saying while it is shrunk: that there is a new
 * one counts. */
static tn_status await_shrunk(const tn__comm_state *state, tn__comm_state *made, int code) {
    const struct timespec pause = {0, POLL_NS};
    uint64_t start_us = now_us();
    if (code != TN__NCCL_SUCCESS && code != TN__NCCL_IN_PROGRESS)
        return tn__nccl_fail(state->calls, state->comm, code, "ncclCommShrink");
    while (!__atomic_load_n(&made->comm, __ATOMIC_ACQUIRE)) {
        int result = state->calls->async_error(state->comm, &code);
        if (result != TN__NCCL_SUCCESS)
            return tn__nccl_fail(state->calls, state->comm, result, "ncclCommGetAsyncError");
        if (now_us() - start_us >= state->timeout_us)
            return TN_FAIL(TN_COMM_TIMEOUT, "ncclCommShrink: not all ranks joined it within %g s",
                           (double)state->timeout_us / MICROSECONDS);
        nanosleep(&pause, NULL);
    }
    return TN_OK;
}

/* The ranks' own store is gone with rank 0, or was never theirs: they make another. Whoever waits
 * for ranks that were refused learns it by the deadline; NCCL may write to what it makes until the
 * old communicator ends. */
static tn_status say_what_is_left(tn__comm_state *state, tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    if (status == TN_COMM_TIMEOUT) {
        state->is_kept = 0;
        end_comm(state);
    }
    return TN_FAIL_NATIVE(status, saved.native,
                          "%s; NCCL shrinks none that has met an error of its own: the ranks that "
                          "are left make a new rendezvous (tn_rendezvous_create) and their "
                          "communicator from it (tn_comm_create)",
                          saved.text);
}

static tn_status shrink_into(tn__comm_state *state, const int *excluded, int excluded_count,
                             tn__comm_state *made) {
    tn__nccl_config nccl_config = non_blocking;
    int flags = state->is_marked ? TN__NCCL_SHRINK_ABORT : 0;
    int code = state->calls->shrink(state->comm, (int *)(uintptr_t)excluded, excluded_count,
                                    &made->comm, &nccl_config, flags);
    if (state->is_marked)
        TN_TRY(await_shrunk(state, made, code));
    else
        TN_TRY(tn__nccl_finish(state, code, "ncclCommShrink"));
    if (!made->comm) return TN_FAIL(TN_COMM_ERROR, "ncclCommShrink has made no communicator");
    TN_TRY(tn__nccl_finish(made, TN__NCCL_IN_PROGRESS, "ncclCommShrink"));
    return read_ranks(made);
}

static tn_status nccl_shrink(tn__comm_state *state, const int *excluded, int excluded_count,
                             const char *name, int *rank, int *rank_count, tn__comm_state **out) {
    tn__comm_state *made;
    (void)name;
    TN_TRY(check_shrink(state));
    TN_TRY(make_state(state->driver, state->on, state->timeout_us, &made));
    tn_status status = shrink_into(state, excluded, excluded_count, made);
    if (status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT)
        status = say_what_is_left(state, status);
    if (status != TN_OK) {
        drop_state(made);
        return status;
    }
    state->is_kept = state->is_to_be_shrunk = 0; /* not again: a failure ends it at once */
    *rank = made->rank;
    *rank_count = made->rank_count;
    *out = made;
    return TN_OK;
}

static void nccl_limit(tn__comm_state *state, uint64_t timeout_us) {
    state->timeout_us = timeout_us;
}

static const tn__comm_engine engine = {
    .abi = TN__COMM_ENGINE_ABI,
    .name = "NCCL",
    .has_deadlines = 0,
    .splits_when_idle = 1,
    .joins_by_id = 1,
    .is_capturable = 1,
    .join = nccl_join,
    .split_prepare = nccl_split_prepare,
    .split = nccl_split,
    .shrink = nccl_shrink,
    .keep = nccl_keep,
    .expire = nccl_expire,
    .start = tn__nccl_batch_start,
    .check = nccl_check,
    .abort = nccl_abort,
    .leave = nccl_leave,
    .enroll = tn__nccl_enroll,
    .withdraw = tn__nccl_withdraw,
    .memory_functions = tn__nccl_memory_functions,
    .limit = nccl_limit,
};

tn_status tn__nccl_engine_get(const tn__comm_engine **out) {
    const tn__nccl_calls *calls;
    TN_TRY(tn__nccl_load(&calls));
    *out = &engine;
    return TN_OK;
}
