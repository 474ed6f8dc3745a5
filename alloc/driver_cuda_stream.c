/* Streams, events and work of the CUDA driver.
 *
 * Our streams are non-blocking (they do not wait for the legacy default stream) and our events have
 * no timing, which makes them cheap. A stream may also be one of the caller's.
 */
#include "driver_cuda.h"

#include <pthread.h>

#include "host_alloc.h"

/* ---- streams ------------------------------------------------------------------------------- */

/* This thread's number, never given twice. */
static uint64_t thread_number(void) {
    static _Atomic uint64_t last;
    static _Thread_local uint64_t number;
    if (!number) number = atomic_fetch_add(&last, 1) + 1;
    return number;
}

/* For drivers before CUDA 12.0, which can not tell. Handles of created streams are addresses, so
 * that their low bits are free to tell the default streams apart. A handle that the driver gives
 * again to a later stream keeps its id here; tn_stream_destroy tells the pools of our own. */
static uint64_t id_by_handle(tn_stream stream) {
    if (!stream || stream == TN__CU_STREAM_LEGACY) return 1;
    if (stream == TN__CU_STREAM_PER_THREAD) return thread_number() << 3 | 2;
    return (uint64_t)(uintptr_t)stream;
}

/* A stream that captures can not be asked for its id: that is error 900 and spoils the capture. So
 * the ids of the streams that are made here are known from their beginning on, by handle, for the
 * whole process; and any other stream in a capture goes by its handle and the capture's number. */
typedef struct made_stream {
    const tn__cuda_library *library;
    tn_stream stream;
    uint64_t id;
} made_stream;

static pthread_mutex_t made_lock = PTHREAD_MUTEX_INITIALIZER;
static made_stream *made_streams;
static size_t made_count;
static size_t made_capacity;

static tn_status reserve_made_locked(void) {
    size_t capacity = made_capacity ? 2 * made_capacity : 16;
    made_stream *grown;
    if (made_count < made_capacity) return TN_OK;
    grown = tn__host_realloc(made_streams, made_capacity, capacity, sizeof *grown);
    if (!grown) return TN_OUT_OF_HOST_MEMORY;
    made_streams = grown;
    made_capacity = capacity;
    return TN_OK;
}

static void free_made_if_empty_locked(void) {
    if (made_count > 0) return;
    tn__host_free(made_streams);
    made_streams = NULL;
    made_capacity = 0;
}

static made_stream *find_made_locked(const tn__driver_device *device, tn_stream stream) {
    for (size_t i = 0; i < made_count; i++) {
        made_stream *made = &made_streams[i];
        if (made->stream == stream && made->library == device->library) return made;
    }
    return NULL;
}

static int find_made_id(const tn__driver_device *device, tn_stream stream, uint64_t *out) {
    const made_stream *made;
    pthread_mutex_lock(&made_lock);
    made = find_made_locked(device, stream);
    if (made) *out = made->id;
    pthread_mutex_unlock(&made_lock);
    return made != NULL;
}

static tn_status create_locked(tn__driver_device *device, tn_stream *out) {
    tn__cuda_call call;
    void *stream = NULL;
    unsigned long long id = 0;
    int has_id = 0;
    TN_TRY(reserve_made_locked());
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    int code = device->cu->stream_create(&stream, TN__CU_STREAM_NON_BLOCKING);
    if (code == TN__CU_SUCCESS && device->cu->stream_id) {
        has_id = device->cu->stream_id(stream, &id) == TN__CU_SUCCESS; /* else asked when needed */
    }
    TN_TRY(tn__cuda_end(&call, code, "cuStreamCreate()"));
    made_stream *made = find_made_locked(device, stream); /* one that ended without a word */
    if (made) *made = made_streams[--made_count];
    if (has_id) made_streams[made_count++] = (made_stream){device->library, stream, id};
    *out = stream;
    return TN_OK;
}

tn_status tn__cuda_stream_create(tn__driver_device *device, tn_stream *out) {
    pthread_mutex_lock(&made_lock);
    tn_status status = create_locked(device, out);
    free_made_if_empty_locked();
    pthread_mutex_unlock(&made_lock);
    return status;
}

