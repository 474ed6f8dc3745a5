/* Pause and resume of a pool: see tenure_pool.h for what they promise.
 *
 * A paused pool keeps its addresses, its pieces and its frames; what is gone is the memory:
 *
 *     running   each active page: frame with a handle, mapped
 *     paused    each active page: view->is_paused (nothing is mapped there), frame->handle 0
 *
 * There is no idle page and no dormant view then, but for what is freed meanwhile. A handle that
 * the driver did not take back stays with its frame, and on the books.
 *
 * Invariant: pool->paused_bytes is what the active frames without a handle stand for; 0 in a pool
 * that is not paused. live + cached + pending + partial + driver_held == reserved + paused.
 */
#ifndef TENURE_POOL_PAUSE_H
#define TENURE_POOL_PAUSE_H

#include <stddef.h>

#include "error.h"

struct tn_pool;

typedef struct tn__pause tn__pause;
typedef struct tn__chunk tn__chunk;

/* How contents are copied: made by the first pause that keeps them, ended with the pool. */
typedef struct tn__contents {
    tn_stream stream;
    int has_stream;
    int is_busy;      /* the driver did not say that copies are over */
    tn__chunk *stuck; /* host memory that could not be freed: tried again */
} tn__contents;

/* TN_INVALID_STATE naming the call if the pool is paused, or about to be. */
tn_status tn__pause_check(const struct tn_pool *pool, const char *call);

/* 1 if the pool's memory is gone. */
int tn__pause_is_done(const struct tn_pool *pool);

/* Makes a paused pool without live blocks an ordinary one without memory, and ends what pauses have
 * made. What a failing call leaves can be ended again. */
tn_status tn__pause_close(struct tn_pool *pool);

#endif
