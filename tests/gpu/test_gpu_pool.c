/* Pools of mapped pages on a real GPU: stream order under kernels that are held back, contents of
 * blocks that come and go on several streams, books, trimming, and running out of memory.
 *
 * A gate is a host task that holds a stream until the test lets it go: what the test sees then
 * does not depend on how fast anything is.
 */
#include "gpu_support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static gpu_side gpu;
static char *probe; /* 1 MiB that is there also when the device is full */

/* ---- what the tests share ------------------------------------------------------------------- */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static int is_held;

static void pass_gate(void *argument) {
    (void)argument;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
}

static void hold(tn_stream stream) {
    const tn__driver *driver = tn__device_driver(gpu.device);
    pthread_mutex_lock(&gate);
    is_held = 1;
    EXPECT_OK(driver->host_task(tn__device_state(gpu.device), pass_gate, NULL, stream));
}

static void let_go(void) {
    is_held = 0;
    pthread_mutex_unlock(&gate);
}

/* After a test, also one that has failed: nothing may stay held. */
static int let_go_after_all(void **state) {
    (void)state;
    if (is_held) let_go();
    return 0;
}

static tn_pool *open_pool(size_t limit_bytes) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool;
    config.name = "test";
    config.backing = TN_BACKING_VMM;
    config.limit_bytes = limit_bytes;
    EXPECT_OK(tn_pool_create(gpu.device, &config, &pool));
    return pool;
}

static tn_pool_stats stats_of(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_check(pool));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    assert_int_equal(stats.live_bytes + stats.cached_bytes + stats.pending_bytes +
                         stats.partial_bytes + stats.driver_held_bytes,
                     stats.reserved_bytes);
    return stats;
}

static char *take(tn_pool *pool, size_t bytes, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(pool, bytes, stream, NULL, &block));
    return block;
}

static void fill(void *block, int byte, size_t bytes, tn_stream stream) {
    EXPECT_OK(tn_fill(gpu.device, block, (unsigned char)byte, bytes, stream));
}

static int is_all(const unsigned char *bytes, size_t count, int byte) {
    return bytes[0] == byte && memcmp(bytes, bytes + 1, count - 1) == 0;
}

/* All `bytes` of device memory have the value, once the stream is done. */
static void expect_filled(const void *block, size_t bytes, int byte, tn_stream stream) {
    unsigned char *copy = malloc(bytes);
    EXPECT_OK(tn_copy(gpu.device, copy, block, bytes, stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, stream));
    assert_true(is_all(copy, bytes, byte));
    free(copy);
}

static size_t device_free_bytes(void) {
    size_t free_bytes, total_bytes;
    EXPECT_OK(tn__device_driver(gpu.device)
                  ->memory_info(tn__device_state(gpu.device), &free_bytes, &total_bytes));
    return free_bytes;
}

/* ---- stream order --------------------------------------------------------------------------- */

/* The first stream's fill is held back; the second stream gets the same memory, as the pool may
 * have no more, and must not write to it before. Without a wait the first stream's bytes would be
 * there in the end. */
static void another_stream_gets_the_block_behind_its_last_use(void **state) {
    enum { BYTES = 4 << 20 };
    tn_pool *pool = open_pool(2 * BYTES);
    tn_stream a = gpu.stream, b;
    (void)state;
    EXPECT_OK(tn_stream_create(gpu.device, &b));
    char *kept = take(pool, BYTES, a), *block = take(pool, BYTES, a);
    hold(a);
    fill(block, 0xAA, BYTES, a);
    EXPECT_OK(tn_copy(gpu.device, kept, block, BYTES, a));
    EXPECT_OK(tn_free(block, a));
    char *again = take(pool, BYTES, b);
    fill(again, 0xBB, BYTES, b);
    assert_int_equal(stats_of(pool).stream_waits, 1);
    let_go();
    EXPECT_OK(tn_device_synchronize(gpu.device));
    expect_filled(again, BYTES, 0xBB, b);
    expect_filled(kept, BYTES, 0xAA, a);
    EXPECT_OK(tn_free(again, b));
    EXPECT_OK(tn_free(kept, a));
    EXPECT_OK(tn_stream_destroy(gpu.device, b));
    EXPECT_OK(tn_pool_destroy(pool));
}

