/* Adopted memory: checked, made a plane, and given back to its owner.
 *
 * Invariants: a tn__foreign belongs to exactly one plane from the adoption until the plane gives
 * its memory back, and is freed by its release. The owner gets his memory back behind every use
 * that leases have noted (plane_order.h): a plane without noted uses is not waited for.
 */
#include "adopt.h"

#include "books.h"
#include "format_table.h"
#include "host_alloc.h"
#include "plane_order.h"
#include "plane_transition.h"
#include "saved_set.h"
#include "scope.h"
#include "tensor_view.h"

/* What kernels and GEMM libraries ask of an address that they are given. */
enum { CUDA_ALIGNMENT = 16 };

/* ---- checks -------------------------------------------------------------------------------- */

static size_t alignment_on(tn_device *device, tn_dtype dtype) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TN_CHECK(tn_device_info_get(device, &info) == TN_OK);
    if (info.driver == TN_DRIVER_CUDA) return CUDA_ALIGNMENT;
    return tn_dtype_bits(dtype) < 8 ? 1 : tn_dtype_bytes(dtype);
}

/* Where memory is to be used, and the call that it was given to, for the texts. */
typedef struct adoption {
    tn_device *device;
    const char *call;
} adoption;

static tn_status check_place(const adoption *to, const char *part, const void *address) {
    const tn__driver *driver = tn__device_driver(to->device);
    tn__memory_place place = TN__PLACE_UNTOLD;
    if (!driver->memory_place) return TN_OK;
    TN_TRY(driver->memory_place(tn__device_state(to->device), address, &place));
    TN_REQUIRE(place != TN__PLACE_NONE,
               "%s: %s at %p is neither device memory nor locked host memory", to->call, part,
               address);
    TN_REQUIRE(place != TN__PLACE_PEER, "%s: %s at %p is memory of another device", to->call, part,
               address);
    return TN_OK;
}

/* `bytes` of the `given` ones are used. */
static tn_status check_part(const adoption *to, const char *part, const void *address, size_t given,
                            size_t bytes, size_t alignment) {
    TN_REQUIRE(given >= bytes, "%s: %s of the plane takes %zu bytes: %zu were given", to->call,
               part, bytes, given);
    if (bytes == 0) return TN_OK;
    TN_REQUIRE(address, "%s: %s is NULL, and the plane has %zu bytes of it", to->call, part, bytes);
    TN_REQUIRE((uintptr_t)address % alignment == 0, "%s: %s at %p is not aligned to %zu bytes",
               to->call, part, address, alignment);
    TN_REQUIRE((uintptr_t)address <= UINTPTR_MAX - (bytes - 1),
               "%s: %s of %zu bytes at %p passes the end of all addresses", to->call, part, bytes,
               address);
    TN_TRY(check_place(to, part, address));
    return check_place(to, part, (const char *)address + bytes - 1);
}

static tn_status check_apart(const adoption *to, const tn_foreign_memory *memory,
                             const tn_plane_layout *layout) {
    uintptr_t data = (uintptr_t)memory->data, scale = (uintptr_t)memory->scale;
    if (layout->data_bytes == 0 || layout->scale_bytes == 0) return TN_OK;
    TN_REQUIRE(data + layout->data_bytes <= scale || scale + layout->scale_bytes <= data,
               "%s: data at %p and scales at %p overlap", to->call, memory->data, memory->scale);
    return TN_OK;
}

static tn_status check_memory(tn__tensor_object *tensor, const tn_foreign_memory *memory,
                              const char *call) {
    const adoption to = {tensor->scope->books->device, call};
    tn_plane_layout layout;
    TN_TRY(tn__format_layout(tensor->format, tensor->dtype, tensor->rows, tensor->cols,
                             memory->plane, &layout));
    size_t scale_alignment = alignment_on(to.device, layout.scale_dtype);
    if (layout.global_scale_offset >= 0) scale_alignment = alignment_on(to.device, TN_FP32);
    TN_TRY(check_part(&to, "data", memory->data, memory->data_bytes, layout.data_bytes,
                      alignment_on(to.device, tensor->dtype)));
    TN_TRY(check_part(&to, "scale", memory->scale, memory->scale_bytes, layout.scale_bytes,
                      scale_alignment));
    return check_apart(&to, memory, &layout);
}

/* ---- adopting ------------------------------------------------------------------------------ */

static void run_release(tn__deferred *self) {
    tn__foreign *foreign = (tn__foreign *)self; /* its first member */
    if (foreign->release) foreign->release(foreign->context);
    tn__host_free(foreign);
}

static tn_status new_foreign(tn__books *books, const tn_foreign_memory *memory, tn__foreign **out) {
    tn__foreign *foreign = tn__host_alloc(1, sizeof *foreign);
    if (!foreign) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = tn__books_stream_id(books, memory->stream, &foreign->stream_id);
    if (status != TN_OK) {
        tn__host_free(foreign);
        return status;
    }
    foreign->deferred.run = run_release;
    foreign->books = books;
    foreign->stream = memory->stream;
    foreign->is_read_only = memory->read_only != 0;
    foreign->release = memory->release;
    foreign->context = memory->context;
    *out = foreign;
    return TN_OK;
}

