/* The norm that a layer begins with: see layer_norm.h. */
#include "layer_norm.h"

static const tn__norm_roles roles = {.norm = "norm.norm",
                                     .epsilon = "norm.epsilon",
                                     .x = "norm.x",
                                     .residual = "norm.residual",
                                     .sum = "norm.sum",
                                     .gamma = "norm.gamma",
                                     .beta = "norm.beta",
                                     .added = "norm.added",
                                     .dx = "norm.dx",
                                     .dgamma = "norm.dgamma",
                                     .dbeta = "norm.dbeta"};

/* ---- forward --------------------------------------------------------------------------------- */

static tn_status check_normed(tn__op_call *call, tn_tensor normed, const tn_tensor_info *x,
                              tn_tensor_info *info) {
    static const char role[] = "norm.normed";
    TN_TRY(tn__op_tensor(call, role, normed, info));
    TN_TRY(tn__op_require_format(call, role, info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, role, info, x->dtype));
    return tn__op_require_shape(call, role, info, x->rows, x->cols, "the shape of x");
}

tn_status tn__layer_check_norm(tn__op_call *call, const tn_layer_norm *norm,
                               const tn_layer_common *common, tn__layer_norm *out) {
    tn_norm_args *args = &out->args;
    tn_tensor_info normed;
    *out = (tn__layer_norm){.args = TN_NORM_ARGS_INIT};
    args->norm = norm->norm;
    args->x = norm->x, args->residual = norm->residual, args->sum = norm->sum;
    args->gamma = norm->gamma, args->beta = norm->beta;
    args->gamma_from_one = norm->gamma_from_one;
    args->epsilon = norm->epsilon;
    args->scope = common->scope;
    TN_REQUIRE(tn__is_no_tensor(norm->residual) || !tn__is_no_tensor(norm->sum),
               "%s: norm.residual is given, but norm.sum is {0}: backward takes it as x",
               call->name);
    TN_TRY(tn__norm_check(call, args, &roles, &out->norm));
    if (tn__is_no_tensor(norm->normed)) return TN_OK;
    return check_normed(call, norm->normed, &out->norm.x, &normed);
}

tn__layer_wants tn__layer_norm_wants(const tn__layer_product *p, tn_tensor callers_value) {
    const int is_trained = tn__layer_is_trained(p) && !p->common->recompute;
    const int keeps_value = is_trained && !tn__layer_reads_quantized_x(p);
    tn__layer_wants wants = {.is_kept = tn__layer_keeps_x(p),
                             .kept_plane = tn__layer_kept_plane(p),
                             .callers_value = callers_value};
    wants.value = keeps_value                  ? TN__LAYER_SAVED
                  : !tn__layer_is_quantized(p) ? TN__LAYER_SCRATCH
                                               : TN__LAYER_NOWHERE;
    if (tn__layer_is_quantized(p)) wants.planes = TN_PLANE_BIT(p->fprop.a);
    if (wants.is_kept) wants.planes |= TN_PLANE_BIT(wants.kept_plane);
    return wants;
}

static tn_status make_statistics(tn__op_call *call, const tn_layer_common *common,
                                 tn__layer_home home, tn__layer_norm *norm) {
    tn_tensor_info shape = {.dtype = TN_FP32, .rows = norm->norm.x.rows, .cols = 1};
    if (home == TN__LAYER_NOWHERE) return TN_OK;
    TN_TRY(tn__layer_plain(call, common, home, "rstd", &shape, &norm->args.rstd));
    if (norm->args.norm != TN_NORM_LAYER) return TN_OK;
    return tn__layer_plain(call, common, home, "mean", &shape, &norm->args.mean);
}

tn_status tn__layer_prepare_norm(tn__op_call *call, const tn__layer_product *p,
                                 const tn__layer_wants *wants, tn__layer_home statistics,
                                 tn__layer_norm *norm) {
    static const char *const names[] = {"normed", "quantized normed"};
    TN_TRY(make_statistics(call, p->common, statistics, norm));
    TN_TRY(tn__layer_make_outputs(call, p, names, &norm->norm.x, wants, &norm->made));
    norm->norm.out = norm->made.produced;
    TN_TRY(tn__norm_lease(call, &norm->args, &norm->norm, &norm->work));
    tn__layer_take_views(&norm->work.made.cast, &norm->made);
    return TN_OK;
}

