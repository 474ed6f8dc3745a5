/* Tenure for other frameworks: their allocator interfaces, served from one pool for each GPU.
 *
 *     libtenure-adapters.so    this header: CuPy, ONNX Runtime, DLPack, and the pools behind all
 *     libtenure-torch.so       tenure_torch.h: PyTorch
 *
 * A pool is made when a framework first asks for memory of a device; all of them share it. Every
 * stream but the default one has a pool of its own, since frameworks give a block's memory to its
 * stream alone: what is idle goes from one to another behind all work of the devices. A pool here
 * is as any pool: reports, traces, limits (TENURE_LIMIT), snapshots. What frameworks ask for has
 * their name as its owner. See docs/adapters.md for the lines that each framework needs.
 *
 * Devices are the CUDA driver's, by ordinal; sizes are in bytes. All functions are thread-safe.
 * Functions that a framework calls return what its interface says: where that has no error, what
 * could not be done is told on stderr. Every other one returns a status, with tn_error_last().
 */
#ifndef TENURE_ADAPTERS_H
#define TENURE_ADAPTERS_H

#include "tenure_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the pools ---------------------------------------------------------------------------- */

/* The pool of a device for its default stream, made if there is none; it lasts until
 * tn_adapters_close. Errors: those of tn_device_create and tn_pool_create; TN_INVALID_STATE if a
 * close that found a leak elsewhere has ended it. */
TN_API TN_MUST_USE tn_status tn_adapter_pool(int device, tn_pool **out);

/* Has the adapters use a pool of the program's for the default stream of its device from now on:
 * one with a limit, a name or a backing of its own, of device memory, and no graph pool. It must
 * not be destroyed before tn_adapters_close, and nobody uses it during this call and that one.
 * TN_INVALID_STATE if the device has a pool already; TN_INVALID_ARGUMENT if it is no CUDA
 * device's, of host memory, or a graph pool. */
TN_API TN_MUST_USE tn_status tn_adapter_pool_use(tn_pool *pool);

/* A statistic of the device by its name in TN_POOL_STATS_TABLE ("peak_reserved_bytes"): of its
 * pools together, those of captured graphs too, where peaks are sums of each pool's. 0 for a device
 * that no framework has asked. TN_INVALID_ARGUMENT for a name that is in no table. */
TN_API TN_MUST_USE tn_status tn_adapter_stat(int device, const char *name, uint64_t *out);

/* Peaks start again, in all pools of the device. */
TN_API TN_MUST_USE tn_status tn_adapter_reset_peaks(int device);

/* Gives idle memory of all devices back to the driver, behind all work of theirs: it waits. Does
 * nothing while a framework captures a graph. */
TN_API TN_MUST_USE tn_status tn_adapters_trim(void);

/* Ends all pools and devices that the adapters have made, for programs that look for leaks; no
 * framework may call any more. TN_LEAK while blocks are live, TN_IN_USE while allocations go to a
 * graph pool: what could be ended has been, and the call can be made again. Not needed at exit. */
TN_API tn_status tn_adapters_close(void);

/* ---- CuPy --------------------------------------------------------------------------------- */

/* cupy.cuda.CFunctionAllocator(stream, malloc, free, owner): `stream` is the cudaStream_t that the
 * blocks are for, 0 for the default stream. A block is freed in the order of that stream, as CuPy's
 * own pool does. CuPy does not look at what tn_cupy_malloc returns: who calls CFunctionAllocator
 * must (the Python module tenure.cupy_allocator does). NULL: no memory. */
TN_API void *tn_cupy_malloc(void *stream, size_t bytes, int device);
TN_API void tn_cupy_free(void *stream, void *block, int device);

/* ---- ONNX Runtime ------------------------------------------------------------------------- */

/* Provider options gpu_external_alloc, gpu_external_free and gpu_external_empty_cache of the CUDA
 * provider take the addresses of these. NULL: no memory, which ONNX Runtime reports. */
TN_API void *tn_ort_alloc(size_t bytes);
TN_API void tn_ort_free(void *block);
TN_API void tn_ort_empty_cache(void);

/* That interface names neither device nor stream. At first the device is 0, and freed memory waits
 * until the device was seen idle. is_ordered: all work is put on `stream` (the provider option
 * user_compute_stream), and memory is reused in its order. Call before the first session is made:
 * TN_INVALID_STATE while blocks of ONNX Runtime are live, unless it changes nothing. */
TN_API TN_MUST_USE tn_status tn_ort_configure(int device, tn_stream stream, int is_ordered);

/* ---- DLPack ------------------------------------------------------------------------------- */

struct DLTensor;
struct DLManagedTensorVersioned;

/* DLPackManagedTensorAllocator of dlpack.h 1.2 and later: makes a tensor of the prototype's type,
 * shape and device, row-major and with contents that are not defined. Devices kDLCUDA (for use on
 * the calling thread's work stream, see below) and kDLCPU. Data is aligned to 256 bytes at least;
 * a tensor without elements has data NULL. Its deleter may be called by any thread, whatever
 * streams still have work with it: the memory is reused once the device was seen idle.
 * Returns 0; else -1 with *out as it was, and set_error has been called with the kind of Python
 * exception ("MemoryError", "ValueError", "BufferError", "RuntimeError") and the words. */
typedef void (*tn_dlpack_error)(void *context, const char *kind, const char *message);
TN_API int tn_dlpack_allocate(struct DLTensor *prototype, struct DLManagedTensorVersioned **out,
                              void *error_context, tn_dlpack_error set_error);

/* DLPackCurrentWorkStream: the stream that this thread has set for the device; NULL, the default
 * stream, at first, and for kDLCPU. Returns 0, or -1 for other kinds of devices. */
TN_API int tn_dlpack_current_work_stream(int device_type, int32_t device_id, void **out_stream);
TN_API TN_MUST_USE tn_status tn_dlpack_work_stream_set(int device, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
