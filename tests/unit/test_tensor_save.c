/* Saving planes for backward and restoring them: ownership moves, memory does not, and the forward
 * tensor and the saved one never share a plane.
 */
#include "tensor_fixture.h"

#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { PLANE_BYTES = 64 + 16, NTH_MAX = 24, CUDA_ERROR_UNKNOWN = 999 }; /* 8 x 8 in 2D */

static const unsigned row_bit = TN_PLANE_BIT(TN_PLANE_ROW), col_bit = TN_PLANE_BIT(TN_PLANE_COL);

static tn_tensor square(const tensor_fixture *f, tn_format format) {
    return fixture_tensor(f, format, 8, 8, "x");
}

static tn_scope saved_scope(const tensor_fixture *f) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = f->scope;
    config.kind = TN_SCOPE_SAVED;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static void *address_of(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    return view.data;
}

/* ---- save ---------------------------------------------------------------------------------- */

static void saving_moves_a_plane_without_a_byte_or_a_call(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = saved_scope(f);
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved;
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    fixture_write_both(f, x);
    void *data = address_of(x, TN_PLANE_COL, f->stream);
    EXPECT_OK(tn_scope_ledger_reset_peaks(f->scope));
    EXPECT_OK(tn_device_driver_stats(f->device, &before));
    EXPECT_OK(tn_tensor_save(x, col_bit, scope, f->stream, &saved));
    EXPECT_OK(tn_device_driver_stats(f->device, &after));
    assert_memory_equal(before.calls, after.calls, sizeof before.calls);
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_ABSENT);
    fixture_expect_states(saved, TN_PLANE_ABSENT, TN_PLANE_VALID);
    assert_ptr_equal(address_of(saved, TN_PLANE_COL, f->stream), data);
    assert_int_equal(fixture_ledger(scope).total_bytes, PLANE_BYTES);
    assert_int_equal(fixture_ledger(scope).data_bytes[TN_PLANE_COL], 64);
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 2 * PLANE_BYTES);
    assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, 2 * PLANE_BYTES);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_scope_close(scope)); /* the saved set is gone, and only that */
    assert_int_equal(fixture_owned_bytes(f), PLANE_BYTES);
    EXPECT_STATUS(tn_plane_drop(saved, TN_PLANE_COL, f->stream), TN_STALE_HANDLE);
}

static void what_is_written_next_does_not_reach_what_was_saved(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = square(f, TN_FORMAT_PLAIN), saved;
    float in[64], out[64];
    for (int i = 0; i < 64; i++)
        in[i] = (float)i;
    EXPECT_OK(tn_plane_write(x, TN_PLANE_DATA, in, 256, NULL, 0, f->stream));
    EXPECT_OK(tn_tensor_save(x, TN_PLANE_BIT(TN_PLANE_DATA), f->scope, f->stream, &saved));
    EXPECT_OK(tn_plane_fill(x, TN_PLANE_DATA, 0xFF, f->other));
    EXPECT_OK(tn_tensor_destroy(x, f->other));
    EXPECT_OK(tn_plane_read(saved, TN_PLANE_DATA, out, 256, NULL, 0, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    assert_memory_equal(in, out, 256);
}

static void a_plane_that_is_not_there_is_derived_or_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved = {7};
    EXPECT_STATUS(tn_tensor_save(x, row_bit, f->scope, f->stream, &saved), TN_INVALID_STATE);
    fixture_write(x, TN_PLANE_ROW, f->stream);
    int derived = fixture_derive_calls();
    fixture_derive_fault(1);
    EXPECT_STATUS(tn_tensor_save(x, col_bit, f->scope, f->stream, &saved), TN_DRIVER_ERROR);
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_ABSENT);
    assert_int_equal(saved.value, 7);
    EXPECT_OK(tn_tensor_save(x, row_bit | col_bit, f->scope, f->stream, &saved));
    assert_int_equal(fixture_derive_calls(), derived + 2);
    fixture_expect_states(x, TN_PLANE_ABSENT, TN_PLANE_ABSENT);
    fixture_expect_states(saved, TN_PLANE_VALID, TN_PLANE_VALID);
    tn_tensor y = square(f, TN_FORMAT_FP8_BLOCK_1D);
    fixture_write(y, TN_PLANE_ROW, f->stream);
    EXPECT_STATUS(tn_tensor_save(y, col_bit, f->scope, f->stream, &saved), TN_UNSUPPORTED);
}

