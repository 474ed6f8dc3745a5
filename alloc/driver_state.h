/* What both drivers share: whether calls may be made at all, and the counts of those made. */
#ifndef TENURE_DRIVER_STATE_H
#define TENURE_DRIVER_STATE_H

#include <stdatomic.h>

#include "driver.h"

typedef struct tn__call_counts {
    _Atomic uint64_t calls[TN_CALL_COUNT];
    _Atomic uint64_t memory_ns[TN_CALL_COUNT]; /* in the memory calls */
} tn__call_counts;

static inline void tn__count_call(tn__call_counts *counts, tn_driver_call call) {
    atomic_fetch_add_explicit(&counts->calls[call], 1, memory_order_relaxed);
}

/* By the clock that the driver goes by. */
static inline void tn__count_memory_ns(tn__call_counts *counts, tn_driver_call call,
                                       uint64_t nanoseconds) {
    atomic_fetch_add_explicit(&counts->memory_ns[call], nanoseconds, memory_order_relaxed);
}

void tn__call_counts_read(const tn__call_counts *counts, tn_driver_stats *out);

/* The wall clock since some start. */
uint64_t tn__clock_ns(void);

/* Starts to watch for exit and fork. Called when a device has been opened: exit handlers run
 * last-in first-out, so ours, registered after the driver's own, runs before the driver is gone. */
tn_status tn__driver_watch_process(void);

/* TN_OK while calls may be made; else the failure of `call`, recorded with the reason. */
tn_status tn__driver_require_present(const char *call);

/* 1 in a forked child, whose only thread is the one that forked. */
int tn__driver_is_forked(void);

/* For a driver that says itself that it has shut down. */
void tn__driver_set_gone(void);

#endif