/* The same for a use on a second stream that was recorded before the free. */
static void its_own_stream_waits_for_recorded_uses(void **state) {
    enum { BYTES = 4 << 20 };
    tn_pool *pool = open_pool(2 * BYTES);
    tn_stream a = gpu.stream, b;
    (void)state;
    EXPECT_OK(tn_stream_create(gpu.device, &b));
    char *result = take(pool, BYTES, b), *block = take(pool, BYTES, a);
    fill(block, 0x11, BYTES, a);
    EXPECT_OK(tn_stream_wait(gpu.device, b, a));
    hold(b);
    EXPECT_OK(tn_copy(gpu.device, result, block, BYTES, b));
    EXPECT_OK(tn_record_use(block, b));
    EXPECT_OK(tn_free(block, a));
    assert_int_equal(stats_of(pool).pending_bytes, BYTES);
    char *again = take(pool, BYTES, a);
    fill(again, 0x22, BYTES, a);
    assert_int_equal(stats_of(pool).stream_waits, 1);
    let_go();
    EXPECT_OK(tn_device_synchronize(gpu.device));
    expect_filled(result, BYTES, 0x11, b);
    expect_filled(again, BYTES, 0x22, a);
    EXPECT_OK(tn_free(again, a));
    EXPECT_OK(tn_free(result, b));
    EXPECT_OK(tn_stream_destroy(gpu.device, b));
    EXPECT_OK(tn_pool_destroy(pool));
}

/* ---- contents ------------------------------------------------------------------------------- */

enum { STREAMS = 4, SLOTS = 48, TURNS = 4000, WINDOW = 1024, WINDOWS = 3 };

typedef struct slot {
    char *block;
    size_t bytes;
    int stream;
    int byte;
} slot;

typedef struct churn {
    tn_pool *pool;
    tn_stream streams[STREAMS];
    slot slots[SLOTS];
    char *evidence; /* WINDOWS windows of each freed block, in device memory */
    unsigned char expected[TURNS];
    int freed;
    uint64_t random;
} churn;

static void churn_take(churn *c, slot *of) {
    int exponent = 9 + (int)(gpu_random(&c->random) % 17); /* up to 64 MiB */
    of->bytes = ((size_t)1 << exponent) + gpu_random(&c->random) % ((size_t)1 << exponent);
    of->stream = (int)(gpu_random(&c->random) % STREAMS);
    of->byte = 1 + (int)(gpu_random(&c->random) % 255);
    of->block = take(c->pool, of->bytes, c->streams[of->stream]);
    fill(of->block, of->byte, of->bytes, c->streams[of->stream]);
}

/* Keeps the first, middle and last bytes of the block as another stream sees them, or its own. */
static void churn_give(churn *c, slot *of) {
    tn_stream own = c->streams[of->stream];
    tn_stream reader = c->streams[gpu_random(&c->random) % STREAMS];
    size_t window = of->bytes < WINDOW ? of->bytes : WINDOW;
    size_t starts[WINDOWS] = {0, (of->bytes - window) / 2, of->bytes - window};
    if (reader != own) EXPECT_OK(tn_stream_wait(gpu.device, reader, own));
    for (int i = 0; i < WINDOWS; i++) {
        char *to = c->evidence + ((size_t)c->freed * WINDOWS + (size_t)i) * WINDOW;
        if (window < WINDOW) fill(to, of->byte, WINDOW, reader);
        EXPECT_OK(tn_copy(gpu.device, to, of->block + starts[i], window, reader));
    }
    if (reader != own) EXPECT_OK(tn_record_use(of->block, reader));
    EXPECT_OK(tn_free(of->block, own));
    c->expected[c->freed++] = (unsigned char)of->byte;
    of->block = NULL;
}