static void what_can_not_be_saved_is_named(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved = {7};
    tn_plane_view view;
    tn_lease lease;
    fixture_write_both(f, x);
    EXPECT_STATUS(tn_tensor_save(x, 0, f->scope, f->stream, &saved), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_save(x, 1u << TN_PLANE_COUNT, f->scope, f->stream, &saved),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_save(x, 1, f->scope, f->stream, &saved), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("has no plane DATA");
    EXPECT_STATUS(tn_tensor_save(x, row_bit, f->scope, f->stream, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_save(x, row_bit, (tn_scope){0}, f->stream, &saved), TN_STALE_HANDLE);
    EXPECT_OK(tn_lease_begin(x, TN_PLANE_COL, TN_READ, f->other, &lease, &view));
    EXPECT_STATUS(tn_tensor_save(x, row_bit | col_bit, f->scope, f->stream, &saved), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor x, plane COL is under a READ lease");
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_VALID);
    assert_int_equal(saved.value, 7);
    EXPECT_OK(tn_tensor_save(x, row_bit, f->scope, f->stream, &saved)); /* that one is not leased */
    EXPECT_OK(tn_lease_end(lease));
}

/* ---- restore ------------------------------------------------------------------------------- */

static void restoring_ends_the_saved_handle_and_moves_the_planes(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = saved_scope(f);
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved, back;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    fixture_write_both(f, x);
    void *data = address_of(x, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_tensor_save(x, row_bit | col_bit, scope, f->stream, &saved));
    EXPECT_OK(tn_tensor_restore(saved, f->scope, &back));
    EXPECT_STATUS(tn_tensor_info_get(saved, &info), TN_STALE_HANDLE);
    EXPECT_OK(tn_tensor_info_get(back, &info));
    assert_string_equal(info.name, "x");
    assert_int_equal(info.scope.value, f->scope.value);
    assert_ptr_equal(address_of(back, TN_PLANE_ROW, f->stream), data);
    assert_int_equal(fixture_ledger(scope).total_bytes, 0);
    assert_int_equal(fixture_ledger(scope).tensors, 0);
    EXPECT_OK(tn_scope_close(scope));
    fixture_expect_states(back, TN_PLANE_VALID, TN_PLANE_VALID);
    EXPECT_STATUS(tn_tensor_restore(back, f->scope, &back), TN_INVALID_STATE); /* twice */
    EXPECT_ERROR_HAS("tensor x is not a saved one");
    EXPECT_STATUS(tn_tensor_restore(x, f->scope, &back), TN_INVALID_STATE);
}

static void restoring_into_the_tensor_gives_its_planes_back(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = saved_scope(f);
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved;
    fixture_write_both(f, x);
    void *data = address_of(x, TN_PLANE_COL, f->stream);
    EXPECT_OK(tn_tensor_save(x, col_bit, scope, f->stream, &saved));
    EXPECT_OK(tn_tensor_restore_into(saved, x));
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_VALID);
    assert_ptr_equal(address_of(x, TN_PLANE_COL, f->stream), data);
    assert_int_equal(fixture_ledger(scope).tensors, 0);
    EXPECT_STATUS(tn_tensor_restore_into(saved, x), TN_STALE_HANDLE);
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
}

static void contents_of_two_writes_never_meet_in_one_tensor(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved;
    fixture_write_both(f, x);
    EXPECT_OK(tn_tensor_save(x, col_bit, f->scope, f->stream, &saved));
    fixture_write(x, TN_PLANE_ROW, f->stream);
    EXPECT_STATUS(tn_tensor_restore_into(saved, x), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor x has been written since its planes were saved");
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_ABSENT);
    fixture_expect_states(saved, TN_PLANE_ABSENT, TN_PLANE_VALID);
    EXPECT_OK(tn_plane_require(x, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(x, TN_PLANE_ROW, f->stream));
    EXPECT_STATUS(tn_tensor_restore_into(saved, x), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("has a plane COL (VALID)");
    tn_tensor other = square(f, TN_FORMAT_FP8_BLOCK_2D);
    EXPECT_OK(tn_tensor_restore_into(saved, other)); /* it has none */
    fixture_expect_states(other, TN_PLANE_ABSENT, TN_PLANE_VALID);
}

static void restoring_into_what_does_not_fit_is_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved;
    tn_plane_view view;
    tn_lease lease;
    fixture_write_both(f, x);
    EXPECT_OK(tn_tensor_save(x, col_bit, f->scope, f->stream, &saved));
    EXPECT_STATUS(tn_tensor_restore_into(saved, saved), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_restore_into(x, saved), TN_INVALID_STATE);
    EXPECT_STATUS(tn_tensor_restore_into(saved, square(f, TN_FORMAT_FP8_BLOCK_1D)),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("another format or shape");
    EXPECT_STATUS(tn_tensor_restore_into(saved, (tn_tensor){0}), TN_STALE_HANDLE);
    EXPECT_OK(tn_lease_begin(saved, TN_PLANE_COL, TN_READ, f->other, &lease, &view));
    EXPECT_STATUS(tn_tensor_restore_into(saved, x), TN_IN_USE);
    EXPECT_STATUS(tn_tensor_restore(saved, f->scope, &x), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_lease_begin(x, TN_PLANE_ROW, TN_UPDATE, f->other, &lease, &view));
    EXPECT_STATUS(tn_tensor_restore_into(saved, x), TN_IN_USE);
    EXPECT_OK(tn_lease_abandon(lease));
    EXPECT_OK(tn_tensor_destroy(saved, f->stream));
}

static tn_status rebuild_nothing(void *context, tn_scope scope, tn_stream stream) {
    (void)context, (void)scope, (void)stream;
    return TN_OK;
}

/* A set that is dropped has no contents, and only its function gives it some. */
static void nothing_is_saved_or_restored_into_a_dropped_set(void **state) {
    const tensor_fixture *f = *state;
    tn_scope set = saved_scope(f);
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), inside = square(f, TN_FORMAT_FP8_BLOCK_2D);
    tn_tensor saved = {7}, again;
    EXPECT_OK(tn_tensor_move(inside, set));
    EXPECT_OK(tn_saved_recompute_set(set, rebuild_nothing, NULL));
    EXPECT_OK(tn_saved_drop(set, f->stream));
    fixture_write_both(f, x);
    EXPECT_STATUS(tn_tensor_save(x, row_bit, set, f->stream, &saved), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("which is dropped: tn_saved_rebuild first");
    assert_int_equal(saved.value, 7);
    assert_int_equal(fixture_ledger(set).tensors, 1);
    fixture_expect_states(x, TN_PLANE_VALID, TN_PLANE_VALID);
    EXPECT_OK(tn_tensor_save(x, row_bit, f->scope, f->stream, &again));
    EXPECT_STATUS(tn_tensor_restore_into(again, inside), TN_INVALID_STATE);
    fixture_expect_states(again, TN_PLANE_VALID, TN_PLANE_ABSENT);
}

/* ---- the last copy ------------------------------------------------------------------------- */

static void only_a_regatherable_tensor_loses_its_last_copy(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_1D), y;
    fixture_write(x, TN_PLANE_ROW, f->stream);
    EXPECT_STATUS(tn_plane_drop(x, TN_PLANE_ROW, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_tensor_set_regatherable(x, 1));
    EXPECT_OK(tn_plane_drop(x, TN_PLANE_ROW, f->stream));
    assert_int_equal(fixture_owned_bytes(f), 0);
    fixture_write(x, TN_PLANE_ROW, f->stream); /* gathered again */
    EXPECT_OK(tn_tensor_set_regatherable(x, 0));
    EXPECT_STATUS(tn_plane_drop(x, TN_PLANE_ROW, f->stream), TN_INVALID_STATE);
    config.regatherable = 1;
    EXPECT_OK(tn_tensor_create(f->scope, &config, &y));
    fixture_write(y, TN_PLANE_DATA, f->stream);
    EXPECT_OK(tn_plane_drop(y, TN_PLANE_DATA, f->stream));
    EXPECT_STATUS(tn_tensor_set_regatherable((tn_tensor){0}, 1), TN_STALE_HANDLE);
}

/* ---- order and failure --------------------------------------------------------------------- */

/* The saved plane knows who used it: its free, and the next use, are in order. */
static void the_uses_move_with_the_plane(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor x = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 64, 64, "x"), saved;
    tn_tensor next = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 64, 64, "next");
    tn_plane_view view;
    tn_lease lease;
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(tn_lease_begin(x, TN_PLANE_ROW, i ? TN_READ : TN_WRITE, i ? f->other : f->stream,
                                 &lease, &view));
        fixture_touch(f, &view, !i, i ? f->other : f->stream);
        EXPECT_OK(tn_lease_end(lease));
    }
    EXPECT_OK(tn_tensor_save(x, row_bit, f->scope, f->stream, &saved));
    EXPECT_OK(tn_lease_begin(saved, TN_PLANE_ROW, TN_UPDATE, f->stream, &lease, &view));
    fixture_touch(f, &view, 1, f->stream);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_tensor_destroy(saved, f->other));
    EXPECT_OK(tn_lease_begin(next, TN_PLANE_ROW, TN_WRITE, f->other, &lease, &view));
    fixture_touch(f, &view, 1, f->other);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(test_sim_get()->race_count(), 0);
}

