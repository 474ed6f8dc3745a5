/* Column- and row-parallel Linear, forward and backward.
 *
 * What is alive when, of a weight in FP8 blocks, beside what the caller has (x_q, dy_q: quantized;
 * "all": of all ranks' rows):
 *
 *     column   forward    x_q ROW, all x_q ROW                      [kept: x_q COL, this rank's]
 *              backward   all x_q COL;  dy_q ROW, COL;  partial dx until it is reduced
 *     row      forward    x_q ROW;  partial y until it is reduced   [kept: x_q COL]
 *              backward   dy_q ROW, COL until gathered;  all dy_q ROW until dgrad;  all dy_q COL
 */
#include "parallel_product.h"

static tn_status rows_of(tn_tensor tensor, int64_t *rows, int64_t *cols) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(tensor, &info));
    *rows = info.rows, *cols = info.cols;
    return TN_OK;
}

static tn_status check_args(const char *name, const void *args, size_t size, size_t expected) {
    TN_REQUIRE(args && size == expected, "%s: args is NULL, or not from the initializer macro",
               name);
    return TN_OK;
}

static tn_status check_saved(const char *name, const void *saved, const tn_layer_common *common) {
    TN_REQUIRE(saved || common->saved_scope.value == 0,
               "%s: saved is NULL, but common.saved_scope is given", name);
    return TN_OK;
}

static const tn__parallel_wants forward_wants = {.name = "quantized x", .dtype = TN_E4M3, .row = 1};

static tn__parallel_wants backward_wants(const tn__parallel_weight *w, int for_dgrad,
                                         int for_wgrad) {
    return (tn__parallel_wants){
        .name = "quantized dy", .dtype = w->gradient_dtype, .row = for_dgrad, .col = for_wgrad};
}

/* ---- both ways ------------------------------------------------------------------------------- */

typedef struct direction {
    const char *name;
    int is_row; /* y is of this rank's rows, else x is */
    tn_status (*run)(tn__parallel *p, const tn_linear_forward_args *args,
                     const tn__parallel_weight *w, tn_tensor *kept);
} direction;

static tn_status forward(const direction *way, const tn_parallel *parallel,
                         const tn_linear_forward_args *args, tn_linear_saved *saved,
                         tn_stream stream) {
    tn__parallel_weight w;
    tn__parallel p;
    tn_tensor kept = {0};
    int64_t rows, cols;
    TN_TRY(check_args(way->name, args, args ? args->size : 0, sizeof *args));
    TN_TRY(check_saved(way->name, saved, &args->common));
    TN_TRY(rows_of(way->is_row ? args->y : args->x, &rows, &cols));
    TN_TRY(tn__parallel_begin(way->name, parallel, &args->common, rows, stream, &p));
    TN_TRY(tn__parallel_check_weight(&p, "w.weight", &args->w, &w));
    TN_TRY(tn__parallel_end(&p, way->run(&p, args, &w, &kept)));
    if (saved) *saved = (tn_linear_saved){.x = kept};
    return TN_OK;
}

/* ---- column-parallel ------------------------------------------------------------------------- */

static tn_status run_column_forward(tn__parallel *p, const tn_linear_forward_args *args,
                                    const tn__parallel_weight *w, tn_tensor *kept) {
    tn__parallel_wants wants = forward_wants;
    tn_tensor x;
    wants.col = w->keeps_x;
    wants.is_kept = w->keeps_x && !p->told->keep_gathered;
    TN_TRY(tn__parallel_check_shape(p, "x", args->x, p->cut.own, w->info.cols));
    TN_TRY(tn__parallel_check_shape(p, "y", args->y, p->cut.total, w->info.rows));
    TN_TRY(tn__parallel_cast(p, w, args->x, &wants, (tn_tensor){0}, &x));
    TN_TRY(tn__column_forward(p, w, x, args->y));
    return tn__column_keep(p, w, x, kept);
}

tn_status tn_column_linear_forward(const tn_parallel *parallel, const tn_linear_forward_args *args,
                                   tn_linear_saved *saved, tn_stream stream) {
    const direction column = {"tn_column_linear_forward", 0, run_column_forward};
    return forward(&column, parallel, args, saved, stream);
}

