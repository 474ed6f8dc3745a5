/* Real captures and CUDA graphs in GPU tests, as a program makes them: with the driver's own calls
 * around tn_graph_capture_begin and _end. One capture at a time, on the side's stream.
 */
#ifndef TENURE_GPU_GRAPHS_SUPPORT_H
#define TENURE_GPU_GRAPHS_SUPPORT_H

#include "gpu_support.h"
#include "tenure_pool.h"

typedef struct gpu_graph {
    void *graph;
    void *exec;
    tn_graph_memory memory;
} gpu_graph;

/* The driver's calls, for what the functions below do not do; loaded by gpu_graph_load. */
typedef struct gpu_graph_calls {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*query)(void *stream);
    int (*instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, void *stream);
    int (*exec_destroy)(void *exec);
    int (*graph_destroy)(void *graph);
} gpu_graph_calls;

const gpu_graph_calls *gpu_graph_load(void);

/* Captures in global mode, with the graph pool's capture inside. */
void gpu_graph_begin(const gpu_side *side, tn_pool *pool);
gpu_graph gpu_graph_end(const gpu_side *side, tn_pool *pool);

/* Ends a capture that a failed test has left, so that one failure is not the next test's, too. */
void gpu_graph_end_what_is_left(const gpu_side *side);

void gpu_graph_launch(const gpu_side *side, const gpu_graph *graph);
void gpu_graph_drop(const gpu_side *side, tn_pool *pool, const gpu_graph *graph);

#endif
