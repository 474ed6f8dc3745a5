/* Registered memory: one record of each, with its kind, so that it ends by the call that fits.
 *
 * Invariants, under the communicator's lock: its records are in a list in the order in which they
 * were made; nothing of the communicator is on a stream while one is made or ended.
 */
#include <string.h>
#include <time.h>

#include "comm_watch.h"
#include "host_alloc.h"
#include "tenure_registration.h"

enum { NS_PER_US = 1000, US_PER_S = 1000000 };

struct tn_registration {
    tn_registration *next;
    tn_comm *comm;
    void *handle;    /* the engine's */
    uint64_t number; /* of the communicator's, from 1: the same on all ranks */
    tn_registration_info info;
};

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * US_PER_S + (uint64_t)now.tv_nsec / NS_PER_US;
}

/* ---- registering ---------------------------------------------------------------------------- */

static void append_locked(tn_registration *record) {
    tn_registration **at = &record->comm->registrations;
    while (*at)
        at = &(*at)->next;
    *at = record;
}

static tn_status check_locked(tn_comm *comm) {
    TN_TRY(tn__comm_check_locked(comm));
    return tn__comm_check_closed_locked(comm, "register memory");
}

/* With TENURE_CHECK_COLLECTIVES: all ranks register, or end, the same. */
static tn_status compare_locked(const tn_registration *record, int kind) {
    const tn__flow_header header = {.kind = kind,
                                    .root = record->info.kind == TN_REGISTER_WINDOW,
                                    .count = record->info.bytes,
                                    .hash = record->number};
    return tn__comm_watch_compare_header(record->comm->watch, header);
}

static tn_status begin_register(tn_registration *record) {
    tn_comm *comm = record->comm;
    pthread_mutex_lock(&comm->lock);
    tn_status status = check_locked(comm);
    if (status == TN_OK) {
        record->number = ++comm->registration_count;
        status = compare_locked(record, TN__FLOW_REGISTER);
    }
    pthread_mutex_unlock(&comm->lock);
    if (status != TN_OK || record->info.kind != TN_REGISTER_WINDOW) return status;
    return tn__comm_check_window(comm, record->info.address, record->info.bytes);
}

static tn_status register_locked(tn_registration *record) {
    tn_comm *comm = record->comm;
    TN_TRY(check_locked(comm));
    uint64_t start_us = now_us();
    TN_TRY(comm->engine->enroll(comm->state, record->info.address, record->info.bytes,
                                record->info.kind == TN_REGISTER_WINDOW, &record->handle));
    record->info.register_us = now_us() - start_us;
    append_locked(record);
    return TN_OK;
}

static tn_status do_register(tn_registration *record) {
    TN_TRY(begin_register(record));
    pthread_mutex_lock(&record->comm->lock);
    tn_status status = register_locked(record);
    pthread_mutex_unlock(&record->comm->lock);
    return status;
}

/* ---- its record ----------------------------------------------------------------------------- */

tn_status tn__comm_prepare_registration(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    if (!comm->spare) comm->spare = tn__host_alloc(1, sizeof *comm->spare);
    tn_status status = comm->spare ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static tn_registration *take_record(tn_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tn_registration *record = comm->spare;
    comm->spare = NULL;
    pthread_mutex_unlock(&comm->lock);
    return record ? record : tn__host_alloc(1, sizeof *record);
}

/* For the next one, which so needs no memory. */
static void give_record(tn_comm *comm, tn_registration *record) {
    pthread_mutex_lock(&comm->lock);
    if (!comm->spare) {
        memset(record, 0, sizeof *record);
        comm->spare = record;
        record = NULL;
    }
    pthread_mutex_unlock(&comm->lock);
    tn__host_free(record);
}

/* ---- registering, for callers --------------------------------------------------------------- */

static tn_status check_engine(const tn_comm *comm) {
    if (comm->engine->enroll) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "communicator %s: the engine %s registers no memory, NCCL does",
                   comm->name, comm->engine->name);
}

