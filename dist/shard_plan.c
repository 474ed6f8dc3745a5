/* Plans of shards: made of a checked configuration, and asked. See shard_plan.h. */
#include "shard_plan.h"

#include <stdio.h>

#include "host_alloc.h"

/* Far above any memory, and far enough below 64 bits for every sum and product of a plan. */
#define UNIT_BYTES_MAX (UINT64_C(1) << 50)

static const char *const layout_names[TN_SHARD_LAYOUT_COUNT] = {"auto", "tiles", "ragged", "flat"};

const char *tn_shard_layout_name(tn_shard_layout layout) {
    unsigned at = (unsigned)layout;
    return at < TN_SHARD_LAYOUT_COUNT ? layout_names[at] : "unknown layout";
}

/* ---- checks --------------------------------------------------------------------------------- */

static tn_status check_tensor(const tn_shard_tensor *spec, const char *unit, int at) {
    const char *name = spec->name ? spec->name : "";
    TN_REQUIRE(tn__format_is_known(spec->format),
               "tn_shard_plan_create: unit %s, tensor %d (%s): format is %d, which there is not",
               unit, at, name, (int)spec->format);
    TN_REQUIRE(tn__format_takes_dtype(spec->format, spec->dtype),
               "tn_shard_plan_create: unit %s, tensor %d (%s): %s is no element type of format %s",
               unit, at, name, tn_dtype_name(spec->dtype), tn_format_name(spec->format));
    TN_REQUIRE(spec->scale_mode == TN_SCALE_POW2 || spec->scale_mode == TN_SCALE_FP32,
               "tn_shard_plan_create: unit %s, tensor %d (%s): scale_mode is %d, expected "
               "TN_SCALE_POW2 or TN_SCALE_FP32",
               unit, at, name, (int)spec->scale_mode);
    TN_REQUIRE(spec->rows >= 0 && spec->cols >= 0 && spec->rows <= TN__ELEMENTS_MAX &&
                   spec->cols <= TN__ELEMENTS_MAX,
               "tn_shard_plan_create: unit %s, tensor %d (%s): %lld x %lld, expected 0 to 2^62",
               unit, at, name, (long long)spec->rows, (long long)spec->cols);
    TN_REQUIRE(spec->frozen == 0 || spec->frozen == 1,
               "tn_shard_plan_create: unit %s, tensor %d (%s): frozen is %d, expected 0 or 1", unit,
               at, name, spec->frozen);
    return TN_OK;
}

static tn_status check_config(const tn_shard_plan_config *config) {
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_shard_plan_create: config is not TN_SHARD_PLAN_CONFIG_INIT");
    const char *unit = config->name ? config->name : "unit";
    TN_REQUIRE(config->tensor_count >= 0 && config->tensor_count <= TN_SHARD_TENSORS_MAX,
               "tn_shard_plan_create: unit %s: tensor_count is %d, expected 0 to %d", unit,
               config->tensor_count, TN_SHARD_TENSORS_MAX);
    TN_REQUIRE(config->rank_count >= 1 && config->rank_count <= TN_SHARD_RANKS_MAX,
               "tn_shard_plan_create: unit %s: rank_count is %d, expected 1 to %d", unit,
               config->rank_count, TN_SHARD_RANKS_MAX);
    TN_REQUIRE((unsigned)config->layout < TN_SHARD_LAYOUT_COUNT,
               "tn_shard_plan_create: unit %s: layout is %d, which there is not", unit,
               (int)config->layout);
    TN_REQUIRE(config->tensors || config->tensor_count == 0,
               "tn_shard_plan_create: unit %s: tensors is NULL, and tensor_count %d", unit,
               config->tensor_count);
    for (int i = 0; i < config->tensor_count; i++)
        TN_TRY(check_tensor(&config->tensors[i], unit, i));
    return TN_OK;
}

/* ---- members -------------------------------------------------------------------------------- */

/* COL is gathered where there is one and ROW is not its exact transpose. */
static int needs_col(const tn_shard_tensor *spec) {
    tn_plane source;
    const char *why;
    if (!tn__format_has_plane(spec->format, TN_PLANE_COL)) return 0;
    return !tn__format_source(spec->format, TN_PLANE_COL, &source, &why);
}

