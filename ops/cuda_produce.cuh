/* From values in registers to everything that may be wanted of them: themselves, the sums of their
 * columns, and both FP8 planes. Shared by the kernels that make values and cast them.
 *
 * A producer fills the patch of a thread (cuda_tile.cuh) with values of its type, zeros outside of
 * the matrix; from there on all goes as in a plain cast, and as if the rounded value had been read.
 */
#ifndef TENURE_CUDA_PRODUCE_CUH
#define TENURE_CUDA_PRODUCE_CUH

#include "cuda_produce_arguments.h"
#include "cuda_quantize.cuh"

/* ---- elements whose type is known only at run time: 0 fp32, 1 bf16, 2 fp16 ------------------ */

__device__ __forceinline__ float load_as(int dtype, const void *from, int64_t at) {
    if (dtype == 0) return element<float>::load(from, at);
    if (dtype == 1) return element<__nv_bfloat16>::load(from, at);
    return element<__half>::load(from, at);
}

__device__ __forceinline__ void store_as(int dtype, void *to, int64_t at, float value) {
    if (dtype == 0)
        element<float>::store(to, at, canonical_of<float>(value));
    else if (dtype == 1)
        element<__nv_bfloat16>::store(to, at, value);
    else
        element<__half>::store(to, at, value);
}

/* ---- pieces and patches --------------------------------------------------------------------- */

/* VECTOR neighbours of one row as floats. */
template <typename T> struct piece_values { float at[element<T>::VECTOR]; };

template <typename T> __device__ __forceinline__ piece_values<T> unpack(uint4 piece) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    piece_values<T> values;
#pragma unroll
    for (int v = 0; v < element<T>::VECTOR; v++)
        values.at[v] = element<T>::value(words, v);
    return values;
}

/* Into four words, any NaN as the canonical one. */
template <typename T>
__device__ __forceinline__ void pack_piece(uint32_t *words, const piece_values<T> &values) {
    float canonical[element<T>::VECTOR];
#pragma unroll
    for (int v = 0; v < element<T>::VECTOR; v++)
        canonical[v] = canonical_of<T>(values.at[v]);
#pragma unroll
    for (int w = 0; w < 4; w++)
        words[w] = element<T>::word(canonical, w);
}

/* Into the words of piece p of a row of the patch. */
template <typename T>
__device__ __forceinline__ void pack(uint32_t (&words)[patch_words<T>::COUNT], int p,
                                     const piece_values<T> &values) {
    pack_piece<T>(words + 4 * p, values);
}

/* Element j of a row of the patch; `words` was 0. */
template <typename T>
__device__ __forceinline__ void put_element(uint32_t (&words)[patch_words<T>::COUNT], int j,
                                            float value) {
    const float pair[2] = {j % 2 && sizeof(T) == 2 ? 0.0f : canonical_of<T>(value),
                           j % 2 && sizeof(T) == 2 ? value : 0.0f};
    if constexpr (sizeof(T) == 4)
        words[j] = element<T>::word(pair, 0);
    else
        words[j / 2] |= element<T>::word(pair, 0);
}

/* Writes the patch to `value` [rows, cols]. */
template <typename T>
__device__ __forceinline__ void store_patch(void *value, const tn__cuda_quantize_arguments &a,
                                            const patch_place &at,
                                            const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    const int rows_in = patch_rows_in(a.rows, at);
    T *row = (T *)value + at.row * a.cols + at.tile_first_col;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        if (i < rows_in) {
            if (a.src_vectors) {
#pragma unroll
                for (int p = 0; p < patch_words<T>::PIECES; p++) {
                    const int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
                    if (at.tile_first_col + column < a.cols)
                        *(uint4 *)(row + column) =
                            make_uint4(words[i][4 * p], words[i][4 * p + 1], words[i][4 * p + 2],
                                       words[i][4 * p + 3]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < PATCH; j++) {
                    const int column = patch_column<T>(at.lane16, j);
                    if (at.tile_first_col + column < a.cols)
                        element<T>::store(row, column, element<T>::value(words[i], j));
                }
            }
        }
        row += a.cols;
    }
}

/* The sums of the tile's columns, in the order that tn_bias_gradient fixes: `sum` is what a lane
 * has of its 8 rows; a warp adds up its two groups, then a thread the 8 warps of one column. */
template <typename T>
__device__ __forceinline__ void store_lane_sums(float *tile_sums,
                                                const tn__cuda_quantize_arguments &a,
                                                const patch_place &at, const float (&sum)[PATCH]) {
    __shared__ __align__(16) float warp_sum[WARPS][TN__TILE];
    float kept[4];
    const int upper = at.unit & 1; /* the upper half warp keeps columns 4 ... 7 */
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float keep = upper ? sum[j + 4] : sum[j];
        const float give = upper ? sum[j] : sum[j + 4];
        kept[j] = __fadd_rn(keep, __shfl_xor_sync(0xFFFFFFFFu, give, 16));
    }
    const int column = patch_column<T>(at.lane16, upper * 4);
    *(float4 *)&warp_sum[at.unit / 2][column] = make_float4(kept[0], kept[1], kept[2], kept[3]);
    __syncthreads();
    const int64_t col = at.tile_first_col + threadIdx.x;
    if (threadIdx.x >= TN__TILE || col >= a.cols) return;
    float of_tile = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        of_tile = __fadd_rn(of_tile, warp_sum[w][threadIdx.x]);
    tile_sums[at.tile_row * a.cols + col] = of_tile;
}

/* Those of the values in the patch. */
template <typename T>
__device__ __forceinline__ void
store_tile_sums(float *tile_sums, const tn__cuda_quantize_arguments &a, const patch_place &at,
                const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    float sum[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        sum[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            sum[j] = __fadd_rn(sum[j], element<T>::value(words[i], j));
    }
    store_lane_sums<T>(tile_sums, a, at, sum);
}

/* All that is wanted of the tile; by all threads of the block. */
template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void store_produced(const tn__cuda_produce_arguments &a,
                                               const patch_place &at,
                                               uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    if (a.value) store_patch<T>(a.value, a.cast, at, words);
    if (a.tile_sums) {
        store_tile_sums<T>(a.tile_sums, a.cast, at, words);
        patch_stay_packed<T>(words);
    }
    if (!a.cast.row.data && !a.cast.col.data) return;
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, true, true>(a.cast, at, words);
    else
        quantize_patches_2d<T, F, true, true>(a.cast, at, words);
}

#endif
