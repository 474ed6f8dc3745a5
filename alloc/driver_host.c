/* The host driver: the CPU as a device, with real memory, real streams and real events.
 *
 * Memory is plain (no VMM): driver_host_memory.c. Streams are worker threads: host_stream.c.
 * Kernels are functions that the op layer puts on a stream as host tasks.
 *
 * Invariant, under the device's lock: streams holds each living stream of this device once, in
 * order of id (so also of creation). A stream that is not in it is refused, whether it belongs to
 * another device or was destroyed. The default stream's worker starts with its first work.
 */
#include "driver_host_memory.h"
#include "driver_state.h"
#include "host_alloc.h"
#include "host_stream.h"
#include "options.h"

#include <stdio.h>
#include <string.h>

enum { DEFAULT_STREAM_ID = 1 };

struct tn__driver_device {
    tn__call_counts counts;
    tn__host_memory memory;
    tn__host_memory pinned; /* all memory can be reached: it is kept apart from the limit only */
    pthread_mutex_t lock;
    tn__host_stream **streams;
    size_t stream_count;
    size_t stream_capacity;
    tn__host_stream *default_stream; /* NULL until its first work; also in streams */
    uint64_t next_id;
};

typedef struct host_event {
    pthread_mutex_t lock;
    tn__host_stream *stream; /* a reference; NULL: never recorded, so complete */
    uint64_t position;
} host_event;

static tn_status begin_call(tn__driver_device *device, tn_driver_call call) {
    if (tn__driver_is_gone()) return tn__driver_require_present(tn_driver_call_name(call));
    tn__count_call(&device->counts, call);
    return TN_OK;
}

/* ---- the device ------------------------------------------------------------------------------ */

static void fill_info(tn_device_info *info, const tn__driver_device *device) {
    *info = (tn_device_info)TN_DEVICE_INFO_INIT;
    info->driver = TN_DRIVER_HOST;
    info->memory_bytes = device->memory.limit;
    info->granularity_bytes = TN__HOST_GRANULARITY;
    snprintf(info->name, sizeof info->name, "host CPU, %s memory",
             device->memory.arena.is_open ? "jemalloc" : "mmap");
}

static tn_status host_open(const tn_device_config *config, tn_device_info *info,
                           tn__driver_device **out) {
    TN_TRY(tn__driver_require_present("opening a host device"));
    TN_REQUIRE(config->ordinal == 0, "the host driver has one device, 0, not %d", config->ordinal);
    size_t limit = config->memory_limit_bytes;
    if (!limit) limit = tn__options_get()->host_memory_bytes;
    TN_REQUIRE(limit >= TN__HOST_GRANULARITY, "a host device of %zu bytes: it takes 2 MiB or more",
               limit);
    TN_TRY(tn__driver_watch_process());
    tn__driver_device *device = tn__host_alloc(1, sizeof *device);
    if (!device) return TN_OUT_OF_HOST_MEMORY;
    tn__host_memory_open(&device->memory, limit / TN__HOST_GRANULARITY * TN__HOST_GRANULARITY,
                         NULL);
    tn__host_memory_open(&device->pinned, SIZE_MAX, NULL);
    tn__host_memory_use_no_arena(&device->pinned); /* jemalloc's extent hooks end up here */
    pthread_mutex_init(&device->lock, NULL);
    device->next_id = DEFAULT_STREAM_ID + 1;
    fill_info(info, device);
    *out = device;
    return TN_OK;
}

static void host_close(tn__driver_device *device) {
    if (tn__driver_is_gone()) return;
    for (size_t i = 0; i < device->stream_count; i++)
        tn__host_stream_end(device->streams[i]);
    tn__host_free(device->streams);
    (void)tn__host_memory_close(&device->memory);
    (void)tn__host_memory_close(&device->pinned);
    pthread_mutex_destroy(&device->lock);
    tn__host_free(device);
}

static tn_status host_memory_info(tn__driver_device *device, size_t *free_bytes,
                                  size_t *total_bytes) {
    *free_bytes = device->memory.limit - tn__host_memory_used(&device->memory);
    *total_bytes = device->memory.limit;
    return TN_OK;
}

static tn_status host_mem_alloc(tn__driver_device *device, size_t bytes, void **out) {
    TN_TRY(begin_call(device, TN_CALL_MEM_ALLOC));
    TN_REQUIRE(bytes > 0, "mem_alloc of 0 bytes");
    uint64_t start = tn__clock_ns();
    tn_status status = tn__host_memory_take(&device->memory, bytes, out);
    tn__count_memory_ns(&device->counts, TN_CALL_MEM_ALLOC, tn__clock_ns() - start);
    return status;
}

