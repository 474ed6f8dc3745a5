/* The sums of norms and of their gradients in their order (tn_norm_forward), as threads hold a row:
 * 16 lanes a block of 128 columns, each 8 of them as in cuda_tile.cuh, which are two sums of 4
 * neighbours.
 */
#ifndef TENURE_CUDA_NORM_SUMS_CUH
#define TENURE_CUDA_NORM_SUMS_CUH

#include "cuda_tile.cuh"

enum { ROW_PARTS = 32 /* block b of a row is added to sum b mod 32 */ };

/* ---- a block ------------------------------------------------------------------------------ */

/* A lane's two sums of 4 neighbours as one. Of 32-bit elements the neighbours of 4 are those of the
 * next lane, with which they are added up first. */
template <typename T> __device__ __forceinline__ float join_fours(float low, float high) {
    if constexpr (sizeof(T) == 4) {
        low = __fadd_rn(low, __shfl_xor_sync(0xFFFFFFFFu, low, 1));
        high = __fadd_rn(high, __shfl_xor_sync(0xFFFFFFFFu, high, 1));
    }
    return __fadd_rn(low, high);
}

template <typename T> __device__ __forceinline__ float sum_of_lane(const float (&value)[PATCH]) {
    float low = value[0], high = value[4];
#pragma unroll
    for (int j = 1; j < 4; j++) {
        low = __fadd_rn(low, value[j]);
        high = __fadd_rn(high, value[j + 4]);
    }
    return join_fours<T>(low, high);
}

/* Of the first and the last four columns, those that are in the row. */
template <typename T>
__device__ __forceinline__ float products_of_lane(const float (&value)[PATCH],
                                                  const float (&by)[PATCH], bool is_low_in,
                                                  bool is_high_in) {
    float low = __fmul_rn(value[0], by[0]), high = __fmul_rn(value[4], by[4]);
#pragma unroll
    for (int j = 1; j < 4; j++) {
        low = __fmaf_rn(value[j], by[j], low);
        high = __fmaf_rn(value[j + 4], by[j + 4], high);
    }
    return join_fours<T>(is_low_in ? low : 0.0f, is_high_in ? high : 0.0f);
}

template <typename T>
__device__ __forceinline__ float squares_of_lane(const float (&value)[PATCH], bool is_low_in = true,
                                                 bool is_high_in = true) {
    return products_of_lane<T>(value, value, is_low_in, is_high_in);
}

/* The 16 lanes of a half warp each hold what they give to COUNT blocks; returns, on lane c, the sum
 * of block c / (16 / COUNT). Each step halves the blocks that a lane is still concerned with. */
template <typename T, int COUNT>
__device__ __forceinline__ float sums_of_half_warp(float (&sum)[COUNT], int lane16) {
    enum { NEAREST = sizeof(T) == 4 ? 2 : 1 }; /* the nearest lanes are joined already */
#pragma unroll
    for (int apart = 8; apart >= NEAREST; apart /= 2) {
        const int kept = COUNT * apart / 16;
#pragma unroll
        for (int s = 0; s < kept; s++) {
            const float keep = lane16 & apart ? sum[s + kept] : sum[s];
            const float give = lane16 & apart ? sum[s] : sum[s + kept];
            sum[s] = __fadd_rn(keep, __shfl_xor_sync(0xFFFFFFFFu, give, apart));
        }
        if (kept == 0) sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(0xFFFFFFFFu, sum[0], apart));
    }
    return sum[0];
}

/* The total of the 32 sums that a warp's lanes have, on each of them. */
__device__ __forceinline__ float total_of_warp(float sum) {
#pragma unroll
    for (int apart = ROW_PARTS / 2; apart > 0; apart /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, apart));
    return sum;
}

/* Of the block's columns, of which `left` and maybe more are in the row. */
__device__ __forceinline__ float mean_of_block(float sum, int64_t left) {
    return left >= TN__TILE ? __fmul_rn(sum, 1.0f / TN__TILE) : __fdiv_rn(sum, (float)left);
}

/* The squares of what deviates from the row's mean, given those of what does from the block's. */
__device__ __forceinline__ float squares_around(float sum, float squares, float mean,
                                                int64_t left) {
    const float count = left >= TN__TILE ? (float)TN__TILE : (float)left;
    const float off = __fsub_rn(mean_of_block(sum, left), mean);
    return __fmaf_rn(__fmul_rn(count, off), off, squares);
}

#endif
