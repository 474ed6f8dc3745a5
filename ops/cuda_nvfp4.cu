/* Kernels of NVFP4: E2M1 elements, an E4M3 scale for 16 of them along a stored row, and one fp32
 * scale of the tensor, which follows from its amax (cuda_tensor.cu collects it first).
 *
 * A block of threads takes one 128 x 128 tile (cuda_tile.cuh). Bytes that must move for N elements
 * of s bytes: 2 s N in, 9/16 N out for each plane.
 *
 * Transposed codes go through shared memory as words of 8 codes: the 8 rows of a patch in one
 * column. Word u of column k lies at 16 k + (u ^ swizzle(k)), as units of FP8 do.
 */
#include "cuda_dequantize.cuh"
#include "cuda_quantize.cuh"

enum { NV_BLOCK = 16, NV_BLOCKS = TN__TILE / NV_BLOCK };

/* ---- numbers ------------------------------------------------------------------------------ */

/* The code of element j of the 8 that a lane holds of a row. */
__device__ __forceinline__ uint32_t e2m1_code(float value, int, const to_nearest::numbers &) {
    return tn__round_to_nearest(tn__type_e2m1(), value);
}

__device__ __forceinline__ uint32_t e2m1_code(float value, int j,
                                              const stochastically::numbers &random) {
    return tn__round_stochastically(tn__type_e2m1(), value, tn__random_number(random.words, j));
}

__device__ __forceinline__ float e2m1_value(uint32_t code) {
    const float magnitude = __fmul_rn(__uint_as_float((code & 7u) << 22), 0x1p126f);
    return __uint_as_float(__float_as_uint(magnitude) | (code & 8u) << 28);
}

__device__ __forceinline__ float largest_float() { return element<float>::max_finite(); }

/* The two scales of the tensor: what its elements are multiplied with, and what is stored. */
struct nv_global {
    float factor;
    float inverse;
};

__device__ __forceinline__ nv_global nv_global_of(const tn__cuda_quantize_arguments &a) {
    const float amax = fmaxf(__int_as_float(*a.total), a.amax_epsilon);
    nv_global global = {1.0f, 1.0f};
    if (amax == 0.0f || isinf(amax)) return global;
    global.factor = fminf(__fdiv_rn(2688.0f, amax), largest_float());
    global.inverse = inverse_scale(global.factor);
    return global;
}

__device__ __forceinline__ float e4m3_value(uint32_t code) { return fp8_pair<__NV_E4M3>(code).x; }

