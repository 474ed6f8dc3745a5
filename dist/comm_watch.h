/* The watch over a communicator whose engine has no deadlines of its own: NCCL.
 *
 *     begun, done     an event before and one behind each collective that is put on a stream, and
 *                     each launch of a graph of them, for the last 32; of captured ones there is
 *                     none: a capture is no place for questions, and they run with their launch
 *
 * A thread asks the engine for errors and the events for progress. A collective that has begun on
 * its stream and does not end within the timeout makes the communicator fail, which aborts it; so
 * does a failure that another rank, or the store for a rank that has died, has published through
 * the rendezvous. So all ranks abort all their communicators at about the same time, each by its
 * own thread, whatever their other threads wait for.
 *
 * With TENURE_CHECK_COLLECTIVES every collective, also one that is captured, every launch of a
 * graph of them and every registration of memory and its end begins with a meeting of the ranks on
 * the host, where calls that differ, which NCCL would hang on, are a status that says who called
 * what.
 *
 * All calls of an engine are made with the communicator's lock held, also by the watch: nobody is
 * within NCCL when it is aborted. But for one: to end a communicator that is in graphs takes till
 * they are destroyed, and whoever does that must hear of the failure, so that the watch does it
 * without the lock, behind which it has been taken from everybody.
 */
#ifndef TENURE_COMM_WATCH_H
#define TENURE_COMM_WATCH_H

#include "comm.h"
#include "flow_plan.h"
#include "rendezvous.h"

/* Takes all memory for it. ranks may be NULL: then it is alone with its deadline. */
tn_status tn__comm_watch_make(tn_comm *comm, tn_rendezvous *ranks, tn__comm_watch **out);

/* Once the communicator is complete. */
tn_status tn__comm_watch_start(tn__comm_watch *watch);

/* Before the engine's state ends, without the lock. NULL is a no-op; it need not have started. */
void tn__comm_watch_end(tn__comm_watch *watch);

/* Whom it listens to; NULL: nobody. */
tn_rendezvous *tn__comm_watch_ranks(const tn__comm_watch *watch);

/* Of the communicator among the rendezvous', the same on all ranks. */
uint64_t tn__comm_watch_number(const tn__comm_watch *watch);

/* Before a batch is put, or captured: a mismatch is the communicator's failure. With the lock, as
 * all that follow; NULL is a no-op. */
tn_status tn__comm_watch_compare(tn__comm_watch *watch, const tn__batch *batch, int is_captured);

/* The same before a graph is launched, or memory is registered or that ends. */
tn_status tn__comm_watch_compare_header(tn__comm_watch *watch, tn__flow_header header);

/* Around the putting of a batch, or the launch of a graph. A failure of `before` leaves all as it
 * was. */
tn_status tn__comm_watch_before(tn__comm_watch *watch, tn_stream stream);
tn_status tn__comm_watch_after(tn__comm_watch *watch, uint64_t sequence, tn_stream stream);

#endif
