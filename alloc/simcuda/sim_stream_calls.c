/* The driver calls on streams and events. Waiting, order and time are in sim_stream.c.
 *
 * An event is the point at which it was last recorded: the clock of the work before it, and a
 * ticket that tells its time. One that was never recorded is complete and orders nothing.
 * Event handles are reused, last destroyed first. One that was last recorded in a capture is a
 * set of nodes: it can be waited for while that capture goes on, and is no point in time.
 */
#include "sim_capture.h"
#include "sim_memory.h"

#define HANDLE_BASE ((uintptr_t)0x45000000)
#define HANDLE_STEP ((uintptr_t)16)

typedef struct sim_event {
    int is_live;
    int device;
    unsigned flags;
    sim_clock clock;
    sim_ticket *ticket;  /* NULL: not recorded, or in a capture */
    uint64_t capture_id; /* 0: not recorded, or in no capture */
    sim_tips tips;
} sim_event;

static sim_event **events;
static uint32_t *free_events;
static uint32_t event_count;
static uint32_t free_count;

/* ---- streams --------------------------------------------------------------------------------- */

static CUresult stream_create(CUstream *out, unsigned flags) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) {
        return tn__sim_refuse("cuStreamCreate: flags 0x%x are not simulated", flags);
    }
    *out = tn__sim_stream_handle(tn__sim_stream_create(tn__sim_current(), SIM_STREAM_CREATED,
                                                       !(flags & CU_STREAM_NON_BLOCKING)));
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    SIM_ENTER(cuStreamCreate);
    return tn__sim_leave(stream_create(stream, flags));
}

static CUresult stream_destroy(CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    if (!stream || stream->kind != SIM_STREAM_CREATED) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        tn__sim_capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    tn__sim_stream_destroy(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    SIM_ENTER(cuStreamDestroy_v2);
    return tn__sim_leave(stream_destroy(stream));
}

static CUresult stream_synchronize(CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    CUresult result;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_refuses(stream);
    if (result == CUDA_SUCCESS) result = tn__sim_stream_finish(stream);
    if (result == CUDA_SUCCESS) tn__sim_mempools_synchronized();
    return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
    SIM_ENTER(cuStreamSynchronize);
    return tn__sim_leave(stream_synchronize(stream));
}

CUresult cuCtxSynchronize(void) {
    SIM_ENTER(cuCtxSynchronize);
    CUresult result = tn__sim_capture_refuses_device(tn__sim_current());
    if (result == CUDA_SUCCESS) result = tn__sim_device_finish(tn__sim_current());
    if (result == CUDA_SUCCESS) tn__sim_mempools_synchronized();
    return tn__sim_leave(result);
}

static CUresult stream_query(CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    CUresult result;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_refuses(stream);
    if (result != CUDA_SUCCESS) return result;
    tn__sim_spend(SIM_COST_EVENT_QUERY);
    if (!tn__sim_stream_is_idle(stream)) return CUDA_ERROR_NOT_READY;
    tn__sim_host_learns(&stream->clock);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
    SIM_ENTER(cuStreamQuery);
    return tn__sim_leave(stream_query(stream));
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
    SIM_ENTER(cuStreamGetId);
    sim_stream *stream = tn__sim_stream_find(handle);
    if (!stream) return tn__sim_leave(CUDA_ERROR_CONTEXT_IS_DESTROYED); /* as an H200 does */
    if (!id) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    CUresult result = tn__sim_capture_refuses(stream); /* as an H200 does */
    if (result != CUDA_SUCCESS) return tn__sim_leave(result);
    *id = stream->id;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    SIM_ENTER(cuStreamGetCtx);
    sim_stream *stream = tn__sim_stream_find(handle);
    if (!stream) return tn__sim_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!context) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    CUresult result = tn__sim_capture_refuses(stream);
    if (result != CUDA_SUCCESS) return tn__sim_leave(result);
    *context = tn__sim_context_of(stream->device);
    return tn__sim_leave(CUDA_SUCCESS);
}

/* ---- events ---------------------------------------------------------------------------------- */

