/* Streams, their queues, and what the host knows of them: see sim_stream.h. */
#include <string.h>

#include "sim_capture.h"

/* The handle of a destroyed stream is the next new one's, as a real driver's may be, also while the
 * old one's work goes on. */
#define HANDLE_BASE ((uintptr_t)0x53000000)
#define HANDLE_STEP ((uintptr_t)64)

static sim_stream **streams; /* by slot */
static uint32_t slot_count;
static sim_stream **by_handle; /* by number of the handle; NULL: destroyed */
static uint32_t *free_handles; /* their numbers, last destroyed last; room for all */
static uint32_t handle_count, free_handle_count;
static uint64_t lost_uses; /* of handles of destroyed streams */
static uint64_t last_id;
static size_t queued_count;  /* work in all queues */
static size_t queued_values; /* waits for values among it */
static int busy_count;       /* host functions that are running */
static sim_clock host_clock;
static uint64_t host_version;
static tnsim_watcher watcher; /* NULL: nobody watches */
static void *watcher_context;
static sim_clock peek_clock;
static pthread_key_t thread_end_key;

/* ---- tickets --------------------------------------------------------------------------------- */

sim_ticket *tn__sim_ticket_create(void) {
    sim_ticket *ticket = tn__sim_alloc(1, sizeof *ticket);
    ticket->references = 1;
    return ticket;
}

void tn__sim_ticket_release(sim_ticket *ticket) {
    if (ticket && --ticket->references == 0) tn__sim_free(ticket);
}

static sim_ticket *retain(sim_ticket *ticket) {
    ticket->references++;
    return ticket;
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* A slot whose last stream has ended, as the host knows, can carry on with its epochs: nobody
 * can mistake the old stream's work for unfinished work of the new one. */
static int is_reusable(const sim_stream *stream) {
    if (stream->kind == SIM_STREAM_FREE) return 1;
    return stream->kind == SIM_STREAM_DESTROYED && !stream->first && !stream->is_busy &&
           tn__sim_clock_covers(&host_clock, stream->slot, stream->epoch);
}

static sim_stream *take_slot(void) {
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        if (is_reusable(streams[slot])) return streams[slot];
    }
    streams = tn__sim_grow(streams, slot_count + 1, sizeof *streams);
    streams[slot_count] = tn__sim_alloc(1, sizeof **streams);
    streams[slot_count]->slot = slot_count;
    return streams[slot_count++];
}

static uint32_t take_handle(sim_stream *stream) {
    uint32_t number = handle_count;
    if (free_handle_count) {
        number = free_handles[--free_handle_count];
    } else {
        by_handle = tn__sim_grow(by_handle, handle_count + 1, sizeof *by_handle);
        free_handles = tn__sim_grow(free_handles, handle_count + 1, sizeof *free_handles);
        handle_count++;
    }
    by_handle[number] = stream;
    return number;
}

sim_stream *tn__sim_stream_create(int device, sim_stream_kind kind, int is_blocking) {
    sim_stream *stream = take_slot();
    stream->kind = kind;
    stream->is_blocking = is_blocking;
    stream->device = device;
    stream->id = ++last_id;
    stream->handle = take_handle(stream);
    stream->is_stalled = 0;
    return stream;
}

void tn__sim_stream_destroy(sim_stream *stream) {
    stream->kind = SIM_STREAM_DESTROYED;
    by_handle[stream->handle] = NULL;
    free_handles[free_handle_count++] = stream->handle;
}

const sim_stream *tn__sim_stream_in_slot(uint32_t slot) { return streams[slot]; }

void tn__sim_streams_visit(sim_stream_visit visit, void *argument) {
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        if (streams[slot]->kind != SIM_STREAM_FREE) visit(streams[slot], argument);
    }
}

CUstream tn__sim_stream_handle(const sim_stream *stream) {
    return (CUstream)(HANDLE_BASE + stream->handle * HANDLE_STEP);
}

static sim_stream *legacy_stream(int device) {
    sim_stream **legacy = &tn__sim.devices[device].legacy;
    if (!*legacy) *legacy = tn__sim_stream_create(device, SIM_STREAM_LEGACY, 0);
    return *legacy;
}

