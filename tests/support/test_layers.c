/* The layers with their tensors: see test_layers.h. */
#include "test_layers.h"

#include <stdlib.h>
#include <string.h>

/* ---- tensors --------------------------------------------------------------------------------- */

int test_layer_products(const test_layer *layer) {
    return layer->config.kind == TEST_NORM_MLP ? 2 : 1;
}

void test_layer_shape(const test_layer_config *config, int product, int64_t *rows, int64_t *cols) {
    *rows = LAYER_N, *cols = LAYER_K;
    if (config->kind != TEST_NORM_MLP) return;
    if (product == 0) *rows = config->gated ? 2 * LAYER_F : LAYER_F;
    if (product == 1) *cols = LAYER_F;
}

/* In about [-1, 1), from a fixed sequence. */
static float value_of(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*seed >> 32) * 0x1p-31f;
}

static tn_tensor filled(const test_layer *layer, tn_scope scope, tn_dtype dtype, int64_t rows,
                        int64_t cols, uint64_t seed) {
    tn_tensor tensor = test_plain(scope, dtype, rows, cols);
    const size_t count = (size_t)(rows * cols);
    if (layer->config.has_no_values) {
        test_declare_valid(&layer->ops, tensor, TN_PLANE_DATA);
        return tensor;
    }
    float *values = calloc(count, sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; seed && i < count; i++) {
        float value = value_of(&seed);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (dtype == TN_FP32)
            values[i] = value;
        else
            ((uint16_t *)values)[i] = (uint16_t)(bits >> 16);
    }
    test_write(&layer->ops, tensor, values);
    free(values);
    return tensor;
}

static void make_weight(test_layer *l, int product) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    const uint64_t seed = 100 + (uint64_t)product;
    int64_t rows, cols;
    test_layer_shape(&l->config, product, &rows, &cols);
    l->source[product] = filled(l, l->model, l->config.dtype, rows, cols, seed);
    config.format = l->config.format[product];
    config.dtype = config.format == TN_FORMAT_PLAIN ? l->config.dtype : TN_E4M3;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    config.frozen = (l->config.frozen >> product & 1u) != 0;
    config.policy = l->config.policy;
    config.name = product ? "second weight" : "first weight";
    EXPECT_OK(tn_tensor_create(l->model, &config, &l->weight[product]));
    if (config.format == TN_FORMAT_PLAIN) {
        tn_convert_args convert = TN_CONVERT_ARGS_INIT;
        convert.x = l->source[product], convert.y = l->weight[product];
        EXPECT_OK(tn_convert(&convert, l->ops.stream));
    } else {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        quantize.src = l->source[product], quantize.dst = l->weight[product];
        EXPECT_OK(tn_quantize(&quantize, l->ops.stream));
    }
    l->bias[product] = filled(l, l->model, TN_FP32, 1, rows, seed + 10);
    l->dbias[product] = filled(l, l->model, TN_FP32, 1, rows, 0);
    if (!config.frozen) l->dweight[product] = filled(l, l->model, TN_FP32, rows, cols, 0);
}

int test_layer_slot(int product, int is_gradient) { return 2 * product + is_gradient; }

int test_layer_is_delayed(const test_layer_config *config, int product) {
    return config->has_scales && config->format[product] == TN_FORMAT_FP8_TENSOR;
}

static void make_scales(test_layer *l) {
    static const float factors[LAYER_SLOTS] = {300.0f, 410.0f, 37.0f, 1000.0f};
    if (!l->config.has_scales) return;
    l->scale = filled(l, l->model, TN_FP32, 1, LAYER_SLOTS, 0);
    l->history = filled(l, l->model, TN_FP32, LAYER_HISTORY, LAYER_SLOTS, 0);
    if (!l->config.has_no_values) test_write(&l->ops, l->scale, factors);
}

static void make_norm(test_layer *l) {
    const tn_dtype dtype = l->config.dtype;
    if (l->config.kind == TEST_LINEAR) return;
    l->gamma = filled(l, l->model, TN_FP32, 1, LAYER_K, 7);
    l->dgamma = filled(l, l->model, TN_FP32, 1, LAYER_K, 0);
    l->added = filled(l, l->io, dtype, LAYER_M, LAYER_K, 8);
    if (l->config.norm == TN_NORM_LAYER) {
        l->beta = filled(l, l->model, TN_FP32, 1, LAYER_K, 9);
        l->dbeta = filled(l, l->model, TN_FP32, 1, LAYER_K, 0);
    }
    if (l->config.has_residual) {
        l->residual = filled(l, l->io, dtype, LAYER_M, LAYER_K, 10);
        l->sum = test_plain(l->io, dtype, LAYER_M, LAYER_K);
    }
    if (l->config.has_normed) l->normed = test_plain(l->io, dtype, LAYER_M, LAYER_K);
}

