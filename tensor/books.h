/* The books of a pool: made with its first root scope, gone with its last.
 *
 * Lock order: the list of books, then one books' lock (handle_table.h), then whatever alloc/ locks.
 */
#ifndef TENURE_BOOKS_H
#define TENURE_BOOKS_H

#include "tensor_state.h"

/* The pool's books with their lock held; made if there are none. */
tn_status tn__books_open(tn_pool *pool, tn__books **out);

/* The same, but NULL (and no lock held) if there are none. */
tn__books *tn__books_find(tn_pool *pool);

/* Frees the books that have no scope left. No lock is held. */
void tn__books_collect(void);

/* The id that tells streams apart, as the driver has it; fails for a stream that the driver does
 * not know. The books' lock is held. */
tn_status tn__books_stream_id(tn__books *books, tn_stream stream, uint64_t *out);

/* A lease with a handle and nothing else; and the end of its handle. Host memory and slots of
 * leases that have ended are kept for the next ones until the books end. Under their lock. */
tn_status tn__books_make_lease(tn__books *books, tn__lease_object **out);
void tn__books_end_lease(tn__books *books, tn__lease_object *lease);

/* The scope after `scope` in a walk of `root` and all below it, parents first; NULL at the end. */
tn__scope_object *tn__scope_next(const tn__scope_object *scope, const tn__scope_object *root);

#endif
