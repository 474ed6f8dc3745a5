/* When memory is short: what is tried, in which order, that a failure leaves no trace, and that
 * its report is true. */
#include <stdio.h>
#include <string.h>

#include "pool_fixture.h"

#define MIB MIB_BYTES
#define GIB GIB_BYTES

/* pytorch#189504: the device is full, the block is freed but another stream still uses it. */
static void memory_that_is_pending_serves_the_first_request(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        void *x;
        f = pool_fixture_open(256 * MIB, (tn_pool_backing)backing, 0);
        x = test_take(f.pool, 256 * MIB, f.a);
        EXPECT_OK(tn_record_use(x, f.b));
        test_sim_write(f.device, f.b, x, 256 * MIB, 1e5);
        EXPECT_OK(tn_record_use(x, f.b));
        test_give(f.pool, x, f.a);
        x = test_take(f.pool, 256 * MIB, f.a);
        assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
        test_sim_write(f.device, f.a, x, 256 * MIB, 10);
        assert_int_equal(test_pool_stats(f.pool).out_of_memory, 0);
        test_give(f.pool, x, f.a);
        pool_fixture_close(&f);
    }
}

/* The same where the pending memory is in other pieces: pages move behind a wait on the device. */
static void pending_pages_move_behind_a_wait(void **state) {
    pool_fixture f;
    void *x[2];
    void *kept;
    void *y;
    (void)state;
    f = pool_fixture_open(130 * MIB, TN_BACKING_VMM, 0);
    x[0] = test_take(f.pool, 64 * MIB, f.a);
    kept = test_take(f.pool, 2 * MIB, f.a);
    x[1] = test_take(f.pool, 64 * MIB, f.a);
    for (int i = 0; i < 2; i++) {
        test_sim_write(f.device, f.a, x[i], 64 * MIB, 1e6);
        test_give(f.pool, x[i], f.a);
    }
    y = test_take(f.pool, 128 * MIB, f.b);
    assert_int_equal(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_sim_write(f.device, f.b, y, 128 * MIB, 10);
    test_give(f.pool, y, f.b);
    test_give(f.pool, kept, f.a);
    pool_fixture_close(&f);
}

/* A segment can go back to the driver only when its last use has completed: the host waits. */
static void segments_are_waited_for_and_given_back(void **state) {
    pool_fixture f;
    void *x[2];
    void *y;
    (void)state;
    f = pool_fixture_open(128 * MIB, TN_BACKING_PLAIN, 0);
    for (int i = 0; i < 2; i++)
        x[i] = test_take(f.pool, 64 * MIB, f.a);
    for (int i = 0; i < 2; i++) {
        test_sim_write(f.device, f.b, x[i], 64 * MIB, 1e6);
        EXPECT_OK(tn_record_use(x[i], f.b));
        test_give(f.pool, x[i], f.a);
    }
    y = test_take(f.pool, 100 * MIB, f.a);
    assert_true(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE) > 0);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 100 * MIB);
    test_give(f.pool, y, f.a);
    pool_fixture_close(&f);
}

static void only_as_many_segments_go_back_as_are_needed(void **state) {
    pool_fixture f;
    void *x[4];
    void *y;
    (void)state;
    f = pool_fixture_open(256 * MIB, TN_BACKING_PLAIN, 0);
    for (int i = 0; i < 4; i++)
        x[i] = test_take(f.pool, 64 * MIB, f.a);
    for (int i = 0; i < 4; i++)
        test_give(f.pool, x[i], f.a);
    y = test_take(f.pool, 100 * MIB, f.a);
    assert_int_equal(test_calls(f.device, TN_CALL_MEM_FREE), 2);
    assert_int_equal(test_pool_stats(f.pool).cached_bytes, 128 * MIB);
    test_give(f.pool, y, f.a);
    pool_fixture_close(&f);
}

static void another_pool_gives_its_idle_memory(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        tn_pool *other;
        void *x;
        f = pool_fixture_open(256 * MIB, (tn_pool_backing)backing, 0);
        other = test_open_pool(f.device, (tn_pool_backing)backing, 0);
        test_give(other, test_take(other, 200 * MIB, f.a), f.a);
        x = test_take(f.pool, 150 * MIB, f.b);
        assert_int_equal(test_pool_stats(other).reserved_bytes,
                         backing == TN_BACKING_VMM ? 50 * MIB : 0);
        test_give(f.pool, x, f.b);
        EXPECT_OK(tn_pool_destroy(other));
        pool_fixture_close(&f);
    }
}

