/* Faults of sizes, errors and lifetimes that users of other allocators met, as the reports had
 * them; docs/cases.md lists all. */
#include <string.h>

#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES
#define GIB GIB_BYTES

/* pycuda#282: a request of 4 GiB got 1 GiB. Every byte to the last is there, and nobody else's. */
static void sizes_of_4_gib_and_more_are_whole(void **state) {
    static const size_t sizes[] = {4 * GIB_BYTES, 4 * GIB_BYTES + 1, 8 * GIB_BYTES - 1,
                                   (size_t)20 << 30};
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_device *device = test_open_sim(0, 0);
        tn_pool *pool = test_open_pool(device, (tn_pool_backing)backing, 0);
        char *blocks[4];
        for (int i = 0; i < 4; i++) {
            size_t bytes = 0;
            blocks[i] = test_take(pool, sizes[i], NULL);
            test_sim_write(device, NULL, blocks[i], sizes[i], 10);
            EXPECT_OK(tn_block_info(blocks[i], &bytes, NULL));
            assert_int_equal(bytes, sizes[i]);
            for (int j = 0; j < i; j++) {
                assert_true(blocks[i] + sizes[i] <= blocks[j] || blocks[j] + sizes[j] <= blocks[i]);
            }
        }
        for (int i = 0; i < 4; i++)
            test_give(pool, blocks[i], NULL);
        EXPECT_OK(tn_pool_destroy(pool));
        test_close_sim(device);
    }
}

