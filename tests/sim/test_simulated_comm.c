/* The simulated engine: how long collectives take, what they touch, and what is refused. */
#include <string.h>

#include "tenure_simulated.h"
#include "test_pools.h"
#include "test_support.h"

enum { RANKS_MAX = 64 };

static tn_device *device;
static tn_pool *pool;
static tn_stream stream, other;
static tnsim_interval last;
static int intervals;

static void note_interval(void *context, const tnsim_interval *interval) {
    (void)context;
    last = *interval;
    intervals++;
}

static int set_up(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    (void)state;
    device = test_open_sim(0, 0);
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    EXPECT_OK(tn_stream_create(device, &stream));
    EXPECT_OK(tn_stream_create(device, &other));
    test_sim_get()->watch(note_interval, NULL);
    return 0;
}

static void close_all_but_the_device(void) {
    test_sim_get()->watch(NULL, NULL);
    EXPECT_OK(tn_stream_destroy(device, stream));
    EXPECT_OK(tn_stream_destroy(device, other));
    EXPECT_OK(tn_pool_destroy(pool));
}

static int tear_down(void **state) {
    (void)state;
    close_all_but_the_device();
    test_close_sim(device);
    return 0;
}

/* Where races are what was tested. */
static int tear_down_racing(void **state) {
    (void)state;
    close_all_but_the_device();
    EXPECT_OK(tn_device_destroy(device));
    return 0;
}

static tn_comm *open_comm(int rank, int rank_count, const tn_simulated_links *links) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    config.device = device;
    config.engine = TN_COMM_SIMULATED;
    config.rank = rank, config.rank_count = rank_count;
    config.links = links;
    EXPECT_OK(tn_comm_create(&config, &comm));
    return comm;
}

static void *block_of(size_t bytes) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(pool, bytes, stream, NULL, &block));
    return block;
}

/* ---- time ------------------------------------------------------------------------------------ */

static void expect_time(const char *what, double us) {
    const double took = last.end_us - last.begin_us;
    assert_string_equal(last.what, what);
    if (took < us - 0.002 || took > us + 0.002)
        fail_msg("%s took %.3f us, not %.3f", what, took, us);
}

/* 16 ranks on 2 nodes of 8: a ring over both has 8 ports of the network, 400,000 bytes a us, and 14
 * steps of 1 us within nodes and 1 of 5 us between them. */
static void collectives_take_the_time_of_the_model(void **state) {
    tn_comm *comm = open_comm(3, 16, NULL);
    char *part = block_of(MIB_BYTES), *whole = block_of(16 * MIB_BYTES);
    const double steps_us = 14.0 * 1.0 + 1.0 * 5.0, launch_us = 2.0;
    const double part_us = 15.0 * MIB_BYTES / 400e3;
    (void)state;
    EXPECT_OK(tn_all_gather(comm, part, whole, MIB_BYTES, stream));
    expect_time("all_gather", launch_us + steps_us + part_us);
    EXPECT_OK(tn_reduce_scatter(comm, whole, part, MIB_BYTES / 4, TN_FP32, TN_REDUCE_SUM, stream));
    expect_time("reduce_scatter", launch_us + steps_us + part_us);
    EXPECT_OK(tn_all_reduce(comm, whole, whole, 4 * MIB_BYTES, TN_FP32, TN_REDUCE_SUM, stream));
    expect_time("all_reduce", launch_us + 2.0 * (steps_us + part_us));
    EXPECT_OK(tn_all_reduce(comm, part, part, 17, TN_BF16, TN_REDUCE_MAX, stream));
    expect_time("all_reduce", launch_us + 2.0 * (steps_us + 15.0 * 2 * 2 / 400e3));
    EXPECT_OK(tn_broadcast(comm, part, MIB_BYTES, 0, stream));
    expect_time("broadcast", launch_us + steps_us + MIB_BYTES / 400e3);
    EXPECT_OK(tn_barrier(comm, stream));
    expect_time("barrier", launch_us + steps_us);
    assert_int_equal(intervals, 6);
    EXPECT_OK(tn_free(part, stream));
    EXPECT_OK(tn_free(whole, stream));
    EXPECT_OK(tn_comm_destroy(comm));
}

static double gather_us(int rank_count, const tn_simulated_links *links) {
    tn_comm *comm = open_comm(0, rank_count, links);
    char *whole = block_of((size_t)rank_count * MIB_BYTES);
    EXPECT_OK(tn_all_gather(comm, whole, whole, MIB_BYTES, stream));
    EXPECT_OK(tn_free(whole, stream));
    EXPECT_OK(tn_comm_destroy(comm));
    return last.end_us - last.begin_us;
}

