/* The N-th failure of every driver call and every host allocation of every call on a pool, once
 * and from then on.
 *
 * Each scenario is set up without faults. A run that fails once leaves the pool as it was; one
 * where the driver refuses everything from then on can not give back what it just took, but the
 * blocks are as they were and the books balance. Then the run succeeds without the fault, and at
 * the end nothing is left anywhere.
 */
#include <string.h>

#include "driver.h"
#include "fault_loop_support.h"
#include "host_alloc.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { CUDA_OUT_OF_MEMORY = 2, CUDA_UNKNOWN = 999 };

typedef struct subject {
    tn_device *device;
    tn_pool *pool;
    tn_pool *other;
    tn_stream a;
    tn_stream b;
    tn_stream foreign; /* the pool does not hear of its end */
    void *blocks[12];
    void *made;
} subject;

typedef struct scenario {
    const char *name;
    size_t memory;
    tn_pool_backing backing;
    void (*setup)(subject *s);
    tn_status (*run)(subject *s);
    int gives_back;   /* a run that fails half-way has given idle memory back */
    int least_faults; /* at least so many different N of driver calls make the run fail */
    int least_host_faults;
} scenario;

/* ---- scenarios ------------------------------------------------------------------------------- */

static void nothing(subject *s) { (void)s; }

static void take(subject *s, int at, size_t bytes, tn_stream stream) {
    s->blocks[at] = test_take(s->pool, bytes, stream);
}

static void give(subject *s, int at, tn_stream stream) {
    test_give(s->pool, s->blocks[at], stream);
    s->blocks[at] = NULL;
}

static void two_holes(subject *s) {
    take(s, 0, 8 * MIB, s->a);
    take(s, 1, 2 * MIB, s->a);
    take(s, 2, 8 * MIB, s->a);
    take(s, 3, 2 * MIB, s->a);
    give(s, 0, s->a);
    give(s, 2, s->a);
}

static void holes_in_use(subject *s) {
    two_holes(s);
    take(s, 0, 8 * MIB, s->a);
    test_sim_write(s->device, s->b, s->blocks[0], 8 * MIB, 1e5);
    EXPECT_OK(tn_record_use(s->blocks[0], s->b));
    give(s, 0, s->a);
}

static void a_partly_mapped_hole(subject *s) {
    two_holes(s);
    EXPECT_OK(tn_device_synchronize(s->device));
    EXPECT_OK(tn_pool_trim(s->pool, 6 * MIB, NULL));
}

static void a_free_block_of_two_streams(subject *s) {
    take(s, 0, 4 * MIB, s->a);
    EXPECT_OK(tn_record_use(s->blocks[0], s->b));
    give(s, 0, s->a);
}

static void a_block(subject *s) { take(s, 0, 4 * MIB, s->a); }

static void a_block_of_a_foreign_stream(subject *s) { take(s, 0, 4 * MIB, s->foreign); }

static void a_block_with_many_uses(subject *s) {
    a_block(s);
    EXPECT_OK(tn_record_use(s->blocks[0], s->b));
}

static void idle_memory_of_another_pool(subject *s) {
    test_give(s->other, test_take(s->other, 40 * MIB, s->a), s->a);
    take(s, 0, 16 * MIB, s->a);
    test_sim_write(s->device, s->b, s->blocks[0], 16 * MIB, 1e5);
    EXPECT_OK(tn_record_use(s->blocks[0], s->b));
    give(s, 0, s->a);
}

static void idle_segments(subject *s) {
    for (int i = 0; i < 3; i++)
        take(s, i, 40 * MIB, s->a);
    for (int i = 0; i < 3; i++) {
        test_sim_write(s->device, s->b, s->blocks[i], 40 * MIB, 1e5);
        EXPECT_OK(tn_record_use(s->blocks[i], s->b));
        give(s, i, s->a);
    }
}

