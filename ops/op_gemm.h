/* The steps of a GEMM that tn_gemm and the layers share.
 *
 * A form says which plane each operand is read from and how that plane is seen as rows by the
 * contracted dimension (tenure_ops.h has the table):
 *
 *     form    A rows  B rows  contracted   PLAIN operands stored turned
 *     FPROP   M       N       K            none
 *     DGRAD   M       K       N            B
 *     WGRAD   N       K       M            A and B
 *
 * FP8 planes are never turned: COL is stored so that its rows are contracted along.
 */
#ifndef TENURE_OP_GEMM_H
#define TENURE_OP_GEMM_H

#include "op_call.h"
#include "tenure_lifetime.h"

/* The planes that a GEMM reads on the call's device, by the format table. TN_UNSUPPORTED names a
 * format that has no GEMM there. */
typedef struct tn__gemm_plane_pair {
    tn_plane a, b;
} tn__gemm_plane_pair;

tn_status tn__gemm_planes(const tn__op_call *call, tn_gemm_form form, tn_format a, tn_format b,
                          tn__gemm_plane_pair *out);

/* An FP8 plane as an operand. */
tn__operand tn__gemm_operand(tn_format format, const tn_plane_view *view);

/* work->d and work->accumulate, for operands that are in it already: what scratch it needs, with
 * d's shape but not its memory, so that it can be made before the outputs are leased. */
tn_status tn__gemm_scratch(tn__op_call *call, tn_scope scope, const tn_tensor_info *d,
                           tn__gemm_work *work);

/* Puts it on the call's stream: nothing without elements, a fill for nothing to contract. */
tn_status tn__gemm_launch(tn__op_call *call, const tn__gemm_work *work);

#endif
