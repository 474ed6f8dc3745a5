/* The cache of a device's idle handles: see handle_cache.h. */
#include "handle_cache.h"

#include <pthread.h>

#include "host_alloc.h"
#include "options.h"
#include "process_limits.h"

typedef struct cached_handle {
    tn__handle handle;
    size_t bytes;
} cached_handle;

typedef struct handle_cache {
    tn__attachment attachment; /* first: the device finds it */
    pthread_mutex_t mutex;
    const tn__driver *driver;
    tn__driver_device *state;
    size_t count;
    size_t capacity;
    size_t bytes;
    cached_handle *handles; /* the last one is the first to be taken */
} handle_cache;

static const char key; /* its address */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static handle_cache *find_cache(tn_device *device) {
    return (handle_cache *)(void *)tn__device_attachment(device, &key);
}

/* The handle at an index leaves the cache. */
static cached_handle remove_at(handle_cache *cache, size_t i) {
    cached_handle removed = cache->handles[i];
    cache->count--;
    cache->bytes -= removed.bytes;
    for (; i < cache->count; i++)
        cache->handles[i] = cache->handles[i + 1];
    return removed;
}

/* ---- begin and end --------------------------------------------------------------------------- */

static int pop(handle_cache *cache, cached_handle *out) {
    int any;
    pthread_mutex_lock(&cache->mutex);
    any = cache->count > 0;
    if (any) *out = remove_at(cache, cache->count - 1);
    pthread_mutex_unlock(&cache->mutex);
    return any;
}

static int push(handle_cache *cache, cached_handle handle) {
    int fits;
    pthread_mutex_lock(&cache->mutex);
    fits = cache->count < cache->capacity;
    if (fits) {
        cache->handles[cache->count++] = handle;
        cache->bytes += handle.bytes;
    }
    pthread_mutex_unlock(&cache->mutex);
    return fits;
}

static tn_status empty_cache(handle_cache *cache, size_t *released_bytes) {
    cached_handle last;
    while (pop(cache, &last)) {
        tn_status status = cache->driver->mem_release(cache->state, last.handle, last.bytes);
        if (status != TN_OK) {
            (void)push(cache, last);
            return status;
        }
        tn__process_give_back(last.bytes);
        *released_bytes += last.bytes;
    }
    return TN_OK;
}

static tn_status empty_for_end(tn__attachment *attachment) {
    size_t released_bytes = 0;
    return empty_cache((handle_cache *)(void *)attachment, &released_bytes);
}

/* It has been emptied: no pool gives to it any more. */
static void end_cache(tn__attachment *attachment) {
    handle_cache *cache = (handle_cache *)(void *)attachment;
    TN_ASSERT(cache->count == 0);
    pthread_mutex_destroy(&cache->mutex);
    tn__host_free(cache->handles);
    tn__host_free(cache);
}

static handle_cache *make_cache(tn_device *device, size_t capacity) {
    handle_cache *cache = tn__host_alloc(1, sizeof *cache);
    if (!cache) return NULL;
    cache->handles = tn__host_alloc(capacity, sizeof *cache->handles);
    if (!cache->handles) {
        tn__host_free(cache);
        return NULL;
    }
    cache->capacity = capacity;
    cache->driver = tn__device_driver(device);
    cache->state = tn__device_state(device);
    cache->attachment.key = &key;
    cache->attachment.empty = empty_for_end;
    cache->attachment.end = end_cache;
    pthread_mutex_init(&cache->mutex, NULL);
    tn__device_attach(device, &cache->attachment);
    return cache;
}

/* NULL: the option says that there is none, or there is no host memory for it. */
static handle_cache *want_cache(tn_device *device) {
    size_t capacity = tn__options_get()->handle_cache;
    handle_cache *cache = find_cache(device);
    if (cache || capacity == 0) return cache;
    pthread_mutex_lock(&making);
    cache = find_cache(device);
    if (!cache) cache = make_cache(device, capacity);
    pthread_mutex_unlock(&making);
    return cache;
}

/* ---- use ------------------------------------------------------------------------------------- */

int tn__handle_cache_take(tn_device *device, size_t bytes, tn__handle *out) {
    handle_cache *cache = find_cache(device);
    int found = 0;
    if (!cache) return 0;
    pthread_mutex_lock(&cache->mutex);
    for (size_t i = cache->count; i-- > 0 && !found;) {
        if (cache->handles[i].bytes != bytes) continue;
        *out = remove_at(cache, i).handle;
        found = 1;
    }
    pthread_mutex_unlock(&cache->mutex);
    return found;
}

int tn__handle_cache_give(tn_device *device, size_t bytes, tn__handle handle) {
    handle_cache *cache = want_cache(device);
    int is_kept = cache && push(cache, (cached_handle){handle, bytes});
    if (is_kept) tn__process_give_back(0);
    return is_kept;
}

tn_status tn__handle_cache_empty(tn_device *device, size_t *released_bytes) {
    handle_cache *cache = find_cache(device);
    *released_bytes = 0;
    return cache ? empty_cache(cache, released_bytes) : TN_OK;
}

size_t tn__handle_cache_bytes(tn_device *device) {
    handle_cache *cache = find_cache(device);
    size_t bytes;
    if (!cache) return 0;
    pthread_mutex_lock(&cache->mutex);
    bytes = cache->bytes;
    pthread_mutex_unlock(&cache->mutex);
    return bytes;
}
