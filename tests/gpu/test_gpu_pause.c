/* Pause and resume on a real GPU: the device's free memory rises while the pool is paused, and the
 * bytes of its blocks are where they were afterwards, also those of a graph that is launched again.
 */
#include "gpu_support.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "tenure_pool.h"

#define MIB    ((size_t)1 << 20)
#define GIB    ((size_t)1 << 30)
#define BLOCKS 24

static gpu_side gpu;

static size_t device_free_bytes(void) {
    size_t free_bytes = 0, total_bytes = 0;
    EXPECT_OK(tn__device_driver(gpu.device)
                  ->memory_info(tn__device_state(gpu.device), &free_bytes, &total_bytes));
    return free_bytes;
}

static tn_pool_stats stats_of(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_check(pool));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    assert_int_equal(stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                         stats.partial_bytes + stats.driver_held_bytes,
                     stats.reserved_bytes + stats.paused_bytes);
    return stats;
}

static tn_pool *open_pool(void) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.name = "paused";
    config.backing = TN_BACKING_VMM;
    EXPECT_OK(tn_pool_create(gpu.device, &config, &pool));
    return pool;
}

/* From 1,000 bytes to about 170 MB. */
static size_t bytes_of(int block) { return 1000 + (size_t)block * (size_t)block * 321000; }

static unsigned char pattern(int block, size_t at) {
    return (unsigned char)((size_t)block * 37 + at * 11 + (at >> 9));
}

static void upload(void *to, int block, unsigned char *host) {
    for (size_t at = 0; at < bytes_of(block); at++)
        host[at] = pattern(block, at);
    EXPECT_OK(tn_copy(gpu.device, to, host, bytes_of(block), gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
}

static size_t count_wrong(const void *from, int block, unsigned char *host) {
    size_t wrong = 0;
    memset(host, 0, bytes_of(block));
    EXPECT_OK(tn_copy(gpu.device, host, from, bytes_of(block), gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    for (size_t at = 0; at < bytes_of(block); at++)
        wrong += host[at] != pattern(block, at);
    return wrong;
}

static void blocks_keep_their_bytes_over_three_pauses(void **state) {
    unsigned char *host = malloc(bytes_of(BLOCKS - 1));
    tn_pool *pool = open_pool();
    void *blocks[BLOCKS];
    (void)state;
    assert_non_null(host);
    for (int i = 0; i < BLOCKS; i++) {
        EXPECT_OK(tn_alloc(pool, bytes_of(i), gpu.stream, NULL, &blocks[i]));
        upload(blocks[i], i, host);
    }
    for (int round = 0; round < 3; round++) {
        size_t before = device_free_bytes();
        size_t reserved = stats_of(pool).reserved_bytes;
        EXPECT_OK(tn_pool_pause(pool, 1));
        assert_int_equal(stats_of(pool).reserved_bytes, 0);
        /* The driver itself takes a little for the stream that copies. */
        assert_true(device_free_bytes() + 64 * MIB >= before + reserved);
        EXPECT_OK(tn_pool_resume(pool));
        for (int i = 0; i < BLOCKS; i++)
            assert_int_equal(count_wrong(blocks[i], i, host), 0);
    }
    for (int i = 0; i < BLOCKS; i++)
        EXPECT_OK(tn_free(blocks[i], gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
    free(host);
}

/* A block as large as half of the device, twice, one after the other, while both are live. */
static void two_pools_take_turns_with_half_the_device(void **state) {
    const size_t bytes = device_free_bytes() / 100 * 60 / GIB * GIB;
    tn_pool *pools[2] = {open_pool(), open_pool()};
    void *blocks[2];
    (void)state;
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(tn_alloc(pools[i], bytes, gpu.stream, NULL, &blocks[i]));
        EXPECT_OK(tn_fill(gpu.device, blocks[i], (unsigned char)(i + 1), MIB, gpu.stream));
        EXPECT_OK(tn_pool_pause(pools[i], 0));
    }
    for (int i = 0; i < 4; i++) {
        EXPECT_OK(tn_pool_resume(pools[i % 2]));
        EXPECT_OK(tn_fill(gpu.device, blocks[i % 2], 7, bytes, gpu.stream));
        EXPECT_OK(tn_pool_pause(pools[i % 2], 0));
    }
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(tn_free(blocks[i], gpu.stream));
        EXPECT_OK(tn_pool_destroy(pools[i]));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_keep_their_bytes_over_three_pauses),
        cmocka_unit_test(two_pools_take_turns_with_half_the_device),
    };
    int failures;
    gpu_open(&gpu);
    failures = cmocka_run_group_tests_name("gpu/gpu_pause", tests, NULL, NULL);
    if (failures == 0) gpu_close(&gpu);
    return failures;
}
