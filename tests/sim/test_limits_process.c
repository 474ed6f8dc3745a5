/* Limits of the process: no pool grows beyond the hard one, whatever the threads do at once, and
 * what any pool has cached can be reclaimed against it, also on another device. */
#include <pthread.h>
#include <stdlib.h>

#include "options.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { START_LIMIT_MIB = 700, START_SOFT_MIB = 600 };

static tn_process_limits get_limits(void) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    EXPECT_OK(tn_process_limits_get(&limits));
    return limits;
}

static int without_limits(void **state) {
    (void)state;
    EXPECT_OK(tn_process_limits_set(0, 0));
    return 0;
}

static void the_environment_sets_them_at_start(void **state) {
    tn_process_limits limits = get_limits();
    (void)state;
    assert_int_equal(limits.hard_bytes, START_LIMIT_MIB * MIB);
    assert_int_equal(limits.soft_bytes, START_SOFT_MIB * MIB);
    assert_int_equal(limits.reserved_bytes, 0);
}

static void bad_limits_change_nothing(void **state) {
    tn_process_limits limits = {0};
    (void)state;
    EXPECT_OK(tn_process_limits_set(100 * MIB, 50 * MIB));
    EXPECT_STATUS(tn_process_limits_set(100 * MIB, 101 * MIB), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("soft limit 105906176 is above the hard limit 104857600");
    EXPECT_STATUS(tn_process_limits_get(&limits), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_process_limits_get(NULL), TN_INVALID_ARGUMENT);
    limits = get_limits();
    assert_int_equal(limits.hard_bytes, 100 * MIB);
    assert_int_equal(limits.soft_bytes, 50 * MIB);
    EXPECT_OK(tn_process_limits_set(0, 50 * MIB));
    assert_int_equal(get_limits().hard_bytes, 0);
    assert_int_equal(get_limits().soft_bytes, 50 * MIB);
    EXPECT_OK(tn_process_limits_set(30 * MIB, 0));
    assert_int_equal(get_limits().soft_bytes, 30 * MIB);
}

static void all_pools_together_stay_below_the_hard_limit(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_device *device = test_open_sim(0, 0);
        tn_pool *one = test_open_pool(device, (tn_pool_backing)backing, 0);
        tn_pool *two = test_open_pool(device, (tn_pool_backing)backing, 0);
        void *x = test_take(one, 80 * MIB, NULL);
        void *y = &x;
        EXPECT_OK(tn_process_limits_set(128 * MIB, 0));
        EXPECT_STATUS(tn_alloc(two, 64 * MIB, NULL, NULL, &y), TN_OUT_OF_DEVICE_MEMORY);
        EXPECT_ERROR_HAS("all pools: 83886080 of their limit 134217728");
        EXPECT_ERROR_HAS("hint: all pools together are at the process's limit");
        assert_ptr_equal(y, &x);
        assert_int_equal(get_limits().reserved_bytes, 80 * MIB);
        y = test_take(two, 48 * MIB, NULL);
        assert_int_equal(get_limits().reserved_bytes, 128 * MIB);
        test_give(one, x, NULL);
        test_give(two, y, NULL);
        EXPECT_OK(tn_pool_destroy(one));
        EXPECT_OK(tn_pool_destroy(two));
        assert_int_equal(get_limits().reserved_bytes, 0);
        test_close_sim(device);
    }
}

/* What is held above a limit that is set later stays; nothing is added to it. */
static void a_limit_below_what_is_held_takes_nothing_away(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_VMM, 0);
    void *x = test_take(pool, 80 * MIB, NULL);
    void *y = NULL;
    (void)state;
    EXPECT_OK(tn_process_limits_set(10 * MIB, 0));
    EXPECT_STATUS(tn_alloc(pool, 2 * MIB, NULL, NULL, &y), TN_OUT_OF_DEVICE_MEMORY);
    test_give(pool, x, NULL);
    x = test_take(pool, 60 * MIB, NULL); /* what is held is used again */
    assert_int_equal(get_limits().reserved_bytes, 80 * MIB);
    test_give(pool, x, NULL);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

static tn_device *open_second_device(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = 1;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

/* cupy#7678, for the whole process: the other pool's cache is in the way, on another device. */
static void what_another_device_has_cached_is_reclaimed(void **state) {
    const tnsim_config sim = {.size = sizeof sim, .device_count = 2};
    tn_device *first = test_open_sim_as(&sim);
    tn_device *second = open_second_device();
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_pool *one = test_open_pool(first, (tn_pool_backing)backing, 0);
        tn_pool *two = test_open_pool(second, (tn_pool_backing)backing, 0);
        void *x;
        EXPECT_OK(tn_process_limits_set(128 * MIB, 0));
        test_give(one, test_take(one, 100 * MIB, NULL), NULL);
        x = test_take(two, 64 * MIB, NULL);
        assert_int_equal(test_pool_stats(two).reserved_bytes, 64 * MIB);
        assert_int_equal(test_pool_stats(one).reserved_bytes,
                         backing == TN_BACKING_VMM ? 64 * MIB : 0);
        test_give(two, x, NULL);
        EXPECT_OK(tn_pool_destroy(one));
        EXPECT_OK(tn_pool_destroy(two));
    }
    EXPECT_OK(tn_device_destroy(second));
    test_close_sim(first);
}

