/* The ring of events: see event_ring.h.
 *
 * Invariants: entry number n lies at (n - 1) % capacity; the entries [first, next) are there and
 * not read yet, next - first <= capacity; those before first are read, or overwritten and counted
 * in lost. Stacks lie apart, so that a ring without them is a fifth of the size.
 */
#include "event_ring.h"

#include <execinfo.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"

typedef struct ring_entry {
    double time_us;
    tn_event_kind kind;
    int thread;
    uintptr_t address;
    size_t bytes;
    tn_stream stream;
    uint64_t stream_id;
    char owner[TN_EVENT_OWNER_BYTES];
} ring_entry;

typedef struct ring_stack {
    uint32_t frame_count;
    void *frames[TN_EVENT_FRAMES];
} ring_stack;

struct tn__event_ring {
    size_t capacity;
    uint64_t first;        /* number of the oldest that is kept */
    uint64_t next;         /* number of the next one */
    uint64_t lost;         /* since the last read */
    size_t reserved_bytes; /* of the pool, as the last event saw it */
    uint64_t wait_count;   /* likewise */
    ring_entry *entries;
    ring_stack *stacks; /* NULL: none are kept */
};

const char *tn_event_kind_name(tn_event_kind kind) {
    static const char *const names[] = {
#define AS_NAME(kind, name, meaning) name,
        TN_EVENT_TABLE(AS_NAME)};
    int is_known = (int)kind >= 0 && (int)kind < TN_EVENT_KIND_COUNT;
    return is_known ? names[kind] : "unknown event";
}

/* ---- noting ---------------------------------------------------------------------------------- */

static void add_entry(tn__event_ring *ring, const ring_entry *entry) {
    size_t at = (size_t)((ring->next - 1) % ring->capacity);
    if (ring->next - ring->first == ring->capacity) {
        ring->first++;
        ring->lost++;
    }
    ring->next++;
    ring->entries[at] = *entry;
    if (ring->stacks) {
        ring_stack *stack = &ring->stacks[at];
        int count = backtrace(stack->frames, TN_EVENT_FRAMES);
        stack->frame_count = count > 0 ? (uint32_t)count : 0;
    }
}

/* What has changed since the event before, whoever did it. `like` has no address, bytes, owner. */
static void add_changes(tn_pool *pool, const ring_entry *like) {
    tn__event_ring *ring = pool->events;
    size_t reserved = tn__pool_reserved_bytes(pool);
    ring_entry change = *like;
    for (; ring->wait_count < pool->order.wait_count; ring->wait_count++) {
        change.kind = TN_EVENT_WAIT;
        add_entry(ring, &change);
    }
    if (reserved == ring->reserved_bytes) return;
    change.kind = reserved > ring->reserved_bytes ? TN_EVENT_GROW : TN_EVENT_RELEASE;
    change.bytes = reserved > ring->reserved_bytes ? reserved - ring->reserved_bytes
                                                   : ring->reserved_bytes - reserved;
    ring->reserved_bytes = reserved;
    add_entry(ring, &change);
}

static ring_entry begin_entry(const tn_pool *pool, const tn__pool_stream *stream) {
    return (ring_entry){.time_us = pool->driver->now_us(pool->state),
                        .thread = (int)gettid(),
                        .stream = stream ? stream->handle : NULL,
                        .stream_id = stream ? stream->id : 0};
}

void tn__pool_note_event(tn_pool *pool, tn_event_kind kind, uintptr_t address, size_t bytes,
                         const tn__pool_stream *stream, const char *owner) {
    ring_entry entry = begin_entry(pool, stream);
    TN_ASSERT(pool->events);
    add_changes(pool, &entry);
    entry.kind = kind;
    entry.address = address;
    entry.bytes = bytes;
    if (owner) strncpy(entry.owner, owner, sizeof entry.owner - 1);
    add_entry(pool->events, &entry);
}

/* ---- the interface --------------------------------------------------------------------------- */

static void free_ring(tn__event_ring *ring) {
    if (!ring) return;
    tn__host_free(ring->entries);
    tn__host_free(ring->stacks);
    tn__host_free(ring);
}

static tn__event_ring *make_ring(size_t capacity, int with_stacks) {
    tn__event_ring *ring = tn__host_alloc(1, sizeof *ring);
    if (!ring) return NULL;
    ring->capacity = capacity;
    ring->first = ring->next = 1;
    ring->entries = tn__host_alloc(capacity, sizeof *ring->entries);
    if (ring->entries && with_stacks) ring->stacks = tn__host_alloc(capacity, sizeof *ring->stacks);
    if (ring->entries && (ring->stacks || !with_stacks)) return ring;
    free_ring(ring);
    return NULL;
}

