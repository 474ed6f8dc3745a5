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

/* ---- runs ------------------------------------------------------------------------------------ */

/* The first stretch of the run that the stream can use without a wait and that is long enough. */
static int find_ready(tn__piece *run, const tn__request *request, uintptr_t *out) {
    uintptr_t begin = 0;
    int pieces = 0;
    for (tn__piece *piece = run; tn__piece_is(piece, TN__PIECE_FREE) && pieces < PIECES_MAX;
         piece = piece->next, pieces++) {
        if (!tn__order_is_ready(request->stream, &piece->uses)) {
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
        tn__piece *run = tn__run_of(node);
        if (find_ready(run, request, &address)) {
            set_place(out, run, address);
            return 1;
        }
        if (!found && find_low_end(run, request, &address)) {
            set_place(out, run, address);
            found = 1;
        }
    }
    if (request->stream->is_captured) return 0; /* it can not wait for a place */
    if (found || !node) return found;
    /* All that were looked at lack the room for the alignment; this one can not. */
    node = tn__tree_at_least(root, request->bytes + request->alignment, 0);
    if (!node || !find_low_end(tn__run_of(node), request, &address)) return 0;
    set_place(out, tn__run_of(node), address);
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

static size_t missing_pages(const tn__region *region, uintptr_t begin, size_t bytes) {
    tn__page_span span = tn__pages_touched(region, begin, begin + bytes);
    return span.end - span.first - tn__pages_mapped(region, span);
}

typedef struct gap_search {
    const tn__request *request;
    tn__place best;
    size_t best_gap_bytes;
    int is_found;
} gap_search;

/* A captured stream can wait for nobody: all that it gets must be ready. */
static int can_use(const gap_search *search, const gap *within, uintptr_t begin) {
    const tn__request *request = search->request;
    tn__piece *piece = tn__piece_at(within->first, begin);
    if (!request->stream->is_captured) return 1;
    for (; piece && piece->address < begin + request->bytes; piece = piece->next) {
        if (!tn__order_is_ready(request->stream, &piece->uses)) return 0;
    }
    return 1;
}

static void try_window(gap_search *search, const gap *within, uintptr_t begin) {
    tn__region *region = within->first->region;
    size_t gap_bytes = within->end - within->begin;
    size_t missing;
    if (begin < within->begin || begin > within->end) return;
    if (within->end - begin < search->request->bytes) return;
    if (!can_use(search, within, begin)) return;
    missing = missing_pages(region, begin, search->request->bytes);
    if (search->is_found) {
        if (missing > search->best.missing_pages) return;
        if (missing == search->best.missing_pages) {
            if (gap_bytes > search->best_gap_bytes) return;
            if (gap_bytes == search->best_gap_bytes && begin >= search->best.address) return;
        }
    }
    search->best = (tn__place){region, within->first, begin, missing};
    search->best_gap_bytes = gap_bytes;
    search->is_found = 1;
}

/* The count of missing pages is least where an edge of the block lies at an edge of mapped
 * memory: between such places it changes by the same steps. */
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

int tn__heap_find_gap(tn__heap *heap, const tn__request *request, tn__place *out) {
    tn__tree_node *root = heap->zones[request->zone].voids;
    tn__tree_node *node = tn__tree_at_least(root, 0, 0);
    gap_search search = {.request = request};
    for (; node; node = tn__tree_next(root, node)) {
        gap found;
        if (!gap_of(TN__TREE_ITEM(node, tn__piece, node), &found)) continue;
        if (found.end - found.begin < request->bytes) continue;
        try_gap(&search, &found);
    }
    if (search.is_found) *out = search.best;
    return search.is_found;
}

/* ---- waits ----------------------------------------------------------------------------------- */

tn_status tn__heap_wait_place(tn__order *order, const tn__request *request,
                              const tn__place *place) {
    uintptr_t end = place->address + request->bytes;
    tn__piece *piece = tn__piece_at(place->first, place->address);
    for (; piece && piece->address < end; piece = piece->next) {
        if (tn__order_is_ready(request->stream, &piece->uses)) continue;
        TN_TRY(tn__order_check_capture(order, request->stream->handle, "wait for another stream"));
        TN_TRY(tn__order_wait(order, request->stream, &piece->uses));
    }
    return TN_OK;
}
