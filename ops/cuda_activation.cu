/* Kernels of the activations without gates, and of what is only quantized and added up; and the
 * second half of all sums of columns. */
#include "cuda_activation.cuh"

template <typename T> struct activate {
    enum { IS_GRADIENT = 0, IS_GATED = 0, IS_WIDE = sizeof(T) == 4 };
    enum {
        AT_ONCE = IS_WIDE ? 2 : 8,
        BLOCKS = sigmoids<T>::HAS_TABLE ? TN__LIGHT_PRODUCE_BLOCKS : TN__PRODUCE_BLOCKS,
        LESS_IN_2D = IS_WIDE
    };
    static __device__ __forceinline__ piece_values<T> of(const inputs<T> &, const points<T> &at,
                                                         bool) {
        return at.value;
    }
};

PRODUCE_ALL(activate)

/* ---- the sums of tiles -------------------------------------------------------------------- */

/* Four loads are on their way at once: of parts here, of tiles that have but one below. */
__device__ __forceinline__ float sum_of_parts(const tn__cuda_column_sums_arguments &a, int64_t tile,
                                              int64_t col) {
    const float *const parts = a.tile_sums + tile * a.parts * a.cols + col;
    float sum = __ldg(parts);
#pragma unroll 4
    for (int i = 1; i < a.parts; i++)
        sum = __fadd_rn(sum, __ldg(parts + i * a.cols));
    return sum;
}

__device__ __forceinline__ float sum_of_tiles(const tn__cuda_column_sums_arguments &a,
                                              int64_t first, int64_t col) {
    float sum = 0.0f;
    if (a.parts > 1) {
#pragma unroll 1
        for (int64_t tile = first; tile < a.tiles; tile += TN__TILE_SUMS)
            sum = __fadd_rn(sum, sum_of_parts(a, tile, col));
        return sum;
    }
#pragma unroll 4
    for (int64_t tile = first; tile < a.tiles; tile += TN__TILE_SUMS)
        sum = __fadd_rn(sum, __ldg(a.tile_sums + tile * a.cols + col));
    return sum;
}

/* A block takes 32 columns: 8 threads each, of which every one adds up its eighth of the tiles. */
extern "C" __global__ void __launch_bounds__(TN__FLAT_THREADS)
    column_sums(const __grid_constant__ tn__cuda_column_sums_arguments a) {
    __shared__ float partial[TN__TILE_SUMS][TN__SUM_COLUMNS];
    const int column = (int)(threadIdx.x % TN__SUM_COLUMNS);
    const int part = (int)(threadIdx.x / TN__SUM_COLUMNS);
    const int64_t col = (int64_t)blockIdx.x * TN__SUM_COLUMNS + column;
    if (is_skipped(a.skip)) return;
    partial[part][column] = col < a.cols ? sum_of_tiles(a, part, col) : 0.0f;
#pragma unroll
    for (int half = TN__TILE_SUMS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (part < half)
            partial[part][column] = __fadd_rn(partial[part][column], partial[part + half][column]);
    }
    if (part != 0 || col >= a.cols) return;
    const float before = a.accumulate ? load_as(a.dtype, a.sums, col) : 0.0f;
    const float total = partial[0][column];
    store_as(a.dtype, a.sums, col, a.accumulate ? __fadd_rn(before, total) : total);
}
