/* The linear layer of a mixture's experts: backward, and the weight gradients that it may delay.
 *
 * Invariants:
 * - All outputs are leased, and all addresses that are known then are asked for their alignment,
 *   before the first product is launched. dbiases and dweights are held until dx has been launched:
 *   a failure before leaves them as they were.
 * - A weight's COL plane is under lease only around its own product. What this derives is released
 *   before the next one is derived: their peak is one plane, not their sum. With a side stream the
 *   next one is derived beside the product: their peak is two.
 */
#include "layer_grouped.h"

#include "host_alloc.h"
#include "op_produce.h"
#include "tensor_internal.h"

typedef struct backward {
    const tn_grouped_linear_backward_args *args;
    tn_grouped_saved *saved;
    tn_grouped_delayed *delayed;
    int is_late; /* only what an earlier backward has delayed */
    tn__experts experts;
    tn_dtype dy_dtype; /* of quantized dy */
    tn_tensor_info dy, x, dx;
    int wants_dx, wants_dweights, wants_dbiases;
    int delays; /* dweights are wanted, and not now */
    tn__experts_cast dy_cast, x_cast;
    tn__grouped_operand dy_rows, dy_cols, x_cols; /* of DGRAD and WGRAD */
    tn__matrix dy_matrix;                         /* for dbiases, and PLAIN products */
    tn__gemm_work *dgrads, *wgrads;               /* of the groups; one allocation */
    tn__column_sums *sums;                        /* for dbiases, likewise */
} backward;

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_dweight(tn__op_call *call, backward *b, int64_t e) {
    const tn_tensor dweight = tn__tensor_at(b->args->dweights, e);
    const tn_tensor_info *first = &b->experts.weight;
    tn_tensor_info weight, info;
    if (tn__is_no_tensor(dweight)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "weight", b->experts.args->weights[e], &weight));
    TN_REQUIRE(!weight.frozen, "%s: dweights[%lld] is given, but weight (tensor %s) is frozen",
               call->name, (long long)e, weight.name);
    TN_TRY(tn__op_tensor(call, "dweight", dweight, &info));
    TN_TRY(tn__op_require_float(call, "dweight", &info));
    b->wants_dweights = 1;
    return tn__op_require_shape(call, "dweight", &info, first->rows, first->cols,
                                "the shape of the weight");
}

/* The products of gradients lease no weight, so that no lease tells. */
static tn_status check_apart(const tn__op_call *call, const backward *b) {
    const tn_tensor *weights = b->experts.args->weights;
    const int64_t count = b->experts.groups.count;
    tn_status status = TN_OK;
    if (!b->wants_dweights || !b->experts.is_plain) return TN_OK;
    tn__element_range *ranges = tn__host_alloc((size_t)count, sizeof *ranges);
    if (!ranges) return TN_OUT_OF_HOST_MEMORY;
    for (int64_t i = 0; i < count && status == TN_OK; i++)
        status = tn__tensor_elements(weights[i], &ranges[i]);
    for (int64_t e = 0; e < count && status == TN_OK; e++) {
        const tn_tensor dweight = tn__tensor_at(b->args->dweights, e);
        tn__element_range range;
        if (tn__is_no_tensor(dweight)) continue;
        status = tn__tensor_elements(dweight, &range);
        for (int64_t i = 0; i < count && status == TN_OK; i++)
            if (tn__ranges_overlap(&range, &ranges[i]))
                status = TN_FAIL(TN_INVALID_ARGUMENT,
                                 "%s: dweights[%lld] and weights[%lld] share memory: the gradient "
                                 "would overwrite the weight",
                                 call->name, (long long)e, (long long)i);
    }
    tn__host_free(ranges);
    return status;
}

static tn_status check_dbias(tn__op_call *call, backward *b, int64_t e) {
    const tn_tensor dbias = tn__tensor_at(b->args->dbiases, e);
    tn_tensor_info info;
    if (tn__is_no_tensor(dbias)) return TN_OK;
    b->wants_dbiases = 1;
    return tn__op_check_column_sums(call, "dbias", dbias, b->experts.weight.rows, &info);
}

/* A grouped COL plane that an earlier call has left. */
static tn_status check_left(tn__op_call *call, const char *role, const tn_grouped_plane *plane,
                            const backward *b, tn_dtype dtype, int64_t cols) {
    const tn__grouped_operand of = {
        .format = b->experts.operand, .is_along_rows = 1, .dtype = dtype, .cols = cols};
    return tn__grouped_plane_check(call, role, plane, &b->experts.groups, &of);
}

