/* Streams of the simulated devices: their order, their virtual time, their queued work.
 *
 * A stream is always ready at some virtual time: when all work that it was given has run. Work is
 * performed when it is submitted, which sets that time, unless something before it has no end
 * yet: a stall, a wait for an event behind a stall, or a host function that is running. Then it
 * is queued and performed, in stream order, when the obstacle is gone.
 *
 * Why performing at submission moves data rightly: whatever the work must wait for was submitted
 * before it and, not being queued, has been performed. So memory has the contents of one order
 * that the waits allow; two pieces of work that no wait orders run in the order of submission,
 * and the race detection, not the contents, shows that this was luck.
 *
 * Host functions run in the thread whose call made them due, before that call returns and without
 * our lock: so a program must not hold a lock that its host function takes. (A real driver runs
 * them in a thread of its own, some time later.) A wait for a value that the host writes ends
 * without any call: then it is the thread of sim_value.c that performs what was behind it.
 */
#ifndef TENURE_SIM_STREAM_H
#define TENURE_SIM_STREAM_H

#include "sim_clock.h"
#include "sim_core.h"
#include "sim_lifecycle.h"

/* A point in a stream that others wait for. */
typedef struct sim_ticket {
    int references;
    int is_done; /* its time is known */
    sim_ns time;
} sim_ticket;

sim_ticket *tn__sim_ticket_create(void);
void tn__sim_ticket_release(sim_ticket *ticket);

typedef enum sim_work_kind {
    SIM_WORK_KERNEL,
    SIM_WORK_COPY,
    SIM_WORK_FILL,
    SIM_WORK_HOST_FUNCTION,
    SIM_WORK_RECORD,
    SIM_WORK_WAIT,
    SIM_WORK_STALL,
    SIM_WORK_VALUE /* waits until the word at src is at least value */
} sim_work_kind;

typedef struct sim_work {
    sim_work_kind kind;
    const char *what; /* of KERNEL, COPY and FILL */
    sim_ns submitted;
    sim_ns duration;
    sim_ticket *ticket; /* of RECORD and WAIT; the work holds a reference */
    CUdeviceptr dst;
    CUdeviceptr src;
    size_t bytes; /* that move */
    size_t rows;  /* of a COPY of rows; 0: of one piece */
    size_t row_bytes;
    size_t dst_stride;
    size_t src_stride;
    int to_device; /* which sides are device memory, as known when it was submitted */
    int from_device;
    unsigned char byte;
    uint32_t value;
    CUhostFn function;
    void *argument;
    struct sim_work *next;
} sim_work;

typedef enum sim_stream_kind {
    SIM_STREAM_FREE, /* a slot to use */
    SIM_STREAM_CREATED,
    SIM_STREAM_LEGACY,
    SIM_STREAM_PER_THREAD,
    SIM_STREAM_LANE,     /* of an instantiated graph: no program has a handle of it */
    SIM_STREAM_DESTROYED /* its work may go on; free once the host knows its end */
} sim_stream_kind;

/* Nodes of the graph that is being captured which what comes next depends on. */
typedef struct sim_tips {
    uint32_t *nodes;
    uint32_t count;
    uint32_t capacity;
} sim_tips;

struct sim_capture;

typedef struct sim_stream {
    sim_stream_kind kind;
    int is_blocking; /* ordered with the legacy stream */
    int device;
    uint32_t slot;
    uint32_t handle; /* its number; another stream's once this one is destroyed */
    uint64_t id;     /* never repeats */
    uint64_t epoch;
    sim_clock clock;
    uint64_t host_version; /* of the host's clock that `clock` contains */
    sim_ns ready;
    int is_stalled;
    int is_busy;                 /* a host function runs, with the lock dropped */
    struct sim_capture *capture; /* what it is given goes into a graph; NULL: it runs */
    sim_tips tips;
    sim_work *first;
    sim_work *last;
} sim_stream;

/* The stream of a handle, the default ones made on first use; NULL if there is none. The current
 * context says whose default stream it is: only after tn__sim_enter of a CONTEXT call. */
sim_stream *tn__sim_stream_find(CUstream handle);
sim_stream *tn__sim_stream_create(int device, sim_stream_kind kind, int is_blocking);
CUstream tn__sim_stream_handle(const sim_stream *stream);
void tn__sim_stream_destroy(sim_stream *stream);
const sim_stream *tn__sim_stream_in_slot(uint32_t slot);
/* Calls visit for every stream that is not FREE. */
typedef void (*sim_stream_visit)(sim_stream *stream, void *argument);
void tn__sim_streams_visit(sim_stream_visit visit, void *argument);

/* New work of the stream begins here: it happens after all that the host knows, and after what
 * the legacy stream's rules say. Gives the work its epoch. */
void tn__sim_stream_begin(sim_stream *stream);
/* The clock that the stream's next work would have, without beginning any. */
const sim_clock *tn__sim_stream_peek(sim_stream *stream);
/* All that `stream` gets from now on comes after all that `other` has got so far. */
void tn__sim_stream_order_after(sim_stream *stream, sim_stream *other);
/* Performs or queues it. Host functions run with the lock dropped. */
void tn__sim_stream_submit(sim_stream *stream, const sim_work *work);
void tn__sim_stream_release(sim_stream *stream);

/* Performs what is queued and no longer held up. */
void tn__sim_streams_drain(void);
/* Waits for values that are queued. */
size_t tn__sim_streams_queued_values(void);

/* The host waits: CUDA_ERROR_LAUNCH_TIMEOUT if that would be for ever. */
CUresult tn__sim_stream_finish(sim_stream *stream);
CUresult tn__sim_device_finish(int device);
CUresult tn__sim_ticket_finish(const sim_ticket *ticket);
int tn__sim_stream_is_idle(const sim_stream *stream);
/* What the host now knows to be complete. */
void tn__sim_host_learns(const sim_clock *clock);
const sim_clock *tn__sim_host_clock(void);

void tn__sim_streams_load(void);
void tn__sim_streams_unload(void);
void tn__sim_streams_reset(void);
void tn__sim_events_reset(void);
int tn__sim_stream_leftovers(sim_report *report);
int tn__sim_event_leftovers(void);

/* ---- sim_work.c ------------------------------------------------------------------------------ */

/* A kernel, copy, fill or host function as a program asks for it. */
typedef struct sim_job {
    sim_work work;
    const char *what;
    const tnsim_range *ranges; /* KERNEL: what it touches */
    size_t range_count;
} sim_job;

/* Puts it on a stream that does not capture: checks what it touches, takes the host's time for it,
 * begins and submits it. */
CUresult tn__sim_job_run(sim_stream *stream, const sim_job *job, sim_ns cost);

/* Moves the bytes of a COPY or FILL. */
void tn__sim_work_move(const sim_stream *stream, const sim_work *work);

/* ---- sim_value.c ----------------------------------------------------------------------------- */

int tn__sim_value_has_come(const sim_work *work);
/* A wait for a value was queued: sees to it that it ends. */
void tn__sim_value_watch(void);
void tn__sim_values_unload(void);

#endif
