/* A communicator of the MPI engine.
 *
 *     tn_all_gather ...  ->  task on the stream  ->  [ headers | chunk | chunk | ... ]
 *
 * The stream's worker does the collective when it comes to the task. MPI sees only the staging
 * buffers here, never the caller's memory: a request that is given up can not be taken back from
 * MPI, which may complete it much later, and then the caller's block belongs to something else.
 *
 *     sent, received   rank_count rows of row_bytes each; one chunk of the collective at a time
 *
 * Before any data every rank sends every other a header of what it is about to do: this is where
 * a rank that does not come is seen by name, and calls that do not match. It is also the barrier.
 *
 * Invariants: one task at a time touches what is below `headers`; has_pending is 1 once a request
 * was given up, and then all of this is kept until MPI has ended.
 */
#ifndef TENURE_MPI_STATE_H
#define TENURE_MPI_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm_engine.h"
#include "driver.h"
#include "mpi_process.h"

typedef struct tn__mpi_header {
    int32_t kind;
    int32_t dtype;
    int32_t reduce;
    int32_t root;
    uint64_t count;
    uint64_t sequence; /* of this communicator's collectives, from 1 */
} tn__mpi_header;

struct tn__comm_state {
    const tn__driver *driver;
    tn__driver_device *on;
    char *name;
    int rank;
    int rank_count;
    uint64_t timeout_us;
    atomic_int references; /* the communicator's and each queued task's */
    atomic_int is_aborted;

    pthread_mutex_t lock;
    tn_status failure; /* under lock */
    tn__saved_error failure_text;

    MPI_Comm comm;
    tn__mpi_header mine;
    tn__mpi_header *theirs; /* by rank */
    MPI_Request *requests;  /* 2 of each rank */
    int *send_bytes;        /* by rank; these four are what MPI's v-collectives take */
    int *send_at;
    int *receive_bytes;
    int *receive_at;
    size_t row_bytes;
    unsigned char *sent;
    unsigned char *received;
    uint64_t deadline_ns; /* of the collective under way */
    int has_pending;
};

/* Does a collective of host memory, on the thread that calls. */
tn_status tn__mpi_collective_run(tn__comm_state *state, const tn__collective_call *call);

/* Begins a collective, and its deadline: every rank sends every other its header. */
tn_status tn__mpi_meet(tn__comm_state *state, const tn__collective_call *call);

/* ---- chunks (mpi_chunks.c): what they are, a call alone says -------------------------------- */

/* A stretch of the caller's memory, and where in a buffer of rows its bytes are. */
typedef tn_status (*tn__mpi_visit)(void *context, char *address, size_t at, size_t bytes);

/* 0: the headers are all of it. */
size_t tn__mpi_chunk_count(const tn__comm_state *state, const tn__collective_call *call);

/* What goes to `sent` before the exchange, and what comes from its rows after it. The next chunk's
 * may go in before this one's come out: in place, they are different bytes. */
tn_status tn__mpi_chunk_in(const tn__comm_state *state, const tn__collective_call *call,
                           size_t index, tn__mpi_visit visit, void *context);
tn_status tn__mpi_chunk_out(const tn__comm_state *state, const tn__collective_call *call,
                            size_t index, tn__mpi_visit visit, void *context);

/* From `sent` to *rows, which is sent or received. */
tn_status tn__mpi_chunk_exchange(tn__comm_state *state, const tn__collective_call *call,
                                 size_t index, unsigned char **rows);

/* Polls requests to the deadline of the collective: 1 once all are complete; else 0, and they are
 * given up (*code is what MPI said). */
int tn__mpi_wait(tn__comm_state *state, MPI_Request *requests, int count, int *code);

/* The status of a wait that was given up, recorded with `what` was waited for. */
tn_status tn__mpi_give_up(const tn__comm_state *state, int code, const char *what);

#endif
