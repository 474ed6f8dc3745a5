/* What tests of parallel layers stand on: tensors of the same numbers on every rank, parts of them,
 * and what one rank makes of all. */
#ifndef TENURE_PARALLEL_SUPPORT_H
#define TENURE_PARALLEL_SUPPORT_H

#include "ranks_support.h"
#include "tenure_parallel.h"
#include "test_ops.h"

enum { PARALLEL_RANKS_MAX = 8, PARALLEL_TILE = 128 };

/* A matrix on the host. */
typedef struct parallel_matrix {
    int64_t rows, cols;
    float *at;
} parallel_matrix;

/* Numbers that bf16 holds, in about [-1, 1). */
parallel_matrix parallel_numbers(int64_t rows, int64_t cols, uint32_t seed);
parallel_matrix parallel_zeros(int64_t rows, int64_t cols);
void parallel_free(parallel_matrix *matrix);

/* A part, to be freed as well. */
parallel_matrix parallel_part(const parallel_matrix *of, int64_t row, int64_t rows, int64_t col,
                              int64_t cols);

/* Rows of each rank apart, so that each begins at a multiple of 128, with zeros between. */
parallel_matrix parallel_in_tiles(const parallel_matrix *of, const int64_t *rows, int ranks);

/* a += b, number by number, in fp32. */
void parallel_add(parallel_matrix *a, const parallel_matrix *b);

/* Rounded to bf16, to nearest even. */
void parallel_round(parallel_matrix *a);

int64_t parallel_first(const int64_t *rows, int rank);
int64_t parallel_first_in_tiles(const int64_t *rows, int rank);
int64_t parallel_total_in_tiles(const int64_t *rows, int ranks);

tn_scope parallel_scope(const rank_fixture *all, tn_scope_kind kind, const char *name);
tn_tensor parallel_tensor(const rank_fixture *all, tn_scope scope, tn_dtype dtype,
                          const parallel_matrix *of);
tn_tensor parallel_weight(const rank_fixture *all, tn_scope scope, tn_format format,
                          const parallel_matrix *of);

/* Waits for both streams. */
parallel_matrix parallel_fetch(const rank_fixture *all, tn_tensor tensor);

/* Of the contents of two tensors, or of a tensor and a matrix, which is freed. */
void parallel_expect(const rank_fixture *all, const char *what, tn_tensor actual,
                     parallel_matrix expected);

#endif
