/* A pool, as its own files see it.
 *
 *   pool.c           create, destroy, trim, traces
 *   pool_alloc.c     the public calls on blocks
 *   thread_cache*.c  in front of the mutex: blocks that threads keep for themselves
 *   pool_pressure.c  where memory for a block comes from; the procedure when it is short
 *   pool_wait.c      the bounded host wait for freed memory
 *   pool_list.c      all pools of the process
 *   pool_backing.c   the table of what a pool's memory can come from
 *   pool_pages.c     VMM: pages made, moved, filled into gaps
 *   pool_idle.c      VMM: idle pages found and given back
 *   pool_frames.c    VMM: physical handles made and released, mappings undone
 *   pool_segments.c  segments taken and given back
 *   pool_peer.c      access by other devices
 *   pool_graph.c     graph pools: captures, and the memory of graphs
 *   pool_pause.c     memory given back and taken again at the same addresses
 *   pool_checkpoint.c  graph pools: which blocks are live, taken down and made so again
 *   pool_dedicated.c blocks with a physical handle of their own
 *   pool_share.c     blocks exported to and imported from other processes
 *   pool_report.h    statistics, the check of everything, reports in words and as JSON
 *   heap*.c          pieces of address space and where blocks go
 *   pool_order.c     streams, events, waits
 *
 * Locks, in this order: the list of pools (pool.c), then one pool's mutex, then the page map's or
 * that of the registry of thread caches.
 * The list's is not held while a pool's is taken: a pool that another one needs is pinned, and its
 * destroy waits. A device's lock is never held when one of these is taken. Everything of a pool but
 * its configuration is under its mutex, except what threads have in their caches: who needs that,
 * too, holds the pool whole (tn__pool_lock_whole). The users' callbacks run under no lock.
 */
#ifndef TENURE_POOL_INTERNAL_H
#define TENURE_POOL_INTERNAL_H

#include <pthread.h>

#include "heap.h"
#include "pool_backing.h"
#include "pool_dedicated.h"
#include "pool_graph.h"
#include "pool_owned.h"
#include "pool_pause.h"
#include "pool_report.h"
#include "pool_settle.h"
#include "process_limits.h"
#include "trace_writer.h"

/* Who watches every call on the blocks of a pool. While anybody does, nothing is cached: what comes
 * from a thread's cache would be seen by nobody. Changed by tn__pool_observe, under the mutex. */
enum {
    TN__OBSERVE_TRACE = 1,  /* a trace file is written */
    TN__OBSERVE_EVENTS = 2, /* events are kept: event_ring.h */
    TN__OBSERVE_NVTX = 4,   /* a tool is told of every block: nvtx_memory.h */
    TN__OBSERVE_TRACK = 8,  /* a memory checker is: track.h */
    TN__OBSERVE_GRAPH = 16, /* blocks belong to a graph */
    TN__OBSERVE_PAUSE = 32, /* the memory is gone for now */
    TN__OBSERVE_HOST = 64   /* the CPU uses blocks at once: only what is complete is given out */
};

typedef struct tn__cache tn__cache;

/* Where a thread finds its cache: by its pthread_t, in one of a few slots after its hash. A thread
 * reads only what it wrote itself; it is cleared when the thread ends. */
#define TN__CACHE_SLOTS 64
typedef struct tn__cache_slot {
    _Atomic uintptr_t thread; /* 0: the slot is empty */
    _Atomic(tn__cache *) cache;
} tn__cache_slot;

struct tn_pool {
    struct tn_pool *next; /* in the list of pools; this, serial and pins: under the list's lock */
    uint64_t serial;      /* later pools have larger ones */
    unsigned pins;        /* threads that are in this pool for another one */
    tn_device *device;
    const tn__driver *driver;
    tn__driver_device *state;
    char *name;
    tn_device_info info;
    const tn__backing *backing;
    int is_backing_auto; /* the caller left the choice to us */
    size_t limit_bytes;  /* SIZE_MAX: none; the soft one is not above it */
    size_t soft_limit_bytes;
    size_t address_limit_bytes; /* SIZE_MAX: none */
    double wait_us_max;
    int keep_streams_apart;
    _Atomic unsigned keepers; /* tn__pool_keep */
    tn__settle settle;        /* NULL: idle memory may go at once */
    size_t address_bytes;     /* VMM: to reserve at a time */
    size_t page_bytes;        /* VMM: of a handle; else what segments are rounded to */

    size_t most_bytes; /* no request is larger */

    _Atomic unsigned observers; /* TN__OBSERVE_...; 0: nobody */
    tn__graph *graph;           /* NULL: no graph pool */

