/* Kernels of MXFP8: FP8 elements with a power of two for 32 of them, along a row or a column.
 *
 * A block of threads takes one 128 x 128 tile and reads it once (cuda_tile.cuh), also for both
 * planes: it holds 4 x 128 whole blocks of either kind, and their scales are, with all padding,
 * whole words of 4 bytes (ROW) or whole rows of 128 (COL). COL is not stored turned. Bytes that
 * must move for N elements of s bytes: s N in, 33/32 N out for each plane.
 */
#include "cuda_dequantize.cuh"
#include "cuda_quantize.cuh"

enum { MX_BLOCK = 32, MX_BLOCKS = TN__TILE / MX_BLOCK };

/* ---- scales ------------------------------------------------------------------------------- */

/* As tn__float_to_e8m0_up and its like do (host_number.h). */
__device__ __forceinline__ uint32_t e8m0_up(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (bits <= 0x00400000u) return 0;
    return min((bits + 0x7FFFFFu) >> 23, 0xFEu);
}

__device__ __forceinline__ float e8m0_value(uint32_t code) {
    if (code == 0) return __uint_as_float(0x00400000u);
    return __uint_as_float(code == 0xFF ? 0x7FFFFFFFu : code << 23);
}

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ uint32_t mx_scale(const tn__cuda_quantize_arguments &a, float amax) {
    return e8m0_up(__fmul_rn(fmaxf(amax, a.amax_epsilon), 1.0f / format_max<F>()));
}

__device__ __forceinline__ float mx_factor(uint32_t scale) { return e8m0_value(254 - scale); }

/* Where the first byte of a row of scales is, from a column of it on. */
__device__ __forceinline__ unsigned char *mx_scale_row(const tn__cuda_plane &plane, int64_t row,
                                                       int64_t col) {
    return (unsigned char *)plane.scale + row * plane.scale_stride + col;
}

/* ---- quantize ----------------------------------------------------------------------------- */

/* Writes the scales of a row of the tile, which the threads have put together. */
__device__ __forceinline__ void mx_row_scales_store(const tn__cuda_quantize_arguments &a,
                                                    const patch_place &at,
                                                    const uint32_t *row_scale) {
    const int row = (int)threadIdx.x;
    if (row >= TN__TILE) return;
    *(uint32_t *)mx_scale_row(a.row, at.tile_first_row + row, (int64_t)at.tile_col * MX_BLOCKS) =
        row_scale[row];
}

template <typename T, __nv_fp8_interpretation_t F, typename R>
__device__ __forceinline__ void mx_rows(const tn__cuda_quantize_arguments &a, const patch_place &at,
                                        uint32_t *row_scale,
                                        uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    using factors = row_factors<T, MX_BLOCK>;
    const R rounding(a);
    const auto make = [&](int row, int block, float(&of)[factors::OWN]) {
#pragma unroll
        for (int r = 0; r < factors::OWN; r++) {
            const uint32_t scale = mx_scale<F>(a, of[r]);
            const bool is_there = at.tile_first_row + row + r < a.rows &&
                                  at.tile_first_col + block * MX_BLOCK < a.cols;
            ((unsigned char *)row_scale)[(row + r) * MX_BLOCKS + block] =
                (unsigned char)(is_there ? scale : 0);
            of[r] = mx_factor(scale);
        }
    };
    const factors made(at, words, make);
    store_patch_rows<T>(
        a.row, a.rows, a.cols, at, [&](int i) { return made.of_row(i); },
        [&](int i, const typename factors::of_pieces &of_row) {
            float scaled[PATCH];
            scale_row<T>(scaled, words[i], of_row);
            return R::template codes<F>(scaled, rounding.template of_row<T>(at, i));
        });
    __syncthreads();
    mx_row_scales_store(a, at, row_scale);
}

/* Thread c < 128: the scales of column c, from the maxima of each warp's 16 rows. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void
mx_column_scales_put(const tn__cuda_quantize_arguments &a, const patch_place &at,
                     const float (*warp_max)[TN__TILE], float (*factor)[TN__TILE]) {
    const int column = (int)threadIdx.x;
    if (column >= TN__TILE) return;
    const int64_t first_row = (int64_t)at.tile_row * MX_BLOCKS;
#pragma unroll
    for (int b = 0; b < MX_BLOCKS; b++) {
        const float amax = fmaxf(warp_max[2 * b][column], warp_max[2 * b + 1][column]);
        const uint32_t scale = mx_scale<F>(a, amax);
        const bool is_there =
            at.tile_first_row + b * MX_BLOCK < a.rows && at.tile_first_col + column < a.cols;
        factor[b][column] = mx_factor(scale);
        *mx_scale_row(a.col, first_row + b, at.tile_first_col + column) =
            (unsigned char)(is_there ? scale : 0);
    }
}

template <typename T, __nv_fp8_interpretation_t F, typename R>
__device__ __forceinline__ void mx_cols(const tn__cuda_quantize_arguments &a, const patch_place &at,
                                        float (*warp_max)[TN__TILE], float (*factor)[TN__TILE],
                                        uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    const R rounding(a);
    column_max_put<T>(warp_max, at, words);
    patch_stay_packed<T>(words);
    __syncthreads();
    mx_column_scales_put<F>(a, at, warp_max, factor);
    __syncthreads();
    alignas(16) float of_column[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j += 4)
        *(float4 *)&of_column[j] =
            *(const float4 *)&factor[at.unit * PATCH / MX_BLOCK][patch_column<T>(at.lane16, j)];
    const auto nothing_of = [](int) { return 0; };
    store_patch_rows<T>(a.col, a.rows, a.cols, at, nothing_of, [&](int i, int) {
        float scaled[PATCH];
        row_stay_packed<T>(words[i]);
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            scaled[j] = __fmul_rn(element<T>::value(words[i], j), of_column[j]);
        return R::template codes<F>(scaled, rounding.template of_row<T>(at, i));
    });
}

template <typename T, __nv_fp8_interpretation_t F, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void quantize_mxfp8(const tn__cuda_quantize_arguments &a) {
    __shared__ uint32_t row_scale[TN__TILE];
    __shared__ __align__(16) float warp_max[WARPS][TN__TILE]; /* not there without COL */
    __shared__ __align__(16) float factor[MX_BLOCKS][TN__TILE];
    const patch_place at = patch_of_thread(a.tiles_across);
    uint32_t words[PATCH][patch_words<T>::COUNT];

    if (is_skipped(a.skip)) return;
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    if (ROW && a.row.data) {
        mx_rows<T, F, R>(a, at, row_scale, words);
        patch_stay_packed<T>(words);
    }
    if (COL && a.col.data) mx_cols<T, F, R>(a, at, warp_max, factor, words);
}

