/* Tensors of other libraries: a DLPack tensor, and one of its scales, become an adopted plane.
 *
 * Invariants: nothing of what is handed over is changed, and no deleter called, before all of it
 * has been adopted. What the structs say is checked before it is used: they come from outside.
 */
#include "dlpack_types.h"
#include "driver.h"
#include "format_table.h"
#include "host_alloc.h"
#include "scope.h"
#include "tensor_internal.h"
#include "tenure_lifetime.h"

/* One DLPack tensor, of either version: the two differ in where things are. */
typedef struct dlpack_source {
    tn__dl_managed *plain;
    tn__dl_versioned *versioned;
    const tn__dl_tensor *tensor; /* NULL: no tensor was given */
} dlpack_source;

static dlpack_source plain_source(void *managed) {
    tn__dl_managed *plain = managed;
    return (dlpack_source){.plain = plain, .tensor = plain ? &plain->tensor : NULL};
}

static dlpack_source versioned_source(void *managed) {
    tn__dl_versioned *versioned = managed;
    return (dlpack_source){.versioned = versioned, .tensor = versioned ? &versioned->tensor : NULL};
}

static void delete_source(const dlpack_source *source) {
    if (source->plain && source->plain->deleter) source->plain->deleter(source->plain);
    if (source->versioned && source->versioned->deleter) {
        source->versioned->deleter(source->versioned);
    }
}

static int has_flag(const dlpack_source *source, uint64_t flag) {
    return source->versioned && (source->versioned->flags & flag);
}

/* ---- what the struct says ------------------------------------------------------------------ */

static tn_status check_version(const dlpack_source *source) {
    if (!source->versioned || source->versioned->major == TN__DL_MAJOR) return TN_OK;
    return TN_FAIL(
        TN_UNSUPPORTED,
        "tn_dlpack_import: the tensor is of DLPack %u.%u: only 1.x is known, and nothing "
        "of it but the deleter can be used",
        source->versioned->major, source->versioned->minor);
}

static tn_status check_shape(const tn__dl_tensor *tensor) {
    TN_REQUIRE(tensor->rank >= 0, "tn_dlpack_import: the tensor has %d dimensions", tensor->rank);
    if (tensor->rank > TN_RANK_MAX) {
        return TN_FAIL(TN_UNSUPPORTED, "tn_dlpack_import: %d dimensions: at most %d are known",
                       tensor->rank, TN_RANK_MAX);
    }
    TN_REQUIRE(tensor->shape || tensor->rank == 0, "tn_dlpack_import: the shape is NULL");
    for (int i = 0; i < tensor->rank; i++) {
        TN_REQUIRE(tensor->shape[i] >= 0, "tn_dlpack_import: dimension %d is %lld", i,
                   (long long)tensor->shape[i]);
    }
    return TN_OK;
}

static int is_empty(const tn__dl_tensor *tensor) {
    for (int i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] == 0) return 1;
    }
    return 0;
}

/* Row-major without gaps. The stride of a dimension of one element, and all strides of an empty
 * tensor, mean nothing. */
static tn_status check_strides(const tn__dl_tensor *tensor) {
    int64_t expected = 1;
    if (!tensor->strides || is_empty(tensor)) return TN_OK;
    for (int i = tensor->rank - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != expected) {
            return TN_FAIL(
                TN_UNSUPPORTED,
                "tn_dlpack_import: dimension %d has a stride of %lld elements where %lld "
                "would be without gaps: make it contiguous first",
                i, (long long)tensor->strides[i], (long long)expected);
        }
        if (tensor->shape[i] > TN__ELEMENTS_MAX / expected) break; /* refused with the shape */
        expected *= tensor->shape[i];
    }
    return TN_OK;
}

