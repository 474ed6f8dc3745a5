/* What an export does with its lease beyond the public calls. The lease is alive; none can fail. */
#ifndef TENURE_LEASE_H
#define TENURE_LEASE_H

#include "tenure_tensor.h"

/* From now on whoever is refused hears of an export. */
void tn__lease_mark_export(tn_lease lease);

/* Ends a READ or UPDATE lease under which nothing was done, as if it had never begun. */
void tn__lease_undo(tn_lease lease);

/* Ends it, whatever happens. */
void tn__lease_end_surely(tn_lease lease);

#endif
