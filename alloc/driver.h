/* One table of calls to a device; the only way that anything above reaches one.
 *
 *     driver_cuda.c   the CUDA driver API through dlopen: a GPU, or the simulated library
 *     driver_host.c   the CPU: jemalloc memory, worker threads as streams
 *
 * Rules: every call returns a tn_status and on failure has recorded the failed call by name with
 * the native code (tn__fail) and cleared any sticky error of the driver. Calls are thread-safe
 * and make the right device current themselves. Each is counted in the device's statistics.
 * Sizes and addresses of the VMM calls are multiples of the granularity. A `tn_stream` that the
 * driver does not know is the caller's fault: the driver may return TN_INVALID_ARGUMENT.
 */
#ifndef TENURE_DRIVER_H
#define TENURE_DRIVER_H

#include "error.h"

typedef struct tn__driver_device tn__driver_device; /* a driver's own state for one device */
typedef uint64_t tn__handle;                        /* physical memory */
typedef void *tn__event;
typedef void *tn__mempool;  /* a memory pool of the driver's own */
typedef void *tn__function; /* a kernel of a loaded module */
typedef void (*tn__host_task)(void *argument);

/* What a simulated kernel does to memory: enough to find races and to model time. */
typedef struct tn__range {
    const void *address;
    size_t bytes;
    int is_write;
} tn__range;

enum { TN__BOX_MAP_BYTES = 128 };

/* A matrix, and the boxes of it that a kernel has moved between it and shared memory. Of 4 bytes an
 * element is an fp32 number, as far as boxes are added to it. */
typedef struct tn__boxes {
    const void *data; /* at a multiple of 16 bytes, as is each of its rows, which are contiguous */
    int64_t rows, cols;
    int element_bytes; /* 1, 2 or 4 */
    int box_rows, box_cols;
    int is_swizzled; /* rows of a box are 128 bytes, the 16-byte pieces of row r in the order
                        piece ^ r % 8; else in their own */
} tn__boxes;

/* Rows of a matrix that may lie in wider ones. */
typedef struct tn__row_copy {
    void *dst;
    size_t dst_stride; /* bytes from one row to the next: row_bytes or more */
    const void *src;
    size_t src_stride;
    size_t row_bytes;
    size_t rows;
} tn__row_copy;

typedef struct tn__launch {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes; /* beyond what the kernel declares; above 48 KiB: see shared_max_set */
    unsigned cluster;      /* blocks in a row that get multiprocessors next to each other; 0: any */
    void **parameters;     /* addresses of the kernel's arguments, as cuLaunchKernel takes them */
    int is_together;  /* its blocks wait for each other: all of them get their places at once, or
                      * none yet. More than the device holds fail. Not with the two others */
    int starts_early; /* the kernel waits itself for the one ahead of it on the stream, and may be
                        * put on the device before that has ended, where the driver can */
} tn__launch;

typedef enum tn__memory_place {
    TN__PLACE_UNTOLD, /* this driver lacks the call that tells */
    TN__PLACE_NONE,   /* no memory that any device reaches */
    TN__PLACE_DEVICE, /* this device's */
    TN__PLACE_PEER,   /* another device's */
    TN__PLACE_HOST    /* host memory that is locked in place */
} tn__memory_place;

/* A stream id with this bit is that of a stream in a capture, which can not be asked for its own:
 * it is no other stream's, and not the stream's outside of the capture. */
#define TN__STREAM_ID_IN_CAPTURE ((uint64_t)1 << 63)

typedef enum tn__capture_status {
    TN__CAPTURE_NONE,
    TN__CAPTURE_ACTIVE,
    TN__CAPTURE_INVALID /* something forbidden was done: no graph will come of it */
} tn__capture_status;

