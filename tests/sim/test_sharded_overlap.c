/* What travels beside the layers of a sharded model, and what does not, on the simulated clock: in
 * a step whose order is known each layer begins where the one before it has ended, as long as a
 * gather and a reduction together take less than a layer; and the update begins with the last. And
 * that nothing of a step comes to be in a captured graph. */
#include <string.h>

#include "sharded_model_support.h"
#include "tenure_simulated.h"
#include "test_graphs.h"
#include "test_pools.h"
#include "test_support.h"

enum { UNITS = 6, ROWS = 1024, COLS = 1024, PASSES = 2 * UNITS };

static const double forward_us = 1000.0, backward_us = 2000.0, travel_us = 800.0;

static tn_device *device;
static tn_pool *pool;
static tn_stream stream;
static tn_comm *comm;
static tn_scope scope;
static tn_sharded_model *model;

/* ---- what the layers' stream does ------------------------------------------------------------ */

static tnsim_interval layers[PASSES];
static int layer_count;
static tnsim_interval first_update;
static double updates_us[UNITS]; /* where they begin */
static int update_count;

static int is_about(double us, double expected_us) {
    return us > expected_us - 0.01 && us < expected_us + 0.01;
}

static void note_layer(void *context, const tnsim_interval *interval) {
    const double us = interval->end_us - interval->begin_us;
    (void)context;
    if (strstr(interval->what, "adamw") && !strstr(interval->what, "advance")) {
        if (update_count == 0) first_update = *interval;
        if (update_count < UNITS) updates_us[update_count] = interval->begin_us;
        update_count++;
    }
    if (!is_about(us, forward_us) && !is_about(us, backward_us)) return;
    if (layer_count < PASSES) layers[layer_count] = *interval;
    layer_count++;
}

static double idle_before(int layer) { return layers[layer].begin_us - layers[layer - 1].end_us; }

/* ---- the model ------------------------------------------------------------------------------- */

/* A weight travels as one half to each of two ranks, in bf16, and so does its gradient. */
static void open_comm(void) {
    tn_simulated_links links = TN_SIMULATED_LINKS_INIT;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    links.node_bytes_per_us = (double)ROWS * COLS / travel_us;
    config.device = device;
    config.engine = TN_COMM_SIMULATED;
    config.rank_count = 2;
    config.links = &links;
    EXPECT_OK(tn_comm_create(&config, &comm));
}

static void open_model(int shards_from_masters) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    const tn_sharded_tensor weight = {.name = "w", .dtype = TN_BF16, .rows = ROWS, .cols = COLS};
    config.scope = scope, config.comm = comm, config.stream = stream;
    config.gradient_dtype = TN_BF16;
    config.shards_from_masters = shards_from_masters;
    model = sharded_model_open(&config, weight, UNITS);
}

static void open_all(int shards_from_masters) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_scope_config of_scope = TN_SCOPE_CONFIG_INIT;
    device = test_open_sim(0, 0);
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    EXPECT_OK(tn_stream_create(device, &stream));
    of_scope.pool = pool;
    EXPECT_OK(tn_scope_create(&of_scope, &scope));
    open_comm();
    open_model(shards_from_masters);
}

static int set_up(void **state) {
    (void)state;
    open_all(0);
    return 0;
}

static int set_up_made(void **state) {
    (void)state;
    open_all(1);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    test_sim_get()->watch(NULL, NULL);
    EXPECT_OK(tn_sharded_destroy(model));
    EXPECT_OK(tn_comm_destroy(comm));
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_stream_destroy(device, stream));
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
    return 0;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static void forward(int unit) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_sharded_forward_begin(model, unit));
    EXPECT_OK(tn_lease_begin(tn_sharded_weight(model, unit, 0), TN_PLANE_DATA, TN_READ, stream,
                             &lease, &view));
    test_sim_read(device, stream, view.data, view.layout.data_bytes, forward_us);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_sharded_forward_end(model, unit));
}

static void backward(int unit) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_sharded_backward_begin(model, unit));
    EXPECT_OK(tn_lease_begin(tn_sharded_gradient(model, unit, 0), TN_PLANE_DATA, TN_WRITE, stream,
                             &lease, &view));
    test_sim_write(device, stream, view.data, view.layout.data_bytes, backward_us);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_sharded_backward_end(model, unit));
}

