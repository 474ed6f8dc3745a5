/* Buckets of whole gradients, which units take in turn, and what is done with a full one.
 *
 *     take    the planes of the owner before are dropped, and its memory with them: the layers'
 *             stream waits for the reduction that read them; then the bucket gets memory, in the
 *             order of the layers' stream, and the unit's gradients adopt it
 *     reduce  on comm_stream, behind what wrote the gradients, to the rank's part of them, which
 *             gets its memory in the order of the layers' stream
 *     rest    where no backward comes next, there is nothing of all that but sums
 *
 * Where gradients are added up whole every unit has a bucket of its own, and takes it once a step.
 */
#include "sharded.h"

#include "error.h"
#include "host_alloc.h"
#include "lease.h"
#include "shard_plan.h"
#include "tenure_ops.h"

/* ---- made and ended -------------------------------------------------------------------------- */

static int is_whole_sum(const tn_sharded_model *model) {
    return model->config.gradient_sum == TN_GRADIENT_SUM_WHOLE && model->config.micro_batches > 1;
}

static int trainable_units(const tn_sharded_model *model) {
    int count = 0;
    for (int i = 0; i < model->unit_count; i++)
        count += model->units[i]->bucket_elements > 0;
    return count;
}

static tn_status make_arrived(tn_sharded_model *model) {
    const int64_t packed = (int64_t)tn__sharded_most_packed(model), width = TN__SHARDED_WIDTH;
    if (!tn__sharded_passes_arrived(model, model->config.gradient_sum) || packed == 0) return TN_OK;
    TN_TRY(tn__sharded_plain(model->scope, tn__sharded_arrived_dtype(model), packed / width, width,
                             "arrived", &model->arrived));
    return tn_tensor_set_regatherable(model->arrived, 1);
}

tn_status tn__sharded_buckets_make(tn_sharded_model *model) {
    const int units = trainable_units(model);
    const int count = is_whole_sum(model) ? units : tn__sharded_shared_buckets(model);
    if (count == 0) return TN_OK;
    model->buckets = tn__host_alloc((size_t)count, sizeof *model->buckets);
    if (!model->buckets)
        return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "the buckets of model %s", model->config.name);
    model->bucket_count = count;
    const tn_status status = make_arrived(model);
    if (status != TN_OK) tn__sharded_buckets_end(model);
    return status;
}

/* What fails to end here goes with the model's scope. */
void tn__sharded_buckets_end(tn_sharded_model *model) {
    tn__error_scope_begin();
    for (int i = 0; i < model->bucket_count; i++)
        tn__sharded_buffer_abandon(&model->buckets[i].buffer, model->config.stream);
    tn__sharded_buffer_abandon(&model->fp8.sent, model->config.stream);
    tn__sharded_buffer_abandon(&model->fp8.come, model->config.stream);
    tn__sharded_buffer_abandon(&model->fp8.decoded, model->config.stream);
    if (model->arrived.value) (void)tn_tensor_destroy(model->arrived, model->config.stream);
    if (model->made_shard.value) (void)tn_tensor_destroy(model->made_shard, model->config.stream);
    model->arrived = model->made_shard = (tn_tensor){0};
    tn__host_free(model->buckets);
    model->buckets = NULL;
    model->bucket_count = 0;
    (void)tn__error_scope_end(TN_OK);
}

/* ---- taken ----------------------------------------------------------------------------------- */

tn_status tn__sharded_bucket_drop(tn_sharded_model *model, tn__sharded_unit *unit) {
    for (int i = 0; i < unit->part_count; i++)
        if (unit->parts[i].gradient.value)
            TN_TRY(tn_plane_drop(unit->parts[i].gradient, TN_PLANE_DATA, model->config.stream));
    if (unit->is_updated) TN_TRY(tn__sharded_plane_drop(unit->gradient, model->config.stream));
    if (unit->bucket) {
        TN_TRY(tn__sharded_buffer_end(&unit->bucket->buffer, model->config.stream));
        unit->bucket->owner = NULL;
    }
    unit->bucket = NULL;
    return TN_OK;
}

/* What is reduced between a tensor's last element and the next tensor is 0: it counts in the norm,
 * and in the update of what is packed there. */
static tn_status clear_gap(const tn_sharded_model *model, char *elements, size_t bytes) {
    const size_t element_bytes = tn_dtype_bytes(model->config.gradient_dtype);
    const size_t end = tn__shard_round_up(bytes, TN__SHARD_BUCKET_ALIGNMENT * element_bytes);
    if (end == bytes) return TN_OK;
    return tn_fill(model->device, elements + bytes, 0, end - bytes, model->config.stream);
}

