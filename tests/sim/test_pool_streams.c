/* Stream order: when memory that one stream used serves another, it waits for just those uses, on
 * the device; and where a program forgets to record a use, the simulated device sees the race. */
#include <pthread.h>

#include "driver.h"
#include "host_alloc.h"
#include "pool_fixture.h"

#define MIB        MIB_BYTES
#define PER_THREAD ((tn_stream)2)

static int open_fixture(void **state) {
    static pool_fixture f;
    f = pool_fixture_open(0, TN_BACKING_VMM, 0);
    f.c = test_open_stream(f.device);
    *state = &f;
    return 0;
}

static uint64_t waits(pool_fixture *f) { return test_pool_stats(f->pool).stream_waits; }

static void the_same_stream_reuses_at_once(void **state) {
    pool_fixture *f = *state;
    char *block = test_take(f->pool, 4 * MIB, f->a);
    test_sim_write(f->device, f->a, block, 4 * MIB, 1000);
    test_give(f->pool, block, f->a);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->a), block);
    test_sim_write(f->device, f->a, block, 4 * MIB, 1000);
    assert_int_equal(test_calls(f->device, TN_CALL_STREAM_WAIT), 0);
    test_give(f->pool, block, f->a);
    pool_fixture_close(f);
}

static void another_stream_waits_exactly_once(void **state) {
    pool_fixture *f = *state;
    char *block = test_take(f->pool, 4 * MIB, f->a);
    char *second = test_take(f->pool, 4 * MIB, f->a);
    test_sim_write(f->device, f->a, block, 4 * MIB, 1000);
    test_sim_write(f->device, f->a, second, 4 * MIB, 1000);
    test_give(f->pool, block, f->a);
    test_give(f->pool, second, f->a);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->b), block);
    assert_int_equal(waits(f), 1);
    assert_int_equal(test_calls(f->device, TN_CALL_STREAM_WAIT), 1);
    assert_int_equal(test_calls(f->device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    test_sim_write(f->device, f->b, block, 4 * MIB, 10);
    /* That wait covers the second block, which was freed before it. */
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->b), second);
    assert_int_equal(waits(f), 1);
    test_sim_write(f->device, f->b, second, 4 * MIB, 10);
    test_give(f->pool, block, f->b);
    test_give(f->pool, second, f->b);
    pool_fixture_close(f);
}

static void a_stream_prefers_what_it_freed_itself(void **state) {
    pool_fixture *f = *state;
    char *of_a = test_take(f->pool, 4 * MIB, f->a);
    char *between = test_take(f->pool, 4 * MIB, f->c);
    char *of_b = test_take(f->pool, 4 * MIB, f->b);
    test_give(f->pool, of_a, f->a);
    test_give(f->pool, of_b, f->b);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->b), of_b);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->a), of_a);
    /* Also inside one run of memory that both have freed. */
    test_give(f->pool, between, f->a);
    test_give(f->pool, of_a, f->a);
    test_give(f->pool, of_b, f->b);
    assert_int_equal(waits(f), 0);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->b), of_b);
    assert_int_equal(waits(f), 0);
    test_give(f->pool, of_b, f->b);
    pool_fixture_close(f);
}

/* pytorch#188655: a block used on two other streams, freed, and taken again by its own. */
static void every_recorded_use_is_waited_for(void **state) {
    pool_fixture *f = *state;
    char *block = test_take(f->pool, 4 * MIB, f->a);
    test_sim_write(f->device, f->a, block, 4 * MIB, 10);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_write(f->device, f->b, block, 4 * MIB, 1000);
    EXPECT_OK(tn_record_use(block, f->b));
    EXPECT_OK(tn_stream_wait(f->device, f->c, f->b));
    test_sim_write(f->device, f->c, block, 4 * MIB, 1000);
    EXPECT_OK(tn_record_use(block, f->c));
    test_give(f->pool, block, f->a);
    assert_int_equal(test_pool_stats(f->pool).pending_bytes, 4 * MIB);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->a), block);
    assert_int_equal(waits(f), 2);
    test_sim_write(f->device, f->a, block, 4 * MIB, 10);
    test_give(f->pool, block, f->a);
    pool_fixture_close(f);
}

