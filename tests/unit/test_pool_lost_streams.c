/* Streams that end, or whose handle comes back as another's, while a pool still knows them. Neither
 * driver gives a handle twice, so the table is replaced by one that says what the test wants. */
#include "host_alloc.h"
#include "pool_internal.h"
#include "test_pools.h"

#define MIB MIB_BYTES

static const tn__driver *real;
static tn_stream renamed; /* its handle means another stream now */
static int synchronizations;
static void (*on_mem_free)(void);

static tn_status stream_id(tn__driver_device *device, tn_stream stream, uint64_t *out) {
    if (stream && stream == renamed) return *out = 1000000, TN_OK;
    return real->stream_id(device, stream, out);
}

static tn_status synchronize(tn__driver_device *device) {
    synchronizations++;
    return real->synchronize(device);
}

static tn_status mem_free(tn__driver_device *device, void *address) {
    void (*call)(void) = on_mem_free;
    on_mem_free = NULL;
    if (call) call();
    return real->mem_free(device, address);
}

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream a;
    tn__driver driver;
} fixture;

static fixture f;

static void replace_driver(tn_pool *pool) {
    pool->driver = &f.driver;
    pool->order.driver = &f.driver;
}

static int open_fixture(void **state) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    (void)state;
    config.driver = TN_DRIVER_HOST;
    config.memory_limit_bytes = 96 * MIB;
    EXPECT_OK(tn_device_create(&config, &f.device));
    f.pool = test_open_pool(f.device, TN_BACKING_AUTO, 0);
    f.a = test_open_stream(f.device);
    real = f.pool->driver;
    f.driver = *real;
    f.driver.stream_id = stream_id;
    f.driver.synchronize = synchronize;
    f.driver.mem_free = mem_free;
    replace_driver(f.pool);
    renamed = NULL;
    synchronizations = 0;
    return 0;
}

static int close_fixture(void **state) {
    (void)state;
    EXPECT_OK(tn_pool_destroy(f.pool));
    EXPECT_OK(tn_stream_destroy(f.device, f.a));
    EXPECT_OK(tn_device_destroy(f.device));
    assert_int_equal(tn__host_live_blocks(), 0);
    return 0;
}

/* Streams of another library: the pool does not hear of their end. */
static tn_stream open_foreign(void) {
    tn_stream stream = NULL;
    EXPECT_OK(real->stream_create(tn__device_state(f.device), &stream));
    return stream;
}

static void end_foreign(tn_stream stream) {
    EXPECT_OK(real->stream_destroy(tn__device_state(f.device), stream));
}

/* An event there would say nothing of the work that the old stream still does. Nobody told of it
 * while the stream was there: another one frees the block. */
static void no_event_is_recorded_on_a_handle_that_means_another_stream(void **state) {
    tn_stream foreign = open_foreign();
    void *block = test_take(f.pool, 4 * MIB, foreign);
    (void)state;
    renamed = foreign;
    test_give(f.pool, block, f.a);
    assert_ptr_equal(test_take(f.pool, 32 * MIB, f.a), block);
    assert_int_equal(synchronizations, 1);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 0);
    test_give(f.pool, block, f.a);
    end_foreign(foreign);
}

/* From then on the handle is not needed: the stream may be gone. */
static void expect_an_event(int is_recorded) {
    tn_stream foreign = open_foreign();
    tn_stream own = is_recorded ? f.a : foreign;
    void *block = test_take(f.pool, 4 * MIB, own);
    if (is_recorded) EXPECT_OK(tn_record_use(block, foreign));
    test_give(f.pool, block, own);
    renamed = foreign;
    assert_ptr_equal(test_take(f.pool, 32 * MIB, f.a), block);
    assert_int_equal(synchronizations, 0);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_give(f.pool, block, f.a);
    end_foreign(foreign);
}

static void an_event_is_recorded_when_a_foreign_stream_frees(void **state) {
    (void)state;
    expect_an_event(0);
}

static void an_event_is_recorded_when_a_foreign_streams_use_is(void **state) {
    (void)state;
    expect_an_event(1);
}

static void a_handle_that_means_the_stream_still_is_waited_for(void **state) {
    tn_stream foreign = open_foreign();
    void *block = test_take(f.pool, 4 * MIB, foreign);
    (void)state;
    test_give(f.pool, block, f.a);
    assert_ptr_equal(test_take(f.pool, 32 * MIB, f.a), block);
    assert_int_equal(synchronizations, 0);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, 1);
    test_give(f.pool, block, f.a);
    end_foreign(foreign);
}

/* As other threads would while this one asks the other pools for memory. */
static void use_many_streams(void) {
    for (int i = 0; i < 200; i++) {
        tn_stream foreign = open_foreign();
        test_give(f.pool, test_take(f.pool, 512, foreign), foreign);
        EXPECT_OK(real->stream_synchronize(tn__device_state(f.device), foreign));
        end_foreign(foreign);
    }
}

static void a_stream_that_waits_for_other_pools_may_be_forgotten_meanwhile(void **state) {
    tn_pool *other = test_open_pool(f.device, TN_BACKING_AUTO, 0);
    void *small = test_take(f.pool, 512, NULL);
    void *block = NULL;
    (void)state;
    replace_driver(other);
    test_give(other, test_take(other, 64 * MIB, NULL), NULL);
    on_mem_free = use_many_streams;
    EXPECT_OK(tn_alloc(f.pool, 40 * MIB, f.a, NULL, &block));
    assert_null(on_mem_free);
    test_give(f.pool, small, NULL);
    test_give(f.pool, block, f.a);
    /* It is the block of that stream and no other: nothing is waited for. */
    uint64_t waits = test_pool_stats(f.pool).stream_waits;
    assert_ptr_equal(test_take(f.pool, 40 * MIB, f.a), block);
    assert_int_equal(test_pool_stats(f.pool).stream_waits, waits);
    test_give(f.pool, block, f.a);
    EXPECT_OK(tn_pool_destroy(other));
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        TEST(no_event_is_recorded_on_a_handle_that_means_another_stream),
        TEST(an_event_is_recorded_when_a_foreign_stream_frees),
        TEST(an_event_is_recorded_when_a_foreign_streams_use_is),
        TEST(a_handle_that_means_the_stream_still_is_waited_for),
        TEST(a_stream_that_waits_for_other_pools_may_be_forgotten_meanwhile),
    };
    return cmocka_run_group_tests_name("unit/pool_lost_streams", tests, NULL, NULL);
}
