/* NCCL with one rank on a real GPU, in captured graphs: a whole training step with its collectives
 * on a second stream is captured once and launched again and again, among steps and collectives
 * that are called as ever; what is refused leaves the capture valid, and what fails ends.
 *
 * Skipped (77) where there is no GPU. With one rank a collective is a copy, so every result is
 * known: those of a twin whose steps are called. Two ranks: tests/dist/test_graph_ranks.c.
 */
#include "gpu_graphs_support.h"

#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "tenure_comm_graph.h"
#include "tenure_registration.h"
#include "test_comm_step.h"
#include "test_pools.h"

enum { LAUNCHES = 100, COMPARED_EACH = 20, FLOATS = 1 << 20 };

static gpu_side gpu;
static tn_stream other;
static tn_comm *comm;
static float *sent, *received; /* FLOATS each */

static tn_comm *join(void) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *made = NULL;
    tn_comm_id id;
    EXPECT_OK(tn_comm_id_create(&id));
    config.device = gpu.device;
    config.id = &id;
    config.rank_count = 1;
    config.timeout_us = 60 * 1000 * 1000;
    EXPECT_OK(tn_comm_create(&config, &made));
    return made;
}

/* ---- steps and calls ------------------------------------------------------------------------ */

static test_comm_step open_step(void) {
    const test_ops ops = {gpu.device, gpu.stream, gpu.pool, gpu.scope};
    return test_comm_step_open(&ops, comm, other, 0);
}

static void call_beside(int i) {
    EXPECT_OK(tn_fill(gpu.device, sent, (unsigned char)(i % 64), FLOATS * sizeof(float), other));
    EXPECT_OK(tn_all_reduce(comm, sent, received, FLOATS, TN_FP32, TN_REDUCE_SUM, other));
}

static void expect_beside(int i) {
    unsigned char seen[4096], expected[sizeof seen];
    memset(expected, i % 64, sizeof expected);
    EXPECT_OK(
        tn_copy(gpu.device, seen, (char *)(received + FLOATS) - sizeof seen, sizeof seen, other));
    EXPECT_OK(tn_stream_synchronize(gpu.device, other));
    assert_memory_equal(seen, expected, sizeof seen);
}

/* ---- graphs --------------------------------------------------------------------------------- */

static void launch(tn_comm_graph *comm_graph, const gpu_graph *graph) {
    EXPECT_OK(tn_comm_graph_launch_begin(comm_graph, gpu.stream));
    gpu_graph_launch(&gpu, graph);
    EXPECT_OK(tn_comm_graph_launch_end(comm_graph));
}

static size_t free_bytes(void) {
    size_t free = 0, total = 0;
    EXPECT_OK(tn_device_synchronize(gpu.device));
    EXPECT_OK(
        tn__device_driver(gpu.device)->memory_info(tn__device_state(gpu.device), &free, &total));
    return free;
}

static void compare_plane(tn_tensor a, tn_tensor b, tn_plane plane, const char *what) {
    gpu_copy actual = gpu_download(&gpu, a, plane), expected = gpu_download(&gpu, b, plane);
    gpu_count(what, gpu_copies_equal(&actual, &expected, what));
    gpu_copy_end(&actual), gpu_copy_end(&expected);
}

static void compare(const test_comm_step *t, const test_comm_step *twin) {
    const test_layer *l = &t->layer, *k = &twin->layer;
    compare_plane(l->y, k->y, TN_PLANE_DATA, "y");
    compare_plane(l->dx, k->dx, TN_PLANE_DATA, "dx");
    for (int i = 0; i < 2; i++) {
        compare_plane(l->dweight[i], k->dweight[i], TN_PLANE_DATA, "dweight");
        compare_plane(l->weight[i], k->weight[i], TN_PLANE_ROW, "weight");
        compare_plane(l->master[i], k->master[i], TN_PLANE_DATA, "master");
    }
}

