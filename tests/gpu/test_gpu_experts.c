/* The experts' layer on a GPU: the bytes of the closed form; outputs near the host's, those that
 * are sums of ours to the bit; and a captured step whose replays have the bits of an eager one,
 * also of tokens and weights that were written after the capture. */
#include "gpu_graphs_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test_experts.h"

enum { OUTPUTS = 2 + 2 * EXPERTS, REPLAYS = 20 };

static gpu_side gpu, host;

static test_ops open_on(const gpu_side *side) {
    test_ops ops = {side->device, side->stream, side->pool, side->scope};
    ops.scope = test_ops_scope(&ops, TN_SCOPE_MODEL, "mixture");
    return ops;
}

/* ---- a step ---------------------------------------------------------------------------------- */

typedef struct step {
    gpu_side *side;
    test_ops ops;
    test_experts t;
    tn_grouped_linear_forward_args forward;
    tn_grouped_linear_backward_args backward;
    tn_grouped_saved saved;
} step;

/* All of y and dx is written before, so that all of it can be compared. */
static step open_step(gpu_side *side, const test_experts_config *config) {
    step s = {.side = side, .ops = open_on(side)};
    s.t = test_experts_open(&s.ops, config);
    s.forward = test_experts_forward(&s.t, 1);
    s.backward = test_experts_backward(&s.t);
    test_experts_fill(&s.ops, s.t.y, 7), test_experts_fill(&s.ops, s.t.dx, 8);
    return s;
}

static void close_step(step *s) { EXPECT_OK(tn_scope_close(s->ops.scope)); }

/* The arrays in the arguments are of the step as it is here, not as it was returned. */
static void run(step *s) {
    s->forward.experts.weights = s->backward.experts.weights = s->t.weights;
    s->forward.biases = s->t.biases;
    s->backward.dweights = s->t.dweights, s->backward.dbiases = s->t.dbiases;
    EXPECT_OK(tn_grouped_linear_forward(&s->forward, &s->saved, s->ops.stream));
    EXPECT_OK(tn_grouped_linear_backward(&s->backward, &s->saved, NULL, s->ops.stream));
}

static tn_tensor output_of(const step *s, int i) {
    if (i < 2) return i ? s->t.dx : s->t.y;
    return i < 2 + EXPERTS ? s->t.dweights[i - 2] : s->t.dbiases[i - 2 - EXPERTS];
}

static const char *name_of(int i) {
    return i == 0 ? "y" : i == 1 ? "dx" : i < 2 + EXPERTS ? "dweights" : "dbiases";
}

typedef struct results {
    gpu_copy copies[OUTPUTS];
} results;

static results fetch(const step *s) {
    results of;
    for (int i = 0; i < OUTPUTS; i++)
        of.copies[i] = gpu_download(s->side, output_of(s, i), TN_PLANE_DATA);
    return of;
}

