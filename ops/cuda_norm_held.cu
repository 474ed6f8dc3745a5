/* Kernels of RMS norms for planes whose blocks are of 128 rows beside a value or a sum: statistics
 * of rows and then tiles, in one launch and from one read (cuda_norm_held.cuh). Rows are whole
 * groups of 8 columns at their addresses.
 *
 * Bytes that must move for each element of s bytes: s to read x (with a residual 3 s: x, the
 * residual, their sum), s for the value and 1 for each plane.
 */
#include "cuda_norm_held.cuh"

/* ---- parts ---------------------------------------------------------------------------------- */

/* x + residual, rounded, to the slot in the place of x, and to memory. */
template <typename T>
__device__ __forceinline__ void add_residual(uint4 *slot, const tn__cuda_norm_arguments &a,
                                             const patch_place &at) {
    const int64_t cols = a.cast.cols;
    const int rows_in = patch_rows_in(a.cast.rows, at);
#pragma unroll
    for (int p = 0; p < patch_words<T>::PIECES; p++) {
        const int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
        const int height = at.tile_first_col + column < cols ? rows_in : 0;
        const int64_t first = at.row * cols + at.tile_first_col + column;
        uint4 residual[PATCH];
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            residual[i] = make_uint4(0, 0, 0, 0);
            if (i < height)
                residual[i] = *(const uint4 *)((const T *)a.residual + first + i * cols);
        }
#pragma unroll
        for (int i = 0; i < PATCH; i++) {
            uint4 *const piece = slot_of<T>::piece(slot, i, p);
            const piece_values<T> x = unpack<T>(*piece), other = unpack<T>(residual[i]);
            piece_values<T> sum;
            uint32_t words[4];
#pragma unroll
            for (int v = 0; v < element<T>::VECTOR; v++)
                sum.at[v] = __fadd_rn(x.at[v], other.at[v]);
            pack_piece<T>(words, sum);
            *piece = make_uint4(words[0], words[1], words[2], words[3]);
            if (i < height) *(uint4 *)((T *)a.sum + first + i * cols) = *piece;
        }
    }
}

/* Squares of the patch's rows; of row lane16 / 2. */
template <typename T>
__device__ __forceinline__ float squares_of_rows(uint4 *slot, const patch_place &at) {
    float part[PATCH];
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        uint32_t words[patch_words<T>::COUNT];
        float value[PATCH];
        slot_row<T>(words, slot, i);
        unpack_words<T>(value, words);
        part[i] = squares_of_lane<T>(value);
    }
    return sums_of_half_warp<T, PATCH>(part, at.lane16);
}

/* Statistics of the warp's rows, all parts of which are given. */
__device__ __forceinline__ void norm_rows_of_band(const tn__cuda_norm_arguments &a, uint32_t band) {
    const int lane = (int)threadIdx.x % 32;
    const uint32_t across = a.cast.tiles_across;
    const int64_t row = (int64_t)band * TN__TILE + threadIdx.x / 32 * WARP_ROWS + lane % WARP_ROWS;
    const float *const parts = part_of_rows(a.held, band * across, 0, 1) + lane % WARP_ROWS;
    const float squares = total_of_tiles<1>(parts, across, 0);
    const float mean = __fdiv_rn(squares, (float)a.cast.cols);
    if (lane < WARP_ROWS && row < a.cast.rows)
        row_number_put(a.rstd, row, tn__exact_rsqrt(__fadd_rn(mean, a.epsilon)));
}

/* What is normalized of a tile whose pieces are there, and its parts. */
template <typename T>
__device__ __forceinline__ void give_tile(const tn__cuda_norm_arguments &a, uint4 *slot,
                                          uint32_t turn) {
    const patch_place at = patch_of_tile(turn, a.cast.tiles_across);
    if (a.sum) add_residual<T>(slot, a, at);
    part_put(part_of_rows(a.held, turn, 0, 1), squares_of_rows<T>(slot, at));
    if (parts_are_all_given(a.held, at.tile_row, a.cast.tiles_across))
        norm_rows_of_band(a, at.tile_row);
}

/* ---- tiles ---------------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ column_factors factors_of_patch(const tn__cuda_norm_arguments &a,
                                                           const patch_place &at) {
    column_factors by;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, 4 * half);
        load_factors<4, true>(by.gamma + 4 * half, by.beta + 4 * half, a, col,
                              (int)min(a.cast.cols - col, (int64_t)4));
    }
    return by;
}

/* A tile in its slot, once the statistics of its rows are there: one row of the patch after the
 * other, or registers run out. Thread 0 takes the next turn meanwhile, and returns it: it is of a
 * later band. */
template <typename T>
__device__ __forceinline__ uint32_t normalize_tile(uint4 *slot, const tn__cuda_norm_arguments &a,
                                                   const patch_place &at, float *rstd) {
    const column_factors by = factors_of_patch<T>(a, at);
    uint32_t next = 0;
    row_numbers_get(rstd, a.rstd, a.cast.rows, at.tile_first_row);
    if (threadIdx.x == 0) next = (uint32_t)atomicAdd(a.held.turn, 1);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        const row_statistics of = {0.0f, rstd[at.unit * PATCH + i]};
        uint32_t words[patch_words<T>::COUNT];
        slot_row<T>(words, slot, i);
        normalize_words<T, false>(words, by, of);
        slot_row_put<T>(slot, i, words);
    }
    return next;
}