/* What the limit keeps a pool from having is not taken from others for nothing. */
static void a_pool_at_its_limit_takes_nothing_from_others(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        tn_pool *other;
        void *x;
        void *y = NULL;
        f = pool_fixture_open(0, (tn_pool_backing)backing, 100 * MIB);
        other = test_open_pool(f.device, (tn_pool_backing)backing, 0);
        test_give(other, test_take(other, 200 * MIB, f.a), f.a);
        x = test_take(f.pool, 100 * MIB, f.b);
        EXPECT_STATUS(tn_alloc(f.pool, 50 * MIB, f.b, NULL, &y), TN_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(test_pool_stats(other).reserved_bytes, 200 * MIB);
        test_give(f.pool, x, f.b);
        EXPECT_OK(tn_pool_destroy(other));
        pool_fixture_close(&f);
    }
}

/* Work that never ends holds its memory; the request fails and says so, and nothing hangs. */
static void work_that_does_not_end_is_reported(void **state) {
    pool_fixture f;
    void *x;
    void *y = NULL;
    (void)state;
    f = pool_fixture_open(128 * MIB, TN_BACKING_PLAIN, 0);
    x = test_take(f.pool, 64 * MIB, f.a);
    test_sim_stall(f.device, f.b, 1);
    test_sim_write(f.device, f.b, x, 64 * MIB, 10);
    EXPECT_OK(tn_record_use(x, f.b));
    test_give(f.pool, x, f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 100 * MIB, f.a, NULL, &y), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("pending 67108864");
    EXPECT_STATUS(tn_pool_destroy(f.pool), TN_INVALID_STATE);
    (void)test_pool_stats(f.pool);
    test_sim_stall(f.device, f.b, 0);
    y = test_take(f.pool, 100 * MIB, f.a);
    test_give(f.pool, y, f.a);
    pool_fixture_close(&f);
}

static void expect_failure_without_trace(pool_fixture *f, size_t bytes, const char *words) {
    tn_pool_stats before = test_pool_stats(f->pool);
    tn_pool_stats after;
    void *block = &before;
    EXPECT_STATUS(tn_alloc(f->pool, bytes, f->a, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS(words);
    assert_ptr_equal(block, &before);
    after = test_pool_stats(f->pool);
    assert_int_equal(after.out_of_memory, before.out_of_memory + 1);
    after.out_of_memory = before.out_of_memory;
    assert_memory_equal(&before, &after, sizeof before);
}

static void a_failed_request_leaves_no_trace_and_a_true_report(void **state) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    pool_fixture f;
    void *blocks[3];
    (void)state;
    f = pool_fixture_open(256 * MIB, TN_BACKING_VMM, 0);
    options.owner = "weights";
    options.site = "net.c:12";
    EXPECT_OK(tn_alloc(f.pool, 100 * MIB, f.a, &options, &blocks[0]));
    EXPECT_OK(tn_alloc(f.pool, 64 * MIB, f.a, NULL, &blocks[1]));
    EXPECT_OK(tn_alloc(f.pool, 20 * MIB, f.a, &options, &blocks[2]));
    test_give(f.pool, blocks[1], f.a);
    expect_failure_without_trace(&f, 200 * MIB,
                                 "pool pool has no 209715200 bytes: live 125829120, cached "
                                 "67108864, pending 0, partly used 0, held 0, reserved 192937984, "
                                 "largest hole 67108864; device: free 75497472 of 268435456; "
                                 "limit none; largest owners: weights (net.c:12): 125829120 bytes "
                                 "in 2 blocks; hint: free some of the largest owners");
    expect_failure_without_trace(&f, GIB, "hint: the request is larger than the device's memory");
    blocks[1] = test_take(f.pool, 136 * MIB, f.a); /* exactly what is left can be had */
    for (int i = 0; i < 3; i++)
        test_give(f.pool, blocks[i], f.a);
    pool_fixture_close(&f);
}

static void the_limit_is_kept_and_named(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        void *block;
        f = pool_fixture_open(0, (tn_pool_backing)backing, 100 * MIB);
        block = test_take(f.pool, 80 * MIB, f.a);
        expect_failure_without_trace(&f, 40 * MIB, "limit 104857600");
        expect_failure_without_trace(&f, 101 * MIB, "the request is larger than the pool's limit");
        test_give(f.pool, test_take(f.pool, 20 * MIB, f.a), f.a);
        test_give(f.pool, block, f.a);
        test_give(f.pool, test_take(f.pool, 100 * MIB, f.a), f.a);
        assert_int_equal(test_pool_stats(f.pool).peak_reserved_bytes, 100 * MIB);
        pool_fixture_close(&f);
    }
}

