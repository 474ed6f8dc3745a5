/* What frameworks ask of their allocators: see framework_calls.h. */
#include "framework_calls.h"

#include "adapter_device.h"
#include "driver.h"
#include "host_alloc.h"

tn_status tn__framework_alloc(int device, size_t bytes, tn_stream stream, const char *owner,
                              void **out) {
    tn__adapter *adapter = NULL;
    int is_routed = 0;
    TN_TRY(tn__adapter_find(device, &adapter));
    if (bytes == 0) {
        *out = NULL;
        return TN_OK;
    }
    TN_TRY(tn__graph_memory_alloc(adapter, bytes, stream, owner, &is_routed, out));
    return is_routed ? TN_OK : tn__adapter_alloc(adapter, bytes, stream, owner, out);
}

tn_status tn__framework_segment(int device, size_t bytes, tn_stream stream, const char *owner,
                                void **out) {
    tn__adapter *adapter = NULL;
    tn_status status;
    TN_TRY(tn__adapter_find(device, &adapter));
    if (bytes == 0) {
        *out = NULL;
        return TN_OK;
    }
    TN_TRY(tn__late_frees_promise(&adapter->late));
    status = tn__adapter_alloc(adapter, bytes, stream, owner, out);
    if (status != TN_OK) tn__late_frees_unpromise(&adapter->late);
    return status;
}

/* ---- free ------------------------------------------------------------------------------------ */

/* 0 if one could not be recorded: its stream is gone, captures, or is of no peer. */
static int record_all(void *block, tn__stream_use *uses) {
    int is_recorded = 1;
    while (uses) {
        tn__stream_use *use = uses;
        uses = use->next;
        if (tn_record_use(block, use->stream) != TN_OK) is_recorded = 0;
        tn__host_free(use);
    }
    return is_recorded;
}

static tn_status free_later(tn__adapter *adapter, void *block, tn_stream stream) {
    return tn__late_frees_add(&adapter->late, block, stream, 0, 0);
}

/* A free that fails for a live block: its stream has been ended, or is of another device. */
static int is_stream_wrong(tn_status status, const void *block) {
    return status != TN_OK && status != TN_INVALID_STATE && status != TN_OUT_OF_HOST_MEMORY &&
           tn_block_info(block, NULL, NULL) == TN_OK;
}

tn_status tn__framework_free(int device, void *block, tn_stream stream) {
    tn__adapter *adapter = tn__adapter_peek(device);
    tn__stream_use *uses;
    tn_status status;
    int is_recorded;
    if (!block || tn__driver_is_gone()) return TN_OK;
    TN_REQUIRE(adapter, "no memory of device %d was given out: %p is not its block", device, block);
    TN_TRY(tn__late_frees_refuse(&adapter->late, block));
    uses = tn__stream_uses_take(&adapter->uses, block);
    tn__error_scope_begin();
    is_recorded = record_all(block, uses);
    status = is_recorded ? tn__graph_memory_free(adapter, block, stream) : TN_OK;
    if (status == TN_INVALID_STATE) status = free_later(adapter, block, stream);
    if (!is_recorded || is_stream_wrong(status, block)) {
        status = tn__adapter_free_unordered(adapter, block, 0);
    }
    return tn__error_scope_end(status);
}

void tn__framework_free_unordered(int device, void *block) {
    tn__adapter *adapter = tn__adapter_peek(device);
    if (adapter && tn__adapter_free_unordered(adapter, block, 1) != TN_OK) {
        tn__framework_warn("a free of a framework's block");
    }
}

/* ---- uses ------------------------------------------------------------------------------------ */

static tn_status find_adapter_of(const void *block, tn__adapter **out) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn_pool *pool = NULL;
    int is_block;
    *out = NULL;
    tn__error_scope_begin();
    is_block = tn_block_info(block, NULL, &pool) == TN_OK;
    (void)tn__error_scope_end(TN_OK);
    if (!is_block) return TN_OK;
    TN_TRY(tn_device_info_get(tn_pool_device(pool), &info));
    if (info.driver == TN_DRIVER_CUDA) *out = tn__adapter_peek(info.ordinal);
    return TN_OK;
}

tn_status tn__framework_use(void *block, tn_stream stream) {
    tn__adapter *adapter = NULL;
    if (!block || tn__driver_is_gone()) return TN_OK;
    TN_TRY(find_adapter_of(block, &adapter));
    return adapter ? tn__stream_uses_add(&adapter->uses, block, stream) : TN_OK;
}

tn_status tn__framework_fraction_set(int device, double fraction) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn__adapter *adapter = NULL;
    size_t limit;
    TN_REQUIRE(fraction >= 0 && fraction <= 1, "%g is no part of the device's memory: 0 to 1",
               fraction);
    TN_TRY(tn__adapter_find(device, &adapter));
    TN_TRY(tn_device_info_get(adapter->device, &info));
    limit = (size_t)((double)info.memory_bytes * fraction);
    return tn__stream_pools_limit(adapter, limit > 0 ? limit : 1); /* 0 would be none */
}

/* ---- graphs ---------------------------------------------------------------------------------- */

tn_status tn__framework_begin(int device, const uint64_t key[2], const tn__stream_filter *filter) {
    tn__adapter *adapter = NULL;
    TN_TRY(tn__adapter_find(device, &adapter));
    return tn__graph_memory_begin(adapter, key, filter);
}

tn_status tn__framework_end(int device, const uint64_t key[2]) {
    tn__adapter *adapter = NULL;
    TN_TRY(tn__adapter_find(device, &adapter));
    return tn__graph_memory_end(adapter, key);
}

tn_status tn__framework_release(int device, const uint64_t key[2]) {
    tn__adapter *adapter = NULL;
    if (tn__driver_is_gone()) return TN_OK;
    TN_TRY(tn__adapter_find(device, &adapter));
    return tn__graph_memory_release(adapter, key);
}
