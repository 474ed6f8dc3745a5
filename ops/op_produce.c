/* The outputs of ops that make values and cast them: see op_produce.h. */
#include "op_produce.h"

#include <math.h>

/* ---- checks -------------------------------------------------------------------------------- */

static tn_status check_quantized(tn__op_call *call, tn__produced *out) {
    const tn_quantized_out *quantized = &out->quantized;
    tn_tensor_info *info = &out->quantized_info;
    TN_REQUIRE(quantized->planes <= (TN_QUANTIZE_ROW | TN_QUANTIZE_COL),
               "%s: quantized.planes is 0x%X, expected TN_QUANTIZE_ROW, TN_QUANTIZE_COL or both",
               call->name, quantized->planes);
    TN_REQUIRE(isfinite(quantized->amax_epsilon) && quantized->amax_epsilon >= 0.0f,
               "%s: quantized.amax_epsilon is %g, expected a finite number of at least 0",
               call->name, (double)quantized->amax_epsilon);
    if (tn__is_no_tensor(quantized->tensor)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "quantized", quantized->tensor, info));
    TN_REQUIRE(info->format == TN_FORMAT_FP8_BLOCK_1D || info->format == TN_FORMAT_FP8_BLOCK_2D,
               "%s: quantized (tensor %s) is %s, expected %s or %s", call->name, info->name,
               tn_format_name(info->format), tn_format_name(TN_FORMAT_FP8_BLOCK_1D),
               tn_format_name(TN_FORMAT_FP8_BLOCK_2D));
    return tn__op_require_shape(call, "quantized", info, out->rows, out->cols,
                                "the shape of what is made");
}

tn_status tn__op_check_produced(tn__op_call *call, tn__produced *out) {
    TN_TRY(check_quantized(call, out));
    if (tn__is_no_tensor(out->value)) return TN_OK;
    TN_TRY(tn__op_tensor(call, out->value_role, out->value, &out->value_info));
    TN_TRY(tn__op_require_format(call, out->value_role, &out->value_info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, out->value_role, &out->value_info, out->dtype));
    return tn__op_require_shape(call, out->value_role, &out->value_info, out->rows, out->cols,
                                "the shape of what is made");
}

static tn_status require_count(tn__op_call *call, const char *role, const tn_tensor_info *info,
                               int64_t count, const char *reason) {
    TN_REQUIRE(info->rows * info->cols == count,
               "%s: %s (tensor %s) has %lld elements, expected %lld: %s", call->name, role,
               info->name, (long long)(info->rows * info->cols), (long long)count, reason);
    return TN_OK;
}

tn_status tn__op_require_fp32_vector(tn__op_call *call, const char *role, tn_tensor tensor,
                                     int64_t count, const char *reason, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    TN_TRY(tn__op_require_format(call, role, info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, role, info, TN_FP32));
    return require_count(call, role, info, count, reason);
}

tn_status tn__op_require_vector(tn__op_call *call, const char *role, tn_tensor tensor,
                                int64_t count, const char *reason, tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    TN_TRY(tn__op_require_float(call, role, info));
    return require_count(call, role, info, count, reason);
}

/* ---- leases -------------------------------------------------------------------------------- */

/* Both planes are looked at before either is leased: to write one makes the other stale. */
static tn_status lease_planes(tn__op_call *call, const tn__produced *out, const float *skip,
                              tn__quantize_work *cast) {
    const tn_quantized_out *quantized = &out->quantized;
    if (tn__is_no_tensor(quantized->tensor)) return TN_OK;
    cast->format = out->quantized_info.format;
    cast->scale_mode = out->quantized_info.scale_mode;
    cast->dtype = out->quantized_info.dtype;
    cast->amax_epsilon = quantized->amax_epsilon;
    cast->has_col = (quantized->planes & TN_QUANTIZE_COL) != 0;
    cast->has_row = (quantized->planes & TN_QUANTIZE_ROW) != 0 || !cast->has_col;
    const tn_tensor tensor = quantized->tensor;
    if (cast->has_row) TN_TRY(tn__op_require_kept(call, skip, "quantized", tensor, TN_PLANE_ROW));
    if (cast->has_col) TN_TRY(tn__op_require_kept(call, skip, "quantized", tensor, TN_PLANE_COL));
    if (cast->has_row) TN_TRY(tn__op_lease(call, tensor, TN_PLANE_ROW, TN_WRITE, &cast->row));
    if (cast->has_col) TN_TRY(tn__op_lease(call, tensor, TN_PLANE_COL, TN_WRITE, &cast->col));
    return TN_OK;
}

