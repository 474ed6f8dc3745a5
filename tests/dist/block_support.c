/* The layer of the sharded models' tests: see block_support.h. */
#include "block_support.h"

#include "tenure_attention.h"
#include "test_support.h"

const char *block_part_name(int part) {
    static const char *const names[BLOCK_PARTS] = {"gain 1", "qkv", "projection",
                                                   "gain 2", "up",  "down"};
    return names[part];
}

int block_part_is_product(int part) { return part != BLOCK_GAIN_1 && part != BLOCK_GAIN_2; }

int64_t block_part_rows(const block_shape *shape, int part) {
    switch (part) {
    case BLOCK_QKV: return 3 * shape->hidden;
    case BLOCK_UP: return shape->ffn;
    case BLOCK_PROJECTION:
    case BLOCK_DOWN: return shape->hidden;
    default: return 1;
    }
}

int64_t block_part_cols(const block_shape *shape, int part) {
    return part == BLOCK_DOWN ? shape->ffn : shape->hidden;
}

static tn_tensor make(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                      const char *name) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    config.name = name;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

tn_tensor block_tensor(const block_run *run, tn_scope scope, int64_t cols, const char *name) {
    return make(scope, TN_BF16, run->shape->tokens, cols, name);
}

static void end(const block_run *run, tn_tensor *tensor) {
    EXPECT_OK(tn_tensor_destroy(*tensor, run->stream));
    *tensor = (tn_tensor){0};
}

static tn_layer_common common_of(const block_run *run, const block *b) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = run->scratch;
    common.saved_scope = b->saved;
    return common;
}

static tn_layer_weight weight_of(const block_weights *weights, int part) {
    tn_layer_weight weight = TN_LAYER_WEIGHT_INIT;
    weight.weight = weights->weight[part];
    weight.source = weights->source[part];
    return weight;
}

static tn_layer_gradient gradient_of(const block_weights *weights, int part) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = weights->gradient[part];
    gradient.accumulate = weights->accumulate;
    return gradient;
}

/* ---- forward --------------------------------------------------------------------------------- */

static void attend(const block_run *run, block *b) {
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    b->attended = block_tensor(run, b->saved, run->shape->hidden, "attended");
    b->log_sum = make(b->saved, TN_FP32, run->shape->heads, run->shape->tokens, "log sum");
    args.qkv = b->qkv, args.y = b->attended, args.log_sum = b->log_sum;
    args.heads = run->shape->heads;
    args.sequence = run->shape->sequence;
    args.is_causal = 1;
    EXPECT_OK(tn_attention_forward(&args, run->stream));
}

static void forward_qkv(const block_run *run, const block_weights *weights, block *b) {
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    b->qkv = block_tensor(run, b->saved, 3 * run->shape->hidden, "qkv");
    args.norm.x = b->x, args.norm.gamma = weights->weight[BLOCK_GAIN_1];
    args.w = weight_of(weights, BLOCK_QKV);
    args.y = b->qkv;
    args.common = common_of(run, b);
    EXPECT_OK(tn_norm_linear_forward(&args, &b->qkv_saved, run->stream));
}

static tn_tensor forward_projection(const block_run *run, const block_weights *weights, block *b) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = b->attended;
    args.w = weight_of(weights, BLOCK_PROJECTION);
    args.y = block_tensor(run, run->scratch, run->shape->hidden, "projected");
    args.common = common_of(run, b);
    EXPECT_OK(tn_linear_forward(&args, &b->projection_saved, run->stream));
    return args.y;
}

