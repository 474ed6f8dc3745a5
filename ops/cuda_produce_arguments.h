/* What the kernels that make values and cast them take: see cuda_arguments.h. */
#ifndef TENURE_CUDA_PRODUCE_ARGUMENTS_H
#define TENURE_CUDA_PRODUCE_ARGUMENTS_H

#include "cuda_arguments.h"
#include "exact_activation.h"

enum {
    TN__SUM_COLUMNS = 32, /* that a block adds up */
    TN__TILE_SUMS = 8,    /* in which it adds up the tiles of a column */

    /* Blocks of activations and gradients that run at once on a multiprocessor, for which their
     * kernels are given registers. */
    TN__PRODUCE_BLOCKS = 2,
    TN__LIGHT_PRODUCE_BLOCKS = 3, /* without gates or gradients, bf16 */

    /* Of an H200: how far ahead of a block one asks for what a later one reads. */
    TN__MULTIPROCESSORS = 132
};

typedef struct tn__cuda_produce_arguments {
    tn__cuda_quantize_arguments cast; /* src is x; rows and cols are those of what is made, and
                                         src_vectors says that every row of x, of the gates, of dy
                                         and of `value` can be moved 16 bytes at a time */
    int64_t half_cols;                /* N: columns of x without the gates */
    const void *dy;
    const float *weights; /* NULL: all are 1 */
    void *value;          /* NULL: only the planes */
    float *tile_sums;     /* NULL: none */
    const float *skip;    /* NULL: never */
    tn__curve curve;
} tn__cuda_produce_arguments;

typedef struct tn__cuda_column_sums_arguments {
    const float *tile_sums; /* [tiles, parts, cols] */
    void *sums;
    const float *skip;
    int64_t tiles;
    int64_t cols;
    int parts;
    int dtype; /* 0 fp32, 1 bf16, 2 fp16 */
    int accumulate;
} tn__cuda_column_sums_arguments;

#endif
