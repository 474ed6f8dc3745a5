/* Kernels of the norms' gradients for planes: the two means of a band's rows, and then its tiles:
 * dx with its casts and what the columns of dgamma and dbeta add up to in each, in one launch
 * (cuda_norm_held.cuh). Rows are whole groups of 8 columns at their addresses.
 *
 * Bytes that must move for each element of s bytes: 2 s to read x and dy, s for what is added, s
 * for dx and 1 for each plane.
 */
#include "cuda_norm_held.cuh"
#include "cuda_train_arguments.h"

/* ---- a thread's columns --------------------------------------------------------------------- */

/* gamma, or 1 + gamma, of COUNT neighbours, of which `left` are in the row; 0 or 1 beyond it. */
template <int COUNT>
__device__ __forceinline__ void load_gamma(float (&gamma)[COUNT],
                                           const tn__cuda_norm_gradient_arguments &a, int64_t col,
                                           int left) {
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        gamma[j] = 1.0f;
    if (!a.gamma) return;
    load_floats<COUNT, true>(gamma, a.gamma_dtype, a.gamma, col, left);
#pragma unroll
    for (int j = 0; j < COUNT; j++) /* -0 + 0 is not -0 */
        if (a.gamma_base != 0.0f) gamma[j] = __fadd_rn(gamma[j], a.gamma_base);
}

template <typename T>
__device__ __forceinline__ void gammas_of_patch(float (&gamma)[PATCH],
                                                const tn__cuda_norm_gradient_arguments &a,
                                                const patch_place &at) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, 4 * half);
        float four[4];
        load_gamma<4>(four, a, col, (int)min(a.of.cast.cols - col, (int64_t)4));
#pragma unroll
        for (int j = 0; j < 4; j++)
            gamma[4 * half + j] = four[j];
    }
}

/* Half of the patch's columns, in one of its rows. */
template <typename T>
__device__ __forceinline__ void slot_four(float (&value)[4], uint4 *slot, int i, int half) {
    if constexpr (sizeof(T) == 2) {
        const uint2 four = ((const uint2 *)slot_of<T>::piece(slot, i, 0))[half];
        const uint32_t words[2] = {four.x, four.y};
#pragma unroll
        for (int j = 0; j < 4; j++)
            value[j] = element<T>::value(words, j);
    } else {
        const uint4 four = *slot_of<T>::piece(slot, i, half);
        value[0] = __uint_as_float(four.x), value[1] = __uint_as_float(four.y);
        value[2] = __uint_as_float(four.z), value[3] = __uint_as_float(four.w);
    }
}

/* ---- parts ---------------------------------------------------------------------------------- */

/* Of the row lane16 / 2 of the half warp; 0 beyond the matrix. */
__device__ __forceinline__ row_statistics own_statistics(const tn__cuda_norm_gradient_arguments &a,
                                                         const patch_place &at) {
    const int64_t row = at.row + at.lane16 / 2;
    row_statistics of = {0.0f, 0.0f};
    if (row >= a.of.cast.rows) return of;
    if (a.mean) of.mean = __ldg(a.mean + row);
    of.rstd = __ldg(a.rstd + row);
    return of;
}

/* What the patch's rows give to tilt and shift, of row lane16 / 2. */
struct mean_parts {
    float tilt, shift;
};

template <typename T, bool IS_LAYER>
__device__ __forceinline__ mean_parts parts_of_rows(uint4 *x_slot, uint4 *dy_slot,
                                                    const tn__cuda_norm_gradient_arguments &a,
                                                    const patch_place &at,
                                                    const row_statistics &own) {
    enum { VECTOR = element<T>::VECTOR };
    const int left = (int)min(a.of.cast.cols - at.tile_first_col, (int64_t)TN__TILE);
    const bool is_low_in = patch_column<T>(at.lane16, 0) < left;
    const bool is_high_in = patch_column<T>(at.lane16, PATCH - VECTOR) < left;
    float gamma[PATCH], tilt[PATCH], shift[PATCH];
    gammas_of_patch<T>(gamma, a, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        uint32_t words[patch_words<T>::COUNT];
        float x[PATCH], dy[PATCH];
        const float rstd = __shfl_sync(0xFFFFFFFFu, own.rstd, 2 * i, 16);
        const float mean = IS_LAYER ? __shfl_sync(0xFFFFFFFFu, own.mean, 2 * i, 16) : 0.0f;
        slot_row<T>(words, x_slot, i);
        unpack_words<T>(x, words);
        slot_row<T>(words, dy_slot, i);
        unpack_words<T>(dy, words);
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            x[j] = __fmul_rn(IS_LAYER ? __fsub_rn(x[j], mean) : x[j], rstd);
            dy[j] = __fmul_rn(dy[j], gamma[j]);
        }
        tilt[i] = products_of_lane<T>(dy, x, is_low_in, is_high_in);
        shift[i] = IS_LAYER ? sum_of_lane<T>(dy) : 0.0f;
    }
    mean_parts of = {sums_of_half_warp<T, PATCH>(tilt, at.lane16), 0.0f};
    if (IS_LAYER) of.shift = sums_of_half_warp<T, PATCH>(shift, at.lane16);
    return of;
}

