/* The weights of a rank: see simulate_weights.h.
 *
 * What a weight holds at first does not matter to a simulation, but on the host driver it is
 * multiplied: masters are filled with a byte that is a small number in fp32.
 */
#include "simulate_weights.h"

#include <stdlib.h>

enum { SMALL_BYTE = 0x3c, GAIN_BYTE = 0x3f }; /* 0.0115 and 0.747 as four of them */

/* ---- what a layer has ------------------------------------------------------------------------ */

typedef struct weight_shape {
    int64_t rows, cols; /* cols 0: a vector of gains; rows 0: there is none such */
    int is_quantized;
    const char *name;
} weight_shape;

static weight_shape shape_of(const simulate_rank *rank, const simulate_layer *layer,
                             simulate_part part) {
    const simulate_model *model = rank->model;
    const int64_t heads = model->heads / model->tp * model->head_dim;
    const int64_t heads_kv = model->heads_kv / model->tp * model->head_dim;
    const int is_low = model->kv_rank > 0, dense = !layer->has_experts;
    const int64_t shared = dense ? 0 : model->shared_ffn / model->tp;
    const int64_t ffn = dense ? model->ffn / model->tp : 0, hidden = model->hidden;
    const int fp8 = (int)model->fp8;
    switch (part) {
    case SIMULATE_GAIN_1: return (weight_shape){hidden, 0, 0, "gain 1"};
    case SIMULATE_GAIN_2: return (weight_shape){hidden, 0, 0, "gain 2"};
    case SIMULATE_QKV:
        return (weight_shape){is_low ? model->query_rank + model->kv_rank : heads + 2 * heads_kv,
                              hidden, fp8, "qkv"};
    case SIMULATE_QUERY_UP:
        return (weight_shape){is_low ? heads : 0, model->query_rank, fp8, "query up"};
    case SIMULATE_KV_UP:
        return (weight_shape){is_low ? 2 * heads_kv : 0, model->kv_rank, fp8, "kv up"};
    case SIMULATE_PROJECTION: return (weight_shape){hidden, heads, fp8, "projection"};
    case SIMULATE_UP: return (weight_shape){2 * ffn, hidden, fp8, "up"};
    case SIMULATE_DOWN: return (weight_shape){ffn ? hidden : 0, ffn, fp8, "down"};
    case SIMULATE_ROUTER: return (weight_shape){dense ? 0 : model->experts, hidden, 0, "router"};
    case SIMULATE_SHARED_UP: return (weight_shape){2 * shared, hidden, fp8, "shared up"};
    default: return (weight_shape){shared ? hidden : 0, shared, fp8, "shared down"};
    }
}

/* ---- making ---------------------------------------------------------------------------------- */

static tn_status make_filled(const simulate_rank *rank, simulate_owner owner,
                             const weight_shape *shape, unsigned char byte, tn_tensor *out) {
    SIMULATE_TRY(simulate_make(rank, owner, TN_FP32, shape->rows, shape->cols, shape->name, out));
    return tn_plane_fill(*out, TN_PLANE_DATA, byte, rank->stream);
}

static tn_status make_quantized(const simulate_rank *rank, const weight_shape *shape, int is_frozen,
                                simulate_weight *weight) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = shape->rows;
    config.shape[1] = shape->cols;
    config.policy = TN_POLICY_SCRATCH;
    config.frozen = is_frozen;
    config.name = shape->name;
    SIMULATE_TRY(tn_tensor_create(rank->owners[SIMULATE_OWNER_WEIGHTS], &config, &weight->value));
    quantize.src = weight->master;
    quantize.dst = weight->value;
    return tn_quantize(&quantize, rank->stream);
}

static tn_status make_value(const simulate_rank *rank, const weight_shape *shape, int is_frozen,
                            simulate_weight *weight) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    if (shape->is_quantized) return make_quantized(rank, shape, is_frozen, weight);
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_WEIGHTS, simulate_dtype(), shape->rows,
                               shape->cols, shape->name, &weight->value));
    if (is_frozen) SIMULATE_TRY(tn_tensor_set_frozen(weight->value, 1));
    convert.x = weight->master;
    convert.y = weight->value;
    return tn_convert(&convert, rank->stream);
}

static tn_status make_weight(const simulate_rank *rank, const weight_shape *shape, int is_frozen,
                             simulate_weight *weight) {
    const int is_gain = !shape->cols;
    if (!shape->rows) return TN_OK;
    SIMULATE_TRY(make_filled(rank, is_gain ? SIMULATE_OWNER_WEIGHTS : SIMULATE_OWNER_OPTIMIZER,
                             shape, is_gain ? GAIN_BYTE : SMALL_BYTE, &weight->master));
    if (is_gain) weight->value = weight->master;
    if (!is_gain) SIMULATE_TRY(make_value(rank, shape, is_frozen, weight));
    if (is_frozen) return is_gain ? TN_OK : simulate_drop(rank, &weight->master);
    SIMULATE_TRY(make_filled(rank, SIMULATE_OWNER_GRADIENTS, shape, 0, &weight->gradient));
    SIMULATE_TRY(make_filled(rank, SIMULATE_OWNER_OPTIMIZER, shape, 0, &weight->first));
    return make_filled(rank, SIMULATE_OWNER_OPTIMIZER, shape, 0, &weight->second);
}