/* Under the lock, since the driver may give the handle to the next stream at once. */
tn_status tn__cuda_stream_destroy(tn__driver_device *device, tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    pthread_mutex_lock(&made_lock);
    int code = device->cu->stream_destroy(stream);
    made_stream *made = code == TN__CU_SUCCESS ? find_made_locked(device, stream) : NULL;
    if (made) *made = made_streams[--made_count];
    free_made_if_empty_locked();
    pthread_mutex_unlock(&made_lock);
    return tn__cuda_end(&call, code, "cuStreamDestroy(%p)", stream);
}

/* 0 if the stream captures, or if the legacy stream can not be asked for that; `instead` tells it
 * from every other stream then, and from itself outside of the capture. */
static int may_ask_id(const tn__cu_calls *cu, void *stream, unsigned long long *instead) {
    unsigned long long capture = 0;
    int status = TN__CU_STREAM_CAPTURE_STATUS_NONE;
    int code = TN__CU_SUCCESS;
    if (cu->capture_info) {
        code = cu->capture_info(stream, &status, &capture, NULL, NULL, NULL);
    } else if (cu->stream_is_capturing) {
        code = cu->stream_is_capturing(stream, &status);
    }
    if (code == TN__CU_SUCCESS && status == TN__CU_STREAM_CAPTURE_STATUS_NONE) return 1;
    if (code != TN__CU_SUCCESS && code != TN__CU_ERROR_STREAM_CAPTURE_IMPLICIT) return 1;
    *instead = (id_by_handle(stream) ^ capture * 0x9E3779B97F4A7C15u) | TN__STREAM_ID_IN_CAPTURE;
    return 0;
}

int tn__cuda_is_in_capture(const tn__cu_calls *cu, void *stream) {
    unsigned long long instead;
    return !may_ask_id(cu, stream, &instead);
}

tn_status tn__cuda_stream_id(tn__driver_device *device, tn_stream stream, uint64_t *out) {
    if (find_made_id(device, stream, out)) return TN_OK;
    if (!device->cu->stream_id) return *out = id_by_handle(stream), TN_OK;
    tn__cuda_call call;
    unsigned long long id = 0;
    int code = TN__CU_SUCCESS;
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    if (may_ask_id(device->cu, stream, &id)) code = device->cu->stream_id(stream, &id);
    TN_TRY(tn__cuda_end(&call, code, "cuStreamGetId(%p)", stream));
    *out = id;
    return TN_OK;
}

tn_status tn__cuda_stream_synchronize(tn__driver_device *device, tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    int code = device->cu->stream_synchronize(stream);
    return tn__cuda_end(&call, code, "cuStreamSynchronize(%p)", stream);
}

/* The legacy stream can not even be asked while a stream that it would wait for captures: what is
 * illegal in a capture is then illegal for it too. */
tn_status tn__cuda_stream_is_capturing(tn__driver_device *device, tn_stream stream, int *out) {
    if (!device->cu->stream_is_capturing) return *out = 0, TN_OK;
    tn__cuda_call call;
    int status = TN__CU_STREAM_CAPTURE_STATUS_NONE;
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    int code = device->cu->stream_is_capturing(stream, &status);
    int is_implicit = code == TN__CU_ERROR_STREAM_CAPTURE_IMPLICIT;
    TN_TRY(tn__cuda_end(&call, is_implicit ? TN__CU_SUCCESS : code, "cuStreamIsCapturing(%p)",
                        stream));
    *out = is_implicit || status != TN__CU_STREAM_CAPTURE_STATUS_NONE;
    return TN_OK;
}

/* No capture is the legacy stream's own, so that it is in none even where it can not be asked. */
tn_status tn__cuda_stream_capture(tn__driver_device *device, tn_stream stream,
                                  tn__capture_status *status, uint64_t *id) {
    tn__cuda_call call;
    int now = TN__CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long number = 0;
    TN__CUDA_NEED(device, capture_info, "cuStreamGetCaptureInfo_v2");
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    int code = device->cu->capture_info(stream, &now, &number, NULL, NULL, NULL);
    int is_implicit = code == TN__CU_ERROR_STREAM_CAPTURE_IMPLICIT;
    TN_TRY(tn__cuda_end(&call, is_implicit ? TN__CU_SUCCESS : code, "cuStreamGetCaptureInfo(%p)",
                        stream));
    *status = TN__CAPTURE_NONE;
    if (is_implicit || now == TN__CU_STREAM_CAPTURE_STATUS_NONE) return TN_OK;
    *status = now == TN__CU_STREAM_CAPTURE_STATUS_ACTIVE ? TN__CAPTURE_ACTIVE : TN__CAPTURE_INVALID;
    *id = number;
    return TN_OK;
}