static sim_stream *per_thread_stream(int device) {
    sim_thread *thread = tn__sim_thread();
    sim_stream **stream = &thread->default_streams[device];
    if (!*stream) *stream = tn__sim_stream_create(device, SIM_STREAM_PER_THREAD, 1);
    pthread_setspecific(thread_end_key, thread);
    return *stream;
}

sim_stream *tn__sim_stream_find(CUstream handle) {
    uintptr_t value = (uintptr_t)handle;
    uintptr_t number = (value - HANDLE_BASE) / HANDLE_STEP;
    if (!handle || handle == CU_STREAM_LEGACY) return legacy_stream(tn__sim_current());
    if (handle == CU_STREAM_PER_THREAD) return per_thread_stream(tn__sim_current());
    if (value < HANDLE_BASE || (value - HANDLE_BASE) % HANDLE_STEP) return NULL;
    if (number >= handle_count) return NULL;
    if (!by_handle[number]) lost_uses++;
    return by_handle[number] && by_handle[number]->kind == SIM_STREAM_CREATED ? by_handle[number]
                                                                              : NULL;
}

uint64_t tnsim_lost_stream_uses(void) {
    uint64_t count = 0;
    if (!tn__sim_lock()) return 0;
    count = lost_uses;
    tn__sim_unlock();
    return count;
}

/* ---- order ----------------------------------------------------------------------------------- */

const sim_clock *tn__sim_host_clock(void) { return &host_clock; }

void tn__sim_host_learns(const sim_clock *clock) {
    if (tn__sim_clock_join(&host_clock, clock)) host_version++;
}

static void join_host(sim_stream *stream) {
    if (stream->host_version == host_version) return;
    tn__sim_clock_join(&stream->clock, &host_clock);
    stream->host_version = host_version;
}

static int has_open_work(const sim_stream *stream) { return stream->first || stream->is_busy; }

static sim_work new_work(sim_work_kind kind, sim_ticket *ticket) {
    sim_work work = {.kind = kind, .submitted = tn__sim.now, .ticket = ticket};
    return work;
}

void tn__sim_stream_order_after(sim_stream *stream, sim_stream *other) {
    tn__sim_clock_join(&stream->clock, &other->clock);
    if (has_open_work(stream) || has_open_work(other)) {
        sim_ticket *ticket = tn__sim_ticket_create();
        sim_work record = new_work(SIM_WORK_RECORD, retain(ticket));
        sim_work wait = new_work(SIM_WORK_WAIT, ticket);
        tn__sim_stream_submit(other, &record);
        tn__sim_stream_submit(stream, &wait);
    } else if (stream->ready < other->ready) {
        stream->ready = other->ready;
    }
}

typedef void (*sim_predecessor_visit)(sim_stream *stream, sim_stream *predecessor);

/* The legacy stream comes after all blocking streams of its device, and they after it. */
static void visit_predecessors(sim_stream *stream, sim_predecessor_visit visit) {
    sim_stream *legacy = tn__sim.devices[stream->device].legacy;
    if (stream->is_blocking && legacy) visit(stream, legacy);
    if (stream != legacy) return;
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        sim_stream *other = streams[slot];
        if (other->kind == SIM_STREAM_FREE || other->device != stream->device) continue;
        if (other->is_blocking) visit(stream, other);
    }
}

static void add_to_peek(sim_stream *stream, sim_stream *predecessor) {
    (void)stream;
    tn__sim_clock_join(&peek_clock, &predecessor->clock);
}

const sim_clock *tn__sim_stream_peek(sim_stream *stream) {
    join_host(stream);
    tn__sim_clock_copy(&peek_clock, &stream->clock);
    visit_predecessors(stream, add_to_peek);
    return &peek_clock;
}

void tn__sim_stream_begin(sim_stream *stream) {
    join_host(stream);
    visit_predecessors(stream, tn__sim_stream_order_after);
    tn__sim_clock_set(&stream->clock, stream->slot, ++stream->epoch);
}

/* ---- work ------------------------------------------------------------------------------------ */

static sim_ns later(sim_ns a, sim_ns b) { return a > b ? a : b; }

