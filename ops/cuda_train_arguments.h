/* What the kernels of the training operations take: see cuda_arguments.h. */
#ifndef TENURE_CUDA_TRAIN_ARGUMENTS_H
#define TENURE_CUDA_TRAIN_ARGUMENTS_H

#include "cuda_norm_arguments.h"
#include "cuda_produce_arguments.h"
#include "exact_adamw.h"
#include "exact_clip.h"

/* The means of the rows (a warp takes a row), and then the rest, tile by tile. */
typedef struct tn__cuda_norm_gradient_arguments {
    tn__cuda_produce_arguments of; /* cast.src is x; src_vectors: of x, dy, added and value */
    const void *added;             /* NULL: nothing */
    const float *mean;             /* NULL: all are 0 */
    const float *rstd;
    const void *gamma; /* NULL: all are 1 */
    float gamma_base;
    int gamma_dtype;   /* 0 fp32, 1 bf16, 2 fp16 */
    int gamma_vectors; /* it can be read 8 neighbours at a time, of which there are whole ones */
    float *shift;      /* NULL: RMS */
    float *tilt;
    float *gamma_sums; /* of tiles, as of.tile_sums; NULL: not wanted */
    float *beta_sums;
    unsigned split;     /* of norm_gradient_rows: blocks that make a tile's rows and sums */
    tn__cuda_held held; /* of norm_gradient_held */
} tn__cuda_norm_gradient_arguments;

/* A warp takes a row. */
typedef struct tn__cuda_row_products_arguments {
    const void *x;
    const void *dy;
    float *sums;
    const float *skip;
    int64_t rows;
    int64_t half_cols; /* N: columns of x without the gates */
    tn__curve curve;
    int is_gated;
    int vectors; /* every row of x, of the gates and of dy can be moved 16 bytes at a time */
} tn__cuda_row_products_arguments;

/* A block takes TN__FLAT_THREADS columns of one row of the table. */
typedef struct tn__cuda_embed_gradient_arguments {
    const unsigned char *tokens;
    const void *dy;
    void *table;
    const float *skip;
    int64_t token_count;
    int64_t cols;
    uint32_t blocks_across;
    int dtype; /* of the table: 0 fp32, 1 bf16, 2 fp16 */
    int accumulate;
} tn__cuda_embed_gradient_arguments;

typedef struct tn__cuda_adamw_arguments {
    tn__cuda_quantize_arguments cast; /* src is the master copy, which is written too; src_vectors:
                                         of it, the moments, the gradient and the plain weight */
    const void *gradient;
    float *first, *second;
    const float *step;
    const float *rate;           /* NULL: 1 */
    const float *gradient_scale; /* NULL: 1 */
    void *plain;                 /* NULL: not wanted */
    tn__adamw_constants constants;
    int gradient_dtype, plain_dtype; /* 0 fp32, 1 bf16, 2 fp16 */
} tn__cuda_adamw_arguments;

typedef struct tn__cuda_adamw_advance_arguments {
    float *step;
    const float *skip;
    float beta1, beta2;
} tn__cuda_adamw_advance_arguments;

/* Block b makes sums[b]; a thread has 4 of its 1024 sums. Block 0 has a thread for each of the sums
 * of blocks that are not launched, as x has nothing for them. */
typedef struct tn__cuda_square_sums_arguments {
    const void *x;
    float *sums;
    int64_t count;
    int blocks; /* launched */
    int accumulate;
    int vectors; /* x can be read four neighbours at a time, of which there are whole ones */
} tn__cuda_square_sums_arguments;

typedef struct tn__cuda_clip_factor_arguments {
    const float *sums;
    float *norm; /* NULL: not wanted */
    float *factor;
    float scale, max_norm;
} tn__cuda_clip_factor_arguments;

#endif
