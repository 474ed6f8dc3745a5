/* Memory of the CUDA driver: plain memory, pinned host memory, the driver's own memory pools, and
 * virtual memory management.
 *
 * A physical handle maps whole, for reading and writing by its own device. Sizes and addresses are
 * multiples of the granularity; the driver itself refuses others.
 */
#include "driver_cuda.h"

static tn__cu_address address_of(const void *pointer) { return (tn__cu_address)(uintptr_t)pointer; }

static tn__cu_location location_of(const tn__driver_device *device) {
    return (tn__cu_location){TN__CU_MEM_LOCATION_TYPE_DEVICE, device->device};
}

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

/* ---- pinned host memory ---------------------------------------------------------------------- */

tn_status tn__cuda_host_alloc(tn__driver_device *device, size_t bytes, void **out) {
    tn__cuda_call call;
    void *address = NULL;
    TN__CUDA_NEED(device, host_alloc, "cuMemHostAlloc");
    TN__CUDA_NEED(device, host_free, "cuMemFreeHost");
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_ALLOC, &call));
    int code = device->cu->host_alloc(&address, bytes, TN__CU_HOST_ALLOC_PORTABLE);
    TN_TRY(tn__cuda_end(&call, code, "cuMemHostAlloc(%zu bytes)", bytes));
    *out = address;
    return TN_OK;
}

tn_status tn__cuda_host_free(tn__driver_device *device, void *address) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_FREE, &call));
    int code = device->cu->host_free(address);
    return tn__cuda_end(&call, code, "cuMemFreeHost(%p)", address);
}

/* ---- where an address points to -------------------------------------------------------------- */

static tn__memory_place place_of(const tn__driver_device *device, int type, int ordinal) {
    if (type == TN__CU_MEMORY_TYPE_HOST) return TN__PLACE_HOST;
    if (type != TN__CU_MEMORY_TYPE_DEVICE) return TN__PLACE_NONE;
    return ordinal == device->device ? TN__PLACE_DEVICE : TN__PLACE_PEER;
}

/* Asked for several attributes at once, the driver answers 0 for an address that it does not know,
 * where it would call a single question an error. */
tn_status tn__cuda_memory_place(tn__driver_device *device, const void *address,
                                tn__memory_place *out) {
    tn__cuda_call call;
    int attributes[2] = {TN__CU_POINTER_MEMORY_TYPE, TN__CU_POINTER_DEVICE_ORDINAL};
    int type = 0, ordinal = -1;
    void *values[2] = {&type, &ordinal};
    if (!device->cu->pointer_attributes) {
        *out = TN__PLACE_UNTOLD;
        return TN_OK;
    }
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->pointer_attributes(2, attributes, values, address_of(address));
    TN_TRY(tn__cuda_end(&call, code, "cuPointerGetAttributes(%p)", address));
    *out = place_of(device, type, ordinal);
    return TN_OK;
}

/* ---- the driver's memory pools --------------------------------------------------------------- */

static tn_status require_mempools(tn__driver_device *device) {
    int has_mempools = 0;
    TN__CUDA_NEED(device, mempool_create, "cuMemPoolCreate");
    TN__CUDA_NEED(device, mempool_destroy, "cuMemPoolDestroy");
    TN__CUDA_NEED(device, mempool_set, "cuMemPoolSetAttribute");
    TN__CUDA_NEED(device, mempool_get, "cuMemPoolGetAttribute");
    TN__CUDA_NEED(device, mempool_trim, "cuMemPoolTrimTo");
    TN__CUDA_NEED(device, mempool_alloc, "cuMemAllocFromPoolAsync");
    TN__CUDA_NEED(device, mempool_free, "cuMemFreeAsync");
    int code = device->cu->device_attribute(&has_mempools, TN__CU_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
                                            device->device);
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(device->library, TN_DRIVER_ERROR, code, "cuDeviceGetAttribute()");
    if (has_mempools) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "the driver of this device has no memory pools of its own");
}

