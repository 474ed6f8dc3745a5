/* Delayed scaling: tn_scale_update, and the checks that tn_quantize shares with it. */
#include "op_scaling.h"
#include "tenure_cast.h"

#include <math.h>

tn_status tn__op_require_fp32(const tn__op_call *call, const char *role,
                              const tn_tensor_info *info) {
    TN_TRY(tn__op_require_format(call, role, info, TN_FORMAT_PLAIN));
    return tn__op_require_dtype(call, role, info, TN_FP32);
}

tn_status tn__op_history(tn__op_call *call, tn_tensor tensor, tn_tensor_info *info,
                         tn__history *out) {
    TN_TRY(tn__op_tensor(call, "amax_history", tensor, info));
    TN_TRY(tn__op_require_fp32(call, "amax_history", info));
    TN_REQUIRE(info->rank == 1 || info->rank == 2,
               "%s: amax_history (tensor %s) has %d dimensions, expected [H] or [H, n]", call->name,
               info->name, info->rank);
    *out = (tn__history){info->shape[0], info->rank == 2 ? info->shape[1] : 1};
    TN_REQUIRE(out->length > 0, "%s: amax_history (tensor %s) has no entries: H is 0", call->name,
               info->name);
    return TN_OK;
}

tn_status tn__op_require_slot(const tn__op_call *call, const char *role, const tn_tensor_info *info,
                              int64_t slot, int64_t count) {
    TN_REQUIRE(slot >= 0 && slot < count,
               "%s: slot is %lld, but %s (tensor %s) has room for %lld tensors", call->name,
               (long long)slot, role, info->name, (long long)count);
    return TN_OK;
}

static tn_status check_update(tn__op_call *call, const tn_scale_update_args *args,
                              tn__history *history) {
    tn_tensor_info info, scale;
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_REQUIRE(args->dtype == TN_E4M3 || args->dtype == TN_E5M2,
               "%s: dtype is %s, expected e4m3 or e5m2", call->name, tn_dtype_name(args->dtype));
    TN_REQUIRE(args->amax == TN_AMAX_MOST || args->amax == TN_AMAX_MOST_RECENT,
               "%s: amax is %d, expected TN_AMAX_MOST or TN_AMAX_MOST_RECENT", call->name,
               (int)args->amax);
    TN_REQUIRE(args->margin >= -64 && args->margin <= 64, "%s: margin is %d, expected -64 to 64",
               call->name, args->margin);
    TN_TRY(tn__op_history(call, args->amax_history, &info, history));
    TN_TRY(tn__op_tensor(call, "scale", args->scale, &scale));
    TN_TRY(tn__op_require_fp32(call, "scale", &scale));
    TN_REQUIRE(scale.rows * scale.cols == history->count,
               "%s: scale (tensor %s) has %lld elements, but amax_history (tensor %s) is of %lld "
               "tensors",
               call->name, scale.name, (long long)(scale.rows * scale.cols), info.name,
               (long long)history->count);
    return TN_OK;
}

tn_status tn_scale_update(const tn_scale_update_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_scale_update", stream);
    tn_plane_view history_view, scale_view;
    const float *skip = NULL;
    tn__history history;
    TN_TRY(tn__op_init());
    TN_TRY(check_update(&call, args, &history));
    tn_status status = tn__op_lease_skip(&call, args->skip, &skip);
    if (status == TN_OK) {
        status = tn__op_lease(&call, args->amax_history, TN_PLANE_DATA, TN_UPDATE, &history_view);
    }
    if (status == TN_OK) {
        status = tn__op_lease(&call, args->scale, TN_PLANE_DATA, TN_UPDATE, &scale_view);
    }
    if (status == TN_OK && history.count > 0) {
        float most = args->dtype == TN_E4M3 ? 448.0f : 57344.0f;
        tn__scale_update_work work = {.history = history_view.data,
                                      .scale = scale_view.data,
                                      .length = history.length,
                                      .count = history.count,
                                      .target = ldexpf(most, -args->margin),
                                      .is_most_recent = args->amax == TN_AMAX_MOST_RECENT,
                                      .skip = skip};
        status = TN__OP_RUN(&call, scale_update, &work);
    }
    return tn__op_finish(&call, status);
}
