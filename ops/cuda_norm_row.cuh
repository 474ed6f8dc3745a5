/* A row of a norm in the registers of a block: its statistics, and all that a row by itself is
 * enough for.
 *
 * Thread t of the 256 that take a row holds columns 2048 s + 8 t ... 2048 s + 8 t + 7 of it in
 * step s; so it holds 8 of the 2048 sums of a row (tn_norm_forward), and these are added up within
 * the thread, then the warp, then the block. A row of one step may be taken by fewer threads: the
 * sums that nobody holds are 0. A row of more steps than a kernel has registers for is read again
 * wherever it is needed.
 */
#ifndef TENURE_CUDA_NORM_ROW_CUH
#define TENURE_CUDA_NORM_ROW_CUH

#include "cuda_norm.cuh"

/* ---- a row -------------------------------------------------------------------------------- */

/* The row that a thread works on, with others. */
struct row_place {
    int64_t row;
    int64_t cols; /* 0: there is no such row, but the others of the block need this thread */
    int thread;   /* of those that take the row */
};

/* `row` is that of the block's first threads. */
__device__ __forceinline__ row_place row_of_thread(const tn__cuda_norm_arguments &a, int64_t row) {
    row_place at;
    at.row = row + threadIdx.x / a.row_threads;
    at.cols = at.row < a.cast.rows ? a.cast.cols : 0;
    at.thread = (int)threadIdx.x & (a.row_threads - 1);
    return at;
}

/* How many of the thread's columns from `first` on, and of all that follow, are in the row. */
__device__ __forceinline__ int columns_left(const row_place &at, int64_t first) {
    return (int)min(at.cols - first - at.thread * LANE_COLUMNS, (int64_t)INT32_MAX);
}

/* The thread's first element from column `first` on. */
template <typename T>
__device__ __forceinline__ T *row_address(const void *matrix, const row_place &at, int64_t first) {
    return (T *)matrix + at.row * at.cols + first + at.thread * LANE_COLUMNS;
}

template <typename T, int STEPS, bool VECTORS>
__device__ __forceinline__ void load_steps(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                           const void *src, const row_place &at, int64_t first,
                                           bool is_once) {
    const int left = columns_left(at, first);
    const T *from = row_address<T>(src, at, first);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        load_words<T, VECTORS>(words[s], from + s * STEP_COLUMNS, left - s * STEP_COLUMNS, is_once);
}

/* See row_stay_packed. */
template <typename T, int STEPS>
__device__ __forceinline__ void steps_stay_packed(uint32_t (&words)[STEPS][patch_words<T>::COUNT]) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        row_stay_packed<T>(words[s]);
}

/* Adds the residual to COUNT steps from `begin` on, and writes the sum. Reads come first: a sum
 * may lie over its residual. */
template <typename T, int STEPS, int COUNT, bool VECTORS>
__device__ __forceinline__ void add_residual(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                             int begin, const tn__cuda_norm_arguments &a,
                                             const row_place &at, int64_t first) {
    uint32_t added[COUNT][patch_words<T>::COUNT];
    first += begin * STEP_COLUMNS;
    load_steps<T, COUNT, VECTORS>(added, a.residual, at, first, true);
    const int left = columns_left(at, first);
    T *to = row_address<T>(a.sum, at, first);
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
        float value[LANE_COLUMNS], other[LANE_COLUMNS];
        unpack_words<T>(value, words[begin + s]);
        unpack_words<T>(other, added[s]);
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            value[j] = __fadd_rn(value[j], other[j]);
        pack_words<T>(words[begin + s], value);
        store_words<T, VECTORS>(to + s * STEP_COLUMNS, words[begin + s], left - s * STEP_COLUMNS);
    }
}

/* What is normalised: x, or x + residual rounded, which is written on the way. */
template <typename T, int STEPS, bool VECTORS>
__device__ __forceinline__ void load_source(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                            const tn__cuda_norm_arguments &a, const row_place &at,
                                            int64_t first, bool is_once) {
    const int at_once = STEPS > 4 ? 2 : STEPS; /* more would take too many registers */
    load_steps<T, STEPS, VECTORS>(words, a.x, at, first, is_once || a.sum);
    if (a.sum) {
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += at_once)
            add_residual<T, STEPS, at_once, VECTORS>(words, begin, a, at, first);
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
                                           const uint32_t (&words)[STEPS][patch_words<T>::COUNT]) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            sum[j] = __fadd_rn(sum[j], element<T>::value(words[s], j));
    }
}