tn_status tn__layer_run_norm(tn__op_call *call, tn__layer_norm *norm) {
    TN_TRY(tn__norm_run(call, &norm->args, &norm->norm, &norm->work));
    TN_TRY(tn__op_let_go_bytes(call, norm->work.parts));
    return tn__layer_cast_made(call, &norm->made);
}

/* ---- backward -------------------------------------------------------------------------------- */

static tn_status check_again(tn__op_call *call, const tn_layer_common *common,
                             tn__layer_norm_back *back) {
    const tn_layer_norm_gradient *of = back->of;
    tn_layer_norm norm = TN_LAYER_NORM_INIT;
    norm.norm = of->norm;
    norm.x = of->x;
    norm.gamma = of->gamma, norm.beta = of->beta;
    norm.gamma_from_one = of->gamma_from_one;
    norm.epsilon = of->epsilon;
    return tn__layer_check_norm(call, &norm, common, &back->again);
}

static tn_status check_statistics(tn__op_call *call, const tn_layer_common *common, tn_tensor mean,
                                  tn_tensor rstd, tn__layer_norm_back *back) {
    static const char reason[] = "one for each row of x";
    const int64_t rows = back->gradient.x.rows;
    if (common->recompute || !back->is_wanted) return TN_OK;
    TN_REQUIRE(!tn__is_no_tensor(rstd),
               "%s: saved->rstd is {0}: forward saves it if common.saved_scope is given",
               call->name);
    TN_TRY(
        tn__op_require_fp32_vector(call, "saved->rstd", rstd, rows, reason, &back->gradient.rstd));
    back->args.rstd = rstd;
    if (back->of->norm != TN_NORM_LAYER) return TN_OK;
    TN_REQUIRE(!tn__is_no_tensor(mean), "%s: saved->mean is {0}: forward saves it of TN_NORM_LAYER",
               call->name);
    back->args.mean = mean;
    return tn__op_require_fp32_vector(call, "saved->mean", mean, rows, reason,
                                      &back->gradient.mean);
}

tn_status tn__layer_check_norm_back(tn__op_call *call, const tn_layer_norm_gradient *of,
                                    const tn_layer_common *common, tn_tensor mean, tn_tensor rstd,
                                    tn__layer_norm_back *out) {
    tn_norm_backward_args *args = &out->args;
    *out = (tn__layer_norm_back){.of = of, .args = TN_NORM_BACKWARD_ARGS_INIT};
    args->norm = of->norm;
    args->x = of->x, args->gamma = of->gamma, args->gamma_from_one = of->gamma_from_one;
    args->added = of->added;
    args->dx = of->dx, args->dgamma = of->dgamma, args->dbeta = of->dbeta;
    args->scope = common->scope;
    out->is_wanted =
        !tn__is_no_tensor(of->dx) || !tn__is_no_tensor(of->dgamma) || !tn__is_no_tensor(of->dbeta);
    TN_REQUIRE(tn__is_no_tensor(of->added) || !tn__is_no_tensor(of->dx),
               "%s: norm.added is given, but norm.dx is {0}", call->name);
    TN_TRY(tn__norm_gradient_check(call, args, &roles, &out->gradient));
    if (!tn__is_no_tensor(of->normed))
        TN_TRY(check_normed(call, of->normed, &out->gradient.x, &out->normed));
    TN_TRY(check_statistics(call, common, mean, rstd, out));
    return common->recompute ? check_again(call, common, out) : TN_OK;
}

void tn__layer_norm_named(const tn_layer_norm_gradient *of, tn__op_named outputs[TN__NORM_OUTPUTS],
                          tn__op_named parameters[TN__NORM_PARAMETERS]) {
    outputs[0] = (tn__op_named){roles.dx, of->dx};
    outputs[1] = (tn__op_named){roles.dgamma, of->dgamma};
    outputs[2] = (tn__op_named){roles.dbeta, of->dbeta};
    parameters[0] = (tn__op_named){roles.gamma, of->gamma};
    parameters[1] = (tn__op_named){roles.beta, of->beta};
}

