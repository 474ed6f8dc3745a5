/* LayerNormMLP backward: see layer_norm_mlp.h. */
#include "layer_norm_mlp.h"

#include <string.h>

enum { FIRST, SECOND, OF_GAMMA, OF_BETA, PENDING };

typedef struct backward {
    tn_tensor_info dy;
    tn_layer_common common2;  /* of product 2: the plane that comes next is w1's */
    tn_layer_weight w1_again; /* as product 1 reads it when it runs again */
    tn__layer_product p[2];
    tn__layer_gradient gradient[2];
    tn__layer_norm_back norm;
    tn__layer_activation activation;
    tn_norm_mlp_saved saved; /* all {0}: none */
    tn_tensor_info hidden_info;
    int wants_first; /* anything before the activation */
    int makes[2];    /* x of each product, again, for its weight's gradient */
    tn__layer_operand hidden;
    tn_tensor hidden_scratch;        /* {0}: it was saved */
    tn__layer_operand x_operands[2]; /* what was there of them */
    tn__layer_operand *x[2];
    tn__layer_operand dy_operand;
    tn__layer_made dh;
    tn__layer_pending pending[PENDING];
} backward;

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_normed(tn__op_call *call, backward *b) {
    if (!b->gradient[FIRST].wants_dweight) return TN_OK;
    if (tn__layer_has_callers_normed(&b->norm, &b->p[FIRST])) return TN_OK;
    return tn__layer_check_kept(call, &b->p[FIRST], "saved->normed", b->saved.normed,
                                &b->norm.gradient.x, &b->makes[FIRST]);
}

static tn_status check_activated(tn__op_call *call, backward *b) {
    const tn__layer_product *p = &b->p[SECOND];
    if (!b->gradient[SECOND].wants_dweight) return TN_OK;
    if (!tn__layer_reads_quantized_x(p))
        TN_TRY(tn__layer_check_same_type(call, "norm.x", &b->norm.gradient.x, "dy", &b->dy));
    return tn__layer_check_kept(call, p, "saved->activated", b->saved.activated,
                                &b->activation.shape, &b->makes[SECOND]);
}

static tn_status check_hidden(tn__op_call *call, backward *b) {
    const tn_tensor_info shape = tn__mlp_hidden(&b->p[FIRST], &b->norm.gradient.x);
    b->hidden_info = shape;
    if (!b->wants_first && !b->makes[SECOND]) return TN_OK;
    if (tn__is_no_tensor(b->saved.hidden)) {
        TN_REQUIRE(b->p[FIRST].common->recompute,
                   "%s: saved->hidden is {0}: forward saves it if common.saved_scope is given",
                   call->name);
        return tn__layer_check_forward(call, &b->p[FIRST]);
    }
    TN_TRY(tn__op_tensor(call, "saved->hidden", b->saved.hidden, &b->hidden_info));
    TN_TRY(tn__op_require_format(call, "saved->hidden", &b->hidden_info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "saved->hidden", &b->hidden_info, shape.dtype));
    return tn__op_require_shape(call, "saved->hidden", &b->hidden_info, shape.rows, shape.cols,
                                "x's rows x w1's rows");
}

static tn_status check_gradients(tn__op_call *call, const tn_norm_mlp_backward_args *args,
                                 const tn_delayed_gradient *delayed, backward *b) {
    const tn_layer_gradient *const of[] = {&args->gradient1, &args->gradient2};
    for (int i = 0; i < 2; i++) {
        TN_TRY(tn__layer_check_gradient(call, &b->p[i], of[i], delayed ? &delayed[i] : NULL,
                                        &b->gradient[i]));
        TN_REQUIRE(!b->gradient[i].delays || args->common.saved_scope.value != 0,
                   "%s: %s is to be delayed, but common.saved_scope is {0}", call->name,
                   b->p[i].roles->dweight);
    }
    b->wants_first =
        b->norm.is_wanted || b->gradient[FIRST].wants_dweight || b->gradient[FIRST].wants_dbias;
    if (b->wants_first) TN_TRY(tn__layer_check_dgrad(call, &b->p[SECOND], "dy", &b->dy));
    if (!b->norm.is_wanted) return TN_OK;
    return tn__layer_check_dgrad(call, &b->p[FIRST], "norm.x", &b->norm.gradient.x);
}

