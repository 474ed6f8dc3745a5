/* Pause and resume on the simulated device: the memory really goes and comes back under the same
 * addresses, with its bytes if they were kept; nothing in use goes; the books hold all the time. */
#include <string.h>

#include "test_graphs.h"

#define MIB MIB_BYTES

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
} fixture;

static int open_as(void **state, size_t memory_bytes, int backed) {
    static fixture f;
    f.device = test_open_sim(memory_bytes, backed);
    f.pool = test_open_pool(f.device, TN_BACKING_VMM, 0);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    *state = &f;
    return 0;
}

static int open_fixture(void **state) { return open_as(state, 0, 0); }
static int open_backed(void **state) { return open_as(state, 256 * MIB, 1); }
static int open_small(void **state) { return open_as(state, 128 * MIB, 0); }

static int close_fixture(void **state) {
    fixture *f = *state;
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    test_close_sim(f->device);
    return 0;
}

static size_t physical_bytes(void) { return test_sim_get()->physical_bytes(0); }

/* ---- memory -------------------------------------------------------------------------------- */

static void the_memory_goes_and_comes_back(void **state) {
    fixture *f = *state;
    void *blocks[3];
    tn_pool_stats before, paused, after;
    for (int i = 0; i < 3; i++)
        blocks[i] = test_take(f->pool, (size_t)(1 + 9 * i) * MIB, f->a);
    test_give(f->pool, test_take(f->pool, 64 * MIB, f->a), f->a);
    before = test_pool_stats(f->pool);
    assert_int_equal(physical_bytes(), before.reserved_bytes);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    paused = test_pool_stats(f->pool);
    assert_int_equal(physical_bytes(), 0);
    assert_int_equal(paused.reserved_bytes, 0);
    assert_int_equal(paused.live_bytes, before.live_bytes);
    assert_int_equal(paused.live_blocks, 3);
    assert_int_equal(paused.cached_bytes, 0);
    assert_int_equal(paused.paused_bytes, before.reserved_bytes - before.cached_bytes);
    assert_int_equal(paused.address_bytes, before.address_bytes);
    EXPECT_OK(tn_pool_resume(f->pool));
    after = test_pool_stats(f->pool);
    assert_int_equal(after.paused_bytes, 0);
    assert_int_equal(after.reserved_bytes, paused.paused_bytes);
    assert_int_equal(physical_bytes(), paused.paused_bytes);
    for (int i = 0; i < 3; i++) {
        test_sim_write(f->device, f->b, blocks[i], (size_t)(1 + 9 * i) * MIB, 10);
        test_give(f->pool, blocks[i], f->b);
    }
    test_give(f->pool, test_take(f->pool, 32 * MIB, f->a), f->a);
}

static void an_empty_pool_can_be_paused(void **state) {
    fixture *f = *state;
    EXPECT_OK(tn_pool_pause(f->pool, 1));
    EXPECT_OK(tn_pool_resume(f->pool));
    test_give(f->pool, test_take(f->pool, MIB, f->a), f->a);
    EXPECT_OK(tn_pool_pause(f->pool, 1));
    assert_int_equal(test_pool_stats(f->pool).paused_bytes, 0);
    assert_int_equal(physical_bytes(), 0);
}

/* Memory that has moved is mapped where it was, too. */
static void mappings_that_were_kept_go_as_well(void **state) {
    fixture *f = *state;
    void *blocks[8];
    for (int i = 0; i < 8; i++)
        blocks[i] = test_take(f->pool, 4 * MIB, f->a);
    for (int i = 0; i < 8; i += 2)
        test_give(f->pool, blocks[i], f->a);
    void *moved = test_take(f->pool, 16 * MIB, f->a);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    assert_int_equal(physical_bytes(), 0);
    EXPECT_OK(tn_pool_resume(f->pool));
    assert_int_equal(physical_bytes(), 32 * MIB);
    test_sim_write(f->device, f->a, moved, 16 * MIB, 10);
    test_give(f->pool, moved, f->a);
    for (int i = 1; i < 8; i += 2) {
        test_sim_write(f->device, f->a, blocks[i], 4 * MIB, 10);
        test_give(f->pool, blocks[i], f->a);
    }
}

