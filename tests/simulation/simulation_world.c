/* The world of a seed: devices, streams, pools, made and ended. See simulation.h. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "simulation.h"

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* ---- chance ---------------------------------------------------------------------------------- */

uint64_t world_next(world_random *random) {
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

size_t world_below(world_random *random, size_t limit) {
    return (size_t)(world_next(random) >> 11) % limit;
}

world_random world_random_of(uint64_t seed, uint64_t step) {
    world_random random = {seed * 0xD1342543DE82EF95u + 1};
    random.state ^= world_next(&random) + step * 0x9E3779B97F4A7C15u;
    (void)world_next(&random);
    return random;
}

/* ---- the simulated library ------------------------------------------------------------------- */

const char *world_library = TENURE_SIM_LIBRARY;

static void *symbol(void *library, const char *name) {
    void *address = library ? dlsym(library, name) : NULL;
    if (address) return address;
    fprintf(stderr, "the simulated driver can not be used: %s\n", dlerror());
    _Exit(2);
}

const world_controls *world_sim(void) {
    static world_controls sim;
    void *library;
    if (sim.configure) return &sim;
    library = dlopen(world_library, RTLD_NOW | RTLD_LOCAL);
    *(void **)&sim.fault = symbol(library, "tnsim_fault");
    *(void **)&sim.set_memory = symbol(library, "tnsim_set_memory");
    *(void **)&sim.stall = symbol(library, "tnsim_stall");
    *(void **)&sim.begin_capture = symbol(library, "cuStreamBeginCapture_v2");
    *(void **)&sim.end_capture = symbol(library, "cuStreamEndCapture");
    *(void **)&sim.instantiate = symbol(library, "cuGraphInstantiateWithFlags");
    *(void **)&sim.launch = symbol(library, "cuGraphLaunch");
    *(void **)&sim.exec_destroy = symbol(library, "cuGraphExecDestroy");
    *(void **)&sim.graph_destroy = symbol(library, "cuGraphDestroy");
    *(void **)&sim.race_count = symbol(library, "tnsim_race_count");
    *(void **)&sim.race_text = symbol(library, "tnsim_race_text");
    *(void **)&sim.call_count = symbol(library, "tnsim_call_count");
    *(void **)&sim.physical_bytes = symbol(library, "tnsim_physical_bytes");
    *(void **)&sim.leftovers = symbol(library, "tnsim_leftovers");
    *(void **)&sim.configure = symbol(library, "tnsim_configure");
    return &sim;
}

/* ---- streams --------------------------------------------------------------------------------- */

void world_open_stream(world *w, world_random *random, int slot) {
    world_stream *stream = &w->streams[slot];
    tn_device *device;
    tn_status status;
    *stream = (world_stream){.device = (int)world_below(random, (size_t)w->device_count)};
    stream->is_foreign = world_one_in(random, 3);
    device = w->devices[stream->device];
    status = stream->is_foreign ? tn__device_driver(device)->stream_create(tn__device_state(device),
                                                                           &stream->handle)
                                : tn_stream_create(device, &stream->handle);
    world_expect_ok(w, status, "a stream is made");
    stream->is_live = 1;
    if (!stream->is_foreign || !world_one_in(random, 3)) return;
    world_expect_ok(w, tn_stream_adopt(device, stream->handle), "a stream is adopted");
    stream->is_adopted = 1;
    w->counts->streams_adopted++;
}

static void open_default_streams(world *w) {
    const tn_stream per_thread = (tn_stream)2;
    for (int d = 0; d < w->device_count; d++)
        w->streams[WORLD_LEGACY + d] = (world_stream){.device = d, .is_live = 1};
    for (int t = 0; t < WORLD_THREADS; t++)
        w->streams[WORLD_PER_THREAD + t] = (world_stream){.handle = per_thread, .is_live = 1};
}

static int is_usable(const world *w, int slot, int device) {
    const world_stream *stream = &w->streams[slot];
    if (!stream->is_live || stream->device != device || slot == w->capturing) return 0;
    return slot < WORLD_PER_THREAD || slot - WORLD_PER_THREAD == w->thread;
}

/* Default streams are rare: the legacy one is a barrier for others. */
int world_pick_stream(const world *w, world_random *random, int device) {
    int candidates[WORLD_STREAMS];
    size_t count = 0;
    int end = world_one_in(random, 12) ? WORLD_STREAMS : WORLD_CREATED;
    for (int slot = 0; slot < end; slot++) {
        if (is_usable(w, slot, device)) candidates[count++] = slot;
    }
    return count ? candidates[world_below(random, count)] : WORLD_LEGACY + device;
}

/* A per-thread stream has no name in other threads, but the legacy stream comes after it. */
tn_stream world_name_of(const world *w, int slot) {
    int is_elsewhere = slot >= WORLD_PER_THREAD && slot - WORLD_PER_THREAD != w->thread;
    return is_elsewhere ? NULL : w->streams[slot].handle;
}

void world_make_current(const world *w, int device) {
    tn_device *of = w->devices[device];
    world_expect_ok(w, tn__device_driver(of)->make_current(tn__device_state(of)),
                    "a context is made current");
}

void world_wait(world *w, int stream, uint32_t others) {
    const world_stream *waiter = &w->streams[stream];
    for (int slot = 0; slot < WORLD_STREAMS; slot++) {
        if (!(others & UINT32_C(1) << slot)) continue;
        world_tell(w, "stream %d waits for %d", stream, slot);
        world_expect_ok(
            w, tn_stream_wait(w->devices[waiter->device], waiter->handle, world_name_of(w, slot)),
            "a stream waits for another");
    }
}

/* ---- pools ----------------------------------------------------------------------------------- */

int world_pick_pool(const world *w, world_random *random) {
    int first = (int)world_below(random, WORLD_POOLS);
    for (int i = 0; i < WORLD_POOLS; i++) {
        int slot = (first + i) % WORLD_POOLS;
        if (w->pools[slot].pool) return slot;
    }
    return -1;
}

static size_t choose(world_random *random, const size_t *values, size_t count) {
    return values[world_below(random, count)];
}

/* The caller's functions of a pool: the device's plain memory once more. */
static tn_status caller_alloc(void *context, size_t bytes, void **out) {
    tn_device *device = context;
    return tn__device_driver(device)->mem_alloc(tn__device_state(device), bytes, out);
}

static tn_status caller_free(void *context, void *address, size_t bytes) {
    tn_device *device = context;
    (void)bytes;
    return tn__device_driver(device)->mem_free(tn__device_state(device), address);
}

/* Frees a block of the pool that is short, up to three times for a request. */
static int relieve(void *context, const tn_pressure *pressure) {
    world *w = context;
    w->counts->callbacks++;
    for (size_t i = 0; i < w->oracle.count && pressure->attempt <= 3; i++) {
        int pool = w->oracle.blocks[i].pool;
        if (w->pools[pool].pool != pressure->pool) continue;
        return world_free(w, i, WORLD_LEGACY + w->pools[pool].device) == TN_OK;
    }
    return 0;
}

void world_open_pool(world *w, world_random *random, int slot) {
    static const size_t limits[] = {0, 0, 0, 101 * MIB, 301 * MIB, 64 * MIB};
    static const size_t pages[] = {0, 0, 0, 4 * MIB, 8 * MIB};
    static const size_t ranges[] = {0, 0, 64 * MIB, 256 * MIB};
    static const tn_pool_backing backings[] = {
        TN_BACKING_VMM,   TN_BACKING_VMM,   TN_BACKING_VMM,    TN_BACKING_VMM,  TN_BACKING_PLAIN,
        TN_BACKING_PLAIN, TN_BACKING_ASYNC, TN_BACKING_CALLER, TN_BACKING_HOST, TN_BACKING_PINNED};
    static const char *const names[WORLD_POOLS] = {"north", "east", "south", "west"};
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    world_pool *pool = &w->pools[slot];
    *pool = (world_pool){.device = (int)world_below(random, (size_t)w->device_count)};
    config.name = names[slot];
    config.backing = backings[world_below(random, sizeof backings / sizeof *backings)];
    config.functions = (tn_memory_functions){caller_alloc, caller_free, w->devices[pool->device]};
    config.limit_bytes = choose(random, limits, sizeof limits / sizeof *limits);
    config.page_bytes = choose(random, pages, sizeof pages / sizeof *pages);
    config.address_bytes = choose(random, ranges, sizeof ranges / sizeof *ranges);
    if (world_one_in(random, 4)) config.soft_limit_bytes = 40 * MIB;
    pool->backing = config.backing;
    pool->is_host_memory = config.backing == TN_BACKING_HOST || config.backing == TN_BACKING_PINNED;
    pool->limit_bytes = config.limit_bytes;
    world_expect_ok(w, tn_pool_create(w->devices[pool->device], &config, &pool->pool),
                    "a pool is made");
    if (world_one_in(random, 3)) {
        world_expect_ok(w, tn_pool_pressure_callback_set(pool->pool, relieve, w),
                        "a callback is set");
    }
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void open_device(world *w, int ordinal) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = world_library;
    config.ordinal = ordinal;
    world_expect_ok(w, tn_device_create(&config, &w->devices[ordinal]), "a device is opened");
    w->memory_now[ordinal] = w->memory_bytes ? w->memory_bytes : SIZE_MAX / 2;
}

static void open_devices(world *w) {
    tnsim_config sim = {.size = sizeof sim};
    sim.memory_bytes = w->memory_bytes;
    sim.device_count = w->device_count;
    sim.seed = w->seed;
    WORLD_EXPECT(w, world_sim()->configure(&sim) == 0, "the simulated driver is not configured");
    w->tolerated = 1u << TN_OUT_OF_DEVICE_MEMORY;
    w->walk_every = 509;
    w->books_every = 1;
    for (int d = 0; d < w->device_count; d++)
        open_device(w, d);
    open_default_streams(w);
    world_open_graphs(w);
}

void world_open_small(world *w, size_t memory_bytes, tn_pool_backing backing) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    w->memory_bytes = memory_bytes;
    w->device_count = 1;
    w->blocks_max = ORACLE_BLOCKS_MAX;
    open_devices(w);
    for (int slot = 0; slot < 2; slot++) {
        w->streams[slot].is_live = 1;
        world_expect_ok(w, tn_stream_create(w->devices[0], &w->streams[slot].handle),
                        "a stream is made");
    }
    config.backing = w->pools[0].backing = backing;
    world_expect_ok(w, tn_pool_create(w->devices[0], &config, &w->pools[0].pool), "a pool is made");
}

