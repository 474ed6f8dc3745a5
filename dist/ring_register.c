/* The buffer of a ring, and its registration with the communicator.
 *
 *     seal   ->  taken, leased  ->  (all ranks come)  ->  window, else buffer, else neither
 *     end    ->  deregistered   ->  freed
 *
 * Invariants: all ranks have it registered in the same way, or none has; there is a registration
 * only while there is the buffer; every failure of it is in the statistics, and is no failure of
 * the seal's. What a rank has no memory for fails its seal before it comes: the others wait for it,
 * and it can seal again.
 */
#include <time.h>

#include "comm.h"
#include "host_alloc.h"
#include "ring_slots.h"
#include "tensor_internal.h"

enum { US_PER_S = 1000000 };

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * US_PER_S + (uint64_t)now.tv_nsec / 1000;
}

static int is_wanted(const tn_ring *ring) {
    return ring->comm && ring->comm->engine->enroll &&
           ring->registration_wanted != TN_RING_REGISTER_NONE;
}

/* ---- the buffer ------------------------------------------------------------------------------ */

static tn_status lease_buffer(tn_ring *ring, unsigned flags) {
    tn_plane_view view;
    TN_TRY(tn__tensor_set_block_flags(ring->buffer, flags));
    TN_TRY(tn_lease_begin(ring->buffer, TN_PLANE_DATA, TN_WRITE, ring->stream, &ring->buffer_lease,
                          &view));
    ring->base = view.data;
    return TN_OK;
}

/* One handle of its own, that others may map, is what an engine registers. A pool that has no such
 * blocks may have what the engine gave it. */
static tn_status take_memory(tn_ring *ring) {
    if (!is_wanted(ring)) return lease_buffer(ring, 0);
    tn__error_scope_begin();
    tn_status status = lease_buffer(ring, TN_ALLOC_SHAREABLE);
    if (status == TN_UNSUPPORTED) status = lease_buffer(ring, 0);
    return tn__error_scope_end(status);
}

tn_status tn__ring_buffer_take(tn_ring *ring, size_t bytes) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = (int64_t)bytes;
    config.name = ring->name;
    TN_TRY(tn_tensor_create(ring->scope, &config, &ring->buffer));
    TN_TRY(take_memory(ring));
    ring->buffer_bytes = bytes;
    return TN_OK;
}

/* With its communicator, if that has failed, a registration is gone, too. */
static tn_status note_end(tn_registration **registration, tn_status status) {
    if (status != TN_OK && status != TN_COMM_ERROR && status != TN_COMM_TIMEOUT) return status;
    *registration = NULL;
    return TN_OK;
}

static tn_status end_registration(tn_ring *ring) {
    for (int kind = 0; kind < 2; kind++)
        TN_TRY(note_end(&ring->leftovers[kind], tn__comm_undo_registration(ring->leftovers[kind])));
    TN_TRY(note_end(&ring->registration, tn_comm_deregister(ring->registration)));
    ring->stats.registered = TN_RING_UNREGISTERED;
    return TN_OK;
}

tn_status tn__ring_check_end(const tn_ring *ring) {
    tn_status status = TN_OK;
    if (!ring->registration) return TN_OK;
    pthread_mutex_lock(&ring->comm->lock);
    if (ring->comm->failure == TN_OK)
        status = tn__comm_check_no_graphs_locked(ring->comm, "end what a ring has registered");
    pthread_mutex_unlock(&ring->comm->lock);
    return status;
}

tn_status tn__ring_buffer_free(tn_ring *ring) {
    TN_TRY(end_registration(ring));
    if (ring->buffer_lease.value) tn__ring_lease_end(ring->buffer_lease);
    ring->buffer_lease = (tn_lease){0};
    if (ring->buffer.value) TN_TRY(tn_tensor_destroy(ring->buffer, ring->stream));
    ring->buffer = (tn_tensor){0};
    ring->buffer_bytes = 0;
    ring->base = NULL;
    return TN_OK;
}

/* ---- registration ---------------------------------------------------------------------------- */

/* TN_OK if all ranks come with that; else this rank's own failure, or that of the first that has
 * one. */
static tn_status agree(tn_ring *ring, tn_status mine) {
    tn__saved_error own;
    int failed = -1;
    tn__error_save(&own);
    TN_TRY(tn__comm_agree(ring->comm, mine, &failed, NULL));
    if (mine != TN_OK) tn__error_restore(&own);
    if (mine != TN_OK || failed < 0) return mine;
    return TN_FAIL(TN_UNSUPPORTED,
                   "ring %s: rank %d could not have its buffer registered, so that none has",
                   ring->name, failed);
}

/* What does not end now the end of the buffer ends; the ranks go on together. */
static void undo(tn_ring *ring, tn_registration_kind kind, tn_registration *registration) {
    tn__saved_error error;
    tn__error_save(&error);
    (void)note_end(&registration, tn__comm_undo_registration(registration));
    ring->leftovers[kind] = registration;
    tn__error_restore(&error);
}

static tn_status try_kind(tn_ring *ring, tn_registration_kind kind) {
    tn_registration *registration = NULL;
    tn_status status =
        tn_comm_register(ring->comm, ring->base, ring->buffer_bytes, kind, &registration);
    status = agree(ring, status);
    if (status != TN_OK) {
        undo(ring, kind, registration);
        return status;
    }
    ring->registration = registration;
    ring->stats.registered =
        kind == TN_REGISTER_WINDOW ? TN_RING_REGISTERED_WINDOW : TN_RING_REGISTERED_BUFFER;
    return TN_OK;
}

/* The first failure is the one that is told. Without memory for the words there are none. */
static void note(tn_ring *ring, tn_status status) {
    if (status == TN_OK || ring->stats.register_status != TN_OK) return;
    ring->stats.register_status = status;
    ring->register_text = tn__host_strdup(tn_error_last());
}

static void try_all(tn_ring *ring) {
    tn_status status = TN_UNSUPPORTED;
    if (ring->registration_wanted == TN_RING_REGISTER_AUTO) {
        status = try_kind(ring, TN_REGISTER_WINDOW);
        note(ring, status);
    }
    if (status != TN_OK) note(ring, try_kind(ring, TN_REGISTER_BUFFER));
}

tn_status tn__ring_prepare_registration(tn_ring *ring) {
    if (!is_wanted(ring)) return TN_OK;
    TN_TRY(tn__comm_prepare_agreement(ring->comm));
    return tn__comm_prepare_registration(ring->comm);
}

void tn__ring_register(tn_ring *ring) {
    uint64_t start_us = now_us();
    tn__saved_error error;
    if (!is_wanted(ring)) return;
    tn__error_save(&error);
    if (ring->buffer_bytes) try_all(ring);
    ring->stats.register_us = now_us() - start_us;
    tn__error_restore(&error);
}
