/* The linear layer of a mixture's experts: what is common, and forward.
 *
 * What is alive when (R rows in all groups, weights 2D of [n, k]):
 *
 *     forward    x ROW   (weights ROW)                  [saved: x COL, if one is trainable]
 *     backward   dy ROW  (one weight's COL at a time)   dgrad, group by group
 *                dy COL  (saved x COL)                  wgrad
 *
 * Invariants:
 * - One cast makes both planes of x (or dy) for all groups: of blocks in one launch, of FP8_TENSOR
 *   group by group, each by an amax of its own.
 * - Planes have exactly the bytes that the groups need, as the host knows them. Where the device's
 *   offsets say otherwise nothing is written: the caller's error word tells.
 * - What is kept beyond a call is made by it, and ended by it if it fails.
 */
#include "layer_grouped.h"

#include "format_table.h"
#include "host_alloc.h"
#include "op_produce.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_weight(tn__op_call *call, const tn__experts *of, int64_t e,
                              tn_tensor_info *info) {
    const tn_tensor_info *first = &of->weight;
    TN_TRY(tn__op_tensor(call, "weight", of->args->weights[e], info));
    if (e == 0) return TN_OK;
    TN_TRY(tn__op_require_format(call, "weight", info, first->format));
    TN_TRY(tn__op_require_dtype(call, "weight", info, first->dtype));
    TN_REQUIRE(info->scale_mode == first->scale_mode,
               "%s: weight (tensor %s) has scale mode %d, expected %d, the first one's (tensor %s)",
               call->name, info->name, (int)info->scale_mode, (int)first->scale_mode, first->name);
    return tn__op_require_shape(call, "weight", info, first->rows, first->cols,
                                "the shape of the first one");
}

static tn_status check_recipe(const tn__op_call *call, tn__experts *of) {
    const tn_tensor_info *weight = &of->weight;
    const int operand = tn__layer_operand_of(weight->format);
    if (operand < 0)
        return TN_FAIL(TN_UNSUPPORTED, "%s: weight (tensor %s) is %s: experts take %s, %s or %s",
                       call->name, weight->name, tn_format_name(weight->format),
                       tn_format_name(TN_FORMAT_FP8_BLOCK_2D), tn_format_name(TN_FORMAT_FP8_TENSOR),
                       tn_format_name(TN_FORMAT_PLAIN));
    of->operand = (tn_format)operand;
    of->is_plain = of->operand == TN_FORMAT_PLAIN;
    of->fprop.b = of->dgrad.b = TN_PLANE_DATA;
    if (of->is_plain) return tn__op_require_float(call, "weight", weight);
    TN_TRY(tn__gemm_planes(call, TN_GEMM_FPROP, of->operand, weight->format, &of->fprop));
    TN_TRY(tn__gemm_planes(call, TN_GEMM_DGRAD, of->operand, weight->format, &of->dgrad));
    if (of->dgrad.b == TN_PLANE_COL) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: weight (tensor %s) is %s, of which %s multiplies plane %s where experts "
                   "have %s: take %s weights",
                   call->name, weight->name, tn_format_name(weight->format),
                   tn_architecture_name(tn_device_architecture(call->device)),
                   tn_plane_name(of->dgrad.b), tn_plane_name(TN_PLANE_COL),
                   tn_format_name(TN_FORMAT_PLAIN));
}

