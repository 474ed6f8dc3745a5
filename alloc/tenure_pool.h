/* Tenure: what a pool can do beyond giving out blocks (tenure_alloc.h has that).
 *
 *     backings              where the memory of a pool comes from
 *     limits and shortage   how much may be held, and what happens when that is not enough
 *     graph pools           memory of captured CUDA graphs
 *     pause and resume      a pool's physical memory given back and taken again
 *     sharing               peers, and other processes
 *     insight               reports, leaks, events, the map of a pool
 *
 * The rules of tenure_alloc.h hold here too: sizes in bytes, times in microseconds, thread-safe
 * unless a function says otherwise, and a call that fails leaves all state as it was.
 */
#ifndef TENURE_POOL_H
#define TENURE_POOL_H

#include "tenure_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- backings ----------------------------------------------------------------------------- */

/* tn_pool_config.backing; statistics, limits, order and checks are those of every pool.
 *
 * ASYNC: blocks of 1 MiB or more are allocations of a memory pool of the driver's own, made and
 * freed in stream order; smaller ones share allocations of 2 MiB. What the driver's pool keeps
 * counts as driver_held_bytes, and tn_pool_trim gives it back as far as the host has synchronised
 * with the work that used it. TN_UNSUPPORTED from tn_pool_create on the host driver, and where the
 * driver lacks a call (the text names it). Its granule (32 MiB today) is the least such a pool
 * takes; drivers before CUDA 12.2 may go beyond limit_bytes by less than a granule.
 *
 * CALLER: segments of 32 MiB, or of a block's size if that is larger, from config.functions, and
 * back to them with the same size. They are called by any thread, several at once, and under no
 * lock: they may use whatever they like, other pools too, but must not allocate from the pool that
 * calls. alloc gives memory of the pool's device, aligned to 512 bytes, no part of it any pool's,
 * or a status; TN_OUT_OF_DEVICE_MEMORY begins the procedure of shortage. What it gives is looked
 * at: memory that is NULL, not aligned, or a pool's is TN_DRIVER_ERROR from tn_alloc. If free
 * fails, the pool keeps the segment, and tn_pool_trim or tn_pool_destroy can be called again. Every
 * block goes back to the functions of its own pool.
 *
 * HOST and PINNED: host memory, on any driver. The CPU may use a block as soon as it is given out,
 * whatever its stream: so only memory whose recorded uses are complete is given out, and tn_free
 * still names the stream of the last use. PINNED memory is reached by devices at the same address;
 * on the host driver it is memory like any other. Limits of the process count neither.
 */

/* ---- limits and shortage ------------------------------------------------------------------ */

/* Limits on what all pools of the process hold together, of all devices; 0: none. Beyond the hard
 * one no pool grows; above the soft one, idle memory of any pool is used up or given back before
 * one grows. What is held already stays; TENURE_LIMIT and TENURE_SOFT_LIMIT set them at start.
 * TN_INVALID_ARGUMENT if soft is above hard. The same per pool: tn_pool_config. */
TN_API TN_MUST_USE tn_status tn_process_limits_set(size_t hard_bytes, size_t soft_bytes);

typedef struct tn_process_limits {
    size_t size;
    size_t hard_bytes; /* 0: none */
    size_t soft_bytes;
    size_t reserved_bytes; /* what all pools hold now */
} tn_process_limits;
#define TN_PROCESS_LIMITS_INIT                                                                     \
    { sizeof(tn_process_limits), 0, 0, 0 }

TN_API TN_MUST_USE tn_status tn_process_limits_get(tn_process_limits *out);

/* The most that the pool may reserve, anew; 0: no limit but the device. Gives idle memory back if
 * the pool holds more. TN_IN_USE if it then still does: the limit is as it was. TN_UNSUPPORTED for
 * ASYNC pools, whose driver is told the limit once. */
TN_API TN_MUST_USE tn_status tn_pool_limit_set(tn_pool *pool, size_t limit_bytes);

/* What stands in the way of a request that the pool can not serve. */
typedef enum tn_pressure_cause {
    TN_PRESSURE_DEVICE,        /* the device has no more */
    TN_PRESSURE_POOL_LIMIT,    /* tn_pool_config.limit_bytes */
    TN_PRESSURE_PROCESS_LIMIT, /* tn_process_limits_set */
    TN_PRESSURE_ADDRESSES      /* address_limit_bytes, or the driver has no more addresses */
} tn_pressure_cause;

