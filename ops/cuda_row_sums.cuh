/* How a warp reads a row and adds it up in the order of gradients: 256 sums, 8 of each lane. */
#ifndef TENURE_CUDA_ROW_SUMS_CUH
#define TENURE_CUDA_ROW_SUMS_CUH

#include "cuda_produce.cuh"

enum {
    ROW_SUMS = 256, /* that a row is added up in */
    LANE_SUMS = ROW_SUMS / 32
};

/* The total of 256 sums, 8 a lane, on every lane: halves are added to each other, first those 128
 * apart, which are 16 lanes apart. Both lanes of a pair add the same two numbers. */
__device__ __forceinline__ float total_of(float (&sum)[LANE_SUMS]) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
#pragma unroll
        for (int j = 0; j < LANE_SUMS; j++)
            sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(0xFFFFFFFFu, sum[j], apart));
    }
#pragma unroll
    for (int half = LANE_SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; j++)
            sum[j] = __fadd_rn(sum[j], sum[j + half]);
    }
    return sum[0];
}

/* The lane's 8 neighbours from column `col` of a row; what is beyond the row is 0. */
template <typename T>
__device__ __forceinline__ void load_eight(float (&values)[LANE_SUMS], const T *row, int64_t col,
                                           int64_t cols, int vectors) {
    if (vectors) { /* rows are whole pieces: a piece is in the row or beyond it */
#pragma unroll
        for (int p = 0; p < LANE_SUMS / element<T>::VECTOR; p++) {
            const int64_t at = col + p * element<T>::VECTOR;
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (at < cols) piece = *(const uint4 *)(row + at);
            const piece_values<T> of = unpack<T>(piece);
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++)
                values[p * element<T>::VECTOR + v] = of.at[v];
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < LANE_SUMS; j++)
        values[j] = col + j < cols ? element<T>::load(row, col + j) : 0.0f;
}

#endif