tn_status tn__experts_check(tn__op_call *call, const tn_experts *args, tn__experts *out) {
    *out = (tn__experts){.args = args, .weight = TN_TENSOR_INFO_INIT, .is_plain = 1};
    TN_TRY(tn__group_list_check(call, args->groups, args->offsets, &out->groups));
    if (args->groups == 0) return TN_OK;
    TN_REQUIRE(args->weights, "%s: experts.weights is NULL", call->name);
    for (int64_t e = 0; e < args->groups; e++) {
        tn_tensor_info info;
        TN_TRY(check_weight(call, out, e, &info));
        if (e == 0) out->weight = info;
        out->is_any_trainable |= !info.frozen;
    }
    TN_TRY(check_recipe(call, out));
    TN_TRY(tn__layer_check_ahead(call, "experts", args->next_weight, args->side));
    TN_TRY(
        tn__layer_check_scale(call, &out->weight, "experts.x_scale", &args->x_scale, args->groups));
    TN_TRY(tn__layer_check_scale(call, &out->weight, "experts.dy_scale", &args->dy_scale,
                                 args->groups));
    if (out->operand != TN_FORMAT_FP8_BLOCK_1D) return TN_OK;
    TN_TRY(tn__op_check_groups(call, args->device_offsets, args->error, &out->device));
    TN_REQUIRE(out->device.count == args->groups,
               "%s: device_offsets has %lld numbers, expected %lld: one more than groups",
               call->name, (long long)out->device.count + 1, (long long)args->groups + 1);
    return TN_OK;
}

tn_status tn__experts_check_rows(tn__op_call *call, const char *role, tn_tensor tensor,
                                 const tn__experts *of, int64_t cols, int is_operand,
                                 tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    TN_TRY(tn__op_require_float(call, role, info));
    if (of->groups.count == 0) return TN_OK;
    TN_REQUIRE(info->rows >= of->groups.rows && info->cols == cols,
               "%s: %s (tensor %s) is %lld x %lld, expected at least %lld x %lld", call->name, role,
               info->name, (long long)info->rows, (long long)info->cols, (long long)of->groups.rows,
               (long long)cols);
    return of->is_plain && is_operand ? tn__op_require_dtype(call, role, info, of->weight.dtype)
                                      : TN_OK;
}

/* ---- planes of all groups -------------------------------------------------------------------- */

static void destroy(tn_tensor tensor, tn_stream stream) {
    tn__saved_error error;
    tn__error_save(&error);
    if (tn_tensor_destroy(tensor, stream) != TN_OK) tn__error_restore(&error);
}

void tn__grouped_plane_end(tn_grouped_plane *plane, tn_stream stream) {
    destroy(plane->data, stream), destroy(plane->scale, stream);
    plane->data.value = plane->scale.value = 0;
}

/* In `keep_scope`, to stay; else scratch. */
static tn_status make_tensor(tn__op_call *call, tn_scope scope, int is_kept, const char *name,
                             tn_dtype dtype, int64_t rows, int64_t cols, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = 2;
    config.shape[0] = rows, config.shape[1] = cols;
    config.name = name;
    return is_kept ? tn__op_create(call, scope, &config, out)
                   : tn__op_scratch(call, scope, &config, out);
}

/* A plane as it is written, and as it is read after that. */
static tn_status make_plane(tn__op_call *call, const tn__experts *of, tn_scope scope, int is_kept,
                            const char *const names[2], const tn__experts_cast *cast,
                            tn_grouped_plane *plane, int64_t *floats, tn_plane_view *view,
                            tn__grouped_operand *operand) {
    const int is_col = operand == &cast->col;
    const tn_plane which = is_col ? TN_PLANE_COL : TN_PLANE_ROW;
    const int64_t cols = cast->info->cols;
    *floats = tn__grouped_floats(&of->groups, of->operand, which, cols);
    TN_TRY(
        make_tensor(call, scope, is_kept, names[0], TN_BYTE, of->groups.rows, cols, &plane->data));
    TN_TRY(make_tensor(call, scope, is_kept, names[1], TN_FP32, 1, *floats, &plane->scale));
    *operand = (tn__grouped_operand){
        .format = of->operand, .is_along_rows = is_col, .dtype = cast->dtype, .cols = cols};
    TN_TRY(tn__grouped_plane_lease(call, plane, TN_WRITE, operand));
    *view = (tn_plane_view){.data = (void *)operand->data, .scale = (void *)operand->scale};
    return TN_OK;
}

