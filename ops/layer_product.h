/* The steps of a layer's products with one weight, which all layers are made of.
 *
 *     forward    check_weight, make_x, [a producer or a cast fills it], fprop, launch, end_x
 *     backward   check_weight, check_gradient, make_dy, cast_dy, dgrad,
 *                wgrad (prepares), bias_sums (prepares), finish (launches both)
 *
 * Which plane each reads the format table says; the recipe says what x and dy become:
 *
 *     weight          x and dy
 *     PLAIN           themselves
 *     FP8_BLOCK_2D    FP8_BLOCK_1D
 *     FP8_TENSOR      FP8_TENSOR
 *
 * Invariant: what can fail but for the driver comes before the first launch that adds to a gradient
 * of the caller's: of products that is the last launch, of sums over rows the one that adds up
 * tiles, and both are left to tn__layer_finish.
 */
#ifndef TENURE_LAYER_PRODUCT_H
#define TENURE_LAYER_PRODUCT_H

#include "op_cast.h"
#include "op_gemm.h"
#include "op_produce.h"
#include "tenure_layers.h"

/* Leases that delayed scaling takes of a call at most: of two products, x again and dy. */
enum { TN__LAYER_SCALE_LEASES = 8 };

static inline int tn__layer_is_delayed(const tn_layer_scale *scale) {
    return !tn__is_no_tensor(scale->scale) || !tn__is_no_tensor(scale->amax_history);
}

/* Names of one product's operands in errors. */
typedef struct tn__layer_roles {
    const char *weight, *bias, *source, *skip, *dweight, *dbias;
    const char *weight_scale, *x_scale, *dy_scale;
} tn__layer_roles;

typedef struct tn__layer_product {
    const tn__layer_roles *roles;
    const tn_layer_weight *w;
    const tn_layer_common *common;
    tn_tensor_info weight, bias, source, skip;
    tn_format operand;               /* what x and dy become */
    tn_dtype gradient_dtype;         /* of a quantized dy */
    tn_backward_precision precision; /* AS_FORWARD where the recipe is PLAIN */
    tn__gemm_plane_pair fprop;       /* x, w */
    tn__gemm_plane_pair dgrad;       /* dy, w */
    tn__gemm_plane_pair wgrad;       /* dy, x */
} tn__layer_product;

/* A matrix as products read it: PLAIN as it is, or quantized. */
typedef struct tn__layer_operand {
    tn_tensor tensor;
    tn_tensor_info info;
    int is_callers;              /* quantized by the caller: read, and left as it is */
    int is_kept;                 /* beyond the call, if it succeeds */
    tn_plane kept_plane;         /* of it: others are dropped when they have been read */
    const tn_layer_scale *scale; /* delayed scaling; NULL: by its own amax */
    tn__quantize_plan plan;      /* PLAIN: src alone; else the views, under the call's leases */
} tn__layer_operand;

/* ---- checks ---------------------------------------------------------------------------------- */

tn_status tn__layer_check_common(tn__op_call *call, const tn_layer_common *common);

/* Delayed scaling of `count` operands, in as many slots from scale->slot on, beside the weight that
 * p says, which must be FP8_TENSOR. */
tn_status tn__layer_check_scale(tn__op_call *call, const tn_tensor_info *weight, const char *role,
                                const tn_layer_scale *scale, int64_t count);

/* The weight whose plane is derived ahead, and the stream for it, as fields of `role`: without
 * another stream it would be derived where the product waits for it. */
tn_status tn__layer_check_ahead(tn__op_call *call, const char *role, tn_tensor next_weight,
                                tn_stream side);

/* What x and dy become; -1 if a layer takes no such weight. */
int tn__layer_operand_of(tn_format weight);

/* A forward that saves has somewhere to write the handles. */
tn_status tn__layer_check_saved_set(const tn__op_call *call, const void *saved,
                                    const tn_layer_common *common);

/* The weight, of any shape, and its recipe. */
tn_status tn__layer_check_weight(tn__op_call *call, const tn__layer_roles *roles,
                                 const tn_layer_weight *w, const tn_layer_common *common,
                                 tn__layer_product *out);

