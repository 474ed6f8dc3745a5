/* The transitions of slots. No other file sets a state.
 *
 * Invariants, checked after each transition in debug builds by tn__ring_is_valid:
 *   - slots that are not EMPTY and can not be reclaimed lie apart in the buffer, within it;
 *   - a unit is in one slot at the most, and says in which;
 *   - planes are out only from the first hold on; while they are, the shard is leased.
 */
#include "ring_slots.h"

#include "canary.h"
#include "host_alloc.h"
#include "tensor_internal.h"

enum { MIX_GATHER = 1, MIX_DRAIN = 2 };

static tn__ring_unit *unit_in(const tn_ring *ring, const tn__ring_slot *slot) {
    TN_CHECK(slot->unit >= 0 && slot->unit < ring->unit_count);
    return &ring->units[slot->unit];
}

static void *address_of(const tn_ring *ring, const tn__ring_slot *slot) {
    return ring->base + slot->offset;
}

int tn__ring_unit_is_out(const tn__ring_unit *unit) {
    for (int i = 0; i < unit->plane_count; i++) {
        if (atomic_load_explicit(&unit->planes[i].is_out, memory_order_acquire)) return 1;
    }
    return 0;
}

static int is_draining_out(const tn_ring *ring, const tn__ring_slot *slot) {
    return slot->unit >= 0 && tn__ring_unit_is_out(&ring->units[slot->unit]);
}

int tn__ring_slot_is_free(const tn_ring *ring, const tn__ring_slot *slot) {
    if (slot->state == TN_RING_EMPTY) return 1;
    return slot->state == TN_RING_DRAINING && !is_draining_out(ring, slot);
}

static int overlap(const tn__ring_slot *slot, size_t offset, size_t bytes) {
    return slot->offset < offset + bytes && offset < slot->offset + slot->bytes;
}

static void leave_unit(const tn_ring *ring, tn__ring_slot *slot) {
    if (slot->unit >= 0) ring->units[slot->unit].slot = -1;
    slot->unit = -1;
}

void tn__ring_lease_end(tn_lease lease) {
    tn__error_scope_begin();
    tn_status status = tn_lease_end(lease);
    if (status != TN_OK) status = tn_lease_abandon(lease);
    (void)tn__error_scope_end(TN_OK);
    TN_ASSERT(status == TN_OK);
    (void)status;
}

static void return_shard(tn__ring_slot *slot) {
    if (slot->has_shard_lease) tn__ring_lease_end(slot->shard_lease);
    slot->has_shard_lease = 0;
    slot->shard = NULL;
}

static void set_empty(const tn_ring *ring, tn__ring_slot *slot) {
    leave_unit(ring, slot);
    slot->state = TN_RING_EMPTY;
    slot->offset = slot->bytes = 0;
}

static void count_live(tn_ring *ring, size_t bytes) {
    ring->stats.live_bytes += bytes;
    if (ring->stats.live_bytes > ring->stats.peak_live_bytes) {
        ring->stats.peak_live_bytes = ring->stats.live_bytes;
    }
}

/* ---- coming -------------------------------------------------------------------------------- */

tn_status tn__ring_reclaim(tn_ring *ring, int index) {
    tn__ring_slot *slot = &ring->slots[index];
    TN_CHECK(slot->state == TN_RING_DRAINING && !is_draining_out(ring, slot));
    if (slot->lane != ring->stream && !TN__CANARY(TN__CANARY_RING_REUSE)) {
        TN_TRY(tn_stream_wait(ring->device, ring->stream, slot->lane));
    }
    return_shard(slot);
    set_empty(ring, slot);
    TN_ASSERT(tn__ring_is_valid(ring));
    return TN_OK;
}

tn_status tn__ring_reserve(tn_ring *ring, int index, int unit, size_t offset) {
    tn__ring_slot *slot = &ring->slots[index];
    size_t bytes = ring->units[unit].bytes;
    TN_CHECK(ring->units[unit].slot < 0 && tn__ring_slot_is_free(ring, slot));
    for (int i = 0; i < ring->slot_count; i++) {
        tn__ring_slot *other = &ring->slots[i];
        if (other->state == TN_RING_EMPTY) continue;
        if (other != slot && !overlap(other, offset, bytes)) continue;
        TN_TRY(tn__ring_reclaim(ring, i));
    }
    if (slot->state == TN_RING_DRAINING) TN_TRY(tn__ring_reclaim(ring, index));
    slot->state = TN_RING_RESERVED;
    slot->unit = unit;
    slot->offset = offset;
    slot->bytes = bytes;
    ring->units[unit].slot = index;
    TN_ASSERT(tn__ring_is_valid(ring));
    return TN_OK;
}

