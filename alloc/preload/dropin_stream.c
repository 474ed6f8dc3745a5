/* Stream-ordered memory, captures, and streams that end: see dropin.h.
 *
 * cuMemAllocAsync is taken over for the device's default memory pool alone, on streams that do not
 * capture: in a capture it would make a node of the graph. A stream is adopted when it is first
 * named, so that calls on it are cheap, and forgotten when the program destroys it: at once, or
 * when its work is over.
 *
 * Captures are counted, because a fence would spoil one that is under way: cuCtxRecordEvent is
 * illegal then, and none may begin during the call.
 */
#include <string.h>

#include "dropin.h"
#include "host_alloc.h"

/* ---- captures -------------------------------------------------------------------------------- */

#define CAPTURES_MAX 256

/* Streams that capture. Beyond the table's end they are only counted, for good. The mutex may be
 * held while the driver waits for a device: whoever only asks reads the count without it, since the
 * device may be waiting for that thread. */
static pthread_mutex_t captures_mutex = PTHREAD_MUTEX_INITIALIZER;
static void *capturing[CAPTURES_MAX];
static _Atomic size_t capture_count;

int tn__dropin_captures_lock(void) {
    pthread_mutex_lock(&captures_mutex);
    return capture_count == 0;
}

void tn__dropin_captures_unlock(void) { pthread_mutex_unlock(&captures_mutex); }

static void note_begin_locked(void *stream) {
    if (capture_count < CAPTURES_MAX) capturing[capture_count] = stream;
    capture_count++;
}

static void note_end_locked(const void *stream) {
    size_t known = capture_count < CAPTURES_MAX ? capture_count : CAPTURES_MAX;
    for (size_t i = 0; i < known; i++) {
        if (capturing[i] != stream) continue;
        capturing[i] = capturing[known - 1];
        capture_count--;
        return;
    }
}

