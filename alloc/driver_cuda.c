/* The CUDA driver: one code path for a GPU and for the simulated library.
 *
 * A device holds its primary context, the one that the runtime API and the frameworks use too. Each
 * call makes that context current on its thread if it is not, and puts the old one back, so that a
 * caller's own choice of device is never changed.
 *
 * Invariant: a call that failed took no effect. So what follows a call that did take effect
 * (putting the context back) is not allowed to fail it.
 */
#include "driver_cuda.h"
#include "host_alloc.h"
#include "options.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

/* ---- a call -------------------------------------------------------------------------------- */

static int is_memory_call(tn_driver_call kind) { return kind <= TN_CALL_MEM_FREE; }

static uint64_t memory_clock_ns(const tn__driver_device *device) {
    if (!device->library->is_simulated) return tn__clock_ns();
    return (uint64_t)llround(device->library->sim.memory_call_us() * 1000.0);
}

static tn_status make_current(tn__driver_device *device, int *is_pushed) {
    void *current = NULL;
    int code = device->cu->context_current(&current);
    *is_pushed = 0;
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(device->library, TN_DRIVER_ERROR, code, "cuCtxGetCurrent()");
    if (current == device->context) return TN_OK;
    code = device->cu->context_push(device->context);
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(device->library, TN_DRIVER_ERROR, code, "cuCtxPushCurrent()");
    *is_pushed = 1;
    return TN_OK;
}

/* While some stream captures, calls on memory and questions about events are refused, and end the
 * capture, unless their thread is in relaxed mode. So may be what is not counted: how much memory
 * there is, modules loaded. */
static int needs_relaxed_mode(tn_driver_call kind) {
    return is_memory_call(kind) || kind == TN_CALL_EVENT_QUERY ||
           kind == TN_CALL_EVENT_SYNCHRONIZE || kind == TN__CUDA_UNCOUNTED;
}

static int exchange_capture_mode(const tn__driver_device *device, int mode) {
    if (device->cu->capture_mode) (void)device->cu->capture_mode(&mode);
    return mode;
}

tn_status tn__cuda_begin(tn__driver_device *device, tn_driver_call kind, tn__cuda_call *call) {
    if (tn__driver_is_gone()) {
        int is_named = kind != TN__CUDA_UNCOUNTED;
        return tn__driver_require_present(is_named ? tn_driver_call_name(kind) : "a driver call");
    }
    *call = (tn__cuda_call){.device = device,
                            .kind = kind,
                            .is_memory = is_memory_call(kind),
                            .is_relaxed = needs_relaxed_mode(kind)};
    TN_TRY(make_current(device, &call->is_pushed));
    if (kind != TN__CUDA_UNCOUNTED) tn__count_call(&device->counts, kind);
    if (call->is_relaxed) {
        call->mode_before = exchange_capture_mode(device, TN__CU_STREAM_CAPTURE_MODE_RELAXED);
    }
    if (call->is_memory) call->start_ns = memory_clock_ns(device);
    return TN_OK;
}

tn_status tn__cuda_end(const tn__cuda_call *call, int code, const char *format, ...) {
    tn__driver_device *device = call->device;
    if (call->is_memory) {
        tn__count_memory_ns(&device->counts, call->kind, memory_clock_ns(device) - call->start_ns);
    }
    if (call->is_relaxed) (void)exchange_capture_mode(device, call->mode_before);
    if (call->is_pushed) {
        void *ours;
        (void)device->cu->context_pop(&ours);
    }
    if (code == TN__CU_SUCCESS) return TN_OK;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    int is_address = call->kind == TN_CALL_ADDRESS_RESERVE;
    return tn__cuda_fail(device->library,
                         is_address ? TN_OUT_OF_ADDRESS_SPACE : TN_OUT_OF_DEVICE_MEMORY, code,
                         text);
}

/* ---- devices ------------------------------------------------------------------------------- */

typedef struct attribute_row {
    int attribute;
    int *value;
} attribute_row;

