/* Blocks with a physical handle of their own: see pool_dedicated.h.
 *
 * What goes wrong while one is given back leaves it in the state that is true: FREE while it holds
 * memory, mapped or not, and VOID when only its addresses are left. Either is tried again.
 */
#include "pool_dedicated.h"

#include "handle_cache.h"
#include "host_alloc.h"
#include "pool_internal.h"

/* ---- a handle and its mapping ---------------------------------------------------------------- */

static tn_status map_at(tn_pool *pool, tn__own_mapping *mapping) {
    TN_TRY(pool->driver->mem_map(pool->state, mapping->address, mapping->bytes, mapping->handle));
    mapping->is_mapped = 1;
    return tn__pool_set_access(pool, mapping->address, mapping->bytes);
}

tn_status tn__own_mapping_place(tn_pool *pool, tn__own_mapping *mapping) {
    TN_TRY(pool->driver->address_reserve(pool->state, mapping->bytes, &mapping->address));
    mapping->has_address = 1;
    return map_at(pool, mapping);
}

/* Unmaps, and gives the handle back. */
static tn_status clear_mapping(tn_pool *pool, tn__own_mapping *mapping) {
    if (mapping->is_mapped) {
        TN_TRY(pool->driver->mem_unmap(pool->state, mapping->address, mapping->bytes));
        mapping->is_mapped = 0;
    }
    if (mapping->has_handle) {
        TN_TRY(pool->driver->mem_release(pool->state, mapping->handle, mapping->bytes));
        mapping->has_handle = 0;
        if (mapping->is_reserved) tn__process_give_back(mapping->bytes);
    }
    return TN_OK;
}

static tn_status end_mapping(tn_pool *pool, tn__own_mapping *mapping) {
    TN_TRY(clear_mapping(pool, mapping));
    if (mapping->has_address) {
        TN_TRY(pool->driver->address_free(pool->state, mapping->address, mapping->bytes));
        mapping->has_address = 0;
    }
    return TN_OK;
}

/* The same for a region's mapping. */
static tn_status end_region(tn_pool *pool, tn__region *region, tn__own_mapping *mapping) {
    tn_status status;
    tn__page_map_remove(&region->map);
    status = end_mapping(pool, mapping);
    if (status != TN_OK) tn__page_map_restore(&region->map);
    return status;
}

static size_t stuck_bytes(const tn__own_mapping *mapping) {
    return mapping->is_reserved && mapping->has_handle ? mapping->bytes : 0;
}

void tn__own_mapping_undo(tn_pool *pool, tn__own_mapping *mapping) {
    tn__saved_error saved;
    tn__error_save(&saved);
    if (end_mapping(pool, mapping) == TN_OK) {
        tn__host_free(mapping);
    } else {
        mapping->next = pool->stuck;
        pool->stuck = mapping;
        pool->stuck_bytes += stuck_bytes(mapping);
    }
    tn__error_restore(&saved);
}

static tn_status end_stuck(tn_pool *pool) {
    while (pool->stuck) {
        tn__own_mapping *mapping = pool->stuck;
        size_t before = stuck_bytes(mapping);
        tn_status status = end_mapping(pool, mapping);
        pool->stuck_bytes -= before - stuck_bytes(mapping);
        if (status != TN_OK) return status;
        pool->stuck = mapping->next;
        tn__host_free(mapping);
    }
    return TN_OK;
}

/* ---- a new block ----------------------------------------------------------------------------- */

size_t tn__dedicated_bytes(const tn_pool *pool, size_t asked_bytes) {
    return tn__round_up(asked_bytes,
                        tn__round_up(TN__MAP_PAGE_BYTES, pool->info.granularity_bytes));
}

