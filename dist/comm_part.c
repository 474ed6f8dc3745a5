/* Communicators of some of another one's ranks: sub-groups, and what is left after ranks are
 * lost. */
#include "comm_watch.h"

#include <stdio.h>

enum { KEY_BYTES = 64 };

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
    return tn__comm_check_closed_locked(comm, "be split");
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
    TN_TRY(tn__comm_check_closed_locked(comm, "be shrunk"));
    TN_TRY(tn__comm_check_no_graphs_locked(comm, "be shrunk"));
    if (!comm->is_shrunk) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "communicator %s can not be shrunk: it has been already: shrink what came of it",
                   comm->name);
}

static int is_excluded(const int *excluded, size_t count, int rank) {
    int is_out = 0;
    for (size_t i = 0; i < count; i++)
        is_out |= excluded[i] == rank;
    return is_out;
}

static int is_left_alone(const tn_comm *comm, size_t excluded_count) {
    return excluded_count + 1 == (size_t)comm->rank_count;
}

/* NCCL refuses to shrink what has an error of its own. So a rank that is left alone joins by an id
 * of its own, and where rank 0, which keeps the ranks' store, stays, they join anew by an id from
 * it. Which way it is must be the same on all ranks, which have the list in common, and not that
 * they have seen a failure yet. */
static tn_rendezvous *store_of_shrink(const tn_comm *comm, const int *excluded, size_t count) {
    tn_rendezvous *ranks = tn__comm_watch_ranks(comm->watch);
    int is_whole = !comm->is_part && comm->engine->joins_by_id;
    if (!is_whole || is_excluded(excluded, count, 0)) return NULL;
    return ranks && ranks->store ? ranks : NULL;
}

/* The lists' order is nobody's business. */
static void write_key(const tn_comm *comm, const int *excluded, size_t count, char *key,
                      size_t key_bytes) {
    uint64_t hash = TN__HASH_BEGIN;
    for (int rank = 0; rank < comm->rank_count; rank++) {
        const unsigned char is_out = (unsigned char)is_excluded(excluded, count, rank);
        hash = tn__hash_bytes(hash, &is_out, sizeof is_out);
    }
    snprintf(key, key_bytes, "id without %016llx of %llu", (unsigned long long)hash,
             (unsigned long long)tn__comm_watch_number(comm->watch));
}

/* ranks: NULL for one that is left alone. */
static tn_status find_id(const tn_comm *comm, tn_rendezvous *ranks, const int *excluded,
                         size_t count, tn_comm_id *out) {
    size_t bytes = 0;
    char key[KEY_BYTES];
    if (!ranks) return tn_comm_id_create(out);
    write_key(comm, excluded, count, key, sizeof key);
    if (comm->rank > 0)
        return tn__store_get(ranks->store, key, comm->timeout_us, out, sizeof *out, &bytes);
    TN_TRY(tn_comm_id_create(out));
    return tn__store_set(ranks->store, key, out, sizeof *out);
}

static tn_status join_anew(tn_comm *comm, tn_rendezvous *ranks, const int *excluded, size_t count,
                           tn_comm *made) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm_id id;
    TN_TRY(find_id(comm, ranks, excluded, count, &id));
    config.device = comm->device;
    config.name = made->name;
    config.timeout_us = comm->timeout_us;
    config.id = &id;
    config.rank_count = comm->rank_count - (int)count;
    for (int rank = 0; rank < comm->rank; rank++)
        config.rank += !is_excluded(excluded, count, rank);
    if (comm->engine->expire) comm->engine->expire(comm->state, &comm->lock);
    return comm->engine->join(&config, &made->rank, &made->rank_count, &made->state);
}

static tn_status shrink_locked(tn_comm *comm, const int *excluded, size_t count, tn_comm *made) {
    TN_TRY(check_shrink_locked(comm));
    const int had_failed = comm->failure != TN_OK;
    const int is_alone = comm->engine->joins_by_id && is_left_alone(comm, count);
    tn_rendezvous *ranks = is_alone ? NULL : store_of_shrink(comm, excluded, count);
    tn_status status = is_alone || ranks
                           ? join_anew(comm, ranks, excluded, count, made)
                           : comm->engine->shrink(comm->state, excluded, (int)count, made->name,
                                                  &made->rank, &made->rank_count, &made->state);
    comm->is_shrunk = status == TN_OK;
    /* Nothing more comes of it: it is not kept for that any longer. */
    if (comm->is_shrunk && comm->engine->expire) comm->engine->expire(comm->state, &comm->lock);
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
