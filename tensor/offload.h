/* Planes in pinned host memory: where that memory and the stream of the copies come from.
 *
 * Callers hold the books' lock. The moves themselves are tn__transition_relocate.
 */
#ifndef TENURE_OFFLOAD_H
#define TENURE_OFFLOAD_H

#include "tensor_state.h"

/* One for a books, from its first offload till its last root scope has closed. */
struct tn__offload {
    tn__deferred deferred; /* its end, if its making fails: a stream ends without the lock */
    tn_device *device;
    tn_pool *pool;      /* of pinned memory; all of it is used on the stream below only */
    tn__plane_use copy; /* the stream that copies either way */
    tn__offload *next;  /* of those that could not be closed yet */
};

/* The books' own; made if there is none. */
tn_status tn__offload_open(tn__books *books, tn__offload **out);

/* Gives the memory back and ends the stream, after its work. No lock is held. What the driver
 * refuses is tried again with the next one that closes. NULL is a no-op. */
void tn__offload_close(tn__offload *offload);

/* VALID to OFFLOADED: see tn_plane_offload; and back, as tn_plane_prefetch does. */
tn_status tn__offload_plane(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                            uint64_t stream_id);
tn_status tn__offload_prefetch(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                               uint64_t stream_id);

/* What tn_plane_release does under TN_POLICY_OFFLOAD. */
tn_status tn__offload_release(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                              uint64_t stream_id);

#endif