/* All rows where blocks hang together with a scale of the whole tensor that comes after them. */
static int64_t tile_height_of(const tn__shard_member *member) {
    return member->layout.global_scale_offset > 0 ? member->spec.rows : TN__SHARD_TILE;
}

static size_t range_bytes(const tn__shard_member *member, tn_plane plane, int64_t first,
                          int64_t rows) {
    tn__shard_range data = tn__shard_range_of(member, plane, 0, first, rows);
    tn__shard_range scale = {.lines = 0};
    size_t scale_bytes =
        plane == TN_PLANE_COL ? member->col.scale_bytes : member->layout.scale_bytes;
    if (scale_bytes) scale = tn__shard_range_of(member, plane, 1, first, rows);
    return tn__shard_range_bytes(&data) - data.kept_bytes + tn__shard_range_bytes(&scale) -
           scale.kept_bytes;
}

static size_t tile_bytes_of(const tn__shard_member *member, int64_t tile_row) {
    int64_t first = tile_row * member->tile_height;
    int64_t rows = member->spec.rows - first;
    if (rows > member->tile_height) rows = member->tile_height;
    size_t row = range_bytes(member, member->plane, first, rows);
    return row + (member->has_col ? range_bytes(member, TN_PLANE_COL, first, rows) : row);
}

static tn_status name_member(tn__shard_member *member, int at) {
    char numbered[32];
    snprintf(numbered, sizeof numbered, "tensor %d", at);
    member->name = tn__host_strdup(member->spec.name ? member->spec.name : numbered);
    member->spec.name = member->name;
    return member->name ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

static tn_status make_member(tn__shard_member *member, const tn_shard_tensor *spec, int at) {
    *member = (tn__shard_member){.spec = *spec, .bucket_offset = -1};
    TN_TRY(name_member(member, at));
    spec = &member->spec;
    member->plane = tn__format_has_plane(spec->format, TN_PLANE_ROW) ? TN_PLANE_ROW : TN_PLANE_DATA;
    member->has_col = needs_col(spec);
    TN_TRY(tn__format_layout(spec->format, spec->dtype, spec->rows, spec->cols, member->plane,
                             &member->layout));
    if (member->has_col) {
        TN_TRY(tn__format_layout(spec->format, spec->dtype, spec->rows, spec->cols, TN_PLANE_COL,
                                 &member->col));
    }
    if (member->layout.data_bytes == 0) return TN_OK;
    TN_REQUIRE(member->layout.data_bytes <= UNIT_BYTES_MAX,
               "tn_shard_plan_create: tensor %s takes %zu bytes: more than a unit can have",
               member->name, member->layout.data_bytes);
    member->tile_height = tile_height_of(member);
    member->tile_rows = tn__shard_ceil_div(spec->rows, member->tile_height);
    member->tile_bytes = tile_bytes_of(member, 0);
    member->last_tile_bytes = tile_bytes_of(member, member->tile_rows - 1);
    return TN_OK;
}

static tn_status check_unit_bytes(const tn_shard_plan *plan) {
    uint64_t sum = 0;
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[i];
        sum += member->layout.data_bytes + member->layout.scale_bytes;
        sum += member->col.data_bytes + member->col.scale_bytes;
        TN_REQUIRE(sum <= UNIT_BYTES_MAX,
                   "tn_shard_plan_create: unit %s takes more than %llu bytes with tensor %s: more "
                   "than a unit can have",
                   plan->name, (unsigned long long)UNIT_BYTES_MAX, member->name);
    }
    return TN_OK;
}

/* What FLAT makes of the members: elements one behind the other, or a tensor that forbids it. */
static void lay_flat(tn_shard_plan *plan) {
    size_t end = 0;
    plan->flat_obstacle = -1;
    for (int i = 0; i < plan->tensor_count; i++) {
        tn__shard_member *member = &plan->members[i];
        member->flat_offset = end;
        end += tn__shard_round_up(member->layout.data_bytes, TN__SHARD_ELEMENTS_ALIGNMENT);
        int is_obstacle = member->has_col && member->tile_rows > 0;
        if (is_obstacle && plan->flat_obstacle < 0) plan->flat_obstacle = i;
    }
}

