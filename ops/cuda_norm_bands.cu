/* Kernels of the norms for planes alone whose blocks are of 128 rows: the statistics of a band's
 * rows and then its tiles, in one launch (cuda_norm_bands.cuh). Memory is read once, the L2 cache
 * twice. Rows are whole groups of 8 columns at their addresses.
 */
#include "cuda_norm_band_rows.cuh"

/* ---- tiles ---------------------------------------------------------------------------------- */

/* The statistics of a tile's rows. */
struct tile_statistics {
    float mean[TN__TILE], rstd[TN__TILE];
};

/* Four columns of a row of the patch, of which `words` are half. */
template <typename T>
__device__ __forceinline__ void normalize_four(uint32_t *words, const float (&gamma)[4],
                                               const float (&beta)[4], const row_statistics &of) {
    float value[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        value[j] = __fmul_rn(__fsub_rn(element<T>::value(words, j), of.mean), of.rstd);
        value[j] = canonical_of<T>(__fmaf_rn(value[j], gamma[j], beta[j]));
    }
#pragma unroll
    for (int w = 0; w < patch_words<T>::COUNT / 2; w++)
        words[w] = element<T>::word(value, w);
}

/* One half of the columns after the other, and one row after the other, or registers run out. */
template <typename T>
__device__ __forceinline__ void
normalize_patch(uint32_t (&words)[PATCH][patch_words<T>::COUNT], const tn__cuda_norm_arguments &a,
                const patch_place &at, const tile_statistics &rows) {
    const int rows_in = patch_rows_in(a.cast.rows, at);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, 4 * half);
        const int left = (int)min(a.cast.cols - col, (int64_t)4);
        float gamma[4], beta[4];
        load_factors<4, true>(gamma, beta, a, col, left);
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            const int row = at.unit * PATCH + i;
            const row_statistics of = {rows.mean[row], rows.rstd[row]};
            if (sizeof(T) == 4 || i < rows_in) /* those beyond are cleared; but registers count */
                normalize_four<T>(words[i] + half * patch_words<T>::COUNT / 2, gamma, beta, of);
            row_stay_packed<T>(words[i]);
        }
    }
    clear_patch_beyond<T>(words, a.cast.rows, a.cast.cols, at);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_tile_of_band(const tn__cuda_norm_arguments &a,
                                                  const patch_place &at, uint4 *memory) {
    __shared__ tile_statistics rows;
    uint32_t words[PATCH][patch_words<T>::COUNT];
    patch_load<T>(words, a.cast.src, a.cast.rows, a.cast.cols, a.cast.src_vectors, at);
    row_numbers_get(rows.mean, a.mean, a.cast.rows, at.tile_first_row);
    row_numbers_get(rows.rstd, a.rstd, a.cast.rows, at.tile_first_row);
    __syncthreads();
    patch_stay_packed<T>(words);
    normalize_patch<T>(words, a, at, rows);
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, true, true>(a.cast, at, words, memory);
    else
        quantize_patches_2d<T, F, true, true>(a.cast, at, words, memory);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_bands(const tn__cuda_norm_arguments &a) {
    __shared__ uint4 memory[TILE_PIECES];
    static_assert(sizeof memory >= sizeof(block_numbers) * WARPS * TN__BAND_BLOCKS_MAX, "room");
    wait_for_the_kernel_ahead();
    if (is_skipped(a.skip)) return;
    const band_part part = next_part(a.bands, a.cast.tiles_across);
    if (part.is_rows)
        norm_rows_of_band<T>(a, part.row, memory);
    else
        norm_tile_of_band<T, F, IS_1D>(a, patch_in_tile(part.tile_row, part.tile_col), memory);
}

/* ---- before a launch of bands ---------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    norm_begin(const __grid_constant__ tn__cuda_norm_begin_arguments a) {
    const int64_t row = (int64_t)blockIdx.x * TN__FLAT_THREADS + threadIdx.x;
    if (is_skipped(a.skip)) return;
    if (row < a.count) a.counts[row] = 0;
    if (row >= a.rows) return;
    if (a.numbers[0]) a.numbers[0][row] = __uint_as_float(TN__NOT_YET);
    if (a.numbers[1]) a.numbers[1][row] = __uint_as_float(TN__NOT_YET);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define NORM(name, T, F, blocks)                                                                   \
    TILE_KERNEL(norm_bands_1d_##name, tn__cuda_norm_arguments, T, blocks,                          \
                (norm_bands<T, F, true>))                                                          \
    TILE_KERNEL(norm_bands_2d_##name, tn__cuda_norm_arguments, T, blocks, (norm_bands<T, F, false>))

NORM(fp32_e4m3, float, __NV_E4M3, 2)
NORM(fp32_e5m2, float, __NV_E5M2, 2)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3, 3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2, 3)
NORM(fp16_e4m3, __half, __NV_E4M3, 2)
NORM(fp16_e5m2, __half, __NV_E5M2, 2)
