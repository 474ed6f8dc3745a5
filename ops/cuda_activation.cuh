/* How the kernels of activations and of their gradients make the values of a tile.
 *
 * A block of threads makes one 128 x 128 tile, reads what that takes once, and writes the value,
 * the planes and the sums of the columns from registers. Bytes that must move for each element of y
 * with elements of s bytes, all outputs wanted, next to 1/32 for each plane's scales:
 *
 *     activation   2 s + 2               gated  3 s + 2
 *     gradient     3 s + 2               gated  5 s + 4
 *
 * In a gated gradient the tiles of both halves read the same dy and x. They are numbered so that
 * they run one behind the other, and the second reads them from the L2 cache.
 */
#ifndef TENURE_CUDA_ACTIVATION_CUH
#define TENURE_CUDA_ACTIVATION_CUH

#include "cuda_produce.cuh"

/* Where what makes VECTOR neighbours (or one element) of one row begins; the pointers are of the
 * row, `col` is the column of x. */
template <typename T> struct row_sources {
    const T *x;
    const T *dy;
    float weight;
};

template <typename T>
__device__ __forceinline__ row_sources<T> sources_of(const tn__cuda_produce_arguments &a,
                                                     int64_t row) {
    row_sources<T> from;
    from.x = (const T *)a.cast.src + row * (a.is_gated ? 2 * a.half_cols : a.half_cols);
    from.dy = (const T *)a.dy + row * a.half_cols;
    from.weight = a.weights ? __ldg(a.weights + row) : 1.0f;
    return from;
}

/* What is loaded for one piece or element, before it is worked on. */
template <typename V> struct inputs { V x, gate, dy; };

/* A producer says how one value follows from what was loaded: `of`, and whether it IS_GRADIENT.
 * Times 1 is exact, so that weights need no branch. */

/* One piece of the patch, for all its rows: half of them are read before the first is made. */
template <typename T, typename Make>
__device__ __forceinline__ void make_pieces(const tn__cuda_produce_arguments &a,
                                            const patch_place &at, int p,
                                            uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    enum { AT_ONCE = sizeof(T) == 2 ? 4 : 2 };
    int64_t col = at.tile_first_col + patch_column<T>(at.lane16, p * element<T>::VECTOR);
    const int height = col < a.cast.cols ? patch_rows_in(a.cast.rows, at) : 0;
    const bool of_gate = Make::IS_GRADIENT && a.is_gated && col >= a.half_cols;
    if (of_gate) col -= a.half_cols;
#pragma unroll
    for (int first = 0; first < PATCH; first += AT_ONCE) {
        inputs<uint4> in[AT_ONCE];
        float weight[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            in[i].x = in[i].gate = in[i].dy = make_uint4(0, 0, 0, 0);
            weight[i] = 1.0f;
            if (first + i < height) {
                const row_sources<T> from = sources_of<T>(a, at.row + first + i);
                in[i].x = __ldg((const uint4 *)(from.x + col));
                if (a.is_gated && !of_gate)
                    in[i].gate = __ldg((const uint4 *)(from.x + a.half_cols + col));
                if (Make::IS_GRADIENT) in[i].dy = __ldg((const uint4 *)(from.dy + col));
                weight[i] = from.weight;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const piece_values<T> x = unpack<T>(in[i].x), gate = unpack<T>(in[i].gate);
            const piece_values<T> dy = unpack<T>(in[i].dy);
            piece_values<T> made;
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++)
                made.at[v] = Make::of(a, of_gate, x.at[v], gate.at[v], dy.at[v], weight[i]);
            pack<T>(words[first + i], p, made);
        }
    }
}

/* Element by element, where rows do not begin at multiples of 16 bytes. */
template <typename T, typename Make>
__device__ __forceinline__ float make_element(const tn__cuda_produce_arguments &a, int64_t row,
                                              int64_t col) {
    const row_sources<T> from = sources_of<T>(a, row);
    const bool of_gate = Make::IS_GRADIENT && a.is_gated && col >= a.half_cols;
    if (of_gate) col -= a.half_cols;
    const float x = element<T>::load(from.x, col);
    const float gate = a.is_gated ? element<T>::load(from.x, a.half_cols + col) : 0.0f;
    const float dy = Make::IS_GRADIENT ? element<T>::load(from.dy, col) : 0.0f;
    return Make::of(a, of_gate, x, gate, dy, from.weight);
}

template <typename T, typename Make>
__device__ __forceinline__ void make_patch(const tn__cuda_produce_arguments &a,
                                           const patch_place &at,
                                           uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    if (a.cast.src_vectors) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++)
            make_pieces<T, Make>(a, at, p, words);
        return;
    }
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int w = 0; w < patch_words<T>::COUNT; w++)
            words[i][w] = 0;
    }
#pragma unroll 1
    for (int ij = 0; ij < PATCH * PATCH; ij++) {
        const int i = ij / PATCH, j = ij % PATCH;
        const int64_t row = at.row + i, col = at.tile_first_col + patch_column<T>(at.lane16, j);
        float value = 0.0f;
        if (row < a.cast.rows && col < a.cast.cols) value = make_element<T, Make>(a, row, col);
#pragma unroll
        for (int r = 0; r < PATCH; r++) {
#pragma unroll
            for (int c = 0; c < PATCH; c++)
                if (r == i && c == j) put_element<T>(words[r], c, value);
        }
    }
}

/* Tiles in the order in which blocks run: of a gated gradient a tile of the lower columns, then the
 * one of the upper columns that reads the same. */
__device__ __forceinline__ patch_place place_of_thread(const tn__cuda_produce_arguments &a,
                                                       bool in_pairs) {
    const uint32_t across = a.cast.tiles_across;
    patch_place at = patch_of_thread(across);
    if (!in_pairs) return at;
    at.tile_col = at.tile_col % 2 ? (across + 1) / 2 + at.tile_col / 2 : at.tile_col / 2;
    at.tile_first_col = (int64_t)at.tile_col * TN__TILE;
    return at;
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D, typename Make>
__device__ __forceinline__ void produce(const tn__cuda_produce_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    if (is_skipped(a.skip)) return;
    const patch_place at = place_of_thread(a, Make::IS_GRADIENT && a.is_gated);
    make_patch<T, Make>(a, at, words);
    store_produced<T, F, IS_1D>(a, at, words);
}

/* ---- the kernels of a file ---------------------------------------------------------------- */

/* Registers for two blocks on a multiprocessor: the patch, and what is on its way to it. */
#define PRODUCE_KERNEL(name, T, F, is_1d, make)                                                    \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, 2)                              \
        name(const __grid_constant__ tn__cuda_produce_arguments a) {                               \
        produce<T, F, is_1d, make>(a);                                                             \
    }
#define PRODUCE(name, source, T, format, F, make)                                                  \
    PRODUCE_KERNEL(name##_1d_##source##_##format, T, F, true, make)                                \
    PRODUCE_KERNEL(name##_2d_##source##_##format, T, F, false, make)
#define PRODUCE_ALL(name, make)                                                                    \
    PRODUCE(name, fp32, float, e4m3, __NV_E4M3, make)                                              \
    PRODUCE(name, fp32, float, e5m2, __NV_E5M2, make)                                              \
    PRODUCE(name, bf16, __nv_bfloat16, e4m3, __NV_E4M3, make)                                      \
    PRODUCE(name, bf16, __nv_bfloat16, e5m2, __NV_E5M2, make)                                      \
    PRODUCE(name, fp16, __half, e4m3, __NV_E4M3, make)                                             \
    PRODUCE(name, fp16, __half, e5m2, __NV_E5M2, make)

#endif