static void pages_that_do_not_fit_the_limit_are_named(void **state) {
    pool_fixture f;
    (void)state;
    f = pool_fixture_open(0, TN_BACKING_VMM, 3 * MIB);
    expect_failure_without_trace(&f, 3 * MIB, "hint: what is free is less than the whole pages");
    pool_fixture_close(&f);
}

static void memory_that_others_hold_is_named(void **state) {
    pool_fixture f;
    tn_pool *other;
    void *block;
    (void)state;
    f = pool_fixture_open(256 * MIB, TN_BACKING_VMM, 0);
    other = test_open_pool(f.device, TN_BACKING_VMM, 0);
    block = test_take(other, 200 * MIB, f.a);
    expect_failure_without_trace(&f, 100 * MIB,
                                 "hint: other pools or programs hold the rest of the device");
    test_give(other, block, f.a);
    EXPECT_OK(tn_pool_destroy(other));
    pool_fixture_close(&f);
}

/* A small request finds room among the large ones when nothing else is left. */
static void the_last_hole_serves_whatever_fits(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        pool_fixture f;
        void *large;
        void *small;
        f = pool_fixture_open(64 * MIB, (tn_pool_backing)backing, 0);
        large = test_take(f.pool, 63 * MIB, f.a);
        small = test_take(f.pool, 1000, f.a);
        assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 64 * MIB);
        test_give(f.pool, small, f.a);
        test_give(f.pool, large, f.a);
        pool_fixture_close(&f);
    }
}

static void reservations_back_off_when_addresses_are_short(void **state) {
    const tnsim_config config = {.size = sizeof config, .address_space_bytes = 1 * GIB};
    tn_device *device = test_open_sim_as(&config);
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    void *blocks[4];
    void *none = NULL;
    size_t count = 0;
    (void)state;
    /* The device has 139 GiB: that much is asked for first. */
    blocks[count++] = test_take(pool, 300 * MIB, NULL);
    assert_true(test_pool_stats(pool).address_bytes <= 1 * GIB);
    blocks[count++] = test_take(pool, 100, NULL);
    while (count < 4 && tn_alloc(pool, 300 * MIB, NULL, NULL, &blocks[count]) == TN_OK)
        count++;
    assert_true(count < 4);
    EXPECT_STATUS(tn_alloc(pool, 300 * MIB, NULL, NULL, &none), TN_OUT_OF_ADDRESS_SPACE);
    EXPECT_ERROR_HAS("addresses");
    (void)test_pool_stats(pool);
    while (count > 0)
        test_give(pool, blocks[--count], NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

static void address_space_grows_by_further_reservations(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    void *blocks[8];
    (void)state;
    config.address_bytes = 64 * MIB;
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    for (int i = 0; i < 8; i++)
        blocks[i] = test_take(pool, 40 * MIB, NULL);
    assert_int_equal(test_pool_stats(pool).address_bytes, 8 * 64 * MIB);
    for (int i = 0; i < 8; i++)
        test_give(pool, blocks[i], NULL);
    blocks[0] = test_take(pool, 320 * MIB, NULL);
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 320 * MIB);
    test_give(pool, blocks[0], NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_that_is_pending_serves_the_first_request),
        cmocka_unit_test(pending_pages_move_behind_a_wait),
        cmocka_unit_test(segments_are_waited_for_and_given_back),
        cmocka_unit_test(only_as_many_segments_go_back_as_are_needed),
        cmocka_unit_test(another_pool_gives_its_idle_memory),
        cmocka_unit_test(a_pool_at_its_limit_takes_nothing_from_others),
        cmocka_unit_test(work_that_does_not_end_is_reported),
        cmocka_unit_test(a_failed_request_leaves_no_trace_and_a_true_report),
        cmocka_unit_test(the_limit_is_kept_and_named),
        cmocka_unit_test(pages_that_do_not_fit_the_limit_are_named),
        cmocka_unit_test(memory_that_others_hold_is_named),
        cmocka_unit_test(the_last_hole_serves_whatever_fits),
        cmocka_unit_test(reservations_back_off_when_addresses_are_short),
        cmocka_unit_test(address_space_grows_by_further_reservations),
    };
    return cmocka_run_group_tests_name("sim/pool_shortage", tests, NULL, NULL);
}
