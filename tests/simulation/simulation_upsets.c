/* What goes wrong in a program and around it: driver calls and host allocations that fail, streams
 * that stall or end, memory that shrinks, bad calls, pools that end. See simulation.h. */
#include "driver.h"
#include "host_alloc.h"
#include "simulation.h"

#define MIB ((size_t)1 << 20)

#define BIT(status) (1u << (status))
/* What calls may give while work does not go on: device waits without end can be told, not had. */
#define WHILE_STALLED (BIT(TN_INVALID_STATE) | BIT(TN_DRIVER_ERROR))

static void tolerate(world *w, unsigned more) {
    w->tolerated = BIT(TN_OUT_OF_DEVICE_MEMORY) | more;
    if (w->stalled_count) w->tolerated |= WHILE_STALLED;
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* One call on a pool; the status it gave. */
static tn_status call_once(world *w, world_random *random, int slot) {
    size_t index = w->oracle.count ? world_below(random, w->oracle.count) : 0;
    int stream = world_pick_stream(w, random, w->pools[slot].device);
    size_t choice = world_below(random, 8);
    size_t bytes = world_choose_bytes(random);
    if (choice < 5 && w->oracle.count < w->blocks_max)
        return world_alloc(w, slot, bytes, 0, stream);
    if (choice == 5 || w->oracle.count == 0) return world_trim(w, slot, 0);
    stream = world_pick_stream(w, random, w->pools[w->oracle.blocks[index].pool].device);
    return choice == 6 ? world_free(w, index, stream) : world_record_use(w, index, stream);
}

/* A driver that is out of memory where no memory is asked for is no shortage of the pool's. */
static void recount_shortage(world *w, int slot, uint64_t before) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    world_pool *pool = &w->pools[slot];
    world_expect_ok(w, tn_pool_stats_get(pool->pool, &stats), "tn_pool_stats_get");
    if (stats.out_of_memory == before) pool->out_of_memory = before;
}

static void driver_fault(world *w, world_random *random) {
    static const char *const calls[] = {NULL,           NULL,
                                        NULL,           "cuMemCreate",
                                        "cuMemMap",     "cuMemSetAccess",
                                        "cuMemUnmap",   "cuEventRecord",
                                        "cuEventQuery", "cuStreamWaitEvent",
                                        "cuStreamGetId"};
    const int out_of_memory = 2;
    const int unknown = 999;
    const char *call = calls[world_below(random, sizeof calls / sizeof *calls)];
    int slot = world_pick_pool(w, random);
    int code = world_one_in(random, 2) ? unknown : out_of_memory;
    long nth = 1 + (long)world_below(random, call ? 3 : 25);
    uint64_t before;
    if (slot < 0) return;
    before = w->pools[slot].out_of_memory;
    w->has_lost_count = 1;
    w->doing = "a call whose driver call fails";
    tolerate(w, BIT(TN_DRIVER_ERROR) | BIT(TN_OUT_OF_ADDRESS_SPACE));
    (void)world_sim()->fault(call, nth, world_one_in(random, 3), code);
    if (call_once(w, random, slot) != TN_OK) w->counts->driver_faults++;
    (void)world_sim()->fault(call, 0, 0, 0);
    recount_shortage(w, slot, before);
}

/* Not while a stream stalls: a segment that was just made can then not be given back either. */
static void host_fault(world *w, world_random *random) {
    int slot = world_pick_pool(w, random);
    if (slot < 0 || w->stalled_count) return;
    w->doing = "a call whose host allocation fails";
    tolerate(w, BIT(TN_OUT_OF_HOST_MEMORY));
    tn__host_alloc_fault(1 + (long)world_below(random, 4), world_one_in(random, 3));
    if (call_once(w, random, slot) == TN_OUT_OF_HOST_MEMORY) w->counts->host_faults++;
    tn__host_alloc_fault(0, 0);
}

/* ---- streams --------------------------------------------------------------------------------- */

