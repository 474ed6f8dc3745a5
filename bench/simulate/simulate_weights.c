/* The units of a rank: see simulate_weights.h. */
#include "simulate_weights.h"

#include <stdlib.h>

/* ---- what a layer has ------------------------------------------------------------------------ */

static simulate_shape shape_of(const simulate_model *model, const simulate_layer *layer,
                               simulate_part part) {
    const int64_t heads = model->heads / model->tp * model->head_dim;
    const int64_t heads_kv = model->heads_kv / model->tp * model->head_dim;
    const int is_low = model->kv_rank > 0, dense = !layer->has_experts;
    const int64_t shared = dense ? 0 : model->shared_ffn / model->tp;
    const int64_t ffn = dense ? model->ffn / model->tp : 0, hidden = model->hidden;
    const int fp8 = (int)model->fp8, frozen = layer->is_frozen;
    const int64_t low = model->query_rank + model->kv_rank;
    switch (part) {
    case SIMULATE_GAIN_1: return (simulate_shape){hidden, 0, 0, frozen, "gain 1"};
    case SIMULATE_GAIN_2: return (simulate_shape){hidden, 0, 0, frozen, "gain 2"};
    case SIMULATE_QKV:
        return (simulate_shape){is_low ? low : heads + 2 * heads_kv, hidden, fp8, frozen, "qkv"};
    case SIMULATE_QUERY_UP:
        return (simulate_shape){is_low ? heads : 0, model->query_rank, fp8, frozen, "query up"};
    case SIMULATE_KV_UP:
        return (simulate_shape){is_low ? 2 * heads_kv : 0, model->kv_rank, fp8, frozen, "kv up"};
    case SIMULATE_PROJECTION: return (simulate_shape){hidden, heads, fp8, frozen, "projection"};
    case SIMULATE_UP: return (simulate_shape){2 * ffn, hidden, fp8, frozen, "up"};
    case SIMULATE_DOWN: return (simulate_shape){ffn ? hidden : 0, ffn, fp8, frozen, "down"};
    case SIMULATE_ROUTER:
        return (simulate_shape){dense ? 0 : model->experts, hidden, 0, frozen, "router"};
    case SIMULATE_SHARED_UP: return (simulate_shape){2 * shared, hidden, fp8, frozen, "shared up"};
    default: return (simulate_shape){shared ? hidden : 0, shared, fp8, frozen, "shared down"};
    }
}

static int add_layer(const simulate_model *model, simulate_layer *layer) {
    layer->unit.name = "layer";
    layer->unit.group = SIMULATE_GROUP_DATA;
    for (int i = 0; i < SIMULATE_PART_COUNT; i++) {
        const simulate_shape shape = shape_of(model, layer, (simulate_part)i);
        if (shape.rows && !simulate_unit_add(&layer->unit, &shape, &layer->parts[i])) return 0;
    }
    return 1;
}

static int add_experts(const simulate_model *model, simulate_layer *layer) {
    const int64_t count = model->experts / model->ep;
    const int fp8 = (int)model->fp8, frozen = layer->is_frozen;
    const simulate_shape up = {2 * model->expert_ffn, model->hidden, fp8, frozen, "expert up"};
    const simulate_shape down = {model->hidden, model->expert_ffn, fp8, frozen, "expert down"};
    if (!layer->has_experts) return 1;
    layer->experts.name = "experts";
    layer->experts.group = SIMULATE_GROUP_EXPERT_DATA;
    layer->expert_up = calloc((size_t)count, sizeof *layer->expert_up);
    layer->expert_down = calloc((size_t)count, sizeof *layer->expert_down);
    if (!layer->expert_up || !layer->expert_down) return 0;
    for (int64_t i = 0; i < count; i++) {
        if (!simulate_unit_add(&layer->experts, &up, &layer->expert_up[i])) return 0;
        if (!simulate_unit_add(&layer->experts, &down, &layer->expert_down[i])) return 0;
    }
    return 1;
}

