/* Devices, scopes and tensors for tests of ops: see test_ops.h. */
#include "test_ops.h"

#include <stdlib.h>
#include <string.h>

#include "options.h"

test_ops test_ops_open(tn_device *device) {
    test_ops ops = {.device = device};
    tn_pool_config pool = TN_POOL_CONFIG_INIT;
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    EXPECT_OK(tn_stream_create(device, &ops.stream));
    EXPECT_OK(tn_pool_create(device, &pool, &ops.pool));
    scope.pool = ops.pool;
    scope.kind = TN_SCOPE_MODEL;
    scope.name = "test";
    EXPECT_OK(tn_scope_create(&scope, &ops.scope));
    return ops;
}

void test_ops_close(test_ops *ops) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    test_ops_wait(ops);
    EXPECT_OK(tn_ledger_check(ops->pool));
    EXPECT_OK(tn_scope_close(ops->scope));
    EXPECT_OK(tn_ledger_check(ops->pool));
    EXPECT_OK(tn_pool_check(ops->pool));
    EXPECT_OK(tn_pool_stats_get(ops->pool, &stats));
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(stats.owned_bytes, 0);
    EXPECT_OK(tn_pool_destroy(ops->pool));
    EXPECT_OK(tn_stream_destroy(ops->device, ops->stream));
}

test_ops test_ops_open_host(void) { return test_ops_open(test_open_host()); }

void test_ops_close_host(test_ops *ops) {
    test_ops_close(ops);
    EXPECT_OK(tn_device_destroy(ops->device));
}

void test_ops_wait(const test_ops *ops) {
    EXPECT_OK(tn_stream_synchronize(ops->device, ops->stream));
}

tn_scope test_ops_scope(const test_ops *ops, tn_scope_kind kind, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.parent = ops->scope;
    config.kind = kind;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

/* ---- tensors ------------------------------------------------------------------------------- */

static tn_tensor create(tn_scope scope, tn_tensor_config *config, int64_t rows, int64_t cols) {
    tn_tensor tensor;
    config->rank = 2;
    config->shape[0] = rows, config->shape[1] = cols;
    EXPECT_OK(tn_tensor_create(scope, config, &tensor));
    return tensor;
}

tn_tensor test_plain(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    return create(scope, &config, rows, cols);
}

tn_tensor test_fp8(tn_scope scope, tn_format format, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = format;
    config.dtype = dtype;
    return create(scope, &config, rows, cols);
}

tn_tensor test_weight(tn_scope scope, int64_t rows, int64_t cols, int frozen,
                      tn_plane_policy policy) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.frozen = frozen;
    config.policy = policy;
    config.name = "weight";
    return create(scope, &config, rows, cols);
}

static size_t data_bytes_of(tn_tensor tensor) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(tensor, TN_PLANE_DATA, &layout));
    return layout.data_bytes;
}

void test_write(const test_ops *ops, tn_tensor tensor, const void *data) {
    EXPECT_OK(
        tn_plane_write(tensor, TN_PLANE_DATA, data, data_bytes_of(tensor), NULL, 0, ops->stream));
    test_ops_wait(ops);
}

void test_read(const test_ops *ops, tn_tensor tensor, void *data) {
    EXPECT_OK(
        tn_plane_read(tensor, TN_PLANE_DATA, data, data_bytes_of(tensor), NULL, 0, ops->stream));
    test_ops_wait(ops);
}

void test_declare_valid(const test_ops *ops, tn_tensor tensor, tn_plane plane) {
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_WRITE, ops->stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
}

tn_plane_state test_state(tn_tensor tensor, tn_plane plane) {
    tn_plane_state state;
    EXPECT_OK(tn_plane_state_get(tensor, plane, &state));
    return state;
}

tn_ledger test_ledger(tn_scope scope) {
    tn_ledger ledger = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(scope, &ledger));
    return ledger;
}

void test_expect_same_ledger(const tn_ledger *before, const tn_ledger *after) {
    assert_int_equal(before->total_bytes, after->total_bytes);
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        assert_int_equal(before->data_bytes[plane], after->data_bytes[plane]);
        assert_int_equal(before->scale_bytes[plane], after->scale_bytes[plane]);
    }
    assert_int_equal(before->tensors, after->tensors);
    assert_int_equal(before->planes, after->planes);
    assert_int_equal(before->leases, after->leases);
}

void test_pin_engine(const char *engine) {
    if (engine) setenv("TENURE_GEMM_ENGINE", engine, 1);
    if (!engine) unsetenv("TENURE_GEMM_ENGINE");
    tn__options_reload();
}
