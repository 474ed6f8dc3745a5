/* A stream of the host driver: one worker thread that does its queue's work in order.
 *
 *          push ->  [ copy | fill | task | wait ]  -> worker
 *                    ^ position = submitted            ^ position = completed
 *
 * Every piece of work has a position, counted from 1. That is all that an event needs: recorded on
 * a stream it is (stream, submitted), and it is done once completed has got there. No marker goes
 * into the queue, recording allocates nothing, and an event recorded anew leaves the waits that
 * were put in before as they were.
 *
 * References: the owner's, one of each event recorded last on the stream and one of each queued
 * wait for it. The worker ends in tn__host_stream_end; the counts live until the last reference.
 */
#ifndef TENURE_HOST_STREAM_H
#define TENURE_HOST_STREAM_H

#include "driver.h"

typedef struct tn__host_stream tn__host_stream;

typedef enum tn__host_work_kind {
    TN__HOST_COPY,
    TN__HOST_COPY_ROWS,
    TN__HOST_FILL,
    TN__HOST_TASK,
    TN__HOST_WAIT
} tn__host_work_kind;

typedef struct tn__host_work {
    tn__host_work_kind kind;
    unsigned char byte;     /* FILL */
    void *dst;              /* COPY, FILL */
    const void *src;        /* COPY */
    size_t bytes;           /* COPY, FILL */
    tn__row_copy rows;      /* COPY_ROWS */
    tn__host_task task;     /* TASK */
    void *argument;         /* TASK */
    tn__host_stream *other; /* WAIT: a reference of its own */
    uint64_t position;      /* WAIT */
} tn__host_work;

/* Starts the worker. The caller gets the owner's reference. */
tn_status tn__host_stream_create(uint64_t id, tn__host_stream **out);

/* Finishes the work, ends the worker and drops the owner's reference. */
void tn__host_stream_end(tn__host_stream *stream);

void tn__host_stream_hold(tn__host_stream *stream);
void tn__host_stream_drop(tn__host_stream *stream);

uint64_t tn__host_stream_id(const tn__host_stream *stream);

/* Puts work at the end of the queue. On failure nothing was put. */
tn_status tn__host_stream_push(tn__host_stream *stream, const tn__host_work *work);

/* Position of the work that was put last. */
uint64_t tn__host_stream_submitted(tn__host_stream *stream);

int tn__host_stream_has_reached(tn__host_stream *stream, uint64_t position);
void tn__host_stream_wait_for(tn__host_stream *stream, uint64_t position);

#endif
