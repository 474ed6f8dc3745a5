/* Stream capture and graphs of the simulated driver: what is captured runs at launches and not
 * before, launches take part in the race detection, and each rule of a capture, kept and broken. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "simcuda_support.h"

#define BYTES (2 * MIB)

enum {
    GLOBAL = CU_STREAM_CAPTURE_MODE_GLOBAL,
    THREAD_LOCAL = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    RELAXED = CU_STREAM_CAPTURE_MODE_RELAXED,
    NONE = CU_STREAM_CAPTURE_STATUS_NONE,
    ACTIVE = CU_STREAM_CAPTURE_STATUS_ACTIVE,
    INVALID = CU_STREAM_CAPTURE_STATUS_INVALIDATED
};

static const simcuda_calls *cu;
static CUstream first, second, third;
static CUevent event, other_event;
static simcuda_block block;
static CUgraph graph;
static CUgraphExec exec;

static int start(int backed) {
    cu = simcuda_start(0, backed);
    first = simcuda_stream();
    second = simcuda_stream();
    third = simcuda_stream();
    EXPECT_CUDA_OK(cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    EXPECT_CUDA_OK(cu->cuEventCreate(&other_event, CU_EVENT_DISABLE_TIMING));
    block = simcuda_block_create(BYTES, 2);
    graph = NULL;
    exec = NULL;
    return 0;
}

static int set_up(void **state) {
    (void)state;
    return start(0);
}

static int set_up_backed(void **state) {
    (void)state;
    return start(1);
}

static int tear_down(void **state) {
    (void)state;
    if (exec) EXPECT_CUDA_OK(cu->cuGraphExecDestroy(exec));
    if (graph) EXPECT_CUDA_OK(cu->cuGraphDestroy(graph));
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    simcuda_block_destroy(&block);
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(event));
    EXPECT_CUDA_OK(cu->cuEventDestroy_v2(other_event));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(first));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(second));
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(third));
    simcuda_end();
    return 0;
}

static void write_on(CUstream stream) {
    EXPECT_CUDA_OK(simcuda_write(stream, block.address, BYTES));
}

static void order(CUstream earlier, CUstream later, CUevent by) {
    EXPECT_CUDA_OK(cu->cuEventRecord(by, earlier));
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(later, by, 0));
}

static void begin(CUstream stream, int mode) {
    EXPECT_CUDA_OK(cu->cuStreamBeginCapture_v2(stream, mode));
}

static void end_and_instantiate(CUstream stream) {
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(stream, &graph));
    EXPECT_CUDA_OK(cu->cuGraphInstantiateWithFlags(&exec, graph, 0));
}

static void launch_on(CUstream stream) { EXPECT_CUDA_OK(cu->cuGraphLaunch(exec, stream)); }

static void expect_races(uint64_t count) { assert_int_equal(cu->tnsim_race_count(), count); }

static void expect_status(CUstream stream, int expected) {
    int status = -1;
    EXPECT_CUDA_OK(cu->cuStreamIsCapturing(stream, &status));
    assert_int_equal(status, expected);
}

/* Ends a capture that something has spoiled. */
static void end_invalid(CUstream stream) {
    CUgraph none = (CUgraph)&none;
    expect_status(stream, INVALID);
    EXPECT_CUDA(cu->cuStreamEndCapture(stream, &none), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    assert_null(none);
    expect_status(stream, NONE);
}

/* ---- what is captured ------------------------------------------------------------------------ */

static void work_runs_at_launches_and_not_before(void **state) {
    volatile const unsigned char *bytes;
    (void)state;
    bytes = (const unsigned char *)(uintptr_t)block.address;
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 1, BYTES, first));
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 7, BYTES, first));
    EXPECT_CUDA_OK(cu->cuMemcpyAsync(block.address + BYTES, block.address, BYTES, first));
    end_and_instantiate(first);
    assert_int_equal(bytes[0], 1);
    launch_on(first);
    assert_int_equal(bytes[0], 7);
    assert_int_equal(bytes[2 * BYTES - 1], 7);
    EXPECT_CUDA_OK(cu->cuMemsetD8Async(block.address, 2, 2 * BYTES, first));
    launch_on(first);
    assert_int_equal(bytes[0], 7);
    assert_int_equal(bytes[2 * BYTES - 1], 7);
}

