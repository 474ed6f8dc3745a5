/* What the kernels of the norms share: 8 columns of a row as words, and what is made of them. */
#ifndef TENURE_CUDA_NORM_CUH
#define TENURE_CUDA_NORM_CUH

#include "cuda_norm_arguments.h"
#include "cuda_produce.cuh"

enum { LANE_COLUMNS = TN__LANE_COLUMNS };

/* ---- 8 columns ---------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ void unpack_words(float (&values)[LANE_COLUMNS],
                                             const uint32_t (&words)[patch_words<T>::COUNT]) {
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++)
        values[j] = element<T>::value(words, j);
}

/* Rounded to T, any NaN as the canonical one. */
template <typename T>
__device__ __forceinline__ void pack_words(uint32_t (&words)[patch_words<T>::COUNT],
                                           const float (&values)[LANE_COLUMNS]) {
    float canonical[LANE_COLUMNS];
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++)
        canonical[j] = canonical_of<T>(values[j]);
#pragma unroll
    for (int w = 0; w < patch_words<T>::COUNT; w++)
        words[w] = element<T>::word(canonical, w);
}

/* ---- gamma and beta ----------------------------------------------------------------------- */

/* COUNT neighbours, 4 or 8, of a vector of any type; `left` as above. */
template <typename G, int COUNT, bool VECTORS>
__device__ __forceinline__ void load_floats_of(float *values, const void *vector, int64_t col,
                                               int left) {
    const G *from = (const G *)vector + col;
    if constexpr (VECTORS && COUNT * sizeof(G) == 8) {
        uint2 piece = make_uint2(0, 0);
        if (left > 0) piece = *(const uint2 *)from;
        const uint32_t words[2] = {piece.x, piece.y};
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            values[j] = element<G>::value(words, j);
    } else if constexpr (VECTORS) {
#pragma unroll
        for (int j = 0; j < COUNT; j += element<G>::VECTOR) {
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (left > 0) piece = *(const uint4 *)(from + j);
            const piece_values<G> of = unpack<G>(piece);
#pragma unroll
            for (int v = 0; v < element<G>::VECTOR; v++)
                values[j + v] = of.at[v];
        }
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            values[j] = j < left ? element<G>::load(from, j) : 0.0f;
    }
}

template <int COUNT, bool VECTORS>
__device__ __forceinline__ void load_floats(float *values, int dtype, const void *vector,
                                            int64_t col, int left) {
    if (dtype == 0)
        load_floats_of<float, COUNT, VECTORS>(values, vector, col, left);
    else if (dtype == 1)
        load_floats_of<__nv_bfloat16, COUNT, VECTORS>(values, vector, col, left);
    else
        load_floats_of<__half, COUNT, VECTORS>(values, vector, col, left);
}

/* gamma, or 1 + gamma, and beta, of a thread's 8 columns; 1 and -0 where there are none. */
struct column_factors {
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
};

/* Of COUNT neighbours, of which `left` are in the row; 0 or the base beyond it. */
template <int COUNT, bool VECTORS>
__device__ __forceinline__ void
load_factors(float *gamma, float *beta, const tn__cuda_norm_arguments &a, int64_t col, int left) {
    if (a.gamma) {
        load_floats<COUNT, VECTORS>(gamma, a.gamma_dtype, a.gamma, col, left);
        if (a.gamma_base != 0.0f) { /* -0 + 0 is not -0 */
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                gamma[j] = __fadd_rn(gamma[j], a.gamma_base);
        }
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            gamma[j] = 1.0f;
    }
    if (a.beta) {
        load_floats<COUNT, VECTORS>(beta, a.beta_dtype, a.beta, col, left);
    } else {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            beta[j] = -0.0f;
    }
}

/* ---- values ------------------------------------------------------------------------------- */

struct row_statistics {
    float mean, rstd;
};

/* Of 8 values in their words, in their place. A mean of 0 and a beta of -0 change nothing. */
template <typename T, bool IS_LAYER>
__device__ __forceinline__ void normalize_words(uint32_t (&words)[patch_words<T>::COUNT],
                                                const column_factors &by,
                                                const row_statistics &of) {
    float value[LANE_COLUMNS];
    unpack_words<T>(value, words);
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++) {
        if constexpr (IS_LAYER) value[j] = __fsub_rn(value[j], of.mean);
        value[j] = __fmul_rn(value[j], of.rstd);
        value[j] = IS_LAYER ? __fmaf_rn(value[j], by.gamma[j], by.beta[j])
                            : __fmul_rn(value[j], by.gamma[j]);
    }
    pack_words<T>(words, value);
}

/* ---- scales of rows ------------------------------------------------------------------------- */

/* Of a block of 1 x 128; the last row also writes the zeros behind its column of scales. */
__device__ __forceinline__ void row_scale_of_block_put(const tn__cuda_quantize_arguments &a,
                                                       int64_t row, int64_t block, float inverse) {
    float *to = a.row.scale + block * a.row.scale_stride;
    to[row] = inverse;
    if (row + 1 < a.rows) return;
#pragma unroll 1
    for (int64_t beyond = a.rows; beyond < a.row.scale_stride; beyond++)
        to[beyond] = 0.0f;
}

/* ---- beyond the matrix -------------------------------------------------------------------- */

/* What the patch holds beyond the matrix, 0 before, may be anything after; no amax may see it. */
template <typename T>
__device__ __forceinline__ void clear_patch_beyond(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                                   int64_t rows, int64_t cols,
                                                   const patch_place &at) {
    if (at.tile_first_row + TN__TILE <= rows && at.tile_first_col + TN__TILE <= cols) return;
    const int rows_in = patch_rows_in(rows, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            if (i < rows_in && at.tile_first_col + patch_column<T>(at.lane16, j) < cols) continue;
            if constexpr (sizeof(T) == 4)
                words[i][j] = 0;
            else
                words[i][j / 2] &= j % 2 ? 0xFFFFu : 0xFFFF0000u;
        }
    }
}

#endif
