/* A real GPU that is short of memory: other pools and the user's callback give some, what is freed
 * under held work is waited for within the bound and without the pool's lock, limits hold, and what
 * the report says of the device is what the driver says.
 *
 * A gate is a host task that holds a stream until the test lets it go. */
#include "gpu_support.h"

#include <semaphore.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "tenure_pool.h"

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static gpu_side gpu;
static sem_t gate;

static void pass_gate(void *argument) {
    (void)argument;
    sem_wait(&gate);
}

static void hold(tn_stream stream) {
    EXPECT_OK(tn__device_driver(gpu.device)
                  ->host_task(tn__device_state(gpu.device), pass_gate, NULL, stream));
}

static tn_pool *open_pool(tn_pool_backing backing, size_t limit_bytes, uint64_t wait_us_max) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.backing = backing;
    config.limit_bytes = limit_bytes;
    config.wait_us_max = wait_us_max;
    EXPECT_OK(tn_pool_create(gpu.device, &config, &pool));
    return pool;
}

static tn_stream open_stream(void) {
    tn_stream stream = NULL;
    EXPECT_OK(tn_stream_create(gpu.device, &stream));
    return stream;
}

static size_t device_free(void) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    EXPECT_OK(tn__device_driver(gpu.device)
                  ->memory_info(tn__device_state(gpu.device), &free_bytes, &total_bytes));
    return free_bytes;
}

/* ---- the device is full ---------------------------------------------------------------------- */

typedef struct holder {
    tn_pool *pool;
    void *blocks[2];
    int calls;
    size_t seen_free;
} holder;

static int free_one(void *context, const tn_pressure *pressure) {
    holder *h = context;
    h->seen_free = pressure->device_free_bytes;
    for (int i = 0; i < 2; i++) {
        if (!h->blocks[i]) continue;
        EXPECT_OK(tn_free(h->blocks[i], gpu.stream));
        h->blocks[i] = NULL;
        h->calls++;
        return 1;
    }
    return 0;
}

/* Nearly all of the device is held in two blocks and in another pool's cache. */
static void the_ladder_finds_what_there_is(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_pool *other = open_pool((tn_pool_backing)backing, 0, 0);
        holder h = {.pool = open_pool((tn_pool_backing)backing, 0, 0)};
        size_t third = device_free() / 10 * 3 / (64 * MIB) * (64 * MIB);
        void *x = NULL;
        EXPECT_OK(tn_pool_pressure_callback_set(h.pool, free_one, &h));
        for (int i = 0; i < 2; i++)
            EXPECT_OK(tn_alloc(h.pool, third, gpu.stream, NULL, &h.blocks[i]));
        EXPECT_OK(tn_alloc(other, third, gpu.stream, NULL, &x));
        EXPECT_OK(tn_fill(gpu.device, x, 1, third, gpu.stream));
        EXPECT_OK(tn_free(x, gpu.stream));
        EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
        EXPECT_OK(tn_alloc(h.pool, third, gpu.stream, NULL, &x)); /* from the other pool */
        assert_int_equal(h.calls, 0);
        EXPECT_OK(tn_free(x, gpu.stream));
        EXPECT_OK(tn_alloc(h.pool, 2 * third, gpu.stream, NULL, &x)); /* one of the blocks */
        assert_int_equal(h.calls, 1);
        EXPECT_OK(tn_fill(gpu.device, x, 2, 2 * third, gpu.stream));
        EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
        EXPECT_OK(tn_pool_check(h.pool));
        EXPECT_OK(tn_free(x, gpu.stream));
        EXPECT_OK(tn_free(h.blocks[1], gpu.stream));
        EXPECT_OK(tn_pool_destroy(h.pool));
        EXPECT_OK(tn_pool_destroy(other));
    }
}

static void the_report_says_what_the_driver_says(void **state) {
    tn_pool *pool = open_pool(TN_BACKING_VMM, 0, 0);
    size_t free_bytes = device_free();
    char words[64];
    void *x = NULL;
    (void)state;
    EXPECT_STATUS(tn_alloc(pool, free_bytes + 64 * MIB, gpu.stream, NULL, &x),
                  TN_OUT_OF_DEVICE_MEMORY);
    snprintf(words, sizeof words, "device: free %zu of", free_bytes);
    EXPECT_ERROR_HAS(words);
    EXPECT_OK(tn_device_synchronize(gpu.device)); /* nothing sticks */
    assert_int_equal(device_free(), free_bytes);
    EXPECT_OK(tn_pool_destroy(pool));
}

/* ---- waits ----------------------------------------------------------------------------------- */