static tn_status shard_contents(const tn__ring_unit *unit, uint64_t *out) {
    *out = 0;
    return unit->shard.value ? tn__tensor_contents(unit->shard, out) : TN_OK;
}

/* On the communication stream, behind the shard's last write. */
static tn_status put_gather(tn_ring *ring, tn__ring_slot *slot) {
    tn__ring_unit *unit = unit_in(ring, slot);
    tn__ring_source *source = &unit->source;
    tn_plane_view view = {0};
    tn_lease lease = {0};
    uint64_t contents = 0;
    TN_TRY(shard_contents(unit, &contents));
    if (unit->shard.value) {
        TN_TRY(tn_lease_begin(unit->shard, TN_PLANE_DATA, TN_READ, ring->stream, &lease, &view));
    }
    tn_status status = TN_OK;
    if (unit->bytes > 0) {
        status = source->gather(source->context, view.data, address_of(ring, slot), ring->stream);
    }
    if (lease.value) tn__ring_lease_end(lease);
    if (status == TN_OK) slot->contents = contents;
    return status;
}

tn_status tn__ring_gather(tn_ring *ring, int index) {
    tn__ring_slot *slot = &ring->slots[index];
    TN_CHECK(slot->state == TN_RING_RESERVED);
    tn_status status = put_gather(ring, slot);
    if (status == TN_OK) {
        slot->state = TN_RING_COMM;
        slot->number = ++ring->clock;
        ring->stats.gathers += slot->bytes > 0;
        count_live(ring, slot->bytes);
        tn__ring_mix(ring, MIX_GATHER, slot->unit, slot->offset);
    } else {
        set_empty(ring, slot); /* what may have been put comes before all that will be */
    }
    TN_ASSERT(tn__ring_is_valid(ring));
    return status;
}

/* A lease waits for all that the stream of the last write has by then: with a read of the lane
 * noted now, those that come wait for nothing that is put behind the gather. */
static tn_status note_read(const tn__ring_unit *unit, const tn__ring_slot *slot) {
    tn_plane_view view;
    tn_lease lease;
    if (!unit->shard.value) return TN_OK;
    TN_TRY(tn_lease_begin(unit->shard, TN_PLANE_DATA, TN_READ, slot->lane, &lease, &view));
    tn__ring_lease_end(lease);
    return TN_OK;
}

tn_status tn__ring_arm(tn_ring *ring, int index) {
    tn__ring_slot *slot = &ring->slots[index];
    if (slot->state != TN_RING_COMM) return TN_OK;
    if (slot->lane != ring->stream && !TN__CANARY(TN__CANARY_RING_GATHER)) {
        TN_TRY(tn_stream_wait(ring->device, slot->lane, ring->stream));
        TN_TRY(note_read(unit_in(ring, slot), slot));
    }
    slot->state = TN_RING_READY;
    TN_ASSERT(tn__ring_is_valid(ring));
    return TN_OK;
}

tn_status tn__ring_is_outdated(const tn_ring *ring, int index, int *out) {
    const tn__ring_slot *slot = &ring->slots[index];
    uint64_t contents = 0;
    TN_TRY(shard_contents(&ring->units[slot->unit], &contents));
    *out = contents != slot->contents && !TN__CANARY(TN__CANARY_RING_OUTDATED);
    return TN_OK;
}

/* ---- planes -------------------------------------------------------------------------------- */

/* On any thread: the uses have been put before the lane, or will be, by whoever called this. */
static void take_back(void *context) {
    tn__ring_plane *plane = context;
    atomic_store_explicit(&plane->is_out, 0, memory_order_release);
}

