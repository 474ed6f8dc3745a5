/* A stack of frozen Linear layers on a GPU: 16 layers of 4096 x 4096 over 4096
 * tokens under every policy of their columnwise planes. Steady and peak bytes are what the formula
 * says, to the byte; the gradients have the same bits as with planes that are kept, over several
 * steps; and so has a captured backward that is replayed, its planes in a scratch slot.
 *
 * With --small 4 layers of 512 x 512 over 384 tokens: for tools under which all is slow.
 *
 * W: elements and scales of one columnwise plane. B: a buffer of a slot, data rounded up to 256.
 */
#include "gpu_graphs_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tenure_layers.h"
#include "tenure_lifetime.h"

enum { LAYERS_MAX = 16, STEPS = 3, REPLAYS = 3 };

static struct {
    int layers;
    int64_t width, tokens;
} size = {LAYERS_MAX, 4096, 4096};

static gpu_side gpu;
static tn_stream side;
static float *noise; /* width x width normal values, and LAYERS_MAX + 8 rows more */

static size_t plane_bytes(void) {
    size_t tiles = (size_t)(size.width + 127) / 128;
    return (size_t)(size.width * size.width) + tiles * ((tiles + 3) / 4 * 4) * sizeof(float);
}

/* width is a multiple of 16, so that no data is rounded up. */
static size_t buffer_bytes(void) { return plane_bytes(); }

/* ---- the stack ------------------------------------------------------------------------------- */

/* Numbers of planes that depend on the number of layers. */
enum { ALL = -1, HALF = -2, HALF_AND_ONE = -3 };

typedef struct way {
    const char *name;
    tn_plane_policy policy;
    int buffers;    /* of the scratch slot; 0: none */
    int goes_ahead; /* the next layer's plane is derived during dgrad, the last one's in forward */
    int ahead_planes; /* planes alive after forward by that */
    int kept;         /* planes alive after backward */
    int dgrad_planes; /* planes alive in a dgrad, at the most */
} way;

static const way ways[] = {
    {"kept", TN_POLICY_KEEP, 0, 0, 0, ALL, ALL},
    {"until last use", TN_POLICY_UNTIL_LAST_USE, 0, 0, 0, 0, 1},
    {"until last use, next one ahead", TN_POLICY_UNTIL_LAST_USE, 0, 1, 1, 0, 2},
    {"scratch", TN_POLICY_SCRATCH, 1, 0, 0, 0, 0},
    {"scratch of two buffers, next one ahead", TN_POLICY_SCRATCH, 2, 1, 0, 0, 0},
    {"budget of half the planes", TN_POLICY_BUDGET, 0, 0, 0, HALF, HALF_AND_ONE},
};
enum { WAYS = sizeof ways / sizeof *ways };

static size_t planes(int count) {
    const int half = size.layers / 2;
    const int number = count == ALL            ? size.layers
                       : count == HALF         ? half
                       : count == HALF_AND_ONE ? half + 1
                                               : count;
    return (size_t)number * plane_bytes();
}

typedef struct stack {
    const way *how;
    tn_scope weights_scope, op;
    tn_tensor weight[LAYERS_MAX];
    tn_tensor activation[LAYERS_MAX + 1]; /* x, and each layer's y */
    tn_tensor gradient[LAYERS_MAX + 1];   /* of each of those */
} stack;

static tn_scope open_scope(tn_scope parent, tn_pool *pool, tn_scope_kind kind, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.parent = parent;
    config.pool = pool;
    config.kind = kind;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

/* fp32 [rows, width] of the noise from row `first` on: rows are at most width. */
static tn_tensor filled(int64_t rows, int first) {
    tn_tensor tensor = gpu_plain(&gpu, TN_FP32, rows, size.width);
    gpu_upload(&gpu, tensor, noise + first * size.width);
    return tensor;
}

/* Values of variance 1: each layer's output is `width` times larger in square, which the scales
 * follow; what counts here is that all bits are the same. */
static void load_weight(stack *of, int layer) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = config.shape[1] = size.width;
    config.policy = of->how->policy;
    config.frozen = 1;
    EXPECT_OK(tn_tensor_create(of->weights_scope, &config, &args.dst));
    args.src = filled(size.width, layer);
    EXPECT_OK(tn_quantize(&args, gpu.stream));
    gpu_destroy(&gpu, args.src);
    of->weight[layer] = args.dst;
}

