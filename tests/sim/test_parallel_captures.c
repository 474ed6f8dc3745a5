/* Parallel layers in captured graphs, of a simulated rank: forward and backward of column- and
 * row-parallel Linear, their collectives on the call's stream or on a second one, captured once and
 * launched again and again beside eager ones. A race, or anything that is left, fails.
 */
#include "host_alloc.h"
#include "tenure_comm_graph.h"
#include "tenure_parallel.h"
#include "tenure_simulated.h"
#include "test_graphs.h"
#include "test_ops.h"

enum { RANKS = 4, ROWS = 128, K = 256, N = 512, LAUNCHES = 20 };

static tn_device *device;
static tn_pool *pool, *graph_pool;
static tn_stream a, b;
static tn_comm *comm;
static tn_scope io, op;

static int set_up(void **state) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    (void)state;
    device = test_open_sim(0, 0);
    pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    graph_pool = test_open_graph_pool(device, TN_BACKING_AUTO);
    a = test_open_stream(device);
    b = test_open_stream(device);
    config.device = device;
    config.engine = TN_COMM_SIMULATED;
    config.rank_count = RANKS;
    EXPECT_OK(tn_comm_create(&config, &comm));
    scope.pool = pool;
    EXPECT_OK(tn_scope_create(&scope, &io));
    scope.pool = graph_pool;
    EXPECT_OK(tn_scope_create(&scope, &op));
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_scope_close(op));
    EXPECT_OK(tn_scope_close(io));
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_pool_destroy(graph_pool));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(device, a));
    EXPECT_OK(tn_stream_destroy(device, b));
    test_close_sim(device);
    assert_int_equal(tn__host_live_blocks(), 0);
    return 0;
}

/* ---- a layer -------------------------------------------------------------------------------- */

typedef struct layer {
    int is_column;
    tn_parallel parallel;
    tn_linear_forward_args forward;
    tn_linear_backward_args backward;
    tn_linear_saved saved;
} layer;

static tn_tensor valid(tn_tensor tensor, tn_plane plane) {
    const test_ops ops = {device, a, pool, io};
    test_declare_valid(&ops, tensor, plane);
    return tensor;
}

/* The weight is [N, K] of this rank; x or y has the rows of all ranks. */
static layer open_layer(int is_column, tn_stream side) {
    const int64_t all = (int64_t)RANKS * ROWS;
    const int64_t x_rows = is_column ? ROWS : all, y_rows = is_column ? all : ROWS;
    layer l = {.is_column = is_column, .parallel = TN_PARALLEL_INIT};
    l.parallel.sequence.comm = comm;
    l.parallel.stream = side;
    l.forward = (tn_linear_forward_args)TN_LINEAR_FORWARD_ARGS_INIT;
    l.backward = (tn_linear_backward_args)TN_LINEAR_BACKWARD_ARGS_INIT;
    l.forward.x = valid(test_plain(io, TN_BF16, x_rows, K), TN_PLANE_DATA);
    l.forward.w.weight = valid(test_weight(io, N, K, 0, TN_POLICY_SCRATCH), TN_PLANE_ROW);
    l.forward.y = test_plain(io, TN_BF16, y_rows, N);
    l.backward.x = l.forward.x, l.backward.w = l.forward.w;
    l.backward.dy = valid(test_plain(io, TN_BF16, y_rows, N), TN_PLANE_DATA);
    l.backward.dx = test_plain(io, TN_BF16, x_rows, K);
    l.backward.gradient.dweight = test_plain(io, TN_FP32, N, K);
    return l;
}

/* What is made within lives in `scope`; the side stream joins the capture, if there is one, and
 * comes back. */
static void run(layer *l, tn_scope scope) {
    l->forward.common.scope = l->forward.common.saved_scope = scope;
    l->backward.common = l->forward.common;
    l->saved = (tn_linear_saved)TN_LINEAR_SAVED_INIT;
    if (l->parallel.stream) EXPECT_OK(tn_stream_wait(device, l->parallel.stream, a));
    if (l->is_column) {
        EXPECT_OK(tn_column_linear_forward(&l->parallel, &l->forward, &l->saved, a));
        EXPECT_OK(tn_column_linear_backward(&l->parallel, &l->backward, &l->saved, NULL, a));
    } else {
        EXPECT_OK(tn_row_linear_forward(&l->parallel, &l->forward, &l->saved, a));
        EXPECT_OK(tn_row_linear_backward(&l->parallel, &l->backward, &l->saved, NULL, a));
    }
    if (l->parallel.stream) EXPECT_OK(tn_stream_wait(device, a, l->parallel.stream));
}

static uint64_t collectives(void) {
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    uint64_t count = 0;
    EXPECT_OK(tn_comm_stats_get(comm, &stats));
    for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++)
        count += stats.calls[kind];
    return count;
}

static void check_layer(int is_column, tn_stream side) {
    tn_graph_memory memory;
    tn_comm_graph *comm_graph = NULL;
    layer l = open_layer(is_column, side), twin = open_layer(is_column, side);
    run(&l, io), run(&twin, io);
    const uint64_t each = collectives() / 2;
    assert_true(each >= 3);
    EXPECT_OK(tn_device_synchronize(device));
    test_capture_begin(device, a, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(graph_pool, a));
    EXPECT_OK(tn_comm_capture_begin(comm, a));
    run(&l, op);
    assert_int_equal(collectives(), 2 * each);
    EXPECT_OK(tn_comm_capture_end(comm, &comm_graph));
    EXPECT_OK(tn_graph_capture_end(graph_pool, &memory));
    test_graph graph = test_capture_end(device, a);
    for (int i = 0; i < LAUNCHES; i++) {
        EXPECT_OK(tn_comm_graph_launch_begin(comm_graph, a));
        test_graph_launch(device, &graph, a);
        EXPECT_OK(tn_comm_graph_launch_end(comm_graph));
        run(&twin, io);
    }
    assert_int_equal(collectives(), (2 + 2 * LAUNCHES) * each);
    test_graph_destroy(device, &graph);
    EXPECT_OK(tn_comm_graph_destroy(comm_graph));
    EXPECT_OK(tn_graph_memory_release(graph_pool, memory, a));
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void column_parallel_linear_is_captured(void **state) {
    (void)state;
    check_layer(1, NULL);
}

static void row_parallel_linear_is_captured(void **state) {
    (void)state;
    check_layer(0, NULL);
}

static void collectives_beside_products_are_captured(void **state) {
    (void)state;
    check_layer(1, b);
}

static void sums_beside_products_are_captured(void **state) {
    (void)state;
    check_layer(0, b);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(column_parallel_linear_is_captured),
        TEST(row_parallel_linear_is_captured),
        TEST(collectives_beside_products_are_captured),
        TEST(sums_beside_products_are_captured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