static void set_stalled(world *w, int slot, int is_stalled) {
    world_stream *stream = &w->streams[slot];
    world_make_current(w, stream->device);
    WORLD_EXPECT(w, world_sim()->stall(stream->handle, is_stalled) == 0, "a stream can not stall");
    world_tell(w, "stream %d stalls: %d", slot, is_stalled);
    stream->is_stalled = is_stalled;
    w->stalled_count += is_stalled ? 1 : -1;
}

void world_release_stalls(world *w) {
    for (int slot = 0; slot < WORLD_CREATED; slot++) {
        if (w->streams[slot].is_stalled) set_stalled(w, slot, 0);
    }
    tolerate(w, 0);
}

static int pick_created(const world *w, world_random *random) {
    int slot = (int)world_below(random, WORLD_CREATED);
    return w->streams[slot].is_live ? slot : -1;
}

static void stall(world *w, world_random *random) {
    int slot = pick_created(w, random);
    w->doing = "a stream stalls";
    if (w->stalled_count) {
        world_release_stalls(w);
    } else if (slot >= 0) {
        set_stalled(w, slot, 1);
        w->counts->stalls++;
    }
}

/* A stream of another library ends without a word, its work may be under way. What the program
 * still does with blocks that were used there it orders behind another stream that waits. */
static tn_status end_foreign(world *w, world_random *random, int slot) {
    const world_stream *stream = &w->streams[slot];
    tn_device *device = w->devices[stream->device];
    int heir = world_pick_stream(w, random, stream->device);
    if (heir == slot) heir = WORLD_LEGACY + stream->device;
    world_wait(w, heir, UINT32_C(1) << slot);
    oracle_stream_moved(&w->oracle, slot, heir);
    world_graphs_moved(w, slot, heir);
    w->counts->foreign_streams_ended++;
    return tn__device_driver(device)->stream_destroy(tn__device_state(device), stream->handle);
}

/* Waits for its work, so that it can fail while a stream stalls. */
static int forget_adopted(world *w, int slot) {
    world_stream *stream = &w->streams[slot];
    tn_status status = tn_stream_forget(w->devices[stream->device], stream->handle);
    if (status != TN_OK && w->stalled_count) return 0;
    world_expect_ok(w, status, "a stream is forgotten");
    oracle_stream_done(&w->oracle, slot);
    stream->is_adopted = 0;
    return 1;
}

static void end_stream(world *w, world_random *random) {
    int slot = pick_created(w, random);
    tn_status status;
    w->doing = "a stream ends";
    if (slot < 0 || w->streams[slot].is_stalled) return;
    if (w->streams[slot].is_adopted && !forget_adopted(w, slot)) return;
    if (w->streams[slot].is_foreign) {
        status = end_foreign(w, random, slot);
    } else {
        const world_stream *stream = &w->streams[slot];
        status = tn_stream_destroy(w->devices[stream->device], stream->handle);
        if (status != TN_OK && w->stalled_count) return;
        if (status == TN_OK) {
            oracle_stream_done(&w->oracle, slot);
            world_graphs_moved(w, slot, ORACLE_NO_STREAM);
        }
        w->counts->streams_ended++;
    }
    world_tell(w, "stream %d ends", slot);
    world_expect_ok(w, status, "a stream ends");
    oracle_stream_ended(&w->oracle, slot);
    world_open_stream(w, random, slot);
}

/* Its per-thread default stream ends with it. What the program still does with blocks that were
 * used there it orders behind the legacy stream. */
static void end_thread(world *w) {
    int slot = WORLD_PER_THREAD + w->thread;
    w->doing = "a thread ends";
    world_wait(w, WORLD_LEGACY, UINT32_C(1) << slot);
    oracle_stream_moved(&w->oracle, slot, WORLD_LEGACY);
    world_graphs_moved(w, slot, WORLD_LEGACY);
    oracle_stream_ended(&w->oracle, slot);
    w->ends_thread = 1;
}

/* ---- memory and pools ------------------------------------------------------------------------ */

