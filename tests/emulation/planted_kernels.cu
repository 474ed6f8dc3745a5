/* Kernels with a known fault, and their right versions: the emulated device must tell them apart.
 *
 * Each block of 64 threads turns the order of 64 words around: word i of a tile becomes word
 * 63 - i. The others show one intrinsic each.
 */
#include <cuda_fp8.h>

#include "planted_arguments.h"

#define KERNEL(name)                                                                               \
    extern "C" __global__ void __launch_bounds__(PLANTED_THREADS)                                  \
        name(const __grid_constant__ tn__planted_arguments a)

/* ---- barriers ------------------------------------------------------------------------------- */

KERNEL(reverse) {
    __shared__ uint32_t tile[PLANTED_TILE];
    const int64_t at = (int64_t)blockIdx.x * PLANTED_TILE + threadIdx.x;
    tile[threadIdx.x] = at < a.count ? a.in[at] : 0;
    __syncthreads();
    if (at < a.count) a.out[at] = tile[PLANTED_TILE - 1 - threadIdx.x];
}

KERNEL(reverse_without_barrier) {
    __shared__ uint32_t tile[PLANTED_TILE];
    const int64_t at = (int64_t)blockIdx.x * PLANTED_TILE + threadIdx.x;
    tile[threadIdx.x] = at < a.count ? a.in[at] : 0;
    if (at < a.count) a.out[at] = tile[PLANTED_TILE - 1 - threadIdx.x];
}

/* Two rounds through one tile: the second must not write before the first has been read. */
KERNEL(reverse_twice_with_one_barrier) {
    __shared__ uint32_t tile[PLANTED_TILE];
    uint32_t word = a.in[threadIdx.x];
    for (int round = 0; round < 2; round++) {
        tile[threadIdx.x] = word;
        __syncthreads();
        word = tile[PLANTED_TILE - 1 - threadIdx.x];
    }
    a.out[threadIdx.x] = word;
}

KERNEL(barrier_of_one_warp) {
    if (threadIdx.x < 32) __syncthreads();
    a.out[threadIdx.x] = 0;
    if (threadIdx.x < 32) __syncthreads();
}

KERNEL(barrier_after_a_return) {
    if (threadIdx.x == 3) return;
    __syncthreads();
}

/* ---- tails ---------------------------------------------------------------------------------- */

KERNEL(copy_past_the_tail) {
    const int64_t at = (int64_t)blockIdx.x * PLANTED_TILE + threadIdx.x;
    if (at <= a.count) a.out[at] = a.in[at < a.count ? at : 0];
}

/* ---- within a warp -------------------------------------------------------------------------- */

KERNEL(shuffle_lacking_a_lane) {
    if (threadIdx.x != 5) a.out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, threadIdx.x, 1);
}

KERNEL(shuffle_from_outside) {
    const unsigned half = threadIdx.x % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u;
    a.out[threadIdx.x] = __shfl_sync(half, threadIdx.x, 20);
}

KERNEL(shuffles_of_two_masks) {
    const unsigned mask = threadIdx.x % 2 ? 0xFFFFFFFFu : 0x55555555u;
    a.out[threadIdx.x] = __shfl_xor_sync(mask, threadIdx.x, 2);
    __syncthreads();
}

/* 16 words a thread: what each exchange gives the lane whose value is in[threadIdx.x]. */
KERNEL(exchanges) {
    const unsigned all = 0xFFFFFFFFu, half = threadIdx.x % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u;
    const uint32_t value = a.in[threadIdx.x];
    uint32_t *out = a.out + threadIdx.x * 16;
    out[0] = __shfl_sync(all, value, 5);
    out[1] = __shfl_sync(all, value, 3, 8);
    out[2] = __shfl_xor_sync(all, value, 9);
    out[3] = __shfl_down_sync(all, value, 3);
    out[4] = __shfl_up_sync(all, value, 3, 16);
    out[5] = __ballot_sync(all, value % 3 == 0);
    out[6] = __reduce_add_sync(all, value);
    out[7] = __reduce_max_sync(half, value);
    out[8] = __reduce_min_sync(half, value);
    out[9] = (uint32_t)__reduce_max_sync(all, (int)value);
    out[10] = __reduce_xor_sync(all, value);
    out[11] = __match_any_sync(all, value % 4);
    out[12] = (uint32_t)(__shfl_xor_sync(all, (uint64_t)value << 32, 1) >> 32);
    out[13] = (uint32_t)__syncthreads_count(value % 2);
    out[14] = __float_as_uint(__shfl_sync(all, __uint_as_float(value), 31));
    __syncwarp();
    out[15] = (uint32_t)__any_sync(half, value % 32 == 1);
}
