/* The books of a pool: made with its first root scope, gone with its last.
 *
 * Lock order: the list of books, then one books' lock (handle_table.h), then whatever alloc/ locks.
 */
#ifndef TENURE_BOOKS_H
#define TENURE_BOOKS_H

#include <stddef.h>
#include <string.h>

#include "tensor_state.h"

/* The pool's books with their lock held; made if there are none. */
tn_status tn__books_open(tn_pool *pool, tn__books **out);

/* The same, but NULL (and no lock held) if there are none. */
tn__books *tn__books_find(tn_pool *pool);

/* Frees the books that have no scope left. If `mine` had none, it is gone at the return, whichever
 * thread has freed it: its pool and its device are nobody's then. No lock is held. */
void tn__books_collect(const tn__books *mine);

/* Where the id of a stream is, if it is kept. */
static inline unsigned tn__recent_place(tn_stream stream) {
    return (unsigned)(((uintptr_t)stream >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 60);
}

static inline int tn__recent_is_set(const tn__books *books, unsigned place) {
    return tn__recent_place(books->recent_ids[place].stream) == place;
}

/* The id that tells streams apart, as the driver has it, with TN__STREAM_ID_MAY_GO if it is neither
 * ours nor adopted nor the default stream (per-thread ones are of threads that end); fails for a
 * stream that the driver does not know. The books' lock is held. */
tn_status tn__books_ask_stream_id(tn__books *books, tn_stream stream, uint64_t *out);

/* The same without the driver; TN__NO_STREAM_ID: it has to be asked. */
static inline uint64_t tn__books_recent_id(const tn__books *books, tn_stream stream) {
    const tn__recent_id *recent = &books->recent_ids[tn__recent_place(stream)];
    return recent->stream == stream ? recent->stream_id : TN__NO_STREAM_ID;
}

static inline tn_status tn__books_stream_id(tn__books *books, tn_stream stream, uint64_t *out) {
    uint64_t recent = tn__books_recent_id(books, stream);
    if (recent == TN__NO_STREAM_ID) return tn__books_ask_stream_id(books, stream, out);
    *out = recent;
    return TN_OK;
}

tn__lease_object *tn__books_make_first_lease(tn__books *books, tn_status *why);

/* A lease with a handle, of which the rest is to be set; and the end of its handle. Host memory and
 * slots of leases that have ended are kept for the next ones until the books end. Under their lock.
 * NULL: `why` says why. */
static inline tn__lease_object *tn__books_make_lease(tn__books *books, tn_status *why) {
    tn__lease_object *lease = books->spare_leases;
    uint64_t value = lease ? tn__handle_resume(lease->slot, lease->handle.value) : 0;
    if (__builtin_expect(!value, 0)) return tn__books_make_first_lease(books, why);
    books->spare_leases = lease->next;
    memset(&lease->through, 0, sizeof *lease - offsetof(tn__lease_object, through));
    lease->handle.value = value;
    return lease;
}

static inline void tn__books_end_lease(tn__books *books, tn__lease_object *lease) {
    tn__handle_suspend(lease->slot);
    lease->next = books->spare_leases;
    books->spare_leases = lease;
}

/* The scope after `scope` in a walk of `root` and all below it, parents first; NULL at the end. */
tn__scope_object *tn__scope_next(const tn__scope_object *scope, const tn__scope_object *root);

#endif
