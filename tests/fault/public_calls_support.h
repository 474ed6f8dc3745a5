/* One row, or several, for each public function of tenure_alloc.h and tenure_pool.h: how it is
 * called in the middle of a program, so that what it asks of the driver and of host memory can be
 * made to fail at every turn. A function without a row fails fault/public_faults. */
#ifndef TENURE_PUBLIC_CALLS_SUPPORT_H
#define TENURE_PUBLIC_CALLS_SUPPORT_H

#include "test_graphs.h"

enum { SUBJECT_BLOCKS = 8, SUBJECT_POOLS = 4 };

/* A program that is under way: pools with live blocks, freed ones that another stream may still
 * use, and holes. */
typedef struct public_subject {
    tn_device *device;
    tn_device *peer;  /* another GPU */
    tn_device *extra; /* made or ended by a row */
    tn_pool *pages;   /* VMM */
    tn_pool *plain;
    tn_pool *made;
    tn_stream a;
    tn_stream b;
    tn_stream extra_stream;
    tn_stream foreign; /* of another library; NULL: none */
    void *blocks[SUBJECT_BLOCKS];
    void *made_block;
    tn_pool *graphs;  /* a graph pool, with a graph and a checkpoint; NULL: no row needs it */
    test_graph graph; /* of a capture on a */
    tn_graph_memory memory;
    tn_checkpoint *checkpoint;
    void *extra_block; /* of the checkpoint */
    int is_tried;      /* a pause: it may be under way after it has failed */
    void *shareable;   /* a block that can be exported */
    void *imported;    /* the same block, mapped once more */
    tn_share share;
    int file; /* of the share; -1: none is open */
    char path[256];
} public_subject;

/* What a call may do, beyond succeeding or leaving everything as it was. */
enum {
    PURE = 1,       /* asks nothing of the driver and of host memory */
    GIVES_BACK = 2, /* a failed call may have given idle memory back */
    ENDS = 4,       /* the call ends something for good: it is not called again */
    BLAMES_FILE = 8 /* drivers give any code for a file that is no block */
};

typedef struct public_call {
    const char *function;
    void (*setup)(public_subject *s); /* NULL: nothing more */
    tn_status (*run)(public_subject *s);
    void (*undo)(public_subject *s); /* after a call that succeeded; NULL: nothing */
    int flags;
} public_call;

extern const public_call public_calls[];
extern const size_t public_call_count;

void public_subject_open(public_subject *s, const public_call *call);
/* Ends everything; nothing may be left in the driver or of host memory. */
void public_subject_close(public_subject *s);

#endif
