/* The statistics of a band's rows (cuda_norm_bands.cuh).
 *
 * A warp takes a row, in steps of two blocks of 128 columns, a half warp each. The steps of a group
 * are on their way at once; each lane of a half is then left with what one block of them gives:
 *
 *     step            0     1     2     3   |  0     1     2     3   | ...
 *     half warp     0  1  0  1  0  1  0  1  | 0  1 ...
 *     block         0  1  2  3  4  5  6  7  | 8  9 ...
 *     lanes that     0-3   4-7   8-11 12-15 of a half
 *     are left with it
 */
#ifndef TENURE_CUDA_NORM_BAND_ROWS_CUH
#define TENURE_CUDA_NORM_BAND_ROWS_CUH

#include "cuda_norm.cuh"
#include "cuda_norm_bands.cuh"
#include "cuda_norm_sums.cuh"

template <typename T> struct row_group {
    enum {
        STEPS = 4,
        LANES_EACH = 16 / STEPS,
        BLOCKS = 2 * STEPS,
        COLUMNS = BLOCKS * TN__TILE,
        PARTS = 32 / BLOCKS /* block b is added to sum b mod 32: group g to part g mod PARTS */
    };
    uint32_t words[STEPS][patch_words<T>::COUNT];
};

template <typename T> struct warp_row {
    int64_t row;
    int first; /* column of the group of blocks */
    int lane16, half;

    __device__ __forceinline__ int column(int step) const {
        return first + (2 * step + half) * TN__TILE;
    }
    /* The block that the lane is left with. */
    __device__ __forceinline__ int own_block() const {
        return first / TN__TILE + lane16 / row_group<T>::LANES_EACH * 2 + half;
    }
};

/* Zeros beyond the row. */
template <typename T>
__device__ __forceinline__ void load_group(row_group<T> &group, const tn__cuda_norm_arguments &a,
                                           const warp_row<T> &at) {
    const T *row = (const T *)a.x + at.row * a.cast.cols;
#pragma unroll
    for (int s = 0; s < row_group<T>::STEPS; s++) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            const int column = at.column(s) + patch_column<T>(at.lane16, p * element<T>::VECTOR);
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (column < (int)a.cast.cols) piece = __ldg((const uint4 *)(row + column));
            group.words[s][4 * p] = piece.x, group.words[s][4 * p + 1] = piece.y;
            group.words[s][4 * p + 2] = piece.z, group.words[s][4 * p + 3] = piece.w;
        }
    }
}

/* What the blocks of a row add up to: 32 sums, of which a lane has PARTS; the total on all lanes.
 * Sums are added that are 16 apart, then 8, 4, 2, 1: parts first, then lanes, and last the
 * halves. */
template <typename T> struct row_total {
    float part[row_group<T>::PARTS];

    /* An empty block gives 0, which changes nothing. */
    __device__ __forceinline__ void add(int group, float given) {
#pragma unroll
        for (int p = 0; p < row_group<T>::PARTS; p++)
            part[p] = __fadd_rn(part[p], group % row_group<T>::PARTS == p ? given : 0.0f);
    }
    __device__ __forceinline__ float total() {
#pragma unroll
        for (int half = row_group<T>::PARTS / 2; half > 0; half /= 2) {
#pragma unroll
            for (int p = 0; p < half; p++)
                part[p] = __fadd_rn(part[p], part[p + half]);
        }
        float sum = part[0];
#pragma unroll
        for (int apart = 8; apart >= row_group<T>::LANES_EACH; apart /= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, apart));
        return __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 16));
    }
};

/* Of a block: the sum, and the squares of what deviates from its mean. */
struct block_numbers {
    float sum, squares;
};

template <typename T>
__device__ __forceinline__ float group_squares(const row_group<T> &group, const warp_row<T> &at) {
    float part[row_group<T>::STEPS];
#pragma unroll
    for (int s = 0; s < row_group<T>::STEPS; s++) {
        float value[PATCH];
        unpack_words<T>(value, group.words[s]);
        part[s] = squares_of_lane<T>(value);
    }
    return sums_of_half_warp<T, row_group<T>::STEPS>(part, at.lane16);
}

