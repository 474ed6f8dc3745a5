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

/* Not linked to the plane yet. NULL: `why` says why. */
static inline tn__lease_object *new_lease(tn__tensor_object *tensor, tn_plane plane,
                                          tn_access access, tn_stream stream, tn_status *why) {
    tn__books *books = tensor->books;
    uint64_t stream_id = tn__books_recent_id(books, stream);
    if (__builtin_expect(stream_id == TN__NO_STREAM_ID, 0)) {
        *why = tn__books_ask_stream_id(books, stream, &stream_id);
        if (*why != TN_OK) return NULL;
    }
    tn__lease_object *lease = tn__books_make_lease(books, why);
    if (__builtin_expect(!lease, 0)) return NULL;
    lease->tensor = tensor;
    lease->at = &tensor->planes[plane];
    lease->plane = plane;
    lease->access = access;
    lease->stream = stream;
    lease->stream_id = stream_id;
    return lease;
}

static inline void delete_lease(tn__lease_object *lease) {
    tn__books_end_lease(lease->tensor->books, lease);
}

static TN__SLOW tn_status fail_no_plane(const tn__tensor_object *tensor, tn_plane plane) {
    return TN_FAIL(TN_INVALID_ARGUMENT, "tensor %s of format %s has no plane %s (%d)", tensor->name,
                   tn_format_name(tensor->format), tn_plane_name(plane), (int)plane);
}

static TN__SLOW tn_status begin_other(tn__lease_object *lease) {
    const tn__plane_object *at = lease->at;
    if (lease->access == TN_READ && (at->state != TN_PLANE_VALID || at->buffer)) {
        TN_TRY(tn__transition_derive(lease->tensor, lease->plane, lease->stream, lease->stream_id));
    }
    return tn__transition_begin_any(lease);
}

static TN__SLOW tn__lease_object *give_up(tn__lease_object *lease, tn_status status,
                                          tn_status *why) {
    delete_lease(lease);
    *why = status;
    return NULL;
}

/* Of a tensor that is no view. */
static inline tn__lease_object *begin_own(tn__tensor_object *tensor, tn_plane plane,
                                          tn_access access, tn_stream stream, tn_status *why) {
    tn__lease_object *lease = new_lease(tensor, plane, access, stream, why);
    if (__builtin_expect(!lease, 0)) return NULL;
    if (tn__transition_read_again(lease) || tn__transition_write_again(lease)) return lease;
    tn_status status = begin_other(lease);
    return __builtin_expect(status == TN_OK, 1) ? lease : give_up(lease, status, why);
}

/* On the base's plane. The lock is given up while that is derived: the view may have ended then. */
static TN__SLOW tn__lease_object *begin_through(tn__tensor_object *view, tn_plane plane,
                                                tn_access access, tn_stream stream,
                                                tn_status *why) {
    tn__tensor_object *base = view->view->base;
    unsigned lock = base->books->lock;
    tn_tensor handle = view->handle;
    *why = tn__view_admit(view, plane, &access);
    if (*why != TN_OK) return NULL;
    tn__lease_object *lease = begin_own(base, plane, access, stream, why);
    if (!lease) return NULL;
    if (tn__handle_peek(handle.value, TN__HANDLE_TENSOR, lock) == view) {
        lease->through = view;
        return lease;
    }
    tn__transition_abandon(lease);
    delete_lease(lease);
    *why = TN_FAIL(TN_STALE_HANDLE, "the view ended while a plane of its base was derived");
    return NULL;
}

static inline int has_plane(const tn__tensor_object *tensor, tn_plane plane) {
    return (unsigned)plane < TN_PLANE_COUNT && (tensor->plane_bits & TN_PLANE_BIT(plane));
}

static TN__SLOW tn_status refuse(const tn_lease *lease, const tn_plane_view *view,
                                 tn_access access) {
    TN_REQUIRE(lease && view, "tn_lease_begin: %s is NULL", lease ? "view" : "lease");
    return TN_FAIL(TN_INVALID_ARGUMENT, "tn_lease_begin: unknown access %d", (int)access);
}

/* The tensor's lock is held, and given up; the tensor itself may be gone, if it is a view. */
static TN__SLOW tn_status fail_begin(tn_tensor tensor, tn_status status) {
    tn__unlock(tn__handle_lock(tensor.value));
    return status;
}

tn_status tn_lease_begin(tn_tensor tensor, tn_plane plane, tn_access access, tn_stream stream,
                         tn_lease *lease, tn_plane_view *view) {
    tn__tensor_object *object;
    tn__lease_object *begun;
    tn_status status = TN_OK;
    if (__builtin_expect(!lease || !view || (unsigned)access > TN_REPLACE, 0))
        return refuse(lease, view, access);
    TN_TRY(tn__tensor_acquire(tensor, &object));
    int is_checked = object->books->checks_leases && access == TN_READ;
    if (__builtin_expect(!has_plane(object, plane), 0))
        return fail_begin(tensor, fail_no_plane(object, plane));
    if (__builtin_expect(object->view != NULL, 0))
        begun = begin_through(object, plane, access, stream, &status);
    else
        begun = begin_own(object, plane, access, stream, &status);
    if (__builtin_expect(!begun, 0)) return fail_begin(tensor, status);
    begun->caller = __builtin_return_address(0);
    tn__plane_view_fill(begun->tensor, plane, begun->at, view);
    if (__builtin_expect(begun->through != NULL, 0)) tn__view_cut(begun->through, view);
    *lease = begun->handle;
    tn__unlock(tn__handle_lock(tensor.value));
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
    unsigned lock = tn__handle_lock(lease->handle.value);
    tn_status status = tn__transition_end(lease);
    if (__builtin_expect(status == TN_OK, 1)) delete_lease(lease);
    if (__builtin_expect(tensor->scope->is_closing, 0))
        tn__closing_settle(tensor);
    else
        tn__unlock(lock);
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
