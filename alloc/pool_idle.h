/* Idle pages and frames of a VMM pool, for the files that move them and give them back.
 *
 *   pool_idle.c    idle pages found, cut out, given back
 *   pool_frames.c  frames made and released, views unmapped
 *   pool_pages.c   idle pages moved to where they are wanted
 *   pool_grow.c    where that is
 */
#ifndef TENURE_POOL_IDLE_H
#define TENURE_POOL_IDLE_H

#include "pool_internal.h"

/* ---- pool_idle.c ----------------------------------------------------------------------------- */

/* Idle pages beside each other that were last freed at the same time. */
typedef struct tn__idle_pages {
    tn__region *region;
    tn__page_span span;
    uint64_t age;
} tn__idle_pages;

typedef struct tn__idle_filter {
    const tn__request *ready_for; /* only what its stream may use at once */
    int only_complete;            /* only what no stream may still use */
    const tn__region *excluded;   /* not these pages of this region */
    tn__page_span window;
    const tn__zone *spared; /* nothing of this zone */
} tn__idle_filter;

/* What passes the filter, longest idle first; *out is to be freed. */
tn_status tn__idle_list(tn_pool *pool, const tn__idle_filter *filter, tn__idle_pages **out,
                        size_t *count);

/* Cuts the idle pages out, so that one FREE piece is exactly the span. */
tn_status tn__idle_isolate(tn__heap *heap, tn__region *region, tn__page_span span, tn__piece **out);

/* ---- pool_pages.c ---------------------------------------------------------------------------- */

/* Fills the missing pages of a place in a gap; the place is in a run then. */
tn_status tn__gap_fill(tn_pool *pool, const tn__request *request, tn__place *place);

/* ---- pool_frames.c --------------------------------------------------------------------------- */

/* A frame that is active nowhere: a spare one, else a new one. */
tn_status tn__frame_take(tn_pool *pool, tn__frame **out);

/* Undoes a frame's mappings and gives its memory back. The frame is active nowhere and in no list;
 * what fails leaves it with the pool as a spare. */
tn_status tn__frame_release(tn_pool *pool, tn__frame *frame);
void tn__frame_spare(tn_pool *pool, tn__frame *frame);

/* 1 if no work may use any of the frame's dormant views. */
int tn__frame_is_complete(const tn__frame *frame);

/* Unmaps dormant views that nothing uses: the pages are neighbours. What fails may have undone
 * some. */
tn_status tn__views_unmap(tn_pool *pool, tn__region *region, tn__page_span span);

/* Unmaps the oldest dormant views if there are more than the pool likes to keep. It need not
 * succeed. */
void tn__views_limit(tn_pool *pool);

/* Gives the addresses of a region back that is VOID and has no use. */
tn_status tn__region_free(tn_pool *pool, tn__region *region);

#endif
