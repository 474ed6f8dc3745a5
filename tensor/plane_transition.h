/* The transitions of planes: the only code that changes a plane's state (memory: plane_memory.h).
 * Derivations are in plane_derive.c, moves to other memory in plane_relocate.c.
 *
 *                 make                 end of a write
 *      ABSENT ----------> ALLOCATED ------------------> VALID
 *        ^                    ^   begin of a write        |  ^
 *        |                    +---------------------------+  |
 *        |                                 another plane's   |  abandoned write of the other
 *        +---- drop, release, destroy      write begins      v  plane; or derived again
 *                                                          STALE
 *
 *      VALID -- offload --> OFFLOADED -- fetch --> VALID     contents in host memory: like VALID,
 *                                                            but that no lease is given of it
 *
 * A REPLACE lease writes ALLOCATED memory beside what the plane has, which keeps its state: the end
 * frees it, abandoning frees the new memory. Each transition happens whole or not at all. Callers
 * hold the books' lock; streams come with their ids.
 */
#ifndef TENURE_PLANE_TRANSITION_H
#define TENURE_PLANE_TRANSITION_H

#include "ledger.h"
#include "plane_order.h"

/* ABSENT to ALLOCATED; nothing if the plane has memory. */
tn_status tn__transition_make(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                              uint64_t stream_id);

/* ABSENT to VALID, in memory of somebody else's that is ready in the order of its stream. */
tn_status tn__transition_adopt(tn__tensor_object *tensor, tn_plane plane, tn__foreign *foreign,
                               void *const blocks[TN__PART_COUNT]);

/* ---- leases --------------------------------------------------------------------------------- */

static inline void tn__lease_link(tn__lease_object *lease, tn__plane_object *plane) {
    tn__lease_object *next = plane->first_lease;
    lease->previous = NULL;
    lease->next = next;
    if (next) next->previous = lease;
    plane->first_lease = lease;
    tn__ledger_count_lease(lease->tensor->scope, 1);
}

static inline void tn__lease_unlink(tn__lease_object *lease, tn__plane_object *plane) {
    if (lease->next) lease->next->previous = lease->previous;
    if (lease->previous)
        lease->previous->next = lease->next;
    else
        plane->first_lease = lease->next;
    tn__ledger_count_lease(lease->tensor->scope, -1);
}

/* The tensor's other planes, of those that its format has; and the first one of such a set, which
 * it is taken out of. */
static inline unsigned tn__lease_others(const tn__lease_object *lease) {
    return lease->tensor->plane_bits & ~(1u << lease->plane);
}

static inline int tn__take_plane(unsigned *bits) {
    int plane = __builtin_ctz(*bits);
    *bits &= *bits - 1;
    return plane;
}

/* None of them is there: nobody has one leased, and none becomes stale by a write. */
static inline int tn__lease_is_of_only_plane(const tn__lease_object *lease) {
    for (unsigned others = tn__lease_others(lease); others;) {
        const tn__plane_object *other = &lease->tensor->planes[tn__take_plane(&others)];
        if (other->state != TN_PLANE_ABSENT) return 0;
    }
    return 1;
}

static inline void tn__tensor_set_written(tn__tensor_object *tensor) {
    tensor->contents = ++tensor->books->writes_made;
}

tn_status tn__transition_begin_any(tn__lease_object *lease);
tn_status tn__transition_end_any(tn__lease_object *lease);

/* A read of what a stream has read before asks for nothing: this common case is short. 0: it is
 * another, and nothing has changed. */
static inline int tn__transition_read_again(tn__lease_object *lease) {
    tn__plane_object *plane = lease->at;
    if (lease->access != TN_READ || plane->state != TN_PLANE_VALID) return 0;
    if (plane->kind != TN__MEMORY_OWNED || tn__plane_writer(plane)) return 0;
    if (!tn__plane_order_read_again(plane, lease->stream, lease->stream_id)) return 0;
    lease->state_before = TN_PLANE_VALID;
    tn__lease_link(lease, plane);
    TN_ASSERT(tn__tensor_is_valid(lease->tensor));
    return 1;
}

/* A write in place, on the stream that wrote the plane last, of the tensor's only plane: it waits
 * for nothing, makes no memory, and has no other plane to think of. 0 as above. */
static inline int tn__transition_write_again(tn__lease_object *lease) {
    tn__plane_object *plane = lease->at;
    if (lease->access != TN_WRITE && lease->access != TN_UPDATE) return 0;
    if (plane->state != TN_PLANE_VALID || plane->kind != TN__MEMORY_OWNED) return 0;
    if (plane->first_lease || lease->is_derivation) return 0;
    if (!tn__lease_is_of_only_plane(lease)) return 0;
    if (!tn__plane_order_write_again(plane, lease->stream, lease->stream_id)) return 0;
    lease->state_before = TN_PLANE_VALID;
    plane->state = TN_PLANE_ALLOCATED;
    tn__lease_link(lease, plane);
    TN_ASSERT(tn__tensor_is_valid(lease->tensor));
    return 1;
}

/* Lets a lease in: all that does not begin as 0 is set. A READ wants a VALID plane:
 * tn__transition_derive first. */
static inline tn_status tn__transition_begin(tn__lease_object *lease) {
    if (tn__transition_read_again(lease) || tn__transition_write_again(lease)) return TN_OK;
    return tn__transition_begin_any(lease);
}

/* Ends it: a written plane is VALID, stale planes that the policy does not keep are freed. A
 * failure leaves the lease open. What is no read, and no write of the only plane, is called. */
