/* Scratch slots across streams: whoever derives into a buffer waits on the device for all that used
 * it, on every stream, and for nothing else; seen by the simulated driver, which reports races.
 */
#include "tensor_fixture.h"

#include "driver.h"

enum { ROWS = 256, COLS = 128, STREAMS = 3, LAYERS = 4, STEPS = 600 };

/* Work under a lease: a kernel that touches the whole plane. */
static void launch(const tensor_fixture *f, const tn_plane_view *view, int is_write,
                   tn_stream stream) {
    tn__range ranges[2] = {{view->data, view->layout.data_bytes, is_write},
                           {view->scale, view->layout.scale_bytes, is_write}};
    EXPECT_OK(tn__device_driver(f->device)->ghost_launch(tn__device_state(f->device), "gemm",
                                                         ranges, 2, 50.0, stream));
}

static tn_tensor weight(const tensor_fixture *f, const char *name) {
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, name);
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_SCRATCH));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view));
    launch(f, &view, 1, f->stream);
    EXPECT_OK(tn_lease_end(lease));
    return tensor;
}

static void read_plane(const tensor_fixture *f, tn_tensor tensor, tn_plane plane,
                       tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, stream, &lease, &view));
    launch(f, &view, 0, stream);
    EXPECT_OK(tn_lease_end(lease));
}

static void expect_no_race(uint64_t seed, int step) {
    if (!test_sim_get()->race_count()) return;
    fail_msg("seed %llu, step %d: %s", (unsigned long long)seed, step,
             test_sim_get()->race_text(0));
}

static uint64_t host_waits(const tensor_fixture *f) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(f->device, &stats));
    return stats.calls[TN_CALL_EVENT_SYNCHRONIZE];
}

/* Read on two streams, then the next layer's plane is derived on a third. */
static void a_derivation_waits_for_every_reader(void **state) {
    tensor_fixture f;
    tn_stream third;
    (void)state;
    tensor_fixture_open_sim(&f);
    EXPECT_OK(tn_stream_create(f.device, &third));
    tn_tensor first = weight(&f, "first"), second = weight(&f, "second");
    read_plane(&f, second, TN_PLANE_ROW, third); /* has waited for what wrote it */
    EXPECT_OK(tn_device_synchronize(f.device));
    read_plane(&f, first, TN_PLANE_COL, f.stream);
    read_plane(&f, first, TN_PLANE_COL, f.other);
    uint64_t waits = fixture_waits(&f), on_host = host_waits(&f);
    read_plane(&f, second, TN_PLANE_COL, third);
    assert_int_equal(fixture_waits(&f) - waits, 2); /* one for each reader */
    assert_int_equal(host_waits(&f), on_host);
    expect_no_race(0, 0);
    EXPECT_OK(tn_stream_destroy(f.device, third));
    tensor_fixture_close(&f);
}

/* On one stream nothing waits: no driver call but the kernels. */
static void one_stream_needs_no_wait(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    tn_tensor layers[2] = {weight(&f, "a"), weight(&f, "b")};
    read_plane(&f, layers[0], TN_PLANE_COL, f.stream);
    EXPECT_OK(tn_plane_release(layers[0], TN_PLANE_COL, f.stream));
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(f.device, &before));
    for (int i = 0; i < 10; i++) {
        read_plane(&f, layers[i % 2], TN_PLANE_COL, f.stream);
        EXPECT_OK(tn_plane_release(layers[i % 2], TN_PLANE_COL, f.stream));
    }
    EXPECT_OK(tn_device_driver_stats(f.device, &after));
    for (int call = 0; call < TN_CALL_COUNT; call++) {
        if (call == TN_CALL_LAUNCH || call == TN_CALL_STREAM) continue;
        assert_int_equal(after.calls[call], before.calls[call]);
    }
    assert_int_equal(after.calls[TN_CALL_LAUNCH] - before.calls[TN_CALL_LAUNCH], 20);
    /* whether the stream captures is asked for each derivation */
    assert_int_equal(after.calls[TN_CALL_STREAM] - before.calls[TN_CALL_STREAM], 10);
    expect_no_race(0, 0);
    tensor_fixture_close(&f);
}

