/* The handle tables, one for each lock.
 *
 *     chunk 6: 64 slots | chunk 7: 128 slots | chunk 8: 256 slots | ...   (addresses stay put)
 *
 * Invariants: a slot is alive (it has its handle's value), suspended (no value, but an object),
 * free (in the list of free slots, oldest first) or retired (its generations are used up);
 * `generation` of a free slot is the one it will get next. When the last handle of a table ends,
 * its chunks are given back and `first_generation` moves past every generation that was ever given
 * out, so that values stay unique across that too.
 */
#include "handle_table.h"

#include "host_alloc.h"

enum {
    FIRST_CHUNK = 6,
    CHUNK_COUNT = TN__HANDLE_PLACE_BITS - FIRST_CHUNK,
    FIRST_PLACE = 1 << FIRST_CHUNK,
    NO_SLOT = -1
};

#define EMPTY_TABLE                                                                                \
    {                                                                                              \
        .next_place = FIRST_PLACE, .first_free = NO_SLOT, .last_free = NO_SLOT,                    \
        .first_generation = 1, .last_generation = 1                                                \
    }
#define FOUR_EMPTY_TABLES EMPTY_TABLE, EMPTY_TABLE, EMPTY_TABLE, EMPTY_TABLE

tn__handle_table tn__handle_tables[TN__LOCK_COUNT] = {FOUR_EMPTY_TABLES, FOUR_EMPTY_TABLES,
                                                      FOUR_EMPTY_TABLES, FOUR_EMPTY_TABLES};

/* ---- slots: the table's lock is held ------------------------------------------------------- */

static tn__handle_slot *slot_at(const tn__handle_table *table, uint32_t place) {
    return (tn__handle_slot *)(tn__handle_origin(table, place) + place * sizeof(tn__handle_slot));
}

/* The slot of a handle that is alive or suspended. */
static tn__handle_slot *slot_in_use(const tn__handle_table *table, uint64_t value) {
    uint32_t place = tn__handle_place(value);
    TN_CHECK(place >= FIRST_PLACE && place < table->next_place);
    tn__handle_slot *at = slot_at(table, place);
    TN_CHECK(at->object && (at->value == value || at->value == 0));
    return at;
}

static uint32_t place_limit(const tn__handle_table *table) {
    return 1u << (FIRST_CHUNK + table->chunk_count);
}

static tn_status add_chunk(tn__handle_table *table) {
    size_t slots = place_limit(table);
    if (table->chunk_count == CHUNK_COUNT) {
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "more than %zu scopes, tensors and leases at once",
                       slots - FIRST_PLACE);
    }
    tn__handle_slot *chunk = tn__host_alloc(slots, sizeof *chunk);
    if (!chunk) return TN_OUT_OF_HOST_MEMORY;
    table->origins[FIRST_CHUNK + table->chunk_count] = (uintptr_t)chunk - slots * sizeof *chunk;
    table->chunk_count++;
    return TN_OK;
}

static tn_status take_slot(tn__handle_table *table, uint32_t *place) {
    if (table->first_free != NO_SLOT) {
        *place = (uint32_t)table->first_free;
        table->first_free = slot_at(table, *place)->next_free;
        if (table->first_free == NO_SLOT) table->last_free = NO_SLOT;
        return TN_OK;
    }
    if (table->next_place == place_limit(table)) TN_TRY(add_chunk(table));
    *place = table->next_place++;
    slot_at(table, *place)->generation = table->first_generation;
    return TN_OK;
}

/* Oldest first, so that generations grow evenly; a used-up slot is never given out again. */
static void give_slot(tn__handle_table *table, tn__handle_slot *at, uint64_t value) {
    int32_t place = (int32_t)tn__handle_place(value);
    uint32_t last = (uint32_t)(value >> 32);
    at->object = NULL;
    at->value = 0;
    at->generation = last == UINT32_MAX ? UINT32_MAX : last + 1;
    if (at->generation > table->last_generation) table->last_generation = at->generation;
    if (last == UINT32_MAX) return;
    at->next_free = NO_SLOT;
    if (table->last_free == NO_SLOT)
        table->first_free = place;
    else
        slot_at(table, (uint32_t)table->last_free)->next_free = place;
    table->last_free = place;
}

