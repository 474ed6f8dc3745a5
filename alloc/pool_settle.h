/* Pools whose free memory may still be in use by streams that nobody has named.
 *
 * A framework may free a block on its stream while another stream still reads it, and make the
 * first stream wait for the other only before it allocates again. For reuse on the same stream that
 * is enough. For anybody else, and for the driver, the pool's memory is idle only once all work of
 * the device is done: then it is asked, before any of it is given back.
 */
#ifndef TENURE_POOL_SETTLE_H
#define TENURE_POOL_SETTLE_H

#include "error.h"

/* 1: no device has work that was there when it was called. 0: that can not be had now, and the pool
 * keeps its memory. Called without any lock held; it may wait. */
typedef int (*tn__settle)(void);

/* For a pool that nobody uses meanwhile: asked before idle memory of it goes back (tn_pool_trim, a
 * lower limit, other pools that are short), and no memory goes back by decay. NULL: nobody is. */
TN_SISTER_API void tn__pool_settle_set(tn_pool *pool, tn__settle settle);

/* TN_INVALID_ARGUMENT in words for a pool that a framework can not have: of host memory, or for
 * captures. */
TN_SISTER_API TN_MUST_USE tn_status tn__pool_check_ordinary(const tn_pool *pool);

/* 1 if the pool may give idle memory back, of what was freed until *freed_until by the heap's clock
 * (0: all): what is freed later was not waited for. Without its mutex. */
int tn__pool_settle(tn_pool *pool, uint64_t *freed_until);

#endif
