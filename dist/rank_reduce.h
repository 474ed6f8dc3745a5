/* Reductions of rows of elements: the definition of what tn_reduce means on the host. */
#ifndef TENURE_RANK_REDUCE_H
#define TENURE_RANK_REDUCE_H

#include "error.h"
#include "tenure_dist.h"

/* out[i] = row 0's element i, reduced with row 1's, 2's, ... in this order, in fp32, rounded once
 * to the dtype (fp32 or bf16). Row r begins row_bytes * r after `rows`. out overlaps no row. */
TN_SISTER_API void tn__reduce_rows(tn_dtype dtype, tn_reduce reduce, const void *rows,
                                   size_t row_bytes, int row_count, size_t count, void *out);

#endif
