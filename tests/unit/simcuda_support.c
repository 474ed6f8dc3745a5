/* The simulated driver, loaded, with the few steps that all its tests begin with. */
#include "simcuda_support.h"

#include <dlfcn.h>

static simcuda_calls calls;

const simcuda_calls *simcuda_load(void) {
    if (calls.library) return &calls;
    calls.library = dlopen(TENURE_SIM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!calls.library) fail_msg("%s", dlerror());
#define SIMCUDA_LOAD(name, ...)                                                                    \
    *(void **)&calls.name = dlsym(calls.library, #name);                                           \
    if (!calls.name) fail_msg("the library lacks %s", #name);
    SIM_CALL_TABLE(SIMCUDA_LOAD)
    SIMCUDA_CONTROLS(SIMCUDA_LOAD)
#undef SIMCUDA_LOAD
    return &calls;
}

const simcuda_calls *simcuda_start(size_t memory_bytes, int backed) {
    tnsim_config config = {.size = sizeof config, .memory_bytes = memory_bytes, .backed = backed};
    CUcontext context;
    simcuda_load();
    EXPECT_CUDA_OK(calls.tnsim_configure(&config));
    EXPECT_CUDA_OK(calls.cuInit(0));
    EXPECT_CUDA_OK(calls.cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CUDA_OK(calls.cuCtxSetCurrent(context));
    return &calls;
}

void simcuda_end(void) {
    char text[1024];
    if (calls.tnsim_leftovers(text, sizeof text)) fail_msg("left: %s", text);
}

CUmemGenericAllocationHandle simcuda_create(size_t bytes) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_CUDA_OK(calls.cuMemCreate(&handle, bytes, &properties, 0));
    return handle;
}

CUdeviceptr simcuda_reserve(size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_CUDA_OK(calls.cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
}

void simcuda_map(CUdeviceptr address, size_t bytes, CUmemGenericAllocationHandle handle) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    EXPECT_CUDA_OK(calls.cuMemMap(address, bytes, 0, handle, 0));
    EXPECT_CUDA_OK(calls.cuMemSetAccess(address, bytes, &access, 1));
}

simcuda_block simcuda_block_create(size_t bytes, size_t count) {
    simcuda_block block = {.bytes = bytes, .count = count};
    assert_true(count <= sizeof block.handles / sizeof block.handles[0]);
    block.address = simcuda_reserve(bytes * count);
    for (size_t i = 0; i < count; i++) {
        block.handles[i] = simcuda_create(bytes);
        simcuda_map(block.address + i * bytes, bytes, block.handles[i]);
    }
    return block;
}

void simcuda_block_destroy(const simcuda_block *block) {
    EXPECT_CUDA_OK(calls.cuMemUnmap(block->address, block->bytes * block->count));
    EXPECT_CUDA_OK(calls.cuMemAddressFree(block->address, block->bytes * block->count));
    for (size_t i = 0; i < block->count; i++)
        EXPECT_CUDA_OK(calls.cuMemRelease(block->handles[i]));
}

CUstream simcuda_stream(void) {
    CUstream stream = NULL;
    EXPECT_CUDA_OK(calls.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static int launch(CUstream stream, const char *kernel, CUdeviceptr address, size_t bytes,
                  int is_write) {
    tnsim_range range = {(const void *)(uintptr_t)address, bytes, is_write};
    return calls.tnsim_launch(stream, kernel, &range, 1, 10.0);
}

int simcuda_read(CUstream stream, CUdeviceptr address, size_t bytes) {
    return launch(stream, "reader", address, bytes, 0);
}

int simcuda_write(CUstream stream, CUdeviceptr address, size_t bytes) {
    return launch(stream, "writer", address, bytes, 1);
}
