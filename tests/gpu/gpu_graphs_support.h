/* Real captures and CUDA graphs in GPU tests, with the graph pool's capture inside: as a program
 * makes them. One capture at a time, on the side's stream; test_graphs.h has the driver's calls.
 */
#ifndef TENURE_GPU_GRAPHS_SUPPORT_H
#define TENURE_GPU_GRAPHS_SUPPORT_H

#include "gpu_support.h"
#include "test_graphs.h"

typedef struct gpu_graph {
    test_graph graph;
    tn_graph_memory memory;
} gpu_graph;

/* Captures in global mode. */
void gpu_graph_begin(const gpu_side *side, tn_pool *pool);
gpu_graph gpu_graph_end(const gpu_side *side, tn_pool *pool);

/* Ends a capture that a failed test has left, so that one failure is not the next test's, too. */
void gpu_graph_end_what_is_left(const gpu_side *side);

void gpu_graph_launch(const gpu_side *side, const gpu_graph *graph);
void gpu_graph_drop(const gpu_side *side, tn_pool *pool, const gpu_graph *graph);

#endif
