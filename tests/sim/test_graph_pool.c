/* Graph pools on the simulated device: whose memory is whose between launches, inside a capture and
 * between captures. Launches touch what their graphs use, so a pool that gave such memory away
 * would show as a race; one test does so on purpose. */
#include "test_graphs.h"

#define MIB MIB_BYTES

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;  /* the graph pool */
    tn_pool *plain; /* an ordinary one */
    tn_stream a;
    tn_stream b;
    tn_stream c;
} fixture;

static int open_as(void **state, tn_pool_backing backing) {
    static fixture f;
    f.device = test_open_sim(0, 0);
    f.pool = test_open_graph_pool(f.device, backing);
    f.plain = test_open_pool(f.device, TN_BACKING_VMM, 0);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    f.c = test_open_stream(f.device);
    *state = &f;
    return 0;
}

static int open_vmm(void **state) { return open_as(state, TN_BACKING_VMM); }
static int open_segments(void **state) { return open_as(state, TN_BACKING_PLAIN); }

static uint64_t close_with_races(fixture *f) {
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_pool_destroy(f->plain));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    EXPECT_OK(tn_stream_destroy(f->device, f->c));
    return test_close_sim_with_races(f->device);
}

static int close_clean(void **state) {
    assert_int_equal(close_with_races(*state), 0);
    return 0;
}

static void begin(fixture *f, tn_stream stream) {
    test_capture_begin(f->device, stream, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(f->pool, stream));
}

static test_graph end(fixture *f, tn_stream stream, tn_graph_memory *memory) {
    EXPECT_OK(tn_graph_capture_end(f->pool, memory));
    return test_capture_end(f->device, stream);
}

static void *take_and_write(fixture *f, size_t bytes, tn_stream stream) {
    void *block = test_take(f->pool, bytes, stream);
    test_sim_write(f->device, stream, block, bytes, 10);
    return block;
}

/* Captures a graph that uses `bytes` for itself; gives their address. */
static void *capture_scratch(fixture *f, size_t bytes, test_graph *graph, tn_graph_memory *memory) {
    void *scratch;
    begin(f, f->a);
    scratch = take_and_write(f, bytes, f->a);
    test_give(f->pool, scratch, f->a);
    *graph = end(f, f->a, memory);
    return scratch;
}

static void drop(fixture *f, test_graph *graph, tn_graph_memory memory, tn_stream last) {
    test_graph_destroy(f->device, graph);
    EXPECT_OK(tn_graph_memory_release(f->pool, memory, last));
    (void)test_pool_stats(f->pool);
}

/* ---- between launches ------------------------------------------------------------------------ */

/* The other pool churns and runs short in between; nothing of the graph's memory moves to it. */
static void launches_keep_their_memory(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    size_t reserved;
    begin(f, f->a);
    void *scratch = take_and_write(f, 8 * MIB, f->a);
    void *result = take_and_write(f, 4 * MIB, f->a);
    test_give(f->pool, scratch, f->a);
    graph = end(f, f->a, &memory);
    reserved = test_pool_stats(f->pool).reserved_bytes;
    for (int i = 0; i < 100; i++) {
        void *other = test_take(f->plain, (size_t)(1 + i) * MIB, f->b);
        test_graph_launch(f->device, &graph, f->a);
        test_sim_write(f->device, f->b, other, (size_t)(1 + i) * MIB, 50);
        test_give(f->plain, other, f->b);
        assert_int_equal(test_pool_stats(f->pool).reserved_bytes, reserved);
        assert_int_equal(test_pool_stats(f->pool).live_bytes, 4 * MIB);
    }
    test_sim_read(f->device, f->a, result, 4 * MIB, 10);
    drop(f, &graph, memory, f->a);
    test_give(f->pool, result, f->a);
}

static void held_memory_goes_back_only_after_its_release(void **state) {
    fixture *f = *state;
    size_t released = 1;
    tn_graph_memory memory;
    test_graph graph;
    (void)capture_scratch(f, 8 * MIB, &graph, &memory);
    size_t reserved = test_pool_stats(f->pool).reserved_bytes;
    assert_true(reserved >= 8 * MIB);
    test_graph_launch(f->device, &graph, f->a);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 0);
    EXPECT_STATUS(tn_pool_destroy(f->pool), TN_IN_USE);
    EXPECT_ERROR_HAS("holds memory of 1 graphs");
    test_graph_launch(f->device, &graph, f->a);
    drop(f, &graph, memory, f->a);
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 0); /* the last launch is under way */
    EXPECT_OK(tn_stream_synchronize(f->device, f->a));
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, reserved);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, 0);
}

