/* Collectives of the NCCL engine in captured graphs, over a scripted NCCL that puts kernels on
 * streams of the simulated device: what a capture keeps from NCCL, deadlines of launches, and the
 * end of a communicator whose graphs are alive, for which NCCL waits without end. */
#include "test_processes.h"

#include <stdlib.h>
#include <string.h>

#include "comm_watch.h"
#include "host_alloc.h"
#include "options.h"
#include "scripted_nccl_support.h"
#include "tenure_registration.h"
#include "tenure_ring.h"
#include "test_graphs.h"

enum {
    SHORT_US = 200 * 1000,
    LOOKS_US = 300 * 1000, /* some looks of the watch */
    LONG_US = 60 * 1000 * 1000,
    BYTES = 4096,
    LAUNCHES = 100
};

static const tn__comm_engine *engine;
static scripted_nccl *script;
static tn_device *device;
static tn_pool *pool;
static tn_stream a, b;
static tn_comm *comm;
static char *block;

/* ---- set up --------------------------------------------------------------------------------- */

static int put_kernel(const char *name, const void *src, void *dst, void *stream) {
    tnsim_range ranges[2];
    size_t count = 0;
    if (src) ranges[count++] = (tnsim_range){src, 256, 0};
    if (dst) ranges[count++] = (tnsim_range){dst, 256, 1};
    return test_sim_get()->launch(stream, name, ranges, count, 5.0);
}

static void open_device(void) {
    *script = (scripted_nccl){.rank = 0, .rank_count = 2, .launch = put_kernel};
    device = test_open_sim(0, 0);
    pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    a = test_open_stream(device);
    b = test_open_stream(device);
    block = test_take(pool, BYTES, a);
}

/* ranks: only to listen to; NULL: to nobody. They share a device, which NCCL itself refuses. */
static void open_comm(uint64_t timeout_us, int rank, tn_rendezvous *ranks) {
    static tn__comm_engine by_id;
    static const tn_comm_id id;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    by_id = *engine;
    by_id.joins_by_id = 0;
    config.device = device;
    config.timeout_us = timeout_us;
    config.rendezvous = ranks;
    config.id = &id, config.rank = rank, config.rank_count = 2;
    EXPECT_OK(tn__comm_create(&config, &by_id, &comm));
}

