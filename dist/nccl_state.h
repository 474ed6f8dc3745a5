/* A communicator of the NCCL engine.
 *
 * Invariant: comm is NULL once it has been aborted, and is not used after that.
 */
#ifndef TENURE_NCCL_STATE_H
#define TENURE_NCCL_STATE_H

#include "driver.h"
#include "nccl_load.h"

struct tn__comm_state {
    const tn__nccl_calls *calls;
    const tn__driver *driver;
    tn__driver_device *on;
    void *comm;
    int is_adopted;
    int rank;
    int rank_count;
    uint64_t timeout_us;
    void *barrier_word;  /* device memory: NCCL has no barrier, an all-reduce of one float is one */
    int is_kept;         /* a failure only marks it: that ends it later */
    int is_to_be_shrunk; /* and it may be shrunk meanwhile */
    int is_marked;
    tn_status failure; /* of an aborted communicator */
    tn__saved_error failure_text;
};

/* Polls after a call that returned `code` until it is through or the time is up. Some return
 * ncclSuccess before (ncclCommSplit and ncclCommWindowRegister of 2.28), while the communicator
 * takes no other call. */
tn_status tn__nccl_finish(tn__comm_state *state, int code, const char *call);

/* tn__comm_engine's start. */
tn_status tn__nccl_batch_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream);

/* tn__comm_engine's memory calls. */
tn_status tn__nccl_enroll(tn__comm_state *state, void *address, size_t bytes, int is_window,
                          void **handle);
tn_status tn__nccl_withdraw(tn__comm_state *state, void *handle, int is_window);
tn_status tn__nccl_memory_functions(tn_device *device, tn_memory_functions *out);

#endif
