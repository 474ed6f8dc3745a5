/* How the kernels of activations and of their gradients make the values of a tile.
 *
 * A block of threads makes one 128 x 128 tile, reads what that takes once, and writes the value,
 * the planes and the sums of the columns from registers. Bytes that must move for each element of y
 * with elements of s bytes, all outputs wanted, next to 1/32 for each plane's scales:
 *
 *     activation   2 s + 2               gated  3 s + 2
 *     gradient     3 s + 2               gated  5 s + 4
 *
 * A GPU has some 8 instructions for each byte, which is less than a sigmoid takes: of bf16 it is
 * looked up in shared memory, in a table that each block makes for itself while its tile is on its
 * way. Blocks that make several tiles make fewer tables, but are slower by 1 to 4 %.
 *
 * A gated gradient of bf16 whose halves are whole tiles makes two tiles at a time, one
 * of each half, from one read of dy, x and gate (`make_pair`). Otherwise the tiles of both halves
 * are numbered so that they run one behind the other, and the second reads from the L2 cache.
 */
#ifndef TENURE_CUDA_ACTIVATION_CUH
#define TENURE_CUDA_ACTIVATION_CUH

#include "cuda_produce.cuh"

/* ---- sigmoids ------------------------------------------------------------------------------ */

/* Those of the pieces' elements: computed, or looked up by the words that hold bf16. */
template <typename T> struct sigmoids {
    enum { HAS_TABLE = 0 };
    static __device__ __forceinline__ void prepare(tn__curve) {}
    static __device__ __forceinline__ piece_values<T> of(tn__curve curve, uint4,
                                                         const piece_values<T> &x) {
        piece_values<T> s;
#pragma unroll
        for (int v = 0; v < element<T>::VECTOR; v++)
            s.at[v] = tn__exact_sigmoid(tn__curve_argument(curve, x.at[v]));
        return s;
    }
};

/* Of both halves the bits of |x| less `first`, but at least 0 and at most `most`. */
__device__ __forceinline__ uint32_t bounded_places(uint32_t pair, uint32_t first, uint32_t most) {
    pair &= 0x7FFF7FFFu;
#ifdef __CUDA_ARCH__
    return __viaddmin_s16x2_relu(pair, (0x10000u - first) * 0x10001u, most * 0x10001u);
#else
    const uint32_t low = min(max(pair & 0xFFFFu, first) - first, most);
    return low | min(max(pair >> 16, first) - first, most) << 16;
#endif
}

template <> struct sigmoids<__nv_bfloat16> {
    enum { HAS_TABLE = 1 };
    /* Of each size that of the positive number and that of the negative one. */
    static __device__ __forceinline__ float *table() {
        __shared__ float of_bits[2 * TN__SIGMOID_COUNT];
        return of_bits;
    }
    static __device__ __forceinline__ void prepare(tn__curve curve) {
        float *to = table();
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < TN__SIGMOID_COUNT; i += TN__TILE_THREADS) {
            const tn__sigmoid_pair both =
                tn__exact_sigmoids(tn__curve_argument(curve, tn__sigmoid_entry(i)));
            to[2 * i] = both.of_x;
            to[2 * i + 1] = both.of_minus_x;
        }
    }
    static __device__ __forceinline__ piece_values<__nv_bfloat16>
    of(tn__curve, uint4 piece, const piece_values<__nv_bfloat16> &) {
        const char *from = (const char *)table();
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        piece_values<__nv_bfloat16> s;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint32_t bytes = /* from the table's begin on: they fit in 16 bits */
                bounded_places(words[w], TN__SIGMOID_FIRST, TN__SIGMOID_COUNT - 1) * 8 |
                (words[w] >> 13 & 0x40004u);
            s.at[2 * w] = *(const float *)(from + (bytes & 0xFFFFu));
            s.at[2 * w + 1] = *(const float *)(from + (bytes >> 16));
        }
        return s;
    }
};

/* ---- values -------------------------------------------------------------------------------- */

