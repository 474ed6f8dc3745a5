/* The largest |x| of the rows, of the columns or of all of a thread's patch. A NaN does not count,
 * and of NaNs alone it is 0.
 *
 * 16-bit elements are compared two at a time, as they lie in their words, which takes a third of
 * the instructions: on Hopper the larger of three pairs is one.
 */
#ifndef TENURE_CUDA_AMAX_CUH
#define TENURE_CUDA_AMAX_CUH

#include "cuda_tile.cuh"

/* ---- pairs of 16-bit sizes ------------------------------------------------------------------ */

/* Of two numbers that are not negative, by their bits; those beyond infinity's are NaNs. */
__device__ __forceinline__ uint32_t larger_of_bits(uint32_t a, uint32_t b, uint32_t infinity) {
    if (a > infinity) return b > infinity ? 0x7FFFu : b;
    return b > infinity || a > b ? a : b;
}

__device__ __forceinline__ uint32_t larger_pair_of_bits(uint32_t a, uint32_t b, uint32_t infinity) {
    return larger_of_bits(a & 0xFFFFu, b & 0xFFFFu, infinity) |
           larger_of_bits(a >> 16, b >> 16, infinity) << 16;
}

/* The larger of each half; of a number and a NaN it is the number. */
template <typename T> __device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b);

template <> __device__ __forceinline__ uint32_t larger_pair<__nv_bfloat16>(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    return larger_pair_of_bits(a, b, 0x7F80u);
#endif
}

template <> __device__ __forceinline__ uint32_t larger_pair<__half>(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t larger;
    asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    return larger_pair_of_bits(a, b, 0x7C00u);
#endif
}

__device__ __forceinline__ uint32_t pair_sizes(uint32_t pair) { return pair & 0x7FFF7FFFu; }

/* The larger of each half, as whole numbers. */
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
#endif
}

/* ---- of a patch ----------------------------------------------------------------------------- */

/* Of the elements in 16 bytes. */
template <typename T> __device__ __forceinline__ float piece_maximum(const uint32_t *words) {
    if constexpr (sizeof(T) == 2) {
        uint32_t most = 0;
#pragma unroll
        for (int w = 0; w < 4; w++)
            most = larger_pair<T>(most, pair_sizes(words[w]));
        return fmaxf(element<T>::value(&most, 0), element<T>::value(&most, 1));
    } else {
        float most = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++)
            most = fmaxf(most, fabsf(element<T>::value(words, j)));
        return most;
    }
}

/* Of a row. */
template <typename T>
__device__ __forceinline__ float row_maximum(const uint32_t (&words)[patch_words<T>::COUNT]) {
    float most = piece_maximum<T>(words);
#pragma unroll
    for (int p = 1; p < patch_words<T>::PIECES; p++)
        most = fmaxf(most, piece_maximum<T>(words + 4 * p));
    return most;
}

template <typename T>
__device__ __forceinline__ void
column_maxima(float (&most)[PATCH], const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    if constexpr (sizeof(T) == 2) {
        uint32_t pairs[patch_words<T>::COUNT];
#pragma unroll
        for (int w = 0; w < patch_words<T>::COUNT; w++) {
            pairs[w] = 0;
#pragma unroll
            for (int i = 0; i < PATCH; i++)
                pairs[w] = larger_pair<T>(pairs[w], pair_sizes(words[i][w]));
        }
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            most[j] = element<T>::value(pairs, j);
    } else {
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            most[j] = 0.0f;
#pragma unroll
            for (int i = 0; i < PATCH; i++)
                most[j] = fmaxf(most[j], fabsf(element<T>::value(words[i], j)));
        }
    }
}

/* Of 16-bit elements, of rows i and i + 4 of the patch as pair i, and of its columns as they lie in
 * a row. */
template <typename T>
__device__ __forceinline__ void pair_maxima(uint32_t (&rows)[PATCH / 2],
                                            uint32_t (&columns)[PATCH / 2],
                                            const uint32_t (&words)[PATCH][PATCH / 2]) {
    uint32_t of_row[PATCH];
#pragma unroll
    for (int w = 0; w < PATCH / 2; w++)
        columns[w] = 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        of_row[i] = 0;
#pragma unroll
        for (int w = 0; w < PATCH / 2; w++) {
            const uint32_t sizes = pair_sizes(words[i][w]);
            of_row[i] = larger_pair<T>(of_row[i], sizes);
            columns[w] = larger_pair<T>(columns[w], sizes);
        }
    }
#pragma unroll
    for (int i = 0; i < PATCH / 2; i++)
        rows[i] = larger_pair<T>(__byte_perm(of_row[i], of_row[i + PATCH / 2], 0x5410),
                                 __byte_perm(of_row[i], of_row[i + PATCH / 2], 0x7632));
}

template <typename T>
__device__ __forceinline__ float
patch_maximum(const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    if constexpr (sizeof(T) == 2) {
        uint32_t pairs[patch_words<T>::COUNT] = {0};
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
#pragma unroll
            for (int w = 0; w < patch_words<T>::COUNT; w++)
                pairs[w] = larger_pair<T>(pairs[w], pair_sizes(words[i][w]));
        }
        return row_maximum<T>(pairs);
    } else {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < PATCH; i++)
            most = fmaxf(most, row_maximum<T>(words[i]));
        return most;
    }
}

/* Whether a patch has neither an infinite number nor a NaN. */
template <typename T>
__device__ __forceinline__ bool
patch_is_finite(const uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    const uint32_t infinity = sizeof(T) == 4                        ? 0x7F800000u
                              : element<T>::max_finite() > 65504.0f ? 0x7F80u
                                                                    : 0x7C00u;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int w = 0; w < patch_words<T>::COUNT; w++) {
            if constexpr (sizeof(T) == 4)
                most = max(most, words[i][w] & 0x7FFFFFFFu);
            else
                most = larger_halves(most, pair_sizes(words[i][w]));
        }
    }
    if constexpr (sizeof(T) == 2) most = max(most & 0xFFFFu, most >> 16);
    return most < infinity;
}

#endif
