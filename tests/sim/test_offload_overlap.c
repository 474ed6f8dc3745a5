/* Offloading on the simulated driver: copies overlap with compute, to the nanosecond of the virtual
 * clock; no order of streams is left to chance; a driver that fails leaves one copy whole.
 */
#include "tensor_fixture.h"
#include "test_graphs.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "tenure_lifetime.h"

enum { COLS = 1024, ROW_BYTES = COLS * 4, DRIVER_ERROR = 999 };

#define COMPUTE_US 1000.0

static void touch(const tensor_fixture *f, const void *data, size_t bytes, int is_write, double us,
                  tn_stream stream) {
    tn__range range = {data, bytes, is_write};
    EXPECT_OK(tn__device_driver(f->device)->ghost_launch(tn__device_state(f->device), "touch",
                                                         &range, bytes > 0, us, stream));
}

static void use(const tensor_fixture *f, tn_tensor tensor, tn_access access, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, access, stream, &lease, &view));
    touch(f, view.data, view.layout.data_bytes, access != TN_READ, 50.0, stream);
    EXPECT_OK(tn_lease_end(lease));
}

static void compute(const tensor_fixture *f) { touch(f, NULL, 0, 0, COMPUTE_US, f->stream); }

static long now_ns(void) { return (long)(test_sim_get()->now_us() * 1e3 + 0.5); }

/* ---- overlap ------------------------------------------------------------------------------- */

typedef enum itinerary {
    STAYS,      /* the plane stays on the device */
    OFFLOADED,  /* it is offloaded before the first compute, fetched when it is needed */
    PREFETCHED, /* it is fetched before the second compute */
    PLAN_COUNT
} itinerary;

/* Nanoseconds of: write the plane, compute, compute, read the plane; when all is done. */
static long run(tensor_fixture *f, tn_tensor tensor, itinerary plan) {
    EXPECT_OK(tn_device_synchronize(f->device));
    long start = now_ns();
    use(f, tensor, TN_UPDATE, f->stream);
    if (plan != STAYS) EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_DATA, f->stream));
    compute(f);
    if (plan == PREFETCHED) EXPECT_OK(tn_plane_prefetch(tensor, TN_PLANE_DATA, f->stream));
    compute(f);
    use(f, tensor, TN_READ, f->stream);
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    return now_ns() - start;
}

/* A copy over the link: 55 bytes a nanosecond. */
static long copy_ns(long bytes) { return (bytes + 27) / 55; }

static void copies_overlap_with_compute(void **state) {
    static const int64_t row_counts[] = {4096, 25600}; /* 305 us and 1907 us of copies */
    (void)state;
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        tensor_fixture f;
        long taken[PLAN_COUNT];
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, row_counts[i], COLS, "activation");
        use(&f, tensor, TN_WRITE, f.stream);
        for (int warm = 0; warm < 2; warm++) { /* the pools have their memory after the first */
            for (int plan = 0; plan < PLAN_COUNT; plan++)
                taken[plan] = run(&f, tensor, (itinerary)plan);
        }
        /* Both ways are hidden behind two computes; or the link, which takes longer than they do,
         * never rests from the write on. The host runs ahead, so that a lease is as good a prefetch
         * here as any. */
        long copies = 2 * copy_ns((long)row_counts[i] * ROW_BYTES);
        long computes = 2 * (long)COMPUTE_US * 1000;
        long expected = taken[STAYS] + (copies > computes ? copies - computes : 0);
        assert_int_equal(taken[PREFETCHED], expected);
        assert_int_equal(taken[OFFLOADED], expected);
        tensor_fixture_close(&f);
    }
}

/* ---- order --------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

/* Three tensors of a device that holds two and a half: memory changes hands all the time. */
static void run_seed(uint64_t seed) {
    tensor_fixture f;
    tn_tensor tensors[3];
    tn_stream streams[2];
    uint64_t first_seed = seed;
    tensor_fixture_open_sim(&f);
    streams[0] = f.stream;
    streams[1] = f.other;
    for (int i = 0; i < 3; i++) {
        tensors[i] = fixture_tensor(&f, TN_FORMAT_PLAIN, 100000, COLS, "activation");
        use(&f, tensors[i], TN_WRITE, f.stream);
        EXPECT_OK(tn_plane_offload(tensors[i], TN_PLANE_DATA, f.stream));
    }
    for (int step = 0; step < 300; step++) {
        tn_tensor tensor = tensors[next_random(&seed) % 3];
        tn_stream stream = streams[next_random(&seed) % 2];
        tn_access access = next_random(&seed) % 3 ? TN_READ : TN_UPDATE;
        for (int i = 0; i < 3; i++) { /* room for one more */
            if (tensors[i].value == tensor.value || next_random(&seed) % 4 == 0) continue;
            EXPECT_OK(tn_plane_offload(tensors[i], TN_PLANE_DATA, streams[next_random(&seed) % 2]));
        }
        if (fixture_owned_bytes(&f) > (size_t)400000 * COLS &&
            fixture_state(tensor, TN_PLANE_DATA) == TN_PLANE_OFFLOADED) {
            continue;
        }
        if (next_random(&seed) % 2) EXPECT_OK(tn_plane_prefetch(tensor, TN_PLANE_DATA, stream));
        use(&f, tensor, next_random(&seed) % 8 ? access : TN_WRITE, stream);
        if (test_sim_get()->race_count()) {
            fail_msg("seed %llu, step %d: %s", (unsigned long long)first_seed, step,
                     test_sim_get()->race_text(0));
        }
        EXPECT_OK(tn_ledger_check(f.pool));
    }
    tensor_fixture_close(&f);
}

