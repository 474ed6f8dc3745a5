/* Limits of one pool: above the soft one idle memory is used up before the pool grows, and then it
 * grows all the same; addresses have a budget of their own. */
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES
#define GIB GIB_BYTES

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
} fixture;

static void open_fixture(fixture *f, size_t memory, const tn_pool_config *config) {
    f->device = test_open_sim(memory, 0);
    EXPECT_OK(tn_pool_create(f->device, config, &f->pool));
    f->a = test_open_stream(f->device);
    f->b = test_open_stream(f->device);
}

static void close_fixture(fixture *f) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    test_close_sim(f->device);
    EXPECT_OK(tn_process_limits_get(&limits));
    assert_int_equal(limits.reserved_bytes, 0);
}

static tn_pool_config config_of(tn_pool_backing backing, size_t hard, size_t soft) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.backing = backing;
    config.limit_bytes = hard;
    config.soft_limit_bytes = soft;
    config.page_bytes = backing == TN_BACKING_VMM ? 2 * MIB : 0;
    return config;
}

/* Memory that a kernel still uses, and a block behind it: a larger one can not grow around it. */
static void *busy_memory(fixture *f, size_t bytes) {
    void *x = test_take(f->pool, bytes, f->a);
    void *kept = test_take(f->pool, 2 * MIB, f->a);
    test_sim_write(f->device, f->a, x, bytes, 1e5);
    test_give(f->pool, x, f->a);
    return kept;
}

/* Another stream that wants more gets new memory, or above a soft limit waits for the old. */
static void above_the_soft_limit_busy_memory_moves_first(void **state) {
    (void)state;
    for (int is_soft = 0; is_soft < 2; is_soft++) {
        tn_pool_config config = config_of(TN_BACKING_VMM, 0, is_soft ? 100 * MIB : 0);
        fixture f;
        void *kept;
        void *x;
        open_fixture(&f, 0, &config);
        kept = busy_memory(&f, 64 * MIB);
        x = test_take(f.pool, 96 * MIB, f.b);
        assert_int_equal(test_pool_stats(f.pool).reserved_bytes, (is_soft ? 98 : 162) * MIB);
        assert_int_equal(test_pool_stats(f.pool).stream_waits, is_soft);
        test_sim_write(f.device, f.b, x, 96 * MIB, 10);
        test_give(f.pool, x, f.b);
        test_give(f.pool, kept, f.a);
        close_fixture(&f);
    }
}

/* Idle segments do not fit the request: they go back before a new one comes. */
static void above_the_soft_limit_idle_segments_go_back_first(void **state) {
    fixture f;
    (void)state;
    for (int is_soft = 0; is_soft < 2; is_soft++) {
        tn_pool_config config = config_of(TN_BACKING_PLAIN, 0, is_soft ? 100 * MIB : 0);
        void *x;
        open_fixture(&f, 0, &config);
        test_give(f.pool, test_take(f.pool, 64 * MIB, f.a), f.a);
        x = test_take(f.pool, 80 * MIB, f.a);
        assert_int_equal(test_pool_stats(f.pool).reserved_bytes, (is_soft ? 80 : 144) * MIB);
        test_give(f.pool, x, f.a);
        close_fixture(&f);
    }
}

