/* The handle table: values that never match again, addresses that stay, memory given back. */
#include "test_support.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "handle_table.h"
#include "host_alloc.h"

static int objects[4];

enum { LOCK = 3 };

static uint64_t make(tn__handle_kind kind, void *object) {
    uint64_t value = 0;
    tn__lock(LOCK);
    EXPECT_OK(tn__handle_create(kind, object, LOCK, &value));
    tn__unlock(LOCK);
    assert_int_not_equal(value, 0);
    return value;
}

static void end(uint64_t value) {
    tn__lock(LOCK);
    tn__handle_destroy(value);
    tn__unlock(LOCK);
}

static void expect_stale(uint64_t value, tn__handle_kind kind) {
    void *object = NULL;
    EXPECT_STATUS(tn__handle_acquire(value, kind, &object), TN_STALE_HANDLE);
    assert_null(object);
}

static void expect_alive(uint64_t value, tn__handle_kind kind, void *expected) {
    void *object = NULL;
    EXPECT_OK(tn__handle_acquire(value, kind, &object));
    assert_ptr_equal(object, expected);
    tn__unlock(LOCK);
}

static void a_handle_names_its_object_until_it_ends(void **state) {
    (void)state;
    uint64_t value = make(TN__HANDLE_TENSOR, &objects[0]);
    expect_alive(value, TN__HANDLE_TENSOR, &objects[0]);
    assert_int_equal(tn__handle_count(), 1);
    end(value);
    expect_stale(value, TN__HANDLE_TENSOR);
    EXPECT_ERROR_HAS("tensor 0x");
    EXPECT_ERROR_HAS("is not alive");
    assert_int_equal(tn__handle_count(), 0);
}

static void none_and_other_kinds_are_stale(void **state) {
    (void)state;
    uint64_t value = make(TN__HANDLE_SCOPE, &objects[0]);
    expect_stale(0, TN__HANDLE_SCOPE);
    EXPECT_ERROR_HAS("no scope was given");
    expect_stale(value, TN__HANDLE_TENSOR);
    expect_stale(value, TN__HANDLE_LEASE);
    expect_stale(value ^ ((uint64_t)1 << 32), TN__HANDLE_SCOPE);
    expect_stale(value + 1, TN__HANDLE_SCOPE);
    expect_stale(UINT64_MAX, TN__HANDLE_SCOPE);
    tn__lock(LOCK);
    assert_ptr_equal(tn__handle_peek(value, TN__HANDLE_SCOPE, LOCK), &objects[0]);
    tn__unlock(LOCK);
    assert_null(tn__handle_peek(value, TN__HANDLE_SCOPE, 4)); /* another object's lock */
    end(value);
}

static void a_recycled_slot_has_another_value(void **state) {
    (void)state;
    uint64_t keep = make(TN__HANDLE_SCOPE, &objects[3]);
    uint64_t first = make(TN__HANDLE_TENSOR, &objects[0]);
    end(first);
    uint64_t second = make(TN__HANDLE_TENSOR, &objects[1]);
    assert_int_equal((uint32_t)first, (uint32_t)second); /* the same slot and kind */
    assert_int_equal(second >> 32, (first >> 32) + 1);   /* the next generation */
    expect_stale(first, TN__HANDLE_TENSOR);
    expect_alive(second, TN__HANDLE_TENSOR, &objects[1]);
    end(second);
    end(keep);
}

static void values_stay_unique_when_the_table_has_been_given_back(void **state) {
    (void)state;
    long blocks = tn__host_live_blocks();
    uint64_t first = make(TN__HANDLE_TENSOR, &objects[0]);
    assert_int_equal(tn__host_live_blocks(), blocks + 1);
    end(first);
    assert_int_equal(tn__host_live_blocks(), blocks); /* no handle, no memory */
    uint64_t second = make(TN__HANDLE_TENSOR, &objects[0]);
    assert_true(second != first);
    expect_stale(first, TN__HANDLE_TENSOR);
    end(second);
}

