/* Streams that capture, in one step each: what ordinary pools do meanwhile, and graph pools, whose
 * graphs are launched there and then and again later. See simulation.h.
 *
 * The program keeps the rules: before a stream captures, another one takes over what has to come
 * after its work; nothing waits for it until the capture has ended; launches of one pool's graphs
 * come one after the other.
 */
#include "driver.h"
#include "simulation.h"

#define MIB ((size_t)1 << 20)

enum { CAPTURED_BLOCKS = 8, CAPTURE_CALLS = 40 };

/* ---- the stream's capture -------------------------------------------------------------------- */

static int pick_capturing(const world *w, world_random *random, int device) {
    int slot = (int)world_below(random, WORLD_CREATED);
    const world_stream *stream = &w->streams[slot];
    return stream->is_live && !stream->is_stalled && stream->device == device ? slot : -1;
}

/* A pool that is short must not wait for the device while a stream captures: it asks those that it
 * knows. */
static void introduce(world *w, int pool, int slot) {
    if (!w->pools[pool].pool || w->pools[pool].device != w->streams[slot].device) return;
    if (w->oracle.count == ORACLE_BLOCKS_MAX) return;
    if (world_alloc(w, pool, 512, 0, slot) != TN_OK) return;
    world_expect_ok(w, world_free(w, w->oracle.count - 1, slot), "a block is freed");
}

static void begin_capture(world *w, world_random *random, int slot) {
    const world_stream *stream = &w->streams[slot];
    int heir = world_pick_stream(w, random, stream->device);
    if (heir == slot) heir = WORLD_LEGACY + stream->device;
    world_wait(w, heir, UINT32_C(1) << slot);
    oracle_stream_moved(&w->oracle, slot, heir);
    for (int pool = 0; pool < WORLD_POOLS; pool++)
        introduce(w, pool, slot);
    world_make_current(w, stream->device);
    WORLD_EXPECT(w, world_sim()->begin_capture(stream->handle, (int)world_below(random, 3)) == 0,
                 "a stream can not capture");
    world_tell(w, "stream %d captures", slot);
    w->capturing = slot;
}

/* Whatever was refused meanwhile, the capture is still good. */
static void end_capture(world *w, int slot, void **graph) {
    int code;
    world_make_current(w, w->streams[slot].device);
    code = world_sim()->end_capture(w->streams[slot].handle, graph);
    world_tell(w, "stream %d captures no more: %d", slot, code);
    WORLD_EXPECT(w, code == 0, "the capture was spoiled: %d", code);
    w->capturing = ORACLE_NO_STREAM;
    w->counts->captures++;
}

static void destroy_graph(const world *w, void *graph, void *exec) {
    world_make_current(w, 0);
    WORLD_EXPECT(w, !exec || world_sim()->exec_destroy(exec) == 0, "a graph can not be ended");
    WORLD_EXPECT(w, world_sim()->graph_destroy(graph) == 0, "a graph can not be destroyed");
}

/* ---- ordinary pools meanwhile ---------------------------------------------------------------- */

static void call_meanwhile(world *w, world_random *random, int slot) {
    int pool = world_pick_pool(w, random);
    size_t index;
    int stream;
    if (pool < 0) return;
    if (world_one_in(random, 3)) {
        (void)world_alloc(w, pool, world_choose_bytes(random), 0,
                          w->pools[pool].device == w->streams[slot].device &&
                                  world_one_in(random, 2)
                              ? slot
                              : world_pick_stream(w, random, w->pools[pool].device));
        return;
    }
    if (w->oracle.count == 0) return;
    index = world_below(random, w->oracle.count);
    stream = w->oracle.blocks[index].own;
    if (stream != slot)
        stream = world_pick_stream(w, random, w->pools[w->oracle.blocks[index].pool].device);
    (void)world_free(w, index, stream);
}

/* Nothing that the capture was given is used in it: the graph would have to keep it. */
static void capture_beside_pools(world *w, world_random *random, int slot) {
    void *graph = NULL;
    begin_capture(w, random, slot);
    for (size_t i = world_below(random, CAPTURE_CALLS); i-- > 0 && w->oracle.count < w->blocks_max;)
        call_meanwhile(w, random, slot);
    end_capture(w, slot, &graph);
    destroy_graph(w, graph, NULL);
}

/* ---- graph pools ----------------------------------------------------------------------------- */

typedef struct captured {
    void *blocks[CAPTURED_BLOCKS];
    size_t bytes[CAPTURED_BLOCKS];
    int count;
} captured;

static void launch_in_capture(world *w, world_random *random, int slot, const captured *c, int at) {
    tn_device *device = w->devices[w->streams[slot].device];
    tn__range range = {c->blocks[at], c->bytes[at], 1};
    world_expect_ok(w,
                    tn__device_driver(device)->ghost_launch(
                        tn__device_state(device), "captured", &range, 1,
                        (double)(1 + world_below(random, 20)), w->streams[slot].handle),
                    "a kernel is captured");
}

static void free_captured(world *w, captured *c, int at, tn_stream stream) {
    world_expect_ok(w, tn_free(c->blocks[at], stream), "a captured block is freed");
    c->count--;
    c->blocks[at] = c->blocks[c->count];
    c->bytes[at] = c->bytes[c->count];
}

static void expect_apart(const world *w, const captured *c, const char *block, size_t bytes) {
    int inside = oracle_find(&w->oracle, (uintptr_t)block);
    WORLD_EXPECT(w, inside < 0, "a captured block lies in another pool's block");
    for (int i = 0; i < c->count; i++) {
        const char *other = c->blocks[i];
        WORLD_EXPECT(w, block + bytes <= other || other + c->bytes[i] <= block,
                     "captured blocks overlap");
    }
}

