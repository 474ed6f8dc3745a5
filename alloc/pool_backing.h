/* What a pool's memory comes from: one row of functions for each tn_pool_backing.
 *
 *   VMM      pool_grow.c, pool_idle.c    physical pages, mapped where a block wants them
 *   PLAIN    pool_segments.c             segments of the driver's plain memory call
 *   ASYNC    pool_async.c                a memory pool of the driver's own
 *   CALLER   pool_caller.c               segments of the caller's functions
 *   HOST     pool_host.c                 segments of pageable host memory
 *   PINNED   pool_host.c                 segments of pinned host memory
 *
 * Nothing else in a pool asks which backing it has: what differs is a member here. Every function
 * is called with the pool's mutex held, but for check_config and open, which see a pool that
 * nobody else knows yet.
 */
#ifndef TENURE_POOL_BACKING_H
#define TENURE_POOL_BACKING_H

#include "heap.h"

/* How far to go for memory. */
typedef enum tn__effort {
    TN__EFFORT_READY, /* what the stream can use at once, else more from the driver */
    TN__EFFORT_ALL    /* also what other streams may still use, behind device waits (VMM); idle
                       * segments go back to the driver for others (segments) */
} tn__effort;

/* How much idle memory to give back: at least that, if there is so much that is known to be out
 * of use, and never more than that. */
typedef struct tn__release {
    size_t least_bytes;
    size_t most_bytes;
    size_t released_bytes; /* so far; true also after a failure */
    uint64_t freed_until;  /* VMM: what was freed later stays (pool_settle.h); 0: nothing does */
} tn__release;
static inline int tn__release_spares(const tn__release *release, uint64_t age) {
    return release->freed_until != 0 && age > release->freed_until;
}
static inline int tn__release_is_done(const tn__release *release) {
    return release->released_bytes >= release->least_bytes;
}
static inline size_t tn__release_room(const tn__release *release) {
    return release->most_bytes - release->released_bytes;
}

typedef struct tn__backing {
    tn_pool_backing kind;
    const char *name;
    int maps_handles;   /* so that peers, and blocks with a handle of their own, are possible */
    int is_host_memory; /* not of a device: no limit for devices counts it, and it is given out only
                         * once its uses are complete, since the CPU uses it without a stream */
    int is_pinned;
    int is_cheap_to_grow; /* cheaper than to ask first what has completed */

    /* TN_UNSUPPORTED or TN_INVALID_ARGUMENT in words, if the device can not back such a pool. */
    tn_status (*check_config)(const tn_pool_config *config, const tn_device_info *info);

    /* Sets page_bytes and what else the backing keeps in the pool. */
    tn_status (*open)(struct tn_pool *pool, const tn_pool_config *config);

    /* The place that such a request had when the job was here last (heap_history.h), if that can be
     * had without a driver call and without a wait. NULL: nothing is placed by history. */
    tn_status (*repeat)(struct tn_pool *pool, const tn__request *request, const tn__past *past,
                        tn__place *out, int *is_found);

    /* A place for a request that no run has room for, without a driver call: one that was built for
     * that size before and whose memory is idle elsewhere. NULL: there are none. */
    tn_status (*recall)(struct tn_pool *pool, const tn__request *request, tn__place *out,
                        int *is_found);

    /* Makes room for the request and says where: the place is in a run then.
     * TN_OUT_OF_DEVICE_MEMORY if the driver or the limit has no more; then nothing has changed. */
    tn_status (*grow)(struct tn_pool *pool, const tn__request *request, tn__effort effort,
                      tn__place *out);

    /* Gives idle memory back, longest idle first. */
    tn_status (*release)(struct tn_pool *pool, tn__release *release);

    /* Gives reservations back in which nothing lies; *any becomes 1 if there were some. NULL: there
     * are none apart from memory. */
    tn_status (*release_addresses)(struct tn_pool *pool, int *any);

    /* Gives back what a pool without blocks still has once all idle memory was released. What a
     * failing call leaves can be closed again. */
    tn_status (*close)(struct tn_pool *pool);

    /* Tells of memory that the backing holds beyond what is mapped. NULL: there is none. */
    size_t (*held_bytes)(const struct tn_pool *pool);

    /* A block in the region has been freed on the stream (NULL: on none in particular). NULL: the
     * heap keeps it. */
    void (*freed)(struct tn_pool *pool, tn__region *region, tn__pool_stream *stream);

    /* ---- of segments: their provider -------------------------------------------------------- */

    size_t shared_bytes; /* smaller requests share segments of that size; 0: none do */
    int claims_itself;   /* take claims the bytes (tn__pool_claim), and give unclaims them */
    int is_unlocked;     /* both are called without the pool's mutex */
    tn_status (*take)(struct tn_pool *pool, const tn__request *request, size_t bytes, void **out);
    tn_status (*give)(struct tn_pool *pool, void *address, size_t bytes);
    size_t (*round)(const struct tn_pool *pool, size_t bytes); /* a size without waste; NULL: any */

    /* ---- words ------------------------------------------------------------------------------ */

    /* What there is of such memory; NULL: ask the device. */
    void (*memory_info)(size_t *free_bytes, size_t *total_bytes);

    /* Said of a shortage while as much memory as was asked for is free. */
    const char *scattered_hint;
} tn__backing;