/* ---- events -------------------------------------------------------------------------------- */

tn_status tn__cuda_event_create(tn__driver_device *device, tn__event *out) {
    tn__cuda_call call;
    void *event = NULL;
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT, &call));
    int code = device->cu->event_create(&event, TN__CU_EVENT_DISABLE_TIMING);
    TN_TRY(tn__cuda_end(&call, code, "cuEventCreate()"));
    *out = event;
    return TN_OK;
}

tn_status tn__cuda_event_destroy(tn__driver_device *device, tn__event event) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT, &call));
    int code = device->cu->event_destroy(event);
    return tn__cuda_end(&call, code, "cuEventDestroy(%p)", event);
}

tn_status tn__cuda_event_record(tn__driver_device *device, tn__event event, tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT_RECORD, &call));
    int code = device->cu->event_record(event, stream);
    return tn__cuda_end(&call, code, "cuEventRecord(%p, stream %p)", event, stream);
}

tn_status tn__cuda_event_record_outside(tn__driver_device *device, tn__event event,
                                        tn_stream stream) {
    const tn__cu_calls *cu = device->cu;
    tn__cuda_call call;
    int status = TN__CU_STREAM_CAPTURE_STATUS_NONE;
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT_RECORD, &call));
    int code = cu->event_record(event, stream);
    if (code != TN__CU_SUCCESS || !cu->stream_is_capturing) {
        return tn__cuda_end(&call, code, "cuEventRecord(%p, stream %p)", event, stream);
    }
    code = cu->stream_is_capturing(stream, &status);
    int is_implicit = code == TN__CU_ERROR_STREAM_CAPTURE_IMPLICIT;
    TN_TRY(tn__cuda_end(&call, is_implicit ? TN__CU_SUCCESS : code, "cuStreamIsCapturing(%p)",
                        stream));
    if (!is_implicit && status == TN__CU_STREAM_CAPTURE_STATUS_NONE) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "a capture was begun on stream %p while an event was recorded",
                   (void *)stream);
}

tn_status tn__cuda_event_record_all(tn__driver_device *device, tn__event event) {
    tn__cuda_call call;
    TN__CUDA_NEED(device, context_record, "cuCtxRecordEvent");
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT_RECORD, &call));
    int code = device->cu->context_record(device->context, event);
    return tn__cuda_end(&call, code, "cuCtxRecordEvent(%p)", event);
}

tn_status tn__cuda_event_is_done(tn__driver_device *device, tn__event event, int *out) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT_QUERY, &call));
    int code = device->cu->event_query(event);
    int is_waiting = code == TN__CU_ERROR_NOT_READY;
    TN_TRY(tn__cuda_end(&call, is_waiting ? TN__CU_SUCCESS : code, "cuEventQuery(%p)", event));
    *out = !is_waiting;
    return TN_OK;
}

tn_status tn__cuda_event_synchronize(tn__driver_device *device, tn__event event) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_EVENT_SYNCHRONIZE, &call));
    int code = device->cu->event_synchronize(event);
    return tn__cuda_end(&call, code, "cuEventSynchronize(%p)", event);
}

tn_status tn__cuda_stream_wait_event(tn__driver_device *device, tn_stream stream, tn__event event) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM_WAIT, &call));
    int code = device->cu->stream_wait_event(stream, event, 0);
    return tn__cuda_end(&call, code, "cuStreamWaitEvent(%p, event %p)", stream, event);
}

/* ---- work ---------------------------------------------------------------------------------- */

/* Unified addressing: the driver sees from the addresses what is host and what is device. */
tn_status tn__cuda_copy(tn__driver_device *device, void *dst, const void *src, size_t bytes,
                        tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code = device->cu->copy((tn__cu_address)(uintptr_t)dst, (tn__cu_address)(uintptr_t)src,
                                bytes, stream);
    return tn__cuda_end(&call, code, "cuMemcpyAsync(%p, %p, %zu bytes, stream %p)", dst, src, bytes,
                        stream);
}

