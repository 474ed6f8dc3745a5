/* What the files of the CUDA driver share.
 *
 *     driver_cuda_load.c     the library: dlopen, its symbols, and how its failures read
 *     driver_cuda.c          devices: open and close, how each call begins and ends, the table
 *     driver_cuda_memory.c   plain and virtual memory
 *     driver_cuda_stream.c   streams, events and work
 */
#ifndef TENURE_DRIVER_CUDA_H
#define TENURE_DRIVER_CUDA_H

#include "cuda_abi.h"
#include "driver_state.h"
#include "simcuda/simcuda.h"

/* Control calls of the simulated driver; all set or none. */
typedef struct tn__sim_calls {
    int (*launch)(void *stream, const char *kernel, const tnsim_range *ranges, size_t range_count,
                  double duration_us);
    int (*take)(void *stream, const void *address, size_t bytes);
    int (*write_stamp)(const void *address, size_t bytes, uint64_t *out);
    double (*now_us)(void);
    double (*memory_call_us)(void);
} tn__sim_calls;

/* A loaded driver library, one for each path. */
typedef struct tn__cuda_library {
    struct tn__cuda_library *next;
    char *path;
    void *handle;
    long references; /* devices; under the lock of driver_cuda_load.c */
    tn__cu_calls cu;
    tn__sim_calls sim;
    int has_vmm;      /* every VMM symbol is there */
    int is_simulated; /* it has tnsim_launch */
} tn__cuda_library;

struct tn__driver_device {
    tn__call_counts counts;
    tn__cuda_library *library;
    const tn__cu_calls *cu; /* library's */
    void *context;          /* the primary one, retained */
    tn__cu_device device;
    int has_vmm;
    _Atomic(void *) unwanted_mempool; /* could not be set up, nor destroyed so far; NULL: none */
};

/* Loads and initializes the library at the path, or takes one more reference to it. TN_UNSUPPORTED
 * if it can not be loaded, lacks a required symbol (named) or finds no device. */
tn_status tn__cuda_library_open(const char *path, tn__cuda_library **out);

/* Drops a reference. The simulated driver is unloaded with its last one, so that it checks what was
 * left behind; a real driver never is: it may have threads and be in use by others. */
void tn__cuda_library_close(tn__cuda_library *library);

/* The status for a result code of `call`, which is a text with arguments, recorded. */
tn_status tn__cuda_fail(const tn__cuda_library *library, tn_status when_out_of_memory, int code,
                        const char *call);

/* A call between its begin and its end. */
typedef struct tn__cuda_call {
    tn__driver_device *device;
    tn_driver_call kind;
    int is_pushed;     /* the context was not current */
    int is_memory;     /* its time is measured */
    int is_relaxed;    /* it may run while a stream captures */
    int mode_before;   /* the thread's capture mode */
    uint64_t start_ns; /* of the wall clock, or of the simulated one */
} tn__cuda_call;

/* Pass as the kind for calls that are not counted. */
#define TN__CUDA_UNCOUNTED TN_CALL_COUNT

/* Refuses if the driver is gone, counts, and makes the context current. Each success needs its end,
 * on the same thread. */
tn_status tn__cuda_begin(tn__driver_device *device, tn_driver_call kind, tn__cuda_call *call);

/* Undoes what begin did, and turns the result code into a status; the format tells the call. */
tn_status tn__cuda_end(const tn__cuda_call *call, int code, const char *format, ...)
    TN_PRINTF(3, 4);

/* TN_UNSUPPORTED that names the missing symbol, unless it is there. */
#define TN__CUDA_NEED(device, field, name)                                                         \
    do {                                                                                           \
        if (!(device)->cu->field)                                                                  \
            return TN_FAIL(TN_UNSUPPORTED, "%s lacks %s", (device)->library->path, name);          \
    } while (0)

tn_status tn__cuda_mem_alloc(tn__driver_device *device, size_t bytes, void **out);
tn_status tn__cuda_mem_free(tn__driver_device *device, void *address);
tn_status tn__cuda_host_alloc(tn__driver_device *device, size_t bytes, void **out);
tn_status tn__cuda_host_free(tn__driver_device *device, void *address);
tn_status tn__cuda_memory_place(tn__driver_device *device, const void *address,
                                tn__memory_place *out);
tn_status tn__cuda_mempool_create(tn__driver_device *device, size_t maximum_bytes,
                                  tn__mempool *out);
tn_status tn__cuda_mempool_destroy(tn__driver_device *device, tn__mempool pool);

/* Once more for one that mempool_create could not get rid of. A code of the driver. */
int tn__cuda_end_unwanted_mempool(tn__driver_device *device);
tn_status tn__cuda_mempool_alloc(tn__driver_device *device, tn__mempool pool, size_t bytes,
                                 tn_stream stream, void **out);
tn_status tn__cuda_mempool_free(tn__driver_device *device, void *address, tn_stream stream);
tn_status tn__cuda_mempool_trim(tn__driver_device *device, tn__mempool pool, size_t keep_bytes);
tn_status tn__cuda_mempool_reserved(tn__driver_device *device, tn__mempool pool, size_t *out);
tn_status tn__cuda_address_reserve(tn__driver_device *device, size_t bytes, void **out);
tn_status tn__cuda_address_free(tn__driver_device *device, void *address, size_t bytes);
tn_status tn__cuda_mem_create(tn__driver_device *device, size_t bytes, tn__handle *out);
tn_status tn__cuda_mem_release(tn__driver_device *device, tn__handle handle, size_t bytes);
tn_status tn__cuda_mem_map(tn__driver_device *device, void *address, size_t bytes,
                           tn__handle handle);