/* ---- contents ------------------------------------------------------------------------------ */

#define BLOCKS 40

static size_t bytes_of(int block) { return 1000 + (size_t)block * 123457; }

static void kept_contents_come_back(void **state) {
    fixture *f = *state;
    unsigned char *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = test_take(f->pool, bytes_of(i), f->a);
        for (size_t at = 0; at < bytes_of(i); at++)
            blocks[i][at] = (unsigned char)((size_t)i * 31 + at * 7 + (at >> 8));
    }
    assert_true(test_pool_stats(f->pool).live_bytes > 64 * MIB); /* more than goes in one piece */
    EXPECT_OK(tn_pool_pause(f->pool, 1));
    assert_int_equal(physical_bytes(), 0);
    for (int i = 0; i < BLOCKS; i += 5)
        test_give(f->pool, blocks[i], f->a);
    EXPECT_OK(tn_pool_resume(f->pool));
    for (int i = 0; i < BLOCKS; i++) {
        size_t wrong = 0;
        if (i % 5 == 0) continue;
        for (size_t at = 0; at < bytes_of(i); at++)
            wrong += blocks[i][at] != (unsigned char)((size_t)i * 31 + at * 7 + (at >> 8));
        assert_int_equal(wrong, 0);
        test_give(f->pool, blocks[i], f->a);
    }
}

static void contents_that_are_not_kept_are_gone(void **state) {
    fixture *f = *state;
    unsigned char *block = test_take(f->pool, 2 * MIB, f->a);
    memset(block, 0x11, 2 * MIB);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    EXPECT_OK(tn_pool_resume(f->pool));
    assert_int_not_equal(block[MIB], 0x11); /* the device poisons new memory */
    test_give(f->pool, block, f->a);
}

/* ---- work that is under way ---------------------------------------------------------------- */

static void work_is_waited_for(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 4 * MIB, f->a);
    void *freed = test_take(f->pool, 4 * MIB, f->a);
    test_sim_write(f->device, f->a, block, 4 * MIB, 1000); /* its own stream: no word about it */
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_read(f->device, f->b, block, 4 * MIB, 1000);
    EXPECT_OK(tn_record_use(block, f->b));
    test_sim_write(f->device, f->b, freed, 4 * MIB, 1000);
    test_give(f->pool, freed, f->b);
    EXPECT_OK(tn_pool_pause(f->pool, 1));
    assert_int_equal(test_sim_get()->race_count(), 0);
    assert_true(test_sim_get()->now_us() >= 3000);
    EXPECT_OK(tn_pool_resume(f->pool));
    test_give(f->pool, block, f->a);
}

static void work_that_does_not_end_refuses_the_pause(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 4 * MIB, f->a);
    tn_pool_stats before;
    test_sim_stall(f->device, f->a, 1);
    test_sim_write(f->device, f->a, block, 4 * MIB, 10);
    before = test_pool_stats(f->pool);
    EXPECT_STATUS(tn_pool_pause(f->pool, 1), TN_INVALID_STATE);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, before.reserved_bytes);
    assert_int_equal(test_pool_stats(f->pool).paused_bytes, 0);
    test_sim_stall(f->device, f->a, 0);
    test_give(f->pool, test_take(f->pool, MIB, f->b), f->b);
    EXPECT_OK(tn_pool_pause(f->pool, 1));
    EXPECT_OK(tn_pool_resume(f->pool));
    test_give(f->pool, block, f->a);
}

/* What the pause noted of it is no hindrance to a thread's cache, nor on its way to the heap. */
static void a_block_can_be_freed_after_a_refused_pause(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 4 * MIB, f->a);
    size_t released = 0;
    test_sim_stall(f->device, f->a, 1);
    test_sim_write(f->device, f->a, block, 4 * MIB, 10);
    EXPECT_STATUS(tn_pool_pause(f->pool, 1), TN_INVALID_STATE);
    test_give(f->pool, block, f->a);
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 0);
    test_sim_stall(f->device, f->a, 0);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 4 * MIB);
}

