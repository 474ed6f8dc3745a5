/* The operands and products of a layer: see layer_product.h. layer_check.c has the checks. */
#include "layer_product.h"

/* ---- operands -------------------------------------------------------------------------------- */

tn_status tn__layer_read(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                         tn__layer_operand *out) {
    *out = (tn__layer_operand){.tensor = tensor, .info = *info};
    return tn__op_lease_matrix(call, tensor, info, TN_READ, &out->plan.src);
}

/* The view of a plane of a quantized operand; the plan has it from now on. */
static tn_plane_view *view_of(tn__layer_operand *operand, tn_plane plane) {
    if (plane == TN_PLANE_COL) {
        operand->plan.has_col = 1;
        return &operand->plan.col;
    }
    operand->plan.has_row = 1;
    return &operand->plan.row;
}

tn_status tn__layer_open(tn__op_call *call, tn_tensor tensor, tn_plane plane,
                         tn__layer_operand *out) {
    *out = (tn__layer_operand){.tensor = tensor};
    TN_TRY(tn__op_tensor(call, "saved", tensor, &out->info));
    return tn__op_lease_derived(call, tensor, plane, view_of(out, plane));
}

tn_status tn__layer_open_callers(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                                 tn_plane first, int wants_first, tn_plane second, int wants_second,
                                 tn__layer_operand *out) {
    *out = (tn__layer_operand){.tensor = tensor, .info = *info, .is_callers = 1};
    if (wants_first) TN_TRY(tn__op_lease_derived(call, tensor, first, view_of(out, first)));
    if (!wants_second || (wants_first && first == second)) return TN_OK;
    return tn__op_lease_derived(call, tensor, second, view_of(out, second));
}

tn_status tn__layer_open_kept(tn__op_call *call, const tn__layer_product *p, tn_tensor tensor,
                              tn__layer_operand *out) {
    tn_tensor_info info;
    if (tn__layer_reads_quantized_x(p))
        return tn__layer_open(call, tensor, tn__layer_kept_plane(p), out);
    TN_TRY(tn__op_tensor(call, "saved", tensor, &info));
    return tn__layer_read(call, tensor, &info, out);
}

tn_status tn__layer_make(tn__op_call *call, const tn__layer_product *p, const char *name,
                         int is_gradient, const tn_tensor_info *of, int is_kept,
                         tn_plane kept_plane, tn__layer_operand *out) {
    const tn_layer_scale *scale = is_gradient ? &p->w->dy_scale : &p->w->x_scale;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    *out = (tn__layer_operand){.is_kept = is_kept, .kept_plane = kept_plane};
    if (tn__layer_is_delayed(scale)) out->scale = scale;
    config.format = p->operand;
    config.dtype = is_gradient ? p->gradient_dtype : TN_E4M3;
    config.rank = 2;
    config.shape[0] = of->rows, config.shape[1] = of->cols;
    config.scale_mode = p->weight.scale_mode;
    config.name = name;
    if (is_kept)
        TN_TRY(tn__op_saved(call, p->common->saved_scope, &config, &out->tensor));
    else
        TN_TRY(tn__op_scratch(call, p->common->scope, &config, &out->tensor));
    TN_TRY(tn__op_tensor(call, name, out->tensor, &out->info));
    out->plan.dst = &out->info;
    return TN_OK;
}

tn_status tn__layer_lease(tn__op_call *call, tn__layer_operand *operand, tn_plane plane) {
    return tn__op_lease(call, operand->tensor, plane, TN_WRITE, view_of(operand, plane));
}

tn_status tn__layer_make_x(tn__op_call *call, const tn__layer_product *p, const char *name,
                           const tn_tensor_info *of, tn__layer_operand *out) {
    const int is_kept = tn__layer_keeps_x(p);
    const tn_plane kept = tn__layer_kept_plane(p);
    TN_TRY(tn__layer_make(call, p, name, 0, of, is_kept, kept, out));
    TN_TRY(tn__layer_lease(call, out, p->fprop.a));
    return is_kept && kept != p->fprop.a ? tn__layer_lease(call, out, kept) : TN_OK;
}

tn_status tn__layer_scaling_begin(tn__op_call *call, const tn_layer_scale *scale,
                                  tn__layer_scaling *out) {
    tn_plane_view view;
    *out = (tn__layer_scaling){.first = call->lease_count};
    if (scale && !tn__is_no_tensor(scale->scale)) {
        TN_TRY(tn__op_lease(call, scale->scale, TN_PLANE_DATA, TN_READ, &view));
        out->factor = (const float *)view.data + scale->slot;
    }
    if (scale && !tn__is_no_tensor(scale->amax_history)) {
        TN_TRY(tn__op_lease(call, scale->amax_history, TN_PLANE_DATA, TN_UPDATE, &view));
        out->amax = (float *)view.data + scale->slot;
    }
    out->end = call->lease_count;
    return TN_OK;
}

