/* What the kernels of the norms share: 8 neighbours of a row as words, and what is made of them. */
#ifndef TENURE_CUDA_NORM_CUH
#define TENURE_CUDA_NORM_CUH

#include "cuda_norm_arguments.h"
#include "cuda_produce.cuh"

enum { LANE_COLUMNS = TN__LANE_COLUMNS, STEP_COLUMNS = TN__STEP_COLUMNS };

/* ---- 8 neighbours ------------------------------------------------------------------------- */

/* The words of 8 columns, of which `left` are in the row; what is beyond is 0. VECTORS: all of them
 * are, or none. `is_once`: they are not needed again, and other lines had better stay in the
 * caches. */
template <typename T, bool VECTORS>
__device__ __forceinline__ void load_words(uint32_t (&words)[patch_words<T>::COUNT], const T *from,
                                           int left, bool is_once) {
    if constexpr (VECTORS) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            const uint4 *at = (const uint4 *)(from + p * element<T>::VECTOR);
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (left > 0) piece = is_once ? __ldcs(at) : *at;
            words[4 * p] = piece.x, words[4 * p + 1] = piece.y;
            words[4 * p + 2] = piece.z, words[4 * p + 3] = piece.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++) {
            uint32_t bits = 0;
            if (j < left)
                bits = sizeof(T) == 4 ? ((const uint32_t *)from)[j]
                                      : (uint32_t)((const unsigned short *)from)[j];
            if constexpr (sizeof(T) == 4)
                words[j] = bits;
            else if (j % 2)
                words[j / 2] |= bits << 16;
            else
                words[j / 2] = bits;
        }
    }
}

template <typename T, bool VECTORS>
__device__ __forceinline__ void store_words(T *to, const uint32_t (&words)[patch_words<T>::COUNT],
                                            int left) {
    if constexpr (VECTORS) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            if (left > 0)
                *(uint4 *)(to + p * element<T>::VECTOR) =
                    make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            if (j < left) element<T>::store(to, j, element<T>::value(words, j));
    }
}

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

/* gamma, or 1 + gamma, and beta, of a thread's 8 columns. */
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
    if (a.beta) load_floats<COUNT, VECTORS>(beta, a.beta_dtype, a.beta, col, left);
}

/* ---- values ------------------------------------------------------------------------------- */

struct row_statistics {
    float mean, rstd;
};

/* Of 8 values in their words, in their place. */
template <typename T>
__device__ __forceinline__ void
normalize_words(uint32_t (&words)[patch_words<T>::COUNT], const tn__cuda_norm_arguments &a,
                const column_factors &by, const row_statistics &of) {
    float value[LANE_COLUMNS];
    unpack_words<T>(value, words);
    if (a.mean) {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            value[j] = __fsub_rn(value[j], of.mean);
    }
    if (a.beta) {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            value[j] = __fmaf_rn(__fmul_rn(value[j], of.rstd), by.gamma[j], by.beta[j]);
    } else {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            value[j] = __fmul_rn(__fmul_rn(value[j], of.rstd), by.gamma[j]);
    }
    pack_words<T>(words, value);
}

/* Keeps what is in the row, of which there are `left`. */
template <typename T>
__device__ __forceinline__ void clear_beyond(uint32_t (&words)[patch_words<T>::COUNT], int left) {
#pragma unroll
    for (int w = 0; w < patch_words<T>::COUNT; w++) {
        if constexpr (sizeof(T) == 4)
            words[w] = w < left ? words[w] : 0;
        else
            words[w] = 2 * w + 1 < left ? words[w] : 2 * w < left ? words[w] & 0xFFFFu : 0;
    }
}

#endif
