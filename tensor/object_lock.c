/* What a lock does when more than one thread wants it: see object_lock.h. */
#include "object_lock.h"

#include "thread_barrier.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Locks are held for tens of nanoseconds, unless memory has to be got. */
enum { SPINS = 64 };

/* Times in a row that earn the favor, at first and at the most: a barrier costs some microseconds,
 * and the common way ten nanoseconds. */
enum { STREAK_FIRST = 32, FAVORS_COUNTED = 12 };

_Static_assert((TN__LOCK_SLOTS & (TN__LOCK_SLOTS - 1)) == 0, "slots are the low bits of an id");

tn__lock_word tn__locks[TN__LOCK_COUNT];

/* ---- sleeping ------------------------------------------------------------------------------ */

/* The kernel puts the thread to sleep only if it is still 1. */
static void sleep_on(atomic_int *held) {
    (void)syscall(SYS_futex, held, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
}

void tn__lock_wake(atomic_int *held) {
    (void)syscall(SYS_futex, held, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ---- the common way ------------------------------------------------------------------------ */

static int try_state(tn__lock_word *word) {
    int expected = 0;
    return atomic_compare_exchange_strong_explicit(&word->state, &expected, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static int spin(tn__lock_word *word) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&word->state, memory_order_relaxed) == 0 && try_state(word))
            return 1;
        __builtin_ia32_pause();
    }
    return 0;
}

/* Behind the barrier whoever lets the lock go sees this waiter and wakes one, or has let it go
 * visibly. */
static void wait_for_state(tn__lock_word *word) {
    if (spin(word)) return;
    atomic_fetch_add(&word->waiters, 1);
    if (atomic_load(&word->is_asymmetric)) tn__barrier_all_threads();
    while (!try_state(word))
        sleep_on(&word->state);
    atomic_fetch_sub(&word->waiters, 1);
}

/* ---- the favored way ----------------------------------------------------------------------- */

/* It is not inside after all; who has taken the favor away may be asleep till then. */
TN__SLOW void tn__lock_retreat(atomic_int *inside, atomic_int *waiters) {
    atomic_store(inside, 0);
    if (atomic_load(waiters)) tn__lock_wake(inside);
}

/* With the state held. One barrier for both: to be seen as a waiter, and that the favor is gone. */
static void take_favor_away(tn__lock_word *word, uintptr_t favored) {
    atomic_int *inside = &word->inside[favored & (TN__LOCK_SLOTS - 1)];
    atomic_store(&word->favored, 0);
    atomic_fetch_add(&word->waiters, 1);
    tn__barrier_all_threads();
    for (int i = 0; i < SPINS && atomic_load_explicit(inside, memory_order_acquire); i++)
        __builtin_ia32_pause();
    while (atomic_load_explicit(inside, memory_order_acquire))
        sleep_on(inside);
    atomic_fetch_sub(&word->waiters, 1);
    if (word->favors_lost < FAVORS_COUNTED) word->favors_lost++;
}

/* This thread's slot; TN__LOCK_SLOTS: all are other threads'. */
static uintptr_t slot_of(tn__lock_word *word, uintptr_t thread) {
    for (uintptr_t i = 0; i < TN__LOCK_SLOTS; i++) {
        if (word->slots[i] == 0) word->slots[i] = thread;
        if (word->slots[i] == thread) return i;
    }
    return TN__LOCK_SLOTS;
}

/* With the lock held. */
static void count_streak(tn__lock_word *word) {
    uintptr_t thread = tn__thread_id();
    if (word->last != thread) word->streak = 0;
    word->last = thread;
    if (++word->streak < (unsigned)STREAK_FIRST << word->favors_lost) return;
    uintptr_t slot = slot_of(word, thread);
    word->streak = 0;
    if (slot == TN__LOCK_SLOTS) return;
    TN_ASSERT((thread & (TN__LOCK_SLOTS - 1)) == 0);
    atomic_store_explicit(&word->favored, thread | slot, memory_order_relaxed);
}

/* Whoever comes this way later reads `favored` behind the state that this thread lets go. */
TN__SLOW void tn__lock_enter(tn__lock_word *word) {
    if (!try_state(word)) wait_for_state(word);
    uintptr_t favored = atomic_load_explicit(&word->favored, memory_order_relaxed);
    if (favored) take_favor_away(word, favored);
    word->held = &word->state;
    if (atomic_load_explicit(&word->is_asymmetric, memory_order_relaxed)) count_streak(word);
}

/* Given up by an exchange: a waiter that has not seen the change says that it waits before that. */
void tn__lock_prepare(unsigned lock) {
    tn__lock_word *word = &tn__locks[lock];
    if (!tn__barrier_is_there()) return;
    tn__lock(lock);
    if (atomic_load(&word->is_asymmetric)) {
        tn__unlock(lock);
        return;
    }
    atomic_store(&word->is_asymmetric, 1);
    word->is_plain = word->deferred == NULL;
    (void)atomic_exchange(&word->state, 0);
    if (atomic_load(&word->waiters)) tn__lock_wake(&word->state);
}

/* ---- what runs without the lock ------------------------------------------------------------ */

void tn__defer(unsigned lock, tn__deferred *item) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    item->next = tn__locks[lock].deferred;
    tn__locks[lock].deferred = item;
    tn__locks[lock].is_plain = 0;
}

static tn__deferred *oldest_first(tn__deferred *newest) {
    tn__deferred *reversed = NULL;
    while (newest) {
        tn__deferred *next = newest->next;
        newest->next = reversed;
        reversed = newest;
        newest = next;
    }
    return reversed;
}

static void run(tn__deferred *newest) {
    tn__deferred *item = oldest_first(newest);
    tn__saved_error error;
    tn__error_save(&error);
    while (item) {
        tn__deferred *next = item->next;
        item->run(item);
        item = next;
    }
    tn__error_restore(&error);
}

TN__SLOW void tn__lock_leave(tn__lock_word *word) {
    tn__deferred *deferred = word->deferred;
    atomic_int *held = word->held;
    word->deferred = NULL;
    word->is_plain = atomic_load(&word->is_asymmetric);
    (void)atomic_exchange(held, 0);
    if (atomic_load(&word->waiters)) tn__lock_wake(held);
    if (deferred) run(deferred);
}
