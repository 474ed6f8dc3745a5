/* Leaving backward drops what lives until its end, all of it or nothing, and in stream order. */
#include "tensor_fixture.h"

enum { ROW_BYTES = 256 * 128 + 2 * 4 * 4, COL_BYTES = 256 * 128 + 1 * 4 * 4 }; /* 256 x 128 */
enum { LAYERS = 4 };

typedef struct layers_fixture {
    tensor_fixture base;
    tn_scope scopes[LAYERS]; /* each below the one before */
    tn_tensor weights[LAYERS];
} layers_fixture;

static tn_tensor weight_in(tn_scope scope, tn_plane_policy policy, tn_stream stream) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = 256, config.shape[1] = 128;
    config.policy = policy;
    config.name = "w";
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    fixture_write(tensor, TN_PLANE_ROW, stream);
    return tensor;
}

static int open_layers(void **state) {
    static layers_fixture fixture;
    tensor_fixture_open(&fixture.base);
    tn_scope parent = fixture.base.scope;
    for (int i = 0; i < LAYERS; i++) {
        tn_scope_config config = TN_SCOPE_CONFIG_INIT;
        config.parent = parent;
        config.kind = TN_SCOPE_LAYER;
        EXPECT_OK(tn_scope_create(&config, &fixture.scopes[i]));
        parent = fixture.scopes[i];
        fixture.weights[i] = weight_in(parent, TN_POLICY_UNTIL_BACKWARD_END, fixture.base.stream);
    }
    *state = &fixture;
    return 0;
}

static int close_layers(void **state) {
    layers_fixture *f = *state;
    tensor_fixture_close(&f->base);
    return 0;
}

static void read_all(const layers_fixture *f) {
    for (int i = 0; i < LAYERS; i++) {
        EXPECT_OK(tn_plane_require(f->weights[i], TN_PLANE_COL, f->base.stream));
        EXPECT_OK(tn_plane_release(f->weights[i], TN_PLANE_COL, f->base.stream)); /* no effect */
    }
}

static size_t col_bytes(const layers_fixture *f) {
    tn_ledger ledger = fixture_ledger(f->base.scope);
    return ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
}

static tn_phase phase_of(tn_scope scope) {
    tn_phase phase = TN_PHASE_COUNT;
    EXPECT_OK(tn_scope_phase_get(scope, &phase));
    return phase;
}

static void backward_keeps_and_its_end_drops(void **state) {
    const layers_fixture *f = *state;
    tn_stream stream = f->base.stream;
    for (int step = 0; step < 3; step++) {
        EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_FORWARD, stream));
        assert_int_equal(col_bytes(f), 0);
        EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_BACKWARD, stream));
        read_all(f);
        assert_int_equal(col_bytes(f), LAYERS * COL_BYTES);
        EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_RECOMPUTE, stream));
        assert_int_equal(col_bytes(f), LAYERS * COL_BYTES); /* a part of backward */
        EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_BACKWARD, stream));
        assert_int_equal(col_bytes(f), LAYERS * COL_BYTES);
        EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_UPDATE, stream));
        assert_int_equal(col_bytes(f), 0);
        assert_int_equal(fixture_owned_bytes(&f->base), LAYERS * ROW_BYTES);
    }
}

static void a_scope_ends_what_is_in_it_and_below(void **state) {
    const layers_fixture *f = *state;
    read_all(f);
    EXPECT_OK(tn_scope_phase_set(f->scopes[2], TN_PHASE_BACKWARD, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->scopes[2], TN_PHASE_NONE, f->base.stream));
    assert_int_equal(col_bytes(f), 2 * COL_BYTES);
    assert_int_equal(fixture_state(f->weights[1], TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_state(f->weights[2], TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(fixture_state(f->weights[3], TN_PLANE_COL), TN_PLANE_ABSENT);
}

static void a_leased_plane_stops_all_of_it(void **state) {
    const layers_fixture *f = *state;
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_BACKWARD, f->base.stream));
    read_all(f);
    EXPECT_OK(tn_lease_begin(f->weights[3], TN_PLANE_COL, TN_READ, f->base.other, &lease, &view));
    EXPECT_STATUS(tn_scope_phase_set(f->base.scope, TN_PHASE_UPDATE, f->base.stream), TN_IN_USE);
    EXPECT_ERROR_HAS("plane COL is under a READ lease");
    EXPECT_ERROR_HAS("leaving backward must wait");
    assert_int_equal(col_bytes(f), LAYERS * COL_BYTES);
    assert_int_equal(phase_of(f->base.scope), TN_PHASE_BACKWARD);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_UPDATE, f->base.stream));
    assert_int_equal(col_bytes(f), 0);
}

