/* One layer of the trainer's transformer: see trainer_block.h.
 *
 * What is alive between the sub-steps (T tokens; a: bytes of an activation's element):
 *
 *     forward, saved        T hidden a  sum_1, sum_2, attended     3 T hidden a  qkv
 *                           4 T heads   log_sum                    and what the layers save
 *     forward, scratch      T hidden a  x
 *     backward              each of these is freed after its last use; one gradient runs along
 */
#include "trainer_block.h"

#include "tenure_attention.h"

static tn_layer_common common_of(const trainer_pass *pass) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = pass->scratch;
    if (pass->is_training) common.saved_scope = pass->saved;
    common.recompute = pass->model->shape.recompute;
    return common;
}

static const trainer_parameter *part_of(const trainer_pass *pass, int layer, trainer_part part) {
    return trainer_model_part(pass->model, layer, part);
}

/* A pass over held-out text leaves no amaxes. */
static tn_layer_scale scale_of(const trainer_pass *pass, const trainer_parameter *parameter,
                               int which) {
    tn_layer_scale scale = TN_LAYER_SCALE_INIT;
    scale.scale = pass->model->scale;
    if (pass->is_training) scale.amax_history = pass->model->amax_history;
    scale.slot = parameter->slot + which;
    return scale;
}

static tn_layer_weight weight_of(const trainer_pass *pass, const trainer_parameter *parameter) {
    tn_layer_weight weight = TN_LAYER_WEIGHT_INIT;
    const int is_outer = parameter < pass->model->parameters + TRAINER_OUTER_COUNT;
    weight.weight = parameter->value;
    if (is_outer || !pass->model->scale.value) return weight;
    weight.x_scale = scale_of(pass, parameter, TRAINER_SLOT_X);
    weight.dy_scale = scale_of(pass, parameter, TRAINER_SLOT_DY);
    return weight;
}

static tn_layer_gradient gradient_of(const trainer_pass *pass, const trainer_parameter *parameter) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = parameter->gradient;
    gradient.accumulate = pass->accumulates;
    return gradient;
}

/* ---- norms ---------------------------------------------------------------------------------- */

/* x + residual is made in `sum`, and x ends; so does a residual that nobody has saved. */
static tn_layer_norm norm_of(const trainer_pass *pass, const trainer_parameter *gain,
                             tn_tensor sum) {
    tn_layer_norm norm = TN_LAYER_NORM_INIT;
    norm.norm = TN_NORM_RMS;
    norm.x = pass->x;
    norm.residual = pass->residual;
    norm.sum = sum;
    norm.gamma = gain->value;
    return norm;
}

static tn_status make_sum(const trainer_pass *pass, const char *name, tn_tensor *sum) {
    return trainer_pass_make(pass, pass->is_training ? pass->saved : pass->scratch,
                             pass->model->shape.hidden, name, sum);
}

/* The norm has read x and the residual: what it normalized is the residual from now on. A pass that
 * saves nothing frees the one before. */
static tn_status advance(trainer_pass *pass, tn_tensor sum) {
    const int is_saved = pass->is_training && !pass->is_first_sum;
    TRAINER_TRY(trainer_pass_drop(pass, &pass->x));
    if (!is_saved) TRAINER_TRY(trainer_pass_drop(pass, &pass->residual));
    pass->residual = sum;
    pass->is_first_sum = 0;
    return TN_OK;
}

static tn_layer_norm_gradient norm_gradient_of(const trainer_pass *pass,
                                               const trainer_parameter *gain, tn_tensor sum,
                                               tn_tensor dx) {
    tn_layer_norm_gradient gradient = TN_LAYER_NORM_GRADIENT_INIT;
    gradient.norm = TN_NORM_RMS;
    gradient.x = sum;
    gradient.gamma = gain->value;
    gradient.added = pass->gradient;
    gradient.dx = dx;
    gradient.dgamma = gain->gradient;
    gradient.accumulate = pass->accumulates;
    return gradient;
}

/* dx takes the place of the gradient that has come so far. */
static tn_status retreat(trainer_pass *pass, tn_tensor *sum, tn_tensor dx) {
    TRAINER_TRY(trainer_pass_drop(pass, sum));
    if (pass->gradient.value) TRAINER_TRY(trainer_pass_drop(pass, &pass->gradient));
    pass->gradient = dx;
    return TN_OK;
}