/* Below what is held already, too: nothing grows then. */
static void limit_process(world *w, world_random *random) {
    size_t hard = w->is_limited ? 0 : 32 * MIB + world_below(random, 600 * MIB);
    w->doing = "the process is limited, or not";
    world_expect_ok(w, tn_process_limits_set(hard, hard / 2), "limits are set");
    w->is_limited = hard != 0;
    w->counts->process_limits++;
}

static void change_memory(world *w, world_random *random) {
    int device = (int)world_below(random, (size_t)w->device_count);
    size_t bytes = w->memory_bytes;
    if (bytes == 0) return;
    if (world_one_in(random, 2)) bytes = bytes / 4 + world_below(random, bytes / 4 * 3);
    w->doing = "memory shrinks or grows";
    WORLD_EXPECT(w, world_sim()->set_memory(device, bytes) == 0, "memory does not shrink");
    w->memory_now[device] = bytes;
}

/* What a pool that is paused does not do, and what it does. */
static void call_while_paused(world *w, int slot) {
    tn_stream stream = w->streams[WORLD_LEGACY + w->pools[slot].device].handle;
    void *block = NULL;
    tn_pool_stats stats;
    world_check_pool(w, slot, &stats);
    WORLD_EXPECT(w, tn_alloc(w->pools[slot].pool, 100, stream, NULL, &block) == TN_INVALID_STATE,
                 "a paused pool gives blocks out");
    for (size_t i = w->oracle.count; i-- > 0;) {
        if (w->oracle.blocks[i].pool != slot) continue;
        block = (void *)w->oracle.blocks[i].address;
        WORLD_EXPECT(w, tn_record_use(block, stream) == TN_INVALID_STATE,
                     "a use is recorded in a paused pool");
        if (i % 3 == 0)
            world_expect_ok(w, world_free(w, i, WORLD_LEGACY + w->pools[slot].device),
                            "a block of a paused pool is freed");
    }
    world_expect_ok(w, tn_pool_check(w->pools[slot].pool), "tn_pool_check of a paused pool");
}

/* Nothing uses the blocks meanwhile. Memory is back before the pool asks for it again. */
static void pause_pool(world *w, world_random *random) {
    int slot = world_pick_pool(w, random);
    int keeps = world_one_in(random, 2);
    int device;
    if (slot < 0 || w->pools[slot].backing != TN_BACKING_VMM || w->stalled_count) return;
    device = w->pools[slot].device;
    w->doing = "a pause";
    world_expect_ok(w, tn_pool_pause(w->pools[slot].pool, keeps), "tn_pool_pause");
    world_tell(w, "pool %d is paused, contents kept: %d", slot, keeps);
    call_while_paused(w, slot);
    if (w->memory_now[device] < w->memory_bytes) {
        (void)world_sim()->set_memory(device, w->memory_bytes);
        w->memory_now[device] = w->memory_bytes;
    }
    world_expect_ok(w, tn_process_limits_set(0, 0), "limits end");
    w->is_limited = 0;
    world_expect_ok(w, tn_pool_resume(w->pools[slot].pool), "tn_pool_resume");
    w->counts->pauses++;
}

static void free_all_of(world *w, int slot) {
    for (size_t i = w->oracle.count; i-- > 0;) {
        if (w->oracle.blocks[i].pool != slot) continue;
        world_expect_ok(w, world_free(w, i, WORLD_LEGACY + w->pools[slot].device),
                        "the last blocks of a pool are freed");
    }
}

static void end_pool(world *w, world_random *random) {
    int slot = (int)world_below(random, WORLD_POOLS);
    world_pool *pool = &w->pools[slot];
    tn_pool_stats stats;
    tn_status status;
    w->doing = "a pool ends, or begins";
    if (!pool->pool) {
        world_open_pool(w, random, slot);
        return;
    }
    if (!world_one_in(random, 3)) free_all_of(w, slot);
    world_check_pool(w, slot, &stats);
    status = tn_pool_destroy(pool->pool);
    if (pool->live_blocks) {
        WORLD_EXPECT(w, status == TN_LEAK, "a pool with live blocks ended");
        w->counts->leaks_refused++;
        return;
    }
    if (status != TN_OK && w->stalled_count) return;
    world_expect_ok(w, status, "a pool ends");
    pool->pool = NULL;
    w->counts->device_waits += stats.stream_waits;
    w->counts->pools_ended++;
}