/* A pool that is short takes idle memory of others, but not a graph's. */
static void another_pool_that_is_short_does_not_get_it(void **state) {
    fixture *f = *state;
    size_t before;
    tn_graph_memory memory;
    test_graph graph;
    void *block = NULL;
    (void)capture_scratch(f, 64 * MIB, &graph, &memory);
    before = test_pool_stats(f->pool).reserved_bytes;
    assert_int_equal(test_sim_get()->set_memory(0, before + 32 * MIB), 0);
    EXPECT_STATUS(tn_alloc(f->plain, 64 * MIB, f->b, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, before);
    test_graph_launch(f->device, &graph, f->a);
    drop(f, &graph, memory, f->a);
    EXPECT_OK(tn_device_synchronize(f->device));
    test_give(f->plain, test_take(f->plain, 64 * MIB, f->b), f->b);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, 0);
}

/* What the other tests rely on: memory of a graph in another's hands is a race at the launch. */
static void memory_given_away_between_launches_is_a_race(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    void *scratch = capture_scratch(f, 8 * MIB, &graph, &memory);
    test_graph_launch(f->device, &graph, f->a);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_write(f->device, f->b, scratch, 8 * MIB, 10);
    assert_int_equal(test_sim_get()->race_count(), 0);
    test_graph_launch(f->device, &graph, f->a);
    assert_int_equal(test_sim_get()->race_count(), 1);
    drop(f, &graph, memory, f->a);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    assert_int_equal(close_with_races(f), 1);
}

/* A release that names a stream on which the last launch was not: the trim unmaps too early. */
static void a_release_on_the_wrong_stream_is_a_race(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    (void)capture_scratch(f, 8 * MIB, &graph, &memory);
    test_sim_write(f->device, f->a, NULL, 0, 1000);
    test_graph_launch(f->device, &graph, f->a);
    drop(f, &graph, memory, f->b);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
    assert_int_equal(test_sim_get()->race_count(), 1);
    assert_int_equal(close_with_races(f), 1);
}

/* ---- inside a capture ------------------------------------------------------------------------ */

static void a_stream_of_the_capture_reuses_what_it_freed(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    begin(f, f->a);
    void *first = take_and_write(f, 8 * MIB, f->a);
    test_give(f->pool, first, f->a);
    assert_ptr_equal(take_and_write(f, 8 * MIB, f->a), first);
    test_give(f->pool, first, f->a);
    graph = end(f, f->a, &memory);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_launch(f->device, &graph, f->b);
    EXPECT_OK(tn_stream_wait(f->device, f->a, f->b));
    drop(f, &graph, memory, f->a);
}

/* Branches run side by side: one must not get what the other has freed. */
static void a_forked_stream_gets_memory_of_its_own(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    begin(f, f->a);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    void *of_a = take_and_write(f, 8 * MIB, f->a);
    test_give(f->pool, of_a, f->a);
    void *of_b = take_and_write(f, 8 * MIB, f->b);
    assert_ptr_not_equal(of_a, of_b);
    test_give(f->pool, of_b, f->b);
    assert_ptr_equal(take_and_write(f, 8 * MIB, f->a), of_a);
    assert_ptr_equal(take_and_write(f, 8 * MIB, f->b), of_b);
    test_give(f->pool, of_a, f->a);
    test_give(f->pool, of_b, f->b);
    EXPECT_OK(tn_stream_wait(f->device, f->a, f->b));
    graph = end(f, f->a, &memory);
    for (int i = 0; i < 3; i++)
        test_graph_launch(f->device, &graph, f->c);
    drop(f, &graph, memory, f->c);
}

static void a_use_recorded_in_the_capture_keeps_the_block_from_reuse(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    begin(f, f->a);
    void *block = take_and_write(f, 8 * MIB, f->a);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_read(f->device, f->b, block, 8 * MIB, 100);
    EXPECT_OK(tn_record_use(block, f->b));
    test_give(f->pool, block, f->a);
    void *second = take_and_write(f, 8 * MIB, f->a);
    assert_ptr_not_equal(second, block);
    test_give(f->pool, second, f->a);
    EXPECT_OK(tn_stream_wait(f->device, f->a, f->b));
    graph = end(f, f->a, &memory);
    test_graph_launch(f->device, &graph, f->a);
    drop(f, &graph, memory, f->a);
}