static void other_policies_do_not_end_with_backward(void **state) {
    const layers_fixture *f = *state;
    tn_tensor keep = weight_in(f->base.scope, TN_POLICY_KEEP, f->base.stream);
    tn_tensor last = weight_in(f->base.scope, TN_POLICY_UNTIL_LAST_USE, f->base.stream);
    EXPECT_OK(tn_plane_require(keep, TN_PLANE_COL, f->base.stream));
    EXPECT_OK(tn_plane_require(last, TN_PLANE_COL, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_BACKWARD, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_FORWARD, f->base.stream));
    assert_int_equal(col_bytes(f), 2 * COL_BYTES);
}

/* Which of two planes goes: the derived one, whichever it is; of two written ones COL. */
static void the_written_plane_stays(void **state) {
    const layers_fixture *f = *state;
    tn_tensor w = f->weights[0], both = f->weights[1];
    tn_lease row, col;
    tn_plane_view view;
    fixture_write(w, TN_PLANE_COL, f->base.stream); /* ROW is stale: freed */
    assert_int_equal(fixture_state(w, TN_PLANE_ROW), TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_require(w, TN_PLANE_ROW, f->base.stream));
    EXPECT_OK(tn_lease_begin(both, TN_PLANE_ROW, TN_WRITE, f->base.stream, &row, &view));
    EXPECT_OK(tn_lease_begin(both, TN_PLANE_COL, TN_WRITE, f->base.stream, &col, &view));
    EXPECT_OK(tn_lease_end(row));
    EXPECT_OK(tn_lease_end(col));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_BACKWARD, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_UPDATE, f->base.stream));
    assert_int_equal(fixture_state(w, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_state(both, TN_PLANE_ROW), TN_PLANE_VALID);
    assert_int_equal(fixture_state(both, TN_PLANE_COL), TN_PLANE_ABSENT);
}

static void a_plane_that_was_made_or_is_the_last_one_stays(void **state) {
    const layers_fixture *f = *state;
    EXPECT_OK(tn_plane_make(f->weights[0], TN_PLANE_COL, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_BACKWARD, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_UPDATE, f->base.stream));
    assert_int_equal(fixture_state(f->weights[0], TN_PLANE_COL), TN_PLANE_ALLOCATED);
    assert_int_equal(fixture_state(f->weights[1], TN_PLANE_ROW), TN_PLANE_VALID);
}

/* The end of a write under this policy keeps no stale plane. */
static void a_write_frees_the_plane_that_it_makes_stale(void **state) {
    const layers_fixture *f = *state;
    read_all(f);
    fixture_write(f->weights[0], TN_PLANE_ROW, f->base.stream);
    assert_int_equal(col_bytes(f), (LAYERS - 1) * COL_BYTES);
}

static void a_scope_without_a_phase_is_in_its_parents(void **state) {
    const layers_fixture *f = *state;
    assert_int_equal(phase_of(f->scopes[3]), TN_PHASE_NONE);
    EXPECT_OK(tn_scope_phase_set(f->base.scope, TN_PHASE_FORWARD, f->base.stream));
    EXPECT_OK(tn_scope_phase_set(f->scopes[1], TN_PHASE_RECOMPUTE, f->base.stream));
    assert_int_equal(phase_of(f->scopes[0]), TN_PHASE_FORWARD);
    assert_int_equal(phase_of(f->scopes[3]), TN_PHASE_RECOMPUTE);
    EXPECT_STATUS(tn_scope_phase_set(f->scopes[1], TN_PHASE_COUNT, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_phase_set(f->scopes[1], (tn_phase)-1, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_phase_get(f->scopes[1], NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_phase_set((tn_scope){0}, TN_PHASE_NONE, NULL), TN_STALE_HANDLE);
    assert_string_equal(tn_phase_name(TN_PHASE_RECOMPUTE), "recompute");
    assert_string_equal(tn_phase_name(TN_PHASE_COUNT), "unknown phase");
}

int main(void) {
#define WITH_LAYERS(test) cmocka_unit_test_setup_teardown(test, open_layers, close_layers)
    const struct CMUnitTest tests[] = {
        WITH_LAYERS(backward_keeps_and_its_end_drops),
        WITH_LAYERS(a_scope_ends_what_is_in_it_and_below),
        WITH_LAYERS(a_leased_plane_stops_all_of_it),
        WITH_LAYERS(other_policies_do_not_end_with_backward),
        WITH_LAYERS(the_written_plane_stays),
        WITH_LAYERS(a_plane_that_was_made_or_is_the_last_one_stays),
        WITH_LAYERS(a_write_frees_the_plane_that_it_makes_stale),
        WITH_LAYERS(a_scope_without_a_phase_is_in_its_parents),
    };
    return cmocka_run_group_tests_name("unit/phase_backward", tests, NULL, NULL);
}
