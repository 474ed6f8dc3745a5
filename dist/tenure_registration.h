/* Tenure: memory that is registered with a communicator of NCCL, which then moves it without a
 * copy of its own.
 *
 *     tn_pool_config config = TN_POOL_CONFIG_INIT;
 *     config.backing = TN_BACKING_CALLER;                   (segments of ncclMemAlloc)
 *     if (tn_comm_memory_functions(comm, &config.functions) != TN_OK) puts(tn_error_last());
 *     ... a pool of it, and a block of the pool ...
 *     tn_comm_register(comm, block, bytes, TN_REGISTER_WINDOW, &registration);
 *     ... collectives on the block ...
 *     tn_comm_deregister(registration);
 *     ... the block is freed after that ...
 *
 * Registering is a call of all ranks, in the same order with the same sizes and kinds, as making a
 * communicator is, and so is deregistering: TENURE_CHECK_COLLECTIVES=1 compares them on the ranks
 * of a rendezvous, and what differs is the communicator's failure. Both wait on the host for the
 * communicator's collectives first: never while one is under way. One large registration costs as
 * little as a small one: register a whole ring of buffers at once, and not each.
 *
 * Windows are tried out before a communicator uses one: its first TN_REGISTER_WINDOW makes another
 * communicator of the same ranks, gathers and reduces in a window of its own there, looks at what
 * came, and tries the memory that is to be registered. That takes as long as making a communicator,
 * 20 s or a quarter of the timeout at most, and where any rank fails, or hangs, no rank uses
 * windows (TN_UNSUPPORTED on all), and the communicator goes on.
 *
 * Threads: as collectives, any, in an order that is the program's business.
 */
#ifndef TENURE_REGISTRATION_H
#define TENURE_REGISTRATION_H

#include "tenure_dist.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tn_registration_kind {
    TN_REGISTER_BUFFER = 0, /* ncclCommRegister: NCCL 2.19 */
    TN_REGISTER_WINDOW      /* a symmetric window: NCCL 2.27, memory of ncclMemAlloc */
} tn_registration_kind;

typedef struct tn_registration tn_registration;

/* Registers `bytes` at address; they stay valid until deregistered. What is left when the
 * communicator is destroyed is deregistered then, in the order in which it was registered, and its
 * tn_registration is gone. Errors: TN_UNSUPPORTED (an engine that registers nothing, NCCL of an
 * older version, or windows that do not work or can not be of this memory: the text says which and
 * on which rank), TN_INVALID_STATE (a group or a capture is open), TN_INVALID_ARGUMENT, out of host
 * or device memory, the communicator's failure, TN_COMM_ERROR with NCCL's words. */
TN_API TN_MUST_USE tn_status tn_comm_register(tn_comm *comm, void *address, size_t bytes,
                                              tn_registration_kind kind, tn_registration **out);

/* NULL is a no-op. TN_IN_USE while the communicator is in captured graphs (tenure_comm_graph.h). Of
 * a failed communicator there is nothing to deregister, and it is TN_OK; one that fails in this
 * call (TN_COMM_ERROR, TN_COMM_TIMEOUT) has ended the registration, too. */
TN_API tn_status tn_comm_deregister(tn_registration *registration);

typedef struct tn_registration_info {
    size_t size;
    tn_registration_kind kind;
    void *address;
    size_t bytes;
    uint64_t register_us; /* that registering took on the host */
} tn_registration_info;
#define TN_REGISTRATION_INFO_INIT                                                                  \
    { sizeof(tn_registration_info), TN_REGISTER_BUFFER, NULL, 0, 0 }

TN_API TN_MUST_USE tn_status tn_registration_info_get(const tn_registration *registration,
                                                      tn_registration_info *out);

/* What the trial of windows has come to, on all ranks. */
typedef struct tn_window_info {
    size_t size;
    int is_known;      /* 0: no window has been asked for */
    tn_status status;  /* TN_OK: they work; else why they are not used */
    uint64_t check_us; /* that the trial took on the host */
    char text[512];    /* the failure in words; "" */
} tn_window_info;
#define TN_WINDOW_INFO_INIT                                                                        \
    { sizeof(tn_window_info), 0, TN_OK, 0, "" }

TN_API TN_MUST_USE tn_status tn_comm_window_info_get(tn_comm *comm, tn_window_info *out);

/* For tn_pool_config.functions: segments of ncclMemAlloc on the communicator's device, which must
 * outlive the pool. TN_UNSUPPORTED where there is no NCCL of 2.19 or later. */
TN_API TN_MUST_USE tn_status tn_comm_memory_functions(tn_comm *comm, tn_memory_functions *out);

#ifdef __cplusplus
}
#endif
#endif