/* OF_RELU: of ReLU itself, of rows without weights. */
enum curve_class { OF_SIGMOID, OF_RELU, OF_CORNER };

/* What is loaded for VECTOR neighbours of one row, and the weight of the row. */
template <typename T> struct inputs { piece_values<T> x, gate, dy; };

template <typename T> struct points { piece_values<T> value, slope; };

template <typename T, int CLASS>
__device__ __forceinline__ points<T> points_of(tn__curve curve, uint4 piece,
                                               const piece_values<T> &x) {
    points<T> at;
    piece_values<T> s;
    if (CLASS == OF_SIGMOID) s = sigmoids<T>::of(curve, piece, x);
    if (CLASS == OF_RELU) curve.kind = TN__CURVE_RELU;
#pragma unroll
    for (int v = 0; v < element<T>::VECTOR; v++) {
        const tn__curve_point point = CLASS == OF_SIGMOID
                                          ? tn__sigmoid_point(curve, x.at[v], s.at[v])
                                          : tn__corner_point(curve.kind, x.at[v]);
        at.value.at[v] = point.value, at.slope.at[v] = point.slope;
    }
    return at;
}

template <typename T>
__device__ __forceinline__ piece_values<T> product_of(piece_values<T> values,
                                                      const piece_values<T> &by) {
#pragma unroll
    for (int v = 0; v < element<T>::VECTOR; v++)
        values.at[v] = __fmul_rn(values.at[v], by.at[v]);
    return values;
}

/* By the row's weight, if rows have weights. */
template <typename T>
__device__ __forceinline__ void weigh(piece_values<T> &values, bool is_weighted, float weight) {
    if (!is_weighted) return;
#pragma unroll
    for (int v = 0; v < element<T>::VECTOR; v++)
        values.at[v] = __fmul_rn(values.at[v], weight);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* After all that is read is asked for: makes the table, if one is looked up in. As if that depended
 * on something, or what begins with the pieces would be placed before it, and wait for them. */
template <typename T, int CLASS>
__device__ __forceinline__ void start_tile(const tn__cuda_produce_arguments &a) {
    if (CLASS != OF_SIGMOID || !sigmoids<T>::HAS_TABLE) return;
    if (a.cast.tiles_across > 0) sigmoids<T>::prepare(a.curve);
    __syncthreads();
}

/* ROWS rows of VECTOR neighbours each, of which `height` are in the matrix; zeros beyond. */
template <typename T, int ROWS>
__device__ __forceinline__ void load_rows(uint4 (&pieces)[ROWS], const T *from, int64_t stride,
                                          int height) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        pieces[i] = make_uint4(0, 0, 0, 0);
        if (i < height) pieces[i] = __ldg((const uint4 *)from);
        from += stride;
    }
}

__device__ __forceinline__ float weight_of(const tn__cuda_produce_arguments &a, int64_t row,
                                           bool is_in) {
    return a.weights && is_in ? __ldg(a.weights + row) : 1.0f;
}

/* The values of VECTOR neighbours of a row from what was loaded for them; `piece` is x.
 *
 * Make::of(inputs, points, of_gate) is the formula; IS_GRADIENT and IS_GATED say what it reads, and
 * it is that of the gate's gradient where `of_gate`. */
template <typename T, typename Make, int CLASS>
__device__ __forceinline__ piece_values<T> made_of(const tn__cuda_produce_arguments &a,
                                                   inputs<T> &in, uint4 piece, bool is_weighted,
                                                   float weight, bool of_gate) {
    if (Make::IS_GRADIENT) weigh<T>(in.dy, is_weighted, weight);
    piece_values<T> made = Make::of(in, points_of<T, CLASS>(a.curve, piece, in.x), of_gate);
    if (!Make::IS_GRADIENT) weigh<T>(made, is_weighted, weight);
    return made;
}

