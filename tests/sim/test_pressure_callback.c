/* The user's callback when a request would fail: when it is called and with what, that it may use
 * the allocator freely, and that neither it nor what it asks for can go on for ever. */
#include <pthread.h>
#include <string.h>

#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

enum { CALLS_MAX = 16 };

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_pool *other;
    tn_stream a;
    tn_stream b;
    void *blocks[8]; /* to be freed by the callback, last first */
    int block_count;
    int answer; /* of a callback that has freed nothing */
    int calls;
    tn_pressure seen[CALLS_MAX];
} fixture;

static void open_fixture(fixture *f, size_t memory, tn_pool_backing backing, size_t limit) {
    memset(f, 0, sizeof *f);
    f->device = test_open_sim(memory, 0);
    f->pool = test_open_pool(f->device, backing, limit);
    f->other = test_open_pool(f->device, backing, 0);
    f->a = test_open_stream(f->device);
    f->b = test_open_stream(f->device);
}

static void close_fixture(fixture *f) {
    while (f->block_count > 0)
        test_give(f->pool, f->blocks[--f->block_count], f->a);
    EXPECT_OK(tn_pool_destroy(f->pool));
    EXPECT_OK(tn_pool_destroy(f->other));
    EXPECT_OK(tn_stream_destroy(f->device, f->a));
    EXPECT_OK(tn_stream_destroy(f->device, f->b));
    test_close_sim(f->device);
}

static void hold(fixture *f, size_t bytes) {
    f->blocks[f->block_count++] = test_take(f->pool, bytes, f->a);
}

static void note_call(fixture *f, const tn_pressure *pressure) {
    assert_true(f->calls < CALLS_MAX);
    assert_int_equal(pressure->size, sizeof *pressure);
    f->seen[f->calls++] = *pressure;
}

static int free_one(void *context, const tn_pressure *pressure) {
    fixture *f = context;
    note_call(f, pressure);
    if (f->block_count == 0) return f->answer;
    test_give(f->pool, f->blocks[--f->block_count], f->a);
    return 1;
}

/* ---- what it is told, and what comes of it --------------------------------------------------- */

static void what_it_frees_serves_the_request(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        fixture f;
        void *x;
        open_fixture(&f, 256 * MIB, (tn_pool_backing)backing, 0);
        EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
        for (int i = 0; i < 4; i++)
            hold(&f, 60 * MIB);
        x = test_take(f.pool, 100 * MIB, f.a);
        assert_int_equal(f.calls, 2); /* 16 free + 60 is too little, + 120 is enough */
        for (int i = 0; i < 2; i++) {
            assert_ptr_equal(f.seen[i].pool, f.pool);
            assert_ptr_equal(f.seen[i].stream, f.a);
            assert_int_equal(f.seen[i].requested_bytes, 100 * MIB);
            assert_int_equal(f.seen[i].attempt, i + 1);
            assert_int_equal(f.seen[i].cause, TN_PRESSURE_DEVICE);
            assert_int_equal(f.seen[i].live_bytes, (size_t)(4 - i) * 60 * MIB);
        }
        assert_int_equal(f.seen[0].reserved_bytes, 240 * MIB);
        assert_int_equal(f.seen[0].device_free_bytes, 16 * MIB);
        assert_int_equal(f.seen[0].cached_bytes, 0);
        assert_int_equal(f.block_count, 2); /* no more was freed than was needed */
        assert_int_equal(test_pool_stats(f.pool).out_of_memory, 0);
        test_give(f.pool, x, f.a);
        close_fixture(&f);
    }
}

/* What it frees is still in use on another stream: the request waits for that, too. */
static void what_it_frees_is_waited_for(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        fixture f;
        void *x;
        open_fixture(&f, 128 * MIB, (tn_pool_backing)backing, 0);
        EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
        for (int i = 0; i < 2; i++) {
            hold(&f, 60 * MIB);
            test_sim_write(f.device, f.b, f.blocks[i], 60 * MIB, 1e5);
            EXPECT_OK(tn_record_use(f.blocks[i], f.b));
        }
        x = test_take(f.pool, 100 * MIB, f.a);
        assert_int_equal(f.calls, 2);
        test_sim_write(f.device, f.a, x, 100 * MIB, 10);
        test_give(f.pool, x, f.a);
        close_fixture(&f);
    }
}