static tn_status check_device(tn_device *device, const tn__dl_tensor *tensor) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn__dl_device at = tensor->device;
    TN_TRY(tn_device_info_get(device, &info));
    if (info.driver == TN_DRIVER_HOST) {
        TN_REQUIRE(at.type == TN__DL_CPU || at.type == TN__DL_CUDA_HOST,
                   "tn_dlpack_import: the tensor is on a device of kind %d, the scope's device is "
                   "the host",
                   at.type);
        return TN_OK;
    }
    int is_device = at.type == TN__DL_CUDA && at.id == info.ordinal;
    int is_host = at.type == TN__DL_CUDA_HOST || at.type == TN__DL_CUDA_MANAGED;
    TN_REQUIRE(is_device || is_host,
               "tn_dlpack_import: the tensor is on device %d of kind %d, the scope's is CUDA "
               "device %d",
               at.id, at.type, info.ordinal);
    return TN_OK;
}

static tn_status find_dtype(const dlpack_source *source, tn_dtype *dtype, int *lanes) {
    tn__dl_dtype type = source->tensor->dtype;
    if (!tn__dlpack_dtype(type, dtype, lanes)) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_dlpack_import: no element type has code %d, %d bits and %d lanes",
                       type.code, type.bits, type.lanes);
    }
    if (tn_dtype_bits(*dtype) < 8 && has_flag(source, TN__DL_SUBBYTE_PADDED)) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_dlpack_import: %s elements with a byte for each: they "
                       "must be packed",
                       tn_dtype_name(*dtype));
    }
    return TN_OK;
}

static tn_status check_source(tn_device *device, const dlpack_source *source) {
    TN_TRY(check_version(source));
    TN_TRY(check_shape(source->tensor));
    TN_REQUIRE(source->tensor->byte_offset <= UINTPTR_MAX - (uintptr_t)source->tensor->data,
               "tn_dlpack_import: a byte offset of %llu passes the end of all addresses",
               (unsigned long long)source->tensor->byte_offset);
    TN_TRY(check_strides(source->tensor));
    return check_device(device, source->tensor);
}

static void *address_of(const tn__dl_tensor *tensor) {
    return tensor->data ? (char *)tensor->data + tensor->byte_offset : NULL;
}

/* ---- what it becomes ----------------------------------------------------------------------- */

/* The bytes of all elements; they come without gaps. Too many for 63 bits are refused. */
static tn_status bytes_of(const tn__dl_tensor *tensor, size_t *out) {
    int64_t elements = is_empty(tensor) ? 0 : 1;
    for (int i = 0; i < tensor->rank && elements > 0; i++) {
        TN_REQUIRE(tensor->shape[i] <= TN__ELEMENTS_MAX / elements,
                   "tn_dlpack_import: the shape has more than 2^62 elements");
        elements *= tensor->shape[i];
    }
    uint64_t bits = (uint64_t)tensor->dtype.bits * tensor->dtype.lanes;
    TN_REQUIRE(elements == 0 || bits <= UINT64_MAX / 2 / (uint64_t)elements,
               "tn_dlpack_import: the elements do not fit 63 bits of bytes");
    *out = (size_t)((uint64_t)elements * bits + 7) / 8;
    return TN_OK;
}

/* The plane's shape is the tensor's, or its transpose: which, the format's layout says. */
static tn_status config_of(const tn_dlpack_import_config *wanted, const dlpack_source *source,
                           tn_tensor_config *out) {
    const tn__dl_tensor *tensor = source->tensor;
    tn_plane_layout layout;
    int lanes = 1;
    out->format = wanted->format;
    out->scale_mode = wanted->scale_mode;
    out->policy = wanted->policy;
    out->frozen = wanted->frozen;
    out->name = wanted->name;
    out->site = wanted->site;
    TN_TRY(find_dtype(source, &out->dtype, &lanes));
    if (!tn__format_takes_dtype(wanted->format, out->dtype)) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_dlpack_import: format %s does not take dtype %s: name a format that "
                       "does, and its scales",
                       tn_format_name(wanted->format), tn_dtype_name(out->dtype));
    }
    out->rank = tensor->rank;
    for (int i = 0; i < tensor->rank; i++)
        out->shape[i] = tensor->shape[i];
    if (lanes == 2 && out->rank > 0) {
        TN_REQUIRE(out->shape[out->rank - 1] <= TN__ELEMENTS_MAX / 2,
                   "tn_dlpack_import: the shape has more than 2^62 elements");
        out->shape[out->rank - 1] *= 2;
    }
    if (wanted->plane != TN_PLANE_COL) return TN_OK;
    /* of a matrix of 1 x 2: stored so, or the other way round? */
    TN_TRY(tn__format_layout(wanted->format, out->dtype, 1, 2, TN_PLANE_COL, &layout));
    if (layout.rows == 1) return TN_OK;
    TN_REQUIRE(out->rank == 2,
               "tn_dlpack_import: a transposed plane is a matrix: it has %d "
               "dimensions",
               out->rank);
    int64_t cols = out->shape[0];
    out->shape[0] = out->shape[1];
    out->shape[1] = cols;
    return TN_OK;
}

