/* ASYNC backing: a memory pool of the driver's own, as behind cudaMallocAsync.
 *
 * Every block of 1 MiB or more is an allocation of the driver's pool, made and freed in the order
 * of its stream; smaller blocks share allocations of 2 MiB, which stay with the heap until memory
 * is given back. So the driver decides where large memory is reused, and the pool's own books,
 * owners, uses and checks hold as for every backing: reserved is what the driver's pool has, and
 * what of that is in no segment counts as held.
 *
 * A block that is freed goes to the driver's pool at once, behind all of its uses:
 *
 *   - only its stream, or one that it comes after, used it:  freed on that stream
 *   - others used it, too:  a stream of the pool's own waits for them, and it is freed there, so
 *     that no stream of the user waits for what it has no part in
 *   - that fails, or the stream captures:  it stays in the heap, and is used again from there
 *
 * The traps of such pools: their release threshold is the most (the driver's table sets it), since
 * by default every synchronisation unmaps what is free. And memory that streams have freed may not
 * serve a request of another shape before the host has seen the work complete: the uses of what
 * was given back are kept in pool->given, and the bounded wait of a pool that is short waits for
 * them, too.
 */
#include "host_alloc.h"
#include "no_wait.h"
#include "pool_internal.h"

/* A guess at the granule in which the driver's pool takes and gives physical memory. */
#define GRANULE_BYTES ((size_t)32 << 20)

typedef struct async_store {
    tn__mempool mempool;
    tn_stream behind;      /* comes after uses on several streams; NULL: not made yet */
    tn_stream giving;      /* for what nothing uses; likewise */
    size_t reserved_bytes; /* the driver's pool has, as it said last */
    tn_stream taken_on;    /* by the last allocation */
    int has_lost_free;     /* after a failure: in the order of a stream that nobody waits for */
    size_t claimed_bytes;  /* of those, against the process's limits */
} async_store;

static async_store *store_of(const tn_pool *pool) { return pool->store; }

/* ---- open and close -------------------------------------------------------------------------- */

static tn_status check_async(const tn_pool_config *config, const tn_device_info *info) {
    (void)config;
    if (info->driver == TN_DRIVER_CUDA) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "%s: the host driver has no memory pools of its own; use AUTO",
                   info->name);
}

static tn_status open_async(tn_pool *pool, const tn_pool_config *config) {
    async_store *store = tn__host_alloc(1, sizeof *store);
    tn_status status;
    if (!store) return TN_OUT_OF_HOST_MEMORY;
    status = pool->driver->mempool_create(pool->state, config->limit_bytes, &store->mempool);
    if (status != TN_OK) {
        tn__host_free(store);
        return status;
    }
    pool->store = store;
    pool->page_bytes = TN__BLOCK_ALIGN;
    return TN_OK;
}

static tn_status end_stream(tn_pool *pool, tn_stream *stream) {
    if (!*stream) return TN_OK;
    TN_TRY(pool->driver->stream_synchronize(pool->state, *stream));
    TN_TRY(pool->driver->stream_destroy(pool->state, *stream));
    *stream = NULL;
    return TN_OK;
}

static tn_status wait_for_lost_frees(tn_pool *pool) {
    async_store *store = store_of(pool);
    if (!store->has_lost_free) return TN_OK;
    TN_TRY(tn__device_wait_begin(pool->device));
    tn_status status = pool->driver->synchronize(pool->state);
    tn__driver_wait_end();
    if (status == TN_OK) store->has_lost_free = 0;
    return status;
}

/* All that was freed behind others has completed. */
static tn_status close_async(tn_pool *pool) {
    async_store *store = store_of(pool);
    tn__release stuck = {.most_bytes = SIZE_MAX};
    if (!store) return TN_OK;
    TN_TRY(wait_for_lost_frees(pool));
    store->taken_on = NULL; /* any stream will do: what is stuck was allocated before */
    TN_TRY(tn__segments_give_stuck(pool, &stuck));
    TN_TRY(wait_for_lost_frees(pool));
    TN_TRY(end_stream(pool, &store->behind));
    TN_TRY(end_stream(pool, &store->giving));
    TN_TRY(pool->driver->mempool_destroy(pool->state, store->mempool));
    tn__process_give_back(store->claimed_bytes);
    tn__host_free(store);
    pool->store = NULL;
    return TN_OK;
}

static size_t async_held_bytes(const tn_pool *pool) {
    const async_store *store = store_of(pool);
    return store ? store->reserved_bytes - pool->heap.mapped_bytes : 0;
}