typedef struct tn_pressure {
    size_t size;
    tn_pool *pool;
    tn_stream stream; /* that the block is for */
    size_t requested_bytes;
    tn_pressure_cause cause;
    int attempt; /* 1 at the first call for this request */
    size_t live_bytes;
    size_t cached_bytes;
    size_t pending_bytes;
    size_t reserved_bytes;
    size_t device_free_bytes;
} tn_pressure;

/* Not 0: something was freed, try the request again. */
typedef int (*tn_pressure_callback)(void *context, const tn_pressure *pressure);

/* Calls `callback` when a request of the pool would fail, after all else has been tried, on the
 * thread that asks and with no lock held: it may free, trim and allocate on any pool (what it asks
 * of any pool calls no callback), and must not destroy this one. It is called at most
 * TN_PRESSURE_ATTEMPTS_MAX times a request. NULL: none, as at first. The call before may still be
 * under way on another thread when this returns. */
enum { TN_PRESSURE_ATTEMPTS_MAX = 8 };
TN_API TN_MUST_USE tn_status tn_pool_pressure_callback_set(tn_pool *pool,
                                                           tn_pressure_callback callback,
                                                           void *context);

/* Between begin and end, allocation, free and trim in the whole process do not wait on the host for
 * the device, nor make a driver call that may (to free PLAIN memory does): for the launches of one
 * collective on several GPUs, of which the first does not end before the last has begun. What would
 * need a wait is done without: a request may fail with TN_OUT_OF_DEVICE_MEMORY, a trim give back
 * less, and tn_pool_destroy is TN_INVALID_STATE. Nests; ends on any thread; begin waits for such
 * calls of other threads that are under way. TN_INVALID_STATE for an end without a begin.
 *
 * Also for captures that begin while other threads use pools or tensors. Work of a stream that was
 * destroyed without a word may have to be waited for with the whole device, which spoils captures
 * on it: so the capture begins between begin and end. tn_no_wait_end may follow as soon as the
 * capture is open in a graph pool, and at once if its stream was made or adopted with the pool's
 * tn_device: such captures are seen. In a graph pool that is till tn_graph_capture_end, so that the
 * stream's capture ends before it, or both in a no-wait time. For any other capture tn_no_wait_end
 * follows when it has ended. */
TN_API TN_MUST_USE tn_status tn_no_wait_begin(void);
TN_API TN_MUST_USE tn_status tn_no_wait_end(void);

/* ---- graph pools -------------------------------------------------------------------------- */

/* Memory of captured CUDA graphs. A graph pool gives memory to streams that capture, at addresses
 * that stay valid for every launch. What a capture frees serves this capture again, on the same
 * stream, and later captures of the pool; nobody else gets it between launches.
 *
 *     tn_graph_pool_create(device, NULL, &pool);
 *     cuStreamBeginCapture(stream, mode);
 *     tn_graph_capture_begin(pool, stream);
 *     ...                                           tn_alloc(pool, ...), work, tn_free(...)
 *     tn_graph_capture_end(pool, &memory);
 *     cuStreamEndCapture(stream, &graph);
 *     ...                                           launch it as often as you like
 *     cuGraphExecDestroy(exec);
 *     tn_graph_memory_release(pool, memory, stream);
 *
 * Graphs whose captures share a pool must not be in flight together, and a launch destroys what
 * lies in memory that its own capture had freed: take over a graph's results before you launch a
 * graph that was captured earlier. Blocks that are live when a capture ends stay the caller's.
 *
 * In a graph pool tn_alloc is for streams of the open capture, forked ones too, and tn_free and
 * tn_record_use of a block of the open capture likewise: TN_INVALID_STATE for other streams, and
 * for tn_free of an older block on a stream that captures. A capture that something forbidden has
 * spoiled is TN_INVALID_STATE everywhere: abort it. Growing is legal while streams capture;
 * nothing is given back to the driver then, and no event recorded.
 *
 * tn_graph_pool_create: as tn_pool_create. TN_UNSUPPORTED if the driver has no captures, and for
 * backings other than AUTO, VMM and PLAIN. tn_pool_destroy ends it: TN_IN_USE while a capture is
 * open or memory of a graph is not released. */