/* One piece of the patch, for all its rows, AT_ONCE of them read before the first is made. */
template <typename T, typename Make, int CLASS, bool IS_WEIGHTED>
__device__ __forceinline__ void make_pieces(const tn__cuda_produce_arguments &a,
                                            const patch_place &at, int p,
                                            uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    enum { AT_ONCE = Make::AT_ONCE, SYNC_EACH = 2 };
    int64_t col = at.tile_first_col + patch_column<T>(at.lane16, p * element<T>::VECTOR);
    const int height = col < a.cast.cols ? patch_rows_in(a.cast.rows, at) : 0;
    const bool of_gate = Make::IS_GRADIENT && Make::IS_GATED && col >= a.half_cols;
    if (of_gate) col -= a.half_cols;
    const int64_t stride = Make::IS_GATED ? 2 * a.half_cols : a.half_cols;
    const T *x = (const T *)a.cast.src + at.row * stride + col;
    const T *dy = (const T *)a.dy + at.row * a.half_cols + col;
#pragma unroll
    for (int first = 0; first < PATCH; first += AT_ONCE) {
        uint4 x_pieces[AT_ONCE], gate_pieces[AT_ONCE], dy_pieces[AT_ONCE];
        if (sizeof(T) == 4) x = address_anew(x); /* there are no registers to read more in */
        load_rows<T>(x_pieces, x + first * stride, stride, height - first);
        if (Make::IS_GATED)
            load_rows<T>(gate_pieces, x + first * stride + a.half_cols, stride,
                         of_gate ? 0 : height - first);
        if (Make::IS_GRADIENT)
            load_rows<T>(dy_pieces, dy + first * a.half_cols, a.half_cols, height - first);
        if (first == 0 && p == 0) start_tile<T, CLASS>(a);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            inputs<T> in;
            in.x = unpack<T>(x_pieces[i]);
            if (Make::IS_GATED) in.gate = unpack<T>(gate_pieces[i]);
            if (Make::IS_GRADIENT) in.dy = unpack<T>(dy_pieces[i]);
            const float weight =
                IS_WEIGHTED && first + i < height ? __ldg(a.weights + at.row + (first + i)) : 1.0f;
            pack<T>(words[first + i], p,
                    made_of<T, Make, CLASS>(a, in, x_pieces[i], IS_WEIGHTED, weight, of_gate));
            row_stay_packed<T>(words[first + i]);
            if (i % SYNC_EACH == SYNC_EACH - 1) __syncwarp(); /* rows are not mixed: registers */
        }
    }
}

/* ---- tiles --------------------------------------------------------------------------------- */

/* Element by element, where rows do not begin at multiples of 16 bytes: as a piece of which one
 * element counts. */
template <typename T, typename Make, int CLASS>
__device__ __forceinline__ float make_element(const tn__cuda_produce_arguments &a, int64_t row,
                                              int64_t col) {
    const bool of_gate = Make::IS_GRADIENT && Make::IS_GATED && col >= a.half_cols;
    if (of_gate) col -= a.half_cols;
    const int64_t stride = Make::IS_GATED ? 2 * a.half_cols : a.half_cols;
    const T *from = (const T *)a.cast.src + row * stride;
    uint32_t word[patch_words<T>::COUNT] = {0};
    inputs<T> in;
    put_element<T>(word, 0, element<T>::load(from, col));
    const uint4 piece = make_uint4(word[0], 0, 0, 0);
    in.x = in.gate = in.dy = unpack<T>(piece);
    if (Make::IS_GATED) in.gate.at[0] = element<T>::load(from, a.half_cols + col);
    if (Make::IS_GRADIENT) in.dy.at[0] = element<T>::load((const T *)a.dy + row * a.half_cols, col);
    return made_of<T, Make, CLASS>(a, in, piece, a.weights, weight_of(a, row, true), of_gate).at[0];
}

