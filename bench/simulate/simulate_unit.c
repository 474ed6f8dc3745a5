/* Units: their weights, plans, and what happens around a use. See simulate_unit.h. */
#include "simulate_unit.h"

#include <stdlib.h>

#include "simulate_kept.h"

/* Masters that are multiplied on the host driver are filled with a byte that is a small number. */
enum { SMALL_BYTE = 0x3c, GAIN_BYTE = 0x3f, ROOM_MIN = 16 };

/* ---- what it is made of ---------------------------------------------------------------------- */

int simulate_unit_add(simulate_unit *unit, const simulate_shape *shape, simulate_weight *weight) {
    if (unit->count == unit->room) {
        const int room = unit->room ? 2 * unit->room : ROOM_MIN;
        void *weights = realloc(unit->weights, (size_t)room * sizeof(*unit->weights));
        if (weights) unit->weights = weights;
        void *shapes = realloc(unit->shapes, (size_t)room * sizeof(*unit->shapes));
        if (shapes) unit->shapes = shapes;
        if (!weights || !shapes) return 0;
        unit->room = room;
    }
    unit->weights[unit->count] = weight;
    unit->shapes[unit->count++] = *shape;
    return 1;
}

void simulate_unit_free(simulate_unit *unit) {
    tn_shard_plan_destroy(unit->plan);
    free(unit->weights);
    free(unit->shapes);
    *unit = (simulate_unit){0};
}

static tn_shard_tensor shard_tensor(const simulate_shape *shape) {
    tn_shard_tensor tensor = {.name = shape->name, .format = TN_FORMAT_PLAIN, .dtype = TN_FP32};
    tensor.rows = shape->cols ? shape->rows : 1;
    tensor.cols = shape->cols ? shape->cols : shape->rows;
    tensor.frozen = shape->is_frozen;
    if (shape->cols) tensor.dtype = simulate_dtype();
    if (shape->is_quantized) tensor.format = TN_FORMAT_FP8_BLOCK_2D, tensor.dtype = TN_E4M3;
    return tensor;
}

tn_status simulate_unit_plan(const simulate_unit *unit, int rank_count, tn_shard_plan **out) {
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    tn_shard_tensor *tensors = calloc((size_t)unit->count, sizeof *tensors);
    if (!tensors) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < unit->count; i++)
        tensors[i] = shard_tensor(&unit->shapes[i]);
    config.name = unit->name;
    config.tensors = tensors;
    config.tensor_count = unit->count;
    config.rank_count = rank_count;
    tn_status status = tn_shard_plan_create(&config, out);
    free(tensors);
    return status;
}

/* ---- weights that are whole ------------------------------------------------------------------ */

static tn_status make_filled(const simulate_rank *rank, simulate_owner owner,
                             const simulate_shape *shape, unsigned char byte, tn_tensor *out) {
    SIMULATE_TRY(simulate_make(rank, owner, TN_FP32, shape->rows, shape->cols, shape->name, out));
    return tn_plane_fill(*out, TN_PLANE_DATA, byte, rank->stream);
}

/* A weight as the layers read it, which has no plane yet. */
static tn_status make_value(const simulate_rank *rank, const simulate_shape *shape,
                            int is_regatherable, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = shape->is_quantized ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_PLAIN;
    config.dtype = shape->is_quantized ? TN_E4M3 : shape->cols ? simulate_dtype() : TN_FP32;
    config.rank = shape->cols ? 2 : 1;
    config.shape[0] = shape->rows;
    config.shape[1] = shape->cols;
    config.policy = shape->is_quantized ? TN_POLICY_SCRATCH : TN_POLICY_DEFAULT;
    config.frozen = shape->is_frozen;
    config.regatherable = is_regatherable;
    config.name = shape->name;
    return tn_tensor_create(rank->owners[SIMULATE_OWNER_WEIGHTS], &config, out);
}

static tn_status convert_to_value(const simulate_rank *rank, const simulate_shape *shape,
                                  const simulate_weight *weight) {
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    quantize.src = convert.x = weight->master;
    quantize.dst = convert.y = weight->value;
    return shape->is_quantized ? tn_quantize(&quantize, rank->stream)
                               : tn_convert(&convert, rank->stream);
}

