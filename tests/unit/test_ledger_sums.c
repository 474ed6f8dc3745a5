/* The ledger: sums and peaks at every scope, the visitor, and a check that finds one wrong byte. */
#include "tensor_fixture.h"

#include <string.h>

#include "pool_owned.h"
#include "tensor_state.h"

enum { ROW_BYTES = 129 * 257, ROW_SCALES = 2 * 4 * 4, COL_SCALES = 3 * 4 * 4 }; /* 129 x 257, 2D */

static tn_scope child_of(tn_scope parent, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = parent;
    config.kind = TN_SCOPE_LAYER;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

/* ---- sums ---------------------------------------------------------------------------------- */

static void bytes_are_told_apart_by_plane_and_part(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor weight = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 129, 257, "w");
    tn_tensor plain = fixture_tensor(f, TN_FORMAT_PLAIN, 3, 5, "y");
    tn_plane_view view;
    tn_lease lease;
    fixture_write(weight, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(weight, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_lease_begin(plain, TN_PLANE_DATA, TN_WRITE, f->stream, &lease, &view));
    tn_ledger ledger = fixture_ledger(f->scope);
    assert_int_equal(ledger.data_bytes[TN_PLANE_DATA], 60);
    assert_int_equal(ledger.scale_bytes[TN_PLANE_DATA], 0);
    assert_int_equal(ledger.data_bytes[TN_PLANE_ROW], ROW_BYTES);
    assert_int_equal(ledger.scale_bytes[TN_PLANE_ROW], ROW_SCALES);
    assert_int_equal(ledger.data_bytes[TN_PLANE_COL], ROW_BYTES);
    assert_int_equal(ledger.scale_bytes[TN_PLANE_COL], COL_SCALES);
    assert_int_equal(ledger.total_bytes, 60 + 2 * ROW_BYTES + ROW_SCALES + COL_SCALES);
    assert_int_equal(ledger.total_bytes, fixture_owned_bytes(f));
    assert_int_equal(ledger.tensors, 2);
    assert_int_equal(ledger.planes, 3);
    assert_int_equal(ledger.leases, 1);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_scope_ledger(f->scope, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_ledger((tn_scope){0}, &ledger), TN_STALE_HANDLE);
}

static void peaks_stay_until_reset_and_each_plane_has_its_own(void **state) {
    const tensor_fixture *f = *state;
    tn_scope layer = child_of(f->scope, "layer");
    tn_tensor weight = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 129, 257, "w");
    EXPECT_OK(tn_tensor_move(weight, layer));
    fixture_write(weight, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(weight, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(weight, TN_PLANE_ROW, f->stream));
    for (int i = 0; i < 2; i++) {
        tn_ledger ledger = fixture_ledger(i ? layer : f->scope);
        assert_int_equal(ledger.total_bytes, ROW_BYTES + COL_SCALES);
        assert_int_equal(ledger.peak_total_bytes, 2 * ROW_BYTES + ROW_SCALES + COL_SCALES);
        assert_int_equal(ledger.peak_plane_bytes[TN_PLANE_ROW], ROW_BYTES + ROW_SCALES);
        assert_int_equal(ledger.peak_plane_bytes[TN_PLANE_COL], ROW_BYTES + COL_SCALES);
        assert_int_equal(ledger.peak_plane_bytes[TN_PLANE_DATA], 0);
    }
    EXPECT_OK(tn_scope_ledger_reset_peaks(layer));
    assert_int_equal(fixture_ledger(layer).peak_total_bytes, ROW_BYTES + COL_SCALES);
    assert_int_equal(fixture_ledger(layer).peak_plane_bytes[TN_PLANE_ROW], 0);
    assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, /* only where it was asked */
                     2 * ROW_BYTES + ROW_SCALES + COL_SCALES);
    EXPECT_OK(tn_scope_close(layer));
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 0);
    EXPECT_STATUS(tn_scope_ledger_reset_peaks(layer), TN_STALE_HANDLE);
}