/* The E4M3 code of a block's scale. */
__device__ __forceinline__ uint32_t nv_scale(float amax, const nv_global &global) {
    const float scale = __fmul_rn(__fdiv_rn(amax, 6.0f), global.factor);
    return __nv_cvt_float_to_fp8(scale, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float nv_factor(uint32_t scale, const nv_global &global) {
    return fminf(inverse_scale(__fmul_rn(e4m3_value(scale), global.inverse)), largest_float());
}

/* ---- quantize ----------------------------------------------------------------------------- */

/* 8 codes of a row of the patch: one word, or with 32-bit elements two halves of one apart. */
template <typename T>
__device__ __forceinline__ void nv_store_row(const tn__cuda_quantize_arguments &a,
                                             const patch_place &at, int i, uint32_t codes) {
    const int vector = element<T>::VECTOR;
    const int64_t row_bytes = (a.cols + 1) / 2;
    if (at.row + i >= a.rows) return;
    unsigned char *to = a.row.data + (at.row + i) * row_bytes;
#pragma unroll
    for (int j = 0; j < PATCH; j += vector) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
        if (col >= a.cols) continue;
        if (a.row.vectors && vector == 8) {
            *(uint32_t *)(to + col / 2) = codes;
        } else if (a.row.vectors) {
            *(unsigned short *)(to + col / 2) = (unsigned short)(codes >> (4 * j));
        } else {
#pragma unroll
            for (int b = 0; b < vector / 2; b++)
                if (col / 2 + b < row_bytes)
                    to[col / 2 + b] = (unsigned char)(codes >> (4 * j + 8 * b));
        }
    }
}

/* Stores a word of 4 scales, where there is room for them in a row of scales. */
__device__ __forceinline__ void nv_scales_store(const tn__cuda_plane &plane, int64_t row,
                                                int64_t first, uint32_t scales) {
    if (first < plane.scale_stride)
        *(uint32_t *)((unsigned char *)plane.scale + row * plane.scale_stride + first) = scales;
}

template <typename T, typename R>
__device__ __forceinline__ void nv_rows(const tn__cuda_quantize_arguments &a, const patch_place &at,
                                        const nv_global &global,
                                        unsigned char (*row_scale)[NV_BLOCKS],
                                        const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    const int vector = element<T>::VECTOR;
    const R rounding(a);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const auto random = rounding.template of_row<T>(at, i);
        uint32_t codes = 0;
#pragma unroll
        for (int j = 0; j < PATCH; j += vector) {
            const int column = patch_column<T>(at.lane16, j);
            float amax = 0.0f;
#pragma unroll
            for (int v = j; v < j + vector; v++)
                amax = fmaxf(amax, fabsf(element<T>::value(words[i], v)));
#pragma unroll
            for (int lanes = 1; lanes < NV_BLOCK / vector; lanes *= 2)
                amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lanes));
            const uint32_t scale = nv_scale(amax, global);
            const float factor = nv_factor(scale, global);
            if (column % NV_BLOCK == 0)
                row_scale[at.unit * PATCH + i][column / NV_BLOCK] = (unsigned char)scale;
#pragma unroll
            for (int v = j; v < j + vector; v++)
                codes |= e2m1_code(__fmul_rn(element<T>::value(words[i], v), factor), v, random)
                         << (4 * v);
        }
        nv_store_row<T>(a, at, i, codes);
    }
    __syncthreads();
    const int row = (int)threadIdx.x % TN__TILE, half = (int)threadIdx.x / TN__TILE;
    nv_scales_store(a.row, at.tile_first_row + row, (int64_t)at.tile_col * NV_BLOCKS + 4 * half,
                    *(const uint32_t *)&row_scale[row][4 * half]);
}

/* Half the threads each: 4 of the 8 scales of a column, from the maxima of each warp's rows. */
__device__ __forceinline__ void nv_column_scales_put(const tn__cuda_quantize_arguments &a,
                                                     const patch_place &at, const nv_global &global,
                                                     const float (*warp_max)[TN__TILE],
                                                     float (*factor)[TN__TILE]) {
    const int column = (int)threadIdx.x % TN__TILE, half = (int)threadIdx.x / TN__TILE;
    uint32_t scales = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const uint32_t scale = nv_scale(warp_max[4 * half + b][column], global);
        factor[4 * half + b][column] = nv_factor(scale, global);
        scales |= scale << (8 * b);
    }
    nv_scales_store(a.col, at.tile_first_col + column, (int64_t)at.tile_row * NV_BLOCKS + 4 * half,
                    scales);
}

template <int VECTOR> __device__ __forceinline__ int nv_word(int column, int unit) {
    return column * UNITS + (unit ^ column_swizzle<VECTOR>(column));
}

/* Writes the transposed tile of codes; 16 threads a column. */
template <int VECTOR>
__device__ __forceinline__ void nv_columns_store(const tn__cuda_quantize_arguments &a,
                                                 const patch_place &at, const uint32_t *tile) {
    const int unit = (int)(threadIdx.x % UNITS);
    const int64_t row_bytes = (a.rows + 1) / 2;
    const int64_t byte = (at.tile_first_row + unit * PATCH) / 2;
    for (int column = (int)(threadIdx.x / UNITS); column < TN__TILE; column += UNITS) {
        const int64_t col = at.tile_first_col + column;
        const uint32_t codes = tile[nv_word<VECTOR>(column, unit)];
        if (col >= a.cols || byte >= row_bytes) continue;
        unsigned char *to = a.col.data + col * row_bytes + byte;
        if (a.col.vectors) {
            *(uint32_t *)to = codes;
            continue;
        }
        for (int b = 0; b < 4; b++)
            if (byte + b < row_bytes) to[b] = (unsigned char)(codes >> (8 * b));
    }
}

