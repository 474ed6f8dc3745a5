/* A training step with collectives: see test_comm_step.h. */
#include "test_comm_step.h"

#include "tenure_lifetime.h"
#include "test_pools.h"

enum { PRODUCTS = 2 };

static size_t gradient_bytes(const test_comm_step *step, int product) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(step->layer.dweight[product], TN_PLANE_DATA, &layout));
    return layout.data_bytes;
}

test_comm_step test_comm_step_open(const test_ops *ops, tn_comm *comm, tn_stream other,
                                   int has_no_values) {
    const test_layer_config config = {
        .kind = TEST_NORM_MLP,
        .format = {TN_FORMAT_FP8_BLOCK_2D, TN_FORMAT_FP8_BLOCK_2D},
        .activation = TN_ACTIVATION_SILU,
        .gated = 1,
        .dtype = TN_BF16,
        .policy = TN_POLICY_SCRATCH,
        .has_no_values = has_no_values,
    };
    test_comm_step step = {.comm = comm, .other = other};
    test_ops own = *ops;
    own.scope = test_ops_scope(ops, TN_SCOPE_MODEL, "step");
    step.layer = test_layer_open(&own, &config);
    test_layer_open_optimizer(&step.layer);
    EXPECT_OK(tn_scope_scratch_reserve(step.layer.model, ops->stream));
    for (int i = 0; i < PRODUCTS; i++)
        step.sums[i] = test_take(ops->pool, gradient_bytes(&step, i), ops->stream);
    return step;
}

void test_comm_step_close(test_comm_step *step) {
    EXPECT_OK(tn_scope_close(step->layer.ops.scope));
    for (int i = 0; i < PRODUCTS; i++)
        test_give(step->layer.ops.pool, step->sums[i], step->layer.ops.stream);
}

static void reduce(const test_comm_step *step, const void *src, void *dst, int product) {
    const size_t count = gradient_bytes(step, product) / sizeof(float);
    EXPECT_OK(tn_all_reduce(step->comm, src, dst, count, TN_FP32, TN_REDUCE_SUM, step->other));
}

/* Both in one group, and each of them back. */
static void reduce_gradients(test_comm_step *step) {
    const test_ops *ops = &step->layer.ops;
    tn_lease leases[PRODUCTS];
    tn_plane_view views[PRODUCTS];
    EXPECT_OK(tn_stream_wait(ops->device, step->other, ops->stream));
    for (int i = 0; i < PRODUCTS; i++)
        EXPECT_OK(tn_lease_begin(step->layer.dweight[i], TN_PLANE_DATA, TN_UPDATE, step->other,
                                 &leases[i], &views[i]));
    EXPECT_OK(tn_comm_group_begin(step->comm));
    for (int i = 0; i < PRODUCTS; i++)
        reduce(step, views[i].data, step->sums[i], i);
    EXPECT_OK(tn_comm_group_end(step->comm, step->other));
    for (int i = 0; i < PRODUCTS; i++) {
        reduce(step, step->sums[i], views[i].data, i);
        EXPECT_OK(tn_lease_end(leases[i]));
    }
    EXPECT_OK(tn_stream_wait(ops->device, ops->stream, step->other));
}

void test_comm_step_run(test_comm_step *step) {
    const tn_stream stream = step->layer.ops.stream;
    EXPECT_OK(test_layer_forward(&step->layer, stream));
    EXPECT_OK(test_layer_backward(&step->layer, stream));
    EXPECT_OK(test_layer_weight_gradients(&step->layer, stream));
    reduce_gradients(step);
    test_layer_update(&step->layer);
}
