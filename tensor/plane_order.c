/* Which stream waits for which before a plane is used, and what the pool is told of uses.
 *
 * Invariants: `reads` holds each stream once and only reads after the last write. A stream in it
 * has itself waited for that write, so it need not wait again. Uses are noted when their lease
 * begins: until it ends, no access that would have to wait for it is let in. Only at the border of
 * a capture does a use not wait for those before it (has_skips): then all of them are kept, and the
 * next write waits for each.
 */
#include "plane_order.h"

#include "adopt.h"
#include "driver.h"
#include "canary.h"
#include "host_alloc.h"
#include "no_wait.h"

#include <stdatomic.h>
#include <string.h>

void tn__plane_order_init(tn__plane_object *plane) {
    plane->reads = plane->own_reads;
    plane->read_limit = TN__READS_KEPT;
}

void tn__plane_order_deinit(tn__plane_object *plane) {
    if (plane->reads != plane->own_reads) tn__host_free(plane->reads);
    plane->reads = NULL;
}

/* A list that is inside the plane moves with it. */
static void adopt_reads(tn__plane_object *plane, const tn__plane_object *from) {
    if (plane->reads == from->own_reads) plane->reads = plane->own_reads;
}

void tn__plane_order_swap(tn__plane_object *a, tn__plane_object *b) {
    tn__plane_object old_a = *a, old_b = *b;
    *a = old_b;
    *b = old_a;
    adopt_reads(a, b);
    adopt_reads(b, a);
    a->first_lease = old_a.first_lease;
    b->first_lease = old_b.first_lease;
    a->replaced = old_a.replaced;
    b->replaced = old_b.replaced;
}

static int may_go(uint64_t stream_id) { return (stream_id & TN__STREAM_ID_MAY_GO) != 0; }

static int is_in_capture(uint64_t stream_id) { return (stream_id & TN__STREAM_ID_IN_CAPTURE) != 0; }

static tn__plane_use *read_of(const tn__plane_object *plane, uint64_t stream_id) {
    for (size_t i = 0; i < plane->read_count; i++) {
        if (plane->reads[i].stream_id == stream_id) return &plane->reads[i];
    }
    return NULL;
}

/* ---- telling the pool ---------------------------------------------------------------------- */

tn_status tn__plane_order_tell_pool(const tn__plane_object *plane, tn_stream stream) {
    for (int part = 0; part < TN__PART_COUNT; part++) {
        void *block = tn__plane_pool_block(plane, (tn__part)part);
        if (block) TN_TRY(tn_record_use(block, stream));
    }
    return TN_OK;
}

static tn__use_mark *mark_of(tn__plane_object *plane, uint64_t stream_id) {
    for (int i = 0; i < TN__MARKS_KEPT; i++) {
        if (plane->marks[i].stream_id == stream_id) return &plane->marks[i];
    }
    tn__use_mark *oldest = &plane->marks[plane->next_mark];
    plane->next_mark = (plane->next_mark + 1) % TN__MARKS_KEPT;
    *oldest = (tn__use_mark){stream_id, 0};
    return oldest;
}

static int is_pool_memory(const tn__plane_object *plane) {
    return plane->kind == TN__MEMORY_OWNED || plane->kind == TN__MEMORY_SLOT;
}

/* Tells the pool, and puts the fence behind the use. */
static tn_status fence(const tn__books *books, const tn__plane_object *plane, tn_stream stream,
                       uint64_t stream_id, tn__fence *out) {
    void *blocks[TN__PART_COUNT];
    for (int part = 0; part < TN__PART_COUNT; part++)
        blocks[part] = tn__plane_pool_block(plane, (tn__part)part);
    return tn__pool_fence(books->pool, blocks, TN__PART_COUNT, stream, stream_id, out);
}

static void set_fence(tn__plane_use *use, const tn__fence *behind) {
    use->fence = *behind;
    use->is_recorded = 1;
}

