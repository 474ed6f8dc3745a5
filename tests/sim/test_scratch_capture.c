/* Scratch slots in captures: what a graph does is the same at each launch, whatever ran between,
 * and nothing that only a graph has done, or may have undone, is taken for done.
 * */
#include "tensor_fixture.h"

#include "driver.h"
#include "test_graphs.h"

enum { ROWS = 256, COLS = 128, LAYERS = 3, SLOT_BYTES = 256 * 128 + 2 * 4 * 4 };

typedef struct capture_fixture {
    tensor_fixture base;
    tn_tensor layers[LAYERS];
} capture_fixture;

static void launch(const tensor_fixture *f, const tn_plane_view *view, int is_write,
                   tn_stream stream) {
    tn__range ranges[2] = {{view->data, view->layout.data_bytes, is_write},
                           {view->scale, view->layout.scale_bytes, is_write}};
    EXPECT_OK(tn__device_driver(f->device)->ghost_launch(tn__device_state(f->device), "gemm",
                                                         ranges, 2, 50.0, stream));
}

static int open_layers(void **state) {
    static capture_fixture fixture;
    tensor_fixture_open_sim(&fixture.base);
    EXPECT_OK(tn_scope_policy_set(fixture.base.scope, TN_POLICY_SCRATCH));
    for (int i = 0; i < LAYERS; i++) {
        tn_plane_view view;
        tn_lease lease;
        fixture.layers[i] = fixture_tensor(&fixture.base, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
        EXPECT_OK(tn_lease_begin(fixture.layers[i], TN_PLANE_ROW, TN_WRITE, fixture.base.other,
                                 &lease, &view)); /* not the stream that will capture */
        launch(&fixture.base, &view, 1, fixture.base.other);
        EXPECT_OK(tn_lease_end(lease));
    }
    EXPECT_OK(
        tn_device_synchronize(fixture.base.device)); /* launches are ordered by who launches */
    *state = &fixture;
    return 0;
}

static int close_layers(void **state) {
    capture_fixture *f = *state;
    EXPECT_OK(tn_device_synchronize(f->base.device));
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&f->base);
    return 0;
}

static void *read_col(const capture_fixture *f, int layer, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(f->layers[layer], TN_PLANE_COL, TN_READ, stream, &lease, &view));
    launch(&f->base, &view, 0, stream);
    EXPECT_OK(tn_lease_end(lease));
    return view.data;
}

/* A backward pass; returns the one address of all of its planes. */
static void *backward(const capture_fixture *f, tn_stream stream) {
    void *address = read_col(f, LAYERS - 1, stream);
    EXPECT_OK(tn_plane_release(f->layers[LAYERS - 1], TN_PLANE_COL, stream));
    for (int i = LAYERS - 2; i >= 0; i--) {
        assert_ptr_equal(read_col(f, i, stream), address);
        EXPECT_OK(tn_plane_release(f->layers[i], TN_PLANE_COL, stream));
    }
    return address;
}

static test_graph capture_backward(const capture_fixture *f, void **address) {
    test_capture_begin(f->base.device, f->base.stream, TEST_CAPTURE_GLOBAL);
    *address = backward(f, f->base.stream);
    assert_true(test_is_capturing(f->base.device, f->base.stream));
    return test_capture_end(f->base.device, f->base.stream);
}

static uint64_t launches(const capture_fixture *f) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(f->base.device, &stats));
    return stats.calls[TN_CALL_LAUNCH];
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_captured_backward_replays_at_the_same_address(void **state) {
    const capture_fixture *f = *state;
    void *address = NULL;
    EXPECT_OK(tn_scope_scratch_reserve(f->base.scope, f->base.stream));
    size_t owned = fixture_owned_bytes(&f->base);
    EXPECT_OK(tn_device_synchronize(f->base.device));
    int derived = fixture_derive_calls();
    uint64_t before = launches(f);
    test_graph graph = capture_backward(f, &address);
    assert_int_equal(fixture_derive_calls() - derived, LAYERS);
    assert_int_equal(launches(f) - before, 2 * LAYERS); /* all derivations and reads are in it */
    for (int step = 0; step < 4; step++) {
        test_graph_launch(f->base.device, &graph, f->base.stream);
        assert_ptr_equal(backward(f, f->base.stream), address); /* eager between launches */
    }
    assert_int_equal(fixture_derive_calls() - derived, 5 * LAYERS);
    assert_int_equal(fixture_owned_bytes(&f->base), owned);
    test_graph_destroy(f->base.device, &graph);
}

