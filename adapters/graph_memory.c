/* Memory of a framework's captured graphs: see graph_memory.h. */
#include "adapter_device.h"
#include "driver.h"
#include "host_alloc.h"

/* Held in waits for devices, which a begin waits for; so without a device's mutex, which frees
 * take. */
static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static atomic_size_t open_routes; /* of all devices, that are not doubted; and begins under way */

int tn__captures_lock(void) {
    pthread_mutex_lock(&open_mutex);
    return atomic_load(&open_routes) == 0;
}

void tn__captures_unlock(void) { pthread_mutex_unlock(&open_mutex); }

static void note_begin(void) {
    pthread_mutex_lock(&open_mutex);
    atomic_fetch_add(&open_routes, 1);
    pthread_mutex_unlock(&open_mutex);
}

void tn__graph_memories_init(tn__graph_memories *captures) {
    pthread_mutex_init(&captures->mutex, NULL);
}

void tn__graph_memories_deinit(tn__graph_memories *captures) {
    pthread_mutex_destroy(&captures->mutex);
}

/* ---- what the driver says of a capture ------------------------------------------------------- */

/* The capture that the stream is in; 0 if it is in none. */
static tn_status ask_capture(const tn__adapter *adapter, tn_stream stream, uint64_t *id) {
    const tn__driver *driver = tn__device_driver(adapter->device);
    tn__capture_status status;
    TN_TRY(driver->stream_capture(tn__device_state(adapter->device), stream, &status, id));
    if (status == TN__CAPTURE_NONE) *id = 0;
    return TN_OK;
}

/* The stream may be gone: then the capture is over, too. */
static int is_over(const tn__adapter *adapter, tn_stream stream, uint64_t capture_id) {
    uint64_t id = 0;
    int is_known;
    tn__error_scope_begin();
    is_known = ask_capture(adapter, stream, &id) == TN_OK;
    (void)tn__error_scope_end(TN_OK);
    return !is_known || id != capture_id;
}

/* ---- memories -------------------------------------------------------------------------------- */

static tn__graph_memory *find_memory(const tn__graph_memories *captures, const uint64_t key[2]) {
    tn__graph_memory *memory = captures->memories;
    while (memory && (memory->key[0] != key[0] || memory->key[1] != key[1]))
        memory = memory->next;
    return memory;
}

static tn__graph_memory *find_memory_of(const tn__graph_memories *captures, const tn_pool *pool) {
    tn__graph_memory *memory = captures->memories;
    while (memory && memory->pool != pool)
        memory = memory->next;
    return memory;
}

static tn__graph_memory *add_memory(tn__graph_memories *captures, const uint64_t key[2]) {
    tn__graph_memory *memory = tn__host_alloc(1, sizeof *memory);
    if (!memory) return NULL;
    memory->key[0] = key[0];
    memory->key[1] = key[1];
    memory->next = captures->memories;
    captures->memories = memory;
    atomic_fetch_add(&captures->memory_count, 1);
    return memory;
}

static tn_status reserve_graph(tn__graph_memory *memory) {
    size_t capacity = memory->graph_capacity ? 2 * memory->graph_capacity : 4;
    tn_graph_memory *graphs;
    if (memory->graph_count < memory->graph_capacity) return TN_OK;
    graphs = tn__host_realloc(memory->graphs, memory->graph_capacity, capacity, sizeof *graphs);
    if (!graphs) return TN_OUT_OF_HOST_MEMORY;
    memory->graphs = graphs;
    memory->graph_capacity = capacity;
    return TN_OK;
}

static tn_status close_capture(tn__graph_memory *memory) {
    if (!memory->is_open) return TN_OK;
    TN_TRY(reserve_graph(memory));
    TN_TRY(tn_graph_capture_end(memory->pool, &memory->graphs[memory->graph_count]));
    memory->graph_count++;
    memory->is_open = 0;
    return TN_OK;
}

static tn_status open_capture(tn__adapter *adapter, tn__graph_memory *memory, tn_stream stream,
                              uint64_t capture_id) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "graphs";
    if (memory->is_open && memory->capture_id == capture_id) return TN_OK;
    if (memory->is_open && is_over(adapter, memory->stream, memory->capture_id)) {
        TN_TRY(close_capture(memory));
    }
    if (!memory->pool) {
        TN_TRY(tn_graph_pool_create(adapter->device, &config, &memory->pool));
        tn__adapter_befriend(adapter, memory->pool);
    }
    TN_TRY(tn_graph_capture_begin(memory->pool, stream));
    memory->is_open = 1;
    memory->stream = stream;
    memory->capture_id = capture_id;
    return TN_OK;
}

