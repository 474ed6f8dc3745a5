/* Graph pools under real captures: graphs are launched 100 times while other pools churn, and what
 * they compute is compared byte by byte; captures that fork, share a pool, and fail.
 */
#include "gpu_graphs_support.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "tenure_pool.h"

#define MIB ((size_t)1 << 20)

static gpu_side gpu;
static tn_stream other;

/* ---- captures ------------------------------------------------------------------------------ */

typedef gpu_graph captured;

static void begin(tn_pool *pool) { gpu_graph_begin(&gpu, pool); }

static captured end(tn_pool *pool) { return gpu_graph_end(&gpu, pool); }

static int end_what_is_left(void **state) {
    (void)state;
    gpu_graph_end_what_is_left(&gpu);
    return 0;
}

static void launch(const captured *graph) { gpu_graph_launch(&gpu, graph); }

static void drop(tn_pool *pool, const captured *graph) { gpu_graph_drop(&gpu, pool, graph); }

/* ---- blocks -------------------------------------------------------------------------------- */

static tn_pool *open_pool(void) {
    tn_pool *pool = NULL;
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &pool));
    return pool;
}

static void close_pool(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_check(pool));
    EXPECT_OK(tn_pool_stats_get(pool, &stats));
    assert_int_equal(stats.live_bytes, 0);
    EXPECT_OK(tn_pool_destroy(pool));
}

static void *take(tn_pool *pool, size_t bytes, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(pool, bytes, stream, NULL, &block));
    return block;
}

static void fill(void *block, int byte, size_t bytes, tn_stream stream) {
    EXPECT_OK(tn_fill(gpu.device, block, (unsigned char)byte, bytes, stream));
}

static void copy(void *to, const void *from, size_t bytes, tn_stream stream) {
    EXPECT_OK(tn_copy(gpu.device, to, from, bytes, stream));
}

static void expect_filled(const void *block, int byte, size_t bytes) {
    unsigned char *bytes_read = malloc(bytes);
    assert_non_null(bytes_read);
    copy(bytes_read, block, bytes, gpu.stream);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    assert_int_equal(bytes_read[0], byte);
    assert_memory_equal(bytes_read, bytes_read + 1, bytes - 1);
    free(bytes_read);
}

/* Other memory comes, is filled with 0xEE and goes, on a stream that nothing orders with ours. */
static void churn(uint64_t *seed) {
    for (int i = 0; i < 8; i++) {
        size_t bytes = (1 + gpu_random(seed) % 64) * MIB;
        void *block = take(gpu.pool, bytes, other);
        fill(block, 0xEE, bytes, other);
        EXPECT_OK(tn_free(block, other));
    }
    if (gpu_random(seed) % 8 == 0) EXPECT_OK(tn_pool_trim(gpu.pool, 0, NULL));
}

/* ---- tests --------------------------------------------------------------------------------- */

/* input -> first -> second -> result; a third block takes the place of the first. */
static void launches_compute_the_same_each_time(void **state) {
    const size_t bytes = 4 * MIB;
    tn_pool *pool = open_pool();
    uint64_t seed = 1;
    (void)state;
    void *input = take(gpu.pool, bytes, gpu.stream);
    begin(pool);
    void *first = take(pool, bytes, gpu.stream);
    copy(first, input, bytes, gpu.stream);
    void *second = take(pool, bytes, gpu.stream);
    copy(second, first, bytes, gpu.stream);
    EXPECT_OK(tn_free(first, gpu.stream));
    void *third = take(pool, bytes, gpu.stream);
    assert_ptr_equal(third, first);
    fill(third, 0x5A, bytes, gpu.stream);
    void *results[2] = {take(pool, bytes, gpu.stream), take(pool, bytes, gpu.stream)};
    copy(results[0], second, bytes, gpu.stream);
    copy(results[1], third, bytes, gpu.stream);
    EXPECT_OK(tn_free(second, gpu.stream));
    EXPECT_OK(tn_free(third, gpu.stream));
    captured graph = end(pool);
    for (int i = 0; i < 100; i++) {
        fill(input, i, bytes, gpu.stream);
        churn(&seed);
        launch(&graph);
        churn(&seed);
        expect_filled(results[0], i, bytes);
        expect_filled(results[1], 0x5A, bytes);
    }
    drop(pool, &graph);
    EXPECT_OK(tn_free(results[0], gpu.stream));
    EXPECT_OK(tn_free(results[1], gpu.stream));
    EXPECT_OK(tn_free(input, gpu.stream));
    close_pool(pool);
}

