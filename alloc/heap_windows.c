/* Windows: see heap_windows.h. */
#include "heap_windows.h"

#include "host_alloc.h"

static tn__window *window_of(tn__tree_node *node) { return TN__TREE_ITEM(node, tn__window, node); }

tn__window *tn__windows_find(const tn__windows *windows, size_t bytes) {
    return window_of(tn__tree_at_least(windows->root, bytes, 0));
}

tn__window *tn__windows_next(const tn__windows *windows, const tn__window *window) {
    return window_of(tn__tree_next(windows->root, &window->node));
}

static tn__window *remove_oldest(tn__windows *windows) {
    tn__window *window = windows->oldest;
    windows->oldest = window->newer;
    if (!windows->oldest) windows->newest = NULL;
    windows->count--;
    tn__tree_remove(&windows->root, &window->node);
    return window;
}

static void append(tn__windows *windows, tn__window *window) {
    window->newer = NULL;
    if (windows->newest) {
        windows->newest->newer = window;
    } else {
        windows->oldest = window;
    }
    windows->newest = window;
    windows->count++;
}

void tn__windows_add(tn__windows *windows, struct tn__region *region, uintptr_t address,
                     size_t bytes) {
    tn__tree_node *same = tn__tree_at_least(windows->root, bytes, address);
    tn__window *window;
    if (same && same->major == bytes && same->minor == address) return;
    window = windows->count == TN__WINDOWS_MAX ? remove_oldest(windows)
                                               : tn__host_alloc(1, sizeof *window);
    if (!window) return;
    window->region = region;
    tn__tree_insert(&windows->root, &window->node, bytes, address);
    append(windows, window);
}

void tn__windows_forget(tn__windows *windows, const struct tn__region *region) {
    for (size_t left = windows->count; left > 0; left--) {
        tn__window *window = remove_oldest(windows);
        if (!region || window->region == region) {
            tn__host_free(window);
            continue;
        }
        tn__tree_insert(&windows->root, &window->node, window->node.major, window->node.minor);
        append(windows, window);
    }
}
