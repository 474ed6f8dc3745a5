/* Backings of segments: what their provider gives is one region of one page, and comes and goes as
 * a whole.
 *
 * Requests share segments of the provider's shared_bytes if they are smaller, so that memory freed
 * by small shapes can serve larger ones; larger requests get a segment of their own size.
 *
 * What a provider gives is looked at before it is used: at least 2 MiB, aligned to 512 bytes, apart
 * from all memory of pools. What its calls say and do is undone if what follows fails. If that
 * fails as well, the segment is kept on the list of stuck ones, in a record that was made before
 * the segment was taken, and given back with the next idle memory, or when the pool ends.
 *
 * A provider of the caller's is called without the pool's mutex, so that it may use what it likes.
 * Meanwhile the bytes count as held (transit_bytes), a segment on its way back is one VOID piece,
 * the request's stream is kept from being forgotten, and what limits growth is up to who has the
 * mutex. The provider may give the memory anew before its free returns, and have it back again: any
 * number of segments on their way back may be at one address.
 */
#include "host_alloc.h"
#include "no_wait.h"
#include "pool_internal.h"

static size_t segment_bytes(const tn__region *region) {
    return region->map.end - region->map.begin;
}

static void tell_begin(tn_pool *pool, tn__region *region) {
    if (!pool->heap.track.is_on) return;
    tn__track_memory_begin(&pool->heap.track, region->map.begin, segment_bytes(region),
                           &region->tool_heap);
}

/* Checkers are told before the driver: it may use the memory itself, and give it to others. */
static void tell_end(tn_pool *pool, tn__region *region) {
    if (!pool->heap.track.is_on) return;
    tn__track_memory_end(&pool->heap.track, region->map.begin, segment_bytes(region),
                         region->tool_heap);
}

/* ---- the provider's calls -------------------------------------------------------------------- */

static tn__growth leave_pool(tn_pool *pool, size_t bytes) {
    tn__growth growth = pool->growth;
    pool->transit_bytes += bytes;
    pool->growth = TN__GROWTH_HARD;
    pthread_mutex_unlock(&pool->mutex);
    return growth;
}

static void enter_pool(tn_pool *pool, size_t bytes, tn__growth growth) {
    pthread_mutex_lock(&pool->mutex);
    pool->growth = growth;
    pool->transit_bytes -= bytes;
}

static tn_status take(tn_pool *pool, const tn__request *request, size_t bytes, void **out) {
    tn__growth growth;
    tn_status status;
    if (!pool->backing->is_unlocked) return pool->backing->take(pool, request, bytes, out);
    growth = leave_pool(pool, bytes);
    status = pool->backing->take(pool, request, bytes, out);
    enter_pool(pool, bytes, growth);
    return status;
}

static tn_status give(tn_pool *pool, void *address, size_t bytes) {
    tn__growth growth;
    tn_status status;
    if (!pool->backing->is_unlocked) return pool->backing->give(pool, address, bytes);
    growth = leave_pool(pool, bytes);
    status = pool->backing->give(pool, address, bytes);
    enter_pool(pool, bytes, growth);
    return status;
}

static tn_status claim(tn_pool *pool, size_t bytes) {
    return pool->backing->claims_itself ? TN_OK : tn__pool_claim(pool, bytes);
}

static void unclaim(const tn_pool *pool, size_t bytes) {
    if (!pool->backing->claims_itself) tn__pool_unclaim(pool, bytes);
}

static void unclaim_given(const tn_pool *pool, size_t bytes) {
    int is_claimed = !pool->backing->claims_itself && !pool->backing->is_host_memory;
    tn__process_give_back(is_claimed ? bytes : 0);
}

/* ---- stuck segments -------------------------------------------------------------------------- */

/* In the books they are held; where the provider says what it holds, it counts them itself. */
static void set_stuck(tn_pool *pool, tn__stuck_segment *stuck, int is_stuck) {
    size_t bytes = pool->backing->claims_itself ? 0 : stuck->bytes;
    if (is_stuck) {
        stuck->next = pool->stuck_segments;
        pool->stuck_segments = stuck;
        pool->stuck_bytes += bytes;
    } else {
        pool->stuck_segments = stuck->next;
        pool->stuck_bytes -= bytes;
    }
}

tn_status tn__segments_give_stuck(tn_pool *pool, tn__release *release) {
    while (pool->stuck_segments && pool->stuck_segments->bytes <= tn__release_room(release)) {
        tn__stuck_segment *stuck = pool->stuck_segments;
        tn_status status;
        set_stuck(pool, stuck, 0);
        status = give(pool, stuck->address, stuck->bytes);
        if (status != TN_OK) {
            set_stuck(pool, stuck, 1);
            return status;
        }
        unclaim_given(pool, stuck->bytes);
        release->released_bytes += stuck->bytes;
        tn__host_free(stuck);
    }
    return TN_OK;
}

