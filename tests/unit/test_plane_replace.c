/* REPLACE leases: a plane gets new memory while the old contents are read, whole or not at all. */
#include "tensor_fixture.h"

#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { PLANE_BYTES = 64 + 16, NTH_MAX = 40, CUDA_ERROR_UNKNOWN = 999 }; /* 8 x 8 in 2D */

static tn_tensor square(const tensor_fixture *f) {
    return fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
}

/* ---- the end frees the old memory ---------------------------------------------------------- */

static void the_old_contents_are_read_while_the_new_are_written(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_PLAIN, 4, 8, "x");
    float in[32], out[32];
    tn_plane_view view, old;
    tn_lease lease;
    for (int i = 0; i < 32; i++)
        in[i] = (float)i;
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, in, 128, NULL, 0, f->stream));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_REPLACE, f->other, &lease, &view));
    EXPECT_OK(tn_lease_old_view(lease, &old));
    assert_ptr_not_equal(old.data, view.data);
    assert_memory_equal(&old.layout, &view.layout, sizeof old.layout);
    assert_int_equal(fixture_owned_bytes(f), 256);
    float *from = old.data, *to = view.data;
    for (size_t row = 0; row < 4; row++) { /* the rows in reverse: can not be done in place */
        EXPECT_OK(tn_copy(f->device, to + 8 * row, from + 8 * (3 - row), 32, f->other));
    }
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_owned_bytes(f), 128);
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, out, 128, NULL, 0, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    for (size_t row = 0; row < 4; row++)
        assert_memory_equal(&out[8 * row], &in[8 * (3 - row)], 32);
}

static void the_ledger_has_both_buffers_until_the_end_and_one_after(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_scope_ledger_reset_peaks(f->scope));
    tn_lease lease = fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream);
    tn_ledger during = fixture_ledger(f->scope);
    assert_int_equal(during.data_bytes[TN_PLANE_ROW], 128);
    assert_int_equal(during.scale_bytes[TN_PLANE_ROW], 32);
    assert_int_equal(during.planes, 1);
    assert_int_equal(during.leases, 1);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_lease_end(lease));
    tn_ledger after = fixture_ledger(f->scope);
    assert_int_equal(after.total_bytes, PLANE_BYTES);
    assert_int_equal(after.peak_total_bytes, 2 * PLANE_BYTES);
    assert_int_equal(after.planes, 1);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
}

static void replacing_stales_the_other_plane_and_abandoning_takes_that_back(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write_both(f, tensor);
    tn_lease lease = fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->other);
    fixture_expect_states(tensor, TN_PLANE_ALLOCATED, TN_PLANE_STALE);
    EXPECT_OK(tn_lease_abandon(lease));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_VALID);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->other)));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_STALE);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_UNTIL_LAST_USE));
    EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->other)));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ABSENT); /* as after a write */
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
}

static void abandoning_gives_back_the_old_contents_at_their_address(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    unsigned char in[64], out[64];
    float scales[4] = {3}, scales_out[4];
    tn_plane_view before, view;
    tn_lease lease;
    memset(in, 0x5A, sizeof in);
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_ROW, in, 64, scales, 16, f->stream));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f->stream, &lease, &before));
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_REPLACE, f->other, &lease, &view));
    EXPECT_OK(tn_fill(f->device, view.data, 0x11, 64, f->other));
    EXPECT_OK(tn_lease_abandon(lease));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f->stream, &lease, &view));
    assert_ptr_equal(view.data, before.data);
    assert_ptr_equal(view.scale, before.scale);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_ROW, out, 64, scales_out, 16, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    assert_memory_equal(out, in, 64);
    assert_memory_equal(scales_out, scales, 16);
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
}

/* ---- two planes at once -------------------------------------------------------------------- */

/* Both are replaced, and the leases end and are abandoned in each order. */
static void two_planes_are_replaced_at_once(void **state) {
    const tensor_fixture *f = *state;
    for (int order = 0; order < 16; order++) {
        tn_tensor tensor = square(f);
        tn_lease leases[2];
        int is_col_first = order & 1, is_col_ended_first = order >> 1 & 1;
        int ends[2] = {order >> 2 & 1, order >> 3 & 1}; /* of ROW and COL; else abandoned */
        fixture_write_both(f, tensor);
        for (int i = 0; i < 2; i++) {
            int plane = i ^ is_col_first;
            leases[plane] = fixture_lease(tensor, plane ? TN_PLANE_COL : TN_PLANE_ROW, TN_REPLACE,
                                          plane ? f->other : f->stream);
        }
        assert_int_equal(fixture_owned_bytes(f), 4 * PLANE_BYTES);
        EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream), TN_IN_USE);
        for (int i = 0; i < 2; i++) {
            int plane = i ^ is_col_ended_first;
            EXPECT_OK(ends[plane] ? tn_lease_end(leases[plane]) : tn_lease_abandon(leases[plane]));
        }
        /* What was abandoned is valid only if the other has not been written either. */
        fixture_expect_states(tensor, ends[0] || !ends[1] ? TN_PLANE_VALID : TN_PLANE_STALE,
                              ends[1] || !ends[0] ? TN_PLANE_VALID : TN_PLANE_STALE);
        assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
        EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
        assert_int_equal(fixture_owned_bytes(f), 0);
    }
}

