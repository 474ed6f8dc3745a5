/* How a plane is derived from another one; and what it was before a REPLACE lease.
 *
 * Invariants: a derivation is a READ lease on the source and a WRITE lease on the plane, which the
 * library takes for itself; both are held while the format's function runs without the lock.
 */
#include "plane_transition.h"

#include "format_table.h"
#include "saved_set.h"
#include "scratch_slot.h"

/* ---- views --------------------------------------------------------------------------------- */

tn_status tn__plane_old_view_of(const tn__lease_object *lease, tn_plane_view *out) {
    const tn__tensor_object *tensor = lease->tensor;
    if (lease->access != TN_REPLACE) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tensor %s, plane %s is under a %s lease: only REPLACE has old contents",
                       tensor->name, tn_plane_name(lease->plane), tn__access_name(lease->access));
    }
    if (lease->state_before != TN_PLANE_VALID && lease->state_before != TN_PLANE_STALE) {
        return TN_FAIL(TN_INVALID_STATE, "tensor %s, plane %s was %s: it has no old contents",
                       tensor->name, tn_plane_name(lease->plane),
                       tn__plane_state_name(lease->state_before));
    }
    tn__plane_view_fill(tensor, lease->plane, lease->at->replaced, out);
    return TN_OK;
}

/* ---- derive -------------------------------------------------------------------------------- */

static int has_any_valid(const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (tn__state_is_complete(tensor->planes[i].state)) return 1;
    }
    return 0;
}

/* Whether the plane can be derived now, from which one and with what. */
static tn_status find_source(const tn__tensor_object *tensor, tn_plane plane, tn_plane *source,
                             tn_derive_function *derive) {
    const char *state = tn__plane_state_name(tensor->planes[plane].state);
    const char *why;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__lease_object *writer = tn__plane_writer(&tensor->planes[i]);
        if (writer) {
            (void)tn__fail_in_use(writer, "derivation");
            return TN_IN_USE;
        }
    }
    if (!has_any_valid(tensor)) {
        TN_TRY(tn__saved_admit(tensor));
        return TN_FAIL(TN_INVALID_STATE,
                       "tensor %s, plane %s is %s and no plane of it is valid: write one first",
                       tensor->name, tn_plane_name(plane), state);
    }
    if (!tn__format_source(tensor->format, plane, source, &why)) {
        return TN_FAIL(TN_UNSUPPORTED, "tensor %s, plane %s is %s and can not be derived: %s",
                       tensor->name, tn_plane_name(plane), state, why);
    }
    TN_ASSERT(tn__state_is_complete(tensor->planes[*source].state));
    *derive = NULL;
    if (tensor->rows == 0 || tensor->cols == 0) return TN_OK;
    *derive = tn__format_derive(tensor->format);
    if (!*derive) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "tensor %s, plane %s is %s and nothing can derive it: link libtenure-ops "
                       "and use it first, or call tn_format_set_derive",
                       tensor->name, tn_plane_name(plane), state);
    }
    return TN_OK;
}

static tn__lease_object lease_for_derivation(tn__tensor_object *tensor, tn_plane plane,
                                             tn_access access, tn_stream stream,
                                             uint64_t stream_id) {
    return (tn__lease_object){.tensor = tensor,
                              .plane = plane,
                              .at = &tensor->planes[plane],
                              .access = access,
                              .stream = stream,
                              .stream_id = stream_id,
                              .is_derivation = 1};
}

/* Both planes are leased, so that neither can go while the lock is given up. */
static tn_status run_derive(tn__tensor_object *tensor, tn_derive_function derive,
                            const tn__lease_object *from, const tn__lease_object *to) {
    const tn__books *books = tensor->scope->books;
    tn_device *device = books->device;
    unsigned lock = books->lock;
    tn_plane_view from_view, to_view;
    if (!derive) return TN_OK; /* only without elements: see find_source */
    tn__plane_view_fill(tensor, from->plane, from->at, &from_view);
    tn__plane_view_fill(tensor, to->plane, to->at, &to_view);
    tn__unlock(lock);
    tn_status status = derive(device, &from_view, &to_view, to->stream);
    tn__lock(lock);
    return status;
}

tn_status tn__transition_derive(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                uint64_t stream_id) {
    tn_derive_function derive = NULL;
    tn_plane source = plane;
    if (tensor->planes[plane].state == TN_PLANE_OFFLOADED) {
        return tn__transition_fetch(tensor, plane, stream);
    }
    if (tensor->planes[plane].state == TN_PLANE_VALID) {
        int is_current = 1;
        TN_TRY(tn__scratch_is_current(&tensor->planes[plane], stream, &is_current));
        if (is_current) return TN_OK;
        TN_TRY(tn__transition_drop(tensor, plane, stream, stream_id));
    }
    TN_TRY(find_source(tensor, plane, &source, &derive));
    tn__lease_object from = lease_for_derivation(tensor, source, TN_READ, stream, stream_id);
    tn__lease_object to = lease_for_derivation(tensor, plane, TN_WRITE, stream, stream_id);
    TN_TRY(tn__transition_begin(&from));
    tn_status status = tn__transition_begin(&to);
    if (status == TN_OK) {
        status = run_derive(tensor, derive, &from, &to);
        if (status == TN_OK) status = tn__transition_end(&to);
        if (status != TN_OK) tn__transition_abandon(&to);
    }
    tn__transition_abandon(&from); /* of a READ: the same as its end, but certain */
    return status;
}
