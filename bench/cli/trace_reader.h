/* Reads an allocation trace event by event and refuses everything that is not one.
 *
 *     trace_reader *reader;
 *     trace_event event;
 *     char error[TRACE_ERROR_BYTES];
 *     if (trace_reader_open("job.csv.gz", &reader, error) != TRACE_EVENT) ...
 *     while ((result = trace_reader_next(reader, &event)) == TRACE_EVENT) ...
 *     if (result != TRACE_END) puts(trace_reader_error(reader));
 *     trace_reader_close(reader);
 *
 * Formats, told apart by the header line, each plain or gzip:
 *
 *     op,id,bytes,stream            ours; a allocates, f frees: its bytes are empty and its
 *     op,id,bytes,stream,time_us    stream is empty (the allocation's) or given
 *     op,id,bytes,stream,time_us,address,owner      an owner is the rest of its line;
 *         with o,,bytes,,time_us,,owner: bytes that could not be had
 *     Thread,Time,Action,Pointer,Size,Stream    RMM's log; pointers and streams hexadecimal
 *
 * and memory snapshots of PyTorch, whose blocks and events have numbers for ids and lines.
 *
 * A message is "FILE:LINE: what is wrong; what was expected". Ids and streams come out as small
 * numbers: a slot is free again after its id was freed, a stream keeps its number. Memory grows
 * with the ids that are live at once and with nothing else. A reader is used by one thread.
 */
#ifndef TENURE_TRACE_READER_H
#define TENURE_TRACE_READER_H

#include <stddef.h>
#include <stdint.h>

#define TRACE_ERROR_BYTES    768
#define TRACE_LINE_BYTES_MAX 255  /* without the newline */
#define TRACE_STREAMS_MAX    1024 /* on the host driver each is a thread */

typedef enum trace_result {
    TRACE_EVENT = 0, /* success: there is an event, or the reader is open */
    TRACE_END,
    TRACE_BAD_INPUT,
    TRACE_NO_MEMORY
} trace_result;

typedef enum trace_op {
    TRACE_ALLOC,
    TRACE_FREE,
    TRACE_SHORTAGE /* bytes could not be had; comes out only if it is asked for */
} trace_op;

typedef struct trace_event {
    trace_op op;
    uint32_t slot;   /* of the id: below trace_reader_slot_count */
    uint32_t stream; /* below trace_reader_stream_count; of a free too */
    uint64_t bytes;  /* of the allocation; for a free, what it gives back */
    uint64_t line;
    double time_us;   /* negative: the format has none */
    uint64_t address; /* of an allocation; 0: the format has none */
    uint32_t owner;   /* of an allocation, for trace_reader_owner; 0: unnamed */
} trace_event;

typedef struct trace_reader trace_reader;

/* Opens a file ("-" is standard input) and reads its header line. On failure writes the message
 * to error, which has TRACE_ERROR_BYTES, and no reader. */
trace_result trace_reader_open(const char *path, trace_reader **out, char *error);

/* The same for a descriptor, which the reader takes over, also on failure. */
trace_result trace_reader_open_descriptor(int descriptor, const char *name, trace_reader **out,
                                          char *error);

/* From now on an allocation of more bytes than the device has is bad input; 0: no limit. */
void trace_reader_limit(trace_reader *reader, uint64_t device_bytes);

/* From now on what could not be served comes out too: op o, and RMM's failures. 1 if the format can
 * tell of it. */
int trace_reader_want_shortages(trace_reader *reader);

/* The next event. After anything but TRACE_EVENT the reader stays at that result. */
trace_result trace_reader_next(trace_reader *reader, trace_event *event);

/* The message of the last result, "" if that was no failure. */
const char *trace_reader_error(const trace_reader *reader);

/* One more than the largest slot, and stream number, that came out so far. */
uint32_t trace_reader_slot_count(const trace_reader *reader);
uint32_t trace_reader_stream_count(const trace_reader *reader);

/* The name of an owner's number, "" for 0. It lives as long as the reader. */
const char *trace_reader_owner(const trace_reader *reader, uint32_t owner);

/* Part of the file that has been read, 0 to 1; negative if its length is not known. */
double trace_reader_done(const trace_reader *reader);

/* NULL is a no-op. */
void trace_reader_close(trace_reader *reader);

#endif
