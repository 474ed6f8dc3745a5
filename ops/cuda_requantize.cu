/* Kernels that quantize a plane of FP8 blocks of 128 anew, without its values in memory between.
 *
 * A block of threads takes one 128 x 128 tile and holds its codes as halves, which hold each of
 * them exactly, in patches of 8 x 8 (cuda_tile.cuh), with the scales of the patch's rows or
 * columns beside them. A value is a code times its scale, and is made where it is wanted: 64 of
 * them would take the registers of a block that could have reads under way. Bytes that must move
 * for N elements: N in, N out for each plane, and their scales.
 */
#include "cuda_dequantize.cuh"
#include "cuda_quantize.cuh"

typedef __half held; /* a patch lies as one of this type does */

struct code_patch {
    uint32_t words[PATCH][patch_words<held>::COUNT];
    float scale[PATCH]; /* of each row; BY_COLUMN: of each column; 0 outside */
};

/* What the phases of a block share. */
struct requantize_shared {
    uint4 tile[TILE_PIECES]; /* of the source, and after all have read it of the result */
    alignas(16) float warp_max[WARPS][TN__TILE];
    alignas(16) float column_scale[TN__TILE];
};

__device__ __forceinline__ float code_of(const code_patch &patch, int i, int j) {
    return element<held>::value(patch.words[i], j);
}

template <bool BY_COLUMN>
__device__ __forceinline__ float value_of(const code_patch &patch, int i, int j) {
    return __fmul_rn(code_of(patch, i, j), patch.scale[BY_COLUMN ? j : i]);
}

/* ---- a patch from a plane ----------------------------------------------------------------- */

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void unpack_row(code_patch &patch, int i, uint2 bytes) {
    patch.words[i][0] = fp8_halves<F>(bytes.x);
    patch.words[i][1] = fp8_halves<F>(bytes.x >> 16);
    patch.words[i][2] = fp8_halves<F>(bytes.y);
    patch.words[i][3] = fp8_halves<F>(bytes.y >> 16);
}

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void load_rows(code_patch &patch, const tn__cuda_dequantize_arguments &a,
                                          const patch_place &at) {
    uint2 bytes[PATCH];
    load_patch_bytes<held>(bytes, a, at);
    load_row_scales(patch.scale, a, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        unpack_row<F>(patch, i, bytes[i]);
}

/* From a plane that is stored turned. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void load_columns(code_patch &patch,
                                             const tn__cuda_dequantize_arguments &a,
                                             const patch_place &at, uint4 *tile) {
    enum { VECTOR = element<held>::VECTOR };
    uint32_t columns[PATCH][2], rows[PATCH][2];
    transposed_load<VECTOR>(tile, a.src.data, a.rows, a.cols, a.src.vectors, at);
    load_column_scales<held>(patch.scale, a, at);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const uint2 bytes = transposed_get<VECTOR>(tile, patch_column<held>(at.lane16, j), at.unit);
        columns[j][0] = bytes.x;
        columns[j][1] = bytes.y;
    }
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
#pragma unroll
        for (int right = 0; right < 2; right++) {
            const uint32_t from[4] = {columns[4 * right][upper], columns[4 * right + 1][upper],
                                      columns[4 * right + 2][upper], columns[4 * right + 3][upper]};
            uint32_t to[4];
            transpose_4x4(from, to);
#pragma unroll
            for (int i = 0; i < 4; i++)
                rows[4 * upper + i][right] = to[i];
        }
    }
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        unpack_row<F>(patch, i, make_uint2(rows[i][0], rows[i][1]));
}

/* ---- maxima --------------------------------------------------------------------------------
 *
 * Where a row or column has one scale, the largest of its codes gives the largest of its values,
 * since rounding keeps the order.
 */

/* NaN counts for nothing: neither as a code nor as a scale or what comes of an infinite one. */
__device__ __forceinline__ float scaled_size(float most, float scale) {
    return fmaxf(0.0f, fabsf(__fmul_rn(most, scale)));
}

template <bool BY_COLUMN>
__device__ __forceinline__ void value_row_maxima(float (&most)[PATCH], const code_patch &patch) {
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        if constexpr (BY_COLUMN) {
            most[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < PATCH; j++)
                most[i] = fmaxf(most[i], fabsf(value_of<true>(patch, i, j)));
        } else {
            most[i] = scaled_size(row_maximum<held>(patch.words[i]), patch.scale[i]);
        }
    }
}

