/* The driver calls on the library, devices, contexts and errors.
 *
 * A device has one context, its primary one, whose handle is the device's place in the state. The
 * context is alive while it is retained. Releasing it for the last time ends it for every thread
 * that has it current (error 709); memory, streams and events that are left stay on the books, so
 * that the check at unload finds them, though a real driver would sweep them away.
 */
#include <stdio.h>
#include <string.h>

#include "sim_core.h"

#define DRIVER_VERSION 13000

typedef struct error_row {
    CUresult code;
    const char *name;
    const char *text;
} error_row;

static const error_row error_rows[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed now"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the wait would never end"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const error_row *find_error(CUresult code) {
    for (size_t i = 0; i < sizeof error_rows / sizeof error_rows[0]; i++) {
        if (error_rows[i].code == code) return &error_rows[i];
    }
    return NULL;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    SIM_ENTER(cuGetErrorName);
    const error_row *row = find_error(error);
    if (text) *text = row ? row->name : NULL;
    return tn__sim_leave(row && text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    SIM_ENTER(cuGetErrorString);
    const error_row *row = find_error(error);
    if (text) *text = row ? row->text : NULL;
    return tn__sim_leave(row && text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* ---- the library ----------------------------------------------------------------------------- */

CUresult cuInit(unsigned flags) {
    SIM_ENTER(cuInit);
    if (flags) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    tn__sim.initialized = 1;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    SIM_ENTER(cuDriverGetVersion);
    if (version) *version = DRIVER_VERSION;
    return tn__sim_leave(version ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

typedef void (*any_function)(void);

static const struct {
    const char *name;
    any_function function;
} functions[] = {
#define SIM_FUNCTION_ROW(name, needs, memory) {#name, (any_function)name},
    SIM_CALL_TABLE(SIM_FUNCTION_ROW)
#undef SIM_FUNCTION_ROW
};

/* "cuMemAlloc" and "cuMemAlloc_v2" are both cuMemAlloc_v2. */
static int is_name_of(const char *symbol, const char *name) {
    size_t length = strlen(symbol);
    if (strncmp(symbol, "cu", 2) != 0 || strncmp(symbol, name, length) != 0) return 0;
    return name[length] == '\0' || strcmp(name + length, "_v2") == 0;
}

static any_function find_function(const char *symbol) {
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        if (is_name_of(symbol, functions[i].name)) return functions[i].function;
    }
    return NULL;
}

static CUresult get_function(const char *symbol, void **out, uint64_t flags, int *status) {
    any_function function;
    if (!symbol || !out) return CUDA_ERROR_INVALID_VALUE;
    if (flags & ~(uint64_t)CU_GET_PROC_ADDRESS_LEGACY_STREAM) {
        return tn__sim_refuse("cuGetProcAddress: flags 0x%llx", (unsigned long long)flags);
    }
    function = find_function(symbol);
    memcpy(out, &function, sizeof function);
    if (status) {
        *status = function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    if (function) return CUDA_SUCCESS;
    tn__sim_refuse("%s is not simulated", symbol);
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             int *status) {
    (void)version;
    SIM_ENTER(cuGetProcAddress_v2);
    return tn__sim_leave(get_function(symbol, function, flags, status));
}

/* ---- devices --------------------------------------------------------------------------------- */

static int device_exists(CUdevice device) {
    return device >= 0 && device < tn__sim.config.device_count;
}

CUresult cuDeviceGetCount(int *count) {
    SIM_ENTER(cuDeviceGetCount);
    if (count) *count = tn__sim.config.device_count;
    return tn__sim_leave(count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    SIM_ENTER(cuDeviceGet);
    if (!device) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(ordinal)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    SIM_ENTER(cuDeviceGetName);
    if (!name || bytes <= 0) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(device)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)bytes, "Tenure simulated CUDA device");
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    SIM_ENTER(cuDeviceTotalMem_v2);
    if (!bytes) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(device)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    *bytes = tn__sim.devices[device].memory_bytes;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    SIM_ENTER(cuDeviceGetUuid_v2);
    if (!uuid) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(device)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    memcpy(uuid->bytes, "tenure simulated", sizeof uuid->bytes);
    uuid->bytes[sizeof uuid->bytes - 1] = (char)device;
    return tn__sim_leave(CUDA_SUCCESS);
}

int tn__sim_can_access(int device, int peer) {
    return device != peer && !((tn__sim.config.isolated_devices >> device & 1) |
                               (tn__sim.config.isolated_devices >> peer & 1));
}

CUresult cuDeviceCanAccessPeer(int *can_access, CUdevice device, CUdevice peer) {
    SIM_ENTER(cuDeviceCanAccessPeer);
    if (!can_access) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(device) || !device_exists(peer)) {
        return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    }
    *can_access = tn__sim_can_access(device, peer);
    return tn__sim_leave(CUDA_SUCCESS);
}

/* Those of an H200; what the simulation lacks is answered with 0. */
static const struct {
    int attribute;
    int value;
} attributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 0},
    {CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0},
};

static CUresult get_attribute(int *value, int attribute, CUdevice device) {
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (!device_exists(device)) return CUDA_ERROR_INVALID_DEVICE;
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++) {
        if (attributes[i].attribute != attribute) continue;
        *value = attributes[i].value;
        return CUDA_SUCCESS;
    }
    return tn__sim_refuse("cuDeviceGetAttribute: attribute %d is not simulated", attribute);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    SIM_ENTER(cuDeviceGetAttribute);
    return tn__sim_leave(get_attribute(value, attribute, device));
}

/* ---- contexts -------------------------------------------------------------------------------- */

CUcontext tn__sim_context_of(int device) { return (CUcontext)&tn__sim.devices[device]; }

/* Its device, or -1. */
static int device_of(CUcontext context) {
    for (int i = 0; i < tn__sim.config.device_count; i++) {
        if (tn__sim_context_of(i) == context) return i;
    }
    return -1;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    SIM_ENTER(cuDevicePrimaryCtxRetain);
    if (!context) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(device)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    tn__sim.devices[device].primary_retained++;
    *context = tn__sim_context_of(device);
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    SIM_ENTER(cuDevicePrimaryCtxRelease_v2);
    if (!device_exists(device)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    if (tn__sim.devices[device].primary_retained == 0) {
        return tn__sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    tn__sim.devices[device].primary_retained--;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    SIM_ENTER(cuDevicePrimaryCtxGetState);
    if (!flags || !is_active) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!device_exists(device)) return tn__sim_leave(CUDA_ERROR_INVALID_DEVICE);
    *flags = 0;
    *is_active = tn__sim.devices[device].primary_retained > 0;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    SIM_ENTER(cuCtxGetCurrent);
    if (!context) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    *context = tn__sim_thread()->depth ? tn__sim_context_of(tn__sim_current()) : NULL;
    return tn__sim_leave(CUDA_SUCCESS);
}

static CUresult push(CUcontext context) {
    sim_thread *thread = tn__sim_thread();
    int device = device_of(context);
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (tn__sim.devices[device].primary_retained == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (thread->depth == SIM_CONTEXT_DEPTH) {
        return tn__sim_refuse("the context stack is %d deep", SIM_CONTEXT_DEPTH);
    }
    thread->devices[thread->depth++] = device;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    SIM_ENTER(cuCtxPushCurrent_v2);
    return tn__sim_leave(push(context));
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    SIM_ENTER(cuCtxPopCurrent_v2);
    sim_thread *thread = tn__sim_thread();
    if (!thread->depth) return tn__sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (context) *context = tn__sim_context_of(tn__sim_current());
    thread->depth--;
    return tn__sim_leave(CUDA_SUCCESS);
}

/* Replaces the top of the stack, or with NULL takes it away. */
static CUresult set_current(CUcontext context) {
    sim_thread *thread = tn__sim_thread();
    int had_one = thread->depth > 0;
    CUresult result;
    thread->depth -= had_one;
    if (!context) return CUDA_SUCCESS;
    result = push(context);
    if (result != CUDA_SUCCESS) thread->depth += had_one;
    return result;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    SIM_ENTER(cuCtxSetCurrent);
    return tn__sim_leave(set_current(context));
}

CUresult cuCtxGetDevice(CUdevice *device) {
    SIM_ENTER(cuCtxGetDevice);
    if (!device) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    if (!tn__sim_thread()->depth) return tn__sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    *device = tn__sim_current();
    return tn__sim_leave(CUDA_SUCCESS);
}
