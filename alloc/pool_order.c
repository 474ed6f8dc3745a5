/* Streams, epochs and events: see pool_order.h. */
#include "pool_order.h"

#include <stdatomic.h>
#include <string.h>

#include "canary.h"
#include "host_alloc.h"
#include "no_wait.h"

/* ---- streams ------------------------------------------------------------------------------ */

static tn__pool_stream **bucket_of(tn__order *order, uint64_t id) {
    return &order->buckets[id % TN__STREAM_BUCKETS];
}

tn__pool_stream *tn__order_known(tn__order *order, uint64_t id) {
    tn__pool_stream *stream = *bucket_of(order, id);
    while (stream && stream->id != id)
        stream = stream->next;
    return stream;
}

static tn__recent_stream *recent_of(tn__order *order, tn_stream handle) {
    return &order->recent[((uintptr_t)handle >> 4) * 0x9E3779B97F4A7C15u >> 59];
}

/* This thread's number. A pthread_t is given to another thread again, this never. */
static uint64_t this_thread(void) {
    static _Atomic uint64_t last;
    static _Thread_local uint64_t number;
    if (!number) number = ++last;
    return number;
}

/* The default streams are those of the pool's device. */
static int is_default(tn_stream handle) {
    return !handle || handle == TN__STREAM_LEGACY || handle == TN__STREAM_PER_THREAD;
}

/* The device that made the stream with tn_stream_create; NULL: a stream of another library. */
static tn__order_device *maker_of(tn__order *order, tn_stream handle) {
    if (tn__device_owns_stream(order->home.owner, handle)) return &order->home;
    for (tn__order_device *peer = order->peers; peer; peer = peer->next) {
        if (tn__device_owns_stream(peer->owner, handle)) return peer;
    }
    return NULL;
}

/* The device of a stream that another library made, and may destroy without a word to us. */
static tn_status find_foreign_device(tn__order *order, tn_stream handle, tn__order_device **out) {
    int ordinal = order->home.ordinal;
    *out = &order->home;
    if (!order->driver->stream_ordinal) return TN_OK;
    TN_TRY(order->driver->stream_ordinal(order->home.state, handle, &ordinal));
    if (ordinal == order->home.ordinal) return TN_OK;
    for (tn__order_device *peer = order->peers; peer; peer = peer->next) {
        if (peer->ordinal == ordinal) return *out = peer, TN_OK;
    }
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "stream %p belongs to device %d and the memory to device %d: make that device a "
                   "peer of the pool first (tn_pool_peer_enable)",
                   handle, ordinal, order->home.ordinal);
}

tn_status tn__order_make(tn__order *order, tn_stream handle, uint64_t id, tn__pool_stream **out) {
    tn__order_device *maker = is_default(handle) ? &order->home : maker_of(order, handle);
    tn__order_device *device = maker;
    tn__pool_stream *stream;
    if (!maker) TN_TRY(find_foreign_device(order, handle, &device));
    stream = tn__host_alloc(1, sizeof *stream);
    if (!stream) return TN_OUT_OF_HOST_MEMORY;
    stream->device = device;
    stream->handle = handle;
    stream->thread = this_thread();
    stream->id = id;
    stream->number = ++order->last_number;
    stream->is_foreign = !maker || (id & TN__STREAM_ID_IN_CAPTURE);
    stream->epoch = 1;
    stream->trace_number = -1;
    *out = stream;
    return TN_OK;
}

static tn_status add_stream(tn__order *order, tn_stream handle, uint64_t id,
                            tn__pool_stream **out) {
    tn__pool_stream *stream = NULL;
    TN_TRY(tn__order_make(order, handle, id, &stream));
    stream->next = *bucket_of(order, id);
    *bucket_of(order, id) = stream;
    order->stream_count++;
    *out = stream;
    return TN_OK;
}

/* Streams whose end we hear of (our own, and adopted ones), and the default stream: the handle is
 * enough. NULL: it has to be asked for. */
static tn__pool_stream *find_recent(tn__order *order, tn_stream handle) {
    const tn__recent_stream *recent = recent_of(order, handle);
    return recent->handle == handle ? recent->stream : NULL;
}

/* By the driver's id and not by the handle alone: handles are shared between threads (per-thread
 * default streams) and used again after a stream was destroyed and its work still runs. */
