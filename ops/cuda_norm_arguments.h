/* What the kernels of the norms take: see cuda_arguments.h. */
#ifndef TENURE_CUDA_NORM_ARGUMENTS_H
#define TENURE_CUDA_NORM_ARGUMENTS_H

#include "cuda_arguments.h"

enum { TN__LANE_COLUMNS = 8 /* of a row that a thread holds in one step */ };

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
} tn__cuda_norm_arguments;

#endif
