/* Peers of pools of mapped pages (--pool vmm): see dropin.h.
 *
 * cuCtxEnablePeerAccess lets the current device reach all memory that cuMemAlloc gives on another.
 * Of mapped pages the driver must be told range by range, which the pools do (tn_pool_peer_enable).
 * Other pools and whole blocks are ordinary memory of the driver's.
 *
 * Who may reach whose memory is noted also of devices that have no pools yet: those get their peers
 * when they are made. One mutex, taken before that of opening devices.
 */
#include "dropin.h"
#include "tenure_pool.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t reached_by[TN__DROPIN_DEVICES_MAX]; /* bit d: device d reaches its memory */

/* A pool that could not be told is as the driver's memory is without cuCtxEnablePeerAccess. */
static void tell(tn_pool *pool, tn_device *peer, int is_allowed) {
    tn_status status = TN_OK;
    if (pool && is_allowed) status = tn_pool_peer_enable(pool, peer);
    if (pool && !is_allowed) status = tn_pool_peer_disable(pool, peer);
    if (status != TN_OK) tn__dropin_count(&tn__dropin.counts.peers_refused);
}

/* A stream pool that is made meanwhile is told by whoever makes it. A peer that is opened for it
 * has pools, and so peers, of its own. */
static void apply_locked(tn__dropin_device *owner) {
    tn_pool *stream_pool = owner->stream_pool;
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        int is_new = !tn__dropin.devices[i];
        tn__dropin_device *peer = NULL;
        if (reached_by[owner->ordinal] >> i & 1) peer = tn__dropin_device_open(i);
        if (peer) tell(owner->pool, peer->device, 1);
        if (peer) tell(stream_pool, peer->device, 1);
        if (peer && is_new) apply_locked(peer);
    }
    owner->is_told = 1;
    if (stream_pool) owner->is_stream_told = 1;
}

void tn__dropin_peers_apply(tn__dropin_device *owner) {
    pthread_mutex_lock(&mutex);
    apply_locked(owner);
    pthread_mutex_unlock(&mutex);
}

static void forbid(const tn__dropin_device *owner, const tn__dropin_device *peer) {
    tell(owner->pool, peer->device, 0);
    tell(owner->stream_pool, peer->device, 0);
}

void tn__dropin_peers_close(const tn__dropin_device *gone) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        const tn__dropin_device *owner = tn__dropin.devices[i];
        if (!(reached_by[i] >> gone->ordinal & 1)) continue;
        if (owner) forbid(owner, gone);
        reached_by[i] &= ~((uint64_t)1 << gone->ordinal);
    }
    reached_by[gone->ordinal] = 0;
    pthread_mutex_unlock(&mutex);
}

/* A device without pools is not opened for it: it is told when it is. */
static void change(int owner, int user, int is_allowed) {
    const uint64_t bit = (uint64_t)1 << user;
    tn__dropin_device *device, *peer;
    pthread_mutex_lock(&mutex);
    device = tn__dropin.devices[owner];
    peer = tn__dropin.devices[user];
    reached_by[owner] = is_allowed ? reached_by[owner] | bit : reached_by[owner] & ~bit;
    if (!is_allowed && device && peer) forbid(device, peer);
    if (is_allowed && device) apply_locked(device);
    pthread_mutex_unlock(&mutex);
}

static void change_of_contexts(void *owner_context, int is_allowed) {
    int owner = tn__dropin_ordinal_of(owner_context);
    int user = tn__dropin_ordinal_of(NULL);
    if (owner >= 0 && user >= 0) change(owner, user, is_allowed);
}

static int has_mapped_pages(void) {
    return tn__dropin.backing == TN_BACKING_VMM && !tn__dropin.is_over;
}

static tn__cu_result hook_enable(void *peer, unsigned flags) {
    tn__cu_result result = TN__REAL(cuCtxEnablePeerAccess)(peer, flags);
    if (result == TN__CU_SUCCESS && has_mapped_pages()) change_of_contexts(peer, 1);
    return result;
}

static tn__cu_result hook_disable(void *peer) {
    tn__cu_result result = TN__REAL(cuCtxDisablePeerAccess)(peer);
    if (result == TN__CU_SUCCESS && has_mapped_pages()) change_of_contexts(peer, 0);
    return result;
}

void tn__dropin_peer_hooks(tn__dropin_calls *hooks) {
    hooks->cuCtxEnablePeerAccess = hook_enable;
    hooks->cuCtxDisablePeerAccess = hook_disable;
}