static tn_status read_properties(tn__driver_device *device, tn_device_info *info) {
    const attribute_row rows[] = {
        {TN__CU_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &info->compute_major},
        {TN__CU_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &info->compute_minor},
        {TN__CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, &info->supports_vmm},
    };
    const tn__cuda_library *library = device->library;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int code = device->cu->device_attribute(rows[i].value, rows[i].attribute, device->device);
        if (code != TN__CU_SUCCESS)
            return tn__cuda_fail(library, TN_DRIVER_ERROR, code, "cuDeviceGetAttribute()");
    }
    int code = device->cu->device_name(info->name, (int)sizeof info->name, device->device);
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(library, TN_DRIVER_ERROR, code, "cuDeviceGetName()");
    code = device->cu->device_memory(&info->memory_bytes, device->device);
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(library, TN_DRIVER_ERROR, code, "cuDeviceTotalMem()");
    info->supports_vmm = info->supports_vmm && library->has_vmm;
    device->has_vmm = info->supports_vmm;
    return TN_OK;
}

static tn_status find_device(tn__driver_device *device, int ordinal) {
    int count = 0;
    int code = device->cu->device_count(&count);
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(device->library, TN_DRIVER_ERROR, code, "cuDeviceGetCount()");
    TN_REQUIRE(ordinal < count, "device %d: %s has %d, counted from 0", ordinal,
               device->library->path, count);
    code = device->cu->device_get(&device->device, ordinal);
    if (code != TN__CU_SUCCESS)
        return tn__cuda_fail(device->library, TN_DRIVER_ERROR, code, "cuDeviceGet()");
    return TN_OK;
}

static tn_status open_device(tn__driver_device *device, const tn_device_config *config,
                             tn_device_info *info) {
    tn_device_info found = TN_DEVICE_INFO_INIT;
    TN_TRY(find_device(device, config->ordinal));
    int code = device->cu->context_retain(&device->context, device->device);
    if (code != TN__CU_SUCCESS) {
        device->context = NULL;
        return tn__cuda_fail(device->library, TN_OUT_OF_DEVICE_MEMORY, code,
                             "cuDevicePrimaryCtxRetain()");
    }
    TN_TRY(read_properties(device, &found));
    TN_TRY(tn__cuda_granularity(device, &found.granularity_bytes));
    found.driver = TN_DRIVER_CUDA;
    found.simulated = device->library->is_simulated;
    found.ordinal = config->ordinal;
    *info = found;
    return TN_OK;
}

static void close_device(tn__driver_device *device) {
    if (device->context) (void)tn__cuda_end_unwanted_mempool(device);
    if (device->context) (void)device->cu->context_release(device->device);
    tn__cuda_library_close(device->library);
    tn__host_free(device);
}

static tn_status cuda_open(const tn_device_config *config, tn_device_info *info,
                           tn__driver_device **out) {
    TN_TRY(tn__driver_require_present("opening a CUDA device"));
    const char *path = config->cuda_library;
    if (!path) path = tn__options_get()->cuda_library;
    tn__cuda_library *library;
    TN_TRY(tn__cuda_library_open(path, &library));
    tn__driver_device *device = tn__host_alloc(1, sizeof *device);
    if (!device) {
        tn__cuda_library_close(library);
        return TN_OUT_OF_HOST_MEMORY;
    }
    device->library = library;
    device->cu = &library->cu;
    tn_status status = tn__driver_watch_process();
    if (status == TN_OK) status = open_device(device, config, info);
    if (status != TN_OK) {
        close_device(device);
        return status;
    }
    *out = device;
    return TN_OK;
}

static void cuda_close(tn__driver_device *device) {
    if (!tn__driver_is_gone()) close_device(device);
}

static tn_status cuda_memory_info(tn__driver_device *device, size_t *free_bytes,
                                  size_t *total_bytes) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN__CUDA_UNCOUNTED, &call));
    int code = device->cu->mem_info(free_bytes, total_bytes);
    return tn__cuda_end(&call, code, "cuMemGetInfo()");
}

static tn_status cuda_synchronize(tn__driver_device *device) {
    tn__cuda_call call;
    TN_TRY(tn__cuda_begin(device, TN_CALL_STREAM, &call));
    int code = device->cu->context_synchronize();
    return tn__cuda_end(&call, code, "cuCtxSynchronize()");
}

static tn_status cuda_make_current(tn__driver_device *device) {
    TN_TRY(tn__driver_require_present("make_current"));
    int code = device->cu->context_set(device->context);
    if (code == TN__CU_SUCCESS) return TN_OK;
    return tn__cuda_fail(device->library, TN_DRIVER_ERROR, code, "cuCtxSetCurrent()");
}

