/* Building and taking apart the demo's model: see demo_model.h.
 *
 * Invariant: every tensor handle that is not {0} lives in one of the model's scopes, so closing
 * the root scope ends all of them.
 */
#include "demo_model.h"

#include <stdio.h>
#include <stdlib.h>

#include "random_fill.h"

static tn_status make_scope(tn_scope parent, tn_pool *pool, tn_scope_kind kind, const char *name,
                            tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.pool = pool;
    config.parent = parent;
    config.kind = kind;
    config.name = name;
    return tn_scope_create(&config, out);
}

static tn_status make_scopes(demo_model *model) {
    const tn_scope none = {0};
    DEMO_TRY(make_scope(none, model->pool, TN_SCOPE_PROCESS, "demo", &model->root));
    DEMO_TRY(make_scope(model->root, NULL, TN_SCOPE_MODEL, "frozen weights", &model->frozen));
    DEMO_TRY(make_scope(model->root, NULL, TN_SCOPE_MODEL, "embedding, head", &model->edges));
    DEMO_TRY(make_scope(model->root, NULL, TN_SCOPE_MODEL, "adapters", &model->trained));
    DEMO_TRY(make_scope(model->root, NULL, TN_SCOPE_SAVED, "saved for backward", &model->saved));
    return make_scope(model->root, NULL, TN_SCOPE_STEP, "step scratch", &model->scratch);
}

static tn_status make_matrix(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                             const char *name, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = 2;
    config.shape[0] = rows;
    config.shape[1] = cols;
    config.name = name;
    return tn_tensor_create(scope, &config, out);
}

/* A bf16 matrix of random values; the host copy lives until the stream has taken it. */
static tn_status make_random(demo_model *model, tn_scope scope, int64_t rows, int64_t cols,
                             float deviation, uint64_t seed, const char *name, tn_tensor *out) {
    size_t bytes = (size_t)rows * (size_t)cols * sizeof(uint16_t);
    uint16_t *values = malloc(bytes);
    if (!values) return TN_OUT_OF_HOST_MEMORY;
    random_fill_bf16(values, (size_t)rows * (size_t)cols, deviation, seed);
    tn_status status = make_matrix(scope, TN_BF16, rows, cols, name, out);
    if (status == TN_OK) {
        status = tn_plane_write(*out, TN_PLANE_DATA, values, bytes, NULL, 0, model->stream);
    }
    tn_status synchronized = tn_stream_synchronize(model->device, model->stream);
    free(values);
    return status != TN_OK ? status : synchronized;
}

static tn_status make_frozen_weight(demo_model *model, int layer, tn_plane_policy policy) {
    const int64_t hidden = model->shape.hidden;
    /* Each layer adds about a quarter of its input's length: 16 layers stay near it. */
    const float deviation = random_deviation_of_gain(0.25f, hidden);
    tn_tensor source = {0};
    DEMO_TRY(make_random(model, model->scratch, hidden, hidden, deviation, 1000 + (uint64_t)layer,
                         "weight source", &source));
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    char name[32];
    snprintf(name, sizeof name, "weight %d", layer);
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = config.shape[1] = hidden;
    config.policy = policy;
    config.frozen = 1;
    config.name = name;
    DEMO_TRY(tn_tensor_create(model->frozen, &config, &model->weights[layer]));
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    quantize.src = source;
    quantize.dst = model->weights[layer];
    quantize.planes = TN_QUANTIZE_ROW | (policy == TN_POLICY_KEEP ? TN_QUANTIZE_COL : 0u);
    DEMO_TRY(tn_quantize(&quantize, model->stream));
    return tn_tensor_destroy(source, model->stream);
}

static tn_status make_master(demo_model *model, tn_tensor copy, int64_t rows, int64_t cols,
                             const char *name, tn_tensor *master, tn_tensor *grad) {
    DEMO_TRY(make_matrix(model->trained, TN_FP32, rows, cols, name, master));
    DEMO_TRY(make_matrix(model->trained, TN_FP32, rows, cols, "gradient", grad));
    DEMO_TRY(tn_plane_make(*grad, TN_PLANE_DATA, model->stream));
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    convert.x = copy;
    convert.y = *master;
    return tn_convert(&convert, model->stream);
}