    pthread_mutex_t mutex;
    tn__heap heap;
    tn__order order;
    tn__growth growth;             /* which limits hold for growth just now */
    tn_pressure_callback callback; /* NULL: none */
    void *callback_context;
    tn__trace_writer *trace;       /* NULL: none is written */
    struct tn__event_ring *events; /* NULL: none are kept */
    tn__frame *spare_frames;       /* active nowhere */
    double decay_us;               /* VMM: memory that is idle for so long goes back; 0: never */
    double decay_at_us;            /* when it was last looked at, */
    uint64_t decay_operation;      /* and the heap's clock then */
    tn__own_mapping *stuck;        /* given up, but not yet taken back by the driver */
    size_t stuck_bytes;            /* of them, and of the next: memory that the pool reserved */
    tn__stuck_segment *stuck_segments;
    void *store;              /* the backing's own state */
    size_t segment_alignment; /* segments: what their provider aligns to, as far as is known */
    size_t transit_bytes;     /* segments: on their way from or to a provider of the caller's */
    tn__uses given;           /* uses that memory given back in stream order was still in */
    size_t peak_live_bytes;
    size_t peak_reserved_bytes;
    uint64_t allocs;
    uint64_t frees;
    tn__pause *pause; /* NULL: the pool is not paused */
    tn__contents contents;
    size_t paused_bytes; /* of active pages, whose memory a pause has given back */
    uint64_t out_of_memory;
    tn__shortage shortage; /* the last one */

    tn__cache_slot cache_slots[TN__CACHE_SLOTS];
    tn__cache *caches; /* see thread_cache.h */
    size_t cache_count;
    size_t given_bytes; /* sum of what the caches were given */
    int stop_depth;     /* caches are stopped */
};

/* Locks the pool and stops its caches: for those who look at all blocks or at sums over them. */
void tn__pool_lock_whole(tn_pool *pool);
void tn__pool_unlock_whole(tn_pool *pool);

/* An observer begins or ends; under the mutex. */
void tn__pool_observe(tn_pool *pool, unsigned observer, int is_on);

static inline size_t tn__pool_held_bytes(const tn_pool *pool) {
    size_t bytes = pool->heap.inactive_count * pool->page_bytes + pool->stuck_bytes;
    if (pool->backing->held_bytes) bytes += pool->backing->held_bytes(pool);
    return bytes + pool->transit_bytes;
}
static inline size_t tn__pool_reserved_bytes(const tn_pool *pool) {
    return pool->heap.mapped_bytes - pool->paused_bytes + tn__pool_held_bytes(pool);
}
/* What the pool's own limit leaves to take from the driver. */
static inline size_t tn__pool_headroom(const tn_pool *pool) {
    size_t reserved = tn__pool_reserved_bytes(pool);
    size_t limit = pool->growth == TN__GROWTH_SOFT ? pool->soft_limit_bytes : pool->limit_bytes;
    return limit > reserved ? limit - reserved : 0;
}

/* `bytes` up to the next multiple of `unit`; SIZE_MAX if that overflows. */
static inline size_t tn__round_up(size_t bytes, size_t unit) {
    size_t rest = bytes % unit;
    if (rest == 0) return bytes;
    return bytes > SIZE_MAX - (unit - rest) ? SIZE_MAX : bytes + (unit - rest);
}

/* Gives idle memory back: of the backing, then blocks that had handles of their own. */
static inline tn_status tn__pool_release(tn_pool *pool, tn__release *release) {
    TN_TRY(pool->backing->release(pool, release));
    return tn__dedicated_release(pool, release);
}

/* ---- pool_frames.c --------------------------------------------------------------------------- */

/* VMM: frees the records of all frames: the memory is given back, or the driver is gone. */
void tn__frames_clear(tn_pool *pool);

/* ---- pool_idle.c ----------------------------------------------------------------------------- */

/* VMM: gives back what was idle all the time since the last look, if that is decay_us ago. So idle
 * memory goes back after one to two times decay_us, if the pool grows or is trimmed then. */
tn_status tn__pages_decay(tn_pool *pool);

/* Learns what has completed, and unmaps what was waiting for that. Never waits. */
tn_status tn__pool_collect(tn_pool *pool);

/* What there is of the memory that the pool is of. */
static inline void tn__pool_memory_info(const tn_pool *pool, size_t *free_bytes,
                                        size_t *total_bytes) {
    *free_bytes = 0;
    *total_bytes = pool->info.memory_bytes;
    if (pool->backing->memory_info) {
        pool->backing->memory_info(free_bytes, total_bytes);
    } else {
        (void)pool->driver->memory_info(pool->state, free_bytes, total_bytes);
    }
}

/* ---- pool_alloc.c ---------------------------------------------------------------------------- */