static void close_device(void) {
    test_give(pool, block, a);
    EXPECT_OK(tn_stream_synchronize(device, b));
    EXPECT_OK(tn_stream_destroy(device, a));
    EXPECT_OK(tn_stream_destroy(device, b));
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static int set_up(void **state) {
    (void)state;
    open_device();
    open_comm(LONG_US, 0, NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    close_device();
    return 0;
}

/* ---- a graph -------------------------------------------------------------------------------- */

typedef struct captured {
    test_graph graph;
    tn_comm_graph *comm_graph;
} captured;

static tn_status reduce(tn_stream stream) {
    return tn_all_reduce(comm, block, block + 1024, 64, TN_FP32, TN_REDUCE_SUM, stream);
}

static void begin_capture(void) {
    test_capture_begin(device, a, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_comm_capture_begin(comm, a));
    script->is_captured = 1;
}

/* From here on the script's communicator ends no sooner than the graph. */
static captured end_capture(void) {
    captured made = {{NULL, NULL}, NULL};
    EXPECT_OK(tn_comm_capture_end(comm, &made.comm_graph));
    made.graph = test_capture_end(device, a);
    script->is_captured = 0;
    atomic_fetch_add(&script->graphs, 1);
    return made;
}

static captured capture_step(void) {
    begin_capture();
    EXPECT_OK(reduce(a));
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_broadcast(comm, block, 100, 1, a));
    EXPECT_OK(tn_send(comm, block, 100, 1 - tn_comm_rank(comm), a));
    EXPECT_OK(tn_comm_group_end(comm, a));
    return end_capture();
}

static void launch(const captured *step, tn_stream stream) {
    EXPECT_OK(tn_comm_graph_launch_begin(step->comm_graph, stream));
    test_graph_launch(device, &step->graph, stream);
    EXPECT_OK(tn_comm_graph_launch_end(step->comm_graph));
}

static void destroy(captured *step) {
    test_graph_destroy(device, &step->graph);
    atomic_fetch_sub(&script->graphs, 1);
    EXPECT_OK(tn_comm_graph_destroy(step->comm_graph));
}

/* What was put ends: a look at an event takes next to no virtual time. */
static void finish(void) {
    EXPECT_OK(tn_stream_synchronize(device, a));
    EXPECT_OK(tn_stream_synchronize(device, b));
    EXPECT_OK(tn_comm_wait(comm));
}

/* If the watch is slow nothing wrong is shown. */
static void let_it_look(void) {
    const uint64_t until = tn__flight_now_us() + LOOKS_US;
    while (tn__flight_now_us() < until)
        sched_yield();
}

/* Until the communicator fails, whoever makes it: nobody calls it meanwhile. */
static tn_status wait_for_failure(void) {
    tn_status status = TN_OK;
    while (status == TN_OK) {
        sched_yield();
        pthread_mutex_lock(&comm->lock);
        status = comm->failure;
        pthread_mutex_unlock(&comm->lock);
    }
    return status;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void nccl_is_called_once_and_the_graph_runs_again_and_again(void **state) {
    (void)state;
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    captured step = capture_step();
    assert_string_equal(script->log, "all_reduce 64 group( broadcast 100 root 1 send 100 to 1 ) ");
    script->log[0] = 0;
    for (int i = 0; i < LAUNCHES; i++) {
        launch(&step, i % 2 ? a : b);
        if (i % 10 == 0) EXPECT_OK(reduce(i % 3 ? a : b));
    }
    finish();
    assert_int_equal(script->collectives, 3 + LAUNCHES / 10);
    EXPECT_OK(tn_comm_stats_get(comm, &stats));
    assert_int_equal(stats.graph_launches, LAUNCHES);
    assert_int_equal(stats.calls[TN_ALL_REDUCE], LAUNCHES + LAUNCHES / 10);
    assert_int_equal(stats.wire_bytes[TN_SEND], 100 * LAUNCHES);
    assert_int_equal(stats.groups, LAUNCHES);
    destroy(&step);
    EXPECT_OK(tn_comm_destroy(comm));
    assert_int_equal(script->aborted, 0);
    assert_int_equal(script->destroyed, 1);
}

/* It asks about what was called as ever while a stream captures in the strictest mode. */
static void the_watch_spoils_no_capture(void **state) {
    (void)state;
    EXPECT_OK(reduce(b));
    test_sim_stall(device, b, 1);
    EXPECT_OK(reduce(b));
    begin_capture();
    EXPECT_OK(reduce(a));
    let_it_look();
    EXPECT_OK(reduce(a));
    test_sim_stall(device, b, 0);
    EXPECT_OK(tn_stream_synchronize(device, b));
    EXPECT_OK(tn_comm_wait(comm));
    assert_int_equal(test_is_capturing(device, a), 1);
    captured step = end_capture();
    let_it_look();
    launch(&step, a);
    finish();
    destroy(&step);
    EXPECT_OK(tn_comm_destroy(comm));
}

/* NCCL would make an error of its own of it, and the communicator would be lost. */
static void a_spoiled_capture_does_not_reach_nccl(void **state) {
    (void)state;
    begin_capture();
    EXPECT_OK(reduce(a));
    test_capture_spoil(device, a);
    EXPECT_STATUS(reduce(a), TN_INVALID_STATE);
    assert_string_equal(script->log, "all_reduce 64 ");
    tn_comm_capture_abort(comm);
    test_capture_end_invalid(device, a);
    script->is_captured = 0;
    EXPECT_OK(reduce(a));
    finish();
    EXPECT_OK(tn_comm_destroy(comm));
    assert_int_equal(script->aborted, 0);
}

static void what_nccl_refuses_leaves_the_capture_valid(void **state) {
    (void)state;
    begin_capture();
    script->refused = 1;
    EXPECT_STATUS(reduce(a), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ncclAllReduce failed: ncclInvalidArgument");
    EXPECT_OK(reduce(a));
    assert_int_equal(test_is_capturing(device, a), 1);
    captured step = end_capture();
    launch(&step, a);
    finish();
    destroy(&step);
    EXPECT_OK(tn_comm_destroy(comm));
}

static void memory_and_ranks_stay_as_they_are_for_graphs(void **state) {
    (void)state;
    tn_registration *before = NULL, *later = NULL;
    tn_comm *part = NULL;
    const int excluded = 1;
    EXPECT_OK(tn_comm_register(comm, block, BYTES, TN_REGISTER_BUFFER, &before));
    begin_capture();
    script->log[0] = 0;
    EXPECT_STATUS(tn_comm_register(comm, block, BYTES, TN_REGISTER_BUFFER, &later),
                  TN_INVALID_STATE);
    EXPECT_ERROR_HAS("can not register memory while a capture is open");
    EXPECT_STATUS(tn_comm_deregister(before), TN_IN_USE);
    EXPECT_STATUS(tn_comm_split(comm, 0, 0, NULL, &part), TN_INVALID_STATE);
    EXPECT_STATUS(tn_comm_shrink(comm, &excluded, 1, NULL, &part), TN_INVALID_STATE);
    assert_string_equal(script->log, "");
    assert_int_equal(test_is_capturing(device, a), 1);
    EXPECT_OK(reduce(a));
    captured step = end_capture();
    EXPECT_STATUS(tn_comm_deregister(before), TN_IN_USE);
    EXPECT_ERROR_HAS("can not end what it has registered: it is in 1 captured graphs");
    EXPECT_STATUS(tn_comm_shrink(comm, &excluded, 1, NULL, &part), TN_IN_USE);
    EXPECT_OK(tn_comm_register(comm, block, BYTES, TN_REGISTER_BUFFER, &later));
    EXPECT_OK(tn_comm_split(comm, 0, 0, NULL, &part));
    launch(&step, a);
    finish();
    destroy(&step);
    EXPECT_OK(tn_comm_deregister(before));
    EXPECT_OK(tn_comm_destroy(part));
    EXPECT_OK(tn_comm_destroy(comm));
    assert_int_equal(script->registered, 0);
}

/* A ring of one unit that is nowhere yet, whose buffer is registered. */
static tn_ring *open_ring(tn_scope scope, const tn_shard_plan *plan) {
    tn_ring_config config = TN_RING_CONFIG_INIT;
    tn_ring_unit_config unit = TN_RING_UNIT_CONFIG_INIT;
    tn_tensor_config of_weight = TN_TENSOR_CONFIG_INIT, of_shard = TN_TENSOR_CONFIG_INIT;
    tn_tensor weight;
    tn_ring *ring = NULL;
    size_t bytes = 0;
    int number;
    config.scope = scope, config.comm = comm, config.stream = a;
    config.registration = TN_RING_REGISTER_BUFFER;
    EXPECT_OK(tn_ring_create(&config, &ring));
    of_weight.dtype = TN_BF16;
    of_weight.rank = 2, of_weight.shape[0] = 128, of_weight.shape[1] = 128;
    EXPECT_OK(tn_tensor_create(scope, &of_weight, &weight));
    EXPECT_OK(tn_shard_bytes(plan, tn_comm_rank(comm), &bytes));
    of_shard.dtype = TN_BYTE;
    of_shard.rank = 1, of_shard.shape[0] = (int64_t)bytes;
    EXPECT_OK(tn_tensor_create(scope, &of_shard, &unit.shard));
    EXPECT_OK(tn_plane_fill(unit.shard, TN_PLANE_DATA, 0, a));
    unit.plan = plan, unit.tensors = &weight, unit.tensor_count = 1;
    EXPECT_OK(tn_ring_unit_add(ring, &unit, &number));
    EXPECT_OK(tn_ring_seal(ring));
    return ring;
}

static void a_registered_ring_stays_as_it_is_for_graphs(void **state) {
    (void)state;
    const tn_shard_tensor tensor = {
        .format = TN_FORMAT_PLAIN, .dtype = TN_BF16, .rows = 128, .cols = 128};
    tn_shard_plan_config planned = TN_SHARD_PLAN_CONFIG_INIT;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_ring_stats stats = TN_RING_STATS_INIT;
    tn_shard_plan *plan = NULL;
    tn_scope scope;
    config.pool = pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    planned.tensors = &tensor, planned.tensor_count = 1;
    planned.rank_count = 2;
    EXPECT_OK(tn_shard_plan_create(&planned, &plan));
    tn_ring *ring = open_ring(scope, plan);
    EXPECT_OK(tn_ring_stats_get(ring, &stats));
    assert_int_equal(stats.registered, TN_RING_REGISTERED_BUFFER);
    captured step = capture_step();
    EXPECT_STATUS(tn_ring_destroy(ring), TN_IN_USE);
    EXPECT_ERROR_HAS("can not end what a ring has registered: it is in 1 captured graphs");
    assert_int_equal(script->registered, 1);
    EXPECT_OK(tn_ring_prefetch(ring, 0)); /* it is a ring as before */
    destroy(&step);
    EXPECT_OK(tn_ring_destroy(ring));
    assert_int_equal(script->registered, 0);
    EXPECT_OK(tn_scope_close(scope));
    tn_shard_plan_destroy(plan);
    finish();
    EXPECT_OK(tn_comm_destroy(comm));
}

/* ---- failures ------------------------------------------------------------------------------- */

/* NCCL is told to end, and does so with the graph; nobody else waits meanwhile. */
static void expect_end(captured *step, tn_status failure) {
    tn_comm *part = NULL;
    const int excluded = 1 - tn_comm_rank(comm);
    while (!atomic_load(&script->ending))
        sched_yield();
    EXPECT_STATUS(tn_comm_wait(comm), failure);
    EXPECT_STATUS(reduce(a), failure);
    EXPECT_STATUS(tn_comm_graph_launch_begin(step->comm_graph, a), failure);
    EXPECT_STATUS(tn_comm_capture_begin(comm, a), failure);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_IN_USE);
    EXPECT_STATUS(tn_comm_shrink(comm, &excluded, 1, NULL, &part), TN_IN_USE);
    destroy(step);
    EXPECT_STATUS(tn_comm_destroy(comm), failure);
    assert_int_equal(script->aborted, 1);
    assert_int_equal(script->ending, 1);
    assert_int_equal(script->destroyed, 0);
}

static void a_graph_that_hangs_is_given_up(void **state) {
    (void)state;
    char text[16 * 1024];
    captured step = capture_step();
    launch(&step, a);
    finish();
    pthread_mutex_lock(&comm->lock); /* for what is launched from here on, which is to be late */
    comm->timeout_us = SHORT_US;
    pthread_mutex_unlock(&comm->lock);
    EXPECT_OK(tn_comm_graph_launch_begin(step.comm_graph, a));
    test_sim_stall(device, a, 1);
    test_graph_launch(device, &step.graph, a);
    EXPECT_OK(tn_comm_graph_launch_end(step.comm_graph));
    assert_int_equal(wait_for_failure(), TN_COMM_TIMEOUT);
    EXPECT_STATUS(tn_barrier(comm, b), TN_COMM_TIMEOUT);
    EXPECT_ERROR_HAS("graph 2 has not ended 0.2 s after its stream came to it");
    assert_true(tn_comm_report(comm, TN_REPORT_TEXT, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "  2 graph of 2 calls, stream "));
    test_sim_stall(device, a, 0);
    expect_end(&step, TN_COMM_TIMEOUT);
}

static void a_communicator_is_given_up_while_its_graph_lives(void **state) {
    (void)state;
    captured step = capture_step();
    launch(&step, a);
    tn_comm_abort(comm, "no more");
    expect_end(&step, TN_COMM_ERROR);
}

/* Between the two the launch is the program's: it ends, and says what is known. */
static void one_that_fails_during_a_launch_ends_it(void **state) {
    (void)state;
    captured step = capture_step();
    EXPECT_OK(tn_comm_graph_launch_begin(step.comm_graph, a));
    tn_comm_abort(comm, NULL);
    test_graph_launch(device, &step.graph, a);
    EXPECT_STATUS(tn_comm_graph_launch_end(step.comm_graph), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("tn_comm_abort was called");
    expect_end(&step, TN_COMM_ERROR);
}

/* In a capture, with NCCL's own error: what was captured goes with the communicator. */
static void one_that_fails_in_a_capture_is_aborted(void **state) {
    (void)state;
    tn_comm_graph *none = NULL;
    begin_capture();
    EXPECT_OK(reduce(a));
    script->result = 6;
    EXPECT_STATUS(reduce(a), TN_COMM_ERROR);
    EXPECT_STATUS(tn_comm_capture_end(comm, &none), TN_COMM_ERROR);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_IN_USE);
    tn_comm_capture_abort(comm);
    test_graph graph = test_capture_end(device, a);
    test_graph_destroy(device, &graph);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_ERROR);
    assert_int_equal(script->aborted, 1);
}

/* One that was in graphs, which are gone. */
static void one_that_had_graphs_ends_as_ever(void **state) {
    (void)state;
    captured step = capture_step();
    destroy(&step);
    tn_comm_abort(comm, NULL);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_ERROR);
    assert_int_equal(script->aborted, 1);
}

