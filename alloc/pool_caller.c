/* CALLER backing: segments of functions that the caller gives, such as ncclMemAlloc.
 *
 * The functions are called from any thread that uses the pool or destroys it, from threads of other
 * pools that are short, and under no lock. What they say is put into words here, since they may
 * not be ours.
 */
#include "host_alloc.h"
#include "pool_internal.h"

static tn_status check_caller(const tn_pool_config *config, const tn_device_info *info) {
    (void)info;
    TN_REQUIRE(config->functions.alloc && config->functions.free,
               "backing CALLER needs both functions.alloc and functions.free");
    return TN_OK;
}

static tn_status open_caller(tn_pool *pool, const tn_pool_config *config) {
    tn_memory_functions *functions = tn__host_alloc(1, sizeof *functions);
    if (!functions) return TN_OUT_OF_HOST_MEMORY;
    *functions = config->functions;
    pool->store = functions;
    pool->page_bytes = pool->info.granularity_bytes;
    return TN_OK;
}

static tn_status close_caller(tn_pool *pool) {
    TN_ASSERT(!pool->heap.regions);
    TN_ASSERT(!pool->stuck_segments);
    tn__host_free(pool->store);
    pool->store = NULL;
    return TN_OK;
}

static tn_status report(const tn_pool *pool, const char *function, tn_status status, size_t bytes,
                        const void *address) {
    int is_known = (int)status > TN_OK && status < TN_STATUS_COUNT;
    return TN_FAIL(is_known ? status : TN_DRIVER_ERROR,
                   "the function %s of pool %s failed with %s (%d): %zu bytes at %p", function,
                   pool->name, tn_status_name(status), (int)status, bytes, address);
}

static tn_status take_caller(tn_pool *pool, const tn__request *request, size_t bytes, void **out) {
    const tn_memory_functions *functions = pool->store;
    tn_status status = functions->alloc(functions->context, bytes, out);
    (void)request;
    return status == TN_OK ? TN_OK : report(pool, "alloc", status, bytes, NULL);
}

static tn_status give_caller(tn_pool *pool, void *address, size_t bytes) {
    const tn_memory_functions *functions = pool->store;
    tn_status status = functions->free(functions->context, address, bytes);
    return status == TN_OK ? TN_OK : report(pool, "free", status, bytes, address);
}

const tn__backing tn__backing_caller = {
    .kind = TN_BACKING_CALLER,
    .name = "caller",
    .check_config = check_caller,
    .open = open_caller,
    .grow = tn__segments_grow,
    .release = tn__segments_release,
    .close = close_caller,
    .shared_bytes = (size_t)32 << 20,
    .is_unlocked = 1,
    .take = take_caller,
    .give = give_caller,
    .scattered_hint = "memory is free but in pieces that are too small: free some of the largest "
                      "owners"};