template <typename T, typename R>
__device__ __forceinline__ void nv_cols(const tn__cuda_quantize_arguments &a, const patch_place &at,
                                        const nv_global &global, float (*warp_max)[TN__TILE],
                                        float (*factor)[TN__TILE], uint32_t *tile,
                                        uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    column_max_put<T>(warp_max, at, words);
    patch_stay_packed<T>(words);
    __syncthreads();
    nv_column_scales_put(a, at, global, warp_max, factor);
    __syncthreads();
    const R rounding(a);
    uint32_t codes[PATCH] = {}; /* of columns, whose numbers are drawn row by row */
    float of_column[PATCH];
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        of_column[j] = factor[at.unit * PATCH / NV_BLOCK][patch_column<T>(at.lane16, j)];
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const auto random = rounding.template of_row<T>(at, i);
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            codes[j] |=
                e2m1_code(__fmul_rn(element<T>::value(words[i], j), of_column[j]), j, random)
                << (4 * i);
    }
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        tile[nv_word<element<T>::VECTOR>(patch_column<T>(at.lane16, j), at.unit)] = codes[j];
    __syncthreads();
    nv_columns_store<element<T>::VECTOR>(a, at, tile);
}

template <typename T, bool ROW, bool COL, typename R = to_nearest>
__device__ __forceinline__ void quantize_nvfp4(const tn__cuda_quantize_arguments &a) {
    __shared__ __align__(8) unsigned char row_scale[TN__TILE][NV_BLOCKS];
    __shared__ __align__(16) float warp_max[WARPS][TN__TILE]; /* not there without COL */
    __shared__ float factor[NV_BLOCKS][TN__TILE];
    __shared__ uint32_t tile[TN__TILE * UNITS];
    const patch_place at = patch_of_thread(a.tiles_across);
    const nv_global global = nv_global_of(a);
    uint32_t words[PATCH][patch_words<T>::COUNT];

    if (is_skipped(a.skip)) return;
    patch_load<T>(words, a.src, a.rows, a.cols, a.src_vectors, at);
    if (ROW && a.row.data) {
        nv_rows<T, R>(a, at, global, row_scale, words);
        patch_stay_packed<T>(words);
    }
    if (COL && a.col.data) nv_cols<T, R>(a, at, global, warp_max, factor, tile, words);
}

/* After all blocks of the cast have read the amax, which lies where a scale is to be. */
extern "C" __global__ void nvfp4_finish(const __grid_constant__ tn__cuda_quantize_arguments a) {
    if (is_skipped(a.skip)) return;
    const float4 stored = make_float4(nv_global_of(a).inverse, 0.0f, 0.0f, 0.0f);
    if (a.row.global_scale) *(float4 *)a.row.global_scale = stored;
    if (a.col.global_scale) *(float4 *)a.col.global_scale = stored;
}

/* ---- dequantize --------------------------------------------------------------------------- */

/* What elements with this block scale are multiplied with. */
__device__ __forceinline__ float nv_stored_scale(const tn__cuda_dequantize_arguments &a,
                                                 int64_t row, int64_t col) {
    const uint32_t code =
        ((const unsigned char *)a.src.scale)[row * a.src.scale_stride + col / NV_BLOCK];
    return __fmul_rn(e4m3_value(code), *a.src.global_scale);
}

/* Up to `bytes` bytes of a stored row, the first in the lowest place. */
__device__ __forceinline__ uint32_t nv_load(const unsigned char *row, int64_t byte,
                                            int64_t row_bytes, int bytes, int vectors) {
    uint32_t codes = 0;
    if (vectors && bytes == 4) return __ldg((const uint32_t *)(row + byte));
    if (vectors) return __ldg((const unsigned short *)(row + byte));
    for (int b = 0; b < bytes; b++)
        if (byte + b < row_bytes) codes |= (uint32_t)row[byte + b] << (8 * b);
    return codes;
}

