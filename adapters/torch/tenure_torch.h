/* Tenure for PyTorch: the functions of its CUDAPluggableAllocator (libtenure-torch.so).
 *
 *     import tenure.pytorch
 *     tenure.pytorch.install()                     before torch's first use of CUDA
 *
 * or without the Python module, and then without the hooks below:
 *
 *     memory = torch.cuda.memory
 *     memory.change_current_allocator(memory.CUDAPluggableAllocator(
 *         "libtenure-torch.so", "tn_torch_malloc", "tn_torch_free"))
 *
 * The library is not linked to torch. It throws what torch can catch: c10::OutOfMemoryError
 * (torch.OutOfMemoryError in Python) when there is no memory, c10::Error (RuntimeError) for
 * anything else, both made by the libc10 of the running process; std::bad_alloc or
 * std::runtime_error (RuntimeError) where none is found. So they are called from C++ only. Nothing
 * is ever thrown by functions that free: torch calls these in destructors.
 *
 * Names, order and types of arguments are torch's (torch/csrc/cuda/CUDAPluggableAllocator.h, 2.1 to
 * 2.11). Streams are cudaStream_t, devices CUDA ordinals. All functions are thread-safe.
 */
#ifndef TENURE_TORCH_H
#define TENURE_TORCH_H

#include "tenure_adapters.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory for the stream, in stream order. Never NULL but for size 0: throws. */
TN_API void *tn_torch_malloc(size_t size, int device, tn_stream stream);
TN_API void tn_torch_free(void *block, size_t size, int device, tn_stream stream);

/* The pair for torch.cuda.MemPool under torch's own allocator, which takes segments from it. NULL
 * when there is no memory, which that allocator expects: it gives back what it keeps, tries again,
 * and throws by itself. A free has cudaFree's meaning: the memory is reused once all work that was
 * on any stream before is done; nobody waits for it unless memory is short or much was freed. */
TN_API void *tn_torch_segment_malloc(size_t size, int device, tn_stream stream);
TN_API void tn_torch_segment_free(void *block, size_t size, int device, tn_stream stream);

/* set_record_stream_fn: all work that is on the stream when the block is freed is waited for. */
TN_API void tn_torch_record_stream(void *block, tn_stream stream);

/* set_reset_fn: torch.cuda.empty_cache(). */
TN_API void tn_torch_empty_cache(void);

/* set_memory_fraction_fn: torch.cuda.set_per_process_memory_fraction. Throws if more than that is
 * in use. */
TN_API void tn_torch_memory_fraction(double fraction, int device);

/* set_base_alloc_fn: the block itself, and its bytes; 0 bytes for memory of somebody else's. */
TN_API void *tn_torch_base_allocation(void *block, size_t *size);

/* c10::cuda::MempoolId_t, a std::pair. */
typedef struct tn_torch_pool_id {
    uint64_t first;
    uint64_t second;
} tn_torch_pool_id;

/* set_begin_allocate_to_pool, set_end_allocate_to_pool_fn, set_release_pool: memory of captured
 * graphs (tenure_pool.h). `filter` is the address of a std::function<bool(cudaStream_t)>, as C++
 * passes one; it is copied. */
TN_API void tn_torch_begin_allocate_to_pool(int device, tn_torch_pool_id id, void *filter);
TN_API void tn_torch_end_allocate_to_pool(int device, tn_torch_pool_id id);
TN_API void tn_torch_release_pool(int device, tn_torch_pool_id id);

#ifdef __cplusplus
}
#endif
#endif
