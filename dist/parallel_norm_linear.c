/* Column-parallel LayerNormLinear: the norm is of this rank's rows, gathered as the product reads
 * them.
 *
 *     forward    mean, rstd   kept;  n_q ROW, all n_q ROW            [kept: n_q COL, this rank's]
 *     backward   all n_q COL;  dy_q ROW, COL;  partial dn until it is reduced to dn
 *                dn           the norm's gradient; dn ends
 *                dy_q COL, all n_q COL   wgrad
 */
#include "parallel_norm.h"

static tn_status x_rows(const char *name, tn_tensor x, int64_t *rows) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(x, &info));
    TN_REQUIRE(info.rank > 0, "%s: norm.x (tensor %s) has no rows", name, info.name);
    *rows = info.rows;
    return TN_OK;
}

static tn_status run_forward(tn__parallel *p, const tn_norm_linear_forward_args *args,
                             const tn__parallel_weight *w, tn_norm_linear_saved *kept) {
    const tn__parallel_norm_wants wants = tn__parallel_norm_wants_of(p, w);
    tn__parallel_norm norm;
    TN_TRY(tn__parallel_check_shape(p, "norm.x", args->norm.x, p->cut.own, w->info.cols));
    TN_TRY(tn__parallel_check_shape(p, "y", args->y, p->cut.total, w->info.rows));
    TN_TRY(tn__parallel_norm_forward(p, w, &args->norm, &wants, &norm));
    TN_TRY(tn__column_forward(p, w, norm.x, args->y));
    kept->mean = wants.statistics == TN__STATISTICS_KEPT ? norm.mean : (tn_tensor){0};
    kept->rstd = wants.statistics == TN__STATISTICS_KEPT ? norm.rstd : (tn_tensor){0};
    if (w->is_quantized) return tn__column_keep(p, w, norm.x, &kept->normed);
    if (wants.is_kept && !tn__is_given(args->norm.normed)) kept->normed = norm.x;
    return TN_OK;
}

tn_status tn_column_norm_linear_forward(const tn_parallel *parallel,
                                        const tn_norm_linear_forward_args *args,
                                        tn_norm_linear_saved *saved, tn_stream stream) {
    static const char name[] = "tn_column_norm_linear_forward";
    tn_norm_linear_saved kept = TN_NORM_LINEAR_SAVED_INIT;
    tn__parallel_weight w;
    tn__parallel p;
    int64_t rows = 0;
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", name);
    TN_REQUIRE(saved || args->common.saved_scope.value == 0,
               "%s: saved is NULL, but common.saved_scope is given", name);
    TN_TRY(x_rows(name, args->norm.x, &rows));
    TN_TRY(tn__parallel_begin(name, parallel, &args->common, rows, stream, &p));
    TN_TRY(tn__parallel_check_weight(&p, "w.weight", &args->w, &w));
    TN_TRY(tn__parallel_end(&p, run_forward(&p, args, &w, &kept)));
    if (saved) *saved = kept;
    return TN_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static tn_status back_products(tn__parallel *p, const tn_norm_linear_backward_args *args,
                               const tn__parallel_weight *w, const tn__parallel_norm *norm,
                               tn_delayed_gradient *delayed) {
    const int for_dgrad = tn__parallel_wants_norm(&args->norm);
    const int for_wgrad = tn__is_given(args->gradient.dweight);
    const tn__parallel_wants wants = {
        .name = "quantized dy", .dtype = w->gradient_dtype, .row = for_dgrad, .col = for_wgrad};
    tn__parallel_operand dy;
    tn_tensor x = {0}, sums, dn;
    TN_TRY(tn__parallel_sums(p, args->gradient.dbias, args->gradient.accumulate, 0, &sums));
    if (for_wgrad) {
        TN_TRY(tn__column_gather_x(p, w, norm->x, &x));
        if (x.value != norm->x.value) TN_TRY(tn__parallel_let_go(p, norm->x, p->wire));
    }
    TN_TRY(tn__parallel_cast_whole(p, w, args->dy, &wants, sums, &dy));
    TN_TRY(tn__parallel_norm_make_dn(p, &args->norm, &dn));
    TN_TRY(tn__column_dgrad(p, w, dy.row, dn));
    if (for_wgrad) TN_TRY(tn__parallel_done_with_row(p, &dy));
    TN_TRY(tn__parallel_norm_backward(p, &args->norm, norm, dn));
    TN_TRY(tn__parallel_reduce_sums(p));
    if (for_wgrad) TN_TRY(tn__parallel_wgrad(p, dy.col, x, &args->gradient, delayed));
    return tn__parallel_add_sums(p);
}

static tn_status run_backward(tn__parallel *p, const tn_norm_linear_backward_args *args,
                              const tn__parallel_weight *w, const tn_norm_linear_saved *saved,
                              tn_delayed_gradient *delayed) {
    const tn__parallel_norm_wants wants = {.col = tn__is_given(args->gradient.dweight),
                                           .statistics = tn__parallel_wants_norm(&args->norm)
                                                             ? TN__STATISTICS_SCRATCH
                                                             : TN__STATISTICS_NONE};
    const tn__parallel_norm left = {.mean = saved->mean, .rstd = saved->rstd, .x = saved->normed};
    tn__parallel_norm norm = {{0}, {0}, {0}};
    TN_TRY(tn__parallel_check_shape(p, "dy", args->dy, p->cut.total, w->info.rows));
    TN_TRY(tn__parallel_check_shape(p, "norm.x", args->norm.x, p->cut.own, w->info.cols));
    if (wants.col || wants.statistics != TN__STATISTICS_NONE)
        TN_TRY(tn__parallel_norm_again(p, w, &args->norm, &left, &wants, &norm));
    return back_products(p, args, w, &norm, delayed);
}

tn_status tn_column_norm_linear_backward(const tn_parallel *parallel,
                                         const tn_norm_linear_backward_args *args,
                                         tn_norm_linear_saved *saved, tn_delayed_gradient *delayed,
                                         tn_stream stream) {
    static const char name[] = "tn_column_norm_linear_backward";
    static const tn_norm_linear_saved nothing = TN_NORM_LINEAR_SAVED_INIT;
    tn__parallel_weight w;
    tn__parallel p;
    int64_t rows = 0;
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", name);
    TN_TRY(x_rows(name, args->norm.x, &rows));
    TN_TRY(tn__parallel_begin(name, parallel, &args->common, rows, stream, &p));
    TN_TRY(tn__parallel_check_weight(&p, "w.weight", &args->w, &w));
    TN_TRY(tn__parallel_check_gradient(&p, &w, &args->gradient, delayed));
    if (saved) {
        tn__parallel_spend(&p, &saved->mean);
        tn__parallel_spend(&p, &saved->rstd);
        tn__parallel_spend(&p, &saved->normed);
    }
    return tn__parallel_end(&p, run_backward(&p, args, &w, saved ? saved : &nothing, delayed));
}
