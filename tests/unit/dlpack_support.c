/* See dlpack_support.h. */
#include "dlpack_support.h"

#include <string.h>

const tn__dl_tensor *tensor_of(const any_managed *self) {
    return self->plain ? &self->plain->tensor : &self->versioned->tensor;
}

tn_status export_any(int is_versioned, tn_tensor tensor, const tn_dlpack_export_config *config,
                     any_managed *out) {
    *out = (any_managed){NULL, NULL};
    if (is_versioned) {
        return tn_dlpack_export_versioned(tensor, config,
                                          (struct DLManagedTensorVersioned **)&out->versioned);
    }
    return tn_dlpack_export(tensor, config, (struct DLManagedTensor **)&out->plain);
}

void delete_any(const any_managed *self) {
    if (self->plain) self->plain->deleter(self->plain);
    if (self->versioned) self->versioned->deleter(self->versioned);
}

tn_status import_any(tn_scope scope, const any_managed *data, const tn_dlpack_import_config *config,
                     tn_stream stream, tn_tensor *out) {
    if (data->versioned) {
        return tn_dlpack_import_versioned(scope, (struct DLManagedTensorVersioned *)data->versioned,
                                          config, stream, out);
    }
    return tn_dlpack_import(scope, (struct DLManagedTensor *)data->plain, config, stream, out);
}

tn_dlpack_export_config export_of(tn_plane plane, tn_dlpack_part part, tn_stream stream) {
    tn_dlpack_export_config config = TN_DLPACK_EXPORT_CONFIG_INIT;
    config.plane = plane;
    config.part = part;
    config.stream = stream;
    return config;
}

tn_tensor tensor_of_format(const tensor_fixture *f, tn_format format, tn_dtype dtype, int rank,
                           const int64_t *shape) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.format = format;
    config.dtype = dtype;
    config.rank = rank;
    memcpy(config.shape, shape, (size_t)rank * sizeof *shape);
    config.name = "ours";
    EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    return tensor;
}