/* Means of the warp's rows, all parts of which are given. */
__device__ __forceinline__ void means_of_band(const tn__cuda_norm_gradient_arguments &a,
                                              uint32_t band) {
    const int lane = (int)threadIdx.x % 32;
    const uint32_t across = a.of.cast.tiles_across;
    const int64_t row = (int64_t)band * TN__TILE + threadIdx.x / 32 * WARP_ROWS + lane % WARP_ROWS;
    const float count = (float)a.of.cast.cols;
    const bool is_in = lane < WARP_ROWS && row < a.of.cast.rows;
    const float *const parts =
        part_of_rows(a.held, band * across, 0, a.shift ? 2 : 1) + lane % WARP_ROWS;
    if (a.shift) {
        const float shift = total_of_tiles<2>(parts, across, 1);
        const float tilt = total_of_tiles<2>(parts, across, 0);
        if (is_in) row_number_put(a.shift, row, __fdiv_rn(shift, count));
        if (is_in) row_number_put(a.tilt, row, __fdiv_rn(tilt, count));
    } else {
        const float tilt = total_of_tiles<1>(parts, across, 0);
        if (is_in) row_number_put(a.tilt, row, __fdiv_rn(tilt, count));
    }
}

/* The parts of a tile whose pieces are on their way. */
template <typename T>
__device__ __forceinline__ void give_tile(const tn__cuda_norm_gradient_arguments &a, uint4 *x_slot,
                                          uint4 *dy_slot, const held_turn &turn) {
    const patch_place at = turn.place();
    const row_statistics own = own_statistics(a, at);
    fetches_wait<0>();
    if (a.shift) {
        const mean_parts of = parts_of_rows<T, true>(x_slot, dy_slot, a, at, own);
        part_put(part_of_rows(a.held, turn.tile, 0, 2), of.tilt);
        part_put(part_of_rows(a.held, turn.tile, 1, 2), of.shift);
    } else {
        const mean_parts of = parts_of_rows<T, false>(x_slot, dy_slot, a, at, own);
        part_put(part_of_rows(a.held, turn.tile, 0, 1), of.tilt);
    }
    if (parts_are_all_given(a.held, at.tile_row, a.of.cast.tiles_across))
        means_of_band(a, at.tile_row);
}

/* ---- dx ------------------------------------------------------------------------------------- */

/* What is known of a tile's rows. */
struct tile_means {
    float mean[TN__TILE], rstd[TN__TILE], tilt[TN__TILE], shift[TN__TILE];
};

/* Of row i of the patch, half of its columns. */
template <typename T>
__device__ __forceinline__ void added_four(float (&value)[4],
                                           const tn__cuda_norm_gradient_arguments &a,
                                           const patch_place &at, int i, int half) {
    const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, 4 * half);
    const int64_t row = at.row + i;
    const int left = row < a.of.cast.rows && col < a.of.cast.cols ? 4 : 0;
    load_floats_of<T, 4, true>(value, a.added, row * a.of.cast.cols + col, left);
}

