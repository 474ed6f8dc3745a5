/* cuMemAlloc, cuMemFree and what goes with them: see dropin.h. */
#include <string.h>

#include "dropin.h"
#include "host_alloc.h"
#include "page_map.h"

/* Rows of cuMemAllocPitch begin at multiples of this, as the driver has them on today's GPUs. */
#define PITCH_BYTES ((size_t)512)

/* ---- allocations ----------------------------------------------------------------------------- */

/* Memory that is given out in the order of `idle`, which had to wait for something, is idle when
 * `idle` has come to it. If that can not be known nobody gets it. */
static tn_status settle(tn__dropin_device *device, void *address) {
    tn_status status = tn_stream_synchronize(device->device, device->idle);
    if (status != TN_OK && tn_free(address, device->idle) != TN_OK) {
        tn__dropin_count(&tn__dropin.counts.lost);
    }
    return status;
}

/* What the stream pool has, when nothing else is left. It may be in the order of other streams. */
static tn_status take_from_stream_pool(tn__dropin_device *device, tn__dropin_block *block) {
    void *address = NULL;
    if (!device->stream_pool) return TN_OUT_OF_DEVICE_MEMORY;
    TN_TRY(tn_alloc(device->stream_pool, block->bytes, device->idle, NULL, &address));
    block->kind = TN__DROPIN_STREAM;
    block->address = (uintptr_t)address;
    return settle(device, address);
}

/* In segments large blocks would fragment; pages move; of the driver's pools memory comes in the
 * order of `idle`. */
static tn_status take(tn__dropin_device *device, tn__dropin_block *block) {
    void *address = NULL;
    if (block->bytes >= TN__DROPIN_WHOLE_BYTES && tn__dropin.backing == TN_BACKING_PLAIN) {
        block->kind = TN__DROPIN_WHOLE;
        return tn__dropin_whole_take(device, block);
    }
    TN_TRY(tn_alloc(device->pool, block->bytes, device->idle, NULL, &address));
    if (tn__dropin.backing == TN_BACKING_ASYNC) TN_TRY(settle(device, address));
    block->address = (uintptr_t)address;
    return TN_OK;
}

/* Each step gives something back and tries again. */
static tn_status take_or_make_room(tn__dropin_device *device, tn__dropin_block *block) {
    tn_status status;
    tn__dropin_fence_poll(device);
    status = take(device, block);
    if (status != TN_OUT_OF_DEVICE_MEMORY || block->bytes > device->memory_bytes) return status;
    tn__dropin_count(&tn__dropin.counts.retries);
    tn__dropin_fence_drain(device);
    status = take(device, block);
    if (status != TN_OUT_OF_DEVICE_MEMORY) return status;
    if (tn__dropin_give_back()) status = take(device, block);
    if (status != TN_OUT_OF_DEVICE_MEMORY) return status;
    return take_from_stream_pool(device, block);
}

tn__dropin_block *tn__dropin_new_block(tn__dropin_kind kind, tn__dropin_device *device,
                                       size_t bytes) {
    tn__dropin_block *block = tn__host_alloc(1, sizeof *block);
    if (!block) return NULL;
    block->kind = kind;
    block->device = device;
    block->bytes = bytes;
    return block;
}

tn__cu_result tn__dropin_alloc(tn__dropin_device *device, size_t bytes, tn__cu_address *out) {
    tn__dropin_block *block = tn__dropin_new_block(TN__DROPIN_IDLE, device, bytes);
    tn_status status = block ? take_or_make_room(device, block) : TN_OUT_OF_HOST_MEMORY;
    if (status != TN_OK) {
        tn__host_free(block);
        if (status != TN_OUT_OF_DEVICE_MEMORY) return TN__CU_ERROR_NOT_SUPPORTED;
        tn__dropin_record_refusal(bytes);
        return TN__CU_ERROR_OUT_OF_MEMORY;
    }
    tn__dropin_count(&tn__dropin.counts.allocations);
    tn__dropin_record_alloc(block, NULL);
    tn__dropin_hand_out(block);
    *out = block->address;
    return TN__CU_SUCCESS;
}

void tn__dropin_hand_out(tn__dropin_block *block) {
    tn__dropin_block *stale = tn__dropin_blocks_add(block);
    while (stale) {
        tn__dropin_block *next = stale->next;
        tn__dropin_forget(stale);
        stale = next;
    }
}

void tn__dropin_note(tn__cu_address address, size_t bytes, void *stream) {
    tn__dropin_block *block;
    if (tn__dropin.is_over) return;
    tn__dropin_count(&tn__dropin.counts.passed);
    block = tn__dropin_new_block(TN__DROPIN_DRIVER, NULL, bytes);
    if (!block) return;
    block->address = (uintptr_t)address;
    tn__dropin_record_alloc(block, stream);
    tn__dropin_hand_out(block);
}

void tn__dropin_forget(tn__dropin_block *block) {
    if (!tn__dropin.is_over) tn__dropin_record_free(block);
    tn__host_free(block);
}