/* Captures a step of t, with memory of the graph pool for all that lives within it. */
static gpu_graph capture_step(test_comm_step *t, tn_pool *graph_pool, tn_scope scope,
                              tn_comm_graph **comm_graph) {
    EXPECT_OK(tn_device_synchronize(gpu.device));
    t->layer.op = t->layer.saved_scope = scope;
    gpu_graph_begin(&gpu, graph_pool);
    EXPECT_OK(tn_comm_capture_begin(comm, gpu.stream));
    test_comm_step_run(t);
    EXPECT_OK(tn_comm_capture_end(comm, comm_graph));
    return gpu_graph_end(&gpu, graph_pool);
}

static void check_counts(tn_comm_graph *comm_graph, const tn_comm_stats *before) {
    tn_comm_graph_info info = TN_COMM_GRAPH_INFO_INIT;
    tn_comm_stats after = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_graph_info_get(comm_graph, &info));
    EXPECT_OK(tn_comm_stats_get(comm, &after));
    assert_int_equal(info.collectives, TEST_COMM_STEP_BATCHES);
    assert_int_equal(info.launches, LAUNCHES);
    assert_int_equal(info.counts.calls[TN_ALL_REDUCE], TEST_COMM_STEP_REDUCTIONS);
    assert_int_equal(after.graph_launches - before->graph_launches, LAUNCHES);
    /* As many by the twin, and one beside each. */
    const uint64_t groups = 2 * TEST_COMM_STEP_GROUPS, reductions = 2 * TEST_COMM_STEP_REDUCTIONS;
    assert_int_equal(after.groups - before->groups, LAUNCHES * groups);
    assert_int_equal(after.calls[TN_ALL_REDUCE] - before->calls[TN_ALL_REDUCE],
                     LAUNCHES * (reductions + 1));
}

/* A step that is called first, so that all is there. */
static void a_whole_step_is_captured_once_and_launched_again_and_again(void **state) {
    (void)state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_pool *graph_pool = NULL;
    tn_comm_graph *comm_graph = NULL;
    tn_scope scope;
    size_t free_before = 0;
    test_comm_step t = open_step(), twin = open_step();
    test_comm_step_run(&t), test_comm_step_run(&twin);
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &graph_pool));
    config.pool = graph_pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    gpu_graph graph = capture_step(&t, graph_pool, scope, &comm_graph);
    tn_comm_stats before = TN_COMM_STATS_INIT;
    EXPECT_OK(tn_comm_stats_get(comm, &before));
    for (int i = 0; i < LAUNCHES; i++) {
        call_beside(i);
        launch(comm_graph, &graph);
        expect_beside(i);
        test_comm_step_run(&twin);
        if (i % COMPARED_EACH == 0 || i == LAUNCHES - 1) compare(&t, &twin);
        if (i == COMPARED_EACH) free_before = free_bytes();
    }
    gpu_count("free memory is as before", free_bytes() == free_before);
    check_counts(comm_graph, &before);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_IN_USE);
    gpu_graph_drop(&gpu, graph_pool, &graph);
    EXPECT_OK(tn_comm_graph_destroy(comm_graph));
    EXPECT_OK(tn_scope_close(scope));
    test_comm_step_close(&t), test_comm_step_close(&twin);
    EXPECT_OK(tn_pool_destroy(graph_pool));
    gpu_count_report("launches of a whole step with its collectives, beside a twin");
}

/* ---- captures of collectives alone ----------------------------------------------------------- */

typedef struct captured {
    test_graph graph;
    tn_comm_graph *comm_graph;
} captured;

static void begin_capture(void) { test_capture_begin(gpu.device, gpu.stream, TEST_CAPTURE_GLOBAL); }

static void end_capture(captured *made) { made->graph = test_capture_end(gpu.device, gpu.stream); }

static void drop(captured *made) {
    test_graph_destroy(gpu.device, &made->graph);
    EXPECT_OK(tn_comm_graph_destroy(made->comm_graph));
}

static tn_status reduce(tn_comm *by) {
    return tn_all_reduce(by, sent, received, FLOATS, TN_FP32, TN_REDUCE_SUM, gpu.stream);
}

