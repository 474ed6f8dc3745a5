/* The heap of a pool: pieces that tile its address space, and the indexes to find holes in it.
 *
 *   region   a reservation of addresses (VMM) or one segment of plain memory (PLAIN)
 *   page     what goes to and comes from the driver as a whole: a physical handle, or a segment
 *   piece    a stretch of a region that is all the same:
 *              LIVE     in a caller's hands
 *              FREE     mapped memory, with the streams that may still use it
 *              VOID     addresses with no memory of their own: never mapped, unmapped, or with the
 *                       mapping that was left when the memory moved (heap_frames.h), and then with
 *                       the streams that may still use it here
 *   run      neighbouring FREE pieces, as many as there are: what a block can be cut from
 *   gap      neighbouring FREE and VOID pieces: a block fits once the VOID pages are filled
 *
 *      |  LIVE  | FREE s1 | FREE s2 |        VOID         | FREE | LIVE |   pieces
 *               '------ run --------'                     'run --'
 *               '-------------------- gap ----------------------'
 *      |    page    |    page    |    page    |    page    |    page    |
 *
 * Invariants: the pieces of a region are in order of address and tile it; VOIDs are whole pages;
 * LIVE and FREE lie in active pages; neighbouring FREE pieces differ in their uses (equal ones are
 * one piece), and so do neighbouring VOIDs, except inside one call; a VOID with uses has a mapping
 * at every page; every LIVE piece is in the table of blocks and has a tag, the first piece of every
 * run in its zone's index of runs, and every VOID in that of voids. A page is idle if it lies in a
 * run as a whole: then its bit in region->idle is set, and at the first of neighbouring idle pages
 * region->runs_at has their run. At each page region->begins has the first piece that begins there.
 * The memory of a piece stays that until the heap is cleared: a late look at a tag finds a tag.
 *
 * A region may also be one block's own (DEDICATED zone: one page with a handle of its own, which is
 * never searched for other blocks and never moved), or a guest's: one GUEST piece of memory that
 * another process gave, which is in no index and no sum (pool_dedicated.h).
 *
 * Zones keep apart what would split each other's holes: small blocks, large ones that are
 * expected to live long (lifetime_classes.h), and other large ones. Pages move freely between them.
 */
#ifndef TENURE_HEAP_H
#define TENURE_HEAP_H

#include "block_table.h"
#include "heap_frames.h"
#include "heap_history.h"
#include "heap_track.h"
#include "heap_tree.h"
#include "heap_windows.h"
#include "lifetime_classes.h"
#include "page_map.h"
#include "pool_order.h"

#define TN__BLOCK_ALIGN ((size_t)512)
#define TN__SMALL_BYTES ((size_t)1 << 20) /* smaller blocks go to the small zone */

typedef enum tn__piece_kind {
    TN__PIECE_LIVE,
    TN__PIECE_FREE,
    TN__PIECE_VOID,
    TN__PIECE_GUEST
} tn__piece_kind;

typedef enum tn__zone_kind {
    TN__ZONE_LARGE,
    TN__ZONE_LONG,  /* large and expected to live long */
    TN__ZONE_SMALL, /* after all of large blocks */
    TN__ZONE_COUNT, /* of those that are searched */
    TN__ZONE_DEDICATED = TN__ZONE_COUNT,
    TN__ZONE_ALL
} tn__zone_kind;

typedef struct tn__region tn__region;
typedef struct tn__piece tn__piece;
typedef struct tn__zone tn__zone;

/* The tag of a LIVE piece is its address with the state of the block in the low bits, which are
 * free (TN__BLOCK_ALIGN). Who changes the state by compare and exchange has the block for itself;
 * and a tag that is looked at without a lock tells at once whether the piece is still the one that
 * was meant. */
typedef enum tn__block_state {
    TN__BLOCK_NONE,   /* the tag is 0: not a LIVE piece */
    TN__BLOCK_LIVE,   /* in a caller's hands */
    TN__BLOCK_HELD,   /* in a caller's hands, and a call is at work on it */
    TN__BLOCK_CACHED, /* in a thread cache: free */
    TN__BLOCK_HANDED  /* on its way to a thread cache: free */
} tn__block_state;
#define TN__TAG_STATE_MASK ((uint64_t)TN__BLOCK_ALIGN - 1)