/* The gradient's plane, in the bucket; nobody has written it yet. */
static tn_status adopt(const tn_sharded_model *model, const tn__sharded_part *part,
                       const tn__sharded_bucket *bucket) {
    const size_t element_bytes = tn_dtype_bytes(model->config.gradient_dtype);
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_plane_layout layout;
    tn_plane_view view;
    tn_lease lease;
    TN_TRY(tn_plane_layout_get(part->gradient, TN_PLANE_DATA, &layout));
    memory.plane = TN_PLANE_DATA;
    memory.data = (char *)bucket->buffer.data + part->bucket_offset * element_bytes;
    memory.data_bytes = layout.data_bytes;
    memory.stream = model->config.stream;
    TN_TRY(tn_plane_adopt(part->gradient, &memory));
    TN_TRY(tn_lease_begin(part->gradient, TN_PLANE_DATA, TN_WRITE, model->config.stream, &lease,
                          &view));
    const tn_status status = clear_gap(model, view.data, layout.data_bytes);
    const tn_status ended = tn_lease_abandon(lease);
    return status == TN_OK ? ended : status;
}

static tn_status adopt_all(tn_sharded_model *model, tn__sharded_unit *unit,
                           tn__sharded_bucket *bucket) {
    tn_status status = TN_OK;
    unit->bucket = bucket;
    bucket->owner = unit;
    for (int i = 0; i < unit->part_count && status == TN_OK; i++)
        if (unit->parts[i].gradient.value) status = adopt(model, &unit->parts[i], bucket);
    if (status == TN_OK) return TN_OK;
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)tn__sharded_bucket_drop(model, unit);
    tn__error_restore(&saved);
    return status;
}

static tn_status make_buffer(const tn_sharded_model *model, const tn__sharded_unit *unit,
                             tn__sharded_bucket *bucket) {
    const size_t bytes = is_whole_sum(model) ? tn__sharded_bucket_bytes(model, unit)
                                             : tn__sharded_most_bucket_bytes(model);
    return tn__sharded_buffer_make(model, bytes, model->config.stream, "bucket", &bucket->buffer);
}

/* Its own, which it may have already, or the next one that comes round. */
static tn__sharded_bucket *next_bucket(const tn_sharded_model *model,
                                       const tn__sharded_unit *unit) {
    if (!is_whole_sum(model)) return &model->buckets[model->next_bucket];
    int index = 0;
    for (int i = 0; model->units[i] != unit; i++)
        index += model->units[i]->bucket_elements > 0;
    return &model->buckets[index];
}

tn_status tn__sharded_bucket_may_take(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    if (unit->bucket_elements == 0) return TN_OK;
    const tn__sharded_unit *owner = next_bucket(model, unit)->owner;
    if (!owner || owner->phase != TN__SHARDED_BACKWARD) return TN_OK;
    return TN_FAIL(TN_IN_USE,
                   "model %s: unit %s takes the bucket of unit %s, whose backward has begun and "
                   "not ended: end it first, or take more gradient_slots than %d",
                   model->config.name, unit->name, owner->name, model->config.gradient_slots);
}

tn_status tn__sharded_bucket_take(tn_sharded_model *model, tn__sharded_unit *unit) {
    if (unit->bucket_elements == 0) return TN_OK;
    if (is_whole_sum(model) && unit->ended > 0) return TN_OK;
    tn__sharded_bucket *bucket = next_bucket(model, unit);
    if (bucket->owner) TN_TRY(tn__sharded_bucket_drop(model, bucket->owner));
    if (unit->bucket) TN_TRY(tn__sharded_bucket_drop(model, unit));
    TN_TRY(make_buffer(model, unit, bucket));
    TN_TRY(adopt_all(model, unit, bucket));
    if (!is_whole_sum(model)) model->next_bucket = (model->next_bucket + 1) % model->bucket_count;
    return TN_OK;
}

static tn_status note_use(const tn_sharded_model *model, tn_tensor tensor, tn_access access) {
    tn_plane_view view;
    tn_lease lease;
    tn_plane_state state;
    if (tensor.value == 0) return TN_OK;
    TN_TRY(tn_plane_state_get(tensor, TN_PLANE_DATA, &state));
    if (state != TN_PLANE_VALID) return TN_OK;
    TN_TRY(tn_lease_begin(tensor, TN_PLANE_DATA, access, model->config.stream, &lease, &view));
    return tn__sharded_end_write(lease, TN_OK);
}

/* `stream` is behind all that is on comm_stream now: with uses noted here, the update's wait for
 * nothing that is put there later. A master is read there by gathers that make a shard of it; one
 * that comes before the update would wait for `stream`. That counts as a write of the master. */