static tn_status adopt_plane(const tn_ring *ring, const tn__ring_slot *slot, int index,
                             const void *shard) {
    tn__ring_unit *unit = unit_in(ring, slot);
    tn__ring_plane *plane = &unit->planes[index];
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    if (atomic_load_explicit(&plane->is_out, memory_order_acquire)) return TN_OK;
    TN_TRY(
        unit->source.locate(unit->source.context, index, shard, address_of(ring, slot), &memory));
    memory.stream = slot->lane;
    memory.read_only = 1;
    memory.release = take_back;
    memory.context = plane;
    plane->plane = memory.plane;
    atomic_store_explicit(&plane->is_out, 1, memory_order_relaxed);
    tn_status status = tn_plane_adopt(plane->tensor, &memory);
    if (status != TN_OK) atomic_store_explicit(&plane->is_out, 0, memory_order_relaxed);
    return status;
}

/* The shard stays leased on the lane while there are planes: some lie in it. */
static tn_status lease_shard(const tn_ring *ring, tn__ring_slot *slot, const void **shard) {
    const tn__ring_unit *unit = unit_in(ring, slot);
    tn_plane_view view = {0};
    if (unit->shard.value && !slot->has_shard_lease) {
        TN_TRY(tn_lease_begin(unit->shard, TN_PLANE_DATA, TN_READ, slot->lane, &slot->shard_lease,
                              &view));
        slot->has_shard_lease = 1;
        slot->shard = view.data;
    }
    *shard = slot->shard;
    return TN_OK;
}

/* A tensor that has ended has no plane any more. */
static tn_status drop_plane(const tn__ring_slot *slot, const tn__ring_plane *of, tn_plane plane) {
    tn_plane_state state = TN_PLANE_ABSENT;
    tn__error_scope_begin();
    tn_status status = tn_plane_state_get(of->tensor, plane, &state);
    (void)tn__error_scope_end(TN_OK);
    if (status == TN_STALE_HANDLE || state == TN_PLANE_ABSENT) return TN_OK;
    return tn_plane_drop(of->tensor, plane, slot->stream);
}

/* Columnwise planes first: they were derived from the other one. */
static tn_status drop_planes(const tn_ring *ring, const tn__ring_slot *slot) {
    const tn__ring_unit *unit = unit_in(ring, slot);
    for (int i = 0; i < unit->plane_count; i++) {
        for (int plane = TN_PLANE_COUNT - 1; plane >= 0; plane--) {
            if (!(unit->planes[i].planes & TN_PLANE_BIT(plane))) continue;
            TN_TRY(drop_plane(slot, &unit->planes[i], (tn_plane)plane));
        }
    }
    return TN_OK;
}

static void undo_adoption(const tn_ring *ring, tn__ring_slot *slot) {
    tn__error_scope_begin();
    if (drop_planes(ring, slot) == TN_OK && !tn__ring_unit_is_out(unit_in(ring, slot))) {
        return_shard(slot);
    }
    (void)tn__error_scope_end(TN_OK);
}

static tn_status adopt_planes(const tn_ring *ring, tn__ring_slot *slot) {
    const void *shard = NULL;
    const tn__ring_unit *unit = unit_in(ring, slot);
    TN_TRY(lease_shard(ring, slot, &shard));
    for (int i = 0; i < unit->plane_count; i++)
        TN_TRY(adopt_plane(ring, slot, i, shard));
    return TN_OK;
}

/* ---- holds --------------------------------------------------------------------------------- */

tn_status tn__ring_hold_begin(tn_ring *ring, int index, tn__ring_hold *hold, tn_stream stream) {
    tn__ring_slot *slot = &ring->slots[index];
    TN_CHECK(slot->state == TN_RING_READY || slot->state == TN_RING_IN_USE);
    tn_stream stream_before = slot->stream;
    slot->stream = stream;
    tn_status status = adopt_planes(ring, slot);
    if (status == TN_OK) status = tn_stream_wait(ring->device, stream, slot->lane);
    if (status == TN_OK) {
        slot->state = TN_RING_IN_USE;
        slot->holds++;
        hold->next = slot->first_hold;
        slot->first_hold = hold;
    } else {
        if (slot->holds == 0) undo_adoption(ring, slot);
        slot->stream = stream_before;
    }
    TN_ASSERT(tn__ring_is_valid(ring));
    return status;
}

