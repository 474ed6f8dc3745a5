/* LayerNormMLP over tensor-parallel ranks: w1 is column-parallel, w2 row-parallel, and between them
 * each rank has all rows of its own features.
 *
 *     forward    n_q ROW, all n_q ROW             h          [kept: mean, rstd, n_q COL, h]
 *                h        a_q ROW                 partial y  [kept: a_q COL]
 *     backward   all dy_q ROW until dgrad, COL    da
 *                da, h    dh_q ROW until dgrad, COL
 *                partial dn until it is reduced;  dn until the norm's gradient
 *                all dy_q COL, a_q COL, dh_q COL, all n_q COL          wgrad of both
 *
 * Invariant: both weights' gradients, and all sums over rows, are added after everything else.
 */
#include "parallel_norm.h"

enum { FIRST = 0, SECOND = 1 };

typedef struct mlp {
    tn__parallel p;
    tn__parallel_weight w[2];
    tn_activation activation;
    int gated;
    int64_t features;   /* of the activation */
    tn_dtype dtype;     /* of x, h and a */
    tn_tensor next;     /* common.next_weight */
    tn_layer_weight w1; /* without its source: what a backward multiplies again */
} mlp;

static tn_status begin(const char *name, const tn_parallel *parallel, const tn_layer_common *common,
                       tn_tensor x, const tn_layer_weight *w1, const tn_layer_weight *w2,
                       tn_stream stream, mlp *m) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(x, &info));
    TN_TRY(tn__parallel_begin(name, parallel, common, info.rows, stream, &m->p));
    TN_TRY(tn__parallel_check_weight(&m->p, "w1.weight", w1, &m->w[FIRST]));
    TN_TRY(tn__parallel_check_weight(&m->p, "w2.weight", w2, &m->w[SECOND]));
    m->dtype = info.dtype;
    m->features = m->w[SECOND].info.cols;
    m->next = common->next_weight;
    m->p.common.next_weight = (tn_tensor){0};
    TN_TRY(tn__parallel_check_shape(&m->p, "norm.x", x, m->p.cut.own, m->w[FIRST].info.cols));
    return tn__parallel_check_shape(&m->p, "w1.weight", w1->weight,
                                    m->gated ? 2 * m->features : m->features, info.cols);
}

static tn_status make_plain(mlp *m, const char *name, int64_t cols, int is_kept, tn_tensor *out) {
    const tn__parallel_shape shape = {.dtype = m->dtype, .rows = m->p.cut.total, .cols = cols};
    return tn__parallel_make(&m->p, name, &shape, is_kept, out);
}

static int saves(const mlp *m) {
    return m->p.common.saved_scope.value != 0 && !m->p.common.recompute;
}

/* ---- forward --------------------------------------------------------------------------------- */

static tn_status run_activation(const mlp *m, tn_tensor hidden, tn_tensor value,
                                tn_tensor quantized, int row, int col) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    args.activation = m->activation, args.gated = m->gated;
    args.x = hidden, args.y = value;
    args.quantized.tensor = quantized;
    args.quantized.planes =
        (row ? (unsigned)TN_QUANTIZE_ROW : 0u) | (col ? (unsigned)TN_QUANTIZE_COL : 0u);
    return tn_activation_forward(&args, m->p.stream);
}

/* What product 2 reads of the activation; COL of rows that are not in whole tiles is of its value,
 * rank by rank. */
static tn_status activate(mlp *m, tn_tensor hidden, int row, int col, int is_kept,
                          tn__parallel_operand *out) {
    tn__parallel *p = &m->p;
    const tn__parallel_weight *w = &m->w[SECOND];
    const int in_parts = w->is_quantized && col && !tn__row_cut_is_aligned(&p->cut);
    tn__parallel_wants wants = {.name = "quantized activation",
                                .dtype = TN_E4M3,
                                .row = row,
                                .col = col,
                                .is_kept = is_kept};
    tn_tensor value = {0};
    *out = (tn__parallel_operand){{0}, {0}};
    if (!w->is_quantized || in_parts)
        TN_TRY(make_plain(m, "activation", m->features, is_kept && !w->is_quantized, &value));
    if (!w->is_quantized) {
        out->row = out->col = value;
        return run_activation(m, hidden, value, (tn_tensor){0}, 0, 0);
    }
    if (in_parts) wants.is_kept = 0;
    if (row || !in_parts)
        TN_TRY(tn__parallel_quantized(p, w, &wants, p->cut.total, m->features, &out->row));
    TN_TRY(run_activation(m, hidden, value, out->row, row, col && !in_parts));
    out->col = out->row;
    if (!in_parts) return TN_OK;
    wants.is_kept = is_kept;
    TN_TRY(tn__parallel_cast_parts(p, w, value, &wants, &out->col));
    return tn__parallel_let_go(p, value, p->stream);
}