tn_status tn__order_find(tn__order *order, tn_stream handle, tn__pool_stream **out) {
    tn__pool_stream *stream = find_recent(order, handle);
    uint64_t id = 0;
    if (stream) {
        *out = stream;
        return TN_OK;
    }
    TN_TRY(order->driver->stream_id(order->home.state, handle, &id));
    stream = tn__order_known(order, id);
    if (!stream) TN_TRY(add_stream(order, handle, id, &stream));
    atomic_fetch_or_explicit(&order->known_bits, tn__stream_bit(handle), memory_order_relaxed);
    if (id & TN__STREAM_ID_IN_CAPTURE) {
        *out = stream; /* the handle means another when the capture has ended */
        return TN_OK;
    }
    if (is_default(handle) ? handle != TN__STREAM_PER_THREAD : !!maker_of(order, handle)) {
        stream->is_foreign = 0; /* it may have been adopted since */
        *recent_of(order, handle) = (tn__recent_stream){handle, stream};
    }
    *out = stream;
    return TN_OK;
}

/* The same, of a stream that has a state; else NULL. */
static tn__pool_stream *find_known(tn__order *order, tn_stream handle) {
    tn__pool_stream *stream = find_recent(order, handle);
    uint64_t id = 0;
    if (stream) return stream;
    if (order->driver->stream_id(order->home.state, handle, &id) != TN_OK) return NULL;
    return tn__order_known(order, id);
}

tn__use tn__order_use_now(tn__pool_stream *stream) {
    stream->is_used = 1;
    return (tn__use){stream, stream->epoch};
}

tn_status tn__order_check_capture(const tn__order *order, tn_stream handle, const char *what) {
    int is_capturing = 0;
    TN_TRY(order->driver->stream_is_capturing(order->home.state, handle, &is_capturing));
    if (!is_capturing) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "the stream captures a graph and the pool would have to %s: allocate what the "
                   "capture needs once before it",
                   what);
}

/* ---- events ------------------------------------------------------------------------------- */

/* The list of spare events always has room for every event that exists. */
static tn_status make_event(const tn__driver *driver, tn__order_device *device, tn__event *out) {
    if (device->spare_count > 0) {
        *out = device->spare_events[--device->spare_count];
        return TN_OK;
    }
    if (device->event_count == device->spare_capacity) {
        size_t capacity = device->spare_capacity ? 2 * device->spare_capacity : 16;
        tn__event *events = tn__host_realloc(device->spare_events, device->spare_capacity, capacity,
                                             sizeof *events);
        if (!events) return TN_OUT_OF_HOST_MEMORY;
        device->spare_events = events;
        device->spare_capacity = capacity;
    }
    TN_TRY(driver->event_create(device->state, out));
    device->event_count++;
    return TN_OK;
}

static void spare_event(tn__order_device *device, tn__event event) {
    TN_ASSERT(device->spare_count < device->spare_capacity);
    device->spare_events[device->spare_count++] = event;
}

/* Drops every second event. A dropped one's epoch is covered by the next one kept: waits for it
 * get longer, never too short. The last stays. */
static void thin_events(tn__pool_stream *stream) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < stream->closed_count; i++) {
        if (i % 2 == 0 && i + 1 < stream->closed_count) {
            spare_event(stream->device, stream->closed[i].event);
        } else {
            stream->closed[kept++] = stream->closed[i];
        }
    }
    stream->closed_count = kept;
}

static void forget_events(tn__pool_stream *stream) {
    for (uint32_t i = 0; i < stream->closed_count; i++) {
        spare_event(stream->device, stream->closed[i].event);
    }
    stream->closed_count = 0;
}

/* Of the streams that this pool knows, also other libraries'; the device has asked its own. */
static int is_any_capturing(const tn__order *order, const tn__order_device *device) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        const tn__pool_stream *stream = order->buckets[bucket];
        for (; stream; stream = stream->next) {
            int is_capturing = 0;
            if (stream->device != device || stream->handle == TN__STREAM_PER_THREAD) continue;
            (void)order->driver->stream_is_capturing(device->state, stream->handle, &is_capturing);
            if (is_capturing) return 1;
        }
    }
    return 0;
}

/* Before the event, for what other threads put on the stream meanwhile. The old epoch. */
static uint64_t open_epoch(tn__order *order, tn__pool_stream *stream) {
    order->use_stamp++;
    return stream->epoch++;
}

