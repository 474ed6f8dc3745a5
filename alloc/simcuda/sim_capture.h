/* Stream capture and graphs.
 *
 *     capture   between begin and end: the streams that are in it and the graph they make
 *     graph     nodes, each with those that it comes after; in the order of their submission
 *     exec      an instantiated graph: its nodes on lanes, which are streams of its own
 *
 * A launch runs all nodes anew, as work of the lanes: after all that the launching stream has got
 * and after the last launch of the same exec, and before all that the stream gets next. So the race
 * detection sees the memory that the nodes touch at each launch, in the order that the captured
 * dependencies give and no other; and memory that has been unmapped meanwhile is error 700.
 *
 * What a capture forbids is error 900 and invalidates: calls that are unsafe (on memory, and
 * questions about events), by the rules of the thread's and the capture's modes; and waiting for
 * or asking about a capturing stream, its events or its device, in any mode.
 */
#ifndef TENURE_SIM_CAPTURE_H
#define TENURE_SIM_CAPTURE_H

#include "sim_stream.h"

typedef struct sim_node {
    sim_job job; /* its texts and ranges are the node's */
    int device;
    sim_tips before; /* nodes that it comes after */
} sim_node;

typedef struct sim_graph {
    struct sim_graph *next;
    int references; /* of its capture or the program's handle, and of execs */
    int has_handle; /* the program has one: after the capture, before it destroys it */
    sim_node *nodes;
    uint32_t node_count;
    uint32_t node_capacity;
} sim_graph;

typedef struct sim_capture {
    struct sim_capture *next;
    uint64_t id; /* never repeats */
    uint64_t thread;
    int mode;
    int is_invalid;
    sim_stream *origin;
    sim_graph *graph;
} sim_capture;

/* ---- sim_capture.c --------------------------------------------------------------------------- */

/* Error 900 if an ongoing capture forbids the call to this thread; then it is invalid. */
CUresult tn__sim_capture_admits(sim_call call, int is_memory);

/* Whether the stream can be given work: 901 if its capture is invalid; 906 for the legacy stream
 * while one that it would wait for captures. */
CUresult tn__sim_capture_gate(const sim_stream *stream);

/* Waiting for the stream, or asking what it has done: 900 if it captures. */
CUresult tn__sim_capture_refuses(sim_stream *stream);
/* The same for all streams of the device. */
CUresult tn__sim_capture_refuses_device(int device);

/* The ongoing capture of that number; NULL: it has ended. */
sim_capture *tn__sim_capture_find(uint64_t id);
void tn__sim_capture_invalidate(sim_capture *capture);

/* The stream comes after what `tips` of the capture name; it joins the capture if it is in none. */
CUresult tn__sim_capture_join(sim_stream *stream, sim_capture *capture, const sim_tips *tips);

void tn__sim_captures_reset(void);
int tn__sim_capture_leftovers(sim_report *report);

/* ---- sim_graph.c ----------------------------------------------------------------------------- */

void tn__sim_tips_add(sim_tips *tips, uint32_t node);
void tn__sim_tips_copy(sim_tips *to, const sim_tips *from);
void tn__sim_tips_clear(sim_tips *tips);

sim_graph *tn__sim_graph_create(void);
void tn__sim_graph_release(sim_graph *graph);
/* The graph gets a node after the stream's tips, and is the stream's only tip then. */
void tn__sim_graph_record(sim_graph *graph, sim_stream *stream, const sim_job *job);
/* 1 if no node is outside of those and what comes before them. */
int tn__sim_graph_is_joined(const sim_graph *graph, const sim_tips *tips);

void tn__sim_graphs_reset(void);
int tn__sim_graph_leftovers(sim_report *report);

#endif
