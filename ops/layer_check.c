/* What the layers check of a product's operands, before anything is made: see layer_product.h. */
#include "layer_product.h"

#include "format_table.h"
#include "op_scaling.h"
#include "options.h"

/* ---- what all layers take -------------------------------------------------------------------- */

tn_status tn__layer_check_ahead(tn__op_call *call, const char *role, tn_tensor next_weight,
                                tn_stream side) {
    tn_tensor_info info;
    TN_REQUIRE(!side || side != call->stream,
               "%s: %s.side is the call's own stream, expected another one or NULL", call->name,
               role);
    if (tn__is_no_tensor(next_weight)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "next_weight", next_weight, &info));
    TN_REQUIRE(tn__layer_operand_of(info.format) >= 0,
               "%s: %s.next_weight (tensor %s) is %s, expected %s, %s or %s", call->name, role,
               info.name, tn_format_name(info.format), tn_format_name(TN_FORMAT_FP8_BLOCK_2D),
               tn_format_name(TN_FORMAT_FP8_TENSOR), tn_format_name(TN_FORMAT_PLAIN));
    TN_REQUIRE(side || info.format == TN_FORMAT_PLAIN,
               "%s: %s.next_weight (tensor %s) is given, but %s.side is NULL: its plane is "
               "derived on another stream than the call's",
               call->name, role, info.name, role);
    return TN_OK;
}

/* After the first tensor, which says what device it is. */
tn_status tn__layer_check_common(tn__op_call *call, const tn_layer_common *common) {
    const int dtype = (int)common->gradient_dtype;
    TN_REQUIRE(dtype == 0 || dtype == TN_E4M3 || dtype == TN_E5M2,
               "%s: common.gradient_dtype is %d, expected TN_E4M3 or TN_E5M2", call->name, dtype);
    TN_REQUIRE((unsigned)common->precision <= TN_BACKWARD_HIGH_PRECISION,
               "%s: common.precision is %d, expected one of tn_backward_precision", call->name,
               (int)common->precision);
    TN_REQUIRE(common->recompute == 0 || common->recompute == 1,
               "%s: common.recompute is %d, expected 0 or 1", call->name, common->recompute);
    return tn__layer_check_ahead(call, "common", common->next_weight, common->side);
}

tn_status tn__layer_check_saved_set(const tn__op_call *call, const void *saved,
                                    const tn_layer_common *common) {
    TN_REQUIRE(saved || common->saved_scope.value == 0,
               "%s: saved is NULL, but common.saved_scope is given", call->name);
    return TN_OK;
}

/* ---- the weight ------------------------------------------------------------------------------ */

int tn__layer_operand_of(tn_format weight) {
    switch (weight) {
    case TN_FORMAT_PLAIN: return TN_FORMAT_PLAIN;
    case TN_FORMAT_FP8_BLOCK_2D: return TN_FORMAT_FP8_BLOCK_1D;
    case TN_FORMAT_FP8_TENSOR: return TN_FORMAT_FP8_TENSOR;
    default: return -1;
    }
}

static tn_status check_recipe(const tn__op_call *call, tn__layer_product *p) {
    const int operand = tn__layer_operand_of(p->weight.format);
    if (operand < 0) {
        return TN_FAIL(TN_UNSUPPORTED, "%s: %s (tensor %s) is %s, expected %s, %s or %s",
                       call->name, p->roles->weight, p->weight.name,
                       tn_format_name(p->weight.format), tn_format_name(TN_FORMAT_FP8_BLOCK_2D),
                       tn_format_name(TN_FORMAT_FP8_TENSOR), tn_format_name(TN_FORMAT_PLAIN));
    }
    p->operand = (tn_format)operand;
    if (p->operand == TN_FORMAT_PLAIN) {
        TN_TRY(tn__op_require_float(call, p->roles->weight, &p->weight));
        p->precision = TN_BACKWARD_AS_FORWARD;
    }
    TN_TRY(tn__gemm_planes(call, TN_GEMM_FPROP, p->operand, p->weight.format, &p->fprop));
    TN_TRY(tn__gemm_planes(call, TN_GEMM_DGRAD, p->operand, p->weight.format, &p->dgrad));
    return tn__gemm_planes(call, TN_GEMM_WGRAD, p->operand, p->operand, &p->wgrad);
}