static sim_event *find_event(CUevent handle) {
    uintptr_t value = (uintptr_t)handle;
    uintptr_t index = (value - HANDLE_BASE) / HANDLE_STEP;
    if (value < HANDLE_BASE || (value - HANDLE_BASE) % HANDLE_STEP) return NULL;
    if (index >= event_count || !events[index]->is_live) return NULL;
    return events[index];
}

static uint32_t take_event_slot(void) {
    if (free_count) return free_events[--free_count];
    events = tn__sim_grow(events, event_count + 1, sizeof *events);
    free_events = tn__sim_grow(free_events, event_count + 1, sizeof *free_events);
    events[event_count] = tn__sim_alloc(1, sizeof **events);
    return event_count++;
}

static CUresult event_create(CUevent *out, unsigned flags) {
    unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    uint32_t index;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (flags & ~known) {
        return tn__sim_refuse("cuEventCreate: flags 0x%x are not simulated", flags);
    }
    index = take_event_slot();
    events[index]->is_live = 1;
    events[index]->device = tn__sim_current();
    events[index]->flags = flags;
    *out = (CUevent)(HANDLE_BASE + index * HANDLE_STEP);
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    SIM_ENTER(cuEventCreate);
    return tn__sim_leave(event_create(event, flags));
}

static CUresult event_destroy(CUevent handle) {
    sim_event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    tn__sim_ticket_release(event->ticket);
    tn__sim_clock_clear(&event->clock);
    tn__sim_tips_clear(&event->tips);
    event->ticket = NULL;
    event->capture_id = 0;
    event->is_live = 0;
    free_events[free_count++] = (uint32_t)(((uintptr_t)handle - HANDLE_BASE) / HANDLE_STEP);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    SIM_ENTER(cuEventDestroy_v2);
    return tn__sim_leave(event_destroy(event));
}

static void record_in_capture(sim_event *event, const sim_stream *stream) {
    tn__sim_ticket_release(event->ticket);
    event->ticket = NULL;
    event->capture_id = stream->capture->id;
    tn__sim_tips_copy(&event->tips, &stream->tips);
}

static void record_on(sim_event *event, sim_stream *stream) {
    sim_work work = {.kind = SIM_WORK_RECORD};
    event->capture_id = 0;
    tn__sim_spend(SIM_COST_EVENT_RECORD);
    tn__sim_stream_begin(stream);
    tn__sim_clock_copy(&event->clock, &stream->clock);
    tn__sim_ticket_release(event->ticket);
    event->ticket = tn__sim_ticket_create();
    event->ticket->references++;
    work.ticket = event->ticket;
    work.submitted = tn__sim.now;
    tn__sim_stream_submit(stream, &work);
}

static CUresult event_record(CUevent event_handle, CUstream stream_handle) {
    sim_event *event = find_event(event_handle);
    sim_stream *stream = tn__sim_stream_find(stream_handle);
    CUresult result;
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_gate(stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->capture) return record_in_capture(event, stream), CUDA_SUCCESS;
    record_on(event, stream);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    SIM_ENTER(cuEventRecord);
    return tn__sim_leave(event_record(event, stream));
}

static void come_after(sim_stream *stream, void *last) {
    if (stream != last && stream->device == ((sim_stream *)last)->device) {
        tn__sim_stream_order_after(last, stream);
    }
}

/* On a stream of its own that comes after all others of the device, of which the legacy rules know
 * nothing: nobody waits for it but for the event. */
static CUresult context_record(CUcontext context, CUevent handle) {
    sim_event *event = find_event(handle);
    sim_stream *last;
    CUresult result;
    if (!event || tn__sim_context_of(event->device) != context) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_refuses_device(event->device);
    if (result != CUDA_SUCCESS) return result;
    last = tn__sim_stream_create(event->device, SIM_STREAM_LANE, 0);
    tn__sim_streams_visit(come_after, last);
    record_on(event, last);
    tn__sim_stream_destroy(last);
    return CUDA_SUCCESS;
}

CUresult cuCtxRecordEvent(CUcontext context, CUevent event) {
    SIM_ENTER(cuCtxRecordEvent);
    return tn__sim_leave(context_record(context, event));
}

