/* Collectives in captured graphs, of a simulated rank: what a launch runs, counts and orders, which
 * calls a capture makes, and what is refused without harm to the capture. */
#include <dlfcn.h>
#include <string.h>

#include "comm.h"
#include "host_alloc.h"
#include "tenure_checkpoint.h"
#include "tenure_parallel.h"
#include "tenure_ring.h"
#include "tenure_simulated.h"
#include "test_comm_step.h"
#include "test_graphs.h"

enum { RANKS = 4, PART = 1 << 20, LAUNCHES = 100, IN_A_GRAPH = 4 };

static tn_device *device;
static tn_pool *pool;
static tn_stream a, b;
static tn_comm *comm;
static char *block; /* RANKS parts */

/* ---- what runs ------------------------------------------------------------------------------ */

static struct {
    int collectives;
    int kernels;
    int overlaps; /* collectives that begin before the one before has ended */
    double end_us;
} seen;

static void note(void *context, const tnsim_interval *interval) {
    (void)context;
    if (strcmp(interval->what, "kernel") == 0) {
        seen.kernels++;
        return;
    }
    seen.collectives++;
    seen.overlaps += interval->begin_us < seen.end_us;
    seen.end_us = interval->end_us;
}

static tn_comm *open_comm_of(tn_comm_engine engine) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *made = NULL;
    config.device = device;
    config.engine = engine;
    config.rank = 1, config.rank_count = RANKS;
    EXPECT_OK(tn_comm_create(&config, &made));
    return made;
}

static int set_up(void **state) {
    (void)state;
    device = test_open_sim(0, 0);
    pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    a = test_open_stream(device);
    b = test_open_stream(device);
    comm = open_comm_of(TN_COMM_SIMULATED);
    block = test_take(pool, (size_t)RANKS * PART, a);
    memset(&seen, 0, sizeof seen);
    test_sim_get()->watch(note, NULL);
    return 0;
}

/* Fails if a race was seen, or anything is left. */
static int tear_down(void **state) {
    (void)state;
    test_sim_get()->watch(NULL, NULL);
    EXPECT_OK(tn_comm_destroy(comm));
    test_give(pool, block, a);
    EXPECT_OK(tn_stream_synchronize(device, b));
    EXPECT_OK(tn_stream_destroy(device, a));
    EXPECT_OK(tn_stream_destroy(device, b));
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
    assert_int_equal(tn__host_live_blocks(), 0);
    return 0;
}

/* ---- a graph -------------------------------------------------------------------------------- */

static tn_status gather(tn_stream stream) {
    return tn_all_gather(comm, block + PART, block, PART, stream);
}

static tn_status reduce(tn_stream stream) {
    return tn_all_reduce(comm, block, block, PART, TN_FP32, TN_REDUCE_SUM, stream);
}

static void kernel(tn_stream stream) {
    const tnsim_range range = {block, (size_t)RANKS * PART, 1};
    assert_int_equal(test_sim_get()->launch(stream, "kernel", &range, 1, 10.0), 0);
}

static void begin_capture(void) {
    test_capture_begin(device, a, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_comm_capture_begin(comm, a));
}

typedef struct captured {
    test_graph graph;
    tn_comm_graph *comm_graph;
} captured;

/* A kernel, a gather, a group of two on the other stream, a reduction and a barrier. */
static captured capture_step(void) {
    captured made = {{NULL, NULL}, NULL};
    begin_capture();
    kernel(a);
    EXPECT_OK(gather(a));
    EXPECT_OK(tn_stream_wait(device, b, a));
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_broadcast(comm, block, 100, 1, b));
    EXPECT_OK(tn_broadcast(comm, block + PART, 100, 0, b));
    EXPECT_OK(tn_comm_group_end(comm, b));
    EXPECT_OK(reduce(a)); /* behind the group, by the communicator's order alone */
    kernel(a);
    EXPECT_OK(tn_barrier(comm, a));
    EXPECT_OK(tn_comm_capture_end(comm, &made.comm_graph));
    made.graph = test_capture_end(device, a);
    return made;
}

