/* The memory of planes: the only code that allocates or frees it.
 *
 * It changes a plane's blocks, bytes and kind, and the ledger with them; the plane's state is the
 * business of plane_transition.c, which calls this. Callers hold the books' lock. Only OWNED memory
 * is the pool's business and the ledger's; what is borrowed is used under leases like any other,
 * and its owner learns from the notes of plane_order.h who uses it.
 */
#ifndef TENURE_PLANE_MEMORY_H
#define TENURE_PLANE_MEMORY_H

#include "tensor_state.h"

/* `at` is the plane's object, or the one that it calls `replaced`. */

/* Blocks for all parts of a plane that has none, in the order of `stream`; all or none, unless the
 * pool refuses to take back the first one: then the plane has remains (tn__plane_has_remains). */
tn_status tn__plane_memory_take(tn__tensor_object *tensor, tn_plane plane, tn__plane_object *at,
                                tn_stream stream, uint64_t stream_id);

/* The same in pinned host memory, in the order of its stream; the books have a tn__offload. */
tn_status tn__plane_memory_take_host(tn__tensor_object *tensor, tn_plane plane,
                                     tn__plane_object *at);

/* Memory of another kind than OWNED for a plane that has none: a block for each part that has
 * bytes. It is not freed here: tn__plane_memory_give_back forgets it. */
tn_status tn__plane_memory_borrow(tn__tensor_object *tensor, tn_plane plane, tn__memory_kind kind,
                                  void *const blocks[TN__PART_COUNT]);

/* FOREIGN memory likewise; the plane has `foreign` from now on, until it gives the memory back:
 * then its owner's release is called. */
tn_status tn__plane_memory_adopt(tn__tensor_object *tensor, tn_plane plane, tn__foreign *foreign,
                                 void *const blocks[TN__PART_COUNT]);

/* All that the plane has, also its uses and state, to a tensor's plane that has nothing. */
void tn__plane_memory_move(tn__tensor_object *from, tn_plane plane, tn__tensor_object *to);

/* Tells the pool of every use and of the stream that the free will be on (TN__NO_STREAM: on none).
 * After that the pool knows
 * all that it needs, and the free itself has nothing left that could fail but the look-up of a
 * stream that is not ours. */
tn_status tn__plane_memory_announce(const tn__books *books, tn__plane_object *at, tn_stream stream,
                                    uint64_t stream_id);

/* Frees what the plane has after the free was announced: the first block or nothing. Should a later
 * block be refused after the first one is gone, the call succeeds and the plane keeps that block,
 * in the ledger too, until the next transition frees it: see tn__plane_has_remains. */
tn_status tn__plane_memory_give_back(tn__tensor_object *tensor, tn_plane plane,
                                     tn__plane_object *at, tn_stream stream);

#endif
