/* The locks of scopes, tensors and leases: pools are spread over them. Not recursive; nobody holds
 * two.
 *
 *     state ----- the common way: an atomic exchange to lock, none to unlock
 *     favored --- one thread that has a way of its own, without any
 *        inside[slot] ---- that it is in
 *
 * A lease takes its lock twice, and each locked instruction costs a third of what it may cost at
 * all. Nearly always the same thread takes a lock again and again. Who has done so for a while is
 * favored: it says that it is inside, looks whether it is still favored, and is in. Any other
 * thread takes the common way first. If it finds somebody favored there it takes the favor away,
 * makes every thread of the process pass a barrier (thread_barrier.h), and waits till the one that
 * was favored is not inside. So either that one has seen that it is not favored any more, or it has
 * been seen inside. Each favor that is taken away makes the next one twice as hard to get, so that
 * threads which take turns soon go the common way only.
 *
 * Who lets a lock go writes that, and then looks whether somebody waits; who waits says so, makes
 * every thread pass a barrier, and then looks whether the lock is free. So one of the two sees the
 * other. Where there is no such barrier, letting go is an exchange as well, and nobody is favored.
 * Whoever has to wait long sleeps in the kernel (object_lock.c).
 *
 * Invariants: who holds a lock has set `held`, of which it alone knows; inside[i] is written by one
 * thread only, so that what that writes late is never taken for another's.
 */
#ifndef TENURE_OBJECT_LOCK_H
#define TENURE_OBJECT_LOCK_H

#include <stdatomic.h>
#include <stdint.h>

#include "error.h"

enum {
    TN__LOCK_COUNT = 16,
    TN__LOCK_SLOTS = 4 /* threads that one lock may favor, ever; fewer than the low bits of ids */
};

/* What must run without the lock, such as functions of the program: tn__unlock runs it, in the
 * order in which it was put in, right after it has given the lock up. The caller holds the lock and
 * keeps the item's memory, which `run` may free. This thread's last error stays what it was. */
typedef struct tn__deferred {
    struct tn__deferred *next;
    void (*run)(struct tn__deferred *self);
} tn__deferred;
void tn__defer(unsigned lock, tn__deferred *item);

typedef struct tn__lock_word {
    _Alignas(64) atomic_int state;
    atomic_int waiters;        /* threads that sleep, or are about to */
    _Atomic uintptr_t favored; /* its id and its slot; 0: none. Changed under the common lock */
    atomic_int inside[TN__LOCK_SLOTS];
    atomic_int is_asymmetric; /* a barrier stands in for the exchange (tn__lock_prepare) */

    /* Under the lock. */
    int is_plain;     /* asymmetric, and nothing is deferred: what to let it go takes */
    atomic_int *held; /* what lets it go when it is 0 */
    _Alignas(64) tn__deferred *deferred; /* newest first */
    uintptr_t last;                      /* thread that came the common way */
    unsigned streak;                     /* times in a row that it did */
    unsigned favors_lost;
    uintptr_t slots[TN__LOCK_SLOTS]; /* ids; 0: nobody's yet */
} tn__lock_word;

extern tn__lock_word tn__locks[TN__LOCK_COUNT];

/* Before objects are made that the lock guards. */
void tn__lock_prepare(unsigned lock);

void tn__lock_enter(tn__lock_word *word);
void tn__lock_retreat(atomic_int *inside, atomic_int *waiters);
void tn__lock_wake(atomic_int *held);
void tn__lock_leave(tn__lock_word *word);

/* This thread's, and once it has ended perhaps that of one that begins later. */
static inline uintptr_t tn__thread_id(void) { return (uintptr_t)__builtin_thread_pointer(); }

/* 1: the lock is held now, by the thread that it favors. */
static inline int tn__lock_enter_favored(tn__lock_word *word) {
    uintptr_t favored = atomic_load_explicit(&word->favored, memory_order_relaxed);
    uintptr_t slot = favored ^ tn__thread_id();
    if (slot >= TN__LOCK_SLOTS) return 0;
    atomic_int *inside = &word->inside[slot];
    TN_ASSERT(atomic_load_explicit(inside, memory_order_relaxed) == 0);
    atomic_store_explicit(inside, 1, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&word->favored, memory_order_acquire) != favored,
                         0)) {
        tn__lock_retreat(inside, &word->waiters);
        return 0;
    }
    word->held = inside;
    return 1;
}

static inline tn__lock_word *tn__lock_word_of(unsigned lock) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    return &tn__locks[lock];
}

static inline void tn__lock_take(tn__lock_word *word) {
    if (!tn__lock_enter_favored(word)) tn__lock_enter(word);
}

static inline void tn__lock_let_go(tn__lock_word *word) {
    atomic_int *held = word->held;
    TN_ASSERT(atomic_load_explicit(held, memory_order_relaxed) == 1);
    if (__builtin_expect(!word->is_plain, 0)) {
        tn__lock_leave(word);
        return;
    }
    atomic_store_explicit(held, 0, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&word->waiters, memory_order_relaxed) != 0, 0)) {
        tn__lock_wake(held);
    }
}

static inline void tn__lock(unsigned lock) { tn__lock_take(tn__lock_word_of(lock)); }
static inline void tn__unlock(unsigned lock) { tn__lock_let_go(tn__lock_word_of(lock)); }

#endif
