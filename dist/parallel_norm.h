/* The norm that a parallel layer begins with, of this rank's rows, and its gradient. */
#ifndef TENURE_PARALLEL_NORM_H
#define TENURE_PARALLEL_NORM_H

#include "parallel_product.h"

/* What forward makes: statistics {0} where nothing is saved, x as the product reads it. */
typedef struct tn__parallel_norm {
    tn_tensor mean, rstd;
    tn_tensor x;
} tn__parallel_norm;

/* Makes it: with COL where `col` is set, kept where is_kept is; statistics kept, in scratch or not
 * at all. */
typedef enum tn__statistics {
    TN__STATISTICS_NONE = 0,
    TN__STATISTICS_SCRATCH,
    TN__STATISTICS_KEPT
} tn__statistics;

typedef struct tn__parallel_norm_wants {
    int row, col, is_kept; /* of x, what the product reads of it */
    tn__statistics statistics;
} tn__parallel_norm_wants;

tn_status tn__parallel_norm_forward(tn__parallel *p, const tn__parallel_weight *w,
                                    const tn_layer_norm *norm, const tn__parallel_norm_wants *wants,
                                    tn__parallel_norm *out);

/* What forward makes of it, as the call's arguments say. */
tn__parallel_norm_wants tn__parallel_norm_wants_of(const tn__parallel *p,
                                                   const tn__parallel_weight *w);

/* In a backward: the statistics and x from `saved`, or made again; x {0} if it is not wanted. */
tn_status tn__parallel_norm_again(tn__parallel *p, const tn__parallel_weight *w,
                                  const tn_layer_norm_gradient *norm,
                                  const tn__parallel_norm *saved,
                                  const tn__parallel_norm_wants *wants, tn__parallel_norm *out);

static inline int tn__parallel_wants_norm(const tn_layer_norm_gradient *norm) {
    return tn__is_given(norm->dx) || tn__is_given(norm->dgamma) || tn__is_given(norm->dbeta);
}

/* The gradient of the norm's value: scratch of this rank's rows, in x's type. */
tn_status tn__parallel_norm_make_dn(tn__parallel *p, const tn_layer_norm_gradient *norm,
                                    tn_tensor *out);

/* dx, and the sums of dgamma and dbeta; dn ends. */
tn_status tn__parallel_norm_backward(tn__parallel *p, const tn_layer_norm_gradient *norm,
                                     const tn__parallel_norm *from, tn_tensor dn);

#endif