static tn_status await_reduction(const tn_sharded_model *model, tn__sharded_unit *unit) {
    const int comes_update = unit->ended == model->config.micro_batches && !model->is_update_ahead;
    TN_TRY(note_use(model, unit->gradient, TN_READ));
    if (!unit->is_shard_made || !comes_update) return TN_OK;
    TN_TRY(tn__sharded_check_master(unit));
    const tn_status noted = note_use(model, unit->master, TN_UPDATE);
    const tn_status kept = tn__sharded_keep_master(unit);
    return noted == TN_OK ? kept : noted;
}

/* Unless its owner still writes, or adds to it. */
static void vacate(tn_sharded_model *model, const tn__sharded_bucket *bucket) {
    tn__sharded_unit *owner = bucket->owner;
    if (!owner || owner->phase != TN__SHARDED_IDLE) return;
    if (is_whole_sum(model) && owner->ended < model->config.micro_batches) return;
    tn__error_scope_begin();
    if (tn__sharded_bucket_drop(model, owner) == TN_OK) (void)await_reduction(model, owner);
    (void)tn__error_scope_end(TN_OK);
}

void tn__sharded_bucket_vacate(tn_sharded_model *model) {
    if (model->bucket_count == 0) return;
    if (!is_whole_sum(model)) {
        vacate(model, &model->buckets[model->next_bucket]);
        return;
    }
    for (int i = 0; i < model->bucket_count; i++)
        vacate(model, &model->buckets[i]);
}

static int is_in_backward(const tn_sharded_model *model) {
    for (int i = 0; i < model->unit_count; i++)
        if (model->units[i]->phase == TN__SHARDED_BACKWARD) return 1;
    return 0;
}

void tn__sharded_rest(tn_sharded_model *model) {
    for (int i = 0; i < model->bucket_count; i++)
        vacate(model, &model->buckets[i]);
    if (is_in_backward(model)) return;
    tn__error_scope_begin();
    (void)tn__sharded_plane_drop(model->arrived, model->config.stream);
    (void)tn__sharded_fp8_end(model, model->config.stream);
    (void)tn__error_scope_end(TN_OK);
}

tn_status tn__sharded_bucket_check(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    for (int i = 0; i < unit->part_count; i++) {
        tn_plane_state state;
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        const tn_tensor gradient = unit->parts[i].gradient;
        if (gradient.value == 0) continue;
        TN_TRY(tn_plane_state_get(gradient, TN_PLANE_DATA, &state));
        if (state == TN_PLANE_VALID) continue;
        TN_TRY(tn_tensor_info_get(gradient, &info));
        return TN_FAIL(TN_INVALID_STATE,
                       "model %s: the gradient of %s in unit %s was not written between "
                       "backward_begin and backward_end: write it, zeros if there is none, or "
                       "make the tensor frozen",
                       model->config.name, info.name, unit->name);
    }
    return TN_OK;
}

/* ---- reduced --------------------------------------------------------------------------------- */

/* READ on comm_stream, which so comes behind what wrote the gradients. */
static tn_status lease_gradients(const tn_sharded_model *model, tn__sharded_unit *unit) {
    for (int i = 0; i < unit->part_count; i++) {
        tn_plane_view view;
        unit->leases[i] = (tn_lease){0};
        if (unit->parts[i].gradient.value == 0) continue;
        TN_TRY(tn_lease_begin(unit->parts[i].gradient, TN_PLANE_DATA, TN_READ,
                              model->config.comm_stream, &unit->leases[i], &view));
    }
    return TN_OK;
}

static tn_status end_leases(tn__sharded_unit *unit, tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    for (int i = 0; i < unit->part_count; i++) {
        const tn_lease lease = unit->leases[i];
        if (lease.value == 0) continue;
        unit->leases[i] = (tn_lease){0};
        const tn_status ended = status == TN_OK ? tn_lease_end(lease) : tn_lease_abandon(lease);
        if (status != TN_OK || ended == TN_OK) continue;
        tn__error_save(&saved);
        status = ended;
        TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    }
    if (status != TN_OK) tn__error_restore(&saved);
    return status;
}

/* The bucket's sums over ranks, of the rank's part, to `sums`; in FP8, what they are made of. */
static tn_status put_reduction(tn_sharded_model *model, tn__sharded_unit *unit, void *sums) {
    const tn_segment *segments;
    size_t count;
    if (model->config.gradient_wire == TN_GRADIENT_WIRE_FP8) {
        TN_TRY(tn__sharded_fp8_send(model, unit));
    } else {
        TN_TRY(tn_shard_bucket_segments(unit->plan, &segments, &count));
        TN_TRY(tn_reduce_scatter_uneven(model->config.comm, unit->bucket->buffer.data, sums,
                                        segments, count, model->config.gradient_dtype,
                                        TN_REDUCE_SUM, model->config.comm_stream));
    }
    model->sent = unit;
    model->counts.reductions++;
    return TN_OK;
}

