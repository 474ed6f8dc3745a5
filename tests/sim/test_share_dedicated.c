/* Blocks with one physical handle of their own: registration sees one handle (Mooncake#2511,
 * torchcomms#3078, ucx#11461, nccl#2332); they are reused by exact size, given back when memory is
 * short, and the books balance all the while. */
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { NTH_MAX = 200, CUDA_UNKNOWN = 999, CUDA_OUT_OF_MEMORY = 2 };

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
} fixture;

static void open_with(fixture *f, size_t memory_bytes, size_t limit_bytes) {
    f->device = test_open_sim(memory_bytes, 0);
    f->pool = test_open_pool(f->device, TN_BACKING_VMM, limit_bytes);
    f->a = test_open_stream(f->device);
    f->b = test_open_stream(f->device);
}

static void close_all(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    test_close_sim(f->device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static tn_status alloc_single(fixture *f, size_t bytes, tn_stream stream, unsigned flags,
                              void **out) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    options.flags = flags;
    return tn_alloc(f->pool, bytes, stream, &options, out);
}

static void *take_single(fixture *f, size_t bytes, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(alloc_single(f, bytes, stream, TN_ALLOC_SINGLE_HANDLE, &block));
    (void)test_pool_stats(f->pool);
    return block;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_block_is_one_handle_and_one_mapping(void **state) {
    const test_sim *sim = test_sim_get();
    fixture f;
    uint64_t creates, maps;
    void *block;
    tn_pool_stats stats;
    (void)state;
    open_with(&f, 0, 0);
    creates = sim->call_count("cuMemCreate");
    maps = sim->call_count("cuMemMap");
    block = take_single(&f, 61 * MIB + 5, f.a);
    assert_int_equal(sim->call_count("cuMemCreate") - creates, 1);
    assert_int_equal(sim->call_count("cuMemMap") - maps, 1);
    stats = test_pool_stats(f.pool);
    assert_int_equal(stats.live_bytes, 61 * MIB + 5);
    assert_int_equal(stats.reserved_bytes, 62 * MIB);
    assert_int_equal(stats.partial_bytes, MIB - 5);
    assert_int_equal(sim->physical_bytes(0), 62 * MIB);
    test_sim_write(f.device, f.a, block, 61 * MIB + 5, 1);
    test_give(f.pool, block, f.a);
    assert_int_equal(test_pool_stats(f.pool).cached_bytes, 62 * MIB);
    close_all(&f);
}

static void a_freed_one_serves_just_its_size(void **state) {
    fixture f;
    void *block, *other, *again, *plain;
    (void)state;
    open_with(&f, 0, 0);
    block = take_single(&f, 8 * MIB, f.a);
    test_give(f.pool, block, f.a);
    other = take_single(&f, 6 * MIB, f.a);
    assert_ptr_not_equal(other, block);
    plain = test_take(f.pool, 8 * MIB, f.a);
    assert_ptr_not_equal(plain, block);
    again = take_single(&f, 7 * MIB + 1, f.a); /* 8 MiB in granules */
    assert_ptr_equal(again, block);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 22 * MIB);
    test_give(f.pool, again, f.a);
    test_give(f.pool, other, f.a);
    test_give(f.pool, plain, f.a);
    close_all(&f);
}

static void reuse_is_in_stream_order(void **state) {
    fixture f;
    void *block, *again, *fresh;
    (void)state;
    open_with(&f, 24 * MIB, 0);
    block = take_single(&f, 16 * MIB, f.a);
    test_sim_write(f.device, f.b, block, 16 * MIB, 1e4);
    EXPECT_OK(tn_record_use(block, f.b));
    test_give(f.pool, block, f.a);
    again = take_single(&f, 16 * MIB, f.a);
    assert_ptr_equal(again, block);
    test_sim_write(f.device, f.a, again, 16 * MIB, 1e4);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_give(f.pool, again, f.a);
    /* An ordinary block gets its memory: not before the work has ended. */
    fresh = test_take(f.pool, 20 * MIB, f.b);
    test_sim_write(f.device, f.b, fresh, 20 * MIB, 1);
    test_give(f.pool, fresh, f.b);
    close_all(&f);
}

static void idle_ones_go_back_when_memory_is_short(void **state) {
    fixture f;
    void *blocks[3], *large;
    (void)state;
    open_with(&f, 32 * MIB, 0);
    for (int i = 0; i < 3; i++)
        blocks[i] = take_single(&f, 8 * MIB, f.a);
    for (int i = 0; i < 3; i++)
        test_give(f.pool, blocks[i], f.a);
    large = test_take(f.pool, 14 * MIB, f.a); /* only as many as needed */
    assert_true(test_pool_stats(f.pool).cached_bytes >= 8 * MIB);
    test_give(f.pool, large, f.a);
    large = take_single(&f, 32 * MIB, f.a); /* and pages give way to a handle */
    test_give(f.pool, large, f.a);
    close_all(&f);
}

static void limits_and_trimming_hold(void **state) {
    fixture f;
    void *block, *none = NULL;
    size_t released = 0;
    (void)state;
    open_with(&f, 0, 16 * MIB);
    block = take_single(&f, 10 * MIB, f.a);
    EXPECT_STATUS(alloc_single(&f, 8 * MIB, f.a, TN_ALLOC_SINGLE_HANDLE, &none),
                  TN_OUT_OF_DEVICE_MEMORY);
    assert_null(none);
    test_give(f.pool, block, f.a);
    EXPECT_OK(tn_stream_synchronize(f.device, f.a));
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, 10 * MIB);
    assert_int_equal(test_sim_get()->physical_bytes(0), 0);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 0);
    close_all(&f);
}