static void branches_have_memory_of_their_own(void **state) {
    const size_t bytes = 16 * MIB;
    tn_pool *pool = open_pool();
    void *results[2];
    (void)state;
    begin(pool);
    EXPECT_OK(tn_stream_wait(gpu.device, other, gpu.stream));
    tn_stream streams[2] = {gpu.stream, other};
    for (int i = 0; i < 2; i++) {
        void *scratch = take(pool, bytes, streams[i]);
        fill(scratch, 0x11 * (i + 1), bytes, streams[i]);
        results[i] = take(pool, bytes, streams[i]);
        copy(results[i], scratch, bytes, streams[i]);
        EXPECT_OK(tn_free(scratch, streams[i]));
    }
    EXPECT_OK(tn_stream_wait(gpu.device, gpu.stream, other));
    captured graph = end(pool);
    for (int i = 0; i < 100; i++) {
        fill(results[0], 0, bytes, gpu.stream);
        fill(results[1], 0, bytes, gpu.stream);
        launch(&graph);
        expect_filled(results[0], 0x11, bytes);
        expect_filled(results[1], 0x22, bytes);
    }
    drop(pool, &graph);
    EXPECT_OK(tn_free(results[0], gpu.stream));
    EXPECT_OK(tn_free(results[1], gpu.stream));
    close_pool(pool);
}

static void two_graphs_share_a_pool(void **state) {
    const size_t bytes = 32 * MIB;
    tn_pool *pool = open_pool();
    captured graphs[2];
    void *results[2];
    tn_pool_stats stats[2];
    (void)state;
    for (int i = 0; i < 2; i++) {
        begin(pool);
        void *scratch = take(pool, bytes, gpu.stream);
        fill(scratch, i + 1, bytes, gpu.stream);
        results[i] = take(pool, MIB, gpu.stream);
        copy(results[i], scratch, MIB, gpu.stream);
        EXPECT_OK(tn_free(scratch, gpu.stream));
        graphs[i] = end(pool);
        stats[i] = (tn_pool_stats)TN_POOL_STATS_INIT;
        EXPECT_OK(tn_pool_stats_get(pool, &stats[i]));
    }
    assert_true(stats[1].reserved_bytes < stats[0].reserved_bytes + bytes);
    for (int i = 0; i < 100; i++) {
        launch(&graphs[i % 2]);
        expect_filled(results[i % 2], i % 2 + 1, MIB);
    }
    for (int i = 0; i < 2; i++) {
        drop(pool, &graphs[i]);
        EXPECT_OK(tn_free(results[i], gpu.stream));
    }
    close_pool(pool);
}

/* The capture is in global mode, which forbids unsafe calls to every thread. */
static void pools_grow_and_trim_while_a_stream_captures(void **state) {
    tn_pool *pool = open_pool();
    (void)state;
    begin(pool);
    for (int i = 1; i <= 4; i++) {
        void *outside = take(gpu.pool, (size_t)i * 64 * MIB, other);
        fill(outside, 1, MIB, other);
        EXPECT_OK(tn_free(outside, other));
        void *inside = take(pool, (size_t)i * 16 * MIB, gpu.stream);
        fill(inside, 2, MIB, gpu.stream);
        EXPECT_OK(tn_free(inside, gpu.stream));
    }
    EXPECT_OK(tn_pool_trim(gpu.pool, 0, NULL)); /* but to wait for a stream would spoil it */
    captured graph = end(pool);
    EXPECT_OK(tn_stream_synchronize(gpu.device, other));
    launch(&graph);
    drop(pool, &graph);
    close_pool(pool);
}

