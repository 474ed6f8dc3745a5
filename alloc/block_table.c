/* Writers of the table of blocks: see block_table.h. */
#include "block_table.h"

#include "host_alloc.h"

#define SLOTS_FIRST 64

static tn__block_slots *current_of(tn__block_table *table) {
    return atomic_load_explicit(&table->current, memory_order_relaxed);
}

static uintptr_t key_at(const tn__block_slots *slots, size_t at) {
    return atomic_load_explicit(&slots->slots[at].key, memory_order_relaxed);
}

/* The piece goes first: one who sees the key finds it. */
static void set_slot(tn__block_slots *slots, size_t at, uintptr_t key, struct tn__piece *piece) {
    atomic_store_explicit(&slots->slots[at].piece, piece, memory_order_release);
    atomic_store_explicit(&slots->slots[at].key, key, memory_order_release);
}

static void place(tn__block_slots *slots, uintptr_t address, struct tn__piece *piece) {
    size_t at = tn__block_slot_of(slots, address);
    while (key_at(slots, at)) {
        TN_ASSERT(key_at(slots, at) != address);
        at = (at + 1) & slots->mask;
    }
    set_slot(slots, at, address, piece);
}

static tn__block_slots *make_slots(size_t count) {
    tn__block_slots *slots = tn__host_alloc(1, sizeof *slots + count * sizeof slots->slots[0]);
    if (!slots) return NULL;
    slots->mask = count - 1;
    slots->shift = 64 - (unsigned)__builtin_ctzll(count);
    return slots;
}

tn_status tn__block_table_reserve(tn__block_table *table, size_t count) {
    tn__block_slots *old = current_of(table);
    tn__block_slots *grown;
    size_t slot_count = old ? old->mask + 1 : SLOTS_FIRST;
    while (slot_count / 2 < table->count + count)
        slot_count *= 2;
    if (old && slot_count == old->mask + 1) return TN_OK;
    grown = make_slots(slot_count);
    if (!grown) return TN_OUT_OF_HOST_MEMORY;
    grown->smaller = old;
    for (size_t i = 0; old && i <= old->mask; i++) {
        if (!key_at(old, i)) continue;
        place(grown, key_at(old, i),
              atomic_load_explicit(&old->slots[i].piece, memory_order_relaxed));
    }
    atomic_store_explicit(&table->current, grown, memory_order_release);
    return TN_OK;
}

void tn__block_table_insert(tn__block_table *table, uintptr_t address, struct tn__piece *piece) {
    tn__block_slots *slots = current_of(table);
    TN_CHECK(slots && table->count <= slots->mask / 2);
    place(slots, address, piece);
    table->count++;
}

/* The hole is filled by the next entry that may be there: one whose first slot is not behind it. */
static void close_hole(tn__block_slots *slots, size_t hole) {
    size_t at = hole;
    for (;;) {
        uintptr_t key;
        at = (at + 1) & slots->mask;
        key = key_at(slots, at);
        if (!key) break;
        if (((at - tn__block_slot_of(slots, key)) & slots->mask) < ((at - hole) & slots->mask)) {
            continue;
        }
        set_slot(slots, hole, key,
                 atomic_load_explicit(&slots->slots[at].piece, memory_order_relaxed));
        hole = at;
    }
    set_slot(slots, hole, 0, NULL);
}

void tn__block_table_remove(tn__block_table *table, uintptr_t address) {
    tn__block_slots *slots = current_of(table);
    size_t at = tn__block_slot_of(slots, address);
    while (key_at(slots, at) != address) {
        TN_CHECK(key_at(slots, at) != 0);
        at = (at + 1) & slots->mask;
    }
    close_hole(slots, at);
    table->count--;
}

void tn__block_table_clear(tn__block_table *table) {
    tn__block_slots *slots = current_of(table);
    while (slots) {
        tn__block_slots *smaller = slots->smaller;
        tn__host_free(slots);
        slots = smaller;
    }
    atomic_store_explicit(&table->current, NULL, memory_order_relaxed);
    table->count = 0;
}