/* The first unwinding of a process loads a library: not in the middle of an allocation. */
static void prepare_unwinding(void) {
    void *frame;
    (void)backtrace(&frame, 1);
}

tn_status tn_pool_events_begin(tn_pool *pool, size_t capacity, int with_stacks) {
    tn__event_ring *ring;
    tn_status status = TN_OK;
    TN_REQUIRE(pool, "tn_pool_events_begin: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_events_begin"));
    TN_REQUIRE(capacity >= 1 && capacity <= TN_EVENTS_MAX,
               "tn_pool_events_begin: a ring of %zu events: it takes 1 to %zu", capacity,
               TN_EVENTS_MAX);
    ring = make_ring(capacity, with_stacks);
    if (!ring) return TN_OUT_OF_HOST_MEMORY;
    if (with_stacks) prepare_unwinding();
    pthread_mutex_lock(&pool->mutex);
    if (pool->events) {
        status =
            TN_FAIL(TN_INVALID_STATE, "pool %s keeps events already: end that first", pool->name);
    } else {
        ring->reserved_bytes = tn__pool_reserved_bytes(pool);
        ring->wait_count = pool->order.wait_count;
        pool->events = ring;
        tn__pool_observe(pool, TN__OBSERVE_EVENTS, 1);
        ring = NULL;
    }
    pthread_mutex_unlock(&pool->mutex);
    free_ring(ring);
    return status;
}

static void fill_event(const tn__event_ring *ring, uint64_t number, tn_event *out) {
    size_t at = (size_t)((number - 1) % ring->capacity);
    const ring_entry *entry = &ring->entries[at];
    *out = (tn_event){.number = number,
                      .time_us = entry->time_us,
                      .kind = entry->kind,
                      .thread = entry->thread,
                      .address = (const void *)entry->address,
                      .bytes = entry->bytes,
                      .stream = entry->stream,
                      .stream_id = entry->stream_id};
    memcpy(out->owner, entry->owner, sizeof out->owner);
    if (!ring->stacks) return;
    out->frame_count = ring->stacks[at].frame_count;
    memcpy(out->frames, ring->stacks[at].frames, sizeof out->frames);
}

int tn__event_ring_peek(const tn_pool *pool, size_t i, tn_event *out) {
    const tn__event_ring *ring = pool->events;
    if (!ring || i >= ring->next - ring->first) return 0;
    fill_event(ring, ring->first + i, out);
    return 1;
}

static size_t take_events(tn__event_ring *ring, tn_event *events, size_t capacity) {
    size_t count = 0;
    for (; count < capacity && ring->first < ring->next; count++)
        fill_event(ring, ring->first++, &events[count]);
    return count;
}

tn_status tn_pool_events_read(tn_pool *pool, tn_event *events, size_t capacity, size_t *count,
                              uint64_t *lost) {
    tn_status status = TN_OK;
    TN_REQUIRE(pool && count, "tn_pool_events_read: pool or count is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_events_read"));
    TN_REQUIRE(events || capacity == 0, "tn_pool_events_read: events is NULL");
    pthread_mutex_lock(&pool->mutex);
    if (pool->events) {
        ring_entry now = begin_entry(pool, NULL);
        add_changes(pool, &now);
        *count = take_events(pool->events, events, capacity);
        if (lost) *lost = pool->events->lost;
        pool->events->lost = 0;
    } else {
        status = TN_FAIL(TN_INVALID_STATE, "pool %s keeps no events", pool->name);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

void tn__event_ring_end(tn_pool *pool) {
    tn__pool_observe(pool, TN__OBSERVE_EVENTS, 0);
    free_ring(pool->events);
    pool->events = NULL;
}

tn_status tn_pool_events_end(tn_pool *pool) {
    tn_status status = TN_OK;
    TN_REQUIRE(pool, "tn_pool_events_end: pool is NULL");
    TN_TRY(tn__driver_refuse_fork("tn_pool_events_end"));
    pthread_mutex_lock(&pool->mutex);
    if (!pool->events) {
        status = TN_FAIL(TN_INVALID_STATE, "pool %s keeps no events", pool->name);
    }
    tn__event_ring_end(pool);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}
