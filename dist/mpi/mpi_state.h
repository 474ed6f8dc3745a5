/* A communicator of the MPI engine.
 *
 *     tn_all_gather ...  ->  plan (flow_plan.h)  ->  task on the stream  ->  [ headers | rounds ]
 *
 * The stream's worker does the batch when it comes to the task; on a CUDA device a worker of the
 * communicator does it, and the stream waits (mpi_staged.h). MPI sees only the staging buffers
 * here, never the caller's memory: a request that is given up can not be taken back from MPI,
 * which may complete it much later, and then the caller's block belongs to something else.
 *
 *     sent, received   rank_count rows of row_bytes each: one round of messages at a time
 *
 * Before any data every rank sends every other a header of what it is about to do: this is where
 * a rank that does not come is seen by name, and calls that do not match. It is also the barrier.
 *
 * Communicators that were split from one another share one of MPI's (the base) and are told apart
 * by tags, four of each. MPI has no split that does not block.
 *
 * Invariants: one task at a time touches what is below `theirs`, and one call of split what is
 * below `split_words`; has_pending is 1 once a request was given up, and then all of this is kept
 * until MPI has ended.
 */
#ifndef TENURE_MPI_STATE_H
#define TENURE_MPI_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm_engine.h"
#include "driver.h"
#include "flow_plan.h"
#include "mpi_process.h"

enum { TN__MPI_HEADER_TAG, TN__MPI_DATA_TAG, TN__MPI_SPLIT_TAG, TN__MPI_NOTICE_TAG, TN__MPI_TAGS };

/* A communicator of MPI, and how many communicators' tags it has given out. */
typedef struct tn__mpi_base {
    MPI_Comm comm;
    atomic_int is_joined; /* comm is whole, and messages can go through it */
    atomic_int references;
    atomic_int has_pending;
    int next_family; /* under MPI's lock, as what follows */
    int family_count;
} tn__mpi_base;

/* What ranks tell each other when they split a communicator. */
typedef struct tn__mpi_split_word {
    int32_t color;
    int32_t key;
    int32_t family; /* the least that is free on this rank */
    int32_t status; /* what this rank has failed with, and the others must not go on */
} tn__mpi_split_word;

/* Why a rank has given up: see mpi_notice.c. */
typedef struct tn__mpi_notice {
    int32_t status;
    char text[508];
} tn__mpi_notice;

struct tn__mpi_staged;

struct tn__comm_state {
    tn_device *device;
    const tn__driver *driver;
    tn__driver_device *on;
    char *name;
    int rank;
    int rank_count;
    uint64_t timeout_us;
    atomic_int references; /* the communicator's and each queued task's */
    atomic_int is_aborted;
    atomic_int has_pending;

    pthread_mutex_t lock;
    tn_status failure; /* under lock */
    tn__saved_error failure_text;

    struct tn__mpi_staged *staged; /* NULL: the stream's own worker does the batches */
    tn__mpi_base *base;
    int first_tag;
    int *peers; /* by rank: its rank in the base */

    tn__flow_header *mine; /* by rank */
    tn__flow_header *theirs;
    MPI_Request *requests; /* 2 of each rank */
    size_t row_bytes;
    unsigned char *sent;
    unsigned char *received;
    uint64_t sequence;
    uint64_t deadline_ns; /* of the batch under way */

    tn__mpi_split_word *split_words; /* by rank, and one more: ours */
    MPI_Request *split_requests;     /* 2 of each rank */

    tn__mpi_notice heard; /* under MPI's lock, as what follows */
    int has_heard;
    int heard_from; /* rank */
};

/* A communicator's memory, with room for rank_count ranks, and its worker if it has one; of no base
 * yet. */
tn_status tn__mpi_state_make(tn_device *device, const char *name, uint64_t timeout_us,
                             tn__comm_state **out);
tn_status tn__mpi_state_make_room(tn__comm_state *state, int rank_count);

/* Ends a reference. */
void tn__mpi_state_drop(tn__comm_state *state);

/* Posts `bytes` to and from another rank with a tag of the communicator: into requests[0] and [1],
 * none for a count of 0. MPI's lock is held. */
typedef struct tn__mpi_message {
    const void *sent;
    int sent_bytes;
    void *received;
    int received_bytes;
} tn__mpi_message;
int tn__mpi_post(tn__comm_state *state, int rank, int tag, const tn__mpi_message *message,
                 MPI_Request *requests);

/* A rank's two of an array with two for each rank. */
static inline MPI_Request *tn__mpi_requests_of(MPI_Request *requests, int rank) {
    return requests + 2 * (size_t)rank;
}

/* "rank 1, rank 3": whose message has not come, of requests of 2 for each rank. */
void tn__mpi_missing_ranks(tn__comm_state *state, MPI_Request *requests, char *text,
                           size_t text_bytes);

/* tn__comm_engine's split. */
tn_status tn__mpi_split(tn__comm_state *state, int color, int key, const char *name,
                        tn_status so_far, int *rank, int *rank_count, tn__comm_state **out);

/* Does a batch of host memory, on the thread that calls. */
tn_status tn__mpi_batch_run(tn__comm_state *state, tn__flow_plan *plan, tn__flow_rounds *rounds);

/* Begins a batch, and its deadline: every rank sends every other its header, which is the plan's
 * with the next sequence. */
tn_status tn__mpi_meet(tn__comm_state *state, tn__flow_plan *plan);

/* A round's messages: from the rows in `sent` to those in `received`, where all is that goes out,
 * what this rank has reduced too. */
tn_status tn__mpi_round_exchange(tn__comm_state *state, const tn__flow_rounds *rounds);

/* Remembers this thread's last error as the communicator's failure, and aborts it. */
void tn__mpi_remember_failure(tn__comm_state *state, tn_status status);

/* Nothing of it goes on; the others are told, with this thread's last error. */
void tn__mpi_abort(tn__comm_state *state, tn_status status);

/* Tells all other ranks this thread's last error, which this rank gives up with. */
void tn__mpi_notice_say(tn__comm_state *state, tn_status status);

/* 1 if another rank has given up; MPI's lock is held. */
int tn__mpi_notice_look(tn__comm_state *state);

/* The status of a wait for `what` that another rank has ended so, recorded. */
tn_status tn__mpi_notice_told(const tn__comm_state *state, const char *what);

/* Polls requests to the deadline: 1 once all are complete; else 0, and they are given up (*code is
 * what MPI said). */
int tn__mpi_wait(tn__comm_state *state, MPI_Request *requests, int count, uint64_t deadline_ns,
                 int *code);

/* The status of a wait that was given up, recorded with `what` was waited for. */
tn_status tn__mpi_give_up(const tn__comm_state *state, uint64_t deadline_ns, int code,
                          const char *what);

#endif
