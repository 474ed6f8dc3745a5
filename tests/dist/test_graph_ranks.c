/* Collectives in captured graphs over several ranks. NCCL on GPUs: launches among calls, sums of
 * all ranks each time, and the end of a communicator in which one rank launches and the others do
 * not, while all have its graph. MPI, TCP and simulated GPUs: what can not be captured is refused,
 * and the capture goes on.
 */
#include "ranks_support.h"

#include <string.h>

#include "tenure_comm_graph.h"
#include "test_graphs.h"

enum { LAUNCHES = 100, COUNT = 1 << 14, HANG_US = 10 * 1000 * 1000 };

static rank_fixture all;
static float *mine, *sum, *parts; /* COUNT each; of each rank */

static int can_capture(void) {
    return all.place == RANKS_ON_CUDA && strcmp(ranks_engine(&all), "NCCL") == 0;
}

static void fill(float *block, float value, tn_stream stream) {
    float values[COUNT];
    for (int i = 0; i < COUNT; i++)
        values[i] = value + (float)(i % 7);
    EXPECT_OK(tn_copy(all.device, block, values, sizeof values, stream));
    EXPECT_OK(tn_stream_synchronize(all.device, stream));
}

/* Each rank's `value + rank` and i % 7, summed. */
static void expect_sum(const float *block, float value, tn_stream stream) {
    float seen[COUNT];
    const float ranks = (float)all.count;
    EXPECT_OK(tn_copy(all.device, seen, block, sizeof seen, stream));
    EXPECT_OK(tn_stream_synchronize(all.device, stream));
    for (int i = 0; i < COUNT; i++)
        assert_true(seen[i] == ranks * (value + (float)(i % 7)) + ranks * (ranks - 1) / 2);
}

typedef struct captured {
    test_graph graph;
    tn_comm_graph *comm_graph;
} captured;

static tn_status reduce(tn_comm *comm, tn_stream stream) {
    return tn_all_reduce(comm, mine, sum, COUNT, TN_FP32, TN_REDUCE_SUM, stream);
}

/* A sum, on the other stream a gather of it in a group with a barrier, and the sum again. */
static captured capture(tn_comm *comm) {
    captured made = {{NULL, NULL}, NULL};
    test_capture_begin(all.device, all.stream, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_comm_capture_begin(comm, all.stream));
    EXPECT_OK(reduce(comm, all.stream));
    EXPECT_OK(tn_stream_wait(all.device, all.other, all.stream));
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_all_gather(comm, sum, parts, COUNT * sizeof(float), all.other));
    EXPECT_OK(tn_barrier(comm, all.other));
    EXPECT_OK(tn_comm_group_end(comm, all.other));
    EXPECT_OK(reduce(comm, all.stream));
    EXPECT_OK(tn_stream_wait(all.device, all.stream, all.other));
    EXPECT_OK(tn_comm_capture_end(comm, &made.comm_graph));
    made.graph = test_capture_end(all.device, all.stream);
    return made;
}

static void launch(const captured *step, tn_stream stream) {
    EXPECT_OK(tn_comm_graph_launch_begin(step->comm_graph, stream));
    test_graph_launch(all.device, &step->graph, stream);
    EXPECT_OK(tn_comm_graph_launch_end(step->comm_graph));
}

