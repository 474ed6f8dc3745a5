/* LayerNormLinear: y = norm(x) w^T + bias and its gradients.
 *
 * What is alive when, of a weight in FP8 blocks (docs/layers.md has the other recipes):
 *
 *     forward    mean, rstd   saved
 *                n_q ROW      fprop         [saved n_q COL, trainable weights only]
 *     backward   dy_q ROW     dgrad: dn, scratch, while w's COL is there
 *                dn, x        the norm's gradient; dn ends
 *                dy_q COL     (saved n_q COL)   wgrad
 *
 * where n is the norm's value, which is there in high precision only if somebody reads it so.
 */
#include "layer_norm.h"

#include <string.h>

static const tn__layer_roles roles = {.weight = "w.weight",
                                      .bias = "w.bias",
                                      .source = "w.source",
                                      .skip = "w.skip",
                                      .weight_scale = "w.weight_scale",
                                      .x_scale = "w.x_scale",
                                      .dy_scale = "w.dy_scale",
                                      .dweight = "gradient.dweight",
                                      .dbias = "gradient.dbias"};

/* Leases that a call may hold in its life. */
enum { LEASES_MAX = 48 + TN__LAYER_SCALE_LEASES };

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward {
    tn_tensor_info y;
    tn__layer_product p;
    tn__layer_norm norm;
    tn__gemm_work work;
} forward;

static tn_status check_forward(tn__op_call *call, const tn_norm_linear_forward_args *args,
                               const tn_norm_linear_saved *saved, forward *f) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__layer_check_norm(call, &args->norm, &args->common, &f->norm));
    TN_TRY(tn__layer_check_common(call, &args->common));
    TN_TRY(tn__layer_check_weight(call, &roles, &args->w, &args->common, &f->p));
    const tn_tensor_info *x = &f->norm.norm.x, *weight = &f->p.weight;
    TN_TRY(tn__layer_check_input(call, &f->p, "norm.x", x));
    TN_TRY(tn__op_require_shape(call, roles.weight, weight, weight->rows, x->cols,
                                "its columns are x's"));
    TN_TRY(tn__op_tensor(call, "y", args->y, &f->y));
    TN_TRY(tn__op_require_float(call, "y", &f->y));
    TN_TRY(
        tn__op_require_shape(call, "y", &f->y, x->rows, weight->rows, "x's rows x weight's rows"));
    TN_TRY(tn__layer_check_saved_set(call, saved, &args->common));
    return tn__layer_check_forward(call, &f->p);
}

static tn_status run_forward(tn__op_call *call, const tn_norm_linear_forward_args *args,
                             forward *f) {
    const tn__layer_wants wants = tn__layer_norm_wants(&f->p, args->norm.normed);
    const tn__layer_home statistics = tn__layer_statistics_home(&args->common);
    tn__layer_operand *operand;
    TN_TRY(tn__op_reserve_leases(call, LEASES_MAX));
    TN_TRY(tn__layer_prepare_norm(call, &f->p, &wants, statistics, &f->norm));
    operand = tn__layer_made_operand(&f->norm.made);
    TN_TRY(tn__layer_fprop(call, &f->p, operand, &f->y, &f->work));
    TN_TRY(tn__op_lease_matrix(call, args->y, &f->y, TN_WRITE, &f->work.d));
    TN_TRY(tn__layer_read_weight(call, &f->p, &f->work));
    TN_TRY(tn__gemm_require_aligned(call, &f->work));
    TN_TRY(tn__layer_run_norm(call, &f->norm));
    TN_TRY(tn__layer_derive_next(call, &args->common, &f->work));
    TN_TRY(tn__layer_launch(call, &f->work));
    return tn__layer_done(call, operand, f->p.fprop.a);
}