static void the_stale_plane_may_be_dropped_since_the_old_contents_are_kept(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    fixture_write_both(f, tensor);
    tn_lease write = fixture_lease(tensor, TN_PLANE_ROW, TN_WRITE, f->stream);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("the last copy of its contents"); /* the write may be abandoned */
    EXPECT_OK(tn_lease_abandon(write));
    fixture_write_both(f, tensor);
    tn_lease replace = fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_lease_abandon(replace));
    fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ABSENT);
}

/* ---- what is refused ----------------------------------------------------------------------- */

static void replacing_excludes_every_other_lease_on_the_plane(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_plane_view view;
    tn_lease lease;
    fixture_write_both(f, tensor);
    tn_lease read = fixture_lease(tensor, TN_PLANE_ROW, TN_READ, f->stream);
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream, &lease, &view),
                  TN_IN_USE);
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_COL, TN_REPLACE, f->stream, &lease, &view),
                  TN_IN_USE);
    EXPECT_OK(tn_lease_end(read));
    tn_lease replace = fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream);
    for (int access = TN_READ; access <= TN_REPLACE; access++) {
        EXPECT_STATUS(
            tn_lease_begin(tensor, TN_PLANE_ROW, (tn_access)access, f->other, &lease, &view),
            TN_IN_USE);
        EXPECT_ERROR_HAS("plane ROW is under a REPLACE lease");
    }
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_IN_USE);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream), TN_IN_USE);
    EXPECT_STATUS(tn_tensor_destroy(tensor, f->stream), TN_IN_USE);
    EXPECT_STATUS(tn_scope_close(f->scope), TN_IN_USE);
    assert_int_equal(fixture_owned_bytes(f), 3 * PLANE_BYTES);
    EXPECT_OK(tn_lease_end(replace));
}

static void only_contents_have_an_old_view(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_plane_view view = {.data = &view};
    tn_lease lease = fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream);
    EXPECT_STATUS(tn_lease_old_view(lease, &view), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor w, plane ROW was ABSENT: it has no old contents");
    EXPECT_OK(tn_lease_abandon(lease));
    assert_int_equal(fixture_owned_bytes(f), 0); /* it had made the plane */
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f->stream));
    lease = fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream);
    EXPECT_STATUS(tn_lease_old_view(lease, &view), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("was ALLOCATED");
    EXPECT_STATUS(tn_lease_old_view(lease, NULL), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_lease_old_view(lease, &view), TN_STALE_HANDLE);
    lease = fixture_lease(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream);
    EXPECT_STATUS(tn_lease_old_view(lease, &view), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("is under a UPDATE lease: only REPLACE has old contents");
    EXPECT_OK(tn_lease_end(lease));
    assert_ptr_equal(view.data, &view); /* results are written last */
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    lease = fixture_lease(tensor, TN_PLANE_COL, TN_REPLACE,
                          f->stream); /* stale contents are contents */
    EXPECT_OK(tn_lease_old_view(lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    fixture_expect_states(tensor, TN_PLANE_STALE, TN_PLANE_VALID);
}

static void a_tensor_without_elements_is_replaced_too(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 0, 8, "empty");
    tn_plane_view view, old;
    tn_lease lease;
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream, &lease, &view));
    EXPECT_OK(tn_lease_old_view(lease, &old));
    assert_null(view.data);
    assert_null(old.data);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
}

/* ---- order and failure --------------------------------------------------------------------- */

/* The reads of the old memory and its free are in order with all that used it on other streams, and
 * the next owner of that memory with all of those. */
static void no_use_of_either_buffer_races(void **state) {
    const tensor_fixture *f = *state;
    for (int is_abandoned = 0; is_abandoned < 2; is_abandoned++) {
        tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 64, 64, "w");
        tn_plane_view view, old;
        tn_lease lease;
        for (int i = 0; i < 2; i++) {
            EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, i ? TN_READ : TN_WRITE,
                                     i ? f->other : f->stream, &lease, &view));
            fixture_touch(f, &view, !i, i ? f->other : f->stream);
            EXPECT_OK(tn_lease_end(lease));
        }
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_REPLACE, f->other, &lease, &view));
        EXPECT_OK(tn_lease_old_view(lease, &old));
        fixture_touch(f, &old, 0, f->other);
        fixture_touch(f, &view, 1, f->other);
        EXPECT_OK(is_abandoned ? tn_lease_abandon(lease) : tn_lease_end(lease));
        tn_tensor next = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 64, 64, "next");
        EXPECT_OK(tn_lease_begin(next, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view));
        fixture_touch(f, &view, 1, f->stream);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, &lease, &view));
        fixture_touch(f, &view, 1, f->stream);
        EXPECT_OK(tn_lease_end(lease));
        assert_int_equal(test_sim_get()->race_count(), 0);
        EXPECT_OK(tn_tensor_destroy(next, f->stream));
        EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
    }
}

