/* A row of a norm in the registers of a block, and its statistics.
 *
 * Thread t of the 256 that take a row holds columns 2048 s + 8 t ... 2048 s + 8 t + 7 of it in
 * step s; so it holds 8 of the 2048 sums of a row (tn_norm_forward), and these are added up within
 * the thread, then the warp, then the block. A row of one step may be taken by fewer threads:
 * the sums that nobody holds are 0. A row of more steps than a kernel has registers for is read
 * again wherever it is needed.
 */
#ifndef TENURE_CUDA_NORM_CUH
#define TENURE_CUDA_NORM_CUH

#include "cuda_norm_arguments.h"
#include "cuda_produce.cuh"

enum { LANE_COLUMNS = TN__LANE_COLUMNS, STEP_COLUMNS = TN__STEP_COLUMNS };

/* ---- 8 neighbours ------------------------------------------------------------------------- */

/* The words of 8 columns, of which `left` are in the row; what is beyond is 0. IS_ONCE: read but
 * once, and other lines had better stay in the caches. */
template <typename T, bool IS_ONCE>
__device__ __forceinline__ void load_words(uint32_t (&words)[patch_words<T>::COUNT], const T *from,
                                           int left, int vectors) {
    if (vectors) { /* rows are whole pieces: a piece is in the row or beyond it */
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            const uint4 *at = (const uint4 *)(from + p * element<T>::VECTOR);
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (p * element<T>::VECTOR < left) piece = IS_ONCE ? __ldcs(at) : *at;
            words[4 * p] = piece.x, words[4 * p + 1] = piece.y;
            words[4 * p + 2] = piece.z, words[4 * p + 3] = piece.w;
        }
        return;
    }
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

template <typename T>
__device__ __forceinline__ void store_words(T *to, const uint32_t (&words)[patch_words<T>::COUNT],
                                            int left, int vectors) {
    if (vectors) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            if (p * element<T>::VECTOR < left)
                *(uint4 *)(to + p * element<T>::VECTOR) =
                    make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++)
        if (j < left) element<T>::store(to, j, element<T>::value(words, j));
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

/* COUNT neighbours, 4 or 8, of a vector of any type. */
template <typename G, int COUNT>
__device__ __forceinline__ void load_floats_of(float *values, const void *vector, int64_t col,
                                               int left, int vectors) {
    const G *from = (const G *)vector + col;
    if (vectors) {
        if constexpr (COUNT * sizeof(G) == 8) {
            uint2 piece = make_uint2(0, 0);
            if (left > 0) piece = *(const uint2 *)from;
            const uint32_t words[2] = {piece.x, piece.y};
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                values[j] = element<G>::value(words, j);
        } else {
#pragma unroll
            for (int j = 0; j < COUNT; j += element<G>::VECTOR) {
                uint4 piece = make_uint4(0, 0, 0, 0);
                if (j < left) piece = *(const uint4 *)(from + j);
                const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
                for (int v = 0; v < element<G>::VECTOR; v++)
                    values[j + v] = element<G>::value(words, v);
            }
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        values[j] = j < left ? element<G>::load(from, j) : 0.0f;
}

template <int COUNT>
__device__ __forceinline__ void load_floats(float *values, int dtype, const void *vector,
                                            int64_t col, int left, int vectors) {
    if (dtype == 0)
        load_floats_of<float, COUNT>(values, vector, col, left, vectors);
    else if (dtype == 1)
        load_floats_of<__nv_bfloat16, COUNT>(values, vector, col, left, vectors);
    else
        load_floats_of<__half, COUNT>(values, vector, col, left, vectors);
}

/* ---- a row -------------------------------------------------------------------------------- */

/* The row that a thread works on, with others. */
struct row_place {
    int64_t row;
    int64_t cols; /* 0: there is no such row, but the others of the block need this thread */
    int thread;   /* of those that take the row */
};

/* How many of the thread's columns from `first` on, and of all that follow, are in the row. */
__device__ __forceinline__ int columns_left(const row_place &at, int64_t first) {
    return (int)min(at.cols - first - at.thread * LANE_COLUMNS, (int64_t)INT32_MAX);
}

template <typename T, int STEPS, bool IS_ONCE>
__device__ __forceinline__ void load_steps(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                           const void *src, const row_place &at, int64_t first,
                                           int vectors) {
    const int left = columns_left(at, first);
    const T *from = (const T *)src + at.row * at.cols + first + at.thread * LANE_COLUMNS;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        load_words<T, IS_ONCE>(words[s], from + s * STEP_COLUMNS, left - s * STEP_COLUMNS, vectors);
}

/* See row_stay_packed. */
template <typename T, int STEPS>
__device__ __forceinline__ void steps_stay_packed(uint32_t (&words)[STEPS][patch_words<T>::COUNT]) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        row_stay_packed<T>(words[s]);
}

/* Adds the residual to the steps from `begin` to `begin` + COUNT, and writes the sum. Reads come
 * first: a sum may lie over its residual. */
template <typename T, int STEPS, int COUNT>
__device__ __forceinline__ void add_residual(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                             int begin, const tn__cuda_norm_arguments &a,
                                             const row_place &at, int64_t first) {
    uint32_t added[COUNT][patch_words<T>::COUNT];
    first += begin * STEP_COLUMNS;
    load_steps<T, COUNT, true>(added, a.residual, at, first, a.cast.src_vectors);
    const int left = columns_left(at, first);
    T *to = (T *)a.sum + at.row * at.cols + first + at.thread * LANE_COLUMNS;
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
        float value[LANE_COLUMNS], other[LANE_COLUMNS];
        unpack_words<T>(value, words[begin + s]);
        unpack_words<T>(other, added[s]);
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            value[j] = __fadd_rn(value[j], other[j]);
        pack_words<T>(words[begin + s], value);
        store_words<T>(to + s * STEP_COLUMNS, words[begin + s], left - s * STEP_COLUMNS,
                       a.cast.src_vectors);
    }
}

