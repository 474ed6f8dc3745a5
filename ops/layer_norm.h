/* The norm that a layer begins with, forward, made again, and backward. */
#ifndef TENURE_LAYER_NORM_H
#define TENURE_LAYER_NORM_H

#include "layer_produce.h"
#include "op_norm.h"

/* ---- forward, and again in a backward that recomputes ---------------------------------------- */

typedef struct tn__layer_norm {
    tn_norm_args args;
    tn__norm norm;
    tn__layer_made made; /* the value, and what the product reads */
    tn__norm_work work;
} tn__layer_norm;

tn_status tn__layer_check_norm(tn__op_call *call, const tn_layer_norm *norm,
                               const tn_layer_common *common, tn__layer_norm *out);

/* What the product `p` is to read of it in forward; statistics: where they go, NOWHERE is scratch
 * that nobody sees. */
tn__layer_wants tn__layer_norm_wants(const tn__layer_product *p, tn_tensor callers_value);

/* All that the work needs; then the work. */
tn_status tn__layer_prepare_norm(tn__op_call *call, const tn__layer_product *p,
                                 const tn__layer_wants *wants, tn__layer_home statistics,
                                 tn__layer_norm *norm);
tn_status tn__layer_run_norm(tn__op_call *call, tn__layer_norm *norm);

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct tn__layer_norm_back {
    const tn_layer_norm_gradient *of;
    tn_norm_backward_args args;
    tn__norm_gradient gradient;
    tn_tensor_info normed; /* the caller's, if `normed` was given */
    int is_wanted;         /* any of its gradients */
    tn__layer_norm again;  /* of a backward that recomputes */
} tn__layer_norm_back;

/* mean and rstd are what forward has saved. */
tn_status tn__layer_check_norm_back(tn__op_call *call, const tn_layer_norm_gradient *of,
                                    const tn_layer_common *common, tn_tensor mean, tn_tensor rstd,
                                    tn__layer_norm_back *out);

/* Its outputs and its parameters, for tn__op_require_apart. */
enum { TN__NORM_OUTPUTS = 3, TN__NORM_PARAMETERS = 2 };
void tn__layer_norm_named(const tn_layer_norm_gradient *of, tn__op_named outputs[TN__NORM_OUTPUTS],
                          tn__op_named parameters[TN__NORM_PARAMETERS]);

/* Whether w's gradient is of a PLAIN normed value that the caller holds. */
static inline int tn__layer_has_callers_normed(const tn__layer_norm_back *back,
                                               const tn__layer_product *p) {
    return !tn__layer_reads_quantized_x(p) && !tn__is_no_tensor(back->of->normed);
}

/* Of an operand that forward has saved for w's gradient, [rows, cols]; or of what takes its place.
 * `made_again`: whether it is to be. */
tn_status tn__layer_check_kept(tn__op_call *call, const tn__layer_product *p, const char *role,
                               tn_tensor saved, const tn_tensor_info *shape, int *made_again);

/* Leases the outputs of dgamma and dbeta, into two. */
tn_status tn__layer_lease_norm_sums(tn__op_call *call, const tn__layer_norm_back *back,
                                    tn__layer_pending sums[2]);

/* What forward made, in scratch or kept: with statistics for tn__layer_back_norm. */
tn_status tn__layer_norm_again(tn__op_call *call, const tn__layer_product *p,
                               const tn__layer_wants *wants, tn__layer_norm_back *back);

/* dx and the tiles of dgamma and dbeta from dn, scratch that ends here. */
tn_status tn__layer_back_norm(tn__op_call *call, tn__layer_norm_back *back, tn_tensor dn,
                              tn__layer_pending sums[2]);

#endif
