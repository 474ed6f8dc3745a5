/* A pool for each stream that a framework allocates on: see stream_pools.h. */
#include "adapter_device.h"
#include "cuda_abi.h"

void tn__stream_pools_init(tn__stream_pools *pools) { pthread_mutex_init(&pools->mutex, NULL); }

void tn__stream_pools_deinit(tn__stream_pools *pools) { pthread_mutex_destroy(&pools->mutex); }

/* The legacy default stream has two names. */
static int is_default(tn_stream stream) { return (uintptr_t)stream <= 1; }

/* Handles are addresses, or small numbers: no thread's key is one. */
static uintptr_t key_of(tn_stream stream) {
    return stream == TN__CU_STREAM_PER_THREAD ? ~(uintptr_t)pthread_self() : (uintptr_t)stream;
}

/* Where the stream is, or the free slot where it would be; *pool is what the slot had when it was
 * looked at: without the mutex, a free one may be another stream's a moment later. Half of the
 * slots stay free. */
static tn__stream_slot *find_slot(tn__stream_pools *pools, uintptr_t key, tn_pool **pool) {
    size_t at = (key * 0x9E3779B97F4A7C15u >> 32) % TN__STREAM_POOL_SLOTS;
    while ((*pool = atomic_load(&pools->slots[at].pool)) != NULL && pools->slots[at].key != key)
        at = (at + 1) % TN__STREAM_POOL_SLOTS;
    return &pools->slots[at];
}

static tn_status make_pool(tn__adapter *adapter, tn_pool **out) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "frameworks, another stream";
    config.backing = TN_BACKING_PLAIN;
    config.limit_bytes = adapter->streams.limit_bytes;
    TN_TRY(tn_pool_create(adapter->device, &config, out));
    tn__pool_settle_set(*out, tn__adapters_settle);
    return TN_OK;
}

static tn_status make_locked(tn__adapter *adapter, uintptr_t key, tn_pool **out) {
    tn__stream_pools *pools = &adapter->streams;
    tn__stream_slot *slot = find_slot(pools, key, out);
    if (*out) return TN_OK;
    if (pools->count == TN__STREAM_POOLS_MAX) {
        *out = adapter->pool;
        return TN_OK;
    }
    TN_TRY(make_pool(adapter, out));
    slot->key = key;
    atomic_store(&slot->pool, *out);
    pools->count++;
    return TN_OK;
}

tn_status tn__stream_pool_find(tn__adapter *adapter, tn_stream stream, tn_pool **out) {
    tn_status status;
    *out = adapter->pool;
    if (!is_default(stream)) (void)find_slot(&adapter->streams, key_of(stream), out);
    if (*out) return TN_OK;
    pthread_mutex_lock(&adapter->streams.mutex);
    status = make_locked(adapter, key_of(stream), out);
    pthread_mutex_unlock(&adapter->streams.mutex);
    return status;
}

tn_status tn__stream_pools_each(tn__adapter *adapter, tn__pool_visit visit, void *context) {
    if (adapter->pool) TN_TRY(visit(adapter->pool, context)); /* a close may have ended it */
    for (size_t i = 0; i < TN__STREAM_POOL_SLOTS; i++) {
        tn_pool *pool = atomic_load(&adapter->streams.slots[i].pool);
        if (pool) TN_TRY(visit(pool, context));
    }
    return TN_OK;
}

static tn_status set_limit(tn_pool *pool, void *context) {
    return tn_pool_limit_set(pool, *(const size_t *)context);
}

tn_status tn__stream_pools_limit(tn__adapter *adapter, size_t limit_bytes) {
    tn_status status;
    pthread_mutex_lock(&adapter->streams.mutex);
    status = tn__stream_pools_each(adapter, set_limit, &limit_bytes);
    if (status == TN_OK) adapter->streams.limit_bytes = limit_bytes;
    pthread_mutex_unlock(&adapter->streams.mutex);
    return status;
}

tn_status tn__stream_pools_close(tn__stream_pools *pools) {
    for (size_t i = 0; i < TN__STREAM_POOL_SLOTS; i++) {
        tn_pool *pool = atomic_load(&pools->slots[i].pool);
        if (!pool) continue;
        TN_TRY(tn_pool_destroy(pool));
        atomic_store(&pools->slots[i].pool, NULL);
        pools->count--;
    }
    return TN_OK;
}