static void above_the_soft_limit_others_give_first_and_growth_goes_on(void **state) {
    tn_device *device = test_open_sim(0, 0);
    tn_pool *one = test_open_pool(device, TN_BACKING_VMM, 0);
    tn_pool *two = test_open_pool(device, TN_BACKING_VMM, 0);
    void *x;
    void *y;
    (void)state;
    EXPECT_OK(tn_process_limits_set(0, 128 * MIB));
    test_give(one, test_take(one, 100 * MIB, NULL), NULL);
    x = test_take(two, 64 * MIB, NULL);
    assert_int_equal(test_pool_stats(one).reserved_bytes, 64 * MIB);
    y = test_take(two, 100 * MIB, NULL);
    assert_int_equal(test_pool_stats(one).reserved_bytes, 0);
    assert_int_equal(get_limits().reserved_bytes, 164 * MIB);
    test_give(two, x, NULL);
    test_give(two, y, NULL);
    EXPECT_OK(tn_pool_destroy(one));
    EXPECT_OK(tn_pool_destroy(two));
    test_close_sim(device);
}

/* ---- threads --------------------------------------------------------------------------------- */

enum { THREADS = 4, ROUNDS = 60 };

typedef struct grower {
    pthread_t thread;
    tn_device *device;
    unsigned index;
    unsigned served;
    tn_status bad; /* neither success nor a shortage */
} grower;

/* Others may have it all in each of its rounds: it goes on till it was served. */
static void *grow_and_shrink(void *argument) {
    grower *g = argument;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_pool *pool = NULL;
    config.backing = g->index % 2 ? TN_BACKING_PLAIN : TN_BACKING_VMM;
    g->bad = tn_pool_create(g->device, &config, &pool);
    for (unsigned round = 0; (round < ROUNDS || !g->served) && g->bad == TN_OK; round++) {
        void *block = NULL;
        size_t bytes = (8 + 7 * ((round + g->index) % 8)) * MIB;
        tn_status status = tn_alloc(pool, bytes, NULL, NULL, &block);
        if (status == TN_OK) g->served++;
        if (status != TN_OK && status != TN_OUT_OF_DEVICE_MEMORY) g->bad = status;
        if (tn_free(block, NULL) != TN_OK) g->bad = TN_INVALID_STATE;
        if (round % 4 == g->index && tn_pool_trim(pool, 0, NULL) != TN_OK) g->bad = TN_LEAK;
    }
    if (g->bad == TN_OK) g->bad = tn_pool_destroy(pool);
    return NULL;
}

static void threads_that_grow_at_once_do_not_pass_it_together(void **state) {
    const test_sim *sim = test_sim_get();
    tn_device *device = test_open_sim(0, 0);
    grower growers[THREADS] = {0};
    (void)state;
    EXPECT_OK(tn_process_limits_set(128 * MIB, 0));
    for (unsigned i = 0; i < THREADS; i++) {
        growers[i].device = device;
        growers[i].index = i;
        assert_int_equal(pthread_create(&growers[i].thread, NULL, grow_and_shrink, &growers[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(growers[i].thread, NULL), 0);
        EXPECT_STATUS(growers[i].bad, TN_OK);
        assert_true(growers[i].served > 0);
    }
    assert_true(sim->physical_peak_bytes(0) <= 128 * MIB);
    assert_int_equal(get_limits().reserved_bytes, 0);
    test_close_sim(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_environment_sets_them_at_start), /* the first */
        cmocka_unit_test_teardown(bad_limits_change_nothing, without_limits),
        cmocka_unit_test_teardown(all_pools_together_stay_below_the_hard_limit, without_limits),
        cmocka_unit_test_teardown(a_limit_below_what_is_held_takes_nothing_away, without_limits),
        cmocka_unit_test_teardown(what_another_device_has_cached_is_reclaimed, without_limits),
        cmocka_unit_test_teardown(above_the_soft_limit_others_give_first_and_growth_goes_on,
                                  without_limits),
        cmocka_unit_test_teardown(threads_that_grow_at_once_do_not_pass_it_together,
                                  without_limits),
    };
    setenv("TENURE_LIMIT", "700MiB", 1);
    setenv("TENURE_SOFT_LIMIT", "600MiB", 1);
    return cmocka_run_group_tests_name("sim/limits_process", tests, NULL, NULL);
}
