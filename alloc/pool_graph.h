/* Graph pools: the state that a pool has beyond an ordinary one's, and where the other files of a
 * pool ask about it.
 *
 * A stream that captures is another stream than the same one outside of the capture: what it is
 * given runs at launches, if ever. So a capture has streams of its own (tn__pool_stream that are in
 * no index of the pool's order, and never see an event), and a use by such a stream says that the
 * graph uses the memory there. Memory is ready for a captured stream if no other stream may still
 * use it, as far as is known without waiting: a capture can wait for nothing outside.
 *
 *     open       alloc and free by captured streams; uses by captured streams exist
 *     end        those uses are forgotten: the memory is free for later captures
 *     abort      so are the blocks
 *
 * Invariants: no use by a captured stream, and no block for one, while no capture is open. While
 * one is open or a graph's memory is not released the pool is held: no page of it moves or goes
 * back to the driver, since launches use the addresses.
 */
#ifndef TENURE_POOL_GRAPH_H
#define TENURE_POOL_GRAPH_H

#include "heap.h"
#include "tenure_pool.h"

typedef struct tn__graph {
    uint64_t number;          /* of the pool, among all graph pools of the process */
    int is_open;              /* a capture is */
    tn_stream origin;         /* that the capture was opened for */
    uint64_t capture_id;      /* the driver's */
    tn__pool_stream *streams; /* of the open capture, linked by next */
    uint64_t last_memory;
    tn_graph_memory *memories; /* not released */
    size_t memory_count;
    size_t memory_capacity;
} tn__graph;

/* 1 while launches may use memory of the pool that is free in its books. graph may be NULL. */
static inline int tn__graph_holds(const tn__graph *graph) {
    return graph && (graph->is_open || graph->memory_count > 0);
}

/* What a call does with the stream that it names. */
typedef enum tn__graph_call { TN__GRAPH_ALLOC, TN__GRAPH_FREE, TN__GRAPH_USE } tn__graph_call;

/* The stream of an alloc, free or use in a graph pool; block is NULL for an alloc. */
tn_status tn__graph_find_stream(struct tn_pool *pool, tn_stream handle, tn__graph_call call,
                                const tn__piece *block, tn__pool_stream **out);

/* A place for a captured stream's request: what is ready, else more from the driver. Waits for
 * nothing and gives nothing back. */
tn_status tn__graph_find_room(struct tn_pool *pool, const tn__request *request, tn__place *out);

/* TN_IN_USE while the pool is held. */
tn_status tn__graph_check_released(const struct tn_pool *pool);

void tn__graph_destroy(tn__graph *graph);

#endif
