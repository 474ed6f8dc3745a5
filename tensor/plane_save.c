/* Saving planes for later, and restoring them: planes change owner, memory stays where it is.
 *
 * Invariant: a plane is in one tensor. A saved tensor is an ordinary one, in whatever scope, that
 * knows that it was saved; it may be leased and destroyed like any other.
 */
#include "books.h"
#include "format_table.h"
#include "plane_transition.h"
#include "saved_set.h"
#include "scope.h"
#include "tensor_view.h"
#include "tenure_lifetime.h"

#define ALL_PLANES ((1u << TN_PLANE_COUNT) - 1)

/* ---- save ---------------------------------------------------------------------------------- */

static tn_status check_planes(const tn__tensor_object *tensor, unsigned planes) {
    TN_TRY(tn__view_refuse(tensor, "save"));
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (!(planes & TN_PLANE_BIT(i))) continue;
        TN_REQUIRE(tn__format_has_plane(tensor->format, (tn_plane)i),
                   "tensor %s of format %s has no plane %s", tensor->name,
                   tn_format_name(tensor->format), tn_plane_name((tn_plane)i));
        const tn__lease_object *lease = tensor->planes[i].first_lease;
        if (lease) return tn__fail_in_use(lease, "saving it");
    }
    return TN_OK;
}

/* Makes them valid; then a move is all that is left to do. */
static tn_status derive_planes(tn__tensor_object *tensor, unsigned planes, tn_stream stream) {
    uint64_t stream_id = 0;
    TN_TRY(tn__books_stream_id(tensor->scope->books, stream, &stream_id));
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (!(planes & TN_PLANE_BIT(i)) || tensor->planes[i].state == TN_PLANE_OFFLOADED) continue;
        TN_TRY(tn__transition_derive(tensor, (tn_plane)i, stream, stream_id));
        if (tensor->planes[i].kind == TN__MEMORY_SLOT) {
            return TN_FAIL(
                TN_INVALID_STATE,
                "tensor %s, plane %s is in a scratch slot, which is used again: save the "
                "plane that it was derived from",
                tensor->name, tn_plane_name((tn_plane)i));
        }
    }
    return check_planes(tensor, planes); /* the lock was given up while they were derived */
}

static void hand_over(tn__tensor_object *from, unsigned planes, tn__tensor_object *to) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (planes & TN_PLANE_BIT(i)) tn__transition_hand_over(from, (tn_plane)i, to);
    }
}

/* What is in a scratch slot was derived there from what goes, and would be the last copy here,
 * which nothing displaces: it leaves the slot. */
static unsigned slots_left_by(const tn__tensor_object *tensor, unsigned planes) {
    unsigned in_slots = 0;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__plane_object *plane = &tensor->planes[i];
        if ((planes & TN_PLANE_BIT(i)) || !tn__state_is_complete(plane->state)) continue;
        if (plane->kind != TN__MEMORY_SLOT) return 0;
        in_slots |= TN_PLANE_BIT(i);
    }
    return tensor->is_regatherable ? 0 : in_slots;
}

static void leave_slots(tn__tensor_object *tensor, unsigned planes) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (!(planes & TN_PLANE_BIT(i)) || tensor->planes[i].kind != TN__MEMORY_SLOT) continue;
        TN_CHECK(tn__transition_drop_announced(tensor, (tn_plane)i, NULL) == TN_OK);
    }
}

static tn_status save(tn__tensor_object *tensor, unsigned planes, tn_scope to, tn_stream stream,
                      tn_tensor *out) {
    tn_tensor_config config = tn__tensor_config_of(tensor);
    tn__tensor_object *saved = NULL;
    tn__scope_object *scope = NULL;
    TN_TRY(check_planes(tensor, planes));
    TN_TRY(derive_planes(tensor, planes, stream));
    unsigned leaving = slots_left_by(tensor, planes);
    TN_TRY(check_planes(tensor, leaving));
    TN_TRY(tn__transition_settle(tensor));
    TN_TRY(tn__scope_find_for(tensor, to, &scope));
    TN_TRY(tn__scope_add_tensor(scope, &config, &saved));
    tn_status status = tn__saved_admit(saved);
    if (status != TN_OK) {
        tn__scope_delete_tensor(saved);
        return status;
    }
    saved->is_saved = 1;
    saved->contents = tensor->contents;
    leave_slots(tensor, leaving);
    hand_over(tensor, planes, saved);
    *out = saved->handle;
    return TN_OK;
}

tn_status tn_tensor_save(tn_tensor tensor, unsigned planes, tn_scope scope, tn_stream stream,
                         tn_tensor *saved) {
    tn__tensor_object *object;
    tn__scope_object *to;
    TN_REQUIRE(saved, "tn_tensor_save: saved is NULL");
    TN_REQUIRE(planes != 0 && (planes & ~ALL_PLANES) == 0,
               "tn_tensor_save: planes is 0x%x: it has a TN_PLANE_BIT for each plane to save",
               planes);
    TN_TRY(tn__tensor_acquire_for(tensor, scope, &object, &to));
    tn_status status = save(object, planes, scope, stream, saved);
    tn__tensor_unlock(object);
    return status;
}

