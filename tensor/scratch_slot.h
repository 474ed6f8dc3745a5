/* Scratch slots: shared memory at a stable address for planes that are derived and soon done
 * with.
 *
 *     scope ── slot ──┬─ buffer 0: [ data, to a multiple of 256 bytes | scales ]   a plane, or none
 *                     └─ buffer 1: ...
 *
 * A buffer's memory is the DATA plane of a tensor of the library's own, "scratch", in the slot's
 * scope: so it is in the ledger once, and the planes that pass through it own nothing. While a
 * plane is in a buffer, the buffer's uses are noted at that plane; when it leaves, they go back
 * to the buffer, so that the next plane waits for them on the device. Callers hold the books'
 * lock.
 * */
#ifndef TENURE_SCRATCH_SLOT_H
#define TENURE_SCRATCH_SLOT_H

#include "tensor_state.h"

enum { TN__SCRATCH_BUFFERS_MAX = 8, TN__SCRATCH_PART_ALIGNMENT = 256 };

struct tn__scratch_buffer {
    tn__scratch_slot *slot;
    tn__tensor_object *memory;   /* NULL: none yet */
    tn__tensor_object *resident; /* whose plane is in it; NULL */
    tn_plane plane;              /* of the resident */
    uint64_t capture;            /* that it was derived in; 0: none */
};

struct tn__scratch_slot {
    tn__scope_object *scope;
    int buffer_count;
    int next;        /* buffer to try first */
    int is_pinned;   /* the program relies on the addresses: no growth of its own accord */
    int is_captured; /* a graph may hold them: the same, and only what is leased is trusted */
    tn__scratch_buffer buffers[TN__SCRATCH_BUFFERS_MAX];
};

/* Whether a derivation of this plane goes to a slot: policy SCRATCH, and it has elements. */
int tn__scratch_takes(const tn__tensor_object *tensor, tn_plane plane);

/* Memory for an ABSENT plane about to be derived on `stream`, which waits on the device for all
 * that used the buffer before; the plane that was in it is ABSENT after. TN_IN_USE names it if
 * it is leased. */
tn_status tn__scratch_take(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                           uint64_t stream_id);

/* A plane without memory is in the buffer, which nobody is in; only the state is not set. */
void tn__scratch_enter(tn__scratch_buffer *buffer, tn__tensor_object *tensor, tn_plane plane);

/* A plane in a slot is derived anew in place, on `stream`: it is of that one's capture then, if it
 * is in one. Changes nothing else. */
tn_status tn__scratch_derive_again(tn__scratch_buffer *buffer, tn_stream stream);

/* A plane's memory in a slot is given back: the buffer has its uses again. `at` as in
 * plane_memory.h. */
void tn__scratch_leave(tn__plane_object *at);

/* Whether work on `stream` finds in memory what the books say: not so if the plane was derived in
 * another capture, which runs when its graph does, or if a graph may have been launched since. */
tn_status tn__scratch_is_current(const tn__plane_object *plane, tn_stream stream, int *out);

/* The tensor's planes leave slots that are not those of `scope`, where it is about to go. */
tn_status tn__scratch_leave_for(tn__tensor_object *tensor, const tn__scope_object *scope);

/* Nothing is in the slots of `root` and below any more: they are about to be freed with their
 * scopes. No plane in them is leased. */
void tn__scratch_vacate(tn__scope_object *root);

/* Ends the slot of a scope whose tensors are gone. */
void tn__scratch_delete(tn__scope_object *scope);

#endif