static tn_status end_lost_stream(tn__order *order, tn__pool_stream *stream) {
    uint64_t last;
    tn_status status;
    TN_TRY(tn__device_wait_begin(stream->device->owner));
    if (is_any_capturing(order, stream->device)) {
        tn__driver_wait_end();
        return TN_FAIL(TN_INVALID_STATE, "a foreign stream ended whose work the memory waits for, "
                                         "and the device can not be waited for in a capture");
    }
    last = open_epoch(order, stream);
    status = order->driver->synchronize(stream->device->state);
    tn__driver_wait_end();
    if (status != TN_OK) return status;
    forget_events(stream);
    stream->complete = last;
    stream->is_used = 0;
    return TN_OK;
}

/* Where an event covers the stream's work. Another thread's per-thread stream has no name here, but
 * an event on the legacy stream comes after the work of all such streams. */
static tn_stream recordable_handle(const tn__pool_stream *stream) {
    if (stream->handle != TN__STREAM_PER_THREAD) return stream->handle;
    return stream->thread == this_thread() ? stream->handle : NULL;
}

static tn_status record_epoch(tn__order *order, tn__pool_stream *stream) {
    tn_stream handle = recordable_handle(stream);
    tn__event event = NULL;
    uint64_t last;
    tn_status status;
    TN_TRY(tn__order_check_capture(order, handle, "record an event on it"));
    TN_TRY(make_event(order->driver, stream->device, &event));
    last = open_epoch(order, stream);
    status = order->driver->event_record_outside(stream->device->state, event, handle);
    if (status != TN_OK) {
        spare_event(stream->device, event);
        return status;
    }
    if (stream->closed_count == TN__CLOSED_MAX) thin_events(stream);
    stream->closed[stream->closed_count++] = (tn__closed_epoch){last, event};
    stream->is_used = 0;
    return TN_OK;
}

/* The handle of a foreign stream that was destroyed may mean a new one by now, and an event there
 * would say nothing of the old one's work. */
static tn_status ask_handle(tn__order *order, const tn__pool_stream *stream, int *is_lost) {
    uint64_t id = stream->id;
    tn_status status = TN_OK;
    if (stream->is_foreign) {
        status = order->driver->stream_id(stream->device->state, stream->handle, &id);
    }
    *is_lost = status == TN_INVALID_ARGUMENT || id != stream->id;
    return *is_lost ? TN_OK : status;
}

tn_status tn__order_close_epoch(tn__order *order, tn__pool_stream *stream) {
    int is_lost = 0;
    tn_status status;
    if (!stream->is_used) return TN_OK;
    TN_TRY(ask_handle(order, stream, &is_lost));
    status = is_lost ? TN_INVALID_ARGUMENT : record_epoch(order, stream);
    return status == TN_INVALID_ARGUMENT ? end_lost_stream(order, stream) : status;
}

int tn__order_may_go(const tn__pool_stream *stream) {
    if (!stream->is_foreign || stream->handle == TN__STREAM_PER_THREAD) return 0;
    return !stream->is_captured && !(stream->id & TN__STREAM_ID_IN_CAPTURE);
}

tn_status tn__order_fenced_use(tn__order *order, tn__pool_stream *stream, tn__use *out) {
    TN_TRY(record_epoch(order, stream));
    *out = (tn__use){stream, tn__order_covered(stream)};
    return TN_OK;
}

/* What can not be recorded now, in a capture say, is recorded when it is wanted, if the stream is
 * still there then. */
void tn__order_fence(tn__order *order, tn__pool_stream *stream, int is_named) {
    int is_lost = 0;
    tn_status status = TN_OK;
    if (!tn__order_may_go(stream)) return;
    tn__error_scope_begin();
    if (!is_named) status = ask_handle(order, stream, &is_lost);
    if (status == TN_OK && !is_lost) (void)record_epoch(order, stream);
    (void)tn__error_scope_end(TN_OK);
}

static void complete_first(tn__pool_stream *stream) {
    stream->complete = stream->closed[0].epoch;
    spare_event(stream->device, stream->closed[0].event);
    stream->closed_count--;
    for (uint32_t i = 0; i < stream->closed_count; i++)
        stream->closed[i] = stream->closed[i + 1];
}

tn_status tn__order_poll_stream(tn__order *order, tn__pool_stream *stream) {
    while (stream->closed_count > 0) {
        int is_done = 0;
        TN_TRY(
            order->driver->event_is_done(stream->device->state, stream->closed[0].event, &is_done));
        if (!is_done) break;
        complete_first(stream);
    }
    return TN_OK;
}