/* Tells the simulated device that a block is handed out; it only watches for races. */
void tn__pool_note_take(tn_pool *pool, const tn__piece *block);

/* Counts and traces an alloc or a free that is about to happen to the block's piece. */
void tn__pool_note_alloc(tn_pool *pool, tn__piece *block);
void tn__pool_note_free(tn_pool *pool, const tn__piece *block);

/* ---- pool_pressure.c ------------------------------------------------------------------------- */

/* A place for the request that its stream can use: in a run, and behind the waits that it needs.
 * `run` is what tn__heap_find_run has found for it just now; NULL if it was not asked, or found
 * none. May let the pool's mutex go meanwhile. TN_OUT_OF_DEVICE_MEMORY without the report. */
tn_status tn__pool_find_room(tn_pool *pool, tn__request *request, const tn__place *run,
                             tn__place *out);

/* Before memory is taken from the driver: TN_OUT_OF_DEVICE_MEMORY with words if a limit of the pool
 * or the process, soft or hard as pool->growth says, leaves no `bytes` beyond what the pool counts
 * as reserved. What is given back, or could not be had, is unclaimed: tn__pool_unclaim. */
tn_status tn__pool_claim(tn_pool *pool, size_t bytes);
static inline void tn__pool_unclaim(const tn_pool *pool, size_t bytes) {
    if (!pool->backing->is_host_memory) tn__process_unclaim(bytes);
}

/* ---- pool_peer.c ----------------------------------------------------------------------------- */

/* Lets the pool's device and its peers touch memory that has just been mapped. */
tn_status tn__pool_set_access(tn_pool *pool, void *address, size_t bytes);

/* The pool ends: its peers may, too. Nothing of it is locked. */
void tn__pool_end_peers(tn_pool *pool);

/* ---- pool_wait.c ----------------------------------------------------------------------------- */

/* The host waits for uses of memory that has been freed in the pool. Made once for a request, with
 * the uses there are then; to be ended. */
typedef struct tn__wait_target {
    uint64_t stream_id;
    uint64_t stream_number; /* of the same stream, unless it was forgotten in between */
    uint64_t epoch;
    int is_over; /* has completed, or never will */
} tn__wait_target;
#define TN__WAIT_LOCAL 16
typedef struct tn__wait {
    tn__wait_target local[TN__WAIT_LOCAL]; /* more are on the heap */
    tn__wait_target *targets;
    size_t count;
    double budget_us;  /* what may still be waited */
    int is_unfinished; /* some use had not completed within that, or its stream captures */
    int is_of_live;    /* also uses of blocks that are live */
} tn__wait;

tn_status tn__wait_begin(tn__wait *wait, tn_pool *pool);

/* Lets the pool's mutex go and waits until at least one more target has completed, or memory was
 * freed. *any: whether that is so; 0 when there is nothing left to wait for. */
tn_status tn__wait_some(tn__wait *wait, tn_pool *pool, int *any);
void tn__wait_end(tn__wait *wait);

/* Waits for all of it. TN_INVALID_STATE if some use does not end within the pool's bound, or is on
 * a stream that captures. */
tn_status tn__pool_wait_freed(tn_pool *pool);

/* The same for uses of live blocks, too. */
tn_status tn__pool_wait_uses(tn_pool *pool);

/* ---- pool_list.c ----------------------------------------------------------------------------- */

void tn__pools_enter(tn_pool *pool);

/* Takes the pool off the list, and waits until no thread is in it for another pool. */
void tn__pools_leave(tn_pool *pool);

/* 1 for the first caller of the process. */
int tn__pools_is_first(void);

/* Gives idle memory of other pools back: of the device's, or (is_process_wide) of all. The caller
 * holds no pool. */
tn_status tn__pools_release_others(tn_pool *pool, int is_process_wide, tn__release *release);

/* ---- pool.c ---------------------------------------------------------------------------------- */

/* tn_pool_create, and for a graph pool with its state, which is the pool's after success. */
tn_status tn__pool_create(tn_device *device, const tn_pool_config *config, tn__graph *graph,
                          tn_pool **out);

/* A device's watcher of streams that end; the argument is a pool. */
void tn__pool_on_stream_end(void *argument, tn_stream handle, uint64_t id);

/* A device's watcher of users' waits; likewise. */
void tn__pool_on_user_wait(void *argument, const tn__user_wait *wait);

/* Forgets the streams of a device that the pool knows to have no work left. */
void tn__pool_forget_device(tn_pool *pool, const tn__order_device *device);

/* The state of a stream that a caller names. Forgets others that are idle when there are many. */
tn_status tn__pool_find_stream(tn_pool *pool, tn_stream handle, tn__pool_stream **out);

#endif
