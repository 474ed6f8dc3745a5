/* The part of the CUDA driver's binary interface that we call, declared by ourselves.
 *
 * Facts only: names, numbers and layouts of CUDA 11.2 and later on 64-bit Linux, so that everything
 * builds without a toolkit. Opaque handles are void *, enums are int. Where a toolkit is present,
 * tests/unit/test_driver_abi.c compares all of this with the real cuda.h; the names here differ
 * from its names so that both can be included.
 */
#ifndef TENURE_CUDA_ABI_H
#define TENURE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int tn__cu_result;
typedef int tn__cu_device;
typedef unsigned long long tn__cu_address;
typedef unsigned long long tn__cu_handle;

enum {
    TN__CU_SUCCESS = 0,
    TN__CU_ERROR_INVALID_VALUE = 1,
    TN__CU_ERROR_OUT_OF_MEMORY = 2,
    TN__CU_ERROR_NOT_INITIALIZED = 3,
    TN__CU_ERROR_DEINITIALIZED = 4,
    TN__CU_ERROR_STUB_LIBRARY = 34,
    TN__CU_ERROR_NO_DEVICE = 100,
    TN__CU_ERROR_INVALID_HANDLE = 400,
    TN__CU_ERROR_NOT_READY = 600,
    TN__CU_ERROR_CONTEXT_IS_DESTROYED = 709,
    TN__CU_ERROR_NOT_SUPPORTED = 801,
    TN__CU_ERROR_STREAM_CAPTURE_IMPLICIT = 906
};

enum {
    TN__CU_STREAM_NON_BLOCKING = 1,
    TN__CU_EVENT_DISABLE_TIMING = 2,
    TN__CU_STREAM_CAPTURE_STATUS_NONE = 0,
    TN__CU_STREAM_WAIT_VALUE_GEQ = 0,
    TN__CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    TN__CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    TN__CU_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    TN__CU_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    TN__CU_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    TN__CU_ATTRIBUTE_SHARED_MAX = 97,
    TN__CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    TN__CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    TN__CU_MEM_HANDLE_TYPE_FILE_DESCRIPTOR = 1,
    TN__CU_MEM_LOCATION_TYPE_DEVICE = 1,
    TN__CU_MEM_ACCESS_NONE = 0,
    TN__CU_MEM_ACCESS_READ_WRITE = 3,
    TN__CU_MEM_GRANULARITY_MINIMUM = 0,
    TN__CU_LAUNCH_CLUSTER_DIMENSION = 4,
    TN__CU_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6,
    TN__CU_FUNCTION_SHARED_MAX = 8,
    TN__CU_TENSOR_MAP_UINT8 = 0,
    TN__CU_TENSOR_MAP_UINT16 = 1,
    TN__CU_TENSOR_MAP_FLOAT32 = 7,
    TN__CU_TENSOR_MAP_NOT_INTERLEAVED = 0,
    TN__CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    TN__CU_TENSOR_MAP_SWIZZLE_128 = 3,
    TN__CU_TENSOR_MAP_L2_256 = 3,
    TN__CU_TENSOR_MAP_OUTSIDE_IS_0 = 0,
    TN__CU_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
    TN__CU_MEMPOOL_RELEASE_THRESHOLD = 4,
    TN__CU_MEMPOOL_RESERVED_NOW = 5,
    TN__CU_HOST_ALLOC_PORTABLE = 1,
    TN__CU_POINTER_MEMORY_TYPE = 2,
    TN__CU_POINTER_DEVICE_ORDINAL = 9,
    TN__CU_MEMORY_TYPE_HOST = 1,
    TN__CU_MEMORY_TYPE_DEVICE = 2,
    TN__CU_MEMORY_TYPE_UNIFIED = 4
};

/* Handle values of streams that nobody creates. */
#define TN__CU_STREAM_LEGACY     ((void *)(uintptr_t)1)
#define TN__CU_STREAM_PER_THREAD ((void *)(uintptr_t)2)

typedef struct tn__cu_location {
    int type;
    int id;
} tn__cu_location;

typedef struct tn__cu_allocation {
    int type;
    int handle_types;
    tn__cu_location location;
    void *windows_only;
    unsigned char compression;
    unsigned char is_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
} tn__cu_allocation;

typedef struct tn__cu_access {
    tn__cu_location location;
    int flags;
} tn__cu_access;

typedef struct tn__cu_pool_properties {
    int type;
    int handle_types;
    tn__cu_location location;
    void *windows_only;
    size_t maximum_bytes; /* drivers before CUDA 12.2 do not look at it */
    unsigned short usage;
    unsigned char reserved[54];
} tn__cu_pool_properties;

/* CUDA_MEMCPY2D, with addresses that say themselves what they are of. */
typedef struct tn__cu_row_copy {
    size_t src_x, src_y;
    int src_type; /* TN__CU_MEMORY_TYPE_UNIFIED */
    const void *src_host;
    tn__cu_address src;
    void *src_array;
    size_t src_stride;
    size_t dst_x, dst_y;
    int dst_type;
    void *dst_host;
    tn__cu_address dst;
    void *dst_array;
    size_t dst_stride;
    size_t row_bytes;
    size_t rows;
} tn__cu_row_copy;