tn_status tn_norm_linear_forward(const tn_norm_linear_forward_args *args,
                                 tn_norm_linear_saved *saved, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_norm_linear_forward", stream);
    forward f;
    TN_TRY(tn__op_init());
    TN_TRY(check_forward(&call, args, saved, &f));
    TN_TRY(tn__op_finish(&call, run_forward(&call, args, &f)));
    if (!saved) return TN_OK;
    *saved = (tn_norm_linear_saved){.mean = f.norm.args.mean,
                                    .rstd = f.norm.args.rstd,
                                    .normed = tn__layer_kept_tensor(&f.norm.made)};
    return TN_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

enum { OF_WEIGHT, OF_GAMMA, OF_BETA, PENDING };

typedef struct backward {
    tn_tensor_info dy;
    tn__layer_product p;
    tn__layer_gradient gradient;
    tn__layer_norm_back norm;
    tn_norm_linear_saved saved; /* all {0}: none */
    int makes_normed;           /* again, for the weight's gradient */
    tn__layer_operand dy_operand, normed_operand;
    tn__layer_operand *normed;
    tn__layer_pending pending[PENDING];
} backward;

/* What the weight's gradient is made of. */
static tn_status check_normed(tn__op_call *call, backward *b) {
    const tn_tensor_info *x = &b->norm.gradient.x;
    if (!tn__layer_reads_quantized_x(&b->p))
        TN_TRY(tn__layer_check_same_type(call, "norm.x", x, "dy", &b->dy));
    if (tn__layer_has_callers_normed(&b->norm, &b->p)) return TN_OK;
    TN_TRY(
        tn__layer_check_kept(call, &b->p, "saved->normed", b->saved.normed, x, &b->makes_normed));
    return tn__layer_check_delay(call, &b->p, &b->gradient, b->makes_normed);
}

static tn_status check_backward(tn__op_call *call, const tn_norm_linear_backward_args *args,
                                const tn_norm_linear_saved *saved,
                                const tn_delayed_gradient *delayed, backward *b) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    memset(b, 0, sizeof *b);
    if (saved) b->saved = *saved;
    TN_TRY(tn__op_tensor(call, "dy", args->dy, &b->dy));
    TN_TRY(tn__layer_check_common(call, &args->common));
    TN_TRY(tn__layer_check_weight(call, &roles, &args->w, &args->common, &b->p));
    const tn_tensor_info *weight = &b->p.weight;
    TN_TRY(tn__layer_check_input(call, &b->p, "dy", &b->dy));
    TN_TRY(tn__op_require_shape(call, "dy", &b->dy, b->dy.rows, weight->rows,
                                "its columns are weight's rows"));
    TN_TRY(tn__layer_check_norm_back(call, &args->norm, &args->common, b->saved.mean, b->saved.rstd,
                                     &b->norm));
    TN_TRY(tn__op_require_shape(call, "norm.x", &b->norm.gradient.x, b->dy.rows, weight->cols,
                                "dy's rows x weight's columns"));
    if (b->norm.is_wanted) TN_TRY(tn__layer_check_dgrad(call, &b->p, "dy", &b->dy));
    TN_TRY(tn__layer_check_gradient(call, &b->p, &args->gradient, delayed, &b->gradient));
    return b->gradient.wants_dweight ? check_normed(call, b) : TN_OK;
}

static tn_status check_apart(const tn__op_call *call, const tn_norm_linear_backward_args *args,
                             const backward *b) {
    enum { OUTPUTS = TN__NORM_OUTPUTS + 2 };
    enum { PARAMETERS = TN__NORM_PARAMETERS + TN__LAYER_PARAMETERS };
    tn__op_named outputs[OUTPUTS], parameters[PARAMETERS];
    tn__layer_norm_named(&args->norm, outputs, parameters);
    tn__layer_parameters(&b->p, parameters + TN__NORM_PARAMETERS);
    outputs[TN__NORM_OUTPUTS] = (tn__op_named){roles.dweight, args->gradient.dweight};
    outputs[TN__NORM_OUTPUTS + 1] = (tn__op_named){roles.dbias, args->gradient.dbias};
    return tn__op_require_apart(call, outputs, OUTPUTS, parameters, PARAMETERS);
}

static tn_status ask(const tn__op_call *call, const tn_norm_linear_backward_args *args,
                     const backward *b) {
    const tn_dtype dn = b->norm.gradient.x.dtype, dy = b->dy.dtype;
    const int64_t m = b->dy.rows;
    if (b->norm.is_wanted) TN_TRY(tn__layer_ask(call, &b->p, TN_GEMM_DGRAD, m, dy, dn, 0));
    if (!b->gradient.wants_dweight || b->gradient.delays) return TN_OK;
    return tn__layer_ask(call, &b->p, TN_GEMM_WGRAD, m, dy, b->gradient.dweight.dtype,
                         args->gradient.accumulate);
}

/* What there is of it, before anything runs. */
static tn_status open_normed(tn__op_call *call, backward *b) {
    b->normed = &b->normed_operand;
    if (!b->gradient.wants_dweight || b->makes_normed) return TN_OK;
    if (tn__layer_has_callers_normed(&b->norm, &b->p))
        return tn__layer_read(call, b->norm.of->normed, &b->norm.normed, b->normed);
    return tn__layer_open_kept(call, &b->p, b->saved.normed, b->normed);
}

