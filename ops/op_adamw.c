/* The optimizer: tn_adamw_advance counts steps on the device, tn_adamw updates a weight. */
#include "op_produce.h"
#include "tenure_train.h"

#include <math.h>

enum { STEP_FLOATS = 3 };

/* ---- checks -------------------------------------------------------------------------------- */

static tn_status check_betas(const tn__op_call *call, float beta1, float beta2) {
    TN_REQUIRE(beta1 >= 0.0f && beta1 < 1.0f, "%s: beta1 is %g, expected 0 or more, below 1",
               call->name, (double)beta1);
    TN_REQUIRE(beta2 >= 0.0f && beta2 < 1.0f, "%s: beta2 is %g, expected 0 or more, below 1",
               call->name, (double)beta2);
    return TN_OK;
}

static tn_status check_numbers(const tn__op_call *call, const tn_adamw_args *args) {
    TN_TRY(check_betas(call, args->beta1, args->beta2));
    TN_REQUIRE(isfinite(args->learning_rate) && args->learning_rate >= 0.0f,
               "%s: learning_rate is %g, expected a finite number of at least 0", call->name,
               (double)args->learning_rate);
    TN_REQUIRE(isfinite(args->weight_decay) && args->weight_decay >= 0.0f,
               "%s: weight_decay is %g, expected a finite number of at least 0", call->name,
               (double)args->weight_decay);
    TN_REQUIRE(isfinite(args->epsilon) && args->epsilon > 0.0f,
               "%s: epsilon is %g, expected a finite number above 0", call->name,
               (double)args->epsilon);
    return TN_OK;
}

typedef struct update {
    tn_tensor_info master, gradient, first, second, step, rate, gradient_scale, plain;
    tn__produced out;
    int is_dropped; /* COL of the weight, or there is no weight */
} update;

static tn_status check_factor(tn__op_call *call, const char *role, tn_tensor tensor,
                              tn_tensor_info *info) {
    if (tn__is_no_tensor(tensor)) return TN_OK;
    return tn__op_require_fp32_vector(call, role, tensor, 1, "it is one factor", info);
}

/* A view has no COL of its own that could go. */
static tn_status require_no_view(tn__op_call *call, tn_tensor tensor) {
    tn_tensor_info weight;
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "weight", tensor, &weight));
    TN_REQUIRE(tn__is_no_tensor(weight.base),
               "%s: weight (tensor %s) is a view, whose COL is its base's: give the base",
               call->name, weight.name);
    return TN_OK;
}

static tn_status check_update(tn__op_call *call, const tn_adamw_args *args, update *u) {
    static const char reason[] = "as many as master has";
    TN_TRY(check_numbers(call, args));
    TN_TRY(tn__op_tensor(call, "master", args->master, &u->master));
    TN_TRY(tn__op_require_format(call, "master", &u->master, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "master", &u->master, TN_FP32));
    const int64_t count = u->master.rows * u->master.cols;
    TN_TRY(tn__op_require_vector(call, "gradient", args->gradient, count, reason, &u->gradient));
    TN_TRY(tn__op_require_fp32_vector(call, "first", args->first, count, reason, &u->first));
    TN_TRY(tn__op_require_fp32_vector(call, "second", args->second, count, reason, &u->second));
    TN_TRY(tn__op_require_fp32_vector(call, "step", args->step, STEP_FLOATS,
                                      "as tn_adamw_advance keeps it", &u->step));
    TN_TRY(check_factor(call, "rate", args->rate, &u->rate));
    TN_TRY(check_factor(call, "gradient_scale", args->gradient_scale, &u->gradient_scale));
    if (!tn__is_no_tensor(args->plain))
        TN_TRY(tn__op_require_vector(call, "plain", args->plain, count, reason, &u->plain));
    TN_TRY(require_no_view(call, args->weight));
    u->out = (tn__produced){.quantized = {args->weight, TN_QUANTIZE_ROW, args->amax_epsilon},
                            .dtype = TN_FP32,
                            .rows = u->master.rows,
                            .cols = u->master.cols};
    return tn__op_check_produced(call, &u->out);
}

/* ---- leases -------------------------------------------------------------------------------- */

static tn_status lease_floats(tn__op_call *call, tn_tensor tensor, tn_access access, float **out) {
    tn_plane_view view;
    *out = NULL;
    if (tn__is_no_tensor(tensor)) return TN_OK;
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, access, &view));
    *out = view.data;
    return TN_OK;
}

