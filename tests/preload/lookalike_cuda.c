/* A libcuda.so.1 for the tests of the drop-in: the simulated driver, and what that lacks of a real
 * one's memory calls.
 *
 * It opens the simulated driver (TENURE_SIM_LIBRARY) by itself and looks its calls up by name, as
 * the drivers of some systems do with what is behind them. What it does not define is found in the
 * simulated driver, which it is linked with. cuGetProcAddress here goes by version, flags and
 * status as the real one's documentation says.
 *
 * lookalike_* tell what it has been asked.
 */
#include "lookalike_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *inner(const char *name) {
    static void *library;
    void *found;
    if (!library) library = dlopen(TENURE_SIM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    found = library ? dlsym(library, name) : NULL;
    if (!found) abort();
    return found;
}

#define INNER(name) ((__typeof__(&name))inner(#name))

/* ---- calls that wait ------------------------------------------------------------------------- */

static struct {
    _Atomic int nth; /* 0: open */
    _Atomic int is_waiting;
} gates[LOOKALIKE_GATES];

void lookalike_hold(int gate, int nth) { gates[gate].nth = nth; }
int lookalike_is_waiting(int gate) { return gates[gate].is_waiting; }

static void pass(int gate) {
    if (gates[gate].nth == 0) return;
    if (gates[gate].nth > 1) {
        gates[gate].nth--;
        return;
    }
    gates[gate].is_waiting = 1;
    while (gates[gate].nth)
        sched_yield();
    gates[gate].is_waiting = 0;
}

/* ---- plain memory, by address ---------------------------------------------------------------- */

enum { RANGES_MAX = 4096 };
typedef struct range {
    CUdeviceptr base;
    size_t bytes;
} range;
static range ranges[RANGES_MAX];
static size_t range_count;
static int lookups_of_older;

/* A forked child is alone, and another thread of the parent may have had the mutex. */
static pthread_mutex_t ranges_mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t own_process;

__attribute__((constructor)) static void note_process(void) { own_process = getpid(); }

static void lock_ranges(void) {
    if (getpid() == own_process) pthread_mutex_lock(&ranges_mutex);
}

static void unlock_ranges(void) {
    if (getpid() == own_process) pthread_mutex_unlock(&ranges_mutex);
}

static CUresult note_range(CUresult result, const CUdeviceptr *out, size_t bytes) {
    if (result != CUDA_SUCCESS) return result;
    lock_ranges();
    if (range_count < RANGES_MAX) ranges[range_count++] = (range){*out, bytes};
    unlock_ranges();
    return result;
}

static size_t find_locked(CUdeviceptr address) {
    size_t i = 0;
    while (i < range_count && address - ranges[i].base >= ranges[i].bytes)
        i++;
    return i;
}

/* Its number from 1 on; 0: none has the address. */
static size_t find_range(CUdeviceptr address, range *out) {
    size_t i;
    int is_found;
    lock_ranges();
    i = find_locked(address);
    is_found = i < range_count;
    if (is_found) *out = ranges[i];
    unlock_ranges();
    return is_found ? i + 1 : 0;
}

/* The one that begins there, before its memory ends: another thread may have that again at once. */
static int take_range(CUdeviceptr address, range *out) {
    size_t i;
    int is_found;
    lock_ranges();
    i = find_locked(address);
    is_found = i < range_count && ranges[i].base == address;
    if (is_found) {
        *out = ranges[i];
        ranges[i] = ranges[--range_count];
    }
    unlock_ranges();
    return is_found;
}

size_t lookalike_ranges(void) { return range_count; }

size_t lookalike_bytes(void) {
    size_t bytes = 0;
    for (size_t i = 0; i < range_count; i++)
        bytes += ranges[i].bytes;
    return bytes;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    if (bytes > (size_t)32 << 20) pass(LOOKALIKE_LARGE_ALLOC);
    return note_range(INNER(cuMemAlloc_v2)(out, bytes), out, bytes);
}

/* The function of CUDA before 3.2, with 32 bits: nobody takes it over. */
CUresult cuMemAlloc(unsigned *out, unsigned bytes) {
    (void)out;
    (void)bytes;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    range taken = {0, 0};
    pass(LOOKALIKE_FREE);
    int is_taken = take_range(address, &taken);
    CUresult result = INNER(cuMemFree_v2)(address);
    if (is_taken && result != CUDA_SUCCESS) note_range(CUDA_SUCCESS, &taken.base, taken.bytes);
    return result;
}

CUresult lookalike_lose(CUdeviceptr address) { return cuMemFree_v2(address); }

CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
                            unsigned element) {
    size_t row = (width + 511) / 512 * 512;
    CUresult result;
    if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
    result = cuMemAlloc_v2(out, row * height);
    if (result == CUDA_SUCCESS) *pitch = row;
    return result;
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags) {
    return flags == 1 ? cuMemAlloc_v2(out, bytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    range found = {0, 0};
    if (!find_range(address, &found)) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = found.base;
    if (bytes) *bytes = found.bytes;
    return CUDA_SUCCESS;
}

enum { BUFFER_ID = 7, RANGE_START = 11, RANGE_BYTES = 12 };

static CUresult one_attribute(void *value, int attribute, CUdeviceptr address, int is_one) {
    range found = {0, 0};
    unsigned long long number = find_range(address, &found);
    if (!number && is_one) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == BUFFER_ID || attribute == RANGE_START || attribute == RANGE_BYTES) {
        if (attribute == RANGE_START) number = found.base;
        if (attribute == RANGE_BYTES) number = found.bytes;
        memcpy(value, &number, sizeof number);
        return CUDA_SUCCESS;
    }
    return INNER(cuPointerGetAttributes)(1, &attribute, &value, address);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    return one_attribute(value, attribute, address, 1);
}

CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **values,
                                CUdeviceptr address) {
    CUresult result = attributes && values ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = one_attribute(values[i], attributes[i], address, 0);
    return result;
}

/* ---- stream-ordered memory ------------------------------------------------------------------- */

static CUmemoryPool default_pools[2], current_pools[2];

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUresult result = CUDA_SUCCESS;
    if (device < 0 || device >= 2) return CUDA_ERROR_INVALID_DEVICE;
    if (!default_pools[device]) {
        result = INNER(cuMemPoolCreate)(&default_pools[device], &properties);
    }
    *out = default_pools[device];
    return result;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) {
    if (!current_pools[device]) return cuDeviceGetDefaultMemPool(out, device);
    *out = current_pools[device];
    return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    current_pools[device] = pool;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *accesses, size_t count) {
    return pool && accesses && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    CUmemoryPool pool = NULL;
    CUdevice device = 0;
    CUresult result = INNER(cuCtxGetDevice)(&device);
    if (result == CUDA_SUCCESS) result = cuDeviceGetMemPool(&pool, device);
    return result == CUDA_SUCCESS ? INNER(cuMemAllocFromPoolAsync)(out, bytes, pool, stream)
                                  : result;
}

static CUstream per_thread(CUstream stream) { return stream ? stream : CU_STREAM_PER_THREAD; }

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream) {
    return cuMemAllocAsync(out, bytes, per_thread(stream));
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
    return INNER(cuMemFreeAsync)(address, per_thread(stream));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool,
                                      CUstream stream) {
    return INNER(cuMemAllocFromPoolAsync)(out, bytes, pool, per_thread(stream));
}

/* ---- other processes ------------------------------------------------------------------------- */

typedef struct ipc_text {
    char magic[8];
    CUdeviceptr base;
    size_t bytes;
} ipc_text;

static CUdeviceptr last_opened, last_closed;

CUdeviceptr lookalike_last_opened(void) { return last_opened; }
CUdeviceptr lookalike_last_closed(void) { return last_closed; }

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ipc_text text = {"simipc", 0, 0};
    CUresult result = cuMemGetAddressRange_v2(&text.base, &text.bytes, address);
    if (result != CUDA_SUCCESS) return result;
    memset(handle, 0, sizeof *handle);
    memset(handle->reserved + 40, 9, 16); /* as a real one's, which leaves 8 bytes at the end */
    memcpy(handle->reserved, &text, sizeof text);
    if (getenv("LOOKALIKE_FULL_HANDLES")) memset(handle->reserved + 48, 7, 16);
    return CUDA_SUCCESS;
}

/* Of another process: memory of the same size here. */
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    static const char zeros[8];
    ipc_text text;
    memcpy(&text, handle.reserved, sizeof text);
    if (flags != 1 || memcmp(text.magic, "simipc", 7) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(handle.reserved + 56, zeros, 8) != 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuMemAlloc_v2(out, text.bytes);
    last_opened = *out;
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    last_closed = address;
    return cuMemFree_v2(address);
}

/* ---- peers ----------------------------------------------------------------------------------- */

/* The simulated driver has no such call: of plain memory it would be, and pages are told of it one
 * by one. */
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    return peer && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceCanAccessPeer(int *can_access, CUdevice device, CUdevice peer) {
    pass(LOOKALIKE_PEER);
    return INNER(cuDeviceCanAccessPeer)(can_access, device, peer);
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    return peer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- contexts -------------------------------------------------------------------------------- */

CUresult cuCtxSynchronize(void) {
    pass(LOOKALIKE_CONTEXT_WAIT);
    return INNER(cuCtxSynchronize)();
}

CUresult cuEventSynchronize(CUevent event) {
    pass(LOOKALIKE_EVENT_WAIT);
    return INNER(cuEventSynchronize)(event);
}

static int has_own_context;
static _Atomic int retained[2];

int lookalike_retained(CUdevice device) { return retained[device]; }

void lookalike_use_own_context(int is_own) { has_own_context = is_own; }

CUresult cuCtxGetCurrent(CUcontext *context) {
    static char own;
    CUresult result = INNER(cuCtxGetCurrent)(context);
    if (result == CUDA_SUCCESS && has_own_context) *context = (CUcontext)&own;
    return result;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult result = INNER(cuDevicePrimaryCtxRetain)(context, device);
    if (result == CUDA_SUCCESS) retained[device]++;
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUresult result = INNER(cuDevicePrimaryCtxRelease_v2)(device);
    if (result == CUDA_SUCCESS) retained[device]--;
    return result;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    int count = 0;
    CUresult result = INNER(cuDeviceGetCount)(&count);
    if (result != CUDA_SUCCESS) return result;
    if (device < 0 || device >= count) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *is_active = retained[device] > 0 && !has_own_context;
    return CUDA_SUCCESS;
}

static long left_at_reset = -1;

long lookalike_left_at_reset(void) { return left_at_reset; }

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    (void)device;
    pass(LOOKALIKE_RESET);
    left_at_reset = (long)range_count;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }

/* ---- cuGetProcAddress ------------------------------------------------------------------------ */

/* Base name, first version, variant (0: none, 1: legacy, 2: per thread), function. */
static const struct {
    const char *base;
    int since;
    int variant;
    void *function;
} rows[] = {
    {"cuMemAlloc", 3020, 0, (void *)cuMemAlloc_v2},
    {"cuMemAlloc", 2000, 0, (void *)cuMemAlloc},
    {"cuMemFree", 3020, 0, (void *)cuMemFree_v2},
    {"cuMemAllocPitch", 3020, 0, (void *)cuMemAllocPitch_v2},
    {"cuMemAllocManaged", 6000, 0, (void *)cuMemAllocManaged},
    {"cuMemGetAddressRange", 3020, 0, (void *)cuMemGetAddressRange_v2},
    {"cuPointerGetAttribute", 4000, 0, (void *)cuPointerGetAttribute},
    {"cuPointerGetAttributes", 7000, 0, (void *)cuPointerGetAttributes},
    {"cuDeviceGetDefaultMemPool", 11020, 0, (void *)cuDeviceGetDefaultMemPool},
    {"cuDeviceGetMemPool", 11020, 0, (void *)cuDeviceGetMemPool},
    {"cuDeviceSetMemPool", 11020, 0, (void *)cuDeviceSetMemPool},
    {"cuMemAllocAsync", 11020, 1, (void *)cuMemAllocAsync},
    {"cuMemAllocAsync", 11020, 2, (void *)cuMemAllocAsync_ptsz},
    {"cuMemFreeAsync", 11020, 2, (void *)cuMemFreeAsync_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, 2, (void *)cuMemAllocFromPoolAsync_ptsz},
    {"cuIpcGetMemHandle", 4010, 0, (void *)cuIpcGetMemHandle},
    {"cuIpcOpenMemHandle", 11000, 0, (void *)cuIpcOpenMemHandle_v2},
    {"cuIpcCloseMemHandle", 4010, 0, (void *)cuIpcCloseMemHandle},
    {"cuCtxSynchronize", 2000, 0, (void *)cuCtxSynchronize},
    {"cuCtxGetCurrent", 4000, 0, (void *)cuCtxGetCurrent},
    {"cuDevicePrimaryCtxRetain", 7000, 0, (void *)cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 11000, 0, (void *)cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxGetState", 7000, 0, (void *)cuDevicePrimaryCtxGetState},
    {"cuDevicePrimaryCtxReset", 11000, 0, (void *)cuDevicePrimaryCtxReset_v2},
    {"cuDevicePrimaryCtxReset", 7000, 0, (void *)cuDevicePrimaryCtxReset},
    {"cuGetProcAddress", 12000, 0, (void *)cuGetProcAddress_v2},
    {"cuGetProcAddress", 11030, 0, (void *)cuGetProcAddress},
};

enum { FOUND, NOT_FOUND, VERSION_TOO_OLD };

static int is_wanted(int variant, uint64_t flags) {
    return variant == 0 || variant == (flags & 2 ? 2 : 1);
}

static int find_function(const char *symbol, void **out, int version, uint64_t flags) {
    int answer = NOT_FOUND;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].base, symbol) != 0 || !is_wanted(rows[i].variant, flags)) continue;
        if (version >= rows[i].since) return *out = rows[i].function, FOUND;
        answer = VERSION_TOO_OLD;
    }
    return answer;
}

static CUresult get_function(const char *symbol, void **out, int version, uint64_t flags,
                             int *status) {
    int answer;
    if (!symbol || !out) return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    answer = find_function(symbol, out, version, flags);
    if (answer == NOT_FOUND && (flags & 2) == 0) {
        return INNER(cuGetProcAddress_v2)(symbol, out, version, flags, status);
    }
    if (status) *status = answer;
    return answer == FOUND || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags,
                             int *status) {
    return get_function(symbol, out, version, flags, status);
}

/* The older one has no status: what is not there is an error. */
CUresult cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags) {
    lookups_of_older++;
    return get_function(symbol, out, version, flags, NULL);
}

int lookalike_lookups_of_older(void) { return lookups_of_older; }
