/* MPI in this process: started once, used by one thread at a time, ended at exit.
 *
 * Every MPI call of the plug-in is made between tn__mpi_lock and tn__mpi_unlock, so that
 * MPI_THREAD_SERIALIZED is enough. None of those calls waits for another rank but in start and at
 * exit; whoever waits polls, and lets go of the lock in between.
 */
#ifndef TENURE_MPI_PROCESS_H
#define TENURE_MPI_PROCESS_H

#include <mpi.h>

#include "error.h"

/* Starts MPI unless the program has. TN_UNSUPPORTED if the program started it for one thread,
 * TN_INVALID_STATE if it has been finalized. */
tn_status tn__mpi_process_start(void);

/* 1, and the lock is held; or 0 once the process is ending, and nothing of MPI may be called. */
int tn__mpi_lock(void);
void tn__mpi_unlock(void);

/* Polls requests until all are complete (1), or until the deadline, the end of the process, or
 * is_over, which is asked with MPI's lock held, says so (0). A failed MPI call is *code, not
 * MPI_SUCCESS (and 0). Complete requests become MPI_REQUEST_NULL. */
int tn__mpi_poll(MPI_Request *requests, int count, uint64_t deadline_ns, int (*is_over)(void *),
                 void *context, int *code);

/* A communicator has failed: MPI_Finalize may never return now, so that exit asks the other ranks
 * first whether they come to it, for at most timeout_us. */
void tn__mpi_process_note_failure(uint64_t timeout_us);

/* Keeps memory that a request which will never complete may still touch: freed after MPI ends. */
void tn__mpi_process_keep(void (*release)(void *), void *memory);

uint64_t tn__mpi_now_ns(void);
uint64_t tn__mpi_deadline_ns(uint64_t timeout_us); /* from now; of a very long one: never */

/* TN_COMM_ERROR with MPI's words. */
tn_status tn__mpi_fail(int code, const char *call);

#endif