/* The row for a kind; AUTO is what suits the device best. NULL: there is no such kind. */
const tn__backing *tn__backing_find(tn_pool_backing kind, const tn_device_info *info);

/* Where AUTO chose VMM and the driver has no addresses for it at all, before the pool has any: it
 * is PLAIN from now on. 1 if that was so. */
int tn__backing_fall_back(struct tn_pool *pool);

/* ---- VMM: pool_grow.c, pool_idle.c ----------------------------------------------------------- */

tn_status tn__pages_grow(struct tn_pool *pool, const tn__request *request, tn__effort effort,
                         tn__place *out);
tn_status tn__pages_repeat(struct tn_pool *pool, const tn__request *request, const tn__past *past,
                           tn__place *out, int *is_found);
tn_status tn__pages_recall(struct tn_pool *pool, const tn__request *request, tn__place *out,
                           int *is_found);
tn_status tn__pages_release(struct tn_pool *pool, tn__release *release);
tn_status tn__pages_release_addresses(struct tn_pool *pool, int *any);
tn_status tn__pages_close(struct tn_pool *pool);

/* ---- segments: pool_segments.c --------------------------------------------------------------- */

/* Memory of the provider that no region has. */
typedef struct tn__stuck_segment {
    struct tn__stuck_segment *next;
    void *address;
    size_t bytes;
} tn__stuck_segment;

tn_status tn__segments_grow(struct tn_pool *pool, const tn__request *request, tn__effort effort,
                            tn__place *out);
tn_status tn__segments_release(struct tn_pool *pool, tn__release *release);

/* One segment more for the request. May let the pool's mutex go. */
tn_status tn__segment_add(struct tn_pool *pool, const tn__request *request, tn__place *out);

/* Gives back segments that could neither be used nor given back when they were taken. */
tn_status tn__segments_give_stuck(struct tn_pool *pool, tn__release *release);

/* The segment of at most that size that has been idle for longest and that nothing may still use;
 * NULL: none. */
tn__region *tn__segment_find_idle(struct tn_pool *pool, size_t most_bytes);

/* Gives an idle one back to the provider. May let the pool's mutex go. */
tn_status tn__segment_give(struct tn_pool *pool, tn__region *region);

/* ---- further rows ---------------------------------------------------------------------------- */

extern const tn__backing tn__backing_async;
extern const tn__backing tn__backing_caller;
extern const tn__backing tn__backing_host;
extern const tn__backing tn__backing_pinned;

#endif