/* Whoever closes the scope of the token at this moment finds the hold over. */
void tn__ring_hold_delete(tn_ring *ring, tn__ring_hold *hold) {
    tn_tensor token = hold->token;
    if (!token.value) {
        tn__host_free(hold);
        return;
    }
    atomic_store_explicit(&hold->is_over, 1, memory_order_release);
    tn__error_scope_begin();
    (void)tn_tensor_destroy(token, ring->stream);
    (void)tn__error_scope_end(TN_OK);
}

static void pop_hold(tn_ring *ring, tn__ring_slot *slot) {
    tn__ring_hold *hold = slot->first_hold;
    slot->first_hold = hold->next;
    tn__ring_hold_delete(ring, hold);
}

void tn__ring_hold_end(tn_ring *ring, int index) {
    tn__ring_slot *slot = &ring->slots[index];
    TN_CHECK(slot->state == TN_RING_IN_USE && slot->holds > 1 && slot->first_hold);
    pop_hold(ring, slot);
    slot->holds--;
    TN_ASSERT(tn__ring_is_valid(ring));
}

void tn__ring_forsake(tn_ring *ring, tn__ring_hold *hold) {
    tn__ring_slot *slot = &ring->slots[ring->units[hold->unit].slot];
    tn__ring_hold **link = &slot->first_hold;
    TN_CHECK(slot->state == TN_RING_IN_USE);
    while (*link && *link != hold)
        link = &(*link)->next;
    TN_CHECK(*link);
    *link = hold->next;
    slot->forsaken++;
    TN_ASSERT(tn__ring_is_valid(ring));
}

void tn__ring_forsaken_end(tn_ring *ring, int index) {
    tn__ring_slot *slot = &ring->slots[index];
    TN_CHECK(slot->state == TN_RING_IN_USE && slot->holds > 1 && slot->forsaken > 0);
    slot->forsaken--;
    slot->holds--;
    TN_ASSERT(tn__ring_is_valid(ring));
}

/* ---- going --------------------------------------------------------------------------------- */

static tn_status check_idle(const tn__ring_unit *unit) {
    for (int i = 0; i < unit->plane_count; i++) {
        tn__error_scope_begin();
        tn_status status = tn__tensor_check_idle(unit->planes[i].tensor, "release");
        status = tn__error_scope_end(status == TN_STALE_HANDLE ? TN_OK : status);
        if (status != TN_OK) return status;
    }
    return TN_OK;
}

tn_status tn__ring_drain(tn_ring *ring, int index) {
    tn__ring_slot *slot = &ring->slots[index];
    tn__ring_unit *unit = unit_in(ring, slot);
    int unit_index = slot->unit;
    TN_CHECK(slot->state >= TN_RING_COMM && slot->state <= TN_RING_IN_USE && slot->holds <= 1);
    if (slot->state != TN_RING_COMM) {
        TN_TRY(check_idle(unit));
        TN_TRY(drop_planes(ring, slot));
    }
    while (slot->first_hold)
        pop_hold(ring, slot);
    slot->holds = slot->forsaken = 0;
    slot->state = TN_RING_DRAINING;
    slot->number = ++ring->clock;
    ring->stats.live_bytes -= slot->bytes;
    if (!tn__ring_unit_is_out(unit)) {
        return_shard(slot);
        leave_unit(ring, slot);
    }
    tn__ring_mix(ring, MIX_DRAIN, unit_index, slot->offset);
    TN_ASSERT(tn__ring_is_valid(ring));
    return TN_OK;
}

tn_status tn__ring_settle_unit(tn_ring *ring, int index) {
    tn__ring_unit *unit = &ring->units[index];
    if (unit->slot < 0) return TN_OK;
    tn__ring_slot *slot = &ring->slots[unit->slot];
    if (slot->state != TN_RING_DRAINING) return TN_OK;
    if (is_draining_out(ring, slot)) {
        return TN_FAIL(TN_IN_USE,
                       "ring %s: planes of unit %s that were gathered before are still held by "
                       "other tensors (saved ones): end these first",
                       ring->name, unit->name);
    }
    return_shard(slot);
    leave_unit(ring, slot);
    TN_ASSERT(tn__ring_is_valid(ring));
    return TN_OK;
}

