/* The products of parallel layers: see parallel_product.h. */
#include "parallel_product.h"

#include "tensor_internal.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static int has_scales(const tn_layer_weight *w) {
    const tn_layer_scale *const scales[] = {&w->weight_scale, &w->x_scale, &w->dy_scale};
    for (int i = 0; i < 3; i++)
        if (tn__is_given(scales[i]->scale) || tn__is_given(scales[i]->amax_history)) return 1;
    return 0;
}

tn_status tn__parallel_check_weight(const tn__parallel *p, const char *role,
                                    const tn_layer_weight *w, tn__parallel_weight *out) {
    const int saves = p->common.saved_scope.value != 0 && !p->common.recompute;
    *out = (tn__parallel_weight){.role = role, .w = w, .info = TN_TENSOR_INFO_INIT};
    TN_TRY(tn_tensor_info_get(w->weight, &out->info));
    out->is_quantized = out->info.format == TN_FORMAT_FP8_BLOCK_2D;
    out->keeps_x = out->is_quantized && saves && !out->info.frozen;
    out->gradient_dtype = p->common.gradient_dtype == TN_E5M2 ? TN_E5M2 : TN_E4M3;
    TN_REQUIRE(!has_scales(w),
               "%s: delayed scaling is given with %s (tensor %s), expected none: it is of %s "
               "weights, which parallel layers do not take",
               p->name, role, out->info.name, tn_format_name(TN_FORMAT_FP8_TENSOR));
    if (out->is_quantized || out->info.format == TN_FORMAT_PLAIN) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "%s: %s (tensor %s) is %s, expected %s or %s", p->name, role,
                   out->info.name, tn_format_name(out->info.format),
                   tn_format_name(TN_FORMAT_FP8_BLOCK_2D), tn_format_name(TN_FORMAT_PLAIN));
}

/* What the call has made moves from one to the other, behind its collectives. */
static tn_status check_pools(const tn__parallel *p, const tn__parallel_weight *w) {
    tn_pool *pool, *saved;
    TN_TRY(tn__scope_pool(p->common.scope, &pool));
    TN_TRY(tn__scope_pool(p->common.saved_scope, &saved));
    TN_REQUIRE(pool == saved,
               "%s: the gradient of %s is to be delayed, but common.scope and common.saved_scope "
               "are of different pools",
               p->name, w->role);
    return TN_OK;
}

static tn_status check_delay(const tn__parallel *p, const tn__parallel_weight *w,
                             const tn_layer_gradient *gradient,
                             const tn_delayed_gradient *delayed) {
    TN_REQUIRE(gradient->delay == 0 || gradient->delay == 1,
               "%s: the delay of the gradient of %s is %d, expected 0 or 1", p->name, w->role,
               gradient->delay);
    if (!gradient->delay) return TN_OK;
    TN_REQUIRE(tn__is_given(gradient->dweight),
               "%s: the gradient of %s is {0}, but is to be delayed", p->name, w->role);
    TN_REQUIRE(delayed, "%s: the gradient of %s is to be delayed, but delayed is NULL", p->name,
               w->role);
    TN_REQUIRE(!tn__is_given(delayed->dweight),
               "%s: the gradient of %s is to be delayed, but delayed still holds another gradient",
               p->name, w->role);
    TN_REQUIRE(p->common.saved_scope.value != 0,
               "%s: the gradient of %s is to be delayed, but common.saved_scope is {0}", p->name,
               w->role);
    return check_pools(p, w);
}

tn_status tn__parallel_check_gradient(const tn__parallel *p, const tn__parallel_weight *w,
                                      const tn_layer_gradient *gradient,
                                      const tn_delayed_gradient *delayed) {
    TN_TRY(check_delay(p, w, gradient, delayed));
    TN_REQUIRE(!tn__is_given(gradient->dweight) || !w->info.frozen,
               "%s: the gradient of %s (tensor %s) is wanted, but it is frozen", p->name, w->role,
               w->info.name);
    if (!tn__is_given(gradient->dweight)) return TN_OK;
    return tn__parallel_check_shape(p, "dweight", gradient->dweight, w->info.rows, w->info.cols);
}

tn_status tn__parallel_check_shape(const tn__parallel *p, const char *role, tn_tensor tensor,
                                   int64_t rows, int64_t cols) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(tensor, &info));
    TN_REQUIRE(info.rows == rows && info.cols == cols,
               "%s: %s (tensor %s) is %lld x %lld, expected %lld x %lld", p->name, role, info.name,
               (long long)info.rows, (long long)info.cols, (long long)rows, (long long)cols);
    return TN_OK;
}

tn_status tn__parallel_own_rows(const char *name, const tn_parallel *told, int64_t total,
                                int64_t *out) {
    TN_REQUIRE(told, "%s: parallel is NULL", name);
    TN_REQUIRE(told->sequence.comm, "%s: parallel.sequence.comm is NULL", name);
    const int ranks = tn_comm_size(told->sequence.comm);
    *out = total / ranks;
    if (told->sequence.rows) *out = told->sequence.rows[tn_comm_rank(told->sequence.comm)];
    TN_REQUIRE(
        told->sequence.rows || total % ranks == 0,
        "%s: %lld rows of %d ranks, and parallel.sequence.rows is NULL, which means that all "
        "have as many",
        name, (long long)total, ranks);
    return TN_OK;
}

/* ---- what both kinds do ---------------------------------------------------------------------- */

static tn_status multiply(const tn__parallel *p, const tn__parallel_weight *w, tn_tensor x,
                          int has_bias, tn_tensor y) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = x, args.w = *w->w, args.y = y;
    args.common = p->common;
    args.common.saved_scope = (tn_scope){0};
    if (!has_bias) args.w.bias = (tn_tensor){0};
    return tn_linear_forward(&args, NULL, p->stream);
}