/* ---- ranks that differ ---------------------------------------------------------------------- */

static tn_rendezvous *meet(const test_meeting *meeting) {
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    tn_rendezvous *ranks = NULL;
    how.rank = meeting->rank;
    how.rank_count = meeting->rank_count;
    how.host = "127.0.0.1";
    how.port = meeting->port;
    how.listen_file = meeting->rank ? -1 : meeting->listener;
    how.timeout_us = LONG_US;
    EXPECT_OK(tn_rendezvous_create(&how, &ranks));
    return ranks;
}

static tn_rendezvous *open_checked(const test_meeting *meeting) {
    setenv("TENURE_CHECK_COLLECTIVES", "1", 1);
    tn__options_reload();
    open_device();
    script->rank = meeting->rank;
    tn_rendezvous *ranks = meet(meeting);
    open_comm(LONG_US, meeting->rank, ranks);
    return ranks;
}

static void differ(const test_meeting *meeting) {
    const int is_first = meeting->rank == 0, in_capture = *(const int *)meeting->argument;
    tn_rendezvous *ranks = open_checked(meeting);
    captured step = capture_step();
    for (int i = 0; i < 5; i++) {
        launch(&step, a);
        EXPECT_OK(reduce(a));
    }
    if (in_capture) {
        if (is_first) begin_capture();
        EXPECT_STATUS(reduce(a), TN_COMM_ERROR);
        EXPECT_ERROR_HAS(is_first ? "rank 0 called captured all_reduce 13 of 64 fp32 sum"
                                  : "rank 1 called all_reduce 13 of 64 fp32 sum");
    } else {
        EXPECT_STATUS(is_first ? reduce(a) : tn_comm_graph_launch_begin(step.comm_graph, a),
                      TN_COMM_ERROR);
        EXPECT_ERROR_HAS("all_reduce 13 of 64 fp32 sum");
        EXPECT_ERROR_HAS("launch 13 of graph 1 with 2 calls");
    }
    EXPECT_ERROR_HAS("all ranks make the same calls in the same order");
    if (in_capture && is_first) {
        tn_comm_capture_abort(comm);
        test_graph graph = test_capture_end(device, a);
        test_graph_destroy(device, &graph);
    }
    destroy(&step);
    EXPECT_STATUS(tn_comm_destroy(comm), TN_COMM_ERROR);
    tn_rendezvous_destroy(ranks);
    close_device();
}

