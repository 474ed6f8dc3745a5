/* Checkpoints of a graph pool: the layout comes back as it was, or nothing changes. */
#include "test_graphs.h"

#define MIB     MIB_BYTES
#define RESULTS 5

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
    test_graph graph;
    tn_graph_memory memory;
    void *results[RESULTS]; /* of the graph: 1, 2 ... MiB */
} fixture;

static size_t bytes_of(int result) { return (size_t)(result + 1) * MIB; }

static int open_as(void **state, tn_pool_backing backing) {
    static fixture f;
    f.device = test_open_sim(0, 0);
    f.pool = test_open_graph_pool(f.device, backing);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    test_capture_begin(f.device, f.a, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(f.pool, f.a));
    for (int i = 0; i < RESULTS; i++) {
        f.results[i] = test_take(f.pool, bytes_of(i), f.a);
        test_sim_write(f.device, f.a, f.results[i], bytes_of(i), 10);
    }
    EXPECT_OK(tn_graph_capture_end(f.pool, &f.memory));
    f.graph = test_capture_end(f.device, f.a);
    test_graph_launch(f.device, &f.graph, f.a);
    *state = &f;
    return 0;
}

static int open_vmm(void **state) { return open_as(state, TN_BACKING_VMM); }
static int open_segments(void **state) { return open_as(state, TN_BACKING_PLAIN); }

/* All results are live again when a test ends. */
static int close_fixture(void **state) {
    fixture *f = *state;
    for (int i = 0; i < RESULTS; i++)
        test_give(f->pool, f->results[i], f->a);
    test_graph_destroy(f->device, &f->graph);
    EXPECT_OK(tn_graph_memory_release(f->pool, f->memory, f->a));
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    test_close_sim(f->device);
    return 0;
}

static tn_checkpoint *take_checkpoint(fixture *f) {
    tn_checkpoint *checkpoint = NULL;
    EXPECT_OK(tn_pool_checkpoint(f->pool, &checkpoint));
    return checkpoint;
}

static void expect_all_live(fixture *f) {
    tn_pool_stats stats = test_pool_stats(f->pool);
    assert_int_equal(stats.live_blocks, RESULTS);
    assert_int_equal(stats.live_bytes, 15 * MIB);
    for (int i = 0; i < RESULTS; i++) {
        size_t bytes = 0;
        EXPECT_OK(tn_block_info(f->results[i], &bytes, NULL));
        assert_int_equal(bytes, bytes_of(i));
    }
}

static void blocks_that_were_freed_are_live_again(void **state) {
    fixture *f = *state;
    tn_checkpoint *checkpoint = take_checkpoint(f);
    for (int i = 0; i < RESULTS; i += 2)
        test_give(f->pool, f->results[i], f->a);
    EXPECT_OK(tn_pool_restore(f->pool, checkpoint, f->a));
    expect_all_live(f);
    for (int i = 0; i < RESULTS; i++)
        test_give(f->pool, f->results[i], f->a);
    EXPECT_OK(tn_pool_restore(f->pool, checkpoint, f->a));
    expect_all_live(f);
    EXPECT_OK(tn_pool_restore(f->pool, checkpoint, f->a)); /* nothing to do */
    expect_all_live(f);
    tn_checkpoint_destroy(checkpoint);
}

/* The stream comes after what used the memory elsewhere, by a wait on the device. */
static void the_stream_waits_for_the_last_uses(void **state) {
    fixture *f = *state;
    tn_checkpoint *checkpoint = take_checkpoint(f);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_read(f->device, f->b, f->results[1], bytes_of(1), 1000);
    test_give(f->pool, f->results[1], f->b);
    uint64_t waits = test_pool_stats(f->pool).stream_waits;
    EXPECT_OK(tn_pool_restore(f->pool, checkpoint, f->a));
    assert_int_equal(test_pool_stats(f->pool).stream_waits, waits + 1);
    test_sim_write(f->device, f->a, f->results[1], bytes_of(1), 10);
    expect_all_live(f);
    tn_checkpoint_destroy(checkpoint);
}

/* What a capture after the first graph finds: the first one's results taken, the rest free. */
static void a_capture_after_a_restore_spares_the_blocks(void **state) {
    fixture *f = *state;
    tn_checkpoint *checkpoint = take_checkpoint(f);
    tn_graph_memory memory;
    for (int i = 0; i < RESULTS; i++)
        test_give(f->pool, f->results[i], f->a);
    EXPECT_OK(tn_stream_synchronize(f->device, f->a));
    EXPECT_OK(tn_pool_restore(f->pool, checkpoint, f->a));
    test_capture_begin(f->device, f->b, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(f->pool, f->b));
    for (int i = 0; i < 8; i++) {
        void *block = test_take(f->pool, 2 * MIB, f->b);
        test_sim_write(f->device, f->b, block, 2 * MIB, 10);
        EXPECT_OK(tn_free(block, f->b));
        for (int k = 0; k < RESULTS; k++)
            assert_ptr_not_equal(block, f->results[k]);
    }
    EXPECT_OK(tn_graph_capture_end(f->pool, &memory));
    test_graph second = test_capture_end(f->device, f->b);
    test_graph_launch(f->device, &second, f->a);
    test_graph_destroy(f->device, &second);
    EXPECT_OK(tn_graph_memory_release(f->pool, memory, f->a));
    expect_all_live(f);
    tn_checkpoint_destroy(checkpoint);
}

/* ---- what can not be ------------------------------------------------------------------------- */

