/* Tenure: communicators and collectives on device memory, in stream order.
 *
 *     tn_comm *comm;
 *     tn_comm_config config = TN_COMM_CONFIG_INIT;
 *     config.device = device;                          (no GPU, under mpirun: MPI)
 *     if (tn_comm_create(&config, &comm) != TN_OK) puts(tn_error_last());
 *     tn_all_gather(comm, shard, whole, shard_bytes, stream);
 *     ... work on `stream` that reads `whole` ...
 *     tn_all_reduce(comm, grad, grad, count, TN_BF16, TN_REDUCE_SUM, stream);
 *     if (tn_comm_wait(comm) != TN_OK) puts(tn_error_last());   (a rank that hangs shows here)
 *     tn_comm_destroy(comm);
 *
 * Started by torchrun or anything else, on GPUs or without MPI, ranks meet first
 * (tenure_rendezvous.h), and config.rendezvous says where. Or, on GPUs, rank 0 makes an id and
 * hands it to the others by any means (MPI, a file, a socket):
 *
 *     tn_comm_id id;
 *     if (rank == 0) tn_comm_id_create(&id);
 *     ... id reaches every rank ...
 *     config.id = &id, config.rank = rank, config.rank_count = rank_count;
 *
 * Engines, found at run time; this library needs none of the others to load:
 *
 *     NCCL  real CUDA devices; libnccl.so.2 (TENURE_NCCL_LIBRARY names another one)
 *     MPI   any devices; libtenure-mpi.so beside this library (TENURE_MPI_LIBRARY another one),
 *           which needs libmpi. It initializes MPI if the program has not, and then finalizes it
 *           at exit; a program that initializes MPI itself asks for MPI_THREAD_MULTIPLE, or for
 *           MPI_THREAD_SERIALIZED and makes no MPI calls while work is on a communicator. Memory
 *           of a CUDA device goes through pinned host memory, so that several ranks can share a
 *           GPU: each communicator takes 8 MiB of it and a thread, and gives them back to the
 *           device, which keeps them for the next one. It needs waits for values in streams (CUDA
 *           11.7).
 *     TCP   host devices; part of this library: a connection between every two ranks of a
 *           rendezvous. The same sums as MPI, bit for bit; and it outlives ranks that die.
 *
 * Rules for every collective: all ranks make the same calls with the same arguments (but for the
 * addresses, and what a call says) in the same order, and so they are done: one communicator's
 * collectives run one after the other, on whichever streams they were put. Addresses are of
 * blocks of a pool or of leased planes; they stay valid in the order of `stream` (on another
 * stream than the block's own, tn_record_use right after the call). Source and destination are
 * apart, or in place as each call says. A count of 0 on all ranks is success and puts nothing on
 * the stream. Lists are copied: they may go once the call returns.
 *
 * Failure: a rank that does not come, dies or calls something else makes the communicator of the
 * others fail, once and for good: every later call on it gives the same status and text,
 * TN_COMM_TIMEOUT or TN_COMM_ERROR. What was on streams then ends by itself, results undefined,
 * and never touches memory again, so that blocks are freed as ever. A failed communicator is
 * destroyed and made again, or shrunk to the ranks that are left (tn_comm_shrink). Where it is
 * noticed: MPI and TCP count the deadline of each collective from where its stream comes to it,
 * and see calls that do not match; TCP sees a rank that dies at once, and with both a rank that
 * gives up tells the others why (tn_comm_abort). NCCL has the deadline in tn_comm_create, in the
 * first collectives (which connect), in tn_comm_wait and tn_comm_destroy, and a thread watches what
 * is on streams: a collective that has begun and does not end within the timeout fails and, with a
 * rendezvous, so does one whose rank has died or failed elsewhere, on all ranks at about the same
 * time. Calls of NCCL that do not match hang till then; TENURE_CHECK_COLLECTIVES=1 compares them
 * first, on the host.
 *
 * A call that fails for want of memory before its collective is on a stream has changed nothing:
 * it can be made again, and the others wait for it till the deadline. A rank that will not make it
 * again tells them so by tn_comm_abort. Calls of several collectives (tenure_parallel.h, say) that
 * fail behind one of them do that themselves.
 *
 * Captured CUDA graphs: tenure_comm_graph.h. Without it a collective on a stream that captures is
 * refused, and the capture goes on.
 *
 * Threads: any thread may call; the order of calls is then the program's business.
 */
