/* What the files of libtenure-dropin share.
 *
 *     dropin_open.c      configuration, devices, banner; exit, fork
 *     dropin_memory.c    cuMemAlloc, cuMemFree and what goes with them
 *     dropin_stream.c    stream-ordered memory, captures, streams that end
 *     dropin_peers.c     devices that reach mapped pages of others
 *     dropin_pointer.c   what an address is; memory shared with other processes
 *     dropin_whole.c     large blocks, each an allocation of the driver's own
 *     dropin_blocks.c    all blocks by address
 *     dropin_fence.c     freed memory until nothing can use it any more
 *     dropin_record.c    the trace and the report
 *
 * A device has two pools. Blocks of cuMemAlloc come from `pool`, or are whole allocations of the
 * driver's if they are large and the pool has segments, and are idle when they are given out, since
 * any stream may use them at once; they go back only when all work that any stream had at the time
 * of cuMemFree is over (dropin_fence.c). In the pool they are all of one stream, `idle`, on which
 * nothing runs. Blocks of cuMemAllocAsync come from `stream_pool`, in the order of the streams that
 * they are for.
 *
 * Whatever can not be served from a pool, or is not known, is the driver's: so are contexts other
 * than a device's primary one.
 *
 * Once exit has begun, and in a forked child, is_over is set and no lock is taken but those that
 * are held around a fork, of the table of blocks and of the record: another thread may have had
 * any.
 *
 * A device ends when the program resets it, while other threads use others: whoever is at work on
 * one that is not its caller's own has it pinned, and the end waits for that (dropin_open.c).
 *
 * Lock order: giving back, peers, opening a device, captures, fences, then the pins, the table of
 * blocks, the record, or what libtenure locks.
 */
#ifndef TENURE_DROPIN_H
#define TENURE_DROPIN_H

#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"
#include "dropin_calls.h"

#define TN__DROPIN_DEVICES_MAX 64

/* The driver's own function. */
#define TN__REAL(name) (tn__dropin.driver->real->name)

/* ---- blocks: dropin_blocks.c ----------------------------------------------------------------- */

typedef enum tn__dropin_kind {
    TN__DROPIN_IDLE,   /* of `pool` */
    TN__DROPIN_STREAM, /* of `stream_pool` */
    TN__DROPIN_WHOLE,  /* an allocation of the driver's that is kept */
    TN__DROPIN_DRIVER  /* the driver's: only recorded */
} tn__dropin_kind;

struct tn__dropin_device;

typedef struct tn__dropin_whole {
    struct tn__dropin_whole *next, *previous; /* in the device's list */
    uintptr_t address;
    size_t bytes;
    int is_idle; /* no block is in it */
} tn__dropin_whole;

typedef struct tn__dropin_block {
    uintptr_t address;
    size_t bytes;
    tn__dropin_kind kind;
    struct tn__dropin_device *device; /* NULL: the driver's, of any */
    tn__dropin_whole *whole;          /* of WHOLE */
    uint64_t serial;                  /* of no other block, ever */
    uint64_t trace_id;
    struct tn__dropin_block *next; /* in a batch */
    struct tn__dropin_block *left, *right;
    uint32_t priority;
} tn__dropin_block;

/* Gives the block its serial. Blocks of the driver's that were where it is have ended without a
 * call of the program's, with a graph or a context: they are taken out and returned, a list by
 * `next`. */
tn__dropin_block *tn__dropin_blocks_add(tn__dropin_block *block);

/* Takes the block that begins there out of the table; NULL: none does. */
tn__dropin_block *tn__dropin_blocks_take(uintptr_t address);

/* A copy of the block that holds the address; 0: none does. */
int tn__dropin_blocks_find(uintptr_t address, tn__dropin_block *out);

/* Takes some block of the device out of the table; NULL: there is none. */
tn__dropin_block *tn__dropin_blocks_take_any(const struct tn__dropin_device *device);

void tn__dropin_blocks_lock(void);
void tn__dropin_blocks_unlock(void);

/* ---- the record: dropin_record.c ------------------------------------------------------------- */

#define TN__DROPIN_COUNTS(X)                                                                       \
    X(allocations, "allocations taken over")                                                       \
    X(frees, "frees taken over")                                                                   \
    X(stream_allocations, "of them in stream order")                                               \
    X(passed, "allocations left to the driver")                                                    \
    X(creates, "handles of physical memory that the program made itself")                          \
    X(fences, "fences behind freed memory")                                                        \
    X(fence_waits, "host waits for a fence")                                                       \
    X(device_waits, "host waits for the whole device")                                             \
    X(retries, "allocations repeated after memory was given back")                                 \
    X(refused, "allocations refused for want of memory")                                           \
    X(peers_refused, "pools that could not be told of a peer")                                     \
    X(lost, "blocks that a pool did not take back")