static void one_that_has_nothing_is_asked_once_and_the_request_fails(void **state) {
    fixture f;
    void *x;
    (void)state;
    open_fixture(&f, 64 * MIB, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
    x = test_take(f.pool, 60 * MIB, f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 8 * MIB, f.a, NULL, &f.blocks[0]), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("pool pool has no 8388608 bytes");
    assert_int_equal(f.calls, 1);
    assert_null(f.blocks[0]);
    assert_int_equal(test_pool_stats(f.pool).out_of_memory, 1);
    test_give(f.pool, x, f.a);
    close_fixture(&f);
}

static void one_that_always_says_yes_is_asked_a_bounded_number_of_times(void **state) {
    fixture f;
    void *x;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 64 * MIB, TN_BACKING_VMM, 0);
    f.answer = 1;
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
    x = test_take(f.pool, 60 * MIB, f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 8 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(f.calls, TN_PRESSURE_ATTEMPTS_MAX);
    assert_int_equal(f.seen[f.calls - 1].attempt, TN_PRESSURE_ATTEMPTS_MAX);
    test_give(f.pool, x, f.a);
    close_fixture(&f);
}

static void it_is_not_asked_while_anything_else_helps_or_once_it_is_taken_away(void **state) {
    fixture f;
    void *x;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 128 * MIB, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
    test_give(f.other, test_take(f.other, 100 * MIB, f.b), f.b);
    x = test_take(f.pool, 120 * MIB, f.a);
    assert_int_equal(f.calls, 0);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, NULL, NULL));
    EXPECT_STATUS(tn_alloc(f.pool, 120 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(f.calls, 0);
    EXPECT_STATUS(tn_pool_pressure_callback_set(NULL, free_one, &f), TN_INVALID_ARGUMENT);
    test_give(f.pool, x, f.a);
    close_fixture(&f);
}

static void it_is_told_which_limit_is_in_the_way(void **state) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    fixture f;
    void *x;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 0, TN_BACKING_VMM, 100 * MIB);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
    x = test_take(f.pool, 60 * MIB, f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 50 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(f.seen[0].cause, TN_PRESSURE_POOL_LIMIT);
    EXPECT_OK(tn_process_limits_set(80 * MIB, 0));
    EXPECT_STATUS(tn_alloc(f.pool, 30 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(f.seen[1].cause, TN_PRESSURE_PROCESS_LIMIT);
    EXPECT_OK(tn_process_limits_set(0, 0));
    test_give(f.pool, x, f.a);
    EXPECT_OK(tn_pool_destroy(f.pool));
    config.address_limit_bytes = 64 * MIB;
    EXPECT_OK(tn_pool_create(f.device, &config, &f.pool));
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_one, &f));
    EXPECT_STATUS(tn_alloc(f.pool, 100 * MIB, f.a, NULL, &none), TN_OUT_OF_ADDRESS_SPACE);
    assert_int_equal(f.seen[2].cause, TN_PRESSURE_ADDRESSES);
    close_fixture(&f);
}

/* ---- what it may do -------------------------------------------------------------------------- */

/* Asks for as much as is short itself: fails, and is not asked for help with that. */
static int allocate_inside(void *context, const tn_pressure *pressure) {
    fixture *f = context;
    void *none = NULL;
    void *small = NULL;
    note_call(f, pressure);
    EXPECT_STATUS(tn_alloc(f->pool, pressure->requested_bytes, f->b, NULL, &none),
                  TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_OK(tn_alloc(f->pool, 1 * MIB, f->b, NULL, &small));
    EXPECT_OK(tn_free(small, f->b));
    return 0;
}

static void what_it_asks_for_itself_calls_no_callback(void **state) {
    fixture f;
    void *x;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 64 * MIB, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, allocate_inside, &f));
    x = test_take(f.pool, 60 * MIB, f.a);
    EXPECT_STATUS(tn_alloc(f.pool, 8 * MIB, f.a, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(f.calls, 1);
    assert_int_equal(test_pool_stats(f.pool).out_of_memory, 2);
    test_give(f.pool, x, f.a);
    close_fixture(&f);
}

/* What another thread does to the pool while the callback runs; joined inside it. Not NULL: one of
 * the calls failed. */
static void *use_the_pools(void *argument) {
    fixture *f = argument;
    tn_pool *pools[2] = {f->pool, f->other};
    for (int i = 0; i < 2; i++) {
        void *block = NULL;
        tn_pool_stats stats = TN_POOL_STATS_INIT;
        if (tn_alloc(pools[i], 1000, f->b, NULL, &block) != TN_OK) return f;
        if (tn_free(block, f->b) != TN_OK) return f;
        if (tn_pool_stats_get(pools[i], &stats) != TN_OK) return f;
        if (tn_pool_trim(pools[i], 0, NULL) != TN_OK) return f;
    }
    return NULL;
}

static int let_another_thread_in(void *context, const tn_pressure *pressure) {
    fixture *f = context;
    pthread_t thread;
    void *failed = NULL;
    note_call(f, pressure);
    test_give(f->pool, f->blocks[--f->block_count], f->a);
    assert_int_equal(pthread_create(&thread, NULL, use_the_pools, f), 0);
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    return 1;
}

static void no_lock_is_held_while_it_runs(void **state) {
    (void)state;
    for (int backing = TN_BACKING_VMM; backing <= TN_BACKING_PLAIN; backing++) {
        fixture f;
        void *x;
        open_fixture(&f, 128 * MIB, (tn_pool_backing)backing, 0);
        EXPECT_OK(tn_pool_pressure_callback_set(f.pool, let_another_thread_in, &f));
        hold(&f, 100 * MIB);
        x = test_take(f.pool, 110 * MIB, f.a);
        assert_int_equal(f.calls, 1);
        test_give(f.pool, x, f.a);
        close_fixture(&f);
    }
}

/* The request's stream is forgotten meanwhile: pools forget idle streams of others. */
static int free_and_use_many_streams(void *context, const tn_pressure *pressure) {
    fixture *f = context;
    tn_stream streams[80];
    int worth = free_one(context, pressure);
    for (int i = 0; i < 80; i++) {
        streams[i] = test_open_stream(f->device);
        test_give(f->pool, test_take(f->pool, 1000, streams[i]), streams[i]);
    }
    for (int i = 0; i < 80; i++)
        EXPECT_OK(tn_stream_destroy(f->device, streams[i]));
    return worth;
}

static void the_pool_may_change_while_it_runs(void **state) {
    fixture f;
    void *x;
    (void)state;
    open_fixture(&f, 128 * MIB, TN_BACKING_VMM, 0);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_and_use_many_streams, &f));
    hold(&f, 60 * MIB);
    hold(&f, 60 * MIB);
    x = test_take(f.pool, 66 * MIB, f.b);
    assert_int_equal(f.calls, 1);
    test_give(f.pool, x, f.b);
    close_fixture(&f);
}

