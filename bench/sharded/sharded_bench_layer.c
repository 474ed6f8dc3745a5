/* A layer of the stack, forward and backward: see sharded_bench.h for its formulas.
 *
 * Alive between the calls, for T tokens:
 *
 *     saved      sum_1, sum_2, qkv; mixed where backward reads it; what the layers save
 *     scratch    the value, or its gradient, that goes from one sub-step to the next
 */
#include "sharded_bench.h"
#include "tenure_attention.h"

static const int activation_is_gated = 1;

static tn_layer_common common_of(const sharded_job *job) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = job->scratch;
    common.saved_scope = job->saved;
    return common;
}

static tn_layer_weight weight_of(const sharded_job *job, int unit, sharded_part part) {
    tn_layer_weight weight = TN_LAYER_WEIGHT_INIT;
    weight.weight = tn_sharded_weight(job->model, job->units[unit], part);
    return weight;
}

static tn_layer_gradient gradient_of(const sharded_job *job, int unit, sharded_part part) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = tn_sharded_gradient(job->model, job->units[unit], part);
    gradient.accumulate = tn_sharded_accumulates(job->model, job->units[unit]);
    return gradient;
}

static tn_status make(const sharded_job *job, tn_scope scope, int64_t cols, const char *name,
                      tn_tensor *out) {
    return sharded_make(scope, TN_BF16, job->shape->tokens, cols, name, out);
}

/* ---- norms ----------------------------------------------------------------------------------- */

/* Of x + residual, which goes to *sum; of x alone in the first layer. */
static tn_status norm_of(const sharded_pass *pass, int unit, sharded_part part, tn_tensor *sum,
                         tn_layer_norm *norm) {
    const sharded_job *job = pass->job;
    norm->x = pass->x;
    norm->gamma = tn_sharded_weight(job->model, job->units[unit], part);
    if (pass->residual.value == 0) return TN_OK;
    SHARDED_TRY(make(job, job->saved, job->shape->hidden, "sum", sum));
    norm->residual = pass->residual;
    norm->sum = *sum;
    return TN_OK;
}

/* The sum is the residual from now on, and x ends. */
static tn_status advance(sharded_pass *pass, tn_tensor sum) {
    if (sum.value == 0) {
        pass->residual = pass->x;
        return TN_OK;
    }
    pass->residual = sum;
    return sharded_drop(pass->job, &pass->x);
}

static tn_layer_norm_gradient norm_gradient_of(const sharded_pass *pass, int unit,
                                               sharded_part part, tn_tensor sum, tn_tensor dx) {
    const sharded_job *job = pass->job;
    tn_layer_norm_gradient gradient = TN_LAYER_NORM_GRADIENT_INIT;
    gradient.x = sum.value ? sum : job->x[pass->micro_batch];
    gradient.gamma = tn_sharded_weight(job->model, job->units[unit], part);
    if (dx.value) gradient.added = pass->gradient;
    gradient.dx = dx;
    gradient.dgamma = tn_sharded_gradient(job->model, job->units[unit], part);
    gradient.accumulate = tn_sharded_accumulates(job->model, job->units[unit]);
    return gradient;
}

/* dx takes the place of the gradient that has come so far, unless that is the job's. */
static tn_status retreat(sharded_pass *pass, tn_tensor *sum, tn_tensor dx) {
    const int is_first = pass->gradient.value == pass->job->dy[pass->micro_batch].value;
    if (sum->value) SHARDED_TRY(sharded_drop(pass->job, sum));
    if (!is_first) SHARDED_TRY(sharded_drop(pass->job, &pass->gradient));
    pass->gradient = dx;
    return TN_OK;
}

/* ---- what mixes ------------------------------------------------------------------------------ */

static tn_status attend(const sharded_job *job, sharded_layer *l) {
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    const sharded_shape *shape = job->shape;
    SHARDED_TRY(
        sharded_make(job->saved, TN_FP32, shape->heads, shape->tokens, "log sum", &l->log_sum));
    args.qkv = l->qkv, args.y = l->mixed, args.log_sum = l->log_sum;
    args.heads = shape->heads, args.heads_kv = shape->heads / 2;
    args.sequence = shape->sequence;
    args.is_causal = 1;
    return tn_attention_forward(&args, job->place->stream);
}