typedef struct tn__cu_launch_attribute {
    int id;
    char padding[4];
    union {
        int is_early;
        unsigned cluster[3];
        char bytes[64];
    } value;
} tn__cu_launch_attribute;

typedef struct tn__cu_launch_config {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void *stream;
    tn__cu_launch_attribute *attributes;
    unsigned attribute_count;
} tn__cu_launch_config;

/* The calls: X(need, field, "versioned name", (parameters)). NEED is one of REQUIRED; VMM (virtual
 * memory management, all or none); OPTIONAL. */
#define TN__CU_CALLS(X)                                                                            \
    X(REQUIRED, init, "cuInit", (unsigned flags))                                                  \
    X(REQUIRED, error_name, "cuGetErrorName", (tn__cu_result code, const char **text))             \
    X(REQUIRED, error_string, "cuGetErrorString", (tn__cu_result code, const char **text))         \
    X(REQUIRED, device_count, "cuDeviceGetCount", (int *count))                                    \
    X(REQUIRED, device_get, "cuDeviceGet", (tn__cu_device * device, int ordinal))                  \
    X(REQUIRED, device_name, "cuDeviceGetName", (char *name, int bytes, tn__cu_device device))     \
    X(REQUIRED, device_attribute, "cuDeviceGetAttribute",                                          \
      (int *value, int attribute, tn__cu_device device))                                           \
    X(REQUIRED, device_memory, "cuDeviceTotalMem_v2", (size_t * bytes, tn__cu_device device))      \
    X(REQUIRED, context_retain, "cuDevicePrimaryCtxRetain",                                        \
      (void **context, tn__cu_device device))                                                      \
    X(REQUIRED, context_release, "cuDevicePrimaryCtxRelease_v2", (tn__cu_device device))           \
    X(REQUIRED, context_current, "cuCtxGetCurrent", (void **context))                              \
    X(REQUIRED, context_set, "cuCtxSetCurrent", (void *context))                                   \
    X(REQUIRED, context_push, "cuCtxPushCurrent_v2", (void *context))                              \
    X(REQUIRED, context_pop, "cuCtxPopCurrent_v2", (void **context))                               \
    X(REQUIRED, context_synchronize, "cuCtxSynchronize", (void))                                   \
    X(REQUIRED, mem_info, "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))          \
    X(REQUIRED, mem_alloc, "cuMemAlloc_v2", (tn__cu_address * out, size_t bytes))                  \
    X(REQUIRED, mem_free, "cuMemFree_v2", (tn__cu_address address))                                \
    X(REQUIRED, stream_create, "cuStreamCreate", (void **out, unsigned flags))                     \
    X(REQUIRED, stream_destroy, "cuStreamDestroy_v2", (void *stream))                              \
    X(REQUIRED, stream_synchronize, "cuStreamSynchronize", (void *stream))                         \
    X(REQUIRED, stream_wait_event, "cuStreamWaitEvent",                                            \
      (void *stream, void *event, unsigned flags))                                                 \
    X(REQUIRED, event_create, "cuEventCreate", (void **out, unsigned flags))                       \
    X(REQUIRED, event_destroy, "cuEventDestroy_v2", (void *event))                                 \
    X(REQUIRED, event_record, "cuEventRecord", (void *event, void *stream))                        \
    X(REQUIRED, event_query, "cuEventQuery", (void *event))                                        \
    X(REQUIRED, event_synchronize, "cuEventSynchronize", (void *event))                            \
    X(REQUIRED, copy, "cuMemcpyAsync",                                                             \
      (tn__cu_address dst, tn__cu_address src, size_t bytes, void *stream))                        \
    X(OPTIONAL, copy_rows, "cuMemcpy2DAsync_v2", (const tn__cu_row_copy *copy, void *stream))      \
    X(REQUIRED, fill, "cuMemsetD8Async",                                                           \
      (tn__cu_address dst, unsigned char byte, size_t bytes, void *stream))                        \
    X(VMM, mem_granularity, "cuMemGetAllocationGranularity",                                       \
      (size_t * bytes, const tn__cu_allocation *allocation, int option))                           \
    X(VMM, address_reserve, "cuMemAddressReserve",                                                 \
      (tn__cu_address * out, size_t bytes, size_t alignment, tn__cu_address hint,                  \
       unsigned long long flags))                                                                  \
    X(VMM, address_free, "cuMemAddressFree", (tn__cu_address address, size_t bytes))               \
    X(VMM, mem_create, "cuMemCreate",                                                              \
      (tn__cu_handle * out, size_t bytes, const tn__cu_allocation *allocation,                     \
       unsigned long long flags))                                                                  \
    X(VMM, mem_release, "cuMemRelease", (tn__cu_handle handle))                                    \
    X(VMM, mem_map, "cuMemMap",                                                                    \
      (tn__cu_address address, size_t bytes, size_t offset, tn__cu_handle handle,                  \
       unsigned long long flags))                                                                  \
    X(VMM, mem_set_access, "cuMemSetAccess",                                                       \
      (tn__cu_address address, size_t bytes, const tn__cu_access *access, size_t count))           \
    X(VMM, mem_unmap, "cuMemUnmap", (tn__cu_address address, size_t bytes))                        \
    X(OPTIONAL, device_uuid, "cuDeviceGetUuid_v2", (char *uuid, tn__cu_device device))             \
    X(OPTIONAL, device_can_access, "cuDeviceCanAccessPeer",                                        \
      (int *can_access, tn__cu_device device, tn__cu_device peer))                                 \
    X(OPTIONAL, mem_export, "cuMemExportToShareableHandle",                                        \
      (void *shareable, tn__cu_handle handle, int type, unsigned long long flags))                 \
    X(OPTIONAL, mem_import, "cuMemImportFromShareableHandle",                                      \
      (tn__cu_handle * out, void *shareable, int type))                                            \
    X(OPTIONAL, mem_properties, "cuMemGetAllocationPropertiesFromHandle",                          \
      (tn__cu_allocation * out, tn__cu_handle handle))                                             \
    X(OPTIONAL, context_device, "cuCtxGetDevice", (tn__cu_device * device))                        \
    X(OPTIONAL, context_record, "cuCtxRecordEvent", (void *context, void *event))                  \
    X(OPTIONAL, stream_context, "cuStreamGetCtx", (void *stream, void **context))                  \
    X(OPTIONAL, host_alloc, "cuMemHostAlloc", (void **out, size_t bytes, unsigned flags))          \
    X(OPTIONAL, host_free, "cuMemFreeHost", (void *address))                                       \
    X(OPTIONAL, pointer_attributes, "cuPointerGetAttributes",                                      \
      (unsigned count, int *attributes, void **values, tn__cu_address address))                    \
    X(OPTIONAL, mempool_create, "cuMemPoolCreate",                                                 \
      (void **out, const tn__cu_pool_properties *properties))                                      \
    X(OPTIONAL, mempool_destroy, "cuMemPoolDestroy", (void *pool))                                 \
    X(OPTIONAL, mempool_set, "cuMemPoolSetAttribute", (void *pool, int attribute, void *value))    \
    X(OPTIONAL, mempool_get, "cuMemPoolGetAttribute", (void *pool, int attribute, void *value))    \
    X(OPTIONAL, mempool_trim, "cuMemPoolTrimTo", (void *pool, size_t keep_bytes))                  \
    X(OPTIONAL, mempool_alloc, "cuMemAllocFromPoolAsync",                                          \
      (tn__cu_address * out, size_t bytes, void *pool, void *stream))                              \
    X(OPTIONAL, mempool_free, "cuMemFreeAsync", (tn__cu_address address, void *stream))            \
    X(OPTIONAL, stream_id, "cuStreamGetId", (void *stream, unsigned long long *id))                \
    X(OPTIONAL, stream_is_capturing, "cuStreamIsCapturing", (void *stream, int *status))           \
    X(OPTIONAL, capture_info, "cuStreamGetCaptureInfo_v2",                                         \
      (void *stream, int *status, unsigned long long *id, void **graph, const void **nodes,        \
       size_t *node_count))                                                                        \
    X(OPTIONAL, capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                    \
    X(OPTIONAL, host_task, "cuLaunchHostFunc",                                                     \
      (void *stream, void (*task)(void *), void *argument))                                        \
    X(OPTIONAL, stream_wait_value, "cuStreamWaitValue32_v2",                                       \
      (void *stream, tn__cu_address address, uint32_t value, unsigned flags))                      \
    X(OPTIONAL, module_load, "cuModuleLoadData", (void **out, const void *image))                  \
    X(OPTIONAL, module_unload, "cuModuleUnload", (void *module))                                   \
    X(OPTIONAL, module_function, "cuModuleGetFunction",                                            \
      (void **out, void *module, const char *name))                                                \
    X(OPTIONAL, launch, "cuLaunchKernel",                                                          \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,        \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, \
       void **extra))                                                                              \
    X(OPTIONAL, launch_together, "cuLaunchCooperativeKernel",                                      \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,        \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,                    \
       void **parameters))                                                                         \
    X(OPTIONAL, launch_config, "cuLaunchKernelEx",                                                 \
      (const tn__cu_launch_config *config, void *function, void **parameters, void **extra))       \
    X(OPTIONAL, function_attribute_set, "cuFuncSetAttribute",                                      \
      (void *function, int attribute, int value))                                                  \
    X(OPTIONAL, function_occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                 \
      (int *blocks, void *function, int threads, size_t shared_bytes))                             \
    X(OPTIONAL, tensor_map_encode, "cuTensorMapEncodeTiled",                                       \
      (void *map, int type, unsigned rank, void *address, const unsigned long long *extents,       \
       const unsigned long long *strides_bytes, const unsigned *box, const unsigned *steps,        \
       int interleave, int swizzle, int promotion, int fill))

#define TN__CU_AS_MEMBER(need, field, name, parameters) tn__cu_result(*field) parameters;
typedef struct tn__cu_calls {
    TN__CU_CALLS(TN__CU_AS_MEMBER)
} tn__cu_calls;

#endif