static void destroy(captured *step) {
    test_graph_destroy(all.device, &step->graph);
    EXPECT_OK(tn_comm_graph_destroy(step->comm_graph));
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void launches_sum_anew_each_time(void **state) {
    (void)state;
    if (!can_capture()) return;
    EXPECT_OK(reduce(all.comm, all.stream)); /* connects the ranks */
    ranks_wait(&all);
    captured step = capture(all.comm);
    const uint64_t reductions = ranks_stats(&all).calls[TN_ALL_REDUCE];
    for (int i = 0; i < LAUNCHES; i++) {
        const tn_stream stream = i % 2 ? all.stream : all.other;
        fill(mine, (float)(i + all.rank), stream);
        launch(&step, stream);
        expect_sum(sum, (float)i, stream);
        expect_sum(parts + (size_t)(i % all.count) * COUNT, (float)i, stream);
        if (i % 10) continue;
        fill(mine, (float)(1000 + i + all.rank), all.other);
        EXPECT_OK(reduce(all.comm, all.other));
        expect_sum(sum, (float)(1000 + i), all.other);
    }
    ranks_wait(&all);
    const uint64_t expected = 2 * LAUNCHES + LAUNCHES / 10;
    assert_int_equal(ranks_stats(&all).calls[TN_ALL_REDUCE] - reductions, expected);
    EXPECT_STATUS(tn_comm_destroy(all.comm), TN_IN_USE);
    destroy(&step);
}

/* Rank 0 launches, the others do not: its graph ends by the deadline, and on all ranks the
 * communicator does, once its graphs are destroyed, and not without. */
static void a_launch_that_hangs_ends_everywhere(void **state) {
    (void)state;
    if (!can_capture() || all.count == 1) return;
    tn_comm *side = ranks_comm(&all, "side", HANG_US);
    EXPECT_OK(reduce(side, all.stream));
    EXPECT_OK(tn_comm_wait(side));
    captured step = capture(side);
    launch(&step, all.stream);
    EXPECT_OK(tn_comm_wait(side));
    if (all.rank == 0) {
        launch(&step, all.stream);
        EXPECT_STATUS(tn_comm_wait(side), TN_COMM_TIMEOUT);
        EXPECT_STATUS(tn_comm_graph_launch_begin(step.comm_graph, all.stream), TN_COMM_TIMEOUT);
    }
    (void)ranks_most(&all, 0.0f); /* the others wait for it */
    if (all.rank > 0) tn_comm_abort(side, "rank 0 has given up");
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    EXPECT_STATUS(tn_comm_destroy(side), TN_IN_USE);
    destroy(&step);
    EXPECT_STATUS(tn_comm_destroy(side), all.rank ? TN_COMM_ERROR : TN_COMM_TIMEOUT);
    fill(mine, (float)all.rank, all.stream);
    EXPECT_OK(reduce(all.comm, all.stream));
    expect_sum(sum, 0.0f, all.stream);
}

static void what_can_not_be_captured_is_refused(void **state) {
    (void)state;
    if (can_capture()) return;
    if (all.place == RANKS_ON_HOST) {
        EXPECT_STATUS(tn_comm_capture_begin(all.comm, all.stream), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("the host driver captures no graphs");
    } else {
        test_capture_begin(all.device, all.stream, TEST_CAPTURE_GLOBAL);
        EXPECT_STATUS(tn_comm_capture_begin(all.comm, all.stream), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("collectives of the engine MPI can not be in a captured graph");
        EXPECT_STATUS(reduce(all.comm, all.stream), TN_UNSUPPORTED);
        assert_int_equal(test_is_capturing(all.device, all.stream), 1);
        test_graph graph = test_capture_end(all.device, all.stream);
        test_graph_destroy(all.device, &graph);
    }
    fill(mine, (float)all.rank, all.stream);
    EXPECT_OK(reduce(all.comm, all.stream));
    expect_sum(sum, 0.0f, all.stream);
}

static int open_all(void **state) {
    const size_t bytes = COUNT * sizeof(float);
    (void)state;
    all = ranks_open();
    mine = test_take(all.pool, bytes, all.stream);
    sum = test_take(all.pool, bytes, all.stream);
    parts = test_take(all.pool, bytes * (size_t)all.count, all.stream);
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    return 0;
}

static int close_all(void **state) {
    (void)state;
    ranks_wait(&all);
    test_give(all.pool, mine, all.stream);
    test_give(all.pool, sum, all.stream);
    test_give(all.pool, parts, all.stream);
    ranks_close(&all);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launches_sum_anew_each_time),
        cmocka_unit_test(a_launch_that_hangs_ends_everywhere),
        cmocka_unit_test(what_can_not_be_captured_is_refused),
    };
    return TEST_RUN_GROUP(tests, open_all, close_all);
}