/* Of an id that says more than which stream it is. */
static TN__SLOW tn_status record_marked(tn__plane_object *plane, tn_stream stream,
                                        uint64_t stream_id, const tn__tensor_object *tensor) {
    tn__plane_use *read = read_of(plane, stream_id);
    tn__fence behind = {0, 0, 0};
    if (is_in_capture(stream_id)) {
        return is_pool_memory(plane) ? tn__plane_order_tell_pool(plane, stream) : TN_OK;
    }
    TN_TRY(fence(tensor->scope->books, plane, stream, stream_id, &behind));
    if (read) set_fence(read, &behind);
    if (plane->write.stream_id == stream_id) set_fence(&plane->write, &behind);
    return TN_OK;
}

/* The stamp is read after the work was put on the stream and before it is recorded: should it
 * change in between, the next use is recorded once too often, and never once too few. */
tn_status tn__plane_order_record_elsewhere(tn__plane_object *plane, tn_stream stream,
                                           uint64_t stream_id, const tn__tensor_object *tensor) {
    if (TN__CANARY(TN__CANARY_PLANE_USE)) return TN_OK;
    if (stream_id >= TN__STREAM_ID_MAY_GO) return record_marked(plane, stream, stream_id, tensor);
    if (!is_pool_memory(plane)) return TN_OK;
    uint64_t stamp = atomic_load_explicit(plane->use_stamp, memory_order_acquire);
    tn__use_mark *mark = mark_of(plane, stream_id);
    TN_TRY(tn__plane_order_tell_pool(plane, stream));
    mark->stamp = stamp;
    return TN_OK;
}

void tn__plane_order_mark_unrecorded(tn__plane_object *plane, uint64_t stream_id) {
    tn__plane_use *read = read_of(plane, stream_id);
    if (read) read->is_recorded = 0;
    if (plane->has_write && plane->write.stream_id == stream_id) plane->write.is_recorded = 0;
}

/* A stream that may go is not asked for what it was not asked for in time. */
static tn_status record_rest_of(const tn__books *books, tn__plane_object *plane, tn__plane_use *use,
                                uint64_t free_stream_id) {
    if (use->is_recorded) return TN_OK;
    if (may_go(use->stream_id)) return tn__plane_order_await_device(books->device);
    if (use->stream_id == free_stream_id || use->stream_id == plane->home_stream_id) return TN_OK;
    if (is_pool_memory(plane)) TN_TRY(tn__plane_order_tell_pool(plane, use->stream));
    use->is_recorded = 1;
    return TN_OK;
}

tn_status tn__plane_order_record_rest(const tn__books *books, tn__plane_object *plane,
                                      uint64_t free_stream_id) {
    if (plane->has_write) TN_TRY(record_rest_of(books, plane, &plane->write, free_stream_id));
    for (size_t i = 0; i < plane->read_count; i++)
        TN_TRY(record_rest_of(books, plane, &plane->reads[i], free_stream_id));
    return TN_OK;
}

/* The allocation counts as a use: what the memory was used for before is waited for on the stream,
 * and by nobody else. */
tn_status tn__plane_order_set_home(const tn__books *books, tn__plane_object *plane,
                                   const tn_pool *pool, tn_stream stream, uint64_t stream_id) {
    int is_fenced = may_go(stream_id) && !is_in_capture(stream_id);
    plane->home_stream_id = may_go(stream_id) || !pool ? TN__NO_STREAM_ID : stream_id;
    plane->use_stamp = pool ? tn__pool_use_stamp(pool) : NULL;
    memset(plane->marks, 0, sizeof plane->marks);
    plane->write.stream_id = TN__NO_STREAM_ID;
    if (is_in_capture(stream_id)) {
        return tn__plane_order_capture(books->device, stream, &plane->next_capture);
    }
    return is_fenced ? fence(books, plane, stream, stream_id, &plane->write.fence) : TN_OK;
}

tn__plane_use tn__plane_order_last(const tn__plane_object *plane) {
    if (may_go(plane->last_stream_id)) return tn__plane_use_on(TN__NO_STREAM, TN__NO_STREAM_ID);
    return tn__plane_use_on(plane->last_stream, plane->last_stream_id);
}