static void several_roots_of_a_pool_have_their_own_ledgers(void **state) {
    const tensor_fixture *f = *state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config tensor_config = TN_TENSOR_CONFIG_INIT;
    tn_scope second;
    tn_tensor tensor;
    config.pool = f->pool;
    EXPECT_OK(tn_scope_create(&config, &second));
    tensor_config.rank = 1, tensor_config.shape[0] = 5;
    EXPECT_OK(tn_tensor_create(second, &tensor_config, &tensor));
    fixture_write(tensor, TN_PLANE_DATA, f->stream);
    assert_int_equal(fixture_ledger(second).total_bytes, 20);
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 0);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_tensor_move(tensor, f->scope)); /* between roots of one pool */
    EXPECT_OK(tn_scope_close(second));
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 20);
}

/* ---- the visitor --------------------------------------------------------------------------- */

typedef struct visited {
    int count;
    char names[8][16];
    size_t bytes[8];
    size_t col_scale_bytes;
} visited;

static void visit(void *argument, tn_tensor tensor, const tn_tensor_info *info,
                  const size_t data_bytes[TN_PLANE_COUNT],
                  const size_t scale_bytes[TN_PLANE_COUNT]) {
    visited *seen = argument;
    tn_plane_layout layout;
    size_t bytes = 0;
    for (int i = 0; i < TN_PLANE_COUNT; i++)
        bytes += data_bytes[i] + scale_bytes[i];
    strncpy(seen->names[seen->count], info->name, 15);
    seen->bytes[seen->count++] = bytes;
    seen->col_scale_bytes += scale_bytes[TN_PLANE_COL];
    /* A visitor may call anything on what it sees. */
    if (info->format != TN_FORMAT_PLAIN) {
        EXPECT_OK(tn_plane_layout_get(tensor, TN_PLANE_COL, &layout));
    }
}

static void the_visitor_sees_tensors_with_memory_in_order_of_creation(void **state) {
    const tensor_fixture *f = *state;
    tn_scope layer = child_of(f->scope, "layer");
    tn_scope op = child_of(layer, "op");
    tn_tensor tensors[5];
    visited seen = {0};
    const char *names[5] = {"one", "two", "three", "four", "five"};
    for (int i = 0; i < 5; i++) {
        tensors[i] = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 129, 257, names[i]);
        if (i != 2) fixture_write(tensors[i], i == 4 ? TN_PLANE_COL : TN_PLANE_ROW, f->stream);
    }
    EXPECT_OK(tn_tensor_move(tensors[0], op));
    EXPECT_OK(tn_tensor_move(tensors[3], layer));
    EXPECT_OK(tn_scope_visit(f->scope, visit, &seen));
    assert_int_equal(seen.count, 4); /* "three" has no plane */
    assert_string_equal(seen.names[0], "one");
    assert_string_equal(seen.names[1], "two");
    assert_string_equal(seen.names[2], "four");
    assert_string_equal(seen.names[3], "five");
    assert_int_equal(seen.bytes[0], ROW_BYTES + ROW_SCALES);
    assert_int_equal(seen.bytes[3], ROW_BYTES + COL_SCALES);
    assert_int_equal(seen.col_scale_bytes, COL_SCALES);
    memset(&seen, 0, sizeof seen);
    EXPECT_OK(tn_scope_visit(layer, visit, &seen));
    assert_int_equal(seen.count, 2); /* "one" and "four" */
    EXPECT_STATUS(tn_scope_visit(f->scope, NULL, &seen), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_visit((tn_scope){0}, visit, &seen), TN_STALE_HANDLE);
}

/* ---- the check finds what is wrong --------------------------------------------------------- */

/* Adds to one number of a scope's sums, behind the ledger's back. */
static void falsify(tn_scope scope, size_t offset, size_t change) {
    tn__scope_object *object;
    size_t number;
    EXPECT_OK(tn__scope_acquire(scope, &object));
    memcpy(&number, (char *)&object->sums + offset, sizeof number);
    number += change;
    memcpy((char *)&object->sums + offset, &number, sizeof number);
    tn__scope_unlock(object);
}

