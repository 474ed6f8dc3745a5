/* What collectives cost on links: see link_cost.h, and tenure_simulated.h for the formulas. */
#include "link_cost.h"

#include <math.h>

static const double launch_us = 2.0;

/* ---- links ----------------------------------------------------------------------------------- */

static tn_status resolve_rate(const char *field, double value, double otherwise, double *out) {
    TN_REQUIRE(isfinite(value) && value >= 0.0,
               "tn_simulated_links.%s is %g: it is finite and above 0, or 0 for %g", field, value,
               otherwise);
    *out = value > 0.0 ? value : otherwise;
    return TN_OK;
}

tn_status tn__links_resolve(const tn_simulated_links *links, tn_simulated_links *out) {
    static const tn_simulated_links defaults = TN_SIMULATED_LINKS_INIT;
    tn_simulated_links resolved = links ? *links : defaults;
    TN_REQUIRE(resolved.size == sizeof resolved,
               "tn_simulated_links.size is %zu, not %zu: begin with TN_SIMULATED_LINKS_INIT",
               resolved.size, sizeof resolved);
    TN_REQUIRE(resolved.ranks_per_node >= 0,
               "tn_simulated_links.ranks_per_node is %d: it is above 0, or 0 for 8",
               resolved.ranks_per_node);
    if (resolved.ranks_per_node == 0) resolved.ranks_per_node = 8;
    TN_TRY(resolve_rate("node_bytes_per_us", resolved.node_bytes_per_us, 450e3,
                        &resolved.node_bytes_per_us));
    TN_TRY(resolve_rate("network_bytes_per_us", resolved.network_bytes_per_us, 50e3,
                        &resolved.network_bytes_per_us));
    TN_TRY(
        resolve_rate("node_latency_us", resolved.node_latency_us, 1.0, &resolved.node_latency_us));
    TN_TRY(resolve_rate("network_latency_us", resolved.network_latency_us, 5.0,
                        &resolved.network_latency_us));
    *out = resolved;
    return TN_OK;
}

/* ---- groups ---------------------------------------------------------------------------------- */

static int node_of(const tn__link_group *group, int rank) {
    return group->places[rank] / group->links.ranks_per_node;
}

/* How many of the group are on this rank's node; 0 unless it is the first of them. */
static int count_if_first(const tn__link_group *group, int rank) {
    int count = 0;
    for (int other = 0; other < group->rank_count; other++) {
        if (node_of(group, other) != node_of(group, rank)) continue;
        if (other < rank) return 0;
        count++;
    }
    return count;
}

void tn__link_group_measure(tn__link_group *group) {
    const tn_simulated_links *links = &group->links;
    int nodes = 0, fewest = group->rank_count;
    for (int rank = 0; rank < group->rank_count; rank++) {
        int count = count_if_first(group, rank);
        if (count == 0) continue;
        nodes++;
        if (count < fewest) fewest = count;
    }
    double shared = fewest * links->network_bytes_per_us;
    group->ring_bytes_per_us =
        nodes == 1 || shared > links->node_bytes_per_us ? links->node_bytes_per_us : shared;
    group->ring_latency_us = (group->rank_count - nodes) * links->node_latency_us +
                             (nodes - 1) * links->network_latency_us;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void add_ring(tn__link_work *work, double latency_us, double bytes) {
    work->ring_bytes += bytes;
    if (latency_us > work->latency_us) work->latency_us = latency_us;
}

void tn__link_add(const tn__link_group *group, const tn__collective_call *call,
                  tn__link_work *work) {
    const double others = group->rank_count - 1, ranks = group->rank_count;
    const double bytes = (double)call->count * (double)call->element_bytes;
    if (group->rank_count == 1) return;
    switch (call->kind) {
    case TN_ALL_GATHER:
    case TN_REDUCE_SCATTER: add_ring(work, group->ring_latency_us, others * bytes); break;
    case TN_ALL_REDUCE: {
        double part = ceil((double)call->count / ranks) * (double)call->element_bytes;
        add_ring(work, 2.0 * group->ring_latency_us, 2.0 * others * part);
        break;
    }
    default: add_ring(work, group->ring_latency_us, bytes); break;
    }
}

static double larger(double a, double b) { return a > b ? a : b; }

double tn__link_us(const tn__link_group *group, const tn__link_work *work) {
    const tn_simulated_links *links = &group->links;
    double node_us = larger(work->node_bytes[0], work->node_bytes[1]) / links->node_bytes_per_us;
    double network_us =
        larger(work->network_bytes[0], work->network_bytes[1]) / links->network_bytes_per_us;
    return launch_us + work->latency_us + work->ring_bytes / group->ring_bytes_per_us +
           larger(node_us, network_us);
}