static tn_status multiply_back(const tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy,
                               tn_tensor dx) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dy, args.w = *w->w, args.dx = dx;
    args.common = p->common;
    return tn_linear_backward(&args, NULL, NULL, p->stream);
}

/* Products that are summed over ranks, of all rows. */
static tn_status make_partial(tn__parallel *p, int64_t cols, tn_tensor *out) {
    const tn__parallel_shape shape = {
        .dtype = p->told->partial_dtype, .rows = p->cut.total, .cols = cols};
    return tn__parallel_make(p, "partial sums", &shape, 0, out);
}

static tn_plane row_plane(const tn__parallel_weight *w) {
    return w->is_quantized ? TN_PLANE_ROW : TN_PLANE_DATA;
}

static tn_plane col_plane(const tn__parallel_weight *w) {
    return w->is_quantized ? TN_PLANE_COL : TN_PLANE_DATA;
}

tn_status tn__parallel_wgrad(tn__parallel *p, tn_tensor dy, tn_tensor x,
                             const tn_layer_gradient *gradient, tn_delayed_gradient *delayed) {
    tn_delayed_gradient product = TN_DELAYED_GRADIENT_INIT;
    if (gradient->delay) return tn__parallel_leave(p, dy, x, gradient, delayed);
    product.dy = dy, product.x = x;
    product.is_callers_dy = product.is_callers_x = 1;
    product.dweight = gradient->dweight;
    product.accumulate = gradient->accumulate;
    return tn_weight_gradient(&product, p->common.scope, p->stream);
}

/* ---- column-parallel ------------------------------------------------------------------------- */

tn_status tn__column_forward(tn__parallel *p, const tn__parallel_weight *w, tn_tensor x,
                             tn_tensor y) {
    tn_tensor all;
    TN_TRY(tn__parallel_gather(p, "gathered x", x, row_plane(w), 0, &all));
    TN_TRY(multiply(p, w, all, 1, y));
    return tn__parallel_let_go(p, all, p->stream);
}

tn_status tn__column_keep(tn__parallel *p, const tn__parallel_weight *w, tn_tensor x,
                          tn_tensor *out) {
    *out = (tn_tensor){0};
    if (!w->is_quantized) return TN_OK;
    if (!w->keeps_x) return tn__parallel_let_go(p, x, p->wire);
    TN_TRY(tn_plane_drop(x, TN_PLANE_ROW, p->wire));
    *out = x;
    if (!p->told->keep_gathered) return TN_OK;
    TN_TRY(tn__parallel_gather(p, "gathered x", x, TN_PLANE_COL, 1, out));
    return tn__parallel_let_go(p, x, p->wire);
}

tn_status tn__column_gather_x(tn__parallel *p, const tn__parallel_weight *w, tn_tensor kept,
                              tn_tensor *out) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    *out = kept;
    TN_TRY(tn_tensor_info_get(kept, &info));
    if (w->is_quantized && p->told->keep_gathered && !p->common.recompute)
        return tn__parallel_check_shape(p, "what was saved of x", kept, p->cut.total_in_tiles,
                                        w->info.cols);
    TN_TRY(tn__parallel_check_shape(p, "what was saved of x", kept, p->cut.own, w->info.cols));
    return tn__parallel_gather(p, "gathered x", kept, col_plane(w), 0, out);
}

tn_status tn__column_dgrad(tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy,
                           tn_tensor dx) {
    tn_tensor partial;
    if (!tn__is_given(dx))
        return w->is_quantized ? tn_plane_release(w->w->weight, TN_PLANE_COL, p->stream) : TN_OK;
    TN_TRY(make_partial(p, w->info.cols, &partial));
    TN_TRY(multiply_back(p, w, dy, partial));
    TN_TRY(tn__parallel_reduce(p, partial, dx));
    return tn__parallel_let_go(p, partial, p->wire);
}

/* ---- row-parallel ---------------------------------------------------------------------------- */

/* The bias is in the sum once: in the product of the first rank, which is where the sum begins. */
tn_status tn__row_forward(tn__parallel *p, const tn__parallel_weight *w, tn_tensor x, tn_tensor y) {
    tn_tensor partial;
    TN_TRY(make_partial(p, w->info.rows, &partial));
    TN_TRY(multiply(p, w, x, p->cut.rank == 0, partial));
    TN_TRY(tn__parallel_reduce(p, partial, y));
    return tn__parallel_let_go(p, partial, p->wire);
}

tn_status tn__row_gather_dy(tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy,
                            const tn__parallel_wants *wants, tn_tensor sums,
                            tn__parallel_operand *out) {
    tn_tensor own;
    *out = (tn__parallel_operand){{0}, {0}};
    TN_TRY(tn__parallel_cast(p, w, dy, wants, sums, &own));
    if (wants->row || (wants->col && !w->is_quantized))
        TN_TRY(tn__parallel_gather(p, "gathered dy", own, row_plane(w), 0, &out->row));
    if (!w->is_quantized)
        out->col = out->row;
    else if (wants->col)
        TN_TRY(tn__parallel_gather(p, "gathered dy", own, TN_PLANE_COL, 0, &out->col));
    return tn__parallel_let_go(p, own, p->wire);
}

tn_status tn__row_dgrad(tn__parallel *p, const tn__parallel_weight *w, tn_tensor dy, tn_tensor dx) {
    if (tn__is_given(dx)) return multiply_back(p, w, dy, dx);
    return w->is_quantized ? tn_plane_release(w->w->weight, TN_PLANE_COL, p->stream) : TN_OK;
}