/* Product 2's dgrad runs before product 1's, and has w1's plane derived if that reads it. */
static void plan_next(const tn_norm_mlp_backward_args *args, backward *b) {
    const int is_derived = args->common.side && tn__layer_multiplies_quantized(&b->p[FIRST]);
    if (!b->norm.is_wanted) return;
    b->common2.next_weight = is_derived ? args->w1.weight : (tn_tensor){0};
}

static tn_status check_shapes(tn__op_call *call, const backward *b) {
    const tn_tensor_info *w1 = &b->p[FIRST].weight, *w2 = &b->p[SECOND].weight;
    TN_TRY(tn__layer_check_input(call, &b->p[SECOND], "dy", &b->dy));
    TN_TRY(tn__op_require_shape(call, "dy", &b->dy, b->dy.rows, w2->rows,
                                "its columns are w2.weight's rows"));
    TN_TRY(tn__layer_check_input(call, &b->p[FIRST], "norm.x", &b->norm.gradient.x));
    return tn__op_require_shape(call, "norm.x", &b->norm.gradient.x, b->dy.rows, w1->cols,
                                "dy's rows x w1.weight's columns");
}

static tn_status check_backward(tn__op_call *call, const tn_norm_mlp_backward_args *args,
                                const tn_norm_mlp_saved *saved, const tn_delayed_gradient *delayed,
                                backward *b) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    memset(b, 0, sizeof *b);
    if (saved) b->saved = *saved;
    TN_TRY(tn__op_tensor(call, "dy", args->dy, &b->dy));
    TN_TRY(tn__layer_check_common(call, &args->common));
    TN_TRY(tn__layer_check_norm_back(call, &args->norm, &args->common, b->saved.mean, b->saved.rstd,
                                     &b->norm));
    b->common2 = args->common;
    b->w1_again = args->w1;
    b->w1_again.source = b->w1_again.skip = (tn_tensor){0};
    TN_TRY(tn__mlp_check_weights(call, &args->w1, &args->w2, args->gated, &args->common,
                                 &b->common2, b->p));
    plan_next(args, b);
    TN_TRY(tn__mlp_check_activation(call, args->activation, args->gated, b->p, &b->norm.gradient.x,
                                    &b->activation));
    TN_TRY(check_shapes(call, b));
    TN_TRY(check_gradients(call, args, delayed, b));
    TN_TRY(check_normed(call, b));
    TN_TRY(check_activated(call, b));
    return check_hidden(call, b);
}

static tn_status check_apart(const tn__op_call *call, const tn_norm_mlp_backward_args *args,
                             const backward *b) {
    const tn_layer_gradient *const of[] = {&args->gradient1, &args->gradient2};
    enum { PARAMETERS = TN__NORM_PARAMETERS + 2 * TN__LAYER_PARAMETERS };
    tn__op_named outputs[TN__NORM_OUTPUTS + 4], parameters[PARAMETERS];
    tn__layer_norm_named(&args->norm, outputs, parameters);
    for (int i = 0; i < 2; i++) {
        const tn__layer_roles *roles = b->p[i].roles;
        tn__op_named *own = &outputs[TN__NORM_OUTPUTS + 2 * i];
        own[0] = (tn__op_named){roles->dweight, of[i]->dweight};
        own[1] = (tn__op_named){roles->dbias, of[i]->dbias};
        tn__layer_parameters(&b->p[i], &parameters[TN__NORM_PARAMETERS + i * TN__LAYER_PARAMETERS]);
    }
    return tn__op_require_apart(call, outputs, TN__NORM_OUTPUTS + 4, parameters, PARAMETERS);
}

/* Whether product 1 runs again. */
static int runs_product(const backward *b) {
    return tn__is_no_tensor(b->saved.hidden) && (b->wants_first || b->makes[SECOND]);
}

static tn_status ask(const tn__op_call *call, const tn_norm_mlp_backward_args *args,
                     const backward *b) {
    const tn_layer_gradient *const of[] = {&args->gradient1, &args->gradient2};
    const tn_dtype x = b->norm.gradient.x.dtype, dy[] = {x, b->dy.dtype};
    const int64_t m = b->dy.rows;
    if (runs_product(b)) TN_TRY(tn__layer_ask(call, &b->p[FIRST], TN_GEMM_FPROP, m, x, x, 0));
    if (b->wants_first)
        TN_TRY(tn__layer_ask(call, &b->p[SECOND], TN_GEMM_DGRAD, m, dy[SECOND], x, 0));
    if (b->norm.is_wanted)
        TN_TRY(tn__layer_ask(call, &b->p[FIRST], TN_GEMM_DGRAD, m, dy[FIRST], x, 0));
    for (int i = 0; i < 2; i++) {
        const tn__layer_gradient *gradient = &b->gradient[i];
        if (!gradient->wants_dweight || gradient->delays) continue;
        TN_TRY(tn__layer_ask(call, &b->p[i], TN_GEMM_WGRAD, m, dy[i], gradient->dweight.dtype,
                             of[i]->accumulate));
    }
    return TN_OK;
}