/* A stream that captures takes no event now; those from before can be asked. */
static tn_status poll_stream(tn__order *order, tn__pool_stream *stream, int *any) {
    uint64_t complete = stream->complete;
    tn_status status = tn__order_close_epoch(order, stream);
    if (status == TN_OK || status == TN_INVALID_STATE) {
        status = tn__order_poll_stream(order, stream);
    }
    if (stream->complete != complete) *any = 1;
    return status;
}

tn_status tn__order_poll(tn__order *order, int *any) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        for (tn__pool_stream *stream = order->buckets[bucket]; stream; stream = stream->next) {
            TN_TRY(poll_stream(order, stream, any));
        }
    }
    return TN_OK;
}

/* ---- waits -------------------------------------------------------------------------------- */

static uint32_t home_of(uint64_t number) { return (uint32_t)(number % TN__WAITS_MAX); }

/* Whoever finds its home taken lies anywhere. Streams are numbered one after the other, so that few
 * do, and a question is one comparison. TN__WAITS_MAX: it is not there. */
static uint32_t find_wait(const tn__pool_stream *stream, uint64_t number) {
    uint32_t i = home_of(number);
    if (stream->waited[i].source_number == number) return i;
    for (i = 0; i < TN__WAITS_MAX; i++) {
        if (stream->waited[i].source_number == number) break;
    }
    return i;
}

/* How far `stream` has waited for the other. */
static uint64_t waited_for(const tn__pool_stream *stream, const tn__pool_stream *source) {
    uint32_t i = find_wait(stream, source->number);
    return i < TN__WAITS_MAX ? stream->waited[i].epoch : 0;
}

/* At home, or where there is room; 0 if there is none: then the wait is not known. */
static int add_wait(tn__pool_stream *stream, tn__stream_waited wait) {
    uint32_t i = find_wait(stream, wait.source_number);
    if (i == TN__WAITS_MAX) {
        i = home_of(wait.source_number);
        if (stream->waited[i].source_number) i = find_wait(stream, 0);
        if (i == TN__WAITS_MAX) return 0;
        stream->waited[i] = wait;
    }
    if (stream->waited[i].epoch < wait.epoch) stream->waited[i].epoch = wait.epoch;
    return 1;
}

static void remember_wait(tn__pool_stream *stream, tn__stream_waited wait) {
    if (add_wait(stream, wait)) return;
    stream->waited[stream->waited_next] = wait;
    stream->waited_next = (stream->waited_next + 1) % TN__WAITS_MAX;
}

static int is_after(const tn__pool_stream *stream, tn__use use) {
    if (use.stream == stream) return 1;
    if (use.epoch <= use.stream->complete) return 1;
    return use.epoch <= waited_for(stream, use.stream);
}

int tn__order_is_ready(const tn__pool_stream *stream, tn__uses *uses) {
    const tn__use *items = tn__uses_items(uses);
    for (uint32_t i = 0; i < uses->count; i++) {
        if (!is_after(stream, items[i])) return 0;
    }
    return 1;
}

/* Waits for the first event of the source that covers the use: the tightest one there is. */
static tn_status wait_for(tn__order *order, tn__pool_stream *stream, tn__use use) {
    if (TN__CANARY(TN__CANARY_DEVICE_WAIT)) return TN_OK;
    tn__pool_stream *source = use.stream;
    if (use.epoch > tn__order_covered(source)) {
        TN_ASSERT(source->is_used);
        TN_TRY(tn__order_close_epoch(order, source));
        if (use.epoch <= source->complete) return TN_OK;
    }
    for (uint32_t i = 0; i < source->closed_count; i++) {
        if (source->closed[i].epoch < use.epoch) continue;
        TN_TRY(order->driver->stream_wait_event(stream->device->state, stream->handle,
                                                source->closed[i].event));
        remember_wait(stream, (tn__stream_waited){source->number, source->closed[i].epoch});
        order->wait_count++;
        return TN_OK;
    }
    TN_CHECK(!"an incomplete use has an event that covers it");
    return TN_OK;
}

tn_status tn__order_wait_for(tn__order *order, tn__pool_stream *stream, tn__use use) {
    return is_after(stream, use) ? TN_OK : wait_for(order, stream, use);
}

tn_status tn__order_wait(tn__order *order, tn__pool_stream *stream, tn__uses *uses) {
    for (uint32_t i = 0; i < uses->count; i++)
        TN_TRY(tn__order_wait_for(order, stream, tn__uses_items(uses)[i]));
    return TN_OK;
}

