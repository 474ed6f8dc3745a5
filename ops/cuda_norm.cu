/* Kernels of the norms that also make planes whose blocks are of 128 rows, which a tile of such a
 * band can do once the statistics of all its rows are known.
 *
 * The rows of a band and then its tiles are worked on so soon after each other that what is
 * normalised is still in the L2 cache when tiles read it. Bytes that must move for each element of
 * s bytes: as in cuda_norm_rows.cu, and 1 for each plane more.
 *
 * A block takes a ticket, whose number stands for work in this order (lead = 2, bands 0 ... 3):
 *
 *     rows 0 | rows 1 | rows 2, tiles 0 | rows 3, tiles 1 | tiles 2 | tiles 3
 *
 * and a tile waits until all rows of its band have been counted. That ends: the rows have lower
 * tickets, whose holders run and wait for nobody. With a lead that is long enough it is rare.
 */
#include "cuda_norm_row.cuh"

/* ---- tickets ------------------------------------------------------------------------------ */

struct work_item {
    uint32_t band;
    uint32_t index; /* of the band's items of rows, or of its tiles */
    bool is_tile;
};

/* How many rows a block takes at once, and how many such items a band has. */
__device__ __forceinline__ uint32_t rows_at_once(const tn__cuda_norm_arguments &a) {
    return TN__FLAT_THREADS / (uint32_t)a.row_threads;
}
__device__ __forceinline__ uint32_t row_items(const tn__cuda_norm_arguments &a) {
    return TN__TILE / TN__ITEM_PASSES / rows_at_once(a);
}

__device__ __forceinline__ work_item item_of_ticket(const tn__cuda_norm_arguments &a,
                                                    uint32_t ticket) {
    const uint32_t of_rows = row_items(a), of_both = of_rows + a.cast.tiles_across;
    const uint32_t mixed = (a.bands - a.lead) * of_both; /* tickets of rows and tiles in turn */
    if (ticket < a.lead * of_rows) return {ticket / of_rows, ticket % of_rows, false};
    ticket -= a.lead * of_rows;
    if (ticket >= mixed) {
        ticket -= mixed;
        const uint32_t band = ticket / a.cast.tiles_across;
        return {a.bands - a.lead + band, ticket - band * a.cast.tiles_across, true};
    }
    const uint32_t band = ticket / of_both, index = ticket - band * of_both;
    if (index < of_rows) return {band + a.lead, index, false};
    return {band, index - of_rows, true};
}

/* All threads of the block have done their part of the band's rows: one of them says so, once all
 * of it can be seen. */
__device__ __forceinline__ void count_rows(const tn__cuda_norm_arguments &a, uint32_t band) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    atomicAdd(a.tickets + 1 + band, 1u);
}

__device__ __forceinline__ void wait_for_rows(const tn__cuda_norm_arguments &a, uint32_t band) {
    if (threadIdx.x == 0) {
        const volatile uint32_t *counted = a.tickets + 1 + band;
        while (*counted < row_items(a)) {
        }
        __threadfence();
    }
    __syncthreads();
}

/* ---- tiles -------------------------------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ column_factors factors_of_patch(const tn__cuda_norm_arguments &a,
                                                           const patch_place &at) {
    column_factors by;
#pragma unroll
    for (int j = 0; j < PATCH; j += element<T>::VECTOR) {
        const int64_t col = at.tile_first_col + patch_column<T>(at.lane16, j);
        const int left = (int)min(a.cast.cols - col, (int64_t)PATCH);
        if (a.cast.src_vectors)
            load_factors<element<T>::VECTOR, true>(by.gamma + j, by.beta + j, a, col, left);
        else
            load_factors<element<T>::VECTOR, false>(by.gamma + j, by.beta + j, a, col, left);
    }
    return by;
}

/* What the patch holds beyond the columns, 0 before, may be anything after; no amax may see it. */
template <typename T>
__device__ __forceinline__ void clear_patch_beyond(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                                   const tn__cuda_norm_arguments &a,
                                                   const patch_place &at) {
    if (at.tile_first_col + TN__TILE <= a.cast.cols) return;
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
#pragma unroll
        for (int j = 0; j < PATCH; j++) {
            if (at.tile_first_col + patch_column<T>(at.lane16, j) < a.cast.cols) continue;
            if constexpr (sizeof(T) == 4)
                words[i][j] = 0;
            else
                words[i][j / 2] &= j % 2 ? 0xFFFFu : 0xFFFF0000u;
        }
    }
}

