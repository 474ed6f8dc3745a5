/* How the rows of an activation are cut over the ranks of a communicator, and where each rank's
 * part is in what all ranks have together:
 *
 *     rows, whole      | rank 0 | rank 1 | rank 2 |               (ROW, DATA)
 *     rows, in tiles   | rank 0 |..| rank 1  |.| rank 2 |         (COL; dots are zeros)
 *
 * A COL plane has a scale for each 128 rows, which those of two ranks can not share: each has an
 * amax of its own. So a rank's rows begin at a whole tile there. Where all ranks but the last that
 * has rows have a multiple of 128, both are the same.
 */
#ifndef TENURE_PARALLEL_ROWS_H
#define TENURE_PARALLEL_ROWS_H

#include "tenure_parallel.h"

enum { TN__TILE_ROWS = 128 };

typedef struct tn__row_cut {
    tn_comm *comm;
    int rank, ranks;
    const int64_t *told; /* rows of each rank; NULL: `own` each */
    int64_t own;
    int64_t total;
    int64_t total_in_tiles;
} tn__row_cut;

/* One rank's part. */
typedef struct tn__row_part {
    int64_t rows, first, first_in_tiles;
} tn__row_part;

/* The first rank's part, and that of the rank after `part`, which is rank - 1's. */
tn__row_part tn__row_part_first(const tn__row_cut *cut);
tn__row_part tn__row_part_next(const tn__row_cut *cut, int rank, const tn__row_part *part);

/* own: rows of this rank. `call` is the name in errors. */
tn_status tn__row_cut_make(const char *call, const tn_sequence *sequence, int64_t own,
                           tn__row_cut *out);

/* Rows that a plane of all ranks' rows has. */
static inline int64_t tn__row_cut_rows(const tn__row_cut *cut, tn_plane plane) {
    return plane == TN_PLANE_COL ? cut->total_in_tiles : cut->total;
}

static inline int tn__row_cut_is_aligned(const tn__row_cut *cut) {
    return cut->total_in_tiles == cut->total;
}

static inline int64_t tn__up_to(int64_t number, int64_t multiple) {
    return (number + multiple - 1) / multiple * multiple;
}

#endif