static int is_blocked(const sim_stream *stream, const sim_work *work) {
    if (work->kind == SIM_WORK_STALL) return stream->is_stalled;
    if (work->kind == SIM_WORK_VALUE) return !tn__sim_value_has_come(work);
    return work->kind == SIM_WORK_WAIT && !work->ticket->is_done;
}

/* A host function makes no driver calls, but may take locks of the program: ours is dropped, and
 * the stream is marked so that work behind it is queued. */
static void run_host_function(sim_stream *stream, const sim_work *work) {
    sim_thread *thread = tn__sim_thread();
    int in_memory_call = tn__sim.in_memory_call;
    stream->is_busy = 1;
    busy_count++;
    tn__sim_unlock();
    thread->in_host_function++;
    work->function(work->argument);
    thread->in_host_function--;
    pthread_mutex_lock(&tn__sim.lock);
    busy_count--;
    stream->is_busy = 0;
    tn__sim.in_memory_call = in_memory_call;
    pthread_cond_broadcast(&tn__sim.progress);
}

static void pass_time(sim_stream *stream, const sim_work *work) {
    const tnsim_interval interval = {stream->id, stream->device, work->what,
                                     (double)stream->ready / 1e3,
                                     (double)(stream->ready + work->duration) / 1e3};
    stream->ready += work->duration;
    if (watcher) watcher(watcher_context, &interval);
}

void tnsim_watch(tnsim_watcher new_watcher, void *context) {
    if (!tn__sim_lock()) return;
    watcher = new_watcher;
    watcher_context = context;
    tn__sim_unlock();
}

static void perform(sim_stream *stream, const sim_work *work) {
    stream->ready = later(stream->ready, work->submitted);
    switch (work->kind) {
    case SIM_WORK_KERNEL: pass_time(stream, work); break;
    case SIM_WORK_COPY:
    case SIM_WORK_FILL:
        pass_time(stream, work);
        tn__sim_work_move(stream, work);
        break;
    case SIM_WORK_HOST_FUNCTION: run_host_function(stream, work); break;
    case SIM_WORK_RECORD:
        work->ticket->is_done = 1;
        work->ticket->time = stream->ready;
        tn__sim_ticket_release(work->ticket);
        break;
    case SIM_WORK_WAIT:
        stream->ready = later(stream->ready, work->ticket->time);
        tn__sim_ticket_release(work->ticket);
        break;
    case SIM_WORK_STALL:
    case SIM_WORK_VALUE: stream->ready = later(stream->ready, tn__sim.now); break;
    }
}

static void enqueue(sim_stream *stream, const sim_work *work) {
    sim_work *queued = tn__sim_alloc(1, sizeof *queued);
    *queued = *work;
    queued->next = NULL;
    if (stream->last)
        stream->last->next = queued;
    else
        stream->first = queued;
    stream->last = queued;
    queued_count++;
    if (work->kind == SIM_WORK_VALUE) {
        queued_values++;
        tn__sim_value_watch();
    }
}

static sim_work *dequeue(sim_stream *stream) {
    sim_work *work = stream->first;
    stream->first = work->next;
    if (!stream->first) stream->last = NULL;
    queued_count--;
    queued_values -= work->kind == SIM_WORK_VALUE;
    return work;
}

static int drain(sim_stream *stream) {
    int progress = 0;
    while (stream->first && !stream->is_busy && !is_blocked(stream, stream->first)) {
        sim_work *work = dequeue(stream);
        perform(stream, work);
        tn__sim_free(work);
        progress = 1;
    }
    return progress;
}

size_t tn__sim_streams_queued_values(void) { return queued_values; }

void tn__sim_streams_drain(void) {
    int progress = queued_count > 0, any = 0;
    while (progress) {
        progress = 0;
        for (uint32_t slot = 0; slot < slot_count; slot++)
            progress |= drain(streams[slot]);
        any |= progress;
    }
    if (any) pthread_cond_broadcast(&tn__sim.progress);
}

void tn__sim_stream_submit(sim_stream *stream, const sim_work *work) {
    if (has_open_work(stream) || is_blocked(stream, work)) {
        enqueue(stream, work);
    } else {
        perform(stream, work);
        tn__sim_streams_drain();
    }
}

