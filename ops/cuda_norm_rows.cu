/* Kernels of the norms that take whole rows: statistics, the value, and the 1D ROW plane, all from
 * one read of x.
 *
 * A block takes ROWS rows at a time, of which it has every gridDim.x-th group. THREADS threads take
 * a row; a thread has 8 columns of it in each of STEPS steps, 16 neighbours of it a block of 128
 * columns:
 *
 *     step          0             1        ...       K = 128 * 16-lane groups * STEPS at most
 *     half warp   0  1  2 ...   0  1  2 ...
 *     block       0  1  2 ...   h h+1 h+2 ...        h = THREADS / 16
 *
 * and holds them in registers, while its pieces of its next row are on their way to shared memory,
 * where no other thread reads them. gamma and beta lie there too, as fp32, for all ROWS. One
 * barrier for these: before it each block's sum goes to shared memory, after it each warp adds up
 * all of its row.
 *
 * What limits these kernels is how many instructions they take: rows that are whole steps
 * (IS_WHOLE) have no column to ask for, and what is asked of a step is uniform.
 *
 * Bytes that must move for each element of s bytes: s to read x (with a residual 3 s: x, the
 * residual, their sum), s for the value and 1 for the plane.
 */
#include "cuda_async.cuh"
#include "cuda_norm.cuh"
#include "cuda_norm_sums.cuh"

/* ---- a row's threads ------------------------------------------------------------------------ */

template <typename T, int THREADS, int STEPS, int ROWS, bool IS_WHOLE> struct row_threads {
    enum {
        PIECES = patch_words<T>::PIECES,
        COLS = THREADS * PATCH, /* of a step */
        SLOT = STEPS * PIECES * THREADS,
        SLOTS = ROWS * SLOT,
        BLOCKS = STEPS * THREADS / 16,
        LANES_EACH = 16 / STEPS, /* that are left with a block's sum or amax */
        /* Steps that every row has: a shorter one is another kernel's. */
        ALWAYS = THREADS > 32 ? STEPS / 2 + 1 : 1
    };

    /* Which of the row's threads this is, and which of the block's rows that one is. */
    static __device__ __forceinline__ int thread() { return (int)threadIdx.x % THREADS; }
    static __device__ __forceinline__ int own_row() { return (int)threadIdx.x / THREADS; }

    /* Column of the thread's element j in step s. */
    static __device__ __forceinline__ int column(int s, int j) {
        return s * COLS + thread() / 16 * TN__TILE + patch_column<T>(thread() % 16, j);
    }
    /* The same of a piece, from column(0, 0) on: a constant. */
    static __device__ __forceinline__ int offset(int s, int p) {
        return s * COLS + p * 16 * element<T>::VECTOR;
    }
    static __device__ __forceinline__ bool is_in(int s, int j, int cols) {
        return IS_WHOLE || column(s, j) < cols;
    }
    /* Its piece p of step s. */
    static __device__ __forceinline__ uint4 *piece(uint4 *slot, int s, int p) {
        return slot + (s * PIECES + p) * THREADS + thread();
    }
    /* The block whose sum the lane is left with. */
    static __device__ __forceinline__ int own_block() {
        return thread() % 16 / LANES_EACH * (THREADS / 16) + thread() / 16;
    }
    /* No lane of the warp has a column of the row in step s. */
    static __device__ __forceinline__ bool is_beyond(int s, int cols) {
        if (IS_WHOLE) return s >= ALWAYS && s * COLS >= cols;
        return s * COLS + thread() / 32 * 2 * TN__TILE >= cols;
    }
};

/* What of a launch's shared memory is what, each in its pieces of 16 bytes; of the thread's row. */
struct row_memory {
    uint4 *x, *residual, *factors;
};

template <typename R>
__device__ __forceinline__ row_memory memory_of_rows(uint4 *memory, bool has_sum) {
    uint4 *const own = memory + R::own_row() * R::SLOT;
    return {own, own + R::SLOTS, memory + (has_sum ? 2 : 1) * R::SLOTS};
}

/* ---- a row is on its way --------------------------------------------------------------------- */

template <typename T, typename R, int STEPS>
__device__ __forceinline__ void fetch_pieces(const tn__cuda_norm_arguments &a, const void *src,
                                             int64_t row, uint4 *slot) {
    const T *from = (const T *)src + row * a.cast.cols + R::column(0, 0);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (R::is_beyond(s, (int)a.cast.cols)) continue;
#pragma unroll
        for (int p = 0; p < R::PIECES; p++) {
            if (R::is_in(s, p * element<T>::VECTOR, (int)a.cast.cols))
                fetch_piece(R::piece(slot, s, p), from + R::offset(s, p), true);
        }
    }
}