typedef struct tn__driver {
    const char *name; /* "cuda" or "host" */

    /* Opens a device; info is filled. Closing a device after the driver is gone is a no-op. */
    tn_status (*open)(const tn_device_config *config, tn_device_info *info,
                      tn__driver_device **out);
    void (*close)(tn__driver_device *device);
    tn_status (*memory_info)(tn__driver_device *device, size_t *free_bytes, size_t *total_bytes);
    tn_status (*synchronize)(tn__driver_device *device);

    /* Plain memory. Out of memory is TN_OUT_OF_DEVICE_MEMORY. */
    tn_status (*mem_alloc)(tn__driver_device *device, size_t bytes, void **out);
    tn_status (*mem_free)(tn__driver_device *device, void *address);

    /* Host memory that is locked in place, so that devices reach it by themselves; its address is
     * the same on the host and on every device. */
    tn_status (*host_alloc)(tn__driver_device *device, size_t bytes, void **out);
    tn_status (*host_free)(tn__driver_device *device, void *address);

    /* Where an address points to; NULL where the driver can not tell (the host driver). */
    tn_status (*memory_place)(tn__driver_device *device, const void *address,
                              tn__memory_place *out);

    /* Memory pools of the driver's own; NULL on the host driver. Memory is given and taken back in
     * the order of the stream, and kept by the pool until it is trimmed: its release threshold is
     * set to the most. maximum_bytes: never more than that, where the driver can see to it (CUDA
     * 12.2); 0: no maximum. reserved: physical memory of the pool, in use or not. */
    tn_status (*mempool_create)(tn__driver_device *device, size_t maximum_bytes, tn__mempool *out);
    tn_status (*mempool_destroy)(tn__driver_device *device, tn__mempool pool);
    tn_status (*mempool_alloc)(tn__driver_device *device, tn__mempool pool, size_t bytes,
                               tn_stream stream, void **out);
    tn_status (*mempool_free)(tn__driver_device *device, void *address, tn_stream stream);
    /* Gives back what is free and known to the host as complete, above keep_bytes. */
    tn_status (*mempool_trim)(tn__driver_device *device, tn__mempool pool, size_t keep_bytes);
    tn_status (*mempool_reserved)(tn__driver_device *device, tn__mempool pool, size_t *out);

    /* Virtual memory management; NULL where info.supports_vmm is 0. One handle maps whole. */
    tn_status (*address_reserve)(tn__driver_device *device, size_t bytes, void **out);
    tn_status (*address_free)(tn__driver_device *device, void *address, size_t bytes);
    tn_status (*mem_create)(tn__driver_device *device, size_t bytes, tn__handle *out);
    tn_status (*mem_release)(tn__driver_device *device, tn__handle handle, size_t bytes);
    tn_status (*mem_map)(tn__driver_device *device, void *address, size_t bytes, tn__handle handle);
    tn_status (*mem_set_access)(tn__driver_device *device, void *address, size_t bytes);
    tn_status (*mem_unmap)(tn__driver_device *device, void *address, size_t bytes);

    /* Other devices of the same driver, by ordinal. peer_can_access: may `peer` be given access to
     * this device's memory? peer_set_access: gives (or takes) it, for mapped memory.
     * stream_ordinal: the device that the stream belongs to. NULL where info.supports_vmm is 0. */
    tn_status (*peer_can_access)(tn__driver_device *device, int peer, int *out);
    tn_status (*peer_set_access)(tn__driver_device *device, void *address, size_t bytes, int peer,
                                 int is_allowed);
    tn_status (*stream_ordinal)(tn__driver_device *device, tn_stream stream, int *out);

    /* Physical memory for other processes: made so that it can be exported as a file descriptor,
     * which the caller closes; taken in from one, which stays the caller's. Otherwise as
     * mem_create. TN_UNSUPPORTED where the driver can not; NULL where info.supports_vmm is 0.
     * share_ordinal: the device that the memory is on. uuid: which GPU this is, for every process;
     * all 0 if the driver can not tell. */
    tn_status (*share_create)(tn__driver_device *device, size_t bytes, tn__handle *out);
    tn_status (*share_export)(tn__driver_device *device, tn__handle handle, int *file);
    tn_status (*share_import)(tn__driver_device *device, int file, tn__handle *out);
    tn_status (*share_ordinal)(tn__driver_device *device, tn__handle handle, int *out);
    tn_status (*uuid)(tn__driver_device *device, unsigned char out[16]);

    /* Streams and events. stream_id tells apart streams that share a handle value (per-thread
     * default streams) or re-use one (destroyed and made again); it never repeats. */
    tn_status (*stream_create)(tn__driver_device *device, tn_stream *out);
    tn_status (*stream_destroy)(tn__driver_device *device, tn_stream stream);
    tn_status (*stream_id)(tn__driver_device *device, tn_stream stream, uint64_t *out);
    tn_status (*stream_synchronize)(tn__driver_device *device, tn_stream stream);
    tn_status (*stream_is_capturing)(tn__driver_device *device, tn_stream stream, int *out);
    /* CUDA only, else NULL: the capture that the stream is in; its number never repeats. */
    tn_status (*stream_capture)(tn__driver_device *device, tn_stream stream,
                                tn__capture_status *status, uint64_t *id);
    tn_status (*event_create)(tn__driver_device *device, tn__event *out);
    tn_status (*event_destroy)(tn__driver_device *device, tn__event event);
    tn_status (*event_record)(tn__driver_device *device, tn__event event, tn_stream stream);
    /* Of a stream that did not capture when it was asked last. TN_INVALID_STATE if it does by now,
     * since another thread has begun a capture: the event may be the capture's, which whoever waits
     * for it would join, and whoever queries it spoils. It can be recorded anew, or destroyed. */
    tn_status (*event_record_outside)(tn__driver_device *device, tn__event event, tn_stream stream);
    /* CUDA only, else NULL: behind all work that any stream of the device has now, those too that
     * nobody here can name. Spoils every capture that is under way on the device. TN_UNSUPPORTED
     * where the driver lacks the call (before CUDA 12.5). */
    tn_status (*event_record_all)(tn__driver_device *device, tn__event event);
    tn_status (*event_is_done)(tn__driver_device *device, tn__event event, int *out);
    tn_status (*event_synchronize)(tn__driver_device *device, tn__event event);
    tn_status (*stream_wait_event)(tn__driver_device *device, tn_stream stream, tn__event event);

    /* Work in stream order. */
    tn_status (*copy)(tn__driver_device *device, void *dst, const void *src, size_t bytes,
                      tn_stream stream);
    tn_status (*copy_rows)(tn__driver_device *device, const tn__row_copy *rows, tn_stream stream);
    tn_status (*fill)(tn__driver_device *device, void *dst, unsigned char byte, size_t bytes,
                      tn_stream stream);
    /* Runs task(argument) in stream order on a host thread; the task makes no driver call. */
    tn_status (*host_task)(tn__driver_device *device, tn__host_task task, void *argument,
                           tn_stream stream);
    /* CUDA only, else NULL: what is put on the stream from now on starts once the host has made
     * *word, which is in memory of host_alloc, at least `value`. Numbers go round: those up to
     * 2^31 - 1 ahead are at least it. Such a wait is no order that the driver knows: what the
     * host does before it writes must not wait for work that is put on another stream later.
     * TN_UNSUPPORTED where the driver lacks the call (before CUDA 11.7). */
    tn_status (*stream_wait_value)(tn__driver_device *device, tn_stream stream,
                                   const uint32_t *word, uint32_t value);
    /* Real CUDA only, else NULL: a module (cubin, fatbin or PTX image), its kernels, a launch. */
    tn_status (*module_load)(tn__driver_device *device, const void *image, void **out);
    tn_status (*module_unload)(tn__driver_device *device, void *module);
    tn_status (*module_function)(tn__driver_device *device, void *module, const char *name,
                                 tn__function *out);
    tn_status (*launch)(tn__driver_device *device, tn__function function, const tn__launch *launch,
                        tn_stream stream);
    /* Real CUDA only, else NULL: how many multiprocessors the device has; shared memory that
     * launches of the kernel may ask for; what a kernel needs to have boxes of a matrix moved:
     * TN__BOX_MAP_BYTES, at a multiple of 64. TN_UNSUPPORTED where the driver lacks the call, which
     * box_map_check tells beforehand. */
    tn_status (*multiprocessors)(tn__driver_device *device, int *out);
    tn_status (*shared_max_set)(tn__driver_device *device, tn__function function, unsigned bytes);
    /* Real CUDA only, else NULL: how many of such blocks of the kernel the device holds at once. */
    tn_status (*blocks_at_once)(tn__driver_device *device, tn__function function, unsigned threads,
                                unsigned shared_bytes, int64_t *out);
    tn_status (*box_map)(tn__driver_device *device, const tn__boxes *boxes, void *out);
    tn_status (*box_map_check)(const tn__driver_device *device);
    /* Makes the device current on this thread for libraries that need it (cuBLASLt, NCCL). */
    tn_status (*make_current)(tn__driver_device *device);
    /* CUDA only, else NULL: runs task(argument) here and now with the device current, and leaves
     * current what was before. */
    tn_status (*with_current)(tn__driver_device *device, tn__host_task task, void *argument);
    /* Simulated CUDA only, else NULL: declares a kernel that touches ranges for duration_us. */
    tn_status (*ghost_launch)(tn__driver_device *device, const char *kernel,
                              const tn__range *ranges, size_t range_count, double duration_us,
                              tn_stream stream);
    /* Simulated CUDA only, else NULL: a pool hands [address, +bytes) out for use on `stream`; what
     * touched it before must happen-before this point. Costs no virtual time. */
    tn_status (*note_take)(tn__driver_device *device, const void *address, size_t bytes,
                           tn_stream stream);
    /* Simulated CUDA only, else NULL: a number that is another one once work that was put on any
     * stream meanwhile writes to [address, +bytes). Costs no virtual time. */
    tn_status (*write_stamp)(tn__driver_device *device, const void *address, size_t bytes,
                             uint64_t *out);
    /* Microseconds since some start: the wall clock, or the simulated device's virtual clock
     * as the host sees it. */
    double (*now_us)(tn__driver_device *device);

    tn_status (*stats)(tn__driver_device *device, tn_driver_stats *out);
} tn__driver;

