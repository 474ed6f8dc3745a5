/* From the address of a block to its piece, without a lock: one table a pool.
 *
 * Open addressing with linear probing, at most half full; a removal moves the entries behind it
 * back, so there are no tombstones.
 *
 *     | key 0 | A, piece | B, piece | C, piece | key 0 |     A, B and C hash to one slot
 *     | key 0 | A, piece | C, piece |  key 0   | key 0 |     B was removed, C moved back
 *
 * Writers hold the pool's mutex. Readers need not: what they find is checked against the piece's
 * tag, which says whose address it is and in what state; what they do not find may have been on
 * the move, and they look again under the mutex. A table that became too small is kept until
 * the pool is destroyed, and pieces are never given back before: a reader that is late reads old
 * entries, never freed memory.
 */
#ifndef TENURE_BLOCK_TABLE_H
#define TENURE_BLOCK_TABLE_H

#include <stdatomic.h>

#include "error.h"

struct tn__piece;

typedef struct tn__block_slot {
    _Atomic uintptr_t key; /* the block's address; 0: the slot is empty */
    _Atomic(struct tn__piece *) piece;
} tn__block_slot;

typedef struct tn__block_slots {
    struct tn__block_slots *smaller; /* the one before, for readers that are late */
    size_t mask;                     /* count of slots - 1 */
    unsigned shift;                  /* 64 - log2 of that count */
    tn__block_slot slots[];
} tn__block_slots;

typedef struct tn__block_table {
    _Atomic(tn__block_slots *) current; /* NULL: none was needed yet */
    size_t count;
} tn__block_table;

/* Room for `count` more entries, so that their inserts can not fail. */
tn_status tn__block_table_reserve(tn__block_table *table, size_t count);

/* No entry has the address yet; there is room. */
void tn__block_table_insert(tn__block_table *table, uintptr_t address, struct tn__piece *piece);

/* The entry must be there. */
void tn__block_table_remove(tn__block_table *table, uintptr_t address);

/* Frees the memory; nobody reads any more. */
void tn__block_table_clear(tn__block_table *table);

static inline size_t tn__block_slot_of(const tn__block_slots *slots, uintptr_t address) {
    return (size_t)(((uint64_t)address >> 9) * 0x9E3779B97F4A7C15u >> slots->shift);
}

/* The piece at the address; NULL if none was seen. Exact under the mutex. */
static inline struct tn__piece *tn__block_table_find(tn__block_table *table, uintptr_t address) {
    tn__block_slots *slots = atomic_load_explicit(&table->current, memory_order_acquire);
    size_t at;
    if (!slots) return NULL;
    at = tn__block_slot_of(slots, address);
    for (size_t probes = 0; probes <= slots->mask; probes++) {
        tn__block_slot *slot = &slots->slots[at];
        uintptr_t key = atomic_load_explicit(&slot->key, memory_order_acquire);
        if (key == address) return atomic_load_explicit(&slot->piece, memory_order_acquire);
        if (key == 0) return NULL;
        at = (at + 1) & slots->mask;
    }
    return NULL;
}

#endif
