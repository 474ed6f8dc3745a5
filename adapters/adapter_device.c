/* Devices and pools behind the adapters: see adapter_device.h. */
#include "adapter_device.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

enum { DEVICES_MAX = 64, WARNINGS_MAX = 20 };

static _Atomic(tn__adapter *) adapters[DEVICES_MAX];
static pthread_mutex_t adapters_mutex = PTHREAD_MUTEX_INITIALIZER;

void tn__framework_warn(const char *what) {
    static atomic_int count;
    int before = atomic_fetch_add(&count, 1);
    if (before >= WARNINGS_MAX) return;
    fprintf(stderr, "tenure: %s: %s%s\n", what, tn_error_last(),
            before == WARNINGS_MAX - 1 ? " (no more such lines)" : "");
}

/* ---- make, end ------------------------------------------------------------------------------- */

/* Devices without a path between them copy through the host. */
static void try_peer(tn_pool *pool, tn_device *peer) {
    tn_status status;
    tn__error_scope_begin();
    status = tn_pool_peer_enable(pool, peer);
    (void)status;
    (void)tn__error_scope_end(TN_OK);
}

void tn__adapter_befriend(tn__adapter *adapter, tn_pool *pool) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *other = atomic_load(&adapters[i]);
        if (other && other != adapter) try_peer(pool, other->device);
    }
}

static tn_status let_in(tn_pool *pool, void *peer) {
    try_peer(pool, peer);
    return TN_OK;
}

static void befriend_all(tn__adapter *adapter) {
    tn__adapter_befriend(adapter, adapter->pool);
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *other = atomic_load(&adapters[i]);
        if (other && other->pool) try_peer(other->pool, adapter->device);
    }
}

/* The pools of captured graphs that other devices have. */
static void befriend_graphs(tn__adapter *adapter) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *other = atomic_load(&adapters[i]);
        tn_status status = TN_OK; /* of let_in: always that */
        if (other && other != adapter) {
            status = tn__graph_memories_each(other, let_in, adapter->device);
        }
        (void)status;
    }
}

/* A pool of the program's lets other devices go, which end before it; the program's own stay. */
static tn_status part(tn__adapter *adapter) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *other = atomic_load(&adapters[i]);
        tn_status status;
        if (!other || other == adapter || other->is_borrowed) continue;
        TN_TRY(tn_device_synchronize(other->device));
        tn__error_scope_begin();
        status = tn_pool_peer_disable(adapter->pool, other->device);
        if (status == TN_INVALID_ARGUMENT) status = TN_OK; /* it never was a peer */
        TN_TRY(tn__error_scope_end(status));
    }
    return TN_OK;
}

static tn_status open_device(tn__adapter *adapter, int ordinal) {
    tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_status status;
    device_config.driver = TN_DRIVER_CUDA;
    device_config.ordinal = ordinal;
    pool_config.name = "frameworks";
    TN_TRY(tn_device_create(&device_config, &adapter->device));
    status = tn_pool_create(adapter->device, &pool_config, &adapter->pool);
    if (status != TN_OK) {
        (void)tn_device_destroy(adapter->device);
        return status;
    }
    tn__pool_settle_set(adapter->pool, tn__adapters_settle);
    return TN_OK;
}

/* The adapter has its device and pool. A pool of graphs that is made meanwhile does not see it
 * before it is in the table: those are told again. */
static void publish(tn__adapter *adapter, int ordinal) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TN_CHECK(tn_device_info_get(adapter->device, &info) == TN_OK);
    adapter->ordinal = ordinal;
    tn__stream_pools_init(&adapter->streams);
    tn__late_frees_init(&adapter->late, info.memory_bytes);
    tn__stream_uses_init(&adapter->uses);
    tn__graph_memories_init(&adapter->captures);
    befriend_all(adapter);
    befriend_graphs(adapter);
    atomic_store(&adapters[ordinal], adapter);
    befriend_graphs(adapter);
}

