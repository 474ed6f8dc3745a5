/* The driver calls on streams and events. Waiting, order and time are in sim_stream.c.
 *
 * An event is the point at which it was last recorded: the clock of the work before it, and a
 * ticket that tells its time. One that was never recorded is complete and orders nothing.
 * Event handles are reused, last destroyed first.
 */
#include "sim_stream.h"

#define HANDLE_BASE ((uintptr_t)0x45000000)
#define HANDLE_STEP ((uintptr_t)16)

typedef struct sim_event {
    int is_live;
    int device;
    unsigned flags;
    sim_clock clock;
    sim_ticket *ticket; /* NULL: not recorded */
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
    tn__sim_stream_destroy(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    SIM_ENTER(cuStreamDestroy_v2);
    return tn__sim_leave(stream_destroy(stream));
}

CUresult cuStreamSynchronize(CUstream handle) {
    SIM_ENTER(cuStreamSynchronize);
    sim_stream *stream = tn__sim_stream_find(handle);
    return tn__sim_leave(stream ? tn__sim_stream_finish(stream) : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuCtxSynchronize(void) {
    SIM_ENTER(cuCtxSynchronize);
    return tn__sim_leave(tn__sim_device_finish(tn__sim_current()));
}

static CUresult stream_query(CUstream handle) {
    sim_stream *stream = tn__sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
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
    const sim_stream *stream = tn__sim_stream_find(handle);
    if (!stream) return tn__sim_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!id) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    *id = stream->id;
    return tn__sim_leave(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    SIM_ENTER(cuStreamIsCapturing);
    if (!tn__sim_stream_find(handle)) return tn__sim_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!status) return tn__sim_leave(CUDA_ERROR_INVALID_VALUE);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
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
    event->ticket = NULL;
    event->is_live = 0;
    free_events[free_count++] = (uint32_t)(((uintptr_t)handle - HANDLE_BASE) / HANDLE_STEP);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    SIM_ENTER(cuEventDestroy_v2);
    return tn__sim_leave(event_destroy(event));
}

static CUresult event_record(CUevent event_handle, CUstream stream_handle) {
    sim_event *event = find_event(event_handle);
    sim_stream *stream = tn__sim_stream_find(stream_handle);
    sim_work work = {.kind = SIM_WORK_RECORD};
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
    tn__sim_spend(SIM_COST_EVENT_RECORD);
    tn__sim_stream_begin(stream);
    tn__sim_clock_copy(&event->clock, &stream->clock);
    tn__sim_ticket_release(event->ticket);
    event->ticket = tn__sim_ticket_create();
    event->ticket->references++;
    work.ticket = event->ticket;
    work.submitted = tn__sim.now;
    tn__sim_stream_submit(stream, &work);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    SIM_ENTER(cuEventRecord);
    return tn__sim_leave(event_record(event, stream));
}

static CUresult stream_wait(CUstream stream_handle, CUevent event_handle, unsigned flags) {
    sim_event *event = find_event(event_handle);
    sim_stream *stream = tn__sim_stream_find(stream_handle);
    sim_work work = {.kind = SIM_WORK_WAIT};
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
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

static int is_complete(const sim_event *event) {
    if (!event->ticket) return 1;
    return event->ticket->is_done && event->ticket->time <= tn__sim.now;
}

static CUresult event_query(CUevent handle) {
    const sim_event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
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
    ticket = event->ticket;
    if (!ticket) return CUDA_SUCCESS;
    ticket->references++;
    tn__sim_clock_copy(&clock, &event->clock);
    result = tn__sim_ticket_finish(ticket);
    if (result == CUDA_SUCCESS) tn__sim_host_learns(&clock);
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
        tn__sim_free(events[i]);
    }
    tn__sim_free(events);
    tn__sim_free(free_events);
    events = NULL;
    free_events = NULL;
    event_count = free_count = 0;
}

int tn__sim_event_leftovers(void) { return (int)(event_count - free_count); }
