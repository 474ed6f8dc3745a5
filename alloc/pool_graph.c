/* Graph pools: captures opened, ended and aborted, and the memory of graphs. See pool_graph.h. */
#include "pool_graph.h"

#include <stdatomic.h>

#include "driver_state.h"
#include "host_alloc.h"
#include "no_wait.h"
#include "pool_internal.h"

/* ---- create, destroy ------------------------------------------------------------------------- */

static tn__graph *make_graph(void) {
    static _Atomic uint64_t last_number;
    tn__graph *graph = tn__host_alloc(1, sizeof *graph);
    if (graph) graph->number = ++last_number;
    return graph;
}

void tn__graph_destroy(tn__graph *graph) {
    if (!graph) return;
    while (graph->streams) {
        tn__pool_stream *stream = graph->streams;
        graph->streams = stream->next;
        tn__host_free(stream);
    }
    tn__host_free(graph->memories);
    tn__host_free(graph);
}

static tn_status check_backing(tn_device *device, const tn_pool_config *config) {
    tn_pool_backing backing = config ? config->backing : TN_BACKING_AUTO;
    if (!tn__device_driver(device)->stream_capture) {
        return TN_FAIL(TN_UNSUPPORTED, "tn_graph_pool_create: the %s driver captures no graphs",
                       tn__device_driver(device)->name);
    }
    if (backing == TN_BACKING_AUTO || backing == TN_BACKING_VMM || backing == TN_BACKING_PLAIN) {
        return TN_OK;
    }
    return TN_FAIL(TN_UNSUPPORTED,
                   "tn_graph_pool_create: graph pools have backing AUTO, VMM or PLAIN, not %d",
                   (int)backing);
}

tn_status tn_graph_pool_create(tn_device *device, const tn_pool_config *config, tn_pool **out) {
    tn__graph *graph;
    tn_status status;
    TN_REQUIRE(device, "tn_graph_pool_create: device is NULL");
    TN_REQUIRE(out, "tn_graph_pool_create: out is NULL");
    TN_TRY(check_backing(device, config));
    graph = make_graph();
    if (!graph) return TN_OUT_OF_HOST_MEMORY;
    status = tn__pool_create(device, config, graph, out);
    if (status != TN_OK) tn__graph_destroy(graph);
    return status;
}

tn_status tn__graph_check_released(const tn_pool *pool) {
    const tn__graph *graph = pool->graph;
    if (!tn__graph_holds(graph)) return TN_OK;
    if (graph->is_open) {
        return TN_FAIL(TN_IN_USE, "pool %s has a capture open: end or abort it", pool->name);
    }
    return TN_FAIL(TN_IN_USE, "pool %s holds memory of %zu graphs: tn_graph_memory_release",
                   pool->name, graph->memory_count);
}

/* ---- streams of a capture -------------------------------------------------------------------- */

static int is_of_capture(const tn__piece *block) {
    return block->stream && block->stream->is_captured;
}

static tn_status ask_capture(const tn_pool *pool, tn_stream handle, tn__capture_status *status,
                             uint64_t *id) {
    TN_TRY(pool->driver->stream_capture(pool->state, handle, status, id));
    if (*status != TN__CAPTURE_INVALID) return TN_OK;
    return TN_FAIL(
        TN_INVALID_STATE,
        "something forbidden has spoiled the capture of stream %p: no graph will come of "
        "it, tn_graph_capture_abort",
        (void *)handle);
}

static tn_status find_captured(tn_pool *pool, tn_stream handle, tn__pool_stream **out) {
    tn__graph *graph = pool->graph;
    tn__pool_stream *stream = graph->streams;
    uint64_t id = 0;
    TN_TRY(pool->driver->stream_id(pool->state, handle, &id));
    while (stream && stream->id != id)
        stream = stream->next;
    if (!stream) {
        TN_TRY(tn__order_make(&pool->order, handle, id, &stream));
        stream->is_captured = 1;
        stream->next = graph->streams;
        graph->streams = stream;
    }
    *out = stream;
    return TN_OK;
}

static tn_status check_outside(const tn_pool *pool, tn__graph_call call, const tn__piece *block) {
    if (call == TN__GRAPH_ALLOC) {
        return TN_FAIL(TN_INVALID_STATE,
                       "pool %s gives memory to captures, and the stream does not capture: use "
                       "another pool",
                       pool->name);
    }
    if (!is_of_capture(block)) return TN_OK;
    return TN_FAIL(
        TN_INVALID_STATE,
        "the block at %p belongs to the open capture of pool %s, and the stream does not",
        (void *)block->address, pool->name);
}