static void a_launch_and_a_call_that_meet_are_named(void **state) {
    (void)state;
    const int in_capture = 0;
    test_ranks_run(2, differ, &in_capture);
}

static void a_captured_call_and_another_that_meet_are_named(void **state) {
    (void)state;
    const int in_capture = 1;
    test_ranks_run(2, differ, &in_capture);
}

/* What one sends in two calls the other receives in a group: that is between the two. */
static void exchange_messages(const test_meeting *meeting) {
    const int is_first = meeting->rank == 0, other = 1 - meeting->rank;
    tn_rendezvous *ranks = open_checked(meeting);
    begin_capture();
    EXPECT_OK(reduce(a));
    if (!is_first) EXPECT_OK(tn_comm_group_begin(comm));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(is_first ? tn_send(comm, block, 100, other, a)
                           : tn_receive(comm, block, 100, other, a));
    if (!is_first) EXPECT_OK(tn_comm_group_end(comm, a));
    captured step = end_capture();
    for (int i = 0; i < 3; i++)
        launch(&step, a);
    finish();
    destroy(&step);
    EXPECT_OK(tn_comm_destroy(comm));
    tn_rendezvous_destroy(ranks);
    close_device();
}

static void graphs_that_differ_in_messages_are_launched(void **state) {
    (void)state;
    test_ranks_run(2, exchange_messages, NULL);
}

