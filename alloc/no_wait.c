/* See no_wait.h. Invariant: while holds > 0, waits == 0, but for the thread that waits in
 * tn_no_wait_begin for just that, before it is counted. */
#include "no_wait.h"

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"
#include "tenure_pool.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t no_waits = PTHREAD_COND_INITIALIZER;
static unsigned holds; /* begun by users */
static unsigned waits; /* driver calls under way that may wait */
static atomic_uint captures;

int tn__may_wait(void) {
    int may_wait;
    pthread_mutex_lock(&mutex);
    may_wait = holds == 0;
    pthread_mutex_unlock(&mutex);
    return may_wait;
}

int tn__driver_wait_begin(void) {
    int may_wait;
    pthread_mutex_lock(&mutex);
    may_wait = holds == 0;
    waits += (unsigned)may_wait;
    pthread_mutex_unlock(&mutex);
    return may_wait;
}

void tn__driver_wait_end(void) {
    pthread_mutex_lock(&mutex);
    TN_ASSERT(waits > 0);
    if (--waits == 0) pthread_cond_broadcast(&no_waits);
    pthread_mutex_unlock(&mutex);
}

void tn__capture_opened(void) { atomic_fetch_add(&captures, 1); }

void tn__capture_closed(void) { atomic_fetch_sub(&captures, 1); }

int tn__is_capture_open(void) { return atomic_load(&captures) > 0; }

/* A forked child has none of the threads that would end their waits. */
tn_status tn_no_wait_begin(void) {
    if (tn__driver_is_gone()) return TN_OK;
    pthread_mutex_lock(&mutex);
    while (waits > 0)
        pthread_cond_wait(&no_waits, &mutex);
    holds++;
    pthread_mutex_unlock(&mutex);
    return TN_OK;
}

tn_status tn_no_wait_end(void) {
    tn_status status = TN_OK;
    if (tn__driver_is_gone()) return TN_OK;
    pthread_mutex_lock(&mutex);
    if (holds == 0) {
        status = TN_FAIL(TN_INVALID_STATE, "tn_no_wait_end without tn_no_wait_begin");
    } else {
        holds--;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}