/* The same without the call: the race is there, and it is seen. */
static void a_use_that_was_not_recorded_is_a_race(void **state) {
    pool_fixture *f = *state;
    char *block = test_take(f->pool, 4 * MIB, f->a);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_write(f->device, f->b, block, 4 * MIB, 1000);
    test_give(f->pool, block, f->a);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->a), block);
    assert_int_equal(test_sim_get()->race_count(), 1);
    test_give(f->pool, block, f->a);
    assert_true(pool_fixture_close_with_races(f) >= 1);
}

static void a_block_freed_on_another_stream_waits_for_both(void **state) {
    pool_fixture *f = *state;
    char *block = test_take(f->pool, 4 * MIB, f->a);
    test_sim_write(f->device, f->a, block, 4 * MIB, 1000);
    EXPECT_OK(tn_stream_wait(f->device, f->b, f->a));
    test_sim_write(f->device, f->b, block, 2 * MIB, 1000);
    test_give(f->pool, block, f->b);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->c), block);
    assert_int_equal(waits(f), 2);
    test_give(f->pool, block, f->c);
    pool_fixture_close(f);
}

/* An event that was recorded behind the block's last use is there: later work of that stream is
 * not waited for. */
static void the_wait_is_for_the_blocks_own_uses_only(void **state) {
    pool_fixture *f = *state;
    char *block = test_take(f->pool, 4 * MIB, f->a);
    char *between = test_take(f->pool, 2 * MIB, f->a);
    char *other = test_take(f->pool, 8 * MIB, f->a);
    test_sim_write(f->device, f->a, block, 4 * MIB, 100);
    test_sim_write(f->device, f->a, other, 8 * MIB, 100);
    test_give(f->pool, block, f->a);
    test_give(f->pool, other, f->a);
    other = test_take(f->pool, 8 * MIB, f->c); /* records the event */
    test_sim_write(f->device, f->a, NULL, 0, 5e6);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->b), block);
    test_sim_write(f->device, f->b, block, 4 * MIB, 100);
    EXPECT_OK(tn_stream_synchronize(f->device, f->b));
    assert_true(test_sim_get()->now_us() < 1e6);
    test_give(f->pool, block, f->b);
    test_give(f->pool, between, f->a);
    test_give(f->pool, other, f->c);
    pool_fixture_close(f);
}

/* Memory moves in stream order: the pages of a block that a long kernel still writes serve the
 * same stream at another address, and no one waits on the host. */
static void pages_move_while_their_last_use_still_runs(void **state) {
    pool_fixture *f = *state;
    char *first = test_take(f->pool, 32 * MIB, f->a);
    char *kept = test_take(f->pool, 2 * MIB, f->a);
    char *second = test_take(f->pool, 32 * MIB, f->a);
    char *last = test_take(f->pool, 2 * MIB, f->a);
    char *large;
    test_sim_write(f->device, f->a, first, 32 * MIB, 1e6);
    test_sim_write(f->device, f->a, second, 32 * MIB, 1e6);
    test_give(f->pool, first, f->a);
    test_give(f->pool, second, f->a);
    large = test_take(f->pool, 64 * MIB, f->a);
    assert_int_equal(test_pool_stats(f->pool).reserved_bytes, 68 * MIB);
    assert_int_equal(test_calls(f->device, TN_CALL_EVENT_SYNCHRONIZE), 0);
    assert_int_equal(test_calls(f->device, TN_CALL_MEM_UNMAP), 0);
    assert_true(test_sim_get()->now_us() < 1e6);
    test_sim_write(f->device, f->a, large, 64 * MIB, 10);
    EXPECT_OK(tn_stream_synchronize(f->device, f->a));
    EXPECT_OK(tn_pool_trim(f->pool, SIZE_MAX, NULL)); /* learns it; the old mappings are kept */
    (void)test_pool_stats(f->pool);
    assert_int_equal(test_calls(f->device, TN_CALL_MEM_UNMAP), 0);
    test_give(f->pool, large, f->a);
    test_give(f->pool, kept, f->a);
    test_give(f->pool, last, f->a);
    pool_fixture_close(f);
}

