/* The driver calls that the drop-in takes over, and what its two libraries say to each other.
 *
 *     libtenure-preload.so   in every process of the job (LD_PRELOAD): needs libc and nothing else,
 *                            and does nothing but answer when a program looks for a call below
 *     libtenure-dropin.so    loaded by it at the first such call: the pools, on libtenure.so
 *
 * X(name, base, since, variant, (parameters), (arguments)): the versioned name that the driver
 * exports; the one that cuGetProcAddress is asked for, and from which CUDA version on that means
 * this function; and which of the two default streams a NULL stream is:
 *     NO_STREAM  the call has no stream, so that there is one function
 *     LEGACY     the legacy default stream
 *     PER_THREAD the thread's own: what cuGetProcAddress gives when its flags ask for that
 */
#ifndef TENURE_DROPIN_CALLS_H
#define TENURE_DROPIN_CALLS_H

#include "cuda_abi.h"

typedef struct tn__cu_ipc_handle {
    unsigned char bytes[64];
} tn__cu_ipc_handle;

/* clang-format off */
#define TN__DROPIN_CALLS(X)                                                                        \
    X(cuMemAlloc_v2, "cuMemAlloc", 3020, NO_STREAM,                                                \
      (tn__cu_address *out, size_t bytes), (out, bytes))                                           \
    X(cuMemFree_v2, "cuMemFree", 3020, NO_STREAM, (tn__cu_address address), (address))             \
    X(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, NO_STREAM,                                      \
      (tn__cu_address *out, size_t *pitch, size_t width, size_t height, unsigned element),         \
      (out, pitch, width, height, element))                                                        \
    X(cuMemAllocManaged, "cuMemAllocManaged", 6000, NO_STREAM,                                     \
      (tn__cu_address *out, size_t bytes, unsigned flags), (out, bytes, flags))                    \
    X(cuMemGetInfo_v2, "cuMemGetInfo", 3020, NO_STREAM,                                            \
      (size_t *free_bytes, size_t *total_bytes), (free_bytes, total_bytes))                        \
    X(cuMemGetAddressRange_v2, "cuMemGetAddressRange", 3020, NO_STREAM,                            \
      (tn__cu_address *base, size_t *bytes, tn__cu_address address), (base, bytes, address))       \
    X(cuMemAllocAsync, "cuMemAllocAsync", 11020, LEGACY,                                           \
      (tn__cu_address *out, size_t bytes, void *stream), (out, bytes, stream))                     \
    X(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, PER_THREAD,                                  \
      (tn__cu_address *out, size_t bytes, void *stream), (out, bytes, stream))                     \
    X(cuMemFreeAsync, "cuMemFreeAsync", 11020, LEGACY,                                             \
      (tn__cu_address address, void *stream), (address, stream))                                   \
    X(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, PER_THREAD,                                    \
      (tn__cu_address address, void *stream), (address, stream))                                   \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, LEGACY,                           \
      (tn__cu_address *out, size_t bytes, void *pool, void *stream), (out, bytes, pool, stream))   \
    X(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, PER_THREAD,                  \
      (tn__cu_address *out, size_t bytes, void *pool, void *stream), (out, bytes, pool, stream))   \
    X(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, NO_STREAM,                                  \
      (tn__cu_device device, void *pool), (device, pool))                                          \
    X(cuMemPoolSetAccess, "cuMemPoolSetAccess", 11020, NO_STREAM,                                  \
      (void *pool, const void *accesses, size_t count), (pool, accesses, count))                   \
    X(cuPointerGetAttribute, "cuPointerGetAttribute", 4000, NO_STREAM,                             \
      (void *value, int attribute, tn__cu_address address), (value, attribute, address))           \
    X(cuPointerGetAttributes, "cuPointerGetAttributes", 7000, NO_STREAM,                           \
      (unsigned count, int *attributes, void **values, tn__cu_address address),                    \
      (count, attributes, values, address))                                                        \
    X(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, NO_STREAM,                                     \
      (tn__cu_ipc_handle *handle, tn__cu_address address), (handle, address))                      \
    X(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000, NO_STREAM,                               \
      (tn__cu_address *out, tn__cu_ipc_handle handle, unsigned flags), (out, handle, flags))       \
    X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, NO_STREAM,                                 \
      (tn__cu_address address), (address))                                                         \
    X(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, NO_STREAM,                         \
      (tn__cu_device device), (device))                                                            \
    X(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, NO_STREAM,                     \
      (tn__cu_device device), (device))                                                            \
    X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, NO_STREAM,                             \
      (void *peer, unsigned flags), (peer, flags))                                                 \
    X(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", 4000, NO_STREAM, (void *peer), (peer))     \
    X(cuMemCreate, "cuMemCreate", 10020, NO_STREAM,                                                \
      (tn__cu_handle *out, size_t bytes, const void *properties, unsigned long long flags),        \
      (out, bytes, properties, flags))                                                             \
    X(cuArrayCreate_v2, "cuArrayCreate", 3020, NO_STREAM,                                          \
      (void **out, const void *description), (out, description))                                   \
    X(cuArray3DCreate_v2, "cuArray3DCreate", 3020, NO_STREAM,                                      \
      (void **out, const void *description), (out, description))                                   \
    X(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, NO_STREAM,                           \
      (void **out, const void *description, unsigned levels), (out, description, levels))          \
    X(cuStreamDestroy_v2, "cuStreamDestroy", 4000, NO_STREAM, (void *stream), (stream))            \
    X(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, LEGACY,                              \
      (void *stream, int mode), (stream, mode))                                                    \
    X(cuStreamBeginCapture_v2_ptsz, "cuStreamBeginCapture", 10010, PER_THREAD,                     \
      (void *stream, int mode), (stream, mode))                                                    \
    X(cuStreamBeginCaptureToGraph, "cuStreamBeginCaptureToGraph", 12030, LEGACY,                   \
      (void *stream, void *graph, const void *nodes, const void *edges, size_t count, int mode),   \
      (stream, graph, nodes, edges, count, mode))                                                  \
    X(cuStreamBeginCaptureToGraph_ptsz, "cuStreamBeginCaptureToGraph", 12030, PER_THREAD,          \
      (void *stream, void *graph, const void *nodes, const void *edges, size_t count, int mode),   \
      (stream, graph, nodes, edges, count, mode))                                                  \
    X(cuStreamEndCapture, "cuStreamEndCapture", 10000, LEGACY,                                     \
      (void *stream, void **graph), (stream, graph))                                               \
    X(cuStreamEndCapture_ptsz, "cuStreamEndCapture", 10000, PER_THREAD,                            \
      (void *stream, void **graph), (stream, graph))
/* clang-format on */

#define TN__DROPIN_MEMBER(name, base, since, variant, parameters, arguments)                       \
    tn__cu_result(*name) parameters;
#define TN__DROPIN_NUMBER(name, base, since, variant, parameters, arguments) TN__DROPIN_##name,

/* One function for each call: the driver's own, or what takes its place. */
typedef struct tn__dropin_calls {
    TN__DROPIN_CALLS(TN__DROPIN_MEMBER)
} tn__dropin_calls;

enum { TN__DROPIN_CALLS(TN__DROPIN_NUMBER) TN__DROPIN_CALL_COUNT };

/* All names in order. */
#define TN__DROPIN_BUILD TN__DROPIN_CALLS(TN__DROPIN_NAME)

#define TN__DROPIN_NAME(name, base, since, variant, parameters, arguments) #name " "

/* What libtenure-preload gives to libtenure-dropin. While that runs, whatever the thread looks for
 * or calls by these names is the driver's own. */
typedef struct tn__dropin_driver {
    const char *build;            /* TN__DROPIN_BUILD: both libraries are of one */
    const tn__dropin_calls *real; /* NULL where the program has not come by the call yet */
    void *(*find)(const char *name);
} tn__dropin_driver;

/* What libtenure-dropin exports: *hooks is filled in. 0 if it can not work: it has said why. */
__attribute__((visibility("default"))) int tn__dropin_open(const tn__dropin_driver *driver,
                                                           tn__dropin_calls *hooks);
typedef int (*tn__dropin_open_function)(const tn__dropin_driver *driver, tn__dropin_calls *hooks);

#endif
