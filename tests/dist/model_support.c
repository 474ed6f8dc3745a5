/* The sharded transformer of the tests, and what both models have in common: see
 * model_support.h. */
#include "model_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tenure_train.h"

enum { CLASSES = 256 };

model_options model_options_full(int layers) {
    return (model_options){
        .shape = {.hidden = 256, .ffn = 1024, .heads = 8, .sequence = 32, .tokens = 64},
        .layers = layers,
        .precision = MODEL_FP8,
        .micro_batches = 1};
}

model_options model_options_small(int layers) {
    return (model_options){
        .shape = {.hidden = 128, .ffn = 200, .heads = 4, .sequence = 8, .tokens = 16},
        .layers = layers,
        .precision = MODEL_FP8,
        .micro_batches = 1};
}

int model_is_frozen(const model_options *options, int layer, int part) {
    return layer < options->frozen_layers || (options->frozen_parts >> part & 1u);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* From -1 to below 1. */
static float number(uint64_t seed, uint64_t at) {
    return (float)(int32_t)(mixed(seed * 0x100000001B3u + at) >> 32) * 0x1p-31f;
}

static void fill_floats(const rank_fixture *ranks, tn_tensor tensor, uint64_t seed, float base,
                        float scale) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    const size_t count = (size_t)(info.rows * info.cols);
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; i < count; i++)
        values[i] = base + scale * number(seed, i);
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, values, count * sizeof *values, NULL, 0,
                             ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    free(values);
}

void model_initial_fill(const rank_fixture *ranks, tn_tensor tensor, int layer, int part) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    const uint64_t seed = (uint64_t)(layer * BLOCK_PARTS + part + 1);
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    if (block_part_is_product(part))
        fill_floats(ranks, tensor, seed, 0.0f, 1.5f / sqrtf((float)info.cols));
    else
        fill_floats(ranks, tensor, seed, 1.0f, 0.125f);
}

static tn_tensor plain(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static uint64_t seed_of(int step, int rank, int micro_batch) {
    return 1000000u + (uint64_t)step * 10000u + (uint64_t)rank * 100u + (uint64_t)micro_batch;
}

tn_tensor model_input(const rank_fixture *ranks, const block_run *run, int step, int rank,
                      int micro_batch) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    convert.x = plain(run->scratch, TN_FP32, run->shape->tokens, run->shape->hidden);
    convert.y = block_tensor(run, run->scratch, run->shape->hidden, "input");
    fill_floats(ranks, convert.x, seed_of(step, rank, micro_batch), 0.0f, 1.0f);
    EXPECT_OK(tn_convert(&convert, run->stream));
    EXPECT_OK(tn_tensor_destroy(convert.x, run->stream));
    return convert.y;
}

