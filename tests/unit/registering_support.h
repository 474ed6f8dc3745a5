/* An engine that registers memory, over one that does not: registration fails, and collectives with
 * a window hang or bring wrong contents, as a test says. One test's engine at a time.
 */
#ifndef TENURE_REGISTERING_SUPPORT_H
#define TENURE_REGISTERING_SUPPORT_H

#include "comm.h"

enum { REGISTERING_LOG_BYTES = 1024 };

typedef struct registering_script {
    int refused_window; /* the so-many-th window from here is refused; 0: none */
    int refused_buffer; /* likewise */
    int refused_end;    /* likewise, of what ends either */
    int refused_start;  /* likewise, of collectives */
    int breaks;         /* the engine fails with the end that is refused */
    int hangs;          /* collectives of a communicator that has a window do not end */
    int corrupts;       /* the last byte that they bring is another one */
    int ends_fault;     /* the first split or collective ends what fails host allocations */
    int registered;     /* buffers and windows that are registered now */
    int allocated;      /* segments of the engine's memory */
    void (*on_end)(const void *address); /* of what ends; NULL: nobody looks */
    char log[REGISTERING_LOG_BYTES];     /* "split window 4096 end_window buffer 100 " */
} registering_script;

extern registering_script registering;

/* The engine over `base`, with the script as it is. */
const tn__comm_engine *registering_engine(const tn__comm_engine *base);

#endif