/* ---- what forward has left, or made again ---------------------------------------------------- */

static tn_status open_saved(tn__op_call *call, backward *b) {
    const tn_tensor kept[] = {b->saved.normed, b->saved.activated};
    for (int i = 0; i < 2; i++) {
        b->x[i] = &b->x_operands[i];
        if (!b->gradient[i].wants_dweight || b->makes[i]) continue;
        if (i == FIRST && tn__layer_has_callers_normed(&b->norm, &b->p[i]))
            TN_TRY(tn__layer_read(call, b->norm.of->normed, &b->norm.normed, b->x[i]));
        else
            TN_TRY(tn__layer_open_kept(call, &b->p[i], kept[i], b->x[i]));
    }
    if (tn__is_no_tensor(b->saved.hidden)) return TN_OK;
    if (!b->wants_first && !b->makes[SECOND]) return TN_OK;
    return tn__layer_read(call, b->saved.hidden, &b->hidden_info, &b->hidden);
}

/* What product 1 and its weight's gradient read of the norm. */
static tn__layer_wants normed_wants(const backward *b) {
    const tn__layer_product *p = &b->p[FIRST];
    tn__layer_wants wants = {.planes = 0};
    if (b->makes[FIRST]) wants = tn__layer_wgrad_wants(p, b->gradient[FIRST].delays);
    if (!runs_product(b)) return wants;
    if (tn__layer_is_quantized(p))
        wants.planes |= TN_PLANE_BIT(p->fprop.a);
    else if (wants.value == TN__LAYER_NOWHERE)
        wants.value = TN__LAYER_SCRATCH;
    return wants;
}

static tn_status hidden_again(tn__op_call *call, backward *b) {
    tn__layer_product p = b->p[FIRST];
    tn__layer_operand *operand = tn__layer_made_operand(&b->norm.again.made);
    tn__gemm_work work;
    p.w = &b->w1_again;
    TN_TRY(tn__layer_plain(call, p.common, TN__LAYER_SCRATCH, "hidden", &b->hidden_info,
                           &b->hidden_scratch));
    b->hidden.tensor = b->hidden_scratch;
    TN_TRY(tn__op_tensor(call, "hidden", b->hidden_scratch, &b->hidden.info));
    TN_TRY(tn__layer_fprop(call, &p, operand, &b->hidden.info, &work));
    TN_TRY(tn__op_lease_matrix(call, b->hidden_scratch, &b->hidden.info, TN_WRITE, &work.d));
    b->hidden.plan.src = work.d;
    TN_TRY(tn__layer_read_weight(call, &p, &work));
    TN_TRY(tn__layer_launch(call, &work));
    TN_TRY(tn__op_end_plane(call, p.w->weight, p.fprop.b));
    return tn__layer_done_with_x(call, &p, &b->norm.again.made, b->makes[FIRST]);
}

/* Of h, which nothing else reads if no gradient before the activation is wanted. */
static tn_status activated_again(tn__op_call *call, backward *b) {
    const tn__layer_product *p = &b->p[SECOND];
    const tn__layer_wants wants = tn__layer_wgrad_wants(p, b->gradient[SECOND].delays);
    TN_TRY(tn__layer_prepare_activation(call, p, &b->hidden.plan.src, &wants, &b->activation));
    TN_TRY(tn__layer_run_activation(call, &b->activation));
    b->x[SECOND] = tn__layer_wgrad_operand(p, &b->activation.made);
    if (b->wants_first || tn__is_no_tensor(b->hidden_scratch)) return TN_OK;
    return tn__op_let_go(call, b->hidden_scratch);
}

/* The norm, h and its activation, as far as they are missing. */
static tn_status run_again(tn__op_call *call, backward *b) {
    const int runs_norm = runs_product(b) || b->makes[FIRST] || b->norm.is_wanted;
    const tn__layer_product *p = &b->p[FIRST];
    if (!p->common->recompute) return TN_OK;
    if (runs_norm) {
        const tn__layer_wants normed = normed_wants(b);
        TN_TRY(tn__layer_norm_again(call, p, &normed, &b->norm));
        if (b->makes[FIRST]) b->x[FIRST] = tn__layer_wgrad_operand(p, &b->norm.again.made);
    }
    if (runs_product(b)) TN_TRY(hidden_again(call, b));
    return b->makes[SECOND] ? activated_again(call, b) : TN_OK;
}