tn_status tn__layer_scaling_end(tn__op_call *call, const tn__layer_scaling *scaling,
                                tn_status status) {
    tn__saved_error failure;
    tn_status ended = TN_OK;
    tn__error_save(&failure);
    for (int i = scaling->first; i < scaling->end && ended == TN_OK; i++)
        ended = tn__op_end_lease(call, i);
    if (status == TN_OK) return ended;
    tn__error_restore(&failure);
    return status;
}

tn_status tn__layer_cast(tn__op_call *call, const tn__layer_operand *operand) {
    tn__quantize_plan plan = operand->plan;
    tn__layer_scaling scaling;
    TN_TRY(tn__layer_scaling_begin(call, operand->scale, &scaling));
    plan.factor = scaling.factor;
    plan.amax = scaling.amax;
    return tn__layer_scaling_end(call, &scaling, tn__op_quantize(call, &plan));
}

/* A plane is dropped only when the other one is valid, which it is after its lease. */
tn_status tn__layer_done(tn__op_call *call, tn__layer_operand *operand, tn_plane plane) {
    const int has_both = operand->plan.has_row && operand->plan.has_col;
    const tn_plane other = plane == TN_PLANE_COL ? TN_PLANE_ROW : TN_PLANE_COL;
    if (operand->info.format == TN_FORMAT_PLAIN || operand->is_callers) return TN_OK;
    if (!has_both) return operand->is_kept ? TN_OK : tn__op_let_go(call, operand->tensor);
    if (operand->is_kept && plane == operand->kept_plane) return TN_OK;
    TN_TRY(tn__op_end_plane(call, operand->tensor, plane));
    TN_TRY(tn__op_end_plane(call, operand->tensor, other));
    TN_TRY(tn_plane_drop(operand->tensor, plane, call->stream));
    operand->plan.has_row = other == TN_PLANE_ROW;
    operand->plan.has_col = other == TN_PLANE_COL;
    if (operand->is_kept) return TN_OK;
    return tn__op_lease(call, operand->tensor, other, TN_READ, view_of(operand, other));
}

tn_status tn__layer_done_with_dy(tn__op_call *call, const tn__layer_product *p,
                                 tn__layer_operand *dy, int for_wgrad) {
    if (for_wgrad && p->dgrad.a == p->wgrad.a) return TN_OK;
    return tn__layer_done(call, dy, p->dgrad.a);
}

tn_status tn__layer_dequantize(tn__op_call *call, tn_scope scope, const tn__layer_operand *of,
                               tn_plane plane, tn_dtype dtype, tn__layer_operand *out) {
    tn__dequantize_work work = {.format = of->info.format,
                                .src = plane == TN_PLANE_COL ? of->plan.col : of->plan.row};
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    *out = (tn__layer_operand){.tensor = {0}};
    config.dtype = dtype;
    config.rank = 2;
    config.shape[0] = of->info.rows, config.shape[1] = of->info.cols;
    config.name = "dequantized operand";
    TN_TRY(tn__op_scratch(call, scope, &config, &out->tensor));
    TN_TRY(tn__op_tensor(call, config.name, out->tensor, &out->info));
    TN_TRY(tn__op_lease_matrix(call, out->tensor, &out->info, TN_WRITE, &work.dst));
    out->plan.src = work.dst;
    return tn__is_empty(&out->info) ? TN_OK : TN__OP_RUN(call, dequantize, &work);
}

tn__operand tn__layer_as(const tn__layer_operand *operand, tn_plane plane, int is_turned) {
    const tn__quantize_plan *plan = &operand->plan;
    if (operand->info.format == TN_FORMAT_PLAIN)
        return tn__gemm_plain_operand(&plan->src, is_turned);
    return tn__gemm_operand(operand->info.format, plane == TN_PLANE_COL ? &plan->col : &plan->row);
}

/* ---- forward --------------------------------------------------------------------------------- */

