/* The steps of the norms and of their gradients, which the layers take too. */
#ifndef TENURE_OP_NORM_H
#define TENURE_OP_NORM_H

#include "op_produce.h"
#include "tenure_train.h"

/* Names of the operands in errors: an op's own, or those in a layer's arguments. */
typedef struct tn__norm_roles {
    const char *norm, *epsilon, *x, *residual, *sum, *gamma, *beta;
    const char *added, *dx, *dgamma, *dbeta; /* of a gradient */
} tn__norm_roles;

typedef struct tn__norm {
    tn_tensor_info x, residual, sum, gamma, beta, mean, rstd;
    tn__produced out;
} tn__norm;

/* Whether planes are wanted with blocks of 128 rows, for which rows are known first. */
static inline int tn__norm_needs_rows_first(const tn__quantize_work *cast) {
    return cast->src.rows > 0 && cast->src.cols > 0 &&
           (cast->has_col || (cast->has_row && cast->format == TN_FORMAT_FP8_BLOCK_2D));
}

/* All but that there is an output; `out` can be given another one before the leases. */
tn_status tn__norm_check(tn__op_call *call, const tn_norm_args *args, const tn__norm_roles *roles,
                         tn__norm *out);
tn_status tn__norm_lease(tn__op_call *call, const tn_norm_args *args, const tn__norm *n,
                         tn__norm_work *work);

/* The work; nothing without elements. */
tn_status tn__norm_run(tn__op_call *call, const tn_norm_args *args, const tn__norm *n,
                       tn__norm_work *work);

typedef struct tn__norm_gradient {
    tn_tensor_info x, dy, added, mean, rstd, gamma, dgamma, dbeta;
    tn__produced out;
} tn__norm_gradient;

/* All but dy, the statistics, and that there is an output. */
tn_status tn__norm_gradient_check(tn__op_call *call, const tn_norm_backward_args *args,
                                  const tn__norm_roles *roles, tn__norm_gradient *out);

/* What is read, and scratch for the means of the rows. */
tn_status tn__norm_gradient_lease(tn__op_call *call, const tn_norm_backward_args *args,
                                  const tn__norm_gradient *n, tn__norm_gradient_work *work);

/* How many make a tile's sums, once the outputs are there: before scratch is made for the sums. */
tn_status tn__norm_gradient_split(tn__op_call *call, tn__norm_gradient_work *work,
                                  tn__column_sums *gamma, tn__column_sums *beta);

/* If planes are wanted, scratch to make all from one read; `work->cast` is leased. */
tn_status tn__norm_gradient_lease_parts(tn__op_call *call, tn_scope scope,
                                        tn__norm_gradient_work *work);

/* dx and the sums of tiles; nothing without elements. */
tn_status tn__norm_gradient_run(tn__op_call *call, const tn__norm_gradient_work *work);

#endif
