/* Attention and its gradient: checks, leases, one work each. */
#include <math.h>

#include "op_call.h"
#include "tenure_attention.h"

/* What both directions say of the shape. */
typedef struct shape {
    int64_t heads, heads_kv, sequence;
    int is_causal;
    float scale;
} shape;

/* ---- checks -------------------------------------------------------------------------------- */

static tn_status check_heads(const tn__op_call *call, const shape *s, const tn_tensor_info *qkv,
                             tn__attention_work *work) {
    const int64_t cols = qkv->cols, heads_kv = s->heads_kv ? s->heads_kv : s->heads;
    TN_REQUIRE(s->heads > 0, "%s: heads is %lld, expected 1 or more", call->name,
               (long long)s->heads);
    TN_REQUIRE(heads_kv > 0 && s->heads % heads_kv == 0,
               "%s: heads_kv is %lld, expected a divisor of heads, which is %lld", call->name,
               (long long)heads_kv, (long long)s->heads);
    const int64_t most = cols / 8; /* heads; with more of them the next sum could overflow */
    const int64_t all = s->heads > most ? cols + 1 : s->heads + 2 * heads_kv;
    TN_REQUIRE(
        cols % all == 0 && cols / all % 8 == 0 && cols > 0 &&
            cols / all <= TN_ATTENTION_HEAD_DIM_MAX,
        "%s: qkv (tensor %s) has %lld columns for %lld heads of queries and 2 x %lld of keys "
        "and values, expected a multiple of 8 for each, at most %d",
        call->name, qkv->name, (long long)cols, (long long)s->heads, (long long)heads_kv,
        TN_ATTENTION_HEAD_DIM_MAX);
    work->heads = s->heads, work->heads_kv = heads_kv, work->head_dim = cols / all;
    return TN_OK;
}

static tn_status check_shape(tn__op_call *call, const shape *s, tn_tensor qkv, tn_tensor_info *info,
                             tn__attention_work *work) {
    TN_TRY(tn__op_tensor(call, "qkv", qkv, info));
    TN_TRY(tn__op_require_float(call, "qkv", info));
    TN_TRY(check_heads(call, s, info, work));
    TN_REQUIRE(s->sequence > 0 && info->rows % s->sequence == 0,
               "%s: sequence is %lld, expected a divisor of the %lld rows of qkv (tensor %s)",
               call->name, (long long)s->sequence, (long long)info->rows, info->name);
    TN_REQUIRE(isfinite(s->scale) && s->scale >= 0.0f,
               "%s: scale is %g, expected a finite number above 0, or 0 for 1 / sqrt(%lld)",
               call->name, (double)s->scale, (long long)work->head_dim);
    work->dtype = info->dtype;
    work->tokens = info->rows, work->sequence = s->sequence;
    work->is_causal = s->is_causal != 0;
    work->scale = s->scale != 0.0f ? s->scale : 1.0f / sqrtf((float)work->head_dim);
    return TN_OK;
}

/* Of qkv's type; [T, cols]. */
static tn_status check_rows(tn__op_call *call, const char *role, tn_tensor tensor,
                            const tn__attention_work *work, int64_t cols, const char *reason) {
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, role, tensor, &info));
    TN_TRY(tn__op_require_format(call, role, &info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, role, &info, work->dtype));
    return tn__op_require_shape(call, role, &info, work->tokens, cols, reason);
}

static tn_status check_like_y(tn__op_call *call, const char *role, tn_tensor tensor,
                              const tn__attention_work *work) {
    return check_rows(call, role, tensor, work, work->heads * work->head_dim,
                      "the rows of qkv, and its columns of queries");
}

static tn_status check_log_sum(tn__op_call *call, tn_tensor log_sum,
                               const tn__attention_work *work) {
    tn_tensor_info info;
    TN_TRY(tn__op_tensor(call, "log_sum", log_sum, &info));
    TN_TRY(tn__op_require_format(call, "log_sum", &info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "log_sum", &info, TN_FP32));
    return tn__op_require_shape(call, "log_sum", &info, work->heads, work->tokens,
                                "one for each head and row of qkv");
}