static tn__cu_result hook_alloc(tn__cu_address *out, size_t bytes) {
    tn__dropin_device *device = out && bytes ? tn__dropin_device_current() : NULL;
    tn__cu_result result = TN__CU_ERROR_NOT_SUPPORTED;
    if (device) result = tn__dropin_alloc(device, bytes, out);
    if (result != TN__CU_ERROR_NOT_SUPPORTED) return result;
    result = TN__REAL(cuMemAlloc_v2)(out, bytes);
    if (result == TN__CU_ERROR_OUT_OF_MEMORY && tn__dropin_give_back()) {
        result = TN__REAL(cuMemAlloc_v2)(out, bytes);
    }
    if (result == TN__CU_SUCCESS && out) tn__dropin_note(*out, bytes, NULL);
    return result;
}

static tn__cu_result hook_alloc_pitch(tn__cu_address *out, size_t *pitch, size_t width,
                                      size_t height, unsigned element) {
    int is_good = out && pitch && width && height && width <= SIZE_MAX - PITCH_BYTES &&
                  (element == 4 || element == 8 || element == 16);
    size_t row = (width + PITCH_BYTES - 1) / PITCH_BYTES * PITCH_BYTES;
    tn__dropin_device *device = NULL;
    tn__cu_result result = TN__CU_ERROR_NOT_SUPPORTED;
    if (is_good && height <= SIZE_MAX / row) device = tn__dropin_device_current();
    if (device) result = tn__dropin_alloc(device, row * height, out);
    if (result == TN__CU_SUCCESS) *pitch = row;
    if (result != TN__CU_ERROR_NOT_SUPPORTED) return result;
    result = TN__REAL(cuMemAllocPitch_v2)(out, pitch, width, height, element);
    if (result == TN__CU_ERROR_OUT_OF_MEMORY && tn__dropin_give_back()) {
        result = TN__REAL(cuMemAllocPitch_v2)(out, pitch, width, height, element);
    }
    if (result == TN__CU_SUCCESS && out && pitch) tn__dropin_note(*out, *pitch * height, NULL);
    return result;
}

static tn__cu_result hook_alloc_managed(tn__cu_address *out, size_t bytes, unsigned flags) {
    tn__cu_result result = TN__REAL(cuMemAllocManaged)(out, bytes, flags);
    if (result == TN__CU_ERROR_OUT_OF_MEMORY && tn__dropin_give_back()) {
        result = TN__REAL(cuMemAllocManaged)(out, bytes, flags);
    }
    if (result == TN__CU_SUCCESS && out) tn__dropin_note(*out, bytes, NULL);
    return result;
}

/* ---- frees ----------------------------------------------------------------------------------- */

/* The driver's own, as it was recorded. */
static tn__cu_result free_recorded(tn__dropin_block *block) {
    tn__cu_result result = TN__REAL(cuMemFree_v2)(block->address);
    if (result == TN__CU_SUCCESS) {
        tn__dropin_forget(block);
    } else {
        tn__dropin_hand_out(block);
    }
    return result;
}

void tn__dropin_give(tn__dropin_block *block) {
    if (block->kind == TN__DROPIN_WHOLE) {
        tn__dropin_whole_give(block->device, block->whole);
    } else if (tn_free((void *)block->address, block->device->idle) != TN_OK) {
        tn__dropin_count(&tn__dropin.counts.lost);
    }
    tn__host_free(block);
}

int tn__dropin_owns(tn__cu_address address) {
    if (!address) return 0;
    if (tn__page_map_find((const void *)(uintptr_t)address)) return 1;
    return !tn__dropin.is_over && tn__dropin_whole_holds((uintptr_t)address);
}

/* Once exit has begun, and in a forked child, there is nothing to give back to. */
void tn__dropin_free(tn__dropin_block *block) {
    if (tn__dropin.is_over) {
        tn__host_free(block);
        return;
    }
    tn__dropin_count(&tn__dropin.counts.frees);
    tn__dropin_record_free(block);
    tn__dropin_fence_add(block);
}

/* What is ours is never the driver's to free, also if no block begins there: it could be the begin
 * of a segment, and all of that would go. */
static tn__cu_result hook_free(tn__cu_address address) {
    tn__dropin_block *block = address ? tn__dropin_blocks_take((uintptr_t)address) : NULL;
    tn__dropin_device *device = block ? block->device : NULL;
    if (block && block->kind == TN__DROPIN_DRIVER) return free_recorded(block);
    if (!block && tn__dropin_owns(address)) return TN__CU_ERROR_INVALID_VALUE;
    if (!block) return TN__REAL(cuMemFree_v2)(address);
    tn__dropin_free(block);
    if (!tn__dropin.is_over) tn__dropin_whole_bound(device);
    return TN__CU_SUCCESS;
}

/* ---- how much there is ----------------------------------------------------------------------- */

/* What a pool could give back, of what it has from the driver. */
static void add_pool(tn_pool *pool, size_t *reserved_bytes, size_t *idle_bytes) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    if (!pool || tn_pool_stats_get(pool, &stats) != TN_OK) return;
    *reserved_bytes += stats.reserved_bytes;
    *idle_bytes += stats.cached_bytes + stats.driver_held_bytes;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Idle memory is free, as after the driver's own cuMemFree. With a limit, that is all there is. */
