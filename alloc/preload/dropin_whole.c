/* Large blocks: each an allocation of the driver's own, kept when it is idle for the next request
 * of about its size.
 *
 * With segments of a pool behind them they would fragment: a program that fits into the device when
 * every cudaFree gives memory back must still fit. And so they are to other processes, peers and
 * network cards what the program believes them to be. What is idle goes back when anything is
 * short, and beyond a share of the device at the next cuMemFree, longest idle first.
 *
 * Invariant, under the mutex: a device's list has all of them, those that are idle in the order in
 * which they became so; whole_bytes and whole_idle_bytes are their sums.
 */
#include "dropin.h"
#include "host_alloc.h"
#include "tenure_pool.h"

#define GRANULE_BYTES     ((size_t)2 << 20)
#define SLACK_SHARE       8 /* a block may be larger than asked for by this part */
#define IDLE_DEVICE_SHARE 4

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- the list -------------------------------------------------------------------------------- */

static void link_last(tn__dropin_device *device, tn__dropin_whole *whole) {
    whole->next = NULL;
    whole->previous = device->last_whole;
    *(device->last_whole ? &device->last_whole->next : &device->first_whole) = whole;
    device->last_whole = whole;
}

static void unlink_whole(tn__dropin_device *device, tn__dropin_whole *whole) {
    *(whole->previous ? &whole->previous->next : &device->first_whole) = whole->next;
    *(whole->next ? &whole->next->previous : &device->last_whole) = whole->previous;
}

static size_t sum_bytes(void) {
    size_t sum = 0;
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        const tn__dropin_device *device = tn__dropin.devices[i];
        if (device) sum += device->whole_bytes;
    }
    return sum;
}

/* The pools have what the whole blocks leave of the limit. */
static void share_limit(void) {
    size_t sum = sum_bytes(), left = 1, soft = tn__dropin.soft_limit_bytes;
    tn_status status;
    if (!tn__dropin.limit_bytes) return;
    if (sum < tn__dropin.limit_bytes) left = tn__dropin.limit_bytes - sum;
    if (soft > left) soft = left;
    status = tn_process_limits_set(left, soft); /* these are good */
    (void)status;
}

static int is_within_limit(size_t bytes) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    size_t limit = tn__dropin.limit_bytes, sum = sum_bytes();
    if (!limit) return 1;
    if (tn_process_limits_get(&limits) != TN_OK) return 0;
    return bytes <= limit && sum <= limit - bytes && limits.reserved_bytes <= limit - bytes - sum;
}

static void unclaim(tn__dropin_device *device, size_t bytes) {
    device->whole_bytes -= bytes;
    share_limit();
}

/* Taken from the pools, which other threads use, and looked at again then. 0: there is no room. */
static int claim(tn__dropin_device *device, size_t bytes) {
    if (!is_within_limit(bytes)) return 0;
    device->whole_bytes += bytes;
    share_limit();
    if (is_within_limit(0)) return 1;
    unclaim(device, bytes);
    return 0;
}

/* ---- taking ---------------------------------------------------------------------------------- */

static tn__dropin_whole *find_idle(const tn__dropin_device *device, size_t bytes) {
    tn__dropin_whole *best = NULL;
    for (tn__dropin_whole *whole = device->first_whole; whole; whole = whole->next) {
        if (!whole->is_idle || whole->bytes < bytes) continue;
        if (whole->bytes - bytes > bytes / SLACK_SHARE) continue;
        if (!best || whole->bytes < best->bytes) best = whole;
    }
    return best;
}

static tn_status make(tn__dropin_device *device, size_t bytes, tn__dropin_whole **out) {
    tn__dropin_whole *whole;
    void *address = NULL;
    tn_status status;
    whole = tn__host_alloc(1, sizeof *whole);
    if (!whole) return TN_OUT_OF_HOST_MEMORY;
    status = TN_OUT_OF_DEVICE_MEMORY;
    if (claim(device, bytes)) {
        status = device->driver->mem_alloc(device->state, bytes, &address);
        if (status != TN_OK) unclaim(device, bytes);
    }
    if (status != TN_OK) {
        tn__host_free(whole);
        return status;
    }
    whole->address = (uintptr_t)address;
    whole->bytes = bytes;
    link_last(device, whole);
    *out = whole;
    return TN_OK;
}

tn_status tn__dropin_whole_take(tn__dropin_device *device, tn__dropin_block *block) {
    size_t bytes = (block->bytes + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
    tn__dropin_whole *whole;
    tn_status status = TN_OK;
    if (bytes < block->bytes) return TN_OUT_OF_DEVICE_MEMORY;
    pthread_mutex_lock(&mutex);
    whole = find_idle(device, bytes);
    if (whole) {
        whole->is_idle = 0;
        device->whole_idle_bytes -= whole->bytes;
    } else {
        status = make(device, bytes, &whole);
    }
    pthread_mutex_unlock(&mutex);
    if (status != TN_OK) return status;
    block->whole = whole;
    block->address = whole->address;
    return TN_OK;
}

/* ---- giving ---------------------------------------------------------------------------------- */

void tn__dropin_whole_give(tn__dropin_device *device, tn__dropin_whole *whole) {
    pthread_mutex_lock(&mutex);
    unlink_whole(device, whole);
    link_last(device, whole);
    whole->is_idle = 1;
    device->whole_idle_bytes += whole->bytes;
    pthread_mutex_unlock(&mutex);
}

/* The driver waits for the device when it takes memory back: the mutex is not held meanwhile. */
void tn__dropin_whole_trim(tn__dropin_device *device, size_t keep_bytes) {
    pthread_mutex_lock(&mutex);
    tn__dropin_whole *whole = device->first_whole;
    while (whole && device->whole_idle_bytes > keep_bytes) {
        tn__dropin_whole *next = whole->next;
        if (whole->is_idle) {
            unlink_whole(device, whole);
            device->whole_idle_bytes -= whole->bytes;
            pthread_mutex_unlock(&mutex);
            tn_status status = device->driver->mem_free(device->state, (void *)whole->address);
            pthread_mutex_lock(&mutex);
            if (status == TN_OK) {
                atomic_fetch_add(&tn__dropin.given_back, whole->bytes);
                device->whole_bytes -= whole->bytes;
                tn__host_free(whole);
            } else { /* nobody gets it again, and the address stays known as ours */
                whole->is_idle = 0;
                link_last(device, whole);
                tn__dropin_count(&tn__dropin.counts.lost);
            }
            next = device->first_whole; /* the list may have changed */
        }
        whole = next;
    }
    share_limit();
    pthread_mutex_unlock(&mutex);
}

void tn__dropin_whole_bound(tn__dropin_device *device) {
    size_t bound = device->memory_bytes / IDLE_DEVICE_SHARE;
    int is_legal;
    if (atomic_load_explicit(&device->whole_idle_bytes, memory_order_relaxed) <= bound) return;
    is_legal = tn__dropin_captures_lock();
    if (is_legal) tn__dropin_whole_trim(device, bound);
    tn__dropin_captures_unlock();
}

int tn__dropin_whole_holds(uintptr_t address) {
    int holds = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX && !holds; i++) {
        const tn__dropin_device *device = tn__dropin.devices[i];
        const tn__dropin_whole *whole = device ? device->first_whole : NULL;
        while (whole && address - whole->address >= whole->bytes)
            whole = whole->next;
        holds = whole != NULL;
    }
    pthread_mutex_unlock(&mutex);
    return holds;
}