void tn__order_drop_covered(const tn__pool_stream *stream, tn__uses *uses) {
    for (uint32_t i = uses->count; i-- > 0;) {
        tn__use use = tn__uses_items(uses)[i];
        if (use.stream != stream && is_after(stream, use)) tn__uses_forget(uses, use.stream);
    }
}

/* ---- waits of the user ---------------------------------------------------------------------- */

/* A use that still sees the epoch that is closed here was put on the stream before the event. */
void tn__order_wait_begins(tn__order *order, const tn__user_wait *wait) {
    tn__told_wait *told = &order->told[order->told_next];
    tn__pool_stream *source = find_known(order, wait->other);
    if (!source) return;
    order->told_next = (order->told_next + 1) % TN__TOLD_WAITS;
    told->number = wait->number;
    memcpy(told->known, source->waited, sizeof told->known);
    told->source = (tn__stream_waited){source->number, source->epoch};
    if (!TN__CANARY(TN__CANARY_USER_WAIT)) (void)open_epoch(order, source);
}

static const tn__told_wait *find_told(const tn__order *order, uint64_t number) {
    for (size_t i = 0; i < TN__TOLD_WAITS; i++) {
        if (order->told[i].number == number) return &order->told[i];
    }
    return NULL;
}

/* A stream that the pool has never seen is not worth memory. What the other had waited for is
 * remembered where that costs nothing else that is. */
void tn__order_wait_is_put(tn__order *order, const tn__user_wait *wait) {
    const tn__told_wait *told = find_told(order, wait->number);
    tn__pool_stream *stream = told ? find_known(order, wait->stream) : NULL;
    if (!stream || stream->number == told->source.source_number) return;
    remember_wait(stream, told->source);
    for (size_t i = 0; i < TN__WAITS_MAX; i++) {
        uint64_t number = told->known[i].source_number;
        if (number && number != stream->number) (void)add_wait(stream, told->known[i]);
    }
}

/* ---- device and end ------------------------------------------------------------------------- */

int tn__order_device_is_busy(const tn__order *order, const tn__order_device *device) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        const tn__pool_stream *stream = order->buckets[bucket];
        for (; stream; stream = stream->next) {
            if (stream->device != device) continue;
            if (stream->is_used || stream->closed_count > 0) return 1;
        }
    }
    return 0;
}

/* ---- end ---------------------------------------------------------------------------------- */

/* Other streams may remember waits for the number. Numbers never repeat, so those are harmless; ids
 * do: a foreign stream may be forgotten while it is idle and be used again. */
void tn__order_remove(tn__order *order, tn__pool_stream *stream) {
    tn__pool_stream **at = bucket_of(order, stream->id);
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    for (size_t i = 0; i < TN__STREAM_RECENT; i++) {
        if (order->recent[i].stream == stream) order->recent[i].stream = NULL;
    }
    forget_events(stream);
    tn__host_free(stream);
    order->stream_count--;
    order->use_stamp++;
}

void tn__order_unmark(tn__order *order) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = order->buckets[bucket];
        for (; stream; stream = stream->next)
            stream->is_marked = 0;
    }
}

void tn__order_sweep(tn__order *order) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = order->buckets[bucket];
        while (stream) {
            tn__pool_stream *next = stream->next;
            int is_held = stream->is_marked || stream->hold_count > 0;
            if (!is_held && !stream->is_used && stream->closed_count == 0) {
                tn__order_remove(order, stream);
            }
            stream = next;
        }
    }
}

static void remove_streams(tn__order *order, const tn__order_device *device) {
    for (size_t bucket = 0; bucket < TN__STREAM_BUCKETS; bucket++) {
        tn__pool_stream *stream = order->buckets[bucket];
        while (stream) {
            tn__pool_stream *next = stream->next;
            if (stream->device == device) tn__order_remove(order, stream);
            stream = next;
        }
    }
}

tn_status tn__order_close_device(tn__order *order, tn__order_device *device) {
    remove_streams(order, device);
    while (device->spare_count > 0) {
        if (!tn__driver_is_gone()) {
            TN_TRY(order->driver->event_destroy(device->state,
                                                device->spare_events[device->spare_count - 1]));
        }
        device->spare_count--;
        device->event_count--;
    }
    tn__host_free(device->spare_events);
    device->spare_events = NULL;
    device->spare_capacity = 0;
    return TN_OK;
}

tn_status tn__order_close(tn__order *order) {
    for (tn__order_device *peer = order->peers; peer; peer = peer->next) {
        TN_TRY(tn__order_close_device(order, peer));
    }
    return tn__order_close_device(order, &order->home);
}
