/* What the sister libraries (ops, dist) may ask of the tensor layer beyond its public header. */
#ifndef TENURE_TENSOR_INTERNAL_H
#define TENURE_TENSOR_INTERNAL_H

#include "error.h"
#include "tenure_tensor.h"

/* The device that a tensor's planes, or a scope's pool, are on. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_device(tn_tensor tensor, tn_device **out);
TN_SISTER_API TN_MUST_USE tn_status tn__scope_device(tn_scope scope, tn_device **out);

/* The pool of a scope. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__scope_pool(tn_scope scope, tn_pool **out);

#endif
