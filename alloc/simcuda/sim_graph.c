/* Graphs: nodes, instantiation, launches. See sim_capture.h.
 *
 * Lanes: a node goes on where the first of those before it ended, if that is the last of its lane,
 * else on a lane of its own. What else it comes after is a wait for just that node, not for all
 * that is on the other lane by then: an order that the graph does not give must not be given here.
 */
#include <string.h>

#include "sim_capture.h"
#include "sim_lifecycle.h"

typedef struct sim_exec {
    struct sim_exec *next;
    int references; /* of the program's handle and of launches */
    int is_destroyed;
    sim_graph *graph;
    uint32_t *lane_of;   /* by node */
    char *is_awaited;    /* by node: one of another lane comes after it */
    uint32_t *lane_last; /* by lane: its last node */
    sim_stream **lanes;
    uint32_t lane_count;
} sim_exec;

static sim_graph *graphs;
static sim_exec *execs;

/* ---- tips ------------------------------------------------------------------------------------ */

void tn__sim_tips_add(sim_tips *tips, uint32_t node) {
    for (uint32_t i = 0; i < tips->count; i++) {
        if (tips->nodes[i] == node) return;
    }
    if (tips->count == tips->capacity) {
        tips->capacity = tips->capacity ? 2 * tips->capacity : 4;
        tips->nodes = tn__sim_grow(tips->nodes, tips->capacity, sizeof *tips->nodes);
    }
    tips->nodes[tips->count++] = node;
}

void tn__sim_tips_copy(sim_tips *to, const sim_tips *from) {
    to->count = 0;
    for (uint32_t i = 0; i < from->count; i++)
        tn__sim_tips_add(to, from->nodes[i]);
}

