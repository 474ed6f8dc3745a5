/* Which streams are warm: what it costs to name one, and what happens when it ends. */
#include "test_graphs.h"
#include "pool_internal.h"

#define KIB ((size_t)1 << 10)

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
} fixture;

static void open_fixture(fixture *f) {
    f->device = test_open_sim(0, 0);
    f->pool = test_open_pool(f->device, TN_BACKING_VMM, 0);
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->pool));
    test_close_sim(f->device);
}

/* The driver calls of a hundred pairs, after the first one. */
static uint64_t calls_of_pairs(fixture *f, tn_stream stream) {
    uint64_t before;
    void *block = NULL;
    EXPECT_OK(tn_alloc(f->pool, 4 * KIB, stream, NULL, &block));
    EXPECT_OK(tn_free(block, stream));
    before = test_all_calls(f->device);
    for (int i = 0; i < 100; i++) {
        EXPECT_OK(tn_alloc(f->pool, 4 * KIB, stream, NULL, &block));
        EXPECT_OK(tn_free(block, stream));
    }
    return test_all_calls(f->device) - before;
}

static void streams_whose_end_is_heard_of_cost_no_driver_call(void **state) {
    fixture f;
    tn_stream own;
    tn_stream foreign;
    (void)state;
    open_fixture(&f);
    own = test_open_stream(f.device);
    foreign = test_open_foreign_stream(f.device);
    assert_int_equal(calls_of_pairs(&f, NULL), 0);
    assert_int_equal(calls_of_pairs(&f, (tn_stream)1), 0); /* the legacy stream by its name */
    assert_int_equal(calls_of_pairs(&f, (tn_stream)2), 0); /* this thread's default stream */
    assert_int_equal(calls_of_pairs(&f, own), 0);
    /* Its id, at each alloc and each free; and then whether it captures, and an event: of which a
     * first 16 are made. */
    assert_int_equal(calls_of_pairs(&f, foreign), 400 + 16);
    EXPECT_OK(tn_stream_adopt(f.device, foreign));
    assert_int_equal(calls_of_pairs(&f, foreign), 0);
    EXPECT_OK(tn_stream_forget(f.device, foreign));
    assert_int_equal(calls_of_pairs(&f, foreign), 400);
    test_close_foreign_stream(f.device, foreign);
    EXPECT_OK(tn_stream_destroy(f.device, own));
    close_fixture(&f);
}

