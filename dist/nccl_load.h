/* NCCL's library and its errors in words. */
#ifndef TENURE_NCCL_LOAD_H
#define TENURE_NCCL_LOAD_H

#include "comm_engine.h"
#include "nccl_abi.h"

/* The calls, of the library that is loaded by the first success. TN_UNSUPPORTED names what is
 * missing. */
tn_status tn__nccl_load(const tn__nccl_calls **out);

/* The status for a result code of `call`, recorded; comm may be NULL. */
tn_status tn__nccl_fail(const tn__nccl_calls *calls, void *comm, int code, const char *call);

#endif
