/* Tensors and planes that change hands: whatever memory they have goes along, byte for byte, and
 * planes derive from each other wherever they are.
 */
#include "tensor_fixture.h"

#include <string.h>

#include "tenure_lifetime.h"

enum { PLANE_BYTES = 64 + 16, TWO_PLANES = 2 * PLANE_BYTES }; /* 8 x 8 in 2D */

static const unsigned row_bit = TN_PLANE_BIT(TN_PLANE_ROW), col_bit = TN_PLANE_BIT(TN_PLANE_COL);

static tn_scope scope_in(const tensor_fixture *f, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = f->scope;
    config.kind = TN_SCOPE_LAYER;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor square(const tensor_fixture *f) {
    return fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
}

static void expect_scope(tn_scope scope, size_t bytes, uint64_t tensors, uint64_t leases) {
    tn_ledger ledger = fixture_ledger(scope);
    assert_int_equal(ledger.total_bytes, bytes);
    assert_int_equal(ledger.tensors, tensors);
    assert_int_equal(ledger.leases, leases);
}

/* ---- moving -------------------------------------------------------------------------------- */

static void a_tensor_whose_plane_is_being_replaced_moves_with_both_buffers(void **state) {
    const tensor_fixture *f = *state;
    tn_scope from = scope_in(f, "from"), to = scope_in(f, "to");
    for (int is_abandoned = 0; is_abandoned < 2; is_abandoned++) {
        tn_tensor w = square(f);
        EXPECT_OK(tn_tensor_move(w, from));
        fixture_write(w, TN_PLANE_ROW, f->stream);
        tn_lease lease = fixture_lease(w, TN_PLANE_ROW, TN_REPLACE, f->other);
        EXPECT_OK(tn_scope_ledger_reset_peaks(f->scope));
        EXPECT_OK(tn_tensor_move(w, to));
        expect_scope(from, 0, 0, 0);
        expect_scope(to, TWO_PLANES, 1, 1);
        assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, 2 * PLANE_BYTES);
        EXPECT_OK(tn_ledger_check(f->pool));
        EXPECT_OK(is_abandoned ? tn_lease_abandon(lease) : tn_lease_end(lease));
        expect_scope(to, PLANE_BYTES, 1, 0);
        assert_int_equal(fixture_state(w, TN_PLANE_ROW), TN_PLANE_VALID);
        EXPECT_OK(tn_tensor_destroy(w, f->stream));
    }
}