static tn_status make_locked(int ordinal, tn__adapter **out) {
    tn__adapter *adapter = atomic_load(&adapters[ordinal]);
    tn_status status;
    if (!adapter) {
        adapter = tn__host_alloc(1, sizeof *adapter);
        if (!adapter) return TN_OUT_OF_HOST_MEMORY;
        status = open_device(adapter, ordinal);
        if (status != TN_OK) {
            tn__host_free(adapter);
            return status;
        }
        publish(adapter, ordinal);
    }
    *out = adapter;
    return TN_OK;
}

tn__adapter *tn__adapter_peek(int ordinal) {
    return ordinal < 0 || ordinal >= DEVICES_MAX ? NULL : atomic_load(&adapters[ordinal]);
}

tn_status tn__adapter_find(int ordinal, tn__adapter **out) {
    tn_status status;
    TN_REQUIRE(ordinal >= 0 && ordinal < DEVICES_MAX, "%d is no device: the adapters know 0 to %d",
               ordinal, DEVICES_MAX - 1);
    if (tn__driver_is_gone()) {
        return TN_FAIL(TN_INVALID_STATE, "the process exits, or is a fork of the one that opened "
                                         "the device: no memory can be had");
    }
    *out = atomic_load(&adapters[ordinal]);
    if (*out) return TN_OK;
    pthread_mutex_lock(&adapters_mutex);
    status = make_locked(ordinal, out);
    pthread_mutex_unlock(&adapters_mutex);
    return status;
}

static tn_status close_pool(tn__adapter *adapter) {
    tn__late_frees_flush(adapter, 1);
    TN_TRY(tn__graph_memories_close(adapter));
    TN_TRY(tn__stream_pools_close(&adapter->streams));
    if (!adapter->is_borrowed && adapter->pool) {
        TN_TRY(tn_pool_destroy(adapter->pool));
        adapter->pool = NULL;
    }
    return TN_OK;
}

static tn_status close_device(tn__adapter *adapter) {
    if (adapter->is_borrowed) {
        tn__pool_settle_set(adapter->pool, NULL);
    } else {
        TN_TRY(tn_device_destroy(adapter->device));
    }
    atomic_store(&adapters[adapter->ordinal], NULL);
    tn__stream_pools_deinit(&adapter->streams);
    tn__late_frees_deinit(&adapter->late);
    tn__stream_uses_deinit(&adapter->uses);
    tn__graph_memories_deinit(&adapter->captures);
    tn__host_free(adapter);
    return TN_OK;
}

static tn_status part_all(void) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (adapter && adapter->is_borrowed) TN_TRY(part(adapter));
    }
    return TN_OK;
}

/* A device is closed after the pools that have it as a peer. */
static tn_status close_locked(void) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (adapter) TN_TRY(close_pool(adapter));
    }
    TN_TRY(part_all());
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (adapter) TN_TRY(close_device(adapter));
    }
    return TN_OK;
}

tn_status tn_adapters_close(void) {
    tn_status status;
    if (tn__driver_is_gone()) return TN_OK;
    pthread_mutex_lock(&adapters_mutex);
    status = close_locked();
    pthread_mutex_unlock(&adapters_mutex);
    return status;
}

/* ---- threads --------------------------------------------------------------------------------- */

static pthread_key_t thread_key;
static int has_thread_key;

static void when_thread_ends(void *ignored) {
    (void)ignored;
    if (tn__driver_is_gone()) return;
    pthread_mutex_lock(&adapters_mutex);
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (adapter) tn__graph_memories_leave(adapter);
    }
    pthread_mutex_unlock(&adapters_mutex);
}

static void make_thread_key(void) {
    has_thread_key = pthread_key_create(&thread_key, when_thread_ends) == 0;
}

/* Threads that outlive the library would call what is gone with it. */
__attribute__((destructor)) static void end_thread_key(void) {
    if (has_thread_key) (void)pthread_key_delete(thread_key);
}

