/* A history as a file of another kind. Failures of the stream are left to its ferror. */
#ifndef TENURE_HISTORY_WRITE_H
#define TENURE_HISTORY_WRITE_H

#include <stdio.h>

#include "memory_history.h"

/* A trace for `tenure replay`; times count from the first event. */
void history_write_trace(FILE *stream, const memory_history *history);

/* A log as RMM's logging_resource_adaptor writes it, for its replay benchmark. Blocks without
 * addresses get one each. */
void history_write_rmm(FILE *stream, const memory_history *history);

/* Events for chrome://tracing and Perfetto (the JSON object format): a counter of live bytes for
 * all and for each of the owners with most, a slice for each block, an instant for each shortage.
 * A history without times has a microsecond an event. 0 if there is no memory: then nothing was
 * written. */
int history_write_chrome(FILE *stream, const memory_history *history);

/* A memory snapshot as torch.cuda.memory._dump_snapshot writes it, for PyTorch's viewer and
 * torch.cuda._memory_viz. Needs addresses. An owner is the one frame of its blocks' stacks. A
 * segment is a stretch of addresses with memory at the end; where blocks were that no segment
 * holds, one is shown from the beginning to the end and given back then. 0 if memory is short. */
int history_write_torch(FILE *stream, memory_history *history);

#endif
