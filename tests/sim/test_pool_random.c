/* Random programs over four streams of the simulated device, against an oracle that knows nothing
 * of pools: a sorted list of the intervals that are live. Blocks never overlap, no take of memory
 * races with a use of it, the books balance after every step, and at the end nothing is left.
 * TENURE_TEST_SEED=N replays a failure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test_pools.h"

#define MIB         MIB_BYTES
#define STREAMS     4
#define LIVE_MAX    300
#define CHECK_EVERY 500

typedef struct live_block {
    uintptr_t address;
    size_t bytes;
    int last; /* the stream that used it last */
    int own;  /* the stream that it was made for; -1: that one has ended */
} live_block;

typedef struct program {
    tn_device *device;
    tn_pool *pool;
    tn_stream streams[STREAMS];
    uint64_t seed;
    uint64_t random;
    int step;
    live_block live[LIVE_MAX]; /* in order of address */
    size_t live_count;
    size_t live_bytes;
    uint64_t failed;
} program;

static uint64_t next_random(program *p) {
    p->random ^= p->random << 13;
    p->random ^= p->random >> 7;
    p->random ^= p->random << 17;
    return p->random;
}

static size_t below(program *p, size_t limit) { return (size_t)(next_random(p) >> 11) % limit; }

static void expect(program *p, int holds, const char *what) {
    if (holds) return;
    fail_msg("step %d: %s; replay with TENURE_TEST_SEED=%llu", p->step, what,
             (unsigned long long)p->seed);
}

static void check_books(program *p) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_stats_get(p->pool, &stats));
    expect(p, stats.live_bytes == p->live_bytes, "live_bytes is not the oracle's sum");
    expect(p, stats.live_blocks == p->live_count, "live_blocks is not the oracle's count");
    expect(p, stats.out_of_memory == p->failed, "out_of_memory is not the count of failures");
    expect(p,
           stats.live_bytes + stats.cached_bytes + stats.pending_bytes + stats.partial_bytes +
                   stats.driver_held_bytes ==
               stats.reserved_bytes,
           "the books do not balance");
    if (p->step % CHECK_EVERY) return;
    expect(p, tn_pool_check(p->pool) == TN_OK, tn_error_last());
    if (test_sim_get()->race_count()) expect(p, 0, test_sim_get()->race_text(0));
}

static void insert_live(program *p, live_block block) {
    size_t at = 0;
    while (at < p->live_count && p->live[at].address < block.address)
        at++;
    if (at > 0) {
        const live_block *before = &p->live[at - 1];
        expect(p, before->address + before->bytes <= block.address, "overlaps the block before");
    }
    if (at < p->live_count) {
        expect(p, block.address + block.bytes <= p->live[at].address, "overlaps the next block");
    }
    memmove(&p->live[at + 1], &p->live[at], (p->live_count - at) * sizeof block);
    p->live[at] = block;
    p->live_count++;
    p->live_bytes += block.bytes;
}

static size_t random_bytes(program *p) {
    switch (below(p, 8)) {
    case 0: return 1 + below(p, 600);
    case 1: return 1 + below(p, 64 << 10);
    case 2: return 1 + below(p, MIB);
    case 3: return MIB + below(p, 2 * MIB);
    case 4: return (1 + below(p, 16)) * MIB;
    case 5: return 1 + below(p, 40 * MIB);
    default: return 512 * (1 + below(p, 4096));
    }
}

static void step_alloc(program *p) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    int stream = (int)below(p, STREAMS);
    size_t bytes = random_bytes(p);
    void *block = NULL;
    tn_status status;
    if (below(p, 6) == 0) options.alignment = (size_t)1 << below(p, 22);
    status = tn_alloc(p->pool, bytes, p->streams[stream], &options, &block);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        p->failed++;
        return;
    }
    EXPECT_OK(status);
    expect(p, (uintptr_t)block % 512 == 0, "not aligned to 512 bytes");
    if (options.alignment) expect(p, (uintptr_t)block % options.alignment == 0, "not aligned");
    insert_live(p, (live_block){(uintptr_t)block, bytes, stream, stream});
}