template <typename T, typename R, int STEPS>
__device__ __forceinline__ void fetch_row(const tn__cuda_norm_arguments &a, int64_t row,
                                          const row_memory &memory) {
    if (row < a.cast.rows) {
        fetch_pieces<T, R, STEPS>(a, a.x, row, memory.x);
        if (a.sum) fetch_pieces<T, R, STEPS>(a, a.residual, row, memory.residual);
    }
    fetches_end();
}

/* What lies beyond the row is 0, of x and of the residual, in every row. */
template <typename T, typename R, int STEPS>
__device__ __forceinline__ void clear_beyond(const tn__cuda_norm_arguments &a,
                                             const row_memory &memory) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int p = 0; p < R::PIECES; p++) {
            if (R::is_in(s, p * element<T>::VECTOR, (int)a.cast.cols)) continue;
            *R::piece(memory.x, s, p) = make_uint4(0, 0, 0, 0);
            if (a.sum) *R::piece(memory.residual, s, p) = make_uint4(0, 0, 0, 0);
        }
    }
}

/* The thread's columns of gamma and beta: `part` 0 and 1 are gamma's first and last four. */
template <typename R, int STEPS>
__device__ __forceinline__ float4 *factors_at(const row_memory &memory, int part, int s) {
    return (float4 *)memory.factors + (part * STEPS + s) * (R::COLS / PATCH) + R::thread();
}

template <typename T, typename R, int STEPS, bool IS_LAYER>
__device__ __forceinline__ void keep_factors(const tn__cuda_norm_arguments &a,
                                             const row_memory &memory) {
    if (R::own_row() != 0) return;
#pragma unroll 1
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = R::column(s, half * 4);
            float gamma[4], beta[4];
            load_factors<4, true>(gamma, beta, a, column, (int)a.cast.cols - column);
            *factors_at<R, STEPS>(memory, half, s) =
                make_float4(gamma[0], gamma[1], gamma[2], gamma[3]);
            if (IS_LAYER)
                *factors_at<R, STEPS>(memory, 2 + half, s) =
                    make_float4(beta[0], beta[1], beta[2], beta[3]);
        }
    }
}

__device__ __forceinline__ void unpack_four(float *values, const float4 &four) {
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
}

template <typename R, int STEPS, bool IS_LAYER>
__device__ __forceinline__ column_factors kept_factors(const row_memory &memory, int s) {
    column_factors by;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unpack_four(by.gamma + 4 * half, *factors_at<R, STEPS>(memory, half, s));
        if (IS_LAYER) unpack_four(by.beta + 4 * half, *factors_at<R, STEPS>(memory, 2 + half, s));
    }
    return by;
}

/* ---- a row is held -------------------------------------------------------------------------- */

template <typename T, typename R>
__device__ __forceinline__ void load_step(uint32_t (&words)[patch_words<T>::COUNT], uint4 *slot,
                                          int s) {
#pragma unroll
    for (int p = 0; p < R::PIECES; p++) {
        const uint4 piece = *R::piece(slot, s, p);
        words[4 * p] = piece.x, words[4 * p + 1] = piece.y;
        words[4 * p + 2] = piece.z, words[4 * p + 3] = piece.w;
    }
}

template <typename T, typename R>
__device__ __forceinline__ void store_step(void *dst, const tn__cuda_norm_arguments &a, int64_t row,
                                           int s, const uint32_t (&words)[patch_words<T>::COUNT]) {
    T *to = (T *)dst + row * a.cast.cols + R::column(0, 0);
#pragma unroll
    for (int p = 0; p < R::PIECES; p++) {
        if (R::is_in(s, p * element<T>::VECTOR, (int)a.cast.cols))
            *(uint4 *)(to + R::offset(s, p)) =
                make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
    }
}

/* What is normalized: x, or x + residual rounded, which is written. */
template <typename T, typename R, int STEPS>
__device__ __forceinline__ void hold_row(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                         const tn__cuda_norm_arguments &a, int64_t row,
                                         const row_memory &memory) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (!R::is_beyond(s, (int)a.cast.cols)) load_step<T, R>(words[s], memory.x, s);
    if (!a.sum) return;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (R::is_beyond(s, (int)a.cast.cols)) continue;
        uint32_t added[patch_words<T>::COUNT];
        float value[PATCH], residual[PATCH];
        load_step<T, R>(added, memory.residual, s);
        unpack_words<T>(value, words[s]);
        unpack_words<T>(residual, added);
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            value[j] = __fadd_rn(value[j], residual[j]);
        pack_words<T>(words[s], value);
        store_step<T, R>(a.sum, a, row, s, words[s]);
        row_stay_packed<T>(words[s]);
    }
}

