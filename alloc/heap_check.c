/* Sums over the heap, and the check of every invariant of heap.h. */
#include "heap.h"

/* ---- sums ------------------------------------------------------------------------------------ */

int tn__piece_is_pending(tn__piece *piece) {
    const tn__use *uses = tn__uses_items(&piece->uses);
    for (uint32_t i = 0; i < piece->uses.count; i++) {
        if (uses[i].stream == piece->stream) continue;
        if (uses[i].epoch > uses[i].stream->complete) return 1;
    }
    return 0;
}

static size_t overlap(const tn__piece *piece, uintptr_t begin, uintptr_t end) {
    if (begin < piece->address) begin = piece->address;
    if (end > tn__piece_end(piece)) end = tn__piece_end(piece);
    return end > begin ? end - begin : 0;
}

/* Free memory: FREE pieces, and what thread caches have. */
static int is_free_memory(const tn__piece *piece) {
    if (!piece) return 0;
    return piece->kind == TN__PIECE_FREE || tn__piece_is_cached(piece);
}

/* A stretch of free memory from its first piece on; gives the piece after it. */
static tn__piece *sum_stretch(tn__piece *first, tn__heap_sums *sums) {
    const tn__region *region = first->region;
    tn__piece *end = first;
    uintptr_t end_address = first->address;
    tn__page_span idle;
    for (; is_free_memory(end); end = end->next)
        end_address = tn__piece_end(end);
    idle = tn__pages_inside(region, first->address, end_address);
    for (tn__piece *piece = first; piece != end; piece = piece->next) {
        if (tn__piece_is_pending(piece)) {
            sums->pending_bytes += piece->bytes;
        } else {
            size_t idle_bytes = overlap(piece, tn__page_address(region, idle.first),
                                        tn__page_address(region, idle.end));
            sums->cached_bytes += idle_bytes;
            sums->partial_bytes += piece->bytes - idle_bytes;
        }
    }
    return end;
}

static void sum_region(tn__region *region, tn__heap_sums *sums) {
    tn__piece *piece = region->first;
    while (piece)
        piece = is_free_memory(piece) ? sum_stretch(piece, sums) : piece->next;
}

void tn__heap_sum(tn__heap *heap, tn__heap_sums *out) {
    tn__heap_sums sums = {0};
    size_t free_bytes;
    for (tn__region *region = heap->regions; region; region = region->next)
        sum_region(region, &sums);
    free_bytes = sums.cached_bytes + sums.pending_bytes + sums.partial_bytes;
    sums.partial_bytes += heap->mapped_bytes - free_bytes - heap->live_bytes;
    *out = sums;
}

/* ---- check ----------------------------------------------------------------------------------- */

/* What a walk over all pieces finds, to be compared with the counters. */
typedef struct heap_walk {
    size_t live_bytes;
    size_t rounded_bytes;
    size_t owned_bytes;
    size_t free_bytes;
    size_t mapped_bytes;
    size_t address_bytes;
    size_t guest_bytes;
    size_t blocks;         /* LIVE pieces */
    size_t callers_blocks; /* those that are in no cache */
    size_t runs[TN__ZONE_ALL];
    size_t voids[TN__ZONE_ALL];
    size_t dormant;
    size_t idle_pages; /* by their bits */
    size_t run_pages;  /* by the runs */
} heap_walk;