static tn_status make_whole(const simulate_rank *rank, const simulate_shape *shape,
                            simulate_weight *weight) {
    const int is_gain = !shape->cols;
    SIMULATE_TRY(make_filled(rank, is_gain ? SIMULATE_OWNER_WEIGHTS : SIMULATE_OWNER_OPTIMIZER,
                             shape, is_gain ? GAIN_BYTE : SMALL_BYTE, &weight->master));
    if (is_gain) weight->value = weight->master;
    if (!is_gain) {
        SIMULATE_TRY(make_value(rank, shape, 0, &weight->value));
        SIMULATE_TRY(convert_to_value(rank, shape, weight));
    }
    if (shape->is_frozen) return is_gain ? TN_OK : simulate_drop(rank, &weight->master);
    SIMULATE_TRY(make_filled(rank, SIMULATE_OWNER_GRADIENTS, shape, 0, &weight->gradient));
    SIMULATE_TRY(make_filled(rank, SIMULATE_OWNER_OPTIMIZER, shape, 0, &weight->first));
    return make_filled(rank, SIMULATE_OWNER_OPTIMIZER, shape, 0, &weight->second);
}

static tn_status update_whole(const simulate_rank *rank, const simulate_weight *weight) {
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

/* ---- shards ---------------------------------------------------------------------------------- */

static tn_comm *comm_of(const simulate_rank *rank, const simulate_unit *unit) {
    return rank->groups[unit->group];
}

static tn_status make_packed(const simulate_rank *rank, simulate_owner owner, int64_t elements,
                             unsigned char byte, const char *name, tn_tensor *out) {
    SIMULATE_TRY(simulate_make(rank, owner, TN_FP32, elements, 0, name, out));
    return tn_plane_fill(*out, TN_PLANE_DATA, byte, rank->stream);
}

/* Memory that is leased already, as a tensor of a shape. */
static tn_status adopt(const simulate_rank *rank, const simulate_shape *shape, void *data,
                       size_t bytes, tn_stream stream, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    config.rank = shape->cols ? 2 : 1;
    config.shape[0] = shape->rows;
    config.shape[1] = shape->cols;
    config.name = shape->name;
    memory.data = data;
    memory.data_bytes = bytes;
    memory.stream = stream;
    return tn_tensor_adopt(rank->owners[SIMULATE_OWNER_ACTIVATIONS], &config, &memory, out);
}

/* The rank's elements of a tensor of the plan, as they are cast: those of the packed masters, or
 * where it is frozen a tensor that is made for that. */
static tn_status master_piece(const simulate_rank *rank, const simulate_unit *unit, int index,
                              char *masters, tn_tensor *out) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    *out = (tn_tensor){0};
    SIMULATE_TRY(tn_shard_piece_get(unit->plan, tn_comm_rank(comm_of(rank, unit)), index, &piece));
    const simulate_shape shape = {piece.count, 0, 0, 0, unit->shapes[index].name};
    if (piece.count == 0) return TN_OK;
    if (piece.packed_first < 0)
        return make_filled(rank, SIMULATE_OWNER_ACTIVATIONS, &shape, SMALL_BYTE, out);
    return adopt(rank, &shape, masters + (size_t)piece.packed_first * sizeof(float),
                 (size_t)piece.count * sizeof(float), rank->stream, out);
}

static tn_status cast_pieces(const simulate_rank *rank, const simulate_unit *unit,
                             tn_tensor *pieces, char *masters, int with_frozen) {
    tn_shard_cast_args args = TN_SHARD_CAST_ARGS_INIT;
    for (int i = 0; i < unit->count; i++) {
        if (with_frozen || !unit->shapes[i].is_frozen)
            SIMULATE_TRY(master_piece(rank, unit, i, masters, &pieces[i]));
    }
    args.plan = unit->plan;
    args.comm = comm_of(rank, unit);
    args.masters = pieces;
    args.shard = unit->shard;
    args.with_frozen = with_frozen;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    SIMULATE_TRY(tn_shard_cast(&args, rank->stream));
    for (int i = 0; i < unit->count; i++)
        SIMULATE_TRY(simulate_drop(rank, &pieces[i]));
    return TN_OK;
}

static tn_status cast_shard(const simulate_rank *rank, const simulate_unit *unit, int with_frozen) {
    tn_tensor *pieces = calloc((size_t)unit->count, sizeof *pieces);
    tn_lease lease = {0};
    tn_plane_view view = {.data = NULL};
    tn_status status = pieces ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK && unit->masters.value)
        status = tn_lease_begin(unit->masters, TN_PLANE_DATA, TN_READ, rank->stream, &lease, &view);
    if (status == TN_OK) status = cast_pieces(rank, unit, pieces, view.data, with_frozen);
    if (status == TN_OK && unit->masters.value) status = tn_lease_end(lease);
    free(pieces);
    return status;
}

