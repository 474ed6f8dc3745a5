/* Leases: the only way to a plane's addresses. And whole-plane copies, which take one.
 *
 * Invariant: a lease's handle and host memory exist before its transition is tried, so that
 * nothing can fail once the plane has changed.
 */
#include "books.h"
#include "format_table.h"
#include "lease.h"
#include "lease_check.h"
#include "plane_transition.h"
#include "scope_closing.h"
#include "tenure_lifetime.h"
#include "tensor_internal.h"
#include "tensor_view.h"

/* ---- begin --------------------------------------------------------------------------------- */

static inline tn_status new_lease(tn__tensor_object *tensor, tn_plane plane, tn_access access,
                                  tn_stream stream, tn__lease_object **out) {
    tn__books *books = tensor->books;
    tn__lease_object *lease;
    uint64_t stream_id = 0;
    TN_TRY(tn__books_stream_id(books, stream, &stream_id));
    TN_TRY(tn__books_make_lease(books, &lease));
    lease->tensor = tensor;
    lease->plane = plane;
    lease->access = access;
    lease->stream = stream;
    lease->stream_id = stream_id;
    *out = lease;
    return TN_OK;
}

static inline void delete_lease(tn__lease_object *lease) {
    tn__books_end_lease(lease->tensor->books, lease);
}

static TN__SLOW tn_status fail_no_plane(const tn__tensor_object *tensor, tn_plane plane) {
    return TN_FAIL(TN_INVALID_ARGUMENT, "tensor %s of format %s has no plane %s (%d)", tensor->name,
                   tn_format_name(tensor->format), tn_plane_name(plane), (int)plane);
}

static TN__SLOW tn_status give_up(tn__lease_object *lease, tn_status status) {
    delete_lease(lease);
    return status;
}

/* Of a tensor that is no view. */
static inline tn_status begin_own(tn__tensor_object *tensor, tn_plane plane, tn_access access,
                                  tn_stream stream, tn__lease_object **out) {
    tn__lease_object *lease;
    TN_TRY(new_lease(tensor, plane, access, stream, &lease));
    tn_status status = TN_OK;
    const tn__plane_object *object = &tensor->planes[plane];
    if (access == TN_READ &&
        __builtin_expect(object->state != TN_PLANE_VALID || object->buffer, 0)) {
        status = tn__transition_derive(tensor, plane, stream, lease->stream_id);
    }
    if (__builtin_expect(status == TN_OK, 1)) status = tn__transition_begin(lease);
    if (__builtin_expect(status != TN_OK, 0)) return give_up(lease, status);
    *out = lease;
    return TN_OK;
}

/* On the base's plane. The lock is given up while that is derived: the view may have ended then. */
static TN__SLOW tn_status begin_through(tn__tensor_object *view, tn_plane plane, tn_access access,
                                        tn_stream stream, tn__lease_object **out) {
    tn__tensor_object *base = view->view->base;
    unsigned lock = base->books->lock;
    tn_tensor handle = view->handle;
    tn__lease_object *lease = NULL;
    TN_TRY(tn__view_admit(view, plane, &access));
    TN_TRY(begin_own(base, plane, access, stream, &lease));
    if (tn__handle_peek(handle.value, TN__HANDLE_TENSOR, lock) != view) {
        tn__transition_abandon(lease);
        delete_lease(lease);
        return TN_FAIL(TN_STALE_HANDLE, "the view ended while a plane of its base was derived");
    }
    lease->through = view;
    *out = lease;
    return TN_OK;
}

static inline tn_status begin(tn__tensor_object *tensor, tn_plane plane, tn_access access,
                              tn_stream stream, tn__lease_object **out) {
    int is_known = (unsigned)plane < TN_PLANE_COUNT;
    if (__builtin_expect(!is_known || !(tensor->plane_bits & TN_PLANE_BIT(plane)), 0))
        return fail_no_plane(tensor, plane);
    if (tensor->view) return begin_through(tensor, plane, access, stream, out);
    return begin_own(tensor, plane, access, stream, out);
}

