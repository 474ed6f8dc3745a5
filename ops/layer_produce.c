/* What a layer makes between its products: see layer_produce.h. */
#include "layer_produce.h"

tn_status tn__layer_plain(tn__op_call *call, const tn_layer_common *common, tn__layer_home home,
                          const char *name, const tn_tensor_info *shape, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = shape->dtype;
    config.rank = 2;
    config.shape[0] = shape->rows, config.shape[1] = shape->cols;
    config.name = name;
    if (home == TN__LAYER_SAVED) return tn__op_saved(call, common->saved_scope, &config, out);
    return tn__op_scratch(call, common->scope, &config, out);
}

static tn_status make_value(tn__op_call *call, const tn__layer_product *p, const char *name,
                            const tn_tensor_info *shape, const tn__layer_wants *wants,
                            tn__layer_made *out) {
    const int is_needed = wants->planes != 0 && p->operand != TN_FORMAT_FP8_BLOCK_1D;
    tn__layer_home home = wants->value;
    if (home == TN__LAYER_NOWHERE && is_needed) home = TN__LAYER_SCRATCH;
    out->value.tensor = wants->callers_value;
    if (tn__is_no_tensor(wants->callers_value)) {
        if (home == TN__LAYER_NOWHERE) return TN_OK;
        TN_TRY(tn__layer_plain(call, p->common, home, name, shape, &out->value.tensor));
        out->value.is_kept = home == TN__LAYER_SAVED;
        out->value_is_scratch = home == TN__LAYER_SCRATCH;
        out->value_ends_with_cast = wants->value == TN__LAYER_NOWHERE;
    }
    TN_TRY(tn__op_tensor(call, name, out->value.tensor, &out->value.info));
    out->produced.value = out->value.tensor;
    out->produced.value_role = name;
    out->produced.value_info = out->value.info;
    return TN_OK;
}

static unsigned quantize_flags(unsigned planes) {
    return (planes & TN_PLANE_BIT(TN_PLANE_ROW) ? TN_QUANTIZE_ROW : 0u) |
           (planes & TN_PLANE_BIT(TN_PLANE_COL) ? TN_QUANTIZE_COL : 0u);
}

tn_status tn__layer_make_outputs(tn__op_call *call, const tn__layer_product *p,
                                 const char *const names[2], const tn_tensor_info *shape,
                                 const tn__layer_wants *wants, tn__layer_made *out) {
    *out = (tn__layer_made){
        .produced = {.dtype = shape->dtype, .rows = shape->rows, .cols = shape->cols}};
    TN_TRY(make_value(call, p, names[0], shape, wants, out));
    if (wants->planes == 0) return TN_OK;
    tn__layer_operand *copy = &out->quantized;
    TN_TRY(tn__layer_make(call, p, names[1], wants->is_gradient, shape, wants->is_kept,
                          wants->kept_plane, copy));
    if (p->operand == TN_FORMAT_FP8_BLOCK_1D) {
        out->produced.quantized.tensor = copy->tensor;
        out->produced.quantized.planes = quantize_flags(wants->planes);
        out->produced.quantized_info = copy->info;
        return TN_OK;
    }
    if (wants->planes & TN_PLANE_BIT(TN_PLANE_ROW))
        TN_TRY(tn__layer_lease(call, copy, TN_PLANE_ROW));
    if (wants->planes & TN_PLANE_BIT(TN_PLANE_COL))
        TN_TRY(tn__layer_lease(call, copy, TN_PLANE_COL));
    return TN_OK;
}

void tn__layer_take_views(const tn__quantize_work *cast, tn__layer_made *made) {
    tn__quantize_plan *plan = &made->quantized.plan;
    made->value.plan.src = cast->src;
    if (!tn__is_no_tensor(made->produced.quantized.tensor)) {
        plan->has_row = cast->has_row, plan->has_col = cast->has_col;
        plan->row = cast->row, plan->col = cast->col;
    }
    plan->src = cast->src;
    plan->dst = &made->quantized.info;
}

tn_status tn__layer_cast_made(tn__op_call *call, tn__layer_made *made) {
    if (tn__is_no_tensor(made->quantized.tensor)) return TN_OK;
    if (made->quantized.info.format == TN_FORMAT_FP8_BLOCK_1D) return TN_OK;
    TN_TRY(tn__layer_cast(call, &made->quantized));
    return made->value_ends_with_cast ? tn__op_let_go(call, made->value.tensor) : TN_OK;
}

tn__layer_wants tn__layer_wgrad_wants(const tn__layer_product *p, int is_delayed) {
    tn__layer_wants wants = {.planes = 0};
    if (tn__layer_reads_quantized_x(p)) {
        wants.is_kept = is_delayed;
        wants.kept_plane = tn__layer_kept_plane(p);
        wants.planes = TN_PLANE_BIT(wants.kept_plane);
    } else {
        wants.value = is_delayed ? TN__LAYER_SAVED : TN__LAYER_SCRATCH;
    }
    return wants;
}

tn_status tn__layer_done_with_x(tn__op_call *call, const tn__layer_product *p, tn__layer_made *made,
                                int for_wgrad) {
    const int reads_copy = for_wgrad && tn__layer_reads_quantized_x(p);
    const int reads_value = for_wgrad && !tn__layer_reads_quantized_x(p);
    const int has_copy = !tn__is_no_tensor(made->quantized.tensor);
    if (has_copy && !(reads_copy && tn__layer_kept_plane(p) == p->fprop.a))
        TN_TRY(tn__layer_done(call, &made->quantized, p->fprop.a));
    if (!made->value_is_scratch || reads_value || made->value_ends_with_cast) return TN_OK;
    return tn__op_let_go(call, made->value.tensor);
}