static void a_ledger_off_by_one_byte_is_found(void **state) {
    const tensor_fixture *f = *state;
    static const size_t offsets[] = {
        offsetof(tn__sums, data_bytes),
        offsetof(tn__sums, data_bytes) + sizeof(size_t),
        offsetof(tn__sums, scale_bytes) + 2 * sizeof(size_t),
        offsetof(tn__sums, planes),
        offsetof(tn__sums, tensors),
        offsetof(tn__sums, leases),
    };
    tn_scope layer = child_of(f->scope, "layer");
    tn_scope scopes[2] = {f->scope, layer};
    tn_tensor weight = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 129, 257, "w");
    EXPECT_OK(tn_tensor_move(weight, layer));
    fixture_write(weight, TN_PLANE_ROW, f->stream);
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        for (int at = 0; at < 2; at++) {
            EXPECT_OK(tn_ledger_check(f->pool));
            falsify(scopes[at], offsets[i], 1);
            EXPECT_STATUS(tn_ledger_check(f->pool), TN_LEAK);
            EXPECT_ERROR_HAS(at ? "layer" : "model");
            falsify(scopes[at], offsets[i], (size_t)-1);
        }
    }
    falsify(f->scope, offsetof(tn__sums, data_bytes), 1);
    EXPECT_STATUS(tn_ledger_check(f->pool), TN_LEAK);
    EXPECT_ERROR_HAS("the ledger of pool fixture does not balance: planes 33185 bytes, scopes "
                     "33186 bytes, pool owned 33185 bytes; wrong sums in scope model");
    falsify(f->scope, offsetof(tn__sums, data_bytes), (size_t)-1);
}

static void an_owned_block_of_no_tensor_is_found(void **state) {
    const tensor_fixture *f = *state;
    void *block = NULL;
    EXPECT_OK(tn__alloc_owned(f->pool, 100, f->stream, NULL, &block));
    EXPECT_STATUS(tn_ledger_check(f->pool), TN_LEAK);
    EXPECT_ERROR_HAS("planes 0 bytes, scopes 0 bytes, pool owned 100 bytes");
    EXPECT_OK(tn_free(block, f->stream));
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_STATUS(tn_ledger_check(NULL), TN_INVALID_ARGUMENT);
}

static void a_plane_freed_behind_the_tensors_back_is_found(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_PLAIN, 1, 25, "y");
    tn__tensor_object *object = NULL;
    void *replacement = NULL;
    fixture_write(tensor, TN_PLANE_DATA, f->stream);
    EXPECT_OK(tn__tensor_acquire(tensor, &object));
    void **block = &object->planes[TN_PLANE_DATA].blocks[TN__PART_DATA];
    EXPECT_OK(tn_free(*block, f->stream));
    tn__tensor_unlock(object);
    EXPECT_STATUS(tn_ledger_check(f->pool), TN_LEAK);
    EXPECT_ERROR_HAS("planes 100 bytes, scopes 100 bytes, pool owned 0 bytes");
    EXPECT_OK(tn__alloc_owned(f->pool, 100, f->stream, NULL, &replacement));
    *block = replacement;
    EXPECT_OK(tn_ledger_check(f->pool));
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(bytes_are_told_apart_by_plane_and_part),
        WITH_FIXTURE(peaks_stay_until_reset_and_each_plane_has_its_own),
        WITH_FIXTURE(several_roots_of_a_pool_have_their_own_ledgers),
        WITH_FIXTURE(the_visitor_sees_tensors_with_memory_in_order_of_creation),
        WITH_FIXTURE(a_ledger_off_by_one_byte_is_found),
        WITH_FIXTURE(an_owned_block_of_no_tensor_is_found),
        WITH_FIXTURE(a_plane_freed_behind_the_tensors_back_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