static TN__SLOW tn_status refuse(const tn_lease *lease, const tn_plane_view *view,
                                 tn_access access) {
    TN_REQUIRE(lease && view, "tn_lease_begin: %s is NULL", lease ? "view" : "lease");
    return TN_FAIL(TN_INVALID_ARGUMENT, "tn_lease_begin: unknown access %d", (int)access);
}

tn_status tn_lease_begin(tn_tensor tensor, tn_plane plane, tn_access access, tn_stream stream,
                         tn_lease *lease, tn_plane_view *view) {
    tn__tensor_object *object = NULL;
    tn__lease_object *begun = NULL;
    if (__builtin_expect(!lease || !view || (unsigned)access > TN_REPLACE, 0))
        return refuse(lease, view, access);
    TN_TRY(tn__tensor_acquire(tensor, &object));
    unsigned lock = tn__handle_lock(tensor.value);
    int is_checked = object->books->checks_leases && access == TN_READ;
    tn_status status = begin(object, plane, access, stream, &begun);
    if (__builtin_expect(status != TN_OK, 0)) {
        tn__unlock(lock);
        return status;
    }
    begun->caller = __builtin_return_address(0);
    tn__plane_view_fill(begun->tensor, plane, view);
    if (begun->through) tn__view_cut(begun->through, view);
    *lease = begun->handle;
    tn__unlock(lock);
    return __builtin_expect(is_checked, 0) ? tn__lease_check_begin(*lease) : TN_OK;
}

tn_status tn_lease_old_view(tn_lease lease, tn_plane_view *out) {
    tn__lease_object *object;
    TN_REQUIRE(out, "tn_lease_old_view: out is NULL");
    TN_TRY(tn__lease_acquire(lease, &object));
    tn_status status = tn__plane_old_view_of(object, out);
    if (status == TN_OK && object->through) tn__view_cut(object->through, out);
    tn__tensor_unlock(object->tensor);
    return status;
}

/* ---- end ----------------------------------------------------------------------------------- */

/* Its lock is held, and given up. */
static inline tn_status end(tn__lease_object *lease) {
    const tn__tensor_object *tensor = lease->tensor;
    tn_status status = tn__transition_end(lease);
    if (__builtin_expect(status == TN_OK, 1)) delete_lease(lease);
    tn__closing_unlock(tensor);
    return status;
}

static TN__SLOW tn_status end_checked(tn_lease lease) {
    tn__lease_object *object;
    TN_TRY(tn__lease_check_end(lease));
    TN_TRY(tn__lease_acquire(lease, &object));
    return end(object);
}

tn_status tn_lease_end(tn_lease lease) {
    tn__lease_object *object;
    TN_TRY(tn__lease_acquire(lease, &object));
    if (__builtin_expect(!object->is_checked || object->is_stream_ended, 1)) return end(object);
    tn__tensor_unlock(object->tensor);
    return end_checked(lease);
}

static tn_status abandon(tn_lease lease, int is_untouched) {
    tn__lease_object *object;
    TN_TRY(tn__lease_acquire(lease, &object));
    const tn__tensor_object *tensor = object->tensor;
    object->is_untouched = is_untouched;
    tn__transition_abandon(object);
    delete_lease(object);
    tn__closing_unlock(tensor);
    return TN_OK;
}

tn_status tn_lease_abandon(tn_lease lease) { return abandon(lease, 0); }

tn_status tn__lease_undo(tn_lease lease) { return abandon(lease, 1); }

/* ---- exports ------------------------------------------------------------------------------- */

/* A handle of an export is alive as long as the export is. */
static tn__lease_object *acquire_own(tn_lease lease) {
    tn__lease_object *object = NULL;
    TN_CHECK(tn__lease_acquire(lease, &object) == TN_OK);
    return object;
}

