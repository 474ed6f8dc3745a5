/* Clipping by the norm of all gradients: tn_square_sums and tn_clip_factor. */
#include "op_call.h"
#include "op_produce.h"
#include "tenure_train.h"

#include <math.h>

static tn_status lease_floats(tn__op_call *call, tn_tensor tensor, tn_access access, float **out) {
    tn_plane_view view;
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, access, &view));
    *out = view.data;
    return TN_OK;
}

static tn_status check_sums(tn__op_call *call, tn_tensor sums) {
    tn_tensor_info info;
    return tn__op_require_fp32_vector(call, "sums", sums, TN_SQUARE_SUMS,
                                      "as tn_square_sums makes them", &info);
}

tn_status tn_square_sums(const tn_square_sums_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_square_sums", stream);
    tn__square_sums_work work = {.sums = NULL};
    tn_tensor_info x;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(tn__op_tensor(&call, "x", args->x, &x));
    TN_TRY(tn__op_require_float(&call, "x", &x));
    TN_TRY(check_sums(&call, args->sums));
    work.accumulate = args->accumulate;
    tn_status status = tn__op_lease_matrix(&call, args->x, &x, TN_READ, &work.x);
    if (status == TN_OK)
        status =
            lease_floats(&call, args->sums, args->accumulate ? TN_UPDATE : TN_WRITE, &work.sums);
    /* Of no elements the sums are 0, and are written. */
    if (status == TN_OK && (!tn__is_empty(&x) || !args->accumulate))
        status = TN__OP_RUN(&call, square_sums, &work);
    return tn__op_finish(&call, status);
}

static tn_status check_clip(tn__op_call *call, const tn_clip_factor_args *args) {
    static const char reason[] = "it is one number";
    tn_tensor_info info;
    TN_REQUIRE(isfinite(args->scale), "%s: scale is %g, expected a finite number", call->name,
               (double)args->scale);
    TN_REQUIRE(args->max_norm > 0.0f, "%s: max_norm is %g, expected a number above 0", call->name,
               (double)args->max_norm);
    TN_TRY(check_sums(call, args->sums));
    if (!tn__is_no_tensor(args->norm))
        TN_TRY(tn__op_require_fp32_vector(call, "norm", args->norm, 1, reason, &info));
    return tn__op_require_fp32_vector(call, "factor", args->factor, 1, reason, &info);
}

tn_status tn_clip_factor(const tn_clip_factor_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_clip_factor", stream);
    tn__clip_factor_work work = {.norm = NULL};
    float *sums = NULL;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_clip(&call, args));
    work.scale = args->scale, work.max_norm = args->max_norm;
    tn_status status = lease_floats(&call, args->sums, TN_READ, &sums);
    work.sums = sums;
    if (status == TN_OK && !tn__is_no_tensor(args->norm))
        status = lease_floats(&call, args->norm, TN_WRITE, &work.norm);
    if (status == TN_OK) status = lease_floats(&call, args->factor, TN_WRITE, &work.factor);
    if (status == TN_OK) status = TN__OP_RUN(&call, clip_factor, &work);
    return tn__op_finish(&call, status);
}
