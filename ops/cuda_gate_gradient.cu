/* Kernels of the gradients of gated activations: see cuda_activation.cuh. */
#include "cuda_activation.cuh"

template <typename T> struct differentiate_gated {
    enum { IS_GRADIENT = 1, IS_GATED = 1, IS_WIDE = sizeof(T) == 4 };
    enum { AT_ONCE = 2, BLOCKS = TN__PRODUCE_BLOCKS, LESS_IN_2D = IS_WIDE };
    static __device__ __forceinline__ piece_values<T> of(const inputs<T> &in, const points<T> &at,
                                                         bool of_gate) {
        if (of_gate) return product_of<T>(at.value, in.dy);
        return product_of<T>(product_of<T>(at.slope, in.dy), in.gate);
    }
};

/* ---- both halves at once ------------------------------------------------------------------- */

/* The same patch of both halves: dx of x into `words`, dx of the gate into `gate_words`. */
template <typename T, int CLASS, bool IS_WEIGHTED>
__device__ __forceinline__ void make_pair(const tn__cuda_produce_arguments &a,
                                          const patch_place &at,
                                          uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                          uint32_t (&gate_words)[PATCH][patch_words<T>::COUNT]) {
    typedef differentiate_gated<T> make;
    const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, 0);
    const int height = patch_rows_in(a.cast.rows, at);
    const T *x = (const T *)a.cast.src + at.row * 2 * a.half_cols + col;
    const T *dy = (const T *)a.dy + at.row * a.half_cols + col;
    uint4 x_pieces[PATCH], gate_pieces[PATCH], dy_pieces[PATCH];
    load_rows<T>(x_pieces, x, 2 * a.half_cols, height);
    load_rows<T>(gate_pieces, x + a.half_cols, 2 * a.half_cols, height);
    load_rows<T>(dy_pieces, dy, a.half_cols, height);
    start_tile<T, CLASS>(a);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        inputs<T> in = {unpack<T>(x_pieces[i]), unpack<T>(gate_pieces[i]), unpack<T>(dy_pieces[i])};
        if (IS_WEIGHTED) weigh<T>(in.dy, true, weight_of(a, at.row + i, i < height));
        const points<T> point = points_of<T, CLASS>(a.curve, x_pieces[i], in.x);
        pack<T>(words[i], 0, make::of(in, point, false));
        pack<T>(gate_words[i], 0, make::of(in, point, true));
        row_stay_packed<T>(words[i]);
        row_stay_packed<T>(gate_words[i]);
    }
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void produce_pairs(const tn__cuda_produce_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT], gate_words[PATCH][patch_words<T>::COUNT];
    const uint32_t across = a.cast.tiles_across / 2;
    if (is_skipped(a.skip)) return;
    /* The place is found anew after the values: there are no registers to keep it in. */
    patch_place at = patch_of_thread(across);
    if (a.curve.kind == TN__CURVE_RELU && !a.weights)
        make_pair<T, OF_RELU, false>(a, at, words, gate_words);
    else if (a.curve.kind != TN__CURVE_SIGMOID)
        make_pair<T, OF_CORNER, true>(a, at, words, gate_words);
    else if (a.weights)
        make_pair<T, OF_SIGMOID, true>(a, at, words, gate_words);
    else
        make_pair<T, OF_SIGMOID, false>(a, at, words, gate_words);
    at = patch_of_thread(across);
#pragma unroll 1
    for (int half = 0;; half++) {
        store_produced<T, F, IS_1D>(a, at, words);
        if (half) break;
        __syncthreads();
        at = patch_in_tile(at.tile_row, at.tile_col + across);
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
#pragma unroll
            for (int w = 0; w < patch_words<T>::COUNT; w++)
                words[i][w] = gate_words[i][w];
        }
    }
}

#define PRODUCE_PAIRS_KERNEL(name, T, F, is_1d)                                                    \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, TN__PRODUCE_BLOCKS)             \
        name(const __grid_constant__ tn__cuda_produce_arguments a) {                               \
        produce_pairs<T, F, is_1d>(a);                                                             \
    }
#define PRODUCE_PAIRS(source, T)                                                                   \
    PRODUCE_PAIRS_KERNEL(differentiate_pairs_1d_##source##_e4m3, T, __NV_E4M3, true)               \
    PRODUCE_PAIRS_KERNEL(differentiate_pairs_1d_##source##_e5m2, T, __NV_E5M2, true)               \
    PRODUCE_PAIRS_KERNEL(differentiate_pairs_2d_##source##_e4m3, T, __NV_E4M3, false)              \
    PRODUCE_PAIRS_KERNEL(differentiate_pairs_2d_##source##_e5m2, T, __NV_E5M2, false)

PRODUCE_ALL(differentiate_gated)
PRODUCE_PAIRS(bf16, __nv_bfloat16)
