/* The calls of a step: prefetch, acquire, release; and holds that their scopes end.
 *
 * Invariant: between two calls a unit that is wanted is nowhere, and holds without a record
 * (forsaken) are those that a lease kept from ending.
 */
#include "ring_slots.h"

#include "driver.h"
#include "host_alloc.h"

tn_status tn__ring_check_unit(const tn_ring *ring, int unit, const char *call) {
    TN_REQUIRE(unit >= 0 && unit < ring->unit_count, "%s: ring %s has %d units, and no unit %d",
               call, ring->name, ring->unit_count, unit);
    return TN_OK;
}

static tn_status check_call(const tn_ring *ring, int unit, const char *call) {
    TN_TRY(tn__ring_check_unit(ring, unit, call));
    if (ring->is_sealed) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s: ring %s has no memory yet: tn_ring_seal first", call,
                   ring->name);
}

/* Which unit lies where, and what waits for what, calls decide and launches do not: a graph would
 * read and write places that are another unit's by then. Asked first: nothing has been done to the
 * capture. */
static tn_status check_stream(const tn_ring *ring, tn_stream stream, const char *call) {
    const tn__driver *driver = tn__device_driver(ring->device);
    int is_capturing = 0;
    TN_TRY(driver->stream_is_capturing(tn__device_state(ring->device), stream, &is_capturing));
    if (!is_capturing) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: ring %s: the stream captures a graph, and what a ring holds changes from "
                   "call to call: gather into memory of the graph instead (tn_shard_gather), or "
                   "call this outside of the capture",
                   call, ring->name);
}

/* Where gathers go, and `stream`. */
static tn_status check_streams(const tn_ring *ring, tn_stream stream, const char *call) {
    TN_TRY(check_stream(ring, ring->stream, call));
    return stream == ring->stream ? TN_OK : check_stream(ring, stream, call);
}

/* ---- coming -------------------------------------------------------------------------------- */

/* A unit that is nowhere, to where there is room. */
static tn_status start_at(tn_ring *ring, int unit, int slot, size_t offset) {
    TN_TRY(tn__ring_reserve(ring, slot, unit, offset));
    TN_TRY(tn__ring_gather(ring, slot));
    ring->units[unit].is_wanted = 0;
    return TN_OK;
}

/* What was gathered before its shard was written is gathered again, where it is. */
static tn_status refresh(tn_ring *ring, int unit) {
    int index = ring->units[unit].slot, is_outdated = 0;
    if (index < 0 || ring->slots[index].holds > 0) return TN_OK;
    TN_TRY(tn__ring_is_outdated(ring, index, &is_outdated));
    if (!is_outdated) return TN_OK;
    size_t offset = ring->slots[index].offset;
    TN_TRY(tn__ring_drain(ring, index));
    TN_TRY(tn__ring_settle_unit(ring, unit));
    TN_TRY(start_at(ring, unit, index, offset));
    ring->stats.regathers++;
    return TN_OK;
}

/* Units that nobody has acquired make room, until there is enough or none is left. */
static tn_status displace_for(tn_ring *ring, int unit, size_t planned, int *slot, size_t *offset) {
    while (!tn__ring_find_room(ring, unit, planned, slot, offset)) {
        int other = tn__ring_oldest_unheld(ring);
        if (other < 0) return tn__ring_fail_full(ring, unit);
        TN_TRY(tn__ring_drain(ring, ring->units[other].slot));
        ring->stats.displaced++;
    }
    return TN_OK;
}

static tn_status bring(tn_ring *ring, int unit, size_t planned) {
    size_t offset = 0;
    int slot = -1;
    TN_TRY(tn__ring_settle_unit(ring, unit));
    TN_TRY(refresh(ring, unit));
    if (ring->units[unit].slot < 0) {
        TN_TRY(displace_for(ring, unit, planned, &slot, &offset));
        TN_TRY(start_at(ring, unit, slot, offset));
    }
    return tn__ring_arm(ring, ring->units[unit].slot);
}

/* ---- prefetches that wait for room ---------------------------------------------------------- */

static int longest_wanted(const tn_ring *ring) {
    int first = -1;
    for (int i = 0; i < ring->unit_count; i++) {
        const tn__ring_unit *unit = &ring->units[i];
        if (!unit->is_wanted) continue;
        if (first < 0 || unit->wanted_number < ring->units[first].wanted_number) first = i;
    }
    return first;
}

