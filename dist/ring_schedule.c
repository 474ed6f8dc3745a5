/* Schedules: checked before the first gather, and followed after it.
 *
 * Invariants: `offsets` has an offset for just the ops that start a gather; `next` is below
 * `count`; a ring that is astray follows its schedule again once nothing is gathered and the first
 * op comes.
 */
#include "ring_slots.h"

#include <string.h>

#include "host_alloc.h"

/* ---- tracing ------------------------------------------------------------------------------- */

/* A walk through the ops, as the ring would do them. */
typedef struct trace {
    const tn_ring *ring;
    const tn_ring_op *ops;
    int count;
    int *holds;   /* of each unit */
    int *stay_of; /* that the unit is in; -1: it is not gathered */
    tn__ring_stay *stays;
    int stay_count;
} trace;

static const char *const op_names[] = {"prefetch", "acquire", "release"};

static const char *unit_name(const trace *self, int unit) { return self->ring->units[unit].name; }

static void begin_stay(trace *self, int at, int unit) {
    if (self->stay_of[unit] >= 0) return;
    self->stay_of[unit] = self->stay_count;
    self->stays[self->stay_count++] =
        (tn__ring_stay){.first = at, .unit = unit, .bytes = self->ring->units[unit].bytes};
}

static void end_stay(trace *self, int at, int unit) {
    self->stays[self->stay_of[unit]].last = at;
    self->stay_of[unit] = -1;
}

static tn_status step(trace *self, int at) {
    const tn_ring_op *op = &self->ops[at];
    TN_REQUIRE((unsigned)op->kind <= TN_RING_RELEASE && op->unit >= 0 &&
                   op->unit < self->ring->unit_count,
               "ring %s: op %d of the schedule is of kind %d and unit %d: there are %d units",
               self->ring->name, at, (int)op->kind, op->unit, self->ring->unit_count);
    if (op->kind != TN_RING_RELEASE) begin_stay(self, at, op->unit);
    if (op->kind == TN_RING_ACQUIRE) self->holds[op->unit]++;
    if (op->kind != TN_RING_RELEASE) return TN_OK;
    TN_REQUIRE(self->holds[op->unit] > 0,
               "ring %s: op %d of the schedule releases unit %s, which is not acquired then",
               self->ring->name, at, unit_name(self, op->unit));
    if (--self->holds[op->unit] == 0) end_stay(self, at, op->unit);
    return TN_OK;
}

static tn_status check_end(const trace *self) {
    for (int i = 0; i < self->ring->unit_count; i++) {
        TN_REQUIRE(self->stay_of[i] < 0,
                   "ring %s: at the end of the schedule unit %s is still gathered, with %d holds: "
                   "a step ends with all of them released",
                   self->ring->name, unit_name(self, i), self->holds[i]);
    }
    return TN_OK;
}

/* Units without bytes need no place. */
static void leave_out_empty(trace *self) {
    int kept = 0;
    for (int i = 0; i < self->stay_count; i++) {
        if (self->stays[i].bytes > 0) self->stays[kept++] = self->stays[i];
    }
    self->stay_count = kept;
}

static tn_status walk(trace *self) {
    for (int i = 0; i < self->ring->unit_count; i++)
        self->stay_of[i] = -1;
    for (int i = 0; i < self->count; i++)
        TN_TRY(step(self, i));
    TN_TRY(check_end(self));
    leave_out_empty(self);
    return TN_OK;
}

static void trace_deinit(trace *self) {
    tn__host_free(self->holds);
    tn__host_free(self->stays);
}

static tn_status trace_init(trace *self, const tn_ring *ring, const tn_ring_op *ops, int count) {
    TN_REQUIRE(count >= 0 && (ops || count == 0), "ring %s: a schedule of %d ops at %p", ring->name,
               count, (const void *)ops);
    self->ring = ring;
    self->ops = ops;
    self->count = count;
    size_t units = (size_t)ring->unit_count;
    self->holds = tn__host_alloc(2 * units + 1, sizeof *self->holds);
    self->stays = tn__host_alloc((size_t)count + 1, sizeof *self->stays);
    if (!self->holds || !self->stays) return TN_OUT_OF_HOST_MEMORY;
    self->stay_of = self->holds + units;
    return walk(self);
}

/* ---- checking ------------------------------------------------------------------------------ */

/* The op at which the most is gathered. */
static int busiest_op(const trace *self) {
    size_t most = 0;
    int at = 0;
    for (int i = 0; i < self->stay_count; i++) {
        size_t bytes = 0;
        for (int j = 0; j < self->stay_count; j++) {
            const tn__ring_stay *other = &self->stays[j];
            if (other->first <= self->stays[i].first && other->last >= self->stays[i].first) {
                bytes += other->bytes;
            }
        }
        if (bytes > most) at = self->stays[i].first;
        if (bytes > most) most = bytes;
    }
    return at;
}

/* What the buffer may become: it is as it is once the ring is sealed. */
static size_t allowed_bytes(const tn_ring *ring) {
    if (ring->is_sealed) return ring->buffer_bytes;
    return ring->budget_bytes ? ring->budget_bytes : SIZE_MAX;
}

