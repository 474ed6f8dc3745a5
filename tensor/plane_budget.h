/* Byte budgets for derived planes: which of those under TN_POLICY_BUDGET stay when they are
 * released.
 *
 * A scope's budget counts the planes that it keeps ("kept", a flag of the plane). What is
 * between its derivation and its release is not kept and not counted, unless it was kept before.
 * Callers hold the books' lock.
 * */
#ifndef TENURE_PLANE_BUDGET_H
#define TENURE_PLANE_BUDGET_H

#include "tensor_state.h"

/* The plane is released: *keeps says whether it stays. Others that are worth less are dropped for
 * it, in the order of `on`; on failure nothing has changed but what tn__transition_drop_announced
 * says. */
tn_status tn__budget_release(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on,
                             int *keeps);

/* The plane is not the budget's to keep any more: freed, written, moved, handed over. */
void tn__budget_forget(tn__plane_object *plane);

/* The same for all planes of a tensor. */
void tn__budget_forget_all(tn__tensor_object *tensor);

#endif
