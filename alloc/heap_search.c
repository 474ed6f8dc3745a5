/* Where a block goes: best fit over runs, and over gaps when pages must be filled in.
 *
 * The search in runs is what a warm call pays: one descent of a tree, and a look at no more than
 * CANDIDATES_MAX runs. The search in gaps looks at every gap; it comes before driver calls that
 * cost tens of microseconds a page, and every page that it saves is one such call less.
 */
#include "heap.h"

#define CANDIDATES_MAX 32
#define PIECES_MAX     64

static uintptr_t align_up(uintptr_t address, size_t alignment) {
    return (address + alignment - 1) & ~(uintptr_t)(alignment - 1);
}
static uintptr_t align_down(uintptr_t address, size_t alignment) {
    return address & ~(uintptr_t)(alignment - 1);
}

/* A captured stream can wait for nobody, and the host does not. */
static int must_be_ready(const tn__request *request) {
    return request->only_ready || request->needs_complete || request->stream->is_captured;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static int is_usable(const tn__request *request, tn__uses *uses) {
    return request->needs_complete ? tn__uses_are_complete(uses)
                                   : tn__order_is_ready(request->stream, uses);
}

/* The first stretch of the run that the stream can use without a wait and that is long enough. */
static int find_ready(tn__piece *run, const tn__request *request, uintptr_t *out) {
    uintptr_t begin = 0;
    int pieces = 0;
    for (tn__piece *piece = run; tn__piece_is(piece, TN__PIECE_FREE) && pieces < PIECES_MAX;
         piece = piece->next, pieces++) {
        if (!is_usable(request, &piece->uses)) {
            begin = 0;
            continue;
        }
        if (begin == 0) begin = align_up(piece->address, request->alignment);
        if (begin + request->bytes <= tn__piece_end(piece)) {
            *out = begin;
            return 1;
        }
    }
    return 0;
}

static int find_low_end(tn__piece *run, const tn__request *request, uintptr_t *out) {
    uintptr_t begin = align_up(run->address, request->alignment);
    if (begin + request->bytes > run->address + run->node.major) return 0;
    *out = begin;
    return 1;
}

static void set_place(tn__place *place, tn__piece *run, uintptr_t address) {
    *place = (tn__place){.region = run->region, .first = run, .address = address};
}

int tn__heap_find_run(tn__heap *heap, const tn__request *request, tn__place *out) {
    tn__tree_node *root = heap->zones[request->zone].runs;
    tn__tree_node *node = tn__tree_at_least(root, request->bytes, 0);
    uintptr_t address = 0;
    int found = 0;
    for (int i = 0; node && i < CANDIDATES_MAX; node = tn__tree_next(root, node), i++) {
        tn__piece *run = tn__piece_of(node);
        if (find_ready(run, request, &address)) {
            set_place(out, run, address);
            return 1;
        }
        if (must_be_ready(request)) continue;
        if (!found && find_low_end(run, request, &address)) {
            set_place(out, run, address);
            found = 1;
        }
    }
    if (found || !node || must_be_ready(request)) return found;
    /* All that were looked at lack the room for the alignment; this one can not. */
    node = tn__tree_at_least(root, request->bytes + request->alignment, 0);
    if (!node || !find_low_end(tn__piece_of(node), request, &address)) return 0;
    set_place(out, tn__piece_of(node), address);
    return 1;
}

size_t tn__heap_largest_run(tn__heap *heap) {
    size_t largest = 0;
    for (int zone = 0; zone < TN__ZONE_COUNT; zone++) {
        tn__tree_node *node = tn__tree_last(heap->zones[zone].runs);
        if (node && node->major > largest) largest = node->major;
    }
    return largest;
}

/* All of an idle page can be used by the stream without a wait. */
int tn__page_is_ready(const tn__request *request, const tn__region *region, size_t page) {
    uintptr_t end = tn__page_address(region, page + 1);
    tn__piece *piece = tn__page_idle_piece(region, page);
    for (; piece && piece->address < end; piece = piece->next) {
        if (!tn__order_is_ready(request->stream, &piece->uses)) return 0;
    }
    return 1;
}

/* ---- gaps ------------------------------------------------------------------------------------ */

typedef struct gap {
    tn__piece *first;
    uintptr_t begin;
    uintptr_t end;
} gap;

static int is_in_gap(const tn__piece *piece) {
    return tn__piece_is(piece, TN__PIECE_FREE) || tn__piece_is(piece, TN__PIECE_VOID);
}

/* The gap whose first VOID is the piece; 0 if another VOID comes before it. */
static int gap_of(tn__piece *piece, gap *out) {
    tn__piece *last = piece;
    out->first = piece;
    while (tn__piece_is(out->first->previous, TN__PIECE_FREE))
        out->first = out->first->previous;
    if (tn__piece_is(out->first->previous, TN__PIECE_VOID)) return 0;
    while (is_in_gap(last->next))
        last = last->next;
    out->begin = out->first->address;
    out->end = tn__piece_end(last);
    return 1;
}

/* What a page costs, in tenths of a microsecond (docs/placement.md has the costs of a GPU). */
static const uint16_t page_cost[] = {
    [TN__PAGE_ACTIVE] = 0, [TN__PAGE_DORMANT] = 1, [TN__PAGE_EMPTY] = 291, [TN__PAGE_OTHER] = 473};

tn__page_state tn__page_choose(const tn__request *request, const tn__region *region, size_t page,
                               tn__page_span window, uint64_t claim) {
    tn__view *view;
    const tn__view *active;
    if (tn__page_bit(region->mapped, page)) return TN__PAGE_ACTIVE;
    view = &region->views[page];
    if (!view->frame) return TN__PAGE_EMPTY;
    active = view->is_unusable || view->frame->claim == claim ? NULL : view->frame->active;
    if (active && !request->is_pinned && active->region->zone != request->spared &&
        tn__page_bit(active->region->idle, tn__view_page(active))) {
        size_t there = tn__view_page(active);
        int is_needed = active->region == region && there >= window.first && there < window.end;
        if (!is_needed &&
            (!must_be_ready(request) || tn__page_is_ready(request, active->region, there))) {
            view->frame->claim = claim;
            return TN__PAGE_DORMANT;
        }
    }
    return tn__page_is_used(region, page) ? TN__PAGE_BLOCKED : TN__PAGE_OTHER;
}

typedef struct gap_search {
    tn__heap *heap;
    const tn__request *request;
    int is_plentiful;
    tn__place best;
    size_t best_gap_bytes;
    int is_found;
} gap_search;

/* Counts what the place lacks; 0 if it can not be had, or only for more than `most`. */
static int price_place(const gap_search *search, tn__place *place, uint64_t most) {
    tn__region *region = place->region;
    uint64_t claim = ++search->heap->claim;
    tn__page_span window =
        tn__pages_touched(region, place->address, place->address + search->request->bytes);
    size_t page = tn__bits_find(region->mapped, window.first, window.end, 0);
    place->missing_pages = window.end - window.first - tn__bits_count(region->mapped, window);
    place->cost = search->is_plentiful ? 0 : (uint64_t)place->missing_pages << 32;
    for (; page < window.end && place->cost <= most;
         page = tn__bits_find(region->mapped, page + 1, window.end, 0)) {
        tn__page_state state = tn__page_choose(search->request, region, page, window, claim);
        if (state == TN__PAGE_BLOCKED) return 0;
        place->cost += page_cost[state];
        place->lost_views += state == TN__PAGE_OTHER;
    }
    return place->cost <= most;
}

static void try_window(gap_search *search, const gap *within, uintptr_t begin) {
    tn__place place = {.region = within->first->region, .first = within->first, .address = begin};
    size_t gap_bytes = within->end - within->begin;
    if (begin < within->begin || begin > within->end) return;
    if (within->end - begin < search->request->bytes) return;
    if (!price_place(search, &place, search->is_found ? search->best.cost : UINT64_MAX)) return;
    if (search->is_found && place.cost == search->best.cost) {
        if (gap_bytes > search->best_gap_bytes) return;
        if (gap_bytes == search->best_gap_bytes && begin >= search->best.address) return;
    }
    if (must_be_ready(search->request) && !tn__heap_place_is_ready(search->request, &place)) return;
    search->best = place;
    search->best_gap_bytes = gap_bytes;
    search->is_found = 1;
}

/* The cost is least where an edge of the block lies at an edge of mapped memory: between such
 * places it changes by the same steps. */
static void try_gap(gap_search *search, const gap *within) {
    const tn__request *request = search->request;
    for (tn__piece *piece = within->first; piece && piece->address < within->end;
         piece = piece->next) {
        if (piece == within->first || piece->previous->kind != piece->kind) {
            try_window(search, within, align_up(piece->address, request->alignment));
        }
        if (tn__piece_end(piece) == within->end || piece->next->kind != piece->kind) {
            if (tn__piece_end(piece) - within->begin < request->bytes) continue;
            try_window(search, within,
                       align_down(tn__piece_end(piece) - request->bytes, request->alignment));
        }
    }
}

/* ---- windows --------------------------------------------------------------------------------- */

#define WINDOWS_TRIED 32

/* All from the piece's begin up to there is FREE or VOID. */
static int is_open_until(const tn__piece *piece, uintptr_t end) {
    for (; tn__piece_end(piece) < end; piece = piece->next) {
        if (!is_in_gap(piece->next)) return 0;
    }
    return 1;
}

/* The piece that the place begins in; NULL if not all of the place is FREE or VOID. */
static tn__piece *open_piece(const tn__region *region, uintptr_t begin, uintptr_t end) {
    tn__page_span window = tn__pages_touched(region, begin, end);
    size_t page = tn__bits_find(region->mapped, window.first, window.end, 0);
    tn__piece *first;
    if (page < window.end) {
        first = tn__page_void_piece(region, page);
    } else {
        page = tn__bits_find(region->idle, window.first, window.end, 1);
        if (page == window.end) return NULL;
        first = tn__page_idle_piece(region, page);
    }
    while (first->address > begin) {
        first = first->previous;
        if (!is_in_gap(first)) return NULL;
    }
    return is_open_until(first, end) ? first : NULL;
}

static void try_windows(gap_search *search) {
    const tn__request *request = search->request;
    const tn__windows *windows = &search->heap->zones[request->zone].windows;
    const tn__window *window = tn__windows_find(windows, request->bytes);
    size_t most_bytes = request->bytes + request->bytes / 8;
    for (int i = 0; window && i < WINDOWS_TRIED; window = tn__windows_next(windows, window), i++) {
        uintptr_t begin = window->node.minor;
        uintptr_t end = begin + window->node.major;
        tn__piece *first;
        gap within;
        if (window->node.major > most_bytes) break;
        if (begin % request->alignment) continue;
        first = open_piece(window->region, begin, end);
        if (!first) continue;
        within = (gap){first, begin, end};
        try_window(search, &within, begin);
        if (search->is_found && search->best.cost <= search->best.missing_pages) break;
    }
}

int tn__heap_find_window(tn__heap *heap, const tn__request *request, int is_plentiful,
                         tn__place *out) {
    gap_search search = {.heap = heap, .request = request, .is_plentiful = is_plentiful};
    try_windows(&search);
    if (search.is_found) *out = search.best;
    return search.is_found;
}

/* ---- places of before, and new ones ---------------------------------------------------------- */

/* What most requests of a job that repeats itself find: one piece, with memory behind all of it. */
static int take_past_piece(const tn__request *request, tn__piece *piece, uintptr_t address,
                           tn__place *out) {
    if (must_be_ready(request) && !tn__order_is_ready(request->stream, &piece->uses)) return 0;
    set_place(out, tn__run_first(piece), address);
    return 1;
}

int tn__heap_find_past(tn__heap *heap, const tn__request *request, const tn__past *past,
                       tn__place *out) {
    gap_search search = {.heap = heap, .request = request, .is_plentiful = 1};
    uintptr_t end = past->address + request->bytes;
    gap within = {.begin = past->address, .end = end};
    if (!past->region || past->address % request->alignment) return 0;
    within.first = tn__open_piece_at(past->region, past->address);
    if (!within.first) return 0;
    if (within.first->kind == TN__PIECE_FREE && tn__piece_end(within.first) >= end) {
        return take_past_piece(request, within.first, past->address, out);
    }
    if (!is_open_until(within.first, end)) return 0;
    try_window(&search, &within, past->address);
    if (!search.is_found || search.best.cost > search.best.missing_pages) return 0;
    *out = search.best;
    if (out->missing_pages == 0) out->first = tn__run_first(out->first);
    return 1;
}

/* The first of so many pages beside each other where nothing is mapped; page_count if there are
 * none. */
static size_t find_unmapped_pages(const tn__region *region, size_t count, size_t alignment) {
    size_t beside = 0;
    for (size_t page = 0; page < region->page_count; page++) {
        beside = region->views[page].frame ? 0 : beside + 1;
        if (beside >= count && tn__page_address(region, page + 1 - count) % alignment == 0) {
            return page + 1 - count;
        }
    }
    return region->page_count;
}

int tn__heap_find_unmapped(tn__heap *heap, const tn__request *request, tn__place *out) {
    for (tn__region *region = heap->regions; region; region = region->next) {
        size_t count;
        size_t first;
        if (region->zone != &heap->zones[request->zone] || !region->views) continue;
        count = (request->bytes + region->page_bytes - 1) / region->page_bytes;
        first = find_unmapped_pages(region, count, request->alignment);
        if (first == region->page_count) continue;
        *out = (tn__place){.region = region,
                           .first = tn__page_void_piece(region, first),
                           .address = tn__page_address(region, first),
                           .missing_pages = count};
        return 1;
    }
    return 0;
}

int tn__heap_find_gap(tn__heap *heap, const tn__request *request, int is_plentiful,
                      tn__place *out) {
    tn__tree_node *root = heap->zones[request->zone].voids;
    tn__tree_node *node = tn__tree_at_least(root, 0, 0);
    gap_search search = {.heap = heap, .request = request, .is_plentiful = is_plentiful};
    try_windows(&search);
    for (; node; node = tn__tree_next(root, node)) {
        gap found;
        if (!gap_of(tn__piece_of(node), &found)) continue;
        if (found.end - found.begin < request->bytes) continue;
        try_gap(&search, &found);
    }
    if (search.is_found) *out = search.best;
    return search.is_found;
}

/* ---- readiness and waits ------------------------------------------------------------------- */

int tn__heap_place_is_ready(const tn__request *request, const tn__place *place) {
    uintptr_t end = place->address + request->bytes;
    tn__piece *piece = tn__piece_at(place->first, place->address);
    for (; piece && piece->address < end; piece = piece->next) {
        if (piece->kind == TN__PIECE_VOID) continue;
        if (!tn__order_is_ready(request->stream, &piece->uses)) return 0;
    }
    return 1;
}

tn_status tn__heap_wait_place(tn__order *order, const tn__request *request,
                              const tn__place *place) {
    uintptr_t end = place->address + request->bytes;
    tn__piece *piece = tn__piece_at(place->first, place->address);
    for (; piece && piece->address < end; piece = piece->next) {
        if (piece->kind == TN__PIECE_VOID) continue;
        if (tn__order_is_ready(request->stream, &piece->uses)) continue;
        TN_TRY(tn__order_check_capture(order, request->stream->handle, "wait for another stream"));
        TN_TRY(tn__order_wait(order, request->stream, &piece->uses));
    }
    return TN_OK;
}