static tn_status adopt(tn__tensor_object *tensor, const tn_foreign_memory *memory,
                       const char *call) {
    void *blocks[TN__PART_COUNT] = {memory->data, memory->scale};
    tn__foreign *foreign = NULL;
    TN_TRY(check_memory(tensor, memory, call));
    TN_TRY(new_foreign(tensor->scope->books, memory, &foreign));
    tn_status status = tn__transition_adopt(tensor, memory->plane, foreign, blocks);
    if (status != TN_OK) tn__host_free(foreign);
    return status;
}

tn_status tn_tensor_adopt(tn_scope scope, const tn_tensor_config *config,
                          const tn_foreign_memory *memory, tn_tensor *out) {
    tn__scope_object *object;
    tn__tensor_object *tensor = NULL;
    TN_REQUIRE(memory && memory->size == sizeof *memory,
               "tn_tensor_adopt: memory is not TN_FOREIGN_MEMORY_INIT");
    TN_REQUIRE(out, "tn_tensor_adopt: out is NULL");
    TN_TRY(tn__tensor_config_check(config));
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = tn__scope_add_tensor(object, config, &tensor);
    if (status == TN_OK) {
        status = adopt(tensor, memory, "tn_tensor_adopt");
        if (status != TN_OK) tn__scope_delete_tensor(tensor);
    }
    if (status == TN_OK) *out = tensor->handle;
    tn__scope_unlock(object);
    return status;
}

/* Whether another plane holds the same values nobody here can tell, so there must be none. */
static tn_status check_empty(const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__plane_object *plane = &tensor->planes[i];
        if (plane->state == TN_PLANE_ABSENT && !tn__plane_has_remains(plane)) continue;
        if (plane->first_lease) return tn__fail_in_use(plane->first_lease, "adopt");
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_plane_adopt: tensor %s has its plane %s, which is %s: only a tensor "
                       "without planes takes memory; drop it first",
                       tensor->name, tn_plane_name((tn_plane)i),
                       tn__plane_state_name(plane->state));
    }
    return TN_OK;
}

tn_status tn_plane_adopt(tn_tensor tensor, const tn_foreign_memory *memory) {
    tn__tensor_object *object;
    TN_REQUIRE(memory && memory->size == sizeof *memory,
               "tn_plane_adopt: memory is not TN_FOREIGN_MEMORY_INIT");
    TN_TRY(tn__tensor_acquire(tensor, &object));
    tn_status status = tn__view_refuse(object, "adopt");
    if (status == TN_OK) status = tn__saved_admit(object);
    if (status == TN_OK) status = check_empty(object);
    if (status == TN_OK) status = adopt(object, memory, "tn_plane_adopt");
    tn__tensor_unlock(object);
    return status;
}

/* ---- giving back --------------------------------------------------------------------------- */

/* The owner's stream may have been adopted since. */
static int is_same_stream(uint64_t a, uint64_t b) { return ((a ^ b) & ~TN__STREAM_ID_MAY_GO) == 0; }

static int is_used_elsewhere(const tn__plane_object *plane, uint64_t stream_id) {
    if (plane->has_write && !is_same_stream(plane->write.stream_id, stream_id)) return 1;
    for (size_t i = 0; i < plane->read_count; i++) {
        if (!is_same_stream(plane->reads[i].stream_id, stream_id)) return 1;
    }
    return 0;
}

/* The owner's stream is there still: he has said so. If it is not, or its handle names another one
 * by now (also that of this thread), it is out of reach, but for a wait on the host. */
tn_status tn__foreign_await(tn__plane_object *plane) {
    const tn__foreign *foreign = plane->foreign;
    tn__books *books = foreign->books;
    uint64_t stream_id = 0;
    if (tn__driver_is_gone()) return TN_OK; /* and all work with it */
    if (!is_used_elsewhere(plane, foreign->stream_id)) return TN_OK;
    tn__error_scope_begin();
    tn_status status = tn__books_stream_id(books, foreign->stream, &stream_id);
    int is_other = foreign->stream && !is_same_stream(stream_id, foreign->stream_id);
    int is_lost = status == TN_INVALID_ARGUMENT || (status == TN_OK && is_other);
    status = tn__error_scope_end(is_lost ? TN_OK : status);
    if (is_lost) return tn__plane_order_await_device(books->device);
    if (status != TN_OK) return status;
    TN_TRY(tn__plane_order_before(books, plane, TN_WRITE, foreign->stream, stream_id));
    return tn__plane_order_check_after(books, plane, foreign->stream, stream_id);
}

void tn__foreign_release(tn__foreign *foreign) {
    tn__defer(foreign->books->lock, &foreign->deferred);
}

/* The default stream stands in for one that has ended: it exists always, and its order is as good
 * as any for an owner whose own order is gone. */
void tn__foreign_forget(tn__foreign *foreign, uint64_t stream_id) {
    if (foreign->stream_id != stream_id) return;
    foreign->stream = NULL;
    foreign->stream_id = 0;
}

tn_status tn__foreign_admit(const tn__tensor_object *tensor, tn_plane plane, tn_access access) {
    const tn__foreign *foreign = tensor->planes[plane].foreign;
    if (!foreign || !foreign->is_read_only) return TN_OK;
    if (access != TN_WRITE && access != TN_UPDATE) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "tensor %s, plane %s is memory that was adopted to be read only: no %s",
                   tensor->name, tn_plane_name(plane), tn__access_name(access));
}