#ifndef TENURE_DIST_H
#define TENURE_DIST_H

#include "tenure_pool.h"
#include "tenure_tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- communicators ------------------------------------------------------------------------ */

typedef struct tn_comm tn_comm;
typedef struct tn_rendezvous tn_rendezvous; /* ranks that found each other: tenure_rendezvous.h */

typedef enum tn_comm_engine {
    TN_COMM_AUTO = 0, /* NCCL on a real CUDA device, else TCP with a rendezvous, else MPI */
    TN_COMM_NCCL,
    TN_COMM_MPI,
    TN_COMM_SIMULATED, /* one rank of many, on a simulated device: see tenure_simulated.h */
    TN_COMM_TCP
} tn_comm_engine;

/* What ranks of an NCCL communicator find each other by. */
typedef struct tn_comm_id {
    unsigned char bytes[128];
} tn_comm_id;

/* Makes a new id, on one rank. TN_UNSUPPORTED without NCCL: the text says what was looked for. */
TN_API TN_MUST_USE tn_status tn_comm_id_create(tn_comm_id *out);

struct tn_simulated_links; /* tenure_simulated.h */

typedef struct tn_comm_config {
    size_t size;
    tn_device *device; /* must outlive the communicator */
    tn_comm_engine engine;
    const char *name; /* in texts; copied; NULL means "comm" */
    /* Rank and count: MPI's own (of MPI_COMM_WORLD) or the adopted communicator's, and then both
     * are 0 here; with an id, and simulated, they are said here. */
    int rank;
    int rank_count;
    const tn_comm_id *id; /* NCCL: join the others by it */
    void *nccl_comm;      /* NCCL: or use this ncclComm_t, which stays the caller's */
    uint64_t timeout_us;  /* 0: ten minutes */
    const struct tn_simulated_links *links; /* SIMULATED: how fast they are; NULL: the defaults */
    /* TCP, or NCCL instead of an id: ranks and count come from it. */
    tn_rendezvous *rendezvous;
    /* NCCL: 1: after a failure it can be shrunk also without rank 0 and its store, for timeout_us.
     * What is on streams ends only then, by tn_comm_shrink or by tn_comm_destroy, whichever comes
     * first. */
    int shrinkable;
} tn_comm_config;
#define TN_COMM_CONFIG_INIT                                                                        \
    { sizeof(tn_comm_config), NULL, TN_COMM_AUTO, NULL, 0, 0, NULL, NULL, 0, NULL, NULL, 0 }

/* Joins the others: every rank calls, and several communicators are made in the same order.
 * Errors: TN_UNSUPPORTED (no such engine here, or not for this device: the text says what is
 * missing), TN_COMM_TIMEOUT (not all came), TN_COMM_ERROR, TN_INVALID_ARGUMENT, TN_INVALID_STATE
 * (MPI has been finalized), out of memory. */
TN_API TN_MUST_USE tn_status tn_comm_create(const tn_comm_config *config, tn_comm **out);

/* Waits for its collectives as tn_comm_wait does, then ends it, whatever the status says: that
 * of the wait. NULL is a no-op. An adopted communicator is left as it is. TN_IN_USE, and nothing
 * has ended, while it has captured graphs (tenure_comm_graph.h). */
TN_API tn_status tn_comm_destroy(tn_comm *comm);

/* Of NULL: -1, 0 and "". */
TN_API int tn_comm_rank(const tn_comm *comm);
TN_API int tn_comm_size(const tn_comm *comm); /* count of ranks */
TN_API const char *tn_comm_name(const tn_comm *comm);
TN_API const char *tn_comm_engine_name(const tn_comm *comm); /* "NCCL", "MPI", "TCP", "simulated" */

/* Waits on the host until the collectives that were put on streams are done: TN_OK, or why they
 * will not be. After timeout_us (with MPI and TCP, whose collectives have that deadline, twice
 * timeout_us) it gives up with TN_COMM_TIMEOUT, also if what holds them up is other work before
 * them on their stream. */