/* ---- a block's turns ------------------------------------------------------------------------ */

template <typename T> struct held_slots {
    enum { COUNT = TN__HELD_BYTES / (int)(sizeof(uint4) * slot_of<T>::PIECES) };
    uint4 *memory;
    uint32_t tiles;

    __device__ __forceinline__ uint4 *at(int slot) const {
        return memory + slot * slot_of<T>::PIECES;
    }
};

template <typename T, int FIRST, int LAST>
__device__ __forceinline__ void fetch_tile(const tn__cuda_norm_arguments &a,
                                           const held_slots<T> &slots, int slot, uint32_t turn) {
    if (turn < slots.tiles)
        fetch_patch<T, FIRST, LAST>(slots.at(slot), a.x, a.cast.rows, a.cast.cols,
                                    patch_of_tile(turn, a.cast.tiles_across));
}

/* The normalized patches of a slot's tile; the slot is free then for the one that is taken. */
template <typename T>
__device__ __forceinline__ void hold_tile(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                          const tn__cuda_norm_arguments &a,
                                          const held_slots<T> &slots, int slot, uint32_t *turns) {
    __shared__ float rstd[TN__TILE];
    const patch_place at = patch_of_tile(turns[slot], a.cast.tiles_across);
    const uint32_t next = normalize_tile<T>(slots.at(slot), a, at, rstd);
#pragma unroll
    for (int i = 0; i < PATCH; i++)
        slot_row<T>(words[i], slots.at(slot), i);
    clear_patch_beyond<T>(words, a.cast.rows, a.cast.cols, at);
    patch_stay_packed<T>(words);
    if (threadIdx.x == 0) turns[slot] = next;
    __syncthreads();
}

/* The tile of a slot; the next one is on its way then, its upper half last, where the transposed
 * tile was. */
template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void make_tile(const tn__cuda_norm_arguments &a,
                                          const held_slots<T> &slots, int slot, uint32_t *turns) {
    const uint32_t turn = turns[slot];
    uint32_t words[PATCH][patch_words<T>::COUNT];
    hold_tile<T>(words, a, slots, slot, turns);
    fetch_tile<T, 0, PATCH / 2>(a, slots, slot, turns[slot]);
    const patch_place at = patch_of_tile(turn, a.cast.tiles_across);
    if (a.value) store_patch<T>(a.value, a.cast, at, words);
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, true, true>(a.cast, at, words, slot_of<T>::upper(slots.at(slot)));
    else
        quantize_patches_2d<T, F, true, true>(a.cast, at, words, slot_of<T>::upper(slots.at(slot)));
    __syncthreads();
    fetch_tile<T, PATCH / 2, PATCH>(a, slots, slot, turns[slot]);
    fetches_end();
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_held(const tn__cuda_norm_arguments &a) {
    enum { SLOTS = held_slots<T>::COUNT };
    DYNAMIC_SHARED(shared, TN__HELD_BYTES);
    __shared__ uint32_t turns[SLOTS];
    if (is_skipped(a.skip)) return;
    const held_slots<T> slots = {
        (uint4 *)shared, (uint32_t)((a.cast.rows + TN__TILE - 1) / TN__TILE) * a.cast.tiles_across};
    if (threadIdx.x == 0) turns[0] = (uint32_t)atomicAdd(a.held.turn, 1);
    __syncthreads();
    fetch_tile<T, 0, PATCH>(a, slots, 0, turns[0]);
    fetches_end();
    int latest = 0;
#pragma unroll 1
    for (int step = 1;; step++) {
        const int next = latest == SLOTS - 1 ? 0 : latest + 1; /* the oldest, or free */
        fetches_wait<0>();
        if (turns[latest] < slots.tiles) give_tile<T>(a, slots.at(latest), turns[latest]);
        if (step < SLOTS) {
            if (threadIdx.x == 0) turns[next] = (uint32_t)atomicAdd(a.held.turn, 1);
            __syncthreads();
            fetch_tile<T, 0, PATCH>(a, slots, next, turns[next]);
            fetches_end();
        } else {
            if (turns[next] >= slots.tiles) return;
            make_tile<T, F, IS_1D>(a, slots, next, turns);
        }
        latest = next;
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define NORM(name, T, F)                                                                           \
    TILE_KERNEL(norm_held_1d_##name, tn__cuda_norm_arguments, T, 3, (norm_held<T, F, true>))       \
    TILE_KERNEL(norm_held_2d_##name, tn__cuda_norm_arguments, T, 3, (norm_held<T, F, false>))

NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2)
NORM(fp16_e4m3, __half, __NV_E4M3)
NORM(fp16_e5m2, __half, __NV_E5M2)