static void set_faults(int is_driver, long nth, int and_after) {
    if (is_driver)
        assert_int_equal(test_sim_get()->fault(NULL, nth, and_after, CUDA_ERROR_UNKNOWN), 0);
    else
        tn__host_alloc_fault(nth, and_after);
}

/* Both planes, one of them to be derived, saved and restored with the N-th call failing. */
static void a_save_that_fails_moves_nothing(void **state) {
    const tensor_fixture *f = *state;
    int failed[2] = {0, 0};
    for (int kind = 0; kind < 4; kind++) {
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            tn_tensor x = square(f, TN_FORMAT_FP8_BLOCK_2D), saved = {0}, back = {0};
            fixture_write(x, TN_PLANE_ROW, f->stream);
            set_faults(kind & 1, nth, kind >> 1);
            tn_status status = tn_tensor_save(x, row_bit | col_bit, f->scope, f->other, &saved);
            int is_saved = status == TN_OK;
            if (is_saved) status = tn_tensor_restore(saved, f->scope, &back);
            set_faults(kind & 1, 0, 0);
            EXPECT_OK(tn_ledger_check(f->pool));
            failed[kind & 1] += status != TN_OK;
            assert_int_equal(fixture_ledger(f->scope).tensors, is_saved ? 2 : 1);
            if (!is_saved) {
                assert_int_equal(saved.value, 0);
                assert_int_equal(fixture_state(x, TN_PLANE_ROW), TN_PLANE_VALID);
                EXPECT_OK(tn_tensor_save(x, row_bit | col_bit, f->scope, f->other, &saved));
            }
            fixture_expect_states(status == TN_OK ? back : saved, TN_PLANE_VALID, TN_PLANE_VALID);
            EXPECT_OK(tn_tensor_destroy(status == TN_OK ? back : saved, f->other));
            EXPECT_OK(tn_tensor_destroy(x, f->stream));
            assert_int_equal(fixture_owned_bytes(f), 0);
            EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
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
        SIMULATED(saving_moves_a_plane_without_a_byte_or_a_call),
        WITH_FIXTURE(what_is_written_next_does_not_reach_what_was_saved),
        WITH_FIXTURE(a_plane_that_is_not_there_is_derived_or_refused),
        WITH_FIXTURE(what_can_not_be_saved_is_named),
        WITH_FIXTURE(restoring_ends_the_saved_handle_and_moves_the_planes),
        WITH_FIXTURE(restoring_into_the_tensor_gives_its_planes_back),
        WITH_FIXTURE(contents_of_two_writes_never_meet_in_one_tensor),
        WITH_FIXTURE(restoring_into_what_does_not_fit_is_refused),
        WITH_FIXTURE(nothing_is_saved_or_restored_into_a_dropped_set),
        WITH_FIXTURE(only_a_regatherable_tensor_loses_its_last_copy),
        SIMULATED(the_uses_move_with_the_plane),
        SIMULATED(a_save_that_fails_moves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
