/* The tensor cores of Hopper (sm_90a) for FP8: what PTX alone can say.
 *
 * A warpgroup of 128 threads multiplies 64 x 32 by 128 x 32 bytes in shared memory into 64 x 128
 * fp32 numbers in its registers. Both lie as a box with rows of 128 bytes does (cuda_boxes.cuh). Of
 * the result a thread has, of rows r = 16 warp + lane / 4 and r + 8, two columns in each 8:
 *
 *     d[4 j], d[4 j + 1]         row r,      columns 8 j + 2 (lane % 4) and the next
 *     d[4 j + 2], d[4 j + 3]     row r + 8,  the same columns
 */
#ifndef TENURE_CUDA_WGMMA_CUH
#define TENURE_CUDA_WGMMA_CUH

#include "cuda_boxes.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TN__HAS_WGMMA 1
#else
#define TN__HAS_WGMMA 0
#endif

enum { E4M3_BY_E4M3, E4M3_BY_E5M2, E5M2_BY_E4M3 };
enum { PRODUCTS = 64 }; /* of 64 x 128 that a thread has */

#if TN__HAS_WGMMA

/* Where 64 or 128 rows of 128 bytes lie: the address in 16 bytes, groups of 8 rows 1024 bytes
 * apart, pieces in the order of boxes. The next 32 bytes of each row are 2 further. */
__device__ __forceinline__ uint64_t rows_at(uint32_t address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

#define TN__OUT8(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])

#define TN__MULTIPLY(types)                                                                        \
    asm volatile("{\n"                                                                             \
                 ".reg .pred adds;\n"                                                              \
                 "setp.ne.b32 adds, %66, 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32." types " {"                         \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "     \
                 "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "     \
                 "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, "     \
                 "%61, %62, %63}, %64, %65, adds, 1, 1;\n"                                         \
                 "}"                                                                               \
                 : TN__OUT8(0), TN__OUT8(8), TN__OUT8(16), TN__OUT8(24), TN__OUT8(32),             \
                   TN__OUT8(40), TN__OUT8(48), TN__OUT8(56)                                        \
                 : "l"(a), "l"(b), "r"(adds))

/* d = (adds ? d : 0) + a b^T of 32 bytes; begun only. */
template <int TYPES>
__device__ __forceinline__ void multiply(float (&d)[PRODUCTS], uint64_t a, uint64_t b, int adds) {
    if (TYPES == E4M3_BY_E4M3) TN__MULTIPLY("e4m3.e4m3");
    if (TYPES == E4M3_BY_E5M2) TN__MULTIPLY("e4m3.e5m2");
    if (TYPES == E5M2_BY_E4M3) TN__MULTIPLY("e5m2.e4m3");
}

#undef TN__MULTIPLY
#undef TN__OUT8

/* The compiler neither moves uses of d over this, nor keeps a copy of it. */
__device__ __forceinline__ void products_settle(float (&d)[PRODUCTS]) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* Before the first of a group of products, behind it, and until all groups are done. */
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/* Registers of a thread go from the warpgroup that moves to those that multiply. */
template <int COUNT> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Warpgroups take turns: each waits for the one before it, and lets the next one go. */
__device__ __forceinline__ void turn_wait(int barrier) {
    asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void turn_pass(int barrier) {
    asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory");
}

#endif
#endif