/* cumo#170: sizes just below SIZE_MAX wrapped to 0 and shared another block's address. */
static void sizes_that_would_wrap_are_refused_at_every_alignment(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    void *held = test_take(pool, 1000, NULL);
    (void)state;
    for (size_t alignment = 512; alignment <= 2 * MIB; alignment *= 8) {
        tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
        options.alignment = alignment;
        for (size_t below = 0; below <= 1024; below++) {
            void *block = held;
            tn_status status = tn_alloc(pool, SIZE_MAX - below, NULL, &options, &block);
            EXPECT_STATUS(status, TN_OUT_OF_DEVICE_MEMORY);
            assert_ptr_equal(block, held);
        }
    }
    assert_int_equal(test_pool_stats(pool).live_blocks, 1);
    test_give(pool, held, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

/* pytorch#27600, #26188, #18853: memory stays held after a failed request, and the next fails. */
static void failed_requests_leave_nothing_behind(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_device *device = test_open_sim(256 * MIB, 0);
        tn_pool *pool = test_open_pool(device, (tn_pool_backing)backing, 0);
        void *held = test_take(pool, 128 * MIB, NULL);
        void *block = NULL;
        long host_blocks = 0;
        for (int i = 0; i < 100; i++) {
            EXPECT_STATUS(tn_alloc(pool, 129 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
            if (i == 0) host_blocks = (long)tn__host_live_blocks();
        }
        assert_int_equal(tn__host_live_blocks(), host_blocks);
        assert_int_equal(test_pool_stats(pool).reserved_bytes, 128 * MIB);
        assert_int_equal(test_sim_get()->physical_bytes(0), 128 * MIB);
        EXPECT_OK(tn_device_synchronize(device)); /* no error sticks to the driver */
        block = test_take(pool, 128 * MIB, NULL);
        test_give(pool, block, NULL);
        test_give(pool, held, NULL);
        block = test_take(pool, 256 * MIB, NULL);
        test_give(pool, block, NULL);
        EXPECT_OK(tn_pool_destroy(pool));
        test_close_sim(device);
    }
}

/* pytorch#133280: a shortage comes out as an error like any other, so that nobody can act on it. */
static void a_shortage_is_told_from_other_failures(void **state) {
    const test_sim *sim = test_sim_get();
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_device *device = test_open_sim(0, 0);
        tn_pool *pool = test_open_pool(device, (tn_pool_backing)backing, 0);
        const char *call = backing == TN_BACKING_VMM ? "cuMemCreate" : "cuMemAlloc_v2";
        void *block = NULL;
        assert_int_equal(sim->fault(call, 1, 1, 2), 0);
        EXPECT_STATUS(tn_alloc(pool, 8 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(sim->fault(call, 1, 1, 999), 0);
        EXPECT_STATUS(tn_alloc(pool, 8 * MIB, NULL, NULL, &block), TN_DRIVER_ERROR);
        assert_int_equal(tn_error_last_native(), 999);
        assert_int_equal(sim->fault(call, 0, 0, 0), 0);
        tn__host_alloc_fault(1, 1);
        EXPECT_STATUS(tn_alloc(pool, 8 * MIB, NULL, NULL, &block), TN_OUT_OF_HOST_MEMORY);
        tn__host_alloc_fault(0, 0);
        assert_null(block);
        EXPECT_OK(tn_pool_destroy(pool));
        test_close_sim(device);
    }
}

/* RendererEngine#697 (a block freed twice is handed out twice) and rocm-systems#11120 (the second
 * free of pool memory returns success). */
static void a_second_free_is_an_error_and_gives_nothing_away(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        static const size_t sizes[] = {512, 100000, 2 * MIB_BYTES, 40 * MIB_BYTES};
        tn_device *device = test_open_sim(0, 0);
        tn_pool *pool = test_open_pool(device, (tn_pool_backing)backing, 0);
        for (int i = 0; i < 4; i++) {
            void *p = test_take(pool, sizes[i], NULL);
            void *q;
            void *r;
            tn_pool_stats before;
            tn_pool_stats after;
            test_give(pool, p, NULL);
            before = test_pool_stats(pool);
            EXPECT_STATUS(tn_free(p, NULL), TN_INVALID_ARGUMENT);
            EXPECT_ERROR_HAS("freed before");
            after = test_pool_stats(pool);
            assert_memory_equal(&before, &after, sizeof before);
            q = test_take(pool, sizes[i], NULL);
            r = test_take(pool, sizes[i], NULL);
            assert_ptr_not_equal(q, r);
            test_give(pool, q, NULL);
            test_give(pool, r, NULL);
        }
        EXPECT_OK(tn_pool_destroy(pool));
        test_close_sim(device);
    }
}

/* pytorch#146431: a block that outlives what made it is freed by the wrong function. A pool with
 * live blocks does not end, whichever of two of one device it is, and each block goes back to its
 * own. */
static void a_block_goes_back_where_it_came_from(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pools[2] = {test_open_pool(device, TN_BACKING_VMM, 0),
                         test_open_pool(device, TN_BACKING_PLAIN, 0)};
    void *blocks[2];
    (void)state;
    for (int i = 0; i < 2; i++)
        blocks[i] = test_take(pools[i], 8 * MIB, NULL);
    for (int i = 0; i < 2; i++) {
        EXPECT_STATUS(tn_pool_destroy(pools[i]), TN_LEAK);
        EXPECT_OK(tn_free(blocks[i], NULL));
        assert_int_equal(test_pool_stats(pools[i]).frees, 1);
        assert_int_equal(test_pool_stats(pools[1 - i]).frees, (uint64_t)i);
    }
    for (int i = 0; i < 2; i++) {
        size_t released = 0;
        EXPECT_OK(tn_device_synchronize(device));
        EXPECT_OK(tn_pool_trim(pools[i], 0, &released)); /* pytorch#145168: of every provider */
        assert_int_equal(released, (i == 0 ? 8 : 32) * MIB);
        EXPECT_OK(tn_pool_destroy(pools[i]));
    }
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_of_4_gib_and_more_are_whole),
        cmocka_unit_test(sizes_that_would_wrap_are_refused_at_every_alignment),
        cmocka_unit_test(failed_requests_leave_nothing_behind),
        cmocka_unit_test(a_shortage_is_told_from_other_failures),
        cmocka_unit_test(a_second_free_is_an_error_and_gives_nothing_away),
        cmocka_unit_test(a_block_goes_back_where_it_came_from),
    };
    return cmocka_run_group_tests_name("sim/cases_lifetime", tests, NULL, NULL);
}
