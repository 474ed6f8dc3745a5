/* The simulated driver's memory: accounts, limits, mapping rules, access, backed contents. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simcuda_support.h"

static const simcuda_calls *cu;

static const CUmemAllocationProp on_device = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                              .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAccessDesc read_write = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                           CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static const CUmemAccessDesc read_only = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                          CU_MEM_ACCESS_FLAGS_PROT_READ};

/* ---- accounts and limits --------------------------------------------------------------------- */

static void physical_memory_is_counted_and_limited(void **state) {
    CUmemGenericAllocationHandle first, second;
    size_t free_bytes, total_bytes;
    (void)state;
    cu = simcuda_start(8 * MIB, 0);
    first = simcuda_create(4 * MIB);
    second = simcuda_create(2 * MIB);
    assert_int_equal(cu->tnsim_physical_bytes(0), 6 * MIB);
    EXPECT_CUDA(cu->cuMemCreate(&second, 4 * MIB, &on_device, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_CUDA_OK(cu->cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 2 * MIB);
    assert_int_equal(total_bytes, 8 * MIB);
    EXPECT_CUDA_OK(cu->cuMemRelease(first));
    EXPECT_CUDA_OK(cu->cuMemRelease(second));
    assert_int_equal(cu->tnsim_physical_bytes(0), 0);
    assert_int_equal(cu->tnsim_physical_peak_bytes(0), 6 * MIB);
    simcuda_end();
}

static void a_failed_create_takes_no_time(void **state) {
    CUmemGenericAllocationHandle handle = 7;
    double before;
    (void)state;
    cu = simcuda_start(8 * MIB, 0);
    before = cu->tnsim_now_us();
    EXPECT_CUDA(cu->cuMemCreate(&handle, 16 * MIB, &on_device, 0), CUDA_ERROR_OUT_OF_MEMORY);
    assert_true(cu->tnsim_now_us() == before);
    assert_int_equal(handle, 7);
    simcuda_end();
}

static void a_device_can_shrink_and_grow(void **state) {
    CUmemGenericAllocationHandle first, second;
    size_t free_bytes, total_bytes;
    (void)state;
    cu = simcuda_start(8 * MIB, 0);
    first = simcuda_create(6 * MIB);
    EXPECT_CUDA_OK(cu->tnsim_set_memory(0, 4 * MIB));
    EXPECT_CUDA_OK(cu->cuMemGetInfo_v2(&free_bytes, &total_bytes));
    assert_int_equal(free_bytes, 0);
    assert_int_equal(total_bytes, 4 * MIB);
    EXPECT_CUDA(cu->cuMemCreate(&second, 2 * MIB, &on_device, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_CUDA_OK(cu->tnsim_set_memory(0, 16 * MIB));
    second = simcuda_create(10 * MIB);
    EXPECT_CUDA_OK(cu->cuMemRelease(first));
    EXPECT_CUDA_OK(cu->cuMemRelease(second));
    EXPECT_CUDA(cu->tnsim_set_memory(1, MIB), CUDA_ERROR_INVALID_DEVICE);
    simcuda_end();
}

static void address_space_is_limited(void **state) {
    tnsim_config config = {.size = sizeof config, .address_space_bytes = 8 * MIB};
    CUcontext context;
    CUdeviceptr first, second;
    (void)state;
    cu = simcuda_load();
    EXPECT_CUDA_OK(cu->tnsim_configure(&config));
    EXPECT_CUDA_OK(cu->cuInit(0));
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(context));
    first = simcuda_reserve(6 * MIB);
    EXPECT_CUDA(cu->cuMemAddressReserve(&second, 4 * MIB, 0, 0, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_CUDA(cu->cuMemAlloc_v2(&second, 4 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(cu->tnsim_physical_bytes(0), 0);
    second = simcuda_reserve(2 * MIB);
    EXPECT_CUDA_OK(cu->cuMemAddressFree(first, 6 * MIB));
    EXPECT_CUDA_OK(cu->cuMemAddressFree(second, 2 * MIB));
    simcuda_end();
}

static void reservations_are_aligned_and_apart(void **state) {
    CUdeviceptr first, second;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->cuMemAddressReserve(&first, 2 * MIB, 64 * MIB, 0, 0));
    assert_int_equal(first % (64 * MIB), 0);
    second = simcuda_reserve(2 * MIB);
    assert_int_equal(second % (2 * MIB), 0);
    assert_true(first > second ? first - second > 4 * MIB : second - first > 4 * MIB);
    EXPECT_CUDA(cu->cuMemAddressReserve(&first, 2 * MIB, 3 * MIB, 0, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemAddressReserve(&first, MIB, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemAddressFree(first, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuMemAddressFree(first, 2 * MIB));
    EXPECT_CUDA_OK(cu->cuMemAddressFree(second, 2 * MIB));
    simcuda_end();
}

/* ---- mapping --------------------------------------------------------------------------------- */

static void a_handle_is_mapped_whole_and_over_nothing(void **state) {
    simcuda_block block;
    CUmemGenericAllocationHandle handle;
    (void)state;
    cu = simcuda_start(0, 0);
    block = simcuda_block_create(4 * MIB, 1);
    handle = simcuda_create(4 * MIB);
    EXPECT_CUDA(cu->cuMemMap(block.address, 4 * MIB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuMemUnmap(block.address, 4 * MIB));
    EXPECT_CUDA(cu->cuMemMap(block.address, 2 * MIB, 0, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_CUDA(cu->cuMemMap(block.address, 2 * MIB, 2 * MIB, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(),
                        "cuMemMap: a handle is mapped whole: 2097152 bytes at 2097152 of 4194304");
    EXPECT_CUDA(cu->cuMemMap(block.address + 2 * MIB, 4 * MIB, 0, handle, 0),
                CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemMap(block.address, 4 * MIB, 0, handle + 99, 0), CUDA_ERROR_INVALID_VALUE);
    simcuda_map(block.address, 4 * MIB, handle);
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    simcuda_block_destroy(&block);
    simcuda_end();
}

static void ranges_are_whole_mappings_without_holes(void **state) {
    simcuda_block block;
    (void)state;
    cu = simcuda_start(0, 0);
    block = simcuda_block_create(4 * MIB, 3);
    EXPECT_CUDA(cu->cuMemUnmap(block.address, 2 * MIB), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemUnmap(block.address + 2 * MIB, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemSetAccess(block.address, 6 * MIB, &read_write, 1),
                CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemAddressFree(block.address, 12 * MIB), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuMemUnmap(block.address + 4 * MIB, 4 * MIB));
    EXPECT_CUDA(cu->cuMemUnmap(block.address, 12 * MIB), CUDA_ERROR_INVALID_VALUE);
    simcuda_map(block.address + 4 * MIB, 4 * MIB, block.handles[1]);
    simcuda_block_destroy(&block);
    simcuda_end();
}

static void a_released_handle_lives_while_it_is_mapped(void **state) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    (void)state;
    cu = simcuda_start(0, 0);
    handle = simcuda_create(2 * MIB);
    address = simcuda_reserve(4 * MIB);
    simcuda_map(address, 2 * MIB, handle);
    EXPECT_CUDA_OK(cu->cuMemMap(address + 2 * MIB, 2 * MIB, 0, handle, 0));
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    EXPECT_CUDA(cu->cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(cu->tnsim_physical_bytes(0), 2 * MIB);
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, 2 * MIB));
    assert_int_equal(cu->tnsim_physical_bytes(0), 2 * MIB);
    EXPECT_CUDA_OK(cu->cuMemUnmap(address + 2 * MIB, 2 * MIB));
    assert_int_equal(cu->tnsim_physical_bytes(0), 0);
    EXPECT_CUDA_OK(cu->cuMemAddressFree(address, 4 * MIB));
    simcuda_end();
}

static void unsupported_memory_is_refused_in_words(void **state) {
    CUmemAllocationProp properties = on_device;
    CUmemGenericAllocationHandle handle;
    size_t granularity = 0;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->cuMemGetAllocationGranularity(&granularity, &properties,
                                                     CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    assert_int_equal(granularity, 2 * MIB);
    properties.requestedHandleTypes = 2;
    EXPECT_CUDA(cu->cuMemCreate(&handle, 2 * MIB, &properties, 0), CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(),
                        "handles are exported as file descriptors only, not as type 2");
    properties = on_device;
    properties.location.type = 2;
    EXPECT_CUDA(cu->cuMemCreate(&handle, 2 * MIB, &properties, 0), CUDA_ERROR_NOT_SUPPORTED);
    properties = on_device;
    properties.location.id = 1;
    EXPECT_CUDA(cu->cuMemCreate(&handle, 2 * MIB, &properties, 0), CUDA_ERROR_INVALID_DEVICE);
    assert_string_equal(cu->tnsim_refusal(), "");
    EXPECT_CUDA(cu->cuMemCreate(&handle, 3 * MIB, &on_device, 0), CUDA_ERROR_INVALID_VALUE);
    simcuda_end();
}

/* ---- access ---------------------------------------------------------------------------------- */

static void expect_dead_after(int (*touch)(CUstream, CUdeviceptr, size_t), size_t from,
                              size_t bytes, const CUmemAccessDesc *access) {
    CUdeviceptr address;
    CUmemGenericAllocationHandle handle;
    size_t free_bytes, total_bytes;
    cu = simcuda_start(0, 0);
    address = simcuda_reserve(4 * MIB);
    handle = simcuda_create(2 * MIB);
    EXPECT_CUDA_OK(cu->cuMemMap(address, 2 * MIB, 0, handle, 0));
    if (access) EXPECT_CUDA_OK(cu->cuMemSetAccess(address, 2 * MIB, access, 1));
    EXPECT_CUDA(touch(NULL, address + from, bytes), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_CUDA(cu->cuMemUnmap(address, 2 * MIB), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_CUDA(cu->cuMemGetInfo_v2(&free_bytes, &total_bytes), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static int copy_from(CUstream stream, CUdeviceptr address, size_t bytes) {
    static char host[64];
    return (int)cu->cuMemcpyAsync((uintptr_t)host, address, bytes, stream);
}

static void an_illegal_touch_kills_the_context(void **state) {
    (void)state;
    expect_dead_after(simcuda_read, 0, 64, NULL);                 /* access was never set */
    expect_dead_after(simcuda_write, 0, 64, &read_only);          /* not for writing */
    expect_dead_after(simcuda_read, 2 * MIB - 1, 2, &read_write); /* runs over the end */
    expect_dead_after(simcuda_read, 4 * MIB, 1, &read_write);     /* the guard */
    expect_dead_after(copy_from, 2 * MIB, 64, &read_write);
    cu = simcuda_start(0, 0); /* a new start heals */
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
}

static void legal_touches_are_fine(void **state) {
    simcuda_block block;
    (void)state;
    cu = simcuda_start(0, 0);
    block = simcuda_block_create(2 * MIB, 2);
    EXPECT_CUDA_OK(simcuda_read(NULL, block.address, 4 * MIB));
    EXPECT_CUDA_OK(simcuda_write(NULL, block.address + 2 * MIB - 1, 2));
    EXPECT_CUDA_OK(simcuda_write(NULL, block.address, 0));
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    simcuda_block_destroy(&block);
    simcuda_end();
}

/* ---- backed memory --------------------------------------------------------------------------- */

static void backed_memory_begins_with_poison_and_keeps_data(void **state) {
    unsigned char out[4096], in[4096];
    simcuda_block block;
    CUstream stream;
    (void)state;
    cu = simcuda_start(16 * MIB, 1);
    stream = simcuda_stream();
    block = simcuda_block_create(2 * MIB, 2);
    EXPECT_CUDA_OK(cu->cuMemcpyAsync((uintptr_t)in, block.address + 2 * MIB - 2048, 4096, stream));
    for (size_t i = 0; i < sizeof in; i++)
        assert_int_equal(in[i], 0xA5);
    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (unsigned char)(i * 7);
    EXPECT_CUDA_OK(cu->cuMemcpyAsync(block.address + 2 * MIB - 2048, (uintptr_t)out, 4096, stream));
    EXPECT_CUDA_OK(cu->cuMemcpyAsync(block.address, block.address + 2 * MIB - 2048, 4096, stream));
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address + 1, 9, 2, stream));
    EXPECT_CUDA_OK(cu->cuMemcpyAsync((uintptr_t)in, block.address, 4096, stream));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(stream));
    out[1] = out[2] = 9;
    assert_memory_equal(in, out, sizeof in);
    assert_memory_equal((void *)(uintptr_t)block.address, out, sizeof out);
    simcuda_block_destroy(&block);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    simcuda_end();
}

static void rows_move_between_matrices_of_other_widths(void **state) {
    unsigned char wide[3 * 8], expected[3 * 8], narrow[3 * 4];
    CUDA_MEMCPY2D rows = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcPitch = 4};
    simcuda_block block;
    CUstream stream;
    (void)state;
    cu = simcuda_start(16 * MIB, 1);
    stream = simcuda_stream();
    block = simcuda_block_create(2 * MIB, 2);
    for (size_t i = 0; i < sizeof expected; i++)
        expected[i] = 7;
    for (size_t i = 0; i < sizeof narrow; i++)
        narrow[i] = expected[i / 4 * 8 + 2 + i % 4] = (unsigned char)(100 + i);
    rows.srcDevice = (uintptr_t)narrow;
    rows.dstMemoryType = CU_MEMORYTYPE_UNIFIED, rows.dstDevice = block.address + 2;
    rows.dstPitch = 8, rows.WidthInBytes = 4, rows.Height = 3;
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 7, sizeof wide, stream));
    EXPECT_CUDA_OK(cu->cuMemcpy2DAsync_v2(&rows, stream));
    EXPECT_CUDA_OK(cu->cuMemcpyAsync((uintptr_t)wide, block.address, sizeof wide, stream));
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(stream));
    assert_memory_equal(wide, expected, sizeof wide);
    rows.dstPitch = 3;
    EXPECT_CUDA(cu->cuMemcpy2DAsync_v2(&rows, stream), CUDA_ERROR_INVALID_VALUE);
    rows.dstPitch = 8, rows.srcY = 1;
    EXPECT_CUDA(cu->cuMemcpy2DAsync_v2(&rows, stream), CUDA_ERROR_NOT_SUPPORTED);
    simcuda_block_destroy(&block);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(stream));
    simcuda_end();
}

static void a_handle_keeps_its_bytes_when_it_moves(void **state) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    volatile unsigned char *first, *second;
    (void)state;
    cu = simcuda_start(16 * MIB, 1);
    address = simcuda_reserve(4 * MIB);
    handle = simcuda_create(2 * MIB);
    first = (unsigned char *)(uintptr_t)address;
    second = first + 2 * MIB;
    simcuda_map(address, 2 * MIB, handle);
    first[5] = 1;
    simcuda_map(address + 2 * MIB, 2 * MIB, handle);
    assert_int_equal(second[5], 1);
    second[6] = 2;
    assert_int_equal(first[6], 2);
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, 2 * MIB));
    assert_int_equal(second[5], 1);
    EXPECT_CUDA_OK(cu->cuMemUnmap(address + 2 * MIB, 2 * MIB));
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    handle = simcuda_create(2 * MIB);
    simcuda_map(address, 2 * MIB, handle);
    assert_int_equal(first[5], 0xA5); /* other memory, though the token may be the same */
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, 2 * MIB));
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    EXPECT_CUDA_OK(cu->cuMemAddressFree(address, 4 * MIB));
    simcuda_end();
}

/* Touches the byte in a child; 1 if that ended it. */
static int touch_traps(CUdeviceptr address) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile unsigned char *)(uintptr_t)address = 1;
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

static void touching_outside_traps(void **state) {
    simcuda_block block;
    CUdeviceptr plain;
    (void)state;
    cu = simcuda_start(16 * MIB, 1);
    block = simcuda_block_create(2 * MIB, 1);
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&plain, 100));
    assert_false(touch_traps(block.address));
    assert_false(touch_traps(block.address + 2 * MIB - 1));
    assert_true(touch_traps(block.address - 1));
    assert_true(touch_traps(block.address + 2 * MIB));
    assert_false(touch_traps(plain + 511));
    assert_true(touch_traps(plain + 512));
    EXPECT_CUDA_OK(cu->cuMemUnmap(block.address, 2 * MIB));
    assert_true(touch_traps(block.address));
    EXPECT_CUDA_OK(cu->cuMemMap(block.address, 2 * MIB, 0, block.handles[0], 0));
    assert_true(touch_traps(block.address)); /* no access yet */
    EXPECT_CUDA_OK(cu->cuMemSetAccess(block.address, 2 * MIB, &read_only, 1));
    assert_true(touch_traps(block.address)); /* a write */
    simcuda_block_destroy(&block);
    EXPECT_CUDA_OK(cu->cuMemFree_v2(plain));
    simcuda_end();
}

static void unbacked_memory_traps_on_touch(void **state) {
    simcuda_block block;
    (void)state;
    cu = simcuda_start(0, 0);
    block = simcuda_block_create(2 * MIB, 1);
    assert_true(touch_traps(block.address));
    simcuda_block_destroy(&block);
    simcuda_end();
}

static void plain_memory_is_counted_in_512_bytes(void **state) {
    CUdeviceptr address;
    (void)state;
    cu = simcuda_start(4 * MIB, 0);
    EXPECT_CUDA_OK(cu->cuMemAlloc_v2(&address, 513));
    assert_int_equal(address % 512, 0);
    assert_int_equal(cu->tnsim_physical_bytes(0), 1024);
    EXPECT_CUDA(cu->cuMemFree_v2(address + 512), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuMemFree_v2(0));
    EXPECT_CUDA_OK(cu->cuMemFree_v2(address));
    EXPECT_CUDA(cu->cuMemFree_v2(address), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemAlloc_v2(&address, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->cuMemAlloc_v2(&address, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
    simcuda_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(physical_memory_is_counted_and_limited),
        cmocka_unit_test(a_failed_create_takes_no_time),
        cmocka_unit_test(a_device_can_shrink_and_grow),
        cmocka_unit_test(address_space_is_limited),
        cmocka_unit_test(reservations_are_aligned_and_apart),
        cmocka_unit_test(a_handle_is_mapped_whole_and_over_nothing),
        cmocka_unit_test(ranges_are_whole_mappings_without_holes),
        cmocka_unit_test(a_released_handle_lives_while_it_is_mapped),
        cmocka_unit_test(unsupported_memory_is_refused_in_words),
        cmocka_unit_test(an_illegal_touch_kills_the_context),
        cmocka_unit_test(legal_touches_are_fine),
        cmocka_unit_test(backed_memory_begins_with_poison_and_keeps_data),
        cmocka_unit_test(rows_move_between_matrices_of_other_widths),
        cmocka_unit_test(a_handle_keeps_its_bytes_when_it_moves),
        cmocka_unit_test(touching_outside_traps),
        cmocka_unit_test(unbacked_memory_traps_on_touch),
        cmocka_unit_test(plain_memory_is_counted_in_512_bytes),
    };
    return cmocka_run_group_tests_name("simcuda_memory", tests, NULL, NULL);
}