/* What its product takes as x, or as dy: PLAIN, and of weight's type where that is PLAIN. */
tn_status tn__layer_check_input(const tn__op_call *call, const tn__layer_product *p,
                                const char *role, const tn_tensor_info *info);

/* The same, or what the caller has quantized to the recipe's format: x as E4M3, dy as either type,
 * which is then the product's. */
tn_status tn__layer_check_operand(const tn__op_call *call, tn__layer_product *p, const char *role,
                                  const tn_tensor_info *info, int is_gradient);

/* The product's parameters, for tn__op_require_apart. */
enum { TN__LAYER_PARAMETERS = 3 };
void tn__layer_parameters(const tn__layer_product *p, tn__op_named out[TN__LAYER_PARAMETERS]);

/* Bias and source of a forward; they are no operands of a backward. */
tn_status tn__layer_check_forward(tn__op_call *call, tn__layer_product *p);

/* The gradients that are asked for, and that what they need is there. */
typedef struct tn__layer_gradient {
    tn_tensor_info dweight, dbias;
    int wants_dweight, wants_dbias, delays;
} tn__layer_gradient;

tn_status tn__layer_check_gradient(tn__op_call *call, const tn__layer_product *p,
                                   const tn_layer_gradient *gradient,
                                   const tn_delayed_gradient *delayed, tn__layer_gradient *out);

/* That there is a scope for an operand of a delayed gradient which the call itself makes. */
tn_status tn__layer_check_delay(const tn__op_call *call, const tn__layer_product *p,
                                const tn__layer_gradient *gradient, int is_made);

/* That a product with dy of this type goes together with the weight, for dgrad. */
tn_status tn__layer_check_dgrad(tn__op_call *call, tn__layer_product *p, const char *role,
                                const tn_tensor_info *dy);

/* Two operands of a product that does not quantize them. */
tn_status tn__layer_check_same_type(const tn__op_call *call, const char *role,
                                    const tn_tensor_info *info, const char *other_role,
                                    const tn_tensor_info *other);

/* A saved operand, as forward has made it: [rows, cols]. */
tn_status tn__layer_check_saved(tn__op_call *call, const tn__layer_product *p, const char *role,
                                tn_tensor saved, int64_t rows, int64_t cols);

/* Whether the engine that the environment pins takes the product, of m rows, into a d of that type;
 * plain: the type of operands that are not quantized. Asked of all products of a call before it
 * puts anything on the stream: what one refuses later, others have written by then. */
tn_status tn__layer_ask(const tn__op_call *call, const tn__layer_product *p, tn_gemm_form form,
                        int64_t m, tn_dtype plain, tn_dtype d, int accumulate);

/* ---- what is saved --------------------------------------------------------------------------- */

static inline int tn__layer_is_quantized(const tn__layer_product *p) {
    return p->operand != TN_FORMAT_PLAIN;
}

/* Whether a gradient of the weight may be asked for after this forward. */
static inline int tn__layer_is_trained(const tn__layer_product *p) {
    return p->common->saved_scope.value != 0 && !p->weight.frozen;
}

/* Whether forward keeps the quantized x, for wgrad. */
static inline int tn__layer_keeps_x(const tn__layer_product *p) {
    return tn__layer_is_trained(p) && tn__layer_is_quantized(p) && !p->common->recompute &&
           p->precision != TN_BACKWARD_HIGH_PRECISION;
}

/* Whether the products of backward are of quantized operands. */
static inline int tn__layer_multiplies_quantized(const tn__layer_product *p) {
    return tn__layer_is_quantized(p) && p->precision == TN_BACKWARD_AS_FORWARD;
}

/* Whether backward reads the x that was quantized, not the x that there was before. */
static inline int tn__layer_reads_quantized_x(const tn__layer_product *p) {
    return tn__layer_is_quantized(p) && p->precision != TN_BACKWARD_HIGH_PRECISION;
}

