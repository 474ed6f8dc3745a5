/* Tenure: devices, streams and pools of GPU memory.
 *
 *     tn_device *device;
 *     tn_pool *pool;
 *     void *block;
 *     tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
 *     tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
 *     if (tn_device_create(&device_config, &device) != TN_OK) puts(tn_error_last());
 *     tn_pool_create(device, &pool_config, &pool);
 *     tn_alloc(pool, 1 << 20, stream, NULL, &block);
 *     ... work on `stream` that uses block ...
 *     tn_record_use(block, other_stream);      (right after work on another stream)
 *     tn_free(block, stream);                  (no host wait: freed in stream order)
 *     tn_pool_destroy(pool);
 *     tn_device_destroy(device);
 *
 * Units: every size is in bytes, every time in microseconds. Everything here is thread-safe
 * unless a function says otherwise. Every call that fails leaves all state as it was, and
 * tn_error_last() then says what, why and what to do.
 *
 * Once exit has begun, and in a forked child, frees and destroys do nothing and succeed, and calls
 * that would need the driver fail. In a child every other call on a pool is TN_INVALID_STATE.
 */
#ifndef TENURE_ALLOC_H
#define TENURE_ALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TN_API      __attribute__((visibility("default")))
#define TN_MUST_USE __attribute__((warn_unused_result))
#else
#define TN_API
#define TN_MUST_USE
#endif

/* ---- version ------------------------------------------------------------------------------ */

#define TN_VERSION_MAJOR  0
#define TN_VERSION_MINOR  1
#define TN_VERSION_PATCH  0
#define TN_VERSION_STRING "0.1.0"

/* The version of the library that runs, "major.minor.patch"; never NULL. */
TN_API const char *tn_version(void);

/* ---- status ------------------------------------------------------------------------------- */

typedef enum tn_status {
    TN_OK = 0,
    TN_OUT_OF_DEVICE_MEMORY,
    TN_OUT_OF_HOST_MEMORY,
    TN_OUT_OF_ADDRESS_SPACE,
    TN_INVALID_ARGUMENT,
    TN_INVALID_STATE,
    TN_STALE_HANDLE,
    TN_IN_USE,
    TN_UNSUPPORTED,
    TN_DRIVER_ERROR,
    TN_COMM_ERROR,
    TN_COMM_TIMEOUT,
    TN_LEAK,
    TN_IO,
    TN_CORRUPT_INPUT,
    TN_STATUS_COUNT
} tn_status;

/* "TN_OUT_OF_DEVICE_MEMORY" and "out of device memory"; "unknown status" for other values. */
TN_API const char *tn_status_name(tn_status status);
TN_API const char *tn_status_text(tn_status status);

/* This thread's last failure in words: what failed, why, what to do. "" before the first one.
 * Valid until this thread's next failing call. */
TN_API const char *tn_error_last(void);

/* The driver's own code of this thread's last failure (a CUresult, say), 0 if it had none. */
TN_API int tn_error_last_native(void);

/* ---- options ------------------------------------------------------------------------------ */

/* One line per option: its TENURE_ variable, value, where the value came from, and meaning.
 * Writes at most text_bytes bytes with the closing 0 to text; returns the bytes that the whole
 * text needs, without the 0 (as snprintf does). text may be NULL if text_bytes is 0. */
TN_API size_t tn_options_describe(char *text, size_t text_bytes);

/* ---- devices ------------------------------------------------------------------------------ */

typedef struct tn_device tn_device;

/* A stream as its driver knows it: a CUstream or cudaStream_t on CUDA, one made by
 * tn_stream_create on the host driver. NULL is the device's legacy default stream. */
typedef void *tn_stream;

typedef enum tn_driver_kind {
    TN_DRIVER_AUTO = 0, /* CUDA where a driver and a device are found, else the host */
    TN_DRIVER_CUDA,
    TN_DRIVER_HOST
} tn_driver_kind;