static void a_spoiled_capture_is_noticed_and_leaves_nothing(void **state) {
    tn_pool *pool = open_pool();
    tn_graph_memory memory = 0;
    void *none = NULL;
    (void)state;
    begin(pool);
    void *first = take(pool, 8 * MIB, gpu.stream);
    fill(first, 1, 8 * MIB, gpu.stream);
    test_capture_spoil(gpu.device, gpu.stream);
    EXPECT_STATUS(tn_alloc(pool, MIB, gpu.stream, NULL, &none), TN_INVALID_STATE);
    EXPECT_STATUS(tn_graph_capture_end(pool, &memory), TN_INVALID_STATE);
    EXPECT_OK(tn_graph_capture_abort(pool));
    test_capture_end_invalid(gpu.device, gpu.stream);
    begin(pool);
    void *again = take(pool, 8 * MIB, gpu.stream);
    assert_ptr_equal(again, first);
    fill(again, 7, 8 * MIB, gpu.stream);
    captured graph = end(pool);
    launch(&graph);
    expect_filled(again, 7, 8 * MIB);
    drop(pool, &graph);
    EXPECT_OK(tn_free(again, gpu.stream));
    close_pool(pool);
}

/* The memory goes and comes back under the graph, at the addresses that its nodes name. */
static void a_graph_can_be_launched_after_a_pause(void **state) {
    const size_t bytes = 64 * MIB;
    tn_pool *pool = open_pool();
    (void)state;
    begin(pool);
    void *scratch = take(pool, bytes, gpu.stream);
    fill(scratch, 0x3C, bytes, gpu.stream);
    void *result = take(pool, bytes, gpu.stream);
    copy(result, scratch, bytes, gpu.stream);
    EXPECT_OK(tn_free(scratch, gpu.stream));
    captured graph = end(pool);
    for (int i = 0; i < 3; i++) {
        fill(result, 0x11, bytes, gpu.stream);
        EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
        EXPECT_OK(tn_pool_pause(pool, 1));
        EXPECT_OK(tn_pool_resume(pool));
        expect_filled(result, 0x11, bytes);
        launch(&graph);
        expect_filled(result, 0x3C, bytes);
    }
    drop(pool, &graph);
    EXPECT_OK(tn_free(result, gpu.stream));
    close_pool(pool);
}

static size_t device_free_bytes(void) {
    size_t free_bytes = 0, total_bytes = 0;
    EXPECT_OK(tn__device_driver(gpu.device)
                  ->memory_info(tn__device_state(gpu.device), &free_bytes, &total_bytes));
    return free_bytes;
}

static void released_memory_goes_back(void **state) {
    const size_t bytes = 512 * MIB;
    tn_pool *pool = open_pool();
    (void)state;
    begin(pool);
    void *scratch = take(pool, bytes, gpu.stream);
    fill(scratch, 1, bytes, gpu.stream);
    EXPECT_OK(tn_free(scratch, gpu.stream));
    captured graph = end(pool);
    launch(&graph);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    size_t before = device_free_bytes();
    EXPECT_OK(tn_pool_trim(pool, 0, NULL));
    assert_int_equal(device_free_bytes(), before);
    launch(&graph);
    drop(pool, &graph);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    EXPECT_OK(tn_pool_trim(pool, 0, NULL));
    assert_true(device_free_bytes() + 64 * MIB >= before + bytes);
    close_pool(pool);
}

int main(void) {
#define TEST(name) cmocka_unit_test_teardown(name, end_what_is_left)
    const struct CMUnitTest tests[] = {
        TEST(launches_compute_the_same_each_time),
        TEST(branches_have_memory_of_their_own),
        TEST(two_graphs_share_a_pool),
        TEST(pools_grow_and_trim_while_a_stream_captures),
        TEST(a_spoiled_capture_is_noticed_and_leaves_nothing),
        TEST(a_graph_can_be_launched_after_a_pause),
        TEST(released_memory_goes_back),
    };
    int failures;
    gpu_open(&gpu);
    EXPECT_OK(tn_stream_create(gpu.device, &other));
    failures = cmocka_run_group_tests_name("gpu/gpu_graph", tests, NULL, NULL);
    if (failures == 0) {
        EXPECT_OK(tn_stream_destroy(gpu.device, other));
        gpu_close(&gpu);
    }
    return failures;
}