/* ---- the gradients before the activation ----------------------------------------------------- */

/* What product 1's products read of h's gradient. */
static tn__layer_wants dh_wants(const backward *b) {
    const tn__layer_product *p = &b->p[FIRST];
    const tn__layer_gradient *gradient = &b->gradient[FIRST];
    tn__layer_wants wants = {
        .is_gradient = 1, .is_kept = gradient->delays, .kept_plane = p->wgrad.a};
    if (tn__layer_multiplies_quantized(p)) {
        if (b->norm.is_wanted) wants.planes |= TN_PLANE_BIT(p->dgrad.a);
        if (gradient->wants_dweight) wants.planes |= TN_PLANE_BIT(p->wgrad.a);
    } else if (b->norm.is_wanted || gradient->wants_dweight) {
        wants.value = gradient->delays ? TN__LAYER_SAVED : TN__LAYER_SCRATCH;
    }
    return wants;
}

/* dh and the tiles of bias1's gradient, of da, which ends. */
static tn_status back_activation(tn__op_call *call, backward *b, tn_tensor da,
                                 const tn_tensor_info *da_info) {
    static const char *const names[] = {"gradient of hidden", "quantized gradient of hidden"};
    const tn__layer_wants wants = dh_wants(b);
    tn__layer_pending *pending = &b->pending[FIRST];
    tn__produce_work work = {.producer = TN__PRODUCE_GRADIENT,
                             .curve = b->activation.curve,
                             .is_gated = b->activation.is_gated,
                             .x = b->hidden.plan.src};
    tn__matrix dy;
    TN_TRY(tn__op_end_plane(call, da, TN_PLANE_DATA));
    TN_TRY(tn__op_lease_matrix(call, da, da_info, TN_READ, &dy));
    work.dy = dy.data;
    TN_TRY(tn__layer_make_outputs(call, &b->p[FIRST], names, &b->hidden.info, &wants, &b->dh));
    TN_TRY(tn__op_lease_produced(call, &b->dh.produced, NULL, &work.cast));
    tn__layer_take_views(&work.cast, &b->dh);
    TN_TRY(tn__layer_tile_sums(call, b->common2.scope, b->dy.rows, pending));
    work.tile_sums = pending->sums.tile_sums;
    if (!tn__is_empty(&b->hidden.info)) TN_TRY(TN__OP_RUN(call, produce, &work));
    TN_TRY(tn__layer_cast_made(call, &b->dh));
    TN_TRY(tn__op_let_go(call, da));
    if (tn__is_no_tensor(b->hidden_scratch)) return TN_OK;
    return tn__op_let_go(call, b->hidden_scratch);
}

static tn_status back_norm(tn__op_call *call, backward *b) {
    const tn__layer_product *p = &b->p[FIRST];
    tn__layer_operand *dh = tn__layer_made_operand(&b->dh);
    tn_tensor_info dn_info;
    tn_tensor dn;
    TN_TRY(tn__layer_plain(call, p->common, TN__LAYER_SCRATCH, "gradient of normed",
                           &b->norm.gradient.x, &dn));
    TN_TRY(tn__op_tensor(call, "gradient of normed", dn, &dn_info));
    TN_TRY(tn__layer_dgrad(call, p, dh, dn, &dn_info));
    TN_TRY(tn__layer_done_with_dy(call, p, dh, b->gradient[FIRST].wants_dweight));
    return tn__layer_back_norm(call, &b->norm, dn, &b->pending[OF_GAMMA]);
}

static tn_status back_first(tn__op_call *call, backward *b) {
    const tn__layer_product *p = &b->p[SECOND];
    tn_tensor_info da_info;
    tn_tensor da;
    if (!b->wants_first) {
        TN_TRY(tn__layer_release(call, p));
        return tn__layer_release(call, &b->p[FIRST]);
    }
    TN_TRY(tn__layer_plain(call, p->common, TN__LAYER_SCRATCH, "gradient of activated",
                           &b->activation.shape, &da));
    TN_TRY(tn__op_tensor(call, "gradient of activated", da, &da_info));
    TN_TRY(tn__layer_dgrad(call, p, &b->dy_operand, da, &da_info));
    TN_TRY(tn__layer_done_with_dy(call, p, &b->dy_operand, b->gradient[SECOND].wants_dweight));
    TN_TRY(back_activation(call, b, da, &da_info));
    return b->norm.is_wanted ? back_norm(call, b) : tn__layer_release(call, &b->p[FIRST]);
}