static tn_status make_members(tn_shard_plan *plan, const tn_shard_plan_config *config) {
    plan->members = tn__host_alloc((size_t)config->tensor_count + 1, sizeof *plan->members);
    if (!plan->members) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < config->tensor_count; i++) {
        plan->tensor_count = i + 1;
        TN_TRY(make_member(&plan->members[i], &config->tensors[i], i));
    }
    TN_TRY(check_unit_bytes(plan));
    lay_flat(plan);
    if (config->layout != TN_SHARD_FLAT || plan->flat_obstacle < 0) return TN_OK;
    const tn__shard_member *member = &plan->members[plan->flat_obstacle];
    return TN_FAIL(TN_UNSUPPORTED,
                   "tn_shard_plan_create: unit %s can not be FLAT: tensor %s is %s, whose blocks "
                   "can not be cut: use TILES, RAGGED or AUTO, or put it into another unit",
                   plan->name, member->name, tn_format_name(member->spec.format));
}

/* Those of trained tensors come first, so that a cast without the frozen ones reduces a run. */
static void number_amaxes(tn_shard_plan *plan) {
    int64_t end = 0;
    for (int frozen = 0; frozen < 2; frozen++) {
        for (int i = 0; i < plan->tensor_count; i++) {
            tn__shard_member *member = &plan->members[i];
            if (member->spec.frozen != frozen) continue;
            member->amax_first = end;
            member->amax_count = tn__shard_amax_count(member, plan->cut.layout);
            end +=
                (int64_t)tn__shard_round_up((size_t)member->amax_count, TN__SHARD_AMAX_ALIGNMENT);
        }
        if (!frozen) plan->info.amax_count_trained = end;
    }
    plan->info.amax_count = end;
}

/* ---- plans ---------------------------------------------------------------------------------- */

static int gathers_no_col(const tn_shard_plan *plan) {
    for (int i = 0; i < plan->tensor_count; i++) {
        if (plan->members[i].has_col && plan->members[i].tile_rows > 0) return 0;
    }
    return 1;
}

static void fill_in_info(tn_shard_plan *plan) {
    tn_shard_plan_info *info = &plan->info;
    info->size = sizeof *info;
    info->name = plan->name;
    info->layout = plan->cut.layout;
    info->tensor_count = plan->tensor_count;
    info->rank_count = plan->rank_count;
    info->is_same_in_backward = gathers_no_col(plan);
    number_amaxes(plan);
    info->hash = tn__shard_hash(plan);
}

static tn_status make_plan(tn_shard_plan *plan, const tn_shard_plan_config *config) {
    plan->rank_count = config->rank_count;
    plan->prices = config->costs;
    plan->asked = config->layout;
    plan->name = tn__host_strdup(config->name ? config->name : "unit");
    if (!plan->name) return TN_OUT_OF_HOST_MEMORY;
    TN_TRY(make_members(plan, config));
    TN_TRY(tn__shard_choose(plan));
    TN_TRY(tn__shard_place(plan));
    fill_in_info(plan);
    return TN_OK;
}

tn_status tn_shard_plan_create(const tn_shard_plan_config *config, tn_shard_plan **out) {
    TN_REQUIRE(out, "tn_shard_plan_create: out is NULL");
    TN_TRY(check_config(config));
    tn_shard_plan *plan = tn__host_alloc(1, sizeof *plan);
    if (!plan) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = make_plan(plan, config);
    if (status != TN_OK) {
        tn_shard_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return TN_OK;
}

void tn_shard_plan_destroy(tn_shard_plan *plan) {
    if (!plan) return;
    for (int i = 0; i < plan->tensor_count; i++)
        tn__host_free(plan->members[i].name);
    for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++)
        tn__host_free(plan->segments[phase].items);
    tn__host_free(plan->bucket.items);
    tn__host_free(plan->ranks);
    tn__host_free(plan->items);
    tn__shard_cut_end(&plan->cut);
    tn__host_free(plan->members);
    tn__host_free(plan->name);
    tn__host_free(plan);
}

/* ---- asked ---------------------------------------------------------------------------------- */

static tn_status check_rank(const char *call, const tn_shard_plan *plan, int rank) {
    TN_REQUIRE(plan, "%s: plan is NULL", call);
    TN_REQUIRE(rank >= 0 && rank < plan->rank_count, "%s: rank %d of unit %s, which has %d ranks",
               call, rank, plan->name, plan->rank_count);
    return TN_OK;
}

