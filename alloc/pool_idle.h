/* Idle pages of a VMM pool: found, cut out, given back. Shared by pool_idle.c, whose functions
 * these are, and pool_pages.c, which moves idle pages to where they are wanted.
 */
#ifndef TENURE_POOL_IDLE_H
#define TENURE_POOL_IDLE_H

#include "pool_internal.h"

typedef struct tn__idle_pages {
    tn__piece *piece;
    tn__page_span span; /* whole pages of the piece */
} tn__idle_pages;

typedef struct tn__idle_filter {
    const tn__pool_stream *ready_for; /* only what this stream may use at once */
    int only_complete;                /* only what no stream may still use */
    const tn__region *excluded;       /* not these pages of this region */
    tn__page_span window;
} tn__idle_filter;

/* What passes the filter, longest idle first; *out is to be freed. */
tn_status tn__idle_list(tn_pool *pool, const tn__idle_filter *filter, tn__idle_pages **out,
                        size_t *count);

/* Cuts the piece so that one piece is exactly the span. */
tn_status tn__idle_isolate(tn__heap *heap, tn__piece *piece, tn__page_span span, tn__piece **out);

/* Room for so many spare handles more. */
tn_status tn__spare_handles_reserve(tn_pool *pool, size_t more);

/* Gives a page back; one that the driver does not take stays with the pool as a spare, for which
 * there must be room. */
tn_status tn__handle_release(tn_pool *pool, tn__handle handle);

/* The page's memory is no longer behind its address: gives its handle. */
tn__handle tn__page_remove(tn_pool *pool, tn__region *region, size_t page);

/* Unmaps a RETIRED piece, which is VOID then: memory that has moved away, or that could not be
 * unmapped before. No work may use it there. */
tn_status tn__retired_unmap(tn_pool *pool, tn__piece *piece);

/* Gives the addresses of a region back that is one VOID piece. */
tn_status tn__region_free(tn_pool *pool, tn__region *region);

#endif
