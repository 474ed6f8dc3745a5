/* The handle table.
 *
 *     chunk 0: 64 slots | chunk 1: 128 slots | chunk 2: 256 slots | ...   (addresses stay put)
 *
 * Invariants: a slot is alive (object set), free (in the list of free slots, oldest first) or
 * retired (its generations are used up); `generation` of a free slot is the one it will get next.
 * When the last handle ends, the chunks are given back and `first_generation` moves past every
 * generation that was ever given out, so that values stay unique across that too.
 * Lock order: an object's lock, then the table's; the table's is held for a few instructions.
 */
#include "handle_table.h"

#include "host_alloc.h"

#include <pthread.h>

enum {
    INDEX_BITS = 28,
    FIRST_CHUNK_BITS = 6,
    CHUNK_COUNT = INDEX_BITS - FIRST_CHUNK_BITS,
    NO_SLOT = -1
};

typedef struct slot {
    void *object; /* NULL: not alive */
    uint32_t generation;
    uint8_t kind;
    uint8_t lock;
    int32_t next_free;
} slot;

typedef struct handle_table {
    pthread_mutex_t lock;
    slot *chunks[CHUNK_COUNT];
    uint32_t slot_count; /* in use, free or retired */
    uint32_t slot_limit; /* that the chunks hold */
    int chunk_count;
    int32_t first_free, last_free;
    uint64_t alive;
    uint32_t first_generation;
    uint32_t last_generation; /* highest that any slot has or will get */
} handle_table;

static handle_table table = {.lock = PTHREAD_MUTEX_INITIALIZER,
                             .first_free = NO_SLOT,
                             .last_free = NO_SLOT,
                             .first_generation = 1,
                             .last_generation = 1};

static pthread_mutex_t locks[TN__LOCK_COUNT] = {
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
    PTHREAD_MUTEX_INITIALIZER};

void tn__lock(unsigned lock) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    TN_CHECK(pthread_mutex_lock(&locks[lock]) == 0);
}

/* By lock, newest first; each list is guarded by its lock. */
static tn__deferred *deferred[TN__LOCK_COUNT];

void tn__defer(unsigned lock, tn__deferred *item) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    item->next = deferred[lock];
    deferred[lock] = item;
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

static void run_deferred(tn__deferred *item) {
    tn__saved_error error;
    tn__error_save(&error);
    while (item) {
        tn__deferred *next = item->next;
        item->run(item);
        item = next;
    }
    tn__error_restore(&error);
}

void tn__unlock(unsigned lock) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    tn__deferred *items = deferred[lock];
    deferred[lock] = NULL;
    TN_CHECK(pthread_mutex_unlock(&locks[lock]) == 0);
    if (items) run_deferred(oldest_first(items));
}

/* ---- slots: the table's lock is held ------------------------------------------------------- */

/* Chunk c starts at 64 * (2^c - 1): the highest bit of index + 64 says which. */
static slot *slot_at(uint32_t index) {
    uint32_t shifted = index + (1u << FIRST_CHUNK_BITS);
    int bit = 31 - __builtin_clz(shifted);
    return &table.chunks[bit - FIRST_CHUNK_BITS][shifted - (1u << bit)];
}

static uint64_t value_of(const slot *at, uint32_t index) {
    return (uint64_t)at->generation << 32 | (uint64_t)at->kind << INDEX_BITS | index;
}

static uint32_t index_of(uint64_t value) { return (uint32_t)value & ((1u << INDEX_BITS) - 1); }

static slot *alive_slot(uint64_t value, tn__handle_kind kind) {
    uint32_t index = index_of(value);
    if (index >= table.slot_count) return NULL;
    slot *at = slot_at(index);
    if (!at->object || at->kind != kind || value_of(at, index) != value) return NULL;
    return at;
}

static tn_status add_chunk(void) {
    size_t slots = (size_t)1 << (FIRST_CHUNK_BITS + table.chunk_count);
    if (table.chunk_count == CHUNK_COUNT) {
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "more than %u scopes, tensors and leases at once",
                       table.slot_limit);
    }
    slot *chunk = tn__host_alloc(slots, sizeof *chunk);
    if (!chunk) return TN_OUT_OF_HOST_MEMORY;
    table.chunks[table.chunk_count++] = chunk;
    table.slot_limit += (uint32_t)slots;
    return TN_OK;
}

