/* Limits on what all pools of the process together may hold, whichever device it is on.
 *
 * Whoever takes physical memory from a driver claims it just before, and unclaims it as soon as it
 * has been given back or could not be had. So the sum is never below what is held, and the hard
 * limit holds at all times, also between threads that grow at once. Lock-free.
 */
#ifndef TENURE_PROCESS_LIMITS_H
#define TENURE_PROCESS_LIMITS_H

#include "error.h"

/* How far growth may go. */
typedef enum tn__growth {
    TN__GROWTH_HARD, /* up to the hard limit */
    TN__GROWTH_SOFT  /* up to the soft limit: while idle memory may still serve */
} tn__growth;

/* TN_OUT_OF_DEVICE_MEMORY with words, and nothing is claimed, if that exceeds the limit. */
tn_status tn__process_claim(size_t bytes, tn__growth growth);
void tn__process_unclaim(size_t bytes);

/* Unclaims what has gone back to a driver. Who found none there before may find it now: that is
 * counted. 0 bytes: it was not claimed, or has gone to where pools look before they ask. */
void tn__process_give_back(size_t bytes);
uint64_t tn__process_given_back(void);

size_t tn__process_claimed(void);

/* What the limit leaves to claim; SIZE_MAX: there is none. */
size_t tn__process_headroom(tn__growth growth);

/* SIZE_MAX: there is none. */
size_t tn__process_limit(tn__growth growth);

#endif