static tn__cu_result hook_info(size_t *free_bytes, size_t *total_bytes) {
    tn__dropin_device *device = tn__dropin_device_current();
    tn__cu_result result = TN__REAL(cuMemGetInfo_v2)(free_bytes, total_bytes);
    size_t reserved = 0, idle = 0;
    if (result != TN__CU_SUCCESS || !device || !free_bytes || !total_bytes) return result;
    add_pool(device->pool, &reserved, &idle);
    add_pool(device->stream_pool, &reserved, &idle);
    reserved += device->whole_bytes;
    idle += device->whole_idle_bytes;
    idle += tn__dropin_fence_bytes(device);
    idle = smaller(idle, reserved);
    *free_bytes = smaller(*free_bytes + idle, *total_bytes);
    if (tn__dropin.limit_bytes && tn__dropin.limit_bytes < *total_bytes) {
        size_t used = reserved - idle;
        size_t left = tn__dropin.limit_bytes > used ? tn__dropin.limit_bytes - used : 0;
        *total_bytes = tn__dropin.limit_bytes;
        *free_bytes = smaller(*free_bytes, left);
    }
    return result;
}

/* ---- memory that stays the driver's ---------------------------------------------------------- */

static void trim(tn_pool *pool) {
    size_t released = 0;
    if (!pool || tn_pool_trim(pool, 0, &released) != TN_OK) return;
    atomic_fetch_add(&tn__dropin.given_back, released);
}

static void give_back_of_all(void) {
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        tn__dropin_device *device = tn__dropin_device_pin(i);
        if (!device) continue;
        tn__dropin_fence_drain(device);
        tn__dropin_whole_trim(device, 0);
        trim(device->pool);
        trim(device->stream_pool);
        tn__dropin_device_unpin(device);
    }
}

int tn__dropin_give_back(void) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static _Thread_local uint64_t seen __attribute__((tls_model("global-dynamic")));
    uint64_t before = seen;
    if (tn__dropin.is_over) return 0;
    pthread_mutex_lock(&mutex);
    give_back_of_all();
    pthread_mutex_unlock(&mutex);
    seen = atomic_load(&tn__dropin.given_back);
    if (seen != before) tn__dropin_count(&tn__dropin.counts.retries);
    return seen != before;
}

/* Once more, if the driver is short and the pools have something. */
#define WITH_RETRY(call)                                                                           \
    do {                                                                                           \
        tn__cu_result result_ = (call);                                                            \
        if (result_ != TN__CU_ERROR_OUT_OF_MEMORY || !tn__dropin_give_back()) return result_;      \
        return (call);                                                                             \
    } while (0)

static tn__cu_result hook_create(tn__cu_handle *out, size_t bytes, const void *properties,
                                 unsigned long long flags) {
    tn__dropin_count(&tn__dropin.counts.creates);
    WITH_RETRY(TN__REAL(cuMemCreate)(out, bytes, properties, flags));
}

static tn__cu_result hook_array(void **out, const void *description) {
    WITH_RETRY(TN__REAL(cuArrayCreate_v2)(out, description));
}

static tn__cu_result hook_array_3d(void **out, const void *description) {
    WITH_RETRY(TN__REAL(cuArray3DCreate_v2)(out, description));
}

static tn__cu_result hook_mipmapped(void **out, const void *description, unsigned levels) {
    WITH_RETRY(TN__REAL(cuMipmappedArrayCreate)(out, description, levels));
}

static tn__cu_result hook_reset(tn__cu_device device) {
    tn__cu_result result;
    tn__dropin_device_close(device);
    result = TN__REAL(cuDevicePrimaryCtxReset)(device);
    tn__dropin_device_closed(device);
    return result;
}

/* The runtime asks for the older one, programs on the driver for this. */
static tn__cu_result hook_reset_v2(tn__cu_device device) {
    tn__cu_result result;
    tn__dropin_device_close(device);
    result = TN__REAL(cuDevicePrimaryCtxReset_v2)(device);
    tn__dropin_device_closed(device);
    return result;
}

void tn__dropin_memory_hooks(tn__dropin_calls *hooks) {
    hooks->cuMemAlloc_v2 = hook_alloc;
    hooks->cuMemFree_v2 = hook_free;
    hooks->cuMemAllocPitch_v2 = hook_alloc_pitch;
    hooks->cuMemAllocManaged = hook_alloc_managed;
    hooks->cuMemGetInfo_v2 = hook_info;
    hooks->cuMemCreate = hook_create;
    hooks->cuArrayCreate_v2 = hook_array;
    hooks->cuArray3DCreate_v2 = hook_array_3d;
    hooks->cuMipmappedArrayCreate = hook_mipmapped;
    hooks->cuDevicePrimaryCtxReset = hook_reset;
    hooks->cuDevicePrimaryCtxReset_v2 = hook_reset_v2;
}
