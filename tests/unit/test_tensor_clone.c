/* Clones: all valid planes, copied on the device, in order with every other use. */
#include "tensor_fixture.h"

#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { PLANE_BYTES = 64 + 16, NTH_MAX = 40, CUDA_ERROR_UNKNOWN = 999 }; /* 8 x 8 in 2D */

static void expect_bytes(const tensor_fixture *f, tn_tensor tensor, tn_plane plane,
                         unsigned char byte) {
    unsigned char data[64], scales[16], expected[64];
    memset(expected, byte, sizeof expected);
    EXPECT_OK(tn_plane_read(tensor, plane, data, 64, scales, 16, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    assert_memory_equal(data, expected, 64);
    assert_memory_equal(scales, expected, 16);
}

static void a_clone_has_every_valid_plane_and_shares_none(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "x"), copy, again;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_view view[2];
    tn_lease leases[2];
    for (int i = 0; i < 2; i++) { /* both planes in one write */
        EXPECT_OK(tn_lease_begin(x, i ? TN_PLANE_COL : TN_PLANE_ROW, TN_WRITE, f->stream,
                                 &leases[i], &view[i]));
        EXPECT_OK(tn_fill(f->device, view[i].data, i ? 0x22 : 0x11, 64, f->stream));
        EXPECT_OK(tn_fill(f->device, view[i].scale, i ? 0x22 : 0x11, 16, f->stream));
    }
    EXPECT_OK(tn_lease_end(leases[0]));
    EXPECT_OK(tn_lease_end(leases[1]));
    EXPECT_OK(tn_tensor_set_frozen(x, 1));
    EXPECT_OK(tn_tensor_clone(x, f->scope, f->other, &copy));
    assert_int_equal(fixture_owned_bytes(f), 4 * PLANE_BYTES);
    EXPECT_OK(tn_plane_fill(x, TN_PLANE_ROW, 0x33, f->stream)); /* after the copy, on the device */
    expect_bytes(f, copy, TN_PLANE_ROW, 0x11);
    expect_bytes(f, copy, TN_PLANE_COL, 0x22);
    EXPECT_OK(tn_tensor_info_get(copy, &info));
    assert_int_equal(info.frozen, 1);
    assert_string_equal(info.name, "x");
    EXPECT_OK(tn_tensor_clone(x, f->scope, f->other, &again)); /* a stale plane is not copied */
    fixture_expect_states(again, TN_PLANE_VALID, TN_PLANE_ABSENT);
    expect_bytes(f, again, TN_PLANE_ROW, 0x33);
    EXPECT_OK(tn_tensor_destroy(x, f->stream));
    expect_bytes(f, copy, TN_PLANE_ROW, 0x11);
    assert_int_equal(fixture_owned_bytes(f), 3 * PLANE_BYTES);
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
}

static void a_tensor_without_planes_has_a_clone_without(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "x"), copy;
    EXPECT_OK(tn_plane_make(x, TN_PLANE_ROW, f->stream)); /* no contents */
    EXPECT_OK(tn_tensor_clone(x, f->scope, f->stream, &copy));
    fixture_expect_states(copy, TN_PLANE_ABSENT, TN_PLANE_ABSENT);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    tn_tensor empty = fixture_tensor(f, TN_FORMAT_PLAIN, 0, 8, "empty");
    fixture_write(empty, TN_PLANE_DATA, f->stream);
    EXPECT_OK(tn_tensor_clone(empty, f->scope, f->stream, &copy));
    assert_int_equal(fixture_state(copy, TN_PLANE_DATA), TN_PLANE_VALID);
}