static tn_status host_mem_free(tn__driver_device *device, void *address) {
    TN_TRY(begin_call(device, TN_CALL_MEM_FREE));
    uint64_t start = tn__clock_ns();
    tn_status status = tn__host_memory_give(&device->memory, address);
    tn__count_memory_ns(&device->counts, TN_CALL_MEM_FREE, tn__clock_ns() - start);
    return status;
}

static tn_status host_host_alloc(tn__driver_device *device, size_t bytes, void **out) {
    TN_TRY(begin_call(device, TN_CALL_MEM_ALLOC));
    TN_REQUIRE(bytes > 0, "host_alloc of 0 bytes");
    uint64_t start = tn__clock_ns();
    tn_status status = tn__host_memory_take(&device->pinned, bytes, out);
    tn__count_memory_ns(&device->counts, TN_CALL_MEM_ALLOC, tn__clock_ns() - start);
    return status;
}

static tn_status host_host_free(tn__driver_device *device, void *address) {
    TN_TRY(begin_call(device, TN_CALL_MEM_FREE));
    uint64_t start = tn__clock_ns();
    tn_status status = tn__host_memory_give(&device->pinned, address);
    tn__count_memory_ns(&device->counts, TN_CALL_MEM_FREE, tn__clock_ns() - start);
    return status;
}

/* ---- streams --------------------------------------------------------------------------------- */

static tn_status add_stream_locked(tn__driver_device *device, uint64_t id, tn__host_stream **out) {
    if (device->stream_count == device->stream_capacity) {
        size_t capacity = device->stream_capacity ? device->stream_capacity * 2 : 8;
        tn__host_stream **grown =
            tn__host_realloc(device->streams, device->stream_capacity, capacity, sizeof *grown);
        if (!grown) return TN_OUT_OF_HOST_MEMORY;
        device->streams = grown;
        device->stream_capacity = capacity;
    }
    tn__host_stream *stream;
    TN_TRY(tn__host_stream_create(id, &stream));
    size_t at = id == DEFAULT_STREAM_ID ? 0 : device->stream_count;
    memmove(device->streams + at + 1, device->streams + at,
            (device->stream_count - at) * sizeof *device->streams);
    device->streams[at] = stream;
    device->stream_count++;
    *out = stream;
    return TN_OK;
}

/* Index of the stream, or stream_count. Few streams live at a time: a scan is enough. */
static size_t index_of_locked(const tn__driver_device *device, const void *stream) {
    size_t at = 0;
    while (at < device->stream_count && device->streams[at] != stream)
        at++;
    return at;
}

static tn_status find_locked(tn__driver_device *device, tn_stream stream, tn__host_stream **out) {
    if (!stream) {
        if (!device->default_stream)
            TN_TRY(add_stream_locked(device, DEFAULT_STREAM_ID, &device->default_stream));
        *out = device->default_stream;
        return TN_OK;
    }
    size_t at = index_of_locked(device, stream);
    TN_REQUIRE(at < device->stream_count, "%p is no stream of this host device", stream);
    *out = device->streams[at];
    return TN_OK;
}

/* Finds the stream and holds it, so that it can not end under the caller. */
static tn_status hold_stream(tn__driver_device *device, tn_stream stream, tn__host_stream **out) {
    tn__host_stream *found = NULL;
    pthread_mutex_lock(&device->lock);
    tn_status status = find_locked(device, stream, &found);
    if (found) tn__host_stream_hold(found);
    pthread_mutex_unlock(&device->lock);
    *out = found;
    return status;
}

static tn_status host_stream_create(tn__driver_device *device, tn_stream *out) {
    TN_TRY(begin_call(device, TN_CALL_STREAM));
    tn__host_stream *stream;
    pthread_mutex_lock(&device->lock);
    tn_status status = add_stream_locked(device, device->next_id, &stream);
    if (status == TN_OK) {
        device->next_id++;
        *out = stream;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

static tn_status host_stream_destroy(tn__driver_device *device, tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_STREAM));
    TN_REQUIRE(stream, "the default stream can not be destroyed");
    pthread_mutex_lock(&device->lock);
    size_t at = index_of_locked(device, stream);
    int is_known = at < device->stream_count && stream != device->default_stream;
    if (is_known) {
        device->stream_count--;
        memmove(device->streams + at, device->streams + at + 1,
                (device->stream_count - at) * sizeof *device->streams);
    }
    pthread_mutex_unlock(&device->lock);
    TN_REQUIRE(is_known, "%p is no stream of this host device", stream);
    tn__host_stream_end(stream);
    return TN_OK;
}

