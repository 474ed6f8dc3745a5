/* Which blocks lie together: by size and by expected lifetime. See heap.h, lifetime_classes.h.
 *
 * A block that lives long between short-lived ones leaves, on each side, a part of a page that is
 * too small for anything; beside its like it leaves none. What is long is measured by what has been
 * allocated so far, since that is all that a job shows of its length: a class is long-lived if its
 * blocks live for half of that, and for a quarter of the peak of live memory at least. Weights and
 * optimizer state do, and gradients are of their sizes; activations and temporaries do not.
 */
#include "heap.h"

#define LONG_BYTES_MIN ((uint64_t)1 << 30) /* below that, too little is known */
#define PEAK_BYTES_MIN ((uint64_t)4 << 30) /* of less, a zone of their own saves nothing */

const char *tn__zone_name(tn__zone_kind zone) {
    static const char *const names[] = {"large", "long", "small", "dedicated"};
    return names[zone];
}

static uint64_t long_bound(const tn__heap *heap) {
    uint64_t bound = heap->lifetimes.clock / 2;
    if (bound < heap->peak_live_bytes / 4) bound = heap->peak_live_bytes / 4;
    return bound > LONG_BYTES_MIN ? bound : LONG_BYTES_MIN;
}

tn__zone_kind tn__heap_zone_for(tn__heap *heap, tn__request *request) {
    request->lifetime_slot = tn__lifetime_slot(request->bytes, request->owner, request->site);
    if (request->zone == TN__ZONE_DEDICATED) return TN__ZONE_DEDICATED;
    if (request->asked_bytes < TN__SMALL_BYTES) return TN__ZONE_SMALL;
    switch (request->lifetime) {
    case TN_LIFETIME_PERSISTENT: return TN__ZONE_LONG;
    case TN_LIFETIME_AUTO: break;
    default: return TN__ZONE_LARGE;
    }
    if (heap->peak_live_bytes < PEAK_BYTES_MIN) return TN__ZONE_LARGE;
    return tn__lifetime_is_long(&heap->lifetimes, request->lifetime_slot, long_bound(heap))
               ? TN__ZONE_LONG
               : TN__ZONE_LARGE;
}
