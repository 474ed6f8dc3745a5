/* A library with NCCL's names that does as a test says, and counts: how it is told. */
#ifndef TENURE_SCRIPTED_NCCL_H
#define TENURE_SCRIPTED_NCCL_H

typedef struct scripted_nccl {
    int polls_in_progress; /* so many polls of a call say ncclInProgress; -1: all */
    int result;            /* what it then comes to */
    int collectives;
    int finalized;
    int destroyed;
    int aborted;
} scripted_nccl;

/* The symbol of the one script: `extern scripted_nccl scripted_nccl_state`. */

#endif
