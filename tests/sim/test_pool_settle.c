/* Pools that are asked before idle memory of theirs goes back: by a trim, a lower limit, and
 * another pool that is short. */
#include <pthread.h>
#include <semaphore.h>

#include "pool_settle.h"
#include "tenure_pool.h"
#include "test_pools.h"

#define MIB MIB_BYTES

static int answer;
static int asked;

static int settle(void) {
    asked++;
    return answer;
}

typedef struct fixture {
    tn_device *device;
    tn_pool *asks;
    tn_pool *other;
} fixture;

static void open_fixture(fixture *f, tn_pool_backing backing) {
    f->device = test_open_sim(128 * MIB, 0);
    f->asks = test_open_pool(f->device, backing, 0);
    f->other = test_open_pool(f->device, backing, 0);
    tn__pool_settle_set(f->asks, settle);
    asked = 0;
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_pool_destroy(f->asks));
    EXPECT_OK(tn_pool_destroy(f->other));
    test_close_sim(f->device);
}

static void leave_idle(fixture *f, size_t bytes) {
    test_give(f->asks, test_take(f->asks, bytes, NULL), NULL);
    assert_true(test_pool_stats(f->asks).cached_bytes >= bytes);
}

static void a_trim_asks(void **state) {
    size_t released = 7;
    fixture f;
    (void)state;
    open_fixture(&f, TN_BACKING_VMM);
    leave_idle(&f, 32 * MIB);
    answer = 0;
    EXPECT_OK(tn_pool_trim(f.asks, 0, &released));
    assert_int_equal(released, 0);
    assert_int_equal(test_pool_stats(f.asks).reserved_bytes, 32 * MIB);
    answer = 1;
    EXPECT_OK(tn_pool_trim(f.asks, 0, &released));
    assert_int_equal(released, 32 * MIB);
    assert_int_equal(asked, 2);
    close_fixture(&f);
}

static void a_lower_limit_asks(void **state) {
    fixture f;
    (void)state;
    open_fixture(&f, TN_BACKING_VMM);
    leave_idle(&f, 32 * MIB);
    answer = 0;
    EXPECT_STATUS(tn_pool_limit_set(f.asks, 16 * MIB), TN_IN_USE);
    EXPECT_OK(tn_pool_limit_set(f.asks, 0));
    answer = 1;
    EXPECT_OK(tn_pool_limit_set(f.asks, 16 * MIB));
    assert_int_equal(test_pool_stats(f.asks).reserved_bytes, 0);
    close_fixture(&f);
}