static tn_status make_experts(const simulate_rank *rank, simulate_layer *layer) {
    const simulate_model *model = rank->model;
    const int fp8 = (int)model->fp8;
    const weight_shape up = {2 * model->expert_ffn, model->hidden, fp8, "expert up"};
    const weight_shape down = {model->hidden, model->expert_ffn, fp8, "expert down"};
    layer->expert_up = calloc((size_t)rank->local_experts, sizeof *layer->expert_up);
    layer->expert_down = calloc((size_t)rank->local_experts, sizeof *layer->expert_down);
    if (!layer->expert_up || !layer->expert_down) return TN_OUT_OF_HOST_MEMORY;
    for (int64_t i = 0; i < rank->local_experts; i++) {
        SIMULATE_TRY(make_weight(rank, &up, layer->is_frozen, &layer->expert_up[i]));
        SIMULATE_TRY(make_weight(rank, &down, layer->is_frozen, &layer->expert_down[i]));
    }
    return TN_OK;
}

static tn_status make_layer(const simulate_rank *rank, simulate_layer *layer) {
    for (int i = 0; i < SIMULATE_PART_COUNT; i++) {
        const weight_shape shape = shape_of(rank, layer, (simulate_part)i);
        SIMULATE_TRY(make_weight(rank, &shape, layer->is_frozen, &layer->parts[i]));
    }
    return layer->has_experts ? make_experts(rank, layer) : TN_OK;
}

/* Of bytes every rank has all rows; a larger vocabulary is cut. */
static int64_t vocabulary_rows(const simulate_model *model) {
    return model->vocabulary > 256 ? model->vocabulary / model->tp : 256;
}

tn_status simulate_weights_make(simulate_rank *rank) {
    const simulate_model *model = rank->model;
    const weight_shape table = {vocabulary_rows(model), model->hidden, 0, "embedding"};
    const weight_shape head = {vocabulary_rows(model), model->hidden, 0, "head"};
    const weight_shape gain = {model->hidden, 0, 0, "last gain"};
    if (simulate_is_first(rank)) SIMULATE_TRY(make_weight(rank, &table, 0, &rank->table));
    for (int64_t i = 0; i < rank->layer_count; i++)
        SIMULATE_TRY(make_layer(rank, &rank->layers[i]));
    if (simulate_is_last(rank)) {
        SIMULATE_TRY(make_weight(rank, &gain, 0, &rank->last_gain));
        SIMULATE_TRY(make_weight(rank, &head, 0, &rank->head));
    }
    const weight_shape step = {3, 0, 0, "step"};
    SIMULATE_TRY(make_filled(rank, SIMULATE_OWNER_OPTIMIZER, &step, 0, &rank->step));
    return tn_scope_scratch_reserve(rank->owners[SIMULATE_OWNER_COLUMNS], rank->stream);
}

/* ---- around a layer -------------------------------------------------------------------------- */

tn_status simulate_unit_begin(simulate_rank *rank, simulate_layer *layer, int is_backward) {
    (void)rank;
    (void)layer;
    (void)is_backward;
    return TN_OK;
}

tn_status simulate_unit_end(simulate_rank *rank, simulate_layer *layer, int is_backward) {
    (void)rank;
    (void)layer;
    (void)is_backward;
    return TN_OK;
}

/* ---- the optimizer --------------------------------------------------------------------------- */

static tn_status update(const simulate_rank *rank, const simulate_weight *weight) {
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    if (!weight->gradient.value) return TN_OK;
    SIMULATE_TRY(tn_tensor_info_get(weight->value, &info));
    args.master = weight->master;
    args.gradient = weight->gradient;
    args.first = weight->first;
    args.second = weight->second;
    args.step = rank->step;
    if (info.format != TN_FORMAT_PLAIN)
        args.weight = weight->value;
    else if (weight->value.value != weight->master.value)
        args.plain = weight->value;
    return tn_adamw(&args, rank->stream);
}

static tn_status update_layer(const simulate_rank *rank, const simulate_layer *layer) {
    for (int i = 0; i < SIMULATE_PART_COUNT; i++)
        SIMULATE_TRY(update(rank, &layer->parts[i]));
    for (int64_t i = 0; layer->has_experts && i < rank->local_experts; i++) {
        SIMULATE_TRY(update(rank, &layer->expert_up[i]));
        SIMULATE_TRY(update(rank, &layer->expert_down[i]));
    }
    return TN_OK;
}

tn_status simulate_weights_update(simulate_rank *rank) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    advance.step = rank->step;
    SIMULATE_TRY(tn_adamw_advance(&advance, rank->stream));
    SIMULATE_TRY(update(rank, &rank->table));
    for (int64_t i = 0; i < rank->layer_count; i++)
        SIMULATE_TRY(update_layer(rank, &rank->layers[i]));
    SIMULATE_TRY(update(rank, &rank->last_gain));
    SIMULATE_TRY(update(rank, &rank->head));
    return simulate_mark(rank, "update", -1);
}

void simulate_weights_end(simulate_rank *rank) {
    for (int64_t i = 0; i < rank->layer_count; i++) {
        free(rank->layers[i].expert_up);
        free(rank->layers[i].expert_down);
    }
}

int simulate_ranks_are_alike(const simulate_job *job, int stage, int dp_rank, int other) {
    (void)job, (void)stage, (void)dp_rank, (void)other;
    return 1;
}