/* pytorch#159594, cuopt#1748: growing in a capture is legal, asks nothing of a captured stream and
 * gives nothing back. */
static void a_capture_grows_without_a_forbidden_call(void **state) {
    fixture *f = *state;
    const tn_driver_call forbidden[] = {TN_CALL_EVENT_RECORD,      TN_CALL_STREAM_WAIT,
                                        TN_CALL_EVENT_SYNCHRONIZE, TN_CALL_MEM_UNMAP,
                                        TN_CALL_MEM_RELEASE,       TN_CALL_MEM_FREE};
    uint64_t before[sizeof forbidden / sizeof *forbidden];
    void *blocks[6];
    tn_graph_memory memory;
    test_graph graph;
    begin(f, f->a);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++)
        before[i] = test_calls(f->device, forbidden[i]);
    for (size_t i = 0; i < 6; i++)
        blocks[i] = take_and_write(f, (i + 1) * 8 * MIB, f->a);
    for (size_t i = 0; i < 6; i++)
        test_give(f->pool, blocks[i], f->a);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++)
        assert_int_equal(test_calls(f->device, forbidden[i]), before[i]);
    assert_true(test_is_capturing(f->device, f->a));
    graph = end(f, f->a, &memory);
    test_graph_launch(f->device, &graph, f->a);
    drop(f, &graph, memory, f->a);
}

/* The same for an ordinary pool that grows and trims for another stream meanwhile. */
static void others_grow_and_trim_while_a_stream_captures(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    test_graph graph;
    begin(f, f->a);
    void *block = test_take(f->plain, 64 * MIB, f->b);
    test_sim_write(f->device, f->b, block, 64 * MIB, 10);
    test_give(f->plain, block, f->b);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    EXPECT_OK(tn_pool_trim(f->plain, 0, NULL));
    assert_int_equal(test_pool_stats(f->plain).reserved_bytes, 0);
    assert_true(test_is_capturing(f->device, f->a));
    test_give(f->pool, take_and_write(f, MIB, f->a), f->a);
    graph = end(f, f->a, &memory);
    drop(f, &graph, memory, f->a);
}

/* An ordinary pool, too, serves a stream that captures, and others beside it. */
static void an_ordinary_pool_serves_a_stream_that_captures(void **state) {
    fixture *f = *state;
    void *freed = test_take(f->plain, 32 * MIB, f->b);
    test_sim_write(f->device, f->b, freed, 32 * MIB, 1000);
    test_give(f->plain, freed, f->b);
    test_capture_begin(f->device, f->a, TEST_CAPTURE_GLOBAL);
    void *block = test_take(f->plain, 32 * MIB, f->a); /* freed may still be in use */
    assert_ptr_not_equal(block, freed);
    test_sim_write(f->device, f->a, block, 32 * MIB, 10);
    void *scratch = test_take(f->plain, 32 * MIB, f->a);
    test_give(f->plain, scratch, f->a);
    void *beside = test_take(f->plain, 32 * MIB, f->c); /* nor can others wait for the capture */
    assert_true(beside != scratch && beside != block);
    assert_true(test_is_capturing(f->device, f->a));
    test_graph graph = test_capture_end(f->device, f->a);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_destroy(f->device, &graph);
    test_give(f->plain, block, f->a);
    test_give(f->plain, beside, f->c);
}

/* A capturing stream can not be asked who it is, and afterwards is not taken for what it was. */
static void a_foreign_stream_may_capture(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    tn_stream foreign = test_open_foreign_stream(f->device);
    test_capture_begin(f->device, foreign, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(f->pool, foreign));
    void *block = take_and_write(f, 4 * MIB, foreign);
    void *ordinary = test_take(f->plain, 4 * MIB, foreign);
    test_sim_write(f->device, foreign, ordinary, 4 * MIB, 10);
    test_give(f->plain, ordinary, foreign);
    assert_true(test_is_capturing(f->device, foreign));
    test_graph graph = end(f, foreign, &memory);
    test_graph_launch(f->device, &graph, foreign);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(tn_graph_memory_release(f->pool, memory, foreign));
    test_give(f->pool, block, foreign);
    void *again = test_take(f->plain, 4 * MIB, foreign);
    test_give(f->plain, again, foreign);
    EXPECT_OK(tn_device_synchronize(f->device));
    test_close_foreign_stream(f->device, foreign);
}

