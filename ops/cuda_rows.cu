/* Kernels that pad groups and move rows: which row of the source each row of a result is, they
 * read from a map in device memory.
 *
 * All of it is bound by memory. A gather moves each row of the result in and out, 2 K bytes for a
 * row of K bytes, and reads 8 bytes of map; combine reads J rows for each that it writes. A row
 * takes as many threads as it has pieces of 16 bytes, up to a block, and a block several rows where
 * they are short, so that no thread divides.
 */
#include "cuda_groups.cuh"
#include "cuda_rows_arguments.h"
#include "cuda_tile.cuh"

/* ---- padding -------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    pad_offsets(const __grid_constant__ tn__cuda_pad_groups_arguments a) {
    __shared__ int64_t sums[GROUPS_WARPS];
    uint32_t error = groups_error(a.offsets, a.groups, a.rows);
    int64_t total = 0;
    /* Twice over the groups: what does not fit must not have been begun. */
    for (int pass = 0; pass < 2 && error == TN__GROUPS_OK; pass++) {
        total = 0;
        for (int64_t done = 0; done < a.groups; done += TN__FLAT_THREADS) {
            const int64_t g = done + threadIdx.x;
            int64_t padded = 0;
            if (g < a.groups)
                padded = a.multiple * units_of(a.offsets[g + 1] - a.offsets[g], a.multiple);
            int64_t all;
            const int64_t first = total + sum_up_to(sums, padded, &all) - padded;
            total += all;
            __syncthreads();
            if (pass == 1 && g < a.groups) a.padded_offsets[g] = first;
        }
        if (total > a.padded_rows) error = TN__GROUPS_OVER_CAPACITY;
    }
    if (threadIdx.x != 0) return;
    *a.total = error == TN__GROUPS_OK ? total : -1;
    if (error == TN__GROUPS_OK) a.padded_offsets[a.groups] = total;
    if (error != TN__GROUPS_OK && *a.error == 0) *a.error = error;
}

extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    pad_map(const __grid_constant__ tn__cuda_pad_groups_arguments a) {
    const int64_t row = (int64_t)blockIdx.x * TN__FLAT_THREADS + threadIdx.x;
    const int64_t total = *a.total;
    if (total < 0) return;
    if (row < a.padded_rows) {
        int64_t from = -1;
        if (row < total) {
            const int64_t g = place_of(a.padded_offsets, a.groups, row);
            from = a.offsets[g] + row - a.padded_offsets[g];
            if (from >= a.offsets[g + 1]) from = -1;
        }
        a.map[row] = from >= 0 && a.permutation ? a.permutation[from] : from;
    }
    if (a.inverse && row < a.rows) {
        int64_t padded = -1;
        if (row < a.offsets[a.groups]) {
            const int64_t g = place_of(a.offsets, a.groups, row);
            padded = a.padded_offsets[g] + row - a.offsets[g];
        }
        a.inverse[row] = padded;
    }
}

/* ---- gather --------------------------------------------------------------------------------- */

/* The row of the source; -1 for none, and where there is no such row. */
__device__ __forceinline__ int64_t row_of(int64_t entry, int64_t rows) {
    return entry < 0 || entry >= rows ? -1 : entry;
}

__device__ __forceinline__ void note_bad_entry(int64_t entry, int64_t rows, uint32_t *error) {
    if (entry >= rows) atomicCAS(error, 0u, (uint32_t)TN__GROUPS_BAD_MAP);
}

template <typename P>
__device__ __forceinline__ void gather_pieces(const tn__cuda_gather_arguments &a, int64_t row,
                                              int64_t from, int64_t lane, P nothing) {
    const P *source = (const P *)a.src + (from < 0 ? 0 : from) * a.pieces;
    P *to = (P *)a.dst + row * a.pieces;
    for (int64_t i = lane; i < a.pieces; i += a.lanes)
        to[i] = from < 0 ? nothing : __ldg(source + i);
}

extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    gather_rows(const __grid_constant__ tn__cuda_gather_arguments a) {
    const uint32_t lane = threadIdx.x & (a.lanes - 1);
    const int64_t row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / a.lanes) + threadIdx.x / a.lanes;
    if (row >= a.dst_rows) return;
    const int64_t entry = a.map[row], from = row_of(entry, a.src_rows);
    if (lane == 0) note_bad_entry(entry, a.src_rows, a.error);
    if (a.piece_bytes == 16)
        gather_pieces<uint4>(a, row, from, lane,
                             make_uint4(a.nothing, a.nothing, a.nothing, a.nothing));
    else if (a.piece_bytes == 4)
        gather_pieces<uint32_t>(a, row, from, lane, a.nothing);
    else
        gather_pieces<unsigned char>(a, row, from, lane, (unsigned char)a.nothing);
}

