/* Memory that moves keeps its old mapping, and what that is worth: shapes that come back make no
 * driver call. Never are two mappings of one handle in use at once; the simulated device would call
 * it a race. Then what pools give up: the device's cache of handles, and decay. */
#include <stdlib.h>

#include "handle_cache.h"
#include "options.h"
#include "test_pools.h"

#define MIB MIB_BYTES

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_stream other;
} fixture;

static void open_fixture(fixture *f) {
    f->device = test_open_sim(0, 0);
    f->pool = test_open_pool(f->device, TN_BACKING_VMM, 0);
    f->stream = test_open_stream(f->device);
    f->other = test_open_stream(f->device);
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->stream));
    EXPECT_OK(tn_stream_destroy(f->device, f->other));
    test_close_sim(f->device);
}

/* ---- shapes that come back ------------------------------------------------------------------- */

/* One step of a job: blocks of one shape, each with a small one behind it that stays a little. */
static void step(fixture *f, size_t bytes, int count) {
    void *blocks[16];
    for (int i = 0; i < count; i++) {
        blocks[i] = test_take(f->pool, bytes, f->stream);
        test_sim_write(f->device, f->stream, blocks[i], bytes, 10);
    }
    for (int i = 0; i < count; i++)
        test_give(f->pool, blocks[i], f->stream);
}

static void shapes_that_alternate_make_no_driver_call(void **state) {
    fixture f;
    uint64_t calls;
    void *kept[3];
    (void)state;
    open_fixture(&f);
    for (int i = 0; i < 3; i++) { /* holes of 24 MiB with something live between */
        kept[i] = test_take(f.pool, 24 * MIB, f.stream);
    }
    test_give(f.pool, kept[0], f.stream);
    test_give(f.pool, kept[2], f.stream);
    for (int cycle = 0; cycle < 2; cycle++) {
        step(&f, 48 * MIB, 1);
        step(&f, 12 * MIB, 4);
        step(&f, 20 * MIB, 2);
    }
    calls = test_all_calls(f.device);
    for (int cycle = 0; cycle < 10; cycle++) {
        step(&f, 48 * MIB, 1);
        step(&f, 12 * MIB, 4);
        step(&f, 20 * MIB, 2);
    }
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_CREATE), 36);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_UNMAP), 0);
    /* Only what the ten cycles launched, seven kernels each. */
    assert_int_equal(test_all_calls(f.device) - calls, 70);
    assert_int_equal(test_pool_stats(f.pool).peak_reserved_bytes, 72 * MIB);
    assert_int_equal(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    test_give(f.pool, kept[1], f.stream);
    close_fixture(&f);
}

/* The same 64 MiB at two addresses, by turns, while kernels on the address before still run: each
 * block is written on its own stream, and only waits on the device keep them apart. */
static void two_mappings_are_never_in_use_at_once(void **state) {
    fixture f;
    void *between;
    void *block[2];
    (void)state;
    open_fixture(&f);
    block[0] = test_take(f.pool, 32 * MIB, f.stream);
    between = test_take(f.pool, 2 * MIB, f.stream);
    block[1] = test_take(f.pool, 32 * MIB, f.stream);
    test_give(f.pool, block[0], f.stream);
    test_give(f.pool, block[1], f.stream);
    for (int turn = 0; turn < 8; turn++) {
        tn_stream stream = turn % 2 ? f.stream : f.other;
        void *large = test_take(f.pool, 64 * MIB, stream);
        test_sim_write(f.device, stream, large, 64 * MIB, 1e4);
        test_give(f.pool, large, stream);
        for (int i = 0; i < 2; i++) {
            block[i] = test_take(f.pool, 32 * MIB, turn % 3 ? f.stream : f.other);
            test_sim_write(f.device, turn % 3 ? f.stream : f.other, block[i], 32 * MIB, 1e4);
        }
        for (int i = 0; i < 2; i++)
            test_give(f.pool, block[i], turn % 3 ? f.stream : f.other);
    }
    assert_int_equal(test_sim_get()->race_count(), 0);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 66 * MIB);
    assert_int_equal(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    assert_true(test_pool_stats(f.pool).stream_waits > 0);
    test_give(f.pool, between, f.stream);
    close_fixture(&f);
}

