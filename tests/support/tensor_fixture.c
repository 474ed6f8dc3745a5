/* See tensor_fixture.h. */
#include "tensor_fixture.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "driver.h"

/* ---- derive -------------------------------------------------------------------------------- */

static atomic_int derive_calls;
static atomic_int derive_fault;

typedef struct transposition {
    tn_plane_view from, to;
} transposition;

static void transpose(void *argument) {
    transposition *work = argument;
    const tn_plane_layout *from = &work->from.layout, *to = &work->to.layout;
    const unsigned char *source = work->from.data;
    unsigned char *target = work->to.data;
    for (int64_t row = 0; row < to->rows; row++) {
        for (int64_t col = 0; col < to->cols; col++) {
            target[row * to->cols + col] = source[col * from->cols + row];
        }
    }
    for (int64_t row = 0; row < to->scale_rows; row++) {
        for (int64_t col = 0; col < to->scale_stride; col++) {
            ((float *)work->to.scale)[row * to->scale_stride + col] =
                col < to->scale_cols
                    ? ((const float *)work->from.scale)[col * from->scale_stride + row]
                    : 0.0f;
        }
    }
    free(work);
}

static tn_status declare(tn_device *device, const tn_plane_view *from, const tn_plane_view *to,
                         tn_stream stream) {
    tn__range ranges[4] = {{from->data, from->layout.data_bytes, 0},
                           {from->scale, from->layout.scale_bytes, 0},
                           {to->data, to->layout.data_bytes, 1},
                           {to->scale, to->layout.scale_bytes, 1}};
    return tn__device_driver(device)->ghost_launch(tn__device_state(device), "transpose", ranges, 4,
                                                   1.0, stream);
}

tn_status fixture_derive(tn_device *device, const tn_plane_view *from, const tn_plane_view *to,
                         tn_stream stream) {
    const tn__driver *driver = tn__device_driver(device);
    atomic_fetch_add(&derive_calls, 1);
    if (atomic_load(&derive_fault) > 0 && atomic_fetch_sub(&derive_fault, 1) == 1) {
        return TN_FAIL(TN_DRIVER_ERROR, "derive: told to fail");
    }
    if (driver->ghost_launch) return declare(device, from, to, stream);
    transposition *work = malloc(sizeof *work);
    *work = (transposition){*from, *to};
    tn_status status = driver->host_task(tn__device_state(device), transpose, work, stream);
    if (status != TN_OK) free(work);
    return status;
}

int fixture_derive_calls(void) { return atomic_load(&derive_calls); }

void fixture_derive_fault(int nth) { atomic_store(&derive_fault, nth); }

/* ---- the fixture --------------------------------------------------------------------------- */

static void open_rest(tensor_fixture *fixture) {
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    pool_config.name = "fixture";
    EXPECT_OK(tn_pool_create(fixture->device, &pool_config, &fixture->pool));
    EXPECT_OK(tn_stream_create(fixture->device, &fixture->stream));
    EXPECT_OK(tn_stream_create(fixture->device, &fixture->other));
    scope_config.pool = fixture->pool;
    scope_config.kind = TN_SCOPE_MODEL;
    scope_config.name = "model";
    EXPECT_OK(tn_scope_create(&scope_config, &fixture->scope));
    EXPECT_OK(tn_format_set_derive(TN_FORMAT_FP8_BLOCK_2D, fixture_derive));
    fixture_derive_fault(0);
}

void tensor_fixture_open(tensor_fixture *fixture) {
    fixture->device = test_open_host();
    open_rest(fixture);
}

void tensor_fixture_open_sim(tensor_fixture *fixture) {
    fixture->device = test_open_sim((size_t)1 << 30, 0);
    open_rest(fixture);
}

void tensor_fixture_close(tensor_fixture *fixture) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    EXPECT_OK(tn_ledger_check(fixture->pool));
    tn_status closed = tn_scope_close(fixture->scope);
    if (closed != TN_STALE_HANDLE) EXPECT_OK(closed);
    EXPECT_OK(tn_ledger_check(fixture->pool));
    assert_int_equal(fixture_owned_bytes(fixture), 0);
    EXPECT_OK(tn_stream_destroy(fixture->device, fixture->stream));
    EXPECT_OK(tn_stream_destroy(fixture->device, fixture->other));
    EXPECT_OK(tn_pool_destroy(fixture->pool));
    EXPECT_OK(tn_device_info_get(fixture->device, &info));
    if (info.simulated)
        test_close_sim(fixture->device);
    else
        EXPECT_OK(tn_device_destroy(fixture->device));
}

/* The tests of a program have theirs one after the other. */
static tensor_fixture shared;

int tensor_fixture_set_up(void **state) {
    tensor_fixture_open(&shared);
    *state = &shared;
    return 0;
}

int tensor_fixture_set_up_sim(void **state) {
    tensor_fixture_open_sim(&shared);
    *state = &shared;
    return 0;
}

int tensor_fixture_tear_down(void **state) {
    tensor_fixture_close(*state);
    return 0;
}

/* ---- shorthands ---------------------------------------------------------------------------- */

tn_tensor fixture_tensor(const tensor_fixture *fixture, tn_format format, int64_t rows,
                         int64_t cols, const char *name) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format;
    config.dtype = format == TN_FORMAT_PLAIN ? TN_FP32 : TN_E4M3;
    config.rank = 2;
    config.shape[0] = rows;
    config.shape[1] = cols;
    config.name = name;
    EXPECT_OK(tn_tensor_create(fixture->scope, &config, &tensor));
    return tensor;
}

void fixture_write(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_WRITE, stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
}

void fixture_write_both(const tensor_fixture *fixture, tn_tensor tensor) {
    fixture_write(tensor, TN_PLANE_ROW, fixture->stream);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, fixture->stream));
}

tn_lease fixture_lease(tn_tensor tensor, tn_plane plane, tn_access access, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease = {0};
    EXPECT_OK(tn_lease_begin(tensor, plane, access, stream, &lease, &view));
    return lease;
}

void fixture_touch(const tensor_fixture *fixture, const tn_plane_view *view, int is_write,
                   tn_stream stream) {
    tn__range ranges[2] = {{view->data, view->layout.data_bytes, is_write},
                           {view->scale, view->layout.scale_bytes, is_write}};
    EXPECT_OK(tn__device_driver(fixture->device)
                  ->ghost_launch(tn__device_state(fixture->device), is_write ? "write" : "read",
                                 ranges, 2, 50.0, stream));
}

tn_plane_state fixture_state(tn_tensor tensor, tn_plane plane) {
    tn_plane_state state = TN_PLANE_ABSENT;
    EXPECT_OK(tn_plane_state_get(tensor, plane, &state));
    return state;
}

void fixture_expect_states(tn_tensor tensor, tn_plane_state row, tn_plane_state col) {
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), row);
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), col);
}

size_t fixture_owned_bytes(const tensor_fixture *fixture) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_stats_get(fixture->pool, &stats));
    return stats.owned_bytes;
}

tn_ledger fixture_ledger(tn_scope scope) {
    tn_ledger ledger = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(scope, &ledger));
    return ledger;
}

uint64_t fixture_waits(const tensor_fixture *fixture) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(fixture->device, &stats));
    return stats.calls[TN_CALL_STREAM_WAIT];
}
