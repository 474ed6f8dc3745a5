/* Pages of regions: sets of them as bits, what lies there, and where frames are active. See
 * heap.h and heap_frames.h. */
#include "canary.h"
#include "heap.h"

#define PIECES_PASSED 64 /* in one page, in search of one */

/* ---- spans and bits -------------------------------------------------------------------------- */

tn__page_span tn__pages_inside(const tn__region *region, uintptr_t begin, uintptr_t end) {
    tn__page_span span;
    span.first = tn__page_at(region, begin + region->page_bytes - 1);
    span.end = tn__page_at(region, end);
    if (span.end < span.first) span.end = span.first;
    return span;
}

tn__page_span tn__pages_touched(const tn__region *region, uintptr_t begin, uintptr_t end) {
    tn__page_span span;
    span.first = tn__page_at(region, begin);
    span.end = tn__page_at(region, end + region->page_bytes - 1);
    return span;
}

/* The bits of word `word` that belong to the span. */
static uint64_t span_mask(tn__page_span span, size_t word) {
    uint64_t mask = ~(uint64_t)0;
    if (word == span.first / 64) mask &= ~(uint64_t)0 << (span.first % 64);
    if (word == span.end / 64) mask &= ((uint64_t)1 << (span.end % 64)) - 1;
    return mask;
}

size_t tn__bits_count(const uint64_t *bits, tn__page_span span) {
    size_t count = 0;
    for (size_t word = span.first / 64; word * 64 < span.end; word++) {
        count += (size_t)__builtin_popcountll(bits[word] & span_mask(span, word));
    }
    return count;
}

void tn__bits_set(uint64_t *bits, tn__page_span span, int is_set) {
    if (span.first == span.end) return;
    for (size_t word = span.first / 64; word * 64 < span.end; word++) {
        if (is_set) {
            bits[word] |= span_mask(span, word);
        } else {
            bits[word] &= ~span_mask(span, word);
        }
    }
}

size_t tn__bits_find(const uint64_t *bits, size_t from, size_t end, int is_set) {
    uint64_t flip = is_set ? 0 : ~(uint64_t)0;
    for (size_t word = from / 64; word * 64 < end; word++) {
        uint64_t found = (bits[word] ^ flip) & span_mask((tn__page_span){from, end}, word);
        if (found) return word * 64 + (size_t)__builtin_ctzll(found);
    }
    return end;
}

/* The first of the neighbouring pages up to `page` whose bits are set, as its is. */
static size_t stretch_begin(const uint64_t *bits, size_t page) {
    size_t word = page / 64;
    uint64_t clear = ~bits[word] & (((uint64_t)2 << (page % 64)) - 1);
    while (clear == 0) {
        if (word == 0) return 0;
        clear = ~bits[--word];
    }
    return word * 64 + 64 - (size_t)__builtin_clzll(clear);
}

/* ---- what lies at a page --------------------------------------------------------------------- */

tn__piece *tn__page_idle_piece(const tn__region *region, size_t page) {
    TN_ASSERT(tn__page_bit(region->idle, page));
    return tn__piece_at(region->runs_at[stretch_begin(region->idle, page)],
                        tn__page_address(region, page));
}

tn__piece *tn__page_void_piece(const tn__region *region, size_t page) {
    TN_ASSERT(!tn__page_bit(region->mapped, page));
    return tn__piece_of(
        tn__tree_at_most(region->zone->voids, tn__page_address(region, page), region->number));
}

/* The last piece that begins in the page, not after the address, which lies behind it or in it. */
static tn__piece *last_begin(const tn__region *region, size_t page, uintptr_t address) {
    tn__piece *piece = region->begins[page];
    if (!piece || piece->address > address) return NULL;
    for (int passed = 0; piece->next && piece->next->address <= address; passed++) {
        if (passed == PIECES_PASSED) return NULL;
        piece = piece->next;
    }
    return piece;
}

/* Where the page is neither idle nor VOID as a whole, an open piece begins in it or in the one
 * before; or else that one is idle. */
tn__piece *tn__open_piece_at(const tn__region *region, uintptr_t address) {
    size_t page = tn__page_at(region, address);
    tn__piece *piece;
    if (!tn__page_bit(region->mapped, page)) return tn__page_void_piece(region, page);
    piece = last_begin(region, page, address);
    if (!piece && tn__page_bit(region->idle, page)) piece = tn__page_idle_piece(region, page);
    if (!piece && page > 0) piece = last_begin(region, page - 1, address);
    if (!piece && page > 0 && tn__page_bit(region->idle, page - 1)) {
        piece = tn__piece_at(tn__page_idle_piece(region, page - 1), address);
    }
    return piece && address < tn__piece_end(piece) && piece->kind != TN__PIECE_LIVE ? piece : NULL;
}

int tn__page_is_used(const tn__region *region, size_t page) {
    if (TN__CANARY(TN__CANARY_UNMAP)) return 0;
    return tn__page_void_piece(region, page)->uses.count > 0;
}

static int has_mapping(const tn__region *region, size_t page) {
    if (region->guest) return 1;
    return region->views ? region->views[page].frame != NULL : tn__page_bit(region->mapped, page);
}

int tn__next_mapped(const tn__region *region, size_t from, tn__page_span *out) {
    while (from < region->page_count && !has_mapping(region, from))
        from++;
    out->first = from;
    while (from < region->page_count && has_mapping(region, from))
        from++;
    out->end = from;
    return out->first < out->end;
}

/* ---- where frames are active ----------------------------------------------------------------- */

void tn__frame_attach(tn__heap *heap, tn__frame *frame, tn__region *region, size_t page) {
    tn__view *view = &region->views[page];
    TN_ASSERT(view->frame == NULL);
    view->frame = frame;
    view->region = region;
    view->age = heap->operation;
    view->is_unusable = 0;
    view->next = frame->views;
    frame->views = view;
    heap->dormant_count++;
}

void tn__frame_detach(tn__heap *heap, tn__view *view) {
    tn__frame *frame = view->frame;
    tn__view **at = &frame->views;
    TN_ASSERT(frame->active != view);
    while (*at != view)
        at = &(*at)->next;
    *at = view->next;
    view->frame = NULL;
    view->next = NULL;
    heap->dormant_count--;
}

static void set_active(tn__heap *heap, const tn__view *view, int is_active) {
    tn__region *region = view->region;
    size_t page = tn__view_page(view);
    TN_ASSERT(tn__page_bit(region->mapped, page) == !is_active);
    tn__bits_set(region->mapped, (tn__page_span){page, page + 1}, is_active);
    if (is_active) {
        heap->mapped_bytes += region->page_bytes;
        heap->dormant_count--;
        heap->inactive_count--;
    } else {
        heap->mapped_bytes -= region->page_bytes;
        heap->dormant_count++;
        heap->inactive_count++;
    }
}

tn__frame *tn__page_deactivate(tn__heap *heap, tn__region *region, size_t page) {
    tn__view *view = &region->views[page];
    tn__frame *frame = view->frame;
    TN_ASSERT(frame->active == view);
    set_active(heap, view, 0);
    view->age = heap->operation;
    frame->active = NULL;
    return frame;
}

void tn__page_activate(tn__heap *heap, tn__view *view) {
    tn__frame *frame = view->frame;
    if (frame->active) {
        (void)tn__page_deactivate(heap, frame->active->region, tn__view_page(frame->active));
    }
    set_active(heap, view, 1);
    frame->active = view;
}
