/* A plane moves to other memory: to the host, back, or to new memory of the pool's.
 *
 * Invariant: the plane has its old memory, as `replaced` has the new one, until the copy and the
 * free of the old memory are on the stream; or it has the new one.
 */
#include "plane_transition.h"

#include "canary.h"
#include "host_alloc.h"
#include "offload.h"
#include "plane_memory.h"
#include "plane_order.h"

static tn_status copy_parts(tn_device *device, const tn__plane_object *to,
                            const tn__plane_object *from, tn_stream stream) {
    for (int part = 0; part < TN__PART_COUNT; part++)
        TN_TRY(tn_copy(device, to->blocks[part], from->blocks[part], from->bytes[part], stream));
    return TN_OK;
}

/* The contents are on the way to `fresh`, should they be wanted, and the pool is told of all that
 * uses the old memory. A copy that failed may be under way in part. */
static tn_status fill_relocated(tn__tensor_object *tensor, tn__plane_object *plane,
                                const tn__plane_object *fresh, const tn__relocation *to) {
    tn_status status = TN_OK;
    if (to->with_contents) {
        tn__plane_order_note(plane, TN_READ, to->on.stream, to->on.stream_id);
        status = copy_parts(tensor->scope->books->device, fresh, plane, to->on.stream);
    }
    if (status == TN_OK) {
        status =
            tn__plane_memory_announce(tensor->scope->books, plane, to->on.stream, to->on.stream_id);
    }
    if (status != TN_OK) tn__plane_order_mark_unrecorded(plane, to->on.stream_id);
    return status;
}

/* The plane has the new memory, and the old one goes; or all stays as it is. */
static tn_status settle_relocated(tn__tensor_object *tensor, tn_plane plane,
                                  const tn__relocation *to) {
    tn__plane_object *object = &tensor->planes[plane];
    int is_derived = object->is_derived;
    tn__plane_order_swap(object, object->replaced);
    tn_status status =
        tn__transition_free_announced(tensor, plane, object->replaced, to->on.stream);
    if (status != TN_OK) {
        tn__plane_order_swap(object, object->replaced);
        return status;
    }
    object->state = to->state;
    object->is_derived = is_derived;
    if (TN__CANARY(TN__CANARY_PLANE_FETCHED)) return TN_OK;
    tn__plane_order_note(object, TN_WRITE, to->on.stream, to->on.stream_id);
    return TN_OK;
}

static tn_status take_fresh(tn__tensor_object *tensor, tn_plane plane, const tn__relocation *to) {
    tn__plane_object *fresh = tensor->planes[plane].replaced;
    if (to->kind == TN__MEMORY_HOST) return tn__plane_memory_take_host(tensor, plane, fresh);
    return tn__plane_memory_take(tensor, plane, fresh, to->on.stream, to->on.stream_id);
}

/* What was new goes again, now or with the next transition. */
static void undo_relocation(tn__tensor_object *tensor, tn_plane plane, const tn__relocation *to) {
    tn__saved_error error;
    tn__error_save(&error);
    (void)tn__transition_free_replaced(tensor, plane, to->on.stream, to->on.stream_id);
    tn__error_restore(&error);
}

tn_status tn__transition_relocate(tn__tensor_object *tensor, tn_plane plane,
                                  const tn__relocation *to) {
    tn__plane_object *object = &tensor->planes[plane];
    const tn__books *books = tensor->scope->books;
    TN_ASSERT(!object->first_lease);
    TN_TRY(
        tn__transition_free_replaced(tensor, plane, to->on.stream, to->on.stream_id)); /* remains */
    if (to->with_contents) {
        TN_TRY(tn__plane_order_before(books, object, TN_READ, to->on.stream, to->on.stream_id));
    }
    object->replaced = tn__host_alloc(1, sizeof *object->replaced);
    if (!object->replaced) return TN_OUT_OF_HOST_MEMORY;
    tn__plane_order_init(object->replaced);
    tn_status status = take_fresh(tensor, plane, to);
    if (status == TN_OK) status = fill_relocated(tensor, object, object->replaced, to);
    if (status == TN_OK) status = settle_relocated(tensor, plane, to);
    if (status == TN_OK)
        tn__transition_end_replaced(object);
    else
        undo_relocation(tensor, plane, to);
    TN_ASSERT(tn__tensor_is_valid(tensor));
    return status;
}

tn_status tn__transition_fetch(tn__tensor_object *tensor, tn_plane plane, tn_stream stream) {
    const tn__plane_object *object = &tensor->planes[plane];
    tn__relocation here = {TN__MEMORY_OWNED, TN_PLANE_VALID, tensor->scope->books->offload->copy,
                           1};
    if (object->state == TN_PLANE_STALE) here.state = TN_PLANE_STALE;
    TN_TRY(tn__plane_order_refuse_capture(tensor, plane, stream));
    return tn__transition_relocate(tensor, plane, &here);
}