static tn_tensor forward_mlp(const block_run *run, const block_weights *weights,
                             tn_tensor projected, block *b) {
    tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
    b->sum = block_tensor(run, b->saved, run->shape->hidden, "sum");
    args.norm.x = projected, args.norm.residual = b->x, args.norm.sum = b->sum;
    args.norm.gamma = weights->weight[BLOCK_GAIN_2];
    args.w1 = weight_of(weights, BLOCK_UP), args.w2 = weight_of(weights, BLOCK_DOWN);
    args.y = block_tensor(run, run->scratch, run->shape->hidden, "value");
    args.common = common_of(run, b);
    EXPECT_OK(tn_norm_mlp_forward(&args, &b->mlp_saved, run->stream));
    end(run, &projected);
    return args.y;
}

tn_tensor block_attention_forward(const block_run *run, const block_weights *weights, block *b) {
    forward_qkv(run, weights, b);
    attend(run, b);
    return forward_projection(run, weights, b);
}

static tn_tensor forward_from_x(const block_run *run, const block_weights *weights, block *b) {
    tn_axpy_args add = TN_AXPY_ARGS_INIT;
    add.y = forward_mlp(run, weights, block_attention_forward(run, weights, b), b);
    add.x = b->sum;
    EXPECT_OK(tn_axpy(&add, run->stream));
    return add.y;
}

tn_tensor block_forward(const block_run *run, const block_weights *weights, tn_scope parent,
                        tn_tensor x, block *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    *out = (block){.x = x};
    config.parent = parent;
    config.kind = TN_SCOPE_SAVED;
    EXPECT_OK(tn_scope_create(&config, &out->saved));
    EXPECT_OK(tn_tensor_move(x, out->saved));
    return forward_from_x(run, weights, out);
}

static void end_if_there(const block_run *run, tn_tensor *tensor) {
    if (tensor->value) end(run, tensor);
}

void block_drop(const block_run *run, block *b) {
    end(run, &b->qkv);
    end(run, &b->attended);
    end(run, &b->log_sum);
    end(run, &b->sum);
    end_if_there(run, &b->qkv_saved.rstd);
    end_if_there(run, &b->qkv_saved.normed);
    end_if_there(run, &b->projection_saved.x);
    end_if_there(run, &b->mlp_saved.rstd);
    end_if_there(run, &b->mlp_saved.normed);
    end_if_there(run, &b->mlp_saved.hidden);
    end_if_there(run, &b->mlp_saved.activated);
}

void block_recompute(const block_run *run, const block_weights *weights, block *b) {
    tn_tensor value = forward_from_x(run, weights, b);
    end(run, &value);
}

/* ---- what is saved --------------------------------------------------------------------------- */