template <typename T>
__device__ __forceinline__ void slot_four_put(uint4 *slot, int i, int half,
                                              const float (&value)[4]) {
    float canonical[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        canonical[j] = canonical_of<T>(value[j]);
    if constexpr (sizeof(T) == 2)
        ((uint2 *)slot_of<T>::piece(slot, i, 0))[half] =
            make_uint2(element<T>::word(canonical, 0), element<T>::word(canonical, 1));
    else
        *slot_of<T>::piece(slot, i, half) =
            make_uint4(element<T>::word(canonical, 0), element<T>::word(canonical, 1),
                       element<T>::word(canonical, 2), element<T>::word(canonical, 3));
}

/* dx in the place of x, and the sums of its columns. One half of the columns after the other, or
 * registers run out. */
template <typename T, bool IS_LAYER>
__device__ __forceinline__ void
make_patch(uint4 *x_slot, uint4 *dy_slot, const tn__cuda_norm_gradient_arguments &a,
           const patch_place &at, const float (&gamma)[PATCH], const tile_means &rows,
           float (&gamma_sum)[PATCH], float (&beta_sum)[PATCH]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            gamma_sum[4 * half + j] = beta_sum[4 * half + j] = 0.0f;
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            const int row = at.unit * PATCH + i;
            const float rstd = rows.rstd[row], tilt = rows.tilt[row];
            float x[4], dy[4], dx[4], added[4];
            slot_four<T>(x, x_slot, i, half);
            slot_four<T>(dy, dy_slot, i, half);
            if (a.added) added_four<T>(added, a, at, i, half);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float normal =
                    __fmul_rn(IS_LAYER ? __fsub_rn(x[j], rows.mean[row]) : x[j], rstd);
                float g = __fmul_rn(dy[j], gamma[4 * half + j]);
                if (IS_LAYER) g = __fsub_rn(g, rows.shift[row]);
                dx[j] = __fmul_rn(__fmaf_rn(-normal, tilt, g), rstd);
                if (a.added) dx[j] = __fadd_rn(dx[j], added[j]);
                gamma_sum[4 * half + j] = __fmaf_rn(dy[j], normal, gamma_sum[4 * half + j]);
                if (IS_LAYER) beta_sum[4 * half + j] = __fadd_rn(beta_sum[4 * half + j], dy[j]);
            }
            slot_four_put<T>(x_slot, i, half, dx);
        }
    }
}

/* All threads; a barrier follows. */
__device__ __forceinline__ void
means_get(tile_means &rows, const tn__cuda_norm_gradient_arguments &a, int64_t tile_first_row) {
    const int thread = (int)thread_of_block();
    const int64_t row = tile_first_row + thread, count = a.of.cast.rows;
    if (thread < TN__TILE) {
        rows.rstd[thread] = row < count ? __ldg(a.rstd + row) : 0.0f;
        rows.mean[thread] = row < count && a.mean ? __ldg(a.mean + row) : 0.0f;
    }
    row_numbers_get(rows.tilt, a.tilt, count, tile_first_row);
    row_numbers_get(rows.shift, a.shift, count, tile_first_row);
}

/* ---- a block's turns ------------------------------------------------------------------------ */

/* The two tiles that a block holds. */
template <typename T> struct held_pair {
    static_assert(2 * sizeof(uint4) * slot_of<T>::PIECES == TN__HELD_BYTES, "one pair");
    uint4 *x;
    uint32_t tiles;

    __device__ __forceinline__ uint4 *dy() const { return x + slot_of<T>::PIECES; }
};

/* The upper half of x's tile comes last: until then the transposed tile is there. */
template <typename T>
__device__ __forceinline__ void fetch_first(const tn__cuda_norm_gradient_arguments &a,
                                            const held_pair<T> &pair, const held_turn &turn) {
    const tn__cuda_quantize_arguments &cast = a.of.cast;
    if (turn.tile >= pair.tiles) return;
    const patch_place at = turn.place();
    fetch_patch<T, 0, PATCH>(pair.dy(), a.of.dy, cast.rows, cast.cols, at);
    fetch_patch<T, 0, PATCH / 2>(pair.x, cast.src, cast.rows, cast.cols, at);
}

template <typename T>
__device__ __forceinline__ void fetch_last(const tn__cuda_norm_gradient_arguments &a,
                                           const held_pair<T> &pair, const held_turn &turn) {
    const tn__cuda_quantize_arguments &cast = a.of.cast;
    if (turn.tile < pair.tiles)
        fetch_patch<T, PATCH / 2, PATCH>(pair.x, cast.src, cast.rows, cast.cols, turn.place());
    fetches_end();
}

/* The patches of dx; the slots are free then for the tile that is taken, the next one, of a later
 * band. The sums of the columns are written. */
