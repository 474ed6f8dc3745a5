/* The transformer that knows nothing of ranks: it runs the data of all of them, one after the
 * other, with whole weights of its own, and adds gradients up in the order that a sharded model
 * says it does. See model_support.h. */
#include "model_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tenure_train.h"

/* ---- tensors --------------------------------------------------------------------------------- */

static tn_tensor made(tn_scope scope, tn_format format, tn_dtype dtype, int64_t rows, int64_t cols,
                      int frozen) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format, config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    config.frozen = frozen;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static tn_tensor zeros(const reference_model *model, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = made(model->scope, TN_FORMAT_PLAIN, dtype, rows, cols, 0);
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_DATA, 0, model->ranks->stream));
    return tensor;
}

static void convert(const reference_model *model, tn_tensor from, tn_tensor to) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = from, args.y = to;
    EXPECT_OK(tn_convert(&args, model->ranks->stream));
}

static void add(const reference_model *model, tn_tensor from, tn_tensor to) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    args.x = from, args.y = to;
    EXPECT_OK(tn_axpy(&args, model->ranks->stream));
}

/* What layers read, of the master copy. */
static void cast(const reference_model *model, reference_part *part) {
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(part->weight, &info));
    if (part->source.value) {
        convert(model, part->master, part->source);
    } else if (info.format == TN_FORMAT_PLAIN) {
        convert(model, part->master, part->weight);
    } else {
        quantize.src = part->master, quantize.dst = part->weight;
        EXPECT_OK(tn_quantize(&quantize, model->ranks->stream));
    }
}

static void open_part(reference_model *model, int layer, int index) {
    const model_options *options = &model->options;
    const int64_t rows = block_part_rows(&options->shape, index);
    const int64_t cols = block_part_cols(&options->shape, index);
    const int is_product = block_part_is_product(index);
    const int frozen = model_is_frozen(options, layer, index);
    const int is_fp8 = is_product && options->precision != MODEL_BF16;
    reference_part *part = &model->parts[layer][index];
    part->master = zeros(model, TN_FP32, rows, cols);
    model_initial_fill(model->ranks, part->master, layer, index);
    part->weight = made(model->scope, is_fp8 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_PLAIN,
                        is_fp8 ? TN_E4M3 : (is_product ? TN_BF16 : TN_FP32), rows, cols, frozen);
    if (is_product && options->precision == MODEL_FP8_OF_BF16)
        part->source = zeros(model, TN_BF16, rows, cols);
    cast(model, part);
    if (frozen) return;
    part->first = zeros(model, TN_FP32, rows, cols);
    part->second = zeros(model, TN_FP32, rows, cols);
    part->gradient = zeros(model, options->gradient_dtype, rows, cols);
    part->arrived = zeros(model, TN_FP32, rows, cols);
    part->total = zeros(model, TN_FP32, rows, cols);
}

