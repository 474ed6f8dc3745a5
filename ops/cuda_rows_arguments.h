/* What the kernels that pad groups and move rows take: see cuda_rows.cu. */
#ifndef TENURE_CUDA_ROWS_ARGUMENTS_H
#define TENURE_CUDA_ROWS_ARGUMENTS_H

#include "cuda_list_arguments.h"

enum { TN__GROUPS_BAD_MAP = 3 };

typedef struct tn__cuda_pad_groups_arguments {
    const int64_t *offsets;
    int64_t groups;
    int64_t rows;
    int64_t multiple;
    const int64_t *permutation; /* NULL: none */
    int64_t *padded_offsets;
    int64_t *map;
    int64_t padded_rows;
    int64_t *inverse; /* NULL: not wanted */
    int64_t *total;   /* scratch: padded rows in all; -1: do nothing */
    uint32_t *error;
} tn__cuda_pad_groups_arguments;

/* Rows of `pieces` pieces of 1, 4 or 16 bytes, each moved by `lanes` threads, a power of two. */
typedef struct tn__cuda_gather_arguments {
    const unsigned char *src;
    unsigned char *dst;
    const int64_t *map;
    uint32_t *error;
    int64_t src_rows;
    int64_t dst_rows;
    int64_t pieces;
    uint32_t lanes;
    uint32_t piece_bytes;
    uint32_t nothing; /* four times the byte that a row from nowhere is made of */
} tn__cuda_gather_arguments;

/* Scale rows of dst_stride floats, each made by `blocks_across` blocks. */
/* A thread takes one row of the result and so many of the scales' rows at once. */
enum { TN__GATHER_SCALE_ROWS = 8 };

typedef struct tn__cuda_gather_scales_arguments {
    const float *src;
    float *dst;
    const int64_t *map;
    int64_t src_rows;
    int64_t dst_rows;
    int64_t src_stride;
    int64_t dst_stride;
    int64_t scale_rows;
    uint32_t blocks_across;
} tn__cuda_gather_scales_arguments;

/* `lanes` threads a row, a power of two; vectors: eight columns at a time. */
typedef struct tn__cuda_combine_arguments {
    const void *src;
    void *dst;
    const int64_t *map;
    const float *weights; /* NULL: 1 */
    uint32_t *error;
    int64_t src_rows;
    int64_t dst_rows;
    int64_t cols;
    int64_t each;
    uint32_t lanes;
    int vectors;
} tn__cuda_combine_arguments;

#endif
