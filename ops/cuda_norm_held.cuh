/* How one launch makes what needs whole rows and then tiles of 128 rows, from one read of memory.
 *
 * The matrix is bands of 128 rows, and these are tiles, which blocks take in turn, whichever blocks
 * run: along a band first. A block holds one or two of them in slots of shared memory. Of each it
 * gives at once what its rows add up to (a part), and it makes the older one when the numbers of
 * the band's rows are there:
 *
 *     on its way | parts given, numbers awaited | made: its slot is free for the next turn
 *
 * A warp has 16 rows of a tile. The one that gives the last part of its 16 rows of a band adds up
 * all of them: the numbers of these rows. A row's number is there when it is no longer TN__NOT_YET,
 * bits that no number ever has, for any NaN is stored as the canonical one. The kernel ahead
 * (norm_begin) has left them there.
 *
 * A block that waits has given the parts of all it holds. So a band's parts are all given when its
 * tiles are all taken, and they are unless every block waits: a launch has more blocks than a band
 * has tiles, and all of them have their places at once (tn__launch.is_together), whatever else runs
 * on the device.
 *
 * A slot holds a thread's pieces of its patch (cuda_tile.cuh), where no other thread reads them;
 * its upper half is the transposed tile's when all patches are in registers.
 */
#ifndef TENURE_CUDA_NORM_HELD_CUH
#define TENURE_CUDA_NORM_HELD_CUH

#include "cuda_async.cuh"
#include "cuda_norm.cuh"
#include "cuda_norm_bands.cuh"
#include "cuda_norm_sums.cuh"

enum { WARP_ROWS = TN__TILE / WARPS };
static_assert(WARP_ROWS == 16, "half a warp has a lane for each of its rows");

/* ---- slots ---------------------------------------------------------------------------------- */

template <typename T> struct slot_of {
    enum { ROW = patch_words<T>::PIECES * TN__TILE_THREADS, PIECES = PATCH * ROW };

    static __device__ __forceinline__ uint4 *piece(uint4 *slot, int i, int p) {
        return slot + i * ROW + p * TN__TILE_THREADS + threadIdx.x;
    }
    static __device__ __forceinline__ uint4 *upper(uint4 *slot) { return slot + PIECES / 2; }
};

/* Rows FIRST to LAST - 1 of the patch are on their way; zeros where the matrix is not. Of a whole
 * tile nothing is asked. */
template <typename T, int FIRST, int LAST>
__device__ __forceinline__ void fetch_patch(uint4 *slot, const void *src, int64_t rows,
                                            int64_t cols, const patch_place &at) {
    const T *const first = (const T *)src + (at.row + FIRST) * cols + at.tile_first_col;
    const bool is_whole = is_whole_tile(rows, cols, at);
    const int rows_in = patch_rows_in(rows, at);
#pragma unroll
    for (int p = 0; p < patch_words<T>::PIECES; p++) {
        const int column = patch_column<T>(at.lane16, p * element<T>::VECTOR);
        const int height = at.tile_first_col + column < cols ? rows_in : 0;
        const T *from = first + column;
        if (is_whole) {
#pragma unroll
            for (int i = FIRST; i < LAST; i++, from += cols)
                fetch_piece(slot_of<T>::piece(slot, i, p), from, true);
        } else {
#pragma unroll
            for (int i = FIRST; i < LAST; i++, from += cols)
                fetch_piece(slot_of<T>::piece(slot, i, p), i < height ? from : (const T *)src,
                            i < height);
        }
    }
}

template <typename T>
__device__ __forceinline__ void slot_row(uint32_t (&words)[patch_words<T>::COUNT], uint4 *slot,
                                         int i) {
#pragma unroll
    for (int p = 0; p < patch_words<T>::PIECES; p++) {
        const uint4 piece = *slot_of<T>::piece(slot, i, p);
        words[4 * p] = piece.x, words[4 * p + 1] = piece.y;
        words[4 * p + 2] = piece.z, words[4 * p + 3] = piece.w;
    }
}