struct tn__piece {
    _Alignas(64) _Atomic uint64_t tag; /* LIVE: address | tn__block_state; 0: not LIVE */
    struct tn__cache_lane *lane;       /* LIVE: where it goes when it is freed; NULL: to the heap */
    tn__piece *cache_next;             /* CACHED, HANDED */
    uint64_t freed_epoch;              /* CACHED, HANDED: of its lane's stream, at the free */
    size_t bytes;
    size_t asked_bytes; /* LIVE: what the caller asked for */
    const char *owner;  /* LIVE */
    const char *site;   /* LIVE */
    int is_owned;       /* LIVE: by a tensor */
    tn__piece_kind kind;
    uint64_t age; /* in operations: LIVE: when it was made; FREE, CACHED, HANDED: last freed */
    tn__tree_node node; /* VOID: by (address, region); first of a run: by (bytes, address) */
    tn__piece *previous;
    tn__piece *next;
    tn__region *region;
    tn__piece *run_other; /* first and last piece of a run: each other */
    uintptr_t address;
    tn__pool_stream *stream; /* LIVE: allocated for; FREE: freed on (NULL: no use is left) */
    tn__uses uses;           /* LIVE: recorded; FREE, VOID: may still run */
    uint64_t born;           /* LIVE: see lifetime_classes.h */
    uint32_t lifetime_slot;  /* LIVE: likewise */
    uint64_t trace_id;       /* LIVE: in the trace that is being written; 0: not in it */
};

struct tn__zone {
    tn__tree_node *runs;
    tn__tree_node *voids;
    size_t run_count;
    size_t void_count;
    tn__windows windows;
};

struct tn__region {
    tn__mapped_region map;
    tn__region *next;
    uint64_t number; /* differs from that of every other region of the heap */
    tn__zone *zone;
    size_t page_bytes;
    unsigned page_shift; /* its logarithm; 0: it is no power of two */
    size_t page_count;
    uint64_t *mapped;                /* a bit a page: its memory is active here */
    uint64_t *idle;                  /* a bit a page: it lies in a run as a whole */
    tn__piece **runs_at;             /* of the first of neighbouring idle pages: their run */
    tn__piece **begins;              /* VMM: the first piece that begins in each page, or NULL */
    tn__view *views;                 /* VMM: what is mapped at each page; NULL on PLAIN */
    struct tn__dedicated *dedicated; /* NULL: not a block's own */
    struct tn__guest *guest;         /* NULL: not a guest's */
    tn__piece *first;
    void *tool_heap; /* by what a memory checker knows it */
};

typedef struct tn__piece_slab tn__piece_slab;

typedef struct tn__heap {
    tn__zone zones[TN__ZONE_ALL];
    tn__region *regions;
    tn__block_table blocks;
    size_t block_count;
    tn__piece_slab *slabs;   /* what the pieces lie in */
    tn__piece *spare_pieces; /* linked by next */
    size_t spare_count;
    uint64_t region_count; /* made so far */
    uint64_t operation;    /* counts allocs and frees: the clock of ages */
    tn__heap_track track;
    size_t live_bytes;  /* of LIVE pieces, as asked for */
    size_t owned_bytes; /* part of live_bytes that tensors own */
    size_t mapped_bytes;
    size_t address_bytes;
    size_t guest_bytes;     /* as asked for; part of no other sum */
    size_t peak_live_bytes; /* since the pool was made */
    uint64_t claim;         /* counts the choices of frames, so that none is chosen twice */
    size_t inactive_count;  /* frames that are active nowhere */
    size_t dormant_count;   /* views that are not active */
    tn__lifetimes lifetimes;
    tn__history history;
} tn__heap;