/* ---- waiting ------------------------------------------------------------------------------- */

tn_status tn__plane_order_capture(tn_device *device, tn_stream stream, uint64_t *out) {
    const tn__driver *driver = tn__device_driver(device);
    tn__capture_status status = TN__CAPTURE_NONE;
    uint64_t id = 0;
    int is_capturing = 0;
    if (driver->stream_capture) {
        TN_TRY(driver->stream_is_capturing(tn__device_state(device), stream, &is_capturing));
    }
    if (is_capturing) {
        TN_TRY(driver->stream_capture(tn__device_state(device), stream, &status, &id));
    }
    *out = status == TN__CAPTURE_NONE ? 0 : id;
    return TN_OK;
}

/* The id that is kept of a stream of ours is the same in a capture, so the stream is asked. */
tn_status tn__plane_order_refuse_capture(const tn__tensor_object *tensor, tn_plane plane,
                                         tn_stream stream) {
    uint64_t capture = 0;
    TN_TRY(tn__plane_order_capture(tensor->scope->books->device, stream, &capture));
    if (!capture) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "tensor %s, plane %s can not move between device and host while the stream "
                   "captures: move it before",
                   tensor->name, tn_plane_name(plane));
}

/* A stream that is about to wait. */
typedef struct waiter {
    const tn__books *books;
    tn_stream stream;
    uint64_t stream_id;
    int is_asked;
    uint64_t capture; /* that it is in, once it is asked */
    int is_skipped;   /* a use was not waited for */
} waiter;

static tn_status ask_capture(waiter *w) {
    if (w->is_asked) return TN_OK;
    TN_TRY(tn__plane_order_capture(w->books->device, w->stream, &w->capture));
    w->is_asked = 1;
    return TN_OK;
}

/* The capture that a use is in. Ours most often keep their id in a capture, so that the stream is
 * asked: for where it is now. */
static tn_status capture_of(const waiter *w, const tn__plane_use *use, uint64_t *out) {
    *out = is_in_capture(use->stream_id) ? use->capture : 0;
    if (use->stream_id >= TN__STREAM_ID_MAY_GO) return TN_OK; /* what it was in, or none */
    return tn__plane_order_capture(w->books->device, use->stream, out);
}

/* What is in a capture runs when its graph is launched, if ever, and is ordered with what is
 * outside of it by whoever launches it: neither can be made to wait for the other. */
static tn_status is_across_captures(waiter *w, const tn__plane_use *use, int *out) {
    uint64_t there = 0;
    TN_TRY(ask_capture(w));
    TN_TRY(capture_of(w, use, &there));
    *out = w->capture != there;
    return TN_OK;
}

tn_status tn__plane_order_await_device(tn_device *device) {
    TN_TRY(tn__device_wait_begin(device));
    tn_status status = tn_device_synchronize(device);
    tn__driver_wait_end();
    return status;
}

/* A use on a stream that can not be named here, and that has no fence. */
static tn_status wait_for_device(waiter *w) {
    TN_TRY(ask_capture(w));
    if (!w->capture) return tn__plane_order_await_device(w->books->device);
    w->is_skipped = 1;
    return TN_OK;
}

/* A stream of ours, or in a capture. Where none was a moment ago, another thread may have begun one
 * on the other stream since: what that did before runs all the same, as if it had been so then. */
static tn_status wait_for_stream(waiter *w, tn_stream other) {
    if (w->capture) return tn_stream_wait(w->books->device, w->stream, other);
    tn__error_scope_begin();
    tn_status status = tn__stream_wait_outside(w->books->device, w->stream, other);
    if (status == TN_INVALID_STATE) {
        w->is_skipped = 1;
        status = TN_OK;
    }
    return tn__error_scope_end(status);
}