static void expect_gather_us(int rank_count, const tn_simulated_links *links, double us) {
    const double took = gather_us(rank_count, links);
    if (took < us - 0.002 || took > us + 0.002)
        fail_msg("%d ranks took %.3f us, not %.3f", rank_count, took, us);
}

static void links_say_how_fast_a_group_is(void **state) {
    tn_simulated_links links = TN_SIMULATED_LINKS_INIT;
    (void)state;
    expect_gather_us(1, NULL, 2.0);
    expect_gather_us(8, NULL, 2.0 + 7.0 + 7.0 * MIB_BYTES / 450e3);
    /* A rank alone on its node has one port for all. */
    expect_gather_us(9, NULL, 2.0 + 7.0 + 5.0 + 8.0 * MIB_BYTES / 50e3);
    links.ranks_per_node = 2;
    links.node_bytes_per_us = 1000.0, links.network_bytes_per_us = 600.0;
    links.node_latency_us = 3.0, links.network_latency_us = 10.0;
    /* Two ports are more than what the node's own link takes. */
    expect_gather_us(4, &links, 2.0 + 2 * 3.0 + 10.0 + 3.0 * MIB_BYTES / 1000.0);
    links.network_bytes_per_us = 400.0;
    expect_gather_us(4, &links, 2.0 + 2 * 3.0 + 10.0 + 3.0 * MIB_BYTES / 800.0);
}

/* The ring passes on all but the least rank's part; a group's latency is that of one call. */
static void uneven_calls_take_the_time_of_what_goes_around(void **state) {
    tn_comm *comm = open_comm(1, 4, NULL);
    const tn_segment segments[] = {{0, 0, 3000}, {2, 3000, 5000}, {1, 8000, 1000}, {0, 9000, 500}};
    char *whole = block_of(MIB_BYTES), *part = block_of(MIB_BYTES);
    (void)state;
    EXPECT_OK(tn_all_gather_uneven(comm, part, whole, segments, 4, stream));
    expect_time("all_gather_uneven", 2.0 + 3.0 + 9500 / 450e3); /* rank 3 has nothing */
    EXPECT_OK(
        tn_reduce_scatter_uneven(comm, whole, whole, segments, 3, TN_FP32, TN_REDUCE_SUM, stream));
    expect_time("reduce_scatter_uneven", 2.0 + 3.0 + 9000.0 * 4 / 450e3);
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_all_gather(comm, part, whole, 45000, stream));
    EXPECT_OK(tn_all_gather(comm, part + 45000, whole + 200000, 45000, stream));
    EXPECT_OK(tn_comm_group_end(comm, stream));
    expect_time("group", 2.0 + 3.0 + 2 * 3 * 45000 / 450e3);
    EXPECT_OK(tn_free(part, stream));
    EXPECT_OK(tn_free(whole, stream));
    EXPECT_OK(tn_comm_destroy(comm));
}

/* Of 16 ranks on 2 nodes, 7 others are near this one and 8 far. */
static void messages_take_the_time_of_the_links_that_carry_them(void **state) {
    tn_comm *comm = open_comm(2, 16, NULL);
    char *from = block_of(16 * MIB_BYTES), *to = block_of(16 * MIB_BYTES);
    size_t sent[16] = {0}, received[16] = {0};
    (void)state;
    EXPECT_OK(tn_all_to_all(comm, from, to, 90000, stream));
    expect_time("all_to_all", 2.0 + 5.0 + 8 * 90000 / 50e3);
    sent[3] = 9000000, sent[2] = received[2] = 1000000, received[0] = 500000;
    EXPECT_OK(tn_all_to_all_uneven(comm, from, sent, NULL, to, received, NULL, stream));
    expect_time("all_to_all_uneven", 2.0 + 1.0 + 9000000 / 450e3); /* itself for nothing */
    sent[3] = 0, received[9] = 100000;
    EXPECT_OK(tn_all_to_all_uneven(comm, from, sent, NULL, to, received, NULL, stream));
    expect_time("all_to_all_uneven", 2.0 + 5.0 + 100000 / 50e3);
    EXPECT_OK(tn_send(comm, from, 450000, 3, stream));
    expect_time("send", 2.0 + 1.0 + 1.0);
    EXPECT_OK(tn_receive(comm, to, 450000, 13, stream));
    expect_time("receive", 2.0 + 5.0 + 9.0);
    EXPECT_OK(tn_comm_group_begin(comm));
    EXPECT_OK(tn_send(comm, from, 450000, 3, stream));
    EXPECT_OK(tn_receive(comm, to, 900000, 1, stream));
    EXPECT_OK(tn_comm_group_end(comm, stream));
    expect_time("group", 2.0 + 1.0 + 2.0); /* both ways at once */
    EXPECT_OK(tn_free(from, stream));
    EXPECT_OK(tn_free(to, stream));
    EXPECT_OK(tn_comm_destroy(comm));
}

