/* Groups: matrices of as many columns each that lie one behind the other in the rows of one tensor.
 *
 * Where they begin only the device knows, so the host can only bound what they need. What is here
 * is exact for one group and the bound for all, for the fronts, the host kernels and the tests.
 */
#ifndef TENURE_OP_GROUPED_H
#define TENURE_OP_GROUPED_H

#include "op_call.h"

/* The table of offsets and the word of errors: checked, giving the count, and leased for a call.
 * The word is updated, so it is leased last: a call that fails before has left it valid. */
tn_status tn__op_check_groups(tn__op_call *call, tn_tensor offsets, tn_tensor error,
                              tn__groups *groups);
tn_status tn__op_lease_offsets(tn__op_call *call, tn_tensor offsets, tn__groups *groups);
tn_status tn__op_lease_error(tn__op_call *call, tn_tensor error, tn__groups *groups);

tn_status tn__op_check_error(tn__op_call *call, tn_tensor error);

/* A view may begin anywhere in the bytes of its base. */
tn_status tn__op_require_aligned(const tn__op_call *call, const char *role, const void *address,
                                 size_t alignment);

/* `tensor` is PLAIN of that type; a role for the message. */
tn_status tn__op_require_plain(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, tn_dtype dtype);

/* No tensor has two roles; {0} counts as none. Told before anything is leased, so that a refusal
 * leaves the outputs valid. */
tn_status tn__op_require_distinct(const tn__op_call *call, const tn_tensor *tensors, int count);

/* What the groups can need at most where all of their rows together are `rows`: the sum over
 * groups of ceil(rows / unit). */
int64_t tn__groups_units_max(int64_t groups, int64_t rows, int64_t unit);

/* Rounded up, also of what no tensor has: sizes that a caller gives are counted before refused. */
static inline int64_t tn__units_of(int64_t extent, int64_t unit) {
    return extent / unit + (extent % unit != 0);
}

/* fp32 scales, with padding, of one group of rows x cols. */
static inline int64_t tn__group_scale_floats(tn_format format, tn_plane plane, int64_t rows,
                                             int64_t cols) {
    int64_t across = tn__units_of(cols, 128), down = tn__units_of(rows, 128);
    if (format == TN_FORMAT_FP8_TENSOR) return rows > 0 && cols > 0 ? 4 : 0;
    if (format == TN_FORMAT_FP8_BLOCK_1D) {
        return plane == TN_PLANE_ROW ? across * 4 * tn__units_of(rows, 4)
                                     : down * 4 * tn__units_of(cols, 4);
    }
    return plane == TN_PLANE_ROW ? down * 4 * tn__units_of(across, 4)
                                 : across * 4 * tn__units_of(down, 4);
}

#endif