static tn_status check_fit(const trace *self, const tn__ring_placed *placed) {
    const tn_ring *ring = self->ring;
    if (placed->buffer_bytes > allowed_bytes(ring)) {
        int at = busiest_op(self);
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                       "ring %s: the schedule needs %zu bytes and %zu are allowed: %d units of up "
                       "to %zu bytes, %zu in all, are gathered at op %d (%s unit %s)",
                       ring->name, placed->buffer_bytes, allowed_bytes(ring), placed->units_at_once,
                       placed->largest_bytes, placed->peak_bytes, at, op_names[self->ops[at].kind],
                       unit_name(self, self->ops[at].unit));
    }
    if (ring->is_sealed && placed->units_at_once > ring->slot_count) {
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                       "ring %s: the schedule gathers %d units at a time, and %d slots were made "
                       "at the seal",
                       ring->name, placed->units_at_once, ring->slot_count);
    }
    return TN_OK;
}

tn_status tn__ring_schedule_trace(const tn_ring *ring, const tn_ring_op *ops, int count,
                                  tn_ring_demand *demand, size_t *offsets) {
    trace self = {0};
    tn__ring_placed placed = {0};
    tn_status status = trace_init(&self, ring, ops, count);
    if (status == TN_OK) status = tn__ring_place(self.stays, self.stay_count, &placed);
    if (status == TN_OK) status = check_fit(&self, &placed);
    if (status == TN_OK) {
        demand->peak_bytes = placed.peak_bytes;
        demand->buffer_bytes = placed.buffer_bytes;
        demand->largest_bytes = placed.largest_bytes;
        demand->slots_bytes = placed.largest_bytes * (size_t)placed.units_at_once;
        demand->units_at_once = placed.units_at_once;
        demand->gathers = self.stay_count;
    }
    for (int i = 0; status == TN_OK && offsets && i < count; i++)
        offsets[i] = SIZE_MAX;
    for (int i = 0; status == TN_OK && offsets && i < self.stay_count; i++)
        offsets[self.stays[i].first] = self.stays[i].offset;
    trace_deinit(&self);
    return status;
}

/* ---- following ----------------------------------------------------------------------------- */

static int is_next(const tn__ring_schedule *schedule, tn_ring_op op) {
    const tn_ring_op *next = &schedule->ops[schedule->next];
    return next->kind == op.kind && next->unit == op.unit;
}

static int nothing_is_gathered(const tn_ring *ring) {
    for (int i = 0; i < ring->record_count; i++) {
        if (!tn__ring_slot_is_free(ring, &ring->slots[i])) return 0;
    }
    return 1;
}

static void try_to_resume(tn_ring *ring) {
    tn__ring_schedule *schedule = &ring->schedule;
    if (!schedule->is_astray || !nothing_is_gathered(ring)) return;
    schedule->is_astray = 0;
    schedule->next = 0;
}

size_t tn__ring_schedule_offset(tn_ring *ring, tn_ring_op op) {
    tn__ring_schedule *schedule = &ring->schedule;
    if (schedule->count == 0) return SIZE_MAX;
    try_to_resume(ring);
    if (schedule->is_astray || !is_next(schedule, op)) return SIZE_MAX;
    return schedule->offsets[schedule->next];
}

void tn__ring_schedule_advance(tn_ring *ring, tn_ring_op op) {
    tn__ring_schedule *schedule = &ring->schedule;
    if (schedule->count == 0) return;
    if (!schedule->is_astray && is_next(schedule, op)) {
        schedule->next = (schedule->next + 1) % schedule->count;
        return;
    }
    schedule->is_astray = 1;
    ring->stats.strays++;
}

void tn__ring_schedule_deinit(tn__ring_schedule *schedule) {
    tn__host_free(schedule->ops);
    tn__host_free(schedule->offsets);
    *schedule = (tn__ring_schedule){0};
}

/* ---- setting ------------------------------------------------------------------------------- */

static tn_status copy_schedule(const tn_ring_op *ops, int count, tn__ring_schedule *out) {
    *out = (tn__ring_schedule){.count = count};
    out->ops = tn__host_alloc((size_t)count + 1, sizeof *out->ops);
    out->offsets = tn__host_alloc((size_t)count + 1, sizeof *out->offsets);
    if (!out->ops || !out->offsets) return TN_OUT_OF_HOST_MEMORY;
    if (count > 0) memcpy(out->ops, ops, (size_t)count * sizeof *ops);
    return TN_OK;
}

static tn_status check_settable(const tn_ring *ring) {
    if (!ring->is_sealed) return TN_OK;
    if (ring->stride) {
        return TN_FAIL(TN_INVALID_STATE,
                       "ring %s was sealed without a schedule: it has equal slots", ring->name);
    }
    if (nothing_is_gathered(ring)) return TN_OK;
    return TN_FAIL(TN_IN_USE, "ring %s: its schedule can not change while units are gathered",
                   ring->name);
}

tn_status tn__ring_schedule_set(tn_ring *ring, const tn_ring_op *ops, int count) {
    tn__ring_schedule fresh = {0};
    tn_ring_demand demand = TN_RING_DEMAND_INIT;
    TN_REQUIRE(ops && count > 0, "tn_ring_schedule_set: %d ops at %p: a schedule has some", count,
               (const void *)ops);
    TN_TRY(check_settable(ring));
    tn_status status = copy_schedule(ops, count, &fresh);
    if (status == TN_OK) {
        status = tn__ring_schedule_trace(ring, ops, count, &demand, fresh.offsets);
    }
    if (status != TN_OK) {
        tn__ring_schedule_deinit(&fresh);
        return status;
    }
    tn__ring_schedule_deinit(&ring->schedule);
    ring->schedule = fresh;
    if (demand.buffer_bytes > ring->needed_bytes) ring->needed_bytes = demand.buffer_bytes;
    if (demand.units_at_once > ring->needed_slots) ring->needed_slots = demand.units_at_once;
    return TN_OK;
}