static tn_status start(tn_ring *ring, int unit, int slot, size_t offset) {
    TN_TRY(tn__ring_settle_unit(ring, unit));
    TN_TRY(start_at(ring, unit, slot, offset));
    tn__error_scope_begin();
    (void)tn__ring_arm(ring, slot); /* or its acquire does */
    return tn__error_scope_end(TN_OK);
}

/* What other tensors still hold, on all ranks alike, its acquire will start, and say why it can
 * not. For what else one fails on this rank alone it stays wanted, and nothing is gathered before
 * it: all ranks gather in one order. */
static tn_status start_wanted(tn_ring *ring) {
    size_t offset = 0;
    int slot = -1;
    for (int unit = longest_wanted(ring); unit >= 0; unit = longest_wanted(ring)) {
        if (!tn__ring_find_room(ring, unit, SIZE_MAX, &slot, &offset)) return TN_OK;
        tn__error_scope_begin();
        tn_status status = start(ring, unit, slot, offset);
        if (status == TN_IN_USE) status = TN_OK;
        if (status == TN_OK) ring->units[unit].is_wanted = 0;
        TN_TRY(tn__error_scope_end(status));
    }
    return TN_OK;
}

static tn_status prefetch(tn_ring *ring, int unit) {
    const tn_ring_op op = {TN_RING_PREFETCH, unit};
    size_t planned = tn__ring_schedule_offset(ring, op), offset = 0;
    int slot = -1;
    TN_TRY(tn__ring_settle_unit(ring, unit));
    int is_there = ring->units[unit].slot >= 0;
    if (is_there || tn__ring_find_room(ring, unit, planned, &slot, &offset)) {
        TN_TRY(bring(ring, unit, planned));
    } else if (ring->full == TN_RING_FULL_FAIL) {
        return tn__ring_fail_full(ring, unit);
    } else if (!ring->units[unit].is_wanted) {
        ring->units[unit].is_wanted = 1;
        ring->units[unit].wanted_number = ++ring->clock;
        ring->stats.deferred++;
    }
    ring->stats.prefetches++;
    tn__ring_schedule_advance(ring, op);
    return TN_OK;
}