void tn__sim_tips_clear(sim_tips *tips) {
    tn__sim_free(tips->nodes);
    memset(tips, 0, sizeof *tips);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

sim_graph *tn__sim_graph_create(void) {
    sim_graph *graph = tn__sim_alloc(1, sizeof *graph);
    graph->references = 1;
    graph->next = graphs;
    graphs = graph;
    return graph;
}

void tn__sim_graph_release(sim_graph *graph) {
    sim_graph **at = &graphs;
    if (--graph->references > 0) return;
    while (*at != graph)
        at = &(*at)->next;
    *at = graph->next;
    for (uint32_t i = 0; i < graph->node_count; i++) {
        sim_node *node = &graph->nodes[i];
        tn__sim_free((void *)(uintptr_t)node->job.what);
        tn__sim_free((void *)(uintptr_t)node->job.ranges);
        tn__sim_tips_clear(&node->before);
    }
    tn__sim_free(graph->nodes);
    tn__sim_free(graph);
}

static void *copy_of(const void *bytes, size_t count) {
    void *copy = tn__sim_alloc(count, 1);
    if (count) memcpy(copy, bytes, count);
    return copy;
}

void tn__sim_graph_record(sim_graph *graph, sim_stream *stream, const sim_job *job) {
    sim_node *node;
    if (graph->node_count == graph->node_capacity) {
        graph->node_capacity = graph->node_capacity ? 2 * graph->node_capacity : 8;
        graph->nodes = tn__sim_grow(graph->nodes, graph->node_capacity, sizeof *graph->nodes);
    }
    node = &graph->nodes[graph->node_count];
    memset(node, 0, sizeof *node);
    node->job = *job;
    node->job.what = copy_of(job->what, strlen(job->what) + 1);
    node->job.ranges = copy_of(job->ranges, job->range_count * sizeof *job->ranges);
    node->device = stream->device;
    tn__sim_tips_copy(&node->before, &stream->tips);
    stream->tips.count = 0;
    tn__sim_tips_add(&stream->tips, graph->node_count++);
}

/* Nodes come after nodes of lower number only, so one way down marks all that is reached. */
int tn__sim_graph_is_joined(const sim_graph *graph, const sim_tips *tips) {
    char *is_reached = tn__sim_alloc(graph->node_count, 1);
    int is_joined = 1;
    for (uint32_t i = 0; i < tips->count; i++)
        is_reached[tips->nodes[i]] = 1;
    for (uint32_t i = graph->node_count; i-- > 0;) {
        const sim_tips *before = &graph->nodes[i].before;
        if (!is_reached[i]) is_joined = 0;
        for (uint32_t k = 0; k < before->count; k++)
            is_reached[before->nodes[k]] = 1;
    }
    tn__sim_free(is_reached);
    return is_joined;
}

static sim_graph *find_graph(CUgraph handle) {
    sim_graph *graph = graphs;
    while (graph && (CUgraph)graph != handle)
        graph = graph->next;
    return graph && graph->has_handle ? graph : NULL;
}

CUresult cuGraphDestroy(CUgraph handle) {
    SIM_ENTER(cuGraphDestroy);
    sim_graph *graph = find_graph(handle);
    if (!graph) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    graph->has_handle = 0;
    tn__sim_graph_release(graph);
    return tn__sim_leave(CUDA_SUCCESS);
}

/* ---- instantiation --------------------------------------------------------------------------- */

static uint32_t choose_lane(sim_exec *exec, uint32_t index) {
    const sim_node *node = &exec->graph->nodes[index];
    for (uint32_t i = 0; i < node->before.count; i++) {
        uint32_t lane = exec->lane_of[node->before.nodes[i]];
        if (exec->lane_last[lane] != node->before.nodes[i]) continue;
        if (exec->lanes[lane]->device == node->device) return lane;
    }
    exec->lanes[exec->lane_count] = tn__sim_stream_create(node->device, SIM_STREAM_LANE, 0);
    return exec->lane_count++;
}

static void lay_out(sim_exec *exec) {
    for (uint32_t i = 0; i < exec->graph->node_count; i++) {
        const sim_tips *before = &exec->graph->nodes[i].before;
        uint32_t lane = choose_lane(exec, i);
        exec->lane_of[i] = lane;
        exec->lane_last[lane] = i;
        for (uint32_t k = 0; k < before->count; k++) {
            if (exec->lane_of[before->nodes[k]] != lane) exec->is_awaited[before->nodes[k]] = 1;
        }
    }
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
    sim_graph *graph = find_graph(handle);
    sim_exec *exec;
    uint32_t count;
    if (!graph || !out) return CUDA_ERROR_INVALID_VALUE;
    if (flags) return tn__sim_refuse("cuGraphInstantiate: flags 0x%llx", flags);
    count = graph->node_count;
    exec = tn__sim_alloc(1, sizeof *exec);
    exec->references = 1;
    exec->graph = graph;
    graph->references++;
    exec->lane_of = tn__sim_alloc(count, sizeof *exec->lane_of);
    exec->is_awaited = tn__sim_alloc(count, 1);
    exec->lane_last = tn__sim_alloc(count, sizeof *exec->lane_last);
    exec->lanes = tn__sim_alloc(count, sizeof *exec->lanes);
    lay_out(exec);
    exec->next = execs;
    execs = exec;
    *out = (CUgraphExec)exec;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    SIM_ENTER(cuGraphInstantiateWithFlags);
    return tn__sim_leave(instantiate(exec, graph, flags));
}

static void release_exec(sim_exec *exec) {
    sim_exec **at = &execs;
    if (--exec->references > 0) return;
    while (*at != exec)
        at = &(*at)->next;
    *at = exec->next;
    for (uint32_t i = 0; i < exec->lane_count; i++)
        tn__sim_stream_destroy(exec->lanes[i]);
    tn__sim_graph_release(exec->graph);
    tn__sim_free(exec->lane_of);
    tn__sim_free(exec->is_awaited);
    tn__sim_free(exec->lane_last);
    tn__sim_free(exec->lanes);
    tn__sim_free(exec);
}

static sim_exec *find_exec(CUgraphExec handle) {
    sim_exec *exec = execs;
    while (exec && (CUgraphExec)exec != handle)
        exec = exec->next;
    return exec && !exec->is_destroyed ? exec : NULL;
}

/* Launches that are under way go on. */
CUresult cuGraphExecDestroy(CUgraphExec handle) {
    SIM_ENTER(cuGraphExecDestroy);
    sim_exec *exec = find_exec(handle);
    if (!exec) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    exec->is_destroyed = 1;
    release_exec(exec);
    return tn__sim_leave(CUDA_SUCCESS);
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* A point behind a node that other lanes wait for. */
typedef struct node_mark {
    sim_clock clock;
    sim_ticket *ticket;
} node_mark;

static void submit_ticket(sim_stream *lane, sim_work_kind kind, sim_ticket *ticket) {
    sim_work work = {.kind = kind, .submitted = tn__sim.now, .ticket = ticket};
    ticket->references++;
    tn__sim_stream_submit(lane, &work);
}

static CUresult run_node(const sim_exec *exec, uint32_t index, node_mark *marks) {
    const sim_node *node = &exec->graph->nodes[index];
    sim_stream *lane = exec->lanes[exec->lane_of[index]];
    CUresult result;
    for (uint32_t i = 0; i < node->before.count; i++) {
        const node_mark *mark = &marks[node->before.nodes[i]];
        if (exec->lane_of[node->before.nodes[i]] == exec->lane_of[index]) continue;
        tn__sim_clock_join(&lane->clock, &mark->clock);
        submit_ticket(lane, SIM_WORK_WAIT, mark->ticket);
    }
    result = tn__sim_job_run(lane, &node->job, 0);
    if (result != CUDA_SUCCESS || !exec->is_awaited[index]) return result;
    tn__sim_clock_copy(&marks[index].clock, &lane->clock);
    marks[index].ticket = tn__sim_ticket_create();
    submit_ticket(lane, SIM_WORK_RECORD, marks[index].ticket);
    return CUDA_SUCCESS;
}

static CUresult run_nodes(const sim_exec *exec) {
    uint32_t count = exec->graph->node_count;
    node_mark *marks = tn__sim_alloc(count, sizeof *marks);
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = run_node(exec, i, marks);
    for (uint32_t i = 0; i < count; i++) {
        tn__sim_clock_clear(&marks[i].clock);
        tn__sim_ticket_release(marks[i].ticket);
    }
    tn__sim_free(marks);
    return result;
}

static CUresult launch(CUgraphExec handle, CUstream stream_handle) {
    sim_exec *exec = find_exec(handle);
    sim_stream *stream = tn__sim_stream_find(stream_handle);
    CUresult result;
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_gate(stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->capture) return tn__sim_refuse("cuGraphLaunch in a capture: no child graphs");
    tn__sim_spend(SIM_COST_SUBMIT);
    exec->references++;
    for (uint32_t i = 0; i < exec->lane_count; i++)
        tn__sim_stream_order_after(stream, exec->lanes[i]);
    tn__sim_stream_begin(stream);
    for (uint32_t i = 0; i < exec->lane_count; i++)
        tn__sim_stream_order_after(exec->lanes[i], stream);
    result = run_nodes(exec);
    for (uint32_t i = 0; i < exec->lane_count; i++)
        tn__sim_stream_order_after(stream, exec->lanes[i]);
    release_exec(exec);
    return result;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    SIM_ENTER(cuGraphLaunch);
    return tn__sim_leave(launch(exec, stream));
}

/* ---- reset, leftovers ------------------------------------------------------------------------ */

void tn__sim_graphs_reset(void) {
    while (execs) {
        execs->references = 1;
        release_exec(execs);
    }
    while (graphs) {
        graphs->references = 1;
        tn__sim_graph_release(graphs);
    }
}

int tn__sim_graph_leftovers(sim_report *report) {
    int graph_count = 0, exec_count = 0;
    for (const sim_graph *graph = graphs; graph; graph = graph->next)
        graph_count += graph->has_handle;
    for (const sim_exec *exec = execs; exec; exec = exec->next)
        exec_count += !exec->is_destroyed;
    if (graph_count) tn__sim_report_line(report, "  graphs: %d\n", graph_count);
    if (exec_count) tn__sim_report_line(report, "  instantiated graphs: %d\n", exec_count);
    return graph_count + exec_count;
}
