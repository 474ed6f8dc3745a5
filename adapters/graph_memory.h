/* Memory of a framework's captured graphs.
 *
 * A framework names a pool of its own by two numbers and says when allocations begin and end to go
 * there, with a filter that tells which streams' (torch: beginAllocateToPool, endAllocateToPool,
 * releasePool). Each such pool is a graph pool of the device (tenure_pool.h) here:
 *
 *     framework                               here
 *     begin(key, filter)                      a route; the memory gets one more user
 *     cudaStreamBeginCapture
 *     malloc on a stream that captures        the route's filter agrees: capture opened in the pool
 *     cudaStreamEndCapture
 *     end(key)                                capture closed, route gone
 *     release(key)                            one user fewer; at 0, and once no block is live, the
 *                                             pool is destroyed, after a wait for the devices
 *
 * Memory for streams that do not capture comes from the device's ordinary pool, whatever a filter
 * says. A capture that fails is never told to have ended, and its filter may look at an object that
 * is gone: so a filter is asked only until its capture is known, and its thread, in which the end
 * would have come next, drops the route when it sees that the capture is over. One that failed
 * before it asked for memory is not known: torch empties its caches before each capture, so a route
 * that knows none when its thread does that is doubted: nothing is kept from waiting for the device
 * by it, and it is dropped when the thread begins anew. A thread that ends drops what would have
 * ended before: routes of captures that are over, and that know none.
 *
 * The devices are waited for without the mutex, since they may be waiting for a thread that frees.
 * What was used and released meanwhile waits for a collection of its own.
 *
 * Invariants, under the mutex: a route's memory is in the list; is_open if the pool has a capture
 * open; live_blocks is what the pool has given out; users counts begins that were not released.
 */
#ifndef TENURE_GRAPH_MEMORY_H
#define TENURE_GRAPH_MEMORY_H

#include <pthread.h>
#include <stdatomic.h>

#include "framework_calls.h"
#include "stream_pools.h"

struct tn__adapter;

typedef struct tn__graph_memory {
    struct tn__graph_memory *next;
    uint64_t key[2];
    tn_pool *pool; /* NULL until a capture asks for memory */
    size_t users;
    size_t live_blocks;
    uint64_t unused_since; /* the number of the first collection that found it unused; 0: none */
    int is_open;
    tn_stream stream; /* the open capture's */
    uint64_t capture_id;
    tn_graph_memory *graphs; /* not released */
    size_t graph_count;
    size_t graph_capacity;
} tn__graph_memory;

typedef struct tn__graph_route {
    struct tn__graph_route *next;
    tn__graph_memory *memory;
    tn__stream_filter filter;
    pthread_t thread; /* that began it */
    int is_doubted;   /* and not bound */
    int is_bound;     /* its capture is known: */
    tn_stream stream;
    uint64_t capture_id;
} tn__graph_route;

typedef struct tn__graph_memories {
    pthread_mutex_t mutex;
    tn__graph_memory *memories;
    tn__graph_route *routes; /* in the order of their begins */
    uint64_t collections;    /* so far */
    atomic_size_t route_count;
    atomic_size_t memory_count;
} tn__graph_memories;

void tn__graph_memories_init(tn__graph_memories *captures);
void tn__graph_memories_deinit(tn__graph_memories *captures); /* after a close */

/* 1 if no route of any device exists but doubted ones: no framework captures, and none begins to
 * until the unlock, so that a wait for a device spoils no capture. Unlock in either case. */
int tn__captures_lock(void);
void tn__captures_unlock(void);

/* Owns the filter's context from success on. TN_OUT_OF_HOST_MEMORY. */
TN_MUST_USE tn_status tn__graph_memory_begin(struct tn__adapter *adapter, const uint64_t key[2],
                                             const tn__stream_filter *filter);

/* TN_INVALID_ARGUMENT if no route of the key is there. */
TN_MUST_USE tn_status tn__graph_memory_end(struct tn__adapter *adapter, const uint64_t key[2]);

/* TN_INVALID_ARGUMENT if no memory of the key has a user. */
TN_MUST_USE tn_status tn__graph_memory_release(struct tn__adapter *adapter, const uint64_t key[2]);

/* *is_routed 0: no capture claims the stream, nothing was done. Else as tn_alloc. */
TN_MUST_USE tn_status tn__graph_memory_alloc(struct tn__adapter *adapter, size_t bytes,
                                             tn_stream stream, const char *owner, int *is_routed,
                                             void **out);

/* tn_free for any block of the device. */
TN_MUST_USE tn_status tn__graph_memory_free(struct tn__adapter *adapter, void *block,
                                            tn_stream stream);

/* This thread empties its caches: its routes that know no capture are doubted. */
void tn__graph_memories_doubt(struct tn__adapter *adapter);

/* This thread ends. */
void tn__graph_memories_leave(struct tn__adapter *adapter);

/* Destroys pools that have no user and no block, unless a capture is under way. */
void tn__graph_memories_collect(struct tn__adapter *adapter);

/* Ends all of it. TN_LEAK while blocks are live, TN_IN_USE while a route exists. */
TN_MUST_USE tn_status tn__graph_memories_close(struct tn__adapter *adapter);

/* Calls visit for each of the pools, until it fails; it must not allocate or free. */
TN_MUST_USE tn_status tn__graph_memories_each(struct tn__adapter *adapter, tn__pool_visit visit,
                                              void *context);

#endif