/* Once a call: every cast reads the one table. */
static tn_status lease_groups(tn__op_call *call, tn__experts *of, tn_scope scope) {
    if (of->is_leased) return TN_OK;
    TN_TRY(tn__op_lease_offsets(call, of->args->device_offsets, &of->device));
    TN_TRY(tn__op_scratch_bytes(call, scope, call->ops->list_scratch_bytes(of->groups.count),
                                &of->table));
    of->is_leased = 1;
    return TN_OK;
}

/* The word is valid as soon as the cast is on the stream, whatever becomes of the call. */
static tn_status run_cast(tn__op_call *call, tn__experts *of, tn__grouped_quantize_work *work) {
    const int lease = call->lease_count;
    TN_TRY(tn__op_lease_error(call, of->args->error, &of->device));
    work->groups = of->device;
    work->scratch = of->table;
    TN_TRY(TN__OP_RUN(call, grouped_quantize, work));
    return tn__op_end_lease(call, lease);
}

/* A plane of FP8_TENSOR of a group's rows: its elements in the plane of all groups, and the scale
 * that comes next there. */
static tn_status view_group(const tn__quantize_work *all, int64_t first, int64_t rows,
                            tn_plane plane, float **scale, tn_plane_view *view) {
    const unsigned char *data = plane == TN_PLANE_COL ? all->col.data : all->row.data;
    const int64_t cols = all->src.cols;
    TN_TRY(tn__format_layout(all->format, all->dtype, rows, cols, plane, &view->layout));
    view->dtype = all->dtype;
    view->plane = plane;
    view->data = (void *)(data + first * cols);
    view->scale = view->global_scale = *scale;
    *scale += tn__group_scale_floats(all->format, plane, rows, cols);
    return TN_OK;
}

/* As tn_quantize does each group alone; of all, factor and amax are the first group's. */
static tn_status run_casts(tn__op_call *call, const tn__experts *of, const tn__quantize_work *all) {
    const size_t row_bytes = (size_t)all->src.cols * tn_dtype_bytes(all->src.dtype);
    float *row_scale = all->row.scale, *col_scale = all->col.scale;
    for (int64_t e = 0; e < of->groups.count; e++) {
        const int64_t first = of->groups.offsets[e], rows = tn__group_rows(&of->groups, e);
        tn__quantize_work work = *all;
        if (rows == 0 || all->src.cols == 0) continue;
        work.src.data = (unsigned char *)all->src.data + (size_t)first * row_bytes;
        work.src.rows = rows;
        if (all->factor) work.factor = all->factor + e;
        if (all->amax) work.amax = all->amax + e;
        if (all->has_row) TN_TRY(view_group(all, first, rows, TN_PLANE_ROW, &row_scale, &work.row));
        if (all->has_col) TN_TRY(view_group(all, first, rows, TN_PLANE_COL, &col_scale, &work.col));
        TN_TRY(TN__OP_RUN(call, quantize, &work));
    }
    return TN_OK;
}

static tn_status scale_casts(tn__op_call *call, const tn__experts *of, const tn_layer_scale *scale,
                             tn__quantize_work *all) {
    tn__layer_scaling scaling;
    TN_TRY(tn__layer_scaling_begin(call, scale, &scaling));
    all->factor = scaling.factor;
    all->amax = scaling.amax;
    return tn__layer_scaling_end(call, &scaling, run_casts(call, of, all));
}

