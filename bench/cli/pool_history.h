/* A snapshot of a pool (tn_pool_snapshot_write, docs/formats.md) as a history: its pieces at the
 * end, and the events that the ring still had. */
#ifndef TENURE_POOL_HISTORY_H
#define TENURE_POOL_HISTORY_H

#include <cjson/cJSON.h>

#include "memory_history.h"

/* 1 and the history; 0 with the reason in error, which has HISTORY_ERROR_BYTES (torch_history.h),
 * and *is_out_of_memory. */
int pool_history_read(const char *name, const cJSON *root, memory_history **out, char *error,
                      int *is_out_of_memory);

#endif