static void count_up(void *argument) { ++*(int *)argument; }

static void host_functions_run_at_each_launch(void **state) {
    int calls = 0;
    (void)state;
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(cu->cuLaunchHostFunc(first, count_up, &calls));
    end_and_instantiate(first);
    assert_int_equal(calls, 0);
    for (int i = 1; i <= 3; i++) {
        launch_on(first);
        assert_int_equal(calls, i);
    }
}

/* Two branches of 1000 us are as long as one. */
static void branches_run_side_by_side(void **state) {
    double before;
    (void)state;
    begin(first, GLOBAL);
    order(first, second, event);
    EXPECT_CUDA_OK(cu->tnsim_launch(first, "left", NULL, 0, 1000));
    EXPECT_CUDA_OK(cu->tnsim_launch(second, "right", NULL, 0, 1000));
    order(second, first, event);
    EXPECT_CUDA_OK(cu->tnsim_launch(first, "both", NULL, 0, 500));
    end_and_instantiate(first);
    launch_on(third);
    before = cu->tnsim_now_us();
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(third));
    assert_true(cu->tnsim_now_us() - before > 1490);
    assert_true(cu->tnsim_now_us() - before <= 1500);
}

/* ---- launches and races ---------------------------------------------------------------------- */

static void capture_write(CUstream stream) {
    begin(stream, GLOBAL);
    write_on(stream);
    end_and_instantiate(stream);
}

static void a_capture_alone_touches_nothing(void **state) {
    (void)state;
    write_on(second);
    capture_write(first);
    expect_races(0);
}

static void a_launch_comes_after_its_stream_and_before_what_follows(void **state) {
    (void)state;
    capture_write(first);
    write_on(second);
    launch_on(second);
    write_on(second);
    order(second, first, event);
    write_on(first);
    expect_races(0);
}

static void a_launch_races_with_unordered_work(void **state) {
    (void)state;
    capture_write(first);
    launch_on(first);
    write_on(second);
    expect_races(1);
    assert_non_null(strstr(cu->tnsim_race_text(0), "does not wait for write"));
}

/* Memory that a graph uses was given to another stream between two launches. */
static void the_next_launch_races_with_what_came_between(void **state) {
    (void)state;
    capture_write(first);
    launch_on(first);
    order(first, second, event);
    write_on(second);
    expect_races(0);
    launch_on(first);
    expect_races(1);
}

static void a_take_between_launches_must_come_after_the_last(void **state) {
    (void)state;
    capture_write(first);
    launch_on(first);
    EXPECT_CUDA_OK(cu->tnsim_take(second, (void *)(uintptr_t)block.address, BYTES));
    expect_races(1);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(first));
    EXPECT_CUDA_OK(cu->tnsim_take(third, (void *)(uintptr_t)block.address, BYTES));
    expect_races(1);
}

static void launches_of_one_graph_are_in_order_on_any_streams(void **state) {
    (void)state;
    capture_write(first);
    launch_on(first);
    launch_on(second);
    launch_on(third);
    expect_races(0);
}

static void branches_that_nothing_orders_race_at_each_launch(void **state) {
    (void)state;
    begin(first, GLOBAL);
    order(first, second, event);
    write_on(first);
    write_on(second);
    order(second, first, event);
    end_and_instantiate(first);
    expect_races(0);
    launch_on(first);
    expect_races(1);
    launch_on(first);
    expect_races(2);
}

/* A branch waits for the node that it was forked at, not for what its lane did after it. */
static void a_branch_waits_for_just_its_node(void **state) {
    (void)state;
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(simcuda_write(first, block.address + BYTES, BYTES));
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    write_on(first);
    EXPECT_CUDA_OK(cu->cuStreamWaitEvent(second, event, 0));
    EXPECT_CUDA_OK(simcuda_write(second, block.address + BYTES, BYTES));
    write_on(second);
    order(second, first, event);
    end_and_instantiate(first);
    launch_on(first);
    expect_races(1);
}

