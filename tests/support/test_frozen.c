/* The stack of frozen layers: see test_frozen.h. */
#include "test_frozen.h"

#include "tenure_layers.h"

#include <stdlib.h>
#include <string.h>

typedef struct frozen_stack {
    test_ops *ops;
    const frozen_config *config;
    tn_scope weights_scope, op;
    tn_tensor weights[FROZEN_LAYERS_MAX];
    tn_tensor activations[FROZEN_LAYERS_MAX + 1]; /* x, and each layer's y */
    tn_linear_saved saved[FROZEN_LAYERS_MAX];     /* nothing of frozen layers */
    tn_scope step;
    tn_stream side;
} frozen_stack;

size_t frozen_plane_bytes(int64_t width) {
    size_t tiles = (size_t)(width + 127) / 128;
    return (size_t)width * (size_t)width + tiles * ((tiles + 3) / 4 * 4) * sizeof(float);
}

size_t frozen_buffer_bytes(int64_t width) {
    size_t data = (size_t)width * (size_t)width;
    return frozen_plane_bytes(width) - data + (data + 255) / 256 * 256;
}

/* ---- tensors with values --------------------------------------------------------------------- */

static int has_values(const test_ops *ops) {
    return tn_device_architecture(ops->device) == TN_ARCHITECTURE_HOST;
}

/* bf16 in about [-1, 1) from a fixed sequence; on a simulated device only valid. */
static tn_tensor filled(const frozen_stack *s, tn_scope scope, int64_t rows, int64_t cols,
                        uint64_t seed) {
    tn_tensor tensor = test_plain(scope, TN_BF16, rows, cols);
    if (!has_values(s->ops)) {
        test_declare_valid(s->ops, tensor, TN_PLANE_DATA);
        return tensor;
    }
    size_t count = (size_t)rows * (size_t)cols;
    uint16_t *values = malloc(count * sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        values[i] = (uint16_t)(0x3E00 | (seed >> 48 & 0x817F)); /* 2^-3 ... 1, both signs */
    }
    test_write(s->ops, tensor, values);
    free(values);
    return tensor;
}

static void make_weight(frozen_stack *s, int layer) {
    const frozen_config *config = s->config;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = filled(s, s->op, config->width, config->width, (uint64_t)layer + 100);
    args.dst = test_weight(s->weights_scope, config->width, config->width, config->frozen_from == 0,
                           config->policy);
    args.planes = TN_QUANTIZE_ROW | (config->has_both_planes ? TN_QUANTIZE_COL : 0u);
    EXPECT_OK(tn_quantize(&args, s->ops->stream));
    EXPECT_OK(tn_tensor_destroy(args.src, s->ops->stream));
    s->weights[layer] = args.dst;
}

/* ---- passes --------------------------------------------------------------------------------*/

static int is_trainable(const frozen_stack *s, int layer) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(s->weights[layer], &info));
    return !info.frozen;
}

static void layer_forward(frozen_stack *s, int layer) {
    const frozen_config *config = s->config;
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    args.x = s->activations[layer];
    args.w.weight = s->weights[layer];
    args.y = test_plain(s->step, TN_BF16, config->tokens, config->width);
    args.common.scope = s->op;
    args.common.saved_scope = s->step;
    if (config->derives_ahead && layer == config->layers - 1 && layer >= config->first_with_dgrad) {
        args.common.next_weight = s->weights[layer];
        args.common.side = s->side;
    }
    EXPECT_OK(tn_linear_forward(&args, &s->saved[layer], s->ops->stream));
    assert_int_equal(s->saved[layer].x.value != 0, is_trainable(s, layer));
    s->activations[layer + 1] = args.y;
}

/* What is computed again is thrown away: here only its planes matter. */
static void layer_forward_again(frozen_stack *s, int layer) {
    const tn_linear_saved saved = s->saved[layer];
    tn_tensor output = s->activations[layer + 1];
    layer_forward(s, layer);
    EXPECT_OK(tn_tensor_destroy(s->activations[layer + 1], s->ops->stream));
    EXPECT_OK(tn_tensor_destroy(s->saved[layer].x, s->ops->stream));
    s->activations[layer + 1] = output;
    s->saved[layer] = saved;
}

static tn_tensor layer_backward(frozen_stack *s, int layer, tn_tensor dy) {
    const frozen_config *config = s->config;
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    if (config->recomputes) layer_forward_again(s, layer);
    args.dy = dy;
    args.w.weight = s->weights[layer];
    args.common.scope = s->op;
    if (layer >= config->first_with_dgrad)
        args.dx = test_plain(s->step, TN_BF16, config->tokens, config->width);
    if (is_trainable(s, layer))
        args.gradient.dweight = test_plain(s->step, TN_FP32, config->width, config->width);
    if (config->derives_ahead && layer > config->first_with_dgrad) {
        args.common.next_weight = s->weights[layer - 1];
        args.common.side = s->side;
    }
    EXPECT_OK(tn_linear_backward(&args, &s->saved[layer], NULL, s->ops->stream));
    assert_int_equal(s->saved[layer].x.value, 0);
    EXPECT_OK(tn_tensor_destroy(args.gradient.dweight, s->ops->stream));
    EXPECT_OK(tn_tensor_destroy(dy, s->ops->stream));
    return args.dx;
}

