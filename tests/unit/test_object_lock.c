/* The locks of objects: who is favored and when, that a favor which is taken away lets nobody in
 * beside its holder, and random threads in bursts. Replay: the seed is the test's argument.
 */
#include "test_support.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "object_lock.h"
#include "thread_barrier.h"

/* Nobody else's in this program; locks keep what they have seen of threads. */
enum { FIRST, AGAIN, WAITED, MANY, DEFERRED, RANDOM, DUEL, UNPREPARED };

enum { STREAK = 32, THREADS = 6, BURSTS = 400, BURST_MAX = 150, FAVORS_TAKEN = 10000 };

static uint64_t seed = 1;

static void take_and_let_go(unsigned lock, int times) {
    for (int i = 0; i < times; i++) {
        tn__lock(lock);
        tn__unlock(lock);
    }
}

static int is_favored(unsigned lock) {
    uintptr_t id = atomic_load(&tn__locks[lock].favored) & ~(uintptr_t)(TN__LOCK_SLOTS - 1);
    return id == tn__thread_id();
}

static void *take_once(void *lock) {
    take_and_let_go((unsigned)(uintptr_t)lock, 1);
    return NULL;
}

static void let_another_take(unsigned lock) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, take_once, (void *)(uintptr_t)lock), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
}

/* Takes it till it is favored; the number of times. */
static int times_to_favor(unsigned lock) {
    int times = 0;
    while (!is_favored(lock) && times < 1 << 20) {
        take_and_let_go(lock, 1);
        times++;
    }
    return times;
}

/* 0: there is no barrier, as under the thread sanitizer, and then nobody may be favored. */
static int expect_favors(unsigned lock) {
    tn__lock_prepare(lock);
    if (tn__barrier_is_there()) return 1;
    take_and_let_go(lock, 4 * STREAK);
    assert_false(is_favored(lock));
    return 0;
}

/* To prepare a lock takes it once, before that may favor anybody. */
static void who_keeps_taking_a_lock_is_favored(void **state) {
    (void)state;
    if (!expect_favors(FIRST)) return;
    take_and_let_go(FIRST, STREAK - 1);
    assert_false(is_favored(FIRST));
    take_and_let_go(FIRST, 1);
    assert_true(is_favored(FIRST));
    tn__lock(FIRST);
    assert_int_equal(atomic_load(&tn__locks[FIRST].state), 0); /* without the common way */
    tn__unlock(FIRST);
}

static void each_favor_lost_makes_the_next_harder_to_get(void **state) {
    (void)state;
    if (!expect_favors(AGAIN)) return;
    for (int lost = 0; lost < 5; lost++) {
        assert_int_equal(times_to_favor(AGAIN), STREAK << lost);
        let_another_take(AGAIN);
        assert_false(is_favored(AGAIN));
    }
}

static void a_lock_that_is_not_prepared_favors_nobody(void **state) {
    (void)state;
    take_and_let_go(UNPREPARED, 4 * STREAK);
    assert_int_equal(atomic_load(&tn__locks[UNPREPARED].favored), 0);
}

/* The other thread has taken the favor away, and sleeps till its holder is out. */
static void a_holder_that_loses_its_favor_still_holds_the_lock(void **state) {
    (void)state;
    tn__lock_prepare(WAITED);
    for (int round = 0; round < 30; round++) {
        pthread_t thread;
        take_and_let_go(WAITED, STREAK << (round % 3));
        tn__lock(WAITED);
        assert_int_equal(pthread_create(&thread, NULL, take_once, (void *)(uintptr_t)WAITED), 0);
        while (atomic_load(&tn__locks[WAITED].waiters) == 0)
            sched_yield();
        tn__unlock(WAITED);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(atomic_load(&tn__locks[WAITED].waiters), 0);
    }
}

/* Threads that live at the same time have ids of their own: of more than there are slots, the last
 * ones go the common way for ever. */
static void *be_favored(void *barrier) {
    uintptr_t times = (uintptr_t)times_to_favor(MANY);
    pthread_barrier_wait(barrier); /* the next one begins */
    pthread_barrier_wait(barrier);
    return (void *)times;
}

static void a_lock_favors_so_many_threads_and_no_more(void **state) {
    pthread_t threads[TN__LOCK_SLOTS];
    pthread_barrier_t barriers[TN__LOCK_SLOTS];
    (void)state;
    if (!expect_favors(MANY)) return;
    for (int i = 0; i < TN__LOCK_SLOTS; i++) {
        pthread_barrier_init(&barriers[i], NULL, 2);
        assert_int_equal(pthread_create(&threads[i], NULL, be_favored, &barriers[i]), 0);
        pthread_barrier_wait(&barriers[i]);
    }
    take_and_let_go(MANY, STREAK << 13);
    assert_int_equal(atomic_load(&tn__locks[MANY].favored), 0);
    for (int i = 0; i < TN__LOCK_SLOTS; i++) {
        void *times = NULL;
        pthread_barrier_wait(&barriers[i]);
        assert_int_equal(pthread_join(threads[i], &times), 0);
        assert_int_equal((uintptr_t)times, STREAK << i);
        pthread_barrier_destroy(&barriers[i]);
    }
}