static void a_warm_replacement_makes_no_driver_call(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream)));
    EXPECT_OK(tn_device_driver_stats(f->device, &before));
    for (int i = 0; i < 100; i++)
        EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, f->stream)));
    EXPECT_OK(tn_device_driver_stats(f->device, &after));
    assert_memory_equal(before.calls, after.calls, sizeof before.calls);
}

static void set_faults(int is_driver, long nth, int and_after) {
    if (is_driver)
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, CUDA_ERROR_UNKNOWN), 0);
    else
        tn__host_alloc_fault(nth, and_after);
}

/* Begin and end with the N-th host allocation or driver call failing, once and from then on. */
static void a_replacement_that_fails_leaves_all_as_it_was(void **state) {
    const tensor_fixture *f = *state;
    int failed[2] = {0, 0};
    for (int kind = 0; kind < 4; kind++) {
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            tn_tensor tensor = square(f);
            tn_plane_view view;
            tn_lease lease = {0};
            tn_stream fresh;
            fixture_write_both(f, tensor);
            EXPECT_OK(tn_stream_create(f->device, &fresh));
            set_faults(kind & 1, nth, kind >> 1);
            tn_status status =
                tn_lease_begin(tensor, TN_PLANE_ROW, TN_REPLACE, fresh, &lease, &view);
            int is_begun = status == TN_OK;
            if (is_begun) status = tn_lease_end(lease);
            set_faults(kind & 1, 0, 0);
            EXPECT_OK(tn_ledger_check(f->pool));
            if (status != TN_OK) {
                failed[kind & 1]++;
                if (is_begun) EXPECT_OK(tn_lease_abandon(lease));
                fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_VALID);
                EXPECT_OK(tn_lease_end(fixture_lease(tensor, TN_PLANE_ROW, TN_REPLACE, fresh)));
            }
            fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_STALE);
            assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
            EXPECT_OK(tn_tensor_destroy(tensor, fresh));
            EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
            EXPECT_OK(tn_stream_destroy(f->device, fresh));
        }
    }
    assert_in_range(failed[0], 4, 4 * NTH_MAX);
    assert_in_range(failed[1], 4, 4 * NTH_MAX);
}

/* ---- fill ---------------------------------------------------------------------------------- */

static void a_fill_sets_elements_and_scales_and_is_a_write(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = square(f);
    unsigned char data[64], scales[16];
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_ROW, 0x7E, f->stream)); /* made if absent */
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_ROW, data, 64, scales, 16, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    for (int i = 0; i < 64; i++)
        assert_int_equal(data[i], 0x7E);
    for (int i = 0; i < 16; i++)
        assert_int_equal(scales[i], 0x7E);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_COL, 0, f->stream));
    fixture_expect_states(tensor, TN_PLANE_STALE, TN_PLANE_VALID);
    tn_tensor empty = fixture_tensor(f, TN_FORMAT_PLAIN, 0, 8, "empty");
    EXPECT_OK(tn_plane_fill(empty, TN_PLANE_DATA, 1, f->stream));
    EXPECT_STATUS(tn_plane_fill(empty, TN_PLANE_ROW, 1, f->stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_fill((tn_tensor){0}, TN_PLANE_ROW, 1, f->stream), TN_STALE_HANDLE);
    tn_lease read = fixture_lease(tensor, TN_PLANE_COL, TN_READ, f->stream);
    EXPECT_STATUS(tn_plane_fill(tensor, TN_PLANE_COL, 1, f->stream), TN_IN_USE);
    EXPECT_OK(tn_lease_end(read));
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
#define SIMULATED(test)                                                                            \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up_sim, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(the_old_contents_are_read_while_the_new_are_written),
        WITH_FIXTURE(the_ledger_has_both_buffers_until_the_end_and_one_after),
        WITH_FIXTURE(replacing_stales_the_other_plane_and_abandoning_takes_that_back),
        WITH_FIXTURE(abandoning_gives_back_the_old_contents_at_their_address),
        WITH_FIXTURE(two_planes_are_replaced_at_once),
        WITH_FIXTURE(the_stale_plane_may_be_dropped_since_the_old_contents_are_kept),
        WITH_FIXTURE(replacing_excludes_every_other_lease_on_the_plane),
        WITH_FIXTURE(only_contents_have_an_old_view),
        WITH_FIXTURE(a_tensor_without_elements_is_replaced_too),
        SIMULATED(no_use_of_either_buffer_races),
        SIMULATED(a_warm_replacement_makes_no_driver_call),
        SIMULATED(a_replacement_that_fails_leaves_all_as_it_was),
        WITH_FIXTURE(a_fill_sets_elements_and_scales_and_is_a_write),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