static inline uintptr_t tn__piece_end(const tn__piece *piece) {
    return piece->address + piece->bytes;
}
static inline uint64_t tn__block_tag(uintptr_t address, tn__block_state state) {
    return (uint64_t)address | (uint64_t)state;
}
static inline tn__block_state tn__block_state_of(const tn__piece *piece) {
    uint64_t tag = atomic_load_explicit(&piece->tag, memory_order_relaxed);
    return (tn__block_state)(tag & TN__TAG_STATE_MASK);
}
/* 1 for a LIVE piece that is in a caller's hands. */
static inline int tn__piece_is_callers(const tn__piece *piece) {
    tn__block_state state = tn__block_state_of(piece);
    return state == TN__BLOCK_LIVE || state == TN__BLOCK_HELD;
}
/* 1 for a LIVE piece that is free memory: in a thread cache. */
static inline int tn__piece_is_cached(const tn__piece *piece) {
    return tn__block_state_of(piece) >= TN__BLOCK_CACHED;
}
static inline int tn__piece_is(const tn__piece *piece, tn__piece_kind kind) {
    return piece && piece->kind == kind;
}

/* What a caller asks for, once the arguments are found good. */
typedef struct tn__request {
    size_t asked_bytes;
    size_t bytes; /* asked_bytes rounded up to TN__BLOCK_ALIGN */
    size_t alignment;
    tn__pool_stream *stream;
    struct tn__cache_lane *lane; /* NULL: the block is not cached when it is freed */
    tn__zone_kind zone;
    unsigned flags;     /* TN_ALLOC_... */
    int needs_complete; /* only memory whose uses are known complete: the host will use it */
    tn_lifetime lifetime;
    uint32_t lifetime_slot;
    int is_owned;
    int only_ready;         /* not what needs a wait for another stream */
    int is_pinned;          /* no memory may move for it */
    const tn__zone *spared; /* no memory of this zone may; NULL: of each may */
    const char *owner;
    const char *site;
} tn__request;

/* ---- heap.c: pieces and their changes ------------------------------------------------------ */

/* At least `count` spare pieces, so that the next changes can not fail. */
tn_status tn__heap_reserve(tn__heap *heap, size_t count);

/* A region that is one VOID piece, or (is_mapped) one FREE piece; known to the page map. */
tn_status tn__heap_add_region(tn__heap *heap, struct tn_pool *pool, tn__zone_kind zone,
                              void *address, size_t bytes, size_t page_bytes, int is_mapped,
                              tn__region **out);

/* Forgets a region that is one piece and not LIVE. Its memory is the caller's business. */
void tn__heap_remove_region(tn__heap *heap, tn__region *region);

/* A region that is one GUEST piece. */
tn_status tn__heap_add_guest(tn__heap *heap, struct tn_pool *pool, void *address, size_t bytes,
                             size_t asked_bytes, tn__region **out);

/* Frees everything, whatever is in it: when the driver is gone. */
void tn__heap_clear(tn__heap *heap);

/* The block in a caller's hands that begins at the address, with no call at work on it; NULL if
 * there is none. */
tn__piece *tn__heap_find_block(tn__heap *heap, uintptr_t address);

/* The blocks in callers' hands, one after the other: after NULL comes the first, after the last
 * NULL. In order of address in each region. */
tn__piece *tn__heap_next_block(tn__heap *heap, tn__piece *block);

/* Cuts a FREE or VOID piece in two at an address inside; takes a spare piece. */
tn_status tn__heap_split(tn__heap *heap, tn__piece *piece, uintptr_t at);

/* Makes the request's bytes at the address, which lie in the run, a LIVE piece for its stream.
 * Takes two spare pieces. */
tn_status tn__heap_take(tn__heap *heap, tn__piece *run, uintptr_t address,
                        const tn__request *request, tn__piece **out);

/* The piece at an address that is not before `from`. */
static inline tn__piece *tn__piece_at(tn__piece *from, uintptr_t address) {
    while (tn__piece_end(from) <= address)
        from = from->next;
    return from;
}

/* Makes a LIVE piece FREE and joins it with its neighbours. piece->uses and ->stream are set; age
 * is when it was freed. */
void tn__heap_give(tn__heap *heap, tn__piece *piece, uint64_t age);