/* What is normalised: x, or x + residual rounded, which is written on the way. */
template <typename T, int STEPS>
__device__ __forceinline__ void load_source(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                            const tn__cuda_norm_arguments &a, const row_place &at,
                                            int64_t first) {
    const int half = STEPS > 4 ? STEPS / 2 : STEPS; /* more would take too many registers */
    load_steps<T, STEPS, true>(words, a.x, at, first, a.cast.src_vectors);
    if (a.sum) {
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += half)
            add_residual<T, STEPS, half>(words, begin, a, at, first);
    }
    steps_stay_packed<T, STEPS>(words);
}

/* ---- statistics --------------------------------------------------------------------------- */

/* The total of the row, on all its threads; all threads of the block call it. `turn` says which
 * half of the shared memory is not being read any more: each call has one barrier. */
__device__ __forceinline__ float total_of_row(float (&sum)[LANE_COLUMNS], int row_threads,
                                              int &turn) {
    __shared__ float warp_sum[2][TN__FLAT_THREADS / 32];
    float of_warp[TN__FLAT_THREADS / 32];
#pragma unroll
    for (int half = LANE_COLUMNS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; j++)
            sum[j] = __fadd_rn(sum[j], sum[j + half]);
    }
    float total = sum[0];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
        total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFFu, total, apart));
    if (row_threads == 32) return total;
    const int warp = (int)threadIdx.x / 32, warps = row_threads / 32, first = warp & -warps;
    if (threadIdx.x % 32 == 0) warp_sum[turn][warp] = total;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < TN__FLAT_THREADS / 32; w++)
        of_warp[w] = w < warps ? warp_sum[turn][first + w] : 0.0f;
#pragma unroll
    for (int half = TN__FLAT_THREADS / 64; half > 0; half /= 2) {
#pragma unroll
        for (int w = 0; w < half; w++)
            of_warp[w] = __fadd_rn(of_warp[w], of_warp[w + half]);
    }
    turn ^= 1;
    return of_warp[0];
}

template <typename T, int STEPS>
__device__ __forceinline__ void add_values(float (&sum)[LANE_COLUMNS],
                                           const uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                           bool is_squared) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++) {
            const float value = element<T>::value(words[s], j);
            sum[j] = is_squared ? __fmaf_rn(value, value, sum[j]) : __fadd_rn(sum[j], value);
        }
    }
}

