/* Pools in tests, through the public interface: every helper checks the pool and that its books
 * balance. */
#ifndef TENURE_TEST_POOLS_H
#define TENURE_TEST_POOLS_H

#include "test_support.h"

#define MIB_BYTES ((size_t)1 << 20)
#define GIB_BYTES ((size_t)1 << 30)

/* Statistics, after tn_pool_check and the sum of the books. */
tn_pool_stats test_pool_stats(tn_pool *pool);

void *test_take(tn_pool *pool, size_t bytes, tn_stream stream);
void test_give(tn_pool *pool, void *block, tn_stream stream);

/* On the default stream, for an owner and a call site that reports name. */
void *test_take_for(tn_pool *pool, size_t bytes, const char *owner, const char *site);

tn_pool *test_open_pool(tn_device *device, tn_pool_backing backing, size_t limit_bytes);
tn_stream test_open_stream(tn_device *device);

/* A stream of the simulated device that another library has made. */
tn_stream test_open_foreign_stream(tn_device *device);
void test_close_foreign_stream(tn_device *device, tn_stream stream);

/* Driver calls so far: of one kind, and of all kinds. */
uint64_t test_calls(tn_device *device, tn_driver_call call);
uint64_t test_all_calls(tn_device *device);

/* The simulated driver configured as told, and its first device. */
tn_device *test_open_sim_as(const tnsim_config *config);

/* Declares a kernel of the simulated device that writes (or reads) the bytes; 0 bytes: none. */
void test_sim_write(tn_device *device, tn_stream stream, const void *address, size_t bytes,
                    double duration_us);
void test_sim_read(tn_device *device, tn_stream stream, const void *address, size_t bytes,
                   double duration_us);

/* The stream does nothing until it is released. */
void test_sim_stall(tn_device *device, tn_stream stream, int stalled);

/* As test_close_sim, for tests that plant races: gives the count of them. */
uint64_t test_close_sim_with_races(tn_device *device);

#endif
