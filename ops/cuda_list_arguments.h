/* What the kernels that work on a list of tensors in one launch take: see cuda_list.cu.
 *
 * The list lies in scratch memory of the call: for each tensor the argument that the kernel of one
 * tensor would take, and the number of its first tile among the tiles of all, with the number of
 * all behind the last. Who makes the list decides what a tensor of it is: a kernel that reads the
 * offsets of groups, or one that writes down what the host knows.
 */
#ifndef TENURE_CUDA_LIST_ARGUMENTS_H
#define TENURE_CUDA_LIST_ARGUMENTS_H

#include "cuda_arguments.h"

/* As in tenure_grouped.h, which cuda_list_table.c holds them against. */
enum { TN__GROUPS_OK = 0, TN__GROUPS_BAD_OFFSETS = 1, TN__GROUPS_OVER_CAPACITY = 2 };

/* How scales and pieces of all tensors of a list lie. */
typedef struct tn__cuda_list_layout {
    int element_bytes; /* of the source */
    int is_1d;
    int has_row;
    int has_col;
} tn__cuda_list_layout;

typedef struct tn__cuda_list {
    int64_t *first_tile;                 /* count + 1 */
    tn__cuda_quantize_arguments *tensor; /* count */
    int64_t count;
} tn__cuda_list;

/* Of a list of so many tensors, its numbers before its tensors. Both parts are made of 8-byte
 * words, so one may follow the other. */
static inline size_t tn__cuda_list_numbers_bytes(int64_t tensors) {
    return ((size_t)tensors + 1) * sizeof(int64_t);
}

static inline size_t tn__cuda_list_bytes(int64_t tensors) {
    return tn__cuda_list_numbers_bytes(tensors) +
           (size_t)tensors * sizeof(tn__cuda_quantize_arguments);
}

/* What differs from one tensor of a list to the next. */
typedef struct tn__cuda_listed {
    const void *src;
    int64_t rows;
    int64_t cols;
    unsigned char *row_data;
    float *row_scale;
    unsigned char *col_data;
    float *col_scale;
} tn__cuda_listed;

/* Writes a part of a list that the host knows: a launch has at most 4 KiB of argument. The part
 * that is last also writes the number of all tiles, or 0 where the flag says to skip. */
enum { TN__LIST_PART = 64 };

typedef struct tn__cuda_list_part {
    tn__cuda_list list;
    tn__cuda_quantize_arguments all; /* what all tensors have */
    tn__cuda_list_layout layout;
    int64_t first; /* of this part in the list */
    uint32_t count;
    uint32_t first_tile[TN__LIST_PART + 1];
    tn__cuda_listed tensor[TN__LIST_PART];
} tn__cuda_list_part;

/* Writes the list of the groups of one tensor. */
typedef struct tn__cuda_group_arguments {
    tn__cuda_list list;
    tn__cuda_quantize_arguments all; /* of a group: what all have; addresses: of the first one */
    const int64_t *offsets;
    uint32_t *error;
    int64_t row_scale_floats;
    int64_t col_scale_floats;
    tn__cuda_list_layout layout;
} tn__cuda_group_arguments;

#endif
