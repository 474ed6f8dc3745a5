/* The last events of a pool, in a ring of fixed size that is made when it is asked for.
 *
 * Whatever changes a pool says so with tn__pool_event, under the pool's mutex; while nobody keeps
 * events that is one test of a flag. Growth, give-backs and device-side waits need no call of their
 * own: the ring compares the pool's counters with those at the event before, so that a change is
 * told before the event that shows it, whichever path made it.
 */
#ifndef TENURE_EVENT_RING_H
#define TENURE_EVENT_RING_H

#include "pool_internal.h"

typedef struct tn__event_ring tn__event_ring;

/* The owner's text is copied. stream may be NULL. */
void tn__pool_note_event(tn_pool *pool, tn_event_kind kind, uintptr_t address, size_t bytes,
                         const tn__pool_stream *stream, const char *owner);

static inline void tn__pool_event(tn_pool *pool, tn_event_kind kind, uintptr_t address,
                                  size_t bytes, const tn__pool_stream *stream, const char *owner) {
    if (atomic_load_explicit(&pool->observers, memory_order_relaxed) & TN__OBSERVE_EVENTS) {
        tn__pool_note_event(pool, kind, address, bytes, stream, owner);
    }
}

/* The i-th of those kept, oldest first, for those who hold the mutex; 0 if there are not so many.
 * Nothing is taken out. */
int tn__event_ring_peek(const tn_pool *pool, size_t i, tn_event *out);

/* Ends what is left of the ring with its pool. */
void tn__event_ring_end(tn_pool *pool);

#endif
