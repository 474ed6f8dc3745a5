/* Memory of a host device: blocks of whole 2 MiB granules, up to the device's limit.
 *
 * From a jemalloc arena of the device's own, out of libtenure-jemalloc.so: Debian's jemalloc with
 * its names made private, so that a program's malloc stays what it is. That library needs 2.6 KB
 * of static TLS, which glibc has for the libraries that a program is linked with, and has not for
 * those loaded later (unless GLIBC_TUNABLES=glibc.rtld.optional_static_tls=8192). So libtenure does
 * not need it: it is loaded when the first host device opens, and where that fails the memory
 * comes from mmap, with the same limits and answers.
 *
 * Thread-safe. Invariant: used is the sum of the blocks' rounded sizes and never above limit.
 */
#ifndef TENURE_DRIVER_HOST_MEMORY_H
#define TENURE_DRIVER_HOST_MEMORY_H

#include <pthread.h>

#include "driver.h"

enum { TN__HOST_GRANULARITY = 2 << 20 };

typedef struct tn__host_block {
    void *address;
    size_t bytes; /* rounded up */
} tn__host_block;

typedef struct tn__host_memory {
    pthread_mutex_t lock;
    size_t limit;
    size_t used;
    tn__host_block *blocks; /* in order of address */
    size_t block_count;
    size_t block_capacity;
    unsigned arena;
    int has_arena; /* else memory is from mmap */
} tn__host_memory;

void tn__host_memory_open(tn__host_memory *memory, size_t limit);

/* Takes mmap instead of the arena, as where jemalloc can not be loaded. Before the first block. */
void tn__host_memory_use_mmap(tn__host_memory *memory);

/* Gives back what is left, too. */
void tn__host_memory_close(tn__host_memory *memory);

/* TN_OUT_OF_DEVICE_MEMORY beyond the limit, or if the machine has no more. */
tn_status tn__host_memory_take(tn__host_memory *memory, size_t bytes, void **out);

/* TN_INVALID_ARGUMENT if the address is not a block's. */
tn_status tn__host_memory_give(tn__host_memory *memory, void *address);

size_t tn__host_memory_used(tn__host_memory *memory);

/* Why there is no jemalloc, in words; NULL if there is. */
const char *tn__host_memory_why_no_arena(void);

#endif