typedef struct tn__dropin_counts {
#define TN__DROPIN_COUNT_FIELD(name, meaning) _Atomic uint64_t name;
    TN__DROPIN_COUNTS(TN__DROPIN_COUNT_FIELD)
} tn__dropin_counts;

/* Opens what TENURE_RUN_TRACE and TENURE_RUN_REPORT name. A trace that can not be written is said
 * and not made. */
void tn__dropin_record_open(void);

/* A new block, or one that is freed, as the program sees it. `stream` as the program names it. */
void tn__dropin_record_alloc(tn__dropin_block *block, void *stream);
void tn__dropin_record_free(const tn__dropin_block *block);

/* A request that was refused for want of memory; it is counted too. */
void tn__dropin_record_refusal(size_t bytes);

/* Ends the trace and writes the report. */
void tn__dropin_record_close(void);

/* Around a fork. */
void tn__dropin_record_lock(void);
void tn__dropin_record_unlock(void);

/* ---- devices: dropin_open.c ------------------------------------------------------------------ */

/* Blocks freed between two fences, and what tells when they are idle. */
typedef struct tn__dropin_batch {
    struct tn__dropin_batch *next;
    tn__dropin_block *first;
    size_t count;
    size_t bytes;
    tn__event events[TN__DROPIN_DEVICES_MAX]; /* by device; NULL: none is waited for there */
} tn__dropin_batch;

typedef struct tn__dropin_device {
    int ordinal;
    void *context; /* the primary one */
    tn_device *device;
    const tn__driver *driver;
    tn__driver_device *state;
    tn_pool *pool;
    _Atomic(tn_pool *) stream_pool; /* NULL until it is first asked for */
    tn_stream idle;
    size_t memory_bytes;
    unsigned pins;                       /* threads at work on it that do not have it current */
    _Atomic int is_told, is_stream_told; /* the pools know who reaches them: dropin_peers.c */

    /* Under the mutex of dropin_whole.c: */
    tn__dropin_whole *first_whole, *last_whole;
    _Atomic size_t whole_bytes;
    _Atomic size_t whole_idle_bytes;

    /* Under the mutex of dropin_fence.c: */
    tn__dropin_batch *open;   /* takes what is freed; NULL: nothing has been since the last fence */
    tn__dropin_batch *oldest; /* behind a fence each, in order */
    tn__dropin_batch *newest;
    tn__dropin_batch *waited; /* taken out of these by threads that wait for them */
    size_t waiting_bytes;     /* in all batches */
    tn__event *spare_events;
    size_t spare_count;
    size_t spare_capacity;
} tn__dropin_device;

typedef struct tn__dropin_all {
    const tn__dropin_driver *driver;
    tn_pool_backing backing;
    int is_recording_only;
    int free_waits; /* cuMemFree waits for the device as the driver's does */
    size_t limit_bytes, soft_limit_bytes;
    _Atomic int is_over; /* exit has begun, or this is a forked child */
    _Atomic(tn__dropin_device *) devices[TN__DROPIN_DEVICES_MAX];
    _Atomic(void *) contexts[TN__DROPIN_DEVICES_MAX]; /* of these */
    /* The program has set another pool of the driver's as the device's current one. */
    _Atomic int has_own_mempool[TN__DROPIN_DEVICES_MAX];
    /* It has said who may reach the memory of the device's default pool. */
    _Atomic int has_shared_mempool[TN__DROPIN_DEVICES_MAX];
    _Atomic uint64_t given_back; /* bytes of whole blocks and of pools, to the driver, so far */
    tn__dropin_counts counts;
} tn__dropin_all;
extern tn__dropin_all tn__dropin;

static inline void tn__dropin_count(_Atomic uint64_t *count) {
    atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
}

/* The device whose primary context is current on this thread, opened; NULL: what is asked for is
 * the driver's business. */
tn__dropin_device *tn__dropin_device_current(void);

/* That device, opened if its primary context is there to be; NULL: it is the driver's business. */
tn__dropin_device *tn__dropin_device_open(int ordinal);

/* Devices that the driver has, of those that there is room for. */
int tn__dropin_device_count(void);

/* Opens the devices whose primary context is in use: they may have work on any memory. Not in the
 * midst of opening one, nor under a lock of the fences. */
void tn__dropin_devices_open_active(void);

/* The device whose primary context this is, NULL: the current one. -1: none's. */
int tn__dropin_ordinal_of(const void *context);

/* The device's own, made at the first call; NULL: it can not be had. */
tn_pool *tn__dropin_stream_pool(tn__dropin_device *device);

/* The device, if there is one, which does not end until it is unpinned. Whoever has one pinned
 * waits for no other device's end. */
tn__dropin_device *tn__dropin_device_pin(int ordinal);
void tn__dropin_device_unpin(tn__dropin_device *device);

/* Ends all that the device has, live blocks too: its context is about to be reset. Until it has
 * been, which tn__dropin_device_closed says, it is not opened anew. */
