/* Peers of a pool: other devices that may touch its memory, and whose streams may use it.
 *
 * Access belongs to a mapping. So all that is mapped gets it when a peer comes, what is mapped
 * later gets it then (tn__pool_set_access), and all of it loses it when the peer goes. That goes
 * for kept mappings too (heap_frames.h).
 *
 * Invariant: the peers are order.peers; each is retained, and its streams are watched.
 */
#include "host_alloc.h"
#include "pool_internal.h"
#include "tenure_pool.h"

/* ---- access ---------------------------------------------------------------------------------- */

static tn_status set_peer_access(tn_pool *pool, uintptr_t begin, uintptr_t end, int ordinal,
                                 int is_allowed) {
    return pool->driver->peer_set_access(pool->state, (void *)begin, end - begin, ordinal,
                                         is_allowed);
}

tn_status tn__pool_set_access(tn_pool *pool, void *address, size_t bytes) {
    uintptr_t begin = (uintptr_t)address;
    TN_TRY(pool->driver->mem_set_access(pool->state, address, bytes));
    for (const tn__order_device *peer = pool->order.peers; peer; peer = peer->next) {
        TN_TRY(set_peer_access(pool, begin, begin + bytes, peer->ordinal, 1));
    }
    return TN_OK;
}

/* A change of a device's access to everything; how far it has come. */
typedef struct sweep {
    tn_pool *pool;
    int ordinal;
    int is_allowed;
    size_t done;  /* stretches */
    size_t limit; /* of them: an undoing goes as far as the change came */
} sweep;

/* Handles of their own are mapped or not as a whole. */
static int is_unmapped(const tn__region *region) {
    if (region->dedicated) return !region->dedicated->mapping.is_mapped;
    return region->guest && !region->guest->mapping.is_mapped;
}

static tn_status sweep_region(sweep *change, const tn__region *region) {
    tn__page_span span = {0, 0};
    if (is_unmapped(region)) return TN_OK;
    while (change->done < change->limit && tn__next_mapped(region, span.end, &span)) {
        TN_TRY(set_peer_access(change->pool, tn__page_address(region, span.first),
                               tn__page_address(region, span.end), change->ordinal,
                               change->is_allowed));
        change->done++;
    }
    return TN_OK;
}

static tn_status sweep_all(sweep *change) {
    const tn__region *region = change->pool->heap.regions;
    for (; region; region = region->next)
        TN_TRY(sweep_region(change, region));
    return TN_OK;
}

/* All of it or nothing. */
static tn_status change_access(tn_pool *pool, int ordinal, int is_allowed) {
    sweep change = {.pool = pool, .ordinal = ordinal, .is_allowed = is_allowed, .limit = SIZE_MAX};
    sweep undo = {.pool = pool, .ordinal = ordinal, .is_allowed = !is_allowed};
    tn__saved_error saved;
    tn_status status = sweep_all(&change);
    if (status == TN_OK) return TN_OK;
    tn__error_save(&saved);
    undo.limit = change.done;
    (void)sweep_all(&undo);
    tn__error_restore(&saved);
    return status;
}

/* ---- enable ---------------------------------------------------------------------------------- */

static tn__order_device **find_peer(tn_pool *pool, const tn_device *device) {
    tn__order_device **at = &pool->order.peers;
    while (*at && (*at)->owner != device)
        at = &(*at)->next;
    return at;
}

static tn_status check_peer(tn_pool *pool, tn_device *peer, const tn_device_info *info) {
    int can_access = 0;
    if (!pool->backing->maps_handles) {
        return TN_FAIL(TN_UNSUPPORTED, "pool %s has no VMM pages: other devices can not be let in",
                       pool->name);
    }
    TN_REQUIRE(tn__device_driver(peer) == pool->driver && info->simulated == pool->info.simulated,
               "the peer is a device of another driver than pool %s", pool->name);
    TN_REQUIRE(info->ordinal != pool->info.ordinal, "device %d is pool %s's own", info->ordinal,
               pool->name);
    TN_TRY(pool->driver->peer_can_access(pool->state, info->ordinal, &can_access));
    if (can_access) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "device %d can not reach the memory of device %d", info->ordinal,
                   pool->info.ordinal);
}