/* Makes a FREE piece VOID or a VOID one FREE. Uses and ages are left as they are, and neighbours
 * that are alike then are not joined yet. */
void tn__heap_change(tn__heap *heap, tn__piece *piece, tn__piece_kind kind);

/* Makes one FREE piece of this and the next one, with the uses of both. */
tn_status tn__heap_unite(tn__heap *heap, tn__piece *piece);

/* Forgets what has completed in every piece and joins what is then alike. */
void tn__heap_settle(tn__heap *heap);

/* Joins a FREE or VOID piece with neighbours that are alike. A piece that was joined to another is
 * spare then, and of 0 bytes until it is used again: joining it is a no-op. */
void tn__heap_join(tn__heap *heap, tn__piece *piece);

/* What the history is asked for a request, and told of the block that it became. */
uint64_t tn__heap_history_key(const tn__request *request);
void tn__heap_note_place(tn__heap *heap, uint64_t key, const tn__piece *block, int is_drained);

/* The first piece of the run that a FREE piece is in. */
tn__piece *tn__run_first(tn__piece *piece);

static inline tn__piece *tn__piece_of(tn__tree_node *node) {
    return TN__TREE_ITEM(node, tn__piece, node);
}

/* ---- heap_pages.c: pages of regions ---------------------------------------------------------- */

/* Page indexes of a region: [first, end). */
typedef struct tn__page_span {
    size_t first;
    size_t end;
} tn__page_span;
tn__page_span tn__pages_inside(const tn__region *region, uintptr_t begin, uintptr_t end);
tn__page_span tn__pages_touched(const tn__region *region, uintptr_t begin, uintptr_t end);
static inline uintptr_t tn__page_address(const tn__region *region, size_t page) {
    return region->map.begin + page * region->page_bytes;
}
/* The page that the address lies in; one past the last for the region's end. */
static inline size_t tn__page_at(const tn__region *region, uintptr_t address) {
    size_t offset = address - region->map.begin;
    return region->page_shift ? offset >> region->page_shift : offset / region->page_bytes;
}
static inline int tn__page_bit(const uint64_t *bits, size_t page) {
    return (bits[page / 64] >> (page % 64)) & 1;
}
size_t tn__bits_count(const uint64_t *bits, tn__page_span span);
void tn__bits_set(uint64_t *bits, tn__page_span span, int is_set);

/* The first page from `from` on, below `end`, whose bit is `is_set`; `end` if there is none. */
size_t tn__bits_find(const uint64_t *bits, size_t from, size_t end, int is_set);

/* The FREE piece that an idle page begins in; the VOID piece that a page which is not active lies
 * in. */
tn__piece *tn__page_idle_piece(const tn__region *region, size_t page);
tn__piece *tn__page_void_piece(const tn__region *region, size_t page);

/* VMM: the FREE or VOID piece that the address lies in; NULL if it is LIVE there, or if too many
 * pieces begin in that page to look for it. */
tn__piece *tn__open_piece_at(const tn__region *region, uintptr_t address);

/* 1 if work may still use a mapping that is not active. */
int tn__page_is_used(const tn__region *region, size_t page);

/* The frame has been mapped at the page, dormant for now; the view has been unmapped, and was
 * dormant. */
void tn__frame_attach(tn__heap *heap, tn__frame *frame, tn__region *region, size_t page);
void tn__frame_detach(tn__heap *heap, tn__view *view);

/* The memory of the frame is active at the view from now on, and no longer where it was before. */
void tn__page_activate(tn__heap *heap, tn__view *view);

/* The frame of an active page is active nowhere; its view stays, dormant. */
tn__frame *tn__page_deactivate(tn__heap *heap, tn__region *region, size_t page);

static inline size_t tn__view_page(const tn__view *view) {
    return (size_t)(view - view->region->views);
}

/* The frame of an active page. */
static inline tn__frame *tn__region_frame(const tn__region *region, size_t page) {
    return region->views[page].frame;
}

/* The next stretch of pages from `from` on that have a mapping, active or not; 0 if there is none.
 */