static int has_saved_x(const backward *b) { return b->saved && tn__has_plane(&b->saved->x); }

static tn_status check_x(tn__op_call *call, backward *b) {
    const int64_t k = b->experts.weight.cols;
    if (!b->wants_dweights || (b->delays && has_saved_x(b))) return TN_OK;
    if (!b->experts.is_plain && has_saved_x(b))
        return check_left(call, "saved->x", &b->saved->x, b, TN__EXPERTS_X_DTYPE, k);
    if (b->delays) return TN_OK; /* the later call is given x */
    TN_REQUIRE(!tn__is_no_tensor(b->args->x),
               "%s: dweights need x: it is {0}, and forward has saved nothing for them",
               call->name);
    return tn__experts_check_rows(call, "x", b->args->x, &b->experts, k, 1, &b->x);
}

static tn_status check_dtype(const tn__op_call *call, backward *b) {
    const int dtype = (int)b->args->gradient_dtype;
    TN_REQUIRE(dtype == 0 || dtype == TN_E4M3 || dtype == TN_E5M2,
               "%s: gradient_dtype is %d, expected TN_E4M3 or TN_E5M2", call->name, dtype);
    b->dy_dtype = dtype == TN_E5M2 ? TN_E5M2 : TN_E4M3;
    if (b->experts.is_plain || dtype != TN_E5M2 || b->experts.weight.dtype != TN_E5M2) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: gradient_dtype and weight (tensor %s) are both E5M2: one "
                   "must be E4M3",
                   call->name, b->experts.weight.name);
}

static tn_status check_delay(tn__op_call *call, backward *b) {
    if (b->is_late) {
        if (b->experts.is_plain || !b->wants_dweights) return TN_OK;
        TN_REQUIRE(b->delayed && tn__has_plane(&b->delayed->dy),
                   "%s: delayed has no dy: it is what a backward with `delay` leaves", call->name);
        return check_left(call, "delayed->dy", &b->delayed->dy, b, b->dy_dtype,
                          b->experts.weight.rows);
    }
    b->delays = b->args->delay != 0 && b->wants_dweights;
    TN_REQUIRE(!b->delays || b->delayed,
               "%s: delay is set and delayed is NULL: there is no place for what is left",
               call->name);
    TN_REQUIRE(!b->delays || (tn__is_no_tensor(b->delayed->dy.data) &&
                              tn__is_no_tensor(b->delayed->dy.scale)),
               "%s: delay is set, but delayed still holds another gradient", call->name);
    TN_REQUIRE(!b->delays || b->experts.is_plain || b->args->saved_scope.value != 0,
               "%s: delay is set and saved_scope is {0}: name one for what is left", call->name);
    return TN_OK;
}

static tn_status check(tn__op_call *call, backward *b) {
    const tn_grouped_linear_backward_args *args = b->args;
    const tn_tensor_info *weight = &b->experts.weight;
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__experts_check(call, &args->experts, &b->experts));
    TN_TRY(check_dtype(call, b));
    for (int64_t e = 0; e < args->experts.groups; e++) {
        TN_TRY(check_dweight(call, b, e));
        if (!b->is_late) TN_TRY(check_dbias(call, b, e));
    }
    TN_TRY(check_apart(call, b));
    TN_TRY(check_delay(call, b));
    if (!b->is_late || b->experts.is_plain)
        TN_TRY(tn__experts_check_rows(call, "dy", args->dy, &b->experts, weight->rows, 1, &b->dy));
    b->wants_dx = !b->is_late && !tn__is_no_tensor(args->dx);
    if (b->wants_dx)
        TN_TRY(tn__experts_check_rows(call, "dx", args->dx, &b->experts, weight->cols, 0, &b->dx));
    return check_x(call, b);
}

/* ---- operands -------------------------------------------------------------------------------- */

static int is_wgrad_now(const backward *b) { return b->wants_dweights && !b->delays; }

static tn_status lease_dy(tn__op_call *call, backward *b) {
    const int is_read =
        b->wants_dbiases || (b->experts.is_plain && (b->wants_dx || is_wgrad_now(b)));
    if (is_read) TN_TRY(tn__op_lease_matrix(call, b->args->dy, &b->dy, TN_READ, &b->dy_matrix));
    b->dy_rows =
        (tn__grouped_operand){.dtype = b->dy.dtype, .cols = b->dy.cols, .data = b->dy_matrix.data};
    b->dy_cols = b->dy_rows;
    b->dy_cols.is_along_rows = 1;
    return TN_OK;
}

