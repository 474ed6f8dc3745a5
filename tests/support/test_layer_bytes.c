/* What layers leave alive, in closed form, and the step that shows it: see test_layers.h. */
#include "test_layers.h"

#include <stdio.h>

/* ---- the closed form ------------------------------------------------------------------------- */

static size_t plain_bytes(const test_layer_config *config, int64_t cols) {
    return LAYER_M * (size_t)cols * tn_dtype_bytes(config->dtype);
}

static size_t up4(size_t n) { return (n + 3) / 4 * 4; }

static size_t tiles(size_t n) { return (n + 127) / 128; }

/* A plane of [M, cols] under the recipe of a weight: COL of blocks, or what forward multiplied. */
static size_t quantized_bytes(tn_format weight, int64_t cols, tn_plane plane) {
    const size_t k = (size_t)cols, data = LAYER_M * k;
    if (weight == TN_FORMAT_FP8_TENSOR) return data + 16;
    if (plane == TN_PLANE_COL) return data + tiles(LAYER_M) * up4(k) * sizeof(float);
    return data + tiles(k) * up4(LAYER_M) * sizeof(float);
}

static int is_trained(const test_layer_config *config, int product) {
    return !(config->frozen >> product & 1u);
}

/* Whether the weight's gradient reads a quantized x. */
static int is_quantized_x(const test_layer_config *config, int product) {
    return config->format[product] != TN_FORMAT_PLAIN &&
           config->precision != TN_BACKWARD_HIGH_PRECISION;
}

/* What a product's weight gradient reads of its x; 0 of what the caller holds. */
static size_t x_bytes(const test_layer_config *config, int product) {
    const int64_t cols = product ? LAYER_F : LAYER_K;
    const tn_plane plane =
        config->precision == TN_BACKWARD_DEQUANTIZED ? TN_PLANE_ROW : TN_PLANE_COL;
    if (is_quantized_x(config, product))
        return quantized_bytes(config->format[product], cols, plane);
    if (config->kind == TEST_LINEAR || (product == 0 && config->has_normed)) return 0;
    return plain_bytes(config, cols);
}

static int64_t hidden_cols(const test_layer_config *config) {
    return config->gated ? 2 * LAYER_F : LAYER_F;
}

size_t test_layer_saved_bytes(const test_layer_config *config) {
    size_t bytes = 0;
    if (config->recompute) return 0;
    for (int i = 0; i < (config->kind == TEST_NORM_MLP ? 2 : 1); i++)
        if (is_trained(config, i)) bytes += x_bytes(config, i);
    if (config->kind != TEST_LINEAR)
        bytes += LAYER_M * sizeof(float) * (config->norm == TN_NORM_LAYER ? 2 : 1);
    if (config->kind == TEST_NORM_MLP) bytes += plain_bytes(config, hidden_cols(config));
    return bytes;
}

/* What it reads of its dy: the layer's own copy, or of an MLP's first product its own dy. */
static size_t dy_bytes(const test_layer_config *config, int product) {
    const int is_first = config->kind == TEST_NORM_MLP && product == 0;
    const int64_t cols = is_first ? hidden_cols(config) : LAYER_N;
    if (config->format[product] != TN_FORMAT_PLAIN && config->precision == TN_BACKWARD_AS_FORWARD)
        return quantized_bytes(config->format[product], cols, TN_PLANE_COL);
    return is_first ? plain_bytes(config, cols) : 0;
}

size_t test_layer_delayed_bytes(const test_layer_config *config) {
    size_t bytes = 0;
    if (!config->delay) return 0;
    for (int i = 0; i < (config->kind == TEST_NORM_MLP ? 2 : 1); i++)
        if (is_trained(config, i)) bytes += x_bytes(config, i) + dy_bytes(config, i);
    return bytes;
}

/* ---- a step ---------------------------------------------------------------------------------- */

typedef struct expectation {
    size_t model; /* parameters, gradients, optimizer state */
    size_t io;    /* what the caller holds: grows by the outputs that a call makes */
} expectation;