static float mean_of(const rank_fixture *ranks, tn_tensor loss, size_t count) {
    float *values = malloc(count * sizeof *values), sum = 0.0f;
    assert_non_null(values);
    EXPECT_OK(
        tn_plane_read(loss, TN_PLANE_DATA, values, count * sizeof *values, NULL, 0, ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    for (size_t i = 0; i < count; i++)
        sum += values[i];
    free(values);
    return sum / (float)count;
}

tn_tensor model_loss(const rank_fixture *ranks, const block_run *run, tn_tensor y, int step,
                     int rank, int micro_batch, float *loss) {
    unsigned char targets[CLASSES];
    tn_cross_entropy_args args = TN_CROSS_ENTROPY_ARGS_INIT;
    const int64_t rows = run->shape->tokens * run->shape->hidden / CLASSES;
    const int64_t shape[2] = {rows, CLASSES};
    tn_tensor dy = block_tensor(run, run->scratch, run->shape->hidden, "gradient");
    assert_true(rows <= CLASSES);
    for (int64_t i = 0; i < rows; i++)
        targets[i] = (unsigned char)mixed(seed_of(step, rank, micro_batch) * 977u + (uint64_t)i);
    EXPECT_OK(tn_plane_fill(dy, TN_PLANE_DATA, 0, run->stream));
    EXPECT_OK(tn_tensor_view_shape(y, 2, shape, run->scratch, &args.logits));
    EXPECT_OK(tn_tensor_view_shape(dy, 2, shape, run->scratch, &args.dlogits));
    args.targets = plain(run->scratch, TN_BYTE, 1, rows);
    args.loss = plain(run->scratch, TN_FP32, 1, rows);
    EXPECT_OK(
        tn_plane_write(args.targets, TN_PLANE_DATA, targets, (size_t)rows, NULL, 0, run->stream));
    EXPECT_OK(tn_cross_entropy(&args, run->stream));
    *loss = mean_of(ranks, args.loss, (size_t)rows);
    EXPECT_OK(tn_tensor_destroy(args.logits, run->stream));
    EXPECT_OK(tn_tensor_destroy(args.dlogits, run->stream));
    EXPECT_OK(tn_tensor_destroy(args.targets, run->stream));
    EXPECT_OK(tn_tensor_destroy(args.loss, run->stream));
    EXPECT_OK(tn_tensor_destroy(y, run->stream));
    return dy;
}

/* ---- the sharded one ------------------------------------------------------------------------- */

static tn_scope make_scope(tn_pool *pool, tn_scope_kind kind, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = pool;
    config.kind = kind;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_sharded_tensor tensor_of(const test_model *model, int layer, int part) {
    const model_options *options = &model->options;
    tn_sharded_tensor tensor = {.name = block_part_name(part),
                                .format = TN_FORMAT_PLAIN,
                                .dtype = TN_FP32,
                                .rows = block_part_rows(&options->shape, part),
                                .cols = block_part_cols(&options->shape, part),
                                .frozen = model_is_frozen(options, layer, part)};
    if (!block_part_is_product(part)) return tensor;
    if (options->precision == MODEL_BF16) {
        tensor.dtype = TN_BF16;
    } else {
        tensor.format = TN_FORMAT_FP8_BLOCK_2D, tensor.dtype = TN_E4M3;
        tensor.high_precision = options->precision == MODEL_FP8_OF_BF16;
    }
    return tensor;
}

static void add_layer(test_model *model, int layer, const reference_model *trained) {
    tn_sharded_tensor tensors[BLOCK_PARTS];
    tn_sharded_unit_config config = TN_SHARDED_UNIT_CONFIG_INIT;
    tn_scope initial = make_scope(model->ranks->pool, TN_SCOPE_STEP, "initial");
    int unit = -1;
    for (int part = 0; part < BLOCK_PARTS; part++) {
        tensors[part] = tensor_of(model, layer, part);
        if (trained) {
            const reference_part *from = &trained->parts[layer][part];
            tensors[part].initial = from->master;
            if (!tensors[part].frozen)
                tensors[part].first = from->first, tensors[part].second = from->second;
            continue;
        }
        tensors[part].initial = plain(initial, TN_FP32, tensors[part].rows, tensors[part].cols);
        model_initial_fill(model->ranks, tensors[part].initial, layer, part);
    }
    config.tensors = tensors, config.tensor_count = BLOCK_PARTS;
    config.layout = model->options.layout;
    EXPECT_OK(tn_sharded_unit_add(model->sharded, &config, &unit));
    assert_int_equal(unit, layer);
    EXPECT_OK(tn_scope_close(initial));
}

test_model *model_open(const rank_fixture *ranks, const model_options *options,
                       const reference_model *trained) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    test_model *model = calloc(1, sizeof *model);
    assert_non_null(model);
    model->ranks = ranks;
    model->options = *options;
    model->comm = ranks_comm(ranks, "model", 0);
    model->scope = make_scope(ranks->pool, TN_SCOPE_MODEL, "model");
    model->scratch = make_scope(ranks->pool, TN_SCOPE_STEP, "pass");
    config.scope = model->scope;
    config.comm = model->comm;
    config.stream = ranks->stream;
    config.comm_stream = ranks->other;
    config.gradient_dtype = options->gradient_dtype;
    config.gradient_sum = options->sum;
    config.gradient_wire = options->wire;
    config.ring_slots = options->ring_slots;
    config.gradient_slots = options->gradient_slots;
    config.micro_batches = options->micro_batches;
    config.shards_from_masters = options->shards_from_masters;
    config.keep_after_forward = options->keep_after_forward;
    config.keep_after_backward = options->keep_after_backward;
    if (trained) config.step = trained->step;
    EXPECT_OK(tn_sharded_create(&config, &model->sharded));
    for (int layer = 0; layer < options->layers; layer++)
        add_layer(model, layer, trained);
    EXPECT_OK(tn_sharded_seal(model->sharded));
    return model;
}

void model_close(test_model *model) {
    ranks_wait(model->ranks);
    EXPECT_OK(tn_sharded_destroy(model->sharded));
    EXPECT_OK(tn_scope_close(model->scratch));
    EXPECT_OK(tn_scope_close(model->scope));
    EXPECT_OK(tn_comm_destroy(model->comm));
    free(model);
}

static block_weights weights_of(const test_model *model, int layer) {
    block_weights weights = {.accumulate = tn_sharded_accumulates(model->sharded, layer)};
    for (int part = 0; part < BLOCK_PARTS; part++) {
        weights.weight[part] = tn_sharded_weight(model->sharded, layer, part);
        weights.source[part] = tn_sharded_source(model->sharded, layer, part);
        weights.gradient[part] = tn_sharded_gradient(model->sharded, layer, part);
    }
    return weights;
}

static void note(test_model *model, const char *after, int layer) {
    if (model->note) model->note(model->note_context, model, after, layer);
}

static tn_tensor pass_forward(test_model *model, const block_run *run, tn_tensor x) {
    for (int layer = 0; layer < model->options.layers; layer++) {
        const block_weights weights = weights_of(model, layer);
        block *b = &model->blocks[layer];
        EXPECT_OK(tn_sharded_forward_begin(model->sharded, layer));
        x = block_forward(run, &weights, model->scratch, x, b);
        if (model->options.recompute) block_drop(run, b);
        EXPECT_OK(tn_sharded_forward_end(model->sharded, layer));
        note(model, "forward", layer);
    }
    return x;
}

/* Down to the first layer that trains: those below are left without a backward. */
static void pass_backward(test_model *model, const block_run *run, tn_tensor dy) {
    const int first = model->options.frozen_layers;
    for (int layer = model->options.layers - 1; layer >= first; layer--) {
        block *b = &model->blocks[layer];
        EXPECT_OK(tn_sharded_backward_begin(model->sharded, layer));
        const block_weights weights = weights_of(model, layer);
        if (model->options.recompute) block_recompute(run, &weights, b);
        dy = block_backward(run, &weights, dy, layer > first, b);
        EXPECT_OK(tn_sharded_backward_end(model->sharded, layer));
        note(model, "backward", layer);
    }
    for (int layer = first - 1; layer >= 0; layer--)
        EXPECT_OK(tn_scope_close(model->blocks[layer].saved));
}

static tn_sharded_update_args update_args(const test_model *model) {
    tn_sharded_update_args args = TN_SHARDED_UPDATE_ARGS_INIT;
    args.learning_rate = 0x1p-8f;
    args.max_norm = model->options.max_norm;
    args.amax_epsilon = model->options.amax_epsilon;
    return args;
}

void model_pass(test_model *model, int step, int micro_batch) {
    const tn_sharded_update_args update = update_args(model);
    const block_run run = {&model->options.shape, model->scratch, model->ranks->stream};
    const int rank = model->ranks->rank;
    tn_tensor x = model_input(model->ranks, &run, step, rank, micro_batch);
    x = pass_forward(model, &run, x);
    tn_tensor dy = model_loss(model->ranks, &run, x, step, rank, micro_batch, &model->loss);
    note(model, "loss", -1);
    if (model->options.update_ahead && micro_batch + 1 == model->options.micro_batches)
        EXPECT_OK(tn_sharded_update_ahead(model->sharded, &update));
    pass_backward(model, &run, dy);
}

void model_update(test_model *model) {
    const tn_sharded_update_args args = update_args(model);
    EXPECT_OK(tn_sharded_update(model->sharded, model->options.update_ahead ? NULL : &args));
}

void model_step(test_model *model, int step) {
    for (int micro_batch = 0; micro_batch < model->options.micro_batches; micro_batch++)
        model_pass(model, step, micro_batch);
    model_update(model);
}

tn_comm_stats model_stats(const test_model *model) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(model->comm, &stats));
    return stats;
}

tn_sharded_report model_report(const test_model *model) {
    tn_sharded_report report = TN_SHARDED_REPORT_INIT;
    EXPECT_OK(tn_sharded_report_get(model->sharded, &report));
    return report;
}