/* The squares of what the values deviate from `center`. */
template <typename T, int STEPS>
__device__ __forceinline__ void
add_deviations(float (&sum)[LANE_COLUMNS], const uint32_t (&words)[STEPS][patch_words<T>::COUNT],
               float center, int left) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++) {
            const float deviation = __fsub_rn(element<T>::value(words[s], j), center);
            if (j < left - s * STEP_COLUMNS) sum[j] = __fmaf_rn(deviation, deviation, sum[j]);
        }
    }
}

struct row_statistics {
    float mean, rstd;
};

/* Leaves in `words` the row, if it fits; all threads of the block. */
template <typename T, int STEPS>
__device__ __forceinline__ row_statistics
statistics_of_row(uint32_t (&words)[STEPS][patch_words<T>::COUNT], const tn__cuda_norm_arguments &a,
                  const row_place &at, int &turn) {
    const int64_t cols = a.cast.cols, chunk = (int64_t)STEPS * STEP_COLUMNS;
    const float count = (float)(cols ? cols : 1); /* of nothing, the mean is 0 */
    row_statistics of = {0.0f, 0.0f};
    float sum[LANE_COLUMNS] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t first = 0; first < cols; first += chunk) {
        load_source<T, STEPS>(words, a, at, first);
        add_values<T, STEPS>(sum, words, !a.mean);
        steps_stay_packed<T, STEPS>(words);
    }
    float square = __fdiv_rn(total_of_row(sum, a.row_threads, turn), count);
    if (a.mean) {
        of.mean = square;
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            sum[j] = 0.0f;
        for (int64_t first = 0; first < cols; first += chunk) {
            if (cols > chunk)
                load_steps<T, STEPS, false>(words, a.cast.src, at, first, a.cast.src_vectors);
            add_deviations<T, STEPS>(sum, words, of.mean, columns_left(at, first));
            steps_stay_packed<T, STEPS>(words);
        }
        square = __fdiv_rn(total_of_row(sum, a.row_threads, turn), count);
    }
    of.rstd = tn__exact_rsqrt(__fadd_rn(square, a.epsilon));
    if (at.thread == 0 && at.row < a.cast.rows) {
        a.rstd[at.row] = canonical_of<float>(of.rstd);
        if (a.mean) a.mean[at.row] = canonical_of<float>(of.mean);
    }
    return of;
}

/* ---- values ------------------------------------------------------------------------------- */

/* gamma, or 1 + gamma, and beta, of a thread's 8 columns. */
struct column_factors {
    float gamma[LANE_COLUMNS], beta[LANE_COLUMNS];
};

/* Of COUNT neighbours, of which `left` are in the row; 0 beyond it. */
template <int COUNT>
__device__ __forceinline__ void
load_factors(float *gamma, float *beta, const tn__cuda_norm_arguments &a, int64_t col, int left) {
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        gamma[j] = j < left ? 1.0f : 0.0f, beta[j] = 0.0f;
    if (a.gamma) {
        load_floats<COUNT>(gamma, a.gamma_dtype, a.gamma, col, left, a.gamma_vectors);
        if (a.gamma_base != 0.0f) { /* -0 + 0 is not -0 */
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                gamma[j] = j < left ? __fadd_rn(gamma[j], a.gamma_base) : 0.0f;
        }
    }
    if (a.beta) load_floats<COUNT>(beta, a.beta_dtype, a.beta, col, left, a.beta_vectors);
}

/* Of 8 values in their words, in their place; beyond the row it is 0 or NaN. */
template <typename T>
__device__ __forceinline__ void normalize_words(uint32_t (&words)[patch_words<T>::COUNT],
                                                const column_factors &by, bool has_beta,
                                                const row_statistics &of) {
    float value[LANE_COLUMNS];
    unpack_words<T>(value, words);
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++) {
        const float scaled = __fmul_rn(__fsub_rn(value[j], of.mean), of.rstd);
        value[j] =
            has_beta ? __fmaf_rn(scaled, by.gamma[j], by.beta[j]) : __fmul_rn(scaled, by.gamma[j]);
    }
    pack_words<T>(words, value);
}

#endif