TN_API TN_MUST_USE tn_status tn_graph_pool_create(tn_device *device, const tn_pool_config *config,
                                                  tn_pool **out);

/* What one captured graph uses. A value of one pool that never comes again. */
typedef uint64_t tn_graph_memory;

/* Opens the capture that `stream` is in, which has begun already. One at a time in a pool:
 * TN_INVALID_STATE if one is open, and if the stream does not capture; TN_UNSUPPORTED for a pool
 * that is no graph pool. */
TN_API TN_MUST_USE tn_status tn_graph_capture_begin(tn_pool *pool, tn_stream stream);

/* Closes it, before or after the caller ends the stream's capture; only before can it tell that
 * the capture is spoiled (TN_INVALID_STATE: still open, abort it). If the stream's capture ends
 * badly afterwards, release the memory and free what is live. TN_INVALID_STATE if none is open. */
TN_API TN_MUST_USE tn_status tn_graph_capture_end(tn_pool *pool, tn_graph_memory *out);

/* Gives up the open capture: frees all its blocks, whose addresses mean nothing any more. What the
 * pool has grown by it keeps, as cached memory. TN_INVALID_STATE if none is open. */
TN_API TN_MUST_USE tn_status tn_graph_capture_abort(tn_pool *pool);

/* The graph will not be launched any more, and its last launch comes before this point of `stream`
 * (which does not capture). Blocks of it that are live stay so. The pool's free memory can go back
 * to the driver (tn_pool_trim) once no graph holds any. TN_STALE_HANDLE: released before, or of
 * another pool. */
TN_API TN_MUST_USE tn_status tn_graph_memory_release(tn_pool *pool, tn_graph_memory memory,
                                                     tn_stream stream);

/* Which blocks of a graph pool are live, and where. */
typedef struct tn_checkpoint tn_checkpoint;

/* TN_INVALID_STATE while a capture is open, and if a tensor owns one of the blocks. */
TN_API TN_MUST_USE tn_status tn_pool_checkpoint(tn_pool *pool, tn_checkpoint **out);

/* Makes exactly the checkpoint's blocks live again, at their addresses: those that were freed since
 * are allocated anew for `stream`, which waits on the device for their last uses. Contents are
 * undefined. Nothing changes on TN_IN_USE (a block is live that the checkpoint has not: the text
 * names it) and TN_INVALID_STATE (a capture is open; the memory has gone back to the driver). */
TN_API TN_MUST_USE tn_status tn_pool_restore(tn_pool *pool, const tn_checkpoint *checkpoint,
                                             tn_stream stream);
TN_API void tn_checkpoint_destroy(tn_checkpoint *checkpoint);

/* ---- pause and resume --------------------------------------------------------------------- */

/* Gives all physical memory of a pool back to the driver, that of live blocks too. Their addresses
 * stay theirs, and nobody may touch them until tn_pool_resume. With keep_contents what live blocks
 * hold is copied to host memory first (locked memory if there is any) and back at the resume; else
 * their contents are undefined then. Waits, at most as long as a request that is short, for work
 * that uses the pool's blocks: what has been put on their own streams, and all recorded uses.
 * Launches of graphs are no recorded uses: of a graph pool none may be under way.
 *
 * While paused: tn_alloc and tn_record_use are TN_INVALID_STATE; tn_free works; live_bytes says
 * what is live, paused_bytes what the pool has given up and will take again, reserved_bytes what it
 * still has: 0, but for what the driver did not take back. tn_pool_destroy works once no block is
 * live.
 *
 * TN_UNSUPPORTED without VMM pages; TN_INVALID_STATE while paused or a capture is open in it, and
 * if work does not end or is being captured; TN_IN_USE while a block has a handle of its own, that
 * others may share; TN_OUT_OF_HOST_MEMORY; TN_DRIVER_ERROR. After a failure the pool is as it was,
 * but for idle memory that has gone back; or, if the driver refused to undo what was done, it is
 * paused (another call says so) and keeps its memory until it is resumed. */
TN_API TN_MUST_USE tn_status tn_pool_pause(tn_pool *pool, int keep_contents);

