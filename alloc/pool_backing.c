/* The rows of the table of backings, and what is said when a device can not have one. */
#include "pool_backing.h"

#include "nvtx_memory.h"
#include "options.h"
#include "pool_internal.h"

#define SMALL_DEVICE_BYTES ((size_t)24 << 30)

/* ---- VMM ------------------------------------------------------------------------------------- */

static tn_status check_vmm(const tn_pool_config *config, const tn_device_info *info) {
    (void)config;
    if (info->supports_vmm) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "%s has no virtual memory management: use backing AUTO",
                   info->name);
}

/* What the option says; the least on a device so small that partly used handles would count. */
static size_t default_page_bytes(const tn_device_info *info) {
    if (info->memory_bytes < SMALL_DEVICE_BYTES) return info->granularity_bytes;
    return tn__round_up(tn__options_get()->page_bytes, info->granularity_bytes);
}

static tn_status open_vmm(tn_pool *pool, const tn_pool_config *config) {
    pool->page_bytes = config->page_bytes ? config->page_bytes : default_page_bytes(&pool->info);
    return TN_OK;
}

/* ---- PLAIN ----------------------------------------------------------------------------------- */

static tn_status check_nothing(const tn_pool_config *config, const tn_device_info *info) {
    (void)config;
    (void)info;
    return TN_OK;
}

static tn_status open_plain(tn_pool *pool, const tn_pool_config *config) {
    (void)config;
    pool->page_bytes = pool->info.granularity_bytes;
    return TN_OK;
}

static tn_status take_plain(tn_pool *pool, const tn__request *request, size_t bytes, void **out) {
    (void)request;
    return pool->driver->mem_alloc(pool->state, bytes, out);
}

static tn_status give_plain(tn_pool *pool, void *address, size_t bytes) {
    (void)bytes;
    return pool->driver->mem_free(pool->state, address);
}

/* Segments went back with the rest of the idle memory. */
static tn_status close_nothing(tn_pool *pool) {
    TN_ASSERT(!pool->heap.regions);
    TN_ASSERT(!pool->stuck_segments);
    return TN_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static const tn__backing vmm_row = {
    .kind = TN_BACKING_VMM,
    .name = "vmm",
    .maps_handles = 1,
    .check_config = check_vmm,
    .open = open_vmm,
    .repeat = tn__pages_repeat,
    .recall = tn__pages_recall,
    .grow = tn__pages_grow,
    .release = tn__pages_release,
    .release_addresses = tn__pages_release_addresses,
    .close = tn__pages_close,
    .scattered_hint = "what is free is less than the whole pages that the request needs"};

static const tn__backing plain_row = {
    .kind = TN_BACKING_PLAIN,
    .name = "plain",
    .check_config = check_nothing,
    .open = open_plain,
    .grow = tn__segments_grow,
    .release = tn__segments_release,
    .close = close_nothing,
    .shared_bytes = (size_t)32 << 20,
    .take = take_plain,
    .give = give_plain,
    .scattered_hint = "memory is free but in pieces that are too small: VMM backing could use it"};

static const tn__backing *const rows[] = {&vmm_row,           &plain_row,
                                          &tn__backing_async, &tn__backing_caller,
                                          &tn__backing_host,  &tn__backing_pinned};

const tn__backing *tn__backing_find(tn_pool_backing kind, const tn_device_info *info) {
    if (kind == TN_BACKING_AUTO) {
        int is_vmm = info->supports_vmm && !tn__nvtx_is_wanted();
        kind = is_vmm ? TN_BACKING_VMM : TN_BACKING_PLAIN;
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i]->kind == kind) return rows[i];
    }
    return NULL;
}

int tn__backing_fall_back(tn_pool *pool) {
    static const tn_pool_config defaults = TN_POOL_CONFIG_INIT;
    const tn__backing *plain = tn__backing_find(TN_BACKING_PLAIN, &pool->info);
    if (!pool->is_backing_auto || pool->backing == plain || pool->heap.regions) return 0;
    if (pool->address_limit_bytes != SIZE_MAX || pool->backing->close(pool) != TN_OK) return 0;
    pool->backing = plain;
    return plain->open(pool, &defaults) == TN_OK;
}
