/* Which blocks lie together: by size and by expected lifetime. See heap.h, lifetime_classes.h.
 *
 * A block that lives long between short-lived ones leaves, on each side, a part of a page that is
 * too small for anything; beside its like it leaves none. What is long is measured by the peak of
 * live memory: a block is long-lived if about as much is allocated during its life as the pool has
 * ever had live. Weights, optimizer state, gradients and caches that grow are; activations and
 * temporaries are not.
 */
#include "heap.h"

#define LONG_BYTES_MIN ((uint64_t)1 << 30) /* below that, too little is known */

const char *tn__zone_name(tn__zone_kind zone) {
    static const char *const names[] = {"large", "long", "small", "dedicated"};
    return names[zone];
}

static uint64_t long_bound(const tn__heap *heap) {
    uint64_t peak = heap->peak_live_bytes;
    return peak > LONG_BYTES_MIN ? peak : LONG_BYTES_MIN;
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
    return tn__lifetime_is_long(&heap->lifetimes, request->lifetime_slot, long_bound(heap))
               ? TN__ZONE_LONG
               : TN__ZONE_LARGE;
}