static void churn_verify(churn *c) {
    size_t bytes = (size_t)c->freed * WINDOWS * WINDOW;
    unsigned char *evidence = malloc(bytes);
    EXPECT_OK(tn_device_synchronize(gpu.device));
    EXPECT_OK(tn_copy(gpu.device, evidence, c->evidence, bytes, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    for (int i = 0; i < c->freed; i++)
        gpu_count("block kept its bytes", is_all(evidence + (size_t)i * WINDOWS * WINDOW,
                                                 (size_t)WINDOWS * WINDOW, c->expected[i]));
    free(evidence);
}

static void blocks_keep_their_bytes_while_others_come_and_go(void **state) {
    static churn c;
    (void)state;
    c.random = 7;
    c.pool = open_pool(0);
    c.evidence = take(gpu.pool, (size_t)TURNS * WINDOWS * WINDOW, gpu.stream);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_create(gpu.device, &c.streams[i]));
    for (int turn = 0; turn < TURNS; turn++) {
        slot *of = &c.slots[gpu_random(&c.random) % SLOTS];
        if (of->block)
            churn_give(&c, of);
        else
            churn_take(&c, of);
        if (turn % 500 == 0) (void)stats_of(c.pool);
    }
    for (int i = 0; i < SLOTS; i++)
        if (c.slots[i].block) churn_give(&c, &c.slots[i]);
    churn_verify(&c);
    tn_pool_stats stats = stats_of(c.pool);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.allocs, stats.frees);
    printf("peak live %zu MiB, peak reserved %zu MiB, %llu waits between streams\n",
           stats.peak_live_bytes / MIB, stats.peak_reserved_bytes / MIB,
           (unsigned long long)stats.stream_waits);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(gpu.device, c.streams[i]));
    EXPECT_OK(tn_pool_destroy(c.pool));
    EXPECT_OK(tn_free(c.evidence, gpu.stream));
    gpu_count_report("4,000 turns on 4 streams");
}

/* ---- trimming and warmth -------------------------------------------------------------------- */

