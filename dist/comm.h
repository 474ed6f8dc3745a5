/* A communicator: an engine's state, and what is the same for all engines.
 *
 *     call  ->  checked  ->  in the list  ->  wait for the last  ->  engine  ->  mark as the last
 *                            (of a group: till its end)                          and count
 *
 * On a stream that captures the last is that of the capture, and what is counted is counted in its
 * graph, till that is launched: comm_graph.c.
 *
 * Invariants, under `lock`:
 *   - `last` is recorded behind every collective that was put on a stream (has_last: there is
 *     one), so that the next one, on whichever stream, runs after it;
 *   - `list` holds the calls of the open group (is_grouping), each of which is on group_stream;
 *     with no group open it is empty between calls;
 *   - failure is TN_OK, or the first failure with its text, and then the engine has been told to
 *     abort and gets no more work.
 */
#ifndef TENURE_COMM_H
#define TENURE_COMM_H

#include <pthread.h>

#include "comm_batch.h"
#include "driver.h"
#include "flight_recorder.h"
#include "tenure_comm_graph.h"

typedef struct tn__comm_watch tn__comm_watch;

/* What is known of symmetric windows: the same on all ranks, and nothing until one is wanted. */
typedef struct tn__window_knowledge {
    int is_known;
    tn_status status; /* TN_OK: they work; else they are not used, and the text says why */
    tn__saved_error text;
    uint64_t trial_us; /* that the trial may take */
    uint64_t check_us; /* that it took */
} tn__window_knowledge;

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
    tn__batch_list list;
    int is_grouping;
    struct tn_registration *registrations; /* comm_registration.c */
    struct tn_registration *spare;         /* for the next one; NULL: there is none */
    uint64_t registration_count;           /* that were begun: the number of the next */
    tn_stream agreement_stream;            /* comm_window.c; NULL: nothing was agreed on yet */
    void *agreement_word;                  /* a float of the device's memory */
    tn__window_knowledge windows;          /* comm_window.c */
    tn_stream group_stream;
    tn_comm_graph *capture;   /* that is open; NULL: none is */
    tn__event captured;       /* behind the last collective of the capture; NULL: none was opened */
    tn_comm_graph *launching; /* between begin and end of its launch; else NULL */
    uint64_t graph_count;     /* that are not destroyed */
    uint64_t graph_number;    /* of the last one that is of all ranks: the same on all */
    tn_status failure;
    tn__saved_error failure_text;
    tn_comm_stats stats;
    tn__flight_recorder flight;
    tn__comm_watch *watch; /* NULL: the engine watches itself */
    int is_part;           /* it was split from another */
    int is_shrinkable;     /* tn_comm_config.shrinkable */
    int is_shrunk;         /* under lock: another one has come of it by tn_comm_shrink */
};

/* Makes and joins it with the engine; the configuration is checked. */
tn_status tn__comm_create(const tn_comm_config *config, const tn__comm_engine *engine,
                          tn_comm **out);

/* One that has joined nobody yet, with the configuration's device, name and timeout; its last step,
 * on whose failure the engine's state has ended; and its end, without its engine. */
tn_status tn__comm_make(const tn_comm_config *config, tn_comm **out);
tn_status tn__comm_begin_watch(tn_comm *comm, tn_rendezvous *ranks);

/* Takes its memory before that, where no other rank waits yet. */
tn_status tn__comm_make_watch(tn_comm *comm, tn_rendezvous *ranks);
void tn__comm_free(tn_comm *comm);

/* Asks the device how far the collectives are, for the flight recorder. */
void tn__comm_look_done_locked(tn_comm *comm);

/* TN_OK, or the failure of the communicator, which is then this thread's last error. */
tn_status tn__comm_check_locked(tn_comm *comm);

/* The first failure of a communicator: remembers this thread's last error, and aborts. Returns
 * the status. */
tn_status tn__comm_fail_locked(tn_comm *comm, tn_status status);

/* After the engine has failed: the communicator's failure, if that is what it was, else status with
 * its words. */
tn_status tn__comm_settle_failure_locked(tn_comm *comm, tn_status status);