static tn_status alloc_16(subject *s) { return tn_alloc(s->pool, 16 * MIB, s->a, NULL, &s->made); }
static tn_status alloc_aligned(subject *s) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    options.alignment = 1 * MIB;
    return tn_alloc(s->pool, 1000, s->a, &options, &s->made);
}
static tn_status alloc_50(subject *s) { return tn_alloc(s->pool, 50 * MIB, s->a, NULL, &s->made); }
static tn_status alloc_16_elsewhere(subject *s) {
    return tn_alloc(s->pool, 16 * MIB, s->b, NULL, &s->made);
}
static tn_status alloc_4_elsewhere(subject *s) {
    return tn_alloc(s->pool, 4 * MIB, s->foreign, NULL, &s->made);
}
static tn_status free_first(subject *s) {
    tn_status status = tn_free(s->blocks[0], s->foreign);
    if (status == TN_OK) s->blocks[0] = NULL;
    return status;
}
static tn_status record_use(subject *s) { return tn_record_use(s->blocks[0], s->foreign); }
static tn_status trim(subject *s) { return tn_pool_trim(s->pool, 0, NULL); }

static tn_status destroy(subject *s) {
    tn_status status = tn_pool_destroy(s->pool);
    if (status == TN_OK) s->pool = NULL;
    return status;
}

static tn_status create(subject *s) {
    tn_pool *pool = NULL;
    TN_TRY(tn_pool_create(s->device, NULL, &pool));
    return tn_pool_destroy(pool);
}

static const scenario scenarios[] = {
    {"create", 0, TN_BACKING_VMM, nothing, create, 0, 0, 2},
    {"grow", 0, TN_BACKING_VMM, nothing, alloc_16, 0, 18, 8},
    {"grow, aligned", 0, TN_BACKING_VMM, nothing, alloc_aligned, 0, 4, 5},
    {"move pages", 20 * MIB, TN_BACKING_VMM, two_holes, alloc_16, 0, 10, 3},
    {"move pages in use", 20 * MIB, TN_BACKING_VMM, holes_in_use, alloc_16_elsewhere, 0, 10, 3},
    {"fill a hole", 0, TN_BACKING_VMM, a_partly_mapped_hole, alloc_16, 0, 6, 3},
    {"wait for two streams", 0, TN_BACKING_VMM, a_free_block_of_two_streams, alloc_4_elsewhere, 0,
     5, 0},
    {"free", 0, TN_BACKING_VMM, a_block_of_a_foreign_stream, free_first, 0, 1, 0},
    {"record a use", 0, TN_BACKING_VMM, a_block_with_many_uses, record_use, 0, 1, 1},
    {"take from another pool", 64 * MIB, TN_BACKING_VMM, idle_memory_of_another_pool, alloc_50, 0,
     30, 5},
    {"trim", 0, TN_BACKING_VMM, two_holes, trim, 1, 8, 1},
    {"destroy an idle pool", 0, TN_BACKING_VMM, a_free_block_of_two_streams, destroy, 1, 8, 1},
    {"segment", 0, TN_BACKING_PLAIN, nothing, alloc_16, 0, 1, 4},
    {"segments back", 120 * MIB, TN_BACKING_PLAIN, idle_segments, alloc_50, 1, 4, 0},
    {"segments from another pool", 64 * MIB, TN_BACKING_PLAIN, idle_memory_of_another_pool,
     alloc_50, 1, 3, 0},
};

/* ---- one run --------------------------------------------------------------------------------- */

static void open_subject(subject *s, const scenario *plan) {
    memset(s, 0, sizeof *s);
    s->device = test_open_sim(plan->memory, 0);
    s->pool = test_open_pool(s->device, plan->backing, 0);
    s->other = test_open_pool(s->device, plan->backing, 0);
    s->a = test_open_stream(s->device);
    s->b = test_open_stream(s->device);
    s->foreign = test_open_foreign_stream(s->device);
    plan->setup(s);
}

