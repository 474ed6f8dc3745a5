/* What is particular to a backing: a driver's own pool, the caller's functions, pinned memory. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "driver_host_memory.h"
#include "host_alloc.h"
#include "pool_fixture.h"
#include "test_graphs.h"

#define MIB MIB_BYTES

static uint64_t count(const char *call) { return test_sim_get()->call_count(call); }

/* ---- a driver's own pool --------------------------------------------------------------------- */

/* Blocks that a thread's cache does not keep go to the driver's pool, in stream order. */
static void large_blocks_are_the_driver_pools_own(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_ASYNC, 0);
    tn_pool_stats stats;
    void *block = test_take(f.pool, 64 * MIB, f.a);
    (void)state;
    test_sim_write(f.device, f.a, block, 64 * MIB, 1000);
    assert_int_equal(count("cuMemAllocFromPoolAsync"), 1);
    EXPECT_OK(tn_pool_events_begin(f.pool, 16, 0)); /* every call is seen: no cache */
    test_give(f.pool, block, f.a);
    assert_int_equal(count("cuMemFreeAsync"), 1);
    stats = test_pool_stats(f.pool);
    assert_int_equal(stats.cached_bytes, 0);
    assert_int_equal(stats.driver_held_bytes, 64 * MIB);
    assert_ptr_equal(test_take(f.pool, 64 * MIB, f.a), block); /* at once: no wait of any kind */
    test_sim_write(f.device, f.a, block, 64 * MIB, 10);
    assert_int_equal(test_calls(f.device, TN_CALL_STREAM_WAIT), 0);
    assert_int_equal(test_calls(f.device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    test_give(f.pool, block, f.a);
    pool_fixture_close(&f);
}

/* A use on another stream is waited for on a stream of the pool's own, by no stream of the user. */
static void a_use_elsewhere_holds_up_nobody(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_ASYNC, 0);
    void *block = test_take(f.pool, 32 * MIB, f.a), *other;
    (void)state;
    EXPECT_OK(tn_pool_events_begin(f.pool, 16, 0));
    EXPECT_OK(tn_stream_wait(f.device, f.b, f.a));
    test_sim_stall(f.device, f.b, 1);
    test_sim_write(f.device, f.b, block, 32 * MIB, 10);
    EXPECT_OK(tn_record_use(block, f.b));
    test_give(f.pool, block, f.a);
    assert_int_equal(count("cuMemFreeAsync"), 1);
    other = test_take(f.pool, 32 * MIB, f.a);
    assert_ptr_not_equal(other, block); /* b may still use it */
    test_sim_write(f.device, f.a, other, 32 * MIB, 10);
    EXPECT_OK(tn_stream_synchronize(f.device, f.a)); /* not behind b, which does not move */
    test_give(f.pool, other, f.a);
    test_sim_stall(f.device, f.b, 0);
    pool_fixture_close(&f);
}

/* Case 10, rmm#2510: synchronising after every step unmaps nothing. */
static void synchronising_does_not_unmap(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_ASYNC, 0);
    tn_driver_stats first = TN_DRIVER_STATS_INIT, now = TN_DRIVER_STATS_INIT;
    (void)state;
    EXPECT_OK(tn_pool_events_begin(f.pool, 16, 0));
    for (int i = 0; i < 50; i++) {
        void *block = test_take(f.pool, (size_t)(i % 4 + 1) * 16 * MIB, f.a);
        test_sim_write(f.device, f.a, block, 16 * MIB, 10);
        test_give(f.pool, block, f.a);
        EXPECT_OK(tn_device_synchronize(f.device));
        if (i == 3) EXPECT_OK(tn_device_driver_stats(f.device, &first));
    }
    EXPECT_OK(tn_device_driver_stats(f.device, &now));
    /* 46 pairs at the warm price, and nothing else. */
    assert_int_equal((int)((now.time_us - first.time_us) * 1000 + 0.5), 46 * 1120);
    pool_fixture_close(&f);
}

/* Case 9, rmm#1245: memory that the driver's pool has free in another shape is given back and asked
 * for anew once the host has seen the work end. A stream that never ends bounds the wait. */