static void held_work_is_given_up_at_the_bound_and_served_once_it_ends(void **state) {
    tn_pool *pool = open_pool(TN_BACKING_PLAIN, 128 * MIB, 20000);
    tn_stream side = open_stream();
    void *x = NULL;
    void *y = NULL;
    (void)state;
    EXPECT_OK(tn_alloc(pool, 100 * MIB, gpu.stream, NULL, &x));
    hold(side);
    EXPECT_OK(tn_fill(gpu.device, x, 1, 100 * MIB, side));
    EXPECT_OK(tn_record_use(x, side));
    EXPECT_OK(tn_free(x, gpu.stream));
    EXPECT_STATUS(tn_alloc(pool, 120 * MIB, gpu.stream, NULL, &y), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("pending 104857600");
    sem_post(&gate);
    EXPECT_OK(tn_stream_synchronize(gpu.device, side));
    EXPECT_OK(tn_alloc(pool, 120 * MIB, gpu.stream, NULL, &y));
    EXPECT_OK(tn_free(y, gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
}

/* pytorch#50925: between the launches of a collective nothing waits for the first of them. */
static void nothing_waits_between_no_wait_begin_and_end(void **state) {
    tn_pool *pool = open_pool(TN_BACKING_PLAIN, 256 * MIB, 0);
    tn_stream side = open_stream();
    size_t released = 1;
    void *x = NULL;
    void *y = NULL;
    (void)state;
    EXPECT_OK(tn_alloc(pool, 100 * MIB, gpu.stream, NULL, &x));
    EXPECT_OK(tn_alloc(pool, 100 * MIB, gpu.stream, NULL, &y));
    EXPECT_OK(tn_free(x, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    EXPECT_OK(tn_no_wait_begin());
    hold(side);
    EXPECT_OK(tn_fill(gpu.device, y, 1, 100 * MIB, side));
    EXPECT_OK(tn_pool_trim(pool, 0, &released)); /* would hang in cuMemFree */
    assert_int_equal(released, 0);
    EXPECT_STATUS(tn_alloc(pool, 200 * MIB, gpu.stream, NULL, &x), TN_OUT_OF_DEVICE_MEMORY);
    sem_post(&gate);
    EXPECT_OK(tn_no_wait_end());
    EXPECT_OK(tn_record_use(y, side));
    EXPECT_OK(tn_free(y, gpu.stream));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(gpu.device, side));
}

/* ---- limits ---------------------------------------------------------------------------------- */

static void all_pools_keep_the_process_limit(void **state) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    tn_pool *pools[2] = {open_pool(TN_BACKING_VMM, 0, 0), open_pool(TN_BACKING_PLAIN, 0, 0)};
    size_t before;
    void *x[2] = {NULL, NULL};
    (void)state;
    EXPECT_OK(tn_process_limits_get(&limits));
    before = limits.reserved_bytes; /* of the probe and of tensors of others */
    EXPECT_OK(tn_process_limits_set(before + 1 * GIB, 0));
    EXPECT_OK(tn_alloc(pools[0], 700 * MIB, gpu.stream, NULL, &x[0]));
    EXPECT_STATUS(tn_alloc(pools[1], 700 * MIB, gpu.stream, NULL, &x[1]), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("all pools together are at the process's limit");
    EXPECT_OK(tn_free(x[0], gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    EXPECT_OK(tn_alloc(pools[1], 700 * MIB, gpu.stream, NULL, &x[1])); /* the other's cache goes */
    EXPECT_OK(tn_process_limits_get(&limits));
    assert_true(limits.reserved_bytes <= before + 1 * GIB);
    EXPECT_OK(tn_free(x[1], gpu.stream));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_pool_destroy(pools[i]));
    EXPECT_OK(tn_process_limits_get(&limits));
    assert_int_equal(limits.reserved_bytes, before);
    EXPECT_OK(tn_process_limits_set(0, 0));
}

static int open_all(void **state) {
    (void)state;
    gpu_open(&gpu);
    return sem_init(&gate, 0, 0);
}

static int close_all(void **state) {
    (void)state;
    gpu_close(&gpu);
    sem_destroy(&gate);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ladder_finds_what_there_is),
        cmocka_unit_test(the_report_says_what_the_driver_says),
        cmocka_unit_test(held_work_is_given_up_at_the_bound_and_served_once_it_ends),
        cmocka_unit_test(nothing_waits_between_no_wait_begin_and_end),
        cmocka_unit_test(all_pools_keep_the_process_limit),
    };
    return TEST_RUN_GROUP(tests, open_all, close_all);
}
