/* The worker threads of the host driver's streams: see host_stream.h.
 *
 * Invariants, under the stream's lock:
 *   - ring[(head + i) % capacity] for i < count is the work not yet begun, oldest first;
 *   - submitted - completed is count, or count + 1 while the worker does a piece;
 *   - completed never falls, and is submitted once the worker has ended.
 * A worker waits for another stream with no lock held but that stream's. Waits can not form a
 * circle, because an event says only what had been put on its stream before.
 */
#include "host_stream.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "host_alloc.h"

enum { FIRST_CAPACITY = 64 };

struct tn__host_stream {
    pthread_mutex_t lock;
    pthread_cond_t arrived; /* work, or the end */
    pthread_cond_t advanced;
    tn__host_work *ring;
    size_t capacity;
    size_t head;
    size_t count;
    uint64_t submitted;
    uint64_t completed;
    int is_ending;
    atomic_int references;
    uint64_t id;
    pthread_t worker;
};

static void copy_rows(const tn__row_copy *copy) {
    char *dst = copy->dst;
    const char *src = copy->src;
    for (size_t i = 0; i < copy->rows; i++)
        memmove(dst + i * copy->dst_stride, src + i * copy->src_stride, copy->row_bytes);
}

static void do_work(const tn__host_work *work) {
    switch (work->kind) {
    case TN__HOST_COPY: memmove(work->dst, work->src, work->bytes); break;
    case TN__HOST_COPY_ROWS: copy_rows(&work->rows); break;
    case TN__HOST_FILL: memset(work->dst, work->byte, work->bytes); break;
    case TN__HOST_TASK: work->task(work->argument); break;
    case TN__HOST_WAIT:
        tn__host_stream_wait_for(work->other, work->position);
        tn__host_stream_drop(work->other);
        break;
    }
}

static tn__host_work take_oldest(tn__host_stream *stream) {
    tn__host_work work = stream->ring[stream->head];
    stream->head = (stream->head + 1) % stream->capacity;
    stream->count--;
    return work;
}

static void *run_worker(void *argument) {
    tn__host_stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->count && !stream->is_ending)
            pthread_cond_wait(&stream->arrived, &stream->lock);
        if (!stream->count) break;
        tn__host_work work = take_oldest(stream);
        pthread_mutex_unlock(&stream->lock);
        do_work(&work);
        pthread_mutex_lock(&stream->lock);
        stream->completed++;
        pthread_cond_broadcast(&stream->advanced);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* The program's signals are for its own threads. */
static int start_worker(tn__host_stream *stream) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&stream->worker, NULL, run_worker, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!code) pthread_setname_np(stream->worker, "tenure-stream");
    return code;
}

static void free_stream(tn__host_stream *stream) {
    pthread_cond_destroy(&stream->advanced);
    pthread_cond_destroy(&stream->arrived);
    pthread_mutex_destroy(&stream->lock);
    tn__host_free(stream->ring);
    tn__host_free(stream);
}

tn_status tn__host_stream_create(uint64_t id, tn__host_stream **out) {
    tn__host_stream *stream = tn__host_alloc(1, sizeof *stream);
    if (!stream) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->arrived, NULL);
    pthread_cond_init(&stream->advanced, NULL);
    atomic_init(&stream->references, 1);
    stream->id = id;
    stream->capacity = FIRST_CAPACITY;
    stream->ring = tn__host_alloc(FIRST_CAPACITY, sizeof *stream->ring);
    int code = stream->ring ? start_worker(stream) : 0;
    if (!stream->ring || code) {
        free_stream(stream);
        if (!code) return TN_OUT_OF_HOST_MEMORY;
        return TN_FAIL_NATIVE(TN_OUT_OF_HOST_MEMORY, code,
                              "no worker thread for a stream of the host driver: %s",
                              strerror(code));
    }
    *out = stream;
    return TN_OK;
}

void tn__host_stream_end(tn__host_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    TN_CHECK(!stream->is_ending);
    stream->is_ending = 1;
    pthread_cond_signal(&stream->arrived);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->worker, NULL);
    TN_ASSERT(stream->completed == stream->submitted);
    tn__host_stream_drop(stream);
}

void tn__host_stream_hold(tn__host_stream *stream) { atomic_fetch_add(&stream->references, 1); }

void tn__host_stream_drop(tn__host_stream *stream) {
    int before = atomic_fetch_sub(&stream->references, 1);
    TN_ASSERT(before > 0);
    if (before == 1) free_stream(stream);
}

uint64_t tn__host_stream_id(const tn__host_stream *stream) { return stream->id; }

static tn_status make_room(tn__host_stream *stream) {
    if (stream->count < stream->capacity) return TN_OK;
    tn__host_work *ring = tn__host_alloc(stream->capacity * 2, sizeof *ring);
    if (!ring) return TN_OUT_OF_HOST_MEMORY;
    size_t to_end = stream->capacity - stream->head;
    memcpy(ring, stream->ring + stream->head, to_end * sizeof *ring);
    memcpy(ring + to_end, stream->ring, stream->head * sizeof *ring);
    tn__host_free(stream->ring);
    stream->ring = ring;
    stream->head = 0;
    stream->capacity *= 2;
    return TN_OK;
}

tn_status tn__host_stream_push(tn__host_stream *stream, const tn__host_work *work) {
    pthread_mutex_lock(&stream->lock);
    tn_status status = stream->is_ending
                           ? TN_FAIL(TN_INVALID_ARGUMENT, "the stream is being destroyed")
                           : make_room(stream);
    if (status == TN_OK) {
        stream->ring[(stream->head + stream->count) % stream->capacity] = *work;
        stream->count++;
        stream->submitted++;
        pthread_cond_signal(&stream->arrived);
    }
    pthread_mutex_unlock(&stream->lock);
    return status;
}

uint64_t tn__host_stream_submitted(tn__host_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    uint64_t position = stream->submitted;
    pthread_mutex_unlock(&stream->lock);
    return position;
}

int tn__host_stream_has_reached(tn__host_stream *stream, uint64_t position) {
    pthread_mutex_lock(&stream->lock);
    int reached = stream->completed >= position;
    pthread_mutex_unlock(&stream->lock);
    return reached;
}

void tn__host_stream_wait_for(tn__host_stream *stream, uint64_t position) {
    pthread_mutex_lock(&stream->lock);
    while (stream->completed < position)
        pthread_cond_wait(&stream->advanced, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}