/* ---- restore ------------------------------------------------------------------------------- */

static tn_status check_saved(const tn__tensor_object *tensor) {
    const tn__lease_object *lease = tn__tensor_lease(tensor);
    if (!tensor->is_saved) {
        return TN_FAIL(TN_INVALID_STATE, "tensor %s is not a saved one: tn_tensor_save makes those",
                       tensor->name);
    }
    if (lease) return tn__fail_in_use(lease, "restoring it");
    TN_TRY(tn__saved_admit(tensor));
    return tensor->first_view ? tn__fail_viewed(tensor->first_view, "restoring it") : TN_OK;
}

/* The object stays; the new handle is another name of it. */
static tn_status restore(tn__tensor_object *tensor, tn__scope_object *scope, tn_tensor *out) {
    tn_tensor handle = {0};
    unsigned lock = scope->books->lock;
    TN_TRY(check_saved(tensor));
    TN_TRY(tn__handle_create(TN__HANDLE_TENSOR, tensor, lock, &handle.value));
    tn_status status = tn__scope_move_tensor(tensor, scope);
    tn__handle_destroy(status == TN_OK ? tensor->handle.value : handle.value);
    if (status != TN_OK) return status;
    tensor->handle = handle;
    tensor->is_saved = 0;
    *out = handle;
    return TN_OK;
}

tn_status tn_tensor_restore(tn_tensor saved, tn_scope scope, tn_tensor *out) {
    tn__tensor_object *object;
    tn__scope_object *to;
    TN_REQUIRE(out, "tn_tensor_restore: out is NULL");
    TN_TRY(tn__tensor_acquire_for(saved, scope, &object, &to));
    tn_status status = restore(object, to, out);
    tn__tensor_unlock(object);
    return status;
}

/* ---- restore into a tensor ----------------------------------------------------------------- */

static int are_alike(const tn__tensor_object *a, const tn__tensor_object *b) {
    return a->format == b->format && a->dtype == b->dtype && a->rows == b->rows &&
           a->cols == b->cols && a->scale_mode == b->scale_mode;
}

/* The tensor has no contents, or those that were saved. */
static tn_status check_contents(const tn__tensor_object *saved, const tn__tensor_object *tensor) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        const tn__plane_object *plane = &tensor->planes[i];
        const tn__lease_object *writer = tn__plane_writer(plane);
        if (writer) return tn__fail_in_use(writer, "restoring into the tensor");
        if (saved->planes[i].state != TN_PLANE_ABSENT && plane->state != TN_PLANE_ABSENT) {
            return TN_FAIL(TN_INVALID_STATE,
                           "tensor %s has a plane %s (%s): drop it before that plane is restored",
                           tensor->name, tn_plane_name((tn_plane)i),
                           tn__plane_state_name(plane->state));
        }
        if (tn__state_is_complete(plane->state) && tensor->contents != saved->contents) {
            return TN_FAIL(TN_INVALID_STATE,
                           "tensor %s has been written since its planes were saved: plane %s is "
                           "not of the same contents",
                           tensor->name, tn_plane_name((tn_plane)i));
        }
    }
    return TN_OK;
}

static tn_status restore_into(tn__tensor_object *saved, tn__tensor_object *tensor) {
    TN_TRY(check_saved(saved));
    TN_REQUIRE(saved != tensor, "tn_tensor_restore_into: both are tensor %s", tensor->name);
    TN_REQUIRE(are_alike(saved, tensor),
               "tn_tensor_restore_into: tensor %s is of another format or shape than saved %s",
               tensor->name, saved->name);
    TN_TRY(tn__view_refuse(tensor, "restore"));
    TN_TRY(tn__saved_admit(tensor));
    TN_TRY(check_contents(saved, tensor));
    TN_TRY(tn__transition_settle(saved));
    TN_TRY(tn__transition_settle(tensor));
    leave_slots(saved, ALL_PLANES); /* derived there, and can be again */
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (saved->planes[i].state == TN_PLANE_ABSENT) continue;
        tn__transition_hand_over(saved, (tn_plane)i, tensor);
    }
    tensor->contents = saved->contents;
    tn__scope_delete_tensor(saved);
    return TN_OK;
}

tn_status tn_tensor_restore_into(tn_tensor saved, tn_tensor tensor) {
    tn__tensor_object *from, *to;
    TN_TRY(tn__tensor_acquire(tensor, &to)); /* for the right status if it is not alive */
    tn__tensor_unlock(to);
    TN_TRY(tn__tensor_acquire(saved, &from));
    unsigned lock = from->scope->books->lock;
    tn_status status = TN_OK;
    to = tn__handle_peek(tensor.value, TN__HANDLE_TENSOR, lock);
    if (!to || to->scope->books != from->scope->books) {
        status = TN_FAIL(TN_INVALID_ARGUMENT,
                         "tn_tensor_restore_into: saved %s is of another pool than the tensor",
                         from->name);
    }
    if (status == TN_OK) status = restore_into(from, to);
    tn__unlock(lock);
    return status;
}