static void launch(const captured *step, tn_stream stream) {
    EXPECT_OK(tn_comm_graph_launch_begin(step->comm_graph, stream));
    test_graph_launch(device, &step->graph, stream);
    EXPECT_OK(tn_comm_graph_launch_end(step->comm_graph));
}

static void destroy(captured *step) {
    test_graph_destroy(device, &step->graph);
    EXPECT_OK(tn_comm_graph_destroy(step->comm_graph));
}

static tn_comm_stats stats(void) {
    tn_comm_stats now = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(comm, &now));
    return now;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void expect_step(const tn_comm_stats *counts, uint64_t times) {
    const uint64_t others = RANKS - 1;
    assert_int_equal(counts->calls[TN_ALL_GATHER], times);
    assert_int_equal(counts->wire_bytes[TN_ALL_GATHER], times * others * PART);
    assert_int_equal(counts->calls[TN_BROADCAST], 2 * times);
    assert_int_equal(counts->wire_bytes[TN_BROADCAST], times * others * 100);
    assert_int_equal(counts->calls[TN_ALL_REDUCE], times);
    assert_int_equal(counts->calls[TN_BARRIER], times);
    assert_int_equal(counts->groups, times);
}

static void nothing_runs_or_counts_before_a_launch(void **state) {
    (void)state;
    tn_comm_graph_info info = TN_COMM_GRAPH_INFO_INIT;
    const tn_comm_stats before = stats();
    captured step = capture_step();
    const tn_comm_stats after = stats();
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(seen.collectives + seen.kernels, 0);
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(tn_comm_graph_info_get(step.comm_graph, &info));
    assert_int_equal(info.collectives, IN_A_GRAPH);
    assert_int_equal(info.launches, 0);
    expect_step(&info.counts, 1);
    destroy(&step);
}

/* Launches on both streams, calls as ever on both between them: one order, no race. */
static void launches_and_calls_are_in_one_order(void **state) {
    (void)state;
    char text[16 * 1024];
    captured step = capture_step();
    for (int i = 0; i < LAUNCHES; i++) {
        const tn_stream stream = i % 2 ? a : b, other = i % 3 ? b : a;
        EXPECT_OK(gather(other));
        launch(&step, stream);
        if (i % 5 == 0) launch(&step, other);
        EXPECT_OK(reduce(other));
    }
    const int launches = LAUNCHES + LAUNCHES / 5;
    assert_int_equal(seen.collectives, IN_A_GRAPH * launches + 2 * LAUNCHES);
    assert_int_equal(seen.kernels, 2 * launches);
    assert_int_equal(seen.overlaps, 0);
    EXPECT_OK(tn_comm_wait(comm));
    tn_comm_stats now = stats();
    assert_int_equal(now.graph_launches, launches);
    now.calls[TN_ALL_GATHER] -= LAUNCHES;
    now.wire_bytes[TN_ALL_GATHER] -= (uint64_t)LAUNCHES * (RANKS - 1) * PART;
    now.calls[TN_ALL_REDUCE] -= LAUNCHES;
    expect_step(&now, (uint64_t)launches);
    assert_true(tn_comm_report(comm, TN_REPORT_TEXT, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "captured graphs: 1\n"));
    assert_non_null(strstr(text, " graph of 4 calls, stream "));
    assert_true(tn_comm_report(comm, TN_REPORT_JSON, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "\"graphs\": 1,"));
    assert_non_null(strstr(text, "\"kind\": \"graph\", \"calls\": 4,"));
    destroy(&step);
}

/* Of the driver: two questions about the capture, the collective, a mark; a wait where the stream
 * is another one than before. A launch: a question, a mark, a wait where it is another stream. No
 * memory, no event made, asked or waited for. */
