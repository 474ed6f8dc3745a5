/* The order of a plane's uses across streams.
 *
 * A plane remembers the last write and the reads since, each with its stream. A read waits for
 * the write, a write for all of them; on the device, and only where streams differ. Having a
 * block's allocation as its first "write" orders the first use on another stream behind what the
 * allocator put on the allocation stream.
 *
 * A stream of another library that was not adopted may be gone, or its handle another's, by the
 * time that its use is waited for. So the end of such a use puts a fence behind it (pool_owned.h),
 * while the stream is there; and that is waited for, not the stream. What could not be fenced is
 * waited for with the whole device, on the host: TN_INVALID_STATE where that is not to be.
 */
#ifndef TENURE_PLANE_ORDER_H
#define TENURE_PLANE_ORDER_H

#include "tensor_state.h"

/* A plane without uses; and the end of one. */
void tn__plane_order_init(tn__plane_object *plane);
void tn__plane_order_deinit(tn__plane_object *plane);

/* The two exchange memory, states and uses; not their leases. */
void tn__plane_order_swap(tn__plane_object *a, tn__plane_object *b);

/* The plane has got blocks of the pool, allocated on that stream, or (pool NULL) memory of somebody
 * else's that is ready there: what its first note, a write, will stand for. Fails only if a fence
 * does. */
tn_status tn__plane_order_set_home(const tn__books *books, tn__plane_object *plane,
                                   const tn_pool *pool, tn_stream stream, uint64_t stream_id);

/* All uses of `from` become those of `to`, which has none; their memory is the same. */
void tn__plane_order_move(tn__plane_object *from, tn__plane_object *to);

/* The capture that the stream is in, a number that never repeats; 0: none. */
tn_status tn__plane_order_capture(tn_device *device, tn_stream stream, uint64_t *out);

/* TN_INVALID_STATE if it is in one: memory can not go to the host or come back in a graph. */
tn_status tn__plane_order_refuse_capture(const tn__tensor_object *tensor, tn_plane plane,
                                         tn_stream stream);

/* Makes `stream` wait for the uses that the access must come after, and makes room to note it.
 * A failure has no effect but for waits, which are harmless. */
tn_status tn__plane_order_before(const tn__books *books, tn__plane_object *plane, tn_access access,
                                 tn_stream stream, uint64_t stream_id);

/* Behind that: TN_OK if `stream` comes after all uses, but for those that a capture has for good,
 * which are ordered by who launches its graph. TN_INVALID_STATE if a capture that is under way was
 * between the stream and a use: it was not waited for. */
tn_status tn__plane_order_check_after(const tn__books *books, const tn__plane_object *plane,
                                      tn_stream stream, uint64_t stream_id);

/* A read on a stream that has read the plane since it was written: such a one waits for nothing,
 * and all there is to note is that it was the last. 0: it is none, or waits might be missing. */
static inline int tn__plane_order_read_again(tn__plane_object *plane, tn_stream stream,
                                             uint64_t stream_id) {
    size_t i = 0;
    if (plane->has_skips) return 0;
    while (i < plane->read_count && plane->reads[i].stream_id != stream_id)
        i++;
    if (i == plane->read_count) return 0;
    plane->last_stream = stream;
    plane->last_stream_id = stream_id;
    return 1;
}

/* A write on the one stream that has used the plane since it was last written there: it waits for
 * nothing, and is noted here. 0: it is none, or waits might be missing; nothing has changed. */
static inline int tn__plane_order_write_again(tn__plane_object *plane, tn_stream stream,
                                              uint64_t stream_id) {
    size_t reads = plane->read_count;
    if (plane->has_skips || !plane->has_write || stream_id >= TN__STREAM_ID_MAY_GO) return 0;
    if (plane->write.stream_id != stream_id || reads > 1) return 0;
    if (reads == 1 && plane->reads[0].stream_id != stream_id) return 0;
    plane->read_count = 0;
    plane->write.stream = stream;
    plane->write.is_recorded = 1;
    plane->last_stream = stream;
    plane->last_stream_id = stream_id;
    return 1;
}

/* Notes the use that a lease begins; tn__plane_order_before has been called for it. */
void tn__plane_order_note(tn__plane_object *plane, tn_access access, tn_stream stream,
                          uint64_t stream_id);

/* Tells the pool of a use, for each block of the plane that is the pool's. */
tn_status tn__plane_order_tell_pool(const tn__plane_object *plane, tn_stream stream);

TN__SLOW tn_status tn__plane_order_record_elsewhere(tn__plane_object *plane, tn_stream stream,
                                                    uint64_t stream_id,
                                                    const tn__tensor_object *tensor);

/* What the pool was told before covers a use of now: nothing has happened there since that would
 * take it for over. The stamp is read after the work was put on the stream. */
static inline int tn__plane_order_is_covered(const tn__plane_object *plane, uint64_t stream_id) {
    for (int i = 0; i < TN__MARKS_KEPT; i++) {
        const tn__use_mark *mark = &plane->marks[i];
        if (mark->stream_id == stream_id && mark->stamp) /* so it is the pool's memory */
            return mark->stamp == atomic_load_explicit(plane->use_stamp, memory_order_acquire);
    }
    return 0;
}

/* Tells the pool of a use, unless it is on the blocks' own stream or is covered; and sets the
 * fence, of a stream that may go. */
static inline tn_status tn__plane_order_record(const tn__tensor_object *tensor,
                                               tn__plane_object *plane, tn_stream stream,
                                               uint64_t stream_id) {
    if (stream_id == plane->home_stream_id) return TN_OK;
    if (tn__plane_order_is_covered(plane, stream_id)) return TN_OK;
    return tn__plane_order_record_elsewhere(plane, stream, stream_id, tensor);
}

/* The pool could not be told of a use: tn__plane_order_record_rest will have to. */
void tn__plane_order_mark_unrecorded(tn__plane_object *plane, uint64_t stream_id);

/* Tells the pool of all uses that it was not told of, but those on the stream of the free. */
tn_status tn__plane_order_record_rest(const tn__books *books, tn__plane_object *plane,
                                      uint64_t free_stream_id);

/* Where a free that names no stream goes: the stream of the plane's last use, or TN__NO_STREAM. */
tn__plane_use tn__plane_order_last(const tn__plane_object *plane);

/* Waits on the host for all work of the device. TN_INVALID_STATE in a no-wait time, and where that
 * would spoil a capture that is known of (tn__device_wait_begin). */
tn_status tn__plane_order_await_device(tn_device *device);

/* The stream has ended, and with it all its work. */
void tn__plane_order_forget(tn__plane_object *plane, uint64_t stream_id);

#endif