/* One that could not launch has met the others already: it does not do so again. */
static void launch_later(const test_meeting *meeting) {
    tn_rendezvous *ranks = open_checked(meeting);
    captured step = capture_step();
    for (int i = 0; i < 3; i++) {
        if (meeting->rank == 0) {
            EXPECT_OK(tn_comm_graph_launch_begin(step.comm_graph, a));
            tn_comm_graph_launch_cancel(step.comm_graph);
        }
        launch(&step, a);
        EXPECT_OK(reduce(a));
    }
    finish();
    destroy(&step);
    EXPECT_OK(tn_comm_destroy(comm));
    tn_rendezvous_destroy(ranks);
    close_device();
}

static void a_launch_that_is_cancelled_can_be_begun_again(void **state) {
    (void)state;
    test_ranks_run(2, launch_later, NULL);
}

/* The other's launch does not end: it hears why, and long before the deadline. */
static void give_up_a_launch(const test_meeting *meeting) {
    tn_rendezvous *ranks = open_checked(meeting);
    captured step = capture_step();
    if (meeting->rank == 0) {
        EXPECT_OK(tn_comm_graph_launch_begin(step.comm_graph, a));
        tn_comm_graph_launch_cancel(step.comm_graph);
        EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL));
        tn_comm_abort(comm, "the graph can not be launched here");
    } else {
        test_sim_stall(device, a, 1);
        launch(&step, a);
        EXPECT_OK(tn_rendezvous_gather(ranks, NULL, 0, NULL)); /* the other has not failed yet */
        assert_int_equal(wait_for_failure(), TN_COMM_ERROR);
        EXPECT_STATUS(reduce(b), TN_COMM_ERROR);
        EXPECT_ERROR_HAS("rank 0 of 2: given up: the graph can not be launched here");
        test_sim_stall(device, a, 0);
    }
    expect_end(&step, TN_COMM_ERROR);
    tn_rendezvous_destroy(ranks);
    close_device();
}