/* ---- statistics ----------------------------------------------------------------------------- */

/* Of the blocks of a row, and of the next one. */
template <typename R> struct block_sums { float sum[2][R::BLOCKS], squares[2][R::BLOCKS]; };

/* What the thread's 8 columns of a step give to the sum of their block. */
template <typename T, typename R>
__device__ __forceinline__ float step_sum(const uint32_t (&words)[patch_words<T>::COUNT]) {
    float value[PATCH];
    unpack_words<T>(value, words);
    return sum_of_lane<T>(value);
}

template <typename T, typename R>
__device__ __forceinline__ float step_squares(const uint32_t (&words)[patch_words<T>::COUNT]) {
    float value[PATCH];
    unpack_words<T>(value, words);
    return squares_of_lane<T>(value);
}

/* Of what deviates from the mean of the block, of what is in the row. */
template <typename T, typename R>
__device__ __forceinline__ float step_deviation(const uint32_t (&words)[patch_words<T>::COUNT],
                                                float mean, int s, int cols) {
    float value[PATCH];
    unpack_words<T>(value, words);
#pragma unroll
    for (int j = 0; j < PATCH; j++)
        value[j] = __fsub_rn(value[j], mean);
    return squares_of_lane<T>(value, R::is_in(s, 0, cols),
                              R::is_in(s, PATCH - element<T>::VECTOR, cols));
}

/* Columns of a block that are in the row, or more. */
template <bool IS_WHOLE> __device__ __forceinline__ int columns_left(int cols, int block) {
    return IS_WHOLE ? (int)TN__TILE : cols - block * TN__TILE;
}

/* The sums of the row's blocks go to shared memory. */
template <typename T, typename R, int STEPS, bool IS_LAYER, bool IS_WHOLE>
__device__ __forceinline__ void put_block_sums(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                               block_sums<R> &sums, int turn, int cols) {
    const int lane16 = R::thread() % 16, block = R::own_block();
    float part[STEPS];
    if constexpr (IS_LAYER) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            part[s] = R::is_beyond(s, cols) ? 0.0f : step_sum<T, R>(words[s]);
            row_stay_packed<T>(words[s]);
        }
        const float sum = sums_of_half_warp<T, STEPS>(part, lane16);
        const int left = columns_left<IS_WHOLE>(cols, block);
        const float own_mean = left > 0 ? mean_of_block(sum, left) : 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const float mean = __shfl_sync(0xFFFFFFFFu, own_mean, s * R::LANES_EACH, 16);
            part[s] = R::is_beyond(s, cols) ? 0.0f : step_deviation<T, R>(words[s], mean, s, cols);
            row_stay_packed<T>(words[s]);
        }
        if (lane16 % R::LANES_EACH == 0) sums.sum[turn][block] = sum;
    } else {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            part[s] = R::is_beyond(s, cols) ? 0.0f : step_squares<T, R>(words[s]);
    }
    const float squares = sums_of_half_warp<T, STEPS>(part, lane16);
    if (lane16 % R::LANES_EACH == 0) sums.squares[turn][block] = squares;
}

/* By each warp, after a barrier: the lanes have the 32 sums of a row's blocks. */
template <typename R, bool IS_LAYER, bool IS_WHOLE>
__device__ __forceinline__ row_statistics statistics_of(const tn__cuda_norm_arguments &a,
                                                        const block_sums<R> &sums, int turn) {
    const int lane = (int)threadIdx.x % 32, blocks = (int)a.cast.tiles_across;
    const float count = (float)a.cast.cols;
    row_statistics of = {0.0f, 0.0f};
    float total = 0.0f;
    if constexpr (IS_LAYER) {
#pragma unroll
        for (int b = 0; b < R::BLOCKS; b += ROW_PARTS)
            if (b + lane < blocks) of.mean = __fadd_rn(of.mean, sums.sum[turn][b + lane]);
        of.mean = __fdiv_rn(total_of_warp(of.mean), count);
    }
#pragma unroll
    for (int b = 0; b < R::BLOCKS; b += ROW_PARTS) {
        if (b + lane >= blocks) continue;
        float squares = sums.squares[turn][b + lane];
        if constexpr (IS_LAYER)
            squares = squares_around(sums.sum[turn][b + lane], squares, of.mean,
                                     columns_left<IS_WHOLE>((int)a.cast.cols, b + lane));
        total = __fadd_rn(total, squares);
    }
    of.rstd = tn__exact_rsqrt(__fadd_rn(__fdiv_rn(total_of_warp(total), count), a.epsilon));
    return of;
}

