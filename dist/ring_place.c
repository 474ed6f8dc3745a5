/* First fit, twice, and equal slots: the smallest of the three.
 *
 * Invariant of a placement under way: `placed` has the stays that have an offset, by rising
 * offset, and no two of them that meet in time meet in the buffer.
 */
#include "ring_place.h"

#include <stdlib.h>

#include "host_alloc.h"

size_t tn__ring_round_up(size_t bytes) {
    const size_t mask = TN__RING_ALIGNMENT - 1;
    return bytes > SIZE_MAX - mask ? SIZE_MAX : (bytes + mask) & ~mask;
}

static int meet(const tn__ring_stay *a, const tn__ring_stay *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* ---- orders -------------------------------------------------------------------------------- */

static int by_time(const void *left, const void *right) {
    const tn__ring_stay *a = *(tn__ring_stay *const *)left, *b = *(tn__ring_stay *const *)right;
    return a->first < b->first ? -1 : a->first > b->first;
}

static int by_bytes(const void *left, const void *right) {
    const tn__ring_stay *a = *(tn__ring_stay *const *)left, *b = *(tn__ring_stay *const *)right;
    if (a->bytes != b->bytes) return a->bytes > b->bytes ? -1 : 1;
    return by_time(left, right);
}

/* ---- placements ---------------------------------------------------------------------------- */

typedef int (*stay_order)(const void *left, const void *right);

typedef struct placement {
    tn__ring_stay **order;  /* of all */
    tn__ring_stay **placed; /* by offset */
    int count, placed_count;
    size_t slot_bytes; /* that every stay takes; 0: its own */
    size_t bytes;      /* that the placement needs */
} placement;

static size_t taken_by(const placement *self, const tn__ring_stay *stay) {
    return self->slot_bytes ? self->slot_bytes : stay->bytes;
}

/* The lowest gap among those that it meets. */
static size_t first_fit(const placement *self, const tn__ring_stay *stay) {
    size_t offset = 0;
    for (int i = 0; i < self->placed_count; i++) {
        const tn__ring_stay *other = self->placed[i];
        if (!meet(stay, other)) continue;
        if (other->offset >= offset && other->offset - offset >= taken_by(self, stay)) break;
        size_t end = other->offset + taken_by(self, other);
        if (end > offset) offset = end;
    }
    return offset;
}

static void put(placement *self, tn__ring_stay *stay) {
    int at = self->placed_count++;
    size_t end = stay->offset + taken_by(self, stay);
    for (; at > 0 && self->placed[at - 1]->offset > stay->offset; at--)
        self->placed[at] = self->placed[at - 1];
    self->placed[at] = stay;
    if (end > self->bytes) self->bytes = end;
}

static size_t place_all(placement *self, stay_order order, size_t slot_bytes) {
    qsort(self->order, (size_t)self->count, sizeof(tn__ring_stay *), order);
    self->placed_count = 0;
    self->slot_bytes = slot_bytes;
    self->bytes = 0;
    for (int i = 0; i < self->count; i++) {
        self->order[i]->offset = first_fit(self, self->order[i]);
        put(self, self->order[i]);
    }
    return self->bytes;
}

/* ---- what no placement can do without ------------------------------------------------------- */

/* The most is there when a stay begins. */
static tn_status measure(const tn__ring_stay *stays, int count, tn__ring_placed *out) {
    *out = (tn__ring_placed){0};
    for (int i = 0; i < count; i++) {
        size_t bytes = 0;
        int units = 0;
        for (int j = 0; j < count; j++) {
            if (stays[j].first > stays[i].first || stays[j].last < stays[i].first) continue;
            if (__builtin_add_overflow(bytes, stays[j].bytes, &bytes)) bytes = SIZE_MAX;
            units++;
        }
        if (bytes > out->peak_bytes) out->peak_bytes = bytes;
        if (units > out->units_at_once) out->units_at_once = units;
        if (stays[i].bytes > out->largest_bytes) out->largest_bytes = stays[i].bytes;
    }
    TN_REQUIRE(out->peak_bytes < SIZE_MAX / 4 &&
                   out->largest_bytes < SIZE_MAX / 4 / (size_t)(count + 1),
               "ring: units of up to %zu bytes, %d of them at a time, are too large",
               out->largest_bytes, out->units_at_once);
    return TN_OK;
}

tn_status tn__ring_place(tn__ring_stay *stays, int count, tn__ring_placed *out) {
    placement self = {.count = count};
    tn__ring_placed found;
    TN_TRY(measure(stays, count, &found));
    if (count > 0) {
        self.order = tn__host_alloc(2 * (size_t)count, sizeof *self.order);
        if (!self.order) return TN_OUT_OF_HOST_MEMORY;
        self.placed = self.order + count;
        for (int i = 0; i < count; i++)
            self.order[i] = &stays[i];
        size_t timely = place_all(&self, by_time, 0);
        size_t large_first = place_all(&self, by_bytes, 0);
        size_t slots = place_all(&self, by_time, found.largest_bytes);
        found.buffer_bytes = slots;
        if (large_first <= slots) found.buffer_bytes = place_all(&self, by_bytes, 0);
        if (timely <= found.buffer_bytes) found.buffer_bytes = place_all(&self, by_time, 0);
        tn__host_free(self.order);
    }
    *out = found;
    return TN_OK;
}
