/* The simulated driver's memory pools, and pinned memory: which freed memory serves which stream,
 * when memory goes back to the device, what it costs, and which touches are races. */
#include <string.h>

#include "simcuda_support.h"

static const simcuda_calls *cu;

static const CUmemPoolProps on_device = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                         .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static CUmemoryPool make_pool(uint64_t threshold) {
    CUmemoryPool pool = NULL;
    EXPECT_CUDA_OK(cu->cuMemPoolCreate(&pool, &on_device));
    EXPECT_CUDA_OK(cu->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    return pool;
}

static CUdeviceptr take(CUmemoryPool pool, size_t bytes, CUstream stream) {
    CUdeviceptr address = 0;
    EXPECT_CUDA_OK(cu->cuMemAllocFromPoolAsync(&address, bytes, pool, stream));
    return address;
}

static uint64_t attribute(CUmemoryPool pool, int which) {
    uint64_t value = 0;
    EXPECT_CUDA_OK(cu->cuMemPoolGetAttribute(pool, which, &value));
    return value;
}

static void end_pool(CUmemoryPool pool) {
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuMemPoolDestroy(pool));
}

static void a_stream_reuses_what_it_freed_at_once(void **state) {
    CUmemoryPool pool;
    CUstream a;
    CUdeviceptr block;
    (void)state;
    cu = simcuda_start(0, 0);
    a = simcuda_stream();
    pool = make_pool(UINT64_MAX);
    block = take(pool, 8 * MIB, a);
    EXPECT_CUDA_OK(simcuda_write(a, block, 8 * MIB));
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(block, a));
    assert_int_equal(take(pool, 8 * MIB, a), block);
    EXPECT_CUDA_OK(simcuda_write(a, block, 8 * MIB));
    assert_int_equal(cu->tnsim_race_count(), 0);
    assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
    assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 8 * MIB);
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(block, a));
    end_pool(pool);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
    simcuda_end();
}

/* Freed work that still runs serves another stream only when there is no more memory; then the
 * driver makes that stream wait. */
static void another_stream_gets_new_memory_while_there_is_some(void **state) {
    CUmemoryPool pool;
    CUstream a, b;
    CUdeviceptr first, second, third;
    (void)state;
    cu = simcuda_start(64 * MIB, 0);
    a = simcuda_stream();
    b = simcuda_stream();
    pool = make_pool(UINT64_MAX);
    first = take(pool, 32 * MIB, a);
    EXPECT_CUDA_OK(simcuda_write(a, first, 32 * MIB));
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(first, a));
    second = take(pool, 32 * MIB, b);
    assert_int_not_equal(second, first);
    third = take(pool, 32 * MIB, b);
    assert_int_equal(third, first);
    EXPECT_CUDA_OK(simcuda_write(b, third, 32 * MIB));
    assert_int_equal(cu->tnsim_race_count(), 0);
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(second, b));
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(third, b));
    end_pool(pool);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(b));
    simcuda_end();
}

/* rmm#1245: two chunks are free, but the host does not know that the work on one is complete; so it
 * can not go back to make room for a larger one. After a synchronisation it can. */
static void another_shape_needs_a_synchronisation(void **state) {
    CUmemoryPool pool;
    CUstream a;
    CUdeviceptr blocks[2], large = 0;
    (void)state;
    cu = simcuda_start(64 * MIB, 0);
    a = simcuda_stream();
    pool = make_pool(UINT64_MAX);
    for (int i = 0; i < 2; i++)
        blocks[i] = take(pool, 32 * MIB, a);
    for (int i = 0; i < 2; i++)
        EXPECT_CUDA_OK(cu->cuMemFreeAsync(blocks[i], a));
    EXPECT_CUDA(cu->cuMemAllocFromPoolAsync(&large, 64 * MIB, pool, a), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(a));
    large = take(pool, 64 * MIB, a);
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(large, a));
    end_pool(pool);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
    simcuda_end();
}

/* rmm#2510: with the driver's default, every synchronisation unmaps what is free. */
static void the_threshold_decides_what_a_synchronisation_gives_back(void **state) {
    const uint64_t thresholds[] = {0, 32 * MIB, UINT64_MAX};
    const uint64_t left[] = {0, 32 * MIB, 96 * MIB};
    (void)state;
    for (int i = 0; i < 3; i++) {
        CUdeviceptr blocks[3];
        CUmemoryPool pool;
        CUstream a;
        cu = simcuda_start(0, 0);
        a = simcuda_stream();
        pool = make_pool(thresholds[i]);
        for (int k = 0; k < 3; k++)
            blocks[k] = take(pool, 32 * MIB, a);
        for (int k = 0; k < 3; k++)
            EXPECT_CUDA_OK(cu->cuMemFreeAsync(blocks[k], a));
        assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 96 * MIB);
        EXPECT_CUDA_OK(cu->cuStreamSynchronize(a));
        assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), left[i]);
        assert_int_equal(cu->tnsim_physical_bytes(0), left[i]);
        end_pool(pool);
        EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
        simcuda_end();
    }
}

