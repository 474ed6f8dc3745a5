/* Times in which this library does not wait for the device: tn_no_wait_begin in tenure_pool.h.
 *
 * A wait of our own asks tn__may_wait and ends early; a driver call that may wait by itself is made
 * between tn__driver_wait_begin and _end, or not at all. Leaf lock; nothing is called under it.
 */
#ifndef TENURE_NO_WAIT_H
#define TENURE_NO_WAIT_H

#include "error.h"

int tn__may_wait(void);

/* 1: the call may be made, and tn__driver_wait_end comes after it. Nests. 0: not now. */
int tn__driver_wait_begin(void);
void tn__driver_wait_end(void);

/* A graph pool's capture is open: a wait for a whole device could spoil it. */
void tn__capture_opened(void);
void tn__capture_closed(void);
int tn__is_capture_open(void);

#endif