static void a_stream_made_anew_is_another_stream(void **state) {
    pool_fixture *f = *state;
    tn_stream stream = test_open_stream(f->device);
    char *block = test_take(f->pool, 4 * MIB, stream);
    test_sim_write(f->device, stream, block, 4 * MIB, 1000);
    test_give(f->pool, block, stream);
    EXPECT_OK(tn_stream_destroy(f->device, stream));
    stream = test_open_stream(f->device);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, stream), block);
    assert_int_equal(waits(f), 0);
    test_sim_write(f->device, stream, block, 4 * MIB, 10);
    test_give(f->pool, block, stream);
    EXPECT_OK(tn_stream_destroy(f->device, stream));
    pool_fixture_close(f);
}

static void many_streams_may_use_one_block(void **state) {
    pool_fixture *f = *state;
    tn_stream streams[40];
    char *block = test_take(f->pool, 4 * MIB, f->a);
    char *half;
    test_sim_write(f->device, f->a, block, 4 * MIB, 10);
    for (int i = 0; i < 40; i++) {
        streams[i] = test_open_stream(f->device);
        EXPECT_OK(tn_stream_wait(f->device, streams[i], f->a));
        test_sim_read(f->device, streams[i], block, 4 * MIB, 1000);
        EXPECT_OK(tn_record_use(block, streams[i]));
        EXPECT_OK(tn_record_use(block, streams[i]));
    }
    test_give(f->pool, block, f->a);
    half = test_take(f->pool, 2 * MIB, f->b);
    assert_int_equal(waits(f), 41);
    test_sim_write(f->device, f->b, half, 2 * MIB, 10);
    test_give(f->pool, half, f->b);
    block = test_take(f->pool, 4 * MIB, f->b);
    test_sim_write(f->device, f->b, block, 4 * MIB, 10);
    for (int i = 0; i < 40; i++)
        EXPECT_OK(tn_stream_destroy(f->device, streams[i]));
    test_give(f->pool, block, f->b);
    pool_fixture_close(f);
}

/* Streams of another library: the pool does not hear of their end, and looks them up by id. */
static tn_stream open_foreign(pool_fixture *f) {
    tn_stream stream = NULL;
    EXPECT_OK(tn__device_driver(f->device)->stream_create(tn__device_state(f->device), &stream));
    return stream;
}

static void end_foreign(pool_fixture *f, tn_stream stream) {
    EXPECT_OK(tn__device_driver(f->device)->stream_destroy(tn__device_state(f->device), stream));
}

static void a_foreign_stream_that_ended_is_waited_for_on_the_device(void **state) {
    pool_fixture *f = *state;
    tn_stream foreign = open_foreign(f);
    char *block = test_take(f->pool, 4 * MIB, foreign);
    char *again;
    test_sim_write(f->device, foreign, block, 4 * MIB, 1e5);
    test_give(f->pool, block, foreign);
    end_foreign(f, foreign); /* its work still runs; there is an event since the free */
    again = test_take(f->pool, 4 * MIB, f->a);
    assert_ptr_equal(again, block);
    assert_int_equal(waits(f), 1);
    test_sim_write(f->device, f->a, again, 4 * MIB, 10);
    test_give(f->pool, again, f->a);
    pool_fixture_close(f);
}

static void foreign_streams_are_forgotten_when_there_are_many(void **state) {
    pool_fixture *f = *state;
    long blocks_before = 0;
    for (int i = 0; i < 1000; i++) {
        tn_stream foreign = open_foreign(f);
        char *block = test_take(f->pool, 4 * MIB, foreign);
        test_sim_write(f->device, foreign, block, 4 * MIB, 0.1); /* it is soon over */
        test_give(f->pool, block, foreign);
        end_foreign(f, foreign);
        if (i == 200) blocks_before = tn__host_live_blocks();
    }
    assert_true(tn__host_live_blocks() <= blocks_before + 200);
    pool_fixture_close(f);
}

/* What another stream has waited for counts for the stream as it was, not for what it begins anew
 * after it was forgotten. */