/* Of bytes every rank has all rows; a larger vocabulary is cut. */
static int64_t vocabulary_rows(const simulate_model *model) {
    return model->vocabulary > 256 ? model->vocabulary / model->tp : 256;
}

static int add_ends(simulate_rank *rank) {
    const simulate_model *model = rank->model;
    const simulate_shape table = {vocabulary_rows(model), model->hidden, 0, 0, "embedding"};
    const simulate_shape head = {vocabulary_rows(model), model->hidden, 0, 0, "head"};
    const simulate_shape gain = {model->hidden, 0, 0, 0, "last gain"};
    rank->table_unit = (simulate_unit){.name = "embedding", .group = SIMULATE_GROUP_DATA};
    rank->head_unit = (simulate_unit){.name = "head", .group = SIMULATE_GROUP_DATA};
    if (simulate_is_first(rank) && !simulate_unit_add(&rank->table_unit, &table, &rank->table))
        return 0;
    if (!simulate_is_last(rank)) return 1;
    return simulate_unit_add(&rank->head_unit, &gain, &rank->last_gain) &&
           simulate_unit_add(&rank->head_unit, &head, &rank->head);
}

/* ---- making ---------------------------------------------------------------------------------- */

static tn_status open_ring(simulate_rank *rank, simulate_group group) {
    tn_ring_config config = TN_RING_CONFIG_INIT;
    if (simulate_group_size(rank->model, group) == 1) return TN_OK;
    config.scope = rank->owners[SIMULATE_OWNER_RING];
    config.comm = rank->groups[group];
    config.stream = rank->side;
    config.name = simulate_group_name(group);
    return tn_ring_create(&config, &rank->rings[group]);
}

static tn_status make_units(simulate_rank *rank) {
    if (rank->table_unit.count) SIMULATE_TRY(simulate_unit_make(rank, &rank->table_unit));
    for (int64_t i = 0; i < rank->layer_count; i++) {
        simulate_layer *layer = &rank->layers[i];
        SIMULATE_TRY(simulate_unit_make(rank, &layer->unit));
        if (layer->has_experts) SIMULATE_TRY(simulate_unit_make(rank, &layer->experts));
    }
    return rank->head_unit.count ? simulate_unit_make(rank, &rank->head_unit) : TN_OK;
}

tn_status simulate_weights_make(simulate_rank *rank) {
    int is_added = add_ends(rank);
    for (int64_t i = 0; is_added && i < rank->layer_count; i++) {
        is_added =
            add_layer(rank->model, &rank->layers[i]) && add_experts(rank->model, &rank->layers[i]);
    }
    if (!is_added) return TN_OUT_OF_HOST_MEMORY;
    SIMULATE_TRY(open_ring(rank, SIMULATE_GROUP_DATA));
    if (rank->model->experts) SIMULATE_TRY(open_ring(rank, SIMULATE_GROUP_EXPERT_DATA));
    SIMULATE_TRY(make_units(rank));
    for (int i = 0; i < SIMULATE_GROUP_COUNT; i++) {
        if (rank->rings[i]) SIMULATE_TRY(tn_ring_seal(rank->rings[i]));
    }
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_OPTIMIZER, TN_FP32, 3, 0, "step", &rank->step));
    SIMULATE_TRY(tn_plane_fill(rank->step, TN_PLANE_DATA, 0, rank->stream));
    return tn_scope_scratch_reserve(rank->owners[SIMULATE_OWNER_COLUMNS], rank->stream);
}

/* ---- around a layer -------------------------------------------------------------------------- */

tn_status simulate_layer_begin(simulate_rank *rank, simulate_layer *layer, simulate_layer *next,
                               int is_backward) {
    simulate_unit *next_experts = next && next->has_experts ? &next->experts : NULL;
    SIMULATE_TRY(simulate_unit_begin(rank, &layer->unit, next ? &next->unit : NULL, is_backward));
    if (!layer->has_experts) return TN_OK;
    return simulate_unit_begin(rank, &layer->experts, next_experts, is_backward);
}

