/* The CUDA driver beyond one device and one process: peers, streams of other devices, and physical
 * memory that is exported to and imported from other processes as file descriptors.
 *
 * All of it hangs on optional symbols; a missing one is TN_UNSUPPORTED by name. An ordinal is a
 * CUdevice: CUDA numbers its devices so.
 */
#include "driver_cuda.h"

#include <string.h>

/* ---- peers ----------------------------------------------------------------------------------- */

tn_status tn__cuda_peer_can_access(tn__driver_device *device, int peer, int *out) {
    tn__cuda_call call;
    int can_access = 0;
    TN_TRY(tn__cuda_require_vmm(device));
    TN__CUDA_NEED(device, device_can_access, "cuDeviceCanAccessPeer");
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->device_can_access(&can_access, peer, device->device);
    TN_TRY(tn__cuda_end(&call, code, "cuDeviceCanAccessPeer(%d, %d)", peer, device->device));
    *out = can_access;
    return TN_OK;
}

tn_status tn__cuda_peer_set_access(tn__driver_device *device, void *address, size_t bytes, int peer,
                                   int is_allowed) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_require_vmm(device));
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_SET_ACCESS, &call));
    tn__cu_access access = {{TN__CU_MEM_LOCATION_TYPE_DEVICE, peer},
                            is_allowed ? TN__CU_MEM_ACCESS_READ_WRITE : TN__CU_MEM_ACCESS_NONE};
    int code = device->cu->mem_set_access((tn__cu_address)(uintptr_t)address, bytes, &access, 1);
    return tn__cuda_end(&call, code, "cuMemSetAccess(%p, %zu bytes, device %d)", address, bytes,
                        peer);
}

/* Asks in the context itself: it need not be a primary one. */
static int ordinal_of_context(const tn__cu_calls *cu, void *context, tn__cu_device *out) {
    void *popped;
    int code = cu->context_push(context);
    if (code != TN__CU_SUCCESS) return code;
    code = cu->context_device(out);
    (void)cu->context_pop(&popped);
    return code;
}

/* A driver that can not tell is taken at its word that there is one device: the caller's. So is one
 * that may not be asked, since the stream captures. */
tn_status tn__cuda_stream_ordinal(tn__driver_device *device, tn_stream stream, int *out) {
    tn__cuda_call call;
    tn__cu_device ordinal = device->device;
    void *context = device->context;
    if (device->cu->stream_context && device->cu->context_device) {
        TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
        int code = TN__CU_SUCCESS;
        if (!tn__cuda_is_in_capture(device->cu, stream)) {
            code = device->cu->stream_context(stream, &context);
        }
        if (code == TN__CU_SUCCESS && context != device->context) {
            code = ordinal_of_context(device->cu, context, &ordinal);
        }
        TN_TRY(tn__cuda_end(&call, code, "cuStreamGetCtx(%p)", stream));
    }
    *out = ordinal;
    return TN_OK;
}

/* ---- sharing --------------------------------------------------------------------------------- */

tn_status tn__cuda_share_create(tn__driver_device *device, size_t bytes, tn__handle *out) {
    tn__cuda_call call;
    tn__cu_handle handle = 0;
    TN_TRY(tn__cuda_require_vmm(device));
    TN__CUDA_NEED(device, mem_export, "cuMemExportToShareableHandle");
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_CREATE, &call));
    tn__cu_allocation allocation = {.type = TN__CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .handle_types = TN__CU_MEM_HANDLE_TYPE_FILE_DESCRIPTOR,
                                    .location = {TN__CU_MEM_LOCATION_TYPE_DEVICE, device->device}};
    int code = device->cu->mem_create(&handle, bytes, &allocation, 0);
    TN_TRY(tn__cuda_end(&call, code, "cuMemCreate(%zu bytes, shareable)", bytes));
    *out = handle;
    return TN_OK;
}

tn_status tn__cuda_share_export(tn__driver_device *device, tn__handle handle, int *file) {
    tn__cuda_call call;
    int made = -1;
    TN_TRY(tn__cuda_require_vmm(device));
    TN__CUDA_NEED(device, mem_export, "cuMemExportToShareableHandle");
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_SHARE, &call));
    int code = device->cu->mem_export(&made, handle, TN__CU_MEM_HANDLE_TYPE_FILE_DESCRIPTOR, 0);
    TN_TRY(tn__cuda_end(&call, code, "cuMemExportToShareableHandle()"));
    *file = made;
    return TN_OK;
}

tn_status tn__cuda_share_import(tn__driver_device *device, int file, tn__handle *out) {
    tn__cuda_call call;
    tn__cu_handle handle = 0;
    TN_TRY(tn__cuda_require_vmm(device));
    TN__CUDA_NEED(device, mem_import, "cuMemImportFromShareableHandle");
    TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_SHARE, &call));
    int code = device->cu->mem_import(&handle, (void *)(intptr_t)file,
                                      TN__CU_MEM_HANDLE_TYPE_FILE_DESCRIPTOR);
    TN_TRY(tn__cuda_end(&call, code, "cuMemImportFromShareableHandle(file %d)", file));
    *out = handle;
    return TN_OK;
}

/* A driver that can not tell is taken at its word that it is the caller's. */
tn_status tn__cuda_share_ordinal(tn__driver_device *device, tn__handle handle, int *out) {
    tn__cuda_call call;
    tn__cu_allocation allocation = {.location = {.id = device->device}};
    if (device->cu->mem_properties) {
        TN_TRY(tn__cuda_begin(device, TN_CALL_MEM_SHARE, &call));
        int code = device->cu->mem_properties(&allocation, handle);
        TN_TRY(tn__cuda_end(&call, code, "cuMemGetAllocationPropertiesFromHandle()"));
    }
    *out = allocation.location.id;
    return TN_OK;
}

tn_status tn__cuda_uuid(tn__driver_device *device, unsigned char out[16]) {
    tn__cuda_call call;
    char uuid[16] = {0};
    if (device->cu->device_uuid) {
        TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
        int code = device->cu->device_uuid(uuid, device->device);
        TN_TRY(tn__cuda_end(&call, code, "cuDeviceGetUuid()"));
    }
    memcpy(out, uuid, sizeof uuid);
    return TN_OK;
}