static void a_stream_that_captures_refuses_the_pause(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 4 * MIB, f->a);
    test_capture_begin(f->device, f->a, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(tn_pool_pause(f->pool, 0), TN_INVALID_STATE);
    assert_true(test_is_capturing(f->device, f->a));
    test_graph graph = test_capture_end(f->device, f->a);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    test_give(f->pool, block, f->a);
}

/* ---- while paused -------------------------------------------------------------------------- */

static void what_needs_memory_is_refused(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 4 * MIB, f->a);
    void *made = NULL;
    size_t released = 1;
    EXPECT_STATUS(tn_pool_resume(f->pool), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("is not paused");
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    EXPECT_STATUS(tn_pool_pause(f->pool, 0), TN_INVALID_STATE);
    EXPECT_STATUS(tn_alloc(f->pool, 512, f->a, NULL, &made), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("is paused: tn_pool_resume");
    assert_null(made);
    EXPECT_STATUS(tn_record_use(block, f->b), TN_INVALID_STATE);
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 0);
    EXPECT_STATUS(tn_pool_destroy(f->pool), TN_LEAK);
    EXPECT_OK(tn_block_info(block, &released, NULL));
    assert_int_equal(released, 4 * MIB);
    test_give(f->pool, block, f->b);
    EXPECT_STATUS(tn_free(block, f->b), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_pool_resume(f->pool));
}

static void what_is_freed_while_paused_needs_no_memory(void **state) {
    fixture *f = *state;
    void *large = test_take(f->pool, 32 * MIB, f->a);
    void *small = test_take(f->pool, MIB, f->a);
    EXPECT_OK(tn_pool_pause(f->pool, 1));
    size_t paused = test_pool_stats(f->pool).paused_bytes;
    test_give(f->pool, large, f->a);
    assert_int_equal(test_pool_stats(f->pool).paused_bytes, paused);
    EXPECT_OK(tn_pool_resume(f->pool));
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, paused - 32 * MIB);
    assert_int_equal(physical_bytes(), paused - 32 * MIB);
    test_give(f->pool, small, f->a);
}

static void a_paused_pool_can_be_destroyed(void **state) {
    fixture *f = *state;
    tn_pool *pool = test_open_pool(f->device, TN_BACKING_VMM, 0);
    void *block = test_take(pool, 8 * MIB, f->a);
    EXPECT_OK(tn_pool_pause(pool, 1));
    test_give(pool, block, f->a);
    EXPECT_OK(tn_pool_destroy(pool));
}

/* The memory is for others meanwhile, and what they have idle is given back for the resume. */
static void others_have_the_memory_meanwhile(void **state) {
    fixture *f = *state;
    tn_pool *other = test_open_pool(f->device, TN_BACKING_VMM, 0);
    void *block = test_take(f->pool, 96 * MIB, f->a);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    void *theirs = test_take(other, 96 * MIB, f->a);
    EXPECT_STATUS(tn_pool_resume(f->pool), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, 0);
    assert_int_equal(test_pool_stats(f->pool).paused_bytes, 96 * MIB);
    test_give(other, theirs, f->a);
    EXPECT_OK(tn_device_synchronize(f->device));
    EXPECT_OK(tn_pool_resume(f->pool));
    assert_int_equal(test_pool_stats(other).reserved_bytes, 0);
    test_sim_write(f->device, f->a, block, 96 * MIB, 10);
    test_give(f->pool, block, f->a);
    EXPECT_OK(tn_pool_destroy(other));
}

/* ---- pools that can and can not ------------------------------------------------------------ */

