/* The policies: which one a tensor has, and what it says of a plane. No other file asks a policy
 * by its name, but for the phases, which end UNTIL_BACKWARD_END.
 *
 *     tensor's own > nearest scope's > process's > TENURE_PLANE_POLICY >
 *         TENURE_RELEASE_FROZEN_COLUMNWISE (frozen 2D: UNTIL_LAST_USE) > KEEP
 *
 * Invariants:
 * - A policy touches only a plane that its format can derive from another one; of tensors without
 *   such planes it comes to KEEP, whoever set it. OFFLOAD loses nothing, and is for every plane.
 * - UNTIL_LAST_USE is the rule of frozen weights: 2D, the other plane complete, and no gradient of
 *   the tensor wanted. The others do not ask whether it is frozen.
 */
#include "plane_policy.h"

#include "format_table.h"
#include "options.h"
#include "plane_budget.h"

#include <stdatomic.h>

static _Atomic(tn_plane_policy) process_policy;

int tn__policy_is_known(tn_plane_policy policy) {
    return (int)policy >= 0 && policy < TN_POLICY_COUNT;
}

const char *tn_policy_name(tn_plane_policy policy) {
    return tn__policy_is_known(policy) ? tn__policy_choices[policy] : "unknown policy";
}

/* ---- which policy -------------------------------------------------------------------------- */

static int derives(tn_format format, tn_plane plane) {
    tn_plane source;
    const char *why;
    return tn__format_has_plane(format, plane) && tn__format_source(format, plane, &source, &why);
}

static tn_plane_policy policy_of_environment(const tn__tensor_object *tensor) {
    const tn__options *options = tn__options_get();
    if (options->plane_policy) return (tn_plane_policy)options->plane_policy;
    if (!tensor->is_frozen || !options->release_frozen_columnwise) return TN_POLICY_KEEP;
    return TN_POLICY_UNTIL_LAST_USE;
}

static tn_plane_policy policy_as_set(const tn__tensor_object *tensor) {
    if (tensor->policy != TN_POLICY_DEFAULT) return tensor->policy;
    for (const tn__scope_object *scope = tensor->scope; scope; scope = scope->parent) {
        if (scope->policy != TN_POLICY_DEFAULT) return scope->policy;
    }
    tn_plane_policy policy = atomic_load(&process_policy);
    return policy != TN_POLICY_DEFAULT ? policy : policy_of_environment(tensor);
}

tn_plane_policy tn__tensor_policy(const tn__tensor_object *tensor) {
    tn_plane_policy policy = policy_as_set(tensor);
    if (policy == TN_POLICY_OFFLOAD) return policy;
    if (!derives(tensor->format, TN_PLANE_COL)) return TN_POLICY_KEEP;
    if (policy == TN_POLICY_UNTIL_LAST_USE && !tn__format_has_frozen_rule(tensor->format)) {
        return TN_POLICY_KEEP;
    }
    return policy;
}

/* ---- which planes -------------------------------------------------------------------------- */

/* 1 and the plane that `plane` could be derived from now and later: not one in a scratch slot. */
static int valid_source(const tn__tensor_object *tensor, tn_plane plane, tn_plane *source) {
    const char *why;
    if (!tn__format_source(tensor->format, plane, source, &why)) return 0;
    const tn__plane_object *object = &tensor->planes[*source];
    return tn__state_is_complete(object->state) && object->kind != TN__MEMORY_SLOT;
}

int tn__plane_can_return(const tn__tensor_object *tensor, tn_plane plane) {
    tn_plane source;
    return valid_source(tensor, plane, &source) && !tensor->planes[plane].first_lease;
}

int tn__plane_is_spare(const tn__tensor_object *tensor, tn_plane plane) {
    const tn__plane_object *object = &tensor->planes[plane];
    tn_plane source;
    if (object->state == TN_PLANE_ABSENT) return 0;
    if (!tn__format_has_plane(tensor->format, plane)) return 0;
    if (object->state == TN_PLANE_ALLOCATED && !object->first_lease) return 0; /* someone made it */
    if (!valid_source(tensor, plane, &source)) return 0;
    return object->is_derived || (plane == TN_PLANE_COL && !tensor->planes[source].is_derived);
}

tn_status tn__policy_release(tn__tensor_object *tensor, tn_plane plane, const tn__plane_use *on,
                             int *drops) {
    tn_plane_policy policy = tn__tensor_policy(tensor);
    int can_return = tn__plane_can_return(tensor, plane);
    int keeps = 0;
    *drops = 0;
    if (policy != TN_POLICY_BUDGET) tn__budget_forget(&tensor->planes[plane]);
    if (policy == TN_POLICY_UNTIL_LAST_USE) *drops = can_return && tensor->is_frozen;
    if (policy != TN_POLICY_SCRATCH && policy != TN_POLICY_BUDGET) return TN_OK;
    if (!can_return || !tn__plane_is_spare(tensor, plane)) return TN_OK;
    if (policy == TN_POLICY_BUDGET) TN_TRY(tn__budget_release(tensor, plane, on, &keeps));
    *drops = !keeps;
    return TN_OK;
}

int tn__policy_offloads(const tn__tensor_object *tensor) {
    return tn__tensor_policy(tensor) == TN_POLICY_OFFLOAD;
}

int tn__policy_drops_stale(const tn__tensor_object *tensor, tn_plane plane) {
    return tn__tensor_policy(tensor) != TN_POLICY_KEEP && derives(tensor->format, plane);
}

/* ---- setting ------------------------------------------------------------------------------- */

tn_status tn_policy_default_set(tn_plane_policy policy) {
    TN_REQUIRE(tn__policy_is_known(policy), "tn_policy_default_set: unknown policy %d",
               (int)policy);
    atomic_store(&process_policy, policy);
    return TN_OK;
}

tn_status tn_scope_policy_set(tn_scope scope, tn_plane_policy policy) {
    tn__scope_object *object;
    TN_REQUIRE(tn__policy_is_known(policy), "tn_scope_policy_set: unknown policy %d", (int)policy);
    TN_TRY(tn__scope_acquire(scope, &object));
    object->policy = policy;
    tn__scope_unlock(object);
    return TN_OK;
}

tn_status tn_tensor_set_policy(tn_tensor tensor, tn_plane_policy policy) {
    tn__tensor_object *object;
    TN_REQUIRE(tn__policy_is_known(policy), "tn_tensor_set_policy: unknown policy %d", (int)policy);
    TN_TRY(tn__tensor_acquire(tensor, &object));
    object->policy = policy;
    tn__tensor_unlock(object);
    return TN_OK;
}
