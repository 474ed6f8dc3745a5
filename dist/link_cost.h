/* What collectives cost on the links of a simulated job: the formulas of tenure_simulated.h.
 *
 *     tn__link_work work = {0};
 *     tn__link_add(&group, &call, &work);           (for each call of a batch)
 *     us = tn__link_us(&group, &work);
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
    int *places; /* of each rank in the job */
    double ring_bytes_per_us;
    double ring_latency_us;
} tn__link_group;

/* What a batch of calls puts on the links of this rank. */
typedef struct tn__link_work {
    double ring_bytes;    /* that go around the ring of all */
    double latency_us;    /* the largest of any call */
    double node_bytes[2]; /* to and from single peers on this node: sent, received */
    double network_bytes[2];
} tn__link_work;

/* Defaults in the place of zeros. TN_INVALID_ARGUMENT names a field that is none of its kind. */
tn_status tn__links_resolve(const tn_simulated_links *links, tn_simulated_links *out);

/* Bandwidth and latency of the ring, out of all the rest. */
void tn__link_group_measure(tn__link_group *group);

void tn__link_add(const tn__link_group *group, const tn__collective_call *call,
                  tn__link_work *work);
double tn__link_us(const tn__link_group *group, const tn__link_work *work);

#endif