static tn_status attend_backward(const sharded_job *job, sharded_layer *l, tn_tensor dy,
                                 tn_tensor dqkv) {
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    const sharded_shape *shape = job->shape;
    args.dy = dy, args.qkv = l->qkv, args.y = l->mixed, args.log_sum = l->log_sum;
    args.dqkv = dqkv;
    args.heads = shape->heads, args.heads_kv = shape->heads / 2;
    args.sequence = shape->sequence;
    args.is_causal = 1;
    args.scope = job->scratch;
    SHARDED_TRY(tn_attention_backward(&args, job->place->stream));
    return sharded_drop(job, &l->log_sum);
}

static tn_status mix(const sharded_job *job, sharded_layer *l) {
    tn_activation_args args = TN_ACTIVATION_ARGS_INIT;
    SHARDED_TRY(make(job, job->saved, job->shape->hidden, "mixed", &l->mixed));
    if (job->shape->sequence) return attend(job, l);
    args.activation = TN_ACTIVATION_SILU;
    args.gated = activation_is_gated;
    args.x = l->qkv, args.y = l->mixed;
    return tn_activation_forward(&args, job->place->stream);
}

static tn_status mix_backward(const sharded_job *job, sharded_layer *l, tn_tensor dy,
                              tn_tensor *dqkv) {
    tn_activation_backward_args args = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    SHARDED_TRY(make(job, job->scratch, 2 * job->shape->hidden, "gradient", dqkv));
    if (job->shape->sequence) return attend_backward(job, l, dy, *dqkv);
    args.activation = TN_ACTIVATION_SILU;
    args.gated = activation_is_gated;
    args.dy = dy, args.x = l->qkv, args.dx = *dqkv;
    args.scope = job->scratch;
    return tn_activation_backward(&args, job->place->stream);
}

/* ---- forward --------------------------------------------------------------------------------- */

static tn_status forward_qkv(sharded_pass *pass, int unit, sharded_layer *l) {
    sharded_job *job = pass->job;
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    SHARDED_TRY(make(job, job->saved, 2 * job->shape->hidden, "qkv", &l->qkv));
    SHARDED_TRY(norm_of(pass, unit, SHARDED_GAIN_1, &l->sum_1, &args.norm));
    args.w = weight_of(job, unit, SHARDED_QKV);
    args.y = l->qkv;
    args.common = common_of(job);
    SHARDED_TRY(tn_norm_linear_forward(&args, &l->qkv_saved, job->place->stream));
    return advance(pass, l->sum_1);
}

/* The value goes to pass->x. What was multiplied ends if a quantized copy of it is saved. */
static tn_status forward_projection(sharded_pass *pass, int unit, sharded_layer *l) {
    const sharded_job *job = pass->job;
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    SHARDED_TRY(make(job, job->scratch, job->shape->hidden, "projected", &args.y));
    args.x = l->mixed;
    args.w = weight_of(job, unit, SHARDED_PROJECTION);
    args.common = common_of(job);
    SHARDED_TRY(tn_linear_forward(&args, &l->projection_saved, job->place->stream));
    pass->x = args.y;
    const int is_read_again = job->shape->sequence || !job->shape->is_fp8;
    return is_read_again ? TN_OK : sharded_drop(job, &l->mixed);
}

static tn_status forward_mlp(sharded_pass *pass, int unit, sharded_layer *l) {
    const sharded_job *job = pass->job;
    tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
    SHARDED_TRY(norm_of(pass, unit, SHARDED_GAIN_2, &l->sum_2, &args.norm));
    SHARDED_TRY(make(job, job->scratch, job->shape->hidden, "added", &args.y));
    args.activation = TN_ACTIVATION_SILU;
    args.gated = activation_is_gated;
    args.w1 = weight_of(job, unit, SHARDED_UP);
    args.w2 = weight_of(job, unit, SHARDED_DOWN);
    args.common = common_of(job);
    SHARDED_TRY(tn_norm_mlp_forward(&args, &l->mlp_saved, job->place->stream));
    SHARDED_TRY(advance(pass, l->sum_2));
    pass->x = args.y;
    return TN_OK;
}