/* The plane of it that wgrad starts from. */
static inline tn_plane tn__layer_kept_plane(const tn__layer_product *p) {
    return p->precision == TN_BACKWARD_DEQUANTIZED ? p->fprop.a : p->wgrad.b;
}

/* ---- operands -------------------------------------------------------------------------------- */

/* A PLAIN tensor under READ. */
tn_status tn__layer_read(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                         tn__layer_operand *out);

/* A saved quantized one, under READ of that plane. */
tn_status tn__layer_open(tn__op_call *call, tn_tensor tensor, tn_plane plane,
                         tn__layer_operand *out);

/* The caller's quantized one, under READ of as many of two planes as are wanted. */
tn_status tn__layer_open_callers(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                                 tn_plane first, int wants_first, tn_plane second, int wants_second,
                                 tn__layer_operand *out);

/* What forward has kept for wgrad: PLAIN, or the plane that it kept. */
tn_status tn__layer_open_kept(tn__op_call *call, const tn__layer_product *p, tn_tensor tensor,
                              tn__layer_operand *out);

/* The quantized copy of x, or of dy (is_gradient), without planes yet, of what has of's shape:
 * scratch of the call, or kept. */
tn_status tn__layer_make(tn__op_call *call, const tn__layer_product *p, const char *name,
                         int is_gradient, const tn_tensor_info *of, int is_kept,
                         tn_plane kept_plane, tn__layer_operand *out);

/* Leases what delayed scaling names, NULL: nothing, for as long as a cast takes to be put on the
 * stream: other casts of the call and other tensors share it. The end takes what became of the
 * cast, and leaves the amaxes valid whatever that is: made again, it collects the same. */
typedef struct tn__layer_scaling {
    int first, end; /* of the call's leases */
    const float *factor;
    float *amax; /* both at the slot; NULL: not given */
} tn__layer_scaling;
tn_status tn__layer_scaling_begin(tn__op_call *call, const tn_layer_scale *scale,
                                  tn__layer_scaling *out);
tn_status tn__layer_scaling_end(tn__op_call *call, const tn__layer_scaling *scaling,
                                tn_status status);

/* Puts the cast of a copy on the stream, from plan.src to the planes that are leased. */
tn_status tn__layer_cast(tn__op_call *call, const tn__layer_operand *operand);

/* A plane of it, to be written. */
tn_status tn__layer_lease(tn__op_call *call, tn__layer_operand *operand, tn_plane plane);

/* The quantized x of a forward, its planes leased. */
tn_status tn__layer_make_x(tn__op_call *call, const tn__layer_product *p, const char *name,
                           const tn_tensor_info *of, tn__layer_operand *out);

/* Nothing on the stream reads that plane of a copy after what is there now: it goes, unless it is
 * the one that is kept. */
tn_status tn__layer_done(tn__op_call *call, tn__layer_operand *operand, tn_plane plane);

/* dgrad has run, and after it only the weight's gradient reads dy, if that is wanted. */
tn_status tn__layer_done_with_dy(tn__op_call *call, const tn__layer_product *p,
                                 tn__layer_operand *dy, int for_wgrad);

/* A PLAIN copy in scratch of the values of `plane`, of that type. */
tn_status tn__layer_dequantize(tn__op_call *call, tn_scope scope, const tn__layer_operand *of,
                               tn_plane plane, tn_dtype dtype, tn__layer_operand *out);

/* As an operand of the product. */
tn__operand tn__layer_as(const tn__layer_operand *operand, tn_plane plane, int is_turned);

/* ---- products -------------------------------------------------------------------------------- */

/* work, but for the weight's and d's addresses, and its scratch. */
tn_status tn__layer_fprop(tn__op_call *call, const tn__layer_product *p, const tn__layer_operand *x,
                          const tn_tensor_info *y, tn__gemm_work *work);

/* The weight quantized from its source if there is one, and leased. */
tn_status tn__layer_read_weight(tn__op_call *call, const tn__layer_product *p, tn__gemm_work *work);

/* The next weight's plane on the other stream, beside the product that is launched next. */
tn_status tn__layer_derive_next(tn__op_call *call, const tn_layer_common *common,
                                tn__gemm_work *beside);