static void step(int is_update_ahead) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    if (is_update_ahead) EXPECT_OK(tn_sharded_update_ahead(model, &update));
    for (int i = 0; i < UNITS; i++)
        forward(i);
    for (int i = UNITS; i-- > 0;)
        backward(i);
    EXPECT_OK(tn_sharded_update(model, is_update_ahead ? NULL : &update));
    EXPECT_OK(tn_device_synchronize(device));
}

static void watch_third_step(int is_update_ahead) {
    step(is_update_ahead);
    step(is_update_ahead);
    layer_count = update_count = 0;
    test_sim_get()->watch(note_layer, NULL);
    step(is_update_ahead);
    assert_int_equal(layer_count, PASSES);
    assert_int_equal(update_count, UNITS);
}

static void expect_no_layer_waits(void) {
    for (int i = 1; i < PASSES; i++) {
        if (idle_before(i) > 0.01)
            fail_msg("layer %d begins %.3f us after the one before has ended", i, idle_before(i));
    }
}

static void a_layer_waits_for_no_reduction_of_the_one_before(void **state) {
    (void)state;
    watch_third_step(0);
    expect_no_layer_waits();
}

/* Nor for its update, if that comes behind its reduction: one is left when the last layer ends. */
static void a_layer_waits_for_no_update_ahead(void **state) {
    (void)state;
    watch_third_step(1);
    expect_no_layer_waits();
    for (int i = 0; i + 1 < UNITS; i++)
        assert_true(updates_us[i] < layers[UNITS + i + 1].end_us);
    assert_true(updates_us[UNITS - 1] < layers[PASSES - 1].end_us + travel_us + 20.0);
}

/* The reduction of the first unit, which is the last, takes travel_us from there on. */
static void the_update_waits_for_no_reduction_but_its_own(void **state) {
    (void)state;
    watch_third_step(0);
    const double idle_us = first_update.begin_us - layers[PASSES - 1].end_us;
    if (idle_us < 0.0 || idle_us > 20.0)
        fail_msg("the first update begins %.3f us after the last layer has ended", idle_us);
}

/* ---- captures -------------------------------------------------------------------------------- */

static uint64_t steps_made(void) {
    tn_sharded_report report = TN_SHARDED_REPORT_INIT;
    EXPECT_OK(tn_sharded_report_get(model, &report));
    return report.steps;
}

static void expect_refused_here(void) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    EXPECT_STATUS(tn_sharded_forward_begin(model, 0), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_sharded_forward_end(model, UNITS - 1), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_sharded_backward_begin(model, 0), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_sharded_backward_end(model, UNITS - 1), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_sharded_abandon(model), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_sharded_update(model, &update), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("tn_sharded_update: model sharded: a stream of it captures a graph");
}

/* What a capture would have of it no launch does for the host's books: the step goes on outside of
 * it as if nothing had been called there. */
static void calls_on_a_stream_that_captures_are_refused(void **state) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    (void)state;
    step(0);
    for (int i = 0; i < UNITS; i++)
        forward(i);
    for (int i = UNITS; i-- > 0;)
        backward(i);
    EXPECT_OK(tn_device_synchronize(device));
    update_count = 0;
    test_sim_get()->watch(note_layer, NULL);
    test_capture_begin(device, stream, TEST_CAPTURE_GLOBAL);
    expect_refused_here();
    assert_int_equal(test_is_capturing(device, stream), 1);
    test_graph graph = test_capture_end(device, stream);
    test_graph_launch(device, &graph, stream);
    EXPECT_OK(tn_device_synchronize(device));
    test_graph_destroy(device, &graph);
    assert_int_equal(update_count, 0);
    assert_int_equal(steps_made(), 1);
    EXPECT_OK(tn_sharded_update(model, &update));
    EXPECT_OK(tn_device_synchronize(device));
    assert_int_equal(update_count, UNITS);
    assert_int_equal(steps_made(), 2);
    step(0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_layer_waits_for_no_reduction_of_the_one_before, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(the_update_waits_for_no_reduction_but_its_own, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_layer_waits_for_no_update_ahead, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_layer_waits_for_no_update_ahead, set_up_made, tear_down),
        cmocka_unit_test_setup_teardown(a_layer_waits_for_no_reduction_of_the_one_before,
                                        set_up_made, tear_down),
        cmocka_unit_test_setup_teardown(the_update_waits_for_no_reduction_but_its_own, set_up_made,
                                        tear_down),
        cmocka_unit_test_setup_teardown(calls_on_a_stream_that_captures_are_refused, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