static tn_status take_slot(uint32_t *index) {
    if (table.first_free != NO_SLOT) {
        *index = (uint32_t)table.first_free;
        table.first_free = slot_at(*index)->next_free;
        if (table.first_free == NO_SLOT) table.last_free = NO_SLOT;
        return TN_OK;
    }
    if (table.slot_count == table.slot_limit) TN_TRY(add_chunk());
    *index = table.slot_count++;
    slot_at(*index)->generation = table.first_generation;
    return TN_OK;
}

/* Oldest first, so that generations grow evenly; a used-up slot is never given out again. */
static void give_slot(uint32_t index) {
    slot *at = slot_at(index);
    at->object = NULL;
    if (at->generation == UINT32_MAX) return;
    at->generation++;
    if (at->generation > table.last_generation) table.last_generation = at->generation;
    at->next_free = NO_SLOT;
    if (table.last_free == NO_SLOT)
        table.first_free = (int32_t)index;
    else
        slot_at((uint32_t)table.last_free)->next_free = (int32_t)index;
    table.last_free = (int32_t)index;
}

/* Only while generations are plentiful: near their end the slots must keep their own. */
static void give_chunks_back(void) {
    if (table.last_generation > UINT32_MAX / 2) return;
    for (int i = 0; i < table.chunk_count; i++) {
        tn__host_free(table.chunks[i]);
        table.chunks[i] = NULL;
    }
    table.chunk_count = 0;
    table.slot_count = table.slot_limit = 0;
    table.first_free = table.last_free = NO_SLOT;
    table.first_generation = table.last_generation;
}

/* ---- the public part ----------------------------------------------------------------------- */

static void lock_table(void) { TN_CHECK(pthread_mutex_lock(&table.lock) == 0); }

static void unlock_table(void) { TN_CHECK(pthread_mutex_unlock(&table.lock) == 0); }

tn_status tn__handle_create(tn__handle_kind kind, void *object, unsigned lock, uint64_t *out) {
    uint32_t index = 0;
    TN_ASSERT(object != NULL);
    TN_ASSERT(lock < TN__LOCK_COUNT);
    lock_table();
    tn_status status = take_slot(&index);
    if (status == TN_OK) {
        slot *at = slot_at(index);
        at->object = object;
        at->kind = (uint8_t)kind;
        at->lock = (uint8_t)lock;
        table.alive++;
        *out = value_of(at, index);
    } else if (table.alive == 0) {
        give_chunks_back();
    }
    unlock_table();
    return status;
}

void tn__handle_destroy(uint64_t value) {
    uint32_t index = index_of(value);
    lock_table();
    TN_CHECK(index < table.slot_count);
    TN_CHECK(slot_at(index)->object != NULL);
    TN_CHECK(value_of(slot_at(index), index) == value);
    give_slot(index);
    table.alive--;
    if (table.alive == 0) give_chunks_back();
    unlock_table();
}

static int find_lock(uint64_t value, tn__handle_kind kind, unsigned *lock) {
    lock_table();
    const slot *at = alive_slot(value, kind);
    if (at) *lock = at->lock;
    unlock_table();
    return at != NULL;
}

void *tn__handle_peek(uint64_t value, tn__handle_kind kind, unsigned lock) {
    lock_table();
    const slot *at = alive_slot(value, kind);
    void *object = at && at->lock == lock ? at->object : NULL;
    unlock_table();
    return object;
}

static tn_status not_alive(uint64_t value, tn__handle_kind kind) {
    static const char *const names[] = {"handle", "scope", "tensor", "lease"};
    if (value == 0) {
        return TN_FAIL(TN_STALE_HANDLE, "no %s was given: the handle is {0}", names[kind]);
    }
    return TN_FAIL(TN_STALE_HANDLE, "%s 0x%016llx is not alive: it has ended, or was never made",
                   names[kind], (unsigned long long)value);
}

tn_status tn__handle_acquire(uint64_t value, tn__handle_kind kind, void **object) {
    unsigned found;
    if (!find_lock(value, kind, &found)) return not_alive(value, kind);
    tn__lock(found);
    void *alive = tn__handle_peek(value, kind, found);
    if (!alive) { /* it ended while this thread waited for the lock */
        tn__unlock(found);
        return not_alive(value, kind);
    }
    *object = alive;
    return TN_OK;
}

uint64_t tn__handle_count(void) {
    lock_table();
    uint64_t alive = table.alive;
    unlock_table();
    return alive;
}

void tn__handle_start_at(uint32_t generation) {
    lock_table();
    TN_CHECK(table.alive == 0);
    table.last_generation = 1; /* lets the chunks go whatever their age */
    give_chunks_back();
    table.first_generation = table.last_generation = generation;
    unlock_table();
}
