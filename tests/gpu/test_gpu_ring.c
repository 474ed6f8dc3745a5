/* The ring on a real GPU, gathering by NCCL from one rank: what is gathered is what the shard
 * holds, step after step and behind other work, steps take no memory, and nothing is left.
 *
 * Skipped (77) where there is no GPU or no NCCL.
 */
#include "gpu_support.h"

#include <stdio.h>

#include "tenure_registration.h"
#include "tenure_ring.h"

enum { UNITS = 5, SIZE = 2048, STEPS = 4 };

static const tn_scope NO_SCOPE = {0};

typedef struct layer {
    tn_shard_plan *plan;
    tn_tensor shard, weight;
    unsigned char byte; /* that the shard is full of */
} layer;

static gpu_side gpu;
static tn_comm *comm;
static tn_ring *ring;
static layer layers[UNITS];

static int join(void) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm_id id;
    if (tn_comm_id_create(&id) != TN_OK) {
        printf("skipped: %s\n", tn_error_last());
        return 0;
    }
    config.device = gpu.device;
    config.id = &id;
    config.rank_count = 1;
    config.timeout_us = 60 * 1000 * 1000;
    EXPECT_OK(tn_comm_create(&config, &comm));
    return 1;
}

static tn_tensor make_tensor(tn_format format, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format, config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(gpu.scope, &config, &tensor));
    return tensor;
}

static void write_shard(layer *of, unsigned char byte) {
    of->byte = byte;
    EXPECT_OK(tn_plane_fill(of->shard, TN_PLANE_DATA, byte, gpu.stream));
}

static void add_layer(int index) {
    layer *of = &layers[index];
    const tn_shard_tensor tensor = {
        "weight", TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_SCALE_POW2, SIZE, SIZE, 0};
    tn_shard_plan_config plan = TN_SHARD_PLAN_CONFIG_INIT;
    tn_ring_unit_config unit = TN_RING_UNIT_CONFIG_INIT;
    size_t bytes = 0;
    int out = -1;
    plan.tensors = &tensor, plan.tensor_count = 1, plan.rank_count = 1;
    EXPECT_OK(tn_shard_plan_create(&plan, &of->plan));
    EXPECT_OK(tn_shard_bytes(of->plan, 0, &bytes));
    of->shard = make_tensor(TN_FORMAT_PLAIN, TN_BYTE, 1, (int64_t)bytes);
    of->weight = make_tensor(TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, SIZE, SIZE);
    write_shard(of, (unsigned char)(index + 1));
    unit.plan = of->plan, unit.shard = of->shard;
    unit.tensors = &of->weight, unit.tensor_count = 1;
    EXPECT_OK(tn_ring_unit_add(ring, &unit, &out));
    assert_int_equal(out, index);
}

static void open_registered_ring(tn_ring_register registration) {
    tn_ring_config config = TN_RING_CONFIG_INIT;
    config.scope = gpu.scope, config.comm = comm;
    config.registration = registration;
    EXPECT_OK(tn_ring_create(&config, &ring));
    for (int i = 0; i < UNITS; i++)
        add_layer(i);
    EXPECT_OK(tn_ring_seal(ring));
}

static void open_ring(void) { open_registered_ring(TN_RING_REGISTER_AUTO); }

static void close_ring(void) {
    EXPECT_OK(tn_ring_destroy(ring));
    for (int i = 0; i < UNITS; i++) {
        gpu_destroy(&gpu, layers[i].weight);
        gpu_destroy(&gpu, layers[i].shard);
        tn_shard_plan_destroy(layers[i].plan);
    }
}

/* All of it is what the shard was full of when the gather came to it. */
static void expect_contents(int index) {
    gpu_copy copy = gpu_download(&gpu, layers[index].weight, TN_PLANE_ROW);
    for (size_t i = 0; i < copy.layout.data_bytes; i++)
        assert_int_equal(copy.data[i], layers[index].byte);
    gpu_copy_end(&copy);
}

static void use(int index, int next, int is_looked_at) {
    EXPECT_OK(tn_ring_acquire(ring, index, NO_SCOPE, gpu.stream));
    if (next >= 0 && next < UNITS) EXPECT_OK(tn_ring_prefetch(ring, next));
    if (is_looked_at) expect_contents(index);
    EXPECT_OK(tn_ring_release(ring, index));
}

static void run_step(int is_looked_at) {
    for (int i = 0; i < UNITS; i++)
        use(i, i + 1, is_looked_at);
    for (int i = UNITS - 1; i >= 0; i--)
        use(i, i - 1, is_looked_at);
}

static uint64_t allocations(void) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_pool_stats_get(gpu.pool, &stats));
    return stats.allocs;
}

static void steps_bring_what_the_shards_hold(void **state) {
    tn_ring_stats stats = TN_RING_STATS_INIT;
    (void)state;
    open_ring();
    for (int step = 0; step < STEPS; step++) {
        run_step(1);
        for (int i = 0; i < UNITS; i++)
            write_shard(&layers[i], (unsigned char)(10 * step + i + 11));
    }
    EXPECT_OK(tn_ring_verify(ring));
    EXPECT_OK(tn_ring_stats_get(ring, &stats));
    assert_int_equal(stats.gathers, 2 * STEPS * UNITS);
    assert_int_equal(stats.peak_live_bytes, stats.buffer_bytes);
    close_ring();
}

/* The host runs ahead of all of it; what comes last still sees its own unit. */
static void steps_take_no_memory(void **state) {
    (void)state;
    open_ring();
    run_step(0);
    uint64_t blocks = allocations();
    for (int step = 0; step < 20; step++)
        run_step(0);
    assert_int_equal(allocations(), blocks);
    run_step(1);
    close_ring();
}

/* As NCCL 2.27 and later does it. */
static void the_buffer_is_registered_as_it_is_wanted(void **state) {
    static const tn_ring_register wanted[] = {TN_RING_REGISTER_AUTO, TN_RING_REGISTER_BUFFER,
                                              TN_RING_REGISTER_NONE};
    static const tn_ring_registered as[] = {TN_RING_REGISTERED_WINDOW, TN_RING_REGISTERED_BUFFER,
                                            TN_RING_UNREGISTERED};
    tn_window_info windows = TN_WINDOW_INFO_INIT;
    (void)state;
    for (int i = 0; i < 3; i++) {
        tn_ring_stats stats = TN_RING_STATS_INIT;
        open_registered_ring(wanted[i]);
        EXPECT_OK(tn_ring_stats_get(ring, &stats));
        printf("registering %zu bytes took %llu us%s%s\n", stats.buffer_bytes,
               (unsigned long long)stats.register_us, *stats.register_text ? ": " : "",
               stats.register_text);
        assert_int_equal(stats.registered, as[i]);
        run_step(1);
        close_ring();
    }
    EXPECT_OK(tn_comm_window_info_get(comm, &windows));
    printf("trying windows out took %llu us\n", (unsigned long long)windows.check_us);
    assert_int_equal(windows.is_known, 1);
    EXPECT_OK(windows.status);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_bring_what_the_shards_hold),
        cmocka_unit_test(steps_take_no_memory),
        cmocka_unit_test(the_buffer_is_registered_as_it_is_wanted),
    };
    gpu_open(&gpu);
    if (!join()) return 77;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    EXPECT_OK(tn_comm_destroy(comm));
    gpu_close(&gpu);
    return failed;
}