#define HOLDS(condition, piece)                                                                    \
    do {                                                                                           \
        if (!(condition)) return broken(#condition, (piece));                                      \
    } while (0)

static tn_status broken(const char *condition, const tn__piece *piece) {
    static const char *const kinds[] = {"LIVE", "FREE", "VOID", "GUEST"};
    if (!piece) return TN_FAIL(TN_INVALID_STATE, "pool check: not %s", condition);
    return TN_FAIL(TN_INVALID_STATE, "pool check: not %s, at the %s piece %#zx of %zu bytes",
                   condition, kinds[piece->kind], (size_t)piece->address, piece->bytes);
}

static tn_status check_uses(tn__piece *piece) {
    const tn__use *uses = tn__uses_items(&piece->uses);
    for (uint32_t i = 0; i < piece->uses.count; i++) {
        HOLDS(uses[i].epoch <= uses[i].stream->epoch, piece);
        HOLDS(uses[i].epoch <= tn__order_covered(uses[i].stream) || uses[i].stream->is_used, piece);
        for (uint32_t j = 0; j < i; j++)
            HOLDS(uses[i].stream != uses[j].stream, piece);
    }
    HOLDS(piece->kind != TN__PIECE_FREE || piece->uses.count == 0 || piece->stream, piece);
    return TN_OK;
}

static tn_status check_place(tn__piece *piece, size_t zone, const tn__heap *heap) {
    tn__region *region = piece->region;
    tn__page_span touched = tn__pages_touched(region, piece->address, tn__piece_end(piece));
    tn__page_span inside = tn__pages_inside(region, piece->address, tn__piece_end(piece));
    size_t mapped = tn__bits_count(region->mapped, touched);
    HOLDS(piece->bytes > 0, piece);
    HOLDS(piece->address % TN__BLOCK_ALIGN == 0, piece);
    HOLDS(piece->bytes % TN__BLOCK_ALIGN == 0, piece);
    HOLDS(region->zone == &heap->zones[zone], piece);
    /* A segment on its way back to a provider of the caller's is in no map. */
    HOLDS(region->map.is_in_map || piece->kind == TN__PIECE_VOID, piece);
    if (!region->map.is_in_map) return TN_OK;
    HOLDS(tn__page_map_find((void *)piece->address) == region->map.pool, piece);
    HOLDS(tn__page_map_find((void *)(tn__piece_end(piece) - 1)) == region->map.pool, piece);
    HOLDS((piece->kind == TN__PIECE_LIVE) == (tn__block_state_of(piece) != TN__BLOCK_NONE), piece);
    if (piece->kind == TN__PIECE_LIVE || piece->kind == TN__PIECE_FREE) {
        HOLDS(mapped == touched.end - touched.first, piece);
    } else {
        HOLDS(mapped == 0, piece);
        HOLDS(touched.first == inside.first, piece);
        HOLDS(touched.end == inside.end, piece);
    }
    return TN_OK;
}

static tn_status check_joined(tn__piece *piece) {
    tn__piece *next = piece->next;
    if (!next || piece->kind != next->kind) return TN_OK;
    if (piece->kind != TN__PIECE_LIVE) {
        HOLDS(piece->stream != next->stream || !tn__uses_equal(&piece->uses, &next->uses), piece);
    }
    return TN_OK;
}

static int is_in_tree(tn__tree_node *root, const tn__tree_node *node, uint64_t major,
                      uint64_t minor) {
    return tn__tree_at_least(root, major, minor) == node;
}

static size_t whole_pages(const tn__piece *first) {
    tn__page_span idle =
        tn__pages_inside(first->region, first->address, first->address + first->node.major);
    return idle.end - idle.first;
}

static tn_status check_idle(tn__piece *first) {
    const tn__region *region = first->region;
    tn__page_span idle =
        tn__pages_inside(region, first->address, first->address + first->node.major);
    if (idle.first == idle.end) return TN_OK;
    HOLDS(tn__bits_count(region->idle, idle) == idle.end - idle.first, first);
    HOLDS(region->runs_at[idle.first] == first, first);
    return TN_OK;
}

static tn_status check_run(tn__piece *first, const tn__zone *zone) {
    tn__piece *last = first;
    while (tn__piece_is(last->next, TN__PIECE_FREE))
        last = last->next;
    HOLDS(first->run_other == last, first);
    HOLDS(last->run_other == first, last);
    HOLDS(
        is_in_tree(zone->runs, &first->node, tn__piece_end(last) - first->address, first->address),
        first);
    return check_idle(first);
}

static tn_status check_index(tn__piece *piece, size_t zone_index, tn__heap *heap, heap_walk *walk) {
    const tn__zone *zone = &heap->zones[zone_index];
    switch (piece->kind) {
    case TN__PIECE_LIVE:
        HOLDS(tn__block_table_find(&heap->blocks, piece->address) == piece, piece);
        HOLDS((piece->tag & ~TN__TAG_STATE_MASK) == piece->address, piece);
        walk->blocks++;
        walk->rounded_bytes += piece->bytes;
        if (tn__piece_is_cached(piece)) {
            HOLDS(piece->lane != NULL && piece->uses.count == 0, piece);
            return TN_OK;
        }
        HOLDS(piece->asked_bytes > 0, piece);
        HOLDS(piece->asked_bytes <= piece->bytes, piece);
        walk->callers_blocks++;
        walk->live_bytes += piece->asked_bytes;
        if (piece->is_owned) walk->owned_bytes += piece->asked_bytes;
        return TN_OK;
    case TN__PIECE_FREE:
        walk->free_bytes += piece->bytes;
        if (tn__piece_is(piece->previous, TN__PIECE_FREE)) return TN_OK;
        walk->runs[zone_index]++;
        walk->run_pages += whole_pages(piece);
        return check_run(piece, zone);
    default:
        walk->voids[zone_index]++;
        HOLDS(is_in_tree(zone->voids, &piece->node, piece->address, piece->region->number), piece);
        return TN_OK;
    }
}

/* What is mapped at a page: an active view where there is memory, a dormant one or none where there
 * is none. */
static tn_status check_page(const tn__region *region, size_t page, heap_walk *walk) {
    const tn__view *view = &region->views[page];
    const tn__view *listed = view->frame ? view->frame->views : NULL;
    int is_active = view->frame && view->frame->active == view;
    HOLDS(tn__page_bit(region->mapped, page) == is_active, NULL);
    HOLDS(view->frame == NULL || view->region == region, NULL);
    while (listed && listed != view)
        listed = listed->next;
    HOLDS(view->frame == NULL || listed == view, NULL);
    if (view->frame && !is_active) walk->dormant++;
    return TN_OK;
}

/* The first piece that begins in each page, and none where none does. */
static tn_status check_begins(const tn__region *region) {
    tn__piece *piece = region->first;
    for (size_t page = 0; page < region->page_count; page++) {
        uintptr_t end = tn__page_address(region, page + 1);
        tn__piece *first = piece && piece->address < end ? piece : NULL;
        HOLDS(region->begins[page] == first, first);
        while (piece && piece->address < end)
            piece = piece->next;
    }
    return TN_OK;
}

static tn_status check_views(tn__region *region, heap_walk *walk) {
    if (!region->views) return TN_OK;
    TN_TRY(check_begins(region));
    for (size_t page = 0; page < region->page_count; page++)
        TN_TRY(check_page(region, page, walk));
    for (tn__piece *piece = region->first; piece; piece = piece->next) {
        tn__page_span span = tn__pages_inside(region, piece->address, tn__piece_end(piece));
        if (piece->kind != TN__PIECE_VOID || piece->uses.count == 0) continue;
        for (size_t page = span.first; page < span.end; page++)
            HOLDS(region->views[page].frame != NULL, piece);
    }
    return TN_OK;
}

static tn_status check_region(tn__region *region, tn__heap *heap, heap_walk *walk) {
    size_t zone = (size_t)(region->zone - heap->zones);
    uintptr_t address = region->map.begin;
    tn__page_span all = {0, region->page_count};
    HOLDS(region->first->previous == NULL, region->first);
    for (tn__piece *piece = region->first; piece; piece = piece->next) {
        HOLDS(piece->region == region, piece);
        HOLDS(piece->address == address, piece);
        HOLDS(!piece->next || piece->next->previous == piece, piece);
        TN_TRY(check_place(piece, zone, heap));
        TN_TRY(check_uses(piece));
        TN_TRY(check_joined(piece));
        TN_TRY(check_index(piece, zone, heap, walk));
        address = tn__piece_end(piece);
    }
    HOLDS(address == region->map.end, NULL);
    walk->address_bytes += region->map.end - region->map.begin;
    TN_TRY(check_views(region, walk));
    walk->idle_pages += tn__bits_count(region->idle, all);
    walk->mapped_bytes += tn__bits_count(region->mapped, all) * region->page_bytes;
    return TN_OK;
}

static tn_status check_sums(tn__heap *heap, const heap_walk *walk) {
    tn__heap_sums sums;
    tn__heap_sum(heap, &sums);
    HOLDS(walk->live_bytes == heap->live_bytes, NULL);
    HOLDS(walk->owned_bytes == heap->owned_bytes, NULL);
    HOLDS(walk->mapped_bytes == heap->mapped_bytes, NULL);
    HOLDS(walk->address_bytes == heap->address_bytes, NULL);
    HOLDS(walk->dormant == heap->dormant_count, NULL);
    HOLDS(walk->idle_pages == walk->run_pages, NULL);
    HOLDS(walk->free_bytes + walk->rounded_bytes == walk->mapped_bytes, NULL);
    HOLDS(sums.cached_bytes + sums.pending_bytes + sums.partial_bytes ==
              walk->free_bytes + walk->rounded_bytes - walk->live_bytes,
          NULL);
    return TN_OK;
}

tn_status tn__heap_check(tn__heap *heap, size_t *live_blocks) {
    heap_walk walk = {0};
    for (tn__region *region = heap->regions; region; region = region->next) {
        if (region->guest) {
            walk.guest_bytes += region->first->asked_bytes;
            continue;
        }
        TN_TRY(check_region(region, heap, &walk));
    }
    HOLDS(walk.guest_bytes == heap->guest_bytes, NULL);
    for (int i = 0; i < TN__ZONE_ALL; i++) {
        const tn__zone *zone = &heap->zones[i];
        HOLDS(walk.runs[i] == zone->run_count, NULL);
        HOLDS(walk.voids[i] == zone->void_count, NULL);
        HOLDS(tn__tree_is_valid(zone->runs, zone->run_count), NULL);
        HOLDS(tn__tree_is_valid(zone->voids, zone->void_count), NULL);
    }
    HOLDS(walk.blocks == heap->block_count, NULL);
    HOLDS(heap->blocks.count == heap->block_count, NULL);
    *live_blocks = walk.callers_blocks;
    return check_sums(heap, &walk);
}
