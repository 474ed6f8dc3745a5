/* What collectives cost on the links of a simulated job: the formulas of tenure_simulated.h.
 *
 *     us = tn__link_batch_us(&group, &batch);
 *
 * Invariant: places has rank_count entries, ascending or not, each of 0 or more; rates and
 * latencies are above 0.
 */
#ifndef TENURE_LINK_COST_H
#define TENURE_LINK_COST_H

#include "comm_engine.h"
#include "tenure_simulated.h"

/* The ranks of a communicator and the nodes that they are on. */
typedef struct tn__link_group {
    tn_simulated_links links; /* resolved: no field is 0 */
    int rank;
    int rank_count;
    int *places;  /* of each rank in the job */
    double *sums; /* rank_count of them, for tn__link_batch_us to count in */
    double ring_bytes_per_us;
    double ring_latency_us;
} tn__link_group;

/* Defaults in the place of zeros. TN_INVALID_ARGUMENT names a field that is none of its kind. */
tn_status tn__links_resolve(const tn_simulated_links *links, tn_simulated_links *out);

/* Bandwidth and latency of the ring, out of all the rest. */
void tn__link_group_measure(tn__link_group *group);

/* How long all calls of a batch take together. One thread of a group at a time. */
double tn__link_batch_us(tn__link_group *group, const tn__batch *batch);

#endif