static tn_status check_plain_kept(tn__op_call *call, const char *role, tn_tensor saved,
                                  const tn_tensor_info *shape) {
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, role, saved, &info));
    TN_TRY(tn__op_require_format(call, role, &info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, role, &info, shape->dtype));
    return tn__op_require_shape(call, role, &info, shape->rows, shape->cols,
                                "the shape that forward made");
}

tn_status tn__layer_check_kept(tn__op_call *call, const tn__layer_product *p, const char *role,
                               tn_tensor saved, const tn_tensor_info *shape, int *made_again) {
    *made_again = tn__is_no_tensor(saved);
    if (!*made_again && tn__layer_reads_quantized_x(p))
        return tn__layer_check_saved(call, p, role, saved, shape->rows, shape->cols);
    if (!*made_again) return check_plain_kept(call, role, saved, shape);
    TN_REQUIRE(p->common->recompute,
               "%s: %s needs %s, which is {0}: forward saves it if common.saved_scope is given",
               call->name, p->roles->dweight, role);
    return TN_OK;
}

tn_status tn__layer_lease_norm_sums(tn__op_call *call, const tn__layer_norm_back *back,
                                    tn__layer_pending sums[2]) {
    const int accumulate = back->of->accumulate != 0;
    TN_TRY(tn__layer_lease_sums(call, "norm.dgamma", back->of->dgamma, &back->gradient.dgamma,
                                accumulate, &sums[0]));
    return tn__layer_lease_sums(call, "norm.dbeta", back->of->dbeta, &back->gradient.dbeta,
                                accumulate, &sums[1]);
}

/* The statistics are read after the leases that they were written under. */
tn_status tn__layer_norm_again(tn__op_call *call, const tn__layer_product *p,
                               const tn__layer_wants *wants, tn__layer_norm_back *back) {
    tn__layer_norm *again = &back->again;
    const tn__layer_home home = back->is_wanted ? TN__LAYER_SCRATCH : TN__LAYER_NOWHERE;
    tn__layer_wants made = *wants;
    const int only_statistics = made.planes == 0 && made.value == TN__LAYER_NOWHERE;
    if (only_statistics) made.value = TN__LAYER_SCRATCH;
    TN_TRY(tn__layer_prepare_norm(call, p, &made, home, again));
    TN_TRY(tn__layer_run_norm(call, again));
    if (only_statistics) TN_TRY(tn__op_let_go(call, again->made.value.tensor));
    if (!back->is_wanted) return TN_OK;
    back->args.mean = again->args.mean;
    back->args.rstd = again->args.rstd;
    TN_TRY(tn__op_end_plane(call, back->args.rstd, TN_PLANE_DATA));
    return tn__op_end_plane(call, back->args.mean, TN_PLANE_DATA);
}

tn_status tn__layer_back_norm(tn__op_call *call, tn__layer_norm_back *back, tn_tensor dn,
                              tn__layer_pending sums[2]) {
    const tn_scope scope = back->args.scope;
    tn__norm_gradient_work work;
    back->args.dy = dn;
    TN_TRY(tn__op_end_plane(call, dn, TN_PLANE_DATA));
    TN_TRY(tn__norm_gradient_lease(call, &back->args, &back->gradient, &work));
    TN_TRY(tn__op_lease_produced(call, &back->gradient.out, NULL, &work.cast));
    TN_TRY(tn__norm_gradient_split(call, &work, &sums[0].sums, &sums[1].sums));
    for (int i = 0; i < 2; i++)
        TN_TRY(tn__layer_tile_sums(call, scope, back->gradient.x.rows, &sums[i]));
    work.gamma_sums = sums[0].sums.tile_sums;
    work.beta_sums = sums[1].sums.tile_sums;
    TN_TRY(tn__norm_gradient_lease_parts(call, scope, &work));
    TN_TRY(tn__norm_gradient_run(call, &work));
    return tn__op_let_go(call, dn);
}
