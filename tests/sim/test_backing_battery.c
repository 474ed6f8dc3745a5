/* Every backing through the same tests, on the simulated device and on the host driver: whatever a
 * pool's memory comes from, blocks, books, order, limits, shortage and failures are the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "test_pools.h"

#define MIB MIB_BYTES

typedef struct backing_row {
    const char *name;
    tn_pool_backing backing;
    int is_host_driver;
    int is_host_memory;
} backing_row;

static const backing_row rows[] = {
    {"sim vmm", TN_BACKING_VMM, 0, 0},      {"sim plain", TN_BACKING_PLAIN, 0, 0},
    {"sim async", TN_BACKING_ASYNC, 0, 0},  {"sim caller", TN_BACKING_CALLER, 0, 0},
    {"sim host", TN_BACKING_HOST, 0, 1},    {"sim pinned", TN_BACKING_PINNED, 0, 1},
    {"host plain", TN_BACKING_PLAIN, 1, 0}, {"host caller", TN_BACKING_CALLER, 1, 0},
    {"host host", TN_BACKING_HOST, 1, 1},   {"host pinned", TN_BACKING_PINNED, 1, 1},
};
enum { ROW_COUNT = sizeof rows / sizeof *rows };

typedef struct fixture {
    const backing_row *row;
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
} fixture;

/* ---- the caller's functions ------------------------------------------------------------------ */

static size_t caller_bytes; /* given and not taken back */

static tn_status caller_alloc(void *context, size_t bytes, void **out) {
    tn_device *device = context;
    tn_status status = tn__device_driver(device)->mem_alloc(tn__device_state(device), bytes, out);
    if (status == TN_OK) caller_bytes += bytes;
    return status;
}

static tn_status caller_free(void *context, void *address, size_t bytes) {
    tn_device *device = context;
    tn_status status = tn__device_driver(device)->mem_free(tn__device_state(device), address);
    if (status == TN_OK) caller_bytes -= bytes;
    return status;
}

/* ---- fixtures -------------------------------------------------------------------------------- */

static tn_status create_pool(const fixture *f, size_t limit_bytes, tn_pool **out) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.backing = f->row->backing;
    config.limit_bytes = limit_bytes;
    config.wait_us_max = 60000000; /* on the host driver it is real time */
    config.functions = (tn_memory_functions){caller_alloc, caller_free, f->device};
    return tn_pool_create(f->device, &config, out);
}

static fixture open_with(const backing_row *row, size_t memory_bytes, size_t limit_bytes) {
    fixture f = {.row = row};
    caller_bytes = 0;
    f.device = row->is_host_driver ? test_open_host() : test_open_sim(memory_bytes, 0);
    EXPECT_OK(create_pool(&f, limit_bytes, &f.pool));
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    return f;
}

static fixture open_row(void **state) { return open_with(*state, 0, 0); }