/* ---- sub-groups ------------------------------------------------------------------------------ */

/* Of 16 ranks, "near" are the pairs, "far" those 8 apart, in falling order; one is in none. */
static void color_of(void *context, const char *name, int rank, int *color, int *key) {
    (void)context;
    *color = strcmp(name, "near") == 0 ? rank / 2 : rank == 7 ? -1 : rank % 8;
    *key = strcmp(name, "near") == 0 ? 0 : -rank;
}

static void expect_group(tn_comm *comm, int rank, int rank_count) {
    assert_int_equal(tn_comm_rank(comm), rank);
    assert_int_equal(tn_comm_size(comm), rank_count);
}

static void a_split_has_the_ranks_that_split_of_says(void **state) {
    tn_simulated_links links = TN_SIMULATED_LINKS_INIT;
    tn_comm *near_comm, *far_comm, *comm;
    char *whole = block_of(2 * MIB_BYTES);
    (void)state;
    links.split_of = color_of;
    comm = open_comm(3, 16, &links);
    EXPECT_OK(tn_comm_split(comm, 1, 0, "near", &near_comm));
    expect_group(near_comm, 1, 2);
    assert_string_equal(tn_comm_name(near_comm), "near");
    EXPECT_OK(tn_comm_split(comm, 3, -3, "far", &far_comm));
    expect_group(far_comm, 1, 2); /* 11, 3 */
    EXPECT_OK(tn_all_gather(near_comm, whole + MIB_BYTES, whole, MIB_BYTES, stream));
    expect_time("all_gather", 2.0 + 1.0 + MIB_BYTES / 450e3);
    EXPECT_OK(tn_all_gather(far_comm, whole + MIB_BYTES, whole, MIB_BYTES, stream));
    expect_time("all_gather", 2.0 + 5.0 + MIB_BYTES / 50e3);
    EXPECT_OK(tn_comm_destroy(comm)); /* in any order */
    EXPECT_OK(tn_comm_destroy(near_comm));
    EXPECT_OK(tn_comm_destroy(far_comm));
    EXPECT_OK(tn_free(whole, stream));
}