static void what_is_being_written_is_not_cloned(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "x"), copy = {7};
    tn_plane_view view;
    tn_lease lease;
    fixture_write(x, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_lease_begin(x, TN_PLANE_COL, TN_WRITE, f->stream, &lease, &view));
    EXPECT_STATUS(tn_tensor_clone(x, f->scope, f->stream, &copy), TN_IN_USE);
    EXPECT_ERROR_HAS("plane COL is under a WRITE lease");
    EXPECT_OK(tn_lease_abandon(lease));
    EXPECT_OK(tn_lease_begin(x, TN_PLANE_ROW, TN_READ, f->stream, &lease, &view));
    EXPECT_STATUS(tn_tensor_clone(x, (tn_scope){0}, f->stream, &copy), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_clone(x, f->scope, f->stream, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(copy.value, 7);
    EXPECT_OK(tn_tensor_clone(x, f->scope, f->stream, &copy)); /* readers share */
    EXPECT_OK(tn_lease_end(lease));
}

/* The planes of a clone are of the contents of its source: one can stand in for the other. */
static void a_plane_of_a_clone_may_be_restored_into_the_source(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "x"), copy, saved;
    fixture_write(x, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_tensor_clone(x, f->scope, f->stream, &copy));
    EXPECT_OK(tn_tensor_save(copy, TN_PLANE_BIT(TN_PLANE_COL), f->scope, f->stream, &saved));
    EXPECT_OK(tn_tensor_restore_into(saved, x));
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_VALID);
}

static void no_use_of_source_or_clone_races(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 64, 64, "x"), copy;
    tn_plane_view view;
    tn_lease lease;
    for (int round = 0; round < 4; round++) {
        tn_stream here = round & 1 ? f->other : f->stream, there = round & 2 ? f->other : f->stream;
        EXPECT_OK(tn_lease_begin(x, TN_PLANE_ROW, TN_WRITE, here, &lease, &view));
        fixture_touch(f, &view, 1, here);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_tensor_clone(x, f->scope, there, &copy));
        EXPECT_OK(tn_lease_begin(copy, TN_PLANE_ROW, TN_UPDATE, here, &lease, &view));
        fixture_touch(f, &view, 1, here);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_tensor_destroy(copy, there));
    }
    assert_int_equal(test_sim_get()->race_count(), 0);
}

static void set_faults(int is_driver, long nth, int and_after) {
    if (is_driver)
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, CUDA_ERROR_UNKNOWN), 0);
    else
        tn__host_alloc_fault(nth, and_after);
}

static void a_clone_that_fails_leaves_nothing(void **state) {
    const tensor_fixture *f = *state;
    int failed[2] = {0, 0};
    for (int kind = 0; kind < 4; kind++) {
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "x"), copy = {0};
            tn_stream fresh;
            fixture_write(x, TN_PLANE_ROW, f->stream);
            EXPECT_OK(tn_plane_require(x, TN_PLANE_COL, f->stream));
            EXPECT_OK(tn_stream_create(f->device, &fresh));
            set_faults(kind & 1, nth, kind >> 1);
            tn_status status = tn_tensor_clone(x, f->scope, fresh, &copy);
            set_faults(kind & 1, 0, 0);
            failed[kind & 1] += status != TN_OK;
            EXPECT_OK(tn_ledger_check(f->pool));
            fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_VALID);
            assert_int_equal(fixture_ledger(f->scope).leases, 0);
            assert_int_equal(fixture_ledger(f->scope).tensors, status == TN_OK ? 2 : 1);
            assert_int_equal(fixture_owned_bytes(f), (status == TN_OK ? 4 : 2) * PLANE_BYTES);
            assert_int_equal(copy.value != 0, status == TN_OK);
            EXPECT_OK(tn_tensor_destroy(copy, fresh));
            EXPECT_OK(tn_tensor_destroy(x, fresh));
            EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
            EXPECT_OK(tn_stream_destroy(f->device, fresh));
        }
    }
    assert_in_range(failed[0], 4, 4 * NTH_MAX);
    assert_in_range(failed[1], 4, 4 * NTH_MAX);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
#define SIMULATED(test)                                                                            \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up_sim, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_clone_has_every_valid_plane_and_shares_none),
        WITH_FIXTURE(a_tensor_without_planes_has_a_clone_without),
        WITH_FIXTURE(what_is_being_written_is_not_cloned),
        WITH_FIXTURE(a_plane_of_a_clone_may_be_restored_into_the_source),
        SIMULATED(no_use_of_source_or_clone_races),
        SIMULATED(a_clone_that_fails_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
