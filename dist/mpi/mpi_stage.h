/* A stage: pinned host memory between the streams of a CUDA device and MPI.
 *
 *     stream   copy to slot | came + 1 | ... wait for word >= n | copy from slot
 *     worker                 `-> slot -> MPI -> slot -> word = n -'
 *
 * Rounds are numbered from 1 while a communicator has the stage; round n uses slot
 * n % TN__STAGE_SLOTS. The stream tells the worker by a host function that a round's data has
 * come, and waits on the device for the word that the worker writes. No thread of the program
 * waits for either.
 *
 * MPI itself never sees a slot: a request that is given up may be completed much later.
 *
 * A stage belongs to its device, and a communicator has it for a while: what a communicator that
 * failed left on streams goes through it for as long as it takes, and the next one to take the
 * stage does so after that. All of a device's stages end with the device.
 *
 * Invariants: came <= put, the rounds that were put on streams; once is_open, all waits pass, and
 * the word is not written any more.
 */
#ifndef TENURE_MPI_STAGE_H
#define TENURE_MPI_STAGE_H

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"

enum { TN__STAGE_SLOTS = 2, TN__STAGE_SLOT_BYTES = 4 << 20 };

typedef struct tn__mpi_stage {
    struct tn__mpi_stage *next; /* of the device */
    const tn__driver *driver;
    tn__driver_device *on;
    int is_taken;     /* under the lock of all stages */
    int is_lost;      /* the end of what is on streams can not be told: not taken again */
    tn__event passed; /* behind all that was put on streams */

    uint32_t *word; /* in pinned memory, as the slots: how many rounds are through */
    unsigned char *slots[TN__STAGE_SLOTS];
    int is_open;  /* the worker's */
    uint64_t put; /* the calling thread's */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* by a stream, or by who wakes the worker */
    uint64_t came;          /* under lock */
} tn__mpi_stage;

/* Takes a stage of the device, made if there is none to spare. TN_UNSUPPORTED where the driver
 * has no waits for values. */
tn_status tn__stage_take(tn_device *device, tn__mpi_stage **out);

/* Gives it back. No worker touches it any more; what is on streams may go on. */
void tn__stage_give(tn__mpi_stage *stage);

unsigned char *tn__stage_slot(tn__mpi_stage *stage, uint64_t round);

/* ---- on the stream, by one thread at a time ------------------------------------------------- */

/* Round put + 1 has its data in its slot when the stream comes here; then it is put. */
tn_status tn__stage_put_ready(tn__mpi_stage *stage, tn_stream stream);

/* What is put on the stream from now on starts once the round is through. */
tn_status tn__stage_put_wait(tn__mpi_stage *stage, uint64_t round, tn_stream stream);

/* Marks the end of what has been put so far. */
tn_status tn__stage_put_end(tn__mpi_stage *stage, tn_stream stream);

/* ---- the worker ----------------------------------------------------------------------------- */

/* Waits until the round's data has come: 1; or *is_aborted and someone wakes: 0. */
int tn__stage_await(tn__mpi_stage *stage, uint64_t round, const _Atomic int *is_aborted);

/* The round's results are in its slot. */
void tn__stage_publish(tn__mpi_stage *stage, uint64_t round);

/* Lets all waits pass, those too that are still to be put: the worker is through with the slots. */
void tn__stage_open(tn__mpi_stage *stage);

void tn__stage_wake(tn__mpi_stage *stage);

#endif
