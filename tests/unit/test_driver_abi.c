/* Our declarations of the CUDA driver's interface against the real cuda.h, where there is one.
 *
 * Numbers, sizes, layouts and parameters are compared by the compiler; names when it runs.
 */
#include <stdio.h>
#include <string.h>

#include "cuda_abi.h"
#include "driver.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

#define SAME(ours, theirs)      _Static_assert((long long)(ours) == (long long)(theirs), #theirs)
#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, our_field, theirs, their_field)                                           \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field), #their_field);      \
    _Static_assert(sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),           \
                   #their_field)

SAME(TN__CU_SUCCESS, CUDA_SUCCESS);
SAME(TN__CU_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(TN__CU_ERROR_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(TN__CU_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(TN__CU_ERROR_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME(TN__CU_ERROR_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY);
SAME(TN__CU_ERROR_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(TN__CU_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(TN__CU_ERROR_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(TN__CU_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(TN__CU_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(TN__CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(TN__CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(TN__CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(TN__CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(TN__CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WAIT_VALUE_GEQ);
SAME(TN__CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(TN__CU_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(TN__CU_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(TN__CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
     CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(TN__CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(TN__CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(TN__CU_MEM_HANDLE_TYPE_FILE_DESCRIPTOR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(TN__CU_MEM_ACCESS_NONE, CU_MEM_ACCESS_FLAGS_PROT_NONE);
SAME(TN__CU_MEM_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(TN__CU_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
SAME(TN__CU_MEMPOOL_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
SAME(TN__CU_MEMPOOL_RESERVED_NOW, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
SAME(TN__CU_HOST_ALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(TN__CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(TN__CU_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(TN__CU_MEMORY_TYPE_HOST, CU_MEMORYTYPE_HOST);
SAME(TN__CU_MEMORY_TYPE_DEVICE, CU_MEMORYTYPE_DEVICE);
SAME(TN__CU_MEMORY_TYPE_UNIFIED, CU_MEMORYTYPE_UNIFIED);
SAME(TN__CU_MEM_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);

SAME(TN__CU_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(TN__CU_ATTRIBUTE_SHARED_MAX, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(TN__CU_FUNCTION_SHARED_MAX, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(TN__CU_LAUNCH_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(TN__CU_TENSOR_MAP_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
SAME(TN__CU_TENSOR_MAP_UINT16, CU_TENSOR_MAP_DATA_TYPE_UINT16);
SAME(TN__CU_TENSOR_MAP_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
SAME(TN__CU_TENSOR_MAP_NOT_INTERLEAVED, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(TN__CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE);
SAME(TN__CU_TENSOR_MAP_SWIZZLE_128, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(TN__CU_TENSOR_MAP_L2_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME(TN__CU_TENSOR_MAP_OUTSIDE_IS_0, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
SAME(TN__CU_LAUNCH_PROGRAMMATIC_SERIALIZATION,
     CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

SAME_SIZE(tn__cu_launch_attribute, CUlaunchAttribute);
SAME_PLACE(tn__cu_launch_attribute, id, CUlaunchAttribute, id);
SAME_PLACE(tn__cu_launch_attribute, value, CUlaunchAttribute, value);
SAME_PLACE(tn__cu_launch_attribute, value.cluster, CUlaunchAttribute, value.clusterDim);
SAME(TN__BOX_MAP_BYTES, sizeof(CUtensorMap));
SAME_SIZE(tn__cu_launch_config, CUlaunchConfig);
SAME_PLACE(tn__cu_launch_config, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(tn__cu_launch_config, stream, CUlaunchConfig, hStream);
SAME_PLACE(tn__cu_launch_config, attributes, CUlaunchConfig, attrs);
SAME_PLACE(tn__cu_launch_config, attribute_count, CUlaunchConfig, numAttrs);
SAME_SIZE(tn__cu_result, CUresult);
SAME_SIZE(tn__cu_device, CUdevice);
SAME_SIZE(tn__cu_address, CUdeviceptr);
SAME_SIZE(tn__cu_handle, CUmemGenericAllocationHandle);
SAME_SIZE(void *, CUcontext);
SAME_SIZE(void *, CUstream);
SAME_SIZE(void *, CUevent);
SAME_SIZE(void *, CUmodule);
SAME_SIZE(void *, CUfunction);
SAME_SIZE(int, CUdevice_attribute);
SAME_SIZE(int, CUmemAllocationGranularity_flags);
SAME_SIZE(int, CUmemAllocationHandleType);
SAME_SIZE(char[16], CUuuid);
SAME_SIZE(int, CUpointer_attribute);
SAME_SIZE(int, CUmemorytype);
SAME_SIZE(int, CUstreamCaptureStatus);
SAME_SIZE(int, CUstreamCaptureMode);

SAME_SIZE(tn__cu_location, CUmemLocation);
SAME_PLACE(tn__cu_location, type, CUmemLocation, type);
SAME_PLACE(tn__cu_location, id, CUmemLocation, id);
SAME_SIZE(tn__cu_allocation, CUmemAllocationProp);
SAME_PLACE(tn__cu_allocation, type, CUmemAllocationProp, type);
SAME_PLACE(tn__cu_allocation, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(tn__cu_allocation, location, CUmemAllocationProp, location);
SAME_PLACE(tn__cu_allocation, windows_only, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(tn__cu_allocation, compression, CUmemAllocationProp, allocFlags.compressionType);
SAME_PLACE(tn__cu_allocation, is_rdma_capable, CUmemAllocationProp,
           allocFlags.gpuDirectRDMACapable);
SAME_PLACE(tn__cu_allocation, usage, CUmemAllocationProp, allocFlags.usage);
SAME_PLACE(tn__cu_allocation, reserved, CUmemAllocationProp, allocFlags.reserved);
SAME_SIZE(tn__cu_access, CUmemAccessDesc);
SAME_PLACE(tn__cu_access, location, CUmemAccessDesc, location);
SAME_PLACE(tn__cu_access, flags, CUmemAccessDesc, flags);
SAME_SIZE(tn__cu_row_copy, CUDA_MEMCPY2D);
SAME_PLACE(tn__cu_row_copy, src_type, CUDA_MEMCPY2D, srcMemoryType);
SAME_PLACE(tn__cu_row_copy, src, CUDA_MEMCPY2D, srcDevice);
SAME_PLACE(tn__cu_row_copy, src_stride, CUDA_MEMCPY2D, srcPitch);
SAME_PLACE(tn__cu_row_copy, dst_type, CUDA_MEMCPY2D, dstMemoryType);
SAME_PLACE(tn__cu_row_copy, dst, CUDA_MEMCPY2D, dstDevice);
SAME_PLACE(tn__cu_row_copy, dst_stride, CUDA_MEMCPY2D, dstPitch);
SAME_PLACE(tn__cu_row_copy, row_bytes, CUDA_MEMCPY2D, WidthInBytes);
SAME_PLACE(tn__cu_row_copy, rows, CUDA_MEMCPY2D, Height);
SAME_SIZE(void *, CUmemoryPool);
SAME_SIZE(int, CUmemPool_attribute);
SAME_SIZE(tn__cu_pool_properties, CUmemPoolProps);
SAME_PLACE(tn__cu_pool_properties, type, CUmemPoolProps, allocType);
SAME_PLACE(tn__cu_pool_properties, handle_types, CUmemPoolProps, handleTypes);
SAME_PLACE(tn__cu_pool_properties, location, CUmemPoolProps, location);
SAME_PLACE(tn__cu_pool_properties, windows_only, CUmemPoolProps, win32SecurityAttributes);
#if CUDA_VERSION >= 12020
SAME_PLACE(tn__cu_pool_properties, maximum_bytes, CUmemPoolProps, maxSize);
#endif

/* Each real call takes our arguments; the operand of sizeof is compiled and never run. */
#define TAKES(call) _Static_assert(sizeof(call) == sizeof(tn__cu_result), #call)
#define ADDRESS     ((tn__cu_address)0)
#define BYTES       ((size_t)0)
#define OUT_BYTES   ((size_t *)0)
#define ANY         ((void *)0)
#define OUT_INT     ((int *)0)

TAKES(cuInit(0u));
TAKES(cuGetErrorName(CUDA_SUCCESS, (const char **)0));
TAKES(cuGetErrorString(CUDA_SUCCESS, (const char **)0));
TAKES(cuDeviceGetCount(OUT_INT));
TAKES(cuDeviceGet((tn__cu_device *)0, 0));
TAKES(cuDeviceGetName((char *)0, 0, (tn__cu_device)0));
TAKES(cuDeviceGetAttribute(OUT_INT, CU_DEVICE_ATTRIBUTE_WARP_SIZE, (tn__cu_device)0));
TAKES(cuDeviceTotalMem(OUT_BYTES, (tn__cu_device)0));
TAKES(cuDevicePrimaryCtxRetain(ANY, (tn__cu_device)0));
TAKES(cuDevicePrimaryCtxRelease((tn__cu_device)0));
TAKES(cuCtxGetCurrent(ANY));
TAKES(cuCtxSetCurrent(ANY));
TAKES(cuCtxPushCurrent(ANY));
TAKES(cuCtxPopCurrent(ANY));
TAKES(cuCtxSynchronize());
TAKES(cuMemGetInfo(OUT_BYTES, OUT_BYTES));
TAKES(cuMemAlloc((tn__cu_address *)0, BYTES));
TAKES(cuMemFree(ADDRESS));
TAKES(cuStreamCreate(ANY, 0u));
TAKES(cuStreamDestroy(ANY));
TAKES(cuStreamSynchronize(ANY));
TAKES(cuStreamWaitEvent(ANY, ANY, 0u));
TAKES(cuEventCreate(ANY, 0u));
TAKES(cuEventDestroy(ANY));
TAKES(cuEventRecord(ANY, ANY));
TAKES(cuEventQuery(ANY));
TAKES(cuEventSynchronize(ANY));
TAKES(cuMemcpyAsync(ADDRESS, ADDRESS, BYTES, ANY));
TAKES(cuMemcpy2DAsync(ANY, ANY));
TAKES(cuMemsetD8Async(ADDRESS, (unsigned char)0, BYTES, ANY));
TAKES(cuMemGetAllocationGranularity(OUT_BYTES, ANY, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
TAKES(cuMemAddressReserve((tn__cu_address *)0, BYTES, BYTES, ADDRESS, 0ull));
TAKES(cuMemAddressFree(ADDRESS, BYTES));
TAKES(cuMemCreate((tn__cu_handle *)0, BYTES, ANY, 0ull));
TAKES(cuMemRelease((tn__cu_handle)0));
TAKES(cuMemMap(ADDRESS, BYTES, BYTES, (tn__cu_handle)0, 0ull));
TAKES(cuMemSetAccess(ADDRESS, BYTES, ANY, BYTES));
TAKES(cuMemUnmap(ADDRESS, BYTES));
TAKES(cuDeviceGetUuid(ANY, (tn__cu_device)0));
TAKES(cuDeviceCanAccessPeer(OUT_INT, (tn__cu_device)0, (tn__cu_device)0));
TAKES(cuMemExportToShareableHandle(ANY, (tn__cu_handle)0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                   0ull));
TAKES(cuMemImportFromShareableHandle((tn__cu_handle *)0, ANY,
                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
TAKES(cuMemGetAllocationPropertiesFromHandle(ANY, (tn__cu_handle)0));
TAKES(cuCtxGetDevice((tn__cu_device *)0));
TAKES(cuStreamGetCtx(ANY, ANY));
TAKES(cuMemHostAlloc(ANY, BYTES, 0u));
TAKES(cuMemFreeHost(ANY));
TAKES(cuPointerGetAttributes(0u, ANY, (void **)0, ADDRESS));
TAKES(cuMemPoolCreate(ANY, ANY));
TAKES(cuMemPoolDestroy(ANY));
TAKES(cuMemPoolSetAttribute(ANY, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ANY));
TAKES(cuMemPoolGetAttribute(ANY, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, ANY));
TAKES(cuMemPoolTrimTo(ANY, BYTES));
TAKES(cuMemAllocFromPoolAsync((tn__cu_address *)0, BYTES, ANY, ANY));
TAKES(cuMemFreeAsync(ADDRESS, ANY));
TAKES(cuStreamGetId(ANY, (unsigned long long *)0));
TAKES(cuStreamIsCapturing(ANY, ANY));
#if CUDA_VERSION < 13000
TAKES(cuStreamGetCaptureInfo_v2(ANY, ANY, (cuuint64_t *)0, ANY, ANY, (size_t *)0));
#endif
TAKES(cuThreadExchangeStreamCaptureMode(ANY));
TAKES(cuLaunchHostFunc(ANY, (void (*)(void *))0, ANY));
TAKES(cuStreamWaitValue32(ANY, 0, 0, 0));
TAKES(cuModuleLoadData(ANY, ANY));
TAKES(cuModuleUnload(ANY));
TAKES(cuModuleGetFunction(ANY, ANY, (const char *)0));
TAKES(cuLaunchKernel(ANY, 1u, 1u, 1u, 1u, 1u, 1u, 0u, ANY, (void **)0, (void **)0));
TAKES(cuLaunchCooperativeKernel(ANY, 1u, 1u, 1u, 1u, 1u, 1u, 0u, ANY, (void **)0));
TAKES(cuLaunchKernelEx(ANY, ANY, (void **)0, (void **)0));
TAKES(cuFuncSetAttribute(ANY, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 0));
TAKES(cuTensorMapEncodeTiled(ANY, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2u, ANY, (const cuuint64_t *)0,
                             (const cuuint64_t *)0, (const cuuint32_t *)0, (const cuuint32_t *)0,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));

/* cuda.h maps each plain name to its versioned one: the table must name the same. Of capture info
 * the second version is the one that every driver since CUDA 11.3 has, whatever cuda.h maps to. */
#define AS_TEXT(name)                          AS_TEXT_(name)
#define AS_TEXT_(name)                         #name
#define AS_NAME(need, field, name, parameters) {#field, name},
static const char *const ours[][2] = {TN__CU_CALLS(AS_NAME)};
static const char *const versioned[] = {
    AS_TEXT(cuDeviceTotalMem),  AS_TEXT(cuDevicePrimaryCtxRelease),
    AS_TEXT(cuCtxPushCurrent),  AS_TEXT(cuCtxPopCurrent),
    AS_TEXT(cuMemGetInfo),      AS_TEXT(cuMemAlloc),
    AS_TEXT(cuMemFree),         AS_TEXT(cuStreamDestroy),
    AS_TEXT(cuEventDestroy),    AS_TEXT(cuDeviceGetUuid),
    AS_TEXT(cuMemcpy2DAsync),   AS_TEXT(cuStreamWaitValue32),
    "cuStreamGetCaptureInfo_v2"};

int main(void) {
    size_t found = 0, expected = sizeof versioned / sizeof *versioned, with_version = 0;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        with_version += strstr(ours[i][1], "_v") != NULL;
        for (size_t j = 0; j < expected; j++)
            found += strcmp(ours[i][1], versioned[j]) == 0;
    }
    if (found != expected || with_version != expected) {
        printf("%zu of %zu versioned names of cuda.h %d are ours, and we have %zu\n", found,
               expected, CUDA_VERSION, with_version);
        return 1;
    }
    printf("cuda.h %d agrees with alloc/cuda_abi.h\n", CUDA_VERSION);
    return 0;
}
#else
int main(void) {
    printf("skipped: no cuda.h to compare alloc/cuda_abi.h with (install the CUDA toolkit)\n");
    return 77;
}
#endif