/* ---- leases -------------------------------------------------------------------------------- */

static tn_status lease(tn__op_call *call, tn_tensor tensor, tn_access access, void **out) {
    tn_plane_view view;
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, access, &view));
    *out = view.data;
    return TN_OK;
}

static tn_status lease_read(tn__op_call *call, tn_tensor tensor, const void **out) {
    void *data;
    TN_TRY(lease(call, tensor, TN_READ, &data));
    *out = data;
    return TN_OK;
}

/* ---- forward ------------------------------------------------------------------------------- */

static tn_status check_forward(tn__op_call *call, const tn_attention_forward_args *args,
                               tn__attention_work *work) {
    const shape s = {args->heads, args->heads_kv, args->sequence, args->is_causal, args->scale};
    tn_tensor_info qkv;
    TN_TRY(check_shape(call, &s, args->qkv, &qkv, work));
    TN_TRY(check_like_y(call, "y", args->y, work));
    return tn__is_no_tensor(args->log_sum) ? TN_OK : check_log_sum(call, args->log_sum, work);
}

static tn_status lease_forward(tn__op_call *call, const tn_attention_forward_args *args,
                               tn__attention_work *work) {
    void *log_sum = NULL;
    TN_TRY(lease_read(call, args->qkv, &work->qkv));
    TN_TRY(lease(call, args->y, TN_WRITE, &work->y));
    if (!tn__is_no_tensor(args->log_sum)) TN_TRY(lease(call, args->log_sum, TN_WRITE, &log_sum));
    work->log_sum = log_sum;
    return TN_OK;
}

tn_status tn_attention_forward(const tn_attention_forward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_attention_forward", stream);
    tn__attention_work work = {.qkv = NULL};
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_forward(&call, args, &work));
    tn_status status = lease_forward(&call, args, &work);
    if (status == TN_OK && work.tokens > 0) status = TN__OP_RUN(&call, attention, &work);
    return tn__op_finish(&call, status);
}

/* ---- backward ------------------------------------------------------------------------------ */

static tn_status check_backward(tn__op_call *call, const tn_attention_backward_args *args,
                                tn__attention_work *work) {
    const shape s = {args->heads, args->heads_kv, args->sequence, args->is_causal, args->scale};
    tn_tensor_info qkv;
    TN_TRY(check_shape(call, &s, args->qkv, &qkv, work));
    TN_TRY(check_like_y(call, "dy", args->dy, work));
    TN_TRY(check_like_y(call, "y", args->y, work));
    TN_TRY(check_log_sum(call, args->log_sum, work));
    return check_rows(call, "dqkv", args->dqkv, work, qkv.cols, "the shape of qkv");
}

static tn_status lease_backward(tn__op_call *call, const tn_attention_backward_args *args,
                                tn__attention_work *work) {
    const size_t bytes = (size_t)(work->heads * work->tokens) * sizeof(float);
    void *y, *log_sum, *dots = NULL;
    TN_TRY(lease_read(call, args->qkv, &work->qkv));
    TN_TRY(lease_read(call, args->dy, &work->dy));
    TN_TRY(lease(call, args->y, TN_READ, &y));
    TN_TRY(lease(call, args->log_sum, TN_READ, &log_sum));
    TN_TRY(lease(call, args->dqkv, TN_WRITE, &work->dqkv));
    TN_TRY(tn__op_scratch_bytes(call, args->scope, bytes, &dots));
    work->y = y, work->log_sum = log_sum, work->dots = dots;
    return TN_OK;
}

tn_status tn_attention_backward(const tn_attention_backward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_attention_backward", stream);
    tn__attention_work work = {.qkv = NULL};
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_backward(&call, args, &work));
    tn_status status = lease_backward(&call, args, &work);
    if (status == TN_OK && work.tokens > 0) status = TN__OP_RUN(&call, attention_gradient, &work);
    return tn__op_finish(&call, status);
}
