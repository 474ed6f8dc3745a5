/* The ledger's books-keeping: sums at every scope up to the root, changed with each transition.
 *
 * Callers hold the books' lock. None of these can fail.
 */
#ifndef TENURE_LEDGER_H
#define TENURE_LEDGER_H

#include "tensor_state.h"

/* A plane of the tensor had `before` bytes and has `after` now. */
void tn__ledger_change_plane(const tn__tensor_object *tensor, tn_plane plane,
                             const size_t before[TN__PART_COUNT],
                             const size_t after[TN__PART_COUNT]);

/* The same for memory that planes have and the pool does not own, in bytes. */
typedef struct tn__elsewhere {
    size_t foreign, offloaded;
} tn__elsewhere;
void tn__ledger_change_elsewhere(tn__scope_object *scope, const tn__elsewhere *before,
                                 const tn__elsewhere *after);

void tn__ledger_count_tensor(tn__scope_object *scope, int change);

/* On the path of every lease: nothing but the count changes, and it has no peak. */
static inline void tn__ledger_count_lease(tn__scope_object *scope, int change) {
    TN_ASSERT(change == 1 || change == -1);
    for (; scope; scope = scope->parent)
        scope->sums.leases += (uint64_t)(int64_t)change;
}

/* The phase of the scope has changed: what it and those below it hold is a peak of the new one. */
void tn__ledger_note_phase(tn__scope_object *scope);

/* All that belongs to the tensor goes from its scope's sums to another's. */
void tn__ledger_move(const tn__tensor_object *tensor, tn__scope_object *to);

#endif