/* Weights were written on another stream, and the slot was used on another one before: a capture
 * neither waits for them nor is spoiled, and what comes after waits for all of it. */
static void uses_outside_of_the_capture_are_not_forgotten(void **state) {
    const capture_fixture *f = *state;
    void *address = NULL;
    tn_stream third;
    EXPECT_OK(tn_stream_create(f->base.device, &third));
    (void)read_col(f, 0, third);
    uint64_t waits = fixture_waits(&f->base);
    test_graph graph = capture_backward(f, &address);
    assert_int_equal(fixture_waits(&f->base), waits);
    (void)read_col(f, 1, f->base.other); /* must wait for what `third` still reads */
    assert_int_equal(test_sim_get()->race_count(), 0);
    assert_true(fixture_waits(&f->base) > waits);
    EXPECT_OK(tn_device_synchronize(f->base.device));
    test_graph_launch(f->base.device, &graph, f->base.stream);
    EXPECT_OK(tn_stream_destroy(f->base.device, third));
    test_graph_destroy(f->base.device, &graph);
}

static void what_was_derived_in_a_capture_is_not_valid_outside(void **state) {
    const capture_fixture *f = *state;
    int derived = fixture_derive_calls();
    test_capture_begin(f->base.device, f->base.stream, TEST_CAPTURE_GLOBAL);
    (void)read_col(f, 0, f->base.stream);
    (void)read_col(f, 0, f->base.stream); /* in the same capture it is */
    assert_int_equal(fixture_derive_calls() - derived, 1);
    test_graph first = test_capture_end(f->base.device, f->base.stream);
    test_capture_begin(f->base.device, f->base.stream, TEST_CAPTURE_GLOBAL);
    (void)read_col(f, 0, f->base.stream); /* another graph has its own derivation */
    assert_int_equal(fixture_derive_calls() - derived, 2);
    test_graph second = test_capture_end(f->base.device, f->base.stream);
    (void)read_col(f, 0, f->base.stream);
    assert_int_equal(fixture_derive_calls() - derived, 3);
    (void)read_col(f, 0, f->base.stream); /* a graph may have been launched since */
    assert_int_equal(fixture_derive_calls() - derived, 4);
    test_graph_destroy(f->base.device, &first);
    test_graph_destroy(f->base.device, &second);
}

static void what_was_derived_outside_is_derived_again_inside(void **state) {
    const capture_fixture *f = *state;
    (void)read_col(f, 0, f->base.stream);
    (void)read_col(f, 0, f->base.stream); /* no graph knows the slot yet */
    int derived = fixture_derive_calls();
    test_capture_begin(f->base.device, f->base.stream, TEST_CAPTURE_GLOBAL);
    (void)read_col(f, 0, f->base.stream);
    assert_int_equal(fixture_derive_calls() - derived, 1);
    test_graph graph = test_capture_end(f->base.device, f->base.stream);
    test_graph_destroy(f->base.device, &graph);
}

/* A stale plane that its new policy keeps is in the slot still, and is derived there in place. */
static void a_plane_derived_again_in_place_is_of_its_capture(void **state) {
    const capture_fixture *f = *state;
    tn_plane_view view;
    tn_lease lease;
    void *address = read_col(f, 0, f->base.stream);
    EXPECT_OK(tn_scope_policy_set(f->base.scope, TN_POLICY_KEEP));
    EXPECT_OK(tn_lease_begin(f->layers[0], TN_PLANE_ROW, TN_WRITE, f->base.stream, &lease, &view));
    launch(&f->base, &view, 1, f->base.stream);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_state(f->layers[0], TN_PLANE_COL), TN_PLANE_STALE);
    EXPECT_OK(tn_device_synchronize(f->base.device));
    test_capture_begin(f->base.device, f->base.stream, TEST_CAPTURE_GLOBAL);
    assert_ptr_equal(read_col(f, 0, f->base.stream), address);
    test_graph graph = test_capture_end(f->base.device, f->base.stream);
    int derived = fixture_derive_calls();
    (void)read_col(f, 0, f->base.stream);
    assert_int_equal(fixture_derive_calls() - derived, 1);
    test_graph_destroy(f->base.device, &graph);
}