/* dy in both planes that are wanted, in one pass over it. */
static tn_status quantize_dy(tn__op_call *call, backward *b) {
    b->dy_cast = (tn__experts_cast){.src = b->args->dy,
                                    .info = &b->dy,
                                    .dtype = b->dy_dtype,
                                    .scale = &b->experts.args->dy_scale,
                                    .has_row = b->wants_dx,
                                    .has_col = b->wants_dweights,
                                    .keeps_col = b->delays,
                                    .keep_scope = b->args->saved_scope};
    TN_TRY(tn__experts_quantize(call, &b->experts, b->args->scope, &b->dy_cast));
    b->dy_rows = b->dy_cast.row;
    b->dy_cols = b->dy_cast.col;
    return TN_OK;
}

static tn_status lease_left_dy(tn__op_call *call, backward *b) {
    b->dy_cols = (tn__grouped_operand){.format = b->experts.operand,
                                       .is_along_rows = 1,
                                       .dtype = b->dy_dtype,
                                       .cols = b->experts.weight.rows};
    return tn__grouped_plane_lease(call, &b->delayed->dy, TN_READ, &b->dy_cols);
}

/* Saved, or quantized again, or as it is. */
static tn_status begin_x(tn__op_call *call, backward *b) {
    const tn_grouped_plane x = {b->args->x, {0}};
    b->x_cols = (tn__grouped_operand){.format = b->experts.operand,
                                      .is_along_rows = 1,
                                      .dtype = TN__EXPERTS_X_DTYPE,
                                      .cols = b->experts.weight.cols};
    if (b->experts.is_plain) {
        b->x_cols.dtype = b->x.dtype;
        return tn__grouped_plane_lease(call, &x, TN_READ, &b->x_cols);
    }
    if (has_saved_x(b)) return tn__grouped_plane_lease(call, &b->saved->x, TN_READ, &b->x_cols);
    b->x_cast = (tn__experts_cast){.src = b->args->x,
                                   .info = &b->x,
                                   .dtype = TN__EXPERTS_X_DTYPE,
                                   .scale = &b->experts.args->x_scale,
                                   .has_col = 1};
    TN_TRY(tn__experts_quantize(call, &b->experts, b->args->scope, &b->x_cast));
    b->x_cols = b->x_cast.col;
    return TN_OK;
}

static tn_status begin_operands(tn__op_call *call, backward *b) {
    TN_TRY(b->is_late && !b->experts.is_plain ? TN_OK : lease_dy(call, b));
    if (!b->experts.is_plain && b->wants_dweights && b->is_late) TN_TRY(lease_left_dy(call, b));
    if (!b->experts.is_plain && !b->is_late) TN_TRY(quantize_dy(call, b));
    return is_wgrad_now(b) ? begin_x(call, b) : TN_OK;
}

/* ---- works ----------------------------------------------------------------------------------- */

static tn_status outline_dgrad(backward *b, int64_t e) {
    tn__gemm_work *work = &b->dgrads[e];
    work->a = tn__grouped_operand_take(&b->dy_rows, &b->experts.groups, e);
    work->contracted = b->experts.weight.rows;
    tn__grouped_outline_rows(&b->experts.groups, e, &b->dx, work);
    return tn__experts_outline_weight(&b->experts, e, TN_GEMM_DGRAD, &work->b);
}

/* A group whose gradient is not wanted is passed by: its work has no rows. */
static tn_status outline_wgrad(tn__op_call *call, backward *b, int64_t e) {
    const tn_tensor dweight = tn__tensor_at(b->args->dweights, e);
    tn__gemm_work *work = &b->wgrads[e];
    tn_tensor_info d;
    work->a = tn__grouped_operand_take(&b->dy_cols, &b->experts.groups, e);
    work->b = tn__grouped_operand_take(&b->x_cols, &b->experts.groups, e);
    work->contracted = tn__group_rows(&b->experts.groups, e);
    work->accumulate = b->args->accumulate != 0;
    if (tn__is_no_tensor(dweight)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "dweight", dweight, &d));
    work->d = (tn__matrix){d.dtype, NULL, d.rows, d.cols};
    return TN_OK;
}

static tn_status make_works(tn__op_call *call, backward *b) {
    const int64_t groups = b->experts.groups.count;
    b->sums = tn__host_alloc((size_t)groups, sizeof *b->sums);
    if (!b->sums) return TN_OUT_OF_HOST_MEMORY;
    b->dgrads = tn__host_alloc((size_t)groups * 2, sizeof *b->dgrads);
    if (!b->dgrads) return TN_OUT_OF_HOST_MEMORY;
    b->wgrads = b->dgrads + groups;
    for (int64_t e = 0; e < groups; e++) {
        if (b->wants_dx) TN_TRY(outline_dgrad(b, e));
        if (is_wgrad_now(b)) TN_TRY(outline_wgrad(call, b, e));
    }
    return tn__grouped_scratch(call, b->args->scope, b->dgrads, groups * 2);
}