static tn_status check_inside(const tn_pool *pool, uint64_t id, tn__graph_call call,
                              const tn__piece *block) {
    const tn__graph *graph = pool->graph;
    if (!graph->is_open || graph->capture_id != id) {
        return TN_FAIL(TN_INVALID_STATE,
                       "the stream captures, but %s capture is open in pool %s: "
                       "tn_graph_capture_begin",
                       graph->is_open ? "another" : "no", pool->name);
    }
    if (call != TN__GRAPH_FREE || is_of_capture(block)) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "the block at %p is older than the capture: free it outside",
                   (void *)block->address);
}

tn_status tn__graph_find_stream(tn_pool *pool, tn_stream handle, tn__graph_call call,
                                const tn__piece *block, tn__pool_stream **out) {
    tn__capture_status status;
    uint64_t id = 0;
    TN_TRY(ask_capture(pool, handle, &status, &id));
    if (status == TN__CAPTURE_NONE) {
        TN_TRY(check_outside(pool, call, block));
        return tn__pool_find_stream(pool, handle, out);
    }
    TN_TRY(check_inside(pool, id, call, block));
    return find_captured(pool, handle, out);
}

tn_status tn__graph_find_room(tn_pool *pool, const tn__request *request, tn__place *out) {
    if (tn__heap_find_run(&pool->heap, request, out)) return TN_OK;
    TN_TRY(tn__pool_collect(pool));
    if (tn__heap_find_run(&pool->heap, request, out)) return TN_OK;
    return pool->backing->grow(pool, request, TN__EFFORT_READY, out);
}

/* ---- begin ----------------------------------------------------------------------------------- */

/* For the calls that are about an open capture; takes the lock if there can be one. */
static tn_status lock_graph(tn_pool *pool, const char *call) {
    TN_REQUIRE(pool, "%s: pool is NULL", call);
    if (!pool->graph) {
        return TN_FAIL(TN_UNSUPPORTED, "%s: pool %s is no graph pool", call, pool->name);
    }
    TN_TRY(tn__driver_require_present(call));
    pthread_mutex_lock(&pool->mutex);
    return TN_OK;
}

static tn_status begin_locked(tn_pool *pool, tn_stream stream) {
    tn__capture_status status;
    uint64_t id = 0;
    TN_TRY(tn__pause_check(pool, "tn_graph_capture_begin"));
    if (pool->graph->is_open) {
        return TN_FAIL(TN_INVALID_STATE,
                       "pool %s has a capture open already: end or abort it first", pool->name);
    }
    TN_TRY(ask_capture(pool, stream, &status, &id));
    if (status == TN__CAPTURE_NONE) {
        return TN_FAIL(
            TN_INVALID_STATE,
            "tn_graph_capture_begin: stream %p does not capture: begin its capture first",
            (void *)stream);
    }
    pool->graph->is_open = 1;
    tn__capture_opened();
    pool->graph->origin = stream;
    pool->graph->capture_id = id;
    return TN_OK;
}

tn_status tn_graph_capture_begin(tn_pool *pool, tn_stream stream) {
    tn_status status;
    TN_TRY(lock_graph(pool, "tn_graph_capture_begin"));
    status = begin_locked(pool, stream);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- end, abort ------------------------------------------------------------------------------ */

static void forget_captured_uses(tn__piece *piece) {
    tn__use *items = tn__uses_items(&piece->uses);
    for (uint32_t i = piece->uses.count; i-- > 0;) {
        if (items[i].stream->is_captured) tn__uses_forget(&piece->uses, items[i].stream);
    }
    if (!piece->stream || !piece->stream->is_captured) return;
    piece->stream = NULL;
    if (piece->kind != TN__PIECE_LIVE && piece->uses.count > 0) piece->stream = items[0].stream;
}

static void close_capture(tn_pool *pool) {
    tn__graph *graph = pool->graph;
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next)
            forget_captured_uses(piece);
    }
    tn__heap_settle(&pool->heap);
    while (graph->streams) {
        tn__pool_stream *stream = graph->streams;
        graph->streams = stream->next;
        tn__host_free(stream);
    }
    graph->is_open = 0;
    tn__capture_closed();
    graph->origin = NULL;
}

static tn_status require_open(const tn_pool *pool, const char *call) {
    if (pool->graph->is_open) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s: pool %s has no capture open", call, pool->name);
}

static tn_status reserve_memory(tn__graph *graph) {
    size_t capacity = graph->memory_capacity ? 2 * graph->memory_capacity : 4;
    tn_graph_memory *memories;
    if (graph->memory_count < graph->memory_capacity) return TN_OK;
    memories =
        tn__host_realloc(graph->memories, graph->memory_capacity, capacity, sizeof *memories);
    if (!memories) return TN_OUT_OF_HOST_MEMORY;
    graph->memories = memories;
    graph->memory_capacity = capacity;
    return TN_OK;
}

