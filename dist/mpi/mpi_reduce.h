/* Reductions of rows of elements: the definition of what tn_reduce means with MPI. */
#ifndef TENURE_MPI_REDUCE_H
#define TENURE_MPI_REDUCE_H

#include "tenure_dist.h"

/* out[i] = row 0's element i, reduced with row 1's, 2's, ... in this order, in fp32, rounded once
 * to the dtype (fp32 or bf16). Row r begins row_bytes * r after `rows`. out overlaps no row. */
void tn__mpi_reduce_rows(tn_dtype dtype, tn_reduce reduce, const void *rows, size_t row_bytes,
                         int row_count, size_t count, void *out);

#endif
