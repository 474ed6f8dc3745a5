/* The simulated driver's virtual clock: costs are those that were measured, to the nanosecond. */
#include "simcuda_support.h"

static const simcuda_calls *cu;

/* What the call took, in whole nanoseconds. */
static double start_us;
static void begin_timing(void) { start_us = cu->tnsim_now_us(); }
static void expect_ns(long expected) {
    double taken = (cu->tnsim_now_us() - start_us) * 1e3;
    assert_int_equal((long)(taken + 0.5), expected);
}

typedef struct vmm_costs {
    size_t bytes;
    long create, reserve, map, set_access, unmap, release;
} vmm_costs;

static void check_vmm_costs(const vmm_costs *costs) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    begin_timing();
    handle = simcuda_create(costs->bytes);
    expect_ns(costs->create);
    begin_timing();
    address = simcuda_reserve(costs->bytes);
    expect_ns(costs->reserve);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemMap(address, costs->bytes, 0, handle, 0));
    expect_ns(costs->map);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemSetAccess(address, costs->bytes, &access, 1));
    expect_ns(costs->set_access);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, costs->bytes));
    expect_ns(costs->unmap);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    expect_ns(costs->release);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemAddressFree(address, costs->bytes));
    expect_ns(0);
}

static void vmm_calls_cost_what_was_measured(void **state) {
    static const vmm_costs rows[] = {
        {2 * MIB, 13300, 800, 1100, 28000, 18200, 13200},
        {32 * MIB, 14900, 4300, 1300, 61000, 28600, 39900},
        {512 * MIB, 29600, 5700, 2200, 90900, 38800, 279400},
        /* Halfway between two sizes in logarithms: the geometric mean of their costs. */
        {8 * MIB, 14077, 1855, 1196, 41328, 22815, 22950},
        {128 * MIB, 21001, 4951, 1691, 74464, 33312, 105584},
        /* Beyond the last: on along the last line. */
        {2048 * MIB, 41720, 6563, 2862, 110964, 45192, 739355},
    };
    (void)state;
    cu = simcuda_start(0, 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        check_vmm_costs(&rows[i]);
    simcuda_end();
}

static void a_call_over_many_handles_costs_each_of_them(void **state) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handles[64];
    CUdeviceptr address;
    (void)state;
    cu = simcuda_start(0, 0);
    address = simcuda_reserve(128 * MIB);
    for (size_t i = 0; i < 64; i++) {
        handles[i] = simcuda_create(2 * MIB);
        EXPECT_CUDA_OK(cu->cuMemMap(address + i * 2 * MIB, 2 * MIB, 0, handles[i], 0));
    }
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemSetAccess(address, 128 * MIB, &access, 1));
    expect_ns(64 * 28000);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, 128 * MIB));
    expect_ns(64 * 18200);
    for (size_t i = 0; i < 64; i++)
        EXPECT_CUDA_OK(cu->cuMemRelease(handles[i]));
    EXPECT_CUDA_OK(cu->cuMemAddressFree(address, 128 * MIB));
    simcuda_end();
}

static void plain_memory_costs_what_was_measured(void **state) {
    static const struct {
        size_t bytes;
        long alloc, release;
    } rows[] = {{4096, 49000, 39100}, {64 * MIB, 83500, 84000}, {1024 * MIB, 155800, 595000}};
    (void)state;
    cu = simcuda_start(0, 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CUdeviceptr address;
        begin_timing();
        EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&address, rows[i].bytes));
        expect_ns(rows[i].alloc);
        begin_timing();
        EXPECT_CUDA_OK(cu->cuMemFree_v2(address));
        expect_ns(rows[i].release);
    }
    simcuda_end();
}

static void events_cost_what_was_measured(void **state) {
    CUstream stream;
    CUevent event;
    (void)state;
    cu = simcuda_start(0, 0);
    stream = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    begin_timing();
    EXPECT_CUDA_OK(cu->cuEventRecord(event, stream));
    expect_ns(370);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuEventQuery(event));
    expect_ns(290);
    begin_timing();
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(stream, event, 0));
    expect_ns(360);
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(event));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    simcuda_end();
}

static void memory_calls_are_added_up_apart(void **state) {
    simcuda_block block;
    CUstream stream;
    (void)state;
    cu = simcuda_start(0, 0);
    stream = simcuda_stream();
    block = simcuda_block_create(2 * MIB, 1);
    EXPECT_CUDA_OK(simcuda_write(stream, block.address, block.bytes));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(stream));
    simcuda_block_destroy(&block);
    /* reserve + create + map + set access + unmap + release */
    assert_true(cu->tnsim_memory_call_us() == 74.6);
    /* and a launch of 3.8 us with a kernel of 10 us behind it */
    assert_true(cu->tnsim_now_us() == 88.4);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    simcuda_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vmm_calls_cost_what_was_measured),
        cmocka_unit_test(a_call_over_many_handles_costs_each_of_them),
        cmocka_unit_test(plain_memory_costs_what_was_measured),
        cmocka_unit_test(events_cost_what_was_measured),
        cmocka_unit_test(memory_calls_are_added_up_apart),
    };
    return cmocka_run_group_tests_name("simcuda_costs", tests, NULL, NULL);
}