template <bool BY_COLUMN>
__device__ __forceinline__ void value_column_maxima(float (&most)[PATCH], const code_patch &patch) {
    if constexpr (BY_COLUMN) column_maxima<held>(most, patch.words);
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        if constexpr (BY_COLUMN) {
            most[j] = scaled_size(most[j], patch.scale[j]);
        } else {
            most[j] = 0.0f;
#pragma unroll
            for (int i = 0; i < PATCH; i++)
                most[j] = fmaxf(most[j], fabsf(value_of<false>(patch, i, j)));
        }
    }
}

/* ---- a plane from a patch ----------------------------------------------------------------- */

template <__nv_fp8_interpretation_t F, bool BY_COLUMN, typename ScaleOf>
__device__ __forceinline__ void put_rows(const tn__cuda_quantize_arguments &a,
                                         const patch_place &at, const code_patch &patch,
                                         ScaleOf scale_of) {
    store_patch_rows<held>(a.row, a.rows, a.cols, at, scale_of, [&](int i, float scale) {
        float scaled[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            scaled[j] = __fmul_rn(value_of<BY_COLUMN>(patch, i, j), scale);
        return cast_patch_row<F>(scaled);
    });
}

/* `scale_of(j)`: of the lane's column j. All threads. */
template <__nv_fp8_interpretation_t F, bool BY_COLUMN, typename ScaleOf>
__device__ __forceinline__ void put_columns(const tn__cuda_quantize_arguments &a,
                                            const patch_place &at, const code_patch &patch,
                                            uint4 *tile, ScaleOf scale_of) {
    enum { VECTOR = element<held>::VECTOR };
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const float scale = scale_of(j);
        float scaled[PATCH];
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            scaled[i] = __fmul_rn(value_of<BY_COLUMN>(patch, i, j), scale);
        transposed_put<VECTOR>(tile, patch_column<held>(at.lane16, j), at.unit,
                               cast_patch_row<F>(scaled));
    }
    __syncthreads();
    transposed_store<VECTOR>(tile, a.col.data, a.rows, a.cols, a.col.vectors, at);
}

/* ---- new scales --------------------------------------------------------------------------- */

template <__nv_fp8_interpretation_t F, bool BY_COLUMN>
__device__ __forceinline__ void quantize_codes_1d(const tn__cuda_quantize_arguments &a,
                                                  const patch_place &at, code_patch &patch,
                                                  requantize_shared &shared) {
    if (a.col.data) {
        float column_max[PATCH];
        value_column_maxima<BY_COLUMN>(column_max, patch);
        column_max_share<held>(shared.warp_max, at, column_max);
        patch_stay_packed<held>(patch.words);
    }
    if (a.row.data) {
        float row_max[PATCH];
        value_row_maxima<BY_COLUMN>(row_max, patch);
        patch_stay_packed<held>(patch.words);
        const float scale = row_scale_put<float, F>(a, at, row_max);
        put_rows<F, BY_COLUMN>(a, at, patch,
                               [=](int i) { return __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16); });
    }
    if (a.col.data) {
        patch_stay_packed<held>(patch.words);
        __syncthreads();
        column_scale_put<float, F>(a, at, shared.warp_max, shared.column_scale);
        __syncthreads();
        put_columns<F, BY_COLUMN>(a, at, patch, shared.tile, [&](int j) {
            return shared.column_scale[patch_column<held>(at.lane16, j)];
        });
    }
}

