/* What a communicator asks of its engine: one table, three engines.
 *
 *     nccl_engine.c       NCCL, loaded at run time with its interface declared in nccl_abi.h
 *     mpi/mpi_engine.c    MPI, which has no binary interface to declare: compiled against its
 *                         headers into the plug-in libtenure-mpi.so, loaded by mpi_plugin.c
 *     sim_engine.c        one rank of a simulated job
 *     tcp_engine.c        sockets between the ranks of a rendezvous
 *
 * comm.c above the table checks arguments, keeps a communicator's collectives in one order over
 * all streams, counts bytes and remembers the first failure. An engine does one batch at a
 * time, and ends what it put on streams in bounded time once it is told to abort.
 */
#ifndef TENURE_COMM_ENGINE_H
#define TENURE_COMM_ENGINE_H

#include <pthread.h>

#include "error.h"
#include "tenure_dist.h"

/* Rises with every change of what is in this file: a plug-in of another build is refused. */
enum { TN__COMM_ENGINE_ABI = 8 };

typedef struct tn__comm_state tn__comm_state; /* an engine's own, for one communicator */

/* One call of a batch, checked. */
typedef struct tn__collective_call {
    tn_collective kind;
    const void *src;
    void *dst;
    size_t count; /* elements: of one part (all_gather, reduce_scatter) or of all */
    size_t element_bytes;
    tn_dtype dtype; /* of reductions; else TN_BYTE */
    tn_reduce reduce;
    int root; /* of a send or receive: the other rank */
    size_t
        first_segment; /* of an uneven call, in the batch's list; of all_to_all_uneven: what goes */
    size_t segment_count; /* to each rank, by rank, then what comes from each */
    int is_uncounted;     /* the communicator's own: in no statistics */
} tn__collective_call;

/* What is put on a stream at once: one call, or those of a group. Not empty. */
typedef struct tn__batch {
    tn__collective_call *calls;
    size_t call_count;
    tn_segment *segments; /* of all calls; offsets and counts in elements of their call */
    size_t segment_count;
} tn__batch;

typedef struct tn__comm_engine {
    unsigned abi;
    const char *name;
    /* 1: a collective on a stream ends by itself timeout_us after its start, check() says why. */
    int has_deadlines;
    /* 1: time passes only where the host waits for it, so that to look again and again is no way
     * to wait; and what is on streams ends by itself. */
    int in_virtual_time;
    /* 1: nothing of a communicator may be on streams while it is split. */
    int splits_when_idle;
    /* 1: it joins by config->id, also where there is a rendezvous, which hands that round. */
    int joins_by_id;
    /* 1: the stream that start gets may be captured: what it puts is in the graph then, and runs at
     * each launch of it. */
    int is_capturable;

    /* Joins the other ranks within config->timeout_us, which is not 0; name is not NULL. */
    tn_status (*join)(const tn_comm_config *config, int *rank, int *rank_count,
                      tn__comm_state **out);

    /* As tn_comm_split, whose arguments are checked; NULL: it can not. *out is NULL for a rank in
     * no new one. A rank that has failed already (so_far, recorded) takes part to tell the others,
     * and gets so_far back. On a TN_COMM_ status the state that is split must be aborted.
     *
     * An engine that can not tell them takes all memory for it before, by split_prepare, and *out
     * is then what that has made: the ranks agree on how they have fared, and split is called with
     * TN_OK, and has used *out up. Where a rank has failed the state that was made leaves. NULL:
     * the engine tells. */
    tn_status (*split_prepare)(tn__comm_state *state, tn__comm_state **out);
    tn_status (*split)(tn__comm_state *state, int color, int key, const char *name,
                       tn_status so_far, int *rank, int *rank_count, tn__comm_state **out);

    /* As tn_comm_shrink, whose arguments are checked; the state may have failed and been aborted.
     * On a TN_COMM_ status the state that is shrunk must be aborted. NULL: it can not. */
    tn_status (*shrink)(tn__comm_state *state, const int *excluded, int excluded_count,
                        const char *name, int *rank, int *rank_count, tn__comm_state **out);

    /* For an engine whose states can not be shrunk once they are aborted, and whose end of one
     * waits till the graphs that it is in are destroyed; else NULL, both. keep: from now on abort
     * only marks the state, and what is on streams ends by leave or expire, and, if it is kept to
     * be shrunk, by shrink. expire: ends one that is marked, without the lock meanwhile, which the
     * caller has. */
    void (*keep)(tn__comm_state *state, int is_to_be_shrunk);
    void (*expire)(tn__comm_state *state, pthread_mutex_t *lock);

    /* Puts a batch on the stream, where no other of this communicator runs beside it. The batch is
     * the caller's again when this returns. On failure nothing was put, unless check() fails from
     * then on. */
    tn_status (*start)(tn__comm_state *state, const tn__batch *batch, tn_stream stream);

    /* TN_OK, or the recorded failure of what was put on streams before. Never waits. */
    tn_status (*check)(tn__comm_state *state);

    /* Makes what is on streams end soon without touching memory again. May come twice. */
    void (*abort)(tn__comm_state *state);

    /* Ends the state: nothing is on streams, or it has been aborted. */
    void (*leave)(tn__comm_state *state);

    /* Registered memory, while nothing of the communicator is on streams; memory for pools. NULL,
     * all three: it has none. */
    tn_status (*enroll)(tn__comm_state *state, void *address, size_t bytes, int is_window,
                        void **handle);
    tn_status (*withdraw)(tn__comm_state *state, void *handle, int is_window);
    tn_status (*memory_functions)(tn_device *device, tn_memory_functions *out);

    /* From now on the state's calls give up after timeout_us. NULL: they have no other limit than
     * that of their communicator. */
    void (*limit)(tn__comm_state *state, uint64_t timeout_us);
} tn__comm_engine;

/* The plug-in's one symbol. */
#define TN__MPI_ENGINE_SYMBOL "tn__mpi_engine"

/* TN_UNSUPPORTED, with what is missing, where the engine is not to be had. */
tn_status tn__nccl_engine_get(const tn__comm_engine **out);
int tn__nccl_is_for_host(void); /* 1: the NCCL that is loaded is a stand-in for host devices */
tn_status tn__mpi_engine_get(const tn__comm_engine **out);
tn_status tn__simulated_engine_get(const tn__comm_engine **out);
const tn__comm_engine *tn__tcp_engine_get(void);

#endif
