/* Communicators: made, waited for, failed and ended. See comm.h. */
#include "comm_watch.h"

#include <stdio.h>
#include <time.h>

#include "host_alloc.h"
#include "options.h"
#include "rendezvous.h"

enum { MICROSECONDS = 1000000, POLL_US_MAX = 1000, CALL_BYTES = 128 };
static const uint64_t DEFAULT_TIMEOUT_US = (uint64_t)600 * MICROSECONDS;

/* ---- which engine ------------------------------------------------------------------------- */

static tn_status check_mpi(const tn_comm_config *config) {
    TN_REQUIRE(!config->id && !config->nccl_comm,
               "tn_comm_config: id and nccl_comm are for NCCL, and the engine is MPI");
    TN_REQUIRE(!config->rendezvous,
               "tn_comm_config: a rendezvous is for TCP and NCCL, and the engine is MPI");
    TN_REQUIRE(config->rank == 0 && config->rank_count == 0,
               "tn_comm_config: rank %d of %d: MPI says them itself, both are 0 here", config->rank,
               config->rank_count);
    return TN_OK;
}

static tn_status check_tcp(const tn_comm_config *config, const tn_device_info *info) {
    if (info->driver != TN_DRIVER_HOST) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "the TCP engine works on host devices, not on %s; a CUDA device has NCCL",
                       info->name);
    }
    TN_REQUIRE(config->rendezvous, "tn_comm_config.rendezvous is NULL, and the engine is TCP");
    TN_REQUIRE(!config->id && !config->nccl_comm,
               "tn_comm_config: id and nccl_comm are for NCCL, and the engine is TCP");
    TN_REQUIRE(config->rank == 0 && config->rank_count == 0,
               "tn_comm_config: rank %d of %d: the rendezvous says them, both are 0 here",
               config->rank, config->rank_count);
    return TN_OK;
}

static tn_status check_nccl(const tn_comm_config *config, const tn_device_info *info) {
    int is_real = info->driver == TN_DRIVER_CUDA && !info->simulated;
    if (tn__nccl_is_for_host() ? info->driver != TN_DRIVER_HOST : !is_real) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "the NCCL engine works on real CUDA devices, not on %s; use TN_COMM_MPI",
                       info->name);
    }
    TN_REQUIRE(!!config->id + !!config->nccl_comm + !!config->rendezvous == 1,
               "tn_comm_config: NCCL takes one of an id, an nccl_comm and a rendezvous");
    if (config->id) {
        TN_REQUIRE(config->rank_count > 0 && config->rank >= 0 && config->rank < config->rank_count,
                   "tn_comm_config: rank %d of %d: with an id, a rank is 0 to rank_count - 1",
                   config->rank, config->rank_count);
    } else {
        TN_REQUIRE(config->rank == 0 && config->rank_count == 0,
                   "tn_comm_config: rank %d of %d: the nccl_comm or the rendezvous says them, both "
                   "are 0 here",
                   config->rank, config->rank_count);
    }
    return TN_OK;
}

static tn_status check_simulated(const tn_comm_config *config, const tn_device_info *info) {
    if (!info->simulated) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "the simulated engine works on simulated CUDA devices, not on %s: it moves "
                       "no data",
                       info->name);
    }
    TN_REQUIRE(
        !config->id && !config->nccl_comm && !config->rendezvous,
        "tn_comm_config: id, nccl_comm and rendezvous are for other engines, and this is the "
        "simulated one");
    TN_REQUIRE(config->rank_count > 0 && config->rank >= 0 && config->rank < config->rank_count,
               "tn_comm_config: rank %d of %d: simulated, a rank is 0 to rank_count - 1",
               config->rank, config->rank_count);
    return TN_OK;
}

static tn_comm_engine engine_of(const tn_comm_config *config, const tn_device_info *info) {
    if (config->engine != TN_COMM_AUTO) return config->engine;
    if (info->driver != TN_DRIVER_HOST && !info->simulated) return TN_COMM_NCCL;
    return config->rendezvous ? TN_COMM_TCP : TN_COMM_MPI;
}