static tn_status wait_for(waiter *w, const tn__plane_use *use) {
    int is_across = 0;
    if (use->stream_id == w->stream_id) return TN_OK;
    if (TN__CANARY(TN__CANARY_PLANE_WAIT)) return TN_OK;
    TN_TRY(is_across_captures(w, use, &is_across));
    if (is_across) {
        w->is_skipped = 1;
        return TN_OK;
    }
    if (!may_go(use->stream_id) || is_in_capture(use->stream_id)) {
        if (use->stream == w->stream) return wait_for_device(w);
        return wait_for_stream(w, use->stream);
    }
    if (!use->is_recorded || !use->fence.epoch) return wait_for_device(w);
    return tn__pool_fence_wait(w->books->pool, w->stream, &use->fence);
}

static void remove_read(tn__plane_object *plane, tn__plane_use *at) {
    size_t index = (size_t)(at - plane->reads);
    TN_ASSERT(index < plane->read_count);
    plane->read_count--;
    memmove(at, at + 1, (plane->read_count - index) * sizeof *at);
}

static int is_leased_on(const tn__plane_object *plane, uint64_t stream_id) {
    for (const tn__lease_object *lease = plane->first_lease; lease; lease = lease->next) {
        if (lease->stream_id == stream_id) return 1;
    }
    return 0;
}

static tn__plane_use *oldest_idle_read(const tn__plane_object *plane) {
    for (size_t i = 0; i < plane->read_count; i++) {
        if (!is_leased_on(plane, plane->reads[i].stream_id)) return &plane->reads[i];
    }
    return NULL;
}

/* All the streams that the list holds are leased right now. */
static tn_status grow_reads(tn__plane_object *plane) {
    size_t limit = 2 * plane->read_limit;
    tn__plane_use *reads = tn__host_alloc(limit, sizeof *reads);
    if (!reads) return TN_OUT_OF_HOST_MEMORY;
    memcpy(reads, plane->reads, plane->read_count * sizeof *reads);
    tn__plane_order_deinit(plane);
    plane->reads = reads;
    plane->read_limit = limit;
    return TN_OK;
}

/* Bounds the list by merging an idle reader into the new one (whoever waits for a stream that has
 * waited for another one waits for both); grows it only if there is none. */
static tn_status make_room(const waiter *before, tn__plane_object *plane) {
    tn__plane_use *idle = plane->read_count < TN__READS_KEPT ? NULL : oldest_idle_read(plane);
    waiter w = *before;
    w.is_skipped = 0;
    if (idle) TN_TRY(wait_for(&w, idle));
    if (idle && !w.is_skipped) {
        TN_TRY(record_rest_of(w.books, plane, idle, TN__NO_STREAM_ID));
        remove_read(plane, idle);
    }
    return plane->read_count < plane->read_limit ? TN_OK : grow_reads(plane);
}

static TN__SLOW tn_status wait_before(const tn__books *books, tn__plane_object *plane, int is_read,
                                      tn_stream stream, uint64_t stream_id) {
    waiter w = {.books = books, .stream = stream, .stream_id = stream_id};
    if (plane->has_write && (is_read || plane->read_count == 0 || plane->has_skips)) {
        TN_TRY(wait_for(&w, &plane->write));
    }
    for (size_t i = 0; i < plane->read_count && !is_read; i++) /* each has waited for the write */
        TN_TRY(wait_for(&w, &plane->reads[i]));
    int needs_room = is_read ? !read_of(plane, stream_id) : w.is_skipped; /* see keep_write */
    if (needs_room) TN_TRY(make_room(&w, plane));
    if (is_in_capture(stream_id)) TN_TRY(ask_capture(&w));
    plane->next_capture = w.capture;
    plane->has_skips = w.is_skipped || (is_read && plane->has_skips);
    return TN_OK;
}

tn_status tn__plane_order_before(const tn__books *books, tn__plane_object *plane, tn_access access,
                                 tn_stream stream, uint64_t stream_id) {
    int is_read = access == TN_READ;
    if (plane->has_skips) return wait_before(books, plane, is_read, stream, stream_id);
    if (is_read && read_of(plane, stream_id)) return TN_OK;
    if (!is_read && plane->read_count == 0 && plane->write.stream_id == stream_id) return TN_OK;
    return wait_before(books, plane, is_read, stream, stream_id);
}

