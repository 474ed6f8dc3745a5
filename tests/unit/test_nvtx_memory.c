/* What an NVTX tool is told of blocks: exactly the bytes that callers asked for, for as long as
 * somebody may use them, and nothing that overlaps. The tool is tests/nvtx/recording_tool.c. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"
#include "recording_tool.h"
#include "tenure_pool.h"
#include "pool_fixture.h"

#define TOOL TENURE_BUILD_DIR "/tests/libtenure_recording_tool.so"
#define MIB  MIB_BYTES

static recording *recorded;

/* Compute Sanitizer refuses what it is told while no context is current. */
static int is_device_current(void) {
    int (*get_current)(void **) = NULL;
    void *context = NULL;
    *(void **)&get_current = dlsym(test_sim_get()->library, "cuCtxGetCurrent");
    return get_current && get_current(&context) == 0 && context;
}

static int open_fixture(void **state) {
    static pool_fixture f;
    f = pool_fixture_open(512 * MIB, TN_BACKING_AUTO, 0);
    *state = &f;
    return 0;
}

static int close_fixture(void **state) {
    pool_fixture_close(*state);
    if (recorded->errors) fail_msg("%s", recorded->first_error);
    assert_int_equal(recorded->block_count, 0);
    assert_int_equal(recorded->heap_count, 0);
    return 0;
}

static const recorded_range *told_at(const void *address) {
    for (size_t i = 0; i < RECORDED_MAX; i++) {
        if (recorded->blocks[i].address == (uintptr_t)address) return &recorded->blocks[i];
    }
    return NULL;
}

static void expect_told(const void *address, size_t bytes) {
    const recorded_range *block = told_at(address);
    assert_non_null(block);
    assert_int_equal(block->bytes, bytes);
}

static void a_block_is_told_to_the_byte(void **state) {
    pool_fixture *f = *state;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *x = NULL;
    void *y;
    options.owner = "weights";
    EXPECT_OK(tn_alloc(f->pool, 1000, f->a, &options, &x));
    y = test_take(f->pool, 3 * MIB + 7, f->a);
    expect_told(x, 1000);
    expect_told(y, 3 * MIB + 7);
    assert_string_equal(told_at(x)->name, "weights");
    assert_string_equal(told_at(y)->name, "");
    assert_int_equal(recorded->block_count, 2);
    /* Nothing uses them: they are taken back at once. */
    test_give(f->pool, x, f->a);
    assert_null(told_at(x));
    test_give(f->pool, y, f->a);
    assert_int_equal(recorded->block_count, 0);
}

static void a_block_stays_while_work_may_use_it(void **state) {
    pool_fixture *f = *state;
    void *x = test_take(f->pool, 4096, f->a);
    void *y;
    test_sim_write(f->device, f->a, x, 4096, 1e6);
    test_give(f->pool, x, f->a);
    expect_told(x, 4096);
    /* Its memory is given out anew, in order: now it is another block. */
    y = test_take(f->pool, 1234, f->a);
    assert_ptr_equal(y, x);
    expect_told(y, 1234);
    assert_int_equal(recorded->block_count, 1);
    EXPECT_OK(tn_stream_synchronize(f->device, f->a));
    test_give(f->pool, y, f->a);
    assert_int_equal(recorded->block_count, 0);
}

static uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void all_live_blocks_are_told_and_none_overlap(void **state) {
    enum { BLOCKS = 60, STEPS = 3000 };
    pool_fixture *f = *state;
    void *blocks[BLOCKS] = {NULL};
    size_t sizes[BLOCKS] = {0};
    size_t begun = recorded->blocks_begun;
    uint32_t seed = 1129;
    for (int step = 0; step < STEPS; step++) {
        size_t i = next_random(&seed) % BLOCKS;
        tn_stream stream = next_random(&seed) % 2 ? f->a : f->b;
        if (blocks[i]) {
            expect_told(blocks[i], sizes[i]);
            EXPECT_OK(tn_free(blocks[i], stream));
            blocks[i] = NULL;
            continue;
        }
        sizes[i] = 1 + next_random(&seed) % (step % 2 ? 5 * MIB : 5000);
        EXPECT_OK(tn_alloc(f->pool, sizes[i], stream, NULL, &blocks[i]));
        expect_told(blocks[i], sizes[i]);
        test_sim_write(f->device, stream, blocks[i], sizes[i], 30);
    }
    if (recorded->errors) fail_msg("%s", recorded->first_error);
    assert_int_equal(recorded->blocks_begun - begun, test_pool_stats(f->pool).allocs);
    assert_true(recorded->block_count >= test_pool_stats(f->pool).live_blocks);
    for (int i = 0; i < BLOCKS; i++)
        EXPECT_OK(tn_free(blocks[i], f->a));
}

static void segments_come_and_go_as_heaps(void **state) {
    pool_fixture *f = *state;
    size_t begun = recorded->heaps_begun;
    size_t released = 0;
    void *x = test_take(f->pool, 100 * MIB, f->a);
    assert_int_equal(recorded->heap_count, 1);
    test_give(f->pool, x, f->a);
    /* The driver does not take it back: its memory is a heap still, without blocks. */
    assert_int_equal(test_sim_get()->fault("cuMemFree_v2", 1, 0, 999), 0);
    EXPECT_STATUS(tn_pool_trim(f->pool, 0, &released), TN_DRIVER_ERROR);
    assert_int_equal(recorded->heap_count, 1);
    assert_int_equal(recorded->heaps_begun, begun + 2);
    x = test_take(f->pool, 100 * MIB, f->a);
    expect_told(x, 100 * MIB);
    test_give(f->pool, x, f->a);
    EXPECT_OK(tn_pool_trim(f->pool, 0, &released));
    assert_int_equal(released, 100 * MIB);
    assert_int_equal(recorded->heap_count, 0);
}

static void pools_that_tools_can_not_follow_tell_nothing(void **state) {
    pool_fixture *f = *state;
    tn_device *host = test_open_host();
    tn_pool *pools[2] = {test_open_pool(f->device, TN_BACKING_VMM, 0),
                         test_open_pool(host, TN_BACKING_AUTO, 0)};
    for (int i = 0; i < 2; i++) {
        void *block = test_take(pools[i], 5000, NULL);
        assert_int_equal(recorded->block_count, 0);
        assert_int_equal(recorded->heap_count, 0);
        test_give(pools[i], block, NULL);
        EXPECT_OK(tn_pool_destroy(pools[i]));
    }
    EXPECT_OK(tn_device_destroy(host));
}

static void want_of_host_memory_changes_nothing(void **state) {
    pool_fixture *f = *state;
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    void *block = NULL;
    for (long nth = 1; status != TN_OK; nth++) {
        assert_true(nth < 50);
        tn__host_alloc_fault(nth, 0);
        status = tn_alloc(f->pool, 77, f->b, NULL, &block);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        assert_int_equal(recorded->block_count, 0);
    }
    expect_told(block, 77);
    test_give(f->pool, block, f->b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
        TEST(a_block_is_told_to_the_byte),
        TEST(a_block_stays_while_work_may_use_it),
        TEST(all_live_blocks_are_told_and_none_overlap),
        TEST(segments_come_and_go_as_heaps),
        TEST(pools_that_tools_can_not_follow_tell_nothing),
        TEST(want_of_host_memory_changes_nothing),
    };
    recording_get_function get = NULL;
    void *tool = dlopen(TOOL, RTLD_NOW);
    if (!tool) {
        fprintf(stderr, "skipped: built without the headers of NVTX\n");
        return 77;
    }
    setenv("NVTX_INJECTION64_PATH", TOOL, 1);
    *(void **)&get = dlsym(tool, "recording_get");
    if (!get) return 1;
    recorded = get();
    recorded->is_device_current = is_device_current;
    return cmocka_run_group_tests_name("unit/nvtx_memory", tests, NULL, NULL);
}