/* The stream may have left the capture already, or be gone: only a spoiled one is refused. */
static tn_status end_locked(tn_pool *pool, tn_graph_memory *out) {
    tn__graph *graph = pool->graph;
    tn__capture_status capture;
    uint64_t id = 0;
    tn_status status;
    TN_TRY(require_open(pool, "tn_graph_capture_end"));
    status = ask_capture(pool, graph->origin, &capture, &id);
    if (status != TN_OK && status != TN_INVALID_ARGUMENT) return status;
    TN_TRY(reserve_memory(graph));
    close_capture(pool);
    graph->memories[graph->memory_count++] = ++graph->last_memory;
    *out = graph->last_memory;
    return TN_OK;
}

tn_status tn_graph_capture_end(tn_pool *pool, tn_graph_memory *out) {
    tn_status status;
    TN_REQUIRE(out, "tn_graph_capture_end: out is NULL");
    TN_TRY(lock_graph(pool, "tn_graph_capture_end"));
    status = end_locked(pool, out);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* The graph never runs, so its uses of the block count for nothing; others' do. */
static void give_up_block(tn_pool *pool, tn__piece *block) {
    forget_captured_uses(block);
    if (block->uses.count > 0) block->stream = tn__uses_items(&block->uses)[0].stream;
    tn__pool_note_free(pool, block);
    tn__heap_give(&pool->heap, block, ++pool->heap.operation);
}

static void give_up_blocks(tn_pool *pool) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            tn__piece *before = piece->previous; /* stays, whatever the block becomes one with */
            if (piece->kind != TN__PIECE_LIVE || !is_of_capture(piece)) continue;
            give_up_block(pool, piece);
            piece = before ? before : region->first;
        }
    }
}

tn_status tn_graph_capture_abort(tn_pool *pool) {
    tn_status status;
    TN_TRY(lock_graph(pool, "tn_graph_capture_abort"));
    status = require_open(pool, "tn_graph_capture_abort");
    if (status == TN_OK) {
        give_up_blocks(pool);
        close_capture(pool);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- release --------------------------------------------------------------------------------- */

static size_t find_memory(const tn__graph *graph, tn_graph_memory memory) {
    size_t i = 0;
    while (i < graph->memory_count && graph->memories[i] != memory)
        i++;
    return i;
}

static tn_status for_each_mapped(tn_pool *pool, tn_status (*visit)(tn__piece *, tn__pool_stream *),
                                 tn__pool_stream *stream) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (tn__piece *piece = region->first; piece; piece = piece->next) {
            if (piece->kind == TN__PIECE_VOID) continue;
            TN_TRY(visit(piece, stream));
        }
    }
    return TN_OK;
}

static tn_status reserve_use(tn__piece *piece, tn__pool_stream *stream) {
    (void)stream;
    return tn__uses_reserve(&piece->uses, piece->uses.count + 3);
}

static tn_status add_use(tn__piece *piece, tn__pool_stream *stream) {
    tn__use use = tn__order_use_now(stream);
    tn__uses_add(&piece->uses, use.stream, use.epoch);
    if (piece->kind != TN__PIECE_LIVE && !piece->stream) piece->stream = stream;
    return TN_OK;
}

/* Which memory the graph used is not kept: the last launch is taken for a use of all of it. */
static tn_status release_locked(tn_pool *pool, tn_graph_memory memory, tn_stream handle) {
    tn__graph *graph = pool->graph;
    size_t at = find_memory(graph, memory);
    tn__pool_stream *stream = NULL;
    tn__capture_status status;
    uint64_t id = 0;
    if (at == graph->memory_count) {
        return TN_FAIL(TN_STALE_HANDLE,
                       "tn_graph_memory_release: %llu is no graph's memory in pool %s: released "
                       "before, or of another pool",
                       (unsigned long long)memory, pool->name);
    }
    TN_TRY(ask_capture(pool, handle, &status, &id));
    if (status != TN__CAPTURE_NONE) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_graph_memory_release: stream %p captures: name one that the last launch "
                       "was on",
                       (void *)handle);
    }
    TN_TRY(tn__pool_find_stream(pool, handle, &stream));
    TN_TRY(for_each_mapped(pool, reserve_use, stream));
    (void)for_each_mapped(pool, add_use, stream);
    tn__heap_settle(&pool->heap);
    graph->memories[at] = graph->memories[--graph->memory_count];
    return TN_OK;
}

tn_status tn_graph_memory_release(tn_pool *pool, tn_graph_memory memory, tn_stream stream) {
    tn_status status;
    TN_TRY(lock_graph(pool, "tn_graph_memory_release"));
    status = release_locked(pool, memory, stream);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}