/* By default a pool's memory goes back at each synchronisation and must be mapped anew. */
static int keep_memory(const tn__driver_device *device, void *pool) {
    uint64_t threshold = UINT64_MAX;
    return device->cu->mempool_set(pool, TN__CU_MEMPOOL_RELEASE_THRESHOLD, &threshold);
}

/* Before another one is made: so there is no more than one, unless threads fail at once. */
static int drop_mempool(tn__driver_device *device, void *pool) {
    void *none = NULL;
    int code = device->cu->mempool_destroy(pool);
    if (code != TN__CU_SUCCESS)
        (void)atomic_compare_exchange_strong(&device->unwanted_mempool, &none, pool);
    return code;
}

int tn__cuda_end_unwanted_mempool(tn__driver_device *device) {
    void *pool = atomic_exchange(&device->unwanted_mempool, NULL);
    return pool ? drop_mempool(device, pool) : TN__CU_SUCCESS;
}

tn_status tn__cuda_mempool_create(tn__driver_device *device, size_t maximum_bytes,
                                  tn__mempool *out) {
    const char *name = "cuMemPoolCreate()";
    tn__cuda_call call;
    void *pool = NULL;
    TN_TRY(tn__driver_require_present("mempool_create"));
    TN_TRY(require_mempools(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_CREATE, &call));
    tn__cu_pool_properties properties = {.type = TN__CU_MEM_ALLOCATION_TYPE_PINNED,
                                         .location = location_of(device),
                                         .maximum_bytes = maximum_bytes};
    int code = tn__cuda_end_unwanted_mempool(device);
    if (code == TN__CU_SUCCESS) code = device->cu->mempool_create(&pool, &properties);
    if (code == TN__CU_SUCCESS) {
        name = "cuMemPoolSetAttribute(release threshold)";
        code = keep_memory(device, pool);
        if (code != TN__CU_SUCCESS) (void)drop_mempool(device, pool);
    }
    TN_TRY(tn__cuda_end(&call, code, "%s", name));
    *out = pool;
    return TN_OK;
}

tn_status tn__cuda_mempool_destroy(tn__driver_device *device, tn__mempool pool) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_RELEASE, &call));
    int code = device->cu->mempool_destroy(pool);
    return tn__cuda_end(&call, code, "cuMemPoolDestroy()");
}

tn_status tn__cuda_mempool_alloc(tn__driver_device *device, tn__mempool pool, size_t bytes,
                                 tn_stream stream, void **out) {
    tn__cuda_call call;
    tn__cu_address address = 0;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_ALLOC, &call));
    int code = device->cu->mempool_alloc(&address, bytes, pool, stream);
    TN_TRY(
        tn__cuda_end(&call, code, "cuMemAllocFromPoolAsync(%zu bytes, stream %p)", bytes, stream));
    *out = (void *)(uintptr_t)address;
    return TN_OK;
}

tn_status tn__cuda_mempool_free(tn__driver_device *device, void *address, tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_FREE, &call));
    int code = device->cu->mempool_free(address_of(address), stream);
    return tn__cuda_end(&call, code, "cuMemFreeAsync(%p, stream %p)", address, stream);
}

tn_status tn__cuda_mempool_trim(tn__driver_device *device, tn__mempool pool, size_t keep_bytes) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_RELEASE, &call));
    int code = device->cu->mempool_trim(pool, keep_bytes);
    return tn__cuda_end(&call, code, "cuMemPoolTrimTo(%zu bytes)", keep_bytes);
}

tn_status tn__cuda_mempool_reserved(tn__driver_device *device, tn__mempool pool, size_t *out) {
    tn__cuda_call call;
    uint64_t bytes = 0;
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->mempool_get(pool, TN__CU_MEMPOOL_RESERVED_NOW, &bytes);
    TN_TRY(tn__cuda_end(&call, code, "cuMemPoolGetAttribute(reserved)"));
    *out = (size_t)bytes;
    return TN_OK;
}

/* ---- virtual memory management --------------------------------------------------------------- */

tn_status tn__cuda_require_vmm(const tn__driver_device *device) {
    if (device->has_vmm) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "no virtual memory management: the device has none, or %s lacks cuMemCreate or "
                   "one of its kin",
                   device->library->path);
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
