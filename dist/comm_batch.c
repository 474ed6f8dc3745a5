/* Lists of calls: see comm_batch.h. */
#include "comm_batch.h"

#include <string.h>

#include "host_alloc.h"

enum { ROOM_MIN = 8 };

/* Room for `more` items behind `count`. */
static tn_status make_room(void **items, size_t *room, size_t count, size_t more,
                           size_t item_bytes) {
    if (*room - count >= more) return TN_OK;
    size_t wanted = count + more;
    if (wanted < 2 * *room) wanted = 2 * *room;
    if (wanted < ROOM_MIN) wanted = ROOM_MIN;
    void *grown = tn__host_realloc(*items, *room, wanted, item_bytes);
    if (!grown) return TN_OUT_OF_HOST_MEMORY;
    *items = grown;
    *room = wanted;
    return TN_OK;
}

tn_status tn__batch_add(tn__batch_list *list, const tn__collective_call *call,
                        const tn_segment *segments, size_t segment_count) {
    tn__batch *batch = &list->batch;
    void *calls = batch->calls, *kept = batch->segments;
    tn_status status =
        make_room(&calls, &list->call_room, batch->call_count, 1, sizeof *batch->calls);
    batch->calls = calls;
    if (status != TN_OK) return status;
    status = make_room(&kept, &list->segment_room, batch->segment_count, segment_count,
                       sizeof *batch->segments);
    batch->segments = kept;
    if (status != TN_OK) return status;
    tn__collective_call *added = &batch->calls[batch->call_count++];
    *added = *call;
    added->first_segment = batch->segment_count;
    added->segment_count = segment_count;
    if (segment_count)
        memcpy(batch->segments + batch->segment_count, segments, segment_count * sizeof *segments);
    batch->segment_count += segment_count;
    return TN_OK;
}

void tn__batch_clear(tn__batch_list *list) {
    list->batch.call_count = 0;
    list->batch.segment_count = 0;
}

void tn__batch_free(tn__batch_list *list) {
    tn__host_free(list->batch.calls);
    tn__host_free(list->batch.segments);
    *list = (tn__batch_list){0};
}
