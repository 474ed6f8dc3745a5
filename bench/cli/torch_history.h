/* A memory snapshot of PyTorch (torch.cuda.memory._dump_snapshot) as a history.
 *
 * The file is a pickle of one dict: "segments", the state at its end, and "device_traces", for each
 * device the events that its ring still had. A block is freed when its free has completed. Blocks
 * that only a free or a segment tells of were there before. A block's owner is its user_metadata,
 * else the first frame of its stack that is Python and not PyTorch's own.
 */
#ifndef TENURE_TORCH_HISTORY_H
#define TENURE_TORCH_HISTORY_H

#include "memory_history.h"

#define HISTORY_ERROR_BYTES 768
#define ORDINAL_ANY         (-1) /* the one device that has anything */

/* 1 if bytes begin as a pickle does. */
int torch_history_is(const unsigned char *bytes, size_t length);

/* What a reader of a history returns: the exit status of a command, with the reason in error, which
 * has HISTORY_ERROR_BYTES; 0 and the history on success. name is for messages. */
int torch_history_read(const char *name, const unsigned char *bytes, size_t length, int ordinal,
                       memory_history **out, char *error);

#endif