/* A wait that has to do with a capture: for an event in one, or by a stream in one. */
static CUresult wait_in_capture(sim_stream *stream, const sim_event *event) {
    sim_capture *capture = tn__sim_capture_find(event->capture_id);
    if (capture) return tn__sim_capture_join(stream, capture, &event->tips);
    if (event->capture_id) return CUDA_ERROR_CAPTURED_EVENT; /* of a capture that has ended */
    if (!event->ticket) return CUDA_SUCCESS;
    tn__sim_capture_invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

static CUresult stream_wait(CUstream stream_handle, CUevent event_handle, unsigned flags) {
    sim_event *event = find_event(event_handle);
    sim_stream *stream = tn__sim_stream_find(stream_handle);
    sim_work work = {.kind = SIM_WORK_WAIT};
    CUresult result;
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    result = tn__sim_capture_gate(stream);
    if (result != CUDA_SUCCESS) return result;
    if (event->capture_id || stream->capture) return wait_in_capture(stream, event);
    if (flags) return tn__sim_refuse("cuStreamWaitEvent: flags 0x%x are not simulated", flags);
    tn__sim_spend(SIM_COST_EVENT_WAIT);
    if (!event->ticket) return CUDA_SUCCESS;
    tn__sim_stream_begin(stream);
    tn__sim_clock_join(&stream->clock, &event->clock);
    event->ticket->references++;
    work.ticket = event->ticket;
    work.submitted = tn__sim.now;
    tn__sim_stream_submit(stream, &work);
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    SIM_ENTER(cuStreamWaitEvent);
    return tn__sim_leave(stream_wait(stream, event, flags));
}

/* An event in a capture is no point in time: to ask about it is wrong in any mode. */
static CUresult refuse_captured(const sim_event *event) {
    sim_capture *capture = tn__sim_capture_find(event->capture_id);
    if (!event->capture_id) return CUDA_SUCCESS;
    if (capture) tn__sim_capture_invalidate(capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

static int is_complete(const sim_event *event) {
    if (!event->ticket) return 1;
    return event->ticket->is_done && event->ticket->time <= tn__sim.now;
}

static CUresult event_query(CUevent handle) {
    const sim_event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id) return refuse_captured(event);
    tn__sim_spend(SIM_COST_EVENT_QUERY);
    if (!is_complete(event)) return CUDA_ERROR_NOT_READY;
    if (event->ticket) tn__sim_host_learns(&event->clock);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    SIM_ENTER(cuEventQuery);
    return tn__sim_leave(event_query(event));
}

/* What is waited for is the record before the call, even if another thread records it anew. */
static CUresult event_synchronize(CUevent handle) {
    const sim_event *event = find_event(handle);
    sim_ticket *ticket;
    sim_clock clock = {NULL, 0};
    CUresult result;
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id) return refuse_captured(event);
    ticket = event->ticket;
    if (!ticket) return CUDA_SUCCESS;
    ticket->references++;
    tn__sim_clock_copy(&clock, &event->clock);
    result = tn__sim_ticket_finish(ticket);
    if (result == CUDA_SUCCESS) {
        tn__sim_host_learns(&clock);
        tn__sim_mempools_synchronized();
    }
    tn__sim_clock_clear(&clock);
    tn__sim_ticket_release(ticket);
    return result;
}

CUresult cuEventSynchronize(CUevent event) {
    SIM_ENTER(cuEventSynchronize);
    return tn__sim_leave(event_synchronize(event));
}

static CUresult event_elapsed(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    const sim_event *start = find_event(start_handle);
    const sim_event *end = find_event(end_handle);
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    if (!start || !end || !start->ticket || !end->ticket) return CUDA_ERROR_INVALID_HANDLE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (!is_complete(start) || !is_complete(end)) return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(end->ticket->time - start->ticket->time) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    SIM_ENTER(cuEventElapsedTime);
    return tn__sim_leave(event_elapsed(milliseconds, start, end));
}

void tn__sim_events_reset(void) {
    for (uint32_t i = 0; i < event_count; i++) {
        tn__sim_ticket_release(events[i]->ticket);
        tn__sim_clock_clear(&events[i]->clock);
        tn__sim_tips_clear(&events[i]->tips);
        tn__sim_free(events[i]);
    }
    tn__sim_free(events);
    tn__sim_free(free_events);
    events = NULL;
    free_events = NULL;
    event_count = free_count = 0;
}

int tn__sim_event_leftovers(void) { return (int)(event_count - free_count); }