static void trimming_gives_the_device_its_memory_back(void **state) {
    tn_pool *pool = open_pool(0);
    size_t before = device_free_bytes(), released = 0;
    (void)state;
    char *block = take(pool, GIB, gpu.stream);
    fill(block, 0x5A, GIB, gpu.stream);
    assert_true(before - device_free_bytes() >= GIB);
    EXPECT_OK(tn_pool_trim(pool, 0, &released));
    assert_int_equal(released, 0); /* it is live */
    EXPECT_OK(tn_free(block, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    size_t reserved = stats_of(pool).reserved_bytes;
    assert_int_equal(stats_of(pool).cached_bytes, reserved);
    EXPECT_OK(tn_pool_trim(pool, 0, &released));
    assert_int_equal(released, reserved);
    assert_int_equal(stats_of(pool).reserved_bytes, 0);
    assert_true(device_free_bytes() + 64 * MIB >= before); /* the driver may keep a little */
    block = take(pool, 4 * MIB, gpu.stream);
    fill(block, 0x77, 4 * MIB, gpu.stream);
    expect_filled(block, 4 * MIB, 0x77, gpu.stream);
    EXPECT_OK(tn_free(block, gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
}

static uint64_t memory_calls(void) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    uint64_t calls = 0;
    EXPECT_OK(tn_device_driver_stats(gpu.device, &stats));
    for (int call = 0; call < TN_CALL_COUNT; call++)
        calls += stats.calls[call];
    return calls;
}

static void a_warm_pair_makes_no_driver_call(void **state) {
    static const size_t sizes[] = {512, 100000, 1 << 20, 64 << 20, 1 << 30};
    tn_pool *pool = open_pool(0);
    (void)state;
    for (int i = 0; i < 5; i++) {
        EXPECT_OK(tn_free(take(pool, sizes[i], gpu.stream), gpu.stream));
        uint64_t before = memory_calls();
        for (int turn = 0; turn < 1000; turn++)
            EXPECT_OK(tn_free(take(pool, sizes[i], gpu.stream), gpu.stream));
        assert_int_equal(memory_calls() - before, 0);
    }
    EXPECT_OK(tn_pool_destroy(pool));
}

/* ---- out of memory -------------------------------------------------------------------------- */

/* Memory, launches and the books are as before; no error of the driver is left behind. */
static void expect_all_is_well(tn_pool *pool, const tn_pool_stats *before) {
    tn_pool_stats after = stats_of(pool);
    assert_int_equal(after.live_bytes, before->live_bytes);
    assert_int_equal(after.live_blocks, before->live_blocks);
    assert_int_equal(after.allocs, before->allocs);
    assert_int_equal(after.out_of_memory, before->out_of_memory + 1);
    EXPECT_OK(tn_device_synchronize(gpu.device));
    fill(probe, 0x33, MIB, gpu.stream);
    expect_filled(probe, MIB, 0x33, gpu.stream);
}

static void more_than_the_device_has_is_a_report_and_nothing_sticks(void **state) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn_pool *pool = open_pool(0);
    void *block = NULL;
    (void)state;
    EXPECT_OK(tn_device_info_get(gpu.device, &info));
    char *kept = take(pool, 64 * MIB, gpu.stream);
    fill(kept, 0x44, 64 * MIB, gpu.stream);
    tn_pool_stats before = stats_of(pool);
    EXPECT_STATUS(tn_alloc(pool, info.memory_bytes * 2, gpu.stream, NULL, &block),
                  TN_OUT_OF_DEVICE_MEMORY);
    printf("%s\n", tn_error_last());
    EXPECT_ERROR_HAS("larger than the device's memory");
    assert_null(block);
    expect_all_is_well(pool, &before);
    expect_filled(kept, 64 * MIB, 0x44, gpu.stream);
    EXPECT_OK(tn_free(kept, gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
}

/* Blocks of 1 GiB until the device has no more; then one is freed, and one more can be had. */
static void the_block_after_the_last_fails_and_works_once_one_is_freed(void **state) {
    enum { BLOCKS_MAX = 1024 };
    static char *blocks[BLOCKS_MAX];
    tn_pool *pool = open_pool(0);
    size_t free_before = device_free_bytes();
    int count = 0;
    void *block = NULL;
    (void)state;
    tn_status status = TN_OK;
    while (count < BLOCKS_MAX && status == TN_OK) {
        status = tn_alloc(pool, GIB, gpu.stream, NULL, (void **)&blocks[count]);
        if (status == TN_OK) fill(blocks[count], count % 255, GIB, gpu.stream), count++;
    }
    assert_int_equal(status, TN_OUT_OF_DEVICE_MEMORY);
    printf("%d blocks of 1 GiB of %zu MiB free; then: %s\n", count, free_before / MIB,
           tn_error_last());
    assert_true((size_t)(count + 1) * GIB + GIB > free_before);
    tn_pool_stats before = stats_of(pool);
    EXPECT_STATUS(tn_alloc(pool, GIB, gpu.stream, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    assert_null(block);
    expect_all_is_well(pool, &before);
    EXPECT_OK(tn_free(blocks[0], gpu.stream));
    blocks[0] = take(pool, GIB, gpu.stream);
    fill(blocks[0], 0, GIB, gpu.stream);
    for (int i = 0; i < count; i++) {
        expect_filled(blocks[i], MIB, i % 255, gpu.stream);
        expect_filled(blocks[i] + GIB - MIB, MIB, i % 255, gpu.stream);
    }
    for (int i = 0; i < count; i++)
        EXPECT_OK(tn_free(blocks[i], gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
    assert_true(device_free_bytes() + 64 * MIB >= free_before);
}

static void a_limit_holds_and_says_so(void **state) {
    tn_pool *pool = open_pool(64 * MIB);
    void *block = NULL;
    (void)state;
    char *kept = take(pool, 40 * MIB, gpu.stream);
    tn_pool_stats before = stats_of(pool);
    EXPECT_STATUS(tn_alloc(pool, 40 * MIB, gpu.stream, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("limit");
    expect_all_is_well(pool, &before);
    assert_true(stats_of(pool).peak_reserved_bytes <= 64 * MIB);
    EXPECT_OK(tn_free(kept, gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(another_stream_gets_the_block_behind_its_last_use,
                                  let_go_after_all),
        cmocka_unit_test_teardown(its_own_stream_waits_for_recorded_uses, let_go_after_all),
        cmocka_unit_test(blocks_keep_their_bytes_while_others_come_and_go),
        cmocka_unit_test(trimming_gives_the_device_its_memory_back),
        cmocka_unit_test(a_warm_pair_makes_no_driver_call),
        cmocka_unit_test(more_than_the_device_has_is_a_report_and_nothing_sticks),
        cmocka_unit_test(the_block_after_the_last_fails_and_works_once_one_is_freed),
        cmocka_unit_test(a_limit_holds_and_says_so),
    };
    gpu_open(&gpu);
    probe = take(gpu.pool, MIB, gpu.stream);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    EXPECT_OK(tn_free(probe, gpu.stream));
    gpu_close(&gpu);
    return failures;
}