tn_status tn__experts_quantize(tn__op_call *call, tn__experts *of, tn_scope scope,
                               tn__experts_cast *cast) {
    static const char *const row_names[] = {"experts' row data", "experts' row scales"};
    static const char *const col_names[] = {"experts' col data", "experts' col scales"};
    const tn_scope col_scope = cast->keeps_col ? cast->keep_scope : scope;
    tn_grouped_plane row = {{0}, {0}}, scratch_col = {{0}, {0}};
    tn__grouped_quantize_work work = {.all = {.format = of->operand,
                                              .scale_mode = of->weight.scale_mode,
                                              .dtype = cast->dtype,
                                              .has_row = cast->has_row,
                                              .has_col = cast->has_col}};
    if (!cast->has_row && !cast->has_col) return TN_OK;
    TN_TRY(tn__op_lease_matrix(call, cast->src, cast->info, TN_READ, &work.all.src));
    work.all.src.rows = of->groups.rows;
    if (cast->has_row)
        TN_TRY(make_plane(call, of, scope, 0, row_names, cast, &row, &work.row_scale_floats,
                          &work.all.row, &cast->row));
    if (cast->has_col)
        TN_TRY(make_plane(call, of, col_scope, cast->keeps_col, col_names, cast,
                          cast->keeps_col ? &cast->kept : &scratch_col, &work.col_scale_floats,
                          &work.all.col, &cast->col));
    if (of->operand == TN_FORMAT_FP8_TENSOR) return scale_casts(call, of, cast->scale, &work.all);
    TN_TRY(lease_groups(call, of, scope));
    if (work.all.src.rows == 0 || work.all.src.cols == 0) return TN_OK;
    return run_cast(call, of, &work);
}

tn_status tn__experts_outline_weight(const tn__experts *of, int64_t e, tn_gemm_form form,
                                     tn__operand *out) {
    const tn_plane plane = form == TN_GEMM_FPROP ? of->fprop.b : of->dgrad.b;
    const tn__matrix matrix = {of->weight.dtype, NULL, of->weight.rows, of->weight.cols};
    tn_plane_view view = {.dtype = of->weight.dtype};
    *out = tn__gemm_plain_operand(&matrix, form == TN_GEMM_DGRAD);
    if (of->is_plain) return TN_OK;
    TN_TRY(tn_plane_layout_get(of->args->weights[e], plane, &view.layout));
    *out = tn__gemm_operand(of->weight.format, &view);
    return TN_OK;
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward {
    const tn_grouped_linear_forward_args *args;
    tn__experts experts;
    tn_tensor_info x, y;
    tn__experts_cast cast; /* of x */
    tn__grouped_operand x_rows;
    tn__gemm_work *works; /* of the groups */
} forward;

static tn_status check_bias(tn__op_call *call, const forward *f, int64_t e, tn_tensor_info *info) {
    const tn_tensor bias = tn__tensor_at(f->args->biases, e);
    if (tn__is_no_tensor(bias)) return TN_OK;
    TN_TRY(tn__op_require_vector(call, "bias", bias, f->experts.weight.rows,
                                 "one for each column of y", info));
    TN_REQUIRE(f->experts.weight.cols > 0, "%s: a bias is given, but there is nothing to contract",
               call->name);
    return TN_OK;
}

static tn_status check_forward(tn__op_call *call, const tn_grouped_saved *saved, forward *f) {
    const tn_grouped_linear_forward_args *args = f->args;
    const tn__experts *experts = &f->experts;
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__experts_check(call, &args->experts, &f->experts));
    TN_TRY(tn__experts_check_rows(call, "x", args->x, experts, experts->weight.cols, 1, &f->x));
    TN_TRY(tn__experts_check_rows(call, "y", args->y, experts, experts->weight.rows, 0, &f->y));
    for (int64_t e = 0; e < args->experts.groups; e++) {
        tn_tensor_info bias;
        TN_TRY(check_bias(call, f, e, &bias));
    }
    TN_REQUIRE(saved || args->saved_scope.value == 0,
               "%s: saved is NULL, but saved_scope is given: there is no place for what is saved",
               call->name);
    f->cast = (tn__experts_cast){.src = args->x,
                                 .info = &f->x,
                                 .dtype = TN__EXPERTS_X_DTYPE,
                                 .scale = &experts->args->x_scale,
                                 .has_row = !experts->is_plain,
                                 .keeps_col = 1,
                                 .keep_scope = args->saved_scope};
    f->cast.has_col =
        !experts->is_plain && args->saved_scope.value != 0 && experts->is_any_trainable;
    return TN_OK;
}