/* The graphs are not launched any more, and no device has work. */
static tn_status end_pool(tn__graph_memory *memory) {
    TN_TRY(close_capture(memory));
    while (memory->graph_count > 0) {
        tn_graph_memory graph = memory->graphs[memory->graph_count - 1];
        TN_TRY(tn_graph_memory_release(memory->pool, graph, NULL));
        memory->graph_count--;
    }
    return tn_pool_destroy(memory->pool);
}

static void remove_memory(tn__graph_memories *captures, tn__graph_memory *memory) {
    tn__graph_memory **at = &captures->memories;
    while (*at != memory)
        at = &(*at)->next;
    *at = memory->next;
    atomic_fetch_sub(&captures->memory_count, 1);
    tn__host_free(memory->graphs);
    tn__host_free(memory);
}

/* ---- routes ---------------------------------------------------------------------------------- */

static void remove_route(tn__graph_memories *captures, tn__graph_route *route) {
    tn__graph_route **at = &captures->routes;
    while (*at != route)
        at = &(*at)->next;
    *at = route->next;
    if (route->filter.end) route->filter.end(route->filter.context);
    atomic_fetch_sub(&captures->route_count, 1);
    if (!route->is_doubted) atomic_fetch_sub(&open_routes, 1);
    tn__host_free(route);
}

static int is_mine(const tn__graph_route *route) {
    return pthread_equal(route->thread, pthread_self());
}

static void drop_route(tn__graph_memories *captures, tn__graph_route *route) {
    route->memory->users--; /* no release will come */
    remove_route(captures, route);
}

void tn__graph_memories_leave(tn__adapter *adapter) {
    tn__graph_memories *captures = &adapter->captures;
    tn__graph_route *next;
    if (atomic_load(&captures->route_count) == 0) return;
    pthread_mutex_lock(&captures->mutex);
    for (tn__graph_route *route = captures->routes; route; route = next) {
        next = route->next;
        if (!is_mine(route)) continue;
        if (route->is_bound && !is_over(adapter, route->stream, route->capture_id)) continue;
        drop_route(captures, route);
    }
    pthread_mutex_unlock(&captures->mutex);
}

/* Captures of this thread that failed: their ends would have come before this call. */
static void drop_failed(tn__adapter *adapter) {
    tn__graph_route *route = adapter->captures.routes;
    while (route) {
        tn__graph_route *next = route->next;
        if (route->is_bound && is_mine(route) &&
            is_over(adapter, route->stream, route->capture_id)) {
            drop_route(&adapter->captures, route);
        }
        route = next;
    }
}

static void drop_doubted(tn__graph_memories *captures) {
    tn__graph_route *route = captures->routes;
    while (route) {
        tn__graph_route *next = route->next;
        if (route->is_doubted && is_mine(route)) drop_route(captures, route);
        route = next;
    }
}

void tn__graph_memories_doubt(tn__adapter *adapter) {
    tn__graph_memories *captures = &adapter->captures;
    if (atomic_load(&captures->route_count) == 0) return;
    pthread_mutex_lock(&captures->mutex);
    drop_failed(adapter);
    for (tn__graph_route *route = captures->routes; route; route = route->next) {
        if (route->is_bound || route->is_doubted || !is_mine(route)) continue;
        route->is_doubted = 1;
        atomic_fetch_sub(&open_routes, 1);
    }
    pthread_mutex_unlock(&captures->mutex);
}

/* 1 if the route takes an allocation of the stream, which is in this capture. */
static int takes(tn__graph_route *route, tn_stream stream, uint64_t capture_id) {
    if (route->is_bound) return route->capture_id == capture_id;
    if (!route->filter.accepts(route->filter.context, stream)) return 0;
    if (route->is_doubted) atomic_fetch_add(&open_routes, 1); /* its capture has begun already */
    route->is_doubted = 0;
    route->is_bound = 1;
    route->stream = stream;
    route->capture_id = capture_id;
    return 1;
}

static tn__graph_route *find_route(tn__adapter *adapter, tn_stream stream, uint64_t capture_id) {
    tn__graph_route *route = adapter->captures.routes;
    while (route && !takes(route, stream, capture_id))
        route = route->next;
    return route;
}

/* This thread's own, where it has one: another may be about to capture for the same pool. */
static tn__graph_route *last_route(const tn__graph_memories *captures, const uint64_t key[2]) {
    tn__graph_route *last = NULL;
    for (tn__graph_route *route = captures->routes; route; route = route->next) {
        if (route->memory->key[0] != key[0] || route->memory->key[1] != key[1]) continue;
        if (!last || is_mine(route) || !is_mine(last)) last = route;
    }
    return last;
}