static void close_device(fixture *f) {
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    if (f->row->is_host_driver) {
        EXPECT_OK(tn_device_destroy(f->device));
    } else {
        test_close_sim(f->device); /* no races, nothing left */
    }
    assert_int_equal(caller_bytes, 0);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void close_all(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    close_device(f);
}

static void put_write(fixture *f, tn_stream stream, void *block, size_t bytes) {
    if (f->row->is_host_driver) {
        EXPECT_OK(tn_fill(f->device, block, 0x5a, bytes, stream));
    } else if (f->row->backing == TN_BACKING_HOST) {
        test_sim_write(f->device, stream, block, 0, 100); /* pageable memory is not the device's */
    } else {
        test_sim_write(f->device, stream, block, bytes, 100);
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void blocks_come_go_and_leave_nothing(void **state) {
    static const size_t sizes[] = {1, 511, 4096, MIB, 3 * MIB + 1, 40 * MIB};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    fixture f = open_row(state);
    char *blocks[COUNT];
    size_t live = 0, released = 0;
    tn_pool_stats stats;
    for (size_t i = 0; i < COUNT; i++) {
        size_t bytes = 0;
        tn_pool *pool = NULL;
        blocks[i] = test_take(f.pool, sizes[i], f.a);
        assert_int_equal((uintptr_t)blocks[i] % 512, 0);
        EXPECT_OK(tn_block_info(blocks[i], &bytes, &pool));
        assert_int_equal(bytes, sizes[i]);
        assert_ptr_equal(pool, f.pool);
        for (size_t j = 0; j < i; j++) {
            assert_true(blocks[i] + sizes[i] <= blocks[j] || blocks[j] + sizes[j] <= blocks[i]);
        }
        put_write(&f, f.a, blocks[i], sizes[i]);
        live += sizes[i];
    }
    stats = test_pool_stats(f.pool);
    assert_int_equal(stats.live_bytes, live);
    assert_int_equal(stats.pinned_bytes,
                     f.row->backing == TN_BACKING_PINNED ? stats.reserved_bytes : 0);
    for (size_t i = 0; i < COUNT; i++)
        test_give(f.pool, blocks[i], f.a);
    EXPECT_STATUS(tn_free(blocks[0], f.a), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_device_synchronize(f.device));
    stats = test_pool_stats(f.pool);
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_int_equal(released, stats.reserved_bytes);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, 0);
    close_all(&f);
}

static void a_trim_keeps_what_it_is_told_to_keep(void **state) {
    fixture f = open_row(state);
    size_t released = 0, before;
    void *live = test_take(f.pool, 64 * MIB, f.a);
    void *idle = test_take(f.pool, 128 * MIB, f.a);
    test_give(f.pool, idle, f.a);
    EXPECT_OK(tn_device_synchronize(f.device));
    before = test_pool_stats(f.pool).reserved_bytes;
    EXPECT_OK(tn_pool_trim(f.pool, SIZE_MAX, &released));
    assert_int_equal(released, 0);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, before);
    EXPECT_OK(tn_pool_trim(f.pool, 0, &released));
    assert_true(released >= 128 * MIB);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, before - released);
    assert_true(before - released >= 64 * MIB);
    test_give(f.pool, live, f.a);
    close_all(&f);
}

/* 11 and 12 of the case table: a use on another stream keeps the memory. */
static void memory_is_reused_behind_recorded_uses_only(void **state) {
    fixture f = open_row(state);
    for (int i = 0; i < 20; i++) {
        tn_stream user = i % 2 ? f.a : f.b;
        void *block = test_take(f.pool, (size_t)(i % 5 + 1) * MIB, f.a);
        put_write(&f, f.a, block, (size_t)(i % 5 + 1) * MIB);
        EXPECT_OK(tn_stream_wait(f.device, user, f.a));
        put_write(&f, user, block, MIB);
        EXPECT_OK(tn_record_use(block, user));
        test_give(f.pool, block, f.a);
        block = test_take(f.pool, (size_t)(i % 3 + 1) * MIB, i % 3 ? f.b : f.a);
        put_write(&f, i % 3 ? f.b : f.a, block, MIB);
        test_give(f.pool, block, i % 3 ? f.b : f.a);
    }
    close_all(&f); /* the simulated device saw no race */
}

/* Host memory is the CPU's as soon as it is given out, whatever stream it is for. */
static void host_memory_is_given_out_complete_only(void **state) {
    fixture f = open_row(state);
    void *block, *other;
    if (f.row->is_host_driver || !f.row->is_host_memory) {
        close_all(&f);
        return;
    }
    block = test_take(f.pool, 8 * MIB, f.a);
    test_sim_stall(f.device, f.a, 1);
    put_write(&f, f.a, block, 8 * MIB);
    test_give(f.pool, block, f.a);
    other = test_take(f.pool, 8 * MIB, f.a);
    assert_ptr_not_equal(other, block);
    memset(other, 1, 8 * MIB);
    test_give(f.pool, other, f.b);
    test_sim_stall(f.device, f.a, 0);
    EXPECT_OK(tn_device_synchronize(f.device));
    other = test_take(f.pool, 20 * MIB, f.b);
    memset(other, 2, 20 * MIB);
    test_give(f.pool, other, f.b);
    close_all(&f);
}

