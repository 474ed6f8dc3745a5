/* See test_experts.h. */
#include "test_experts.h"

#include <stdlib.h>
#include <string.h>

const int64_t test_experts_offsets[EXPERTS + 1] = {0, 17, 17, 145, 150, EXPERTS_ROWS};

/* ---- contents -------------------------------------------------------------------------------- */

float test_experts_value(uint32_t seed, int64_t i) {
    uint32_t mixed = ((uint32_t)i + 1) * 2654435761u + seed * 40503u;
    mixed ^= mixed >> 15, mixed *= 2246822519u, mixed ^= mixed >> 13;
    return (float)((int)(mixed % 33) - 16) / 8.0f;
}

/* Eighths have few bits: fp32's upper half is bf16's. */
void test_experts_fill(const test_ops *ops, tn_tensor tensor, uint32_t seed) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    assert_true(info.dtype == TN_FP32 || info.dtype == TN_BF16);
    const size_t each = tn_dtype_bytes(info.dtype);
    unsigned char *data = malloc((size_t)(info.rows * info.cols) * each);
    for (int64_t i = 0; i < info.rows * info.cols; i++) {
        float value = test_experts_value(seed, i);
        memcpy(data + (size_t)i * each, (unsigned char *)&value + sizeof value - each, each);
    }
    test_write(ops, tensor, data);
    free(data);
}

static tn_tensor filled(const test_ops *ops, tn_scope scope, tn_dtype dtype, int64_t rows,
                        int64_t cols, uint32_t seed) {
    tn_tensor tensor = test_plain(scope, dtype, rows, cols);
    test_experts_fill(ops, tensor, seed);
    return tensor;
}

static tn_tensor bytes_of(const test_ops *ops, tn_scope scope, const void *bytes, size_t count) {
    tn_tensor tensor = test_plain(scope, TN_BYTE, 1, (int64_t)count);
    test_write(ops, tensor, bytes);
    return tensor;
}

static tn_tensor weight_of(const test_ops *ops, const test_experts_config *config, int e) {
    tn_tensor_config weight = TN_TENSOR_CONFIG_INIT;
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    const int is_plain = config->format == TN_FORMAT_PLAIN;
    tn_tensor values =
        filled(ops, ops->scope, config->dtype, EXPERTS_N, EXPERTS_K, 100 + (uint32_t)e);
    const int frozen = (int)(config->frozen >> e & 1);
    if (is_plain) {
        EXPECT_OK(tn_tensor_set_frozen(values, frozen));
        return values;
    }
    weight.format = config->format, weight.dtype = TN_E4M3, weight.scale_mode = config->mode;
    weight.rank = 2, weight.shape[0] = EXPERTS_N, weight.shape[1] = EXPERTS_K;
    weight.frozen = frozen, weight.policy = config->policy, weight.name = "expert";
    EXPECT_OK(tn_tensor_create(ops->scope, &weight, &quantize.dst));
    quantize.src = values;
    EXPECT_OK(tn_quantize(&quantize, ops->stream));
    EXPECT_OK(tn_tensor_destroy(values, ops->stream));
    return quantize.dst;
}

/* Factors of their own for each group. */
static void make_scales(const test_ops *ops, test_experts *t) {
    float factors[EXPERTS_SLOTS], nothing[EXPERTS_HISTORY * EXPERTS_SLOTS] = {0.0f};
    for (int i = 0; i < EXPERTS_SLOTS; i++)
        factors[i] = 30.0f + 7.0f * (float)i;
    t->scale = test_plain(ops->scope, TN_FP32, 1, EXPERTS_SLOTS);
    t->history = test_plain(ops->scope, TN_FP32, EXPERTS_HISTORY, EXPERTS_SLOTS);
    test_write(ops, t->scale, factors), test_write(ops, t->history, nothing);
    t->experts.x_scale = (tn_layer_scale){t->scale, t->history, 0};
    t->experts.dy_scale = (tn_layer_scale){t->scale, t->history, EXPERTS};
}