static void another_pool_that_is_short_asks(void **state) {
    static const tn_pool_backing backings[] = {TN_BACKING_VMM, TN_BACKING_PLAIN};
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        void *block = NULL;
        open_fixture(&f, backings[i]);
        test_give(f.other, test_take(f.other, 100 * MIB, NULL), NULL);
        EXPECT_OK(tn_pool_trim(f.other, 0, NULL));
        assert_int_equal(asked, 0);
        leave_idle(&f, 64 * MIB);
        answer = 0;
        EXPECT_STATUS(tn_alloc(f.other, 100 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
        assert_true(asked > 0);
        answer = 1;
        block = test_take(f.other, 100 * MIB, NULL);
        test_give(f.other, block, NULL);
        close_fixture(&f);
    }
}

/* Nothing idle is nothing to ask for; and in a no-wait time nobody is asked. */
static void it_is_asked_only_where_it_helps(void **state) {
    fixture f;
    void *kept;
    void *block = NULL;
    (void)state;
    open_fixture(&f, TN_BACKING_VMM);
    answer = 1;
    kept = test_take(f.asks, 64 * MIB, NULL);
    EXPECT_STATUS(tn_alloc(f.other, 100 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(asked, 0);
    test_give(f.asks, kept, NULL);
    EXPECT_OK(tn_no_wait_begin());
    EXPECT_OK(tn_pool_trim(f.asks, 0, NULL));
    assert_int_equal(asked, 0);
    EXPECT_OK(tn_no_wait_end());
    EXPECT_OK(tn_pool_trim(f.asks, 0, NULL));
    assert_int_equal(asked, 1);
    close_fixture(&f);
}

/* ---- while it is asked ----------------------------------------------------------------------- */

static tn_pool *trimmed;

static int settle_while_another_thread_trims(void) {
    tn__pool_settle_set(trimmed, NULL);
    EXPECT_OK(tn_pool_trim(trimmed, 0, NULL));
    return 1;
}

/* What the pool that is short is about to take has gone back to the driver before: it is there. */
static void memory_that_another_thread_gives_back_is_found(void **state) {
    static const tn_pool_backing backings[] = {TN_BACKING_VMM, TN_BACKING_PLAIN};
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        open_fixture(&f, backings[i]);
        leave_idle(&f, 64 * MIB);
        trimmed = f.asks;
        tn__pool_settle_set(f.asks, settle_while_another_thread_trims);
        test_give(f.other, test_take(f.other, 100 * MIB, NULL), NULL);
        close_fixture(&f);
    }
}

typedef struct freeing {
    fixture f;
    tn_stream reader; /* that nobody names */
    void *block;
    void *between; /* it and what is idle, which would be one otherwise */
} freeing;
static freeing late;

/* After the wait for the devices, and before the pool has seen that it is over. */
static int settle_before_another_thread_frees(void) {
    EXPECT_OK(tn_device_synchronize(late.f.device));
    if (!late.block) return 1;
    test_sim_read(late.f.device, late.reader, late.block, 32 * MIB, 1000);
    test_give(late.f.asks, late.block, NULL);
    late.block = NULL;
    return 1;
}

static void open_freeing(void) {
    open_fixture(&late.f, TN_BACKING_VMM);
    late.reader = test_open_foreign_stream(late.f.device);
    late.block = test_take(late.f.asks, 32 * MIB, NULL);
    late.between = test_take(late.f.asks, 2 * MIB, NULL);
    leave_idle(&late.f, 32 * MIB);
    tn__pool_settle_set(late.f.asks, settle_before_another_thread_frees);
}

static void close_freeing(void) {
    test_give(late.f.asks, late.between, NULL);
    test_close_foreign_stream(late.f.device, late.reader);
    close_fixture(&late.f);
}

/* What is freed since was not waited for: it stays until the next time. */
static void memory_that_is_freed_meanwhile_stays(void **state) {
    size_t released = 0;
    void *block = NULL;
    (void)state;
    open_freeing();
    EXPECT_OK(tn_pool_trim(late.f.asks, 0, &released));
    assert_int_equal(released, 32 * MIB);
    assert_int_equal(test_pool_stats(late.f.asks).reserved_bytes, 34 * MIB);
    EXPECT_OK(tn_pool_trim(late.f.asks, 0, &released));
    assert_int_equal(released, 32 * MIB);
    close_freeing();
    open_freeing();
    EXPECT_STATUS(tn_pool_limit_set(late.f.asks, 16 * MIB), TN_IN_USE);
    EXPECT_OK(tn_pool_limit_set(late.f.asks, 16 * MIB));
    close_freeing();
    open_freeing();
    EXPECT_STATUS(tn_alloc(late.f.other, 120 * MIB, NULL, NULL, &block), TN_OUT_OF_DEVICE_MEMORY);
    test_give(late.f.other, test_take(late.f.other, 120 * MIB, NULL), NULL);
    close_freeing();
}

/* ---- threads' caches ------------------------------------------------------------------------- */

typedef struct caching {
    fixture f;
    tn_stream reader;
    sem_t is_there, may_free, is_free;
} caching;
static caching cached;

/* Its cache hears of no operation of others while it waits. */
static void *take_and_free_later(void *unused) {
    void *block = NULL;
    for (int i = 0; i < 3; i++) {
        if (block) test_give(cached.f.asks, block, NULL);
        block = test_take(cached.f.asks, 2 * MIB, NULL);
    }
    sem_post(&cached.is_there);
    sem_wait(&cached.may_free);
    test_sim_read(cached.f.device, cached.reader, block, 2 * MIB, 1000);
    test_give(cached.f.asks, block, NULL);
    sem_post(&cached.is_free);
    return unused;
}

static int settle_before_a_cache_is_filled(void) {
    EXPECT_OK(tn_device_synchronize(cached.f.device));
    sem_post(&cached.may_free);
    sem_wait(&cached.is_free);
    return 1;
}

/* However many operations this thread had: the other's block is freed after all of them. */
static void what_another_thread_caches_meanwhile_stays(void **state) {
    pthread_t thread;
    (void)state;
    open_fixture(&cached.f, TN_BACKING_VMM);
    cached.reader = test_open_foreign_stream(cached.f.device);
    assert_int_equal(sem_init(&cached.is_there, 0, 0) | sem_init(&cached.may_free, 0, 0), 0);
    assert_int_equal(sem_init(&cached.is_free, 0, 0), 0);
    leave_idle(&cached.f, 64 * MIB); /* a peak below which nobody stops the caches */
    assert_int_equal(pthread_create(&thread, NULL, take_and_free_later, NULL), 0);
    sem_wait(&cached.is_there);
    for (int i = 0; i < 1000; i++)
        test_give(cached.f.asks, test_take(cached.f.asks, 512, NULL), NULL);
    tn__pool_settle_set(cached.f.asks, settle_before_a_cache_is_filled);
    EXPECT_OK(tn_pool_trim(cached.f.asks, 0, NULL));
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(test_pool_stats(cached.f.asks).reserved_bytes >= 2 * MIB);
    tn__pool_settle_set(cached.f.asks, NULL);
    sem_destroy(&cached.is_there);
    sem_destroy(&cached.may_free);
    sem_destroy(&cached.is_free);
    EXPECT_OK(tn_device_synchronize(cached.f.device));
    test_close_foreign_stream(cached.f.device, cached.reader);
    close_fixture(&cached.f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trim_asks),
        cmocka_unit_test(a_lower_limit_asks),
        cmocka_unit_test(another_pool_that_is_short_asks),
        cmocka_unit_test(it_is_asked_only_where_it_helps),
        cmocka_unit_test(memory_that_another_thread_gives_back_is_found),
        cmocka_unit_test(memory_that_is_freed_meanwhile_stays),
        cmocka_unit_test(what_another_thread_caches_meanwhile_stays),
    };
    return cmocka_run_group_tests_name("sim/pool_settle", tests, NULL, NULL);
}