tn_status simulate_layer_end(simulate_rank *rank, simulate_layer *layer, int is_backward) {
    if (layer->has_experts) SIMULATE_TRY(simulate_unit_end(rank, &layer->experts, is_backward));
    return simulate_unit_end(rank, &layer->unit, is_backward);
}

/* ---- the optimizer --------------------------------------------------------------------------- */

tn_status simulate_weights_update(simulate_rank *rank) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    advance.step = rank->step;
    SIMULATE_TRY(tn_adamw_advance(&advance, rank->stream));
    if (rank->table_unit.count) SIMULATE_TRY(simulate_unit_update(rank, &rank->table_unit));
    for (int64_t i = 0; i < rank->layer_count; i++) {
        simulate_layer *layer = &rank->layers[i];
        SIMULATE_TRY(simulate_unit_update(rank, &layer->unit));
        if (layer->has_experts) SIMULATE_TRY(simulate_unit_update(rank, &layer->experts));
    }
    if (rank->head_unit.count) SIMULATE_TRY(simulate_unit_update(rank, &rank->head_unit));
    return simulate_mark(rank, "update", -1);
}

void simulate_weights_end(simulate_rank *rank) {
    for (int64_t i = 0; i < rank->layer_count; i++) {
        simulate_unit_free(&rank->layers[i].unit);
        simulate_unit_free(&rank->layers[i].experts);
        free(rank->layers[i].expert_up);
        free(rank->layers[i].expert_down);
    }
    simulate_unit_free(&rank->table_unit);
    simulate_unit_free(&rank->head_unit);
}

/* ---- ranks that are alike -------------------------------------------------------------------- */

/* Takes in what each rank of the stage has of the unit: bytes of its shard, and elements. */
static tn_status mix_shares(const simulate_unit *unit, const simulate_model *model,
                            uint64_t *shares) {
    tn_shard_plan *plan;
    tn_status status = TN_OK;
    const int ranks = simulate_group_size(model, unit->group);
    if (unit->count == 0 || ranks == 1) return TN_OK;
    SIMULATE_TRY(simulate_unit_plan(unit, ranks, &plan));
    for (int within = 0; status == TN_OK && within < simulate_ranks_of_stage(model); within++) {
        const int own = simulate_group_rank(model, unit->group, within);
        size_t bytes = 0;
        int64_t packed = 0;
        status = tn_shard_bytes(plan, own, &bytes);
        if (status == TN_OK) status = tn_shard_packed_elements(plan, own, &packed);
        shares[within] = (shares[within] * 1000003 + bytes) * 1000003 + (uint64_t)packed;
    }
    tn_shard_plan_destroy(plan);
    return status;
}

/* Layers of one kind have one plan. */
static tn_status mix_layers(simulate_rank *rank, uint64_t *shares) {
    unsigned seen = 0;
    for (int64_t i = 0; i < rank->layer_count; i++) {
        simulate_layer *layer = &rank->layers[i];
        const unsigned kind = 1u << (2 * layer->has_experts + layer->is_frozen);
        if (seen & kind) continue;
        seen |= kind;
        if (!add_layer(rank->model, layer) || !add_experts(rank->model, layer))
            return TN_OUT_OF_HOST_MEMORY;
        SIMULATE_TRY(mix_shares(&layer->unit, rank->model, shares));
        SIMULATE_TRY(mix_shares(&layer->experts, rank->model, shares));
    }
    return TN_OK;
}

tn_status simulate_weights_shares(const simulate_job *job, int stage, uint64_t *shares) {
    simulate_rank rank = {.job = job, .model = &job->model, .stage = stage};
    tn_status status = simulate_layers_open(&rank);
    for (int64_t i = 0; i < simulate_ranks_of_stage(rank.model); i++)
        shares[i] = 0;
    if (status == TN_OK && !add_ends(&rank)) status = TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK) status = mix_shares(&rank.table_unit, rank.model, shares);
    if (status == TN_OK) status = mix_shares(&rank.head_unit, rank.model, shares);
    if (status == TN_OK) status = mix_layers(&rank, shares);
    simulate_weights_end(&rank);
    free(rank.layers);
    return status;
}
