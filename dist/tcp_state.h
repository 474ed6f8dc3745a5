/* A communicator of the TCP engine.
 *
 *     tn_all_gather ...  ->  plan (flow_plan.h)  ->  task on the stream  ->  [ headers | data ]
 *
 * The stream's worker does the batch when it comes to the task: every peer is sent what the plan
 * has for it and heard at the same time, straight from and to the caller's memory. A task that
 * has ended touches none of that any more, whatever the others still send: so the memory is the
 * caller's again when a communicator fails, too.
 *
 * A rank that fails tells the others why (tcp_mesh.h), and whoever waits for a rank that has died
 * sees its connection end. What is not noticed so, the deadline of the batch ends.
 *
 * Invariants: one task at a time, or split with none on streams, touches what is below `cursors`.
 */
#ifndef TENURE_TCP_STATE_H
#define TENURE_TCP_STATE_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"
#include "flow_plan.h"
#include "tcp_mesh.h"

/* What goes to a peer, or comes from it, in the exchange under way. */
typedef struct tn__tcp_lane {
    char *at; /* the stretch that is moved */
    size_t left;
    tn__flow_cursor flow; /* what is behind it */
    size_t limit;         /* bytes of the flow that belong to this exchange */
} tn__tcp_lane;

/* A rank's last word, as far as it has been heard. */
typedef enum tn__tcp_word {
    TN__TCP_NOT_HEARD,
    TN__TCP_LEFT,
    TN__TCP_GAVE_UP,
    TN__TCP_DIED /* without one */
} tn__tcp_word;

/* What ranks tell each other when they split a communicator; as long as a collective's header, so
 * that ranks that are in one find out. */
typedef struct tn__tcp_split_word {
    int32_t kind; /* TN__FLOW_SPLIT */
    int32_t color;
    int32_t key;
    int32_t status; /* what this rank has failed with, and the others must not go on */
    unsigned char rest[sizeof(tn__flow_header) - 4 * sizeof(int32_t)];
} tn__tcp_split_word;

struct tn__comm_state {
    const tn__driver *driver;
    tn__driver_device *on;
    char *name;
    int rank;
    int rank_count;
    uint64_t timeout_us;
    atomic_int references; /* the communicator's and each queued task's */
    atomic_int is_aborted;
    tn__tcp_mesh *mesh;

    pthread_mutex_t lock;
    tn_status failure; /* under lock */
    tn__saved_error failure_text;

    tn__flow_cursor *cursors; /* by rank: what a reduction still has to send it */
    tn__tcp_lane *lanes;      /* 2 of each rank: what is sent, what is received */
    struct pollfd *polls;
    unsigned char *words;    /* by rank: tn__tcp_word */
    tn__flow_header *theirs; /* by rank */
    unsigned char *rows;     /* rank_count of row_bytes each, and one for the result */
    size_t row_bytes;
    uint64_t sequence;    /* of this communicator's batches, from 1 */
    uint64_t deadline_ns; /* of the batch under way */
    char what[64];        /* the batch under way, in words */

    tn__tcp_split_word *split_words; /* by rank */
    int *members;                    /* room for the ranks of a color */
};

typedef struct tn__tcp_state_config {
    const tn__driver *driver;
    tn__driver_device *on;
    const char *name;
    uint64_t timeout_us;
    int capacity;
} tn__tcp_state_config;

/* A state with all of its memory, for at most `capacity` ranks, and a mesh that is not connected
 * yet. */
tn_status tn__tcp_state_make(const tn__tcp_state_config *config, tn__comm_state **out);

/* All hear of all that they are connected, so that no rank goes on, to connect again, while another
 * still takes connections in. `what` is what ranks that do not come do not do. */
tn_status tn__tcp_state_meet(tn__comm_state *state, const char *what);

/* Connects it: every rank calls. */
tn_status tn__tcp_state_connect(tn__comm_state *state, int rank, int rank_count,
                                const tn__tcp_gather *by);

/* Nothing of it goes on; the others are told, with this thread's last error. */
void tn__tcp_give_up(tn__comm_state *state, tn_status status);

/* Ends a reference. */
void tn__tcp_state_drop(tn__comm_state *state);

/* The lanes of all ranks are empty; a lane of a block of memory. */
void tn__tcp_lanes_clear(tn__comm_state *state);
tn__tcp_lane *tn__tcp_lane_to(tn__comm_state *state, int rank);
tn__tcp_lane *tn__tcp_lane_from(tn__comm_state *state, int rank);
void tn__tcp_lane_block(tn__tcp_lane *lane, const void *bytes, size_t count);

/* Moves what is in all lanes, until the deadline. */
tn_status tn__tcp_exchange(tn__comm_state *state);

/* While nothing is exchanged: why nothing will come of the rank any more, if it has said so or has
 * died; TN_OK: it has not. */
tn_status tn__tcp_look_at(tn__comm_state *state, int rank);

/* Does a batch, on the thread that calls. */
tn_status tn__tcp_batch_run(tn__comm_state *state, tn__flow_plan *plan);

/* tn__comm_engine's split. */
tn_status tn__tcp_split(tn__comm_state *state, int color, int key, const char *name,
                        tn_status so_far, int *rank, int *rank_count, tn__comm_state **out);

/* tn__comm_engine's shrink. */
tn_status tn__tcp_shrink(tn__comm_state *state, const int *excluded, int excluded_count,
                         const char *name, int *rank, int *rank_count, tn__comm_state **out);

#endif