static void alloc_captured(world *w, world_random *random, int slot, captured *c) {
    size_t bytes = world_choose_bytes(random);
    void *block = NULL;
    tn_status status = tn_alloc(w->graphs.pool, bytes, w->streams[slot].handle, NULL, &block);
    world_tell(w, "%s = tn_alloc(graph pool, %zu) = %p", tn_status_name(status), bytes, block);
    if (status == TN_OUT_OF_DEVICE_MEMORY) return;
    world_expect_ok(w, status, "a captured block is allocated");
    expect_apart(w, c, block, bytes);
    c->blocks[c->count] = block;
    c->bytes[c->count++] = bytes;
}

static void capture_calls(world *w, world_random *random, int slot, captured *c) {
    for (size_t i = 1 + world_below(random, CAPTURE_CALLS); i-- > 0;) {
        int at = c->count ? (int)world_below(random, (size_t)c->count) : -1;
        if (at < 0 || (c->count < CAPTURED_BLOCKS && world_one_in(random, 3)))
            alloc_captured(w, random, slot, c);
        else if (world_one_in(random, 3))
            free_captured(w, c, at, w->streams[slot].handle);
        else
            launch_in_capture(w, random, slot, c, at);
    }
}

/* After the launch before it, wherever that was. */
static void launch_graph(world *w, int at, int stream) {
    world_graphs *g = &w->graphs;
    if (g->last_stream != ORACLE_NO_STREAM && g->last_stream != stream)
        world_wait(w, stream, UINT32_C(1) << g->last_stream);
    world_tell(w, "graph %d is launched on stream %d", at, stream);
    world_make_current(w, 0);
    WORLD_EXPECT(w, world_sim()->launch(g->execs[at], w->streams[stream].handle) == 0,
                 "a graph can not be launched");
    g->last_stream = stream;
    w->counts->launches++;
}

static void release_graph(world *w, int at) {
    world_graphs *g = &w->graphs;
    tn_stream stream = g->last_stream == ORACLE_NO_STREAM ? NULL : world_name_of(w, g->last_stream);
    destroy_graph(w, g->graphs[at], g->execs[at]);
    world_expect_ok(w, tn_graph_memory_release(g->pool, g->memories[at], stream),
                    "a graph's memory is released");
    g->count--;
    g->graphs[at] = g->graphs[g->count];
    g->execs[at] = g->execs[g->count];
    g->memories[at] = g->memories[g->count];
}

static void abort_capture(world *w, int slot) {
    void *graph = NULL;
    world_expect_ok(w, tn_graph_capture_abort(w->graphs.pool), "a capture is given up");
    end_capture(w, slot, &graph);
    destroy_graph(w, graph, NULL);
    w->counts->captures_aborted++;
}

/* Blocks that are live at the end are freed behind the first launch, outside. */
static void keep_graph(world *w, int slot, captured *c) {
    world_graphs *g = &w->graphs;
    int at = g->count;
    world_expect_ok(w, tn_graph_capture_end(g->pool, &g->memories[at]), "a capture is closed");
    end_capture(w, slot, &g->graphs[at]);
    WORLD_EXPECT(w, world_sim()->instantiate(&g->execs[at], g->graphs[at], 0) == 0,
                 "a graph can not be instantiated");
    g->count++;
    launch_graph(w, at, slot);
    while (c->count > 0)
        free_captured(w, c, 0, w->streams[slot].handle);
}

static void capture_in_graph_pool(world *w, world_random *random, int slot) {
    captured c = {.count = 0};
    begin_capture(w, random, slot);
    world_expect_ok(w, tn_graph_capture_begin(w->graphs.pool, w->streams[slot].handle),
                    "a capture is opened");
    capture_calls(w, random, slot, &c);
    if (world_one_in(random, 4))
        abort_capture(w, slot);
    else
        keep_graph(w, slot, &c);
}

/* ---- the step -------------------------------------------------------------------------------- */

void world_open_graphs(world *w) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "graphs";
    w->graphs.last_stream = ORACLE_NO_STREAM;
    w->capturing = ORACLE_NO_STREAM;
    world_expect_ok(w, tn_graph_pool_create(w->devices[0], &config, &w->graphs.pool),
                    "a graph pool is made");
}

void world_close_graphs(world *w) {
    while (w->graphs.count > 0)
        release_graph(w, w->graphs.count - 1);
    world_expect_ok(w, tn_pool_destroy(w->graphs.pool), "a graph pool ends");
}

/* The stream ends: what comes after it comes after the heir. */
void world_graphs_moved(world *w, int from, int to) {
    if (w->graphs.last_stream == from) w->graphs.last_stream = to;
}

void world_capture(world *w, world_random *random) {
    int slot = pick_capturing(w, random, 0);
    w->doing = "a capture";
    if (slot < 0 || w->stalled_count) return;
    if (w->graphs.count == WORLD_GRAPHS || (w->graphs.count && world_one_in(random, 6))) {
        release_graph(w, (int)world_below(random, (size_t)w->graphs.count));
    } else if (w->graphs.count && world_one_in(random, 2)) {
        launch_graph(w, (int)world_below(random, (size_t)w->graphs.count), slot);
    } else if (world_one_in(random, 2)) {
        capture_beside_pools(w, random, slot);
    } else {
        capture_in_graph_pool(w, random, slot);
    }
    world_expect_ok(w, tn_pool_check(w->graphs.pool), "tn_pool_check of the graph pool");
}