/* What wgrad reads of this rank's x. */
static tn_status column_x(tn__parallel *p, const tn__parallel_weight *w,
                          const tn_linear_backward_args *args, const tn_linear_saved *saved,
                          tn_tensor *out) {
    const tn__parallel_wants wants = {.name = "quantized x", .dtype = TN_E4M3, .col = 1};
    tn_tensor own = args->x;
    if (w->is_quantized && !p->common.recompute) {
        TN_REQUIRE(saved && tn__is_given(saved->x),
                   "%s: gradient.dweight needs saved->x, which is {0}: forward saves it if "
                   "common.saved_scope is given",
                   p->name);
        own = saved->x;
    } else {
        TN_REQUIRE(tn__is_given(own), "%s: x is {0}, but gradient.dweight needs it", p->name);
        TN_TRY(tn__parallel_cast(p, w, args->x, &wants, (tn_tensor){0}, &own));
    }
    TN_TRY(tn__column_gather_x(p, w, own, out));
    return own.value == out->value ? TN_OK : tn__parallel_let_go(p, own, p->wire);
}

static tn_status run_column_backward(tn__parallel *p, const tn_linear_backward_args *args,
                                     const tn__parallel_weight *w, const tn_linear_saved *saved,
                                     tn_delayed_gradient *delayed) {
    const int for_dgrad = tn__is_given(args->dx), for_wgrad = tn__is_given(args->gradient.dweight);
    const tn__parallel_wants wants = backward_wants(w, for_dgrad, for_wgrad);
    tn__parallel_operand dy;
    tn_tensor x = {0}, sums;
    TN_TRY(tn__parallel_check_shape(p, "dy", args->dy, p->cut.total, w->info.rows));
    if (for_dgrad) TN_TRY(tn__parallel_check_shape(p, "dx", args->dx, p->cut.own, w->info.cols));
    TN_TRY(tn__parallel_sums(p, args->gradient.dbias, args->gradient.accumulate, 0, &sums));
    if (for_wgrad) TN_TRY(column_x(p, w, args, saved, &x));
    TN_TRY(tn__parallel_cast_whole(p, w, args->dy, &wants, sums, &dy));
    TN_TRY(tn__column_dgrad(p, w, dy.row, args->dx));
    if (for_wgrad) {
        TN_TRY(tn__parallel_done_with_row(p, &dy));
        TN_TRY(tn__parallel_wgrad(p, dy.col, x, &args->gradient, delayed));
    }
    return tn__parallel_add_sums(p);
}

tn_status tn_column_linear_backward(const tn_parallel *parallel,
                                    const tn_linear_backward_args *args, tn_linear_saved *saved,
                                    tn_delayed_gradient *delayed, tn_stream stream) {
    static const char name[] = "tn_column_linear_backward";
    tn__parallel_weight w;
    tn__parallel p;
    int64_t rows, cols, own;
    TN_TRY(check_args(name, args, args ? args->size : 0, sizeof *args));
    TN_TRY(rows_of(args->dy, &rows, &cols));
    TN_TRY(tn__parallel_own_rows(name, parallel, rows, &own));
    TN_TRY(tn__parallel_begin(name, parallel, &args->common, own, stream, &p));
    TN_TRY(tn__parallel_check_weight(&p, "w.weight", &args->w, &w));
    TN_TRY(tn__parallel_check_gradient(&p, &w, &args->gradient, delayed));
    if (saved) tn__parallel_spend(&p, &saved->x);
    return tn__parallel_end(&p, run_column_backward(&p, args, &w, saved, delayed));
}

/* ---- row-parallel ---------------------------------------------------------------------------- */

static tn_status run_row_forward(tn__parallel *p, const tn_linear_forward_args *args,
                                 const tn__parallel_weight *w, tn_tensor *kept) {
    tn__parallel_wants wants = forward_wants;
    tn__parallel_operand x;
    wants.col = wants.is_kept = w->keeps_x;
    TN_TRY(tn__parallel_check_shape(p, "x", args->x, p->cut.total, w->info.cols));
    TN_TRY(tn__parallel_check_shape(p, "y", args->y, p->cut.own, w->info.rows));
    TN_TRY(tn__parallel_cast_whole(p, w, args->x, &wants, (tn_tensor){0}, &x));
    TN_TRY(tn__row_forward(p, w, x.row, args->y));
    if (w->keeps_x) *kept = x.col;
    return tn__parallel_done_with_row(p, &x);
}