static tn_status check_index(const char *call, const tn_shard_plan *plan, int tensor) {
    TN_REQUIRE(plan, "%s: plan is NULL", call);
    TN_REQUIRE(tensor >= 0 && tensor < plan->tensor_count,
               "%s: tensor %d of unit %s, which has %d tensors", call, tensor, plan->name,
               plan->tensor_count);
    return TN_OK;
}

static tn_status check_phase(const char *call, const tn_shard_plan *plan, tn_shard_phase phase) {
    TN_REQUIRE(plan, "%s: plan is NULL", call);
    TN_REQUIRE((unsigned)phase < TN_SHARD_PHASE_COUNT, "%s: phase is %d, which there is not", call,
               (int)phase);
    return TN_OK;
}

tn_status tn_shard_plan_info_get(const tn_shard_plan *plan, tn_shard_plan_info *out) {
    TN_REQUIRE(plan, "tn_shard_plan_info_get: plan is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_shard_plan_info_get: out is not TN_SHARD_PLAN_INFO_INIT");
    *out = plan->info;
    return TN_OK;
}

tn_status tn_shard_tensor_get(const tn_shard_plan *plan, int tensor, tn_shard_tensor *out) {
    TN_TRY(check_index("tn_shard_tensor_get", plan, tensor));
    TN_REQUIRE(out, "tn_shard_tensor_get: out is NULL");
    *out = plan->members[tensor].spec;
    return TN_OK;
}

tn_status tn_shard_cost_get(const tn_shard_plan *plan, tn_shard_layout layout, tn_shard_cost *out) {
    TN_REQUIRE(plan, "tn_shard_cost_get: plan is NULL");
    TN_REQUIRE(layout > TN_SHARD_AUTO && layout < TN_SHARD_LAYOUT_COUNT,
               "tn_shard_cost_get: layout is %d, expected TILES, RAGGED or FLAT", (int)layout);
    TN_REQUIRE(out && out->size == sizeof *out, "tn_shard_cost_get: out is not TN_SHARD_COST_INIT");
    *out = plan->costs[layout];
    return TN_OK;
}

/* The rank's packed elements before those of the tensor. */
static int64_t packed_before(const tn_shard_plan *plan, int rank, int tensor) {
    int64_t sum = 0;
    for (int i = 0; plan->cut.order[i] != tensor; i++) {
        const tn__shard_member *member = &plan->members[plan->cut.order[i]];
        int64_t first, count;
        if (member->bucket_offset < 0) continue;
        tn__shard_elements(plan, &plan->cut, plan->cut.order[i], rank, &first, &count);
        sum += tn__shard_packed_count(&member->spec, first, count);
    }
    return sum;
}

tn_status tn_shard_piece_get(const tn_shard_plan *plan, int rank, int tensor, tn_shard_piece *out) {
    TN_TRY(check_rank("tn_shard_piece_get", plan, rank));
    TN_TRY(check_index("tn_shard_piece_get", plan, tensor));
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_shard_piece_get: out is not TN_SHARD_PIECE_INIT");
    const tn__shard_member *member = &plan->members[tensor];
    tn_shard_piece piece = {.size = sizeof piece, .first_row = -1, .row_count = -1};
    tn__shard_elements(plan, &plan->cut, tensor, rank, &piece.first, &piece.count);
    if (plan->cut.layout != TN_SHARD_FLAT)
        tn__shard_rows(plan, &plan->cut, tensor, rank, &piece.first_row, &piece.row_count);
    piece.packed_first = member->bucket_offset < 0 ? -1 : packed_before(plan, rank, tensor);
    piece.data_offset = tn__shard_item_offset(plan, rank, tensor, member->plane, 0);
    piece.scale_offset = tn__shard_item_offset(plan, rank, tensor, member->plane, 1);
    piece.col_data_offset = tn__shard_item_offset(plan, rank, tensor, TN_PLANE_COL, 0);
    piece.col_scale_offset = tn__shard_item_offset(plan, rank, tensor, TN_PLANE_COL, 1);
    *out = piece;
    return TN_OK;
}

tn_status tn_shard_bytes(const tn_shard_plan *plan, int rank, size_t *out) {
    TN_TRY(check_rank("tn_shard_bytes", plan, rank));
    TN_REQUIRE(out, "tn_shard_bytes: out is NULL");
    *out = plan->ranks[rank].shard_bytes;
    return TN_OK;
}

