/* What leases and derived planes cost once they are warm, counted: driver calls, host memory, and
 * what the pool is told; and that it is told again when it must be.
 */
#include "tensor_fixture.h"

#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_pools.h"

enum { ROWS = 256, COLS = 256, PAIRS = 1000, EVENTS = 4096 };

static void lease(tn_tensor tensor, tn_plane plane, tn_access access, tn_stream stream) {
    tn_plane_view view;
    tn_lease begun;
    EXPECT_OK(tn_lease_begin(tensor, plane, access, stream, &begun, &view));
    EXPECT_OK(tn_lease_end(begun));
}

/* On two streams in turns, after each stream has used the plane once: a read waits for nothing. */
static void warm_leases_make_no_driver_call_and_no_host_allocation(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
    for (int access = TN_READ; access <= TN_UPDATE; access++) {
        fixture_write(tensor, TN_PLANE_ROW, f.stream);
        lease(tensor, TN_PLANE_ROW, (tn_access)access, f.other);
        uint64_t calls = test_all_calls(f.device);
        long blocks = tn__host_live_blocks();
        tn__host_alloc_fault(1, 1); /* any host allocation would fail */
        for (int i = 0; i < PAIRS; i++) {
            lease(tensor, TN_PLANE_ROW, (tn_access)access, f.other);
            if (access == TN_READ) lease(tensor, TN_PLANE_ROW, TN_READ, f.stream);
        }
        tn__host_alloc_fault(0, 0);
        assert_int_equal(test_all_calls(f.device) - calls, 0);
        assert_int_equal(tn__host_live_blocks(), blocks);
    }
    tensor_fixture_close(&f);
}

/* The only call of the driver is the launch that the format's derive function makes. */
static void deriving_and_dropping_a_cached_size_makes_no_memory_call(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f.stream));
    uint64_t calls = test_all_calls(f.device);
    uint64_t launches = test_calls(f.device, TN_CALL_LAUNCH);
    for (int i = 0; i < PAIRS; i++) {
        EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f.stream));
    }
    launches = test_calls(f.device, TN_CALL_LAUNCH) - launches;
    assert_int_equal(launches, PAIRS);
    assert_int_equal(test_all_calls(f.device) - calls, launches);
    tensor_fixture_close(&f);
}

/* Uses that the pool was told of since the last call of this. */
static size_t recorded_uses(tn_pool *pool) {
    static tn_event events[EVENTS];
    size_t count = 0, uses = 0;
    EXPECT_OK(tn_pool_events_read(pool, events, EVENTS, &count, NULL));
    for (size_t i = 0; i < count; i++)
        uses += events[i].kind == TN_EVENT_RECORD_USE;
    return uses;
}

/* A kernel that reads the plane for 50 us on the stream, under a lease. */
static void read_slowly(const tensor_fixture *f, tn_tensor tensor, tn_stream stream) {
    tn_plane_view view;
    tn_lease begun;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, stream, &begun, &view));
    test_sim_read(f->device, stream, view.data, view.layout.data_bytes, 50.0);
    EXPECT_OK(tn_lease_end(begun));
}

/* The memory goes to work on its home stream, which must come after the last reader elsewhere. */
static void reuse(const tensor_fixture *f, tn_tensor tensor) {
    void *blocks[64];
    EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
    for (int i = 0; i < 64; i++) { /* one of them has the plane's memory */
        blocks[i] = test_take(f->pool, (size_t)ROWS * COLS, f->stream);
        test_sim_write(f->device, f->stream, blocks[i], (size_t)ROWS * COLS, 1.0);
    }
    for (int i = 0; i < 64; i++)
        test_give(f->pool, blocks[i], f->stream);
    assert_int_equal(test_sim_get()->race_count(), 0);
}

/* A plane has two blocks, data and scales. The pool is told of both at the first use elsewhere, and
 * not again while that covers what comes after; a trim asks what has completed, which closes the
 * epoch, and then the next use is told anew. */
static void a_use_is_recorded_again_only_when_its_epoch_was_closed(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    EXPECT_OK(tn_pool_events_begin(f.pool, EVENTS, 0));
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    assert_int_equal(recorded_uses(f.pool), 0);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < PAIRS; i++)
            lease(tensor, TN_PLANE_ROW, TN_READ, f.other);
        assert_int_equal(recorded_uses(f.pool), 2);
        read_slowly(&f, tensor, f.other);
        assert_int_equal(recorded_uses(f.pool), 0);
        EXPECT_OK(tn_pool_trim(f.pool, 0, NULL));
    }
    read_slowly(&f, tensor, f.other);
    reuse(&f, tensor);
    EXPECT_OK(tn_pool_events_end(f.pool));
    tensor_fixture_close(&f);
}

/* Marks belong to the blocks: new ones of the plane have none. */
static void a_use_of_new_blocks_is_recorded(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    EXPECT_OK(tn_pool_events_begin(f.pool, EVENTS, 0));
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    for (int round = 0; round < 3; round++) {
        EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
        (void)recorded_uses(f.pool);
        lease(tensor, TN_PLANE_COL, TN_READ, f.other);
        lease(tensor, TN_PLANE_COL, TN_READ, f.other);
        assert_int_equal(recorded_uses(f.pool), 2);
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f.stream));
    }
    read_slowly(&f, tensor, f.other);
    reuse(&f, tensor);
    EXPECT_OK(tn_pool_events_end(f.pool));
    tensor_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_leases_make_no_driver_call_and_no_host_allocation),
        cmocka_unit_test(deriving_and_dropping_a_cached_size_makes_no_memory_call),
        cmocka_unit_test(a_use_is_recorded_again_only_when_its_epoch_was_closed),
        cmocka_unit_test(a_use_of_new_blocks_is_recorded),
    };
    return cmocka_run_group_tests_name("sim/tensor_warm_calls", tests, NULL, NULL);
}
