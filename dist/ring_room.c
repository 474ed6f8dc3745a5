/* Where the next gather goes: a slot and an offset, chosen from what is held alone, so that all
 * ranks choose the same.
 *
 * Without a schedule a slot has its own place, and the one that has been free for longest is taken:
 * its uses are most likely over. With one, the schedule says the offset; calls that it does not
 * know get the lowest gap.
 */
#include "ring_slots.h"

#include "text_sink.h"

/* EMPTY ones first, then the one that drained first; -1: none is free. */
static int longest_free(const tn_ring *ring) {
    int best = -1;
    for (int i = 0; i < ring->slot_count; i++) {
        const tn__ring_slot *slot = &ring->slots[i];
        if (!tn__ring_slot_is_free(ring, slot)) continue;
        if (slot->state == TN_RING_EMPTY) return i;
        if (best < 0 || slot->number < ring->slots[best].number) best = i;
    }
    return best;
}

/* The held one that lies there and ends last; NULL: nothing is in the way. */
static const tn__ring_slot *in_the_way(const tn_ring *ring, size_t offset, size_t bytes) {
    const tn__ring_slot *last = NULL;
    for (int i = 0; i < ring->slot_count; i++) {
        const tn__ring_slot *slot = &ring->slots[i];
        if (tn__ring_slot_is_free(ring, slot)) continue;
        if (slot->offset >= offset + bytes || offset >= slot->offset + slot->bytes) continue;
        if (!last || slot->offset + slot->bytes > last->offset + last->bytes) last = slot;
    }
    return last;
}

static int lowest_gap(const tn_ring *ring, size_t bytes, size_t *out) {
    size_t offset = 0;
    for (const tn__ring_slot *slot = NULL;; offset = slot->offset + slot->bytes) {
        if (offset > ring->buffer_bytes || ring->buffer_bytes - offset < bytes) return 0;
        slot = in_the_way(ring, offset, bytes);
        if (!slot) break;
    }
    *out = offset;
    return 1;
}

int tn__ring_find_room(const tn_ring *ring, int unit, size_t planned, int *slot, size_t *offset) {
    size_t bytes = ring->units[unit].bytes;
    *offset = 0;
    *slot = ring->units[unit].own_slot;
    if (*slot >= 0) return 1;
    *slot = longest_free(ring);
    if (*slot < 0) return 0;
    if (ring->stride) {
        *offset = (size_t)*slot * ring->stride;
        return 1;
    }
    *offset = planned;
    if (planned != SIZE_MAX && !in_the_way(ring, planned, bytes)) return 1;
    return lowest_gap(ring, bytes, offset);
}

int tn__ring_oldest_unheld(const tn_ring *ring) {
    const tn__ring_slot *oldest = NULL;
    for (int i = 0; i < ring->slot_count; i++) {
        const tn__ring_slot *slot = &ring->slots[i];
        if (slot->state != TN_RING_COMM && slot->state != TN_RING_READY) continue;
        if (!oldest || slot->number < oldest->number) oldest = slot;
    }
    return oldest ? oldest->unit : -1;
}

static void tell_slot(const tn_ring *ring, const tn__ring_slot *slot, tn__text *out) {
    if (tn__ring_slot_is_free(ring, slot)) return;
    tn__text_add(out, "; unit %s has %zu bytes at %zu, %s, holds: %d", ring->units[slot->unit].name,
                 slot->bytes, slot->offset, tn_ring_state_name(slot->state), slot->holds);
}

tn_status tn__ring_fail_full(const tn_ring *ring, int unit) {
    char text[512];
    tn__text out = tn__text_begin(text, sizeof text);
    for (int i = 0; i < ring->slot_count; i++)
        tell_slot(ring, &ring->slots[i], &out);
    return TN_FAIL(TN_IN_USE,
                   "ring %s has no room for unit %s of %zu bytes: of %zu bytes in %d slots %zu are "
                   "held%s: release one, or give the ring more slots",
                   ring->name, ring->units[unit].name, ring->units[unit].bytes, ring->buffer_bytes,
                   ring->slot_count, ring->stats.live_bytes, text);
}