static tn_status require_slots(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, int64_t first, int64_t count,
                               int64_t room) {
    TN_TRY(tn__op_require_slot(call, role, info, first, room));
    return tn__op_require_slot(call, role, info, first + count - 1, room);
}

/* What tn_quantize asks of it, before anything runs. */
tn_status tn__layer_check_scale(tn__op_call *call, const tn_tensor_info *weight, const char *role,
                                const tn_layer_scale *scale, int64_t count) {
    tn_tensor_info info;
    tn__history history;
    if (!tn__layer_is_delayed(scale)) {
        TN_REQUIRE(scale->slot == 0, "%s: %s has slot %lld, but neither scale nor amax_history",
                   call->name, role, (long long)scale->slot);
        return TN_OK;
    }
    TN_REQUIRE(weight->format == TN_FORMAT_FP8_TENSOR,
               "%s: %s is given, but the weight (tensor %s) is %s, expected %s: others are scaled "
               "by their own amax",
               call->name, role, weight->name, tn_format_name(weight->format),
               tn_format_name(TN_FORMAT_FP8_TENSOR));
    if (!tn__is_no_tensor(scale->scale)) {
        TN_TRY(tn__op_tensor(call, role, scale->scale, &info));
        TN_TRY(tn__op_require_fp32(call, role, &info));
        TN_TRY(require_slots(call, role, &info, scale->slot, count, info.rows * info.cols));
    }
    if (tn__is_no_tensor(scale->amax_history)) return TN_OK;
    TN_TRY(tn__op_history(call, scale->amax_history, &info, &history));
    return require_slots(call, "amax_history", &info, scale->slot, count, history.count);
}

/* Whose they are, the roles say. */
static tn_status check_scales(tn__op_call *call, const tn__layer_product *p) {
    const tn__layer_roles *roles = p->roles;
    const tn_layer_weight *w = p->w;
    TN_TRY(tn__layer_check_scale(call, &p->weight, roles->weight_scale, &w->weight_scale, 1));
    TN_TRY(tn__layer_check_scale(call, &p->weight, roles->x_scale, &w->x_scale, 1));
    return tn__layer_check_scale(call, &p->weight, roles->dy_scale, &w->dy_scale, 1);
}

tn_status tn__layer_check_weight(tn__op_call *call, const tn__layer_roles *roles,
                                 const tn_layer_weight *w, const tn_layer_common *common,
                                 tn__layer_product *out) {
    *out = (tn__layer_product){.roles = roles,
                               .w = w,
                               .common = common,
                               .precision = common->precision,
                               .gradient_dtype =
                                   common->gradient_dtype == TN_E5M2 ? TN_E5M2 : TN_E4M3};
    TN_TRY(tn__op_tensor(call, roles->weight, w->weight, &out->weight));
    TN_TRY(check_recipe(call, out));
    return check_scales(call, out);
}

tn_status tn__layer_check_input(const tn__op_call *call, const tn__layer_product *p,
                                const char *role, const tn_tensor_info *info) {
    TN_TRY(tn__op_require_float(call, role, info));
    if (tn__layer_is_quantized(p)) return TN_OK;
    TN_REQUIRE(info->dtype == p->weight.dtype,
               "%s: %s (tensor %s) has elements of %s, and %s (tensor %s) of %s: of a %s weight "
               "both must be one type",
               call->name, role, info->name, tn_dtype_name(info->dtype), p->roles->weight,
               p->weight.name, tn_dtype_name(p->weight.dtype), tn_format_name(TN_FORMAT_PLAIN));
    return TN_OK;
}

