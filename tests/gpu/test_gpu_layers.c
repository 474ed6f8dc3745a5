/* The layers on a GPU: the bytes of the closed form after each call; outputs near the host's; and
 * training steps, forward, backward and optimizer, in one graph: each replay's forward has the
 * weights that the replay before has updated, to the bit of an eager twin. */
#include "gpu_graphs_support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tenure_lifetime.h"
#include "test_layers.h"

enum { REPLAYS = 6 };

static gpu_side gpu, host;

static test_ops open_on(const gpu_side *side) {
    test_ops ops = {side->device, side->stream, side->pool, side->scope};
    ops.scope = test_ops_scope(&ops, TN_SCOPE_MODEL, "layer");
    return ops;
}

static const test_layer_config configs[] = {
    {.kind = TEST_LINEAR, .format = {TN_FORMAT_FP8_BLOCK_2D}},
    {.kind = TEST_LINEAR, .format = {TN_FORMAT_PLAIN}},
    {.kind = TEST_LINEAR, .format = {TN_FORMAT_FP8_TENSOR}},
    {.kind = TEST_NORM_LINEAR, .format = {TN_FORMAT_FP8_BLOCK_2D}, .norm = TN_NORM_LAYER},
    {.kind = TEST_NORM_LINEAR, .format = {TN_FORMAT_PLAIN}, .has_residual = 1},
    {.kind = TEST_NORM_MLP, .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D}},
    {.kind = TEST_NORM_MLP,
     .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_PLAIN},
     .activation = TN_ACTIVATION_SILU,
     .gated = 1,
     .delay = 1},
    {.kind = TEST_NORM_MLP,
     .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
     .gated = 1,
     .recompute = 1},
    {.kind = TEST_NORM_MLP,
     .format = {TN_FORMAT_FP8_TENSOR, TN_FORMAT_FP8_TENSOR},
     .has_scales = 1},
};
enum { CONFIGS = sizeof configs / sizeof *configs };

static test_layer open_layer(const gpu_side *side, int index) {
    const test_ops ops = open_on(side);
    test_layer_config config = configs[index];
    config.dtype = TN_BF16;
    config.policy = TN_POLICY_SCRATCH;
    test_layer l = test_layer_open(&ops, &config);
    test_layer_open_optimizer(&l);
    EXPECT_OK(tn_scope_scratch_reserve(l.model, ops.stream));
    return l;
}

static void close_layer(test_layer *l) { EXPECT_OK(tn_scope_close(l->ops.scope)); }

static void run(test_layer *l) {
    EXPECT_OK(test_layer_forward(l, l->ops.stream));
    EXPECT_OK(test_layer_backward(l, l->ops.stream));
    EXPECT_OK(test_layer_weight_gradients(l, l->ops.stream));
}

/* ---- results --------------------------------------------------------------------------------- */

enum { OUTPUTS = 9 };
static const char *const names[OUTPUTS] = {"y",         "dx",      "dgamma",  "dbeta", "dweight 1",
                                           "dweight 2", "dbias 1", "dbias 2", "sum"};

static tn_tensor output_of(const test_layer *l, int i) {
    const tn_tensor all[OUTPUTS] = {l->y,        l->dx,         l->dgamma,
                                    l->dbeta,    l->dweight[0], l->dweight[1],
                                    l->dbias[0], l->dbias[1],   l->sum};
    return all[i];
}

/* ||x - y|| / ||y||. */
static double distance(gpu_side *side, tn_tensor tensor, tn_tensor other) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    double off = 0.0, size = 0.0;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    gpu_copy a = gpu_download(side, tensor, TN_PLANE_DATA);
    gpu_copy b = gpu_download(&host, other, TN_PLANE_DATA);
    for (size_t i = 0; i < (size_t)(info.rows * info.cols); i++) {
        const double x = gpu_value(info.dtype, a.data, i), y = gpu_value(info.dtype, b.data, i);
        off += (x - y) * (x - y), size += y * y;
    }
    gpu_copy_end(&a), gpu_copy_end(&b);
    return size > 0.0 ? sqrt(off / size) : INFINITY;
}