static void shortage_waits_for_freed_memory_within_a_bound(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    pool_fixture f = {.device = test_open_sim(128 * MIB, 0)};
    void *blocks[4], *large = NULL;
    (void)state;
    config.backing = TN_BACKING_ASYNC;
    config.wait_us_max = 100000;
    EXPECT_OK(tn_pool_create(f.device, &config, &f.pool));
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    for (int i = 0; i < 4; i++) {
        blocks[i] = test_take(f.pool, 32 * MIB, f.a);
        test_sim_write(f.device, f.a, blocks[i], 32 * MIB, 100);
    }
    test_sim_stall(f.device, f.a, 1);
    test_sim_write(f.device, f.a, blocks[0], 32 * MIB, 100);
    for (int i = 0; i < 4; i++)
        test_give(f.pool, blocks[i], f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 128 * MIB, f.b, NULL, &large), TN_OUT_OF_DEVICE_MEMORY);
    test_sim_stall(f.device, f.a, 0);
    large = test_take(f.pool, 128 * MIB, f.b);
    test_sim_write(f.device, f.b, large, 128 * MIB, 100);
    test_give(f.pool, large, f.b);
    pool_fixture_close(&f);
}

static void a_driver_without_pools_says_so(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_device *device = test_open_host();
    tn_pool *pool = NULL;
    (void)state;
    config.backing = TN_BACKING_ASYNC;
    EXPECT_STATUS(tn_pool_create(device, &config, &pool), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("no memory pools of its own");
    assert_null(pool);
    EXPECT_OK(tn_device_destroy(device));
    device = test_open_sim(0, 0);
    assert_int_equal(test_sim_get()->fault("cuMemPoolCreate", 1, 0, 801), 0);
    EXPECT_STATUS(tn_pool_create(device, &config, &pool), TN_UNSUPPORTED);
    assert_int_equal(test_sim_get()->fault("cuMemPoolSetAttribute", 1, 0, 1), 0);
    EXPECT_STATUS(tn_pool_create(device, &config, &pool), TN_DRIVER_ERROR);
    assert_null(pool);
    test_close_sim(device);
}

/* ---- the caller's functions ------------------------------------------------------------------ */

typedef enum provider_mode { GOOD, EMPTY, CROOKED, TWICE, REFUSING, MAD } provider_mode;

typedef struct provider {
    tn_device *device;
    tn_pool *self;  /* looked at in the call, if any */
    tn_pool *other; /* used in the call, if any */
    size_t seen_reserved;
    provider_mode mode;
    void *last;
    size_t given;
    size_t calls;
    tn_status free_status;
} provider;

static void use_pools(provider *p) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    if (p->other) test_give(p->other, test_take(p->other, 128 * MIB, NULL), NULL);
    if (!p->self) return;
    EXPECT_OK(tn_pool_stats_get(p->self, &stats));
    EXPECT_OK(tn_pool_check(p->self));
    p->seen_reserved = stats.reserved_bytes;
}

static tn_status provider_alloc(void *context, size_t bytes, void **out) {
    provider *p = context;
    tn_status status = TN_OK;
    p->calls++;
    switch (p->mode) {
    case EMPTY: *out = NULL; return TN_OK;
    case REFUSING: return TN_UNSUPPORTED;
    case MAD: return (tn_status)4711;
    case TWICE: *out = p->last; return TN_OK;
    default: break;
    }
    use_pools(p);
    status = tn__device_driver(p->device)->mem_alloc(tn__device_state(p->device), bytes, out);
    if (status != TN_OK) return status;
    p->given += bytes;
    p->last = *out;
    if (p->mode == CROOKED) *out = (char *)*out + 8;
    return TN_OK;
}

static tn_status provider_free(void *context, void *address, size_t bytes) {
    provider *p = context;
    tn_status status = p->free_status;
    if (status != TN_OK) return status;
    if (p->mode == CROOKED) address = (char *)address - 8;
    use_pools(p);
    status = tn__device_driver(p->device)->mem_free(tn__device_state(p->device), address);
    if (status == TN_OK) p->given -= bytes;
    return status;
}

static tn_pool *open_caller_pool(provider *p, size_t limit_bytes) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.backing = TN_BACKING_CALLER;
    config.limit_bytes = limit_bytes;
    config.functions = (tn_memory_functions){provider_alloc, provider_free, p};
    EXPECT_OK(tn_pool_create(p->device, &config, &pool));
    return pool;
}

