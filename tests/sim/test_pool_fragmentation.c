/* Freed memory serves other shapes: the sequences of public reports on which other allocators
 * reserve memory that they do not need, with the exact amounts that are right here. */
#include "test_pools.h"

#define MIB MIB_BYTES
#define GIB GIB_BYTES

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
} fixture;

static void open_fixture(fixture *f, size_t memory, tn_pool_backing backing, size_t limit) {
    f->device = test_open_sim(memory, 0);
    f->pool = test_open_pool(f->device, backing, limit);
    f->stream = test_open_stream(f->device);
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->stream));
    test_close_sim(f->device);
}

static void *take(fixture *f, size_t bytes) { return test_take(f->pool, bytes, f->stream); }
static void give(fixture *f, void *block) { test_give(f->pool, block, f->stream); }

/* pytorch/devlogs 2026-06-01: 256 MiB there. */
static void small_blocks_become_large_ones(tn_pool_backing backing, const int *order) {
    fixture f;
    void *blocks[8];
    open_fixture(&f, 0, backing, 0);
    for (int i = 0; i < 8; i++)
        blocks[i] = take(&f, 16 * MIB);
    for (int i = 0; i < 8; i++)
        give(&f, blocks[order[i]]);
    for (int i = 0; i < 4; i++)
        blocks[i] = take(&f, 32 * MIB);
    assert_int_equal(test_pool_stats(f.pool).peak_reserved_bytes, 128 * MIB);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 128 * MIB);
    assert_int_equal(test_pool_stats(f.pool).cached_bytes, 0);
    for (int i = 0; i < 4; i++)
        give(&f, blocks[i]);
    close_fixture(&f);
}

static void eight_of_16_mib_become_four_of_32_mib_in_any_order(void **state) {
    const int orders[][8] = {{0, 1, 2, 3, 4, 5, 6, 7},
                             {7, 6, 5, 4, 3, 2, 1, 0},
                             {0, 2, 4, 6, 1, 3, 5, 7},
                             {3, 0, 7, 1, 6, 2, 5, 4}};
    (void)state;
    for (int i = 0; i < 4; i++) {
        small_blocks_become_large_ones(TN_BACKING_VMM, orders[i]);
        small_blocks_become_large_ones(TN_BACKING_PLAIN, orders[i]);
    }
}

/* pytorch#123548: 14 GB there. */
static void kept_small_blocks(tn_pool_backing backing, size_t expected_peak) {
    fixture f;
    void *kept[100];
    open_fixture(&f, 0, backing, 0);
    for (int i = 0; i < 100; i++) {
        void *a = take(&f, 91 * MIB);
        void *b = take(&f, 91 * MIB / 2);
        kept[i] = take(&f, 2 * MIB);
        give(&f, a);
        give(&f, b);
    }
    assert_int_equal(test_pool_stats(f.pool).peak_reserved_bytes, expected_peak);
    for (int i = 0; i < 100; i++)
        give(&f, kept[i]);
    close_fixture(&f);
}

static void a_small_block_kept_each_time_does_not_hold_large_ones(void **state) {
    (void)state;
    kept_small_blocks(TN_BACKING_VMM, 338 * MIB);
    kept_small_blocks(TN_BACKING_PLAIN, 362 * MIB);
}

/* cupy#7678 and cupy#1256. */
static void cached_bytes_do_not_count_against_the_limit(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        fixture f;
        void *a;
        void *b;
        open_fixture(&f, 0, (tn_pool_backing)backing, GIB);
        a = take(&f, 512 * MIB);
        give(&f, a);
        a = take(&f, 768 * MIB);
        give(&f, a);
        EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
        a = take(&f, 300 * MIB);
        b = take(&f, 300 * MIB);
        give(&f, a);
        a = take(&f, 600 * MIB);
        assert_true(test_pool_stats(f.pool).peak_reserved_bytes <= GIB);
        give(&f, a);
        give(&f, b);
        close_fixture(&f);
    }
}

/* pytorch#159674. */
static void a_freed_block_makes_room_for_a_larger_one_in_every_pool(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        fixture f;
        tn_pool *second;
        open_fixture(&f, 80 * GIB, (tn_pool_backing)backing, 0);
        give(&f, take(&f, 60 * GIB));
        give(&f, take(&f, 70 * GIB));
        second = test_open_pool(f.device, (tn_pool_backing)backing, 0);
        test_give(second, test_take(second, 60 * GIB, f.stream), f.stream);
        test_give(second, test_take(second, 70 * GIB, f.stream), f.stream);
        EXPECT_OK(tn_pool_destroy(second));
        close_fixture(&f);
    }
}

