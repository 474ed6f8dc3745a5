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

/* A PLAIN vector of `count` elements: of one type, or fp32, bf16 or fp16. */
tn_status tn__op_require_fp32_vector(tn__op_call *call, const char *role, tn_tensor tensor,
                                     int64_t count, const char *reason, tn_tensor_info *info);
tn_status tn__op_require_vector(tn__op_call *call, const char *role, tn_tensor tensor,
                                int64_t count, const char *reason, tn_tensor_info *info);

/* Runs the work, and the sums of its columns into `sums` if that has data. */
tn_status tn__op_produce(tn__op_call *call, tn__produce_work *work, const tn__matrix *sums,
                         tn_scope scope);

#endif
