/* Stream order: which streams may still use a piece of memory, and how others come after them.
 *
 * Each stream counts epochs. A use that is put on a stream belongs to its open epoch; recording
 * an event closes that epoch and opens the next, so the event covers the uses of its own epoch
 * and of all before it. Nothing is recorded when memory is freed: only when another stream wants
 * the memory, or when the pool is about to grow and asks what has completed. But of a stream of
 * another library, which may be destroyed without a word, an event is recorded with the use.
 *
 *      epoch 1        epoch 2          epoch 3 (open)
 *   --use--use--[event]--use--[event]--use--use--> time on the stream
 *                  ^ completes 1   ^ completes 1, 2
 *
 * An epoch is closed before its event is recorded: a use that is put on a stream meanwhile and
 * still sees the epoch was put there before the event. If the event then fails, the next one
 * covers both.
 *
 * A pool may be used by streams of other devices, its peers. An event can be recorded only on
 * streams of the device that made it, so each device has events of its own; any stream may wait
 * for any event.
 *
 * A user's wait between two streams (tn_stream_wait) closes the other's epoch as well, without an
 * event of ours: from then on the stream comes after all uses up to there, and after what the other
 * had waited for. Such an epoch's uses are covered by the next event that is recorded.
 *
 * Invariants: complete < epoch; events are in order of epoch, each above complete and below
 * epoch; a use with epoch <= complete is over and may be forgotten; what a stream has waited for
 * (waits) only grows. Everything here is under the pool's mutex, but for looks at the
 * open epoch.
 */
#ifndef TENURE_POOL_ORDER_H
#define TENURE_POOL_ORDER_H

#include "driver.h"

typedef struct tn__pool_stream tn__pool_stream;

/* ---- uses --------------------------------------------------------------------------------- */

typedef struct tn__use {
    tn__pool_stream *stream;
    uint64_t epoch;
} tn__use;

/* A set of uses, at most one a stream. Three fit in place; more are on the heap. */
#define TN__USES_LOCAL 3
typedef struct tn__uses {
    uint32_t count;
    uint32_t capacity; /* of many; meaningless while many is NULL */
    tn__use *many;
    tn__use local[TN__USES_LOCAL];
} tn__uses;

static inline tn__use *tn__uses_items(tn__uses *uses) {
    return uses->many ? uses->many : uses->local;
}

/* Room for `capacity` uses in all, so that adds up to there can not fail. */
tn_status tn__uses_reserve(tn__uses *uses, uint32_t capacity);

/* Adds a use, or raises the epoch of the one on that stream. Room must have been reserved. */
void tn__uses_add(tn__uses *uses, tn__pool_stream *stream, uint64_t epoch);

/* Empties the set and frees its heap memory. */
void tn__uses_clear(tn__uses *uses);

/* Forgets uses that are known complete; frees the heap memory when none is left. */
void tn__uses_settle(tn__uses *uses);
int tn__uses_are_complete(tn__uses *uses);
int tn__uses_has(tn__uses *uses, const tn__pool_stream *stream);
void tn__uses_forget(tn__uses *uses, const tn__pool_stream *stream);
int tn__uses_equal(tn__uses *a, tn__uses *b);

/* `to` must be empty. */
tn_status tn__uses_copy(tn__uses *to, tn__uses *from);

/* ---- streams ------------------------------------------------------------------------------ */

#define TN__STREAM_LEGACY ((tn_stream)1) /* CU_STREAM_LEGACY: the same as NULL */

/* CU_STREAM_PER_THREAD: one handle, another stream in each thread. */
#define TN__STREAM_PER_THREAD ((tn_stream)2)

#define TN__CLOSED_MAX 16 /* events kept of one stream; beyond, every second one is dropped */
#define TN__WAITS_MAX  8  /* streams waited for that are remembered; beyond, waits may repeat */

typedef struct tn__closed_epoch {
    uint64_t epoch;
    tn__event event;
} tn__closed_epoch;

/* This stream's work from now on comes after another stream's epochs up to `epoch`. */
typedef struct tn__stream_waited {
    uint64_t source_number;
    uint64_t epoch;
} tn__stream_waited;

/* A device whose streams use the pool, and its events. */
typedef struct tn__order_device {
    struct tn__order_device *next; /* in the list of peers */
    tn_device *owner;
    tn__driver_device *state;
    int ordinal;
    tn__event *spare_events;
    size_t spare_count;
    size_t event_count; /* made so far: the spare ones and those in use */
    size_t spare_capacity;
} tn__order_device;

struct tn__pool_stream {
    tn__pool_stream *next; /* in its bucket */
    tn__order_device *device;
    tn_stream handle;
    uint64_t thread;        /* that named it first: there a per-thread stream's handle means it */
    uint64_t id;            /* the driver's */
    uint64_t number;        /* ours: a stream that was forgotten and comes back has a new one */
    _Atomic uint64_t epoch; /* the open one; read without the mutex, too (thread_cache.h) */
    uint64_t complete;
    int is_captured;     /* of an open capture, in no index: no event tells when a use is over */
    int is_foreign;      /* may be destroyed without a word, and its handle given to another */
    int is_used;         /* there are uses that no event covers */
    int is_marked;       /* by a sweep */
    uint32_t hold_count; /* calls that use it without the pool's mutex: it is not swept */
    uint64_t wait_epoch; /* while a host wait gathers what it waits for */
    uint32_t closed_count;
    uint32_t waited_next; /* the one to forget next */
    tn__closed_epoch closed[TN__CLOSED_MAX];
    tn__stream_waited waited[TN__WAITS_MAX]; /* each source once, where its number says if it can */
    int64_t trace_number; /* in the trace that is being written; -1: not seen there yet */
};

