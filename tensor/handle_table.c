/* The handle tables, one for each lock.
 *
 *     chunk 0: 64 slots | chunk 1: 128 slots | chunk 2: 256 slots | ...   (addresses stay put)
 *
 * Invariants: a slot is alive (it has its handle's value), suspended (no value, but an object),
 * free (in the list of free slots, oldest first) or retired (its generations are used up);
 * `generation` of a free slot is the one it will get next. When the last handle of a table ends,
 * its chunks are given back and `first_generation` moves past every generation that was ever given
 * out, so that values stay unique across that too.
 */
#include "handle_table.h"

#include "host_alloc.h"
#include "thread_barrier.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    LOCK_BITS = 4,
    INDEX_BITS = 24,
    FIRST_CHUNK_BITS = 6,
    CHUNK_COUNT = INDEX_BITS - FIRST_CHUNK_BITS,
    KIND_SHIFT = LOCK_BITS + INDEX_BITS,
    NO_SLOT = -1
};
_Static_assert(TN__LOCK_COUNT == 1 << LOCK_BITS, "a handle has room for just these locks");

typedef struct handle_table {
    tn__handle_slot *chunks[CHUNK_COUNT];
    uint32_t slot_count; /* in use, free or retired */
    uint32_t slot_limit; /* that the chunks hold */
    int chunk_count;
    int32_t first_free, last_free;
    uint64_t in_use; /* alive or suspended */
    uint32_t first_generation;
    uint32_t last_generation; /* highest that any slot has or will get */
} handle_table;

#define EMPTY_TABLE                                                                                \
    { .first_free = NO_SLOT, .last_free = NO_SLOT, .first_generation = 1, .last_generation = 1 }
#define FOUR_EMPTY_TABLES EMPTY_TABLE, EMPTY_TABLE, EMPTY_TABLE, EMPTY_TABLE

static handle_table tables[TN__LOCK_COUNT] = {FOUR_EMPTY_TABLES, FOUR_EMPTY_TABLES,
                                              FOUR_EMPTY_TABLES, FOUR_EMPTY_TABLES};

/* ---- locks --------------------------------------------------------------------------------- */

tn__lock_word tn__locks[TN__LOCK_COUNT];

/* Locks are held for tens of nanoseconds, unless memory has to be got. */
enum { SPINS = 64 };

static int spin(tn__lock_word *word) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&word->state, memory_order_relaxed) == TN__LOCK_FREE &&
            tn__lock_word_try(word)) {
            return 1;
        }
        __builtin_ia32_pause();
    }
    return 0;
}

/* Behind the barrier whoever lets the lock go sees this waiter and wakes one, or has let it go
 * visibly. The kernel puts the thread to sleep only if the lock is held. */
void tn__lock_wait(tn__lock_word *word) {
    if (spin(word)) return;
    atomic_fetch_add(&word->waiters, 1);
    if (atomic_load(&word->is_asymmetric)) tn__barrier_all_threads();
    while (!tn__lock_word_try(word))
        (void)syscall(SYS_futex, &word->state, FUTEX_WAIT_PRIVATE, TN__LOCK_HELD, NULL, NULL, 0);
    atomic_fetch_sub(&word->waiters, 1);
}

/* Given up by an exchange: a waiter that has not seen the change says that it waits before that. */
void tn__lock_prepare(unsigned lock) {
    tn__lock_word *word = &tn__locks[lock];
    if (!tn__barrier_is_there()) return;
    tn__lock(lock);
    atomic_store(&word->is_asymmetric, 1);
    (void)atomic_exchange(&word->state, TN__LOCK_FREE);
    if (atomic_load(&word->waiters)) tn__lock_wake(word);
}

