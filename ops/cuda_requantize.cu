/* Kernels that quantize a plane of FP8 blocks of 128 anew, without its values in memory between.
 *
 * A block of threads takes one 128 x 128 tile and holds its codes as they are, in patches of 8 x 8
 * (cuda_tile.cuh), with the scales of the patch's rows or columns beside them. A code becomes a
 * half, which holds it exactly, and with its scale a value where that is wanted: 64 values, or even
 * halves, would take the registers of a block that could have reads under way. Bytes that must
 * move for N elements: N in, N out for each plane, and their scales.
 */
#include "cuda_dequantize.cuh"
#include "cuda_produce_arguments.h"
#include "cuda_quantize.cuh"

typedef __half held; /* a patch lies as one of this type does */
enum { PAIRS = PATCH / 2, BLOCKS = 4, AHEAD = BLOCKS * TN__MULTIPROCESSORS / 2 };

/* F: of the codes. */
template <__nv_fp8_interpretation_t F> struct code_patch {
    uint2 bytes[PATCH];
    float scale[PATCH]; /* of each row; BY_COLUMN: of each column; 0 outside */

    /* Columns 2 p and 2 p + 1 of a row, as halves. */
    __device__ __forceinline__ uint32_t pair(int i, int p) const {
        return fp8_halves<F>((p < PAIRS / 2 ? bytes[i].x : bytes[i].y) >> (16 * (p % 2)));
    }

    __device__ __forceinline__ void row(uint32_t (&words)[PAIRS], int i) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            words[p] = pair(i, p);
    }

    /* As patch_stay_packed does. */
    __device__ __forceinline__ void stay_packed() {
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            asm volatile("" : "+r"(bytes[i].x), "+r"(bytes[i].y));
    }
};

/* What the phases of a block share. */
struct requantize_shared {
    uint4 tile[TILE_PIECES]; /* of the source, and after all have read it of the result */
    alignas(16) float warp_max[WARPS][TN__TILE];
    alignas(16) float column_scale[TN__TILE];
};

/* ---- a patch from a plane ----------------------------------------------------------------- */

template <__nv_fp8_interpretation_t F, typename Place>
__device__ __forceinline__ void load_rows(code_patch<F> &patch,
                                          const tn__cuda_dequantize_arguments &a, const Place &at) {
    load_patch_bytes<held>(patch.bytes, a, at);
    load_row_scales(patch.scale, a, at);
}

/* From a plane that is stored turned. */
template <__nv_fp8_interpretation_t F, typename Place>
__device__ __forceinline__ void load_columns(code_patch<F> &patch,
                                             const tn__cuda_dequantize_arguments &a,
                                             const Place &at, uint4 *tile) {
    enum { VECTOR = element<held>::VECTOR };
    uint2 columns[PATCH];
    transposed_load<VECTOR>(tile, a.src.data, a.rows, a.cols, a.src.vectors, at);
    load_column_scales<held>(patch.scale, a, at);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        columns[j] = transposed_get<VECTOR>(tile, patch_column<held>(at.lane16, j), at.unit);
#pragma unroll
    for (int right = 0; right < 2; right++) {
        const uint2 *from = columns + 4 * right;
        const uint32_t upper[4] = {from[0].x, from[1].x, from[2].x, from[3].x};
        const uint32_t lower[4] = {from[0].y, from[1].y, from[2].y, from[3].y};
        uint32_t rows[PATCH];
        transpose_4x4(upper, rows);
        transpose_4x4(lower, rows + 4);
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            (right ? patch.bytes[i].y : patch.bytes[i].x) = rows[i];
    }
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

template <bool BY_COLUMN, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void value_row_maxima(float (&most)[PATCH], const code_patch<F> &patch) {
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        uint32_t words[PAIRS];
        patch.row(words, i);
        if constexpr (BY_COLUMN) {
            most[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < PATCH; j++)
                most[i] = fmaxf(most[i],
                                fabsf(__fmul_rn(element<held>::value(words, j), patch.scale[j])));
        } else {
            most[i] = scaled_size(row_maximum<held>(words), patch.scale[i]);
        }
    }
}