/* Up to which epoch there are events, or all is over. */
static inline uint64_t tn__order_covered(const tn__pool_stream *stream) {
    uint32_t count = stream->closed_count;
    return count > 0 ? stream->closed[count - 1].epoch : stream->complete;
}

#define TN__STREAM_BUCKETS 64
#define TN__STREAM_RECENT  32

typedef struct tn__recent_stream {
    tn_stream handle;
    tn__pool_stream *stream; /* NULL: the slot is empty */
} tn__recent_stream;

/* A wait that a user is about to put on a stream: what comes before it. */
typedef struct tn__told_wait {
    uint64_t number;
    tn__stream_waited source; /* the other stream, up to the epoch that was closed for it */
    tn__stream_waited known[TN__WAITS_MAX]; /* what that one had waited for */
} tn__told_wait;
#define TN__TOLD_WAITS 8 /* under way at once; of more, some are not learnt of */

typedef struct tn__order {
    const tn__driver *driver;
    tn__order_device home; /* the pool's device */
    tn__order_device *peers;
    tn__pool_stream *buckets[TN__STREAM_BUCKETS];
    size_t stream_count;
    uint64_t last_number;
    size_t sweep_count;                          /* sweep before there are more streams than this */
    tn__recent_stream recent[TN__STREAM_RECENT]; /* by handle; only streams whose end we hear of */
    uint64_t wait_count;
    _Atomic uint64_t use_stamp; /* grows before a use that was recorded stops to cover what its
                                 * stream does next; read without the mutex, too (pool_owned.h) */
    tn__told_wait told[TN__TOLD_WAITS];
    unsigned told_next;          /* the one to forget next */
    _Atomic uint64_t known_bits; /* tn__stream_bit of all handles that have a state, or had one */
} tn__order;

/* The state of a stream, made when it is new. TN_INVALID_ARGUMENT if it belongs to a device that
 * is no peer. */
tn_status tn__order_find(tn__order *order, tn_stream handle, tn__pool_stream **out);

/* A new state that is in no index: the caller's, to end with tn__host_free when no use is left. */
tn_status tn__order_make(tn__order *order, tn_stream handle, uint64_t id, tn__pool_stream **out);

/* The state of a stream that is known already, by id; NULL if it is not. */
tn__pool_stream *tn__order_known(tn__order *order, uint64_t id);

/* The use that work put on the stream now makes. */
tn__use tn__order_use_now(tn__pool_stream *stream);

/* 1 if work put on `stream` now comes after all the uses without a further wait. */
int tn__order_is_ready(const tn__pool_stream *stream, tn__uses *uses);

/* Makes `stream` wait on the device for those of the uses that it is not after already. */
tn_status tn__order_wait(tn__order *order, tn__pool_stream *stream, tn__uses *uses);

/* Forgets the uses that `stream` comes after: it has a use that says as much. */
void tn__order_drop_covered(const tn__pool_stream *stream, tn__uses *uses);

/* A user's wait: before its event is recorded, and when it is on its stream. Of streams that have a
 * state. What can not be noted is not: then the pool waits once more. */
void tn__order_wait_begins(tn__order *order, const tn__user_wait *wait);
void tn__order_wait_is_put(tn__order *order, const tn__user_wait *wait);

/* Records an event behind the uses of the open epoch, if it has any. TN_INVALID_STATE while the
 * stream captures. A foreign stream may have been destroyed meanwhile, with its work still under
 * way: then the device is waited for once, and all epochs are complete. */
tn_status tn__order_close_epoch(tn__order *order, tn__pool_stream *stream);

/* A use has been put on this stream: if it is another library's, and may be gone when an event is
 * wanted, the event is recorded now. A driver that is asked for a stream that was destroyed may
 * crash. is_named: the call that is under way names it, so that it is there. */
void tn__order_fence(tn__order *order, tn__pool_stream *stream, int is_named);

/* The use that the work up to now makes on a stream that is there; there is an event behind it. */
tn_status tn__order_fenced_use(tn__order *order, tn__pool_stream *stream, tn__use *out);

/* Makes `stream` wait on the device for that use, unless it is after it already. */
tn_status tn__order_wait_for(tn__order *order, tn__pool_stream *stream, tn__use use);

/* Whether that stream may be destroyed without a word. */
int tn__order_may_go(const tn__pool_stream *stream);

/* Asks the driver what has completed, on every stream, without waiting; a stream that captures can
 * not be asked. *any becomes 1 if something has completed since the last time, also on failure. */
tn_status tn__order_poll(tn__order *order, int *any);

/* The same for one stream, of the events that it has. */
tn_status tn__order_poll_stream(tn__order *order, tn__pool_stream *stream);

/* 1 while some stream of the device has uses that are not known complete. */
int tn__order_device_is_busy(const tn__order *order, const tn__order_device *device);

/* Ends the state of all streams of the device, of which no use may be left, and its events. On
 * failure what is left can be closed again. */
tn_status tn__order_close_device(tn__order *order, tn__order_device *device);

/* TN_INVALID_STATE naming `what` if the stream captures: for calls that a capture forbids. */
tn_status tn__order_check_capture(const tn__order *order, tn_stream handle, const char *what);

/* Unmarks all streams; ends those that are idle and that nobody has marked in between. */
void tn__order_unmark(tn__order *order);
void tn__order_sweep(tn__order *order);

/* Ends a stream's state; no use of it may be left. */
void tn__order_remove(tn__order *order, tn__pool_stream *stream);

/* Ends all streams' states; destroys the events unless the driver is gone. On failure what is
 * left can be closed again. */
tn_status tn__order_close(tn__order *order);

#endif
