/* A library with NCCL's names that does as a test says, counts, and writes down what is called: how
 * it is told. */
#ifndef TENURE_SCRIPTED_NCCL_H
#define TENURE_SCRIPTED_NCCL_H

#include <stdatomic.h>

enum { SCRIPTED_LOG_BYTES = 4096 };

typedef struct scripted_nccl {
    int polls_in_progress; /* so many polls of a call say ncclInProgress; -1: all */
    int result;            /* what it then comes to */
    int refused;           /* the so-many-th collective from here returns ncclInvalidArgument */
    int refused_shrink;    /* ncclCommShrink returns this; 0: it does not */
    int (*launch)(const char *name, const void *src, void *dst, void *stream); /* what a call or a
                            * group puts on the stream, 0 if it could; NULL: they put nothing */
    int is_captured;   /* a stream captures: what NCCL does with memory or other ranks is refused */
    atomic_int graphs; /* that have the communicator: to end or abort it takes till there is none */
    atomic_int ending; /* aborts that have told their kernels to end */
    int is_early;      /* splits and registrations return success while in progress */
    int rank;          /* of every communicator */
    int rank_count;
    int collectives;
    int finalized;
    int destroyed;
    int aborted;
    int split;                    /* communicators that were made by ncclCommSplit */
    int registered;               /* buffers and windows that are registered now */
    int allocated;                /* segments of ncclMemAlloc */
    char log[SCRIPTED_LOG_BYTES]; /* "group( broadcast 100 root 1 ) " */
    const char *src;              /* of the last collective */
    char *dst;
} scripted_nccl;

/* The symbol of the one script: `extern scripted_nccl scripted_nccl_state`. */

#endif