typedef struct tn_device_config {
    size_t size;               /* sizeof(tn_device_config) */
    tn_driver_kind driver;     /* AUTO also obeys TENURE_DRIVER=auto|cuda|host */
    int ordinal;               /* which device of that driver */
    const char *cuda_library;  /* NULL: TENURE_CUDA_LIBRARY, else libcuda.so.1 */
    size_t memory_limit_bytes; /* host driver: device memory to offer; 0 means 16 GiB */
} tn_device_config;
#define TN_DEVICE_CONFIG_INIT                                                                      \
    { sizeof(tn_device_config), TN_DRIVER_AUTO, 0, NULL, 0 }

typedef struct tn_device_info {
    size_t size;
    tn_driver_kind driver;
    int simulated; /* 1 on the simulated CUDA driver */
    int ordinal;
    int compute_major; /* 9 on Hopper; 0 on the host driver */
    int compute_minor;
    int supports_vmm; /* physical handles that can be mapped: else plain memory */
    char name[128];
    size_t memory_bytes;      /* all of the device's memory */
    size_t granularity_bytes; /* of physical handles; 2 MiB on today's GPUs */
} tn_device_info;
#define TN_DEVICE_INFO_INIT                                                                        \
    { sizeof(tn_device_info), TN_DRIVER_AUTO, 0, 0, 0, 0, 0, "", 0, 0 }

/* Opens a device. A library loaded by path gives the simulated device its own state: two devices
 * of one library and ordinal share that device. Errors: TN_UNSUPPORTED (no such driver; the text
 * says how to get one), TN_INVALID_ARGUMENT (ordinal), TN_DRIVER_ERROR, TN_OUT_OF_HOST_MEMORY. */
TN_API TN_MUST_USE tn_status tn_device_create(const tn_device_config *config, tn_device **out);

/* Closes a device. TN_IN_USE while pools or streams of it exist; the text says how many. If the
 * driver does not take back handles that are kept for pools (TENURE_HANDLE_CACHE), its status: the
 * device is still there and can be destroyed again. */
TN_API tn_status tn_device_destroy(tn_device *device);

TN_API TN_MUST_USE tn_status tn_device_info_get(const tn_device *device, tn_device_info *out);

/* Waits for all work on all streams of the device. */
TN_API TN_MUST_USE tn_status tn_device_synchronize(tn_device *device);

/* Calls into the driver so far, by kind, and what they cost. */
typedef enum tn_driver_call {
    TN_CALL_MEM_CREATE,
    TN_CALL_MEM_RELEASE,
    TN_CALL_ADDRESS_RESERVE,
    TN_CALL_ADDRESS_FREE,
    TN_CALL_MEM_MAP,
    TN_CALL_MEM_SET_ACCESS,
    TN_CALL_MEM_UNMAP,
    TN_CALL_MEM_SHARE, /* export, import */
    TN_CALL_MEM_ALLOC,
    TN_CALL_MEM_FREE,
    TN_CALL_STREAM,      /* create, destroy, query, synchronize */
    TN_CALL_STREAM_WAIT, /* a stream made to wait for an event: no host wait */
    TN_CALL_EVENT,       /* create, destroy */
    TN_CALL_EVENT_RECORD,
    TN_CALL_EVENT_QUERY,
    TN_CALL_EVENT_SYNCHRONIZE,
    TN_CALL_LAUNCH, /* kernels, copies, fills, host tasks */
    TN_CALL_COUNT
} tn_driver_call;

TN_API const char *tn_driver_call_name(tn_driver_call call);

typedef struct tn_driver_stats {
    size_t size;
    uint64_t calls[TN_CALL_COUNT];
    double time_us; /* in the memory calls (create ... free): measured, or of the virtual clock */
    double call_time_us[TN_CALL_COUNT]; /* the same by kind; 0 for other calls */
} tn_driver_stats;
#define TN_DRIVER_STATS_INIT                                                                       \
    {                                                                                              \
        sizeof(tn_driver_stats), {0}, 0.0, { 0 }                                                   \
    }

TN_API TN_MUST_USE tn_status tn_device_driver_stats(const tn_device *device, tn_driver_stats *out);

/* ---- streams ------------------------------------------------------------------------------ */

/* Streams of another library (cudaStream_t) may be used as they are: the driver is asked for their
 * ids at each call, since they may end without a word. These make and end our own. On the host
 * driver a stream is a worker thread that does its work in order. */
