/* Tenure: collectives in captured CUDA graphs.
 *
 *     cuStreamBeginCapture(stream, mode);
 *     tn_comm_capture_begin(comm, stream);
 *     ... ops, and collectives of comm, on `stream` and on streams that joined its capture ...
 *     tn_comm_capture_end(comm, &graph);
 *     cuStreamEndCapture(stream, &cuda_graph);
 *     cuGraphInstantiate(&exec, cuda_graph, 0);
 *
 *     tn_comm_graph_launch_begin(graph, stream);        (each step; collectives of comm that are
 *     cuGraphLaunch(exec, stream);                       called as ever may come between steps)
 *     tn_comm_graph_launch_end(graph);
 *
 *     cuGraphExecDestroy(exec), cuGraphDestroy(cuda_graph);
 *     tn_comm_graph_destroy(graph);                     (and then the communicator, if it is to)
 *
 * Engines: NCCL, and simulated ranks. MPI and TCP work on the host, where a launch tells nobody
 * anything: a call that is captured is TN_UNSUPPORTED with them.
 *
 * What is in the capture. Any collectives and groups. Each is put in the graph and does nothing
 * else: no memory is taken or registered, no event is asked, nothing is counted, watched or
 * recorded as called, and nobody waits, but for NCCL, which connects ranks in the first collectives
 * of its kind: call them once before. They run one after the other, on whichever streams of the
 * capture they are. Addresses are the graph's until it is destroyed: memory of a graph pool
 * (tenure_pool.h), or blocks and leased planes that stay where they are. Work of the communicator
 * outside of the capture, before, meanwhile or after, is apart from it.
 *
 * A call that is refused leaves the capture as it was, good to go on with: TN_UNSUPPORTED (the
 * engine), TN_INVALID_STATE (no capture of the communicator's is open, or another one than the
 * stream's; the stream's capture is spoiled), TN_INVALID_ARGUMENT, out of host memory. Only a
 * failure of the communicator, or of the driver within a call that was being captured, leaves no
 * way but tn_comm_capture_abort, which the texts say. All ranks capture the same and launch it in
 * the same order among their collectives, as all calls: with TENURE_CHECK_COLLECTIVES=1 that is
 * compared at both. A rank that gives a capture up tells the others by other means, before they
 * launch: none of them waits for it in the capture.
 *
 * Gathers of shards are captured, and so are the layers of tenure_parallel.h, whose second stream
 * joins the capture before them and comes back. A ring (tenure_ring.h), and with it a sharded
 * model, is not, nor what waits on the host for an answer of the ranks: tn_counts_exchange,
 * tn_shard_plan_verify, tn_ring_verify and checkpoints are TN_UNSUPPORTED on a stream that
 * captures, and leave the capture as it was.
 *
 * A launch is one collective in the communicator's order: it comes behind those that were put
 * before, and those that are put after its end come behind all of the graph, on whichever streams;
 * tn_comm_wait waits for it. Its deadline is of the graph as a whole, all other work in it
 * included, from where its stream comes to it: a graph that hangs makes the communicator fail, as a
 * collective does. Statistics have with each launch all that was captured (tn_comm_stats), reports
 * a line.
 *
 * Failure. A communicator that has failed launches no graph: tn_comm_graph_launch_begin gives its
 * status, and nothing is to be launched. What is on streams ends within a tenth of a second. What
 * was captured is of no more use: its graphs are destroyed, then the communicator, and others are
 * made. NCCL keeps the memory of a communicator until the graphs that it is in are destroyed, and
 * waits for that: so tn_comm_destroy, tn_comm_shrink and tn_comm_deregister are TN_IN_USE, and
 * have done nothing, while there is a tn_comm_graph or an open capture of the communicator. The
 * program's own graphs are destroyed first, those that came of an aborted capture too.
 *
 * Threads: any thread may call; the order of calls is the program's business.
 */
#ifndef TENURE_COMM_GRAPH_H
#define TENURE_COMM_GRAPH_H

#include "tenure_dist.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a captured graph has of one communicator. A graph with collectives of several has one for
 * each; graphs that were instantiated several times have one for all. */
typedef struct tn_comm_graph tn_comm_graph;

/* Opens the capture that `stream` is in, which has begun already. One at a time in a communicator.
 * While it is open the communicator is not split, and registers nothing. TN_INVALID_STATE: one is
 * open; the stream does not capture, or what it captures is spoiled. TN_UNSUPPORTED: the engine,
 * or a driver without captures. */
TN_API TN_MUST_USE tn_status tn_comm_capture_begin(tn_comm *comm, tn_stream stream);

/* Closes it, before or after the caller ends the stream's capture; only before can it tell that the
 * capture is spoiled. On failure, TN_INVALID_STATE (that, or no capture is open) and the
 * communicator's own, it is still open: abort it. */
TN_API TN_MUST_USE tn_status tn_comm_capture_end(tn_comm *comm, tn_comm_graph **out);

/* Gives up the open capture: what comes of it is not to be launched. The stream's capture is the
 * caller's to end. A no-op if none is open, and for NULL. */
TN_API void tn_comm_capture_abort(tn_comm *comm);

/* Around the launch on `stream` of what the capture has become. Between the two no collective and
 * no other launch of the communicator is put (TN_INVALID_STATE). If begin fails nothing is to be
 * launched, and nothing has changed; TN_UNSUPPORTED: the stream captures, and a graph in a graph is
 * not supported. If end fails the communicator has failed. cancel: nothing was launched after all;
 * a no-op if no launch was begun. The others may have launched theirs and wait in it for this rank:
 * it begins the launch again before anything else of the communicator, or gives up and tells them
 * so by tn_comm_abort. If it does neither they wait for the deadline. */
TN_API TN_MUST_USE tn_status tn_comm_graph_launch_begin(tn_comm_graph *graph, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_comm_graph_launch_end(tn_comm_graph *graph);
TN_API void tn_comm_graph_launch_cancel(tn_comm_graph *graph);

/* After the caller's own graphs are destroyed; launches may be under way. TN_INVALID_STATE between
 * begin and end of a launch. NULL is a no-op. */
TN_API tn_status tn_comm_graph_destroy(tn_comm_graph *graph);

typedef struct tn_comm_graph_info {
    size_t size;
    uint64_t collectives; /* calls and groups that were captured */
    uint64_t launches;
    tn_comm_stats counts; /* what each launch adds to the communicator's */
} tn_comm_graph_info;
#define TN_COMM_GRAPH_INFO_INIT                                                                    \
    { sizeof(tn_comm_graph_info), 0, 0, TN_COMM_STATS_INIT }

TN_API TN_MUST_USE tn_status tn_comm_graph_info_get(tn_comm_graph *graph, tn_comm_graph_info *out);

#ifdef __cplusplus
}
#endif
#endif