static void a_graph_pool_keeps_its_addresses(void **state) {
    fixture *f = *state;
    tn_pool *pool = test_open_graph_pool(f->device, TN_BACKING_VMM);
    tn_graph_memory memory;
    test_capture_begin(f->device, f->a, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(pool, f->a));
    EXPECT_STATUS(tn_pool_pause(pool, 1), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("capture open");
    unsigned char *scratch = test_take(pool, 8 * MIB, f->a);
    EXPECT_OK(tn_fill(f->device, scratch, 0x77, 8 * MIB, f->a));
    unsigned char *result = test_take(pool, 2 * MIB, f->a);
    EXPECT_OK(tn_copy(f->device, result, scratch, 2 * MIB, f->a));
    EXPECT_OK(tn_free(scratch, f->a));
    EXPECT_OK(tn_graph_capture_end(pool, &memory));
    test_graph graph = test_capture_end(f->device, f->a);
    test_graph_launch(f->device, &graph, f->b);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    memset(result, 0x33, 2 * MIB);
    EXPECT_OK(tn_pool_pause(pool, 1));
    assert_int_equal(physical_bytes(), 0);
    test_capture_begin(f->device, f->a, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(tn_graph_capture_begin(pool, f->a), TN_INVALID_STATE);
    test_graph empty = test_capture_end(f->device, f->a);
    test_graph_destroy(f->device, &empty);
    EXPECT_OK(tn_pool_resume(pool));
    assert_int_equal(result[MIB], 0x33);
    test_graph_launch(f->device, &graph, f->b);
    assert_int_equal(result[MIB], 0x77);
    test_graph_destroy(f->device, &graph);
    EXPECT_OK(tn_graph_memory_release(pool, memory, f->b));
    test_give(pool, result, f->b);
    EXPECT_OK(tn_pool_destroy(pool));
}

static void a_pool_of_segments_can_not_be_paused(void **state) {
    fixture *f = *state;
    tn_pool *segments = test_open_pool(f->device, TN_BACKING_PLAIN, 0);
    EXPECT_STATUS(tn_pool_pause(segments, 0), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("no VMM pages");
    EXPECT_OK(tn_pool_destroy(segments));
    EXPECT_STATUS(tn_pool_pause(NULL, 0), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_resume(NULL), TN_INVALID_ARGUMENT);
}

static void a_block_with_a_handle_of_its_own_refuses_the_pause(void **state) {
    fixture *f = *state;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    options.flags = TN_ALLOC_SHAREABLE;
    EXPECT_OK(tn_alloc(f->pool, 4 * MIB, f->a, &options, &block));
    EXPECT_STATUS(tn_pool_pause(f->pool, 0), TN_IN_USE);
    EXPECT_ERROR_HAS("others may share");
    test_give(f->pool, block, f->a);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    assert_int_equal(physical_bytes(), 0);
}

int main(void) {
#define TEST(name)   cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
#define BACKED(name) cmocka_unit_test_setup_teardown(name, open_backed, close_fixture)
#define SMALL(name)  cmocka_unit_test_setup_teardown(name, open_small, close_fixture)
    const struct CMUnitTest tests[] = {
        TEST(the_memory_goes_and_comes_back),
        TEST(an_empty_pool_can_be_paused),
        TEST(mappings_that_were_kept_go_as_well),
        BACKED(kept_contents_come_back),
        BACKED(contents_that_are_not_kept_are_gone),
        TEST(work_is_waited_for),
        TEST(work_that_does_not_end_refuses_the_pause),
        TEST(a_block_can_be_freed_after_a_refused_pause),
        TEST(a_stream_that_captures_refuses_the_pause),
        TEST(what_needs_memory_is_refused),
        TEST(what_is_freed_while_paused_needs_no_memory),
        TEST(a_paused_pool_can_be_destroyed),
        SMALL(others_have_the_memory_meanwhile),
        BACKED(a_graph_pool_keeps_its_addresses),
        TEST(a_pool_of_segments_can_not_be_paused),
        TEST(a_block_with_a_handle_of_its_own_refuses_the_pause),
    };
    return cmocka_run_group_tests_name("sim/pause", tests, NULL, NULL);
}
