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
#include "pool_owned.h"

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

void tn__plane_order_set_home(tn__plane_object *plane, const tn_pool *pool, uint64_t stream_id) {
    plane->home_stream_id = stream_id;
    plane->use_stamp = tn__pool_use_stamp(pool);
    memset(plane->marks, 0, sizeof plane->marks);
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

/* What is in a capture runs when its graph is launched, if ever, and is ordered with what is
 * outside of it by whoever launches it: neither can be made to wait for the other. */
static tn_status is_across_captures(tn_device *device, tn_stream stream, uint64_t stream_id,
                                    const tn__plane_use *use, int *out) {
    uint64_t here = 0, there = 0;
    *out = ((stream_id ^ use->stream_id) & TN__STREAM_ID_IN_CAPTURE) != 0;
    if (*out || use->stream == stream) return TN_OK;
    TN_TRY(tn__plane_order_capture(device, stream, &here));
    TN_TRY(tn__plane_order_capture(device, use->stream, &there));
    *out = here != there;
    return TN_OK;
}

/* A stream of another library may be gone, or its handle another stream's: of another thread's
 * per-thread default stream that is always so. */
static tn_status is_lost(tn_device *device, const tn__plane_use *use, int *out) {
    const tn__driver *driver = tn__device_driver(device);
    uint64_t id = use->stream_id;
    *out = 0;
    if (!use->stream || tn__device_owns_stream(device, use->stream)) return TN_OK;
    if (use->stream_id & TN__STREAM_ID_IN_CAPTURE) return TN_OK;
    tn_status status = driver->stream_id(tn__device_state(device), use->stream, &id);
    *out =
        status == TN_INVALID_ARGUMENT || (id != use->stream_id && !(id & TN__STREAM_ID_IN_CAPTURE));
    return *out ? TN_OK : status;
}

/* A use on a stream that can not be named here is waited for by waiting for the device. */
static tn_status wait_for(tn_device *device, tn_stream stream, uint64_t stream_id,
                          const tn__plane_use *use, int *is_skipped) {
    int is_across = 0, is_gone = 0;
    if (use->stream_id == stream_id) return TN_OK;
    if (TN__CANARY(TN__CANARY_PLANE_WAIT)) return TN_OK;
    TN_TRY(is_lost(device, use, &is_gone));
    if (is_gone) {
        uint64_t capture = 0;
        TN_TRY(tn__plane_order_capture(device, stream, &capture));
        *is_skipped |= capture != 0;
        return capture ? TN_OK : tn_device_synchronize(device);
    }
    TN_TRY(is_across_captures(device, stream, stream_id, use, &is_across));
    if (is_across) {
        *is_skipped = 1;
        return TN_OK;
    }
    if (use->stream == stream) return tn_device_synchronize(device);
    return tn_stream_wait(device, stream, use->stream);
}

static tn__plane_use *read_of(const tn__plane_object *plane, uint64_t stream_id) {
    for (size_t i = 0; i < plane->read_count; i++) {
        if (plane->reads[i].stream_id == stream_id) return &plane->reads[i];
    }
    return NULL;
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
static tn_status make_room(tn_device *device, tn__plane_object *plane, tn_stream stream,
                           uint64_t stream_id) {
    tn__plane_use *idle = plane->read_count < TN__READS_KEPT ? NULL : oldest_idle_read(plane);
    int is_skipped = 0;
    if (idle) TN_TRY(wait_for(device, stream, stream_id, idle, &is_skipped));
    if (idle && !is_skipped) {
        if (!idle->is_recorded) {
            TN_TRY(tn__plane_order_record(plane, idle->stream, idle->stream_id));
        }
        remove_read(plane, idle);
    }
    return plane->read_count < plane->read_limit ? TN_OK : grow_reads(plane);
}

static TN__SLOW tn_status wait_before(tn_device *device, tn__plane_object *plane, int is_read,
                                      tn_stream stream, uint64_t stream_id) {
    int is_skipped = 0;
    if (plane->has_write && (is_read || plane->read_count == 0 || plane->has_skips)) {
        TN_TRY(wait_for(device, stream, stream_id, &plane->write, &is_skipped));
    }
    for (size_t i = 0; i < plane->read_count && !is_read; i++) { /* each has waited for the write */
        TN_TRY(wait_for(device, stream, stream_id, &plane->reads[i], &is_skipped));
    }
    int needs_room = is_read ? !read_of(plane, stream_id) : is_skipped; /* see keep_write */
    if (needs_room) TN_TRY(make_room(device, plane, stream, stream_id));
    plane->has_skips = is_skipped || (is_read && plane->has_skips);
    return TN_OK;
}

tn_status tn__plane_order_before(tn_device *device, tn__plane_object *plane, tn_access access,
                                 tn_stream stream, uint64_t stream_id) {
    int is_read = access == TN_READ;
    if (plane->has_skips) return wait_before(device, plane, is_read, stream, stream_id);
    if (is_read && read_of(plane, stream_id)) return TN_OK;
    if (!is_read && plane->read_count == 0 && plane->write.stream_id == stream_id) return TN_OK;
    return wait_before(device, plane, is_read, stream, stream_id);
}

/* ---- noting -------------------------------------------------------------------------------- */

/* A write that did not wait for all before it does not stand for them: they stay to be waited for,
 * the last write among the reads. */
static void keep_write(tn__plane_object *plane) {
    if (!plane->has_write || read_of(plane, plane->write.stream_id)) return;
    TN_CHECK(plane->read_count < plane->read_limit);
    plane->reads[plane->read_count++] = plane->write;
}

void tn__plane_order_note(tn__plane_object *plane, tn_access access, tn_stream stream,
                          uint64_t stream_id) {
    tn__plane_use use = {stream, stream_id,
                         1}; /* none of it has ended, so there is none to record */
    plane->last_stream = stream;
    plane->last_stream_id = stream_id;
    if (access != TN_READ) {
        if (plane->has_skips)
            keep_write(plane);
        else
            plane->read_count = 0; /* it comes after all that was noted before */
        plane->write = use;
        plane->has_write = 1;
    } else if (!read_of(plane, stream_id)) {
        TN_CHECK(plane->read_count < plane->read_limit);
        plane->reads[plane->read_count++] = use;
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

/* ---- telling the pool ---------------------------------------------------------------------- */

static tn__use_mark *mark_of(tn__plane_object *plane, uint64_t stream_id) {
    for (int i = 0; i < TN__MARKS_KEPT; i++) {
        if (plane->marks[i].stream_id == stream_id) return &plane->marks[i];
    }
    tn__use_mark *oldest = &plane->marks[plane->next_mark];
    plane->next_mark = (plane->next_mark + 1) % TN__MARKS_KEPT;
    *oldest = (tn__use_mark){stream_id, 0};
    return oldest;
}

tn_status tn__plane_order_tell_pool(const tn__plane_object *plane, tn_stream stream) {
    for (int part = 0; part < TN__PART_COUNT; part++) {
        void *block = tn__plane_pool_block(plane, (tn__part)part);
        if (block) TN_TRY(tn_record_use(block, stream));
    }
    return TN_OK;
}

/* The stamp is read after the work was put on the stream and before it is recorded: should it
 * change in between, the next use is recorded once too often, and never once too few. */
static TN__SLOW tn_status record_elsewhere(tn__plane_object *plane, tn_stream stream,
                                           uint64_t stream_id) {
    if (!plane->use_stamp || (stream_id & TN__STREAM_ID_IN_CAPTURE)) {
        return tn__plane_order_tell_pool(plane, stream);
    }
    uint64_t stamp = atomic_load_explicit(plane->use_stamp, memory_order_acquire);
    tn__use_mark *mark = mark_of(plane, stream_id);
    if (mark->stamp == stamp) return TN_OK;
    TN_TRY(tn__plane_order_tell_pool(plane, stream));
    mark->stamp = stamp;
    return TN_OK;
}

tn_status tn__plane_order_record(tn__plane_object *plane, tn_stream stream, uint64_t stream_id) {
    int is_pool = plane->kind == TN__MEMORY_OWNED || plane->kind == TN__MEMORY_SLOT;
    if (!is_pool || stream_id == plane->home_stream_id) return TN_OK;
    if (TN__CANARY(TN__CANARY_PLANE_USE)) return TN_OK;
    return record_elsewhere(plane, stream, stream_id);
}

void tn__plane_order_mark_unrecorded(tn__plane_object *plane, uint64_t stream_id) {
    tn__plane_use *read = read_of(plane, stream_id);
    if (read) read->is_recorded = 0;
    if (plane->has_write && plane->write.stream_id == stream_id) plane->write.is_recorded = 0;
}

static tn_status record_rest_of(tn__plane_object *plane, tn__plane_use *use,
                                uint64_t free_stream_id) {
    if (use->is_recorded || use->stream_id == free_stream_id) return TN_OK;
    TN_TRY(tn__plane_order_record(plane, use->stream, use->stream_id));
    use->is_recorded = 1;
    return TN_OK;
}

tn_status tn__plane_order_record_rest(tn__plane_object *plane, uint64_t free_stream_id) {
    if (plane->has_write) TN_TRY(record_rest_of(plane, &plane->write, free_stream_id));
    for (size_t i = 0; i < plane->read_count; i++) {
        TN_TRY(record_rest_of(plane, &plane->reads[i], free_stream_id));
    }
    return TN_OK;
}
