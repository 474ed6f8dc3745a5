/* The list of calls that a communicator puts on a stream at once, grown as needed and kept for the
 * next: the warm path allocates nothing here. */
#ifndef TENURE_COMM_BATCH_H
#define TENURE_COMM_BATCH_H

#include "comm_engine.h"

typedef struct tn__batch_list {
    tn__batch batch;
    size_t call_room;
    size_t segment_room;
} tn__batch_list;

/* Adds a call with a copy of its segments; on failure the list is as it was. */
tn_status tn__batch_add(tn__batch_list *list, const tn__collective_call *call,
                        const tn_segment *segments, size_t segment_count);

void tn__batch_clear(tn__batch_list *list);
void tn__batch_free(tn__batch_list *list);

#endif
