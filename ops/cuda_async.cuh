/* Copies to shared memory that a thread does not wait for, and the shared memory that a launch
 * gives. What PTX alone can say, and without it (on a CPU) the plain meaning.
 */
#ifndef TENURE_CUDA_ASYNC_CUH
#define TENURE_CUDA_ASYNC_CUH

#include "cuda_tile.cuh"

/* Shared memory of a size that the launch gives. */
#ifdef __CUDACC__
#define DYNAMIC_SHARED(name, bytes) extern __shared__ __align__(16) unsigned char name[]
#else
#define DYNAMIC_SHARED(name, bytes) __shared__ __align__(16) unsigned char name[bytes]
#endif

/* Begins to copy 16 bytes; zeros, and nothing is read, if they are not there. The thread sees them
 * after fetches_wait, others after a barrier besides. */
__device__ __forceinline__ void fetch_piece(uint4 *to, const void *from, bool is_there) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
#else
    *to = is_there ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
#endif
}

/* Those that the thread has begun since the last call are one group. */
__device__ __forceinline__ void fetches_end() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for all groups of the thread but the last LATEST. */
template <int LATEST> __device__ __forceinline__ void fetches_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
#endif
}

#endif