static tn_status lease_inputs(tn__op_call *call, const tn_adamw_args *args, const update *u,
                              tn__adamw_work *work) {
    float *step, *rate, *gradient_scale;
    TN_TRY(tn__op_lease_skip(call, args->skip, &work->skip));
    TN_TRY(tn__op_lease_matrix(call, args->gradient, &u->gradient, TN_READ, &work->gradient));
    TN_TRY(lease_floats(call, args->step, TN_READ, &step));
    TN_TRY(lease_floats(call, args->rate, TN_READ, &rate));
    TN_TRY(lease_floats(call, args->gradient_scale, TN_READ, &gradient_scale));
    work->step = step, work->rate = rate, work->gradient_scale = gradient_scale;
    return TN_OK;
}

/* COL, where ROW can take its place, goes before the weight is written: what does not let go of it
 * is then found before anything has changed. Where COL is all that there is, it goes at the end. */
static tn_status drop_old_columns(const tn__op_call *call, tn_tensor weight, int *is_dropped) {
    tn_plane_state row;
    TN_TRY(tn_plane_state_get(weight, TN_PLANE_ROW, &row));
    *is_dropped = row == TN_PLANE_VALID;
    return *is_dropped ? tn_plane_drop(weight, TN_PLANE_COL, call->stream) : TN_OK;
}

static tn_status lease_weight(tn__op_call *call, const tn_adamw_args *args, update *u,
                              tn__adamw_work *work) {
    u->is_dropped = 1;
    if (!tn__is_no_tensor(args->weight))
        TN_TRY(drop_old_columns(call, args->weight, &u->is_dropped));
    return tn__op_lease_produced(call, &u->out, work->skip, &work->cast);
}

static tn_status lease_outputs(tn__op_call *call, const tn_adamw_args *args, update *u,
                               tn__adamw_work *work) {
    tn__matrix master;
    work->plain = (tn__matrix){TN_FP32, NULL, 0, 0};
    TN_TRY(tn__op_lease_matrix(call, args->master, &u->master, TN_UPDATE, &master));
    TN_TRY(lease_floats(call, args->first, TN_UPDATE, &work->first));
    TN_TRY(lease_floats(call, args->second, TN_UPDATE, &work->second));
    if (!tn__is_no_tensor(args->plain)) {
        TN_TRY(tn__op_require_kept(call, work->skip, "plain", args->plain, TN_PLANE_DATA));
        TN_TRY(tn__op_lease_matrix(call, args->plain, &u->plain, TN_WRITE, &work->plain));
    }
    TN_TRY(lease_weight(call, args, u, work));
    work->cast.src = master;
    return TN_OK;
}

/* ---- the ops ------------------------------------------------------------------------------- */

tn_status tn_adamw(const tn_adamw_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_adamw", stream);
    tn__adamw_work work = {.skip = NULL};
    update u;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_update(&call, args, &u));
    work.constants = (tn__adamw_constants){
        .rate = args->learning_rate,
        .decay = args->weight_decay,
        .epsilon = args->epsilon,
        .beta2 = args->beta2,
        .beta1_complement = (float)(1.0 - (double)args->beta1),
        .beta2_complement = (float)(1.0 - (double)args->beta2),
    };
    tn_status status = lease_inputs(&call, args, &u, &work);
    if (status == TN_OK) status = lease_outputs(&call, args, &u, &work);
    if (status == TN_OK && !tn__is_empty(&u.master)) status = TN__OP_RUN(&call, adamw, &work);
    status = tn__op_finish(&call, status);
    if (status != TN_OK || u.is_dropped) return status;
    return tn_plane_drop(args->weight, TN_PLANE_COL, stream);
}

tn_status tn_adamw_advance(const tn_adamw_advance_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_adamw_advance", stream);
    tn__adamw_advance_work work = {.skip = NULL};
    tn_tensor_info step;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_betas(&call, args->beta1, args->beta2));
    TN_TRY(tn__op_require_fp32_vector(&call, "step", args->step, STEP_FLOATS,
                                      "the count and two corrections", &step));
    work.beta1 = args->beta1, work.beta2 = args->beta2;
    tn_status status = tn__op_lease_skip(&call, args->skip, &work.skip);
    if (status == TN_OK) status = lease_floats(&call, args->step, TN_UPDATE, &work.step);
    if (status == TN_OK) status = TN__OP_RUN(&call, adamw_advance, &work);
    return tn__op_finish(&call, status);
}