template <typename T>
__device__ __forceinline__ void slot_row_put(uint4 *slot, int i,
                                             const uint32_t (&words)[patch_words<T>::COUNT]) {
#pragma unroll
    for (int p = 0; p < patch_words<T>::PIECES; p++)
        *slot_of<T>::piece(slot, i, p) =
            make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
}

/* ---- turns ---------------------------------------------------------------------------------- */

/* A tile that is taken, and where it lies. */
struct held_turn {
    uint32_t tile, row, col;

    __device__ __forceinline__ patch_place place() const { return patch_in_tile(row, col); }
};

__device__ __forceinline__ held_turn turn_of(uint32_t tile, uint32_t across) {
    const uint32_t row = tile / across;
    return {tile, row, tile - row * across};
}

/* ---- parts ---------------------------------------------------------------------------------- */

/* Of a tile, those of the warp's rows: `kind` of `kinds` numbers of each. */
__device__ __forceinline__ float *part_of_rows(const tn__cuda_held &held, uint32_t tile, int kind,
                                               int kinds) {
    return held.parts + ((int64_t)tile * kinds + kind) * TN__TILE +
           thread_of_block() / 32 * WARP_ROWS;
}

/* `part` of row lane16 / 2 of the half warp. */
__device__ __forceinline__ void part_put(float *of_rows, float part) {
    const int lane = (int)thread_of_block() % 32;
    if (lane % 2 == 0) of_rows[lane / 2] = part;
}

/* Counts one more; whoever sees that also sees what this thread has seen written. */
__device__ __forceinline__ int count_written(int *count) {
#ifdef __CUDACC__
    int before;
    asm volatile("atom.add.release.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(count)
                 : "memory");
    return before;
#else
    return __atomic_fetch_add(count, 1, __ATOMIC_ACQ_REL);
#endif
}

/* Whether the last of the parts of the warp's rows of a band has been given now; all lanes. */
__device__ __forceinline__ bool parts_are_all_given(const tn__cuda_held &held, uint32_t band,
                                                    uint32_t across) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) before = count_written(held.given + band * WARPS + threadIdx.x / 32);
    before = __shfl_sync(0xFFFFFFFFu, before, 0);
    if ((uint32_t)before + 1 < across) return false;
    __threadfence();
    return true;
}

/* The total of 32 sums of the parts of a kind, tile t's to sum t mod 32, of row lane % 16 of the
 * warp: sums are added that are 16 apart, then 8, 4, 2, 1. `parts` is of the first tile's row; a
 * tile has KINDS of them, 128 apart. Those of 16 tiles are on their way at once, also where there
 * is no tile. All lanes. */
template <int KINDS>
__device__ __forceinline__ float total_of_tiles(const float *parts, uint32_t across, int kind) {
    enum { OWN = ROW_PARTS / 2 };
    const uint32_t first = threadIdx.x % 32 / WARP_ROWS * OWN;
    float sum[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++)
        sum[j] = 0.0f;
#pragma unroll 1
    for (uint32_t begin = 0; begin < across; begin += ROW_PARTS) {
        float part[OWN];
#pragma unroll
        for (int j = 0; j < OWN; j++)
            part[j] = parts[(min(begin + first + j, across - 1) * KINDS + kind) * TN__TILE];
#pragma unroll
        for (int j = 0; j < OWN; j++)
            sum[j] = __fadd_rn(sum[j], begin + first + j < across ? part[j] : 0.0f);
    }
#pragma unroll
    for (int j = 0; j < OWN; j++)
        sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(0xFFFFFFFFu, sum[j], WARP_ROWS));
#pragma unroll
    for (int apart = OWN / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int j = 0; j < OWN / 2; j++)
            if (j < apart) sum[j] = __fadd_rn(sum[j], sum[j + apart]);
    }
    return sum[0];
}

#endif
