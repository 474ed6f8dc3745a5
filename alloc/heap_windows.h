/* Windows: places that were built once for a block of some size, by exact size.
 *
 * When the pool has put frames under a block, the place is remembered. If a block of that size is
 * wanted again and no run has room, such a place may need no driver call at all: its views are
 * still there, and their frames may be idle elsewhere. So shapes that alternate cost nothing after
 * their first time. Windows are hints: what lies there now is looked at each time.
 *
 * At most TN__WINDOWS_MAX are kept, the newest.
 */
#ifndef TENURE_HEAP_WINDOWS_H
#define TENURE_HEAP_WINDOWS_H

#include "heap_tree.h"

#define TN__WINDOWS_MAX 16384

typedef struct tn__window {
    tn__tree_node node; /* by (bytes, address) */
    struct tn__window *newer;
    struct tn__region *region;
} tn__window;

typedef struct tn__windows {
    tn__tree_node *root;
    tn__window *oldest;
    tn__window *newest;
    size_t count;
} tn__windows;

/* Remembers the place; if there is no memory for that, it does not. */
void tn__windows_add(tn__windows *windows, struct tn__region *region, uintptr_t address,
                     size_t bytes);

/* The smallest window of at least so many bytes, the one after it; NULL if there is none. */
tn__window *tn__windows_find(const tn__windows *windows, size_t bytes);
tn__window *tn__windows_next(const tn__windows *windows, const tn__window *window);

/* Forgets the windows of a region; of all regions if it is NULL. */
void tn__windows_forget(tn__windows *windows, const struct tn__region *region);

#endif
