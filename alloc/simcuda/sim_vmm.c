/* The driver calls on memory: virtual memory management, plain memory, pinned host memory.
 *
 * A handle is mapped whole and at offset 0, or not at all (error 801); mapping over a mapping is
 * error 1; both as the real driver has it. Mapped memory can be touched once access is set.
 * cuMemUnmap and cuMemSetAccess take ranges of whole mappings without holes. None of them waits for
 * the device; cuMemFree and cuMemFreeHost wait for all of it. Should the host refuse a mapping of
 * backed memory (error 304), handles before it in the range have got their access.
 */
#include "sim_memory.h"
#include "sim_stream.h"

#define PLAIN_ALIGN ((size_t)512)
#define HOST_ALIGN  ((size_t)4096)

static size_t granularity(void) { return tn__sim.config.granularity_bytes; }

static int is_whole_granules(size_t bytes) { return bytes > 0 && bytes % granularity() == 0; }

static int device_exists(int device) { return device >= 0 && device < tn__sim.config.device_count; }

/* ---- plain memory ---------------------------------------------------------------------------- */

sim_region *tn__sim_plain_create(int device, size_t bytes) {
    sim_handle *handle = tn__sim_handle_create(device, bytes, 0);
    sim_region *region;
    sim_mapping *mapping;
    if (!handle) return NULL;
    region = tn__sim_region_create(bytes, PLAIN_ALIGN, 1);
    if (!region) {
        tn__sim_handle_release(handle);
        return NULL;
    }
    region->is_host = device == SIM_HOST;
    mapping = tn__sim_mapping_create(region, region->base, handle);
    mapping->readable = mapping->writable = device < 0 ? UINT32_MAX : 1u << device;
    tn__sim_handle_release(handle); /* the mapping keeps it */
    if ((tn__sim.config.backed || region->is_host) && !tn__sim_mapping_expose(mapping)) {
        tn__sim_plain_destroy(region);
        return NULL;
    }
    return region;
}

void tn__sim_plain_destroy(sim_region *region) {
    tn__sim_mapping_destroy(region, tn__sim_mapping_at(region, region->base));
    tn__sim_region_destroy(region);
}

static CUresult plain_alloc(CUdeviceptr *out, size_t bytes) {
    size_t rounded = (bytes + PLAIN_ALIGN - 1) / PLAIN_ALIGN * PLAIN_ALIGN;
    sim_region *region;
    if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (rounded < bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    region = tn__sim_plain_create(tn__sim_current(), rounded);
    if (!region) return CUDA_ERROR_OUT_OF_MEMORY;
    tn__sim_spend(tn__sim_cost(SIM_COST_ALLOC, rounded));
    *out = region->base;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    SIM_ENTER(cuMemAlloc_v2);
    return tn__sim_leave(plain_alloc(address, bytes));
}

/* What cuMemAlloc or (is_host) cuMemHostAlloc gave at the address; else NULL. */
static sim_region *find_plain(CUdeviceptr address, int is_host) {
    sim_region *region = tn__sim_region_find(address);
    if (!region || !region->is_plain || region->base != address) return NULL;
    return region->is_host == is_host && !region->chunk ? region : NULL;
}

static CUresult plain_free(CUdeviceptr address, int is_host) {
    sim_region *region = find_plain(address, is_host);
    CUresult result;
    if (address == 0) return CUDA_SUCCESS;
    if (!region) return CUDA_ERROR_INVALID_VALUE;
    result = tn__sim_device_finish(tn__sim_current());
    if (result != CUDA_SUCCESS) return result;
    /* The wait may have dropped the lock. */
    region = find_plain(address, is_host);
    if (!region) return CUDA_ERROR_INVALID_VALUE;
    if (!is_host) tn__sim_spend(tn__sim_cost(SIM_COST_FREE, region->bytes));
    tn__sim_plain_destroy(region);
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    SIM_ENTER(cuMemFree_v2);
    return tn__sim_leave(plain_free(address, 0));
}

/* ---- pinned host memory ---------------------------------------------------------------------- */

/* Memory that the host can touch also where device memory is unbacked, and all devices. */
static CUresult host_alloc(void **out, size_t bytes, unsigned flags) {
    size_t rounded = (bytes + HOST_ALIGN - 1) / HOST_ALIGN * HOST_ALIGN;
    sim_region *region;
    if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (flags & ~(unsigned)CU_MEMHOSTALLOC_PORTABLE) {
        return tn__sim_refuse("cuMemHostAlloc: flags 0x%x are not simulated", flags);
    }
    region = rounded < bytes ? NULL : tn__sim_plain_create(SIM_HOST, rounded);
    if (!region) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (void *)(uintptr_t)region->base;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    SIM_ENTER(cuMemHostAlloc);
    return tn__sim_leave(host_alloc(address, bytes, flags));
}

CUresult cuMemFreeHost(void *address) {
    SIM_ENTER(cuMemFreeHost);
    return tn__sim_leave(plain_free((uintptr_t)address, 1));
}

/* ---- what an address is ---------------------------------------------------------------------- */

/* 0 for memory that is not ours, as the driver has it; -2 is its ordinal for that. */
static CUresult pointer_attribute(int attribute, int *value, CUdeviceptr address) {
    const sim_region *region = tn__sim_region_find(address);
    const sim_mapping *mapping = region ? tn__sim_mapping_at(region, address) : NULL;
    int device = mapping ? mapping->handle->device : -2;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *value = device == SIM_HOST ? CU_MEMORYTYPE_HOST : mapping ? CU_MEMORYTYPE_DEVICE : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *value = device == SIM_HOST ? tn__sim_current() : device;
        return CUDA_SUCCESS;
    default: return tn__sim_refuse("cuPointerGetAttributes: attribute %d", attribute);
    }
}

CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **values,
                                CUdeviceptr address) {
    SIM_ENTER(cuPointerGetAttributes);
    CUresult result = attributes && values ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = pointer_attribute(attributes[i], values[i], address);
    return tn__sim_leave(result);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    SIM_ENTER(cuMemGetInfo_v2);
    const sim_device *device = &tn__sim.devices[tn__sim_current()];
    int has_free = device->memory_bytes > device->used_bytes;
    if (!free_bytes || !total_bytes) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    *free_bytes = has_free ? device->memory_bytes - device->used_bytes : 0;
    *total_bytes = device->memory_bytes;
    return tn__sim_leave(CUDA_SUCCESS);
}

/* ---- addresses ------------------------------------------------------------------------------- */

/* The hint is a wish that the driver may refuse; this one always does. */
static CUresult reserve(CUdeviceptr *out, size_t bytes, size_t alignment,
                        unsigned long long flags) {
    sim_region *region;
    if (!out || !is_whole_granules(bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
    if (flags) return tn__sim_refuse("cuMemAddressReserve: flags 0x%llx", flags);
    region = tn__sim_region_create(bytes, alignment, 0);
    if (!region) return CUDA_ERROR_OUT_OF_MEMORY;
    tn__sim_spend(tn__sim_cost(SIM_COST_RESERVE, bytes));
    *out = region->base;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    (void)hint;
    SIM_ENTER(cuMemAddressReserve);
    return tn__sim_leave(reserve(address, bytes, alignment, flags));
}

static CUresult address_free(CUdeviceptr address, size_t bytes) {
    sim_region *region = tn__sim_region_find(address);
    if (!region || region->is_plain) return CUDA_ERROR_INVALID_VALUE;
    if (region->base != address || region->bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    if (region->mapped) return CUDA_ERROR_INVALID_VALUE;
    tn__sim_region_destroy(region);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    SIM_ENTER(cuMemAddressFree);
    return tn__sim_leave(address_free(address, bytes));
}

/* ---- physical memory ------------------------------------------------------------------------- */

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (!properties) return CUDA_ERROR_INVALID_VALUE;
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
        return tn__sim_refuse("only pinned memory is simulated, not type %d", properties->type);
    }
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return tn__sim_refuse("handles are exported as file descriptors only, not as type %d",
                              properties->requestedHandleTypes);
    }
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return tn__sim_refuse("only device memory is simulated, not location %d",
                              properties->location.type);
    }
    if (properties->allocFlags.compressionType) {
        return tn__sim_refuse("compressible memory is not simulated");
    }
    return device_exists(properties->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult create(CUmemGenericAllocationHandle *out, size_t bytes,
                       const CUmemAllocationProp *properties, unsigned long long flags) {
    CUresult result = check_properties(properties);
    sim_handle *handle;
    if (result != CUDA_SUCCESS) return result;
    if (!out || !is_whole_granules(bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (flags) return tn__sim_refuse("cuMemCreate: flags 0x%llx", flags);
    handle = tn__sim_handle_create(properties->location.id, bytes,
                                   properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE);
    if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
    tn__sim_spend(tn__sim_cost(SIM_COST_CREATE, bytes));
    *out = tn__sim_token_create(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags) {
    SIM_ENTER(cuMemCreate);
    return tn__sim_leave(create(handle, bytes, properties, flags));
}

CUresult cuMemRelease(CUmemGenericAllocationHandle token) {
    SIM_ENTER(cuMemRelease);
    sim_handle *handle = tn__sim_handle_find(token);
    if (!handle) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    tn__sim_spend(tn__sim_cost(SIM_COST_RELEASE, handle->bytes));
    tn__sim_token_release(token);
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties,
                                       int option) {
    SIM_ENTER(cuMemGetAllocationGranularity);
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS) return tn__sim_leave(result);
    if (!out || option < 0 || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
        return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    *out = granularity();
    return tn__sim_leave(CUDA_SUCCESS);
}

/* ---- mapping --------------------------------------------------------------------------------- */

/* The region if [address, +bytes) are granules of one reserved region, else NULL. */
static sim_region *reserved_region(CUdeviceptr address, size_t bytes) {
    sim_region *region = tn__sim_region_containing(address, bytes);
    if (!region || region->is_plain || !is_whole_granules(bytes)) return NULL;
    return (address - region->base) % granularity() == 0 ? region : NULL;
}

static int anything_is_mapped(const sim_region *region, CUdeviceptr address, size_t bytes) {
    for (CUdeviceptr at = address; at < address + bytes; at += granularity()) {
        if (tn__sim_mapping_at(region, at)) return 1;
    }
    return 0;
}

static CUresult map(CUdeviceptr address, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle token, unsigned long long flags) {
    sim_handle *handle = tn__sim_handle_find(token);
    sim_region *region = reserved_region(address, bytes);
    if (!handle || !region) return CUDA_ERROR_INVALID_VALUE;
    if (flags) return tn__sim_refuse("cuMemMap: flags 0x%llx", flags);
    if (offset || bytes != handle->bytes) {
        return tn__sim_refuse("cuMemMap: a handle is mapped whole: %zu bytes at %zu of %zu", bytes,
                              offset, handle->bytes);
    }
    if (anything_is_mapped(region, address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    tn__sim_mapping_create(region, address, handle);
    tn__sim_spend(tn__sim_cost(SIM_COST_MAP, bytes));
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    SIM_ENTER(cuMemMap);
    return tn__sim_leave(map(address, bytes, offset, handle, flags));
}

/* What the descriptors ask for, for memory of that device. */
static CUresult check_reach(const CUmemAccessDesc *descriptors, size_t count, int device) {
    for (size_t i = 0; i < count; i++) {
        int id = descriptors[i].location.id;
        if (id != device && !tn__sim_can_access(device, id)) {
            return tn__sim_refuse("cuMemSetAccess: device %d can not reach device %d", id, device);
        }
    }
    return CUDA_SUCCESS;
}

static CUresult check_descriptors(const CUmemAccessDesc *descriptors, size_t count) {
    if (!descriptors || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        int flags = descriptors[i].flags;
        if (descriptors[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
            return tn__sim_refuse("cuMemSetAccess: location %d", descriptors[i].location.type);
        }
        if (!device_exists(descriptors[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
            flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

static void apply_access(sim_mapping *mapping, const CUmemAccessDesc *descriptor) {
    uint32_t bit = 1u << descriptor->location.id;
    mapping->readable &= ~bit;
    mapping->writable &= ~bit;
    if (descriptor->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) mapping->readable |= bit;
    if (descriptor->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) mapping->writable |= bit;
}

static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *descriptors,
                           size_t count) {
    const sim_region *region = reserved_region(address, bytes);
    CUresult result = check_descriptors(descriptors, count);
    CUdeviceptr end = address + bytes;
    sim_span span;
    if (result != CUDA_SUCCESS) return result;
    if (!region || !tn__sim_range_is_mapped_whole(region, address, bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (CUdeviceptr at = address; at < end && tn__sim_span_next(region, &at, end, &span);) {
        result = check_reach(descriptors, count, span.mapping->handle->device);
        if (result != CUDA_SUCCESS) return result;
    }
    while (address < end && tn__sim_span_next(region, &address, end, &span)) {
        for (size_t i = 0; i < count; i++)
            apply_access(span.mapping, &descriptors[i]);
        if (tn__sim.config.backed && !tn__sim_mapping_expose(span.mapping)) {
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        tn__sim_spend(tn__sim_cost(SIM_COST_SET_ACCESS, span.bytes));
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *descriptors,
                        size_t count) {
    SIM_ENTER(cuMemSetAccess);
    return tn__sim_leave(set_access(address, bytes, descriptors, count));
}

static CUresult unmap(CUdeviceptr address, size_t bytes) {
    sim_region *region = reserved_region(address, bytes);
    CUdeviceptr end = address + bytes;
    sim_operation operation;
    sim_span span;
    if (!region || !tn__sim_range_is_mapped_whole(region, address, bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    tn__sim_operation_of_host(&operation, "cuMemUnmap");
    while (address < end && tn__sim_span_next(region, &address, end, &span)) {
        tn__sim_check_unused(&operation, span.mapping);
        tn__sim_mapping_destroy(region, span.mapping);
        tn__sim_spend(tn__sim_cost(SIM_COST_UNMAP, span.bytes));
    }
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    SIM_ENTER(cuMemUnmap);
    return tn__sim_leave(unmap(address, bytes));
}