/* Two holes of 64 MiB with a live block between: 128 MiB fit without a new page. */
static void holes_apart_serve_one_large_block(void **state) {
    fixture f;
    void *hole[2];
    void *kept[2];
    uint64_t made;
    uint64_t mapped;
    (void)state;
    open_fixture(&f, 0, TN_BACKING_VMM, 0);
    for (int i = 0; i < 2; i++) {
        hole[i] = take(&f, 64 * MIB);
        kept[i] = take(&f, 2 * MIB);
    }
    give(&f, hole[0]);
    give(&f, hole[1]);
    made = test_calls(f.device, TN_CALL_MEM_CREATE);
    mapped = test_calls(f.device, TN_CALL_MEM_MAP);
    hole[0] = take(&f, 128 * MIB);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_CREATE), made);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_MAP), mapped + 64);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 132 * MIB);
    assert_int_equal(test_sim_get()->physical_peak_bytes(0), 132 * MIB);
    give(&f, hole[0]);
    give(&f, kept[0]);
    give(&f, kept[1]);
    close_fixture(&f);
}

/* A hole of 6 MiB with its pages, one of 8 MiB of which 2 MiB remain: 8 MiB need three pages in the
 * second, and the first gives them. */
static void a_block_goes_where_the_fewest_pages_are_missing(void **state) {
    fixture f;
    void *blocks[4];
    char *again;
    size_t released = 0;
    (void)state;
    open_fixture(&f, 0, TN_BACKING_VMM, 0);
    blocks[0] = take(&f, 8 * MIB);
    blocks[1] = take(&f, 2 * MIB);
    blocks[2] = take(&f, 6 * MIB);
    blocks[3] = take(&f, 2 * MIB);
    give(&f, blocks[0]);
    EXPECT_OK(tn_pool_trim(f.pool, 2 * MIB, &released));
    assert_int_equal(released, 6 * MIB);
    give(&f, blocks[2]);
    again = take(&f, 8 * MIB);
    assert_ptr_equal(again, blocks[0]);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 12 * MIB);
    assert_int_equal(test_pool_stats(f.pool).cached_bytes, 0);
    give(&f, again);
    give(&f, blocks[1]);
    give(&f, blocks[3]);
    close_fixture(&f);
}

static void small_blocks_do_not_split_large_holes(void **state) {
    fixture f;
    void *large[4];
    void *small[4];
    (void)state;
    open_fixture(&f, 0, TN_BACKING_VMM, 0);
    for (int i = 0; i < 4; i++) {
        large[i] = take(&f, 16 * MIB);
        small[i] = take(&f, 300);
    }
    for (int i = 0; i < 4; i++)
        give(&f, large[i]);
    {
        uint64_t mapped = test_calls(f.device, TN_CALL_MEM_MAP);
        large[0] = take(&f, 64 * MIB);
        assert_int_equal(test_calls(f.device, TN_CALL_MEM_MAP), mapped);
    }
    give(&f, large[0]);
    for (int i = 0; i < 4; i++)
        give(&f, small[i]);
    close_fixture(&f);
}

static void warm_calls_make_no_driver_call(void **state) {
    const size_t sizes[] = {1, 512, 4096, 1 * MIB - 1, 1 * MIB, 5 * MIB, 300 * MIB};
    fixture f;
    (void)state;
    open_fixture(&f, 0, TN_BACKING_VMM, 0);
    for (int round = 0; round < 3; round++) {
        uint64_t calls = test_all_calls(f.device);
        void *blocks[7];
        for (int i = 0; i < 7; i++) {
            EXPECT_OK(tn_alloc(f.pool, sizes[i], i % 2 ? f.stream : NULL, NULL, &blocks[i]));
        }
        for (int i = 0; i < 7; i++)
            EXPECT_OK(tn_free(blocks[i], i % 2 ? f.stream : NULL));
        if (round == 0) continue;
        assert_int_equal(test_all_calls(f.device), calls);
    }
    close_fixture(&f);
}

static void pages_may_be_larger(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    void *blocks[2];
    (void)state;
    config.page_bytes = 32 * MIB;
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    blocks[0] = test_take(pool, 33 * MIB, NULL);
    blocks[1] = test_take(pool, 100, NULL);
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 96 * MIB);
    assert_int_equal(test_calls(device, TN_CALL_MEM_CREATE), 3);
    test_give(pool, blocks[0], NULL);
    assert_int_equal(test_pool_stats(pool).cached_bytes, 64 * MIB);
    assert_int_equal(test_pool_stats(pool).partial_bytes, 32 * MIB - 100);
    test_give(pool, blocks[1], NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_of_16_mib_become_four_of_32_mib_in_any_order),
        cmocka_unit_test(a_small_block_kept_each_time_does_not_hold_large_ones),
        cmocka_unit_test(cached_bytes_do_not_count_against_the_limit),
        cmocka_unit_test(a_freed_block_makes_room_for_a_larger_one_in_every_pool),
        cmocka_unit_test(holes_apart_serve_one_large_block),
        cmocka_unit_test(a_block_goes_where_the_fewest_pages_are_missing),
        cmocka_unit_test(small_blocks_do_not_split_large_holes),
        cmocka_unit_test(warm_calls_make_no_driver_call),
        cmocka_unit_test(pages_may_be_larger),
    };
    return cmocka_run_group_tests_name("sim/pool_fragmentation", tests, NULL, NULL);
}
