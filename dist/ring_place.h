/* Where gathers of a schedule lie in the ring's buffer: offsets from a list of stays, on the host.
 *
 * A *stay* is the time from the operation that starts a unit's gather to the one that ends its
 * last hold. Stays that meet in time lie apart; others may share bytes.
 *
 *     op         0   1   2   3   4   5   6        three units, the first as large as all others
 *     unit 0     [-------]                        buffer = the most that is there at one time,
 *     unit 1         [-------]                    not 2 x the largest
 *     unit 2                 [-------]
 */
#ifndef TENURE_RING_PLACE_H
#define TENURE_RING_PLACE_H

#include "error.h"

/* Every offset in the buffer is a multiple of it, and every stay takes multiples. */
enum { TN__RING_ALIGNMENT = 256 };

typedef struct tn__ring_stay {
    int first, last; /* operations: it is there from the start of the one to the end of the other */
    int unit;
    size_t bytes;  /* not 0 */
    size_t offset; /* found by tn__ring_place */
} tn__ring_stay;

typedef struct tn__ring_placed {
    size_t peak_bytes;   /* the most that is there at one time: no placement needs less */
    size_t buffer_bytes; /* what this one needs */
    size_t largest_bytes;
    int units_at_once;
} tn__ring_placed;

/* Bytes of a place for that many; SIZE_MAX if they are too many. */
size_t tn__ring_round_up(size_t bytes);

/* Gives each stay its offset. Of three placements the smallest is taken, the first of them if
 * equal:
 *     first fit in order of time      needs peak_bytes where all stays are of one size
 *     first fit, the largest first    what is large lies at the same place again and again
 *     equal slots of the largest      units_at_once x largest_bytes, however sizes are mixed
 * So peak_bytes <= buffer_bytes <= units_at_once x largest_bytes. Only for want of host memory does
 * it fail, or TN_INVALID_ARGUMENT if sizes overflow. */
tn_status tn__ring_place(tn__ring_stay *stays, int count, tn__ring_placed *out);

#endif