template <bool BY_COLUMN, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void value_column_maxima(float (&most)[PATCH],
                                                    const code_patch<F> &patch) {
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        uint32_t codes = 0;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            const uint32_t pair = patch.pair(i, p);
            if constexpr (BY_COLUMN) {
                codes = larger_pair<held>(codes, pair_sizes(pair));
            } else {
                const float scale = patch.scale[i];
                low = fmaxf(low, fabsf(__fmul_rn(element<held>::value(&pair, 0), scale)));
                high = fmaxf(high, fabsf(__fmul_rn(element<held>::value(&pair, 1), scale)));
            }
        }
        if constexpr (BY_COLUMN) {
            low = scaled_size(element<held>::value(&codes, 0), patch.scale[2 * p]);
            high = scaled_size(element<held>::value(&codes, 1), patch.scale[2 * p + 1]);
        }
        most[2 * p] = low;
        most[2 * p + 1] = high;
    }
}

/* ---- a plane from a patch ----------------------------------------------------------------- */

template <__nv_fp8_interpretation_t TO, bool BY_COLUMN, typename Place, __nv_fp8_interpretation_t F,
          typename ScaleOf>
__device__ __forceinline__ void put_rows(const tn__cuda_quantize_arguments &a, const Place &at,
                                         const code_patch<F> &patch, ScaleOf scale_of) {
    store_patch_rows<held>(a.row, a.rows, a.cols, at, scale_of, [&](int i, float scale) {
        uint32_t words[PAIRS];
        float scaled[PATCH];
        patch.row(words, i);
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            scaled[j] = __fmul_rn(
                __fmul_rn(element<held>::value(words, j), patch.scale[BY_COLUMN ? j : i]), scale);
        return cast_patch_row<TO>(scaled);
    });
}

/* `scale_of(j)`: of the lane's column j. All threads. */
template <__nv_fp8_interpretation_t TO, bool BY_COLUMN, typename Place, __nv_fp8_interpretation_t F,
          typename ScaleOf>
__device__ __forceinline__ void put_columns(const tn__cuda_quantize_arguments &a, const Place &at,
                                            const code_patch<F> &patch, uint4 *tile,
                                            ScaleOf scale_of) {
    enum { VECTOR = element<held>::VECTOR };
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        float scaled[2][PATCH];
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            const uint32_t pair = patch.pair(i, p);
#pragma unroll
            for (int c = 0; c < 2; c++)
                scaled[c][i] = __fmul_rn(element<held>::value(&pair, c),
                                         patch.scale[BY_COLUMN ? 2 * p + c : i]);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float scale = scale_of(2 * p + c);
#pragma unroll
            for (int i = 0; i < PATCH; i++)
                scaled[c][i] = __fmul_rn(scaled[c][i], scale);
            transposed_put<VECTOR>(tile, patch_column<held>(at.lane16, 2 * p + c), at.unit,
                                   cast_patch_row<TO>(scaled[c]));
        }
    }
    __syncthreads();
    transposed_store<VECTOR>(tile, a.col.data, a.rows, a.cols, a.col.vectors, at);
}

/* ---- new scales --------------------------------------------------------------------------- */

template <__nv_fp8_interpretation_t TO, bool BY_COLUMN, typename Place, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_codes_1d(const tn__cuda_quantize_arguments &a,
                                                  const Place &at, code_patch<F> &patch,
                                                  requantize_shared &shared) {
    if (a.col.data) {
        float column_max[PATCH];
        value_column_maxima<BY_COLUMN>(column_max, patch);
        column_max_share<held>(shared.warp_max, at, column_max);
        patch.stay_packed();
    }
    if (a.row.data) {
        float row_max[PATCH];
        value_row_maxima<BY_COLUMN>(row_max, patch);
        patch.stay_packed();
        const float scale = row_scale_put<float, TO>(a, at, half_warp_row_max(row_max, at.lane16));
        put_rows<TO, BY_COLUMN>(a, at, patch,
                                [=](int i) { return __shfl_sync(0xFFFFFFFFu, scale, 2 * i, 16); });
    }
    if (a.col.data) {
        patch.stay_packed();
        __syncthreads();
        column_scale_put<float, TO>(a, at, shared.warp_max, shared.column_scale);
        __syncthreads();
        put_columns<TO, BY_COLUMN>(a, at, patch, shared.tile, [&](int j) {
            return shared.column_scale[patch_column<held>(at.lane16, j)];
        });
    }
}

