/* A communicator: an engine's state, and what is the same for all engines.
 *
 *     call ->  failed before?  ->  wait for the last  ->  engine  ->  mark as the last  ->  count
 *
 * Invariants, under `lock`:
 *   - `last` is recorded behind every collective that was put on a stream (has_last: there is
 *     one), so that the next one, on whichever stream, runs after it;
 *   - failure is TN_OK, or the first failure with its text, and then the engine has been told to
 *     abort and gets no more work.
 */
#ifndef TENURE_COMM_H
#define TENURE_COMM_H

#include <pthread.h>

#include "comm_engine.h"
#include "driver.h"

struct tn_comm {
    tn_device *device;
    const tn__driver *driver;
    tn__driver_device *on;
    const tn__comm_engine *engine;
    tn__comm_state *state;
    char *name;
    int rank;
    int rank_count;
    uint64_t timeout_us;

    pthread_mutex_t lock;
    tn__event last;
    int has_last;
    uint64_t last_stream_id;
    tn_status failure;
    tn__saved_error failure_text;
    tn_comm_stats stats;
};

/* TN_OK, or the failure of the communicator, which is then this thread's last error. */
tn_status tn__comm_check_locked(tn_comm *comm);

/* The first failure of a communicator: remembers this thread's last error, and aborts. Returns
 * the status. */
tn_status tn__comm_fail_locked(tn_comm *comm, tn_status status);

#endif