TN_SISTER_API extern const tn__driver tn__driver_cuda;
TN_SISTER_API extern const tn__driver tn__driver_host;

/* What a tn_device is, for the layers of this library: see device.c. */
TN_SISTER_API const tn__driver *tn__device_driver(const tn_device *device);
TN_SISTER_API tn__driver_device *tn__device_state(const tn_device *device);

/* Before a wait for all work of the device, in a call that otherwise never waits; after TN_OK the
 * wait is made and tn__driver_wait_end (no_wait.h) follows. TN_INVALID_STATE in a no-wait time, and
 * while a capture is known of that the wait would spoil: one that is open in a graph pool, and any
 * that a stream is in that was made or adopted here or that the legacy stream comes after. Streams
 * that may be gone are not asked. */
tn_status tn__device_wait_begin(tn_device *device);

/* Counts users (pools) that keep tn_device_destroy from closing the device. */
TN_SISTER_API void tn__device_retain(tn_device *device);
TN_SISTER_API void tn__device_release(tn_device *device);

/* What a layer above keeps for a device (loaded kernels, a library's handle), one per key: the
 * device calls `end` when it is destroyed, before its driver closes, and `end` frees it. `empty`
 * comes before all ends, may fail, and then the device stays; NULL: nothing to do. Looking one up
 * takes no lock; the caller sees to it that no key is attached twice. */
