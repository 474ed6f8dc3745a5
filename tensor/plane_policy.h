/* What policies say of a tensor's planes. Callers hold the books' lock. */
#ifndef TENURE_PLANE_POLICY_H
#define TENURE_PLANE_POLICY_H

#include "tensor_state.h"

int tn__policy_is_known(tn_plane_policy policy);

/* tn__tensor_policy (what a tensor's policy comes to) is in tensor_state.h. */

/* Whether the plane can go now and come back: it is not leased, and the plane that it derives from
 * is valid. */
int tn__plane_can_return(const tn__tensor_object *tensor, tn_plane plane);

/* Whether it is the one of two planes that goes first: it has memory, the other is valid, and it
 * was derived from it; where both were written it is COL. It may be leased. */
int tn__plane_is_spare(const tn__tensor_object *tensor, tn_plane plane);

/* Whether tn_plane_release, in the order of `on`, drops the plane. Under BUDGET others may be
 * dropped for it: see tn__budget_release. */
tn_status tn__policy_release(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on,
                             int *drops);

/* Whether it moves planes to host memory instead. */
int tn__policy_offloads(const tn__tensor_object *tensor);

/* Whether the end of a write frees this plane, which the write has made stale. */
int tn__policy_drops_stale(const tn__tensor_object *tensor, tn_plane plane);

#endif