static tn_status check_after(waiter *w, const tn__plane_use *use) {
    int is_across = 0;
    if (use->stream_id == w->stream_id || is_in_capture(use->stream_id)) return TN_OK;
    TN_TRY(is_across_captures(w, use, &is_across));
    if (!is_across) return TN_OK;
    return TN_FAIL(
        TN_INVALID_STATE,
        "stream %p would have to wait for work on stream %p and can not, since a capture "
        "is between them: wait till no stream of either captures",
        (void *)w->stream, (void *)use->stream);
}

tn_status tn__plane_order_check_after(const tn__books *books, const tn__plane_object *plane,
                                      tn_stream stream, uint64_t stream_id) {
    waiter w = {.books = books, .stream = stream, .stream_id = stream_id};
    if (!plane->has_skips) return TN_OK;
    if (plane->has_write) TN_TRY(check_after(&w, &plane->write));
    for (size_t i = 0; i < plane->read_count; i++)
        TN_TRY(check_after(&w, &plane->reads[i]));
    return TN_OK;
}

/* ---- noting -------------------------------------------------------------------------------- */

/* A write that did not wait for all before it does not stand for them: they stay to be waited for,
 * the last write among the reads. */
static void keep_write(tn__plane_object *plane) {
    if (!plane->has_write || read_of(plane, plane->write.stream_id)) return;
    TN_CHECK(plane->read_count < plane->read_limit);
    plane->reads[plane->read_count++] = plane->write;
}

/* None of it has ended, so there is none to record. The fence is set at its end; or is there, if
 * new memory is what is noted. */
static inline void set_use(const tn__plane_object *plane, tn__plane_use *use, tn_stream stream,
                           uint64_t stream_id) {
    if (is_in_capture(stream_id)) use->capture = plane->next_capture;
    use->stream = stream;
    use->stream_id = stream_id;
    use->is_recorded = 1;
}

void tn__plane_order_note(tn__plane_object *plane, tn_access access, tn_stream stream,
                          uint64_t stream_id) {
    plane->last_stream = stream;
    plane->last_stream_id = stream_id;
    if (access != TN_READ) {
        if (plane->has_skips)
            keep_write(plane);
        else
            plane->read_count = 0; /* it comes after all that was noted before */
        set_use(plane, &plane->write, stream, stream_id);
        plane->has_write = 1;
    } else if (!read_of(plane, stream_id)) {
        TN_CHECK(plane->read_count < plane->read_limit);
        set_use(plane, &plane->reads[plane->read_count++], stream, stream_id);
    }
}

void tn__plane_order_forget(tn__plane_object *plane, uint64_t stream_id) {
    if (plane->replaced) tn__plane_order_forget(plane->replaced, stream_id);
    tn__plane_use *read = read_of(plane, stream_id);
    if (read) remove_read(plane, read);
    if (plane->has_write && plane->write.stream_id == stream_id) plane->has_write = 0;
    if (plane->last_stream_id == stream_id) {
        plane->last_stream = NULL; /* any stream will do, and this one always exists */
        plane->last_stream_id = 0;
    }
    if (plane->foreign) tn__foreign_forget(plane->foreign, stream_id);
}

void tn__plane_order_move(tn__plane_object *from, tn__plane_object *to) {
    int is_inside = from->reads == from->own_reads;
    tn__plane_order_deinit(to);
    memcpy(to->own_reads, from->own_reads, sizeof to->own_reads);
    to->reads = is_inside ? to->own_reads : from->reads;
    to->read_count = from->read_count;
    to->read_limit = from->read_limit;
    to->next_capture = from->next_capture;
    to->has_skips = from->has_skips;
    to->has_write = from->has_write;
    to->write = from->write;
    to->last_stream = from->last_stream;
    to->last_stream_id = from->last_stream_id;
    to->home_stream_id = from->home_stream_id;
    to->use_stamp = from->use_stamp;
    memcpy(to->marks, from->marks, sizeof to->marks);
    to->next_mark = from->next_mark;
    tn__plane_order_init(from);
    from->has_write = from->has_skips = 0;
    from->read_count = 0;
}