/* A kept mapping goes before its memory goes, and not while work may use it. */
static void memory_goes_back_with_all_its_mappings(void **state) {
    fixture f;
    void *block[3];
    (void)state;
    open_fixture(&f);
    for (int i = 0; i < 3; i++)
        block[i] = test_take(f.pool, 8 * MIB, f.stream);
    test_give(f.pool, block[0], f.stream);
    test_give(f.pool, block[2], f.stream);
    test_give(f.pool, test_take(f.pool, 16 * MIB, f.stream), f.stream);
    test_sim_write(f.device, f.stream, NULL, 0, 1e6);
    EXPECT_OK(tn_stream_synchronize(f.device, f.stream));
    EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 8 * MIB);
    assert_int_equal(test_sim_get()->physical_bytes(0), 8 * MIB);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_RELEASE), 8);
    test_give(f.pool, block[1], f.stream);
    close_fixture(&f);
}

/* ---- lifetimes ------------------------------------------------------------------------------- */

static void blocks_said_to_stay_lie_apart(void **state) {
    fixture f;
    tn_alloc_options stays = TN_ALLOC_OPTIONS_INIT;
    void *kept[8];
    void *passing[8];
    (void)state;
    open_fixture(&f);
    stays.lifetime = TN_LIFETIME_PERSISTENT;
    for (int i = 0; i < 8; i++) {
        passing[i] = test_take(f.pool, 5 * MIB, f.stream);
        EXPECT_OK(tn_alloc(f.pool, 3 * MIB, f.stream, &stays, &kept[i]));
    }
    for (int i = 0; i < 8; i++)
        test_give(f.pool, passing[i], f.stream);
    /* 8 x 3 MiB side by side are whole pages: nothing but them is partly used. */
    assert_int_equal(test_pool_stats(f.pool).partial_bytes, 0);
    assert_int_equal(test_pool_stats(f.pool).cached_bytes, 40 * MIB);
    for (int i = 0; i < 8; i++)
        test_give(f.pool, kept[i], f.stream);
    close_fixture(&f);
}

/* Weights of 3 MiB that stay; blocks of their size, made between others, are kept with them. */
static void the_size_of_what_stays_is_learned(void **state) {
    fixture f;
    void *kept[16];
    void *passing[8];
    (void)state;
    open_fixture(&f);
    for (int i = 0; i < 8; i++)
        kept[i] = test_take(f.pool, 3 * MIB, f.stream);
    /* In a pool that has never held 4 GiB nothing is kept apart. */
    test_give(f.pool, test_take(f.pool, 4096 * MIB, f.stream), f.stream);
    for (size_t i = 0; i < 64; i++) /* 4 GiB are allocated meanwhile, no two of one size */
        test_give(f.pool, test_take(f.pool, 64 * MIB + 4096 * i, f.stream), f.stream);
    for (int i = 0; i < 8; i++) {
        passing[i] = test_take(f.pool, 5 * MIB, f.stream);
        kept[8 + i] = test_take(f.pool, 3 * MIB, f.stream);
    }
    for (int i = 0; i < 8; i++)
        test_give(f.pool, passing[i], f.stream);
    assert_int_equal(test_pool_stats(f.pool).partial_bytes, 0);
    for (int i = 0; i < 16; i++)
        test_give(f.pool, kept[i], f.stream);
    close_fixture(&f);
}

/* ---- what pools give up ---------------------------------------------------------------------- */

static void pools_share_a_cache_of_handles(void **state) {
    fixture f;
    tn_pool *second;
    (void)state;
    setenv("TENURE_HANDLE_CACHE", "8", 1);
    tn__options_reload();
    open_fixture(&f);
    test_give(f.pool, test_take(f.pool, 32 * MIB, f.stream), f.stream);
    EXPECT_OK(tn_stream_synchronize(f.device, f.stream));
    EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 0);
    assert_int_equal(tn__handle_cache_bytes(f.device), 16 * MIB);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_RELEASE), 8);
    second = test_open_pool(f.device, TN_BACKING_VMM, 0);
    test_give(second, test_take(second, 20 * MIB, f.stream), f.stream);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_CREATE), 16 + 2);
    assert_int_equal(tn__handle_cache_bytes(f.device), 0);
    EXPECT_OK(tn_pool_destroy(second));
    assert_int_equal(tn__handle_cache_bytes(f.device), 16 * MIB);
    assert_int_equal(test_sim_get()->physical_bytes(0), 16 * MIB);
    unsetenv("TENURE_HANDLE_CACHE");
    tn__options_reload();
    close_fixture(&f);
}

