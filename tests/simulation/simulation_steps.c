/* What a program does with blocks, and what may come of it. See simulation.h. */
#include "driver.h"
#include "simulation.h"

#define MIB ((size_t)1 << 20)

/* ---- statuses -------------------------------------------------------------------------------- */

static void expect_tolerated(const world *w, tn_status status, const char *call) {
    if (status == TN_OK || w->tolerated & 1u << status) return;
    world_fail(w, "%s gave %s: %s", call, tn_status_name(status), tn_error_last());
}

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* A pool of pages that fails has no pages left that would have served: neither idle ones of its
 * own, nor any that the device and its limit would have given. */
static void expect_honest_shortage(world *w, int slot, size_t bytes) {
    const world_pool *pool = &w->pools[slot];
    const size_t slack = 8 * MIB + 2 * MIB;
    size_t used = world_sim()->physical_bytes(pool->device);
    size_t memory = w->memory_now[pool->device];
    size_t room = memory > used ? memory - used : 0;
    tn_pool_stats stats;
    if (pool->backing != TN_BACKING_VMM || w->is_limited ||
        w->tolerated != 1u << TN_OUT_OF_DEVICE_MEMORY)
        return;
    world_check_pool(w, slot, &stats);
    if (pool->limit_bytes && room > pool->limit_bytes - stats.reserved_bytes) {
        room = pool->limit_bytes - stats.reserved_bytes;
    }
    WORLD_EXPECT(w, stats.cached_bytes + room < round_up(bytes, 8 * MIB) + slack,
                 "%zu bytes are refused with %zu idle and %zu to be had", bytes, stats.cached_bytes,
                 room);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* A block is for use on its stream at once; on any other, behind what that stream waits for. */
static void add_block(world *w, int slot, void *address, size_t bytes, int stream) {
    oracle_block block = {(uintptr_t)address, bytes, slot, stream, stream, UINT32_C(1) << stream};
    int other = oracle_add(&w->oracle, &block);
    world_pool *pool = &w->pools[slot];
    if (other >= 0) {
        const oracle_block *there = &w->oracle.blocks[other];
        world_fail(w, "[%p, +%zu) overlaps the block [%p, +%zu)", address, bytes,
                   (void *)there->address, there->bytes);
    }
    pool->live_bytes += bytes;
    pool->live_blocks++;
    pool->allocs++;
    w->counts->allocs++;
    w->counts->host_allocs += (uint64_t)pool->is_host_memory;
}

tn_status world_alloc(world *w, int slot, size_t bytes, size_t alignment, int stream) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    size_t least = alignment > 512 ? alignment : 512;
    void *const nowhere = &options;
    void *block = nowhere;
    tn_status status;
    options.alignment = alignment;
    options.owner = "simulation";
    status = tn_alloc(w->pools[slot].pool, bytes, w->streams[stream].handle, &options, &block);
    world_tell(w, "%s = tn_alloc(pool %d, %zu, stream %d) = %p", tn_status_name(status), slot,
               bytes, stream, block);
    expect_tolerated(w, status, "tn_alloc");
    if (status == TN_OK) {
        WORLD_EXPECT(w, (uintptr_t)block % least == 0, "%p is not aligned to %zu", block, least);
        add_block(w, slot, block, bytes, stream);
        return status;
    }
    WORLD_EXPECT(w, block == nowhere, "a failed tn_alloc wrote its result");
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        w->pools[slot].out_of_memory++;
        w->counts->out_of_memory++;
        expect_honest_shortage(w, slot, bytes);
    }
    return status;
}

tn_status world_free(world *w, size_t index, int stream) {
    oracle_block block = w->oracle.blocks[index];
    world_pool *pool = &w->pools[block.pool];
    tn_status status = tn_free((void *)block.address, w->streams[stream].handle);
    world_tell(w, "%s = tn_free(%p, stream %d)", tn_status_name(status), (void *)block.address,
               stream);
    expect_tolerated(w, status, "tn_free");
    if (status != TN_OK) return status;
    oracle_remove(&w->oracle, index);
    pool->live_bytes -= block.bytes;
    pool->live_blocks--;
    pool->frees++;
    w->counts->frees++;
    if (stream != block.own) w->counts->cross_stream_frees++;
    return status;
}

tn_status world_record_use(world *w, size_t index, int stream) {
    void *address = (void *)w->oracle.blocks[index].address;
    tn_status status = tn_record_use(address, w->streams[stream].handle);
    world_tell(w, "%s = tn_record_use(%p, stream %d)", tn_status_name(status), address, stream);
    expect_tolerated(w, status, "tn_record_use");
    if (status == TN_OK) w->counts->recorded_uses++;
    return status;
}

tn_status world_trim(world *w, int slot, size_t keep_bytes) {
    size_t released = SIZE_MAX;
    tn_status status = tn_pool_trim(w->pools[slot].pool, keep_bytes, &released);
    world_tell(w, "%s = tn_pool_trim(pool %d, %zu)", tn_status_name(status), slot, keep_bytes);
    expect_tolerated(w, status, "tn_pool_trim");
    WORLD_EXPECT(w, (status == TN_OK) == (released != SIZE_MAX),
                 "tn_pool_trim wrote its result and failed, or did neither");
    if (status == TN_OK) w->counts->trims++;
    return status;
}