tn_status tn__op_lease_produced(tn__op_call *call, const tn__produced *out, const float *skip,
                                tn__quantize_work *cast) {
    *cast = (tn__quantize_work){.src = {out->dtype, NULL, out->rows, out->cols},
                                .format = TN_FORMAT_FP8_BLOCK_1D,
                                .dtype = TN_E4M3};
    if (!tn__is_no_tensor(out->value)) {
        TN_TRY(tn__op_require_kept(call, skip, out->value_role, out->value, TN_PLANE_DATA));
        TN_TRY(tn__op_lease_matrix(call, out->value, &out->value_info, TN_WRITE, &cast->src));
    }
    cast->src.rows = out->rows, cast->src.cols = out->cols;
    return lease_planes(call, out, skip, cast);
}

/* ---- the sums of columns ------------------------------------------------------------------- */

tn_status tn__op_check_column_sums(tn__op_call *call, const char *role, tn_tensor tensor,
                                   int64_t cols, tn_tensor_info *info) {
    if (tn__is_no_tensor(tensor)) return TN_OK;
    return tn__op_require_vector(call, role, tensor, cols, "one for each column", info);
}

tn_status tn__op_lease_column_sums(tn__op_call *call, const char *role, tn_tensor tensor,
                                   const tn_tensor_info *info, int accumulate, const float *skip,
                                   tn__column_sums *out) {
    *out = (tn__column_sums){.to = {TN_FP32, NULL, 0, 0}, .accumulate = accumulate, .parts = 1};
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_require_kept(call, skip, role, tensor, TN_PLANE_DATA));
    TN_TRY(tn__op_lease_matrix(call, tensor, info, accumulate ? TN_UPDATE : TN_WRITE, &out->to));
    out->to.cols = info->rows * info->cols, out->to.rows = 1;
    return TN_OK;
}

static int64_t tiles_of(int64_t rows) { return (rows + 127) / 128; }

tn_status tn__op_tile_sums(tn__op_call *call, tn_scope scope, int64_t rows, tn__column_sums *sums) {
    void *scratch = NULL;
    if (!sums->to.data) return TN_OK;
    const size_t floats = (size_t)tiles_of(rows) * (size_t)sums->parts * (size_t)sums->to.cols;
    TN_TRY(tn__op_scratch_bytes(call, scope, floats * sizeof(float), &scratch));
    sums->tile_sums = scratch;
    return TN_OK;
}

tn_status tn__op_add_up_tiles(tn__op_call *call, int64_t rows, const float *skip,
                              const tn__column_sums *sums) {
    const tn__column_sums_work work = {.tile_sums = sums->tile_sums,
                                       .tiles = tiles_of(rows),
                                       .parts = sums->parts,
                                       .sums = sums->to,
                                       .accumulate = sums->accumulate,
                                       .skip = skip};
    if (!sums->to.data || (sums->accumulate && work.tiles == 0)) return TN_OK;
    return TN__OP_RUN(call, column_sums, &work);
}

/* ---- the work ------------------------------------------------------------------------------ */

tn_status tn__op_produce(tn__op_call *call, tn__produce_work *work, tn__column_sums *sums,
                         tn_scope scope) {
    const tn__matrix *made = &work->cast.src;
    if (made->cols == 0) return TN_OK;
    TN_TRY(tn__op_tile_sums(call, scope, made->rows, sums));
    work->tile_sums = sums->tile_sums;
    if (made->rows > 0) TN_TRY(TN__OP_RUN(call, produce, work));
    return tn__op_add_up_tiles(call, made->rows, work->skip, sums);
}
