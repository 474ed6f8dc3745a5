/* The Linear layer: y = x w^T + bias and its gradients, and weight gradients that come later.
 *
 * What is alive when, of a weight in FP8 (of a PLAIN one all operands are the caller's):
 *
 *     forward    x_q ROW   (w ROW)   [saved x COL, trainable weights only]
 *                in the last layer, while the product runs, w COL is derived
 *     backward   dy_q ROW  (w COL)   dgrad, while the next weight's COL is derived;
 *                                    then w COL is released
 *                dy_q COL  (saved x COL)                     wgrad
 *
 * Invariant: between forward and backward nothing of a frozen layer is alive but w's ROW plane,
 * and COL is alive only from just before dgrad to just after it, where w's policy says so.
 */
#include "layer_product.h"

static const tn__layer_roles roles = {.weight = "w.weight",
                                      .bias = "w.bias",
                                      .source = "w.source",
                                      .skip = "w.skip",
                                      .weight_scale = "w.weight_scale",
                                      .x_scale = "w.x_scale",
                                      .dy_scale = "w.dy_scale",
                                      .dweight = "gradient.dweight",
                                      .dbias = "gradient.dbias"};

/* Those that every call has are enough for all that is not of delayed scaling. */
static tn_status reserve_leases(tn__op_call *call, const tn__layer_product *p) {
    if (!tn__layer_is_delayed(&p->w->x_scale) && !tn__layer_is_delayed(&p->w->dy_scale))
        return TN_OK;
    return tn__op_reserve_leases(call, TN__OP_LEASES_MAX + TN__LAYER_SCALE_LEASES);
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward {
    tn_tensor_info x, y;
    tn__layer_product p;
    tn__layer_operand operand; /* x, as the product reads it */
    tn__gemm_work work;
} forward;

static tn_status check_forward(tn__op_call *call, const tn_linear_forward_args *args,
                               const tn_linear_saved *saved, forward *f) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__op_tensor(call, "x", args->x, &f->x));
    TN_TRY(tn__layer_check_common(call, &args->common));
    TN_TRY(tn__layer_check_weight(call, &roles, &args->w, &args->common, &f->p));
    TN_TRY(tn__op_tensor(call, "y", args->y, &f->y));
    TN_TRY(tn__layer_check_operand(call, &f->p, "x", &f->x, 0));
    TN_TRY(tn__op_require_float(call, "y", &f->y));
    TN_TRY(tn__op_require_shape(call, roles.weight, &f->p.weight, f->p.weight.rows, f->x.cols,
                                "its columns are x's"));
    TN_TRY(tn__op_require_shape(call, "y", &f->y, f->x.rows, f->p.weight.rows,
                                "x's rows x weight's rows"));
    TN_TRY(tn__layer_check_saved_set(call, saved, &args->common));
    return tn__layer_check_forward(call, &f->p);
}

static tn_status prepare_x(tn__op_call *call, const tn_linear_forward_args *args, forward *f) {
    tn__matrix src;
    if (f->x.format != TN_FORMAT_PLAIN)
        return tn__layer_open_callers(call, args->x, &f->x, f->p.fprop.a, 1, f->p.fprop.a, 0,
                                      &f->operand);
    if (!tn__layer_is_quantized(&f->p)) return tn__layer_read(call, args->x, &f->x, &f->operand);
    TN_TRY(tn__layer_make_x(call, &f->p, "quantized x", &f->x, &f->operand));
    TN_TRY(tn__op_lease_matrix(call, args->x, &f->x, TN_READ, &src));
    f->operand.plan.src = src;
    return TN_OK;
}

static tn_status run_forward(tn__op_call *call, const tn_linear_forward_args *args, forward *f) {
    TN_TRY(reserve_leases(call, &f->p));
    TN_TRY(prepare_x(call, args, f));
    TN_TRY(tn__layer_fprop(call, &f->p, &f->operand, &f->y, &f->work));
    TN_TRY(tn__op_lease_matrix(call, args->y, &f->y, TN_WRITE, &f->work.d));
    TN_TRY(tn__layer_read_weight(call, &f->p, &f->work));
    if (tn__layer_is_quantized(&f->p) && !f->operand.is_callers)
        TN_TRY(tn__layer_cast(call, &f->operand));
    TN_TRY(tn__layer_derive_next(call, &args->common, &f->work));
    TN_TRY(tn__gemm_launch(call, &f->work));
    return tn__layer_done(call, &f->operand, f->p.fprop.a);
}