TN_API TN_MUST_USE tn_status tn_stream_create(tn_device *device, tn_stream *out);

/* Waits for the stream's work, forgets its uses in every pool, then ends it. */
TN_API tn_status tn_stream_destroy(tn_device *device, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_stream_synchronize(tn_device *device, tn_stream stream);

/* Another library's stream becomes as cheap as our own: the caller promises tn_stream_forget before
 * it is destroyed. That waits for the stream's work and forgets its uses in every pool; the stream
 * lives on. TN_INVALID_STATE if it is known already; TN_INVALID_ARGUMENT for default streams (which
 * have no end), those of other devices, and to forget what was not adopted. */
TN_API TN_MUST_USE tn_status tn_stream_adopt(tn_device *device, tn_stream stream);
TN_API tn_status tn_stream_forget(tn_device *device, tn_stream stream);

/* Work put on `stream` from now on starts after all work that is now on `other`. No host wait. The
 * device's pools hear of it: memory whose uses it covers goes to `stream` without another wait. */
TN_API TN_MUST_USE tn_status tn_stream_wait(tn_device *device, tn_stream stream, tn_stream other);

/* Copies in stream order between any of host and device memory. The host side must stay valid
 * until the stream has done the copy. 0 bytes is success. */
TN_API TN_MUST_USE tn_status tn_copy(tn_device *device, void *dst, const void *src, size_t bytes,
                                     tn_stream stream);

/* Fills device memory with a byte in stream order. */
TN_API TN_MUST_USE tn_status tn_fill(tn_device *device, void *dst, unsigned char byte, size_t bytes,
                                     tn_stream stream);

/* ---- pools -------------------------------------------------------------------------------- */

typedef struct tn_pool tn_pool;

typedef enum tn_pool_backing {
    TN_BACKING_AUTO = 0, /* VMM where the device has it, else PLAIN */
    TN_BACKING_VMM,      /* physical pages mapped into one reserved address range */
    TN_BACKING_PLAIN,    /* segments of the driver's plain memory call */
    TN_BACKING_ASYNC,    /* a memory pool of the driver's own, as behind cudaMallocAsync */
    TN_BACKING_CALLER,   /* segments of the functions in the configuration, such as ncclMemAlloc */
    TN_BACKING_HOST,     /* pageable host memory: see "backings" in tenure_pool.h */
    TN_BACKING_PINNED    /* host memory that devices reach by themselves */
} tn_pool_backing;

/* Backing CALLER: where segments of device memory come from and go to. See tenure_pool.h. */
typedef struct tn_memory_functions {
    tn_status (*alloc)(void *context, size_t bytes, void **out);
    tn_status (*free)(void *context, void *address, size_t bytes);
    void *context;
} tn_memory_functions;

typedef struct tn_pool_config {
    size_t size;
    const char *name; /* shown in reports; copied; NULL means "pool" */
    tn_pool_backing backing;
    size_t limit_bytes;      /* most that the pool may reserve; 0: no limit but the device */
    size_t address_bytes;    /* VMM: addresses to reserve at a time; 0: as the device's memory */
    size_t page_bytes;       /* physical handle size; 0: TENURE_PAGE_BYTES (docs/placement.md) */
    size_t soft_limit_bytes; /* above it, idle memory is used up before the pool grows; 0: none */
    size_t address_limit_bytes; /* VMM: most addresses to reserve; 0: no limit but the driver's */
    uint64_t wait_us_max;       /* longest a request waits on the host for freed memory; 0: 10 s */
    int keep_streams_apart; /* 1: rather grow than make a stream wait for another: more memory */
    tn_memory_functions functions; /* backing CALLER */
    uint64_t decay_us;             /* VMM: memory idle for so long goes back; 0: TENURE_DECAY_MS */
} tn_pool_config;
#define TN_POOL_CONFIG_INIT                                                                        \
    { sizeof(tn_pool_config), NULL, TN_BACKING_AUTO, 0, 0, 0, 0, 0, 0, 0, {NULL, NULL, NULL}, 0 }

TN_API TN_MUST_USE tn_status tn_pool_create(tn_device *device, const tn_pool_config *config,
                                            tn_pool **out);

/* Gives all memory back. TN_LEAK while blocks are live: nothing is destroyed and the text names
 * the largest owners. TN_IN_USE, likewise, while a scope of tensors is of the pool. Waits (bounded)
 * for recorded uses of freed blocks: TN_INVALID_STATE if they do not end. TN_IO if its trace could
 * not be completed; like every failure but TN_LEAK and TN_IN_USE, it may have given memory back,
 * and the call can be made again. NULL is a no-op. */
TN_API tn_status tn_pool_destroy(tn_pool *pool);

/* How long a block is expected to live. A hint for placement only. */
typedef enum tn_lifetime {
    TN_LIFETIME_AUTO = 0,
    TN_LIFETIME_PERSISTENT,
    TN_LIFETIME_STEP,
    TN_LIFETIME_LAYER,
    TN_LIFETIME_OP
} tn_lifetime;

/* A block with one physical handle of its own, its size rounded up to whole granules: for
 * registration with network cards or NCCL. SHAREABLE: such a one that tn_share_export takes. Pools
 * without VMM pages, and graph pools, have none (TN_UNSUPPORTED). */
enum { TN_ALLOC_SINGLE_HANDLE = 1, TN_ALLOC_SHAREABLE = 2 };

typedef struct tn_alloc_options {
    size_t size;
    size_t alignment; /* power of two up to 2 MiB; 0: 512 */
    tn_lifetime lifetime;
    const char *owner; /* shown in leak reports; not copied, must outlive the block */
    const char *site;  /* "file:line" of the call; not copied, likewise */
    unsigned flags;    /* TN_ALLOC_... */
} tn_alloc_options;
#define TN_ALLOC_OPTIONS_INIT                                                                      \
    { sizeof(tn_alloc_options), 0, TN_LIFETIME_AUTO, NULL, NULL, 0 }

/* Allocates `bytes` for use on `stream` at once, in stream order. 0 bytes gives NULL and TN_OK.
 * options may be NULL. The block may have been used before on other streams: then `stream` was
 * made to wait on the device for just that block's uses. Contents are undefined.
 * Errors: TN_OUT_OF_DEVICE_MEMORY (after giving back what is idle; the text is the report of
 * requested, free, cached, pending, largest hole, owners and a hint), TN_OUT_OF_ADDRESS_SPACE,
 * TN_OUT_OF_HOST_MEMORY, TN_INVALID_ARGUMENT, TN_DRIVER_ERROR, TN_INVALID_STATE (the pool is
 * paused; the process exits or is a fork). A stream that captures waits for no other: it gets
 * memory that is ready, else new memory. What its graph uses keep as long as it may be launched, or
 * use a graph pool (tenure_pool.h). */
TN_API TN_MUST_USE tn_status tn_alloc(tn_pool *pool, size_t bytes, tn_stream stream,
                                      const tn_alloc_options *options, void **out);

/* Frees a block in the order of `stream`: its last use there has been put on the stream before.
 * Uses on other streams must have been recorded. NULL is a no-op. An address that no pool gave
 * out, or that was freed before, is TN_INVALID_ARGUMENT and changes nothing. */
TN_API TN_MUST_USE tn_status tn_free(void *block, tn_stream stream);

/* Says that the work put on `stream` up to now uses the block. Call right after putting it
 * there, before tn_free; on the block's own stream it is not needed. */
TN_API TN_MUST_USE tn_status tn_record_use(void *block, tn_stream stream);

/* Size asked for and pool of a live block (either may be NULL). */
TN_API TN_MUST_USE tn_status tn_block_info(const void *block, size_t *bytes, tn_pool **pool);

/* Gives idle memory above keep_bytes back to the driver; writes the bytes given back. What is
 * still in use on the device stays, and is not waited for; but CUDA's call to free PLAIN memory
 * may wait by itself. With TENURE_HANDLE_CACHE the device's cache keeps as much of it as it may,
 * for its other pools, until one is short or the device is destroyed: to this pool it is given
 * back. After a failure a part may be back. released_bytes may be NULL. */
TN_API TN_MUST_USE tn_status tn_pool_trim(tn_pool *pool, size_t keep_bytes, size_t *released_bytes);

/* Every statistic: X(unit, role, name, meaning). One table makes the struct, the text and the JSON
 * of tn_pool_report. The PARTs add up to the WHOLE, to the byte, at all times; they and LEVELs are
 * 0 once all has been given back; PEAKs start again with tn_pool_stats_reset_peaks. */
#define TN_POOL_STATS_TABLE(X)                                                                     \
    X(BYTES, PART, live_bytes, "of blocks in callers' hands, as asked for")                        \
    X(BYTES, PART, cached_bytes, "free in pages without a live block: reusable or returnable")     \
    X(BYTES, PART, pending_bytes, "freed, with uses on other streams not yet known complete")      \
    X(BYTES, PART, partial_bytes, "free in pages with live blocks, and rounding up of sizes")      \
    X(BYTES, PART, driver_held_bytes, "physical memory held but mapped nowhere")                   \
    X(BYTES, WHOLE, reserved_bytes, "physical memory taken from the driver")                       \
    X(BYTES, LEVEL, address_bytes, "addresses reserved")                                           \
    X(BYTES, LEVEL, pinned_bytes, "part of reserved_bytes that is pinned host memory")             \
    X(BYTES, LEVEL, owned_bytes, "part of live_bytes that tensors own: equals the ledger")         \
    X(BYTES, LEVEL, imported_bytes, "of other processes, mapped here: not reserved by this pool")  \
    X(BYTES, LEVEL, paused_bytes, "given up by a pause: the parts add up to reserved and this")    \
    X(BYTES, PEAK, peak_live_bytes, "most live at once")                                           \
    X(BYTES, PEAK, peak_reserved_bytes, "most reserved at once")                                   \
    X(COUNT, LEVEL, live_blocks, "blocks in callers' hands")                                       \
    X(COUNT, OTHER, allocs, "calls that gave a block")                                             \
    X(COUNT, OTHER, frees, "blocks freed")                                                         \
    X(COUNT, OTHER, stream_waits, "device-side waits to reuse a block across streams")             \
    X(COUNT, OTHER, out_of_memory, "calls that failed for want of memory")

typedef size_t tn_stat_BYTES;
typedef uint64_t tn_stat_COUNT;
#define TN_POOL_STATS_FIELD(unit, role, name, meaning) tn_stat_##unit name;
#define TN_POOL_STATS_ZERO(unit, role, name, meaning)  , 0
typedef struct tn_pool_stats {
    size_t size;
    TN_POOL_STATS_TABLE(TN_POOL_STATS_FIELD)
} tn_pool_stats;
#define TN_POOL_STATS_INIT                                                                         \
    { sizeof(tn_pool_stats) TN_POOL_STATS_TABLE(TN_POOL_STATS_ZERO) }

/* Walks the pool's free memory: what of it is pending depends on what streams have done. */
TN_API TN_MUST_USE tn_status tn_pool_stats_get(tn_pool *pool, tn_pool_stats *out);

/* Peaks start again from what is live and reserved now. */
TN_API TN_MUST_USE tn_status tn_pool_stats_reset_peaks(tn_pool *pool);

/* Walks the whole pool: every invariant of docs/design.md, and that the books balance.
 * TN_INVALID_STATE with the first thing that does not hold. For tests and debugging. */
TN_API TN_MUST_USE tn_status tn_pool_check(tn_pool *pool);

TN_API tn_device *tn_pool_device(tn_pool *pool);
TN_API const char *tn_pool_name(const tn_pool *pool);

/* ---- traces ------------------------------------------------------------------------------- */

/* Writes every allocation and free of the pool to a CSV file, gzip if the name ends in .gz, with
 * lines of `op,id,bytes,stream,time_us,address,owner` (docs/tools.md); `tenure replay` plays it.
 * TN_INVALID_STATE if one is being written. The environment variable TENURE_TRACE=FILE does the
 * same for the first pool of a process. */
TN_API TN_MUST_USE tn_status tn_pool_trace_begin(tn_pool *pool, const char *path);

/* Ends and closes the trace; TN_IO if any of it could not be written. */
TN_API TN_MUST_USE tn_status tn_pool_trace_end(tn_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
