/* Pools in tests: see test_pools.h. */
#include "test_pools.h"

#include <dlfcn.h>

#include "driver.h"

tn_pool_stats test_pool_stats(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_check(pool));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    assert_int_equal(stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                         stats.partial_bytes + stats.driver_held_bytes,
                     stats.reserved_bytes + stats.paused_bytes);
    return stats;
}

void *test_take(tn_pool *pool, size_t bytes, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(pool, bytes, stream, NULL, &block));
    (void)test_pool_stats(pool);
    return block;
}

void test_give(tn_pool *pool, void *block, tn_stream stream) {
    EXPECT_OK(tn_free(block, stream));
    (void)test_pool_stats(pool);
}

void *test_take_for(tn_pool *pool, size_t bytes, const char *owner, const char *site) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    options.owner = owner;
    options.site = site;
    EXPECT_OK(tn_alloc(pool, bytes, NULL, &options, &block));
    return block;
}

tn_pool *test_open_pool(tn_device *device, tn_pool_backing backing, size_t limit_bytes) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.backing = backing;
    config.limit_bytes = limit_bytes;
    config.page_bytes = backing == TN_BACKING_PLAIN ? 0 : 2 * MIB_BYTES; /* amounts are exact */
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    return pool;
}

tn_stream test_open_stream(tn_device *device) {
    tn_stream stream = NULL;
    EXPECT_OK(tn_stream_create(device, &stream));
    return stream;
}

static int (*find_sim_call(tn_device *device, const char *name))(void *, unsigned) {
    int (*call)(void *, unsigned);
    *(void **)&call = dlsym(test_sim_get()->library, name);
    if (!call) fail_msg("the simulated driver lacks %s", name);
    EXPECT_OK(tn__device_driver(device)->make_current(tn__device_state(device)));
    return call;
}

tn_stream test_open_foreign_stream(tn_device *device) {
    tn_stream stream = NULL;
    assert_int_equal(find_sim_call(device, "cuStreamCreate")(&stream, 1), 0);
    return stream;
}

void test_close_foreign_stream(tn_device *device, tn_stream stream) {
    assert_int_equal(find_sim_call(device, "cuStreamDestroy_v2")(stream, 0), 0);
}

uint64_t test_calls(tn_device *device, tn_driver_call call) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(device, &stats));
    return stats.calls[call];
}

uint64_t test_all_calls(tn_device *device) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    uint64_t sum = 0;
    EXPECT_OK(tn_device_driver_stats(device, &stats));
    for (int call = 0; call < TN_CALL_COUNT; call++)
        sum += stats.calls[call];
    return sum;
}

tn_device *test_open_sim_as(const tnsim_config *sim_config) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    assert_int_equal(test_sim_get()->configure(sim_config), 0);
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

void test_sim_write(tn_device *device, tn_stream stream, const void *address, size_t bytes,
                    double duration_us) {
    const tn__range range = {address, bytes, 1};
    EXPECT_OK(tn__device_driver(device)->ghost_launch(tn__device_state(device), "write", &range,
                                                      bytes > 0, duration_us, stream));
}

void test_sim_read(tn_device *device, tn_stream stream, const void *address, size_t bytes,
                   double duration_us) {
    const tn__range range = {address, bytes, 0};
    EXPECT_OK(tn__device_driver(device)->ghost_launch(tn__device_state(device), "read", &range,
                                                      bytes > 0, duration_us, stream));
}

void test_sim_stall(tn_device *device, tn_stream stream, int stalled) {
    EXPECT_OK(tn__device_driver(device)->make_current(tn__device_state(device)));
    assert_int_equal(test_sim_get()->stall(stream, stalled), 0);
}

uint64_t test_close_sim_with_races(tn_device *device) {
    char left[4096] = "";
    uint64_t races = test_sim_get()->race_count();
    EXPECT_OK(tn_device_destroy(device));
    if (test_sim_get()->leftovers(left, sizeof left)) fail_msg("left over: %s", left);
    return races;
}