tn_status tn__adapters_watch_thread(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_thread_key);
    if (has_thread_key && pthread_setspecific(thread_key, &thread_key) == 0) return TN_OK;
    return TN_FAIL(TN_OUT_OF_HOST_MEMORY, "no memory to see the end of a thread that captures");
}

/* ---- the pool -------------------------------------------------------------------------------- */

tn_status tn_adapter_pool(int device, tn_pool **out) {
    tn__adapter *adapter = NULL;
    TN_REQUIRE(out, "tn_adapter_pool: out is NULL");
    TN_TRY(tn__adapter_find(device, &adapter));
    if (!adapter->pool) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_adapter_pool: device %d's pool has been ended by tn_adapters_close, "
                       "which is to be called again",
                       device);
    }
    *out = adapter->pool;
    return TN_OK;
}

static tn_status use_locked(tn_pool *pool, int ordinal) {
    tn__adapter *adapter;
    if (atomic_load(&adapters[ordinal])) {
        return TN_FAIL(TN_INVALID_STATE,
                       "tn_adapter_pool_use: device %d has a pool already: call it before the "
                       "first framework asks for memory",
                       ordinal);
    }
    adapter = tn__host_alloc(1, sizeof *adapter);
    if (!adapter) return TN_OUT_OF_HOST_MEMORY;
    adapter->device = tn_pool_device(pool);
    adapter->pool = pool;
    adapter->is_borrowed = 1;
    tn__pool_settle_set(pool, tn__adapters_settle);
    publish(adapter, ordinal);
    return TN_OK;
}

tn_status tn_adapter_pool_use(tn_pool *pool) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    tn_status status;
    TN_REQUIRE(pool, "tn_adapter_pool_use: pool is NULL");
    TN_TRY(tn_device_info_get(tn_pool_device(pool), &info));
    TN_REQUIRE(info.driver == TN_DRIVER_CUDA && info.ordinal < DEVICES_MAX,
               "tn_adapter_pool_use: pool %s is of no CUDA device that the adapters know",
               tn_pool_name(pool));
    TN_TRY(tn__pool_check_ordinary(pool));
    pthread_mutex_lock(&adapters_mutex);
    status = use_locked(pool, info.ordinal);
    pthread_mutex_unlock(&adapters_mutex);
    return status;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* torch's own allocator captures graphs that nobody tells us of. */
static int is_capturing(const tn__adapter *adapter, tn_stream stream) {
    const tn__driver *driver = tn__device_driver(adapter->device);
    int answer = 0;
    tn_status status;
    tn__error_scope_begin();
    status = driver->stream_is_capturing(tn__device_state(adapter->device), stream, &answer);
    (void)tn__error_scope_end(TN_OK);
    return status == TN_OK && answer;
}

tn_status tn__adapter_alloc(tn__adapter *adapter, size_t bytes, tn_stream stream, const char *owner,
                            void **out) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    uint64_t freed = atomic_load(&adapter->late.freed);
    tn_pool *pool = NULL;
    tn_status status;
    TN_TRY(tn__stream_pool_find(adapter, stream, &pool));
    options.owner = owner;
    status = tn_alloc(pool, bytes, stream, &options, out);
    if (status != TN_OUT_OF_DEVICE_MEMORY) return status;
    tn__late_frees_flush(adapter, !is_capturing(adapter, stream));
    if (atomic_load(&adapter->late.freed) == freed) return status;
    return tn_alloc(pool, bytes, stream, &options, out);
}

tn_status tn__adapter_free_unordered(tn__adapter *adapter, void *block, int is_promised) {
    size_t bytes = 0;
    tn__stream_use *uses;
    tn_status status;
    if (!block || tn__driver_is_gone()) return TN_OK;
    TN_TRY(tn_block_info(block, &bytes, NULL));
    uses = tn__stream_uses_take(&adapter->uses, block);
    status = tn__late_frees_add(&adapter->late, block, NULL, bytes, is_promised);
    if (status != TN_OK) {
        tn__stream_uses_put(&adapter->uses, uses);
        return status;
    }
    tn__stream_uses_drop(uses);
    if (tn__late_frees_are_many(&adapter->late)) tn__late_frees_flush(adapter, 1);
    return TN_OK;
}