static tn_status run_forward(mlp *m, const tn_norm_mlp_forward_args *args,
                             tn_norm_mlp_saved *kept) {
    tn__parallel *p = &m->p;
    const tn__parallel_weight *first = &m->w[FIRST], *second = &m->w[SECOND];
    const tn__parallel_norm_wants wants = tn__parallel_norm_wants_of(p, first);
    const int keeps_a = second->is_quantized ? second->keeps_x : saves(m) && !second->info.frozen;
    tn__parallel_operand a;
    tn__parallel_norm norm;
    tn_tensor hidden;
    TN_TRY(tn__parallel_check_shape(p, "y", args->y, p->cut.own, second->info.rows));
    TN_TRY(tn__parallel_norm_forward(p, first, &args->norm, &wants, &norm));
    TN_TRY(make_plain(m, "hidden", first->info.rows, saves(m), &hidden));
    TN_TRY(tn__column_forward(p, first, norm.x, hidden));
    if (first->is_quantized)
        TN_TRY(tn__column_keep(p, first, norm.x, &kept->normed));
    else if (wants.is_kept && !tn__is_given(args->norm.normed))
        kept->normed = norm.x;
    TN_TRY(activate(m, hidden, 1, second->keeps_x, keeps_a, &a));
    TN_TRY(tn__parallel_let_go(p, hidden, p->stream));
    p->common.next_weight = m->next;
    TN_TRY(tn__row_forward(p, second, a.row, args->y));
    if (keeps_a) kept->activated = a.col;
    if (saves(m)) kept->mean = norm.mean, kept->rstd = norm.rstd, kept->hidden = hidden;
    return tn__parallel_done_with_row(p, &a);
}

tn_status tn_parallel_norm_mlp_forward(const tn_parallel *parallel,
                                       const tn_norm_mlp_forward_args *args,
                                       tn_norm_mlp_saved *saved, tn_stream stream) {
    static const char name[] = "tn_parallel_norm_mlp_forward";
    tn_norm_mlp_saved kept = TN_NORM_MLP_SAVED_INIT;
    mlp m;
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", name);
    TN_REQUIRE(saved || args->common.saved_scope.value == 0,
               "%s: saved is NULL, but common.saved_scope is given", name);
    m.activation = args->activation, m.gated = args->gated;
    TN_TRY(begin(name, parallel, &args->common, args->norm.x, &args->w1, &args->w2, stream, &m));
    TN_TRY(tn__parallel_end(&m.p, run_forward(&m, args, &kept)));
    if (saved) *saved = kept;
    return TN_OK;
}

/* ---- backward: what forward has left, or made again ------------------------------------------ */

typedef struct backward {
    mlp m;
    const tn_norm_mlp_backward_args *args;
    tn_delayed_gradient *delayed[2]; /* NULL: there is no place for any */
    tn__parallel_norm norm;
    tn_tensor hidden, activated; /* activated: as wgrad reads it */
    tn__parallel_operand dy, dh;
    int wants_norm, wants_first, wants_dweight[2];
} backward;

static tn_status take_saved(backward *b, const tn_norm_mlp_saved *saved) {
    const char *name = b->m.p.name;
    b->hidden = saved->hidden, b->activated = saved->activated;
    TN_REQUIRE(!b->wants_first || tn__is_given(b->hidden),
               "%s: saved->hidden is {0}: forward saves it if common.saved_scope is given", name);
    TN_REQUIRE(!b->wants_dweight[SECOND] || tn__is_given(b->activated),
               "%s: the gradient of w2 needs saved->activated, which is {0}: forward saves it if "
               "common.saved_scope is given",
               name);
    return TN_OK;
}