tn_status tn__layer_fprop(tn__op_call *call, const tn__layer_product *p, const tn__layer_operand *x,
                          const tn_tensor_info *y, tn__gemm_work *work) {
    const tn_tensor_info *weight = &p->weight;
    const tn__matrix outline = {weight->dtype, NULL, weight->rows, weight->cols};
    *work = (tn__gemm_work){.a = tn__layer_as(x, p->fprop.a, 0), .contracted = weight->cols};
    if (tn__layer_is_quantized(p))
        TN_TRY(tn__gemm_outline(p->w->weight, weight, p->fprop.b, &work->b));
    else
        work->b = tn__gemm_plain_operand(&outline, 0);
    if (!tn__is_no_tensor(p->w->bias)) {
        TN_TRY(tn__op_lease_matrix(call, p->w->bias, &p->bias, TN_READ, &work->bias));
        work->bias.rows = 1, work->bias.cols = weight->rows;
    }
    return tn__gemm_scratch(call, p->common->scope, y, work);
}

static tn_status quantize_weight(const tn__op_call *call, const tn__layer_product *p) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    if (tn__is_no_tensor(p->w->source)) return TN_OK;
    args.src = p->w->source;
    args.dst = p->w->weight;
    args.planes = p->fprop.b == TN_PLANE_COL ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
    args.skip = p->w->skip;
    args.scale = p->w->weight_scale.scale;
    args.amax_history = p->w->weight_scale.amax_history;
    args.slot = p->w->weight_scale.slot;
    return tn_quantize(&args, call->stream);
}

tn_status tn__layer_read_weight(tn__op_call *call, const tn__layer_product *p,
                                tn__gemm_work *work) {
    tn_plane_view view;
    tn__matrix plain;
    TN_TRY(quantize_weight(call, p));
    if (!tn__layer_is_quantized(p)) {
        TN_TRY(tn__op_lease_matrix(call, p->w->weight, &p->weight, TN_READ, &plain));
        work->b = tn__gemm_plain_operand(&plain, 0);
        return TN_OK;
    }
    TN_TRY(tn__op_lease_derived(call, p->w->weight, p->fprop.b, &view));
    work->b = tn__gemm_operand(p->weight.format, &view);
    return TN_OK;
}

/* Between what a product reads and the product. It is bound by its operations and leaves the memory
 * idle, as the casts before and after it do not; so this waits for all that is on the call's
 * stream, which is one event, and the pool need not wait for what used the memory before. */
tn_status tn__layer_derive_ahead(tn__op_call *call, tn_tensor weight, tn_stream side,
                                 tn__gemm_work *beside) {
    const tn_architecture architecture = tn_device_architecture(call->device);
    tn_tensor_info info;
    tn_plane plane;
    if (tn__is_no_tensor(weight)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "next_weight", weight, &info));
    TN_TRY(tn_format_operand(info.format, architecture, TN_OPERAND_DGRAD_B, &plane));
    if (plane == TN_PLANE_DATA) return TN_OK;
    return tn__op_derive_ahead(call, weight, plane, side, beside);
}

tn_status tn__layer_derive_next(tn__op_call *call, const tn_layer_common *common,
                                tn__gemm_work *beside) {
    if (common->precision != TN_BACKWARD_AS_FORWARD) return TN_OK;
    return tn__layer_derive_ahead(call, common->next_weight, common->side, beside);
}

tn_status tn__layer_launch(tn__op_call *call, const tn__gemm_work *work) {
    TN_TRY(tn__gemm_launch(call, work));
    return tn__op_let_go_bytes(call, work->scratch);
}

/* ---- dgrad ----------------------------------------------------------------------------------- */

/* What dgrad multiplies dy with, and the lease that it is under: `held` in `plane`. */
static tn_status lease_dgrad_weight(tn__op_call *call, const tn__layer_product *p,
                                    const tn__layer_operand *dy, tn__layer_operand *out) {
    tn__layer_operand quantized = {.tensor = p->w->weight, .info = p->weight};
    if (p->precision == TN_BACKWARD_HIGH_PRECISION)
        return tn__layer_read(call, p->w->source, &p->source, out);
    if (!tn__layer_is_quantized(p)) return tn__layer_read(call, p->w->weight, &p->weight, out);
    const int dequantizes = p->precision == TN_BACKWARD_DEQUANTIZED;
    const tn_plane plane = dequantizes ? p->fprop.b : p->dgrad.b;
    TN_TRY(tn__op_lease_derived(call, p->w->weight, plane, view_of(&quantized, plane)));
    if (!dequantizes) {
        *out = quantized;
        return TN_OK;
    }
    TN_TRY(tn__layer_dequantize(call, p->common->scope, &quantized, plane, dy->info.dtype, out));
    return tn__op_end_plane(call, p->w->weight, plane);
}

/* Ends what dgrad has read. */
static tn_status done_with_weight(tn__op_call *call, const tn__layer_product *p,
                                  const tn__layer_operand *weight) {
    if (weight->tensor.value == p->w->weight.value)
        return tn__op_end_plane(call, weight->tensor, p->dgrad.b);
    return p->precision == TN_BACKWARD_DEQUANTIZED ? tn__op_let_go(call, weight->tensor) : TN_OK;
}