static void only_other_libraries_streams_of_the_device_are_adopted(void **state) {
    fixture f;
    tn_stream own;
    tn_stream foreign;
    (void)state;
    open_fixture(&f);
    own = test_open_stream(f.device);
    foreign = test_open_foreign_stream(f.device);
    EXPECT_STATUS(tn_stream_adopt(NULL, foreign), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_adopt(f.device, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_adopt(f.device, (tn_stream)1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_adopt(f.device, (tn_stream)2), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_adopt(f.device, own), TN_INVALID_STATE);
    EXPECT_STATUS(tn_stream_forget(f.device, own), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_stream_forget(f.device, foreign), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_stream_adopt(f.device, foreign));
    EXPECT_STATUS(tn_stream_adopt(f.device, foreign), TN_INVALID_STATE);
    EXPECT_STATUS(tn_stream_destroy(f.device, foreign), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_stream_forget(f.device, foreign));
    EXPECT_STATUS(tn_stream_forget(f.device, foreign), TN_INVALID_ARGUMENT);
    test_close_foreign_stream(f.device, foreign);
    EXPECT_OK(tn_stream_destroy(f.device, own));
    close_fixture(&f);
}

/* What was kept for it is memory for all, and needs no wait: its work was waited for. */
static void the_end_of_a_stream_empties_its_lanes(void **state) {
    (void)state;
    for (int is_adopted = 0; is_adopted < 2; is_adopted++) {
        fixture f;
        tn_stream ending;
        tn_stream other;
        void *block;
        open_fixture(&f);
        ending = is_adopted ? test_open_foreign_stream(f.device) : test_open_stream(f.device);
        if (is_adopted) EXPECT_OK(tn_stream_adopt(f.device, ending));
        other = test_open_stream(f.device);
        block = test_take(f.pool, 32 << 20, ending);
        test_sim_write(f.device, ending, block, 32 << 20, 100.0);
        test_give(f.pool, block, ending);
        if (is_adopted) {
            EXPECT_OK(tn_stream_forget(f.device, ending));
            test_close_foreign_stream(f.device, ending);
        } else {
            EXPECT_OK(tn_stream_destroy(f.device, ending));
        }
        assert_ptr_equal(test_take(f.pool, 32 << 20, other), block);
        test_sim_write(f.device, other, block, 32 << 20, 1.0);
        assert_int_equal(test_pool_stats(f.pool).stream_waits, 0);
        test_give(f.pool, block, other);
        EXPECT_OK(tn_stream_destroy(f.device, other));
        close_fixture(&f);
    }
}

/* A block that outlives its stream goes back through another one. */
static void a_block_may_be_freed_after_its_stream_has_ended(void **state) {
    fixture f;
    tn_stream ending;
    tn_stream other;
    void *kept;
    (void)state;
    open_fixture(&f);
    ending = test_open_stream(f.device);
    other = test_open_stream(f.device);
    kept = test_take(f.pool, 8 * KIB, ending);
    EXPECT_OK(tn_stream_destroy(f.device, ending));
    test_give(f.pool, kept, other);
    assert_ptr_equal(test_take(f.pool, 8 * KIB, other), kept);
    test_give(f.pool, kept, other);
    EXPECT_OK(tn_stream_destroy(f.device, other));
    close_fixture(&f);
}

/* Other streams wait for the use that there was, which is not the last one of the stream. */
static void what_a_thread_kept_is_waited_for_by_other_streams_only(void **state) {
    fixture f;
    tn_stream a;
    tn_stream b;
    void *block;
    (void)state;
    open_fixture(&f);
    a = test_open_stream(f.device);
    b = test_open_stream(f.device);
    block = test_take(f.pool, 32 << 20, a);
    test_sim_write(f.device, a, block, 32 << 20, 500.0);
    test_give(f.pool, block, a);
    /* Its own stream has it back as it is. */
    assert_ptr_equal(test_take(f.pool, 32 << 20, a), block);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 0);
    test_give(f.pool, block, a);
    /* Another one gets it out of the thread's cache, behind one wait; the simulated device would
     * count a race without it. */
    assert_ptr_equal(test_take(f.pool, 32 << 20, b), block);
    test_sim_write(f.device, b, block, 32 << 20, 1.0);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_give(f.pool, block, b);
    EXPECT_OK(tn_stream_destroy(f.device, a));
    EXPECT_OK(tn_stream_destroy(f.device, b));
    close_fixture(&f);
}

/* Streams that the pool has asked for lately are known by their handles; this one not any more. */
static size_t let_forget(fixture *f, tn_stream forgotten, tn_stream *others, size_t most) {
    const tn__order *order = &f->pool->order;
    const tn__recent_stream *recent = NULL;
    size_t count = 0;
    for (size_t i = 0; i < TN__STREAM_RECENT; i++) {
        if (order->recent[i].handle == forgotten) recent = &order->recent[i];
    }
    assert_non_null(recent);
    while (count < most && recent->handle == forgotten) {
        others[count] = test_open_stream(f->device);
        test_give(f->pool, test_take(f->pool, KIB, others[count]), others[count]);
        count++;
    }
    assert_ptr_not_equal(recent->handle, forgotten);
    return count;
}

/* A stream in a capture that has to be asked for is another one, and its blocks are not for the
 * lane that the thread keeps for the stream outside of it. */
static void a_capture_gets_no_block_for_the_lane_of_its_stream(void **state) {
    enum { OTHERS_MAX = 1000 };
    tn_stream others[OTHERS_MAX];
    fixture f;
    (void)state;
    open_fixture(&f);
    tn_stream adopted = test_open_foreign_stream(f.device);
    EXPECT_OK(tn_stream_adopt(f.device, adopted));
    test_give(f.pool, test_take(f.pool, 4 * KIB, adopted), adopted);
    size_t count = let_forget(&f, adopted, others, OTHERS_MAX);
    test_capture_begin(f.device, adopted, TEST_CAPTURE_RELAXED);
    void *block = test_take(f.pool, 64 * KIB, adopted);
    test_give(f.pool, block, adopted);
    assert_true(test_is_capturing(f.device, adopted));
    test_graph graph = test_capture_end(f.device, adopted);
    test_graph_destroy(f.device, &graph);
    EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
    for (size_t i = 0; i < count; i++)
        EXPECT_OK(tn_stream_destroy(f.device, others[i]));
    EXPECT_OK(tn_stream_forget(f.device, adopted));
    test_close_foreign_stream(f.device, adopted);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_whose_end_is_heard_of_cost_no_driver_call),
        cmocka_unit_test(only_other_libraries_streams_of_the_device_are_adopted),
        cmocka_unit_test(the_end_of_a_stream_empties_its_lanes),
        cmocka_unit_test(a_block_may_be_freed_after_its_stream_has_ended),
        cmocka_unit_test(what_a_thread_kept_is_waited_for_by_other_streams_only),
        cmocka_unit_test(a_capture_gets_no_block_for_the_lane_of_its_stream),
    };
    return cmocka_run_group_tests_name("sim/warm_streams", tests, NULL, NULL);
}
