/* Memory that planes use and do not own: whose it is, and how its owner gets it back.
 *
 * Callers hold the books' lock; the owner's release runs after that has been given up.
 */
#ifndef TENURE_ADOPT_H
#define TENURE_ADOPT_H

#include "handle_table.h"
#include "tensor_state.h"
#include "tenure_lifetime.h"

struct tn__foreign {
    tn__deferred deferred; /* the release, once it is due */
    tn__books *books;
    tn_stream stream; /* the owner's; NULL once it has ended, if it was one of ours */
    uint64_t stream_id;
    int is_read_only;
    tn_release_function release; /* NULL: none is wanted */
    void *context;
};

/* Makes the owner's stream wait for every use of the plane. Changes nothing else. */
tn_status tn__foreign_await(tn__plane_object *plane);

/* The plane is done with the memory, and the owner's stream waits: releases it. */
void tn__foreign_release(tn__foreign *foreign);

/* A stream has ended, and with it all its work. */
void tn__foreign_forget(tn__foreign *foreign, uint64_t stream_id);

/* TN_INVALID_STATE for an access that would write memory that may only be read. */
tn_status tn__foreign_admit(const tn__tensor_object *tensor, tn_plane plane, tn_access access);

#endif
