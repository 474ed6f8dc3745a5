/* What collectives cost on links: see link_cost.h, and tenure_simulated.h for the formulas. */
#include "link_cost.h"

#include <math.h>
#include <string.h>

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

/* ---- calls ---------------------------------------------------------------------------------- */

typedef enum direction { SENT = 0, RECEIVED, DIRECTIONS } direction;

/* What a batch of calls puts on the links of this rank. */
typedef struct link_work {
    double ring_bytes;                /* that go around the ring of all */
    double latency_us;                /* the largest of any call */
    double node_bytes[DIRECTIONS];    /* between this rank and others of its node */
    double network_bytes[DIRECTIONS]; /* and those of other nodes */
} link_work;

static void add_ring(link_work *work, double latency_us, double bytes) {
    work->ring_bytes += bytes;
    if (latency_us > work->latency_us) work->latency_us = latency_us;
}

static void add_peer(const tn__link_group *group, int peer, direction way, double bytes,
                     link_work *work) {
    const int is_near = node_of(group, peer) == node_of(group, group->rank);
    const double latency_us =
        is_near ? group->links.node_latency_us : group->links.network_latency_us;
    if (peer == group->rank || bytes == 0.0) return;
    if (latency_us > work->latency_us) work->latency_us = latency_us;
    (is_near ? work->node_bytes : work->network_bytes)[way] += bytes;
}

static void add_all_to_all(const tn__link_group *group, const tn__batch *batch,
                           const tn__collective_call *call, link_work *work) {
    const double each = (double)call->element_bytes, even = (double)call->count * each;
    const tn_segment *sent = batch->segments + call->first_segment;
    const tn_segment *received = sent + group->rank_count;
    const int is_even = call->kind == TN_ALL_TO_ALL;
    for (int peer = 0; peer < group->rank_count; peer++) {
        add_peer(group, peer, SENT, is_even ? even : (double)sent[peer].count * each, work);
        add_peer(group, peer, RECEIVED, is_even ? even : (double)received[peer].count * each, work);
    }
}

/* What the rank with the fewest elements has of an uneven call, and what all have. */
static void measure_uneven(const tn__link_group *group, const tn__batch *batch,
                           const tn__collective_call *call, double *all, double *fewest) {
    *all = 0.0;
    memset(group->sums, 0, (size_t)group->rank_count * sizeof *group->sums);
    for (size_t i = 0; i < call->segment_count; i++) {
        const tn_segment *segment = &batch->segments[call->first_segment + i];
        group->sums[segment->rank] += (double)segment->count;
        *all += (double)segment->count;
    }
    *fewest = group->sums[0];
    for (int rank = 1; rank < group->rank_count; rank++)
        *fewest = group->sums[rank] < *fewest ? group->sums[rank] : *fewest;
}

static void add_call(const tn__link_group *group, const tn__batch *batch,
                     const tn__collective_call *call, link_work *work) {
    const double others = group->rank_count - 1, ranks = group->rank_count;
    const double each = (double)call->element_bytes, bytes = (double)call->count * each;
    double all, fewest;
    switch (call->kind) {
    case TN_ALL_GATHER:
    case TN_REDUCE_SCATTER: add_ring(work, group->ring_latency_us, others * bytes); break;
    case TN_ALL_GATHER_UNEVEN:
    case TN_REDUCE_SCATTER_UNEVEN:
        measure_uneven(group, batch, call, &all, &fewest);
        add_ring(work, group->ring_latency_us, (all - fewest) * each);
        break;
    case TN_ALL_REDUCE: {
        double part = ceil((double)call->count / ranks) * each;
        add_ring(work, 2.0 * group->ring_latency_us, 2.0 * others * part);
        break;
    }
    case TN_ALL_TO_ALL:
    case TN_ALL_TO_ALL_UNEVEN: add_all_to_all(group, batch, call, work); break;
    case TN_SEND: add_peer(group, call->root, SENT, bytes, work); break;
    case TN_RECEIVE: add_peer(group, call->root, RECEIVED, bytes, work); break;
    default: add_ring(work, group->ring_latency_us, bytes); break;
    }
}

static double larger(double a, double b) { return a > b ? a : b; }

double tn__link_batch_us(tn__link_group *group, const tn__batch *batch) {
    const tn_simulated_links *links = &group->links;
    link_work work = {.latency_us = 0.0};
    if (group->rank_count == 1) return launch_us;
    for (size_t i = 0; i < batch->call_count; i++)
        add_call(group, batch, &batch->calls[i], &work);
    const double node_us =
        larger(work.node_bytes[SENT], work.node_bytes[RECEIVED]) / links->node_bytes_per_us;
    const double network_us = larger(work.network_bytes[SENT], work.network_bytes[RECEIVED]) /
                              links->network_bytes_per_us;
    return launch_us + work.latency_us + work.ring_bytes / group->ring_bytes_per_us +
           larger(node_us, network_us);
}
