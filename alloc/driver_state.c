/* Exit and fork, seen by every driver call; counts of calls.
 *
 * After exit began another library's handlers may have shut the driver down, and in a forked child
 * its threads and its device do not exist: a call then hangs or crashes. So from either moment on
 * no call is made: each fails in words, and closing a device does nothing.
 */
#include "driver_state.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef enum gone_reason { NOT_GONE, GONE_BY_EXIT, GONE_BY_FORK, GONE_BY_DRIVER } gone_reason;

static _Atomic int gone;
static pthread_once_t watch_once = PTHREAD_ONCE_INIT;
static int watch_failed;

/* What atexit is made of. ThreadSanitizer's atexit forgets which library asked, and so would call
 * the handler after this one has been unloaded. */
int __cxa_atexit(void (*handler)(void *), void *argument, void *library);
extern void *__dso_handle __attribute__((visibility("hidden")));

/* The exit of a forked child stays that of a forked child. */
static void mark_exit(void *ignored) {
    int before = NOT_GONE;
    (void)ignored;
    atomic_compare_exchange_strong(&gone, &before, GONE_BY_EXIT);
}

static void mark_fork(void) { atomic_store(&gone, GONE_BY_FORK); }

static void watch(void) {
    watch_failed =
        __cxa_atexit(mark_exit, NULL, &__dso_handle) || pthread_atfork(NULL, NULL, mark_fork);
}

tn_status tn__driver_watch_process(void) {
    pthread_once(&watch_once, watch);
    if (!watch_failed) return TN_OK;
    return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "no memory for the handlers of exit and fork");
}

int tn__driver_is_gone(void) { return atomic_load_explicit(&gone, memory_order_relaxed); }

int tn__driver_is_forked(void) {
    return atomic_load_explicit(&gone, memory_order_relaxed) == GONE_BY_FORK;
}

void tn__driver_set_gone(void) { atomic_store(&gone, GONE_BY_DRIVER); }

tn_status tn__driver_require_present(const char *call) {
    switch (tn__driver_is_gone()) {
    case NOT_GONE: return TN_OK;
    case GONE_BY_EXIT:
        return TN_FAIL(TN_DRIVER_ERROR, "%s: not made, since the process is ending", call);
    case GONE_BY_FORK:
        return TN_FAIL(TN_DRIVER_ERROR,
                       "%s: not made in a forked child: the device belongs to the parent; fork "
                       "before the first tn_device_create, or start a new program",
                       call);
    default: return TN_FAIL(TN_DRIVER_ERROR, "%s: not made, since the driver has shut down", call);
    }
}

tn_status tn__driver_refuse_fork(const char *call) {
    if (tn__driver_is_gone() != GONE_BY_FORK) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "%s in a forked child: pools and devices are the parent's; fork before the "
                   "first tn_device_create, or start a new program",
                   call);
}

void tn__call_counts_read(const tn__call_counts *counts, tn_driver_stats *out) {
    uint64_t sum_ns = 0;
    for (int i = 0; i < TN_CALL_COUNT; i++) {
        uint64_t ns = atomic_load_explicit(&counts->memory_ns[i], memory_order_relaxed);
        out->calls[i] = atomic_load_explicit(&counts->calls[i], memory_order_relaxed);
        out->call_time_us[i] = (double)ns / 1000.0;
        sum_ns += ns;
    }
    out->time_us = (double)sum_ns / 1000.0;
}

uint64_t tn__clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