static void open_stack(stack *of, const way *how) {
    const tn_scope none = {0};
    *of = (stack){.how = how};
    of->weights_scope = open_scope(none, gpu.pool, TN_SCOPE_MODEL, "weights");
    of->op = open_scope(gpu.scope, NULL, TN_SCOPE_OP, "op");
    if (how->buffers > 0) {
        tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
        config.buffers = how->buffers;
        EXPECT_OK(tn_scope_scratch_config_set(of->weights_scope, &config));
    }
    if (how->policy == TN_POLICY_BUDGET)
        EXPECT_OK(tn_scope_budget_set(of->weights_scope, planes(how->kept)));
    for (int i = 0; i < size.layers; i++)
        load_weight(of, i);
    if (how->buffers > 0) EXPECT_OK(tn_scope_scratch_reserve(of->weights_scope, gpu.stream));
    of->activation[0] = filled(size.tokens, LAYERS_MAX);
    of->gradient[size.layers] = filled(size.tokens, LAYERS_MAX + 1);
    for (int i = 0; i < size.layers; i++) {
        of->activation[i + 1] = gpu_plain(&gpu, TN_BF16, size.tokens, size.width);
        of->gradient[i] = gpu_plain(&gpu, TN_BF16, size.tokens, size.width);
    }
}

static void close_stack(stack *of) {
    for (int i = 0; i <= size.layers; i++) {
        gpu_destroy(&gpu, of->activation[i]);
        gpu_destroy(&gpu, of->gradient[i]);
    }
    EXPECT_OK(tn_scope_close(of->op));
    EXPECT_OK(tn_scope_close(of->weights_scope));
    EXPECT_OK(tn_device_synchronize(gpu.device));
}

static void forward(stack *of) {
    for (int i = 0; i < size.layers; i++) {
        tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
        args.x = of->activation[i];
        args.w.weight = of->weight[i];
        args.y = of->activation[i + 1];
        args.common.scope = of->op;
        args.common.side = side;
        if (of->how->goes_ahead && i == size.layers - 1) args.common.next_weight = of->weight[i];
        EXPECT_OK(tn_linear_forward(&args, NULL, gpu.stream));
    }
}

static void backward(stack *of) {
    for (int i = size.layers - 1; i >= 0; i--) {
        tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
        args.dy = of->gradient[i + 1];
        args.w.weight = of->weight[i];
        args.dx = of->gradient[i];
        args.common.scope = of->op;
        args.common.side = side;
        if (of->how->goes_ahead && i > 0) args.common.next_weight = of->weight[i - 1];
        EXPECT_OK(tn_linear_backward(&args, NULL, NULL, gpu.stream));
    }
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static size_t columnwise(const tn_ledger *of) {
    return of->data_bytes[TN_PLANE_COL] + of->scale_bytes[TN_PLANE_COL];
}

static tn_ledger weights_ledger(const stack *of) {
    tn_ledger ledger = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(of->weights_scope, &ledger));
    EXPECT_OK(tn_ledger_check(gpu.pool));
    return ledger;
}

typedef struct outcome {
    gpu_copy gradient[LAYERS_MAX]; /* of each layer's input, after the last step */
    size_t steady_bytes, peak_bytes;
} outcome;

/* Everything that the weights own: planes kept, and the slot. */
static void run_steps(stack *of, outcome *out) {
    const size_t rows = (size_t)size.layers * plane_bytes();
    const size_t slot = (size_t)of->how->buffers * buffer_bytes();
    EXPECT_OK(tn_scope_ledger_reset_peaks(of->weights_scope));
    for (int step = 0; step < STEPS; step++) {
        forward(of);
        tn_ledger after_forward = weights_ledger(of);
        const int before =
            step == 0 ? 0 : of->how->kept; /* and nothing is kept by who goes ahead */
        assert_int_equal(columnwise(&after_forward),
                         planes(of->how->ahead_planes ? of->how->ahead_planes : before));
        backward(of);
        tn_ledger after_backward = weights_ledger(of);
        assert_int_equal(columnwise(&after_backward), planes(of->how->kept));
        assert_int_equal(after_backward.total_bytes, rows + planes(of->how->kept) + slot);
        assert_int_equal(after_backward.leases, 0);
    }
    tn_ledger end = weights_ledger(of);
    assert_int_equal(end.peak_plane_bytes[TN_PLANE_COL], planes(of->how->dgrad_planes));
    out->steady_bytes = end.total_bytes;
    out->peak_bytes = end.peak_total_bytes;
    printf("%-40s steady %13zu bytes, peak %13zu, columnwise peak %12zu\n", of->how->name,
           end.total_bytes, end.peak_total_bytes, end.peak_plane_bytes[TN_PLANE_COL]);
}

/* ---- gradients ------------------------------------------------------------------------------- */

static int is_a_gradient(const gpu_copy *copy) {
    double sum = 0.0;
    for (int64_t i = 0; i < size.width; i++)
        sum += fabs(gpu_value(TN_BF16, copy->data, (size_t)i));
    return isfinite(sum) && sum > 0.0;
}

static void download(stack *of, outcome *out) {
    for (int i = 0; i < size.layers; i++)
        out->gradient[i] = gpu_download(&gpu, of->gradient[i], TN_PLANE_DATA);
}

static void compare(stack *of, const outcome *expected, const char *what) {
    for (int i = 0; i < size.layers; i++) {
        gpu_copy actual = gpu_download(&gpu, of->gradient[i], TN_PLANE_DATA);
        gpu_count(what, is_a_gradient(&actual) &&
                            gpu_copies_equal(&actual, &expected->gradient[i], "dx"));
        gpu_copy_end(&actual);
    }
}