TN_API TN_MUST_USE tn_status tn_comm_wait(tn_comm *comm);

/* Gives it up, here and on all other ranks, which then wait no longer for this one: it has failed
 * with TN_COMM_ERROR and these words (NULL: none of the caller's), the others with TN_COMM_ERROR,
 * this rank's number and the same words, at once where they are in a collective (MPI, TCP, and NCCL
 * with a rendezvous; NCCL without one by the deadline), else in their next. For a rank whose call
 * has failed and will not be made again. Does not wait. One that has failed stays as it is, and
 * NULL is a no-op. */
TN_API void tn_comm_abort(tn_comm *comm, const char *why);

/* ---- collectives -------------------------------------------------------------------------- */

/* What reductions do; of fp32 and bf16. SUM: in fp32; with MPI and TCP in the order of ranks from 0
 * and rounded once to nearest even, so that all ranks have the same bits in every run; with NCCL
 * in its order. MAX ignores NaN where there is another value. */
typedef enum tn_reduce { TN_REDUCE_SUM = 0, TN_REDUCE_MAX } tn_reduce;

/* dst = the `bytes` of every rank in the order of ranks. In place: src == dst + rank * bytes. */
TN_API TN_MUST_USE tn_status tn_all_gather(tn_comm *comm, const void *src, void *dst, size_t bytes,
                                           tn_stream stream);

/* src holds rank_count parts of `count` elements; dst = part `rank`, reduced over the ranks. In
 * place: dst == src + rank * count elements. */
TN_API TN_MUST_USE tn_status tn_reduce_scatter(tn_comm *comm, const void *src, void *dst,
                                               size_t count, tn_dtype dtype, tn_reduce reduce,
                                               tn_stream stream);

/* dst = the `count` elements reduced over the ranks, any count. In place: dst == src. */
TN_API TN_MUST_USE tn_status tn_all_reduce(tn_comm *comm, const void *src, void *dst, size_t count,
                                           tn_dtype dtype, tn_reduce reduce, tn_stream stream);

/* The `bytes` of rank root, on every rank. */
TN_API TN_MUST_USE tn_status tn_broadcast(tn_comm *comm, void *buffer, size_t bytes, int root,
                                          tn_stream stream);

/* What is put on `stream` from now on starts after every rank's stream has come to its barrier. */
TN_API TN_MUST_USE tn_status tn_barrier(tn_comm *comm, tn_stream stream);

/* ---- uneven collectives ------------------------------------------------------------------- */

/* A piece of a buffer that belongs to one rank. All ranks give the same list in the same order: a
 * rank has none, one or several segments, in any order of offsets, apart from each other; counts
 * of 0 are allowed. What no segment covers is left alone. */
typedef struct tn_segment {
    int rank;
    size_t offset; /* from the start of the whole buffer: bytes of a gather, elements of a */
    size_t count;  /* reduction */
} tn_segment;

/* dst = every rank's segments at their offsets. src holds this rank's segments one after the
 * other, in the order of the list. In place: src == dst, and this rank's segments are already at
 * their offsets. An address that nothing is read from or written to may be NULL. */
TN_API TN_MUST_USE tn_status tn_all_gather_uneven(tn_comm *comm, const void *src, void *dst,
                                                  const tn_segment *segments, size_t segment_count,
                                                  tn_stream stream);

/* src holds the whole buffer, on every rank; dst = this rank's segments, reduced over the ranks,
 * one after the other in the order of the list. In place: dst == src, and they stay at their
 * offsets, the other ranks' segments as they were. */
TN_API TN_MUST_USE tn_status tn_reduce_scatter_uneven(tn_comm *comm, const void *src, void *dst,
                                                      const tn_segment *segments,
                                                      size_t segment_count, tn_dtype dtype,
                                                      tn_reduce reduce, tn_stream stream);

/* Part r of src, `bytes` long, goes to rank r, and part r of dst is what came from it. Apart. */
TN_API TN_MUST_USE tn_status tn_all_to_all(tn_comm *comm, const void *src, void *dst, size_t bytes,
                                           tn_stream stream);