void world_open(world *w) {
    static const size_t memories[] = {0, 160 * MIB, 320 * MIB, 512 * MIB, 1 * GIB};
    static const size_t blocks[] = {12, 60, 60, 200, 600};
    world_random random = world_random_of(w->seed, UINT64_MAX);
    w->memory_bytes = choose(&random, memories, sizeof memories / sizeof *memories);
    w->blocks_max = choose(&random, blocks, sizeof blocks / sizeof *blocks);
    w->device_count = world_one_in(&random, 2) ? 1 : 1 + (int)world_below(&random, WORLD_DEVICES);
    for (int i = 0; i < WORLD_SIZES; i++)
        w->sizes[i] = world_choose_bytes(&random);
    open_devices(w);
    if (world_one_in(&random, 4)) w->books_every = 16;
    for (size_t i = 1 + world_below(&random, 8); i-- > 0;)
        world_open_stream(w, &random, (int)i);
    for (size_t i = 1 + world_below(&random, WORLD_POOLS); i-- > 0;)
        world_open_pool(w, &random, (int)i);
}

static void close_stream(world *w, int slot) {
    const world_stream *stream = &w->streams[slot];
    tn_device *device = w->devices[stream->device];
    tn_status status = TN_OK;
    if (stream->is_adopted) status = tn_stream_forget(device, stream->handle);
    world_expect_ok(w, status, "a stream is forgotten");
    status =
        stream->is_foreign
            ? tn__device_driver(device)->stream_destroy(tn__device_state(device), stream->handle)
            : tn_stream_destroy(device, stream->handle);
    world_expect_ok(w, status, "a stream ends at the end");
}

