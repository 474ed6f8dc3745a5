/* TENURE_CHECK_LEASES on the simulated device: a READ lease under which declared work wrote any of
 * the plane does not end, whatever kind of work that was; nothing else keeps one from ending.
 */
#include "tensor_fixture.h"

#include <stdlib.h>

#include "driver.h"
#include "options.h"
#include "test_graphs.h"

enum { ROWS = 256, COLS = 384 };

typedef struct checked {
    tensor_fixture base;
    tn_tensor tensor, neighbour;
} checked;

static int open_checked(void **state) {
    static checked scene;
    setenv("TENURE_CHECK_LEASES", "1", 1);
    tn__options_reload();
    tensor_fixture_open_sim(&scene.base);
    scene.tensor = fixture_tensor(&scene.base, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "weight");
    scene.neighbour = fixture_tensor(&scene.base, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "neighbour");
    fixture_write(scene.tensor, TN_PLANE_ROW, scene.base.stream);
    fixture_write(scene.neighbour, TN_PLANE_ROW, scene.base.stream);
    EXPECT_OK(tn_device_synchronize(scene.base.device));
    *state = &scene;
    return 0;
}

static int close_checked(void **state) {
    checked *c = *state;
    EXPECT_OK(tn_device_synchronize(c->base.device));
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&c->base);
    unsetenv("TENURE_CHECK_LEASES");
    tn__options_reload();
    return 0;
}

static tn_lease begin(const checked *c, tn_tensor tensor, tn_plane plane, tn_access access,
                      tn_plane_view *view) {
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, access, c->base.stream, &lease, view));
    return lease;
}

/* A kernel that reads the plane, and writes `bytes` from `address` on. */
static void run_kernel(const checked *c, const tn_plane_view *view, const void *address,
                       size_t bytes) {
    tn__range ranges[3] = {{view->data, view->layout.data_bytes, 0},
                           {view->scale, view->layout.scale_bytes, 0},
                           {address, bytes, 1}};
    EXPECT_OK(tn__device_driver(c->base.device)
                  ->ghost_launch(tn__device_state(c->base.device), "kernel", ranges, 3, 50.0,
                                 c->base.stream));
}

static void expect_refused(tn_lease lease) {
    EXPECT_STATUS(tn_lease_end(lease), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor weight");
    EXPECT_ERROR_HAS("plane ROW was written under the READ lease");
    EXPECT_OK(tn_lease_abandon(lease));
}

static void one_byte_of_the_elements_is_enough(void **state) {
    const checked *c = *state;
    tn_plane_view view;
    tn_lease lease = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view);
    run_kernel(c, &view, (char *)view.data + view.layout.data_bytes - 1, 1);
    expect_refused(lease);
}

static void so_is_one_of_the_scales(void **state) {
    const checked *c = *state;
    tn_plane_view view;
    tn_lease lease = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view);
    run_kernel(c, &view, view.scale, sizeof(float));
    expect_refused(lease);
}

static void a_fill_is_found_though_nothing_was_changed(void **state) {
    const checked *c = *state;
    const tn__driver *driver = tn__device_driver(c->base.device);
    tn_plane_view view;
    tn_lease lease = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view);
    EXPECT_OK(driver->fill(tn__device_state(c->base.device), view.data, 0, COLS, c->base.stream));
    expect_refused(lease);
}

static void a_graph_writes_when_it_is_launched(void **state) {
    const checked *c = *state;
    tn_plane_view view;
    tn_lease lease = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view);
    test_capture_begin(c->base.device, c->base.stream, TEST_CAPTURE_RELAXED);
    run_kernel(c, &view, view.data, COLS);
    test_graph graph = test_capture_end(c->base.device, c->base.stream);
    EXPECT_OK(tn_lease_end(lease)); /* it has not run */
    lease = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view);
    test_graph_launch(c->base.device, &graph, c->base.stream);
    expect_refused(lease);
    EXPECT_OK(tn_device_synchronize(c->base.device));
    test_graph_destroy(c->base.device, &graph);
}

static void what_only_reads_or_writes_elsewhere_is_fine(void **state) {
    const checked *c = *state;
    tn_plane_view view, second_view, other;
    tn_lease first = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view);
    tn_lease second = begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &second_view);
    tn_lease written = begin(c, c->neighbour, TN_PLANE_ROW, TN_UPDATE, &other);
    run_kernel(c, &view, other.data, other.layout.data_bytes);
    run_kernel(c, &second_view, other.scale, other.layout.scale_bytes);
    EXPECT_OK(tn_plane_require(c->tensor, TN_PLANE_COL, c->base.other));
    EXPECT_OK(tn_lease_end(written));
    EXPECT_OK(tn_lease_end(first));
    EXPECT_OK(tn_lease_end(second));
}

static void leases_that_write_are_not_asked(void **state) {
    const checked *c = *state;
    tn_plane_view view;
    for (int access = TN_WRITE; access <= TN_REPLACE; access++) {
        tn_lease lease = begin(c, c->tensor, TN_PLANE_ROW, (tn_access)access, &view);
        run_kernel(c, &view, view.data, view.layout.data_bytes);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_lease_end(begin(c, c->tensor, TN_PLANE_ROW, TN_READ, &view)));
    }
}

#define CHECKED_TEST(name) cmocka_unit_test_setup_teardown(name, open_checked, close_checked)

int main(void) {
    const struct CMUnitTest tests[] = {
        CHECKED_TEST(one_byte_of_the_elements_is_enough),
        CHECKED_TEST(so_is_one_of_the_scales),
        CHECKED_TEST(a_fill_is_found_though_nothing_was_changed),
        CHECKED_TEST(a_graph_writes_when_it_is_launched),
        CHECKED_TEST(what_only_reads_or_writes_elsewhere_is_fine),
        CHECKED_TEST(leases_that_write_are_not_asked),
    };
    return cmocka_run_group_tests_name("sim/lease_writes", tests, NULL, NULL);
}