static void outputs_are_near_the_hosts(void **state) {
    (void)state;
    for (int c = 0; c < CONFIGS; c++) {
        test_layer on_gpu = open_layer(&gpu, c), on_host = open_layer(&host, c);
        double worst = 0.0;
        run(&on_gpu), run(&on_host);
        for (int i = 0; i < OUTPUTS; i++) {
            tn_tensor tensor = output_of(&on_gpu, i);
            if (tensor.value == 0) continue;
            const double off = distance(&gpu, tensor, output_of(&on_host, i));
            gpu_count(names[i], off < 2e-2);
            if (!(off <= worst)) worst = off;
        }
        printf("layer %d: at most %.2e from the host's\n", c, worst);
        close_layer(&on_gpu), close_layer(&on_host);
    }
    gpu_count_report("layers, against the host");
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static void bytes_are_those_of_the_closed_form(void **state) {
    (void)state;
    test_ops ops = open_on(&gpu);
    const int count = test_layer_bytes(&ops, 0, 0);
    printf("%d ways: exactly the saved set is alive after each call\n", count);
    assert_int_equal(count, 960);
    EXPECT_OK(tn_scope_close(ops.scope));
}

/* ---- a captured step ------------------------------------------------------------------------- */

static void count_equal(tn_tensor a, tn_tensor b, tn_plane plane, const char *what) {
    gpu_copy actual = gpu_download(&gpu, a, plane), expected = gpu_download(&gpu, b, plane);
    gpu_count(what, gpu_copies_equal(&actual, &expected, what));
    gpu_copy_end(&actual), gpu_copy_end(&expected);
}

static void compare(const test_layer *l, const test_layer *twin) {
    for (int i = 0; i < OUTPUTS; i++) {
        if (output_of(l, i).value == 0) continue;
        count_equal(output_of(l, i), output_of(twin, i), TN_PLANE_DATA, names[i]);
    }
    for (int i = 0; i < test_layer_products(l); i++) {
        const int is_plain = l->config.format[i] == TN_FORMAT_PLAIN;
        count_equal(l->weight[i], twin->weight[i], is_plain ? TN_PLANE_DATA : TN_PLANE_ROW,
                    "weight");
        count_equal(l->master[i], twin->master[i], TN_PLANE_DATA, "master");
    }
}

/* Whether y is what it was before: what an update must change. */
static int is_same_y(const gpu_copy *before, const test_layer *l) {
    gpu_copy now = gpu_download(&gpu, l->y, TN_PLANE_DATA);
    const int is_same = memcmp(before->data, now.data, now.layout.data_bytes) == 0;
    gpu_copy_end(&now);
    return is_same;
}

static void whole_step(test_layer *l) {
    run(l);
    test_layer_update(l);
}

/* One step eager, so that all is there; then a step captured, and replayed beside a twin. */
static void check_steps(int index, tn_pool *graph_pool) {
    test_layer l = open_layer(&gpu, index), twin = open_layer(&gpu, index);
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    whole_step(&l), whole_step(&twin);
    config.pool = graph_pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    EXPECT_OK(tn_device_synchronize(gpu.device));
    l.op = l.saved_scope = scope;
    gpu_graph_begin(&gpu, graph_pool);
    whole_step(&l);
    gpu_graph graph = gpu_graph_end(&gpu, graph_pool);
    for (int i = 0; i < REPLAYS; i++) {
        gpu_copy before = gpu_download(&gpu, l.y, TN_PLANE_DATA);
        gpu_graph_launch(&gpu, &graph);
        whole_step(&twin);
        compare(&l, &twin);
        gpu_count("y differs from the step before", !is_same_y(&before, &l));
        gpu_copy_end(&before);
    }
    gpu_graph_drop(&gpu, graph_pool, &graph);
    EXPECT_OK(tn_scope_close(scope));
    close_layer(&l), close_layer(&twin);
}

static void a_captured_step_goes_on_with_updated_weights(void **state) {
    tn_pool *graph_pool;
    (void)state;
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &graph_pool));
    for (int c = 0; c < CONFIGS; c++)
        if (configs[c].format[0] != TN_FORMAT_FP8_TENSOR) check_steps(c, graph_pool);
    EXPECT_OK(tn_pool_destroy(graph_pool));
    gpu_count_report("layers, replays of a training step");
}

/* Only forward is in the graph; the weights change outside of it. */
static void check_forward(int index, tn_pool *graph_pool) {
    test_layer l = open_layer(&gpu, index), twin = open_layer(&gpu, index);
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    run(&l), run(&twin);
    config.pool = graph_pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    EXPECT_OK(tn_device_synchronize(gpu.device));
    l.op = l.saved_scope = scope;
    gpu_graph_begin(&gpu, graph_pool);
    EXPECT_OK(test_layer_forward(&l, gpu.stream));
    gpu_graph graph = gpu_graph_end(&gpu, graph_pool);
    for (int i = 0; i < REPLAYS; i++) {
        test_layer_update(&l), test_layer_update(&twin);
        gpu_graph_launch(&gpu, &graph);
        EXPECT_OK(test_layer_forward(&twin, gpu.stream));
        count_equal(l.y, twin.y, TN_PLANE_DATA, "y");
        EXPECT_OK(tn_scope_close(twin.saved_scope));
        twin.saved_scope = test_ops_scope(&twin.ops, TN_SCOPE_SAVED, "saved");
    }
    gpu_graph_drop(&gpu, graph_pool, &graph);
    EXPECT_OK(tn_scope_close(scope));
    close_layer(&l), close_layer(&twin);
}

static void a_captured_forward_sees_an_update_after_it(void **state) {
    tn_pool *graph_pool;
    (void)state;
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &graph_pool));
    for (int c = 0; c < CONFIGS; c++)
        if (configs[c].format[0] != TN_FORMAT_FP8_TENSOR) check_forward(c, graph_pool);
    EXPECT_OK(tn_pool_destroy(graph_pool));
    gpu_count_report("layers, a captured forward after updates");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_are_near_the_hosts),
        cmocka_unit_test(bytes_are_those_of_the_closed_form),
        cmocka_unit_test(a_captured_step_goes_on_with_updated_weights),
        cmocka_unit_test(a_captured_forward_sees_an_update_after_it),
    };
    gpu_open(&gpu);
    gpu_open_host(&host, (size_t)1 << 30);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_graph_end_what_is_left(&gpu);
    if (failures == 0) {
        gpu_close(&host);
        gpu_close(&gpu);
    }
    return failures;
}