/* The kernel is ordered, by the program, after what used the block before. */
void world_use(world *w, size_t index, int stream, int is_write, double duration_us) {
    oracle_block *block = &w->oracle.blocks[index];
    tn_device *device = w->devices[w->pools[block->pool].device];
    tn__range range = {(void *)block->address, block->bytes, is_write};
    world_tell(w, "%s %p on stream %d", is_write ? "write" : "read", (void *)block->address,
               stream);
    world_wait(w, stream, oracle_touch(block, stream, is_write));
    world_expect_ok(w,
                    tn__device_driver(device)->ghost_launch(tn__device_state(device),
                                                            is_write ? "write" : "read", &range,
                                                            !w->pools[block->pool].is_host_memory,
                                                            duration_us, w->streams[stream].handle),
                    "a kernel is launched");
    w->counts->uses++;
}

/* ---- steps ----------------------------------------------------------------------------------- */

size_t world_choose_bytes(world_random *random) {
    switch (world_below(random, 10)) {
    case 0:
    case 1: return 1 + world_below(random, 600);
    case 2: return 1 + world_below(random, 64 << 10);
    case 3: return 512 << world_below(random, 14);
    case 4: return 1 + world_below(random, MIB);
    case 5: return MIB + world_below(random, 2 * MIB);
    case 6: return (1 + world_below(random, 16)) * MIB;
    case 7: return 1 + world_below(random, 40 * MIB);
    default: return 512 * (1 + world_below(random, 4096));
    }
}

static void step_alloc(world *w, world_random *random) {
    int slot = world_pick_pool(w, random);
    size_t alignment = 0;
    size_t bytes = world_one_in(random, 3) ? world_choose_bytes(random)
                                           : w->sizes[world_below(random, WORLD_SIZES)];
    if (slot < 0) return;
    if (world_one_in(random, 8)) alignment = (size_t)1 << world_below(random, 22);
    (void)world_alloc(w, slot, bytes, alignment,
                      world_pick_stream(w, random, w->pools[slot].device));
}

static void use_somehow(world *w, world_random *random, size_t index, int stream) {
    int is_write = !world_one_in(random, 3);
    world_use(w, index, stream, is_write, (double)(1 + world_below(random, 60)));
}

static void step_use(world *w, world_random *random) {
    size_t index = world_below(random, w->oracle.count);
    const oracle_block *block = &w->oracle.blocks[index];
    int own = block->own;
    int stream = world_pick_stream(w, random, w->pools[block->pool].device);
    if (own >= WORLD_PER_THREAD && own - WORLD_PER_THREAD != w->thread) own = ORACLE_NO_STREAM;
    if (own != ORACLE_NO_STREAM && world_one_in(random, 2)) stream = own;
    use_somehow(w, random, index, stream);
    if (stream != own) world_expect_ok(w, world_record_use(w, index, stream), "a use is recorded");
}

/* The last use may be put on the stream of the free without being recorded. */
static void step_free(world *w, world_random *random) {
    size_t index = world_below(random, w->oracle.count);
    const oracle_block *block = &w->oracle.blocks[index];
    int own = block->own;
    int stream = world_pick_stream(w, random, w->pools[block->pool].device);
    if (own >= WORLD_PER_THREAD && own - WORLD_PER_THREAD != w->thread) own = ORACLE_NO_STREAM;
    if (own != ORACLE_NO_STREAM && !world_one_in(random, 4)) stream = own;
    if (world_one_in(random, 4)) use_somehow(w, random, index, stream);
    world_expect_ok(w, world_free(w, index, stream), "a block is freed");
}

void world_synchronize(world *w, int device) {
    world_expect_ok(w, tn_device_synchronize(w->devices[device]), "a device is waited for");
    for (int slot = 0; slot < WORLD_STREAMS; slot++) {
        if (w->streams[slot].is_live && w->streams[slot].device == device)
            oracle_stream_done(&w->oracle, slot);
    }
}

static void step_synchronize(world *w, world_random *random) {
    int device = (int)world_below(random, (size_t)w->device_count);
    if (!w->stalled_count) world_synchronize(w, device);
}

static void step_trim(world *w, world_random *random) {
    int slot = world_pick_pool(w, random);
    if (slot >= 0) (void)world_trim(w, slot, world_below(random, 200 * MIB));
}

/* Programs grow and shrink by turns. */
static size_t alloc_share(const world *w) { return w->step / 1024 % 2 ? 300 : 480; }

void world_step(world *w, world_random *random) {
    size_t choice = world_below(random, 1000);
    size_t share = alloc_share(w);
    if (choice < 12) {
        world_upset(w, random);
    } else if (choice < 14) {
        w->doing = "tn_pool_trim";
        step_trim(w, random);
    } else if (choice < 16) {
        w->doing = "tn_device_synchronize";
        step_synchronize(w, random);
    } else if (w->oracle.count == 0 || (choice < share && w->oracle.count < w->blocks_max)) {
        w->doing = "tn_alloc";
        step_alloc(w, random);
    } else if (choice < share + 180) {
        w->doing = "a use";
        step_use(w, random);
    } else {
        w->doing = "tn_free";
        step_free(w, random);
    }
}
