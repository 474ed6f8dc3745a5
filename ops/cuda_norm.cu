/* Kernels of the norms that take tiles: planes whose blocks are of 128 rows, once the statistics of
 * these are known.
 *
 * cuda_norm_rows.cu has gone before, and has made all that a row by itself is enough for. Bytes
 * that must move for each element of s bytes: s to read what is normalised again and 1 for each
 * plane.
 */
#include "cuda_norm.cuh"

template <typename T>
__device__ __forceinline__ void normalize_patch(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                                const tn__cuda_norm_arguments &a,
                                                const patch_place &at) {
    const int rows_in = patch_rows_in(a.cast.rows, at);
    column_factors by;
#pragma unroll
    for (int j = 0; j < PATCH; j += element<T>::VECTOR) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
        const int left = (int)min(a.cast.cols - col, (int64_t)PATCH);
        load_factors<element<T>::VECTOR>(by.gamma + j, by.beta + j, a, col, left);
    }
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        row_statistics of = {0.0f, 0.0f};
        if (i < rows_in) {
            of.rstd = __ldg(a.rstd + at.row + i);
            if (a.mean) of.mean = __ldg(a.mean + at.row + i);
            normalize_words<T>(words[i], by, a.beta != nullptr, of);
        }
        row_stay_packed<T>(words[i]); /* one row after the other, or registers run out */
    }
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_tile(const tn__cuda_norm_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    if (is_skipped(a.skip)) return;
    const patch_place at = patch_of_thread(a.cast.tiles_across);
    patch_load<T>(words, a.cast.src, a.cast.rows, a.cast.cols, a.cast.src_vectors, at);
    patch_stay_packed<T>(words);
    normalize_patch<T>(words, a, at);
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, false, true>(a.cast, at, words);
    else
        quantize_patches_2d<T, F, true, true>(a.cast, at, words);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define NORM(name, T, F)                                                                           \
    TILE_KERNEL(norm_tiles_1d_##name, tn__cuda_norm_arguments, T, 3, (norm_tile<T, F, true>))      \
    TILE_KERNEL(norm_tiles_2d_##name, tn__cuda_norm_arguments, T, 3, (norm_tile<T, F, false>))

NORM(fp32_e4m3, float, __NV_E4M3)
NORM(fp32_e5m2, float, __NV_E5M2)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2)
NORM(fp16_e4m3, __half, __NV_E4M3)
NORM(fp16_e5m2, __half, __NV_E5M2)