static void what_a_graph_touches_must_still_be_mapped(void **state) {
    simcuda_block gone;
    (void)state;
    gone = simcuda_block_create(BYTES, 1);
    begin(first, RELAXED);
    EXPECT_CUDA_OK(simcuda_write(first, gone.address, BYTES));
    end_and_instantiate(first);
    simcuda_block_destroy(&gone);
    EXPECT_CUDA(cu->cuGraphLaunch(exec, first), CUDA_ERROR_ILLEGAL_ADDRESS);
    /* The context is dead: only a new configuration helps. */
    cu = simcuda_start(0, 0);
    start(0);
}

/* ---- calls that a capture forbids ------------------------------------------------------------ */

static CUresult call_alloc(void) {
    CUdeviceptr address = 0;
    CUresult result = cu->cuMemAlloc_v2(&address, BYTES);
    if (result == CUDA_SUCCESS) EXPECT_CUDA_OK(cu->cuMemFree_v2(address));
    return result;
}
static CUresult call_reserve(void) {
    CUdeviceptr address = 0;
    CUresult result = cu->cuMemAddressReserve(&address, BYTES, 0, 0, 0);
    if (result == CUDA_SUCCESS) EXPECT_CUDA_OK(cu->cuMemAddressFree(address, BYTES));
    return result;
}
static CUresult call_event_query(void) { return cu->cuEventQuery(other_event); }
static CUresult call_event_synchronize(void) { return cu->cuEventSynchronize(other_event); }

static CUresult (*const unsafe_calls[])(void) = {call_alloc, call_reserve, call_event_query,
                                                 call_event_synchronize};
#define UNSAFE_COUNT (sizeof unsafe_calls / sizeof unsafe_calls[0])

typedef struct mode_row {
    int capture_mode;
    int thread_mode;
    int is_other_thread;
    int is_allowed;
} mode_row;

static const mode_row mode_rows[] = {
    {GLOBAL, GLOBAL, 0, 0},       {GLOBAL, THREAD_LOCAL, 0, 0},       {GLOBAL, RELAXED, 0, 1},
    {THREAD_LOCAL, GLOBAL, 0, 0}, {THREAD_LOCAL, THREAD_LOCAL, 0, 0}, {THREAD_LOCAL, RELAXED, 0, 1},
    {RELAXED, GLOBAL, 0, 1},      {RELAXED, THREAD_LOCAL, 0, 1},      {RELAXED, RELAXED, 0, 1},
    {GLOBAL, GLOBAL, 1, 0},       {GLOBAL, THREAD_LOCAL, 1, 1},       {GLOBAL, RELAXED, 1, 1},
    {THREAD_LOCAL, GLOBAL, 1, 1}, {THREAD_LOCAL, THREAD_LOCAL, 1, 1}, {THREAD_LOCAL, RELAXED, 1, 1},
    {RELAXED, GLOBAL, 1, 1},      {RELAXED, THREAD_LOCAL, 1, 1},      {RELAXED, RELAXED, 1, 1},
};

typedef struct unsafe_attempt {
    CUresult (*call)(void);
    int mode;
    CUresult result;
} unsafe_attempt;

static void attempt(unsafe_attempt *what) {
    int mode = what->mode;
    EXPECT_CUDA_OK(cu->cuThreadExchangeStreamCaptureMode(&mode));
    what->result = what->call();
    EXPECT_CUDA_OK(cu->cuThreadExchangeStreamCaptureMode(&mode));
    assert_int_equal(mode, what->mode);
}

static void *attempt_elsewhere(void *argument) {
    CUcontext context;
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(context));
    attempt(argument);
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRelease_v2(0));
    return NULL;
}