test_experts test_experts_open(const test_ops *ops, const test_experts_config *config) {
    static const uint32_t no_error;
    const int64_t rows = EXPERTS_ROWS + EXPERTS_SPARE;
    test_experts t = {.config = *config, .experts = TN_EXPERTS_INIT};
    t.op = test_ops_scope(ops, TN_SCOPE_OP, "op");
    t.saved = test_ops_scope(ops, TN_SCOPE_SAVED, "saved");
    t.x = filled(ops, ops->scope, config->dtype, rows, EXPERTS_K, 1);
    t.dy = filled(ops, ops->scope, config->dtype, rows, EXPERTS_N, 2);
    t.y = test_plain(ops->scope, TN_FP32, rows, EXPERTS_N);
    t.dx = test_plain(ops->scope, TN_FP32, rows, EXPERTS_K);
    for (int e = 0; e < EXPERTS; e++) {
        t.weights[e] = weight_of(ops, config, e);
        t.biases[e] = filled(ops, ops->scope, TN_FP32, 1, EXPERTS_N, 200 + (uint32_t)e);
        t.dbiases[e] = test_plain(ops->scope, TN_FP32, 1, EXPERTS_N);
        if (!(config->frozen >> e & 1))
            t.dweights[e] = test_plain(ops->scope, TN_FP32, EXPERTS_N, EXPERTS_K);
    }
    t.experts.groups = EXPERTS, t.experts.offsets = test_experts_offsets;
    if (config->has_scales) make_scales(ops, &t);
    if (config->format != TN_FORMAT_FP8_BLOCK_2D) return t;
    t.experts.device_offsets =
        bytes_of(ops, ops->scope, test_experts_offsets, sizeof test_experts_offsets);
    t.experts.error = bytes_of(ops, ops->scope, &no_error, sizeof no_error);
    return t;
}

/* ---- calls ----------------------------------------------------------------------------------- */

tn_grouped_linear_forward_args test_experts_forward(const test_experts *t, int saves) {
    tn_grouped_linear_forward_args args = TN_GROUPED_LINEAR_FORWARD_ARGS_INIT;
    args.experts = t->experts, args.experts.weights = t->weights;
    args.x = t->x, args.biases = t->biases, args.y = t->y;
    args.scope = t->op;
    if (saves) args.saved_scope = t->saved;
    return args;
}