template <typename T>
__device__ __forceinline__ void dequantize_nvfp4_row(const tn__cuda_dequantize_arguments &a) {
    const int vector = element<T>::VECTOR;
    const int64_t row_bytes = (a.cols + 1) / 2;
    const patch_place at = patch_of_thread(a.tiles_across);
    if (is_skipped(a.skip)) return;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float values[PATCH];
        const int64_t row = at.row + i;
#pragma unroll
        for (int j = 0; j < PATCH; j += vector) {
            const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
            const bool is_there = row < a.rows && col < a.cols;
            const float scale = is_there ? nv_stored_scale(a, row, col) : 0.0f;
            const uint32_t codes = is_there ? nv_load(a.src.data + row * row_bytes, col / 2,
                                                      row_bytes, vector / 2, a.src.vectors)
                                            : 0;
#pragma unroll
            for (int v = 0; v < vector; v++)
                values[j + v] = __fmul_rn(e2m1_value(codes >> (4 * v)), scale);
        }
        store_values<T>(a, at, i, values);
    }
}

/* Reads the tile of codes into shared memory; the caller's barrier follows. */
template <int VECTOR>
__device__ __forceinline__ void nv_columns_load(const tn__cuda_dequantize_arguments &a,
                                                const patch_place &at, uint32_t *tile) {
    const int unit = (int)(threadIdx.x % UNITS);
    const int64_t row_bytes = (a.rows + 1) / 2;
    const int64_t byte = (at.tile_first_row + unit * PATCH) / 2;
    for (int column = (int)(threadIdx.x / UNITS); column < TN__TILE; column += UNITS) {
        const int64_t col = at.tile_first_col + column;
        uint32_t codes = 0;
        if (col < a.cols && byte < row_bytes)
            codes = nv_load(a.src.data + col * row_bytes, byte, row_bytes, 4, a.src.vectors);
        tile[nv_word<VECTOR>(column, unit)] = codes;
    }
}

template <typename T>
__device__ __forceinline__ void dequantize_nvfp4_col(const tn__cuda_dequantize_arguments &a) {
    __shared__ uint32_t tile[TN__TILE * UNITS];
    const patch_place at = patch_of_thread(a.tiles_across);
    float scale[PATCH];
    uint32_t codes[PATCH];
    if (is_skipped(a.skip)) return;
    nv_columns_load<element<T>::VECTOR>(a, at, tile);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PATCH; j++) {
        const int column = patch_column<T>(at.lane16, j);
        const int64_t col = at.tile_first_col + column;
        codes[j] = tile[nv_word<element<T>::VECTOR>(column, at.unit)];
        scale[j] = col < a.cols && at.row < a.rows ? nv_stored_scale(a, col, at.row) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        float values[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            values[j] = __fmul_rn(e2m1_value(codes[j] >> (4 * i)), scale[j]);
        store_values<T>(a, at, i, values);
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define QUANTIZE(source, T)                                                                        \
    TILE_KERNEL(quantize_nvfp4_row_##source, tn__cuda_quantize_arguments, T, 3,                    \
                (quantize_nvfp4<T, true, false>))                                                  \
    TILE_KERNEL(quantize_nvfp4_col_##source, tn__cuda_quantize_arguments, T, 3,                    \
                (quantize_nvfp4<T, false, true>))                                                  \
    TILE_KERNEL(quantize_nvfp4_both_##source, tn__cuda_quantize_arguments, T, 2,                   \
                (quantize_nvfp4<T, true, true>))                                                   \
    TILE_KERNEL(quantize_nvfp4_stochastic_##source, tn__cuda_quantize_arguments, T, 2,             \
                (quantize_nvfp4<T, true, true, stochastically>))                                   \
    TILE_KERNEL(dequantize_nvfp4_row_##source, tn__cuda_dequantize_arguments, T, 3,                \
                dequantize_nvfp4_row<T>)                                                           \
    TILE_KERNEL(dequantize_nvfp4_col_##source, tn__cuda_dequantize_arguments, T, 3,                \
                dequantize_nvfp4_col<T>)

QUANTIZE(fp32, float)
QUANTIZE(bf16, __nv_bfloat16)
QUANTIZE(fp16, __half)