/* All scales of the plane, in one stretch: valid ones alone do not say what lies between them. */
static tn_status add_scales(tn_device *device, const dlpack_source *scale,
                            const tn_plane_layout *layout, tn_foreign_memory *memory) {
    tn_dtype dtype = TN_BYTE;
    int lanes = 1;
    if (!scale->tensor) {
        TN_REQUIRE(layout->scale_bytes == 0,
                   "tn_dlpack_import: the plane has %zu bytes of scales, and none were given",
                   layout->scale_bytes);
        return TN_OK;
    }
    TN_TRY(check_source(device, scale));
    TN_TRY(find_dtype(scale, &dtype, &lanes));
    TN_REQUIRE(dtype == TN_BYTE || (dtype == layout->scale_dtype && layout->scale_rows > 0),
               "tn_dlpack_import: the scales are %s: not what the plane has, nor bytes",
               tn_dtype_name(dtype));
    TN_TRY(bytes_of(scale->tensor, &memory->scale_bytes));
    TN_REQUIRE(memory->scale_bytes == layout->scale_bytes,
               "tn_dlpack_import: %zu bytes of scales were given: with its padding the plane has "
               "%zu",
               memory->scale_bytes, layout->scale_bytes);
    memory->scale = address_of(scale->tensor);
    return TN_OK;
}

/* A format whose rows begin at bytes has gaps that DLPack does not tell of. */
static tn_status check_rows(const tn_tensor_config *config, const tn_plane_layout *layout) {
    if (tn_dtype_bits(config->dtype) >= 8 || layout->cols % 2 == 0 || layout->rows <= 1) {
        return TN_OK;
    }
    return TN_FAIL(TN_UNSUPPORTED,
                   "tn_dlpack_import: packed rows of %lld %s elements do not begin at bytes",
                   (long long)layout->cols, tn_dtype_name(config->dtype));
}

/* ---- the release --------------------------------------------------------------------------- */

typedef struct dlpack_import {
    tn_device *device;
    tn_stream stream;
    dlpack_source data, scale;
    int is_host;
} dlpack_import;

static int is_on_host(const dlpack_source *source) {
    if (!source->tensor) return 0;
    return source->tensor->device.type == TN__DL_CPU ||
           source->tensor->device.type == TN__DL_CUDA_HOST;
}

/* Who frees host memory frees it at once. A stream that should have lived till now, and has not, is
 * waited for with all others; if even that fails, no work is going on any more. */
static void release_import(void *context) {
    dlpack_import *self = context;
    if (self->is_host) {
        tn_status status = tn_stream_synchronize(self->device, self->stream);
        if (status != TN_OK) status = tn_device_synchronize(self->device);
        (void)status;
    }
    delete_source(&self->data);
    delete_source(&self->scale);
    tn__device_release(self->device);
    tn__host_free(self);
}

static dlpack_import *new_import(tn_device *device, const dlpack_source *data,
                                 const dlpack_source *scale, tn_stream stream) {
    dlpack_import *self = tn__host_alloc(1, sizeof *self);
    if (!self) return NULL;
    tn__device_retain(device);
    self->device = device;
    self->stream = stream;
    self->data = *data;
    self->scale = *scale;
    self->is_host = is_on_host(data) || is_on_host(scale);
    return self;
}