/* pytorch#159594: out of memory in a capture gives nothing back and spoils nothing. */
static void a_shortage_in_a_capture_leaves_all_as_it_was(void **state) {
    fixture *f = *state;
    void *block = NULL;
    test_give(f->plain, test_take(f->plain, 64 * MIB, f->b), f->b);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    assert_int_equal(
        test_sim_get()->set_memory(0, test_pool_stats(f->plain).reserved_bytes + 64 * MIB), 0);
    begin(f, f->a);
    void *first = take_and_write(f, 8 * MIB, f->a);
    tn_pool_stats before = test_pool_stats(f->pool);
    EXPECT_STATUS(tn_alloc(f->pool, 128 * MIB, f->a, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    assert_null(block);
    tn_pool_stats after = test_pool_stats(f->pool);
    assert_int_equal(after.reserved_bytes, before.reserved_bytes);
    assert_int_equal(after.live_bytes, before.live_bytes);
    assert_int_equal(test_pool_stats(f->plain).cached_bytes, 64 * MIB);
    assert_true(test_is_capturing(f->device, f->a));
    test_give(f->pool, first, f->a);
    tn_graph_memory memory;
    test_graph graph = end(f, f->a, &memory);
    test_graph_launch(f->device, &graph, f->a);
    drop(f, &graph, memory, f->a);
}

/* ---- between captures ------------------------------------------------------------------------ */

static void a_second_capture_shares_what_the_first_freed(void **state) {
    fixture *f = *state;
    tn_graph_memory memories[2];
    test_graph graphs[2];
    begin(f, f->a);
    void *scratch = take_and_write(f, 16 * MIB, f->a);
    void *result = take_and_write(f, 4 * MIB, f->a);
    test_give(f->pool, scratch, f->a);
    graphs[0] = end(f, f->a, &memories[0]);
    size_t reserved = test_pool_stats(f->pool).reserved_bytes;
    begin(f, f->b);
    assert_ptr_equal(take_and_write(f, 16 * MIB, f->b), scratch);
    test_sim_read(f->device, f->b, result, 4 * MIB, 10);
    test_give(f->pool, scratch, f->b);
    graphs[1] = end(f, f->b, &memories[1]);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, reserved);
    assert_true(memories[0] != memories[1]);
    for (int i = 0; i < 10; i++) {
        test_graph_launch(f->device, &graphs[0], f->c);
        test_graph_launch(f->device, &graphs[1], f->c);
    }
    drop(f, &graphs[0], memories[0], f->c);
    test_graph_launch(f->device, &graphs[1], f->c); /* still has all its memory */
    drop(f, &graphs[1], memories[1], f->c);
    test_give(f->pool, result, f->c);
}

/* A result that was freed may still be in use outside: no capture can wait for that. */
static void memory_in_use_outside_is_for_no_capture(void **state) {
    fixture *f = *state;
    tn_graph_memory memories[3];
    test_graph graphs[3];
    begin(f, f->a);
    void *result = take_and_write(f, 8 * MIB, f->a);
    graphs[0] = end(f, f->a, &memories[0]);
    test_graph_launch(f->device, &graphs[0], f->b);
    test_sim_read(f->device, f->b, result, 8 * MIB, 1000);
    test_give(f->pool, result, f->b);
    void *second = capture_scratch(f, 8 * MIB, &graphs[1], &memories[1]);
    assert_ptr_not_equal(second, result);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    begin(f, f->a);
    int found = 0;
    void *blocks[4];
    for (int i = 0; i < 4; i++)
        found += (blocks[i] = take_and_write(f, 8 * MIB, f->a)) == result;
    assert_int_equal(found, 1);
    for (int i = 0; i < 4; i++)
        test_give(f->pool, blocks[i], f->a);
    graphs[2] = end(f, f->a, &memories[2]);
    for (int i = 0; i < 3; i++) {
        test_graph_launch(f->device, &graphs[i], f->b);
        drop(f, &graphs[i], memories[i], f->b);
    }
}

/* ---- abort ----------------------------------------------------------------------------------- */

/* pytorch#190308, #190348, #180395: a capture that fails leaves nothing behind. */
static void an_aborted_capture_leaves_nothing_behind(void **state) {
    fixture *f = *state;
    tn_graph_memory memory = 99;
    void *block = NULL;
    tn_pool_stats before, after;
    test_graph graph;
    void *scratch = capture_scratch(f, 32 * MIB, &graph, &memory);
    before = test_pool_stats(f->pool);
    begin(f, f->a);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    void *first = take_and_write(f, 8 * MIB, f->a);
    assert_ptr_equal(first, scratch);
    void *second = take_and_write(f, 8 * MIB, f->b);
    EXPECT_OK(tn_record_use(first, f->b));
    test_give(f->pool, second, f->b);
    test_capture_spoil(f->device, f->a);
    EXPECT_STATUS(tn_alloc(f->pool, MIB, f->a, NULL, &block), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("has spoiled the capture");
    EXPECT_STATUS(tn_free(first, f->b), TN_INVALID_STATE);
    EXPECT_STATUS(tn_graph_capture_end(f->pool, &memory), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_graph_capture_abort");
    EXPECT_OK(tn_graph_capture_abort(f->pool));
    test_capture_end_invalid(f->device, f->a);
    after = test_pool_stats(f->pool);
    assert_int_equal(after.live_bytes, before.live_bytes);
    assert_int_equal(after.live_blocks, before.live_blocks);
    assert_int_equal(after.pending_bytes, 0);
    assert_int_equal(after.allocs - after.frees, before.allocs - before.frees);
    EXPECT_STATUS(tn_free(first, f->a), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_graph_capture_abort(f->pool), TN_INVALID_STATE);
    /* The next capture finds the memory as if that one had not been. */
    tn_graph_memory next;
    test_graph again;
    assert_ptr_equal(capture_scratch(f, 32 * MIB, &again, &next), scratch);
    test_graph_launch(f->device, &graph, f->a);
    test_graph_launch(f->device, &again, f->a);
    drop(f, &graph, memory, f->a);
    drop(f, &again, next, f->a);
}

static void a_capture_can_be_closed_after_its_stream_has_left_it(void **state) {
    fixture *f = *state;
    tn_graph_memory memory;
    begin(f, f->a);
    void *result = take_and_write(f, MIB, f->a);
    test_graph graph = test_capture_end(f->device, f->a);
    EXPECT_STATUS(tn_free(result, f->a), TN_INVALID_STATE); /* still the open capture's */
    EXPECT_OK(tn_graph_capture_end(f->pool, &memory));
    test_give(f->pool, result, f->a);
    drop(f, &graph, memory, f->a);
}

/* ---- misuse ---------------------------------------------------------------------------------- */

static void what_is_out_of_turn_is_refused(void **state) {
    fixture *f = *state;
    tn_graph_memory memory = 99;
    void *block = NULL;
    EXPECT_STATUS(tn_alloc(f->pool, MIB, f->a, NULL, &block), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("gives memory to captures");
    EXPECT_STATUS(tn_graph_capture_begin(f->pool, f->a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("does not capture");
    EXPECT_STATUS(tn_graph_capture_end(f->pool, &memory), TN_INVALID_STATE);
    EXPECT_STATUS(tn_graph_capture_abort(f->pool), TN_INVALID_STATE);
    EXPECT_STATUS(tn_graph_memory_release(f->pool, 1, f->a), TN_STALE_HANDLE);
    test_capture_begin(f->device, f->a, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(tn_alloc(f->pool, MIB, f->a, NULL, &block), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("no capture is open");
    EXPECT_OK(tn_graph_capture_begin(f->pool, f->a));
    EXPECT_STATUS(tn_graph_capture_begin(f->pool, f->a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("open already");
    EXPECT_STATUS(tn_pool_destroy(f->pool), TN_IN_USE);
    EXPECT_ERROR_HAS("has a capture open");
    assert_int_equal(memory, 99);
    test_graph graph = end(f, f->a, &memory);
    test_capture_begin(f->device, f->b, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(tn_graph_memory_release(f->pool, memory, f->b), TN_INVALID_STATE);
    test_graph other = test_capture_end(f->device, f->b);
    test_graph_destroy(f->device, &other);
    drop(f, &graph, memory, f->a);
    EXPECT_STATUS(tn_graph_memory_release(f->pool, memory, f->a), TN_STALE_HANDLE);
    assert_null(block);
}

static void blocks_are_freed_where_they_belong(void **state) {
    fixture *f = *state;
    tn_graph_memory memory, later;
    begin(f, f->a);
    void *result = take_and_write(f, MIB, f->a);
    EXPECT_STATUS(tn_free(result, f->b), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("belongs to the open capture");
    EXPECT_STATUS(tn_record_use(result, f->b), TN_INVALID_STATE);
    test_graph graph = end(f, f->a, &memory);
    begin(f, f->a);
    EXPECT_STATUS(tn_free(result, f->a), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("older than the capture");
    EXPECT_OK(tn_record_use(result, f->a));
    /* Another capture than the one that is open. */
    test_capture_begin(f->device, f->c, TEST_CAPTURE_GLOBAL);
    void *block = NULL;
    EXPECT_STATUS(tn_alloc(f->pool, MIB, f->c, NULL, &block), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("another capture is open");
    test_graph other = test_capture_end(f->device, f->c);
    test_graph_destroy(f->device, &other);
    test_graph second = end(f, f->a, &later);
    test_give(f->pool, result, f->b);
    drop(f, &graph, memory, f->a);
    drop(f, &second, later, f->a);
}

static void wrong_arguments_are_refused(void **state) {
    fixture *f = *state;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_graph_memory memory = 99;
    tn_pool *pool = NULL;
    tn_device *host = test_open_host();
    EXPECT_STATUS(tn_graph_pool_create(host, NULL, &pool), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("captures no graphs");
    EXPECT_OK(tn_device_destroy(host));
    config.backing = (tn_pool_backing)12345;
    EXPECT_STATUS(tn_graph_pool_create(f->device, &config, &pool), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_graph_pool_create(NULL, NULL, &pool), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_graph_pool_create(f->device, NULL, NULL), TN_INVALID_ARGUMENT);
    assert_null(pool);
    EXPECT_STATUS(tn_graph_capture_begin(NULL, f->a), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_graph_capture_begin(f->plain, f->a), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("no graph pool");
    EXPECT_STATUS(tn_graph_capture_end(f->plain, &memory), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_graph_capture_end(f->pool, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_graph_capture_abort(f->plain), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_graph_memory_release(f->plain, 1, f->a), TN_UNSUPPORTED);
    assert_int_equal(memory, 99);
}

int main(void) {
#define VMM(name) cmocka_unit_test_setup_teardown(name, open_vmm, close_clean)
#define SEGMENTS(name)                                                                             \
    { #name " (segments)", name, open_segments, close_clean, NULL }
#define RACY(name) cmocka_unit_test_setup(name, open_vmm)
    const struct CMUnitTest tests[] = {
        VMM(launches_keep_their_memory),
        SEGMENTS(launches_keep_their_memory),
        VMM(held_memory_goes_back_only_after_its_release),
        SEGMENTS(held_memory_goes_back_only_after_its_release),
        VMM(another_pool_that_is_short_does_not_get_it),
        SEGMENTS(another_pool_that_is_short_does_not_get_it),
        RACY(memory_given_away_between_launches_is_a_race),
        RACY(a_release_on_the_wrong_stream_is_a_race),
        VMM(a_stream_of_the_capture_reuses_what_it_freed),
        SEGMENTS(a_stream_of_the_capture_reuses_what_it_freed),
        VMM(a_forked_stream_gets_memory_of_its_own),
        SEGMENTS(a_forked_stream_gets_memory_of_its_own),
        VMM(a_use_recorded_in_the_capture_keeps_the_block_from_reuse),
        VMM(a_capture_grows_without_a_forbidden_call),
        SEGMENTS(a_capture_grows_without_a_forbidden_call),
        VMM(others_grow_and_trim_while_a_stream_captures),
        VMM(a_foreign_stream_may_capture),
        VMM(an_ordinary_pool_serves_a_stream_that_captures),
        VMM(a_shortage_in_a_capture_leaves_all_as_it_was),
        SEGMENTS(a_shortage_in_a_capture_leaves_all_as_it_was),
        VMM(a_second_capture_shares_what_the_first_freed),
        SEGMENTS(a_second_capture_shares_what_the_first_freed),
        VMM(memory_in_use_outside_is_for_no_capture),
        SEGMENTS(memory_in_use_outside_is_for_no_capture),
        VMM(an_aborted_capture_leaves_nothing_behind),
        SEGMENTS(an_aborted_capture_leaves_nothing_behind),
        VMM(a_capture_can_be_closed_after_its_stream_has_left_it),
        VMM(what_is_out_of_turn_is_refused),
        VMM(blocks_are_freed_where_they_belong),
        VMM(wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests_name("sim/graph_pool", tests, NULL, NULL);
}