static tn_status make_shard(const simulate_rank *rank, simulate_unit *unit) {
    const int own = tn_comm_rank(comm_of(rank, unit));
    size_t bytes;
    int64_t packed;
    SIMULATE_TRY(simulate_unit_plan(unit, tn_comm_size(comm_of(rank, unit)), &unit->plan));
    SIMULATE_TRY(tn_shard_plan_verify(unit->plan, comm_of(rank, unit),
                                      rank->owners[SIMULATE_OWNER_ACTIVATIONS], rank->stream));
    SIMULATE_TRY(tn_shard_bytes(unit->plan, own, &bytes));
    SIMULATE_TRY(tn_shard_packed_elements(unit->plan, own, &packed));
    if (bytes)
        SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_WEIGHTS, TN_BYTE, (int64_t)bytes, 0,
                                   "shard", &unit->shard));
    if (!packed) return TN_OK;
    SIMULATE_TRY(
        make_packed(rank, SIMULATE_OWNER_OPTIMIZER, packed, SMALL_BYTE, "masters", &unit->masters));
    SIMULATE_TRY(make_packed(rank, SIMULATE_OWNER_OPTIMIZER, packed, 0, "first", &unit->first));
    SIMULATE_TRY(make_packed(rank, SIMULATE_OWNER_OPTIMIZER, packed, 0, "second", &unit->second));
    return make_packed(rank, SIMULATE_OWNER_GRADIENTS, packed, 0, "gradients", &unit->gradients);
}

static tn_status join_ring(simulate_rank *rank, simulate_unit *unit) {
    tn_ring_unit_config config = TN_RING_UNIT_CONFIG_INIT;
    tn_tensor *values = calloc((size_t)unit->count, sizeof *values);
    if (!values) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < unit->count; i++)
        values[i] = unit->weights[i]->value;
    config.name = unit->name;
    config.plan = unit->plan;
    config.shard = unit->shard;
    config.tensors = values;
    config.tensor_count = unit->count;
    tn_status status = tn_ring_unit_add(rank->rings[unit->group], &config, &unit->index);
    free(values);
    return status;
}

tn_status simulate_unit_make(simulate_rank *rank, simulate_unit *unit) {
    unit->is_sharded = simulate_group_size(rank->model, unit->group) > 1;
    for (int i = 0; i < unit->count; i++) {
        const simulate_shape *shape = &unit->shapes[i];
        SIMULATE_TRY(unit->is_sharded ? make_value(rank, shape, 1, &unit->weights[i]->value)
                                      : make_whole(rank, shape, unit->weights[i]));
    }
    if (!unit->is_sharded) return TN_OK;
    SIMULATE_TRY(make_shard(rank, unit));
    SIMULATE_TRY(cast_shard(rank, unit, 1));
    return join_ring(rank, unit);
}

/* ---- buckets --------------------------------------------------------------------------------- */

static tn_status adopt_gradients(const simulate_rank *rank, simulate_unit *unit, char *bucket) {
    for (int i = 0; i < unit->count; i++) {
        const simulate_shape *shape = &unit->shapes[i];
        const int64_t count = shape->rows * (shape->cols ? shape->cols : 1);
        int64_t offset;
        SIMULATE_TRY(tn_shard_bucket_offset(unit->plan, i, &offset));
        if (offset < 0) continue;
        SIMULATE_TRY(adopt(rank, shape, bucket + (size_t)offset * sizeof(float),
                           (size_t)count * sizeof(float), rank->stream,
                           &unit->weights[i]->gradient));
    }
    return TN_OK;
}

/* The bucket is leased for writing as long as the layers' gradients lie in it. */
static tn_status begin_bucket(simulate_rank *rank, simulate_unit *unit) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    tn_plane_view view;
    SIMULATE_TRY(tn_shard_plan_info_get(unit->plan, &info));
    if (info.bucket_elements == 0) return TN_OK;
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_GRADIENTS, TN_FP32, info.bucket_elements, 0,
                               "bucket", &unit->bucket));
    SIMULATE_TRY(
        tn_lease_begin(unit->bucket, TN_PLANE_DATA, TN_WRITE, rank->stream, &unit->lease, &view));
    return adopt_gradients(rank, unit, view.data);
}