/* ---- import -------------------------------------------------------------------------------- */

static tn_status check_config(const tn_dlpack_import_config *config, const dlpack_source *data,
                              const dlpack_source *scale, const void *out) {
    TN_REQUIRE(config->size == sizeof *config,
               "tn_dlpack_import: config is not TN_DLPACK_IMPORT_CONFIG_INIT");
    TN_REQUIRE(out, "tn_dlpack_import: out is NULL");
    TN_REQUIRE(data->tensor, "tn_dlpack_import: there is no tensor");
    TN_REQUIRE(data->tensor != scale->tensor,
               "tn_dlpack_import: data and scales are the same tensor");
    TN_REQUIRE(data->plain ? !config->scale_versioned : !config->scale,
               "tn_dlpack_import: the scales are of the other version of the struct");
    TN_REQUIRE(tn__format_is_known(config->format), "tn_dlpack_import: unknown format %d",
               (int)config->format);
    return TN_OK;
}

static tn_status describe(tn_device *device, const tn_dlpack_import_config *config,
                          const dlpack_source *data, const dlpack_source *scale,
                          tn_tensor_config *tensor_config, tn_foreign_memory *memory) {
    tn_plane_layout layout;
    int64_t rows = 1, cols = 1;
    TN_TRY(check_source(device, data));
    TN_TRY(config_of(config, data, tensor_config));
    TN_TRY(bytes_of(data->tensor, &memory->data_bytes));
    TN_TRY(tn__tensor_flatten(tensor_config, &rows, &cols));
    TN_TRY(tn__format_layout(config->format, tensor_config->dtype, rows, cols, config->plane,
                             &layout));
    TN_TRY(check_rows(tensor_config, &layout));
    TN_TRY(add_scales(device, scale, &layout, memory));
    memory->plane = config->plane;
    memory->data = address_of(data->tensor);
    memory->read_only = has_flag(data, TN__DL_READ_ONLY) || has_flag(scale, TN__DL_READ_ONLY);
    return TN_OK;
}

static tn_status import(tn_scope scope, const tn_dlpack_import_config *config,
                        const dlpack_source *data, const dlpack_source *scale, tn_stream stream,
                        tn_tensor *out) {
    tn_tensor_config tensor_config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_device *device = NULL;
    TN_TRY(check_config(config, data, scale, out));
    TN_TRY(tn__scope_device(scope, &device));
    TN_TRY(describe(device, config, data, scale, &tensor_config, &memory));
    dlpack_import *self = new_import(device, data, scale, stream);
    if (!self) return TN_OUT_OF_HOST_MEMORY;
    memory.stream = stream;
    memory.release = release_import;
    memory.context = self;
    tn_status status = tn_tensor_adopt(scope, &tensor_config, &memory, out);
    if (status != TN_OK) {
        tn__device_release(device);
        tn__host_free(self);
    }
    return status;
}

/* Made nowhere in particular. */
static tn_dlpack_import_config plain_config(void) {
    tn_dlpack_import_config config = TN_DLPACK_IMPORT_CONFIG_INIT;
    config.site = NULL;
    return config;
}

tn_status tn_dlpack_import(tn_scope scope, struct DLManagedTensor *managed,
                           const tn_dlpack_import_config *config, tn_stream stream,
                           tn_tensor *out) {
    tn_dlpack_import_config plain = plain_config();
    if (!config) config = &plain;
    dlpack_source data = plain_source(managed), scale = plain_source(config->scale);
    return import(scope, config, &data, &scale, stream, out);
}

tn_status tn_dlpack_import_versioned(tn_scope scope, struct DLManagedTensorVersioned *managed,
                                     const tn_dlpack_import_config *config, tn_stream stream,
                                     tn_tensor *out) {
    tn_dlpack_import_config plain = plain_config();
    if (!config) config = &plain;
    dlpack_source data = versioned_source(managed),
                  scale = versioned_source(config->scale_versioned);
    return import(scope, config, &data, &scale, stream, out);
}