/* No idle memory is left: the soft limit gives way, the hard one does not. */
static void growth_above_the_soft_limit_is_allowed_up_to_the_hard_one(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        tn_pool_config config = config_of((tn_pool_backing)backing, 256 * MIB, 64 * MIB);
        fixture f;
        void *x[3];
        void *none = NULL;
        open_fixture(&f, 0, &config);
        for (int i = 0; i < 3; i++) {
            x[i] = test_take(f.pool, 80 * MIB, f.a);
            assert_int_equal(test_pool_stats(f.pool).reserved_bytes, (size_t)(i + 1) * 80 * MIB);
        }
        EXPECT_STATUS(tn_alloc(f.pool, 80 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
        EXPECT_ERROR_HAS("limit 268435456");
        assert_null(none);
        for (int i = 0; i < 3; i++)
            test_give(f.pool, x[i], f.a);
        close_fixture(&f);
    }
}

static void a_soft_limit_above_the_hard_one_is_refused(void **state) {
    tn_pool_config config = config_of(TN_BACKING_AUTO, 64 * MIB, 65 * MIB);
    tn_device *device = test_open_sim(0, 0);
    tn_pool *pool = NULL;
    (void)state;
    EXPECT_STATUS(tn_pool_create(device, &config, &pool), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("soft limit 68157440");
    assert_null(pool);
    test_close_sim(device);
}

/* pytorch#192269 and others: addresses run out although memory is free. The budget keeps what one
 * pool reserves within bounds, and its failure says what to do. */
static void addresses_have_a_budget(void **state) {
    tn_pool_config config = config_of(TN_BACKING_VMM, 0, 0);
    tn_pool_stats before;
    tn_pool_stats after;
    fixture f;
    void *x[4];
    void *small;
    void *none = NULL;
    (void)state;
    config.address_limit_bytes = 512 * MIB;
    open_fixture(&f, 0, &config);
    for (int i = 0; i < 4; i++)
        x[i] = test_take(f.pool, 100 * MIB, f.a);
    small = test_take(f.pool, 1000, f.a);
    before = test_pool_stats(f.pool);
    assert_true(before.address_bytes <= 512 * MIB);
    EXPECT_STATUS(tn_alloc(f.pool, 400 * MIB, f.a, NULL, &none), TN_OUT_OF_ADDRESS_SPACE);
    EXPECT_ERROR_HAS("no addresses are left for 419430400 bytes of pool pool");
    EXPECT_ERROR_HAS("limit 536870912; hint: raise address_limit_bytes");
    assert_null(none);
    after = test_pool_stats(f.pool);
    assert_int_equal(after.reserved_bytes, before.reserved_bytes);
    assert_int_equal(after.address_bytes, before.address_bytes);
    for (int i = 0; i < 4; i++)
        test_give(f.pool, x[i], f.a);
    none = test_take(f.pool, 400 * MIB, f.a); /* the same addresses serve another shape */
    assert_true(test_pool_stats(f.pool).address_bytes <= 512 * MIB);
    test_give(f.pool, none, f.a);
    test_give(f.pool, small, f.a);
    close_fixture(&f);
}

/* Everything is free, but the reservation is too small for the block: it goes for a larger one. */
static void reservations_in_which_nothing_lies_make_room_for_larger_ones(void **state) {
    tn_pool_config config = config_of(TN_BACKING_VMM, 0, 0);
    fixture f;
    void *x;
    (void)state;
    config.address_bytes = 64 * MIB;
    config.address_limit_bytes = 160 * MIB;
    open_fixture(&f, 0, &config);
    for (int round = 0; round < 3; round++) {
        void *y[2];
        for (int i = 0; i < 2; i++)
            y[i] = test_take(f.pool, 60 * MIB, f.a);
        for (int i = 0; i < 2; i++)
            test_give(f.pool, y[i], f.a);
        EXPECT_OK(tn_stream_synchronize(f.device, f.a));
        x = test_take(f.pool, 140 * MIB, f.a);
        assert_true(test_pool_stats(f.pool).address_bytes <= 160 * MIB);
        test_give(f.pool, x, f.a);
    }
    close_fixture(&f);
}

/* A limit that is set later: idle memory goes back for it, live memory does not. */
static void a_limit_can_be_set_anew(void **state) {
    tn_pool_config config = config_of(TN_BACKING_VMM, 0, 0);
    fixture f;
    void *x;
    void *y = NULL;
    (void)state;
    open_fixture(&f, 1 * GIB, &config);
    x = test_take(f.pool, 40 * MIB, f.a);
    y = test_take(f.pool, 200 * MIB, f.a);
    test_give(f.pool, y, f.a);
    EXPECT_OK(tn_stream_synchronize(f.device, f.a));
    EXPECT_STATUS(tn_pool_limit_set(f.pool, 38 * MIB), TN_IN_USE);
    EXPECT_OK(tn_pool_limit_set(f.pool, 100 * MIB));
    assert_true(test_pool_stats(f.pool).reserved_bytes <= 100 * MIB);
    y = NULL;
    EXPECT_STATUS(tn_alloc(f.pool, 80 * MIB, f.a, NULL, &y), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("limit 104857600");
    y = test_take(f.pool, 56 * MIB, f.a);
    EXPECT_OK(tn_pool_limit_set(f.pool, 0));
    test_give(f.pool, test_take(f.pool, 800 * MIB, f.a), f.a);
    test_give(f.pool, x, f.a);
    test_give(f.pool, y, f.a);
    close_fixture(&f);
}

static void a_drivers_pool_keeps_its_limit(void **state) {
    tn_pool_config config = config_of(TN_BACKING_ASYNC, 0, 0);
    fixture f;
    (void)state;
    open_fixture(&f, 0, &config);
    EXPECT_STATUS(tn_pool_limit_set(f.pool, 64 * MIB), TN_UNSUPPORTED);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(above_the_soft_limit_busy_memory_moves_first),
        cmocka_unit_test(above_the_soft_limit_idle_segments_go_back_first),
        cmocka_unit_test(growth_above_the_soft_limit_is_allowed_up_to_the_hard_one),
        cmocka_unit_test(a_soft_limit_above_the_hard_one_is_refused),
        cmocka_unit_test(a_limit_can_be_set_anew),
        cmocka_unit_test(a_drivers_pool_keeps_its_limit),
        cmocka_unit_test(addresses_have_a_budget),
        cmocka_unit_test(reservations_in_which_nothing_lies_make_room_for_larger_ones),
    };
    return cmocka_run_group_tests_name("sim/limits_pool", tests, NULL, NULL);
}
