/* What the kernels of the norms take: see cuda_arguments.h. */
#ifndef TENURE_CUDA_NORM_ARGUMENTS_H
#define TENURE_CUDA_NORM_ARGUMENTS_H

#include "cuda_arguments.h"

enum {
    TN__LANE_COLUMNS = 8, /* of a row that a thread holds in one step, all of them neighbours */
    TN__STEP_COLUMNS = TN__FLAT_THREADS * TN__LANE_COLUMNS,
    TN__ITEM_PASSES = 4 /* rows, or as many times some short ones, that a block takes of a band */
};

typedef struct tn__cuda_norm_arguments {
    tn__cuda_quantize_arguments cast; /* src is what is normalised: `sum`, or x; src_vectors says
                                         that there are whole groups of 8 columns, and that x, the
                                         residual, `sum`, `value`, gamma, beta and the 1D ROW plane
                                         can be moved by pieces of them */
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
    int row_threads;   /* that take a row: 32, 64, 128 or 256; fewer than 256 hold it in one step */
    uint32_t *tickets; /* bands: 0, and for each band 0 */
    uint32_t bands;
    uint32_t lead; /* bands whose rows come before the tiles of the first */
} tn__cuda_norm_arguments;

#endif