/* ---- the call -------------------------------------------------------------------------------- */

static tn_status lease_outputs(tn__op_call *call, const tn_norm_mlp_backward_args *args,
                               backward *b) {
    const tn_layer_gradient *const of[] = {&args->gradient1, &args->gradient2};
    for (int i = 0; i < 2; i++) {
        TN_TRY(tn__layer_lease_gradients(call, &b->p[i], of[i], &b->gradient[i], &b->pending[i]));
        TN_TRY(tn__layer_require_aligned(call, b->x[i], &b->pending[i]));
    }
    return tn__layer_lease_norm_sums(call, &b->norm, &b->pending[OF_GAMMA]);
}

static tn_status run_backward(tn__op_call *call, const tn_norm_mlp_backward_args *args,
                              backward *b) {
    const tn_layer_gradient *const of[] = {&args->gradient1, &args->gradient2};
    const tn__layer_gradient *second = &b->gradient[SECOND];
    TN_TRY(tn__op_reserve_leases(call, TN__MLP_LEASES_MAX));
    TN_TRY(open_saved(call, b));
    TN_TRY(lease_outputs(call, args, b));
    TN_TRY(run_again(call, b));
    TN_TRY(tn__layer_make_dy(call, &b->p[SECOND], "quantized dy", args->dy, &b->dy, b->wants_first,
                             second->wants_dweight, second->delays, &b->dy_operand));
    TN_TRY(tn__layer_tile_sums(call, args->common.scope, b->dy.rows, &b->pending[SECOND]));
    TN_TRY(tn__layer_cast_dy(call, &b->p[SECOND], &b->dy_operand, b->wants_first,
                             b->pending[SECOND].sums.tile_sums));
    TN_TRY(back_first(call, b));
    const tn__layer_operand *const dy[] = {tn__layer_made_operand(&b->dh), &b->dy_operand};
    for (int i = 0; i < 2; i++) {
        if (!b->gradient[i].wants_dweight || b->gradient[i].delays) continue;
        TN_TRY(
            tn__layer_wgrad_of(call, &b->p[i], dy[i], b->x[i], of[i]->accumulate, &b->pending[i]));
    }
    return tn__layer_finish(call, b->pending, PENDING);
}

/* Whether a saved operand goes to the delayed gradient. */
static int moves(const backward *b, int i) {
    if (!b->gradient[i].delays || b->makes[i]) return 0;
    return i == SECOND || !tn__layer_has_callers_normed(&b->norm, &b->p[i]);
}

static void spend(tn__op_call *call, const backward *b, tn_norm_mlp_saved *saved) {
    tn__op_spend(call, &saved->mean);
    tn__op_spend(call, &saved->rstd);
    tn__op_spend(call, &saved->hidden);
    if (!moves(b, FIRST)) tn__op_spend(call, &saved->normed);
    if (!moves(b, SECOND)) tn__op_spend(call, &saved->activated);
}

tn_status tn_norm_mlp_backward(const tn_norm_mlp_backward_args *args, tn_norm_mlp_saved *saved,
                               tn_delayed_gradient *delayed, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_norm_mlp_backward", stream);
    backward b;
    TN_TRY(tn__op_init());
    TN_TRY(check_backward(&call, args, saved, delayed, &b));
    TN_TRY(check_apart(&call, args, &b));
    TN_TRY(ask(&call, args, &b));
    if (saved) spend(&call, &b, saved);
    TN_TRY(tn__op_finish(&call, run_backward(&call, args, &b)));
    if (b.gradient[FIRST].delays)
        tn__layer_delay(&args->gradient1, tn__layer_made_operand(&b.dh), b.x[FIRST],
                        moves(&b, FIRST), &delayed[FIRST]);
    if (b.gradient[SECOND].delays)
        tn__layer_delay(&args->gradient2, &b.dy_operand, b.x[SECOND], moves(&b, SECOND),
                        &delayed[SECOND]);
    if (saved && moves(&b, FIRST)) saved->normed = (tn_tensor){0};
    if (saved && moves(&b, SECOND)) saved->activated = (tn_tensor){0};
    return TN_OK;
}