static void check_mode_row(const mode_row *row, CUresult (*call)(void)) {
    unsafe_attempt what = {call, row->thread_mode, CUDA_SUCCESS};
    CUgraph made = NULL;
    begin(first, row->capture_mode);
    if (row->is_other_thread) {
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, attempt_elsewhere, &what), 0);
        pthread_join(thread, NULL);
    } else {
        attempt(&what);
    }
    if (!row->is_allowed) {
        assert_int_equal(what.result, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        end_invalid(first);
        return;
    }
    assert_int_equal(what.result, CUDA_SUCCESS);
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(first, &made));
    EXPECT_CUDA_OK(cu->cuGraphDestroy(made));
}

static void unsafe_calls_go_by_the_modes(void **state) {
    (void)state;
    for (size_t row = 0; row < sizeof mode_rows / sizeof mode_rows[0]; row++) {
        for (size_t call = 0; call < UNSAFE_COUNT; call++)
            check_mode_row(&mode_rows[row], unsafe_calls[call]);
    }
}

static CUresult synchronize_stream(void) { return cu->cuStreamSynchronize(first); }
static CUresult query_stream(void) { return cu->cuStreamQuery(first); }
static CUresult synchronize_device(void) { return cu->cuCtxSynchronize(); }
static CUresult record_device(void) {
    CUcontext context = NULL;
    EXPECT_CUDA_OK(cu->cuCtxGetCurrent(&context));
    return cu->cuCtxRecordEvent(context, event);
}
static CUresult ask_id(void) {
    unsigned long long id = 0;
    return cu->cuStreamGetId(first, &id);
}
static CUresult destroy_stream(void) { return cu->cuStreamDestroy_v2(first); }

/* A capturing stream is at no point in time: no mode allows a question about that. */
static void a_capturing_stream_can_not_be_waited_for(void **state) {
    CUresult (*const calls[])(void) = {synchronize_stream, query_stream, synchronize_device,
                                       record_device,      ask_id,       destroy_stream};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        unsafe_attempt what = {calls[i], RELAXED, CUDA_SUCCESS};
        begin(first, RELAXED);
        attempt(&what);
        assert_int_equal(what.result, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        end_invalid(first);
    }
}

static void another_stream_can_be_waited_for(void **state) {
    (void)state;
    write_on(second);
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(cu->cuStreamSynchronize(second));
    expect_status(first, ACTIVE);
    write_on(first);
    end_and_instantiate(first);
    launch_on(first);
    expect_races(0);
}

static void a_captured_event_can_not_be_asked(void **state) {
    CUresult (*const calls[])(CUevent) = {cu->cuEventQuery, cu->cuEventSynchronize};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        int mode = RELAXED;
        begin(first, GLOBAL);
        EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
        EXPECT_CUDA_OK(cu->cuThreadExchangeStreamCaptureMode(&mode));
        EXPECT_CUDA(calls[i](event), CUDA_ERROR_CAPTURED_EVENT);
        EXPECT_CUDA_OK(cu->cuThreadExchangeStreamCaptureMode(&mode));
        end_invalid(first);
        EXPECT_CUDA(calls[i](event), CUDA_ERROR_CAPTURED_EVENT);
        EXPECT_CUDA(cu->cuStreamWaitEvent(second, event, 0), CUDA_ERROR_CAPTURED_EVENT);
        EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
        EXPECT_CUDA_OK(cu->cuEventSynchronize(event));
    }
}

/* ---- streams in and out of captures ---------------------------------------------------------- */