static tn_status make_again(backward *b) {
    mlp *m = &b->m;
    tn__parallel *p = &m->p;
    tn__parallel_weight first = m->w[FIRST];
    tn__parallel_operand a;
    if (!b->wants_first && !b->wants_dweight[SECOND]) return TN_OK;
    m->w1 = *first.w;
    m->w1.source = m->w1.skip = (tn_tensor){0};
    first.w = &m->w1;
    TN_TRY(make_plain(m, "hidden", first.info.rows, 0, &b->hidden));
    TN_TRY(tn__column_forward(p, &first, b->norm.x, b->hidden));
    if (first.is_quantized && b->wants_dweight[FIRST])
        TN_TRY(tn_plane_drop(b->norm.x, TN_PLANE_ROW, p->wire));
    if (!b->wants_dweight[SECOND]) return TN_OK;
    TN_TRY(activate(m, b->hidden, 0, 1, 0, &a));
    b->activated = a.col;
    return TN_OK;
}

static tn_status open_kept(backward *b, const tn_norm_mlp_saved *saved) {
    const int runs_product =
        b->m.p.common.recompute && (b->wants_first || b->wants_dweight[SECOND]);
    const tn__parallel_norm_wants wants = {.row = runs_product,
                                           .col = b->wants_dweight[FIRST],
                                           .statistics = b->wants_norm ? TN__STATISTICS_SCRATCH
                                                                       : TN__STATISTICS_NONE};
    const tn__parallel_norm left = {.mean = saved->mean, .rstd = saved->rstd, .x = saved->normed};
    if (wants.row || wants.col || b->wants_norm)
        TN_TRY(tn__parallel_norm_again(&b->m.p, &b->m.w[FIRST], &b->args->norm, &left, &wants,
                                       &b->norm));
    return b->m.p.common.recompute ? make_again(b) : take_saved(b, saved);
}

/* ---- backward: the gradients ----------------------------------------------------------------- */

/* dh, and the sums of bias1's gradient, of da, which ends. */
static tn_status back_activation(backward *b, tn_tensor da) {
    mlp *m = &b->m;
    tn__parallel *p = &m->p;
    const tn__parallel_weight *w = &m->w[FIRST];
    const int row = b->wants_norm, col = b->wants_dweight[FIRST];
    const int in_parts = w->is_quantized && col && !tn__row_cut_is_aligned(&p->cut);
    const tn__parallel_wants wants = {
        .name = "quantized gradient of hidden", .dtype = w->gradient_dtype, .row = row, .col = col};
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    args.activation = m->activation, args.gated = m->gated;
    args.dy = da, args.x = b->hidden, args.scope = p->common.scope;
    TN_TRY(tn__parallel_sums(p, b->args->gradient1.dbias, b->args->gradient1.accumulate, 0,
                             &args.dbias));
    if (in_parts || (!w->is_quantized && (row || col)))
        TN_TRY(make_plain(m, "gradient of hidden", w->info.rows, 0, &args.dx));
    if (w->is_quantized && (row || (col && !in_parts))) {
        TN_TRY(tn__parallel_quantized(p, w, &wants, p->cut.total, w->info.rows, &b->dh.row));
        args.quantized.tensor = b->dh.row;
        args.quantized.planes = (row ? (unsigned)TN_QUANTIZE_ROW : 0u) |
                                (col && !in_parts ? (unsigned)TN_QUANTIZE_COL : 0u);
    } else {
        b->dh.row = args.dx;
    }
    TN_TRY(tn_activation_backward(&args, p->stream));
    b->dh.col = b->dh.row;
    TN_TRY(tn__parallel_let_go(p, da, p->stream));
    TN_TRY(tn__parallel_let_go(p, b->hidden, p->stream));
    if (!in_parts) return TN_OK;
    TN_TRY(tn__parallel_cast_parts(p, w, args.dx, &wants, &b->dh.col));
    if (!row) b->dh.row = b->dh.col;
    return tn__parallel_let_go(p, args.dx, p->stream);
}

