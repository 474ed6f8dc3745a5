/* A simulated device, a pool on it and streams: what most tests of pools begin with.
 *
 *     pool_fixture f = pool_fixture_open(64 * MIB_BYTES, TN_BACKING_VMM, 0);
 *     ... f.pool, f.a, f.b ...
 *     pool_fixture_close(&f);
 *
 * Closing fails the test if the device has seen a race, or if anything is left on it or of the
 * library's host memory.
 */
#ifndef TENURE_POOL_FIXTURE_H
#define TENURE_POOL_FIXTURE_H

#include "test_pools.h"

typedef struct pool_fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
    tn_stream c; /* NULL unless the test makes it */
} pool_fixture;

/* Memory of the device (0: its default); 0: the pool has no limit. */
pool_fixture pool_fixture_open(size_t memory_bytes, tn_pool_backing backing, size_t limit_bytes);

void pool_fixture_close(pool_fixture *f);

/* For tests that plant races: the count of them. */
uint64_t pool_fixture_close_with_races(pool_fixture *f);

#endif