static void close_pool(world *w, int slot) {
    tn_pool_stats stats;
    if (!w->pools[slot].pool) return;
    world_check_pool(w, slot, &stats);
    w->counts->device_waits += stats.stream_waits;
    world_expect_ok(w, tn_pool_destroy(w->pools[slot].pool), "a pool ends at the end");
}

static void close_device(world *w, int ordinal) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    world_expect_ok(w, tn_device_driver_stats(w->devices[ordinal], &stats), "driver statistics");
    w->counts->pages_mapped += stats.calls[TN_CALL_MEM_MAP];
    world_expect_ok(w, tn_device_destroy(w->devices[ordinal]), "a device ends at the end");
}

void world_close(world *w) {
    char left[4096] = "";
    w->doing = "ending";
    world_release_stalls(w);
    world_expect_ok(w, tn_process_limits_set(0, 0), "limits end");
    while (w->oracle.count > 0)
        (void)world_free(w, w->oracle.count - 1,
                         WORLD_LEGACY +
                             w->pools[w->oracle.blocks[w->oracle.count - 1].pool].device);
    world_walk(w);
    for (int i = 0; i < WORLD_POOLS; i++)
        close_pool(w, i);
    world_close_graphs(w);
    for (int slot = 0; slot < WORLD_CREATED; slot++) {
        if (w->streams[slot].is_live) close_stream(w, slot);
    }
    world_check_races(w);
    for (int d = 0; d < w->device_count; d++)
        close_device(w, d);
    WORLD_EXPECT(w, world_sim()->leftovers(left, sizeof left) == 0, "left over: %s", left);
    WORLD_EXPECT(w, tn__host_live_blocks() == 0, "%ld blocks of host memory are left",
                 tn__host_live_blocks());
}