tn_status tn__layer_derive_ahead(tn__op_call *call, tn_tensor weight, tn_stream side,
                                 tn__gemm_work *beside);

/* Puts the product on the stream, and frees its scratch. */
tn_status tn__layer_launch(tn__op_call *call, const tn__gemm_work *work);

/* dx = dy w, the next weight's plane while it runs; then w's COL is released. */
tn_status tn__layer_dgrad(tn__op_call *call, const tn__layer_product *p,
                          const tn__layer_operand *dy, tn_tensor dx, const tn_tensor_info *dx_info);

/* The part of it that a layer without dgrad does. */
tn_status tn__layer_release(const tn__op_call *call, const tn__layer_product *p);

/* dy for the products that are wanted, under READ, with its quantized planes leased; is_kept: for a
 * delayed gradient. */
tn_status tn__layer_make_dy(tn__op_call *call, const tn__layer_product *p, const char *name,
                            tn_tensor dy, const tn_tensor_info *info, int for_dgrad, int for_wgrad,
                            int is_kept, tn__layer_operand *out);

/* Puts the cast on the stream, and with it the sums of dy's tiles if `sums` has scratch. With dgrad
 * to come, the stream waits before it for the weight's plane, if that was derived ahead. */
tn_status tn__layer_cast_dy(tn__op_call *call, const tn__layer_product *p,
                            const tn__layer_operand *dy, int for_dgrad, float *tile_sums);

/* ---- gradients ------------------------------------------------------------------------------- */

/* What is left to launch of one product's gradients. Their outputs are leased before anything runs,
 * but held, so that they are what they were unless these launches have begun. */
typedef struct tn__layer_pending {
    tn__matrix dweight; /* without data: not wanted, or without elements */
    int has_product;
    tn__gemm_work product;
    tn__column_sums sums;
    int64_t sum_rows;
} tn__layer_pending;

/* Scratch for the sums of the tiles of so many rows, if the sums over them are wanted. */
tn_status tn__layer_tile_sums(tn__op_call *call, tn_scope scope, int64_t rows,
                              tn__layer_pending *pending);

/* Leases the outputs. */
tn_status tn__layer_lease_gradients(tn__op_call *call, const tn__layer_product *p,
                                    const tn_layer_gradient *gradient,
                                    const tn__layer_gradient *checked, tn__layer_pending *out);
tn_status tn__layer_lease_dweight(tn__op_call *call, tn_tensor dweight, const tn_tensor_info *info,
                                  int accumulate, tn__layer_pending *out);
tn_status tn__layer_lease_sums(tn__op_call *call, const char *role, tn_tensor tensor,
                               const tn_tensor_info *info, int accumulate, tn__layer_pending *out);

/* What of the weight's gradient is the caller's, x as it is and dweight: whether the device takes
 * their addresses. Asked before anything runs. */
tn_status tn__layer_require_aligned(const tn__op_call *call, const tn__layer_operand *x,
                                    const tn__layer_pending *pending);

/* dweight = dy^T x or added to it: all but the launch. */
tn_status tn__layer_wgrad(tn__op_call *call, tn_scope scope, const tn__layer_operand *dy,
                          const tn__layer_operand *x, tn__gemm_plane_pair planes, int accumulate,
                          tn__layer_pending *pending);

/* The same of a backward's operands: x dequantized first where the precision says so. */
tn_status tn__layer_wgrad_of(tn__op_call *call, const tn__layer_product *p,
                             const tn__layer_operand *dy, const tn__layer_operand *x,
                             int accumulate, tn__layer_pending *pending);

/* What a backward leaves for tn_weight_gradient; is_saved_x: x was in the layer's saved set. */
void tn__layer_delay(const tn_layer_gradient *gradient, const tn__layer_operand *dy,
                     const tn__layer_operand *x, int is_saved_x, tn_delayed_gradient *out);

/* Launches all of it, after everything else has been done. */
tn_status tn__layer_finish(tn__op_call *call, const tn__layer_pending *pending, int count);

#endif