tn_status tn__dedicated_check(const tn_pool *pool, const tn__request *request) {
    const unsigned known = TN_ALLOC_SINGLE_HANDLE | TN_ALLOC_SHAREABLE;
    TN_REQUIRE((request->flags & ~known) == 0, "tn_alloc_options.flags %#x: unknown bits",
               request->flags);
    if (!pool->backing->maps_handles) {
        return TN_FAIL(TN_UNSUPPORTED, "pool %s has no VMM pages: no block has a handle of its own",
                       pool->name);
    }
    if (pool->graph) {
        return TN_FAIL(TN_UNSUPPORTED, "pool %s is a graph pool: its blocks share handles",
                       pool->name);
    }
    TN_REQUIRE(request->alignment <= pool->info.granularity_bytes,
               "a block with a handle of its own is aligned to %zu bytes, not to %zu",
               pool->info.granularity_bytes, request->alignment);
    return TN_OK;
}

static tn_status create_handle(tn_pool *pool, int is_shareable, tn__own_mapping *mapping) {
    tn_status status = TN_OK;
    TN_TRY(tn__pool_claim(pool, mapping->bytes));
    status = is_shareable
                 ? pool->driver->share_create(pool->state, mapping->bytes, &mapping->handle)
                 : pool->driver->mem_create(pool->state, mapping->bytes, &mapping->handle);
    mapping->has_handle = status == TN_OK;
    if (status != TN_OK) tn__process_unclaim(mapping->bytes);
    return status;
}

static tn_status place_block(tn_pool *pool, tn__dedicated *block, tn__region **out) {
    tn__own_mapping *mapping = &block->mapping;
    TN_TRY(create_handle(pool, block->is_shareable, mapping));
    TN_TRY(tn__own_mapping_place(pool, mapping));
    return tn__heap_add_region(&pool->heap, pool, TN__ZONE_DEDICATED, mapping->address,
                               mapping->bytes, mapping->bytes, 1, out);
}

static tn_status make_block(tn_pool *pool, const tn__request *request, tn__place *out) {
    tn__dedicated *block = tn__host_alloc(1, sizeof *block);
    tn__region *region = NULL;
    tn_status status;
    if (!block) return TN_OUT_OF_HOST_MEMORY;
    block->mapping.bytes = request->bytes;
    block->mapping.is_reserved = 1;
    block->is_shareable = (request->flags & TN_ALLOC_SHAREABLE) != 0;
    status = place_block(pool, block, &region);
    if (status != TN_OK) {
        tn__own_mapping_undo(pool, &block->mapping);
        return status;
    }
    region->dedicated = block;
    *out = (tn__place){.region = region, .first = region->first, .address = region->map.begin};
    return TN_OK;
}

tn_status tn__dedicated_grow(tn_pool *pool, const tn__request *request, tn__effort effort,
                             tn__place *out) {
    for (;;) {
        tn__release release = {.least_bytes = request->bytes, .most_bytes = SIZE_MAX};
        tn_status status = make_block(pool, request, out);
        size_t cached_bytes = 0;
        if (status != TN_OUT_OF_DEVICE_MEMORY || effort != TN__EFFORT_ALL) return status;
        TN_TRY(tn__pool_release(pool, &release));
        TN_TRY(tn__handle_cache_empty(pool->device, &cached_bytes));
        if (release.released_bytes == 0) return status;
    }
}

/* ---- one that was freed ---------------------------------------------------------------------- */

static int is_reusable(const tn__region *region, const tn__request *request) {
    const tn__dedicated *block = region->dedicated;
    int wants_shareable = (request->flags & TN_ALLOC_SHAREABLE) != 0;
    return block->mapping.is_mapped && !block->is_exported &&
           block->is_shareable == wants_shareable;
}

int tn__dedicated_find(tn_pool *pool, const tn__request *request, tn__place *out) {
    tn__tree_node *root = pool->heap.zones[TN__ZONE_DEDICATED].runs;
    tn__tree_node *node = tn__tree_at_least(root, request->bytes, 0);
    tn__piece *found = NULL;
    int is_ready = 0;
    for (; node && node->major == request->bytes && !is_ready; node = tn__tree_next(root, node)) {
        tn__piece *piece = tn__piece_of(node);
        if (!is_reusable(piece->region, request)) continue;
        is_ready = tn__order_is_ready(request->stream, &piece->uses);
        if (!found || is_ready) found = piece;
    }
    if (!found) return 0;
    *out = (tn__place){.region = found->region, .first = found, .address = found->address};
    return 1;
}