/* ---- dgrad ----------------------------------------------------------------------------------- */

static tn_status lease_weight(tn__op_call *call, const backward *b, int64_t e) {
    tn__gemm_work *work = &b->dgrads[e];
    tn_plane_view view;
    TN_TRY(tn__op_lease_derived(call, b->experts.args->weights[e], b->experts.dgrad.b, &view));
    work->b.data = view.data, work->b.scale = view.scale;
    return TN_OK;
}

/* PLAIN weights, too, which may be views that begin anywhere. Others are derived one by one. */
static tn_status lease_dx(tn__op_call *call, backward *b) {
    const tn__experts *experts = &b->experts;
    tn__matrix dx;
    if (!b->wants_dx) return TN_OK;
    for (int64_t e = 0; experts->is_plain && e < experts->groups.count; e++)
        if (b->dgrads[e].d.rows > 0) TN_TRY(lease_weight(call, b, e));
    TN_TRY(tn__op_lease_matrix(call, b->args->dx, &b->dx, TN_WRITE, &dx));
    for (int64_t e = 0; e < experts->groups.count; e++)
        tn__grouped_address_rows(&experts->groups, e, &dx, &b->dgrads[e]);
    return TN_OK;
}

/* The plane that is read after this group's is derived beside its product: the next group's, or
 * behind the last one another layer's. */
static tn_status derive_next(tn__op_call *call, backward *b, int64_t e) {
    const tn_experts *args = b->experts.args;
    const int64_t next = tn__experts_next_group(&b->experts, e);
    const tn_tensor weight = next < args->groups ? args->weights[next] : args->next_weight;
    if (!args->side) return TN_OK;
    return tn__layer_derive_ahead(call, weight, args->side, &b->dgrads[e]);
}

static tn_status dgrad_group(tn__op_call *call, backward *b, int64_t e) {
    const int lease = call->lease_count, leases = !b->experts.is_plain;
    if (b->dgrads[e].d.rows == 0) return TN_OK;
    if (leases) TN_TRY(lease_weight(call, b, e));
    TN_TRY(derive_next(call, b, e));
    TN_TRY(tn__gemm_launch(call, &b->dgrads[e]));
    return leases ? tn__op_end_lease(call, lease) : TN_OK;
}

/* dx, and the release of each weight's COL, which comes also without dx. */
static tn_status dgrad(tn__op_call *call, backward *b) {
    const tn__experts *experts = &b->experts;
    for (int64_t e = 0; e < experts->groups.count; e++) {
        if (b->wants_dx) TN_TRY(dgrad_group(call, b, e));
        if (!experts->is_plain)
            TN_TRY(tn_plane_release(experts->args->weights[e], experts->dgrad.b, call->stream));
    }
    return TN_OK;
}

/* ---- gradients of parameters ----------------------------------------------------------------- */

static tn_status lease_dweights(tn__op_call *call, backward *b) {
    const tn_access access = b->args->accumulate ? TN_UPDATE : TN_WRITE;
    if (!is_wgrad_now(b)) return TN_OK;
    for (int64_t e = 0; e < b->experts.groups.count; e++) {
        const tn_tensor dweight = tn__tensor_at(b->args->dweights, e);
        tn_plane_view view;
        if (tn__is_no_tensor(dweight)) continue;
        TN_TRY(tn__op_lease(call, dweight, TN_PLANE_DATA, access, &view));
        tn__op_hold(call);
        b->wgrads[e].d.data = view.data;
    }
    return TN_OK;
}

static tn_status lease_dbiases(tn__op_call *call, const backward *b) {
    const int64_t cols = b->experts.weight.rows;
    int64_t most = 0;
    void *scratch = NULL;
    if (!b->wants_dbiases) return TN_OK;
    for (int64_t e = 0; e < b->experts.groups.count; e++) {
        const tn_tensor dbias = tn__tensor_at(b->args->dbiases, e);
        const int64_t tiles = tn__units_of(tn__group_rows(&b->experts.groups, e), 128);
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        TN_TRY(tn__op_check_column_sums(call, "dbias", dbias, cols, &info));
        TN_TRY(tn__op_lease_column_sums(call, "dbias", dbias, &info, b->args->accumulate != 0, NULL,
                                        &b->sums[e]));
        if (tn__is_no_tensor(dbias)) continue;
        tn__op_hold(call);
        if (tiles > most) most = tiles;
    }
    TN_TRY(tn__op_scratch_bytes(call, b->args->scope, (size_t)most * (size_t)cols * sizeof(float),
                                &scratch));
    for (int64_t e = 0; e < b->experts.groups.count; e++)
        b->sums[e].tile_sums = scratch;
    return TN_OK;
}