static tn_status add_peer_locked(tn_pool *pool, tn__order_device *added, int *is_added) {
    TN_TRY(tn__pause_check(pool, "tn_pool_peer_enable"));
    if (*find_peer(pool, added->owner)) return TN_OK;
    TN_TRY(change_access(pool, added->ordinal, 1));
    added->next = pool->order.peers;
    pool->order.peers = added;
    *is_added = 1;
    return TN_OK;
}

static void end_peer(tn_pool *pool, tn__order_device *peer) {
    tn__device_unwatch_streams(peer->owner, pool);
    tn__device_release(peer->owner);
    tn__host_free(peer);
}

static tn_status require_calls(const tn_pool *pool, const tn_device *peer, const char *call) {
    TN_REQUIRE(pool && peer, "%s: the pool or the peer is NULL", call);
    if (!tn__driver_is_gone()) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s after the driver is gone", call);
}

tn_status tn_pool_peer_enable(tn_pool *pool, tn_device *peer) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn__order_device *added;
    tn_status status;
    int is_added = 0;
    TN_TRY(require_calls(pool, peer, "tn_pool_peer_enable"));
    TN_TRY(tn_device_info_get(peer, &info));
    TN_TRY(check_peer(pool, peer, &info));
    pthread_mutex_lock(&pool->mutex);
    int is_known = *find_peer(pool, peer) != NULL;
    pthread_mutex_unlock(&pool->mutex);
    if (is_known) return TN_OK;
    added = tn__host_alloc(1, sizeof *added);
    if (!added) return TN_OUT_OF_HOST_MEMORY;
    added->owner = peer;
    added->state = tn__device_state(peer);
    added->ordinal = info.ordinal;
    status = tn__device_watch_streams(peer, tn__pool_on_stream_end, pool);
    if (status != TN_OK) {
        tn__host_free(added);
        return status;
    }
    tn__device_retain(peer);
    pthread_mutex_lock(&pool->mutex);
    status = add_peer_locked(pool, added, &is_added);
    pthread_mutex_unlock(&pool->mutex);
    if (is_added) {
        tn__device_watch_waits(peer, tn__pool_on_user_wait, &pool->order.known_bits, pool);
    } else {
        end_peer(pool, added);
    }
    return status;
}

/* ---- disable --------------------------------------------------------------------------------- */

/* Two handles of one GPU may both be peers. */
static int is_sole_peer(const tn_pool *pool, const tn__order_device *peer) {
    for (const tn__order_device *other = pool->order.peers; other; other = other->next) {
        if (other != peer && other->ordinal == peer->ordinal) return 0;
    }
    return 1;
}

/* The events go first: that they do is not seen, whatever fails after it. */
static tn_status remove_peer_locked(tn_pool *pool, const tn_device *device,
                                    tn__order_device **removed) {
    tn__order_device **at = find_peer(pool, device);
    tn__order_device *peer = *at;
    TN_REQUIRE(peer, "tn_pool_peer_disable: the device is no peer of pool %s", pool->name);
    TN_TRY(tn__pause_check(pool, "tn_pool_peer_disable"));
    TN_TRY(tn__pool_collect(pool));
    if (tn__order_device_is_busy(&pool->order, peer)) {
        return TN_FAIL(TN_IN_USE,
                       "work on streams of device %d may still use memory of pool %s: synchronize "
                       "them first",
                       peer->ordinal, pool->name);
    }
    tn__pool_forget_device(pool, peer);
    TN_TRY(tn__order_close_device(&pool->order, peer));
    if (is_sole_peer(pool, peer)) TN_TRY(change_access(pool, peer->ordinal, 0));
    *at = peer->next;
    *removed = peer;
    return TN_OK;
}

tn_status tn_pool_peer_disable(tn_pool *pool, tn_device *peer) {
    tn__order_device *removed = NULL;
    tn_status status;
    TN_TRY(require_calls(pool, peer, "tn_pool_peer_disable"));
    tn__pool_lock_whole(pool);
    status = remove_peer_locked(pool, peer, &removed);
    tn__pool_unlock_whole(pool);
    if (status == TN_OK) end_peer(pool, removed);
    return status;
}

void tn__pool_end_peers(tn_pool *pool) {
    while (pool->order.peers) {
        tn__order_device *peer = pool->order.peers;
        pool->order.peers = peer->next;
        end_peer(pool, peer);
    }
}