/* With two buffers the next plane is derived on a side stream while this one is read: it does not
 * wait for the reader. */
static void two_buffers_overlap(void **state) {
    tensor_fixture f;
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    (void)state;
    for (int buffers = 1; buffers <= 2; buffers++) {
        tensor_fixture_open_sim(&f);
        config.buffers = buffers;
        EXPECT_OK(tn_scope_scratch_config_set(f.scope, &config));
        tn_tensor first = weight(&f, "first"), second = weight(&f, "second");
        EXPECT_OK(tn_scope_scratch_reserve(f.scope, f.stream));
        EXPECT_OK(tn_plane_require(first, TN_PLANE_COL, f.other));
        EXPECT_OK(tn_plane_require(second, TN_PLANE_COL, f.other));
        EXPECT_OK(tn_device_synchronize(f.device));
        read_plane(&f, first, TN_PLANE_COL, f.stream);
        EXPECT_OK(tn_plane_drop(second, TN_PLANE_COL, f.other));
        uint64_t waits = fixture_waits(&f);
        EXPECT_OK(tn_plane_require(second, TN_PLANE_COL, f.other));
        assert_int_equal(fixture_waits(&f) - waits, buffers == 1 ? 1 : 0);
        expect_no_race(0, buffers);
        tensor_fixture_close(&f);
    }
}

/* ---- random ---------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

static void random_step(const tensor_fixture *f, const tn_tensor *layers, tn_stream *streams,
                        uint64_t *seed) {
    tn_tensor tensor = layers[next_random(seed) % LAYERS];
    tn_stream *stream = &streams[next_random(seed) % STREAMS];
    tn_plane_view view;
    tn_lease lease;
    switch (next_random(seed) % 8) {
    case 0:
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, *stream, &lease, &view));
        launch(f, &view, 1, *stream);
        EXPECT_OK(tn_lease_end(lease));
        break;
    case 1: EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, *stream)); break;
    case 2:
        if (next_random(seed) % 4) break;
        EXPECT_OK(tn_stream_destroy(f->device, *stream));
        EXPECT_OK(tn_stream_create(f->device, stream));
        break;
    case 3:
        if (next_random(seed) % 8) break;
        EXPECT_OK(tn_scope_scratch_release(f->scope, *stream));
        break;
    case 4: EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, *stream)); break;
    default: read_plane(f, tensor, TN_PLANE_COL, *stream); break;
    }
}

static void run_seed(uint64_t seed, int buffers) {
    tensor_fixture f;
    tn_stream streams[STREAMS];
    tn_tensor layers[LAYERS];
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    uint64_t first_seed = seed;
    tensor_fixture_open_sim(&f);
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_create(f.device, &streams[i]));
    for (int i = 0; i < LAYERS; i++)
        layers[i] = weight(&f, "w");
    config.buffers = buffers;
    EXPECT_OK(tn_scope_scratch_config_set(f.scope, &config));
    for (int step = 0; step < STEPS; step++) {
        random_step(&f, layers, streams, &seed);
        expect_no_race(first_seed, step);
        EXPECT_OK(tn_ledger_check(f.pool));
    }
    EXPECT_OK(tn_scope_close(f.scope));
    for (int i = 0; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(f.device, streams[i]));
    expect_no_race(first_seed, STEPS);
    tensor_fixture_close(&f);
}

static void random_uses_of_a_slot_never_race(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++)
        run_seed(seed, (int)(seed % 3) + 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_derivation_waits_for_every_reader),
        cmocka_unit_test(one_stream_needs_no_wait),
        cmocka_unit_test(two_buffers_overlap),
        cmocka_unit_test(random_uses_of_a_slot_never_race),
    };
    return cmocka_run_group_tests_name("sim/scratch_streams", tests, NULL, NULL);
}
