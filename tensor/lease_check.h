/* TENURE_CHECK_LEASES: whether a plane changed under a READ lease.
 *
 * Its bytes are hashed behind the work that is on the lease's stream, when the lease begins and
 * when it ends. That copies the plane to host memory and waits for the stream: a mode for finding
 * who writes what it may only read. Not while the stream captures. No lock is held.
 *
 * On a simulated device, whose kernels compute nothing, the hash is of who wrote each byte last: of
 * the ranges that kernels, copies and fills declare. There a write is found though it leaves the
 * bytes as they were, and there is nothing to wait for.
 */
#ifndef TENURE_LEASE_CHECK_H
#define TENURE_LEASE_CHECK_H

#include "error.h"
#include "tenure_tensor.h"

/* Hashes the plane of a lease that has just begun; abandons the lease if that fails. */
tn_status tn__lease_check_begin(tn_lease lease);

/* TN_INVALID_STATE, with tensor, plane and the call that began the lease, if the bytes have changed
 * since. The lease stays open either way. */
tn_status tn__lease_check_end(tn_lease lease);

#endif