template <typename T>
__device__ __forceinline__ block_numbers group_numbers(row_group<T> &group,
                                                       const tn__cuda_norm_arguments &a,
                                                       const warp_row<T> &at) {
    enum { STEPS = row_group<T>::STEPS };
    block_numbers of;
    float part[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        float value[PATCH];
        unpack_words<T>(value, group.words[s]);
        part[s] = sum_of_lane<T>(value);
        row_stay_packed<T>(group.words[s]);
    }
    of.sum = sums_of_half_warp<T, STEPS>(part, at.lane16);
    const int left = (int)a.cast.cols - at.own_block() * TN__TILE;
    const float own_mean = left > 0 ? mean_of_block(of.sum, left) : 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float mean = __shfl_sync(0xFFFFFFFFu, own_mean, s * row_group<T>::LANES_EACH, 16);
        const int low = at.column(s) + patch_column<T>(at.lane16, 0);
        const int high = at.column(s) + patch_column<T>(at.lane16, PATCH - element<T>::VECTOR);
        float value[PATCH];
        unpack_words<T>(value, group.words[s]);
#pragma unroll
        for (int j = 0; j < PATCH; j++)
            value[j] = __fsub_rn(value[j], mean);
        part[s] = squares_of_lane<T>(value, low < (int)a.cast.cols, high < (int)a.cast.cols);
    }
    of.squares = sums_of_half_warp<T, STEPS>(part, at.lane16);
    return of;
}

/* The total of what the blocks deviate from the mean of the row, from what was kept of them. */
template <typename T>
__device__ __forceinline__ float squares_of_kept(const tn__cuda_norm_arguments &a,
                                                 const block_numbers *kept, float mean,
                                                 warp_row<T> at) {
    row_total<T> squares = {};
    __syncwarp();
#pragma unroll 1
    for (int group = 0; at.first < (int)a.cast.cols; group++, at.first += row_group<T>::COLUMNS) {
        const int left = (int)a.cast.cols - at.own_block() * TN__TILE;
        float given = 0.0f;
        if (left > 0) {
            const block_numbers of = kept[at.own_block()];
            given = squares_around(of.sum, of.squares, mean, left);
        }
        squares.add(group, given);
    }
    return squares.total();
}

/* All of a row is on its way to the L2 cache, whatever the loads of it wait for. */
template <typename T>
__device__ __forceinline__ void row_is_wanted(const void *src, const tn__cuda_quantize_arguments &a,
                                              int64_t row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t bytes = (uint32_t)(a.cols * (int64_t)sizeof(T));
    if (threadIdx.x % 32 == 0)
        asm volatile(
            "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const T *)src + row * a.cols),
            "r"(bytes));
#endif
}

/* Statistics of the warp's row; `kept` has room for its blocks. */
template <typename T>
__device__ __forceinline__ row_statistics statistics_by_warp(const tn__cuda_norm_arguments &a,
                                                             int64_t row, block_numbers *kept) {
    const int lane = (int)threadIdx.x % 32;
    const float count = (float)a.cast.cols;
    const warp_row<T> begin = {row, 0, lane % 16, lane / 16};
    warp_row<T> at = begin;
    row_total<T> sums = {};
    row_is_wanted<T>(a.x, a.cast, row);
#pragma unroll 1
    for (int g = 0; at.first < (int)a.cast.cols; g++, at.first += row_group<T>::COLUMNS) {
        row_group<T> group;
        float given;
        load_group<T>(group, a, at);
        if (a.mean) {
            const block_numbers of = group_numbers<T>(group, a, at);
            if (at.lane16 % row_group<T>::LANES_EACH == 0) kept[at.own_block()] = of;
            given = of.sum;
        } else {
            given = group_squares<T>(group, at);
        }
        sums.add(g, given);
    }
    row_statistics of = {0.0f, 0.0f};
    float total = sums.total();
    if (a.mean) {
        of.mean = __fdiv_rn(total, count);
        total = squares_of_kept<T>(a, kept, of.mean, begin);
    }
    of.rstd = tn__exact_rsqrt(__fadd_rn(__fdiv_rn(total, count), a.epsilon));
    return of;
}

template <typename T>
__device__ __forceinline__ void norm_rows_of_band(const tn__cuda_norm_arguments &a, int64_t first,
                                                  uint4 *memory) {
    const int64_t row = first + threadIdx.x / 32;
    block_numbers *kept = (block_numbers *)memory + threadIdx.x / 32 * TN__BAND_BLOCKS_MAX;
    if (row >= a.cast.rows) return;
    const row_statistics of = statistics_by_warp<T>(a, row, kept);
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if (a.mean) row_number_put(a.mean, row, of.mean);
    row_number_put(a.rstd, row, of.rstd);
}

#endif