/* ---- bad calls ------------------------------------------------------------------------------- */

static void expect_refused(const world *w, tn_status status, tn_status must, const char *what) {
    WORLD_EXPECT(w, status == must, "%s gave %s and not %s", what, tn_status_name(status),
                 tn_status_name(must));
}

/* An address that is no block's: inside a block, just freed, or anything at all. */
static void call_with_bad_address(world *w, world_random *random, tn_stream stream) {
    uintptr_t address = world_next(random) >> world_below(random, 40);
    const oracle_block *block;
    if (w->oracle.count && world_one_in(random, 2)) {
        block = &w->oracle.blocks[world_below(random, w->oracle.count)];
        address = block->address + 1 + world_below(random, block->bytes + 512);
    }
    int known = oracle_find(&w->oracle, address);
    if (address == 0 || (known >= 0 && w->oracle.blocks[known].address == address)) return;
    expect_refused(w, tn_free((void *)address, stream), TN_INVALID_ARGUMENT, "tn_free");
    expect_refused(w, tn_record_use((void *)address, stream), TN_INVALID_ARGUMENT, "tn_record_use");
    expect_refused(w, tn_block_info((void *)address, NULL, NULL), TN_INVALID_ARGUMENT,
                   "tn_block_info");
}

static void call_with_bad_size(world *w, world_random *random, int slot, tn_stream stream) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn_pool *pool = w->pools[slot].pool;
    size_t bytes = SIZE_MAX - world_below(random, 4 * MIB);
    void *block = &options;
    expect_refused(w, tn_alloc(pool, bytes, stream, NULL, &block), TN_OUT_OF_DEVICE_MEMORY,
                   "tn_alloc of nearly SIZE_MAX");
    w->pools[slot].out_of_memory++;
    options.alignment = 3 + 4 * world_below(random, MIB);
    expect_refused(w, tn_alloc(pool, 1, stream, &options, &block), TN_INVALID_ARGUMENT,
                   "tn_alloc with a bad alignment");
    options.alignment = (size_t)4 * MIB << world_below(random, 30);
    expect_refused(w, tn_alloc(pool, 1, stream, &options, &block), TN_INVALID_ARGUMENT,
                   "tn_alloc with too large an alignment");
    WORLD_EXPECT(w, block == &options, "a refused tn_alloc wrote its result");
    world_expect_ok(w, tn_alloc(pool, 0, stream, NULL, &block), "tn_alloc of nothing");
    WORLD_EXPECT(w, block == NULL, "nothing has an address");
}

static void bad_call(world *w, world_random *random) {
    int slot = world_pick_pool(w, random);
    tn_stream stream;
    w->doing = "a bad call";
    if (slot < 0) return;
    stream = w->streams[world_pick_stream(w, random, w->pools[slot].device)].handle;
    call_with_bad_address(w, random, stream);
    call_with_bad_size(w, random, slot, stream);
    w->counts->bad_calls++;
}

/* ---- one of them ----------------------------------------------------------------------------- */

void world_upset(world *w, world_random *random) {
    switch (world_below(random, 24)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4: driver_fault(w, random); break;
    case 5:
    case 6: host_fault(w, random); break;
    case 7:
    case 8: stall(w, random); break;
    case 9:
        if (world_one_in(random, 2))
            change_memory(w, random);
        else
            limit_process(w, random);
        break;
    case 10:
    case 11: end_stream(w, random); break;
    case 12: end_pool(w, random); break;
    case 13: end_thread(w); break;
    case 14:
    case 15:
    case 16:
    case 17:
    case 18:
    case 19:
        tolerate(w, BIT(TN_INVALID_STATE));
        world_capture(w, random);
        break;
    case 20:
    case 21: pause_pool(w, random); break;
    default: bad_call(w, random); break;
    }
    tolerate(w, 0);
}