tn_status tn__cuda_copy_rows(tn__driver_device *device, const tn__row_copy *rows,
                             tn_stream stream) {
    const tn__cu_row_copy copy = {.src_type = TN__CU_MEMORY_TYPE_UNIFIED,
                                  .src = (tn__cu_address)(uintptr_t)rows->src,
                                  .src_stride = rows->src_stride,
                                  .dst_type = TN__CU_MEMORY_TYPE_UNIFIED,
                                  .dst = (tn__cu_address)(uintptr_t)rows->dst,
                                  .dst_stride = rows->dst_stride,
                                  .row_bytes = rows->row_bytes,
                                  .rows = rows->rows};
    tn__cuda_call call;
    TN__CUDA_NEED(device, copy_rows, "cuMemcpy2DAsync_v2");
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code = device->cu->copy_rows(&copy, stream);
    return tn__cuda_end(&call, code, "cuMemcpy2DAsync(%p, %p, %zu rows of %zu bytes, stream %p)",
                        rows->dst, rows->src, rows->rows, rows->row_bytes, stream);
}

tn_status tn__cuda_fill(tn__driver_device *device, void *dst, unsigned char byte, size_t bytes,
                        tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code = device->cu->fill((tn__cu_address)(uintptr_t)dst, byte, bytes, stream);
    return tn__cuda_end(&call, code, "cuMemsetD8Async(%p, %zu bytes, stream %p)", dst, bytes,
                        stream);
}

tn_status tn__cuda_host_task(tn__driver_device *device, tn__host_task task, void *argument,
                             tn_stream stream) {
    tn__cuda_call call;
    TN__CUDA_NEED(device, host_task, "cuLaunchHostFunc");
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code = device->cu->host_task(stream, task, argument);
    return tn__cuda_end(&call, code, "cuLaunchHostFunc(stream %p)", stream);
}

tn_status tn__cuda_stream_wait_value(tn__driver_device *device, tn_stream stream,
                                     const uint32_t *word, uint32_t value) {
    tn__cuda_call call;
    TN__CUDA_NEED(device, stream_wait_value, "cuStreamWaitValue32_v2");
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM_WAIT, &call));
    int code = device->cu->stream_wait_value(stream, (tn__cu_address)(uintptr_t)word, value,
                                             TN__CU_STREAM_WAIT_VALUE_GEQ);
    return tn__cuda_end(&call, code, "cuStreamWaitValue32(%p, word %p, %u)", stream,
                        (const void *)word, value);
}

/* ---- the simulated device ------------------------------------------------------------------ */

_Static_assert(sizeof(tn__range) == sizeof(tnsim_range), "one layout");
_Static_assert(offsetof(tn__range, address) == offsetof(tnsim_range, address), "one layout");
_Static_assert(offsetof(tn__range, bytes) == offsetof(tnsim_range, bytes), "one layout");
_Static_assert(offsetof(tn__range, is_write) == offsetof(tnsim_range, is_write), "one layout");

static tn_status require_simulated(const tn__driver_device *device, const char *what) {
    if (device->library->is_simulated) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "%s: %s is no simulated driver", what, device->library->path);
}

tn_status tn__cuda_ghost_launch(tn__driver_device *device, const char *kernel,
                                const tn__range *ranges, size_t range_count, double duration_us,
                                tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(require_simulated(device, "ghost_launch"));
    TN_TRY(tn__cuda_begin(device, TN_CALL_LAUNCH, &call));
    int code = device->library->sim.launch(stream, kernel, (const tnsim_range *)ranges, range_count,
                                           duration_us);
    return tn__cuda_end(&call, code, "tnsim_launch(%s, stream %p)", kernel, stream);
}

tn_status tn__cuda_note_take(tn__driver_device *device, const void *address, size_t bytes,
                             tn_stream stream) {
    tn__cuda_call call;
    TN_TRY(require_simulated(device, "note_take"));
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->library->sim.take(stream, address, bytes);
    return tn__cuda_end(&call, code, "tnsim_take(%p, %zu bytes, stream %p)", address, bytes,
                        stream);
}

tn_status tn__cuda_write_stamp(tn__driver_device *device, const void *address, size_t bytes,
                               uint64_t *out) {
    tn__cuda_call call;
    TN_TRY(require_simulated(device, "write_stamp"));
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->library->sim.write_stamp(address, bytes, out);
    return tn__cuda_end(&call, code, "tnsim_write_stamp(%p, %zu bytes)", address, bytes);
}