static size_t up_to(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* The operand of a weight's gradient: COL of blocks, or PLAIN. */
static size_t operand_bytes(const block_shape *shape, int64_t cols, int is_fp8) {
    const size_t m = (size_t)shape->tokens, k = (size_t)cols;
    return is_fp8 ? m * k + up_to(m, 128) / 128 * up_to(k, 4) * sizeof(float) : m * k * 2;
}

size_t block_saved_bytes(const block_shape *shape, int is_fp8, unsigned frozen) {
    const size_t tokens = (size_t)shape->tokens, hidden = (size_t)shape->hidden;
    const size_t value = tokens * hidden * 2;
    size_t bytes = value * (1 + 3 + 1 + 1); /* x, qkv, attended, sum */
    bytes += tokens * (size_t)shape->heads * sizeof(float) + 2 * tokens * sizeof(float);
    bytes += tokens * (size_t)shape->ffn * 2; /* hidden */
    if (!(frozen >> BLOCK_QKV & 1u)) bytes += operand_bytes(shape, shape->hidden, is_fp8);
    if (!(frozen >> BLOCK_PROJECTION & 1u) && is_fp8)
        bytes += operand_bytes(shape, shape->hidden, 1);
    if (!(frozen >> BLOCK_UP & 1u)) bytes += operand_bytes(shape, shape->hidden, is_fp8);
    if (!(frozen >> BLOCK_DOWN & 1u)) bytes += operand_bytes(shape, shape->ffn, is_fp8);
    return bytes;
}

/* ---- backward -------------------------------------------------------------------------------- */

static tn_layer_norm_gradient norm_of(const block_weights *weights, int part, tn_tensor x,
                                      tn_tensor added, tn_tensor dx) {
    tn_layer_norm_gradient norm = TN_LAYER_NORM_GRADIENT_INIT;
    norm.x = x;
    norm.gamma = weights->weight[part];
    norm.added = added;
    norm.dx = dx;
    norm.dgamma = weights->gradient[part];
    norm.accumulate = weights->accumulate;
    return norm;
}

static tn_tensor backward_mlp(const block_run *run, const block_weights *weights, tn_tensor dy,
                              block *b) {
    tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
    tn_tensor dsum = block_tensor(run, run->scratch, run->shape->hidden, "gradient");
    args.dy = dy;
    args.w1 = weight_of(weights, BLOCK_UP), args.w2 = weight_of(weights, BLOCK_DOWN);
    args.norm = norm_of(weights, BLOCK_GAIN_2, b->sum, dy, dsum);
    args.gradient1 = gradient_of(weights, BLOCK_UP);
    args.gradient2 = gradient_of(weights, BLOCK_DOWN);
    args.common = common_of(run, b);
    EXPECT_OK(tn_norm_mlp_backward(&args, &b->mlp_saved, NULL, run->stream));
    end(run, &dy);
    end(run, &b->sum);
    return dsum;
}

static tn_tensor backward_projection(const block_run *run, const block_weights *weights,
                                     tn_tensor dsum, block *b) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dsum;
    args.w = weight_of(weights, BLOCK_PROJECTION);
    args.x = b->attended;
    args.dx = block_tensor(run, run->scratch, run->shape->hidden, "gradient");
    args.gradient = gradient_of(weights, BLOCK_PROJECTION);
    args.common = common_of(run, b);
    EXPECT_OK(tn_linear_backward(&args, &b->projection_saved, NULL, run->stream));
    return args.dx;
}

static tn_tensor backward_attention(const block_run *run, tn_tensor dattended, block *b) {
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    args.dy = dattended;
    args.qkv = b->qkv, args.y = b->attended, args.log_sum = b->log_sum;
    args.dqkv = block_tensor(run, run->scratch, 3 * run->shape->hidden, "gradient");
    args.heads = run->shape->heads;
    args.sequence = run->shape->sequence;
    args.is_causal = 1;
    args.scope = run->scratch;
    EXPECT_OK(tn_attention_backward(&args, run->stream));
    end(run, &dattended);
    end(run, &b->qkv);
    end(run, &b->attended);
    end(run, &b->log_sum);
    return args.dqkv;
}

tn_tensor block_attention_backward(const block_run *run, const block_weights *weights,
                                   tn_tensor dsum, int wants_dx, block *b) {
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_tensor dx = {0};
    tn_tensor dqkv = backward_attention(run, backward_projection(run, weights, dsum, b), b);
    if (wants_dx) dx = block_tensor(run, run->scratch, run->shape->hidden, "gradient");
    args.dy = dqkv;
    args.w = weight_of(weights, BLOCK_QKV);
    args.norm = norm_of(weights, BLOCK_GAIN_1, b->x, wants_dx ? dsum : (tn_tensor){0}, dx);
    args.gradient = gradient_of(weights, BLOCK_QKV);
    args.common = common_of(run, b);
    EXPECT_OK(tn_norm_linear_backward(&args, &b->qkv_saved, NULL, run->stream));
    end(run, &dqkv);
    end(run, &dsum);
    return dx;
}

tn_tensor block_backward(const block_run *run, const block_weights *weights, tn_tensor dy,
                         int wants_dx, block *b) {
    tn_tensor dsum = backward_mlp(run, weights, dy, b);
    tn_tensor dx = block_attention_backward(run, weights, dsum, wants_dx, b);
    EXPECT_OK(tn_scope_close(b->saved));
    return dx;
}
