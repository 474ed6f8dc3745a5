/* Handles: 64-bit values that name a scope, tensor or lease and tell when it is gone.
 *
 *     63          32 31  28 27        4 3    0
 *     | generation  | kind |   place   | lock |      0 is no handle
 *
 * There are a few locks, and a table of handles for each. A handle says which lock guards its
 * object, so that one lock is all that a look-up takes: a value that has died is found out under
 * it and never by touching freed memory. A slot's generation grows each time its object ends, so
 * an old value never matches again.
 */
#ifndef TENURE_HANDLE_TABLE_H
#define TENURE_HANDLE_TABLE_H

#include "object_lock.h"

typedef enum tn__handle_kind {
    TN__HANDLE_SCOPE = 1,
    TN__HANDLE_TENSOR,
    TN__HANDLE_LEASE
} tn__handle_kind;

/* A handle of `object`, which `lock` guards; the caller holds it. TN_OUT_OF_HOST_MEMORY; then
 * nothing has changed. */
tn_status tn__handle_create(tn__handle_kind kind, void *object, unsigned lock, uint64_t *out);

/* Ends a handle that is alive or suspended; its lock is held. */
void tn__handle_destroy(uint64_t value);

/* ---- slots ---------------------------------------------------------------------------------- */

typedef struct tn__handle_slot {
    uint64_t value; /* 0: not alive */
    void *object;
    uint32_t generation; /* that a free slot will get next */
    int32_t next_free;
} tn__handle_slot;

/* Chunk b has the slots of the places from 2^b up to the next power, 64 being the first place. */
enum { TN__HANDLE_PLACE_BITS = 24, TN__HANDLE_LOCK_BITS = 4, TN__HANDLE_KIND_SHIFT = 28 };
_Static_assert(TN__LOCK_COUNT == 1 << TN__HANDLE_LOCK_BITS, "a handle has room for these locks");

typedef struct tn__handle_table {
    /* Where place 0 would be if the chunk began there; 0: no such chunk. */
    _Alignas(256) uintptr_t origins[TN__HANDLE_PLACE_BITS];
    uint32_t next_place; /* below it: in use, free or retired */
    int chunk_count;
    int32_t first_free, last_free; /* places */
    uint64_t in_use;               /* alive or suspended */
    uint32_t first_generation;
    uint32_t last_generation; /* highest that any slot has or will get */
} tn__handle_table;

extern tn__handle_table tn__handle_tables[TN__LOCK_COUNT];

static inline unsigned tn__handle_lock(uint64_t value) {
    return (unsigned)value & (TN__LOCK_COUNT - 1);
}

static inline uint32_t tn__handle_place(uint64_t value) {
    return (uint32_t)(value >> TN__HANDLE_LOCK_BITS) & ((1u << TN__HANDLE_PLACE_BITS) - 1);
}

static inline uintptr_t tn__handle_origin(const tn__handle_table *table, uint32_t place) {
    return table->origins[31u ^ (unsigned)__builtin_clz(place | 1)];
}

/* The object, if the handle is alive; its lock is held. */
static inline void *tn__handle_alive(uint64_t value, tn__handle_kind kind) {
    uint32_t place = tn__handle_place(value);
    uintptr_t origin = tn__handle_origin(&tn__handle_tables[tn__handle_lock(value)], place);
    const tn__handle_slot *at = (const tn__handle_slot *)(origin + place * sizeof *at);
    int is_kind = (uint32_t)value >> TN__HANDLE_KIND_SHIFT == (uint32_t)kind;
    return origin && is_kind && at->value == value ? at->object : NULL;
}

/* What comes and goes all the time keeps its slot: its handle is suspended and resumed, which gives
 * it the next value. The slot of a handle that is alive or suspended stays where it is. */
tn__handle_slot *tn__handle_slot_of(uint64_t value);

static inline void tn__handle_suspend(tn__handle_slot *slot) { slot->value = 0; }

/* `last` is the value that the slot had before. 0 if its values are used up: the suspended handle
 * is to be destroyed. */
static inline uint64_t tn__handle_resume(tn__handle_slot *slot, uint64_t last) {
    const uint64_t step = (uint64_t)1 << 32;
    uint64_t value = last + step;
    if (__builtin_expect(value < step, 0)) return 0;
    return slot->value = value;
}

/* ---- look-up -------------------------------------------------------------------------------- */

tn_status tn__handle_fail(uint64_t value, tn__handle_kind kind);

/* The object of a handle that is alive, with its lock held. NULL: none is held, and TN_STALE_HANDLE
 * is recorded. */
static inline void *tn__handle_get(uint64_t value, tn__handle_kind kind) {
    tn__lock(tn__handle_lock(value));
    void *alive = tn__handle_alive(value, kind);
    if (__builtin_expect(alive != NULL, 1)) return alive;
    (void)tn__handle_fail(value, kind);
    return NULL;
}

static inline tn_status tn__handle_acquire(uint64_t value, tn__handle_kind kind, void **object) {
    void *alive = tn__handle_get(value, kind);
    if (!alive) return TN_STALE_HANDLE;
    *object = alive;
    return TN_OK;
}

/* The same for a caller that holds the lock: NULL if it is not alive or another lock's. */
void *tn__handle_peek(uint64_t value, tn__handle_kind kind, unsigned lock);

/* Handles alive now. With none, and none suspended, the tables hold no host memory. For tests; no
 * lock is held. */
uint64_t tn__handle_count(void);

/* First generation of slots made from now on; no handle is alive. For tests of wrap-around. */
void tn__handle_start_at(uint32_t generation);

#endif