static tn_status choose_engine(const tn_comm_config *config, const tn__comm_engine **out) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TN_TRY(tn_device_info_get(config->device, &info));
    TN_REQUIRE(!config->links || config->engine == TN_COMM_SIMULATED,
               "tn_comm_config: links are for TN_COMM_SIMULATED");
    switch (engine_of(config, &info)) {
    case TN_COMM_TCP:
        TN_TRY(check_tcp(config, &info));
        *out = tn__tcp_engine_get();
        return TN_OK;
    case TN_COMM_MPI: TN_TRY(check_mpi(config)); return tn__mpi_engine_get(out);
    case TN_COMM_SIMULATED:
        TN_TRY(check_simulated(config, &info));
        return tn__simulated_engine_get(out);
    case TN_COMM_NCCL: TN_TRY(check_nccl(config, &info)); return tn__nccl_engine_get(out);
    default:
        return TN_FAIL(TN_INVALID_ARGUMENT, "tn_comm_config.engine is %d: no such engine",
                       (int)config->engine);
    }
}

/* ---- create and destroy ------------------------------------------------------------------- */

void tn__comm_free(tn_comm *comm) {
    tn__comm_watch_end(comm->watch); /* that was made and not begun */
    tn__comm_end_agreement(comm);    /* what was on its stream has ended */
    if (comm->last) (void)comm->driver->event_destroy(comm->on, comm->last);
    if (comm->captured) (void)comm->driver->event_destroy(comm->on, comm->captured);
    tn__batch_free(&comm->list);
    pthread_mutex_destroy(&comm->lock);
    tn__host_free(comm->name);
    tn__host_free(comm);
}

tn_status tn__comm_make(const tn_comm_config *config, tn_comm **out) {
    tn_comm *comm = tn__host_alloc(1, sizeof *comm);
    if (!comm) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&comm->lock, NULL);
    comm->device = config->device;
    comm->driver = tn__device_driver(config->device);
    comm->on = tn__device_state(config->device);
    comm->timeout_us = config->timeout_us ? config->timeout_us : DEFAULT_TIMEOUT_US;
    comm->windows.trial_us = tn__comm_trial_us(comm->timeout_us);
    comm->is_shrinkable = config->shrinkable;
    comm->stats = (tn_comm_stats)TN_COMM_STATS_INIT;
    comm->name = tn__host_strdup(config->name ? config->name : "comm");
    tn_status status = comm->name ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK) status = comm->driver->event_create(comm->on, &comm->last);
    if (status != TN_OK) {
        tn__comm_free(comm);
        return status;
    }
    *out = comm;
    return TN_OK;
}

/* An id that a rendezvous hands round. */
static tn_status resolve_id(tn_comm_config *config, const tn__comm_engine *engine, tn_comm_id *id) {
    tn_rendezvous *ranks = config->rendezvous;
    if (!ranks || !engine->joins_by_id) return TN_OK;
    TN_TRY(tn__rendezvous_make_id(ranks, config->device, config->timeout_us, id));
    config->id = id;
    config->rank = tn_rendezvous_rank(ranks);
    config->rank_count = tn_rendezvous_size(ranks);
    return TN_OK;
}

tn_status tn__comm_make_watch(tn_comm *comm, tn_rendezvous *ranks) {
    if (comm->engine->has_deadlines || comm->engine->in_virtual_time) return TN_OK;
    return tn__comm_watch_make(comm, ranks, &comm->watch);
}

static tn_status start_watch(tn_comm *comm) {
    if (comm->is_shrinkable && comm->engine->keep) comm->engine->keep(comm->state, 1);
    return comm->watch ? tn__comm_watch_start(comm->watch) : TN_OK;
}

tn_status tn__comm_begin_watch(tn_comm *comm, tn_rendezvous *ranks) {
    tn__saved_error saved;
    tn_status status = comm->watch ? TN_OK : tn__comm_make_watch(comm, ranks);
    if (status == TN_OK) status = start_watch(comm);
    if (status == TN_OK) return TN_OK;
    tn__error_save(&saved);
    comm->engine->abort(comm->state);
    comm->engine->leave(comm->state);
    comm->state = NULL;
    tn__error_restore(&saved);
    return status;
}

tn_status tn__comm_create(const tn_comm_config *config, const tn__comm_engine *engine,
                          tn_comm **out) {
    tn_comm_id id;
    tn_comm *comm;
    TN_TRY(tn__comm_make(config, &comm));
    tn_comm_config resolved = *config;
    resolved.name = comm->name;
    resolved.timeout_us = comm->timeout_us;
    comm->engine = engine;
    /* So that ranks can say what they have failed with, also for want of memory. */
    tn_status status = engine->split_prepare ? tn__comm_prepare_agreement(comm) : TN_OK;
    if (status == TN_OK) status = resolve_id(&resolved, engine, &id);
    if (status == TN_OK)
        status = engine->join(&resolved, &comm->rank, &comm->rank_count, &comm->state);
    if (status == TN_OK) status = tn__comm_begin_watch(comm, config->rendezvous);
    if (status != TN_OK) {
        tn__comm_free(comm);
        return status;
    }
    tn__device_retain(comm->device);
    *out = comm;
    return TN_OK;
}