tn_status tn_linear_forward(const tn_linear_forward_args *args, tn_linear_saved *saved,
                            tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_linear_forward", stream);
    forward f;
    TN_TRY(tn__op_init());
    TN_TRY(check_forward(&call, args, saved, &f));
    tn_status status = tn__op_finish(&call, run_forward(&call, args, &f));
    if (status != TN_OK || !saved) return status;
    *saved = (tn_linear_saved)TN_LINEAR_SAVED_INIT;
    if (f.operand.is_kept) saved->x = f.operand.tensor;
    return TN_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct backward {
    tn_tensor_info dy, x, dx;
    tn__layer_product p;
    tn__layer_gradient gradient;
    int wants_dx;
    tn_tensor saved_x; /* {0}: none */
    tn__layer_operand dy_operand, x_operand;
    tn__layer_pending pending;
} backward;

static int has_saved_x(const backward *b) { return !tn__is_no_tensor(b->saved_x); }

/* Whether the caller has the x that is quantized as in forward. */
static int has_callers_x(const backward *b) {
    return !has_saved_x(b) && b->x.format != TN_FORMAT_PLAIN;
}

/* Whether wgrad needs an x that is quantized as in forward, and was not saved. */
static int makes_x_again(const backward *b) {
    return tn__layer_reads_quantized_x(&b->p) && !has_saved_x(b) && !has_callers_x(b);
}

/* The x that wgrad starts from: what was saved, or the caller's. */
static tn_status check_x(tn__op_call *call, const tn_linear_backward_args *args, backward *b) {
    const tn__layer_product *p = &b->p;
    if (has_saved_x(b) && tn__layer_reads_quantized_x(p))
        return tn__layer_check_saved(call, p, "saved->x", b->saved_x, b->dy.rows, p->weight.cols);
    if (!tn__is_no_tensor(args->x)) TN_TRY(tn__op_tensor(call, "x", args->x, &b->x));
    if (has_callers_x(b))
        return tn__layer_check_saved(call, p, "x", args->x, b->dy.rows, p->weight.cols);
    TN_REQUIRE(!tn__layer_reads_quantized_x(p) || args->common.recompute,
               "%s: gradient.dweight needs saved->x, which is {0}: tn_linear_forward saves it if "
               "common.saved_scope is given",
               call->name);
    TN_TRY(tn__layer_check_delay(call, p, &b->gradient, makes_x_again(b)));
    TN_REQUIRE(!tn__is_no_tensor(args->x), "%s: x is {0}, but gradient.dweight needs it: %s",
               call->name, "nothing was saved");
    TN_TRY(tn__op_require_float(call, "x", &b->x));
    if (!tn__layer_reads_quantized_x(p))
        TN_TRY(tn__layer_check_same_type(call, "x", &b->x, "dy", &b->dy));
    return tn__op_require_shape(call, "x", &b->x, b->dy.rows, p->weight.cols,
                                "dy's rows x weight's columns");
}

static tn_status check_backward(tn__op_call *call, const tn_linear_backward_args *args,
                                const tn_linear_saved *saved, const tn_delayed_gradient *delayed,
                                backward *b) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    *b = (backward){.wants_dx = !tn__is_no_tensor(args->dx)};
    if (saved) b->saved_x = saved->x;
    TN_TRY(tn__op_tensor(call, "dy", args->dy, &b->dy));
    TN_TRY(tn__layer_check_common(call, &args->common));
    TN_TRY(tn__layer_check_weight(call, &roles, &args->w, &args->common, &b->p));
    TN_TRY(tn__layer_check_operand(call, &b->p, "dy", &b->dy, 1));
    TN_TRY(tn__op_require_shape(call, "dy", &b->dy, b->dy.rows, b->p.weight.rows,
                                "its columns are weight's rows"));
    if (b->wants_dx) {
        TN_TRY(tn__layer_check_dgrad(call, &b->p, "dy", &b->dy));
        TN_TRY(tn__op_tensor(call, "dx", args->dx, &b->dx));
        TN_TRY(tn__op_require_float(call, "dx", &b->dx));
        TN_TRY(tn__op_require_shape(call, "dx", &b->dx, b->dy.rows, b->p.weight.cols,
                                    "dy's rows x weight's columns"));
    }
    TN_TRY(tn__layer_check_gradient(call, &b->p, &args->gradient, delayed, &b->gradient));
    TN_REQUIRE(
        b->dy.format == TN_FORMAT_PLAIN || !b->gradient.wants_dbias,
        "%s: gradient.dbias is given, but dy (tensor %s) is quantized: its sums are taken when "
        "it is cast, as tn_bias_gradient does",
        call->name, b->dy.name);
    return b->gradient.wants_dweight ? check_x(call, args, b) : TN_OK;
}

static tn_status check_apart(const tn__op_call *call, const tn_linear_backward_args *args,
                             const backward *b) {
    const tn__op_named outputs[] = {{"dx", args->dx},
                                    {roles.dweight, args->gradient.dweight},
                                    {roles.dbias, args->gradient.dbias}};
    tn__op_named parameters[TN__LAYER_PARAMETERS];
    tn__layer_parameters(&b->p, parameters);
    return tn__op_require_apart(call, outputs, 3, parameters, TN__LAYER_PARAMETERS);
}

