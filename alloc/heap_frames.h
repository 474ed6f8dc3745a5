/* Physical memory and its mappings: frames and views.
 *
 *   frame   one physical handle of the pool's page size
 *   view    one page of a region at which a frame is mapped
 *
 * A frame may be mapped at several pages, and is *active* at one of them at most: there the page
 * is part of FREE and LIVE pieces. At the others it is *dormant*: the mapping stays, nobody is
 * given its address, and making it the active one needs no driver call. So a shape that comes back
 * finds its pages mapped.
 *
 *      region A   |  active: LIVE  |     ...
 *                         ^
 *      frame  ------------+- - - - - - .  (dormant: in a VOID piece)
 *                                      v
 *      region B              ...    |      |
 *
 * Invariants: a view is in the list of its frame; frame->active is one of them or NULL; a page's
 * bit in region->mapped is set if its view is active; heap->dormant_count counts the other views.
 * The functions that keep these are in heap_pages.c; they make no driver call.
 */
#ifndef TENURE_HEAP_FRAMES_H
#define TENURE_HEAP_FRAMES_H

#include <stdint.h>

#include "driver.h"

typedef struct tn__frame tn__frame;
typedef struct tn__view tn__view;

struct tn__view {
    tn__frame *frame; /* NULL: nothing is mapped here */
    tn__view *next;   /* of the same frame */
    struct tn__region *region;
    uint64_t age;    /* dormant: since when, in operations of the pool */
    int is_unusable; /* mapped, but without access: it must be unmapped before anything else */
    int is_paused;   /* active, but nothing is mapped here: the pool is paused (pool_pause.h) */
};

struct tn__frame {
    tn__frame *next;   /* spare frames */
    tn__handle handle; /* 0: given back, the pool is paused */
    tn__view *active;  /* NULL: a spare frame */
    tn__view *views;
    uint64_t claim; /* the filling that has chosen it last */
};

#endif
