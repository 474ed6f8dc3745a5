/* What the dequantize kernels of all formats share: a patch's codes in, its values out. */
#ifndef TENURE_CUDA_DEQUANTIZE_CUH
#define TENURE_CUDA_DEQUANTIZE_CUH

#include "cuda_scale.cuh"

/* Where the first row of the patch lies in dst, from the tile's first column on. */
template <typename T>
__device__ __forceinline__ T *dst_row(const tn__cuda_dequantize_arguments &a,
                                      const patch_place &at) {
    return (T *)a.dst + at.row * a.cols + at.tile_first_col;
}

/* Writes 8 values of one row, rounded to T; `to`: as dst_row gives it. */
template <typename T>
__device__ __forceinline__ void store_values_at(const tn__cuda_dequantize_arguments &a,
                                                const patch_place &at, T *to,
                                                const float (&values)[PATCH]) {
    const int width = (int)min(a.cols - at.tile_first_col, (int64_t)TN__TILE);
    if (a.dst_vectors) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            const int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
            const uint4 piece = make_uint4(
                element<T>::word(values, 4 * p), element<T>::word(values, 4 * p + 1),
                element<T>::word(values, 4 * p + 2), element<T>::word(values, 4 * p + 3));
            if (column < width) *(uint4 *)(to + column) = piece;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<T>(at.lane16, j);
        if (column < width) element<T>::store(to, column, values[j]);
    }
}

/* Of row i of the patch, if it is in the matrix. */
template <typename T>
__device__ __forceinline__ void store_values(const tn__cuda_dequantize_arguments &a,
                                             const patch_place &at, int i,
                                             const float (&values)[PATCH]) {
    if (at.row + i >= a.rows) return;
    store_values_at<T>(a, at, (T *)a.dst + (at.row + i) * a.cols + at.tile_first_col, values);
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

/* The bytes of the whole patch: all loads are under way before the first is waited for. */
template <typename T, typename Place>
__device__ __forceinline__ void
load_patch_bytes(uint2 (&bytes)[PATCH], const tn__cuda_dequantize_arguments &a, const Place &at) {
    if (!has_vectors(a.src.vectors, at)) {
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            bytes[i] = load_row_bytes<T>(a, at, i);
        return;
    }
    const int first = patch_column<T>(at.lane16, 0), second = patch_column<T>(at.lane16, 4);
    const int rows_in = patch_rows_in(a.rows, at);
    const int height = is_column_in(a.cols, at, first) ? rows_in : 0;
    const int second_height = is_column_in(a.cols, at, second) ? rows_in : 0;
    const unsigned char *from = a.src.data + at.row * a.cols + at.tile_first_col + first;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        bytes[i] = make_uint2(0, 0);
        if constexpr (sizeof(T) == 2) {
            if (i < height) bytes[i] = __ldg((const uint2 *)from);
        } else {
            if (i < height) bytes[i].x = __ldg((const uint32_t *)from);
            if (i < second_height) bytes[i].y = __ldg((const uint32_t *)(from + (second - first)));
        }
        from += a.cols;
    }
}

/* The scales of the patch's rows, or of its columns where the plane is stored turned; 0 outside.
 * Blocks of 128 elements, or whole tiles of them. */
template <typename Place>
__device__ __forceinline__ void
load_row_scales(float (&scale)[PATCH], const tn__cuda_dequantize_arguments &a, const Place &at) {
    const int rows_in = patch_rows_in(a.rows, at);
    const float *from =
        a.is_1d ? a.src.scale + at.tile_col * a.src.scale_stride + at.row
                : a.src.scale + at.tile_row * a.src.scale_stride + at.tile_col * a.tile_step;
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        scale[i] = i < rows_in ? __ldg(a.is_1d ? from + i : from) : 0.0f;
}

template <typename T, typename Place>
__device__ __forceinline__ void
load_column_scales(float (&scale)[PATCH], const tn__cuda_dequantize_arguments &a, const Place &at) {
    const float *from =
        a.is_1d ? a.src.scale + at.tile_row * a.src.scale_stride + at.tile_first_col
                : a.src.scale + at.tile_col * a.src.scale_stride + at.tile_row * a.tile_step;
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<T>(at.lane16, j);
        const bool is_there = is_column_in(a.cols, at, column);
        scale[j] = is_there ? __ldg(a.is_1d ? from + column : from) : 0.0f;
    }
}

#endif
