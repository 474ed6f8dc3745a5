/* Adapters over the simulated driver: as a framework would meet them, with its own streams. */
#ifndef TENURE_ADAPTERS_SUPPORT_H
#define TENURE_ADAPTERS_SUPPORT_H

#include "framework_calls.h"
#include "tenure_adapters.h"
#include "tenure_pool.h"
#include "test_graphs.h"

#define MIB MIB_BYTES

/* The simulated driver with so many devices of so much memory (0: its defaults), and the test's own
 * handle of the first. What the adapters open is the same device. */
tn_device *adapters_open(int device_count, size_t memory_bytes);

/* The adapters' pools end, then the device: fails if blocks, races or host memory are left. */
void adapters_close(tn_device *device);

/* tn__framework_alloc and tn__framework_free of device 0 that must succeed. */
void *adapters_take(size_t bytes, tn_stream stream);
void adapters_give(void *block, tn_stream stream);

/* A statistic of device 0. */
uint64_t adapters_number(const char *name);

/* A filter that accepts one stream, or every one for NULL, and counts how often it was asked. */
typedef struct adapters_filter {
    tn_stream stream;
    int asked;
    int ended;
} adapters_filter;
void adapters_begin(uint64_t key, adapters_filter *filter);
tn_status adapters_end(uint64_t key);
tn_status adapters_release(uint64_t key);

#endif