static void a_capture_makes_no_other_calls(void **state) {
    (void)state;
    EXPECT_OK(gather(a)); /* the list of calls stays */
    begin_capture();
    uint64_t host = tn__host_live_blocks(), all = test_all_calls(device);
    EXPECT_OK(gather(a));
    assert_int_equal(test_all_calls(device) - all, 4);
    EXPECT_OK(gather(a));
    assert_int_equal(test_all_calls(device) - all, 8);
    EXPECT_OK(tn_stream_wait(device, b, a));
    all = test_all_calls(device);
    const uint64_t waits = test_calls(device, TN_CALL_STREAM_WAIT);
    EXPECT_OK(gather(b));
    assert_int_equal(test_all_calls(device) - all, 5);
    assert_int_equal(test_calls(device, TN_CALL_STREAM_WAIT) - waits, 1);
    EXPECT_OK(tn_stream_wait(device, a, b));
    assert_int_equal(tn__host_live_blocks() - host, 0);
    captured step = {{NULL, NULL}, NULL};
    EXPECT_OK(tn_comm_capture_end(comm, &step.comm_graph));
    step.graph = test_capture_end(device, a);
    launch(&step, a);
    host = tn__host_live_blocks(), all = test_all_calls(device);
    for (int i = 0; i < LAUNCHES; i++)
        launch(&step, a);
    assert_int_equal(test_all_calls(device) - all, 2 * LAUNCHES);
    for (int i = 0; i < LAUNCHES; i++)
        launch(&step, i % 2 ? a : b);
    assert_int_equal(test_all_calls(device) - all, 5 * LAUNCHES);
    assert_int_equal(tn__host_live_blocks() - host, 0);
    destroy(&step);
}

/* The second capture takes no event any more; both graphs go on. */
static void captures_follow_each_other(void **state) {
    (void)state;
    captured first = capture_step();
    const uint64_t events = test_calls(device, TN_CALL_EVENT);
    captured second = capture_step();
    assert_int_equal(test_calls(device, TN_CALL_EVENT) - events, 0);
    launch(&second, a);
    launch(&first, b);
    destroy(&second);
    launch(&first, a);
    destroy(&first);
    assert_int_equal(seen.overlaps, 0);
    assert_int_equal(seen.collectives, 3 * IN_A_GRAPH);
}

/* Calls on a stream that does not capture are none of the capture's. */
static void calls_outside_go_on_meanwhile(void **state) {
    (void)state;
    captured step = {{NULL, NULL}, NULL};
    begin_capture();
    EXPECT_OK(gather(a));
    EXPECT_OK(gather(b));
    EXPECT_OK(gather(a));
    EXPECT_OK(reduce(b));
    EXPECT_OK(tn_comm_wait(comm));
    assert_int_equal(seen.collectives, 2);
    assert_int_equal(test_is_capturing(device, a), 1);
    step.graph = test_capture_end(device, a);
    EXPECT_OK(gather(a)); /* its stream's capture is over */
    EXPECT_OK(tn_comm_capture_end(comm, &step.comm_graph));
    launch(&step, b);
    assert_int_equal(seen.collectives, 5);
    assert_int_equal(seen.overlaps, 0);
    destroy(&step);
}

/* ---- a whole step --------------------------------------------------------------------------- */

/* Beside a twin whose steps are called, of the same communicator: no race, no more memory. */
static void a_whole_step_is_captured_once_and_launched_again_and_again(void **state) {
    (void)state;
    test_ops ops = {device, a, pool, {0}};
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_pool *graph_pool = test_open_graph_pool(device, TN_BACKING_AUTO);
    tn_scope root, scope;
    captured made = {{NULL, NULL}, NULL};
    tn_graph_memory memory = 0;
    config.pool = pool;
    EXPECT_OK(tn_scope_create(&config, &root));
    ops.scope = root;
    config.pool = graph_pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    test_comm_step step = test_comm_step_open(&ops, comm, b, 1);
    test_comm_step twin = test_comm_step_open(&ops, comm, b, 1);
    test_comm_step_run(&step), test_comm_step_run(&twin);
    EXPECT_OK(tn_device_synchronize(device));
    step.layer.op = step.layer.saved_scope = scope;
    begin_capture();
    EXPECT_OK(tn_graph_capture_begin(graph_pool, a));
    test_comm_step_run(&step);
    EXPECT_OK(tn_comm_capture_end(comm, &made.comm_graph));
    EXPECT_OK(tn_graph_capture_end(graph_pool, &memory));
    made.graph = test_capture_end(device, a);
    test_comm_step_run(&twin);
    const size_t physical = test_sim_get()->physical_bytes(0);
    const tn_comm_stats before = stats();
    for (int i = 0; i < LAUNCHES; i++) {
        launch(&made, a);
        test_comm_step_run(&twin);
        EXPECT_OK(reduce(b));
    }
    const tn_comm_stats after = stats();
    assert_int_equal(after.calls[TN_ALL_REDUCE] - before.calls[TN_ALL_REDUCE],
                     LAUNCHES * (2 * TEST_COMM_STEP_REDUCTIONS + 1));
    assert_int_equal(test_sim_get()->physical_bytes(0), physical);
    destroy(&made);
    EXPECT_OK(tn_graph_memory_release(graph_pool, memory, a));
    EXPECT_OK(tn_scope_close(scope));
    test_comm_step_close(&step), test_comm_step_close(&twin);
    EXPECT_OK(tn_scope_close(root));
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_pool_destroy(graph_pool));
}

