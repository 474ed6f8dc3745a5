/* The watch over a communicator: see comm_watch.h. */
#include "comm_watch.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "host_alloc.h"
#include "options.h"

enum {
    WATCH_SLOTS = 32, /* collectives that are under watch at a time */
    TICK_US_MIN = 5000,
    TICK_US_MAX = 100000,
    TICKS = 20, /* of a timeout */
    US_PER_S = 1000000,
    KEY_BYTES = 64
};

typedef struct watched_op {
    tn__event begun;
    tn__event done;
    uint64_t sequence; /* 0: the place is free */
    uint64_t begun_us; /* when it was first seen to have begun; 0: not yet */
    char name[48];
} watched_op;

struct tn__comm_watch {
    tn_comm *comm;
    tn_rendezvous *ranks;
    uint64_t tick_us;         /* between two looks */
    uint64_t number;          /* of the communicator among the rendezvous' */
    uint64_t meetings;        /* of the check of collectives */
    tn__flow_header *headers; /* by rank; NULL: collectives are not checked */
    watched_op ops[WATCH_SLOTS];
    watched_op *putting; /* between before and after */

    pthread_t thread;
    int is_started;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int is_ending; /* under lock */
};

/* ---- the events ----------------------------------------------------------------------------- */

/* Looks how far a collective is. */
static tn_status look_at(tn__comm_watch *watch, watched_op *op) {
    tn_comm *comm = watch->comm;
    int is_done = 0;
    TN_TRY(comm->driver->event_is_done(comm->on, op->done, &is_done));
    if (is_done) {
        if (comm->flight.done < op->sequence) comm->flight.done = op->sequence;
        op->sequence = 0;
        return TN_OK;
    }
    if (op->begun_us) return TN_OK;
    TN_TRY(comm->driver->event_is_done(comm->on, op->begun, &is_done));
    if (is_done) op->begun_us = tn__flight_now_us();
    return TN_OK;
}

static tn_status is_overdue(const tn_comm *comm, const watched_op *op) {
    if (!op->sequence || !op->begun_us) return TN_OK;
    if (tn__flight_now_us() - op->begun_us < comm->timeout_us) return TN_OK;
    return TN_FAIL(TN_COMM_TIMEOUT,
                   "communicator %s, rank %d of %d: %s has not ended %g s after its stream came to "
                   "it: a rank has not come to it, or calls something else",
                   comm->name, comm->rank, comm->rank_count, op->name,
                   (double)comm->timeout_us / US_PER_S);
}

/* The oldest is what the others wait for. */
static tn_status look_at_all(tn__comm_watch *watch) {
    const watched_op *oldest = NULL;
    for (size_t i = 0; i < WATCH_SLOTS; i++) {
        watched_op *op = &watch->ops[i];
        if (op->sequence) TN_TRY(look_at(watch, op));
        if (op->sequence && (!oldest || op->sequence < oldest->sequence)) oldest = op;
    }
    return oldest ? is_overdue(watch->comm, oldest) : TN_OK;
}

/* ---- the thread ----------------------------------------------------------------------------- */

static uint64_t tick_of(uint64_t timeout_us) {
    uint64_t tick = timeout_us / TICKS;
    if (tick < TICK_US_MIN) tick = TICK_US_MIN;
    return tick > TICK_US_MAX ? TICK_US_MAX : tick;
}

