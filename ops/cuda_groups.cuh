/* What kernels that read the offsets of groups share: the check of the table, and sums over a
 * block of threads. Blocks have TN__FLAT_THREADS threads. */
#ifndef TENURE_CUDA_GROUPS_CUH
#define TENURE_CUDA_GROUPS_CUH

#include "cuda_list_arguments.h"

enum { GROUPS_WARPS = TN__FLAT_THREADS / 32 };

/* Of what each thread gives, the sum up to and with it, and that of all; all threads. `shared` has
 * a place for each warp, and may be used again after a barrier. */
__device__ __forceinline__ int64_t sum_up_to(int64_t *shared, int64_t value, int64_t *all) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int64_t before = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value += before;
    }
    if (lane == 31) shared[warp] = value;
    __syncthreads();
    *all = 0;
#pragma unroll
    for (int w = 0; w < GROUPS_WARPS; w++) {
        if (w == warp) value += *all;
        *all += shared[w];
    }
    return value;
}

__device__ __forceinline__ int64_t units_of(int64_t extent, int64_t unit) {
    return (extent + unit - 1) / unit;
}

/* What is wrong with group g, TN__GROUPS_OK if nothing is. */
__device__ __forceinline__ uint32_t group_error(const int64_t *offsets, int64_t rows, int64_t g) {
    const int64_t first = offsets[g], end = offsets[g + 1];
    if ((g == 0 && first != 0) || end < first) return TN__GROUPS_BAD_OFFSETS;
    return end > rows ? TN__GROUPS_OVER_CAPACITY : TN__GROUPS_OK;
}

/* What is wrong with the groups, if anything is; all threads. Bad offsets come before what is too
 * large, as on the host, whichever thread sees them. */
__device__ __forceinline__ uint32_t groups_error(const int64_t *offsets, int64_t groups,
                                                 int64_t rows) {
    bool is_bad = groups == 0 && offsets[0] != 0, is_over = false;
    for (int64_t g = threadIdx.x; g < groups; g += TN__FLAT_THREADS) {
        const uint32_t error = group_error(offsets, rows, g);
        is_bad |= error == TN__GROUPS_BAD_OFFSETS;
        is_over |= error == TN__GROUPS_OVER_CAPACITY;
    }
    const int any_bad = __syncthreads_or(is_bad), any_over = __syncthreads_or(is_over);
    if (any_bad) return TN__GROUPS_BAD_OFFSETS;
    return any_over ? TN__GROUPS_OVER_CAPACITY : TN__GROUPS_OK;
}

/* Of `count` places that begin at rising numbers, the last that begins at or before `at`: the one
 * that `at` lies in, since a place without extent begins where the next one does. */
__device__ __forceinline__ int64_t place_of(const int64_t *begin, int64_t count, int64_t at) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (__ldg((const long long *)begin + middle) <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

#endif
