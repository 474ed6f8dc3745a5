/* A whole training step as one CUDA graph, captured with the driver's own calls and a graph pool.
 *
 *     trainer_graph_open(&graph, device, stream);
 *     trainer_graph_begin(&graph);
 *     ...                                           the step, in scopes of graph.pool
 *     trainer_graph_end(&graph);                    (or _abort, if the step has failed)
 *     trainer_graph_launch(&graph);                 as often as there are steps
 *     trainer_graph_close(&graph);
 *
 * What the step reads and writes beyond its own scopes must stay where it is: parameters,
 * gradients, optimizer state, batches, and the slot of the weights' COL planes.
 *
 * A call that fails has left the reason in `message`.
 */
#ifndef TENURE_TRAINER_GRAPH_H
#define TENURE_TRAINER_GRAPH_H

#include "tenure_pool.h"

typedef struct trainer_graph_calls {
    int (*device_get)(int *device, int ordinal);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_set)(void *context);
    int (*capture_begin)(void *stream, int mode);
    int (*capture_end)(void *stream, void **graph);
    int (*instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, void *stream);
    int (*exec_destroy)(void *exec);
    int (*graph_destroy)(void *graph);
} trainer_graph_calls;

typedef struct trainer_graph {
    trainer_graph_calls calls;
    void *library;
    tn_device *device;
    tn_stream stream;
    tn_pool *pool;
    int cuda_device;
    int has_context, is_capturing, has_memory;
    void *graph, *exec;
    tn_graph_memory memory;
    char message[256];
} trainer_graph;

/* After a failure of any call but close, too, there is to be a close. */
TN_MUST_USE tn_status trainer_graph_open(trainer_graph *graph, tn_device *device, tn_stream stream);
TN_MUST_USE tn_status trainer_graph_begin(trainer_graph *graph);
TN_MUST_USE tn_status trainer_graph_end(trainer_graph *graph);
void trainer_graph_abort(trainer_graph *graph);
TN_MUST_USE tn_status trainer_graph_launch(trainer_graph *graph);

/* The scopes in its pool have been closed before. A graph of zeros is a no-op. */
tn_status trainer_graph_close(trainer_graph *graph);

#endif