/* Of one micro-batch straight into the packed gradients, of a later one beside them. */
static tn_status reduce(const simulate_rank *rank, const simulate_unit *unit, tn_tensor to) {
    const tn_segment *segments;
    tn_lease from_lease, to_lease;
    tn_plane_view from_view, to_view = {.data = NULL};
    size_t count;
    SIMULATE_TRY(tn_shard_bucket_segments(unit->plan, &segments, &count));
    SIMULATE_TRY(
        tn_lease_begin(unit->bucket, TN_PLANE_DATA, TN_READ, rank->side, &from_lease, &from_view));
    if (to.value)
        SIMULATE_TRY(tn_lease_begin(to, TN_PLANE_DATA, TN_WRITE, rank->side, &to_lease, &to_view));
    SIMULATE_TRY(tn_reduce_scatter_uneven(comm_of(rank, unit), from_view.data, to_view.data,
                                          segments, count, TN_FP32, TN_REDUCE_SUM, rank->side));
    if (to.value) SIMULATE_TRY(tn_lease_end(to_lease));
    return tn_lease_end(from_lease);
}

static tn_status reduce_and_add(simulate_rank *rank, simulate_unit *unit) {
    tn_axpy_args args = TN_AXPY_ARGS_INIT;
    int64_t packed;
    if (!unit->is_reduced || !unit->gradients.value) {
        unit->is_reduced = 1;
        return reduce(rank, unit, unit->gradients);
    }
    SIMULATE_TRY(tn_shard_packed_elements(unit->plan, tn_comm_rank(comm_of(rank, unit)), &packed));
    SIMULATE_TRY(
        simulate_make(rank, SIMULATE_OWNER_GRADIENTS, TN_FP32, packed, 0, "reduced", &args.x));
    SIMULATE_TRY(reduce(rank, unit, args.x));
    args.y = unit->gradients;
    args.alpha = 1.0f;
    SIMULATE_TRY(tn_axpy(&args, rank->side));
    return tn_tensor_destroy(args.x, rank->side);
}

static tn_status end_bucket(simulate_rank *rank, simulate_unit *unit) {
    if (!unit->bucket.value) return TN_OK;
    for (int i = 0; i < unit->count; i++)
        SIMULATE_TRY(simulate_drop(rank, &unit->weights[i]->gradient));
    SIMULATE_TRY(tn_lease_end(unit->lease));
    SIMULATE_TRY(reduce_and_add(rank, unit));
    SIMULATE_TRY(tn_tensor_destroy(unit->bucket, rank->side));
    unit->bucket = (tn_tensor){0};
    return TN_OK;
}

/* ---- around a use ---------------------------------------------------------------------------- */

tn_status simulate_unit_begin(simulate_rank *rank, simulate_unit *unit, simulate_unit *next,
                              int is_backward) {
    tn_ring *ring = rank->rings[unit->group];
    const tn_scope none = {0};
    if (!unit->is_sharded) return TN_OK;
    SIMULATE_TRY(tn_ring_acquire(ring, unit->index, none, rank->stream));
    SIMULATE_TRY(simulate_kept_gather(rank, unit, &unit->columns));
    if (next && next != unit) SIMULATE_TRY(tn_ring_prefetch(ring, next->index));
    return is_backward ? begin_bucket(rank, unit) : TN_OK;
}

tn_status simulate_unit_end(simulate_rank *rank, simulate_unit *unit, int is_backward) {
    if (!unit->is_sharded) return TN_OK;
    SIMULATE_TRY(tn_ring_release(rank->rings[unit->group], unit->index));
    SIMULATE_TRY(simulate_drop(rank, &unit->columns));
    return is_backward ? end_bucket(rank, unit) : TN_OK;
}

int simulate_unit_accumulates(const simulate_unit *unit, int microbatch) {
    return !unit->is_sharded && microbatch > 0;
}

/* ---- the optimizer --------------------------------------------------------------------------- */

static tn_status update_packed(const simulate_rank *rank, const simulate_unit *unit) {
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    if (!unit->gradients.value) return TN_OK;
    args.master = unit->masters;
    args.gradient = unit->gradients;
    args.first = unit->first;
    args.second = unit->second;
    args.step = rank->step;
    return tn_adamw(&args, rank->stream);
}

tn_status simulate_unit_update(simulate_rank *rank, simulate_unit *unit) {
    if (!unit->is_sharded) {
        for (int i = 0; i < unit->count; i++)
            SIMULATE_TRY(update_whole(rank, unit->weights[i]));
        return TN_OK;
    }
    unit->is_reduced = 0;
    SIMULATE_TRY(update_packed(rank, unit));
    return cast_shard(rank, unit, 0);
}