/* ---- adding ---------------------------------------------------------------------------------- */

/* TN_IN_USE: it is memory that a pool has already. */
static tn_status check_memory(const tn_pool *pool, const void *address, size_t bytes) {
    uintptr_t begin = (uintptr_t)address;
    if (!address || begin % TN__BLOCK_ALIGN || begin + bytes < begin) {
        return TN_FAIL(TN_DRIVER_ERROR,
                       "pool %s was given %zu bytes of memory at %p: not at all, or not aligned to "
                       "%zu bytes",
                       pool->name, bytes, address, TN__BLOCK_ALIGN);
    }
    for (const tn__region *region = pool->heap.regions; region; region = region->next) {
        if (region->map.begin >= begin + bytes || begin >= region->map.end) continue;
        /* On its way back: the provider had it again before we learned that, and gave it anew. */
        if (region->first->kind == TN__PIECE_VOID) continue;
        return TN_FAIL(TN_IN_USE, "pool %s was given memory at %p that it has already", pool->name,
                       address);
    }
    return TN_OK;
}

static uintptr_t aligned_begin(const void *address, const tn__request *request) {
    return ((uintptr_t)address + request->alignment - 1) & ~(uintptr_t)(request->alignment - 1);
}

/* Makes a region of what was taken. *is_misplaced: it is too short to be aligned as requested; from
 * then on the provider is taken to align to no more than every pool needs. */
static tn_status adopt(tn_pool *pool, const tn__request *request, void *address, size_t bytes,
                       int *is_misplaced, tn__region **out) {
    TN_TRY(check_memory(pool, address, bytes));
    if (aligned_begin(address, request) + request->bytes > (uintptr_t)address + bytes) {
        *is_misplaced = 1;
        pool->segment_alignment = TN__BLOCK_ALIGN; /* the next one may be aligned to less yet */
        return TN_FAIL(TN_DRIVER_ERROR, "memory at %p is not aligned to %zu bytes", address,
                       request->alignment);
    }
    return tn__heap_add_region(&pool->heap, pool, request->zone, address, bytes, bytes, 1, out);
}

/* What was taken and can not be used; 1 if the record holds it now. What is somebody's already, or
 * nothing, is not ours to give back. */
static int is_left_stuck(tn_pool *pool, tn__stuck_segment *record, tn_status reason) {
    tn__saved_error saved;
    int is_ours = reason != TN_IN_USE && record->address;
    int is_stuck;
    tn__error_save(&saved);
    is_stuck = is_ours && give(pool, record->address, record->bytes) != TN_OK;
    tn__error_restore(&saved);
    if (is_stuck) {
        set_stuck(pool, record, 1);
    } else {
        unclaim(pool, record->bytes);
    }
    return is_stuck;
}

static tn_status take_segment(tn_pool *pool, const tn__request *request, int *is_misplaced,
                              tn__stuck_segment *record, int *is_stuck, tn__region **out) {
    tn_status status;
    TN_TRY(claim(pool, record->bytes));
    status = take(pool, request, record->bytes, &record->address);
    if (status != TN_OK) {
        unclaim(pool, record->bytes);
        return status;
    }
    status = adopt(pool, request, record->address, record->bytes, is_misplaced, out);
    if (status == TN_OK) return TN_OK;
    *is_stuck = is_left_stuck(pool, record, status);
    return status == TN_IN_USE ? TN_DRIVER_ERROR : status;
}

static tn_status add_segment(tn_pool *pool, const tn__request *request, size_t bytes,
                             int *is_misplaced, tn__place *out) {
    tn__stuck_segment *record = tn__host_alloc(1, sizeof *record);
    tn__region *region = NULL;
    int is_stuck = 0;
    tn_status status;
    if (!record) return TN_OUT_OF_HOST_MEMORY;
    record->bytes = bytes;
    status = take_segment(pool, request, is_misplaced, record, &is_stuck, &region);
    if (!is_stuck) tn__host_free(record);
    if (status != TN_OK) return status;
    tell_begin(pool, region);
    out->region = region;
    out->first = region->first;
    out->address = aligned_begin((void *)region->map.begin, request);
    out->missing_pages = 0;
    return TN_OK;
}

/* Room for the alignment only if the provider is known not to give it by itself. */
static size_t least_bytes(const tn_pool *pool, const tn__request *request) {
    size_t alignment = pool->segment_alignment;
    size_t bytes = request->bytes;
    if (request->alignment > alignment) bytes += request->alignment - alignment;
    if (bytes < TN__MAP_PAGE_BYTES) bytes = TN__MAP_PAGE_BYTES;
    return tn__round_up(bytes, pool->page_bytes);
}