static tn_status begin_locked(tn__adapter *adapter, const uint64_t key[2],
                              const tn__stream_filter *filter) {
    tn__graph_memories *captures = &adapter->captures;
    tn__graph_route **at = &captures->routes;
    tn__graph_memory *memory;
    tn__graph_route *route;
    drop_failed(adapter);
    drop_doubted(captures);
    route = tn__host_alloc(1, sizeof *route);
    if (!route) return TN_OUT_OF_HOST_MEMORY;
    memory = find_memory(captures, key);
    if (!memory) memory = add_memory(captures, key);
    if (!memory) {
        tn__host_free(route);
        return TN_OUT_OF_HOST_MEMORY;
    }
    memory->users++;
    memory->unused_since = 0;
    route->memory = memory;
    route->filter = *filter;
    route->thread = pthread_self();
    while (*at)
        at = &(*at)->next;
    *at = route;
    atomic_fetch_add(&captures->route_count, 1);
    return TN_OK;
}

tn_status tn__graph_memory_begin(tn__adapter *adapter, const uint64_t key[2],
                                 const tn__stream_filter *filter) {
    tn_status status;
    TN_TRY(tn__adapters_watch_thread());
    tn__graph_memories_collect(adapter);
    note_begin();
    pthread_mutex_lock(&adapter->captures.mutex);
    status = begin_locked(adapter, key, filter);
    pthread_mutex_unlock(&adapter->captures.mutex);
    if (status != TN_OK) atomic_fetch_sub(&open_routes, 1);
    return status;
}

static tn_status end_locked(tn__adapter *adapter, const uint64_t key[2]) {
    tn__graph_route *route = last_route(&adapter->captures, key);
    TN_REQUIRE(route, "no allocations go to graph pool (%llu, %llu): end without a begin",
               (unsigned long long)key[0], (unsigned long long)key[1]);
    if (route->is_bound && route->capture_id == route->memory->capture_id) {
        tn__error_scope_begin(); /* one that can not be closed now is when the pool is used next */
        (void)close_capture(route->memory);
        (void)tn__error_scope_end(TN_OK);
    }
    remove_route(&adapter->captures, route);
    return TN_OK;
}

tn_status tn__graph_memory_end(tn__adapter *adapter, const uint64_t key[2]) {
    tn_status status;
    pthread_mutex_lock(&adapter->captures.mutex);
    status = end_locked(adapter, key);
    pthread_mutex_unlock(&adapter->captures.mutex);
    tn__late_frees_flush(adapter, 0);
    return status;
}

tn_status tn__graph_memory_release(tn__adapter *adapter, const uint64_t key[2]) {
    tn__graph_memory *memory;
    int had_user;
    pthread_mutex_lock(&adapter->captures.mutex);
    memory = find_memory(&adapter->captures, key);
    had_user = memory && memory->users > 0;
    if (had_user) memory->users--;
    pthread_mutex_unlock(&adapter->captures.mutex);
    TN_REQUIRE(had_user, "graph pool (%llu, %llu) has no user: released before, or never begun",
               (unsigned long long)key[0], (unsigned long long)key[1]);
    tn__graph_memories_collect(adapter);
    return TN_OK;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static tn_status alloc_locked(tn__adapter *adapter, size_t bytes, tn_stream stream,
                              const char *owner, int *is_routed, void **out) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn__graph_route *route;
    uint64_t capture_id = 0;
    drop_failed(adapter);
    TN_TRY(ask_capture(adapter, stream, &capture_id));
    route = capture_id ? find_route(adapter, stream, capture_id) : NULL;
    *is_routed = route != NULL;
    if (!route) return TN_OK;
    options.owner = owner;
    TN_TRY(open_capture(adapter, route->memory, stream, capture_id));
    TN_TRY(tn_alloc(route->memory->pool, bytes, stream, &options, out));
    route->memory->live_blocks++;
    return TN_OK;
}

tn_status tn__graph_memory_alloc(tn__adapter *adapter, size_t bytes, tn_stream stream,
                                 const char *owner, int *is_routed, void **out) {
    tn_status status;
    *is_routed = 0;
    if (atomic_load(&adapter->captures.route_count) == 0) return TN_OK;
    pthread_mutex_lock(&adapter->captures.mutex);
    status = alloc_locked(adapter, bytes, stream, owner, is_routed, out);
    pthread_mutex_unlock(&adapter->captures.mutex);
    return status;
}

/* A block of a capture that failed is free of it once that is closed. */
static tn_status free_of_graph(tn__adapter *adapter, tn__graph_memory *memory, void *block,
                               tn_stream stream) {
    if (memory->is_open && is_over(adapter, memory->stream, memory->capture_id)) {
        TN_TRY(close_capture(memory));
    }
    TN_TRY(tn_free(block, stream));
    memory->live_blocks--;
    return TN_OK;
}

