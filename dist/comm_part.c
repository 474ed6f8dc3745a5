/* Communicators of some of another one's ranks: sub-groups, and what is left after ranks are
 * lost. */
#include "comm_watch.h"

/* What the engine has made is a communicator from here on, or is ended. */
static tn_status finish(tn_comm *comm, tn_comm *made, tn_status status, tn_rendezvous *ranks,
                        int is_watched, tn_comm **out) {
    int is_made = made && status == TN_OK && made->state;
    if (is_made) {
        made->engine = comm->engine;
        made->is_part = 1;
        if (made->engine->limit) made->engine->limit(made->state, made->timeout_us);
        if (is_watched) status = tn__comm_begin_watch(made, ranks);
    }
    if (is_made && status == TN_OK) {
        tn__device_retain(made->device);
        *out = made;
        return TN_OK;
    }
    tn__saved_error saved;
    tn__error_save(&saved);
    if (made) tn__comm_free(made);
    tn__error_restore(&saved);
    if (status == TN_OK) *out = NULL;
    return status;
}

/* ---- sub-groups ------------------------------------------------------------------------------ */

static tn_status check_split_locked(tn_comm *comm) {
    TN_TRY(tn__comm_check_locked(comm));
    if (!comm->engine->split) {
        return TN_FAIL(TN_UNSUPPORTED, "communicator %s: the engine %s splits none", comm->name,
                       comm->engine->name);
    }
    if (!comm->is_grouping) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "communicator %s: it can not be split while a group is open: end or cancel it",
                   comm->name);
}

/* What this rank has failed with already it only tells the others. */
static tn_status split_locked(tn_comm *comm, int color, int key, tn_comm *made, tn_status so_far) {
    tn_comm nothing = {0};
    TN_TRY(check_split_locked(comm));
    if (!made) made = &nothing;
    tn_status status = comm->engine->split(comm->state, color, key, made->name, so_far, &made->rank,
                                           &made->rank_count, &made->state);
    int is_over = status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR;
    return is_over ? tn__comm_fail_locked(comm, status) : status;
}

/* Of the configuration only name and timeout are asked for. */
static tn_status split(tn_comm *comm, int color, int key, const tn_comm_config *config,
                       int is_watched, tn_comm **out) {
    tn_comm *made = NULL;
    if (comm->engine->splits_when_idle) TN_TRY(tn_comm_wait(comm));
    tn_status status = tn__comm_make(config, &made);
    pthread_mutex_lock(&comm->lock);
    status = split_locked(comm, color, key, made, status);
    pthread_mutex_unlock(&comm->lock);
    return finish(comm, made, status, is_watched ? tn__comm_watch_ranks(comm->watch) : NULL,
                  is_watched, out);
}

tn_status tn_comm_split(tn_comm *comm, int color, int key, const char *name, tn_comm **out) {
    TN_REQUIRE(comm && out, "tn_comm_split: comm and out are needed");
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    config.device = comm->device;
    config.name = name ? name : comm->name;
    config.timeout_us = comm->timeout_us;
    return split(comm, color, key, &config, 1, out);
}

/* Without a watch it has the deadlines of whoever waits for it. */
tn_status tn__comm_make_side(tn_comm *comm, const char *name, uint64_t timeout_us, tn_comm **out) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    config.device = comm->device;
    config.name = name;
    config.timeout_us = timeout_us;
    return split(comm, 0, comm->rank, &config, 0, out);
}

/* ---- without some ranks ---------------------------------------------------------------------- */

static tn_status check_excluded(const tn_comm *comm, const int *excluded, size_t count) {
    TN_REQUIRE(count < (size_t)comm->rank_count && (excluded || !count),
               "tn_comm_shrink of communicator %s: %zu ranks at %p are to be left out of %d",
               comm->name, count, (const void *)excluded, comm->rank_count);
    for (size_t i = 0; i < count; i++) {
        TN_REQUIRE(excluded[i] >= 0 && excluded[i] < comm->rank_count && excluded[i] != comm->rank,
                   "tn_comm_shrink of communicator %s: rank %d is to be left out: of %d ranks this "
                   "is %d, and stays",
                   comm->name, excluded[i], comm->rank_count, comm->rank);
        for (size_t other = 0; other < i; other++)
            TN_REQUIRE(excluded[other] != excluded[i],
                       "tn_comm_shrink of communicator %s: rank %d is listed twice", comm->name,
                       excluded[i]);
    }
    return TN_OK;
}

static tn_status check_shrink_locked(const tn_comm *comm) {
    if (!comm->engine->shrink) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "communicator %s: the engine %s shrinks none, NCCL and TCP do; while all "
                       "ranks live, tn_comm_split makes one of some of them",
                       comm->name, comm->engine->name);
    }
    if (!comm->is_grouping && !comm->is_shrunk) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "communicator %s can not be shrunk: %s", comm->name,
                   comm->is_shrunk ? "it has been already: shrink what came of it"
                                   : "a group is open: end or cancel it");
}

static tn_status shrink_locked(tn_comm *comm, const int *excluded, size_t count, tn_comm *made) {
    TN_TRY(check_shrink_locked(comm));
    const int had_failed = comm->failure != TN_OK;
    tn_status status = comm->engine->shrink(comm->state, excluded, (int)count, made->name,
                                            &made->rank, &made->rank_count, &made->state);
    comm->is_shrunk = status == TN_OK;
    int is_over = status == TN_COMM_TIMEOUT || status == TN_COMM_ERROR;
    return is_over && !had_failed ? tn__comm_fail_locked(comm, status) : status;
}

tn_status tn_comm_shrink(tn_comm *comm, const int *excluded, size_t excluded_count,
                         const char *name, tn_comm **out) {
    TN_REQUIRE(comm && out, "tn_comm_shrink: comm and out are needed");
    TN_TRY(check_excluded(comm, excluded, excluded_count));
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *made = NULL;
    config.device = comm->device;
    config.name = name ? name : comm->name;
    config.timeout_us = comm->timeout_us;
    config.shrinkable = comm->is_shrinkable;
    tn_status waited = tn_comm_wait(comm);
    (void)waited; /* a failure is no reason not to */
    TN_TRY(tn__comm_make(&config, &made));
    pthread_mutex_lock(&comm->lock);
    tn_status status = shrink_locked(comm, excluded, excluded_count, made);
    pthread_mutex_unlock(&comm->lock);
    /* The rendezvous has, or may yet have, news of those who are left out, which is none here. */
    return finish(comm, made, status, NULL, 1, out);
}