static void a_trim_keeps_as_much_as_it_is_told(void **state) {
    CUdeviceptr blocks[3];
    CUmemoryPool pool;
    CUstream a;
    (void)state;
    cu = simcuda_start(0, 0);
    a = simcuda_stream();
    pool = make_pool(UINT64_MAX);
    for (int k = 0; k < 3; k++)
        blocks[k] = take(pool, 32 * MIB, a);
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(blocks[0], a));
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(blocks[1], a));
    EXPECT_CUDA_OK(cu->cuMemPoolTrimTo(pool, 0)); /* not known to be complete */
    assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 96 * MIB);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(a));
    EXPECT_CUDA_OK(cu->cuMemPoolTrimTo(pool, 40 * MIB));
    assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 64 * MIB);
    EXPECT_CUDA_OK(cu->cuMemPoolTrimTo(pool, 0));
    assert_int_equal(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
    EXPECT_CUDA(cu->cuMemPoolDestroy(pool), CUDA_ERROR_NOT_SUPPORTED); /* in use */
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(blocks[2], a));
    end_pool(pool);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
    simcuda_end();
}

static void a_warm_pair_costs_what_was_measured(void **state) {
    CUmemoryPool pool;
    CUstream a;
    double before;
    (void)state;
    cu = simcuda_start(0, 0);
    a = simcuda_stream();
    pool = make_pool(UINT64_MAX);
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(take(pool, 8 * MIB, a), a));
    before = cu->tnsim_now_us();
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(take(pool, 8 * MIB, a), a));
    assert_int_equal((int)((cu->tnsim_now_us() - before) * 1000 + 0.5), 1120);
    end_pool(pool);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
    simcuda_end();
}

static void unordered_and_late_touches_are_seen(void **state) {
    CUmemoryPool pool;
    CUstream a, b;
    CUdeviceptr block;
    (void)state;
    cu = simcuda_start(0, 0);
    a = simcuda_stream();
    b = simcuda_stream();
    pool = make_pool(UINT64_MAX);
    block = take(pool, MIB, a);
    EXPECT_CUDA_OK(simcuda_write(b, block, MIB)); /* does not come after the allocation */
    assert_int_equal(cu->tnsim_race_count(), 1);
    EXPECT_CUDA_OK(cu->cuMemFreeAsync(block, a)); /* does not come after b's use */
    assert_int_equal(cu->tnsim_race_count(), 2);
    EXPECT_CUDA(cu->cuMemFreeAsync(block, a), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(simcuda_write(a, block, MIB), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void pinned_memory_is_the_hosts_and_is_watched(void **state) {
    CUstream a, b;
    void *pinned = NULL;
    (void)state;
    cu = simcuda_start(0, 0);
    a = simcuda_stream();
    b = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuMemHostAlloc(&pinned, 3 * MIB, CU_MEMHOSTALLOC_PORTABLE));
    memset(pinned, 7, 3 * MIB);
    assert_int_equal(cu->tnsim_physical_bytes(0), 0);
    EXPECT_CUDA_OK(cu->cuMemsetD8Async((uintptr_t)pinned, 9, MIB, a));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(a));
    assert_int_equal(((unsigned char *)pinned)[0], 9);
    assert_int_equal(((unsigned char *)pinned)[MIB], 7);
    EXPECT_CUDA_OK(simcuda_write(a, (uintptr_t)pinned, MIB));
    EXPECT_CUDA_OK(simcuda_write(b, (uintptr_t)pinned, MIB));
    assert_int_equal(cu->tnsim_race_count(), 1);
    EXPECT_CUDA(cu->cuMemFree_v2((uintptr_t)pinned), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuMemFreeHost(pinned));
    EXPECT_CUDA(cu->cuMemFreeHost(pinned), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(a));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(b));
    simcuda_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_reuses_what_it_freed_at_once),
        cmocka_unit_test(another_stream_gets_new_memory_while_there_is_some),
        cmocka_unit_test(another_shape_needs_a_synchronisation),
        cmocka_unit_test(the_threshold_decides_what_a_synchronisation_gives_back),
        cmocka_unit_test(a_trim_keeps_as_much_as_it_is_told),
        cmocka_unit_test(a_warm_pair_costs_what_was_measured),
        cmocka_unit_test(unordered_and_late_touches_are_seen),
        cmocka_unit_test(pinned_memory_is_the_hosts_and_is_watched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
