/* Writes an allocation trace: one line an event, gzip if the name ends in .gz.
 *
 *     op,id,bytes,stream,time_us,address,owner
 *     a,1,262144000,0,12,0x7f2000000000,weights     12 us after the start, for stream 0
 *     f,1,,,340,,
 *     o,,1099511627776,,352,,logits     out of memory: bytes that could not be had
 *
 * An owner is the rest of its line: control characters in it are written as '?', and what is beyond
 * TN_EVENT_OWNER_BYTES - 1 bytes is left out, as in events. Ids count from 1, streams from 0 in
 * order of appearance. Lines go out in blocks: a process that is killed loses the last ones. A
 * write that fails is remembered and told at the end. Not thread-safe: a pool writes under its
 * mutex.
 */
#ifndef TENURE_TRACE_WRITER_H
#define TENURE_TRACE_WRITER_H

#include "error.h"

typedef struct tn__trace_writer tn__trace_writer;

/* TN_IO naming the file if it can not be made. Times are counted from start_us. */
TN_SISTER_API tn_status tn__trace_open(const char *path, double start_us, tn__trace_writer **out);

typedef struct tn__trace_block {
    size_t bytes; /* as asked for */
    uintptr_t address;
    const char *owner; /* NULL: unnamed */
} tn__trace_block;

/* The id of the new block. *stream_number is given one if it is negative. */
TN_SISTER_API uint64_t tn__trace_alloc(tn__trace_writer *trace, const tn__trace_block *block,
                                       int64_t *stream_number, double now_us);
TN_SISTER_API void tn__trace_free(tn__trace_writer *trace, uint64_t id, double now_us);

/* A request that could not be served; block->address is not looked at. */
TN_SISTER_API void tn__trace_shortage(tn__trace_writer *trace, const tn__trace_block *block,
                                      double now_us);

/* Closes the file and ends the writer, also on TN_IO. A forked child leaves the file alone. */
TN_SISTER_API tn_status tn__trace_close(tn__trace_writer *trace);

#endif