/* ---- norm and product: queries, keys, values; the head --------------------------------------- */

tn_status trainer_product_forward(trainer_pass *pass, const trainer_parameter *gain,
                                  const trainer_parameter *weight, tn_tensor y, tn_tensor *sum,
                                  tn_norm_linear_saved *saved) {
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    TRAINER_TRY(make_sum(pass, "sum", sum));
    args.norm = norm_of(pass, gain, *sum);
    args.w = weight_of(pass, weight);
    args.y = y;
    args.common = common_of(pass);
    TRAINER_TRY(tn_norm_linear_forward(&args, saved, pass->model->stream));
    return advance(pass, *sum);
}

tn_status trainer_product_backward(trainer_pass *pass, const trainer_parameter *gain,
                                   const trainer_parameter *weight, tn_tensor dy, tn_tensor *sum,
                                   tn_norm_linear_saved *saved) {
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, pass->model->shape.hidden, "gradient", &dx));
    args.dy = dy;
    args.w = weight_of(pass, weight);
    args.norm = norm_gradient_of(pass, gain, *sum, dx);
    args.gradient = gradient_of(pass, weight);
    args.common = common_of(pass);
    TRAINER_TRY(tn_norm_linear_backward(&args, saved, NULL, pass->model->stream));
    return retreat(pass, sum, dx);
}

/* ---- attention ------------------------------------------------------------------------------ */

static tn_status attend_forward(const trainer_pass *pass, trainer_block *block) {
    const trainer_shape *shape = &pass->model->shape;
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    TRAINER_TRY(trainer_pass_make(pass, pass->saved, shape->hidden, "attended", &block->attended));
    if (pass->is_training) {
        TRAINER_TRY(trainer_make(pass->saved, TN_FP32, shape->heads, trainer_model_tokens(shape),
                                 "log sum", &block->log_sum));
    }
    args.qkv = block->qkv;
    args.y = block->attended;
    args.log_sum = block->log_sum;
    args.heads = shape->heads;
    args.sequence = shape->sequence;
    args.is_causal = 1;
    return tn_attention_forward(&args, pass->model->stream);
}

static tn_status attend_backward(const trainer_pass *pass, trainer_block *block, tn_tensor dy,
                                 tn_tensor dqkv) {
    const trainer_shape *shape = &pass->model->shape;
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    args.dy = dy;
    args.qkv = block->qkv;
    args.y = block->attended;
    args.log_sum = block->log_sum;
    args.dqkv = dqkv;
    args.heads = shape->heads;
    args.sequence = shape->sequence;
    args.is_causal = 1;
    args.scope = pass->scratch;
    return tn_attention_backward(&args, pass->model->stream);
}

/* ---- forward -------------------------------------------------------------------------------- */

static tn_status project_forward(trainer_pass *pass, int layer, trainer_block *block) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    tn_tensor y = {0};
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, pass->model->shape.hidden, "projected", &y));
    args.x = block->attended;
    args.w = weight_of(pass, part_of(pass, layer, TRAINER_PROJECTION));
    args.y = y;
    args.common = common_of(pass);
    TRAINER_TRY(tn_linear_forward(&args, &block->projection_saved, pass->model->stream));
    pass->x = y;
    return TN_OK;
}

static tn_status mlp_forward(trainer_pass *pass, int layer, trainer_block *block) {
    tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
    tn_tensor y = {0};
    TRAINER_TRY(make_sum(pass, "sum", &block->sum_2));
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, pass->model->shape.hidden, "added", &y));
    args.norm = norm_of(pass, part_of(pass, layer, TRAINER_GAIN_2), block->sum_2);
    args.activation = TN_ACTIVATION_SILU;
    args.gated = 1;
    args.w1 = weight_of(pass, part_of(pass, layer, TRAINER_UP));
    args.w2 = weight_of(pass, part_of(pass, layer, TRAINER_DOWN));
    args.y = y;
    args.common = common_of(pass);
    TRAINER_TRY(tn_norm_mlp_forward(&args, &block->mlp_saved, pass->model->stream));
    TRAINER_TRY(advance(pass, block->sum_2));
    pass->x = y;
    return TN_OK;
}

/* A pass that saves nothing is done with qkv once it has been attended, and so on. */
static tn_status drop_unsaved(const trainer_pass *pass, tn_tensor *tensor) {
    return pass->is_training ? TN_OK : trainer_pass_drop(pass, tensor);
}