static void a_limit_is_kept_and_idle_memory_counts_for_nothing(void **state) {
    fixture f = open_with(*state, 0, 256 * MIB);
    void *none = NULL, *block;
    tn_pool_stats before;
    EXPECT_STATUS(tn_alloc(f.pool, 257 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    block = test_take(f.pool, 128 * MIB, f.a);
    put_write(&f, f.a, block, 128 * MIB);
    before = test_pool_stats(f.pool);
    EXPECT_STATUS(tn_alloc(f.pool, 192 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_null(none);
    assert_int_equal(test_pool_stats(f.pool).reserved_bytes, before.reserved_bytes);
    assert_int_equal(test_pool_stats(f.pool).out_of_memory, before.out_of_memory + 1);
    test_give(f.pool, block, f.a);
    block = test_take(f.pool, 192 * MIB, f.b); /* cupy#7678: the idle 128 MiB are no obstacle */
    test_give(f.pool, block, f.b);
    assert_true(test_pool_stats(f.pool).peak_reserved_bytes <= 256 * MIB);
    close_all(&f);
}

/* pytorch#159674, and rmm#1245 for driver pools: what the pool itself holds idle, or has freed on a
 * stream that still runs, is no reason to fail. */
static void a_full_device_serves_another_shape(void **state) {
    const backing_row *row = *state;
    fixture f = open_with(row, 256 * MIB, 0);
    void *block, *parts[4];
    if (row->is_host_driver || row->is_host_memory) {
        close_all(&f);
        return;
    }
    block = test_take(f.pool, 160 * MIB, f.a);
    put_write(&f, f.a, block, 160 * MIB);
    test_give(f.pool, block, f.a);
    block = test_take(f.pool, 224 * MIB, f.b);
    put_write(&f, f.b, block, 224 * MIB);
    test_give(f.pool, block, f.b);
    for (int i = 0; i < 4; i++)
        parts[i] = test_take(f.pool, 56 * MIB, f.a);
    for (int i = 0; i < 4; i++) {
        put_write(&f, f.a, parts[i], 56 * MIB);
        test_give(f.pool, parts[i], i % 2 ? f.a : f.b);
    }
    block = test_take(f.pool, 224 * MIB, f.b);
    test_give(f.pool, block, f.b);
    close_all(&f);
}

static void a_pool_with_live_blocks_is_not_destroyed(void **state) {
    fixture f = open_row(state);
    void *block = test_take(f.pool, 5 * MIB, f.a), *other;
    EXPECT_STATUS(tn_pool_destroy(f.pool), TN_LEAK);
    EXPECT_ERROR_HAS("5242880 bytes in 1 block");
    other = test_take(f.pool, 5 * MIB, f.a);
    test_give(f.pool, other, f.a);
    test_give(f.pool, block, f.a);
    close_all(&f);
}

/* A request of exactly one segment or more takes that much, however it is aligned. */
static void alignment_is_given_and_costs_no_granule(void **state) {
    fixture f = open_row(state);
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    size_t plain, aligned;
    void *warm = test_take(f.pool, 40 * MIB, f.a);
    plain = test_pool_stats(f.pool).reserved_bytes;
    options.alignment = 2 * MIB;
    EXPECT_OK(tn_alloc(f.pool, 40 * MIB, f.a, &options, &block));
    assert_int_equal((uintptr_t)block % (2 * MIB), 0);
    aligned = test_pool_stats(f.pool).reserved_bytes - plain;
    /* ASYNC: the driver's granule of 32 MiB, of which the first 40 MiB have left 24. */
    if (f.row->backing != TN_BACKING_ASYNC) assert_int_equal(aligned, plain);
    test_give(f.pool, block, f.a);
    options.alignment = 4096;
    EXPECT_OK(tn_alloc(f.pool, 100, f.a, &options, &block));
    assert_int_equal((uintptr_t)block % 4096, 0);
    test_give(f.pool, block, f.a);
    test_give(f.pool, warm, f.a);
    close_all(&f);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void end_faults(void) {
    assert_int_equal(test_sim_get()->fault(NULL, 0, 0, 0), 0);
    tn__host_alloc_fault(0, 0);
}

static int has_failed(int *failures, tn_status status) {
    *failures += status != TN_OK;
    return status != TN_OK;
}

/* A call that failed has changed nothing: once the faults are over, it succeeds. */
static void free_in_the_end(tn_pool *pool, void *block, tn_stream stream, int *failures) {
    if (has_failed(failures, tn_free(block, stream))) {
        EXPECT_OK(tn_pool_check(pool));
        end_faults();
        EXPECT_OK(tn_free(block, stream));
    }
    EXPECT_OK(tn_pool_check(pool));
}

static void destroy_in_the_end(tn_pool *pool, int *failures) {
    if (!has_failed(failures, tn_pool_destroy(pool))) return;
    EXPECT_OK(tn_pool_check(pool));
    end_faults();
    EXPECT_OK(tn_pool_destroy(pool));
}

/* Each call may fail; what had been given out before is given back in any case. The count of calls
 * that failed. */
static int run_scenario(fixture *f) {
    static const size_t sizes[] = {700, 3 * MIB, 40 * MIB, 20 * MIB};
    void *blocks[4] = {NULL, NULL, NULL, NULL};
    int failures = 0;
    tn_pool *pool = NULL;
    if (has_failed(&failures, create_pool(f, 256 * MIB, &pool))) return failures;
    for (int i = 0; i < 4; i++) {
        tn_stream own = i % 2 ? f->a : f->b, other = i % 2 ? f->b : f->a;
        (void)has_failed(&failures, tn_alloc(pool, sizes[i], own, NULL, &blocks[i]));
        if (blocks[i]) (void)has_failed(&failures, tn_record_use(blocks[i], other));
        EXPECT_OK(tn_pool_check(pool));
        if (i != 1) continue;
        if (!has_failed(&failures, tn_free(blocks[1], f->a))) blocks[1] = NULL;
        EXPECT_OK(tn_pool_check(pool));
    }
    for (int i = 3; i >= 0; i--)
        free_in_the_end(pool, blocks[i], f->b, &failures);
    (void)has_failed(&failures, tn_pool_trim(pool, 16 * MIB, NULL));
    EXPECT_OK(tn_pool_check(pool));
    destroy_in_the_end(pool, &failures);
    return failures;
}

static void fail_each_driver_call(const backing_row *row, int and_after) {
    int failures = 1;
    if (row->is_host_driver) return;
    for (long nth = 1; failures > 0 || nth <= 400; nth++) {
        fixture f = open_with(row, 0, 0);
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, nth % 2 ? 2 : 999), 0);
        failures = run_scenario(&f);
        end_faults();
        close_all(&f);
        assert_true(nth < 2000);
    }
}

static void fail_each_host_allocation(const backing_row *row, int and_after) {
    int failures = 1;
    for (long nth = 1; nth <= 120; nth++) {
        fixture f = open_with(row, 0, 0);
        tn__host_alloc_fault(nth, and_after);
        failures = run_scenario(&f);
        end_faults();
        close_all(&f);
    }
    assert_int_equal(failures, 0);
}

static void every_driver_call_may_fail_once(void **state) { fail_each_driver_call(*state, 0); }

static void every_driver_call_may_fail_from_then_on(void **state) {
    fail_each_driver_call(*state, 1);
}

static void every_host_allocation_may_fail_once(void **state) {
    fail_each_host_allocation(*state, 0);
}

static void every_host_allocation_may_fail_from_then_on(void **state) {
    fail_each_host_allocation(*state, 1);
}

/* ---- the list -------------------------------------------------------------------------------- */

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(blocks_come_go_and_leave_nothing),
    cmocka_unit_test(a_trim_keeps_what_it_is_told_to_keep),
    cmocka_unit_test(memory_is_reused_behind_recorded_uses_only),
    cmocka_unit_test(host_memory_is_given_out_complete_only),
    cmocka_unit_test(a_limit_is_kept_and_idle_memory_counts_for_nothing),
    cmocka_unit_test(a_full_device_serves_another_shape),
    cmocka_unit_test(a_pool_with_live_blocks_is_not_destroyed),
    cmocka_unit_test(alignment_is_given_and_costs_no_granule),
    cmocka_unit_test(every_driver_call_may_fail_once),
    cmocka_unit_test(every_driver_call_may_fail_from_then_on),
    cmocka_unit_test(every_host_allocation_may_fail_once),
    cmocka_unit_test(every_host_allocation_may_fail_from_then_on),
};
enum { TEST_COUNT = sizeof tests / sizeof *tests };

static char names[ROW_COUNT * TEST_COUNT][96];
static struct CMUnitTest matrix[ROW_COUNT * TEST_COUNT];

int main(void) {
    for (size_t row = 0; row < ROW_COUNT; row++) {
        for (size_t test = 0; test < TEST_COUNT; test++) {
            size_t at = row * TEST_COUNT + test;
            snprintf(names[at], sizeof names[at], "%s: %s", rows[row].name, tests[test].name);
            matrix[at] = tests[test];
            matrix[at].name = names[at];
            matrix[at].initial_state = (void *)(uintptr_t)&rows[row];
        }
    }
    return cmocka_run_group_tests(matrix, NULL, NULL);
}
