/* VMM backing: idle pages, and how memory goes back to the driver.
 *
 * An idle page lies in a run as a whole. Its frame can move elsewhere in the pool (pool_pages.c),
 * or go back to the driver once no work uses it, at this address or where it was before.
 */
#include "pool_idle.h"

#include <stdlib.h>

#include "canary.h"
#include "host_alloc.h"

/* ---- idle pages ------------------------------------------------------------------------------ */

typedef struct gathering {
    const tn__idle_filter *filter;
    tn__idle_pages *out; /* NULL: they are counted */
    size_t count;
} gathering;

static void add_pages(gathering *gather, tn__region *region, size_t first, size_t end,
                      uint64_t age) {
    if (first >= end) return;
    if (gather->out) {
        gather->out[gather->count] = (tn__idle_pages){region, {first, end}, age};
    }
    gather->count++;
}

/* Those of the span that are outside the window. */
static void add_span(gathering *gather, tn__region *region, tn__page_span span, uint64_t age) {
    tn__page_span window = gather->filter->window;
    if (region != gather->filter->excluded || span.end <= window.first ||
        span.first >= window.end) {
        add_pages(gather, region, span.first, span.end, age);
        return;
    }
    if (span.first < window.first) add_pages(gather, region, span.first, window.first, age);
    if (span.end > window.end) add_pages(gather, region, window.end, span.end, age);
}

static int is_wanted(const tn__idle_filter *filter, tn__piece *piece) {
    if (filter->only_complete) return piece->uses.count == 0 || TN__CANARY(TN__CANARY_UNMAP);
    return !filter->ready_for || tn__order_is_ready(filter->ready_for->stream, &piece->uses);
}

/* A page in which one FREE piece ends and others begin. */
static void add_shared_page(gathering *gather, tn__piece *piece, size_t page) {
    uintptr_t end = tn__page_address(piece->region, page + 1);
    uint64_t age = piece->age;
    for (piece = piece->next; piece && piece->address < end; piece = piece->next) {
        if (!is_wanted(gather->filter, piece)) return;
        if (piece->age > age) age = piece->age;
        if (tn__piece_end(piece) >= end) {
            add_span(gather, piece->region, (tn__page_span){page, page + 1}, age);
            return;
        }
    }
}

/* The idle pages that begin in the piece. */
static void gather_piece(gathering *gather, tn__piece *piece) {
    tn__page_span inside = tn__pages_inside(piece->region, piece->address, tn__piece_end(piece));
    if (!is_wanted(gather->filter, piece)) return;
    add_span(gather, piece->region, inside, piece->age);
    if (tn__page_address(piece->region, inside.end) >= piece->address &&
        tn__page_address(piece->region, inside.end) < tn__piece_end(piece) &&
        tn__page_bit(piece->region->idle, inside.end)) {
        add_shared_page(gather, piece, inside.end);
    }
}

static void gather_idle(tn_pool *pool, gathering *gather) {
    gather->count = 0;
    for (int zone = 0; zone < TN__ZONE_COUNT; zone++) {
        tn__tree_node *root = pool->heap.zones[zone].runs;
        tn__tree_node *node = tn__tree_at_least(root, pool->page_bytes, 0);
        if (&pool->heap.zones[zone] == gather->filter->spared) continue;
        for (; node; node = tn__tree_next(root, node)) {
            tn__piece *piece = tn__piece_of(node);
            for (; tn__piece_is(piece, TN__PIECE_FREE); piece = piece->next)
                gather_piece(gather, piece);
        }
    }
}

static int compare_age(const void *a, const void *b) {
    const tn__idle_pages *left = a;
    const tn__idle_pages *right = b;
    if (left->age != right->age) return left->age < right->age ? -1 : 1;
    if (left->region != right->region) return left->region < right->region ? -1 : 1;
    return left->span.first < right->span.first ? -1 : left->span.first > right->span.first;
}

tn_status tn__idle_list(tn_pool *pool, const tn__idle_filter *filter, tn__idle_pages **out,
                        size_t *count) {
    gathering gather = {.filter = filter};
    *out = NULL;
    *count = 0;
    if (tn__graph_holds(pool->graph) || tn__pause_is_done(pool)) return TN_OK;
    gather_idle(pool, &gather);
    if (gather.count == 0) return TN_OK;
    gather.out = tn__host_alloc(gather.count, sizeof *gather.out);
    if (!gather.out) return TN_OUT_OF_HOST_MEMORY;
    gather_idle(pool, &gather);
    qsort(gather.out, gather.count, sizeof *gather.out, compare_age);
    *out = gather.out;
    *count = gather.count;
    return TN_OK;
}

/* Cuts at both ends first, so that what lies outside keeps its uses. */
static tn_status cut_span(tn__heap *heap, tn__piece **piece, uintptr_t begin, uintptr_t end) {
    tn__piece *last;
    TN_TRY(tn__heap_reserve(heap, 2));
    if ((*piece)->address < begin) {
        TN_TRY(tn__heap_split(heap, *piece, begin));
        *piece = (*piece)->next;
    }
    last = tn__piece_at(*piece, end - 1);
    if (tn__piece_end(last) > end) TN_TRY(tn__heap_split(heap, last, end));
    while (tn__piece_end(*piece) < end)
        TN_TRY(tn__heap_unite(heap, *piece));
    return TN_OK;
}

tn_status tn__idle_isolate(tn__heap *heap, tn__region *region, tn__page_span span,
                           tn__piece **out) {
    uintptr_t end = tn__page_address(region, span.end);
    tn__piece *piece = tn__page_idle_piece(region, span.first);
    tn_status status = cut_span(heap, &piece, tn__page_address(region, span.first), end);
    if (status != TN_OK) {
        tn__heap_join(heap, tn__piece_at(piece, end - 1));
        tn__heap_join(heap, piece);
        return status;
    }
    *out = piece;
    return TN_OK;
}

