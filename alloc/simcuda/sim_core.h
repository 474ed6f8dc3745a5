/* The heart of the simulated driver: one state, one lock, one host clock, and the entry to and
 * the exit from every call.
 *
 *     cuXxx(...)      tn__sim_enter: alive? locked, counted, faulted, initialised, context
 *       the call      works on tn__sim under the lock, spends virtual time
 *     return          tn__sim_leave: unlocked
 *
 * All calls of all host threads are ordered by the lock: what one thread has synchronised with is
 * known to every later call of any thread. That is one possible order of a program whose threads
 * run freely; races between streams that need another order of host calls are not seen.
 */
#ifndef TENURE_SIM_CORE_H
#define TENURE_SIM_CORE_H

#include <pthread.h>
#include <stdarg.h>

/* The library is built with hidden visibility; what these headers declare is what it exports. */
#pragma GCC visibility push(default)
#include "sim_abi.h"
#include "simcuda.h"
#pragma GCC visibility pop

#define SIM_DEVICES_MAX 32

typedef int64_t sim_ns; /* virtual time; whole nanoseconds, so that sums are exact */

/* Every call: its name, what must hold before it, and whether its time is memory management.
 *   NOTHING   may be called before cuInit
 *   INIT      after cuInit
 *   CONTEXT   with a live context current, that no illegal access has killed */
