/* Kernels on a real CUDA device: their modules, what they may use, launches. The simulated device,
 * which runs no code, refuses all of it. */
#include "driver_cuda.h"

#include <stdint.h>

/* ---- modules --------------------------------------------------------------------------------- */

static tn_status require_real(const tn__driver_device *device, const char *what) {
    if (!device->library->is_simulated) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: the simulated device runs no code; declare the kernel with "
                   "ghost_launch",
                   what);
}

tn_status tn__cuda_module_load(tn__driver_device *device, const void *image, void **out) {
    tn__cuda_call call;
    void *module = NULL;
    TN_TRY(require_real(device, "module_load"));
    TN__CUDA_NEED(device, module_load, "cuModuleLoadData");
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->module_load(&module, image);
    TN_TRY(tn__cuda_end(&call, code, "cuModuleLoadData()"));
    *out = module;
    return TN_OK;
}

tn_status tn__cuda_module_unload(tn__driver_device *device, void *module) {
    tn__cuda_call call;
    TN_TRY(require_real(device, "module_unload"));
    TN__CUDA_NEED(device, module_unload, "cuModuleUnload");
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->module_unload(module);
    return tn__cuda_end(&call, code, "cuModuleUnload(%p)", module);
}

tn_status tn__cuda_module_function(tn__driver_device *device, void *module, const char *name,
                                   tn__function *out) {
    tn__cuda_call call;
    void *function = NULL;
    TN_TRY(require_real(device, "module_function"));
    TN__CUDA_NEED(device, module_function, "cuModuleGetFunction");
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->module_function(&function, module, name);
    TN_TRY(tn__cuda_end(&call, code, "cuModuleGetFunction(%s)", name));
    *out = function;
    return TN_OK;
}

/* ---- what kernels may use -------------------------------------------------------------------- */

static tn_status attribute(tn__driver_device *device, int attribute, int *out) {
    tn__cuda_call call;
    int value = 0;
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->device_attribute(&value, attribute, device->device);
    TN_TRY(tn__cuda_end(&call, code, "cuDeviceGetAttribute(%d)", attribute));
    *out = value;
    return TN_OK;
}

tn_status tn__cuda_multiprocessors(tn__driver_device *device, int *out) {
    TN_TRY(require_real(device, "multiprocessors"));
    return attribute(device, TN__CU_ATTRIBUTE_MULTIPROCESSOR_COUNT, out);
}

/* What the GPU does not have is not asked of the driver, whose errors tools report. */
tn_status tn__cuda_shared_max_set(tn__driver_device *device, tn__function function,
                                  unsigned bytes) {
    tn__cuda_call call;
    int most = 0;
    TN_TRY(require_real(device, "shared_max_set"));
    TN__CUDA_NEED(device, function_attribute_set, "cuFuncSetAttribute");
    TN_TRY(attribute(device, TN__CU_ATTRIBUTE_SHARED_MAX, &most));
    if (bytes > (unsigned)most) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "a block of the kernel wants %u bytes of shared memory, this GPU has %d",
                       bytes, most);
    }
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->function_attribute_set(function, TN__CU_FUNCTION_SHARED_MAX, (int)bytes);
    return tn__cuda_end(&call, code, "cuFuncSetAttribute(%u bytes shared)", bytes);
}

