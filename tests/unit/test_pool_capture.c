/* While a stream captures a graph: nothing waits for it or makes it wait, and what can not be had
 * without is new memory. The host driver captures nothing, so its table is
 * replaced by one that says what the test wants. */
#include "pool_internal.h"
#include "test_pools.h"

#define MIB MIB_BYTES

static tn_stream capturing;
static int questions;

static tn_status is_capturing(tn__driver_device *device, tn_stream stream, int *out) {
    (void)device;
    questions++;
    *out = capturing && stream == capturing;
    return TN_OK;
}

static const tn__driver *real;
static int answers_not_done;

static tn_status event_is_done(tn__driver_device *device, tn__event event, int *out) {
    if (answers_not_done == 0) return real->event_is_done(device, event, out);
    answers_not_done--;
    *out = 0;
    return TN_OK;
}

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn_stream b;
    tn__driver driver;
} fixture;

static int open_fixture(void **state) {
    static fixture f;
    f.device = test_open_host();
    f.pool = test_open_pool(f.device, TN_BACKING_AUTO, 0);
    f.a = test_open_stream(f.device);
    f.b = test_open_stream(f.device);
    real = f.pool->driver;
    f.driver = *real;
    f.driver.event_is_done = event_is_done;
    f.driver.stream_is_capturing = is_capturing;
    f.pool->driver = &f.driver;
    f.pool->order.driver = &f.driver;
    capturing = NULL;
    questions = 0;
    answers_not_done = 0;
    *state = &f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    capturing = NULL;
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    EXPECT_OK(tn_device_destroy(f->device));
    return 0;
}

static void warm_calls_work_and_do_not_even_ask(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 4 * MIB, f->a);
    test_give(f->pool, block, f->a);
    capturing = f->a;
    questions = 0;
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->a), block);
    EXPECT_OK(tn_record_use(block, f->b));
    test_give(f->pool, block, f->a);
    assert_int_equal(questions, 0);
}

/* Growing is legal; only a shortage ends a request that nothing may be waited for. */
static void a_stream_that_captures_gets_new_memory(void **state) {
    fixture *f = *state;
    void *block = NULL;
    tn_pool_stats before;
    capturing = f->a;
    block = test_take(f->pool, 4 * MIB, f->a);
    before = test_pool_stats(f->pool);
    f->pool->limit_bytes = before.reserved_bytes;
    void *none = NULL;
    EXPECT_STATUS(tn_alloc(f->pool, 64 * MIB, f->a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_null(none);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, before.reserved_bytes);
    assert_int_equal(test_pool_stats(f->pool).live_bytes, before.live_bytes);
    test_give(f->pool, block, f->a);
}

/* Nor is anything waited for that the other may do: both get memory of their own. */
static void no_stream_waits_for_one_that_captures(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 32 * MIB, f->a);
    test_give(f->pool, block, f->a);
    capturing = f->b;
    void *second = test_take(f->pool, 32 * MIB, f->b);
    assert_ptr_not_equal(second, block);
    capturing = f->a; /* now the one to be waited for captures */
    void *third = test_take(f->pool, 32 * MIB, f->b);
    assert_ptr_not_equal(third, block);
    assert_int_equal(test_pool_stats(f->pool).stream_waits, 0);
    capturing = NULL;
    assert_ptr_equal(test_take(f->pool, 32 * MIB, f->b), block);
    test_give(f->pool, block, f->b);
    test_give(f->pool, second, f->b);
    test_give(f->pool, third, f->b);
}

static void others_grow_and_trim_meanwhile(void **state) {
    fixture *f = *state;
    void *held = test_take(f->pool, 4 * MIB, f->a);
    test_give(f->pool, held, f->a);
    capturing = f->a;
    test_give(f->pool, test_take(f->pool, 64 * MIB, f->b), f->b);
    EXPECT_OK(tn_pool_trim(f->pool, 0, NULL));
    /* What the capturing stream may still use stays. */
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, 32 * MIB);
}

/* Memory that waits for other streams comes back though one stream can not be asked. */
static void a_shortage_waits_for_those_that_do_not_capture(void **state) {
    fixture *f = *state;
    void *of_a = test_take(f->pool, MIB, f->a);
    void *block = test_take(f->pool, 64 * MIB, f->b);
    f->pool->limit_bytes = 128 * MIB;
    test_give(f->pool, of_a, f->a);
    test_give(f->pool, block, f->b);
    capturing = f->a;
    answers_not_done = 10; /* more than are asked for before the host waits */
    block = test_take(f->pool, 80 * MIB, f->b);
    assert_int_equal(answers_not_done, 0);
    test_give(f->pool, block, f->b);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        TEST(warm_calls_work_and_do_not_even_ask),
        TEST(a_stream_that_captures_gets_new_memory),
        TEST(no_stream_waits_for_one_that_captures),
        TEST(others_grow_and_trim_meanwhile),
        TEST(a_shortage_waits_for_those_that_do_not_capture),
    };
    return cmocka_run_group_tests_name("unit/pool_capture", tests, NULL, NULL);
}
