/* DLPack's allocator callback: see tenure_adapters.h. A tensor is one piece of host memory: the
 * struct that the caller gets, with its shape and strides behind it, and what its deleter needs.
 */
#include <stddef.h>
#include <stdio.h>

#include "dlpack_abi.h"
#include "driver.h"
#include "framework_calls.h"
#include "host_alloc.h"
#include "tenure_adapters.h"

enum { ALIGNMENT = 256, RANK_MAX = 1 << 16, DEVICES_MAX = 64 };

typedef struct made_tensor {
    tn__dl_versioned versioned; /* first: what the caller sees */
    void *block;
    int64_t extents[]; /* shape, then strides */
} made_tensor;

static _Thread_local tn_stream work_streams[DEVICES_MAX];

/* ---- streams --------------------------------------------------------------------------------- */

tn_status tn_dlpack_work_stream_set(int device, tn_stream stream) {
    TN_REQUIRE(device >= 0 && device < DEVICES_MAX, "tn_dlpack_work_stream_set: device %d", device);
    work_streams[device] = stream;
    return TN_OK;
}

int tn_dlpack_current_work_stream(int device_type, int32_t device_id, void **out_stream) {
    int is_cuda = device_type == TN__DL_CUDA;
    if (!out_stream || (device_type != TN__DL_CPU && !is_cuda)) return -1;
    if (is_cuda && (device_id < 0 || device_id >= DEVICES_MAX)) return -1;
    *out_stream = is_cuda ? work_streams[device_id] : NULL;
    return 0;
}

/* ---- the tensor ------------------------------------------------------------------------------ */

static void delete_tensor(tn__dl_versioned *self) {
    made_tensor *tensor = (made_tensor *)self;
    if (self->tensor.device.type == TN__DL_CUDA) {
        tn__framework_free_unordered(self->tensor.device.id, tensor->block);
    } else {
        tn__host_free(tensor->block);
    }
    tn__host_free(tensor);
}

/* Bytes of the elements, and row-major strides. */
static tn_status lay_out(const tn__dl_tensor *prototype, int64_t *strides, size_t *bytes) {
    size_t bits = (size_t)prototype->dtype.bits * prototype->dtype.lanes;
    size_t elements = 1;
    TN_REQUIRE(bits > 0, "a DLPack type of %d bits and %d lanes has no size", prototype->dtype.bits,
               prototype->dtype.lanes);
    for (int32_t i = prototype->rank; i-- > 0;) {
        int64_t extent = prototype->shape[i];
        TN_REQUIRE(extent >= 0, "extent %d of the shape is %lld", i, (long long)extent);
        strides[i] = (int64_t)elements;
        TN_REQUIRE(extent == 0 || elements <= (size_t)INT64_MAX / (size_t)extent,
                   "the shape has more elements than 63 bits can count");
        elements *= (size_t)extent;
    }
    TN_REQUIRE(elements / 8 <= (SIZE_MAX - 8 * bits) / bits,
               "the shape has more bytes than 64 bits can count");
    *bytes = elements / 8 * bits + (elements % 8 * bits + 7) / 8;
    return TN_OK;
}

static tn_status take_memory(const tn__dl_device *device, size_t bytes, void **out) {
    if (device->type == TN__DL_CUDA) {
        TN_REQUIRE(device->id >= 0 && device->id < DEVICES_MAX, "%d is no CUDA device", device->id);
        return tn__framework_segment(device->id, bytes, work_streams[device->id], "dlpack", out);
    }
    if (bytes == 0) return TN_OK;
    *out = tn__host_alloc_aligned(bytes, ALIGNMENT);
    return *out ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

static tn_status fill_in(made_tensor *tensor, const tn__dl_tensor *prototype) {
    int64_t *shape = tensor->extents;
    int64_t *strides = shape + prototype->rank;
    tn__dl_versioned *versioned = &tensor->versioned;
    size_t bytes = 0;
    for (int32_t i = 0; i < prototype->rank; i++)
        shape[i] = prototype->shape[i];
    TN_TRY(lay_out(prototype, strides, &bytes));
    TN_TRY(take_memory(&prototype->device, bytes, &tensor->block));
    versioned->major = TN__DL_MAJOR;
    versioned->minor = TN__DL_MINOR;
    versioned->context = tensor;
    versioned->deleter = delete_tensor;
    versioned->tensor = (tn__dl_tensor){
        tensor->block,      prototype->device, prototype->rank, prototype->dtype, shape, strides,
        /* byte_offset */ 0};
    return TN_OK;
}

static tn_status make_tensor(const tn__dl_tensor *prototype, made_tensor **out) {
    made_tensor *tensor;
    tn_status status;
    TN_REQUIRE(prototype, "tn_dlpack_allocate: prototype is NULL");
    TN_REQUIRE(prototype->rank >= 0 && prototype->rank <= RANK_MAX,
               "tn_dlpack_allocate: a tensor of %d dimensions", prototype->rank);
    TN_REQUIRE(prototype->rank == 0 || prototype->shape, "tn_dlpack_allocate: shape is NULL");
    if (prototype->device.type != TN__DL_CUDA && prototype->device.type != TN__DL_CPU) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tn_dlpack_allocate: devices are kDLCUDA (2) and kDLCPU (1), not %d",
                       prototype->device.type);
    }
    tensor = tn__host_alloc(1, sizeof *tensor + 2 * (size_t)prototype->rank * sizeof(int64_t));
    if (!tensor) return TN_OUT_OF_HOST_MEMORY;
    status = fill_in(tensor, prototype);
    if (status == TN_OK) {
        *out = tensor;
    } else {
        tn__host_free(tensor);
    }
    return status;
}

/* ---- the callback ---------------------------------------------------------------------------- */

static const char *kind_of(tn_status status) {
    switch (status) {
    case TN_OUT_OF_DEVICE_MEMORY:
    case TN_OUT_OF_HOST_MEMORY:
    case TN_OUT_OF_ADDRESS_SPACE: return "MemoryError";
    case TN_INVALID_ARGUMENT: return "ValueError";
    case TN_UNSUPPORTED: return "BufferError";
    default: return "RuntimeError";
    }
}

int tn_dlpack_allocate(struct DLTensor *prototype, struct DLManagedTensorVersioned **out,
                       void *error_context, tn_dlpack_error set_error) {
    made_tensor *tensor = NULL;
    tn_status status = out ? make_tensor((const tn__dl_tensor *)prototype, &tensor)
                           : TN_FAIL(TN_INVALID_ARGUMENT, "tn_dlpack_allocate: out is NULL");
    if (status == TN_OK) {
        *out = (struct DLManagedTensorVersioned *)&tensor->versioned;
        return 0;
    }
    if (set_error) set_error(error_context, kind_of(status), tn_error_last());
    return -1;
}