int tn__adapters_settle(void) {
    int is_idle = 0;
    tn_status status;
    tn__error_scope_begin();
    status = tn__adapters_wait_idle(&is_idle);
    (void)tn__error_scope_end(TN_OK);
    return status == TN_OK && is_idle;
}

static tn_status synchronize_all(void) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (adapter) TN_TRY(tn_device_synchronize(adapter->device));
    }
    return TN_OK;
}

tn_status tn__adapters_wait_idle(int *is_idle) {
    int is_legal = tn__captures_lock();
    tn_status status = is_legal ? synchronize_all() : TN_OK;
    tn__captures_unlock();
    *is_idle = is_legal && status == TN_OK;
    return status;
}

/* ---- numbers, trim --------------------------------------------------------------------------- */

static tn_status for_each_pool(tn__adapter *adapter, tn__pool_visit visit, void *context) {
    TN_TRY(tn__stream_pools_each(adapter, visit, context));
    return tn__graph_memories_each(adapter, visit, context);
}

typedef struct number {
    const char *name;
    size_t offset; /* in tn_pool_stats: each is 8 bytes */
} number;

#define NUMBER(unit, role, field, meaning) {#field, offsetof(tn_pool_stats, field)},
static const number numbers[] = {TN_POOL_STATS_TABLE(NUMBER)};
#undef NUMBER
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "a statistic is read as 8 bytes");

static const number *find_number(const char *name) {
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(numbers[i].name, name) == 0) return &numbers[i];
    }
    return NULL;
}

typedef struct sum {
    const number *number;
    uint64_t value;
} sum;

static tn_status add_number(tn_pool *pool, void *context) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    sum *total = context;
    uint64_t value;
    TN_TRY(tn_pool_stats_get(pool, &stats));
    memcpy(&value, (const char *)&stats + total->number->offset, sizeof value);
    total->value += value;
    return TN_OK;
}

tn_status tn_adapter_stat(int device, const char *name, uint64_t *out) {
    tn__adapter *adapter = tn__adapter_peek(device);
    sum total = {NULL, 0};
    TN_REQUIRE(name && out, "tn_adapter_stat: name or out is NULL");
    total.number = find_number(name);
    TN_REQUIRE(total.number, "tn_adapter_stat: %s is no statistic of TN_POOL_STATS_TABLE", name);
    if (adapter) TN_TRY(for_each_pool(adapter, add_number, &total));
    *out = total.value;
    return TN_OK;
}

static tn_status reset_peaks(tn_pool *pool, void *context) {
    (void)context;
    return tn_pool_stats_reset_peaks(pool);
}

tn_status tn_adapter_reset_peaks(int device) {
    tn__adapter *adapter = tn__adapter_peek(device);
    return adapter ? for_each_pool(adapter, reset_peaks, NULL) : TN_OK;
}

static tn_status trim(tn_pool *pool, void *context) {
    (void)context;
    return tn_pool_trim(pool, 0, NULL);
}

static tn_status trim_all(void) {
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (!adapter) continue;
        tn__late_frees_flush(adapter, 1);
        tn__graph_memories_collect(adapter);
        TN_TRY(for_each_pool(adapter, trim, NULL));
    }
    return TN_OK;
}

/* What is doubted is so for later calls: this one may be in the capture. */
tn_status tn_adapters_trim(void) {
    tn_status status;
    if (tn__driver_is_gone()) return TN_OK;
    status = trim_all();
    for (int i = 0; i < DEVICES_MAX; i++) {
        tn__adapter *adapter = atomic_load(&adapters[i]);
        if (adapter) tn__graph_memories_doubt(adapter);
    }
    return status;
}
