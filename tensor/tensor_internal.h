/* What the sister libraries (ops, dist) may ask of the tensor layer beyond its public header. */
#ifndef TENURE_TENSOR_INTERNAL_H
#define TENURE_TENSOR_INTERNAL_H

#include "error.h"
#include "tenure_tensor.h"

/* The device that a tensor's planes, or a scope's pool, are on. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_device(tn_tensor tensor, tn_device **out);
TN_SISTER_API TN_MUST_USE tn_status tn__scope_device(tn_scope scope, tn_device **out);

/* Which elements a tensor is: all of its own, or those of the base that it is a view of. */
typedef struct tn__element_range {
    const void *owner; /* to compare; good as long as the tensor */
    int64_t first, count;
} tn__element_range;
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_elements(tn_tensor tensor, tn__element_range *out);

/* 1: what is written to the one is read from the other. */
static inline int tn__ranges_overlap(const tn__element_range *a, const tn__element_range *b) {
    return a->owner == b->owner && a->first < b->first + b->count && b->first < a->first + a->count;
}

/* The pool of a scope. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__scope_pool(tn_scope scope, tn_pool **out);

/* The number of the write that its contents are of: another one after every write; no two writes
 * of a pool have the same. 0: it has not been written. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_contents(tn_tensor tensor, uint64_t *out);

/* The blocks of the pool that a plane is made of, elements and scales, as the pool is told of uses;
 * NULL of memory that is not the pool's, of what only lies in a block (adopted planes, views,
 * scales in a scratch slot), and where there is none. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_pool_blocks(tn_tensor tensor, tn_plane plane,
                                                           void *blocks[2]);

/* The blocks of its planes that are taken from now on have these flags (TN_ALLOC_SHAREABLE, say): a
 * pool that has none such is TN_UNSUPPORTED when one is taken. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_set_block_flags(tn_tensor tensor, unsigned flags);

/* TN_IN_USE, with the holder and `refused`, while any plane of it is leased. TN_STALE_HANDLE. */
TN_SISTER_API TN_MUST_USE tn_status tn__tensor_check_idle(tn_tensor tensor, const char *refused);

#endif