/* Of a group without rows neither weight nor bias is read. */
static tn_status lease_group(tn__op_call *call, forward *f, int64_t e) {
    const tn__experts *experts = &f->experts;
    const tn_tensor bias = tn__tensor_at(f->args->biases, e);
    tn__gemm_work *work = &f->works[e];
    tn_tensor_info info;
    tn_plane_view weight;
    work->a = tn__grouped_operand_take(&f->x_rows, &experts->groups, e);
    work->contracted = experts->weight.cols;
    tn__grouped_outline_rows(&experts->groups, e, &f->y, work);
    if (work->d.rows == 0) return TN_OK;
    TN_TRY(tn__experts_outline_weight(experts, e, TN_GEMM_FPROP, &work->b));
    TN_TRY(tn__op_lease_derived(call, experts->args->weights[e], experts->fprop.b, &weight));
    work->b.data = weight.data, work->b.scale = weight.scale;
    if (tn__is_no_tensor(bias)) return TN_OK;
    TN_TRY(check_bias(call, f, e, &info));
    TN_TRY(tn__op_lease_matrix(call, bias, &info, TN_READ, &work->bias));
    work->bias.rows = 1, work->bias.cols = experts->weight.rows;
    return TN_OK;
}

static tn_status begin_x(tn__op_call *call, forward *f) {
    const tn_grouped_plane x = {f->args->x, {0}};
    if (!f->experts.is_plain) {
        TN_TRY(tn__experts_quantize(call, &f->experts, f->args->scope, &f->cast));
        f->x_rows = f->cast.row;
        return TN_OK;
    }
    f->x_rows = (tn__grouped_operand){.dtype = f->x.dtype, .cols = f->x.cols};
    return tn__grouped_plane_lease(call, &x, TN_READ, &f->x_rows);
}

/* The last product has another layer's plane derived beside it. */
static tn_status launch_group(tn__op_call *call, forward *f, int64_t e) {
    const tn_experts *args = f->experts.args;
    if (f->works[e].d.rows == 0) return TN_OK;
    if (tn__experts_next_group(&f->experts, e) == args->groups)
        TN_TRY(tn__layer_derive_ahead(call, args->next_weight, args->side, &f->works[e]));
    return tn__gemm_launch(call, &f->works[e]);
}

static tn_status run_forward(tn__op_call *call, forward *f) {
    const int64_t groups = f->experts.groups.count;
    tn__matrix y;
    if (groups == 0) return TN_OK;
    TN_TRY(tn__op_reserve_leases(call, 2 * (int)groups + 16));
    f->works = tn__host_alloc((size_t)groups, sizeof *f->works);
    if (!f->works) return TN_OUT_OF_HOST_MEMORY;
    TN_TRY(begin_x(call, f));
    for (int64_t e = 0; e < groups; e++)
        TN_TRY(lease_group(call, f, e));
    TN_TRY(tn__grouped_scratch(call, f->args->scope, f->works, groups));
    TN_TRY(tn__op_lease_matrix(call, f->args->y, &f->y, TN_WRITE, &y));
    for (int64_t e = 0; e < groups; e++)
        tn__grouped_address_rows(&f->experts.groups, e, &y, &f->works[e]);
    TN_TRY(tn__grouped_require_aligned(call, f->works, groups));
    for (int64_t e = 0; e < groups; e++)
        TN_TRY(launch_group(call, f, e));
    return TN_OK;
}

tn_status tn_grouped_linear_forward(const tn_grouped_linear_forward_args *args,
                                    tn_grouped_saved *saved, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_grouped_linear_forward", stream);
    forward f = {.args = args};
    TN_TRY(tn__op_init());
    TN_TRY(check_forward(&call, saved, &f));
    tn_status status = tn__op_finish(&call, run_forward(&call, &f));
    tn__host_free(f.works);
    if (status != TN_OK) tn__grouped_plane_end(&f.cast.kept, stream);
    if (status == TN_OK && args->saved_scope.value != 0) saved->x = f.cast.kept;
    return status;
}
