/* A batch as flows of bytes between ranks: what the engines that carry bytes themselves move.
 *
 *     flow       an ordered list of pieces (address, bytes), read or written from its start
 *     exchange   flows to and from each rank, done in rounds: of each flow at most row_bytes
 *
 *     kind         sends[r]                                   receives[r]
 *     REDUCE       what rank r is to reduce; own: [rank]      only [rank]: where the result goes
 *     ALL_REDUCE   the same                                   where the part of rank r goes
 *     SPREAD       only [rank]: what all others get           what rank r spreads
 *     PAIRS        what rank r gets                           what rank r sends
 *
 * Exchanges are done in this order: reductions in the order of calls, then the one spread (gathers,
 * broadcasts), then the one exchange of pairs. Pieces of all calls of a group follow each other in
 * the same flow, so that a group is as few messages as one call of the same bytes. What a rank
 * gives itself in a move is apart (tn__flow_copy_own).
 *
 * Each rank sends every other a header first. If they agree, what rank a sends rank b in an
 * exchange is as many bytes as b expects, so that both know the rounds of their pair without a
 * word. Rounds of different pairs need not be in step: a rank's round k waits only for messages of
 * other ranks' rounds k, which wait for less.
 *
 * Invariant: a plan is constant once made. A round's pieces are read before any of the same round
 * are written, and no later round reads what an earlier one has written: the next round may be
 * fetched before this one is stored.
 */
#ifndef TENURE_FLOW_PLAN_H
#define TENURE_FLOW_PLAN_H

#include "comm_engine.h"

typedef struct tn__flow_piece {
    char *address;
    size_t bytes;
    struct tn__flow_piece *next;
} tn__flow_piece;

typedef struct tn__flow {
    tn__flow_piece *first;
    tn__flow_piece *last;
    size_t bytes;
} tn__flow;

typedef enum tn__flow_kind {
    TN__FLOW_REDUCE,
    TN__FLOW_ALL_REDUCE,
    TN__FLOW_SPREAD,
    TN__FLOW_PAIRS
} tn__flow_kind;

typedef struct tn__flow_exchange {
    tn__flow_kind kind;
    tn_dtype dtype; /* of a reduction */
    tn_reduce reduce;
    size_t element_bytes;
    tn__flow *sends; /* by rank */
    tn__flow *receives;
} tn__flow_exchange;

/* Kinds in headers: of a group with more than one call for all ranks; with none. Those of
 * registered memory have its bytes as count, its kind as root and its number as hash. A split is no
 * batch, but whoever makes one meets it. */
enum {
    TN__FLOW_GROUP = -1,
    TN__FLOW_MESSAGES = -2,
    TN__FLOW_REGISTER = -3,
    TN__FLOW_DEREGISTER = -4,
    TN__FLOW_SPLIT = -5,
    TN__FLOW_LAUNCH = -6 /* of a graph: its number is hash, its calls are count */
};

/* What a rank is about to do, in its words to one other rank. */
typedef struct tn__flow_header {
    /* What all ranks call alike: */
    int32_t kind;
    int32_t dtype;
    int32_t reduce;
    int32_t root;
    uint64_t count;       /* of a group: its calls for all ranks */
    uint64_t sequence;    /* of this communicator's batches for all ranks, from 1 */
    uint64_t hash;        /* of the calls and their lists */
    uint64_t is_captured; /* 1: into a graph */
    /* Where only the two have to agree (uneven all-to-alls, messages): */
    uint64_t sent_bytes;
    uint64_t sent_hash;
    uint64_t expected_bytes;
    uint64_t expected_hash;
} tn__flow_header;

typedef struct tn__flow_plan {
    int rank;
    int rank_count;
    tn__flow_exchange *exchanges;
    size_t exchange_count;
    tn__flow own_sends[2]; /* what this rank gives itself (in messages: the second) */
    tn__flow own_receives[2];
    tn__flow_header *headers; /* by rank */
    int is_for_all;           /* else ranks that send each other nothing do not meet */
} tn__flow_plan;

/* One block of host memory, for tn__host_free; nothing of the batch is needed after it. */
TN_SISTER_API tn_status tn__flow_plan_make(int rank, int rank_count, const tn__batch *batch,
                                           tn__flow_plan **out);

/* TN_COMM_ERROR: a rank that splits a communicator meets one that does what this header says. */
tn_status tn__flow_fail_split(const char *comm_name, int other, const tn__flow_header *theirs);

/* Whether this rank exchanges headers with another. */
TN_SISTER_API int tn__flow_meets(const tn__flow_plan *plan, int other);

/* Numbers the plan, before it is carried out: *sequence counts those for all ranks. */
TN_SISTER_API void tn__flow_number(tn__flow_plan *plan, uint64_t *sequence);

/* "all_gather 3". */
TN_SISTER_API void tn__flow_name(const tn__flow_plan *plan, char *text, size_t text_bytes);

/* TN_COMM_ERROR, with both in words, unless what another rank says to us agrees with our header to
 * it. */
TN_SISTER_API tn_status tn__flow_check_header(const tn__flow_plan *plan, const char *comm_name,
                                              int other, const tn__flow_header *theirs);

/* The same of what all ranks call alike: what it says of our pair is not looked at. */
tn_status tn__flow_check_alike(const char *comm_name, int rank, const tn__flow_header *mine,
                               int other, const tn__flow_header *theirs);

/* ---- rounds --------------------------------------------------------------------------------- */

typedef struct tn__flow_cursor {
    const tn__flow_piece *piece;
    size_t begun; /* bytes of it that are used up */
    size_t bytes; /* left in the flow */
} tn__flow_cursor;

tn__flow_cursor tn__flow_begin(const tn__flow *flow);

/* Takes the next stretch, at most `bytes`: its length. The flow has as many. */
size_t tn__flow_take(tn__flow_cursor *cursor, size_t bytes, char **address);

/* A walk over the rounds of a plan; any number of them over one plan. */
typedef struct tn__flow_rounds {
    const tn__flow_plan *plan;
    size_t row_bytes;
    const tn__flow_exchange *exchange; /* of the round; NULL before the first */
    tn__flow_cursor *sends;            /* by rank: where the round begins */
    tn__flow_cursor *receives;
    size_t *send_bytes; /* of the round, by rank */
    size_t *receive_bytes;
} tn__flow_rounds;

/* Before the first round; one block for tn__host_free. row_bytes holds whole elements of 64. */
TN_SISTER_API tn_status tn__flow_rounds_make(const tn__flow_plan *plan, size_t row_bytes,
                                             tn__flow_rounds **out);

/* Goes on to the next round: 0 if there is none. */
TN_SISTER_API int tn__flow_rounds_next(tn__flow_rounds *rounds);

/* Visits the round's pieces of the caller's memory, each with its place in a buffer of rows of
 * row_bytes: row r is what goes to or comes from rank r (of a SPREAD in: row 0 for all). */
typedef tn_status (*tn__flow_visit)(void *context, char *address, size_t at, size_t bytes);
TN_SISTER_API tn_status tn__flow_round_in(const tn__flow_rounds *rounds, tn__flow_visit visit,
                                          void *context);
TN_SISTER_API tn_status tn__flow_round_out(const tn__flow_rounds *rounds, tn__flow_visit visit,
                                           void *context);

typedef tn_status (*tn__flow_copy)(void *context, char *dst, const char *src, size_t bytes);
TN_SISTER_API tn_status tn__flow_copy_own(const tn__flow_plan *plan, tn__flow_copy copy,
                                          void *context);

#endif