tn_status tn_comm_register(tn_comm *comm, void *address, size_t bytes, tn_registration_kind kind,
                           tn_registration **out) {
    TN_REQUIRE(comm && out, "tn_comm_register: comm and out are needed");
    TN_REQUIRE(address && bytes, "tn_comm_register: %zu bytes at %p: there is nothing to register",
               bytes, address);
    TN_REQUIRE(kind == TN_REGISTER_BUFFER || kind == TN_REGISTER_WINDOW,
               "tn_comm_register: %d is no kind of registration", (int)kind);
    TN_TRY(check_engine(comm));
    TN_TRY(tn_comm_wait(comm));
    if (kind == TN_REGISTER_WINDOW) TN_TRY(tn__comm_prepare_agreement(comm));
    tn_registration *record = take_record(comm);
    if (!record) return TN_OUT_OF_HOST_MEMORY;
    record->comm = comm;
    record->info = (tn_registration_info)TN_REGISTRATION_INFO_INIT;
    record->info.kind = kind;
    record->info.address = address;
    record->info.bytes = bytes;
    tn_status status = do_register(record);
    if (status != TN_OK) {
        give_record(comm, record);
        return status;
    }
    *out = record;
    return TN_OK;
}

/* ---- ending --------------------------------------------------------------------------------- */

static tn_status withdraw_locked(tn_registration *record) {
    const tn_comm *comm = record->comm;
    if (comm->failure != TN_OK) return TN_OK; /* the engine's communicator is gone, and all of it */
    return comm->engine->withdraw(comm->state, record->handle,
                                  record->info.kind == TN_REGISTER_WINDOW);
}

static void remove_locked(tn_registration *record) {
    tn_registration **at = &record->comm->registrations;
    while (*at != record)
        at = &(*at)->next;
    *at = record->next;
}

static tn_status deregister_locked(tn_registration *record, int is_of_all) {
    tn_comm *comm = record->comm;
    tn_status status = TN_OK;
    if (comm->failure == TN_OK)
        TN_TRY(tn__comm_check_no_graphs_locked(comm, "end what it has registered"));
    if (comm->failure == TN_OK && is_of_all) status = compare_locked(record, TN__FLOW_DEREGISTER);
    if (status == TN_OK) status = withdraw_locked(record);
    /* What failed may have been the communicator. */
    return status == TN_OK ? TN_OK : tn__comm_settle_failure_locked(comm, status);
}

static tn_status deregister(tn_registration *registration, int is_of_all) {
    tn_comm *comm = registration->comm;
    tn_status waited = tn_comm_wait(comm);
    (void)waited; /* a failure is no reason to keep it */
    pthread_mutex_lock(&comm->lock);
    tn_status status = deregister_locked(registration, is_of_all);
    /* With the communicator all of it has ended. */
    int is_over = status == TN_OK || comm->failure != TN_OK;
    if (is_over) remove_locked(registration);
    pthread_mutex_unlock(&comm->lock);
    if (is_over) give_record(comm, registration);
    return status;
}

tn_status tn_comm_deregister(tn_registration *registration) {
    return registration ? deregister(registration, 1) : TN_OK;
}

tn_status tn__comm_undo_registration(tn_registration *registration) {
    return registration ? deregister(registration, 0) : TN_OK;
}

void tn__comm_end_registrations(tn_comm *comm) {
    while (comm->registrations) {
        tn_registration *record = comm->registrations;
        (void)withdraw_locked(record);
        comm->registrations = record->next;
        tn__host_free(record);
    }
    tn__host_free(comm->spare);
    comm->spare = NULL;
}

/* ---- what it is, and memory for it ---------------------------------------------------------- */

tn_status tn_registration_info_get(const tn_registration *registration, tn_registration_info *out) {
    TN_REQUIRE(registration, "tn_registration_info_get: registration is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_registration_info_get: begin with TN_REGISTRATION_INFO_INIT");
    *out = registration->info;
    return TN_OK;
}

tn_status tn_comm_memory_functions(tn_comm *comm, tn_memory_functions *out) {
    TN_REQUIRE(comm && out, "tn_comm_memory_functions: comm and out are needed");
    TN_TRY(check_engine(comm));
    return comm->engine->memory_functions(comm->device, out);
}
