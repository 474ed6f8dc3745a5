/* Batches of a communicator on a CUDA device: the calling thread puts all copies to and from a
 * stage on the stream, and a worker of the communicator does the rounds with MPI meanwhile.
 *
 *     stream   in 1 | in 2 | wait 1, out 1 | in 3 | wait 2, out 2 | ...
 *     worker          round 1       | round 2       | round 3 ...
 *
 * So a round's copies go on beside the next round's messages. The order is on the device: the
 * caller waits for nothing.
 *
 * On failure the worker is through with the slots first, and lets all waits pass then: what is on
 * streams ends by itself, with undefined results.
 */
#ifndef TENURE_MPI_STAGED_H
#define TENURE_MPI_STAGED_H

#include "mpi_state.h"

typedef struct tn__mpi_staged tn__mpi_staged;

/* Takes a stage of the device and starts the worker; state->staged is set. The state has room. */
tn_status tn__mpi_staged_make(tn__comm_state *state);

/* tn__comm_engine's start. */
tn_status tn__mpi_staged_start(tn__comm_state *state, const tn__batch *batch, tn_stream stream);

/* The state has been aborted: the worker is to see it. */
void tn__mpi_staged_wake(tn__mpi_staged *staged);

/* Ends the worker, and gives the stage back: nothing is on streams, or the state was aborted. */
void tn__mpi_staged_end(tn__mpi_staged *staged);

#endif