/* Has the stream come behind the communicator's last. */
tn_status tn__comm_wait_for_last(tn_comm *comm, tn_stream stream, uint64_t stream_id);

/* The collectives that have been put so far. */
uint64_t tn__comm_puts(tn_comm *comm);

/* The end of a call that can not be made again once it has put a collective: if it has failed, and
 * there are more of them now than puts_before, the other ranks are in what this one will not come
 * to, and are told at once: `call`, then the last error, which stays. Returns status. */
tn_status tn__comm_end_call(tn_comm *comm, const char *call, uint64_t puts_before,
                            tn_status status);

/* Counts the list in *stats: what it is to be added to once it runs. */
void tn__comm_count_list(const tn_comm *comm, tn_comm_stats *stats);

/* Puts the list, which is not empty, in the capture that the stream is in. */
tn_status tn__comm_graph_put_locked(tn_comm *comm, tn_stream stream, uint64_t stream_id);

/* TN_INVALID_STATE while a group or a capture is open or a graph is being launched: `what` it is
 * then that the communicator can not. */
tn_status tn__comm_check_closed_locked(const tn_comm *comm, const char *what);

/* TN_IN_USE while collectives of it are in graphs. */
tn_status tn__comm_check_no_graphs_locked(const tn_comm *comm, const char *what);

/* Whether the stream captures; a launch under way is TN_INVALID_STATE. */
tn_status tn__comm_ask_capture(tn_comm *comm, tn_stream stream, int *is_capturing);

/* Of a call that waits on the host: TN_UNSUPPORTED if the stream captures, and nothing has been
 * done to the capture. */
tn_status tn__refuse_capture(tn_device *device, tn_stream stream, const char *call);

/* Puts a checked call on the stream, or in the open group, with its segments. */
tn_status tn__collective_put(tn_comm *comm, const tn__collective_call *call,
                             const tn_segment *segments, size_t segment_count, tn_stream stream);

/* There is nothing to do, but a communicator that has failed says so. */
tn_status tn__collective_put_nothing(tn_comm *comm);

/* Of any collective with elements: whether `count` on each rank are few enough to be counted in
 * bytes; whether the addresses are there and aligned to elements; whether a reduction is one. */
tn_status tn__collective_check_size(const tn_comm *comm, const tn__collective_call *call);
tn_status tn__collective_check_addresses(const tn__collective_call *call);
tn_status tn__collective_check_reduction(const tn__collective_call *call);

/* A communicator of the same ranks for a trial: it gives up after timeout_us, and its failure is
 * nobody else's. Every rank calls, with nothing on streams; to be destroyed as any other. */
tn_status tn__comm_make_side(tn_comm *comm, const char *name, uint64_t timeout_us, tn_comm **out);

/* What agreements and the next registration take, once: a rank that has no memory for it says so
 * here, where no other waits for it yet. May be called again. */
tn_status tn__comm_prepare_agreement(tn_comm *comm);
tn_status tn__comm_prepare_registration(tn_comm *comm);

/* Every rank calls, prepared, with what it comes with: *failed is the lowest rank that comes with a
 * failure, and *theirs (NULL: never mind) what that is; -1 and TN_OK if none does. One all-reduce,
 * in no statistics, for which the host waits. A rank that can not take part has the communicator
 * fail. */
tn_status tn__comm_agree(tn_comm *comm, tn_status mine, int *failed, tn_status *theirs);
void tn__comm_end_agreement(tn_comm *comm);

/* Every rank calls, before memory is registered as a window: TN_OK if windows work and this memory
 * can be one, on all ranks; else TN_UNSUPPORTED or the communicator's failure, on all ranks. Tries
 * it out on a communicator beside this one, unless it is known. */
tn_status tn__comm_check_window(tn_comm *comm, void *address, size_t bytes);

/* What that may take of a communicator with the timeout: the ranks agree within the rest. */
uint64_t tn__comm_trial_us(uint64_t timeout_us);

/* Ends what is still registered; nothing is on streams. */
void tn__comm_end_registrations(tn_comm *comm);

/* tn_comm_deregister of what not all ranks have registered: it is compared with nobody's. */
tn_status tn__comm_undo_registration(struct tn_registration *registration);

#endif
