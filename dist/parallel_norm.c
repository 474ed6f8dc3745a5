/* The norm of a parallel layer: see parallel_norm.h. */
#include "parallel_norm.h"

static tn_status make_statistics(tn__parallel *p, tn_norm norm, int64_t rows,
                                 tn__statistics statistics, tn__parallel_norm *out) {
    const tn__parallel_shape shape = {.dtype = TN_FP32, .rows = rows, .cols = 1};
    const int is_kept = statistics == TN__STATISTICS_KEPT;
    if (statistics == TN__STATISTICS_NONE) return TN_OK;
    TN_TRY(tn__parallel_make(p, "rstd", &shape, is_kept, &out->rstd));
    return norm == TN_NORM_LAYER ? tn__parallel_make(p, "mean", &shape, is_kept, &out->mean)
                                 : TN_OK;
}

/* x of a PLAIN recipe is the caller's where it is given. */
static tn_status make_x(tn__parallel *p, const tn__parallel_weight *w, const tn_layer_norm *norm,
                        const tn__parallel_norm_wants *wants, tn_norm_args *args,
                        tn__parallel_norm *out) {
    tn_tensor_info x = TN_TENSOR_INFO_INIT;
    const tn__parallel_wants cast = {.name = "quantized normed",
                                     .dtype = TN_E4M3,
                                     .row = wants->row,
                                     .col = wants->col,
                                     .is_kept = wants->is_kept};
    TN_TRY(tn_tensor_info_get(norm->x, &x));
    const tn__parallel_shape plain = {.dtype = x.dtype, .rows = x.rows, .cols = x.cols};
    args->y = norm->normed;
    TN_TRY(make_statistics(p, norm->norm, x.rows, wants->statistics, out));
    if (w->is_quantized && (wants->row || wants->col)) {
        TN_TRY(tn__parallel_quantized(p, w, &cast, x.rows, x.cols, &out->x));
        args->quantized.tensor = out->x;
        args->quantized.planes = (wants->row ? (unsigned)TN_QUANTIZE_ROW : 0u) |
                                 (wants->col ? (unsigned)TN_QUANTIZE_COL : 0u);
        return TN_OK;
    }
    if (!tn__is_given(args->y))
        TN_TRY(
            tn__parallel_make(p, "normed", &plain, wants->is_kept && !w->is_quantized, &args->y));
    out->x = args->y;
    return TN_OK;
}

tn_status tn__parallel_norm_forward(tn__parallel *p, const tn__parallel_weight *w,
                                    const tn_layer_norm *norm, const tn__parallel_norm_wants *wants,
                                    tn__parallel_norm *out) {
    tn_norm_args args = TN_NORM_ARGS_INIT;
    *out = (tn__parallel_norm){{0}, {0}, {0}};
    TN_REQUIRE(!tn__is_given(norm->residual) || tn__is_given(norm->sum),
               "%s: norm.residual is given, but norm.sum is {0}: backward takes it as x", p->name);
    TN_TRY(make_x(p, w, norm, wants, &args, out));
    args.norm = norm->norm;
    args.x = norm->x, args.residual = norm->residual, args.sum = norm->sum;
    args.gamma = norm->gamma, args.beta = norm->beta;
    args.gamma_from_one = norm->gamma_from_one;
    args.epsilon = norm->epsilon;
    args.mean = out->mean, args.rstd = out->rstd;
    args.scope = p->common.scope;
    return tn_norm_forward(&args, p->stream);
}

tn__parallel_norm_wants tn__parallel_norm_wants_of(const tn__parallel *p,
                                                   const tn__parallel_weight *w) {
    const int saves = p->common.saved_scope.value != 0 && !p->common.recompute;
    tn__parallel_norm_wants wants = {.row = 1};
    if (saves) wants.statistics = TN__STATISTICS_KEPT;
    wants.col = w->keeps_x;
    wants.is_kept =
        w->is_quantized ? w->keeps_x && !p->told->keep_gathered : saves && !w->info.frozen;
    return wants;
}

/* ---- backward -------------------------------------------------------------------------------- */

tn_status tn__parallel_norm_again(tn__parallel *p, const tn__parallel_weight *w,
                                  const tn_layer_norm_gradient *norm,
                                  const tn__parallel_norm *saved,
                                  const tn__parallel_norm_wants *wants, tn__parallel_norm *out) {
    tn_layer_norm again = TN_LAYER_NORM_INIT;
    *out = *saved;
    if (!p->common.recompute) {
        TN_REQUIRE(wants->statistics == TN__STATISTICS_NONE || tn__is_given(saved->rstd),
                   "%s: saved->rstd is {0}: forward saves it if common.saved_scope is given",
                   p->name);
        if (!w->is_quantized && wants->col && tn__is_given(norm->normed)) out->x = norm->normed;
        TN_REQUIRE(!wants->col || tn__is_given(out->x),
                   "%s: the weight's gradient needs saved->normed, which is {0}: forward saves it "
                   "if common.saved_scope is given",
                   p->name);
        return TN_OK;
    }
    again.norm = norm->norm;
    again.x = norm->x, again.gamma = norm->gamma, again.beta = norm->beta;
    again.gamma_from_one = norm->gamma_from_one;
    again.epsilon = norm->epsilon;
    return tn__parallel_norm_forward(p, w, &again, wants, out);
}

tn_status tn__parallel_norm_make_dn(tn__parallel *p, const tn_layer_norm_gradient *norm,
                                    tn_tensor *out) {
    tn_tensor_info x = TN_TENSOR_INFO_INIT;
    *out = (tn_tensor){0};
    if (!tn__parallel_wants_norm(norm)) return TN_OK;
    TN_TRY(tn_tensor_info_get(norm->x, &x));
    const tn__parallel_shape shape = {.dtype = x.dtype, .rows = x.rows, .cols = x.cols};
    return tn__parallel_make(p, "gradient of normed", &shape, 0, out);
}

tn_status tn__parallel_norm_backward(tn__parallel *p, const tn_layer_norm_gradient *norm,
                                     const tn__parallel_norm *from, tn_tensor dn) {
    tn_norm_backward_args args = TN_NORM_BACKWARD_ARGS_INIT;
    if (!tn__parallel_wants_norm(norm)) return TN_OK;
    args.norm = norm->norm;
    args.dy = dn, args.x = norm->x, args.mean = from->mean, args.rstd = from->rstd;
    args.gamma = norm->gamma, args.gamma_from_one = norm->gamma_from_one;
    args.added = norm->added, args.dx = norm->dx;
    args.scope = p->common.scope;
    TN_TRY(tn__parallel_sums(p, norm->dgamma, norm->accumulate, 1, &args.dgamma));
    TN_TRY(tn__parallel_sums(p, norm->dbeta, norm->accumulate, 1, &args.dbeta));
    TN_TRY(tn_norm_backward(&args, p->stream));
    return tn__parallel_let_go(p, dn, p->stream);
}