/* The next weight's plane is derived only after this one's lease, which waits for all that is on
 * the stream that derived it. */
tn_status tn__layer_dgrad(tn__op_call *call, const tn__layer_product *p,
                          const tn__layer_operand *dy, tn_tensor dx,
                          const tn_tensor_info *dx_info) {
    tn__gemm_work work = {.contracted = p->weight.rows};
    tn__layer_operand weight;
    TN_TRY(lease_dgrad_weight(call, p, dy, &weight));
    work.a = tn__layer_as(dy, p->dgrad.a, 0);
    work.b = tn__layer_as(&weight, p->dgrad.b, 1);
    TN_TRY(tn__gemm_scratch(call, p->common->scope, dx_info, &work));
    TN_TRY(tn__op_lease_matrix(call, dx, dx_info, TN_WRITE, &work.d));
    TN_TRY(tn__layer_derive_next(call, p->common, &work));
    TN_TRY(tn__layer_launch(call, &work));
    TN_TRY(done_with_weight(call, p, &weight));
    return tn__layer_release(call, p);
}

tn_status tn__layer_release(const tn__op_call *call, const tn__layer_product *p) {
    if (!tn__layer_is_quantized(p)) return TN_OK;
    return tn_plane_release(p->w->weight, p->dgrad.b, call->stream);
}

/* ---- dy -------------------------------------------------------------------------------------- */

tn_status tn__layer_make_dy(tn__op_call *call, const tn__layer_product *p, const char *name,
                            tn_tensor dy, const tn_tensor_info *info, int for_dgrad, int for_wgrad,
                            int is_kept, tn__layer_operand *out) {
    tn__matrix src;
    if (info->format != TN_FORMAT_PLAIN)
        return tn__layer_open_callers(call, dy, info, p->dgrad.a, for_dgrad, p->wgrad.a, for_wgrad,
                                      out);
    if (!tn__layer_multiplies_quantized(p)) return tn__layer_read(call, dy, info, out);
    TN_TRY(tn__layer_make(call, p, name, 1, info, is_kept, p->wgrad.a, out));
    TN_TRY(tn__op_lease_matrix(call, dy, info, TN_READ, &src));
    out->plan.src = src;
    if (for_dgrad) TN_TRY(tn__layer_lease(call, out, p->dgrad.a));
    const int is_leased = for_dgrad && p->wgrad.a == p->dgrad.a;
    return for_wgrad && !is_leased ? tn__layer_lease(call, out, p->wgrad.a) : TN_OK;
}

/* tile_sums of dy, and in the same pass its planes where they are blocks of 128. */
static tn_status run_sums(tn__op_call *call, const tn__layer_operand *dy, float *tile_sums,
                          int with_planes) {
    const tn__quantize_plan *plan = &dy->plan;
    tn__produce_work work = {.producer = TN__PRODUCE_ACTIVATION,
                             .curve = {.kind = TN__CURVE_IDENTITY},
                             .x = plan->src,
                             .tile_sums = tile_sums};
    work.cast = (tn__quantize_work){.src = {plan->src.dtype, NULL, plan->src.rows, plan->src.cols},
                                    .format = TN_FORMAT_FP8_BLOCK_1D,
                                    .dtype = TN_E4M3};
    if (with_planes) {
        work.cast.format = dy->info.format;
        work.cast.dtype = dy->info.dtype;
        work.cast.scale_mode = dy->info.scale_mode;
        work.cast.has_row = plan->has_row, work.cast.has_col = plan->has_col;
        work.cast.row = plan->row, work.cast.col = plan->col;
    }
    if (plan->src.rows == 0 || plan->src.cols == 0) return TN_OK;
    return TN__OP_RUN(call, produce, &work);
}

/* The plane was derived beside the dgrad before, so that nobody waits in fact. But two events in
 * one place, this and that of the next derivation, hold up what follows for longer than apart. */
static tn_status await_weight(const tn__op_call *call, const tn__layer_product *p) {
    if (!tn__layer_multiplies_quantized(p)) return TN_OK;
    return tn__op_await(call, p->w->weight, p->dgrad.b);
}

