/* Blocks that a tensor owns, and fences: the seam between the pools and the tensor layer.
 *
 * Such a block is an ordinary one (tn_free, tn_record_use and tn_block_info take it), but its
 * bytes also count in tn_pool_stats.owned_bytes until it is freed, so that the ledger of the
 * tensors can be compared with the pool's books to the byte. And where such a block was allocated
 * on a stream of another library that was not adopted, that stream is not asked for anything at the
 * free: its uses, the allocation too, are told with tn__pool_fence, each while the stream is there.
 */
#ifndef TENURE_POOL_OWNED_H
#define TENURE_POOL_OWNED_H

#include "error.h"

/* tn_alloc for a tensor's plane: same arguments, order and errors. */
TN_SISTER_API TN_MUST_USE tn_status tn__alloc_owned(tn_pool *pool, size_t bytes, tn_stream stream,
                                                    const tn_alloc_options *options, void **out);

/* A point in the work of a stream of another library, which may be destroyed without a word: an
 * event of the pool's is behind the work up to there. Epoch 0: there is none. */
typedef struct tn__fence {
    uint64_t stream_id, stream_number;
    uint64_t epoch;
} tn__fence;

/* While somebody keeps the pool, tn_pool_destroy is TN_IN_USE: the tensor layer, as long as a root
 * scope is of it. */
void tn__pool_keep(tn_pool *pool);
void tn__pool_let_go(tn_pool *pool);

/* The bit that marks the id of such a stream where ids are kept together with fences. */
#define TN__STREAM_ID_MAY_GO ((uint64_t)1 << 62)

#define TN__FENCED_BLOCKS_MAX 2 /* a plane has no more */

/* Tells the pool that work on the stream has used the blocks (NULL is none), and puts a fence
 * behind it. The stream is there still, and has the id (with or without the bit above): else
 * TN_INVALID_ARGUMENT. While it captures there is no fence, but the pool is told. */
tn_status tn__pool_fence(tn_pool *pool, void *const *blocks, size_t count, tn_stream stream,
                         uint64_t stream_id, tn__fence *out);

/* Work put on `stream`, which does not capture, from now on comes after the fence. The stream that
 * was fenced is not asked for anything. */
tn_status tn__pool_fence_wait(tn_pool *pool, tn_stream stream, const tn__fence *fence);

/* tn_free of a tensor's block behind all uses that the pool was told of; no stream is named. */
tn_status tn__free_told(void *block);

/* A number, never 0, that has changed if a use that was recorded while it had another value may
 * have to be recorded again: the stream's later work would not be covered. To be read before the
 * use is recorded, and again after later work was put on the stream. Not for streams in a capture.
 * It lives as long as the pool. */
const _Atomic uint64_t *tn__pool_use_stamp(const tn_pool *pool);

#endif
