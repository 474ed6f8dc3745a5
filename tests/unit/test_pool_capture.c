/* While a stream captures a graph: what needs no driver call works, what would need an illegal one
 * is refused with the reason and changes nothing. The host driver captures nothing, so its table is
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

static void expect_refused(fixture *f, size_t bytes, tn_stream stream, const char *words) {
    tn_pool_stats before = test_pool_stats(f->pool);
    tn_pool_stats after;
    void *block = NULL;
    EXPECT_STATUS(tn_alloc(f->pool, bytes, stream, NULL, &block), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("captures a graph");
    EXPECT_ERROR_HAS(words);
    assert_null(block);
    after = test_pool_stats(f->pool);
    assert_memory_equal(&before, &after, sizeof before);
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

static void growth_is_refused_until_the_capture_ends(void **state) {
    fixture *f = *state;
    capturing = f->a;
    expect_refused(f, 4 * MIB, f->a, "grow");
    capturing = NULL;
    test_give(f->pool, test_take(f->pool, 4 * MIB, f->a), f->a);
}

static void a_wait_for_another_stream_is_refused(void **state) {
    fixture *f = *state;
    void *block = test_take(f->pool, 32 * MIB, f->a);
    test_give(f->pool, block, f->a);
    capturing = f->b;
    expect_refused(f, 32 * MIB, f->b, "wait for another stream");
    /* Nor may an event of the stream that captures be waited for by one that does not. */
    capturing = f->a;
    expect_refused(f, 32 * MIB, f->b, "record an event on it");
    capturing = NULL;
    assert_ptr_equal(test_take(f->pool, 32 * MIB, f->b), block);
    test_give(f->pool, block, f->b);
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
        TEST(growth_is_refused_until_the_capture_ends),
        TEST(a_wait_for_another_stream_is_refused),
        TEST(others_grow_and_trim_meanwhile),
        TEST(a_shortage_waits_for_those_that_do_not_capture),
    };
    return cmocka_run_group_tests_name("unit/pool_capture", tests, NULL, NULL);
}