/* The squares of what the values deviate from `center`; a row of a norm without a mean has none
 * beyond its end either, where the values are 0. */
template <typename T, int STEPS, bool VECTORS>
__device__ __forceinline__ void add_squares(float (&sum)[LANE_COLUMNS],
                                            const uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                            float center, int left) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int in_step = left - s * STEP_COLUMNS;
        if (in_step <= 0) continue;
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++) {
            const float deviation = __fsub_rn(element<T>::value(words[s], j), center);
            if (VECTORS || j < in_step) sum[j] = __fmaf_rn(deviation, deviation, sum[j]);
        }
    }
}

/* Leaves in `words` the row, if it fits; all threads of the block. */
template <typename T, int STEPS, bool VECTORS>
__device__ __forceinline__ row_statistics
statistics_of_row(uint32_t (&words)[STEPS][patch_words<T>::COUNT], const tn__cuda_norm_arguments &a,
                  const row_place &at, bool is_once, int &turn) {
    const int64_t cols = a.cast.cols, chunk = (int64_t)STEPS * STEP_COLUMNS;
    const float count = (float)(cols ? cols : 1); /* of nothing, the mean is 0 */
    row_statistics of = {0.0f, 0.0f};
    float sum[LANE_COLUMNS] = {0, 0, 0, 0, 0, 0, 0, 0};
    bool is_held = false;
    if (a.mean) {
        for (int64_t first = 0; first < cols; first += chunk) {
            load_source<T, STEPS, VECTORS>(words, a, at, first, is_once && cols <= chunk);
            add_values<T, STEPS>(sum, words);
            steps_stay_packed<T, STEPS>(words);
        }
        of.mean = __fdiv_rn(total_of_row(sum, a.row_threads, turn), count);
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            sum[j] = 0.0f;
        is_held = cols <= chunk;
    }
    for (int64_t first = 0; first < cols; first += chunk) {
        if (!a.mean)
            load_source<T, STEPS, VECTORS>(words, a, at, first, is_once && cols <= chunk);
        else if (!is_held)
            load_steps<T, STEPS, VECTORS>(words, a.cast.src, at, first, false);
        add_squares<T, STEPS, VECTORS>(sum, words, of.mean, columns_left(at, first));
        steps_stay_packed<T, STEPS>(words);
    }
    const float square = __fdiv_rn(total_of_row(sum, a.row_threads, turn), count);
    of.rstd = tn__exact_rsqrt(__fadd_rn(square, a.epsilon));
    if (at.thread == 0 && at.row < a.cast.rows) {
        a.rstd[at.row] = canonical_of<float>(of.rstd);
        if (a.mean) a.mean[at.row] = canonical_of<float>(of.mean);
    }
    return of;
}

/* ---- blocks of 1 x 128 -------------------------------------------------------------------- */

/* The 16 lanes of a half warp each hold the maxima of STEPS blocks; returns, on lane c, that of
 * block c / (16 / STEPS) over the 16 lanes. */
template <int STEPS>
__device__ __forceinline__ float half_warp_step_max(float (&max)[STEPS], int lane16) {
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
        const int kept = STEPS * apart / 16; /* steps that a lane is still concerned with */
#pragma unroll
        for (int s = 0; s < kept; s++) {
            const float keep = lane16 & apart ? max[s + kept] : max[s];
            const float give = lane16 & apart ? max[s] : max[s + kept];
            max[s] = fmaxf(keep, __shfl_xor_sync(0xFFFFFFFFu, give, apart));
        }
        if (kept == 0) max[0] = fmaxf(max[0], __shfl_xor_sync(0xFFFFFFFFu, max[0], apart));
    }
    return max[0];
}

/* The scale of a block; the last row also writes the zeros behind its column of scales. */
__device__ __forceinline__ void step_scale_put(const tn__cuda_quantize_arguments &a, int64_t row,
                                               int64_t block, float scale) {
    float *to = a.row.scale + block * a.row.scale_stride;
    to[row] = inverse_scale(scale);
    if (row + 1 < a.rows) return;
#pragma unroll 1
    for (int64_t beyond = a.rows; beyond < a.row.scale_stride; beyond++)
        to[beyond] = 0.0f;
}

