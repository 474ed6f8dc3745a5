/* Waits that users put between streams (tn_stream_wait): what the pools learn from them, and what
 * they must not. Every test ends with a device that has seen no race. */
#include "pool_fixture.h"
#include "test_graphs.h"

#define MIB MIB_BYTES
enum { ROUNDS = 50, BLOCK_BYTES = 4 << 20, DRIVER_FAULT = 999 };

/* A pool learns of waits between streams that it knows. */
static void introduce(const pool_fixture *f, tn_stream stream) {
    test_give(f->pool, test_take(f->pool, 512, stream), stream);
}

static pool_fixture open_with(tn_pool_backing backing) {
    const tnsim_config sim = {.size = sizeof sim, .device_count = 2};
    pool_fixture f = {.device = test_open_sim_as(&sim)};
    f.pool = test_open_pool(f.device, backing, 0);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    f.c = test_open_stream(f.device);
    introduce(&f, f.a);
    introduce(&f, f.b);
    introduce(&f, f.c);
    return f;
}

static void *take(const pool_fixture *f, tn_stream stream) {
    void *block = NULL;
    EXPECT_OK(tn_alloc(f->pool, BLOCK_BYTES, stream, NULL, &block));
    return block;
}

static void write_block(const pool_fixture *f, void *block, tn_stream stream) {
    test_sim_write(f->device, stream, block, BLOCK_BYTES, 100);
}

static uint64_t pool_waits(const pool_fixture *f) { return test_pool_stats(f->pool).stream_waits; }

/* A block that `stream` has written and freed. */
static void *leave_block(const pool_fixture *f, tn_stream stream) {
    void *block = take(f, stream);
    write_block(f, block, stream);
    EXPECT_OK(tn_free(block, stream));
    return block;
}

/* The same memory for another stream: the waits that the pool put there. */
static uint64_t waits_to_take(const pool_fixture *f, const void *left, tn_stream stream) {
    uint64_t before = pool_waits(f);
    void *block = take(f, stream);
    assert_ptr_equal(block, left);
    write_block(f, block, stream);
    EXPECT_OK(tn_free(block, stream));
    return pool_waits(f) - before;
}

/* ---- two streams that use each other's blocks ----------------------------------------------- */

typedef struct counts {
    uint64_t records;
    uint64_t waits;
} counts;

static counts counts_now(const pool_fixture *f) {
    return (counts){test_calls(f->device, TN_CALL_EVENT_RECORD),
                    test_calls(f->device, TN_CALL_STREAM_WAIT)};
}

/* Each stream's block is used and freed by the other one. Then, if told so, each waits for the
 * other: the blocks come back to their own streams. */
static void exchange_blocks(const pool_fixture *f, int is_waited_back) {
    void *of_a = take(f, f->a), *of_b = take(f, f->b);
    write_block(f, of_a, f->a);
    write_block(f, of_b, f->b);
    EXPECT_OK(tn_stream_wait(f->device, f->a, f->b));
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    write_block(f, of_a, f->b);
    write_block(f, of_b, f->a);
    EXPECT_OK(tn_free(of_a, f->b));
    EXPECT_OK(tn_free(of_b, f->a));
    if (!is_waited_back) return;
    EXPECT_OK(tn_stream_wait(f->device, f->a, f->b));
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
}

static void ping_pong_costs_the_users_waits_only(void **state) {
    static const tn_pool_backing backings[] = {TN_BACKING_VMM, TN_BACKING_PLAIN};
    (void)state;
    for (size_t i = 0; i < sizeof backings / sizeof *backings; i++) {
        pool_fixture f = open_with(backings[i]);
        counts before, after;
        exchange_blocks(&f, 1);
        before = counts_now(&f);
        for (int round = 0; round < ROUNDS; round++)
            exchange_blocks(&f, 1);
        after = counts_now(&f);
        assert_int_equal(after.records - before.records, 4 * ROUNDS);
        assert_int_equal(after.waits - before.waits, 4 * ROUNDS);
        assert_int_equal(pool_waits(&f), 0);
        if (backings[i] == TN_BACKING_VMM) /* and it is the same memory all the time */
            assert_int_equal(test_pool_stats(f.pool).peak_reserved_bytes, 2 * BLOCK_BYTES);
        pool_fixture_close(&f);
    }
}