static void a_view_and_its_base_move_each_on_its_own(void **state) {
    const tensor_fixture *f = *state;
    tn_scope left = scope_in(f, "left"), right = scope_in(f, "right");
    tn_tensor w = square(f), view;
    fixture_write(w, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_tensor_view_rows(w, 0, 8, left, &view));
    tn_lease lease = fixture_lease(view, TN_PLANE_ROW, TN_READ, f->stream);
    EXPECT_OK(tn_tensor_move(view, right));
    EXPECT_OK(tn_tensor_move(w, left));
    expect_scope(left, PLANE_BYTES, 1, 1); /* memory and leases are the base's */
    expect_scope(right, 0, 1, 0);
    EXPECT_STATUS(tn_scope_close(right), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_scope_close(left), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor w has a view, w in scope right");
    EXPECT_OK(tn_scope_close(right));
    EXPECT_OK(tn_scope_close(left));
    EXPECT_OK(tn_ledger_check(f->pool));
}

static void a_saved_tensor_moves_and_is_still_a_saved_one(void **state) {
    const tensor_fixture *f = *state;
    tn_scope saved_in = scope_in(f, "saved"), later = scope_in(f, "later");
    tn_tensor w = square(f), saved, back;
    fixture_write(w, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_tensor_save(w, row_bit, saved_in, f->stream, &saved));
    EXPECT_OK(tn_tensor_move(saved, later));
    expect_scope(saved_in, 0, 0, 0);
    expect_scope(later, PLANE_BYTES, 1, 0);
    EXPECT_OK(tn_tensor_restore(saved, later, &back)); /* also into the scope where it is */
    expect_scope(later, PLANE_BYTES, 1, 0);
    EXPECT_OK(tn_scope_close(later));
    assert_int_equal(fixture_owned_bytes(f), 0);
}

static void count_release(void *context) { (*(int *)context)++; }

static void adopted_memory_goes_along_and_is_released_once(void **state) {
    const tensor_fixture *f = *state;
    tn_scope from = scope_in(f, "from"), to = scope_in(f, "to");
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor x, saved;
    static float values[32];
    int released = 0;
    config.rank = 1;
    config.shape[0] = 32;
    memory.plane = TN_PLANE_DATA;
    memory.data = values;
    memory.data_bytes = sizeof values;
    memory.stream = f->stream;
    memory.release = count_release;
    memory.context = &released;
    EXPECT_OK(tn_tensor_adopt(from, &config, &memory, &x));
    EXPECT_OK(tn_tensor_move(x, to));
    assert_int_equal(fixture_ledger(from).foreign_bytes, 0);
    assert_int_equal(fixture_ledger(to).foreign_bytes, 128);
    EXPECT_OK(tn_tensor_save(x, TN_PLANE_BIT(TN_PLANE_DATA), from, f->other, &saved));
    assert_int_equal(fixture_ledger(from).foreign_bytes, 128);
    assert_int_equal(fixture_ledger(to).foreign_bytes, 0);
    EXPECT_OK(tn_tensor_restore_into(saved, x));
    assert_int_equal(fixture_ledger(to).foreign_bytes, 128);
    assert_int_equal(released, 0);
    tn_lease lease = fixture_lease(x, TN_PLANE_DATA, TN_REPLACE, f->other); /* memory of our own */
    assert_int_equal(fixture_ledger(to).foreign_bytes, 128);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(released, 1);
    assert_int_equal(fixture_ledger(to).foreign_bytes, 0);
    expect_scope(to, 128, 1, 0);
    EXPECT_OK(tn_ledger_check(f->pool));
}

static void what_is_in_a_scratch_slot_is_neither_handed_over_nor_cloned(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = square(f), saved, copy;
    EXPECT_OK(tn_tensor_set_policy(w, TN_POLICY_SCRATCH));
    fixture_write(w, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(w, TN_PLANE_COL, f->stream));
    EXPECT_STATUS(tn_tensor_save(w, col_bit, f->scope, f->stream, &saved), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("plane COL is in a scratch slot");
    EXPECT_OK(tn_tensor_clone(w, f->scope, f->stream, &copy));
    fixture_expect_states(copy, TN_PLANE_VALID, TN_PLANE_ABSENT);
    EXPECT_OK(tn_tensor_save(copy, row_bit, f->scope, f->stream, &saved));
    EXPECT_OK(tn_plane_require(saved, TN_PLANE_COL, f->stream)); /* displaces that of w */
    fixture_expect_states(w, TN_PLANE_VALID, TN_PLANE_ABSENT);
    EXPECT_OK(tn_tensor_restore_into(saved, copy));
    fixture_expect_states(copy, TN_PLANE_VALID, TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_require(w, TN_PLANE_COL, f->stream)); /* the slot is free */
    EXPECT_OK(tn_ledger_check(f->pool));
}

/* ---- deriving, either way, wherever the planes are ------------------------------------------ */

static void fill_both(const tensor_fixture *f, tn_tensor w, unsigned char *row) {
    float scales[4] = {2};
    for (int i = 0; i < 64; i++)
        row[i] = (unsigned char)(i * 5 + 1);
    EXPECT_OK(tn_plane_write(w, TN_PLANE_ROW, row, 64, scales, 16, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    EXPECT_OK(tn_plane_require(w, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(w, TN_PLANE_ROW, f->stream)); /* COL is the only one */
}

static void expect_transposed_back(const tensor_fixture *f, tn_tensor w, const unsigned char *row) {
    unsigned char out[64];
    float scales[4];
    EXPECT_OK(tn_plane_read(w, TN_PLANE_ROW, out, 64, scales, 16, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    assert_memory_equal(out, row, 64);
    assert_memory_equal(scales, ((float[]){2, 0, 0, 0}), 16);
    fixture_expect_states(w, TN_PLANE_VALID, TN_PLANE_VALID);
}

static void row_comes_back_from_col_in_every_kind_of_tensor(void **state) {
    const tensor_fixture *f = *state;
    tn_scope scope = scope_in(f, "elsewhere");
    unsigned char row[64];
    tn_tensor w = square(f), moved = square(f), view, saved, restored, copy;
    fill_both(f, w, row);
    EXPECT_OK(tn_tensor_clone(w, scope, f->other, &copy));
    fixture_expect_states(copy, TN_PLANE_ABSENT, TN_PLANE_VALID);
    expect_transposed_back(f, copy, row);
    fill_both(f, moved, row);
    EXPECT_OK(tn_tensor_move(moved, scope));
    expect_transposed_back(f, moved, row);
    EXPECT_OK(tn_tensor_view_shape(w, 3, (int64_t[]){2, 4, 8}, scope, &view));
    expect_transposed_back(f, view, row); /* in the base */
    EXPECT_OK(tn_tensor_destroy(view, f->stream));
    EXPECT_OK(tn_tensor_save(w, col_bit, scope, f->stream, &saved));
    expect_transposed_back(f, saved, row);
    fixture_expect_states(w, TN_PLANE_VALID, TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_drop(saved, TN_PLANE_ROW, f->stream));
    EXPECT_OK(tn_tensor_restore(saved, f->scope, &restored));
    expect_transposed_back(f, restored, row);
    assert_int_equal(fixture_owned_bytes(f), 7 * PLANE_BYTES);
}

/* In place: the transposed plane of another shape is written while the old one is read. */
static void a_replaced_plane_is_what_the_other_derives_from(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = square(f);
    tn_plane_view view, old;
    tn_lease lease;
    unsigned char row[64], col[64], out[64];
    float scales[4];
    fill_both(f, w, row);
    EXPECT_OK(tn_lease_begin(w, TN_PLANE_COL, TN_REPLACE, f->other, &lease, &view));
    EXPECT_OK(tn_lease_old_view(lease, &old));
    EXPECT_OK(tn_copy(f->device, (char *)view.data + 8, old.data, 56, f->other)); /* rows roll */
    EXPECT_OK(tn_copy(f->device, view.data, (char *)old.data + 56, 8, f->other));
    EXPECT_OK(tn_copy(f->device, view.scale, old.scale, 16, f->other));
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_read(w, TN_PLANE_COL, col, 64, scales, 16, f->stream));
    EXPECT_OK(tn_plane_read(w, TN_PLANE_ROW, out, 64, scales, 16, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    for (int i = 0; i < 64; i++) {
        assert_int_equal(out[i], row[i / 8 * 8 + (i + 7) % 8]);
        assert_int_equal(col[i % 8 * 8 + i / 8], out[i]);
    }
    assert_int_equal(fixture_owned_bytes(f), 2 * PLANE_BYTES);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_tensor_whose_plane_is_being_replaced_moves_with_both_buffers),
        WITH_FIXTURE(a_view_and_its_base_move_each_on_its_own),
        WITH_FIXTURE(a_saved_tensor_moves_and_is_still_a_saved_one),
        WITH_FIXTURE(adopted_memory_goes_along_and_is_released_once),
        WITH_FIXTURE(what_is_in_a_scratch_slot_is_neither_handed_over_nor_cloned),
        WITH_FIXTURE(row_comes_back_from_col_in_every_kind_of_tensor),
        WITH_FIXTURE(a_replaced_plane_is_what_the_other_derives_from),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