void tn__lease_mark_export(tn_lease lease) {
    tn__lease_object *object = acquire_own(lease);
    object->is_export = 1;
    tn__unlock(object->tensor->books->lock);
}

void tn__lease_end_surely(tn_lease lease) {
    tn__lease_object *object = acquire_own(lease);
    const tn__tensor_object *tensor = object->tensor;
    tn__transition_end_surely(object);
    delete_lease(object);
    tn__closing_unlock(tensor);
}

/* ---- copies of whole planes ---------------------------------------------------------------- */

static tn_status check_sizes(tn_tensor tensor, tn_plane plane, size_t data_bytes, const void *scale,
                             size_t scale_bytes) {
    tn_plane_layout layout;
    TN_TRY(tn_plane_layout_get(tensor, plane, &layout));
    TN_REQUIRE(data_bytes == layout.data_bytes, "plane %s has %zu bytes of data: %zu were given",
               tn_plane_name(plane), layout.data_bytes, data_bytes);
    TN_REQUIRE(scale_bytes == layout.scale_bytes,
               "plane %s has %zu bytes of scales: %zu were given", tn_plane_name(plane),
               layout.scale_bytes, scale_bytes);
    TN_REQUIRE(scale || scale_bytes == 0, "plane %s has scales: scale is NULL",
               tn_plane_name(plane));
    return TN_OK;
}

/* The work of a copy that failed may be on the stream in part: the lease is abandoned, and what
 * failed is what the caller hears of. */
static tn_status finish(tn_lease lease, tn_status status) {
    if (status == TN_OK) status = tn_lease_end(lease);
    if (status != TN_OK) TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    return status;
}

tn_status tn_plane_write(tn_tensor tensor, tn_plane plane, const void *data, size_t data_bytes,
                         const void *scale, size_t scale_bytes, tn_stream stream) {
    tn_device *device = NULL;
    tn_plane_view view = {0};
    tn_lease lease = {0};
    TN_REQUIRE(data || data_bytes == 0, "tn_plane_write: data is NULL");
    TN_TRY(check_sizes(tensor, plane, data_bytes, scale, scale_bytes));
    TN_TRY(tn__tensor_device(tensor, &device));
    TN_TRY(tn_lease_begin(tensor, plane, TN_WRITE, stream, &lease, &view));
    tn_status status = tn_copy(device, view.data, data, data_bytes, stream);
    if (status == TN_OK) status = tn_copy(device, view.scale, scale, scale_bytes, stream);
    return finish(lease, status);
}

tn_status tn_plane_fill(tn_tensor tensor, tn_plane plane, unsigned char byte, tn_stream stream) {
    tn_device *device = NULL;
    tn_plane_view view = {0};
    tn_lease lease = {0};
    TN_TRY(tn__tensor_device(tensor, &device));
    TN_TRY(tn_lease_begin(tensor, plane, TN_WRITE, stream, &lease, &view));
    tn_status status = tn_fill(device, view.data, byte, view.layout.data_bytes, stream);
    if (status == TN_OK) {
        status = tn_fill(device, view.scale, byte, view.layout.scale_bytes, stream);
    }
    return finish(lease, status);
}

tn_status tn_plane_read(tn_tensor tensor, tn_plane plane, void *data, size_t data_bytes,
                        void *scale, size_t scale_bytes, tn_stream stream) {
    tn_device *device = NULL;
    tn_plane_view view = {0};
    tn_lease lease = {0};
    TN_REQUIRE(data || data_bytes == 0, "tn_plane_read: data is NULL");
    TN_TRY(check_sizes(tensor, plane, data_bytes, scale, scale_bytes));
    TN_TRY(tn__tensor_device(tensor, &device));
    TN_TRY(tn_lease_begin(tensor, plane, TN_READ, stream, &lease, &view));
    tn_status status = tn_copy(device, data, view.data, data_bytes, stream);
    if (status == TN_OK) status = tn_copy(device, scale, view.scale, scale_bytes, stream);
    return finish(lease, status);
}
