/* Handles: 64-bit values that name a scope, tensor or lease and tell when it is gone.
 *
 *     63          32 31  28 27        4 3    0
 *     | generation  | kind |   index   | lock |      0 is no handle
 *
 * There are a few locks, and a table of handles for each. A handle says which lock guards its
 * object, so that one lock is all that a look-up takes: a value that has died is found out under
 * it and never by touching freed memory. A slot's generation grows each time its object ends, so
 * an old value never matches again.
 */
#ifndef TENURE_HANDLE_TABLE_H
#define TENURE_HANDLE_TABLE_H

#include <stdatomic.h>

#include "error.h"

typedef enum tn__handle_kind {
    TN__HANDLE_SCOPE = 1,
    TN__HANDLE_TENSOR,
    TN__HANDLE_LEASE
} tn__handle_kind;

enum { TN__LOCK_COUNT = 16 };

/* The locks of the objects: pools are spread over them. Not recursive; nobody holds two.
 *
 * A lease takes one twice, and half of what it may cost at all would go to a mutex of the C
 * library: so the way that meets nobody is inline, with one atomic exchange to lock and none to
 * unlock. Who lets a lock go writes that, and then looks whether somebody waits; who waits says so,
 * makes every thread of the process pass a barrier (thread_barrier.h), and then looks whether the
 * lock is free. So one of the two sees the other. Where there is no such barrier, letting go is an
 * exchange as well. Whoever has to wait long sleeps in the kernel (handle_table.c). */
typedef enum tn__lock_state { TN__LOCK_FREE, TN__LOCK_HELD } tn__lock_state;

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
    atomic_int waiters;       /* threads that sleep, or are about to */
    atomic_int is_asymmetric; /* a barrier stands in for the exchange (tn__lock_prepare) */
    tn__deferred *deferred;   /* newest first; guarded by the lock */
} tn__lock_word;

extern tn__lock_word tn__locks[TN__LOCK_COUNT];

/* Before objects are made that the lock guards. */
void tn__lock_prepare(unsigned lock);

void tn__lock_wait(tn__lock_word *word);
void tn__lock_wake(tn__lock_word *word);
void tn__lock_run(tn__deferred *newest);

static inline int tn__lock_word_try(tn__lock_word *word) {
    int expected = TN__LOCK_FREE;
    return atomic_compare_exchange_strong_explicit(&word->state, &expected, TN__LOCK_HELD,
                                                   memory_order_acquire, memory_order_relaxed);
}

/* 1: the lock is held now. */
static inline int tn__lock_try(unsigned lock) {
    TN_ASSERT(lock < TN__LOCK_COUNT);
    return tn__lock_word_try(&tn__locks[lock]);
}

static inline void tn__lock(unsigned lock) {
    if (!tn__lock_try(lock)) tn__lock_wait(&tn__locks[lock]);
}

static inline void tn__unlock(unsigned lock) {
    tn__lock_word *word = &tn__locks[lock];
    tn__deferred *deferred = word->deferred;
    TN_ASSERT(atomic_load_explicit(&word->state, memory_order_relaxed) != TN__LOCK_FREE);
    if (deferred) word->deferred = NULL;
    if (atomic_load_explicit(&word->is_asymmetric, memory_order_relaxed)) {
        atomic_store_explicit(&word->state, TN__LOCK_FREE, memory_order_release);
        atomic_signal_fence(memory_order_seq_cst);
    } else {
        (void)atomic_exchange(&word->state, TN__LOCK_FREE);
    }
    if (atomic_load_explicit(&word->waiters, memory_order_relaxed)) tn__lock_wake(word);
    if (deferred) tn__lock_run(deferred);
}

/* A handle of `object`, which `lock` guards; the caller holds it. TN_OUT_OF_HOST_MEMORY; then
 * nothing has changed. */
tn_status tn__handle_create(tn__handle_kind kind, void *object, unsigned lock, uint64_t *out);

/* Ends a handle that is alive or suspended; its lock is held. */
void tn__handle_destroy(uint64_t value);

/* What comes and goes all the time keeps its slot: its handle is suspended and resumed, which gives
 * it the next value. The slot of a handle that is alive or suspended stays where it is. */
typedef struct tn__handle_slot {
    uint64_t value; /* 0: not alive */
    void *object;
    uint32_t generation;
    int32_t next_free;
} tn__handle_slot;

tn__handle_slot *tn__handle_slot_of(uint64_t value);

static inline void tn__handle_suspend(tn__handle_slot *slot) { slot->value = 0; }

/* `last` is the value that the slot had before. 0 if its values are used up: the suspended handle
 * is to be destroyed. */
static inline uint64_t tn__handle_resume(tn__handle_slot *slot, uint64_t last) {
    if (slot->generation == UINT32_MAX) return 0;
    slot->generation++;
    return slot->value = last + ((uint64_t)1 << 32);
}

/* The object of a handle that is alive, with its lock held. NULL: none is held, and TN_STALE_HANDLE
 * is recorded. */
void *tn__handle_get(uint64_t value, tn__handle_kind kind);

static inline tn_status tn__handle_acquire(uint64_t value, tn__handle_kind kind, void **object) {
    void *alive = tn__handle_get(value, kind);
    if (!alive) return TN_STALE_HANDLE;
    *object = alive;
    return TN_OK;
}

/* The same for a caller that holds the lock: NULL if it is not alive or another lock's. */
void *tn__handle_peek(uint64_t value, tn__handle_kind kind, unsigned lock);

/* Handles alive now. With none, and none suspended, the tables hold no host memory. For tests; no
 * lock is held. */
uint64_t tn__handle_count(void);

/* First generation of slots made from now on; no handle is alive. For tests of wrap-around. */
void tn__handle_start_at(uint32_t generation);

#endif