/* Takes memory again, for the blocks that are live, at their addresses, and puts contents back that
 * were kept. TN_INVALID_STATE if the pool is not paused; TN_OUT_OF_DEVICE_MEMORY, TN_DRIVER_ERROR
 * and TN_OUT_OF_HOST_MEMORY leave it paused with its contents kept: call again. */
TN_API TN_MUST_USE tn_status tn_pool_resume(tn_pool *pool);

/* ---- sharing ------------------------------------------------------------------------------ */

/* Lets another device of the same driver read and write the pool's memory, all that it has and all
 * that it will have, and lets streams of that device be named for its blocks: in tn_record_use, so
 * that memory is not given to others, moved or unmapped before their work has ended, and in
 * tn_alloc and tn_free. Default streams are always those of the pool's own device. The peer can
 * not be destroyed before the pool. Enabling twice is once. Errors: TN_UNSUPPORTED (no path between
 * the two, or a pool without VMM pages), TN_INVALID_ARGUMENT (the pool's own GPU, or another
 * driver's), TN_DRIVER_ERROR. */
TN_API TN_MUST_USE tn_status tn_pool_peer_enable(tn_pool *pool, tn_device *peer);

/* Ends that. TN_IN_USE while work on the peer's streams may still use the pool's memory: wait for
 * it first. TN_INVALID_ARGUMENT if the device is no peer of the pool. */
TN_API TN_MUST_USE tn_status tn_pool_peer_disable(tn_pool *pool, tn_device *peer);

/* A block for another process: plain data to be sent as it is, together with a file descriptor
 * (SCM_RIGHTS over a Unix socket).
 *
 *     options.flags = TN_ALLOC_SHAREABLE;
 *     tn_alloc(pool, bytes, stream, &options, &block);
 *     tn_share_export(block, &share, &file);
 *     ... send share and file, wait till the stream's work on the block is done ...
 *     close(file);
 *                                      tn_share_import(pool, &share, file, &address);
 *                                      close(file);
 *                                      ... work on `stream` that uses address ...
 *                                      tn_share_close(address, stream);
 *
 * Streams of two processes know nothing of each other: their order is the programs' business. */
typedef struct tn_share {
    uint32_t format;
    uint32_t checksum;
    uint64_t id[2]; /* the block's: the same at each export, never another block's */
    uint64_t bytes; /* as asked for */
    uint64_t mapped_bytes;
    unsigned char device_uuid[16];
    int32_t device_ordinal; /* as the exporter counts */
    uint32_t reserved;
} tn_share;

/* Exports a block that was allocated with TN_ALLOC_SHAREABLE: fills share, and opens *file, which
 * the caller closes. The block may be freed, and this process end, at any time: the memory lives
 * till its last user is gone. Once exported it is not reused here: freed, it goes back to the
 * driver. Errors: TN_INVALID_ARGUMENT (no such block), TN_UNSUPPORTED, TN_DRIVER_ERROR. */
TN_API TN_MUST_USE tn_status tn_share_export(const void *block, tn_share *share, int *file);

/* Maps an exported block for the pool's device and its peers. The file stays the caller's. The same
 * block again gives the same address, and one more close is needed. tn_record_use and tn_block_info
 * take the address. It counts in imported_bytes and against no limit. Errors: TN_CORRUPT_INPUT
 * (the description was changed, or does not fit the file), TN_INVALID_ARGUMENT (another GPU's, or
 * file is not open), TN_UNSUPPORTED, TN_OUT_OF_ADDRESS_SPACE, TN_DRIVER_ERROR. */
TN_API TN_MUST_USE tn_status tn_share_import(tn_pool *pool, const tn_share *share, int file,
                                             void **address);

/* Ends one import in the order of `stream`. After the last one the memory is unmapped once all
 * recorded uses have completed: now, or with a later call on the pool that grows, trims or
 * destroys it. NULL is a no-op. TN_INVALID_ARGUMENT if nothing is imported at the address. */
TN_API TN_MUST_USE tn_status tn_share_close(void *address, tn_stream stream);

/* ---- insight ------------------------------------------------------------------------------ */

/* The size of the pool's physical handles; of what segments are rounded to, if it has none. */
TN_API size_t tn_pool_page_bytes(const tn_pool *pool);

typedef enum tn_report_format {
    TN_REPORT_TEXT = 0, /* words and tables */
    TN_REPORT_JSON      /* one object: docs/formats.md */
} tn_report_format;