/* A half warp holds a block in each step. */
template <typename T, __nv_fp8_interpretation_t F, int STEPS, bool VECTORS>
__device__ __forceinline__ void quantize_steps(const tn__cuda_quantize_arguments &a,
                                               const row_place &at, int64_t first,
                                               uint32_t (&words)[STEPS][patch_words<T>::COUNT]) {
    const int lane16 = (int)threadIdx.x % 16, lanes_each = 16 / STEPS;
    const int left = columns_left(at, first);
    float max[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        max[s] = row_maximum<T>(words[s]);
    steps_stay_packed<T, STEPS>(words);
    const float amax = half_warp_step_max<STEPS>(max, lane16);
    const float scale = block_scale<T, F>(amax, a.amax_epsilon, a.is_pow2);
    const int64_t block = first / TN__TILE + lane16 / lanes_each * (STEP_COLUMNS / TN__TILE) +
                          at.thread * LANE_COLUMNS / TN__TILE;
    if (lane16 % lanes_each == 0 && block * TN__TILE < at.cols)
        step_scale_put(a, at.row, block, scale);
    unsigned char *to = row_address<unsigned char>(a.row.data, at, first);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float of_step = __shfl_sync(0xFFFFFFFFu, scale, s * lanes_each, 16);
        const int in_step = left - s * STEP_COLUMNS;
        if (in_step <= 0) continue;
        float scaled[LANE_COLUMNS];
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; j++)
            scaled[j] = __fmul_rn(element<T>::value(words[s], j), of_step);
        const uint2 codes = cast_patch_row<F>(scaled);
        if constexpr (VECTORS) {
            *(uint2 *)(to + s * STEP_COLUMNS) = codes;
        } else {
#pragma unroll
            for (int j = 0; j < LANE_COLUMNS; j++)
                if (j < in_step)
                    to[s * STEP_COLUMNS + j] =
                        (unsigned char)((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)));
        }
    }
}

/* ---- all of a row ------------------------------------------------------------------------- */

/* A value that the compiler does not know: what is computed from it waits for its turn. */
__device__ __forceinline__ int in_turn(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* What is made of the steps from column `first` on. */
template <typename T, __nv_fp8_interpretation_t F, int STEPS, bool VECTORS>
__device__ __forceinline__ void
make_steps(uint32_t (&words)[STEPS][patch_words<T>::COUNT], const tn__cuda_norm_arguments &a,
           const row_place &at, int64_t first, const row_statistics &of, bool has_plane) {
    const int left = columns_left(at, first);
    const int64_t col = first + at.thread * LANE_COLUMNS;
    T *to = row_address<T>(a.value, at, first);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int ahead = in_turn(s * STEP_COLUMNS), in_step = left - ahead;
        if (in_step > 0) {
            column_factors by;
            load_factors<LANE_COLUMNS, VECTORS>(by.gamma, by.beta, a, col + ahead, in_step);
            normalize_words<T>(words[s], a, by, of);
            if constexpr (!VECTORS) clear_beyond<T>(words[s], in_step);
            if (a.value) store_words<T, VECTORS>(to + s * STEP_COLUMNS, words[s], in_step);
        }
        row_stay_packed<T>(words[s]); /* one step after the other, or registers run out */
    }
    if (has_plane) quantize_steps<T, F, STEPS, VECTORS>(a.cast, at, first, words);
}

/* The row; all threads of the block. `is_once`: nobody reads it after this. */
template <typename T, __nv_fp8_interpretation_t F, int STEPS, bool VECTORS>
__device__ __forceinline__ void norm_row(const tn__cuda_norm_arguments &a, const row_place &at,
                                         bool has_plane, bool is_once, int &turn) {
    uint32_t words[STEPS][patch_words<T>::COUNT];
    const int64_t cols = a.cast.cols, chunk = (int64_t)STEPS * STEP_COLUMNS;
    const row_statistics of = statistics_of_row<T, STEPS, VECTORS>(words, a, at, is_once, turn);
    if (!a.value && !has_plane) return;
    for (int64_t first = 0; first < cols; first += chunk) {
        if (cols > chunk) load_steps<T, STEPS, VECTORS>(words, a.cast.src, at, first, false);
        make_steps<T, F, STEPS, VECTORS>(words, a, at, first, of, has_plane);
    }
}

#endif