void tn__lock_wake(tn__lock_word *word) {
    (void)syscall(SYS_futex, &word->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void tn__defer(unsigned lock, tn__deferred *item) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    item->next = tn__locks[lock].deferred;
    tn__locks[lock].deferred = item;
}

static tn__deferred *oldest_first(tn__deferred *newest) {
    tn__deferred *reversed = NULL;
    while (newest) {
        tn__deferred *next = newest->next;
        newest->next = reversed;
        reversed = newest;
        newest = next;
    }
    return reversed;
}

void tn__lock_run(tn__deferred *newest) {
    tn__deferred *item = oldest_first(newest);
    tn__saved_error error;
    tn__error_save(&error);
    while (item) {
        tn__deferred *next = item->next;
        item->run(item);
        item = next;
    }
    tn__error_restore(&error);
}

/* ---- slots: the table's lock is held ------------------------------------------------------- */

/* Chunk c starts at 64 * (2^c - 1): the highest bit of index + 64 says which. */
static tn__handle_slot *slot_at(const handle_table *table, uint32_t index) {
    uint32_t shifted = index + (1u << FIRST_CHUNK_BITS);
    int bit = __builtin_clz(shifted) ^ 31;
    return &table->chunks[bit - FIRST_CHUNK_BITS][shifted - (1u << bit)];
}

static unsigned lock_of(uint64_t value) { return (unsigned)value & ((1u << LOCK_BITS) - 1); }

static uint32_t index_of(uint64_t value) {
    return (uint32_t)(value >> LOCK_BITS) & ((1u << INDEX_BITS) - 1);
}

static void *alive_object(const handle_table *table, uint64_t value, tn__handle_kind kind) {
    uint32_t index = index_of(value);
    if (index >= table->slot_count || (value >> KIND_SHIFT & 15) != kind) return NULL;
    const tn__handle_slot *at = slot_at(table, index);
    return at->value == value ? at->object : NULL;
}

/* The slot of a handle that is alive or suspended. */
static tn__handle_slot *slot_in_use(const handle_table *table, uint64_t value) {
    uint32_t index = index_of(value);
    TN_CHECK(index < table->slot_count);
    tn__handle_slot *at = slot_at(table, index);
    TN_CHECK(at->object && at->generation == value >> 32);
    return at;
}

static tn_status add_chunk(handle_table *table) {
    size_t slots = (size_t)1 << (FIRST_CHUNK_BITS + table->chunk_count);
    if (table->chunk_count == CHUNK_COUNT) {
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "more than %u scopes, tensors and leases at once",
                       table->slot_limit);
    }
    tn__handle_slot *chunk = tn__host_alloc(slots, sizeof *chunk);
    if (!chunk) return TN_OUT_OF_HOST_MEMORY;
    table->chunks[table->chunk_count++] = chunk;
    table->slot_limit += (uint32_t)slots;
    return TN_OK;
}

static tn_status take_slot(handle_table *table, uint32_t *index) {
    if (table->first_free != NO_SLOT) {
        *index = (uint32_t)table->first_free;
        table->first_free = slot_at(table, *index)->next_free;
        if (table->first_free == NO_SLOT) table->last_free = NO_SLOT;
        return TN_OK;
    }
    if (table->slot_count == table->slot_limit) TN_TRY(add_chunk(table));
    *index = table->slot_count++;
    slot_at(table, *index)->generation = table->first_generation;
    return TN_OK;
}

/* Oldest first, so that generations grow evenly; a used-up slot is never given out again. */
static void give_slot(handle_table *table, uint32_t index) {
    tn__handle_slot *at = slot_at(table, index);
    at->object = NULL;
    at->value = 0;
    uint32_t next = at->generation == UINT32_MAX ? UINT32_MAX : at->generation + 1;
    if (next > table->last_generation) table->last_generation = next;
    if (at->generation == UINT32_MAX) return;
    at->generation = next;
    at->next_free = NO_SLOT;
    if (table->last_free == NO_SLOT)
        table->first_free = (int32_t)index;
    else
        slot_at(table, (uint32_t)table->last_free)->next_free = (int32_t)index;
    table->last_free = (int32_t)index;
}