int tn__next_mapped(const tn__region *region, size_t from, tn__page_span *out);

/* ---- heap_zones.c: which blocks lie together ------------------------------------------------ */

/* The zone of the request, unless it is DEDICATED; notes its class of lifetimes in it. */
tn__zone_kind tn__heap_zone_for(tn__heap *heap, tn__request *request);

/* "large", "long", "small", "dedicated". */
const char *tn__zone_name(tn__zone_kind zone);

/* ---- heap_search.c: where a block goes ------------------------------------------------------ */

typedef struct tn__place {
    tn__region *region;
    tn__piece *first; /* of the run or gap */
    uintptr_t address;
    size_t missing_pages; /* not active: frames are to be made active there */
    size_t lost_views;    /* mappings that are undone for that */
    uint64_t cost;        /* of the driver calls for that */
} tn__place;

/* The best place in a run: 1 if found. Smallest sufficient run first, lowest address first, and
 * places that need no wait before those that do (request->only_ready: no others). */
int tn__heap_find_run(tn__heap *heap, const tn__request *request, tn__place *out);

/* The best place in a gap or window: cheapest driver calls, then smallest gap, then lowest address.
 * When memory is scarce (not plentiful) the fewest missing pages come before all that. */
int tn__heap_find_gap(tn__heap *heap, const tn__request *request, int is_plentiful, tn__place *out);

/* 1 if all of what lies at the place can be used by the request's stream without a wait. */
int tn__heap_place_is_ready(const tn__request *request, const tn__place *place);

/* Makes the request's stream wait for all uses of what lies at the place. */
tn_status tn__heap_wait_place(tn__order *order, const tn__request *request, const tn__place *place);

/* The cheapest place among the windows of the request's size and a little more. */
int tn__heap_find_window(tn__heap *heap, const tn__request *request, int is_plentiful,
                         tn__place *out);

/* The place of then: 1 if the request can have it without a driver call and without a wait. */
int tn__heap_find_past(tn__heap *heap, const tn__request *request, const tn__past *past,
                       tn__place *out);

/* A place in the request's zone where nothing is mapped, active or not: 1 if found. */
int tn__heap_find_unmapped(tn__heap *heap, const tn__request *request, tn__place *out);

/* What it takes to make a page of a window active. */
typedef enum tn__page_state {
    TN__PAGE_ACTIVE,  /* nothing: it is */
    TN__PAGE_DORMANT, /* its own frame, which is idle elsewhere: no driver call */
    TN__PAGE_EMPTY,   /* a frame must be mapped */
    TN__PAGE_OTHER,   /* mapped to a frame that is not to be had: unmap it, then as above */
    TN__PAGE_BLOCKED  /* the same, while work may still use that mapping */
} tn__page_state;
int tn__page_is_ready(const tn__request *request, const tn__region *region, size_t page);

/* A frame that is chosen (DORMANT) bears the claim then, and is not to be had by the same again. */
tn__page_state tn__page_choose(const tn__request *request, const tn__region *region, size_t page,
                               tn__page_span window, uint64_t claim);

/* The largest run of the heap in bytes. */
size_t tn__heap_largest_run(tn__heap *heap);

/* ---- heap_check.c: sums and invariants ------------------------------------------------------- */

typedef struct tn__heap_sums {
    size_t cached_bytes;
    size_t pending_bytes;
    size_t partial_bytes;
} tn__heap_sums;

/* 1 if a FREE piece has a use, not known complete, on another stream than the one that freed it. */
int tn__piece_is_pending(tn__piece *piece);

/* Pending: FREE pieces that are. Cached: the rest of idle pages. Partial: the rest of FREE, and
 * LIVE's rounding. Blocks in thread caches count as FREE, also for whether a page is idle. The
 * caches are stopped. */
void tn__heap_sum(tn__heap *heap, tn__heap_sums *out);

/* TN_INVALID_STATE with the first thing that does not hold; *live_blocks are those in callers'
 * hands. The caches are stopped. */
tn_status tn__heap_check(tn__heap *heap, size_t *live_blocks);

#endif
