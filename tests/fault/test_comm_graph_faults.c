/* The N-th failure of every driver call and every host allocation of every call about captured
 * collectives, once and from then on: what fails has changed nothing, the capture that it was made
 * in is given up at most, and all of it succeeds afterwards. But for the end of a launch: what is
 * on the stream and can be ordered by nobody is the communicator's failure.
 */
#include "comm.h"
#include "fault_loop_support.h"
#include "host_alloc.h"
#include "tenure_simulated.h"
#include "test_graphs.h"

enum { CUDA_UNKNOWN = 999, BYTES = 4096 };

typedef struct subject {
    tn_device *device;
    tn_pool *pool;
    tn_stream a, b;
    tn_comm *comm;
    char *block;
    test_graph graph;
    tn_comm_graph *captured; /* of it */
    tn_comm_graph *made;
    int is_in_capture;
} subject;

typedef struct scenario {
    fault_scenario of;
    void (*setup)(subject *s);
    tn_status (*run)(subject *s);
    int may_fail_for_good; /* the communicator may */
} scenario;

/* ---- scenarios ------------------------------------------------------------------------------ */

static void nothing(subject *s) { (void)s; }

static void stream_captures(subject *s) {
    test_capture_begin(s->device, s->a, TEST_CAPTURE_GLOBAL);
    s->is_in_capture = 1;
}

static void a_capture(subject *s) {
    stream_captures(s);
    EXPECT_OK(tn_comm_capture_begin(s->comm, s->a));
}

/* The next collective is on another stream than the last. */
static void a_capture_with_a_fork(subject *s) {
    a_capture(s);
    EXPECT_OK(tn_barrier(s->comm, s->a));
    EXPECT_OK(tn_stream_wait(s->device, s->b, s->a));
}

static void a_launch(subject *s) {
    EXPECT_OK(tn_comm_graph_launch_begin(s->captured, s->a));
    test_graph_launch(s->device, &s->graph, s->a);
}

static tn_status begin(subject *s) { return tn_comm_capture_begin(s->comm, s->a); }

static tn_status gather(subject *s) {
    return tn_all_gather(s->comm, s->block, s->block, BYTES / 4, s->a);
}

static tn_status gather_beside(subject *s) {
    TN_TRY(tn_all_gather(s->comm, s->block, s->block, BYTES / 4, s->b));
    return tn_stream_wait(s->device, s->a, s->b);
}

static tn_status group(subject *s) {
    TN_TRY(tn_comm_group_begin(s->comm));
    tn_status status = tn_broadcast(s->comm, s->block, 100, 0, s->a);
    if (status == TN_OK) status = tn_broadcast(s->comm, s->block + 100, 100, 1, s->a);
    if (status == TN_OK) status = tn_comm_group_end(s->comm, s->a);
    if (status != TN_OK) tn_comm_group_cancel(s->comm);
    return status;
}

static tn_status end(subject *s) { return tn_comm_capture_end(s->comm, &s->made); }

/* On a stream that is not the last one's, and has to wait. */
static tn_status begin_launch(subject *s) {
    TN_TRY(tn_comm_graph_launch_begin(s->captured, s->b));
    tn_comm_graph_launch_cancel(s->captured);
    return TN_OK;
}

static tn_status end_launch(subject *s) { return tn_comm_graph_launch_end(s->captured); }

static tn_status destroy(subject *s) {
    TN_TRY(tn_comm_graph_destroy(s->captured));
    s->captured = NULL;
    return TN_OK;
}

static const scenario scenarios[] = {
    {{"capture_begin", 1, 1}, stream_captures, begin, 0},
    {{"gather", 4, 0}, a_capture, gather, 0},
    {{"gather beside", 5, 0}, a_capture_with_a_fork, gather_beside, 0},
    {{"group", 4, 0}, a_capture, group, 0},
    {{"capture_end", 1, 0}, a_capture, end, 0},
    {{"launch_begin", 2, 0}, nothing, begin_launch, 0},
    {{"launch_end", 1, 0}, a_launch, end_launch, 1},
    {{"graph_destroy", 0, 0}, nothing, destroy, 0},
};

/* ---- one run -------------------------------------------------------------------------------- */

static void open_subject(subject *s) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    *s = (subject){.device = test_open_sim(0, 0)};
    s->pool = test_open_pool(s->device, TN_BACKING_AUTO, 0);
    s->a = test_open_stream(s->device);
    s->b = test_open_stream(s->device);
    s->block = test_take(s->pool, BYTES, s->a);
    config.device = s->device;
    config.engine = TN_COMM_SIMULATED;
    config.rank_count = 4;
    EXPECT_OK(tn_comm_create(&config, &s->comm));
    test_capture_begin(s->device, s->a, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_comm_capture_begin(s->comm, s->a));
    EXPECT_OK(gather(s));
    EXPECT_OK(tn_comm_capture_end(s->comm, &s->captured));
    s->graph = test_capture_end(s->device, s->a);
    EXPECT_OK(gather(s));
}

static void give_up(subject *s) {
    tn_comm_capture_abort(s->comm);
    if (test_is_capturing(s->device, s->b)) EXPECT_OK(tn_stream_wait(s->device, s->a, s->b));
    test_graph graph = test_capture_end(s->device, s->a);
    test_graph_destroy(s->device, &graph);
    s->is_in_capture = 0;
}

static void close_subject(subject *s, tn_status failure) {
    if (s->is_in_capture) give_up(s);
    EXPECT_OK(tn_comm_graph_destroy(s->made));
    test_graph_destroy(s->device, &s->graph);
    EXPECT_OK(tn_comm_graph_destroy(s->captured));
    EXPECT_STATUS(tn_comm_destroy(s->comm), failure);
    test_give(s->pool, s->block, s->a);
    EXPECT_OK(tn_device_synchronize(s->device));
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_stream_destroy(s->device, s->a));
    EXPECT_OK(tn_stream_destroy(s->device, s->b));
    test_close_sim(s->device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static tn_comm_stats stats_of(const subject *s) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(s->comm, &stats));
    return stats;
}

/* A call that was captured in part says so: then, and only then, the capture is of no use. */
static void expect_again(subject *s, const scenario *plan) {
    const tn_status status = plan->run(s);
    if (status == TN_OK) return;
    assert_int_equal(status, TN_INVALID_STATE);
    EXPECT_ERROR_HAS("a call was captured in part");
    EXPECT_STATUS(end(s), TN_INVALID_STATE);
    assert_int_equal(test_is_capturing(s->device, s->a), 1);
}

static int run_with_fault(const void *argument, fault_point *fault) {
    const scenario *plan = argument;
    tn_status failure = TN_OK;
    subject s;
    open_subject(&s);
    plan->setup(&s);
    const tn_comm_stats before = stats_of(&s);
    fault_begin(fault);
    const tn_status status = plan->run(&s);
    fault_end(fault);
    if (status != TN_OK) {
        const tn_comm_stats after = stats_of(&s);
        assert_memory_equal(&before, &after, sizeof before);
        if (!fault->is_host) EXPECT_ERROR_HAS(" failed: CUDA_ERROR_UNKNOWN");
        if (s.is_in_capture) assert_int_equal(test_is_capturing(s.device, s.a), 1);
        if (plan->may_fail_for_good) {
            EXPECT_STATUS(tn_barrier(s.comm, s.b), TN_COMM_ERROR);
            failure = TN_COMM_ERROR;
        } else {
            expect_again(&s, plan);
        }
    }
    close_subject(&s, failure);
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
    return cmocka_run_group_tests_name("fault/comm_graph_faults", tests, NULL, NULL);
}