static tn_status add_own_segment(tn_pool *pool, const tn__request *request, int *is_misplaced,
                                 tn__place *out) {
    size_t least = least_bytes(pool, request);
    size_t round = pool->backing->round ? pool->backing->round(pool, least) : least;
    tn_status status = TN_OUT_OF_DEVICE_MEMORY;
    if (round > least) status = add_segment(pool, request, round, is_misplaced, out);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        status = add_segment(pool, request, least, is_misplaced, out);
    }
    return status;
}

tn_status tn__segment_add(tn_pool *pool, const tn__request *request, tn__place *out) {
    size_t shared = pool->backing->shared_bytes;
    tn_status status = TN_OUT_OF_DEVICE_MEMORY;
    int is_misplaced = 0;
    if (least_bytes(pool, request) < shared) {
        status = add_segment(pool, request, shared, &is_misplaced, out);
    }
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        status = add_own_segment(pool, request, &is_misplaced, out);
    }
    /* Each such address shows a smaller alignment than was believed in: this ends. */
    while (is_misplaced) {
        is_misplaced = 0;
        status = add_own_segment(pool, request, &is_misplaced, out);
    }
    return status;
}

static tn_status grow(tn_pool *pool, const tn__request *request, tn__effort effort,
                      tn__place *out) {
    for (;;) {
        tn__release release = {.least_bytes = request->bytes, .most_bytes = SIZE_MAX};
        tn_status status = tn__segment_add(pool, request, out);
        if (status != TN_OUT_OF_DEVICE_MEMORY || effort != TN__EFFORT_ALL) return status;
        TN_TRY(pool->backing->release(pool, &release));
        if (release.released_bytes == 0) return status;
    }
}

tn_status tn__segments_grow(tn_pool *pool, const tn__request *request, tn__effort effort,
                            tn__place *out) {
    tn_status status;
    request->stream->hold_count++;
    status = grow(pool, request, effort, out);
    request->stream->hold_count--;
    return status;
}

/* ---- giving back ----------------------------------------------------------------------------- */

tn__region *tn__segment_find_idle(tn_pool *pool, size_t most_bytes) {
    tn__region *oldest = NULL;
    if (tn__graph_holds(pool->graph)) return NULL;
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        tn__piece *piece = region->first;
        if (piece->next || piece->kind != TN__PIECE_FREE || piece->uses.count) continue;
        if (segment_bytes(region) > most_bytes) continue;
        if (!oldest || piece->age < oldest->first->age) oldest = region;
    }
    return oldest;
}

/* While it is with the provider, nobody finds the segment. */
static void set_found(tn_pool *pool, tn__region *region, int is_found) {
    const tn__page_span page = {0, 1};
    tn__bits_set(region->mapped, page, is_found);
    pool->heap.mapped_bytes += is_found ? segment_bytes(region) : -segment_bytes(region);
    tn__heap_change(&pool->heap, region->first, is_found ? TN__PIECE_FREE : TN__PIECE_VOID);
}

/* The provider did not take it. If it gave it anew meanwhile, it did take it, whatever it says: the
 * memory is somebody's, and not this segment's any more. */
static int is_kept(tn_pool *pool, tn__region *region) {
    tn__saved_error saved;
    int is_ours;
    tn__error_save(&saved);
    is_ours = tn__page_map_add(&region->map) == TN_OK;
    tn__error_restore(&saved);
    if (!is_ours) return 0;
    if (pool->backing->is_unlocked) set_found(pool, region, 1);
    tell_begin(pool, region);
    return 1;
}

tn_status tn__segment_give(tn_pool *pool, tn__region *region) {
    size_t bytes = segment_bytes(region);
    tn_status status;
    tell_end(pool, region);
    tn__page_map_remove(&region->map);
    if (pool->backing->is_unlocked) set_found(pool, region, 0);
    status = give(pool, (void *)region->map.begin, bytes);
    if (status != TN_OK && is_kept(pool, region)) return status;
    unclaim_given(pool, bytes);
    tn__heap_remove_region(&pool->heap, region);
    return status;
}

tn_status tn__segments_release(tn_pool *pool, tn__release *release) {
    TN_TRY(tn__segments_give_stuck(pool, release));
    TN_TRY(tn__pool_collect(pool));
    while (!tn__release_is_done(release)) {
        tn__region *region = tn__segment_find_idle(pool, tn__release_room(release));
        tn_status status;
        size_t bytes;
        if (!region) break;
        bytes = segment_bytes(region);
        if (!tn__driver_wait_begin()) break;
        status = tn__segment_give(pool, region);
        tn__driver_wait_end();
        if (status != TN_OK) return status;
        release->released_bytes += bytes;
    }
    return TN_OK;
}