/* ---- what the driver's pool has reserved ----------------------------------------------------- */

/* Its own rounding may take the process above its limit, by less than a granule: that memory is
 * claimed as soon as it can be. `least`: it has at least that much. */
static void learn_reserved(tn_pool *pool, size_t least) {
    async_store *store = store_of(pool);
    size_t reserved = 0;
    tn__error_scope_begin();
    if (pool->driver->mempool_reserved(pool->state, store->mempool, &reserved) != TN_OK) {
        reserved = store->reserved_bytes;
    }
    store->reserved_bytes = reserved > least ? reserved : least;
    reserved = store->reserved_bytes;
    if (store->claimed_bytes > reserved) {
        tn__process_give_back(store->claimed_bytes - reserved);
        store->claimed_bytes = reserved;
    } else if (tn__process_claim(reserved - store->claimed_bytes, TN__GROWTH_HARD) == TN_OK) {
        store->claimed_bytes = reserved;
    }
    (void)tn__error_scope_end(TN_OK);
}

/* What it surely grows by is claimed before. In a capture the driver would make the memory part of
 * the graph. */
static tn_status take_async(tn_pool *pool, const tn__request *request, size_t bytes, void **out) {
    async_store *store = store_of(pool);
    size_t held = async_held_bytes(pool);
    size_t mapped = pool->heap.mapped_bytes;
    tn_status status;
    TN_TRY(tn__order_check_capture(&pool->order, request->stream->handle, "ask the driver's pool"));
    if (bytes > held) {
        TN_TRY(tn__pool_claim(pool, bytes - held));
        store->claimed_bytes += bytes - held;
    }
    status = pool->driver->mempool_alloc(pool->state, store->mempool, bytes,
                                         request->stream->handle, out);
    store->taken_on = request->stream->handle;
    learn_reserved(pool, status == TN_OK ? mapped + bytes : mapped);
    return status;
}

/* Of what was taken last, and could not be used after all. What is stuck goes back when the pool
 * ends and the device has been waited for: the stream may have ended meanwhile. */
static tn_status give_async(tn_pool *pool, void *address, size_t bytes) {
    (void)bytes;
    store_of(pool)->has_lost_free = 1;
    TN_TRY(pool->driver->mempool_free(pool->state, address, store_of(pool)->taken_on));
    learn_reserved(pool, pool->heap.mapped_bytes);
    return TN_OK;
}

/* ---- giving a block back in stream order ----------------------------------------------------- */

static int is_all_free(const tn__region *region) {
    const tn__piece *piece = region->first;
    while (piece && piece->kind == TN__PIECE_FREE)
        piece = piece->next;
    return !piece;
}

static int is_ready(const tn__region *region, const tn__pool_stream *stream) {
    for (tn__piece *piece = region->first; piece; piece = piece->next) {
        if (!tn__order_is_ready(stream, &piece->uses)) return 0;
    }
    return 1;
}

static tn_status wait_behind(tn_pool *pool, const tn__region *region, tn__pool_stream **out) {
    async_store *store = store_of(pool);
    if (!store->behind) TN_TRY(pool->driver->stream_create(pool->state, &store->behind));
    TN_TRY(tn__order_find(&pool->order, store->behind, out));
    for (tn__piece *piece = region->first; piece; piece = piece->next)
        TN_TRY(tn__order_wait(&pool->order, *out, &piece->uses));
    return TN_OK;
}

/* The heap forgets it once it is freed: its uses are the driver's business then. */
static tn_status free_segment(tn_pool *pool, tn__region *region, tn_stream stream) {
    tn_status status;
    tn__page_map_remove(&region->map);
    status = pool->driver->mempool_free(pool->state, (void *)region->map.begin, stream);
    if (status != TN_OK) {
        tn__page_map_restore(&region->map);
        return status;
    }
    for (tn__piece *piece = region->first; piece; piece = piece->next) {
        tn__uses_clear(&piece->uses);
        piece->stream = NULL;
    }
    for (tn__piece *first = region->first; first && first->next; first = region->first)
        tn__heap_join(&pool->heap, first);
    tn__heap_remove_region(&pool->heap, region);
    return TN_OK;
}

static tn_status give_in_order(tn_pool *pool, tn__region *region, tn__pool_stream *stream) {
    tn__use use;
    if (!stream || !is_ready(region, stream)) TN_TRY(wait_behind(pool, region, &stream));
    TN_TRY(tn__order_check_capture(&pool->order, stream->handle, "free"));
    TN_TRY(tn__uses_reserve(&pool->given, pool->given.count + 1));
    TN_TRY(free_segment(pool, region, stream->handle));
    use = tn__order_use_now(stream);
    tn__uses_add(&pool->given, use.stream, use.epoch);
    return TN_OK;
}