int tn__dropin_is_capturing(void *stream) {
    static tn__cu_result (*_Atomic is_capturing)(void *, int *);
    int status = TN__CU_STREAM_CAPTURE_STATUS_NONE;
    if (tn__dropin.is_over || capture_count == 0) return 0;
    if (!is_capturing) {
        is_capturing =
            (tn__cu_result(*)(void *, int *))tn__dropin.driver->find("cuStreamIsCapturing");
    }
    if (!is_capturing || is_capturing(stream, &status) != TN__CU_SUCCESS) return 1;
    return status != TN__CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The two of a pair differ in what they do with a NULL stream, and each has its own real one. */
#define BEGIN_CAPTURE(call, stream, is_per_thread)                                                 \
    do {                                                                                           \
        tn__cu_result result_;                                                                     \
        if (tn__dropin.is_over) return (call);                                                     \
        pthread_mutex_lock(&captures_mutex);                                                       \
        result_ = (call);                                                                          \
        if (result_ == TN__CU_SUCCESS) {                                                           \
            note_begin_locked(tn__dropin_stream_of((stream), (is_per_thread)));                    \
        }                                                                                          \
        pthread_mutex_unlock(&captures_mutex);                                                     \
        return result_;                                                                            \
    } while (0)

static tn__cu_result hook_begin(void *stream, int mode) {
    BEGIN_CAPTURE(TN__REAL(cuStreamBeginCapture_v2)(stream, mode), stream, 0);
}

static tn__cu_result hook_begin_ptsz(void *stream, int mode) {
    BEGIN_CAPTURE(TN__REAL(cuStreamBeginCapture_v2_ptsz)(stream, mode), stream, 1);
}

static tn__cu_result hook_begin_to_graph(void *stream, void *graph, const void *nodes,
                                         const void *edges, size_t count, int mode) {
    BEGIN_CAPTURE(TN__REAL(cuStreamBeginCaptureToGraph)(stream, graph, nodes, edges, count, mode),
                  stream, 0);
}

static tn__cu_result hook_begin_to_graph_ptsz(void *stream, void *graph, const void *nodes,
                                              const void *edges, size_t count, int mode) {
    BEGIN_CAPTURE(
        TN__REAL(cuStreamBeginCaptureToGraph_ptsz)(stream, graph, nodes, edges, count, mode),
        stream, 1);
}

/* These failures leave the capture as it is; any other end of it is one. */
static tn__cu_result note_end(tn__cu_result result, const void *stream) {
    enum { ILLEGAL_STATE = 401, UNMATCHED = 903, WRONG_THREAD = 908 };
    if (tn__dropin.is_over) return result;
    if (result == TN__CU_ERROR_INVALID_VALUE || result == TN__CU_ERROR_INVALID_HANDLE) {
        return result;
    }
    if (result == ILLEGAL_STATE || result == UNMATCHED || result == WRONG_THREAD) return result;
    pthread_mutex_lock(&captures_mutex);
    note_end_locked(stream);
    pthread_mutex_unlock(&captures_mutex);
    return result;
}

static tn__cu_result hook_end(void *stream, void **graph) {
    return note_end(TN__REAL(cuStreamEndCapture)(stream, graph), stream);
}

static tn__cu_result hook_end_ptsz(void *stream, void **graph) {
    return note_end(TN__REAL(cuStreamEndCapture_ptsz)(stream, graph),
                    tn__dropin_stream_of(stream, 1));
}

/* ---- streams --------------------------------------------------------------------------------- */

typedef struct adopted_stream {
    struct adopted_stream *next;
    void *stream;
    tn__dropin_device *device;
} adopted_stream;

enum { ADOPTED_BUCKETS = 256 };
static pthread_mutex_t adopted_mutex = PTHREAD_MUTEX_INITIALIZER;
static adopted_stream *adopted[ADOPTED_BUCKETS];

static adopted_stream **adopted_at(const void *stream) {
    adopted_stream **at = &adopted[((uintptr_t)stream >> 4) % ADOPTED_BUCKETS];
    while (*at && (*at)->stream != stream)
        at = &(*at)->next;
    return at;
}

static int is_default(const void *stream) {
    return !stream || stream == TN__CU_STREAM_LEGACY || stream == TN__CU_STREAM_PER_THREAD;
}

static tn_status adopt_locked(tn__dropin_device *device, void *stream) {
    adopted_stream **at = adopted_at(stream);
    adopted_stream *new_one;
    tn_status status;
    if (*at) return (*at)->device == device ? TN_OK : TN_INVALID_ARGUMENT;
    new_one = tn__host_alloc(1, sizeof *new_one);
    if (!new_one) return TN_OUT_OF_HOST_MEMORY;
    status = tn_stream_adopt(device->device, stream);
    if (status == TN_OK) {
        *new_one = (adopted_stream){*at, stream, device};
        *at = new_one;
    } else {
        tn__host_free(new_one);
    }
    return status;
}

static tn_status adopt(tn__dropin_device *device, void *stream) {
    tn_status status;
    if (is_default(stream)) return TN_OK;
    pthread_mutex_lock(&adopted_mutex);
    status = adopt_locked(device, stream);
    pthread_mutex_unlock(&adopted_mutex);
    return status;
}

/* Streams that the program has destroyed while they had work: their handles stay taken until that
 * is over. To forget a stream the pools wait for it, and cuStreamDestroy waits for nothing. */
static adopted_stream *doomed;

static int is_idle(void *stream) {
    static tn__cu_result (*_Atomic query)(void *);
    if (!query) query = (tn__cu_result(*)(void *))tn__dropin.driver->find("cuStreamQuery");
    return query && query(stream) != TN__CU_ERROR_NOT_READY;
}

/* It has no work. */
static tn__cu_result end_stream(adopted_stream *one) {
    void *stream = one->stream;
    (void)tn_stream_forget(one->device->device, stream);
    tn__host_free(one);
    return TN__REAL(cuStreamDestroy_v2)(stream);
}

static adopted_stream *take_idle_doomed(void) {
    adopted_stream *found = NULL;
    pthread_mutex_lock(&adopted_mutex);
    for (adopted_stream **at = &doomed; *at && !found;) {
        if (is_idle((*at)->stream)) {
            found = *at;
            *at = found->next;
        } else {
            at = &(*at)->next;
        }
    }
    pthread_mutex_unlock(&adopted_mutex);
    return found;
}

/* A question about a stream may be illegal while another captures. */
static void end_idle_streams(void) {
    adopted_stream *one;
    while (capture_count == 0 && (one = take_idle_doomed()) != NULL)
        (void)end_stream(one);
}

static tn__cu_result hook_stream_destroy(void *stream) {
    adopted_stream *one = NULL;
    if (tn__dropin.is_over) return TN__REAL(cuStreamDestroy_v2)(stream);
    if (capture_count > 0) note_end(TN__CU_SUCCESS, stream);
    end_idle_streams();
    pthread_mutex_lock(&adopted_mutex);
    if (!is_default(stream)) {
        adopted_stream **at = adopted_at(stream);
        one = *at;
        if (one) *at = one->next;
    }
    if (one && !(capture_count == 0 && is_idle(stream))) {
        one->next = doomed;
        doomed = one;
        pthread_mutex_unlock(&adopted_mutex);
        return TN__CU_SUCCESS;
    }
    pthread_mutex_unlock(&adopted_mutex);
    return one ? end_stream(one) : TN__REAL(cuStreamDestroy_v2)(stream);
}

/* Of a list, those of the device. The streams themselves end with their context. */
static void forget_all(adopted_stream **at, const tn__dropin_device *device) {
    while (*at) {
        adopted_stream *one = *at;
        if (one->device != device) {
            at = &one->next;
            continue;
        }
        (void)tn_stream_forget(device->device, one->stream);
        *at = one->next;
        tn__host_free(one);
    }
}

void tn__dropin_streams_close(const tn__dropin_device *device) {
    pthread_mutex_lock(&adopted_mutex);
    for (int i = 0; i < ADOPTED_BUCKETS; i++)
        forget_all(&adopted[i], device);
    forget_all(&doomed, device);
    pthread_mutex_unlock(&adopted_mutex);
}

/* ---- stream-ordered memory ------------------------------------------------------------------- */

/* The device, if the allocation is one for its stream pool. */
static tn__dropin_device *device_for(const void *out, size_t bytes, void *stream) {
    tn__dropin_device *device = out && bytes ? tn__dropin_device_current() : NULL;
    if (!device || tn__dropin.has_shared_mempool[device->ordinal]) return NULL;
    if (tn__dropin_is_capturing(stream)) return NULL;
    if (adopt(device, stream) != TN_OK) return NULL;
    return tn__dropin_stream_pool(device) ? device : NULL;
}

static tn_status take_in_order(tn__dropin_device *device, size_t bytes, void *stream, void **out) {
    tn_status status = tn_alloc(device->stream_pool, bytes, stream, NULL, out);
    if (status != TN_OUT_OF_DEVICE_MEMORY) return status;
    if (!tn__dropin_give_back()) return status;
    return tn_alloc(device->stream_pool, bytes, stream, NULL, out);
}

/* NOT_SUPPORTED: it is the driver's to serve. */
static tn__cu_result alloc_in_order(tn__cu_address *out, size_t bytes, void *stream) {
    tn__dropin_device *device = device_for(out, bytes, stream);
    tn__dropin_block *block =
        device ? tn__dropin_new_block(TN__DROPIN_STREAM, device, bytes) : NULL;
    void *address = NULL;
    tn_status status;
    if (!block) return TN__CU_ERROR_NOT_SUPPORTED;
    status = take_in_order(device, bytes, stream, &address);
    if (status != TN_OK) {
        tn__host_free(block);
        if (status != TN_OUT_OF_DEVICE_MEMORY) return TN__CU_ERROR_NOT_SUPPORTED;
        tn__dropin_record_refusal(bytes);
        return TN__CU_ERROR_OUT_OF_MEMORY;
    }
    block->address = (uintptr_t)address;
    tn__dropin_count(&tn__dropin.counts.allocations);
    tn__dropin_count(&tn__dropin.counts.stream_allocations);
    tn__dropin_record_alloc(block, stream);
    tn__dropin_hand_out(block);
    *out = block->address;
    return TN__CU_SUCCESS;
}

/* The driver's own call, once more if it is short and the pools have something. */
#define PASS_ALLOC(call, out, bytes, stream)                                                       \
    do {                                                                                           \
        tn__cu_result result_ = (call);                                                            \
        if (result_ == TN__CU_ERROR_OUT_OF_MEMORY && tn__dropin_give_back()) result_ = (call);     \
        if (result_ == TN__CU_SUCCESS && (out)) tn__dropin_note(*(out), (bytes), (stream));        \
        return result_;                                                                            \
    } while (0)

/* From the current pool of the device, if that is its default one. */
static tn__cu_result alloc_from_current(tn__cu_address *out, size_t bytes, void *stream) {
    const tn__dropin_device *device = tn__dropin_device_current();
    if (!device || tn__dropin.has_own_mempool[device->ordinal]) return TN__CU_ERROR_NOT_SUPPORTED;
    return alloc_in_order(out, bytes, stream);
}

static tn__cu_result hook_alloc_async(tn__cu_address *out, size_t bytes, void *stream) {
    tn__cu_result result = alloc_from_current(out, bytes, stream);
    if (result != TN__CU_ERROR_NOT_SUPPORTED) return result;
    PASS_ALLOC(TN__REAL(cuMemAllocAsync)(out, bytes, stream), out, bytes, stream);
}

static tn__cu_result hook_alloc_async_ptsz(tn__cu_address *out, size_t bytes, void *stream) {
    void *named = tn__dropin_stream_of(stream, 1);
    tn__cu_result result = alloc_from_current(out, bytes, named);
    if (result != TN__CU_ERROR_NOT_SUPPORTED) return result;
    PASS_ALLOC(TN__REAL(cuMemAllocAsync_ptsz)(out, bytes, stream), out, bytes, named);
}

/* The pool that cuMemAllocAsync uses unless the program sets another. */
static int is_default_pool(const void *pool, tn__cu_device ordinal) {
    static tn__cu_result (*_Atomic get)(void **, tn__cu_device);
    void *own = NULL;
    if (!get) {
        get = (tn__cu_result(*)(void **, tn__cu_device))tn__dropin.driver->find(
            "cuDeviceGetDefaultMemPool");
    }
    return get && get(&own, ordinal) == TN__CU_SUCCESS && own == pool;
}

static int is_current_default(const void *pool) {
    const tn__dropin_device *device = tn__dropin_device_current();
    return device && is_default_pool(pool, device->ordinal);
}

static tn__cu_result hook_from_pool(tn__cu_address *out, size_t bytes, void *pool, void *stream) {
    tn__cu_result result = TN__CU_ERROR_NOT_SUPPORTED;
    if (is_current_default(pool)) result = alloc_in_order(out, bytes, stream);
    if (result != TN__CU_ERROR_NOT_SUPPORTED) return result;
    PASS_ALLOC(TN__REAL(cuMemAllocFromPoolAsync)(out, bytes, pool, stream), out, bytes, stream);
}

static tn__cu_result hook_from_pool_ptsz(tn__cu_address *out, size_t bytes, void *pool,
                                         void *stream) {
    void *named = tn__dropin_stream_of(stream, 1);
    tn__cu_result result = TN__CU_ERROR_NOT_SUPPORTED;
    if (is_current_default(pool)) result = alloc_in_order(out, bytes, named);
    if (result != TN__CU_ERROR_NOT_SUPPORTED) return result;
    PASS_ALLOC(TN__REAL(cuMemAllocFromPoolAsync_ptsz)(out, bytes, pool, stream), out, bytes, named);
}

static tn__cu_result hook_set_pool(tn__cu_device ordinal, void *pool) {
    tn__cu_result result = TN__REAL(cuDeviceSetMemPool)(ordinal, pool);
    if (result == TN__CU_SUCCESS && ordinal >= 0 && ordinal < TN__DROPIN_DEVICES_MAX) {
        tn__dropin.has_own_mempool[ordinal] = !is_default_pool(pool, ordinal);
    }
    return result;
}

/* Who may reach memory of a default pool is a property of that pool: so it serves from then on. */
static tn__cu_result hook_set_access(void *pool, const void *accesses, size_t count) {
    tn__cu_result result = TN__REAL(cuMemPoolSetAccess)(pool, accesses, count);
    for (int i = 0; result == TN__CU_SUCCESS && i < tn__dropin_device_count(); i++) {
        if (is_default_pool(pool, i)) tn__dropin.has_shared_mempool[i] = 1;
    }
    return result;
}

/* ---- frees ----------------------------------------------------------------------------------- */

/* A block of cuMemAlloc may still be in use by any stream: it takes the way of cuMemFree. */
static tn__cu_result free_in_order(tn__dropin_block *block, void *stream) {
    if (!tn__dropin.is_over && block->kind == TN__DROPIN_STREAM &&
        adopt(block->device, stream) == TN_OK && tn_free((void *)block->address, stream) == TN_OK) {
        tn__dropin_count(&tn__dropin.counts.frees);
        tn__dropin_forget(block);
        return TN__CU_SUCCESS;
    }
    tn__dropin_free(block);
    return TN__CU_SUCCESS;
}

/* 1: the call is answered with *result. 0: the driver is to free it, which may have been recorded.
 * What is ours is never the driver's. In a capture a free is a node of the graph, and a pool's
 * memory can not be that. */
static int take_over_free(tn__cu_address address, void *stream, tn__dropin_block **recorded,
                          tn__cu_result *result) {
    *recorded = NULL;
    *result = TN__CU_ERROR_INVALID_VALUE;
    if (tn__dropin_is_capturing(stream)) return tn__dropin_owns(address);
    *recorded = tn__dropin_blocks_take((uintptr_t)address);
    if (!*recorded) return tn__dropin_owns(address);
    if ((*recorded)->kind == TN__DROPIN_DRIVER) return 0;
    *result = free_in_order(*recorded, stream);
    return 1;
}

static tn__cu_result end_free(tn__cu_result result, tn__dropin_block *recorded) {
    if (!recorded) return result;
    if (result == TN__CU_SUCCESS) {
        tn__dropin_forget(recorded);
    } else {
        tn__dropin_hand_out(recorded);
    }
    return result;
}

static tn__cu_result hook_free_async(tn__cu_address address, void *stream) {
    tn__dropin_block *recorded;
    tn__cu_result result;
    if (take_over_free(address, stream, &recorded, &result)) return result;
    return end_free(TN__REAL(cuMemFreeAsync)(address, stream), recorded);
}

static tn__cu_result hook_free_async_ptsz(tn__cu_address address, void *stream) {
    tn__dropin_block *recorded;
    tn__cu_result result;
    void *named = tn__dropin_stream_of(stream, 1);
    if (take_over_free(address, named, &recorded, &result)) return result;
    return end_free(TN__REAL(cuMemFreeAsync_ptsz)(address, stream), recorded);
}

void tn__dropin_stream_hooks(tn__dropin_calls *hooks) {
    hooks->cuMemAllocAsync = hook_alloc_async;
    hooks->cuMemAllocAsync_ptsz = hook_alloc_async_ptsz;
    hooks->cuMemFreeAsync = hook_free_async;
    hooks->cuMemFreeAsync_ptsz = hook_free_async_ptsz;
    hooks->cuMemAllocFromPoolAsync = hook_from_pool;
    hooks->cuMemAllocFromPoolAsync_ptsz = hook_from_pool_ptsz;
    hooks->cuDeviceSetMemPool = hook_set_pool;
    hooks->cuMemPoolSetAccess = hook_set_access;
    hooks->cuStreamDestroy_v2 = hook_stream_destroy;
    hooks->cuStreamBeginCapture_v2 = hook_begin;
    hooks->cuStreamBeginCapture_v2_ptsz = hook_begin_ptsz;
    hooks->cuStreamBeginCaptureToGraph = hook_begin_to_graph;
    hooks->cuStreamBeginCaptureToGraph_ptsz = hook_begin_to_graph_ptsz;
    hooks->cuStreamEndCapture = hook_end;
    hooks->cuStreamEndCapture_ptsz = hook_end_ptsz;
}