static tn_status cuda_with_current(tn__driver_device *device, tn__host_task task, void *argument) {
    int is_pushed = 0;
    TN_TRY(tn__driver_require_present("with_current"));
    TN_TRY(make_current(device, &is_pushed));
    task(argument);
    if (is_pushed) {
        void *ours;
        (void)device->cu->context_pop(&ours);
    }
    return TN_OK;
}

static double cuda_now_us(tn__driver_device *device) {
    const tn__cuda_library *library = device->library;
    if (library->is_simulated && !tn__driver_is_gone()) return library->sim.now_us();
    return (double)tn__clock_ns() / 1000.0;
}

static tn_status cuda_stats(tn__driver_device *device, tn_driver_stats *out) {
    tn__call_counts_read(&device->counts, out);
    return TN_OK;
}

const tn__driver tn__driver_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .memory_info = cuda_memory_info,
    .synchronize = cuda_synchronize,
    .mem_alloc = tn__cuda_mem_alloc,
    .mem_free = tn__cuda_mem_free,
    .host_alloc = tn__cuda_host_alloc,
    .host_free = tn__cuda_host_free,
    .memory_place = tn__cuda_memory_place,
    .mempool_create = tn__cuda_mempool_create,
    .mempool_destroy = tn__cuda_mempool_destroy,
    .mempool_alloc = tn__cuda_mempool_alloc,
    .mempool_free = tn__cuda_mempool_free,
    .mempool_trim = tn__cuda_mempool_trim,
    .mempool_reserved = tn__cuda_mempool_reserved,
    .address_reserve = tn__cuda_address_reserve,
    .address_free = tn__cuda_address_free,
    .mem_create = tn__cuda_mem_create,
    .mem_release = tn__cuda_mem_release,
    .mem_map = tn__cuda_mem_map,
    .mem_set_access = tn__cuda_mem_set_access,
    .mem_unmap = tn__cuda_mem_unmap,
    .peer_can_access = tn__cuda_peer_can_access,
    .peer_set_access = tn__cuda_peer_set_access,
    .stream_ordinal = tn__cuda_stream_ordinal,
    .share_create = tn__cuda_share_create,
    .share_export = tn__cuda_share_export,
    .share_import = tn__cuda_share_import,
    .share_ordinal = tn__cuda_share_ordinal,
    .uuid = tn__cuda_uuid,
    .stream_create = tn__cuda_stream_create,
    .stream_destroy = tn__cuda_stream_destroy,
    .stream_id = tn__cuda_stream_id,
    .stream_synchronize = tn__cuda_stream_synchronize,
    .stream_is_capturing = tn__cuda_stream_is_capturing,
    .stream_capture = tn__cuda_stream_capture,
    .event_create = tn__cuda_event_create,
    .event_destroy = tn__cuda_event_destroy,
    .event_record = tn__cuda_event_record,
    .event_record_outside = tn__cuda_event_record_outside,
    .event_record_all = tn__cuda_event_record_all,
    .event_is_done = tn__cuda_event_is_done,
    .event_synchronize = tn__cuda_event_synchronize,
    .stream_wait_event = tn__cuda_stream_wait_event,
    .copy = tn__cuda_copy,
    .copy_rows = tn__cuda_copy_rows,
    .fill = tn__cuda_fill,
    .host_task = tn__cuda_host_task,
    .stream_wait_value = tn__cuda_stream_wait_value,
    .module_load = tn__cuda_module_load,
    .module_unload = tn__cuda_module_unload,
    .module_function = tn__cuda_module_function,
    .launch = tn__cuda_launch,
    .multiprocessors = tn__cuda_multiprocessors,
    .shared_max_set = tn__cuda_shared_max_set,
    .blocks_at_once = tn__cuda_blocks_at_once,
    .box_map = tn__cuda_box_map,
    .box_map_check = tn__cuda_box_map_check,
    .make_current = cuda_make_current,
    .with_current = cuda_with_current,
    .ghost_launch = tn__cuda_ghost_launch,
    .note_take = tn__cuda_note_take,
    .write_stamp = tn__cuda_write_stamp,
    .now_us = cuda_now_us,
    .stats = cuda_stats,
};
