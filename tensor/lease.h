/* What the library does with leases of its own beyond the public calls. */
#ifndef TENURE_LEASE_H
#define TENURE_LEASE_H

#include "error.h"
#include "tenure_tensor.h"

/* Of a lease that is alive: from now on whoever is refused hears of an export. */
void tn__lease_mark_export(tn_lease lease);

/* Ends a lease under which nothing was done: the plane is what it was, or freed again if the lease
 * made it. Fails only for a handle that is not alive. */
TN_SISTER_API TN_MUST_USE tn_status tn__lease_undo(tn_lease lease);

/* Ends a READ or UPDATE whatever happens: what the driver refuses to note is waited for later. */
TN_SISTER_API void tn__lease_end_surely(tn_lease lease);

#endif
