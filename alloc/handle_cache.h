/* Physical handles that pools of a device gave up, kept for its next pools: a handle from here
 * costs no driver call, one from the driver tens of microseconds, and giving it back as much.
 *
 * One cache a device, made when it is first wanted and ended with the device; off unless
 * TENURE_HANDLE_CACHE says how many handles it may keep. It is emptied when a pool is short and
 * when another pool of the process needs memory. What it keeps is in no pool's books; it stays
 * claimed against the process's limits (process_limits.h).
 *
 * Locks: a cache's mutex is a leaf; the driver is called without it.
 */
#ifndef TENURE_HANDLE_CACHE_H
#define TENURE_HANDLE_CACHE_H

#include "driver.h"

/* 1 and a handle of that size, if there is one. */
int tn__handle_cache_take(tn_device *device, size_t bytes, tn__handle *out);

/* 1 if the cache keeps the handle, which is mapped nowhere and which no work uses. */
int tn__handle_cache_give(tn_device *device, size_t bytes, tn__handle handle);

/* Gives all of it back to the driver; *released_bytes is true also after a failure, and what could
 * not be given back stays. */
tn_status tn__handle_cache_empty(tn_device *device, size_t *released_bytes);

size_t tn__handle_cache_bytes(tn_device *device);

#endif