template <__nv_fp8_interpretation_t TO, bool BY_COLUMN, typename Place, __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_codes_2d(const tn__cuda_quantize_arguments &a,
                                                  const Place &at, code_patch<F> &patch,
                                                  requantize_shared &shared) {
    float most[PATCH], amax = 0.0f;
    if constexpr (BY_COLUMN)
        value_column_maxima<true>(most, patch);
    else
        value_row_maxima<false>(most, patch);
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        amax = fmaxf(amax, most[i]);
    patch.stay_packed();
    amax = tile_max_share(shared.warp_max[0], amax);
    const scale_pair made = block_scales<float, TO>(amax, a.amax_epsilon, a.is_pow2);
    const auto scale_of = [=](int) { return made.scale; };
    if (threadIdx.x == 0) tile_scales_put(a, at, made.inverse, a.row.data, a.col.data);
    if (a.row.data) put_rows<TO, BY_COLUMN>(a, at, patch, scale_of);
    patch.stay_packed();
    if (a.col.data) put_columns<TO, BY_COLUMN>(a, at, patch, shared.tile, scale_of);
}

template <__nv_fp8_interpretation_t TO, bool IS_1D, bool BY_COLUMN, typename Place,
          __nv_fp8_interpretation_t F>
__device__ __forceinline__ void quantize_codes(const tn__cuda_quantize_arguments &a,
                                               const Place &at, code_patch<F> &patch,
                                               requantize_shared &shared) {
    if constexpr (IS_1D)
        quantize_codes_1d<TO, BY_COLUMN>(a, at, patch, shared);
    else
        quantize_codes_2d<TO, BY_COLUMN>(a, at, patch, shared);
}

/* ---- tiles -------------------------------------------------------------------------------- */

__device__ __forceinline__ bool is_whole(const tn__cuda_requantize_arguments &a,
                                         const patch_place &at) {
    return a.from.src.vectors && (a.to.row.vectors || !a.to.row.data) &&
           (a.to.col.vectors || !a.to.col.data) && is_whole_tile(a.from.rows, a.from.cols, at);
}

/* The tile that is read half as many blocks later as run at once. */
__device__ __forceinline__ void prefetch_codes(const tn__cuda_requantize_arguments &a,
                                               bool is_col) {
    const patch_place next = patch_of_tile(blockIdx.x + AHEAD, a.from.tiles_across);
    const int64_t rows = is_col ? a.from.cols : a.from.rows;
    const int64_t cols = is_col ? a.from.rows : a.from.cols;
    prefetch_tile(a.from.src.data, rows, cols, is_col ? next.tile_first_col : next.tile_first_row,
                  is_col ? next.tile_first_row : next.tile_first_col, TN__TILE);
}

template <__nv_fp8_interpretation_t FROM, __nv_fp8_interpretation_t TO, bool IS_1D, typename Place>
__device__ __forceinline__ void requantize_tile(const tn__cuda_requantize_arguments &a,
                                                const Place &at, requantize_shared &shared) {
    code_patch<FROM> patch;
    if (a.is_col) {
        load_columns(patch, a.from, at, shared.tile);
        if (Place::IS_WHOLE) prefetch_codes(a, true);
        quantize_codes<TO, IS_1D, true>(a.to, at, patch, shared);
    } else {
        load_rows(patch, a.from, at);
        if (Place::IS_WHOLE) prefetch_codes(a, false);
        quantize_codes<TO, IS_1D, false>(a.to, at, patch, shared);
    }
}

