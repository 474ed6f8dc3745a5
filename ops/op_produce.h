/* What the ops that make values and cast them in one pass share: the checks and the leases of
 * their outputs, and the sums of columns that may go with them. */
#ifndef TENURE_OP_PRODUCE_H
#define TENURE_OP_PRODUCE_H

#include "op_call.h"
#include "tenure_cast.h"

/* The outputs of one call: a value [rows, cols] of a type, itself and quantized. */
typedef struct tn__produced {
    tn_tensor value; /* {0}: not wanted */
    const char *value_role;
    tn_quantized_out quantized; /* tensor {0}: not wanted */
    tn_dtype dtype;
    int64_t rows, cols;
    tn_tensor_info value_info, quantized_info; /* filled by the check, of what is wanted */
} tn__produced;

tn_status tn__op_check_produced(tn__op_call *call, tn__produced *out);

/* Leases what is wanted and describes it; all of it is an output. With a skip flag it must be
 * valid before, as nothing may be written. */
tn_status tn__op_lease_produced(tn__op_call *call, const tn__produced *out, const float *skip,
                                tn__quantize_work *cast);

/* The curve of an activation that there is. */
tn_status tn__op_activation_curve(const tn__op_call *call, tn_activation activation,
                                  tn__curve *out);

/* A PLAIN vector of `count` elements: of one type, or fp32, bf16 or fp16. */
tn_status tn__op_require_fp32_vector(tn__op_call *call, const char *role, tn_tensor tensor,
                                     int64_t count, const char *reason, tn_tensor_info *info);
tn_status tn__op_require_vector(tn__op_call *call, const char *role, tn_tensor tensor,
                                int64_t count, const char *reason, tn_tensor_info *info);

/* ---- the sums of columns -------------------------------------------------------------------- */

/* What a vector of them goes to: an output of the caller's, or nothing. */
typedef struct tn__column_sums {
    tn__matrix to;    /* 1 x columns; without data: not wanted */
    int accumulate;   /* to what it holds */
    int parts;        /* of a tile's sums: tn__column_sums_work */
    float *tile_sums; /* scratch; NULL: there are no rows */
} tn__column_sums;

/* A PLAIN vector with an element for each column, of any type; {0} is fine. */
tn_status tn__op_check_column_sums(tn__op_call *call, const char *role, tn_tensor tensor,
                                   int64_t cols, tn_tensor_info *info);
tn_status tn__op_lease_column_sums(tn__op_call *call, const char *role, tn_tensor tensor,
                                   const tn_tensor_info *info, int accumulate, const float *skip,
                                   tn__column_sums *out);

/* Scratch for the sums of the tiles of a matrix with so many rows; and when they are there, the
 * rest. Nothing if they are not wanted. */
tn_status tn__op_tile_sums(tn__op_call *call, tn_scope scope, int64_t rows, tn__column_sums *sums);
tn_status tn__op_add_up_tiles(tn__op_call *call, int64_t rows, const float *skip,
                              const tn__column_sums *sums);

/* Runs the work, and the sums of its columns if they are wanted. */
tn_status tn__op_produce(tn__op_call *call, tn__produce_work *work, tn__column_sums *sums,
                         tn_scope scope);

#endif