static void both_functions_are_needed(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = NULL;
    (void)state;
    config.backing = TN_BACKING_CALLER;
    EXPECT_STATUS(tn_pool_create(device, &config, &pool), TN_INVALID_ARGUMENT);
    config.functions.alloc = provider_alloc;
    EXPECT_STATUS(tn_pool_create(device, &config, &pool), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("functions.free");
    test_close_sim(device);
}

static void what_the_functions_give_is_looked_at(void **state) {
    static const struct {
        provider_mode mode;
        tn_status status;
        const char *words;
    } rows[] = {{EMPTY, TN_DRIVER_ERROR, "at (nil)"},
                {TWICE, TN_DRIVER_ERROR, "has already"},
                {CROOKED, TN_DRIVER_ERROR, "not aligned to 512"},
                {REFUSING, TN_UNSUPPORTED, "alloc of pool pool failed with TN_UNSUPPORTED"},
                {MAD, TN_DRIVER_ERROR, "4711"}};
    provider p = {.device = test_open_sim(0, 0)};
    tn_pool *pool = open_caller_pool(&p, 0);
    void *kept = test_take(pool, 40 * MIB, NULL), *none = NULL;
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        tn_pool_stats before = test_pool_stats(pool);
        p.mode = rows[i].mode;
        EXPECT_STATUS(tn_alloc(pool, 50 * MIB, NULL, NULL, &none), rows[i].status);
        EXPECT_ERROR_HAS(rows[i].words);
        assert_null(none);
        assert_int_equal(test_pool_stats(pool).reserved_bytes, before.reserved_bytes);
        assert_int_equal(p.given, 40 * MIB);
    }
    p.mode = GOOD;
    test_give(pool, test_take(pool, 50 * MIB, NULL), NULL);
    test_give(pool, kept, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    assert_int_equal(p.given, 0);
    test_close_sim(p.device);
}

static void a_failing_free_keeps_the_segment(void **state) {
    provider p = {.device = test_open_sim(0, 0)};
    tn_pool *pool = open_caller_pool(&p, 0);
    size_t released = 7;
    void *block = test_take(pool, 40 * MIB, NULL);
    (void)state;
    test_give(pool, block, NULL);
    EXPECT_OK(tn_device_synchronize(p.device));
    p.free_status = TN_IN_USE;
    EXPECT_STATUS(tn_pool_trim(pool, 0, &released), TN_IN_USE);
    EXPECT_ERROR_HAS("free of pool pool failed with TN_IN_USE");
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 40 * MIB);
    EXPECT_STATUS(tn_pool_destroy(pool), TN_IN_USE);
    assert_ptr_equal(test_take(pool, 40 * MIB, NULL), block); /* the pool goes on */
    test_give(pool, block, NULL);
    p.free_status = TN_OK;
    EXPECT_OK(tn_pool_destroy(pool));
    assert_int_equal(p.given, 0);
    test_close_sim(p.device);
}

/* The functions run under no lock: they may use another pool, and even one that is short and takes
 * idle memory from the rest; and look at the pool that calls, whose books balance meanwhile. */
static void the_functions_may_use_pools(void **state) {
    provider p = {.device = test_open_sim(256 * MIB, 0)};
    tn_pool *pool, *idle, *other;
    void *block;
    (void)state;
    other = test_open_pool(p.device, TN_BACKING_VMM, 0);
    idle = test_open_pool(p.device, TN_BACKING_VMM, 0);
    pool = open_caller_pool(&p, 0);
    test_give(idle, test_take(idle, 200 * MIB, NULL), NULL);
    p.other = other;
    p.self = pool;
    block = test_take(pool, 64 * MIB, NULL);
    assert_int_equal(p.seen_reserved, 64 * MIB); /* on its way */
    assert_true(test_pool_stats(idle).reserved_bytes < 200 * MIB);
    test_give(pool, block, NULL);
    p.seen_reserved = 0;
    EXPECT_OK(tn_pool_trim(pool, 0, NULL));
    assert_int_equal(p.seen_reserved, 64 * MIB); /* on its way back */
    assert_int_equal(test_pool_stats(pool).reserved_bytes, 0);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_pool_destroy(idle));
    EXPECT_OK(tn_pool_destroy(other));
    test_close_sim(p.device);
}

/* Case 29, pytorch#146431: a block goes back where it came from, whatever else there is. */
static void a_block_carries_its_provider(void **state) {
    provider first = {.device = test_open_sim(0, 0)}, second = {.device = first.device};
    tn_pool *pools[2] = {open_caller_pool(&first, 0), open_caller_pool(&second, 0)};
    void *blocks[2] = {test_take(pools[0], 40 * MIB, NULL), test_take(pools[1], 48 * MIB, NULL)};
    (void)state;
    EXPECT_OK(tn_free(blocks[1], NULL));
    EXPECT_OK(tn_free(blocks[0], NULL));
    EXPECT_OK(tn_pool_destroy(pools[1]));
    assert_int_equal(second.given, 0);
    assert_int_equal(first.given, 40 * MIB);
    EXPECT_OK(tn_pool_destroy(pools[0]));
    assert_int_equal(first.given, 0);
    test_close_sim(first.device);
}