tn_grouped_linear_backward_args test_experts_backward(const test_experts *t) {
    tn_grouped_linear_backward_args args = TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT;
    args.experts = t->experts, args.experts.weights = t->weights;
    args.dy = t->dy, args.dx = t->dx;
    args.dweights = t->dweights, args.dbiases = t->dbiases;
    args.scope = t->op;
    if (t->config.format == TN_FORMAT_PLAIN) args.x = t->x;
    return args;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

size_t test_experts_plane_bytes(tn_format weight, tn_plane plane, int64_t cols) {
    int64_t floats = 0;
    for (int e = 0; e < EXPERTS; e++) {
        int64_t rows = test_experts_offsets[e + 1] - test_experts_offsets[e];
        if (weight == TN_FORMAT_FP8_TENSOR)
            floats += rows > 0 ? 4 : 0;
        else if (plane == TN_PLANE_ROW)
            floats += (cols + 127) / 128 * ((rows + 3) / 4 * 4);
        else
            floats += (rows + 127) / 128 * ((cols + 3) / 4 * 4);
    }
    return (size_t)(EXPERTS_ROWS * cols + 4 * floats);
}

/* One tile, whose row of scales is 4 long, as is that of one scale. */
size_t test_experts_weight_bytes(void) { return (size_t)EXPERTS_N * EXPERTS_K + 4 * sizeof(float); }

/* Bytes of each scope, in elements of fp32 and of what else there is. */
typedef struct scope_bytes {
    size_t op, saved, all; /* all: of the fixture's scope, that is everything */
    size_t col, col_peak;  /* of the weights */
} scope_bytes;

static scope_bytes bytes_now(const test_ops *ops, const test_experts *t) {
    tn_ledger all = test_ledger(ops->scope);
    EXPECT_OK(tn_ledger_check(ops->pool));
    return (scope_bytes){test_ledger(t->op).total_bytes, test_ledger(t->saved).total_bytes,
                         all.total_bytes,
                         all.data_bytes[TN_PLANE_COL] + all.scale_bytes[TN_PLANE_COL],
                         all.peak_plane_bytes[TN_PLANE_COL]};
}

static void expect(const test_ops *ops, const test_experts *t, const char *when,
                   scope_bytes wanted) {
    scope_bytes got = bytes_now(ops, t);
    if (memcmp(&got, &wanted, sizeof got) != 0)
        fail_msg("%s: op %zu (%zu), saved %zu (%zu), all %zu (%zu), COL %zu (%zu), its peak %zu "
                 "(%zu)",
                 when, got.op, wanted.op, got.saved, wanted.saved, got.all, wanted.all, got.col,
                 wanted.col, got.col_peak, wanted.col_peak);
}

typedef struct bytes_way {
    test_experts_config config;
    int recomputes; /* backward is given x, nothing is saved */
    int delays;
    int has_no_dx;
    int has_side;                    /* planes of weights are derived ahead */
    int planes_kept, planes_at_peak; /* COL planes of weights, after backward and at most */
} bytes_way;

/* Outputs of forward and backward: they stay. */
static size_t output_bytes(const bytes_way *way, int is_backward) {
    const size_t rows = EXPERTS_ROWS + EXPERTS_SPARE, each = sizeof(float);
    size_t bytes = rows * EXPERTS_N * each;
    if (!is_backward) return bytes;
    bytes += (size_t)EXPERTS * EXPERTS_N * each;
    return way->has_no_dx ? bytes : bytes + rows * EXPERTS_K * each;
}

static size_t dweight_bytes(const bytes_way *way) {
    size_t bytes = 0;
    for (int e = 0; e < EXPERTS; e++)
        bytes += way->config.frozen >> e & 1 ? 0 : (size_t)EXPERTS_N * EXPERTS_K * sizeof(float);
    return bytes;
}

static void run_way(const test_ops *outer, const bytes_way *way) {
    const int is_fp8 = way->config.format != TN_FORMAT_PLAIN;
    const int is_trainable = way->config.frozen != (1u << EXPERTS) - 1;
    test_ops ops = *outer;
    ops.scope = test_ops_scope(outer, TN_SCOPE_MODEL, "experts");
    test_experts t = test_experts_open(&ops, &way->config);
    tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
    tn_grouped_delayed delayed = TN_GROUPED_DELAYED_INIT;
    tn_grouped_linear_forward_args forward = test_experts_forward(&t, !way->recomputes);
    tn_grouped_linear_backward_args backward = test_experts_backward(&t);
    const size_t before = bytes_now(&ops, &t).all, one = test_experts_weight_bytes();
    scope_bytes now = {.all = before + output_bytes(way, 0)};

    EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, ops.stream));
    if (is_fp8 && is_trainable && !way->recomputes)
        now.saved = test_experts_plane_bytes(way->config.format, TN_PLANE_COL, EXPERTS_K);
    now.all += now.saved;
    expect(&ops, &t, "after forward", now);

    tn_stream side = NULL;
    if (way->has_side) EXPECT_OK(tn_stream_create(ops.device, &side));
    backward.experts.side = side;
    if (way->recomputes) backward.x = t.x;
    if (way->has_no_dx) backward.dx.value = 0;
    if (way->delays) backward.delay = 1, backward.saved_scope = t.saved;
    EXPECT_OK(tn_grouped_linear_backward(&backward, &saved, &delayed, ops.stream));
    size_t left =
        way->delays && is_fp8 && is_trainable
            ? now.saved + test_experts_plane_bytes(way->config.format, TN_PLANE_COL, EXPERTS_N)
            : 0;
    now.col = one * (size_t)way->planes_kept, now.col_peak = one * (size_t)way->planes_at_peak;
    now.saved = left;
    now.all = before + output_bytes(way, 1) + left + now.col;
    now.all += way->delays ? 0 : dweight_bytes(way);
    expect(&ops, &t, "after backward", now);
    if (!way->delays) assert_true(saved.x.data.value == 0 && saved.x.scale.value == 0);

    if (way->delays) {
        EXPECT_OK(tn_grouped_linear_weight_gradient(&backward, &saved, &delayed, ops.stream));
        now.all += dweight_bytes(way) - left, now.saved = 0;
        expect(&ops, &t, "after the delayed gradients", now);
        assert_true(saved.x.data.value == 0 && delayed.dy.data.value == 0);
    }
    EXPECT_OK(tn_scope_close(ops.scope));
    if (!side) return;
    EXPECT_OK(tn_device_synchronize(ops.device));
    EXPECT_OK(tn_stream_destroy(ops.device, side));
}