/* The same with parts of any size and place: send_bytes[r] at src + send_offsets[r] go to rank r,
 * receive_bytes[r] come from it to dst + receive_offsets[r], for each of tn_comm_size ranks.
 * Offsets that are NULL: one part after the other. Two ranks agree on what goes between them, and
 * nobody else knows it, so that every rank calls, and the call is put on the stream even if this
 * rank neither sends nor receives. src and dst are apart. */
TN_API TN_MUST_USE tn_status tn_all_to_all_uneven(tn_comm *comm, const void *src,
                                                  const size_t *send_bytes,
                                                  const size_t *send_offsets, void *dst,
                                                  const size_t *receive_bytes,
                                                  const size_t *receive_offsets, tn_stream stream);

/* ---- between two ranks -------------------------------------------------------------------- */

/* `bytes` from one rank's tn_send to its peer's tn_receive; the other ranks are not concerned.
 * What one rank sends another it receives in the same order. Outside of a group each is done before
 * the next collective: two ranks that both send first, and then receive, wait for each other until
 * the deadline; in a group they do not. A rank sends to itself only in a group, which has as many
 * receives of it, of the same bytes in the same order. */
TN_API TN_MUST_USE tn_status tn_send(tn_comm *comm, const void *src, size_t bytes, int peer,
                                     tn_stream stream);
TN_API TN_MUST_USE tn_status tn_receive(tn_comm *comm, void *dst, size_t bytes, int peer,
                                        tn_stream stream);

/* ---- groups ------------------------------------------------------------------------------- */

/* The collectives that are called on the communicator between begin and end are one collective:
 * one group of NCCL, one exchange of headers of MPI and TCP, one place in the communicator's order.
 * Each is checked when it is called, with the stream that end is given, and put on it by end: all
 * or none. Among themselves they have no order, and nobody checks that what one writes no other
 * reads or writes. A group of nothing but sends and receives concerns only the ranks that they
 * name; with any other call in it all ranks.
 *
 * A call that fails is not in the group, which stays open. If end fails, nothing was put and the
 * group is still open as it was: end it again, or cancel it. A communicator has one group at a
 * time, which calls of any thread are in. A group without calls, or of counts of 0, puts nothing.
 * tn_comm_destroy forgets an open group.
 *
 * TN_INVALID_STATE: begin in a group, end outside of one. cancel forgets the calls since begin; it
 * is a no-op outside of a group. */
TN_API TN_MUST_USE tn_status tn_comm_group_begin(tn_comm *comm);
TN_API TN_MUST_USE tn_status tn_comm_group_end(tn_comm *comm, tn_stream stream);
TN_API void tn_comm_group_cancel(tn_comm *comm);

/* ---- sub-groups of ranks ------------------------------------------------------------------ */

/* A communicator of the ranks that give the same color, in the order of their keys, then of their
 * ranks in comm: for data, tensor, expert and replica parallelism beside each other. Every rank of
 * comm calls, as with tn_comm_create. With a color below 0 a rank is in none: TN_OK, *out = NULL.
 * name is copied; NULL: that of comm. The new communicator has comm's device, engine and timeout,
 * and its own order, failure and statistics; both are destroyed in any order.
 *
 * With NCCL and TCP the call waits for comm's collectives first (tn_comm_wait).
 *
 * Errors: TN_INVALID_STATE within a group or a capture; TN_UNSUPPORTED (NCCL before 2.18); out of
 * memory of this or another rank, and then comm stays as it is. TN_COMM_TIMEOUT (not all ranks
 * came) and TN_COMM_ERROR are comm's failure too. */
TN_API TN_MUST_USE tn_status tn_comm_split(tn_comm *comm, int color, int key, const char *name,
                                           tn_comm **out);