static tn_scope open_scope(tn_pool *pool, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = pool;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

reference_model *reference_open(const rank_fixture *ranks, const model_options *options) {
    reference_model *model = calloc(1, sizeof *model);
    assert_non_null(model);
    model->ranks = ranks;
    model->options = *options;
    model->data_ranks = ranks->count;
    model->scope = open_scope(ranks->pool, "reference");
    model->scratch = open_scope(ranks->pool, "reference's pass");
    model->step = zeros(model, TN_FP32, 1, 3);
    model->squares = zeros(model, TN_FP32, 1, TN_SQUARE_SUMS);
    model->norm = zeros(model, TN_FP32, 1, 1);
    model->factor = zeros(model, TN_FP32, 1, 1);
    for (int layer = 0; layer < options->layers; layer++)
        for (int part = 0; part < BLOCK_PARTS; part++)
            open_part(model, layer, part);
    return model;
}

void reference_close(reference_model *model) {
    ranks_wait(model->ranks);
    EXPECT_OK(tn_scope_close(model->scratch));
    EXPECT_OK(tn_scope_close(model->scope));
    free(model);
}

/* ---- gradients ------------------------------------------------------------------------------- */

static block_weights weights_of(const reference_model *model, int layer, int accumulate) {
    block_weights weights = {.accumulate = accumulate};
    for (int part = 0; part < BLOCK_PARTS; part++) {
        weights.weight[part] = model->parts[layer][part].weight;
        weights.source[part] = model->parts[layer][part].source;
        weights.gradient[part] = model->parts[layer][part].gradient;
    }
    return weights;
}

/* A micro-batch of one rank's, into `gradient` of all parts. */
static float pass(reference_model *model, int step, int rank, int micro_batch, int accumulate) {
    const block_run run = {&model->options.shape, model->scratch, model->ranks->stream};
    const int first = model->options.frozen_layers;
    block blocks[MODEL_LAYERS_MAX];
    float loss;
    tn_tensor x = model_input(model->ranks, &run, step, rank, micro_batch);
    for (int layer = 0; layer < model->options.layers; layer++) {
        const block_weights weights = weights_of(model, layer, accumulate);
        x = block_forward(&run, &weights, model->scratch, x, &blocks[layer]);
    }
    tn_tensor dy = model_loss(model->ranks, &run, x, step, rank, micro_batch, &loss);
    for (int layer = model->options.layers - 1; layer >= first; layer--) {
        const block_weights weights = weights_of(model, layer, accumulate);
        dy = block_backward(&run, &weights, dy, layer > first, &blocks[layer]);
    }
    for (int layer = first - 1; layer >= 0; layer--)
        EXPECT_OK(tn_scope_close(blocks[layer].saved));
    return loss;
}

typedef void (*part_action)(const reference_model *model, reference_part *part, int argument);

static void each_trained(reference_model *model, part_action action, int argument) {
    for (int layer = 0; layer < model->options.layers; layer++)
        for (int part = 0; part < BLOCK_PARTS; part++)
            if (model->parts[layer][part].gradient.value)
                action(model, &model->parts[layer][part], argument);
}

/* Each rank's piece of a gradient is quantized by itself, along rows of 128, or as one row. */
static void pass_fp8(const reference_model *model, reference_part *part) {
    const ptrdiff_t index = part - &model->parts[0][0];
    const int layer = (int)(index / BLOCK_PARTS), number = (int)(index % BLOCK_PARTS);
    const tn_stream stream = model->ranks->stream;
    tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
    EXPECT_OK(tn_sharded_unit_info_get(model->pieces->sharded, layer, &unit));
    for (int rank = 0; rank < model->data_ranks; rank++) {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        tn_dequantize_args back = TN_DEQUANTIZE_ARGS_INIT;
        tn_shard_piece piece = TN_SHARD_PIECE_INIT;
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        tn_tensor column, rows;
        EXPECT_OK(tn_shard_piece_get(unit.plan, rank, number, &piece));
        if (piece.count == 0) continue;
        EXPECT_OK(tn_tensor_info_get(part->gradient, &info));
        const int64_t flat[2] = {info.rows * info.cols, 1};
        int64_t shape[2] = {1, piece.count};
        if (piece.count % 128 == 0) shape[0] = piece.count / 128, shape[1] = 128;
        EXPECT_OK(tn_tensor_view_shape(part->gradient, 2, flat, model->scope, &column));
        EXPECT_OK(tn_tensor_view_rows(column, piece.first, piece.count, model->scope, &rows));
        EXPECT_OK(tn_tensor_view_shape(rows, 2, shape, model->scope, &quantize.src));
        quantize.dst = back.src =
            made(model->scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, shape[0], shape[1], 0);
        EXPECT_OK(tn_quantize(&quantize, stream));
        back.dst = quantize.src;
        EXPECT_OK(tn_dequantize(&back, stream));
        EXPECT_OK(tn_tensor_destroy(quantize.dst, stream));
        EXPECT_OK(tn_tensor_destroy(quantize.src, stream));
        EXPECT_OK(tn_tensor_destroy(rows, stream));
        EXPECT_OK(tn_tensor_destroy(column, stream));
    }
}

/* What one more rank has, to what the ranks before it have. */
static void arrive(const reference_model *model, reference_part *part, int rank) {
    if (model->pieces) pass_fp8(model, part);
    if (rank == 0)
        convert(model, part->gradient, part->arrived);
    else
        add(model, part->gradient, part->arrived);
}

/* All ranks are there: rounded once to the type that is reduced in, which of FP8 is fp32, and added
 * to `total`. */
static void take_in(const reference_model *model, reference_part *part, int micro_batch) {
    const tn_tensor arrived = model->pieces ? part->arrived : part->gradient;
    if (!model->pieces) convert(model, part->arrived, part->gradient);
    if (micro_batch == 0)
        convert(model, arrived, part->total);
    else
        add(model, arrived, part->total);
}

static void add_up(reference_model *model, int step) {
    const int micro_batches = model->options.micro_batches;
    if (model->options.sum == TN_GRADIENT_SUM_WHOLE) {
        for (int rank = 0; rank < model->data_ranks; rank++) {
            for (int micro = 0; micro < micro_batches; micro++)
                model->loss[rank] = pass(model, step, rank, micro, micro > 0);
            each_trained(model, arrive, rank);
        }
        each_trained(model, take_in, 0);
        return;
    }
    for (int micro = 0; micro < micro_batches; micro++) {
        for (int rank = 0; rank < model->data_ranks; rank++) {
            model->loss[rank] = pass(model, step, rank, micro, 0);
            each_trained(model, arrive, rank);
        }
        each_trained(model, take_in, micro);
    }
}

static void send(const reference_model *model, tn_tensor tensor) {
    tn_plane_layout layout;
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_plane_layout_get(tensor, TN_PLANE_DATA, &layout));
    EXPECT_OK(
        tn_lease_begin(tensor, TN_PLANE_DATA, TN_UPDATE, model->ranks->stream, &lease, &view));
    EXPECT_OK(
        tn_broadcast(model->ranks->comm, view.data, layout.data_bytes, 0, model->ranks->stream));
    EXPECT_OK(tn_lease_end(lease));
}

