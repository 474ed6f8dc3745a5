/* Thread caches seen by one thread: driver calls, books, and when their blocks go back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tenure_pool.h"
#include "pool_fixture.h"

#define KIB ((size_t)1 << 10)
#define MIB MIB_BYTES

static const size_t sizes[] = {1,        512,      513,           4096,
                               100000,   1 << 20,  (1 << 20) + 1, 3 << 20,
                               16 << 20, 17 << 20, 64 << 20,      1 << 30};
enum { SIZES = sizeof sizes / sizeof sizes[0], PAIRS = 100000 };

static void warm_pairs_make_no_driver_call(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        void *blocks[2 * SIZES];
        uint64_t before;
        uint64_t random = 7;
        f = pool_fixture_open(0, (tn_pool_backing)backing, 0);
        /* All of them at once: then there is memory to keep one of each for each stream. */
        for (int i = 0; i < SIZES; i++) {
            blocks[i] = test_take(f.pool, sizes[i], f.a);
            blocks[SIZES + i] = test_take(f.pool, sizes[i], f.b);
        }
        for (int i = 0; i < SIZES; i++) {
            test_give(f.pool, blocks[i], f.a);
            test_give(f.pool, blocks[SIZES + i], f.b);
        }
        before = test_all_calls(f.device);
        for (int i = 0; i < PAIRS; i++) {
            tn_stream stream = (random >> 40) & 1 ? f.a : f.b;
            void *block = NULL;
            random = random * 6364136223846793005u + 1442695040888963407u;
            EXPECT_OK(tn_alloc(f.pool, sizes[(random >> 33) % SIZES], stream, NULL, &block));
            EXPECT_OK(tn_free(block, stream));
        }
        assert_int_equal(test_all_calls(f.device) - before, 0);
        assert_int_equal(test_pool_stats(f.pool).stream_waits, 0);
        pool_fixture_close(&f);
    }
}

static void kept_blocks_are_free_memory_in_the_books(void **state) {
    pool_fixture f;
    void *blocks[40];
    tn_pool_stats stats;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    for (int i = 0; i < 40; i++)
        blocks[i] = test_take(f.pool, 1 * MIB, f.a);
    for (int i = 0; i < 40; i++)
        test_give(f.pool, blocks[i], f.a);
    stats = test_pool_stats(f.pool);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.live_blocks, 0);
    assert_int_equal(stats.allocs, 40);
    assert_int_equal(stats.frees, 40);
    assert_int_equal(stats.peak_live_bytes, 40 * MIB);
    assert_int_equal(stats.cached_bytes, 40 * MIB);
    assert_int_equal(stats.partial_bytes, 0);
    /* One that is used makes its page partly used: half of it is rounding and neighbour. */
    blocks[0] = test_take(f.pool, 1 * MIB - 100, f.a);
    stats = test_pool_stats(f.pool);
    assert_int_equal(stats.live_bytes, 1 * MIB - 100);
    assert_int_equal(stats.cached_bytes, 38 * MIB);
    assert_int_equal(stats.partial_bytes, 1 * MIB + 100);
    test_give(f.pool, blocks[0], f.a);
    pool_fixture_close(&f);
}

static void the_peak_is_exact(void **state) {
    pool_fixture f;
    void *x;
    void *y;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    for (int i = 0; i < 1000; i++) {
        EXPECT_OK(tn_alloc(f.pool, 1000, f.a, NULL, &x));
        EXPECT_OK(tn_free(x, f.a));
    }
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 1000);
    x = test_take(f.pool, 1024, f.a); /* the same bin, 24 bytes more */
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 1024);
    y = test_take(f.pool, 600, f.b);
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 1624);
    test_give(f.pool, x, f.a);
    test_give(f.pool, y, f.b);
    EXPECT_OK(tn_pool_stats_reset_peaks(f.pool));
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 0);
    EXPECT_OK(tn_alloc(f.pool, 700, f.b, NULL, &y));
    EXPECT_OK(tn_free(y, f.b));
    assert_int_equal(test_pool_stats(f.pool).peak_live_bytes, 700);
    pool_fixture_close(&f);
}

/* 96 MiB in blocks of 8 MiB are kept; then a block of 90 MiB: not a page is added. */
static void kept_blocks_are_used_before_more_is_taken(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        void *blocks[12];
        size_t reserved;
        void *large;
        f = pool_fixture_open(256 * MIB, (tn_pool_backing)backing, 0);
        for (int i = 0; i < 12; i++)
            blocks[i] = test_take(f.pool, 8 * MIB, f.a);
        for (int i = 0; i < 12; i++)
            test_give(f.pool, blocks[i], f.a);
        reserved = test_pool_stats(f.pool).reserved_bytes;
        large = test_take(f.pool, (backing == TN_BACKING_VMM ? 90 : 30) * MIB, f.a);
        assert_int_equal(test_pool_stats(f.pool).reserved_bytes, reserved);
        test_give(f.pool, large, f.a);
        pool_fixture_close(&f);
    }
}