/* ---- dequantize --------------------------------------------------------------------------- */

/* The scales of the lane's 8 elements of a row: one for each piece of them, or for each column. */
template <typename T, bool COL>
__device__ __forceinline__ void mx_scales_of(const tn__cuda_dequantize_arguments &a,
                                             const patch_place &at, int i, uint32_t *code) {
    const int step = COL ? 1 : element<T>::VECTOR;
#pragma unroll
    for (int j = 0; j < PATCH; j += step) {
        const int64_t row = at.row + i, col = at.tile_first_col + patch_column<T>(at.lane16, j);
        code[j / step] = 0;
        if (row < a.rows && col < a.cols)
            code[j / step] = __ldg(COL ? mx_scale_row(a.src, row / MX_BLOCK, col)
                                       : mx_scale_row(a.src, row, col / MX_BLOCK));
    }
}

template <typename T, __nv_fp8_interpretation_t F, bool COL>
__device__ __forceinline__ void dequantize_mxfp8(const tn__cuda_dequantize_arguments &a) {
    enum { EACH = COL ? 1 : element<T>::VECTOR, OF_ROW = PATCH / EACH, ROWS = COL ? 1 : PATCH };
    const patch_place at = patch_of_thread(a.tiles_across);
    uint2 bytes[PATCH];
    uint32_t code[ROWS][OF_ROW]; /* COL: one row of them for all rows of the patch */
    if (is_skipped(a.skip)) return;
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        bytes[i] = load_row_bytes<T>(a, at, i);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        mx_scales_of<T, COL>(a, at, i, code[i]);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float values[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j += 2) {
            const uint32_t word = j < 4 ? bytes[i].x : bytes[i].y;
            const float2 pair = fp8_pair<F>(word >> (8 * (j % 4)));
            const uint32_t *of_row = code[COL ? 0 : i];
            values[j] = __fmul_rn(pair.x, e8m0_value(of_row[j / EACH]));
            values[j + 1] = __fmul_rn(pair.y, e8m0_value(of_row[(j + 1) / EACH]));
        }
        store_values<T>(a, at, i, values);
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define QUANTIZE(source, T, format, F)                                                             \
    TILE_KERNEL(quantize_mxfp8_row_##source##_##format, tn__cuda_quantize_arguments, T, 3,         \
                (quantize_mxfp8<T, F, true, false>))                                               \
    TILE_KERNEL(quantize_mxfp8_col_##source##_##format, tn__cuda_quantize_arguments, T, 3,         \
                (quantize_mxfp8<T, F, false, true>))                                               \
    TILE_KERNEL(quantize_mxfp8_both_##source##_##format, tn__cuda_quantize_arguments, T, 3,        \
                (quantize_mxfp8<T, F, true, true>))                                                \
    TILE_KERNEL(quantize_mxfp8_stochastic_##source##_##format, tn__cuda_quantize_arguments, T, 2,  \
                (quantize_mxfp8<T, F, true, true, stochastically>))                                \
    TILE_KERNEL(dequantize_mxfp8_row_##format##_##source, tn__cuda_dequantize_arguments, T, 3,     \
                (dequantize_mxfp8<T, F, false>))                                                   \
    TILE_KERNEL(dequantize_mxfp8_col_##format##_##source, tn__cuda_dequantize_arguments, T, 3,     \
                (dequantize_mxfp8<T, F, true>))

QUANTIZE(fp32, float, e4m3, __NV_E4M3)
QUANTIZE(fp32, float, e5m2, __NV_E5M2)
QUANTIZE(bf16, __nv_bfloat16, e4m3, __NV_E4M3)
QUANTIZE(bf16, __nv_bfloat16, e5m2, __NV_E5M2)
QUANTIZE(fp16, __half, e4m3, __NV_E4M3)
QUANTIZE(fp16, __half, e5m2, __NV_E5M2)