typedef struct tn__attachment {
    struct tn__attachment *next;
    const void *key; /* an address of the layer's own */
    tn_status (*empty)(struct tn__attachment *attachment);
    void (*end)(struct tn__attachment *attachment);
} tn__attachment;
TN_SISTER_API tn__attachment *tn__device_attachment(tn_device *device, const void *key);
TN_SISTER_API void tn__device_attach(tn_device *device, tn__attachment *attachment);

/* 1 once driver calls must no longer be made: after exit began or in a forked child. */
TN_SISTER_API int tn__driver_is_gone(void);

/* TN_INVALID_STATE in a forked child. For calls that make no driver call but take a lock: there it
 * may be one that a thread of the parent had, in the middle of a change. */
tn_status tn__driver_refuse_fork(const char *call);

/* A pool asks to hear when one of our streams ends (after its work is done). The callback runs
 * with no lock of device.c held. */
typedef void (*tn__stream_end_callback)(void *argument, tn_stream stream, uint64_t stream_id);
tn_status tn__device_watch_streams(tn_device *device, tn__stream_end_callback callback,
                                   void *argument);
/* tn_stream_wait: work put on `stream` from now on comes after all that is on `other`. */
typedef struct tn__user_wait {
    uint64_t number; /* no other wait has it */
    tn_stream stream;
    tn_stream other;
    int is_put; /* 0: the event for it is about to be recorded */
} tn__user_wait;

/* The same of streams that did not capture when they were asked last. TN_INVALID_STATE if `other`
 * does by now, since another thread has begun a capture there: no wait is put. */
tn_status tn__stream_wait_outside(tn_device *device, tn_stream stream, tn_stream other);

/* One of 64 bits for a stream's handle: both names of the legacy stream have the same. */
static inline uint64_t tn__stream_bit(tn_stream stream) {
    const uintptr_t legacy = 1;
    uint64_t handle = (uintptr_t)stream == legacy ? 0 : (uint64_t)(uintptr_t)stream;
    return (uint64_t)1 << (handle * 0x9E3779B97F4A7C15u >> 58);
}

/* Who watches (the argument tells) hears of such waits, too, if *known_bits has the bits of both
 * streams: before the event is recorded, and once the wait is on the stream; not of those in a
 * capture, nor a second time of one that failed. A few at most hear of one wait. */
typedef void (*tn__user_wait_callback)(void *argument, const tn__user_wait *wait);
void tn__device_watch_waits(tn_device *device, tn__user_wait_callback callback,
                            const _Atomic uint64_t *known_bits, const void *argument);

/* Waits for a callback under way: the caller holds no lock that its callback takes. */
void tn__device_unwatch_streams(tn_device *device, void *argument);

/* 1 if the stream was made by tn_stream_create of this device: then its end is told to watchers. */
int tn__device_owns_stream(tn_device *device, tn_stream stream);

#endif