tn_status tn__sharded_end_write(tn_lease lease, tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    const tn_status ended = tn_lease_end(lease);
    if (ended != TN_OK && status == TN_OK) tn__error_save(&saved);
    if (ended != TN_OK) tn__lease_end_surely(lease);
    if (status == TN_OK) status = ended;
    if (status != TN_OK) tn__error_restore(&saved);
    return status;
}

/* Into `to`, whose tail stays as it is; {0}: other ranks have all of it, or it is FP8. */
static tn_status reduce_to(tn_sharded_model *model, tn__sharded_unit *unit, tn_tensor to) {
    tn_plane_view view;
    tn_lease lease;
    if (to.value == 0) return put_reduction(model, unit, NULL);
    TN_TRY(tn_lease_begin(to, TN_PLANE_DATA, TN_UPDATE, model->config.comm_stream, &lease, &view));
    return tn__sharded_end_write(lease, put_reduction(model, unit, view.data));
}

/* All that a reduction needs, before anything is put for all ranks. */
static tn_status make_room(tn_sharded_model *model, const tn__sharded_unit *unit) {
    TN_TRY(tn__sharded_fp8_make(model));
    if (unit->held_elements == 0) return TN_OK;
    TN_TRY(tn__sharded_plane_make(model, model->arrived, tn__sharded_most_packed(model)));
    return tn__sharded_plane_make(model, unit->gradient, unit->held_elements);
}

static tn_status send(tn_sharded_model *model, tn__sharded_unit *unit) {
    const int passes = tn__sharded_passes_arrived(model, model->config.gradient_sum);
    tn_tensor to = passes && unit->held_elements > 0 ? model->arrived : unit->gradient;
    if (model->config.gradient_wire == TN_GRADIENT_WIRE_FP8) to = (tn_tensor){0};
    TN_TRY(make_room(model, unit));
    tn_status status = lease_gradients(model, unit);
    if (status == TN_OK) status = reduce_to(model, unit, to);
    return end_leases(unit, status);
}

static tn_status sum_fp8(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    tn_plane_view view;
    tn_lease lease;
    if (unit->held_elements == 0) return TN_OK;
    TN_TRY(tn_lease_begin(model->arrived, TN_PLANE_DATA, TN_UPDATE, model->config.comm_stream,
                          &lease, &view));
    return tn__sharded_end_write(lease, tn__sharded_fp8_sum(model, unit, view.data));
}

/* What has arrived, as the rank's part, or on top of what is there of micro-batches before. It is
 * added once: a view that the driver refuses to end then goes with its scope. */
static tn_status take_arrived(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    const tn_stream stream = model->config.comm_stream;
    const int64_t count = (int64_t)unit->held_elements;
    const int adds = tn__sharded_adds_parts(model) && unit->ended > 0;
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
    tn_tensor from = {0}, to = {0};
    tn__saved_error saved;
    if (count == 0) return TN_OK;
    TN_TRY(tn__sharded_view(model->arrived, 0, count, model->scope, stream, &from));
    tn_status status = tn__sharded_view(unit->gradient, 0, count, unit->scope, stream, &to);
    if (status == TN_OK) {
        axpy.x = convert.x = from, axpy.y = convert.y = to;
        status = adds ? tn_axpy(&axpy, stream) : tn_convert(&convert, stream);
    }
    tn__error_save(&saved);
    if (to.value) (void)tn_tensor_destroy(to, stream);
    (void)tn_tensor_destroy(from, stream);
    tn__error_restore(&saved);
    return status;
}

static tn_status take(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    if (!tn__sharded_passes_arrived(model, model->config.gradient_sum)) return TN_OK;
    if (model->config.gradient_wire == TN_GRADIENT_WIRE_FP8) TN_TRY(sum_fp8(model, unit));
    return take_arrived(model, unit);
}

tn_status tn__sharded_reduce(tn_sharded_model *model, tn__sharded_unit *unit) {
    const int is_last = unit->ended + 1 == model->config.micro_batches;
    if (unit->bucket_elements == 0) return TN_OK;
    if (!tn__sharded_adds_parts(model) && !is_last) return TN_OK;
    if (model->sent != unit) TN_TRY(send(model, unit));
    if (!model->is_taken) TN_TRY(take(model, unit));
    model->is_taken = 1;
    if (is_last && model->is_update_ahead) TN_TRY(tn__sharded_update_ahead(model, unit));
    model->sent = NULL;
    model->is_taken = 0;
    return TN_OK;
}