static void end_results(results *of) {
    for (int i = 0; i < OUTPUTS; i++)
        gpu_copy_end(&of->copies[i]);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* ||x - y|| / ||y||, 0 where both are 0. */
static double distance(const gpu_copy *x, const gpu_copy *y) {
    const float *a = (const float *)(const void *)x->data,
                *b = (const float *)(const void *)y->data;
    double off = 0.0, size = 0.0;
    for (size_t i = 0; i < y->layout.data_bytes / sizeof(float); i++) {
        off += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return off == 0.0 ? 0.0 : sqrt(off / size);
}

static const test_experts_config configs[] = {
    {TN_FORMAT_FP8_BLOCK_2D, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
    {TN_FORMAT_FP8_BLOCK_2D, TN_FP32, TN_SCALE_FP32, 0, TN_POLICY_SCRATCH, 0},
    {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
    {TN_FORMAT_FP8_TENSOR, TN_FP32, TN_SCALE_FP32, 0, TN_POLICY_SCRATCH, 0},
    {TN_FORMAT_FP8_TENSOR, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 1},
    {TN_FORMAT_PLAIN, TN_BF16, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0},
    {TN_FORMAT_PLAIN, TN_FP32, TN_SCALE_POW2, 0, TN_POLICY_KEEP, 0}};
enum { CONFIGS = sizeof configs / sizeof *configs };

static void outputs_are_near_the_hosts(void **state) {
    (void)state;
    for (int c = 0; c < CONFIGS; c++) {
        step on_gpu = open_step(&gpu, &configs[c]), on_host = open_step(&host, &configs[c]);
        run(&on_gpu), run(&on_host);
        results actual = fetch(&on_gpu), expected = fetch(&on_host);
        double worst = 0.0;
        for (int i = 0; i < OUTPUTS; i++) {
            double off = distance(&actual.copies[i], &expected.copies[i]);
            gpu_count(name_of(i), i < 2 + EXPERTS ? off < 1e-3 : off == 0.0);
            if (!(off <= worst)) worst = off;
        }
        printf("config %d: at most %.2e from the host's\n", c, worst);
        end_results(&actual), end_results(&expected);
        close_step(&on_gpu), close_step(&on_host);
    }
    gpu_count_report("experts, against the host");
}

/* On multiprocessors that a product does without, or on all. */
static void planes_made_ahead_change_no_bit(void **state) {
    tn_stream side;
    (void)state;
    EXPECT_OK(tn_stream_create(gpu.device, &side));
    for (int c = 0; c < CONFIGS; c++) {
        step usual = open_step(&gpu, &configs[c]), early = open_step(&gpu, &configs[c]);
        early.backward.experts.side = side;
        run(&usual), run(&early);
        results expected = fetch(&usual), actual = fetch(&early);
        for (int i = 0; i < OUTPUTS; i++)
            gpu_count(name_of(i),
                      gpu_copies_equal(&actual.copies[i], &expected.copies[i], name_of(i)));
        end_results(&expected), end_results(&actual);
        close_step(&usual), close_step(&early);
    }
    EXPECT_OK(tn_device_synchronize(gpu.device));
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
    gpu_count_report("experts, planes made ahead");
}

static void bytes_are_those_of_the_closed_form(void **state) {
    (void)state;
    test_ops ops = open_on(&gpu);
    test_experts_bytes(&ops);
    EXPECT_OK(tn_scope_close(ops.scope));
}

/* ---- a captured step ------------------------------------------------------------------------- */

/* Other tokens, and another weight for one expert. */
static void change_inputs(step *s) {
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    test_experts_fill(&s->ops, s->t.x, 77), test_experts_fill(&s->ops, s->t.dy, 78);
    if (s->t.config.format == TN_FORMAT_PLAIN) {
        test_experts_fill(&s->ops, s->t.weights[3], 79);
        return;
    }
    quantize.src = test_plain(s->ops.scope, TN_BF16, EXPERTS_N, EXPERTS_K);
    test_experts_fill(&s->ops, quantize.src, 79);
    quantize.dst = s->t.weights[3], quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    EXPECT_OK(tn_quantize(&quantize, s->ops.stream));
    EXPECT_OK(tn_tensor_destroy(quantize.src, s->ops.stream));
}

static void count_replay(const step *s, const gpu_graph *graph, const results *expected) {
    gpu_graph_launch(&gpu, graph);
    results actual = fetch(s);
    for (int i = 0; i < OUTPUTS; i++)
        gpu_count(name_of(i),
                  gpu_copies_equal(&actual.copies[i], &expected->copies[i], name_of(i)));
    end_results(&actual);
}

static results eager(const test_experts_config *config, int is_changed) {
    step s = open_step(&gpu, config);
    run(&s);
    if (is_changed) change_inputs(&s), run(&s);
    results of = fetch(&s);
    close_step(&s);
    return of;
}

static void check_replays(const test_experts_config *config, tn_pool *graph_pool) {
    results expected = eager(config, 0), changed = eager(config, 1);
    test_ops in_graph = {gpu.device, gpu.stream, graph_pool, {0}};
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    step s = open_step(&gpu, config);
    run(&s); /* COL of all weights is there then, and stays */
    scope.pool = graph_pool;
    EXPECT_OK(tn_scope_create(&scope, &in_graph.scope));
    s.forward.scope = s.backward.scope = in_graph.scope, s.forward.saved_scope = in_graph.scope;
    gpu_graph_begin(&gpu, graph_pool);
    run(&s);
    gpu_graph graph = gpu_graph_end(&gpu, graph_pool);
    for (int i = 0; i < REPLAYS; i++)
        count_replay(&s, &graph, &expected);
    change_inputs(&s);
    for (int i = 0; i < REPLAYS; i++)
        count_replay(&s, &graph, &changed);
    gpu_graph_drop(&gpu, graph_pool, &graph);
    EXPECT_OK(tn_scope_close(in_graph.scope));
    close_step(&s);
    end_results(&expected), end_results(&changed);
}

static void replays_of_a_captured_step_have_the_bits_of_an_eager_one(void **state) {
    tn_pool *graph_pool;
    (void)state;
    EXPECT_OK(tn_graph_pool_create(gpu.device, NULL, &graph_pool));
    for (int c = 0; c < CONFIGS; c++)
        if (configs[c].policy == TN_POLICY_KEEP) check_replays(&configs[c], graph_pool);
    EXPECT_OK(tn_pool_destroy(graph_pool));
    gpu_count_report("experts, replays");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_are_near_the_hosts),
        cmocka_unit_test(planes_made_ahead_change_no_bit),
        cmocka_unit_test(bytes_are_those_of_the_closed_form),
        cmocka_unit_test(replays_of_a_captured_step_have_the_bits_of_an_eager_one),
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