static void a_forgotten_stream_that_is_used_again_is_waited_for(void **state) {
    pool_fixture *f = *state;
    tn_stream foreign = open_foreign(f);
    tn_stream others[70];
    void *kept = test_take(f->pool, 4 * MIB, f->a); /* so that stream a is not forgotten */
    char *block;
    for (int i = 0; i < 4; i++) {
        block = test_take(f->pool, 4 * MIB, foreign);
        test_sim_write(f->device, foreign, block, 4 * MIB, 10);
        test_give(f->pool, block, foreign);
        block = test_take(f->pool, 4 * MIB, f->a);
        test_give(f->pool, block, f->a);
    }
    EXPECT_OK(tn_device_synchronize(f->device));
    for (int i = 0; i < 70; i++) {
        others[i] = open_foreign(f);
        test_give(f->pool, test_take(f->pool, 1000, others[i]), others[i]);
    }
    block = test_take(f->pool, 4 * MIB, foreign);
    test_sim_write(f->device, foreign, block, 4 * MIB, 1e5);
    test_give(f->pool, block, foreign);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, f->a), block);
    test_sim_write(f->device, f->a, block, 4 * MIB, 10);
    test_give(f->pool, block, f->a);
    test_give(f->pool, kept, f->a);
    assert_int_equal(test_sim_get()->race_count(), 0);
    for (int i = 0; i < 70; i++)
        end_foreign(f, others[i]);
    end_foreign(f, foreign);
    pool_fixture_close(f);
}

/* NVIDIA/cub#373: the per-thread default stream has the same handle in every thread. */
typedef struct passed_on {
    pool_fixture *f;
    char *block;
} passed_on;

static void *use_in_thread(void *argument) {
    passed_on *passed = argument;
    pool_fixture *f = passed->f;
    passed->block = test_take(f->pool, 4 * MIB, PER_THREAD);
    test_sim_write(f->device, PER_THREAD, passed->block, 4 * MIB, 1000);
    test_give(f->pool, passed->block, PER_THREAD);
    return NULL;
}

static void default_streams_of_two_threads_are_two_streams(void **state) {
    passed_on passed = {*state, NULL};
    pool_fixture *f = *state;
    pthread_t thread;
    char *block;
    assert_int_equal(pthread_create(&thread, NULL, use_in_thread, &passed), 0);
    pthread_join(thread, NULL);
    block = test_take(f->pool, 4 * MIB, PER_THREAD);
    assert_ptr_equal(block, passed.block);
    assert_int_equal(waits(f), 1);
    test_sim_write(f->device, PER_THREAD, block, 4 * MIB, 10);
    test_give(f->pool, block, PER_THREAD);
    assert_ptr_equal(test_take(f->pool, 4 * MIB, PER_THREAD), block);
    assert_int_equal(waits(f), 1);
    test_give(f->pool, block, PER_THREAD);
    pool_fixture_close(f);
}

static void events_are_recorded_only_when_someone_waits(void **state) {
    pool_fixture *f = *state;
    for (int i = 0; i < 50; i++) {
        char *block = test_take(f->pool, 4 * MIB, f->a);
        EXPECT_OK(tn_record_use(block, f->b));
        EXPECT_OK(tn_record_use(block, f->c));
        test_give(f->pool, block, f->a);
        /* None for the free; two for the second and each later tn_alloc; the growth of the first
         * found no use to record. */
        assert_int_equal(test_calls(f->device, TN_CALL_EVENT_RECORD), 2 * i);
    }
    assert_int_equal(waits(f), 2 * 49);
    pool_fixture_close(f);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup(name, open_fixture)
    const struct CMUnitTest tests[] = {
        TEST(the_same_stream_reuses_at_once),
        TEST(another_stream_waits_exactly_once),
        TEST(a_stream_prefers_what_it_freed_itself),
        TEST(every_recorded_use_is_waited_for),
        TEST(a_use_that_was_not_recorded_is_a_race),
        TEST(a_block_freed_on_another_stream_waits_for_both),
        TEST(the_wait_is_for_the_blocks_own_uses_only),
        TEST(pages_move_while_their_last_use_still_runs),
        TEST(a_stream_made_anew_is_another_stream),
        TEST(many_streams_may_use_one_block),
        TEST(a_foreign_stream_that_ended_is_waited_for_on_the_device),
        TEST(foreign_streams_are_forgotten_when_there_are_many),
        TEST(a_forgotten_stream_that_is_used_again_is_waited_for),
        TEST(default_streams_of_two_threads_are_two_streams),
        TEST(events_are_recorded_only_when_someone_waits),
    };
    return cmocka_run_group_tests_name("sim/pool_streams", tests, NULL, NULL);
}
