/* What LayerNormMLP's two directions share: its products, and the activation between them.
 *
 *     n = norm(x)     h = n w1^T + bias1     a = act(h)     y = a w2^T + bias2
 *
 * What is alive when, of weights in FP8 blocks (docs/layers.md has the other recipes):
 *
 *     forward    mean, rstd            saved
 *                n_q ROW               product 1; n_q ROW ends  [saved n_q COL, if w1 is trained]
 *                h                     the activation; h is saved
 *                a_q ROW               product 2; a_q ROW ends  [saved a_q COL, if w2 is trained]
 *     backward   dy_q ROW, (w2 COL)    da; then w2 COL and dy_q ROW end
 *                da, (h)               dh_q ROW, COL; then da ends
 *                dh_q ROW, (w1 COL)    dn; then w1 COL and dh_q ROW end
 *                dn, (x)               dx; then dn ends
 *                dy_q COL, (a_q COL), dh_q COL, (n_q COL)     both weights' gradients
 *
 * Invariant: nothing is added to a gradient before the last row, when all else is done.
 */
#ifndef TENURE_LAYER_NORM_MLP_H
#define TENURE_LAYER_NORM_MLP_H

#include "layer_norm.h"

/* Leases that a call may hold in its life. */
enum { TN__MLP_LEASES_MAX = 96 + TN__LAYER_SCALE_LEASES };

extern const tn__layer_roles tn__mlp_roles[2];

/* An activation, of h to what product 2 reads. */
typedef struct tn__layer_activation {
    tn__curve curve;
    int is_gated;
    tn_tensor_info shape; /* of act(h), in h's type */
    tn__layer_made made;
    tn__produce_work work;
} tn__layer_activation;

/* The two weights go together, and take an x of this shape and type. */
tn_status tn__mlp_check_weights(tn__op_call *call, const tn_layer_weight *w1,
                                const tn_layer_weight *w2, int gated, const tn_layer_common *common,
                                const tn_layer_common *common2, tn__layer_product p[2]);
tn_status tn__mlp_check_activation(const tn__op_call *call, tn_activation activation, int gated,
                                   const tn__layer_product p[2], const tn_tensor_info *x,
                                   tn__layer_activation *out);

/* h [rows, w1's rows] of x's type, so far in name. */
static inline tn_tensor_info tn__mlp_hidden(const tn__layer_product *p1, const tn_tensor_info *x) {
    tn_tensor_info info = *x;
    info.cols = p1->weight.rows;
    return info;
}

/* From h, which is under a lease; makes what is wanted. */
tn_status tn__layer_prepare_activation(tn__op_call *call, const tn__layer_product *p2,
                                       const tn__matrix *hidden, const tn__layer_wants *wants,
                                       tn__layer_activation *activation);
tn_status tn__layer_run_activation(tn__op_call *call, tn__layer_activation *activation);

#endif