static tn_status host_stream_id(tn__driver_device *device, tn_stream stream, uint64_t *out) {
    TN_TRY(tn__driver_require_present("stream_id"));
    if (!stream) return *out = DEFAULT_STREAM_ID, TN_OK;
    tn__host_stream *held;
    TN_TRY(hold_stream(device, stream, &held));
    *out = tn__host_stream_id(held);
    tn__host_stream_drop(held);
    return TN_OK;
}

static tn_status host_stream_synchronize(tn__driver_device *device, tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_STREAM));
    tn__host_stream *held;
    TN_TRY(hold_stream(device, stream, &held));
    tn__host_stream_wait_for(held, tn__host_stream_submitted(held));
    tn__host_stream_drop(held);
    return TN_OK;
}

/* The living stream with the lowest id above `id`, held; NULL if there is none. */
static tn__host_stream *hold_next(tn__driver_device *device, uint64_t id) {
    tn__host_stream *next = NULL;
    pthread_mutex_lock(&device->lock);
    for (size_t i = 0; i < device->stream_count && !next; i++) {
        if (tn__host_stream_id(device->streams[i]) > id) next = device->streams[i];
    }
    if (next) tn__host_stream_hold(next);
    pthread_mutex_unlock(&device->lock);
    return next;
}

static tn_status host_synchronize(tn__driver_device *device) {
    TN_TRY(begin_call(device, TN_CALL_STREAM));
    uint64_t id = 0;
    for (tn__host_stream *stream; (stream = hold_next(device, id)) != NULL;) {
        id = tn__host_stream_id(stream);
        tn__host_stream_wait_for(stream, tn__host_stream_submitted(stream));
        tn__host_stream_drop(stream);
    }
    return TN_OK;
}

static tn_status host_stream_is_capturing(tn__driver_device *device, tn_stream stream, int *out) {
    (void)device;
    (void)stream;
    *out = 0;
    return TN_OK;
}

/* ---- events ---------------------------------------------------------------------------------- */

static tn_status host_event_create(tn__driver_device *device, tn__event *out) {
    TN_TRY(begin_call(device, TN_CALL_EVENT));
    host_event *event = tn__host_alloc(1, sizeof *event);
    if (!event) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&event->lock, NULL);
    *out = event;
    return TN_OK;
}

static tn_status host_event_destroy(tn__driver_device *device, tn__event handle) {
    TN_TRY(begin_call(device, TN_CALL_EVENT));
    host_event *event = handle;
    TN_REQUIRE(event, "event_destroy of NULL");
    if (event->stream) tn__host_stream_drop(event->stream);
    pthread_mutex_destroy(&event->lock);
    tn__host_free(event);
    return TN_OK;
}

static tn_status host_event_record(tn__driver_device *device, tn__event handle, tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_EVENT_RECORD));
    host_event *event = handle;
    TN_REQUIRE(event, "event_record of NULL");
    tn__host_stream *held;
    TN_TRY(hold_stream(device, stream, &held));
    pthread_mutex_lock(&event->lock);
    tn__host_stream *before = event->stream;
    event->stream = held;
    event->position = tn__host_stream_submitted(held);
    pthread_mutex_unlock(&event->lock);
    if (before) tn__host_stream_drop(before);
    return TN_OK;
}

/* What the event stands for now, its stream held; NULL if it was never recorded. */
static tn__host_stream *hold_recorded(host_event *event, uint64_t *position) {
    pthread_mutex_lock(&event->lock);
    tn__host_stream *stream = event->stream;
    *position = event->position;
    if (stream) tn__host_stream_hold(stream);
    pthread_mutex_unlock(&event->lock);
    return stream;
}

static tn_status host_event_is_done(tn__driver_device *device, tn__event handle, int *out) {
    TN_TRY(begin_call(device, TN_CALL_EVENT_QUERY));
    TN_REQUIRE(handle, "event_is_done of NULL");
    uint64_t position;
    tn__host_stream *stream = hold_recorded(handle, &position);
    *out = stream ? tn__host_stream_has_reached(stream, position) : 1;
    if (stream) tn__host_stream_drop(stream);
    return TN_OK;
}

static tn_status host_event_synchronize(tn__driver_device *device, tn__event handle) {
    TN_TRY(begin_call(device, TN_CALL_EVENT_SYNCHRONIZE));
    TN_REQUIRE(handle, "event_synchronize of NULL");
    uint64_t position;
    tn__host_stream *stream = hold_recorded(handle, &position);
    if (!stream) return TN_OK;
    tn__host_stream_wait_for(stream, position);
    tn__host_stream_drop(stream);
    return TN_OK;
}