tn_status tn_shard_packed_elements(const tn_shard_plan *plan, int rank, int64_t *out) {
    TN_TRY(check_rank("tn_shard_packed_elements", plan, rank));
    TN_REQUIRE(out, "tn_shard_packed_elements: out is NULL");
    *out = plan->ranks[rank].packed_elements;
    return TN_OK;
}

tn_status tn_shard_bucket_offset(const tn_shard_plan *plan, int tensor, int64_t *out) {
    TN_TRY(check_index("tn_shard_bucket_offset", plan, tensor));
    TN_REQUIRE(out, "tn_shard_bucket_offset: out is NULL");
    *out = plan->members[tensor].bucket_offset;
    return TN_OK;
}

tn_status tn_shard_bucket_segments(const tn_shard_plan *plan, const tn_segment **segments,
                                   size_t *count) {
    TN_REQUIRE(plan, "tn_shard_bucket_segments: plan is NULL");
    TN_REQUIRE(segments && count, "tn_shard_bucket_segments: segments or count is NULL");
    *segments = plan->bucket.items;
    *count = plan->bucket.count;
    return TN_OK;
}

tn_status tn_shard_segments(const tn_shard_plan *plan, tn_shard_phase phase,
                            const tn_segment **segments, size_t *count) {
    TN_TRY(check_phase("tn_shard_segments", plan, phase));
    TN_REQUIRE(segments && count, "tn_shard_segments: segments or count is NULL");
    *segments = plan->segments[phase].items;
    *count = plan->segments[phase].count;
    return TN_OK;
}

tn_status tn_shard_sent_bytes(const tn_shard_plan *plan, tn_shard_phase phase, int rank,
                              size_t *shard_offset, size_t *bytes) {
    TN_TRY(check_phase("tn_shard_sent_bytes", plan, phase));
    TN_TRY(check_rank("tn_shard_sent_bytes", plan, rank));
    TN_REQUIRE(shard_offset && bytes, "tn_shard_sent_bytes: shard_offset or bytes is NULL");
    *shard_offset = plan->ranks[rank].sent_offset[phase];
    *bytes = plan->ranks[rank].sent_bytes[phase];
    return TN_OK;
}

/* NULL where the item has no bytes. */
static void *address_of(const tn_shard_plan *plan, tn_shard_phase phase, int tensor, tn_plane plane,
                        int is_scale, char *shard, char *gathered) {
    if (is_scale && plan->cut.layout == TN_SHARD_FLAT) {
        const tn__shard_member *member = &plan->members[tensor];
        return member->layout.scale_bytes ? shard + member->flat_scale_offset : NULL;
    }
    for (int i = 0; i < plan->item_count; i++) {
        const tn__shard_item *item = &plan->items[i];
        if (item->tensor == tensor && item->plane == plane && item->is_scale == is_scale)
            return gathered + item->gathered[phase];
    }
    return NULL;
}

tn_status tn_shard_plane_memory(const tn_shard_plan *plan, tn_shard_phase phase, int tensor,
                                void *shard, void *gathered, tn_foreign_memory *out) {
    TN_TRY(check_phase("tn_shard_plane_memory", plan, phase));
    TN_TRY(check_index("tn_shard_plane_memory", plan, tensor));
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_shard_plane_memory: out is not TN_FOREIGN_MEMORY_INIT");
    TN_REQUIRE(gathered || plan->info.gathered_bytes[phase] == 0,
               "tn_shard_plane_memory: gathered is NULL, and unit %s takes %zu bytes", plan->name,
               plan->info.gathered_bytes[phase]);
    const tn__shard_member *member = &plan->members[tensor];
    int is_col = phase == TN_SHARD_BACKWARD && member->has_col;
    const tn_plane_layout *layout = is_col ? &member->col : &member->layout;
    TN_REQUIRE(shard || plan->cut.layout != TN_SHARD_FLAT || layout->scale_bytes == 0,
               "tn_shard_plane_memory: shard is NULL, and unit %s is FLAT: scales are in the shard",
               plan->name);
    out->plane = is_col ? TN_PLANE_COL : member->plane;
    out->data = address_of(plan, phase, tensor, out->plane, 0, shard, gathered);
    out->data_bytes = layout->data_bytes;
    out->scale = address_of(plan, phase, tensor, out->plane, 1, shard, gathered);
    out->scale_bytes = layout->scale_bytes;
    return TN_OK;
}