/* All in one capture, of whose graph the one collective that was taken runs. */
static void calls_that_are_refused_leave_the_capture_valid(void **state) {
    (void)state;
    captured made = {{NULL, NULL}, NULL};
    tn_registration *none = NULL;
    tn_comm *part = NULL;
    EXPECT_OK(tn_comm_wait(comm));
    begin_capture();
    EXPECT_STATUS(reduce(comm), TN_INVALID_STATE);
    EXPECT_OK(tn_comm_capture_begin(comm, gpu.stream));
    EXPECT_STATUS(tn_comm_register(comm, sent, 4096, TN_REGISTER_BUFFER, &none), TN_INVALID_STATE);
    EXPECT_STATUS(tn_comm_split(comm, 0, 0, NULL, &part), TN_INVALID_STATE);
    EXPECT_STATUS(tn_all_reduce(comm, NULL, received, 1, TN_FP32, TN_REDUCE_SUM, gpu.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_comm_wait(comm));
    EXPECT_OK(reduce(comm));
    EXPECT_OK(tn_comm_capture_end(comm, &made.comm_graph));
    end_capture(&made);
    EXPECT_OK(tn_fill(gpu.device, sent, 5, FLOATS * sizeof(float), gpu.stream));
    EXPECT_OK(tn_comm_graph_launch_begin(made.comm_graph, gpu.stream));
    test_graph_launch(gpu.device, &made.graph, gpu.stream);
    EXPECT_OK(tn_comm_graph_launch_end(made.comm_graph));
    EXPECT_OK(tn_stream_wait(gpu.device, other, gpu.stream));
    expect_beside(5);
    drop(&made);
}

/* What CUDA forbids, which is error 900, reaches NCCL not. */
static void a_spoiled_capture_leaves_the_communicator_in_order(void **state) {
    (void)state;
    begin_capture();
    EXPECT_OK(tn_comm_capture_begin(comm, gpu.stream));
    EXPECT_OK(reduce(comm));
    test_capture_spoil(gpu.device, gpu.stream);
    EXPECT_STATUS(reduce(comm), TN_INVALID_STATE);
    tn_comm_capture_abort(comm);
    test_capture_end_invalid(gpu.device, gpu.stream);
    EXPECT_OK(reduce(comm));
    EXPECT_OK(tn_comm_wait(comm));
}

static void one_that_is_given_up_ends_after_its_graph(void **state) {
    (void)state;
    captured made = {{NULL, NULL}, NULL};
    tn_comm *side = join();
    EXPECT_OK(reduce(side));
    begin_capture();
    EXPECT_OK(tn_comm_capture_begin(side, gpu.stream));
    EXPECT_OK(reduce(side));
    EXPECT_OK(tn_comm_capture_end(side, &made.comm_graph));
    end_capture(&made);
    EXPECT_OK(tn_comm_graph_launch_begin(made.comm_graph, gpu.stream));
    test_graph_launch(gpu.device, &made.graph, gpu.stream);
    EXPECT_OK(tn_comm_graph_launch_end(made.comm_graph));
    tn_comm_abort(side, "no more");
    EXPECT_STATUS(tn_comm_graph_launch_begin(made.comm_graph, gpu.stream), TN_COMM_ERROR);
    EXPECT_STATUS(tn_comm_destroy(side), TN_IN_USE);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    drop(&made);
    EXPECT_STATUS(tn_comm_destroy(side), TN_COMM_ERROR);
}

static int open_all(void **state) {
    (void)state;
    EXPECT_OK(tn_stream_create(gpu.device, &other));
    comm = join();
    sent = test_take(gpu.pool, FLOATS * sizeof(float), gpu.stream);
    received = test_take(gpu.pool, FLOATS * sizeof(float), gpu.stream);
    EXPECT_OK(tn_stream_wait(gpu.device, other, gpu.stream));
    return 0;
}

static int close_all(void **state) {
    (void)state;
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_device_synchronize(gpu.device));
    test_give(gpu.pool, sent, gpu.stream);
    test_give(gpu.pool, received, gpu.stream);
    EXPECT_OK(tn_stream_destroy(gpu.device, other));
    gpu_close(&gpu);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_step_is_captured_once_and_launched_again_and_again),
        cmocka_unit_test(calls_that_are_refused_leave_the_capture_valid),
        cmocka_unit_test(a_spoiled_capture_leaves_the_communicator_in_order),
        cmocka_unit_test(one_that_is_given_up_ends_after_its_graph),
    };
    gpu_open(&gpu);
    return TEST_RUN_GROUP(tests, open_all, close_all);
}