tn_status sharded_layer_forward(sharded_pass *pass, int layer, int unit) {
    sharded_layer *l = &pass->job->layers[layer];
    SHARDED_TRY(forward_qkv(pass, unit, l));
    SHARDED_TRY(mix(pass->job, l));
    SHARDED_TRY(forward_projection(pass, unit, l));
    return forward_mlp(pass, unit, l);
}

/* ---- backward -------------------------------------------------------------------------------- */

static tn_status backward_mlp(sharded_pass *pass, int unit, sharded_layer *l) {
    const sharded_job *job = pass->job;
    tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    SHARDED_TRY(make(job, job->scratch, job->shape->hidden, "gradient", &dx));
    args.dy = pass->gradient;
    args.activation = TN_ACTIVATION_SILU;
    args.gated = activation_is_gated;
    args.w1 = weight_of(job, unit, SHARDED_UP);
    args.w2 = weight_of(job, unit, SHARDED_DOWN);
    args.norm = norm_gradient_of(pass, unit, SHARDED_GAIN_2, l->sum_2, dx);
    args.gradient1 = gradient_of(job, unit, SHARDED_UP);
    args.gradient2 = gradient_of(job, unit, SHARDED_DOWN);
    args.common = common_of(job);
    SHARDED_TRY(tn_norm_mlp_backward(&args, &l->mlp_saved, NULL, job->place->stream));
    return retreat(pass, &l->sum_2, dx);
}

static tn_status backward_projection(const sharded_pass *pass, int unit, sharded_layer *l,
                                     tn_tensor *dx) {
    const sharded_job *job = pass->job;
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    SHARDED_TRY(make(job, job->scratch, job->shape->hidden, "gradient", dx));
    args.dy = pass->gradient;
    args.w = weight_of(job, unit, SHARDED_PROJECTION);
    args.x = l->mixed;
    args.dx = *dx;
    args.gradient = gradient_of(job, unit, SHARDED_PROJECTION);
    args.common = common_of(job);
    return tn_linear_backward(&args, &l->projection_saved, NULL, job->place->stream);
}

/* Of the input no gradient is wanted. */
static tn_status backward_qkv(sharded_pass *pass, int unit, tn_tensor dqkv, sharded_layer *l) {
    const sharded_job *job = pass->job;
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    if (l->sum_1.value) SHARDED_TRY(make(job, job->scratch, job->shape->hidden, "gradient", &dx));
    args.dy = dqkv;
    args.w = weight_of(job, unit, SHARDED_QKV);
    args.norm = norm_gradient_of(pass, unit, SHARDED_GAIN_1, l->sum_1, dx);
    args.gradient = gradient_of(job, unit, SHARDED_QKV);
    args.common = common_of(job);
    SHARDED_TRY(tn_norm_linear_backward(&args, &l->qkv_saved, NULL, job->place->stream));
    return retreat(pass, &l->sum_1, dx);
}

tn_status sharded_layer_backward(sharded_pass *pass, int layer, int unit) {
    sharded_job *job = pass->job;
    sharded_layer *l = &job->layers[layer];
    tn_tensor dmixed = {0}, dqkv = {0};
    SHARDED_TRY(backward_mlp(pass, unit, l));
    SHARDED_TRY(backward_projection(pass, unit, l, &dmixed));
    SHARDED_TRY(mix_backward(job, l, dmixed, &dqkv));
    SHARDED_TRY(sharded_drop(job, &dmixed));
    SHARDED_TRY(sharded_drop(job, &l->qkv));
    if (l->mixed.value) SHARDED_TRY(sharded_drop(job, &l->mixed));
    SHARDED_TRY(backward_qkv(pass, unit, dqkv, l));
    return sharded_drop(job, &dqkv);
}