tn_status tn__cuda_blocks_at_once(tn__driver_device *device, tn__function function,
                                  unsigned threads, unsigned shared_bytes, int64_t *out) {
    tn__cuda_call call;
    int blocks = 0, multiprocessors = 0;
    TN_TRY(require_real(device, "blocks_at_once"));
    TN__CUDA_NEED(device, function_occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    TN_TRY(tn__cuda_multiprocessors(device, &multiprocessors));
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->function_occupancy(&blocks, function, (int)threads, shared_bytes);
    TN_TRY(tn__cuda_end(&call, code, "cuOccupancyMaxActiveBlocksPerMultiprocessor(%u, %u)", threads,
                        shared_bytes));
    *out = (int64_t)blocks * multiprocessors;
    return TN_OK;
}

tn_status tn__cuda_box_map_check(const tn__driver_device *device) {
    TN_TRY(require_real(device, "box_map"));
    TN__CUDA_NEED(device, tensor_map_encode, "cuTensorMapEncodeTiled");
    return TN_OK;
}

/* The driver only fills in the description: no call of it is on the device. */
tn_status tn__cuda_box_map(tn__driver_device *device, const tn__boxes *boxes, void *out) {
    static const int types[] = {[1] = TN__CU_TENSOR_MAP_UINT8,
                                [2] = TN__CU_TENSOR_MAP_UINT16,
                                [4] = TN__CU_TENSOR_MAP_FLOAT32};
    const unsigned long long extents[2] = {(unsigned long long)boxes->cols,
                                           (unsigned long long)boxes->rows};
    const unsigned long long row_bytes = extents[0] * (unsigned)boxes->element_bytes;
    const unsigned box[2] = {(unsigned)boxes->box_cols, (unsigned)boxes->box_rows};
    const unsigned steps[2] = {1, 1};
    tn__cuda_call call;
    TN_TRY(tn__cuda_box_map_check(device));
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->tensor_map_encode(
        out, types[boxes->element_bytes], 2, (void *)(uintptr_t)boxes->data, extents, &row_bytes,
        box, steps, TN__CU_TENSOR_MAP_NOT_INTERLEAVED,
        boxes->is_swizzled ? TN__CU_TENSOR_MAP_SWIZZLE_128 : TN__CU_TENSOR_MAP_SWIZZLE_NONE,
        TN__CU_TENSOR_MAP_L2_256, TN__CU_TENSOR_MAP_OUTSIDE_IS_0);
    return tn__cuda_end(&call, code, "cuTensorMapEncodeTiled(%p, %lld x %lld of %d bytes)",
                        boxes->data, (long long)boxes->rows, (long long)boxes->cols,
                        boxes->element_bytes);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* A programmatic dependent launch, a cluster, or both: see tn__launch. */
static int launch_with_attributes(const tn__driver_device *device, tn__function function,
                                  const tn__launch *launch, tn_stream stream) {
    const unsigned *grid = launch->grid, *block = launch->block;
    tn__cu_launch_attribute attributes[2];
    unsigned count = 0;
    if (launch->starts_early)
        attributes[count++] = (tn__cu_launch_attribute){
            .id = TN__CU_LAUNCH_PROGRAMMATIC_SERIALIZATION, .value.is_early = 1};
    if (launch->cluster > 0)
        attributes[count++] = (tn__cu_launch_attribute){.id = TN__CU_LAUNCH_CLUSTER_DIMENSION,
                                                        .value.cluster = {launch->cluster, 1, 1}};
    tn__cu_launch_config config = {.grid = {grid[0], grid[1], grid[2]},
                                   .block = {block[0], block[1], block[2]},
                                   .shared_bytes = launch->shared_bytes,
                                   .stream = stream,
                                   .attributes = attributes,
                                   .attribute_count = count};
    return device->cu->launch_config(&config, function, launch->parameters, NULL);
}

static tn_status launch_together(tn__driver_device *device, tn__function function,
                                 const tn__launch *launch, tn_stream stream) {
    const unsigned *grid = launch->grid, *block = launch->block;
    tn__cuda_call call;
    TN__CUDA_NEED(device, launch_together, "cuLaunchCooperativeKernel");
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code =
        device->cu->launch_together(function, grid[0], grid[1], grid[2], block[0], block[1],
                                    block[2], launch->shared_bytes, stream, launch->parameters);
    return tn__cuda_end(
        &call, code,
        "cuLaunchCooperativeKernel(grid %ux%ux%u, block %ux%ux%u, %u bytes shared, stream %p)",
        grid[0], grid[1], grid[2], block[0], block[1], block[2], launch->shared_bytes, stream);
}

/* Without the newer call kernels start when the one ahead has ended, and anywhere. */
tn_status tn__cuda_launch(tn__driver_device *device, tn__function function,
                          const tn__launch *launch, tn_stream stream) {
    tn__cuda_call call;
    const unsigned *grid = launch->grid, *block = launch->block;
    const int has_attributes =
        (launch->starts_early || launch->cluster > 0) && device->cu->launch_config != NULL;
    TN_TRY(require_real(device, "launch"));
    TN__CUDA_NEED(device, launch, "cuLaunchKernel");
    if (launch->is_together) return launch_together(device, function, launch, stream);
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code = has_attributes ? launch_with_attributes(device, function, launch, stream)
                              : device->cu->launch(function, grid[0], grid[1], grid[2], block[0],
                                                   block[1], block[2], launch->shared_bytes, stream,
                                                   launch->parameters, NULL);
    return tn__cuda_end(
        &call, code, "cuLaunchKernel(grid %ux%ux%u, block %ux%ux%u, %u bytes shared, stream %p)",
        grid[0], grid[1], grid[2], block[0], block[1], block[2], launch->shared_bytes, stream);
}