tn_status tn_row_linear_forward(const tn_parallel *parallel, const tn_linear_forward_args *args,
                                tn_linear_saved *saved, tn_stream stream) {
    const direction row = {"tn_row_linear_forward", 1, run_row_forward};
    return forward(&row, parallel, args, saved, stream);
}

/* What wgrad reads of x, which is of all rows. */
static tn_status row_x(tn__parallel *p, const tn__parallel_weight *w,
                       const tn_linear_backward_args *args, const tn_linear_saved *saved,
                       tn_tensor *out) {
    const tn__parallel_wants wants = {.name = "quantized x", .dtype = TN_E4M3, .col = 1};
    tn__parallel_operand x;
    if (w->is_quantized && !p->common.recompute) {
        TN_REQUIRE(saved && tn__is_given(saved->x),
                   "%s: gradient.dweight needs saved->x, which is {0}: forward saves it if "
                   "common.saved_scope is given",
                   p->name);
        *out = saved->x;
        return tn__parallel_check_shape(p, "saved->x", *out, p->cut.total_in_tiles, w->info.cols);
    }
    TN_REQUIRE(tn__is_given(args->x), "%s: x is {0}, but gradient.dweight needs it", p->name);
    TN_TRY(tn__parallel_check_shape(p, "x", args->x, p->cut.total, w->info.cols));
    TN_TRY(tn__parallel_cast_whole(p, w, args->x, &wants, (tn_tensor){0}, &x));
    *out = x.col;
    return TN_OK;
}

static tn_status run_row_backward(tn__parallel *p, const tn_linear_backward_args *args,
                                  const tn__parallel_weight *w, const tn_linear_saved *saved,
                                  tn_delayed_gradient *delayed) {
    const int for_dgrad = tn__is_given(args->dx), for_wgrad = tn__is_given(args->gradient.dweight);
    const tn__parallel_wants wants = backward_wants(w, for_dgrad, for_wgrad);
    tn__parallel_operand dy;
    tn_tensor x = {0}, sums;
    TN_TRY(tn__parallel_check_shape(p, "dy", args->dy, p->cut.own, w->info.rows));
    if (for_dgrad) TN_TRY(tn__parallel_check_shape(p, "dx", args->dx, p->cut.total, w->info.cols));
    TN_TRY(tn__parallel_sums(p, args->gradient.dbias, args->gradient.accumulate, 1, &sums));
    if (for_wgrad) TN_TRY(row_x(p, w, args, saved, &x));
    TN_TRY(tn__row_gather_dy(p, w, args->dy, &wants, sums, &dy));
    TN_TRY(tn__parallel_reduce_sums(p));
    TN_TRY(tn__row_dgrad(p, w, dy.row, args->dx));
    if (w->is_quantized) TN_TRY(tn__parallel_let_go(p, dy.row, p->stream));
    if (for_wgrad) TN_TRY(tn__parallel_wgrad(p, dy.col, x, &args->gradient, delayed));
    return tn__parallel_add_sums(p);
}

tn_status tn_row_linear_backward(const tn_parallel *parallel, const tn_linear_backward_args *args,
                                 tn_linear_saved *saved, tn_delayed_gradient *delayed,
                                 tn_stream stream) {
    static const char name[] = "tn_row_linear_backward";
    tn__parallel_weight w;
    tn__parallel p;
    int64_t rows, cols;
    TN_TRY(check_args(name, args, args ? args->size : 0, sizeof *args));
    TN_TRY(rows_of(args->dy, &rows, &cols));
    TN_TRY(tn__parallel_begin(name, parallel, &args->common, rows, stream, &p));
    TN_TRY(tn__parallel_check_weight(&p, "w.weight", &args->w, &w));
    TN_TRY(tn__parallel_check_gradient(&p, &w, &args->gradient, delayed));
    if (saved) tn__parallel_spend(&p, &saved->x);
    return tn__parallel_end(&p, run_row_backward(&p, args, &w, saved, delayed));
}