/* Copies the failure's text, if there is one: its status. */
static tn_status look_once(tn__comm_watch *watch, tn__saved_error *text) {
    tn_comm *comm = watch->comm;
    pthread_mutex_lock(&comm->lock);
    tn_status status = tn__comm_check_locked(comm);
    if (status == TN_OK) {
        status = look_at_all(watch);
        if (tn__driver_is_gone()) status = TN_OK;
        if (status != TN_OK) (void)tn__comm_fail_locked(comm, status);
    }
    if (status != TN_OK) *text = comm->failure_text;
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static void fail_as_told(tn__comm_watch *watch, const char *text) {
    tn_comm *comm = watch->comm;
    pthread_mutex_lock(&comm->lock);
    if (comm->failure == TN_OK) {
        tn_status status =
            TN_FAIL(TN_COMM_ERROR, "communicator %s, rank %d of %d: another one failed: %s",
                    comm->name, comm->rank, comm->rank_count, text);
        (void)tn__comm_fail_locked(comm, status);
    }
    pthread_mutex_unlock(&comm->lock);
}

/* Once the process or the driver ends, no answer is no failure, and NCCL is not called any more. */
static int is_ending(tn__comm_watch *watch) {
    pthread_mutex_lock(&watch->lock);
    int ending = watch->is_ending || tn__driver_is_gone();
    pthread_mutex_unlock(&watch->lock);
    return ending;
}

static void wait_a_tick(tn__comm_watch *watch) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + watch->tick_us * 1000;
    until.tv_sec += (time_t)(ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    pthread_mutex_lock(&watch->lock);
    if (!watch->is_ending) pthread_cond_timedwait(&watch->ended, &watch->lock, &until);
    pthread_mutex_unlock(&watch->lock);
}

/* Waits for the next look; if somebody has published a failure meanwhile, it is ours. */
static void listen(tn__comm_watch *watch) {
    char text[TN__STORE_VALUE_MAX + 1];
    size_t bytes = 0;
    tn__store *store = watch->ranks ? watch->ranks->channel : NULL;
    tn_status status =
        store ? tn__store_get(store, TN__FAILED_KEY, watch->tick_us, text, sizeof text - 1, &bytes)
              : TN_COMM_ERROR;
    if (status == TN_OK) {
        text[bytes < sizeof text - 1 ? bytes : sizeof text - 1] = 0;
        if (!is_ending(watch)) fail_as_told(watch, text);
    } else if (store && tn__store_end_get(store) == TN__STORE_DIED) {
        if (!is_ending(watch)) fail_as_told(watch, "rank 0 is gone: its process has ended");
    } else if (status != TN_COMM_TIMEOUT) {
        wait_a_tick(watch); /* no store, or rank 0 has left: that is no failure of NCCL's */
    }
}

/* The first one to publish is heard. */
static void publish(const tn__comm_watch *watch, const tn__saved_error *text) {
    tn__store *store = watch->ranks ? watch->ranks->channel : NULL;
    if (store) (void)tn__store_set(store, TN__FAILED_KEY, text->text, strlen(text->text));
}

/* What has failed meanwhile, whoever noticed it. */
static tn_status failure_of(tn__comm_watch *watch, tn__saved_error *text) {
    tn_comm *comm = watch->comm;
    pthread_mutex_lock(&comm->lock);
    tn_status status = comm->failure;
    if (status != TN_OK) *text = comm->failure_text;
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* What was kept to be shrunk is kept for as long as a collective may take; what is in graphs not
 * any longer than till here. */
static void expire(tn__comm_watch *watch) {
    tn_comm *comm = watch->comm;
    uint64_t begin_us = tn__flight_now_us();
    if (!comm->engine->expire) return;
    while (comm->is_shrinkable && !is_ending(watch) &&
           tn__flight_now_us() - begin_us < comm->timeout_us)
        wait_a_tick(watch);
    pthread_mutex_lock(&comm->lock);
    if (!tn__driver_is_gone()) comm->engine->expire(comm->state, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

static void *run(void *argument) {
    tn__comm_watch *watch = argument;
    tn__saved_error text;
    tn_status status = look_once(watch, &text);
    while (status == TN_OK && !is_ending(watch)) {
        listen(watch);
        if (!is_ending(watch)) status = look_once(watch, &text);
    }
    /* A communicator that has failed and is destroyed at once: the others hear of that, too. */
    if (status == TN_OK) status = failure_of(watch, &text);
    if (status != TN_OK) publish(watch, &text);
    if (status != TN_OK) expire(watch);
    return NULL;
}

/* ---- the check of collectives --------------------------------------------------------------- */

/* A meeting where all ranks say the same as this one, or it fails. */
static tn_status compare(tn__comm_watch *watch, const tn__flow_header *mine) {
    const tn_comm *comm = watch->comm;
    char key[KEY_BYTES];
    snprintf(key, sizeof key, "collective %llu of %llu", (unsigned long long)watch->meetings,
             (unsigned long long)watch->number);
    TN_TRY(tn__store_gather(watch->ranks->store, key, mine, sizeof *mine, watch->headers,
                            comm->timeout_us));
    for (int rank = 0; rank < comm->rank_count; rank++)
        TN_TRY(tn__flow_check_alike(comm->name, comm->rank, mine, rank, &watch->headers[rank]));
    return TN_OK;
}

static tn_status compare_plan(tn__comm_watch *watch, tn__flow_plan *plan) {
    tn__flow_number(plan, &watch->meetings);
    return compare(watch, &plan->headers[watch->comm->rank]);
}

tn_status tn__comm_watch_compare(tn__comm_watch *watch, const tn__batch *batch, int is_captured) {
    tn__flow_plan *plan;
    if (!watch || !watch->headers) return TN_OK;
    tn_comm *comm = watch->comm;
    TN_TRY(tn__flow_plan_make(comm->rank, comm->rank_count, batch, &plan));
    plan->headers[comm->rank].is_captured = is_captured != 0;
    /* Messages alone concern some ranks only, and the others would not come to a meeting. */
    tn_status status = plan->is_for_all ? compare_plan(watch, plan) : TN_OK;
    tn__host_free(plan);
    return status == TN_OK ? TN_OK : tn__comm_fail_locked(comm, status);
}

tn_status tn__comm_watch_compare_header(tn__comm_watch *watch, tn__flow_header header) {
    if (!watch || !watch->headers) return TN_OK;
    header.sequence = ++watch->meetings;
    tn_status status = compare(watch, &header);
    return status == TN_OK ? TN_OK : tn__comm_fail_locked(watch->comm, status);
}

/* ---- around what is put --------------------------------------------------------------------- */

tn_status tn__comm_watch_before(tn__comm_watch *watch, tn_stream stream) {
    if (!watch) return TN_OK;
    tn_comm *comm = watch->comm;
    watched_op *op = &watch->ops[(comm->flight.put + 1) % WATCH_SLOTS];
    /* Where more are queued than are watched, those that come are watched later. */
    if (op->sequence) TN_TRY(look_at(watch, op));
    if (op->sequence) return TN_OK;
    TN_TRY(comm->driver->event_record(comm->on, op->begun, stream));
    watch->putting = op;
    return TN_OK;
}

tn_status tn__comm_watch_after(tn__comm_watch *watch, uint64_t sequence, tn_stream stream) {
    if (!watch || !watch->putting) return TN_OK;
    tn_comm *comm = watch->comm;
    watched_op *op = watch->putting;
    watch->putting = NULL;
    if (!sequence) return TN_OK; /* it was not put */
    TN_TRY(comm->driver->event_record(comm->on, op->done, stream));
    op->begun_us = 0;
    op->sequence = sequence;
    tn__flight_name(&comm->flight.ops[sequence % TN__FLIGHT_OPS], op->name, sizeof op->name);
    return TN_OK;
}

/* ---- begin and end -------------------------------------------------------------------------- */

static void free_watch(tn__comm_watch *watch) {
    tn_comm *comm = watch->comm;
    for (size_t i = 0; i < WATCH_SLOTS; i++) {
        if (watch->ops[i].begun) (void)comm->driver->event_destroy(comm->on, watch->ops[i].begun);
        if (watch->ops[i].done) (void)comm->driver->event_destroy(comm->on, watch->ops[i].done);
    }
    if (watch->ranks) tn__rendezvous_release(watch->ranks);
    pthread_cond_destroy(&watch->ended);
    pthread_mutex_destroy(&watch->lock);
    tn__host_free(watch->headers);
    tn__host_free(watch);
}

static tn_status make_events(tn__comm_watch *watch) {
    const tn_comm *comm = watch->comm;
    for (size_t i = 0; i < WATCH_SLOTS; i++) {
        TN_TRY(comm->driver->event_create(comm->on, &watch->ops[i].begun));
        TN_TRY(comm->driver->event_create(comm->on, &watch->ops[i].done));
    }
    return TN_OK;
}

/* Collectives are checked where all ranks of the rendezvous make them. */
static tn_status use_rendezvous(tn__comm_watch *watch, tn_rendezvous *ranks) {
    if (!ranks) return TN_OK;
    tn__rendezvous_retain(ranks);
    watch->ranks = ranks;
    watch->number = ranks->meetings; /* the same on all ranks: they have just met */
    if (!ranks->store) return TN_OK;
    TN_TRY(tn__rendezvous_open_channel(ranks));
    int has_all = watch->comm->rank_count == ranks->place.rank_count;
    if (!tn__options_get()->check_collectives || watch->comm->is_part || !has_all) return TN_OK;
    watch->headers = tn__host_alloc((size_t)watch->comm->rank_count, sizeof *watch->headers);
    return watch->headers ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

/* The program's signals are for its own threads. */
tn_status tn__comm_watch_start(tn__comm_watch *watch) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&watch->thread, NULL, run, watch);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return TN_FAIL_NATIVE(TN_OUT_OF_HOST_MEMORY, code, "no thread to watch a communicator");
    pthread_setname_np(watch->thread, "tenure-watch");
    watch->is_started = 1;
    return TN_OK;
}

/* The time of day may be set while somebody waits. */
static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

tn_status tn__comm_watch_make(tn_comm *comm, tn_rendezvous *ranks, tn__comm_watch **out) {
    tn__comm_watch *watch = tn__host_alloc(1, sizeof *watch);
    if (!watch) return TN_OUT_OF_HOST_MEMORY;
    watch->comm = comm;
    watch->tick_us = tick_of(comm->timeout_us);
    pthread_mutex_init(&watch->lock, NULL);
    init_condition(&watch->ended);
    tn_status status = make_events(watch);
    if (status == TN_OK) status = use_rendezvous(watch, ranks);
    if (status != TN_OK) {
        tn__saved_error saved;
        tn__error_save(&saved);
        free_watch(watch);
        tn__error_restore(&saved);
        return status;
    }
    *out = watch;
    return TN_OK;
}

tn_rendezvous *tn__comm_watch_ranks(const tn__comm_watch *watch) {
    return watch ? watch->ranks : NULL;
}

uint64_t tn__comm_watch_number(const tn__comm_watch *watch) { return watch->number; }

void tn__comm_watch_end(tn__comm_watch *watch) {
    if (!watch) return;
    pthread_mutex_lock(&watch->lock);
    watch->is_ending = 1;
    pthread_cond_signal(&watch->ended);
    pthread_mutex_unlock(&watch->lock);
    if (watch->is_started) pthread_join(watch->thread, NULL);
    free_watch(watch);
}