void tn__sim_stream_release(sim_stream *stream) {
    stream->is_stalled = 0;
    tn__sim_streams_drain();
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* A stream waits for a value, and nothing else holds that up. */
static int await_value(void) {
    for (uint32_t slot = 0; queued_count && slot < slot_count; slot++) {
        const sim_stream *stream = streams[slot];
        if (stream->first && stream->first->kind == SIM_WORK_VALUE && !stream->is_busy) return 1;
    }
    return 0;
}

static void wait_a_while(void) {
    int in_memory_call = tn__sim.in_memory_call;
    pthread_cond_wait(&tn__sim.progress, &tn__sim.lock);
    tn__sim.in_memory_call = in_memory_call;
}

/* Lets host functions of other threads return and values come. 0: nothing could end the wait. */
static int wait_for_progress(void) {
    if (!busy_count && !await_value()) return 0;
    wait_a_while();
    return 1;
}

CUresult tn__sim_stream_finish(sim_stream *stream) {
    while (has_open_work(stream)) {
        if (!wait_for_progress()) return CUDA_ERROR_LAUNCH_TIMEOUT;
    }
    tn__sim_wait_until(stream->ready);
    tn__sim_host_learns(&stream->clock);
    return CUDA_SUCCESS;
}

CUresult tn__sim_device_finish(int device) {
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        sim_stream *stream = streams[slot];
        if (stream->kind == SIM_STREAM_FREE || stream->device != device) continue;
        CUresult result = tn__sim_stream_finish(stream);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

CUresult tn__sim_ticket_finish(const sim_ticket *ticket) {
    while (!ticket->is_done) {
        if (!wait_for_progress()) return CUDA_ERROR_LAUNCH_TIMEOUT;
    }
    tn__sim_wait_until(ticket->time);
    return CUDA_SUCCESS;
}

int tn__sim_stream_is_idle(const sim_stream *stream) {
    return !has_open_work(stream) && stream->ready <= tn__sim.now;
}

/* ---- load, reset, leftovers ------------------------------------------------------------------ */

/* A thread ends: so do its default streams. */
static void end_thread(void *argument) {
    sim_thread *thread = argument;
    if (!tn__sim_lock()) return;
    for (int i = 0; thread->generation == tn__sim.generation && i < SIM_DEVICES_MAX; i++) {
        if (thread->default_streams[i]) tn__sim_stream_destroy(thread->default_streams[i]);
        thread->default_streams[i] = NULL;
    }
    tn__sim_unlock();
}

void tn__sim_streams_load(void) { pthread_key_create(&thread_end_key, end_thread); }
void tn__sim_streams_unload(void) { pthread_key_delete(thread_end_key); }

static void drop_queue(sim_stream *stream) {
    while (stream->first) {
        sim_work *work = dequeue(stream);
        tn__sim_ticket_release(work->ticket);
        tn__sim_free(work);
    }
}

void tn__sim_streams_reset(void) {
    while (busy_count)
        wait_a_while();
    tn__sim_captures_reset();
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        drop_queue(streams[slot]);
        tn__sim_free(streams[slot]->tips.nodes);
        tn__sim_clock_clear(&streams[slot]->clock);
        tn__sim_free(streams[slot]);
    }
    tn__sim_free(streams);
    tn__sim_free(by_handle);
    tn__sim_free(free_handles);
    streams = by_handle = NULL;
    free_handles = NULL;
    slot_count = handle_count = free_handle_count = 0;
    lost_uses = 0;
    watcher = NULL;
    tn__sim_clock_clear(&host_clock);
    tn__sim_clock_clear(&peek_clock);
    host_version = 0;
    tn__sim_events_reset();
}

int tn__sim_stream_leftovers(sim_report *report) {
    int created = 0, unfinished = 0, captured, events = tn__sim_event_leftovers();
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        created += streams[slot]->kind == SIM_STREAM_CREATED;
        unfinished += !tn__sim_stream_is_idle(streams[slot]);
    }
    captured = tn__sim_capture_leftovers(report);
    if (created) tn__sim_report_line(report, "  streams: %d\n", created);
    if (events) tn__sim_report_line(report, "  events: %d\n", events);
    if (unfinished) tn__sim_report_line(report, "  unfinished work: on %d streams\n", unfinished);
    return created + events + unfinished + captured;
}