static void expect_alive(const test_layer *l, const char *after, const expectation *e, size_t saved,
                         int show) {
    const size_t model = test_ledger(l->model).total_bytes, io = test_ledger(l->io).total_bytes;
    const size_t kept = test_ledger(l->saved_scope).total_bytes;
    if (show)
        printf("  %-18s parameters %zu  caller's %zu  saved %zu  scratch %zu\n", after, model, io,
               kept, (size_t)test_ledger(l->op).total_bytes);
    assert_int_equal(model, e->model);
    assert_int_equal(io, e->io);
    assert_int_equal(kept, saved);
    assert_int_equal(test_ledger(l->op).tensors, 0);
    assert_int_equal(test_ledger(l->ops.scope).total_bytes, model + io + kept);
    assert_int_equal(test_ledger(l->ops.scope).leases, 0);
    EXPECT_OK(tn_ledger_check(l->ops.pool));
}

static const char *const kinds[] = {"Linear", "LayerNormLinear", "LayerNormMLP"};

static void run_step(const test_ops *ops, const test_layer_config *config, int show) {
    test_layer l = test_layer_open(ops, config);
    const size_t delayed = test_layer_delayed_bytes(config);
    test_layer_open_optimizer(&l);
    expectation e = {test_ledger(l.model).total_bytes, test_ledger(l.io).total_bytes};
    if (show)
        printf("%s, %s and %s, precision %d%s%s, frozen %u\n", kinds[config->kind],
               tn_format_name(config->format[0]), tn_format_name(config->format[1]),
               (int)config->precision, config->recompute ? ", recompute" : "",
               config->delay ? ", delay" : "", config->frozen);
    expect_alive(&l, "before", &e, 0, show);
    EXPECT_OK(test_layer_forward(&l, ops->stream));
    e.io += plain_bytes(config, LAYER_N);
    if (l.sum.value) e.io += plain_bytes(config, LAYER_K);
    if (l.normed.value) e.io += plain_bytes(config, LAYER_K);
    expect_alive(&l, "forward", &e, test_layer_saved_bytes(config), show);
    EXPECT_OK(test_layer_backward(&l, ops->stream));
    if (!config->has_no_dx) e.io += plain_bytes(config, LAYER_K);
    expect_alive(&l, "backward", &e, delayed, show);
    EXPECT_OK(test_layer_weight_gradients(&l, ops->stream));
    expect_alive(&l, "weight gradient", &e, 0, show);
    test_layer_update(&l);
    expect_alive(&l, "update", &e, 0, show);
    EXPECT_OK(tn_scope_close(l.op));
    EXPECT_OK(tn_scope_close(l.saved_scope));
    EXPECT_OK(tn_scope_close(l.io));
    EXPECT_OK(tn_scope_close(l.model));
}

/* ---- all of them ----------------------------------------------------------------------------- */

static const tn_format formats[] = {TN_FORMAT_PLAIN, TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_TENSOR};

/* Every bit of `variant` is one choice. */
static void choose(test_layer_config *config, unsigned variant) {
    config->recompute = variant & 1u;
    config->delay = variant >> 1 & 1u;
    config->frozen = (variant >> 2 & 1u) | (variant >> 1 & 2u);
    config->norm = variant >> 3 & 1u ? TN_NORM_LAYER : TN_NORM_RMS;
    config->gated = variant >> 3 & 1u;
    config->has_normed = variant >> 4 & 1u;
    config->has_residual = variant >> 4 & 1u;
    config->has_no_dx = variant >> 5 & 1u;
}

int test_layer_bytes(const test_ops *ops, int has_no_values, int show) {
    int count = 0;
    for (int kind = 0; kind < TEST_LAYER_KINDS; kind++) {
        for (int f = 0; f < 9; f++) {
            for (unsigned variant = 0; variant < 64; variant++) {
                test_layer_config config = {.kind = (test_layer_kind)kind,
                                            .format = {formats[f % 3], formats[f / 3]},
                                            .dtype = TN_BF16,
                                            .activation = TN_ACTIVATION_SILU,
                                            .policy = TN_POLICY_BUDGET,
                                            .has_no_values = has_no_values};
                if (kind != TEST_NORM_MLP && f >= 3) continue;
                config.precision = (tn_backward_precision)(variant % 3);
                choose(&config, variant);
                run_step(ops, &config, show);
                count++;
            }
        }
    }
    return count;
}