/* ---- giving back ----------------------------------------------------------------------------- */

tn_status tn__pool_collect(tn_pool *pool) {
    int any = 0;
    tn_status status = tn__order_poll(&pool->order, &any);
    if (any) tn__heap_settle(&pool->heap);
    tn__uses_settle(&pool->given);
    tn__dedicated_collect(pool);
    return status;
}

/* The pages that are still to be given back: up to the least, but not beyond the most. */
static size_t pages_to_release(const tn_pool *pool, const tn__release *release) {
    size_t most = tn__release_room(release) / pool->page_bytes;
    size_t least;
    if (tn__release_is_done(release)) return 0;
    least = (release->least_bytes - release->released_bytes - 1) / pool->page_bytes + 1;
    return least < most ? least : most;
}

/* Gives idle pages back, and where they were is VOID then. Frames that the driver does not take
 * back stay with the pool as spares. */
static tn_status release_span(tn_pool *pool, tn__region *region, tn__page_span span,
                              tn__release *release) {
    tn__heap *heap = &pool->heap;
    tn__piece *piece = NULL;
    tn_status status;
    TN_TRY(tn__idle_isolate(heap, region, span, &piece));
    status = pool->driver->mem_unmap(pool->state, (void *)piece->address, piece->bytes);
    if (status == TN_OK) tn__heap_change(heap, piece, TN__PIECE_VOID);
    tn__heap_join(heap, piece);
    if (status != TN_OK) return status;
    for (size_t page = span.first; page < span.end; page++) {
        tn__frame *frame = tn__page_deactivate(heap, region, page);
        tn_status now;
        tn__frame_detach(heap, &region->views[page]);
        now = tn__frame_release(pool, frame);
        if (now == TN_OK) release->released_bytes += pool->page_bytes;
        if (status == TN_OK) status = now;
    }
    return status;
}

/* The last pages of the span whose frames no work may use anywhere: one at least, or none. */
static tn__page_span complete_end(const tn__region *region, tn__page_span span, size_t most) {
    while (span.end > span.first && !tn__frame_is_complete(tn__region_frame(region, span.end - 1)))
        span.end--;
    for (size_t page = span.end; page-- > span.first;) {
        if (span.end - page <= most && tn__frame_is_complete(tn__region_frame(region, page))) {
            continue;
        }
        span.first = page + 1;
        break;
    }
    return span;
}

static tn_status release_pages(tn_pool *pool, const tn__idle_pages *idle, tn__release *release) {
    tn__page_span left = idle->span;
    while (left.end > left.first) {
        size_t wanted = pages_to_release(pool, release);
        tn__page_span span = complete_end(idle->region, left, wanted);
        if (wanted == 0 || span.first == span.end) return TN_OK;
        TN_TRY(release_span(pool, idle->region, span, release));
        left.end = span.first;
    }
    return TN_OK;
}

/* Each spare is tried once: those whose old mappings are in use stay. */
static tn_status release_spares(tn_pool *pool, tn__release *release) {
    tn__frame *frame = pool->spare_frames;
    tn_status status = TN_OK;
    pool->spare_frames = NULL;
    while (frame) {
        tn__frame *next = frame->next;
        if (status != TN_OK || pages_to_release(pool, release) == 0 ||
            !tn__frame_is_complete(frame)) {
            tn__frame_spare(pool, frame);
        } else {
            status = tn__frame_release(pool, frame);
            if (status == TN_OK) release->released_bytes += pool->page_bytes;
        }
        frame = next;
    }
    return status;
}

tn_status tn__pages_release(tn_pool *pool, tn__release *release) {
    tn__idle_filter filter = {.only_complete = 1};
    tn__idle_pages *idle = NULL;
    size_t count = 0;
    tn_status status;
    TN_TRY(tn__pool_collect(pool));
    TN_TRY(release_spares(pool, release));
    status = tn__idle_list(pool, &filter, &idle, &count);
    for (size_t i = 0; i < count && status == TN_OK; i++) {
        if (pages_to_release(pool, release) == 0) break;
        if (tn__release_spares(release, idle[i].age)) break;
        status = release_pages(pool, &idle[i], release);
    }
    tn__host_free(idle);
    return status;
}

tn_status tn__pages_decay(tn_pool *pool) {
    tn__release release = {.least_bytes = SIZE_MAX, .most_bytes = SIZE_MAX};
    tn__idle_filter filter = {.only_complete = 1};
    tn__idle_pages *idle = NULL;
    size_t count = 0;
    double now_us;
    tn_status status = TN_OK;
    if (pool->decay_us <= 0 || pool->settle) return TN_OK;
    now_us = pool->driver->now_us(pool->state);
    if (now_us - pool->decay_at_us < pool->decay_us) return TN_OK;
    TN_TRY(tn__idle_list(pool, &filter, &idle, &count));
    for (size_t i = 0; i < count && status == TN_OK; i++) {
        if (idle[i].age > pool->decay_operation) break;
        status = release_pages(pool, &idle[i], &release);
    }
    tn__host_free(idle);
    if (status != TN_OK) return status;
    pool->decay_at_us = now_us;
    pool->decay_operation = pool->heap.operation;
    return TN_OK;
}

tn_status tn__pages_close(tn_pool *pool) {
    TN_TRY(tn__pool_collect(pool));
    while (pool->heap.regions) {
        TN_TRY(tn__region_free(pool, pool->heap.regions));
    }
    return TN_OK;
}