static void no_copy_races(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++)
        run_seed(seed);
}

/* ---- failures ------------------------------------------------------------------------------ */

enum { BYTES = 3 << 20 };

/* On a device whose memory is real, so that contents can be compared. */
static void open_backed(tensor_fixture *f) {
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    f->device = test_open_sim((size_t)1 << 28, 1);
    EXPECT_OK(tn_pool_create(f->device, &pool_config, &f->pool));
    EXPECT_OK(tn_stream_create(f->device, &f->stream));
    EXPECT_OK(tn_stream_create(f->device, &f->other));
    scope_config.pool = f->pool;
    EXPECT_OK(tn_scope_create(&scope_config, &f->scope));
}

static tn_tensor known_tensor(const tensor_fixture *f, unsigned char *bytes) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = BYTES;
    EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    for (size_t i = 0; i < BYTES; i++)
        bytes[i] = (unsigned char)(i * 37 + i / 251);
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, bytes, BYTES, NULL, 0, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    return tensor;
}

static void expect_contents(const tensor_fixture *f, tn_tensor tensor, const unsigned char *bytes) {
    unsigned char *read = malloc(BYTES);
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, read, BYTES, NULL, 0, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    assert_memory_equal(read, bytes, BYTES);
    free(read);
}

/* The nth call of any kind fails, there and then back: the plane is where it was, or has arrived,
 * and its contents are whole. Returns the failures. */
static int fail_nth(const char *call, int and_after) {
    unsigned char *bytes = malloc(BYTES);
    int failures = 0;
    for (int nth = 1, is_done = 0; !is_done; nth++) {
        tensor_fixture f;
        open_backed(&f);
        tn_tensor tensor = known_tensor(&f, bytes);
        assert_int_equal(test_sim_get()->fault(call, nth, and_after, DRIVER_ERROR), 0);
        tn_status there = tn_plane_offload(tensor, TN_PLANE_DATA, f.stream);
        tn_status back =
            there == TN_OK ? tn_plane_prefetch(tensor, TN_PLANE_DATA, f.stream) : TN_OK;
        test_sim_get()->fault(NULL, 0, 0, 0);
        tn_plane_state at = fixture_state(tensor, TN_PLANE_DATA);
        assert_int_equal(at, there == TN_OK && back != TN_OK ? TN_PLANE_OFFLOADED : TN_PLANE_VALID);
        EXPECT_OK(tn_ledger_check(f.pool));
        expect_contents(&f, tensor, bytes);
        EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream)); /* and it all works again */
        expect_contents(&f, tensor, bytes);
        is_done = there == TN_OK && back == TN_OK;
        failures += !is_done;
        tensor_fixture_close(&f);
    }
    free(bytes);
    return failures;
}

static void a_failing_driver_leaves_one_copy_whole(void **state) {
    static const char *const calls[] = {"cuMemcpyAsync", "cuMemHostAlloc", "cuStreamCreate",
                                        "cuStreamWaitEvent", "cuEventRecord"};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        assert_true(fail_nth(calls[i], 0) > 0);
        assert_true(fail_nth(calls[i], 1) > 0);
    }
}

/* A graph runs when it is launched, if ever: what it would move would be lost until then. */
static void nothing_moves_while_a_stream_captures(void **state) {
    tensor_fixture f;
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    tensor_fixture_open_sim(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, 130, 600, "w");
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_OFFLOAD));
    test_capture_begin(f.device, f.stream, TEST_CAPTURE_RELAXED);
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("while the stream captures");
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_ROW, f.stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
    test_graph graph = test_capture_end(f.device, f.stream);
    test_graph_destroy(f.device, &graph);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream));
    test_capture_begin(f.device, f.stream, TEST_CAPTURE_RELAXED);
    EXPECT_STATUS(tn_plane_prefetch(tensor, TN_PLANE_ROW, f.stream), TN_INVALID_STATE);
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.stream, &lease, &view),
                  TN_INVALID_STATE);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_OFFLOADED);
    graph = test_capture_end(f.device, f.stream);
    test_graph_destroy(f.device, &graph);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    tensor_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_moves_while_a_stream_captures),
        cmocka_unit_test(copies_overlap_with_compute),
        cmocka_unit_test(no_copy_races),
        cmocka_unit_test(a_failing_driver_leaves_one_copy_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