/* ---- giving back ----------------------------------------------------------------------------- */

static int is_over(const tn__region *region) {
    const tn__piece *piece = region->first;
    int is_free = piece->kind == TN__PIECE_FREE || piece->kind == TN__PIECE_VOID;
    return region->dedicated && is_free && piece->uses.count == 0;
}

/* *released: also when only the addresses are still to be given back. */
static tn_status give_back(tn_pool *pool, tn__region *region, size_t *released) {
    tn__dedicated *block = region->dedicated;
    if (region->first->kind == TN__PIECE_FREE) {
        TN_TRY(clear_mapping(pool, &block->mapping));
        tn__bits_set(region->mapped, (tn__page_span){0, 1}, 0);
        pool->heap.mapped_bytes -= block->mapping.bytes;
        region->first->stream = NULL;
        tn__heap_change(&pool->heap, region->first, TN__PIECE_VOID);
        *released += block->mapping.bytes;
    }
    TN_TRY(end_region(pool, region, &block->mapping));
    tn__heap_remove_region(&pool->heap, region);
    tn__host_free(block);
    return TN_OK;
}

/* Longest idle first. */
static tn__region *find_idle(tn_pool *pool, size_t most_bytes) {
    tn__region *oldest = NULL;
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        if (!is_over(region) || region->page_bytes > most_bytes) continue;
        if (!oldest || region->first->age < oldest->first->age) oldest = region;
    }
    return oldest;
}

tn_status tn__dedicated_release(tn_pool *pool, tn__release *release) {
    while (!tn__release_is_done(release)) {
        tn__region *region = find_idle(pool, tn__release_room(release));
        if (!region || tn__release_spares(release, region->first->age)) break;
        TN_TRY(give_back(pool, region, &release->released_bytes));
    }
    return TN_OK;
}

/* ---- guests ---------------------------------------------------------------------------------- */

static tn_status end_guest(tn_pool *pool, tn__region *region) {
    tn__guest *guest = region->guest;
    TN_TRY(end_region(pool, region, &guest->mapping));
    tn__heap_remove_region(&pool->heap, region);
    tn__host_free(guest);
    return TN_OK;
}

static int is_guest_over(tn__region *region) {
    if (!region->guest || region->guest->references > 0) return 0;
    tn__uses_settle(&region->first->uses);
    return region->first->uses.count == 0;
}

tn_status tn__dedicated_close(tn_pool *pool) {
    size_t released = 0;
    for (tn__region *region = pool->heap.regions, *next; region; region = next) {
        next = region->next;
        if (is_guest_over(region)) {
            TN_TRY(end_guest(pool, region));
        } else if (is_over(region)) {
            TN_TRY(give_back(pool, region, &released));
        }
    }
    return end_stuck(pool);
}

void tn__dedicated_collect(tn_pool *pool) {
    tn__saved_error saved;
    size_t released = 0;
    tn__error_save(&saved);
    (void)end_stuck(pool);
    for (tn__region *region = pool->heap.regions, *next; region; region = next) {
        next = region->next;
        if (is_guest_over(region)) {
            (void)end_guest(pool, region);
        } else if (is_over(region) && region->dedicated->is_exported) {
            (void)give_back(pool, region, &released);
        }
    }
    tn__error_restore(&saved);
}

tn_status tn__guests_check_closed(tn_pool *pool) {
    size_t count = 0;
    for (const tn__region *region = pool->heap.regions; region; region = region->next)
        count += region->guest && region->guest->references > 0;
    if (count == 0) return TN_OK;
    return TN_FAIL(TN_LEAK, "pool %s still has %zu imported blocks: tn_share_close them first",
                   pool->name, count);
}
