/* What lookalike_cuda.c adds to the simulated driver's calls. */
#ifndef TENURE_LOOKALIKE_CUDA_H
#define TENURE_LOOKALIKE_CUDA_H

#include "sim_abi.h"
#include "simcuda.h"

typedef struct CUipcMemHandle {
    char reserved[64];
} CUipcMemHandle;

CUresult cuMemAlloc(unsigned *out, unsigned bytes);
CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
                            unsigned element);
CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags);
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device);
CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device);
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *accesses, size_t count);
CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream);
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream);
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool,
                                      CUstream stream);
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr address);
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);
CUresult cuCtxDisablePeerAccess(CUcontext peer);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active);
CUresult cuDevicePrimaryCtxReset(CUdevice device);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
CUresult cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags);

/* Whether the threads' current context is one that the program has made, and there is no primary
 * one; else it is that. */
void lookalike_use_own_context(int is_own);

/* The nth call from now on, and those after it, wait until they are let go on (0); whether one
 * does. */
enum {
    LOOKALIKE_CONTEXT_WAIT,
    LOOKALIKE_EVENT_WAIT,
    LOOKALIKE_RESET,
    LOOKALIKE_LARGE_ALLOC, /* cuMemAlloc of more than 32 MiB */
    LOOKALIKE_PEER,        /* cuDeviceCanAccessPeer */
    LOOKALIKE_FREE,
    LOOKALIKE_GATES
};
void lookalike_hold(int gate, int nth);
int lookalike_is_waiting(int gate);

/* How often the device's primary context is retained. */
int lookalike_retained(CUdevice device);

/* Memory ends without a call of the program's: with its context, or with a graph. */
CUresult lookalike_lose(CUdeviceptr address);

/* Plain allocations that the driver has now, and their bytes. */
size_t lookalike_ranges(void);
size_t lookalike_bytes(void);

/* What the driver's own cuIpcOpenMemHandle gave and cuIpcCloseMemHandle got last. */
CUdeviceptr lookalike_last_opened(void);
CUdeviceptr lookalike_last_closed(void);

/* Plain allocations at the last reset; -1: there was none. */
long lookalike_left_at_reset(void);

/* Calls of the older cuGetProcAddress. */
int lookalike_lookups_of_older(void);

#endif