/* tn_bias_gradient's sums of the rows of a group. */
static tn_status dbias_group(tn__op_call *call, const backward *b, int64_t e) {
    const tn__column_sums *sums = &b->sums[e];
    const int64_t rows = tn__group_rows(&b->experts.groups, e), cols = b->dy.cols;
    const size_t begins = (size_t)b->experts.groups.offsets[e] * (size_t)cols;
    tn__produce_work work = {.producer = TN__PRODUCE_ACTIVATION,
                             .curve = {.kind = TN__CURVE_IDENTITY},
                             .x = {b->dy.dtype, NULL, rows, cols},
                             .cast = {.src = {b->dy.dtype, NULL, rows, cols},
                                      .format = TN_FORMAT_FP8_BLOCK_1D,
                                      .dtype = TN_E4M3},
                             .tile_sums = sums->tile_sums};
    if (!sums->to.data) return TN_OK;
    work.x.data = (unsigned char *)b->dy_matrix.data + begins * tn_dtype_bytes(b->dy.dtype);
    if (rows > 0) TN_TRY(TN__OP_RUN(call, produce, &work));
    return tn__op_add_up_tiles(call, rows, NULL, sums);
}

static tn_status parameter_gradients(tn__op_call *call, const backward *b) {
    tn__op_hold_no_more(call);
    for (int64_t e = 0; e < b->experts.groups.count; e++) {
        if (b->wants_dbiases) TN_TRY(dbias_group(call, b, e));
        if (is_wgrad_now(b)) TN_TRY(tn__gemm_launch(call, &b->wgrads[e]));
    }
    return TN_OK;
}

/* ---- the calls ------------------------------------------------------------------------------- */

static tn_status run(tn__op_call *call, backward *b) {
    enum { OTHER_LEASES = 20 };
    const int64_t groups = b->experts.groups.count;
    if (groups == 0) return TN_OK;
    TN_TRY(tn__op_reserve_leases(call, 3 * (int)groups + OTHER_LEASES));
    TN_TRY(begin_operands(call, b));
    TN_TRY(make_works(call, b));
    TN_TRY(lease_dbiases(call, b));
    TN_TRY(lease_dweights(call, b));
    TN_TRY(lease_dx(call, b));
    TN_TRY(tn__grouped_require_aligned(call, b->dgrads, groups * 2));
    if (!b->is_late) TN_TRY(dgrad(call, b));
    return parameter_gradients(call, b);
}

/* What has had its last use is destroyed only when all else is done: a failure takes nothing, and
 * the call has succeeded whatever becomes of that. */
static tn_status finish(tn__op_call *call, backward *b, tn_status status) {
    status = tn__op_finish(call, status);
    tn__host_free(b->dgrads);
    tn__host_free(b->sums);
    if (status != TN_OK) {
        tn__grouped_plane_end(&b->dy_cast.kept, call->stream);
        return status;
    }
    if (b->delays) {
        b->delayed->dy = b->dy_cast.kept;
        return TN_OK;
    }
    if (b->saved) tn__grouped_plane_end(&b->saved->x, call->stream);
    if (b->is_late && b->delayed) tn__grouped_plane_end(&b->delayed->dy, call->stream);
    return TN_OK;
}

tn_status tn_grouped_linear_backward(const tn_grouped_linear_backward_args *args,
                                     tn_grouped_saved *saved, tn_grouped_delayed *delayed,
                                     tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_grouped_linear_backward", stream);
    backward b = {.args = args, .saved = saved, .delayed = delayed};
    TN_TRY(tn__op_init());
    TN_TRY(check(&call, &b));
    return finish(&call, &b, run(&call, &b));
}

tn_status tn_grouped_linear_weight_gradient(const tn_grouped_linear_backward_args *args,
                                            tn_grouped_saved *saved, tn_grouped_delayed *delayed,
                                            tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_grouped_linear_weight_gradient", stream);
    backward b = {.args = args, .saved = saved, .delayed = delayed, .is_late = 1};
    TN_TRY(tn__op_init());
    TN_TRY(check(&call, &b));
    return finish(&call, &b, run(&call, &b));
}