/* ---- what is refused ------------------------------------------------------------------------ */

static void expect_refused(tn_stream stream, tn_status expected, const char *words) {
    EXPECT_STATUS(gather(stream), expected);
    EXPECT_ERROR_HAS(words);
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(gather(stream));
    EXPECT_STATUS(tn_comm_group_end(comm, stream), expected);
    tn_comm_group_cancel(comm);
}

static void calls_that_are_refused_leave_the_capture_valid(void **state) {
    (void)state;
    tn_comm_graph *none = NULL;
    EXPECT_STATUS(tn_comm_capture_begin(comm, a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("the stream does not capture");
    EXPECT_STATUS(tn_comm_capture_end(comm, &none), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("no capture is open");
    const tn_comm_stats before = stats();
    test_capture_begin(device, a, TEST_CAPTURE_GLOBAL);
    expect_refused(a, TN_INVALID_STATE, "no capture is open here: tn_comm_capture_begin");
    test_capture_begin(device, b, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_comm_capture_begin(comm, b));
    expect_refused(a, TN_INVALID_STATE, "another capture is open here");
    EXPECT_STATUS(tn_comm_capture_begin(comm, a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("a capture is open already");
    EXPECT_STATUS(tn_all_gather(comm, NULL, block, PART, b), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_broadcast(comm, block, PART, RANKS, b), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_all_gather(comm, block, block, 0, b));
    const tn_comm_stats after = stats();
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(test_is_capturing(device, a), 1);
    assert_int_equal(test_is_capturing(device, b), 1);
    EXPECT_OK(gather(b));
    tn_comm_capture_abort(comm);
    expect_refused(b, TN_INVALID_STATE, "no capture is open here");
    test_graph graphs[2] = {test_capture_end(device, a), test_capture_end(device, b)};
    for (int i = 0; i < 2; i++)
        test_graph_destroy(device, &graphs[i]);
    EXPECT_OK(gather(a));
    assert_int_equal(seen.collectives, 1);
}

/* Of another library, which the legacy stream waits for. */
static tn_stream open_blocking_stream(void) {
    int (*create)(tn_stream *, unsigned) = NULL;
    tn_stream made = NULL;
    *(void **)&create = dlsym(test_sim_get()->library, "cuStreamCreate");
    EXPECT_OK(tn__device_driver(device)->make_current(tn__device_state(device)));
    assert_int_equal(create(&made, 0), 0);
    return made;
}

static void expect_host_waits_refused(tn_scope scope, const tn_shard_plan *plan, tn_ring *ring) {
    tn_checkpoint_config saved = TN_CHECKPOINT_CONFIG_INIT;
    const int64_t own = 3;
    int64_t every[RANKS];
    saved.path = "a checkpoint that is not made";
    saved.comm = comm;
    saved.scope = scope;
    EXPECT_STATUS(tn_counts_exchange(comm, &own, 1, every, scope, a), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("tn_counts_exchange: the stream captures a graph, and this waits on the host");
    EXPECT_STATUS(tn_shard_plan_verify(plan, comm, scope, a), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_ring_verify(ring), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_checkpoint_save(&saved, a), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_checkpoint_load(&saved, a), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("a checkpoint: the stream captures a graph");
}

/* What wait for an answer of the ranks would spoil the capture by that. */
static void calls_that_wait_on_the_host_are_refused(void **state) {
    (void)state;
    const tn_shard_tensor tensor = {
        .format = TN_FORMAT_PLAIN, .dtype = TN_BF16, .rows = 8, .cols = 8};
    tn_shard_plan_config planned = TN_SHARD_PLAN_CONFIG_INIT;
    tn_ring_config config = TN_RING_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_shard_plan *plan = NULL;
    tn_ring *ring = NULL;
    tn_scope scope;
    scope_config.pool = pool;
    EXPECT_OK(tn_scope_create(&scope_config, &scope));
    planned.tensors = &tensor, planned.tensor_count = 1;
    planned.rank_count = RANKS;
    EXPECT_OK(tn_shard_plan_create(&planned, &plan));
    config.scope = scope, config.comm = comm, config.stream = a;
    EXPECT_OK(tn_ring_create(&config, &ring));
    begin_capture();
    expect_host_waits_refused(scope, plan, ring);
    assert_int_equal(test_is_capturing(device, a), 1);
    EXPECT_OK(gather(a));
    captured step = {{NULL, NULL}, NULL};
    EXPECT_OK(tn_comm_capture_end(comm, &step.comm_graph));
    step.graph = test_capture_end(device, a);
    launch(&step, a);
    assert_int_equal(seen.collectives, 1); /* nothing of the others */
    destroy(&step);
    EXPECT_OK(tn_ring_destroy(ring));
    tn_shard_plan_destroy(plan);
    EXPECT_OK(tn_scope_close(scope));
}

/* The legacy stream, which would wait for a blocking one that captures, and has no capture. */
static void the_legacy_stream_beside_a_capture_is_refused(void **state) {
    (void)state;
    tn_stream foreign = open_blocking_stream();
    test_capture_begin(device, foreign, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_comm_capture_begin(comm, foreign));
    EXPECT_STATUS(gather(NULL), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("the legacy default stream can not be used");
    EXPECT_OK(gather(foreign));
    EXPECT_OK(gather(foreign));
    captured step = {{NULL, NULL}, NULL};
    EXPECT_OK(tn_comm_capture_end(comm, &step.comm_graph));
    step.graph = test_capture_end(device, foreign);
    launch(&step, foreign);
    EXPECT_OK(tn_comm_wait(comm));
    destroy(&step);
    test_close_foreign_stream(device, foreign);
}

static void a_spoiled_capture_spoils_nothing_else(void **state) {
    (void)state;
    tn_comm_graph *none = NULL;
    begin_capture();
    EXPECT_OK(gather(a));
    test_capture_spoil(device, a);
    EXPECT_STATUS(gather(a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("something forbidden has spoiled the capture");
    EXPECT_STATUS(tn_comm_capture_end(comm, &none), TN_INVALID_STATE);
    assert_null(none);
    tn_comm_capture_abort(comm);
    tn_comm_capture_abort(comm);
    EXPECT_STATUS(tn_comm_capture_begin(comm, a), TN_INVALID_STATE);
    test_capture_end_invalid(device, a);
    captured step = capture_step();
    launch(&step, a);
    assert_int_equal(seen.collectives, IN_A_GRAPH);
    destroy(&step);
}

/* ---- launches and ends ---------------------------------------------------------------------- */

static void a_launch_is_begun_and_ended(void **state) {
    (void)state;
    captured step = capture_step(), second = capture_step();
    EXPECT_STATUS(tn_comm_graph_launch_end(step.comm_graph), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("no launch of this graph was begun");
    EXPECT_OK(tn_comm_graph_launch_begin(step.comm_graph, a));
    EXPECT_STATUS(tn_comm_graph_launch_begin(second.comm_graph, a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("a graph is being launched");
    EXPECT_STATUS(tn_comm_graph_launch_end(second.comm_graph), TN_INVALID_STATE);
    EXPECT_STATUS(gather(b), TN_INVALID_STATE);
    EXPECT_STATUS(tn_comm_graph_destroy(step.comm_graph), TN_INVALID_STATE);
    tn_comm_graph_launch_cancel(second.comm_graph); /* of another: none */
    EXPECT_STATUS(gather(b), TN_INVALID_STATE);
    tn_comm_graph_launch_cancel(step.comm_graph);
    EXPECT_OK(gather(b));
    assert_int_equal(stats().graph_launches, 0);
    /* A graph in a graph. */
    begin_capture();
    EXPECT_STATUS(tn_comm_graph_launch_begin(step.comm_graph, a), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("graphs in graphs are not supported");
    assert_int_equal(test_is_capturing(device, a), 1);
    launch(&step, b);
    tn_comm_capture_abort(comm);
    test_graph empty = test_capture_end(device, a);
    test_graph_destroy(device, &empty);
    destroy(&step);
    destroy(&second);
}

static void a_communicator_does_not_end_before_its_graphs(void **state) {
    (void)state;
    tn_comm *part = NULL;
    captured step = capture_step();
    EXPECT_STATUS(tn_comm_destroy(comm), TN_IN_USE);
    EXPECT_ERROR_HAS("it is in 1 captured graphs: destroy the program's");
    begin_capture();
    EXPECT_STATUS(tn_comm_split(comm, -1, 0, NULL, &part), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("can not be split while a capture is open");
    destroy(&step);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_IN_USE);
    EXPECT_ERROR_HAS("can not be destroyed: a capture is open");
    EXPECT_OK(gather(a));
    tn_comm_capture_abort(comm);
    test_graph graph = test_capture_end(device, a);
    test_graph_destroy(device, &graph);
    EXPECT_OK(tn_comm_split(comm, -1, 0, NULL, &part));
    EXPECT_OK(gather(a));
    EXPECT_OK(tn_comm_graph_destroy(NULL));
    tn_comm_graph_launch_cancel(NULL);
    tn_comm_capture_abort(NULL);
}

/* ---- an engine that works on the host ------------------------------------------------------- */

static tn_status host_join(const tn_comm_config *config, int *rank, int *rank_count,
                           tn__comm_state **out) {
    *rank = config->rank, *rank_count = config->rank_count;
    *out = NULL;
    return TN_OK;
}

static tn_status host_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream) {
    (void)state, (void)batch, (void)stream;
    return TN_OK;
}

static tn_status host_check(tn__comm_state *state) { return (void)state, TN_OK; }
static void host_end(tn__comm_state *state) { (void)state; }

static const tn__comm_engine on_the_host = {.abi = TN__COMM_ENGINE_ABI,
                                            .name = "hosted",
                                            .has_deadlines = 1,
                                            .join = host_join,
                                            .start = host_start,
                                            .check = host_check,
                                            .abort = host_end,
                                            .leave = host_end};

static void engines_on_the_host_refuse_captures(void **state) {
    (void)state;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *hosted = NULL;
    config.device = device;
    config.rank_count = 1;
    EXPECT_OK(tn__comm_create(&config, &on_the_host, &hosted));
    test_capture_begin(device, a, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(tn_comm_capture_begin(hosted, a), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("collectives of the engine hosted can not be in a captured graph");
    EXPECT_STATUS(tn_barrier(hosted, a), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("put them on the stream outside of the capture");
    assert_int_equal(test_is_capturing(device, a), 1);
    test_graph graph = test_capture_end(device, a);
    test_graph_destroy(device, &graph);
    EXPECT_OK(tn_barrier(hosted, a));
    EXPECT_OK(tn_comm_destroy(hosted));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(nothing_runs_or_counts_before_a_launch),
        TEST(launches_and_calls_are_in_one_order),
        TEST(a_capture_makes_no_other_calls),
        TEST(captures_follow_each_other),
        TEST(calls_outside_go_on_meanwhile),
        TEST(a_whole_step_is_captured_once_and_launched_again_and_again),
        TEST(calls_that_are_refused_leave_the_capture_valid),
        TEST(calls_that_wait_on_the_host_are_refused),
        TEST(the_legacy_stream_beside_a_capture_is_refused),
        TEST(a_spoiled_capture_spoils_nothing_else),
        TEST(a_launch_is_begun_and_ended),
        TEST(a_communicator_does_not_end_before_its_graphs),
        TEST(engines_on_the_host_refuse_captures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