void test_experts_bytes(const test_ops *ops) {
    enum { ALL = (1 << EXPERTS) - 1, SOME = 1 << 0 | 1 << 4, WITH_ROWS = EXPERTS - 1 };
    const tn_format fp8 = TN_FORMAT_FP8_BLOCK_2D, tensor = TN_FORMAT_FP8_TENSOR;
    const tn_plane_policy keep = TN_POLICY_KEEP, until_used = TN_POLICY_UNTIL_LAST_USE;
    const bytes_way ways[] = {
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, 0, keep, 0},
         .planes_kept = WITH_ROWS,
         .planes_at_peak = WITH_ROWS},
        {.config = {fp8, TN_BF16, TN_SCALE_FP32, 0, keep, 0}, .has_no_dx = 1},
        {.config = {fp8, TN_FP32, TN_SCALE_POW2, 0, keep, 0},
         .delays = 1,
         .planes_kept = WITH_ROWS,
         .planes_at_peak = WITH_ROWS},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, 0, keep, 0}, .recomputes = 1, .has_no_dx = 1},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, 0, keep, 0},
         .recomputes = 1,
         .delays = 1,
         .has_no_dx = 1},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, ALL, until_used, 0}, .planes_at_peak = 1},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, ALL, until_used, 0}, .has_no_dx = 1},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, SOME, until_used, 0},
         .planes_kept = 2,
         .planes_at_peak = 3},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, ALL, keep, 0},
         .planes_kept = WITH_ROWS,
         .planes_at_peak = WITH_ROWS},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, ALL, until_used, 0},
         .has_side = 1,
         .planes_at_peak = 2},
        {.config = {fp8, TN_BF16, TN_SCALE_POW2, SOME, until_used, 0},
         .has_side = 1,
         .planes_kept = 2,
         .planes_at_peak = 3},
        {.config = {tensor, TN_BF16, TN_SCALE_POW2, 0, keep, 0},
         .planes_kept = WITH_ROWS,
         .planes_at_peak = WITH_ROWS},
        {.config = {tensor, TN_BF16, TN_SCALE_FP32, SOME, keep, 0},
         .delays = 1,
         .has_side = 1,
         .planes_kept = WITH_ROWS,
         .planes_at_peak = WITH_ROWS},
        {.config = {tensor, TN_FP32, TN_SCALE_POW2, 0, keep, 0}, .recomputes = 1, .has_no_dx = 1},
        {.config = {TN_FORMAT_PLAIN, TN_BF16, TN_SCALE_POW2, 0, keep, 0}},
        {.config = {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, SOME, keep, 0}, .delays = 1},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        run_way(ops, &ways[i]);
}