/* 64 + 128 + ... : ten chunks. */
static void thousands_grow_the_table_and_all_stay_alive(void **state) {
    (void)state;
    enum { COUNT = 40000 };
    static uint64_t values[COUNT];
    static char marks[COUNT];
    for (int i = 0; i < COUNT; i++)
        values[i] = make(TN__HANDLE_LEASE, &marks[i]);
    assert_int_equal(tn__handle_count(), COUNT);
    for (int i = 0; i < COUNT; i++)
        expect_alive(values[i], TN__HANDLE_LEASE, &marks[i]);
    for (int i = 0; i < COUNT; i += 2)
        end(values[i]);
    for (int i = 1; i < COUNT; i += 2)
        expect_alive(values[i], TN__HANDLE_LEASE, &marks[i]);
    for (int i = 0; i < COUNT; i += 2)
        expect_stale(values[i], TN__HANDLE_LEASE);
    for (int i = 1; i < COUNT; i += 2)
        end(values[i]);
    assert_int_equal(tn__handle_count(), 0);
}

static void a_slot_whose_generations_are_used_up_is_retired(void **state) {
    (void)state;
    tn__handle_start_at(UINT32_MAX - 1);
    uint64_t before_last = make(TN__HANDLE_TENSOR, &objects[0]);
    end(before_last);
    uint64_t last = make(TN__HANDLE_TENSOR, &objects[0]);
    assert_int_equal(last >> 32, UINT32_MAX);
    end(last);
    uint64_t next = make(TN__HANDLE_TENSOR, &objects[0]);
    assert_int_not_equal((uint32_t)next, (uint32_t)last); /* another slot */
    expect_stale(before_last, TN__HANDLE_TENSOR);
    expect_stale(last, TN__HANDLE_TENSOR);
    end(next);
    tn__handle_start_at(1);
}

static void a_suspended_handle_keeps_its_slot(void **state) {
    (void)state;
    uint64_t first = make(TN__HANDLE_LEASE, &objects[0]);
    tn__lock(LOCK);
    tn__handle_slot *slot = tn__handle_slot_of(first);
    tn__handle_suspend(slot);
    tn__unlock(LOCK);
    expect_stale(first, TN__HANDLE_LEASE);
    expect_stale(first + ((uint64_t)1 << 32), TN__HANDLE_LEASE); /* what it will get */
    assert_int_equal(tn__handle_count(), 0);
    uint64_t other = make(TN__HANDLE_LEASE, &objects[1]);
    assert_int_not_equal((uint32_t)other, (uint32_t)first);
    tn__lock(LOCK);
    uint64_t second = tn__handle_resume(slot, first);
    tn__unlock(LOCK);
    assert_int_equal(second, first + ((uint64_t)1 << 32));
    expect_stale(first, TN__HANDLE_LEASE);
    expect_alive(second, TN__HANDLE_LEASE, &objects[0]);
    assert_int_equal(tn__handle_count(), 2);
    end(second);
    end(other);
    assert_int_equal(tn__handle_count(), 0);
}

/* A slot that was resumed up to the last generation gives no other value, and is retired. */
static void a_suspended_slot_that_is_used_up_is_retired(void **state) {
    (void)state;
    tn__handle_start_at(UINT32_MAX - 1);
    uint64_t first = make(TN__HANDLE_LEASE, &objects[0]);
    tn__lock(LOCK);
    tn__handle_slot *slot = tn__handle_slot_of(first);
    tn__handle_suspend(slot);
    uint64_t last = tn__handle_resume(slot, first);
    assert_int_equal(last >> 32, UINT32_MAX);
    tn__handle_suspend(slot);
    assert_int_equal(tn__handle_resume(slot, last), 0);
    tn__unlock(LOCK);
    expect_stale(last, TN__HANDLE_LEASE);
    end(last);
    uint64_t next = make(TN__HANDLE_LEASE, &objects[1]);
    assert_int_not_equal((uint32_t)next, (uint32_t)last);
    end(next);
    tn__handle_start_at(1);
}

static void without_host_memory_nothing_is_made(void **state) {
    (void)state;
    long blocks = tn__host_live_blocks();
    uint64_t value = 7;
    tn__host_alloc_fault(1, 0);
    tn__lock(0);
    tn_status status = tn__handle_create(TN__HANDLE_SCOPE, &objects[0], 0, &value);
    tn__unlock(0);
    EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    assert_int_equal(value, 7);
    assert_int_equal(tn__handle_count(), 0);
    assert_int_equal(tn__host_live_blocks(), blocks);
}