/* Blocks of 128 x 128 gain nothing from a whole place. Places are found anew, so that nothing that
 * follows from one is kept for both paths. */
template <__nv_fp8_interpretation_t FROM, __nv_fp8_interpretation_t TO, bool IS_1D>
__device__ __forceinline__ void requantize(const tn__cuda_requantize_arguments &a) {
    __shared__ requantize_shared shared;
    const uint32_t across = a.from.tiles_across;
    if (is_skipped(a.to.skip)) return;
    const patch_place at = patch_of_thread(across);
    if (IS_1D && is_whole(a, at))
        requantize_tile<FROM, TO, IS_1D>(a, whole_place(patch_of_thread(across)), shared);
    else
        requantize_tile<FROM, TO, IS_1D>(a, patch_of_thread(across), shared);
}

/* ---- the scaling-aware transpose ---------------------------------------------------------- */

/* The largest scale of the tile's rows that hold a number other than 0, on every thread; 1 if none
 * does. Bits of scales compare as scales do. */
template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ float largest_scale(const code_patch<F> &patch, uint32_t *warp_max) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        uint32_t words[PAIRS];
        patch.row(words, i);
        if (row_maximum<held>(words) > 0.0f) most = max(most, __float_as_uint(patch.scale[i]));
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        most = max(most, warp_max[w]);
    return most == 0 ? 1.0f : __uint_as_float(most);
}

template <__nv_fp8_interpretation_t F, typename Place>
__device__ __forceinline__ void shift_tile(const tn__cuda_requantize_arguments &a, const Place &at,
                                           uint4 *transposed, uint32_t *warp_max) {
    code_patch<F> patch;
    load_rows(patch, a.from, at);
    prefetch_codes(a, false);
    const float most = largest_scale(patch, warp_max);
    patch.stay_packed();
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        patch.scale[i] = patch.scale[i] < most ? __fdiv_rn(patch.scale[i], most) : 1.0f;
    const int64_t col = at.tile_first_col + threadIdx.x;
    if (threadIdx.x < TN__TILE && col < a.to.col.scale_stride)
        a.to.col.scale[at.tile_row * a.to.col.scale_stride + col] = col < a.from.cols ? most : 0.0f;
    put_columns<F, false>(a.to, at, patch, transposed, [](int) { return 1.0f; });
}

template <__nv_fp8_interpretation_t F>
__device__ __forceinline__ void shift_plane(const tn__cuda_requantize_arguments &a) {
    __shared__ uint4 transposed[TILE_PIECES];
    __shared__ uint32_t warp_max[WARPS];
    const patch_place at = patch_of_thread(a.from.tiles_across);
    if (is_skipped(a.to.skip)) return;
    if (is_whole(a, at))
        shift_tile<F>(a, whole_place(at), transposed, warp_max);
    else
        shift_tile<F>(a, at, transposed, warp_max);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

/* Codes take so few registers that 4 blocks fit. */
#define KERNEL(name, body) TILE_KERNEL(name, tn__cuda_requantize_arguments, held, BLOCKS, body)
#define REQUANTIZE(from, FROM, to, TO)                                                             \
    KERNEL(requantize_1d_##from##_##to, (requantize<FROM, TO, true>))                              \
    KERNEL(requantize_2d_##from##_##to, (requantize<FROM, TO, false>))

REQUANTIZE(e4m3, __NV_E4M3, e4m3, __NV_E4M3)
REQUANTIZE(e4m3, __NV_E4M3, e5m2, __NV_E5M2)
REQUANTIZE(e5m2, __NV_E5M2, e4m3, __NV_E4M3)
REQUANTIZE(e5m2, __NV_E5M2, e5m2, __NV_E5M2)
KERNEL(shift_plane_e4m3, shift_plane<__NV_E4M3>)
KERNEL(shift_plane_e5m2, shift_plane<__NV_E5M2>)
