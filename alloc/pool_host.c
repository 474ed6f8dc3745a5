/* HOST and PINNED backings: segments of host memory, out of jemalloc arenas of the pool's own.
 *
 * Blocks are for the CPU as well as for devices, and no stream says when the CPU uses one. So a
 * block is given out only once all uses of its memory are known complete, and never behind a wait
 * on the device.
 *
 * Pageable memory is jemalloc's, or where that can not be loaded, from mmap. Pinned memory is the
 * driver's, taken by jemalloc through extent hooks (host_arena.h): before such a pool grows, its
 * idle segments go back to jemalloc, which joins and cuts them for the next one, so that memory is
 * pinned anew only if nothing else serves. What jemalloc holds for later counts as held by the
 * pool.
 */
#include <unistd.h>

#include "driver_host_memory.h"
#include "host_alloc.h"
#include "no_wait.h"
#include "pool_internal.h"

static tn_status check_nothing(const tn_pool_config *config, const tn_device_info *info) {
    (void)config;
    (void)info;
    return TN_OK;
}

static tn_status open_memory(tn_pool *pool, const tn__extent_source *source) {
    tn__host_memory *memory = tn__host_alloc(1, sizeof *memory);
    if (!memory) return TN_OUT_OF_HOST_MEMORY;
    tn__host_memory_open(memory, SIZE_MAX, source);
    pool->store = memory;
    pool->page_bytes = TN__HOST_GRANULARITY;
    pool->most_bytes = SIZE_MAX / 4;
    tn__pool_observe(pool, TN__OBSERVE_HOST, 1);
    return TN_OK;
}

static tn_status close_memory(tn_pool *pool) {
    if (!pool->store) return TN_OK;
    TN_TRY(tn__host_memory_close(pool->store));
    tn__host_free(pool->store);
    pool->store = NULL;
    return TN_OK;
}

static void host_memory_info(size_t *free_bytes, size_t *total_bytes) {
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    *free_bytes = (size_t)sysconf(_SC_AVPHYS_PAGES) * page_bytes;
    *total_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * page_bytes;
}

static tn_status take_memory(tn_pool *pool, const tn__request *request, size_t bytes, void **out) {
    (void)request;
    return tn__host_memory_take(pool->store, bytes, out);
}

static tn_status give_memory(tn_pool *pool, void *address, size_t bytes) {
    (void)bytes;
    return tn__host_memory_give(pool->store, address);
}

/* ---- pageable -------------------------------------------------------------------------------- */

static tn_status open_host(tn_pool *pool, const tn_pool_config *config) {
    (void)config;
    return open_memory(pool, NULL);
}

static tn_status release_host(tn_pool *pool, tn__release *release) {
    tn_status status = tn__segments_release(pool, release);
    if (release->released_bytes) tn__host_memory_purge(pool->store);
    return status;
}

const tn__backing tn__backing_host = {
    .kind = TN_BACKING_HOST,
    .name = "host",
    .is_host_memory = 1,
    .check_config = check_nothing,
    .open = open_host,
    .grow = tn__segments_grow,
    .release = release_host,
    .close = close_memory,
    .shared_bytes = (size_t)32 << 20,
    .take = take_memory,
    .give = give_memory,
    .memory_info = host_memory_info,
    .scattered_hint = "memory is free but in pieces that are too small: free some of the largest "
                      "owners"};

/* ---- pinned ---------------------------------------------------------------------------------- */

/* jemalloc asks, under the pool's mutex. */
static tn_status take_extent(void *context, size_t bytes, void **out) {
    tn_pool *pool = context;
    TN_TRY(tn__pool_claim(pool, bytes));
    return pool->driver->host_alloc(pool->state, bytes, out);
}

static tn_status give_extent(void *context, void *address, size_t bytes) {
    const tn_pool *pool = context;
    (void)bytes;
    return pool->driver->host_free(pool->state, address);
}

static tn_status open_pinned(tn_pool *pool, const tn_pool_config *config) {
    const tn__extent_source source = {take_extent, give_extent, pool};
    (void)config;
    return open_memory(pool, &source);
}

static size_t pinned_held_bytes(const tn_pool *pool) {
    return pool->store ? tn__host_memory_held(pool->store) - pool->heap.mapped_bytes : 0;
}

static size_t pinned_round(const tn_pool *pool, size_t bytes) {
    return tn__host_memory_round(pool->store, bytes);
}

static tn_status grow_pinned(tn_pool *pool, const tn__request *request, tn__effort effort,
                             tn__place *out) {
    tn__region *region;
    while ((region = tn__segment_find_idle(pool, SIZE_MAX)) != NULL)
        TN_TRY(tn__segment_give(pool, region));
    return tn__segments_grow(pool, request, effort, out);
}

/* jemalloc gives all or nothing of what it holds: nothing if that would be too much. */
static tn_status purge_pinned(tn_pool *pool, const tn__release *release) {
    tn_status status = TN_OK;
    if (pinned_held_bytes(pool) > tn__release_room(release)) return TN_OK;
    if (!tn__driver_wait_begin()) return TN_OK;
    if (pool->heap.mapped_bytes == 0) {
        status = tn__host_memory_reset(pool->store);
    } else {
        tn__host_memory_purge(pool->store);
    }
    tn__driver_wait_end();
    return status;
}

static tn_status release_pinned(tn_pool *pool, tn__release *release) {
    tn__release stuck = {.most_bytes = SIZE_MAX};
    size_t before = tn__host_memory_held(pool->store);
    tn_status status = tn__segments_give_stuck(pool, &stuck);
    if (status == TN_OK) status = tn__pool_collect(pool);
    while (status == TN_OK) {
        size_t held = pinned_held_bytes(pool);
        size_t room = tn__release_room(release);
        tn__region *region = NULL;
        if (held + release->released_bytes < release->least_bytes && room > held) {
            region = tn__segment_find_idle(pool, room - held);
        }
        if (!region) break;
        status = tn__segment_give(pool, region);
    }
    if (status == TN_OK && !tn__release_is_done(release)) status = purge_pinned(pool, release);
    release->released_bytes += before - tn__host_memory_held(pool->store);
    return status;
}

const tn__backing tn__backing_pinned = {
    .kind = TN_BACKING_PINNED,
    .name = "pinned",
    .is_host_memory = 1,
    .is_pinned = 1,
    .check_config = check_nothing,
    .open = open_pinned,
    .grow = grow_pinned,
    .release = release_pinned,
    .close = close_memory,
    .held_bytes = pinned_held_bytes,
    .shared_bytes = (size_t)32 << 20,
    .claims_itself = 1,
    .take = take_memory,
    .give = give_memory,
    .round = pinned_round,
    .memory_info = host_memory_info,
    .scattered_hint = "memory is free but in pieces that are too small: free some of the largest "
                      "owners"};