/* What can not go back now stays in the heap. */
static void freed_async(tn_pool *pool, tn__region *region, tn__pool_stream *stream) {
    if (region->zone != &pool->heap.zones[TN__ZONE_LARGE] || !is_all_free(region)) return;
    tn__error_scope_begin();
    (void)give_in_order(pool, region, stream);
    (void)tn__error_scope_end(TN_OK);
}

/* ---- growing --------------------------------------------------------------------------------- */

/* Other streams may use it only after this one's allocation. */
static void add_first_use(const tn__place *place, tn__pool_stream *stream) {
    tn__use use = tn__order_use_now(stream);
    place->first->stream = stream;
    tn__uses_add(&place->first->uses, use.stream, use.epoch);
}

static tn_status grow_async(tn_pool *pool, const tn__request *request, tn__effort effort,
                            tn__place *out) {
    tn_status status = tn__segment_add(pool, request, out);
    if (status == TN_OUT_OF_DEVICE_MEMORY && effort == TN__EFFORT_ALL) {
        tn__release everything = {.least_bytes = SIZE_MAX, .most_bytes = SIZE_MAX};
        TN_TRY(pool->backing->release(pool, &everything));
        status = tn__segment_add(pool, request, out);
    }
    if (status == TN_OK) add_first_use(out, request->stream);
    return status;
}

/* ---- giving memory back to the device -------------------------------------------------------- */

/* Idle segments that nothing uses go to the driver's pool, so that it can give them back: freed on
 * a stream that the host can wait for, since there is nothing else on it. */
static tn_status give_idle(tn_pool *pool, size_t bytes) {
    async_store *store = store_of(pool);
    tn__region *region = bytes > 0 ? tn__segment_find_idle(pool, SIZE_MAX) : NULL;
    if (!region) return TN_OK;
    if (!store->giving) TN_TRY(pool->driver->stream_create(pool->state, &store->giving));
    for (; region; region = tn__segment_find_idle(pool, SIZE_MAX)) {
        size_t segment_bytes = region->map.end - region->map.begin;
        TN_TRY(free_segment(pool, region, store->giving));
        if (segment_bytes >= bytes) break;
        bytes -= segment_bytes;
    }
    return pool->driver->stream_synchronize(pool->state, store->giving);
}

static tn_status trim_by(tn_pool *pool, tn__release *release, size_t bytes) {
    async_store *store = store_of(pool);
    size_t before = store->reserved_bytes;
    size_t room = tn__release_room(release);
    if (bytes > room) bytes = room;
    TN_TRY(pool->driver->mempool_trim(pool->state, store->mempool,
                                      before > bytes ? before - bytes : 0));
    learn_reserved(pool, pool->heap.mapped_bytes);
    if (store->reserved_bytes < before) release->released_bytes += before - store->reserved_bytes;
    return TN_OK;
}

/* The driver gives whole granules back: a little more than wanted may be what it takes. */
static tn_status release_async(tn_pool *pool, tn__release *release) {
    const size_t slacks[] = {0, 2 * GRANULE_BYTES, SIZE_MAX / 2};
    size_t held;
    TN_TRY(tn__pool_collect(pool));
    held = async_held_bytes(pool);
    TN_TRY(give_idle(pool, release->least_bytes > held ? release->least_bytes - held : 0));
    for (size_t i = 0; i < sizeof slacks / sizeof *slacks; i++) {
        size_t wanted;
        if (tn__release_is_done(release) || async_held_bytes(pool) == 0) break;
        wanted = release->least_bytes - release->released_bytes;
        if (wanted >= store_of(pool)->reserved_bytes) return trim_by(pool, release, wanted);
        TN_TRY(trim_by(pool, release, wanted + slacks[i]));
    }
    return TN_OK;
}

const tn__backing tn__backing_async = {
    .kind = TN_BACKING_ASYNC,
    .name = "async",
    .is_cheap_to_grow = 1,
    .check_config = check_async,
    .open = open_async,
    .grow = grow_async,
    .release = release_async,
    .close = close_async,
    .held_bytes = async_held_bytes,
    .freed = freed_async,
    .claims_itself = 1,
    .take = take_async,
    .give = give_async,
    .scattered_hint = "memory is free but in pieces that are too small, or not yet known complete: "
                      "VMM backing could use it"};