template <__nv_fp8_interpretation_t F, bool BY_COLUMN>
__device__ __forceinline__ void quantize_codes_2d(const tn__cuda_quantize_arguments &a,
                                                  const patch_place &at, code_patch &patch,
                                                  requantize_shared &shared) {
    float most[PATCH], amax = 0.0f;
    if constexpr (BY_COLUMN)
        value_column_maxima<true>(most, patch);
    else
        value_row_maxima<false>(most, patch);
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        amax = fmaxf(amax, most[i]);
    patch_stay_packed<held>(patch.words);
    amax = tile_max_share(shared.warp_max[0], amax);
    const float scale = block_scale<float, F>(amax, a.amax_epsilon, a.is_pow2);
    const auto scale_of = [=](int) { return scale; };
    if (threadIdx.x == 0) tile_scales_put(a, at, scale, a.row.data, a.col.data);
    if (a.row.data) put_rows<F, BY_COLUMN>(a, at, patch, scale_of);
    patch_stay_packed<held>(patch.words);
    if (a.col.data) put_columns<F, BY_COLUMN>(a, at, patch, shared.tile, scale_of);
}

template <__nv_fp8_interpretation_t F, bool IS_1D, bool BY_COLUMN>
__device__ __forceinline__ void quantize_codes(const tn__cuda_quantize_arguments &a,
                                               const patch_place &at, code_patch &patch,
                                               requantize_shared &shared) {
    if constexpr (IS_1D)
        quantize_codes_1d<F, BY_COLUMN>(a, at, patch, shared);
    else
        quantize_codes_2d<F, BY_COLUMN>(a, at, patch, shared);
}

template <__nv_fp8_interpretation_t FROM, __nv_fp8_interpretation_t TO, bool IS_1D>
__device__ __forceinline__ void requantize(const tn__cuda_requantize_arguments &a) {
    __shared__ requantize_shared shared;
    const patch_place at = patch_of_thread(a.from.tiles_across);
    code_patch patch;
    if (is_skipped(a.to.skip)) return;
    if (a.is_col) {
        load_columns<FROM>(patch, a.from, at, shared.tile);
        quantize_codes<TO, IS_1D, true>(a.to, at, patch, shared);
    } else {
        load_rows<FROM>(patch, a.from, at);
        quantize_codes<TO, IS_1D, false>(a.to, at, patch, shared);
    }
}

/* ---- the scaling-aware transpose ---------------------------------------------------------- */

/* The largest scale of the tile's rows that hold a number other than 0, on every thread; 1 if none
 * does. Bits of scales compare as scales do. */
__device__ __forceinline__ float largest_scale(const code_patch &patch, uint32_t *warp_max) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        if (row_maximum<held>(patch.words[i]) > 0.0f)
            most = max(most, __float_as_uint(patch.scale[i]));
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
    code_patch patch;
    if (is_skipped(a.to.skip)) return;
    load_rows<F>(patch, a.from, at);
    const float most = largest_scale(patch, warp_max);
    patch_stay_packed<held>(patch.words);
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        patch.scale[i] = patch.scale[i] < most ? __fdiv_rn(patch.scale[i], most) : 1.0f;
    const int64_t col = at.tile_first_col + threadIdx.x;
    if (threadIdx.x < TN__TILE && col < a.to.col.scale_stride)
        a.to.col.scale[at.tile_row * a.to.col.scale_stride + col] = col < a.from.cols ? most : 0.0f;
    put_columns<F, false>(a.to, at, patch, transposed, [](int) { return 1.0f; });
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, body) TILE_KERNEL(name, tn__cuda_requantize_arguments, held, 3, body)
#define REQUANTIZE(from, FROM, to, TO)                                                             \
    KERNEL(requantize_1d_##from##_##to, (requantize<FROM, TO, true>))                              \
    KERNEL(requantize_2d_##from##_##to, (requantize<FROM, TO, false>))

REQUANTIZE(e4m3, __NV_E4M3, e4m3, __NV_E4M3)
REQUANTIZE(e4m3, __NV_E4M3, e5m2, __NV_E5M2)
REQUANTIZE(e5m2, __NV_E5M2, e4m3, __NV_E4M3)
REQUANTIZE(e5m2, __NV_E5M2, e5m2, __NV_E5M2)
KERNEL(shift_plane_e4m3, shift_plane<__NV_E4M3>)
KERNEL(shift_plane_e5m2, shift_plane<__NV_E5M2>)