tn_status tn_comm_create(const tn_comm_config *config, tn_comm **out) {
    TN_REQUIRE(config && out, "tn_comm_create: config and out are needed");
    TN_REQUIRE(config->size == sizeof *config,
               "tn_comm_config.size is %zu, not %zu: begin with TN_COMM_CONFIG_INIT", config->size,
               sizeof *config);
    TN_REQUIRE(config->device, "tn_comm_config.device is NULL");
    const tn__comm_engine *engine;
    TN_TRY(choose_engine(config, &engine));
    return tn__comm_create(config, engine, out);
}

static tn_status check_end(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = tn__comm_check_no_graphs_locked(comm, "be destroyed");
    pthread_mutex_unlock(&comm->lock);
    return status;
}

tn_status tn_comm_destroy(tn_comm *comm) {
    if (!comm || tn__driver_is_gone()) return TN_OK;
    tn_device *device = comm->device;
    TN_TRY(check_end(comm));
    tn_status status = tn_comm_wait(comm);
    tn__saved_error waited;
    tn__error_save(&waited);
    tn__comm_watch_end(comm->watch);
    comm->watch = NULL;
    tn__comm_end_registrations(comm);
    tn__error_restore(&waited);
    comm->engine->leave(comm->state);
    tn__saved_error saved;
    tn__error_save(&saved);
    tn__comm_free(comm);
    tn__error_restore(&saved);
    tn__device_release(device);
    return status;
}

/* ---- failure and waiting ------------------------------------------------------------------- */

/* What it was doing, to standard error. Allocates nothing. */
static void print_flight(const tn_comm *comm) {
    char text[12 * 1024];
    tn__text out = tn__text_begin(text, sizeof text);
    tn__flight_write_text(&comm->flight, &out);
    fprintf(stderr, "tenure: %s\ntenure: the last collectives of communicator %s:\n%s",
            comm->failure_text.text, comm->name, text);
}

void tn__comm_look_done_locked(tn_comm *comm) {
    int is_done = 0;
    if (comm->has_last && comm->driver->event_is_done(comm->on, comm->last, &is_done) == TN_OK &&
        is_done)
        comm->flight.done = comm->flight.put;
}

/* What is no failure of the ranks, but of the driver, is one of the communicator all the same. */
static tn_status fail_for_good(const tn_comm *comm) {
    tn__saved_error saved;
    tn__error_save(&saved);
    return TN_FAIL_NATIVE(TN_COMM_ERROR, saved.native, "communicator %s, rank %d of %d: %s",
                          comm->name, comm->rank, comm->rank_count, saved.text);
}

tn_status tn__comm_fail_locked(tn_comm *comm, tn_status status) {
    TN_ASSERT(comm->failure == TN_OK);
    TN_ASSERT(status != TN_OK);
    if (status != TN_COMM_ERROR && status != TN_COMM_TIMEOUT) status = fail_for_good(comm);
    comm->failure = status;
    tn__error_save(&comm->failure_text);
    comm->engine->abort(comm->state);
    if (tn__options_get()->verbose) print_flight(comm);
    tn__error_restore(&comm->failure_text);
    return status;
}

tn_status tn__comm_check_locked(tn_comm *comm) {
    if (comm->failure != TN_OK) {
        tn__error_restore(&comm->failure_text);
        return comm->failure;
    }
    tn_status status = comm->engine->check(comm->state);
    return status == TN_OK ? TN_OK : tn__comm_fail_locked(comm, status);
}

tn_status tn__comm_settle_failure_locked(tn_comm *comm, tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    if (tn__comm_check_locked(comm) != TN_OK) return comm->failure;
    tn__error_restore(&saved);
    return status;
}

/* On this rank and all others, in the words `call` and `why`. The last error stays. */
static void give_up(tn_comm *comm, const char *call, const char *why) {
    tn__saved_error saved;
    tn__error_save(&saved);
    pthread_mutex_lock(&comm->lock);
    if (comm->failure == TN_OK) {
        const tn_status status =
            TN_FAIL(TN_COMM_ERROR, "communicator %s, rank %d of %d: given up: %s%s", comm->name,
                    comm->rank, comm->rank_count, call, why);
        (void)tn__comm_fail_locked(comm, status);
    }
    pthread_mutex_unlock(&comm->lock);
    tn__error_restore(&saved);
}