tn_status trainer_block_forward(trainer_pass *pass, int layer) {
    trainer_block *block = &pass->blocks[layer];
    TRAINER_TRY(
        trainer_pass_make(pass, pass->saved, 3 * pass->model->shape.hidden, "qkv", &block->qkv));
    TRAINER_TRY(trainer_product_forward(pass, part_of(pass, layer, TRAINER_GAIN_1),
                                        part_of(pass, layer, TRAINER_QKV), block->qkv,
                                        &block->sum_1, &block->qkv_saved));
    TRAINER_TRY(trainer_pass_note(pass, "forward qkv", layer));
    TRAINER_TRY(attend_forward(pass, block));
    TRAINER_TRY(drop_unsaved(pass, &block->qkv));
    TRAINER_TRY(trainer_pass_note(pass, "forward attention", layer));
    TRAINER_TRY(project_forward(pass, layer, block));
    TRAINER_TRY(drop_unsaved(pass, &block->attended));
    TRAINER_TRY(trainer_pass_note(pass, "forward projection", layer));
    TRAINER_TRY(mlp_forward(pass, layer, block));
    return trainer_pass_note(pass, "forward mlp", layer);
}

/* ---- backward ------------------------------------------------------------------------------- */

static tn_status mlp_backward(trainer_pass *pass, int layer, trainer_block *block) {
    const trainer_parameter *up = part_of(pass, layer, TRAINER_UP);
    const trainer_parameter *down = part_of(pass, layer, TRAINER_DOWN);
    tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, pass->model->shape.hidden, "gradient", &dx));
    args.dy = pass->gradient;
    args.activation = TN_ACTIVATION_SILU;
    args.gated = 1;
    args.w1 = weight_of(pass, up);
    args.w2 = weight_of(pass, down);
    args.norm = norm_gradient_of(pass, part_of(pass, layer, TRAINER_GAIN_2), block->sum_2, dx);
    args.gradient1 = gradient_of(pass, up);
    args.gradient2 = gradient_of(pass, down);
    args.common = common_of(pass);
    TRAINER_TRY(tn_norm_mlp_backward(&args, &block->mlp_saved, NULL, pass->model->stream));
    return retreat(pass, &block->sum_2, dx);
}

static tn_status project_backward(trainer_pass *pass, int layer, trainer_block *block,
                                  tn_tensor dx) {
    const trainer_parameter *projection = part_of(pass, layer, TRAINER_PROJECTION);
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = pass->gradient;
    args.w = weight_of(pass, projection);
    args.x = block->attended;
    args.dx = dx;
    args.gradient = gradient_of(pass, projection);
    args.common = common_of(pass);
    return tn_linear_backward(&args, &block->projection_saved, NULL, pass->model->stream);
}

tn_status trainer_block_backward(trainer_pass *pass, int layer) {
    const int64_t hidden = pass->model->shape.hidden;
    trainer_block *block = &pass->blocks[layer];
    tn_tensor dattended = {0}, dqkv = {0};
    TRAINER_TRY(mlp_backward(pass, layer, block));
    TRAINER_TRY(trainer_pass_note(pass, "backward mlp", layer));
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, hidden, "gradient", &dattended));
    TRAINER_TRY(project_backward(pass, layer, block, dattended));
    TRAINER_TRY(trainer_pass_note(pass, "backward projection", layer));
    TRAINER_TRY(trainer_pass_make(pass, pass->scratch, 3 * hidden, "gradient", &dqkv));
    TRAINER_TRY(attend_backward(pass, block, dattended, dqkv));
    TRAINER_TRY(trainer_pass_drop(pass, &dattended));
    TRAINER_TRY(trainer_pass_drop(pass, &block->qkv));
    TRAINER_TRY(trainer_pass_drop(pass, &block->attended));
    TRAINER_TRY(trainer_pass_drop(pass, &block->log_sum));
    TRAINER_TRY(trainer_pass_note(pass, "backward attention", layer));
    TRAINER_TRY(trainer_product_backward(pass, part_of(pass, layer, TRAINER_GAIN_1),
                                         part_of(pass, layer, TRAINER_QKV), dqkv, &block->sum_1,
                                         &block->qkv_saved));
    TRAINER_TRY(trainer_pass_drop(pass, &dqkv));
    return trainer_pass_note(pass, "backward qkv", layer);
}
