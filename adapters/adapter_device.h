/* What the adapters of all frameworks share: for each device of the process one tn_device, and
 * one pool for the default stream, made when the first framework asks for memory there.
 *
 *     tn__adapter      device, pool, and what a framework's rules need beyond tn_alloc and tn_free:
 *       streams        pools of other streams (stream_pools.h)
 *       late           blocks that can not be freed yet (late_frees.h)
 *       uses           streams that a block was recorded for, until it is freed (stream_uses.h)
 *       captures       memory of graphs (graph_memory.h)
 *
 * Invariants: an entry of the table is set once and stays until tn_adapters_close, so that looking
 * one up takes no lock; adapters of all devices are peers of each other where the driver can.
 */
#ifndef TENURE_ADAPTER_DEVICE_H
#define TENURE_ADAPTER_DEVICE_H

#include "graph_memory.h"
#include "late_frees.h"
#include "pool_settle.h"
#include "stream_pools.h"
#include "stream_uses.h"
#include "tenure_adapters.h"

typedef struct tn__adapter {
    int ordinal;
    tn_device *device; /* the program's own, if its pool is used */
    tn_pool *pool;     /* for the default stream; NULL: a close that is not over has ended it */
    int is_borrowed;   /* the pool is the program's: tn_adapter_pool_use */
    tn__stream_pools streams;
    tn__late_frees late;
    tn__stream_uses uses;
    tn__graph_memories captures;
} tn__adapter;

/* The adapter of a device, made if there is none. TN_INVALID_STATE once exit has begun, and in a
 * forked child. */
TN_MUST_USE tn_status tn__adapter_find(int ordinal, tn__adapter **out);

/* The adapter of a device if it has been made, else NULL. */
tn__adapter *tn__adapter_peek(int ordinal);

/* Memory of the device's pool; with what late frees hold back, before it fails. */
TN_MUST_USE tn_status tn__adapter_alloc(tn__adapter *adapter, size_t bytes, tn_stream stream,
                                        const char *owner, void **out);

/* Frees a block whose uses nobody has told: its memory is given to others once all work that the
 * devices have now is done. TN_INVALID_ARGUMENT: it is no live block; TN_OUT_OF_HOST_MEMORY, unless
 * the free was promised, as tn__framework_segment does. */
TN_MUST_USE tn_status tn__adapter_free_unordered(tn__adapter *adapter, void *block,
                                                 int is_promised);

/* Lets the devices of all adapters read and write the memory of a pool of this one's, as far as the
 * driver can. */
void tn__adapter_befriend(tn__adapter *adapter, tn_pool *pool);

/* From now on the end of this thread is seen by tn__graph_memories_leave. TN_OUT_OF_HOST_MEMORY. */
TN_MUST_USE tn_status tn__adapters_watch_thread(void);

/* The tn__settle of all pools here: waits for the devices, unless a framework captures a graph. */
int tn__adapters_settle(void);

/* Waits until no device of the adapters has work; no capture begins meanwhile. *is_idle 0 and
 * TN_OK: a framework captures or will, nothing was waited for. */
TN_MUST_USE tn_status tn__adapters_wait_idle(int *is_idle);

#endif