tn_status tn__layer_cast_dy(tn__op_call *call, const tn__layer_product *p,
                            const tn__layer_operand *dy, int for_dgrad, float *tile_sums) {
    const int is_blocks = dy->info.format == TN_FORMAT_FP8_BLOCK_1D;
    if (dy->is_callers) return TN_OK;
    if (for_dgrad) TN_TRY(await_weight(call, p));
    if (tile_sums && is_blocks) return run_sums(call, dy, tile_sums, 1);
    if (dy->info.format != TN_FORMAT_PLAIN) TN_TRY(tn__layer_cast(call, dy));
    return tile_sums ? run_sums(call, dy, tile_sums, 0) : TN_OK;
}

/* ---- gradients ------------------------------------------------------------------------------- */

tn_status tn__layer_tile_sums(tn__op_call *call, tn_scope scope, int64_t rows,
                              tn__layer_pending *pending) {
    pending->sum_rows = rows;
    return tn__op_tile_sums(call, scope, rows, &pending->sums);
}

tn_status tn__layer_lease_dweight(tn__op_call *call, tn_tensor dweight, const tn_tensor_info *info,
                                  int accumulate, tn__layer_pending *out) {
    const tn_access access = accumulate ? TN_UPDATE : TN_WRITE;
    TN_TRY(tn__op_lease_matrix(call, dweight, info, access, &out->dweight));
    tn__op_hold(call);
    return TN_OK;
}

tn_status tn__layer_lease_sums(tn__op_call *call, const char *role, tn_tensor tensor,
                               const tn_tensor_info *info, int accumulate, tn__layer_pending *out) {
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_lease_column_sums(call, role, tensor, info, accumulate != 0, NULL, &out->sums));
    tn__op_hold(call);
    return TN_OK;
}

tn_status tn__layer_lease_gradients(tn__op_call *call, const tn__layer_product *p,
                                    const tn_layer_gradient *gradient,
                                    const tn__layer_gradient *checked, tn__layer_pending *out) {
    const int accumulate = gradient->accumulate;
    *out = (tn__layer_pending){.has_product = 0};
    if (checked->wants_dweight && !checked->delays)
        TN_TRY(
            tn__layer_lease_dweight(call, gradient->dweight, &checked->dweight, accumulate, out));
    return tn__layer_lease_sums(call, p->roles->dbias, gradient->dbias, &checked->dbias, accumulate,
                                out);
}

tn_status tn__layer_require_aligned(const tn__op_call *call, const tn__layer_operand *x,
                                    const tn__layer_pending *pending) {
    const uintptr_t dweight = (uintptr_t)pending->dweight.data;
    if (!dweight) return TN_OK;
    return tn__op_require_whole_16(call, dweight | (uintptr_t)x->plan.src.data);
}

tn_status tn__layer_wgrad(tn__op_call *call, tn_scope scope, const tn__layer_operand *dy,
                          const tn__layer_operand *x, tn__gemm_plane_pair planes, int accumulate,
                          tn__layer_pending *pending) {
    const tn__matrix *d = &pending->dweight;
    const tn_tensor_info shape = {.dtype = d->dtype, .rows = d->rows, .cols = d->cols};
    tn__gemm_work *work = &pending->product;
    *work = (tn__gemm_work){.a = tn__layer_as(dy, planes.a, 1),
                            .b = tn__layer_as(x, planes.b, 1),
                            .contracted = dy->info.rows,
                            .accumulate = accumulate != 0};
    TN_TRY(tn__gemm_scratch(call, scope, &shape, work));
    work->d = *d;
    pending->has_product = 1;
    return TN_OK;
}

tn_status tn__layer_wgrad_of(tn__op_call *call, const tn__layer_product *p,
                             const tn__layer_operand *dy, const tn__layer_operand *x,
                             int accumulate, tn__layer_pending *pending) {
    const tn_scope scope = p->common->scope;
    tn__layer_operand values;
    if (tn__layer_is_quantized(p) && p->precision == TN_BACKWARD_DEQUANTIZED) {
        const tn_plane plane = tn__layer_kept_plane(p);
        TN_TRY(tn__layer_dequantize(call, scope, x, plane, dy->info.dtype, &values));
        x = &values;
    }
    return tn__layer_wgrad(call, scope, dy, x, p->wgrad, accumulate, pending);
}

tn_status tn__layer_finish(tn__op_call *call, const tn__layer_pending *pending, int count) {
    for (int i = 0; i < count; i++) {
        if (pending[i].has_product) TN_TRY(tn__gemm_require_aligned(call, &pending[i].product));
    }
    tn__op_hold_no_more(call);
    for (int i = 0; i < count; i++) {
        if (pending[i].has_product) TN_TRY(tn__gemm_launch(call, &pending[i].product));
    }
    for (int i = 0; i < count; i++)
        TN_TRY(tn__op_add_up_tiles(call, pending[i].sum_rows, NULL, &pending[i].sums));
    return TN_OK;
}
