/* Planes for other libraries: a DLPack tensor that holds a lease until its deleter is called.
 *
 *     export     [ the struct, of either version | shape, strides | the lease ]
 *
 * Invariants: an export owns one lease, from its making to its deleter, and itself. Consumers may
 * call the deleter from any thread and at any time, so that it must not fail: what the pool can not
 * be told then it is told when the plane is freed.
 */
#include "dlpack_types.h"
#include "driver.h"
#include "host_alloc.h"
#include "lease.h"
#include "tensor_internal.h"
#include "tenure_lifetime.h"

#include <string.h>

typedef struct dlpack_export {
    union {
        tn__dl_managed plain;
        tn__dl_versioned versioned;
    } managed; /* first: consumers give its address back */
    tn_lease lease;
    int64_t shape[TN_RANK_MAX];
    int64_t strides[TN_RANK_MAX];
} dlpack_export;

/* ---- shapes -------------------------------------------------------------------------------- */

/* Row-major with rows `row_elements` apart. */
static void set_strides(dlpack_export *self, int rank, int64_t row_elements) {
    int64_t stride = row_elements;
    if (rank > 0) self->strides[rank - 1] = 1;
    for (int i = rank - 2; i >= 0; i--) {
        self->strides[i] = stride;
        stride *= self->shape[i];
    }
}

static int set_matrix(dlpack_export *self, int64_t rows, int64_t cols, int64_t row_elements) {
    self->shape[0] = rows;
    self->shape[1] = cols;
    set_strides(self, 2, row_elements);
    return 2;
}

/* A plane that is stored as the tensor is has its shape; another one is a matrix. */
static int set_data_shape(dlpack_export *self, const tn_tensor_info *info,
                          const tn_plane_view *view) {
    const tn_plane_layout *layout = &view->layout;
    int64_t row_elements = (int64_t)(layout->row_bytes * 8 / tn_dtype_bits(view->dtype));
    if (view->plane == TN_PLANE_COL && layout->rows == info->cols && layout->cols == info->rows) {
        return set_matrix(self, layout->rows, layout->cols, row_elements);
    }
    memcpy(self->shape, info->shape, sizeof info->shape);
    set_strides(self, info->rank, row_elements);
    return info->rank;
}

/* E2M1 in elements of two: rows of an odd number of them have no such shape. */
static tn_status pair_up(dlpack_export *self, tn__dl_tensor *tensor) {
    int last = tensor->rank - 1;
    TN_REQUIRE(tensor->dtype.code == TN__DL_FLOAT4_E2M1FN,
               "tn_dlpack_export: pairs are for e2m1 data");
    if (last < 0 || self->shape[last] % 2) {
        return TN_FAIL(TN_UNSUPPORTED, "tn_dlpack_export: rows of %lld elements are not pairs",
                       last < 0 ? 1LL : (long long)self->shape[last]);
    }
    tensor->dtype.lanes = 2;
    self->shape[last] /= 2;
    for (int i = 0; i < last; i++)
        self->strides[i] /= 2;
    return TN_OK;
}

static tn_status describe_data(dlpack_export *self, const tn_dlpack_export_config *config,
                               const tn_tensor_info *info, const tn_plane_view *view,
                               tn__dl_tensor *tensor) {
    tensor->data = view->data;
    tensor->dtype = tn__dlpack_type(view->dtype);
    tensor->rank = set_data_shape(self, info, view);
    return config->pairs ? pair_up(self, tensor) : TN_OK;
}

static void describe_scale(dlpack_export *self, const tn_plane_view *view, tn__dl_tensor *tensor) {
    const tn_plane_layout *layout = &view->layout;
    tensor->data = view->scale;
    tensor->dtype = tn__dlpack_type(layout->scale_dtype);
    tensor->rank = set_matrix(self, layout->scale_rows, layout->scale_cols, layout->scale_stride);
}

static void describe_block(dlpack_export *self, const tn_plane_view *view, tn__dl_tensor *tensor) {
    tensor->data = view->scale;
    tensor->dtype = tn__dlpack_type(TN_BYTE);
    tensor->rank = 1;
    self->shape[0] = (int64_t)view->layout.scale_bytes;
    self->strides[0] = 1;
}

/* ---- where it is --------------------------------------------------------------------------- */

/* Asked of the address, since a tensor's memory need not be its device's own: pools of host memory,
 * adopted memory. Consumers look for no data in a tensor without elements. */
static tn_status find_place(tn_device *device, const void *data, tn__dl_device *out) {
    const tn__driver *driver = tn__device_driver(device);
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn__memory_place place = TN__PLACE_UNTOLD;
    TN_TRY(tn_device_info_get(device, &info));
    if (data && driver->memory_place) {
        TN_TRY(driver->memory_place(tn__device_state(device), data, &place));
    }
    *out = (tn__dl_device){TN__DL_CUDA, info.ordinal};
    if (info.driver == TN_DRIVER_HOST || place == TN__PLACE_NONE) {
        *out = (tn__dl_device){TN__DL_CPU, 0};
    } else if (place == TN__PLACE_HOST) {
        *out = (tn__dl_device){TN__DL_CUDA_HOST, 0};
    }
    return TN_OK;
}