static void expect_refused(fixture *f, const tn_checkpoint *checkpoint, tn_status expected,
                           const char *words) {
    tn_pool_stats before = test_pool_stats(f->pool);
    tn_pool_stats after;
    EXPECT_STATUS(tn_pool_restore(f->pool, checkpoint, f->a), expected);
    EXPECT_ERROR_HAS(words);
    after = test_pool_stats(f->pool);
    assert_int_equal(after.live_bytes, before.live_bytes);
    assert_int_equal(after.live_blocks, before.live_blocks);
    assert_int_equal(after.allocs, before.allocs);
    assert_int_equal(after.reserved_bytes, before.reserved_bytes);
}

static void a_block_that_is_not_in_it_stands_in_the_way(void **state) {
    fixture *f = *state;
    tn_checkpoint *all = take_checkpoint(f);
    test_give(f->pool, f->results[0], f->a);
    test_give(f->pool, f->results[4], f->a);
    tn_checkpoint *some = take_checkpoint(f);
    EXPECT_OK(tn_pool_restore(f->pool, all, f->a));
    expect_refused(f, some, TN_IN_USE, "free it first");
    test_give(f->pool, f->results[4], f->a);
    expect_refused(f, some, TN_IN_USE, "free it first");
    EXPECT_OK(tn_pool_restore(f->pool, all, f->a));
    expect_all_live(f);
    tn_checkpoint_destroy(all);
    tn_checkpoint_destroy(some);
}

static void memory_that_has_gone_back_can_not_be_restored(void **state) {
    fixture *f = *state;
    tn_pool *other = test_open_graph_pool(f->device, TN_BACKING_VMM);
    tn_checkpoint *checkpoint = NULL;
    tn_graph_memory memory;
    test_capture_begin(f->device, f->b, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(other, f->b));
    void *kept = test_take(other, 2 * MIB, f->b);
    void *freed = test_take(other, 32 * MIB, f->b);
    EXPECT_OK(tn_graph_capture_end(other, &memory));
    test_graph graph = test_capture_end(f->device, f->b);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(tn_pool_checkpoint(other, &checkpoint));
    EXPECT_STATUS(tn_pool_restore(f->pool, checkpoint, f->a), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("another pool");
    test_give(other, kept, f->b);
    test_give(other, freed, f->b);
    EXPECT_OK(tn_graph_memory_release(other, memory, f->b));
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    EXPECT_OK(tn_pool_trim(other, 0, NULL));
    EXPECT_STATUS(tn_pool_restore(other, checkpoint, f->b), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("gone back to the driver");
    assert_int_equal(test_pool_stats(other).live_blocks, 0);
    tn_checkpoint_destroy(checkpoint);
    EXPECT_OK(tn_pool_destroy(other));
}

static void an_open_capture_stands_in_the_way(void **state) {
    fixture *f = *state;
    tn_checkpoint *checkpoint = take_checkpoint(f);
    tn_checkpoint *none = NULL;
    tn_graph_memory memory;
    test_capture_begin(f->device, f->b, TEST_CAPTURE_RELAXED);
    EXPECT_STATUS(tn_pool_restore(f->pool, checkpoint, f->b), TN_INVALID_STATE);
    EXPECT_OK(tn_graph_capture_begin(f->pool, f->b));
    EXPECT_STATUS(tn_pool_checkpoint(f->pool, &none), TN_INVALID_STATE);
    expect_refused(f, checkpoint, TN_INVALID_STATE, "capture open");
    assert_null(none);
    EXPECT_OK(tn_graph_capture_end(f->pool, &memory));
    test_graph graph = test_capture_end(f->device, f->b);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(tn_graph_memory_release(f->pool, memory, f->b));
    tn_checkpoint_destroy(checkpoint);
}

static void wrong_arguments_are_refused(void **state) {
    fixture *f = *state;
    tn_checkpoint *checkpoint = NULL;
    tn_pool *ordinary = test_open_pool(f->device, TN_BACKING_VMM, 0);
    EXPECT_STATUS(tn_pool_checkpoint(NULL, &checkpoint), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_checkpoint(f->pool, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_checkpoint(ordinary, &checkpoint), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_pool_restore(f->pool, NULL, f->a), TN_INVALID_ARGUMENT);
    checkpoint = take_checkpoint(f);
    EXPECT_STATUS(tn_pool_restore(NULL, checkpoint, f->a), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_restore(ordinary, checkpoint, f->a), TN_UNSUPPORTED);
    tn_checkpoint_destroy(checkpoint);
    tn_checkpoint_destroy(NULL);
    EXPECT_OK(tn_pool_destroy(ordinary));
}

int main(void) {
#define VMM(name) cmocka_unit_test_setup_teardown(name, open_vmm, close_fixture)
#define SEGMENTS(name)                                                                             \
    { #name " (segments)", name, open_segments, close_fixture, NULL }
    const struct CMUnitTest tests[] = {
        VMM(blocks_that_were_freed_are_live_again),
        SEGMENTS(blocks_that_were_freed_are_live_again),
        VMM(the_stream_waits_for_the_last_uses),
        SEGMENTS(the_stream_waits_for_the_last_uses),
        VMM(a_capture_after_a_restore_spares_the_blocks),
        SEGMENTS(a_capture_after_a_restore_spares_the_blocks),
        VMM(a_block_that_is_not_in_it_stands_in_the_way),
        VMM(memory_that_has_gone_back_can_not_be_restored),
        VMM(an_open_capture_stands_in_the_way),
        VMM(wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests_name("sim/graph_checkpoint", tests, NULL, NULL);
}