/* Only while generations are plentiful: near their end the slots must keep their own. */
static void give_chunks_back(handle_table *table) {
    if (table->last_generation > UINT32_MAX / 2) return;
    for (int i = 0; i < table->chunk_count; i++) {
        tn__host_free(table->chunks[i]);
        table->chunks[i] = NULL;
    }
    table->chunk_count = 0;
    table->slot_count = table->slot_limit = 0;
    table->first_free = table->last_free = NO_SLOT;
    table->first_generation = table->last_generation;
}

/* ---- the public part ----------------------------------------------------------------------- */

tn_status tn__handle_create(tn__handle_kind kind, void *object, unsigned lock, uint64_t *out) {
    uint32_t index = 0;
    TN_ASSERT(object != NULL);
    TN_ASSERT(lock < TN__LOCK_COUNT);
    handle_table *table = &tables[lock];
    tn_status status = take_slot(table, &index);
    if (status == TN_OK) {
        tn__handle_slot *at = slot_at(table, index);
        at->object = object;
        at->value = (uint64_t)at->generation << 32 | (uint64_t)kind << KIND_SHIFT |
                    (uint64_t)index << LOCK_BITS | lock;
        table->in_use++;
        *out = at->value;
    } else if (table->in_use == 0) {
        give_chunks_back(table);
    }
    return status;
}

void tn__handle_destroy(uint64_t value) {
    handle_table *table = &tables[lock_of(value)];
    TN_CHECK(slot_in_use(table, value) != NULL);
    give_slot(table, index_of(value));
    table->in_use--;
    if (table->in_use == 0) give_chunks_back(table);
}

tn__handle_slot *tn__handle_slot_of(uint64_t value) {
    return slot_in_use(&tables[lock_of(value)], value);
}

void *tn__handle_peek(uint64_t value, tn__handle_kind kind, unsigned lock) {
    return lock_of(value) == lock ? alive_object(&tables[lock], value, kind) : NULL;
}

static TN__SLOW void *fail_not_alive(uint64_t value, tn__handle_kind kind) {
    static const char *const names[] = {"handle", "scope", "tensor", "lease"};
    tn__unlock(lock_of(value));
    if (value == 0) {
        (void)TN_FAIL(TN_STALE_HANDLE, "no %s was given: the handle is {0}", names[kind]);
    } else {
        (void)TN_FAIL(TN_STALE_HANDLE, "%s 0x%016llx is not alive: it has ended, or was never made",
                      names[kind], (unsigned long long)value);
    }
    return NULL;
}

static TN__SLOW void *wait_and_get(uint64_t value, tn__handle_kind kind) {
    tn__lock_wait(&tn__locks[lock_of(value)]);
    void *alive = alive_object(&tables[lock_of(value)], value, kind);
    return alive ? alive : fail_not_alive(value, kind);
}

/* What is slow is called last, so that nothing is kept for after it. */
void *tn__handle_get(uint64_t value, tn__handle_kind kind) {
    if (!tn__lock_try(lock_of(value))) return wait_and_get(value, kind);
    void *alive = alive_object(&tables[lock_of(value)], value, kind);
    return alive ? alive : fail_not_alive(value, kind);
}

static uint64_t count_alive(const handle_table *table) {
    uint64_t count = 0;
    for (uint32_t index = 0; index < table->slot_count; index++)
        count += slot_at(table, index)->value != 0;
    return count;
}

uint64_t tn__handle_count(void) {
    uint64_t count = 0;
    for (unsigned lock = 0; lock < TN__LOCK_COUNT; lock++) {
        tn__lock(lock);
        count += count_alive(&tables[lock]);
        tn__unlock(lock);
    }
    return count;
}

void tn__handle_start_at(uint32_t generation) {
    for (unsigned lock = 0; lock < TN__LOCK_COUNT; lock++) {
        handle_table *table = &tables[lock];
        tn__lock(lock);
        TN_CHECK(table->in_use == 0);
        table->last_generation = 1; /* lets the chunks go whatever their age */
        give_chunks_back(table);
        table->first_generation = table->last_generation = generation;
        tn__unlock(lock);
    }
}