static void a_fork_is_in_the_capture_until_its_end(void **state) {
    uint64_t id = 0, later = 0;
    int status = -1;
    (void)state;
    begin(first, GLOBAL);
    expect_status(second, NONE);
    order(first, second, event);
    expect_status(second, ACTIVE);
    EXPECT_CUDA_OK(cu->cuStreamGetCaptureInfo_v2(first, &status, &id, NULL, NULL, NULL));
    EXPECT_CUDA_OK(cu->cuStreamGetCaptureInfo_v3(second, &status, &later, NULL, NULL, NULL, NULL));
    assert_int_equal(id, later);
    write_on(second);
    order(second, first, event);
    end_and_instantiate(first);
    expect_status(first, NONE);
    expect_status(second, NONE);
    begin(second, GLOBAL);
    EXPECT_CUDA_OK(cu->cuStreamGetCaptureInfo_v2(second, &status, &later, NULL, NULL, NULL));
    assert_true(later > id);
    EXPECT_CUDA(cu->cuStreamBeginCapture_v2(second, GLOBAL), CUDA_ERROR_ILLEGAL_STATE);
    EXPECT_CUDA_OK(cu->cuGraphDestroy(graph));
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(second, &graph));
}

static void what_was_not_joined_is_found_at_the_end(void **state) {
    CUgraph none = NULL;
    (void)state;
    begin(first, GLOBAL);
    order(first, second, event);
    write_on(second);
    EXPECT_CUDA(cu->cuStreamEndCapture(first, &none), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    assert_null(none);
    expect_status(first, NONE);
    expect_status(second, NONE);
}

static void a_capture_ends_where_it_began(void **state) {
    CUgraph none = NULL;
    (void)state;
    EXPECT_CUDA(cu->cuStreamEndCapture(first, &none), CUDA_ERROR_ILLEGAL_STATE);
    begin(first, GLOBAL);
    order(first, second, event);
    EXPECT_CUDA(cu->cuStreamEndCapture(second, &none), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    end_invalid(first);
}

static void *end_elsewhere(void *argument) {
    CUcontext context;
    CUresult *result = argument;
    CUgraph made = NULL;
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(context));
    *result = cu->cuStreamEndCapture(first, &made);
    if (*result == CUDA_SUCCESS) EXPECT_CUDA_OK(cu->cuGraphDestroy(made));
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRelease_v2(0));
    return NULL;
}

static void only_a_relaxed_capture_ends_in_another_thread(void **state) {
    CUresult result = CUDA_SUCCESS;
    pthread_t thread;
    (void)state;
    begin(first, THREAD_LOCAL);
    assert_int_equal(pthread_create(&thread, NULL, end_elsewhere, &result), 0);
    pthread_join(thread, NULL);
    assert_int_equal(result, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(first, &graph));
    begin(first, RELAXED);
    assert_int_equal(pthread_create(&thread, NULL, end_elsewhere, &result), 0);
    pthread_join(thread, NULL);
    assert_int_equal(result, CUDA_SUCCESS);
}

