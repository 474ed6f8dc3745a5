/* Stamps of the simulated driver: they tell whether a range was written, and nothing else. */
#include "simcuda_support.h"

#define BYTES (2 * MIB)

static const simcuda_calls *cu;
static CUstream first, second;
static simcuda_block block;

static int set_up(void **state) {
    (void)state;
    cu = simcuda_start(0, 0);
    first = simcuda_stream();
    second = simcuda_stream();
    block = simcuda_block_create(BYTES, 2);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    simcuda_block_destroy(&block);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(second));
    simcuda_end();
    return 0;
}

static uint64_t stamp_of(size_t offset, size_t bytes) {
    uint64_t stamp = 0;
    EXPECT_CUDA_OK(
        cu->tnsim_write_stamp((void *)(uintptr_t)(block.address + offset), bytes, &stamp));
    return stamp;
}

static void reads_leave_it_as_it_is(void **state) {
    (void)state;
    EXPECT_CUDA_OK(simcuda_write(first, block.address + 100, BYTES));
    uint64_t stamp = stamp_of(0, 2 * BYTES);
    EXPECT_CUDA_OK(simcuda_read(first, block.address + 1000, BYTES));
    EXPECT_CUDA_OK(simcuda_read(first, block.address + BYTES - 1, 2));
    assert_true(stamp_of(0, 2 * BYTES) == stamp);
    assert_int_equal(cu->tnsim_race_count(), 0);
}

static void one_written_byte_changes_it(void **state) {
    (void)state;
    uint64_t before = stamp_of(100, BYTES), around = stamp_of(0, 100);
    EXPECT_CUDA_OK(simcuda_write(first, block.address + 100 + BYTES - 1, 1));
    uint64_t after = stamp_of(100, BYTES);
    assert_true(after != before);
    EXPECT_CUDA_OK(simcuda_write(first, block.address + 100 + BYTES - 1, 1));
    assert_true(stamp_of(100, BYTES) != after); /* by other work, if of the same stream */
    assert_true(stamp_of(0, 100) == around);
}

static void the_same_work_at_another_place_is_another_stamp(void **state) {
    (void)state;
    EXPECT_CUDA_OK(simcuda_write(first, block.address + 512, 512));
    assert_true(stamp_of(0, 1024) != stamp_of(256, 1024));
    assert_true(stamp_of(512, 512) == stamp_of(600, 400)); /* all of it by one */
}

static void copies_and_fills_are_writes(void **state) {
    static char host[64];
    (void)state;
    uint64_t stamp = stamp_of(0, BYTES);
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 0, 64, first));
    assert_true(stamp_of(0, BYTES) != stamp);
    stamp = stamp_of(0, BYTES);
    EXPECT_CUDA_OK(cu->cuMemcpyAsync(block.address, (uintptr_t)host, sizeof host, first));
    assert_true(stamp_of(0, BYTES) != stamp);
    stamp = stamp_of(0, BYTES);
    EXPECT_CUDA_OK(cu->cuMemcpyAsync((uintptr_t)host, block.address, sizeof host, first));
    assert_true(stamp_of(0, BYTES) == stamp);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
}

static void memory_that_is_not_there_has_none(void **state) {
    uint64_t stamp = 7;
    (void)state;
    EXPECT_CUDA(cu->tnsim_write_stamp((void *)16, 16, &stamp), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(
        cu->tnsim_write_stamp((void *)(uintptr_t)(block.address + BYTES), BYTES + 1, &stamp),
        CUDA_ERROR_INVALID_VALUE);
    assert_true(stamp == 7);
}

#define STAMP_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        STAMP_TEST(reads_leave_it_as_it_is),
        STAMP_TEST(one_written_byte_changes_it),
        STAMP_TEST(the_same_work_at_another_place_is_another_stamp),
        STAMP_TEST(copies_and_fills_are_writes),
        STAMP_TEST(memory_that_is_not_there_has_none),
    };
    return cmocka_run_group_tests_name("simcuda_stamps", tests, NULL, NULL);
}