tn_status tn__layer_check_operand(const tn__op_call *call, tn__layer_product *p, const char *role,
                                  const tn_tensor_info *info, int is_gradient) {
    if (info->format == TN_FORMAT_PLAIN) return tn__layer_check_input(call, p, role, info);
    TN_REQUIRE(info->format == p->operand,
               "%s: %s (tensor %s) is %s, expected %s, or what it is quantized to with %s: %s",
               call->name, role, info->name, tn_format_name(info->format),
               tn_format_name(TN_FORMAT_PLAIN), p->roles->weight, tn_format_name(p->operand));
    TN_REQUIRE(info->scale_mode == p->weight.scale_mode,
               "%s: %s (tensor %s) has scale mode %d, expected %d, that of %s (tensor %s)",
               call->name, role, info->name, (int)info->scale_mode, (int)p->weight.scale_mode,
               p->roles->weight, p->weight.name);
    TN_REQUIRE(p->precision == TN_BACKWARD_AS_FORWARD,
               "%s: %s (tensor %s) is quantized, but common.precision is not "
               "TN_BACKWARD_AS_FORWARD",
               call->name, role, info->name);
    if (!is_gradient) return tn__op_require_dtype(call, role, info, TN_E4M3);
    p->gradient_dtype = info->dtype;
    return TN_OK;
}

void tn__layer_parameters(const tn__layer_product *p, tn__op_named out[TN__LAYER_PARAMETERS]) {
    out[0] = (tn__op_named){p->roles->weight, p->w->weight};
    out[1] = (tn__op_named){p->roles->source, p->w->source};
    out[2] = (tn__op_named){p->roles->bias, p->w->bias};
}

/* ---- forward --------------------------------------------------------------------------------- */

static tn_status check_source(tn__op_call *call, tn__layer_product *p) {
    const tn__layer_roles *roles = p->roles;
    if (tn__is_no_tensor(p->w->source)) {
        TN_REQUIRE(tn__is_no_tensor(p->w->skip), "%s: %s is given, but no %s", call->name,
                   roles->skip, roles->source);
        return TN_OK;
    }
    TN_REQUIRE(tn__layer_is_quantized(p), "%s: %s is given, but %s (tensor %s) is %s", call->name,
               roles->source, roles->weight, p->weight.name, tn_format_name(p->weight.format));
    TN_TRY(tn__op_tensor(call, roles->source, p->w->source, &p->source));
    TN_TRY(tn__op_require_float(call, roles->source, &p->source));
    TN_TRY(tn__op_require_shape(call, roles->source, &p->source, p->weight.rows, p->weight.cols,
                                "the shape of its weight"));
    return TN_OK;
}

/* tn_quantize, which takes the flag, says the rest of it. */
static tn_status check_skip(tn__op_call *call, tn__layer_product *p) {
    if (tn__is_no_tensor(p->w->skip)) return TN_OK;
    return tn__op_require_fp32_vector(call, p->roles->skip, p->w->skip, 1, "one flag", &p->skip);
}

