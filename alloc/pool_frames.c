/* VMM backing: frames made and released, and their mappings undone. See heap_frames.h.
 *
 * Mappings are kept when memory moves, and undone only when they are in the way: when another
 * frame is wanted at the page, when the frame goes back to the driver, or when there are more than
 * VIEWS_PER_FRAME for each frame of the pool: then the oldest go, many at a time. No mapping is
 * undone while work may use it.
 */
#include <stdlib.h>

#include "handle_cache.h"
#include "host_alloc.h"
#include "pool_idle.h"

#define VIEWS_PER_FRAME 8
#define VIEWS_LEAST     1024 /* kept in any case */

/* ---- views ----------------------------------------------------------------------------------- */

tn_status tn__views_unmap(tn_pool *pool, tn__region *region, tn__page_span span) {
    size_t bytes = (span.end - span.first) * region->page_bytes;
    if (bytes == 0) return TN_OK;
    TN_TRY(
        pool->driver->mem_unmap(pool->state, (void *)tn__page_address(region, span.first), bytes));
    for (size_t page = span.first; page < span.end; page++)
        tn__frame_detach(&pool->heap, &region->views[page]);
    return TN_OK;
}

int tn__frame_is_complete(const tn__frame *frame) {
    for (const tn__view *view = frame->views; view; view = view->next) {
        if (view != frame->active && tn__page_is_used(view->region, tn__view_page(view))) return 0;
    }
    return 1;
}

typedef struct view_list {
    tn__view **views;
    size_t count;
} view_list;

static void gather_dormant(tn_pool *pool, view_list *list) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        tn__page_span span = {0, 0};
        while (region->views && tn__next_mapped(region, span.end, &span)) {
            for (size_t page = span.first; page < span.end; page++) {
                tn__view *view = &region->views[page];
                if (tn__page_bit(region->mapped, page) || tn__page_is_used(region, page)) continue;
                list->views[list->count++] = view;
            }
        }
    }
}

static int compare_views(const void *a, const void *b) {
    const tn__view *left = *(tn__view *const *)a;
    const tn__view *right = *(tn__view *const *)b;
    if (left->age != right->age) return left->age < right->age ? -1 : 1;
    return left < right ? -1 : left > right;
}

/* A quarter of what may be kept, so that it is long until the next time. */
void tn__views_limit(tn_pool *pool) {
    size_t most = VIEWS_PER_FRAME * (pool->heap.mapped_bytes / pool->page_bytes) + VIEWS_LEAST;
    view_list list = {0};
    tn_status status = TN_OK;
    if (pool->heap.dormant_count <= most) return;
    list.views = tn__host_alloc(pool->heap.dormant_count, sizeof(tn__view *));
    if (!list.views) return;
    gather_dormant(pool, &list);
    qsort(list.views, list.count, sizeof(tn__view *), compare_views);
    for (size_t i = 0; i < list.count && i < most / 4 && status == TN_OK; i++) {
        size_t page = tn__view_page(list.views[i]);
        status = tn__views_unmap(pool, list.views[i]->region, (tn__page_span){page, page + 1});
    }
    tn__host_free(list.views);
}

/* ---- frames ---------------------------------------------------------------------------------- */

void tn__frame_spare(tn_pool *pool, tn__frame *frame) {
    TN_ASSERT(frame->active == NULL);
    frame->next = pool->spare_frames;
    pool->spare_frames = frame;
}

/* From the device's cache, where it is claimed already, else from the driver. */
static tn_status make_handle(tn_pool *pool, tn__handle *out) {
    tn_status status;
    TN_TRY(tn__pool_claim(pool, pool->page_bytes));
    if (tn__handle_cache_take(pool->device, pool->page_bytes, out)) {
        tn__process_unclaim(pool->page_bytes);
        return TN_OK;
    }
    status = pool->driver->mem_create(pool->state, pool->page_bytes, out);
    if (status != TN_OK) tn__process_unclaim(pool->page_bytes);
    return status;
}