/* Of the weights alone: what a step saves of its activations is elsewhere. */
static size_t col_bytes_now(const frozen_stack *s) {
    tn_ledger ledger = test_ledger(s->weights_scope);
    EXPECT_OK(tn_ledger_check(s->ops->pool));
    return ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
}

static void keep_gradient(const frozen_stack *s, int step, tn_tensor dx, frozen_result *out) {
    if (!out->gradients || !dx.value) return;
    test_read(s->ops, dx, out->gradients + (size_t)step * out->gradient_bytes);
}

static void run_step(frozen_stack *s, int step, frozen_result *out) {
    const frozen_config *config = s->config;
    s->step = test_ops_scope(s->ops, TN_SCOPE_STEP, "step");
    s->op = test_ops_scope(s->ops, TN_SCOPE_OP, "op");
    for (int layer = 0; layer < config->layers && step == config->frozen_from; layer++)
        EXPECT_OK(tn_tensor_set_frozen(s->weights[layer], 1));
    s->activations[0] = filled(s, s->step, config->tokens, config->width, (uint64_t)step);
    for (int layer = 0; layer < config->layers; layer++)
        layer_forward(s, layer);
    out->col_after_forward[step] = col_bytes_now(s);
    tn_tensor dy = filled(s, s->step, config->tokens, config->width, (uint64_t)step + 50);
    for (int layer = config->layers - 1; layer >= 0 && dy.value; layer--)
        dy = layer_backward(s, layer, dy);
    keep_gradient(s, step, dy, out);
    EXPECT_OK(tn_scope_close(s->op));
    EXPECT_OK(tn_scope_close(s->step));
    out->col_after_backward[step] = col_bytes_now(s);
    out->total_after_step[step] = test_ledger(s->ops->scope).total_bytes;
}

/* ---- the run ------------------------------------------------------------------------------ */

void frozen_run(test_ops *ops, const frozen_config *config, frozen_result *out) {
    frozen_stack s = {.ops = ops, .config = config};
    *out = (frozen_result){.gradient_bytes = (size_t)(config->tokens * config->width) * 2};
    assert_true(config->layers <= FROZEN_LAYERS_MAX && config->steps <= FROZEN_STEPS_MAX);
    if (has_values(ops)) {
        out->gradients = calloc((size_t)config->steps, out->gradient_bytes);
        assert_non_null(out->gradients);
    }
    s.weights_scope = test_ops_scope(ops, TN_SCOPE_MODEL, "weights");
    if (config->scratch_buffers > 0) {
        tn_scratch_config scratch = TN_SCRATCH_CONFIG_INIT;
        scratch.buffers = config->scratch_buffers;
        EXPECT_OK(tn_scope_scratch_config_set(s.weights_scope, &scratch));
    }
    EXPECT_OK(tn_stream_create(ops->device, &s.side));
    s.op = test_ops_scope(ops, TN_SCOPE_OP, "loading");
    for (int layer = 0; layer < config->layers; layer++)
        make_weight(&s, layer);
    EXPECT_OK(tn_scope_close(s.op));
    EXPECT_OK(tn_scope_ledger_reset_peaks(ops->scope));
    EXPECT_OK(tn_scope_ledger_reset_peaks(s.weights_scope));
    for (int step = 0; step < config->steps; step++)
        run_step(&s, step, out);
    tn_ledger weights = test_ledger(s.weights_scope);
    out->peak_col_bytes = weights.peak_plane_bytes[TN_PLANE_COL];
    out->peak_total_bytes = test_ledger(ops->scope).peak_total_bytes;
    assert_int_equal(weights.leases, 0);
    EXPECT_OK(tn_scope_close(s.weights_scope));
    EXPECT_OK(tn_device_synchronize(ops->device));
    EXPECT_OK(tn_stream_destroy(ops->device, s.side));
}

void frozen_result_free(frozen_result *result) {
    free(result->gradients);
    result->gradients = NULL;
}

/* ---- expectations ------------------------------------------------------------------------- */

void frozen_expect(const frozen_config *config, const frozen_result *result,
                   const frozen_bytes *bytes) {
    const size_t rows = (size_t)config->layers * frozen_plane_bytes(config->width);
    for (int step = 0; step < config->steps; step++) {
        int is_like_first = step == 0 || (config->derives_ahead && bytes->at_first > bytes->kept);
        size_t before = is_like_first ? bytes->at_first : bytes->kept;
        assert_int_equal(result->col_after_forward[step], before);
        assert_int_equal(result->col_after_backward[step], bytes->kept);
        size_t scratch = step >= bytes->scratch_from ? bytes->scratch : 0;
        assert_int_equal(result->total_after_step[step], rows + bytes->kept + scratch);
    }
    assert_int_equal(result->peak_col_bytes, bytes->peak);
}

void frozen_expect_same_gradients(const frozen_config *config, const frozen_result *a,
                                  const frozen_result *b) {
    const size_t bytes = (size_t)config->steps * a->gradient_bytes;
    size_t nonzero = 0;
    if (!a->gradients || !b->gradients) return;
    assert_memory_equal(a->gradients, b->gradients, bytes);
    for (size_t i = 0; i < bytes; i++)
        nonzero += a->gradients[i] != 0;
    assert_true(config->first_with_dgrad > 0 || nonzero > bytes / 2);
}