static void send_total(const reference_model *model, reference_part *part, int argument) {
    (void)argument;
    send(model, part->total);
}

static void send_losses(reference_model *model) {
    tn_tensor losses = zeros(model, TN_FP32, 1, 8);
    EXPECT_OK(tn_plane_write(losses, TN_PLANE_DATA, model->loss, sizeof model->loss, NULL, 0,
                             model->ranks->stream));
    send(model, losses);
    EXPECT_OK(tn_plane_read(losses, TN_PLANE_DATA, model->loss, sizeof model->loss, NULL, 0,
                            model->ranks->stream));
    ranks_wait(model->ranks);
    EXPECT_OK(tn_tensor_destroy(losses, model->ranks->stream));
}

void reference_gradients(reference_model *model, int step) {
    if (model->ranks->rank == 0) add_up(model, step);
    each_trained(model, send_total, 0);
    send_losses(model);
}

/* ---- the update ------------------------------------------------------------------------------ */

static void square(const reference_model *model, reference_part *part, int argument) {
    tn_square_sums_args args = TN_SQUARE_SUMS_ARGS_INIT;
    (void)argument;
    args.x = part->total, args.sums = model->squares, args.accumulate = 1;
    EXPECT_OK(tn_square_sums(&args, model->ranks->stream));
}

static void make_factor(reference_model *model) {
    tn_clip_factor_args args = TN_CLIP_FACTOR_ARGS_INIT;
    EXPECT_OK(tn_plane_fill(model->squares, TN_PLANE_DATA, 0, model->ranks->stream));
    if (model->options.max_norm > 0.0f) each_trained(model, square, 0);
    args.sums = model->squares;
    args.scale = 1.0f / ((float)model->data_ranks * (float)model->options.micro_batches);
    args.max_norm = model->options.max_norm > 0.0f ? model->options.max_norm : INFINITY;
    args.norm = model->norm, args.factor = model->factor;
    EXPECT_OK(tn_clip_factor(&args, model->ranks->stream));
}