static inline tn_status tn__transition_end(tn__lease_object *lease) {
    tn__plane_object *plane = lease->at;
    int is_read = lease->access == TN_READ;
    int is_simple = is_read || (lease->access != TN_REPLACE && !lease->is_derivation &&
                                !plane->kept_by && tn__lease_is_of_only_plane(lease));
    if (!is_simple || lease->is_stream_ended) return tn__transition_end_any(lease);
    TN_TRY(tn__plane_order_record(lease->tensor, plane, lease->stream, lease->stream_id));
    if (!is_read) {
        tn__tensor_set_written(lease->tensor);
        plane->state = TN_PLANE_VALID;
        plane->is_derived = 0;
    }
    tn__lease_unlink(lease, plane);
    TN_ASSERT(tn__tensor_is_valid(lease->tensor));
    return TN_OK;
}

/* Ends it whatever happens: what the pool could not be told now is told when the plane is freed,
 * a plane that could not be freed stays ALLOCATED. */
void tn__transition_abandon(tn__lease_object *lease);

/* Ends a READ or UPDATE whatever happens: what the pool could not be told now is told when the
 * plane is freed, a stale plane that could not be freed stays. */
void tn__transition_end_surely(tn__lease_object *lease);

/* Makes the plane VALID from another one. Gives up the lock while the format's derive function
 * runs; leases hold both planes meanwhile. */
tn_status tn__transition_derive(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                uint64_t stream_id);

/* Where the memory of a plane that nobody leases goes. */
typedef struct tn__relocation {
    tn__memory_kind kind; /* OWNED or HOST */
    tn_plane_state state; /* of the plane then */
    tn__plane_use on;     /* the stream of the copy; HOST, or from there with contents: offload's */
    int with_contents;    /* 0: they are not wanted */
} tn__relocation;

/* New memory for the plane, with the same contents, and the old memory freed behind the copy and
 * all uses. After a failure the plane is as it was. */
tn_status tn__transition_relocate(tn__tensor_object *tensor, tn_plane plane,
                                  const tn__relocation *to);

/* OFFLOADED to VALID, by the stream of the offload; a STALE plane in host memory stays STALE.
 * stream_id is that of the stream that wants it. */
tn_status tn__transition_fetch(tn__tensor_object *tensor, tn_plane plane, tn_stream stream);

/* Frees the plane's memory, or its replaced one, after that has been announced: to ABSENT. */
tn_status tn__transition_free_announced(tn__tensor_object *tensor, tn_plane plane,
                                        tn__plane_object *at, tn_stream stream);

/* Announces and frees the replaced memory, if there is any. */
tn_status tn__transition_free_replaced(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                       uint64_t stream_id);

/* Ends the record of replaced memory that is ABSENT, unless something is left that could not be
 * freed. */
void tn__transition_end_replaced(tn__plane_object *plane);

/* To ABSENT: see tn_plane_drop and tn_plane_release. */
tn_status tn__transition_drop(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                              uint64_t stream_id);
tn_status tn__transition_release(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                                 uint64_t stream_id);

/* Whether tn_plane_drop would: TN_IN_USE (`what` must wait) or TN_INVALID_STATE if it would not. */
tn_status tn__transition_check_drop(tn__tensor_object *tensor, tn_plane plane, const char *what);

/* To ABSENT, for a plane that is neither leased nor a last copy, once tn__plane_memory_announce has
 * told the pool of it; fails like tn__transition_empty. */
tn_status tn__transition_drop_announced(tn__tensor_object *tensor, tn_plane plane,
                                        tn_stream stream);

/* All planes to ABSENT, each in the order of its last use, or of `on` if that is not NULL. No plane
 * is leased. First announce it, for all tensors that are to be emptied together: that changes
 * nothing, and after it emptying fails only if the driver can no longer look up a stream that is
 * not ours. Then what has been freed stays freed, and the call may be repeated. */
tn_status tn__transition_announce_empty(tn__tensor_object *tensor, const tn__plane_use *on);
tn_status tn__transition_empty(tn__tensor_object *tensor, const tn__plane_use *on);

/* One plane that nobody leases to ABSENT in the order of its last use, whatever is lost with it;
 * announced first, as above. */
tn_status tn__transition_announce_plane(tn__tensor_object *tensor, tn_plane plane);
tn_status tn__transition_end_plane(tn__tensor_object *tensor, tn_plane plane);

/* Frees what earlier transitions could not: after it no plane has remains. */
tn_status tn__transition_settle(tn__tensor_object *tensor);

/* Moves a plane, with memory, contents and uses, to a tensor of the same kind and pool, which does
 * not have it: it is ABSENT here then. Neither plane is leased or has remains. */
void tn__transition_hand_over(tn__tensor_object *from, tn_plane plane, tn__tensor_object *to);

/* The addresses of a plane under lease; and of what it had before a REPLACE lease. */
static inline void tn__plane_view_fill(const tn__tensor_object *tensor, tn_plane plane,
                                       const tn__plane_object *at, tn_plane_view *out) {
    const tn_plane_layout *layout = &tensor->layouts[plane];
    char *scale = at->blocks[TN__PART_SCALE];
    int64_t offset = layout->global_scale_offset;
    out->dtype = tensor->dtype;
    out->plane = plane;
    out->data = at->blocks[TN__PART_DATA];
    out->scale = scale;
    out->global_scale = NULL;
    if (__builtin_expect(scale && offset >= 0, 0)) out->global_scale = (float *)(scale + offset);
    out->layout = *layout;
}

tn_status tn__plane_old_view_of(const tn__lease_object *lease, tn_plane_view *out);

#endif