template <typename T>
__device__ __forceinline__ void
hold_dx(uint32_t (&words)[PATCH][patch_words<T>::COUNT], const tn__cuda_norm_gradient_arguments &a,
        const held_pair<T> &pair, const held_turn &turn, held_turn *next) {
    __shared__ tile_means rows;
    const patch_place at = turn.place();
    float gamma[PATCH], gamma_sum[PATCH], beta_sum[PATCH];
    uint32_t taken = 0;
    gammas_of_patch<T>(gamma, a, at);
    means_get(rows, a, at.tile_first_row);
    if (thread_of_block() == 0) taken = (uint32_t)atomicAdd(a.held.turn, 1);
    __syncthreads();
    if (a.shift)
        make_patch<T, true>(pair.x, pair.dy(), a, at, gamma, rows, gamma_sum, beta_sum);
    else
        make_patch<T, false>(pair.x, pair.dy(), a, at, gamma, rows, gamma_sum, beta_sum);
    if (a.gamma_sums) store_lane_sums<T>(a.gamma_sums, a.of.cast, at, gamma_sum);
    if (a.beta_sums) {
        __syncthreads(); /* both sums go by the same shared memory */
        store_lane_sums<T>(a.beta_sums, a.of.cast, at, beta_sum);
    }
    if (thread_of_block() == 0) *next = turn_of(taken, a.of.cast.tiles_across);
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        slot_row<T>(words[i], pair.x, i);
    clear_patch_beyond<T>(words, a.of.cast.rows, a.of.cast.cols, at);
    patch_stay_packed<T>(words);
    __syncthreads();
}

/* The tile; the next one is on its way then. */
template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void make_tile(const tn__cuda_norm_gradient_arguments &a,
                                          const held_pair<T> &pair, const held_turn &turn,
                                          held_turn *next) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    hold_dx<T>(words, a, pair, turn, next);
    fetch_first<T>(a, pair, *next);
    const patch_place at = turn.place();
    if (a.of.value) store_patch<T>(a.of.value, a.of.cast, at, words);
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, true, true>(a.of.cast, at, words, slot_of<T>::upper(pair.x));
    else
        quantize_patches_2d<T, F, true, true>(a.of.cast, at, words, slot_of<T>::upper(pair.x));
    __syncthreads();
    fetch_last<T>(a, pair, *next);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_gradient_held(const tn__cuda_norm_gradient_arguments &a) {
    DYNAMIC_SHARED(shared, TN__HELD_BYTES);
    __shared__ held_turn turns[2];
    if (is_skipped(a.of.skip)) return;
    const uint32_t across = a.of.cast.tiles_across;
    const held_pair<T> pair = {(uint4 *)shared,
                               (uint32_t)((a.of.cast.rows + TN__TILE - 1) / TN__TILE) * across};
    if (thread_of_block() == 0) turns[0] = turn_of((uint32_t)atomicAdd(a.held.turn, 1), across);
    __syncthreads();
    fetch_first<T>(a, pair, turns[0]);
    fetch_last<T>(a, pair, turns[0]);
#pragma unroll 1
    for (int own = 0; turns[own].tile < pair.tiles; own ^= 1) {
        give_tile<T>(a, pair.x, pair.dy(), turns[own]);
        make_tile<T, F, IS_1D>(a, pair, turns[own], turns + (own ^ 1));
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define KERNEL(name, T, F, is_1d)                                                                  \
    extern "C" __global__ void __launch_bounds__(TN__TILE_THREADS, 3)                              \
        name(const __grid_constant__ tn__cuda_norm_gradient_arguments a) {                         \
        norm_gradient_held<T, F, is_1d>(a);                                                        \
    }
#define NORM_GRADIENT(source, T)                                                                   \
    KERNEL(norm_gradient_held_1d_##source##_e4m3, T, __NV_E4M3, true)                              \
    KERNEL(norm_gradient_held_1d_##source##_e5m2, T, __NV_E5M2, true)                              \
    KERNEL(norm_gradient_held_2d_##source##_e4m3, T, __NV_E4M3, false)                             \
    KERNEL(norm_gradient_held_2d_##source##_e5m2, T, __NV_E5M2, false)

NORM_GRADIENT(bf16, __nv_bfloat16)
NORM_GRADIENT(fp16, __half)
