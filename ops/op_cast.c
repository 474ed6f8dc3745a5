/* Casts: tn_quantize, tn_dequantize, tn_transpose. */
#include "op_cast.h"
#include "op_grouped.h"
#include "op_scaling.h"

#include <math.h>

/* ---- quantize -------------------------------------------------------------------------------- */

tn_status tn__op_quantize(tn__op_call *call, const tn__quantize_plan *plan) {
    tn__quantize_work work = {.src = plan->src,
                              .format = plan->dst->format,
                              .scale_mode = plan->dst->scale_mode,
                              .dtype = plan->dst->dtype,
                              .amax_epsilon = plan->amax_epsilon,
                              .has_row = plan->has_row,
                              .has_col = plan->has_col,
                              .row = plan->row,
                              .col = plan->col,
                              .factor = plan->factor,
                              .amax = plan->amax,
                              .whole_amax = plan->whole_amax,
                              .skip = plan->skip,
                              .random = plan->random,
                              .square_blocks = plan->square_blocks};
    if (plan->src.rows == 0 || plan->src.cols == 0) return TN_OK;
    if (!plan->has_row && !plan->has_col) return TN_OK;
    return TN__OP_RUN(call, quantize, &work);
}

/* What delayed scaling names: all of it belongs to a slot that there is. */
static tn_status check_delayed(tn__op_call *call, const tn_quantize_args *args,
                               const tn_tensor_info *dst) {
    tn_tensor_info info;
    tn__history history;
    if (tn__is_no_tensor(args->scale) && tn__is_no_tensor(args->amax_history)) {
        TN_REQUIRE(args->slot == 0, "%s: slot is %lld, but neither scale nor amax_history is given",
                   call->name, (long long)args->slot);
        return TN_OK;
    }
    TN_TRY(tn__op_require_format(call, "dst", dst, TN_FORMAT_FP8_TENSOR));
    TN_REQUIRE(tn__is_no_tensor(args->whole_amax),
               "%s: whole_amax and delayed scaling (scale, amax_history) exclude each other",
               call->name);
    if (!tn__is_no_tensor(args->scale)) {
        TN_TRY(tn__op_tensor(call, "scale", args->scale, &info));
        TN_TRY(tn__op_require_fp32(call, "scale", &info));
        TN_TRY(tn__op_require_slot(call, "scale", &info, args->slot, info.rows * info.cols));
    }
    if (!tn__is_no_tensor(args->amax_history)) {
        TN_TRY(tn__op_history(call, args->amax_history, &info, &history));
        TN_TRY(tn__op_require_slot(call, "amax_history", &info, args->slot, history.count));
    }
    return TN_OK;
}

static tn_status check_whole_amax(tn__op_call *call, const tn_quantize_args *args,
                                  const tn_tensor_info *dst) {
    tn_tensor_info info;
    if (tn__is_no_tensor(args->whole_amax)) return TN_OK;
    TN_TRY(tn__op_require_format(call, "dst", dst, TN_FORMAT_FP8_TENSOR));
    TN_TRY(tn__op_tensor(call, "whole_amax", args->whole_amax, &info));
    TN_TRY(tn__op_require_fp32(call, "whole_amax", &info));
    TN_REQUIRE(info.rows * info.cols == 1,
               "%s: whole_amax (tensor %s) has %lld elements, expected one", call->name, info.name,
               (long long)(info.rows * info.cols));
    return TN_OK;
}