/* A plane that is out and not in its tensor was saved in another one. */
static tn_status check_at_home(const tn_ring *ring, const tn__ring_unit *unit) {
    for (int i = 0; i < unit->plane_count; i++) {
        const tn__ring_plane *plane = &unit->planes[i];
        tn_plane_state state = TN_PLANE_ABSENT;
        if (!atomic_load_explicit(&plane->is_out, memory_order_acquire)) continue;
        tn__error_scope_begin();
        tn_status status = tn_plane_state_get(plane->tensor, plane->plane, &state);
        (void)tn__error_scope_end(TN_OK);
        if (status == TN_OK && state != TN_PLANE_ABSENT) continue;
        return TN_FAIL(TN_IN_USE,
                       "ring %s: plane %s of tensor %d of unit %s is held by another tensor, that "
                       "it was saved in: end that first",
                       ring->name, tn_plane_name(plane->plane), i, unit->name);
    }
    return TN_OK;
}

static tn_status check_end_of(const tn_ring *ring, const tn__ring_slot *slot) {
    if (slot->unit < 0) return TN_OK;
    TN_TRY(check_idle(&ring->units[slot->unit]));
    return check_at_home(ring, &ring->units[slot->unit]);
}

tn_status tn__ring_drain_all(tn_ring *ring) {
    for (int i = 0; i < ring->record_count; i++)
        TN_TRY(check_end_of(ring, &ring->slots[i]));
    for (int i = 0; i < ring->record_count; i++) {
        tn__ring_slot *slot = &ring->slots[i];
        while (slot->holds > 1 && slot->first_hold)
            tn__ring_hold_end(ring, i);
        while (slot->holds > 1)
            tn__ring_forsaken_end(ring, i);
        if (!tn__ring_slot_is_free(ring, slot)) TN_TRY(tn__ring_drain(ring, i));
        if (slot->state == TN_RING_DRAINING) TN_TRY(tn__ring_reclaim(ring, i));
    }
    return TN_OK;
}

/* ---- the whole of it ------------------------------------------------------------------------ */

static int holds_listed(const tn__ring_slot *slot) {
    int count = 0;
    for (const tn__ring_hold *hold = slot->first_hold; hold; hold = hold->next)
        count++;
    return count;
}

static int slot_is_valid(const tn_ring *ring, const tn__ring_slot *slot) {
    int has_unit = slot->unit >= 0;
    if (has_unit && &ring->slots[ring->units[slot->unit].slot] != slot) return 0;
    if (slot->offset + slot->bytes > ring->buffer_bytes) return 0;
    if (holds_listed(slot) != slot->holds - slot->forsaken || slot->forsaken < 0) return 0;
    if ((slot->state == TN_RING_IN_USE) != (slot->holds > 0)) return 0;
    switch (slot->state) {
    case TN_RING_EMPTY: return !has_unit && slot->bytes == 0 && !slot->has_shard_lease;
    case TN_RING_RESERVED:
    case TN_RING_COMM: return has_unit && !slot->has_shard_lease;
    case TN_RING_READY: return has_unit;
    case TN_RING_IN_USE:
        return has_unit && slot->has_shard_lease == (ring->units[slot->unit].shard.value != 0);
    case TN_RING_DRAINING: return has_unit || !slot->has_shard_lease;
    }
    return 0;
}

/* What is free may be under what has come meanwhile: nobody needs it. */
static int lies_apart(const tn_ring *ring, const tn__ring_slot *slot) {
    if (tn__ring_slot_is_free(ring, slot)) return 1;
    for (int i = 0; i < ring->slot_count; i++) {
        const tn__ring_slot *other = &ring->slots[i];
        if (other == slot || tn__ring_slot_is_free(ring, other)) continue;
        if (overlap(other, slot->offset, slot->bytes)) return 0;
    }
    return 1;
}

int tn__ring_is_valid(const tn_ring *ring) {
    size_t live = 0;
    for (int i = 0; i < ring->record_count; i++) {
        const tn__ring_slot *slot = &ring->slots[i];
        if (!slot_is_valid(ring, slot) || !lies_apart(ring, slot)) return 0;
        if (slot->state >= TN_RING_COMM && slot->state <= TN_RING_IN_USE) live += slot->bytes;
    }
    for (int i = 0; i < ring->unit_count; i++) {
        const tn__ring_unit *unit = &ring->units[i];
        if (unit->slot >= 0 && ring->slots[unit->slot].unit != i) return 0;
    }
    return live == ring->stats.live_bytes && live <= ring->buffer_bytes;
}