test_layer test_layer_open(const test_ops *ops, const test_layer_config *config) {
    test_layer l = {.config = *config, .ops = *ops};
    l.model = test_ops_scope(ops, TN_SCOPE_MODEL, "model");
    l.io = test_ops_scope(ops, TN_SCOPE_STEP, "io");
    l.saved_scope = test_ops_scope(ops, TN_SCOPE_SAVED, "saved");
    l.op = test_ops_scope(ops, TN_SCOPE_OP, "op");
    for (int i = 0; i < test_layer_products(&l); i++)
        make_weight(&l, i);
    make_norm(&l);
    make_scales(&l);
    l.x = filled(&l, l.io, config->dtype, LAYER_M, LAYER_K, 1);
    l.dy = filled(&l, l.io, config->dtype, LAYER_M, LAYER_N, 2);
    l.y = test_plain(l.io, config->dtype, LAYER_M, LAYER_N);
    l.dx = test_plain(l.io, config->dtype, LAYER_M, LAYER_K);
    return l;
}

/* ---- arguments ------------------------------------------------------------------------------- */

static tn_layer_weight weight_of(const test_layer *l, int product) {
    tn_layer_weight w = TN_LAYER_WEIGHT_INIT;
    w.weight = l->weight[product];
    w.bias = l->bias[product];
    if (!test_layer_is_delayed(&l->config, product)) return w;
    w.x_scale = (tn_layer_scale){l->scale, l->history, test_layer_slot(product, 0)};
    w.dy_scale = (tn_layer_scale){l->scale, l->history, test_layer_slot(product, 1)};
    return w;
}

/* Backward takes the source for TN_BACKWARD_HIGH_PRECISION. */
static tn_layer_weight back_weight_of(const test_layer *l, int product) {
    tn_layer_weight w = weight_of(l, product);
    if (l->config.format[product] != TN_FORMAT_PLAIN) w.source = l->source[product];
    return w;
}

static tn_layer_gradient gradient_of(const test_layer *l, int product) {
    tn_layer_gradient gradient = TN_LAYER_GRADIENT_INIT;
    gradient.dweight = l->dweight[product];
    gradient.dbias = l->dbias[product];
    gradient.accumulate = 1;
    gradient.delay = l->config.delay && gradient.dweight.value != 0;
    return gradient;
}

static tn_layer_common common_of(const test_layer *l) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = l->op;
    common.saved_scope = l->saved_scope;
    common.precision = l->config.precision;
    common.gradient_dtype = l->config.gradient_dtype;
    common.recompute = l->config.recompute;
    return common;
}

static tn_layer_norm norm_of(const test_layer *l) {
    tn_layer_norm norm = TN_LAYER_NORM_INIT;
    norm.norm = l->config.norm;
    norm.x = l->x, norm.residual = l->residual, norm.sum = l->sum;
    norm.gamma = l->gamma, norm.beta = l->beta;
    norm.gamma_from_one = 1;
    norm.normed = l->normed;
    return norm;
}

static tn_layer_norm_gradient norm_gradient_of(const test_layer *l) {
    tn_layer_norm_gradient norm = TN_LAYER_NORM_GRADIENT_INIT;
    norm.norm = l->config.norm;
    norm.x = l->sum.value ? l->sum : l->x;
    norm.gamma = l->gamma, norm.beta = l->beta;
    norm.gamma_from_one = 1;
    norm.normed = l->normed;
    if (l->config.has_no_dx) return norm;
    norm.added = l->added;
    norm.dx = l->dx, norm.dgamma = l->dgamma, norm.dbeta = l->dbeta;
    norm.accumulate = 1;
    return norm;
}

tn_linear_forward_args test_linear_forward_args(const test_layer *l) {
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = l->x, args.w = weight_of(l, 0), args.y = l->y, args.common = common_of(l);
    return args;
}

tn_linear_backward_args test_linear_backward_args(const test_layer *l) {
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = l->dy, args.w = back_weight_of(l, 0), args.x = l->x;
    args.gradient = gradient_of(l, 0), args.common = common_of(l);
    if (!l->config.has_no_dx) args.dx = l->dx;
    return args;
}

tn_norm_linear_forward_args test_norm_linear_forward_args(const test_layer *l) {
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    args.norm = norm_of(l), args.w = weight_of(l, 0), args.y = l->y, args.common = common_of(l);
    return args;
}

