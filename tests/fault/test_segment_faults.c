/* Failures of which one alone is harmless: memory that could neither be used nor given back,
 * handles that a device's end does not get rid of, limits and waits while other threads work. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "handle_cache.h"
#include "host_alloc.h"
#include "options.h"
#include "pool_internal.h"
#include "test_pools.h"

#define MIB MIB_BYTES
enum { DRIVER_FAULT = 999 };

static size_t claimed_bytes(void) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    EXPECT_OK(tn_process_limits_get(&limits));
    return limits.reserved_bytes;
}

/* ---- a segment that nobody wants ------------------------------------------------------------- */

static tn_status plain_alloc(void *context, size_t bytes, void **out) {
    tn_device *device = context;
    return tn__device_driver(device)->mem_alloc(tn__device_state(device), bytes, out);
}

static tn_status plain_free(void *context, void *address, size_t bytes) {
    tn_device *device = context;
    (void)bytes;
    return tn__device_driver(device)->mem_free(tn__device_state(device), address);
}

typedef struct provider_row {
    tn_pool_backing backing;
    const char *free_call;
} provider_row;

/* The nth host allocation fails, and every free of the driver. 1 if a segment got stuck. */
static int fail_to_add(const provider_row *row, long nth) {
    tn_device *device = test_open_sim(0, 0);
    tn_stream stream = test_open_stream(device);
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    void *block = NULL;
    int is_stuck;
    config.backing = row->backing;
    config.functions = (tn_memory_functions){plain_alloc, plain_free, device};
    EXPECT_OK(tn_pool_create(device, &config, &pool));
    assert_int_equal(test_sim_get()->fault(row->free_call, 1, 1, DRIVER_FAULT), 0);
    tn__host_alloc_fault(nth, 0);
    if (tn_alloc(pool, 3 * MIB, stream, NULL, &block) != TN_OK) assert_null(block);
    tn__host_alloc_fault(0, 0);
    is_stuck = !block && pool->stuck_segments;
    assert_int_equal(test_pool_stats(pool).reserved_bytes, test_sim_get()->physical_bytes(0));
    assert_int_equal(claimed_bytes(), test_sim_get()->physical_bytes(0));
    if (is_stuck) EXPECT_STATUS(tn_pool_destroy(pool), TN_DRIVER_ERROR);
    assert_int_equal(test_sim_get()->fault(NULL, 0, 0, 0), 0);
    if (is_stuck && row->backing != TN_BACKING_ASYNC) {
        size_t held = test_pool_stats(pool).driver_held_bytes, released = 0;
        assert_int_equal(held, 32 * MIB);
        EXPECT_OK(tn_pool_trim(pool, held, &released));
        assert_int_equal(released, 0);
        EXPECT_OK(tn_pool_trim(pool, 0, &released));
        assert_int_equal(released, held);
        assert_int_equal(test_sim_get()->physical_bytes(0), 0);
    }
    EXPECT_OK(tn_free(block, stream));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(device, stream));
    test_close_sim(device);
    assert_int_equal(claimed_bytes(), 0);
    assert_int_equal(tn__host_live_blocks(), 0);
    return is_stuck;
}

static void a_segment_that_can_not_be_given_back_is_not_lost(void **state) {
    static const provider_row rows[] = {{TN_BACKING_PLAIN, "cuMemFree_v2"},
                                        {TN_BACKING_CALLER, "cuMemFree_v2"},
                                        {TN_BACKING_ASYNC, "cuMemFreeAsync"}};
    (void)state;
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        int stuck_count = 0;
        for (long nth = 1; nth <= 20; nth++)
            stuck_count += fail_to_add(&rows[row], nth);
        assert_true(stuck_count > 0);
    }
}

/* ---- handles of a device that ends ----------------------------------------------------------- */

static void a_device_ends_when_its_idle_handles_have_gone(void **state) {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    (void)state;
    setenv("TENURE_HANDLE_CACHE", "8", 1);
    tn__options_reload();
    device = test_open_sim(0, 0);
    pool = test_open_pool(device, TN_BACKING_VMM, 0);
    stream = test_open_stream(device);
    test_give(pool, test_take(pool, 16 * MIB, stream), stream);
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_stream_destroy(device, stream));
    assert_int_equal(tn__handle_cache_bytes(device), 16 * MIB);
    assert_int_equal(test_sim_get()->fault("cuMemRelease", 3, 1, DRIVER_FAULT), 0);
    EXPECT_STATUS(tn_device_destroy(device), TN_DRIVER_ERROR);
    assert_int_equal(tn__handle_cache_bytes(device), 12 * MIB);
    assert_int_equal(claimed_bytes(), 12 * MIB);
    assert_int_equal(test_sim_get()->fault(NULL, 0, 0, 0), 0);
    test_close_sim(device);
    assert_int_equal(claimed_bytes(), 0);
    unsetenv("TENURE_HANDLE_CACHE");
    tn__options_reload();
}