/* ---- pinned memory --------------------------------------------------------------------------- */

/* jemalloc cuts and joins what is pinned already: another shape pins nothing anew. */
static void pinned_extents_serve_other_shapes(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_PINNED, 0);
    void *large = test_take(f.pool, 128 * MIB, f.a), *parts[2];
    size_t reserved = test_pool_stats(f.pool).reserved_bytes;
    (void)state;
    assert_null(tn__host_arena_why_none());
    assert_int_equal(count("cuMemHostAlloc"), 1);
    memset(large, 1, 128 * MIB);
    test_give(f.pool, large, f.a);
    EXPECT_OK(tn_device_synchronize(f.device));
    for (int i = 0; i < 2; i++) {
        parts[i] = test_take(f.pool, 48 * MIB, f.b);
        memset(parts[i], 2, 48 * MIB);
    }
    assert_int_equal(count("cuMemHostAlloc"), 1);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, reserved);
    assert_int_equal(test_pool_stats(f.pool).pinned_bytes, reserved);
    for (int i = 0; i < 2; i++)
        test_give(f.pool, parts[i], f.b);
    pool_fixture_close(&f);
}

/* Without jemalloc every segment is pinned by itself, with the same answers. */
static void memory_without_an_arena_gives_the_same_answers(void **state) {
    tn__host_memory memory;
    void *block = NULL;
    (void)state;
    tn__host_memory_open(&memory, SIZE_MAX, NULL);
    tn__host_memory_use_no_arena(&memory);
    assert_int_equal(tn__host_memory_round(&memory, 33 * MIB), 33 * MIB);
    EXPECT_OK(tn__host_memory_take(&memory, 33 * MIB, &block));
    assert_int_equal(tn__host_memory_held(&memory), 34 * MIB);
    EXPECT_OK(tn__host_memory_give(&memory, block));
    assert_int_equal(tn__host_memory_held(&memory), 0);
    EXPECT_OK(tn__host_memory_close(&memory));
}

/* The driver would make it memory of the graph, which is there while a launch runs only. */
static void the_drivers_pool_is_not_asked_in_a_capture(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_ASYNC, 0);
    void *block = NULL;
    test_graph graph;
    (void)state;
    test_capture_begin(f.device, f.a, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(tn_alloc(f.pool, 4 * MIB, f.a, NULL, &block), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("captures a graph");
    assert_true(test_is_capturing(f.device, f.a));
    graph = test_capture_end(f.device, f.a);
    test_graph_destroy(f.device, &graph);
    test_give(f.pool, test_take(f.pool, 4 * MIB, f.a), f.a);
    pool_fixture_close(&f);
}

/* What threads keep of the pool's streams must not outlive them. */
static void a_pool_whose_end_failed_at_last_can_be_used(void **state) {
    pool_fixture f = pool_fixture_open(0, TN_BACKING_ASYNC, 0);
    (void)state;
    test_give(f.pool, test_take(f.pool, 4096, f.a), f.a);
    test_give(f.pool, test_take(f.pool, 4096, f.b), f.b);
    assert_int_equal(test_sim_get()->fault("cuMemPoolDestroy", 1, 0, 999), 0);
    EXPECT_STATUS(tn_pool_destroy(f.pool), TN_DRIVER_ERROR);
    test_give(f.pool, test_take(f.pool, 4096, f.a), f.a);
    test_give(f.pool, test_take(f.pool, 4096, f.b), f.a);
    pool_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_blocks_are_the_driver_pools_own),
        cmocka_unit_test(a_use_elsewhere_holds_up_nobody),
        cmocka_unit_test(synchronising_does_not_unmap),
        cmocka_unit_test(shortage_waits_for_freed_memory_within_a_bound),
        cmocka_unit_test(a_driver_without_pools_says_so),
        cmocka_unit_test(both_functions_are_needed),
        cmocka_unit_test(what_the_functions_give_is_looked_at),
        cmocka_unit_test(a_failing_free_keeps_the_segment),
        cmocka_unit_test(the_functions_may_use_pools),
        cmocka_unit_test(a_block_carries_its_provider),
        cmocka_unit_test(pinned_extents_serve_other_shapes),
        cmocka_unit_test(a_pool_whose_end_failed_at_last_can_be_used),
        cmocka_unit_test(the_drivers_pool_is_not_asked_in_a_capture),
        cmocka_unit_test(memory_without_an_arena_gives_the_same_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