/* Puts work on a stream that may not exist. */
static tn_status put_work(tn__driver_device *device, tn_stream stream, const tn__host_work *work) {
    tn__host_stream *held;
    TN_TRY(hold_stream(device, stream, &held));
    tn_status status = tn__host_stream_push(held, work);
    tn__host_stream_drop(held);
    return status;
}

static tn_status host_stream_wait_event(tn__driver_device *device, tn_stream stream,
                                        tn__event handle) {
    TN_TRY(begin_call(device, TN_CALL_STREAM_WAIT));
    TN_REQUIRE(handle, "stream_wait_event of NULL");
    tn__host_work work = {.kind = TN__HOST_WAIT};
    tn__host_stream *waiting;
    TN_TRY(hold_stream(device, stream, &waiting));
    work.other = hold_recorded(handle, &work.position);
    tn_status status = TN_OK;
    int is_needed = work.other && work.other != waiting; /* a stream is in order with itself */
    if (is_needed) status = tn__host_stream_push(waiting, &work);
    if (work.other && (!is_needed || status != TN_OK)) tn__host_stream_drop(work.other);
    tn__host_stream_drop(waiting);
    return status;
}

/* ---- work ------------------------------------------------------------------------------------ */

static tn_status host_copy(tn__driver_device *device, void *dst, const void *src, size_t bytes,
                           tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_LAUNCH));
    TN_REQUIRE(dst && src, "a copy of %zu bytes from %p to %p", bytes, src, dst);
    tn__host_work work = {.kind = TN__HOST_COPY, .dst = dst, .src = src, .bytes = bytes};
    return put_work(device, stream, &work);
}

static tn_status host_copy_rows(tn__driver_device *device, const tn__row_copy *rows,
                                tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_LAUNCH));
    TN_REQUIRE(rows->dst && rows->src, "a copy of %zu rows of %zu bytes from %p to %p", rows->rows,
               rows->row_bytes, rows->src, rows->dst);
    tn__host_work work = {.kind = TN__HOST_COPY_ROWS, .rows = *rows};
    return put_work(device, stream, &work);
}

static tn_status host_fill(tn__driver_device *device, void *dst, unsigned char byte, size_t bytes,
                           tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_LAUNCH));
    TN_REQUIRE(dst, "a fill of %zu bytes at NULL", bytes);
    tn__host_work work = {.kind = TN__HOST_FILL, .dst = dst, .byte = byte, .bytes = bytes};
    return put_work(device, stream, &work);
}

static tn_status host_host_task(tn__driver_device *device, tn__host_task task, void *argument,
                                tn_stream stream) {
    TN_TRY(begin_call(device, TN_CALL_LAUNCH));
    TN_REQUIRE(task, "a host task of NULL");
    tn__host_work work = {.kind = TN__HOST_TASK, .task = task, .argument = argument};
    return put_work(device, stream, &work);
}

static tn_status host_make_current(tn__driver_device *device) { return (void)device, TN_OK; }

static double host_now_us(tn__driver_device *device) {
    (void)device;
    return (double)tn__clock_ns() / 1000.0;
}

static tn_status host_stats(tn__driver_device *device, tn_driver_stats *out) {
    tn__call_counts_read(&device->counts, out);
    return TN_OK;
}

const tn__driver tn__driver_host = {
    .name = "host",
    .open = host_open,
    .close = host_close,
    .memory_info = host_memory_info,
    .synchronize = host_synchronize,
    .mem_alloc = host_mem_alloc,
    .mem_free = host_mem_free,
    .host_alloc = host_host_alloc,
    .host_free = host_host_free,
    .stream_create = host_stream_create,
    .stream_destroy = host_stream_destroy,
    .stream_id = host_stream_id,
    .stream_synchronize = host_stream_synchronize,
    .stream_is_capturing = host_stream_is_capturing,
    .event_create = host_event_create,
    .event_destroy = host_event_destroy,
    .event_record = host_event_record,
    .event_record_outside = host_event_record,
    .event_is_done = host_event_is_done,
    .event_synchronize = host_event_synchronize,
    .stream_wait_event = host_stream_wait_event,
    .copy = host_copy,
    .copy_rows = host_copy_rows,
    .fill = host_fill,
    .host_task = host_host_task,
    .make_current = host_make_current,
    .now_us = host_now_us,
    .stats = host_stats,
};
