/* Memory of the host: blocks of whole 2 MiB granules, up to a limit. A host device has one, and so
 * has each pool of host memory.
 *
 * From a jemalloc arena of its own (host_arena.h), and where there is none, from mmap, with the
 * same limits and answers; or both from a source, as pinned memory.
 *
 * Thread-safe. Invariant: used is the sum of the blocks' rounded sizes and never above limit.
 */
#ifndef TENURE_DRIVER_HOST_MEMORY_H
#define TENURE_DRIVER_HOST_MEMORY_H

#include <pthread.h>

#include "driver.h"
#include "host_arena.h"

enum { TN__HOST_GRANULARITY = 2 << 20 };

typedef struct tn__host_block {
    void *address;
    size_t bytes;  /* rounded up */
    int is_direct; /* not the arena's */
} tn__host_block;

typedef struct tn__host_memory {
    pthread_mutex_t lock;
    size_t limit;
    size_t used;
    tn__host_block *blocks; /* in order of address */
    size_t block_count;
    size_t block_capacity;
    tn__host_arena arena;     /* open, or there is none */
    tn__extent_source source; /* take is NULL: mmap */
    size_t direct_bytes;      /* of blocks that are not the arena's */
} tn__host_memory;

/* source: NULL is mmap. */
void tn__host_memory_open(tn__host_memory *memory, size_t limit, const tn__extent_source *source);

/* Does without the arena, as where jemalloc can not be loaded. Before the first block. */
void tn__host_memory_use_no_arena(tn__host_memory *memory);

/* Gives back what is left, too. On failure some is left: it can be closed again. */
tn_status tn__host_memory_close(tn__host_memory *memory);

/* TN_OUT_OF_DEVICE_MEMORY beyond the limit, or if the machine has no more; else the source's. */
tn_status tn__host_memory_take(tn__host_memory *memory, size_t bytes, void **out);

/* TN_INVALID_ARGUMENT if the address is not a block's. */
tn_status tn__host_memory_give(tn__host_memory *memory, void *address);

/* Gives the memory of freed blocks that jemalloc keeps back to where it came from, as far as it is
 * whole extents. */
void tn__host_memory_purge(tn__host_memory *memory);

/* Of blocks, rounded up. */
size_t tn__host_memory_used(tn__host_memory *memory);

/* With a source: what has been taken from it, for blocks and by jemalloc for later ones. No call is
 * under way in another thread; one may be in this, that asks the source. */
size_t tn__host_memory_held(const tn__host_memory *memory);

/* Gives back all that is held while there are no blocks. */
tn_status tn__host_memory_reset(tn__host_memory *memory);

/* A size that the memory comes in without waste, at least `bytes`. */
size_t tn__host_memory_round(const tn__host_memory *memory, size_t bytes);

#endif
