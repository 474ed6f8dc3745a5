/* A backward pass over frozen layers, captured with its columnwise planes in a scratch slot: the
 * slot is as large as the largest weight, not the sum; launches and eager passes take turns without
 * a race, and own not a byte more.
 */
#include "test_graphs.h"
#include "test_ops.h"

#include "tenure_layers.h"
#include "tenure_lifetime.h"

enum { LAYERS = 3, TOKENS = 130 };

static const int64_t widths[LAYERS + 1] = {260, 300, 200, 150}; /* of x, and of each layer's y */

typedef struct captured_stack {
    test_ops ops;
    tn_stream side;
    tn_pool *graph_pool;
    tn_scope weights_scope, graph_op, eager_op;
    tn_tensor weight[LAYERS];
    tn_tensor gradient[LAYERS + 1];
    int goes_ahead;
} captured_stack;

static tn_scope root_scope(tn_pool *pool, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.pool = pool;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static captured_stack open_stack(int buffers) {
    captured_stack s = {.ops = test_ops_open(test_open_sim(0, 0)), .goes_ahead = buffers > 1};
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    EXPECT_OK(tn_stream_create(s.ops.device, &s.side));
    EXPECT_OK(tn_graph_pool_create(s.ops.device, NULL, &s.graph_pool));
    s.graph_op = root_scope(s.graph_pool, "op in a graph");
    s.eager_op = test_ops_scope(&s.ops, TN_SCOPE_OP, "op");
    s.weights_scope = test_ops_scope(&s.ops, TN_SCOPE_MODEL, "weights");
    config.buffers = buffers;
    EXPECT_OK(tn_scope_scratch_config_set(s.weights_scope, &config));
    for (int i = 0; i < LAYERS; i++) {
        s.weight[i] = test_weight(s.weights_scope, widths[i + 1], widths[i], 1, TN_POLICY_SCRATCH);
        test_declare_valid(&s.ops, s.weight[i], TN_PLANE_ROW);
    }
    for (int i = 0; i <= LAYERS; i++) {
        s.gradient[i] = test_plain(s.ops.scope, TN_BF16, TOKENS, widths[i]);
        test_declare_valid(&s.ops, s.gradient[i], TN_PLANE_DATA);
    }
    EXPECT_OK(tn_scope_scratch_reserve(s.weights_scope, s.ops.stream));
    EXPECT_OK(tn_device_synchronize(s.ops.device));
    return s;
}

static void close_stack(captured_stack *s) {
    EXPECT_OK(tn_device_synchronize(s->ops.device));
    EXPECT_OK(tn_scope_close(s->graph_op));
    EXPECT_OK(tn_scope_close(s->weights_scope));
    EXPECT_OK(tn_pool_destroy(s->graph_pool));
    test_ops_close(&s->ops);
    EXPECT_OK(tn_stream_destroy(s->ops.device, s->side));
    test_close_sim(s->ops.device); /* fails if there were races */
}

static void backward(const captured_stack *s, tn_scope op) {
    for (int i = LAYERS - 1; i >= 0; i--) {
        tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
        args.dy = s->gradient[i + 1];
        args.w.weight = s->weight[i];
        args.dx = s->gradient[i];
        args.common.scope = op;
        args.common.side = s->side;
        if (s->goes_ahead && i > 0) args.common.next_weight = s->weight[i - 1];
        EXPECT_OK(tn_linear_backward(&args, NULL, NULL, s->ops.stream));
    }
}

static size_t weights_bytes(const captured_stack *s) {
    return test_ledger(s->weights_scope).total_bytes;
}

/* 300 x 260: 78000 bytes of data, to a multiple of 256, and 3 x 4 scales. */
static const size_t largest_bytes = 78080 + 3 * 4 * 4;

static size_t row_bytes(void) {
    size_t bytes = 0;
    for (int i = 0; i < LAYERS; i++) {
        size_t tiles = (size_t)(widths[i + 1] + 127) / 128;
        bytes += (size_t)(widths[i] * widths[i + 1]) + tiles * 4 * sizeof(float);
    }
    return bytes;
}

static void captured_with(int buffers) {
    captured_stack s = open_stack(buffers);
    tn_graph_memory memory;
    backward(&s, s.eager_op);
    assert_int_equal(weights_bytes(&s), row_bytes() + (size_t)buffers * largest_bytes);
    EXPECT_OK(tn_device_synchronize(s.ops.device));
    test_capture_begin(s.ops.device, s.ops.stream, TEST_CAPTURE_GLOBAL);
    EXPECT_OK(tn_graph_capture_begin(s.graph_pool, s.ops.stream));
    backward(&s, s.graph_op);
    assert_true(test_is_capturing(s.ops.device, s.ops.stream));
    EXPECT_OK(tn_graph_capture_end(s.graph_pool, &memory));
    test_graph graph = test_capture_end(s.ops.device, s.ops.stream);
    for (int step = 0; step < 3; step++) {
        test_graph_launch(s.ops.device, &graph, s.ops.stream);
        backward(&s, s.eager_op);
        assert_int_equal(weights_bytes(&s), row_bytes() + (size_t)buffers * largest_bytes);
        EXPECT_OK(tn_device_synchronize(s.ops.device)); /* a launch is ordered by who launches */
    }
    assert_int_equal(test_ledger(s.graph_op).total_bytes, 0);
    test_graph_destroy(s.ops.device, &graph);
    EXPECT_OK(tn_graph_memory_release(s.graph_pool, memory, s.ops.stream));
    close_stack(&s);
}

static void a_captured_backward_replays_in_a_slot_of_one_buffer(void **state) {
    (void)state;
    captured_with(1);
}

static void a_captured_backward_derives_ahead_in_a_slot_of_two(void **state) {
    (void)state;
    captured_with(2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_captured_backward_replays_in_a_slot_of_one_buffer),
        cmocka_unit_test(a_captured_backward_derives_ahead_in_a_slot_of_two),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
