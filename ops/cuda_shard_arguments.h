/* What the kernels that cast a part of a weight take: see cuda_shard.cu. */
#ifndef TENURE_CUDA_SHARD_ARGUMENTS_H
#define TENURE_CUDA_SHARD_ARGUMENTS_H

#include "cuda_arguments.h"

/* src holds elements first ... end - 1 of rows x cols. Of vectors, those that the part holds whole
 * can be read at once; of data_vectors, written. */
typedef struct tn__cuda_shard_arguments {
    const void *src;
    int64_t rows;
    int64_t cols;
    int64_t first;
    int64_t end;
    uint32_t tiles_across;
    int vectors;
    float *amax; /* of each tile: made by one kernel, read by the other */
    unsigned char *data;
    int data_vectors;
    float *scale; /* NULL: not made */
    int64_t scale_stride;
    float amax_epsilon;
    int is_pow2;
    const float *skip; /* NULL: never */
} tn__cuda_shard_arguments;

#endif