tn_norm_linear_backward_args test_norm_linear_backward_args(const test_layer *l) {
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = l->dy, args.w = back_weight_of(l, 0), args.norm = norm_gradient_of(l);
    args.gradient = gradient_of(l, 0), args.common = common_of(l);
    return args;
}

tn_norm_mlp_forward_args test_norm_mlp_forward_args(const test_layer *l) {
    tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
    args.norm = norm_of(l), args.w1 = weight_of(l, 0), args.w2 = weight_of(l, 1);
    args.activation = l->config.activation, args.gated = l->config.gated;
    args.y = l->y, args.common = common_of(l);
    return args;
}

tn_norm_mlp_backward_args test_norm_mlp_backward_args(const test_layer *l) {
    tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
    args.dy = l->dy, args.w1 = back_weight_of(l, 0), args.w2 = back_weight_of(l, 1);
    args.activation = l->config.activation, args.gated = l->config.gated;
    args.norm = norm_gradient_of(l), args.gradient1 = gradient_of(l, 0);
    args.gradient2 = gradient_of(l, 1), args.common = common_of(l);
    return args;
}

/* ---- calls ----------------------------------------------------------------------------------- */

tn_status test_layer_forward(test_layer *l, tn_stream stream) {
    const tn_linear_forward_args linear = test_linear_forward_args(l);
    const tn_norm_linear_forward_args norm_linear = test_norm_linear_forward_args(l);
    const tn_norm_mlp_forward_args mlp = test_norm_mlp_forward_args(l);
    switch (l->config.kind) {
    case TEST_LINEAR: return tn_linear_forward(&linear, &l->saved.linear, stream);
    case TEST_NORM_LINEAR:
        return tn_norm_linear_forward(&norm_linear, &l->saved.norm_linear, stream);
    default: return tn_norm_mlp_forward(&mlp, &l->saved.mlp, stream);
    }
}

tn_status test_layer_backward(test_layer *l, tn_stream stream) {
    const tn_linear_backward_args linear = test_linear_backward_args(l);
    const tn_norm_linear_backward_args norm_linear = test_norm_linear_backward_args(l);
    const tn_norm_mlp_backward_args mlp = test_norm_mlp_backward_args(l);
    switch (l->config.kind) {
    case TEST_LINEAR: return tn_linear_backward(&linear, &l->saved.linear, l->delayed, stream);
    case TEST_NORM_LINEAR:
        return tn_norm_linear_backward(&norm_linear, &l->saved.norm_linear, l->delayed, stream);
    default: return tn_norm_mlp_backward(&mlp, &l->saved.mlp, l->delayed, stream);
    }
}

tn_status test_layer_weight_gradients(test_layer *l, tn_stream stream) {
    for (int i = 0; i < 2; i++) {
        if (l->delayed[i].dweight.value == 0) continue;
        tn_status status = tn_weight_gradient(&l->delayed[i], l->op, stream);
        if (status != TN_OK) return status;
    }
    return TN_OK;
}

/* ---- the optimizer --------------------------------------------------------------------------- */

void test_layer_open_optimizer(test_layer *l) {
    l->step = filled(l, l->model, TN_FP32, 1, 3, 0);
    for (int i = 0; i < test_layer_products(l); i++) {
        int64_t rows, cols;
        test_layer_shape(&l->config, i, &rows, &cols);
        l->master[i] = filled(l, l->model, TN_FP32, rows, cols, 100 + (uint64_t)i);
        l->first[i] = filled(l, l->model, TN_FP32, rows, cols, 0);
        l->second[i] = filled(l, l->model, TN_FP32, rows, cols, 0);
    }
}

void test_layer_update(test_layer *l) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    advance.step = l->step;
    EXPECT_OK(tn_adamw_advance(&advance, l->ops.stream));
    for (int i = 0; i < test_layer_products(l); i++) {
        tn_adamw_args adamw = TN_ADAMW_ARGS_INIT;
        if (l->dweight[i].value == 0) continue;
        adamw.master = l->master[i], adamw.gradient = l->dweight[i];
        adamw.first = l->first[i], adamw.second = l->second[i], adamw.step = l->step;
        adamw.learning_rate = 0.05f;
        if (l->config.format[i] == TN_FORMAT_FP8_BLOCK_2D)
            adamw.weight = l->weight[i];
        else
            adamw.plain = l->config.format[i] == TN_FORMAT_PLAIN ? l->weight[i] : l->source[i];
        EXPECT_OK(tn_adamw(&adamw, l->ops.stream));
    }
}
