/* A scope's list of tensors. Callers hold the books' lock. */
#ifndef TENURE_SCOPE_H
#define TENURE_SCOPE_H

#include "tensor_state.h"

void tn__scope_link_tensor(tn__scope_object *scope, tn__tensor_object *tensor);
void tn__scope_unlink_tensor(tn__tensor_object *tensor);

/* Ends a tensor that has neither planes nor leases: its handle, its place and its memory. */
void tn__scope_delete_tensor(tn__tensor_object *tensor);

#endif
