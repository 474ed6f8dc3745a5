/* What the kernels of the norms take: see cuda_arguments.h. */
#ifndef TENURE_CUDA_NORM_ARGUMENTS_H
#define TENURE_CUDA_NORM_ARGUMENTS_H

#include "cuda_arguments.h"

enum {
    TN__LANE_COLUMNS = 8,      /* of a row that a thread holds in one step */
    TN__BAND_BLOCKS_MAX = 256, /* of 128 columns, in a row of bands */
    TN__BAND_PARTS = 16,   /* that the rows of a band of 128 are made in: see cuda_norm_bands.cuh */
    TN__HELD_BYTES = 65536 /* of tiles that a block holds: see cuda_norm_held.cuh */
};

/* The bits of a number of a row that is not made yet. */
#define TN__NOT_YET 0xFFFFFFFFu

/* How a launch that makes numbers of rows and then tiles takes its parts. */
typedef struct tn__cuda_bands {
    int *turn;      /* parts that have been taken */
    uint32_t ahead; /* bands whose rows are made before the first tile */
} tn__cuda_bands;

/* What the blocks of a launch share that holds tiles: see cuda_norm_held.cuh. */
typedef struct tn__cuda_held {
    float *parts; /* [tiles][numbers of a row][128] */
    int *given;   /* [bands][8]: parts that warps have given of their rows */
    int *turn;    /* behind these: tiles that have been taken */
} tn__cuda_held;

/* Before such launches: none of `rows` numbers is made, and `count` counts, no more than there are
 * rows or 256, are 0. */
typedef struct tn__cuda_norm_begin_arguments {
    float *numbers[2]; /* NULL: none */
    int64_t rows;
    int *counts;
    int64_t count;
    const float *skip;
} tn__cuda_norm_begin_arguments;

typedef struct tn__cuda_norm_arguments {
    tn__cuda_quantize_arguments cast; /* src is what is normalised: `sum`, or x; src_vectors says
                                         that x, the residual, `sum`, `value`, gamma, beta and the
                                         ROW plane can be moved by pieces of 8 columns, of which
                                         there are whole ones */
    const void *x;
    const void *residual; /* NULL: none, and then no sum */
    void *sum;
    void *value; /* NULL: not wanted */
    float *mean; /* NULL: RMS */
    float *rstd;
    const void *gamma; /* NULL: all are 1 */
    const void *beta;  /* NULL: all are 0 */
    const float *skip; /* NULL: never */
    float epsilon;
    float gamma_base;
    int gamma_dtype, beta_dtype; /* 0 fp32, 1 bf16, 2 fp16 */
    tn__cuda_bands bands;        /* of norm_bands */
    tn__cuda_held held;          /* of norm_held */
} tn__cuda_norm_arguments;

#endif
