/* A scope's list of tensors. Callers hold the books' lock. */
#ifndef TENURE_SCOPE_H
#define TENURE_SCOPE_H

#include "tensor_state.h"

void tn__scope_link_tensor(tn__scope_object *scope, tn__tensor_object *tensor);
void tn__scope_unlink_tensor(tn__tensor_object *tensor);

/* A tensor without planes in the scope; tn__tensor_config_check has been called. */
tn_status tn__scope_add_tensor(tn__scope_object *scope, const tn_tensor_config *config,
                               tn__tensor_object **out);

/* The scope of a handle, for a tensor whose lock is held to go to, or for one made of it:
 * TN_INVALID_ARGUMENT if it is not of the same pool. */
tn_status tn__scope_find_for(const tn__tensor_object *tensor, tn_scope to, tn__scope_object **out);

/* Both, with the lock that they share held until tn__tensor_unlock. */
tn_status tn__tensor_acquire_for(tn_tensor tensor, tn_scope to, tn__tensor_object **out,
                                 tn__scope_object **scope);

/* With all that it has; nothing if it is there. */
tn_status tn__scope_move_tensor(tn__tensor_object *tensor, tn__scope_object *scope);

/* Whether tn_tensor_create takes the config. */
tn_status tn__tensor_config_check(const tn_tensor_config *config);

/* M and K of its shape. */
tn_status tn__tensor_flatten(const tn_tensor_config *config, int64_t *rows, int64_t *cols);

/* A view elsewhere of what is in the scope or below; NULL if there is none. */
const tn__tensor_object *tn__scope_outer_view(tn__scope_object *root);

/* Ends a scope that has neither tensors nor scopes below it. */
void tn__scope_delete_empty(tn__scope_object *scope);

/* Ends a tensor that has neither planes, leases nor views: its handle, its place and its memory. */
void tn__scope_delete_tensor(tn__tensor_object *tensor);

#endif
