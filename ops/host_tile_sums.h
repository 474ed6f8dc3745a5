/* The sums of the columns of a tile of 128 rows while its rows go by: the order that
 * tn_bias_gradient fixes, shared by all ops that make such sums. */
#ifndef TENURE_HOST_TILE_SUMS_H
#define TENURE_HOST_TILE_SUMS_H

#include "host_kernels.h"

enum {
    TN__GROUP_ROWS = 8,                     /* that are added up first */
    TN__GROUPS = TN__BLOCK / TN__GROUP_ROWS /* in a tile */
};

typedef struct tn__tile_sums {
    float group[TN__GROUPS][TN__BLOCK];
} tn__tile_sums;

/* Where row `row` of the matrix is to be added, column by column; 0 at a tile's first row. */
static inline float *tn__tile_sums_of(tn__tile_sums *sums, int64_t row) {
    const int in_tile = (int)(row % TN__BLOCK);
    if (in_tile == 0) memset(sums->group, 0, sizeof sums->group);
    return sums->group[in_tile / TN__GROUP_ROWS];
}

/* After row `row` of `rows`: if it is the last of its tile, the sums go to `out` [tiles, cols]. */
static inline void tn__tile_sums_end_row(const tn__tile_sums *sums, int64_t row, int64_t rows,
                                         float *out, int64_t cols, int64_t col, int count) {
    if (row % TN__BLOCK != TN__BLOCK - 1 && row != rows - 1) return;
    out += row / TN__BLOCK * cols + col;
    for (int c = 0; c < count; c++) {
        float sum = 0.0f;
        for (int g = 0; g < TN__GROUPS; g += 2)
            sum += sums->group[g][c] + sums->group[g + 1][c];
        out[c] = sum;
    }
}

#endif