static void a_plane_leased_outside_is_not_derived_over_inside(void **state) {
    const capture_fixture *f = *state;
    tn_plane_view view, again;
    tn_lease lease, other;
    EXPECT_OK(tn_lease_begin(f->layers[0], TN_PLANE_COL, TN_READ, f->base.other, &lease, &view));
    test_capture_begin(f->base.device, f->base.stream, TEST_CAPTURE_GLOBAL);
    EXPECT_STATUS(
        tn_lease_begin(f->layers[0], TN_PLANE_COL, TN_READ, f->base.stream, &other, &again),
        TN_IN_USE);
    EXPECT_STATUS(
        tn_lease_begin(f->layers[1], TN_PLANE_COL, TN_READ, f->base.stream, &other, &again),
        TN_IN_USE);
    test_graph graph = test_capture_end(f->base.device, f->base.stream);
    EXPECT_OK(tn_lease_end(lease));
    test_graph_destroy(f->base.device, &graph);
}

static void a_slot_that_a_graph_may_hold_does_not_grow(void **state) {
    const capture_fixture *f = *state;
    void *address = NULL;
    test_graph graph = capture_backward(f, &address); /* its memory is made in the capture */
    tn_tensor large =
        fixture_tensor(&f->base, TN_FORMAT_FP8_BLOCK_2D, INT64_C(2) * ROWS, COLS, "large");
    fixture_write(large, TN_PLANE_ROW, f->base.stream);
    EXPECT_STATUS(tn_plane_require(large, TN_PLANE_COL, f->base.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("a graph may hold its addresses");
    test_graph_launch(f->base.device, &graph, f->base.stream);
    assert_ptr_equal(read_col(f, 0, f->base.stream), address);
    EXPECT_OK(tn_device_synchronize(f->base.device));
    test_graph_destroy(f->base.device, &graph);
    EXPECT_OK(tn_scope_scratch_reserve(f->base.scope, f->base.stream)); /* says that it is gone */
    EXPECT_OK(tn_plane_require(large, TN_PLANE_COL, f->base.stream));
}

/* A side stream of the same capture derives the next plane while this one is read. */
static void a_side_stream_of_the_capture_works_ahead(void **state) {
    const capture_fixture *f = *state;
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    tn_stream main_stream = f->base.stream, side = f->base.other;
    config.buffers = 2;
    EXPECT_OK(tn_scope_scratch_config_set(f->base.scope, &config));
    EXPECT_OK(tn_scope_scratch_reserve(f->base.scope, main_stream));
    EXPECT_OK(tn_device_synchronize(f->base.device));
    test_capture_begin(f->base.device, main_stream, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_stream_wait(f->base.device, side, main_stream));
    for (int i = 0; i < LAYERS; i++)
        EXPECT_OK(tn_plane_require(f->layers[i % 2], TN_PLANE_COL, i % 2 ? side : main_stream));
    for (int i = 0; i < 2; i++) {
        (void)read_col(f, i, main_stream); /* waits for the side stream inside of the capture */
        EXPECT_OK(tn_plane_release(f->layers[i], TN_PLANE_COL, main_stream));
    }
    EXPECT_OK(tn_stream_wait(f->base.device, main_stream, side));
    test_graph graph = test_capture_end(f->base.device, main_stream);
    for (int step = 0; step < 3; step++)
        test_graph_launch(f->base.device, &graph, main_stream);
    EXPECT_OK(tn_device_synchronize(f->base.device));
    assert_int_equal(test_sim_get()->race_count(), 0);
    test_graph_destroy(f->base.device, &graph);
}

int main(void) {
#define WITH_LAYERS(test) cmocka_unit_test_setup_teardown(test, open_layers, close_layers)
    const struct CMUnitTest tests[] = {
        WITH_LAYERS(a_captured_backward_replays_at_the_same_address),
        WITH_LAYERS(uses_outside_of_the_capture_are_not_forgotten),
        WITH_LAYERS(what_was_derived_in_a_capture_is_not_valid_outside),
        WITH_LAYERS(what_was_derived_outside_is_derived_again_inside),
        WITH_LAYERS(a_plane_derived_again_in_place_is_of_its_capture),
        WITH_LAYERS(a_plane_leased_outside_is_not_derived_over_inside),
        WITH_LAYERS(a_slot_that_a_graph_may_hold_does_not_grow),
        WITH_LAYERS(a_side_stream_of_the_capture_works_ahead),
    };
    return cmocka_run_group_tests_name("sim/scratch_capture", tests, NULL, NULL);
}
