/* What stays alive where a lifetime is as it was: see simulate_kept.h. */
#include "simulate_kept.h"

/* ---- scopes of a layer ----------------------------------------------------------------------- */

/* Visits every weight of the layer that is quantized. */
typedef tn_status (*weight_visit)(simulate_rank *rank, tn_scope scope,
                                  const tn_tensor_info *weight);

static tn_status visit_weight(simulate_rank *rank, const simulate_weight *weight, tn_scope scope,
                              weight_visit visit) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    if (!weight->value.value) return TN_OK;
    SIMULATE_TRY(tn_tensor_info_get(weight->value, &info));
    return info.format == TN_FORMAT_FP8_BLOCK_2D ? visit(rank, scope, &info) : TN_OK;
}

static tn_status visit_weights(simulate_rank *rank, const simulate_layer *layer, tn_scope scope,
                               weight_visit visit) {
    for (int i = 0; i < SIMULATE_PART_COUNT; i++)
        SIMULATE_TRY(visit_weight(rank, &layer->parts[i], scope, visit));
    for (int64_t i = 0; layer->has_experts && i < rank->local_experts; i++) {
        SIMULATE_TRY(visit_weight(rank, &layer->expert_up[i], scope, visit));
        SIMULATE_TRY(visit_weight(rank, &layer->expert_down[i], scope, visit));
    }
    return TN_OK;
}

static tn_status open_scope(tn_scope parent, const char *name, tn_scope *out) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = parent;
    config.kind = TN_SCOPE_LAYER;
    config.name = name;
    return tn_scope_create(&config, out);
}

static tn_status close_scope(tn_scope *scope) {
    SIMULATE_TRY(tn_scope_close(*scope));
    *scope = (tn_scope){0};
    return TN_OK;
}

/* A copy of one plane, as large as the weight's own. */
static tn_status keep_plane(simulate_rank *rank, tn_scope scope, const tn_tensor_info *weight,
                            tn_plane plane) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor copy;
    config.format = weight->format;
    config.dtype = weight->dtype;
    config.rank = 2;
    config.shape[0] = weight->rows;
    config.shape[1] = weight->cols;
    config.policy = TN_POLICY_KEEP;
    config.name = weight->name;
    SIMULATE_TRY(tn_tensor_create(scope, &config, &copy));
    return tn_plane_make(copy, plane, rank->stream);
}

static tn_status keep_row(simulate_rank *rank, tn_scope scope, const tn_tensor_info *weight) {
    return keep_plane(rank, scope, weight, TN_PLANE_ROW);
}

static tn_status keep_column(simulate_rank *rank, tn_scope scope, const tn_tensor_info *weight) {
    return keep_plane(rank, scope, weight, TN_PLANE_COL);
}

/* ---- L2 and L1 ------------------------------------------------------------------------------- */

tn_status simulate_kept_forward(simulate_rank *rank, simulate_layer *layer) {
    if (rank->job->lifetimes.planes_by_use) return TN_OK;
    if (!layer->is_frozen && layer->kept_columns.value)
        SIMULATE_TRY(close_scope(&layer->kept_columns));
    if (layer->kept_rows.value) return TN_OK;
    SIMULATE_TRY(open_scope(rank->owners[SIMULATE_OWNER_L2], "rows of a layer", &layer->kept_rows));
    return visit_weights(rank, layer, layer->kept_rows, keep_row);
}

static tn_status keep_columns(simulate_rank *rank, simulate_layer *layer, simulate_owner owner) {
    if (layer->kept_columns.value) return TN_OK;
    SIMULATE_TRY(open_scope(rank->owners[owner], "columns of a layer", &layer->kept_columns));
    return visit_weights(rank, layer, layer->kept_columns, keep_column);
}

/* ---- L3 -------------------------------------------------------------------------------------- */

static tn_status strand(simulate_rank *rank, const simulate_layer *layer) {
    const simulate_model *model = rank->model;
    const int64_t count = layer->has_experts ? model->stranded_moe : model->stranded_dense;
    for (int64_t i = 0; i < count; i++) {
        tn_tensor gathered = {0};
        SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_L3, TN_BYTE, rank->tokens, model->hidden,
                                   "gathered activation", &gathered));
        SIMULATE_TRY(tn_plane_make(gathered, TN_PLANE_DATA, rank->stream));
    }
    return TN_OK;
}

tn_status simulate_kept_chunk_end(simulate_rank *rank) {
    tn_scope *scope = &rank->owners[SIMULATE_OWNER_L3];
    tn_ledger ledger = TN_LEDGER_INIT;
    SIMULATE_TRY(tn_scope_ledger(*scope, &ledger));
    if (ledger.tensors == 0) return TN_OK;
    SIMULATE_TRY(close_scope(scope));
    return open_scope(rank->root, simulate_owner_name(SIMULATE_OWNER_L3), scope);
}

tn_status simulate_kept_backward(simulate_rank *rank, simulate_layer *layer) {
    const simulate_lifetimes *lifetimes = &rank->job->lifetimes;
    if (!lifetimes->planes_by_use) {
        if (layer->kept_rows.value) SIMULATE_TRY(close_scope(&layer->kept_rows));
        if (!layer->is_frozen) SIMULATE_TRY(keep_columns(rank, layer, SIMULATE_OWNER_L2));
    }
    if (!lifetimes->frozen_columns && layer->is_frozen)
        SIMULATE_TRY(keep_columns(rank, layer, SIMULATE_OWNER_L1));
    return lifetimes->gathered_activations ? TN_OK : strand(rank, layer);
}

/* ---- L4 -------------------------------------------------------------------------------------- */

static tn_status column_bytes(const simulate_unit *unit, size_t *bytes) {
    *bytes = 0;
    for (int i = 0; i < unit->count; i++) {
        tn_plane_layout layout;
        if (!unit->shapes[i].is_quantized) continue;
        SIMULATE_TRY(tn_plane_layout_get(unit->weights[i]->value, TN_PLANE_COL, &layout));
        *bytes += layout.data_bytes + layout.scale_bytes;
    }
    return TN_OK;
}

/* Every rank's part is as large as the largest. */
tn_status simulate_kept_gather(simulate_rank *rank, const simulate_unit *unit, tn_tensor *columns) {
    tn_comm *comm = rank->groups[unit->group];
    tn_lease lease;
    tn_plane_view view;
    size_t bytes;
    *columns = (tn_tensor){0};
    SIMULATE_TRY(column_bytes(unit, &bytes));
    if (rank->job->lifetimes.gather_rows_only || bytes == 0) return TN_OK;
    const size_t ranks = (size_t)tn_comm_size(comm), part = (bytes + ranks - 1) / ranks;
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_L4, TN_BYTE, (int64_t)(part * ranks), 0,
                               "gathered columns", columns));
    SIMULATE_TRY(tn_lease_begin(*columns, TN_PLANE_DATA, TN_WRITE, rank->side, &lease, &view));
    char *own = (char *)view.data + part * (size_t)tn_comm_rank(comm);
    SIMULATE_TRY(tn_all_gather(comm, own, view.data, part, rank->side));
    return tn_lease_end(lease);
}