template <typename T>
__device__ __forceinline__ void normalize_patch(uint32_t (&words)[PATCH][patch_words<T>::COUNT],
                                                const tn__cuda_norm_arguments &a,
                                                const patch_place &at) {
    const int rows_in = patch_rows_in(a.cast.rows, at);
    const column_factors by = factors_of_patch<T>(a, at);
#pragma unroll
    for (int i = 0; i < PATCH; i++) {
        row_statistics of = {0.0f, 0.0f};
        if (i < rows_in) {
            of.rstd = __ldcg(a.rstd + at.row + i);
            if (a.mean) of.mean = __ldcg(a.mean + at.row + i);
            normalize_words<T>(words[i], a, by, of);
        }
        row_stay_packed<T>(words[i]); /* one row after the other, or registers run out */
    }
    clear_patch_beyond<T>(words, a, at);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_tile(const tn__cuda_norm_arguments &a, const patch_place &at) {
    uint32_t words[PATCH][patch_words<T>::COUNT];
    patch_load<T, true>(words, a.cast.src, a.cast.rows, a.cast.cols, a.cast.src_vectors, at);
    patch_stay_packed<T>(words);
    normalize_patch<T>(words, a, at);
    if constexpr (IS_1D)
        quantize_patches_1d<T, F, false, true>(a.cast, at, words);
    else
        quantize_patches_2d<T, F, true, true>(a.cast, at, words);
}

/* ---- bands -------------------------------------------------------------------------------- */

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D, int STEPS, bool VECTORS>
__device__ __forceinline__ void norm_rows_of_band(const tn__cuda_norm_arguments &a,
                                                  const work_item &item) {
    const bool has_plane = IS_1D && a.cast.row.data;
    int64_t row = (int64_t)item.band * TN__TILE + item.index * TN__ITEM_PASSES * rows_at_once(a);
    int turn = 0;
#pragma unroll 1
    for (int pass = 0; pass < TN__ITEM_PASSES && row < a.cast.rows; pass++) {
        norm_row<T, F, STEPS, VECTORS>(a, row_of_thread(a, row), has_plane, false, turn);
        row += rows_at_once(a);
    }
    count_rows(a, item.band);
}

template <typename T, __nv_fp8_interpretation_t F, bool IS_1D>
__device__ __forceinline__ void norm_bands(const tn__cuda_norm_arguments &a) {
    __shared__ uint32_t ticket;
    if (is_skipped(a.skip)) return;
    if (threadIdx.x == 0) ticket = atomicAdd(a.tickets, 1u);
    __syncthreads();
    const work_item item = item_of_ticket(a, ticket);
    if (item.is_tile) {
        wait_for_rows(a, item.band);
        norm_tile<T, F, IS_1D>(a, patch_in_tile(item.band, item.index));
    } else if (a.cast.src_vectors) {
        norm_rows_of_band<T, F, IS_1D, 4, true>(a, item);
    } else {
        norm_rows_of_band<T, F, IS_1D, 1, false>(a, item);
    }
}

/* ---- the kernels by name ------------------------------------------------------------------ */

#define NORM(name, T, F, blocks)                                                                   \
    TILE_KERNEL(norm_bands_1d_##name, tn__cuda_norm_arguments, T, blocks,                          \
                (norm_bands<T, F, true>))                                                          \
    TILE_KERNEL(norm_bands_2d_##name, tn__cuda_norm_arguments, T, blocks, (norm_bands<T, F, false>))

NORM(fp32_e4m3, float, __NV_E4M3, 2)
NORM(fp32_e5m2, float, __NV_E5M2, 2)
NORM(bf16_e4m3, __nv_bfloat16, __NV_E4M3, 3)
NORM(bf16_e5m2, __nv_bfloat16, __NV_E5M2, 3)
NORM(fp16_e4m3, __half, __NV_E4M3, 2)
NORM(fp16_e5m2, __half, __NV_E5M2, 2)