/* ---- blocks of 1 x 128 ---------------------------------------------------------------------- */

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

/* Codes of a step's 8 columns, in one piece or, of 32-bit elements, two. */
template <typename T, typename R>
__device__ __forceinline__ void store_codes(unsigned char *row, int s, int cols, uint2 codes) {
    unsigned char *to = row + R::column(0, 0);
    if constexpr (sizeof(T) == 2) {
        if (R::is_in(s, 0, cols)) *(uint2 *)(to + R::offset(s, 0)) = codes;
    } else {
        if (R::is_in(s, 0, cols)) *(uint32_t *)(to + R::offset(s, 0)) = codes.x;
        if (R::is_in(s, 4, cols)) *(uint32_t *)(to + R::offset(s, 1)) = codes.y;
    }
}

template <typename T, __nv_fp8_interpretation_t F, typename R, int STEPS>
__device__ __forceinline__ void quantize_steps(const tn__cuda_quantize_arguments &a, int64_t row,
                                               uint32_t (&words)[STEPS][patch_words<T>::COUNT]) {
    const int lane16 = R::thread() % 16, cols = (int)a.cols, block = R::own_block();
    unsigned char *to = a.row.data + row * a.cols;
    float max[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        max[s] = R::is_beyond(s, cols) ? 0.0f : row_maximum<T>(words[s]);
    const float amax = half_warp_step_max<STEPS>(max, lane16);
    const scale_pair own = block_scales<T, F>(amax, a.amax_epsilon, a.is_pow2);
    if (lane16 % R::LANES_EACH == 0 && block < (int)a.tiles_across)
        row_scale_of_block_put(a, row, block, own.inverse);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float scale = __shfl_sync(0xFFFFFFFFu, own.scale, s * R::LANES_EACH, 16);
        if (R::is_beyond(s, cols)) continue;
        float scaled[PATCH];
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            scaled[j] = __fmul_rn(element<T>::value(words[s], j), scale);
        store_codes<T, R>(to, s, cols, cast_patch_row<F>(scaled));
    }
}

/* ---- all of a row --------------------------------------------------------------------------- */

template <typename T, __nv_fp8_interpretation_t F, typename R, int STEPS, bool IS_LAYER>
__device__ __forceinline__ void make_row(uint32_t (&words)[STEPS][patch_words<T>::COUNT],
                                         const tn__cuda_norm_arguments &a, int64_t row,
                                         const row_memory &memory, const row_statistics &of) {
    const int cols = (int)a.cast.cols;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (R::is_beyond(s, cols)) continue;
        normalize_words<T, IS_LAYER>(words[s], kept_factors<R, STEPS, IS_LAYER>(memory, s), of);
#pragma unroll
        for (int w = 0; w < patch_words<T>::COUNT; w++) /* no amax may see what is beyond */
            if (!R::is_in(s, w / 4 * element<T>::VECTOR, cols)) words[s][w] = 0;
        if (a.value) store_step<T, R>(a.value, a, row, s, words[s]);
        row_stay_packed<T>(words[s]);
    }
    if (a.cast.row.data) quantize_steps<T, F, R, STEPS>(a.cast, row, words);
}

template <typename T, __nv_fp8_interpretation_t F, int THREADS, int STEPS, int ROWS, bool IS_LAYER,
          bool IS_WHOLE>
