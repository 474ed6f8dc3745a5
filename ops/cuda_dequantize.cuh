/* What the dequantize kernels of all formats share: a patch's codes in, its values out. */
#ifndef TENURE_CUDA_DEQUANTIZE_CUH
#define TENURE_CUDA_DEQUANTIZE_CUH

#include "cuda_scale.cuh"

/* Writes 8 values of one row of the patch, rounded to T. */
template <typename T>
__device__ __forceinline__ void store_values(const tn__cuda_dequantize_arguments &a,
                                             const patch_place &at, int i,
                                             const float (&values)[PATCH]) {
    if (at.row + i >= a.rows) return;
    const int64_t first = (at.row + i) * a.cols + at.tile_first_col;
    if (a.dst_vectors) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
            uint4 piece = make_uint4(
                element<T>::word(values, 4 * p), element<T>::word(values, 4 * p + 1),
                element<T>::word(values, 4 * p + 2), element<T>::word(values, 4 * p + 3));
            if (at.tile_first_col + column < a.cols)
                *(uint4 *)((T *)a.dst + first + column) = piece;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        int column = patch_column<T>(at.lane16, j);
        if (at.tile_first_col + column < a.cols)
            element<T>::store(a.dst, first + column, values[j]);
    }
}

/* The 8 bytes of row i of the patch, from a row plane. */
template <typename T>
__device__ __forceinline__ uint2 load_row_bytes(const tn__cuda_dequantize_arguments &a,
                                                const patch_place &at, int i) {
    uint32_t bytes[2] = {0, 0};
    if (at.row + i >= a.rows) return make_uint2(0, 0);
    const unsigned char *from = a.src.data + (at.row + i) * a.cols + at.tile_first_col;
    if (a.src.vectors) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int column = patch_column<T>(at.lane16, 4 * half);
            if (at.tile_first_col + column < a.cols)
                bytes[half] = __ldg((const uint32_t *)(from + column));
        }
        return make_uint2(bytes[0], bytes[1]);
    }
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        int column = patch_column<T>(at.lane16, j);
        if (at.tile_first_col + column < a.cols)
            bytes[j / 4] |= (uint32_t)from[column] << (8 * (j % 4));
    }
    return make_uint2(bytes[0], bytes[1]);
}

#endif