static void what_can_not_be_is_refused(void **state) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    fixture f;
    tn_pool *plain;
    void *none = NULL;
    (void)state;
    open_with(&f, 0, 0);
    plain = test_open_pool(f.device, TN_BACKING_PLAIN, 0);
    EXPECT_STATUS(alloc_single(&f, MIB, f.a, 4, &none), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(alloc_single(&f, SIZE_MAX, f.a, 1, &none), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_STATUS(alloc_single(&f, SIZE_MAX - 511, f.a, 2, &none), TN_OUT_OF_DEVICE_MEMORY);
    options.flags = TN_ALLOC_SINGLE_HANDLE;
    EXPECT_STATUS(tn_alloc(plain, MIB, f.a, &options, &none), TN_UNSUPPORTED);
    EXPECT_OK(alloc_single(&f, 0, f.a, 1, &none));
    assert_null(none);
    EXPECT_OK(tn_pool_destroy(plain));
    close_all(&f);
}

/* A request that would start from an idle block elsewhere, or make one, at each fault. */
static int run_with_fault(unsigned flags, long nth, int and_after, int code, int is_host_fault) {
    tn_pool_stats before, after;
    void *made = NULL, *idle;
    tn_status status;
    fixture f;
    open_with(&f, 32 * MIB, 0);
    idle = take_single(&f, 24 * MIB, f.b);
    test_give(f.pool, idle, f.b);
    before = test_pool_stats(f.pool);
    if (is_host_fault) tn__host_alloc_fault(nth, and_after);
    if (!is_host_fault) test_sim_get()->fault(NULL, nth, and_after, code);
    status = alloc_single(&f, 16 * MIB, f.a, flags, &made);
    tn__host_alloc_fault(0, 0);
    test_sim_get()->fault(NULL, 0, 0, 0);
    after = test_pool_stats(f.pool);
    if (status != TN_OK) {
        assert_null(made);
        assert_int_equal(after.live_bytes, before.live_bytes);
        assert_int_equal(after.allocs, before.allocs);
        EXPECT_OK(alloc_single(&f, 16 * MIB, f.a, flags, &made));
    }
    test_give(f.pool, made, f.a);
    close_all(&f);
    return status != TN_OK;
}

static void any_fault_leaves_the_books_balanced(void **state) {
    const int codes[] = {CUDA_UNKNOWN, CUDA_OUT_OF_MEMORY};
    (void)state;
    for (unsigned flags = 1; flags <= 2; flags++) {
        for (int and_after = 0; and_after < 2; and_after++) {
            int failed = 0;
            for (long nth = 1; nth <= 40; nth++) {
                for (int i = 0; i < 2; i++)
                    failed += run_with_fault(flags, nth, and_after, codes[i], 0);
            }
            assert_true(failed >= 8);
            for (long nth = 1; nth <= 12; nth++)
                failed += run_with_fault(flags, nth, and_after, 0, 1);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_is_one_handle_and_one_mapping),
        cmocka_unit_test(a_freed_one_serves_just_its_size),
        cmocka_unit_test(reuse_is_in_stream_order),
        cmocka_unit_test(idle_ones_go_back_when_memory_is_short),
        cmocka_unit_test(limits_and_trimming_hold),
        cmocka_unit_test(what_can_not_be_is_refused),
        cmocka_unit_test(any_fault_leaves_the_books_balanced),
    };
    return cmocka_run_group_tests_name("sim/share_dedicated", tests, NULL, NULL);
}