#define SIM_CALL_TABLE(X)                                                                          \
    X(cuInit, NOTHING, 0)                                                                          \
    X(cuDriverGetVersion, NOTHING, 0)                                                              \
    X(cuGetErrorName, NOTHING, 0)                                                                  \
    X(cuGetErrorString, NOTHING, 0)                                                                \
    X(cuGetProcAddress_v2, NOTHING, 0)                                                             \
    X(cuDeviceGetCount, INIT, 0)                                                                   \
    X(cuDeviceGet, INIT, 0)                                                                        \
    X(cuDeviceGetName, INIT, 0)                                                                    \
    X(cuDeviceGetAttribute, INIT, 0)                                                               \
    X(cuDeviceTotalMem_v2, INIT, 0)                                                                \
    X(cuDeviceGetUuid_v2, INIT, 0)                                                                 \
    X(cuDeviceCanAccessPeer, INIT, 0)                                                              \
    X(cuDevicePrimaryCtxRetain, INIT, 0)                                                           \
    X(cuDevicePrimaryCtxRelease_v2, INIT, 0)                                                       \
    X(cuDevicePrimaryCtxGetState, INIT, 0)                                                         \
    X(cuCtxGetCurrent, INIT, 0)                                                                    \
    X(cuCtxSetCurrent, INIT, 0)                                                                    \
    X(cuCtxPushCurrent_v2, INIT, 0)                                                                \
    X(cuCtxPopCurrent_v2, INIT, 0)                                                                 \
    X(cuCtxGetDevice, INIT, 0)                                                                     \
    X(cuCtxSynchronize, CONTEXT, 0)                                                                \
    X(cuMemGetInfo_v2, CONTEXT, 0)                                                                 \
    X(cuMemAlloc_v2, CONTEXT, 1)                                                                   \
    X(cuMemFree_v2, CONTEXT, 1)                                                                    \
    X(cuMemAddressReserve, CONTEXT, 1)                                                             \
    X(cuMemAddressFree, CONTEXT, 1)                                                                \
    X(cuMemCreate, CONTEXT, 1)                                                                     \
    X(cuMemRelease, CONTEXT, 1)                                                                    \
    X(cuMemMap, CONTEXT, 1)                                                                        \
    X(cuMemSetAccess, CONTEXT, 1)                                                                  \
    X(cuMemUnmap, CONTEXT, 1)                                                                      \
    X(cuMemHostAlloc, CONTEXT, 1)                                                                  \
    X(cuMemFreeHost, CONTEXT, 1)                                                                   \
    X(cuPointerGetAttributes, CONTEXT, 0)                                                          \
    X(cuMemPoolCreate, CONTEXT, 1)                                                                 \
    X(cuMemPoolDestroy, CONTEXT, 1)                                                                \
    X(cuMemPoolSetAttribute, CONTEXT, 0)                                                           \
    X(cuMemPoolGetAttribute, CONTEXT, 0)                                                           \
    X(cuMemPoolTrimTo, CONTEXT, 1)                                                                 \
    X(cuMemAllocFromPoolAsync, CONTEXT, 1)                                                         \
    X(cuMemFreeAsync, CONTEXT, 1)                                                                  \
    X(cuMemGetAllocationGranularity, INIT, 0)                                                      \
    X(cuMemExportToShareableHandle, CONTEXT, 1)                                                    \
    X(cuMemImportFromShareableHandle, CONTEXT, 1)                                                  \
    X(cuMemGetAllocationPropertiesFromHandle, CONTEXT, 1)                                          \
    X(cuStreamCreate, CONTEXT, 0)                                                                  \
    X(cuStreamDestroy_v2, CONTEXT, 0)                                                              \
    X(cuStreamSynchronize, CONTEXT, 0)                                                             \
    X(cuStreamQuery, CONTEXT, 0)                                                                   \
    X(cuStreamWaitEvent, CONTEXT, 0)                                                               \
    X(cuStreamGetId, CONTEXT, 0)                                                                   \
    X(cuStreamBeginCapture_v2, CONTEXT, 0)                                                         \
    X(cuStreamEndCapture, CONTEXT, 0)                                                              \
    X(cuStreamGetCtx, CONTEXT, 0)                                                                  \
    X(cuStreamIsCapturing, CONTEXT, 0)                                                             \
    X(cuStreamGetCaptureInfo_v2, CONTEXT, 0)                                                       \
    X(cuStreamGetCaptureInfo_v3, CONTEXT, 0)                                                       \
    X(cuThreadExchangeStreamCaptureMode, NOTHING, 0)                                               \
    X(cuGraphInstantiateWithFlags, CONTEXT, 0)                                                     \
    X(cuGraphLaunch, CONTEXT, 0)                                                                   \
    X(cuGraphExecDestroy, CONTEXT, 0)                                                              \
    X(cuGraphDestroy, CONTEXT, 0)                                                                  \
    X(cuEventCreate, CONTEXT, 0)                                                                   \
    X(cuEventDestroy_v2, CONTEXT, 0)                                                               \
    X(cuEventRecord, CONTEXT, 0)                                                                   \
    X(cuCtxRecordEvent, CONTEXT, 0)                                                                \
    X(cuEventQuery, CONTEXT, 0)                                                                    \
    X(cuEventSynchronize, CONTEXT, 0)                                                              \
    X(cuEventElapsedTime, CONTEXT, 0)                                                              \
    X(cuMemcpyAsync, CONTEXT, 0)                                                                   \
    X(cuMemcpy2DAsync_v2, CONTEXT, 0)                                                              \
    X(cuMemsetD8Async, CONTEXT, 0)                                                                 \
    X(cuLaunchHostFunc, CONTEXT, 0)                                                                \
    X(cuStreamWaitValue32_v2, CONTEXT, 0)                                                          \
    X(tnsim_launch, CONTEXT, 0)

typedef enum sim_call {
#define SIM_CALL_ENUM(name, needs, memory) SIM_CALL_##name,
    SIM_CALL_TABLE(SIM_CALL_ENUM)
#undef SIM_CALL_ENUM
        SIM_CALL_COUNT
} sim_call;

typedef struct sim_fault {
    long remaining; /* calls until the fault; 0: none */
    int and_after;
    int code;
} sim_fault;

struct sim_stream;

typedef struct sim_device {
    size_t memory_bytes;
    size_t used_bytes;
    size_t peak_bytes;
    int primary_retained;
    CUresult dead; /* sticky error of its context, 0 while it lives */
    int file;      /* memory of backed mode, -1: none yet */
    size_t file_bytes;
    struct sim_stream *legacy; /* NULL until first used */
} sim_device;