void tn_comm_abort(tn_comm *comm, const char *why) {
    if (!comm || tn__driver_is_gone()) return;
    give_up(comm, "", why ? why : "tn_comm_abort was called");
}

uint64_t tn__comm_puts(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    const uint64_t puts = comm->flight.put;
    pthread_mutex_unlock(&comm->lock);
    return puts;
}

tn_status tn__comm_end_call(tn_comm *comm, const char *call, uint64_t puts_before,
                            tn_status status) {
    char where[CALL_BYTES];
    if (status == TN_OK || comm->rank_count == 1) return status;
    if (tn__comm_puts(comm) == puts_before) return status;
    (void)snprintf(where, sizeof where, "%s, behind a collective: ", call);
    give_up(comm, where, tn_error_last());
    return status;
}

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * MICROSECONDS + (uint64_t)now.tv_nsec / 1000;
}

/* An engine that has deadlines of its own knows who is missing: it gets the time to say so. */
static uint64_t patience_us(const tn_comm *comm) {
    int is_doubled = comm->engine->has_deadlines && comm->timeout_us <= UINT64_MAX / 2;
    return is_doubled ? 2 * comm->timeout_us : comm->timeout_us;
}

static tn_status wait_is_over(const tn_comm *comm) {
    return TN_FAIL(TN_COMM_TIMEOUT,
                   "communicator %s, rank %d of %d: its collectives were not done %g s after the "
                   "wait for them began",
                   comm->name, comm->rank, comm->rank_count,
                   (double)patience_us(comm) / MICROSECONDS);
}

static tn_status look_locked(tn_comm *comm, uint64_t start_us, int *is_done) {
    *is_done = !comm->has_last;
    TN_TRY(tn__comm_check_locked(comm));
    if (!*is_done) TN_TRY(comm->driver->event_is_done(comm->on, comm->last, is_done));
    /* What the last collective met was not known at the check above if it ended after that. */
    if (*is_done) return tn__comm_check_locked(comm);
    return now_us() - start_us < patience_us(comm) ? TN_OK : wait_is_over(comm);
}

/* One look: *is_over once all is done, or failed, or the time is up. */
static tn_status look(tn_comm *comm, uint64_t start_us, int *is_over) {
    int is_done;
    pthread_mutex_lock(&comm->lock);
    tn_status status = look_locked(comm, start_us, &is_done);
    if (status != TN_OK && comm->failure == TN_OK) status = tn__comm_fail_locked(comm, status);
    pthread_mutex_unlock(&comm->lock);
    *is_over = is_done || status != TN_OK;
    return status;
}

/* For an engine in virtual time: time goes on to the end of the last collective. */
static tn_status pass_time(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_status status = comm->has_last && comm->failure == TN_OK
                           ? comm->driver->event_synchronize(comm->on, comm->last)
                           : TN_OK;
    pthread_mutex_unlock(&comm->lock);
    return status;
}

tn_status tn_comm_wait(tn_comm *comm) {
    TN_REQUIRE(comm, "tn_comm_wait: comm is NULL");
    uint64_t start_us = now_us();
    long pause_us = 10;
    int is_over = 0;
    if (comm->engine->in_virtual_time) TN_TRY(pass_time(comm));
    tn_status status = look(comm, start_us, &is_over);
    while (!is_over) {
        struct timespec pause = {0, pause_us * 1000};
        nanosleep(&pause, NULL);
        if (pause_us < POLL_US_MAX) pause_us *= 2;
        status = look(comm, start_us, &is_over);
    }
    return status;
}

/* ---- what it is ---------------------------------------------------------------------------- */

int tn_comm_rank(const tn_comm *comm) { return comm ? comm->rank : -1; }

int tn_comm_size(const tn_comm *comm) { return comm ? comm->rank_count : 0; }

const char *tn_comm_name(const tn_comm *comm) { return comm ? comm->name : ""; }

const char *tn_comm_engine_name(const tn_comm *comm) { return comm ? comm->engine->name : ""; }

tn_status tn_comm_stats_get(tn_comm *comm, tn_comm_stats *out) {
    TN_REQUIRE(comm, "tn_comm_stats_get: comm is NULL");
    TN_REQUIRE(out && out->size == sizeof *out, "tn_comm_stats_get: begin with TN_COMM_STATS_INIT");
    pthread_mutex_lock(&comm->lock);
    *out = comm->stats;
    pthread_mutex_unlock(&comm->lock);
    return TN_OK;
}