__device__ __forceinline__ void norm_rows_of(const tn__cuda_norm_arguments &a, uint4 *shared) {
    typedef row_threads<T, THREADS, STEPS, ROWS, IS_WHOLE> R;
    __shared__ block_sums<R> sums[ROWS];
    const row_memory memory = memory_of_rows<R>(shared, a.sum != nullptr);
    uint32_t words[STEPS][patch_words<T>::COUNT];
    const bool has_outputs = a.value || a.cast.row.data;
    const int64_t stride = (int64_t)gridDim.x * ROWS;
    block_sums<R> &own_sums = sums[R::own_row()];
    int64_t row = (int64_t)blockIdx.x * ROWS + R::own_row();
    int turn = 0;
    if (!IS_WHOLE) clear_beyond<T, R, STEPS>(a, memory);
    fetch_row<T, R, STEPS>(a, row, memory);
    if (has_outputs) keep_factors<T, R, STEPS, IS_LAYER>(a, memory);
#pragma unroll 1
    for (; row - R::own_row() < a.cast.rows; row += stride) {
        const bool is_there = ROWS == 1 || row < a.cast.rows; /* uniform in a warp */
        fetches_wait<0>();
        if (is_there) {
            hold_row<T, R, STEPS>(words, a, row, memory);
            fetch_row<T, R, STEPS>(a, row + stride, memory);
            put_block_sums<T, R, STEPS, IS_LAYER, IS_WHOLE>(words, own_sums, turn,
                                                            (int)a.cast.cols);
        }
        __syncthreads();
        if (is_there) {
            const row_statistics of = statistics_of<R, IS_LAYER, IS_WHOLE>(a, own_sums, turn);
            if (R::thread() == 0) {
                a.rstd[row] = canonical_of<float>(of.rstd);
                if (IS_LAYER) a.mean[row] = canonical_of<float>(of.mean);
            }
            if (has_outputs) make_row<T, F, R, STEPS, IS_LAYER>(words, a, row, memory, of);
        }
        turn ^= 1; /* of the sums, others may still read this one's */
    }
}

template <typename T, __nv_fp8_interpretation_t F, int THREADS, int STEPS, int ROWS, bool IS_LAYER>
__device__ __forceinline__ void norm_rows(const tn__cuda_norm_arguments &a) {
    typedef row_threads<T, THREADS, STEPS, ROWS, true> R;
    DYNAMIC_SHARED(shared, sizeof(uint4) * 2 * R::SLOTS + sizeof(float) * 2 * STEPS * R::COLS);
    if (is_skipped(a.skip)) return;
    if (a.cast.cols % R::COLS == 0)
        norm_rows_of<T, F, THREADS, STEPS, ROWS, IS_LAYER, true>(a, (uint4 *)shared);
    else
        norm_rows_of<T, F, THREADS * ROWS, STEPS / ROWS, 1, IS_LAYER, false>(a, (uint4 *)shared);
}

/* ---- the kernels by name ------------------------------------------------------------------ */

/* Blocks on a multiprocessor, for which registers are left: 24 warps of 16-bit elements, or 16
 * where shared memory has no room for more; of 32-bit ones fewer fit in it. */
template <typename T> constexpr int blocks_of(int threads, int columns) {
    return sizeof(T) == 4 ? 1 : (columns <= 4096 ? 768 : 512) / threads;
}

#define KERNEL(name, T, F, threads, steps, rows, is_layer)                                         \
    extern "C" __global__ void __launch_bounds__(                                                  \
        threads *rows, blocks_of<T>((threads) * (rows), (threads) * (steps)*PATCH))                \
        name(const __grid_constant__ tn__cuda_norm_arguments a) {                                  \
        norm_rows<T, F, threads, steps, rows, is_layer>(a);                                        \
    }
/* In 8 steps the work of a warp for each row counts half as much as in 4, but takes more registers,
 * of which LAYER has too few for 24 warps; its longest rows have no room for two beside gamma and
 * beta. */
#define NORM(name, T, F)                                                                           \
    KERNEL(norm_rows_2048_rms_##name, T, F, 32, 8, 4, false)                                       \
    KERNEL(norm_rows_4096_rms_##name, T, F, 64, 8, 2, false)                                       \
    KERNEL(norm_rows_8192_rms_##name, T, F, 128, 8, 1, false)                                      \
    KERNEL(norm_rows_16384_rms_##name, T, F, 256, 8, 1, false)                                     \
    KERNEL(norm_rows_2048_layer_##name, T, F, 32, 8, 4, true)                                      \
    KERNEL(norm_rows_4096_layer_##name, T, F, 128, 4, 2, true)                                     \
    KERNEL(norm_rows_8192_layer_##name, T, F, 128, 8, 2, true)                                     \
    KERNEL(norm_rows_16384_layer_##name, T, F, 512, 4, 1, true)

NORM(fp32_e4m3, float, __NV_E4M3)
NORM(fp32_e5m2, float, __NV_E5M2)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2)
NORM(fp16_e4m3, __half, __NV_E4M3)
NORM(fp16_e5m2, __half, __NV_E5M2)