static tn_status ask(const tn__op_call *call, const tn_linear_backward_args *args,
                     const backward *b) {
    const tn_tensor_info *dy = &b->dy;
    if (b->wants_dx)
        TN_TRY(tn__layer_ask(call, &b->p, TN_GEMM_DGRAD, dy->rows, dy->dtype, b->dx.dtype, 0));
    if (!b->gradient.wants_dweight || b->gradient.delays) return TN_OK;
    return tn__layer_ask(call, &b->p, TN_GEMM_WGRAD, dy->rows, dy->dtype, b->gradient.dweight.dtype,
                         args->gradient.accumulate);
}

static tn_status prepare_dy(tn__op_call *call, const tn_linear_backward_args *args, backward *b) {
    const tn__layer_gradient *gradient = &b->gradient;
    if (!b->wants_dx && !gradient->wants_dweight && !gradient->wants_dbias) return TN_OK;
    TN_TRY(tn__layer_make_dy(call, &b->p, "quantized dy", args->dy, &b->dy, b->wants_dx,
                             gradient->wants_dweight, gradient->delays, &b->dy_operand));
    return tn__layer_tile_sums(call, args->common.scope, b->dy.rows, &b->pending);
}

static tn_status open_x(tn__op_call *call, const tn_linear_backward_args *args, backward *b) {
    if (!b->gradient.wants_dweight || makes_x_again(b)) return TN_OK;
    if (!tn__layer_reads_quantized_x(&b->p))
        return tn__layer_read(call, args->x, &b->x, &b->x_operand);
    if (has_callers_x(b))
        return tn__layer_open_callers(call, args->x, &b->x, tn__layer_kept_plane(&b->p), 1,
                                      TN_PLANE_COL, 0, &b->x_operand);
    return tn__layer_open(call, b->saved_x, tn__layer_kept_plane(&b->p), &b->x_operand);
}

static tn_status make_x_again(tn__op_call *call, const tn_linear_backward_args *args, backward *b) {
    const tn_plane plane = tn__layer_kept_plane(&b->p);
    tn__layer_operand *x = &b->x_operand;
    tn__matrix src;
    TN_TRY(tn__layer_make(call, &b->p, "quantized x", 0, &b->x, b->gradient.delays, plane, x));
    TN_TRY(tn__layer_lease(call, x, plane));
    TN_TRY(tn__op_lease_matrix(call, args->x, &b->x, TN_READ, &src));
    x->plan.src = src;
    return tn__layer_cast(call, x);
}

static tn_status weight_gradient(tn__op_call *call, const tn_linear_backward_args *args,
                                 backward *b) {
    if (!b->gradient.wants_dweight) return TN_OK;
    if (makes_x_again(b)) TN_TRY(make_x_again(call, args, b));
    if (b->gradient.delays) return TN_OK;
    return tn__layer_wgrad_of(call, &b->p, &b->dy_operand, &b->x_operand, args->gradient.accumulate,
                              &b->pending);
}

static tn_status run_backward(tn__op_call *call, const tn_linear_backward_args *args, backward *b) {
    TN_TRY(reserve_leases(call, &b->p));
    TN_TRY(open_x(call, args, b));
    TN_TRY(tn__layer_lease_gradients(call, &b->p, &args->gradient, &b->gradient, &b->pending));
    TN_TRY(tn__layer_require_aligned(call, &b->x_operand, &b->pending));
    TN_TRY(prepare_dy(call, args, b));
    TN_TRY(tn__layer_cast_dy(call, &b->p, &b->dy_operand, b->wants_dx, b->pending.sums.tile_sums));
    if (b->wants_dx) {
        TN_TRY(tn__layer_dgrad(call, &b->p, &b->dy_operand, args->dx, &b->dx));
        TN_TRY(tn__layer_done_with_dy(call, &b->p, &b->dy_operand, b->gradient.wants_dweight));
    } else {
        TN_TRY(tn__layer_release(call, &b->p));
    }
    TN_TRY(weight_gradient(call, args, b));
    return tn__layer_finish(call, &b->pending, 1);
}

tn_status tn_linear_backward(const tn_linear_backward_args *args, tn_linear_saved *saved,
                             tn_delayed_gradient *delayed, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_linear_backward", stream);
    backward b;
    TN_TRY(tn__op_init());
    TN_TRY(check_backward(&call, args, saved, delayed, &b));
    TN_TRY(check_apart(&call, args, &b));
    TN_TRY(ask(&call, args, &b));
    const int moves_x = b.gradient.delays && has_saved_x(&b) && tn__layer_reads_quantized_x(&b.p);
    if (saved && !moves_x) tn__op_spend(&call, &saved->x);
    TN_TRY(tn__op_finish(&call, run_backward(&call, args, &b)));
    if (b.gradient.delays)
        tn__layer_delay(&args->gradient, &b.dy_operand, &b.x_operand, moves_x, delayed);
    if (saved && moves_x) saved->x = (tn_tensor){0};
    return TN_OK;
}
