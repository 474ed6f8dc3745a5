/* Tenure: communicators of simulated devices, and how fast their ranks reach each other.
 *
 *     tn_simulated_links links = TN_SIMULATED_LINKS_INIT;
 *     tn_comm_config config = TN_COMM_CONFIG_INIT;
 *     config.device = simulated_device, config.engine = TN_COMM_SIMULATED;
 *     config.rank = 5, config.rank_count = 256, config.links = &links;
 *     tn_comm_create(&config, &comm);
 *
 * One rank of a job, and the others are not there: a collective moves no data. It declares on the
 * simulated stream what it reads and writes and the time that it takes, and its bytes on the wire
 * are counted as every engine's are. All ranks come to a collective at the same time: what a rank
 * waits for a slower one is not in its time.
 *
 * The time of a collective. Rank r of the job is on node r / ranks_per_node. In a group of n ranks
 * on k nodes, m of them on the node with the fewest, a ring of all has the bandwidth B and the
 * latency A of one round:
 *
 *     k = 1    B = node_bytes_per_us                              A = (n - 1) node_latency_us
 *     k > 1    B = min(node_bytes_per_us, m network_bytes_per_us) A = (n - k) node_latency_us
 *                                                                   + (k - 1) network_latency_us
 *
 * since each rank of a node has a way of its own to the network, and rings that go over each share
 * the bytes. With b bytes of each rank, or S in all:
 *
 *     all_gather, reduce_scatter    A + (n - 1) b / B     uneven: A + (S - the least rank's) / B
 *     all_reduce                    2 (A + (n - 1) ceil(S / n) / B)
 *     broadcast                     A + S / B
 *     barrier                       A
 *     all_to_all                    L + max(bytes on the node / node_bytes_per_us,
 *                                           bytes off it / network_bytes_per_us)
 *     send, receive                 the same for one peer
 *
 * where bytes are the larger of what is sent and what is received, and L is the larger latency of
 * the links that carry any. Each takes 2 us more for its launch, which is all for n = 1. The time
 * of a group of calls is that of the sums of what goes over each kind of link.
 */
#ifndef TENURE_SIMULATED_H
#define TENURE_SIMULATED_H

#include "tenure_dist.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The color and key that a rank passes to tn_comm_split of a communicator, `name` being the new
 * one's: the ranks that are not there can not say it themselves. */
typedef void (*tn_simulated_split)(void *context, const char *name, int rank, int *color, int *key);

/* Rates count one direction. The defaults are data-sheet figures of an H200 node (NVLink 4, one
 * 400 Gbit/s port for each GPU), and latencies that are assumed: none of them was measured. */
typedef struct tn_simulated_links {
    size_t size;
    int ranks_per_node;          /* 0: 8 */
    double node_bytes_per_us;    /* of a rank; 0: 450,000 */
    double network_bytes_per_us; /* of a rank; 0: 50,000 */
    double node_latency_us;      /* 0: 1 */
    double network_latency_us;   /* 0: 5 */
    tn_simulated_split split_of; /* NULL: tn_comm_split is TN_UNSUPPORTED */
    void *context;
} tn_simulated_links;
#define TN_SIMULATED_LINKS_INIT                                                                    \
    { sizeof(tn_simulated_links), 0, 0.0, 0.0, 0.0, 0.0, NULL, NULL }

#ifdef __cplusplus
}
#endif
#endif