/* A kernel on any stream, which the program orders after the block's last use itself. */
static void step_use(program *p) {
    live_block *block = &p->live[below(p, p->live_count)];
    int stream = (int)below(p, STREAMS);
    if (below(p, 2) && block->own >= 0) stream = block->own;
    if (stream != block->last) {
        EXPECT_OK(tn_stream_wait(p->device, p->streams[stream], p->streams[block->last]));
    }
    test_sim_write(p->device, p->streams[stream], (void *)block->address, block->bytes,
                   (double)(1 + below(p, 50)));
    if (stream != block->own) {
        EXPECT_OK(tn_record_use((void *)block->address, p->streams[stream]));
    }
    block->last = stream;
}

static void step_free(program *p) {
    size_t at = below(p, p->live_count);
    live_block block = p->live[at];
    int stream = below(p, 4) && block.own >= 0 ? block.own : (int)below(p, STREAMS);
    EXPECT_OK(tn_free((void *)block.address, p->streams[stream]));
    memmove(&p->live[at], &p->live[at + 1], (p->live_count - at - 1) * sizeof block);
    p->live_count--;
    p->live_bytes -= block.bytes;
}

/* A stream ends and another takes its place: the blocks that it used are then free of it. */
static void step_stream(program *p) {
    int stream = (int)below(p, STREAMS);
    EXPECT_OK(tn_device_synchronize(p->device));
    EXPECT_OK(tn_stream_destroy(p->device, p->streams[stream]));
    p->streams[stream] = test_open_stream(p->device);
    for (size_t i = 0; i < p->live_count; i++) {
        if (p->live[i].own == stream) p->live[i].own = -1;
    }
}

static void step(program *p) {
    size_t choice = below(p, 1000);
    if (choice == 0) {
        EXPECT_OK(tn_pool_trim(p->pool, below(p, 200 * MIB), NULL));
    } else if (choice == 1) {
        EXPECT_OK(tn_device_synchronize(p->device));
    } else if (choice == 2 && below(p, 4) == 0) {
        step_stream(p);
    } else if (p->live_count == 0 || (choice < 400 && p->live_count < LIVE_MAX)) {
        step_alloc(p);
    } else if (choice < 620) {
        step_use(p);
    } else {
        step_free(p);
    }
    check_books(p);
}

static uint64_t chosen_seed(uint64_t otherwise) {
    const char *text = getenv("TENURE_TEST_SEED");
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* A program that runs short on purpose must have done so, and all must have crossed streams. */
static void expect_meaningful(program *p, int is_short) {
    tn_pool_stats stats = test_pool_stats(p->pool);
    assert_true(stats.stream_waits > 100);
    assert_int_equal(stats.out_of_memory > 100, is_short);
}

static void run(uint64_t seed, int steps, tn_pool_backing backing, size_t memory, size_t limit) {
    static program p;
    memset(&p, 0, sizeof p);
    p.seed = chosen_seed(seed);
    p.random = p.seed * 0x9E3779B97F4A7C15u | 1;
    p.device = test_open_sim(memory, 0);
    p.pool = test_open_pool(p.device, backing, limit);
    for (int i = 0; i < STREAMS; i++)
        p.streams[i] = test_open_stream(p.device);
    for (p.step = 0; p.step < steps; p.step++)
        step(&p);
    while (p.live_count > 0)
        step_free(&p);
    p.step = 0;
    check_books(&p);
    expect_meaningful(&p, memory || limit);
    EXPECT_OK(tn_pool_destroy(p.pool));
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(p.device, p.streams[i]));
    test_close_sim(p.device);
}

static void programs_with_room_are_sound(void **state) {
    (void)state;
    run(1, 60000, TN_BACKING_VMM, 0, 0);
}

static void programs_that_run_out_of_memory_are_sound(void **state) {
    (void)state;
    run(2, 60000, TN_BACKING_VMM, 512 * MIB, 0);
}

static void programs_within_a_limit_are_sound(void **state) {
    (void)state;
    run(3, 30000, TN_BACKING_VMM, 0, 301 * MIB);
}

static void programs_on_segments_are_sound(void **state) {
    (void)state;
    run(4, 25000, TN_BACKING_PLAIN, 0, 0);
    run(5, 25000, TN_BACKING_PLAIN, 640 * MIB, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(programs_with_room_are_sound),
        cmocka_unit_test(programs_that_run_out_of_memory_are_sound),
        cmocka_unit_test(programs_within_a_limit_are_sound),
        cmocka_unit_test(programs_on_segments_are_sound),
    };
    return cmocka_run_group_tests_name("sim/pool_random", tests, NULL, NULL);
}