/* The norm again, for its statistics or for the weight's gradient. */
static tn_status norm_again(tn__op_call *call, backward *b) {
    tn__layer_wants wants = {.planes = 0};
    if (!b->p.common->recompute) return TN_OK;
    if (b->makes_normed) wants = tn__layer_wgrad_wants(&b->p, b->gradient.delays);
    if (!b->makes_normed && !b->norm.is_wanted) return TN_OK;
    TN_TRY(tn__layer_norm_again(call, &b->p, &wants, &b->norm));
    if (b->makes_normed) b->normed = tn__layer_wgrad_operand(&b->p, &b->norm.again.made);
    return TN_OK;
}

static tn_status back_norm(tn__op_call *call, backward *b) {
    const tn_tensor_info *x = &b->norm.gradient.x;
    tn_tensor_info dn_info;
    tn_tensor dn;
    if (!b->norm.is_wanted) return tn__layer_release(call, &b->p);
    TN_TRY(tn__layer_plain(call, b->p.common, TN__LAYER_SCRATCH, "gradient of normed", x, &dn));
    TN_TRY(tn__op_tensor(call, "gradient of normed", dn, &dn_info));
    TN_TRY(tn__layer_dgrad(call, &b->p, &b->dy_operand, dn, &dn_info));
    TN_TRY(tn__layer_done_with_dy(call, &b->p, &b->dy_operand, b->gradient.wants_dweight));
    TN_TRY(norm_again(call, b));
    return tn__layer_back_norm(call, &b->norm, dn, &b->pending[OF_GAMMA]);
}

static tn_status run_backward(tn__op_call *call, const tn_norm_linear_backward_args *args,
                              backward *b) {
    const tn__layer_gradient *gradient = &b->gradient;
    tn__layer_pending *pending = &b->pending[OF_WEIGHT];
    TN_TRY(tn__op_reserve_leases(call, LEASES_MAX));
    TN_TRY(open_normed(call, b));
    TN_TRY(tn__layer_lease_gradients(call, &b->p, &args->gradient, gradient, pending));
    TN_TRY(tn__layer_require_aligned(call, b->normed, pending));
    TN_TRY(tn__layer_lease_norm_sums(call, &b->norm, &b->pending[OF_GAMMA]));
    TN_TRY(tn__layer_make_dy(call, &b->p, "quantized dy", args->dy, &b->dy, b->norm.is_wanted,
                             gradient->wants_dweight, gradient->delays, &b->dy_operand));
    TN_TRY(tn__layer_tile_sums(call, args->common.scope, b->dy.rows, pending));
    TN_TRY(
        tn__layer_cast_dy(call, &b->p, &b->dy_operand, b->norm.is_wanted, pending->sums.tile_sums));
    TN_TRY(back_norm(call, b));
    if (!b->norm.is_wanted) TN_TRY(norm_again(call, b));
    if (gradient->wants_dweight && !gradient->delays)
        TN_TRY(tn__layer_wgrad_of(call, &b->p, &b->dy_operand, b->normed, args->gradient.accumulate,
                                  pending));
    return tn__layer_finish(call, b->pending, PENDING);
}

tn_status tn_norm_linear_backward(const tn_norm_linear_backward_args *args,
                                  tn_norm_linear_saved *saved, tn_delayed_gradient *delayed,
                                  tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_norm_linear_backward", stream);
    backward b;
    TN_TRY(tn__op_init());
    TN_TRY(check_backward(&call, args, saved, delayed, &b));
    TN_TRY(check_apart(&call, args, &b));
    TN_TRY(ask(&call, args, &b));
    const int moves =
        b.gradient.delays && !b.makes_normed && !tn__layer_has_callers_normed(&b.norm, &b.p);
    if (saved) {
        tn__op_spend(&call, &saved->mean);
        tn__op_spend(&call, &saved->rstd);
        if (!moves) tn__op_spend(&call, &saved->normed);
    }
    TN_TRY(tn__op_finish(&call, run_backward(&call, args, &b)));
    if (b.gradient.delays)
        tn__layer_delay(&args->gradient, &b.dy_operand, b.normed, moves, delayed);
    if (saved && moves) saved->normed = (tn_tensor){0};
    return TN_OK;
}