/* What it frees lies in the same page as a block that stays: it is idle, but not mapped. */
static int free_and_pause(void *context, const tn_pressure *pressure) {
    fixture *f = context;
    note_call(f, pressure);
    test_give(f->pool, f->blocks[--f->block_count], f->a);
    EXPECT_OK(tn_pool_pause(f->pool, 0));
    return 1;
}

static void a_pool_that_it_pauses_gives_no_memory(void **state) {
    fixture f;
    void *none = NULL;
    (void)state;
    open_fixture(&f, 0, TN_BACKING_VMM, 2 * MIB);
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, free_and_pause, &f));
    hold(&f, MIB);
    hold(&f, MIB);
    EXPECT_STATUS(tn_alloc(f.pool, MIB, f.a, NULL, &none), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("is paused");
    assert_int_equal(f.calls, 1);
    assert_null(none);
    assert_int_equal(test_pool_stats(f.pool).live_blocks, 1);
    EXPECT_OK(tn_pool_resume(f.pool));
    test_give(f.pool, test_take(f.pool, MIB, f.a), f.a);
    close_fixture(&f);
}

/* ---- the last error -------------------------------------------------------------------------- */

static int fail_inside(void *context, const tn_pressure *pressure) {
    fixture *f = context;
    EXPECT_STATUS(tn_free(f, f->a), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("no pool gave out");
    return free_one(context, pressure);
}

static void a_request_that_is_served_leaves_the_last_error_alone(void **state) {
    char before[512];
    fixture f;
    void *x;
    (void)state;
    open_fixture(&f, 128 * MIB, TN_BACKING_VMM, 0);
    EXPECT_STATUS(tn_pool_trim(NULL, 0, NULL), TN_INVALID_ARGUMENT);
    strncpy(before, tn_error_last(), sizeof before - 1);
    before[sizeof before - 1] = 0;
    EXPECT_OK(tn_pool_pressure_callback_set(f.pool, fail_inside, &f));
    hold(&f, 100 * MIB);
    x = test_take(f.pool, 110 * MIB, f.a);
    assert_int_equal(f.calls, 1);
    assert_string_equal(tn_error_last(), before);
    test_give(f.pool, x, f.a);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_it_frees_serves_the_request),
        cmocka_unit_test(what_it_frees_is_waited_for),
        cmocka_unit_test(one_that_has_nothing_is_asked_once_and_the_request_fails),
        cmocka_unit_test(one_that_always_says_yes_is_asked_a_bounded_number_of_times),
        cmocka_unit_test(it_is_not_asked_while_anything_else_helps_or_once_it_is_taken_away),
        cmocka_unit_test(it_is_told_which_limit_is_in_the_way),
        cmocka_unit_test(what_it_asks_for_itself_calls_no_callback),
        cmocka_unit_test(no_lock_is_held_while_it_runs),
        cmocka_unit_test(the_pool_may_change_while_it_runs),
        cmocka_unit_test(a_pool_that_it_pauses_gives_no_memory),
        cmocka_unit_test(a_request_that_is_served_leaves_the_last_error_alone),
    };
    return cmocka_run_group_tests_name("sim/pressure_callback", tests, NULL, NULL);
}