void tn__dropin_device_close(int ordinal);
void tn__dropin_device_closed(int ordinal);

/* It is found no more. By dropin_fence.c, under its mutex, when no batch has an event of it. */
void tn__dropin_device_remove(const tn__dropin_device *device);

/* ---- peers: dropin_peers.c ------------------------------------------------------------------- */

/* A device, or its stream pool, is new: its pools are told who reaches them, before anybody gets
 * memory of them. Not in the midst of opening a device. */
void tn__dropin_peers_apply(tn__dropin_device *owner);

/* The device is about to end. */
void tn__dropin_peers_close(const tn__dropin_device *gone);

/* ---- freed memory: dropin_fence.c ------------------------------------------------------------ */

/* Takes the block, which the program has freed: it goes back to its pool when it is idle. */
void tn__dropin_fence_add(tn__dropin_block *block);

/* Before an allocation: gives back what is known to be idle, and waits while too much is not. */
void tn__dropin_fence_poll(tn__dropin_device *device);

/* Waits until all that was freed is idle and gives it back; in a capture, what can be. */
void tn__dropin_fence_drain(tn__dropin_device *device);

/* Bytes freed that are not back in their pools. */
size_t tn__dropin_fence_bytes(tn__dropin_device *device);

/* The device ends: it is found no more, and the others' freed memory waits for it no more. */
void tn__dropin_fence_forget(const tn__dropin_device *gone);

/* The device has been forgotten, is out of use and idle: gives all back and destroys the events. */
void tn__dropin_fence_close(tn__dropin_device *device);

/* ---- large blocks: dropin_whole.c ------------------------------------------------------------ */

#define TN__DROPIN_WHOLE_BYTES ((size_t)8 << 20) /* from this size on */

/* Gives the block an idle allocation, or a new one. */
tn_status tn__dropin_whole_take(tn__dropin_device *device, tn__dropin_block *block);

/* The allocation is idle. */
void tn__dropin_whole_give(tn__dropin_device *device, tn__dropin_whole *whole);

/* Gives idle ones back to the driver until at most keep_bytes are left. */
void tn__dropin_whole_trim(tn__dropin_device *device, size_t keep_bytes);

/* Does so if more are idle than may be, and no stream captures. The driver may wait for the device:
 * only where the program's own call would. */
void tn__dropin_whole_bound(tn__dropin_device *device);

/* Whether the address is in one, in use or not. */
int tn__dropin_whole_holds(uintptr_t address);

/* ---- captures: dropin_stream.c --------------------------------------------------------------- */

/* 1 if no stream captures; then none begins to until the unlock. */
int tn__dropin_captures_lock(void);
void tn__dropin_captures_unlock(void);

/* Whether that stream captures. */
int tn__dropin_is_capturing(void *stream);

/* Forgets all streams of the device. */
void tn__dropin_streams_close(const tn__dropin_device *device);

/* ---- calls ----------------------------------------------------------------------------------- */

/* tn_alloc with what cuMemAlloc means; a code of the driver's. */
tn__cu_result tn__dropin_alloc(tn__dropin_device *device, size_t bytes, tn__cu_address *out);

/* Gives idle memory of all pools to the driver, so that what it refused can be asked again. 0:
 * there was none, also since this thread's last call: other threads give back, too, and who comes
 * while one does waits for it. */
int tn__dropin_give_back(void);

/* NULL without memory; tn__host_free ends it. */
tn__dropin_block *tn__dropin_new_block(tn__dropin_kind kind, tn__dropin_device *device,
                                       size_t bytes);

/* Whether the address is a pool's or in a whole block, so that the driver must not be asked to free
 * it. */
int tn__dropin_owns(tn__cu_address address);

/* Gives an idle block back to its pool, and ends its record. */
void tn__dropin_give(tn__dropin_block *block);

/* cuMemFree of a block of a pool's, which is in the table no more. */
void tn__dropin_free(tn__dropin_block *block);

/* Records an allocation that the driver has made. */
void tn__dropin_note(tn__cu_address address, size_t bytes, void *stream);

/* Frees what one of the driver's allocations was recorded as. */
void tn__dropin_forget(tn__dropin_block *block);

/* The program has the block: into the table with it. */
void tn__dropin_hand_out(tn__dropin_block *block);

/* A stream as the pools know it: a NULL of the per-thread calls has its own handle. */
static inline void *tn__dropin_stream_of(void *stream, int is_per_thread) {
    return stream || !is_per_thread ? stream : TN__CU_STREAM_PER_THREAD;
}

/* Fills in the calls of each file. */
void tn__dropin_memory_hooks(tn__dropin_calls *hooks);
void tn__dropin_stream_hooks(tn__dropin_calls *hooks);
void tn__dropin_peer_hooks(tn__dropin_calls *hooks);
void tn__dropin_pointer_hooks(tn__dropin_calls *hooks);

#endif