/* What the pool is and holds, at one moment: every statistic, how its free memory is cut up, the
 * owners with most bytes, its streams, and the last request that it could not serve. Writes at
 * most text_bytes bytes with the closing 0 to text; returns the bytes that the whole needs,
 * without the 0 (as snprintf does); text may be NULL if text_bytes is 0. A report that is asked
 * for again may need more: allow some room, or ask until it fits. 0 if pool is NULL or the format
 * is unknown. */
TN_API size_t tn_pool_report(tn_pool *pool, tn_report_format format, char *text, size_t text_bytes);

/* Writes the map of the pool to a JSON file, as it is at one moment: regions, the memory behind
 * them, every piece with its state, owner and streams, and the events that are kept
 * (docs/formats.md). Appears under its name once it is complete; until then it is PATH.part.
 * TN_IO if it can not be written: a file of that name is then as it was. */
TN_API TN_MUST_USE tn_status tn_pool_snapshot_write(tn_pool *pool, const char *path);

/* What happens in a pool, as its last events tell: X(kind, "name", "meaning of its fields"). */
#define TN_EVENT_TABLE(X)                                                                          \
    X(ALLOC, "alloc", "a block was given out: address, bytes asked for, stream, owner")            \
    X(FREE, "free", "a block was freed: likewise, with the stream of the free")                    \
    X(RECORD_USE, "record_use", "a use was recorded: the block, and the stream that uses it")      \
    X(WAIT, "wait", "the stream was made to wait on the device for another")                       \
    X(GROW, "grow", "bytes more are reserved than at the event before")                            \
    X(RELEASE, "release", "bytes fewer are reserved than at the event before")                     \
    X(MOVE, "move", "physical memory was mapped at another address: from address, bytes")          \
    X(OUT_OF_MEMORY, "out_of_memory", "a request of bytes for the stream could not be served")     \
    X(PAUSE, "pause", "the pool's physical memory was given back: bytes")                          \
    X(RESUME, "resume", "it was taken again: bytes")                                               \
    X(EXPORT, "export", "the block was exported to other processes")                               \
    X(IMPORT, "import", "a block of another process was mapped: address, bytes")

typedef enum tn_event_kind {
#define TN_EVENT_ENUMERATOR(kind, name, meaning) TN_EVENT_##kind,
    TN_EVENT_TABLE(TN_EVENT_ENUMERATOR) TN_EVENT_KIND_COUNT
} tn_event_kind;

TN_API const char *tn_event_kind_name(tn_event_kind kind);

#define TN_EVENT_FRAMES      24
#define TN_EVENT_OWNER_BYTES 48
#define TN_EVENTS_MAX        ((size_t)1 << 20)

typedef struct tn_event {
    uint64_t number; /* from 1 on, without gaps; what is missing was overwritten */
    double time_us;  /* by the driver's clock */
    tn_event_kind kind;
    int thread; /* the system's id of the calling thread */
    const void *address;
    size_t bytes;
    tn_stream stream;
    uint64_t stream_id;               /* the driver's */
    char owner[TN_EVENT_OWNER_BYTES]; /* a copy, cut if it is longer */
    uint32_t frame_count;             /* 0 unless stacks are kept */
    void *frames[TN_EVENT_FRAMES];    /* return addresses, the latest call first */
} tn_event;

/* Keeps the last `capacity` events (1 to TN_EVENTS_MAX) from now on, with the stack of each if
 * with_stacks is not 0: that costs some microseconds an event. TN_INVALID_STATE if they are kept
 * already. While they are, no call is served from a thread's cache. TENURE_EVENTS=N does this for
 * every pool, without stacks. */
TN_API TN_MUST_USE tn_status tn_pool_events_begin(tn_pool *pool, size_t capacity, int with_stacks);

/* Takes the oldest events, at most `capacity`, out of the ring, in order; *count is how many.
 * *lost, which may be NULL, counts those that were overwritten before anybody read them, since the
 * last read. TN_INVALID_STATE if none are kept. */
TN_API TN_MUST_USE tn_status tn_pool_events_read(tn_pool *pool, tn_event *events, size_t capacity,
                                                 size_t *count, uint64_t *lost);

/* Keeps no more and forgets those kept. */
TN_API TN_MUST_USE tn_status tn_pool_events_end(tn_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