/* All before the activation. */
static tn_status back_first(backward *b) {
    mlp *m = &b->m;
    tn__parallel *p = &m->p;
    tn_tensor da = {0}, dn;
    if (b->wants_first) TN_TRY(make_plain(m, "gradient of activation", m->features, 0, &da));
    if (b->wants_norm && p->common.side && m->w[FIRST].is_quantized)
        p->common.next_weight = m->w[FIRST].w->weight;
    TN_TRY(tn__row_dgrad(p, &m->w[SECOND], b->dy.row, da));
    p->common.next_weight = m->next;
    if (m->w[SECOND].is_quantized) TN_TRY(tn__parallel_let_go(p, b->dy.row, p->stream));
    if (b->wants_first) TN_TRY(back_activation(b, da));
    TN_TRY(tn__parallel_norm_make_dn(p, &b->args->norm, &dn));
    TN_TRY(tn__column_dgrad(p, &m->w[FIRST], b->dh.row, dn));
    if (b->wants_norm) TN_TRY(tn__parallel_done_with_row(p, &b->dh));
    return tn__parallel_norm_backward(p, &b->args->norm, &b->norm, dn);
}

static tn_status run_backward(backward *b, const tn_norm_mlp_saved *saved) {
    tn__parallel *p = &b->m.p;
    const tn__parallel_weight *second = &b->m.w[SECOND];
    const tn_layer_gradient *of[] = {&b->args->gradient1, &b->args->gradient2};
    const tn__parallel_wants wants = {.name = "quantized dy",
                                      .dtype = second->gradient_dtype,
                                      .row = b->wants_first,
                                      .col = b->wants_dweight[SECOND]};
    tn_tensor sums, x = {0};
    TN_TRY(tn__parallel_check_shape(p, "dy", b->args->dy, p->cut.own, second->info.rows));
    TN_TRY(open_kept(b, saved));
    TN_TRY(tn__parallel_sums(p, of[SECOND]->dbias, of[SECOND]->accumulate, 1, &sums));
    TN_TRY(tn__row_gather_dy(p, second, b->args->dy, &wants, sums, &b->dy));
    TN_TRY(back_first(b));
    if (b->wants_dweight[FIRST]) TN_TRY(tn__column_gather_x(p, &b->m.w[FIRST], b->norm.x, &x));
    TN_TRY(tn__parallel_reduce_sums(p));
    if (b->wants_dweight[SECOND])
        TN_TRY(tn__parallel_wgrad(p, b->dy.col, b->activated, of[SECOND], b->delayed[SECOND]));
    if (b->wants_dweight[FIRST])
        TN_TRY(tn__parallel_wgrad(p, b->dh.col, x, of[FIRST], b->delayed[FIRST]));
    return tn__parallel_add_sums(p);
}

static void plan(backward *b) {
    const tn_norm_mlp_backward_args *args = b->args;
    b->wants_norm = tn__parallel_wants_norm(&args->norm);
    b->wants_dweight[FIRST] = tn__is_given(args->gradient1.dweight);
    b->wants_dweight[SECOND] = tn__is_given(args->gradient2.dweight);
    b->wants_first =
        b->wants_norm || b->wants_dweight[FIRST] || tn__is_given(args->gradient1.dbias);
}

static void spend(tn__parallel *p, tn_norm_mlp_saved *saved) {
    tn__parallel_spend(p, &saved->mean);
    tn__parallel_spend(p, &saved->rstd);
    tn__parallel_spend(p, &saved->normed);
    tn__parallel_spend(p, &saved->hidden);
    tn__parallel_spend(p, &saved->activated);
}

tn_status tn_parallel_norm_mlp_backward(const tn_parallel *parallel,
                                        const tn_norm_mlp_backward_args *args,
                                        tn_norm_mlp_saved *saved, tn_delayed_gradient *delayed,
                                        tn_stream stream) {
    static const char name[] = "tn_parallel_norm_mlp_backward";
    static const tn_norm_mlp_saved nothing = TN_NORM_MLP_SAVED_INIT;
    backward b = {.args = args};
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", name);
    b.m.activation = args->activation, b.m.gated = args->gated;
    if (delayed) b.delayed[FIRST] = &delayed[FIRST], b.delayed[SECOND] = &delayed[SECOND];
    TN_TRY(begin(name, parallel, &args->common, args->norm.x, &args->w1, &args->w2, stream, &b.m));
    TN_TRY(tn__parallel_check_gradient(&b.m.p, &b.m.w[FIRST], &args->gradient1, b.delayed[FIRST]));
    TN_TRY(
        tn__parallel_check_gradient(&b.m.p, &b.m.w[SECOND], &args->gradient2, b.delayed[SECOND]));
    plan(&b);
    if (saved) spend(&b.m.p, saved);
    return tn__parallel_end(&b.m.p, run_backward(&b, saved ? saved : &nothing));
}