static void a_launch_that_one_gives_up_is_told_to_the_others(void **state) {
    (void)state;
    test_ranks_run(2, give_up_a_launch, NULL);
}

#define SCRIPTED(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        /* Ranks are forked, before anything has opened the device here. */
        cmocka_unit_test(a_launch_and_a_call_that_meet_are_named),
        cmocka_unit_test(a_captured_call_and_another_that_meet_are_named),
        cmocka_unit_test(graphs_that_differ_in_messages_are_launched),
        cmocka_unit_test(a_launch_that_is_cancelled_can_be_begun_again),
        cmocka_unit_test(a_launch_that_one_gives_up_is_told_to_the_others),
        SCRIPTED(nccl_is_called_once_and_the_graph_runs_again_and_again),
        SCRIPTED(the_watch_spoils_no_capture),
        SCRIPTED(a_spoiled_capture_does_not_reach_nccl),
        SCRIPTED(what_nccl_refuses_leaves_the_capture_valid),
        SCRIPTED(memory_and_ranks_stay_as_they_are_for_graphs),
        SCRIPTED(a_registered_ring_stays_as_it_is_for_graphs),
        SCRIPTED(a_graph_that_hangs_is_given_up),
        SCRIPTED(a_communicator_is_given_up_while_its_graph_lives),
        SCRIPTED(one_that_fails_during_a_launch_ends_it),
        SCRIPTED(one_that_fails_in_a_capture_is_aborted),
        SCRIPTED(one_that_had_graphs_ends_as_ever),
    };
    const int refusal = scripted_nccl_open(TENURE_BUILD_DIR, &script, &engine);
    if (refusal) return refusal;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
