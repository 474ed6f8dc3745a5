/* Kernels that quantize a plane of FP8 blocks of 128 anew, without its values in memory between.
 *
 * A block of threads takes one 128 x 128 tile, whose values it holds as fp32 (cuda_tile.cuh): from
 * there on it is a quantize kernel. Bytes that must move for N elements: N in, N out for each
 * plane, and their scales.
 */
#include "cuda_dequantize.cuh"
#include "cuda_quantize.cuh"

/* Two codes as floats, multiplied, as the bits of the patch. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void scale_pair(uint32_t *words, uint32_t codes, float first,
                                           float second) {
    const float2 pair = fp8_pair<F>(codes);
    words[0] = __float_as_uint(__fmul_rn(pair.x, first));
    words[1] = __float_as_uint(__fmul_rn(pair.y, second));
}

/* ---- values ------------------------------------------------------------------------------- */

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void load_rows(const tn__cuda_dequantize_arguments &a,
                                          const patch_place &at, uint32_t (&words)[PATCH][PATCH]) {
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const uint2 bytes = load_row_bytes<float>(a, at, i);
        float scale = 0.0f;
        if (at.row + i < a.rows)
            scale = a.is_1d ? a.src.scale[at.tile_col * a.src.scale_stride + at.row + i]
                            : a.src.scale[at.tile_row * a.src.scale_stride + at.tile_col];
#pragma unroll
        for (int j = 0; j < PATCH; j += 2)
            scale_pair<F>(&words[i][j], (j < 4 ? bytes.x : bytes.y) >> (8 * (j % 4)), scale, scale);
    }
}

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void load_columns(const tn__cuda_dequantize_arguments &a,
                                             const patch_place &at, uint4 *tile,
                                             uint32_t (&words)[PATCH][PATCH]) {
    const int vector = element<float>::VECTOR;
    transposed_load<element<float>::VECTOR>(tile, a.src.data, a.rows, a.cols, a.src.vectors, at);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<float>(at.lane16, j);
        const int64_t col = at.tile_first_col + column;
        const uint2 bytes = transposed_get<vector>(tile, column, at.unit);
        float scale = 0.0f;
        if (col < a.cols)
            scale = a.is_1d ? a.src.scale[at.tile_row * a.src.scale_stride + col]
                            : a.src.scale[at.tile_col * a.src.scale_stride + at.tile_row];
#pragma unroll
        for (int i = 0; i < PATCH; i += 2) {
            uint32_t pair[2];
            scale_pair<F>(pair, (i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)), scale, scale);
            words[i][j] = pair[0];
            words[i + 1][j] = pair[1];
        }
    }
}

template <__nv_fp8_interpretation_t FROM, __nv_fp8_interpretation_t TO, bool IS_1D>
__device__ __forceinline__ void requantize(const tn__cuda_requantize_arguments &a) {
    __shared__ uint4 source[TILE_PIECES];
    const patch_place at = patch_of_thread(a.from.tiles_across);
    uint32_t words[PATCH][PATCH];
    if (is_skipped(a.to.skip)) return;
    if (a.is_col)
        load_columns<FROM>(a.from, at, source, words);
    else
        load_rows<FROM>(a.from, at, words);
    if constexpr (IS_1D)
        quantize_patches_1d<float, TO, true, true>(a.to, at, words);
    else
        quantize_patches_2d<float, TO, true, true>(a.to, at, words);
}

/* ---- the scaling-aware transpose ---------------------------------------------------------- */

/* The patch's codes, unscaled, and the scale of each of its rows (0 beyond the matrix). */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void load_unscaled(const tn__cuda_dequantize_arguments &a,
                                              const patch_place &at, float (&scale)[PATCH],
                                              uint32_t (&words)[PATCH][PATCH]) {
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const uint2 bytes = load_row_bytes<float>(a, at, i);
        scale[i] = 0.0f;
        if (at.row + i < a.rows)
            scale[i] = a.src.scale[at.tile_col * a.src.scale_stride + at.row + i];
#pragma unroll
        for (int j = 0; j < PATCH; j += 2)
            scale_pair<F>(&words[i][j], (j < 4 ? bytes.x : bytes.y) >> (8 * (j % 4)), 1.0f, 1.0f);
    }
}

/* The largest scale of the tile's rows that hold a number other than 0, on every thread; 1 if none
 * does. Bits of scales compare as scales do. */
__device__ __forceinline__ float largest_scale(const float (&scale)[PATCH],
                                               const uint32_t (&words)[PATCH][PATCH],
                                               uint32_t *warp_max) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        bool counts = false;
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            counts |= fabsf(__uint_as_float(words[i][j])) > 0.0f; /* not of NaN */
        if (counts) most = max(most, __float_as_uint(scale[i]));
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        most = max(most, warp_max[w]);
    return most == 0 ? 1.0f : __uint_as_float(most);
}

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void shift_plane(const tn__cuda_requantize_arguments &a) {
    __shared__ uint4 transposed[TILE_PIECES];
    __shared__ uint32_t warp_max[WARPS];
    const patch_place at = patch_of_thread(a.from.tiles_across);
    uint32_t words[PATCH][PATCH];
    float scale[PATCH];
    if (is_skipped(a.to.skip)) return;
    load_unscaled<F>(a.from, at, scale, words);
    const float most = largest_scale(scale, words, warp_max);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const float factor = scale[i] < most ? __fdiv_rn(scale[i], most) : 1.0f;
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            words[i][j] = __float_as_uint(__fmul_rn(__uint_as_float(words[i][j]), factor));
    }
    const int64_t col = at.tile_first_col + threadIdx.x;
    if (threadIdx.x < TN__TILE && col < a.to.col.scale_stride)
        a.to.col.scale[at.tile_row * a.to.col.scale_stride + col] = col < a.from.cols ? most : 0.0f;
    store_columns_cast<float, F, to_nearest>(
        a.to, transposed, at, words, [](int) { return make_float4(1.0f, 1.0f, 1.0f, 1.0f); });
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, body)                                                                         \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, 2)                              \
        name(const __grid_constant__ tn__cuda_requantize_arguments a) {                            \
        body(a);                                                                                   \
    }
#define REQUANTIZE(from, FROM, to, TO)                                                             \
    KERNEL(requantize_1d_##from##_##to, (requantize<FROM, TO, true>))                              \
    KERNEL(requantize_2d_##from##_##to, (requantize<FROM, TO, false>))

REQUANTIZE(e4m3, __NV_E4M3, e4m3, __NV_E4M3)
REQUANTIZE(e4m3, __NV_E4M3, e5m2, __NV_E5M2)
REQUANTIZE(e5m2, __NV_E5M2, e4m3, __NV_E4M3)
REQUANTIZE(e5m2, __NV_E5M2, e5m2, __NV_E5M2)
KERNEL(shift_plane_e4m3, shift_plane<__NV_E4M3>)
KERNEL(shift_plane_e5m2, shift_plane<__NV_E5M2>)