static void the_cache_gives_way_when_memory_is_short(void **state) {
    tn_device *device = test_open_sim(64 * MIB, 0);
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    tn_pool *large = NULL;
    (void)state;
    setenv("TENURE_HANDLE_CACHE", "100", 1);
    tn__options_reload();
    test_give(pool, test_take(pool, 48 * MIB, NULL), NULL);
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_pool_trim(pool, 0, NULL));
    assert_int_equal(tn__handle_cache_bytes(device), 48 * MIB);
    config.page_bytes = 32 * MIB;
    EXPECT_OK(tn_pool_create(device, &config, &large));
    test_give(large, test_take(large, 64 * MIB, NULL), NULL);
    assert_int_equal(tn__handle_cache_bytes(device), 0);
    EXPECT_OK(tn_pool_destroy(large));
    EXPECT_OK(tn_pool_destroy(pool));
    unsetenv("TENURE_HANDLE_CACHE");
    tn__options_reload();
    test_close_sim(device);
}

/* What is released for a request that can not use those handles is not kept for others. */
static void released_handles_make_way_for_other_memory(void **state) {
    fixture f;
    tn_device *device;
    (void)state;
    setenv("TENURE_HANDLE_CACHE", "100", 1);
    tn__options_reload();
    device = test_open_sim(64 * MIB, 0);
    for (int way = 0; way < 2; way++) {
        tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
        void *block = NULL;
        f.stream = test_open_stream(device);
        f.pool = test_open_pool(device, TN_BACKING_VMM, 0);
        test_give(f.pool, test_take(f.pool, 60 * MIB, f.stream), f.stream);
        EXPECT_OK(tn_device_synchronize(device));
        if (way == 0) {
            options.flags = TN_ALLOC_SINGLE_HANDLE;
            EXPECT_OK(tn_alloc(f.pool, 40 * MIB, f.stream, &options, &block));
            assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 60 * MIB); /* no more went */
            EXPECT_OK(tn_free(block, f.stream));
        } else {
            tn_pool *plain = test_open_pool(device, TN_BACKING_PLAIN, 0);
            test_give(plain, test_take(plain, 40 * MIB, f.stream), f.stream);
            EXPECT_OK(tn_pool_destroy(plain));
        }
        EXPECT_OK(tn_pool_destroy(f.pool));
        EXPECT_OK(tn_stream_destroy(device, f.stream));
    }
    unsetenv("TENURE_HANDLE_CACHE");
    tn__options_reload();
    test_close_sim(device);
}

static void idle_memory_decays(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_stream stream = test_open_stream(device);
    tn_pool *pool = NULL;
    (void)state;
    config.page_bytes = 2 * MIB;
    config.decay_us = 1000000;
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    test_give(pool, test_take(pool, 32 * MIB, stream), stream);
    EXPECT_OK(tn_pool_trim(pool, SIZE_MAX, NULL));
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 32 * MIB);
    for (int second = 0; second < 3; second++) {
        test_sim_write(device, stream, NULL, 0, 1.1e6);
        EXPECT_OK(tn_stream_synchronize(device, stream));
        test_give(pool, test_take(pool, 1024, stream), stream); /* another zone, always in use */
        EXPECT_OK(tn_pool_trim(pool, SIZE_MAX, NULL));
    }
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 2 * MIB);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(device, stream));
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_that_alternate_make_no_driver_call),
        cmocka_unit_test(two_mappings_are_never_in_use_at_once),
        cmocka_unit_test(memory_goes_back_with_all_its_mappings),
        cmocka_unit_test(blocks_said_to_stay_lie_apart),
        cmocka_unit_test(the_size_of_what_stays_is_learned),
        cmocka_unit_test(pools_share_a_cache_of_handles),
        cmocka_unit_test(the_cache_gives_way_when_memory_is_short),
        cmocka_unit_test(released_handles_make_way_for_other_memory),
        cmocka_unit_test(idle_memory_decays),
    };
    return cmocka_run_group_tests_name("sim/heap_views", tests, NULL, NULL);
}
