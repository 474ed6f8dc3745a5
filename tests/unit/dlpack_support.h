/* DLPack tensors of either version of the struct, and tensors to export. */
#ifndef TENURE_DLPACK_SUPPORT_H
#define TENURE_DLPACK_SUPPORT_H

#include "dlpack_abi.h"
#include "tenure_lifetime.h"
#include "tensor_fixture.h"

/* A DLPack tensor of ours or of somebody else's, as the version of the test has it. */
typedef struct any_managed {
    tn__dl_managed *plain;
    tn__dl_versioned *versioned;
} any_managed;

const tn__dl_tensor *tensor_of(const any_managed *self);
tn_status export_any(int is_versioned, tn_tensor tensor, const tn_dlpack_export_config *config,
                     any_managed *out);
void delete_any(const any_managed *self);
tn_status import_any(tn_scope scope, const any_managed *data, const tn_dlpack_import_config *config,
                     tn_stream stream, tn_tensor *out);
tn_dlpack_export_config export_of(tn_plane plane, tn_dlpack_part part, tn_stream stream);
tn_tensor tensor_of_format(const tensor_fixture *f, tn_format format, tn_dtype dtype, int rank,
                           const int64_t *shape);

#endif