/* What the cache keeps of other sizes, or beyond the process's limit, must not stand in the way. */
static tn_status make_frame(tn_pool *pool, tn__frame **out) {
    tn__frame *frame = tn__host_alloc(1, sizeof *frame);
    size_t released_bytes = 0;
    tn_status status;
    if (!frame) return TN_OUT_OF_HOST_MEMORY;
    status = make_handle(pool, &frame->handle);
    if (status == TN_OUT_OF_DEVICE_MEMORY) {
        (void)tn__handle_cache_empty(pool->device, &released_bytes);
        if (released_bytes > 0) status = make_handle(pool, &frame->handle);
    }
    if (status != TN_OK) {
        tn__host_free(frame);
        return status;
    }
    pool->heap.inactive_count++;
    *out = frame;
    return TN_OK;
}

tn_status tn__frame_take(tn_pool *pool, tn__frame **out) {
    tn__frame *frame = pool->spare_frames;
    if (!frame) return make_frame(pool, out);
    pool->spare_frames = frame->next;
    *out = frame;
    return TN_OK;
}

static tn_status release_handle(tn_pool *pool, tn__handle handle) {
    if (tn__handle_cache_give(pool->device, pool->page_bytes, handle)) return TN_OK;
    TN_TRY(pool->driver->mem_release(pool->state, handle, pool->page_bytes));
    tn__process_give_back(pool->page_bytes);
    return TN_OK;
}

tn_status tn__frame_release(tn_pool *pool, tn__frame *frame) {
    tn_status status = TN_OK;
    TN_ASSERT(frame->active == NULL);
    while (frame->views && status == TN_OK) {
        size_t page = tn__view_page(frame->views);
        status = tn__views_unmap(pool, frame->views->region, (tn__page_span){page, page + 1});
    }
    if (status == TN_OK) status = release_handle(pool, frame->handle);
    if (status == TN_OK) {
        tn__host_free(frame);
        pool->heap.inactive_count--;
    } else {
        tn__frame_spare(pool, frame);
    }
    return status;
}

/* ---- the end --------------------------------------------------------------------------------- */

tn_status tn__region_free(tn_pool *pool, tn__region *region) {
    tn_status status;
    tn__page_map_remove(&region->map);
    status = pool->driver->address_free(pool->state, (void *)region->map.begin,
                                        region->map.end - region->map.begin);
    if (status == TN_OK) {
        tn__heap_remove_region(&pool->heap, region);
    } else {
        tn__page_map_restore(&region->map);
    }
    return status;
}

/* VMM: neither a block, nor idle memory, nor work lies there. */
static int is_deserted(const tn__region *region) {
    const tn__piece *piece = region->first;
    return region->views && !piece->next && piece->kind == TN__PIECE_VOID && !piece->uses.count;
}

static tn_status desert(tn_pool *pool, tn__region *region) {
    tn__page_span span = {0, 0};
    while (tn__next_mapped(region, span.end, &span)) {
        TN_TRY(tn__views_unmap(pool, region, span));
    }
    return tn__region_free(pool, region);
}

tn_status tn__pages_release_addresses(tn_pool *pool, int *any) {
    tn__region *next;
    for (tn__region *region = pool->heap.regions; region; region = next) {
        next = region->next;
        if (!is_deserted(region)) continue;
        TN_TRY(desert(pool, region));
        *any = 1;
    }
    return TN_OK;
}

/* Each frame has one view that is active, or else it is spare. */
void tn__frames_clear(tn_pool *pool) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        for (size_t page = 0; region->views && page < region->page_count; page++) {
            if (tn__page_bit(region->mapped, page)) tn__host_free(region->views[page].frame);
        }
    }
    while (pool->spare_frames) {
        tn__frame *frame = pool->spare_frames;
        pool->spare_frames = frame->next;
        tn__host_free(frame);
    }
}
