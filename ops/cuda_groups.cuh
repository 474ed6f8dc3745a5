/* What kernels that read the offsets of groups share: the check of the table, and sums over a
 * block of threads. Blocks have TN__FLAT_THREADS threads. */
#ifndef TENURE_CUDA_GROUPS_CUH
#define TENURE_CUDA_GROUPS_CUH

#include "cuda_list_arguments.h"

/* Of what each thread gives, the sum up to and with it; all threads. */
__device__ __forceinline__ int64_t sum_up_to(int64_t *shared, int64_t value) {
    const int at = (int)threadIdx.x;
    shared[at] = value;
    __syncthreads();
    for (int step = 1; step < TN__FLAT_THREADS; step *= 2) {
        const int64_t before = at >= step ? shared[at - step] : 0;
        __syncthreads();
        shared[at] += before;
        __syncthreads();
    }
    return shared[at];
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

/* Bad offsets come before what is too large, as on the host, whichever thread sees them. */
__device__ __forceinline__ uint32_t worse_of(uint32_t a, uint32_t b) {
    if (a == TN__GROUPS_BAD_OFFSETS || b == TN__GROUPS_BAD_OFFSETS) return TN__GROUPS_BAD_OFFSETS;
    return a > b ? a : b;
}

/* The worst of what all threads found in all groups; all threads. */
__device__ __forceinline__ uint32_t groups_error(const int64_t *offsets, int64_t groups,
                                                 int64_t rows, uint32_t *shared) {
    uint32_t worst = TN__GROUPS_OK;
    for (int64_t g = threadIdx.x; g < groups; g += TN__FLAT_THREADS)
        worst = worse_of(worst, group_error(offsets, rows, g));
    if (groups == 0 && offsets[0] != 0) worst = TN__GROUPS_BAD_OFFSETS;
    shared[threadIdx.x] = worst;
    __syncthreads();
    for (int half = TN__FLAT_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half)
            shared[threadIdx.x] = worse_of(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }
    return shared[0];
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
