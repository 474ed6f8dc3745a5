/* Every allocation of host memory in a sharded model's life fails once: the call says so,
 * and the model ends, wherever its step was, with nothing of it left. */
#include "model_support.h"

#include <stdio.h>

#include "host_alloc.h"

static rank_fixture all;

enum { SIDE = 64, NTH_MAX = 10000 };

static tn_scope open_scope(void) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = all.pool;
    config.name = "faults";
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor open_initial(tn_scope scope) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.rank = 2, config.shape[0] = SIDE, config.shape[1] = SIDE;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_DATA, 0, all.stream));
    return tensor;
}

static tn_status pass(tn_sharded_model *model) {
    const tn_tensor gradient = tn_sharded_gradient(model, 0, 0);
    tn_status status = tn_sharded_forward_begin(model, 0);
    if (status == TN_OK) status = tn_sharded_forward_end(model, 0);
    if (status == TN_OK) status = tn_sharded_backward_begin(model, 0);
    if (status == TN_OK) status = tn_plane_fill(gradient, TN_PLANE_DATA, 0, all.stream);
    return status == TN_OK ? tn_sharded_backward_end(model, 0) : status;
}

static tn_status build_and_step(tn_sharded_model *model, tn_tensor initial) {
    tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    const tn_sharded_tensor trained = {.name = "trained",
                                       .format = TN_FORMAT_FP8_BLOCK_2D,
                                       .dtype = TN_E4M3,
                                       .rows = SIDE,
                                       .cols = SIDE,
                                       .initial = initial};
    tn_sharded_tensor tensors[2] = {trained, trained};
    int number;
    tensors[1].name = "frozen", tensors[1].frozen = 1, tensors[1].high_precision = 1;
    unit.tensors = tensors, unit.tensor_count = 2;
    tn_status status = tn_sharded_unit_add(model, &unit, &number);
    if (status == TN_OK) status = tn_sharded_seal(model);
    for (int micro_batch = 0; micro_batch < 2 && status == TN_OK; micro_batch++)
        status = pass(model);
    update.max_norm = 1.0f;
    return status == TN_OK ? tn_sharded_update(model, &update) : status;
}

/* A model's life, in which something may fail but its end. */
static tn_status live(tn_scope scope, tn_tensor initial, tn_gradient_wire wire) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    tn_sharded_model *model = NULL;
    config.scope = scope, config.comm = all.comm, config.stream = all.stream;
    config.micro_batches = 2;
    config.gradient_wire = wire;
    tn_status status = tn_sharded_create(&config, &model);
    if (status == TN_OK) status = build_and_step(model, initial);
    tn__host_alloc_fault(0, 0);
    EXPECT_OK(tn_sharded_destroy(model));
    ranks_wait(&all);
    return status;
}

static void fail_each(tn_gradient_wire wire) {
    tn_scope scope = open_scope();
    const tn_tensor initial = open_initial(scope);
    tn_ledger before = TN_LEDGER_INIT;
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    long failed = 0;
    EXPECT_OK(live(scope, initial, wire));
    EXPECT_OK(tn_scope_ledger(scope, &before));
    for (long nth = 1; nth < NTH_MAX && status != TN_OK; nth++) {
        tn__host_alloc_fault(nth, 0);
        status = live(scope, initial, wire);
        TN_EXPECT_NO_GROWTH(scope, &before);
        EXPECT_OK(tn_ledger_check(all.pool));
        failed += status != TN_OK;
    }
    EXPECT_OK(status);
    assert_true(failed > 50);
    printf("  %ld allocations failed, one by one\n", failed);
    EXPECT_OK(tn_scope_close(scope));
}

static void every_host_allocation_may_fail(void **state) {
    (void)state;
    fail_each(TN_GRADIENT_WIRE_PLAIN);
    fail_each(TN_GRADIENT_WIRE_FP8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_host_allocation_may_fail),
    };
    return RANKS_RUN(&all, tests);
}
