/* The N-th failure of every driver call and every host allocation of every call on a graph pool,
 * once and from then on: the call fails and has changed nothing, the capture that it is made in
 * goes on, and the call succeeds afterwards. */
#include <string.h>

#include "driver.h"
#include "fault_loop_support.h"
#include "host_alloc.h"
#include "test_graphs.h"

#define MIB MIB_BYTES

enum { CUDA_UNKNOWN = 999 };

typedef struct subject {
    tn_device *device;
    tn_pool *pool;
    tn_pool *created;
    tn_stream a;
    tn_stream b;
    tn_graph_memory memory; /* of a graph that was captured before; 0: released */
    tn_graph_memory made;
    test_graph graph;
    tn_checkpoint *checkpoint;
    tn_checkpoint *taken;
    void *results[3];
    void *block;
} subject;

typedef struct scenario {
    fault_scenario of;
    void (*setup)(subject *s);
    tn_status (*run)(subject *s);
    int is_in_capture; /* the run is made while stream a captures */
} scenario;

/* ---- scenarios ------------------------------------------------------------------------------- */

static void nothing(subject *s) { (void)s; }

static void stream_captures(subject *s) {
    test_capture_begin(s->device, s->a, TEST_CAPTURE_GLOBAL);
}

static void a_capture(subject *s) {
    stream_captures(s);
    EXPECT_OK(tn_graph_capture_begin(s->pool, s->a));
}

static void a_capture_with_a_block(subject *s) {
    a_capture(s);
    EXPECT_OK(tn_alloc(s->pool, 4 * MIB, s->a, NULL, &s->block));
}

static void a_capture_with_a_fork(subject *s) {
    a_capture_with_a_block(s);
    EXPECT_OK(tn_stream_wait(s->device, s->b, s->a));
}

/* Results 1 and 2 are free again, one of them in use on stream b. */
static void a_checkpoint(subject *s) {
    EXPECT_OK(tn_pool_checkpoint(s->pool, &s->checkpoint));
    EXPECT_OK(tn_stream_wait(s->device, s->b, s->a));
    test_sim_read(s->device, s->b, s->results[1], MIB, 1e5);
    EXPECT_OK(tn_record_use(s->results[1], s->b));
    EXPECT_OK(tn_free(s->results[1], s->a));
    EXPECT_OK(tn_free(s->results[2], s->b));
}

static tn_status create(subject *s) {
    TN_TRY(tn_graph_pool_create(s->device, NULL, &s->created));
    return tn_pool_destroy(s->created);
}

static tn_status begin(subject *s) { return tn_graph_capture_begin(s->pool, s->a); }
static tn_status take(subject *s) { return tn_alloc(s->pool, 40 * MIB, s->a, NULL, &s->block); }
static tn_status give(subject *s) {
    tn_status status = tn_free(s->block, s->a);
    if (status == TN_OK) s->block = NULL;
    return status;
}
static tn_status use(subject *s) { return tn_record_use(s->block, s->b); }
static tn_status end(subject *s) { return tn_graph_capture_end(s->pool, &s->made); }
static tn_status abort_capture(subject *s) {
    tn_status status = tn_graph_capture_abort(s->pool);
    if (status == TN_OK) s->block = NULL;
    return status;
}
static tn_status release(subject *s) {
    tn_status status = tn_graph_memory_release(s->pool, s->memory, s->b);
    if (status == TN_OK) s->memory = 0;
    return status;
}
static tn_status checkpoint(subject *s) { return tn_pool_checkpoint(s->pool, &s->taken); }
static tn_status restore(subject *s) { return tn_pool_restore(s->pool, s->checkpoint, s->a); }