static void trim_gives_back_what_threads_keep(void **state) {
    pool_fixture f;
    size_t released = 0;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    test_give(f.pool, test_take(f.pool, 64 * MIB, f.a), f.a);
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, 64 * MIB);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 0);
    pool_fixture_close(&f);
}

static void a_kept_block_can_not_be_freed_again(void **state) {
    pool_fixture f;
    void *block;
    size_t bytes;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    block = test_take(f.pool, 4 * KIB, f.a);
    test_give(f.pool, block, f.a);
    EXPECT_STATUS(tn_free(block, f.a), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_free(block, f.b), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_record_use(block, f.b), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_block_info(block, &bytes, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(test_pool_stats(f.pool).frees, 1);
    assert_ptr_equal(test_take(f.pool, 4 * KIB, f.a), block);
    EXPECT_OK(tn_block_info(block, &bytes, NULL));
    assert_int_equal(bytes, 4 * KIB);
    test_give(f.pool, block, f.a);
    pool_fixture_close(&f);
}

/* It is freed behind that use: a thread must not keep it for the first stream alone. */
static void a_block_with_a_recorded_use_is_not_kept(void **state) {
    pool_fixture f;
    void *block;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    block = test_take(f.pool, 32 * MIB, f.a);
    test_sim_write(f.device, f.b, block, 32 * MIB, 1000.0);
    EXPECT_OK(tn_record_use(block, f.b));
    test_give(f.pool, block, f.a);
    assert_int_equal(test_pool_stats(f.pool).pending_bytes, 32 * MIB);
    assert_ptr_equal(test_take(f.pool, 32 * MIB, f.a), block);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_sim_write(f.device, f.a, block, 32 * MIB, 1.0);
    test_give(f.pool, block, f.a);
    pool_fixture_close(&f);
}

/* A trace begun while blocks are kept has every event from then on. */
static void a_trace_sees_every_call(void **state) {
    pool_fixture f;
    char path[] = "/tmp/tenure-warm-trace-XXXXXX";
    char line[128];
    int lines = 0;
    FILE *file;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    test_give(f.pool, test_take(f.pool, 4 * KIB, f.a), f.a);
    close(mkstemp(path));
    EXPECT_OK(tn_pool_trace_begin(f.pool, path));
    for (int i = 0; i < 10; i++)
        test_give(f.pool, test_take(f.pool, 4 * KIB, f.a), f.a);
    EXPECT_OK(tn_pool_trace_end(f.pool));
    test_give(f.pool, test_take(f.pool, 4 * KIB, f.a), f.a);
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        lines += line[0] == 'a' || line[0] == 'f';
    fclose(file);
    remove(path);
    assert_int_equal(lines, 20);
    pool_fixture_close(&f);
}

static void a_leak_report_names_only_blocks_that_callers_hold(void **state) {
    pool_fixture f;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *kept = NULL;
    void *leaked = NULL;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    options.owner = "was freed";
    EXPECT_OK(tn_alloc(f.pool, 4 * KIB, f.a, &options, &kept));
    options.owner = "is live";
    EXPECT_OK(tn_alloc(f.pool, 8 * KIB, f.a, &options, &leaked));
    EXPECT_OK(tn_free(kept, f.a));
    EXPECT_STATUS(tn_pool_destroy(f.pool), TN_LEAK);
    assert_non_null(strstr(tn_error_last(), "is live: 8192 bytes in 1 block"));
    assert_null(strstr(tn_error_last(), "was freed"));
    test_give(f.pool, leaked, f.a);
    pool_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_pairs_make_no_driver_call),
        cmocka_unit_test(kept_blocks_are_free_memory_in_the_books),
        cmocka_unit_test(the_peak_is_exact),
        cmocka_unit_test(kept_blocks_are_used_before_more_is_taken),
        cmocka_unit_test(trim_gives_back_what_threads_keep),
        cmocka_unit_test(a_kept_block_can_not_be_freed_again),
        cmocka_unit_test(a_block_with_a_recorded_use_is_not_kept),
        cmocka_unit_test(a_trace_sees_every_call),
        cmocka_unit_test(a_leak_report_names_only_blocks_that_callers_hold),
    };
    return cmocka_run_group_tests_name("sim/warm_calls", tests, NULL, NULL);
}