static void a_split_that_nobody_can_answer_is_refused(void **state) {
    tn_simulated_links links = TN_SIMULATED_LINKS_INIT;
    tn_comm *comm = open_comm(7, 16, &links), *none = comm;
    (void)state;
    EXPECT_STATUS(tn_comm_split(comm, 0, 0, "near", &none), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the other ranks are not there to say their colors");
    EXPECT_OK(tn_comm_destroy(comm));
    links.split_of = color_of;
    comm = open_comm(7, 16, &links);
    EXPECT_STATUS(tn_comm_split(comm, 4, 0, "near", &none), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("rank 7 passed color 4 and key 0, and links.split_of says 3 and 0");
    EXPECT_OK(tn_comm_split(comm, -1, -7, "far", &none));
    assert_null(none);
    EXPECT_OK(tn_comm_destroy(comm));
}

/* ---- order, bytes ---------------------------------------------------------------------------- */

static void bytes_are_counted_as_by_every_engine(void **state) {
    tn_comm *comm = open_comm(1, 3, NULL);
    tn_comm_stats stats = TN_COMM_STATS_INIT;
    char *whole = block_of(3 * MIB_BYTES);
    (void)state;
    EXPECT_OK(tn_all_gather(comm, whole + MIB_BYTES, whole, MIB_BYTES, stream));
    EXPECT_OK(tn_all_gather(comm, whole, whole, 0, stream));
    EXPECT_OK(tn_all_reduce(comm, whole, whole, 10, TN_FP32, TN_REDUCE_SUM, stream));
    EXPECT_OK(tn_comm_stats_get(comm, &stats));
    assert_int_equal(stats.calls[TN_ALL_GATHER], 1);
    assert_int_equal(stats.wire_bytes[TN_ALL_GATHER], 2 * MIB_BYTES);
    assert_int_equal(stats.wire_bytes[TN_ALL_REDUCE], (10 - 4 + 2 * 4) * 4);
    assert_string_equal(tn_comm_engine_name(comm), "simulated");
    assert_int_equal(tn_comm_rank(comm), 1);
    assert_int_equal(tn_comm_size(comm), 3);
    EXPECT_OK(tn_free(whole, stream));
    EXPECT_OK(tn_comm_destroy(comm));
}

static void a_wait_ends_when_the_virtual_time_has_come(void **state) {
    tn_comm *comm = open_comm(0, 64, NULL);
    char *whole = block_of((size_t)64 * 64 * MIB_BYTES);
    (void)state;
    EXPECT_OK(tn_all_gather(comm, whole, whole, (size_t)64 * MIB_BYTES, stream));
    EXPECT_OK(tn_comm_wait(comm));
    assert_true(test_sim_get()->now_us() >= last.end_us);
    EXPECT_OK(tn_free(whole, stream));
    EXPECT_OK(tn_comm_destroy(comm));
}

/* A collective is seen to read and write as an op is: one that nothing orders behind another
 * communicator's, of the same memory, is a race. */
static void work_that_nothing_orders_is_a_race(void **state) {
    tn_comm *comm = open_comm(0, 4, NULL), *second = open_comm(0, 4, NULL);
    char *whole = block_of(4 * MIB_BYTES);
    (void)state;
    EXPECT_OK(tn_all_gather(comm, whole, whole, MIB_BYTES, stream));
    EXPECT_OK(tn_all_gather(comm, whole, whole, MIB_BYTES, other)); /* in the order of comm */
    assert_int_equal(test_sim_get()->race_count(), 0);
    EXPECT_OK(tn_broadcast(second, whole + 3 * MIB_BYTES, 16, 0, stream));
    assert_int_equal(test_sim_get()->race_count(), 1);
    assert_non_null(strstr(test_sim_get()->race_text(0), "all_gather"));
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_comm_destroy(second));
    EXPECT_OK(tn_free(whole, stream));
}

/* ---- what is refused ------------------------------------------------------------------------- */

static void expect_refusal(const tn_comm_config *config, tn_status status, const char *words) {
    tn_comm *comm = NULL;
    EXPECT_STATUS(tn_comm_create(config, &comm), status);
    EXPECT_ERROR_HAS(words);
    assert_null(comm);
}

static void wrong_configurations_are_refused_by_name(void **state) {
    static const tn_comm_id id;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_simulated_links links = TN_SIMULATED_LINKS_INIT;
    (void)state;
    config.device = device;
    config.links = &links;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "links are for TN_COMM_SIMULATED");
    config.engine = TN_COMM_SIMULATED;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "rank 0 of 0: simulated");
    config.rank = 4, config.rank_count = 4;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "rank 4 of 4: simulated");
    config.rank = 0, config.id = &id;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "nccl_comm and rendezvous are for other");
    config.id = NULL;
    links.size = 1;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "tn_simulated_links.size is 1");
    links.size = sizeof links, links.ranks_per_node = -1;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "ranks_per_node is -1");
    links.ranks_per_node = 8, links.network_bytes_per_us = -5.0;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "network_bytes_per_us is -5");
    links.network_bytes_per_us = 0.0, links.node_latency_us = 1.0 / 0.0;
    expect_refusal(&config, TN_INVALID_ARGUMENT, "node_latency_us is inf");
    config.links = NULL, config.device = test_open_host();
    expect_refusal(&config, TN_UNSUPPORTED, "works on simulated CUDA devices, not on");
    EXPECT_OK(tn_device_destroy(config.device));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_take_the_time_of_the_model),
        cmocka_unit_test(links_say_how_fast_a_group_is),
        cmocka_unit_test(uneven_calls_take_the_time_of_what_goes_around),
        cmocka_unit_test(messages_take_the_time_of_the_links_that_carry_them),
        cmocka_unit_test(a_split_has_the_ranks_that_split_of_says),
        cmocka_unit_test(a_split_that_nobody_can_answer_is_refused),
        cmocka_unit_test(bytes_are_counted_as_by_every_engine),
        cmocka_unit_test(a_wait_ends_when_the_virtual_time_has_come),
        cmocka_unit_test(wrong_configurations_are_refused_by_name),
    };
    const struct CMUnitTest racing[] = {cmocka_unit_test(work_that_nothing_orders_is_a_race)};
    int failed = TEST_RUN_GROUP(tests, set_up, tear_down);
    return failed + TEST_RUN_GROUP(racing, set_up, tear_down_racing);
}