static tn_status check_quantize(tn__op_call *call, const tn_quantize_args *args,
                                tn_tensor_info *src, tn_tensor_info *dst) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_REQUIRE(args->planes <= (TN_QUANTIZE_ROW | TN_QUANTIZE_COL),
               "%s: planes is 0x%X, expected TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both", call->name,
               args->planes);
    TN_REQUIRE(isfinite(args->amax_epsilon) && args->amax_epsilon >= 0.0f,
               "%s: amax_epsilon is %g, expected a finite number of at least 0", call->name,
               (double)args->amax_epsilon);
    TN_TRY(tn__op_tensor(call, "src", args->src, src));
    TN_TRY(tn__op_tensor(call, "dst", args->dst, dst));
    TN_TRY(tn__op_require_float(call, "src", src));
    TN_REQUIRE(dst->format != TN_FORMAT_PLAIN, "%s: dst (tensor %s) is %s, expected a format of %s",
               call->name, dst->name, tn_format_name(dst->format), "quantized elements");
    TN_TRY(tn__op_require_shape(call, "dst", dst, src->rows, src->cols, "the shape of src"));
    TN_REQUIRE(args->square_blocks == 0 || args->square_blocks == 1,
               "%s: square_blocks is %d, expected 0 or 1", call->name, args->square_blocks);
    if (args->square_blocks) TN_TRY(tn__op_require_format(call, "dst", dst, TN_FORMAT_NVFP4));
    TN_TRY(check_whole_amax(call, args, dst));
    return check_delayed(call, args, dst);
}

/* ---- delayed scaling ------------------------------------------------------------------------ */

/* Leases what is read and written of scales and amaxes beside the planes. */
static tn_status lease_delayed(tn__op_call *call, const tn_quantize_args *args,
                               tn__quantize_plan *plan) {
    tn_plane_view view;
    if (!tn__is_no_tensor(args->scale)) {
        TN_TRY(tn__op_lease(call, args->scale, TN_PLANE_DATA, TN_READ, &view));
        plan->factor = (const float *)view.data + args->slot;
    }
    if (!tn__is_no_tensor(args->amax_history)) {
        TN_TRY(tn__op_lease(call, args->amax_history, TN_PLANE_DATA, TN_UPDATE, &view));
        plan->amax = (float *)view.data + args->slot;
    }
    if (!tn__is_no_tensor(args->whole_amax)) {
        TN_TRY(tn__op_lease(call, args->whole_amax, TN_PLANE_DATA, TN_READ, &view));
        plan->whole_amax = view.data;
    }
    return TN_OK;
}

/* What the skip flag leaves as it is must be something; before a lease makes the other stale. */
static tn_status lease_skip(tn__op_call *call, const tn_quantize_args *args,
                            tn__quantize_plan *plan) {
    TN_TRY(tn__op_lease_skip(call, args->skip, &plan->skip));
    if (plan->has_row)
        TN_TRY(tn__op_require_kept(call, plan->skip, "dst", args->dst, TN_PLANE_ROW));
    if (plan->has_col)
        TN_TRY(tn__op_require_kept(call, plan->skip, "dst", args->dst, TN_PLANE_COL));
    return TN_OK;
}

/* The generator's state, which the work reads and puts forward. */
static tn_status lease_random(tn__op_call *call, tn_tensor tensor, tn__random **out) {
    tn_plane_view view;
    tn_tensor_info info;
    *out = NULL;
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "random", tensor, &info));
    TN_TRY(tn__op_require_plain(call, "random", &info, TN_BYTE));
    TN_REQUIRE(info.rows * info.cols == (int64_t)sizeof **out,
               "%s: random (tensor %s) has %lld bytes, expected %zu: seed and offset", call->name,
               info.name, (long long)(info.rows * info.cols), sizeof **out);
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, TN_UPDATE, &view));
    *out = view.data;
    return tn__op_require_aligned(call, "random", *out, sizeof(uint64_t));
}