tn_status tn__cuda_mem_set_access(tn__driver_device *device, void *address, size_t bytes);
tn_status tn__cuda_mem_unmap(tn__driver_device *device, void *address, size_t bytes);
tn_status tn__cuda_peer_can_access(tn__driver_device *device, int peer, int *out);
tn_status tn__cuda_peer_set_access(tn__driver_device *device, void *address, size_t bytes, int peer,
                                   int is_allowed);
tn_status tn__cuda_stream_ordinal(tn__driver_device *device, tn_stream stream, int *out);
tn_status tn__cuda_share_create(tn__driver_device *device, size_t bytes, tn__handle *out);
tn_status tn__cuda_share_export(tn__driver_device *device, tn__handle handle, int *file);
tn_status tn__cuda_share_import(tn__driver_device *device, int file, tn__handle *out);
tn_status tn__cuda_share_ordinal(tn__driver_device *device, tn__handle handle, int *out);
tn_status tn__cuda_uuid(tn__driver_device *device, unsigned char out[16]);

/* TN_UNSUPPORTED where the device has no virtual memory management. */
tn_status tn__cuda_require_vmm(const tn__driver_device *device);

/* Smallest size of physical memory; 2 MiB where the device has no VMM. */
tn_status tn__cuda_granularity(tn__driver_device *device, size_t *out);

/* 1 if the stream captures, so that few calls on it are legal. */
int tn__cuda_is_in_capture(const tn__cu_calls *cu, void *stream);

tn_status tn__cuda_stream_create(tn__driver_device *device, tn_stream *out);
tn_status tn__cuda_stream_destroy(tn__driver_device *device, tn_stream stream);
tn_status tn__cuda_stream_id(tn__driver_device *device, tn_stream stream, uint64_t *out);
tn_status tn__cuda_stream_synchronize(tn__driver_device *device, tn_stream stream);
tn_status tn__cuda_stream_is_capturing(tn__driver_device *device, tn_stream stream, int *out);
tn_status tn__cuda_stream_capture(tn__driver_device *device, tn_stream stream,
                                  tn__capture_status *status, uint64_t *id);
tn_status tn__cuda_event_create(tn__driver_device *device, tn__event *out);
tn_status tn__cuda_event_destroy(tn__driver_device *device, tn__event event);
tn_status tn__cuda_event_record(tn__driver_device *device, tn__event event, tn_stream stream);
tn_status tn__cuda_event_record_outside(tn__driver_device *device, tn__event event,
                                        tn_stream stream);
tn_status tn__cuda_event_record_all(tn__driver_device *device, tn__event event);
tn_status tn__cuda_event_is_done(tn__driver_device *device, tn__event event, int *out);
tn_status tn__cuda_event_synchronize(tn__driver_device *device, tn__event event);
tn_status tn__cuda_stream_wait_event(tn__driver_device *device, tn_stream stream, tn__event event);
tn_status tn__cuda_copy(tn__driver_device *device, void *dst, const void *src, size_t bytes,
                        tn_stream stream);
tn_status tn__cuda_copy_rows(tn__driver_device *device, const tn__row_copy *rows, tn_stream stream);
tn_status tn__cuda_fill(tn__driver_device *device, void *dst, unsigned char byte, size_t bytes,
                        tn_stream stream);
tn_status tn__cuda_host_task(tn__driver_device *device, tn__host_task task, void *argument,
                             tn_stream stream);
tn_status tn__cuda_stream_wait_value(tn__driver_device *device, tn_stream stream,
                                     const uint32_t *word, uint32_t value);
tn_status tn__cuda_module_load(tn__driver_device *device, const void *image, void **out);
tn_status tn__cuda_module_unload(tn__driver_device *device, void *module);
tn_status tn__cuda_module_function(tn__driver_device *device, void *module, const char *name,
                                   tn__function *out);
tn_status tn__cuda_multiprocessors(tn__driver_device *device, int *out);
tn_status tn__cuda_shared_max_set(tn__driver_device *device, tn__function function, unsigned bytes);
tn_status tn__cuda_blocks_at_once(tn__driver_device *device, tn__function function,
                                  unsigned threads, unsigned shared_bytes, int64_t *out);
tn_status tn__cuda_box_map(tn__driver_device *device, const tn__boxes *boxes, void *out);
tn_status tn__cuda_box_map_check(const tn__driver_device *device);
tn_status tn__cuda_launch(tn__driver_device *device, tn__function function,
                          const tn__launch *launch, tn_stream stream);
tn_status tn__cuda_ghost_launch(tn__driver_device *device, const char *kernel,
                                const tn__range *ranges, size_t range_count, double duration_us,
                                tn_stream stream);
tn_status tn__cuda_note_take(tn__driver_device *device, const void *address, size_t bytes,
                             tn_stream stream);
tn_status tn__cuda_write_stamp(tn__driver_device *device, const void *address, size_t bytes,
                               uint64_t *out);

#endif
