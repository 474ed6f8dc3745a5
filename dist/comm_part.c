/* Communicators of some of another one's ranks: sub-groups, and what is left after ranks are
 * lost. */
#include "comm_watch.h"

#include <stdio.h>

#include "host_alloc.h"

enum { KEY_BYTES = 96, LOOK_US = 1 };

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
    if (made && made->state) comm->engine->leave(made->state);
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

/* All that takes memory of this rank's. */
static tn_status prepare(tn_comm *comm, tn_comm *made, tn_rendezvous *ranks, int is_watched) {
    made->engine = comm->engine;
    made->is_part = 1;
    TN_TRY(tn__comm_prepare_agreement(made));
    if (is_watched) TN_TRY(tn__comm_make_watch(made, ranks));
    pthread_mutex_lock(&comm->lock);
    tn_status status = comm->engine->split_prepare(comm->state, &made->state);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* For an engine whose ranks can not tell the others within its own call. */
static tn_status agree(tn_comm *comm, tn_status mine) {
    tn_status theirs = TN_OK;
    int failed = -1;
    tn__saved_error saved;
    tn__error_save(&saved);
    TN_TRY(tn__comm_agree(comm, mine, &failed, &theirs));
    if (mine != TN_OK) tn__error_restore(&saved);
    if (mine != TN_OK || failed < 0) return mine;
    return TN_FAIL(theirs, "communicator %s was not split: rank %d failed with %s", comm->name,
                   failed, tn_status_text(theirs));
}

static tn_status check_split(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = check_split_locked(comm);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* Of the configuration only name and timeout are asked for. */
static tn_status split(tn_comm *comm, int color, int key, const tn_comm_config *config,
                       int is_watched, tn_comm **out) {
    tn_rendezvous *ranks = is_watched ? tn__comm_watch_ranks(comm->watch) : NULL;
    const int agrees = comm->engine->split_prepare != NULL;
    tn_comm *made = NULL;
    if (comm->engine->splits_when_idle) TN_TRY(tn_comm_wait(comm));
    if (agrees) TN_TRY(check_split(comm));
    tn_status status = tn__comm_make(config, &made);
    if (agrees && status == TN_OK) status = prepare(comm, made, ranks, is_watched);
    if (agrees) status = agree(comm, status);
    if (agrees && status != TN_OK) return finish(comm, made, status, ranks, is_watched, out);
    pthread_mutex_lock(&comm->lock);
    status = split_locked(comm, color, key, made, status);
    pthread_mutex_unlock(&comm->lock);
    return finish(comm, made, status, ranks, is_watched, out);
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

/* ---- the id of a shrunk one ----------------------------------------------------------------- */

/* A shrink that has failed may be made again with the same list, and ranks give up at different
 * moments: an id that was put for an attempt that is over is nobody's. So each rank but 0 asks for
 * one with a number that counts its attempts, and takes back what was not answered in time; rank 0
 * answers what is being asked. The store has each key once, so that it tells what has been. */
typedef struct id_question {
    tn_comm *comm;
    tn__store *store;
    uint64_t list; /* of the ranks that are left out, in whichever order they were given */
} id_question;

typedef enum id_key { ID_ASKED, ID_TAKEN_BACK, ID_ANSWERED } id_key;

static id_question question_of(tn_comm *comm, tn_rendezvous *ranks, const int *excluded,
                               size_t count) {
    id_question question = {.comm = comm, .store = ranks->store, .list = TN__HASH_BEGIN};
    for (int rank = 0; rank < comm->rank_count; rank++) {
        const unsigned char is_out = (unsigned char)is_excluded(excluded, count, rank);
        question.list = tn__hash_bytes(question.list, &is_out, sizeof is_out);
    }
    return question;
}

static void write_key(const id_question *question, id_key what, int rank, uint64_t attempt,
                      char *key, size_t key_bytes) {
    snprintf(key, key_bytes, "id %d without %016llx of %llu, rank %d, %llu", (int)what,
             (unsigned long long)question->list,
             (unsigned long long)tn__comm_watch_number(question->comm->watch), rank,
             (unsigned long long)attempt);
}

static tn_status put(const id_question *question, id_key what, int rank, uint64_t attempt,
                     const void *value, size_t bytes) {
    char key[KEY_BYTES];
    write_key(question, what, rank, attempt, key, sizeof key);
    return tn__store_set(question->store, key, value, bytes);
}

static tn_status await(const id_question *question, id_key what, int rank, uint64_t attempt,
                       uint64_t timeout_us, tn_comm_id *id) {
    size_t bytes = 0;
    char key[KEY_BYTES];
    write_key(question, what, rank, attempt, key, sizeof key);
    return tn__store_get(question->store, key, timeout_us, id, id ? sizeof *id : 0, &bytes);
}

static tn_status look_for(const id_question *question, id_key what, int rank, uint64_t attempt,
                          int *is_there) {
    tn__error_scope_begin();
    tn_status status = await(question, what, rank, attempt, LOOK_US, NULL);
    *is_there = status == TN_OK;
    return tn__error_scope_end(status == TN_COMM_TIMEOUT ? TN_OK : status);
}

static tn_status receive_id(const id_question *question, tn_comm_id *out) {
    const tn_comm *comm = question->comm;
    uint64_t attempt = 0;
    int is_there = 1;
    while (is_there)
        TN_TRY(look_for(question, ID_ASKED, comm->rank, ++attempt, &is_there));
    TN_TRY(put(question, ID_ASKED, comm->rank, attempt, NULL, 0));
    tn_status status = await(question, ID_ANSWERED, comm->rank, attempt, comm->timeout_us, out);
    if (status == TN_OK) return TN_OK;
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)put(question, ID_TAKEN_BACK, comm->rank, attempt, NULL, 0);
    tn__error_restore(&saved);
    return status;
}

/* The number by which the rank is asking, once it is. */
static tn_status await_question(const id_question *question, int rank, uint64_t start_us,
                                uint64_t *out) {
    const uint64_t timeout_us = question->comm->timeout_us;
    uint64_t attempt = 0, spent_us = 0;
    int is_over = 1;
    while (is_over) {
        attempt++;
        spent_us = tn__flight_now_us() - start_us;
        if (spent_us >= timeout_us) spent_us = timeout_us - LOOK_US;
        TN_TRY(await(question, ID_ASKED, rank, attempt, timeout_us - spent_us, NULL));
        TN_TRY(look_for(question, ID_TAKEN_BACK, rank, attempt, &is_over));
        if (!is_over) TN_TRY(look_for(question, ID_ANSWERED, rank, attempt, &is_over));
    }
    *out = attempt;
    return TN_OK;
}

/* All of them ask before one is answered, so that a rank that does not come leaves no id. */
static tn_status answer(const id_question *question, uint64_t *attempts, const tn_comm_id *id) {
    const int count = question->comm->rank_count;
    for (int rank = 1; rank < count; rank++)
        if (attempts[rank])
            TN_TRY(put(question, ID_ANSWERED, rank, attempts[rank], id, sizeof *id));
    return TN_OK;
}

static tn_status hand_out_id(const id_question *question, const int *excluded, size_t count,
                             tn_comm_id *out) {
    const int ranks = question->comm->rank_count;
    const uint64_t start_us = tn__flight_now_us();
    uint64_t *attempts = tn__host_alloc((size_t)ranks, sizeof *attempts);
    if (!attempts) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = TN_OK;
    for (int rank = 1; rank < ranks && status == TN_OK; rank++)
        if (!is_excluded(excluded, count, rank))
            status = await_question(question, rank, start_us, &attempts[rank]);
    if (status == TN_OK) status = tn_comm_id_create(out);
    if (status == TN_OK) status = answer(question, attempts, out);
    tn__host_free(attempts);
    return status;
}

/* ---- joining anew --------------------------------------------------------------------------- */

static tn_status join_by(tn_comm *comm, const tn_comm_id *id, const int *excluded, size_t count,
                         tn_comm *made) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    config.device = comm->device;
    config.name = made->name;
    config.timeout_us = comm->timeout_us;
    config.id = id;
    config.rank_count = comm->rank_count - (int)count;
    for (int rank = 0; rank < comm->rank; rank++)
        config.rank += !is_excluded(excluded, count, rank);
    if (comm->engine->expire) comm->engine->expire(comm->state, &comm->lock);
    return comm->engine->join(&config, &made->rank, &made->rank_count, &made->state);
}

static tn_status join_alone(tn_comm *comm, const int *excluded, size_t count, tn_comm *made) {
    tn_comm_id id;
    TN_TRY(tn_comm_id_create(&id));
    return join_by(comm, &id, excluded, count, made);
}

static tn_status join_anew(tn_comm *comm, tn_rendezvous *ranks, const int *excluded, size_t count,
                           tn_comm *made) {
    const id_question question = question_of(comm, ranks, excluded, count);
    tn_comm_id id;
    tn_status status =
        comm->rank > 0 ? receive_id(&question, &id) : hand_out_id(&question, excluded, count, &id);
    return status == TN_OK ? join_by(comm, &id, excluded, count, made) : status;
}

static tn_status shrink_locked(tn_comm *comm, const int *excluded, size_t count, tn_comm *made) {
    TN_TRY(check_shrink_locked(comm));
    const int had_failed = comm->failure != TN_OK;
    const int is_alone = comm->engine->joins_by_id && is_left_alone(comm, count);
    tn_rendezvous *ranks = is_alone ? NULL : store_of_shrink(comm, excluded, count);
    tn_status status = is_alone ? join_alone(comm, excluded, count, made)
                       : ranks  ? join_anew(comm, ranks, excluded, count, made)
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
    made->engine = comm->engine;
    /* As tn__comm_create does: what is made may be split. */
    tn_status status = comm->engine->split_prepare ? tn__comm_prepare_agreement(made) : TN_OK;
    if (status == TN_OK) {
        pthread_mutex_lock(&comm->lock);
        status = shrink_locked(comm, excluded, excluded_count, made);
        pthread_mutex_unlock(&comm->lock);
    }
    /* The rendezvous has, or may yet have, news of those who are left out, which is none here. */
    return finish(comm, made, status, NULL, 1, out);
}