/* Each thread makes and ends handles; none ever sees another thread's object. */
static void *churn(void *argument) {
    uint64_t lock = (uint64_t)(uintptr_t)argument;
    char marks[8];
    for (int round = 0; round < 500; round++) {
        uint64_t values[8];
        for (int i = 0; i < 8; i++) {
            tn__lock((unsigned)lock);
            tn_status status =
                tn__handle_create(TN__HANDLE_LEASE, &marks[i], (unsigned)lock, &values[i]);
            tn__unlock((unsigned)lock);
            if (status != TN_OK) return (void *)"create failed";
        }
        for (int i = 0; i < 8; i++) {
            void *object;
            if (tn__handle_acquire(values[i], TN__HANDLE_LEASE, &object))
                return (void *)"not alive";
            if (object != &marks[i]) return (void *)"another thread's object";
            tn__handle_destroy(values[i]);
            tn__unlock((unsigned)lock);
            if (!tn__handle_acquire(values[i], TN__HANDLE_LEASE, &object))
                return (void *)"not stale";
        }
    }
    return NULL;
}

static void threads_share_the_table(void **state) {
    (void)state;
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, churn, (void *)(i / 2)), 0);
    }
    for (int i = 0; i < 4; i++) {
        void *failure = NULL;
        assert_int_equal(pthread_join(threads[i], &failure), 0);
        if (failure) fail_msg("%s", (const char *)failure);
    }
    assert_int_equal(tn__handle_count(), 0);
}

/* ---- locks ---------------------------------------------------------------------------------- */

enum { WAITERS = 3, SLEEPS = 100, INCREMENTS = 20000 };

/* One lock lets go by an exchange, the other one relies on the barrier, if there is one. */
static const unsigned plain_lock = 8, prepared_lock = 9;

typedef struct guarded {
    unsigned lock;
    int times;
    int count;
} guarded;

static void *increment(void *argument) {
    guarded *g = argument;
    for (int i = 0; i < g->times; i++) {
        tn__lock(g->lock);
        g->count++;
        tn__unlock(g->lock);
    }
    return NULL;
}

static void start(pthread_t threads[WAITERS], guarded *g) {
    for (int i = 0; i < WAITERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, increment, g), 0);
}

static void join_all(const pthread_t threads[WAITERS]) {
    for (int i = 0; i < WAITERS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

/* All of them have given up spinning when the lock is let go. */
static void who_sleeps_is_woken(void **state) {
    (void)state;
    tn__lock_prepare(prepared_lock);
    for (int round = 0; round < SLEEPS; round++) {
        guarded g = {round % 2 ? plain_lock : prepared_lock, 1, 0};
        pthread_t threads[WAITERS];
        tn__lock(g.lock);
        start(threads, &g);
        while (atomic_load(&tn__locks[g.lock].waiters) < WAITERS)
            sched_yield();
        assert_int_equal(g.count, 0);
        tn__unlock(g.lock);
        join_all(threads);
        assert_int_equal(g.count, WAITERS);
        assert_int_equal(atomic_load(&tn__locks[g.lock].waiters), 0);
    }
}

static void one_thread_at_a_time_is_in(void **state) {
    (void)state;
    tn__lock_prepare(prepared_lock);
    for (int i = 0; i < 2; i++) {
        guarded g = {i ? plain_lock : prepared_lock, INCREMENTS, 0};
        pthread_t threads[WAITERS];
        start(threads, &g);
        join_all(threads);
        assert_int_equal(g.count, WAITERS * INCREMENTS);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_handle_names_its_object_until_it_ends),
        cmocka_unit_test(none_and_other_kinds_are_stale),
        cmocka_unit_test(a_recycled_slot_has_another_value),
        cmocka_unit_test(values_stay_unique_when_the_table_has_been_given_back),
        cmocka_unit_test(thousands_grow_the_table_and_all_stay_alive),
        cmocka_unit_test(a_slot_whose_generations_are_used_up_is_retired),
        cmocka_unit_test(a_suspended_handle_keeps_its_slot),
        cmocka_unit_test(a_suspended_slot_that_is_used_up_is_retired),
        cmocka_unit_test(without_host_memory_nothing_is_made),
        cmocka_unit_test(threads_share_the_table),
        cmocka_unit_test(who_sleeps_is_woken),
        cmocka_unit_test(one_thread_at_a_time_is_in),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
