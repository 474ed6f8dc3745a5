/* Memory of the CUDA driver: the plain calls, and virtual memory management.
 *
 * A physical handle maps whole, for reading and writing by its own device. Sizes and addresses are
 * multiples of the granularity; the driver itself refuses others.
 */
#include "driver_cuda.h"

static tn__cu_address address_of(const void *pointer) { return (tn__cu_address)(uintptr_t)pointer; }

tn_status tn__cuda_mem_alloc(tn__driver_device *device, size_t bytes, void **out) {
    tn__cuda_call call;
    tn__cu_address address = 0;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_ALLOC, &call));
    int code = device->cu->mem_alloc(&address, bytes);
    TN_TRY(tn__cuda_end(&call, code, "cuMemAlloc(%zu bytes)", bytes));
    *out = (void *)(uintptr_t)address;
    return TN_OK;
}

tn_status tn__cuda_mem_free(tn__driver_device *device, void *address) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_FREE, &call));
    int code = device->cu->mem_free(address_of(address));
    return tn__cuda_end(&call, code, "cuMemFree(%p)", address);
}

tn_status tn__cuda_require_vmm(const tn__driver_device *device) {
    if (device->has_vmm) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "no virtual memory management: the device has none, or %s lacks cuMemCreate or "
                   "one of its kin",
                   device->library->path);
}

static tn__cu_location location_of(const tn__driver_device *device) {
    return (tn__cu_location){TN__CU_MEM_LOCATION_TYPE_DEVICE, device->device};
}

static tn__cu_allocation allocation_of(const tn__driver_device *device) {
    return (tn__cu_allocation){.type = TN__CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = location_of(device)};
}

tn_status tn__cuda_granularity(tn__driver_device *device, size_t *out) {
    size_t bytes = (size_t)2 << 20;
    if (device->has_vmm) {
        tn__cuda_call call;
        tn__cu_allocation allocation = allocation_of(device);
        TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
        int code = device->cu->mem_granularity(&bytes, &allocation, TN__CU_MEM_GRANULARITY_MINIMUM);
        TN_TRY(tn__cuda_end(&call, code, "cuMemGetAllocationGranularity()"));
    }
    *out = bytes;
    return TN_OK;
}

tn_status tn__cuda_address_reserve(tn__driver_device *device, size_t bytes, void **out) {
    tn__cuda_call call;
    tn__cu_address address = 0;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_ADDRESS_RESERVE, &call));
    int code = device->cu->address_reserve(&address, bytes, 0, 0, 0);
    TN_TRY(tn__cuda_end(&call, code, "cuMemAddressReserve(%zu bytes)", bytes));
    *out = (void *)(uintptr_t)address;
    return TN_OK;
}

tn_status tn__cuda_address_free(tn__driver_device *device, void *address, size_t bytes) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_ADDRESS_FREE, &call));
    int code = device->cu->address_free(address_of(address), bytes);
    return tn__cuda_end(&call, code, "cuMemAddressFree(%p, %zu bytes)", address, bytes);
}

tn_status tn__cuda_mem_create(tn__driver_device *device, size_t bytes, tn__handle *out) {
    tn__cuda_call call;
    tn__cu_handle handle = 0;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_CREATE, &call));
    tn__cu_allocation allocation = allocation_of(device);
    int code = device->cu->mem_create(&handle, bytes, &allocation, 0);
    TN_TRY(tn__cuda_end(&call, code, "cuMemCreate(%zu bytes)", bytes));
    *out = handle;
    return TN_OK;
}

tn_status tn__cuda_mem_release(tn__driver_device *device, tn__handle handle, size_t bytes) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_RELEASE, &call));
    int code = device->cu->mem_release(handle);
    return tn__cuda_end(&call, code, "cuMemRelease(%zu bytes)", bytes);
}

tn_status tn__cuda_mem_map(tn__driver_device *device, void *address, size_t bytes,
                           tn__handle handle) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_MAP, &call));
    int code = device->cu->mem_map(address_of(address), bytes, 0, handle, 0);
    return tn__cuda_end(&call, code, "cuMemMap(%p, %zu bytes)", address, bytes);
}

tn_status tn__cuda_mem_set_access(tn__driver_device *device, void *address, size_t bytes) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_SET_ACCESS, &call));
    tn__cu_access access = {location_of(device), TN__CU_MEM_ACCESS_READ_WRITE};
    int code = device->cu->mem_set_access(address_of(address), bytes, &access, 1);
    return tn__cuda_end(&call, code, "cuMemSetAccess(%p, %zu bytes)", address, bytes);
}

tn_status tn__cuda_mem_unmap(tn__driver_device *device, void *address, size_t bytes) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_UNMAP, &call));
    int code = device->cu->mem_unmap(address_of(address), bytes);
    return tn__cuda_end(&call, code, "cuMemUnmap(%p, %zu bytes)", address, bytes);
}