/* A communicator of comm's ranks but those that are listed, in their order: to go on after ranks
 * have died or hung, or with fewer ranks by choice. Every rank that stays calls with the same
 * list (in any order), within comm's timeout of each other; the others need not live. The call
 * first waits for comm's collectives, or for their failure. The new communicator is as with
 * tn_comm_split. comm stays as it is, to be destroyed, or used on if it has not failed, but it is
 * not shrunk again: shrink the new one.
 *
 * TCP makes new connections. NCCL's ranks join anew, by an id through the rendezvous that comm
 * was made with, if that has a store and rank 0 stays; a rank that is left alone does by itself.
 * Else it is ncclCommShrink (2.27 and later), after a failure with its flag to abort, for which
 * comm was made with config.shrinkable. That NCCL refuses to a communicator which has met an error
 * itself, as one over sockets has with any death: a status that says so, and then the ranks that
 * are left make a new rendezvous and a communicator from it.
 * The new one hears of other ranks by its own deadlines only, as what the rendezvous knows is
 * also of those that are left out. MPI and simulated ranks: TN_UNSUPPORTED; the first ends a job
 * of which a rank dies.
 *
 * Errors: TN_INVALID_ARGUMENT (a rank that there is not, twice, or this one), TN_INVALID_STATE (in
 * a group or a capture; it was shrunk before), TN_IN_USE (it has captured graphs), TN_UNSUPPORTED
 * (the text says what is missing), out of memory. TN_COMM_TIMEOUT (not all of them came, or with
 * another list) and TN_COMM_ERROR (one that was to stay has died; NCCL refuses) are comm's failure
 * too; after that it may be shrunk further, if not by ncclCommShrink. */
TN_API TN_MUST_USE tn_status tn_comm_shrink(tn_comm *comm, const int *excluded,
                                            size_t excluded_count, const char *name, tn_comm **out);

/* ---- statistics --------------------------------------------------------------------------- */

typedef enum tn_collective {
    TN_ALL_GATHER = 0,
    TN_REDUCE_SCATTER,
    TN_ALL_REDUCE,
    TN_BROADCAST,
    TN_BARRIER,
    TN_ALL_GATHER_UNEVEN,
    TN_REDUCE_SCATTER_UNEVEN,
    TN_ALL_TO_ALL,
    TN_ALL_TO_ALL_UNEVEN,
    TN_SEND,
    TN_RECEIVE,
    TN_COLLECTIVE_COUNT
} tn_collective;

TN_API const char *tn_collective_name(tn_collective collective); /* "all_gather" */

/* Payload that this rank has to send to others, counted as calls are put on streams; of calls that
 * are captured (tenure_comm_graph.h), as their graph is launched. With n ranks and an all_reduce
 * cut in n parts of ceil(count / n) elements, of which this rank's has p:
 *
 *     all_gather              (n - 1) * bytes
 *     reduce_scatter          (n - 1) * count elements
 *     all_reduce              count - p elements to reduce them, then (n - 1) * p of the result
 *     broadcast               (n - 1) * bytes at the root, else 0
 *     barrier                 0
 *     all_gather_uneven       (n - 1) * bytes of this rank's segments
 *     reduce_scatter_uneven   elements of the other ranks' segments
 *     all_to_all              (n - 1) * bytes
 *     all_to_all_uneven       send_bytes to the other ranks
 *     send                    bytes, to another rank
 *     receive                 0
 *
 * MPI and TCP send just these, and a header of each call or group that is not counted. For NCCL it
 * is the least that any algorithm can do without the network's help; the word by which its ranks
 * agree before a split, or a window, is not counted. */
typedef struct tn_comm_stats {
    size_t size;
    uint64_t calls[TN_COLLECTIVE_COUNT]; /* that were put on a stream: none of count 0 */
    uint64_t wire_bytes[TN_COLLECTIVE_COUNT];
    uint64_t groups;         /* that were put; what they contain is in the counts above */
    uint64_t graph_launches; /* what was captured is in all counts above, with each launch */
} tn_comm_stats;
#define TN_COMM_STATS_INIT                                                                         \
    { sizeof(tn_comm_stats), {0}, {0}, 0, 0 }

/* What the communicator is, why it has failed if it has, and its last 64 collectives with what is
 * known of them; also of a failed one. Returns and cuts as tn_pool_report does. With
 * TENURE_VERBOSE=1 the collectives are printed on standard error when it fails. */
TN_API size_t tn_comm_report(tn_comm *comm, tn_report_format format, char *text, size_t text_bytes);

/* Also of a failed communicator. */
TN_API TN_MUST_USE tn_status tn_comm_stats_get(tn_comm *comm, tn_comm_stats *out);

#ifdef __cplusplus
}
#endif
#endif