tn_status tn__graph_memory_free(tn__adapter *adapter, void *block, tn_stream stream) {
    tn__graph_memories *captures = &adapter->captures;
    tn__graph_memory *memory;
    tn_pool *pool = NULL;
    int is_last = 0;
    tn_status status = TN_OK;
    if (atomic_load(&captures->memory_count) == 0) return tn_free(block, stream);
    TN_TRY(tn_block_info(block, NULL, &pool));
    pthread_mutex_lock(&captures->mutex);
    memory = find_memory_of(captures, pool);
    if (memory) {
        status = free_of_graph(adapter, memory, block, stream);
        is_last = memory->users == 0 && memory->live_blocks == 0;
    }
    pthread_mutex_unlock(&captures->mutex);
    if (!memory) return tn_free(block, stream);
    if (is_last) tn__graph_memories_collect(adapter);
    return status;
}

/* ---- the end --------------------------------------------------------------------------------- */

/* The number of the collection that begins; 0: there is nothing to collect. */
static uint64_t begin_collection(tn__graph_memories *captures) {
    uint64_t number = 0;
    pthread_mutex_lock(&captures->mutex);
    for (tn__graph_memory *memory = captures->memories; memory; memory = memory->next) {
        if (memory->users > 0 || memory->live_blocks > 0) continue;
        if (!number) number = ++captures->collections;
        if (!memory->unused_since) memory->unused_since = number;
    }
    pthread_mutex_unlock(&captures->mutex);
    return number;
}

static tn_status end_unused_locked(tn__graph_memories *captures, uint64_t number) {
    tn__graph_memory *next;
    for (tn__graph_memory *memory = captures->memories; memory; memory = next) {
        next = memory->next;
        if (!memory->unused_since || memory->unused_since > number) continue;
        if (memory->pool) TN_TRY(end_pool(memory));
        remove_memory(captures, memory);
    }
    return TN_OK;
}

static tn_status collect(tn__graph_memories *captures) {
    uint64_t number = begin_collection(captures);
    int is_idle = 0;
    tn_status status;
    if (number) TN_TRY(tn__adapters_wait_idle(&is_idle));
    if (!is_idle) return TN_OK;
    pthread_mutex_lock(&captures->mutex);
    status = end_unused_locked(captures, number);
    pthread_mutex_unlock(&captures->mutex);
    return status;
}

void tn__graph_memories_collect(tn__adapter *adapter) {
    if (atomic_load(&adapter->captures.memory_count) == 0) return;
    tn__error_scope_begin(); /* what can not be done now is done by a later call */
    (void)collect(&adapter->captures);
    (void)tn__error_scope_end(TN_OK);
}

static tn_status close_locked(tn__graph_memories *captures) {
    if (captures->routes) {
        return TN_FAIL(TN_IN_USE, "a framework's allocations still go to a graph pool: end first");
    }
    for (tn__graph_memory *memory = captures->memories; memory; memory = memory->next) {
        if (memory->live_blocks > 0) {
            return TN_FAIL(TN_LEAK, "%zu blocks of graph pool (%llu, %llu) are live",
                           memory->live_blocks, (unsigned long long)memory->key[0],
                           (unsigned long long)memory->key[1]);
        }
        memory->users = 0;
    }
    return TN_OK;
}

tn_status tn__graph_memories_close(tn__adapter *adapter) {
    tn_status status;
    pthread_mutex_lock(&adapter->captures.mutex);
    drop_failed(adapter);
    drop_doubted(&adapter->captures);
    status = close_locked(&adapter->captures);
    pthread_mutex_unlock(&adapter->captures.mutex);
    return status == TN_OK ? collect(&adapter->captures) : status;
}

/* ---- all pools ------------------------------------------------------------------------------- */

static tn_status each_locked(const tn__graph_memories *captures, tn__pool_visit visit,
                             void *context) {
    for (tn__graph_memory *memory = captures->memories; memory; memory = memory->next) {
        if (memory->pool) TN_TRY(visit(memory->pool, context));
    }
    return TN_OK;
}

tn_status tn__graph_memories_each(tn__adapter *adapter, tn__pool_visit visit, void *context) {
    tn_status status;
    if (atomic_load(&adapter->captures.memory_count) == 0) return TN_OK;
    pthread_mutex_lock(&adapter->captures.mutex);
    status = each_locked(&adapter->captures, visit, context);
    pthread_mutex_unlock(&adapter->captures.mutex);
    return status;
}