/* Who reads host memory does so at once, not in the order of a stream. */
static tn_status await_for_host(tn_device *device, tn__dl_device place, tn_stream stream) {
    if (place.type == TN__DL_CUDA) return TN_OK;
    return tn_stream_synchronize(device, stream);
}

/* ---- the deleter --------------------------------------------------------------------------- */

/* In a forked child, and once exit has begun, the lease is nobody's business any more. */
static void delete_export(dlpack_export *self) {
    if (tn__driver_is_gone()) return;
    tn__lease_end_surely(self->lease);
    tn__host_free(self);
}

static void delete_plain(tn__dl_managed *managed) { delete_export(managed->context); }

static void delete_versioned(tn__dl_versioned *managed) { delete_export(managed->context); }

/* ---- export -------------------------------------------------------------------------------- */

static tn_status check_config(const tn_dlpack_export_config *config, const void *out) {
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_dlpack_export: config is not TN_DLPACK_EXPORT_CONFIG_INIT");
    TN_REQUIRE(out, "tn_dlpack_export: out is NULL");
    TN_REQUIRE(config->access == TN_READ || config->access == TN_UPDATE,
               "tn_dlpack_export: access %d is neither READ nor UPDATE", (int)config->access);
    TN_REQUIRE(config->part == TN_DLPACK_DATA || config->part == TN_DLPACK_SCALE ||
                   config->part == TN_DLPACK_SCALE_BLOCK,
               "tn_dlpack_export: unknown part %d", (int)config->part);
    TN_REQUIRE(!config->pairs || config->part == TN_DLPACK_DATA,
               "tn_dlpack_export: pairs are for e2m1 data");
    return TN_OK;
}

static tn_status describe(dlpack_export *self, tn_tensor tensor,
                          const tn_dlpack_export_config *config, const tn_plane_view *view,
                          tn__dl_tensor *out) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_device *device = NULL;
    if (config->part != TN_DLPACK_DATA && view->layout.scale_rows == 0) {
        return TN_FAIL(TN_UNSUPPORTED, "tn_dlpack_export: plane %s has no scales",
                       tn_plane_name(view->plane));
    }
    TN_TRY(tn_tensor_info_get(tensor, &info));
    TN_TRY(tn__tensor_device(tensor, &device));
    switch (config->part) {
    case TN_DLPACK_DATA: TN_TRY(describe_data(self, config, &info, view, out)); break;
    case TN_DLPACK_SCALE: describe_scale(self, view, out); break;
    case TN_DLPACK_SCALE_BLOCK: describe_block(self, view, out); break;
    }
    out->shape = self->shape;
    out->strides = self->strides;
    TN_TRY(find_place(device, out->data, &out->device));
    return await_for_host(device, out->device, config->stream);
}

/* A leased plane, described; the version's own members are the caller's to fill. */
static tn_status make_export(tn_tensor tensor, const tn_dlpack_export_config *config,
                             dlpack_export **out, tn__dl_tensor *described) {
    tn_plane_view view = {0};
    tn_lease lease = {0};
    dlpack_export *self = tn__host_alloc(1, sizeof *self);
    if (!self) return TN_OUT_OF_HOST_MEMORY;
    tn_status status =
        tn_lease_begin(tensor, config->plane, config->access, config->stream, &lease, &view);
    if (status == TN_OK) {
        status = describe(self, tensor, config, &view, described);
        if (status != TN_OK) TN_CHECK(tn__lease_undo(lease) == TN_OK);
    }
    if (status != TN_OK) {
        tn__host_free(self);
        return status;
    }
    tn__lease_mark_export(lease);
    self->lease = lease;
    *out = self;
    return TN_OK;
}

tn_status tn_dlpack_export(tn_tensor tensor, const tn_dlpack_export_config *config,
                           struct DLManagedTensor **out) {
    dlpack_export *self = NULL;
    tn__dl_tensor described = {0};
    TN_TRY(check_config(config, out));
    TN_TRY(make_export(tensor, config, &self, &described));
    self->managed.plain = (tn__dl_managed){described, self, delete_plain};
    *out = (struct DLManagedTensor *)&self->managed.plain;
    return TN_OK;
}

tn_status tn_dlpack_export_versioned(tn_tensor tensor, const tn_dlpack_export_config *config,
                                     struct DLManagedTensorVersioned **out) {
    dlpack_export *self = NULL;
    tn__dl_tensor described = {0};
    TN_TRY(check_config(config, out));
    TN_TRY(make_export(tensor, config, &self, &described));
    self->managed.versioned = (tn__dl_versioned){TN__DL_MAJOR,
                                                 TN__DL_MINOR,
                                                 self,
                                                 delete_versioned,
                                                 config->access == TN_READ ? TN__DL_READ_ONLY : 0,
                                                 described};
    *out = (struct DLManagedTensorVersioned *)&self->managed.versioned;
    return TN_OK;
}