template <typename T, typename Make, int CLASS>
__device__ __forceinline__ void make_patch(const tn__cuda_produce_arguments &a,
                                           const patch_place &at,
                                           uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    if (a.cast.src_vectors) {
#pragma unroll
        for (int p = 0; p < patch_words<T>::PIECES; p++) {
            if (CLASS != OF_RELU && a.weights)
                make_pieces<T, Make, CLASS, true>(a, at, p, words);
            else
                make_pieces<T, Make, CLASS, false>(a, at, p, words);
        }
        return;
    }
    start_tile<T, CLASS>(a);
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
        if (row < a.cast.rows && col < a.cast.cols)
            value = make_element<T, Make, CLASS>(a, row, col);
#pragma unroll
        for (int r = 0; r < PATCH; r++) {
#pragma unroll
            for (int c = 0; c < PATCH; c++)
                if (r == i && c == j) put_element<T>(words[r], c, value);
        }
    }
}

/* Of the block's tile. Those of a gated gradient are in turns one of the lower columns and the one
 * of the upper columns that reads the same. */
__device__ __forceinline__ patch_place place_of_block(const tn__cuda_produce_arguments &a,
                                                      bool in_turns) {
    const uint32_t across = a.cast.tiles_across, row = blockIdx.x / across;
    const uint32_t col = blockIdx.x - row * across;
    if (!in_turns) return patch_in_tile(row, col);
    return patch_in_tile(row, col % 2 ? (across + 1) / 2 + col / 2 : col / 2);
}

/* A tile into the patches of the block's threads. */
template <typename T, typename Make>
__device__ __forceinline__ void make_tile(const tn__cuda_produce_arguments &a,
                                          const patch_place &at,
                                          uint32_t (&words)[PATCH][patch_words<T>::COUNT]) {
    const bool is_copy = !Make::IS_GRADIENT && !Make::IS_GATED && !a.weights && !a.value;
    if (a.curve.kind == TN__CURVE_SIGMOID) {
        make_patch<T, Make, OF_SIGMOID>(a, at, words);
    } else if (a.curve.kind == TN__CURVE_RELU && !a.weights) {
        make_patch<T, Make, OF_RELU>(a, at, words);
    } else if (is_copy && a.curve.kind == TN__CURVE_IDENTITY) {
        patch_load<T>(words, a.cast.src, a.cast.rows, a.cast.cols, a.cast.src_vectors, at);
    } else {
        make_patch<T, Make, OF_CORNER>(a, at, words);
    }
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D, typename Make>
__device__ __forceinline__ void produce(const tn__cuda_produce_arguments &a) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    if (is_skipped(a.skip)) return;
    const patch_place at = place_of_block(a, Make::IS_GRADIENT && Make::IS_GATED);
    make_tile<T, Make>(a, at, words);
    store_produced<T, F, IS_1D>(a, at, words);
}

/* ---- the kernels of a file ---------------------------------------------------------------- */

#define PRODUCE_KERNEL(name, T, F, is_1d, make)                                                    \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS,                                 \
                                                 make<T>::BLOCKS - !is_1d * make<T>::LESS_IN_2D)   \
        name(const __grid_constant__ tn__cuda_produce_arguments a) {                               \
        produce<T, F, is_1d, make<T>>(a);                                                          \
    }
#define PRODUCE(name, source, T, format, F)                                                        \
    PRODUCE_KERNEL(name##_1d_##source##_##format, T, F, true, name)                                \
    PRODUCE_KERNEL(name##_2d_##source##_##format, T, F, false, name)
#define PRODUCE_ALL(name)                                                                          \
    PRODUCE(name, fp32, float, e4m3, __NV_E4M3)                                                    \
    PRODUCE(name, fp32, float, e5m2, __NV_E5M2)                                                    \
    PRODUCE(name, bf16, __nv_bfloat16, e4m3, __NV_E4M3)                                            \
    PRODUCE(name, bf16, __nv_bfloat16, e5m2, __NV_E5M2)                                            \
    PRODUCE(name, fp16, __half, e4m3, __NV_E4M3)                                                   \
    PRODUCE(name, fp16, __half, e5m2, __NV_E5M2)

#endif