tn_status tn__layer_check_forward(tn__op_call *call, tn__layer_product *p) {
    TN_TRY(check_source(call, p));
    TN_TRY(check_skip(call, p));
    if (tn__is_no_tensor(p->w->bias)) return TN_OK;
    TN_TRY(tn__op_require_vector(call, p->roles->bias, p->w->bias, p->weight.rows,
                                 "one for each row of its weight", &p->bias));
    TN_REQUIRE(p->weight.cols > 0, "%s: %s is given, but %s (tensor %s) has no columns", call->name,
               p->roles->bias, p->roles->weight, p->weight.name);
    return TN_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static tn_status check_dweight(tn__op_call *call, const tn__layer_product *p,
                               const tn_layer_gradient *gradient, tn__layer_gradient *out) {
    const char *role = p->roles->dweight;
    TN_REQUIRE(!p->weight.frozen, "%s: %s is given, but %s (tensor %s) is frozen", call->name, role,
               p->roles->weight, p->weight.name);
    TN_TRY(tn__op_tensor(call, role, gradient->dweight, &out->dweight));
    TN_TRY(tn__op_require_float(call, role, &out->dweight));
    return tn__op_require_shape(call, role, &out->dweight, p->weight.rows, p->weight.cols,
                                "the shape of its weight");
}

tn_status tn__layer_check_delay(const tn__op_call *call, const tn__layer_product *p,
                                const tn__layer_gradient *gradient, int is_made) {
    TN_REQUIRE(!gradient->delays || !is_made || p->common->saved_scope.value != 0,
               "%s: %s is to be delayed, but common.saved_scope is {0}", call->name,
               p->roles->dweight);
    return TN_OK;
}

tn_status tn__layer_check_gradient(tn__op_call *call, const tn__layer_product *p,
                                   const tn_layer_gradient *gradient,
                                   const tn_delayed_gradient *delayed, tn__layer_gradient *out) {
    *out = (tn__layer_gradient){.wants_dweight = !tn__is_no_tensor(gradient->dweight),
                                .wants_dbias = !tn__is_no_tensor(gradient->dbias),
                                .delays = gradient->delay};
    TN_REQUIRE(gradient->delay == 0 || gradient->delay == 1,
               "%s: the delay of %s is %d, expected %s", call->name, p->roles->dweight,
               gradient->delay, "0 or 1");
    TN_REQUIRE(!gradient->delay || out->wants_dweight, "%s: %s is {0}, but is to be delayed",
               call->name, p->roles->dweight);
    TN_REQUIRE(!gradient->delay || delayed, "%s: %s is to be delayed, but delayed is NULL",
               call->name, p->roles->dweight);
    TN_REQUIRE(!gradient->delay || tn__is_no_tensor(delayed->dweight),
               "%s: %s is to be delayed, but delayed still holds another gradient", call->name,
               p->roles->dweight);
    TN_TRY(tn__layer_check_delay(call, p, out, tn__layer_multiplies_quantized(p)));
    if (out->wants_dbias)
        TN_TRY(tn__op_require_vector(call, p->roles->dbias, gradient->dbias, p->weight.rows,
                                     "one for each row of its weight", &out->dbias));
    return out->wants_dweight ? check_dweight(call, p, gradient, out) : TN_OK;
}

tn_status tn__layer_check_same_type(const tn__op_call *call, const char *role,
                                    const tn_tensor_info *info, const char *other_role,
                                    const tn_tensor_info *other) {
    TN_TRY(tn__op_require_float(call, role, info));
    TN_REQUIRE(info->dtype == other->dtype,
               "%s: %s (tensor %s) has elements of %s, and %s (tensor %s) of %s: they are "
               "multiplied as they are, so both must be one type",
               call->name, role, info->name, tn_dtype_name(info->dtype), other_role, other->name,
               tn_dtype_name(other->dtype));
    return TN_OK;
}

tn_status tn__layer_check_dgrad(tn__op_call *call, tn__layer_product *p, const char *role,
                                const tn_tensor_info *dy) {
    if (p->precision == TN_BACKWARD_HIGH_PRECISION) {
        TN_REQUIRE(!tn__is_no_tensor(p->w->source),
                   "%s: %s is {0}, but common.precision is TN_BACKWARD_HIGH_PRECISION", call->name,
                   p->roles->source);
        TN_TRY(check_source(call, p));
        return tn__layer_check_same_type(call, p->roles->source, &p->source, role, dy);
    }
    if (!tn__layer_multiplies_quantized(p) || p->weight.dtype != TN_E5M2) return TN_OK;
    if (p->gradient_dtype != TN_E5M2) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: %s (tensor %s) is E5M2, and so is common.gradient_dtype: one must be E4M3",
                   call->name, p->roles->weight, p->weight.name);
}

/* Of blocks, the plane that forward was to keep; with one scale a tensor it can be derived. */
static tn_status check_saved_plane(const tn__op_call *call, const tn__layer_product *p,
                                   const char *role, tn_tensor saved, const tn_tensor_info *info) {
    const tn_plane plane = tn__layer_kept_plane(p);
    tn_plane_state state;
    TN_TRY(tn_plane_state_get(saved, plane, &state));
    if (state == TN_PLANE_VALID || state == TN_PLANE_OFFLOADED) return TN_OK;
    if (info->format != TN_FORMAT_FP8_BLOCK_1D) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "%s: plane %s of %s (tensor %s) is not valid: forward saves it when it is told "
                   "the same common.precision",
                   call->name, tn_plane_name(plane), role, info->name);
}

tn_status tn__layer_check_saved(tn__op_call *call, const tn__layer_product *p, const char *role,
                                tn_tensor saved, int64_t rows, int64_t cols) {
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, role, saved, &info));
    TN_TRY(tn__op_require_format(call, role, &info, p->operand));
    TN_TRY(tn__op_require_dtype(call, role, &info, TN_E4M3));
    TN_REQUIRE(info.scale_mode == p->weight.scale_mode,
               "%s: %s (tensor %s) has scale mode %d, expected %d, that of %s (tensor %s)",
               call->name, role, info.name, (int)info.scale_mode, (int)p->weight.scale_mode,
               p->roles->weight, p->weight.name);
    TN_TRY(tn__op_require_shape(call, role, &info, rows, cols, "the shape of forward's x"));
    return check_saved_plane(call, p, role, saved, &info);
}