/* Scales of 1D ROW planes: along a scale row they are one for each row of the matrix. */
extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    gather_scales(const __grid_constant__ tn__cuda_gather_scales_arguments a) {
    const int64_t first = (int64_t)(blockIdx.x / a.blocks_across) * TN__GATHER_SCALE_ROWS;
    const int64_t row = (int64_t)(blockIdx.x % a.blocks_across) * TN__FLAT_THREADS + threadIdx.x;
    const int count = (int)min(a.scale_rows - first, (int64_t)TN__GATHER_SCALE_ROWS);
    if (row >= a.dst_stride) return;
    const int64_t from = row < a.dst_rows ? row_of(a.map[row], a.src_rows) : -1;
    float scale[TN__GATHER_SCALE_ROWS];
#pragma unroll
    for (int s = 0; s < TN__GATHER_SCALE_ROWS; s++) {
        scale[s] = row < a.dst_rows ? 1.0f : 0.0f;
        if (from >= 0 && s < count) scale[s] = __ldg(a.src + (first + s) * a.src_stride + from);
    }
#pragma unroll
    for (int s = 0; s < TN__GATHER_SCALE_ROWS; s++)
        if (s < count) a.dst[(first + s) * a.dst_stride + row] = scale[s];
}

/* ---- combine -------------------------------------------------------------------------------- */

enum { COLUMNS = 8 }; /* that a thread sums at once */

/* Columns col ... col + 7 of a row of src. */
template <typename T>
__device__ __forceinline__ void load_columns(const void *src, int64_t at,
                                             float (&values)[COLUMNS]) {
    const uint4 *from = (const uint4 *)((const T *)src + at);
#pragma unroll
    for (int p = 0; p < COLUMNS / element<T>::VECTOR; p++) {
        const uint4 piece = __ldg(from + p);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int j = 0; j < element<T>::VECTOR; j++)
            values[p * element<T>::VECTOR + j] = element<T>::value(words, j);
    }
}

template <typename U>
__device__ __forceinline__ void store_columns(void *dst, int64_t at,
                                              const float (&values)[COLUMNS]) {
    uint4 *to = (uint4 *)((U *)dst + at);
#pragma unroll
    for (int p = 0; p < COLUMNS / element<U>::VECTOR; p++)
        to[p] =
            make_uint4(element<U>::word(values, 4 * p), element<U>::word(values, 4 * p + 1),
                       element<U>::word(values, 4 * p + 2), element<U>::word(values, 4 * p + 3));
}

template <typename T, typename U>
__device__ __forceinline__ void combine_vectors(const tn__cuda_combine_arguments &a, int64_t row,
                                                uint32_t lane) {
    for (int64_t col = (int64_t)lane * COLUMNS; col < a.cols; col += (int64_t)a.lanes * COLUMNS) {
        float sum[COLUMNS] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        for (int64_t j = row * a.each; j < (row + 1) * a.each; j++) {
            const int64_t from = row_of(a.map[j], a.src_rows);
            const float weight = a.weights ? a.weights[j] : 1.0f;
            float values[COLUMNS];
            if (from < 0) continue;
            load_columns<T>(a.src, from * a.cols + col, values);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                sum[i] = __fmaf_rn(weight, values[i], sum[i]);
        }
        store_columns<U>(a.dst, row * a.cols + col, sum);
    }
}

template <typename T, typename U>
__device__ __forceinline__ void combine_elements(const tn__cuda_combine_arguments &a, int64_t row,
                                                 uint32_t lane) {
    for (int64_t col = lane; col < a.cols; col += a.lanes) {
        float sum = 0.0f;
        for (int64_t j = row * a.each; j < (row + 1) * a.each; j++) {
            const int64_t from = row_of(a.map[j], a.src_rows);
            const float weight = a.weights ? a.weights[j] : 1.0f;
            if (from >= 0)
                sum = __fmaf_rn(weight, element<T>::load(a.src, from * a.cols + col), sum);
        }
        element<U>::store(a.dst, row * a.cols + col, sum);
    }
}

template <typename T, typename U>
__device__ __forceinline__ void combine(const tn__cuda_combine_arguments &a) {
    const uint32_t lane = threadIdx.x & (a.lanes - 1);
    const int64_t row = (int64_t)blockIdx.x * (TN__FLAT_THREADS / a.lanes) + threadIdx.x / a.lanes;
    if (row >= a.dst_rows) return;
    for (int64_t j = row * a.each + lane; j < (row + 1) * a.each; j += a.lanes)
        note_bad_entry(a.map[j], a.src_rows, a.error);
    if (a.vectors)
        combine_vectors<T, U>(a, row, lane);
    else
        combine_elements<T, U>(a, row, lane);
}

#define COMBINE(from, T, to, U)                                                                    \
    extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)                                 \
        combine_rows_##from##_##to(const __grid_constant__ tn__cuda_combine_arguments a) {         \
        combine<T, U>(a);                                                                          \
    }
#define COMBINE_FROM(from, T)                                                                      \
    COMBINE(from, T, fp32, float)                                                                  \
    COMBINE(from, T, bf16, __nv_bfloat16)                                                          \
    COMBINE(from, T, fp16, __half)

COMBINE_FROM(fp32, float)
COMBINE_FROM(bf16, __nv_bfloat16)
COMBINE_FROM(fp16, __half)