static const scenario scenarios[] = {
    {{"create", 0, 2}, nothing, create, 0},
    {{"begin", 1, 0}, stream_captures, begin, 1},
    {{"alloc", 40, 4}, a_capture, take, 1},
    {{"free", 2, 0}, a_capture_with_a_block, give, 1},
    {{"record a use", 2, 1}, a_capture_with_a_fork, use, 1},
    {{"end", 1, 0}, a_capture_with_a_block, end, 1},
    {{"abort", 0, 0}, a_capture_with_a_block, abort_capture, 1},
    {{"release", 1, 0}, nothing, release, 0},
    {{"checkpoint", 0, 1}, nothing, checkpoint, 0},
    {{"restore", 3, 0}, a_checkpoint, restore, 0},
};

/* ---- one run --------------------------------------------------------------------------------- */

static void open_subject(subject *s, const scenario *plan) {
    memset(s, 0, sizeof *s);
    s->device = test_open_sim(0, 0);
    s->pool = test_open_graph_pool(s->device, TN_BACKING_VMM);
    s->a = test_open_stream(s->device);
    s->b = test_open_stream(s->device);
    a_capture(s);
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_alloc(s->pool, (size_t)(i + 1) * MIB, s->a, NULL, &s->results[i]));
    EXPECT_OK(tn_graph_capture_end(s->pool, &s->memory));
    s->graph = test_capture_end(s->device, s->a);
    plan->setup(s);
}

static void close_capture(subject *s, const scenario *plan) {
    test_graph graph = test_capture_end(s->device, s->a);
    test_graph_destroy(s->device, &graph);
    if (s->made) {
        if (s->block) EXPECT_OK(tn_free(s->block, s->a));
        EXPECT_OK(tn_graph_memory_release(s->pool, s->made, s->a));
    } else if (plan->run != abort_capture) {
        EXPECT_OK(tn_graph_capture_abort(s->pool));
    }
}

static void close_subject(subject *s, const scenario *plan) {
    if (plan->is_in_capture) close_capture(s, plan);
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_free(s->results[i], s->a));
    test_graph_destroy(s->device, &s->graph);
    if (s->memory) EXPECT_OK(tn_graph_memory_release(s->pool, s->memory, s->a));
    tn_checkpoint_destroy(s->checkpoint);
    tn_checkpoint_destroy(s->taken);
    EXPECT_OK(tn_device_synchronize(s->device));
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_stream_destroy(s->device, s->a));
    EXPECT_OK(tn_stream_destroy(s->device, s->b));
    test_close_sim(s->device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* What the driver refuses to take back, while it refuses everything, the pool keeps. */
static void expect_unchanged(subject *s, const scenario *plan, const tn_pool_stats *before,
                             int keeps_more) {
    tn_pool_stats after = test_pool_stats(s->pool);
    assert_int_equal(after.live_bytes, before->live_bytes);
    assert_int_equal(after.live_blocks, before->live_blocks);
    assert_int_equal(after.allocs, before->allocs);
    assert_int_equal(after.frees, before->frees);
    assert_int_equal(after.peak_live_bytes, before->peak_live_bytes);
    if (!keeps_more) assert_int_equal(after.reserved_bytes, before->reserved_bytes);
    assert_int_equal(s->made, 0);
    assert_null(s->taken);
    if (plan->is_in_capture) assert_true(test_is_capturing(s->device, s->a));
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
        if (fault->is_host)
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        else
            EXPECT_ERROR_HAS(" failed: CUDA_ERROR_UNKNOWN");
        expect_unchanged(&s, plan, &before, !fault->is_host && fault->and_after);
        EXPECT_OK(plan->run(&s));
    }
    close_subject(&s, plan);
    return status != TN_OK;
}

static void fail_everywhere(int is_host) {
    fault_everywhere(is_host, CUDA_UNKNOWN, run_with_fault, scenarios, sizeof *scenarios,
                     sizeof scenarios / sizeof *scenarios);
}

static void every_driver_call_may_fail(void **state) {
    (void)state;
    fail_everywhere(0);
}

static void every_host_allocation_may_fail(void **state) {
    (void)state;
    fail_everywhere(1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_driver_call_may_fail),
        cmocka_unit_test(every_host_allocation_may_fail),
    };
    return cmocka_run_group_tests_name("fault/graph_faults", tests, NULL, NULL);
}