/* Only while generations are plentiful: near their end the slots must keep their own. */
static void give_chunks_back(tn__handle_table *table) {
    if (table->last_generation > UINT32_MAX / 2) return;
    for (int i = 0; i < table->chunk_count; i++) {
        uint32_t first = 1u << (FIRST_CHUNK + i);
        tn__host_free(slot_at(table, first));
        table->origins[FIRST_CHUNK + i] = 0;
    }
    table->chunk_count = 0;
    table->next_place = FIRST_PLACE;
    table->first_free = table->last_free = NO_SLOT;
    table->first_generation = table->last_generation;
}

/* ---- the public part ----------------------------------------------------------------------- */

tn_status tn__handle_create(tn__handle_kind kind, void *object, unsigned lock, uint64_t *out) {
    uint32_t place = 0;
    TN_ASSERT(object != NULL);
    TN_ASSERT(lock < TN__LOCK_COUNT);
    tn__handle_table *table = &tn__handle_tables[lock];
    tn_status status = take_slot(table, &place);
    if (status == TN_OK) {
        tn__handle_slot *at = slot_at(table, place);
        at->object = object;
        at->value = (uint64_t)at->generation << 32 | (uint64_t)kind << TN__HANDLE_KIND_SHIFT |
                    (uint64_t)place << TN__HANDLE_LOCK_BITS | lock;
        table->in_use++;
        *out = at->value;
    } else if (table->in_use == 0) {
        give_chunks_back(table);
    }
    return status;
}

void tn__handle_destroy(uint64_t value) {
    tn__handle_table *table = &tn__handle_tables[tn__handle_lock(value)];
    give_slot(table, slot_in_use(table, value), value);
    table->in_use--;
    if (table->in_use == 0) give_chunks_back(table);
}

tn__handle_slot *tn__handle_slot_of(uint64_t value) {
    return slot_in_use(&tn__handle_tables[tn__handle_lock(value)], value);
}

void *tn__handle_peek(uint64_t value, tn__handle_kind kind, unsigned lock) {
    return tn__handle_lock(value) == lock ? tn__handle_alive(value, kind) : NULL;
}

TN__SLOW tn_status tn__handle_fail(uint64_t value, tn__handle_kind kind) {
    static const char *const names[] = {"handle", "scope", "tensor", "lease"};
    tn__unlock(tn__handle_lock(value));
    if (value == 0)
        return TN_FAIL(TN_STALE_HANDLE, "no %s was given: the handle is {0}", names[kind]);
    return TN_FAIL(TN_STALE_HANDLE, "%s 0x%016llx is not alive: it has ended, or was never made",
                   names[kind], (unsigned long long)value);
}

static uint64_t count_alive(const tn__handle_table *table) {
    uint64_t count = 0;
    for (uint32_t place = FIRST_PLACE; place < table->next_place; place++)
        count += slot_at(table, place)->value != 0;
    return count;
}

uint64_t tn__handle_count(void) {
    uint64_t count = 0;
    for (unsigned lock = 0; lock < TN__LOCK_COUNT; lock++) {
        tn__lock(lock);
        count += count_alive(&tn__handle_tables[lock]);
        tn__unlock(lock);
    }
    return count;
}

void tn__handle_start_at(uint32_t generation) {
    for (unsigned lock = 0; lock < TN__LOCK_COUNT; lock++) {
        tn__handle_table *table = &tn__handle_tables[lock];
        tn__lock(lock);
        TN_CHECK(table->in_use == 0);
        table->last_generation = 1; /* lets the chunks go whatever their age */
        give_chunks_back(table);
        table->first_generation = table->last_generation = generation;
        tn__unlock(lock);
    }
}
