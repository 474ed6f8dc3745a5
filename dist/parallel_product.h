/* The products of parallel layers, and what they read of activations.
 *
 *     column-parallel   w [N / n, K]     x, dx: this rank's rows       y, dy: all rows
 *         forward       x ROW gathered, fprop
 *         backward      dgrad makes partial sums of all rows, reduced to this rank's dx
 *                       x COL gathered, wgrad
 *     row-parallel      w [N, K / n]     x, dx: all rows               y, dy: this rank's rows
 *         forward       fprop makes partial sums of all rows, reduced to this rank's y
 *         backward      dy ROW gathered, dgrad; dy COL gathered, wgrad
 *
 * Invariant: as in a layer of one rank, what adds to a gradient comes after all else.
 */
#ifndef TENURE_PARALLEL_PRODUCT_H
#define TENURE_PARALLEL_PRODUCT_H

#include "parallel_call.h"

typedef struct tn__parallel_weight {
    const char *role; /* in errors */
    const tn_layer_weight *w;
    tn_tensor_info info;
    int is_quantized;        /* products are of 1D operands; else of PLAIN ones */
    int keeps_x;             /* a forward keeps the quantized x for wgrad */
    tn_dtype gradient_dtype; /* of a quantized dy */
} tn__parallel_weight;

tn_status tn__parallel_check_weight(const tn__parallel *p, const char *role,
                                    const tn_layer_weight *w, tn__parallel_weight *out);
tn_status tn__parallel_check_gradient(const tn__parallel *p, const tn__parallel_weight *w,
                                      const tn_layer_gradient *gradient,
                                      const tn_delayed_gradient *delayed);
tn_status tn__parallel_check_shape(const tn__parallel *p, const char *role, tn_tensor tensor,
                                   int64_t rows, int64_t cols);

/* Rows of this rank, where all ranks' are known: of a backward whose dx may not be wanted. */
tn_status tn__parallel_own_rows(const char *name, const tn_parallel *told, int64_t total,
                                int64_t *out);

/* ---- operands -------------------------------------------------------------------------------- */

/* What products read of one activation: of a PLAIN recipe both are the activation itself. They are
 * two tensors where the rows of COL are in ranks' tiles and those of ROW are not. */
typedef struct tn__parallel_operand {
    tn_tensor row; /* of fprop and dgrad */
    tn_tensor col; /* of wgrad */
} tn__parallel_operand;

typedef struct tn__parallel_wants {
    const char *name;
    tn_dtype dtype;
    int row, col;
    int is_kept; /* what has col, which is then wanted */
} tn__parallel_wants;

/* The cast of this rank's rows, or of all ranks'; with the sums over the rows if that is given. */
tn_status tn__parallel_cast(tn__parallel *p, const tn__parallel_weight *w, tn_tensor src,
                            const tn__parallel_wants *wants, tn_tensor sums, tn_tensor *out);
tn_status tn__parallel_cast_whole(tn__parallel *p, const tn__parallel_weight *w, tn_tensor src,
                                  const tn__parallel_wants *wants, tn_tensor sums,
                                  tn__parallel_operand *out);

/* COL of a PLAIN tensor of all ranks' rows, which are not in whole tiles. */
tn_status tn__parallel_cast_parts(tn__parallel *p, const tn__parallel_weight *w, tn_tensor src,
                                  const tn__parallel_wants *wants, tn_tensor *out);

/* A 1D tensor of the recipe. */
tn_status tn__parallel_quantized(tn__parallel *p, const tn__parallel_weight *w,
                                 const tn__parallel_wants *wants, int64_t rows, int64_t cols,
                                 tn_tensor *out);

/* ROW has been read for the last time. */
tn_status tn__parallel_done_with_row(tn__parallel *p, const tn__parallel_operand *operand);

/* ---- products -------------------------------------------------------------------------------- */

/* x: this rank's rows as the product reads them. */
tn_status tn__column_forward(tn__parallel *p, const tn__parallel_weight *w, tn_tensor x,
                             tn_tensor y);

/* Of a quantized x, after it: what backward gathers, or has gathered already; {0}: nothing. */
tn_status tn__column_keep(tn__parallel *p, const tn__parallel_weight *w, tn_tensor x,
                          tn_tensor *out);

/* x of all ranks for wgrad, from what column_keep has left. */
tn_status tn__column_gather_x(tn__parallel *p, const tn__parallel_weight *w, tn_tensor kept,
                              tn_tensor *out);

/* dx of this rank's rows, from dy of all; it only lets go of the weight's COL if dx is {0}. */
tn_status tn__column_dgrad(tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy,
                           tn_tensor dx);

/* x: of all rows, as the product reads them. */
tn_status tn__row_forward(tn__parallel *p, const tn__parallel_weight *w, tn_tensor x, tn_tensor y);

/* dy of all ranks from this rank's, with sums of its own rows. */
tn_status tn__row_gather_dy(tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy,
                            const tn__parallel_wants *wants, tn_tensor sums,
                            tn__parallel_operand *out);
tn_status tn__row_dgrad(tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy, tn_tensor dx);

/* Adds the weight's gradient, or leaves it for later. */
tn_status tn__parallel_wgrad(tn__parallel *p, tn_tensor dy, tn_tensor x,
                             const tn_layer_gradient *gradient, tn_delayed_gradient *delayed);

#endif