static void without_the_users_waits_the_pool_waits(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    counts before, after;
    (void)state;
    exchange_blocks(&f, 0);
    before = counts_now(&f);
    for (int round = 0; round < ROUNDS; round++)
        exchange_blocks(&f, 0);
    after = counts_now(&f);
    assert_int_equal(pool_waits(&f), 2 * ROUNDS);
    assert_int_equal(after.records - before.records, (2 + 2) * ROUNDS);
    assert_int_equal(after.waits - before.waits, (2 + 2) * ROUNDS);
    pool_fixture_close(&f);
}

/* ---- what a wait covers --------------------------------------------------------------------- */

static void work_before_the_wait_is_covered(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    void *left = leave_block(&f, f.b);
    (void)state;
    EXPECT_OK(tn_stream_wait(f.device, f.a, f.b));
    assert_int_equal(waits_to_take(&f, left, f.a), 0);
    pool_fixture_close(&f);
}

static void work_after_the_wait_is_not(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    void *block = take(&f, f.b);
    (void)state;
    EXPECT_OK(tn_stream_wait(f.device, f.a, f.b));
    write_block(&f, block, f.b);
    EXPECT_OK(tn_free(block, f.b));
    assert_int_equal(waits_to_take(&f, block, f.a), 1);
    pool_fixture_close(&f);
}

static void what_the_other_had_waited_for_is_covered_too(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    void *left = leave_block(&f, f.a);
    (void)state;
    EXPECT_OK(tn_stream_wait(f.device, f.b, f.a));
    EXPECT_OK(tn_stream_wait(f.device, f.c, f.b));
    assert_int_equal(waits_to_take(&f, left, f.c), 0);
    pool_fixture_close(&f);
}

static void what_the_other_waits_for_later_is_not(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    void *left = leave_block(&f, f.a);
    (void)state;
    EXPECT_OK(tn_stream_wait(f.device, f.c, f.b));
    EXPECT_OK(tn_stream_wait(f.device, f.b, f.a));
    assert_int_equal(waits_to_take(&f, left, f.c), 1);
    pool_fixture_close(&f);
}

/* The stream that frees it comes after the other's use: one wait stands for both. */
static void uses_that_the_last_one_comes_after_are_dropped(void **state) {
    (void)state;
    for (int is_after = 0; is_after < 2; is_after++) {
        pool_fixture f = open_with(TN_BACKING_VMM);
        void *block = take(&f, f.a);
        write_block(&f, block, f.a);
        EXPECT_OK(tn_stream_wait(f.device, f.b, f.a));
        write_block(&f, block, f.b);
        EXPECT_OK(tn_record_use(block, f.b));
        if (is_after) EXPECT_OK(tn_stream_wait(f.device, f.a, f.b));
        EXPECT_OK(tn_free(block, f.a));
        assert_int_equal(waits_to_take(&f, block, f.c), is_after ? 1 : 2);
        pool_fixture_close(&f);
    }
}

/* ---- waits that are none --------------------------------------------------------------------- */

static void a_wait_that_failed_covers_nothing(void **state) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        pool_fixture f = open_with(TN_BACKING_VMM);
        void *left = leave_block(&f, f.b);
        assert_int_equal(test_sim_get()->fault(calls[i], 1, 0, DRIVER_FAULT), 0);
        EXPECT_STATUS(tn_stream_wait(f.device, f.a, f.b), TN_DRIVER_ERROR);
        assert_int_equal(waits_to_take(&f, left, f.a), 1);
        pool_fixture_close(&f);
    }
}