tn_status tn_ring_prefetch(tn_ring *ring, int unit) {
    TN_REQUIRE(ring, "tn_ring_prefetch: ring is NULL");
    pthread_mutex_lock(&ring->lock);
    tn_status status = check_call(ring, unit, "tn_ring_prefetch");
    if (status == TN_OK) status = check_streams(ring, ring->stream, "tn_ring_prefetch");
    if (status == TN_OK) status = tn__ring_settle(ring);
    if (status == TN_OK) status = prefetch(ring, unit);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

/* ---- holds --------------------------------------------------------------------------------- */

tn_status tn__ring_settle(tn_ring *ring) {
    for (int i = 0; i < ring->record_count; i++) {
        tn__ring_slot *slot = &ring->slots[i];
        while (slot->forsaken > 0 && slot->holds > 1)
            tn__ring_forsaken_end(ring, i);
        if (slot->forsaken == 0) continue;
        tn__error_scope_begin();
        (void)tn__ring_drain(ring, i);
        (void)tn__error_scope_end(TN_OK);
    }
    return start_wanted(ring);
}

tn_status tn__ring_catch_up(tn_ring *ring) {
    pthread_mutex_lock(&ring->lock);
    tn_status status = tn__ring_settle(ring);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

/* Of a call that has done its own part: what could not be started the next one starts, or fails. */
static void settle_quietly(tn_ring *ring) {
    tn__error_scope_begin();
    (void)tn__ring_settle(ring);
    (void)tn__error_scope_end(TN_OK);
}

/* The token's end: by its scope, or after the hold's. In the second case the ring's lock is held,
 * or the ring is gone but for its lock. */
static void hold_token_ended(void *context) {
    tn__ring_hold *hold = context;
    tn_ring *ring = hold->ring;
    if (!atomic_load_explicit(&hold->is_over, memory_order_acquire)) {
        pthread_mutex_lock(&ring->lock);
        if (!atomic_load_explicit(&hold->is_over, memory_order_relaxed)) {
            tn__ring_forsake(ring, hold);
            ring->stats.abandoned++;
            settle_quietly(ring);
        }
        pthread_mutex_unlock(&ring->lock);
    }
    tn__host_free(hold);
    tn__ring_drop(ring);
}

/* A tensor without bytes in the scope of the acquire: it ends with it. */
static tn_status make_token(tn__ring_hold *hold, tn_scope scope) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.name = hold->ring->units[hold->unit].name;
    memory.stream = hold->ring->stream;
    memory.release = hold_token_ended;
    memory.context = hold;
    atomic_fetch_add(&hold->ring->references, 1);
    const tn_status status = tn_tensor_adopt(scope, &config, &memory, &hold->token);
    if (status != TN_OK) tn__ring_drop(hold->ring);
    return status;
}

static tn_status new_hold(tn_ring *ring, int unit, tn_scope scope, tn__ring_hold **out) {
    tn__ring_hold *hold = tn__host_alloc(1, sizeof *hold);
    if (!hold) return TN_OUT_OF_HOST_MEMORY;
    hold->ring = ring;
    hold->unit = unit;
    atomic_init(&hold->is_over, 0);
    tn_status status = scope.value ? make_token(hold, scope) : TN_OK;
    if (status != TN_OK) {
        tn__host_free(hold);
        return status;
    }
    *out = hold;
    return TN_OK;
}

static tn_status acquire(tn_ring *ring, int unit, tn_scope scope, tn_stream stream) {
    const tn_ring_op op = {TN_RING_ACQUIRE, unit};
    size_t planned = tn__ring_schedule_offset(ring, op);
    uint64_t gathers = ring->stats.gathers;
    tn__ring_hold *hold = NULL;
    TN_TRY(new_hold(ring, unit, scope, &hold));
    tn_status status = bring(ring, unit, planned);
    if (status == TN_OK) {
        status = tn__ring_hold_begin(ring, ring->units[unit].slot, hold, stream);
    }
    if (status != TN_OK) {
        tn__ring_hold_delete(ring, hold);
        return status;
    }
    ring->stats.acquires++;
    ring->stats.found += ring->stats.gathers == gathers;
    tn__ring_schedule_advance(ring, op);
    return TN_OK;
}

tn_status tn_ring_acquire(tn_ring *ring, int unit, tn_scope scope, tn_stream stream) {
    TN_REQUIRE(ring, "tn_ring_acquire: ring is NULL");
    pthread_mutex_lock(&ring->lock);
    tn_status status = check_call(ring, unit, "tn_ring_acquire");
    if (status == TN_OK) status = check_streams(ring, stream, "tn_ring_acquire");
    if (status == TN_OK) status = tn__ring_settle(ring);
    if (status == TN_OK) status = acquire(ring, unit, scope, stream);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

/* ---- going --------------------------------------------------------------------------------- */

static tn_status release(tn_ring *ring, int unit) {
    const tn_ring_op op = {TN_RING_RELEASE, unit};
    int index = ring->units[unit].slot;
    const tn__ring_slot *slot = index < 0 ? NULL : &ring->slots[index];
    if (!slot || !slot->first_hold) {
        return TN_FAIL(TN_INVALID_STATE, "tn_ring_release: ring %s: unit %s is not acquired",
                       ring->name, ring->units[unit].name);
    }
    if (slot->holds > 1)
        tn__ring_hold_end(ring, index);
    else
        TN_TRY(tn__ring_drain(ring, index));
    ring->stats.releases++;
    tn__ring_schedule_advance(ring, op);
    tn__error_scope_begin();
    (void)start_wanted(ring); /* it is released; what is not started now is by the next call */
    return tn__error_scope_end(TN_OK);
}

/* That the unit was acquired for; else that of all gathers. */
static tn_stream stream_of(const tn_ring *ring, int unit) {
    const int index = ring->units[unit].slot;
    if (index < 0 || ring->slots[index].state != TN_RING_IN_USE) return ring->stream;
    return ring->slots[index].stream;
}

tn_status tn_ring_release(tn_ring *ring, int unit) {
    TN_REQUIRE(ring, "tn_ring_release: ring is NULL");
    pthread_mutex_lock(&ring->lock);
    tn_status status = check_call(ring, unit, "tn_ring_release");
    if (status == TN_OK) status = check_streams(ring, stream_of(ring, unit), "tn_ring_release");
    if (status == TN_OK) {
        settle_quietly(ring);
        status = release(ring, unit);
    }
    pthread_mutex_unlock(&ring->lock);
    return status;
}