tn_status tn_quantize(const tn_quantize_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_quantize", stream);
    tn_tensor_info src = TN_TENSOR_INFO_INIT, dst = TN_TENSOR_INFO_INIT;
    tn__quantize_plan plan = {.dst = &dst};
    TN_TRY(tn__op_init());
    TN_TRY(check_quantize(&call, args, &src, &dst));
    plan.amax_epsilon = args->amax_epsilon;
    plan.square_blocks = args->square_blocks;
    plan.has_col = (args->planes & TN_QUANTIZE_COL) != 0;
    plan.has_row = (args->planes & TN_QUANTIZE_ROW) != 0 || !plan.has_col;
    tn_status status = tn__op_lease_matrix(&call, args->src, &src, TN_READ, &plan.src);
    if (status == TN_OK) status = lease_delayed(&call, args, &plan);
    if (status == TN_OK) status = lease_skip(&call, args, &plan);
    if (status == TN_OK) status = lease_random(&call, args->random, &plan.random);
    if (status == TN_OK && plan.has_row) {
        status = tn__op_lease(&call, args->dst, TN_PLANE_ROW, TN_WRITE, &plan.row);
    }
    if (status == TN_OK && plan.has_col) {
        status = tn__op_lease(&call, args->dst, TN_PLANE_COL, TN_WRITE, &plan.col);
    }
    if (status == TN_OK) status = tn__op_quantize(&call, &plan);
    return tn__op_finish(&call, status);
}

/* ---- dequantize ------------------------------------------------------------------------------ */

static tn_status check_dequantize(tn__op_call *call, const tn_dequantize_args *args,
                                  tn_tensor_info *src, tn_tensor_info *dst) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_REQUIRE((unsigned)args->plane < TN_PLANE_COUNT,
               "%s: plane is %d, expected TN_PLANE_ROW or TN_PLANE_COL", call->name,
               (int)args->plane);
    TN_TRY(tn__op_tensor(call, "src", args->src, src));
    TN_TRY(tn__op_tensor(call, "dst", args->dst, dst));
    TN_REQUIRE(src->format != TN_FORMAT_PLAIN, "%s: src (tensor %s) is %s, expected a format of %s",
               call->name, src->name, tn_format_name(src->format), "quantized elements");
    TN_TRY(tn__op_require_float(call, "dst", dst));
    return tn__op_require_shape(call, "dst", dst, src->rows, src->cols, "the shape of src");
}

tn_status tn_dequantize(const tn_dequantize_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_dequantize", stream);
    tn_tensor_info src = TN_TENSOR_INFO_INIT, dst = TN_TENSOR_INFO_INIT;
    tn__dequantize_work work = {.skip = NULL};
    TN_TRY(tn__op_init());
    TN_TRY(check_dequantize(&call, args, &src, &dst));
    tn_plane plane = args->plane == TN_PLANE_COL ? TN_PLANE_COL : TN_PLANE_ROW;
    work.format = src.format;
    tn_status status = tn__op_lease_skip(&call, args->skip, &work.skip);
    if (status == TN_OK) {
        status = tn__op_require_kept(&call, work.skip, "dst", args->dst, TN_PLANE_DATA);
    }
    if (status == TN_OK) status = tn__op_lease_derived(&call, args->src, plane, &work.src);
    if (status == TN_OK) {
        status = tn__op_lease_matrix(&call, args->dst, &dst, TN_WRITE, &work.dst);
    }
    if (status == TN_OK && !tn__is_empty(&dst)) {
        status = TN__OP_RUN(&call, dequantize, &work);
    }
    return tn__op_finish(&call, status);
}

/* ---- transpose ------------------------------------------------------------------------------- */

tn_status tn_transpose(const tn_transpose_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_transpose", stream);
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_REQUIRE(args->to == TN_PLANE_ROW || args->to == TN_PLANE_COL,
               "%s: to is %d, expected TN_PLANE_ROW or TN_PLANE_COL", call.name, (int)args->to);
    TN_TRY(tn__op_tensor(&call, "tensor", args->tensor, &info));
    TN_REQUIRE(info.format == TN_FORMAT_FP8_BLOCK_2D || info.format == TN_FORMAT_FP8_TENSOR,
               "%s: tensor (tensor %s) is %s, expected %s or %s", call.name, info.name,
               tn_format_name(info.format), tn_format_name(TN_FORMAT_FP8_BLOCK_2D),
               tn_format_name(TN_FORMAT_FP8_TENSOR));
    return tn_plane_require(args->tensor, args->to, stream);
}