static void count_run(tn__deferred *self) {
    int *runs = (int *)(self + 1);
    assert_int_equal(atomic_load(&tn__locks[DEFERRED].state), 0);
    (*runs)++;
    take_and_let_go(DEFERRED, 1); /* it is free */
}

static void what_is_deferred_runs_without_the_lock(void **state) {
    struct {
        tn__deferred item;
        int runs;
    } work = {{NULL, count_run}, 0};
    (void)state;
    tn__lock_prepare(DEFERRED);
    for (int i = 1; i <= 3 * STREAK; i++) {
        tn__lock(DEFERRED);
        tn__defer(DEFERRED, &work.item);
        assert_int_equal(work.runs, i - 1);
        tn__unlock(DEFERRED);
        assert_int_equal(work.runs, i);
        take_and_let_go(DEFERRED, 1);
        assert_int_equal(work.runs, i);
    }
}

/* ---- random threads ------------------------------------------------------------------------- */

static struct {
    pthread_t inside; /* the thread that is in, if there is one */
    int is_inside;
    long count;
    int failures;
} guarded;

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 27);
}

static void enter_once(int lingers) {
    tn__lock(RANDOM);
    guarded.failures += guarded.is_inside;
    guarded.is_inside = 1;
    guarded.inside = pthread_self();
    guarded.count++;
    if (lingers) sched_yield();
    guarded.failures += !pthread_equal(guarded.inside, pthread_self());
    guarded.is_inside = 0;
    tn__unlock(RANDOM);
}

/* Bursts long enough to be favored for, and pauses in which others are. */
static void *burst(void *number) {
    uint64_t state = seed * 64 + (uintptr_t)number;
    long entered = 0;
    for (int i = 0; i < BURSTS; i++) {
        int times = (int)(next_random(&state) % BURST_MAX);
        for (int j = 0; j < times; j++)
            enter_once(next_random(&state) % 64 == 0);
        entered += times;
        if (next_random(&state) % 4 == 0) sched_yield();
        if (next_random(&state) % 16 == 0) { /* what favors were lost is forgotten */
            tn__lock(RANDOM);
            tn__locks[RANDOM].favors_lost = 0;
            tn__unlock(RANDOM);
        }
    }
    return (void *)(uintptr_t)entered;
}

static void random_bursts_are_one_at_a_time(void **state) {
    pthread_t threads[THREADS];
    long entered = 0;
    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    tn__lock_prepare(RANDOM);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, burst, (void *)i), 0);
    for (int i = 0; i < THREADS; i++) {
        void *own = NULL;
        assert_int_equal(pthread_join(threads[i], &own), 0);
        entered += (long)(uintptr_t)own;
    }
    assert_int_equal(guarded.failures, 0);
    assert_int_equal(guarded.count, entered);
    assert_int_equal(atomic_load(&tn__locks[RANDOM].waiters), 0);
}

/* ---- a duel --------------------------------------------------------------------------------- */

static struct {
    atomic_int is_over;
    int is_inside, failures;
    long count;
} duel;

static void step_in(void) {
    tn__lock(DUEL);
    duel.failures += duel.is_inside;
    duel.is_inside = 1;
    duel.count++;
    atomic_signal_fence(memory_order_seq_cst);
    duel.is_inside = 0;
    tn__locks[DUEL].favors_lost = 0; /* so that it is soon favored again */
    tn__unlock(DUEL);
}

static void *stay_favored(void *steps) {
    while (!atomic_load_explicit(&duel.is_over, memory_order_relaxed)) {
        step_in();
        ++*(long *)steps;
    }
    return NULL;
}

/* One comes and goes as fast as it can while the other takes its favor away again and again: now
 * and then both are at the door in the same few nanoseconds. */
static void a_favor_is_taken_away_at_any_moment(void **state) {
    pthread_t thread;
    long others = 0;
    (void)state;
    tn__lock_prepare(DUEL);
    assert_int_equal(pthread_create(&thread, NULL, stay_favored, &others), 0);
    for (int i = 0; i < FAVORS_TAKEN; i++) {
        for (int j = 0; j < 100 && !atomic_load(&tn__locks[DUEL].favored); j++)
            __builtin_ia32_pause();
        step_in();
    }
    atomic_store(&duel.is_over, 1);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(duel.failures, 0);
    assert_int_equal(duel.count, others + FAVORS_TAKEN);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_keeps_taking_a_lock_is_favored),
        cmocka_unit_test(each_favor_lost_makes_the_next_harder_to_get),
        cmocka_unit_test(a_lock_that_is_not_prepared_favors_nobody),
        cmocka_unit_test(a_holder_that_loses_its_favor_still_holds_the_lock),
        cmocka_unit_test(a_lock_favors_so_many_threads_and_no_more),
        cmocka_unit_test(what_is_deferred_runs_without_the_lock),
        cmocka_unit_test(random_bursts_are_one_at_a_time),
        cmocka_unit_test(a_favor_is_taken_away_at_any_moment),
    };
    if (argc > 1) seed = strtoull(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