/* ---- pinned engines -------------------------------------------------------------------------- */

/* [rows, cols] without an address: quantized, read in `plane`, or PLAIN, perhaps turned. */
static tn_status outline(tn_format format, tn_dtype dtype, int64_t rows, int64_t cols,
                         tn_plane plane, int is_turned, tn__operand *out) {
    const tn__matrix plain = {dtype, NULL, rows, cols};
    tn_plane_view view = {.dtype = dtype};
    *out = tn__gemm_plain_operand(&plain, is_turned);
    if (format == TN_FORMAT_PLAIN) return TN_OK;
    TN_TRY(tn__format_layout(format, dtype, rows, cols, plane, &view.layout));
    *out = tn__gemm_operand(format, &view);
    return TN_OK;
}

static tn_status outline_fprop(const tn__layer_product *p, int64_t m, tn_dtype plain,
                               tn__gemm_work *work) {
    const tn_tensor_info *w = &p->weight;
    const tn_dtype x = tn__layer_is_quantized(p) ? TN_E4M3 : plain;
    work->contracted = w->cols;
    work->d.cols = w->rows;
    if (!tn__is_no_tensor(p->w->bias)) work->bias = (tn__matrix){p->bias.dtype, NULL, 1, w->rows};
    TN_TRY(outline(p->operand, x, m, w->cols, p->fprop.a, 0, &work->a));
    return outline(w->format, w->dtype, w->rows, w->cols, p->fprop.b, 0, &work->b);
}

static tn_status outline_dgrad(const tn__layer_product *p, int64_t m, tn_dtype plain,
                               tn__gemm_work *work) {
    const int is_quantized = tn__layer_multiplies_quantized(p);
    const tn_tensor_info *w = &p->weight;
    const tn_format dy = is_quantized ? p->operand : TN_FORMAT_PLAIN;
    const tn_format weight = is_quantized ? w->format : TN_FORMAT_PLAIN;
    work->contracted = w->rows;
    work->d.cols = w->cols;
    TN_TRY(
        outline(dy, is_quantized ? p->gradient_dtype : plain, m, w->rows, p->dgrad.a, 0, &work->a));
    return outline(weight, is_quantized ? w->dtype : plain, w->rows, w->cols, p->dgrad.b, 1,
                   &work->b);
}

static tn_status outline_wgrad(const tn__layer_product *p, int64_t m, tn_dtype plain,
                               tn__gemm_work *work) {
    const int is_quantized = tn__layer_multiplies_quantized(p);
    const tn_tensor_info *w = &p->weight;
    const tn_format format = is_quantized ? p->operand : TN_FORMAT_PLAIN;
    work->contracted = m;
    work->d.rows = w->rows, work->d.cols = w->cols;
    TN_TRY(outline(format, is_quantized ? p->gradient_dtype : plain, m, w->rows, p->wgrad.a, 1,
                   &work->a));
    return outline(format, is_quantized ? TN_E4M3 : plain, m, w->cols, p->wgrad.b, 1, &work->b);
}

tn_status tn__layer_ask(const tn__op_call *call, const tn__layer_product *p, tn_gemm_form form,
                        int64_t m, tn_dtype plain, tn_dtype d, int accumulate) {
    tn__gemm_work work = {.d = {d, NULL, m, 0}, .accumulate = accumulate != 0};
    size_t bytes;
    if (tn__options_get()->gemm_engine == TN_GEMM_ENGINE_AUTO) return TN_OK;
    switch (form) {
    case TN_GEMM_FPROP: TN_TRY(outline_fprop(p, m, plain, &work)); break;
    case TN_GEMM_DGRAD: TN_TRY(outline_dgrad(p, m, plain, &work)); break;
    default: TN_TRY(outline_wgrad(p, m, plain, &work)); break;
    }
    if (!tn__gemm_has_product(&work)) return TN_OK;
    TN_TRY(tn__gemm_take_pin(call, &work));
    return call->ops->gemm_scratch_bytes(call->device, &work, &bytes);
}