typedef struct sim_state {
    pthread_mutex_t lock;
    pthread_cond_t progress; /* a host function has returned, or a value has come */
    tnsim_config config;
    uint64_t generation; /* of configurations: what threads keep from an older one is void */
    int initialized;
    sim_ns now;
    sim_ns memory_time; /* part of it spent in memory calls, with what they wait for */
    int in_memory_call;
    uint64_t random; /* state of the generator that config.seed starts */
    uint64_t counts[SIM_CALL_COUNT];
    sim_fault faults[SIM_CALL_COUNT];
    sim_fault any_fault;
    sim_device devices[SIM_DEVICES_MAX];
} sim_state;

extern sim_state tn__sim;

/* What a host thread has: its context stack, its default streams. */
#define SIM_CONTEXT_DEPTH 16
typedef struct sim_thread {
    uint64_t generation;
    int depth;
    int devices[SIM_CONTEXT_DEPTH]; /* of the contexts on its stack */
    int in_host_function;
    struct sim_stream *default_streams[SIM_DEVICES_MAX];
    char refusal[256];
} sim_thread;

sim_thread *tn__sim_thread(void);

/* Takes the lock if the call may go on; else returns the error, without the lock. */
CUresult tn__sim_enter(sim_call call);
CUresult tn__sim_leave(CUresult result);

#define SIM_ENTER(name)                                                                            \
    do {                                                                                           \
        CUresult sim_entered_ = tn__sim_enter(SIM_CALL_##name);                                    \
        if (sim_entered_ != CUDA_SUCCESS) return sim_entered_;                                     \
    } while (0)

/* The control functions' way in: no counts, no faults. 0 in a forked child. */
int tn__sim_lock(void);
void tn__sim_unlock(void);

/* 1 in a forked child. */
int tn__sim_is_forked(void);

/* Says why a call is refused (tnsim_refusal) and returns CUDA_ERROR_NOT_SUPPORTED. */
CUresult tn__sim_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

const char *tn__sim_call_name(sim_call call);

/* 1 if `peer` may be given access to memory of `device`. */
int tn__sim_can_access(int device, int peer);
CUcontext tn__sim_context_of(int device);

/* Device of the current context; only after tn__sim_enter of a CONTEXT call. */
int tn__sim_current(void);

/* The host clock goes on by the cost of a call, or to a time that the host waits for. */
void tn__sim_spend(sim_ns cost);
void tn__sim_wait_until(sim_ns time);

/* How long work of the device takes: config.seed. */
sim_ns tn__sim_stretch(sim_ns duration);

/* Physical memory: 0 if the device has not that much left. */
int tn__sim_charge(int device, size_t bytes);
void tn__sim_discharge(int device, size_t bytes);

/* Host memory of the simulator itself; ends the process when there is none. */
void *tn__sim_alloc(size_t count, size_t item_bytes);
void *tn__sim_grow(void *memory, size_t count, size_t item_bytes);
void tn__sim_free(void *memory);

/* Costs in virtual time: see sim_cost.c. */
typedef enum sim_sized_call {
    SIM_COST_CREATE,
    SIM_COST_RESERVE,
    SIM_COST_MAP,
    SIM_COST_SET_ACCESS,
    SIM_COST_UNMAP,
    SIM_COST_RELEASE,
    SIM_COST_ALLOC,
    SIM_COST_FREE
} sim_sized_call;
sim_ns tn__sim_cost(sim_sized_call call, size_t bytes);
#define SIM_COST_EVENT_RECORD ((sim_ns)370)
#define SIM_COST_EVENT_QUERY  ((sim_ns)290)
#define SIM_COST_EVENT_WAIT   ((sim_ns)360)
#define SIM_COST_POOL_CALL    ((sim_ns)560) /* half of a warm cudaMallocAsync + cudaFreeAsync */
#define SIM_COST_SUBMIT       ((sim_ns)3800)
sim_ns tn__sim_transfer_time(size_t bytes_on_device, size_t bytes_on_link);

/* Writes one line a kind of thing that is left; returns how many things. */
int tn__sim_leftovers(char *text, size_t text_bytes);

#endif