/* In a capture a wait orders the graph, and nothing of what was there before. */
static void a_captured_wait_covers_nothing(void **state) {
    (void)state;
    for (int from_b = 0; from_b < 2; from_b++) {
        pool_fixture f = open_with(TN_BACKING_VMM);
        void *left = leave_block(&f, f.b);
        tn_stream first = from_b ? f.b : f.a, second = from_b ? f.a : f.b;
        test_graph graph;
        test_capture_begin(f.device, first, TEST_CAPTURE_RELAXED);
        EXPECT_OK(tn_stream_wait(f.device, second, first)); /* is in the capture, too */
        EXPECT_OK(tn_stream_wait(f.device, first, second));
        graph = test_capture_end(f.device, first);
        assert_int_equal(waits_to_take(&f, left, f.a), 1);
        test_graph_destroy(f.device, &graph);
        pool_fixture_close(&f);
    }
}

/* ---- streams of others, and streams that end ------------------------------------------------- */

static void streams_of_other_libraries_are_known_by_their_id(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    tn_stream foreign = test_open_foreign_stream(f.device);
    void *left = leave_block(&f, foreign);
    (void)state;
    EXPECT_OK(tn_stream_wait(f.device, f.a, foreign));
    assert_int_equal(waits_to_take(&f, left, f.a), 0);
    EXPECT_OK(tn_stream_wait(f.device, foreign, f.a));
    assert_int_equal(waits_to_take(&f, left, foreign), 0);
    test_close_foreign_stream(f.device, foreign);
    pool_fixture_close(&f);
}

static void a_stream_that_has_ended_leaves_nothing_to_wait_for(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    void *left = leave_block(&f, f.b);
    (void)state;
    EXPECT_OK(tn_stream_wait(f.device, f.a, f.b));
    EXPECT_OK(tn_stream_destroy(f.device, f.b));
    f.b = test_open_stream(f.device);
    assert_int_equal(waits_to_take(&f, left, f.a), 0);
    assert_int_equal(waits_to_take(&f, left, f.b), 1);
    pool_fixture_close(&f);
}

/* Streams of a peer's device: the pool is told by that device. */
static void waits_on_a_peer_are_heard_of(void **state) {
    pool_fixture f = open_with(TN_BACKING_VMM);
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *peer = NULL;
    tn_stream p, q;
    void *block;
    uint64_t before;
    (void)state;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = 1;
    EXPECT_OK(tn_device_create(&config, &peer));
    EXPECT_OK(tn_pool_peer_enable(f.pool, peer));
    p = test_open_stream(peer);
    q = test_open_stream(peer);
    EXPECT_OK(tn_free(take(&f, q), q)); /* the pool knows it */
    block = take(&f, p);
    test_sim_write(peer, p, block, BLOCK_BYTES, 100);
    EXPECT_OK(tn_free(block, p));
    EXPECT_OK(tn_stream_wait(peer, q, p));
    before = pool_waits(&f);
    assert_ptr_equal(take(&f, q), block);
    assert_int_equal(pool_waits(&f), before);
    test_sim_write(peer, q, block, BLOCK_BYTES, 100);
    EXPECT_OK(tn_free(block, q));
    EXPECT_OK(tn_stream_destroy(peer, p));
    EXPECT_OK(tn_stream_destroy(peer, q));
    EXPECT_OK(tn_pool_peer_disable(f.pool, peer));
    EXPECT_OK(tn_device_destroy(peer));
    pool_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ping_pong_costs_the_users_waits_only),
        cmocka_unit_test(without_the_users_waits_the_pool_waits),
        cmocka_unit_test(work_before_the_wait_is_covered),
        cmocka_unit_test(work_after_the_wait_is_not),
        cmocka_unit_test(what_the_other_had_waited_for_is_covered_too),
        cmocka_unit_test(what_the_other_waits_for_later_is_not),
        cmocka_unit_test(uses_that_the_last_one_comes_after_are_dropped),
        cmocka_unit_test(a_wait_that_failed_covers_nothing),
        cmocka_unit_test(a_captured_wait_covers_nothing),
        cmocka_unit_test(streams_of_other_libraries_are_known_by_their_id),
        cmocka_unit_test(a_stream_that_has_ended_leaves_nothing_to_wait_for),
        cmocka_unit_test(waits_on_a_peer_are_heard_of),
    };
    return cmocka_run_group_tests_name("sim/user_waits", tests, NULL, NULL);
}
