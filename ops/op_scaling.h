/* Tensors of factors and of amax histories, as delayed scaling keeps them. */
#ifndef TENURE_OP_SCALING_H
#define TENURE_OP_SCALING_H

#include "op_call.h"

/* [length] of one tensor, or [length, count] of several. */
typedef struct tn__history {
    int64_t length;
    int64_t count;
} tn__history;

/* PLAIN fp32. */
tn_status tn__op_require_fp32(const tn__op_call *call, const char *role,
                              const tn_tensor_info *info);

/* What the call's amax_history is. */
tn_status tn__op_history(tn__op_call *call, tn_tensor tensor, tn_tensor_info *info,
                         tn__history *out);

/* `slot` is one of `count`. */
tn_status tn__op_require_slot(const tn__op_call *call, const char *role, const tn_tensor_info *info,
                              int64_t slot, int64_t count);

#endif