static void work_outside_can_not_be_waited_for(void **state) {
    (void)state;
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(
        cu->cuStreamWaitEvent(first, event, 0)); /* never recorded: nothing to wait for */
    write_on(second);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, second));
    EXPECT_CUDA(cu->cuStreamWaitEvent(first, event, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    EXPECT_CUDA(simcuda_write(first, block.address, BYTES), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    end_invalid(first);
}

static void two_captures_can_not_be_merged(void **state) {
    (void)state;
    begin(first, GLOBAL);
    begin(second, GLOBAL);
    EXPECT_CUDA_OK(cu->cuEventRecord(event, first));
    EXPECT_CUDA(cu->cuStreamWaitEvent(second, event, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
    end_invalid(first);
    end_invalid(second);
}

static void the_legacy_stream_waits_for_no_capture(void **state) {
    CUstream blocking = NULL;
    int status = -1;
    (void)state;
    EXPECT_CUDA(cu->cuStreamBeginCapture_v2(NULL, GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_CUDA_OK(cu->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(simcuda_write(NULL, block.address, BYTES));
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(first, &graph));
    begin(blocking, GLOBAL);
    EXPECT_CUDA(cu->cuStreamIsCapturing(NULL, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    expect_status(blocking, ACTIVE);
    EXPECT_CUDA(simcuda_write(NULL, block.address, BYTES), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    end_invalid(blocking);
    EXPECT_CUDA_OK(cu->cuStreamDestroy_v2(blocking));
}

/* ---- faults, leftovers ----------------------------------------------------------------------- */

static void each_call_can_fail_without_effect(void **state) {
    CUgraph none = NULL;
    (void)state;
    EXPECT_CUDA_OK(cu->tnsim_fault("cuStreamBeginCapture_v2", 1, 0, CUDA_ERROR_UNKNOWN));
    EXPECT_CUDA(cu->cuStreamBeginCapture_v2(first, GLOBAL), CUDA_ERROR_UNKNOWN);
    expect_status(first, NONE);
    begin(first, GLOBAL);
    EXPECT_CUDA_OK(cu->tnsim_fault("cuStreamEndCapture", 1, 0, CUDA_ERROR_UNKNOWN));
    EXPECT_CUDA(cu->cuStreamEndCapture(first, &none), CUDA_ERROR_UNKNOWN);
    expect_status(first, ACTIVE);
    write_on(first);
    end_and_instantiate(first);
    EXPECT_CUDA_OK(cu->tnsim_fault("cuGraphLaunch", 1, 0, CUDA_ERROR_UNKNOWN));
    EXPECT_CUDA(cu->cuGraphLaunch(exec, first), CUDA_ERROR_UNKNOWN);
    write_on(second);
    expect_races(0);
}

static void what_is_left_is_told(void **state) {
    char text[1024];
    CUgraphExec second_exec = NULL;
    (void)state;
    capture_write(first);
    EXPECT_CUDA_OK(cu->cuGraphInstantiateWithFlags(&second_exec, graph, 0));
    begin(second, GLOBAL);
    assert_true(cu->tnsim_leftovers(text, sizeof text) >= 4);
    assert_non_null(strstr(text, "captures under way: 1"));
    assert_non_null(strstr(text, "  graphs: 1"));
    assert_non_null(strstr(text, "instantiated graphs: 2"));
    EXPECT_CUDA_OK(cu->cuGraphExecDestroy(second_exec));
    EXPECT_CUDA(cu->cuGraphExecDestroy(second_exec), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->cuGraphDestroy(graph));
    EXPECT_CUDA(cu->cuGraphDestroy(graph), CUDA_ERROR_INVALID_VALUE);
    launch_on(third); /* the exec has all that it needs */
    EXPECT_CUDA_OK(cu->cuStreamEndCapture(second, &graph));
}

int main(void) {
#define TEST(name)   cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define BACKED(name) cmocka_unit_test_setup_teardown(name, set_up_backed, tear_down)
    const struct CMUnitTest tests[] = {
        BACKED(work_runs_at_launches_and_not_before),
        TEST(host_functions_run_at_each_launch),
        TEST(branches_run_side_by_side),
        TEST(a_capture_alone_touches_nothing),
        TEST(a_launch_comes_after_its_stream_and_before_what_follows),
        TEST(a_launch_races_with_unordered_work),
        TEST(the_next_launch_races_with_what_came_between),
        TEST(a_take_between_launches_must_come_after_the_last),
        TEST(launches_of_one_graph_are_in_order_on_any_streams),
        TEST(branches_that_nothing_orders_race_at_each_launch),
        TEST(a_branch_waits_for_just_its_node),
        TEST(what_a_graph_touches_must_still_be_mapped),
        TEST(unsafe_calls_go_by_the_modes),
        TEST(a_capturing_stream_can_not_be_waited_for),
        TEST(another_stream_can_be_waited_for),
        TEST(a_captured_event_can_not_be_asked),
        TEST(a_fork_is_in_the_capture_until_its_end),
        TEST(what_was_not_joined_is_found_at_the_end),
        TEST(a_capture_ends_where_it_began),
        TEST(only_a_relaxed_capture_ends_in_another_thread),
        TEST(work_outside_can_not_be_waited_for),
        TEST(two_captures_can_not_be_merged),
        TEST(the_legacy_stream_waits_for_no_capture),
        TEST(each_call_can_fail_without_effect),
        TEST(what_is_left_is_told),
    };
    return cmocka_run_group_tests_name("unit/simcuda_capture", tests, NULL, NULL);
}
