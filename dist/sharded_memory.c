/* Memory that gradients pass through: made where it is first needed, gone where nobody reads it any
 * more, and how much it is. What is made on one stream and ends on another ends behind both. */
#include "sharded.h"

#include "error.h"
#include "tenure_ops.h"

/* ---- buffers --------------------------------------------------------------------------------- */

tn_status tn__sharded_buffer_make(const tn_sharded_model *model, size_t bytes, tn_stream stream,
                                  const char *name, tn__sharded_buffer *out) {
    tn_plane_view view;
    tn_lease lease;
    tn_tensor memory = {0};
    TN_TRY(tn__sharded_plain(model->scope, TN_BYTE, 1, (int64_t)bytes, name, &memory));
    const tn_status status = tn_lease_begin(memory, TN_PLANE_DATA, TN_WRITE, stream, &lease, &view);
    if (status != TN_OK) {
        tn__saved_error saved;
        tn__error_save(&saved);
        (void)tn_tensor_destroy(memory, stream);
        tn__error_restore(&saved);
        return status;
    }
    *out = (tn__sharded_buffer){memory, lease, view.data};
    return TN_OK;
}

tn_status tn__sharded_buffer_end(tn__sharded_buffer *buffer, tn_stream stream) {
    if (buffer->memory.value == 0) return TN_OK;
    if (buffer->lease.value) TN_TRY(tn_lease_end(buffer->lease));
    buffer->lease = (tn_lease){0};
    TN_TRY(tn_tensor_destroy(buffer->memory, stream));
    *buffer = (tn__sharded_buffer){.data = NULL};
    return TN_OK;
}

void tn__sharded_buffer_abandon(tn__sharded_buffer *buffer, tn_stream stream) {
    if (tn__sharded_buffer_end(buffer, stream) == TN_OK) return;
    if (buffer->lease.value) TN_CHECK(tn_lease_abandon(buffer->lease) == TN_OK);
    *buffer = (tn__sharded_buffer){.data = NULL};
}

/* ---- planes ---------------------------------------------------------------------------------- */

tn_status tn__sharded_plane_make(const tn_sharded_model *model, tn_tensor tensor, size_t count) {
    const tn_stream stream = model->config.stream;
    tn_plane_state state;
    tn_plane_view view;
    tn_lease lease;
    if (tensor.value == 0) return TN_OK;
    TN_TRY(tn_plane_state_get(tensor, TN_PLANE_DATA, &state));
    if (state == TN_PLANE_VALID) return TN_OK;
    TN_TRY(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, stream, &lease, &view));
    const size_t held = count * tn_dtype_bytes(view.dtype), all = view.layout.data_bytes;
    tn_status status = TN_OK;
    if (held < all)
        status = tn_fill(model->device, (char *)view.data + held, 0, all - held, stream);
    if (status == TN_OK) status = tn_lease_end(lease);
    if (status == TN_OK) return TN_OK;
    tn__saved_error saved;
    tn__error_save(&saved);
    TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    tn__error_restore(&saved);
    return status;
}

tn_status tn__sharded_plane_drop(tn_tensor tensor, tn_stream stream) {
    return tensor.value ? tn_plane_drop(tensor, TN_PLANE_DATA, stream) : TN_OK;
}

/* ---- how much -------------------------------------------------------------------------------- */

size_t tn__sharded_bucket_bytes(const tn_sharded_model *model, const tn__sharded_unit *unit) {
    return unit->bucket_elements * tn_dtype_bytes(model->config.gradient_dtype);
}

size_t tn__sharded_most_bucket_bytes(const tn_sharded_model *model) {
    size_t most = 0;
    for (int i = 0; i < model->unit_count; i++) {
        const size_t bytes = tn__sharded_bucket_bytes(model, model->units[i]);
        if (bytes > most) most = bytes;
    }
    return most;
}

size_t tn__sharded_most_packed(const tn_sharded_model *model) {
    size_t most = 0;
    for (int i = 0; i < model->unit_count; i++)
        if (model->units[i]->packed_elements > most) most = model->units[i]->packed_elements;
    return most;
}

size_t tn__sharded_made_shard_bytes(const tn_sharded_model *model) {
    size_t most = 0;
    for (int i = 0; i < model->unit_count; i++) {
        size_t bytes = 0;
        if (!model->units[i]->is_shard_made) continue;
        TN_CHECK(tn_shard_bytes(model->units[i]->plan, model->rank, &bytes) == TN_OK);
        if (bytes > most) most = bytes;
    }
    return most;
}

int tn__sharded_shared_buckets(const tn_sharded_model *model) {
    int units = 0;
    for (int i = 0; i < model->unit_count; i++)
        units += model->units[i]->bucket_elements > 0;
    return model->config.gradient_slots < units ? model->config.gradient_slots : units;
}

tn_dtype tn__sharded_arrived_dtype(const tn_sharded_model *model) {
    return model->config.gradient_wire == TN_GRADIENT_WIRE_FP8 ? TN_FP32
                                                               : model->config.gradient_dtype;
}

static size_t whole_bytes(const tn_sharded_model *model, tn_gradient_sum sum) {
    const int many = model->config.micro_batches > 1;
    size_t bytes = 0;
    if (many && sum == TN_GRADIENT_SUM_WHOLE) {
        for (int i = 0; i < model->unit_count; i++)
            bytes += tn__sharded_bucket_bytes(model, model->units[i]);
        return bytes;
    }
    return (size_t)tn__sharded_shared_buckets(model) * tn__sharded_most_bucket_bytes(model);
}

size_t tn__sharded_buckets_bytes(const tn_sharded_model *model, tn_gradient_sum sum) {
    size_t bytes = whole_bytes(model, sum);
    if (tn__sharded_passes_arrived(model, sum))
        bytes += tn__sharded_most_packed(model) * tn_dtype_bytes(tn__sharded_arrived_dtype(model));
    return bytes + tn__sharded_fp8_buffer_bytes(model);
}
