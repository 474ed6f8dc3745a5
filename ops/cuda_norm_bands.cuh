/* How one launch makes what needs whole rows and then tiles of 128 rows: the order of its work, and
 * how rows tell tiles that they are done.
 *
 * The matrix is bands of 128 rows. What a band's rows give is made by 16 parts of 8 rows, a warp
 * for each row, and what its tiles give by a part for each tile. Parts are taken in turn:
 *
 *     rows of bands 0 ... A - 1 | rows of band A, tiles of band 0 | rows of A + 1, tiles of 1 | ...
 *
 * so that tiles are read again while the L2 cache has them, and when a tile's turn comes its rows
 * have been done for a while. A tile that is early asks until they are. A block takes one part, the
 * next one in turn, whichever blocks run: what a part waits for has been taken before.
 *
 * A row is done when its number is no longer TN__NOT_YET, bits that no number ever has, for any NaN
 * is stored as the canonical one. The kernel ahead (norm_begin) has left them there.
 */
#ifndef TENURE_CUDA_NORM_BANDS_CUH
#define TENURE_CUDA_NORM_BANDS_CUH

#include "cuda_norm_arguments.h"
#include "cuda_tile.cuh"

enum { BAND_PARTS = TN__BAND_PARTS, PART_ROWS = TN__TILE / BAND_PARTS };
static_assert(PART_ROWS == WARPS, "a warp for each row of a part");

/* What a block does: rows from `row` on, or the tile. */
struct band_part {
    bool is_rows;
    int64_t row; /* the first of its 8 rows; those beyond the matrix are nobody's */
    uint32_t tile_row, tile_col;
};

/* All threads. */
__device__ __forceinline__ band_part next_part(const tn__cuda_bands &bands, uint32_t tiles_across) {
    __shared__ uint32_t turn;
    if (threadIdx.x == 0) turn = (uint32_t)atomicAdd(bands.turn, 1);
    __syncthreads();
    const uint32_t first = bands.ahead * BAND_PARTS, each = BAND_PARTS + tiles_across;
    band_part part = {true, 0, 0, 0};
    if (turn < first) {
        part.row = (int64_t)turn * PART_ROWS;
        return part;
    }
    const uint32_t band = (turn - first) / each, of_band = turn - first - band * each;
    part.is_rows = of_band < BAND_PARTS;
    part.row = (int64_t)(band + bands.ahead) * TN__TILE + (int64_t)of_band * PART_ROWS;
    part.tile_row = band;
    part.tile_col = of_band - BAND_PARTS;
    return part;
}

/* ---- numbers of rows ------------------------------------------------------------------------ */

/* On a CPU threads of a block take turns. */
__device__ __forceinline__ void let_others_run() {
#ifndef __CUDACC__
    emulated_let_others();
#endif
}

__device__ __forceinline__ void row_number_put(float *numbers, int64_t row, float value) {
    *(volatile float *)(numbers + row) = canonical_of<float>(value);
}

/* Those of the tile's rows, once they are there, into shared memory; all threads, the first 128 of
 * which take a row each. 0 beyond the matrix, and of NULL. */
__device__ __forceinline__ void row_numbers_get(float *shared, const float *numbers, int64_t rows,
                                                int64_t tile_first_row) {
    const uint32_t thread = thread_of_block();
    const int64_t row = tile_first_row + thread;
    if (thread >= TN__TILE) return;
    float number = 0.0f;
    if (numbers && row < rows) {
        for (;;) {
            number = *(const volatile float *)(numbers + row);
            if (__float_as_uint(number) != TN__NOT_YET) break;
            let_others_run();
        }
    }
    shared[thread] = number;
}

#endif