static tn_status make_adapter(demo_model *model, int index) {
    const int64_t hidden = model->shape.hidden, rank = model->shape.rank;
    demo_adapter *adapter = &model->adapters[index];
    const uint64_t seed = 5000 + 2 * (uint64_t)index;
    DEMO_TRY(make_random(model, model->trained, rank, hidden,
                         random_deviation_of_gain(1.0f, hidden), seed, "adapter A", &adapter->a));
    DEMO_TRY(make_random(model, model->trained, hidden, rank, random_deviation_of_gain(0.1f, rank),
                         seed + 1, "adapter B", &adapter->b));
    DEMO_TRY(make_master(model, adapter->a, rank, hidden, "master A", &adapter->master_a,
                         &adapter->grad_a));
    return make_master(model, adapter->b, hidden, rank, "master B", &adapter->master_b,
                       &adapter->grad_b);
}

static tn_status make_all(demo_model *model, tn_plane_policy policy) {
    const int64_t hidden = model->shape.hidden;
    DEMO_TRY(make_scopes(model));
    DEMO_TRY(make_random(model, model->edges, 256, hidden, 1.0f, 1, "embedding", &model->table));
    DEMO_TRY(make_random(model, model->edges, 256, hidden, random_deviation_of_gain(1.0f, hidden),
                         2, "head", &model->head));
    for (int i = 0; i < model->shape.layers; i++)
        DEMO_TRY(make_frozen_weight(model, i, policy));
    for (int i = 0; i <= model->shape.layers; i++)
        DEMO_TRY(make_adapter(model, i));
    return tn_stream_synchronize(model->device, model->stream);
}

tn_status demo_model_create(demo_model *model, tn_device *device, tn_pool *pool, tn_stream stream,
                            tn_stream side, const demo_shape *shape, tn_plane_policy policy) {
    *model = (demo_model){
        .shape = *shape, .device = device, .pool = pool, .stream = stream, .side = side};
    model->weights = calloc((size_t)shape->layers, sizeof *model->weights);
    model->adapters = calloc((size_t)shape->layers + 1, sizeof *model->adapters);
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    if (model->weights && model->adapters) status = make_all(model, policy);
    if (status != TN_OK) (void)demo_model_destroy(model);
    return status;
}

tn_status demo_model_destroy(demo_model *model) {
    tn_status status = tn_scope_close(model->root);
    free(model->weights);
    free(model->adapters);
    *model = (demo_model){0};
    return status;
}

size_t demo_model_gradient_count(const demo_model *model) {
    const size_t adapters = (size_t)model->shape.layers + 1;
    return adapters * 2 * (size_t)model->shape.rank * (size_t)model->shape.hidden;
}

tn_status demo_model_read_gradients(const demo_model *model, float *out) {
    const size_t count = (size_t)model->shape.rank * (size_t)model->shape.hidden;
    for (int i = 0; i <= model->shape.layers; i++) {
        const demo_adapter *adapter = &model->adapters[i];
        DEMO_TRY(tn_plane_read(adapter->grad_a, TN_PLANE_DATA, out, count * sizeof(float), NULL, 0,
                               model->stream));
        DEMO_TRY(tn_plane_read(adapter->grad_b, TN_PLANE_DATA, out + count, count * sizeof(float),
                               NULL, 0, model->stream));
        out += 2 * count;
    }
    return tn_stream_synchronize(model->device, model->stream);
}

tn_status demo_model_columnwise_bytes(const demo_model *model, size_t *out) {
    tn_ledger ledger = TN_LEDGER_INIT;
    DEMO_TRY(tn_scope_ledger(model->frozen, &ledger));
    *out = ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
    return TN_OK;
}

/* hidden^2 elements of a byte, and a float for each 128 x 128, rows of them padded to 4. */
size_t demo_model_columnwise_bytes_of_one(const demo_shape *shape) {
    const size_t hidden = (size_t)shape->hidden, tiles = (hidden + 127) / 128;
    return hidden * hidden + tiles * ((tiles + 3) / 4 * 4) * sizeof(float);
}
