/* A pool for each stream that a framework allocates on.
 *
 * Frameworks let nobody but a block's own stream have its memory: so a program may free a block
 * that another stream still reads, and make the block's stream wait for the reader only before it
 * allocates there again (data that is fetched ahead, FSDP2's gathered weights). With one pool a
 * third stream could get that memory, behind a wait for the block's stream alone. So each stream
 * has a pool of its own; what goes from one to another, or to the driver, goes when no device has
 * any work (pool_settle.h).
 *
 * The default stream's pool moves pages to where they are missing, as all do. Pools of other
 * streams have plain segments, which stay where they are: where memory moves, its old mapping is
 * undone once the block's stream is through with it, and an unnamed reader may still be there.
 *
 * The default streams that threads have each for themselves go by one name: each is a stream of its
 * own here, too. A thread that ends leaves its pool to the next one that has its pthread_t.
 *
 * Looked up without a lock: slots are filled once, and emptied by the close alone.
 */
#ifndef TENURE_STREAM_POOLS_H
#define TENURE_STREAM_POOLS_H

#include <pthread.h>
#include <stdatomic.h>

#include "framework_calls.h"
#include "tenure_pool.h"

/* Torch has 64 streams of its own a device. What is beyond the most shares the default's pool. */
enum { TN__STREAM_POOL_SLOTS = 512, TN__STREAM_POOLS_MAX = 256 };

struct tn__adapter;

typedef struct tn__stream_slot {
    uintptr_t key; /* the stream's handle; for a thread's default stream one of the thread */
    _Atomic(tn_pool *) pool; /* NULL: the slot is free */
} tn__stream_slot;

typedef struct tn__stream_pools {
    pthread_mutex_t mutex; /* of those who fill slots */
    tn__stream_slot slots[TN__STREAM_POOL_SLOTS];
    size_t count;
    size_t limit_bytes; /* 0: none */
} tn__stream_pools;

typedef tn_status (*tn__pool_visit)(tn_pool *pool, void *context);

void tn__stream_pools_init(tn__stream_pools *pools);

/* The pool for a stream, made if there is none. */
TN_MUST_USE tn_status tn__stream_pool_find(struct tn__adapter *adapter, tn_stream stream,
                                           tn_pool **out);

/* Calls visit for the default stream's pool and all others, until it fails. */
TN_MUST_USE tn_status tn__stream_pools_each(struct tn__adapter *adapter, tn__pool_visit visit,
                                            void *context);

/* The limit of each pool, those too that are made later. TN_IN_USE as tn_pool_limit_set: pools that
 * come before have the new one. */
TN_MUST_USE tn_status tn__stream_pools_limit(struct tn__adapter *adapter, size_t limit_bytes);

/* Destroys all but the default stream's; that can be called again after a failure. */
TN_MUST_USE tn_status tn__stream_pools_close(tn__stream_pools *pools);
void tn__stream_pools_deinit(tn__stream_pools *pools);

#endif