static void step_part(const reference_model *model, reference_part *part, int argument) {
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    (void)argument;
    args.master = part->master, args.gradient = part->total;
    args.first = part->first, args.second = part->second;
    args.step = model->step;
    args.learning_rate = 0x1p-8f;
    args.gradient_scale = model->factor;
    EXPECT_OK(tn_adamw(&args, model->ranks->stream));
    cast(model, part);
}

/* On every rank: it is cheap, and all have the gradients. */
void reference_update(reference_model *model) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    make_factor(model);
    advance.step = model->step;
    EXPECT_OK(tn_adamw_advance(&advance, model->ranks->stream));
    each_trained(model, step_part, 0);
}

/* ---- compared -------------------------------------------------------------------------------- */

static float *read_floats(const rank_fixture *ranks, tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    const size_t count = (size_t)(info.rows * info.cols);
    float *values = malloc(count * sizeof *values + 1);
    uint16_t *narrow = malloc(count * sizeof *narrow + 1);
    assert_true(values && narrow);
    const int is_fp32 = info.dtype == TN_FP32;
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, is_fp32 ? (void *)values : (void *)narrow,
                            count * (is_fp32 ? sizeof *values : sizeof *narrow), NULL, 0,
                            ranks->stream));
    EXPECT_OK(tn_stream_synchronize(ranks->device, ranks->stream));
    for (size_t i = 0; !is_fp32 && i < count; i++) {
        const uint32_t bits = (uint32_t)narrow[i] << 16;
        memcpy(&values[i], &bits, sizeof bits);
    }
    free(narrow);
    return values;
}

/* Of this rank's elements; `wants_bits`: it fails at the first that differs. */
static float compare(const test_model *model, const reference_model *reference, int of_masters,
                     int wants_bits, size_t *compared) {
    float worst = 0.0f;
    for (int layer = 0; layer < model->options.layers; layer++) {
        tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
        EXPECT_OK(tn_sharded_unit_info_get(model->sharded, layer, &unit));
        const tn_tensor packed = of_masters ? unit.master : unit.gradient;
        if (packed.value == 0) continue;
        float *actual = read_floats(model->ranks, packed);
        for (int part = 0; part < BLOCK_PARTS; part++) {
            tn_shard_piece piece = TN_SHARD_PIECE_INIT;
            const reference_part *of = &reference->parts[layer][part];
            if (of->gradient.value == 0) continue;
            EXPECT_OK(tn_shard_piece_get(unit.plan, model->ranks->rank, part, &piece));
            float *expected = read_floats(model->ranks, of_masters ? of->master : of->total);
            for (int64_t i = 0; i < piece.count; i++) {
                const float a = actual[piece.packed_first + i], e = expected[piece.first + i];
                if (wants_bits && memcmp(&a, &e, sizeof a) != 0)
                    fail_msg("rank %d, layer %d, %s, element %lld: %a, expected %a",
                             model->ranks->rank, layer, block_part_name(part),
                             (long long)(piece.first + i), (double)a, (double)e);
                if (!(fabsf(a - e) <= worst)) worst = fabsf(a - e);
            }
            *compared += (size_t)piece.count;
            free(expected);
        }
        free(actual);
    }
    return worst;
}

size_t model_compare_gradients(const test_model *model, const reference_model *reference) {
    size_t compared = 0;
    ranks_wait(model->ranks);
    EXPECT_OK(tn_comm_wait(model->comm));
    (void)compare(model, reference, 0, 1, &compared);
    return compared;
}

size_t model_compare_masters(const test_model *model, const reference_model *reference) {
    size_t compared = 0;
    ranks_wait(model->ranks);
    (void)compare(model, reference, 1, 1, &compared);
    return compared;
}

float model_master_distance(const test_model *model, const reference_model *reference) {
    size_t compared = 0;
    ranks_wait(model->ranks);
    return compare(model, reference, 1, 0, &compared);
}
