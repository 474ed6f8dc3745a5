/* Saved-for-backward sets that can be dropped and rebuilt. Callers hold the books' lock.
 *
 * A set is a scope of kind SAVED that was given a recompute function, with all tensors in it and
 * below it, but for those below an inner scope that has a set of its own.
 */
#ifndef TENURE_SAVED_SET_H
#define TENURE_SAVED_SET_H

#include "tensor_state.h"

struct tn__saved_set {
    tn_recompute_function function;
    void *context;
    int is_dropped;
    int is_rebuilding;    /* the function runs: it may write the tensors */
    uint64_t stream_id;   /* that the function was given */
    uint64_t made_before; /* tensors made in the books when it began to run */
};

/* TN_INVALID_STATE if the tensor is of a set that is dropped, unless that is being rebuilt: it
 * has no contents, can be given none but by the function, and can not leave. */
tn_status tn__saved_admit(const tn__tensor_object *tensor);

/* Ends the set of a scope that is about to go. */
void tn__saved_delete(tn__scope_object *scope);

#endif