/* ---- the soft limit while a provider runs ---------------------------------------------------- */

typedef struct intruder {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    int comes; /* at the next free of the provider */
    tn_status status;
} intruder;

/* Another thread's call on the pool, which makes the pool grow and leaves an idle segment. */
static void *grow_pool(void *argument) {
    intruder *i = argument;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    options.lifetime = TN_LIFETIME_STEP; /* for no thread's cache */
    i->status = tn_alloc(i->pool, MIB, i->stream, &options, &block);
    if (i->status == TN_OK) i->status = tn_free(block, i->stream);
    return NULL;
}

static tn_status intruded_alloc(void *context, size_t bytes, void **out) {
    const intruder *i = context;
    return plain_alloc(i->device, bytes, out);
}

static tn_status intruded_free(void *context, void *address, size_t bytes) {
    intruder *i = context;
    pthread_t thread;
    if (i->comes) {
        i->comes = 0;
        if (pthread_create(&thread, NULL, grow_pool, i)) return TN_INVALID_STATE;
        pthread_join(thread, NULL);
    }
    return plain_free(i->device, address, bytes);
}

/* 60 MiB fit below the soft limit beside the 40 that are live once all idle memory is given up:
 * that of the pool, and what another thread leaves while the provider takes the first back. */
static void the_soft_limit_holds_while_a_provider_runs(void **state) {
    intruder i = {.device = test_open_sim(0, 0)};
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_stream stream = test_open_stream(i.device);
    void *live, *block;
    (void)state;
    i.stream = test_open_stream(i.device);
    config.backing = TN_BACKING_CALLER;
    config.functions = (tn_memory_functions){intruded_alloc, intruded_free, &i};
    config.soft_limit_bytes = 100 * MIB;
    EXPECT_OK(tn_pool_create(i.device, &config, &i.pool));
    live = test_take(i.pool, 40 * MIB, stream);
    test_give(i.pool, test_take(i.pool, 50 * MIB, stream), stream);
    i.comes = 1;
    block = test_take(i.pool, 60 * MIB, stream);
    EXPECT_OK(i.status);
    assert_int_equal(i.comes, 0);
    assert_int_equal(test_pool_stats(i.pool).reserved_bytes, 100 * MIB);
    test_give(i.pool, block, stream);
    test_give(i.pool, live, stream);
    EXPECT_OK(tn_pool_destroy(i.pool));
    EXPECT_OK(tn_stream_destroy(i.device, stream));
    EXPECT_OK(tn_stream_destroy(i.device, i.stream));
    test_close_sim(i.device);
}

/* ---- no wait, while a driver's pool ends ----------------------------------------------------- */

static tn__driver watched_driver;
static atomic_int has_ended;
static int had_ended; /* when the section without waits had begun */
static pthread_t section;
static tn_status section_status;

static void *begin_section(void *argument) {
    tn_status *status = argument;
    *status = tn_no_wait_begin();
    had_ended = atomic_load(&has_ended);
    if (*status == TN_OK) *status = tn_no_wait_end();
    return NULL;
}

/* Gives the other thread time to begin: it must not. */
static tn_status end_watched(tn__driver_device *device, tn__mempool pool) {
    tn_status status;
    assert_int_equal(pthread_create(&section, NULL, begin_section, &section_status), 0);
    for (int i = 0; i < 1000; i++)
        sched_yield();
    status = tn__driver_cuda.mempool_destroy(device, pool);
    atomic_store(&has_ended, 1);
    return status;
}

static void no_section_without_waits_begins_while_a_pool_ends(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_ASYNC, 0);
    (void)state;
    test_give(pool, test_take(pool, 3 * MIB, NULL), NULL);
    watched_driver = *pool->driver;
    watched_driver.mempool_destroy = end_watched;
    pool->driver = &watched_driver;
    EXPECT_OK(tn_pool_destroy(pool));
    pthread_join(section, NULL);
    EXPECT_OK(section_status);
    assert_int_equal(had_ended, 1);
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_segment_that_can_not_be_given_back_is_not_lost),
        cmocka_unit_test(a_device_ends_when_its_idle_handles_have_gone),
        cmocka_unit_test(the_soft_limit_holds_while_a_provider_runs),
        cmocka_unit_test(no_section_without_waits_begins_while_a_pool_ends),
    };
    return cmocka_run_group_tests_name("fault/segment_faults", tests, NULL, NULL);
}