static void outcome_end(outcome *of) {
    for (int i = 0; i < size.layers; i++)
        gpu_copy_end(&of->gradient[i]);
}

/* ---- the tests ------------------------------------------------------------------------------- */

static void test_every_policy_has_its_bytes_and_the_same_bits(void **state) {
    outcome kept = {.steady_bytes = 0};
    (void)state;
    for (int w = 0; w < WAYS; w++) {
        const way *how = &ways[w];
        outcome own = {.steady_bytes = 0};
        stack of;
        open_stack(&of, how);
        run_steps(&of, w == 0 ? &kept : &own);
        if (w == 0) {
            download(&of, &kept);
        } else {
            const size_t slot = (size_t)how->buffers * buffer_bytes();
            compare(&of, &kept, how->name);
            assert_int_equal(kept.steady_bytes - own.steady_bytes,
                             planes(ALL) - planes(how->kept) - slot);
            assert_int_equal(kept.peak_bytes - own.peak_bytes,
                             planes(ALL) - planes(how->dgrad_planes) - slot);
        }
        close_stack(&of);
    }
    outcome_end(&kept);
    gpu_count_report("frozen layers: gradients equal to those with planes kept");
}

/* The policy can change while the copies are there: the next backward lets go of them. */
static void test_a_policy_changed_later_takes_effect_in_the_next_backward(void **state) {
    stack of;
    (void)state;
    open_stack(&of, &ways[0]);
    forward(&of);
    backward(&of);
    tn_ledger before = weights_ledger(&of);
    assert_int_equal(columnwise(&before), planes(ALL));
    for (int i = 0; i < size.layers; i++)
        EXPECT_OK(tn_tensor_set_policy(of.weight[i], TN_POLICY_UNTIL_LAST_USE));
    forward(&of);
    backward(&of);
    tn_ledger after = weights_ledger(&of);
    assert_int_equal(columnwise(&after), 0);
    assert_int_equal(before.total_bytes - after.total_bytes, planes(ALL));
    close_stack(&of);
}

/* Backward once as it is, for the bits and so that nothing is made for the first time later; then
 * captured, with scratch of a graph pool, and replayed over gradients that are all wrong. */
static void replay_backward(const way *how) {
    const tn_scope none = {0};
    tn_pool *pool = NULL;
    outcome eager;
    stack of;
    open_stack(&of, how);
    forward(&of);
    backward(&of);
    download(&of, &eager);
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &pool));
    tn_scope eager_op = of.op;
    of.op = open_scope(none, pool, TN_SCOPE_OP, "op in a graph");
    size_t before = weights_ledger(&of).total_bytes;
    EXPECT_OK(tn_device_synchronize(gpu.device));
    gpu_graph_begin(&gpu, pool);
    backward(&of);
    gpu_graph graph = gpu_graph_end(&gpu, pool);
    assert_int_equal(weights_ledger(&of).total_bytes, before);
    for (int i = 0; i < REPLAYS; i++) {
        for (int layer = 0; layer < size.layers; layer++)
            gpu_poison(&gpu, of.gradient[layer], TN_PLANE_DATA);
        gpu_graph_launch(&gpu, &graph);
        compare(&of, &eager, how->name);
    }
    tn_scope graph_op = of.op;
    of.op = eager_op;
    backward(&of); /* as it is again, between launches and after them */
    compare(&of, &eager, how->name);
    gpu_graph_drop(&gpu, pool, &graph);
    EXPECT_OK(tn_scope_close(graph_op));
    outcome_end(&eager);
    close_stack(&of);
    EXPECT_OK(tn_pool_destroy(pool));
}

static void test_a_captured_backward_replays_with_planes_in_the_slot(void **state) {
    (void)state;
    replay_backward(&ways[3]);
    replay_backward(&ways[4]);
    gpu_count_report("frozen layers: gradients of a captured backward");
}

static int end_capture(void **state) {
    (void)state;
    gpu_graph_end_what_is_left(&gpu);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_policy_has_its_bytes_and_the_same_bits),
        cmocka_unit_test(test_a_policy_changed_later_takes_effect_in_the_next_backward),
        cmocka_unit_test_teardown(test_a_captured_backward_replays_with_planes_in_the_slot,
                                  end_capture),
    };
    uint64_t seed = 1;
    if (argc > 1 && strcmp(argv[1], "--small") == 0)
        size.layers = 4, size.width = 512, size.tokens = 384;
    gpu_open(&gpu);
    EXPECT_OK(tn_stream_create(gpu.device, &side));
    const size_t count = (size_t)size.width * (size_t)(size.width + LAYERS_MAX + 8);
    noise = malloc(count * sizeof *noise);
    if (!noise) return EXIT_FAILURE;
    for (size_t i = 0; i < count; i++)
        noise[i] = gpu_normal(&seed);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    free(noise);
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
    gpu_close(&gpu);
    return failures;
}
