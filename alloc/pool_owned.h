/* Blocks that a tensor owns: the seam between the pools and the tensor layer.
 *
 * Such a block is an ordinary one (tn_free, tn_record_use and tn_block_info take it), but its
 * bytes also count in tn_pool_stats.owned_bytes until it is freed, so that the ledger of the
 * tensors can be compared with the pool's books to the byte.
 */
#ifndef TENURE_POOL_OWNED_H
#define TENURE_POOL_OWNED_H

#include "error.h"

/* tn_alloc for a tensor's plane: same arguments, order and errors. */
TN_SISTER_API TN_MUST_USE tn_status tn__alloc_owned(tn_pool *pool, size_t bytes, tn_stream stream,
                                                    const tn_alloc_options *options, void **out);

/* A number, never 0, that has changed if a use that was recorded while it had another value may
 * have to be recorded again: the stream's later work would not be covered. To be read before the
 * use is recorded, and again after later work was put on the stream. Not for streams in a capture.
 * It lives as long as the pool. */
const _Atomic uint64_t *tn__pool_use_stamp(const tn_pool *pool);

#endif