static void close_subject(subject *s) {
    if (s->made) EXPECT_OK(tn_free(s->made, s->a));
    for (int i = 0; i < 12; i++) {
        if (s->blocks[i]) EXPECT_OK(tn_free(s->blocks[i], s->a));
    }
    if (s->pool) (void)test_pool_stats(s->pool);
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_pool_destroy(s->other));
    EXPECT_OK(tn_stream_destroy(s->device, s->a));
    EXPECT_OK(tn_stream_destroy(s->device, s->b));
    test_close_foreign_stream(s->device, s->foreign);
    test_close_sim(s->device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void expect_unchanged(const tn_pool_stats *before, const tn_pool_stats *after,
                             int gives_back) {
    assert_int_equal(before->live_bytes, after->live_bytes);
    assert_int_equal(before->live_blocks, after->live_blocks);
    assert_int_equal(before->allocs, after->allocs);
    assert_int_equal(before->frees, after->frees);
    assert_int_equal(before->peak_live_bytes, after->peak_live_bytes);
    if (gives_back) return;
    assert_int_equal(before->reserved_bytes, after->reserved_bytes);
    assert_int_equal(before->address_bytes, after->address_bytes);
    assert_int_equal(before->driver_held_bytes, after->driver_held_bytes);
    assert_int_equal(before->peak_reserved_bytes, after->peak_reserved_bytes);
    assert_int_equal(before->partial_bytes, after->partial_bytes);
    assert_int_equal(before->cached_bytes + before->pending_bytes,
                     after->cached_bytes + after->pending_bytes);
}

static int run_with_fault(const void *argument, fault_point *fault) {
    const scenario *plan = argument;
    tn_pool_stats before;
    tn_status status;
    subject s;
    open_subject(&s, plan);
    before = test_pool_stats(s.pool);
    fault_begin(fault);
    status = plan->run(&s);
    fault_end(fault);
    if (status != TN_OK) {
        tn_pool_stats after = test_pool_stats(s.pool);
        int gives_back = plan->gives_back || (!fault->is_host && fault->and_after);
        if (fault->is_host) {
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        } else if (fault->code == CUDA_UNKNOWN) {
            EXPECT_ERROR_HAS(" failed: CUDA_ERROR_UNKNOWN");
        }
        assert_null(s.made);
        expect_unchanged(&before, &after, gives_back);
        EXPECT_OK(plan->run(&s));
    }
    close_subject(&s);
    return status != TN_OK;
}

static void every_driver_call_may_fail(int and_after, int code) {
    const fault_point fault = {.and_after = and_after, .code = code};
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        int failed = fault_each(fault, run_with_fault, &scenarios[i]);
        if (code == CUDA_UNKNOWN && failed < scenarios[i].least_faults) {
            fail_msg("%s: only %d faults made it fail", scenarios[i].name, failed);
        }
    }
}

static void a_driver_call_that_fails_once_changes_nothing(void **state) {
    (void)state;
    every_driver_call_may_fail(0, CUDA_UNKNOWN);
}

static void a_driver_that_fails_from_then_on_leaves_the_blocks(void **state) {
    (void)state;
    every_driver_call_may_fail(1, CUDA_UNKNOWN);
}

/* Memory that is short for one call, or for good, in the middle of anything. */
static void memory_that_runs_out_anywhere_changes_nothing(void **state) {
    (void)state;
    every_driver_call_may_fail(0, CUDA_OUT_OF_MEMORY);
    every_driver_call_may_fail(1, CUDA_OUT_OF_MEMORY);
}

static void host_memory_that_fails_changes_nothing(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        for (int and_after = 0; and_after < 2; and_after++) {
            const fault_point fault = {.is_host = 1, .and_after = and_after};
            int failed = fault_each(fault, run_with_fault, &scenarios[i]);
            if (failed < scenarios[i].least_host_faults) {
                fail_msg("%s: only %d host faults made it fail", scenarios[i].name, failed);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_driver_call_that_fails_once_changes_nothing),
        cmocka_unit_test(a_driver_that_fails_from_then_on_leaves_the_blocks),
        cmocka_unit_test(memory_that_runs_out_anywhere_changes_nothing),
        cmocka_unit_test(host_memory_that_fails_changes_nothing),
    };
    return cmocka_run_group_tests_name("fault/pool_faults", tests, NULL, NULL);
}
